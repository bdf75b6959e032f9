use esker_types::ErrorKind;
use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong between a plan and its bytes. Each names the file and, where there is one, the offset in it.
#[derive(Debug, thiserror::Error)]
pub enum IoError {
    /// A file could not be opened, created or synced.
    #[error("{path}: cannot {verb}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// `open`, `create`, `sync`.
        verb: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A read failed.
    #[error("{path}: reading {bytes} bytes at offset {offset} failed: {source}; {}", remedy(source), path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        offset: u64,
        /// How many bytes.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A write failed.
    #[error("{path}: writing {bytes} bytes at offset {offset} failed: {source}; {}", remedy(source), path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        offset: u64,
        /// How many bytes.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The file ended, or would end, before the bytes that were asked for.
    #[error(
        "{path}: {expected_bytes} bytes are needed, the file ends after {found_bytes}; it was cut or is still being written: run `esker verify`",
        path = path.display()
    )]
    Ended {
        /// The file.
        path: PathBuf,
        /// How long it must be.
        expected_bytes: u64,
        /// How long it is.
        found_bytes: u64,
    },
    /// A write that would make a file longer than it was created.
    #[error(
        "{path}: a write up to offset {offset} goes beyond its {found_bytes} bytes; files are created at their full length",
        path = path.display()
    )]
    Beyond {
        /// The file.
        path: PathBuf,
        /// Where in the whole file the write would end.
        offset: u64,
        /// How long the file is.
        found_bytes: u64,
    },
    /// A way of reading was asked for that does not work here.
    #[error("{path}: {io_backend} was asked for and does not work here: {why}; leave the choice to Esker", path = path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        io_backend: &'static str,
        /// Why not.
        why: String,
    },
    /// An option that cannot be.
    #[error("{0}")]
    Option(String),
    /// The queue itself failed: no request is known to be at fault.
    #[error("the IO queue failed: {0}; report this with the output of `esker doctor`")]
    Queue(io::Error),
    /// The owner asked to stop.
    #[error("stopped before all was read")]
    Cancelled,
}

impl IoError {
    pub(crate) fn file(path: &Path, verb: &'static str) -> impl FnOnce(io::Error) -> IoError {
        let path = path.to_path_buf();
        move |source| IoError::File { path, verb, source }
    }

    /// What it is about.
    pub fn kind(&self) -> ErrorKind {
        match self {
            IoError::Option(_) => ErrorKind::Asked,
            IoError::Cancelled => ErrorKind::Stopped,
            IoError::Write { source, .. } | IoError::File { source, .. } => ErrorKind::of_io(source),
            _ => ErrorKind::World,
        }
    }

    /// What the system said, where it said something.
    pub fn system(&self) -> Option<&io::Error> {
        match self {
            IoError::File { source, .. }
            | IoError::Read { source, .. }
            | IoError::Write { source, .. }
            | IoError::Queue(source) => Some(source),
            _ => None,
        }
    }
}

impl From<IoError> for io::Error {
    fn from(error: IoError) -> io::Error {
        // What was tried long enough must not look like something to be tried again.
        let kind = match error.system().map_or(io::ErrorKind::Other, io::Error::kind) {
            io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => io::ErrorKind::Other,
            kind => kind,
        };
        io::Error::new(kind, error)
    }
}

fn remedy(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EIO) => {
            "the disk reports a fault: see the kernel's log (dmesg) and copy the data to another disk"
        }
        Some(libc::ENOSPC) => "the disk is full: free space or choose another directory",
        Some(libc::EDQUOT) => "the quota is used up: free space or choose another directory",
        Some(libc::EAGAIN | libc::EINTR) => {
            "the kernel kept putting it off: the machine may be out of memory"
        }
        _ => "`esker doctor` shows what this disk can do",
    }
}
