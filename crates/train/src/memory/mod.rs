//! The memory of a run, summed up before anything is allocated. As many batches are prefetched as the budget allows. If
//! the budget is too small for one at a time, the run is refused, with the size it needs. A device with its own memory
//! has a separate budget: the model, its steps and its inference count there, and rows to be uploaded count as host
//! memory.

mod larger;
mod model;
mod ranking;

pub use larger::DeviceRoom;

use crate::link::{LinkTask, RankRows};
use crate::task::{LabelKind, Task};
use crate::{EvaluationMode, Result, RunConfig, TrainError, metrics, whole};
use esker_nn::{Backend, MemoryOf};
use esker_sample::Bound;
use esker_store::Dataset;
use esker_strategies::{BatchRoom, Grant, JobOutline, MemoryTable, Others, StrategyNeeds, grant};
use esker_types::ByteCount;

/// Memory of the program that is not counted elsewhere: the allocator's and the I/O backend's. A run on a tiny graph takes
/// 2 MiB. Code is page cache and not counted.
const PROGRAM_BYTES: u64 = 4 << 20;
/// Stacks and allocator memory of each computing thread, and of a stage beside it.
pub(crate) const THREAD_BYTES: u64 = 512 << 10;
/// Batches with rows in device memory apart from those of steps in flight: being trained on, being uploaded.
const UPLOADED: usize = 2;

/// Memory of matmuls on a device with its own memory, for any size.
const MATMUL_BYTES: u64 = esker_nn::DEVICE_MATMUL_BYTES;

/// If a strategy takes all that is left of a memory, whole-graph inference gets one part in this many of it.
const WHOLE_PART: u64 = 4;

/// One part in this many of the memory of whole-graph inference is left to the allocator, unless that is too little.
const WHOLE_SLACK_PART: u64 = 8;

/// Freed matrices that are kept for reuse take one part in this many of a step and its rows, if memory allows.
const REUSED_PART: u64 = 4;
/// The same where caches take the rest of the memory: what batches differ by, and no more.
const REUSED_PART_BESIDE_CACHES: u64 = 16;

/// Host memory of a GPU's driver and libraries (230 MiB measured with an H200), with some margin.
const DRIVER_BYTES: u64 = 256 << 20;

/// Host memory of the program and its threads.
fn host_program_bytes(config: &RunConfig) -> u64 {
    PROGRAM_BYTES + config.threads as u64 * 2 * THREAD_BYTES
}

/// The same with what a device's driver takes.
pub(crate) fn program_bytes(config: &RunConfig, device: DeviceProfile) -> u64 {
    host_program_bytes(config) + if device.in_host_memory { 0 } else { DRIVER_BYTES }
}

/// What the memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Training, with its evaluation.
    Train,
    /// Only evaluation or prediction.
    Infer,
}

/// The properties of a device that determine memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceProfile {
    /// See [`Device::in_host_memory`](esker_nn::Device::in_host_memory).
    pub in_host_memory: bool,
    /// See [`Device::STEPS_IN_FLIGHT`](esker_nn::Device::STEPS_IN_FLIGHT).
    pub steps_in_flight: usize,
    /// See [`Device::memory_limit`](esker_nn::Device::memory_limit).
    pub memory_limit: Option<u64>,
}

impl DeviceProfile {
    /// The memory that steps use.
    pub(crate) fn memory(self, config: &RunConfig) -> MemoryOf {
        match self.in_host_memory {
            true => MemoryOf::Host { threads: config.threads },
            false => MemoryOf::Device(config.precision),
        }
    }

    /// The profile of a backend.
    pub fn of<B: Backend>(backend: &B) -> DeviceProfile {
        DeviceProfile {
            in_host_memory: backend.in_host_memory(),
            steps_in_flight: B::STEPS_IN_FLIGHT,
            memory_limit: backend.memory_limit(),
        }
    }
}

/// Bytes of host memory and of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// Bytes of host memory.
    pub host: u64,
    /// Bytes of device memory; 0 if the device has none.
    pub device: u64,
}

