//! Samples from the definitions, as plainly as can be: maps and vectors, one node at a time.
#![allow(dead_code, reason = "each test file uses a part of it")]

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
    fn hops(&self, settings: &Settings, at: Position, seeds: &[NodeId]) -> (Vec<Vec<u64>>, Vec<Drawn>) {
        let mut seen = HashSet::new();
        let mut hops: Vec<Vec<u64>> =
            vec![seeds.iter().map(|seed| seed.0).filter(|seed| seen.insert(*seed)).collect()];
        let mut drawn = Vec::new();
        for depth in 0..settings.fanouts.len() {
            // A layered block lists the deepest hop first, and so its neighbours appear.
            let first = if settings.form == Form::Layered { 0 } else { depth };
            let mut lists: Drawn = Vec::new();
            for hop in (first..=depth).rev() {
                for node in &hops[hop] {
                    lists.push((*node, self.draw(settings, at, depth, *node)));
                }
            }
            let named = lists
                .iter()
                .flat_map(|(node, list)| list.iter().map(|position| self.lists[*node as usize][*position].0));
            hops.push(named.filter(|node| seen.insert(*node)).collect());
            drawn.push(lists);
        }
        (hops, drawn)
    }

    pub fn sample(&self, settings: &Settings, at: Position, seeds: &[NodeId]) -> Sample {
        let (hops, drawn) = self.hops(settings, at, seeds);
        self.assemble(settings, seeds, &hops, drawn)
    }

    /// By levels: targets have level L, what is met from level k has level k - 1, or k - 2 if it is pulled, which a node is
    /// at hops 1 to L - 1. A node draws at the hop in which it was found, also if it is pulled.
    pub fn sample_with_pulls(
        &self,
        settings: &Settings,
        at: Position,
        seeds: &[NodeId],
        pulls: impl Fn(usize, NodeId) -> bool,
    ) -> Sample {
        let layers = settings.fanouts.len();
        let mut seen = HashSet::new();
        // By how far below L.
        let mut levels: Vec<Vec<u64>> = vec![Vec::new(); layers + 1];
        levels[0] = seeds.iter().map(|seed| seed.0).filter(|seed| seen.insert(*seed)).collect();
        // By hop.
        let (mut pulled, mut drawn): (Vec<Vec<u64>>, Vec<Drawn>) = (vec![Vec::new(); layers + 1], Vec::new());
        for below in 0..layers {
            let mut lists: Drawn = Vec::new();
            for node in levels[below].clone() {
                let hop = if below > 0 && pulled[below - 1].contains(&node) { below - 1 } else { below };
                let list = self.draw(settings, at, hop, node);
                for position in &list {
                    let met = self.lists[node as usize][*position].0;
                    match seen.insert(met) {
                        true if below + 1 < layers && pulls(below + 1, NodeId(met)) => {
                            pulled[below + 1].push(met)
                        }
                        true => levels[below + 1].push(met),
                        false => {}
                    }
                }
                lists.push((node, list));
            }
            drawn.push(lists);
            // They come after those of the next hop, which are all known now.
            levels[below + 1].extend(&pulled[below]);
        }
        let mut sample = self.assemble(settings, seeds, &levels, drawn);
        sample.pulled = pulled[1..].iter().map(|pulled| pulled.len() as u32).collect();
        while sample.pulled.last() == Some(&0) {
            sample.pulled.pop();
        }
        sample
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
        let known = match settings.form == Form::Shadow || settings.carry.degrees {
            true => 0,
            false => node_id_offsets[1] as usize,
        };
        let degrees = node_ids[known..].iter().map(|node| self.lists[node.index()].len() as u32).collect();
        Sample { form: settings.form, node_ids, node_id_offsets, blocks, seeds, degrees, pulled: Vec::new() }
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
        }
        block
    }
}
