//! What a run will hold, added up before anything is allocated. Batches are held ahead of the trainer as far as the budget
//! goes; a budget that does not even suffice for one at a time is refused, with what would. A processor with memory of its
//! own has a budget of its own: the model, its steps and its inference count there, and rows on their way to it here.

use crate::task::{LabelKind, Task};
use crate::{EvaluationMode, Result, RunConfig, TrainError, metrics, whole};
use esker_nn::{Backend, MemoryOf, StepShape, memory_bytes};
use esker_sample::{Fanout, Form, Settings};
use esker_strategies::{Job, MemoryTable, RowMaker, Strategy};
use esker_types::ByteCount;
use std::sync::Arc;

/// Code, stacks, and what the allocator and the reading engine hold beside what is counted.
const PROGRAM_BYTES: u64 = 24 << 20;
/// What each thread that computes has for itself.
const THREAD_BYTES: u64 = 3 << 20;
/// Batches held at a time when memory allows: being fetched, waiting, being trained on. Those of steps that nobody has waited for
/// yet come on top.
const MOST_HELD: usize = 3;
/// Batches whose rows lie in a processor's own memory beside those of steps ahead: being trained on, landing.
const LANDED: usize = 2;

/// What products take on a processor of their own, whatever their size.
const PRODUCT_BYTES: u64 = esker_nn::DEVICE_PRODUCT_BYTES;

/// Where a strategy takes all that is left, of either memory, inference over the whole graph gets one in so many parts of it.
const WHOLE_PART: u64 = 4;

/// What a GPU's driver and libraries were seen to take of the host's memory (230 MiB with an H200), and some.
const DRIVER_BYTES: u64 = 256 << 20;

/// What memory is needed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Training, and the evaluation that goes with it.
    Train,
    /// Evaluation or prediction alone.
    Infer,
}

/// What memory depends on in a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor {
    /// As [`Backend::in_host_memory`].
    pub in_host_memory: bool,
    /// As [`Backend::STEPS_AHEAD`].
    pub steps_ahead: usize,
    /// As [`Backend::memory_limit`].
    pub memory_limit: Option<u64>,
}

impl Processor {
    /// Whose memory steps take.
    pub(crate) fn memory(self, config: &RunConfig) -> MemoryOf {
        match self.in_host_memory {
            true => MemoryOf::Host { threads: config.threads },
            false => MemoryOf::Device(config.precision),
        }
    }

    /// That of a backend.
    pub fn of<B: Backend>(backend: &B) -> Processor {
        Processor {
            in_host_memory: backend.in_host_memory(),
            steps_ahead: B::STEPS_AHEAD,
            memory_limit: backend.memory_limit(),
        }
    }
}

/// Bytes in the host's memory and in the processor's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// In the host's.
    pub host: u64,
    /// In the processor's own; 0 where it has none.
    pub device: u64,
}

impl Bytes {
    pub(crate) fn fit(self, within: Bytes) -> bool {
        self.host <= within.host && self.device <= within.device
    }
}

/// How budgets are used.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What takes how much of the host's memory.
    pub table: MemoryTable,
    /// And of the processor's own, where it has any.
    pub device_table: Option<MemoryTable>,
    /// Batches whose rows are held at a time.
    pub batches_held: usize,
    /// Batches that are sampled at a time.
    pub samplers: usize,
    /// What inference over the whole graph may take.
    pub whole_bytes: Bytes,
    /// What rows that the strategy holds for all batches may take of the processor's own memory.
    pub held_device_bytes: u64,
    /// The smallest budget that would do.
    pub smallest_bytes: u64,
    /// What the strategy may hold in all.
    pub strategy_bytes: u64,
}

/// What a plan is made for.
#[derive(Clone, Copy)]
struct Planned<'a> {
    config: &'a RunConfig,
    outputs: usize,
    purpose: Purpose,
    processor: Processor,
}

