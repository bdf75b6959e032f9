//! Where batches come from. A strategy reports the memory it needs, prepares its data, and then yields batches that are
//! ready to train on. Each strategy is one small file or folder. Strategies compose parts of `sample`, `plan` and
//! `fetch`, and have no loops over rows. All exact strategies yield the same batches and the same bytes.
//!
//! The contract: a [`Job`] describes what is requested. A [`Strategy`] makes a [`BatchSource`] from it. A [`Batch`] has
//! everything that a step needs, and a [`Feedback`] is what the step returns. Everything is generic over the training
//! [`Device`].
//!
//! # Writing a strategy
//!
//! Neighbours on disk: `neighbours.rs` caches them by `NeighbourPolicy`, and `NeighbourStore` gives samplers a topology.
//! Whoever samples without `Bulk` calls `Sampler::begin` before each batch; then the batch's group is in memory.
//!
//! A strategy without feedback implements a `PhaseSource` (next, counters), and `Phases` turns it into a run. `Stages`
//! wraps a pipeline and adds the columns that a loader requests (`columns.rs`). `sampling.rs` has the topology in
//! memory and its samplers. `direct.rs` reads everything from disk without a cache or a plan, for inference outside a
//! run. `ginex/gather.rs` shows how placements are carried out, and how one stream has the batches of all phases.
//!
//! Memory: `needs(outline)` also reports what steps exchange and what is on the device. It is called for several
//! numbers of samplers and batches in memory, and lists the largest sizes for these. Evaluation is listed separately if
//! training keeps its memory meanwhile. The granted memory is in `job.strategy_bytes`: that total, plus the
//! rest of the budget if `takes_the_rest`. A cache may use what exceeds the total. `largest_batch` is 0 for
//! inference-only jobs. A permit is taken in the stage that allocates rows, before it allocates.
//!
//! Rows in place: a stored row is never wider than its f32 row. So reads put it at the start of its own f32 row, and
//! the assembler widens it there (`Missed::InPlace`), without a second buffer. Reading does not depend on a cache and
//! may run ahead. `assemble_and_keep` runs in the order of batches. Values that own a queue to a disk (`RowReader`, a
//! sampler of `OnDisk`) are made on their stage's thread: `Pipeline::then_with`. Inference over all neighbours runs
//! layer by layer (`train/whole/`); a strategy gives it the input rows of any nodes, through `BatchSource::table`.
#![forbid(unsafe_code)]

mod batch;
mod columns;
mod direct;
mod diskgnn;
mod embeddings;
mod error;
mod esker;
mod ginex;
mod history;
mod input_table;
mod job;
mod marius;
mod memory;
mod mmap;
mod needs;
mod neighbours;
mod outline;
mod outre;
mod permits;
mod phases;
mod pilot;
mod position;
mod resident;
mod residents;
mod row_counters;
mod sampling;
mod source;
mod state;
mod table;
mod updates;

pub use batch::{
    Batch, BatchSource, Blocks, DeviceBlocks, Exchange, Feedback, FixedRows, HiddenTable, Input, LiveRows,
    LiveSource, LiveTable, NamedColumn, Pull, Push, Pushed, StagedBlocks, adjacency,
};
pub use embeddings::{EmbeddingUse, Embeddings, RowTraining};
pub use error::{Result, StrategyError};
pub use history::{
    DividedMemory, HistoryCounters, HistoryOutline, HistoryProfile, SavedWork, WorkCounts, choose_nodes,
    weighted_rows,
};
pub use input_table::{InputTable, ReadInputRows};
pub use job::{EvaluationSchedule, Inference, Job, LoadedTopology, PartitionedGraph};
pub use marius::{LearnedRows, strategy as marius};
pub use needs::{ExchangeNeeds, Grant, Needs, Others, RowsOfLayer, StrategyNeeds, grant};
pub use neighbours::{JobPartitioning, NeighbourPolicy};
pub use outline::{
    BatchRoom, BufferSizes, CachePolicy, EvaluationOutline, JobOutline, KnownSizes, OutOfCore,
};
pub use pilot::AfterPilot;
pub use position::{Phase, RunPosition};
pub use residents::{Residents, ResidentsOutline};
pub use state::{CheckpointReader, CheckpointSink, SavedState};
pub use table::{MemoryLine, MemoryTable};

