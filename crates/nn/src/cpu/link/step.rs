//! Loss and gradients of a batch of edges. Edges go through in waves, so that scores and packed candidates stay
//! bounded: a block of edges is scored, becomes its loss and gives the gradient of its queries; then each range of
//! candidates sums its gradient over the wave's edges.

use super::loss::edge_loss;
use super::score::{CandidatePanels, CandidateRows, TILE, pair_score, panel_words};
use crate::cpu::affine::for_chunks;
use crate::cpu::buffer::{Buffer, Parts};
use crate::cpu::matmul::{PackedPanels, add_transposed_strided, matmul_strided, packed_words};
use crate::cpu::wide::wide;
use crate::cpu::{CpuBackend, CpuMatrix};
use crate::link::CandidateShape;
use crate::{
    CandidateGradients, Candidates, DecoderKind, Device, DistanceNorm, LinkGradients, LinkMath, LossCall,
    ScoreCall, Shape,
};
use rayon::prelude::*;
use std::ops::Range;

/// Most edges of a block: its scores fit the L2 cache for some hundred candidates.
const BLOCK: usize = 128;
/// Most scores of a wave, unless one block has more.
const WAVE_SCORES: usize = 1 << 24;
/// Most packed numbers of a wave, unless one chunk has more.
const WAVE_PACKED: usize = 1 << 22;
/// Candidates whose gradient one task sums.
const CANDIDATES: usize = 256;
/// Nodes whose gradient one task sums.
const NODES: usize = 32;

/// Edges of one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EdgeBlock {
    chunk: usize,
    first: usize,
    count: usize,
}

/// The blocks of all edges, evenly cut.
fn blocks(edges: usize, chunk_edges: usize) -> Vec<EdgeBlock> {
    let mut blocks = Vec::new();
    for (chunk, start) in (0..edges).step_by(chunk_edges).enumerate() {
        let of_chunk = chunk_edges.min(edges - start);
        let each = of_chunk.div_ceil(of_chunk.div_ceil(BLOCK));
        for first in (start..start + of_chunk).step_by(each) {
            blocks.push(EdgeBlock { chunk, first, count: each.min(start + of_chunk - first) });
        }
    }
    blocks
}

/// Packed numbers of a chunk.
fn packed_of(each: usize, columns: usize) -> usize {
    panel_words(each.min(TILE), columns) + packed_words(each.min(TILE), columns)
}

/// Blocks from the first on that make a wave.
fn wave_of(blocks: &[EdgeBlock], each: usize, columns: usize) -> usize {
    let packed = packed_of(each, columns);
    let mut edges = 0;
    for (index, block) in blocks.iter().enumerate() {
        edges += block.count;
        let chunks = block.chunk - blocks[0].chunk + 1;
        if index > 0 && (edges * each > WAVE_SCORES || chunks * packed > WAVE_PACKED) {
            return index;
        }
    }
    blocks.len()
}

/// Words that a step takes beside its gradients.
pub(crate) fn step_words(edges: usize, chunk_edges: usize, each: usize, columns: usize) -> usize {
    let blocks = blocks(edges, chunk_edges.max(1));
    let mut most = 0;
    let mut rest = &blocks[..];
    while !rest.is_empty() {
        let (wave, after) = rest.split_at(wave_of(rest, each, columns));
        let edges = wave.iter().map(|block| block.count).sum::<usize>();
        let chunks = wave[wave.len() - 1].chunk - wave[0].chunk + 1;
        most = most.max(edges * each + chunks * packed_of(each, columns));
        rest = after;
    }
    // If each edge has its own candidates, all scores stay. Losses are f64.
    most + if chunk_edges == 1 { edges * each } else { 0 } + edges * 3
}

/// Candidates of one chunk, packed for scores and for the gradient of queries.
struct ChunkPanels {
    across: CandidatePanels,
    along: Along,
}

/// Candidates as the gradient of queries reads them.
enum Along {
    /// For matmuls.
    Panels(PackedPanels),
    /// Row after row.
    Rows(Buffer),
}

/// What all tasks of a step read, and the parts they write.
struct LossStep<'a> {
    backend: &'a CpuBackend,
    call: &'a ScoreCall<'a, CpuBackend>,
    loss: &'a LossCall<'a>,
    shape: &'a CandidateShape,
    columns: usize,
    queries: Parts<f32>,
    own: Parts<f32>,
    losses: Parts<f64>,
}

