//! A queue of requests to open files, with three implementations: io_uring, a pool of threads, a simulation.
//!
//! A backend moves bytes and reports the system's result, including short counts and errors. `queue.rs` alone decides
//! what they mean and how to react.

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
    /// Returned in the [`Completion`].
    pub tag: u32,
    /// A write to the file. `false`: a read from it.
    pub write: bool,
    /// Goes through the page cache, on a backend that otherwise bypasses it.
    pub buffered: bool,
    /// The part's number, in the order in which the files were opened.
    pub part: u32,
    /// Offset in the part.
    pub offset: u64,
    /// The memory.
    pub memory: *mut u8,
    /// How many bytes.
    pub bytes: u32,
}

/// The result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The request's tag.
    pub tag: u32,
    /// Bytes moved, or a negative error number.
    pub result: i32,
}

/// A queue of requests. Only the thread that made it uses it.
///
/// Dropping a backend waits until nothing is in flight. Only then may its memory be freed.
pub trait IoBackend {
    /// Queues a request. It starts with the next [`IoBackend::wait`] at the latest. The number of pushed and
    /// incomplete requests must not exceed the depth that the backend was made for.
    ///
    /// # Safety
    /// The request's memory must stay valid, and nobody else may touch it, until `wait` has returned its completion or
    /// the backend is dropped.
    unsafe fn push(&mut self, request: IoRequest);

    /// Starts the pushed requests, waits until at least `at_least` requests are complete and appends all completions.
    /// `at_least` must not exceed the number of requests in flight: the call would never return.
    fn wait(&mut self, at_least: usize, done: &mut Vec<Completion>) -> io::Result<()>;

    /// Asks to cancel the requests in flight. Their completions still arrive, with `ECANCELED` or with success.
    fn cancel(&mut self);

    /// Registers memory that many requests will use with the kernel. `false` means that this is not possible; it only
    /// costs time. The memory must stay valid as long as the backend lives.
    ///
    /// # Safety
    /// `memory` points at `bytes` bytes that outlive the backend.
    unsafe fn register(&mut self, memory: *mut u8, bytes: usize) -> bool;

    /// Drops a range of a part from the page cache if it was read through the cache.
    fn forget(&mut self, _part: u32, _offset: u64, _bytes: u64) {}

    /// Returns when everything written is on the disk. On failure: which part, and why.
    fn sync(&mut self) -> Result<(), (u32, io::Error)>;
}

/// One part of a file, open.
#[derive(Debug)]
pub(crate) struct OpenPart {
    /// Bypasses the page cache. `None` if the backend does not use direct I/O.
    pub direct: Option<File>,
    /// Goes through the page cache: for everything, or for the unaligned ends of writes.
    pub buffered: Option<File>,
}

impl OpenPart {
    /// The file handle that a request uses.
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
