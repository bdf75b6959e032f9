//! A sample that leaves out the edges of its batch is the sample of a graph without them, wherever the graph is.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod facts;
mod naive;

use esker_sample::bulk::{Bulk, positions};
use esker_sample::order::GivenOrder;
use esker_sample::{
    AnyTopology, Batches, Carry, Direction, DiskGraph, Edge, EdgeLookup, Fanout, Form, InMemory, LinkBatches,
    OnDisk, Position, Sample, Sampler, Seeds, Settings, StoredId, Topology, for_each_edge,
};
use esker_store::Dataset;
use esker_types::{EdgeId, NodeId};
use facts::{Fact, imported};
use naive::Reference;
use proptest::prelude::*;
use std::sync::Arc;

const AT: Position = Position { epoch: 0, batch: 0 };
const PLENTY: u64 = 1 << 30;

/// The graph without some edges: each remaining edge with its id.
fn remaining(all: &[Edge], dropped: &[Edge]) -> Vec<(EdgeId, Edge)> {
    let is_dropped = |edge: &Edge| {
        let reverse = Edge { source: edge.target, target: edge.source, ..*edge };
        dropped.contains(edge) || dropped.contains(&reverse)
    };
    let ids = (0..).map(EdgeId).zip(all.iter().copied());
    ids.filter(|(_, edge)| !is_dropped(edge)).collect()
}

/// The sample by the book, of the graph without the edges of the batch.
fn expected(all: &[Edge], nodes: u64, batch: &[Edge], how: &Settings, direction: Direction) -> Sample {
    let rest = remaining(all, batch);
    let mut lists = vec![Vec::new(); nodes as usize];
    rest.iter().for_each(|(_, edge)| lists[edge.target.index()].push(edge.source.0));
    let relations: Vec<u32> = rest.iter().map(|(_, edge)| edge.relation).collect();
    let seeds: Vec<NodeId> = batch.iter().flat_map(|edge| [edge.source, edge.target]).collect();
    let mut sample = Reference::new(&lists, Some(&relations), direction).sample(how, AT, &seeds);
    for block in &mut sample.blocks {
        block.edges.iter_mut().for_each(|edge| *edge = rest[edge.0 as usize].0);
    }
    sample
}

fn sampled<T: Topology>(topology: T, batches: &dyn Batches, how: &Settings, threads: usize) -> Sample {
    let mut sampler = Sampler::new(topology, how.clone(), PLENTY).unwrap().with_threads(threads);
    let (mut seeds, mut sample) = (Vec::new(), Sample::default());
    batches.seeds(AT, &mut seeds).unwrap();
    sampler.begin(batches, AT).unwrap();
    sampler.sample(AT, &seeds, &mut sample).unwrap();
    sample
}

/// Samples in memory, on disk, with one thread and two, and in bulk.
fn check<W: StoredId>(
    memory: &InMemory<W>,
    dataset: &Arc<Dataset>,
    batch: Vec<Edge>,
    how: &Settings,
    direction: Direction,
) where
    InMemory<W>: EdgeLookup + Topology,
    OnDisk<W>: Topology,
{
    let mut all = Vec::new();
    for_each_edge(dataset, &mut |edge| all.push(edge)).unwrap();
    let items = (0..batch.len() as u64).collect();
    let seeds = Arc::new(Seeds::Edges(batch.clone()));
    let batches = LinkBatches::new(GivenOrder(vec![items]), seeds, memory).unwrap();
    let nodes = dataset.manifest().nodes.count;
    let kept = sampled(memory, &batches, how, 1);
    let batches = batches.dropping_targets();
    let expected = expected(&all, nodes, &batch, how, direction);
    assert_eq!(sampled(memory, &batches, how, 1), expected);
    assert_eq!(sampled(memory, &batches, how, 2), expected);
    let graph = Arc::new(DiskGraph::open(dataset, direction).unwrap());
    assert_eq!(sampled(OnDisk::<W>::new(graph, None), &batches, how, 1), expected);
    let bulk = Bulk { graph: memory, batches: &batches, settings: how, threads: 2, most_bytes: PLENTY };
    let mut found = Sample::default();
    bulk.run(positions(&batches, AT, 1), |_, sample| {
        found = sample.clone();
        Ok::<(), esker_sample::SampleError>(())
    })
    .unwrap();
    assert_eq!(found, expected);
    // Another batch than the one begun with leaves nothing out.
    let mut sampler = Sampler::new(memory, how.clone(), PLENTY).unwrap();
    let mut nodes = Vec::new();
    batches.seeds(AT, &mut nodes).unwrap();
    let mut sample = Sample::default();
    sampler.sample(AT, &nodes, &mut sample).unwrap();
    assert_eq!(sample, kept);
}

