//! Topology and features on disk with an optimal cache (Ginex, VLDB 2022). Batches are sampled in advance, one
//! superbatch at a time. So the rows that they will access are known, and Belady's algorithm decides which to keep. The
//! paper plans on a GPU; here one core does it in linear time.
//!
//! # The life of a superbatch
//!
//! ```text
//!  positions ── sample ──> trace + accesses ── plan ──> placements ── load, read, assemble ──> Batch
//!  (neighbours.rs)         (superbatch.rs: the next one (plan/belady.rs) (gather.rs: three stages;
//!                          is sampled while this one is planned)         fetch/disk.rs, fetch/cache.rs)
//!  evaluations ── sample once ──> kept traces + accesses
//!                                 (evaluation.rs)
//! ```
//!
//! A superbatch is a run of positions in the order of the run, across epochs and evaluations, with one plan and one
//! cache. If it ended where an evaluation begins, a small graph would switch twice per epoch, which costs more than its
//! training, and the disk would be idle between an epoch and its validation. So evaluation takes its turn in the memory
//! of training and needs none of its own. By default a superbatch has an epoch and the validation after it. Evaluations
//! repeat their samples, so these are drawn once and kept on disk.
//!
//! `sizes.rs` divides the memory. Phases take turns, so each has all of it. A row comes from a slot, from disk, or from
//! disk into a slot after the batch's hits are copied. Accesses and placements are verified when they are read back.
//! Reading does not depend on the cache, so stages can read ahead of it.

mod building;
mod counters;
mod evaluation;
mod gather;
mod sizes;
mod source;
mod superbatch;

use crate::direct::{Reads, ReadsOn};
use crate::history::PullsAhead;
use crate::neighbours::NeighbourStore;
use crate::phases::{PhaseSource, Phases};
use crate::{
    BatchSource, CheckpointReader, Inference, Job, JobOutline, Needs, Phase, Prepared, Result, RunPosition,
    Strategy,
};
use esker_device::Device;
use esker_fetch::StoredRow;
use esker_sample::bulk::positions;
use esker_sample::{DiskGraph, OnDisk, Position, Sample, Sampler, StoredId};
use esker_store::StoreError;
use esker_types::{ByteCount, Dtype};
use sizes::Sizes;
use source::Superbatches;
use std::sync::Arc;

/// Batches sampled to estimate the size of batches.
const PROFILED: usize = 2;
/// Epochs whose batches are counted.
const COUNTED_EPOCHS: u64 = 16;
/// Approximate bytes per edge in a trace.
const EDGE_BYTES: u64 = 3;

/// Ginex for a device.
pub struct Ginex<D> {
    device: D,
    opened: Option<Opened>,
}

/// State that sources share.
#[derive(Clone)]
struct Opened {
    lists: Arc<NeighbourStore>,
    reads: Reads,
    sizes: Sizes,
}

/// How many rows a job caches, and how many batches it plans together.
pub(crate) struct RowCacheSizes(Sizes);

impl RowCacheSizes {
    /// From the memory that the job was granted, and bounds of its batches.
    pub fn of(job: &Job) -> Result<RowCacheSizes> {
        let bound = job.largest_bound();
        let trace_bytes = bound.edges.saturating_mul(EDGE_BYTES);
        let batch_bytes = match job.dataset.manifest().id_dtype() {
            Dtype::U64 => sizes::disk_bytes::<u64>(1, bound.nodes, trace_bytes),
            _ => sizes::disk_bytes::<u32>(1, bound.nodes, trace_bytes),
        };
        Ok(RowCacheSizes(Sizes::new(job, batch_bytes, batches_of(job))?))
    }

    /// Batches that are planned together.
    pub fn superbatch(&self) -> u64 {
        self.0.superbatch
    }

    /// Rows that are cached, if the largest batch has `largest` rows and the largest sample `sample_bytes`.
    pub fn slots(&self, job: &Job, largest: u64, sample_bytes: u64) -> Result<u64> {
        Ok(self.0.gathering(job, largest, sample_bytes)?.1)
    }
}

/// The memory it needs.
pub fn needs(job: &JobOutline) -> Result<Needs> {
    let disk_bytes = sizes::most_on_disk(job);
    Ok(Needs { host: sizes::memory(job), disk_bytes, takes_the_rest: true, ..Needs::default() })
}

/// The strategy, not yet prepared.
pub fn strategy<D>(device: D) -> Ginex<D> {
    Ginex { device, opened: None }
}

impl<D> Ginex<D> {
    /// The prepared state. Panics before `prepare`.
    fn opened(&self) -> &Opened {
        self.opened.as_ref().expect("a strategy is prepared before it yields batches")
    }
}

