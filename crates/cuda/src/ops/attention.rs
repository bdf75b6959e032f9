use super::{DeviceDropout, RowShape};
use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::memory::DeviceBuffer;
use crate::{DeviceAdjacency, DeviceMatrix};

/// Attention of GAT over the neighbours and the node itself.
pub struct AttentionCall<'a> {
    /// The adjacency.
    pub lists: &'a DeviceAdjacency,
    /// Number of heads.
    pub heads: usize,
    /// Whether heads are averaged; otherwise they are concatenated.
    pub average: bool,
    /// Projected input rows.
    pub hidden: &'a DeviceMatrix,
    /// Weights of a row as neighbour.
    pub source: &'a DeviceMatrix,
    /// Weights of a row as target.
    pub target: &'a DeviceMatrix,
    /// Slope of the leaky ReLU below 0.
    pub slope: f32,
    /// Dropout of attention weights.
    pub dropout: DeviceDropout,
}

/// Values that attention keeps for its backward pass.
pub struct AttentionState<'a> {
    /// One row per edge, then one row per output.
    pub weights: &'a DeviceMatrix,
    /// One row per input.
    pub source_scores: &'a DeviceMatrix,
    /// One row per output.
    pub target_scores: &'a DeviceMatrix,
}

impl AttentionCall<'_> {
    fn check(&self) {
        let columns = self.hidden.columns();
        assert!(
            self.heads > 0 && columns.is_multiple_of(self.heads),
            "{} heads in {columns} columns",
            self.heads
        );
        assert_eq!(self.hidden.rows(), self.lists.inputs(), "the graph of this layer");
        assert!([self.source, self.target].iter().all(|vector| vector.is_row(columns)));
    }

    fn width(&self) -> usize {
        self.hidden.columns() / self.heads
    }

    fn output_columns(&self) -> usize {
        if self.average { self.width() } else { self.hidden.columns() }
    }

    /// Lanes that a head's part fills with exactly four numbers each, if it does.
    fn part_lanes(&self) -> Option<usize> {
        let width = self.width();
        [1, 2, 4, 8, 16, 32].into_iter().find(|lanes| lanes * 4 == width)
    }

    /// Rows of the weights: one per edge, then one per output.
    fn weight_rows(&self) -> usize {
        self.lists.edge_count() + self.lists.outputs()
    }

    fn shape(&self) -> RowShape {
        RowShape::of_heads(self.hidden.columns(), self.width())
    }
}

impl Gpu {
    /// Attention: one row per output, and the values for the backward pass (weights, scores as neighbour, scores as
    /// target).
    pub fn attend(&self, call: &AttentionCall<'_>, output: &mut DeviceMatrix) -> [DeviceMatrix; 3] {
        call.check();
        let (lists, heads, columns) = (call.lists, call.heads, call.hidden.columns());
        let (inputs, outputs, edges) = (lists.inputs(), lists.outputs(), lists.edge_count());
        assert_eq!((output.rows(), output.columns()), (outputs, call.output_columns()));
        let weights = DeviceMatrix::new(self, call.weight_rows(), heads);
        let source_scores = DeviceMatrix::new(self, inputs, heads);
        let target_scores = DeviceMatrix::new(self, outputs, heads);
        self.score(call, &source_scores, &target_scores);
        let dropped =
            (call.dropout.threshold > 0).then(|| DeviceBuffer::words(self, call.weight_rows() * heads));
        // SAFETY: the adjacency is checked; scores and weights have the rows that the kernel reads and writes.
        unsafe {
            launch!(
                self, "weigh_lists", [blocks(outputs * heads, 256), 1], [256, 1];
                lists.offsets(), lists.nbrs(), source_scores.address(), target_scores.address(), weights.address(),
                dropped.as_ref().map_or(0, DeviceBuffer::address), inputs as u32, outputs as u32, edges as u32,
                heads as u32, call.slope, call.dropout
            );
        }
        let shape = call.shape();
        let side_by_side = call.average.then(|| DeviceMatrix::new(self, outputs, columns));
        let to = side_by_side.as_ref().unwrap_or(output).address();
        // SAFETY: as above; the result has one row per output.
        unsafe {
            launch!(
                self, &shape.kernel("attend"), shape.grid(outputs, columns), [256, 1];
                lists.offsets(), lists.nbrs(), dropped.as_ref().map_or(weights.address(), DeviceBuffer::address),
                call.hidden.address(), to, inputs as u32, outputs as u32, edges as u32, columns as u32, heads as u32
            );
            if call.average {
                let count = output.count();
                launch!(
                    self, "average_heads", [blocks(count, 256), 1], [256, 1];
                    to, output.address(), count as u64, call.width() as u32, heads as u32
                );
            }
        }
        [weights, source_scores, target_scores]
    }

