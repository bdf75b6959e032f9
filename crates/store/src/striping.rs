//! Stripes a dataset's large arrays over several directories, and undoes it.
//!
//! Both directions work the same way. The new copy is written beside the old one, synced, and verified against its
//! checksums. Then the manifest is replaced, and only then the old copy is removed. If the job is killed before the
//! manifest is replaced, the dataset is in its old state; after that, in its new one. The next run finds finished
//! copies under their names and continues with the rest, or removes the remains of the old copy.

use crate::array::{check_part, file_name};
use crate::files::{self, sync_directory};
use crate::homes::{self, Mark, UNFINISHED};
use crate::scan::{Target, scan};
use crate::stripes::stripe_directory;
use crate::verify::NumberRule;
use crate::{Dataset, FileEntry, Manifest, Result, StoreError, Stripes, file};
use esker_io::{Access, Disk, Layout, Options, Piece, Stream, ThisMachine, available_bytes};
use esker_types::{ByteCount, Progress, Unit};
use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Long enough to keep every disk busy, and few: the job should need little memory.
const CHUNK_BYTES: u64 = 8 << 20;
const CHUNKS: usize = 3;

/// Parameters of striping.
#[derive(Debug, Clone)]
pub struct StripeRequest {
    /// One directory per part. They should be on different disks.
    pub over: Vec<PathBuf>,
    /// Length of a stripe.
    pub stripe_bytes: u64,
    /// Arrays shorter than this are not striped.
    pub least_bytes: u64,
}

/// The arrays whose storage changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MovedArrays {
    /// Their names.
    pub arrays: Vec<String>,
    /// Their bytes.
    pub bytes: u64,
}

/// Stripes the large arrays of the dataset in `directory` over other directories; `threads` threads verify the result.
/// Arrays with the same stripes stay as they are. An interrupted run is finished.
pub fn stripe(
    directory: &Path,
    request: &StripeRequest,
    threads: usize,
    progress: &dyn Progress,
) -> Result<MovedArrays> {
    let stripes = Stripes::new(request.over.len() as u32, request.stripe_bytes)
        .map_err(|source| StoreError::Stripes { path: directory.to_path_buf(), source })?;
    let (job, manifest) = StripeJob::begin(directory, threads, progress)?;
    let homes = homes::homes(&job.directory, &request.over)?;
    job.refuse_other_stripes(&manifest, stripes, &homes)?;
    job.note_shared_disks(&request.over)?;
    let chosen = |entry: &FileEntry| entry.stripes.is_none() && entry.bytes >= request.least_bytes;
    if !manifest.files.iter().any(chosen) {
        job.remove_old_copies(&manifest)?;
        return Ok(MovedArrays::default());
    }
    let mark = Mark::new(&job.directory, &manifest, stripes)?;
    let change = Change::of(&manifest, Some(stripes), chosen);
    job.check_room(&change, &request.over)?;
    for (part, home) in homes.iter().enumerate() {
        homes::claim(&job.directory, part as u32, home, &mark)?;
    }
    let manifest = job.carry_out(manifest, &change)?;
    job.remove_old_copies(&manifest)?;
    Ok(change.moved())
}

/// Stores every striped array of the dataset in `directory` in one file again and removes the directories of parts.
pub fn unstripe(directory: &Path, threads: usize, progress: &dyn Progress) -> Result<MovedArrays> {
    let (job, mut manifest) = StripeJob::begin(directory, threads, progress)?;
    let change = Change::of(&manifest, None, |entry| entry.stripes.is_some());
    if !change.new.is_empty() {
        job.check_room(&change, std::slice::from_ref(&job.directory))?;
        manifest = job.carry_out(manifest, &change)?;
    }
    job.remove_old_copies(&manifest)?;
    for left in homes::release(&job.directory)? {
        progress.note(&left);
    }
    Ok(change.moved())
}

/// Entries of arrays as they are stored now and as they will be.
struct Change {
    old: Vec<FileEntry>,
    new: Vec<FileEntry>,
}

impl Change {
    fn of(manifest: &Manifest, stripes: Option<Stripes>, chosen: impl Fn(&FileEntry) -> bool) -> Change {
        let old: Vec<FileEntry> = manifest.files.iter().filter(|entry| chosen(entry)).cloned().collect();
        let new = old.iter().map(|entry| FileEntry { stripes, ..entry.clone() }).collect();
        Change { old, new }
    }

    /// Arrays that are not copied yet: a copy gets its name when it is complete. A link does not count as a copy,
    /// because it may lead to the file that is to be removed.
    fn missing(&self, directory: &Path) -> Vec<(&FileEntry, &FileEntry)> {
        let is_there = |entry: &FileEntry| {
            let layout = entry.layout(directory);
            let no_links = layout.parts().iter().all(|part| !part.is_symlink());
            no_links
                && (0..layout.parts().len())
                    .all(|part| check_part(&ThisMachine, &layout, part, entry.bytes).is_ok())
        };
        self.old.iter().zip(&self.new).filter(|(_, new)| !is_there(new)).collect()
    }

