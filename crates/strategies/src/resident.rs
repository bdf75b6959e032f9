//! A topology in memory and rows that can be read by node at any time: what `memory` and `mmap` share. Two stages, sampling
//! and gathering, run ahead of the trainer.

use crate::batch::{Batch, BatchSource, RowBuffer, RowMaker};
use crate::{Evaluation, Job, MemoryTable, Result, SourceCounters, Strategy, StrategyError};
use crossbeam_channel::{Receiver, Sender, bounded};
use esker_fetch::FeatureRows;
use esker_fetch::pipeline::{Buffers, Pipeline};
use esker_sample::bulk::positions;
use esker_sample::{AnyTopology, Batches, InMemory, Position, Sample, Sampler, Settings, Word};
use esker_store::Dataset;
use esker_types::NodeId;
use rayon::ThreadPool;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Samples beyond the batches whose rows are held: one being made, one waiting.
const SAMPLES_AHEAD: usize = 2;

/// A topology of either width, shared by sources.
enum Topology {
    Narrow(Arc<InMemory<u32>>),
    Wide(Arc<InMemory<u64>>),
}

/// The graph as sources read it.
struct Resident {
    topology: Topology,
    rows: Arc<FeatureRows>,
    pool: Arc<ThreadPool>,
}

/// What sources take, whatever holds the rows: the topology, and samples and rows of batches.
fn memory(job: &Job) -> MemoryTable {
    let mut table = MemoryTable::default();
    table.add("topology", AnyTopology::bytes_for(&job.dataset, job.direction));
    let row_bytes = job.dim() * 4;
    let bound = job.bound(&job.settings, job.largest_batch);
    let sampler = sampling_bytes(job, &job.settings, job.largest_batch, job.batches_held, job.samplers);
    table.add("sampling", sampler.saturating_mul(job.samplers as u64));
    let rows = bound.nodes.saturating_mul(row_bytes).saturating_mul(job.batches_held as u64);
    table.add(format!("rows of {} batches", job.batches_held), rows);
    if let Some(evaluation) = &job.evaluation {
        let bound = job.bound(&evaluation.settings, evaluation.largest_batch);
        let sampling = sampling_bytes(job, &evaluation.settings, evaluation.largest_batch, 1, 1);
        table.add("evaluation: sampling", sampling);
        table.add("evaluation: rows of a batch", bound.nodes.saturating_mul(row_bytes));
    }
    table
}

/// What each of some samplers may hold.
fn sampling_bytes(job: &Job, settings: &Settings, batch: u64, held: usize, samplers: usize) -> u64 {
    job.bound(settings, batch).bytes(samples_of(held, samplers) as u64)
}

/// Samples that go round at each of some samplers, which take batches in turn.
fn samples_of(held: usize, samplers: usize) -> usize {
    held.div_ceil(samplers.max(1)) + SAMPLES_AHEAD
}

/// Where a strategy with a topology in memory holds its rows.
pub trait Hold: Send {
    /// Adds what that takes.
    fn memory(&self, job: &Job, table: &mut MemoryTable) -> Result<()>;
    /// Opens them.
    fn open(&self, dataset: &Dataset) -> Result<FeatureRows>;
}

/// A topology in memory, and rows wherever they are held.
pub struct ResidentStrategy<R, H> {
    rows: RowMaker<R>,
    hold: H,
    graph: Option<Resident>,
}

impl<R, H> ResidentStrategy<R, H> {
    pub fn new(rows: RowMaker<R>, hold: H) -> ResidentStrategy<R, H> {
        ResidentStrategy { rows, hold, graph: None }
    }

    /// The graph, once it was opened. Asking before is a bug.
    fn prepared(&self) -> &Resident {
        self.graph.as_ref().expect("a strategy is prepared before it yields batches")
    }
}

impl<R: RowBuffer, H: Hold> Strategy<R> for ResidentStrategy<R, H> {
    fn memory(&self, job: &Job) -> Result<MemoryTable> {
        let mut table = MemoryTable::default();
        self.hold.memory(job, &mut table)?;
        table.extend(memory(job));
        Ok(table)
    }

    fn prepare(&mut self, job: &Job) -> Result<()> {
        self.graph = Some(Resident::open(job, self.hold.open(&job.dataset)?)?);
        Ok(())
    }

