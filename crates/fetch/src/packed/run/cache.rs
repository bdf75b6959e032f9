//! The cache of a run. It is what the plan says it is before a batch: either because the batch before it was assembled, or
//! because it was restored from the plan and the features.

use super::super::{PackCounters, file};
use super::{LapEntry, RunRows};
use crate::{DiskRows, FetchError, HostCache, Missed, Result, RowReader};
use esker_plan::{Placement, Placements};
use esker_types::NodeId;
use rayon::ThreadPool;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Rows that are restored at a time, and the most bytes that they take.
const ROWS_AT_A_TIME: usize = 8192;
const BYTES_AT_A_TIME: u64 = 8 << 20;

/// Slots for feature rows, with the batch that they are for.
pub struct RunCache {
    run: Arc<RunRows>,
    cache: HostCache,
    features: Arc<DiskRows>,
    reader: RowReader,
    /// The batch that comes next, if any was assembled. After the last one of a lap it is the one after it.
    next: Option<(usize, usize)>,
}

/// Rows that are being restored.
struct Restoring<'a> {
    cache: &'a mut HostCache,
    reader: &'a mut RowReader,
    dim: usize,
    row_bytes: usize,
    /// A bit per slot that has its row.
    filled: Vec<u64>,
    left: u64,
    /// Rows to read, and their slots.
    waiting: Vec<(u64, u32)>,
    values: Vec<f32>,
}

impl RunCache {
    /// An empty cache. It stays on the thread that made it.
    pub fn new(run: Arc<RunRows>, features: &Arc<DiskRows>) -> Result<RunCache> {
        let cache = HostCache::new(run.plan.layout.slots, features.format());
        Ok(RunCache { cache, run, reader: features.reader()?, features: features.clone(), next: None })
    }

    /// Memory in addition to the rows, for batches of up to `nodes` nodes with rows of `dim` numbers.
    pub fn bytes_for(slots: u64, nodes: u64, dim: u64, repeats: bool) -> u64 {
        let rows = at_a_time(dim);
        // A bit per slot, kept rows of a batch with their slots, and rows that are read. Laps: where each row comes from.
        let moving = if repeats { slots * 4 + slots / 8 } else { 0 };
        let restoring = slots / 8 + nodes * (8 + 4) + rows * (dim * 4 + 2 * 16 + 8 + 4);
        moving + restoring + DiskRows::reader_bytes(rows)
    }

    /// Assembles a batch as f32, with the threads of a pool, and keeps the rows that the plan keeps. Returns what had to be read to restore the cache, if this batch does not follow the last one.
    pub fn assemble(
        &mut self,
        number: usize,
        placements: &Placements,
        missed: &[u8],
        values: &mut [f32],
        pool: &ThreadPool,
    ) -> Result<PackCounters> {
        let read = self.go_to(number)?;
        let (format, cache) = (self.features.format(), &mut self.cache);
        pool.install(|| cache.assemble_and_keep(placements, Missed::Buffer(missed), format, values));
        self.next = Some((self.run.entries[number].lap as usize, number + 1));
        Ok(read)
    }

    /// Makes the cache what it is before a batch.
    fn go_to(&mut self, number: usize) -> Result<PackCounters> {
        let lap = self.run.entries[number].lap as usize;
        let LapEntry { first, batches, around, .. } = self.run.laps[lap];
        if self.next == Some((lap, number)) {
            return Ok(PackCounters::default());
        }
        // The last batch of a lap comes before its first one.
        if number as u64 == first && self.next == Some((lap, (first + batches) as usize)) {
            if around > 0 {
                let ends = self.ends(lap)?;
                self.cache.rearrange(&ends);
            }
            return Ok(PackCounters::default());
        }
        let before = self.reader.counters();
        self.restore(lap, number)?;
        let after = self.reader.counters();
        Ok(PackCounters { reads: after.reads - before.reads, bytes: after.read_bytes - before.read_bytes })
    }

    /// Where the rows that stay are at the end of a lap. In slot `i` at its start is row `i` of them.
    fn ends(&self, lap: usize) -> Result<Vec<u32>> {
        let (entry, mut ends) = (&self.run.laps[lap], Vec::new());
        self.run.kept.read(entry.around_at, entry.around as usize, &mut ends)?;
        let valid = ends.iter().all(|slot| (*slot as u64) < self.run.plan.layout.slots);
        match valid && xxh3_64(bytemuck::cast_slice(&ends)) == entry.ends_sum {
            true => Ok(ends),
            false => Err(self.run.damaged_lap(lap, file::KEPT)),
        }
    }

