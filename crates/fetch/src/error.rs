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
        dataset: PathBuf,
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
        /// The smallest size that works.
        needed: ByteCount,
        /// The limit.
        allowed: ByteCount,
    },
    /// Packed data does not match its checksum.
    #[error(
        "{path}: {what}: not what was packed, by its checksum; check the disk, remove the directory and prepare again"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What of which batch and epoch.
        what: String,
    },
    /// Data of an unlinked temporary file does not match its checksum.
    #[error("{folder}: {what}: not what was written there, by its checksum; check the disk and start again")]
    Scratch {
        /// The directory of the file.
        folder: PathBuf,
        /// What of which batch.
        what: String,
    },
    /// A stage of a pipeline panicked.
    #[error(transparent)]
    Panicked(#[from] crate::pipeline::StagePanicked),
    /// A directory with finished packed rows of other batches.
    #[error(
        "{directory} holds finished packed rows of other batches than these; give the flags they were made with, or another --prepared, or remove it"
    )]
    OtherBatches {
        /// The directory.
        directory: PathBuf,
    },
    /// A graph too large to be cut into segments.
    #[error("segments name rows by 32 bits, and there are {rows}; allow more --disk-budget")]
    SegmentRows {
        /// Number of rows.
        rows: u64,
    },
    /// A batch that reads more rows than placements can address.
    #[error("a batch reads {rows} rows, and {most} can be named; take smaller batches")]
    BatchRows {
        /// Rows of the batch.
        rows: u64,
        /// Largest number of rows.
        most: u32,
    },
    /// A column that a dataset does not have.
    #[error("{dataset}: there is no column {name}; there are {}", there.join(", "))]
    Column {
        /// The dataset.
        dataset: PathBuf,
        /// The requested name.
        name: String,
        /// The names of the dataset's columns.
        there: Vec<String>,
    },
    /// The feature rows do not fit in memory.
    #[error(
        "holding the features of {dataset} in memory takes {needed}, and {allowed} are left for it; allow more memory or take another strategy"
    )]
    Memory {
        /// The dataset.
        dataset: PathBuf,
        /// Bytes needed.
        needed: ByteCount,
        /// Bytes allowed.
        allowed: ByteCount,
    },
    /// A partition of learned rows that does not match its checksum.
    #[error(
        "{path}: partition {partition} is not what was written: expected checksum {expected}, found {found}; check the disk, and start the run again with another --out"
    )]
    TablePartition {
        /// The file.
        path: PathBuf,
        /// The partition.
        partition: u32,
        /// The checksum of what was written.
        expected: String,
        /// That of what was read.
        found: String,
    },
    /// Feature rows of a partition that do not match their checksum.
    #[error(
        "{path}: the feature rows of partition {partition} are not what was written, by their checksum; check the disk, remove the directory, and they are made again"
    )]
    FeaturePartition {
        /// The file.
        path: PathBuf,
        /// The partition.
        partition: u32,
    },
    /// Feature rows by partition that do not belong to their dataset.
    #[error("{path}: expected {expected}, found other arrays; remove the directory, and they are made again")]
    PartitionedFeatures {
        /// The directory.
        path: PathBuf,
        /// What must be there.
        expected: String,
    },
    /// Initial rows that cannot be made.
    #[error("{said}")]
    InitialRows {
        /// What is wrong with them.
        said: String,
    },
    /// A stop was requested. Finished work is safe.
    #[error("stopped")]
    Stopped,
    /// A row that does not exist.
    #[error("row {row} is asked for, and there are rows 0 to {last}; check where the node id comes from")]
    Row {
        /// The row.
        row: u64,
        /// The last row.
        last: u64,
    },
}

/// Result type of this crate.
pub type Result<T, E = FetchError> = std::result::Result<T, E>;

impl FetchError {
    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            FetchError::Store(error) => error.kind(),
            FetchError::Sample(error) => error.kind(),
            FetchError::NoFeatures { .. }
            | FetchError::Disk { .. }
            | FetchError::OtherBatches { .. }
            | FetchError::SegmentRows { .. }
            | FetchError::BatchRows { .. }
            | FetchError::Column { .. }
            | FetchError::Memory { .. } => ErrorKind::Asked,
            FetchError::Stopped => ErrorKind::Stopped,
            FetchError::Damaged { .. }
            | FetchError::Scratch { .. }
            | FetchError::Panicked(_)
            | FetchError::TablePartition { .. }
            | FetchError::FeaturePartition { .. }
            | FetchError::PartitionedFeatures { .. }
            | FetchError::InitialRows { .. }
            | FetchError::Row { .. } => ErrorKind::World,
        }
    }
}