impl CpuBackend {
    pub(super) fn link_step(
        &self,
        call: &ScoreCall<'_, CpuBackend>,
        loss: &LossCall<'_>,
        into: LinkGradients<'_, CpuBackend>,
    ) -> f64 {
        let LinkGradients { queries, own, candidates } = into;
        let (edges, columns) = (call.queries.rows(), call.queries.columns());
        let shape = call.candidates.shape(edges, call.nodes.rows());
        assert!(columns > 0 && columns == call.nodes.columns() && loss.own.len() == edges);
        assert!([&*queries, &*own].iter().all(|to| (to.rows(), to.columns()) == (edges, columns)));
        assert!(loss.weights.is_empty() || loss.weights.len() == edges, "a weight for each edge");
        let mut losses = vec![0.0; edges];
        let step = LossStep {
            backend: self,
            call,
            loss,
            shape: &shape,
            columns,
            queries: Parts::new(queries.values_mut()),
            own: Parts::new(own.values_mut()),
            losses: Parts::new(&mut losses),
        };
        match candidates {
            CandidateGradients::Rows(to) => step.run(Some(to), None),
            CandidateGradients::ByNode { offsets, members, to } if is_by_edge(&call.candidates) => {
                let mut scores = self.matrix(edges, shape.each);
                step.run(None, Some(&mut scores));
                step.back_to_nodes(&scores, offsets, members, to);
            }
            CandidateGradients::ByNode { offsets, members, to } => {
                let mut by_row = self.matrix(shape.all, columns);
                step.run(Some(&mut by_row), None);
                self.sum_rows(&[&by_row], offsets, members, to);
            }
        }
        losses.iter().fold(0.0, |sum, loss| sum + loss)
    }
}

/// Whether each edge has its own candidates.
fn is_by_edge(candidates: &Candidates<'_>) -> bool {
    matches!(candidates, Candidates::Chunks { chunk_edges: 1, .. })
}

