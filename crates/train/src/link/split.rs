//! The edges of a split as queries, and what their ranks are taken among: all nodes but those that make another true edge,
//! nodes that are drawn, or the negatives that came with a benchmark.

use crate::link::{LinkTask, RankConfig};
use crate::task::SplitName;
use crate::{Result, TrainError};
use esker_sample::negatives::Side;
use esker_sample::{
    Edge, EdgeRows, FixedNegatives, HeldOut, Queries, SampleError, TrueEnds, TrueEndsRequest, true_edges,
    unseen_nodes,
};
use esker_store::Dataset;
use esker_types::random::{Key, below};
use esker_types::{NodeId, Progress, Unit};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Streams of random numbers.
const CANDIDATES: u64 = 4;
const PAIRS: u64 = 5;
/// Queries that are ranked at a time.
pub(crate) const PIECE_QUERIES: usize = 1024;
/// Candidates that are listed at a time: drawn, fixed, or not counted.
pub(crate) const PIECE_CANDIDATES: usize = 1 << 18;
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
    known: SplitEnds,
    /// As many pairs that are not edges, unless almost all pairs are.
    pub pairs: Option<Vec<Edge>>,
    /// Candidates that came with the edges.
    pub fixed: FixedCandidates,
    /// Distinct nodes of the edges that no training edge has.
    pub unseen_nodes: u64,
}

/// The true candidates of a split's queries.
enum SplitEnds {
    /// They count like all others.
    Raw,
    /// Of all queries.
    All(TrueEnds),
    /// Too many for the memory: of the edges of each range in turn.
    InParts(Vec<Range<usize>>),
}

/// True candidates that are found again for the queries of some edges, or known of all.
pub(super) enum FoundEnds<'a> {
    Raw,
    Known(&'a TrueEnds),
    Found(TrueEnds),
}

/// Numbers of candidates: node ids, or positions of rows.
pub(super) type CandidateNumbers<'a> = &'a (dyn Fn(NodeId) -> u64 + Sync);

/// Candidates are numbered as nodes are.
pub(super) const BY_NODE: CandidateNumbers<'static> = &|node| node.0;

/// Queries and the candidates that are not counted, by number.
#[derive(Clone, Copy)]
pub(super) struct FilteredQueries<'a> {
    pub queries: &'a [Query],
    /// Under the same numbers; `None` if ranks are raw.
    known: Option<&'a TrueEnds>,
    numbering: CandidateNumbers<'a>,
}

