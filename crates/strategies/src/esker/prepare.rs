//! Work before training: sample the run, plan its cache, pack what batches miss. It is done once, and its result is used
//! again while run and memory are about the same.

use super::PlannedRun;
use super::course::Course;
use super::sizes::{is_disk_too_small, slots, training};
use crate::direct::Reads;
use crate::diskgnn::home::{DiskShare, Home, touch};
use crate::diskgnn::safe_points;
use crate::diskgnn::sampling::{most_epochs, samples};
use crate::diskgnn::sizes::Sizes;
use crate::{Job, Result};
use esker_fetch::packed::{
    Largest, PackSizes, PackWork, RunLayout, RunPlan, RunRows, RunSource, RunWriter, Samples,
};
use esker_fetch::{FetchError, StoredRow};
use esker_sample::StoredId;
use esker_store::StoreError;
use esker_types::{ByteCount, grouped};
use std::path::Path;
use std::sync::Arc;

/// The result of preparing.
pub(super) enum Made {
    /// Packed rows.
    Run(PlannedRun),
    /// The disk has no room for them: why.
    NoRoom(String),
}

/// Finds packed rows that the job can use, or makes them.
pub(super) fn prepare<W: StoredId + StoredRow>(job: &Job, sizes: &Sizes, reads: &Reads) -> Result<Made> {
    let home = Home::of_run(job)?;
    let course = Course::of(job, most_epochs(job));
    let sources = course.sources.iter().map(SampledPart::of).collect::<Result<Vec<SampledPart>>>()?;
    let preparing = RunPreparation { job, sizes, reads, home: &home, course: &course, sources };
    let rows = match preparing.find_or_make::<W>() {
        // Without packing, no epoch can be repeated. RunPreparation alone has nothing else to do.
        Err(error) if is_disk_too_small(&error) && !course.repeats() && !job.out_of_core.prepare_only => {
            preparing.remove_unused()?;
            return Ok(Made::NoRoom(error.to_string()));
        }
        rows => rows.map_err(|error| home.explain(error))?,
    };
    Ok(Made::Run(PlannedRun { rows: Arc::new(rows), course: Arc::new(course) }))
}

/// Samples of a run's part.
struct SampledPart {
    job: Job,
    home: Home,
    /// Whether they were there before.
    was_there: bool,
}

impl SampledPart {
    fn of(job: &Job) -> Result<SampledPart> {
        let home = Home::of_run(job)?;
        let was_there = home.samples_directory(Path::new("")).exists();
        Ok(SampledPart { job: job.clone(), home, was_there })
    }

    fn name(&self) -> String {
        let path = self.home.samples_directory(Path::new(""));
        path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    fn described(&self, epochs: u64) -> RunSource {
        RunSource { name: self.name(), sampling: self.job.trace_header(), epochs }
    }
}

struct RunPreparation<'a> {
    job: &'a Job,
    sizes: &'a Sizes,
    reads: &'a Reads,
    home: &'a Home,
    course: &'a Course,
    sources: Vec<SampledPart>,
}

