//! The job that every strategy gets. It determines all batches of training, validation and test.

use crate::history::History;
use crate::sampling::ResidentTopology;
use crate::{JobOutline, Phase, Residents, Result, RunPosition, StrategyError};
use esker_sample::trace::TraceHeader;
use esker_sample::{
    AnyTopology, Batches, BucketCounts, BucketSubgraphs, Direction, DiskGraph, EdgeBuckets, EdgeLookup,
    GraphWork, NodePartitions, NodeSet, Position, Settings, StepGraphs, SubgraphShape,
};
use esker_store::Dataset;
use esker_types::{Dtype, Progress, Silent, StopSignal};
use rayon::ThreadPool;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// What to yield batches of.
#[derive(Clone)]
pub struct Job {
    /// Its size.
    pub outline: JobOutline,
    /// The seeds of each training batch, and the order of batches.
    pub batches: Arc<dyn Batches>,
    /// Batches of validation and test, and when they run.
    pub schedule: EvaluationSchedule,
    /// The threads of the run. No other threads compute.
    pub pool: Arc<ThreadPool>,
    /// Receives the progress of work before training.
    pub progress: Arc<dyn Progress + Send + Sync>,
    /// Requests the end of the run. Work before training and sampling in advance end soon, with nothing lost.
    pub stop: StopSignal,
    /// The topology that the pilot loaded or opened, for the strategy.
    pub topology: LoadedTopology,
    /// The nodes whose hidden rows are kept, if the outline has a history.
    pub history: Option<Arc<NodeSet>>,
    /// The resident nodes of each step, if training sees no others.
    pub residents: Option<Residents>,
    /// The graph by node partitions, for a strategy with a partition buffer.
    pub partitioned: Option<PartitionedGraph>,
}

/// A graph by node partitions.
#[derive(Clone)]
pub struct PartitionedGraph {
    /// Which nodes are in which partition.
    pub partitions: Arc<NodePartitions>,
    /// Edges of every bucket.
    pub counts: Arc<BucketCounts>,
    /// The edges by pairs of partitions, once they are sorted.
    buckets: Arc<OnceLock<Arc<EdgeBuckets>>>,
    /// The subgraphs of steps, which batches are made of.
    pub steps: StepGraphs,
}

impl PartitionedGraph {
    /// The graph of a dataset, of whose edges only the number is known yet.
    pub fn new(dataset: &Dataset, partitions: NodePartitions, counts: BucketCounts) -> PartitionedGraph {
        let relations = dataset.manifest().edges.relations.is_some();
        let steps = match dataset.manifest().id_dtype() {
            Dtype::U64 => StepGraphs::Wide(BucketSubgraphs::new(relations)),
            _ => StepGraphs::Narrow(BucketSubgraphs::new(relations)),
        };
        PartitionedGraph {
            partitions: Arc::new(partitions),
            counts: Arc::new(counts),
            buckets: Arc::default(),
            steps,
        }
    }

    /// Opens the edges. They are sorted into buckets, if they are not yet, within the memory of `work`.
    pub fn sort(&self, dataset: &Arc<Dataset>, work: &GraphWork) -> Result<&Arc<EdgeBuckets>> {
        let sorted = EdgeBuckets::find_or_make(dataset, &self.partitions, work)?;
        self.counts.check(&sorted)?;
        Ok(self.buckets.get_or_init(|| Arc::new(sorted)))
    }

    /// The edges. Panics before they are sorted.
    pub fn buckets(&self) -> &Arc<EdgeBuckets> {
        self.buckets.get().expect("edges are sorted before batches are made")
    }

    /// What subgraphs have of edges.
    pub(crate) fn shape(job: &JobOutline) -> SubgraphShape {
        let relations = job.dataset.manifest().edges.relations.is_some();
        SubgraphShape { direction: job.direction, relations, edge_ids: false }
    }
}

/// A topology in memory, if it is loaded, or open files of one on disk.
#[derive(Clone, Default)]
pub struct LoadedTopology {
    pub(crate) resident: Option<ResidentTopology>,
    pub(crate) on_disk: Option<Arc<DiskGraph>>,
    /// For the work before training, until that is done: whoever uses it takes it.
    pub(crate) lent: Arc<Mutex<Option<ResidentTopology>>>,
}

