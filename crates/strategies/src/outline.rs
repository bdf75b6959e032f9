//! The properties of a job that determine its memory. They are known from the configuration and the manifest, before
//! anything is read, and without a model.

use esker_sample::{Bound, Direction, Settings};
use esker_store::Dataset;
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
    /// Batches per epoch.
    pub epoch_batches: u64,
    /// How neighbours are sampled.
    pub settings: Settings,
    /// The direction of edges along which neighbours are found.
    pub direction: Direction,
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
    /// Names of dataset arrays whose values for the batch's nodes or edges come with each batch: for a loader. Arrays
    /// of edges need settings that carry edge ids.
    pub columns: Vec<String>,
    /// Budgets and sizes of strategies that work from disk.
    pub out_of_core: OutOfCore,
}

/// The size of evaluation.
#[derive(Clone)]
pub struct EvaluationOutline {
    /// Seed nodes of the largest batch.
    pub largest_batch: u64,
    /// How neighbours are sampled.
    pub settings: Settings,
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
    /// Smallest size of reads of feature rows, in bytes.
    pub io_block_bytes: Option<u64>,
    /// Directory of packed rows. By default it is inside the dataset.
    pub prepared: Option<PathBuf>,
    /// Batches per segment that shares a cache on disk.
    pub segment: Option<u32>,
    /// Bytes between two safe points while rows are packed, instead of the default: tests kill the process there.
    pub safe_point_bytes: Option<u64>,
    /// One batch at a time without prefetching: to measure what prefetching saves.
    pub sequential: bool,
}

impl JobOutline {
    /// The upper bounds of a batch.
    pub fn bound(&self, settings: &Settings, batch: u64) -> Bound {
        let manifest = self.dataset.manifest();
        let lists = if self.direction == Direction::Both { 2 } else { 1 };
        Bound::new(settings, batch, manifest.nodes.count, manifest.edges.count * lists, 1)
    }

    /// Bytes of a feature row as stored.
    pub fn row_bytes(&self) -> u64 {
        let features = self.dataset.manifest().nodes.features.as_ref();
        features.map_or(0, |features| features.dim * features.dtype.bytes())
    }

    /// Numbers per feature row.
    pub fn dim(&self) -> u64 {
        self.dataset.manifest().nodes.features.as_ref().map_or(0, |features| features.dim)
    }
}
