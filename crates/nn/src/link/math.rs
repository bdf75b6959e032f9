//! The operations of link prediction that a device must provide, beside those of [`Backend`].

use crate::{Backend, DecoderKind, LinkLoss, Result, Update};
use std::fmt;

/// The end of an edge that candidates replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplacedEnd {
    /// Its source: queries are formed from targets.
    Source,
    /// Its target: queries are formed from sources.
    Target,
}

/// Forms one query row per edge from its known end and its relation. With inverse relations, edges whose source is
/// replaced form queries as [`ReplacedEnd::Target`], with the known target and the inverse relation's row.
pub struct QueryCall<'a, B: Backend> {
    /// The decoder.
    pub decoder: DecoderKind,
    /// The end that is not known.
    pub replaced: ReplacedEnd,
    /// Rows of nodes.
    pub nodes: &'a B::Matrix,
    /// The row of each edge's known end.
    pub known: &'a [u32],
    /// Rows of relations, with [`DecoderKind::relation_columns`]; `None` for [`DecoderKind::Dot`].
    pub relations: Option<&'a B::Matrix>,
    /// The row of each edge's relation; empty without relations.
    pub relation_of: &'a [u32],
}

/// The candidates of queries, as rows of a matrix of nodes.
#[derive(Debug, Clone, Copy)]
pub enum Candidates<'a> {
    /// The queries of a chunk share candidates. Chunks of one query give each its own.
    Chunks {
        /// Queries per chunk; the last chunk may have fewer.
        chunk_edges: usize,
        /// Candidates per chunk.
        per_chunk: usize,
        /// The rows of the candidates, chunk after chunk.
        rows: &'a [u32],
    },
    /// Every row of the matrix is a candidate of every query.
    All,
}

/// Queries and their candidates.
pub struct ScoreCall<'a, B: Backend> {
    /// The decoder.
    pub decoder: DecoderKind,
    /// One row per edge.
    pub queries: &'a B::Matrix,
    /// Rows of nodes.
    pub nodes: &'a B::Matrix,
    /// The candidates.
    pub candidates: Candidates<'a>,
}

/// What a loss compares.
#[derive(Debug, Clone, Copy)]
pub struct LossCall<'a> {
    /// The loss of an edge.
    pub loss: LinkLoss,
    /// Factor of the summed losses and of the gradients: 1 for a sum, 1 / edges for a mean.
    pub scale: f32,
    /// A factor for each edge; empty if all are 1.
    pub weights: &'a [f32],
    /// The row of each edge's true end. With [`Candidates::All`] it is not a negative.
    pub own: &'a [u32],
    /// Candidates that are not negatives.
    pub masked: &'a dyn MaskedCandidates,
}

/// Candidates that are not negatives of an edge. A loss asks for them when the edge's scores are there: with every node
/// a candidate, a list for all edges has no bound but edges x nodes.
pub trait MaskedCandidates: fmt::Debug + Sync {
    /// Passes on those of an edge: candidates of its chunk, or rows of the nodes. One may come twice.
    fn for_each(&self, edge: usize, take: &mut dyn FnMut(u32));
}

/// (edge, candidate), ascending.
impl MaskedCandidates for Vec<(u32, u32)> {
    fn for_each(&self, edge: usize, take: &mut dyn FnMut(u32)) {
        let start = self.partition_point(|(of, _)| (*of as usize) < edge);
        let of_edge = self[start..].iter().take_while(|(of, _)| *of as usize == edge);
        of_edge.for_each(|(_, candidate)| take(*candidate));
    }
}

/// Gradients of [`LinkMath::link_loss`], all overwritten.
pub struct LinkGradients<'a, B: Backend> {
    /// One row per query.
    pub queries: &'a mut B::Matrix,
    /// One row per edge: the gradient of its true end.
    pub own: &'a mut B::Matrix,
    /// The gradient of the candidates.
    pub candidates: CandidateGradients<'a, B>,
}

/// Where the gradient of candidates goes.
pub enum CandidateGradients<'a, B: Backend> {
    /// One row per candidate of every chunk, or per row of the nodes with [`Candidates::All`].
    Rows(&'a mut B::Matrix),
    /// One row per row of the nodes, summed: for chunks of one edge, whose candidates are too many for a row each.
    ByNode {
        /// Node row `i` is the candidate at `members[offsets[i]..offsets[i + 1]]`.
        offsets: &'a [u32],
        /// Positions among the candidates of all chunks; each occurs once.
        members: &'a [u32],
        /// Overwritten, in the order of the members.
        to: &'a mut B::Matrix,
    },
}

/// Counts of candidates by their score against a threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RankCounts {
    /// Candidates above it, or not a number.
    pub greater: u64,
    /// Candidates with the same score.
    pub equal: u64,
}