impl LoadedTopology {
    /// A topology in memory for the work before training, and its files.
    pub(crate) fn lending(topology: ResidentTopology, on_disk: Arc<DiskGraph>) -> LoadedTopology {
        let lent = Arc::new(Mutex::new(Some(topology)));
        LoadedTopology { resident: None, on_disk: Some(on_disk), lent }
    }

    /// Takes the topology that was lent, if nobody did. Dropping it frees its memory.
    pub(crate) fn take_lent(&self) -> Option<ResidentTopology> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Loads the topology of a dataset.
    pub fn load(dataset: &Dataset, direction: Direction) -> Result<LoadedTopology> {
        Ok(LoadedTopology {
            resident: Some(ResidentTopology::of(dataset, direction)?),
            ..LoadedTopology::default()
        })
    }

    /// Looks up its edges. `None` if nothing is loaded.
    pub fn lookup(&self) -> Option<Arc<dyn EdgeLookup>> {
        self.resident.as_ref().map(ResidentTopology::lookup)
    }
}

/// When a run evaluates with sampled neighbourhoods, and on what. Empty if it does not.
#[derive(Clone, Default)]
pub struct EvaluationSchedule {
    /// Validation after epochs.
    pub validation: Option<Inference>,
    /// Validate every this many epochs, and after the last; 0 for never.
    pub every: u64,
    /// Validation of the final model, at the end.
    pub last_validation: Option<Inference>,
    /// Test, at the end.
    pub test: Option<Inference>,
}

/// Batches over seeds for inference.
#[derive(Clone)]
pub struct Inference {
    /// The batches.
    pub batches: Arc<dyn Batches>,
    /// Seed nodes of the largest batch.
    pub largest_batch: u64,
    /// How neighbours are sampled.
    pub settings: Settings,
    /// Whether feature rows are needed. Otherwise batches come without.
    pub rows: bool,
    /// Memory of sampling, if a better bound is known than the one from fan-outs.
    pub sampling_bytes: Option<u64>,
}

impl Deref for Job {
    type Target = JobOutline;
    fn deref(&self) -> &JobOutline {
        &self.outline
    }
}

impl DerefMut for Job {
    fn deref_mut(&mut self) -> &mut JobOutline {
        &mut self.outline
    }
}

impl Job {
    /// A job that trains on these batches, evaluates nothing, and has its own threads.
    pub fn new(outline: JobOutline, batches: Arc<dyn Batches>) -> Result<Job> {
        let threads = outline.threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(|source| StrategyError::Threads { threads, source })?;
        Ok(Job {
            outline,
            batches,
            schedule: EvaluationSchedule::default(),
            pool: Arc::new(pool),
            progress: Arc::new(Silent),
            stop: StopSignal::default(),
            topology: LoadedTopology::default(),
            history: None,
            residents: None,
            partitioned: None,
        })
    }

    /// Frees a topology that the pilot lent, if it does not fit the memory that is free before the first step.
    pub fn settle_topology(&self) {
        let free = self.strategy_bytes.saturating_add(self.room.step_bytes);
        let offsets = DiskGraph::bytes_for(&self.dataset, self.direction);
        if AnyTopology::bytes_for(&self.dataset, self.direction).saturating_add(offsets) > free {
            self.topology.take_lent();
        }
    }

    /// The header of a trace of its batches.
    pub(crate) fn trace_header(&self) -> TraceHeader {
        let manifest = self.dataset.manifest();
        TraceHeader {
            dataset: manifest.id.clone(),
            nodes: manifest.nodes.count,
            edges: manifest.edges.count,
            relations: manifest.edges.relations.as_ref().map_or(0, |relations| relations.count),
            direction: self.direction,
            batches: match History::of(self) {
                None => self.batches.identity(),
                // What is pulled changes samples.
                Some(History { outline, nodes }) => {
                    let (batches, nodes) = (self.batches.identity(), nodes.digest());
                    let hops = match outline.hops {
                        1 => String::new(),
                        hops => format!(" hops:{hops}"),
                    };
                    format!("{batches} history:{nodes} staleness:{}{hops}", outline.staleness)
                }
            },
            settings: self.settings.clone(),
        }
    }

