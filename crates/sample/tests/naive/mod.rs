//! Samples from the definitions, as plainly as can be: maps and vectors, one node at a time.

use esker_sample::{Block, Direction, Fanout, Form, Position, Sample, Settings};
use esker_types::random::mix;
use esker_types::{EdgeId, LocalIndex, NodeId};
use std::collections::{BTreeSet, HashMap, HashSet};

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// An entry of a neighbour list: neighbour, edge, kind.
type Entry = (u64, u64, u32);

/// A graph and how it is sampled by the book.
pub struct Reference {
    lists: Vec<Vec<Entry>>,
}

/// The lists drawn for some nodes: positions taken of each.
type Drawn = Vec<(u64, Vec<usize>)>;

impl Reference {
    pub fn new(incoming: &[Vec<u64>], relations: Option<&[u32]>, direction: Direction) -> Reference {
        let mut into: Vec<Vec<Entry>> = vec![Vec::new(); incoming.len()];
        let mut out = into.clone();
        let mut edge = 0;
        for (target, list) in incoming.iter().enumerate() {
            for source in list {
                let kind = relations.map_or(0, |kinds| kinds[edge as usize]);
                into[target].push((*source, edge, kind));
                out[*source as usize].push((target as u64, edge, kind));
                edge += 1;
            }
        }
        let lists = match direction {
            Direction::Incoming => into,
            Direction::Outgoing => out,
            Direction::Both => into.into_iter().zip(out).map(|(a, b)| [a, b].concat()).collect(),
        };
        Reference { lists }
    }

    fn draw(&self, settings: &Settings, at: Position, hop: usize, node: u64) -> Vec<usize> {
        let degree = self.lists[node as usize].len();
        let Fanout::AtMost(take) = settings.fanouts[hop] else { return (0..degree).collect() };
        let take = take as usize;
        if degree <= take {
            return (0..degree).collect();
        }
        let words = [0x7361_6d70_6c65, at.epoch, at.batch, hop as u64, node];
        let key = words.into_iter().fold(mix(settings.seed), |key, word| mix(key ^ mix(word)));
        let fewer = take.min(degree - take);
        let mut set = BTreeSet::new();
        for index in 0..fewer {
            let last = degree - fewer + index;
            let word = mix(key.wrapping_add((index as u64).wrapping_mul(GOLDEN)));
            // No draw of these tests is so unlucky as to be rejected: that has odds of 2^-57.
            let drawn = ((word as u128 * (last as u128 + 1)) >> 64) as usize;
            set.insert(if set.contains(&drawn) { last } else { drawn });
        }
        (0..degree).filter(|position| set.contains(position) == (take <= degree - take)).collect()
    }

    /// Hops of nodes and the lists drawn for each depth.
    fn hops(
        &self,
        settings: &Settings,
        at: Position,
        seeds: &[NodeId],
        skip: &mut dyn FnMut(usize, u64) -> bool,
    ) -> (Vec<Vec<u64>>, Vec<Drawn>) {
        let mut seen = HashSet::new();
        let mut hops: Vec<Vec<u64>> =
            vec![seeds.iter().map(|seed| seed.0).filter(|seed| seen.insert(*seed)).collect()];
        let mut drawn = Vec::new();
        for depth in 0..settings.fanouts.len() {
            let frontier: Vec<u64> =
                if settings.form == Form::Layered { hops.concat() } else { hops[depth].clone() };
            let lists: Drawn = frontier
                .into_iter()
                .map(|node| match skip(depth, node) {
                    true => (node, Vec::new()),
                    false => (node, self.draw(settings, at, depth, node)),
                })
                .collect();
            let named = lists
                .iter()
                .flat_map(|(node, list)| list.iter().map(|position| self.lists[*node as usize][*position].0));
            hops.push(named.filter(|node| seen.insert(*node)).collect());
            drawn.push(lists);
        }
        (hops, drawn)
    }

    pub fn sample(&self, settings: &Settings, at: Position, seeds: &[NodeId]) -> Sample {
        let (hops, drawn) = self.hops(settings, at, seeds, &mut |_, _| false);
        self.assemble(settings, seeds, &hops, drawn)
    }

