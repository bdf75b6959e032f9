//! A directory for files that are of no use after their loader.

use crate::{Result, TrainError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Directories of this process so far, to tell them apart.
static MADE: AtomicU64 = AtomicU64::new(0);

/// A directory that is removed when it is dropped.
pub(super) struct ScratchFolder(PathBuf);

impl ScratchFolder {
    /// Creates one inside `parent`.
    pub fn inside(parent: &Path) -> Result<ScratchFolder> {
        std::fs::create_dir_all(parent).map_err(TrainError::io(parent))?;
        loop {
            let number = MADE.fetch_add(1, Ordering::Relaxed);
            let path = parent.join(format!("esker-loader-{}-{number}", std::process::id()));
            match std::fs::create_dir(&path) {
                Ok(()) => return Ok(ScratchFolder(path)),
                // Of a process of another machine or container with the same number, or of one that was killed.
                Err(found) if found.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(found) => return Err(TrainError::io(&path)(found)),
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        // What is left is the system's to clean.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
