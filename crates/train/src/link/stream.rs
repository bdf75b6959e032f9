//! Ranks of candidates that are read block by block, in the order in which their rows are stored. A rank is a count of
//! candidates with greater and equal scores, and the score of a pair has the same bits in any block, so ranks are those
//! of all rows in memory.
//!
//! Query rows of some held-out edges are formed first, from the rows of their ends. Then all candidates pass by once. As
//! many passes are made as edges need.

use crate::link::rank::Ranking;
use crate::link::rows::StoredNodes;
use crate::link::split::{
    BY_NODE, EndsByPosition, FilteredQueries, FixedCandidates, FoundEnds, PIECE_CANDIDATES, PIECE_QUERIES,
    PreparedSplit, Query, SplitWatch,
};
use crate::link::{Links, RankConfig, ScoredNode, TakeLinkRows};
use crate::whole::table::{RowService, Wanted};
use crate::{Learner, Result, TrainError};
use esker_nn::{Backend, Candidates, DecoderKind, LinkMath, RankCall, RankCounts, ScoreCall, Shape};
use esker_sample::{Edge, FixedNegatives};
use esker_types::NodeId;
use std::ops::Range;
use std::sync::Arc;

/// Nodes whose rows are handed over at a time.
const PIECE_NODES: usize = 1 << 12;

/// Ranks and scores with rows that are read.
pub(super) struct Streaming<'a, B: Backend> {
    pub learner: &'a Learner<B>,
    pub rows: &'a StoredNodes,
    pub seed: u64,
    pub settings: RankConfig,
    pub stop: &'a dyn Fn() -> bool,
}

/// The rows of the ends of some edges.
struct EndRows<'a, B: Backend> {
    rows: B::Matrix,
    /// Their positions, ascending.
    positions: Vec<u64>,
    stored: &'a StoredNodes,
}

impl<B: LinkMath> EndRows<'_, B> {
    /// The number of a node's row among these, as a node.
    fn local(&self, node: NodeId) -> NodeId {
        let found = self.positions.binary_search(&self.stored.table.position(node));
        NodeId(found.expect("rows of all ends were read") as u64)
    }

    fn edge(&self, edge: &Edge) -> Edge {
        Edge { source: self.local(edge.source), target: self.local(edge.target), ..*edge }
    }

    fn query(&self, query: &Query) -> Query {
        Query { known: self.local(query.known), answer: self.local(query.answer), ..*query }
    }
}

/// Queries of one side that are compared with candidates together.
struct QueryPiece<B: Backend> {
    numbers: Vec<usize>,
    rows: B::Matrix,
    thresholds: B::Matrix,
    counts: Vec<RankCounts>,
}

impl<B: LinkMath> QueryPiece<B> {
    /// Compares each query with its own candidates among some rows. `own` has (query, row), ascending; the first query
    /// has this number.
    pub fn count_own(
        &mut self,
        (backend, decoder): (&B, DecoderKind),
        rows: &B::Matrix,
        first: u32,
        own: &[(u32, u32)],
    ) -> Result<()> {
        let count = self.numbers.len();
        let mut candidates = vec![&own[..0]; count];
        for of_query in own.chunk_by(|a, b| a.0 == b.0) {
            candidates[(of_query[0].0 - first) as usize] = of_query;
        }
        let most = candidates.iter().map(|of| of.len()).max().unwrap_or(0);
        let width = (PIECE_CANDIDATES / count.max(1)).max(1);
        for from in (0..most).step_by(width) {
            let each = width.min(most - from);
            let (mut listed, mut filtered) = (Vec::with_capacity(count * each), Vec::new());
            for (at, of) in (0..).zip(&candidates) {
                let of = &of[from.min(of.len())..of.len().min(from + each)];
                listed.extend(of.iter().map(|(_, row)| *row));
                // All queries have as many; what some have too many of is not counted.
                filtered.extend((of.len()..each).map(|index| (at, index as u32)));
                listed.resize(listed.len() + each - of.len(), 0);
            }
            let own = Candidates::Chunks { chunk_edges: 1, per_chunk: each, rows: &listed };
            let scores = ScoreCall { decoder, queries: &self.rows, nodes: rows, candidates: own };
            let call = RankCall { scores, thresholds: &self.thresholds, filtered: &filtered, first: 0 };
            backend.rank_counts(&call, &mut self.counts)?;
        }
        Ok(())
    }
}

