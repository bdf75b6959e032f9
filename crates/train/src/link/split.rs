//! The edges of a split as queries, and what their ranks are taken among: all nodes but those that make another true edge,
//! nodes that are drawn, or the negatives that came with a benchmark.

use crate::Result;
use crate::link::{LinkTask, RankConfig};
use crate::task::SplitName;
use esker_sample::negatives::Side;
use esker_sample::{Edge, EdgeRows, FixedNegatives, HeldOut, Queries, TrueEnds, TrueEndsRequest};
use esker_store::Dataset;
use esker_types::NodeId;
use esker_types::random::{Key, below};
use std::sync::{Arc, Mutex, PoisonError};

/// Streams of random numbers.
const CANDIDATES: u64 = 4;
const PAIRS: u64 = 5;
/// Draws of a pair that is not an edge, before a graph counts as complete.
const MOST_DRAWS: u64 = 100;

/// A question to be ranked: which node replaces one end of an edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Query {
    /// The end that stays.
    pub known: NodeId,
    /// The relation of the edge.
    pub relation: u32,
    /// The end that is replaced.
    pub side: Side,
    /// The node that the edge has there.
    pub answer: NodeId,
}

impl Query {
    fn edge(&self) -> Edge {
        let (known, answer, relation) = (self.known, self.answer, self.relation);
        match self.side {
            Side::Target => Edge { source: known, target: answer, relation },
            Side::Source => Edge { source: answer, target: known, relation },
        }
    }
}

/// Both questions of each edge: its target, then its source.
pub(super) fn queries_of(edges: &[Edge]) -> Vec<Query> {
    let both = |edge: &Edge| {
        let Edge { source, target, relation } = *edge;
        [
            Query { known: source, relation, side: Side::Target, answer: target },
            Query { known: target, relation, side: Side::Source, answer: source },
        ]
    };
    edges.iter().flat_map(both).collect()
}

/// The queries of a split and what their ranks leave out. It does not change during training.
pub(super) struct PreparedSplit {
    pub queries: Vec<Query>,
    /// `None` if ranks are raw.
    known: Option<TrueEnds>,
    /// As many pairs that are not edges, unless almost all pairs are.
    pub pairs: Option<Vec<Edge>>,
    /// Candidates that came with the edges.
    pub fixed: FixedCandidates,
}

/// Candidates that came with the edges of a benchmark.
pub(super) enum FixedCandidates {
    /// There are none, or others are asked for.
    None,
    /// For the targets and the sources of each edge.
    Own(Box<[Option<FixedNegatives>; 2]>),
    /// Negative edges that all edges share.
    Shared(Vec<Edge>),
}

impl FixedCandidates {
    fn open(dataset: &Dataset, split: SplitName) -> Result<FixedCandidates> {
        let split = if split == SplitName::Test { HeldOut::Test } else { HeldOut::Valid };
        if let Some(rows) = EdgeRows::shared_negatives(dataset, split)? {
            let mut edges = Vec::with_capacity(rows.len() as usize);
            rows.for_each(|edge| edges.push(edge))?;
            return Ok(FixedCandidates::Shared(edges));
        }
        let [targets, sources] =
            [Side::Target, Side::Source].map(|side| FixedNegatives::open(dataset, split, side));
        match (targets?, sources?) {
            (None, None) => Ok(FixedCandidates::None),
            (targets, sources) => Ok(FixedCandidates::Own(Box::new([targets, sources]))),
        }
    }
}

impl PreparedSplit {
    fn new(
        links: &Links,
        split: SplitName,
        edges: &[Edge],
        settings: &RankConfig,
        seed: u64,
    ) -> Result<PreparedSplit> {
        let fixed = match settings.candidates {
            Some(_) => FixedCandidates::None,
            None => FixedCandidates::open(&links.dataset, split)?,
        };
        let known = (!settings.raw).then(|| links.true_ends(edges)).transpose()?;
        let pairs = not_edges(links, edges, seed, split)?;
        Ok(PreparedSplit { queries: queries_of(edges), known, pairs, fixed })
    }

    /// The true candidates of a query, ascending; empty if ranks are raw.
    fn known_of(&self, number: usize) -> &[u32] {
        let query = &self.queries[number];
        let known = self.known.as_ref().and_then(|known| known.of(&query.edge(), query.side));
        known.unwrap_or_default()
    }

    /// Candidates that are not counted: (query, candidate), ascending. The answer is one of them.
    pub fn left_out(&self, numbers: &[usize]) -> Vec<(u32, u32)> {
        let mut filtered = Vec::new();
        for (at, number) in (0..).zip(numbers) {
            match self.known_of(*number) {
                [] => filtered.push((at, self.queries[*number].answer.0 as u32)),
                known => filtered.extend(known.iter().map(|candidate| (at, *candidate))),
            }
        }
        filtered
    }

