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
    /// There is no manifest.
    #[error("{path}: no Esker dataset (no esker.json in it){hint}")]
    NotADataset {
        /// The directory looked at.
        path: PathBuf,
        /// What it may be instead.
        hint: String,
    },
    /// A manifest that is not what was written.
    #[error("{path}: the manifest is damaged: {problem}; restore it from a copy, or make the dataset again")]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Written by a newer Esker.
    #[error("{path}: format version {found}, this esker reads {supported}; use a newer esker")]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// Ours.
        supported: u32,
    },
    /// A file that is shorter or longer than the manifest says.
    #[error(
        "{path}: the manifest promises {expected_bytes} bytes, the file has {found_bytes}; restore it from a copy, or make the dataset again"
    )]
    WrongLength {
        /// The file.
        path: PathBuf,
        /// By the manifest.
        expected_bytes: u64,
        /// In fact.
        found_bytes: u64,
    },
    /// A file whose content contradicts its header or manifest.
    #[error("{path}: expected {expected}, found {found}; run `esker verify`")]
    Inconsistent {
        /// The file.
        path: PathBuf,
        /// By the manifest or the format.
        expected: String,
        /// In fact.
        found: String,
    },
    /// The name is taken.
    #[error("{path}: exists already; choose another name, or replace it with --overwrite")]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// The name belongs to something that is no dataset.
    #[error("{path}: exists and is not Esker's to replace; move it away, or choose another name")]
    Foreign {
        /// The file or directory.
        path: PathBuf,
    },
    /// Another process is at it.
    #[error("{path}: another esker is writing it; wait for it, or stop it")]
    Busy {
        /// The directory.
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

    /// A content that contradicts what it should be.
    pub fn inconsistent(path: &Path, expected: impl ToString, found: impl ToString) -> StoreError {
        StoreError::Inconsistent {
            path: path.to_path_buf(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}
