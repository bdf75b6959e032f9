//! The CPU backend: rayon over fixed chunks of rows, `gemm` inside each. It runs on the rayon pool of its caller.

mod affine;
mod aggregate;
mod attention;
mod buffer;
mod graph;
mod hidden;
mod kernel;
mod limit;
pub(crate) mod link;
mod loss;
mod matmul;
mod norm;
mod part;
mod post;
mod update;
pub(crate) mod wide;

pub use affine::CHUNK_ROWS;
pub(crate) use affine::group_count;
pub(crate) use attention::VECTOR_CHUNKS;
pub use buffer::CpuMatrix;
pub(crate) use buffer::pooled_words;
pub use graph::CpuGraph;
pub use hidden::CpuHidden;
pub use limit::best_matmul_rate;
pub(crate) use loss::counted;
pub(crate) use matmul::packed_words;

use crate::*;
use buffer::MatrixPool;
use esker_types::random::{Key, unit};
use rayon::prelude::*;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Computes in host memory. Clones share their memory and counters.
#[derive(Clone, Default)]
pub struct CpuBackend {
    pool: MatrixPool,
    counters: Arc<Counters>,
}

#[derive(Default)]
struct Counters {
    matmul_nanos: AtomicU64,
    matmul_operations: AtomicU64,
    aggregate_nanos: AtomicU64,
}

/// Work of a backend's threads so far, summed over all threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuCounters {
    /// CPU time in matmuls.
    pub matmul_nanos: u64,
    /// Multiplications and additions of matmuls.
    pub matmul_operations: u64,
    /// CPU time in gathering and aggregating rows.
    pub aggregate_nanos: u64,
    /// Bytes of matrices that were newly allocated instead of reused.
    pub allocated_bytes: u64,
}

impl Counters {
    fn matmul(&self, [rows, columns, depth]: [usize; 3], work: impl FnOnce()) {
        let start = thread_nanos();
        work();
        self.matmul_nanos.fetch_add(thread_nanos() - start, Relaxed);
        self.matmul_operations.fetch_add(2 * (rows * columns * depth) as u64, Relaxed);
    }

    fn aggregate(&self, work: impl FnOnce()) {
        let start = thread_nanos();
        work();
        self.aggregate_nanos.fetch_add(thread_nanos() - start, Relaxed);
    }
}

/// CPU time of this thread. Time taken by others does not count.
fn thread_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to the struct it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl CpuBackend {
    /// A backend with its own memory.
    pub fn new() -> CpuBackend {
        CpuBackend::default()
    }

    /// Its counters so far.
    pub fn counters(&self) -> CpuCounters {
        CpuCounters {
            matmul_nanos: self.counters.matmul_nanos.load(Relaxed),
            matmul_operations: self.counters.matmul_operations.load(Relaxed),
            aggregate_nanos: self.counters.aggregate_nanos.load(Relaxed),
            allocated_bytes: self.pool.allocated_bytes(),
        }
    }
}

/// Rows per parallel task of copies.
const COPIED_ROWS: usize = 512;
/// Numbers that one task swaps.
const EXCHANGED_NUMBERS: usize = 1 << 16;

/// A number that is already available.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ready(pub f64);

impl Deferred for Ready {
    fn wait(self) -> Result<f64, DeviceError> {
        Ok(self.0)
    }
}

impl HostRows for CpuMatrix {
    fn values_mut(&mut self) -> &mut [f32] {
        CpuMatrix::values_mut(self)
    }
}

impl Device for CpuBackend {
    type Matrix = CpuMatrix;
    type Graph = CpuGraph;
    type StagedGraph = CpuGraph;
    type HostRows = CpuMatrix;
    type Cache = Infallible;
    type Hidden = CpuHidden;
    type Number = Ready;
    const STEPS_IN_FLIGHT: usize = 0;

    fn in_host_memory(&self) -> bool {
        true
    }

    fn peak_bytes(&self) -> u64 {
        self.pool.peak_bytes()
    }

    fn release_free(&self) {
        self.pool.release_free();
    }

    fn set_reuse_bytes(&self, bytes: u64) {
        self.pool.set_slack((bytes / 4) as usize);
    }

