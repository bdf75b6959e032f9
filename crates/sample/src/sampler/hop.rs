//! One hop: samples neighbours in waves of nodes and relabels them in order.

use super::dropped::{DroppedEntries, restore};
use super::{Carry, Fanout, MOST_NODES};
use crate::draw::Drawer;
use crate::found::Section;
use crate::memory::{Ledger, held};
use crate::relabel::{NewNodes, Relabel};
use crate::topology::{
    Fetched, HopNeighbours, Neighbours, RequestedEntries, StoredId, Topology, TopologyWorkspace,
};
use crate::{Result, SampleError};
use esker_io::prefetch;
use esker_types::random::Key;
use esker_types::{EdgeId, NodeId};
use rayon::prelude::*;
use std::ops::Range;

/// Nodes per wave. Their samples fit the L2 cache.
pub(crate) const WAVE_NODES: usize = 512;
/// Nodes per wave with several threads. It is larger, so that handing a wave over costs little in comparison.
pub(crate) const SHARED_WAVE_NODES: usize = 2048;
/// Nodes between prefetching a cache line and reading it.
pub(crate) const LAG: usize = 8;
/// Words between prefetching a table line and reading it, if nothing else is done in between.
pub(crate) const PREFETCH_RELABEL: usize = 16;
/// Nodes whose offsets, and then whose first neighbours, are prefetched together.
pub(crate) const CLUSTER: usize = 16;
/// Fan-outs up to this are assumed to be smaller than degrees when room is made.
pub(crate) const FEW: u32 = 64;
/// Fetched entries relabelled at a time.
const FETCHED_WAVE: usize = 1 << 14;
/// How far ahead offsets are prefetched if they are read one after the other.
pub(crate) const PREFETCH_BOUNDS: usize = 16;
const LINE_BYTES: usize = 64;

/// Nodes of the largest wave.
pub(crate) fn wave_nodes(threads: usize) -> u64 {
    (if threads == 1 { WAVE_NODES } else { SHARED_WAVE_NODES }) as u64
}

/// Waves in memory at a time.
pub(crate) fn waves_at_once(threads: usize) -> usize {
    if threads == 1 { 1 } else { 2 * threads }
}

/// The largest number of entries in a wave of `nodes` nodes.
pub(crate) fn wave_entries_at_most(fanout: Fanout, nodes: u64, entries: u64) -> u64 {
    match fanout {
        Fanout::AtMost(most) => nodes.saturating_mul(most as u64).min(entries),
        Fanout::All => entries,
    }
}

/// The largest number of neighbours of a node for which a draw needs a bitmap.
pub(crate) fn longest_drawn(fanout: Fanout, entries: u64) -> u64 {
    match fanout {
        Fanout::AtMost(most) if most <= FEW => (2 * most as u64).min(entries),
        Fanout::AtMost(_) | Fanout::All => entries,
    }
}

impl Section {
    /// Appends a wave. The caller has made room.
    fn append<W>(&mut self, wave: &Wave<W>, carry: Carry) {
        self.lengths.extend_from_slice(&wave.lengths);
        self.degrees.extend_from_slice(&wave.degrees);
        self.local_indices.extend_from_slice(&wave.local_indices[..wave.count]);
        if carry.positions {
            self.positions.extend_from_slice(&wave.positions[..wave.count]);
        }
        self.edges.extend_from_slice(&wave.edges);
        self.relations.extend_from_slice(&wave.relations);
    }
}

/// The sampled neighbours of some nodes.
#[derive(Debug, Default)]
pub(super) struct Wave<W> {
    lengths: Vec<u32>,
    degrees: Vec<u32>,
    /// The first `count` of each are in use. The rest is room from earlier waves.
    words: Vec<W>,
    positions: Vec<u32>,
    local_indices: Vec<u32>,
    count: usize,
    edges: Vec<EdgeId>,
    relations: Vec<u32>,
    drawer: Drawer,
    /// Positions that a node leaves out.
    dropped: Vec<u32>,
}

/// Waves being sampled (`ahead`) and waves being relabelled (`behind`).
#[derive(Debug, Default)]
pub(super) struct Waves<W> {
    pub ahead: Vec<Wave<W>>,
    pub behind: Vec<Wave<W>>,
}

