//! Sampling ahead: some epochs' batches go to a log on disk, once for all ways to pack their rows.

use super::home::{DiskShare, Home};
use super::sizes::Sizes;
use crate::direct::Reads;
use crate::neighbours::{LoadedNeighbours, NeighbourBudget, NeighbourStore};
use crate::{Job, Result, StrategyError};
use esker_fetch::packed::{EpochSampled, PackedBytes, SampleLog, Samples};
use esker_fetch::{FetchError, StoredRow};
use esker_plan::Hottest;
use esker_sample::bulk::{Bulk, positions};
use esker_sample::{Position, SampleError, StoredId, Topology};
use esker_types::{ByteCount, Unit};
use std::path::Path;

/// The part of the disk budget that copies of cached neighbour lists may take while batches are sampled: a quarter.
const LISTS_SHARE: u64 = 4;

/// Epochs of a run whose batches may differ.
pub(super) fn most_epochs(job: &Job) -> u64 {
    job.epochs_sampled.unwrap_or(job.epochs).min(job.epochs).max(1)
}

/// Samples of the epochs that the job asks for, or as many as the disk takes where it asks for no number, and how many; found, or made.
/// `work` is where packed rows are made.
pub(super) fn samples<W: StoredId + StoredRow>(
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
                let hottest = found.count::<W>(1, rows(job), &job.stop, &*job.progress)?;
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
        // An earlier process had finished it but for its name: it is found now.
        let Some(mut log) = log else { continue };
        let before = found.as_ref().map_or(0, Samples::disk_bytes);
        // Neighbours are cached beside what is made.
        let mut beside = job.clone();
        beside.out_of_core.scratch = log.work();
        let room = NeighbourBudget { disk_bytes: Some(disk.allowed / LISTS_SHARE), ..sizes.lists };
        let lists = NeighbourStore::prepare::<W>(&beside, room, reads.graph.clone())?;
        let taken = before + lists.disk_bytes::<W>();
        let lists = lists.load::<W>(job)?;
        let mut sampling = Sampling { job, sizes, log: &mut log, disk: &mut disk, taken, is_open };
        let epochs = sampling.all::<W>(&lists, most)?;
        drop(lists);
        let whole = whole_epochs(job, &log);
        return Ok((log.finish::<W>(whole)?, epochs));
    }
}

/// Feature rows.
fn rows(job: &Job) -> u64 {
    job.dataset.manifest().nodes.count
}

/// Epochs of which every batch is in the log.
fn whole_epochs(job: &Job, log: &SampleLog) -> u64 {
    let (mut epochs, mut batches) = (0, job.batches.count(0));
    while log.logged(epochs + 1).batches == batches && log.logged(epochs).batches < batches {
        epochs += 1;
        batches += job.batches.count(epochs);
    }
    epochs
}

/// Epochs like the first that the disk takes with every batch's rows packed.
fn epochs_that_fit<W: StoredRow>(
    job: &Job,
    sizes: &Sizes,
    first: &EpochSampled,
    mut hottest: Hottest,
    disk: &DiskShare,
) -> Result<u64> {
    hottest.choose(sizes.slots(job, &first.largest, first.batches)?);
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

/// What samples while it looks at the disk.
struct Sampling<'a, 'b> {
    job: &'a Job,
    sizes: &'a Sizes,
    log: &'a mut SampleLog<'b>,
    disk: &'a mut DiskShare<'b>,
    /// Bytes on disk beside the log.
    taken: u64,
    /// Whether the disk says how many epochs there are.
    is_open: bool,
}

impl Sampling<'_, '_> {
    /// Samples `most` epochs, or those that the disk takes; returns how many.
    fn all<W: StoredId + StoredRow>(&mut self, lists: &LoadedNeighbours<W>, most: u64) -> Result<u64> {
        let mut epochs = most;
        if self.is_open {
            // The first says what one takes.
            self.epochs::<W>(lists, 1)?;
            let hottest = self.log.count::<W>(rows(self.job))?;
            let first = self.log.logged(1);
            epochs = epochs_that_fit::<W>(self.job, self.sizes, &first, hottest, self.disk)?.clamp(1, most);
        }
        self.epochs::<W>(lists, epochs)
    }

    /// Samples batches up to the end of epoch `epochs - 1`, after those that are there; returns how many epochs there are.
    fn epochs<W: StoredId + StoredRow>(&mut self, lists: &LoadedNeighbours<W>, epochs: u64) -> Result<u64> {
        let done = match lists {
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
        // Positions are listed, not skipped: a later epoch starts where it starts.
        let all: Vec<Position> = positions(&*job.batches, start, epochs).skip(done as usize).collect();
        bulk.run(all.iter().copied(), |at, sample| {
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

    /// What is on disk by now is more than is allowed.
    fn too_little_disk(&self, epochs: u64, needed: u64) -> StrategyError {
        let count: u64 = (0..epochs).map(|epoch| self.job.batches.count(epoch)).sum();
        let done = self.log.logged(u64::MAX).batches.clamp(1, count);
        let all = self.taken as u128 + (needed - self.taken) as u128 * count as u128 / done as u128;
        StrategyError::request(
            format!(
                "samples of {done} of {count} batches take {} on disk, and --disk-budget allows {}; all of them take about {} ({all} bytes), and rows packed for them more",
                ByteCount(needed),
                ByteCount(self.disk.allowed),
                ByteCount(all as u64)
            ),
            format!(
                "allow --disk-budget {} at least, or sample fewer epochs with --epochs-sampled",
                ByteCount(all as u64).flag_value()
            ),
        )
    }
}

/// Why sampling ended early.
enum Ended {
    Stopped,
    /// So many bytes would be on disk.
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
