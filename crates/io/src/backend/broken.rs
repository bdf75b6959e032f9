use super::{Completion, IoBackend, IoRequest};
use std::io;

/// Replaces a backend that failed. It accepts no requests, and none is in flight.
pub(crate) struct BrokenBackend;

impl IoBackend for BrokenBackend {
    unsafe fn push(&mut self, _request: IoRequest) {
        unreachable!("a broken queue starts nothing");
    }
    fn wait(&mut self, _at_least: usize, _done: &mut Vec<Completion>) -> io::Result<()> {
        Ok(())
    }
    fn cancel(&mut self) {}
    unsafe fn register(&mut self, _memory: *mut u8, _bytes: usize) -> bool {
        false
    }
    fn sync(&mut self) -> Result<(), (u32, io::Error)> {
        Err((0, io::Error::other("the IO queue failed before")))
    }
}
