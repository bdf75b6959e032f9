//! Scores of queries and candidates. Candidates are packed into panels of 64, column by column, so that a score is a
//! sum in the order of the columns, whatever the other candidates: the score of a pair on its own has the same bits.

use super::super::buffer::{Buffer, MatrixPool, Parts};
use crate::cpu::affine::for_chunks;
#[cfg(target_arch = "x86_64")]
use crate::cpu::kernel::{self, Steps};
use crate::cpu::wide::wide;
#[cfg(target_arch = "x86_64")]
use crate::cpu::wide::{Width, width};
use crate::cpu::{CpuBackend, CpuMatrix};
use crate::link::CandidateShape;
use crate::{Candidates, DecoderKind, DistanceNorm, ScoreCall, Shape};

/// Candidates per panel.
pub(super) const PANEL: usize = 64;
/// Columns whose products are summed before they are added to the score.
const DEPTH_BLOCK: usize = 128;
/// Queries per parallel task.
pub(super) const QUERIES: usize = 96;
/// Panels that one task packs.
const PACKED_PANELS: usize = 8;
/// Candidates that are packed at a time, unless a chunk has fewer.
pub(crate) const TILE: usize = 4096;

#[cfg(target_arch = "x86_64")]
const _: () = assert!(PANEL == kernel::PANEL);

/// Words of packed candidates.
pub(crate) fn panel_words(candidates: usize, columns: usize) -> usize {
    candidates.next_multiple_of(PANEL) * columns
}

/// Rows of a matrix, picked or in order.
#[derive(Clone, Copy)]
pub(super) struct CandidateRows<'a> {
    matrix: &'a CpuMatrix,
    rows: Option<&'a [u32]>,
}

impl<'a> CandidateRows<'a> {
    /// The candidates of a chunk.
    pub fn of_chunk(nodes: &'a CpuMatrix, candidates: &Candidates<'a>, chunk: usize) -> CandidateRows<'a> {
        let rows = match *candidates {
            Candidates::Chunks { per_chunk, rows, .. } => Some(&rows[chunk * per_chunk..][..per_chunk]),
            Candidates::All => None,
        };
        CandidateRows { matrix: nodes, rows }
    }

    #[inline(always)]
    pub fn row(&self, index: usize) -> &'a [f32] {
        self.matrix.row(self.rows.map_or(index, |rows| rows[index] as usize))
    }
}

/// Candidates, packed: number `column` of candidate `64 p + j` is at `(p * columns + column) * 64 + j`.
pub(super) struct CandidatePanels {
    values: Buffer,
    columns: usize,
    count: usize,
}

wide! {
    /// Writes one row across a panel.
    fn write_across(row: &[f32], panel: &mut [f32], at: usize) {
        for (to, x) in panel.chunks_exact_mut(PANEL).zip(row) {
            to[at] = *x;
        }
    }
}

impl CandidatePanels {
    /// Packs `count` candidates that start at `first`.
    pub fn new(
        pool: &MatrixPool,
        from: CandidateRows<'_>,
        first: usize,
        count: usize,
        columns: usize,
    ) -> Self {
        let mut values = pool.take(panel_words(count, columns));
        let parts = Parts::new(values.floats_mut());
        for_chunks(count.div_ceil(PANEL), PACKED_PANELS, |panel, panels| {
            for index in panel..panel + panels {
                let start = index * PANEL;
                let full = PANEL.min(count - start);
                // SAFETY: panels do not overlap, and the buffer outlives the loop.
                let panel = unsafe { parts.part(start * columns, PANEL * columns) };
                if full < PANEL {
                    panel.fill(0.0);
                }
                for at in 0..full {
                    write_across(from.row(first + start + at), panel, at);
                }
            }
        });
        CandidatePanels { values, columns, count }
    }

