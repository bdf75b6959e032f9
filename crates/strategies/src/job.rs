//! What is to be trained on, as every strategy is told it.

use esker_sample::{Batches, Bound, Direction, Settings};
use esker_store::Dataset;
use std::path::PathBuf;
use std::sync::Arc;

/// What to yield batches of.
#[derive(Clone)]
pub struct Job {
    /// The graph.
    pub dataset: Arc<Dataset>,
    /// Which seeds each batch has, and in which order batches come.
    pub batches: Arc<dyn Batches>,
    /// Seeds of the largest batch.
    pub largest_batch: u64,
    /// Epochs of the run.
    pub epochs: u64,
    /// How neighbours are drawn.
    pub settings: Settings,
    /// Along which edges.
    pub direction: Direction,
    /// Batches of evaluation, where there is sampled evaluation.
    pub evaluation: Option<Evaluation>,
    /// Threads that fetch rows.
    pub threads: usize,
    /// Batches that are sampled at a time: more than one where training leaves threads free.
    pub samplers: usize,
    /// Batches whose rows are held at a time: being fetched, waiting, being trained on.
    pub batches_held: usize,
    /// How many of them steps that nobody has waited for yet hold, even while the next is asked for.
    pub steps_ahead: usize,
    /// What the strategy may hold in all, once it is granted: what its table says, and what is left for caches.
    pub strategy_bytes: u64,
    /// How strategies that work from disk share out what they have.
    pub out_of_core: OutOfCore,
}

/// What strategies that work from disk may use, and sizes to take instead of those that follow from it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OutOfCore {
    /// Where traces and plans go.
    pub scratch: PathBuf,
    /// What they may take there.
    pub disk_bytes: u64,
    /// Batches that are sampled and planned together.
    pub superbatch: Option<u64>,
    /// Bytes for feature rows.
    pub feature_cache_bytes: Option<u64>,
    /// Bytes for neighbour lists.
    pub neighbour_cache_bytes: Option<u64>,
}

/// Batches over other seeds than those trained on.
#[derive(Clone)]
pub struct Evaluation {
    /// Which seeds.
    pub batches: Arc<dyn Batches>,
    /// Seeds of the largest batch.
    pub largest_batch: u64,
    /// How neighbours are drawn.
    pub settings: Settings,
    /// Whether feature rows are wanted; else batches come without.
    pub rows: bool,
    /// What sampling may hold, where it is known better than from the fan-outs.
    pub sampling_bytes: Option<u64>,
}

impl Job {
    /// The most that a batch can have.
    pub fn bound(&self, settings: &Settings, batch: u64) -> Bound {
        let manifest = self.dataset.manifest();
        let lists = if self.direction == Direction::Both { 2 } else { 1 };
        Bound::new(settings, batch, manifest.nodes.count, manifest.edges.count * lists, 1)
    }

    /// Numbers in a feature row.
    pub fn dim(&self) -> u64 {
        self.dataset.manifest().nodes.features.as_ref().map_or(0, |features| features.dim)
    }
}
