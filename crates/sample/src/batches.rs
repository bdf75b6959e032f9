//! The seed nodes of a batch. For link prediction they are the ends of the batch's edges and its negatives, because
//! both need representations. A sampler takes seed nodes from here and need not know what is trained.

use crate::held_out::FixedNegatives;
use crate::negatives::{AllNodes, NegativeSampler, Negatives, Side};
use crate::order::{BatchGroup, BatchStep};
use crate::topology::{Edge, EdgeLookup};
use crate::true_ends::TrueEnds;
use crate::{Order, Position, Result, SampleError, Seeds};
use esker_types::NodeId;
use std::borrow::Borrow;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// The batches of a job. Each one can be computed on its own.
pub trait Batches: Send + Sync {
    /// Number of batches in an epoch.
    fn count(&self, epoch: u64) -> u64;

    /// The seed nodes of a batch, in an order that [`crate::Sample::seeds`] keeps. They may repeat.
    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<()>;

    /// What a batch is trained or evaluated on: its seed nodes, unless the items are edges.
    fn targets(&self, _: Position) -> Result<Targets> {
        Ok(Targets::Nodes)
    }

    /// Replaces `out` by the edges that a batch's sample leaves out, in either direction: none, unless the items are edges
    /// that a model is to predict and must not see. [`crate::Sampler::begin`] asks for them. Whoever passes on another's
    /// batches passes these on, too: without them a model sees what it is to predict.
    fn dropped(&self, at: Position, out: &mut Vec<Edge>) -> Result<()>;

    /// The position that the draws of a batch are keyed by: its own, unless these are some of the batches of others, which
    /// must be sampled as there. [`crate::Sampler::begin`] asks for it.
    fn drawn_at(&self, at: Position) -> Position {
        at
    }

    /// The group of partitions that a batch takes its seeds from, if the order has groups.
    fn group(&self, _: Position) -> Option<BatchGroup> {
        None
    }

    /// The step over partitions that a batch belongs to, if the order has steps.
    fn step(&self, _: Position) -> Option<BatchStep> {
        None
    }

    /// A short text that identifies the batches. On one graph, jobs with equal texts have equal batches. A job has the
    /// same text in every run.
    fn identity(&self) -> String;
}

/// What a batch is trained or evaluated on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Targets {
    /// The seed nodes, with their labels.
    Nodes,
    /// Edges and their negatives. Whoever keeps them for a step shares them.
    Links(Arc<LinkBatch>),
}

