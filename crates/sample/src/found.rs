//! A batch in order of discovery, as sampling produces it and a trace stores it. Local indices here count nodes in
//! order of discovery. `assemble` puts the batch, local indices included, in canonical order.

use crate::memory::{Ledger, held};
use crate::{Block, Carry, Form, Result, Sample, SampleError};
use esker_types::{EdgeId, LocalIndex, NodeId};

/// Entries converted at a time. They stay in the L1 cache while each hop boundary makes one pass over them.
const PIECE: usize = 2048;

/// The sampled neighbours at one depth, in the order of sampling.
#[derive(Debug, Default)]
pub(crate) struct Section {
    pub lengths: Vec<u32>,
    pub degrees: Vec<u32>,
    pub local_indices: Vec<u32>,
    pub positions: Vec<u32>,
    pub edges: Vec<EdgeId>,
    pub relations: Vec<u32>,
}

impl Section {
    pub fn bytes(&self) -> u64 {
        let words =
            held(&self.lengths) + held(&self.degrees) + held(&self.local_indices) + held(&self.positions);
        words + held(&self.relations) + held(&self.edges)
    }

    pub fn clear(&mut self) {
        self.lengths.clear();
        self.degrees.clear();
        self.local_indices.clear();
        self.positions.clear();
        self.edges.clear();
        self.relations.clear();
    }

    /// Makes room for this many more nodes and neighbours.
    pub fn reserve(&mut self, lists: usize, entries: usize, carry: Carry, ledger: &mut Ledger) -> Result<()> {
        ledger.reserve(&mut self.lengths, lists)?;
        ledger.reserve(&mut self.degrees, lists)?;
        ledger.reserve(&mut self.local_indices, entries)?;
        if carry.positions {
            ledger.reserve(&mut self.positions, entries)?;
        }
        if carry.edges {
            ledger.reserve(&mut self.edges, entries)?;
        }
        if carry.relations {
            ledger.reserve(&mut self.relations, entries)?;
        }
        Ok(())
    }
}

/// Pulled nodes of a hop.
#[derive(Debug, Default)]
pub(crate) struct PulledNodes {
    /// Their local indices, ascending.
    pub nodes: Vec<u32>,
    /// Their neighbours. Those of the other nodes of the hop are in the section of its depth.
    pub section: Section,
}

/// A batch in order of discovery.
#[derive(Debug, Default)]
pub(crate) struct Discovered {
    pub nodes: Vec<NodeId>,
    /// Hop `h` is nodes `hop_starts[h]..hop_starts[h + 1]`.
    pub hop_starts: Vec<u32>,
    /// One section per depth, its nodes in the order of their block. ShaDow has one more section at the end, with the
    /// induced adjacency of all nodes.
    pub sections: Vec<Section>,
    /// Known degrees by node: of all hops but the deepest, or of all.
    pub degrees: Vec<u32>,
    /// Pulled nodes by hop, from hop 1 on. Those of hops that have none may be missing.
    pub pulled: Vec<PulledNodes>,
    /// The canonical local index of each node, if some are pulled.
    order: Vec<u32>,
    /// The local index of each seed node.
    pub seeds: Vec<u32>,
}

