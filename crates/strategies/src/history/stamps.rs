//! When the row of each slot was pushed, and what follows from that for the next batch.

use super::History;
use esker_sample::Sample;
use esker_types::NodeId;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The batch that pushed each row last, as of some batch. Batches count from 1; 0 is never.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stamps {
    pub of_slot: Vec<u32>,
    /// The number of the next batch.
    pub batch: u32,
}

/// Stamps as of the last step, which the source of batches shares with what decides ahead of it.
#[derive(Clone)]
pub(crate) struct SharedStamps(Arc<Mutex<Stamps>>);

impl SharedStamps {
    pub fn new(stamps: Stamps) -> SharedStamps {
        SharedStamps(Arc::new(Mutex::new(stamps)))
    }

    pub fn lock(&self) -> MutexGuard<'_, Stamps> {
        // Every change leaves them consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which nodes of hop 1 of a batch are pulled, in order of first appearance.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct PulledMarks(Vec<u64>);

impl PulledMarks {
    /// Whether the node with this index is pulled.
    #[inline(always)]
    pub fn is_pulled(&self, index: usize) -> bool {
        self.0[index / 64] >> (index % 64) & 1 == 1
    }
}

impl Stamps {
    /// No row was pushed yet.
    pub fn new(slots: u64) -> Stamps {
        Stamps { of_slot: vec![0; slots as usize], batch: 1 }
    }

    /// Batches since a row was pushed; `None` if it never was.
    pub fn age(&self, slot: u32) -> Option<u32> {
        match self.of_slot[slot as usize] {
            0 => None,
            stamp => Some(self.batch - stamp),
        }
    }

    /// Rows of these slots are pushed by the batch, and the next one follows.
    pub fn push(&mut self, slots: impl Iterator<Item = u32>) {
        for slot in slots {
            self.of_slot[slot as usize] = self.batch;
        }
        // 2^32 batches are more than any run has.
        self.batch += 1;
    }
}

impl History {
    /// Decides which neighbours of targets a batch pulls: those whose row is fresh. It pushes all other rows of its
    /// first hop that have a slot, those of targets included. `first_hop` has the first hop of the batch and no other.
    pub fn decide(&self, stamps: &mut Stamps, first_hop: &Sample) -> PulledMarks {
        let neighbours = first_hop.node_id_offsets[1] as usize;
        let mut marks = PulledMarks(vec![0; neighbours.div_ceil(64)]);
        let slots = first_hop.node_ids.iter().enumerate().filter_map(|(index, node)| {
            let slot = self.nodes.slot(*node)?;
            let is_fresh = stamps.age(slot).is_some_and(|age| age < self.outline.staleness);
            match index < neighbours && is_fresh {
                true => {
                    marks.0[index / 64] |= 1 << (index % 64);
                    None
                }
                false => Some(slot),
            }
        });
        let pushed: Vec<u32> = slots.collect();
        stamps.push(pushed.into_iter());
        marks
    }

    /// Advances stamps by a batch that was sampled.
    pub fn advance(&self, stamps: &mut Stamps, sample: &Sample) {
        stamps.push(self.pushed(sample).map(|(_, slot)| slot));
    }

    /// What a batch pushes: local index and slot of each row.
    pub fn pushed<'a>(&'a self, sample: &'a Sample) -> impl Iterator<Item = (u32, u32)> + 'a {
        self.slots(sample, sample.pulled_nodes().end..sample.node_ids.len() as u32)
    }

    /// Local index and slot of nodes that have one.
    pub fn slots<'a>(
        &'a self,
        sample: &'a Sample,
        nodes: std::ops::Range<u32>,
    ) -> impl Iterator<Item = (u32, u32)> + 'a {
        nodes.filter_map(|local| {
            let node: NodeId = sample.node_ids[local as usize];
            Some((local, self.nodes.slot(node)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HistoryOutline;
    use esker_sample::{Carry, Fanout, Form, InMemory, NodeSet, Position, Sampler, Settings};
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};

    proptest! {
        /// The naive twin: when each node was pushed, in a map.
        #[test]
        fn a_row_is_pulled_if_it_was_pushed_less_than_so_many_batches_ago(
            lists in prop::collection::vec(prop::collection::vec(0u64..40, 0..6), 40),
            batches in prop::collection::vec(prop::collection::vec(0u64..40, 1..5), 1..30),
            staleness in 1u32..12, chosen in 0u64..6, layers in 2usize..4,
        ) {
            let graph = InMemory::<u32>::from_adjacency(&lists, None);
            let nodes = NodeSet::choose(40, |node| node.0 % 5 < chosen);
            let outline = HistoryOutline { rows: nodes.count(), staleness, layer: layers - 1, columns: 4 };
            let history = History { outline, nodes: Arc::new(nodes) };
            let settings = |layers: usize| Settings {
                seed: 3, fanouts: vec![Fanout::AtMost(3); layers], form: Form::Dense, carry: Carry::default(),
            };
            let mut first_hop = Sampler::new(&graph, settings(1), 1 << 30).unwrap();
            let mut whole = Sampler::new(&graph, settings(layers), 1 << 30).unwrap();
            let (mut decided, mut advanced) = (Stamps::new(outline.rows), Stamps::new(outline.rows));
            let mut pushed: HashMap<u64, usize> = HashMap::new();
            let (mut one, mut sample) = (Sample::default(), Sample::default());
            for (number, seeds) in batches.iter().enumerate() {
                let at = Position { epoch: 0, batch: number as u64 };
                let seeds: Vec<NodeId> = seeds.iter().map(|seed| NodeId(*seed)).collect();
                first_hop.sample(at, &seeds, &mut one).unwrap();
                let marks = history.decide(&mut decided, &one);
                whole.sample_with_pulls(at, &seeds, &mut |index, _| marks.is_pulled(index), &mut sample).unwrap();
                history.advance(&mut advanced, &sample);
                prop_assert_eq!(&decided, &advanced);
                let targets: HashSet<u64> = seeds.iter().map(|seed| seed.0).collect();
                let of = |range: std::ops::Range<u32>| -> HashSet<u64> {
                    range.map(|local| sample.node_ids[local as usize].0).collect()
                };
                let read = of(sample.layer(layers - 1).inputs);
                let fresh = |node: &u64| pushed.get(node).is_some_and(|then| number - then < staleness as usize);
                let expected: HashSet<u64> =
                    read.iter().copied().filter(|node| !targets.contains(node) && fresh(node)).collect();
                prop_assert_eq!(of(sample.pulled_nodes()), expected.clone());
                for node in read.difference(&expected).filter(|node| *node % 5 < chosen) {
                    pushed.insert(*node, number);
                }
            }
        }
    }
}
