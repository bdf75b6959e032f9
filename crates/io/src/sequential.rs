//! Long sequential streams that keep the page cache small. A cgroup counts the page cache, and dirty pages cannot be
//! reclaimed: a writer that is faster than the disk is stalled or killed. So a writer starts write-back of each window
//! at once, waits for the previous window, and drops that one from the cache.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

const BUFFER_BYTES: usize = 1 << 20;
const WINDOW_BYTES: u64 = 8 << 20;

/// Writes a file from front to back.
pub struct SequentialWriter {
    file: File,
    buffer: Vec<u8>,
    handed_over: u64,
    window_start: u64,
    window_before: u64,
}

impl SequentialWriter {
    /// Creates or truncates `path`.
    pub fn create(path: &Path) -> io::Result<SequentialWriter> {
        SequentialWriter::resume(path, 0)
    }

    /// Resumes after the first `keep_bytes` of `path`; the rest is truncated.
    pub fn resume(path: &Path, keep_bytes: u64) -> io::Result<SequentialWriter> {
        SequentialWriter::resume_over(path, keep_bytes, keep_bytes)
    }

    /// Resumes at `position` among the first `keep_bytes` of `path`: those after it stay until they are written again,
    /// so that whoever is killed before that finds them as they were.
    pub fn resume_over(path: &Path, keep_bytes: u64, position: u64) -> io::Result<SequentialWriter> {
        assert!(position <= keep_bytes, "a writer resumes within what is kept");
        let mut file = File::options().create(true).truncate(false).write(true).open(path)?;
        let found_bytes = file.metadata()?.len();
        if found_bytes < keep_bytes {
            let text = format!("{keep_bytes} bytes were written earlier, the file has {found_bytes}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        file.set_len(keep_bytes)?;
        file.seek(SeekFrom::Start(position))?;
        let buffer = Vec::with_capacity(BUFFER_BYTES);
        Ok(SequentialWriter {
            file,
            buffer,
            handed_over: position,
            window_start: position,
            window_before: position,
        })
    }

    /// Bytes written so far, including those that a resumed file kept.
    pub fn position(&self) -> u64 {
        self.handed_over + self.buffer.len() as u64
    }

    /// Returns when everything written so far is on the disk.
    pub fn sync(&mut self) -> io::Result<()> {
        self.flush()?;
        self.file.sync_all()
    }

    /// Writes the remaining bytes and syncs.
    pub fn finish(mut self) -> io::Result<u64> {
        self.sync()?;
        drop_cached(&self.file, 0, 0);
        Ok(self.handed_over)
    }

    fn hand_over(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.handed_over += bytes.len() as u64;
        if self.handed_over - self.window_start >= WINDOW_BYTES {
            self.turn_window()?;
        }
        Ok(())
    }

    /// Starts write-back of the window just filled and waits for the previous one. Waiting consumes a write-back
    /// error, so it must be reported here: a later sync would not see it again.
    fn turn_window(&mut self) -> io::Result<()> {
        let (start, length) = (self.window_start, self.handed_over - self.window_start);
        sync_range(&self.file, start, length, libc::SYNC_FILE_RANGE_WRITE)?;
        let before = self.window_before;
        sync_range(&self.file, before, start - before, WAIT_FLAGS)?;
        drop_cached(&self.file, before, start);
        (self.window_before, self.window_start) = (start, self.handed_over);
        Ok(())
    }
}

impl Write for SequentialWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.buffer.len() + bytes.len() > BUFFER_BYTES {
            self.flush()?;
        }
        if bytes.len() >= BUFFER_BYTES {
            self.hand_over(bytes)?;
        } else {
            self.buffer.extend_from_slice(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let buffer = std::mem::take(&mut self.buffer);
        let result = self.hand_over(&buffer);
        self.buffer = buffer;
        self.buffer.clear();
        result
    }
}

/// Reads a file from an offset to the end, and drops the pages it has passed from the page cache.
pub struct SequentialReader {
    file: File,
    position: u64,
    dropped: u64,
}

impl SequentialReader {
    /// Opens `path` at `offset`. Reads are not buffered: request large pieces.
    pub fn open(path: &Path, offset: u64) -> io::Result<SequentialReader> {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(offset))?;
        advise(&file, 0, 0, libc::POSIX_FADV_SEQUENTIAL);
        Ok(SequentialReader { file, position: offset, dropped: offset })
    }
}

impl Read for SequentialReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(out)?;
        self.position += count as u64;
        if self.position - self.dropped >= WINDOW_BYTES {
            drop_cached(&self.file, self.dropped, self.position);
            self.dropped = self.position;
        }
        Ok(count)
    }
}

