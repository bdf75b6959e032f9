//! Batches of steps over partitions, and what they see: the resident nodes and the edges between them.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_sample::negatives::{
    ListedNodes, NegativeMask, NegativeNodes, NegativePool, NegativeSampler, NegativeSettings, Negatives,
    PoolOfBatch, Side,
};
use esker_sample::order::{StepOrder, StepSettings};
use esker_sample::{
    Batches, ByStep, Carry, Direction, Edge, EdgeLookup, Fanout, Form, InMemory, LinkBatches, NodeBatches,
    NodePartitions, NodeSet, Order, Position, ResidentPool, Sample, Sampler, Seeds, Settings, StepSubgraphs,
    Subgraph, SubgraphBuilder, SubgraphShape, SubgraphsInMemory, Topology,
};
use esker_types::{EdgeBucket, EdgeId, NodeId, PartitionId, PartitionStep, PartitionSteps, StepWork};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

/// One step for each pair of groups of partitions.
#[derive(Debug)]
struct Pairs {
    groups: u32,
    each: u32,
    trains_edges: bool,
}

impl Pairs {
    fn group(&self, partition: PartitionId) -> u32 {
        partition.0 / self.each
    }

    fn partitions_of(&self, groups: &[u32]) -> Vec<PartitionId> {
        let of = |group: &u32| (group * self.each..(group + 1) * self.each).map(PartitionId);
        groups.iter().flat_map(of).collect()
    }
}

impl PartitionSteps for Pairs {
    fn partitions(&self) -> u32 {
        self.groups * self.each
    }

    fn trains_edges(&self) -> bool {
        self.trains_edges
    }

    fn step_count(&self) -> u64 {
        self.steps(0).len() as u64
    }

    fn steps(&self, epoch: u64) -> Vec<PartitionStep> {
        let all: Vec<PartitionId> = (0..self.partitions()).map(PartitionId).collect();
        let mut steps = Vec::new();
        for (one, other) in (0..self.groups).flat_map(|one| (one..self.groups).map(move |other| (one, other)))
        {
            let groups: BTreeSet<u32> = [one, other].into();
            let resident = self.partitions_of(&groups.into_iter().collect::<Vec<_>>());
            let work = match self.trains_edges {
                true => {
                    let buckets = all.iter().flat_map(|source| {
                        all.iter().map(|target| EdgeBucket { source: *source, target: *target })
                    });
                    let of_pair = |bucket: &EdgeBucket| {
                        let (source, target) = (self.group(bucket.source), self.group(bucket.target));
                        (source.min(target), source.max(target)) == (one, other)
                    };
                    StepWork::Buckets(buckets.filter(of_pair).collect())
                }
                false if one == other => StepWork::Partitions(self.partitions_of(&[one])),
                false => StepWork::Partitions(vec![]),
            };
            steps.push(PartitionStep { resident, swaps: vec![], work });
        }
        if epoch % 2 == 1 {
            steps.reverse();
        }
        steps
    }

    fn identity(&self) -> String {
        format!("{self:?}")
    }
}

fn graph(lists: &[Vec<u64>], direction: Direction) -> InMemory<u32> {
    // Relations ascend among equal neighbours, as in stored adjacency.
    let mut relations: Vec<u32> = Vec::new();
    for list in lists {
        for (at, source) in list.iter().enumerate() {
            let again = at > 0 && list[at - 1] == *source;
            relations.push(if again {
                relations[relations.len() - 1] + at as u32 % 2
            } else {
                at as u32 % 2
            });
        }
    }
    InMemory::from_adjacency(lists, Some(relations)).in_direction(direction)
}

/// The same graph without the edges of nodes that are not resident, and the ids of the edges that are left.
fn filtered(
    lists: &[Vec<u64>],
    direction: Direction,
    here: &dyn Fn(u64) -> bool,
) -> (InMemory<u32>, Vec<u64>) {
    let whole = graph(lists, Direction::Incoming);
    let (mut kept, mut relations, mut ids, mut id) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (target, list) in lists.iter().enumerate() {
        let mut own = Vec::new();
        for source in list {
            if here(*source) && here(target as u64) {
                own.push(*source);
                relations.push(whole.edge(EdgeId(id)).unwrap().relation);
                ids.push(id);
            }
            id += 1;
        }
        kept.push(own);
    }
    (InMemory::from_adjacency(&kept, Some(relations)).in_direction(direction), ids)
}

