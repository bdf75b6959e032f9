//! Held-out edges are items of batches, true ends are what a look at every edge finds, and masks what a look at every
//! pair finds, wherever the graph is.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod facts;

use esker_sample::negatives::{
    AllNodes, MaskedPairs, NegativeMask, NegativePool, NegativeSampler, NegativeSettings, Negatives, Side,
};
use esker_sample::order::{Batching, GivenOrder, Sequential};
use esker_sample::{
    Batches, Direction, DiskGraph, Edge, EdgeLookup, EdgeRows, FixedNegatives, HeldOut, LinkBatches,
    Position, Queries, SampleError, Seeds, TrueEnds, TrueEndsRequest, for_each_edge, true_edges,
};
use esker_store::Dataset;
use esker_types::NodeId;
use facts::{Fact, imported, imported_splits, lookups};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

const AT: Position = Position { epoch: 1, batch: 0 };
const PLENTY: u64 = 1 << 30;

fn facts(most: usize) -> impl Strategy<Value = Vec<Fact>> {
    prop::collection::vec((0u64..25, 0u32..3, 0u64..25), 1..most)
}

fn edges_of_graph(dataset: &Dataset) -> Vec<Edge> {
    let mut all = Vec::new();
    for_each_edge(dataset, &mut |edge| all.push(edge)).unwrap();
    all
}

fn rows(dataset: &Dataset, split: HeldOut) -> Vec<Edge> {
    let mut all = Vec::new();
    EdgeRows::open(dataset, split).unwrap().for_each(|edge| all.push(edge)).unwrap();
    all
}

