//! What a strategy needs, and how a budget is shared out: before anything is allocated, and without a model, because a loader
//! has none.

use crate::{JobOutline, MemoryTable, Result, StrategyError, columns};

/// What a strategy needs of memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Needs {
    /// What it will hold of the host's memory, line by line: itself, its batches, and those of evaluation.
    pub host: MemoryTable,
    /// Whether it makes use of memory beyond that: of all that is left.
    pub takes_the_rest: bool,
    /// Whether it caches rows in a device's own memory, where a device has any: what is left there is kept for them.
    pub caches_on_device: bool,
    /// What it will hold in the memory of the device that trains: tables that training changes.
    pub device: MemoryTable,
    /// Whether training changes the rows that the first layer reads. Inference over the whole graph then reads them from
    /// [`BatchSource::table`](crate::BatchSource::table).
    pub trains_rows: bool,
    /// What its steps exchange: whoever runs them makes room for it.
    pub exchange: ExchangeNeeds,
}

/// What steps exchange with their source at most, as batches say it in [`Exchange`](crate::Exchange).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExchangeNeeds {
    /// Rows that are pulled.
    pub pull: Option<RowsOfLayer>,
    /// Rows that are pushed.
    pub push: Option<RowsOfLayer>,
    /// Whether the gradient of the input flows back.
    pub input_gradient: bool,
}

/// Rows that a layer reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsOfLayer {
    /// The layer.
    pub layer: usize,
    /// So many at most.
    pub rows: u64,
}

/// Says what a strategy needs for a job.
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
    /// What the strategy may hold, before it is given any of what is left.
    pub least_strategy_bytes: u64,
    /// What is left.
    pub spare: u64,
    /// Whether the strategy makes use of it.
    pub takes_the_rest: bool,
}

/// Batches in memory at a time when memory allows: being fetched, waiting, being trained on. Those of steps that nobody has
/// waited for yet come on top.
const MOST_DEPTH: usize = 3;

/// What takes memory beside the strategy, for a job of this outline.
pub type Others<'a, E> = &'a dyn Fn(&JobOutline) -> Result<MemoryTable, E>;

/// Shares `allowed` bytes out: the most samplers and batches in memory that fit. What is too little comes back as the table of the
/// least that would do.
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
    // Samplers go first, then batches in memory.
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
