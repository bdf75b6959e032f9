//! One hop: draws in waves, relabelled in order.

use super::{Carry, Fanout};
use crate::draw::Drawer;
use crate::found::Section;
use crate::relabel::{Fresh, Relabel};
use crate::topology::{HopLists, List, Word};
use crate::{Result, SampleError};
use esker_io::prefetch;
use esker_types::random::Key;
use esker_types::{EdgeId, NodeId};
use rayon::prelude::*;
use std::ops::Range;

/// Nodes of a wave: what is drawn for them fits the second-level cache.
const WAVE_NODES: usize = 512;
/// With threads, larger: a wave must outlast the handing over.
const SHARED_WAVE_NODES: usize = 2048;
/// Nodes between asking for a line and reading it.
const LAG: usize = 8;
/// Words between asking for a table line and reading it, where nothing else is done in between.
const RELABEL_AHEAD: usize = 16;
/// Nodes whose bounds, and then whose list heads, are asked for together.
const CLUSTER: usize = 16;
/// How far ahead bounds of induced lists are asked for.
const BOUNDS_AHEAD: usize = 16;
const LINE_BYTES: usize = 64;

impl Section {
    /// Appends a wave but for its places.
    fn append<W>(&mut self, wave: &Wave<W>, carry: Carry) -> Result<()> {
        self.lengths.extend_from_slice(&wave.lengths);
        self.degrees.extend_from_slice(&wave.degrees);
        if carry.positions {
            self.positions.extend_from_slice(&wave.positions[..wave.count]);
        }
        self.edges.extend_from_slice(&wave.edges);
        self.relations.extend_from_slice(&wave.relations);
        if self.places.len() > u32::MAX as usize {
            let problem = format!("one hop drew {} neighbours, more than 2^32", self.places.len());
            return Err(SampleError::request(problem, "take smaller batches or fan-outs"));
        }
        Ok(())
    }
}

/// Draws of some nodes.
#[derive(Debug, Default)]
pub(super) struct Wave<W> {
    lengths: Vec<u32>,
    degrees: Vec<u32>,
    /// The first `count` of each are in use; the rest is room from earlier waves.
    words: Vec<W>,
    positions: Vec<u32>,
    places: Vec<u32>,
    count: usize,
    edges: Vec<EdgeId>,
    relations: Vec<u32>,
    drawer: Drawer,
}

/// Waves being drawn and waves being relabelled.
#[derive(Debug, Default)]
pub(super) struct Waves<W> {
    ahead: Vec<Wave<W>>,
    behind: Vec<Wave<W>>,
}

impl<W> Waves<W> {
    pub fn bytes(&self) -> u64 {
        let all = self.ahead.iter().chain(&self.behind);
        all.map(|wave| {
            let words = wave.lengths.capacity() + wave.degrees.capacity() + wave.positions.capacity();
            let words = words + wave.places.capacity() + wave.relations.capacity();
            (words * 4 + wave.edges.capacity() * 8 + wave.words.capacity() * size_of::<W>()) as u64
        })
        .sum()
    }
}

/// What to draw.
pub(super) struct Job<'a, H> {
    pub lists: &'a H,
    /// The nodes of the hop.
    pub nodes: &'a [NodeId],
    /// Which of them have no list in this sample; empty for none.
    pub skipped: &'a [bool],
    pub fanout: Fanout,
    pub key: Key,
    pub carry: Carry,
    /// Place of the first node that is new.
    pub first_place: u32,
    pub threads: usize,
}

/// Draws the lists of a hop into `section`; nodes met for the first time go to `fresh`.
pub(super) fn expand<H: HopLists, R: Relabel + Send>(
    job: &Job<H>,
    table: &mut R,
    waves: &mut Waves<H::Word>,
    fresh: &mut Fresh,
    section: &mut Section,
) -> Result<()> {
    section.clear();
    fresh.clear();
    if job.threads == 1 || job.nodes.len() <= SHARED_WAVE_NODES {
        waves.behind.resize_with(waves.behind.len().max(1), Wave::default);
        let wave = &mut waves.behind[0];
        for range in ranges(job.nodes.len(), WAVE_NODES) {
            wave.draw_and_relabel(job, range, table, fresh);
            section.places.extend_from_slice(&wave.places[..wave.count]);
            section.append(wave, job.carry)?;
        }
        return Ok(());
    }
    let mut relabel = |bank: &mut [Wave<H::Word>]| -> Result<()> {
        for wave in bank {
            wave.relabel(job.first_place, table, fresh);
            section.places.extend_from_slice(&wave.places[..wave.count]);
            section.append(wave, job.carry)?;
        }
        Ok(())
    };
    // Draw the next waves while the last are relabelled.
    let all: Vec<Range<usize>> = ranges(job.nodes.len(), SHARED_WAVE_NODES).collect();
    let mut drawn = 0;
    for group in all.chunks(job.threads) {
        waves.ahead.resize_with(waves.ahead.len().max(group.len()), Wave::default);
        let ahead = &mut waves.ahead[..group.len()];
        let behind = &mut waves.behind[..drawn];
        let (result, ()) = rayon::join(
            || relabel(behind),
            || {
                ahead.par_iter_mut().zip(group).for_each(|(wave, range)| wave.draw(job, range.clone()));
            },
        );
        result?;
        std::mem::swap(&mut waves.ahead, &mut waves.behind);
        drawn = group.len();
    }
    relabel(&mut waves.behind[..drawn])
}

