//! The properties of a job that determine its memory. They are known from the configuration and the manifest, before
//! anything is read, and without a model.

use crate::neighbours::{JobPartitioning, NeighbourPolicy};
use crate::{HistoryOutline, ResidentsOutline};
use esker_sample::{Bound, Direction, HopSizes, ResidentEdges, Settings};
use esker_store::{Dataset, FeatureInfo};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// The size of a job.
#[derive(Clone)]
pub struct JobOutline {
    /// The graph.
    pub dataset: Arc<Dataset>,
    /// Seed nodes of the largest training batch; 0 if the job does not train.
    pub largest_batch: u64,
    /// Epochs of the run.
    pub epochs: u64,
    /// Number of distinct epochs, if given explicitly. Later epochs repeat them.
    pub epochs_sampled: Option<u64>,
    /// Batches per epoch; the most, if epochs differ.
    pub epoch_batches: u64,
    /// How neighbours are sampled.
    pub settings: Settings,
    /// The size of batches, once a pilot has sampled some. Until then, what fan-outs allow.
    pub known: Option<KnownSizes>,
    /// The direction of edges along which neighbours are found.
    pub direction: Direction,
    /// Whether batches have feature rows. A model of embeddings alone reads none.
    pub features: bool,
    /// Batches of evaluation, if evaluation samples.
    pub evaluation: Option<EvaluationOutline>,
    /// Threads that fetch rows and compute.
    pub threads: usize,
    /// Batches sampled at a time: more than one if training leaves threads free.
    pub samplers: usize,
    /// Batches with rows in memory at a time: being fetched, waiting, being trained on.
    pub prefetch_depth: usize,
    /// How many of them belong to steps in flight, even when the next batch is requested.
    pub steps_in_flight: usize,
    /// Total memory of the strategy after the grant: the total of its table, and what is left for caches.
    pub strategy_bytes: u64,
    /// Device memory for rows cached for all batches, after the grant.
    pub device_cache_bytes: u64,
    /// Device memory for embeddings and the state of their optimizer, after the grant. `u64::MAX`: all on the device.
    pub embedding_device_bytes: u64,
    /// What batches that are larger than expected may take, after the grant.
    pub room: BatchRoom,
    /// Names of dataset arrays whose values for the batch's nodes or edges come with each batch: for a loader. Arrays
    /// of edges need settings that carry edge ids.
    pub columns: Vec<String>,
    /// The history of hidden rows that training uses, if any.
    pub history: Option<HistoryOutline>,
    /// Resident nodes, if training sees no others.
    pub residents: Option<ResidentsOutline>,
    /// Budgets and sizes of strategies that work from disk.
    pub out_of_core: OutOfCore,
}

/// The size of batches that a pilot sampled, with a margin.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KnownSizes {
    /// Those of training.
    pub training: Option<HopSizes>,
    /// Those of validation and test.
    pub evaluation: Option<HopSizes>,
}

/// Memory for batches that are larger than the pilot's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BatchRoom {
    /// Memory that nothing else uses.
    pub spare_bytes: u64,
    /// Host memory of a step on the largest expected batch, without its rows.
    pub step_bytes: u64,
    /// The budget of the whole run, for messages.
    pub budget_bytes: u64,
}

impl BatchRoom {
    /// Host memory that a step on `nodes` nodes takes beyond one on `expected` nodes.
    pub(crate) fn more_for(&self, nodes: u64, expected: u64) -> u64 {
        let more = nodes.saturating_sub(expected) as f64 / expected as f64;
        (more * self.step_bytes as f64) as u64
    }
}

/// The size of evaluation.
#[derive(Clone)]
pub struct EvaluationOutline {
    /// Seed nodes of the largest batch.
    pub largest_batch: u64,
    /// Batches of validation and test.
    pub batches: u64,
    /// How neighbours are sampled.
    pub settings: Settings,
}

/// Which feature rows are cached in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CachePolicy {
    /// Those that are accessed soonest, by Belady's algorithm (Ginex).
    #[default]
    Belady,
    /// The same for the whole run: those that its first superbatch accesses most (OUTRE).
    Static,
}

/// Budgets of strategies that work from disk, and sizes that override their defaults.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OutOfCore {
    /// Directory of traces and plans.
    pub scratch: PathBuf,
    /// Disk budget.
    pub disk_bytes: u64,
    /// Whether the disk budget was given explicitly.
    pub disk_bytes_explicit: bool,
    /// Batches that are sampled and planned together.
    pub superbatch: Option<u64>,
    /// Size of the feature cache in bytes.
    pub feature_cache_bytes: Option<u64>,
    /// Size of the neighbour cache in bytes.
    pub neighbour_cache_bytes: Option<u64>,
    /// How feature rows are cached.
    pub cache: CachePolicy,
    /// Which neighbours are cached, if it was given explicitly.
    pub neighbour_policy: Option<NeighbourPolicy>,
    /// The partitioning, if batches come by groups of partitions.
    pub partitioning: Option<JobPartitioning>,
    /// Smallest size of reads of feature rows, in bytes.
    pub io_block_bytes: Option<u64>,
    /// Directory of packed rows. By default it is inside the dataset.
    pub prepared: Option<PathBuf>,
    /// Batches per segment that shares a cache on disk.
    pub segment: Option<u32>,
    /// Bytes between two safe points while rows are packed or sorted, instead of the default: tests kill the process there.
    pub safe_point_bytes: Option<u64>,
    /// One batch at a time without prefetching: to measure what prefetching saves.
    pub sequential: bool,
    /// Only the work on disk before training: rows are not read into caches.
    pub prepare_only: bool,
    /// The partition buffer, if there is one.
    pub buffer: Option<BufferSizes>,
    /// A batch reads the learned rows that the batch so many before it left; 0 is 1.
    pub lag: u64,
    /// Directory of learned rows by partition.
    pub tables: PathBuf,
}

