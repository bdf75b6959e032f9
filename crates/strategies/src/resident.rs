//! Topology in memory, and feature rows that can be read by node at any time. `memory` and `mmap` share this. Two
//! stages, sampling and gathering, run ahead of the trainer.

use crate::history::{self, History, HistorySource, OpenHistory, SharedStamps};
use crate::permits::BatchPermits;
use crate::phases::{InferenceGraph, PhaseSource, Phases};
use crate::residents::{Residents, ResidentsOutline};
use crate::sampling::{ResidentTopology, SampledBatch, sampling_bytes};
use crate::source::Stages;
use crate::{
    Batch, BatchSource, CheckpointReader, EvaluationCounters, EvaluationSchedule, FixedRows, Inference,
    Input, InputTable, Job, JobOutline, MemoryTable, Needs, Phase, Prepared, Result, RunPosition,
    SourceCounters, Strategy,
};
use esker_device::{Device, HostRows};
use esker_fetch::FeatureRows;
use esker_sample::{AnyTopology, Subgraph, SubgraphShape};
use esker_store::Dataset;
use esker_types::{Dtype, counted, disk_bytes_read, grouped};
use rayon::ThreadPool;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The feature rows of a strategy with its topology in memory.
pub trait ResidentRows: Send {
    /// Opens the rows.
    fn open(&self, dataset: &Dataset) -> Result<FeatureRows>;
    /// The memory that the strategy needs.
    fn needs(&self, job: &JobOutline) -> Result<Needs>;
}

/// The memory of such a strategy: `rows`, the topology, samples and rows of batches. Batches of training and of
/// evaluation share it, in the order of the run.
pub fn needs(job: &JobOutline, rows: &[(&str, u64)]) -> Result<Needs> {
    let mut table = MemoryTable::default();
    rows.iter().for_each(|(what, bytes)| table.add(*what, *bytes));
    let edges = grouped(job.dataset.manifest().edges.count);
    let topology = AnyTopology::bytes_for(&job.dataset, job.direction);
    table.add_from("topology", topology, format!("offsets of all nodes, {edges} neighbours"));
    if let Some(residents) = job.residents.filter(|_| job.largest_batch > 0) {
        add_subgraphs(job, residents, &mut table);
    }
    let sampling = sampling_bytes(job).saturating_mul(job.samplers as u64);
    table.add("sampling", sampling.saturating_add(history::deciding_bytes(job)));
    let (nodes, dim, depth) = (job.most_nodes(), job.dim(), job.prefetch_depth as u64);
    if job.features {
        let rows = nodes.saturating_mul(dim * 4).saturating_mul(depth);
        let from = format!("{depth} x {} nodes x {dim} x 4 bytes", grouped(nodes));
        table.add_from(format!("feature rows of {}", counted(depth, "batch", "batches")), rows, from);
    }
    history::add_host_memory(job, &mut table);
    let mut needs = Needs { host: table, topology_in_memory: true, ..Needs::default() };
    history::add_needs(job, &mut needs);
    Ok(needs)
}

/// Adds the memory of what training sees, if it sees resident nodes only. How many edges they have is not known: at most
/// all.
fn add_subgraphs(job: &JobOutline, residents: ResidentsOutline, table: &mut MemoryTable) {
    let manifest = job.dataset.manifest();
    let shape = SubgraphShape {
        direction: job.direction,
        relations: manifest.edges.relations.is_some(),
        edge_ids: job.settings.carry.edges,
    };
    let (nodes, edges) = (manifest.nodes.count, manifest.edges.count);
    let each = match manifest.id_dtype() {
        Dtype::U64 => Subgraph::<u64>::bytes_for(nodes, residents.nodes, edges, shape),
        _ => Subgraph::<u32>::bytes_for(nodes, residents.nodes, edges, shape),
    };
    let count = Residents::subgraphs(job.samplers);
    let from = format!("{count} x {} nodes and at most {} edges", grouped(residents.nodes), grouped(edges));
    table.add_from("subgraphs of resident nodes", count.saturating_mul(each), from);
}

