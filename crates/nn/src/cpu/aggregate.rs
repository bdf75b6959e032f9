//! Aggregates neighbours' rows into one row, and distributes gradients back, chunk by chunk. A row is summed in the
//! order of its neighbours, whichever thread computes it.

use super::graph::CpuGraph;
use super::wide::{prefetch_row, wide};
use crate::{Aggregator, Degree};

/// How many neighbours in advance rows are prefetched: far enough to hide a miss, near enough to stay in the L1 cache.
const PREFETCH_DISTANCE: usize = 8;

wide! {
    /// The aggregated rows of outputs, starting at `first`. `winners` gets the position of each maximum among the
    /// node's neighbours.
    pub(crate) fn aggregate_rows(
        graph: &CpuGraph, input: &[f32], columns: usize, aggregator: Aggregator, first: usize, to: &mut [f32],
        winners: Option<&mut [u32]>,
    ) {
        if aggregator == Aggregator::Max {
            return largest_rows(graph, input, columns, first, to, winners);
        }
        let (offsets, nbrs) = (graph.offsets(), graph.nbrs());
        let (scales, degrees) = (scales(graph, aggregator), weighing_degrees(graph, aggregator));
        for (index, to) in to.chunks_exact_mut(columns).enumerate() {
            let own = graph.self_first() + first + index;
            let own_row = &input[own * columns..][..columns];
            match aggregator {
                Aggregator::SumWithSelf(multiple) => copy_scaled(to, own_row, multiple),
                Aggregator::Gcn(_) => copy_scaled(to, own_row, scales[own]),
                _ => to.fill(0.0),
            }
            let list = offsets[first + index] as usize..offsets[first + index + 1] as usize;
            let weight = sampled_weight(degrees, own, list.len());
            for edge in list.clone() {
                if let Some(ahead) = nbrs.get(edge + PREFETCH_DISTANCE) {
                    prefetch_row(input, *ahead as usize * columns, columns);
                }
                let nbr = nbrs[edge] as usize;
                let row = &input[nbr * columns..][..columns];
                if scales.is_empty() {
                    to.iter_mut().zip(row).for_each(|(to, from)| *to += from);
                } else if nbr != own {
                    add_scaled(to, row, scales[nbr] * weight);
                }
            }
            match aggregator {
                Aggregator::Mean if list.len() > 1 => scale(to, 1.0 / list.len() as f32),
                Aggregator::Gcn(_) => scale(to, scales[own]),
                _ => {}
            }
        }
    }

    /// Adds the gradients of aggregated rows to the gradients of inputs, starting at `first`.
    pub(crate) fn distribute_rows(
        graph: &CpuGraph, gradient: &[f32], columns: usize, aggregator: Aggregator, winners: Option<&[u32]>,
        first: usize, to: &mut [f32],
    ) {
        let transposed = graph.transposed();
        let (offsets, outputs, edges) = (transposed.offsets(), transposed.outputs(), transposed.edges());
        let (lists, scales) = (graph.offsets(), scales(graph, aggregator));
        let degrees = weighing_degrees(graph, aggregator);
        for (index, to) in to.chunks_exact_mut(columns).enumerate() {
            let input = first + index;
            for place in offsets[input] as usize..offsets[input + 1] as usize {
                if let Some(ahead) = outputs.get(place + PREFETCH_DISTANCE) {
                    prefetch_row(gradient, *ahead as usize * columns, columns);
                }
                let output = outputs[place] as usize;
                let row = &gradient[output * columns..][..columns];
                match (aggregator, winners) {
                    (Aggregator::Sum | Aggregator::SumWithSelf(_), _) => {
                        to.iter_mut().zip(row).for_each(|(to, from)| *to += from);
                    }
                    (Aggregator::Mean, _) => {
                        add_scaled(to, row, 1.0 / (lists[output + 1] - lists[output]) as f32);
                    }
                    (Aggregator::Max, Some(winners)) => {
                        let place_in_list = edges[place] - lists[output];
                        let winners = &winners[output * columns..][..columns];
                        for ((to, from), winner) in to.iter_mut().zip(row).zip(winners) {
                            *to += if *winner == place_in_list { *from } else { 0.0 };
                        }
                    }
                    (Aggregator::Max, None) => unreachable!("the forward pass keeps winners"),
                    (Aggregator::Gcn(_), _) => {
                        let own = graph.self_first() + output;
                        if own != input {
                            let sampled = lists[output + 1] - lists[output];
                            let weight = sampled_weight(degrees, own, sampled as usize);
                            add_scaled(to, row, scales[own] * weight * scales[input]);
                        }
                    }
                }
            }
            let Some(output) = input.checked_sub(graph.self_first()) else { continue };
            let row = &gradient[output * columns..][..columns];
            match aggregator {
                Aggregator::SumWithSelf(multiple) => add_scaled(to, row, multiple),
                Aggregator::Gcn(_) => add_scaled(to, row, scales[input] * scales[input]),
                _ => {}
            }
        }
    }
}