impl LossStep<'_> {
    /// Goes through all waves. Gradients of candidates are written if asked for; so are those of all scores.
    fn run(&self, mut candidates: Option<&mut CpuMatrix>, mut all_scores: Option<&mut CpuMatrix>) {
        let each = self.shape.each;
        if let Some(to) = &mut candidates {
            assert_eq!(
                (to.rows(), to.columns()),
                (self.shape.all, self.columns),
                "a gradient for each candidate"
            );
            to.values_mut().fill(0.0);
        }
        let blocks = blocks(self.call.queries.rows(), self.shape.chunk_edges);
        let mut rest = &blocks[..];
        while !rest.is_empty() {
            let (wave, after) = rest.split_at(wave_of(rest, each, self.columns));
            let edges = wave.iter().map(|block| block.count).sum::<usize>();
            let mut of_wave = None;
            let scores = match &mut all_scores {
                Some(all) => &mut all.values_mut()[wave[0].first * each..][..edges * each],
                None => of_wave.insert(self.backend.matrix(edges, each)).values_mut(),
            };
            self.wave(wave, scores);
            if let Some(to) = &mut candidates {
                self.back_to_candidates(wave, scores, to);
            }
            rest = after;
        }
    }

    fn wave(&self, wave: &[EdgeBlock], scores: &mut [f32]) {
        let (start, each) = (wave[0].first, self.shape.each);
        let parts = Parts::new(scores);
        // SAFETY: blocks do not overlap, and the scores outlive all tasks.
        let scores_of =
            |block: &EdgeBlock| unsafe { parts.part((block.first - start) * each, block.count * each) };
        if each <= TILE {
            let packed = self.pack(wave, 0..each);
            wave.par_iter().for_each(|block| {
                let (scores, packed) = (scores_of(block), &packed[block.chunk - wave[0].chunk]);
                self.score(block, 0..each, packed, scores);
                self.compare(block, scores);
                self.back_to_queries(block, 0..each, packed, scores);
            });
        } else {
            let tiles = || (0..each).step_by(TILE).map(|first| first..each.min(first + TILE));
            for tile in tiles() {
                let packed = self.pack(wave, tile.clone());
                wave.par_iter().for_each(|block| {
                    let packed = &packed[block.chunk - wave[0].chunk];
                    self.score(block, tile.clone(), packed, scores_of(block));
                });
            }
            wave.par_iter().for_each(|block| self.compare(block, scores_of(block)));
            for tile in tiles() {
                let packed = self.pack(wave, tile.clone());
                wave.par_iter().for_each(|block| {
                    let packed = &packed[block.chunk - wave[0].chunk];
                    self.back_to_queries(block, tile.clone(), packed, scores_of(block));
                });
            }
        }
    }

    /// Gradients of candidates that each belong to one edge, summed by node.
    fn back_to_nodes(&self, scores: &CpuMatrix, offsets: &[u32], members: &[u32], to: &mut CpuMatrix) {
        let (columns, nodes) = (self.columns, self.call.nodes);
        assert_eq!((to.rows(), to.columns()), (nodes.rows(), columns), "a row for each node");
        assert!(offsets.len() == nodes.rows() + 1 && offsets.is_sorted());
        let parts = Parts::new(to.values_mut());
        for_chunks(nodes.rows(), NODES, |first, count| {
            for node in first..first + count {
                // SAFETY: each node has its own row, and the matrix outlives the loop.
                let to = unsafe { parts.part(node * columns, columns) };
                to.fill(0.0);
                for member in &members[offsets[node] as usize..offsets[node + 1] as usize] {
                    let gradient = scores.values()[*member as usize];
                    let query = self.call.queries.row(*member as usize / self.shape.each);
                    pair_back(self.call.decoder, gradient, nodes.row(node), query, to);
                }
            }
        });
    }

    fn picked(&self, chunk: usize) -> CandidateRows<'_> {
        CandidateRows::of_chunk(self.call.nodes, &self.call.candidates, chunk)
    }

    /// Packs some candidates of every chunk of the wave.
    fn pack(&self, wave: &[EdgeBlock], tile: Range<usize>) -> Vec<ChunkPanels> {
        let (pool, count) = (&self.backend.pool, tile.len());
        let multiplies = is_matmul(self.call.decoder);
        (wave[0].chunk..=wave[wave.len() - 1].chunk)
            .into_par_iter()
            .map(|chunk| {
                let picked = self.picked(chunk);
                let along = if multiplies {
                    let row = |at| picked.row(tile.start + at);
                    Along::Panels(PackedPanels::gathered(pool, count, self.columns, row))
                } else {
                    let mut rows = pool.take(count * self.columns);
                    let to = rows.floats_mut().chunks_exact_mut(self.columns).enumerate();
                    to.for_each(|(at, to)| to.copy_from_slice(picked.row(tile.start + at)));
                    Along::Rows(rows)
                };
                let across = CandidatePanels::new(pool, picked, tile.start, count, self.columns);
                ChunkPanels { across, along }
            })
            .collect()
    }

    fn queries_of(&self, edges: Range<usize>) -> &[f32] {
        &self.call.queries.values()[edges.start * self.columns..edges.end * self.columns]
    }

    fn score(&self, block: &EdgeBlock, tile: Range<usize>, packed: &ChunkPanels, scores: &mut [f32]) {
        let queries = self.queries_of(block.first..block.first + block.count);
        let to = &mut scores[tile.start..];
        packed.across.scores(self.call.decoder, queries, [0, tile.len()], to, self.shape.each);
    }

    /// Scores become their gradients. Writes losses, gradients of own rows, and their part of the queries' gradient.
    fn compare(&self, block: &EdgeBlock, scores: &mut [f32]) {
        let (columns, each, decoder) = (self.columns, self.shape.each, self.call.decoder);
        let is_l2 = decoder == DecoderKind::TransE { norm: DistanceNorm::L2 };
        let mut distances = self.backend.pool.take(if is_l2 { each } else { 0 });
        for (row, edge) in (block.first..block.first + block.count).enumerate() {
            let scores = &mut scores[row * each..][..each];
            let mut negatives = each;
            let mut mask = |candidate: usize| {
                negatives -= (scores[candidate] != f32::NEG_INFINITY) as usize;
                scores[candidate] = f32::NEG_INFINITY;
            };
            self.loss.masked.for_each(edge, &mut |candidate| mask(candidate as usize));
            let own_row = self.loss.own[edge] as usize;
            if let Candidates::All = self.call.candidates {
                mask(own_row);
            }
            if is_l2 {
                distances.floats_mut().copy_from_slice(scores);
            }
            let (query, candidate) = (self.call.queries.row(edge), self.call.nodes.row(own_row));
            let own = pair_score(decoder, query, candidate);
            let scale = self.loss.scale * self.loss.weights.get(edge).copied().unwrap_or(1.0);
            let found = edge_loss(self.loss.loss, scale, own, negatives, scores);
            if is_l2 {
                over_distances(scores, distances.floats());
            }
            // SAFETY: each edge has its own rows, and the matrices outlive all tasks.
            let (of_query, of_own, loss) = unsafe {
                (
                    self.queries.part(edge * columns, columns),
                    self.own.part(edge * columns, columns),
                    self.losses.part(edge, 1),
                )
            };
            loss[0] = found.loss;
            of_query.fill(0.0);
            of_own.fill(0.0);
            let gradient = if is_l2 { over_distance(found.own_gradient, own) } else { found.own_gradient };
            pair_back(decoder, gradient, query, candidate, of_query);
            pair_back(decoder, gradient, candidate, query, of_own);
        }
    }

    /// Adds the gradients of some candidates' scores to the queries' gradient.
    fn back_to_queries(&self, block: &EdgeBlock, tile: Range<usize>, packed: &ChunkPanels, scores: &[f32]) {
        let (columns, each) = (self.columns, self.shape.each);
        // SAFETY: blocks do not overlap, and the matrix outlives all tasks.
        let to = unsafe { self.queries.part(block.first * columns, block.count * columns) };
        let along = match &packed.along {
            Along::Panels(along) => along,
            Along::Rows(rows) => {
                for (row, to) in to.chunks_exact_mut(columns).enumerate() {
                    let query = self.call.queries.row(block.first + row);
                    let gradients = &scores[row * each + tile.start..];
                    pairs_back(self.call.decoder, (gradients, 1), query, rows.floats(), to);
                }
                return;
            }
        };
        matmul_strided(to, block.count, &scores[tile.start..], each, along, true, &mut || {});
        if !self.call.decoder.is_dot() {
            for (row, to) in to.chunks_exact_mut(columns).enumerate() {
                let weight = sum_of(&scores[row * each..][tile.clone()]);
                add_scaled(-weight, self.call.queries.row(block.first + row), to);
            }
        }
    }

    /// Adds the gradients of the wave's edges to those of their candidates.
    fn back_to_candidates(&self, wave: &[EdgeBlock], scores: &[f32], candidates: &mut CpuMatrix) {
        let (columns, each, start) = (self.columns, self.shape.each, wave[0].first);
        let end = wave[wave.len() - 1].first + wave[wave.len() - 1].count;
        let (first_chunk, last_chunk) = (wave[0].chunk, wave[wave.len() - 1].chunk);
        let parts = Parts::new(candidates.values_mut());
        let ranges = each.div_ceil(CANDIDATES);
        for_chunks((last_chunk - first_chunk + 1) * ranges, 1, |task, _| {
            let (chunk, first) = (first_chunk + task / ranges, task % ranges * CANDIDATES);
            let count = CANDIDATES.min(each - first);
            let chunk_start = chunk * self.shape.chunk_edges;
            let edges = chunk_start.max(start)..(chunk_start + self.shape.chunk_edges).min(end);
            // SAFETY: ranges of candidates do not overlap, and the matrix outlives all tasks.
            let to = unsafe { parts.part((chunk * each + first) * columns, count * columns) };
            let scores = &scores[(edges.start - start) * each + first..];
            let queries = self.queries_of(edges.clone());
            self.back_to_range(queries, [first, count], self.picked(chunk), scores, to);
        });
    }

    fn back_to_range(
        &self,
        queries: &[f32],
        [first, count]: [usize; 2],
        picked: CandidateRows<'_>,
        scores: &[f32],
        to: &mut [f32],
    ) {
        let (columns, each, decoder) = (self.columns, self.shape.each, self.call.decoder);
        if !is_matmul(decoder) {
            for (at, to) in to.chunks_exact_mut(columns).enumerate() {
                pairs_back(decoder, (&scores[at..], each), picked.row(first + at), queries, to);
            }
            return;
        }
        let edges = queries.len() / columns;
        add_transposed_strided(to, [count, columns, edges], scores, each, queries);
        if !decoder.is_dot() {
            let mut weights = [0.0f32; CANDIDATES];
            for row in 0..edges {
                add_scaled(1.0, &scores[row * each..][..count], &mut weights[..count]);
            }
            for (at, to) in to.chunks_exact_mut(columns).enumerate() {
                add_scaled(-weights[at], picked.row(first + at), to);
            }
        }
    }
}

