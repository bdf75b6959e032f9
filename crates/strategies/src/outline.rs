//! What memory depends on in a job: known from the configuration and the manifest, before anything is read, and without a model.

use esker_sample::{Bound, Direction, Settings};
use esker_store::Dataset;
use std::path::PathBuf;
use std::sync::Arc;

/// The size of a job.
#[derive(Clone)]
pub struct JobOutline {
    /// The graph.
    pub dataset: Arc<Dataset>,
    /// Seeds of the largest batch that is trained on; 0 where nobody trains.
    pub largest_batch: u64,
    /// Epochs of the run.
    pub epochs: u64,
    /// Epochs whose batches differ, where that is explicit; later ones repeat them.
    pub epochs_sampled: Option<u64>,
    /// Batches of an epoch.
    pub epoch_batches: u64,
    /// How neighbours are drawn.
    pub settings: Settings,
    /// Along which edges.
    pub direction: Direction,
    /// Batches of evaluation, where evaluation samples.
    pub evaluation: Option<EvaluationOutline>,
    /// Threads that fetch rows and compute.
    pub threads: usize,
    /// Batches that are sampled at a time: more than one where training leaves threads free.
    pub samplers: usize,
    /// Batches whose rows are in memory at a time: being fetched, waiting, being trained on.
    pub prefetch_depth: usize,
    /// How many of them steps that nobody has waited for yet hold, even while the next is asked for.
    pub steps_in_flight: usize,
    /// What the strategy may hold in all, once it is granted: what its table says, and what is left for caches.
    pub strategy_bytes: u64,
    /// What rows that it caches for all batches may take of the device's own memory, once that is granted.
    pub device_cache_bytes: u64,
    /// Arrays of the dataset, by name, whose values of the batch's nodes or edges come with each batch: for a loader. Those of
    /// edges need the settings to carry edge ids.
    pub columns: Vec<String>,
    /// How strategies that work from disk share out what they have.
    pub out_of_core: OutOfCore,
}

/// The size of evaluation.
#[derive(Clone)]
pub struct EvaluationOutline {
    /// Seeds of the largest batch.
    pub largest_batch: u64,
    /// How neighbours are drawn.
    pub settings: Settings,
}

/// What strategies that work from disk may use, and sizes to take instead of those that follow from it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OutOfCore {
    /// Where traces and plans go.
    pub scratch: PathBuf,
    /// What they may take there.
    pub disk_bytes: u64,
    /// Whether the user said so.
    pub disk_bytes_explicit: bool,
    /// Batches that are sampled and planned together.
    pub superbatch: Option<u64>,
    /// Bytes for feature rows.
    pub feature_cache_bytes: Option<u64>,
    /// Bytes for neighbour lists.
    pub neighbour_cache_bytes: Option<u64>,
    /// Read feature rows in blocks of so many bytes at least.
    pub io_block_bytes: Option<u64>,
    /// Where packed rows are; inside the dataset where it is not said.
    pub prepared: Option<PathBuf>,
    /// Batches of a segment that shares a cache on disk.
    pub segment: Option<u32>,
    /// Bytes between two moments of safety while rows are packed, instead of the default: to be killed there by tests.
    pub safe_point_bytes: Option<u64>,
    /// One batch at a time, nothing ahead: to see what working ahead brings.
    pub sequential: bool,
}

impl JobOutline {
    /// The most that a batch can have.
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

    /// Numbers in a feature row.
    pub fn dim(&self) -> u64 {
        self.dataset.manifest().nodes.features.as_ref().map_or(0, |features| features.dim)
    }
}
