//! A queue of requests to open files, and what can stand after it: io_uring, a pool of threads, a simulation.
//!
//! A backend moves bytes and reports what the system said, short counts and errors included. What that means, and
//! what to do about it, is decided once, above, in `queue.rs`.

mod broken;
mod pool;
pub(crate) mod simulated;
mod uring;

pub(crate) use broken::BrokenBackend;
pub(crate) use pool::PoolBackend;
pub(crate) use uring::{UringBackend, build_ring};

use crate::sequential::drop_cached;
use std::fs::File;
use std::io;

/// One transfer between memory and a part of a file.
#[derive(Debug, Clone, Copy)]
pub struct IoRequest {
    /// Comes back in the [`Completion`].
    pub tag: u32,
    /// To the file instead of from it.
    pub write: bool,
    /// Through the page cache on a backend that otherwise goes past it.
    pub buffered: bool,
    /// Which part, in the order in which the files were opened.
    pub part: u32,
    /// Where in the part.
    pub offset: u64,
    /// The memory.
    pub memory: *mut u8,
    /// How many bytes.
    pub bytes: u32,
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The request's tag.
    pub tag: u32,
    /// Bytes moved, or a negative error number.
    pub result: i32,
}

/// A queue of requests. Used by the thread that made it.
///
/// Dropping a backend waits until nothing is in flight: only then may its memory go.
pub trait IoBackend {
    /// Puts a request in the queue. It starts with the next [`IoBackend::wait`] at the latest. No more than the depth
    /// that the backend was made for may be between `push` and their completion.
    ///
    /// # Safety
    /// The request's memory stays valid, and nobody else touches it, until `wait` has returned its completion or the
    /// backend is dropped.
    unsafe fn push(&mut self, request: IoRequest);

    /// Starts what was pushed, waits until at least `at_least` requests are complete, appends all that are. With
    /// fewer than that in flight it would never return; nobody asks for it.
    fn wait(&mut self, at_least: usize, done: &mut Vec<Completion>) -> io::Result<()>;

    /// Asks for requests in flight to be given up. Their completions still come, with `ECANCELED` or with success.
    fn cancel(&mut self);

    /// Tells the kernel about memory that many requests will use; `false` where that is not to be had, which only
    /// costs time. The memory must stay valid as long as the backend lives.
    ///
    /// # Safety
    /// `memory` points at `bytes` bytes that outlive the backend.
    unsafe fn register(&mut self, memory: *mut u8, bytes: usize) -> bool;

    /// Drops a range of a part from the page cache, where it went through that.
    fn forget(&mut self, _part: u32, _offset: u64, _bytes: u64) {}

    /// Everything written is on the disk when this returns. On failure: which part, and why.
    fn sync(&mut self) -> Result<(), (u32, io::Error)>;
}

/// One part of a file, open.
#[derive(Debug)]
pub(crate) struct OpenPart {
    /// Past the page cache, where that is the way.
    pub direct: Option<File>,
    /// Through the page cache: the only way, or the way for the ragged ends of writes.
    pub buffered: Option<File>,
}

impl OpenPart {
    /// The file that a request goes to.
    pub(crate) fn file(&self, buffered: bool) -> &File {
        let (first, second) =
            if buffered { (&self.buffered, &self.direct) } else { (&self.direct, &self.buffered) };
        first.as_ref().or(second.as_ref()).expect("a part is open one way at least")
    }
}

pub(crate) fn forget_part(parts: &[OpenPart], part: u32, offset: u64, bytes: u64) {
    drop_cached(parts[part as usize].file(true), offset, offset + bytes);
}

pub(crate) fn sync_parts(parts: &[OpenPart]) -> Result<(), (u32, io::Error)> {
    for (part, number) in parts.iter().zip(0..) {
        part.file(true).sync_all().map_err(|error| (number, error))?;
    }
    Ok(())
}
