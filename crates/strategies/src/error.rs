use esker_fetch::FetchError;
use esker_sample::SampleError;
use esker_store::StoreError;

/// What can go wrong between a dataset and a batch.
#[derive(Debug, thiserror::Error)]
pub enum StrategyError {
    /// Sampling failed.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Rows could not be fetched.
    #[error(transparent)]
    Fetch(#[from] FetchError),
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
    /// The processor that trains failed, or has no room.
    #[error("{0}")]
    Device(String),
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

impl StrategyError {
    pub(crate) fn request(problem: impl ToString, remedy: impl ToString) -> StrategyError {
        StrategyError::Request { problem: problem.to_string(), remedy: remedy.to_string() }
    }
}
