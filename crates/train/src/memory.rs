//! What a run will hold, added up before anything is allocated. Batches are held ahead of the trainer as far as the budget
//! goes; a budget that does not even suffice for one at a time is refused, with what would.

use crate::task::{LabelKind, Task};
use crate::{CpuRows, EvaluationMode, Result, RunConfig, TrainError, metrics, whole};
use esker_nn::{StepShape, memory_bytes};
use esker_sample::{Fanout, Form, Settings};
use esker_strategies::{Job, MemoryTable, RowMaker, Strategy};
use esker_types::ByteCount;
use std::sync::Arc;

/// Code, stacks, and what the allocator and the reading engine hold beside what is counted.
const PROGRAM_BYTES: u64 = 24 << 20;
/// What each thread that computes has for itself.
const THREAD_BYTES: u64 = 3 << 20;
/// Batches held at a time when memory allows: being fetched, waiting, being trained on.
const MOST_HELD: usize = 3;

/// Where a strategy takes all that is left, inference over the whole graph gets one in so many parts of it.
const WHOLE_PART: u64 = 4;

/// What memory is needed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Training, and the evaluation that goes with it.
    Train,
    /// Evaluation or prediction alone.
    Infer,
}

/// How a budget is used.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What takes how much.
    pub table: MemoryTable,
    /// Batches whose rows are held at a time.
    pub batches_held: usize,
    /// What inference over the whole graph may take.
    pub whole_bytes: u64,
    /// The smallest budget that would do.
    pub smallest_bytes: u64,
    /// What the strategy may hold in all.
    pub strategy_bytes: u64,
}

impl Plan {
    /// Finds out how the run fits its budget.
    pub fn new(config: &RunConfig, job: &Job, outputs: usize, purpose: Purpose) -> Result<Plan> {
        let table = |job: &Job| table(config, job, outputs, purpose);
        let smallest = table(&Job { batches_held: 1, ..job.clone() })?;
        let smallest_bytes = smallest.total();
        for held in (1..=MOST_HELD).rev() {
            let job = Job { batches_held: held, ..job.clone() };
            let mut table = table(&job)?;
            let total = table.total();
            if total <= config.memory {
                let strategy = strategy_for(config);
                let (whole, spare) = (whole_least(config, &job, outputs)?, config.memory - total);
                let mut strategy_bytes = strategy.memory(&job)?.total();
                let mut whole_bytes = whole + spare;
                if purpose == Purpose::Train && strategy.takes_the_rest() {
                    // Inference over the whole graph comes between epochs, while the strategy keeps what it has.
                    whole_bytes = if whole > 0 { whole + spare / WHOLE_PART } else { 0 };
                    let caches = spare - whole_bytes.saturating_sub(whole);
                    strategy_bytes += caches;
                    table.add("caches, and batches ahead", caches);
                }
                return Ok(Plan { table, batches_held: held, whole_bytes, smallest_bytes, strategy_bytes });
            }
        }
        let (needed, allowed) = (ByteCount(smallest_bytes), ByteCount(config.memory));
        Err(TrainError::Memory { needed, allowed, table: smallest })
    }
}

/// The strategy, to be asked what it needs: it makes no rows for that.
fn strategy_for(config: &RunConfig) -> Box<dyn Strategy<CpuRows>> {
    let no_rows: RowMaker<CpuRows> =
        Arc::new(|_, _| unreachable!("nothing is made while memory is added up"));
    config.strategy.build(no_rows)
}

fn table(config: &RunConfig, job: &Job, outputs: usize, purpose: Purpose) -> Result<MemoryTable> {
    let mut table = MemoryTable::default();
    table.add("program", PROGRAM_BYTES + config.threads as u64 * 2 * THREAD_BYTES);
    table.add("splits and labels", Task::bytes_for(&job.dataset));
    table.extend(strategy_for(config).memory(job)?);
    let inputs = job.dim() as usize;
    let shape = step_shape(config, job, &job.settings, job.largest_batch);
    let model = memory_bytes(&config.model, &config.optimizer, inputs, outputs, &shape)?;
    table.add("model and gradients", model.model);
    table.add("optimizer", model.optimizer);
    if purpose == Purpose::Train {
        // The rows of the batch are the strategy's already; a checkpoint holds a copy of all numbers, and their bytes.
        let rows = shape.rows[0] as u64 * inputs as u64 * 4;
        table.add("training step", model.step.saturating_sub(rows));
        table.add("checkpoint", 2 * (model.model / 2 + model.optimizer));
    }
    let splits = job.dataset.manifest().splits.as_ref();
    let judged = splits.map_or(0, |splits| match purpose {
        Purpose::Train => splits.valid.max(splits.test),
        Purpose::Infer => splits.valid.max(splits.test).max(splits.train),
    });
    let kind = job.dataset.manifest().nodes.labels.as_ref().map_or(LabelKind::Real, |labels| labels.kind);
    let scores = metrics::tally_bytes(kind, outputs, judged);
    if scores > 0 && [config.eval, config.final_eval].iter().any(|mode| *mode != EvaluationMode::None) {
        table.add("evaluation: scores", scores);
    }
    if let Some(evaluation) = &job.evaluation {
        let shape = step_shape(config, job, &evaluation.settings, evaluation.largest_batch);
        let model = memory_bytes(&config.model, &config.optimizer, inputs, outputs, &shape)?;
        let rows = shape.rows[0] as u64 * inputs as u64 * 4;
        table.add("evaluation: inference", model.inference.saturating_sub(rows));
    }
    let whole = whole_least(config, job, outputs)?;
    if whole > 0 {
        table.add("evaluation: all neighbours of a node", whole);
    }
    Ok(table)
}

/// What inference over the whole graph cannot do without.
fn whole_least(config: &RunConfig, job: &Job, outputs: usize) -> Result<u64> {
    if config.eval != EvaluationMode::Full && config.final_eval != EvaluationMode::Full {
        return Ok(0);
    }
    whole::block_bytes(config, job, outputs, whole::least_rows(config, job)?)
}

/// The largest batch, layer by layer.
fn step_shape(config: &RunConfig, job: &Job, settings: &Settings, batch: u64) -> StepShape {
    let layers = config.model.layers;
    let bound = |hops: usize| {
        let part = Settings { fanouts: settings.fanouts[..hops].to_vec(), ..settings.clone() };
        job.bound(&part, batch)
    };
    let hops = settings.fanouts.len();
    let whole = bound(hops);
    // Layer l reads what lies within L - l hops; ShaDow's layers, and those without neighbours, all read everything.
    let shadow = settings.form == Form::Shadow;
    let rows = (0..=layers).map(|layer| match hops {
        0 => whole.nodes as usize,
        _ if shadow => whole.nodes as usize,
        _ => bound(hops - layer).nodes as usize,
    });
    let edges = (0..layers).map(|layer| match hops {
        0 => 0,
        _ if shadow => whole.edges as usize,
        // The layered form draws a layer's lists at one depth.
        _ if settings.form == Form::Layered => {
            let nodes = bound(hops - layer - 1).nodes;
            let entries = job.dataset.manifest().edges.count * 2;
            match settings.fanouts[hops - layer - 1] {
                Fanout::AtMost(most) => nodes.saturating_mul(most as u64).min(entries) as usize,
                Fanout::All => entries as usize,
            }
        }
        _ => bound(hops - layer).edges as usize,
    });
    StepShape {
        rows: rows.collect(),
        edges: edges.collect(),
        seeds: batch as usize,
        degrees: settings.carry.degrees,
        input_gradient: false,
        threads: config.threads,
    }
}
