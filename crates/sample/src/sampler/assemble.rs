//! From order of discovery to the canonical order: the deepest hop first, targets last.

use super::hop::Section;
use super::{Scratch, Settings, seed_places};
use crate::topology::Topology;
use crate::{Block, Form, Sample};
use esker_types::LocalIndex;
use std::ops::Range;

/// Entries converted at a time: each boundary between hops is one pass over them in the first-level cache.
const PIECE: usize = 2048;

/// How places become local indices: hop by hop, a shift.
struct Shifts {
    /// First place of each hop.
    starts: Vec<u32>,
    /// What to add to a place of the hop, wrapping.
    shifts: Vec<u32>,
}

impl Shifts {
    fn new(hop_starts: &[u32]) -> Shifts {
        let nodes = hop_starts[hop_starts.len() - 1];
        let starts = hop_starts[..hop_starts.len() - 1].to_vec();
        let ends = &hop_starts[1..];
        let shifts = starts.iter().zip(ends).map(|(start, end)| (nodes - end).wrapping_sub(*start)).collect();
        Shifts { starts, shifts }
    }

    /// Appends `places` as local indices. Without branches, so that it runs in vector registers.
    fn convert(&self, places: &[u32], out: &mut Vec<LocalIndex>) {
        let mut piece = [0u32; PIECE];
        for places in places.chunks(PIECE) {
            let piece = &mut piece[..places.len()];
            piece.iter_mut().zip(places).for_each(|(to, place)| *to = place.wrapping_add(self.shifts[0]));
            for hop in 1..self.starts.len() {
                let start = self.starts[hop];
                let more = self.shifts[hop].wrapping_sub(self.shifts[hop - 1]);
                for (to, place) in piece.iter_mut().zip(places) {
                    *to = to.wrapping_add(if *place >= start { more } else { 0 });
                }
            }
            out.extend(piece.iter().map(|index| LocalIndex(*index)));
        }
    }
}

/// Writes the batch in `scratch` to `out`.
pub(super) fn assemble<T: Topology>(settings: &Settings, scratch: &Scratch<T>, out: &mut Sample) {
    let layers = settings.fanouts.len();
    out.clear(settings.form, if settings.form == Form::Layered { layers } else { 1 });
    let starts = &scratch.hop_starts;
    let hop = |hop: usize| starts[hop] as usize..starts[hop + 1] as usize;
    let nodes = scratch.nodes.len() as u32;
    out.node_id_offsets.push(0);
    for depth in (0..=layers).rev() {
        out.node_ids.extend_from_slice(&scratch.nodes[hop(depth)]);
        out.node_id_offsets.push(out.node_ids.len() as u32);
        if !scratch.skipped.is_empty() {
            out.pruned.extend_from_slice(&scratch.skipped[hop(depth)]);
        }
    }
    seed_places(&scratch.seeds, starts[1], nodes, &mut out.seeds);
    let shifts = Shifts::new(starts);
    let sections = &scratch.sections;
    for block in &mut out.blocks {
        block.nbr_offsets.push(0);
    }
    match settings.form {
        Form::Dense => {
            out.blocks[0].first = out.node_id_offsets[1];
            let edges = sections[..layers].iter().map(|section| section.places.len()).sum();
            out.blocks[0].nbrs.reserve_exact(edges);
            out.blocks[0].positions.reserve_exact(edges);
            for section in sections[..layers].iter().rev() {
                copy(section, 0..section.lengths.len(), 0, &shifts, &mut out.blocks[0]);
            }
        }
        Form::Layered => {
            for (layer, section) in sections[..layers].iter().rev().enumerate() {
                let depth = layers - 1 - layer;
                out.blocks[layer].first = out.node_id_offsets[layer + 1];
                by_hop(section, (0..=depth).rev().map(hop), &shifts, &mut out.blocks[layer]);
            }
        }
        Form::Shadow => {
            by_hop(&sections[layers], (0..=layers).rev().map(hop), &shifts, &mut out.blocks[0]);
        }
    }
}

/// Copies the lists of several hops that one section holds in order of discovery.
fn by_hop(section: &Section, hops: impl Iterator<Item = Range<usize>>, shifts: &Shifts, block: &mut Block) {
    let sum = |range: Range<usize>| section.lengths[range].iter().map(|length| *length as usize).sum();
    for nodes in hops {
        let before: usize = sum(0..nodes.start);
        copy(section, nodes, before, shifts, block);
    }
}

/// Copies the lists of `nodes`, whose first entry is entry `first` of the section.
fn copy(section: &Section, nodes: Range<usize>, first: usize, shifts: &Shifts, block: &mut Block) {
    let mut end = block.nbrs.len() as u32;
    let lengths = &section.lengths[nodes.clone()];
    block.nbr_offsets.extend(lengths.iter().map(|length| {
        end += length;
        end
    }));
    block.degrees.extend_from_slice(&section.degrees[nodes]);
    let entries = first..first + (end as usize - block.nbrs.len());
    shifts.convert(&section.places[entries.clone()], &mut block.nbrs);
    block.positions.extend_from_slice(&section.positions[entries.clone()]);
    if !section.edges.is_empty() {
        block.edges.extend_from_slice(&section.edges[entries.clone()]);
    }
    if !section.relations.is_empty() {
        block.relations.extend_from_slice(&section.relations[entries]);
    }
}
