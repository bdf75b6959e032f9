//! io_uring: one ring, made and used by one thread, with registered files and buffers.

use super::{Completion, IoBackend, IoRequest, OpenPart, forget_part, sync_parts};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

/// The kernel accepts at most this many bytes in one registered buffer.
const LARGEST_REGISTERED_BYTES: usize = 1 << 30;
/// Entries in the table of registered buffers.
const REGISTERED_BUFFERS: u32 = 256;
/// The kernel may refuse requests for lack of memory. They are retried this often, with a pause in between.
const MOST_REFUSALS: u32 = 1_000;
const PAUSE: Duration = Duration::from_millis(2);
/// `IORING_ENTER_GETEVENTS`: wait for completions.
const GET_EVENTS: u32 = 1;

pub(crate) struct UringBackend {
    ring: IoUring,
    parts: Arc<Vec<OpenPart>>,
    /// Files are in the ring's table: (direct, buffered) of part p at 2p and 2p + 1.
    files_registered: bool,
    /// Whether the ring has a table of buffers.
    table: bool,
    /// Start, end and table index of each registered range.
    registered: Vec<(usize, usize, u16)>,
    in_flight: usize,
}

impl UringBackend {
    /// A ring for `depth` requests at a time. Must be used by the thread that calls this.
    pub(crate) fn new(parts: Arc<Vec<OpenPart>>, depth: usize) -> io::Result<UringBackend> {
        let ring = build_ring(depth)?;
        let descriptors: Vec<i32> =
            parts.iter().flat_map(|part| [false, true].map(|way| part.file(way).as_raw_fd())).collect();
        let files_registered = ring.submitter().register_files(&descriptors).is_ok();
        let table = ring.submitter().register_buffers_sparse(REGISTERED_BUFFERS).is_ok();
        Ok(UringBackend { ring, parts, files_registered, table, registered: Vec::new(), in_flight: 0 })
    }

    /// The table index of the registered range that contains this memory.
    fn registered_index(&self, memory: *mut u8, bytes: u32) -> Option<u16> {
        let (start, end) = (memory as usize, memory as usize + bytes as usize);
        self.registered.iter().find(|entry| entry.0 <= start && end <= entry.1).map(|entry| entry.2)
    }

    fn entry(&self, request: &IoRequest) -> squeue::Entry {
        let IoRequest { write, buffered, part, offset, memory, bytes, .. } = *request;
        let index = self.registered_index(memory, bytes);
        macro_rules! build {
            ($file:expr) => {
                match (write, index) {
                    (false, Some(index)) => {
                        opcode::ReadFixed::new($file, memory, bytes, index).offset(offset).build()
                    }
                    (false, None) => opcode::Read::new($file, memory, bytes).offset(offset).build(),
                    (true, Some(index)) => {
                        opcode::WriteFixed::new($file, memory, bytes, index).offset(offset).build()
                    }
                    (true, None) => opcode::Write::new($file, memory, bytes).offset(offset).build(),
                }
            };
        }
        let entry = if self.files_registered {
            build!(types::Fixed(2 * part + u32::from(buffered)))
        } else {
            build!(types::Fd(self.parts[part as usize].file(buffered).as_raw_fd()))
        };
        entry.user_data(u64::from(request.tag))
    }

    /// After a refusal: waits until a request in flight completes, or for a pause if there is none.
    fn make_room(&mut self) {
        let waiting = self.ring.submission().len();
        if self.in_flight > waiting {
            // SAFETY: takes no pointers; nothing new is submitted.
            let _ = unsafe { self.ring.submitter().enter::<()>(0, 1, GET_EVENTS, None) };
        } else {
            std::thread::sleep(PAUSE);
        }
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        for entry in self.ring.completion() {
            done.push(Completion { tag: entry.user_data() as u32, result: entry.result() });
            self.in_flight -= 1;
        }
    }
}

/// The best ring this kernel offers: completions are processed when we ask for them, without interrupting us.
pub(crate) fn build_ring(depth: usize) -> io::Result<IoUring> {
    let entries = depth.next_power_of_two() as u32;
    let mut builder = IoUring::<squeue::Entry, cqueue::Entry>::builder();
    builder.setup_single_issuer().setup_defer_taskrun();
    match builder.build(entries) {
        // Kernels before 6.1 do not have these flags.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        built => built,
    }
}

impl IoBackend for UringBackend {
    unsafe fn push(&mut self, request: IoRequest) {
        let entry = self.entry(&request);
        // SAFETY: the caller keeps the memory valid until the completion; files live as long as `self.parts`.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "more requests than the depth that the ring was made for");
        self.in_flight += 1;
    }

    fn wait(&mut self, at_least: usize, done: &mut Vec<Completion>) -> io::Result<()> {
        let target = done.len() + at_least;
        let mut refusals = 0;
        loop {
            let missing = target.saturating_sub(done.len());
            let waiting = self.ring.submission().len();
            // SAFETY: every submitted request was pushed with memory that outlives it; no other pointers are passed.
            let entered = unsafe {
                self.ring.submitter().enter::<()>(waiting as u32, missing as u32, GET_EVENTS, None)
            };
            self.reap(done);
            match entered {
                Ok(_) if done.len() >= target && self.ring.submission().is_empty() => return Ok(()),
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    refusals += 1;
                    if refusals > MOST_REFUSALS {
                        return Err(error);
                    }
                    self.make_room();
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn cancel(&mut self) {
        // If the kernel refuses, does not know it, or is too late, the requests simply run to completion.
        let moment = types::Timespec::new().nsec(PAUSE.subsec_nanos());
        let _ = self.ring.submitter().register_sync_cancel(Some(moment), types::CancelBuilder::any());
    }

    unsafe fn register(&mut self, memory: *mut u8, bytes: usize) -> bool {
        let (start, end) = (memory as usize, memory as usize + bytes);
        if !self.table || bytes == 0 {
            return false;
        }
        let mut at = start;
        while at < end {
            let length = (end - at).min(LARGEST_REGISTERED_BYTES);
            let index = self.registered.len() as u32;
            let vector = [libc::iovec { iov_base: at as *mut libc::c_void, iov_len: length }];
            // SAFETY: the caller guarantees that the memory outlives this backend.
            let told = index < REGISTERED_BUFFERS
                && unsafe { self.ring.submitter().register_buffers_update(index, &vector, None) }.is_ok();
            if !told {
                return false;
            }
            self.registered.push((at, at + length, index as u16));
            at += length;
        }
        true
    }

    fn forget(&mut self, part: u32, offset: u64, bytes: u64) {
        forget_part(&self.parts, part, offset, bytes);
    }

    fn sync(&mut self) -> Result<(), (u32, io::Error)> {
        sync_parts(&self.parts)
    }
}

impl Drop for UringBackend {
    fn drop(&mut self) {
        // Requests that the kernel never took are dropped with the ring.
        self.in_flight -= self.ring.submission().len();
        let mut done = Vec::new();
        let mut refusals = 0;
        while self.in_flight > 0 {
            // SAFETY: takes no pointers; nothing new is submitted.
            let entered = unsafe { self.ring.submitter().enter::<()>(0, 1, GET_EVENTS, None) };
            self.reap(&mut done);
            match entered {
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => {
                    refusals += 1;
                    if refusals > MOST_REFUSALS {
                        // The kernel may still write into memory that our owner is about to free. There is no safe way
                        // to continue, so the process aborts.
                        eprintln!("error: io_uring does not give {} requests back: {error}", self.in_flight);
                        std::process::abort();
                    }
                    std::thread::sleep(PAUSE);
                }
                _ => {}
            }
        }
    }
}
