//! Matmuls of a layer on the CPU, forward and backward. Work is split into chunks of rows whose number depends only on
//! the shapes. A chunk aggregates, multiplies, adds its bias and applies the activation while its rows are in the
//! cache.

use super::aggregate::{aggregate_rows, distribute_rows};
use super::buffer::Parts;
use super::graph::CpuGraph;
use super::matmul::{PackedPanels, View, add_transposed, matmul_calls, matmul_packed};
use super::post::{add_into, add_rows, finish_rows, unfinish_rows};
use super::wide::prefetch_row_later;
use super::{CpuBackend, CpuMatrix};
use crate::{Affine, Aggregator, InputTerm, Post, Shape, TermRows, WeightTerm};
use rayon::prelude::*;

/// Rows of a forward chunk: whole tiles of rows. Input and output together fit the L2 cache. Matrices whose rows are a
/// multiple of it are computed as one matrix would be that has all their rows.
pub const CHUNK_ROWS: usize = 192;
/// Rows that are aggregated at a time. Those of the next block are prefetched while this one is multiplied, so that
/// memory access and arithmetic overlap. The neighbours of both blocks fit the L2 cache.
const BLOCK_ROWS: usize = 48;
/// Rows of a chunk of weight gradients: the depth of its matmul.
const DEPTH_ROWS: usize = 192;
/// Rows that justify a partial sum of their own.
const GROUP_ROWS: usize = 384;
/// Largest number of partial weight gradients, and the total size above which there are fewer.
const GROUPS: usize = 32;
const FEWEST_GROUPS: usize = 8;
const PARTIAL_NUMBERS: usize = 4 << 20;

/// Runs `work` on chunks of `unit` rows, on all threads of the current pool.
pub(crate) fn for_chunks(rows: usize, unit: usize, work: impl Fn(usize, usize) + Sync) {
    (0..rows.div_ceil(unit)).into_par_iter().for_each(|chunk| {
        let first = chunk * unit;
        work(first, unit.min(rows - first));
    });
}

/// Number of partial weight gradients for this many rows. It never depends on the number of threads.
pub(crate) fn group_count(rows: usize, numbers: usize) -> usize {
    let most = (PARTIAL_NUMBERS / numbers.max(1)).clamp(FEWEST_GROUPS, GROUPS);
    rows.div_ceil(GROUP_ROWS).clamp(1, most)
}

/// A term that any thread can read.
struct Ready<'a> {
    from: From<'a>,
    weight: PackedPanels,
}

enum From<'a> {
    Rows(&'a [f32]),
    Aggregate {
        graph: &'a CpuGraph,
        input: &'a [f32],
        aggregator: Aggregator,
        kept: Option<Parts<f32>>,
        winners: Option<Parts<u32>>,
    },
}

/// Prefetches the neighbours' rows of the next block in small steps.
struct Ahead<'a> {
    nbrs: &'a [u32],
    input: &'a [f32],
    columns: usize,
    /// Rows to prefetch per step.
    each: usize,
}

impl<'a> Ahead<'a> {
    /// For the block that starts at output `first`, while the previous block is multiplied.
    fn new(terms: &'a [Ready<'_>], first: usize, outputs: usize, columns: usize) -> Ahead<'a> {
        let end = (first + BLOCK_ROWS).min(outputs);
        let aggregate = terms.iter().find_map(|term| match &term.from {
            From::Aggregate { graph, input, .. } if first < end => Some((graph, input, term.weight.depth())),
            _ => None,
        });
        let Some((graph, input, depth)) = aggregate else {
            return Ahead { nbrs: &[], input: &[], columns: 0, each: 0 };
        };
        let nbrs = &graph.nbrs()[graph.offsets()[first] as usize..graph.offsets()[end] as usize];
        let calls = terms.iter().map(|term| matmul_calls(BLOCK_ROWS, columns, term.weight.depth())).sum();
        Ahead { nbrs, input, columns: depth, each: nbrs.len().div_ceil(calls) }
    }

    #[inline(always)]
    fn ask(&mut self) {
        let (now, later) = self.nbrs.split_at(self.each.min(self.nbrs.len()));
        self.nbrs = later;
        for nbr in now {
            prefetch_row_later(self.input, *nbr as usize * self.columns, self.columns);
        }
    }
}

