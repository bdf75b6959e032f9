use esker_types::{ByteCount, ErrorKind};
use std::{
    fmt, io,
    path::{Path, PathBuf},
};

/// What can go wrong while reading foreign files.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The operating system refused.
    #[error("{location}: {source}")]
    Io {
        /// Where.
        location: Location,
        /// What it said.
        source: io::Error,
    },
    /// The bytes are not what the format promises.
    #[error("{location}: expected {expected}, found {found}")]
    Bad {
        /// File, and row, byte or key.
        location: Location,
        /// What should be there.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A file the format needs is not there.
    #[error("{path}: not found; {need}")]
    Missing {
        /// The path looked for.
        path: PathBuf,
        /// What it is needed for, and what to do.
        need: String,
    },
    /// The request itself does not fit together.
    #[error("{0}")]
    Request(String),
    /// The work cannot be done inside the memory budget.
    #[error("{what} needs {} but --memory gives {}; use --memory {} or more", ByteCount(*.needs_bytes), ByteCount(*.budget_bytes), ByteCount(*.minimum_bytes).flag_value())]
    OverBudget {
        /// The part that needs it.
        what: String,
        /// What it needs.
        needs_bytes: u64,
        /// What there is.
        budget_bytes: u64,
        /// The smallest budget that would do.
        minimum_bytes: u64,
    },
    /// The disk has too little room.
    #[error("{path}: this takes about {}, the disk has {} free; make it smaller, or use another disk", ByteCount(*.needs_bytes), ByteCount(*.free_bytes))]
    NoRoom {
        /// Where it would go.
        path: PathBuf,
        /// What it would take.
        needs_bytes: u64,
        /// What there is.
        free_bytes: u64,
    },
    /// Writing the dataset failed.
    #[error(transparent)]
    Store(#[from] esker_store::StoreError),
}

impl ImportError {
    /// What it is about.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ImportError::Request(_) | ImportError::OverBudget { .. } => ErrorKind::Asked,
            ImportError::Store(error) => error.kind(),
            ImportError::Io { source, .. } => ErrorKind::of_io(source),
            ImportError::Bad { .. } | ImportError::Missing { .. } | ImportError::NoRoom { .. } => {
                ErrorKind::World
            }
        }
    }
}

/// Result of everything in this crate.
pub type Result<T, E = ImportError> = std::result::Result<T, E>;

/// A place in a foreign file, for messages: `edges.csv.gz, row 17`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The file.
    pub path: PathBuf,
    /// The place in it, in words; empty for the whole file.
    pub detail: String,
}

impl Location {
    /// The whole file.
    pub fn file(path: &Path) -> Location {
        Location { path: path.to_path_buf(), detail: String::new() }
    }

    /// A row, counted from 0.
    pub fn row(path: &Path, row: u64) -> Location {
        Location { path: path.to_path_buf(), detail: format!("row {row}") }
    }

    /// A byte offset.
    pub fn byte(path: &Path, offset: u64) -> Location {
        Location { path: path.to_path_buf(), detail: format!("byte {offset}") }
    }

    /// Anything else that finds the spot: a key, an archive member, a line.
    pub fn at(path: &Path, detail: impl fmt::Display) -> Location {
        Location { path: path.to_path_buf(), detail: detail.to_string() }
    }

    /// A column of it, counted from 0.
    pub fn column(self, column: usize) -> Location {
        let gap = if self.detail.is_empty() { "" } else { ", " };
        Location { detail: format!("{}{gap}column {column}", self.detail), ..self }
    }

    /// The error for bytes at this place that are not what was promised.
    pub fn bad(self, expected: impl fmt::Display, found: impl fmt::Display) -> ImportError {
        ImportError::Bad { location: self, expected: expected.to_string(), found: found.to_string() }
    }

    /// The error for a refusal by the operating system, or a broken compressed stream, at this place.
    pub fn io(self, source: io::Error) -> ImportError {
        // What decompressors say of a download that broke off.
        let cut = source.kind() == io::ErrorKind::UnexpectedEof || source.to_string().contains("deflate");
        if cut {
            return self
                .bad("more bytes", format!("the end of the file ({source}); is it cut off or damaged?"));
        }
        ImportError::Io { location: self, source }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, ", {}", self.detail) }
    }
}