/// The graph that sources share.
struct Resident<D> {
    topology: ResidentTopology,
    /// `None` if batches have none.
    rows: Option<Arc<FeatureRows>>,
    pool: Arc<ThreadPool>,
    device: D,
}

/// A strategy with its topology in memory and any kind of rows.
pub struct ResidentStrategy<D, H> {
    device: D,
    rows: H,
    graph: Option<Arc<Resident<D>>>,
}

impl<D, H> ResidentStrategy<D, H> {
    pub fn new(device: D, rows: H) -> ResidentStrategy<D, H> {
        ResidentStrategy { device, rows, graph: None }
    }

    /// The graph. Panics before `prepare`.
    fn opened(&self) -> &Arc<Resident<D>> {
        self.graph.as_ref().expect("a strategy is prepared before it yields batches")
    }
}

impl<D: Device, H: ResidentRows> Strategy<D> for ResidentStrategy<D, H> {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        self.rows.needs(job)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared> {
        let topology = ResidentTopology::load(job)?;
        let rows = job.features.then(|| self.rows.open(&job.dataset)).transpose()?.map(Arc::new);
        let pool = job.pool.clone();
        self.graph = Some(Arc::new(Resident { topology, rows, pool, device: self.device.clone() }));
        let notes = History::of(job).iter().map(History::note).collect();
        Ok(Prepared { notes, ..Prepared::default() })
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let (graph, at) = (self.opened(), Phases::<D>::first_of(from));
        let training: Box<dyn PhaseSource<D>> = match History::of(job) {
            None => Box::new(ResidentRun::open(graph, job, at, None)?),
            Some(history) => {
                let opened = OpenHistory::open(&self.device, history, state)?;
                let run = ResidentRun::open(graph, job, at, Some(opened.stamps.clone()))?;
                Box::new(HistorySource::new(Box::new(run), &self.device, opened))
            }
        };
        Ok(Box::new(Phases::new(job, from, training, graph.clone())))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        history::leave(state)?;
        Ok(Box::new(Phases::alone(job, over, self.opened().clone())?))
    }
}

impl<D: Device> InferenceGraph<D> for Arc<Resident<D>> {
    /// Batches over other seeds: a run that only tests.
    fn infer(&self, job: &Job, over: &Inference) -> Result<Box<dyn PhaseSource<D>>> {
        let mut job = job.clone();
        job.schedule = EvaluationSchedule { test: Some(over.clone()), ..EvaluationSchedule::default() };
        (job.outline.prefetch_depth, job.outline.samplers, job.outline.steps_in_flight) = (1, 1, 0);
        Ok(Box::new(ResidentRun::open(self, &job, RunPosition::start_of(Phase::Test), None)?))
    }

    fn table(&self) -> Result<InputTable> {
        let rows = self.rows.clone().expect("a table of features is asked for where batches have them");
        let pool = self.pool.clone();
        Ok(InputTable::new(rows.rows(), rows.dim(), move || {
            let (rows, pool) = (rows.clone(), pool.clone());
            Ok(Box::new(move |nodes, values| Ok(pool.install(|| rows.gather(nodes, &[], values))?)))
        }))
    }
}

/// The batches of a run in one stream, those of evaluations included. So the first batches of an evaluation are ready
/// when an epoch ends, and the other way round.
struct ResidentRun<D: Device> {
    graph: Arc<Resident<D>>,
    job: Job,
    /// `None` only between two.
    stages: Option<Stages<D>>,
    /// Rows of batches of training, and of evaluations.
    gathered: Arc<[AtomicU64; 2]>,
    /// The stamps of a history as of the last step.
    stamps: Option<SharedStamps>,
}