impl Bytes {
    pub(crate) fn fit(self, within: Bytes) -> bool {
        self.host <= within.host && self.device <= within.device
    }
}

/// The line of the memory that a strategy may use as it likes.
const CACHES: &str = "caches and prefetched batches";

/// How budgets are used.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Host memory, line by line.
    pub table: MemoryTable,
    /// Device memory, line by line, if the device has its own.
    pub device_table: Option<MemoryTable>,
    /// Batches with rows in memory at a time.
    pub prefetch_depth: usize,
    /// Batches sampled at a time.
    pub samplers: usize,
    /// Memory of whole-graph inference.
    pub whole_bytes: Bytes,
    /// Device memory for rows that the strategy caches for all batches.
    pub cache_device_bytes: u64,
    /// Device memory for the rows of a history, as [`esker_strategies::HistoryOutline`] has it.
    pub history_device_bytes: u64,
    /// The same for embeddings and the state of their optimizer.
    pub embedding_device_bytes: u64,
    /// The smallest budget that works.
    pub smallest_bytes: u64,
    /// Total memory of the strategy.
    pub strategy_bytes: u64,
    /// How much of it is left for caches and prefetched batches.
    pub caches_bytes: u64,
    /// Host memory of freed matrices that are kept to be used again.
    pub reuse_bytes: u64,
    /// What batches that are larger than expected may take.
    pub room: BatchRoom,
    /// The same of the device, if it has its own memory.
    pub device_room: Option<DeviceRoom>,
    /// The most that the strategy's files may take on disk, and the disk budget.
    pub disk_bytes: (u64, u64),
    /// Nodes and neighbours of the largest batches of training and evaluation.
    pub largest: PlannedBatches,
    /// Where representations are while links are ranked.
    pub ranking: RankRows,
}

/// The size of the largest batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct PlannedBatches {
    /// Nodes and neighbours of a training batch.
    pub training: (u64, u64),
    /// Nodes and neighbours of an evaluation batch, if evaluation samples.
    pub evaluation: Option<(u64, u64)>,
    /// Whether batches were sampled to know it. Otherwise it is what fan-outs allow.
    pub sampled: bool,
}

impl PlannedBatches {
    fn of(job: &JobOutline) -> PlannedBatches {
        let size = |bound: Bound| (bound.nodes, bound.edges);
        PlannedBatches {
            training: size(job.training_bound()),
            evaluation: job.evaluation_bound().map(size),
            sampled: job.known.is_some(),
        }
    }
}

/// The input of a plan.
#[derive(Clone, Copy)]
struct Planned<'a> {
    config: &'a RunConfig,
    strategy: StrategyNeeds<'a>,
    /// Columns of the rows that the model reads and gives.
    inputs: usize,
    outputs: usize,
    /// Columns of feature rows.
    features: usize,
    purpose: Purpose,
    device: DeviceProfile,
    ranking: RankRows,
}

/// A job as a device's memory leaves it.
struct FittedDevice {
    job: JobOutline,
    step_bytes: u64,
    /// The least memory of inference over the whole graph.
    least: Bytes,
    device_bytes: u64,
    table: Option<MemoryTable>,
    left: u64,
    cache_device_bytes: u64,
}

/// A plan, and what it leaves of both memories.
struct FittedPlan {
    plan: Plan,
    spare: Bytes,
}

impl Plan {
    /// Fits the run into its budgets. Links are ranked with the representations of all nodes on the device, or, if there
    /// is no room for them, with what is left.
    pub fn new(
        config: &RunConfig,
        strategy: StrategyNeeds<'_>,
        job: &JobOutline,
        (inputs, outputs): (usize, usize),
        purpose: Purpose,
        device: DeviceProfile,
    ) -> Result<Plan> {
        let ranking = RankRows::Resident;
        let features =
            job.dataset.manifest().nodes.features.as_ref().map_or(0, |features| features.dim as usize);
        let planned = Planned { config, strategy, inputs, outputs, features, purpose, device, ranking };
        match planned.least_stream(job) {
            None => Ok(planned.plan(job)?.plan),
            Some(least) => planned.plan_ranking(job, least),
        }
    }
}

