//! Building a directory of arrays so that it appears whole or not at all.
//!
//! Everything is written to `NAME.partial`, which nothing opens because its manifest is written last; then the
//! directory is synced and renamed. Killed before the rename, the next run of the same job finds its journal and
//! goes on; killed behind it, the dataset is there and only leftovers of the work remain inside.

use crate::journal::{replace_file, sync_directory};
use crate::{Journal, Manifest, Result, StoreError, file};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// A directory being built.
pub struct Staging {
    target: PathBuf,
    directory: PathBuf,
    overwrite: bool,
    _lock: File,
}

impl Staging {
    /// Starts (or goes on) building `target`. `overwrite` allows a directory of that name to be replaced at the end.
    pub fn begin(target: &Path, overwrite: bool) -> Result<Staging> {
        let name = target.file_name().ok_or_else(|| StoreError::Io {
            path: target.to_path_buf(),
            source: io::Error::other("this path has no last name to create"),
        })?;
        if target.exists() && !overwrite {
            return Err(StoreError::Exists { path: target.to_path_buf() });
        }
        let mut partial = name.to_owned();
        partial.push(".partial");
        let directory = target.with_file_name(partial);
        fs::create_dir_all(&directory).map_err(StoreError::io(&directory))?;
        let lock_path = directory.join("lock");
        let lock = File::create(&lock_path).map_err(StoreError::io(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StoreError::Busy { path: target.to_path_buf() }),
            Err(TryLockError::Error(error)) => return Err(StoreError::io(&lock_path)(error)),
        }
        Ok(Staging { target: target.to_path_buf(), directory, overwrite, _lock: lock })
    }

    /// Where arrays go.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where temporary files go.
    pub fn work_directory(&self) -> PathBuf {
        self.directory.join("work")
    }

    /// The journal of the job that `fingerprint` names; what another job left here is removed first.
    pub fn journal(&self, fingerprint: &str) -> Result<(Journal, bool)> {
        let (journal, resumed) = Journal::open(&self.work_directory(), fingerprint)?;
        if !resumed {
            self.keep_only(|name| name == "lock" || name == "work")?;
        }
        Ok((journal, resumed))
    }

    fn keep_only(&self, keep: impl Fn(&str) -> bool) -> Result<()> {
        for found in fs::read_dir(&self.directory).map_err(StoreError::io(&self.directory))? {
            let path = found.map_err(StoreError::io(&self.directory))?.path();
            if !path.file_name().and_then(|name| name.to_str()).is_some_and(&keep) {
                remove(&path)?;
            }
        }
        Ok(())
    }

    /// Writes a dataset's manifest and gives the directory its name.
    pub fn publish(self, manifest: &Manifest) -> Result<()> {
        let listed: Vec<String> = manifest.files.iter().map(|entry| format!("{}.bin", entry.name)).collect();
        self.publish_as(file::MANIFEST, &manifest.to_text(), |name| {
            listed.iter().any(|listed| listed == name)
        })
    }

    pub(crate) fn publish_as(
        self,
        manifest_name: &str,
        text: &str,
        keep: impl Fn(&str) -> bool,
    ) -> Result<()> {
        self.keep_only(|name| name == "lock" || name == "work" || keep(name))?;
        replace_file(&self.directory.join(manifest_name), text.as_bytes())?;
        let parent = match self.target.parent() {
            Some(parent) if parent != Path::new("") => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        if self.target.exists() {
            if !self.overwrite {
                return Err(StoreError::Exists { path: self.target.clone() });
            }
            remove(&self.target)?;
        }
        fs::rename(&self.directory, &self.target).map_err(StoreError::io(&self.target))?;
        sync_directory(&parent)?;
        // Whole and named: the rest is tidying, and may be lost to a kill.
        remove(&self.target.join("work"))?;
        remove(&self.target.join("lock"))
    }
}

/// Removes a file or a directory, if it is there.
fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(StoreError::io(path)),
    }
}