use esker_device::Device;
use esker_fetch::pipeline::StageTimes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A way to bring batches to the trainer.
pub trait Strategy<D: Device>: Send {
    /// The memory it needs, before anything is allocated.
    fn needs(&self, job: &JobOutline) -> Result<Needs>;

    /// Opens and loads what training needs throughout, and does the work on disk that precedes training. That work can
    /// be resumed, and its result is used again while its inputs have not changed. Call it after the requested memory
    /// is granted.
    fn prepare(&mut self, job: &Job) -> Result<Prepared>;

    /// Batches from a position to the end of the run, with the state of an earlier process if there is any. Phases
    /// follow each other without a break.
    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>>;

    /// Batches over any seeds, outside the phases of the run: for predictions and blocks of all nodes. `state` is that
    /// of the model used for inference, if there is any.
    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>>;
}

/// The result of a strategy's work before training.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prepared {
    /// Number of distinct epochs, if later ones repeat them.
    pub epochs_sampled: Option<u64>,
    /// What was stored on disk, machine-readable.
    pub on_disk: Option<serde_json::Value>,
    /// How it divided the granted memory, as readable lines.
    pub notes: Vec<String>,
    /// What it takes of the memory for caches and is known now, line by line.
    pub caches: MemoryTable,
}

/// The strategies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StrategyKind {
    /// Everything in RAM: the reference.
    #[default]
    Memory,
    /// Topology in RAM, features through the page cache: the usual way without Esker.
    Mmap,
    /// Topology and features on disk, with an optimal cache over superbatches.
    Ginex,
    /// Batches sampled in advance, their rows packed on disk in access order.
    DiskGnn,
    /// Ginex with batches by groups of partitions and a history of hidden rows.
    Outre,
    /// Some node partitions in memory at a time, with their features, learned rows and the edges between them.
    Marius,
    /// An optimal cache over the whole run, and what it misses packed on disk in access order.
    Esker,
}

impl StrategyKind {
    /// All strategies.
    pub const ALL: [StrategyKind; 7] = [
        StrategyKind::Memory,
        StrategyKind::Mmap,
        StrategyKind::Ginex,
        StrategyKind::Outre,
        StrategyKind::DiskGnn,
        StrategyKind::Marius,
        StrategyKind::Esker,
    ];

    /// The memory it needs. It does not require a device.
    pub fn needs(self, job: &JobOutline) -> Result<Needs> {
        match self {
            StrategyKind::Memory => memory::needs(job),
            StrategyKind::Mmap => mmap::needs(job),
            StrategyKind::Ginex => ginex::needs(job),
            StrategyKind::DiskGnn => diskgnn::needs(job),
            StrategyKind::Outre => outre::needs(job),
            StrategyKind::Marius => marius::needs(job),
            StrategyKind::Esker => esker::needs(job),
        }
    }

    /// The strategy for a device.
    pub fn build<D: Device>(self, device: D) -> Box<dyn Strategy<D>> {
        match self {
            StrategyKind::Memory => Box::new(memory::strategy(device)),
            StrategyKind::Mmap => Box::new(mmap::strategy(device)),
            StrategyKind::Ginex => Box::new(ginex::strategy(device)),
            StrategyKind::DiskGnn => Box::new(diskgnn::strategy(device)),
            StrategyKind::Outre => Box::new(outre::strategy(device)),
            StrategyKind::Marius => Box::new(marius::strategy(device, None)),
            StrategyKind::Esker => Box::new(esker::strategy(device)),
        }
    }

    /// Whether it can repeat the batches of some epochs in later ones.
    pub fn repeats_epochs(self) -> bool {
        !matches!(self, StrategyKind::Ginex | StrategyKind::Outre | StrategyKind::Marius)
    }

    /// Whether the whole topology is in memory.
    pub fn holds_topology(self) -> bool {
        matches!(self, StrategyKind::Memory | StrategyKind::Mmap)
    }

