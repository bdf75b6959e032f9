//! Records of format 3, array by array in canonical order. Numbers of an array have the same width, so a record is
//! decoded by loops without branches, straight to where its numbers belong: five to ten times as fast as format 2.
//!
//! A neighbour that appears for the first time is one bit, because new nodes are numbered in this order. Every other
//! neighbour is a local index, counted from the first node that its layer reads. A decoder trusts nothing: an
//! inconsistent record is an error with a description, and memory is allocated only for what the record can hold.

use super::TraceHeader;
use super::bits::{BitReader, BitWriter, width_below};
use super::distinct::DistinctIds;
use super::parts::{
    FOREIGN_NODE, Flaw, REPEATED, SHORT, TOO_LONG, Widths, hop_nodes, put_hops, put_positions, put_pulled,
    put_seeds, regular_count, take_hops, take_positions, take_pulled, take_seeds,
};
use crate::{Block, Fanout, Form, Sample};
use esker_types::{EdgeId, LocalIndex, NodeId};
use std::ops::Range;

/// Bits of flags that are taken at a time.
const FLAGS: usize = 32;

/// The neighbours at one depth: a part of a block.
#[derive(Debug, Clone)]
struct SectionShape {
    block: usize,
    /// The nodes whose neighbours these are.
    nodes: Range<usize>,
    fanout: Option<Fanout>,
    /// The last of them that are pulled, and how many neighbours of those are sampled: they were found a hop before.
    pulled: Range<usize>,
    pulled_fanout: Option<Fanout>,
    /// The smallest local index that a neighbour can have: the start of the next hop, or of pulled nodes before it.
    low: u32,
    /// The first node that is discovered here, and how many are: those of the next hop, without pulled ones.
    first_new: u32,
    new: u32,
}

impl SectionShape {
    /// Bits of a neighbour that is not new. At least one, so that a record cannot have more neighbours than bits.
    fn index_width(&self, nodes: u32) -> u32 {
        width_below((nodes - self.low) as u64).max(1)
    }

    /// Its nodes as rows of the block.
    fn rows(&self, block: &Block) -> Range<usize> {
        self.nodes.start - block.first as usize..self.nodes.end - block.first as usize
    }
}

/// The sections of a sample in the order of its blocks.
fn sections(form: Form, fanouts: &[Fanout], sample: &Sample) -> Vec<SectionShape> {
    let offsets = &sample.node_id_offsets;
    let layers = offsets.len() - 2;
    let nodes = offsets[layers + 1] as usize;
    if form == Form::Shadow {
        let (pulled, pulled_fanout, low) = (0..0, None, 0);
        let nodes = 0..nodes;
        let shape =
            SectionShape { block: 0, nodes, fanout: None, pulled, pulled_fanout, low, first_new: 0, new: 0 };
        return vec![shape];
    }
    let section = |depth: usize| {
        let (own, next) = (hop_nodes(offsets, depth), hop_nodes(offsets, depth + 1));
        let (block, end) = match form {
            Form::Layered => (layers - 1 - depth, nodes),
            _ => (0, own.end),
        };
        let (first_new, new) = (next.start as u32, next.len() as u32);
        // Nodes lead to pulled ones, which are listed before the others of the next hop, after those of the hop after it.
        let low = first_new - sample.pulled_at(depth + 1);
        let new = new - sample.pulled_at(depth);
        let pulled = own.end - sample.pulled_at(depth.saturating_sub(1)) as usize..own.end;
        let (fanout, before) = (fanouts.get(depth).copied(), depth.checked_sub(1));
        let pulled_fanout = before.and_then(|before| fanouts.get(before)).copied();
        SectionShape { block, nodes: own.start..end, fanout, pulled, pulled_fanout, low, first_new, new }
    };
    (0..layers).rev().map(section).collect()
}

/// Number of entries of `degrees`.
fn degree_count(header: &TraceHeader, offsets: &[u32]) -> usize {
    let nodes = offsets[offsets.len() - 1] as usize;
    let is_all = header.settings.carry.degrees || header.settings.form == Form::Shadow;
    if is_all { nodes } else { nodes - offsets[1] as usize }
}

/// Turns samples into bits; buffers are reused.
#[derive(Debug, Default)]
pub(super) struct ColumnsEncoder {
    writer: BitWriter,
    counts: Vec<u32>,
    indices: Vec<u32>,
}