impl<B: Batches + ?Sized> Batches for &B {
    fn count(&self, epoch: u64) -> u64 {
        (**self).count(epoch)
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<()> {
        (**self).seeds(at, out)
    }

    fn targets(&self, at: Position) -> Result<Targets> {
        (**self).targets(at)
    }

    fn dropped(&self, at: Position, out: &mut Vec<Edge>) -> Result<()> {
        (**self).dropped(at, out)
    }

    fn drawn_at(&self, at: Position) -> Position {
        (**self).drawn_at(at)
    }

    fn group(&self, at: Position) -> Option<BatchGroup> {
        (**self).group(at)
    }

    fn step(&self, at: Position) -> Option<BatchStep> {
        (**self).step(at)
    }

    fn identity(&self) -> String {
        (**self).identity()
    }
}

impl<B: Batches + ?Sized> Batches for Arc<B> {
    fn count(&self, epoch: u64) -> u64 {
        (**self).count(epoch)
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<()> {
        (**self).seeds(at, out)
    }

    fn targets(&self, at: Position) -> Result<Targets> {
        (**self).targets(at)
    }

    fn dropped(&self, at: Position, out: &mut Vec<Edge>) -> Result<()> {
        (**self).dropped(at, out)
    }

    fn drawn_at(&self, at: Position) -> Position {
        (**self).drawn_at(at)
    }

    fn group(&self, at: Position) -> Option<BatchGroup> {
        (**self).group(at)
    }

    fn step(&self, at: Position) -> Option<BatchStep> {
        (**self).step(at)
    }

    fn identity(&self) -> String {
        (**self).identity()
    }
}

/// Batches of nodes. Order and seeds may be owned, borrowed or shared.
#[derive(Debug, Clone)]
pub struct NodeBatches<O, S> {
    order: O,
    seeds: S,
    identity: OnceLock<String>,
}

impl<O: Order, S: Borrow<Seeds> + Send + Sync> NodeBatches<O, S> {
    /// Batches of these nodes in this order. Fails if `seeds` are edges.
    pub fn new(order: O, seeds: S) -> Result<NodeBatches<O, S>> {
        if seeds.borrow().are_edges() {
            return Err(SampleError::SeedsAreEdges);
        }
        Ok(NodeBatches { order, seeds, identity: OnceLock::new() })
    }
}

impl<O: Order, S: Borrow<Seeds> + Send + Sync> Batches for NodeBatches<O, S> {
    fn count(&self, epoch: u64) -> u64 {
        self.order.batches(epoch)
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<()> {
        let mut items = Vec::new();
        self.order.items(at.epoch, at.batch, &mut items)?;
        out.clear();
        out.reserve(items.len());
        for item in items {
            out.push(self.seeds.borrow().node(item)?);
        }
        Ok(())
    }

    fn dropped(&self, _: Position, out: &mut Vec<Edge>) -> Result<()> {
        out.clear();
        Ok(())
    }

    fn group(&self, at: Position) -> Option<BatchGroup> {
        self.order.group(at.epoch, at.batch)
    }

    fn step(&self, at: Position) -> Option<BatchStep> {
        self.order.step(at.epoch, at.batch)
    }

    fn identity(&self) -> String {
        self.identity.get_or_init(|| identity("nodes", &self.order, self.seeds.borrow())).clone()
    }
}

/// Batches of edges with their negatives. The seed nodes of a batch are the source and target of each edge in turn,
/// then the target-side negatives, chunk after chunk, then the source-side negatives. Order, edges and graph may be
/// owned, borrowed or shared. The graph may be in memory, on disk or a part of one.
#[derive(Debug, Clone)]
pub struct LinkBatches<O, S, G> {
    order: O,
    edges: S,
    graph: G,
    targets: Option<SideNegatives<G>>,
    sources: Option<SideNegatives<G>>,
    drops_targets: bool,
    /// The true ends of every edge, to count how often its queries occur.
    counted: Option<Arc<TrueEnds>>,
    /// Identity of order and edges.
    identity: OnceLock<String>,
}

/// The negatives of one side.
#[derive(Debug, Clone)]
pub enum SideNegatives<G> {
    /// Drawn anew for each batch.
    Drawn(NegativeSampler<G>),
    /// Every node.
    All(AllNodes),
    /// Given with the edges, row by row.
    Fixed(Arc<FixedNegatives>),
}

impl<G> From<NegativeSampler<G>> for SideNegatives<G> {
    fn from(negatives: NegativeSampler<G>) -> SideNegatives<G> {
        SideNegatives::Drawn(negatives)
    }
}

impl<G> From<AllNodes> for SideNegatives<G> {
    fn from(negatives: AllNodes) -> SideNegatives<G> {
        SideNegatives::All(negatives)
    }
}

impl<G> From<Arc<FixedNegatives>> for SideNegatives<G> {
    fn from(negatives: Arc<FixedNegatives>) -> SideNegatives<G> {
        SideNegatives::Fixed(negatives)
    }
}

impl<G: EdgeLookup> SideNegatives<G> {
    /// Negatives and masks of a batch. `items` are the indices of its edges among all.
    fn draw(
        &self,
        at: Position,
        items: &[u64],
        edges: &[Edge],
        side: Side,
        out: &mut Negatives,
    ) -> Result<()> {
        match self {
            SideNegatives::Drawn(sampler) => sampler.draw(at, edges, side, out),
            SideNegatives::All(all) => all.draw(edges, side, out),
            SideNegatives::Fixed(fixed) => fixed.negatives(items, out),
        }
    }

    /// Appends the negatives that become seed nodes.
    fn seeds(&self, at: Position, items: &[u64], side: Side, out: &mut Vec<NodeId>) -> Result<()> {
        match self {
            SideNegatives::Drawn(sampler) => sampler.draw_nodes(at, items.len(), side, out),
            SideNegatives::All(_) => Ok(()),
            SideNegatives::Fixed(fixed) => fixed.nodes(items, out),
        }
    }

