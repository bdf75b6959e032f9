use esker_types::{ByteCount, ErrorKind};

/// Errors of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library is missing, or too old.
    #[error("{library}: {problem}; {remedy}")]
    Library {
        /// Its name.
        library: &'static str,
        /// The problem found.
        problem: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The GPU does not exist.
    #[error(
        "there is no GPU {asked}: the driver shows {found}; take --device cuda:N with a smaller N, or --device cpu"
    )]
    NoDevice {
        /// Its number.
        asked: u32,
        /// Number of GPUs.
        found: u32,
    },
    /// The GPU is too old, or lacks the requested precision.
    #[error(
        "{name} has compute capability {}.{}, and {}.{} is needed; take --device cpu, or --precision f32 where TF32 or bf16 was asked for",
        found.0, found.1, needed.0, needed.1
    )]
    Capability {
        /// Its model.
        name: String,
        /// Its compute capability.
        found: (u32, u32),
        /// The compute capability needed.
        needed: (u32, u32),
    },
    /// No memory is left for the driver or a library.
    #[error(
        "{what} failed: the GPU has no memory left for it ({found}); end other programs on this GPU, lower --gpu-memory, or take --device cpu"
    )]
    Full {
        /// The attempted operation.
        what: &'static str,
        /// The error's name.
        found: String,
    },
    /// The driver or a library refused a call.
    #[error("{what} failed on the GPU: {found}; if it happens again, run with --device cpu and report it")]
    Call {
        /// The attempted operation.
        what: &'static str,
        /// The error's name and text.
        found: String,
    },
    /// The device is out of memory.
    #[error(
        "no room on the GPU for {asked} more: {held} of the {limit} allowed are in use, and {free} are free on the device; lower --batch, --fanout or --hidden, raise --gpu-memory, or end other programs on this GPU"
    )]
    Memory {
        /// Bytes requested.
        asked: ByteCount,
        /// Bytes in use.
        held: ByteCount,
        /// Limit on the bytes in use.
        limit: ByteCount,
        /// Free bytes of the device.
        free: ByteCount,
    },
    /// No host memory can be pinned for the GPU.
    #[error(
        "{asked} of host memory could not be pinned for the GPU to read ({found}); take a smaller --feature-cache, or let the program lock more memory (ulimit -l, and the memory of its cgroup)"
    )]
    Pinned {
        /// Bytes requested.
        asked: ByteCount,
        /// The error's name and text.
        found: String,
    },
    /// A kernel could not be compiled.
    #[error(
        "{file} could not be compiled for {architecture}: {log}; update the CUDA libraries, or take --device cpu"
    )]
    Compile {
        /// The file.
        file: &'static str,
        /// The target architecture.
        architecture: String,
        /// The compiler's output.
        log: String,
    },
}

/// Result of everything in this crate.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

impl CudaError {
    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            CudaError::NoDevice { .. } | CudaError::Capability { .. } => ErrorKind::Asked,
            _ => ErrorKind::World,
        }
    }
}
