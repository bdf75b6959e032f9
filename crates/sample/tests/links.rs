//! Batches of edges and their negatives are those of the graph in memory, wherever the graph is and whatever they are
//! drawn from; a part of a graph is asked for no more than it holds.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod facts;

use esker_sample::negatives::{
    ListedNodes, NegativeNodes, NegativePool, NegativeSampler, NegativeSettings, Negatives, PoolOfBatch, Side,
};
use esker_sample::order::{Batching, Shuffled};
use esker_sample::{
    Batches, Direction, DiskGraph, Edge, EdgeLookup, InMemory, IncomingNeighbours, LinkBatch, LinkBatches,
    Position, Queries, Result, SampleError, Seeds, Sources, Targets, TrueEnds, TrueEndsRequest,
};
use esker_store::file;
use esker_types::{EdgeId, NodeId};
use facts::{imported, lookups};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::{fmt, fs};

/// Residents that change every other batch.
struct Residents(Vec<Arc<Vec<NodeId>>>, Arc<dyn EdgeLookup>);

impl fmt::Debug for Residents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl PoolOfBatch for Residents {
    fn pool(&self, at: Position) -> Result<Option<Arc<dyn NegativeNodes>>> {
        let nodes = self.0[(at.epoch + at.batch / 2) as usize % self.0.len()].clone();
        Ok(Some(Arc::new(ListedNodes::new(&self.1, nodes, true)?)))
    }

    fn identity(&self) -> String {
        format!("{:?}", self.0)
    }
}

fn link(
    graph: Arc<dyn EdgeLookup>,
    seeds: &Arc<Seeds>,
    pools: &[NegativePool; 2],
    settings: NegativeSettings,
    at: Position,
) -> Result<(LinkBatch, Vec<NodeId>, String)> {
    let order = Shuffled { batching: Batching::new(seeds.len(), 7, false)?, seed: 3 };
    let negatives = |pool: &NegativePool| NegativeSampler::new(graph.clone(), pool.clone(), settings);
    let batches = LinkBatches::new(order, seeds.clone(), graph.clone())?
        .with_negatives(Side::Target, negatives(&pools[0])?)
        .with_negatives(Side::Source, negatives(&pools[1])?);
    let (batches, mut nodes): (Arc<dyn Batches>, _) = (Arc::new(batches), Vec::new());
    batches.seeds(at, &mut nodes)?;
    match batches.targets(at)? {
        Targets::Links(link) => Ok((Arc::unwrap_or_clone(link), nodes, batches.identity())),
        Targets::Nodes => panic!("edges are the items"),
    }
}

/// One pool of nodes as it stands in a `Vec`, and others by batch.
fn pools(picks: &[u64], graph: &Arc<dyn EdgeLookup>) -> Vec<NegativePool> {
    let nodes = graph.node_count();
    let listed =
        |skip: usize| -> Vec<NodeId> { picks.iter().skip(skip).map(|pick| NodeId(pick % nodes)).collect() };
    let residents = Residents(vec![Arc::new(listed(0)), Arc::new(listed(1))], graph.clone());
    vec![NegativePool::All, NegativePool::Nodes(listed(0)), NegativePool::PerBatch(Arc::new(residents))]
}

/// Whether negatives of both sides are masked.
fn has_masks(link: &LinkBatch) -> bool {
    [&link.targets, &link.sources].iter().all(|side| !side.masked_pairs(&link.edges).is_empty())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn links_on_disk_are_those_in_memory(
        facts in prop::collection::vec((0u64..40, 0u32..4, 0u64..40), 1..500),
        picks in prop::collection::vec(any::<u64>(), 2..30),
        (relations, wide_ids, both, all_edges) in any::<(bool, bool, bool, bool)>(),
        (seed, chunks, uniform, by_degree) in (any::<u64>(), 1u32..5, 0u32..8, 0u32..8),
        (epoch, batch) in (0u64..4, 0u64..6),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let dataset = imported(directory.path(), &facts, relations, wide_ids);
        let direction = if both { Direction::Both } else { Direction::Incoming };
        let lookups = lookups(&dataset, direction);
        let (nodes, edges) = (lookups[0].node_count(), lookups[0].edge_count());
        let seeds = match all_edges {
            true => Seeds::AllEdges(edges),
            // Some of the graph, some not.
            false => Seeds::Edges(picks.iter().map(|pick| Edge {
                source: NodeId(pick % nodes), target: NodeId(pick / 64 % nodes), relation: (pick % 3) as u32,
            }).collect()),
        };
        let seeds = Arc::new(seeds);
        let at = Position { epoch, batch: batch % seeds.len().div_ceil(7) };
        let settings = NegativeSettings { seed, chunks, uniform, by_degree };
        let pools = pools(&picks, &lookups[0]);
        for targets in &pools {
            for sources in &pools {
                let pair = [targets.clone(), sources.clone()];
                let mut found = lookups.iter().map(|graph| {
                    link(graph.clone(), &seeds, &pair, settings, at).map_err(|error| error.to_string())
                });
                let expected = found.next().unwrap();
                for found in found {
                    prop_assert_eq!(&found, &expected);
                }
            }
        }
    }
}