/// Representations that are read in the order of their positions, and the memory of true ends.
#[derive(Clone, Copy)]
pub(super) struct EndsByPosition<'a> {
    pub numbering: CandidateNumbers<'a>,
    pub most_bytes: u64,
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
    /// Those of a side, 0 for targets, if each edge has its own. `None` if only the other side has any.
    pub fn of_side(&self, side: usize) -> Option<Option<&FixedNegatives>> {
        match self {
            FixedCandidates::None | FixedCandidates::Shared(_) => Some(None),
            FixedCandidates::Own(sides) => sides[side].as_ref().map(Some),
        }
    }

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
    /// Reads what the candidates of the split need, and nothing else: who was given negatives was given those that are
    /// not true, and shared ones are what AUC compares with.
    fn new(
        links: &Links,
        edges: &[Edge],
        (split, settings, seed): (SplitName, &RankConfig, u64),
        streamed: Option<EndsByPosition<'_>>,
        watch: SplitWatch<'_>,
    ) -> Result<PreparedSplit> {
        let fixed = match settings.candidates {
            Some(_) => FixedCandidates::None,
            None => FixedCandidates::open(&links.dataset, split)?,
        };
        // Pairs come first: what finds them is gone before the true candidates are there.
        let pairs = match fixed {
            FixedCandidates::Shared(_) => None,
            _ => not_edges(links, edges, seed, split, watch)?,
        };
        let known = match (&fixed, settings.raw, streamed) {
            (FixedCandidates::None, false, Some(ends)) => {
                links.streamed_ends(edges, settings, ends, watch)?
            }
            (FixedCandidates::None, false, None) => SplitEnds::All(links.true_ends(edges, None, watch)?),
            _ => SplitEnds::Raw,
        };
        let unseen_nodes = unseen_nodes(&links.dataset, edges, watch.stop).map_err(stopped_or)?;
        Ok(PreparedSplit { queries: queries_of(edges), known, pairs, fixed, unseen_nodes })
    }

    /// All queries. Their true candidates are known.
    pub fn by_node(&self) -> FilteredQueries<'_> {
        let known = match &self.known {
            SplitEnds::All(known) => Some(known),
            SplitEnds::Raw => None,
            SplitEnds::InParts(_) => unreachable!("parts are for representations that are read"),
        };
        FilteredQueries { queries: &self.queries, known, numbering: BY_NODE }
    }

    /// Ranges of edges that are ranked one after the other: at most so many.
    pub fn parts(&self, most: usize) -> Vec<Range<usize>> {
        let all = 0..self.queries.len() / 2;
        let parts = match &self.known {
            SplitEnds::InParts(parts) => &parts[..],
            _ => std::slice::from_ref(&all),
        };
        let cut = |part: &Range<usize>| {
            let end = part.end;
            part.clone().step_by(most.max(1)).map(move |first| first..end.min(first + most.max(1)))
        };
        parts.iter().flat_map(cut).collect()
    }

    /// The true candidates of the queries of some edges.
    pub fn found(
        &self,
        links: &Links,
        edges: &[Edge],
        settings: &RankConfig,
        ends: EndsByPosition<'_>,
        watch: SplitWatch<'_>,
    ) -> Result<FoundEnds<'_>> {
        Ok(match &self.known {
            SplitEnds::Raw => FoundEnds::Raw,
            SplitEnds::All(known) => FoundEnds::Known(known),
            SplitEnds::InParts(_) => {
                let found = links.true_ends(edges, Some(ends.most_bytes), watch)?;
                FoundEnds::Found(by_position(found, settings, ends))
            }
        })
    }
}

/// True ends as ranks look them up: drawn candidates are nodes, all others come in the order of positions.
fn by_position(found: TrueEnds, settings: &RankConfig, ends: EndsByPosition<'_>) -> TrueEnds {
    match settings.candidates {
        Some(_) => found,
        None => found.renumbered(ends.numbering),
    }
}

impl<'a> FilteredQueries<'a> {
    /// Queries whose true candidates were found.
    pub fn of(queries: &'a [Query], found: &'a FoundEnds<'a>, numbering: CandidateNumbers<'a>) -> Self {
        let known = match found {
            FoundEnds::Raw => None,
            FoundEnds::Known(known) => Some(*known),
            FoundEnds::Found(known) => Some(known),
        };
        FilteredQueries { queries, known, numbering }
    }

    /// How many of the first queries with these numbers are ranked at a time: at most `most`, and no more than
    /// [`PIECE_CANDIDATES`] true candidates together, unless the first one alone has more.
    pub fn fitting(&self, numbers: &[usize], most: usize) -> usize {
        fitting(numbers.iter().take(most).map(|number| self.left_out_of(*number)))
    }

    /// How many candidates of a query are not counted.
    pub fn left_out_of(&self, number: usize) -> usize {
        self.known_of(number).len().max(1)
    }

