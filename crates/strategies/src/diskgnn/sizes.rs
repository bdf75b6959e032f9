//! The memory budget of diskgnn. Before training the phases sampling, laying out and packing take turns. During
//! training, prefetched batches get what they need and the cache of the most accessed rows gets the rest.

use crate::direct::{self, sampler_bytes};
use crate::neighbours::NeighbourBudget;
use crate::{JobOutline, MemoryTable, Result, StrategyError};
use esker_fetch::packed::{EpochSampled, Largest, PackWriter, Packed, Packing};
use esker_plan::{Coverage, Hottest};
use esker_sample::{AnyTopology, Bound, DiskGraph};
use esker_types::{ByteCount, NodeId};

/// Samples per bulk sampling thread: made, waiting, read.
const WORKER_SAMPLES: u64 = 4;
/// Memory of the sample log apart from records: three arrays being written.
const LOG_BYTES: u64 = 8 << 20;
/// Samples per worker in addition to the batches in memory: being loaded, being read, waiting.
pub(crate) const WORKER_PREFETCH: usize = 3;
/// Most workers for a device with its own memory, and the part of a phase's memory that more than two may take from
/// cached rows.
const MOST_WORKERS: usize = 12;
const WORKERS_PART: u64 = 16;
/// How often the number of cached rows is raised by what fewer misses leave.
const SLOT_TURNS: usize = 4;
/// A sampler with the whole adjacency in memory does the work of this many that read some of it from disk, and nothing
/// has to be counted, chosen and copied for a cache before.
const RESIDENT_SPEED: u64 = 4;
/// Bytes per block of packed rows. Each block has a checksum in memory.
pub(crate) const BLOCK_BYTES: u64 = 64 << 10;
/// Assumed number of batches before it is known.
const FEW_BATCHES: u64 = 1024;

pub(crate) fn lasting(job: &JobOutline) -> MemoryTable {
    let mut table = MemoryTable::default();
    table.add("offsets of neighbours", DiskGraph::bytes_for(&job.dataset, job.direction));
    if job.largest_batch == 0 {
        direct::add_memory(job, &mut table);
    }
    table
}

/// Memory of one sampling thread and the log.
pub(crate) fn least_sampling(job: &JobOutline) -> u64 {
    let bound = job.largest_bound();
    let log = LOG_BYTES.saturating_add(bound.sample_bytes).saturating_add(bound.nodes.saturating_mul(8));
    // If the disk determines the number of epochs, accesses of the first epoch are counted while neighbours are in
    // memory.
    let is_open = job.epochs_sampled.is_none() && job.epochs > 1;
    let counts = if is_open { Hottest::bytes_for(job.dataset.manifest().nodes.count) } else { 0 };
    sampler_bytes(job, &bound, WORKER_SAMPLES).saturating_add(log).saturating_add(counts)
}

/// Memory of laying out and packing.
pub(crate) fn least_packing(job: &JobOutline) -> u64 {
    let bound = job.largest_bound();
    let nodes = job.dataset.manifest().nodes.count;
    // At least one epoch is packed. The size of further epochs is known, and checked, after they are sampled. The bound
    // is every row of every batch, within the disk budget.
    let rows_bytes = bound.nodes.saturating_mul(job.row_bytes()).saturating_add(BLOCK_BYTES);
    let packed_bytes = job.epoch_batches.saturating_mul(rows_bytes).min(job.out_of_core.disk_bytes);
    let threads = job.threads.max(1) as u64;
    PackWriter::memory_bytes(nodes, job.row_bytes(), FEW_BATCHES, bound.nodes, packed_bytes, threads)
}