    /// Reads every row that the plan has put in a slot before this batch. A slot has the row that came last, so batches
    /// are gone through backwards.
    fn restore(&mut self, lap: usize, number: usize) -> Result<()> {
        let run = self.run.clone();
        let (entry, format) = (run.laps[lap], self.features.format());
        let slots = run.plan.layout.slots;
        let mut restoring = Restoring {
            cache: &mut self.cache,
            reader: &mut self.reader,
            dim: format.dim(),
            row_bytes: format.row_bytes(),
            filled: vec![0; slots.div_ceil(64) as usize],
            left: slots,
            waiting: Vec::new(),
            values: Vec::new(),
        };
        let (mut kept, mut rows) = (Vec::new(), Vec::new());
        for at in (entry.first as usize..number).rev() {
            let entry = &run.entries[at];
            if restoring.left == 0 {
                break;
            }
            run.kept.read(entry.kept_at, entry.kept as usize, &mut kept)?;
            if xxh3_64(bytemuck::cast_slice(&kept)) != entry.kept_sum {
                return Err(run.damaged(at, file::KEPT, "slots"));
            }
            if run.kept_rows(entry.kept_at, entry.kept, &mut rows)? != entry.kept_rows_sum {
                return Err(run.damaged(at, file::KEPT_ROWS, "rows that are kept"));
            }
            restoring.add(rows.iter().copied().zip(kept.iter().copied()))?;
        }
        // Before the first batch there are the rows that stay from lap to lap.
        if run.kept_rows(entry.around_at, entry.around, &mut rows)? != entry.around_sum {
            return Err(run.damaged_lap(lap, file::KEPT_ROWS));
        }
        restoring.add(rows.iter().copied().zip(0..))?;
        restoring.read()
    }
}

/// Rows of `dim` numbers that are restored at a time.
fn at_a_time(dim: u64) -> u64 {
    (BYTES_AT_A_TIME / (dim * 4).max(1)).clamp(1, ROWS_AT_A_TIME as u64)
}

impl Restoring<'_> {
    /// Adds rows with their slots, except for slots that have a row.
    fn add(&mut self, rows: impl Iterator<Item = (u64, u32)>) -> Result<()> {
        for (row, slot) in rows {
            let (word, bit) = (&mut self.filled[slot as usize / 64], 1u64 << (slot % 64));
            if *word & bit != 0 {
                continue;
            }
            *word |= bit;
            self.left -= 1;
            self.waiting.push((row, slot));
            if self.waiting.len() as u64 == at_a_time(self.dim as u64) {
                self.read()?;
            }
        }
        Ok(())
    }

    /// Reads the rows that wait into their slots.
    fn read(&mut self) -> Result<()> {
        self.waiting.sort_unstable();
        let nodes: Vec<NodeId> = self.waiting.iter().map(|(row, _)| NodeId(*row)).collect();
        let words = vec![Placement::Read(0).encode(); nodes.len()];
        self.values.resize(nodes.len() * self.dim, 0.0);
        self.reader.read(&nodes, &Placements { words, kept: Vec::new() }, &mut self.values)?;
        let stored: &[u8] = bytemuck::cast_slice(&self.values);
        for ((_, slot), row) in self.waiting.iter().zip(stored.chunks_exact((self.dim * 4).max(1))) {
            self.cache.put(*slot, &row[..self.row_bytes]);
        }
        self.waiting.clear();
        Ok(())
    }
}

impl RunRows {
    /// Reads ids of kept rows, and returns their checksum.
    fn kept_rows(&self, first: u64, count: u64, rows: &mut Vec<u64>) -> Result<u64> {
        let mut bytes = Vec::new();
        self.kept_rows.read(first * self.id_bytes, (count * self.id_bytes) as usize, &mut bytes)?;
        rows.clear();
        match self.id_bytes {
            8 => rows.extend(bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned::<u64>)),
            _ => rows.extend(bytes.chunks_exact(4).map(|id| bytemuck::pod_read_unaligned::<u32>(id) as u64)),
        }
        Ok(xxh3_64(&bytes))
    }

    fn damaged_lap(&self, lap: usize, name: &str) -> FetchError {
        let path = self.directory.join(format!("{name}.bin"));
        FetchError::Damaged { path, what: format!("the rows that stay after lap {lap}") }
    }
}
