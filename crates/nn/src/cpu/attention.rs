//! GAT's attention on the CPU. Forward is one pass over the outputs. Backward is one pass over the outputs (scores),
//! one over the inputs (rows, by the transposed adjacency), and one for the two vectors.

use super::affine::for_chunks;
use super::buffer::Parts;
use super::graph::CpuGraph;
use super::wide::{exp, prefetch_row, wide};
use super::{CpuBackend, CpuMatrix};
use crate::{Attention, AttentionGradients, AttentionKept, Dropout, Shape};

const CHUNK_ROWS: usize = 128;
/// Largest number of partial sums of a vector's gradient.
pub(crate) const VECTOR_CHUNKS: usize = 64;
const PREFETCH_DISTANCE: usize = 4;

/// The inputs of every pass.
#[derive(Clone, Copy)]
struct Setting<'a> {
    graph: &'a CpuGraph,
    hidden: &'a [f32],
    heads: usize,
    /// Columns per head.
    width: usize,
    average: bool,
    slope: f32,
    dropout: Option<Dropout>,
    source_scores: &'a [f32],
    target_scores: &'a [f32],
}

impl Setting<'_> {
    fn columns(&self) -> usize {
        self.heads * self.width
    }

    fn output_columns(&self) -> usize {
        if self.average { self.width } else { self.columns() }
    }

    /// Start of a head's part in a row of the output.
    #[inline(always)]
    fn output_start(&self, head: usize) -> usize {
        if self.average { 0 } else { head * self.width }
    }

    /// Weight of one head's part in the output.
    #[inline(always)]
    fn share(&self) -> f32 {
        if self.average { 1.0 / self.heads as f32 } else { 1.0 }
    }

    #[inline(always)]
    fn leaky(&self, score: f32) -> f32 {
        if score > 0.0 { score } else { score * self.slope }
    }

    /// Dropout's factor for an attention weight.
    #[inline(always)]
    fn kept(&self, edge: usize, head: usize) -> f32 {
        self.dropout.map_or(1.0, |dropout| dropout.factor(edge, head, self.heads))
    }

    /// Each edge of an output with its neighbour, then the self-loop. Neighbours equal to the node are skipped.
    #[inline(always)]
    fn list(&self, output: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
        let graph = self.graph;
        let own = graph.self_first() + output;
        let (start, end) = (graph.offsets()[output] as usize, graph.offsets()[output + 1] as usize);
        let others = (start..end).map(move |edge| (edge, graph.nbrs()[edge] as usize));
        others.filter(move |(_, nbr)| *nbr != own).chain(std::iter::once((graph.edge_count() + output, own)))
    }
}