impl ColumnsEncoder {
    /// The record of a sample made with the header's settings.
    pub fn encode(&mut self, header: &TraceHeader, sample: &Sample) -> &[u8] {
        let (widths, settings) = (Widths::of(header), &header.settings);
        let sections = sections(settings.form, &settings.fanouts, sample);
        self.writer.clear();
        put_hops(&mut self.writer, sample);
        put_seeds(&mut self.writer, sample);
        put_pulled(&mut self.writer, sample);
        self.writer.put_groups(&sample.degrees);
        sections.iter().for_each(|section| self.encode_counts(sample, section));
        if settings.carry.positions {
            sections.iter().for_each(|section| self.encode_positions(sample, section));
        }
        sample.node_ids.iter().for_each(|node| self.writer.put(node.0, widths.node));
        sections.iter().for_each(|section| self.encode_neighbours(sample, section));
        for block in &sample.blocks {
            block.edges.iter().for_each(|edge| self.writer.put(edge.0, widths.edge));
            block.relations.iter().for_each(|relation| self.writer.put(*relation as u64, widths.relation));
        }
        self.writer.finish()
    }

    fn encode_counts(&mut self, sample: &Sample, section: &SectionShape) {
        let block = &sample.blocks[section.block];
        let nodes = sample.node_ids.len();
        let regular = RegularCounts::new(section, nodes, &sample.degrees);
        self.counts.clear();
        self.counts
            .extend(section.rows(block).map(|row| block.nbr_offsets[row + 1] - block.nbr_offsets[row]));
        let is_regular =
            section.nodes.clone().zip(&self.counts).all(|(node, count)| regular.count(node) == *count as u64);
        self.writer.put(is_regular as u64, 1);
        if !is_regular {
            self.writer.put_groups(&self.counts);
        }
    }

    fn encode_positions(&mut self, sample: &Sample, section: &SectionShape) {
        let block = &sample.blocks[section.block];
        let rows = section.rows(block);
        let first_degree = section.nodes.start + sample.degrees.len() - sample.node_ids.len();
        for (row, degree) in rows.zip(&sample.degrees[first_degree..]) {
            let range = block.nbr_offsets[row] as usize..block.nbr_offsets[row + 1] as usize;
            put_positions(&mut self.writer, *degree as u64, &block.positions[range]);
        }
    }

    fn encode_neighbours(&mut self, sample: &Sample, section: &SectionShape) {
        let block = &sample.blocks[section.block];
        let rows = section.rows(block);
        let range = block.nbr_offsets[rows.start] as usize..block.nbr_offsets[rows.end] as usize;
        let mut next = section.first_new;
        self.indices.clear();
        for nbr in &block.nbrs[range] {
            let is_new = nbr.0 == next && next < section.first_new + section.new;
            if section.new > 0 {
                self.writer.put(is_new as u64, 1);
            }
            match is_new {
                true => next += 1,
                false => self.indices.push(nbr.0 - section.low),
            }
        }
        let width = section.index_width(sample.node_ids.len() as u32);
        self.indices.iter().for_each(|index| self.writer.put(*index as u64, width));
    }
}

/// How many neighbours each node has if nothing is induced.
struct RegularCounts<'a> {
    degrees: &'a [u32],
    /// The node of the first degree.
    first: usize,
    fanout: Option<Fanout>,
    /// Nodes from here on are pulled.
    pulled_from: usize,
    pulled_fanout: Option<Fanout>,
}

impl<'a> RegularCounts<'a> {
    fn new(section: &SectionShape, nodes: usize, degrees: &'a [u32]) -> RegularCounts<'a> {
        let (first, fanout, pulled_fanout) = (nodes - degrees.len(), section.fanout, section.pulled_fanout);
        let pulled_from = if section.pulled.is_empty() { usize::MAX } else { section.pulled.start };
        RegularCounts { degrees, first, fanout, pulled_from, pulled_fanout }
    }

    #[inline(always)]
    fn count(&self, node: usize) -> u64 {
        let fanout = if node < self.pulled_from { self.fanout } else { self.pulled_fanout };
        regular_count(fanout, self.degree(node))
    }

    #[inline(always)]
    fn degree(&self, node: usize) -> u64 {
        self.degrees[node - self.first] as u64
    }
}

/// Turns bits into samples; buffers are reused.
#[derive(Debug, Default)]
pub(super) struct ColumnsDecoder {
    seeds: Vec<u32>,
    counts: Vec<u32>,
    indices: Vec<u32>,
    distinct: DistinctIds,
}

impl ColumnsDecoder {
    pub fn decode(&mut self, header: &TraceHeader, bytes: &[u8], out: &mut Sample) -> Result<(), Flaw> {
        let (widths, settings) = (Widths::of(header), &header.settings);
        let reader = &mut BitReader::new(bytes);
        self.decode_front(header, reader, &widths, out)?;
        let sections = sections(settings.form, &settings.fanouts, out);
        self.decode_counts(reader, &sections, out)?;
        if settings.carry.positions {
            sections.iter().try_for_each(|section| decode_positions(reader, section, out))?;
        }
        let mut largest = 0;
        reader.take_each(widths.node, &mut out.node_ids, |id| {
            largest = id.max(largest);
            NodeId(id)
        });
        if reader.is_over() {
            return Err(SHORT);
        }
        if !out.node_ids.is_empty() && largest >= header.nodes {
            return Err(FOREIGN_NODE);
        }
        let indices = &mut self.indices;
        sections.iter().try_for_each(|section| decode_neighbours(reader, section, indices, out))?;
        for block in &mut out.blocks {
            decode_edges(reader, header, &widths, block)?;
        }
        if !reader.is_at_end() {
            return Err("a record that goes on after its end");
        }
        if !self.distinct.check(&out.node_ids, header.nodes) {
            return Err(REPEATED);
        }
        Ok(())
    }