/// Bytes for this many workers and batches in memory, without a cache.
fn training_bytes(
    job: &JobOutline,
    largest: &Largest,
    blocks: u64,
    batches: u64,
    training: Training,
    device: bool,
) -> u64 {
    let row_bytes = job.row_bytes();
    let (workers, depth) = (training.workers as u64, training.depth as u64);
    let missed = Packed::rows_bytes_for(largest, row_bytes);
    let list = largest.nodes.saturating_mul(4).saturating_add(largest.shared_rows.saturating_mul(4));
    let samples = (depth.next_multiple_of(workers.max(1)) + workers * WORKER_PREFETCH as u64)
        .saturating_mul(largest.sample_bytes.saturating_add(list));
    let readers =
        workers.saturating_mul(Packed::loader_bytes(largest).saturating_add(Packed::reader_bytes(largest)));
    // If the device assembles, it gets the rows that were read. Otherwise there are also assembled rows in memory.
    let (missed_count, rows) = match device {
        true => (depth + workers, 0),
        false => (workers * training.buffers as u64, largest.nodes.saturating_mul(job.dim() * 4)),
    };
    let graphs = match training.stages_graphs {
        true => staged_bytes(job, largest).saturating_mul(depth + workers),
        false => 0,
    };
    samples
        .saturating_add(graphs)
        .saturating_add(readers)
        .saturating_add(missed.saturating_mul(missed_count))
        .saturating_add(rows.saturating_mul(depth))
        .saturating_add(Packed::index_bytes(batches, blocks))
        .saturating_add(job.larger_step_bytes(largest.nodes))
}

/// Bytes of the graphs of a batch's layers as a device takes them. A layer has at most all neighbours, and an offset and
/// a degree per node.
fn staged_bytes(job: &JobOutline, largest: &Largest) -> u64 {
    let node_bytes = size_of::<NodeId>() as u64;
    let neighbours = largest.sample_bytes.saturating_sub(largest.nodes.saturating_mul(node_bytes));
    let words = neighbours.saturating_add(largest.nodes.saturating_mul(8));
    let layers = job.settings.fanouts.len().max(1) as u64;
    // The largest layer has most of them: the others are hops nearer to the seed nodes. Pinned memory is rounded up.
    let pinned = |bytes: u64| bytes.saturating_add(bytes / 4);
    pinned(words).saturating_mul(layers)
}

/// The largest batch of evaluation, none of whose rows are cached.
fn evaluated(job: &JobOutline) -> Option<Largest> {
    job.evaluation_bound().map(|bound| largest_of(&bound))
}

fn largest_of(bound: &Bound) -> Largest {
    let Bound { nodes, sample_bytes, .. } = *bound;
    Largest { nodes, sample_bytes, record_bytes: sample_bytes, packed_rows: nodes, shared_rows: 0 }
}

/// The largest batch, before any is known. A training batch misses no row if the device caches those of all nodes. An
/// evaluation accesses rows that training does not: these are not cached.
fn expected(job: &JobOutline) -> Largest {
    let training = without_cached(job, largest_of(&job.training_bound()));
    evaluated(job).map_or(training, |evaluated| training.max(&evaluated))
}

/// A training batch with the rows that it may miss: none, if the device caches those of all nodes.
fn without_cached(job: &JobOutline, largest: Largest) -> Largest {
    Largest { packed_rows: if job.caches_all_on_device() { 0 } else { largest.packed_rows }, ..largest }
}

/// The smallest memory of training: one batch in addition to those of steps in flight, none of whose rows are cached.
/// If evaluations cannot be packed, they read rows one by one, in turn with training.
pub(crate) fn least_training(job: &JobOutline) -> u64 {
    let bound = job.largest_bound();
    let batches = FEW_BATCHES.max(job.epoch_batches.saturating_mul(job.epochs_sampled.unwrap_or(1)));
    let blocks = batches.saturating_mul(bound.nodes.saturating_mul(job.row_bytes()) / BLOCK_BYTES + 2);
    // A device that caches rows assembles batches, so that there are no assembled rows in host memory.
    let (least, device) = (Training::least(job), job.device_cache_bytes > 0);
    let training = training_bytes(job, &expected(job), blocks, batches, least, device);
    training.max(direct::memory_bytes(job))
}

/// The smallest memory that diskgnn needs, line by line. Before the first step, the memory of steps is free.
pub(crate) fn memory(job: &JobOutline) -> MemoryTable {
    let mut table = lasting(job);
    let (sampling, packing, training) = (least_sampling(job), least_packing(job), least_training(job));
    let turns = format!(
        "in turn: sampling {}, packing {}, training {}",
        ByteCount(sampling),
        ByteCount(packing),
        ByteCount(training)
    );
    let before = sampling.max(packing).saturating_sub(job.room.step_bytes);
    table.add(turns, before.max(training));
    table
}