impl Plan {
    /// Finds out how the run fits its budgets.
    pub fn new(
        config: &RunConfig,
        job: &Job,
        outputs: usize,
        purpose: Purpose,
        processor: Processor,
    ) -> Result<Plan> {
        let planned = Planned { config, outputs, purpose, processor };
        let least = planned.whole_least(job)?;
        let device_table = planned.device_table(job, least)?;
        // A processor whose memory nobody has limited takes what it needs.
        let device_bytes = config.gpu_memory.or(processor.memory_limit).unwrap_or(u64::MAX);
        let device_total = device_table.as_ref().map_or(0, MemoryTable::total);
        if let Some(table) = device_table.clone().filter(|_| device_total > device_bytes) {
            let (needed, allowed) = (ByteCount(device_total), ByteCount(device_bytes));
            return Err(TrainError::DeviceMemory { needed, allowed, table });
        }
        let table = |held: usize, samplers: usize| {
            let batches_held = held + processor.steps_ahead;
            planned.table(&Job { batches_held, samplers, ..job.clone() }, least)
        };
        let smallest = table(1, 1)?;
        let smallest_bytes = smallest.total();
        // Samplers go first, then batches held ahead.
        let samplers = (1..=job.samplers).rev().map(|samplers| (MOST_HELD, samplers));
        for (held, samplers) in samplers.chain((1..MOST_HELD).rev().map(|held| (held, 1))) {
            let mut table = table(held, samplers)?;
            let total = table.total();
            if total <= config.memory {
                let batches_held = held + processor.steps_ahead;
                let (strategy, spare) = (strategy_for(config), config.memory - total);
                let mut strategy_bytes =
                    strategy.memory(&Job { batches_held, samplers, ..job.clone() })?.total();
                let mut host = spare + least.host;
                if purpose == Purpose::Train && strategy.takes_the_rest() {
                    // Inference over the whole graph comes between epochs, while the strategy keeps what it has.
                    host = if least.host > 0 { least.host + spare / WHOLE_PART } else { 0 };
                    let caches = spare - host.saturating_sub(least.host);
                    strategy_bytes += caches;
                    table.add("caches, and batches ahead", caches);
                }
                let left = device_bytes - device_total;
                let held_device_bytes = planned.held_bytes(job, left, least);
                let device = left + least.device - held_device_bytes;
                let device_table = device_table.map(|mut table| {
                    if held_device_bytes > 0 {
                        table.add("rows held for all batches", held_device_bytes);
                    }
                    table
                });
                return Ok(Plan {
                    table,
                    device_table,
                    batches_held,
                    samplers,
                    whole_bytes: Bytes { host, device },
                    held_device_bytes,
                    smallest_bytes,
                    strategy_bytes,
                });
            }
        }
        let (needed, allowed) = (ByteCount(smallest_bytes), ByteCount(config.memory));
        Err(TrainError::Memory { needed, allowed, table: smallest })
    }
}

/// The strategy, to be asked what it needs: it makes no rows for that.
fn strategy_for(config: &RunConfig) -> Box<dyn Strategy<Vec<f32>>> {
    let no_rows: RowMaker<Vec<f32>> =
        Arc::new(|_, _| unreachable!("nothing is made while memory is added up"));
    config.strategy.build(no_rows, None)
}

/// What rows held for all batches take of what is left of a memory, at most `all`. Inference over the whole graph comes between
/// epochs, while they stay: where there is any, it keeps its part.
fn held_share(left: u64, all: u64, whole: bool) -> u64 {
    let kept = if whole { left / WHOLE_PART } else { 0 };
    (left - kept).min(all)
}