impl Planned<'_> {
    /// What a device's memory leaves.
    fn on_device(&self, job: &JobOutline) -> Result<FittedDevice> {
        let step_bytes = self.host_step_bytes(job)?;
        let job = &JobOutline { room: BatchRoom { step_bytes, ..BatchRoom::default() }, ..job.clone() };
        let least = self.whole_least(job)?;
        // A device without a memory limit takes what it needs.
        let device_bytes = self.config.gpu_memory.or(self.device.memory_limit).unwrap_or(u64::MAX);
        let job = &self.with_history_beside(job, least, device_bytes)?;
        let job = &self.with_embeddings_beside(job, least, device_bytes)?;
        let table = self.device_table(job, least)?;
        let left = device_bytes - fitting(&table, device_bytes)?;
        let larger = if self.caches_rows(job)? { self.left_to_larger(job, left)? } else { 0 };
        let cache_device_bytes = self.cache_bytes(job, left - larger, least)?;
        // What is cached on the device need not be read, nor assembled in host memory.
        let job = JobOutline { device_cache_bytes: cache_device_bytes, ..job.clone() };
        Ok(FittedDevice { job, step_bytes, least, device_bytes, table, left, cache_device_bytes })
    }

    /// The smallest budget that works.
    fn smallest(&self, job: &JobOutline) -> Result<u64> {
        let FittedDevice { job, least, .. } = self.on_device(job)?;
        grant_least(self.strategy, &job, &|outline: &JobOutline| self.others(outline, least))
    }

    /// Fits the run into its budgets with this ranking.
    fn plan(&self, job: &JobOutline) -> Result<FittedPlan> {
        let (config, strategy, purpose) = (self.config, self.strategy, self.purpose);
        let on_device = self.on_device(job)?;
        let FittedDevice { job, step_bytes, least, device_bytes, table: mut device_table, .. } = on_device;
        let (job, left, cache_device_bytes) = (&job, on_device.left, on_device.cache_device_bytes);
        let others = |outline: &JobOutline| self.others(outline, least);
        let granted = grant(strategy, job, config.memory, &others)?;
        let granted = granted.map_err(|table| too_little(table, config.memory))?;
        let left_over = Bytes { host: granted.spare, device: left - cache_device_bytes };
        let (reuse_bytes, granted) = self.with_reuse(job, step_bytes, granted);
        let Grant { mut table, prefetch_depth, samplers, spare, takes_the_rest, .. } = granted;
        let mut strategy_bytes = granted.least_strategy_bytes;
        // Whole-graph inference takes turns with steps.
        let turn = least.host.max(if least.host > 0 { step_bytes } else { 0 });
        let mut host = spare + turn;
        let caches = takes_the_rest && purpose == Purpose::Train;
        if caches {
            // Whole-graph inference runs between epochs, while the strategy keeps its memory.
            host = if least.host > 0 { turn + spare / WHOLE_PART } else { 0 };
            let rest = spare - host.saturating_sub(turn);
            strategy_bytes += rest;
            table.add(CACHES, rest);
        }
        let room = BatchRoom {
            // Whole-graph inference uses what is spare, too, and so do caches.
            spare_bytes: if least.host > 0 || caches { 0 } else { spare },
            step_bytes,
            budget_bytes: config.memory,
        };
        let device_room = self.device_room(job, left - cache_device_bytes, device_bytes)?;
        if let Some(table) = device_table.as_mut().filter(|_| cache_device_bytes > 0) {
            table.add("rows cached for all batches", cache_device_bytes);
        }
        let plan = Plan {
            table,
            device_table,
            prefetch_depth,
            samplers,
            whole_bytes: Bytes {
                host: host_of_whole(host, least),
                device: left + least.device - cache_device_bytes,
            },
            cache_device_bytes,
            embedding_device_bytes: job.embedding_device_bytes,
            history_device_bytes: job.history.map_or(0, |history| history.device_bytes),
            smallest_bytes: grant_least(strategy, job, &others)?,
            strategy_bytes,
            caches_bytes: strategy_bytes - granted.least_strategy_bytes,
            reuse_bytes,
            room,
            device_room,
            disk_bytes: (strategy(job)?.disk_bytes, job.out_of_core.disk_bytes),
            largest: PlannedBatches::of(job),
            ranking: self.ranking,
        };
        Ok(FittedPlan { plan, spare: left_over })
    }
}

