//! When the row of each slot was pushed, and what follows from that for the next batch.

use super::{BatchWork, History};
use esker_sample::{Position, Sample, SampleError, Sampler, Topology};
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
pub(crate) struct SharedStamps {
    stamps: Arc<Mutex<Stamps>>,
    /// What batches would be without pulls.
    pub work: BatchWork,
}

impl SharedStamps {
    pub fn new(stamps: Stamps) -> SharedStamps {
        SharedStamps { stamps: Arc::new(Mutex::new(stamps)), work: BatchWork::default() }
    }

    pub fn lock(&self) -> MutexGuard<'_, Stamps> {
        // Every change leaves them consistent.
        self.stamps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which nodes of the first hops of a batch are pulled, by hop, in order of first appearance.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct PulledMarks(Vec<Vec<u64>>);

impl PulledMarks {
    /// Whether the node of this hop with this index is pulled. None is at a hop that is not decided.
    #[inline(always)]
    pub fn is_pulled(&self, hop: usize, index: usize) -> bool {
        self.0.get(hop - 1).is_some_and(|marks| marks[index / 64] >> (index % 64) & 1 == 1)
    }

    /// Samples a batch with what is decided.
    pub fn sample<T: Topology>(
        &self,
        sampler: &mut Sampler<T>,
        at: Position,
        seeds: &[NodeId],
        out: &mut Sample,
    ) -> Result<(), SampleError> {
        match sampler.settings().fanouts.len() {
            0..=1 => sampler.sample(at, seeds, out),
            _ => sampler.sample_with_pulls(at, seeds, &mut |hop, index, _| self.is_pulled(hop, index), out),
        }
    }

    /// Adds the next hop.
    fn add_hop(&mut self, marks: Vec<u64>) {
        self.0.push(marks);
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

    /// Rows of these slots are pushed by the batch.
    pub fn push(&mut self, slots: impl Iterator<Item = u32>) {
        for slot in slots {
            self.of_slot[slot as usize] = self.batch;
        }
    }

    /// The next batch follows.
    pub fn end_batch(&mut self) {
        // 2^32 batches are more than any run has.
        self.batch += 1;
    }
}

impl History {
    /// Decides which nodes a batch pulls at a hop: those that are met there and whose row is fresh. It pushes all other
    /// rows of this hop and those before it that have a slot, those of targets included. `first_hops` has the hops of the
    /// batch up to this one and no other, with what is pulled before.
    pub fn decide(&self, stamps: &mut Stamps, first_hops: &Sample, marks: &mut PulledMarks) {
        let hop = first_hops.layers();
        // What is pulled at the hop before is listed with this one, after the nodes that are met here.
        let met = (first_hops.node_id_offsets[1] - first_hops.pulled_at(hop - 1)) as usize;
        let mut of_hop = vec![0; met.div_ceil(64)];
        let slots = first_hops.node_ids.iter().enumerate().filter_map(|(index, node)| {
            let slot = self.slot(*node, hop)?;
            let is_fresh = stamps.age(slot).is_some_and(|age| age < self.outline.staleness);
            match index < met && is_fresh {
                true => {
                    of_hop[index / 64] |= 1 << (index % 64);
                    None
                }
                false => Some(slot),
            }
        });
        let pushed: Vec<u32> = slots.collect();
        stamps.push(pushed.into_iter());
        marks.add_hop(of_hop);
    }

    /// Advances stamps by a batch that was sampled.
    pub fn advance(&self, stamps: &mut Stamps, sample: &Sample) {
        (1..=self.outline.hops).for_each(|hop| stamps.push(self.pushed(sample, hop).map(|(_, slot)| slot)));
        stamps.end_batch();
    }

    /// What a batch pushes for a hop: local index and slot of each row.
    pub fn pushed<'a>(&'a self, sample: &'a Sample, hop: usize) -> impl Iterator<Item = (u32, u32)> + 'a {
        self.slots(sample, hop, sample.pulled_nodes(hop).end..sample.node_ids.len() as u32)
    }

