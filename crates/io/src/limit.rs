//! The limit of a disk: what a bare loop gets out of it that does nothing but read blocks, as fast as it can be
//! asked, and throws them away. No plan, no row, no check but that a block came: everything above is measured
//! against this.

use crate::disk::{Access, Disk, ThisMachine};
use crate::layout::Layout;
use crate::rung::{Options, Rung};
use crate::{AlignedBuffer, DIRECT_ALIGN, IoError};
use esker_types::random::{Key, below};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a bare loop reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BareLoop {
    /// Bytes of a read, and what its offset is a multiple of.
    pub block_bytes: usize,
    /// Requests in flight in each thread.
    pub depth: usize,
    /// Threads, each with a ring of its own.
    pub threads: usize,
    /// One block after the other instead of anywhere.
    pub sequential: bool,
}

/// What a loop achieved.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Reads done.
    pub reads: u64,
    /// Bytes they brought.
    pub bytes: u64,
    /// Seconds by the clock.
    pub seconds: f64,
    /// Seconds of CPU in user and kernel, over all threads.
    pub cpu_seconds: f64,
}

impl Rate {
    /// Reads a second.
    pub fn reads_per_second(&self) -> f64 {
        self.reads as f64 / self.seconds
    }

    /// Bytes a second.
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

/// Reads `path` for `duration` in the best way that works here, and says how fast that was.
pub fn bare_loop(path: &Path, how: BareLoop, duration: Duration) -> Result<Rate, IoError> {
    let files = ThisMachine.open(&[Layout::file(path)], Access::Read, &Options::default())?;
    let (rung, blocks) = (files.rung().clone(), files.bytes(0) / how.block_bytes as u64);
    drop(files);
    if blocks == 0 {
        let found_bytes = 0;
        return Err(IoError::Ended {
            path: path.to_path_buf(),
            expected_bytes: how.block_bytes as u64,
            found_bytes,
        });
    }
    let next = AtomicU64::new(0);
    let (cpu_before, started) = (cpu_seconds(), Instant::now());
    // Without rings, depth is a matter of threads.
    let (threads, ring) =
        if rung.kind.is_uring() { (how.threads, true) } else { ((how.threads * how.depth).min(64), false) };
    let counts: Vec<io::Result<u64>> = std::thread::scope(|scope| {
        let loops: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut turn = || {
                        let turn = next.fetch_add(1, Ordering::Relaxed);
                        let block =
                            if how.sequential { turn % blocks } else { below(Key::new(1).at(turn), blocks) };
                        (started.elapsed() < duration).then_some(block * how.block_bytes as u64)
                    };
                    let file = open(path, &rung)?;
                    match ring {
                        true => ring_loop(&file, how, &mut turn),
                        false => plain_loop(&file, how, &mut turn),
                    }
                })
            })
            .collect();
        loops.into_iter().map(|one| one.join().expect("bare loops do not panic")).collect()
    });
    let (seconds, cpu_seconds) = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu_before);
    let counts: io::Result<Vec<u64>> = counts.into_iter().collect();
    let reads: u64 = counts.map_err(IoError::file(path, "read"))?.iter().sum();
    Ok(Rate { reads, bytes: reads * how.block_bytes as u64, seconds, cpu_seconds })
}

fn open(path: &Path, rung: &Rung) -> io::Result<File> {
    let flags = if rung.kind.is_direct() { libc::O_DIRECT } else { 0 };
    File::options().read(true).custom_flags(flags).open(path)
}

fn plain_loop(file: &File, how: BareLoop, turn: &mut dyn FnMut() -> Option<u64>) -> io::Result<u64> {
    let mut buffer = AlignedBuffer::new(how.block_bytes, DIRECT_ALIGN);
    let mut count = 0;
    while let Some(offset) = turn() {
        file.read_exact_at(&mut buffer, offset)?;
        count += 1;
    }
    Ok(count)
}

fn ring_loop(file: &File, how: BareLoop, turn: &mut dyn FnMut() -> Option<u64>) -> io::Result<u64> {
    let mut builder = IoUring::<squeue::Entry, cqueue::Entry>::builder();
    builder.setup_single_issuer().setup_defer_taskrun();
    let entries = how.depth.next_power_of_two() as u32;
    let mut ring = builder.build(entries).or_else(|_| IoUring::new(entries))?;
    // Declared behind the ring, so dropped before it; every way out below has waited for all reads.
    let mut buffer = AlignedBuffer::new(how.depth * how.block_bytes, DIRECT_ALIGN);
    let memory = buffer.as_mut_ptr();
    let vector = [libc::iovec { iov_base: memory.cast(), iov_len: buffer.len() }];
    // SAFETY: the buffer outlives every request: the loop ends only when none is in flight.
    let registered = unsafe { ring.submitter().register_buffers(&vector) }.is_ok();
    ring.submitter().register_files(&[file.as_raw_fd()])?;
    let mut free: Vec<usize> = (0..how.depth).collect();
    let (mut count, mut in_flight, mut failure) = (0, 0, None);
    loop {
        while failure.is_none()
            && let Some(slot) = free.pop()
        {
            let Some(offset) = turn() else { break };
            // SAFETY: `slot` is below the depth, so this is within the buffer.
            let place = unsafe { memory.add(slot * how.block_bytes) };
            let bytes = how.block_bytes as u32;
            let entry = match registered {
                true => opcode::ReadFixed::new(types::Fixed(0), place, bytes, 0).offset(offset).build(),
                false => opcode::Read::new(types::Fixed(0), place, bytes).offset(offset).build(),
            };
            // SAFETY: the buffer outlives the request, and each slot has one request at a time.
            let pushed = unsafe { ring.submission().push(&entry.user_data(slot as u64)) };
            pushed.expect("the ring holds the depth");
            in_flight += 1;
        }
        if in_flight == 0 {
            return failure.map_or(Ok(count), Err);
        }
        match ring.submit_and_wait((in_flight / 8).clamp(1, 32)) {
            Err(error) if error.raw_os_error() != Some(libc::EINTR) => {
                // Reads may be in flight: their memory must stay.
                std::mem::forget(buffer);
                return Err(error);
            }
            _ => {}
        }
        for entry in ring.completion() {
            match entry.result() {
                result if result == how.block_bytes as i32 => count += 1,
                result if result < 0 => failure = Some(io::Error::from_raw_os_error(-result)),
                _ => failure = Some(io::ErrorKind::UnexpectedEof.into()),
            }
            free.push(entry.user_data() as usize);
            in_flight -= 1;
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
            let how = BareLoop { block_bytes, depth: 8, threads, sequential };
            let rate = bare_loop(&path, how, Duration::from_millis(20)).unwrap();
            assert!(rate.reads > 0 && rate.bytes == rate.reads * block_bytes as u64 && rate.seconds > 0.0);
        }
        let how = BareLoop { block_bytes: 2 << 20, depth: 1, threads: 1, sequential: true };
        assert!(bare_loop(&path, how, Duration::from_millis(1)).is_err());
    }
}