impl Plan {
    /// Shows what a strategy takes of the memory for caches in lines of its own. The total stays the same.
    pub(crate) fn divide_caches(&mut self, taken: &MemoryTable) {
        let Some(at) = self.table.lines.iter().position(|line| line.what == CACHES) else { return };
        for line in &taken.lines {
            let bytes = line.bytes.min(self.table.lines[at].bytes);
            self.table.lines[at].bytes -= bytes;
            self.table.add_from(line.what.clone(), bytes, line.from.clone());
        }
    }
}

/// Host memory of whole-graph inference, without what is left to the allocator.
fn host_of_whole(host: u64, least: Bytes) -> u64 {
    (host - host / WHOLE_SLACK_PART).max(least.host.min(host))
}

/// Memory for rows that are read before a device with its own memory is open: most of what the program, its libraries and
/// labels leave. Inference over the whole graph has it later.
pub(crate) fn early_bytes(config: &RunConfig, dataset: &Dataset) -> u64 {
    let others = DRIVER_BYTES + host_program_bytes(config) + Task::bytes_for(dataset);
    config.memory.saturating_sub(others) / 4 * 3
}

/// The refusal of a budget that is too small.
pub(crate) fn too_little(table: MemoryTable, allowed: u64) -> TrainError {
    TrainError::Memory { needed: ByteCount(table.total()), allowed: ByteCount(allowed), table }
}

/// The total of a device's table, or the refusal if it exceeds the budget.
fn fitting(table: &Option<MemoryTable>, allowed: u64) -> Result<u64> {
    let total = table.as_ref().map_or(0, MemoryTable::total);
    match table.clone().filter(|_| total > allowed) {
        None => Ok(total),
        Some(table) => {
            let (needed, allowed) = (ByteCount(total), ByteCount(allowed));
            Err(TrainError::DeviceMemory { needed, allowed, table })
        }
    }
}

/// Host memory that a run on links has before its job is known: what batches need of edges, beside the topology.
pub(crate) fn loaded_links(config: &RunConfig, dataset: &Dataset, purpose: Purpose) -> MemoryTable {
    let mut table = MemoryTable::default();
    if config.link.is_some() {
        table.add("held-out edges", LinkTask::bytes_for(dataset));
        let masked = if purpose == Purpose::Train { model::masked_bytes(config, dataset) } else { 0 };
        if masked > 0 {
            table.add_from("true edges of every query", masked, "both sides of every edge");
        }
    }
    table
}

/// Adds the memory of steps. Training and evaluation take turns.
fn add_steps(table: &mut MemoryTable, training: u64, evaluation: u64) {
    if training > 0 {
        table.add_from("training step", training, "activations and gradients of the largest batch");
    }
    let more = evaluation.saturating_sub(training);
    match training {
        _ if more == 0 => {}
        0 => table.add("evaluation: inference", more),
        _ => table.add_from("evaluation beyond that", more, "it takes turns with training steps"),
    }
}

/// The smallest budget that works.
fn grant_least(strategy: StrategyNeeds<'_>, job: &JobOutline, others: Others<'_, TrainError>) -> Result<u64> {
    Ok(match grant(strategy, job, 0, others)? {
        Ok(grant) => grant.table.total(),
        Err(table) => table.total(),
    })
}

/// The share of cached rows of what is left of a memory, at most `all`. Whole-graph inference runs between epochs,
/// while they stay. So if there is any, it keeps its part.
fn cache_share(left: u64, all: u64, whole: bool) -> u64 {
    let kept = if whole { left / WHOLE_PART } else { 0 };
    (left - kept).min(all)
}