/// Whether gradients are matmuls.
fn is_matmul(decoder: DecoderKind) -> bool {
    decoder.is_dot() || decoder == DecoderKind::TransE { norm: DistanceNorm::L2 }
}

/// The gradient of a Euclidean distance's score, over the distance; 0 where both rows are the same.
#[inline(always)]
fn over_distance(gradient: f32, score: f32) -> f32 {
    if score == 0.0 { 0.0 } else { gradient / -score }
}

/// Adds `gradient` x the derivative of a pair's score by `row` to `to`. For a Euclidean distance, the gradient is
/// already over the distance.
fn pair_back(decoder: DecoderKind, gradient: f32, row: &[f32], other: &[f32], to: &mut [f32]) {
    pairs_back(decoder, (&[gradient], 1), row, other, to)
}

/// The same for pairs of `row` with each of `others`, in their order. Gradients are `step` numbers apart.
fn pairs_back(
    decoder: DecoderKind,
    (gradients, step): (&[f32], usize),
    row: &[f32],
    others: &[f32],
    to: &mut [f32],
) {
    match decoder {
        DecoderKind::Dot | DecoderKind::DistMult | DecoderKind::ComplEx => {
            dot_back(gradients, step, others, to)
        }
        DecoderKind::TransE { norm: DistanceNorm::L1 } => l1_back(gradients, step, row, others, to),
        DecoderKind::TransE { norm: DistanceNorm::L2 } => l2_back(gradients, step, row, others, to),
        DecoderKind::RotatE { .. } => modulus_back(gradients, step, row, others, to),
    }
}