    /// Scores of `rows` queries with candidates `first..first + count` (`first` is a multiple of 64), into rows that
    /// are `to_step` numbers apart.
    pub fn scores(
        &self,
        decoder: DecoderKind,
        queries: &[f32],
        [first, count]: [usize; 2],
        to: &mut [f32],
        to_step: usize,
    ) {
        let columns = self.columns;
        let rows = queries.len() / columns;
        assert!(queries.len() == rows * columns && first % PANEL == 0 && first + count <= self.count);
        assert!(rows == 0 || (count <= to_step && (rows - 1) * to_step + count <= to.len()));
        for start in (0..count).step_by(PANEL) {
            let wide = PANEL.min(count - start);
            let panel = &self.values.floats()[(first + start) * columns..][..PANEL * columns];
            #[cfg(target_arch = "x86_64")]
            if decoder.is_dot() && width() == Width::Avx512 {
                for depth in (0..columns).step_by(DEPTH_BLOCK) {
                    let shape = [rows, wide, DEPTH_BLOCK.min(columns - depth)];
                    let steps = Steps { row: columns, depth: 1 };
                    // SAFETY: AVX-512 is available; queries, panel and `to` have their sizes by the assertions above.
                    unsafe {
                        let to = to.as_mut_ptr().add(start);
                        let (left, right) = (queries.as_ptr().add(depth), panel.as_ptr().add(depth * PANEL));
                        kernel::panel(to, to_step, shape, left, steps, right, depth > 0, &mut || {});
                    }
                }
                continue;
            }
            for (row, query) in queries.chunks_exact(columns).enumerate() {
                panel_scores(decoder, query, panel, &mut to[row * to_step + start..][..wide]);
            }
        }
    }
}

fn panel_scores(decoder: DecoderKind, query: &[f32], panel: &[f32], to: &mut [f32]) {
    match decoder {
        DecoderKind::Dot | DecoderKind::DistMult | DecoderKind::ComplEx => dot_panel(query, panel, to),
        DecoderKind::TransE { norm: DistanceNorm::L1 } => l1_panel(query, panel, to),
        DecoderKind::TransE { norm: DistanceNorm::L2 } => l2_panel(query, panel, to),
        DecoderKind::RotatE { .. } => modulus_panel(query, panel, to),
    }
}

wide! {
    fn dot_panel(query: &[f32], panel: &[f32], to: &mut [f32]) {
        let mut sums = [0.0f32; PANEL];
        for (x, panel) in query.iter().zip(panel.chunks_exact(PANEL)) {
            for (sum, y) in sums.iter_mut().zip(panel) {
                *sum += x * y;
            }
        }
        to.copy_from_slice(&sums[..to.len()]);
    }

    fn l1_panel(query: &[f32], panel: &[f32], to: &mut [f32]) {
        let mut sums = [0.0f32; PANEL];
        for (x, panel) in query.iter().zip(panel.chunks_exact(PANEL)) {
            for (sum, y) in sums.iter_mut().zip(panel) {
                *sum -= (x - y).abs();
            }
        }
        to.copy_from_slice(&sums[..to.len()]);
    }

    fn l2_panel(query: &[f32], panel: &[f32], to: &mut [f32]) {
        let mut sums = [0.0f32; PANEL];
        for (x, panel) in query.iter().zip(panel.chunks_exact(PANEL)) {
            for (sum, y) in sums.iter_mut().zip(panel) {
                *sum += (x - y) * (x - y);
            }
        }
        for (to, sum) in to.iter_mut().zip(sums) {
            *to = -sum.sqrt();
        }
    }

    fn modulus_panel(query: &[f32], panel: &[f32], to: &mut [f32]) {
        let half = query.len() / 2;
        let (query_re, query_im) = query.split_at(half);
        let (panel_re, panel_im) = panel.split_at(half * PANEL);
        let panels = panel_re.chunks_exact(PANEL).zip(panel_im.chunks_exact(PANEL));
        let mut sums = [0.0f32; PANEL];
        for ((x_re, x_im), (y_re, y_im)) in query_re.iter().zip(query_im).zip(panels) {
            for ((sum, y_re), y_im) in sums.iter_mut().zip(y_re).zip(y_im) {
                let (re, im) = (x_re - y_re, x_im - y_im);
                *sum -= (re * re + im * im).sqrt();
            }
        }
        to.copy_from_slice(&sums[..to.len()]);
    }

    /// As the tiles of AVX-512 compute it.
    fn fused_dot(left: &[f32], right: &[f32]) -> f32 {
        let mut total = 0.0;
        for (block, (left, right)) in left.chunks(DEPTH_BLOCK).zip(right.chunks(DEPTH_BLOCK)).enumerate() {
            let sum = left.iter().zip(right).fold(0.0f32, |sum, (x, y)| x.mul_add(*y, sum));
            total = if block == 0 { sum } else { total + sum };
        }
        total
    }
}