/// The most that samples and packed rows may take on disk: no row is cached. Without explicit epochs, the disk budget
/// determines their number.
pub(crate) fn most_on_disk(job: &JobOutline) -> u64 {
    if job.largest_batch == 0 {
        return 0;
    }
    let batch = |bound: &Bound| {
        let rows = bound.nodes.saturating_mul(job.row_bytes()).next_multiple_of(BLOCK_BYTES);
        rows.saturating_add(bound.sample_bytes).saturating_add(bound.nodes * 12)
    };
    let epochs = job.epochs_sampled.unwrap_or(job.epochs);
    let trained = batch(&job.training_bound()).saturating_mul(job.epoch_batches.saturating_mul(epochs));
    let evaluation = job.evaluation.as_ref().map_or(0, |evaluation| evaluation.batches);
    let evaluated = job.evaluation_bound().map_or(0, |bound| batch(&bound).saturating_mul(evaluation));
    trained.saturating_add(evaluated).min(job.out_of_core.disk_bytes)
}

/// How many rows the largest batch reads at most, before it is known.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MissBound<'a> {
    /// All of its rows.
    All,
    /// In proportion to the misses of all batches, with a margin. Rows that are laid out show whether it holds.
    ByCoverage(&'a Coverage),
}

/// Batches differ: the largest one misses at most this many times the share that all of them miss. Those of evaluation
/// have other seed nodes.
const MORE_MISSES: u64 = 2;
const MORE_EVALUATION_MISSES: u64 = 3;

impl MissBound<'_> {
    /// A batch of at most `largest.nodes` rows, if `slots` rows are cached.
    fn of(&self, largest: &Largest, slots: u64, times: u64) -> Largest {
        let nodes = largest.nodes;
        let packed_rows = match self {
            MissBound::All => nodes,
            MissBound::ByCoverage(coverage) => {
                let (misses, accesses) = (coverage.misses(slots), coverage.misses(0).max(1));
                let share = nodes as u128 * misses as u128 * times as u128 / accesses as u128;
                // Small batches differ more.
                (share as u64).saturating_add(nodes / 32 + 64).min(nodes)
            }
        };
        Largest { packed_rows, ..*largest }
    }

    /// Whether the batches of packed rows are within it.
    pub fn holds(&self, packing: &Packing) -> bool {
        let bound = self.of(&packing.largest, packing.slots, MORE_MISSES);
        packing.largest.packed_rows.saturating_add(packing.largest.shared_rows) <= bound.packed_rows
    }
}

/// How training uses memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Training {
    /// Batches read at a time.
    pub workers: usize,
    /// Batches with rows in memory.
    pub depth: usize,
    /// Batches per worker whose missed rows are in memory: being read, and waiting or being assembled.
    pub buffers: usize,
    /// Whether workers copy the graphs of batches to memory that the device takes them from, ahead of the steps.
    pub stages_graphs: bool,
}

impl Training {
    /// One batch after the other, in addition to those of steps in flight.
    fn least(job: &JobOutline) -> Training {
        Training { workers: 1, depth: 1 + job.steps_in_flight, buffers: 1, stages_graphs: false }
    }
}

/// How the granted memory is used.
#[derive(Debug, Clone)]
pub(crate) struct Sizes {
    /// Memory of training.
    pub phase_bytes: u64,
    /// Memory of each phase before training. Steps do not use theirs yet.
    pub preparing_bytes: u64,
    /// Number of sampling threads, and their memory together.
    pub samplers: usize,
    pub sampling_bytes: u64,
    pub neighbours: NeighbourBudget,
    /// Memory on the device for cached rows.
    pub device_bytes: u64,
}

