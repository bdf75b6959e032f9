use esker_fetch::FetchError;
use esker_sample::SampleError;

/// What can go wrong between a dataset and a batch.
#[derive(Debug, thiserror::Error)]
pub enum StrategyError {
    /// Sampling failed.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Rows could not be fetched.
    #[error(transparent)]
    Fetch(#[from] FetchError),
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