    /// The true candidates of a query, ascending; empty if ranks are raw.
    fn known_of(&self, number: usize) -> &'a [u32] {
        let query = &self.queries[number];
        let known = self.known.and_then(|known| known.of(&query.edge(), query.side));
        known.unwrap_or_default()
    }

    /// Candidates in a range that are not counted: (query, candidate), ascending. The answer is one of them.
    pub fn left_out(&self, numbers: &[usize], range: Range<u32>) -> Vec<(u32, u32)> {
        let number_of = |number: &usize| (self.numbering)(self.queries[*number].answer) as u32;
        let answers: Vec<u32> = numbers.iter().map(number_of).collect();
        let of = |at: usize| {
            let known = match self.known_of(numbers[at]) {
                [] => &answers[at..=at],
                known => known,
            };
            let before = |bound: u32| known.partition_point(|candidate| *candidate < bound);
            &known[before(range.start)..before(range.end)]
        };
        let mut filtered = Vec::with_capacity((0..numbers.len()).map(|at| of(at).len()).sum());
        for at in 0..numbers.len() {
            filtered.extend(of(at).iter().map(|candidate| (at as u32, *candidate)));
        }
        filtered
    }

    /// Draws nodes of `count` for every query, those with these indexes of all that it draws: all of them, and those
    /// that are not counted, counted from the first index. A node may be drawn twice.
    pub fn draw(
        &self,
        numbers: &[usize],
        indexes: Range<u32>,
        count: u64,
        seed: u64,
    ) -> (Vec<u32>, Vec<(u32, u32)>) {
        let (mut drawn, mut filtered) = (Vec::with_capacity(numbers.len() * indexes.len()), Vec::new());
        for (at, number) in (0..).zip(numbers) {
            let key = Key::new(seed).with(CANDIDATES).with(*number as u64);
            let known = self.known_of(*number);
            for index in indexes.clone() {
                let node = below(key.at(index as u64), count) as u32;
                if known.binary_search(&node).is_ok() || node as u64 == self.queries[*number].answer.0 {
                    filtered.push((at, index - indexes.start));
                }
                drawn.push(node);
            }
        }
        (drawn, filtered)
    }
}

/// Cuts edges into ranges whose true ends fit into so many bytes: one edge at least. `counts` are the ends of each.
fn cut_by_ends(counts: &[u64], most_bytes: u64) -> Vec<Range<usize>> {
    let (mut parts, mut first, mut ends) = (Vec::new(), 0, 0u64);
    for (at, count) in counts.iter().enumerate() {
        let more = ends.saturating_add(*count);
        if at > first && Links::index_bytes(more, (at - first + 1) as u64) > most_bytes {
            parts.push(first..at);
            (first, ends) = (at, *count);
        } else {
            ends = more;
        }
    }
    parts.push(first..counts.len());
    parts
}

/// How many of the first numbers have a sum of at most [`PIECE_CANDIDATES`]: at least one, if there is one.
fn fitting(mut lengths: impl Iterator<Item = usize>) -> usize {
    let Some(mut sum) = lengths.next() else { return 0 };
    1 + lengths
        .take_while(|length| {
            sum = sum.saturating_add(*length);
            sum <= PIECE_CANDIDATES
        })
        .count()
}

/// An upper bound on the host memory of candidates that are listed to rank a piece of queries: those that are drawn or
/// fixed, and those that are not counted.
pub(crate) fn listed_bytes(settings: &RankConfig, dataset: &Dataset) -> u64 {
    let manifest = dataset.manifest();
    let within = |each: u64| (each * PIECE_QUERIES as u64).min(PIECE_CANDIDATES as u64);
    match settings.candidates {
        // A number, and twice a pair that is not counted: vectors grow by doubling.
        Some(each) => within(each as u64) * (4 + 2 * 8),
        None => {
            let files = manifest.splits.iter().flat_map(|splits| &splits.negatives);
            let fixed = files.filter_map(|file| dataset.array(&file.name)).map(|array| array.entry().columns);
            // As stored, as nodes and as numbers. The rows of one edge are read as a whole.
            let fixed = fixed.map(|each| within(each).max(each) * (8 + 8 + 4)).max().unwrap_or(0);
            fixed.max(within(manifest.nodes.count) * 8)
        }
    }
}