impl Discovered {
    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        let sections: u64 = self.sections.iter().map(Section::bytes).sum();
        let words = held(&self.nodes) + held(&self.seeds) + held(&self.degrees) + held(&self.hop_starts);
        let pulled: u64 = self.pulled.iter().map(|of| held(&of.nodes) + of.section.bytes()).sum();
        words + held(&self.pulled) + held(&self.order) + pulled + sections
    }

    /// The nodes that are pulled at a hop.
    pub fn pulled_at(&self, hop: usize) -> &[u32] {
        hop.checked_sub(1).and_then(|index| self.pulled.get(index)).map_or(&[], |of| &of.nodes)
    }

    /// Whether any node is pulled.
    pub fn has_pulled(&self) -> bool {
        self.pulled.iter().any(|of| !of.nodes.is_empty())
    }

    /// Forgets the batch before.
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.hop_starts.clear();
        self.degrees.clear();
        for of in &mut self.pulled {
            of.nodes.clear();
            of.section.clear();
        }
        self.seeds.clear();
    }

    /// Writes the batch to `out`, in canonical order.
    pub fn assemble(&mut self, form: Form, out: &mut Sample, ledger: &mut Ledger) -> Result<()> {
        match self.has_pulled() {
            true => self.assemble_levels(out, ledger),
            false => self.assemble_hops(form, out, ledger),
        }
    }

    fn assemble_hops(&self, form: Form, out: &mut Sample, ledger: &mut Ledger) -> Result<()> {
        let layers = self.hop_starts.len() - 2;
        out.clear(form, if form == Form::Layered { layers } else { 1 });
        let starts = &self.hop_starts;
        let hop = |hop: usize| starts[hop] as usize..starts[hop + 1] as usize;
        let nodes = self.nodes.len();
        ledger.reserve_exact(&mut out.node_ids, nodes)?;
        ledger.reserve_exact(&mut out.node_id_offsets, layers + 2)?;
        ledger.reserve_exact(&mut out.degrees, self.degrees.len())?;
        ledger.reserve_exact(&mut out.seeds, self.seeds.len())?;
        out.node_id_offsets.push(0);
        for depth in (0..=layers).rev() {
            out.node_ids.extend_from_slice(&self.nodes[hop(depth)]);
            out.node_id_offsets.push(out.node_ids.len() as u32);
            out.degrees.extend_from_slice(self.degrees.get(hop(depth)).unwrap_or(&[]));
        }
        // Targets come last.
        let first_target = nodes as u32 - starts[1];
        out.seeds.extend(self.seeds.iter().map(|local_index| LocalIndex(first_target + local_index)));
        let shifts = Shifts::new(starts);
        for (layer, block) in out.blocks.iter_mut().enumerate() {
            let sections = match form {
                Form::Dense => &self.sections[..layers],
                Form::Layered => &self.sections[layers - 1 - layer..layers - layer],
                Form::Shadow => &self.sections[layers..layers + 1],
            };
            block.first = if form == Form::Shadow { 0 } else { out.node_id_offsets[layer + 1] };
            reserve_block(block, &sections.iter().collect::<Vec<_>>(), ledger)?;
            block.nbr_offsets.push(0);
            for section in sections.iter().rev() {
                copy(section, block, |local_indices, nbrs| shifts.convert(local_indices, nbrs));
            }
        }
        Ok(())
    }
}

impl Discovered {
    /// Writes a DENSE batch with pulled nodes: these come after the nodes of the next hop, so their indices do not shift
    /// with their hop, and each node has its own.
    fn assemble_levels(&mut self, out: &mut Sample, ledger: &mut Ledger) -> Result<()> {
        let layers = self.hop_starts.len() - 2;
        out.clear(Form::Dense, 1);
        ledger.reserve_exact(&mut out.node_ids, self.nodes.len())?;
        ledger.reserve_exact(&mut out.node_id_offsets, layers + 2)?;
        ledger.reserve_exact(&mut out.seeds, self.seeds.len())?;
        ledger.extend_to(&mut self.order, self.nodes.len(), 0)?;
        let last = self.pulled.iter().rposition(|of| !of.nodes.is_empty()).map_or(0, |last| last + 1);
        ledger.reserve_exact(&mut out.pulled, last)?;
        out.pulled.extend(self.pulled[..last].iter().map(|of| of.nodes.len() as u32));
        out.node_id_offsets.push(0);
        for depth in (0..=layers).rev() {
            self.list_level(depth, out);
            out.node_id_offsets.push(out.node_ids.len() as u32);
        }
        out.seeds.extend(self.seeds.iter().map(|index| LocalIndex(self.order[*index as usize])));
        let Discovered { sections, pulled, order, .. } = &*self;
        // Nodes that are pulled at a hop follow those of the next one, and have neighbours if those have.
        let of_depth = |depth: usize| {
            let pulled = depth.checked_sub(2).and_then(|index| pulled.get(index));
            [Some(&sections[depth]), pulled.map(|of| &of.section)].into_iter().flatten()
        };
        let all: Vec<&Section> = (0..layers).rev().flat_map(of_depth).collect();
        ledger.reserve_exact(
            &mut out.degrees,
            self.degrees.len() + all.iter().map(|section| section.degrees.len()).sum::<usize>(),
        )?;
        out.degrees.extend_from_slice(&self.degrees);
        let block = &mut out.blocks[0];
        block.first = out.node_id_offsets[1];
        reserve_block(block, &all, ledger)?;
        block.nbr_offsets.push(0);
        for section in all {
            out.degrees.extend_from_slice(&section.degrees);
            copy(section, block, |local_indices, nbrs| {
                nbrs.extend(local_indices.iter().map(|index| LocalIndex(order[*index as usize])));
            });
        }
        Ok(())
    }

