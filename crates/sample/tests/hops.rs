//! Hop samples against a naive reference written from the definitions, against DENSE samples, and against statistics.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod naive_hops;

use esker_sample::hops::{
    BorrowedCsc, BorrowedNumbers, HopEdges, HopGraph, HopSample, HopSampler, HopSettings, NeighbourChoice,
    NeighbourTimes, NeighbourWeights, TemporalStrategy, WeightColumn,
};
use esker_sample::{
    Carry, Direction, Fanout, Form, HopOrdered, InMemory, Position, Sample, SampleError, Sampler, Settings,
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
            NeighbourWeights::new(graph, WeightColumn::F64(weights), PLENTY).unwrap(),
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
    (1u64..40)
        .prop_flat_map(|nodes| prop::collection::vec(prop::collection::vec(0..nodes, 0..60), nodes as usize))
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
        let carry = Carry { edges: true, ..Carry::default() };
        let dense = Settings { seed, fanouts: fanouts.clone(), form: Form::Dense, carry };
        let mut sample = Sample::default();
        let mut dense_sampler = Sampler::new(&graph, dense, PLENTY).unwrap();
        dense_sampler.sample(AT, &seeds, &mut sample).unwrap();
        let settings = HopSettings { seed, fanouts, ..HopSettings::default() };
        let found = sampled(&graph, &settings, &Choice::Uniform, &seeds, None);
        prop_assert_eq!(ordered_by_hop(&sample), found);
        // Without repeated seeds, hops are those of DENSE the other way round.
        seeds.sort_unstable();
        seeds.dedup();
        dense_sampler.sample(AT, &seeds, &mut sample).unwrap();
        let found = sampled(&graph, &settings, &Choice::Uniform, &seeds, None);
        prop_assert_eq!(found, hops_of_dense(&sample));
    }
}

