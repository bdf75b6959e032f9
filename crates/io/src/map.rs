//! A memory-mapped file: the kernel reads it through the page cache, page by page on first access. It does not count
//! as the process's own memory, and the process does not control it. This is a baseline, not Esker's engine.

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;

/// How a mapping will be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// At random positions: the kernel does not read ahead.
    Random,
    /// From front to back.
    Sequential,
}

/// Part of a file as read-only bytes. The file must not change while it is memory-mapped: datasets are immutable once
/// they have their name. A page that the disk cannot read, or that was truncated, ends the process (SIGBUS), as with
/// every mapping.
#[derive(Debug)]
pub struct Map {
    start: NonNull<u8>,
    /// Bytes memory-mapped, from a page boundary.
    mapped: usize,
    /// The requested range within them.
    asked: Range<usize>,
}

// SAFETY: the mapping is read-only and lives until it is dropped, whichever thread does that.
unsafe impl Send for Map {}
// SAFETY: as above: nobody writes to it.
unsafe impl Sync for Map {}

impl Map {
    /// Memory-maps `range` of a file. The file must be at least that long.
    pub fn open(path: &Path, range: Range<u64>, touch: Touch) -> io::Result<Map> {
        let file = File::open(path)?;
        let bytes = file.metadata()?.len();
        if range.start > range.end || range.end > bytes {
            let text = format!("bytes {range:?} of a file of {bytes} are to be mapped");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        // SAFETY: sysconf only reads.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as u64;
        let first = range.start / page * page;
        let mapped = (range.end - first) as usize;
        let asked = (range.start - first) as usize..mapped;
        if mapped == 0 {
            return Ok(Map { start: NonNull::dangling(), mapped, asked });
        }
        // SAFETY: a new read-only mapping at an address chosen by the kernel; the result is checked.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                first as libc::off_t,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let advice = match touch {
            Touch::Random => libc::MADV_RANDOM,
            Touch::Sequential => libc::MADV_SEQUENTIAL,
        };
        // SAFETY: the range is the mapping's own. Advice changes only speed, so a refusal is ignored.
        unsafe { libc::madvise(start, mapped, advice) };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("a mapping at address 0"))?;
        Ok(Map { start, mapped, asked })
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has `mapped` readable bytes until it is dropped; an empty one has a dangling pointer.
        let all = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.mapped) };
        &all[self.asked.clone()]
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.mapped > 0 {
            // SAFETY: the range is the mapping's own and nobody can borrow it any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.mapped) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_of_a_file_is_mapped_or_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bytes");
        let bytes: Vec<u8> = (0..20_000u32).map(|byte| (byte * 7 % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        for range in [0..20_000, 1..2, 4096..8192, 4095..12_001, 19_999..20_000, 5..5, 0..0, 20_000..20_000] {
            let map = Map::open(&path, range.start as u64..range.end as u64, Touch::Random).unwrap();
            assert_eq!(&map[..], &bytes[range]);
        }
        assert!(Map::open(&path, 0..20_001, Touch::Sequential).is_err());
        assert!(Map::open(&directory.path().join("none"), 0..1, Touch::Random).is_err());
    }

    #[test]
    fn a_map_can_be_read_by_other_threads() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bytes");
        std::fs::write(&path, vec![3u8; 9000]).unwrap();
        let map = std::sync::Arc::new(Map::open(&path, 0..9000, Touch::Random).unwrap());
        let other = map.clone();
        let sum =
            std::thread::spawn(move || other.iter().map(|byte| *byte as u64).sum::<u64>()).join().unwrap();
        assert_eq!(sum, map.iter().map(|byte| *byte as u64).sum::<u64>());
    }
}
