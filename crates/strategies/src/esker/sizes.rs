//! The memory budget of esker. It divides memory as diskgnn does, except for the cache: planning it takes turns with
//! sampling and packing, and while training it changes.

use crate::diskgnn::sizes::{
    BLOCK_BYTES, MissBound, Sizes, Training, lasting, least_packing, least_sampling, least_training,
    too_little,
};
use crate::{JobOutline, MemoryTable, Result, StrategyError};
use esker_fetch::packed::{Largest, RunCache, RunPlan, RunWriter};
use esker_types::{ByteCount, Dtype};

/// Batches of a run whose number of epochs is not known to be small.
const MANY_BATCHES: u64 = 1 << 20;

/// Memory of planning.
fn planning_bytes(job: &JobOutline, slots: u64, batches: u64, largest: u64, repeats: bool) -> u64 {
    let nodes = job.dataset.manifest().nodes.count;
    match job.dataset.manifest().id_dtype() {
        Dtype::U64 => RunWriter::memory_bytes::<u64>(nodes, slots, batches, largest, repeats),
        _ => RunWriter::memory_bytes::<u32>(nodes, slots, batches, largest, repeats),
    }
}

fn repeats(job: &JobOutline) -> bool {
    job.epochs_sampled.is_some_and(|epochs| epochs < job.epochs)
}

/// Memory beside cached rows, for the cache to change and to be restored.
fn beside_bytes(job: &JobOutline, slots: u64, nodes: u64, repeats: bool) -> u64 {
    RunCache::bytes_for(slots, nodes, job.dim(), repeats)
}

/// The smallest memory that esker needs, line by line. Before the first step, the memory of steps is free.
pub(super) fn memory(job: &JobOutline) -> MemoryTable {
    let mut table = lasting(job);
    let nodes = job.largest_bound().nodes;
    let epochs = job.epochs_sampled.unwrap_or(job.epochs).min(job.epochs);
    let evaluated = job.evaluation.as_ref().map_or(0, |evaluation| evaluation.batches);
    let batches = job.epoch_batches.saturating_add(evaluated).saturating_mul(epochs).min(MANY_BATCHES);
    let planning = planning_bytes(job, 0, batches, nodes, repeats(job));
    let (sampling, packing) = (least_sampling(job), least_packing(job));
    let training = least_training(job).saturating_add(beside_bytes(job, 0, nodes, repeats(job)));
    let turns = format!(
        "in turn: sampling {}, planning {}, packing {}, training {}",
        ByteCount(sampling),
        ByteCount(planning),
        ByteCount(packing),
        ByteCount(training)
    );
    let before = sampling.max(planning).max(packing).saturating_sub(job.room.step_bytes);
    table.add(turns, before.max(training));
    table
}

/// Slots of the cache for batches of at most this size. Nothing is known of what they will miss, and the first ones miss
/// everything.
pub(super) fn slots(
    sizes: &Sizes,
    job: &JobOutline,
    largest: &Largest,
    batches: u64,
    repeats: bool,
) -> Result<u64> {
    let (nodes, row_bytes) = (job.dataset.manifest().nodes.count, job.row_bytes().max(1));
    let fixed = beside_bytes(job, 0, largest.nodes, repeats);
    let training = Sizes { phase_bytes: sizes.phase_bytes.saturating_sub(fixed), ..sizes.clone() };
    let found = training.slots(job, largest, batches, MissBound::All)?;
    let explicit = job.out_of_core.feature_cache_bytes.is_some();
    // Each slot also takes part of a table.
    let more = |slots: u64| beside_bytes(job, slots, largest.nodes, repeats) - fixed;
    let found = match explicit {
        true => found,
        false => found.saturating_sub(more(found).div_ceil(row_bytes)),
    };
    let found = found.min(nodes);
    let (least, all) = (
        planning_bytes(job, 0, batches, largest.nodes, repeats),
        planning_bytes(job, found, batches, largest.nodes, repeats),
    );
    if all <= sizes.preparing_bytes {
        return Ok(found);
    }
    if explicit || least > sizes.preparing_bytes {
        return Err(too_little(job, all, sizes.preparing_bytes));
    }
    let slot_bytes = (all - least).div_ceil(found.max(1));
    Ok((sizes.preparing_bytes - least) / slot_bytes.max(1))
}

/// Workers and batches in memory for a planned run. Fails if they do not fit.
pub(super) fn training(sizes: &Sizes, job: &JobOutline, plan: &RunPlan) -> Result<Training> {
    let (slots, repeats) = (plan.layout.slots, plan.layout.laps.iter().any(|lap| lap.repeats));
    let cached = slots * plan.row_bytes + beside_bytes(job, slots, plan.largest.nodes, repeats);
    let blocks = plan.misses * plan.row_bytes / BLOCK_BYTES + plan.batches * 2;
    sizes.training_beside(job, cached, &plan.largest, blocks, plan.batches)
}

/// Whether an error means that the disk has no room for packed rows.
pub(super) fn is_disk_too_small(error: &StrategyError) -> bool {
    matches!(
        error,
        StrategyError::SamplesDisk { .. } | StrategyError::Fetch(esker_fetch::FetchError::Disk { .. })
    )
}