/// All edges between the nodes of the batch: `section` gets a list for every node.
pub(super) fn induce<H: HopLists, R: Relabel + Sync>(
    lists: &H,
    nodes: &[NodeId],
    carry: Carry,
    threads: usize,
    table: &R,
    waves: &mut Waves<H::Word>,
    section: &mut Section,
) -> Result<()> {
    section.clear();
    let all: Vec<Range<usize>> = ranges(nodes.len(), WAVE_NODES).collect();
    waves.ahead.resize_with(waves.ahead.len().max(threads), Wave::default);
    for group in all.chunks(threads) {
        let bank = &mut waves.ahead[..group.len()];
        if let ([wave], [range]) = (&mut *bank, group) {
            wave.induce(lists, range.clone(), carry, table);
        } else {
            let each = bank.par_iter_mut().zip(group);
            each.for_each(|(wave, range)| wave.induce(lists, range.clone(), carry, table));
        }
        for wave in bank {
            section.places.extend_from_slice(&wave.places[..wave.count]);
            section.append(wave, carry)?;
        }
    }
    Ok(())
}

fn ranges(count: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(step).map(move |start| start..(start + step).min(count))
}

impl<W: Word> Wave<W> {
    fn clear(&mut self) {
        self.lengths.clear();
        self.degrees.clear();
        self.edges.clear();
        self.relations.clear();
        self.count = 0;
    }

    /// Room for `more` entries behind those in use.
    #[inline(always)]
    fn make_room(&mut self, more: usize) {
        let needed = self.count + more;
        if needed > self.positions.len() {
            self.positions.resize(needed.next_power_of_two(), 0);
            self.words.resize(needed.next_power_of_two(), W::zeroed());
            self.places.resize(needed.next_power_of_two(), 0);
        }
    }

    /// Draws and relabels node by node, each step some nodes behind the one before: the processor computes draws while
    /// the lines of lists and table that other nodes need are on their way.
    fn draw_and_relabel<H, R>(&mut self, job: &Job<H>, range: Range<usize>, table: &mut R, fresh: &mut Fresh)
    where
        H: HopLists<Word = W>,
        R: Relabel,
    {
        self.clear();
        let count = range.len();
        let (mut gathered, mut relabelled) = (0, 0);
        for step in 0..count + 2 * LAG {
            ask_for_next(job, &range, step);
            if step < count {
                self.draw_node(job, range.start + step);
            }
            if let Some(index) = step.checked_sub(LAG).filter(|index| *index < count) {
                let words = self.gather_node(job.lists, range.start + index, index, &mut gathered);
                words.iter().for_each(|word| table.prefetch(word.node()));
            }
            if let Some(index) = step.checked_sub(2 * LAG) {
                let end = relabelled + self.lengths[index] as usize;
                let (words, places) = (&self.words[relabelled..end], &mut self.places[relabelled..end]);
                table.assign(words, job.first_place, fresh, places);
                relabelled = end;
            }
        }
        self.carry(job.lists, job.carry, range);
    }

    /// Draws and gathers, for another thread to relabel.
    fn draw<H: HopLists<Word = W>>(&mut self, job: &Job<H>, range: Range<usize>) {
        self.clear();
        let (count, mut gathered) = (range.len(), 0);
        for step in 0..count + LAG {
            ask_for_next(job, &range, step);
            if step < count {
                self.draw_node(job, range.start + step);
            }
            if let Some(index) = step.checked_sub(LAG) {
                self.gather_node(job.lists, range.start + index, index, &mut gathered);
            }
        }
        self.carry(job.lists, job.carry, range);
    }

