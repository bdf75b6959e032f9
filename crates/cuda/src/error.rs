use esker_types::{ByteCount, ErrorKind};

/// What can go wrong with a GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library that is not there, or not new enough.
    #[error("{library}: {problem}; {remedy}")]
    Library {
        /// Its name.
        library: &'static str,
        /// What was found.
        problem: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A GPU that is not there.
    #[error(
        "there is no GPU {asked}: the driver shows {found}; take --device cuda:N with a smaller N, or --device cpu"
    )]
    NoDevice {
        /// Its number.
        asked: u32,
        /// GPUs there are.
        found: u32,
    },
    /// A GPU that is too old, or lacks the precision asked for.
    #[error(
        "{name} has compute capability {}.{}, and {}.{} is needed; take --device cpu, or --precision f32 where TF32 or bf16 was asked for",
        found.0, found.1, needed.0, needed.1
    )]
    Capability {
        /// Its model.
        name: String,
        /// What it has.
        found: (u32, u32),
        /// What is needed.
        needed: (u32, u32),
    },
    /// No memory left for what the driver or a library needs itself.
    #[error(
        "{what} failed: the GPU has no memory left for it ({found}); end other programs on this GPU, lower --gpu-memory, or take --device cpu"
    )]
    Full {
        /// What was tried.
        what: &'static str,
        /// The error's name.
        found: String,
    },
    /// A call that the driver or a library refused.
    #[error("{what} failed on the GPU: {found}; if it happens again, run with --device cpu and report it")]
    Call {
        /// What was tried.
        what: &'static str,
        /// The error's name and text.
        found: String,
    },
    /// No room on the device.
    #[error(
        "no room on the GPU for {asked} more: {held} of the {limit} allowed are in use, and {free} are free on the device; lower --batch, --fanout or --hidden, raise --gpu-memory, or end other programs on this GPU"
    )]
    Memory {
        /// What was asked for.
        asked: ByteCount,
        /// What is held.
        held: ByteCount,
        /// What may be held.
        limit: ByteCount,
        /// What the device has free.
        free: ByteCount,
    },
    /// No host memory for the GPU to read from.
    #[error(
        "{asked} of host memory could not be pinned for the GPU to read ({found}); take a smaller --feature-cache, or let the program lock more memory (ulimit -l, and the memory of its cgroup)"
    )]
    Pinned {
        /// What was asked for.
        asked: ByteCount,
        /// The error's name and text.
        found: String,
    },
    /// A kernel that could not be compiled.
    #[error(
        "{file} could not be compiled for {architecture}: {log}; update the CUDA libraries, or take --device cpu"
    )]
    Compile {
        /// The file.
        file: &'static str,
        /// For what.
        architecture: String,
        /// What the compiler said.
        log: String,
    },
}

/// Result of everything in this crate.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

impl CudaError {
    /// What it is about.
    pub fn kind(&self) -> ErrorKind {
        match self {
            CudaError::NoDevice { .. } | CudaError::Capability { .. } => ErrorKind::Asked,
            _ => ErrorKind::World,
        }
    }
}