    fn batches(&mut self, job: &Job, from: Position) -> Result<Box<dyn BatchSource<R>>> {
        self.prepared().batches(job, from, &self.rows)
    }

    fn evaluation(&mut self, job: &Job, over: &Evaluation) -> Result<Box<dyn BatchSource<R>>> {
        self.prepared().evaluation(job, over, &self.rows)
    }

    fn rows(&mut self, nodes: &[NodeId], values: &mut [f32]) -> Result<()> {
        self.prepared().rows(nodes, values)
    }
}

impl Resident {
    /// Reads the topology; rows are as the strategy holds them.
    fn open(job: &Job, rows: FeatureRows) -> Result<Resident> {
        let topology = match AnyTopology::load(&job.dataset, job.direction, u64::MAX)? {
            AnyTopology::Narrow(graph) => Topology::Narrow(Arc::new(graph)),
            AnyTopology::Wide(graph) => Topology::Wide(Arc::new(graph)),
        };
        let threads = job.threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(|error| StrategyError::Threads { threads, problem: error.to_string() })?;
        Ok(Resident { topology, rows: Arc::new(rows), pool: Arc::new(pool) })
    }

    /// Batches of the run from a position on.
    fn batches<R: RowBuffer>(
        &self,
        job: &Job,
        from: Position,
        make_rows: &RowMaker<R>,
    ) -> Result<Box<dyn BatchSource<R>>> {
        let plan = Plan {
            batches: job.batches.clone(),
            from,
            epochs: job.epochs,
            epochs_sampled: job.epochs_sampled.unwrap_or(u64::MAX),
            settings: job.settings.clone(),
            most_bytes: sampling_bytes(job, &job.settings, job.largest_batch, job.batches_held, job.samplers),
            held: job.batches_held,
            rows: true,
            samplers: job.samplers.max(1),
        };
        self.source(plan, make_rows)
    }

    /// Batches over other seeds: their only epoch.
    fn evaluation<R: RowBuffer>(
        &self,
        job: &Job,
        over: &Evaluation,
        make_rows: &RowMaker<R>,
    ) -> Result<Box<dyn BatchSource<R>>> {
        let plan = Plan {
            batches: over.batches.clone(),
            from: Position { epoch: 0, batch: 0 },
            epochs: 1,
            epochs_sampled: 1,
            settings: over.settings.clone(),
            most_bytes: over
                .sampling_bytes
                .unwrap_or_else(|| sampling_bytes(job, &over.settings, over.largest_batch, 1, 1)),
            held: 1,
            rows: over.rows,
            samplers: 1,
        };
        self.source(plan, make_rows)
    }

    /// The rows of nodes.
    fn rows(&self, nodes: &[NodeId], values: &mut [f32]) -> Result<()> {
        Ok(self.pool.install(|| self.rows.gather(nodes, values))?)
    }

    fn source<R: RowBuffer>(&self, plan: Plan, make_rows: &RowMaker<R>) -> Result<Box<dyn BatchSource<R>>> {
        Ok(match &self.topology {
            Topology::Narrow(graph) => Box::new(self.source_over(graph, plan, make_rows)?),
            Topology::Wide(graph) => Box::new(self.source_over(graph, plan, make_rows)?),
        })
    }

    fn source_over<W: Word, R: RowBuffer>(
        &self,
        graph: &Arc<InMemory<W>>,
        plan: Plan,
        make_rows: &RowMaker<R>,
    ) -> Result<Source<R>> {
        let (stop, stopped) = bounded::<()>(0);
        let places = Buffers::<()>::new(plan.held);
        let samplers = (0..plan.samplers).map(|number| sample_stage(graph, &plan, number, &stopped));
        let sampled = match samplers.collect::<Result<Vec<_>>>()? {
            mut only if only.len() == 1 => only.remove(0),
            several => Pipeline::in_turn(several),
        };
        let (rows, pool, make_rows) = (self.rows.clone(), self.pool.clone(), make_rows.clone());
        let gathered = Arc::new(AtomicU64::new(0));
        let (count, with_rows) = (gathered.clone(), plan.rows);
        let pipeline =
            sampled.then("gather", plan.held.saturating_sub(2), move |clock, mut sampled: Sampled| {
                let (at, sample, samples) =
                    (sampled.at, std::mem::take(&mut sampled.sample), sampled.samples.clone());
                if clock.blocked(|| places.take(&stopped)).is_none() {
                    return Ok(None);
                }
                let nodes = if with_rows { &sample.node_ids[..] } else { &[] };
                let mut batch_rows = make_rows(nodes.len(), rows.dim());
                pool.install(|| rows.gather(nodes, batch_rows.values_mut()))?;
                count.fetch_add(nodes.len() as u64, Ordering::Relaxed);
                Ok(Some(Batch { at, sample, rows: Some(batch_rows), samples, places: places.clone() }))
            });
        let row_bytes = self.rows.row_bytes() as u64;
        // What the page cache found is not known.
        let tier = self.rows.is_in_memory().then_some("memory");
        Ok(Source { stop: Some(stop), pipeline: Some(pipeline), gathered, row_bytes, tier })
    }
}