wide! {
    /// `scores[row][head] = part of the row . part of the vector`.
    pub(super) fn score_rows(rows: &[f32], vector: &[f32], heads: usize, scores: &mut [f32]) {
        let columns = vector.len();
        let width = columns / heads;
        for (row, scores) in rows.chunks_exact(columns).zip(scores.chunks_exact_mut(heads)) {
            for (head, score) in scores.iter_mut().enumerate() {
                *score = dot(&row[head * width..][..width], &vector[head * width..][..width]);
            }
        }
    }

    /// Softmax weights of one output's neighbours, indexed by their position; the self-loop is last.
    fn softmax_weights(setting: Setting<'_>, output: usize, head: usize, weights: &mut [f32]) {
        let (heads, target) = (setting.heads, setting.target_scores[output * setting.heads + head]);
        let mut largest = f32::NEG_INFINITY;
        let list = setting.list(output);
        for ((_, nbr), weight) in list.zip(weights.iter_mut()) {
            *weight = setting.leaky(setting.source_scores[nbr * heads + head] + target);
            largest = if *weight > largest { *weight } else { largest };
        }
        let mut sum = 0.0;
        for weight in weights.iter_mut() {
            *weight = exp(*weight - largest);
            sum += *weight;
        }
        let reciprocal = 1.0 / (sum + 1e-16);
        weights.iter_mut().for_each(|weight| *weight *= reciprocal);
    }

    /// Weighted sum of an output's rows. `weights` has one row per edge, starting at edge `start`.
    fn weighted_sum(
        setting: Setting<'_>, output: usize, start: usize, weights: &[f32], own_weights: &[f32], to: &mut [f32],
    ) {
        let (heads, width, columns) = (setting.heads, setting.width, setting.columns());
        let edges = setting.graph.edge_count();
        to.fill(0.0);
        for (edge, nbr) in setting.list(output) {
            if let Some(ahead) = setting.graph.nbrs().get(edge + PREFETCH_DISTANCE) {
                prefetch_row(setting.hidden, *ahead as usize * columns, columns);
            }
            let row = &setting.hidden[nbr * columns..][..columns];
            let weights = if edge < edges { &weights[(edge - start) * heads..][..heads] } else { own_weights };
            for (head, weight) in weights.iter().enumerate() {
                let weight = weight * setting.kept(edge, head) * setting.share();
                let to = &mut to[setting.output_start(head)..][..width];
                let row = &row[head * width..][..width];
                to.iter_mut().zip(row).for_each(|(to, from)| *to += weight * from);
            }
        }
    }

    /// Gradients of the weights of one output's neighbours, before softmax: one number per edge and head.
    fn weight_gradients_of(setting: Setting<'_>, output: usize, head: usize, gradient: &[f32], to: &mut [f32]) {
        let (width, columns) = (setting.width, setting.columns());
        let part = &gradient[setting.output_start(head)..][..width];
        for ((edge, nbr), to) in setting.list(output).zip(to.iter_mut()) {
            let row = &setting.hidden[nbr * columns + head * width..][..width];
            *to = dot(part, row) * setting.kept(edge, head) * setting.share();
        }
    }

    /// The gradient of one input's row from all outputs it is a neighbour of, and of its score as neighbour.
    fn input_gradient_row(
        setting: Setting<'_>, input: usize, gradient: &[f32], weights: &[f32], score_gradients: &[f32],
        to: &mut [f32], source_gradient: &mut [f32],
    ) {
        let (heads, width, graph) = (setting.heads, setting.width, setting.graph);
        let output_columns = setting.output_columns();
        let transposed = graph.transposed();
        let (start, end) = (transposed.offsets()[input] as usize, transposed.offsets()[input + 1] as usize);
        let others = (start..end)
            .map(|place| (transposed.edges()[place] as usize, transposed.outputs()[place] as usize))
            .filter(|(_, output)| graph.self_first() + output != input);
        let own = input.checked_sub(graph.self_first()).map(|output| (graph.edge_count() + output, output));
        to.fill(0.0);
        source_gradient.fill(0.0);
        for (edge, output) in others.chain(own) {
            let gradient = &gradient[output * output_columns..][..output_columns];
            for head in 0..heads {
                let weight = weights[edge * heads + head] * setting.kept(edge, head) * setting.share();
                let to = &mut to[head * width..][..width];
                let part = &gradient[setting.output_start(head)..][..width];
                to.iter_mut().zip(part).for_each(|(to, from)| *to += weight * from);
                source_gradient[head] += score_gradients[edge * heads + head];
            }
        }
    }

    /// `rows[head part] += numbers[head] x vector[head part]`.
    fn add_outer(row: &mut [f32], numbers: &[f32], vector: &[f32]) {
        let width = row.len() / numbers.len();
        for (head, number) in numbers.iter().enumerate() {
            let part = &vector[head * width..][..width];
            row[head * width..][..width].iter_mut().zip(part).for_each(|(to, from)| *to += number * from);
        }
    }

    /// `sums[head part] += sum over rows of numbers[row][head] x rows[row][head part]`.
    fn weighted_sums(rows: &[f32], numbers: &[f32], heads: usize, sums: &mut [f32]) {
        let columns = sums.len();
        let width = columns / heads;
        for (row, numbers) in rows.chunks_exact(columns).zip(numbers.chunks_exact(heads)) {
            for (head, number) in numbers.iter().enumerate() {
                let part = &row[head * width..][..width];
                sums[head * width..][..width].iter_mut().zip(part).for_each(|(to, from)| *to += number * from);
            }
        }
    }
}

/// A dot product in sixteen SIMD lanes, which are added in order.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a_whole, a_rest) = a.as_chunks::<16>();
    let (b_whole, b_rest) = b.as_chunks::<16>();
    for (a, b) in a_whole.iter().zip(b_whole) {
        for lane in 0..16 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    for (lane, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[lane] += a * b;
    }
    sums.iter().fold(0.0, |sum, lane| sum + lane)
}

