use crate::RunPosition;
use esker_device::DeviceError;
use esker_fetch::FetchError;
use esker_fetch::pipeline::StagePanicked;
use esker_sample::SampleError;
use esker_store::StoreError;
use esker_types::ErrorKind;
use std::path::PathBuf;

/// What can go wrong between a dataset and a batch.
#[derive(Debug, thiserror::Error)]
pub enum StrategyError {
    /// Sampling failed.
    #[error(transparent)]
    Sample(SampleError),
    /// Rows could not be fetched.
    #[error(transparent)]
    Fetch(FetchError),
    /// A file could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What was asked for cannot be done.
    #[error("{problem}; {remedy}")]
    Request {
        /// What was asked, and what there is.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// Packed rows cannot go where the dataset is.
    #[error(
        "{path}: packed rows go here, and it cannot be written: {source}; choose another directory for them with --prepared DIR, or make this one writable"
    )]
    ReadOnly {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The device that trains failed, or has no room.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A source ended before its run did.
    #[error("the batches ended before {at}; resume the run with the configuration it was started with")]
    Ended {
        /// The batch that was to come.
        at: Box<RunPosition>,
    },
    /// A stage panicked.
    #[error(transparent)]
    Panicked(#[from] StagePanicked),
    /// State of an earlier process could not be written or read.
    #[error("{name}: {problem}; start the run again with another --out")]
    State {
        /// What it is.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Somebody asked for an end before there was a batch.
    #[error("stopped")]
    Stopped,
    /// A pool of threads could not be started.
    #[error("{threads} threads could not be started: {problem}; ask for fewer with --threads")]
    Threads {
        /// How many.
        threads: usize,
        /// What the system said.
        problem: String,
    },
}

/// Result of everything in this crate.
pub type Result<T, E = StrategyError> = std::result::Result<T, E>;

impl From<SampleError> for StrategyError {
    fn from(error: SampleError) -> StrategyError {
        match error {
            SampleError::Stopped => StrategyError::Stopped,
            error => StrategyError::Sample(error),
        }
    }
}

impl From<FetchError> for StrategyError {
    fn from(error: FetchError) -> StrategyError {
        match error {
            FetchError::Stopped => StrategyError::Stopped,
            error => StrategyError::Fetch(error),
        }
    }
}

impl StrategyError {
    /// What it is about.
    pub fn kind(&self) -> ErrorKind {
        match self {
            StrategyError::Sample(error) => error.kind(),
            StrategyError::Fetch(error) => error.kind(),
            StrategyError::Store(error) => error.kind(),
            StrategyError::Request { .. } => ErrorKind::Asked,
            StrategyError::Stopped => ErrorKind::Stopped,
            StrategyError::ReadOnly { .. }
            | StrategyError::Device(_)
            | StrategyError::Ended { .. }
            | StrategyError::Panicked(_)
            | StrategyError::State { .. }
            | StrategyError::Threads { .. } => ErrorKind::World,
        }
    }

    pub(crate) fn request(problem: impl ToString, remedy: impl ToString) -> StrategyError {
        StrategyError::Request { problem: problem.to_string(), remedy: remedy.to_string() }
    }
}