pub(crate) const WAIT_FLAGS: u32 =
    libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;

pub(crate) fn sync_range(file: &File, start: u64, length: u64, flags: u32) -> io::Result<()> {
    if length == 0 {
        return Ok(());
    }
    // SAFETY: a system call on an open descriptor that takes numbers only.
    let code = unsafe { libc::sync_file_range(file.as_raw_fd(), start as i64, length as i64, flags) };
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        _ if code == 0 => Ok(()),
        // File systems without it write back at their own pace; the final sync still reports errors.
        Some(libc::ENOSYS | libc::EINVAL | libc::ESPIPE | libc::EOPNOTSUPP) => Ok(()),
        _ => Err(error),
    }
}

/// Drops clean pages of `start..end` (`end` 0: to the end of the file) from the page cache.
pub(crate) fn drop_cached(file: &File, start: u64, end: u64) {
    let length = end.saturating_sub(start);
    advise(file, start, length, libc::POSIX_FADV_DONTNEED);
}

/// What one request to read ahead asks for: the kernel reads no more than its read-ahead window, or the device's largest
/// request, for one.
const READ_AHEAD_BYTES: u64 = 128 << 10;

/// Starts to read a range of a file into the page cache, and does not wait for it. Reading the range later then waits
/// for the disk only if it comes before the disk has delivered. It is advice: without memory or support it does nothing.
pub fn read_ahead(file: &File, start: u64, bytes: u64) {
    let end = start.saturating_add(bytes);
    let mut at = start;
    while at < end {
        let length = READ_AHEAD_BYTES.min(end - at);
        advise(file, at, length, libc::POSIX_FADV_WILLNEED);
        at += length;
    }
}

pub(crate) fn advise(file: &File, start: u64, length: u64, advice: i32) {
    // SAFETY: a system call on an open descriptor that takes numbers only; failure changes nothing.
    unsafe {
        libc::posix_fadvise(file.as_raw_fd(), start as i64, length as i64, advice);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_in_any_pieces_is_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        let bytes: Vec<u8> =
            (0..20_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut writer = SequentialWriter::create(&path).unwrap();
        let (mut at, mut piece) = (0, 1);
        while at < bytes.len() {
            let end = (at + piece).min(bytes.len());
            writer.write_all(&bytes[at..end]).unwrap();
            (at, piece) = (end, piece * 3 % 3_000_017);
        }
        assert_eq!(writer.finish().unwrap(), bytes.len() as u64);
        let mut found = Vec::new();
        SequentialReader::open(&path, 5).unwrap().read_to_end(&mut found).unwrap();
        assert!(found == bytes[5..]);
    }

    #[test]
    fn a_range_that_is_read_ahead_reads_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        let bytes: Vec<u8> = (0..1_000_003u32).map(|i| (i / 3 % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = File::open(&path).unwrap();
        // Also beyond the end, where there is nothing to read.
        for (start, length) in [(0, 0), (0, 1), (5, 300_000), (900_000, 500_000), (5_000_000, 1)] {
            read_ahead(&file, start, length);
        }
        let mut found = Vec::new();
        SequentialReader::open(&path, 0).unwrap().read_to_end(&mut found).unwrap();
        assert!(found == bytes);
    }

    #[test]
    fn a_resumed_file_keeps_its_start_and_loses_the_rest() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        std::fs::write(&path, "abcdef").unwrap();
        let mut writer = SequentialWriter::resume(&path, 3).unwrap();
        writer.write_all(b"XY").unwrap();
        writer.finish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"abcXY");
        assert!(SequentialWriter::resume(&path, 6).is_err());
    }
}