#[test]
fn a_pool_by_batch_draws_what_a_pool_of_its_nodes_draws() {
    let lists: Vec<Vec<u64>> = (0..40u64).map(|node| (0..node % 9).map(|at| at * 4 + 1).collect()).collect();
    let graph: Arc<dyn EdgeLookup> = Arc::new(InMemory::<u32>::from_adjacency(&lists, None));
    let seeds = Arc::new(Seeds::AllEdges(graph.edge_count()));
    let settings = NegativeSettings { seed: 1, chunks: 2, uniform: 4, by_degree: 3 };
    let residents = [vec![3, 8, 15, 15], vec![22, 31], vec![0, 39, 7]];
    let residents =
        residents.map(|nodes: Vec<u64>| Arc::new(nodes.into_iter().map(NodeId).collect::<Vec<_>>()));
    let by_batch = NegativePool::PerBatch(Arc::new(Residents(residents.to_vec(), graph.clone())));
    for batch in 0..10 {
        let at = Position { epoch: 1, batch };
        let nodes = residents[(1 + batch / 2) as usize % 3].to_vec();
        let draw = |pool: &NegativePool| {
            link(graph.clone(), &seeds, &[pool.clone(), pool.clone()], settings, at).unwrap()
        };
        let (found, expected) = (draw(&by_batch), draw(&NegativePool::Nodes(nodes.clone())));
        assert_eq!((&found.0, &found.1), (&expected.0, &expected.1));
        assert!(found.0.targets.nodes.iter().all(|node| nodes.contains(node)));
        assert_ne!(found.2, expected.2);
    }
    let other = NegativePool::PerBatch(Arc::new(Residents(residents[1..].to_vec(), graph.clone())));
    let identity = |pool| NegativeSampler::new(&graph, pool, settings).unwrap().identity();
    assert_ne!(identity(by_batch.clone()), identity(other));
    // What cannot be drawn from is refused where it is met.
    let refused = |nodes: &[u64]| {
        let nodes = Arc::new(nodes.iter().copied().map(NodeId).collect());
        let sampler = NegativeSampler::new(
            &graph,
            NegativePool::PerBatch(Arc::new(Residents(vec![nodes], graph.clone()))),
            settings,
        )
        .unwrap();
        let at = Position { epoch: 0, batch: 0 };
        sampler.draw_nodes(at, 5, Side::Source, &mut Vec::new()).unwrap_err().to_string()
    };
    assert!(refused(&[]).contains("0 nodes"));
    assert!(refused(&[0, 9]).contains("2 nodes with 0 incoming edges"));
    assert!(refused(&[1, 40]).contains("nodes 0 to 39"));
}

/// The part of a graph whose targets are below a bound.
struct Part {
    graph: InMemory<u32>,
    bound: u64,
}

impl Part {
    fn check(&self, nodes: &[NodeId]) -> Result<()> {
        match nodes.iter().find(|node| node.0 >= self.bound) {
            Some(node) => Err(SampleError::NotResident { node: node.0 }),
            None => Ok(()),
        }
    }
}

impl EdgeLookup for Part {
    fn node_count(&self) -> u64 {
        self.graph.node_count()
    }

    fn edge_count(&self) -> u64 {
        self.graph.edge_count()
    }

    fn has_incoming(&self) -> bool {
        true
    }

    fn edges_by_id(&self, ids: &[EdgeId], out: &mut Vec<Edge>) -> Result<()> {
        self.graph.edges_by_id(ids, out)?;
        self.check(&out.iter().map(|edge| edge.target).collect::<Vec<_>>())
    }