wide! {
    fn over_distances(gradients: &mut [f32], scores: &[f32]) {
        for (gradient, score) in gradients.iter_mut().zip(scores) {
            *gradient = over_distance(*gradient, *score);
        }
    }

    fn add_scaled(factor: f32, from: &[f32], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to += factor * from;
        }
    }

    fn sum_of(values: &[f32]) -> f32 {
        let mut lanes = [0.0f32; 16];
        let chunks = values.chunks_exact(16);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *lane += value;
            }
        }
        lanes.iter().chain(rest).fold(0.0, |sum, value| sum + value)
    }

    fn dot_back(gradients: &[f32], step: usize, others: &[f32], to: &mut [f32]) {
        for (other, gradient) in others.chunks_exact(to.len()).zip(gradients.iter().step_by(step)) {
            for (to, y) in to.iter_mut().zip(other) {
                *to += gradient * y;
            }
        }
    }

    fn l1_back(gradients: &[f32], step: usize, row: &[f32], others: &[f32], to: &mut [f32]) {
        for (other, gradient) in others.chunks_exact(to.len()).zip(gradients.iter().step_by(step)) {
            for ((to, x), y) in to.iter_mut().zip(row).zip(other) {
                let difference = x - y;
                let slope = if difference > 0.0 { -gradient } else { *gradient };
                *to += if difference == 0.0 { 0.0 } else { slope };
            }
        }
    }

    fn l2_back(gradients: &[f32], step: usize, row: &[f32], others: &[f32], to: &mut [f32]) {
        for (other, gradient) in others.chunks_exact(to.len()).zip(gradients.iter().step_by(step)) {
            for ((to, x), y) in to.iter_mut().zip(row).zip(other) {
                *to -= gradient * (x - y);
            }
        }
    }

    fn modulus_back(gradients: &[f32], step: usize, row: &[f32], others: &[f32], to: &mut [f32]) {
        let (columns, half) = (row.len(), row.len() / 2);
        let (to_re, to_im) = to.split_at_mut(half);
        let (row_re, row_im) = row.split_at(half);
        for (other, gradient) in others.chunks_exact(columns).zip(gradients.iter().step_by(step)) {
            let (other_re, other_im) = other.split_at(half);
            for at in 0..half {
                let (re, im) = (row_re[at] - other_re[at], row_im[at] - other_im[at]);
                let modulus = (re * re + im * im).sqrt();
                let factor = if modulus == 0.0 { 0.0 } else { gradient / modulus };
                to_re[at] -= factor * re;
                to_im[at] -= factor * im;
            }
        }
    }
}