/// What the engine's loaders make of a DENSE sample.
fn ordered_by_hop(sample: &Sample) -> HopSample {
    let ordered = HopOrdered::of(sample);
    let local = |indices: &[i64]| indices.iter().map(|index| *index as u32).collect();
    HopSample {
        nodes: ordered.nodes.iter().map(|node| NodeId(*node as u64)).collect(),
        sources: local(&ordered.sources),
        targets: local(&ordered.targets),
        edges: ordered.edges.iter().map(|edge| EdgeId(*edge as u64)).collect(),
        nodes_by_hop: ordered.nodes_by_hop,
        edges_by_hop: ordered.edges_by_hop,
        ..HopSample::default()
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

/// A graph large enough for several waves and threads, with some long lists.
fn large() -> Vec<Vec<u64>> {
    let nodes = 20_000u64;
    let list = |node: u64| {
        let degree = 3 + node % 37 + if node.is_multiple_of(500) { 400 } else { 0 };
        (0..degree).map(|slot| (node * 7919 + slot * slot * 104_729) % nodes).collect()
    };
    (0..nodes).map(list).collect()
}

/// A large sample with few or many threads and with a table of either kind is that of the reference.
fn check_large(settings: HopSettings, choice: Choice, times: bool) {
    let arrays = Arrays::of(&large());
    let seeds: Vec<NodeId> = (0..700).map(|seed| NodeId(seed * 13 % 9000)).collect();
    let times: Option<Vec<i64>> = times.then(|| (0..700).map(|seed| seed % 50).collect());
    let times = times.as_deref();
    let reference = HopReference { lists: arrays.lists(), choice: choice.clone() };
    let expected = reference.sample(&settings, AT, &seeds, times);
    assert!(expected.nodes.len() > 4000, "{}", expected.nodes.len());
    let graph = arrays.csc();
    for (threads, most_bytes) in [(1, PLENTY), (2, PLENTY), (4, PLENTY), (1, 20_000_000)] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let (choice, mut out) = (choice_of(&graph, &choice), HopSample::default());
        let sampler = HopSampler::new(graph, settings.clone(), choice, most_bytes).unwrap();
        let mut sampler = sampler.with_threads(threads);
        pool.install(|| sampler.sample(AT, &seeds, times, &mut out)).unwrap();
        assert!(out == expected, "{settings:?} with {threads} threads and {most_bytes} bytes");
    }
}

fn of_fanouts(fanouts: &[u32]) -> HopSettings {
    let fanouts = fanouts.iter().map(|most| Fanout::AtMost(*most)).collect();
    HopSettings { seed: 9, fanouts, ..HopSettings::default() }
}

#[test]
fn large_uniform_samples_are_the_same_for_any_threads() {
    check_large(of_fanouts(&[10, 8]), Choice::Uniform, false);
    check_large(HopSettings { replace: true, ..of_fanouts(&[10, 70]) }, Choice::Uniform, false);
    check_large(HopSettings { disjoint: true, ..of_fanouts(&[6, 5]) }, Choice::Uniform, false);
    check_large(HopSettings { edges: HopEdges::Induced, ..of_fanouts(&[10, 8]) }, Choice::Uniform, false);
    check_large(
        HopSettings { edges: HopEdges::Bidirectional, ..of_fanouts(&[10, 8]) },
        Choice::Uniform,
        false,
    );
}

#[test]
fn large_samples_by_weight_and_time_are_the_same_for_any_threads() {
    let arrays = Arrays::of(&large());
    let numbers = || (0..arrays.edges.len() as i64).map(|edge| edge * edge % 50);
    check_large(
        of_fanouts(&[10, 8]),
        Choice::Weighted(numbers().map(|number| number as f64).collect()),
        false,
    );
    // So many that draws by weight take their other way.
    check_large(
        of_fanouts(&[300, 100]),
        Choice::Weighted(numbers().map(|number| number as f64).collect()),
        false,
    );
    for strategy in [TemporalStrategy::Uniform, TemporalStrategy::Last] {
        check_large(of_fanouts(&[10, 8]), Choice::EdgeTimes(numbers().collect(), strategy), true);
    }
}

#[test]
fn adjacency_in_either_width_and_in_memory_gives_the_same_sample() {
    let mut lists = large();
    lists.iter_mut().for_each(|list| list.sort_unstable());
    let arrays = Arrays { edges: Vec::new(), ..Arrays::of(&lists) };
    let narrow = |numbers: &[i64]| numbers.iter().map(|number| *number as i32).collect::<Vec<i32>>();
    let (offsets, sources) = (narrow(&arrays.offsets), narrow(&arrays.sources));
    let seeds: Vec<NodeId> = (0..300).map(|seed| NodeId(seed * 31)).collect();
    let settings = of_fanouts(&[10, 5]);
    let graph = InMemory::<u32>::from_adjacency(&lists, None);
    let expected = sampled(&graph, &settings, &Choice::Uniform, &seeds, None);
    let graph = BorrowedCsc::new(BorrowedNumbers::Narrow(&offsets), &sources, None).unwrap();
    assert!(sampled(graph, &settings, &Choice::Uniform, &seeds, None) == expected);
    let graph = BorrowedCsc::new(BorrowedNumbers::Wide(&arrays.offsets), &arrays.sources, None).unwrap();
    assert!(sampled(graph, &settings, &Choice::Uniform, &seeds, None) == expected);
}

#[test]
fn a_sampler_keeps_its_memory_or_says_what_would_do() {
    let arrays = Arrays::of(&large());
    let seeds: Vec<NodeId> = (0..700).map(|seed| NodeId(seed * 13)).collect();
    let (mut kept, mut refused) = (0, 0);
    for settings in [
        of_fanouts(&[10, 8]),
        HopSettings { disjoint: true, ..of_fanouts(&[10, 8]) },
        HopSettings { edges: HopEdges::Bidirectional, ..of_fanouts(&[10, 8]) },
        HopSettings { replace: true, ..of_fanouts(&[1000]) },
    ] {
        for most_bytes in (1..60).map(|size| size * 400_000) {
            let sampler =
                HopSampler::new(arrays.csc(), settings.clone(), NeighbourChoice::Uniform, most_bytes);
            let (mut sampler, mut out) = (sampler.unwrap(), HopSample::default());
            match sampler.sample(AT, &seeds, None, &mut out) {
                Ok(()) => kept += 1,
                Err(SampleError::Memory { needed, allowed, .. }) => {
                    assert!(needed.0 > most_bytes && allowed.0 == most_bytes);
                    refused += 1;
                }
                Err(error) => panic!("{error}"),
            }
            assert!(sampler.bytes() + out.allocated_bytes() <= most_bytes, "{settings:?}");
        }
    }
    assert!(kept > 50 && refused > 20, "{kept} kept, {refused} refused");
    let settings = HopSettings { replace: true, ..of_fanouts(&[u32::MAX; 3]) };
    let mut sampler = HopSampler::new(arrays.csc(), settings, NeighbourChoice::Uniform, PLENTY).unwrap();
    let error = sampler.sample(AT, &seeds, None, &mut HopSample::default()).unwrap_err();
    assert!(matches!(error, SampleError::Memory { .. }), "{error}");
}

fn csc_error(offsets: &[i64], sources: &[i64], edges: Option<&[i64]>) -> String {
    let edges = edges.map(BorrowedNumbers::Wide);
    BorrowedCsc::new(BorrowedNumbers::Wide(offsets), sources, edges).unwrap_err().to_string()
}

#[test]
fn adjacency_that_is_none_is_refused_by_array_and_index() {
    let check = |error: String, words: [&str; 3]| {
        words.iter().for_each(|word| assert!(error.contains(word), "{error}"));
    };
    check(csc_error(&[], &[], None), ["colptr", "one more than", "none"]);
    check(csc_error(&[1, 2], &[0, 0], None), ["colptr", "from 0 to 2", "1 to 2"]);
    check(csc_error(&[0, 1], &[0, 0], None), ["colptr", "from 0 to 2", "0 to 1"]);
    check(csc_error(&[0, 3, 2, 2], &[0, 0], None), ["colptr", "ascend", "3 and 2 at indices 1 and 2"]);
    check(csc_error(&[0, -5, 2], &[0, 0], None), ["colptr", "ascend", "0 and -5"]);
    check(
        csc_error(&[0, i64::MAX, 2], &[0, 0], None),
        ["colptr", "less than 2^31", "0 and 9223372036854775807"],
    );
    check(csc_error(&[0, i64::MIN, 2], &[0, 0], None), ["colptr", "ascend", "0 and -9223372036854775808"]);
    check(csc_error(&[0, 1, 2], &[0, 2], None), ["row", "0 to 1", "2 at index 1"]);
    check(csc_error(&[0, 1, 2], &[-1, 0], None), ["row", "0 to 1", "-1 at index 0"]);
    check(csc_error(&[0, 1, 2], &[0, 1], Some(&[0])), ["perm", "2, one for each", "found 1"]);
    check(csc_error(&[0, 1, 2], &[0, 1], Some(&[0, 2])), ["perm", "0 to 1", "2 at index 1"]);
    check(csc_error(&[0, 1, 2], &[0, 1], Some(&[-7, 0])), ["perm", "0 to 1", "-7 at index 0"]);
    // No nodes, no edges.
    assert!(BorrowedCsc::new(BorrowedNumbers::Wide(&[0]), &[0i64; 0], None).is_ok());
}

#[test]
fn columns_and_options_that_cannot_be_are_refused() {
    let arrays = Arrays::of(&[vec![1, 1], vec![0]]);
    let graph = arrays.csc();
    let weights = |column: &[f64]| NeighbourWeights::new(&graph, WeightColumn::F64(column), PLENTY);
    let say = |error: SampleError, word: &str| {
        let error = error.to_string();
        assert!(error.contains(word), "{error}");
    };
    say(weights(&[1.0]).unwrap_err(), "3, one for each edge");
    say(weights(&[1.0, f64::NAN, 0.0]).unwrap_err(), "NaN at edge 1");
    say(weights(&[1.0, 1.0, -0.5]).unwrap_err(), "-0.5 at edge 2");
    say(weights(&[f64::INFINITY, 1.0, 0.0]).unwrap_err(), "inf at edge 0");
    say(
        NeighbourWeights::new(&graph, WeightColumn::F32(&[f32::NAN; 3]), PLENTY).unwrap_err(),
        "NaN at edge 0",
    );
    say(
        NeighbourWeights::new(&graph, WeightColumn::F32(&[1.0; 3]), 23).unwrap_err(),
        "sampling by weight needs 24",
    );
    say(NeighbourTimes::of_nodes(&graph, &[1, 2, 3], PLENTY).unwrap_err(), "2, one for each node");
    say(NeighbourTimes::of_edges(&graph, &[1, 2], PLENTY).unwrap_err(), "3, one for each edge");
    say(NeighbourTimes::of_edges(&graph, &[3, 1, 2], 30).unwrap_err(), "sampling by time needs 36");

    let times = Arc::new(NeighbourTimes::of_edges(&graph, &[1, 2, 3], PLENTY).unwrap());
    let temporal = NeighbourChoice::Temporal(times, TemporalStrategy::Last);
    let induced = HopSettings { edges: HopEdges::Induced, ..of_fanouts(&[2]) };
    let refused = |settings: &HopSettings, choice: &NeighbourChoice| {
        HopSampler::new(&graph, settings.clone(), choice.clone(), PLENTY).err().unwrap()
    };
    say(refused(&induced, &temporal), "induced");
    say(refused(&HopSettings { disjoint: true, ..induced }, &NeighbourChoice::Uniform), "induced");
    let other = Arrays::of(&[vec![1, 1], vec![0, 0]]);
    let foreign = NeighbourWeights::new(&other.csc(), WeightColumn::F64(&[1.0; 4]), PLENTY).unwrap();
    say(refused(&of_fanouts(&[2]), &NeighbourChoice::Weighted(Arc::new(foreign))), "another graph");

    let sample = |choice: &NeighbourChoice, seeds: &[u64], times: Option<&[i64]>| {
        let seeds: Vec<NodeId> = seeds.iter().map(|seed| NodeId(*seed)).collect();
        let mut sampler = HopSampler::new(&graph, of_fanouts(&[2]), choice.clone(), PLENTY).unwrap();
        sampler.sample(AT, &seeds, times, &mut HopSample::default())
    };
    say(sample(&NeighbourChoice::Uniform, &[0, 2], None).unwrap_err(), "seed 2 is not a node");
    say(sample(&NeighbourChoice::Uniform, &[0], Some(&[1])).unwrap_err(), "expected none, found 1");
    say(sample(&temporal, &[0, 1], Some(&[1])).unwrap_err(), "expected 2 of them, found 1");
    say(sample(&temporal, &[0, 1], None).unwrap_err(), "edges have times");
    assert!(sample(&temporal, &[0, 1], Some(&[i64::MIN, i64::MAX])).is_ok());
    assert!(sample(&NeighbourChoice::Uniform, &[], None).is_ok());
}

/// Compares counts with what is expected: chi-square with one degree of freedom less than there are counts, at most the
/// 99.9% quantile by Wilson and Hilferty.
fn check_counts(counts: &[u64], expected: &[f64]) {
    let sum: f64 = counts
        .iter()
        .zip(expected)
        .map(|(count, expected)| (*count as f64 - expected).powi(2) / expected)
        .sum();
    let freedom = counts.len() as f64 - 1.0;
    let spread = 2.0 / (9.0 * freedom);
    let most = freedom * (1.0 - spread + 3.09 * spread.sqrt()).powi(3);
    assert!(sum < most, "chi-square {sum:.1}, at most {most:.1}: {counts:?}, expected {expected:?}");
}

/// The neighbours of node 0, which has them all, in many batches of several trees: a word of them by tree.
fn many_draws(settings: HopSettings, neighbours: u64, choice: &Choice, mut take: impl FnMut(&[u64])) {
    let mut lists = vec![(1..=neighbours).collect::<Vec<u64>>()];
    lists.resize(neighbours as usize + 1, Vec::new());
    let arrays = Arrays { edges: (0..neighbours as i64).collect(), ..Arrays::of(&lists) };
    let graph = arrays.csc();
    let mut sampler = HopSampler::new(&graph, settings, choice_of(&graph, choice), PLENTY).unwrap();
    let mut out = HopSample::default();
    for batch in 0..200 {
        let times = matches!(choice, Choice::EdgeTimes(..)).then_some([5; 100]);
        let times = times.as_ref().map(|times| &times[..]);
        sampler.sample(Position { epoch: 0, batch }, &[NodeId(0); 100], times, &mut out).unwrap();
        for tree in 0..100 {
            let edges = out.targets.iter().zip(&out.edges).filter(|(target, _)| **target == tree);
            take(&edges.map(|(_, edge)| edge.0).collect::<Vec<u64>>());
        }
    }
}

#[test]
fn draws_with_replacement_are_uniform_and_independent() {
    let mut pairs = [0u64; 36];
    let settings = HopSettings { replace: true, disjoint: true, ..of_fanouts(&[2]) };
    many_draws(settings, 6, &Choice::Uniform, |edges| pairs[(edges[0] * 6 + edges[1]) as usize] += 1);
    let (mut found, mut expected) = (Vec::new(), Vec::new());
    for first in 0..6 {
        for second in first..6 {
            found.push(pairs[first * 6 + second]);
            expected.push(20_000.0 * if first == second { 1.0 } else { 2.0 } / 36.0);
        }
    }
    check_counts(&found, &expected);
}

#[test]
fn draws_by_weight_are_in_proportion() {
    let weights = [1.0, 0.0, 2.0, 0.5, 4.0];
    let total: f64 = weights.iter().sum();
    let settings = HopSettings { disjoint: true, ..of_fanouts(&[1]) };
    for replace in [false, true] {
        let mut counts = [0u64; 5];
        let settings = HopSettings { replace, ..settings.clone() };
        many_draws(settings, 5, &Choice::Weighted(weights.to_vec()), |edges| counts[edges[0] as usize] += 1);
        assert_eq!(counts[1], 0, "weight 0");
        let drawn: Vec<usize> = vec![0, 2, 3, 4];
        let found: Vec<u64> = drawn.iter().map(|edge| counts[*edge]).collect();
        let expected: Vec<f64> = drawn.iter().map(|edge| 20_000.0 * weights[*edge] / total).collect();
        check_counts(&found, &expected);
    }
    // Two one after the other, the second among those that remain: in either order.
    let (mut pairs, drawn) = ([[0u64; 5]; 5], [0usize, 2, 3, 4]);
    let settings = HopSettings { fanouts: vec![Fanout::AtMost(2)], ..settings };
    many_draws(settings, 5, &Choice::Weighted(weights.to_vec()), |edges| {
        pairs[edges[0] as usize][edges[1] as usize] += 1;
    });
    let (mut found, mut expected) = (Vec::new(), Vec::new());
    for (place, first) in drawn.iter().enumerate() {
        for second in &drawn[place + 1..] {
            let (a, b) = (weights[*first], weights[*second]);
            found.push(pairs[*first][*second]);
            expected.push(20_000.0 * a * b / total * (1.0 / (total - a) + 1.0 / (total - b)));
        }
    }
    check_counts(&found, &expected);
}

#[test]
fn draws_by_time_are_uniform_among_the_early_ones() {
    // Edges 1, 3, 4 and 6 are not later than 5.
    let times = vec![9, 5, 6, -3, 0, 100, 5];
    let mut counts = [0u64; 7];
    let settings = HopSettings { fanouts: vec![Fanout::AtMost(2)], ..HopSettings::default() };
    let choice = Choice::EdgeTimes(times.clone(), TemporalStrategy::Uniform);
    many_draws(settings.clone(), 7, &choice, |edges| {
        edges.iter().for_each(|edge| counts[*edge as usize] += 1);
    });
    assert_eq!((counts[0], counts[2], counts[5]), (0, 0, 0), "later");
    let found: Vec<u64> = [1, 3, 4, 6].iter().map(|edge| counts[*edge]).collect();
    check_counts(&found, &[10_000.0; 4]);
    let last = Choice::EdgeTimes(times, TemporalStrategy::Last);
    many_draws(settings, 7, &last, |edges| assert_eq!(edges, [1, 6]));
}

/// As a model sees them: whatever is read at a seed is there, also at one that is repeated.
#[test]
fn repeated_seeds_have_the_same_neighbours() {
    let arrays = Arrays::of(&large());
    let seeds = [NodeId(500), NodeId(7), NodeId(500), NodeId(7), NodeId(500)];
    let out = sampled(arrays.csc(), &of_fanouts(&[5, 5]), &Choice::Uniform, &seeds, None);
    assert_eq!(&out.nodes[..5], &seeds);
    let of = |target: u32| -> Vec<(u32, EdgeId)> {
        let edges = out.targets.iter().zip(out.sources.iter().zip(&out.edges));
        edges.filter(|(at, _)| **at == target).map(|(_, (source, edge))| (*source, *edge)).collect()
    };
    assert_eq!((of(0).len(), of(1).len()), (5, 5));
    assert!(of(0) == of(2) && of(0) == of(4) && of(1) == of(3));
    assert!(out.sources.iter().all(|source| ![2, 3, 4].contains(source)), "the first of equal seeds");
    let settings = HopSettings { disjoint: true, ..of_fanouts(&[5, 5]) };
    let out = sampled(arrays.csc(), &settings, &Choice::Uniform, &seeds, None);
    let of = |tree: u32| -> Vec<EdgeId> {
        let edges = out.targets.iter().zip(&out.edges);
        edges.filter(|(target, _)| out.trees[**target as usize] == tree).map(|(_, edge)| *edge).collect()
    };
    assert!(of(0) != of(2) && of(2) != of(4), "trees draw on their own");
}

/// Samples that must never change, a mode each.
#[test]
fn golden_hop_samples_are_as_they_were() {
    use std::fmt::Write;
    let list = |node: u64| {
        let degree = node % 7 + if node.is_multiple_of(10) { 80 } else { 0 };
        (0..degree).map(|slot| (node * 31 + slot * slot * 17 + slot) % 60).collect()
    };
    let arrays = Arrays::of(&(0..60).map(list).collect::<Vec<Vec<u64>>>());
    let edges = arrays.edges.len() as u64;
    let weights = Choice::Weighted((0..edges).map(|edge| (edge * edge % 7) as f64 * 0.1).collect());
    let times: Vec<i64> = (0..edges as i64).map(|edge| edge * edge % 41).collect();
    let uniform = Choice::EdgeTimes(times.clone(), TemporalStrategy::Uniform);
    let last = Choice::EdgeTimes(times, TemporalStrategy::Last);
    let by_node = Choice::NodeTimes((0..60).map(|node| node * 17 % 60).collect(), TemporalStrategy::Uniform);
    let plain = HopSettings { seed: 42, ..of_fanouts(&[3, 2]) };
    let with = |replace, disjoint, edges| HopSettings { replace, disjoint, edges, ..plain.clone() };
    let few = HopSettings { fanouts: plain.fanouts[..1].to_vec(), ..with(false, false, HopEdges::Induced) };
    let mut text = String::new();
    for (name, settings, choice) in [
        ("plain", plain.clone(), &Choice::Uniform),
        ("replace", with(true, false, HopEdges::Directional), &Choice::Uniform),
        ("disjoint", with(false, true, HopEdges::Directional), &Choice::Uniform),
        ("bidirectional", with(false, false, HopEdges::Bidirectional), &Choice::Uniform),
        ("induced", few, &Choice::Uniform),
        ("weighted", plain.clone(), &weights),
        ("weighted, replace", with(true, false, HopEdges::Directional), &weights),
        ("temporal", plain.clone(), &uniform),
        ("temporal, replace", with(true, false, HopEdges::Directional), &uniform),
        ("temporal by node", plain.clone(), &by_node),
        ("last", plain.clone(), &last),
    ] {
        let seeds = [30, 7, 30, 59].map(NodeId);
        let times = matches!(choice, Choice::EdgeTimes(..)).then_some([20, 3, 30, 40]);
        let out = sampled(arrays.csc(), &settings, choice, &seeds, times.as_ref().map(|times| &times[..]));
        let line = |name: &str, numbers: Vec<u64>| {
            let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
            format!("{name}: {}\n", numbers.join(" "))
        };
        let wide = |words: &[u32]| words.iter().map(|word| *word as u64).collect();
        writeln!(text, "# {name}").unwrap();
        text.push_str(&line("nodes", out.nodes.iter().map(|node| node.0).collect()));
        text.push_str(&line("trees", wide(&out.trees)));
        text.push_str(&line("sources", wide(&out.sources)));
        text.push_str(&line("targets", wide(&out.targets)));
        text.push_str(&line("edges", out.edges.iter().map(|edge| edge.0).collect()));
        let hops = |counts: &[usize]| counts.iter().map(|count| *count as u64).collect();
        text.push_str(&line("nodes_by_hop", hops(&out.nodes_by_hop)));
        text.push_str(&line("edges_by_hop", hops(&out.edges_by_hop)));
    }
    assert!(text == include_str!("hops.txt"), "samples changed; they are now:\n{text}");
}
