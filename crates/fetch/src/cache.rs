//! A cache of feature rows in host memory, and the one way to put a batch together there: hits come from the cache, other rows
//! from what was read, all as the placements of the batch say.

use crate::disk::Widener;
use crate::format::RowFormat;
use esker_io::{prefer_large_pages, prefetch};
use esker_plan::{Placement, Placements};
use rayon::prelude::*;

/// Rows assembled by one thread before it takes the next.
const CHUNK_ROWS: usize = 512;
/// Rows asked for ahead, and lines of each.
const PREFETCH_ROWS: usize = 8;
const PREFETCH_LINES: usize = 4;
const LINE_BYTES: usize = 64;
/// Batches larger than this are not in the CPU's caches any more when they are trained on.
const CACHED_BYTES: usize = 32 << 20;

/// Slots for rows, as they are stored.
pub struct HostCache {
    rows: Vec<u8>,
    row_bytes: usize,
}

/// The rows that a batch read, as stored.
#[derive(Clone, Copy)]
pub enum Missed<'a> {
    /// Each in the front of its own row of the batch: no second buffer, since no row is wider stored than as f32.
    InPlace,
    /// By the index that their placements name, in memory of their own.
    Buffer(&'a [u8]),
}

impl HostCache {
    /// A cache of zeros. Memory is taken as slots are filled.
    pub fn new(slots: u64, format: &RowFormat) -> HostCache {
        let mut rows = vec![0; slots as usize * format.row_bytes()];
        prefer_large_pages(&mut rows);
        HostCache { rows, row_bytes: format.row_bytes() }
    }

    /// Bytes of a cache.
    pub fn bytes_for(slots: u64, format: &RowFormat) -> u64 {
        slots * format.row_bytes() as u64
    }

    /// Puts rows, as stored, into slots from `first` on.
    pub fn fill(&mut self, first: u64, stored: &[u8]) {
        let start = first as usize * self.row_bytes;
        self.rows[start..start + stored.len()].copy_from_slice(stored);
    }

    /// Puts a batch together as f32, with the threads of the surrounding rayon pool. Placements that keep rows are refused:
    /// the cache stays as it is.
    pub fn assemble(&self, placements: &Placements, missed: Missed, format: &RowFormat, values: &mut [f32]) {
        assert!(placements.kept.is_empty(), "rows are kept by whoever may change the cache");
        self.copy(&placements.words, missed, format, values);
        widen_in_place(&placements.words, missed, format, values);
    }

    /// The same, and rows that stay go to their slots once every hit was taken.
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

    /// Copies every row that does not lie in its place yet, as f32.
    fn copy(&self, words: &[u32], missed: Missed, format: &RowFormat, values: &mut [f32]) {
        let dim = format.dim();
        assert_eq!(values.len(), words.len() * dim, "a row a placement");
        if dim == 0 {
            return;
        }
        let many = size_of_val(values) > CACHED_BYTES;
        let chunks = values.par_chunks_mut(CHUNK_ROWS * dim).zip(words.par_chunks(CHUNK_ROWS));
        chunks.for_each(|(values, words)| match missed {
            // Every row is written, so all of them may go past the caches.
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

    /// Says that the row some places further on will be copied soon.
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

    /// A row as stored: a hit, or one that was read to memory of its own.
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

    /// Copies rows that stay to their slots. A slot may be that of a hit of the same batch.
    fn keep(&mut self, placements: &Placements, missed: Missed, dim: usize, values: &[f32]) {
        let mut slots = placements.kept.iter();
        if slots.len() == 0 || self.row_bytes == 0 {
            return;
        }
        let stored = bytemuck::cast_slice::<f32, u8>(values);
        for (word, own) in placements.words.iter().zip(stored.chunks_exact(dim * 4)) {
            let Placement::Keep(index) = Placement::decode(*word) else { continue };
            let slot = *slots.next().expect("a slot a row that is kept") as usize;
            let row = match missed {
                Missed::InPlace => &own[..self.row_bytes],
                Missed::Buffer(read) => &read[index as usize * self.row_bytes..][..self.row_bytes],
            };
            self.rows[slot * self.row_bytes..][..self.row_bytes].copy_from_slice(row);
        }
    }
}

/// Makes f32 of rows that lie, as stored, in the front of their places.
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
