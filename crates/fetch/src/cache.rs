//! A cache of feature rows in host memory, which also assembles batches. Hits come from the cache and misses from the
//! rows that were read, as the placements of the batch specify.

use crate::disk::Widener;
use crate::format::RowFormat;
use esker_io::{prefer_large_pages, prefetch};
use esker_plan::{Placement, Placements};
use rayon::prelude::*;

/// Rows per parallel task.
const CHUNK_ROWS: usize = 512;
/// Bytes per task when slots are filled.
const FILLED_BYTES: usize = 1 << 20;
/// Fewest kept rows per task.
const KEPT_ROWS: usize = 2048;
/// Rows prefetched ahead, and cache lines per row.
const PREFETCH_ROWS: usize = 8;
const PREFETCH_LINES: usize = 4;
const LINE_BYTES: usize = 64;
/// Batches larger than this have left the CPU's caches by the time they are trained on.
const CACHED_BYTES: usize = 32 << 20;

/// Slots for feature rows, as stored.
pub struct HostCache {
    rows: Vec<u8>,
    row_bytes: usize,
}

/// The missed rows of a batch after reading, as stored.
#[derive(Clone, Copy)]
pub enum Missed<'a> {
    /// Each at the start of its own row of the batch. This needs no second buffer, since no stored row is wider than
    /// its f32 row.
    InPlace,
    /// In a separate buffer, by the index in their placements.
    Buffer(&'a [u8]),
}

impl HostCache {
    /// A cache of zeros. The OS allocates memory as slots are filled.
    pub fn new(slots: u64, format: &RowFormat) -> HostCache {
        let mut rows = vec![0; slots as usize * format.row_bytes()];
        prefer_large_pages(&mut rows);
        HostCache { rows, row_bytes: format.row_bytes() }
    }

    /// Bytes of a cache.
    pub fn bytes_for(slots: u64, format: &RowFormat) -> u64 {
        slots * format.row_bytes() as u64
    }

    /// Copies rows, as stored, into slots from `first` on, with the threads of the current rayon pool: the kernel clears
    /// each page when it is first written.
    pub fn fill(&mut self, first: u64, stored: &[u8]) {
        let start = first as usize * self.row_bytes;
        let to = self.rows[start..start + stored.len()].par_chunks_mut(FILLED_BYTES);
        to.zip(stored.par_chunks(FILLED_BYTES)).for_each(|(to, from)| to.copy_from_slice(from));
    }

    /// Copies a row, as stored, into a slot.
    pub fn put(&mut self, slot: u32, stored: &[u8]) {
        let start = slot as usize * self.row_bytes;
        self.rows[start..start + self.row_bytes].copy_from_slice(stored);
    }

    /// Moves rows between slots: slot `i` gets the row of slot `from[i]`. These slots differ from each other. What other
    /// slots have afterwards is not specified.
    pub fn rearrange(&mut self, from: &[u32]) {
        let slots = self.rows.len().checked_div(self.row_bytes).unwrap_or(0);
        let mut source = whole_permutation(from, slots);
        let (mut first, bytes) = (vec![0; self.row_bytes], self.row_bytes);
        for start in 0..source.len() {
            if source[start] as usize == start {
                continue;
            }
            first.copy_from_slice(self.slot(start));
            let mut to = start;
            loop {
                let next = std::mem::replace(&mut source[to], to as u32) as usize;
                if next == start {
                    break;
                }
                self.rows.copy_within(next * bytes..(next + 1) * bytes, to * bytes);
                to = next;
            }
            self.put(to as u32, &first);
        }
    }

    /// Assembles a batch as f32, with the threads of the current rayon pool. Panics if placements keep rows: the cache
    /// does not change here.
    pub fn assemble(&self, placements: &Placements, missed: Missed, format: &RowFormat, values: &mut [f32]) {
        assert!(placements.kept.is_empty(), "rows are kept by whoever may change the cache");
        self.copy(&placements.words, missed, format, values);
        widen_in_place(&placements.words, missed, format, values);
    }

    /// The same. Afterwards it copies the rows that are kept to their slots.
    pub fn assemble_and_keep(
        &mut self,
        placements: &Placements,
        missed: Missed,
        format: &RowFormat,
        values: &mut [f32],
    ) {
        self.copy(&placements.words, missed, format, values);
        self.keep(placements, missed, format.dim(), values);
        widen_in_place(&placements.words, missed, format, values);
    }