impl Planned<'_> {
    /// What the host's memory holds.
    fn table(&self, job: &Job, whole_least: Bytes) -> Result<MemoryTable> {
        let (config, outputs) = (self.config, self.outputs);
        let mut table = MemoryTable::default();
        table.add("program", PROGRAM_BYTES + config.threads as u64 * 2 * THREAD_BYTES);
        table.add("splits and labels", Task::bytes_for(&job.dataset));
        table.extend(strategy_for(config).memory(job)?);
        if !self.processor.in_host_memory {
            table.add("driver and its libraries", DRIVER_BYTES);
            table.add("pinned memory beside rows", self.pinned_bytes(job));
        }
        let (model, optimizer, step) = self.step_bytes(job)?;
        if self.processor.in_host_memory {
            table.add("model and gradients", model);
            table.add("optimizer", optimizer);
        }
        if self.purpose == Purpose::Train {
            if self.processor.in_host_memory {
                table.add("training step", step);
            }
            // A copy of all numbers, and their bytes.
            table.add("checkpoint", 2 * (model / 2 + optimizer));
        }
        let splits = job.dataset.manifest().splits.as_ref();
        let judged = splits.map_or(0, |splits| match self.purpose {
            Purpose::Train => splits.valid.max(splits.test),
            Purpose::Infer => splits.valid.max(splits.test).max(splits.train),
        });
        let labels = job.dataset.manifest().nodes.labels.as_ref();
        let kind = labels.map_or(LabelKind::Real, |labels| labels.kind);
        let scores = metrics::tally_bytes(kind, outputs, judged);
        if scores > 0 && [config.eval, config.final_eval].iter().any(|mode| *mode != EvaluationMode::None) {
            table.add("evaluation: scores", scores);
        }
        if self.processor.in_host_memory
            && let Some((inference, _)) = self.inference_bytes(job)?
        {
            table.add("evaluation: inference", inference);
        }
        if whole_least.host > 0 {
            table.add("evaluation: all neighbours of a node", whole_least.host);
        }
        Ok(table)
    }

    /// What the processor's own memory holds.
    fn device_table(&self, job: &Job, whole_least: Bytes) -> Result<Option<MemoryTable>> {
        if self.processor.in_host_memory {
            return Ok(None);
        }
        let mut table = MemoryTable::default();
        let (model, optimizer, step) = self.step_bytes(job)?;
        table.add("products", PRODUCT_BYTES);
        table.add("model and gradients", model);
        table.add("optimizer", optimizer);
        if self.purpose == Purpose::Train {
            let landed = self.processor.steps_ahead + LANDED;
            let rows = job.bound(&job.settings, job.largest_batch).nodes.saturating_mul(job.dim() * 4);
            let batch = rows.saturating_add(self.list_bytes(job));
            table.add(format!("rows and lists of {landed} batches"), batch.saturating_mul(landed as u64));
            table.add("training step", step);
        }
        if self.holds_rows() {
            table.add("rows of a batch as stored", self.fresh_bytes(job));
        }
        if let Some((inference, rows)) = self.inference_bytes(job)? {
            table.add("evaluation: rows of a batch", rows);
            table.add("evaluation: inference", inference);
        }
        if whole_least.device > 0 {
            table.add("evaluation: all neighbours of a node", whole_least.device);
        }
        Ok(Some(table))
    }

    /// Whether the strategy holds rows in the processor's own memory.
    fn holds_rows(&self) -> bool {
        self.purpose == Purpose::Train
            && !self.processor.in_host_memory
            && strategy_for(self.config).holds_rows()
    }

    /// What held rows may take of what is left of the processor's own memory.
    fn held_bytes(&self, job: &Job, left: u64, whole_least: Bytes) -> u64 {
        if !self.holds_rows() {
            return 0;
        }
        let all = job.dataset.manifest().nodes.count.saturating_mul(job.row_bytes());
        held_share(left, all, whole_least.device > 0)
    }

    /// The rows that a batch brings beside held ones, and a word a row, until they are brought together; with what a pool rounds
    /// up. The next batch lands in the same memory.
    fn fresh_bytes(&self, job: &Job) -> u64 {
        let trained = job.bound(&job.settings, job.largest_batch).nodes;
        let evaluation = job.evaluation.as_ref();
        let judged = evaluation.map_or(0, |over| job.bound(&over.settings, over.largest_batch).nodes);
        let bytes = trained.max(judged).saturating_mul(job.row_bytes() + 4);
        bytes.saturating_add(bytes / 4).saturating_add(4096)
    }

    /// Lists and labels on their way to a processor of its own, and what pinned memory is rounded up by: an eighth by its sizes,
    /// a quarter by its pool.
    fn pinned_bytes(&self, job: &Job) -> u64 {
        let rows = job.bound(&job.settings, job.largest_batch).nodes.saturating_mul(job.dim() * 4);
        let held = job.batches_held as u64;
        (rows / 8 * 3).saturating_add(self.list_bytes(job) / 8 * 11).saturating_mul(held)
    }

    /// Bytes of the lists of a batch.
    fn list_bytes(&self, job: &Job) -> u64 {
        let shape = self.shape(job, &job.settings, job.largest_batch);
        let words = |layer: usize| shape.rows[layer] + shape.rows[layer + 1] + shape.edges[layer];
        (0..self.config.model.layers).map(words).sum::<usize>() as u64 * 4
    }

    fn shape(&self, job: &Job, settings: &Settings, batch: u64) -> StepShape {
        step_shape(self.config, job, settings, batch, self.processor.memory(self.config))
    }

    /// The model, its optimizer, and a step without the rows of its batch, which are counted as such.
    fn step_bytes(&self, job: &Job) -> Result<(u64, u64, u64)> {
        let (config, inputs) = (self.config, job.dim() as usize);
        let shape = self.shape(job, &job.settings, job.largest_batch);
        let bytes = memory_bytes(&config.model, &config.optimizer, inputs, self.outputs, &shape)?;
        let rows = shape.rows[0] as u64 * inputs as u64 * 4;
        Ok((bytes.model, bytes.optimizer, bytes.step.saturating_sub(rows)))
    }

    /// Inference of a batch of evaluation without its rows, and the rows; `None` where nobody samples to evaluate.
    fn inference_bytes(&self, job: &Job) -> Result<Option<(u64, u64)>> {
        let (config, inputs) = (self.config, job.dim() as usize);
        let Some(evaluation) = &job.evaluation else { return Ok(None) };
        let shape = self.shape(job, &evaluation.settings, evaluation.largest_batch);
        let bytes = memory_bytes(&config.model, &config.optimizer, inputs, self.outputs, &shape)?;
        let rows = shape.rows[0] as u64 * inputs as u64 * 4;
        Ok(Some((bytes.batch_inference.saturating_sub(rows), rows)))
    }

    /// What inference over the whole graph cannot do without.
    fn whole_least(&self, job: &Job) -> Result<Bytes> {
        if ![self.config.eval, self.config.final_eval].contains(&EvaluationMode::Full) {
            return Ok(Bytes::default());
        }
        let rows = whole::least_rows(self.config, job)?;
        whole::block_bytes(self.config, job, self.outputs, rows, self.processor)
    }
}

/// The largest batch, layer by layer.
fn step_shape(config: &RunConfig, job: &Job, settings: &Settings, batch: u64, memory: MemoryOf) -> StepShape {
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
        memory,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_rows_take_what_is_left_but_what_whole_graphs_need() {
        assert_eq!(held_share(1000, u64::MAX, false), 1000);
        assert_eq!(held_share(1000, u64::MAX, true), 750);
        assert_eq!(held_share(1000, 300, true), 300);
        assert_eq!(held_share(0, 300, true), 0);
        assert_eq!(held_share(3, 300, true), 3);
    }
}
