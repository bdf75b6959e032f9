//! Where batches come from. A strategy says what memory it needs, prepares what it must, and then yields batches that
//! are ready to train on. One small file or folder each; they compose parts of `sample`, `plan` and `fetch`, and hold no loop
//! over rows. All exact strategies yield the same batches and the same bytes.
//!
//! The contract: a [`Job`] says what is requested; a [`Strategy`] makes a [`BatchSource`] of it; a [`Batch`] says everything
//! that a step needs, and a [`Feedback`] is what flows back from it. Everything is generic over the
//! [`Device`] that trains.
//!
//! # Writing a strategy
//!
//! A strategy that has no feedback implements a `PhaseSource` (next, counters) and lets `Phases` make the run of it; `Stages` is the shell around
//! a pipeline, and adds the columns that a loader asks for (`columns.rs`). `sampling.rs` has the topology in memory and its samplers, `direct.rs` everything on disk without a cache (evaluation of the
//! strategies that work from disk), `ginex/source.rs` shows placements carried out.
//!
//! Memory: `needs(outline)` also says what steps exchange and what lives on the device. It is asked for several numbers of samplers and batches in memory, and lists the most that these hold, evaluation apart, because
//! training keeps its memory meanwhile. What is granted stands in `job.strategy_bytes`: that total, and the rest where `takes_the_rest`; a cache may take
//! what exceeds the total. `largest_batch` is 0 for whoever only infers. A permit is taken in the stage that allocates rows, before it does.
//!
//! Rows in place: A stored row is never wider than its f32 row, so reads put it in the front of its own place and the assembler widens it there
//! (`Missed::InPlace`): no second buffer. Reading needs nothing of a cache and may run ahead; `assemble_and_keep` runs in the order of batches. What owns a
//! queue to a disk (`RowReader`, a sampler of `OnDisk`) is made on its stage's thread: `Pipeline::then_with`. Inference over all neighbours goes layer by layer, block by block (`train/whole/`), through `Strategy::inference`.
#![forbid(unsafe_code)]

mod batch;
mod columns;
mod direct;
mod diskgnn;
mod error;
mod ginex;
mod input_table;
mod job;
mod memory;
mod mmap;
mod needs;
mod neighbours;
mod outline;
mod phases;
mod position;
mod resident;
mod sampling;
mod source;
mod state;
mod table;

pub use batch::{
    Batch, BatchSource, Blocks, DeviceBlocks, Exchange, Feedback, FixedRows, Input, LiveRows, LiveTable,
    NamedColumn, Pull, Push, Pushed,
};
pub use error::{Result, StrategyError};
pub use input_table::InputTable;
pub use job::{EvaluationSchedule, Inference, Job};
pub use needs::{ExchangeNeeds, Grant, Needs, Others, RowsOfLayer, StrategyNeeds, grant};
pub use outline::{EvaluationOutline, JobOutline, OutOfCore};
pub use position::{Phase, RunPosition};
pub use state::{CheckpointReader, CheckpointSink, SavedState};
pub use table::{MemoryLine, MemoryTable};

use esker_device::Device;
use esker_fetch::pipeline::StageTimes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A way to bring batches to whoever trains.
pub trait Strategy<D: Device>: Send {
    /// What it needs of memory, before anything is allocated.
    fn needs(&self, job: &JobOutline) -> Result<Needs>;

    /// Opens and reads what training needs all the time, and does work on disk that comes before training: resumable, and used
    /// again while its inputs have not changed. To be called once the memory it asked for is granted.
    fn prepare(&mut self, job: &Job) -> Result<Prepared>;

    /// Batches from a position to the end of the run, with the state of an earlier process where there is any. Phases follow each
    /// other without a break.
    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>>;

    /// Batches over any seeds, outside of the run's phases: predictions, blocks of all nodes. `state` is that of the model that
    /// infers, where there is any.
    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>>;
}

