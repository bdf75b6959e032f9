use esker_store::StoreError;
use esker_types::{ByteCount, ErrorKind};
use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong while sampling.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// The dataset could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What was asked for cannot be done on this graph.
    #[error("{problem}; {remedy}")]
    Request {
        /// What was asked, and what there is.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// A seed that is no node of the graph.
    #[error("seed {found} is not a node: the graph has nodes 0 to {last}; check the list of seeds")]
    Seed {
        /// The seed.
        found: u64,
        /// The largest node id.
        last: u64,
    },
    /// A batch needs more memory than the sampler may use.
    #[error(
        "sampling {what} needs {needed}, the sampler may use {allowed}; allow {}, or take smaller batches or fan-outs",
        needed.flag_value()
    )]
    Memory {
        /// What grew too large.
        what: String,
        /// How much it needs.
        needed: ByteCount,
        /// How much there is.
        allowed: ByteCount,
    },
    /// Somebody asked for an end.
    #[error("stopped")]
    Stopped,
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The trace.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A trace that is not what was written.
    #[error("{path}: expected {expected}, found {found}; delete the trace and sample again")]
    Trace {
        /// The trace.
        path: PathBuf,
        /// By the format.
        expected: String,
        /// In fact.
        found: String,
    },
}

/// Result of everything in this crate.
pub type Result<T, E = SampleError> = std::result::Result<T, E>;

impl SampleError {
    /// What it is about.
    pub fn kind(&self) -> ErrorKind {
        match self {
            SampleError::Store(error) => error.kind(),
            SampleError::Request { .. } | SampleError::Seed { .. } | SampleError::Memory { .. } => {
                ErrorKind::Asked
            }
            SampleError::Stopped => ErrorKind::Stopped,
            SampleError::Io { .. } | SampleError::Trace { .. } => ErrorKind::World,
        }
    }

    /// For `map_err` on IO results.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> SampleError + '_ {
        move |source| match StoreError::io(path)(source) {
            StoreError::Io { path, source } => SampleError::Io { path, source },
            full => full.into(),
        }
    }

    pub(crate) fn trace(path: &Path, expected: impl ToString, found: impl ToString) -> SampleError {
        SampleError::Trace {
            path: path.to_path_buf(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    pub(crate) fn request(problem: impl ToString, remedy: impl ToString) -> SampleError {
        SampleError::Request { problem: problem.to_string(), remedy: remedy.to_string() }
    }
}
