//! The location of a job's samples and packed rows, and their share of the disk. Samples are stored once. There may be
//! several sets of packed rows for the same samples, for other memory, segments or epochs. They are found by their
//! manifests and numbered.

use crate::{Job, Result, StrategyError};
use esker_fetch::FetchError;
use esker_fetch::packed::{Packed, Packing, RunRows, Samples};
use esker_store::StoreError;
use esker_types::ByteCount;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Digits of a directory's name that distinguish its batches from other batches.
const NAME_DIGITS: usize = 12;
/// Suffix of the name of a directory that is being removed. Nothing opens it.
const REMOVED: &str = ".removed.partial";

/// The location of a job's samples and packed rows.
pub(crate) struct Home {
    /// The directory that has everything, if one is given.
    prepared: Option<PathBuf>,
    derived: PathBuf,
    /// Names of directories of packed rows begin with this.
    kind: &'static str,
    /// These digits are in the names of all directories of these batches. A number may follow.
    digits: String,
}

/// Whose packed rows are in directories of this name.
const DISKGNN: &str = "diskgnn";
const ESKER: &str = "esker";

impl Home {
    /// The location for a job's batches.
    pub fn of(job: &Job) -> Result<Home> {
        let derived = job.dataset.derived_path("");
        let prepared = job.out_of_core.prepared.clone();
        Home { prepared, derived, kind: DISKGNN, digits: digits_of(job) }.tidy()
    }

    /// The location for the run that a job is of: samples and packed rows, each in a directory of its own, are in the
    /// dataset, or together in another directory if one is given.
    pub fn of_run(job: &Job) -> Result<Home> {
        let derived = job.out_of_core.prepared.clone().unwrap_or_else(|| job.dataset.derived_path(""));
        Home { prepared: None, derived, kind: ESKER, digits: digits_of(job) }.tidy()
    }

    /// Finishes removals that a killed process left.
    fn tidy(self) -> Result<Home> {
        let home = self;
        for path in home.all().iter().filter(|path| path.to_string_lossy().ends_with(REMOVED)) {
            fs::remove_dir_all(path).map_err(StoreError::io(path))?;
        }
        Ok(home)
    }

    /// The location of an evaluation's packed rows, inside those of training.
    pub fn inside(training: &Path, job: &Job) -> Home {
        let digits = digits_of(job);
        let prepared = Some(training.join(format!("evaluation-{digits}")));
        Home { prepared, derived: job.dataset.derived_path(""), kind: DISKGNN, digits }
    }

    /// Whether one directory has everything.
    pub fn is_alone(&self) -> bool {
        self.prepared.is_some()
    }

    /// Returns the error unchanged, unless the dataset is not writable: then the error explains that packed rows may go
    /// elsewhere.
    pub fn explain(&self, error: StrategyError) -> StrategyError {
        match error {
            StrategyError::Store(StoreError::Io { source, .. })
            | StrategyError::Fetch(FetchError::Store(StoreError::Io { source, .. }))
                if !self.is_alone() && is_refused(&source) =>
            {
                StrategyError::ReadOnly { path: self.derived.clone(), source }
            }
            error => error,
        }
    }

    /// All paths with a name of these batches' packed rows.
    fn all(&self) -> Vec<PathBuf> {
        self.all_of(self.kind)
    }

    fn all_of(&self, kind: &str) -> Vec<PathBuf> {
        let prefix = format!("{kind}-{}-", self.digits);
        let entries = fs::read_dir(&self.derived).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut all: Vec<PathBuf> = entries
            .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)))
            .collect();
        all.sort();
        all
    }

    /// Directories with packed rows of these batches, most recently used first.
    pub fn packed(&self) -> Vec<PathBuf> {
        finished(match &self.prepared {
            Some(directory) => vec![directory.clone()],
            None => self.all(),
        })
    }

    /// Finished directories that count towards the disk budget of these batches.
    fn stored(&self) -> Vec<PathBuf> {
        finished([DISKGNN, ESKER].into_iter().flat_map(|kind| self.all_of(kind)).collect())
    }

    /// The directory for new packed rows: one with unfinished rows, else the first free number.
    pub fn next(&self, job: &Job) -> Result<PathBuf> {
        if let Some(directory) = &self.prepared {
            return Ok(directory.clone());
        }
        let begun = self.all().into_iter().find(|path| is_partial(path));
        if let Some(begun) = begun {
            return Ok(begun.with_extension(""));
        }
        for number in 1u64.. {
            let path = self.derived.join(format!("{}-{}-{number}", self.kind, self.digits));
            if !path.exists() || self.is_unusable(job, &path)? {
                return Ok(path);
            }
        }
        unreachable!("there are not so many directories")
    }

    /// Whether a directory can be replaced: no request can use it.
    fn is_unusable(&self, job: &Job, directory: &Path) -> Result<bool> {
        Ok(match self.kind {
            ESKER => RunRows::open(&job.dataset, directory)?.is_none(),
            _ => self.look(job, directory)?.is_none(),
        })
    }

    /// A directory's parameters, and its bytes including samples. `None` if it cannot be used for any request.
    pub fn look(&self, job: &Job, directory: &Path) -> Result<Option<(Packing, u64)>> {
        let Ok(found) = job.dataset.open_derived(directory) else { return Ok(None) };
        let packing = Packed::describe(&found).filter(|packing| packing.record_format().is_some());
        let Some(packing) = packing.filter(|_| job.dataset.is_current(&found)) else { return Ok(None) };
        let mut bytes = found.manifest.files.iter().map(|entry| entry.bytes).sum();
        if let Some(name) = &packing.samples {
            match Samples::open(&job.dataset, &directory.with_file_name(name))? {
                Some(samples) => bytes += samples.disk_bytes(),
                None => return Ok(None),
            }
        }
        Ok(Some((packing, bytes)))
    }

    /// The directory of samples. `work` is where self-contained packed rows are made.
    pub fn samples_directory(&self, work: &Path) -> PathBuf {
        match self.is_alone() {
            true => work.join("samples"),
            false => self.derived.join(format!("samples-{}", self.digits)),
        }
    }

    /// The existing samples of these batches, those with most epochs.
    pub fn samples(&self, job: &Job, work: &Path) -> Result<Option<Samples>> {
        let header = job.trace_header();
        let directories = std::iter::once(self.samples_directory(work)).chain(self.prepared.clone());
        let mut best: Option<Samples> = None;
        for directory in directories {
            let found = Samples::open(&job.dataset, &directory)?;
            let found = found.filter(|found| found.sampled().sampling == header);
            let epochs = |samples: &Option<Samples>| {
                samples.as_ref().map_or(0, |samples| samples.sampled().epochs.len())
            };
            if epochs(&found) > epochs(&best) {
                best = found;
            }
        }
        Ok(best)
    }
}