impl<W> Waves<W> {
    pub fn bytes(&self) -> u64 {
        let all = self.ahead.iter().chain(&self.behind);
        all.map(|wave| {
            let words = held(&wave.lengths) + held(&wave.degrees) + held(&wave.positions) + held(&wave.words);
            words
                + held(&wave.local_indices)
                + held(&wave.relations)
                + held(&wave.edges)
                + held(&wave.dropped)
                + wave.drawer.bytes()
        })
        .sum()
    }
}

/// What to sample.
pub(super) struct HopJob<'a> {
    /// The nodes of the hop.
    pub nodes: &'a [NodeId],
    pub fanout: Fanout,
    pub key: Key,
    pub carry: Carry,
    /// Local index of the first new node.
    pub first_local_index: u32,
    /// Nodes of the graph: the limit of local indices.
    pub most_local_indices: u64,
    pub threads: usize,
    /// Entries that the hop leaves out.
    pub dropped: DroppedEntries<'a>,
}

/// Where samples go.
pub(super) struct Into<'a, R> {
    pub table: &'a mut R,
    pub new_nodes: &'a mut NewNodes,
    pub section: &'a mut Section,
    pub ledger: &'a mut Ledger,
}

impl<R: Relabel> Into<'_, R> {
    fn clear(&mut self) {
        self.section.clear();
        self.new_nodes.clear();
    }

    /// Makes room for a wave with this many nodes and entries.
    fn reserve(&mut self, job: &HopJob, lists: usize, entries: usize) -> Result<()> {
        let local_indices = job.first_local_index as u64 + self.new_nodes.nodes().len() as u64;
        let new = (entries as u64).min(job.most_local_indices - local_indices) as usize;
        if local_indices + new as u64 > MOST_NODES {
            return Err(SampleError::TooManyNodes { nodes: local_indices });
        }
        // The table first: it is the most likely one not to fit.
        self.table.reserve(local_indices as usize + new, self.ledger)?;
        self.new_nodes.reserve(new, self.ledger)?;
        self.section.reserve(lists, entries, job.carry, self.ledger)
    }
}

/// Samples the neighbours of a hop whose adjacency is in memory. Nodes found for the first time go to `into.new_nodes`.
pub(super) fn expand<H: HopNeighbours, R: Relabel + Send>(
    job: &HopJob,
    lists: &H,
    waves: &mut Waves<H::StoredId>,
    into: &mut Into<R>,
) -> Result<()> {
    into.clear();
    if job.threads == 1 || job.nodes.len() <= SHARED_WAVE_NODES {
        waves.behind.resize_with(waves.behind.len().max(1), Wave::default);
        let wave = &mut waves.behind[0];
        for range in ranges(job.nodes.len(), WAVE_NODES) {
            let entries = wave.make_room(job, lists, range.clone(), into.ledger)?;
            into.reserve(job, range.len(), entries)?;
            wave.draw_and_relabel(job, lists, range, into.table, into.new_nodes);
            into.section.append(wave, job.carry);
        }
        return Ok(());
    }
    // Sample the next waves while the previous ones are relabelled.
    let all: Vec<Range<usize>> = ranges(job.nodes.len(), SHARED_WAVE_NODES).collect();
    let mut drawn = 0;
    for group in all.chunks(job.threads) {
        waves.ahead.resize_with(waves.ahead.len().max(group.len()), Wave::default);
        let ahead = &mut waves.ahead[..group.len()];
        for (wave, range) in ahead.iter_mut().zip(group) {
            wave.make_room(job, lists, range.clone(), into.ledger)?;
        }
        let behind = &mut waves.behind[..drawn];
        let (result, ()) = rayon::join(
            || relabel_all(job, behind, into),
            || ahead.par_iter_mut().zip(group).for_each(|(wave, range)| wave.draw(job, lists, range.clone())),
        );
        result?;
        std::mem::swap(&mut waves.ahead, &mut waves.behind);
        drawn = group.len();
    }
    relabel_all(job, &mut waves.behind[..drawn], into)
}

fn relabel_all<W: StoredId, R: Relabel>(
    job: &HopJob,
    waves: &mut [Wave<W>],
    into: &mut Into<R>,
) -> Result<()> {
    for wave in waves {
        into.reserve(job, wave.lengths.len(), wave.count)?;
        let (words, local_indices) = (&wave.words[..wave.count], &mut wave.local_indices[..wave.count]);
        relabel(words, job.first_local_index, into.table, into.new_nodes, local_indices);
        into.section.append(wave, job.carry);
    }
    Ok(())
}

