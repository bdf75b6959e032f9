//! A DENSE sample as PyTorch Geometric orders one: seeds first, then nodes in order of discovery; edges by hop, and in a
//! hop by target. DENSE has the deepest hop first, because layers then read suffixes. Both have the same nodes and edges,
//! and within a hop in the same order, so one becomes the other by moving few long runs.

use crate::{Form, Sample};
use esker_types::LocalIndex;
use std::ops::Range;

/// Nodes and edges of a batch, hop after hop.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HopOrdered {
    /// Node ids: the seeds as given, repeated ones repeated, then every other node once, in order of discovery.
    pub nodes: Vec<i64>,
    /// The neighbour of each edge, as an index of `nodes`. A node that is a repeated seed is named by its first place.
    pub sources: Vec<i64>,
    /// The node whose neighbour it is, as an index of `nodes`. A repeated seed has the edges of its first place again.
    pub targets: Vec<i64>,
    /// Edge ids. Empty unless the sample carries them.
    pub edges: Vec<i64>,
    /// Nodes by the hop in which they were found. The first are the seeds.
    pub nodes_by_hop: Vec<usize>,
    /// Edges by hop.
    pub edges_by_hop: Vec<usize>,
    /// Where `nodes` are in the sample, run after run: rows of nodes are moved alike.
    pub node_runs: Vec<Range<usize>>,
    /// The same for edges, in the arrays of the sample's block.
    pub edge_runs: Vec<Range<usize>>,
}

impl HopOrdered {
    /// The most bytes that a batch of so many nodes and edges takes.
    pub fn bytes_for(nodes: u64, edges: u64) -> u64 {
        nodes.saturating_mul(8).saturating_add(edges.saturating_mul(3 * 8))
    }

    /// Orders a DENSE sample without pulled nodes. Panics if it is of another form.
    pub fn of(sample: &Sample) -> HopOrdered {
        assert!(
            sample.form == Form::Dense && !sample.has_pulled(),
            "only plain DENSE samples have one order by hop"
        );
        let (hops, places) = (sample.layers(), Places::new(sample));
        let mut ordered = HopOrdered::default();
        ordered.add_nodes(sample, places.seed_runs());
        (1..=hops).for_each(|hop| ordered.add_nodes(sample, vec![places.of_hop(hop)]));
        let edges = sample.edge_count() as usize;
        ordered.sources.reserve(edges);
        ordered.targets.reserve(edges);
        for hop in 0..hops {
            let (runs, before) =
                (if hop == 0 { places.seed_runs() } else { vec![places.of_hop(hop)] }, ordered.sources.len());
            // The nodes that are expanded are those that the hop before found.
            let mut target = ordered.nodes_by_hop[..hop].iter().sum::<usize>() as i64;
            for run in runs {
                ordered.add_edges(sample, &places, run.clone(), target);
                target += run.len() as i64;
            }
            ordered.edges_by_hop.push(ordered.sources.len() - before);
        }
        ordered
    }

    /// Appends the nodes of a hop.
    fn add_nodes(&mut self, sample: &Sample, runs: Vec<Range<usize>>) {
        self.nodes_by_hop.push(runs.iter().map(|run| run.len()).sum());
        for run in &runs {
            self.nodes.extend(sample.node_ids[run.clone()].iter().map(|node| node.0 as i64));
        }
        self.node_runs.extend(runs);
    }

    /// Appends the edges of a run of nodes, the first of which is `target`.
    fn add_edges(&mut self, sample: &Sample, places: &Places, run: Range<usize>, target: i64) {
        let block = &sample.blocks[0];
        let first = block.first as usize;
        let offsets = &block.nbr_offsets[run.start - first..=run.end - first];
        let entries = offsets[0] as usize..offsets[run.len()] as usize;
        places.convert(&block.nbrs[entries.clone()], &mut self.sources);
        for (ends, target) in offsets.windows(2).zip(target..) {
            self.targets.resize(self.targets.len() + (ends[1] - ends[0]) as usize, target);
        }
        if let Some(edges) = block.edges.get(entries.clone()) {
            self.edges.extend(edges.iter().map(|edge| edge.0 as i64));
        }
        self.edge_runs.push(entries);
    }
}

