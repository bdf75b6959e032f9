//! Which positions of its adjacency a node of a hop sample takes. docs/sample.md defines it.

use super::times::NeighbourTimes;
use super::weights::{EdgeWeights, WeightedDrawer};
use super::{HopGraph, NeighbourChoice, TemporalStrategy};
use crate::Result;
use crate::draw::{Drawer, below};
use crate::memory::Ledger;
use crate::sampler::{FEW, Fanout, PREFETCH_BOUNDS, longest_drawn};
use esker_types::NodeId;
use esker_types::random::Key;

/// How the nodes of a hop draw.
#[derive(Clone, Copy)]
pub(super) struct HopDraw<'a> {
    pub fanout: Fanout,
    pub replace: bool,
    pub is_disjoint: bool,
    pub key: Key,
    pub choice: &'a NeighbourChoice,
    pub seed_times: &'a [i64],
}

/// A node that is expanded. `start` says how many entries of the graph come before its own.
pub(super) struct Expanded<F> {
    pub node: NodeId,
    pub tree: u32,
    pub degree: u32,
    pub start: F,
}

impl HopDraw<'_> {
    /// The random key of a node.
    #[inline(always)]
    fn key_of<F>(&self, of: &Expanded<F>) -> Key {
        let key = self.key.with(of.node.0);
        if self.is_disjoint { key.with(of.tree as u64) } else { key }
    }

    /// The most entries that some nodes draw, and the largest degree to prepare for.
    pub fn room<G: HopGraph>(&self, graph: &G, nodes: &[NodeId]) -> (usize, u32) {
        if let Fanout::AtMost(most) = self.fanout
            && (most <= FEW || self.replace)
        {
            let longest = if self.replace { 0 } else { longest_drawn(self.fanout, u64::MAX) as u32 };
            return (nodes.len() * most as usize, longest);
        }
        let (mut entries, mut longest) = (0, 0);
        nodes.iter().take(PREFETCH_BOUNDS).for_each(|node| graph.prefetch(*node));
        for (index, node) in nodes.iter().enumerate() {
            if let Some(ahead) = nodes.get(index + PREFETCH_BOUNDS) {
                graph.prefetch(*ahead);
            }
            let degree = graph.list(*node).len() as u32;
            entries += self.fanout.of(degree) as usize;
            longest = longest.max(degree);
        }
        (entries, longest)
    }
}

/// Draws positions. Owns what draws need beside them.
#[derive(Debug, Default)]
pub(super) struct HopDrawer {
    without_repeats: Drawer,
    weighted: WeightedDrawer,
}

impl HopDrawer {
    pub fn bytes(&self) -> u64 {
        self.without_repeats.bytes() + self.weighted.bytes()
    }

    /// Makes room for draws from this many neighbours.
    pub fn reserve(&mut self, how: &HopDraw, longest: u32, ledger: &mut Ledger) -> Result<()> {
        match (how.choice, how.fanout) {
            (_, Fanout::All) => Ok(()),
            (NeighbourChoice::Weighted(_), Fanout::AtMost(take)) if !how.replace => {
                self.weighted.reserve(take as usize, longest, ledger)
            }
            _ => {
                ledger.charge(self.without_repeats.more_bytes(longest))?;
                self.without_repeats.reserve(longest);
                Ok(())
            }
        }
    }

    /// Writes the positions that a node takes to the first slots, ascending. Returns their number.
    #[inline(always)]
    pub fn draw<F: Fn() -> u64>(&mut self, how: &HopDraw, of: Expanded<F>, slots: &mut [u32]) -> usize {
        match how.choice {
            NeighbourChoice::Uniform => self.uniform(how, &of, of.degree, slots),
            NeighbourChoice::Weighted(weights) => self.by_weight(how, &of, weights, slots),
            NeighbourChoice::Temporal(times, strategy) => self.by_time(how, &of, times, *strategy, slots),
        }
    }

    fn by_weight<F: Fn() -> u64>(
        &mut self,
        how: &HopDraw,
        of: &Expanded<F>,
        weights: &EdgeWeights,
        slots: &mut [u32],
    ) -> usize {
        let Fanout::AtMost(take) = how.fanout else { return self.uniform(how, of, of.degree, slots) };
        let sums = weights.of((of.start)(), of.degree);
        match how.replace {
            true => WeightedDrawer::with_replacement(how.key_of(of), sums, &mut slots[..take as usize]),
            false => {
                let take = (take as usize).min(sums.len());
                self.weighted.without_replacement(how.key_of(of), sums, &mut slots[..take])
            }
        }
    }

    fn by_time<F: Fn() -> u64>(
        &mut self,
        how: &HopDraw,
        of: &Expanded<F>,
        times: &NeighbourTimes,
        strategy: TemporalStrategy,
        slots: &mut [u32],
    ) -> usize {
        let start = (of.start)();
        let early = times.early(start, of.degree, how.seed_times[of.tree as usize]);
        let first = match strategy {
            TemporalStrategy::Uniform => 0,
            TemporalStrategy::Last => early - how.fanout.of(early),
        };
        let taken = self.uniform(how, of, early - first, slots);
        let slots = &mut slots[..taken];
        slots.iter_mut().for_each(|slot| *slot += first);
        times.positions(start, slots);
        taken
    }

    /// Takes numbers below `count`.
    #[inline(always)]
    fn uniform<F>(&mut self, how: &HopDraw, of: &Expanded<F>, count: u32, slots: &mut [u32]) -> usize {
        match how.fanout {
            Fanout::AtMost(take) if how.replace => {
                if count == 0 {
                    return 0;
                }
                let (key, slots) = (how.key_of(of), &mut slots[..take as usize]);
                let draws = (0..take as u64).map(|index| below(key, index, count as u64) as u32);
                slots.iter_mut().zip(draws).for_each(|(slot, position)| *slot = position);
                slots.sort_unstable();
                slots.len()
            }
            fanout => {
                let slots = &mut slots[..fanout.of(count) as usize];
                if slots.len() == count as usize {
                    slots.iter_mut().zip(0..).for_each(|(slot, position)| *slot = position);
                } else if !slots.is_empty() {
                    self.without_repeats.draw(how.key_of(of), count, slots);
                }
                slots.len()
            }
        }
    }
}
