//! A file to measure a disk with. It has no name any more when it is used, so nothing is left behind however this
//! ends.

use anyhow::Context;
use esker_io::{Access, AlignedBuffer, DIRECT_ALIGN, Disk, IoCounters, Layout, Options, Piece, ThisMachine};
use esker_types::random::Key;
use esker_types::{ByteCount, Progress, Unit};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CHUNK_BYTES: u64 = 4 << 20;
/// Chunks in memory: one being made, the others being written.
const CHUNKS: usize = 3;

pub struct MeasuringFile {
    /// A path that opens it.
    pub path: PathBuf,
    /// What writing it took.
    pub written: IoCounters,
    pub seconds: Duration,
    _file: File,
}

/// What a scratch file holds at byte `8 * word`: not compressible, not shareable, because some disks cheat on zeros.
pub fn word(number: u64) -> u64 {
    Key::new(1).at(number)
}

impl MeasuringFile {
    /// Writes `bytes` bytes (rounded to 4 MiB), or a tenth of the free space if that is less.
    pub fn create(directory: &Path, bytes: u64, progress: &dyn Progress) -> anyhow::Result<MeasuringFile> {
        let free = esker_io::available_bytes(directory).unwrap_or(bytes * 10);
        let bytes = (free / 10).min(bytes) / CHUNK_BYTES * CHUNK_BYTES;
        anyhow::ensure!(
            bytes > 0,
            "{}: {} free; measuring the disk needs 40 MiB at least",
            directory.display(),
            ByteCount(free)
        );
        let name = directory.join(format!(".esker-scratch-{}", std::process::id()));
        let named = || name.display().to_string();
        let file = File::options().read(true).write(true).create_new(true).open(&name).with_context(named)?;
        // From here on the file is gone with this process, even if that is killed.
        fs::remove_file(&name).with_context(named)?;
        esker_io::reserve(&file, bytes).with_context(named)?;
        MeasuringFile::fill(file, bytes, progress)
    }

    fn fill(file: File, bytes: u64, progress: &dyn Progress) -> anyhow::Result<MeasuringFile> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let layout = Layout::file(&path);
        let files = ThisMachine.open(&[layout], Access::Write, &Options::default())?;
        let mut queue = files.queue()?;
        let mut spare: Vec<AlignedBuffer> =
            (0..CHUNKS).map(|_| AlignedBuffer::new(CHUNK_BYTES as usize, DIRECT_ALIGN)).collect();
        spare.iter().for_each(|buffer| {
            queue.register(buffer);
        });
        progress.stage("write", Some(bytes), Unit::Bytes);
        let started = Instant::now();
        for offset in (0..bytes).step_by(CHUNK_BYTES as usize) {
            let mut buffer = match spare.pop() {
                Some(buffer) => buffer,
                None => {
                    let finished = queue.wait().context("all chunks are being written")?;
                    finished.result?;
                    finished.buffer
                }
            };
            let words = buffer.chunks_exact_mut(8).zip(offset / 8..);
            words.for_each(|(place, number)| place.copy_from_slice(&word(number).to_le_bytes()));
            queue.submit_write(0, vec![Piece { offset, bytes: CHUNK_BYTES, at: 0 }], buffer);
            progress.advance(CHUNK_BYTES);
        }
        while let Some(finished) = queue.wait() {
            finished.result?;
        }
        queue.sync()?;
        progress.finish();
        let written = queue.counters();
        Ok(MeasuringFile { path, written, seconds: started.elapsed(), _file: file })
    }
}
