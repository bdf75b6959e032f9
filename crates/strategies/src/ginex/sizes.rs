//! The memory budget of ginex (section 3.5 of the paper). Phases take turns. While a superbatch is sampled and the
//! previous one is planned, cached neighbours get the rest. While a superbatch is gathered, cached feature rows get the
//! rest. Batches of evaluation take their turn in the same superbatches, so they need no memory of their own.

use super::evaluation::KEPT_PART;
use super::superbatch::PlannedBatch;
use crate::direct::{self, sampler_bytes};
use crate::history;
use crate::neighbours::NeighbourBudget;
use crate::{CachePolicy, JobOutline, MemoryTable, Result, StrategyError};
use esker_fetch::{AccessFile, DiskRows, PlanFile, StoredRow};
use esker_plan::{Belady, MOST_SLOTS, StaticRows};
use esker_sample::trace::{Cursor, TraceReader};
use esker_sample::{Bound, DiskGraph, StoredId};
use esker_types::ByteCount;

/// Samples per bulk sampling thread: made, waiting, read.
const WORKER_SAMPLES: u64 = 4;
/// Samples beyond the batches with rows in memory: being loaded, waiting.
pub(super) const SAMPLES_PREFETCHED: usize = 2;
/// Batches with rows in memory if memory allows: being read, being assembled, being trained on.
pub(super) const MOST_DEPTH: usize = 3;
/// Memory of writing a trace apart from its records.
const TRACE_BYTES: u64 = 4 << 20;
/// Memory of reading a trace and a plan apart from their records: where those of each batch are.
const INDEX_BYTES: u64 = 1 << 20;
/// Largest size of a plan's memory per slot.
const SLOT_BYTES: u64 = 4;
/// Default minimum length of a superbatch, if the disk allows it. On small graphs, switching would otherwise cost more
/// than training.
const FEW_BATCHES: u64 = 64;

/// The largest of what batches of training and of evaluation take. Both use the same memory.
fn largest(job: &JobOutline, of: impl Fn(&Bound) -> u64) -> u64 {
    let training = of(&job.bound(&job.settings, job.largest_batch));
    // A job without training reads without a plan.
    let evaluation = job.evaluation.as_ref().filter(|_| job.largest_batch > 0);
    evaluation.map_or(0, |over| of(&job.bound(&over.settings, over.largest_batch))).max(training)
}

fn largest_nodes(job: &JobOutline) -> u64 {
    largest(job, |bound| bound.nodes)
}

fn word_bytes(job: &JobOutline) -> u64 {
    job.dataset.manifest().id_dtype().bytes()
}

fn planner_bytes(job: &JobOutline, slots: u64, batches: u64, largest: u64) -> u64 {
    let nodes = job.dataset.manifest().nodes.count;
    // Which batch it is, and positions and checksums of its accesses, placements and counts in their files.
    let places = batches * (size_of::<PlannedBatch>() as u64 + 4 * 8 + PlanFile::bytes_per_batch());
    match word_bytes(job) {
        8 => Belady::<u64>::bytes_for(nodes, slots, batches, largest) + places,
        _ => Belady::<u32>::bytes_for(nodes, slots, batches, largest) + places,
    }
}

/// Bytes of a batch's record, accesses and words while they are in memory.
fn writing_bytes(job: &JobOutline) -> u64 {
    let accesses = largest_nodes(job).saturating_mul(word_bytes(job));
    TRACE_BYTES.saturating_add(largest(job, |bound| bound.sample_bytes)).saturating_add(accesses)
}

/// Bytes of a sampler.
fn worker_bytes(job: &JobOutline) -> u64 {
    largest(job, |bound| sampler_bytes(job, bound, WORKER_SAMPLES))
}

/// Memory of gathering apart from rows and cache: samples and words, a decoder, a reader.
fn gathering_bytes(job: &JobOutline, nodes: u64, sample_bytes: u64, depth: u64) -> u64 {
    let samples = (depth + SAMPLES_PREFETCHED as u64)
        .saturating_mul(sample_bytes.saturating_add(nodes.saturating_mul(8)));
    let graph_nodes = job.dataset.manifest().nodes.count;
    let decoder = Cursor::<TraceReader>::bytes_for(graph_nodes, nodes, sample_bytes);
    INDEX_BYTES.saturating_add(samples).saturating_add(decoder).saturating_add(DiskRows::reader_bytes(nodes))
}

/// Memory of every phase.
fn lasting(job: &JobOutline) -> MemoryTable {
    let mut table = MemoryTable::default();
    table.add("offsets of neighbours", DiskGraph::bytes_for(&job.dataset, job.direction));
    if job.largest_batch > 0 && job.adjacency_index_bytes() > 0 {
        table.add("index of neighbours by partition", job.adjacency_index_bytes());
    }
    if job.largest_batch == 0 {
        direct::add_memory(job, &mut table);
    } else if job.out_of_core.cache == CachePolicy::Static {
        table.add("ranks of cached rows", StaticRows::bytes_for(job.dataset.manifest().nodes.count));
    }
    history::add_host_memory(job, &mut table);
    table
}