    fn score(&self, call: &AttentionCall<'_>, source_scores: &DeviceMatrix, target_scores: &DeviceMatrix) {
        let (rows, heads, columns) = (call.lists.inputs(), call.heads, call.hidden.columns());
        let vectors = (call.source.address(), call.target.address());
        let first = call.lists.self_first();
        // SAFETY: shapes are those of `check`; scores have one row per input and one row per output.
        unsafe {
            match call.part_lanes() {
                Some(lanes) => launch!(
                    self, &format!("score_parts_{lanes}"), [blocks(rows * heads, 256 / lanes), 1], [256, 1];
                    call.hidden.address(), vectors.0, vectors.1, source_scores.address(), target_scores.address(),
                    rows as u32, heads as u32, first
                ),
                None => launch!(
                    self, "score_rows", [blocks(rows, 8), 1], [256, 1];
                    call.hidden.address(), vectors.0, vectors.1, source_scores.address(), target_scores.address(),
                    rows as u32, columns as u32, heads as u32, first
                ),
            }
        }
    }

    /// Gradients of attention from that of its output: of the projected rows, and of the two vectors.
    pub fn attend_back(
        &self,
        call: &AttentionCall<'_>,
        state: &AttentionState<'_>,
        gradient: &DeviceMatrix,
        hidden: &mut DeviceMatrix,
        vectors: [&mut DeviceMatrix; 2],
    ) {
        call.check();
        let (lists, heads, columns) = (call.lists, call.heads, call.hidden.columns());
        let (inputs, outputs, edges) = (lists.inputs(), lists.outputs(), lists.edge_count());
        assert_eq!((gradient.rows(), gradient.columns()), (outputs, call.output_columns()));
        assert_eq!((hidden.rows(), hidden.columns()), (inputs, columns));
        assert_eq!((state.weights.rows(), state.weights.columns()), (call.weight_rows(), heads));
        assert!((state.source_scores.rows(), state.target_scores.rows()) == (inputs, outputs));
        assert!([state.source_scores, state.target_scores].iter().all(|scores| scores.columns() == heads));
        let spread = call.average.then(|| DeviceMatrix::new(self, outputs, columns));
        if let Some(spread) = &spread {
            let count = spread.count();
            // SAFETY: both matrices have one row per output.
            unsafe {
                launch!(
                    self, "spread_heads", [blocks(count, 256), 1], [256, 1];
                    gradient.address(), spread.address(), count as u64, call.width() as u32, heads as u32
                )
            }
        }
        let gradient = spread.as_ref().unwrap_or(gradient).address();
        let slopes = DeviceBuffer::words(self, call.weight_rows() * heads);
        let target_slopes = DeviceBuffer::words(self, outputs * heads);
        let source_slopes = DeviceBuffer::words(self, inputs * heads);
        let dropped =
            (call.dropout.threshold > 0).then(|| DeviceBuffer::words(self, call.weight_rows() * heads));
        let (n_in, n_out, n_edges) = (inputs as u32, outputs as u32, edges as u32);
        let (offsets, nbrs) = (lists.offsets(), lists.nbrs());
        // SAFETY: the adjacency is checked; every array has the rows that its kernel accesses, by the asserts above.
        unsafe {
            match call.part_lanes() {
                Some(lanes) => launch!(
                    self, &format!("slope_parts_{lanes}"), [blocks(outputs * heads, 256 / lanes), 1], [256, 1];
                    offsets, nbrs, call.hidden.address(), gradient, slopes.address(), n_in, n_out, n_edges, heads as u32
                ),
                None => launch!(
                    self, "weight_slopes", [blocks(outputs, 8), 1], [256, 1];
                    offsets, nbrs, call.hidden.address(), gradient, slopes.address(), n_in, n_out, n_edges,
                    columns as u32, heads as u32
                ),
            }
            launch!(
                self, "score_slopes", [blocks(outputs * heads, 256), 1], [256, 1];
                offsets, nbrs, state.source_scores.address(), state.target_scores.address(), state.weights.address(),
                slopes.address(), target_slopes.address(), dropped.as_ref().map_or(0, DeviceBuffer::address), n_in,
                n_out, n_edges, heads as u32, call.slope, call.dropout
            );
            let (shape, transposed) = (call.shape(), lists.transposed());
            launch!(
                self, &shape.kernel("attend_back"), shape.grid(inputs, columns), [256, 1];
                transposed.starts.address(), transposed.edges.address(), transposed.outputs.address(),
                dropped.as_ref().map_or(state.weights.address(), DeviceBuffer::address), slopes.address(),
                target_slopes.address(), gradient, call.source.address(), call.target.address(), hidden.address(),
                source_slopes.address(), n_in, n_out, n_edges, columns as u32, heads as u32
            );
        }
        let [source, target] = vectors;
        self.weighted_sums(call.hidden, inputs, &source_slopes, heads, source);
        self.weighted_sums(call.hidden, outputs, &target_slopes, heads, target);
    }
}
