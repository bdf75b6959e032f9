//! All true ends of queries: for (source, relation) every target, for (target, relation) every source, over training
//! edges and, if requested, the held-out ones. Ranks leave them out ("filtered"), and so do losses against all nodes.
//!
//! Edges are streamed twice, once to count and once to fill, so memory is that of the index alone and known before it
//! is allocated: 16 bytes a query, 8 bytes where its ends start, 4 bytes an end. A look-up is a binary search.

use crate::held_out::{EdgeRows, HeldOut};
use crate::negatives::Side;
use crate::topology::{AdjacencyInOrder, Direction, Edge, StoredId};
use crate::{Result, SampleError};
use esker_store::{Dataset, Elements, file};
use esker_types::{ByteCount, Dtype, NodeId};

/// Edges passed on at a time.
const CHUNK: usize = 1 << 14;

/// The queries that an index answers.
#[derive(Debug, Clone, Copy)]
pub enum Queries<'a> {
    /// Both queries of each of these edges: its source is given, or its target.
    Of(&'a [Edge]),
    /// Both queries of every held-out edge of a split.
    Split(&'a EdgeRows),
    /// Both queries of every edge of the graph.
    Graph,
}

/// What an index holds.
#[derive(Debug, Clone, Copy)]
pub struct TrueEndsRequest<'a> {
    /// The dataset.
    pub dataset: &'a Dataset,
    /// The queries.
    pub queries: Queries<'a>,
    /// Whether held-out edges are true too. Training knows those of the graph only.
    pub held_out: bool,
    /// Bytes it may use, also while it is built.
    pub most_bytes: u64,
}

/// True ends by query, ascending, each once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TrueEnds {
    /// By source and relation.
    targets: EndIndex,
    /// By target and relation.
    sources: EndIndex,
}

/// The end that a query gives, and its relation.
type QueryKey = (u64, u32);

#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct EndIndex {
    /// Ascending, each once.
    keys: Vec<QueryKey>,
    /// Where the ends of each key start; one more than keys.
    starts: Vec<u64>,
    ends: Vec<u32>,
}

impl TrueEnds {
    /// Streams the edges of the dataset and keeps what answers the queries.
    pub fn build(request: &TrueEndsRequest) -> Result<TrueEnds> {
        TrueEnds::build_until(request, &|| false)
    }

    /// The same. `stop` is called once in a while; if it returns `true`, the work ends with [`SampleError::Stopped`].
    pub fn build_until(request: &TrueEndsRequest, stop: &dyn Fn() -> bool) -> Result<TrueEnds> {
        let mut index = TrueEnds::counted(request, stop)?;
        let ends = index.targets.close_counts() + index.sources.close_counts();
        request.check(&index, ends)?;
        index.targets.ends = vec![0; index.targets.total() as usize];
        index.sources.ends = vec![0; index.sources.total() as usize];
        request.for_each_true(stop, |edge| {
            index.targets.put(key_of(&edge, Side::Target), edge.target);
            index.sources.put(key_of(&edge, Side::Source), edge.source);
        })?;
        index.targets.finish();
        index.sources.finish();
        Ok(index)
    }