/// The smallest memory of sampling and planning together.
fn least_sampling(job: &JobOutline) -> u64 {
    let batches = job.out_of_core.superbatch.unwrap_or(FEW_BATCHES);
    let planner = planner_bytes(job, 0, batches, largest_nodes(job));
    let others = writing_bytes(job).saturating_add(ahead_bytes(job));
    let others = others.saturating_add(history::marks_bytes(job, batches));
    worker_bytes(job).saturating_add(planner).saturating_add(others)
}

/// Rows of steps that are still in flight when a superbatch is sampled.
fn ahead_bytes(job: &JobOutline) -> u64 {
    largest_nodes(job).saturating_mul(job.dim() * 4).saturating_mul(job.steps_in_flight as u64)
}

/// The smallest memory of gathering: one batch in addition to those of steps in flight, without a cache.
fn least_gathering(job: &JobOutline) -> u64 {
    let depth = 1 + job.steps_in_flight as u64;
    // A superbatch may have both, so the largest sample need not be that with most rows.
    let (nodes, sample_bytes) = (largest_nodes(job), largest(job, |bound| bound.sample_bytes));
    let rows = nodes.saturating_mul(job.dim() * 4).saturating_mul(depth);
    rows.saturating_add(gathering_bytes(job, nodes, sample_bytes, depth))
}

/// The smallest memory that ginex needs, line by line.
pub(super) fn memory(job: &JobOutline) -> MemoryTable {
    let mut table = lasting(job);
    let (sampling, gathering) = (least_sampling(job), least_gathering(job));
    let turns = format!("in turn: sampling {}, gathering {}", ByteCount(sampling), ByteCount(gathering));
    table.add(turns, sampling.max(gathering));
    table
}

/// How the granted memory is used.
#[derive(Debug, Clone)]
pub(super) struct Sizes {
    /// Number of sampling threads.
    pub workers: usize,
    /// Memory of all samplers together.
    pub sampling_bytes: u64,
    /// Memory of neighbours.
    pub lists: NeighbourBudget,
    /// Memory of a phase.
    pub phase_bytes: u64,
    /// Largest number of slots for which there is memory to plan.
    pub most_slots: u64,
    /// Batches per superbatch.
    pub superbatch: u64,
    /// Disk budget of one superbatch.
    pub disk_bytes: u64,
    /// Upper bound of its files by the size of batches, for messages.
    pub likely_disk_bytes: u64,
}

impl Sizes {
    /// For a job without training.
    pub fn none() -> Sizes {
        Sizes {
            workers: 1,
            sampling_bytes: 0,
            lists: NeighbourBudget::default(),
            phase_bytes: 0,
            most_slots: 0,
            superbatch: 1,
            disk_bytes: 0,
            likely_disk_bytes: 0,
        }
    }

    /// `batch_disk_bytes` is the approximate size of a batch's files. `batches` are those of an epoch and of the run.
    pub fn new(job: &JobOutline, batch_disk_bytes: u64, batches: (u64, u64)) -> Result<Sizes> {
        let phase_bytes = job.strategy_bytes.saturating_sub(lasting(job).total());
        // Two superbatches are on disk at a time.
        let disk_bytes = job.disk_bytes_left() / 2;
        let by_disk = (disk_bytes / batch_disk_bytes.max(1)).max(1);
        let (epoch, run) = batches;
        let superbatch = Sizes::superbatch_of(job, epoch, run, by_disk);
        let worker_bytes = worker_bytes(job);
        let left = phase_bytes.saturating_sub(planner_bytes(job, 0, superbatch, largest_nodes(job)));
        let left = left.saturating_sub(writing_bytes(job)).saturating_sub(ahead_bytes(job));
        let left = left.saturating_sub(history::marks_bytes(job, superbatch));
        // A plan takes a few bytes per slot. It is made during sampling.
        let row_bytes = job.dataset.manifest().nodes.features.as_ref().map_or(0, |f| f.dim * f.dtype.bytes());
        let by_memory = job.dataset.manifest().nodes.count.min(phase_bytes / row_bytes.max(1));
        let most_slots = by_memory.min(left.saturating_sub(worker_bytes) / SLOT_BYTES);
        let left = left.saturating_sub(most_slots * SLOT_BYTES);
        let workers = (left / 2 / worker_bytes.max(1)).clamp(1, job.threads.max(1) as u64);
        let left = left.saturating_sub(workers * worker_bytes);
        let lists = NeighbourBudget::within(job, left, phase_bytes)?;
        let lists = NeighbourBudget { samplers: workers as usize, ..lists };
        Ok(Sizes {
            workers: workers as usize,
            sampling_bytes: workers * worker_bytes,
            lists,
            phase_bytes,
            most_slots,
            superbatch,
            disk_bytes,
            likely_disk_bytes: disk_bytes,
        })
    }