    /// Local index and slot of nodes that have one.
    pub fn slots<'a>(
        &'a self,
        sample: &'a Sample,
        hop: usize,
        nodes: std::ops::Range<u32>,
    ) -> impl Iterator<Item = (u32, u32)> + 'a {
        nodes.filter_map(move |local| Some((local, self.slot(sample.node_ids[local as usize], hop)?)))
    }

    /// The slot of a node's row for a hop: those of a hop follow each other.
    fn slot(&self, node: NodeId, hop: usize) -> Option<u32> {
        Some(self.nodes.slot(node)? + (hop as u64 - 1) as u32 * self.nodes.count() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HistoryOutline;
    use esker_sample::{Carry, Fanout, Form, InMemory, NodeSet, Settings};
    use esker_types::Dtype;
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};

    proptest! {
        /// The naive twin: when each node was pushed, in a map.
        #[test]
        fn a_row_is_pulled_if_it_was_pushed_less_than_so_many_batches_ago(
            lists in prop::collection::vec(prop::collection::vec(0u64..40, 0..6), 40),
            batches in prop::collection::vec(prop::collection::vec(0u64..40, 1..5), 1..30),
            staleness in 1u32..12, chosen in 0u64..6, layers in 2usize..5, hops in 1usize..4,
        ) {
            let graph = InMemory::<u32>::from_adjacency(&lists, None);
            let nodes = NodeSet::choose(40, |node| node.0 % 5 < chosen);
            let (hops, dtype) = (hops.min(layers - 1), Dtype::F32);
            let outline = HistoryOutline { rows: nodes.count(), staleness, layer: layers - 1, hops, columns: 4, dtype, device_bytes: 0 };
            let history = History { outline, nodes: Arc::new(nodes) };
            let settings = |layers: usize| Settings {
                seed: 3, fanouts: vec![Fanout::AtMost(3); layers], form: Form::Dense, carry: Carry::default(),
            };
            let mut first_hops: Vec<_> =
                (1..=hops).map(|hops| Sampler::new(&graph, settings(hops), 1 << 30).unwrap()).collect();
            let mut whole = Sampler::new(&graph, settings(layers), 1 << 30).unwrap();
            let (mut decided, mut advanced) = (Stamps::new(outline.slots()), Stamps::new(outline.slots()));
            let mut pushed: HashMap<(usize, u64), usize> = HashMap::new();
            let (mut some, mut sample) = (Sample::default(), Sample::default());
            for (number, seeds) in batches.iter().enumerate() {
                let at = Position { epoch: 0, batch: number as u64 };
                let seeds: Vec<NodeId> = seeds.iter().map(|seed| NodeId(*seed)).collect();
                let mut marks = PulledMarks::default();
                for sampler in &mut first_hops {
                    marks.sample(sampler, at, &seeds, &mut some).unwrap();
                    history.decide(&mut decided, &some, &mut marks);
                }
                decided.end_batch();
                marks.sample(&mut whole, at, &seeds, &mut sample).unwrap();
                history.advance(&mut advanced, &sample);
                prop_assert_eq!(&decided, &advanced);
                let targets: HashSet<u64> = seeds.iter().map(|seed| seed.0).collect();
                let of = |range: std::ops::Range<u32>| -> HashSet<u64> {
                    range.map(|local| sample.node_ids[local as usize].0).collect()
                };
                let mut above = targets.clone();
                for hop in 1..=hops {
                    let read = of(sample.layer(layers - hop).inputs);
                    let fresh = |node: &u64| {
                        pushed.get(&(hop, *node)).is_some_and(|then| number - then < staleness as usize)
                    };
                    // Those that are met at this hop and no earlier one.
                    let expected: HashSet<u64> = read.difference(&above).copied().filter(fresh).collect();
                    prop_assert_eq!(of(sample.pulled_nodes(hop)), expected.clone());
                    for node in read.difference(&expected).filter(|node| *node % 5 < chosen) {
                        pushed.insert((hop, *node), number);
                    }
                    above.extend(read);
                }
            }
        }
    }
}
