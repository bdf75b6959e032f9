use crate::{Damage, StripesError};
use esker_io::IoError;
use esker_types::{ByteCount, Dtype, ErrorKind};
use std::{
    io,
    path::{Path, PathBuf},
    str::Utf8Error,
};

/// Errors of dataset directories.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// An array is striped, but one file is needed.
    #[error(
        "{path}: the array lies in {parts} parts and cannot be mapped; run `esker stripe --undo`, or take another strategy"
    )]
    InParts {
        /// Its first part.
        path: PathBuf,
        /// Number of its parts.
        parts: usize,
    },
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Its error.
        source: io::Error,
    },
    /// The disk is full.
    #[error("{path}: no space left on this disk; free some")]
    DiskFull {
        /// The file being written.
        path: PathBuf,
    },
    /// A file that the manifest lists does not exist.
    #[error(
        "{path}: the manifest lists this file, and it is not there; restore it from a copy, or make the dataset again"
    )]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The directory of a part of striped arrays does not exist.
    #[error(
        "{path}: expected the directory that holds a part of striped arrays, or a link to it, found {found}; \
         mount its disk, or link the directory anew: ln -sfn DIRECTORY {path}"
    )]
    StripeMissing {
        /// `stripe-i` of the dataset.
        path: PathBuf,
        /// What exists there instead.
        found: String,
    },
    /// Invalid stripes.
    #[error("{path}: {source}")]
    Stripes {
        /// The dataset.
        path: PathBuf,
        /// What is wrong with them.
        source: StripesError,
    },
    /// The dataset's path cannot be written to a mark.
    #[error("{path}: a dataset whose path is not UTF-8 cannot be striped; rename it")]
    NotUtf8 {
        /// The dataset.
        path: PathBuf,
    },
    /// A directory for parts does not exist.
    #[error("{path}: there is no such directory; make it, or mount its disk")]
    NoHome {
        /// The directory.
        path: PathBuf,
    },
    /// A directory for parts is inside the dataset.
    #[error("{path}: lies inside the dataset; choose a directory on another disk")]
    HomeInside {
        /// The directory.
        path: PathBuf,
    },
    /// One directory is given for two parts.
    #[error("{path}: is given twice; each part wants a disk of its own")]
    HomeTwice {
        /// The directory.
        path: PathBuf,
    },
    /// A directory for parts has parts of another dataset.
    #[error(
        "{path}: holds parts of another dataset, which was {dataset} when it was striped; choose another directory, run \
         `esker stripe --undo` on that dataset wherever it is now, or remove this directory if it is gone"
    )]
    HomeTaken {
        /// The directory.
        path: PathBuf,
        /// Path of the other dataset.
        dataset: PathBuf,
    },
    /// A part is another file of the dataset.
    #[error(
        "{path}: is {place}, inside the dataset; link it to a directory of its own (`ln -sfn DIRECTORY stripe-i`)"
    )]
    PartInside {
        /// The part.
        path: PathBuf,
        /// The file that links lead to.
        place: PathBuf,
    },
    /// A part is the same file as another part.
    #[error(
        "{path}: is the same file as {other}; link it to a directory of its own (`ln -sfn DIRECTORY stripe-i`)"
    )]
    PartTwice {
        /// The part.
        path: PathBuf,
        /// The other one.
        other: PathBuf,
    },
    /// A copy differs from the array.
    #[error(
        "{}: the copy is not what was written, at offset {}: {}; nothing was changed: run `esker verify {dataset}`, and \
         the same command again if that finds nothing",
        damage.path.display(), damage.offset, damage.problem
    )]
    BadCopy {
        /// What is wrong with it.
        damage: Box<Damage>,
        /// The dataset.
        dataset: PathBuf,
    },
    /// The dataset is already striped in another way than requested.
    #[error(
        "{path}: is striped already, in stripes of {stripe} over {}; run `esker stripe {path} --undo` first",
        listed(over)
    )]
    Striped {
        /// The dataset.
        path: PathBuf,
        /// Length of its stripes.
        stripe: ByteCount,
        /// Directories of its parts.
        over: Vec<PathBuf>,
    },
    /// A disk has too little space for what is to be written.
    #[error(
        "{path}: {needed} are needed on this disk, {available} are free; free some, or choose another directory"
    )]
    NoRoom {
        /// A directory on the disk.
        path: PathBuf,
        /// Bytes to be written there.
        needed: ByteCount,
        /// Free bytes of the disk.
        available: ByteCount,
    },
    /// Reading or writing failed.
    #[error(transparent)]
    Engine(IoError),
    /// There is no manifest.
    #[error("{path}: not an Esker dataset (no esker.json in it){hint}")]
    NotADataset {
        /// The directory looked at.
        path: PathBuf,
        /// What it may be instead.
        hint: &'static str,
    },
    /// The manifest is damaged.
    #[error("{path}: the manifest is damaged: {problem}; restore it from a copy, or make the dataset again")]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        #[source]
        problem: Box<ManifestProblem>,
    },
    /// The dataset was written by a newer Esker.
    #[error("{path}: format version {found}, this esker reads {supported}; use a newer esker")]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// Ours.
        supported: u32,
    },
    /// A file is shorter or longer than the manifest states.
    #[error(
        "{path}: the manifest promises {expected_bytes} bytes, the file has {found_bytes}; restore it from a copy, or make the dataset again"
    )]
    WrongLength {
        /// The file.
        path: PathBuf,
        /// Length in the manifest.
        expected_bytes: u64,
        /// Actual length.
        found_bytes: u64,
    },
    /// A file's content contradicts its header or manifest.
    #[error("{path}: expected {expected}, found {found}; run `esker verify`")]
    Inconsistent {
        /// The file.
        path: PathBuf,
        /// According to the manifest or the format.
        expected: String,
        /// Actual content.
        found: String,
    },
    /// The name exists already.
    #[error("{path}: exists already; choose another name, or replace it with --overwrite")]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// The name exists and is not a dataset.
    #[error("{path}: exists and is not Esker's to replace; move it away, or choose another name")]
    Foreign {
        /// The file or directory.
        path: PathBuf,
    },
    /// Another process is writing it.
    #[error("{path}: another esker is writing it; wait for it, or stop it")]
    Busy {
        /// The directory.
        path: PathBuf,
    },
}