/// Relabels sampled words.
pub(crate) fn relabel<W: StoredId, R: Relabel>(
    words: &[W],
    first_local_index: u32,
    table: &mut R,
    new_nodes: &mut NewNodes,
    local_indices: &mut [u32],
) {
    words.iter().take(PREFETCH_RELABEL).for_each(|word| table.prefetch(word.node()));
    for (at, local_indices) in local_indices.chunks_mut(PREFETCH_RELABEL).enumerate() {
        let start = at * PREFETCH_RELABEL;
        let ahead = words.iter().skip(start + PREFETCH_RELABEL).take(PREFETCH_RELABEL);
        ahead.for_each(|word| table.prefetch(word.node()));
        table.assign(&words[start..start + local_indices.len()], first_local_index, new_nodes, local_indices);
    }
}

/// Samples the neighbours of a hop whose adjacency must be fetched: reads degrees, draws positions, and then fetches
/// all neighbours at once.
pub(super) fn expand_fetched<T: Topology, R: Relabel>(
    job: &HopJob,
    topology: &T,
    workspace: &mut T::Workspace,
    fetched: &mut Fetched<T::StoredId>,
    into: &mut Into<R>,
) -> Result<()> {
    into.clear();
    let section = &mut *into.section;
    section.reserve(job.nodes.len(), 0, job.carry, into.ledger)?;
    topology.degrees(job.nodes, workspace, &mut section.degrees)?;
    let dropped =
        DroppedPositions::find(job, topology, &mut section.degrees, workspace, fetched, into.ledger)?;
    section.lengths.extend(section.degrees.iter().map(|degree| job.fanout.of(*degree)));
    let entries: usize = section.lengths.iter().map(|length| *length as usize).sum();
    section.reserve(0, entries, job.carry, into.ledger)?;
    // Even if positions are not carried, they are needed until the entries are fetched.
    into.ledger.extend_to(&mut section.positions, entries, 0)?;
    draw_positions(job, section);
    dropped.restore(section);
    let requested = RequestedEntries {
        nodes: job.nodes,
        lengths: &section.lengths,
        positions: &section.positions,
        edges: job.carry.edges,
        relations: job.carry.relations,
    };
    let word_bytes =
        size_of::<T::StoredId>() + if job.carry.edges { 8 } else { 0 } + 4 * job.carry.relations as usize;
    into.ledger.charge(entries.saturating_sub(fetched.words.capacity()) as u64 * word_bytes as u64)?;
    let before = workspace.bytes();
    topology.fetch(requested, workspace, fetched)?;
    assert_eq!(fetched.words.len(), entries, "a topology fetches what was wanted");
    into.ledger.charge(workspace.bytes().saturating_sub(before))?;
    for (words, at) in fetched.words.chunks(FETCHED_WAVE).zip((0..).step_by(FETCHED_WAVE)) {
        into.reserve(job, 0, words.len())?;
        into.section.local_indices.resize(at + words.len(), 0);
        relabel(
            words,
            job.first_local_index,
            into.table,
            into.new_nodes,
            &mut into.section.local_indices[at..],
        );
    }
    if !job.carry.positions {
        into.section.positions.clear();
    }
    into.section.edges.extend_from_slice(&fetched.edges);
    into.section.relations.extend_from_slice(&fetched.relations);
    Ok(())
}

/// The positions that nodes of a hop leave out, if adjacency must be fetched.
#[derive(Default)]
struct DroppedPositions {
    /// Index of the node in the hop, and the end of its positions.
    nodes: Vec<(usize, usize)>,
    positions: Vec<u32>,
}

