//! Where batches come from. A strategy says what memory it needs, prepares what it must, and then yields batches that
//! are ready to train on: a sample and the rows of its nodes. One small file each; they compose parts of `sample`, `plan`
//! and `fetch`, and hold no loop over rows. All exact strategies yield the same batches and the same bytes.
#![forbid(unsafe_code)]

mod batch;
mod direct;
mod diskgnn;
mod error;
mod ginex;
mod held;
mod job;
mod lists;
mod memory;
mod mmap;
mod resident;
mod table;

pub use batch::{Batch, BatchSource, RowBuffer, RowMaker};
pub use error::{Result, StrategyError};
pub use held::{FreshRows, HeldRows, Hold, RowHolder};
pub use job::{Evaluation, Job, OutOfCore};
pub use table::{MemoryLine, MemoryTable};

use esker_fetch::pipeline::StageTimes;
use esker_sample::Position;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A way to bring batches to the trainer.
pub trait Strategy<R: RowBuffer>: Send {
    /// What it will hold, line by line, before anything is allocated: itself, its batches, and those of evaluation.
    fn memory(&self, job: &Job) -> Result<MemoryTable>;

    /// Opens and reads what training needs all the time, and does work on disk that comes before training. To be called
    /// once the memory it asked for is granted.
    fn prepare(&mut self, job: &Job) -> Result<()>;

    /// Batches from a position to the end of the run. Epochs follow each other without a break.
    fn batches(&mut self, job: &Job, from: Position) -> Result<Box<dyn BatchSource<R>>>;

    /// Batches over other seeds (validation, test).
    fn evaluation(&mut self, job: &Job, over: &Evaluation) -> Result<Box<dyn BatchSource<R>>>;

    /// Whether it makes use of memory beyond what its table says: of all that is left.
    fn takes_the_rest(&self) -> bool {
        false
    }

    /// Epochs whose batches differ, where later ones repeat them; once it is prepared.
    fn epochs_sampled(&self) -> Option<u64> {
        None
    }

    /// What its work before training left on disk, for machines to read; once it is prepared.
    fn prepared(&self) -> Option<serde_json::Value> {
        None
    }

    /// Whether it holds rows through a [`RowHolder`] where the processor has memory of its own: what is left there is kept for them.
    fn holds_rows(&self) -> bool {
        false
    }

    /// How it shared out what it was granted, in lines for a person; once it is prepared.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Writes the rows of nodes to `values`: what inference over the whole graph reads, block by block.
    fn rows(&mut self, nodes: &[esker_types::NodeId], values: &mut [f32]) -> Result<()>;
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
    /// Batches sampled ahead, their rows packed on disk as they will be wanted.
    DiskGnn,
}

impl StrategyKind {
    /// All of them.
    pub const ALL: [StrategyKind; 4] =
        [StrategyKind::Memory, StrategyKind::Mmap, StrategyKind::Ginex, StrategyKind::DiskGnn];

    /// The strategy. Rows of batches are made by `rows`; those that it keeps for the whole run may be held by `holder`.
    pub fn build<R: RowBuffer>(
        self,
        rows: RowMaker<R>,
        holder: Option<Arc<dyn RowHolder<R>>>,
    ) -> Box<dyn Strategy<R>> {
        match self {
            StrategyKind::Memory => Box::new(memory::strategy(rows)),
            StrategyKind::Mmap => Box::new(mmap::strategy(rows)),
            StrategyKind::Ginex => Box::new(ginex::strategy(rows)),
            StrategyKind::DiskGnn => Box::new(diskgnn::strategy(rows, holder)),
        }
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
            format!("`{word}` is no strategy; there are {names}")
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
    /// Neighbour lists that were sampled from, where they are not all in memory.
    pub lists: u64,
    /// Those found in a cache.
    pub lists_cached: u64,
    /// Reads from the disk for the others.
    pub list_reads: u64,
    /// Bytes that came from the disk for them.
    pub list_bytes_read: u64,
}
