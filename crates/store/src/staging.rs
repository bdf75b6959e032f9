//! Builds a directory of arrays that appears complete or not at all.
//!
//! Everything is written to `NAME.partial`. Nothing opens it, because its manifest is written last. Then the directory
//! is synced and renamed. If the job is killed before the manifest is written, the next run finds the job's journal
//! and resumes. If it is killed between manifest and rename, the next run finds the job's fingerprint in `lock` and
//! only renames.

use crate::files::{self, sync_directory};
use crate::homes;
use crate::{Dataset, Journal, Manifest, Result, StoreError, file};
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Marks a directory as Esker's. It is locked while the directory is being built; then it contains the fingerprint.
const LOCK: &str = "lock";
const WORK: &str = "work";
/// Content of the lock file of a dataset that is being replaced.
const REPLACED: &str = "replaced";

/// A directory being built.
pub struct Staging {
    target: PathBuf,
    directory: PathBuf,
    /// The name of the manifest that makes it complete.
    manifest_name: &'static str,
    overwrite: bool,
    lock: File,
}

impl Staging {
    /// Starts or resumes building the dataset `target`. `overwrite` allows replacing a dataset of that name at the
    /// end. Anything else of that name is never touched.
    pub fn begin(target: &Path, overwrite: bool) -> Result<Staging> {
        Staging::begin_with(target, overwrite, file::MANIFEST)
    }