impl DroppedPositions {
    /// Fetches the adjacency of the affected nodes, some at a time, and takes what they leave out off their degrees.
    fn find<T: Topology>(
        job: &HopJob,
        topology: &T,
        degrees: &mut [u32],
        workspace: &mut T::Workspace,
        fetched: &mut Fetched<T::StoredId>,
        ledger: &mut Ledger,
    ) -> Result<DroppedPositions> {
        let mut found = DroppedPositions::default();
        if job.dropped.is_empty() {
            return Ok(found);
        }
        let affected = |at: &usize| !job.dropped.of(job.nodes[*at]).is_empty();
        let affected: Vec<usize> = (0..job.nodes.len()).filter(affected).collect();
        let (mut nodes, mut lengths, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        for some in affected.chunks(WAVE_NODES) {
            nodes.clear();
            lengths.clear();
            positions.clear();
            nodes.extend(some.iter().map(|at| job.nodes[*at]));
            lengths.extend(some.iter().map(|at| degrees[*at]));
            let entries: usize = lengths.iter().map(|length| *length as usize).sum();
            ledger.reserve(&mut positions, entries)?;
            lengths.iter().for_each(|length| positions.extend(0..*length));
            ledger.charge(entries.saturating_sub(fetched.words.capacity()) as u64 * 8)?;
            let (edges, relations) = (false, topology.has_relations());
            let requested = RequestedEntries {
                nodes: &nodes,
                lengths: &lengths,
                positions: &positions,
                edges,
                relations,
            };
            topology.fetch(requested, workspace, fetched)?;
            let mut start = 0;
            for at in some {
                let (own, degree) = (job.dropped.of(job.nodes[*at]), degrees[*at]);
                for position in 0..degree {
                    let entry = start + position as usize;
                    let relation = fetched.relations.get(entry).copied().unwrap_or(0);
                    if own.contains(fetched.words[entry].node(), relation) {
                        found.positions.push(position);
                        degrees[*at] -= 1;
                    }
                }
                start += degree as usize;
                found.nodes.push((*at, found.positions.len()));
            }
        }
        ledger.release(held(&positions));
        Ok(found)
    }

    /// Turns drawn positions into those of the whole adjacency.
    fn restore(&self, section: &mut Section) {
        let (mut node, mut slot, mut start) = (0, 0, 0);
        for (at, end) in &self.nodes {
            slot += section.lengths[node..*at].iter().map(|length| *length as usize).sum::<usize>();
            let slots = &mut section.positions[slot..slot + section.lengths[*at] as usize];
            restore(slots, &self.positions[start..*end]);
            (node, start) = (*at, *end);
        }
    }
}

/// Draws all positions of a hop, in pieces on different threads.
fn draw_positions(job: &HopJob, section: &mut Section) {
    let (mut pieces, mut rest) = (Vec::new(), &mut section.positions[..]);
    for range in ranges(job.nodes.len(), SHARED_WAVE_NODES) {
        let count = section.lengths[range.clone()].iter().map(|length| *length as usize).sum();
        let (piece, behind) = rest.split_at_mut(count);
        rest = behind;
        pieces.push((range, piece));
    }
    let (lengths, degrees) = (&section.lengths, &section.degrees);
    let draw = |(range, piece): (Range<usize>, &mut [u32])| {
        let (mut drawer, mut rest) = (Drawer::default(), piece);
        for at in range {
            let (slots, behind) = rest.split_at_mut(lengths[at] as usize);
            rest = behind;
            if slots.len() == degrees[at] as usize || slots.is_empty() {
                slots.iter_mut().zip(0..).for_each(|(slot, position)| *slot = position);
            } else {
                drawer.draw(job.key.with(job.nodes[at].0), degrees[at], slots);
            }
        }
    };
    match job.threads {
        1 => pieces.into_iter().for_each(draw),
        _ => pieces.into_par_iter().for_each(draw),
    }
}

/// Finds all edges between the nodes of the batch. `section` gets the neighbours of every node.
pub(super) fn induce<H: HopNeighbours, R: Relabel + Sync>(
    job: &HopJob,
    lists: &H,
    waves: &mut Waves<H::StoredId>,
    into: &mut Into<R>,
) -> Result<()> {
    into.section.clear();
    let all: Vec<Range<usize>> = ranges(job.nodes.len(), WAVE_NODES).collect();
    waves.ahead.resize_with(waves.ahead.len().max(job.threads), Wave::default);
    for group in all.chunks(job.threads) {
        let bank = &mut waves.ahead[..group.len()];
        for (wave, range) in bank.iter_mut().zip(group) {
            wave.make_room(job, lists, range.clone(), into.ledger)?;
        }
        let table = &*into.table;
        if let ([wave], [range]) = (&mut *bank, group) {
            wave.induce(job, lists, range.clone(), table);
        } else {
            let each = bank.par_iter_mut().zip(group);
            each.for_each(|(wave, range)| wave.induce(job, lists, range.clone(), table));
        }
        for wave in bank {
            into.section.reserve(wave.lengths.len(), wave.count, job.carry, into.ledger)?;
            into.section.append(wave, job.carry);
        }
    }
    Ok(())
}

/// The same for adjacency that must be fetched, some nodes at a time.
pub(super) fn induce_fetched<T: Topology, R: Relabel>(
    job: &HopJob,
    topology: &T,
    workspace: &mut T::Workspace,
    fetched: &mut Fetched<T::StoredId>,
    into: &mut Into<R>,
) -> Result<()> {
    into.section.clear();
    let (mut degrees, mut positions) = (Vec::new(), Vec::new());
    for nodes in job.nodes.chunks(WAVE_NODES) {
        degrees.clear();
        positions.clear();
        topology.degrees(nodes, workspace, &mut degrees)?;
        let entries: usize = degrees.iter().map(|degree| *degree as usize).sum();
        into.section.reserve(nodes.len(), entries, job.carry, into.ledger)?;
        into.ledger.reserve(&mut positions, entries)?;
        degrees.iter().for_each(|degree| positions.extend(0..*degree));
        let (edges, carried) = (job.carry.edges, job.carry.relations);
        let relations = carried || (!job.dropped.is_empty() && topology.has_relations());
        let requested =
            RequestedEntries { nodes, lengths: &degrees, positions: &positions, edges, relations };
        topology.fetch(requested, workspace, fetched)?;
        let mut start = 0;
        for (node, degree) in nodes.iter().zip(&degrees) {
            let (before, own, mut left_out) = (into.section.local_indices.len(), job.dropped.of(*node), 0);
            for (entry, word) in fetched.words.iter().enumerate().skip(start).take(*degree as usize) {
                if own.contains(word.node(), fetched.relations.get(entry).copied().unwrap_or(0)) {
                    left_out += 1;
                    continue;
                }
                let Some(local_index) = into.table.find(word.node()) else { continue };
                into.section.local_indices.push(local_index);
                if job.carry.positions {
                    into.section.positions.push(positions[entry]);
                }
                into.section.edges.extend(fetched.edges.get(entry));
                into.section.relations.extend(fetched.relations.get(entry).filter(|_| carried));
            }
            start += *degree as usize;
            into.section.lengths.push((into.section.local_indices.len() - before) as u32);
            into.section.degrees.push(*degree - left_out);
        }
    }
    Ok(())
}

pub(crate) fn ranges(count: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(step).map(move |start| start..(start + step).min(count))
}

impl<W: StoredId> Wave<W> {
    fn clear(&mut self) {
        self.lengths.clear();
        self.degrees.clear();
        self.edges.clear();
        self.relations.clear();
        self.count = 0;
    }

