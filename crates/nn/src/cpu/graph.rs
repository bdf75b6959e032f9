//! A layer's adjacency in host memory. It is checked once, so that loops need no checks. Data that the backward pass
//! needs is computed on first use.

use super::CpuMatrix;
use super::buffer::{Buffer, MatrixPool};
use crate::{Adjacency, AdjacencyShape};
use std::sync::OnceLock;

/// A layer's adjacency: every neighbour is a row of the input.
pub struct CpuGraph {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    edges: usize,
    offsets: Buffer,
    nbrs: Buffer,
    degrees: Option<Buffer>,
    pool: MatrixPool,
    transposed: OnceLock<Transposed>,
    whole_scales: OnceLock<CpuMatrix>,
    sampled_scales: OnceLock<CpuMatrix>,
}

/// The transposed adjacency: for each input the outputs it is a neighbour of, ascending. A backward pass gathers
/// instead of scattering, so that threads never conflict and sums have a fixed order.
pub(crate) struct Transposed {
    offsets: Buffer,
    edges: Buffer,
    outputs: Buffer,
}

impl CpuGraph {
    pub(crate) fn new(pool: &MatrixPool, lists: &Adjacency<'_>) -> CpuGraph {
        lists.assert_valid();
        CpuGraph::checked(pool, lists)
    }

    /// Neighbours among some rows, of targets that are not among them. It has no own rows.
    pub(crate) fn part(pool: &MatrixPool, inputs: usize, nbr_offsets: &[u32], nbrs: &[u32]) -> CpuGraph {
        let lists = Adjacency::part(inputs, nbr_offsets, nbrs);
        lists.assert_lists();
        CpuGraph::checked(pool, &lists)
    }

    /// Copies an adjacency. Asserts that every neighbour is an input.
    fn checked(pool: &MatrixPool, lists: &Adjacency<'_>) -> CpuGraph {
        let first = lists.nbr_offsets[0];
        let edges = lists.edge_count();
        let mut offsets = pool.take(lists.outputs + 1);
        offsets.integers_mut().iter_mut().zip(lists.nbr_offsets).for_each(|(to, from)| *to = from - first);
        let mut nbrs = pool.take(edges);
        let mut largest = 0;
        let given = &lists.nbrs[first as usize..][..edges];
        for (to, from) in nbrs.integers_mut().iter_mut().zip(given) {
            // A neighbour below `base` wraps around and is found too large.
            *to = from.wrapping_sub(lists.base);
            largest = largest.max(*to);
        }
        assert!(edges == 0 || (largest as usize) < lists.inputs, "every neighbour is an input row");
        let degrees = (!lists.input_degrees.is_empty()).then(|| {
            let mut degrees = pool.take(lists.inputs);
            degrees.integers_mut().copy_from_slice(lists.input_degrees);
            degrees
        });
        CpuGraph {
            inputs: lists.inputs,
            outputs: lists.outputs,
            edges,
            offsets,
            nbrs,
            degrees,
            pool: pool.clone(),
            transposed: OnceLock::new(),
            whole_scales: OnceLock::new(),
            sampled_scales: OnceLock::new(),
        }
    }

    /// Neighbours of all outputs.
    pub fn edge_count(&self) -> usize {
        self.edges
    }

    /// Start of the neighbours of output `i` in `nbrs`.
    #[inline(always)]
    pub(crate) fn offsets(&self) -> &[u32] {
        self.offsets.integers()
    }

    #[inline(always)]
    pub(crate) fn nbrs(&self) -> &[u32] {
        self.nbrs.integers()
    }

    /// Degree of each input row in the whole graph.
    #[inline(always)]
    pub(crate) fn degrees(&self) -> &[u32] {
        self.degrees.as_ref().expect("GCN by whole-graph degrees needs input_degrees").integers()
    }

    /// The input row of output 0.
    #[inline(always)]
    pub(crate) fn self_first(&self) -> usize {
        self.inputs - self.outputs
    }

    pub(crate) fn transposed(&self) -> &Transposed {
        self.transposed.get_or_init(|| {
            let (offsets, nbrs) = (self.offsets(), self.nbrs());
            let mut starts = self.pool.take(self.inputs + 1);
            let mut edges = self.pool.take(self.edges);
            let mut outputs = self.pool.take(self.edges);
            let counts = starts.integers_mut();
            counts.fill(0);
            nbrs.iter().for_each(|nbr| counts[*nbr as usize + 1] += 1);
            for index in 0..self.inputs {
                counts[index + 1] += counts[index];
            }
            let (to_edges, to_outputs) = (edges.integers_mut(), outputs.integers_mut());
            // Each start moves to its end while its entries are written, then all are shifted back by one.
            for output in 0..self.outputs {
                for edge in offsets[output]..offsets[output + 1] {
                    let place = &mut counts[nbrs[edge as usize] as usize];
                    to_edges[*place as usize] = edge;
                    to_outputs[*place as usize] = output as u32;
                    *place += 1;
                }
            }
            counts.copy_within(0..self.inputs, 1);
            counts[0] = 0;
            Transposed { offsets: starts, edges, outputs }
        })
    }

    /// `1 / sqrt(degree + 1)` of each input row, by whole-graph degrees or by sampled degrees.
    pub(crate) fn gcn_scales(&self, whole: bool) -> &[f32] {
        let cell = if whole { &self.whole_scales } else { &self.sampled_scales };
        let scales = cell.get_or_init(|| {
            let mut scales = CpuMatrix::new(&self.pool, 1, self.inputs);
            let values = scales.values_mut();
            if whole {
                for (value, degree) in values.iter_mut().zip(self.degrees()) {
                    *value = 1.0 / ((*degree as f32 + 1.0).sqrt());
                }
            } else {
                values.fill(1.0);
                for output in 0..self.outputs {
                    let own = (self.self_first() + output) as u32;
                    let list =
                        &self.nbrs()[self.offsets()[output] as usize..self.offsets()[output + 1] as usize];
                    let others = list.iter().filter(|nbr| **nbr != own).count();
                    values[own as usize] = 1.0 / ((others as f32 + 1.0).sqrt());
                }
            }
            scales
        });
        scales.values()
    }
}

impl AdjacencyShape for CpuGraph {
    fn inputs(&self) -> usize {
        self.inputs
    }

    fn outputs(&self) -> usize {
        self.outputs
    }
}

impl Transposed {
    /// Start of the entries of input `i` in `edges` and `outputs`.
    #[inline(always)]
    pub fn offsets(&self) -> &[u32] {
        self.offsets.integers()
    }

    #[inline(always)]
    pub fn edges(&self) -> &[u32] {
        self.edges.integers()
    }

    #[inline(always)]
    pub fn outputs(&self) -> &[u32] {
        self.outputs.integers()
    }
}