/// What is wrong with a manifest.
#[derive(Debug, thiserror::Error)]
pub enum ManifestProblem {
    /// The bytes are not text.
    #[error("no text: {0}")]
    NoText(#[source] Utf8Error),
    /// The text is truncated.
    #[error("it ends before its checksum")]
    CutOff,
    /// The bytes differ from those that were written.
    #[error("its checksum says {stated}, its bytes give {found:016x}")]
    Checksum {
        /// The checksum in the file.
        stated: String,
        /// The checksum of its bytes.
        found: u64,
    },
    /// The text does not parse as a manifest.
    #[error("{0}")]
    Json(#[source] serde_json::Error),
    /// The id does not match the files.
    #[error("its id does not belong to its files")]
    WrongId,
    /// A name could leave the directory.
    #[error("`{name}` is not a file name of a dataset")]
    FileName {
        /// The name.
        name: String,
    },
    /// A count is impossibly large.
    #[error("it counts {count} of something, more than there can be")]
    Count {
        /// The count.
        count: u64,
    },
    /// A file that the counts require is not listed.
    #[error("it lists no file {name}")]
    NoFile {
        /// The file.
        name: String,
    },
    /// A file has another shape than the counts require.
    #[error(
        "{name}: expected {} rows of {columns} x {dtypes:?}, found {found_rows} rows of {found_columns} x {found_dtype}",
        number_or_any(*rows)
    )]
    FileShape {
        /// The file.
        name: String,
        /// Rows required by the counts, if they determine them.
        rows: Option<u64>,
        /// Columns required by the counts.
        columns: u64,
        /// Allowed dtypes.
        dtypes: Vec<Dtype>,
        /// Rows listed.
        found_rows: u64,
        /// Columns listed.
        found_columns: u64,
        /// Dtype listed.
        found_dtype: Dtype,
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

fn listed(paths: &[PathBuf]) -> String {
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(", ")
}

fn number_or_any(number: Option<u64>) -> String {
    number.map_or("any number of".to_string(), |number| number.to_string())
}

fn is_full(error: &io::Error) -> bool {
    ErrorKind::of_io(error) == ErrorKind::DiskFull
}

impl StoreError {
    /// The kind of error.
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

    /// For `map_err` on I/O results.
    pub fn io(path: &Path) -> impl FnOnce(io::Error) -> StoreError + '_ {
        move |source| match is_full(&source) {
            true => StoreError::DiskFull { path: path.to_path_buf() },
            false => StoreError::Io { path: path.to_path_buf(), source },
        }
    }

    /// For `map_err` on errors that a [`esker_io::Stream`] returns through `Read`: they name their file themselves.
    pub(crate) fn engine(path: &Path) -> impl FnOnce(io::Error) -> StoreError + '_ {
        move |error| match error.downcast::<IoError>() {
            Ok(error) => error.into(),
            Err(error) => StoreError::io(path)(error),
        }
    }

    /// A damaged manifest.
    pub(crate) fn manifest(path: &Path, problem: ManifestProblem) -> StoreError {
        StoreError::Manifest { path: path.to_path_buf(), problem: Box::new(problem) }
    }

    /// Content that contradicts what it should be.
    pub fn inconsistent(path: &Path, expected: impl ToString, found: impl ToString) -> StoreError {
        StoreError::Inconsistent {
            path: path.to_path_buf(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}