    fn in_degrees(&self, nodes: &[NodeId], out: &mut Vec<u64>) -> Result<()> {
        self.check(nodes)?;
        self.graph.in_degrees(nodes, out)
    }

    /// Entry by entry: adjacency may come in any number of pieces.
    fn incoming(&self, nodes: &[NodeId], take: &mut dyn FnMut(usize, IncomingNeighbours<'_>)) -> Result<()> {
        self.check(nodes)?;
        self.graph.incoming(nodes, &mut |at, adjacency| {
            let Sources::Narrow(sources) = adjacency.sources else { panic!("narrow ids") };
            for (entry, source) in sources.iter().enumerate() {
                let relations = adjacency.relations.map(|relations| &relations[entry..=entry]);
                take(at, IncomingNeighbours { sources: Sources::Narrow(&[*source]), relations });
            }
        })
    }
}

#[test]
fn a_part_of_a_graph_is_asked_for_residents_only() {
    let lists: Vec<Vec<u64>> =
        (0..40u64).map(|node| (0..node % 9 * 2).map(|at| at / 2 * 4 + 1).collect()).collect();
    let relations = (0..lists.concat().len() as u32).map(|edge| edge % 2).collect();
    let whole = InMemory::<u32>::from_adjacency(&lists, Some(relations));
    let part: Arc<dyn EdgeLookup> = Arc::new(Part { graph: whole.clone(), bound: 20 });
    let whole: Arc<dyn EdgeLookup> = Arc::new(whole);
    let settings = NegativeSettings { seed: 1, chunks: 2, uniform: 6, by_degree: 6 };
    let residents = || NegativePool::Nodes((0..20).map(NodeId).collect());
    let pools = [residents(), residents()];
    let resident_edges = lists[..20].iter().map(|list| list.len() as u64).sum();
    let seeds = Arc::new(Seeds::AllEdges(resident_edges));
    for batch in 0..resident_edges / 7 {
        let at = Position { epoch: 0, batch };
        let found = link(part.clone(), &seeds, &pools, settings, at).unwrap();
        assert_eq!(found, link(whole.clone(), &seeds, &pools, settings, at).unwrap());
        assert!(has_masks(&found.0));
    }
    // By degree over all nodes: the default way from edges to their targets.
    let all = [NegativePool::All, NegativePool::All];
    let at = Position { epoch: 0, batch: 0 };
    let said = link(part, &seeds, &all, settings, at).unwrap_err().to_string();
    assert!(said.contains("is not resident"), "{said}");
}

#[test]
fn an_adjacency_longer_than_memory_allows_comes_in_pieces() {
    let directory = tempfile::tempdir().unwrap();
    // Node 1 has three pieces, every other node one.
    let mut facts: Vec<(u64, u32, u64)> = (0..300_000).map(|at| (at % 40, 0, 1)).collect();
    facts.extend((0..40).map(|node| (node, 0, (node * 7) % 40)));
    let dataset = imported(directory.path(), &facts, false, false);
    let lookups = lookups(&dataset, Direction::Incoming);
    let nodes: Vec<NodeId> = (0..40).map(NodeId).collect();
    let read = |graph: &dyn EdgeLookup| {
        let (mut all, mut pieces) = (vec![Vec::new(); 40], 0);
        graph
            .incoming(&nodes, &mut |at, adjacency| {
                pieces += 1;
                match adjacency.sources {
                    Sources::Narrow(sources) => all[at].extend(sources.iter().map(|source| *source as u64)),
                    Sources::Wide(sources) => all[at].extend_from_slice(sources),
                }
            })
            .unwrap();
        (all, pieces)
    };
    let (expected, _) = read(&lookups[0]);
    for graph in &lookups[1..] {
        let (found, pieces) = read(graph);
        assert!(found == expected && pieces == 42, "{pieces} pieces");
    }
    let settings = NegativeSettings { seed: 1, chunks: 1, uniform: 5, by_degree: 2 };
    let seeds = Arc::new(Seeds::AllEdges(dataset.manifest().edges.count));
    let at = Position { epoch: 0, batch: 9 };
    let found = lookups.iter().map(|graph| {
        link(graph.clone(), &seeds, &[NegativePool::All, NegativePool::All], settings, at).unwrap()
    });
    let found: Vec<_> = found.collect();
    assert!(found[1] == found[0] && found[2] == found[0] && has_masks(&found[0].0));
}

#[test]
fn outgoing_adjacency_and_unknown_ids_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = imported(directory.path(), &[(0, 0, 1), (1, 0, 2)], false, false);
    for direction in [Direction::Incoming, Direction::Outgoing] {
        for graph in lookups(&dataset, direction) {
            let outgoing = direction == Direction::Outgoing;
            assert_eq!(graph.has_incoming(), !outgoing);
            let node = if outgoing { NodeId(1) } else { NodeId(40) };
            let edge = if outgoing { EdgeId(1) } else { EdgeId(2) };
            let said = if outgoing { "incoming adjacency" } else { "nodes 0 to 39" };
            for error in [
                graph.in_degrees(&[node], &mut Vec::new()).unwrap_err(),
                graph.incoming(&[node], &mut |_, _| {}).unwrap_err(),
            ] {
                assert!(error.to_string().contains(said), "{error}");
            }
            for error in [
                graph.edges_by_id(&[edge], &mut Vec::new()).unwrap_err(),
                graph.targets_by_id(&[edge], &mut Vec::new()).unwrap_err(),
            ] {
                assert!(error.to_string().contains("of 2 edges"), "{error}");
            }
        }
    }
}