const NODES: u64 = 40;

fn lists() -> impl Strategy<Value = Vec<Vec<u64>>> {
    let list = prop::collection::vec(0..NODES, 0..12).prop_map(|mut list| {
        list.sort_unstable();
        list
    });
    prop::collection::vec(list, NODES as usize)
}

fn directions() -> impl Strategy<Value = Direction> {
    prop::sample::select(vec![Direction::Incoming, Direction::Outgoing, Direction::Both])
}

fn forms() -> impl Strategy<Value = Form> {
    prop::sample::select(vec![Form::Dense, Form::Layered, Form::Shadow])
}

fn settings(pairs: Pairs, batch: u64, drop_last: bool) -> StepSettings {
    StepSettings { steps: Arc::new(pairs), batch, drop_last, seed: 7 }
}

fn positions(order: &dyn Order, epoch: u64) -> Vec<Position> {
    (0..order.batches(epoch)).map(|batch| Position { epoch, batch }).collect()
}

/// Batches of a step have its items, each once; only the last of a step is smaller.
fn check_batches(order: &StepOrder, batch: u64, in_step: &dyn Fn(u64, &PartitionStep) -> bool, items: u64) {
    for epoch in [0, 1, 5] {
        let (mut seen, mut out) = (Vec::new(), Vec::new());
        for at in positions(order, epoch) {
            order.items(epoch, at.batch, &mut out).unwrap();
            let step = order.step(epoch, at.batch).unwrap();
            assert!(step.batches().contains(&at.batch) && step.epoch() == epoch);
            assert!(out.iter().all(|item| in_step(*item, step.step())));
            let is_last = at.batch + 1 == step.batches().end;
            assert!(out.len() as u64 == batch || is_last && !out.is_empty() && (out.len() as u64) < batch);
            seen.extend_from_slice(&out);
        }
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..items));
        assert!(order.items(epoch, order.batches(epoch), &mut out).is_err());
        assert!(order.step(epoch, order.batches(epoch)).is_none());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_item_is_in_one_batch_of_its_step(lists in lists(), groups in 1u32..6, each in 1u32..4, batch in 1u64..20) {
        let pairs = |trains_edges| Pairs { groups, each, trains_edges };
        let partitions = NodePartitions::random(NODES, groups * each, 3).unwrap();
        let graph = graph(&lists, Direction::Incoming);
        let edges = StepOrder::of_edges(&settings(pairs(true), batch, false), &partitions, &graph).unwrap();
        let in_step = |item: u64, step: &PartitionStep| {
            let edge = graph.edge(EdgeId(item)).unwrap();
            let bucket = EdgeBucket { source: partitions.partition(edge.source), target: partitions.partition(edge.target) };
            matches!(&step.work, StepWork::Buckets(buckets) if buckets.contains(&bucket))
        };
        check_batches(&edges, batch, &in_step, graph.edge_count());
        let training: Vec<NodeId> = (0..NODES).filter(|node| node % 3 > 0).map(NodeId).collect();
        let nodes = StepOrder::of_nodes(&settings(pairs(false), batch, false), &partitions, &training).unwrap();
        let in_step = |item: u64, step: &PartitionStep| {
            let partition = partitions.partition(training[item as usize]);
            matches!(&step.work, StepWork::Partitions(trained) if trained.contains(&partition))
        };
        check_batches(&nodes, batch, &in_step, training.len() as u64);
        // Without smaller batches: the same, less those.
        let full = StepOrder::of_nodes(&settings(pairs(false), batch, true), &partitions, &training).unwrap();
        let of = |order: &StepOrder, epoch| -> Vec<Vec<u64>> {
            let items = |at: Position| {
                let mut out = Vec::new();
                order.items(at.epoch, at.batch, &mut out).unwrap();
                out
            };
            positions(order, epoch).into_iter().map(items).collect()
        };
        for epoch in 0..3 {
            let expected: Vec<_> = of(&nodes, epoch).into_iter().filter(|items| items.len() as u64 == batch).collect();
            prop_assert_eq!(of(&full, epoch), expected);
        }
        prop_assert_ne!(of(&edges, 0).concat().len(), 1);
    }

    #[test]
    fn a_subgraph_is_the_graph_without_other_nodes(
        lists in lists(), direction in directions(), members in prop::collection::vec(any::<bool>(), NODES as usize),
        order in any::<u64>(), relations: bool,
    ) {
        let here = |node: u64| members[node as usize];
        let (expected, ids) = filtered(&lists, direction, &here);
        let shape = SubgraphShape { direction, relations, edge_ids: true };
        let set = NodeSet::choose(NODES, |node| here(node.0));
        let mut builder = SubgraphBuilder::<u32>::new(set, shape);
        // All edges, in another order, members or not.
        let whole = graph(&lists, Direction::Incoming);
        let edges = whole.edge_count();
        let shuffled = |at: u64| EdgeId((at * 7919 + order % edges.max(1)) % edges.max(1));
        prop_assume!(!edges.is_multiple_of(7919));
        for id in (0..edges).map(shuffled) {
            let edge = whole.edge(id).unwrap();
            builder.count(edge.source, edge.target);
        }
        for id in (0..edges).map(shuffled) {
            builder.place(id, &whole.edge(id).unwrap());
        }
        let found: Subgraph<u32> = builder.finish();
        let most = Subgraph::<u32>::bytes_for(NODES, found.ids().len() as u64, found.edges(), shape);
        prop_assert!(found.bytes() <= most);
        let nodes: Vec<NodeId> = (0..NODES).filter(|node| here(*node)).map(NodeId).collect();
        prop_assert!(found.ids().iter().map(|id| NodeId(*id as u64)).eq(nodes.iter().copied()));
        check_adjacency(&found, &expected, &ids, &nodes, relations);
        let others: Vec<NodeId> = (0..NODES).filter(|node| !here(*node)).map(NodeId).take(1).collect();
        prop_assert_eq!(found.hop(&others).is_ok(), others.is_empty());
        prop_assert!(found.hop(&[NodeId(NODES)]).is_err());
        if direction != Direction::Outgoing {
            let listed = ListedNodes::new(&expected, Arc::new(nodes.clone()), true).unwrap();
            let counts = |pool: &dyn NegativeNodes| (pool.node_count(), pool.edge_count());
            prop_assert_eq!(counts(&found), counts(&listed));
            prop_assert!((0..nodes.len() as u64).all(|at| NegativeNodes::node(&found, at) == listed.node(at)));
            prop_assert!((0..listed.edge_count()).all(|at| found.target(at) == listed.target(at)));
        }
    }

    #[test]
    fn samples_of_steps_are_those_of_the_filtered_graph(
        lists in lists(), direction in directions(), form in forms(), groups in 1u32..4, each in 1u32..4,
        fanout in prop::sample::select(vec![Fanout::All, Fanout::AtMost(2), Fanout::AtMost(5)]),
        layers in 0usize..4, threads in 1usize..3, wide_edges: bool,
    ) {
        let partitions = NodePartitions::random(NODES, groups * each, 3).unwrap();
        let pairs = settings(Pairs { groups, each, trains_edges: false }, 9, false);
        let seeds = Seeds::AllNodes(NODES);
        let all: Vec<NodeId> = (0..NODES).map(NodeId).collect();
        let order = StepOrder::of_nodes(&pairs, &partitions, &all).unwrap();
        let batches = NodeBatches::new(&order, &seeds).unwrap();
        let graph = Arc::new(graph(&lists, direction));
        let carry = Carry { positions: true, edges: wide_edges, relations: true, degrees: true };
        let how = Settings { seed: 5, fanouts: vec![fanout; layers], form, carry };
        let subgraphs = Arc::new(SubgraphsInMemory::new(graph.clone(), partitions.clone(), wide_edges, 1));
        let mut sampler = Sampler::new(ByStep::new(graph.clone(), subgraphs), how.clone(), 1 << 30).unwrap().with_threads(threads);
        let (mut nodes, mut found, mut expected) = (Vec::new(), Sample::default(), Sample::default());
        for at in [0, 1].into_iter().flat_map(|epoch| positions(&order, epoch)) {
            batches.seeds(at, &mut nodes).unwrap();
            sampler.begin(&batches, at).unwrap();
            sampler.sample(at, &nodes, &mut found).unwrap();
            let resident = batches.step(at).unwrap().step().resident.clone();
            let here = |node: u64| resident.contains(&partitions.partition(NodeId(node)));
            let (part, ids) = filtered(&lists, direction, &here);
            let mut naive = Sampler::new(&part, how.clone(), 1 << 30).unwrap();
            naive.sample(at, &nodes, &mut expected).unwrap();
            // The filtered graph numbers its edges anew.
            expected.blocks.iter_mut().flat_map(|block| &mut block.edges).for_each(|edge| edge.0 = ids[edge.0 as usize]);
            prop_assert_eq!(&found, &expected);
        }
        // Batches of no step see everything.
        let whole = NodeBatches::new(esker_sample::order::Sequential(esker_sample::order::Batching::new(NODES, 9, false).unwrap()), &seeds).unwrap();
        let at = Position { epoch: 0, batch: 0 };
        whole.seeds(at, &mut nodes).unwrap();
        sampler.begin(&whole, at).unwrap();
        sampler.sample(at, &nodes, &mut found).unwrap();
        Sampler::new(&*graph, how, 1 << 30).unwrap().sample(at, &nodes, &mut expected).unwrap();
        prop_assert_eq!(&found, &expected);
    }

    #[test]
    fn links_of_steps_have_resident_negatives_and_exact_masks(
        lists in lists(), both: bool, groups in 1u32..4, each in 1u32..4, uniform in 0u32..9, by_degree in 0u32..5, side: bool,
    ) {
        let direction = if both { Direction::Both } else { Direction::Incoming };
        let partitions = NodePartitions::random(NODES, groups * each, 3).unwrap();
        let pairs = settings(Pairs { groups, each, trains_edges: true }, 9, false);
        let graph = Arc::new(graph(&lists, direction));
        let order = Arc::new(StepOrder::of_edges(&pairs, &partitions, &*graph).unwrap());
        let subgraphs = Arc::new(SubgraphsInMemory::new(graph.clone(), partitions.clone(), false, 2));
        let how = NegativeSettings { seed: 3, chunks: 2, uniform, by_degree };
        let pool = Arc::new(ResidentPool::new(order.clone(), subgraphs.clone() as Arc<dyn StepSubgraphs<u32>>));
        let side = if side { Side::Source } else { Side::Target };
        let negatives = NegativeSampler::new(graph.clone(), NegativePool::PerBatch(pool.clone()), how).unwrap();
        let seeds = Seeds::AllEdges(graph.edge_count());
        let batches = LinkBatches::new(order.clone(), &seeds, graph.clone()).unwrap().with_negatives(side, negatives);
        for at in positions(&*order, 1) {
            let link = batches.link(at).unwrap();
            let resident = batches.step(at).unwrap().step().resident.clone();
            let here = |node: u64| resident.contains(&partitions.partition(NodeId(node)));
            prop_assert!(link.edges.iter().all(|edge| here(edge.source.0) && here(edge.target.0)));
            let (part, _) = filtered(&lists, direction, &here);
            let listed: Vec<NodeId> = (0..NODES).filter(|node| here(*node)).map(NodeId).collect();
            // Drawn from the filtered graph, masked in the whole one.
            let from_part = NegativeSampler::new(&part, NegativePool::Nodes(listed.clone()), how).unwrap();
            let mut expected = Negatives::default();
            from_part.with_mask(NegativeMask::None).draw(at, &link.edges, side, &mut expected).unwrap();
            let found = if side == Side::Source { &link.sources } else { &link.targets };
            prop_assert_eq!(&found.nodes, &expected.nodes);
            prop_assert_eq!(&found.masked_pairs(&link.edges), &true_pairs(&graph, &link.edges, side, found));
            prop_assert_eq!(pool.pool(at).unwrap().unwrap().node_count(), listed.len() as u64);
        }
    }
}