fn fanouts() -> impl Strategy<Value = Vec<Fanout>> {
    let one = prop_oneof![3 => (1u32..6).prop_map(Fanout::AtMost), 1 => Just(Fanout::All)];
    prop::collection::vec(one, 0..4)
}

fn facts() -> impl Strategy<Value = Vec<Fact>> {
    prop::collection::vec((0u64..40, 0u32..3, 0u64..40), 1..500)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn a_sample_without_target_edges_is_that_of_the_graph_without_them(
        facts in facts(), picks in prop::collection::vec((any::<u64>(), any::<bool>()), 1..25),
        fanouts in fanouts(), form in prop_oneof![Just(Form::Dense), Just(Form::Layered), Just(Form::Shadow)],
        (relations, wide_ids, degrees) in any::<(bool, bool, bool)>(), direction in 0usize..3, seed: u64,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let dataset = imported(directory.path(), &facts, relations, wide_ids);
        let direction = [Direction::Incoming, Direction::Outgoing, Direction::Both][direction];
        let mut all = Vec::new();
        for_each_edge(&dataset, &mut |edge| all.push(edge)).unwrap();
        // Edges of the graph, some turned round: then their reverses are in it.
        let batch: Vec<Edge> = picks.iter().map(|(pick, turned)| {
            let edge = all[(pick % all.len() as u64) as usize];
            match turned {
                true => Edge { source: edge.target, target: edge.source, ..edge },
                false => edge,
            }
        }).collect();
        // Without hops, degrees are those of the whole graph.
        let degrees = degrees && !fanouts.is_empty();
        let carry = Carry { positions: false, edges: true, relations, degrees };
        let how = Settings { seed, fanouts, form, carry };
        match AnyTopology::load(&dataset, direction, PLENTY).unwrap() {
            AnyTopology::Narrow(memory) => check(&memory, &dataset, batch, &how, direction),
            AnyTopology::Wide(memory) => check(&memory, &dataset, batch, &how, direction),
        }
    }
}

#[test]
fn without_relations_every_edge_between_the_ends_is_left_out() {
    let lists = vec![vec![1, 1, 2], vec![0, 2], vec![]];
    let graph = InMemory::<u32>::from_adjacency(&lists, None);
    let edge = Edge { source: NodeId(1), target: NodeId(0), relation: 4 };
    let seeds = Seeds::Edges(vec![edge]);
    let batches = LinkBatches::new(GivenOrder(vec![vec![0]]), seeds, &graph).unwrap().dropping_targets();
    let carry = Carry { edges: true, ..Carry::default() };
    let how = Settings { seed: 1, fanouts: vec![Fanout::All], form: Form::Dense, carry };
    let sample = sampled(&graph, &batches, &how, 1);
    assert_eq!(sample.blocks[0].edges, [EdgeId(4), EdgeId(2)]);
    assert_eq!(sample.degrees, [1, 1]);
}

#[test]
fn positions_cannot_be_carried_where_edges_are_left_out() {
    let graph = InMemory::<u32>::from_adjacency(&[vec![1], vec![]], None);
    let seeds = Seeds::AllEdges(1);
    let batches = LinkBatches::new(GivenOrder(vec![vec![0]]), seeds, &graph).unwrap();
    let carry = Carry { positions: true, ..Carry::default() };
    let how = Settings { seed: 1, fanouts: vec![Fanout::All], form: Form::Dense, carry };
    let mut sampler = Sampler::new(&graph, how, PLENTY).unwrap();
    sampler.begin(&batches, AT).unwrap();
    let said = sampler.begin(&batches.dropping_targets(), AT).unwrap_err().to_string();
    assert!(said.contains("carry edge ids"), "{said}");
}