#[test]
fn frequencies_are_those_of_both_queries_of_an_edge() {
    let directory = tempfile::tempdir().unwrap();
    let facts: Vec<(u64, u32, u64)> = (0..300).map(|at| (at % 37, at as u32 % 3, at * at % 11)).collect();
    let dataset = imported(directory.path(), &facts, true, false);
    let request =
        TrueEndsRequest { dataset: &dataset, queries: Queries::Graph, held_out: false, most_bytes: 1 << 20 };
    let known = Arc::new(TrueEnds::build(&request).unwrap());
    let graph = lookups(&dataset, Direction::Incoming).swap_remove(0);
    let count = graph.edge_count();
    let order = Shuffled { batching: Batching::new(count, 50, false).unwrap(), seed: 3 };
    let batches = LinkBatches::new(order, Seeds::AllEdges(count), graph).unwrap().counting(known);
    let links: Vec<LinkBatch> =
        (0..batches.count(0)).map(|batch| batches.link(Position { epoch: 0, batch }).unwrap()).collect();
    let all: Vec<Edge> = links.iter().flat_map(|link| link.edges.clone()).collect();
    assert_eq!(all.len() as u64, count);
    let all: BTreeSet<Edge> = all.into_iter().collect();
    for link in &links {
        for (edge, found) in link.edges.iter().zip(&link.frequencies) {
            let same = |other: &&Edge| other.relation == edge.relation;
            let by_source = all.iter().filter(same).filter(|other| other.source == edge.source).count();
            let by_target = all.iter().filter(same).filter(|other| other.target == edge.target).count();
            assert_eq!(*found as usize, by_source + by_target, "{edge:?}");
        }
        assert_eq!(link.frequencies.len(), link.edges.len());
    }
}

#[test]
fn damaged_adjacency_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let facts: Vec<(u64, u32, u64)> = (0..300).map(|at| (at % 37, at as u32 % 3, at % 7)).collect();
    let dataset = imported(directory.path(), &facts, true, false);
    for name in [file::EDGE_RELATION, file::IN_NEIGHBOURS] {
        let path = dataset.array(name).unwrap().path().to_path_buf();
        let mut bytes = fs::read(&path).unwrap();
        bytes[4096..4096 + 4 * dataset.manifest().edges.count as usize].fill(0xff);
        fs::write(&path, bytes).unwrap();
        let graph = DiskGraph::open(&dataset, Direction::Incoming).unwrap();
        let settings = NegativeSettings { seed: 1, chunks: 1, uniform: 5, by_degree: 2 };
        let sampler = NegativeSampler::new(&graph, NegativePool::All, settings).unwrap();
        let (at, edge) =
            (Position { epoch: 0, batch: 0 }, Edge { source: NodeId(0), target: NodeId(1), relation: 0 });
        for error in [
            graph.edges_by_id(&[EdgeId(5)], &mut Vec::new()).unwrap_err(),
            sampler.draw(at, &[edge; 4], Side::Source, &mut Negatives::default()).unwrap_err(),
        ] {
            assert!(error.to_string().contains(name) && error.to_string().contains("below"), "{error}");
        }
    }
}
