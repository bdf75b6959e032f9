//! Hop samples from the definitions in docs/sample.md, as plainly as can be: maps, vectors and one draw after the other.

use esker_sample::hops::{HopEdges, HopSample, HopSettings, TemporalStrategy};
use esker_sample::{Fanout, Position};
use esker_types::{EdgeId, NodeId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// How a node chooses, with columns by edge or node as they are given.
#[derive(Debug, Clone)]
pub enum Choice {
    Uniform,
    Weighted(Vec<f64>),
    NodeTimes(Vec<i64>, TemporalStrategy),
    EdgeTimes(Vec<i64>, TemporalStrategy),
}

/// Neighbour and edge, by position, by node.
pub struct HopReference {
    pub lists: Vec<Vec<(u64, u64)>>,
    pub choice: Choice,
}

fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn below(key: u64, i: u64, n: u64) -> u64 {
    for attempt in 0u64.. {
        let counter = i.wrapping_add(attempt << 32);
        let word = mix(key.wrapping_add(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let product = word as u128 * n as u128;
        if (product as u64) as u128 >= (1u128 << 64) % n as u128 {
            return (product >> 64) as u64;
        }
    }
    unreachable!()
}

/// Integer weights: `floor(w * 2^(62 - d - e))`, at least 1 if w is above 0. For weights that floating point scales exactly.
pub fn integers(weights: &[f64]) -> Vec<u64> {
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let mut e = 0;
    while largest > 0.0 && 2f64.powi(e + 1) <= largest {
        e += 1;
    }
    while largest > 0.0 && 2f64.powi(e) > largest {
        e -= 1;
    }
    let mut d = 0;
    while 1usize << d < weights.len() {
        d += 1;
    }
    let scale = 2f64.powi(62 - d - e);
    weights.iter().map(|w| if *w > 0.0 { ((w * scale) as u64).max(1) } else { 0 }).collect()
}

impl HopReference {
    /// The positions that a node of a tree takes, ascending.
    fn taken(&self, fanout: Fanout, replace: bool, key: u64, node: u64, latest: Option<i64>) -> Vec<usize> {
        let list = &self.lists[node as usize];
        let all: Vec<usize> = (0..list.len()).collect();
        let mut taken = match &self.choice {
            Choice::Uniform => uniform(&all, fanout, replace, key),
            Choice::Weighted(weights) => {
                let weights: Vec<f64> = list.iter().map(|(_, edge)| weights[*edge as usize]).collect();
                weighted(&integers(&weights), fanout, replace, key)
            }
            Choice::NodeTimes(times, strategy) => {
                let times: Vec<i64> = list.iter().map(|(node, _)| times[*node as usize]).collect();
                temporal(&times, *strategy, fanout, replace, key, latest.unwrap())
            }
            Choice::EdgeTimes(times, strategy) => {
                let times: Vec<i64> = list.iter().map(|(_, edge)| times[*edge as usize]).collect();
                temporal(&times, *strategy, fanout, replace, key, latest.unwrap())
            }
        };
        taken.sort_unstable();
        taken
    }

    pub fn sample(
        &self,
        settings: &HopSettings,
        at: Position,
        seeds: &[NodeId],
        seed_times: Option<&[i64]>,
    ) -> HopSample {
        let temporal = matches!(self.choice, Choice::NodeTimes(..) | Choice::EdgeTimes(..));
        let disjoint = settings.disjoint || temporal;
        // (tree, node) of every row; where each pair was first.
        let mut rows: Vec<(u32, u64)> = Vec::new();
        let mut first: HashMap<(u32, u64), u32> = HashMap::new();
        for (number, seed) in seeds.iter().enumerate() {
            let row = (if disjoint { number as u32 } else { 0 }, seed.0);
            first.entry(row).or_insert(rows.len() as u32);
            rows.push(row);
        }
        let latest = |tree: u32| match (&self.choice, seed_times) {
            (Choice::NodeTimes(..) | Choice::EdgeTimes(..), Some(times)) => Some(times[tree as usize]),
            (Choice::NodeTimes(times, _), None) => Some(times[seeds[tree as usize].index()]),
            _ => None,
        };
        let mut out = HopSample { nodes_by_hop: vec![rows.len()], ..HopSample::default() };
        let mut expanded = 0;
        for (hop, fanout) in settings.fanouts.iter().enumerate() {
            let (known, edges) = (rows.len(), out.edges.len());
            for target in expanded..known {
                let (tree, node) = rows[target];
                let mut words = vec![0x7361_6d70_6c65, at.epoch, at.batch, hop as u64, node];
                if disjoint {
                    words.push(tree as u64);
                }
                let key = words.iter().fold(mix(settings.seed), |key, word| mix(key ^ mix(*word)));
                for position in self.taken(*fanout, settings.replace, key, node, latest(tree)) {
                    let (neighbour, edge) = self.lists[node as usize][position];
                    let source = *first.entry((tree, neighbour)).or_insert(rows.len() as u32);
                    if source as usize == rows.len() {
                        rows.push((tree, neighbour));
                    }
                    out.sources.push(source);
                    out.targets.push(target as u32);
                    out.edges.push(EdgeId(edge));
                }
            }
            expanded = known;
            out.nodes_by_hop.push(rows.len() - known);
            out.edges_by_hop.push(out.edges.len() - edges);
        }
        match settings.edges {
            HopEdges::Directional => {}
            HopEdges::Bidirectional => bidirectional(&mut out),
            HopEdges::Induced => {
                (out.sources, out.targets, out.edges, out.edges_by_hop) = Default::default();
                for (target, (tree, node)) in rows.iter().enumerate() {
                    for (neighbour, edge) in &self.lists[*node as usize] {
                        if let Some(source) = first.get(&(*tree, *neighbour)) {
                            out.sources.push(*source);
                            out.targets.push(target as u32);
                            out.edges.push(EdgeId(*edge));
                        }
                    }
                }
            }
        }
        out.nodes = rows.iter().map(|(_, node)| NodeId(*node)).collect();
        out.trees = rows.iter().filter(|_| disjoint).map(|(tree, _)| *tree).collect();
        out
    }
}

/// Some of the candidates, by their places.
fn uniform(candidates: &[usize], fanout: Fanout, replace: bool, key: u64) -> Vec<usize> {
    let n = candidates.len();
    let Fanout::AtMost(k) = fanout else { return candidates.to_vec() };
    let k = k as usize;
    if n == 0 {
        return Vec::new();
    }
    if replace {
        return (0..k as u64).map(|i| candidates[below(key, i, n as u64) as usize]).collect();
    }
    if n <= k {
        return candidates.to_vec();
    }
    let m = k.min(n - k);
    let mut set = BTreeSet::new();
    for i in 0..m {
        let j = n - m + i;
        let t = below(key, i as u64, j as u64 + 1) as usize;
        set.insert(if set.contains(&t) { j } else { t });
    }
    let is_taken = |place: &usize| set.contains(place) == (k <= n - k);
    (0..n).filter(is_taken).map(|place| candidates[place]).collect()
}

fn weighted(weights: &[u64], fanout: Fanout, replace: bool, key: u64) -> Vec<usize> {
    let Fanout::AtMost(k) = fanout else { return (0..weights.len()).collect() };
    let (mut weights, mut taken) = (weights.to_vec(), Vec::new());
    for i in 0..k as u64 {
        let total: u64 = weights.iter().sum();
        if total == 0 {
            break;
        }
        let mut t = below(key, i, total);
        let mut position = 0;
        while t >= weights[position] {
            t -= weights[position];
            position += 1;
        }
        taken.push(position);
        if !replace {
            weights[position] = 0;
        }
    }
    taken
}

fn temporal(
    times: &[i64],
    strategy: TemporalStrategy,
    fanout: Fanout,
    replace: bool,
    key: u64,
    latest: i64,
) -> Vec<usize> {
    let mut early: Vec<usize> = (0..times.len()).filter(|position| times[*position] <= latest).collect();
    early.sort_by_key(|position| (times[*position], *position));
    if let (TemporalStrategy::Last, Fanout::AtMost(k)) = (strategy, fanout) {
        early.drain(..early.len().saturating_sub(k as usize));
    }
    uniform(&early, fanout, replace, key)
}

fn bidirectional(out: &mut HopSample) {
    let mut pairs: BTreeMap<(u32, u32), EdgeId> = BTreeMap::new();
    for reversed in [false, true] {
        for ((source, target), edge) in out.sources.iter().zip(&out.targets).zip(&out.edges) {
            let pair = if reversed { (*source, *target) } else { (*target, *source) };
            pairs.entry(pair).or_insert(*edge);
        }
    }
    (out.sources, out.targets, out.edges, out.edges_by_hop) = Default::default();
    for ((target, source), edge) in pairs {
        out.sources.push(source);
        out.targets.push(target);
        out.edges.push(edge);
    }
}
