use esker_nn::NnError;
use esker_sample::SampleError;
use esker_store::StoreError;
use esker_strategies::{MemoryTable, StrategyError};
use esker_types::{ByteCount, ErrorKind};
use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong while training, evaluating or predicting.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The dataset could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Sampling failed.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// A batch could not be brought.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// The model refused.
    #[error(transparent)]
    Nn(#[from] NnError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] esker_nn::DeviceError),
    /// The disk refused.
    #[error(transparent)]
    Engine(#[from] esker_io::IoError),
    /// A run that cannot be.
    #[error("{problem}; {remedy}")]
    Config {
        /// What was asked, and what there is.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// What files, disks or other processes do not allow.
    #[error("{problem}; {remedy}")]
    Machine {
        /// What was found.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// More memory than was promised.
    #[error(
        "this run needs {needed} ({} bytes), and --memory allows {allowed}:\n{table}\nallow --memory {}, or take a smaller batch, fan-out, model or another strategy",
        needed.0, needed.flag_value()
    )]
    Memory {
        /// The smallest budget that would do.
        needed: ByteCount,
        /// The budget.
        allowed: ByteCount,
        /// What needs it.
        table: MemoryTable,
    },
    /// More memory of the processor's own than was promised.
    #[error(
        "this run needs {needed} ({} bytes) of the device's memory, and --gpu-memory allows {allowed}:\n{table}\nallow --gpu-memory {}, take a smaller batch, fan-out or model, or train with --device cpu",
        needed.0, needed.flag_value()
    )]
    DeviceMemory {
        /// The smallest budget that would do.
        needed: ByteCount,
        /// The budget.
        allowed: ByteCount,
        /// What needs it.
        table: MemoryTable,
    },
    /// Somebody asked it to stop while it evaluated.
    #[error("stopped")]
    Stopped,
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A file of a run that is not what was written.
    #[error("{path}: expected {expected}, found {found}; {remedy}")]
    File {
        /// The file.
        path: PathBuf,
        /// By the format.
        expected: String,
        /// In fact.
        found: String,
        /// What to do.
        remedy: String,
    },
}

/// Result of everything in this crate.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

impl TrainError {
    /// What it is about.
    pub fn kind(&self) -> ErrorKind {
        match self {
            TrainError::Store(error) => error.kind(),
            TrainError::Sample(error) => error.kind(),
            TrainError::Strategy(error) => error.kind(),
            TrainError::Nn(error) => error.kind(),
            TrainError::Engine(error) => error.kind(),
            TrainError::Config { .. } | TrainError::Memory { .. } | TrainError::DeviceMemory { .. } => {
                ErrorKind::Asked
            }
            TrainError::Stopped => ErrorKind::Stopped,
            TrainError::Device(_)
            | TrainError::Machine { .. }
            | TrainError::Io { .. }
            | TrainError::File { .. } => ErrorKind::World,
        }
    }

    /// For `map_err` on IO results.
    pub fn io(path: &Path) -> impl FnOnce(io::Error) -> TrainError + '_ {
        move |source| match StoreError::io(path)(source) {
            StoreError::Io { path, source } => TrainError::Io { path, source },
            full => full.into(),
        }
    }

    pub(crate) fn machine(problem: impl ToString, remedy: impl ToString) -> TrainError {
        TrainError::Machine { problem: problem.to_string(), remedy: remedy.to_string() }
    }

    pub(crate) fn config(problem: impl ToString, remedy: impl ToString) -> TrainError {
        TrainError::Config { problem: problem.to_string(), remedy: remedy.to_string() }
    }

    pub(crate) fn file(
        path: &Path,
        expected: impl ToString,
        found: impl ToString,
        remedy: impl ToString,
    ) -> TrainError {
        TrainError::File {
            path: path.to_path_buf(),
            expected: expected.to_string(),
            found: found.to_string(),
            remedy: remedy.to_string(),
        }
    }
}