/// As many pairs of nodes as there are edges, with their relations, none of them an edge. `None` if almost all pairs are.
fn not_edges(
    links: &Links,
    edges: &[Edge],
    seed: u64,
    split: SplitName,
    watch: SplitWatch<'_>,
) -> Result<Option<Vec<Edge>>> {
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
        let is_true = links.true_edges(&candidates, watch)?;
        let mut left = Vec::new();
        for ((index, pair), is_true) in open.iter().zip(&candidates).zip(is_true) {
            match is_true || pair.source == pair.target {
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

/// Who is told of the work on a split, and who may end it.
#[derive(Clone, Copy)]
pub(super) struct SplitWatch<'a> {
    pub progress: &'a dyn Progress,
    pub stop: &'a dyn Fn() -> bool,
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

    /// Edges that may be true, as often as an index meets them: held out once, an undirected edge is true both ways.
    pub(crate) fn true_edge_count(dataset: &Dataset) -> u64 {
        let manifest = dataset.manifest();
        let held_out = manifest.splits.as_ref().map_or(0, |splits| splits.valid + splits.test);
        manifest.edges.count + held_out * if manifest.edges.undirected { 2 } else { 1 }
    }

    /// An upper bound on the memory of the true candidates of queries for both ends of so many edges.
    pub(crate) fn true_end_bytes(all_edges: u64, queried: u64) -> u64 {
        // An end for each edge and side.
        Links::index_bytes(all_edges.saturating_mul(2), queried)
    }

    /// The memory of so many true ends of queries for both ends of so many edges.
    fn index_bytes(ends: u64, queried: u64) -> u64 {
        // A key and where its ends start, for each of two queries.
        (queried * 2).saturating_mul(16 + 8 + 8).saturating_add(ends.saturating_mul(4))
    }

    /// The least memory in which true ends are found part by part, where at most `queried` edges are looked up at once:
    /// the ends of one edge, which may be all nodes.
    pub(crate) fn least_end_bytes(nodes: u64, all_edges: u64, queried: u64) -> u64 {
        Links::true_end_bytes(nodes.min(all_edges), queried)
    }

    /// The true candidates of both ends of some edges, whether they train or were held out: in so many bytes, or in
    /// what they may take.
    fn true_ends(&self, edges: &[Edge], most_bytes: Option<u64>, watch: SplitWatch<'_>) -> Result<TrueEnds> {
        let may_take = || Links::true_end_bytes(Links::true_edge_count(&self.dataset), edges.len() as u64);
        let most_bytes = most_bytes.unwrap_or_else(may_take);
        let request = self.request(edges, most_bytes);
        watch.over_edges(|| TrueEnds::build_until(&request, watch.stop))
    }

    fn request<'a>(&'a self, edges: &'a [Edge], most_bytes: u64) -> TrueEndsRequest<'a> {
        let queries = Queries::Of(edges);
        TrueEndsRequest { dataset: &self.dataset, queries, held_out: true, most_bytes }
    }

    /// Which of some pairs are edges, whether they train or were held out.
    fn true_edges(&self, pairs: &[Edge], watch: SplitWatch<'_>) -> Result<Vec<bool>> {
        watch.over_edges(|| true_edges(&self.dataset, pairs, watch.stop))
    }

    /// The true candidates of queries within a memory: all, or part by part.
    fn streamed_ends(
        &self,
        edges: &[Edge],
        settings: &RankConfig,
        ends: EndsByPosition<'_>,
        watch: SplitWatch<'_>,
    ) -> Result<SplitEnds> {
        match self.true_ends(edges, Some(ends.most_bytes), watch) {
            Ok(found) => Ok(SplitEnds::All(by_position(found, settings, ends))),
            Err(TrainError::Sample(SampleError::TrueEndsMemory { .. })) => {
                // Counts alone take less than the ends of all edges would.
                let mut counts = Vec::with_capacity(edges.len());
                let most = (ends.most_bytes / Links::index_bytes(0, 1)).max(1) as usize;
                for edges in edges.chunks(most) {
                    let request = self.request(edges, ends.most_bytes.max(Links::index_bytes(0, 1)));
                    counts.extend(watch.over_edges(|| TrueEnds::counts_until(&request, edges, watch.stop))?);
                }
                Ok(SplitEnds::InParts(cut_by_ends(&counts, ends.most_bytes)))
            }
            Err(error) => Err(error),
        }
    }

    /// The queries of a split, made once.
    pub(super) fn prepared(
        &self,
        edges: &[Edge],
        (split, settings, seed): (SplitName, &RankConfig, u64),
        streamed: Option<EndsByPosition<'_>>,
        watch: SplitWatch<'_>,
    ) -> Result<Arc<PreparedSplit>> {
        // A panic while it was locked has ended the run.
        let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &mut prepared[usize::from(split == SplitName::Test)];
        if let Some(found) = slot {
            return Ok(found.clone());
        }
        let prepared = PreparedSplit::new(self, edges, (split, settings, seed), streamed, watch)?;
        Ok(slot.insert(Arc::new(prepared)).clone())
    }
}

impl SplitWatch<'_> {
    /// Tells of a pass over all edges.
    fn over_edges<R>(&self, pass: impl FnOnce() -> Result<R, SampleError>) -> Result<R> {
        self.progress.stage("find true edges", None, Unit::Count("edges"));
        let found = pass();
        self.progress.finish();
        found.map_err(stopped_or)
    }
}

/// Evaluations that are stopped are made again on resuming: the trainer knows them by this.
fn stopped_or(error: SampleError) -> TrainError {
    match error {
        SampleError::Stopped => TrainError::Stopped,
        error => error.into(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]
mod tests {
    use super::*;
    use esker_import::{ImportJob, Request, import};
    use esker_types::{Budget, Silent};
    use proptest::prelude::*;

    /// A split of edges from nodes 0 to 4 to some of 50.
    fn prepared(raw: bool) -> PreparedSplit {
        let directory = tempfile::tempdir().unwrap();
        let (from, target) = (directory.path().join("from"), directory.path().join("to"));
        std::fs::create_dir(&from).unwrap();
        let line = |at: usize| format!("n{}\tr\tn{}\n", at % 5, at * at % 50);
        for (name, lines) in [("train", 0..90), ("valid", 90..100), ("test", 100..140)] {
            std::fs::write(from.join(format!("{name}.txt")), lines.map(line).collect::<String>()).unwrap();
        }
        let request = Request { format: "triples".into(), from: Some(from), ..Request::default() };
        let budget = Budget { host_bytes: 64 << 20 };
        import(&request, &ImportJob { target: &target, overwrite: true, budget, progress: &Silent }).unwrap();
        let dataset = Arc::new(Dataset::open(&target).unwrap());
        let links = Links::new(LinkTask::load(&dataset).unwrap(), dataset);
        let (edges, settings) = (links.task.test.clone(), RankConfig { raw, ..RankConfig::default() });
        let watch = SplitWatch { progress: &Silent, stop: &|| false };
        PreparedSplit::new(&links, &edges, (SplitName::Test, &settings, 3), None, watch).unwrap()
    }

    #[test]
    fn what_is_left_out_of_ranges_is_what_is_left_out_of_all() {
        for raw in [false, true] {
            let split = prepared(raw);
            let split = split.by_node();
            let numbers: Vec<usize> = (0..split.queries.len()).step_by(2).collect();
            let all = split.left_out(&numbers, 0..50);
            let lengths: usize = numbers.iter().map(|number| split.left_out_of(*number)).sum();
            assert!(all.is_sorted() && all.len() == lengths && raw == (lengths == numbers.len()));
            for width in [1, 7, 49, 50, 99] {
                let parts = (0..50).step_by(width).map(|first| first..first + width as u32);
                let mut found: Vec<_> = parts.flat_map(|part| split.left_out(&numbers, part)).collect();
                found.sort_unstable();
                assert_eq!(found, all, "{width}");
            }
        }
    }

    #[test]
    fn true_ends_of_undirected_edges_are_within_their_bound() {
        let directory = tempfile::tempdir().unwrap();
        let (from, target) = (directory.path().join("edges.csv"), directory.path().join("to"));
        // So dense that the queries of few held-out edges have most true edges among them.
        let pairs = (0..600u64).flat_map(|a| (0..a).map(move |b| (a, b)));
        let kept = pairs.filter(|(a, b)| below(Key::new(2).at(a * 600 + b), 2) == 0);
        std::fs::write(&from, kept.map(|(a, b)| format!("{a},{b}\n")).collect::<String>()).unwrap();
        let request = Request {
            format: "csv".into(),
            edges: Some(from),
            add_reverse: true,
            hold_out: Some("valid:3%,test:60%".parse().unwrap()),
            ..Request::default()
        };
        let budget = Budget { host_bytes: 64 << 20 };
        import(&request, &ImportJob { target: &target, overwrite: true, budget, progress: &Silent }).unwrap();
        let dataset = Arc::new(Dataset::open(&target).unwrap());
        let links = Links::new(LinkTask::load(&dataset).unwrap(), dataset);
        let watch = SplitWatch { progress: &Silent, stop: &|| false };
        for edges in [&links.task.valid, &links.task.test] {
            let found = links.true_ends(edges, None, watch).unwrap();
            assert!(found.bytes() > 500_000, "most edges are among them: {}", found.bytes());
        }
    }

    #[test]
    fn candidates_are_drawn_alike_in_parts() {
        let split = prepared(false);
        let split = split.by_node();
        let numbers = [0, 4, 6];
        let (all, filtered) = split.draw(&numbers, 0..100, 50, 9);
        assert!(!filtered.is_empty() && all.len() == 300);
        let (mut drawn, mut left) = (vec![Vec::new(); 3], Vec::new());
        for first in (0..100).step_by(30) {
            let indexes = first..100.min(first + 30);
            let (part, out) = split.draw(&numbers, indexes.clone(), 50, 9);
            part.chunks(indexes.len()).zip(&mut drawn).for_each(|(part, drawn)| drawn.extend(part));
            left.extend(out.into_iter().map(|(query, index)| (query, index + first)));
        }
        left.sort_unstable();
        assert_eq!((drawn.concat(), left), (all, filtered));
    }

    proptest! {
        #[test]
        fn parts_have_ends_that_fit(counts in prop::collection::vec(0u64..300, 1..40), most in 64u64..4000) {
            let parts = cut_by_ends(&counts, most);
            prop_assert!(parts.iter().cloned().flatten().eq(0..counts.len()));
            let bytes = |part: &Range<usize>| {
                Links::index_bytes(counts[part.clone()].iter().sum(), part.len() as u64)
            };
            for (at, part) in parts.iter().enumerate() {
                prop_assert!(part.len() == 1 || bytes(part) <= most);
                let longer = part.start..(part.end + 1).min(counts.len());
                prop_assert!(at + 1 == parts.len() || bytes(&longer) > most);
            }
        }

        #[test]
        fn pieces_are_cut_by_the_candidates_that_are_listed(
            lengths in prop::collection::vec(1usize..2 * PIECE_CANDIDATES, 1..20),
        ) {
            let count = fitting(lengths.iter().copied());
            let sum = |count: usize| lengths[..count].iter().sum::<usize>();
            prop_assert!(count == 1 || sum(count) <= PIECE_CANDIDATES);
            prop_assert!(count == lengths.len() || sum(count + 1) > PIECE_CANDIDATES);
        }
    }
}
