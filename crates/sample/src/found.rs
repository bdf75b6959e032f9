//! A batch in order of discovery: what sampling produces and what a trace stores. `assemble` puts it in canonical order.

use crate::{Block, Form, Sample};
use esker_types::{EdgeId, LocalIndex, NodeId};
use std::ops::Range;

/// Entries converted at a time: each boundary between hops is one pass over them in the first-level cache.
const PIECE: usize = 2048;

/// The lists of one hop, in order of discovery, neighbours as places in order of discovery.
#[derive(Debug, Default)]
pub(crate) struct Section {
    pub lengths: Vec<u32>,
    pub degrees: Vec<u32>,
    pub places: Vec<u32>,
    pub positions: Vec<u32>,
    pub edges: Vec<EdgeId>,
    pub relations: Vec<u32>,
}

impl Section {
    pub fn bytes(&self) -> u64 {
        let words = self.lengths.capacity() + self.degrees.capacity() + self.places.capacity();
        let words = words + self.positions.capacity() + self.relations.capacity();
        words as u64 * 4 + self.edges.capacity() as u64 * 8
    }

    pub fn clear(&mut self) {
        self.lengths.clear();
        self.degrees.clear();
        self.places.clear();
        self.positions.clear();
        self.edges.clear();
        self.relations.clear();
    }
}

/// A batch in order of discovery.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub nodes: Vec<NodeId>,
    /// Hop `h` holds nodes `hop_starts[h]..hop_starts[h + 1]`.
    pub hop_starts: Vec<u32>,
    /// By depth; of ShaDow the induced lists of all nodes, behind the drawn ones.
    pub sections: Vec<Section>,
    /// By node, where a strategy pruned; else empty.
    pub skipped: Vec<bool>,
    /// The place of each seed.
    pub seeds: Vec<u32>,
}

impl Found {
    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        let sections: u64 = self.sections.iter().map(Section::bytes).sum();
        let words = self.nodes.capacity() * 2 + self.seeds.capacity();
        words as u64 * 4 + self.skipped.capacity() as u64 + sections
    }

    /// Writes the batch to `out`, in canonical order.
    pub fn assemble(&self, form: Form, out: &mut Sample) {
        let layers = self.hop_starts.len() - 2;
        out.clear(form, if form == Form::Layered { layers } else { 1 });
        let starts = &self.hop_starts;
        let hop = |hop: usize| starts[hop] as usize..starts[hop + 1] as usize;
        let nodes = self.nodes.len() as u32;
        out.node_id_offsets.push(0);
        for depth in (0..=layers).rev() {
            out.node_ids.extend_from_slice(&self.nodes[hop(depth)]);
            out.node_id_offsets.push(out.node_ids.len() as u32);
            if !self.skipped.is_empty() {
                out.pruned.extend_from_slice(&self.skipped[hop(depth)]);
            }
        }
        // Targets come last.
        let first_target = nodes - starts[1];
        out.seeds.extend(self.seeds.iter().map(|place| LocalIndex(first_target + place)));
        let shifts = Shifts::new(starts);
        let sections = &self.sections;
        for block in &mut out.blocks {
            block.nbr_offsets.push(0);
        }
        match form {
            Form::Dense => {
                out.blocks[0].first = out.node_id_offsets[1];
                let edges = sections[..layers].iter().map(|section| section.places.len()).sum();
                out.blocks[0].nbrs.reserve_exact(edges);
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
}

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
    if !section.positions.is_empty() {
        block.positions.extend_from_slice(&section.positions[entries.clone()]);
    }
    if !section.edges.is_empty() {
        block.edges.extend_from_slice(&section.edges[entries.clone()]);
    }
    if !section.relations.is_empty() {
        block.relations.extend_from_slice(&section.relations[entries]);
    }
}