    /// Whether it can train with a history of hidden rows.
    pub fn keeps_history(self) -> bool {
        matches!(self, StrategyKind::Memory | StrategyKind::Mmap | StrategyKind::Outre)
    }

    /// Whether its files are next to the dataset, or in the directory of `--prepared`. Otherwise they are with the run.
    pub fn keeps_beside_dataset(self) -> bool {
        matches!(self, StrategyKind::DiskGnn | StrategyKind::Esker)
    }
}

impl fmt::Display for StrategyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StrategyKind::Memory => "memory",
            StrategyKind::Mmap => "mmap",
            StrategyKind::Ginex => "ginex",
            StrategyKind::DiskGnn => "diskgnn",
            StrategyKind::Outre => "outre",
            StrategyKind::Marius => "marius",
            StrategyKind::Esker => "esker",
        })
    }
}

impl FromStr for StrategyKind {
    type Err = String;
    fn from_str(word: &str) -> Result<StrategyKind, String> {
        let found = StrategyKind::ALL.into_iter().find(|kind| kind.to_string() == word);
        found.ok_or_else(|| {
            let names = StrategyKind::ALL.map(|kind| kind.to_string()).join(", ");
            format!("`{word}` is not a strategy; there are {names}")
        })
    }
}

/// Counters of a source of batches so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceCounters {
    /// Its stages, first to last.
    pub stages: Vec<StageTimes>,
    /// Feature rows yielded.
    pub rows: u64,
    /// Bytes of those rows as stored: what batches need.
    pub bytes_useful: u64,
    /// Bytes read from disk for them. For the page cache, it is the kernel's count.
    pub bytes_read: u64,
    /// Bytes of learned rows written to disk.
    #[serde(default)]
    pub bytes_written: u64,
    /// Disk reads, if we issue them.
    pub reads: u64,
    /// Bytes read from disk for samples and placements that were made before.
    pub sample_bytes_read: u64,
    /// Rows found in each tier.
    pub hits: Vec<(String, u64)>,
    /// Seconds with at least one of those reads in flight.
    pub read_seconds: f64,
    /// Seconds of each phase, if phases take turns.
    pub phases: Vec<(String, f64)>,
    /// Nodes whose neighbours were sampled, if not all adjacency is in memory.
    #[serde(alias = "lists")]
    pub neighbour_requests: u64,
    /// Nodes whose neighbours were in a cache.
    #[serde(alias = "lists_cached")]
    pub neighbour_hits: u64,
    /// Those of them whose neighbours were in memory with the batch's group of partitions.
    #[serde(default)]
    pub neighbour_group_hits: u64,
    /// Disk reads for the other nodes, and of groups.
    pub neighbour_reads: u64,
    /// Bytes read from disk for them.
    pub neighbour_bytes_read: u64,
    /// Those of them that are the neighbours of groups.
    #[serde(default)]
    pub neighbour_group_bytes_read: u64,
    /// Feature rows of sampled evaluations. All the other counters of rows are of training.
    #[serde(default)]
    pub evaluation: EvaluationCounters,
    /// What a history of hidden rows was used for, if there is one.
    #[serde(default)]
    pub history: Option<HistoryCounters>,
}

/// Counters of the feature rows of sampled evaluations so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationCounters {
    /// Rows that batches needed.
    pub rows: u64,
    /// Those found in a cache.
    pub hits: u64,
    /// Bytes of the rows as stored.
    pub bytes_useful: u64,
    /// Bytes read from disk for them, if we read them.
    pub bytes_read: u64,
    /// Disk reads, if we issue them.
    pub reads: u64,
    /// Seconds with at least one of those reads in flight.
    pub read_seconds: f64,
}

impl std::ops::AddAssign for EvaluationCounters {
    fn add_assign(&mut self, other: EvaluationCounters) {
        self.rows += other.rows;
        self.hits += other.hits;
        self.bytes_useful += other.bytes_useful;
        self.bytes_read += other.bytes_read;
        self.reads += other.reads;
        self.read_seconds += other.read_seconds;
    }
}