impl CpuBackend {
    fn setting<'a>(
        call: &Attention<'a, CpuBackend>,
        source_scores: &'a CpuMatrix,
        target_scores: &'a CpuMatrix,
    ) -> Setting<'a> {
        let columns = call.hidden.columns();
        assert!(
            call.heads > 0 && columns.is_multiple_of(call.heads),
            "{} heads in {columns} columns",
            call.heads
        );
        assert_eq!(call.hidden.rows(), call.graph.inputs, "the graph of this layer");
        Setting {
            graph: call.graph,
            hidden: call.hidden.values(),
            heads: call.heads,
            width: columns / call.heads,
            average: call.average,
            slope: call.slope,
            dropout: call.dropout,
            source_scores: source_scores.values(),
            target_scores: target_scores.values(),
        }
    }

    fn scores(&self, rows: &[f32], vector: &CpuMatrix, heads: usize) -> CpuMatrix {
        let columns = vector.columns();
        let count = rows.len() / columns;
        let mut scores = CpuMatrix::new(&self.pool, count, heads);
        let parts = Parts::new(scores.values_mut());
        for_chunks(count, CHUNK_ROWS, |first, count| {
            // SAFETY: chunks do not overlap, and the matrix outlives the loop.
            let scores = unsafe { parts.part(first * heads, count * heads) };
            score_rows(&rows[first * columns..][..count * columns], vector.values(), heads, scores);
        });
        scores
    }

    pub(crate) fn attend(
        &self,
        call: &Attention<'_, CpuBackend>,
        output: &mut CpuMatrix,
    ) -> AttentionKept<CpuBackend> {
        let (graph, heads) = (call.graph, call.heads);
        let source_scores = self.scores(call.hidden.values(), call.source_vector, heads);
        let target_scores = self.scores(call.hidden.last(graph.outputs), call.target_vector, heads);
        let edges = graph.edge_count();
        let mut weights = CpuMatrix::new(&self.pool, edges + graph.outputs, heads);
        let setting = Self::setting(call, &source_scores, &target_scores);
        let columns = setting.output_columns();
        assert_eq!((output.rows(), output.columns()), (graph.outputs, columns));
        let (by_edge, by_output) = weights.values_mut().split_at_mut(edges * heads);
        let (by_edge, by_output) = (Parts::new(by_edge), Parts::new(by_output));
        let to = Parts::new(output.values_mut());
        for_chunks(graph.outputs, CHUNK_ROWS, |first, count| {
            let (start, end) = (graph.offsets()[first] as usize, graph.offsets()[first + count] as usize);
            // SAFETY: the edges of a chunk of outputs are its own, and the matrices outlive the loop.
            let (by_edge, by_output, to) = unsafe {
                (
                    by_edge.part(start * heads, (end - start) * heads),
                    by_output.part(first * heads, count * heads),
                    to.part(first * columns, count * columns),
                )
            };
            by_edge.fill(0.0);
            let mut list = Vec::new();
            for index in 0..count {
                let length = setting.list(first + index).count();
                list.resize(length, 0.0);
                for head in 0..heads {
                    softmax_weights(setting, first + index, head, &mut list);
                    for ((edge, _), weight) in setting.list(first + index).zip(&list) {
                        match edge < edges {
                            true => by_edge[(edge - start) * heads + head] = *weight,
                            false => by_output[index * heads + head] = *weight,
                        }
                    }
                }
            }
            self.counters.aggregate(|| {
                for index in 0..count {
                    let own = &by_output[index * heads..][..heads];
                    let to = &mut to[index * columns..][..columns];
                    weighted_sum(setting, first + index, start, by_edge, own, to);
                }
            });
        });
        AttentionKept { weights, source_scores, target_scores }
    }

    pub(crate) fn attend_backward(
        &self,
        call: &Attention<'_, CpuBackend>,
        kept: &AttentionKept<CpuBackend>,
        gradient: &CpuMatrix,
        into: AttentionGradients<'_, CpuBackend>,
    ) {
        let (graph, heads) = (call.graph, call.heads);
        let setting = Self::setting(call, &kept.source_scores, &kept.target_scores);
        assert_eq!((gradient.rows(), gradient.columns()), (graph.outputs, setting.output_columns()));
        let (scores, targets) = self.score_gradients(setting, kept.weights.values(), gradient);
        let mut sources = CpuMatrix::new(&self.pool, graph.inputs, heads);
        let columns = setting.columns();
        graph.transposed();
        let (to, by_input) = (Parts::new(into.hidden.values_mut()), Parts::new(sources.values_mut()));
        for_chunks(graph.inputs, CHUNK_ROWS, |first, count| {
            for input in first..first + count {
                // SAFETY: each input has its own rows, and the matrices outlive the loop.
                let (to, source) =
                    unsafe { (to.part(input * columns, columns), by_input.part(input * heads, heads)) };
                let (weights, scores) = (kept.weights.values(), scores.values());
                input_gradient_row(setting, input, gradient.values(), weights, scores, to, source);
                add_outer(to, source, call.source_vector.values());
                if let Some(output) = input.checked_sub(graph.self_first()) {
                    add_outer(to, &targets.values()[output * heads..][..heads], call.target_vector.values());
                }
            }
        });
        self.vector_gradient(call.hidden.values(), sources.values(), heads, into.source_vector);
        self.vector_gradient(call.hidden.last(graph.outputs), targets.values(), heads, into.target_vector);
    }

    /// Gradients of the scores before the leaky ReLU, one row per edge and self-loop, and their sums by output.
    fn score_gradients(
        &self,
        setting: Setting<'_>,
        weights: &[f32],
        gradient: &CpuMatrix,
    ) -> (CpuMatrix, CpuMatrix) {
        let (graph, heads) = (setting.graph, setting.heads);
        let edges = graph.edge_count();
        let mut scores = CpuMatrix::new(&self.pool, edges + graph.outputs, heads);
        let mut targets = CpuMatrix::new(&self.pool, graph.outputs, heads);
        let (by_edge, by_output) = (Parts::new(scores.values_mut()), Parts::new(targets.values_mut()));
        for_chunks(graph.outputs, CHUNK_ROWS, |first, count| {
            let mut list = Vec::new();
            for output in first..first + count {
                // SAFETY: each output has its own row, and the matrix outlives the loop.
                let target = unsafe { by_output.part(output * heads, heads) };
                list.resize(setting.list(output).count(), 0.0);
                for (head, target) in target.iter_mut().enumerate() {
                    weight_gradients_of(setting, output, head, gradient.row(output), &mut list);
                    let entries = || setting.list(output).zip(&list);
                    let weight = |edge: usize| weights[edge * heads + head];
                    let mean = entries().fold(0.0, |sum, ((edge, _), slope)| sum + weight(edge) * slope);
                    let own = setting.target_scores[output * heads + head];
                    *target = 0.0;
                    for ((edge, nbr), slope) in entries() {
                        let score = setting.source_scores[nbr * heads + head] + own;
                        let leaky = if score > 0.0 { 1.0 } else { setting.slope };
                        let value = weight(edge) * (slope - mean) * leaky;
                        // SAFETY: an edge or self-loop belongs to one output, and the matrix outlives the loop.
                        unsafe { by_edge.part(edge * heads + head, 1)[0] = value };
                        *target += value;
                    }
                }
            }
        });
        (scores, targets)
    }

    fn vector_gradient(&self, rows: &[f32], numbers: &[f32], heads: usize, to: &mut CpuMatrix) {
        let columns = to.columns();
        let count = rows.len() / columns;
        let unit = count.div_ceil(VECTOR_CHUNKS).max(CHUNK_ROWS);
        let mut partials = CpuMatrix::new(&self.pool, count.div_ceil(unit), columns);
        let parts = Parts::new(partials.values_mut());
        for_chunks(count, unit, |first, count| {
            // SAFETY: each chunk has its own row of partial sums.
            let sums = unsafe { parts.part(first / unit * columns, columns) };
            sums.fill(0.0);
            let rows = &rows[first * columns..][..count * columns];
            weighted_sums(rows, &numbers[first * heads..][..count * heads], heads, sums);
        });
        to.values_mut().fill(0.0);
        super::post::add_rows(partials.values(), columns, to.values_mut());
    }
}
