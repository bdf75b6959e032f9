//! Aggregation of neighbours whose rows are available a part at a time, for whole graphs. A row is summed in the order
//! of its neighbours, one after the other, so the result does not depend on how they are cut into parts.

use super::affine::for_chunks;
use super::attention::score_rows;
use super::buffer::Parts;
use super::wide::{exp, prefetch_row, wide};
use super::{CpuBackend, CpuGraph, CpuMatrix};
use crate::{Accumulator, AttentionPart, AttentionSums, Shape};

/// Targets per parallel task, at least.
const CHUNK_ROWS: usize = 128;
/// Neighbours that are worth a task of their own.
const TASK_EDGES: usize = 2048;
const PREFETCH_DISTANCE: usize = 8;

wide! {
    /// Adds the rows of neighbours to the sums of targets, starting at `first`.
    fn add_neighbours(
        graph: &CpuGraph, input: &[f32], columns: usize, by: Accumulator<'_, CpuMatrix>, first: usize, sums: &mut [f32],
    ) {
        let (offsets, nbrs) = (graph.offsets(), graph.nbrs());
        for (index, sum) in sums.chunks_exact_mut(columns).enumerate() {
            for edge in offsets[first + index] as usize..offsets[first + index + 1] as usize {
                if let Some(ahead) = nbrs.get(edge + PREFETCH_DISTANCE) {
                    prefetch_row(input, *ahead as usize * columns, columns);
                }
                let nbr = nbrs[edge] as usize;
                let row = &input[nbr * columns..][..columns];
                match by {
                    Accumulator::Sum => sum.iter_mut().zip(row).for_each(|(to, from)| *to += from),
                    Accumulator::Scaled(scales) => {
                        let scale = scales.values()[nbr];
                        sum.iter_mut().zip(row).for_each(|(to, from)| *to += from * scale);
                    }
                    Accumulator::Max => {
                        sum.iter_mut().zip(row).for_each(|(to, from)| *to = if *from > *to { *from } else { *to });
                    }
                }
            }
        }
    }

    /// Adds the rows of one target's neighbours with their attention weights. Whenever a larger score is met, what was
    /// added before is scaled down.
    fn attend_neighbours(
        nbrs: &[u32], hidden: &[f32], scores: &[f32], targets: &[f32], slope: f32, most: &mut [f32], total: &mut [f32],
        sum: &mut [f32],
    ) {
        let (heads, columns) = (targets.len(), sum.len());
        let width = columns / heads;
        for (edge, nbr) in nbrs.iter().enumerate() {
            if let Some(ahead) = nbrs.get(edge + PREFETCH_DISTANCE) {
                prefetch_row(hidden, *ahead as usize * columns, columns);
            }
            let nbr = *nbr as usize;
            for head in 0..heads {
                let score = scores[nbr * heads + head] + targets[head];
                let score = if score > 0.0 { score } else { score * slope };
                let sum = &mut sum[head * width..][..width];
                if score > most[head] {
                    let scale = exp(most[head] - score);
                    total[head] *= scale;
                    sum.iter_mut().for_each(|to| *to *= scale);
                    most[head] = score;
                }
                let weight = exp(score - most[head]);
                total[head] += weight;
                let row = &hidden[nbr * columns + head * width..][..width];
                sum.iter_mut().zip(row).for_each(|(to, from)| *to += weight * from);
            }
        }
    }

    /// Divides the sums of a target by their weights, and averages heads if asked to.
    fn end_attention(sum: &[f32], total: &[f32], average: bool, to: &mut [f32]) {
        let (heads, width) = (total.len(), sum.len() / total.len());
        let share = if average { 1.0 / heads as f32 } else { 1.0 };
        if average {
            to.fill(0.0);
        }
        for (head, total) in total.iter().enumerate() {
            let (part, factor) = (&sum[head * width..][..width], share / (total + 1e-16));
            match average {
                true => to.iter_mut().zip(part).for_each(|(to, from)| *to += from * factor),
                false => {
                    let to = &mut to[head * width..][..width];
                    to.iter_mut().zip(part).for_each(|(to, from)| *to = from * factor);
                }
            }
        }
    }
}

/// Targets per parallel task, for parts with few neighbours, too.
fn task_rows(graph: &CpuGraph) -> usize {
    let edges = graph.nbrs().len().max(1);
    (graph.outputs.saturating_mul(TASK_EDGES) / edges).max(CHUNK_ROWS)
}