    /// Decodes everything before the counts, and makes room for the ids of the nodes.
    fn decode_front(
        &mut self,
        header: &TraceHeader,
        reader: &mut BitReader,
        widths: &Widths,
        out: &mut Sample,
    ) -> Result<(), Flaw> {
        let (form, layers) = (header.settings.form, header.settings.fanouts.len());
        let hops = take_hops(reader, header)?;
        let nodes = hops.iter().sum::<u64>() as usize;
        if reader.is_over_after(nodes as u64 * widths.node as u64) {
            return Err(SHORT);
        }
        out.form = form;
        out.node_id_offsets.clear();
        out.node_id_offsets.push(0);
        let mut end = 0;
        for size in hops.iter().rev() {
            end += *size as u32;
            out.node_id_offsets.push(end);
        }
        resize(&mut out.node_ids, nodes);
        take_seeds(reader, hops[0], &mut self.seeds)?;
        let first_target = (nodes as u64 - hops[0]) as u32;
        out.seeds.clear();
        out.seeds.extend(self.seeds.iter().map(|seed| LocalIndex(first_target + seed)));
        take_pulled(reader, header, &hops, &mut out.pulled)?;
        resize(&mut out.degrees, degree_count(header, &out.node_id_offsets));
        reader.take_groups(&mut out.degrees).ok_or("a number of more than 32 bits")?;
        out.blocks.resize_with(if form == Form::Layered { layers } else { 1 }, Block::default);
        for (layer, block) in out.blocks.iter_mut().enumerate() {
            block.first = if form == Form::Shadow { 0 } else { out.node_id_offsets[layer + 1] };
            block.nbr_offsets.clear();
            block.nbr_offsets.push(0);
            block.positions.clear();
        }
        if reader.is_over() { Err(SHORT) } else { Ok(()) }
    }

