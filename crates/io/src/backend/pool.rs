//! A pool of threads that read and write at offsets. It works everywhere, and takes several times the CPU time of a
//! ring.

use super::{Completion, IoBackend, IoRequest, OpenPart, forget_part, sync_parts};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

/// More threads than this gain nothing: 64 reached the ring's rate.
const MOST_THREADS: usize = 64;

/// A request on its way to a thread, and the number of cancellations at the time it was pushed.
struct QueuedRequest(IoRequest, u64);

// SAFETY: the pusher guarantees that nobody else touches the memory until the completion has been returned.
unsafe impl Send for QueuedRequest {}

pub(crate) struct PoolBackend {
    parts: Arc<Vec<OpenPart>>,
    /// `None` only while dropping.
    requests: Option<Sender<QueuedRequest>>,
    completions: Receiver<Completion>,
    /// How often all requests were cancelled.
    given_up: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
}

impl PoolBackend {
    pub(crate) fn new(parts: Arc<Vec<OpenPart>>, depth: usize) -> io::Result<PoolBackend> {
        let (requests, todo) = unbounded();
        let (finished, completions) = unbounded();
        let given_up = Arc::new(AtomicU64::new(0));
        let mut pool = PoolBackend {
            parts,
            requests: Some(requests),
            completions,
            given_up,
            threads: Vec::new(),
            in_flight: 0,
        };
        for number in 0..depth.clamp(1, MOST_THREADS) {
            let (todo, finished) = (todo.clone(), finished.clone());
            let (parts, given_up) = (pool.parts.clone(), pool.given_up.clone());
            let thread = std::thread::Builder::new()
                .name(format!("esker-io-{number}"))
                .spawn(move || serve(&todo, &finished, &parts, &given_up));
            match thread {
                Ok(thread) => pool.threads.push(thread),
                // If the process is at its thread limit, the pool works with the threads it has.
                Err(error) if pool.threads.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        Ok(pool)
    }
}

fn serve(
    todo: &Receiver<QueuedRequest>,
    finished: &Sender<Completion>,
    parts: &[OpenPart],
    given_up: &AtomicU64,
) {
    for QueuedRequest(request, generation) in todo {
        let result = if given_up.load(Ordering::Acquire) != generation {
            -libc::ECANCELED
        } else {
            transfer(&request, parts)
        };
        // The receiver still exists: the backend waits for every completion before it is dropped.
        let _ = finished.send(Completion { tag: request.tag, result });
    }
}

fn transfer(request: &IoRequest, parts: &[OpenPart]) -> i32 {
    let file = parts[request.part as usize].file(request.buffered).as_raw_fd();
    let (memory, bytes) = (request.memory.cast::<libc::c_void>(), request.bytes as usize);
    let offset = request.offset as libc::off64_t;
    let moved = if request.write {
        // SAFETY: the pusher keeps `bytes` bytes at `memory` valid until the completion.
        unsafe { libc::pwrite64(file, memory, bytes, offset) }
    } else {
        // SAFETY: as above, and nobody else touches them.
        unsafe { libc::pread64(file, memory, bytes, offset) }
    };
    if moved >= 0 { moved as i32 } else { -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) }
}

impl IoBackend for PoolBackend {
    unsafe fn push(&mut self, request: IoRequest) {
        self.in_flight += 1;
        let requests = self.requests.as_ref().expect("open until dropped");
        let generation = self.given_up.load(Ordering::Relaxed);
        requests
            .send(QueuedRequest(request, generation))
            .expect("threads serve until the backend is dropped");
    }

    fn wait(&mut self, at_least: usize, done: &mut Vec<Completion>) -> io::Result<()> {
        for _ in 0..at_least {
            let Ok(completion) = self.completions.recv() else {
                return Err(io::Error::other("the threads of the pool are gone"));
            };
            done.push(completion);
            self.in_flight -= 1;
        }
        while let Ok(completion) = self.completions.try_recv() {
            done.push(completion);
            self.in_flight -= 1;
        }
        Ok(())
    }

    fn cancel(&mut self) {
        self.given_up.fetch_add(1, Ordering::Release);
    }

    unsafe fn register(&mut self, _memory: *mut u8, _bytes: usize) -> bool {
        false
    }

    fn forget(&mut self, part: u32, offset: u64, bytes: u64) {
        forget_part(&self.parts, part, offset, bytes);
    }

    fn sync(&mut self) -> Result<(), (u32, io::Error)> {
        sync_parts(&self.parts)
    }
}

impl Drop for PoolBackend {
    fn drop(&mut self) {
        self.cancel();
        // Without a sender, the threads finish the queued requests and exit.
        self.requests = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