impl<D: Device> Ginex<D> {
    /// The batches of a run from a position on. With a history, `ahead` decides what they pull.
    pub(crate) fn training(
        &self,
        job: &Job,
        from: RunPosition,
        ahead: Option<PullsAhead>,
    ) -> Result<Box<dyn PhaseSource<D>>> {
        let (opened, device, at) = (self.opened().clone(), &self.device, Phases::<D>::first_of(from));
        Ok(match job.dataset.manifest().id_dtype() {
            Dtype::U64 => Box::new(Superbatches::<D, u64>::new(opened, job, at, device, ahead)?),
            _ => Box::new(Superbatches::<D, u32>::new(opened, job, at, device, ahead)?),
        })
    }

    /// The graph for inference on any seeds.
    pub(crate) fn graph(&self) -> ReadsOn<D> {
        self.opened().reads.on(&self.device)
    }
}

impl<D: Device> Strategy<D> for Ginex<D> {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        needs(job)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared> {
        let opened = match job.dataset.manifest().id_dtype() {
            Dtype::U64 => Opened::open::<u64>(job)?,
            _ => Opened::open::<u32>(job)?,
        };
        let (notes, caches) = (opened.notes(), opened.lists.memory());
        self.opened = Some(opened);
        Ok(Prepared { notes, caches, ..Prepared::default() })
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        _: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let training = self.training(job, from, None)?;
        Ok(Box::new(Phases::new(job, from, training, self.graph())))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        _: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        Ok(Box::new(Phases::alone(job, over, self.graph())?))
    }
}

impl Opened {
    /// Opens neighbours and feature rows, estimates the size of batches, and divides the granted memory.
    fn open<W: StoredId + StoredRow>(job: &Job) -> Result<Opened> {
        let scratch = &job.out_of_core.scratch;
        std::fs::create_dir_all(scratch).map_err(StoreError::io(scratch))?;
        let reads = Reads::open(job)?;
        // An inference-only job has no training batches.
        let sizes = match job.largest_batch {
            0 => Sizes::none(),
            _ => {
                let batch_bytes = profile::<W>(job, &reads.graph)?;
                let sizes = Sizes::new(job, batch_bytes, batches_of(job))?;
                Sizes { likely_disk_bytes: sizes.most_on_disk::<W>(job), ..sizes }
            }
        };
        let (graph, policy) = (reads.graph.clone(), job.neighbour_policy());
        let lists = Arc::new(NeighbourStore::prepare::<W>(job, sizes.lists, graph, policy)?);
        Ok(Opened { lists, reads, sizes })
    }

    /// How memory and disk are used, as readable text.
    fn notes(&self) -> Vec<String> {
        let sizes = &self.sizes;
        vec![
            format!(
                "superbatches of {} batches, up to {} on disk for each",
                sizes.superbatch,
                ByteCount(sizes.likely_disk_bytes)
            ),
            self.lists.note(),
            format!("{} for batches and cached rows while gathering", ByteCount(sizes.phase_bytes)),
            format!("files are read by {}; {}", self.reads.rows.io_backend(), self.reads.rows.reads_text()),
        ]
    }
}

/// Batches of an epoch with the validation after it, and at most of the run.
fn batches_of(job: &Job) -> (u64, u64) {
    let count = |over: &Option<Inference>| over.as_ref().map_or(0, |over| over.batches.count(0));
    let schedule = &job.schedule;
    let validation = if schedule.every > 0 { count(&schedule.validation) } else { 0 };
    // Epochs may differ in their number of batches.
    let counts = (0..job.epochs.clamp(1, COUNTED_EPOCHS)).map(|epoch| job.count(Phase::Train { epoch }));
    let epoch = counts.max().unwrap_or(0) + validation;
    let at_the_end = count(&schedule.last_validation) + count(&schedule.test);
    (epoch, epoch.saturating_mul(job.epochs).saturating_add(at_the_end))
}

/// Bytes on disk of a batch's files, estimated from a few batches.
fn profile<W: StoredId + StoredRow>(job: &Job, graph: &Arc<DiskGraph>) -> Result<u64> {
    if job.known.is_some() {
        let bound = job.largest_bound();
        return Ok(sizes::disk_bytes::<W>(1, bound.nodes, bound.edges * EDGE_BYTES));
    }
    let start = Position { epoch: 0, batch: 0 };
    let most_bytes = job.strategy_bytes.max(sizes::memory(job).total());
    let mut sampler = Sampler::new(OnDisk::<W>::new(graph.clone(), None), job.settings.clone(), most_bytes)?;
    let (mut seeds, mut sample, mut largest) = (Vec::new(), Sample::default(), 1);
    for at in positions(&*job.batches, start, job.epochs.min(1)).take(PROFILED) {
        job.batches.seeds(at, &mut seeds)?;
        sampler.begin(&*job.batches, at)?;
        sampler.sample(at, &seeds, &mut sample)?;
        let nodes = sample.node_ids.len() as u64;
        largest = largest.max(sizes::disk_bytes::<W>(1, nodes, sample.edge_count() * EDGE_BYTES));
    }
    Ok(largest)
}
