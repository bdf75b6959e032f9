//! Parts that records have: hop sizes, seeds, pulled nodes, positions; and checks.

use super::TraceHeader;
use super::bits::{BitReader, BitWriter, width_below};
use crate::{Fanout, Form, Sample};
use std::ops::Range;

/// Positions of nodes with degrees up to this are bitmaps.
const BITMAP_DEGREE: u64 = 64;

/// What is wrong with a record.
pub(super) type Flaw = &'static str;

pub(super) const SHORT: Flaw = "a record that ends too early";
pub(super) const FOREIGN_NODE: Flaw = "a node that the graph does not have";
pub(super) const REPEATED: Flaw = "a node that is in the batch twice";
pub(super) const TOO_LONG: Flaw = "lists too long for one block";

/// Bit widths that follow from the graph.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    pub node: u32,
    pub edge: u32,
    pub relation: u32,
}

impl Widths {
    pub fn of(header: &TraceHeader) -> Widths {
        let width = width_below;
        Widths { node: width(header.nodes), edge: width(header.edges), relation: width(header.relations) }
    }
}

/// The local indices of a hop: hop h is chunk L - h of the node ids.
pub(super) fn hop_nodes(node_id_offsets: &[u32], hop: usize) -> Range<usize> {
    let chunk = node_id_offsets.len() - 2 - hop;
    node_id_offsets[chunk] as usize..node_id_offsets[chunk + 1] as usize
}

/// How many neighbours a node has if nothing is induced.
#[inline(always)]
pub(super) fn regular_count(fanout: Option<Fanout>, degree: u64) -> u64 {
    match fanout {
        Some(Fanout::AtMost(most)) => degree.min(most as u64),
        Some(Fanout::All) => degree,
        None => 0,
    }
}

/// Encodes the size of each hop, targets first.
pub(super) fn put_hops(writer: &mut BitWriter, sample: &Sample) {
    for hop in 0..=sample.layers() {
        writer.put_gamma(hop_nodes(&sample.node_id_offsets, hop).len() as u64);
    }
}

/// Decodes the size of each hop, targets first. Their sum is at most the number of nodes in the graph.
pub(super) fn take_hops(reader: &mut BitReader, header: &TraceHeader) -> Result<Vec<u64>, Flaw> {
    let layers = header.settings.fanouts.len();
    let (mut hops, mut total) = (Vec::with_capacity(layers + 1), 0u64);
    for _ in 0..=layers {
        let size = reader.take_gamma().ok_or(SHORT)?;
        total = total
            .checked_add(size)
            .filter(|total| *total <= header.nodes.min(1 << 31))
            .ok_or("hops with more nodes than the graph")?;
        hops.push(size);
    }
    // Every node takes at least one bit. So a record too short for its hops is refused here, before memory is
    // allocated.
    if reader.is_over_after(total.saturating_sub(1)) { Err(SHORT) } else { Ok(hops) }
}

/// A seed takes a bit even if there is only one target, so a record cannot have more seeds than bits.
fn seed_width(targets: u64) -> u32 {
    width_below(targets).max(1)
}

/// Encodes the seeds by their index among the targets.
pub(super) fn put_seeds(writer: &mut BitWriter, sample: &Sample) {
    let targets = hop_nodes(&sample.node_id_offsets, 0);
    let plain = sample.seeds.iter().map(|seed| seed.index()).eq(targets.clone());
    writer.put(plain as u64, 1);
    if !plain {
        writer.put_gamma(sample.seeds.len() as u64);
        let width = seed_width(targets.len() as u64);
        sample.seeds.iter().for_each(|seed| writer.put((seed.index() - targets.start) as u64, width));
    }
}

/// Decodes the index of each seed among the targets.
pub(super) fn take_seeds(reader: &mut BitReader, targets: u64, seeds: &mut Vec<u32>) -> Result<(), Flaw> {
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

/// Encodes how many nodes are pulled at each hop. If that is hop 1 alone, its number; otherwise one more than it can be,
/// and then the number of every hop.
pub(super) fn put_pulled(writer: &mut BitWriter, sample: &Sample) {
    writer.put(sample.has_pulled() as u64, 1);
    match &sample.pulled[..] {
        [] => {}
        [only] => writer.put_gamma(*only as u64),
        _ => {
            writer.put_gamma(hop_nodes(&sample.node_id_offsets, 2).len() as u64 + 1);
            (1..sample.layers()).for_each(|hop| writer.put_gamma(sample.pulled_at(hop) as u64));
        }
    }
}

/// Decodes how many nodes are pulled at each hop. They are nodes of the hop after.
pub(super) fn take_pulled(
    reader: &mut BitReader,
    header: &TraceHeader,
    hops: &[u64],
    pulled: &mut Vec<u32>,
) -> Result<(), Flaw> {
    pulled.clear();
    if reader.take(1) == 0 {
        return Ok(());
    }
    let (first, most) = (reader.take_gamma().ok_or(SHORT)?, hops.get(2).copied().unwrap_or(0));
    let wrong = "pulled nodes that are not nodes of the next hop";
    if header.settings.form != Form::Dense || first > most + 1 {
        return Err(wrong);
    }
    if first <= most {
        pulled.push(first as u32);
    } else {
        for most in hops.iter().skip(2) {
            let count = reader.take_gamma().ok_or(SHORT)?;
            if count > *most {
                return Err(wrong);
            }
            pulled.push(count as u32);
        }
    }
    match pulled.last() {
        // One way to write a sample.
        None | Some(0) if pulled.iter().all(|count| *count == 0) => Err(wrong),
        _ => {
            pulled.truncate(pulled.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1));
            Ok(())
        }
    }
}

/// Number of lower bits of the gaps between `count` ascending numbers below `bound`.
#[inline(always)]
pub(super) fn rice_width(bound: u64, count: u64) -> u32 {
    63 - (bound / (count + 1)).max(1).leading_zeros()
}

/// Encodes a set of ascending positions. Writes nothing if it is all of them.
pub(super) fn put_positions(writer: &mut BitWriter, degree: u64, positions: &[u32]) {
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

/// Decodes a set of ascending positions after those of other nodes.
pub(super) fn take_positions(
    reader: &mut BitReader,
    degree: u64,
    count: u64,
    out: &mut Vec<u32>,
) -> Result<(), Flaw> {
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