/// All pairs of an edge and a negative that are edges of the graph.
fn true_pairs(graph: &InMemory<u32>, edges: &[Edge], side: Side, negatives: &Negatives) -> Vec<(u32, u32)> {
    let all: BTreeSet<Edge> = (0..graph.edge_count()).map(|id| graph.edge(EdgeId(id)).unwrap()).collect();
    let mut pairs = Vec::new();
    for (index, edge) in edges.iter().enumerate() {
        for (negative, node) in negatives.nodes[negatives.of_edge(index)].iter().enumerate() {
            let corrupted = match side {
                Side::Source => Edge { source: *node, ..*edge },
                Side::Target => Edge { target: *node, ..*edge },
            };
            if all.contains(&corrupted) {
                pairs.push((index as u32, negative as u32));
            }
        }
    }
    pairs
}

/// Neighbours, edge ids and relations of every node, and incoming adjacency.
fn check_adjacency(
    found: &Subgraph<u32>,
    expected: &InMemory<u32>,
    ids: &[u64],
    nodes: &[NodeId],
    relations: bool,
) {
    use esker_sample::HopNeighbours;
    let (hop, whole) = (found.hop(nodes).unwrap(), expected.hop_in_memory(nodes, &()).unwrap().unwrap());
    for at in 0..nodes.len() {
        let (list, other) = (hop.list(at), whole.list(at));
        assert_eq!((list.first, list.second), (other.first, other.second));
        for position in 0..list.len() as u32 {
            assert_eq!(hop.edge(at, position).0, ids[whole.edge(at, position).0 as usize]);
            let relation = if relations { whole.relation(at, position) } else { 0 };
            assert_eq!(hop.relation(at, position), relation);
        }
    }
    let (mut degrees, mut others) = (Vec::new(), Vec::new());
    found.degrees(nodes, &mut degrees).unwrap();
    expected.degrees(nodes, &(), &mut others).unwrap();
    assert_eq!(degrees, others);
    if found.has_incoming() {
        let incoming = |graph: &dyn EdgeLookup| {
            let mut all = Vec::new();
            graph.incoming(nodes, &mut |at, found| all.push((at, format!("{:?}", found.sources)))).unwrap();
            all
        };
        assert_eq!(incoming(found), incoming(expected));
    }
}