/// Numbers of node partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferSizes {
    /// Partitions: the paper's p.
    pub partitions: u32,
    /// Partitions that are resident at a time: its c.
    pub resident: u32,
    /// Partitions that are swapped together: those of a logical partition.
    pub each: u32,
    /// The most edges that steps have in memory; none if nothing is trained.
    pub edges: ResidentEdges,
}

impl BufferSizes {
    /// The most nodes that are resident, of so many.
    pub fn resident_nodes(&self, nodes: u64) -> u64 {
        nodes.min(self.largest(nodes).saturating_mul(self.resident as u64))
    }

    /// Nodes of the largest partition, of so many.
    pub fn largest(&self, nodes: u64) -> u64 {
        nodes.div_ceil(self.partitions.max(1) as u64)
    }
}

impl OutOfCore {
    /// See [`BatchSource::lag`](crate::BatchSource::lag).
    pub(crate) fn update_lag(&self) -> usize {
        self.lag.max(1) as usize
    }
}

impl JobOutline {
    /// The upper bounds of a batch of training or evaluation. `settings` are those of either, or their first hops.
    pub fn bound(&self, settings: &Settings, batch: u64) -> Bound {
        let manifest = self.dataset.manifest();
        self.bound_among(settings, batch, manifest.nodes.count, manifest.edges.count)
    }

    /// The same for batches that see so many nodes, with so many edges between them.
    fn bound_among(&self, settings: &Settings, batch: u64, nodes: u64, edges: u64) -> Bound {
        let directions = if self.direction == Direction::Both { 2 } else { 1 };
        let known = self.known_of(settings, batch);
        Bound::within(settings, batch, nodes, edges.saturating_mul(directions), 1, known.as_ref())
    }

    /// Whether the device has room for the rows of all nodes, and may cache them.
    pub fn caches_all_on_device(&self) -> bool {
        let all = self.dataset.manifest().nodes.count.saturating_mul(self.row_bytes());
        self.device_cache_bytes > 0
            && self.device_cache_bytes >= all
            && self.out_of_core.feature_cache_bytes.is_none()
    }

    /// The bounds of training batches.
    pub fn training_bound(&self) -> Bound {
        match self.out_of_core.buffer {
            Some(sizes) => {
                let nodes = sizes.resident_nodes(self.dataset.manifest().nodes.count);
                self.bound_among(&self.settings, self.largest_batch, nodes, sizes.edges.resident)
            }
            None => self.bound(&self.settings, self.largest_batch),
        }
    }

    /// The bounds of evaluation batches, if evaluation samples.
    pub fn evaluation_bound(&self) -> Option<Bound> {
        let evaluation = self.evaluation.as_ref()?;
        Some(self.bound(&evaluation.settings, evaluation.largest_batch))
    }

    /// The bounds of all batches, of training and of evaluation.
    pub fn largest_bound(&self) -> Bound {
        let trained = (self.largest_batch > 0).then(|| self.training_bound());
        match (trained, self.evaluation_bound()) {
            (Some(trained), Some(evaluated)) => trained.max(&evaluated),
            (trained, evaluated) => trained.or(evaluated).unwrap_or_else(|| self.training_bound()),
        }
    }

    /// Nodes of the largest batch of training or evaluation.
    pub fn most_nodes(&self) -> u64 {
        self.largest_bound().nodes
    }

    /// Host memory that a step on a batch of so many nodes takes beyond the one that is provided for.
    pub(crate) fn larger_step_bytes(&self, nodes: u64) -> u64 {
        self.room.more_for(nodes, self.most_nodes().max(1))
    }

    /// Seed nodes of the largest batch that is sampled like this.
    pub(crate) fn largest_batch_of(&self, settings: &Settings) -> u64 {
        let trained = if begins_with(&self.settings, settings) { self.largest_batch } else { 0 };
        let evaluation = self.evaluation.as_ref().filter(|over| begins_with(&over.settings, settings));
        evaluation.map_or(0, |over| over.largest_batch).max(trained)
    }

    /// What is known of batches that are sampled like this.
    fn known_of(&self, settings: &Settings, batch: u64) -> Option<HopSizes> {
        let known = self.known.as_ref().filter(|_| batch <= self.largest_batch_of(settings))?;
        let trained = known.training.as_ref().filter(|_| begins_with(&self.settings, settings));
        let evaluation = self.evaluation.as_ref().filter(|over| begins_with(&over.settings, settings));
        let evaluated = known.evaluation.as_ref().filter(|_| evaluation.is_some());
        match (trained, evaluated) {
            (Some(trained), Some(evaluated)) => Some(trained.max(evaluated)),
            (trained, evaluated) => trained.or(evaluated).cloned(),
        }
    }

    /// Bytes of a feature row as stored.
    pub fn row_bytes(&self) -> u64 {
        self.feature_info().map_or(0, |features| features.dim * features.dtype.bytes())
    }

    /// Numbers per feature row; 0 if batches have none.
    pub fn dim(&self) -> u64 {
        self.feature_info().map_or(0, |features| features.dim)
    }

    fn feature_info(&self) -> Option<&FeatureInfo> {
        self.dataset.manifest().nodes.features.as_ref().filter(|_| self.features)
    }
}

/// Whether the first hops of `whole` are sampled like `settings`.
fn begins_with(whole: &Settings, settings: &Settings) -> bool {
    whole.fanouts.starts_with(&settings.fanouts)
        && (whole.seed, whole.form, whole.carry) == (settings.seed, settings.form, settings.carry)
}
