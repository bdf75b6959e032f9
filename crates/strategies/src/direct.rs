//! Batches without a plan, for `esker eval` and `predict`, and for evaluations of `diskgnn` that cannot be packed.
//! Neighbours and feature rows are read from disk when they are needed. Training's stages rest meanwhile.

use crate::job::positions_of;
use crate::permits::BatchPermits;
use crate::phases::{InferenceGraph, PhaseSource};
use crate::row_counters::RowCounters;
use crate::sampling::larger_than_expected;
use crate::source::Stages;
use crate::{
    Batch, FixedRows, Inference, Input, InputTable, Job, JobOutline, MemoryTable, Phase, Result, RunPosition,
    SourceCounters, StrategyError,
};
use esker_device::{Device, HostRows};
use esker_fetch::DiskRows;
use esker_fetch::pipeline::{Pipeline, Recycled, Recycler};
use esker_sample::{Bound, DiskGraph, OnDisk, Position, Sample, Sampler, StoredId, Targets};
use esker_types::Dtype;
use rayon::ThreadPool;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Samples beyond the one that is gathered: one being made, one waiting.
const SAMPLES_PREFETCHED: usize = 2;

/// Neighbours and feature rows on disk, and threads.
#[derive(Clone)]
pub(crate) struct Reads {
    pub graph: Arc<DiskGraph>,
    pub rows: Arc<DiskRows>,
    pub pool: Arc<ThreadPool>,
}

impl Reads {
    /// Opens the files of a job.
    pub fn open(job: &Job) -> Result<Reads> {
        let graph = match &job.topology.on_disk {
            Some(graph) => graph.clone(),
            None => Arc::new(DiskGraph::open(&job.dataset, job.direction)?),
        };
        Ok(Reads {
            graph,
            rows: Arc::new(DiskRows::open_with(&job.dataset, job.out_of_core.io_block_bytes)?),
            pool: job.pool.clone(),
        })
    }

    /// The same, with a device.
    pub fn on<D: Device>(&self, device: &D) -> ReadsOn<D> {
        let Reads { graph, rows, pool } = self.clone();
        ReadsOn { graph, rows: Some(rows), pool, device: device.clone() }
    }
}

/// Neighbours and feature rows on disk, with a device.
pub(crate) struct ReadsOn<D> {
    graph: Arc<DiskGraph>,
    /// `None` if batches have none.
    rows: Option<Arc<DiskRows>>,
    pool: Arc<ThreadPool>,
    device: D,
}

impl<D: Device> ReadsOn<D> {
    /// Opens the files of a job whose batches may have no feature rows.
    pub fn open(job: &Job, device: &D) -> Result<ReadsOn<D>> {
        match job.features {
            true => Ok(Reads::open(job)?.on(device)),
            false => {
                let graph = Arc::new(DiskGraph::open(&job.dataset, job.direction)?);
                Ok(ReadsOn { graph, rows: None, pool: job.pool.clone(), device: device.clone() })
            }
        }
    }
}

/// Work on every batch, made on the thread that does it.
pub(crate) type LastStage<D> = Box<dyn FnOnce() -> Box<dyn FnMut(&Batch<D>) -> Result<()>> + Send>;

impl<D: Device> ReadsOn<D> {
    /// The batches of an evaluation, which has one epoch, after another stage.
    pub fn infer_then(
        &self,
        job: &Job,
        over: &Inference,
        last: Option<LastStage<D>>,
    ) -> Result<Box<dyn PhaseSource<D>>> {
        match job.dataset.manifest().id_dtype() {
            Dtype::U64 => source_over::<D, u64>(self, job, over, last),
            _ => source_over::<D, u32>(self, job, over, last),
        }
    }
}

impl<D: Device> InferenceGraph<D> for ReadsOn<D> {
    fn infer(&self, job: &Job, over: &Inference) -> Result<Box<dyn PhaseSource<D>>> {
        self.infer_then(job, over, None)
    }

    fn table(&self) -> Result<InputTable> {
        let rows = self.rows.clone().expect("a table of features is asked for where batches have them");
        let (pool, nodes, dim) = (self.pool.clone(), rows.format().rows(), rows.format().dim());
        Ok(InputTable::new(nodes, dim, move || {
            let (mut reader, pool) = (rows.reader()?, pool.clone());
            Ok(Box::new(move |nodes, values| Ok(reader.read_all(nodes, &[], values, &pool)?)))
        }))
    }
}

/// Memory for reading neighbours of this many nodes and edges from disk.
pub(crate) fn workspace_bytes(job: &JobOutline, nodes: u64, edges: u64) -> u64 {
    match job.dataset.manifest().id_dtype() {
        Dtype::U64 => OnDisk::<u64>::workspace_bytes(nodes, edges),
        _ => OnDisk::<u32>::workspace_bytes(nodes, edges),
    }
}

/// Memory of a sampler on disk, with this many samples.
pub(crate) fn sampler_bytes(job: &JobOutline, bound: &Bound, samples: u64) -> u64 {
    bound.bytes(samples).saturating_add(workspace_bytes(job, bound.nodes, bound.edges))
}