    /// Makes room for what the nodes of `range` can sample. Returns that number of entries.
    fn make_room<H>(
        &mut self,
        job: &HopJob,
        lists: &H,
        range: Range<usize>,
        ledger: &mut Ledger,
    ) -> Result<usize>
    where
        H: HopNeighbours<StoredId = W>,
    {
        let (nodes, mut longest) = (range.len(), 0);
        let entries = match job.fanout {
            Fanout::AtMost(most) if most <= FEW => {
                longest = longest_drawn(job.fanout, u64::MAX) as u32;
                nodes * most as usize
            }
            fanout => {
                range.clone().take(PREFETCH_BOUNDS).for_each(|at| lists.prefetch(at));
                let degrees = range.map(|at| {
                    lists.prefetch(at + PREFETCH_BOUNDS);
                    lists.list(at).len() as u32
                });
                degrees.map(|degree| (longest = degree.max(longest), fanout.of(degree) as usize).1).sum()
            }
        };
        ledger.charge(self.drawer.more_bytes(longest))?;
        self.drawer.reserve(longest);
        ledger.extend_to(&mut self.positions, entries, 0)?;
        ledger.extend_to(&mut self.words, entries, W::zeroed())?;
        ledger.extend_to(&mut self.local_indices, entries, 0)?;
        self.clear();
        ledger.reserve(&mut self.lengths, nodes)?;
        ledger.reserve(&mut self.degrees, nodes)?;
        if job.carry.edges {
            ledger.reserve(&mut self.edges, entries)?;
        }
        if job.carry.relations {
            ledger.reserve(&mut self.relations, entries)?;
        }
        Ok(entries)
    }

