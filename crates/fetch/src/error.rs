use esker_store::StoreError;
use esker_types::ByteCount;

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
