//! How diskgnn shares out its memory. Before training phases take turns: sampling, laying out, packing. While it trains,
//! batches ahead get what they need and the rows accessed most get the rest.

use crate::direct::{self, sampler_bytes};
use crate::neighbours::NeighbourBudget;
use crate::{JobOutline, MemoryTable, Result, StrategyError};
use esker_fetch::packed::{EpochSampled, Largest, PackWriter, Packed, Packing};
use esker_plan::Hottest;
use esker_sample::DiskGraph;
use esker_types::ByteCount;

/// Samples of a thread that samples in bulk: made, waiting, looked at.
const WORKER_SAMPLES: u64 = 4;
/// What logging samples keeps beside their records: three arrays being written.
const LOG_BYTES: u64 = 8 << 20;
/// Batches whose rows are being read, for each worker: one, and one waiting or being assembled.
pub(super) const WORKER_BUFFERS: usize = 2;
/// Samples of a worker beside the batches in memory: being loaded, being read, waiting.
pub(super) const WORKER_PREFETCH: usize = 3;
/// Bytes of a block of packed rows, which has a checksum in memory.
const BLOCK_BYTES: u64 = 64 << 10;
/// Batches that are counted with before it is known how many there are.
const FEW_BATCHES: u64 = 1024;

fn lasting(job: &JobOutline) -> MemoryTable {
    let mut table = MemoryTable::default();
    table.add("offsets of neighbours", DiskGraph::bytes_for(&job.dataset, job.direction));
    direct::add_memory(job, &mut table);
    table
}

/// One thread that samples, and the log.
fn least_sampling(job: &JobOutline) -> u64 {
    let bound = job.bound(&job.settings, job.largest_batch);
    let log = LOG_BYTES.saturating_add(bound.sample_bytes).saturating_add(bound.nodes.saturating_mul(8));
    // Where the disk says how many epochs there are, accesses of the first are counted while lists are in memory.
    let is_open = job.epochs_sampled.is_none() && job.epochs > 1;
    let counts = if is_open { Hottest::bytes_for(job.dataset.manifest().nodes.count) } else { 0 };
    sampler_bytes(job, &bound, WORKER_SAMPLES).saturating_add(log).saturating_add(counts)
}

/// Laying out and packing.
fn least_packing(job: &JobOutline) -> u64 {
    let bound = job.bound(&job.settings, job.largest_batch);
    let nodes = job.dataset.manifest().nodes.count;
    // One epoch is packed at least; what more of them take is known when they are sampled, and checked then. No more than every
    // row of every batch, and no more than the disk takes.
    let rows_bytes = bound.nodes.saturating_mul(job.row_bytes()).saturating_add(BLOCK_BYTES);
    let packed_bytes = job.epoch_batches.saturating_mul(rows_bytes).min(job.out_of_core.disk_bytes);
    let threads = job.threads.max(1) as u64;
    PackWriter::memory_bytes(nodes, job.row_bytes(), FEW_BATCHES, bound.nodes, packed_bytes, threads)
}

/// Bytes of so many workers and batches in memory, nothing cached.
fn training_bytes(
    job: &JobOutline,
    largest: &Largest,
    blocks: u64,
    batches: u64,
    workers: u64,
    depth: u64,
    device: bool,
) -> u64 {
    let row_bytes = job.row_bytes();
    let fresh = Packed::rows_bytes_for(largest, row_bytes);
    let list = largest.nodes.saturating_mul(4).saturating_add(largest.shared_rows.saturating_mul(4));
    let samples = (depth.next_multiple_of(workers.max(1)) + workers * WORKER_PREFETCH as u64)
        .saturating_mul(largest.sample_bytes.saturating_add(list));
    let readers =
        workers.saturating_mul(Packed::loader_bytes(largest).saturating_add(Packed::reader_bytes(largest)));
    // A processor that assembles by itself is handed what was read; else there are rows in memory, too.
    let (fresh_count, rows) = match device {
        true => (depth + workers, 0),
        false => (workers * WORKER_BUFFERS as u64, largest.nodes.saturating_mul(job.dim() * 4)),
    };
    samples
        .saturating_add(readers)
        .saturating_add(fresh.saturating_mul(fresh_count))
        .saturating_add(rows.saturating_mul(depth))
        .saturating_add(Packed::index_bytes(batches, blocks))
}

/// The least that training takes, as far as it is known before batches are: samples, and the rows of one batch beside those of
/// steps ahead. What is read for it, and cached, is known when batches are, and checked then.
fn least_training(job: &JobOutline) -> u64 {
    let bound = job.bound(&job.settings, job.largest_batch);
    let (nodes, sample_bytes) = (bound.nodes, bound.sample_bytes);
    let largest =
        Largest { nodes, sample_bytes, record_bytes: sample_bytes / 2, packed_rows: 0, shared_rows: 0 };
    training_bytes(job, &largest, 0, FEW_BATCHES, 1, 1 + job.steps_in_flight as u64, false)
}

/// The least that diskgnn needs, line by line.
pub(super) fn memory(job: &JobOutline) -> MemoryTable {
    let mut table = lasting(job);
    let (sampling, packing, training) = (least_sampling(job), least_packing(job), least_training(job));
    let turns = format!(
        "in turn: sampling {}, packing {}, training {}",
        ByteCount(sampling),
        ByteCount(packing),
        ByteCount(training)
    );
    table.add(turns, sampling.max(packing).max(training));
    table
}

/// How training uses memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Training {
    /// Batches that are read at a time.
    pub workers: usize,
    /// Batches whose rows are held.
    pub depth: usize,
}