    /// Samples and relabels node by node, each step some nodes after the previous one. The CPU computes draws while the
    /// cache lines that other nodes need, of adjacency and table, are loaded.
    fn draw_and_relabel<H, R>(
        &mut self,
        job: &HopJob,
        lists: &H,
        range: Range<usize>,
        table: &mut R,
        new_nodes: &mut NewNodes,
    ) where
        H: HopNeighbours<StoredId = W>,
        R: Relabel,
    {
        let count = range.len();
        let (mut gathered, mut relabelled) = (0, 0);
        for step in 0..count + 2 * LAG {
            ask_for_next(lists, &range, step);
            if step < count {
                self.draw_node(job, lists, range.start + step);
            }
            if let Some(index) = step.checked_sub(LAG).filter(|index| *index < count) {
                let words = self.gather_node(lists, range.start + index, index, &mut gathered);
                words.iter().for_each(|word| table.prefetch(word.node()));
            }
            if let Some(index) = step.checked_sub(2 * LAG) {
                let end = relabelled + self.lengths[index] as usize;
                let (words, local_indices) =
                    (&self.words[relabelled..end], &mut self.local_indices[relabelled..end]);
                table.assign(words, job.first_local_index, new_nodes, local_indices);
                relabelled = end;
            }
        }
        self.carry(lists, job.carry, range);
    }

    /// Samples and gathers. Another thread relabels.
    fn draw<H: HopNeighbours<StoredId = W>>(&mut self, job: &HopJob, lists: &H, range: Range<usize>) {
        self.clear();
        let (count, mut gathered) = (range.len(), 0);
        for step in 0..count + LAG {
            ask_for_next(lists, &range, step);
            if step < count {
                self.draw_node(job, lists, range.start + step);
            }
            if let Some(index) = step.checked_sub(LAG) {
                self.gather_node(lists, range.start + index, index, &mut gathered);
            }
        }
        self.carry(lists, job.carry, range);
    }

    /// Draws the positions of one node and prefetches their cache lines.
    #[inline(always)]
    fn draw_node<H: HopNeighbours<StoredId = W>>(&mut self, job: &HopJob, lists: &H, at: usize) {
        let list = lists.list(at);
        if !job.dropped.is_empty() {
            let own = job.dropped.of(job.nodes[at]);
            if !own.is_empty() {
                return self.draw_remaining(job, lists, at, own);
            }
        }
        let degree = list.len();
        let take = job.fanout.of(degree as u32) as usize;
        let slots = &mut self.positions[self.count..self.count + take];
        if take == degree {
            slots.iter_mut().zip(0..).for_each(|(slot, position)| *slot = position);
        } else {
            self.drawer.draw(job.key.with(job.nodes[at].0), degree as u32, slots);
        }
        ask_for(&list, slots);
        self.lengths.push(take as u32);
        self.degrees.push(degree as u32);
        self.count += take;
    }

    /// The same for a node that leaves some entries out: draws among those that remain.
    #[cold]
    fn draw_remaining<H: HopNeighbours<StoredId = W>>(
        &mut self,
        job: &HopJob,
        lists: &H,
        at: usize,
        own: DroppedEntries,
    ) {
        let list = lists.list(at);
        own.positions(&list, |position| lists.relation(at, position), &mut self.dropped);
        let degree = list.len() - self.dropped.len();
        let take = job.fanout.of(degree as u32) as usize;
        let slots = &mut self.positions[self.count..self.count + take];
        if take == degree {
            slots.iter_mut().zip(0..).for_each(|(slot, position)| *slot = position);
        } else {
            self.drawer.draw(job.key.with(job.nodes[at].0), degree as u32, slots);
        }
        restore(slots, &self.dropped);
        ask_for(&list, slots);
        self.lengths.push(take as u32);
        self.degrees.push(degree as u32);
        self.count += take;
    }

    /// Reads the neighbours of node `index` of the wave. Its entries start at `start`.
    #[inline(always)]
    fn gather_node<H>(&mut self, lists: &H, at: usize, index: usize, start: &mut usize) -> &[W]
    where
        H: HopNeighbours<StoredId = W>,
    {
        let end = *start + self.lengths[index] as usize;
        let (words, positions) = (&mut self.words[*start..end], &self.positions[*start..end]);
        *start = end;
        if !words.is_empty() {
            let list = lists.list(at);
            if list.second.is_empty() {
                let first = list.first;
                words.iter_mut().zip(positions).for_each(|(word, at)| *word = first[*at as usize]);
            } else {
                words.iter_mut().zip(positions).for_each(|(word, at)| *word = list.at(*at as usize));
            }
        }
        words
    }