    /// Decodes how many neighbours each node has, and makes room for them.
    fn decode_counts(
        &mut self,
        reader: &mut BitReader,
        sections: &[SectionShape],
        out: &mut Sample,
    ) -> Result<(), Flaw> {
        let Sample { blocks, degrees, node_ids, .. } = out;
        for section in sections {
            let offsets = &mut blocks[section.block].nbr_offsets;
            let regular = RegularCounts::new(section, node_ids.len(), degrees);
            let listed = section.nodes.len();
            offsets.reserve_exact(listed);
            // In 64 bits: a forged record may have more neighbours than a block can index.
            let (mut end, mut is_longer) = (offsets[offsets.len() - 1] as u64, false);
            if reader.take(1) == 1 {
                offsets.extend(section.nodes.clone().map(|node| {
                    end += regular.count(node);
                    end as u32
                }));
            } else {
                resize(&mut self.counts, listed);
                reader.take_groups(&mut self.counts).ok_or("a number of more than 32 bits")?;
                offsets.extend(section.nodes.clone().zip(&self.counts).map(|(node, count)| {
                    is_longer |= *count as u64 > regular.degree(node);
                    end += *count as u64;
                    end as u32
                }));
            }
            if is_longer {
                return Err("a list longer than its node's degree");
            }
            if end > u32::MAX as u64 {
                return Err(TOO_LONG);
            }
        }
        let ends = blocks.iter().map(|block| block.nbr_offsets[block.nbr_offsets.len() - 1] as u64);
        // Every neighbour takes at least one bit.
        if reader.is_over_after(ends.sum()) {
            return Err(SHORT);
        }
        for block in blocks {
            let entries = block.nbr_offsets[block.nbr_offsets.len() - 1] as usize;
            resize(&mut block.nbrs, entries);
        }
        Ok(())
    }
}

fn decode_positions(reader: &mut BitReader, section: &SectionShape, out: &mut Sample) -> Result<(), Flaw> {
    let block = &mut out.blocks[section.block];
    let rows = section.rows(block);
    let first_degree = section.nodes.start + out.degrees.len() - out.node_ids.len();
    for (row, degree) in rows.zip(&out.degrees[first_degree..]) {
        let count = block.nbr_offsets[row + 1] - block.nbr_offsets[row];
        take_positions(reader, *degree as u64, count as u64, &mut block.positions)?;
    }
    Ok(())
}

/// Decodes the neighbours of a section: first those that are not new, then all in order.
fn decode_neighbours(
    reader: &mut BitReader,
    section: &SectionShape,
    indices: &mut Vec<u32>,
    out: &mut Sample,
) -> Result<(), Flaw> {
    let (low, nodes) = (section.low, out.node_ids.len() as u32);
    let block = &mut out.blocks[section.block];
    let rows = section.rows(block);
    let range = block.nbr_offsets[rows.start] as usize..block.nbr_offsets[rows.end] as usize;
    let nbrs = &mut block.nbrs[range];
    let (mut flags, entries) = (reader.clone(), nbrs.len() as u64);
    let new = if section.new > 0 { reader.take_ones(entries) } else { 0 };
    if new != section.new as u64 {
        return Err("neighbours that discover another number of nodes than their hop has");
    }
    let (width, others, mut largest) = (section.index_width(nodes), entries - new, 0);
    if reader.is_over_after(others * width as u64) {
        return Err(SHORT);
    }
    // One more, which the last neighbours read if they are new.
    resize(indices, others as usize + 1);
    reader.take_each(width, &mut indices[..others as usize], |index| {
        largest = index.max(largest);
        index as u32
    });
    if others > 0 && largest >= (nodes - low) as u64 {
        return Err(FOREIGN_NEIGHBOUR);
    }
    if section.new == 0 {
        nbrs.iter_mut().zip(&*indices).for_each(|(to, index)| *to = LocalIndex(low + index));
        return Ok(());
    }
    // The next new one, others so far. An index of a node that is not found yet is wrong.
    let (mut found, mut taken, mut wrong) = (section.first_new - low, 0usize, 0u32);
    let end = found + section.new;
    for some in nbrs.chunks_mut(FLAGS) {
        let mut bits = flags.take(some.len() as u32) as u32;
        for to in some {
            let is_new = bits & 1;
            bits >>= 1;
            let index = indices[taken];
            // By masks: what is new is random, and a branch would often be predicted wrong.
            let mask = is_new.wrapping_neg();
            *to = LocalIndex(low + (found & mask | index & !mask));
            wrong |= (index.wrapping_sub(found) < end - found) as u32 & !mask;
            taken += (is_new ^ 1) as usize;
            found += is_new;
        }
    }
    if wrong == 0 { Ok(()) } else { Err(FOREIGN_NEIGHBOUR) }
}

const FOREIGN_NEIGHBOUR: Flaw = "a neighbour that is not in the batch";

/// Edge ids and relations of a block, if they are carried.
fn decode_edges(
    reader: &mut BitReader,
    header: &TraceHeader,
    widths: &Widths,
    block: &mut Block,
) -> Result<(), Flaw> {
    let (carry, entries, mut largest) = (header.settings.carry, block.nbrs.len(), 0);
    resize(&mut block.edges, if carry.edges { entries } else { 0 });
    reader.take_each(widths.edge, &mut block.edges, |edge| {
        largest = edge.max(largest);
        EdgeId(edge)
    });
    if !block.edges.is_empty() && largest >= header.edges {
        return Err("an edge that the graph does not have");
    }
    largest = 0;
    resize(&mut block.relations, if carry.relations { entries } else { 0 });
    reader.take_each(widths.relation, &mut block.relations, |relation| {
        largest = relation.max(largest);
        relation as u32
    });
    if !block.relations.is_empty() && largest >= header.relations {
        return Err("a relation that the graph does not have");
    }
    Ok(())
}

/// Sets the length of a buffer. What it had stays, since all of it is written next: a batch of about the last one's
/// size costs nothing.
fn resize<T: Clone + Default>(elements: &mut Vec<T>, count: usize) {
    // Exactly, because memory of samples is counted.
    elements.reserve_exact(count.saturating_sub(elements.len()));
    elements.resize(count, T::default());
}