    /// Batches per superbatch: as asked, or those of an epoch with the validation after it, `epoch`. `run` are those of
    /// the run, `by_disk` what the disk budget holds.
    fn superbatch_of(job: &JobOutline, epoch: u64, run: u64, by_disk: u64) -> u64 {
        let asked = job.out_of_core.superbatch.unwrap_or(epoch.max(FEW_BATCHES));
        asked.min(by_disk).min(run).max(1)
    }

    /// Largest size of a superbatch's files: the bounds of its batches, within the budget.
    pub fn most_on_disk<W: StoredId + StoredRow>(&self, job: &JobOutline) -> u64 {
        files_bytes::<W>(job, self.superbatch).min(self.disk_bytes)
    }

    /// Batches in memory and slots of the cache for a sampled superbatch. `largest` is the largest number of rows in
    /// one of its batches, `sample_bytes` the largest size of a sample.
    pub fn gathering(&self, job: &JobOutline, largest: u64, sample_bytes: u64) -> Result<(usize, u64)> {
        let features = job.dataset.manifest().nodes.features.as_ref();
        let row_bytes = features.map_or(0, |features| features.dim * features.dtype.bytes());
        let step = job.larger_step_bytes(largest);
        let needed = |depth: u64| {
            depth * largest * job.dim() * 4 + gathering_bytes(job, largest, sample_bytes, depth) + step
        };
        let asked = job.out_of_core.feature_cache_bytes;
        // Prefetched batches take precedence over cached rows, as long as they leave a good part of the memory to the
        // cache.
        let most = |depth: u64| {
            needed(depth) + asked.unwrap_or(0) <= self.phase_bytes / 4 * if asked.is_some() { 4 } else { 3 }
        };
        let least = 1 + job.steps_in_flight as u64;
        let depth = (least + 1..least + MOST_DEPTH as u64).rev().find(|depth| most(*depth)).unwrap_or(least);
        if needed(depth) > self.phase_bytes {
            // Larger than the pilot's batches.
            let (batch, needed, left) = (job.largest_batch, needed(depth), self.phase_bytes);
            let (needed, left) = (ByteCount(needed), ByteCount(left));
            return Err(StrategyError::BatchMemory { batch, needed, left });
        }
        let left = self.phase_bytes - needed(depth);
        let bytes = match asked {
            Some(asked) if asked > left => {
                return Err(StrategyError::Cache {
                    flag: "--feature-cache",
                    asked: ByteCount(asked),
                    left: ByteCount(left),
                });
            }
            asked => asked.unwrap_or(left),
        };
        let slots = (bytes / row_bytes.max(1)).min(self.most_slots).min(MOST_SLOTS as u64);
        Ok((depth as usize, slots))
    }
}

/// The most that its files may take on disk: two superbatches, and the samples of evaluations, which are kept.
pub(super) fn most_on_disk(job: &JobOutline) -> u64 {
    if job.largest_batch == 0 {
        return 0;
    }
    let budget = job.disk_bytes_left();
    let of = |batches: u64| match word_bytes(job) {
        8 => files_bytes::<u64>(job, batches),
        _ => files_bytes::<u32>(job, batches),
    };
    let evaluated = job.evaluation.as_ref().map_or(0, |evaluation| evaluation.batches);
    let epoch = job.epoch_batches.saturating_add(evaluated);
    let run = epoch.saturating_mul(job.epochs.max(1));
    let by_disk = (budget / 2 / of(1).max(1)).max(1);
    let superbatch = Sizes::superbatch_of(job, epoch, run, by_disk);
    // A run of one superbatch has no second one.
    let superbatches = of(superbatch).saturating_mul(run.div_ceil(superbatch).min(2));
    let files = superbatches.saturating_add(of(evaluated).min(budget / KEPT_PART)).min(budget);
    files.saturating_add(job.adjacency_disk_bytes()).min(job.out_of_core.disk_bytes)
}

/// The most that files of so many batches take on disk.
fn files_bytes<W: StoredId + StoredRow>(job: &JobOutline, batches: u64) -> u64 {
    let nodes = largest_nodes(job).saturating_mul(batches);
    let edges = largest(job, |bound| bound.edges).saturating_mul(batches);
    disk_bytes::<W>(batches, nodes, edges.saturating_mul(super::EDGE_BYTES))
}

/// Bytes on disk of some batches' files: a trace of about three bytes per edge, an access and a word per node. During
/// planning there are also the counts of rows that each later batch accesses next.
pub(super) fn disk_bytes<W: StoredId + StoredRow>(batches: u64, nodes: u64, trace_bytes: u64) -> u64 {
    let counts =
        nodes.min(batches.saturating_mul(batches) / 2) * size_of::<esker_plan::RequestCount>() as u64;
    let rows = nodes.saturating_mul(AccessFile::<W>::BYTES + PlanFile::BYTES);
    trace_bytes.saturating_add(rows).saturating_add(counts)
}
