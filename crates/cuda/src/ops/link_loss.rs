//! Loss and gradients of edges. Dot products and Euclidean distances use one batched matmul for all chunks where
//! chunks are large enough; the others, and small chunks, have kernels that read candidates in place.

use super::link::{
    DeviceCandidateGradients, DeviceDecoder, DeviceEdges, DeviceLinkLoss, DevicePairs, MaskedOfEdge,
};
use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::memory::DeviceBuffer;
use crate::pinned::Pending;
use crate::{DeviceMatrix, Use};

/// Edges from which a matmul per chunk is worth gathering its candidates.
const MATMUL_EDGES: usize = 16;
/// Most scores at a time when every node is a candidate.
const MOST_SCORES: usize = 1 << 28;
/// Pairs that are uploaded at a time to be masked, and their numbers.
const MOST_MASKED: usize = 1 << 20;

/// Numbers that [`Gpu::link_loss`] takes beside its gradients.
pub fn link_loss_words(edges: usize, chunk_edges: usize, each: usize, columns: usize, all: bool) -> usize {
    let scores = if all { edges.min(wave_edges(each)) * each } else { edges * each };
    let gathered = edges.div_ceil(chunk_edges.max(1)) * each * columns;
    let is_gathered = !all && chunk_edges >= MATMUL_EDGES;
    let masked = 2 * scores.min(MOST_MASKED);
    // Indices, own scores and gradients, weights, losses.
    scores
        + masked
        + if is_gathered { gathered } else { 0 }
        + edges.div_ceil(chunk_edges.max(1)) * each
        + edges * 6
}

fn wave_edges(each: usize) -> usize {
    (MOST_SCORES / each.max(1)).max(1)
}

/// One call, and what it has on the device.
struct LinkStep<'a> {
    gpu: &'a Gpu,
    call: &'a DevicePairs<'a>,
    rows: u64,
    /// Candidates one after the other, if they are gathered or every node is one.
    gathered: Option<u64>,
    /// A factor for each edge, unless all are 1.
    weights: Option<u64>,
    of_queries: u64,
    of_candidates: Option<u64>,
}

/// Some edges, from `first` on, whose scores are at `scores`.
#[derive(Clone, Copy)]
struct EdgeWave {
    first: usize,
    edges: usize,
    scores: u64,
}

impl Gpu {
    /// The summed loss and its gradients.
    pub fn link_loss(
        &self,
        call: &DevicePairs<'_>,
        loss: DeviceLinkLoss,
        of_edges: DeviceEdges<'_>,
        [of_queries, of_own]: [&mut DeviceMatrix; 2],
        candidates: DeviceCandidateGradients<'_>,
    ) -> Pending {
        call.assert_valid();
        let (edges, columns, each) = (call.queries.rows(), call.queries.columns(), call.each);
        assert!([&*of_queries, &*of_own].iter().all(|to| (to.rows(), to.columns()) == (edges, columns)));
        let DeviceEdges { own, weights, masked } = of_edges;
        assert!(weights.is_empty() || weights.len() == edges, "a weight for each edge");
        assert!(own.len() == edges && own.iter().all(|row| (*row as usize) < call.nodes.rows()));
        let rows = call.rows.map(|rows| self.upload_slice(rows));
        let own = self.upload_slice(own);
        let weights = (!weights.is_empty()).then(|| self.upload_slice(bytemuck::cast_slice(weights)));
        let all = call.rows.map_or(each, <[u32]>::len);
        let gathered = self.link_gathered(call, rows.as_ref());
        let mut step = LinkStep {
            gpu: self,
            call,
            rows: rows.as_ref().map_or(0, DeviceBuffer::address),
            gathered: gathered.as_ref().map(DeviceMatrix::address).or(call.nodes_in_order()),
            weights: weights.as_ref().map(DeviceBuffer::address),
            of_queries: of_queries.address(),
            of_candidates: None,
        };
        let own = (own.address(), of_own.address());
        match candidates {
            DeviceCandidateGradients::Rows(to) => {
                assert_eq!((to.rows(), to.columns()), (all, columns));
                self.fill(to, 0.0);
                step.of_candidates = Some(to.address());
                step.run(loss, own, masked).1
            }
            DeviceCandidateGradients::ByNode { offsets, members, to } if call.is_by_edge() => {
                let (scores, pending) = step.run(loss, own, masked);
                step.back_to_nodes(scores.address(), offsets, members, to);
                pending
            }
            DeviceCandidateGradients::ByNode { offsets, members, to } => {
                let mut by_row = DeviceMatrix::new(self, all, columns);
                self.fill(&mut by_row, 0.0);
                step.of_candidates = Some(by_row.address());
                let (_, pending) = step.run(loss, own, masked);
                self.sum_rows(&[&by_row], offsets, members, to);
                pending
            }
        }
    }