/// Compares candidates with a threshold per query.
pub struct RankCall<'a, B: Backend> {
    /// Queries and candidates.
    pub scores: ScoreCall<'a, B>,
    /// One row per query, one column: from [`LinkMath::own_scores`].
    pub thresholds: &'a B::Matrix,
    /// Candidates that are not counted: (query, candidate), ascending. A query's own true end is counted unless it is
    /// in here.
    pub filtered: &'a [(u32, u32)],
    /// The number by which `filtered` names the first candidate: candidates may come in blocks. Filtered candidates
    /// outside the block are ignored.
    pub first: u32,
}

/// A penalty on the size of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PenaltyKind {
    /// Sum of squares.
    L2,
    /// Sum of absolute cubes.
    N3,
    /// Sum of the cubed moduli of complex numbers (kbc).
    ComplexN3,
}

/// The operations of link prediction. Results do not depend on the number of threads; losses and gradients of a GPU
/// are the same in every run.
pub trait LinkMath: Backend {
    /// Writes the query rows.
    fn link_queries(&self, call: &QueryCall<'_, Self>, queries: &mut Self::Matrix);
    /// Turns the gradient of the queries into that of the known ends, in place. The gradient of the relations, one row
    /// per edge, is overwritten.
    fn link_queries_backward(
        &self,
        call: &QueryCall<'_, Self>,
        gradient: &mut Self::Matrix,
        relation_gradient: Option<&mut Self::Matrix>,
    );

    /// The summed loss of all edges, times the scale, and its gradients.
    fn link_loss(
        &self,
        call: &ScoreCall<'_, Self>,
        loss: &LossCall<'_>,
        into: LinkGradients<'_, Self>,
    ) -> Result<Self::Number>;

    /// The score of each query with its own row of the nodes: one column. A row that is also a candidate has exactly
    /// this score there. Candidates of the call are ignored.
    fn own_scores(&self, call: &ScoreCall<'_, Self>, own: &[u32], scores: &mut Self::Matrix);
    /// The scores of all candidates: one row per query.
    fn link_scores(&self, call: &ScoreCall<'_, Self>, scores: &mut Self::Matrix);
    /// Adds the counts of these candidates to `counts`, one entry per query. The result does not depend on how
    /// candidates are cut into blocks. Waits for the device.
    fn rank_counts(&self, call: &RankCall<'_, Self>, counts: &mut [RankCounts]) -> Result<()>;

    /// `to[i]` = sum of the rows `members[offsets[i]..offsets[i + 1]]` of all parts, in this order. Members count
    /// through the parts one after the other. At most [`MOST_PARTS`] parts.
    fn sum_rows(&self, parts: &[&Self::Matrix], offsets: &[u32], members: &[u32], to: &mut Self::Matrix);
    /// Updates the given rows of a table and of its state with their gradients, one row each. Rows do not repeat;
    /// ascending ones are fastest. Other rows stay as they are. The norm is not clipped.
    fn update_rows(
        &self,
        update: &Update,
        rows: &[u32],
        gradient: &Self::Matrix,
        value: &mut Self::Matrix,
        state: &mut [Self::Matrix],
    );
    /// The sum over rows of `weights[row]` x the penalty of the row. Its gradient is added to `gradient`.
    fn penalty(
        &self,
        kind: PenaltyKind,
        weights: &[f32],
        rows: &Self::Matrix,
        gradient: &mut Self::Matrix,
    ) -> Result<Self::Number>;
}

/// Most parts of [`LinkMath::sum_rows`].
pub const MOST_PARTS: usize = 8;

/// The candidates of each query, and all of them together.
pub(crate) struct CandidateShape {
    /// Queries per chunk.
    pub chunk_edges: usize,
    /// Candidates per query.
    pub each: usize,
    /// Candidates of all chunks.
    pub all: usize,
}

impl Candidates<'_> {
    /// Their shape for so many queries and nodes. Asserts that all are there.
    pub(crate) fn shape(&self, queries: usize, nodes: usize) -> CandidateShape {
        match *self {
            Candidates::Chunks { chunk_edges, per_chunk, rows } => {
                assert!(chunk_edges > 0, "a chunk has at least one edge");
                let all = queries.div_ceil(chunk_edges) * per_chunk;
                assert_eq!(rows.len(), all, "as many candidates as all chunks have");
                assert!(rows.iter().all(|row| (*row as usize) < nodes), "candidates are rows of the nodes");
                CandidateShape { chunk_edges, each: per_chunk, all }
            }
            Candidates::All => CandidateShape { chunk_edges: queries.max(1), each: nodes, all: nodes },
        }
    }
}