    /// Relabels what was drawn.
    fn relabel<R: Relabel>(&mut self, first_place: u32, table: &mut R, fresh: &mut Fresh) {
        let words = &self.words[..self.count];
        words.iter().take(RELABEL_AHEAD).for_each(|word| table.prefetch(word.node()));
        for (at, places) in self.places[..self.count].chunks_mut(RELABEL_AHEAD).enumerate() {
            let start = at * RELABEL_AHEAD;
            let ahead = words.iter().skip(start + RELABEL_AHEAD).take(RELABEL_AHEAD);
            ahead.for_each(|word| table.prefetch(word.node()));
            table.assign(&words[start..start + places.len()], first_place, fresh, places);
        }
    }

    /// Draws the positions of one node and asks for the lines they lie in.
    #[inline(always)]
    fn draw_node<H: HopLists<Word = W>>(&mut self, job: &Job<H>, at: usize) {
        if job.skipped.get(at).is_some_and(|skipped| *skipped) {
            self.lengths.push(0);
            self.degrees.push(0);
            return;
        }
        let list = job.lists.list(at);
        let degree = list.len();
        let take = match job.fanout {
            Fanout::AtMost(most) => degree.min(most as usize),
            Fanout::All => degree,
        };
        self.make_room(take);
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

    /// Reads the neighbours of the node at place `index` of the wave, whose entries start at `start`.
    #[inline(always)]
    fn gather_node<H>(&mut self, lists: &H, at: usize, index: usize, start: &mut usize) -> &[W]
    where
        H: HopLists<Word = W>,
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

    fn carry<H: HopLists<Word = W>>(&mut self, lists: &H, carry: Carry, range: Range<usize>) {
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

    /// The neighbours of the nodes of `range` that are in the batch.
    fn induce<H, R>(&mut self, lists: &H, range: Range<usize>, carry: Carry, table: &R)
    where
        H: HopLists<Word = W>,
        R: Relabel,
    {
        self.clear();
        range.clone().take(BOUNDS_AHEAD).for_each(|at| lists.prefetch(at));
        for at in range.clone() {
            lists.prefetch(at + BOUNDS_AHEAD);
            // Two steps ahead the list's lines, one step ahead the table's.
            if at + 8 < range.end {
                ask_for(&lists.list(at + 8), &[]);
            }
            if at + 3 < range.end {
                let soon = lists.list(at + 3);
                soon.first.iter().chain(soon.second).for_each(|word| table.prefetch(word.node()));
            }
            let list = lists.list(at);
            self.make_room(list.len());
            let before = self.count;
            for (position, word) in list.first.iter().chain(list.second).enumerate() {
                if let Some(place) = table.find(word.node()) {
                    self.positions[self.count] = position as u32;
                    self.places[self.count] = place;
                    self.count += 1;
                }
            }
            self.lengths.push((self.count - before) as u32);
            self.degrees.push(list.len() as u32);
        }
        self.carry(lists, carry, range);
    }
}

/// Every some steps, asks for the bounds of nodes to come and the heads of lists before them. Together, because the first
/// touch of a list mostly misses the address cache too, and misses in a row are resolved side by side.
#[inline(always)]
fn ask_for_next<H: HopLists>(job: &Job<H>, range: &Range<usize>, step: usize) {
    if step == 0 {
        (range.start..range.end.min(range.start + 2 * CLUSTER)).for_each(|at| job.lists.prefetch(at));
        (range.start..range.end.min(range.start + CLUSTER)).for_each(|at| ask_for_head(&job.lists.list(at)));
    }
    if step.is_multiple_of(CLUSTER) {
        let next = range.start + step + CLUSTER;
        (next + CLUSTER..next + 2 * CLUSTER).for_each(|at| job.lists.prefetch(at));
        (next..range.end.min(next + CLUSTER)).for_each(|at| ask_for_head(&job.lists.list(at)));
    }
}

#[inline(always)]
fn ask_for_head<W: Word>(list: &List<W>) {
    prefetch(list.first, 0);
    if !list.second.is_empty() {
        prefetch(list.second, 0);
    }
}

/// Asks for the lines of a list that will be read: all of a short one, else those of the positions.
#[inline(always)]
fn ask_for<W: Word>(list: &List<W>, positions: &[u32]) {
    ask_for_run(list.first, positions);
    if !list.second.is_empty() {
        ask_for_run(list.second, &[]);
    }
}

#[inline(always)]
fn ask_for_run<W: Word>(run: &[W], positions: &[u32]) {
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