/// What a strategy's work before training came to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prepared {
    /// Epochs whose batches differ, where later ones repeat them.
    pub epochs_sampled: Option<u64>,
    /// What was left on disk, for machines to read.
    pub on_disk: Option<serde_json::Value>,
    /// How it shared out what it was granted, in lines for a person.
    pub notes: Vec<String>,
}

/// The strategies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StrategyKind {
    /// Everything in RAM: the reference.
    #[default]
    Memory,
    /// Topology in RAM, features through the page cache: what people do without Esker.
    Mmap,
    /// Topology and features on disk, an optimal cache over superbatches.
    Ginex,
    /// Batches sampled ahead, their rows packed on disk as they will be requested.
    DiskGnn,
}

impl StrategyKind {
    /// All of them.
    pub const ALL: [StrategyKind; 4] =
        [StrategyKind::Memory, StrategyKind::Mmap, StrategyKind::Ginex, StrategyKind::DiskGnn];

    /// What it needs of memory; no device is needed to know.
    pub fn needs(self, job: &JobOutline) -> Result<Needs> {
        match self {
            StrategyKind::Memory => memory::needs(job),
            StrategyKind::Mmap => mmap::needs(job),
            StrategyKind::Ginex => ginex::needs(job),
            StrategyKind::DiskGnn => diskgnn::needs(job),
        }
    }

    /// The strategy for a device.
    pub fn build<D: Device>(self, device: D) -> Box<dyn Strategy<D>> {
        match self {
            StrategyKind::Memory => Box::new(memory::strategy(device)),
            StrategyKind::Mmap => Box::new(mmap::strategy(device)),
            StrategyKind::Ginex => Box::new(ginex::strategy(device)),
            StrategyKind::DiskGnn => Box::new(diskgnn::strategy(device)),
        }
    }

    /// What sampling a block of inference, of so many rows and as many neighbours, takes beside its sampler and samples.
    pub fn workspace_bytes(self, job: &JobOutline, rows: u64) -> u64 {
        match self {
            StrategyKind::Memory | StrategyKind::Mmap => 0,
            StrategyKind::Ginex | StrategyKind::DiskGnn => direct::workspace_bytes(job, rows, rows),
        }
    }

    /// Whether it can repeat the batches of some epochs in later ones.
    pub fn repeats_epochs(self) -> bool {
        self != StrategyKind::Ginex
    }

    /// Whether what it keeps on disk lies beside the dataset, or where `--prepared` says; else with the run.
    pub fn keeps_beside_dataset(self) -> bool {
        self == StrategyKind::DiskGnn
    }
}

impl fmt::Display for StrategyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StrategyKind::Memory => "memory",
            StrategyKind::Mmap => "mmap",
            StrategyKind::Ginex => "ginex",
            StrategyKind::DiskGnn => "diskgnn",
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

/// What a source of batches counted so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceCounters {
    /// Its stages, first to last.
    pub stages: Vec<StageTimes>,
    /// Rows handed over.
    pub rows: u64,
    /// Bytes of those rows as stored: what a batch needs.
    pub bytes_useful: u64,
    /// Bytes that came from the disk for them, by the kernel's count where the page cache reads.
    pub bytes_read: u64,
    /// Reads from the disk, where we issue them.
    pub reads: u64,
    /// Share of rows found in each tier.
    pub hits: Vec<(String, u64)>,
    /// Seconds with at least one of those reads on its way.
    pub read_seconds: f64,
    /// Seconds of each phase, where phases take turns.
    pub phases: Vec<(String, f64)>,
    /// Nodes whose neighbours were sampled, where those are not all in memory.
    #[serde(alias = "lists")]
    pub neighbour_requests: u64,
    /// Those whose neighbours were found in a cache.
    #[serde(alias = "lists_cached")]
    pub neighbour_hits: u64,
    /// Reads from the disk for the others.
    pub neighbour_reads: u64,
    /// Bytes that came from the disk for them.
    pub neighbour_bytes_read: u64,
}
