//! What a run will hold, added up before anything is allocated. Batches are held ahead of the trainer as far as the budget
//! goes; a budget that does not even suffice for one at a time is refused, with what would. A processor with memory of its
//! own has a budget of its own: the model, its steps and its inference count there, and rows on their way to it here.

mod model;

use crate::task::{LabelKind, Task};
use crate::{EvaluationMode, Result, RunConfig, TrainError, metrics, whole};
use esker_nn::{Backend, MemoryOf};
use esker_strategies::{Grant, JobOutline, MemoryTable, Others, StrategyNeeds, grant};
use esker_types::ByteCount;

/// Code, stacks, and what the allocator and the reading engine hold beside what is counted.
const PROGRAM_BYTES: u64 = 24 << 20;
/// What each thread that computes has for itself.
const THREAD_BYTES: u64 = 3 << 20;
/// Batches whose rows lie in a processor's own memory beside those of steps ahead: being trained on, being uploaded.
const LANDED: usize = 2;

/// What matmuls take on a processor of their own, whatever their size.
const MATMUL_BYTES: u64 = esker_nn::DEVICE_MATMUL_BYTES;

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
pub struct DeviceProfile {
    /// As [`Device::in_host_memory`](esker_nn::Device::in_host_memory).
    pub in_host_memory: bool,
    /// As [`Device::STEPS_IN_FLIGHT`](esker_nn::Device::STEPS_IN_FLIGHT).
    pub steps_in_flight: usize,
    /// As [`Device::memory_limit`](esker_nn::Device::memory_limit).
    pub memory_limit: Option<u64>,
}

impl DeviceProfile {
    /// Whose memory steps take.
    pub(crate) fn memory(self, config: &RunConfig) -> MemoryOf {
        match self.in_host_memory {
            true => MemoryOf::Host { threads: config.threads },
            false => MemoryOf::Device(config.precision),
        }
    }

