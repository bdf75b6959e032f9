//! The limit of a disk: the rate of a bare loop that only reads blocks, as fast as possible, and discards them. It has
//! no plan and no rows, and checks only that each block arrived. Everything else is measured against this rate.

use crate::backend_choice::{ChosenBackend, Options};
use crate::disk::{Access, Disk, ThisMachine};
use crate::layout::Layout;
use crate::{AlignedBuffer, DIRECT_ALIGN, IoError};
use esker_types::random::{Key, Permutation, below};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Parameters of a bare loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BareLoop {
    /// Bytes per read, and the alignment of its offset.
    pub block_bytes: usize,
    /// Requests in flight per thread.
    pub depth: usize,
    /// Threads, each with its own ring.
    pub threads: usize,
    /// Reads consecutive blocks instead of random ones.
    pub sequential: bool,
    /// Memory per thread over which reads are spread. 0: as little as the depth needs. That stays in the CPU cache and
    /// may be faster than anything that keeps what it reads.
    pub memory_bytes: usize,
}

/// The rate of a loop.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Reads done.
    pub reads: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// CPU seconds, user and kernel, over all threads.
    pub cpu_seconds: f64,
}

impl Rate {
    /// Reads per second.
    pub fn reads_per_second(&self) -> f64 {
        self.reads as f64 / self.seconds
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }
}

/// CPU seconds of this process so far, user and kernel.
pub fn cpu_seconds() -> f64 {
    // SAFETY: `rusage` is a plain C struct for which all zeros are a valid value.
    let mut used: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `used` is writable and lives through the call.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut used) };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    seconds(used.ru_utime) + seconds(used.ru_stime)
}

/// Reads `path` for `duration` with the best backend that works here, and returns the rate.
pub fn bare_loop(path: &Path, how: BareLoop, duration: Duration) -> Result<Rate, IoError> {
    let files = ThisMachine.open(&[Layout::file(path)], Access::Read, &Options::default())?;
    let (io_backend, found_bytes) = (files.io_backend().clone(), files.bytes(0));
    let blocks = found_bytes / how.block_bytes as u64;
    drop(files);
    if blocks == 0 {
        let (path, needed, found) = (path.to_path_buf(), how.block_bytes, found_bytes);
        return Err(IoError::TooSmall { path, needed, found });
    }
    // Without rings, the depth is the number of threads.
    let ring = io_backend.kind.is_uring();
    let threads = if ring { how.threads } else { (how.threads * how.depth).min(64) };
    let next = AtomicU64::new(0);
    let one = |ready: mpsc::Sender<()>, go: mpsc::Receiver<Instant>| -> io::Result<u64> {
        let mut made = open(path, &io_backend).and_then(|file| Loop::new(file, how, ring))?;
        // The memory is allocated and the ring is built: only reading is timed.
        drop(ready);
        let Ok(started) = go.recv() else { return Ok(0) };
        made.run(&mut || {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            let block = if how.sequential { turn % blocks } else { below(Key::new(1).at(turn), blocks) };
            (started.elapsed() < duration).then_some(block * how.block_bytes as u64)
        })
    };
    let (counts, seconds, cpu_seconds) = std::thread::scope(|scope| {
        let (ready, all_ready) = mpsc::channel();
        let (mut loops, mut starters) = (Vec::new(), Vec::new());
        for _ in 0..threads {
            let (start, go) = mpsc::channel();
            let (ready, one) = (ready.clone(), &one);
            // If the process is at its thread limit, measure with the threads it has.
            let Ok(thread) = std::thread::Builder::new().spawn_scoped(scope, move || one(ready, go)) else {
                break;
            };
            loops.push(thread);
            starters.push(start);
        }
        drop(ready);
        // Nobody sends: this returns when the last thread is ready or has failed.
        let _ = all_ready.recv();
        let (cpu_before, started) = (cpu_seconds(), Instant::now());
        // A thread that has already failed no longer listens.
        for start in &starters {
            let _ = start.send(started);
        }
        let counts: Vec<_> =
            loops.into_iter().map(|one| one.join().expect("bare loops do not panic")).collect();
        (counts, started.elapsed().as_secs_f64(), cpu_seconds() - cpu_before)
    });
    let counts: io::Result<Vec<u64>> = counts.into_iter().collect();
    let reads: u64 = counts.map_err(IoError::file(path, "read"))?.iter().sum();
    Ok(Rate { reads, bytes: reads * how.block_bytes as u64, seconds, cpu_seconds })
}

/// Sizes of blocks that are compared, and the memory in which they are read.
const FAST_BLOCKS: std::ops::RangeInclusive<u32> = 12..=22;
const FAST_MEMORY: usize = 16 << 20;

/// The smallest block, a power of two from 4 KiB to 4 MiB, whose random reads have `share` of the best rate. Each size is
/// read for `each`.
pub fn smallest_fast_block(path: &Path, share: f64, each: Duration) -> Result<u64, IoError> {
    let file_bytes = std::fs::metadata(path).map_err(IoError::file(path, "open"))?.len();
    let mut rates = Vec::new();
    for block_bytes in FAST_BLOCKS.map(|exponent| 1usize << exponent) {
        if block_bytes as u64 > file_bytes {
            break;
        }
        let depth = (FAST_MEMORY / block_bytes).clamp(4, 64);
        let how = BareLoop { block_bytes, depth, threads: 1, sequential: false, memory_bytes: 0 };
        rates.push((block_bytes as u64, bare_loop(path, how, each)?.bytes_per_second()));
    }
    let best = rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let fast = rates.iter().find(|(_, rate)| *rate >= share * best);
    Ok(fast.map_or(1 << FAST_BLOCKS.start(), |(block, _)| *block))
}