/// A look at every edge.
fn ends(all: &[Edge], edge: &Edge, side: Side) -> Vec<u32> {
    let same = all.iter().filter(|other| match side {
        Side::Target => (other.source, other.relation) == (edge.source, edge.relation),
        Side::Source => (other.target, other.relation) == (edge.target, edge.relation),
    });
    let found: BTreeSet<u32> = same
        .map(|other| match side {
            Side::Target => other.target.0 as u32,
            Side::Source => other.source.0 as u32,
        })
        .collect();
    found.into_iter().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn true_ends_are_what_a_look_at_every_edge_finds(
        train in facts(300), valid in facts(40), test in facts(40), wide_ids: bool, held_out: bool,
        which in 0usize..3,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let dataset = &*imported_splits(directory.path(), [&train, &valid, &test], wide_ids);
        let graph = edges_of_graph(dataset);
        let (valid, test) = (rows(dataset, HeldOut::Valid), rows(dataset, HeldOut::Test));
        let mut all = graph.clone();
        if held_out {
            all.extend(valid.iter().chain(&test));
        }
        let test_rows = EdgeRows::open(dataset, HeldOut::Test).unwrap();
        let (queries, asked) = [
            (Queries::Of(&valid), &valid), (Queries::Split(&test_rows), &test), (Queries::Graph, &graph),
        ][which];
        let request = TrueEndsRequest { dataset, queries, held_out, most_bytes: PLENTY };
        let found = TrueEnds::build(&request).unwrap();
        for side in [Side::Source, Side::Target] {
            for edge in asked {
                prop_assert_eq!(found.of(edge, side).unwrap(), ends(&all, edge, side));
            }
            for edge in &all {
                let knows = asked.iter().any(|query| match side {
                    Side::Target => (query.source, query.relation) == (edge.source, edge.relation),
                    Side::Source => (query.target, query.relation) == (edge.target, edge.relation),
                });
                prop_assert_eq!(found.of(edge, side).is_some(), knows);
            }
        }
        let last = dataset.manifest().nodes.count - 1;
        let backwards = TrueEnds::build(&request).unwrap().renumbered(|node| last - node.0);
        let counts = TrueEnds::counts_until(&request, asked, &|| false).unwrap();
        for (edge, count) in asked.iter().zip(counts) {
            let mut all_ends = 0;
            for side in [Side::Source, Side::Target] {
                let mut expected: Vec<u32> =
                    ends(&all, edge, side).iter().map(|end| last as u32 - end).collect();
                expected.reverse();
                prop_assert_eq!(backwards.of(edge, side).unwrap(), expected);
                all_ends += all.iter().filter(|other| match side {
                    Side::Target => (other.source, other.relation) == (edge.source, edge.relation),
                    Side::Source => (other.target, other.relation) == (edge.target, edge.relation),
                }).count() as u64;
            }
            prop_assert_eq!(count, all_ends);
        }
        // Some true, some not; one twice.
        let mut pairs: Vec<Edge> = valid.iter().chain(&graph).take(9).copied().collect();
        let reversed = |edge: &Edge| Edge { source: edge.target, target: edge.source, ..*edge };
        pairs.extend(graph.iter().take(9).map(reversed).chain(graph.iter().take(1).copied()));
        let every: Vec<Edge> = graph.iter().chain(&valid).chain(&test).copied().collect();
        let expected: Vec<bool> = pairs.iter().map(|pair| every.contains(pair)).collect();
        prop_assert_eq!(true_edges(dataset, &pairs, &|| false).unwrap(), expected);
    }

    #[test]
    fn masks_of_every_kind_are_what_a_look_at_every_pair_finds(
        train in facts(120), picks in prop::collection::vec((0u64..25, 0u64..25, 0u32..3), 1..30),
        relations: bool, source_side: bool, chunks in 1u32..5,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let dataset = imported(directory.path(), &train, relations, false);
        let graph = edges_of_graph(&dataset);
        let nodes = dataset.manifest().nodes.count;
        let side = if source_side { Side::Source } else { Side::Target };
        // Some of the graph, some not.
        let mut edges: Vec<Edge> = picks.iter().map(|(source, target, relation)| Edge {
            source: NodeId(source % nodes), target: NodeId(target % nodes),
            relation: if relations { *relation } else { 0 },
        }).collect();
        edges.extend(graph.iter().take(5));
        let request = TrueEndsRequest {
            dataset: &dataset, queries: Queries::Of(&edges), held_out: false, most_bytes: PLENTY,
        };
        let known = Arc::new(TrueEnds::build(&request).unwrap());
        let settings = NegativeSettings { seed: 3, chunks, uniform: 8, by_degree: 3 };
        for mask in [NegativeMask::None, NegativeMask::Batch, NegativeMask::Graph] {
            let is_masked = |edge: &Edge, node: NodeId, all_nodes: bool| {
                let corrupted = match side {
                    Side::Source => Edge { source: node, ..*edge },
                    Side::Target => Edge { target: node, ..*edge },
                };
                match mask {
                    NegativeMask::None => all_nodes && corrupted == *edge,
                    NegativeMask::Batch => edges.contains(&corrupted),
                    NegativeMask::Graph => corrupted == *edge || graph.contains(&corrupted),
                }
            };
            for lookup in lookups(&dataset, Direction::Incoming) {
                let sampler =
                    NegativeSampler::new(lookup, NegativePool::All, settings).unwrap().with_mask(mask);
                let mut out = Negatives::default();
                sampler.draw(AT, &edges, side, &mut out).unwrap();
                let mut expected = Vec::new();
                for (index, edge) in edges.iter().enumerate() {
                    for (negative, node) in out.nodes[out.of_edge(index)].iter().enumerate() {
                        if is_masked(edge, *node, false) {
                            expected.push((index as u32, negative as u32));
                        }
                    }
                }
                prop_assert_eq!(out.masked_pairs(&edges), expected);
            }
            let all = AllNodes::new(nodes, mask, Some(known.clone())).unwrap();
            let mut out = Negatives::default();
            all.draw(&edges, side, &mut out).unwrap();
            let mut expected = Vec::new();
            for (index, edge) in edges.iter().enumerate() {
                let masked = (0..nodes).filter(|node| is_masked(edge, NodeId(*node), true));
                expected.extend(masked.map(|node| (index as u32, node as u32)));
            }
            prop_assert_eq!(out.masked_pairs(&edges), expected);
            let shape = (out.all_nodes, out.per_chunk, out.chunk_edges, out.nodes.len());
            prop_assert_eq!(shape, (true, nodes as usize, edges.len(), 0));
        }
    }
}