    /// Draws `each` of `count` nodes for every query: all of them, and those that are not counted. A node may be drawn
    /// twice.
    pub fn draw(&self, numbers: &[usize], each: u32, count: u64, seed: u64) -> (Vec<u32>, Vec<(u32, u32)>) {
        let (mut drawn, mut filtered) = (Vec::with_capacity(numbers.len() * each as usize), Vec::new());
        for (at, number) in (0..).zip(numbers) {
            let key = Key::new(seed).with(CANDIDATES).with(*number as u64);
            let known = self.known_of(*number);
            for index in 0..each {
                let node = below(key.at(index as u64), count) as u32;
                if known.binary_search(&node).is_ok() || node as u64 == self.queries[*number].answer.0 {
                    filtered.push((at, index));
                }
                drawn.push(node);
            }
        }
        (drawn, filtered)
    }
}

/// As many pairs of nodes as there are edges, with their relations, none of them an edge. `None` if almost all pairs are.
fn not_edges(links: &Links, edges: &[Edge], seed: u64, split: SplitName) -> Result<Option<Vec<Edge>>> {
    let key = Key::new(seed).with(PAIRS).with(u64::from(split == SplitName::Test));
    let nodes = links.task.nodes;
    let mut pairs = vec![None; edges.len()];
    let mut open: Vec<usize> = (0..edges.len()).collect();
    for draw in 0..MOST_DRAWS {
        let drawn = |at: &usize| {
            let node = |end: u64| NodeId(below(key.with(draw).with(*at as u64).at(end), nodes));
            Edge { source: node(0), target: node(1), relation: edges[*at].relation }
        };
        let candidates: Vec<Edge> = open.iter().map(drawn).collect();
        let known = links.true_ends(&candidates)?;
        let is_edge = |pair: &Edge| {
            let of_source = known.of(pair, Side::Target).unwrap_or_default();
            pair.source == pair.target || of_source.binary_search(&(pair.target.0 as u32)).is_ok()
        };
        let mut left = Vec::new();
        for (index, pair) in open.iter().zip(&candidates) {
            match is_edge(pair) {
                true => left.push(*index),
                false => pairs[*index] = Some(*pair),
            }
        }
        open = left;
        if open.is_empty() {
            break;
        }
    }
    Ok(pairs.into_iter().collect())
}

/// What evaluation needs of links.
#[derive(Clone)]
pub struct Links {
    /// Held-out edges.
    pub task: Arc<LinkTask>,
    dataset: Arc<Dataset>,
    /// Validation and test, once they were needed.
    prepared: Arc<Mutex<[Option<Arc<PreparedSplit>>; 2]>>,
}

impl Links {
    /// Links of a dataset.
    pub(crate) fn new(task: LinkTask, dataset: Arc<Dataset>) -> Links {
        Links { task: Arc::new(task), dataset, prepared: Arc::default() }
    }

    /// An upper bound on the memory of the true candidates of queries for both ends of so many edges.
    pub(crate) fn true_end_bytes(all_edges: u64, queried: u64) -> u64 {
        // A key and where its ends start, for each of two queries; an end for each edge and side.
        (queried * 2).saturating_mul(16 + 8 + 8).saturating_add(all_edges.saturating_mul(2 * 4))
    }

    /// The true candidates of both ends of some edges, whether they train or were held out.
    fn true_ends(&self, edges: &[Edge]) -> Result<TrueEnds> {
        let (valid, test) = (self.task.valid.len() as u64, self.task.test.len() as u64);
        let all = self.task.train + valid + test;
        let most_bytes = Links::true_end_bytes(all, edges.len() as u64);
        let queries = Queries::Of(edges);
        let request = TrueEndsRequest { dataset: &self.dataset, queries, held_out: true, most_bytes };
        Ok(TrueEnds::build(&request)?)
    }

    /// The queries of a split, made once.
    pub(super) fn prepared(
        &self,
        split: SplitName,
        edges: &[Edge],
        settings: &RankConfig,
        seed: u64,
    ) -> Result<Arc<PreparedSplit>> {
        // A panic while it was locked has ended the run.
        let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &mut prepared[usize::from(split == SplitName::Test)];
        if let Some(found) = slot {
            return Ok(found.clone());
        }
        Ok(slot.insert(Arc::new(PreparedSplit::new(self, split, edges, settings, seed)?)).clone())
    }
}