impl Planned<'_> {
    /// Leaves rows of a history to host memory that a device with its own has no room for beside all others.
    fn with_history_beside(&self, job: &JobOutline, least: Bytes, device_bytes: u64) -> Result<JobOutline> {
        let mut job = job.clone();
        if self.device.in_host_memory || job.history.is_none() {
            return Ok(job);
        }
        let of = |job: &mut JobOutline, bytes: u64| {
            job.history.iter_mut().for_each(|history| history.device_bytes = bytes);
        };
        of(&mut job, 0);
        let others = self.device_table(&job, least)?.as_ref().map_or(0, MemoryTable::total);
        of(&mut job, device_bytes.saturating_sub(others));
        Ok(job)
    }

    /// Leaves embeddings to host memory that a device with its own has no room for beside all others.
    fn with_embeddings_beside(
        &self,
        job: &JobOutline,
        least: Bytes,
        device_bytes: u64,
    ) -> Result<JobOutline> {
        let of = |bytes: u64| JobOutline { embedding_device_bytes: bytes, ..job.clone() };
        let total = |job: &JobOutline| -> Result<u64> {
            Ok(self.device_table(job, least)?.as_ref().map_or(0, MemoryTable::total))
        };
        let all = of(u64::MAX);
        let whole = total(&all)?;
        if self.device.in_host_memory || self.config.embeddings.is_none() || whole <= device_bytes {
            return Ok(all);
        }
        // Rows of a batch are copied. Where batches have most nodes, that takes more than the whole table.
        let others = total(&of(0))?;
        Ok(if others < whole { of(device_bytes.saturating_sub(others)) } else { all })
    }

    /// Host memory of freed matrices that are kept to be used again, and a grant without it.
    fn with_reuse(&self, job: &JobOutline, step_bytes: u64, mut grant: Grant) -> (u64, Grant) {
        if !self.device.in_host_memory {
            return (0, grant);
        }
        let rows = job.most_nodes().saturating_mul(job.dim() * 4);
        let (most, part) = match grant.takes_the_rest {
            true => (grant.spare / 2, REUSED_PART_BESIDE_CACHES),
            false => (grant.spare, REUSED_PART),
        };
        let bytes = (rows.saturating_add(step_bytes) / part).min(most);
        if bytes > 0 {
            grant.table.add_from("freed matrices, for reuse", bytes, "batches differ in size");
            grant.spare -= bytes;
        }
        (bytes, grant)
    }

    /// Host memory apart from the strategy's.
    fn others(&self, job: &JobOutline, whole_least: Bytes) -> Result<MemoryTable> {
        let (config, outputs) = (self.config, self.outputs);
        let mut table = MemoryTable::default();
        let from =
            format!("{} + 2 x {} x {}", ByteCount(PROGRAM_BYTES), config.threads, ByteCount(THREAD_BYTES));
        let program = host_program_bytes(config);
        table.add_from("program and its threads", program, from);
        match config.link {
            None => table.add("splits and labels", Task::bytes_for(&job.dataset)),
            Some(_) => table.add("held-out edges", LinkTask::bytes_for(&job.dataset)),
        }
        let masked = self.masked_bytes(job);
        if masked > 0 && self.purpose == Purpose::Train {
            table.add_from("true edges of every query", masked, "both sides of every edge");
        }
        self.add_targets(job, &mut table);
        let order = config.order_bytes(&job.dataset);
        if order > 0 && self.purpose == Purpose::Train {
            let (line, from) = config.order_line();
            table.add_from(line, order, from);
        }
        if !self.device.in_host_memory {
            table.add("driver and its libraries", DRIVER_BYTES);
            table.add("pinned memory beside rows", self.pinned_bytes(job)?);
        }
        let (model, optimizer, step) = self.step_bytes(job)?;
        if self.device.in_host_memory {
            table.add("model and gradients", model);
            table.add("optimizer", optimizer);
            table.extend((self.strategy)(job)?.device);
        }
        if self.purpose == Purpose::Train {
            // A copy of all numbers, and their bytes.
            table.add("checkpoint", 2 * (model / 2 + optimizer));
        }
        if self.device.in_host_memory {
            let step = if self.purpose == Purpose::Train { step } else { 0 };
            let inference = self.inference_bytes(job)?.map_or(0, |(inference, _)| inference);
            add_steps(&mut table, step, inference.max(whole_least.host).max(self.read_bytes(job).host));
        }
        let splits = job.dataset.manifest().splits.as_ref();
        let evaluated = splits.map_or(0, |splits| match self.purpose {
            Purpose::Train => splits.valid.max(splits.test),
            Purpose::Infer => splits.valid.max(splits.test).max(splits.train),
        });
        let labels = job.dataset.manifest().nodes.labels.as_ref();
        let kind = labels.map_or(LabelKind::Real, |labels| labels.kind);
        let scores = metrics::tally_bytes(kind, outputs, evaluated);
        let evaluates = [config.eval, config.final_eval].iter().any(|mode| *mode != EvaluationMode::None);
        match config.link {
            None if scores > 0 && evaluates => table.add("evaluation: scores", scores),
            Some(_) if evaluates || self.purpose == Purpose::Infer => self.add_ranking(job, &mut table),
            _ => {}
        }
        self.add_staged(job, whole_least, &mut table);
        Ok(table)
    }

    /// Adds what evaluation has in host memory on its way to a device with its own.
    fn add_staged(&self, job: &JobOutline, whole_least: Bytes, table: &mut MemoryTable) {
        let read = self.read_bytes(job).host;
        if self.device.in_host_memory {
            return;
        }
        if whole_least.host > 0 {
            table.add("evaluation: all neighbours", whole_least.host);
        }
        if read > 0 {
            table.add("evaluation: rows on their way to the device", read);
        }
    }

    /// Device memory.
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
        let modes = [self.config.eval, self.config.final_eval];
        let evaluates = modes.iter().any(|mode| *mode != EvaluationMode::None);
        if self.config.link.is_some() && (evaluates || self.purpose == Purpose::Infer) {
            self.add_rank_rows(job, &mut table);
        }
        let (inference, evaluated_rows) = self.inference_bytes(job)?.unwrap_or_default();
        let trains = self.purpose == Purpose::Train;
        if trains {
            let uploaded = self.device.steps_in_flight + UPLOADED;
            let rows = job.training_bound().nodes.saturating_mul(job.dim() * 4).max(evaluated_rows);
            let batch = rows.saturating_add(self.adjacency_bytes(job));
            table.add(
                format!("rows and adjacency of {uploaded} batches"),
                batch.saturating_mul(uploaded as u64),
            );
        } else if evaluated_rows > 0 {
            table.add("evaluation: feature rows of a batch", evaluated_rows);
        }
        if self.caches_rows(job)? {
            table.add("rows of a batch as stored", self.missed_bytes(job));
        }
        let evaluation = inference.max(whole_least.device).max(self.read_bytes(job).device);
        add_steps(&mut table, if trains { step } else { 0 }, evaluation);
        Ok(Some(table))
    }

    /// Whether the strategy caches rows in device memory.
    fn caches_rows(&self, job: &JobOutline) -> Result<bool> {
        Ok(self.purpose == Purpose::Train
            && !self.device.in_host_memory
            && (self.strategy)(job)?.caches_on_device)
    }

    /// Device memory for cached rows, out of what is left.
    fn cache_bytes(&self, job: &JobOutline, left: u64, whole_least: Bytes) -> Result<u64> {
        if !self.caches_rows(job)? {
            return Ok(0);
        }
        let all = job.dataset.manifest().nodes.count.saturating_mul(job.row_bytes());
        Ok(cache_share(left, all, whole_least.device > 0))
    }

    /// The smallest memory of whole-graph inference.
    fn whole_least(&self, job: &JobOutline) -> Result<Bytes> {
        let full = [self.config.eval, self.config.final_eval].contains(&EvaluationMode::Full);
        if !full || self.config.model.layers == 0 {
            return Ok(Bytes::default());
        }
        whole::least_bytes(self.config, job, self.outputs, self.device)
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
