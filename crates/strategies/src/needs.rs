//! What a strategy needs, and how a budget is divided. This is known before anything is allocated, and without a model,
//! because a loader has none.

use crate::{JobOutline, MemoryTable, Result, StrategyError, columns};

/// The memory that a strategy needs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Needs {
    /// Host memory, line by line: of the strategy, its batches and those of evaluation.
    pub host: MemoryTable,
    /// The most that its files may take on disk, within the disk budget; 0 if it writes none.
    pub disk_bytes: u64,
    /// Whether it keeps the whole topology in memory.
    pub topology_in_memory: bool,
    /// Whether it samples before training, and then needs the topology no more.
    pub samples_beforehand: bool,
    /// Whether it can use all the memory that is left beyond that.
    pub takes_the_rest: bool,
    /// Whether it caches rows in device memory, if the device has any. The device memory that is left is reserved for
    /// them.
    pub caches_on_device: bool,
    /// Memory of the training device: tables that training changes.
    pub device: MemoryTable,
    /// Whether training changes the rows that the first layer reads. If so, inference over the whole graph reads them
    /// from [`BatchSource::table`](crate::BatchSource::table).
    pub trains_rows: bool,
    /// What its steps exchange. The trainer makes room for it.
    pub exchange: ExchangeNeeds,
}

/// The most that steps exchange with their source, see [`Exchange`](crate::Exchange).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExchangeNeeds {
    /// Rows that are pulled, at most one entry per layer.
    pub pulls: Vec<RowsOfLayer>,
    /// Rows that are pushed.
    pub pushes: Vec<RowsOfLayer>,
    /// Whether the gradient of the input is returned.
    pub input_gradient: bool,
}

/// Rows that a layer reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsOfLayer {
    /// The layer.
    pub layer: usize,
    /// Maximum number of rows.
    pub rows: u64,
}

/// Computes what a strategy needs for a job.
pub type StrategyNeeds<'a> = &'a dyn Fn(&JobOutline) -> Result<Needs>;

/// How a budget is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Everything that takes memory.
    pub table: MemoryTable,
    /// Batches whose rows are in memory at a time.
    pub prefetch_depth: usize,
    /// Batches that are sampled at a time.
    pub samplers: usize,
    /// Memory of the strategy, without its share of what is left.
    pub least_strategy_bytes: u64,
    /// Bytes left.
    pub spare: u64,
    /// Whether the strategy uses what is left.
    pub takes_the_rest: bool,
}

/// Batches in memory at a time if memory allows: being fetched, waiting, being trained on. Batches of steps in flight
/// are added to this.
const MOST_DEPTH: usize = 3;

/// Memory apart from the strategy's, for a job with this outline.
pub type Others<'a, E> = &'a dyn Fn(&JobOutline) -> Result<MemoryTable, E>;

/// Divides `allowed` bytes: the most samplers and batches in memory that fit. If that is too little, the error is the
/// table of the smallest configuration.
pub fn grant<E: From<StrategyError>>(
    strategy: StrategyNeeds<'_>,
    outline: &JobOutline,
    allowed: u64,
    others: Others<'_, E>,
) -> Result<Result<Grant, MemoryTable>, E> {
    let table = |depth: usize, samplers: usize| -> Result<(MemoryTable, Needs, usize), E> {
        let prefetch_depth = depth + outline.steps_in_flight;
        let outline = JobOutline { prefetch_depth, samplers, ..outline.clone() };
        let (needs, mut table) = (strategy(&outline)?, others(&outline)?);
        columns::add_memory(&outline, &mut table)?;
        table.extend(needs.host.clone());
        Ok((table, needs, prefetch_depth))
    };
    // Reduces samplers first, then batches in memory.
    let samplers = (1..=outline.samplers).rev().map(|samplers| (MOST_DEPTH, samplers));
    for (depth, samplers) in samplers.chain((1..MOST_DEPTH).rev().map(|depth| (depth, 1))) {
        let (table, needs, prefetch_depth) = table(depth, samplers)?;
        if let Some(spare) = allowed.checked_sub(table.total()) {
            let least_strategy_bytes = needs.host.total();
            let takes_the_rest = needs.takes_the_rest;
            return Ok(Ok(Grant {
                table,
                prefetch_depth,
                samplers,
                least_strategy_bytes,
                spare,
                takes_the_rest,
            }));
        }
    }
    Ok(Err(table(1, 1)?.0))
}
