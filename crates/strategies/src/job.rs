//! What is to be trained on, as every strategy is told it.

use esker_sample::trace::TraceHeader;
use esker_sample::{Batches, Bound, Direction, Position, Settings};
use esker_store::Dataset;
use esker_types::{Progress, StopSignal};
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
    /// Epochs whose batches differ, where that is said; later ones repeat them.
    pub epochs_sampled: Option<u64>,
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
    /// Where work before training reports how far it is.
    pub progress: Arc<dyn Progress + Send + Sync>,
    /// Asked by whoever wants the run to end: work before training and sampling ahead end soon, with nothing lost.
    pub stop: StopSignal,
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
    /// Whether the user said so.
    pub disk_bytes_said: bool,
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
    /// One batch at a time, nothing ahead: to see what working ahead brings.
    pub sequential: bool,
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

    /// What a trace of its batches says of itself.
    pub(crate) fn trace_header(&self) -> TraceHeader {
        let manifest = self.dataset.manifest();
        TraceHeader {
            dataset: manifest.id.clone(),
            nodes: manifest.nodes.count,
            edges: manifest.edges.count,
            relations: manifest.edges.relations.as_ref().map_or(0, |relations| relations.count),
            direction: self.direction,
            batches: self.batches.identity(),
            settings: self.settings.clone(),
        }
    }

    /// Where the batch at a position is drawn: further epochs repeat those that are sampled.
    pub fn drawn_at(&self, at: Position) -> Position {
        Position { epoch: self.epochs_sampled.map_or(at.epoch, |epochs| at.epoch % epochs.max(1)), ..at }
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