#[test]
fn with_all_partitions_resident_negatives_are_those_of_the_graph() {
    let lists: Vec<Vec<u64>> = (0..NODES).map(|node| (0..node % 9).map(|at| at * 4 + 1).collect()).collect();
    let graph = Arc::new(graph(&lists, Direction::Incoming));
    let partitions = NodePartitions::random(NODES, 5, 3).unwrap();
    let order = Arc::new(
        StepOrder::of_edges(
            &settings(Pairs { groups: 1, each: 5, trains_edges: true }, 9, false),
            &partitions,
            &*graph,
        )
        .unwrap(),
    );
    let subgraphs = Arc::new(SubgraphsInMemory::new(graph.clone(), partitions, false, 1));
    let how = NegativeSettings { seed: 3, chunks: 2, uniform: 20, by_degree: 20 };
    let pool = Arc::new(ResidentPool::new(order.clone(), subgraphs as Arc<dyn StepSubgraphs<u32>>));
    let draw = |pool: NegativePool, at: Position| {
        let sampler = NegativeSampler::new(&graph, pool, how).unwrap();
        let mut nodes = Vec::new();
        sampler.draw_nodes(at, 9, Side::Target, &mut nodes).unwrap();
        nodes
    };
    for at in positions(&*order, 2) {
        assert_eq!(draw(NegativePool::PerBatch(pool.clone()), at), draw(NegativePool::All, at));
    }
}
