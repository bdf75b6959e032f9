//! One sample as bits.

use super::TraceHeader;
use super::bits::{BitReader, BitWriter, width_below};
use crate::found::{Discovered, Section};
use crate::memory::Ledger;
use crate::sampler::mark_unneeded;
use crate::{Block, Fanout, Form, Sample};
use esker_types::{EdgeId, NodeId};
use std::ops::Range;

/// Positions of nodes with degrees up to this are bitmaps.
const BITMAP_DEGREE: u64 = 64;

/// Bit widths that follow from the graph.
#[derive(Debug, Clone, Copy)]
struct Widths {
    node: u32,
    edge: u32,
    relation: u32,
}

impl Widths {
    fn of(header: &TraceHeader) -> Widths {
        let width = width_below;
        Widths { node: width(header.nodes), edge: width(header.edges), relation: width(header.relations) }
    }
}

/// A seed takes a bit even if there is only one target, so a record cannot have more seeds than bits.
fn seed_width(targets: u64) -> u32 {
    width_below(targets).max(1)
}

/// Number of lower bits of the gaps between `count` ascending numbers below `bound`.
#[inline(always)]
fn rice_width(bound: u64, count: u64) -> u32 {
    63 - (bound / (count + 1)).max(1).leading_zeros()
}

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
pub(super) struct Encoder {
    writer: BitWriter,
    /// Local indices of the current neighbours, in order of discovery.
    places: Vec<u64>,
    new_ids: Vec<u64>,
}

