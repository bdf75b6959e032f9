//! Records of format 2, node by node in order of discovery. Most of a record is implied: a node's neighbours are ids if
//! they are new, and local indices if not. New nodes get the next local indices, and canonical order follows. Such a
//! record takes least space, but every number has to be decoded before the position of the next is known.

use super::TraceHeader;
use super::bits::{BitReader, BitWriter, width_below};
use super::distinct::DistinctIds;
use super::parts::{
    FOREIGN_NODE, Flaw, REPEATED, SHORT, TOO_LONG, Widths, hop_nodes, put_hops, put_positions, put_seeds,
    regular_count, rice_width, take_hops, take_positions, take_seeds,
};
use crate::found::{Discovered, Section};
use crate::memory::Ledger;
use crate::{Block, Fanout, Form, Sample};
use esker_types::{EdgeId, NodeId};
use std::ops::Range;

/// The hops in each section of a form, by depth. A section has the deepest of them first.
fn sections(form: Form, layers: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let all = match form {
        Form::Dense => (0..layers).map(|depth| (depth, depth..depth + 1)).collect(),
        Form::Layered => (0..layers).map(|depth| (depth, 0..depth + 1)).collect(),
        Form::Shadow => vec![(layers, 0..layers + 1)],
    };
    Vec::into_iter(all)
}

/// Whether a node of this hop has its degree in the section of this depth: it is in its first section.
fn tells_degree(form: Form, depth: usize, hop: usize) -> bool {
    form != Form::Layered || depth == hop
}

/// A node's neighbours and what is known of them.
struct EncodedNeighbours<'a> {
    block: &'a Block,
    fanout: Option<Fanout>,
    tells_degree: bool,
}

/// Turns samples into bits; buffers are reused.
#[derive(Debug, Default)]
pub(super) struct GapsEncoder {
    writer: BitWriter,
    /// Local indices of the current neighbours, in order of discovery.
    places: Vec<u64>,
    new_ids: Vec<u64>,
}

impl GapsEncoder {
    /// The record of a sample made with the header's settings.
    pub fn encode(&mut self, header: &TraceHeader, sample: &Sample) -> &[u8] {
        let widths = Widths::of(header);
        let layers = sample.layers();
        self.writer.clear();
        let hop = |hop: usize| hop_nodes(&sample.node_id_offsets, hop);
        put_hops(&mut self.writer, sample);
        let explicit = if header.settings.form == Form::Shadow { layers } else { 0 };
        for depth in 0..=explicit {
            sample.node_ids[hop(depth)].iter().for_each(|node| self.writer.put(node.0, widths.node));
        }
        put_seeds(&mut self.writer, sample);
        // No node is pulled: these records are older than that.
        self.writer.put(0, 1);
        let mut known = (0..=explicit).map(|depth| hop(depth).len() as u64).sum();
        let form = header.settings.form;
        for (depth, hops) in sections(form, layers) {
            let block = match form {
                Form::Layered => &sample.blocks[layers - 1 - depth],
                _ => &sample.blocks[0],
            };
            let fanout = header.settings.fanouts.get(depth).copied();
            for at in hops.rev() {
                let list = EncodedNeighbours { block, fanout, tells_degree: tells_degree(form, depth, at) };
                for node in hop(at) {
                    known = self.encode_neighbours(sample, &list, node, known, &widths);
                }
            }
        }
        if header.settings.carry.degrees && form != Form::Shadow {
            hop(layers).for_each(|node| self.writer.put_gamma(sample.degrees[node] as u64));
        }
        self.writer.finish()
    }