impl<D: Device> ResidentRun<D> {
    /// Batches from a position on.
    fn open(
        graph: &Arc<Resident<D>>,
        job: &Job,
        from: RunPosition,
        stamps: Option<SharedStamps>,
    ) -> Result<ResidentRun<D>> {
        let gathered = Arc::<[AtomicU64; 2]>::default();
        let mut run = ResidentRun { graph: graph.clone(), job: job.clone(), stages: None, gathered, stamps };
        run.restart(from)?;
        Ok(run)
    }
}

impl<D: Device> PhaseSource<D> for ResidentRun<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        self.stages.as_mut().map_or(Ok(None), Stages::next)
    }

    fn counters(&self) -> SourceCounters {
        self.stages.as_ref().map(Stages::counters).unwrap_or_default()
    }

    fn evaluates(&self) -> bool {
        true
    }

    fn restart(&mut self, at: RunPosition) -> Result<()> {
        // Those before end first, and free their memory.
        self.stages = None;
        self.stages = Some(self.graph.stages(&self.job, at, self.stamps.as_ref(), &self.gathered)?);
        Ok(())
    }
}

impl<D: Device> Resident<D> {
    /// The stages of a run from a position on.
    fn stages(
        &self,
        job: &Job,
        from: RunPosition,
        stamps: Option<&SharedStamps>,
        gathered: &Arc<[AtomicU64; 2]>,
    ) -> Result<Stages<D>> {
        let sampled = self.topology.sampled(job, from, stamps)?;
        let (rows, pool, device) = (self.rows.clone(), self.pool.clone(), self.device.clone());
        let expected =
            job.inference(from.phase).map_or(0, |over| job.bound(&over.settings, over.largest_batch).nodes);
        let permits =
            BatchPermits::new(job, expected.max(job.most_nodes()), job.prefetch_depth, job.steps_in_flight);
        let (count, job_of) = (gathered.clone(), job.clone());
        let queue = job.prefetch_depth.saturating_sub(2);
        let pipeline = sampled.then("gather", queue, move |stage, sampled: SampledBatch| {
            let SampledBatch { at, sample, targets } = sampled;
            let over = job_of.inference(at.phase);
            let nodes = sample.node_ids.len();
            let Some(permit) = permits.take(stage, at, nodes as u64)? else { return Ok(None) };
            let rows = rows.as_ref().filter(|_| over.is_none_or(|over| over.rows));
            let input = match rows {
                Some(rows) => {
                    let mut input = device.host_rows(nodes, rows.dim());
                    pool.install(|| rows.gather(&sample.node_ids, &[], input.values_mut()))?;
                    count[usize::from(over.is_some())].fetch_add(nodes as u64, Ordering::Relaxed);
                    Input::fixed(FixedRows::Host(input))
                }
                None => Input::none(),
            };
            let batch = Batch::of_sample(at.position(), sample, targets, input, permit);
            Ok(Some(Batch { at, ..batch }))
        });
        let row_bytes = self.rows.as_ref().map_or(0, |rows| rows.row_bytes() as u64);
        // The hits of the page cache are not known.
        let in_memory = self.rows.as_ref().is_none_or(|rows| rows.is_in_memory());
        let (tier, gathered) = (in_memory.then_some("memory"), gathered.clone());
        Stages::new(job, &job.settings, pipeline, move |stages| {
            let [rows, evaluated] = [0, 1].map(|phase: usize| gathered[phase].load(Ordering::Relaxed));
            let evaluation = EvaluationCounters {
                rows: evaluated,
                hits: if tier.is_some() { evaluated } else { 0 },
                bytes_useful: evaluated * row_bytes,
                ..EvaluationCounters::default()
            };
            let hits = tier.iter().map(|tier| (tier.to_string(), rows)).collect();
            let bytes_read = if tier.is_some() { 0 } else { disk_bytes_read() };
            let bytes_useful = rows * row_bytes;
            SourceCounters {
                stages,
                rows,
                bytes_useful,
                bytes_read,
                hits,
                evaluation,
                ..SourceCounters::default()
            }
        })
    }
}