/// A candidate of a query: its position, and the number of the query among those of a pass.
type ListedCandidate = (u32, u32);

impl<'a, B: LinkMath> Streaming<'a, B> {
    fn backend(&self) -> &'a B {
        self.learner.backend()
    }

    fn reads(&self) -> Result<RowService<B>> {
        RowService::start(&self.rows.table, self.backend(), &Arc::default(), 1)
    }

    fn block(&self) -> usize {
        let block = self.rows.stream.block_nodes.min(self.settings.block.map_or(u64::MAX, u64::from));
        block.max(1) as usize
    }

    fn wanted(&self, first: u64, count: usize) -> Wanted {
        match self.rows.table.is_by_node() {
            true => Wanted::Range { first, count },
            false => {
                let mut nodes = Vec::with_capacity(count);
                self.rows.table.nodes_at(first, count as u64, &mut nodes);
                Wanted::Nodes(nodes)
            }
        }
    }

    /// Passes all rows to `take`, block by block: the position of the first, and the rows. The next block is read
    /// meanwhile.
    pub fn each_block(&self, take: &mut dyn FnMut(u64, &B::Matrix) -> Result<()>) -> Result<()> {
        let (count, block) = (self.rows.nodes, self.block());
        let of = |first: u64| self.wanted(first, (count - first).min(block as u64) as usize);
        if count == 0 {
            return Ok(());
        }
        let mut service = self.reads()?;
        service.request(of(0));
        for first in (0..count).step_by(block) {
            if (self.stop)() {
                return Err(TrainError::Stopped);
            }
            let rows = service.take(self.backend())?;
            let next = first + block as u64;
            if next < count {
                service.request(of(next));
            }
            take(first, &rows)?;
        }
        Ok(())
    }

    /// Reads the rows of both ends of edges, in the order in which they are stored.
    fn end_rows(&self, edges: &[Edge]) -> Result<EndRows<'a, B>> {
        let stored = self.rows;
        let ends = edges.iter().flat_map(|edge| [edge.source, edge.target]);
        let mut ends: Vec<(u64, NodeId)> = ends.map(|node| (stored.table.position(node), node)).collect();
        ends.sort_unstable();
        ends.dedup();
        let (mut service, backend) = (self.reads()?, self.backend());
        let mut rows = backend.matrix(ends.len(), stored.table.columns);
        for (first, piece) in (0..).step_by(self.block()).zip(ends.chunks(self.block())) {
            if (self.stop)() {
                return Err(TrainError::Stopped);
            }
            let nodes = piece.iter().map(|(_, node)| *node).collect();
            let read = service.fetch(backend, Wanted::Nodes(nodes))?;
            let to: Vec<u32> = (first..first + piece.len() as u32).collect();
            self.learner.compute(|| backend.scatter_rows(Some(&read), &to, &mut rows));
        }
        backend.check()?;
        Ok(EndRows { rows, positions: ends.into_iter().map(|(position, _)| position).collect(), stored })
    }

    /// Edges that are scored or ranked at a time.
    fn pass_edges(&self) -> usize {
        self.rows.stream.pass_edges.max(1) as usize
    }

    /// The scores of edges, in order.
    pub fn edge_scores(&self, edges: &[Edge]) -> Result<Vec<f32>> {
        let mut scores = Vec::with_capacity(edges.len());
        for edges in edges.chunks(self.pass_edges()) {
            let ends = self.end_rows(edges)?;
            let local: Vec<Edge> = edges.iter().map(|edge| ends.edge(edge)).collect();
            let ranking = Ranking::new(self.learner, &ends.rows, self.seed)?;
            scores.extend(self.learner.compute(|| ranking.edge_scores(&local))?);
        }
        Ok(scores)
    }

    /// The rank of each query, if it has candidates, in the order of queries.
    pub fn ranks(
        &self,
        prepared: &PreparedSplit,
        links: &Links,
        edges: &[Edge],
        watch: SplitWatch<'_>,
    ) -> Result<Vec<Option<f64>>> {
        let mut ranks = vec![None; prepared.queries.len()];
        let by_position = |node| self.rows.table.position(node);
        let ends = EndsByPosition { numbering: &by_position, most_bytes: self.rows.stream.end_bytes };
        for part in prepared.parts(self.pass_edges()) {
            let found = prepared.found(links, &edges[part.clone()], &self.settings, ends, watch)?;
            for piece in self.rank_part(prepared, &found, &edges[part.clone()], part, &by_position)? {
                for (number, counts) in piece.numbers.iter().zip(&piece.counts) {
                    ranks[*number] = Some(self.settings.ties.rank(counts.greater, counts.equal));
                }
            }
        }
        Ok(ranks)
    }

    /// Counts the candidates of the queries of some edges, in one pass.
    fn rank_part(
        &self,
        prepared: &PreparedSplit,
        found: &FoundEnds<'_>,
        edges: &[Edge],
        part: Range<usize>,
        by_position: &(dyn Fn(NodeId) -> u64 + Sync),
    ) -> Result<Vec<QueryPiece<B>>> {
        let is_listed =
            self.settings.candidates.is_some() || matches!(prepared.fixed, FixedCandidates::Own(_));
        let numbering = if is_listed { BY_NODE } else { by_position };
        let queries = FilteredQueries::of(&prepared.queries, found, numbering);
        let mut pieces = self.pieces(&queries, &prepared.fixed, self.end_rows(edges)?, part)?;
        match is_listed {
            true => {
                let listed = self.listed(&queries, &prepared.fixed, &pieces)?;
                self.count_listed(listed, &mut pieces)?;
            }
            false => self.count_all(&queries, &mut pieces)?,
        }
        Ok(pieces)
    }

    /// The rows of queries, and the scores of their answers.
    fn pieces(
        &self,
        queries: &FilteredQueries<'_>,
        fixed: &FixedCandidates,
        ends: EndRows<'_, B>,
        part: Range<usize>,
    ) -> Result<Vec<QueryPiece<B>>> {
        let ranking = Ranking::new(self.learner, &ends.rows, self.seed)?;
        let mut pieces = Vec::new();
        for side in (0..2).filter(|side| fixed.of_side(*side).is_some()) {
            let numbers: Vec<usize> = (2 * part.start + side..2 * part.end).step_by(2).collect();
            let mut rest = &numbers[..];
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(queries.fitting(rest, PIECE_QUERIES));
                rest = after;
                let local: Vec<Query> =
                    piece.iter().map(|number| ends.query(&queries.queries[*number])).collect();
                let (rows, thresholds) = self.learner.compute(|| {
                    let rows = ranking.query_rows(&local);
                    let thresholds = ranking.own_scores(&rows, &local);
                    (rows, thresholds)
                });
                ranking.check_thresholds(&thresholds)?;
                let (numbers, counts) = (piece.to_vec(), vec![RankCounts::default(); piece.len()]);
                pieces.push(QueryPiece { numbers, rows, thresholds, counts });
            }
        }
        self.backend().check()?;
        Ok(pieces)
    }

    fn decoder(&self) -> Result<DecoderKind> {
        let objective = self.learner.objective().links().ok_or(TrainError::NodeBatch)?;
        Ok(objective.config.decoder)
    }

    /// Compares all queries with all candidates.
    fn count_all(&self, queries: &FilteredQueries<'_>, pieces: &mut [QueryPiece<B>]) -> Result<()> {
        let (backend, decoder) = (self.backend(), self.decoder()?);
        self.each_block(&mut |first, rows| {
            let range = first as u32..(first + rows.rows() as u64) as u32;
            self.learner.compute(|| {
                for piece in &mut *pieces {
                    let filtered = &queries.left_out(&piece.numbers, range.clone());
                    let (queries, candidates) = (&piece.rows, Candidates::All);
                    let scores = ScoreCall { decoder, queries, nodes: rows, candidates };
                    let call =
                        RankCall { scores, thresholds: &piece.thresholds, filtered, first: range.start };
                    backend.rank_counts(&call, &mut piece.counts)?;
                }
                Ok(())
            })
        })
    }

    /// The candidates that are drawn for queries, or came with them, and are counted: by position.
    fn listed(
        &self,
        queries: &FilteredQueries<'_>,
        fixed: &FixedCandidates,
        pieces: &[QueryPiece<B>],
    ) -> Result<Vec<ListedCandidate>> {
        let table = &self.rows.table;
        let (mut listed, mut order) = (Vec::new(), 0u32);
        let each = match (self.settings.candidates, fixed) {
            (Some(drawn), _) => drawn as usize,
            (None, FixedCandidates::Own(sides)) => {
                sides.iter().flatten().map(FixedNegatives::per_edge).max().unwrap_or(0)
            }
            _ => 0,
        };
        listed.reserve_exact(each * pieces.iter().map(|piece| piece.numbers.len()).sum::<usize>());
        let mut nodes = Vec::new();
        for number in pieces.iter().flat_map(|piece| &piece.numbers) {
            match (self.settings.candidates, fixed.of_side(number % 2).flatten()) {
                (Some(all), _) => {
                    for first in (0..all).step_by(PIECE_CANDIDATES) {
                        let indexes = first..all.min(first.saturating_add(PIECE_CANDIDATES as u32));
                        let (drawn, filtered) = queries.draw(&[*number], indexes, self.rows.nodes, self.seed);
                        let mut filtered = filtered.into_iter().map(|(_, index)| index).peekable();
                        for (index, node) in (0..).zip(drawn) {
                            if filtered.next_if_eq(&index).is_none() {
                                listed.push((table.position(NodeId(node as u64)) as u32, order));
                            }
                        }
                    }
                }
                (None, Some(fixed)) => {
                    nodes.clear();
                    fixed.nodes(&[*number as u64 / 2], &mut nodes)?;
                    listed.extend(nodes.iter().map(|node| (table.position(*node) as u32, order)));
                }
                (None, None) => {}
            }
            order += 1;
        }
        listed.sort_unstable();
        Ok(listed)
    }

    /// Compares each query with its own candidates.
    fn count_listed(&self, listed: Vec<ListedCandidate>, pieces: &mut [QueryPiece<B>]) -> Result<()> {
        let (backend, decoder) = (self.backend(), self.decoder()?);
        let mut rest = &listed[..];
        let mut inside = Vec::new();
        self.each_block(&mut |first, rows| {
            let end = first + rows.rows() as u64;
            let (now, later) = rest.split_at(rest.partition_point(|(at, _)| u64::from(*at) < end));
            rest = later;
            inside.clear();
            inside.extend(now.iter().map(|(at, query)| (*query, at - first as u32)));
            inside.sort_unstable();
            let mut of_pieces = &inside[..];
            let mut next = 0;
            for piece in &mut *pieces {
                let before = next;
                next += piece.numbers.len() as u32;
                let (own, others) = of_pieces.split_at(of_pieces.partition_point(|(query, _)| *query < next));
                of_pieces = others;
                self.learner.compute(|| piece.count_own((backend, decoder), rows, before, own))?;
            }
            Ok(())
        })
    }

    /// The candidates of a query with the greatest scores, best first; equal ones by node.
    pub fn best(&self, query: &Query, count: usize) -> Result<Vec<ScoredNode>> {
        let edge = Edge { source: query.known, target: query.known, relation: query.relation };
        let ends = self.end_rows(&[edge])?;
        let (ranking, decoder) = (Ranking::new(self.learner, &ends.rows, self.seed)?, self.decoder()?);
        let backend = self.backend();
        let rows = self.learner.compute(|| ranking.query_rows(&[ends.query(query)]));
        let (mut best, mut nodes, mut scores) = (Vec::new(), Vec::new(), Vec::new());
        self.each_block(&mut |first, block| {
            self.rows.table.nodes_at(first, block.rows() as u64, &mut nodes);
            scores.resize(nodes.len(), 0.0);
            let mut found = backend.matrix(1, nodes.len());
            let call = ScoreCall { decoder, queries: &rows, nodes: block, candidates: Candidates::All };
            self.learner.compute(|| backend.link_scores(&call, &mut found));
            self.learner.read(&found, 0, &mut scores)?;
            best.extend(
                nodes.iter().zip(&scores).map(|(node, score)| ScoredNode { node: *node, score: *score }),
            );
            keep_best(&mut best, count);
            Ok(())
        })?;
        best.sort_unstable_by(by_score);
        Ok(best)
    }

    /// Passes the rows of all nodes to `take`, in the order of nodes. Where they are stored in another, the rows of as
    /// many nodes as fit are picked out of all in a pass.
    pub fn each_node(&self, take: TakeLinkRows<'_>) -> Result<()> {
        let (count, columns) = (self.rows.nodes, self.rows.table.columns);
        if self.rows.table.is_by_node() {
            return self.each_piece(&mut |first, values| {
                let nodes: Vec<NodeId> = ids(first, values.len() / columns.max(1));
                take(&nodes, values)
            });
        }
        let (mut stored, mut picked) = (Vec::new(), Vec::new());
        let most = (self.rows.stream.export_bytes / (columns as u64 * 4).max(1)).max(self.block() as u64);
        for first in (0..count).step_by(most as usize) {
            let held = most.min(count - first) as usize;
            picked.resize(held * columns, 0.0);
            self.each_piece(&mut |position, values| {
                let rows = values.chunks_exact(columns.max(1));
                self.rows.table.nodes_at(position, rows.len() as u64, &mut stored);
                for (node, row) in stored.iter().zip(rows) {
                    if let Some(at) = node.0.checked_sub(first).filter(|at| *at < held as u64) {
                        picked[at as usize * columns..][..columns].copy_from_slice(row);
                    }
                }
                Ok(())
            })?;
            let pieces = picked.chunks((PIECE_NODES * columns).max(1));
            for (at, values) in (first..).step_by(PIECE_NODES).zip(pieces) {
                take(&ids(at, values.len() / columns.max(1)), values)?;
            }
        }
        Ok(())
    }

    /// Passes all rows to `take` from host memory: the position of the first, and some rows.
    fn each_piece(&self, take: &mut dyn FnMut(u64, &[f32]) -> Result<()>) -> Result<()> {
        let mut values = Vec::new();
        self.each_block(&mut |position, rows| {
            for first in (0..rows.rows()).step_by(PIECE_NODES) {
                values.resize(PIECE_NODES.min(rows.rows() - first) * rows.columns(), 0.0);
                self.learner.read(rows, first, &mut values)?;
                take(position + first as u64, &values)?;
            }
            Ok(())
        })
    }
}

/// So many nodes from one on.
fn ids(first: u64, count: usize) -> Vec<NodeId> {
    (first..first + count as u64).map(NodeId).collect()
}

/// The greater score first, then the lesser node.
fn by_score(a: &ScoredNode, b: &ScoredNode) -> std::cmp::Ordering {
    b.score.total_cmp(&a.score).then(a.node.cmp(&b.node))
}

/// Drops all but the best.
fn keep_best(nodes: &mut Vec<ScoredNode>, count: usize) {
    if nodes.len() > count {
        if count > 0 {
            nodes.select_nth_unstable_by(count - 1, by_score);
        }
        nodes.truncate(count);
    }
}
