use esker_types::ByteCount;

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