/// How the memory granted is used.
#[derive(Debug, Clone)]
pub(super) struct Sizes {
    /// What a phase may hold.
    pub phase_bytes: u64,
    /// Threads that sample, and what they may hold together.
    pub samplers: usize,
    pub sampling_bytes: u64,
    pub lists: NeighbourBudget,
    /// What the processor's own memory may hold of rows.
    pub device_bytes: u64,
}

impl Sizes {
    pub fn new(job: &JobOutline, device_bytes: u64) -> Result<Sizes> {
        let phase_bytes = job.strategy_bytes.saturating_sub(lasting(job).total());
        let bound = job.bound(&job.settings, job.largest_batch);
        let worker_bytes = sampler_bytes(job, &bound, WORKER_SAMPLES);
        let left = phase_bytes.saturating_sub(least_sampling(job) - worker_bytes);
        let samplers = (left / 2 / worker_bytes.max(1)).clamp(1, job.threads.max(1) as u64);
        let left = left.saturating_sub(samplers * worker_bytes);
        let lists = NeighbourBudget::within(job, left, phase_bytes)?;
        Ok(Sizes {
            phase_bytes,
            samplers: samplers as usize,
            sampling_bytes: samplers * worker_bytes,
            lists,
            device_bytes,
        })
    }

    /// Workers and batches in memory, and what they take, for batches that are known: the most that `room` has room for, else the least.
    fn shared_out(
        &self,
        job: &JobOutline,
        largest: &Largest,
        blocks: u64,
        batches: u64,
        room: u64,
    ) -> (Training, u64) {
        let device = self.device_bytes > 0;
        let ahead = job.steps_in_flight as u64;
        let needed = |workers: u64, depth: u64| {
            training_bytes(job, largest, blocks, batches, workers, depth + ahead, device)
        };
        let wishes = [(2, 3), (2, 2), (1, 2)];
        let wish = wishes.into_iter().find(|(workers, depth)| needed(*workers, *depth) <= room);
        let (workers, depth) = wish.filter(|_| !job.out_of_core.sequential).unwrap_or((1, 1));
        let training = Training { workers: workers as usize, depth: (depth + ahead) as usize };
        (training, needed(workers, depth))
    }

    /// Rows to set aside for memory, once batches are known but not how many of their rows are on disk.
    pub fn slots(&self, job: &JobOutline, largest: &Largest, batches: u64) -> Result<u64> {
        // At worst all are.
        let largest = Largest { packed_rows: largest.nodes, ..*largest };
        let row_bytes = job.row_bytes().max(1);
        let blocks = batches * (largest.nodes * row_bytes / BLOCK_BYTES + 1);
        // Batches ahead before rows cached, as long as they leave a good part of the memory to the cache.
        let asked = job.out_of_core.feature_cache_bytes;
        let room = match asked {
            Some(asked) => self.phase_bytes.saturating_sub(asked.saturating_sub(self.device_bytes)),
            None => self.phase_bytes / 4 * 3,
        };
        let (_, needed) = self.shared_out(job, &largest, blocks, batches, room);
        if needed > self.phase_bytes {
            return Err(too_little(job, needed, self.phase_bytes));
        }
        let most = self.phase_bytes - needed + self.device_bytes;
        match asked {
            Some(asked) if asked > most => Err(StrategyError::request(
                format!(
                    "a feature cache of {} is asked for, and {} are left for it",
                    ByteCount(asked),
                    ByteCount(most)
                ),
                "take a smaller --feature-cache, or allow more memory",
            )),
            asked => Ok(asked.unwrap_or(most) / row_bytes),
        }
    }

    /// Whether laying out and packing what is known now fit; an error with what would do where not.
    pub fn check_packing(&self, job: &JobOutline, sampled: &EpochSampled, packed_bytes: u64) -> Result<()> {
        let nodes = job.dataset.manifest().nodes.count;
        let (batches, largest, threads) = (sampled.batches, sampled.largest.nodes, job.threads.max(1) as u64);
        let needed =
            PackWriter::memory_bytes(nodes, job.row_bytes(), batches, largest, packed_bytes, threads);
        if needed > self.phase_bytes { Err(too_little(job, needed, self.phase_bytes)) } else { Ok(()) }
    }

    /// Workers and batches in memory for rows that are packed; an error where they do not fit any more.
    pub fn training(&self, job: &JobOutline, packing: &Packing) -> Result<Training> {
        let cached = (packing.slots * packing.row_bytes).saturating_sub(self.device_bytes);
        let blocks = packing.misses * packing.row_bytes / BLOCK_BYTES + packing.batches * 2;
        let room = self.phase_bytes.saturating_sub(cached);
        let (training, needed) = self.shared_out(job, &packing.largest, blocks, packing.batches, room);
        match needed <= room {
            true => Ok(training),
            false => Err(too_little(job, cached + needed, self.phase_bytes)),
        }
    }
}

/// Batches turned out larger than there is memory for.
fn too_little(job: &JobOutline, needed: u64, phase_bytes: u64) -> StrategyError {
    StrategyError::request(
        format!(
            "batches of {} seeds were sampled, and packing or training on them takes {} where {} are left for it",
            job.largest_batch,
            ByteCount(needed),
            ByteCount(phase_bytes)
        ),
        format!(
            "allow {} more ({} bytes) with --memory, or take a smaller batch, fan-out or --feature-cache",
            ByteCount(needed - phase_bytes).flag_value(),
            needed - phase_bytes
        ),
    )
}