    fn check(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn host_rows(&self, rows: usize, columns: usize) -> CpuMatrix {
        self.matrix(rows, columns)
    }

    fn upload(&self, rows: CpuMatrix, columns: usize) -> CpuMatrix {
        assert_eq!(rows.columns(), columns);
        rows
    }

    fn assemble(&self, batch: Infallible, _: usize) -> CpuMatrix {
        match batch {}
    }

    fn hidden_rows(&self, shape: HiddenShape) -> Result<CpuHidden, DeviceError> {
        Ok(CpuHidden::new(&self.pool, shape))
    }

    fn matrix(&self, rows: usize, columns: usize) -> CpuMatrix {
        CpuMatrix::new(&self.pool, rows, columns)
    }

    fn write(&self, matrix: &mut CpuMatrix, first: usize, values: &[f32]) {
        let start = first * matrix.columns();
        matrix.values_mut()[start..][..values.len()].copy_from_slice(values);
    }

    fn read(&self, matrix: &CpuMatrix, first: usize, values: &mut [f32]) {
        values.copy_from_slice(&matrix.values()[first * matrix.columns()..][..values.len()]);
    }

    fn exchange(&self, matrix: &mut CpuMatrix, first: usize, values: &mut [f32]) {
        let start = first * matrix.columns();
        let held = matrix.values_mut()[start..][..values.len()].par_chunks_mut(EXCHANGED_NUMBERS);
        let pairs = held.zip(values.par_chunks_mut(EXCHANGED_NUMBERS));
        pairs.for_each(|(held, values)| held.swap_with_slice(values));
    }

    fn fill(&self, matrix: &mut CpuMatrix, value: f32) {
        matrix.values_mut().fill(value);
    }

    fn gather_rows(&self, from: &CpuMatrix, rows: &[u32], to: &mut CpuMatrix) {
        let columns = from.columns();
        assert_eq!((to.rows(), to.columns()), (rows.len(), columns));
        let parts = buffer::Parts::new(to.values_mut());
        affine::for_chunks(rows.len(), COPIED_ROWS, |first, count| {
            // SAFETY: chunks do not overlap, and the matrix outlives the loop.
            let to = unsafe { parts.part(first * columns, count * columns) };
            for (to, row) in to.chunks_exact_mut(columns.max(1)).zip(&rows[first..]) {
                to.copy_from_slice(from.row(*row as usize));
            }
        });
    }

    fn scatter_rows(&self, from: Option<&CpuMatrix>, rows: &[u32], to: &mut CpuMatrix) {
        let columns = to.columns();
        assert!(from.is_none_or(|from| from.rows() == rows.len() && from.columns() == columns));
        for (index, row) in rows.iter().enumerate() {
            let to = &mut to.values_mut()[*row as usize * columns..][..columns];
            match from {
                Some(from) => to.copy_from_slice(from.row(index)),
                None => to.fill(0.0),
            }
        }
    }

    fn add_rows(&self, from: &CpuMatrix, rows: &[u32], scale: f32, to: &mut CpuMatrix) {
        let columns = to.columns();
        assert_eq!((from.rows(), from.columns()), (rows.len(), columns));
        for (index, row) in rows.iter().enumerate() {
            let to = &mut to.values_mut()[*row as usize * columns..][..columns];
            to.iter_mut().zip(from.row(index)).for_each(|(to, from)| *to += scale * from);
        }
    }

    fn copy_columns(
        &self,
        from: &CpuMatrix,
        from_first: usize,
        to: &mut CpuMatrix,
        to_first: usize,
        count: usize,
    ) {
        let (rows, columns) = (to.rows(), to.columns());
        assert!(from.rows() == rows && from_first + count <= from.columns() && to_first + count <= columns);
        let parts = buffer::Parts::new(to.values_mut());
        affine::for_chunks(rows, COPIED_ROWS, |first, copied| {
            // SAFETY: chunks do not overlap, and the matrix outlives the loop.
            let to = unsafe { parts.part(first * columns, copied * columns) };
            for (to, row) in to.chunks_exact_mut(columns.max(1)).zip(first..) {
                to[to_first..][..count].copy_from_slice(&from.row(row)[from_first..][..count]);
            }
        });
    }

    fn stage_graph(&self, adjacency: &Adjacency<'_>) -> CpuGraph {
        CpuGraph::new(&self.pool, adjacency)
    }

    fn upload_graph(&self, staged: CpuGraph) -> CpuGraph {
        staged
    }

    fn part_graph(&self, inputs: usize, nbr_offsets: &[u32], nbrs: &[u32]) -> CpuGraph {
        CpuGraph::part(&self.pool, inputs, nbr_offsets, nbrs)
    }
}

impl Backend for CpuBackend {
    fn counted(&self) -> Option<CpuCounters> {
        Some(self.counters())
    }

    fn fill_uniform(&self, matrix: &mut CpuMatrix, key: Key, bound: f32) {
        let number = |index: u64| (bound as f64 * (2.0 * unit(key.at(index)) - 1.0)) as f32;
        matrix.values_mut().iter_mut().zip(0..).for_each(|(value, index)| *value = number(index));
    }