    /// Encodes the neighbours of one node. Returns how many nodes are known after them.
    fn encode_neighbours(
        &mut self,
        sample: &Sample,
        list: &EncodedNeighbours,
        node: usize,
        known: u64,
        widths: &Widths,
    ) -> u64 {
        let block = list.block;
        let at = node - block.first as usize;
        let range = block.nbr_offsets[at] as usize..block.nbr_offsets[at + 1] as usize;
        let degree = sample.degrees[node + sample.degrees.len() - sample.node_ids.len()] as u64;
        let count = range.len() as u64;
        let writer = &mut self.writer;
        if list.tells_degree {
            writer.put_gamma(degree);
        }
        let regular = count == regular_count(list.fanout, degree);
        writer.put(regular as u64, 1);
        if !regular {
            writer.put_gamma(count);
        }
        if !block.positions.is_empty() {
            put_positions(writer, degree, &block.positions[range.clone()]);
        }
        self.places.clear();
        self.places.extend(block.nbrs[range.clone()].iter().map(|nbr| discovery_index(sample, nbr.0)));
        self.new_ids.clear();
        let mut next = known;
        for (place, nbr) in self.places.iter().zip(&block.nbrs[range.clone()]) {
            let is_new = *place == next;
            writer.put(is_new as u64, 1);
            if is_new {
                self.new_ids.push(sample.node_ids[nbr.index()].0);
                next += 1;
            }
        }
        put_ids(writer, &self.new_ids, widths.node);
        let width = width_below(next);
        let mut new = known;
        for place in &self.places {
            if *place == new {
                new += 1;
            } else {
                writer.put(*place, width);
            }
        }
        block.edges.get(range.clone()).into_iter().flatten().for_each(|e| writer.put(e.0, widths.edge));
        let relations = block.relations.get(range).into_iter().flatten();
        relations.for_each(|relation| writer.put(*relation as u64, widths.relation));
        next
    }
}

/// Index in order of discovery of a local index in canonical order.
#[inline(always)]
fn discovery_index(sample: &Sample, local: u32) -> u64 {
    let offsets = &sample.node_id_offsets;
    let nodes = offsets[offsets.len() - 1];
    let chunk = offsets[1..].iter().take_while(|end| **end <= local).count();
    (nodes - offsets[chunk + 1] + (local - offsets[chunk])) as u64
}

/// Encodes ids of new nodes: as gaps if they ascend, as they usually do, else plain.
fn put_ids(writer: &mut BitWriter, ids: &[u64], width: u32) {
    if ids.len() < 2 {
        return ids.iter().for_each(|id| writer.put(*id, width));
    }
    let ascending = ids.windows(2).all(|pair| pair[0] < pair[1]);
    writer.put(ascending as u64, 1);
    if !ascending {
        return ids.iter().for_each(|id| writer.put(*id, width));
    }
    let (low, mut least) = (id_gap_width(width, ids.len()), 0);
    for id in ids {
        writer.put_rice(id - least, low);
        least = id + 1;
    }
}

fn id_gap_width(width: u32, count: usize) -> u32 {
    rice_width(1u64.checked_shl(width).unwrap_or(u64::MAX), count as u64)
}

/// Turns bits into samples; buffers are reused. It trusts nothing: an inconsistent record is an error with a
/// description.
#[derive(Debug, Default)]
pub(super) struct GapsDecoder {
    found: Discovered,
    flags: Vec<bool>,
    ids: Vec<u64>,
    distinct: DistinctIds,
}

/// The node whose neighbours are decoded.
#[derive(Clone, Copy)]
struct Listed {
    depth: usize,
    node: usize,
    fanout: Option<Fanout>,
    tells_degree: bool,
}