    pub fn sample_pruned(
        &self,
        settings: &Settings,
        at: Position,
        seeds: &[NodeId],
        expand: impl Fn(u32, NodeId) -> bool,
    ) -> Sample {
        let mut regardless: HashSet<u64> = HashSet::new();
        loop {
            let mut skip = |depth: usize, node: u64| {
                depth > 0 && !regardless.contains(&node) && !expand(depth as u32, NodeId(node))
            };
            let (hops, drawn) = self.hops(settings, at, seeds, &mut skip);
            let hop_of: HashMap<u64, usize> = hops
                .iter()
                .enumerate()
                .flat_map(|(hop, nodes)| nodes.iter().map(move |n| (*n, hop)))
                .collect();
            let mut more = HashSet::new();
            for (depth, lists) in drawn.iter().enumerate() {
                for (node, list) in lists {
                    for position in list {
                        let named = self.lists[*node as usize][*position].0;
                        let hop = hop_of[&named];
                        if hop <= depth && hop < settings.fanouts.len() && skip(hop, named) {
                            more.insert(named);
                        }
                    }
                }
            }
            if more.is_empty() {
                let mut sample = self.assemble(settings, seeds, &hops, drawn);
                let depths = (0..hops.len()).rev();
                let pruned = depths.flat_map(|hop| hops[hop].iter().map(move |node| (hop, *node)));
                sample.pruned =
                    pruned.map(|(hop, node)| hop < settings.fanouts.len() && skip(hop, node)).collect();
                let block = &mut sample.blocks[0];
                for (degree, pruned) in block.degrees.iter_mut().zip(&sample.pruned[block.first as usize..]) {
                    *degree *= !pruned as u32;
                }
                return sample;
            }
            regardless.extend(more);
        }
    }

    fn assemble(
        &self,
        settings: &Settings,
        seeds: &[NodeId],
        hops: &[Vec<u64>],
        drawn: Vec<Drawn>,
    ) -> Sample {
        let mut node_ids: Vec<NodeId> = Vec::new();
        let mut node_id_offsets = vec![0];
        for hop in hops.iter().rev() {
            node_ids.extend(hop.iter().map(|node| NodeId(*node)));
            node_id_offsets.push(node_ids.len() as u32);
        }
        let local: HashMap<u64, u32> = node_ids.iter().zip(0..).map(|(node, at)| (node.0, at)).collect();
        let lists_of = |lists: &[Drawn]| lists.concat().into_iter().collect::<HashMap<_, _>>();
        let blocks = match settings.form {
            Form::Dense => {
                let first = node_id_offsets[1];
                vec![self.block(settings, first, &node_ids, &local, &lists_of(&drawn))]
            }
            Form::Layered => (0..drawn.len())
                .map(|layer| {
                    let lists = lists_of(&drawn[drawn.len() - 1 - layer..][..1]);
                    self.block(settings, node_id_offsets[layer + 1], &node_ids, &local, &lists)
                })
                .collect(),
            Form::Shadow => {
                let induced = |node: &NodeId| {
                    let list = &self.lists[node.index()];
                    let inside = |position: &usize| local.contains_key(&list[*position].0);
                    (node.0, (0..list.len()).filter(inside).collect())
                };
                vec![self.block(settings, 0, &node_ids, &local, &node_ids.iter().map(induced).collect())]
            }
        };
        let seeds = seeds.iter().map(|seed| LocalIndex(local[&seed.0])).collect();
        Sample { form: settings.form, node_ids, node_id_offsets, blocks, seeds, pruned: Vec::new() }
    }

    fn block(
        &self,
        settings: &Settings,
        first: u32,
        node_ids: &[NodeId],
        local: &HashMap<u64, u32>,
        lists: &HashMap<u64, Vec<usize>>,
    ) -> Block {
        let mut block = Block { first, nbr_offsets: vec![0], ..Block::default() };
        for node in &node_ids[first as usize..] {
            for position in &lists[&node.0] {
                let (neighbour, edge, kind) = self.lists[node.index()][*position];
                block.nbrs.push(LocalIndex(local[&neighbour]));
                if settings.carry.positions {
                    block.positions.push(*position as u32);
                }
                if settings.carry.edges {
                    block.edges.push(EdgeId(edge));
                }
                if settings.carry.relations {
                    block.relations.push(kind);
                }
            }
            block.nbr_offsets.push(block.nbrs.len() as u32);
            block.degrees.push(self.lists[node.index()].len() as u32);
        }
        block
    }
}