    fn affine(&self, call: Affine<'_, Self>, output: &mut CpuMatrix) {
        self.affine_forward(call, output)
    }

    fn weight_gradients(
        &self,
        gradient: &mut CpuMatrix,
        post: Option<(&CpuMatrix, Post)>,
        terms: Vec<WeightTerm<'_, Self>>,
        bias_gradient: Option<&mut CpuMatrix>,
    ) {
        self.affine_weights(gradient, post, terms, bias_gradient)
    }

    fn input_gradient(&self, terms: &[InputTerm<'_, Self>], input_gradient: &mut CpuMatrix) {
        self.affine_inputs(terms, input_gradient)
    }

    fn attention(&self, call: &Attention<'_, Self>, output: &mut CpuMatrix) -> AttentionKept<Self> {
        self.attend(call, output)
    }

    fn attention_backward(
        &self,
        call: &Attention<'_, Self>,
        kept: &AttentionKept<Self>,
        gradient: &CpuMatrix,
        into: AttentionGradients<'_, Self>,
    ) {
        self.attend_backward(call, kept, gradient, into)
    }

    fn accumulate(
        &self,
        graph: &CpuGraph,
        input: &CpuMatrix,
        by: Accumulator<'_, CpuMatrix>,
        sums: &mut CpuMatrix,
    ) {
        self.accumulate_part(graph, input, by, sums)
    }

    fn scale_rows(&self, factors: &CpuMatrix, rows: &mut CpuMatrix) {
        self.scale_all(factors, rows)
    }

    fn attention_scores(&self, rows: &CpuMatrix, vector: &CpuMatrix, heads: usize) -> CpuMatrix {
        self.scores_of(rows, vector, heads)
    }

    fn attend_part(
        &self,
        graph: &CpuGraph,
        call: AttentionPart<'_, CpuMatrix>,
        sums: &mut AttentionSums<CpuMatrix>,
    ) {
        self.attend_some(graph, call, sums)
    }

    fn attend_end(&self, sums: AttentionSums<CpuMatrix>, average: bool, output: &mut CpuMatrix) {
        self.attend_last(sums, average, output)
    }

    fn normalise(
        &self,
        call: Normalise<'_, Self>,
        values: &mut CpuMatrix,
        output: &mut CpuMatrix,
    ) -> CpuMatrix {
        self.normalise_forward(call, values, output)
    }

    fn normalise_backward(&self, call: NormaliseBackward<'_, Self>, gradient: &mut CpuMatrix) {
        self.normalise_back(call, gradient)
    }

    fn loss(
        &self,
        logits: &CpuMatrix,
        rows: &[u32],
        labels: Labels<'_>,
        gradient: &mut CpuMatrix,
    ) -> Result<Ready> {
        self.loss_of(logits, rows, labels, gradient).map(Ready)
    }

    fn update(&self, update: &Update, parameters: Vec<Moved<'_, Self>>) -> Result<Option<Ready>> {
        let (scale, length) = match update.clip_norm {
            None => (1.0, None),
            Some(limit) => {
                let squares = |matrix: &CpuMatrix| {
                    matrix.values().iter().fold(0.0, |sum, value| sum + *value as f64 * *value as f64)
                };
                let length = parameters.iter().fold(0.0, |sum, p| sum + squares(p.gradient)).sqrt();
                if !length.is_finite() {
                    return Err(DeviceError::gradient(length).into());
                }
                ((limit as f64 / (length + 1e-6)).min(1.0) as f32, Some(Ready(length)))
            }
        };
        for Moved { value, gradient, state } in parameters {
            update::update(update, scale, value, gradient, state);
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_matrix_and_of_host_memory_change_places() {
        let device = CpuBackend::new();
        for (rows, columns, first, count) in [(5, 3, 1, 2), (3000, 100, 17, 2900), (4, 7, 4, 0)] {
            let mut matrix = device.matrix(rows, columns);
            let before: Vec<f32> = (0..rows * columns).map(|at| at as f32).collect();
            device.write(&mut matrix, 0, &before);
            let mut values: Vec<f32> = (0..count * columns).map(|at| -1.0 - at as f32).collect();
            let expected = values.clone();
            device.exchange(&mut matrix, first, &mut values);
            let moved = first * columns..(first + count) * columns;
            assert_eq!(values, before[moved.clone()]);
            assert_eq!(matrix.values()[moved.clone()], expected);
            let stayed = |at: &usize| !moved.contains(at);
            assert!((0..before.len()).filter(stayed).all(|at| matrix.values()[at] == before[at]));
        }
    }
}
