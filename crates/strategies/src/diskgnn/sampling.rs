//! Samples batches of some epochs to a log on disk. Every way to pack their rows uses the same log.

use super::home::{DiskShare, Home};
use super::sizes::{MissBound, Sizes};
use crate::direct::Reads;
use crate::neighbours::{LoadedNeighbours, NeighbourBudget, NeighbourPolicy, NeighbourStore};
use crate::{Job, Result, StrategyError};
use esker_fetch::packed::{EpochSampled, PackedBytes, SampleLog, Samples};
use esker_fetch::{FetchError, StoredRow};
use esker_plan::Hottest;
use esker_sample::bulk::{Bulk, positions};
use esker_sample::{Position, SampleError, StoredId, Topology};
use esker_types::{ByteCount, Unit};
use std::path::Path;

/// The part of the disk budget for copies of cached neighbours during sampling: a quarter.
const NEIGHBOURS_SHARE: u64 = 4;

/// Largest number of distinct epochs of a run.
pub(crate) fn most_epochs(job: &Job) -> u64 {
    job.epochs_sampled.unwrap_or(job.epochs).min(job.epochs).max(1)
}

/// Finds or makes samples, and returns them with their number of epochs. The number is the one that the job requests.
/// If it requests none, it is as many as fit the disk. `work` is where packed rows are made.
pub(crate) fn samples<W: StoredId + StoredRow>(
    job: &Job,
    sizes: &Sizes,
    reads: &Reads,
    home: &Home,
    work: &Path,
) -> Result<(Samples, u64)> {
    let most = most_epochs(job);
    let is_open = job.epochs_sampled.is_none() && most > 1;
    loop {
        let found = home.samples(job, work)?;
        let mut disk = DiskShare::of(job, home, found.as_ref());
        let wanted = match &found {
            Some(found) if is_open => {
                let count = || found.count::<W>(1, rows(job), &job.stop, &*job.progress);
                let hottest = job.pool.install(count)?;
                epochs_that_fit::<W>(job, sizes, &found.of_epochs(1), hottest, &disk)?.clamp(1, most)
            }
            _ => most,
        };
        let found = match found {
            Some(found) if found.sampled().epochs.len() as u64 >= wanted => return Ok((found, wanted)),
            found => found,
        };
        let directory = home.samples_directory(work);
        let safe = super::safe_points(job).sample_bytes;
        let log = SampleLog::begin::<W>(&job.dataset, &directory, job.trace_header(), found.as_ref(), safe)?;
        // An earlier process had finished everything but the rename. The samples are found now.
        let Some(mut log) = log else { continue };
        let before = found.as_ref().map_or(0, Samples::disk_bytes);
        // The cache of neighbours goes to the same work directory.
        let mut beside = job.clone();
        beside.out_of_core.scratch = log.work();
        let room = NeighbourBudget { disk_bytes: Some(disk.allowed / NEIGHBOURS_SHARE), ..sizes.neighbours };
        let neighbours =
            NeighbourStore::prepare::<W>(&beside, room, reads.graph.clone(), NeighbourPolicy::Ginex)?;
        let taken = before + neighbours.disk_bytes::<W>();
        let entries = neighbours.loaded_entries();
        job.progress.stage("load neighbours", Some(entries), Unit::Count("neighbours"));
        let neighbours = neighbours.load::<W>(job)?;
        job.progress.advance(entries);
        job.progress.finish();
        let mut sampling = Sampling { job, sizes, log: &mut log, disk: &mut disk, taken, is_open };
        let epochs = sampling.all::<W>(&neighbours, most)?;
        job.progress.stage("finish samples", None, Unit::Bytes);
        drop(neighbours);
        let whole = whole_epochs(job, &log);
        let samples = log.finish::<W>(whole)?;
        job.progress.finish();
        return Ok((samples, epochs));
    }
}

/// Number of feature rows.
fn rows(job: &Job) -> u64 {
    job.dataset.manifest().nodes.count
}

/// Number of epochs with every batch in the log.
fn whole_epochs(job: &Job, log: &SampleLog) -> u64 {
    let (mut epochs, mut batches) = (0, job.batches.count(0));
    while log.logged(epochs + 1).batches == batches && log.logged(epochs).batches < batches {
        epochs += 1;
        batches += job.batches.count(epochs);
    }
    epochs
}

/// How many epochs like the first fit the disk with every batch's rows packed.
fn epochs_that_fit<W: StoredRow>(
    job: &Job,
    sizes: &Sizes,
    first: &EpochSampled,
    mut hottest: Hottest,
    disk: &DiskShare,
) -> Result<u64> {
    let coverage = hottest.coverage();
    hottest.choose(sizes.slots(job, &first.largest, first.batches, MissBound::ByCoverage(&coverage))?);
    let log_bytes = first.log_bytes(size_of::<W>() as u64);
    let bytes = PackedBytes::of::<W>(log_bytes, first, &hottest, job.row_bytes());
    let epoch = bytes.others + hottest.misses() * bytes.row;
    job.progress.note(&format!(
        "an epoch takes {} on disk, rows for memory {}; {} are allowed",
        ByteCount(epoch),
        ByteCount(bytes.cached),
        ByteCount(disk.allowed)
    ));
    Ok(disk.allowed.saturating_sub(bytes.cached) / epoch.max(1))
}