#[test]
fn held_out_edges_are_items_of_batches() {
    let directory = tempfile::tempdir().unwrap();
    let fact = |at: u64| (at % 20, (at % 3) as u32, at * 7 % 20);
    let parts: Vec<Vec<Fact>> =
        [0..100, 100..130, 130..171].map(|range: std::ops::Range<u64>| range.map(fact).collect()).into();
    let dataset = imported_splits(directory.path(), [&parts[0], &parts[1], &parts[2]], false);
    let lookup = lookups(&dataset, Direction::Incoming).remove(0);
    let mut identities = BTreeSet::new();
    for (split, count) in [(HeldOut::Valid, 30), (HeldOut::Test, 41)] {
        let expected = rows(&dataset, split);
        assert_eq!(expected.len(), count);
        let seeds = Seeds::Rows(Arc::new(EdgeRows::open(&dataset, split).unwrap()));
        assert!(seeds.are_edges() && seeds.len() == count as u64 && seeds.node(0).is_err());
        let order = Sequential(Batching::new(count as u64, 16, false).unwrap());
        let batches = LinkBatches::new(order, seeds.clone(), lookup.clone()).unwrap();
        let mut found = Vec::new();
        let mut nodes = Vec::new();
        for batch in 0..batches.count(0) {
            let at = Position { epoch: 0, batch };
            let edges = batches.link(at).unwrap().edges;
            batches.seeds(at, &mut nodes).unwrap();
            let ends: Vec<NodeId> = edges.iter().flat_map(|edge| [edge.source, edge.target]).collect();
            assert_eq!(nodes, ends);
            found.extend(edges);
        }
        assert_eq!(found, expected);
        identities.insert(batches.identity());
        identities.insert(batches.dropping_targets().identity());
        // In any order, and with repeats; a row after the last is refused.
        let items = vec![vec![7, 8, 9, 3, 3, 0, count as u64 - 1], vec![count as u64]];
        let batches = LinkBatches::new(GivenOrder(items.clone()), seeds, lookup.clone()).unwrap();
        let picked: Vec<Edge> = items[0].iter().map(|item| expected[*item as usize]).collect();
        assert_eq!(batches.link(Position { epoch: 0, batch: 0 }).unwrap().edges, picked);
        let said = batches.link(Position { epoch: 0, batch: 1 }).unwrap_err().to_string();
        assert!(said.contains(&format!("seed {count}, there are {count} seeds")), "{said}");
        assert!(FixedNegatives::open(&dataset, split, Side::Target).unwrap().is_none());
        assert!(EdgeRows::shared_negatives(&dataset, split).unwrap().is_none());
    }
    assert_eq!(identities.len(), 4);
}

#[test]
fn true_edges_of_a_hub_take_no_memory_in_a_batch() {
    let directory = tempfile::tempdir().unwrap();
    let facts: Vec<Fact> = (1..=300).map(|source| (source, 0, 0)).collect();
    let dataset = imported(directory.path(), &facts, true, false);
    let (edges, nodes) = (edges_of_graph(&dataset), dataset.manifest().nodes.count);
    let request =
        TrueEndsRequest { dataset: &dataset, queries: Queries::Graph, held_out: false, most_bytes: PLENTY };
    let known = Arc::new(TrueEnds::build(&request).unwrap());
    for (mask, pairs) in
        [(NegativeMask::Graph, 90_000), (NegativeMask::Batch, 90_000), (NegativeMask::None, 300)]
    {
        let mut out = Negatives::default();
        AllNodes::new(nodes, mask, Some(known.clone()))
            .unwrap()
            .draw(&edges, Side::Source, &mut out)
            .unwrap();
        assert_eq!(out.masked, MaskedPairs::default());
        assert_eq!(out.masked_pairs(&edges).len(), pairs, "{mask}");
    }
    // Negatives that are drawn have a bit each, in whole words.
    assert_eq!(MaskedPairs::bytes_for(1000, 500), 64_000);
}