impl CpuBackend {
    pub(super) fn accumulate_part(
        &self,
        graph: &CpuGraph,
        input: &CpuMatrix,
        by: Accumulator<'_, CpuMatrix>,
        sums: &mut CpuMatrix,
    ) {
        let columns = input.columns();
        assert_eq!((input.rows(), sums.rows(), sums.columns()), (graph.inputs, graph.outputs, columns));
        if let Accumulator::Scaled(scales) = by {
            assert_eq!((scales.rows(), scales.columns()), (input.rows(), 1), "a factor a row");
        }
        let parts = Parts::new(sums.values_mut());
        for_chunks(graph.outputs, task_rows(graph), |first, count| {
            // SAFETY: chunks do not overlap, and the matrix outlives the loop.
            let sums = unsafe { parts.part(first * columns, count * columns) };
            self.counters.aggregate(|| add_neighbours(graph, input.values(), columns, by, first, sums));
        });
    }

    pub(super) fn scale_all(&self, factors: &CpuMatrix, rows: &mut CpuMatrix) {
        let columns = rows.columns();
        assert_eq!((factors.rows(), factors.columns()), (rows.rows(), 1), "a factor a row");
        let parts = Parts::new(rows.values_mut());
        for_chunks(factors.rows(), CHUNK_ROWS, |first, count| {
            // SAFETY: chunks do not overlap, and the matrix outlives the loop.
            let rows = unsafe { parts.part(first * columns, count * columns) };
            for (row, factor) in rows.chunks_exact_mut(columns.max(1)).zip(&factors.values()[first..]) {
                row.iter_mut().for_each(|value| *value *= factor);
            }
        });
    }

    pub(super) fn scores_of(&self, rows: &CpuMatrix, vector: &CpuMatrix, heads: usize) -> CpuMatrix {
        let columns = vector.columns();
        assert_eq!((rows.columns(), vector.rows()), (columns, 1));
        let mut scores = CpuMatrix::new(&self.pool, rows.rows(), heads);
        let parts = Parts::new(scores.values_mut());
        for_chunks(rows.rows(), CHUNK_ROWS, |first, count| {
            // SAFETY: chunks do not overlap, and the matrix outlives the loop.
            let scores = unsafe { parts.part(first * heads, count * heads) };
            score_rows(&rows.values()[first * columns..][..count * columns], vector.values(), heads, scores);
        });
        scores
    }

    pub(super) fn attend_some(
        &self,
        graph: &CpuGraph,
        call: AttentionPart<'_, CpuMatrix>,
        sums: &mut AttentionSums<CpuMatrix>,
    ) {
        let (heads, columns) = (call.target_scores.columns(), call.hidden.columns());
        assert_eq!((call.hidden.rows(), call.source_scores.rows()), (graph.inputs, graph.inputs));
        let targets = (call.target_scores.rows(), sums.rows.rows(), sums.most.rows(), sums.total.rows());
        assert_eq!(targets, (graph.outputs, graph.outputs, graph.outputs, graph.outputs));
        assert!(
            columns.is_multiple_of(heads) && sums.rows.columns() == columns,
            "{heads} heads in {columns}"
        );
        let (rows, most) = (Parts::new(sums.rows.values_mut()), Parts::new(sums.most.values_mut()));
        let total = Parts::new(sums.total.values_mut());
        let (hidden, scores) = (call.hidden.values(), call.source_scores.values());
        for_chunks(graph.outputs, task_rows(graph), |first, count| {
            self.counters.aggregate(|| {
                for target in first..first + count {
                    let list = graph.offsets()[target] as usize..graph.offsets()[target + 1] as usize;
                    let targets = &call.target_scores.values()[target * heads..][..heads];
                    // SAFETY: each target has its own rows, and the matrices outlive the loop.
                    let (rows, most, total) = unsafe {
                        (
                            rows.part(target * columns, columns),
                            most.part(target * heads, heads),
                            total.part(target * heads, heads),
                        )
                    };
                    let nbrs = &graph.nbrs()[list];
                    attend_neighbours(nbrs, hidden, scores, targets, call.slope, most, total, rows);
                }
            });
        });
    }

    pub(super) fn attend_last(&self, sums: AttentionSums<CpuMatrix>, average: bool, output: &mut CpuMatrix) {
        let (heads, columns, to_columns) = (sums.total.columns(), sums.rows.columns(), output.columns());
        assert_eq!(
            (output.rows(), to_columns),
            (sums.rows.rows(), if average { columns / heads } else { columns })
        );
        let (rows, totals, parts) =
            (sums.rows.values(), sums.total.values(), Parts::new(output.values_mut()));
        for_chunks(sums.rows.rows(), CHUNK_ROWS, |first, count| {
            for target in first..first + count {
                // SAFETY: each target has its own row, and the matrix outlives the loop.
                let to = unsafe { parts.part(target * to_columns, to_columns) };
                let (sum, total) = (&rows[target * columns..][..columns], &totals[target * heads..][..heads]);
                end_attention(sum, total, average, to);
            }
        });
    }
}