/// Samples within the disk budget.
struct Sampling<'a, 'b> {
    job: &'a Job,
    sizes: &'a Sizes,
    log: &'a mut SampleLog<'b>,
    disk: &'a mut DiskShare<'b>,
    /// Bytes on disk apart from the log.
    taken: u64,
    /// Whether the disk determines the number of epochs.
    is_open: bool,
}

impl Sampling<'_, '_> {
    /// Samples `most` epochs, or as many as fit the disk. Returns the number.
    fn all<W: StoredId + StoredRow>(&mut self, neighbours: &LoadedNeighbours<W>, most: u64) -> Result<u64> {
        let mut epochs = most;
        if self.is_open {
            // The first epoch shows how much one takes.
            self.epochs::<W>(neighbours, 1)?;
            let hottest = self.log.count::<W>(rows(self.job))?;
            let first = self.log.logged(1);
            epochs = epochs_that_fit::<W>(self.job, self.sizes, &first, hottest, self.disk)?.clamp(1, most);
        }
        self.epochs::<W>(neighbours, epochs)
    }

    /// Samples batches up to the end of epoch `epochs - 1`, after those in the log. Returns the number of epochs.
    fn epochs<W: StoredId + StoredRow>(
        &mut self,
        neighbours: &LoadedNeighbours<W>,
        epochs: u64,
    ) -> Result<u64> {
        let done = match neighbours {
            LoadedNeighbours::Memory(graph) => self.epochs_on::<W, _>(graph, epochs),
            LoadedNeighbours::Disk(graph) => self.epochs_on::<W, _>(graph, epochs),
        };
        match done {
            Ok(()) => Ok(epochs),
            Err(Ended::Stopped) => {
                self.log.make_safe()?;
                Err(StrategyError::Stopped)
            }
            Err(Ended::DiskFull(needed)) => {
                self.log.make_safe()?;
                match whole_epochs(self.job, self.log).min(epochs) {
                    whole if whole > 0 && self.is_open => Ok(whole),
                    _ => Err(self.too_little_disk(epochs, needed)),
                }
            }
            Err(Ended::Failed(error)) => Err(error),
        }
    }

    fn epochs_on<W: StoredRow, T: Topology>(&mut self, graph: &T, epochs: u64) -> Result<(), Ended> {
        let job = self.job;
        let start = Position { epoch: 0, batch: 0 };
        let count: u64 = (0..epochs).map(|epoch| job.batches.count(epoch)).sum();
        let done = self.log.logged(u64::MAX).batches.min(count);
        job.progress.stage("sample", Some(count), Unit::Count("batches"));
        job.progress.advance(done);
        let bulk = Bulk {
            graph,
            batches: &*job.batches,
            settings: &job.settings,
            threads: self.sizes.samplers,
            most_bytes: self.sizes.sampling_bytes,
        };
        // Counts off the first `done` positions, because epochs may differ in their number of batches.
        let all: Vec<Position> = positions(&*job.batches, start, epochs).skip(done as usize).collect();
        bulk.run_with(self.sizes.samplers, all.iter().copied(), |at, sample| {
            if job.stop.is_asked() {
                return Err(Ended::Stopped);
            }
            self.log.append::<W>(at, sample)?;
            let needed = self.taken + self.log.logged(u64::MAX).log_bytes(size_of::<W>() as u64);
            if !self.disk.make_room(needed)? {
                return Err(Ended::DiskFull(needed));
            }
            job.progress.advance(1);
            Ok(())
        })?;
        job.progress.finish();
        Ok(())
    }

    /// The error if samples exceed the disk budget.
    fn too_little_disk(&self, epochs: u64, needed: u64) -> StrategyError {
        let count: u64 = (0..epochs).map(|epoch| self.job.batches.count(epoch)).sum();
        let done = self.log.logged(u64::MAX).batches.clamp(1, count);
        let all = self.taken as u128 + (needed - self.taken) as u128 * count as u128 / done as u128;
        StrategyError::SamplesDisk {
            done,
            batches: count,
            taken: ByteCount(needed),
            allowed: ByteCount(self.disk.allowed),
            all: ByteCount(all as u64),
        }
    }
}

/// Why sampling ended early.
enum Ended {
    Stopped,
    /// Bytes that would be on disk.
    DiskFull(u64),
    Failed(StrategyError),
}

impl From<SampleError> for Ended {
    fn from(error: SampleError) -> Ended {
        Ended::Failed(error.into())
    }
}

impl From<FetchError> for Ended {
    fn from(error: FetchError) -> Ended {
        Ended::Failed(error.into())
    }
}

impl From<StrategyError> for Ended {
    fn from(error: StrategyError) -> Ended {
        Ended::Failed(error)
    }
}
