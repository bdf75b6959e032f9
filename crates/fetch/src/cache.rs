//! A cache of feature rows in host memory that carries plans out: it holds what a plan says, where the plan says.

use crate::disk::Widener;
use crate::format::RowFormat;
use esker_io::{prefer_large_pages, prefetch};
use esker_plan::Fetch;
use rayon::prelude::*;

/// Rows assembled by one thread before it takes the next.
const CHUNK_ROWS: usize = 512;
/// Rows asked for ahead, and lines of each.
const ROWS_AHEAD: usize = 8;
const LINES_AHEAD: usize = 4;
const LINE_BYTES: usize = 64;

/// Slots for rows, as they are stored.
pub struct HostCache {
    rows: Vec<u8>,
    row_bytes: usize,
}

impl HostCache {
    /// An empty cache. Memory is taken as slots are filled.
    pub fn new(slots: u64, format: &RowFormat) -> HostCache {
        let mut rows = vec![0; slots as usize * format.row_bytes()];
        prefer_large_pages(&mut rows);
        HostCache { rows, row_bytes: format.row_bytes() }
    }

    /// Bytes of a cache.
    pub fn bytes_for(slots: u64, format: &RowFormat) -> u64 {
        slots * format.row_bytes() as u64
    }

    /// Completes a batch whose other rows were read as `plan` says: hits are copied to their places, rows that stay are
    /// copied from theirs, and all are made f32. With the threads of the surrounding rayon pool. Returns the hits.
    pub fn assemble(&mut self, plan: &[u32], format: &RowFormat, values: &mut [f32]) -> u64 {
        let dim = format.dim();
        assert_eq!(values.len(), plan.len() * dim, "a row a word");
        let hits = plan.iter().filter(|word| matches!(Fetch::of(**word), Fetch::Hit(_))).count() as u64;
        if dim == 0 {
            return hits;
        }
        let pieces = || values.len().div_ceil(CHUNK_ROWS * dim);
        if hits > 0 && pieces() > 0 {
            let chunks = values.par_chunks_mut(CHUNK_ROWS * dim).zip(plan.par_chunks(CHUNK_ROWS));
            chunks.for_each(|(values, plan)| self.copy_hits(plan, format, values));
        }
        // Only now: a slot may be that of a row just copied.
        let stored = bytemuck::cast_slice::<f32, u8>(values);
        for (word, place) in plan.iter().zip(stored.chunks_exact(dim * 4)) {
            if let Fetch::ReadInto(slot) = Fetch::of(*word) {
                let start = slot.index() * self.row_bytes;
                self.rows[start..start + self.row_bytes].copy_from_slice(&place[..self.row_bytes]);
            }
        }
        if !format.is_plain() {
            let chunks = values.par_chunks_mut(CHUNK_ROWS * dim).zip(plan.par_chunks(CHUNK_ROWS));
            chunks.for_each(|(values, plan)| {
                let mut widener = Widener::new(format);
                let read = |word: &u32| !matches!(Fetch::of(*word), Fetch::Hit(_));
                let rows = values.chunks_exact_mut(dim).zip(plan).filter(|(_, word)| read(word));
                rows.for_each(|(row, _)| widener.one(row));
            });
        }
        hits
    }

    fn copy_hits(&self, plan: &[u32], format: &RowFormat, values: &mut [f32]) {
        let lines = self.row_bytes.div_ceil(LINE_BYTES).min(LINES_AHEAD);
        for (at, (word, row)) in plan.iter().zip(values.chunks_exact_mut(format.dim())).enumerate() {
            if let Some(Fetch::Hit(soon)) = plan.get(at + ROWS_AHEAD).map(|word| Fetch::of(*word)) {
                let start = soon.index() * self.row_bytes;
                (0..lines).for_each(|line| prefetch(&self.rows, start + line * LINE_BYTES));
            }
            if let Fetch::Hit(slot) = Fetch::of(*word) {
                let start = slot.index() * self.row_bytes;
                format.convert(&self.rows[start..start + self.row_bytes], row);
            }
        }
    }
}