#[test]
fn all_nodes_are_named_by_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = imported(directory.path(), &[(0, 0, 1), (1, 0, 2), (0, 0, 2)], false, false);
    let lookup = lookups(&dataset, Direction::Incoming).remove(0);
    let order = GivenOrder(vec![vec![0, 2]]);
    let batches = LinkBatches::new(order, Seeds::AllEdges(3), lookup).unwrap();
    let plain = batches.identity();
    let all = AllNodes::new(40, NegativeMask::Batch, None).unwrap();
    let batches = batches.with_negatives(Side::Target, all);
    let link = batches.link(AT).unwrap();
    let mut nodes = Vec::new();
    batches.seeds(AT, &mut nodes).unwrap();
    assert_eq!((nodes.len(), link.targets_start, link.sources_start), (4, 4, 4));
    assert!(link.targets.all_nodes && !link.sources.all_nodes);
    assert_eq!(link.negatives_of(1, Side::Target), 4..4);
    assert_ne!(batches.identity(), plain);
    // Edges by id are (0, 1), (0, 2), (1, 2).
    assert_eq!(link.targets.masked_pairs(&link.edges), [(0, 1), (1, 2)]);
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = imported(directory.path(), &[(0, 0, 1)], false, false);
    let said = |error: SampleError| error.to_string();
    let error = said(EdgeRows::open(&dataset, HeldOut::Test).unwrap_err());
    assert!(error.contains("has no edge split") && error.contains("--hold-out"), "{error}");
    assert!(FixedNegatives::open(&dataset, HeldOut::Test, Side::Source).is_err());
    let error = said(AllNodes::new(7, NegativeMask::Graph, None).err().unwrap());
    assert!(error.contains("mask `batch`"), "{error}");
    let error = said(AllNodes::new((1 << 32) + 1, NegativeMask::None, None).err().unwrap());
    assert!(error.contains("2^32"), "{error}");
    let all = AllNodes::new(7, NegativeMask::None, None).unwrap();
    let edge = Edge { source: NodeId(3), target: NodeId(7), relation: 0 };
    assert!(
        said(all.draw(&[edge], Side::Target, &mut Negatives::default()).unwrap_err())
            .contains("nodes 0 to 6")
    );
    assert!("some".parse::<NegativeMask>().unwrap_err().contains("none, batch or graph"));
    assert_eq!("batch".parse::<NegativeMask>().unwrap(), NegativeMask::Batch);
}

#[test]
fn an_index_of_true_ends_stays_within_its_memory() {
    let directory = tempfile::tempdir().unwrap();
    let train: Vec<Fact> = (0..900).map(|at| (at % 30, 0, at / 30)).collect();
    let dataset = &*imported_splits(directory.path(), [&train, &train[..1], &train[5..9]], false);
    let queries = rows(dataset, HeldOut::Test);
    let build = |most_bytes| {
        let queries = Queries::Of(&queries);
        TrueEnds::build(&TrueEndsRequest { dataset, queries, held_out: true, most_bytes })
    };
    let bytes = build(PLENTY).unwrap().bytes();
    // 4 sources and 1 target with 30 ends each.
    assert_eq!(bytes, 5 * 16 + 7 * 8 + 150 * 4);
    // Until duplicates are gone, edges that are true twice take room: 4 of the sources, and 5 of the target.
    let needed = bytes + 9 * 4;
    assert_eq!(build(needed).unwrap(), build(PLENTY).unwrap());
    let said = build(needed - 1).unwrap_err().to_string();
    assert!(said.contains("true ends of 5 queries need"), "{said}");
}

#[test]
fn an_index_of_true_ends_is_stopped_while_it_is_built() {
    let directory = tempfile::tempdir().unwrap();
    let facts: Vec<Fact> = (0..300).map(|at| (at % 30, 0, at / 30)).collect();
    let dataset = &*imported_splits(directory.path(), [&facts, &facts[..9], &facts[5..9]], false);
    let queries = rows(dataset, HeldOut::Test);
    let request = |queries| TrueEndsRequest { dataset, queries, held_out: true, most_bytes: PLENTY };
    for queries in [Queries::Of(&queries), Queries::Graph] {
        let asked = std::cell::Cell::new(0);
        let stop = |after: u32| {
            asked.set(asked.get() + 1);
            asked.get() > after
        };
        let whole = TrueEnds::build_until(&request(queries), &|| stop(u32::MAX)).unwrap();
        assert_eq!(whole, TrueEnds::build(&request(queries)).unwrap());
        // Every pass over the edges can be ended.
        for after in 0..asked.take() {
            asked.set(0);
            let found = TrueEnds::build_until(&request(queries), &|| stop(after));
            assert!(matches!(found, Err(SampleError::Stopped)), "{after}");
        }
    }
}