    fn identity(&self) -> String {
        match self {
            SideNegatives::Drawn(sampler) => sampler.identity(),
            SideNegatives::All(all) => all.identity(),
            SideNegatives::Fixed(fixed) => fixed.identity(),
        }
    }
}

/// Identity of order and seeds. It hashes their content, so callers compute it once and keep it.
fn identity(what: &str, order: &impl Order, seeds: &Seeds) -> String {
    format!("{what} {} {}", order.identity(), seeds.identity())
}

/// The edges and negatives of a batch, with their positions among the batch's seed nodes. The ends of edge `i` are at
/// `2 * i` and `2 * i + 1`. The negatives start at `targets_start` and `sources_start`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LinkBatch {
    /// The edges.
    pub edges: Vec<Edge>,
    /// Nodes that replace the targets. Empty if that side has no negatives.
    pub targets: Negatives,
    /// Nodes that replace the sources. Empty if that side has no negatives.
    pub sources: Negatives,
    /// Position of the first node of `targets` among the seed nodes.
    pub targets_start: usize,
    /// Position of the first node of `sources` among the seed nodes.
    pub sources_start: usize,
    /// For each edge, the distinct edges with its source and relation plus those with its target and relation. Empty
    /// unless [`LinkBatches::counting`] asked for them.
    pub frequencies: Vec<u32>,
}

impl LinkBatch {
    /// Positions of an edge's negatives among the seed nodes.
    pub fn negatives_of(&self, edge: usize, side: Side) -> Range<usize> {
        let (negatives, start) = match side {
            Side::Target => (&self.targets, self.targets_start),
            Side::Source => (&self.sources, self.sources_start),
        };
        let range = negatives.of_edge(edge);
        start + range.start..start + range.end
    }
}

impl<O, S, G> LinkBatches<O, S, G>
where
    O: Order,
    S: Borrow<Seeds> + Send + Sync,
    G: EdgeLookup,
{
    /// Batches of these edges of `graph` in this order, without negatives. Fails if `edges` are nodes.
    pub fn new(order: O, edges: S, graph: G) -> Result<LinkBatches<O, S, G>> {
        if !edges.borrow().are_edges() {
            return Err(SampleError::SeedsAreNodes);
        }
        let identity = OnceLock::new();
        let (targets, sources, drops_targets, counted) = (None, None, false, None);
        Ok(LinkBatches { order, edges, graph, targets, sources, drops_targets, counted, identity })
    }

    /// The same batches, with negatives for `side` added.
    pub fn with_negatives(
        mut self,
        side: Side,
        negatives: impl Into<SideNegatives<G>>,
    ) -> LinkBatches<O, S, G> {
        match side {
            Side::Target => self.targets = Some(negatives.into()),
            Side::Source => self.sources = Some(negatives.into()),
        }
        self
    }

    /// The same batches, whose samples leave out the batch's edges and their reverses, see [`Batches::dropped`].
    pub fn dropping_targets(mut self) -> LinkBatches<O, S, G> {
        self.drops_targets = true;
        self
    }

    /// The same batches, with the frequencies of their edges. `known` has the true ends in the graph of every edge.
    pub fn counting(mut self, known: Arc<TrueEnds>) -> LinkBatches<O, S, G> {
        self.counted = Some(known);
        self
    }

    /// Edges, negatives and masks of a batch. The batch's sample is made from the same ones.
    pub fn link(&self, at: Position) -> Result<LinkBatch> {
        let (mut link, items) = (LinkBatch::default(), self.items(at)?);
        self.edges.borrow().edges(&self.graph, &items, &mut link.edges)?;
        if let Some(negatives) = &self.targets {
            negatives.draw(at, &items, &link.edges, Side::Target, &mut link.targets)?;
        }
        if let Some(negatives) = &self.sources {
            negatives.draw(at, &items, &link.edges, Side::Source, &mut link.sources)?;
        }
        if let Some(known) = &self.counted {
            let found = link.edges.iter().map(|edge| frequency(known, edge));
            link.frequencies = found.collect::<Result<_>>()?;
        }
        link.targets_start = 2 * link.edges.len();
        link.sources_start = link.targets_start + link.targets.nodes.len();
        Ok(link)
    }

    fn items(&self, at: Position) -> Result<Vec<u64>> {
        let mut items = Vec::new();
        self.order.items(at.epoch, at.batch, &mut items)?;
        Ok(items)
    }
}

impl<O, S, G> Batches for LinkBatches<O, S, G>
where
    O: Order,
    S: Borrow<Seeds> + Send + Sync,
    G: EdgeLookup,
{
    fn count(&self, epoch: u64) -> u64 {
        self.order.batches(epoch)
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<()> {
        let items = self.items(at)?;
        self.edges.borrow().nodes(&self.graph, &items, out)?;
        if let Some(negatives) = &self.targets {
            negatives.seeds(at, &items, Side::Target, out)?;
        }
        if let Some(negatives) = &self.sources {
            negatives.seeds(at, &items, Side::Source, out)?;
        }
        Ok(())
    }

    fn dropped(&self, at: Position, out: &mut Vec<Edge>) -> Result<()> {
        out.clear();
        match self.drops_targets {
            true => self.edges.borrow().edges(&self.graph, &self.items(at)?, out),
            false => Ok(()),
        }
    }

    fn targets(&self, at: Position) -> Result<Targets> {
        self.link(at).map(|links| Targets::Links(Arc::new(links)))
    }

    fn step(&self, at: Position) -> Option<BatchStep> {
        self.order.step(at.epoch, at.batch)
    }

    fn identity(&self) -> String {
        let side = |negatives: &Option<SideNegatives<G>>| {
            negatives.as_ref().map_or("none".to_string(), SideNegatives::identity)
        };
        let links = self.identity.get_or_init(|| identity("links", &self.order, self.edges.borrow()));
        let dropped = if self.drops_targets { " target-edges:drop" } else { "" };
        let counted = if self.counted.is_some() { " frequencies" } else { "" };
        format!("{links} targets:{} sources:{}{dropped}{counted}", side(&self.targets), side(&self.sources))
    }
}

/// How often both queries of an edge occur.
fn frequency(known: &TrueEnds, edge: &Edge) -> Result<u32> {
    let of = |side| known.of(edge, side).map(<[u32]>::len).ok_or(SampleError::UnknownTrueEnds);
    Ok((of(Side::Target)? + of(Side::Source)?) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::negatives::{NegativePool, NegativeSettings};
    use crate::order::{Batching, GivenOrder, Sequential, Shuffled};
    use crate::{Carry, Fanout, Form, InMemory, Sample, Sampler, Settings};

    fn graph() -> InMemory<u32> {
        let lists: Vec<Vec<u64>> =
            (0..50u64).map(|node| (0..node % 7).map(|at| at * 7 + 1).collect()).collect();
        InMemory::from_adjacency(&lists, None)
    }

    const AT: Position = Position { epoch: 3, batch: 1 };
    const NEGATIVES: NegativeSettings = NegativeSettings { seed: 2, chunks: 3, uniform: 5, by_degree: 2 };

    fn shuffled(count: u64, batch: u64, drop_last: bool, seed: u64) -> Shuffled {
        Shuffled { batching: Batching::new(count, batch, drop_last).unwrap(), seed }
    }

    #[test]
    fn the_parts_of_a_link_batch_are_found_in_its_sample() {
        let graph = Arc::new(graph());
        let negatives =
            |settings| NegativeSampler::new(Arc::clone(&graph), NegativePool::All, settings).unwrap();
        let batches = LinkBatches::new(shuffled(140, 10, false, 4), Seeds::AllEdges(140), Arc::clone(&graph))
            .unwrap()
            .with_negatives(Side::Source, negatives(NegativeSettings { uniform: 1, ..NEGATIVES }))
            .with_negatives(Side::Target, negatives(NEGATIVES));
        let settings = Settings {
            seed: 1,
            fanouts: vec![Fanout::AtMost(2)],
            form: Form::Dense,
            carry: Carry::default(),
        };
        let mut sampler = Sampler::new(&*graph, settings, 1 << 30).unwrap();
        let (mut seeds, mut sample) = (Vec::new(), Sample::default());
        for batch in 0..batches.count(3) {
            let at = Position { epoch: 3, batch };
            batches.seeds(at, &mut seeds).unwrap();
            sampler.sample(at, &seeds, &mut sample).unwrap();
            let link = batches.link(at).unwrap();
            let node = |place: usize| sample.node_ids[sample.seeds[place].index()];
            assert_eq!(sample.seeds.len(), link.sources_start + link.sources.nodes.len());
            for (index, edge) in link.edges.iter().enumerate() {
                assert_eq!((node(2 * index), node(2 * index + 1)), (edge.source, edge.target));
                for (side, part) in [(Side::Target, &link.targets), (Side::Source, &link.sources)] {
                    let found: Vec<NodeId> = link.negatives_of(index, side).map(node).collect();
                    let chunk = index / part.chunk_edges;
                    assert_eq!(found, part.nodes[chunk * part.per_chunk..][..part.per_chunk]);
                }
            }
            // Negatives and masks equal those of the negative sampler on its own.
            let mut alone = Negatives::default();
            negatives(NEGATIVES).draw(at, &link.edges, Side::Target, &mut alone).unwrap();
            assert_eq!((link.targets.per_chunk, link.sources.per_chunk), (7, 3));
            assert_eq!(link.targets, alone);
        }
    }

    #[test]
    fn a_side_without_negatives_has_none() {
        let graph = graph();
        let batches = LinkBatches::new(shuffled(140, 10, false, 4), Seeds::AllEdges(140), &graph).unwrap();
        let (mut seeds, link) = (Vec::new(), batches.link(AT).unwrap());
        batches.seeds(AT, &mut seeds).unwrap();
        assert_eq!((seeds.len(), link.edges.len(), link.targets_start, link.sources_start), (20, 10, 20, 20));
        assert_eq!(link.negatives_of(9, Side::Source), 20..20);
    }

    #[test]
    fn targets_reach_whoever_holds_any_batches() {
        let graph = Arc::new(graph());
        let links = LinkBatches::new(shuffled(140, 10, false, 4), Seeds::AllEdges(140), Arc::clone(&graph))
            .unwrap()
            .with_negatives(Side::Target, NegativeSampler::new(graph, NegativePool::All, NEGATIVES).unwrap());
        let expected = links.link(AT).unwrap();
        assert_eq!((expected.edges.len(), expected.targets.nodes.len()), (10, 21));
        let shared: Arc<dyn Batches> = Arc::new(links);
        let targets = |batches: &dyn Batches| batches.targets(AT).unwrap();
        for batches in [&*shared, &shared, &&*shared] {
            assert_eq!(targets(batches), Targets::Links(Arc::new(expected.clone())));
        }
        assert!(shared.targets(Position { epoch: 0, batch: 14 }).is_err());
        let nodes: Arc<dyn Batches> =
            Arc::new(NodeBatches::new(shuffled(50, 10, false, 4), Seeds::AllNodes(50)).unwrap());
        assert_eq!(targets(&nodes), Targets::Nodes);
    }

    #[test]
    fn node_batches_take_what_they_own_or_share() {
        let (order, seeds) =
            (GivenOrder(vec![vec![2, 0], vec![1]]), Seeds::Nodes([7, 8, 9].map(NodeId).to_vec()));
        let borrowed = NodeBatches::new(&order, &seeds).unwrap();
        let shared: Arc<dyn Order> = Arc::new(order.clone());
        let shared = NodeBatches::new(shared, Arc::new(seeds.clone())).unwrap();
        let mut nodes = Vec::new();
        for batches in [&borrowed as &dyn Batches, &shared] {
            batches.seeds(Position { epoch: 5, batch: 0 }, &mut nodes).unwrap();
            assert_eq!((nodes.as_slice(), batches.count(5)), ([9, 7].map(NodeId).as_slice(), 2));
            assert!(batches.seeds(Position { epoch: 5, batch: 2 }, &mut nodes).is_err());
        }
        assert_eq!(borrowed.identity(), shared.identity());
    }

    #[test]
    fn batches_are_named_by_their_seeds_and_not_by_how_many() {
        let order = shuffled(4, 2, false, 1);
        let identity = |batches: &dyn Batches| {
            assert_eq!(batches.identity(), batches.identity());
            batches.identity()
        };
        let [one, other] = [[5, 6, 7, 9], [5, 6, 8, 9]].map(|nodes| nodes.map(NodeId).to_vec());
        let mut found = Vec::new();
        for nodes in [one, other] {
            let owned = Seeds::Nodes(nodes.clone());
            let shared = Arc::new(nodes);
            let all = [
                identity(&NodeBatches::new(order, &owned).unwrap()),
                identity(&NodeBatches::new(order, Arc::new(owned.clone())).unwrap()),
                identity(&NodeBatches::new(order, Seeds::Shared(shared.clone())).unwrap()),
                identity(&NodeBatches::new(&order, Arc::new(Seeds::Shared(shared))).unwrap()),
                identity(&NodeBatches::new(order, owned).unwrap()),
            ];
            assert!(all.iter().all(|identity| *identity == all[0]), "{all:?}");
            found.push(all[0].clone());
        }
        assert_ne!(found[0], found[1]);
    }

    #[test]
    fn seeds_of_the_wrong_kind_or_beyond_the_last_are_refused() {
        let (graph, order) = (graph(), GivenOrder(vec![vec![0], vec![140]]));
        assert!(NodeBatches::new(&order, Seeds::AllEdges(3)).is_err());
        assert!(LinkBatches::new(&order, Seeds::AllNodes(3), &graph).is_err());
        let links = LinkBatches::new(&order, Seeds::AllEdges(140), &graph).unwrap();
        let nodes = NodeBatches::new(&order, Seeds::AllNodes(50)).unwrap();
        let said = |error: SampleError| assert!(error.to_string().contains("seed 140"), "{error}");
        said(links.link(AT).unwrap_err());
        said(links.seeds(AT, &mut Vec::new()).unwrap_err());
        said(nodes.seeds(AT, &mut Vec::new()).unwrap_err());
    }

    #[test]
    fn identities_differ_when_anything_differs() {
        let graph = graph();
        let mut all = Vec::new();
        let batching = Batching::new(50, 10, false).unwrap();
        let orders: [&dyn Order; 9] = [
            &shuffled(50, 10, false, 4),
            &shuffled(50, 10, false, 5),
            &shuffled(50, 10, true, 4),
            &shuffled(50, 11, false, 4),
            &shuffled(49, 10, false, 4),
            &Sequential(batching),
            &GivenOrder(vec![vec![0, 1], vec![2]]),
            &GivenOrder(vec![vec![0], vec![1, 2]]),
            &GivenOrder(vec![vec![0], vec![2, 1]]),
        ];
        for order in orders {
            all.push(NodeBatches::new(order, Seeds::AllNodes(50)).unwrap().identity());
        }
        let order = shuffled(50, 10, false, 4);
        all.push(NodeBatches::new(order, Seeds::Nodes(vec![NodeId(3); 50])).unwrap().identity());
        let links = || LinkBatches::new(order, Seeds::AllEdges(50), &graph).unwrap();
        all.push(links().identity());
        let settings = [
            NEGATIVES,
            NegativeSettings { seed: 3, ..NEGATIVES },
            NegativeSettings { chunks: 4, ..NEGATIVES },
            NegativeSettings { uniform: 6, ..NEGATIVES },
            NegativeSettings { by_degree: 3, ..NEGATIVES },
        ];
        let pools = [
            NegativePool::All,
            NegativePool::Nodes(vec![NodeId(6)]),
            NegativePool::Nodes(vec![NodeId(6); 2]),
        ];
        for settings in settings {
            for pool in &pools {
                for side in [Side::Source, Side::Target] {
                    let negatives = NegativeSampler::new(&graph, pool.clone(), settings).unwrap();
                    all.push(links().with_negatives(side, negatives).identity());
                }
            }
        }
        for (at, identity) in all.iter().enumerate() {
            assert!(!all[..at].contains(identity), "{identity}");
        }
        assert_eq!(
            all[0], "nodes shuffled(count=50,batch=10,drop_last=false,seed=4) all-nodes(count=50)",
            "recorded in traces and manifests: it must not change"
        );
    }
}
