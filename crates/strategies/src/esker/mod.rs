//! The optimal cache over the whole run, and only its misses packed in the order in which they are read. Ginex misses least
//! and reads row by row; DiskGNN reads in order and misses more. All batches are known ahead, so both can be had.
//!
//! # The life of a run
//!
//! ```text
//!  positions ── sample ──> samples ── plan the cache ──> placements, slots that keep, rows to read ── pack ──> rows
//!               as diskgnn             plan/belady.rs     fetch/packed/run/layout.rs                  as diskgnn
//!  NAME ── list, load, read, assemble and keep ──> Batch
//!          source.rs, fetch/packed/run/cache.rs
//! ```
//!
//! 1. `course.rs` puts the epochs and evaluations of the run in order. If each is sampled, that is one lap. Epochs that
//!    repeat are a lap that begins again, with a cache that is warm: rows that stay from its end to its beginning.
//! 2. `prepare.rs` searches packed rows that can be used. Otherwise it samples (all of it can be shared with diskgnn), plans
//!    and packs. If the disk has no room, ginex's superbatches serve the run without packing, and a note says so.
//! 3. `source.rs` has workers that take batches in turn, load them and read what they miss in one read. Then one stage
//!    assembles them in order and keeps rows. What the cache has follows from plan and batch: a run that begins elsewhere
//!    restores it from the features.
//!
//! Batches are assembled in host memory on every device: there is no tier on a GPU.

mod course;
mod prepare;
mod sizes;
mod source;

use crate::direct::Reads;
use crate::diskgnn::sizes::{Sizes, Training};
use crate::ginex::{self, Ginex};
use crate::phases::Phases;
use crate::{
    BatchSource, CheckpointReader, Inference, Job, JobOutline, Needs, Prepared, Result, RunPosition, Strategy,
};
use course::Course;
use esker_device::Device;
use esker_fetch::packed::RunRows;
use esker_types::{ByteCount, Dtype, counted, grouped};
use prepare::Made;
use source::PlannedStages;
use std::sync::Arc;
use std::time::Instant;

/// The strategy for a device.
pub struct Esker<D> {
    device: D,
    opened: Option<Opened>,
    /// Serves the run if the disk has no room for packed rows.
    without_packing: Ginex<D>,
}

/// State that sources share.
#[derive(Clone)]
struct Opened {
    reads: Reads,
    /// `None` if the job does not train.
    run: Option<PlannedRun>,
    training: Training,
}

/// The packed rows of a run, and where its batches are in them.
#[derive(Clone)]
struct PlannedRun {
    rows: Arc<RunRows>,
    course: Arc<Course>,
}

/// The memory it needs.
pub fn needs(job: &JobOutline) -> Result<Needs> {
    let (mut host, fallback) = (sizes::memory(job), ginex::needs(job)?.host.total());
    if fallback > host.total() {
        host.add("superbatches, if the disk has no room for packed rows", fallback - host.total());
    }
    Ok(Needs {
        host,
        disk_bytes: crate::diskgnn::sizes::most_on_disk(job),
        samples_beforehand: job.largest_batch > 0,
        takes_the_rest: true,
        ..Needs::default()
    })
}

/// The strategy, not yet prepared.
pub fn strategy<D: Device>(device: D) -> Esker<D> {
    Esker { device: device.clone(), opened: None, without_packing: ginex::strategy(device) }
}

impl<D: Device> Strategy<D> for Esker<D> {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        needs(job)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared> {
        let (started, reads) = (Instant::now(), Reads::open(job)?);
        // An inference-only job has no training batches.
        if job.largest_batch == 0 {
            job.topology.take_lent();
            self.opened = Some(Opened { reads, run: None, training: Training::default() });
            return Ok(Prepared::default());
        }
        let sizes = Sizes::new(job, 0)?;
        if !sizes.neighbours.all {
            job.topology.take_lent();
        }
        let made = match job.dataset.manifest().id_dtype() {
            Dtype::U64 => prepare::prepare::<u64>(job, &sizes, &reads),
            _ => prepare::prepare::<u32>(job, &sizes, &reads),
        };
        // Rows may have been packed before, and then nothing was sampled.
        job.topology.take_lent();
        let run = match made? {
            Made::Run(run) => run,
            Made::NoRoom(reason) => {
                drop(reads);
                let mut prepared = Strategy::<D>::prepare(&mut self.without_packing, job)?;
                prepared
                    .notes
                    .insert(0, format!("rows are not packed, superbatches as with ginex: {reason}"));
                return Ok(prepared);
            }
        };
        let training = sizes::training(&sizes, job, run.rows.plan())?;
        // Preparing takes turns with what follows.
        esker_io::trim_freed_memory();
        let seconds = started.elapsed().as_secs_f64();
        let on_disk = serde_json::json!({
            "directory": run.rows.directory(), "seconds": seconds, "disk_bytes": run.rows.disk_bytes(),
            "plan": run.rows.plan(),
        });
        let (epochs, opened) = (run.course.epochs(), Opened { reads, run: Some(run), training });
        let notes = opened.notes();
        self.opened = Some(opened);
        Ok(Prepared { epochs_sampled: Some(epochs), on_disk: Some(on_disk), notes, ..Prepared::default() })
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let Some(opened) = &self.opened else { return self.without_packing.batches(job, from, state) };
        let training = PlannedStages::open(opened, job, Phases::<D>::first_of(from), &self.device)?;
        Ok(Box::new(Phases::new(job, from, Box::new(training), opened.reads.on(&self.device))))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let Some(opened) = &self.opened else { return self.without_packing.inference(job, over, state) };
        Ok(Box::new(Phases::alone(job, over, opened.reads.on(&self.device))?))
    }
}

impl Opened {
    /// How memory and disk are used, as readable text.
    fn notes(&self) -> Vec<String> {
        let Some(PlannedRun { rows, course }) = &self.run else { return Vec::new() };
        let plan = rows.plan();
        let hits = (plan.accesses - plan.misses) as f64 / plan.accesses.max(1) as f64 * 100.0;
        let around = match plan.around {
            0 => String::new(),
            around => format!("; {} stay from lap to lap", counted(around, "row", "rows")),
        };
        vec![
            format!(
                "{} planned and packed, {} sampled, {} on disk: {}",
                counted(plan.batches, "batch", "batches"),
                counted(course.epochs(), "epoch", "epochs"),
                ByteCount(rows.disk_bytes()),
                rows.directory().display()
            ),
            format!(
                "{} rows in memory, those used next: {hits:.1}% of the rows that batches access; all others packed batch by batch{around}",
                grouped(plan.layout.slots)
            ),
            format!(
                "{} read at a time; files are read by {}",
                counted(self.training.workers as u64, "batch", "batches"),
                rows.io_backend()
            ),
        ]
    }
}