    pub(crate) fn begin_with(target: &Path, overwrite: bool, manifest_name: &'static str) -> Result<Staging> {
        let name = target.file_name().map(|name| name.to_owned());
        let Some(mut partial) = name.filter(|name| !name.as_encoded_bytes().ends_with(b".partial")) else {
            let source = io::Error::other("a dataset cannot have this name; choose another");
            return Err(StoreError::Io { path: target.to_path_buf(), source });
        };
        partial.push(".partial");
        let directory = target.with_file_name(partial);
        recover_aside(target, &aside(&directory))?;
        check_replaceable(target, overwrite, manifest_name)?;
        if !is_empty(&directory)? && !directory.join(LOCK).exists() {
            return Err(StoreError::Foreign { path: directory });
        }
        fs::create_dir_all(&directory).map_err(StoreError::io(&directory))?;
        let lock_path = directory.join(LOCK);
        let lock = open_lock(&lock_path)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StoreError::Busy { path: target.to_path_buf() }),
            Err(TryLockError::Error(error)) => return Err(StoreError::io(&lock_path)(error)),
        }
        // The previous owner of the lock may have finished and renamed the directory, including the file we opened.
        let same = |a: &fs::Metadata, b: &fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        let ours = lock.metadata().map_err(StoreError::io(&lock_path))?;
        if !fs::metadata(&lock_path).is_ok_and(|found| same(&found, &ours)) {
            return Err(StoreError::Busy { path: target.to_path_buf() });
        }
        Ok(Staging { target: target.to_path_buf(), directory, manifest_name, overwrite, lock })
    }

    /// The directory for arrays.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The directory for temporary files.
    pub fn work_directory(&self) -> PathBuf {
        self.directory.join(WORK)
    }

    /// Whether an earlier run of the job with this fingerprint completed everything but the rename.
    pub fn is_complete(&self, fingerprint: &str) -> bool {
        lock_says(&self.directory, fingerprint) && self.directory.join(self.manifest_name).exists()
    }

    /// The journal of the job with this fingerprint. Files of another job are removed first.
    pub fn journal(&self, fingerprint: &str) -> Result<(Journal, bool)> {
        self.lock.set_len(0).map_err(StoreError::io(&self.directory))?;
        let (journal, resumed) = Journal::open(&self.work_directory(), fingerprint)?;
        if !resumed {
            self.keep_only(|name| name == LOCK || name == WORK)?;
        }
        Ok((journal, resumed))
    }

    /// Whether `target` is the result of the job with this fingerprint. This is so if a kill came between the rename
    /// and the final cleanup; the cleanup is done now.
    pub fn is_in_place(target: &Path, fingerprint: &str) -> Result<bool> {
        if !lock_says(target, fingerprint) || Dataset::open(target).is_err() {
            return Ok(false);
        }
        let mut partial = target.as_os_str().to_owned();
        partial.push(".partial");
        let old = PathBuf::from(partial);
        if lock_says(&old, REPLACED) {
            remove_own(&old)?;
        }
        remove(&target.join(LOCK))?;
        Ok(true)
    }

    /// Removes everything.
    pub fn discard(self) -> Result<()> {
        remove_own(&self.directory).map(drop)
    }

    fn keep_only(&self, keep: impl Fn(&str) -> bool) -> Result<()> {
        homes::release(&self.directory)?;
        for found in fs::read_dir(&self.directory).map_err(StoreError::io(&self.directory))? {
            let path = found.map_err(StoreError::io(&self.directory))?.path();
            if !path.file_name().and_then(|name| name.to_str()).is_some_and(&keep) {
                remove(&path)?;
            }
        }
        Ok(())
    }

    /// Writes a dataset's manifest, checks that the result opens, and renames the directory to its final name. Returns
    /// messages about parts of a replaced dataset that were left, and why.
    pub fn publish(self, manifest: &Manifest, fingerprint: &str) -> Result<Vec<String>> {
        let listed: Vec<String> = manifest.files.iter().map(|entry| format!("{}.bin", entry.name)).collect();
        self.complete(&manifest.to_text(), fingerprint, &listed, |directory| {
            Dataset::open(directory).map(drop)
        })?;
        self.put_in_place()
    }

    /// Writes the manifest and, if `check` succeeds, marks the directory as complete: only the rename is missing then.
    pub(crate) fn complete(
        &self,
        text: &str,
        fingerprint: &str,
        listed: &[String],
        check: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        self.keep_only(|name| name == LOCK || name == WORK || listed.iter().any(|listed| listed == name))?;
        files::replace(&self.directory.join(self.manifest_name), text.as_bytes())?;
        check(&self.directory)?;
        let lock_path = self.directory.join(LOCK);
        // Not replaced by a rename: the locked file must keep this name.
        write_lock(&self.lock, fingerprint)
            .and_then(|()| self.lock.sync_all())
            .map_err(StoreError::io(&lock_path))?;
        remove(&self.work_directory())?;
        sync_directory(&self.directory)
    }

    /// Renames a complete directory to its final name. A dataset that is replaced exists until the moment of the
    /// rename. Returns messages about its parts that were left, and why.
    pub fn put_in_place(self) -> Result<Vec<String>> {
        remove(&self.work_directory())?;
        let parent = match self.target.parent() {
            Some(parent) if parent != Path::new("") => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        check_replaceable(&self.target, self.overwrite, self.manifest_name)?;
        let mut left = Vec::new();
        if self.target.symlink_metadata().is_ok() {
            left = self.replace(&parent)?;
        } else {
            fs::rename(&self.directory, &self.target).map_err(StoreError::io(&self.target))?;
            sync_directory(&parent)?;
        }
        remove(&self.target.join(LOCK))?;
        Ok(left)
    }

    fn replace(&self, parent: &Path) -> Result<Vec<String>> {
        // A process that stripes the old dataset uses its name: the new one must not get it meanwhile. File systems
        // that cannot lock a directory cannot stripe either.
        let old = File::open(&self.target).map_err(StoreError::io(&self.target))?;
        if let Err(TryLockError::WouldBlock) = old.try_lock() {
            return Err(StoreError::Busy { path: self.target.clone() });
        }
        // Marked as Esker's, so that the next run may remove what a kill from here on leaves. Locked, so that nobody
        // starts building while the old dataset is being removed.
        let lock_path = self.target.join(LOCK);
        let old_lock = open_lock(&lock_path)?;
        old_lock.try_lock().map_err(|_| StoreError::Busy { path: self.target.clone() })?;
        write_lock(&old_lock, REPLACED).map_err(StoreError::io(&lock_path))?;
        match esker_io::exchange(&self.directory, &self.target) {
            Ok(()) => {
                sync_directory(parent)?;
                remove_own(&self.directory)
            }
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                // Without an atomic swap there is a moment without a dataset, but never with half of one.
                // `recover_aside` repairs the state after a kill in between.
                let aside = aside(&self.directory);
                fs::rename(&self.target, &aside).map_err(StoreError::io(&self.target))?;
                fs::rename(&self.directory, &self.target).map_err(StoreError::io(&self.target))?;
                sync_directory(parent)?;
                remove_own(&aside)
            }
            Err(error) => Err(StoreError::io(&self.target)(error)),
        }
    }
}

/// Opens or creates the lock file.
fn open_lock(path: &Path) -> Result<File> {
    files::refuse_links(path)?;
    let lock = File::options().create(true).truncate(false).read(true).write(true).open(path);
    lock.map_err(StoreError::io(path))
}

fn write_lock(lock: &File, text: &str) -> io::Result<()> {
    lock.set_len(0)?;
    lock.write_all_at(text.as_bytes(), 0)
}

/// Whether the lock file in `directory` contains exactly this text.
fn lock_says(directory: &Path, text: &str) -> bool {
    files::read(&directory.join(LOCK)).is_ok_and(|found| found == text.as_bytes())
}

/// Where a dataset is stored while another replaces it, on file systems that cannot swap.
fn aside(partial: &Path) -> PathBuf {
    let mut name = partial.as_os_str().to_owned();
    name.push("-old");
    PathBuf::from(name)
}