/// Number of sampling threads if the whole adjacency is in memory beside them: they have nothing to read. `None` if it
/// does not fit with one, or if the size of the cache is explicit.
fn resident_samplers(job: &JobOutline, left: u64, bound: &Bound) -> Option<u64> {
    let adjacency = AnyTopology::bytes_for(&job.dataset, job.direction);
    let room = left.checked_sub(adjacency).filter(|_| job.out_of_core.neighbour_cache_bytes.is_none())?;
    let samplers = (room / bound.bytes(WORKER_SAMPLES).max(1)).min(job.threads.max(1) as u64);
    (samplers > 0).then_some(samplers)
}

impl Sizes {
    pub fn new(job: &JobOutline, device_bytes: u64) -> Result<Sizes> {
        let phase_bytes = job.strategy_bytes.saturating_sub(lasting(job).total());
        let preparing_bytes = phase_bytes.saturating_add(job.room.step_bytes);
        let bound = job.largest_bound();
        let worker_bytes = sampler_bytes(job, &bound, WORKER_SAMPLES);
        let left = preparing_bytes.saturating_sub(least_sampling(job) - worker_bytes);
        let samplers = (left / 2 / worker_bytes.max(1)).clamp(1, job.threads.max(1) as u64);
        let resident =
            resident_samplers(job, left, &bound).filter(|resident| resident * RESIDENT_SPEED >= samplers);
        let (samplers, worker_bytes) = match resident {
            Some(resident) => (resident, bound.bytes(WORKER_SAMPLES)),
            None => (samplers, worker_bytes),
        };
        let left = left.saturating_sub(samplers * worker_bytes);
        let neighbours = NeighbourBudget::within(job, left, preparing_bytes)?;
        Ok(Sizes {
            phase_bytes,
            preparing_bytes,
            samplers: samplers as usize,
            sampling_bytes: samplers * worker_bytes,
            neighbours,
            device_bytes,
        })
    }

    /// Workers and batches in memory for known batches, and the bytes they take: the most that fit `room`, else the
    /// minimum. More than two workers take at most `part` bytes more than two.
    fn shared_out(
        &self,
        job: &JobOutline,
        largest: &Largest,
        blocks: u64,
        batches: u64,
        room: u64,
        part: u64,
    ) -> (Training, u64) {
        let device = self.device_bytes > 0;
        let ahead = job.steps_in_flight;
        let needed = |training: &Training| training_bytes(job, largest, blocks, batches, *training, device);
        let with = |workers: usize, depth: usize| {
            let stages_graphs = device && workers > 2;
            Training { workers, depth: depth + ahead, buffers: 2, stages_graphs }
        };
        // A device with its own memory takes batches faster than two workers load them.
        let most = if device { (job.threads * 3 / 4).min(MOST_WORKERS) } else { 0 };
        let spared = needed(&with(2, 3)).saturating_add(part);
        // Each worker may have a permit while the next batch in order waits for one.
        let more = (3..=most).rev().map(|workers| with(workers, workers + 1));
        let more = more.filter(|training| needed(training) <= spared);
        let fewer = [(2, 3), (2, 2), (1, 2), (1, 1)].map(|(workers, depth)| with(workers, depth));
        let fitting = more.chain(fewer).find(|training| needed(training) <= room);
        let training =
            fitting.filter(|_| !job.out_of_core.sequential).unwrap_or_else(|| Training::least(job));
        assert!(
            training.depth >= training.workers + ahead,
            "a permit for each worker, or they wait for ever"
        );
        (training, needed(&training))
    }

