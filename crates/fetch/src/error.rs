use esker_store::StoreError;
use esker_types::{ByteCount, ErrorKind};
use std::path::PathBuf;

/// What can go wrong while rows are fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The dataset could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There are no rows to fetch.
    #[error("{dataset} has no node features; import it with features, or generate it with --dim")]
    NoFeatures {
        /// The dataset.
        dataset: String,
    },
    /// Samples could not be written or read.
    #[error(transparent)]
    Sample(#[from] esker_sample::SampleError),
    /// Packed rows do not fit the disk.
    #[error(
        "packed rows take {needed} ({} bytes) on disk at least, and --disk-budget allows {allowed}; allow --disk-budget {}, sample fewer epochs, or set more rows aside with --feature-cache",
        needed.0, needed.flag_value()
    )]
    Disk {
        /// The least that would do.
        needed: ByteCount,
        /// How much there is.
        allowed: ByteCount,
    },
    /// What was read is not what was packed.
    #[error(
        "{path}: {what}: not what was packed, by its checksum; check the disk, remove the directory and prepare again"
    )]
    Damaged {
        /// The file.
        path: String,
        /// Which batch of which epoch, and what of it.
        what: String,
    },
    /// What was read of a file without a name is not what was written.
    #[error("{folder}: {what}: not what was written there, by its checksum; check the disk and start again")]
    Scratch {
        /// Where the file was.
        folder: String,
        /// What of which batch.
        what: String,
    },
    /// A stage of a pipeline panicked.
    #[error(transparent)]
    Panicked(#[from] crate::pipeline::StagePanicked),
    /// What was asked for cannot be done.
    #[error("{problem}")]
    Request {
        /// What, why not, and what can be.
        problem: String,
    },
    /// A column that a dataset does not have.
    #[error("{}: there is no column {name}; there are {}", dataset.display(), there.join(", "))]
    Column {
        /// The dataset.
        dataset: PathBuf,
        /// What was asked for.
        name: String,
        /// What there is.
        there: Vec<String>,
    },
    /// Rows do not fit.
    #[error(
        "{what} takes {needed}, and {allowed} are left for it; allow more memory or take another strategy"
    )]
    Memory {
        /// Which rows.
        what: String,
        /// How much they take.
        needed: ByteCount,
        /// How much there is.
        allowed: ByteCount,
    },
    /// Somebody asked for an end; what was done is safe.
    #[error("stopped")]
    Stopped,
    /// A row that is not there.
    #[error("row {row} is asked for, and there are rows 0 to {last}; check where the node id comes from")]
    Row {
        /// The row.
        row: u64,
        /// The last there is.
        last: u64,
    },
}

/// Result of everything in this crate.
pub type Result<T, E = FetchError> = std::result::Result<T, E>;

impl FetchError {
    /// What it is about.
    pub fn kind(&self) -> ErrorKind {
        match self {
            FetchError::Store(error) => error.kind(),
            FetchError::Sample(error) => error.kind(),
            FetchError::NoFeatures { .. }
            | FetchError::Disk { .. }
            | FetchError::Request { .. }
            | FetchError::Column { .. }
            | FetchError::Memory { .. } => ErrorKind::Asked,
            FetchError::Stopped => ErrorKind::Stopped,
            FetchError::Damaged { .. }
            | FetchError::Scratch { .. }
            | FetchError::Panicked(_)
            | FetchError::Row { .. } => ErrorKind::World,
        }
    }
}