fn sampling_bytes(job: &JobOutline, settings: &esker_sample::Settings, largest_batch: u64) -> u64 {
    sampler_bytes(job, &job.bound(settings, largest_batch), 1 + SAMPLES_PREFETCHED as u64)
}

/// Adds the memory of evaluation.
pub(crate) fn add_memory(job: &JobOutline, table: &mut MemoryTable) {
    if let Some(evaluation) = &job.evaluation {
        let bound = job.bound(&evaluation.settings, evaluation.largest_batch);
        let sampling = sampling_bytes(job, &evaluation.settings, evaluation.largest_batch);
        table.add("evaluation: sampling", sampling);
        table.add("evaluation: feature rows of a batch", bound.nodes.saturating_mul(job.dim() * 4));
        table.add("evaluation: reading", DiskRows::reader_bytes(bound.nodes));
    }
}

/// The memory of evaluation.
pub(crate) fn memory_bytes(job: &JobOutline) -> u64 {
    let mut table = MemoryTable::default();
    add_memory(job, &mut table);
    table.total()
}

/// A sample, where it is drawn, and its targets.
type DirectSample = (Position, Recycled<Sample>, Targets);

/// The position of a batch in the run that only tests.
fn tested(at: Position) -> RunPosition {
    RunPosition { phase: Phase::Test, batch: at.batch }
}

/// The first stage: samples from disk.
fn sampled<W: StoredId>(
    graph: &Arc<DiskGraph>,
    job: &Job,
    over: &Inference,
) -> Pipeline<DirectSample, StrategyError> {
    let all_samples = 1 + SAMPLES_PREFETCHED;
    let samples = Recycler::<Sample>::new(all_samples);
    let (batches, settings, outline) = (over.batches.clone(), over.settings.clone(), job.outline.clone());
    let sampling = || sampling_bytes(job, &over.settings, over.largest_batch);
    // A batch may be larger than expected.
    let most_bytes = over.sampling_bytes.unwrap_or_else(sampling).saturating_add(job.room.spare_bytes / 4);
    let mut positions = positions_of(batches.clone(), Position { epoch: 0, batch: 0 }, 1);
    let topology = OnDisk::<W>::new(graph.clone(), None);
    let listed = Pipeline::start("list", 0, move |_| Ok::<_, StrategyError>(positions.next()));
    // The sampler's queue stays on its thread, so the sampler is made there.
    listed.then_with(
        "sample",
        1,
        move || {
            let sampler = Sampler::new(topology, settings, most_bytes)?;
            Ok((sampler.with_samples(all_samples as u64), Vec::new()))
        },
        move |stage, (sampler, seeds), at| {
            let Some(mut sample) = stage.take(&samples) else { return Ok(None) };
            batches.seeds(at, seeds)?;
            sampler.begin(&*batches, at)?;
            let sampled = sampler.sample(at, seeds, &mut sample);
            sampled.map_err(|error| larger_than_expected(&outline, tested(at), error))?;
            Ok(Some((at, sample, batches.targets(at)?)))
        },
    )
}

fn source_over<D: Device, W: StoredId>(
    reads: &ReadsOn<D>,
    job: &Job,
    over: &Inference,
    last: Option<LastStage<D>>,
) -> Result<Box<dyn PhaseSource<D>>> {
    // Training rests, and its rows are free.
    reads.device.release_free();
    let permits = BatchPermits::new(job, job.bound(&over.settings, over.largest_batch).nodes, 1, 0);
    let sampled = sampled::<W>(&reads.graph, job, over);
    let (disk, pool, device) = (reads.rows.clone(), reads.pool.clone(), reads.device.clone());
    let disk = disk.filter(|_| over.rows);
    let (row_bytes, dim) = (job.row_bytes(), job.dim() as usize);
    let counted = Arc::new(RowCounters::default());
    let count = counted.clone();
    let pipeline = sampled.then_with(
        "gather",
        0,
        move || Ok(disk.map(|disk| disk.reader()).transpose()?),
        move |stage, reader, (at, sample, targets)| {
            let nodes = sample.node_ids.len();
            let Some(permit) = permits.take(stage, tested(at), nodes as u64)? else { return Ok(None) };
            let input = match reader {
                Some(reader) => {
                    let mut rows = device.host_rows(nodes, dim);
                    let nodes = &sample.node_ids;
                    count.read(reader, |reader| reader.read_all(nodes, &[], rows.values_mut(), &pool))?;
                    count.rows.fetch_add(nodes.len() as u64, Ordering::Relaxed);
                    Input::fixed(FixedRows::Host(rows))
                }
                None => Input::none(),
            };
            Ok(Some(Batch::of_sample(at, sample, targets, input, permit)))
        },
    );
    let pipeline = match last {
        None => pipeline,
        Some(last) => pipeline.then_with(
            "rows",
            0,
            move || Ok(last()),
            move |_, work, batch: Batch<D>| {
                work(&batch)?;
                Ok(Some(batch))
            },
        ),
    };
    Ok(Box::new(Stages::new(job, &over.settings, pipeline, move |stages| SourceCounters {
        stages,
        evaluation: counted.of_evaluation(row_bytes),
        ..SourceCounters::default()
    })?))
}