    /// How many ends the two queries of each of `edges` have, which the request asks for. An edge that is stored twice
    /// counts twice. One pass over the edges, in the memory of an index without ends.
    pub fn counts_until(
        request: &TrueEndsRequest,
        edges: &[Edge],
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<u64>> {
        let index = TrueEnds::counted(request, stop)?;
        let count = |edge: &Edge| {
            let targets = index.targets.counted(key_of(edge, Side::Target));
            targets + index.sources.counted(key_of(edge, Side::Source))
        };
        Ok(edges.iter().map(count).collect())
    }

    /// The same ends under other numbers, ascending by these: for instance, the order in which rows are stored.
    pub fn renumbered(mut self, number: impl Fn(NodeId) -> u64) -> TrueEnds {
        for index in [&mut self.targets, &mut self.sources] {
            for range in index.starts.windows(2) {
                let ends = &mut index.ends[range[0] as usize..range[1] as usize];
                ends.iter_mut().for_each(|end| *end = number(NodeId(*end as u64)) as u32);
                ends.sort_unstable();
            }
        }
        self
    }

    /// The keys of a request, and how many ends each has, in place of where they start.
    fn counted(request: &TrueEndsRequest, stop: &dyn Fn() -> bool) -> Result<TrueEnds> {
        let nodes = request.dataset.manifest().nodes.count;
        if nodes > 1 << 32 {
            return Err(SampleError::TooManyCandidates { nodes });
        }
        let mut index = TrueEnds::default();
        request.for_each_query(stop, |edge| {
            index.targets.keys.push((edge.source.0, edge.relation));
            index.sources.keys.push((edge.target.0, edge.relation));
        })?;
        index.targets.begin();
        index.sources.begin();
        request.for_each_true(stop, |edge| {
            index.targets.count(key_of(&edge, Side::Target));
            index.sources.count(key_of(&edge, Side::Source));
        })?;
        Ok(index)
    }

    /// Every node that makes a true edge where this end of `edge` is replaced; `None` if the index was not built for the
    /// query.
    pub fn of(&self, edge: &Edge, side: Side) -> Option<&[u32]> {
        match side {
            Side::Target => self.targets.of(key_of(edge, side)),
            Side::Source => self.sources.of(key_of(edge, side)),
        }
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        self.targets.bytes() + self.sources.bytes()
    }
}

/// The query that replaces this end.
fn key_of(edge: &Edge, side: Side) -> QueryKey {
    match side {
        Side::Target => (edge.source.0, edge.relation),
        Side::Source => (edge.target.0, edge.relation),
    }
}

impl EndIndex {
    fn begin(&mut self) {
        self.keys.sort_unstable();
        self.keys.dedup();
        self.keys.shrink_to_fit();
        self.starts = vec![0; self.keys.len() + 1];
    }

    fn position(&self, key: QueryKey) -> Option<usize> {
        self.keys.binary_search(&key).ok()
    }

    fn count(&mut self, key: QueryKey) {
        if let Some(at) = self.position(key) {
            self.starts[at] += 1;
        }
    }

    /// What was counted for a key.
    fn counted(&self, key: QueryKey) -> u64 {
        self.position(key).map_or(0, |at| self.starts[at])
    }

    /// Turns counts into starts, and returns their sum.
    fn close_counts(&mut self) -> u64 {
        let mut sum = 0;
        for start in &mut self.starts {
            sum += *start;
            *start = sum - *start;
        }
        sum
    }

    fn total(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Puts an end where the next one of its key belongs, and moves that position on.
    fn put(&mut self, key: QueryKey, end: NodeId) {
        if let Some(at) = self.position(key) {
            self.ends[self.starts[at] as usize] = end.0 as u32;
            self.starts[at] += 1;
        }
    }

    /// Sorts the ends of each key, and keeps each once. Every start is the next one's by now.
    fn finish(&mut self) {
        let (mut start, mut kept) = (0usize, 0usize);
        for at in 0..self.keys.len() {
            let end = self.starts[at] as usize;
            self.ends[start..end].sort_unstable();
            self.starts[at] = kept as u64;
            for from in start..end {
                if from == start || self.ends[from] != self.ends[from - 1] {
                    self.ends[kept] = self.ends[from];
                    kept += 1;
                }
            }
            start = end;
        }
        let last = self.starts.len() - 1;
        self.starts[last] = kept as u64;
        self.ends.truncate(kept);
        self.ends.shrink_to_fit();
    }

    fn of(&self, key: QueryKey) -> Option<&[u32]> {
        let at = self.position(key)?;
        Some(&self.ends[self.starts[at] as usize..self.starts[at + 1] as usize])
    }

    fn bytes(&self) -> u64 {
        let keys = self.keys.capacity() * size_of::<QueryKey>();
        (keys + self.starts.capacity() * 8 + self.ends.capacity() * 4) as u64
    }
}

impl TrueEndsRequest<'_> {
    /// Refuses an index that is larger than allowed, before its ends are allocated.
    fn check(&self, index: &TrueEnds, ends: u64) -> Result<()> {
        let queries = (index.targets.keys.len() + index.sources.keys.len()) as u64;
        self.allow(queries, index.bytes() + ends * 4)
    }

    fn allow(&self, queries: u64, needed: u64) -> Result<()> {
        match needed > self.most_bytes {
            true => {
                let (needed, allowed) = (ByteCount(needed), ByteCount(self.most_bytes));
                Err(SampleError::TrueEndsMemory { queries, needed, allowed })
            }
            false => Ok(()),
        }
    }

