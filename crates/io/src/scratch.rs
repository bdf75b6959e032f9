//! An unlinked temporary file: nobody else sees it, and it disappears with its process, however that ends. It is
//! written and read at any position in large pieces. Written data is flushed to the disk early: dirty pages cannot be
//! reclaimed, and a cgroup counts them.

use crate::sequential::{WAIT_FLAGS, advise, sync_range};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Written bytes are flushed in windows of at least this size.
const WINDOW_BYTES: u64 = 12 << 20;

/// An unlinked temporary file.
#[derive(Debug)]
pub struct ScratchFile {
    file: File,
    folder: PathBuf,
    written: Mutex<WrittenRanges>,
}

/// The range being flushed, and the range written since.
#[derive(Debug, Default)]
struct WrittenRanges {
    leaving: Range<u64>,
    fresh: Range<u64>,
}

impl ScratchFile {
    /// Creates a file on the disk of `folder`.
    pub fn create(folder: &Path) -> io::Result<ScratchFile> {
        let nameless = File::options().read(true).write(true).custom_flags(libc::O_TMPFILE).open(folder);
        let file = match nameless {
            // Not every file system supports O_TMPFILE: there, create a file and unlink it at once.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT)) =>
            {
                static MADE: AtomicU64 = AtomicU64::new(0);
                let number = MADE.fetch_add(1, Ordering::Relaxed);
                let path = folder.join(format!("scratch-{}-{number}.partial", std::process::id()));
                let file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
                std::fs::remove_file(&path)?;
                file
            }
            made => made?,
        };
        advise(&file, 0, 0, libc::POSIX_FADV_RANDOM);
        Ok(ScratchFile { file, folder: folder.to_path_buf(), written: Mutex::default() })
    }

    /// Its folder, for messages.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes all of `bytes`.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)?;
        let end = offset + bytes.len() as u64;
        let mut written = self.written.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let fresh = &mut written.fresh;
        // Adjacent writes extend the range, at either end.
        *fresh = match fresh.is_empty() {
            true => offset..end,
            false => fresh.start.min(offset)..fresh.end.max(end),
        };
        if fresh.end - fresh.start >= WINDOW_BYTES {
            let fresh = std::mem::take(fresh);
            sync_range(&self.file, fresh.start, fresh.end - fresh.start, libc::SYNC_FILE_RANGE_WRITE)?;
            let leaving = std::mem::replace(&mut written.leaving, fresh);
            // Waiting consumes a write-back error, so it is reported here.
            sync_range(&self.file, leaving.start, leaving.end - leaving.start, WAIT_FLAGS)?;
        }
        Ok(())
    }

    /// Fills `out`. It is an error if the file ends before.
    pub fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_from_either_end_is_read_back_and_nothing_stays() {
        let directory = tempfile::tempdir().unwrap();
        let file = ScratchFile::create(directory.path()).unwrap();
        let piece = |number: u64| vec![number as u8; 700_000];
        (0..20).rev().for_each(|number| file.write_at(&piece(number), number * 700_000).unwrap());
        (20..60).for_each(|number| file.write_at(&piece(number), number * 700_000).unwrap());
        let mut out = vec![0; 700_000];
        for number in [59, 0, 7, 20, 19] {
            file.read_at(&mut out, number * 700_000).unwrap();
            assert!(out == piece(number), "{number}");
        }
        assert!(file.read_at(&mut out, 60 * 700_000 - 1).is_err());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
