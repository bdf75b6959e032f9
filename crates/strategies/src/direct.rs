//! Batches without a plan, for evaluation: lists and rows read as they are wanted, in the memory that is set aside for it,
//! while the phases of training keep theirs.

use crate::batch::{Batch, BatchSource, RowBuffer, RowMaker};
use crate::resident::positions_of;
use crate::{Evaluation, Job, MemoryTable, Result, SourceCounters, StrategyError};
use crossbeam_channel::{Sender, bounded};
use esker_fetch::DiskRows;
use esker_fetch::pipeline::{Buffers, Pipeline};
use esker_sample::{Bound, DiskGraph, OnDisk, Position, Sample, Sampler, Word};
use esker_types::Dtype;
use rayon::ThreadPool;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Samples beyond the one that is gathered: being made, waiting.
const SAMPLES_AHEAD: usize = 2;

/// Lists and rows on disk, and threads.
#[derive(Clone)]
pub(crate) struct Reads {
    pub graph: Arc<DiskGraph>,
    pub rows: Arc<DiskRows>,
    pub pool: Arc<ThreadPool>,
}

/// A sampler of lists on disk, with so many samples.
pub(crate) fn sampler_bytes(job: &Job, bound: &Bound, samples: u64) -> u64 {
    let workspace = match job.dataset.manifest().id_dtype() {
        Dtype::U64 => OnDisk::<u64>::workspace_bytes(bound.nodes, bound.edges),
        _ => OnDisk::<u32>::workspace_bytes(bound.nodes, bound.edges),
    };
    bound.bytes(samples).saturating_add(workspace)
}

fn evaluation_sampling(job: &Job, over: &Evaluation) -> u64 {
    let bound = job.bound(&over.settings, over.largest_batch);
    sampler_bytes(job, &bound, 1 + SAMPLES_AHEAD as u64)
}

/// What sampling of an evaluation may use.
fn evaluation_sampling_bytes(job: &Job, over: &Evaluation) -> u64 {
    match over.sampling_bytes {
        // What is known better than from fan-outs still leaves the workspace out.
        Some(bytes) => {
            bytes.saturating_add(OnDisk::<u64>::workspace_bytes(over.largest_batch, over.largest_batch))
        }
        None => evaluation_sampling(job, over),
    }
}

/// Adds what evaluation holds.
pub(crate) fn add_memory(job: &Job, table: &mut MemoryTable) {
    if let Some(evaluation) = &job.evaluation {
        let bound = job.bound(&evaluation.settings, evaluation.largest_batch);
        table.add("evaluation: sampling", evaluation_sampling(job, evaluation));
        table.add("evaluation: rows of a batch", bound.nodes.saturating_mul(job.dim() * 4));
        table.add("evaluation: reading", DiskRows::reader_bytes(bound.nodes));
    }
}

struct Direct<R> {
    /// Dropped first: stages that wait for buffers give up.
    stop: Option<Sender<()>>,
    pipeline: Option<Pipeline<Batch<R>, StrategyError>>,
    rows: Arc<AtomicU64>,
    row_bytes: u64,
}

/// The only epoch of an evaluation.
pub(crate) fn source<R: RowBuffer, W: Word>(
    reads: &Reads,
    job: &Job,
    over: &Evaluation,
    make_rows: &RowMaker<R>,
) -> Result<Box<dyn BatchSource<R>>> {
    let all_samples = 1 + SAMPLES_AHEAD;
    let (samples, places) = (Buffers::<Sample>::new(all_samples), Buffers::<()>::new(1));
    let (stop, stopped) = bounded::<()>(0);
    let (batches, settings) = (over.batches.clone(), over.settings.clone());
    let most_bytes = evaluation_sampling_bytes(job, over);
    let mut positions = positions_of(batches.clone(), Position { epoch: 0, batch: 0 }, 1);
    let (free, stop_sampling) = (samples.clone(), stopped.clone());
    let topology = OnDisk::<W>::new(reads.graph.clone(), None);
    let listed = Pipeline::start("list", 0, move |_| Ok::<_, StrategyError>(positions.next()));
    // The sampler's queue stays with its thread, so the sampler is made there.
    let sampled = listed.then_with(
        "sample",
        1,
        move || {
            let sampler = Sampler::new(topology, settings, most_bytes)?;
            Ok((sampler.with_samples(all_samples as u64), Vec::new()))
        },
        move |clock, (sampler, seeds), at| {
            let Some(mut sample) = clock.blocked(|| free.take(&stop_sampling)) else { return Ok(None) };
            batches.seeds(at, seeds)?;
            sampler.sample(at, seeds, &mut sample)?;
            Ok(Some((at, sample)))
        },
    );
    let (disk, pool, make_rows) = (reads.rows.clone(), reads.pool.clone(), make_rows.clone());
    let counted = Arc::new(AtomicU64::new(0));
    let (count, with_rows, row_bytes) = (counted.clone(), over.rows, disk.format().row_bytes() as u64);
    let dim = disk.format().dim();
    let pipeline = sampled.then_with(
        "gather",
        0,
        move || Ok(disk.reader()?),
        move |clock, reader, (at, sample)| {
            if clock.blocked(|| places.take(&stopped)).is_none() {
                return Ok(None);
            }
            let nodes = if with_rows { &sample.node_ids[..] } else { &[] };
            let mut rows = make_rows(nodes.len(), dim);
            reader.read_all(nodes, rows.values_mut(), &pool)?;
            count.fetch_add(nodes.len() as u64, Ordering::Relaxed);
            let (samples, places) = (samples.clone(), places.clone());
            Ok(Some(Batch { at, sample, rows: Some(rows), samples, places }))
        },
    );
    let (stop, pipeline) = (Some(stop), Some(pipeline));
    Ok(Box::new(Direct { stop, pipeline, rows: counted, row_bytes }))
}

impl<R: RowBuffer> BatchSource<R> for Direct<R> {
    fn next(&mut self) -> Result<Option<Batch<R>>> {
        self.pipeline.as_mut().and_then(Pipeline::receive).transpose()
    }

    fn counters(&self) -> SourceCounters {
        let rows = self.rows.load(Ordering::Relaxed);
        SourceCounters {
            stages: self.pipeline.as_ref().map(Pipeline::times).unwrap_or_default(),
            rows,
            bytes_useful: rows * self.row_bytes,
            ..SourceCounters::default()
        }
    }
}

impl<R> Drop for Direct<R> {
    fn drop(&mut self) {
        self.stop = None;
        self.pipeline = None;
    }
}