    /// Candidates one after the other, where matmuls read them.
    fn link_gathered(&self, call: &DevicePairs<'_>, rows: Option<&DeviceBuffer>) -> Option<DeviceMatrix> {
        let rows = rows.filter(|_| call.is_matmul())?;
        let count = call.rows.map_or(0, <[u32]>::len);
        let mut to = DeviceMatrix::new(self, count, call.nodes.columns());
        self.gather(call.nodes.address(), rows, &mut to);
        Some(to)
    }
}

impl DevicePairs<'_> {
    /// Whether chunks are large enough for matmuls, and gradients are matmuls.
    fn is_matmul(&self) -> bool {
        self.decoder.is_matmul() && (self.rows.is_none() || self.chunk_edges >= MATMUL_EDGES)
    }

    /// Whether each edge has its own candidates.
    fn is_by_edge(&self) -> bool {
        self.rows.is_some() && self.chunk_edges == 1
    }

    fn nodes_in_order(&self) -> Option<u64> {
        (self.rows.is_none() && self.decoder.is_matmul()).then(|| self.nodes.address())
    }
}

impl LinkStep<'_> {
    /// Goes through all waves. Returns the gradients of the scores of the last one, and the loss.
    fn run(
        &self,
        loss: DeviceLinkLoss,
        (own, of_own): (u64, u64),
        masked: &MaskedOfEdge<'_>,
    ) -> (DeviceBuffer, Pending) {
        let (gpu, edges, each) = (self.gpu, self.call.queries.rows(), self.call.each);
        let own_scores = DeviceBuffer::words(gpu, edges * 2);
        let losses = DeviceBuffer::new(gpu, (edges + 1) * 8, Use::Compute);
        let most = if self.call.rows.is_some() { edges } else { wave_edges(each) };
        let scores = DeviceBuffer::words(gpu, most.min(edges) * each);
        for first in (0..edges).step_by(most.max(1)) {
            let wave = EdgeWave { first, edges: most.min(edges - first), scores: scores.address() };
            self.score(wave, own, own_scores.address());
            self.mask(wave, masked, own);
            self.compare(wave, loss, own_scores.address(), edges, losses.address());
            self.back_to_own(wave, own, own_scores.address(), edges, of_own);
            self.back_to_queries(wave);
            self.back_to_candidates(wave);
        }
        let total = losses.address() + edges as u64 * 8;
        // SAFETY: there is one loss per edge, and one more element.
        let pending = unsafe {
            launch!(
                gpu, "add_numbers_f64", [1, 1], [256, 1]; losses.address(), total, edges as u32, 1.0f64, 0u32
            );
            Pending::copy(gpu, total)
        };
        (scores, pending)
    }

    fn queries(&self, wave: EdgeWave) -> u64 {
        self.call.queries.address() + (wave.first * self.columns() * 4) as u64
    }

    fn of_queries(&self, wave: EdgeWave) -> u64 {
        self.of_queries + (wave.first * self.columns() * 4) as u64
    }

    fn columns(&self) -> usize {
        self.call.queries.columns()
    }

    /// Edges per chunk, as far as they are in the wave.
    fn chunk_edges(&self, wave: EdgeWave) -> usize {
        if self.call.rows.is_some() { self.call.chunk_edges } else { wave.edges }
    }

    /// Calls `each` with (edges per chunk, chunks, first edge in the wave, first chunk) for the whole chunks and then
    /// for the last one.
    fn for_batches(&self, wave: EdgeWave, mut each: impl FnMut(usize, usize, usize, usize)) {
        let chunk_edges = self.chunk_edges(wave);
        let (whole, rest) = (wave.edges / chunk_edges, wave.edges % chunk_edges);
        each(chunk_edges, whole, 0, 0);
        if rest > 0 {
            each(rest, 1, whole * chunk_edges, whole);
        }
    }

    fn score(&self, wave: EdgeWave, own: u64, own_scores: u64) {
        let (call, columns, each) = (self.call, self.columns(), self.call.each);
        let decoder = call.decoder as u32;
        let pairs = |rows: u64, scores: u64, count: usize, chunk_edges: usize, each: usize| {
            // SAFETY: rows are rows of the nodes, by the assertions of `link_loss`; there is a score per pair.
            unsafe {
                launch!(
                    self.gpu, "link_pairs", [blocks(count, 8), 1], [256, 1];
                    self.queries(wave), call.nodes.address(), rows, scores, count as u64, chunk_edges as u32,
                    each as u32, columns as u32, decoder
                )
            }
        };
        let first = (wave.first * 4) as u64;
        pairs(own + first, own_scores + first, wave.edges, 1, 1);
        let Some(gathered) = self.gathered.filter(|_| call.decoder.is_dot()) else {
            if call.rows.is_some() && call.chunk_edges < MATMUL_EDGES {
                return pairs(self.rows, wave.scores, wave.edges * each, call.chunk_edges, each);
            }
            let chunk_edges = self.chunk_edges(wave);
            let tiles = wave.edges.div_ceil(chunk_edges) * chunk_edges.div_ceil(64) * each.div_ceil(64);
            // SAFETY: as above.
            return unsafe {
                launch!(
                    self.gpu, "link_tile", [tiles as u32, 1], [256, 1];
                    self.queries(wave), call.nodes.address(), self.rows, wave.scores, 0u64, 0u64, wave.edges as u32,
                    chunk_edges as u32, each as u32, columns as u32, decoder
                )
            };
        };
        self.for_batches(wave, |edges, count, first_edge, chunk| {
            let candidates = gathered + (chunk * each * columns * 4) as u64;
            let queries = self.queries(wave) + (first_edge * columns * 4) as u64;
            let scores = wave.scores + (first_edge * each * 4) as u64;
            self.gpu.gemm_batched(
                [true, false],
                [each, edges, columns],
                [(candidates, columns, each * columns), (queries, columns, edges * columns)],
                false,
                (scores, each, edges * each),
                count,
            );
        });
    }

    fn mask(&self, wave: EdgeWave, masked: &MaskedOfEdge<'_>, own: u64) {
        let (gpu, each) = (self.gpu, self.call.each);
        let mut pairs: Vec<u32> = Vec::new();
        for edge in wave.first..wave.first + wave.edges {
            masked(edge, &mut |candidate| {
                assert!((candidate as usize) < each, "masks are inside");
                pairs.extend([edge as u32, candidate]);
                if pairs.len() >= 2 * MOST_MASKED {
                    self.mask_pairs(wave, &pairs);
                    pairs.clear();
                }
            });
        }
        self.mask_pairs(wave, &pairs);
        if self.call.rows.is_none() {
            // SAFETY: own rows are rows of the nodes, which are the candidates here.
            unsafe {
                launch!(
                    gpu, "link_mask_own", [blocks(wave.edges, 256), 1], [256, 1];
                    wave.scores, own + (wave.first * 4) as u64, wave.edges as u32, each as u32
                )
            }
        }
    }

    /// Masks some pairs of an edge of the wave and one of its candidates.
    fn mask_pairs(&self, wave: EdgeWave, pairs: &[u32]) {
        let (gpu, count) = (self.gpu, pairs.len() / 2);
        let uploaded = gpu.upload_slice(pairs);
        // SAFETY: pairs are inside the wave's scores, as `mask` asserts.
        unsafe {
            launch!(
                gpu, "link_mask", [blocks(count, 256), 1], [256, 1];
                wave.scores, uploaded.address(), count as u32, wave.first as u32, self.call.each as u32
            )
        }
    }

    fn compare(&self, wave: EdgeWave, loss: DeviceLinkLoss, own_scores: u64, edges: usize, losses: u64) {
        let first = (wave.first * 4) as u64;
        let weights = self.weights.map_or(0, |weights| weights + first);
        let is_l2 = self.call.decoder == DeviceDecoder::TranslationL2;
        // SAFETY: each edge of the wave has its scores, its own score and gradient, and its loss.
        unsafe {
            launch!(
                self.gpu, "link_losses", [wave.edges as u32, 1], [128, 1];
                wave.scores, own_scores + first, own_scores + first + (edges * 4) as u64, losses + 2 * first,
                weights, self.call.each as u32, loss.kind, loss.scale, loss.margin, loss.temperature, is_l2 as u32
            )
        }
    }

    fn back_to_own(&self, wave: EdgeWave, own: u64, own_scores: u64, edges: usize, of_own: u64) {
        let (columns, first) = (self.columns(), (wave.first * 4) as u64);
        // SAFETY: own rows are rows of the nodes; gradients have a row per edge.
        unsafe {
            launch!(
                self.gpu, "link_back_own", [blocks(wave.edges * columns, 256), 1], [256, 1];
                self.queries(wave), self.call.nodes.address(), own + first, own_scores + first + (edges * 4) as u64,
                self.of_queries(wave), of_own + (wave.first * columns * 4) as u64, wave.edges as u32,
                columns as u32, self.call.decoder as u32
            )
        }
    }

    fn back_to_queries(&self, wave: EdgeWave) {
        let (call, columns, each) = (self.call, self.columns(), self.call.each);
        let Some(gathered) = self.gathered else {
            // SAFETY: rows are rows of the nodes; scores have `each` numbers per edge.
            return unsafe {
                launch!(
                    self.gpu, "link_back_queries", [blocks(wave.edges * call.decoder.width(columns), 256), 1], [256, 1];
                    self.queries(wave), call.nodes.address(), self.rows, wave.scores, self.of_queries(wave),
                    wave.edges as u32, if call.rows.is_some() { wave.first as u32 } else { 0 },
                    self.chunk_edges(wave) as u32, each as u32, columns as u32, call.decoder as u32
                )
            };
        };
        self.for_batches(wave, |edges, count, first_edge, chunk| {
            let candidates = gathered + (chunk * each * columns * 4) as u64;
            let to = self.of_queries(wave) + (first_edge * columns * 4) as u64;
            let scores = wave.scores + (first_edge * each * 4) as u64;
            self.gpu.gemm_batched(
                [false, false],
                [columns, edges, each],
                [(candidates, columns, each * columns), (scores, each, edges * each)],
                true,
                (to, columns, edges * columns),
                count,
            );
        });
        if !call.decoder.is_dot() {
            // SAFETY: as above.
            unsafe {
                launch!(
                    self.gpu, "link_less_rows", [blocks(wave.edges, 8), 1], [256, 1];
                    wave.scores, self.queries(wave), self.of_queries(wave), wave.edges as u32, each as u32,
                    columns as u32
                )
            }
        }
    }

    fn back_to_candidates(&self, wave: EdgeWave) {
        let Some(to) = self.of_candidates else { return };
        let (call, columns, each) = (self.call, self.columns(), self.call.each);
        let all = call.rows.map_or(each, <[u32]>::len);
        // With every node a candidate there is one chunk, whatever the wave.
        let (first_edge, chunk_edges) = match call.rows {
            Some(_) => (wave.first as u32, call.chunk_edges as u32),
            None => (0, wave.edges as u32),
        };
        let Some(gathered) = self.gathered else {
            // SAFETY: rows are rows of the nodes; scores have `each` numbers per edge, and `to` a row per candidate.
            return unsafe {
                launch!(
                    self.gpu, "link_back_candidates", [blocks(all * call.decoder.width(columns), 256), 1], [256, 1];
                    self.queries(wave), call.nodes.address(), self.rows, wave.scores, to, all as u64,
                    wave.edges as u32, first_edge, chunk_edges, each as u32, columns as u32, call.decoder as u32
                )
            };
        };
        self.for_batches(wave, |edges, count, first, chunk| {
            let queries = self.queries(wave) + (first * columns * 4) as u64;
            let scores = wave.scores + (first * each * 4) as u64;
            self.gpu.gemm_batched(
                [false, true],
                [columns, each, edges],
                [(queries, columns, edges * columns), (scores, each, edges * each)],
                true,
                (to + (chunk * each * columns * 4) as u64, columns, each * columns),
                count,
            );
        });
        if !call.decoder.is_dot() {
            // SAFETY: as above.
            unsafe {
                launch!(
                    self.gpu, "link_less_candidates", [blocks(all, 8), 1], [256, 1];
                    wave.scores, gathered, to, all as u64, wave.edges as u32, first_edge, chunk_edges, each as u32,
                    columns as u32
                )
            }
        }
    }

    fn back_to_nodes(&self, scores: u64, offsets: &[u32], members: &[u32], to: &mut DeviceMatrix) {
        let (call, columns) = (self.call, self.columns());
        let nodes = call.nodes.rows();
        assert_eq!((to.rows(), to.columns(), offsets.len()), (nodes, columns, nodes + 1));
        assert!(offsets.is_sorted() && offsets[nodes] as usize <= members.len());
        let all = call.rows.map_or(0, <[u32]>::len);
        assert!(members.iter().all(|member| (*member as usize) < all), "members are candidates");
        let [offsets, members] = [offsets, members].map(|words| self.gpu.upload_slice(words));
        // SAFETY: members are candidates of edges, by the assertion above.
        unsafe {
            launch!(
                self.gpu, "link_back_nodes", [blocks(nodes * call.decoder.width(columns), 256), 1], [256, 1];
                call.queries.address(), call.nodes.address(), offsets.address(), members.address(), scores,
                to.address(), nodes as u32, call.each as u32, columns as u32, call.decoder as u32
            )
        }
    }
}
