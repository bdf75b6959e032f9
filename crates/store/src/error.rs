use std::{
    io,
    path::{Path, PathBuf},
};

/// What can go wrong with a dataset directory.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The disk is full.
    #[error(
        "{path}: no space left on this disk; free some and run the same command again, it goes on where it stopped"
    )]
    DiskFull {
        /// The file being written.
        path: PathBuf,
    },
}

/// Result of everything in this crate.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

impl StoreError {
    /// For `map_err` on IO results.
    pub fn io(path: &Path) -> impl FnOnce(io::Error) -> StoreError + '_ {
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                StoreError::DiskFull { path: path.to_path_buf() }
            }
            _ => StoreError::Io { path: path.to_path_buf(), source },
        }
    }
}
