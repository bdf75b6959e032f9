use esker_io::IoError;
use esker_types::{ByteCount, ErrorKind};
use std::{
    io,
    path::{Path, PathBuf},
};

/// What can go wrong with a dataset directory.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// An array in parts where one file is needed.
    #[error(
        "{path}: the array lies in {parts} parts and cannot be mapped; run `esker stripe --undo`, or take another strategy"
    )]
    InParts {
        /// Its first part.
        path: PathBuf,
        /// How many there are.
        parts: usize,
    },
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The disk is full.
    #[error("{path}: no space left on this disk; free some")]
    DiskFull {
        /// The file being written.
        path: PathBuf,
    },
    /// A file that the manifest lists is not there.
    #[error(
        "{path}: the manifest lists this file, and it is not there; restore it from a copy, or make the dataset again"
    )]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The directory of a part of striped arrays is not there.
    #[error(
        "{path}: expected the directory that holds a part of striped arrays, or a link to it, found {found}; \
         mount its disk, or link the directory anew: ln -sfn DIRECTORY {path}"
    )]
    StripeMissing {
        /// `stripe-i` of the dataset.
        path: PathBuf,
        /// What is there.
        found: String,
    },
    /// Something about striping that cannot be.
    #[error("{path}: {problem}")]
    Stripe {
        /// The dataset, or the directory for its parts.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// Striped another way than asked for.
    #[error("{path}: is striped already, in stripes of {found}; run `esker stripe {path} --undo` first")]
    Striped {
        /// The dataset.
        path: PathBuf,
        /// How it is striped.
        found: String,
    },
    /// A disk without room for what is to be written.
    #[error(
        "{path}: {needed} are needed on this disk, {available} are free; free some, or choose another directory"
    )]
    NoRoom {
        /// A directory on the disk.
        path: PathBuf,
        /// What is to be written there.
        needed: ByteCount,
        /// What the disk has.
        available: ByteCount,
    },
    /// Reading or writing failed on the way.
    #[error(transparent)]
    Engine(IoError),
    /// There is no manifest.
    #[error("{path}: not an Esker dataset (no esker.json in it){hint}")]
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

impl From<IoError> for StoreError {
    fn from(error: IoError) -> StoreError {
        match error {
            IoError::Write { path, source, .. } if is_full(&source) => StoreError::DiskFull { path },
            error => StoreError::Engine(error),
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    ErrorKind::of_io(error) == ErrorKind::DiskFull
}

impl StoreError {
    /// What it is about.
    pub fn kind(&self) -> ErrorKind {
        match self {
            StoreError::Exists { .. } | StoreError::Foreign { .. } | StoreError::Striped { .. } => {
                ErrorKind::Asked
            }
            StoreError::DiskFull { .. } => ErrorKind::DiskFull,
            StoreError::Engine(error) => error.kind(),
            _ => ErrorKind::World,
        }
    }

    /// For `map_err` on IO results.
    pub fn io(path: &Path) -> impl FnOnce(io::Error) -> StoreError + '_ {
        move |source| match is_full(&source) {
            true => StoreError::DiskFull { path: path.to_path_buf() },
            false => StoreError::Io { path: path.to_path_buf(), source },
        }
    }

    /// For `map_err` on what a [`esker_io::Stream`] says through `Read`: it names its file itself.
    pub(crate) fn engine(path: &Path) -> impl FnOnce(io::Error) -> StoreError + '_ {
        move |error| match error.downcast::<IoError>() {
            Ok(error) => error.into(),
            Err(error) => StoreError::io(path)(error),
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