impl RunPreparation<'_> {
    fn find_or_make<W: StoredId + StoredRow>(&self) -> Result<RunRows> {
        loop {
            if let Some(found) = self.find()? {
                touch(found.directory());
                return Ok(found);
            }
            let directory = self.home.next(self.job)?;
            let header = self.job.trace_header();
            // `None`: an earlier process had finished everything but the rename, so it may be usable now.
            let Some(writer) = RunWriter::begin(&self.job.dataset, &directory, header)? else { continue };
            self.make::<W>(writer)?;
            return RunRows::open(&self.job.dataset, &directory)?.ok_or_else(|| {
                let expected = "packed rows that were just made";
                StoreError::inconsistent(&directory, expected, "none that open").into()
            });
        }
    }

    /// Searches packed rows that can be used. Of several it takes those with most slots.
    fn find(&self) -> Result<Option<RunRows>> {
        let mut usable = Vec::new();
        for directory in self.home.packed() {
            let Ok(found) = self.job.dataset.open_derived(&directory) else { continue };
            let plan = RunRows::describe(&found).filter(|_| self.job.dataset.is_current(&found));
            let Some(plan) = plan else { continue };
            match self.why_not(&plan, &directory)? {
                Some(why) if self.is_this_run(&plan) => {
                    let directory = directory.display();
                    self.job.progress.note(&format!("packed rows in {directory} {why}: packing again"));
                }
                Some(_) => {}
                None => usable.push((std::cmp::Reverse(plan.layout.slots), directory)),
            }
        }
        usable.sort();
        for (_, directory) in usable {
            if let Some(rows) = RunRows::open(&self.job.dataset, &directory)? {
                return Ok(Some(rows));
            }
        }
        Ok(None)
    }

    /// Whether a plan is one of this run: the same batches in the same order.
    fn is_this_run(&self, plan: &RunPlan) -> bool {
        let same = |(source, found): (&SampledPart, &RunSource)| {
            found.sampling == source.job.trace_header() && found.name == source.name()
        };
        plan.layout.laps == self.course.laps
            && plan.layout.sources.len() == self.sources.len()
            && self.sources.iter().zip(&plan.layout.sources).all(same)
    }

    /// Why packed rows cannot be used. `None` if they can.
    fn why_not(&self, plan: &RunPlan, directory: &Path) -> Result<Option<String>> {
        let asked = &self.job.out_of_core;
        if !self.is_this_run(plan) {
            return Ok(Some("are of another run".into()));
        }
        let Some(rows) = RunRows::open(&self.job.dataset, directory)? else {
            return Ok(Some("do not open".into()));
        };
        let disk_bytes = rows.disk_bytes();
        if asked.disk_bytes_explicit && disk_bytes > asked.disk_bytes {
            let (taken, allowed) = (ByteCount(disk_bytes), ByteCount(asked.disk_bytes));
            return Ok(Some(format!("take {taken}, and --disk-budget is {allowed}")));
        }
        let there = plan.layout.slots;
        let Ok(slots) = self.slots(&plan.largest) else { return Ok(Some("do not fit --memory".into())) };
        let (cached, now) = (grouped(there), grouped(slots));
        Ok(match asked.feature_cache_bytes {
            Some(_) if there != slots => {
                Some(format!("cache {cached} rows, and --feature-cache asks for {now}"))
            }
            None if training(self.sizes, self.job, plan).is_err() => {
                Some(format!("cache {cached} rows, more than fit --memory"))
            }
            None if there < slots / 4 * 3 => {
                Some(format!("cache {cached} rows, and this memory has room for {now}"))
            }
            _ => None,
        })
    }

    /// Slots of the cache for batches of at most this size.
    fn slots(&self, largest: &Largest) -> Result<u64> {
        slots(self.sizes, self.job, largest, self.course.batches(), self.course.repeats())
    }

    /// Samples, plans and packs.
    fn make<W: StoredId + StoredRow>(&self, writer: RunWriter) -> Result<()> {
        let (all, layout) = self.sampled::<W>(&writer)?;
        // Samples of an earlier process need no topology.
        self.job.topology.take_lent();
        let work = self.work();
        let mut disk = DiskShare::of(self.job, self.home, all.first());
        let beside: u64 = all.iter().map(Samples::disk_bytes).sum();
        if !writer.laid()?.is_some_and(|laid| laid.layout == layout) {
            let left = disk.allowed.saturating_sub(beside);
            let done = writer.lay_out::<W>(&all, &layout, left, &work);
            if let Err(error) = done {
                if let FetchError::Disk { .. } = error {
                    writer.discard()?;
                }
                // What is said to be needed includes the samples.
                return Err(with_samples(error, beside, disk.allowed).into());
            }
        }
        if let Some(laid) = writer.laid()? {
            training(self.sizes, self.job, &laid)?;
            disk.make_room(beside + RunWriter::disk_bytes::<W>(&laid))?;
        }
        writer.finish::<W>(&work)?;
        Ok(())
    }

    /// Finds or makes the samples of all parts, and what to lay out of them.
    fn sampled<W: StoredId + StoredRow>(&self, writer: &RunWriter) -> Result<(Vec<Samples>, RunLayout)> {
        let (mut all, mut sources, mut largest) = (Vec::<Samples>::new(), Vec::new(), Largest::default());
        for source in &self.sources {
            let mut job = source.job.clone();
            if job.out_of_core.disk_bytes_explicit {
                let taken: u64 = all.iter().map(Samples::disk_bytes).sum();
                job.out_of_core.disk_bytes = job.out_of_core.disk_bytes.saturating_sub(taken);
            }
            let (found, epochs) = samples::<W>(&job, self.sizes, self.reads, &source.home, &writer.work())?;
            largest = largest.max(&found.of_epochs(epochs).largest);
            sources.push(source.described(epochs));
            all.push(found);
        }
        let asked = &self.job.out_of_core;
        let disk_bytes_allowed = asked.disk_bytes_explicit.then_some(asked.disk_bytes);
        let laps = self.course.laps.clone();
        let layout = RunLayout { sources, laps, slots: self.slots(&largest)?, disk_bytes_allowed };
        Ok((all, layout))
    }

    /// Memory, threads and control of planning and packing.
    fn work(&self) -> PackWork<'_> {
        PackWork {
            sizes: PackSizes {
                memory_bytes: self.sizes.preparing_bytes,
                threads: self.job.threads.max(1),
                safe_points: safe_points(self.job),
                row_by_row: None,
            },
            pool: &self.reads.pool,
            stop: &self.job.stop,
            progress: &*self.job.progress,
        }
    }

    /// Removes samples that were made now, and are not used: what serves the run instead gets their room.
    fn remove_unused(&self) -> Result<()> {
        for source in self.sources.iter().filter(|source| !source.was_there) {
            let directory = source.home.samples_directory(Path::new(""));
            self.job.dataset.derive_at(&directory)?.discard()?;
            if directory.exists() {
                std::fs::remove_dir_all(&directory).map_err(StoreError::io(&directory))?;
            }
        }
        Ok(())
    }
}

/// The error for a disk budget that includes samples of `beside` bytes.
fn with_samples(error: FetchError, beside: u64, allowed: u64) -> FetchError {
    match error {
        FetchError::Disk { needed, .. } => FetchError::Disk {
            needed: ByteCount(needed.0.saturating_add(beside)),
            allowed: ByteCount(allowed),
        },
        error => error,
    }
}