    fn for_each_query(&self, stop: &dyn Fn() -> bool, mut take: impl FnMut(Edge)) -> Result<()> {
        let count = match self.queries {
            Queries::Of(edges) => edges.len() as u64,
            Queries::Split(rows) => rows.len(),
            Queries::Graph => self.dataset.manifest().edges.count,
        };
        // Vectors that grow by doubling have twice the room at most.
        self.allow(2 * count, 2 * count.saturating_mul(2 * size_of::<QueryKey>() as u64))?;
        match self.queries {
            Queries::Of(edges) => edges.iter().copied().for_each(take),
            Queries::Split(rows) => rows.for_each(take)?,
            Queries::Graph => for_each_edge_until(self.dataset, stop, &mut take)?,
        }
        Ok(())
    }

    fn for_each_true(&self, stop: &dyn Fn() -> bool, mut take: impl FnMut(Edge)) -> Result<()> {
        for_each_edge_until(self.dataset, stop, &mut take)?;
        if !self.held_out {
            return Ok(());
        }
        // Held out once, an undirected edge is true both ways.
        let undirected = self.dataset.manifest().edges.undirected;
        for split in [HeldOut::Valid, HeldOut::Test] {
            EdgeRows::open(self.dataset, split)?.for_each(|edge| {
                take(edge);
                if undirected {
                    take(Edge { source: edge.target, target: edge.source, ..edge });
                }
            })?;
        }
        Ok(())
    }
}

/// Which of `edges` are true: edges of the graph, or held out. One pass over all edges. `stop` is called once in a while;
/// if it returns `true`, the work ends with [`SampleError::Stopped`].
pub fn true_edges(dataset: &Dataset, edges: &[Edge], stop: &dyn Fn() -> bool) -> Result<Vec<bool>> {
    let mut ascending: Vec<usize> = (0..edges.len()).collect();
    ascending.sort_unstable_by_key(|at| edges[*at]);
    let mut found = vec![false; edges.len()];
    let queries = Queries::Of(edges);
    let request = TrueEndsRequest { dataset, queries, held_out: true, most_bytes: u64::MAX };
    request.for_each_true(stop, |edge| {
        let first = ascending.partition_point(|at| edges[*at] < edge);
        for at in ascending[first..].iter().take_while(|at| edges[**at] == edge) {
            found[*at] = true;
        }
    })?;
    Ok(found)
}

/// Passes every edge of the graph to `take`, in the order of edge ids.
pub fn for_each_edge(dataset: &Dataset, take: &mut dyn FnMut(Edge)) -> Result<()> {
    for_each_edge_until(dataset, &|| false, take)
}

pub(crate) fn for_each_edge_until(
    dataset: &Dataset,
    stop: &dyn Fn() -> bool,
    take: &mut dyn FnMut(Edge),
) -> Result<()> {
    match dataset.manifest().id_dtype() {
        Dtype::U64 => edges_in_order::<u64>(dataset, stop, take),
        _ => edges_in_order::<u32>(dataset, stop, take),
    }
}

fn edges_in_order<W: StoredId>(
    dataset: &Dataset,
    stop: &dyn Fn() -> bool,
    take: &mut dyn FnMut(Edge),
) -> Result<()> {
    let mut adjacency = AdjacencyInOrder::<W>::open(dataset, Direction::Incoming)?;
    let mut relations = match dataset.array(file::EDGE_RELATION) {
        Some(array) => Some(RelationsInOrder { elements: array.elements(0)?, chunk: Vec::new(), at: 0 }),
        None => None,
    };
    for node in 0..dataset.manifest().nodes.count {
        if node % CHUNK as u64 == 0 && stop() {
            return Err(SampleError::Stopped);
        }
        let mut left = adjacency.next_degree()?;
        while left > 0 {
            let (words, range) = adjacency.next_entries(left)?;
            left -= range.len() as u64;
            for word in &words[range] {
                let relation = match &mut relations {
                    Some(relations) => relations.next()?,
                    None => 0,
                };
                take(Edge { source: word.node(), target: NodeId(node), relation });
            }
        }
    }
    Ok(())
}

/// The relations of all edges, in the order of edge ids.
struct RelationsInOrder {
    elements: Elements,
    chunk: Vec<u32>,
    at: usize,
}

impl RelationsInOrder {
    fn next(&mut self) -> Result<u32> {
        if self.at == self.chunk.len() {
            self.chunk.resize(CHUNK, 0);
            let filled = self.elements.fill(&mut self.chunk)?;
            self.chunk.truncate(filled);
            self.at = 0;
        }
        self.at += 1;
        // The manifest promises a relation for each edge, and the file has its length.
        Ok(self.chunk[self.at - 1])
    }
}