impl Encoder {
    /// The record of a sample made with the header's settings.
    pub fn encode(&mut self, header: &TraceHeader, sample: &Sample) -> &[u8] {
        let widths = Widths::of(header);
        let layers = sample.layers();
        self.writer.clear();
        let offsets = &sample.node_id_offsets;
        // Hop h is chunk L - h of the node ids.
        let hop = |hop: usize| offsets[layers - hop] as usize..offsets[layers - hop + 1] as usize;
        for depth in 0..=layers {
            self.writer.put_gamma(hop(depth).len() as u64);
        }
        let explicit = if header.settings.form == Form::Shadow { layers } else { 0 };
        for depth in 0..=explicit {
            sample.node_ids[hop(depth)].iter().for_each(|node| self.writer.put(node.0, widths.node));
        }
        self.encode_seeds(sample, hop(0));
        self.writer.put(!sample.unexpanded.is_empty() as u64, 1);
        if !sample.unexpanded.is_empty() {
            for depth in 1..layers {
                sample.unexpanded[hop(depth)].iter().for_each(|mark| self.writer.put(*mark as u64, 1));
            }
        }
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
                for node in hop(at).filter(|node| sample.unexpanded.get(*node) != Some(&true)) {
                    known = self.encode_neighbours(sample, &list, node, known, &widths);
                }
            }
        }
        if header.settings.carry.degrees && form != Form::Shadow {
            let untold =
                |node: &usize| hop(layers).contains(node) || sample.unexpanded.get(*node) == Some(&true);
            (0..sample.node_ids.len())
                .filter(untold)
                .for_each(|node| self.writer.put_gamma(sample.degrees[node] as u64));
        }
        self.writer.finish()
    }

    fn encode_seeds(&mut self, sample: &Sample, targets: Range<usize>) {
        let plain = sample.seeds.iter().map(|seed| seed.index()).eq(targets.clone());
        self.writer.put(plain as u64, 1);
        if !plain {
            self.writer.put_gamma(sample.seeds.len() as u64);
            let width = seed_width(targets.len() as u64);
            sample
                .seeds
                .iter()
                .for_each(|seed| self.writer.put((seed.index() - targets.start) as u64, width));
        }
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

/// How many neighbours a node has if nothing is pruned or induced.
fn regular_count(fanout: Option<Fanout>, degree: u64) -> u64 {
    match fanout {
        Some(Fanout::AtMost(most)) => degree.min(most as u64),
        Some(Fanout::All) => degree,
        None => 0,
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

/// Encodes a set of ascending positions. Writes nothing if it is all of them.
fn put_positions(writer: &mut BitWriter, degree: u64, positions: &[u32]) {
    let count = positions.len() as u64;
    if count == 0 || count == degree {
        return;
    }
    if degree <= BITMAP_DEGREE {
        return writer.put(positions.iter().fold(0, |set, position| set | 1u64 << position), degree as u32);
    }
    let (low, mut least) = (rice_width(degree, count), 0);
    for position in positions {
        writer.put_rice(*position as u64 - least, low);
        least = *position as u64 + 1;
    }
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
pub(super) struct Decoder {
    found: Discovered,
    flags: Vec<bool>,
    ids: Vec<u64>,
}

/// The node whose neighbours are decoded.
#[derive(Clone, Copy)]
struct Listed {
    depth: usize,
    node: usize,
    fanout: Option<Fanout>,
    tells_degree: bool,
}

/// What is wrong with a record.
pub(super) type Flaw = &'static str;

const SHORT: Flaw = "a record that ends too early";

impl Decoder {
    pub fn decode(&mut self, header: &TraceHeader, bytes: &[u8], out: &mut Sample) -> Result<(), Flaw> {
        let widths = Widths::of(header);
        let (form, layers) = (header.settings.form, header.settings.fanouts.len());
        let mut reader = BitReader::new(bytes);
        let hops = self.decode_nodes(header, &mut reader, &widths)?;
        self.decode_seeds(&mut reader, hops[0])?;
        let found = &mut self.found;
        found.skipped.clear();
        if reader.take(1) == 1 {
            let total: u64 = hops.iter().sum();
            let middle = hops[0] as usize..total.saturating_sub(hops[layers]) as usize;
            found.skipped.resize(total as usize, false);
            middle.for_each(|node| found.skipped[node] = reader.take(1) == 1);
        }
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
        self.check_nodes_differ()?;
        const FLAW: Flaw = "lists too long for one block";
        let ledger = &mut Ledger::unlimited();
        self.found.assemble(form, out, ledger).map_err(|_| FLAW)?;
        let mut exact = true;
        mark_unneeded(out, ledger, |_| exact = false).map_err(|_| FLAW)?;
        if exact { Ok(()) } else { Err("an unexpanded node whose list a layer needs") }
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

    /// Decodes degrees that no section has, in the order of the sample: the deepest hop first.
    fn decode_degrees(&mut self, reader: &mut BitReader, layers: usize) -> Result<(), Flaw> {
        let found = &mut self.found;
        found.degrees.resize(found.nodes.len(), 0);
        for hop in (0..=layers).rev() {
            for node in found_range(&found.hop_starts, hop) {
                if hop == layers || found.skipped.get(node) == Some(&true) {
                    let degree =
                        reader.take_gamma().filter(|degree| *degree <= u32::MAX as u64).ok_or(SHORT)?;
                    found.degrees[node] = degree as u32;
                }
            }
        }
        Ok(())
    }

    /// Checks that a node is in a batch once.
    fn check_nodes_differ(&mut self) -> Result<(), Flaw> {
        self.ids.clear();
        self.ids.extend(self.found.nodes.iter().map(|node| node.0));
        radsort::sort(&mut self.ids);
        match self.ids.windows(2).any(|pair| pair[0] == pair[1]) {
            true => Err("a node that is in the batch twice"),
            false => Ok(()),
        }
    }

    /// Decodes the sizes of the hops, and the ids that sections do not contain.
    fn decode_nodes(
        &mut self,
        header: &TraceHeader,
        reader: &mut BitReader,
        widths: &Widths,
    ) -> Result<Vec<u64>, Flaw> {
        let layers = header.settings.fanouts.len();
        let mut hops = Vec::with_capacity(layers + 1);
        let found = &mut self.found;
        found.hop_starts.clear();
        found.hop_starts.push(0);
        let mut total = 0u64;
        for _ in 0..=layers {
            let size = reader.take_gamma().ok_or(SHORT)?;
            total = total
                .checked_add(size)
                .filter(|total| *total <= header.nodes.min(1 << 31))
                .ok_or("hops with more nodes than the graph")?;
            hops.push(size);
            found.hop_starts.push(total as u32);
        }
        // Every node takes at least one bit. So a record too short for its hops is refused here, before memory is
        // allocated.
        if reader.is_over_after(total.saturating_sub(1)) {
            return Err(SHORT);
        }
        let explicit = if header.settings.form == Form::Shadow { total } else { hops[0] };
        found.nodes.clear();
        for _ in 0..explicit {
            let node = reader.take(widths.node);
            if node >= header.nodes || reader.is_over() {
                return Err("a node that the graph does not have");
            }
            found.nodes.push(NodeId(node));
        }
        Ok(hops)
    }

    fn decode_seeds(&mut self, reader: &mut BitReader, targets: u64) -> Result<(), Flaw> {
        let seeds = &mut self.found.seeds;
        seeds.clear();
        if reader.take(1) == 1 {
            seeds.extend(0..targets as u32);
            return Ok(());
        }
        let (count, width) = (reader.take_gamma().ok_or(SHORT)?, seed_width(targets));
        for _ in 0..count {
            let place = reader.take(width);
            if place >= targets || reader.is_over() {
                return Err("a seed that is not a target");
            }
            seeds.push(place as u32);
        }
        Ok(())
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
        if found.skipped.get(node).is_some_and(|skipped| *skipped) {
            section.lengths.push(0);
            section.degrees.push(0);
            return Ok(());
        }
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
            return Err("a node that the graph does not have");
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

fn take_positions(reader: &mut BitReader, degree: u64, count: u64, out: &mut Vec<u32>) -> Result<(), Flaw> {
    if count == degree || count == 0 {
        // If all neighbours are taken, each takes one bit later on. Check that before allocating memory.
        if reader.is_over_after(count) {
            return Err(SHORT);
        }
        out.extend(0..count as u32);
        return Ok(());
    }
    if degree <= BITMAP_DEGREE {
        let mut set = reader.take(degree as u32);
        if set.count_ones() as u64 != count {
            return Err("a set of positions of another size");
        }
        for _ in 0..count {
            out.push(set.trailing_zeros());
            set &= set - 1;
        }
        return Ok(());
    }
    let (low, mut least) = (rice_width(degree, count), 0u64);
    for _ in 0..count {
        let position = least.checked_add(reader.take_rice(low).ok_or(SHORT)?);
        let position = position.filter(|position| *position < degree).ok_or("a position after its list")?;
        out.push(position as u32);
        least = position + 1;
        if reader.is_over() {
            return Err(SHORT);
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
    use crate::{Carry, InMemory, Position, Sampler, Settings};
    use proptest::prelude::*;

    fn header(settings: Settings) -> TraceHeader {
        let (dataset, batches, direction) = (String::new(), String::new(), crate::Direction::Incoming);
        TraceHeader { dataset, nodes: 200, edges: 9000, relations: 0, direction, batches, settings }
    }

    proptest! {
        /// Checksums detect accidents; this test is about forged records.
        #[test]
        fn forged_records_are_described_and_never_panic(
            form in 0usize..3, positions: bool, flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        ) {
            let form = [Form::Dense, Form::Layered, Form::Shadow][form];
            let carry = Carry { positions, ..Carry::default() };
            let lists: Vec<Vec<u64>> = (0..200u64).map(|node| (0..node % 90).map(|at| at * 2).collect()).collect();
            let settings = Settings { seed: 1, fanouts: vec![Fanout::AtMost(4); 2], form, carry };
            let graph = InMemory::<u32>::from_adjacency(&lists, None);
            let (mut sample, seeds) = (Sample::default(), [150, 80, 80].map(NodeId));
            let mut sampler = Sampler::new(&graph, settings.clone(), 1 << 30).unwrap();
            sampler.sample(Position { epoch: 0, batch: 0 }, &seeds, &mut sample).unwrap();
            let header = header(settings);
            let mut encoder = Encoder::default();
            let mut record = encoder.encode(&header, &sample).to_vec();
            let length = record.len();
            flips.iter().for_each(|(at, bits)| record[at.index(length)] ^= bits);
            let mut out = Sample::default();
            if Decoder::default().decode(&header, &record, &mut out).is_ok() {
                prop_assert!(out.blocks.iter().all(|b| b.nbrs.iter().all(|n| n.index() < out.node_ids.len())));
                let distinct: std::collections::HashSet<_> = out.node_ids.iter().collect();
                prop_assert_eq!(distinct.len(), out.node_ids.len());
            }
        }
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
        let mut decoder = Decoder::default();
        assert!(decoder.decode(&header, &record, &mut Sample::default()).is_err());
        assert!(decoder.found.seeds.len() < 1000);
    }
}