    /// Copies every row that is not in `values` yet, as f32.
    fn copy(&self, words: &[u32], missed: Missed, format: &RowFormat, values: &mut [f32]) {
        let dim = format.dim();
        assert_eq!(values.len(), words.len() * dim, "a row a placement");
        if dim == 0 {
            return;
        }
        let many = size_of_val(values) > CACHED_BYTES;
        let chunks = values.par_chunks_mut(CHUNK_ROWS * dim).zip(words.par_chunks(CHUNK_ROWS));
        chunks.for_each(|(values, words)| match missed {
            // Every row is written, so all of them may bypass the CPU's caches.
            Missed::Buffer(read) if !words.contains(&Placement::Skip.encode()) => {
                format.convert_rows(many, values, |at| {
                    self.prefetch_soon(words, at, missed);
                    self.find(words[at], read)
                });
            }
            _ => self.copy_some(words, missed, format, values),
        });
    }

    fn copy_some(&self, words: &[u32], missed: Missed, format: &RowFormat, values: &mut [f32]) {
        for (at, (word, row)) in words.iter().zip(values.chunks_exact_mut(format.dim())).enumerate() {
            self.prefetch_soon(words, at, missed);
            match (Placement::decode(*word), missed) {
                (Placement::Hit(slot), _) => format.convert(self.slot(slot.index()), row),
                (Placement::Skip, _) => row.fill(0.0),
                (_, Missed::Buffer(read)) => format.convert(self.find(*word, read), row),
                (_, Missed::InPlace) => {}
            }
        }
    }

    /// Prefetches the row that is copied `PREFETCH_ROWS` rows later.
    #[inline(always)]
    fn prefetch_soon(&self, words: &[u32], at: usize, missed: Missed) {
        let Some(soon) = words.get(at + PREFETCH_ROWS) else { return };
        let (memory, start): (&[u8], usize) = match (Placement::decode(*soon), missed) {
            (Placement::Hit(slot), _) => (&self.rows, slot.index() * self.row_bytes),
            (Placement::Read(index) | Placement::Keep(index), Missed::Buffer(read)) => {
                (read, index as usize * self.row_bytes)
            }
            _ => return,
        };
        let lines = self.row_bytes.div_ceil(LINE_BYTES).min(PREFETCH_LINES);
        (0..lines).for_each(|line| prefetch(memory, start + line * LINE_BYTES));
    }

    /// A row as stored: a hit, or a row of the separate buffer.
    #[inline(always)]
    fn find<'a>(&'a self, word: u32, read: &'a [u8]) -> &'a [u8] {
        match Placement::decode(word) {
            Placement::Hit(slot) => self.slot(slot.index()),
            Placement::Read(index) | Placement::Keep(index) => {
                &read[index as usize * self.row_bytes..][..self.row_bytes]
            }
            Placement::Skip => unreachable!("a row that is skipped comes from nowhere"),
        }
    }

    #[inline(always)]
    fn slot(&self, slot: usize) -> &[u8] {
        &self.rows[slot * self.row_bytes..][..self.row_bytes]
    }

    /// Copies rows that are kept to their slots. A slot may belong to a hit of the same batch. Each task has some of the
    /// slots, and goes through all rows.
    fn keep(&mut self, placements: &Placements, missed: Missed, dim: usize, values: &[f32]) {
        let (row_bytes, kept) = (self.row_bytes, placements.kept.len());
        if kept == 0 || row_bytes == 0 {
            return;
        }
        let stored = bytemuck::cast_slice::<f32, u8>(values);
        let tasks = (kept / KEPT_ROWS).clamp(1, rayon::current_num_threads());
        let part = (self.rows.len() / row_bytes).div_ceil(tasks);
        self.rows.par_chunks_mut(part * row_bytes).enumerate().for_each(|(number, slots)| {
            let mine = number * part..(number + 1) * part;
            let mut to = placements.kept.iter();
            for (word, own) in placements.words.iter().zip(stored.chunks_exact(dim * 4)) {
                let Placement::Keep(index) = Placement::decode(*word) else { continue };
                let slot = *to.next().expect("a slot a row that is kept") as usize;
                if !mine.contains(&slot) {
                    continue;
                }
                let row = match missed {
                    Missed::InPlace => &own[..row_bytes],
                    Missed::Buffer(read) => &read[index as usize * row_bytes..][..row_bytes],
                };
                slots[(slot - mine.start) * row_bytes..][..row_bytes].copy_from_slice(row);
            }
        });
    }
}