    fn moved(&self) -> MovedArrays {
        MovedArrays {
            arrays: self.new.iter().map(|entry| entry.name.clone()).collect(),
            bytes: self.new.iter().map(|entry| entry.bytes).sum(),
        }
    }
}

/// A dataset whose arrays are being moved.
struct StripeJob<'a> {
    /// Canonical path, because marks contain it.
    directory: PathBuf,
    threads: usize,
    progress: &'a dyn Progress,
    /// The directory itself, locked: nobody else may replace or stripe the dataset meanwhile.
    _lock: File,
}

impl<'a> StripeJob<'a> {
    fn begin(
        directory: &Path,
        threads: usize,
        progress: &'a dyn Progress,
    ) -> Result<(StripeJob<'a>, Manifest)> {
        // First for the error if this is not a dataset; again after locking, for the manifest that is valid then.
        Dataset::open(directory)?;
        let directory = fs::canonicalize(directory).map_err(StoreError::io(directory))?;
        let lock = File::open(&directory).map_err(StoreError::io(&directory))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StoreError::Busy { path: directory }),
            Err(TryLockError::Error(error)) => return Err(StoreError::io(&directory)(error)),
        }
        let manifest = Dataset::open(&directory)?.manifest().clone();
        refuse_entangled_parts(&directory, &manifest)?;
        Ok((StripeJob { directory, threads, progress, _lock: lock }, manifest))
    }

    /// Refuses stripes that differ from existing ones; these need an undo first. Removes what an interrupted run left
    /// of others.
    fn refuse_other_stripes(&self, manifest: &Manifest, stripes: Stripes, homes: &[PathBuf]) -> Result<()> {
        let parts = homes::linked_parts(&self.directory)?;
        let leads_home = |part: &u32| {
            let found = fs::canonicalize(stripe_directory(&self.directory, *part));
            found.is_ok_and(|found| homes.get(*part as usize) == Some(&found))
        };
        let same_homes = parts.iter().all(leads_home);
        let mut striped = manifest.files.iter().filter_map(|entry| entry.stripes);
        match striped.next() {
            Some(found) if found != stripes || striped.any(|other| other != found) || !same_homes => {
                let over = (0..found.parts())
                    .map(|part| stripe_directory(&self.directory, part))
                    .map(|link| fs::canonicalize(&link).unwrap_or(link))
                    .collect();
                let (path, stripe) = (self.directory.clone(), ByteCount(found.bytes()));
                Err(StoreError::Striped { path, stripe, over })
            }
            Some(_) => Ok(()),
            None if same_homes => Ok(()),
            None => homes::release(&self.directory)
                .map(|left| left.iter().for_each(|left| self.progress.note(left))),
        }
    }

    /// Warns if two parts are on one disk: this works, but gains nothing.
    fn note_shared_disks(&self, over: &[PathBuf]) -> Result<()> {
        let mut disks: BTreeMap<u64, &Path> = BTreeMap::new();
        for directory in over {
            let disk = fs::metadata(directory).map_err(StoreError::io(directory))?.dev();
            if let Some(other) = disks.insert(disk, directory) {
                let (a, b) = (other.display(), directory.display());
                self.progress.note(&format!("{a} and {b} are on one disk: striping over both gains nothing"));
            }
        }
        Ok(())
    }

    /// Copies arrays to their new layout and writes the manifest that describes it.
    fn carry_out(&self, manifest: Manifest, change: &Change) -> Result<Manifest> {
        let missing = change.missing(&self.directory);
        let bytes = missing.iter().map(|(_, new)| new.bytes).sum();
        self.progress.stage("copy", Some(bytes), Unit::Bytes);
        missing.iter().try_for_each(|(old, new)| self.copy(old, new))?;
        self.progress.finish();
        self.read_back(&change.new)?;
        let stay = manifest.files.iter().filter(|entry| !change.old.contains(entry));
        let files = stay.chain(&change.new).cloned().collect();
        let manifest = Manifest { files, ..manifest }.complete();
        files::replace(&self.directory.join(file::MANIFEST), manifest.to_text().as_bytes())?;
        Ok(manifest)
    }

    /// Refuses a change whose copies do not fit on the disks of `directories`, one per part.
    fn check_room(&self, change: &Change, directories: &[PathBuf]) -> Result<()> {
        let mut disks: BTreeMap<u64, (&Path, u64)> = BTreeMap::new();
        for (_, new) in change.missing(&self.directory) {
            let (layout, unfinished) = (new.layout(&self.directory), self.unfinished(new));
            for (part, directory) in directories.iter().enumerate() {
                let disk = fs::metadata(directory).map_err(StoreError::io(directory))?.dev();
                // An interrupted run has reserved space, which this run reuses.
                let reserved =
                    fs::metadata(&unfinished.parts()[part]).map_or(0, |found| found.blocks() * 512);
                let needed = layout.part_bytes(part, new.bytes).saturating_sub(reserved);
                disks.entry(disk).or_insert((directory, 0)).1 += needed;
            }
        }
        for (path, needed_bytes) in disks.into_values() {
            let free_bytes = available_bytes(path).map_err(StoreError::io(path))?;
            if needed_bytes > free_bytes {
                let (needed, available) = (ByteCount(needed_bytes), ByteCount(free_bytes));
                return Err(StoreError::NoRoom { path: path.to_path_buf(), needed, available });
            }
        }
        Ok(())
    }

    /// Where a copy is stored while it is being written.
    fn unfinished(&self, entry: &FileEntry) -> Layout {
        entry.layout_as(&self.directory, &format!("{}{UNFINISHED}", file_name(&entry.name)))
    }

    /// Copies an array from the layout of `from` to that of `to`. The copy gets its name when it is durable.
    fn copy(&self, from: &FileEntry, to: &FileEntry) -> Result<()> {
        let unfinished = self.unfinished(to);
        unfinished.parts().iter().try_for_each(|part| files::remove(part))?;
        ThisMachine.create(&unfinished, to.bytes)?;
        let options = Options { depth: 64, ..Options::default() };
        let source = ThisMachine.open(&[from.layout(&self.directory)], Access::Read, &options)?;
        let target = ThisMachine.open(std::slice::from_ref(&unfinished), Access::Write, &options)?;
        let mut stream = Stream::open(&source, 0, 0..from.bytes, CHUNK_BYTES, CHUNKS)?;
        let mut queue = target.queue()?;
        let mut offset = 0;
        // Further chunks are being read while this one is written.
        while let Some(chunk) = stream.next_chunk()? {
            let bytes = chunk.len() as u64;
            queue.write(0, &[Piece { offset, bytes, at: 0 }], chunk)?;
            offset += bytes;
            self.progress.advance(bytes);
        }
        queue.sync()?;
        let finished: Layout = to.layout(&self.directory);
        for (path, name) in unfinished.parts().iter().zip(finished.parts()) {
            fs::rename(path, name).map_err(StoreError::io(name))?;
            sync_directory(name.parent().unwrap_or(&self.directory))?;
        }
        Ok(())
    }

    /// Compares every block of the new copies with its checksum. Damaged copies are removed.
    fn read_back(&self, entries: &[FileEntry]) -> Result<()> {
        let bytes = entries.iter().map(|entry| entry.bytes).sum();
        self.progress.stage("read back", Some(bytes), Unit::Bytes);
        let directory = &self.directory;
        let targets: Vec<Target> =
            entries.iter().map(|entry| Target { directory, entry, rule: NumberRule::Any }).collect();
        let damage = scan(&ThisMachine, &targets, self.threads, self.progress)?;
        self.progress.finish();
        let Some(damage) = damage.into_iter().next() else { return Ok(()) };
        for path in entries.iter().flat_map(|entry| entry.layout(directory).parts().to_vec()) {
            files::remove(&path)?;
        }
        Err(StoreError::BadCopy { damage: Box::new(damage), dataset: directory.clone() })
    }

    /// Removes copies that the current manifest does not refer to.
    fn remove_old_copies(&self, manifest: &Manifest) -> Result<()> {
        for entry in &manifest.files {
            let single = file_name(&entry.name);
            if entry.stripes.is_some() {
                files::remove(&self.directory.join(&single))?;
            }
            files::remove(&self.directory.join(format!("{single}{UNFINISHED}")))?;
        }
        homes::remove_strays(&self.directory, manifest)?;
        sync_directory(&self.directory)
    }
}

/// Refuses parts that, through links, are files of the dataset itself or the same file as another part: writing or
/// removing one copy of an array would hit the other. Inside the dataset, a part may only be in its own `stripe-i`.
fn refuse_entangled_parts(directory: &Path, manifest: &Manifest) -> Result<()> {
    let mut seen: BTreeMap<PathBuf, PathBuf> = BTreeMap::new();
    for entry in manifest.files.iter().filter(|entry| entry.stripes.is_some()) {
        for path in entry.layout(directory).parts() {
            let place = fs::canonicalize(path).map_err(StoreError::io(path))?;
            if place.starts_with(directory) && place != *path {
                return Err(StoreError::PartInside { path: path.clone(), place });
            }
            if let Some(other) = seen.insert(place, path.clone()) {
                return Err(StoreError::PartTwice { path: path.clone(), other });
            }
        }
    }
    Ok(())
}
