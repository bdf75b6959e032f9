//! Hop samples against a naive reference written from the definitions, against DENSE samples, and against statistics.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod naive_hops;

use esker_sample::hops::{
    BorrowedCsc, BorrowedNumbers, EdgeWeights, HopEdges, HopGraph, HopSample, HopSampler, HopSettings,
    NeighbourChoice, NeighbourTimes, TemporalStrategy, WeightColumn,
};
use esker_sample::{
    Carry, Direction, Fanout, Form, InMemory, Position, Sample, SampleError, Sampler, Settings,
};
use esker_types::{EdgeId, NodeId};
use naive_hops::{Choice, HopReference};
use proptest::prelude::*;
use std::sync::Arc;

const AT: Position = Position { epoch: 3, batch: 5 };
/// More than any test needs.
const PLENTY: u64 = 1 << 30;

/// Adjacency as arrays, in the way of `to_csc`.
#[derive(Debug, Clone)]
struct Arrays {
    offsets: Vec<i64>,
    sources: Vec<i64>,
    edges: Vec<i64>,
}

impl Arrays {
    /// Lists of neighbours, with edges numbered against the order of lists.
    fn of(lists: &[Vec<u64>]) -> Arrays {
        let mut arrays = Arrays { offsets: vec![0], sources: Vec::new(), edges: Vec::new() };
        for list in lists {
            arrays.sources.extend(list.iter().map(|node| *node as i64));
            arrays.offsets.push(arrays.sources.len() as i64);
        }
        arrays.edges = (0..arrays.sources.len() as i64).rev().collect();
        arrays
    }

    fn csc(&self) -> BorrowedCsc<'_, u64> {
        let edges = Some(BorrowedNumbers::Wide(&self.edges));
        BorrowedCsc::new(BorrowedNumbers::Wide(&self.offsets), &self.sources, edges).unwrap()
    }

    fn lists(&self) -> Vec<Vec<(u64, u64)>> {
        let list = |pair: &[i64]| {
            (pair[0]..pair[1])
                .map(|entry| (self.sources[entry as usize] as u64, self.edges[entry as usize] as u64))
                .collect()
        };
        self.offsets.windows(2).map(list).collect()
    }
}

fn choice_of<G: HopGraph>(graph: &G, choice: &Choice) -> NeighbourChoice {
    match choice {
        Choice::Uniform => NeighbourChoice::Uniform,
        Choice::Weighted(weights) => NeighbourChoice::Weighted(Arc::new(
            EdgeWeights::new(graph, WeightColumn::F64(weights), PLENTY).unwrap(),
        )),
        Choice::NodeTimes(times, strategy) => NeighbourChoice::Temporal(
            Arc::new(NeighbourTimes::of_nodes(graph, times, PLENTY).unwrap()),
            *strategy,
        ),
        Choice::EdgeTimes(times, strategy) => NeighbourChoice::Temporal(
            Arc::new(NeighbourTimes::of_edges(graph, times, PLENTY).unwrap()),
            *strategy,
        ),
    }
}

fn sampled<G: HopGraph>(
    graph: G,
    settings: &HopSettings,
    choice: &Choice,
    seeds: &[NodeId],
    times: Option<&[i64]>,
) -> HopSample {
    let (choice, mut out) = (choice_of(&graph, choice), HopSample::default());
    let mut sampler = HopSampler::new(graph, settings.clone(), choice, PLENTY).unwrap();
    // The batch after another one.
    sampler.sample(Position { epoch: 0, batch: 0 }, seeds, times, &mut out).unwrap();
    sampler.sample(AT, seeds, times, &mut out).unwrap();
    out
}

/// The lists in any order, as a `Data` may have them.
fn lists() -> impl Strategy<Value = Vec<Vec<u64>>> {
    (1u64..40).prop_flat_map(|nodes| {
        prop::collection::vec(prop::collection::vec(0..nodes, 0..60), nodes as usize)
    })
}

fn fanouts(most: u32) -> impl Strategy<Value = Vec<Fanout>> {
    let one = prop_oneof![5 => (0..most).prop_map(Fanout::AtMost), 1 => Just(Fanout::All)];
    prop::collection::vec(one, 0..4)
}

fn weights() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), Just(1.0), 1e-6f64..1e-3, 0.1f64..10.0, 1e5f64..1e6]
}

/// What is sampled, and how: `column` has numbers for more edges and nodes than there are.
#[derive(Debug, Clone)]
struct Case {
    lists: Vec<Vec<u64>>,
    settings: HopSettings,
    seeds: Vec<u64>,
    weights: Vec<f64>,
    times: Vec<i64>,
    strategy: TemporalStrategy,
}