/// Moves a dataset that was set aside back, or removes it if its successor is in place.
fn recover_aside(target: &Path, aside: &Path) -> Result<()> {
    if aside.symlink_metadata().is_err() {
        return Ok(());
    }
    if !lock_says(aside, REPLACED) {
        return Err(StoreError::Foreign { path: aside.to_path_buf() });
    }
    if target.symlink_metadata().is_err() {
        return fs::rename(aside, target).map_err(StoreError::io(target));
    }
    remove_own(aside).map(drop)
}

/// Allows replacing a dataset if `overwrite` is set, or an empty directory.
fn check_replaceable(target: &Path, overwrite: bool, manifest_name: &str) -> Result<()> {
    if target.symlink_metadata().is_err() {
        return Ok(());
    }
    let is_dataset = target.join(manifest_name).is_file() && !target.is_symlink();
    match (is_dataset, overwrite) {
        (true, true) => Ok(()),
        (true, false) => Err(StoreError::Exists { path: target.to_path_buf() }),
        _ if target.is_dir() && !target.is_symlink() && is_empty(target)? => {
            fs::remove_dir(target).map_err(StoreError::io(target))
        }
        _ => Err(StoreError::Foreign { path: target.to_path_buf() }),
    }
}

/// Whether the path does not exist or is an empty directory.
fn is_empty(path: &Path) -> Result<bool> {
    match fs::read_dir(path) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(path.symlink_metadata().is_err()),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(path.symlink_metadata().is_err()),
        Err(error) => Err(StoreError::io(path)(error)),
    }
}

/// Removes a directory of Esker's, including the dataset's own stripe parts on other disks. Returns messages about
/// what remains. The lock file is removed last, so that a kill in between does not leave something that looks foreign.
fn remove_own(directory: &Path) -> Result<Vec<String>> {
    let left = homes::release(directory)?;
    for found in fs::read_dir(directory).map_err(StoreError::io(directory))? {
        let path = found.map_err(StoreError::io(directory))?.path();
        if path.file_name() != Some(LOCK.as_ref()) {
            remove(&path)?;
        }
    }
    remove(directory)?;
    Ok(left)
}

/// Removes a file or directory if it exists.
fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(StoreError::io(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A complete directory that only needs the rename.
    fn complete(target: &Path, text: &str) -> Staging {
        let staging = Staging::begin(target, true).unwrap();
        staging.journal("job").unwrap();
        fs::write(staging.work_directory().join("run-0"), "x").unwrap();
        staging.complete(text, "job", &[], |_| Ok(())).unwrap();
        staging
    }

    fn manifest_of(target: &Path) -> String {
        fs::read_to_string(target.join(file::MANIFEST)).unwrap()
    }

    fn names_in(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_kill_before_the_rename_costs_the_rename_only() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("d");
        drop(complete(&target, "one"));
        // As if the kill had happened before the work directory was removed.
        fs::create_dir(directory.path().join("d.partial/work")).unwrap();
        let staging = Staging::begin(&target, false).unwrap();
        assert!(staging.is_complete("job") && !staging.is_complete("another job"));
        staging.put_in_place().unwrap();
        assert_eq!((manifest_of(&target), names_in(&target)), ("one".into(), vec!["esker.json".to_string()]));
        assert_eq!(names_in(directory.path()), ["d"]);
    }

    #[test]
    fn replacing_leaves_one_dataset_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("d");
        complete(&target, "one").put_in_place().unwrap();
        complete(&target, "two").put_in_place().unwrap();
        assert_eq!((manifest_of(&target), names_in(directory.path())), ("two".into(), vec!["d".to_string()]));
    }

    #[test]
    fn a_dataset_set_aside_by_a_kill_comes_back() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("d");
        complete(&target, "one").put_in_place().unwrap();
        fs::write(target.join(LOCK), REPLACED).unwrap();
        fs::rename(&target, directory.path().join("d.partial-old")).unwrap();
        drop(Staging::begin(&target, true).unwrap());
        assert_eq!(manifest_of(&target), "one");
    }

    #[test]
    fn a_half_removed_directory_of_ours_is_removed_by_the_next_run() {
        let directory = tempfile::tempdir().unwrap();
        let partial = directory.path().join("d.partial");
        fs::create_dir(&partial).unwrap();
        fs::write(partial.join(LOCK), REPLACED).unwrap();
        fs::write(partial.join("node-features.bin"), "old").unwrap();
        complete(&directory.path().join("d"), "new").put_in_place().unwrap();
        assert_eq!(names_in(directory.path()), ["d"]);
    }

    #[test]
    fn two_writers_of_one_name_are_told_apart() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("d");
        let first = Staging::begin(&target, false).unwrap();
        assert!(matches!(Staging::begin(&target, false), Err(StoreError::Busy { .. })));
        drop(first);
        assert!(Staging::begin(&target, false).is_ok());
    }
}