/// Where the nodes of a sample are in the order by hop.
struct Places<'a> {
    sample: &'a Sample,
    hops: usize,
    /// What to add to an index of the sample, by level: that of the deepest hop is the first.
    shifts: Vec<i64>,
    /// The first place of each target, if seeds repeat.
    repeated: Option<Vec<i64>>,
}

impl Places<'_> {
    fn new(sample: &Sample) -> Places<'_> {
        let (hops, offsets) = (sample.layers(), &sample.node_id_offsets);
        let first = offsets[hops];
        // The targets are the seeds, each at its first place.
        let repeats = sample.seeds.len() > sample.targets().len();
        let repeated = repeats.then(|| {
            let mut targets = vec![i64::MAX; sample.targets().len()];
            for (seed, place) in sample.seeds.iter().zip(0..) {
                let target = &mut targets[(seed.0 - first) as usize];
                *target = place.min(*target);
            }
            targets
        });
        let mut shifts = vec![-(first as i64); hops + 1];
        let mut before = sample.seeds.len() as i64;
        for level in (0..hops).rev() {
            shifts[level] = before - offsets[level] as i64;
            before += (offsets[level + 1] - offsets[level]) as i64;
        }
        Places { sample, hops, shifts, repeated }
    }

    /// The nodes that a hop found.
    fn of_hop(&self, hop: usize) -> Range<usize> {
        let level = self.hops - hop;
        self.sample.node_id_offsets[level] as usize..self.sample.node_id_offsets[level + 1] as usize
    }

    /// The seeds as given: one run, unless they repeat.
    fn seed_runs(&self) -> Vec<Range<usize>> {
        match self.repeated {
            None => vec![self.of_hop(0)],
            Some(_) => self.sample.seeds.iter().map(|seed| seed.index()..seed.index() + 1).collect(),
        }
    }

    /// Appends the places of some nodes. It has no branches unless seeds repeat, so that it runs in vector registers.
    fn convert(&self, indices: &[LocalIndex], out: &mut Vec<i64>) {
        let (start, offsets) = (out.len(), &self.sample.node_id_offsets);
        out.extend(indices.iter().map(|index| index.0 as i64 + self.shifts[0]));
        let levels = offsets[1..=self.hops].iter().zip(self.shifts.windows(2));
        for (first, shifts) in levels {
            let more = shifts[1] - shifts[0];
            for (place, index) in out[start..].iter_mut().zip(indices) {
                *place += if index.0 >= *first { more } else { 0 };
            }
        }
        let Some(repeated) = &self.repeated else { return };
        for (place, index) in out[start..].iter_mut().zip(indices) {
            if let Some(target) = index.0.checked_sub(offsets[self.hops]) {
                *place = repeated[target as usize];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Carry, Fanout, InMemory, Position, Sampler, Settings};
    use esker_types::NodeId;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn sampled(lists: &[Vec<u64>], seeds: &[u64], fanouts: &[u32]) -> Sample {
        let graph = InMemory::<u32>::from_adjacency(lists, None);
        let fanouts = fanouts.iter().map(|count| Fanout::AtMost(*count)).collect();
        let carry = Carry { edges: true, ..Carry::default() };
        let settings = Settings { seed: 9, fanouts, form: Form::Dense, carry };
        let mut sampler = Sampler::new(&graph, settings, 1 << 30).unwrap();
        let (seeds, mut sample): (Vec<NodeId>, _) =
            (seeds.iter().copied().map(NodeId).collect(), Sample::default());
        sampler.sample(Position { epoch: 0, batch: 0 }, &seeds, &mut sample).unwrap();
        sample
    }

    /// The order written down from its definition, with a search for every node.
    fn naive(sample: &Sample, seeds: &[u64]) -> HopOrdered {
        let (hops, block) = (sample.layers(), &sample.blocks[0]);
        let mut ordered = HopOrdered::default();
        let mut place: HashMap<u64, i64> = HashMap::new();
        for seed in seeds {
            place.entry(*seed).or_insert(ordered.nodes.len() as i64);
            ordered.nodes.push(*seed as i64);
        }
        ordered.nodes_by_hop.push(seeds.len());
        let row = |node: i64| sample.node_ids.iter().position(|id| id.0 == node as u64).unwrap() as u32;
        let mut frontier = 0..seeds.len();
        for _ in 0..hops {
            let before = ordered.sources.len();
            for target in frontier.clone() {
                let index = (row(ordered.nodes[target]) - block.first) as usize;
                for entry in block.nbr_offsets[index]..block.nbr_offsets[index + 1] {
                    let source = sample.node_ids[block.nbrs[entry as usize].index()].0;
                    let next = ordered.nodes.len() as i64;
                    let place = *place.entry(source).or_insert(next);
                    if place == next {
                        ordered.nodes.push(source as i64);
                    }
                    ordered.sources.push(place);
                    ordered.targets.push(target as i64);
                    ordered.edges.push(block.edges[entry as usize].0 as i64);
                }
            }
            ordered.edges_by_hop.push(ordered.sources.len() - before);
            ordered.nodes_by_hop.push(ordered.nodes.len() - frontier.end);
            frontier = frontier.end..ordered.nodes.len();
        }
        ordered
    }

    proptest! {
        #[test]
        fn nodes_are_in_order_of_discovery_and_edges_by_hop_and_target(
            lists in prop::collection::vec(prop::collection::vec(0u64..30, 0..9), 30),
            seeds in prop::collection::vec(0u64..30, 1..8),
            fanouts in prop::collection::vec(1u32..6, 1..4),
        ) {
            let sample = sampled(&lists, &seeds, &fanouts);
            let ordered = HopOrdered::of(&sample);
            let (nodes, edges) = (&sample.node_ids, &sample.blocks[0].edges);
            let moved: Vec<i64> =
                ordered.node_runs.iter().flat_map(|run| &nodes[run.clone()]).map(|node| node.0 as i64).collect();
            prop_assert_eq!(&moved, &ordered.nodes);
            let moved: Vec<i64> =
                ordered.edge_runs.iter().flat_map(|run| &edges[run.clone()]).map(|edge| edge.0 as i64).collect();
            prop_assert_eq!(&moved, &ordered.edges);
            let (node_runs, edge_runs) = (ordered.node_runs.clone(), ordered.edge_runs.clone());
            prop_assert_eq!(ordered, HopOrdered { node_runs, edge_runs, ..naive(&sample, &seeds) });
        }
    }

    #[test]
    fn repeated_seeds_stay_and_have_their_edges_each() {
        let sample = sampled(&[vec![1, 2], vec![], vec![0]], &[0, 2, 0], &[5]);
        let ordered = HopOrdered::of(&sample);
        assert_eq!((ordered.nodes, ordered.nodes_by_hop), (vec![0, 2, 0, 1], vec![3, 1]));
        assert_eq!((ordered.sources, ordered.targets), (vec![3, 1, 0, 3, 1], vec![0, 0, 1, 2, 2]));
        assert_eq!((ordered.edges, ordered.edges_by_hop), (vec![0, 1, 2, 0, 1], vec![5]));
    }

    #[test]
    fn a_sample_without_hops_is_its_seeds() {
        let ordered = HopOrdered::of(&sampled(&[vec![1], vec![0]], &[1, 1], &[]));
        assert_eq!(
            (ordered.nodes, ordered.nodes_by_hop, ordered.edges_by_hop),
            (vec![1, 1], vec![2], vec![])
        );
    }
}