fn cases() -> impl Strategy<Value = Case> {
    let strategy = prop_oneof![Just(TemporalStrategy::Uniform), Just(TemporalStrategy::Last)];
    let settings = (any::<u64>(), fanouts(8), any::<bool>(), any::<bool>(), 0u8..3).prop_map(
        |(seed, fanouts, replace, disjoint, edges)| HopSettings {
            seed,
            fanouts,
            replace,
            disjoint,
            edges: match (edges, disjoint) {
                (0, false) => HopEdges::Induced,
                (1, _) => HopEdges::Bidirectional,
                _ => HopEdges::Directional,
            },
        },
    );
    let columns = (prop::collection::vec(weights(), 40 * 60), prop::collection::vec(0i64..12, 40 * 60));
    (lists(), settings, prop::collection::vec(any::<u64>(), 0..12), columns, strategy).prop_map(
        |(lists, settings, seeds, (weights, times), strategy)| Case {
            lists,
            settings,
            seeds,
            weights,
            times,
            strategy,
        },
    )
}

fn check(case: &Case, choice: Choice, with_seed_times: bool) {
    let arrays = Arrays::of(&case.lists);
    let seeds: Vec<NodeId> = case.seeds.iter().map(|pick| NodeId(pick % case.lists.len() as u64)).collect();
    let times: Vec<i64> = case.seeds.iter().map(|pick| (pick % 13) as i64).collect();
    let times = with_seed_times.then_some(&times[..]);
    let reference = HopReference { lists: arrays.lists(), choice: choice.clone() };
    let expected = reference.sample(&case.settings, AT, &seeds, times);
    let found = sampled(arrays.csc(), &case.settings, &choice, &seeds, times);
    assert_eq!(found, expected);
    let cut = |sample: &HopSample| (sample.bytes(), sample.allocated_bytes());
    assert!(cut(&found).0 <= cut(&found).1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn uniform_samples_equal_the_reference(case in cases()) {
        check(&case, Choice::Uniform, false);
    }

    #[test]
    fn weighted_samples_equal_the_reference(case in cases()) {
        let edges = case.lists.iter().map(Vec::len).sum();
        check(&case, Choice::Weighted(case.weights[..edges].to_vec()), false);
    }

    #[test]
    fn temporal_samples_by_node_equal_the_reference(mut case in cases(), with_seed_times: bool) {
        case.settings.edges = HopEdges::Directional;
        let times = case.times[..case.lists.len()].to_vec();
        check(&case, Choice::NodeTimes(times, case.strategy), with_seed_times);
    }

    #[test]
    fn temporal_samples_by_edge_equal_the_reference(mut case in cases()) {
        case.settings.edges = HopEdges::Directional;
        let edges = case.lists.iter().map(Vec::len).sum();
        check(&case, Choice::EdgeTimes(case.times[..edges].to_vec(), case.strategy), true);
    }

    /// Lists in the order of Esker, sampled as DENSE: the same edges, hop by hop.
    #[test]
    fn plain_samples_have_the_edges_of_dense_ones(
        mut lists in lists(),
        seed: u64,
        fanouts in fanouts(8),
        picks in prop::collection::vec(any::<u64>(), 1..10),
        direction in prop_oneof![Just(Direction::Incoming), Just(Direction::Outgoing), Just(Direction::Both)],
    ) {
        let fanouts: Vec<Fanout> = fanouts.into_iter().filter(|fanout| *fanout != Fanout::AtMost(0)).collect();
        lists.iter_mut().for_each(|list| list.sort_unstable());
        let graph = InMemory::<u32>::from_adjacency(&lists, None).in_direction(direction);
        let mut seeds: Vec<NodeId> = picks.iter().map(|pick| NodeId(pick % lists.len() as u64)).collect();
        seeds.sort_unstable();
        seeds.dedup();
        let carry = Carry { edges: true, ..Carry::default() };
        let dense = Settings { seed, fanouts: fanouts.clone(), form: Form::Dense, carry };
        let mut sample = Sample::default();
        Sampler::new(&graph, dense, PLENTY).unwrap().sample(AT, &seeds, &mut sample).unwrap();
        let settings = HopSettings { seed, fanouts, ..HopSettings::default() };
        let found = sampled(&graph, &settings, &Choice::Uniform, &seeds, None);
        prop_assert_eq!(found, hops_of_dense(&sample));
    }
}

/// A DENSE sample in the order of hops: its hops the other way round.
fn hops_of_dense(sample: &Sample) -> HopSample {
    let (hops, block) = (sample.layers(), &sample.blocks[0]);
    let range = |hop: usize| sample.node_id_offsets[hops - hop]..sample.node_id_offsets[hops - hop + 1];
    let mut order = vec![0; sample.node_ids.len()];
    let mut out = HopSample::default();
    for hop in 0..=hops {
        for index in range(hop) {
            order[index as usize] = out.nodes.len() as u32;
            out.nodes.push(sample.node_ids[index as usize]);
        }
        out.nodes_by_hop.push(range(hop).len());
    }
    for hop in 0..hops {
        let before = out.edges.len();
        for index in range(hop) {
            let at = (index - block.first) as usize;
            for entry in block.nbr_offsets[at] as usize..block.nbr_offsets[at + 1] as usize {
                out.sources.push(order[block.nbrs[entry].0 as usize]);
                out.targets.push(order[index as usize]);
                out.edges.push(block.edges[entry]);
            }
        }
        out.edges_by_hop.push(out.edges.len() - before);
    }
    out
}
