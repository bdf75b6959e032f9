use crate::Layout;
use esker_types::ErrorKind;
use std::io;
use std::path::{Path, PathBuf};

/// Errors of planning, reading and writing. Each names the file and the offset, if there is one.
#[derive(Debug, thiserror::Error)]
pub enum IoError {
    /// A file could not be opened, created or synced.
    #[error("{path}: cannot {verb}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// `open`, `create`, `sync`.
        verb: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A read failed.
    #[error("{path}: reading {bytes} bytes at offset {offset} failed: {source}; {}", remedy(source), path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Offset in the file.
        offset: u64,
        /// How many bytes.
        bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// A write failed.
    #[error("{path}: writing {bytes} bytes at offset {offset} failed: {source}; {}", remedy(source), path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Offset in the file.
        offset: u64,
        /// How many bytes.
        bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The file ended, or would end, before the requested bytes.
    #[error(
        "{path}: {expected_bytes} bytes are needed, the file ends after {found_bytes}; it was cut or is still being written: run `esker verify`",
        path = path.display()
    )]
    Ended {
        /// The file.
        path: PathBuf,
        /// The length it must have.
        expected_bytes: u64,
        /// Its length.
        found_bytes: u64,
    },
    /// A write would make a file longer than it was created.
    #[error(
        "{path}: a write up to offset {offset} goes beyond its {found_bytes} bytes; files are created at their full length",
        path = path.display()
    )]
    Beyond {
        /// The file.
        path: PathBuf,
        /// Offset in the whole file at which the write would end.
        offset: u64,
        /// Length of the file.
        found_bytes: u64,
    },
    /// The requested I/O backend does not work here.
    #[error("{path}: {io_backend} was asked for and does not work here: {why}; leave the choice to Esker", path = path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// The requested backend.
        io_backend: &'static str,
        /// Why it does not work.
        why: String,
    },
    /// The requested queue depth is invalid.
    #[error("an IO depth of {found} was asked for; 1 to {most} work")]
    Depth {
        /// The requested depth.
        found: usize,
        /// The largest depth.
        most: usize,
    },
    /// The requested block size is invalid.
    #[error("an IO block of {found} bytes was asked for; powers of two up to 1 MiB work")]
    Block {
        /// The requested block size.
        found: u64,
    },
    /// The requested read size is invalid.
    #[error(
        "a largest read of {found} bytes was asked for; powers of two from 4096 and the IO block to 1 GiB work"
    )]
    LargestRead {
        /// The requested read size.
        found: u64,
    },
    /// Staging memory is smaller than a read.
    #[error("{found} bytes of staging memory are less than one read of {largest_read}")]
    Staging {
        /// The requested size.
        found: u64,
        /// The largest read.
        largest_read: u64,
    },
    /// Blocks do not divide the stripes of an array.
    #[error(
        "{layout}: stripes of {stripe_bytes} bytes cannot be read in blocks of {block_bytes}; choose a smaller --io-block"
    )]
    StripeBlock {
        /// The array.
        layout: Layout,
        /// Length of its stripes.
        stripe_bytes: u64,
        /// The requested block size.
        block_bytes: u64,
    },
    /// A file is too small to measure with.
    #[error(
        "{path}: reads of {needed} bytes are measured, the file has {found}; give a larger one",
        path = path.display()
    )]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Length of one read.
        needed: usize,
        /// Length of the file.
        found: u64,
    },
    /// The queue itself failed: no request is known to be at fault.
    #[error("the IO queue failed: {0}; report this with the output of `esker doctor`")]
    Queue(io::Error),
    /// The owner requested a stop.
    #[error("stopped before all was read")]
    Cancelled,
}

impl IoError {
    pub(crate) fn file(path: &Path, verb: &'static str) -> impl FnOnce(io::Error) -> IoError {
        let path = path.to_path_buf();
        move |source| IoError::File { path, verb, source }
    }

    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            IoError::Depth { .. }
            | IoError::Block { .. }
            | IoError::LargestRead { .. }
            | IoError::Staging { .. }
            | IoError::StripeBlock { .. }
            | IoError::TooSmall { .. } => ErrorKind::Asked,
            IoError::Cancelled => ErrorKind::Stopped,
            IoError::Write { source, .. } | IoError::File { source, .. } => ErrorKind::of_io(source),
            _ => ErrorKind::World,
        }
    }

    /// The system's error, if there is one.
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
        // Retries are over at this point, so the error must not look as if it should be retried.
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