/// A permutation of all slots that begins with the distinct slots of `from`. Slots keep their row where that is possible.
fn whole_permutation(from: &[u32], slots: usize) -> Vec<u32> {
    if slots == 0 {
        return Vec::new();
    }
    let mut used = vec![0u64; slots.div_ceil(64)];
    let mut take = |slot: usize| {
        let (word, bit) = (&mut used[slot / 64], 1u64 << (slot % 64));
        let is_free = *word & bit == 0;
        *word |= bit;
        is_free
    };
    let mut source = from.to_vec();
    source.iter().for_each(|slot| assert!(take(*slot as usize), "a slot has one row"));
    source.resize(slots, u32::MAX);
    let rest = from.len()..slots;
    for slot in rest.clone().filter(|slot| take(*slot)) {
        source[slot] = slot as u32;
    }
    let mut free = (0..slots).filter(|slot| take(*slot));
    for slot in rest {
        if source[slot] == u32::MAX {
            source[slot] = free.next().expect("as many slots as sources") as u32;
        }
    }
    source
}

/// Converts stored rows at the start of their f32 rows to f32, in place.
fn widen_in_place(words: &[u32], missed: Missed, format: &RowFormat, values: &mut [f32]) {
    if format.is_plain() || format.dim() == 0 || matches!(missed, Missed::Buffer(_)) {
        return;
    }
    let chunks = values.par_chunks_mut(CHUNK_ROWS * format.dim()).zip(words.par_chunks(CHUNK_ROWS));
    chunks.for_each(|(values, words)| {
        let mut widener = Widener::new(format);
        let rows = values.chunks_exact_mut(format.dim()).zip(words);
        rows.filter(|(_, word)| Placement::is_read(**word)).for_each(|(row, _)| widener.one(row));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Compares with one row after the other.
    #[test]
    fn rows_are_kept_by_several_tasks_as_by_one() {
        let slots: Vec<u32> =
            (0..3 * KEPT_ROWS as u32).map(|at| at * 7919 % (4 * KEPT_ROWS as u32)).collect();
        let mut placements = Placements::default();
        let read: Vec<u8> = (0..slots.len() * 2 * 3).map(|at| (at * 31 % 251) as u8).collect();
        for (at, slot) in slots.iter().enumerate() {
            placements.words.push(Placement::Keep(2 * at as u32).encode());
            placements.words.push(Placement::Read(2 * at as u32 + 1).encode());
            placements.kept.push(*slot);
        }
        let rows = vec![0xEE; 4 * KEPT_ROWS * 3];
        let (mut cache, mut expected) = (HostCache { rows: rows.clone(), row_bytes: 3 }, rows);
        for (at, slot) in slots.iter().enumerate() {
            expected[*slot as usize * 3..][..3].copy_from_slice(&read[2 * at * 3..][..3]);
        }
        let (pool, values) =
            (rayon::ThreadPoolBuilder::new().num_threads(3).build(), vec![0.0; slots.len() * 2]);
        pool.unwrap().install(|| cache.keep(&placements, Missed::Buffer(&read), 1, &values));
        assert!(cache.rows == expected);
    }

    proptest! {
        /// Compares with a copy of all slots.
        #[test]
        fn rows_are_where_they_are_moved_to(order in Just((0..40u32).collect::<Vec<_>>()).prop_shuffle(), count in 0usize..=40) {
            let rows: Vec<u8> = (0..40 * 3).map(|at| at as u8).collect();
            let mut cache = HostCache { rows: rows.clone(), row_bytes: 3 };
            let from = &order[..count];
            cache.rearrange(from);
            for (to, slot) in from.iter().enumerate() {
                prop_assert_eq!(cache.slot(to), &rows[*slot as usize * 3..][..3]);
            }
            let mut all: Vec<&[u8]> = cache.rows.chunks(3).collect();
            all.sort();
            prop_assert_eq!(all, rows.chunks(3).collect::<Vec<_>>());
        }
    }
}