    /// That of a backend.
    pub fn of<B: Backend>(backend: &B) -> DeviceProfile {
        DeviceProfile {
            in_host_memory: backend.in_host_memory(),
            steps_in_flight: B::STEPS_IN_FLIGHT,
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
    pub prefetch_depth: usize,
    /// Batches that are sampled at a time.
    pub samplers: usize,
    /// What inference over the whole graph may take.
    pub whole_bytes: Bytes,
    /// What rows that the strategy caches for all batches may take of the device's own memory.
    pub cache_device_bytes: u64,
    /// The smallest budget that would do.
    pub smallest_bytes: u64,
    /// What the strategy may hold in all.
    pub strategy_bytes: u64,
}

/// What a plan is made for.
#[derive(Clone, Copy)]
struct Planned<'a> {
    config: &'a RunConfig,
    strategy: StrategyNeeds<'a>,
    outputs: usize,
    purpose: Purpose,
    device: DeviceProfile,
}

impl Plan {
    /// Finds out how the run fits its budgets.
    pub fn new(
        config: &RunConfig,
        strategy: StrategyNeeds<'_>,
        job: &JobOutline,
        outputs: usize,
        purpose: Purpose,
        device: DeviceProfile,
    ) -> Result<Plan> {
        let planned = Planned { config, strategy, outputs, purpose, device };
        let least = planned.whole_least(job)?;
        let device_table = planned.device_table(job, least)?;
        // A processor whose memory nobody has limited takes what it needs.
        let device_bytes = config.gpu_memory.or(device.memory_limit).unwrap_or(u64::MAX);
        let device_total = device_table.as_ref().map_or(0, MemoryTable::total);
        if let Some(table) = device_table.clone().filter(|_| device_total > device_bytes) {
            let (needed, allowed) = (ByteCount(device_total), ByteCount(device_bytes));
            return Err(TrainError::DeviceMemory { needed, allowed, table });
        }
        let others = |outline: &JobOutline| planned.others(outline, least);
        let smallest = |table: MemoryTable| {
            let (needed, allowed) = (ByteCount(table.total()), ByteCount(config.memory));
            TrainError::Memory { needed, allowed, table }
        };
        let granted = grant(strategy, job, config.memory, &others)?.map_err(smallest)?;
        let Grant { mut table, prefetch_depth, samplers, least_strategy_bytes, spare, takes_the_rest } =
            granted;
        let mut strategy_bytes = least_strategy_bytes;
        let mut host = spare + least.host;
        if purpose == Purpose::Train && takes_the_rest {
            // Inference over the whole graph comes between epochs, while the strategy keeps what it has.
            host = if least.host > 0 { least.host + spare / WHOLE_PART } else { 0 };
            let caches = spare - host.saturating_sub(least.host);
            strategy_bytes += caches;
            table.add("caches, and batches ahead", caches);
        }
        let left = device_bytes - device_total;
        let cache_device_bytes = planned.cache_bytes(job, left, least)?;
        let device = left + least.device - cache_device_bytes;
        let device_table = device_table.map(|mut table| {
            if cache_device_bytes > 0 {
                table.add("rows cached for all batches", cache_device_bytes);
            }
            table
        });
        Ok(Plan {
            table,
            device_table,
            prefetch_depth,
            samplers,
            whole_bytes: Bytes { host, device },
            cache_device_bytes,
            smallest_bytes: grant_least(strategy, job, &others)?,
            strategy_bytes,
        })
    }
}

/// The smallest budget that would do.
fn grant_least(strategy: StrategyNeeds<'_>, job: &JobOutline, others: Others<'_, TrainError>) -> Result<u64> {
    Ok(match grant(strategy, job, 0, others)? {
        Ok(grant) => grant.table.total(),
        Err(table) => table.total(),
    })
}

/// What rows cached for all batches take of what is left of a memory, at most `all`. Inference over the whole graph comes between
/// epochs, while they stay: where there is any, it keeps its part.
fn cache_share(left: u64, all: u64, whole: bool) -> u64 {
    let kept = if whole { left / WHOLE_PART } else { 0 };
    (left - kept).min(all)
}

impl Planned<'_> {
    /// What the host's memory holds beside the strategy.
    fn others(&self, job: &JobOutline, whole_least: Bytes) -> Result<MemoryTable> {
        let (config, outputs) = (self.config, self.outputs);
        let mut table = MemoryTable::default();
        table.add("program", PROGRAM_BYTES + config.threads as u64 * 2 * THREAD_BYTES);
        table.add("splits and labels", Task::bytes_for(&job.dataset));
        if !self.device.in_host_memory {
            table.add("driver and its libraries", DRIVER_BYTES);
            table.add("pinned memory beside rows", self.pinned_bytes(job));
        }
        let (model, optimizer, step) = self.step_bytes(job)?;
        if self.device.in_host_memory {
            table.add("model and gradients", model);
            table.add("optimizer", optimizer);
            table.extend((self.strategy)(job)?.device);
        }
        if self.purpose == Purpose::Train {
            if self.device.in_host_memory {
                table.add("training step", step);
            }
            // A copy of all numbers, and their bytes.
            table.add("checkpoint", 2 * (model / 2 + optimizer));
        }
        let splits = job.dataset.manifest().splits.as_ref();
        let evaluated = splits.map_or(0, |splits| match self.purpose {
            Purpose::Train => splits.valid.max(splits.test),
            Purpose::Infer => splits.valid.max(splits.test).max(splits.train),
        });
        let labels = job.dataset.manifest().nodes.labels.as_ref();
        let kind = labels.map_or(LabelKind::Real, |labels| labels.kind);
        let scores = metrics::tally_bytes(kind, outputs, evaluated);
        if scores > 0 && [config.eval, config.final_eval].iter().any(|mode| *mode != EvaluationMode::None) {
            table.add("evaluation: scores", scores);
        }
        if self.device.in_host_memory
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
    fn device_table(&self, job: &JobOutline, whole_least: Bytes) -> Result<Option<MemoryTable>> {
        if self.device.in_host_memory {
            return Ok(None);
        }
        let mut table = MemoryTable::default();
        let (model, optimizer, step) = self.step_bytes(job)?;
        table.add("matmul workspace", MATMUL_BYTES);
        table.add("model and gradients", model);
        table.add("optimizer", optimizer);
        table.extend((self.strategy)(job)?.device);
        if self.purpose == Purpose::Train {
            let uploaded = self.device.steps_in_flight + LANDED;
            let rows = job.bound(&job.settings, job.largest_batch).nodes.saturating_mul(job.dim() * 4);
            let batch = rows.saturating_add(self.adjacency_bytes(job));
            table.add(
                format!("rows and adjacency of {uploaded} batches"),
                batch.saturating_mul(uploaded as u64),
            );
            table.add("training step", step);
        }
        if self.caches_rows(job)? {
            table.add("rows of a batch as stored", self.missed_bytes(job));
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

    /// Whether the strategy caches rows in the device's own memory.
    fn caches_rows(&self, job: &JobOutline) -> Result<bool> {
        Ok(self.purpose == Purpose::Train
            && !self.device.in_host_memory
            && (self.strategy)(job)?.caches_on_device)
    }

    /// What cached rows may take of what is left of the device's own memory.
    fn cache_bytes(&self, job: &JobOutline, left: u64, whole_least: Bytes) -> Result<u64> {
        if !self.caches_rows(job)? {
            return Ok(0);
        }
        let all = job.dataset.manifest().nodes.count.saturating_mul(job.row_bytes());
        Ok(cache_share(left, all, whole_least.device > 0))
    }

    /// What inference over the whole graph cannot do without.
    fn whole_least(&self, job: &JobOutline) -> Result<Bytes> {
        if ![self.config.eval, self.config.final_eval].contains(&EvaluationMode::Full) {
            return Ok(Bytes::default());
        }
        let rows = whole::least_rows(self.config, job)?;
        whole::block_bytes(self.config, job, self.outputs, rows, self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_rows_take_what_is_left_but_what_whole_graphs_need() {
        assert_eq!(cache_share(1000, u64::MAX, false), 1000);
        assert_eq!(cache_share(1000, u64::MAX, true), 750);
        assert_eq!(cache_share(1000, 300, true), 300);
        assert_eq!(cache_share(0, 300, true), 0);
        assert_eq!(cache_share(3, 300, true), 3);
    }
}