/// A term of an input's gradient that any thread can read.
enum ReadyInput<'a> {
    Rows {
        gradient: &'a CpuMatrix,
        weight: PackedPanels,
    },
    Identity {
        gradient: &'a CpuMatrix,
    },
    Aggregate {
        graph: &'a CpuGraph,
        projected: CpuMatrix,
        aggregator: Aggregator,
        winners: Option<&'a [u32]>,
    },
}

impl CpuBackend {
    fn ready<'a>(&self, source: TermRows<'a, CpuBackend>, weight: &CpuMatrix, rows: usize) -> Ready<'a> {
        let (from, depth) = match source {
            TermRows::Rows(matrix) => (From::Rows(matrix.last(rows)), matrix.columns()),
            TermRows::Aggregate { graph, input, aggregator, kept, winners } => {
                assert_eq!((graph.inputs, graph.outputs), (input.rows(), rows), "the graph of this layer");
                let shape = (rows, input.columns());
                let kept = kept.map(|kept| {
                    assert_eq!((kept.rows(), kept.columns()), shape);
                    Parts::new(kept.values_mut())
                });
                let winners = winners.map(|winners| {
                    assert_eq!((winners.rows(), winners.columns()), shape);
                    Parts::new(bytemuck::cast_slice_mut(winners.values_mut()))
                });
                (From::Aggregate { graph, input: input.values(), aggregator, kept, winners }, input.columns())
            }
        };
        assert_eq!(weight.columns(), depth, "a weight has a column for each column of its source");
        let view = View::transposed(weight.values(), depth);
        Ready { from, weight: PackedPanels::new(&self.pool, view, depth, weight.rows()) }
    }

    pub(crate) fn affine_forward(&self, call: Affine<'_, CpuBackend>, output: &mut CpuMatrix) {
        let (rows, columns) = (output.rows(), output.columns());
        let Affine { terms, accumulate, bias, add, post } = call;
        assert!(terms.iter().all(|term| term.weight.rows() == columns));
        assert!(bias.is_none_or(|bias| bias.columns() == columns));
        let add = add.map(|add| {
            assert_eq!(add.columns(), columns, "an identity residual keeps the width");
            add.last(rows)
        });
        let terms: Vec<Ready> = terms.into_iter().map(|t| self.ready(t.source, t.weight, rows)).collect();
        let to = Parts::new(output.values_mut());
        for_chunks(rows, CHUNK_ROWS, |first, count| {
            for first in (first..first + count).step_by(BLOCK_ROWS) {
                let count = BLOCK_ROWS.min(rows - first);
                // SAFETY: blocks do not overlap, and `output` is borrowed until all are done.
                let to = unsafe { to.part(first * columns, count * columns) };
                let mut ahead = Ahead::new(&terms, first + count, rows, columns);
                if terms.is_empty() && !accumulate {
                    // No matmul overwrites the previous content of the buffer.
                    to.fill(0.0);
                }
                for (index, term) in terms.iter().enumerate() {
                    self.term_rows(term, first, to, count, accumulate || index > 0, &mut ahead);
                }
                let add = add.map(|add| &add[first * columns..][..count * columns]);
                finish_rows(to, columns, first, bias.map(CpuMatrix::values), add, post);
            }
        });
    }

    /// The matmul of one term for one chunk.
    fn term_rows(
        &self,
        term: &Ready<'_>,
        first: usize,
        to: &mut [f32],
        rows: usize,
        add: bool,
        ahead: &mut Ahead<'_>,
    ) {
        let depth = term.weight.depth();
        match &term.from {
            From::Rows(values) => {
                let left = &values[first * depth..][..rows * depth];
                self.timed_matmul(to, left, &term.weight, add, || ahead.ask());
            }
            From::Aggregate { graph, input, aggregator, kept, winners } => {
                let mut scratch;
                let aggregated = match kept {
                    // SAFETY: chunks do not overlap, and the matrix is borrowed until all are done.
                    Some(kept) => unsafe { kept.part(first * depth, rows * depth) },
                    None => {
                        scratch = self.pool.take(rows * depth);
                        scratch.floats_mut()
                    }
                };
                // SAFETY: as above.
                let winners = winners.as_ref().map(|w| unsafe { w.part(first * depth, rows * depth) });
                self.counters.aggregate(|| {
                    aggregate_rows(graph, input, depth, *aggregator, first, aggregated, winners)
                });
                self.timed_matmul(to, aggregated, &term.weight, add, || ahead.ask());
            }
        }
    }

    fn timed_matmul(
        &self,
        to: &mut [f32],
        left: &[f32],
        right: &PackedPanels,
        add: bool,
        mut between: impl FnMut(),
    ) {
        let rows = to.len() / right.columns().max(1);
        let shape = [rows, right.columns(), right.depth()];
        self.counters.matmul(shape, || matmul_packed(to, rows, left, right, add, &mut between));
    }

    pub(crate) fn affine_weights(
        &self,
        gradient: &mut CpuMatrix,
        post: Option<(&CpuMatrix, Post)>,
        terms: Vec<WeightTerm<'_, CpuBackend>>,
        bias_gradient: Option<&mut CpuMatrix>,
    ) {
        let (rows, columns) = (gradient.rows(), gradient.columns());
        let sources: Vec<(&[f32], usize)> =
            terms.iter().map(|term| (term.source.last(rows), term.source.columns())).collect();
        let mut targets: Vec<&mut CpuMatrix> = terms.into_iter().map(|term| term.weight_gradient).collect();
        for (target, (_, depth)) in targets.iter().zip(&sources) {
            assert_eq!((target.rows(), target.columns()), (columns, *depth));
        }
        targets.extend(bias_gradient);
        let sizes: Vec<usize> = targets.iter().map(|target| target.values().len()).collect();
        let total: usize = sizes.iter().sum();
        let groups = group_count(rows, total);
        let mut partials = self.pool.take(groups * total);
        let parts = Parts::new(partials.floats_mut());
        let gradient = Parts::new(gradient.values_mut());
        let chunks = rows.div_ceil(DEPTH_ROWS);
        (0..groups).into_par_iter().for_each(|group| {
            // SAFETY: each group has its own part, and `partials` outlives the loop.
            let partial = unsafe { parts.part(group * total, total) };
            partial.fill(0.0);
            for chunk in group * chunks / groups..(group + 1) * chunks / groups {
                let first = chunk * DEPTH_ROWS;
                let count = DEPTH_ROWS.min(rows - first);
                // SAFETY: a chunk belongs to one group, and `gradient` is borrowed until all are done.
                let gradient = unsafe { gradient.part(first * columns, count * columns) };
                if let Some((output, post)) = post {
                    let output = &output.values()[first * columns..][..count * columns];
                    unfinish_rows(gradient, output, columns, first, post);
                }
                self.weights_of_chunk(gradient, columns, first, &sources, partial);
            }
        });
        let mut start = 0;
        for target in targets {
            let length = target.values().len();
            sum_partials(partials.floats(), groups, total, start, target.values_mut());
            start += length;
        }
    }

    /// Adds the weight and bias gradients of a chunk. The bias, if requested, comes last.
    fn weights_of_chunk(
        &self,
        gradient: &[f32],
        columns: usize,
        first: usize,
        sources: &[(&[f32], usize)],
        mut partial: &mut [f32],
    ) {
        let count = gradient.len() / columns.max(1);
        for (source, depth) in sources {
            let (weight, rest) = partial.split_at_mut(columns * depth);
            partial = rest;
            let source = &source[first * depth..][..count * depth];
            let shape = [columns, *depth, count];
            self.counters.matmul(shape, || add_transposed(weight, shape, gradient, source));
        }
        if !partial.is_empty() {
            add_rows(gradient, columns, partial);
        }
    }

    pub(crate) fn affine_inputs(&self, terms: &[InputTerm<'_, CpuBackend>], to: &mut CpuMatrix) {
        let (rows, columns) = (to.rows(), to.columns());
        let terms: Vec<ReadyInput> = terms.iter().map(|term| self.ready_input(term, to)).collect();
        let to = Parts::new(to.values_mut());
        for_chunks(rows, CHUNK_ROWS, |first, count| {
            // SAFETY: chunks do not overlap, and the matrix is borrowed until all are done.
            let to = unsafe { to.part(first * columns, count * columns) };
            to.fill(0.0);
            for term in &terms {
                match term {
                    ReadyInput::Rows { gradient, weight } => {
                        let Some((skip, from)) = last_rows(gradient, rows, first, count) else { continue };
                        self.timed_matmul(&mut to[skip * columns..], from, weight, true, || {});
                    }
                    ReadyInput::Identity { gradient } => {
                        let Some((skip, from)) = last_rows(gradient, rows, first, count) else { continue };
                        add_into(&mut to[skip * columns..], from);
                    }
                    ReadyInput::Aggregate { graph, projected, aggregator, winners } => {
                        let projected = projected.values();
                        self.counters.aggregate(|| {
                            distribute_rows(graph, projected, columns, *aggregator, *winners, first, to)
                        });
                    }
                }
            }
        });
    }

    fn ready_input<'a>(&self, term: &InputTerm<'a, CpuBackend>, to: &CpuMatrix) -> ReadyInput<'a> {
        let pack = |weight: &CpuMatrix, gradient: &CpuMatrix| {
            assert_eq!((weight.rows(), weight.columns()), (gradient.columns(), to.columns()));
            let view = View::rows(weight.values(), weight.columns());
            PackedPanels::new(&self.pool, view, weight.rows(), weight.columns())
        };
        match *term {
            InputTerm::Rows { gradient, weight } => {
                ReadyInput::Rows { gradient, weight: pack(weight, gradient) }
            }
            InputTerm::Identity { gradient } => {
                assert_eq!(gradient.columns(), to.columns(), "an identity residual keeps the width");
                ReadyInput::Identity { gradient }
            }
            InputTerm::Aggregate { graph, gradient, weight, aggregator, winners } => {
                assert_eq!(
                    (graph.inputs, graph.outputs),
                    (to.rows(), gradient.rows()),
                    "the graph of this layer"
                );
                // Computed here, before threads wait for it.
                graph.transposed();
                let projected = self.projected(gradient, &pack(weight, gradient));
                let winners = winners.map(|winners| bytemuck::cast_slice(winners.values()));
                ReadyInput::Aggregate { graph, projected, aggregator, winners }
            }
        }
    }

    /// `gradient x weight` of an aggregated term: the gradient of its aggregated rows.
    fn projected(&self, gradient: &CpuMatrix, weight: &PackedPanels) -> CpuMatrix {
        let (rows, depth, columns) = (gradient.rows(), gradient.columns(), weight.columns());
        let mut projected = CpuMatrix::new(&self.pool, rows, columns);
        let parts = Parts::new(projected.values_mut());
        for_chunks(rows, CHUNK_ROWS, |first, count| {
            // SAFETY: chunks do not overlap, and the matrix outlives the loop.
            let to = unsafe { parts.part(first * columns, count * columns) };
            let left = &gradient.values()[first * depth..][..count * depth];
            self.timed_matmul(to, left, weight, false, || {});
        });
        projected
    }
}

/// For a matrix that contains the last of `rows` rows: how many rows of the chunk precede it, and the remaining rows.
fn last_rows(matrix: &CpuMatrix, rows: usize, first: usize, count: usize) -> Option<(usize, &[f32])> {
    let start = rows.checked_sub(matrix.rows()).expect("no more rows than the input");
    let skip = start.saturating_sub(first);
    let from = (first + skip - start.min(first + skip)) * matrix.columns();
    (skip < count).then(|| (skip, &matrix.values()[from..][..(count - skip) * matrix.columns()]))
}

/// `to[i] = sum over groups of partials[group][start + i]`, groups in order.
fn sum_partials(partials: &[f32], groups: usize, total: usize, start: usize, to: &mut [f32]) {
    const UNIT: usize = 4096;
    to.par_chunks_mut(UNIT).enumerate().for_each(|(chunk, to)| {
        let first = start + chunk * UNIT;
        to.copy_from_slice(&partials[first..][..to.len()]);
        for group in 1..groups {
            add_into(to, &partials[group * total + first..][..to.len()]);
        }
    });
}