fn open(path: &Path, io_backend: &ChosenBackend) -> io::Result<File> {
    let flags = if io_backend.kind.is_direct() { libc::O_DIRECT } else { 0 };
    File::options().read(true).custom_flags(flags).open(path)
}

/// One thread's loop, with all its resources.
struct Loop {
    file: File,
    how: BareLoop,
    /// `None`: plain reads, one at a time.
    ring: Option<IoUring>,
    registered: bool,
    buffer: AlignedBuffer,
    /// First in, first out: all slots take turns, in an order that the CPU cannot predict.
    free: VecDeque<u64>,
}

impl Loop {
    fn new(file: File, how: BareLoop, ring: bool) -> io::Result<Loop> {
        let slots = if ring { (how.memory_bytes / how.block_bytes).max(how.depth) } else { 1 };
        let mut buffer = AlignedBuffer::new(slots * how.block_bytes, DIRECT_ALIGN);
        let scattered = Permutation::new(slots as u64, Key::new(2));
        let free = (0..slots as u64).map(|turn| scattered.forward(turn)).collect();
        let (mut made, mut registered) = (None, false);
        if ring {
            let mut builder = IoUring::<squeue::Entry, cqueue::Entry>::builder();
            builder.setup_single_issuer().setup_defer_taskrun();
            let entries = how.depth.next_power_of_two() as u32;
            let ring = builder.build(entries).or_else(|_| IoUring::new(entries))?;
            let vector = [libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() }];
            // SAFETY: the buffer lives as long as the ring, and longer than every request: see `run`.
            registered = unsafe { ring.submitter().register_buffers(&vector) }.is_ok();
            ring.submitter().register_files(&[file.as_raw_fd()])?;
            made = Some(ring);
        }
        Ok(Loop { file, how, ring: made, registered, buffer, free })
    }

    /// Reads at the offsets that `turn` returns, until it returns `None`. Returns the number of blocks read.
    fn run(&mut self, turn: &mut dyn FnMut() -> Option<u64>) -> io::Result<u64> {
        let Some(ring) = &mut self.ring else {
            let mut count = 0;
            while let Some(offset) = turn() {
                self.file.read_exact_at(&mut self.buffer, offset)?;
                count += 1;
            }
            return Ok(count);
        };
        let (memory, bytes) = (self.buffer.as_mut_ptr(), self.how.block_bytes as u32);
        let (mut count, mut in_flight, mut failure) = (0, 0, None);
        loop {
            while failure.is_none()
                && in_flight < self.how.depth
                && let Some(slot) = self.free.pop_front()
            {
                let Some(offset) = turn() else { break };
                // SAFETY: `slot` is a slot of the buffer, so the address is within it.
                let place = unsafe { memory.add(slot as usize * self.how.block_bytes) };
                let entry = match self.registered {
                    true => opcode::ReadFixed::new(types::Fixed(0), place, bytes, 0).offset(offset).build(),
                    false => opcode::Read::new(types::Fixed(0), place, bytes).offset(offset).build(),
                };
                // SAFETY: each slot has one request at a time, and this returns only when none is in flight.
                let pushed = unsafe { ring.submission().push(&entry.user_data(slot)) };
                pushed.expect("the ring holds the depth");
                in_flight += 1;
            }
            if in_flight == 0 {
                return failure.map_or(Ok(count), Err);
            }
            match ring.submit_and_wait((in_flight / 64).clamp(1, 8)) {
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => {
                    // Reads may still be in flight, so their memory must stay valid whatever happens to the loop.
                    std::mem::forget(std::mem::replace(&mut self.buffer, AlignedBuffer::new(1, 1)));
                    return Err(error);
                }
                _ => {}
            }
            for entry in ring.completion() {
                match entry.result() {
                    result if result == bytes as i32 => count += 1,
                    result if result < 0 => failure = Some(io::Error::from_raw_os_error(-result)),
                    _ => failure = Some(io::ErrorKind::UnexpectedEof.into()),
                }
                self.free.push_back(entry.user_data());
                in_flight -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_loops_count_what_they_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        std::fs::write(&path, vec![1u8; 1 << 20]).unwrap();
        for (block_bytes, sequential, threads) in [(4096, false, 2), (65_536, true, 1)] {
            let how = BareLoop { block_bytes, depth: 8, threads, sequential, memory_bytes: threads << 18 };
            let rate = bare_loop(&path, how, Duration::from_millis(20)).unwrap();
            assert!(rate.reads > 0 && rate.bytes == rate.reads * block_bytes as u64 && rate.seconds > 0.0);
        }
        let fast = smallest_fast_block(&path, 0.9, Duration::from_millis(2)).unwrap();
        assert!(fast.is_power_of_two() && (4096..=1 << 20).contains(&fast), "{fast}");
        // Whatever the rates, every size has a share of none.
        assert_eq!(smallest_fast_block(&path, 0.0, Duration::from_millis(2)).unwrap(), 4096);
        let how = BareLoop { block_bytes: 2 << 20, depth: 1, threads: 1, sequential: true, memory_bytes: 0 };
        assert!(bare_loop(&path, how, Duration::from_millis(1)).is_err());
    }
}