impl GapsDecoder {
    pub fn decode(&mut self, header: &TraceHeader, bytes: &[u8], out: &mut Sample) -> Result<(), Flaw> {
        let widths = Widths::of(header);
        let (form, layers) = (header.settings.form, header.settings.fanouts.len());
        let mut reader = BitReader::new(bytes);
        let hops = self.decode_nodes(header, &mut reader, &widths)?;
        take_seeds(&mut reader, hops[0], &mut self.found.seeds)?;
        if reader.take(1) == 1 {
            return Err("marks of nodes that are not expanded, which no version has written");
        }
        let found = &mut self.found;
        found.sections.resize_with(layers + 1, Section::default);
        found.sections.iter_mut().for_each(Section::clear);
        found.degrees.clear();
        for (depth, listed) in sections(form, layers) {
            let fanout = header.settings.fanouts.get(depth).copied();
            for hop in listed.rev() {
                let tells_degree = tells_degree(form, depth, hop);
                for node in found_range(&self.found.hop_starts, hop) {
                    let list = Listed { depth, node, fanout, tells_degree };
                    self.decode_neighbours(header, &mut reader, list, &widths)?;
                    if reader.is_over() {
                        return Err(SHORT);
                    }
                }
            }
            self.keep_degrees(form, depth, layers);
        }
        let found = &mut self.found;
        if found.nodes.len() as u64 != hops.iter().sum::<u64>() {
            return Err("lists that name fewer nodes than their hops have");
        }
        if header.settings.carry.degrees && form != Form::Shadow {
            self.decode_degrees(&mut reader, layers)?;
        }
        if !reader.is_at_end() {
            return Err("a record that goes on after its end");
        }
        if !self.distinct.check(&self.found.nodes, header.nodes) {
            return Err(REPEATED);
        }
        self.found.assemble(form, out, &mut Ledger::unlimited()).map_err(|_| TOO_LONG)
    }

    /// Takes the degrees of a section, by node in order of discovery.
    fn keep_degrees(&mut self, form: Form, depth: usize, layers: usize) {
        let found = &mut self.found;
        if form == Form::Shadow {
            // The section has the deepest hop first.
            let mut end = found.sections[layers].degrees.len();
            for hop in 0..=layers {
                let start = end - found_range(&found.hop_starts, hop).len();
                found.degrees.extend_from_slice(&found.sections[layers].degrees[start..end]);
                end = start;
            }
        } else {
            let listed = found_range(&found.hop_starts, depth).len();
            found.degrees.extend_from_slice(&found.sections[depth].degrees[..listed]);
        }
    }

    /// Decodes degrees that no section has: those of the deepest hop.
    fn decode_degrees(&mut self, reader: &mut BitReader, layers: usize) -> Result<(), Flaw> {
        let found = &mut self.found;
        found.degrees.resize(found.nodes.len(), 0);
        for node in found_range(&found.hop_starts, layers) {
            let degree = reader.take_gamma().filter(|degree| *degree <= u32::MAX as u64).ok_or(SHORT)?;
            found.degrees[node] = degree as u32;
        }
        Ok(())
    }

    /// Decodes the sizes of the hops, and the ids that sections do not contain.
    fn decode_nodes(
        &mut self,
        header: &TraceHeader,
        reader: &mut BitReader,
        widths: &Widths,
    ) -> Result<Vec<u64>, Flaw> {
        let hops = take_hops(reader, header)?;
        let total: u64 = hops.iter().sum();
        let found = &mut self.found;
        found.hop_starts.clear();
        found.hop_starts.push(0);
        let ends = hops.iter().scan(0, |end, size| {
            *end += *size as u32;
            Some(*end)
        });
        found.hop_starts.extend(ends);
        let explicit = if header.settings.form == Form::Shadow { total } else { hops[0] };
        found.nodes.clear();
        for _ in 0..explicit {
            let node = reader.take(widths.node);
            if node >= header.nodes || reader.is_over() {
                return Err(FOREIGN_NODE);
            }
            found.nodes.push(NodeId(node));
        }
        Ok(hops)
    }