/// A sample, and where it goes in the end.
struct Sampled {
    at: Position,
    sample: Sample,
    samples: Buffers<Sample>,
}

impl Drop for Sampled {
    fn drop(&mut self) {
        // One that nobody took must not be missing: its sampler may wait for it.
        if !self.sample.node_ids.is_empty() {
            self.samples.put(std::mem::take(&mut self.sample));
        }
    }
}

/// One of the samplers that take batches in turn.
fn sample_stage<W: Word>(
    graph: &Arc<InMemory<W>>,
    plan: &Plan,
    number: usize,
    stopped: &Receiver<()>,
) -> Result<Pipeline<Sampled, StrategyError>> {
    let count = samples_of(plan.held, plan.samplers);
    let sampler = Sampler::new(graph.clone(), plan.settings.clone(), plan.most_bytes)?;
    let mut sampler = sampler.with_samples(count as u64);
    let (samples, batches, stopped) = (Buffers::<Sample>::new(count), plan.batches.clone(), stopped.clone());
    let mut positions =
        positions_of(batches.clone(), plan.from, plan.epochs).skip(number).step_by(plan.samplers);
    let (mut seeds, repeat) = (Vec::new(), plan.epochs_sampled.max(1));
    Ok(Pipeline::start("sample", 1, move |clock| {
        let Some(at) = positions.next() else { return Ok(None) };
        let Some(mut sample) = clock.blocked(|| samples.take(&stopped)) else { return Ok(None) };
        let drawn = Position { epoch: at.epoch % repeat, ..at };
        batches.seeds(drawn, &mut seeds)?;
        sampler.sample(drawn, &seeds, &mut sample)?;
        Ok(Some(Sampled { at, sample, samples: samples.clone() }))
    }))
}

/// What a source runs through.
struct Plan {
    batches: Arc<dyn Batches>,
    from: Position,
    epochs: u64,
    epochs_sampled: u64,
    settings: Settings,
    most_bytes: u64,
    held: usize,
    rows: bool,
    samplers: usize,
}

/// The positions of a run, for a thread of its own.
pub(crate) fn positions_of(
    batches: Arc<dyn Batches>,
    from: Position,
    epochs: u64,
) -> impl Iterator<Item = Position> + Send {
    (from.epoch..epochs).flat_map(move |epoch| {
        let first = if epoch == from.epoch { from } else { Position { epoch, batch: 0 } };
        positions(&*batches, first, epoch + 1).collect::<Vec<_>>()
    })
}

struct Source<R> {
    /// Dropped first: stages that wait for buffers give up.
    stop: Option<Sender<()>>,
    pipeline: Option<Pipeline<Batch<R>, StrategyError>>,
    gathered: Arc<AtomicU64>,
    row_bytes: u64,
    tier: Option<&'static str>,
}

impl<R: RowBuffer> BatchSource<R> for Source<R> {
    fn next(&mut self) -> Result<Option<Batch<R>>> {
        self.pipeline.as_mut().and_then(Pipeline::receive).transpose()
    }

    fn counters(&self) -> SourceCounters {
        let rows = self.gathered.load(Ordering::Relaxed);
        SourceCounters {
            stages: self.pipeline.as_ref().map(Pipeline::times).unwrap_or_default(),
            rows,
            bytes_useful: rows * self.row_bytes,
            hits: self.tier.iter().map(|tier| (tier.to_string(), rows)).collect(),
            ..SourceCounters::default()
        }
    }
}

impl<R> Drop for Source<R> {
    fn drop(&mut self) {
        self.stop = None;
        self.pipeline = None;
    }
}
