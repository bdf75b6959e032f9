//! Predictions of a model of links: scores of given edges, the best candidates of a query, and the rows of nodes and
//! relations.

use crate::evaluate::Context;
use crate::link::rank::Ranking;
use crate::link::rows::{NodeRows, StoredNodes};
use crate::link::split::Query;
use crate::link::stream::Streaming;
use crate::{EvaluationMode, OpenRun, Result, TrainError};
use esker_nn::{Backend, Candidates, LinkMath, Shape};
use esker_sample::Edge;
use esker_sample::negatives::Side;
use esker_types::NodeId;

/// Nodes that are handed over at a time.
const PIECE_NODES: usize = 1 << 14;

/// Receives the numbers of some nodes or relations, and their rows.
pub type TakeLinkRows<'a> = &'a mut dyn FnMut(&[NodeId], &[f32]) -> Result<()>;

/// A candidate of a query and its score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoredNode {
    /// The node.
    pub node: NodeId,
    /// Its score.
    pub score: f32,
}

/// A model of links with the representations of all nodes.
pub struct LinkModel<'a, B: Backend> {
    context: Context<'a, B>,
    rows: NodeRows<B>,
}

/// Does something with a model of links.
pub fn with_link_model<B: LinkMath, R, E: From<TrainError>>(
    run: &mut OpenRun<B>,
    mode: EvaluationMode,
    work: impl FnOnce(&LinkModel<'_, B>) -> Result<R, E>,
) -> Result<R, E> {
    let (stop, progress) = (run.stop_signal(), run.progress());
    let is_asked = || stop.is_asked();
    let mut context = Context { progress: &*progress, ..run.context(&is_asked) };
    if context.links.is_none() {
        return Err(TrainError::NodeBatch.into());
    }
    let rows = context.node_rows(mode, None)?;
    work(&LinkModel { context, rows })
}

impl<B: LinkMath> LinkModel<'_, B> {
    fn ranking<'b>(&'b self, nodes: &'b B::Matrix) -> Result<Ranking<'b, B>> {
        Ranking::new(self.context.learner, nodes, self.context.config.seed)
    }

    fn streaming<'b>(&'b self, rows: &'b StoredNodes) -> Result<Streaming<'b, B>> {
        let Context { learner, config, stop, .. } = &self.context;
        let settings = learner.objective().links().ok_or(TrainError::NodeBatch)?.config.ranks;
        Ok(Streaming { learner, rows, seed: config.seed, settings, stop })
    }

    /// The scores of edges, in order.
    pub fn scores(&self, edges: &[Edge]) -> Result<Vec<f32>> {
        match &self.rows {
            NodeRows::Resident(nodes) => {
                let ranking = self.ranking(nodes)?;
                self.context.learner.compute(|| ranking.edge_scores(edges))
            }
            NodeRows::Stored(rows) => self.streaming(rows)?.edge_scores(edges),
        }
    }

    /// The `count` candidates for one end of an edge with the greatest scores, best first; equal ones by node.
    pub fn best(&self, known: NodeId, relation: u32, side: Side, count: usize) -> Result<Vec<ScoredNode>> {
        let query = Query { known, relation, side, answer: known };
        let nodes = match &self.rows {
            NodeRows::Resident(nodes) => nodes,
            NodeRows::Stored(rows) => return self.streaming(rows)?.best(&query, count),
        };
        let ranking = self.ranking(nodes)?;
        let mut scores = vec![0.0; nodes.rows()];
        self.context.learner.compute(|| ranking.all_scores(&query, &mut scores))?;
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        let by_score = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
        let count = count.min(order.len());
        if count < order.len() {
            order.select_nth_unstable_by(count, by_score);
        }
        order.truncate(count);
        order.sort_unstable_by(by_score);
        let scored = |node: u32| ScoredNode { node: NodeId(node as u64), score: scores[node as usize] };
        Ok(order.into_iter().map(scored).collect())
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        match &self.rows {
            NodeRows::Resident(nodes) => nodes.rows(),
            NodeRows::Stored(rows) => rows.nodes as usize,
        }
    }

    /// Columns of a node's row.
    pub fn columns(&self) -> usize {
        match &self.rows {
            NodeRows::Resident(nodes) => nodes.columns(),
            NodeRows::Stored(rows) => rows.table.columns,
        }
    }

    /// Passes the rows of all nodes to `take`, some at a time and in order.
    pub fn each_node(&self, take: TakeLinkRows<'_>) -> Result<()> {
        match &self.rows {
            NodeRows::Resident(nodes) => self.each_row(nodes, take),
            NodeRows::Stored(rows) => self.streaming(rows)?.each_node(take),
        }
    }

    /// The same for the rows of relations, inverse ones last, if the decoder has any.
    pub fn each_relation(&self, take: TakeLinkRows<'_>) -> Result<()> {
        let objective = self.context.learner.objective().links();
        match objective.and_then(|objective| objective.relation_rows()) {
            Some(rows) => self.each_row(rows, take),
            None => Ok(()),
        }
    }

    /// Rows and columns of relations, if the decoder has any.
    pub fn relation_shape(&self) -> Option<(usize, usize)> {
        let objective = self.context.learner.objective().links();
        objective.and_then(|objective| objective.relation_rows()).map(|rows| (rows.rows(), rows.columns()))
    }

    fn each_row(&self, rows: &B::Matrix, take: TakeLinkRows<'_>) -> Result<()> {
        let (count, backend) = (rows.rows(), self.context.learner.backend());
        let mut values = Vec::new();
        for first in (0..count).step_by(PIECE_NODES) {
            let ids: Vec<NodeId> =
                (first..count.min(first + PIECE_NODES)).map(|row| NodeId(row as u64)).collect();
            values.resize(ids.len() * rows.columns(), 0.0);
            backend.read(rows, first, &mut values);
            backend.check()?;
            take(&ids, &values)?;
        }
        Ok(())
    }
}

impl<B: LinkMath> Ranking<'_, B> {
    /// The scores of every node for a query.
    fn all_scores(&self, query: &Query, scores: &mut [f32]) -> Result<()> {
        let rows = self.query_rows(&[*query]);
        let backend = &self.objective.backend;
        let mut found = backend.matrix(1, self.nodes.rows());
        backend.link_scores(&self.scores(&rows, Candidates::All), &mut found);
        backend.read(&found, 0, scores);
        Ok(backend.check()?)
    }
}