    fn decode_neighbours(
        &mut self,
        header: &TraceHeader,
        reader: &mut BitReader,
        list: Listed,
        widths: &Widths,
    ) -> Result<(), Flaw> {
        let Listed { depth, node, fanout, tells_degree } = list;
        let found = &mut self.found;
        let section = &mut found.sections[depth];
        let degree = match tells_degree {
            true => reader.take_gamma().filter(|degree| *degree <= u32::MAX as u64).ok_or(SHORT)?,
            // It is in the section of the node's own hop, which was read before.
            false => found.degrees[node] as u64,
        };
        let count = match reader.take(1) {
            1 => regular_count(fanout, degree),
            _ => reader.take_gamma().ok_or(SHORT)?,
        };
        if count > degree || reader.is_over() {
            return Err("a list longer than its node's degree");
        }
        // Every entry has its own flag, so a count that the record cannot hold is refused here, before memory is
        // allocated.
        if header.settings.carry.positions {
            take_positions(reader, degree, count, &mut section.positions)?;
        }
        self.flags.clear();
        for _ in 0..count {
            self.flags.push(reader.take(1) == 1);
            if reader.is_over() {
                return Err(SHORT);
            }
        }
        let new = self.flags.iter().filter(|flag| **flag).count();
        let mut next = found.nodes.len() as u64;
        take_ids(reader, new, widths.node, &mut self.ids)?;
        if self.ids.iter().any(|id| *id >= header.nodes) {
            return Err(FOREIGN_NODE);
        }
        // The neighbours at a depth discover the next hop and nothing else.
        let most = found.hop_starts.get(depth + 2).copied().unwrap_or(0) as u64;
        if new > 0 && next + new as u64 > most {
            return Err("lists that name more nodes than their hop has");
        }
        let width = width_below(next + new as u64);
        found.nodes.extend(self.ids.iter().map(|id| NodeId(*id)));
        for is_new in &self.flags {
            let place = if *is_new { next } else { reader.take(width) };
            if !is_new && place >= next {
                return Err("a neighbour that is not in the batch");
            }
            next += *is_new as u64;
            section.local_indices.push(place as u32);
        }
        section.lengths.push(count as u32);
        section.degrees.push(degree as u32);
        take_edges(reader, header, widths, count, section)
    }
}

/// The nodes of a hop.
fn found_range(hop_starts: &[u32], hop: usize) -> Range<usize> {
    hop_starts[hop] as usize..hop_starts[hop + 1] as usize
}

/// Edge ids and relations of a node's neighbours, if they are carried.
#[inline(always)]
fn take_edges(
    reader: &mut BitReader,
    header: &TraceHeader,
    widths: &Widths,
    count: u64,
    section: &mut Section,
) -> Result<(), Flaw> {
    if header.settings.carry.edges {
        for _ in 0..count {
            let edge = reader.take(widths.edge);
            if edge >= header.edges {
                return Err("an edge that the graph does not have");
            }
            section.edges.push(EdgeId(edge));
        }
    }
    if header.settings.carry.relations {
        for _ in 0..count {
            let relation = reader.take(widths.relation);
            if relation >= header.relations {
                return Err("a kind of edge that the graph does not have");
            }
            section.relations.push(relation as u32);
        }
    }
    Ok(())
}

fn take_ids(reader: &mut BitReader, count: usize, width: u32, out: &mut Vec<u64>) -> Result<(), Flaw> {
    out.clear();
    if count < 2 || reader.take(1) == 0 {
        out.extend((0..count).map(|_| reader.take(width)));
        return Ok(());
    }
    let (low, mut least) = (id_gap_width(width, count), 0u64);
    for _ in 0..count {
        let id = least.checked_add(reader.take_rice(low).ok_or(SHORT)?).ok_or(SHORT)?;
        out.push(id);
        least = id.checked_add(1).ok_or(SHORT)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Carry, Settings};

    fn header(settings: Settings) -> TraceHeader {
        let (dataset, batches, direction) = (String::new(), String::new(), crate::Direction::Incoming);
        TraceHeader { dataset, nodes: 200, edges: 9000, relations: 0, direction, batches, settings }
    }

    /// A record of one target with forged seeds.
    fn one_target(count: u64) -> (TraceHeader, Vec<u8>) {
        let settings = Settings {
            seed: 1,
            fanouts: vec![Fanout::AtMost(4)],
            form: Form::Dense,
            carry: Carry::default(),
        };
        let header = header(settings);
        let mut writer = BitWriter::default();
        writer.put_gamma(1);
        writer.put_gamma(0);
        writer.put(5, width_below(200));
        writer.put(0, 1);
        writer.put_gamma(count);
        (header, writer.finish().to_vec())
    }

    #[test]
    fn a_short_record_cannot_ask_for_endless_seeds() {
        let (header, record) = one_target(1 << 40);
        let mut decoder = GapsDecoder::default();
        assert!(decoder.decode(&header, &record, &mut Sample::default()).is_err());
        assert!(decoder.found.seeds.len() < 1000);
    }
}