    fn carry<H: HopNeighbours<StoredId = W>>(&mut self, lists: &H, carry: Carry, range: Range<usize>) {
        if !carry.edges && !carry.relations {
            return;
        }
        let mut start = 0;
        for (at, length) in range.zip(&self.lengths) {
            let positions = &self.positions[start..start + *length as usize];
            if carry.edges {
                self.edges.extend(positions.iter().map(|position| lists.edge(at, *position)));
            }
            if carry.relations {
                self.relations.extend(positions.iter().map(|position| lists.relation(at, *position)));
            }
            start += *length as usize;
        }
    }

    /// Finds the neighbours of the nodes of `range` that are in the batch.
    fn induce<H, R>(&mut self, job: &HopJob, lists: &H, range: Range<usize>, table: &R)
    where
        H: HopNeighbours<StoredId = W>,
        R: Relabel,
    {
        self.clear();
        range.clone().take(PREFETCH_BOUNDS).for_each(|at| lists.prefetch(at));
        for at in range.clone() {
            lists.prefetch(at + PREFETCH_BOUNDS);
            // Prefetches adjacency two steps ahead and the table one step ahead.
            if at + 8 < range.end {
                ask_for(&lists.list(at + 8), &[]);
            }
            if at + 3 < range.end {
                let soon = lists.list(at + 3);
                soon.first.iter().chain(soon.second).for_each(|word| table.prefetch(word.node()));
            }
            let list = lists.list(at);
            let own = job.dropped.of(job.nodes[at]);
            own.positions(&list, |position| lists.relation(at, position), &mut self.dropped);
            let mut left_out = self.dropped.iter().peekable();
            let before = self.count;
            for (position, word) in list.first.iter().chain(list.second).enumerate() {
                if left_out.next_if_eq(&&(position as u32)).is_some() {
                    continue;
                }
                if let Some(local_index) = table.find(word.node()) {
                    self.positions[self.count] = position as u32;
                    self.local_indices[self.count] = local_index;
                    self.count += 1;
                }
            }
            self.lengths.push((self.count - before) as u32);
            self.degrees.push((list.len() - self.dropped.len()) as u32);
        }
        self.carry(lists, job.carry, range);
    }
}

/// Every few steps, prefetches the offsets of nodes to come, and the first neighbours of the nodes before those. They
/// are prefetched together, because the first access to a node's adjacency usually misses the TLB too, and consecutive
/// misses are resolved in parallel.
#[inline(always)]
fn ask_for_next<H: HopNeighbours>(lists: &H, range: &Range<usize>, step: usize) {
    if step == 0 {
        (range.start..range.end.min(range.start + 2 * CLUSTER)).for_each(|at| lists.prefetch(at));
        (range.start..range.end.min(range.start + CLUSTER)).for_each(|at| ask_for_head(&lists.list(at)));
    }
    if step.is_multiple_of(CLUSTER) {
        let next = range.start + step + CLUSTER;
        (next + CLUSTER..next + 2 * CLUSTER).for_each(|at| lists.prefetch(at));
        (next..range.end.min(next + CLUSTER)).for_each(|at| ask_for_head(&lists.list(at)));
    }
}

#[inline(always)]
pub(crate) fn ask_for_head<W: StoredId>(list: &Neighbours<W>) {
    prefetch(list.first, 0);
    if !list.second.is_empty() {
        prefetch(list.second, 0);
    }
}

/// Prefetches the cache lines that will be read: all of them if the adjacency is short, else those of the positions.
#[inline(always)]
pub(crate) fn ask_for<W: StoredId>(list: &Neighbours<W>, positions: &[u32]) {
    ask_for_run(list.first, positions);
    if !list.second.is_empty() {
        ask_for_run(list.second, &[]);
    }
}

#[inline(always)]
fn ask_for_run<W: StoredId>(run: &[W], positions: &[u32]) {
    let per_line = LINE_BYTES / size_of::<W>();
    prefetch(run, 0);
    prefetch(run, run.len().wrapping_sub(1));
    if run.len() > 3 * per_line {
        positions.iter().for_each(|position| prefetch(run, *position as usize));
    } else if run.len() > per_line {
        prefetch(run, per_line);
        prefetch(run, 2 * per_line);
    }
}