    /// Appends the nodes of a level: those of hop `depth` that are not pulled, then those that are pulled at the hop before.
    fn list_level(&mut self, depth: usize, out: &mut Sample) {
        let Discovered { nodes, hop_starts, order, pulled, .. } = self;
        let mut list = |index: u32| {
            order[index as usize] = out.node_ids.len() as u32;
            out.node_ids.push(nodes[index as usize]);
        };
        let own = hop_starts[depth]..hop_starts[depth + 1];
        let pulled_at = |below: usize| depth.checked_sub(below).and_then(|index| pulled.get(index));
        match pulled_at(1) {
            Some(of) => {
                let mut left_out = of.nodes.iter().copied().peekable();
                own.filter(|index| left_out.next_if_eq(index).is_none()).for_each(&mut list);
            }
            None => own.for_each(&mut list),
        }
        pulled_at(2).into_iter().flat_map(|of| &of.nodes).copied().for_each(&mut list);
    }
}

/// Makes room in a block for some sections. Fails if the block cannot index that many neighbours.
fn reserve_block(block: &mut Block, sections: &[&Section], ledger: &mut Ledger) -> Result<()> {
    let sum = |of: fn(&Section) -> usize| sections.iter().map(|section| of(section)).sum::<usize>();
    let entries = sum(|section| section.local_indices.len());
    if entries > u32::MAX as usize {
        return Err(SampleError::TooManyNeighbours { neighbours: entries });
    }
    ledger.reserve_exact(&mut block.nbr_offsets, sum(|section| section.lengths.len()) + 1)?;
    ledger.reserve_exact(&mut block.nbrs, entries)?;
    ledger.reserve_exact(&mut block.positions, sum(|section| section.positions.len()))?;
    ledger.reserve_exact(&mut block.edges, sum(|section| section.edges.len()))?;
    ledger.reserve_exact(&mut block.relations, sum(|section| section.relations.len()))
}

/// Converts local indices from order of discovery to canonical order: each hop is shifted by a constant.
struct Shifts {
    /// First local index of each hop, in order of discovery.
    starts: Vec<u32>,
    /// What to add to a local index of the hop, wrapping.
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

    /// Appends `local_indices` in canonical order. It has no branches, so that it runs in vector registers.
    fn convert(&self, local_indices: &[u32], out: &mut Vec<LocalIndex>) {
        let mut piece = [0u32; PIECE];
        for local_indices in local_indices.chunks(PIECE) {
            let piece = &mut piece[..local_indices.len()];
            piece
                .iter_mut()
                .zip(local_indices)
                .for_each(|(to, local_index)| *to = local_index.wrapping_add(self.shifts[0]));
            for hop in 1..self.starts.len() {
                let start = self.starts[hop];
                let more = self.shifts[hop].wrapping_sub(self.shifts[hop - 1]);
                for (to, local_index) in piece.iter_mut().zip(local_indices) {
                    *to = to.wrapping_add(if *local_index >= start { more } else { 0 });
                }
            }
            out.extend(piece.iter().map(|index| LocalIndex(*index)));
        }
    }
}

/// Appends a section to a block. `convert` appends local indices in canonical order.
fn copy(section: &Section, block: &mut Block, convert: impl Fn(&[u32], &mut Vec<LocalIndex>)) {
    let mut end = block.nbrs.len() as u32;
    block.nbr_offsets.extend(section.lengths.iter().map(|length| {
        end += length;
        end
    }));
    convert(&section.local_indices, &mut block.nbrs);
    block.positions.extend_from_slice(&section.positions);
    block.edges.extend_from_slice(&section.edges);
    block.relations.extend_from_slice(&section.relations);
}