    /// Rows to set aside for memory, when batches are known but not how many of their rows are on disk.
    pub fn slots(
        &self,
        job: &JobOutline,
        largest: &Largest,
        batches: u64,
        bound: MissBound<'_>,
    ) -> Result<u64> {
        // Batches of evaluation are sampled later.
        let at_most = |bound: MissBound<'_>, slots: u64| {
            let trained = without_cached(job, bound.of(largest, slots, MORE_MISSES));
            let evaluated = evaluated(job).map(|batch| {
                let found = bound.of(&batch, slots, MORE_EVALUATION_MISSES);
                // Rows that training does not access are not cached, however many others are.
                Largest { packed_rows: found.packed_rows.max(batch.nodes / 4), ..found }
            });
            evaluated.map_or(trained, |evaluated| trained.max(&evaluated))
        };
        let worst = at_most(MissBound::All, 0);
        let row_bytes = job.row_bytes().max(1);
        let blocks = batches * (worst.nodes * row_bytes / BLOCK_BYTES + 1);
        // Prefetched batches take precedence over cached rows, as long as they leave a good part of the memory to the
        // cache.
        let asked = job.out_of_core.feature_cache_bytes;
        let room = match asked {
            Some(asked) => self.phase_bytes.saturating_sub(asked.saturating_sub(self.device_bytes)),
            None => self.phase_bytes / 4 * 3,
        };
        let part = self.phase_bytes / WORKERS_PART;
        let (training, _) = self.shared_out(job, &worst, blocks, batches, room, part);
        let device = self.device_bytes > 0;
        let needed = |largest: &Largest| {
            training_bytes(job, largest, blocks, batches, training, device).max(direct::memory_bytes(job))
        };
        if needed(&worst) > self.phase_bytes {
            return Err(too_little(job, needed(&worst), self.phase_bytes));
        }
        // The more rows are cached, the fewer are read, which leaves memory to more. Every turn is within the memory.
        let mut most = self.phase_bytes - needed(&worst) + self.device_bytes;
        for _ in 0..SLOT_TURNS {
            most = self.phase_bytes - needed(&at_most(bound, most / row_bytes)) + self.device_bytes;
        }
        match asked {
            Some(asked) if asked > most => Err(StrategyError::Cache {
                flag: "--feature-cache",
                asked: ByteCount(asked),
                left: ByteCount(most),
            }),
            asked => Ok(asked.unwrap_or(most) / row_bytes),
        }
    }

    /// What is left of the memory before training beside so many bytes.
    pub fn beside(&self, bytes: u64) -> Sizes {
        Sizes { preparing_bytes: self.preparing_bytes.saturating_sub(bytes), ..self.clone() }
    }

    /// Checks that laying out and packing these samples fit. The error names the size it needs.
    pub fn check_packing(&self, job: &JobOutline, sampled: &EpochSampled, packed_bytes: u64) -> Result<()> {
        let nodes = job.dataset.manifest().nodes.count;
        let (batches, largest, threads) = (sampled.batches, sampled.largest.nodes, job.threads.max(1) as u64);
        let needed =
            PackWriter::memory_bytes(nodes, job.row_bytes(), batches, largest, packed_bytes, threads);
        let left = self.preparing_bytes;
        if needed > left { Err(too_little(job, needed, left)) } else { Ok(()) }
    }

    /// Workers and batches in memory for packed rows. Fails if they do not fit any more.
    /// Evaluations use the same workers and the same memory, in turn with training.
    pub fn training(
        &self,
        job: &JobOutline,
        packing: &Packing,
        evaluations: &[&Packing],
    ) -> Result<Training> {
        let cached = (packing.slots * packing.row_bytes).saturating_sub(self.device_bytes);
        let (mut largest, mut blocks, mut batches) = (packing.largest, 0, 0);
        for packing in std::iter::once(packing).chain(evaluations.iter().copied()) {
            largest = largest.max(&packing.largest);
            blocks += packing.misses * packing.row_bytes / BLOCK_BYTES + packing.batches * 2;
            batches += packing.batches;
        }
        self.training_beside(job, cached, &largest, blocks, batches)
    }

    /// The same for batches of this size, with this many bytes for cached rows.
    pub fn training_beside(
        &self,
        job: &JobOutline,
        cached: u64,
        largest: &Largest,
        blocks: u64,
        batches: u64,
    ) -> Result<Training> {
        let room = self.phase_bytes.saturating_sub(cached);
        // The cached rows are chosen, so nothing else needs what is left.
        let (training, needed) = self.shared_out(job, largest, blocks, batches, room, room);
        match needed <= room {
            true => Ok(training),
            false => Err(too_little(job, cached + needed, self.phase_bytes)),
        }
    }
}

/// The error for batches that turned out larger than the memory.
pub(crate) fn too_little(job: &JobOutline, needed: u64, phase_bytes: u64) -> StrategyError {
    let (batch, needed, left) = (job.largest_batch, ByteCount(needed), ByteCount(phase_bytes));
    StrategyError::BatchMemory { batch, needed, left }
}