/// Scales by degree; empty for aggregators that do not use degrees.
#[inline(always)]
fn scales(graph: &CpuGraph, aggregator: Aggregator) -> &[f32] {
    match aggregator {
        Aggregator::Gcn(degree) => graph.gcn_scales(degree != Degree::Sampled),
        _ => &[],
    }
}

/// Whole-graph degrees if they weight sampled neighbours; otherwise empty.
#[inline(always)]
fn weighing_degrees(graph: &CpuGraph, aggregator: Aggregator) -> &[u32] {
    match aggregator {
        Aggregator::Gcn(Degree::Unbiased) => graph.degrees(),
        _ => &[],
    }
}

/// The weight of each sampled neighbour of row `own`: exactly 1 if all neighbours are sampled.
#[inline(always)]
fn sampled_weight(degrees: &[u32], own: usize, sampled: usize) -> f32 {
    degrees.get(own).map_or(1.0, |degree| *degree as f32 / sampled as f32)
}

#[inline(always)]
fn copy_scaled(to: &mut [f32], from: &[f32], scale: f32) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = from * scale);
}

#[inline(always)]
fn add_scaled(to: &mut [f32], from: &[f32], scale: f32) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from * scale);
}

#[inline(always)]
fn scale(to: &mut [f32], scale: f32) {
    to.iter_mut().for_each(|to| *to *= scale);
}

#[inline(always)]
fn largest_rows(
    graph: &CpuGraph,
    input: &[f32],
    columns: usize,
    first: usize,
    to: &mut [f32],
    mut winners: Option<&mut [u32]>,
) {
    let (offsets, nbrs) = (graph.offsets(), graph.nbrs());
    for (index, to) in to.chunks_exact_mut(columns).enumerate() {
        let list = offsets[first + index] as usize..offsets[first + index + 1] as usize;
        if list.is_empty() {
            to.fill(0.0);
        }
        for (place, edge) in list.enumerate() {
            if let Some(ahead) = nbrs.get(edge + PREFETCH_DISTANCE) {
                prefetch_row(input, *ahead as usize * columns, columns);
            }
            let row = &input[nbrs[edge] as usize * columns..][..columns];
            let Some(winners) = winners.as_deref_mut() else {
                if place == 0 {
                    to.copy_from_slice(row);
                }
                to.iter_mut().zip(row).for_each(|(to, from)| *to = if *from > *to { *from } else { *to });
                continue;
            };
            let winners = &mut winners[index * columns..][..columns];
            if place == 0 {
                to.copy_from_slice(row);
                winners.fill(0);
            }
            for ((to, from), winner) in to.iter_mut().zip(row).zip(winners) {
                let larger = *from > *to;
                *to = if larger { *from } else { *to };
                *winner = if larger { place as u32 } else { *winner };
            }
        }
    }
}