/// The score of one query and one candidate, with the bits that it has among others.
pub(super) fn pair_score(decoder: DecoderKind, query: &[f32], candidate: &[f32]) -> f32 {
    let pairs = query.iter().zip(candidate);
    match decoder {
        DecoderKind::Dot | DecoderKind::DistMult | DecoderKind::ComplEx => {
            #[cfg(target_arch = "x86_64")]
            if width() == Width::Avx512 {
                return fused_dot(query, candidate);
            }
            pairs.fold(0.0, |sum, (x, y)| sum + x * y)
        }
        DecoderKind::TransE { norm: DistanceNorm::L1 } => pairs.fold(0.0, |sum, (x, y)| sum - (x - y).abs()),
        DecoderKind::TransE { norm: DistanceNorm::L2 } => {
            -pairs.fold(0.0f32, |sum, (x, y)| sum + (x - y) * (x - y)).sqrt()
        }
        DecoderKind::RotatE { .. } => {
            let half = query.len() / 2;
            (0..half).fold(0.0, |sum, at| {
                let (re, im) = (query[at] - candidate[at], query[half + at] - candidate[half + at]);
                sum - (re * re + im * im).sqrt()
            })
        }
    }
}

pub(super) fn own_scores(call: &ScoreCall<'_, CpuBackend>, own: &[u32], scores: &mut CpuMatrix) {
    assert_eq!((scores.rows(), scores.columns()), (call.queries.rows(), 1));
    assert_eq!((own.len(), call.queries.columns()), (scores.rows(), call.nodes.columns()));
    let parts = Parts::new(scores.values_mut());
    for_chunks(own.len(), QUERIES, |first, count| {
        // SAFETY: chunks do not overlap, and the matrix outlives the loop.
        let to = unsafe { parts.part(first, count) };
        for (to, edge) in to.iter_mut().zip(first..) {
            *to = pair_score(call.decoder, call.queries.row(edge), call.nodes.row(own[edge] as usize));
        }
    });
}

/// Queries of one task and packed candidates of their chunk.
pub(super) struct CandidateTile<'a> {
    pub queries: &'a [f32],
    /// The first query of all.
    pub first_query: usize,
    pub panels: &'a CandidatePanels,
    /// The first packed candidate among those of the chunk.
    pub first: usize,
    pub count: usize,
}

impl CpuBackend {
    /// Calls `work` for all pairs of queries and candidates, a tile at a time, on all threads. Tiles of a query follow
    /// one another.
    pub(super) fn for_candidate_tiles(
        &self,
        call: &ScoreCall<'_, CpuBackend>,
        shape: &CandidateShape,
        work: impl Fn(CandidateTile<'_>) + Sync,
    ) {
        let (queries, columns) = (call.queries.rows(), call.queries.columns());
        let of_chunk = |chunk: usize, each: &(dyn Fn(CandidateTile<'_>) + Sync)| {
            let picked = CandidateRows::of_chunk(call.nodes, &call.candidates, chunk);
            let start = chunk * shape.chunk_edges;
            let edges = shape.chunk_edges.min(queries - start);
            for first in (0..shape.each).step_by(TILE) {
                let count = TILE.min(shape.each - first);
                let panels = &CandidatePanels::new(&self.pool, picked, first, count, columns);
                let queries = &call.queries.values()[start * columns..][..edges * columns];
                each(CandidateTile { queries, first_query: start, panels, first, count });
            }
        };
        let chunks = queries.div_ceil(shape.chunk_edges);
        if shape.chunk_edges < QUERIES {
            // Packed candidates of as many chunks as there are threads.
            return for_chunks(chunks, 1, |chunk, _| of_chunk(chunk, &|tile| work(tile)));
        }
        for chunk in 0..chunks {
            of_chunk(chunk, &|tile| {
                let rows = tile.queries.len() / columns;
                for_chunks(rows, QUERIES, |first, count| {
                    let queries = &tile.queries[first * columns..][..count * columns];
                    work(CandidateTile { queries, first_query: tile.first_query + first, ..tile })
                });
            });
        }
    }

    pub(super) fn scores_of_all(&self, call: &ScoreCall<'_, CpuBackend>, scores: &mut CpuMatrix) {
        let (queries, columns) = (call.queries.rows(), call.queries.columns());
        let shape = call.candidates.shape(queries, call.nodes.rows());
        assert_eq!((scores.rows(), scores.columns()), (queries, shape.each));
        assert_eq!(columns, call.nodes.columns());
        let to = Parts::new(scores.values_mut());
        self.for_candidate_tiles(call, &shape, |tile| {
            for (row, query) in tile.queries.chunks_exact(columns).enumerate() {
                let place = (tile.first_query + row) * shape.each + tile.first;
                // SAFETY: tiles do not overlap, and the matrix outlives the loop.
                let to = unsafe { to.part(place, tile.count) };
                tile.panels.scores(call.decoder, query, [0, tile.count], to, tile.count);
            }
        });
    }
}