    /// The position at which a batch is sampled: later epochs repeat the sampled ones.
    pub fn sampled_at(&self, at: Position) -> Position {
        Position { epoch: self.epochs_sampled.map_or(at.epoch, |epochs| at.epoch % epochs.max(1)), ..at }
    }

    /// Whether validation runs after an epoch. It always runs after the last.
    pub fn validates_after(&self, epoch: u64) -> bool {
        let every = self.schedule.every;
        every > 0 && ((epoch + 1).is_multiple_of(every) || epoch + 1 == self.epochs)
    }

    /// The phase after another.
    pub fn phase_after(&self, phase: Phase) -> Option<Phase> {
        let schedule = &self.schedule;
        let first = match phase {
            Phase::Train { epoch } if schedule.validation.is_some() && self.validates_after(epoch) => {
                return Some(Phase::Validation { epoch });
            }
            Phase::Train { epoch } | Phase::Validation { epoch } => epoch + 1,
            Phase::Test => return None,
        };
        let last = Phase::Validation { epoch: self.epochs };
        match first < self.epochs {
            true => Some(Phase::Train { epoch: first }),
            false if schedule.last_validation.is_some() && phase < last => Some(last),
            false => schedule.test.as_ref().map(|_| Phase::Test),
        }
    }

    /// The first batch that exists, from a position on.
    pub(crate) fn first_batch(&self, mut at: RunPosition) -> Option<RunPosition> {
        while at.batch >= self.count(at.phase) {
            at = RunPosition::start_of(self.phase_after(at.phase)?);
        }
        Some(at)
    }

    /// The batches of a phase that evaluates.
    pub fn inference(&self, phase: Phase) -> Option<&Inference> {
        match phase {
            Phase::Train { .. } => None,
            Phase::Validation { epoch } if epoch == self.epochs => self.schedule.last_validation.as_ref(),
            Phase::Validation { .. } => self.schedule.validation.as_ref(),
            Phase::Test => self.schedule.test.as_ref(),
        }
    }

    /// Number of batches of a phase.
    pub fn count(&self, phase: Phase) -> u64 {
        match phase {
            // Epochs may differ in their number of batches, and a repeated one has that of the epoch it repeats.
            Phase::Train { epoch } => self.batches.count(self.sampled_at(Position { epoch, batch: 0 }).epoch),
            other => self.inference(other).map_or(0, |over| over.batches.count(0)),
        }
    }

    /// The training position at which a run resumes. For a validation it is the first of the next epoch.
    pub(crate) fn training_position(&self, from: RunPosition) -> Position {
        match from.phase {
            Phase::Train { epoch } => Position { epoch, batch: from.batch },
            Phase::Validation { epoch } => Position { epoch: epoch + 1, batch: 0 },
            Phase::Test => Position { epoch: self.epochs, batch: 0 },
        }
    }
}

/// The positions of some epochs. The iterator can move to another thread.
pub(crate) fn positions_of(
    batches: Arc<dyn Batches>,
    from: Position,
    epochs: u64,
) -> impl Iterator<Item = Position> + Send {
    (from.epoch..epochs).flat_map(move |epoch| {
        let first = if epoch == from.epoch { from.batch } else { 0 };
        (first..batches.count(epoch)).map(move |batch| Position { epoch, batch })
    })
}

/// The batches of a run from a position on, in the order of the run. The iterator can move to another thread.
pub(crate) fn run_positions(
    job: &Job,
    from: RunPosition,
) -> impl Iterator<Item = RunPosition> + Send + use<> {
    let (job, mut next) = (job.clone(), Some(from));
    std::iter::from_fn(move || {
        let at = job.first_batch(next?);
        next = at.map(|at| RunPosition { batch: at.batch + 1, ..at });
        at
    })
}