/// The finished ones of some directories, most recently used first.
fn finished(mut found: Vec<PathBuf>) -> Vec<PathBuf> {
    found.retain(|path| path.join("derived.json").is_file() && !is_partial(path));
    found.sort_by_key(|path| std::cmp::Reverse(used(path)));
    found
}

/// Marks packed rows as used. The least recently used ones are removed first if room is needed.
pub(crate) fn touch(directory: &Path) {
    // If the dataset is not writable, nothing is removed either.
    let _ = fs::File::open(directory).and_then(|opened| opened.set_modified(SystemTime::now()));
}

fn used(directory: &Path) -> Option<SystemTime> {
    fs::metadata(directory).and_then(|found| found.modified()).ok()
}

fn is_partial(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "partial")
}

fn is_refused(source: &io::Error) -> bool {
    matches!(source.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// Whether a directory could not be written.
pub(crate) fn is_read_only(error: &StrategyError) -> bool {
    match error {
        StrategyError::ReadOnly { .. } => true,
        StrategyError::Store(StoreError::Io { source, .. })
        | StrategyError::Fetch(FetchError::Store(StoreError::Io { source, .. })) => is_refused(source),
        _ => false,
    }
}

/// Digits that identify a job's batches.
fn digits_of(job: &Job) -> String {
    let header = serde_json::to_value(job.trace_header()).unwrap_or_default();
    job.dataset.inputs_of("diskgnn", &header)[..NAME_DIGITS].to_string()
}

/// Bytes of the files of a directory.
pub(crate) fn bytes_of(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| {
            entry
                .metadata()
                .map_or(0, |found| if found.is_dir() { bytes_of(&entry.path()) } else { found.len() })
        })
        .sum()
}

/// The disk budget of a job's samples and packed rows, for all directories of these batches together.
pub(crate) struct DiskShare<'a> {
    job: &'a Job,
    /// The total. It includes what these directories take already.
    pub allowed: u64,
    /// Existing packed rows and their bytes, most recently used first.
    others: Vec<(PathBuf, u64)>,
}

impl<'a> DiskShare<'a> {
    pub fn of(job: &'a Job, home: &Home, samples: Option<&Samples>) -> DiskShare<'a> {
        let asked = &job.out_of_core;
        if home.is_alone() {
            return DiskShare { job, allowed: asked.disk_bytes, others: Vec::new() };
        }
        let others: Vec<(PathBuf, u64)> =
            home.stored().into_iter().map(|path| (path.clone(), bytes_of(&path))).collect();
        let there =
            samples.map_or(0, Samples::disk_bytes) + others.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let allowed =
            if asked.disk_bytes_explicit { asked.disk_bytes } else { asked.disk_bytes.saturating_add(there) };
        DiskShare { job, allowed, others }
    }

    /// Whether this many bytes fit. Removes other packed rows of these batches if needed, least recently used first.
    pub fn make_room(&mut self, bytes: u64) -> Result<bool> {
        if bytes > self.allowed {
            return Ok(false);
        }
        while bytes + self.others.iter().map(|(_, bytes)| bytes).sum::<u64>() > self.allowed {
            let Some((path, freed)) = self.others.pop() else { break };
            self.job.progress.note(&format!(
                "{} is removed, {}: packed rows of the same batches that were not used for longest; --disk-budget allows {}",
                path.display(),
                ByteCount(freed),
                ByteCount(self.allowed)
            ));
            let mut gone = path.clone().into_os_string();
            gone.push(REMOVED);
            let gone = PathBuf::from(gone);
            let removed = fs::rename(&path, &gone).and_then(|()| fs::remove_dir_all(&gone));
            removed.map_err(|error| StrategyError::from(StoreError::io(&path)(error)))?;
        }
        Ok(true)
    }
}