/// A dataset with the committed splits of an OGB link dataset.
fn ogbl(directory: &std::path::Path, form: &str) -> Dataset {
    let at = |name: &str| directory.join(name);
    std::fs::create_dir_all(at("raw")).unwrap();
    std::fs::create_dir_all(at("split/time")).unwrap();
    std::fs::write(at("raw/edge.csv"), "0,1\n2,1\n5,4\n").unwrap();
    std::fs::write(at("raw/num-node-list.csv"), "10\n").unwrap();
    if form == "fact" {
        std::fs::write(at("raw/edge_reltype.csv"), "0\n2\n1\n").unwrap();
    }
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../import/tests/fixtures/ogbl");
    for split in ["valid", "test"] {
        let name = format!("{form}.{split}.pt");
        std::fs::copy(fixtures.join(name), at(&format!("split/time/{split}.pt"))).unwrap();
    }
    let from = Some(directory.to_path_buf());
    let request = esker_import::Request { format: "ogb".into(), from, ..Default::default() };
    let target = directory.join("to");
    let budget = esker_types::Budget { host_bytes: 64 << 20 };
    let progress = &esker_types::Silent;
    let job = esker_import::ImportJob { target: &target, budget, overwrite: true, progress };
    esker_import::import(&request, &job).unwrap();
    Dataset::open(&target).unwrap()
}

#[test]
fn fixed_negatives_follow_their_edges_in_any_order() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = Arc::new(ogbl(directory.path(), "fact"));
    let lookup = {
        let graph = DiskGraph::open(&dataset, Direction::Incoming).unwrap();
        Arc::new(graph) as Arc<dyn EdgeLookup>
    };
    let rows = Seeds::Rows(Arc::new(EdgeRows::open(&dataset, HeldOut::Valid).unwrap()));
    let fixed = |side| Arc::new(FixedNegatives::open(&dataset, HeldOut::Valid, side).unwrap().unwrap());
    assert_eq!(fixed(Side::Source).per_edge(), 2);
    let plain = LinkBatches::new(GivenOrder(vec![vec![1, 0]]), rows, lookup).unwrap();
    let without = plain.identity();
    let batches = plain
        .with_negatives(Side::Target, fixed(Side::Target))
        .with_negatives(Side::Source, fixed(Side::Source));
    assert_ne!(batches.identity(), without);
    let link = batches.link(AT).unwrap();
    let nodes = |ids: [u64; 4]| ids.map(NodeId).to_vec();
    // Row 1 is first.
    assert_eq!(
        (link.targets.nodes.clone(), link.sources.nodes.clone()),
        (nodes([9, 8, 8, 9]), nodes([3, 0, 1, 2]))
    );
    assert!(link.targets.masked_pairs(&link.edges).is_empty() && link.targets.chunk_edges == 1);
    let mut seeds = Vec::new();
    batches.seeds(AT, &mut seeds).unwrap();
    assert_eq!(seeds[link.negatives_of(1, Side::Source)], nodes([3, 0, 1, 2])[2..]);
    assert_eq!(seeds[link.negatives_of(0, Side::Target)], nodes([9, 8, 8, 9])[..2]);
    assert!(EdgeRows::shared_negatives(&dataset, HeldOut::Valid).unwrap().is_none());
}

#[test]
fn shared_negatives_are_items_too() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = ogbl(directory.path(), "edge");
    let shared = EdgeRows::shared_negatives(&dataset, HeldOut::Valid).unwrap().unwrap();
    let mut edges = Vec::new();
    shared.edges(&[1, 0], &mut edges).unwrap();
    let ends: Vec<_> = edges.iter().map(|edge| (edge.source.0, edge.target.0, edge.relation)).collect();
    assert_eq!(ends, [(9, 8, 0), (8, 9, 0)]);
    assert!(FixedNegatives::open(&dataset, HeldOut::Valid, Side::Target).unwrap().is_none());
}
