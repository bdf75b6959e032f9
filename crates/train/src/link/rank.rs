//! Ranks held-out edges: the answer of each query among all nodes, or among some that are drawn for it. Both ends of
//! every edge are asked for. Candidates that make another true edge are left out, unless ranks are raw.

use crate::evaluate::Context;
use crate::link::split::{FixedCandidates, PreparedSplit, Query, queries_of};
use crate::link::{LinkObjective, RankConfig, RankMetrics, RankTally, Ties};
use crate::metrics::{Metrics, area};
use crate::task::SplitName;
use crate::{EvaluationMode, Learner, Result, TrainError};
use esker_nn::{Backend, Shape};
use esker_nn::{Candidates, LinkMath, QueryCall, RankCall, RankCounts, ReplacedEnd, ScoreCall};
use esker_sample::negatives::Side;
use esker_sample::{Edge, FixedNegatives};
use esker_strategies::{BatchSource, Phase, RunPosition, StrategyError};
use esker_types::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Queries that are ranked at a time.
pub(crate) const PIECE_QUERIES: usize = 1024;
/// Nodes whose rows are read at a time.
const PIECE_NODES: usize = 1 << 14;

/// The ranks of a split.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SplitRanks {
    /// Of all queries.
    pub all: RankMetrics,
    /// Of queries for sources.
    pub source: Option<RankMetrics>,
    /// Of queries for targets.
    pub target: Option<RankMetrics>,
    /// By relation, ascending, those that occur.
    pub relations: Vec<RelationRanks>,
    /// Area under the ROC curve: edges against as many pairs of nodes that are not edges.
    pub auc: Option<f64>,
    /// Average precision of the same.
    pub ap: Option<f64>,
}

/// The ranks of a relation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RelationRanks {
    /// The relation.
    pub relation: u32,
    /// Both sides of its edges.
    #[serde(flatten)]
    pub metrics: RankMetrics,
}

impl SplitRanks {
    /// The metrics of `edges` edges.
    pub fn metrics(&self, edges: u64) -> Metrics {
        Metrics {
            nodes: edges,
            loss: Metrics::NO_LOSS,
            auc: self.auc,
            ap: self.ap,
            ranks: Some(self.all),
            ..Metrics::default()
        }
    }
}

/// What ranks are computed from.
pub(super) struct Ranking<'a, B: Backend> {
    pub objective: &'a LinkObjective<B>,
    /// The representation of every node.
    pub nodes: &'a B::Matrix,
    settings: RankConfig,
    seed: u64,
}

impl<'a, B: LinkMath> Ranking<'a, B> {
    /// Ranks with the objective of a learner.
    pub fn new(learner: &'a Learner<B>, nodes: &'a B::Matrix, seed: u64) -> Result<Ranking<'a, B>> {
        let Some(objective) = learner.objective().links() else { return Err(TrainError::NodeBatch) };
        Ok(Ranking { objective, nodes, settings: objective.config.ranks, seed })
    }

    /// The query rows of some queries that have one side.
    pub fn query_rows(&self, queries: &[Query]) -> B::Matrix {
        let (objective, backend) = (self.objective, &self.objective.backend);
        let known: Vec<u32> = queries.iter().map(|query| query.known.0 as u32).collect();
        let relations = objective.relation_rows();
        let of = |query: &Query| objective.relation_of(query.relation, query.side).0;
        let relation_of: Vec<u32> = match relations {
            Some(_) => queries.iter().map(of).collect(),
            None => Vec::new(),
        };
        let replaced =
            queries.first().map_or(ReplacedEnd::Target, |query| objective.relation_of(0, query.side).1);
        let decoder = objective.config.decoder;
        let (known, relation_of) = (&known[..], &relation_of[..]);
        let call = QueryCall { decoder, replaced, nodes: self.nodes, known, relations, relation_of };
        let mut rows = backend.matrix(queries.len(), self.nodes.columns());
        backend.link_queries(&call, &mut rows);
        rows
    }

    pub fn scores<'b>(&'b self, queries: &'b B::Matrix, candidates: Candidates<'b>) -> ScoreCall<'b, B> {
        ScoreCall { decoder: self.objective.config.decoder, queries, nodes: self.nodes, candidates }
    }

    /// The score of each query's answer: on the device.
    fn own_scores(&self, rows: &B::Matrix, queries: &[Query]) -> B::Matrix {
        let own: Vec<u32> = queries.iter().map(|query| query.answer.0 as u32).collect();
        let mut scores = self.objective.backend.matrix(queries.len(), 1);
        self.objective.backend.own_scores(&self.scores(rows, Candidates::All), &own, &mut scores);
        scores
    }

    /// Counts candidates by their score, for the queries with these numbers, which have one side. They are the fixed
    /// ones, those that are drawn, or all nodes.
    fn counts(
        &self,
        split: &PreparedSplit,
        fixed: Option<&FixedNegatives>,
        numbers: &[usize],
    ) -> Result<Vec<RankCounts>> {
        let queries: Vec<Query> = numbers.iter().map(|number| split.queries[*number]).collect();
        let rows = self.query_rows(&queries);
        let thresholds = self.own_scores(&rows, &queries);
        let mut counts = vec![RankCounts::default(); queries.len()];
        let count_own = |each: usize, own: &[u32], filtered: &[(u32, u32)], counts: &mut [RankCounts]| {
            let candidates = Candidates::Chunks { chunk_edges: 1, per_chunk: each, rows: own };
            let (scores, thresholds) = (self.scores(&rows, candidates), &thresholds);
            self.objective.backend.rank_counts(&RankCall { scores, thresholds, filtered, first: 0 }, counts)
        };
        match (fixed, self.settings.candidates) {
            (Some(fixed), _) => {
                let edges: Vec<u64> = numbers.iter().map(|number| *number as u64 / 2).collect();
                let mut nodes = Vec::new();
                fixed.nodes(&edges, &mut nodes)?;
                let own: Vec<u32> = nodes.iter().map(|node| node.0 as u32).collect();
                count_own(fixed.per_edge(), &own, &[], &mut counts)?;
            }
            (None, Some(each)) => {
                let (own, filtered) = split.draw(numbers, each, self.nodes.rows() as u64, self.seed);
                count_own(each as usize, &own, &filtered, &mut counts)?;
            }
            (None, None) => self.count_all(&rows, &thresholds, &split.left_out(numbers), &mut counts)?,
        }
        Ok(counts)
    }

    /// Counts among all nodes, a block at a time.
    fn count_all(
        &self,
        rows: &B::Matrix,
        thresholds: &B::Matrix,
        filtered: &[(u32, u32)],
        counts: &mut [RankCounts],
    ) -> Result<()> {
        let (backend, all) = (&self.objective.backend, self.nodes.rows());
        let Some(block) = self.settings.block.map(|block| block as usize).filter(|block| *block < all) else {
            let scores = self.scores(rows, Candidates::All);
            return Ok(backend.rank_counts(&RankCall { scores, thresholds, filtered, first: 0 }, counts)?);
        };
        for first in (0..all).step_by(block) {
            let nodes: Vec<u32> = (first as u32..all.min(first + block) as u32).collect();
            let mut part = backend.matrix(nodes.len(), self.nodes.columns());
            backend.gather_rows(self.nodes, &nodes, &mut part);
            let scores = ScoreCall { nodes: &part, ..self.scores(rows, Candidates::All) };
            let call = RankCall { scores, thresholds, filtered, first: first as u32 };
            backend.rank_counts(&call, counts)?;
        }
        Ok(())
    }

    /// The scores of edges, in order.
    pub fn edge_scores(&self, edges: &[Edge]) -> Result<Vec<f32>> {
        let mut scores = vec![0.0; edges.len()];
        for (edges, scores) in edges.chunks(PIECE_QUERIES).zip(scores.chunks_mut(PIECE_QUERIES)) {
            let queries: Vec<Query> = queries_of(edges).into_iter().step_by(2).collect();
            let found = self.own_scores(&self.query_rows(&queries), &queries);
            self.objective.backend.read(&found, 0, scores);
        }
        Ok(self.objective.backend.check().map(|()| scores)?)
    }
}

/// Tallies of all queries, by side and by relation.
#[derive(Default)]
struct SplitTally {
    all: RankTally,
    sides: [RankTally; 2],
    relations: BTreeMap<u32, RankTally>,
}

impl SplitTally {
    fn add(&mut self, query: &Query, rank: f64) {
        self.all.add(rank);
        self.sides[usize::from(query.side == Side::Target)].add(rank);
        self.relations.entry(query.relation).or_default().add(rank);
    }

    /// Ranks edges among negative edges that all of them share. Equal scores count against an edge, as OGB does.
    fn add_shared(&mut self, split: &PreparedSplit, positive: &[f32], negative: &[f32]) {
        let mut negative = negative.to_vec();
        negative.sort_unstable_by(f32::total_cmp);
        for (query, score) in split.queries.iter().step_by(2).zip(positive) {
            let below = negative.partition_point(|other| other < score);
            let not_above = negative.partition_point(|other| other <= score);
            let (greater, equal) = (negative.len() - not_above, not_above - below);
            self.add(query, Ties::Pessimistic.rank(greater as u64, equal as u64));
        }
    }

    fn finish(self) -> Option<SplitRanks> {
        let each =
            |(relation, tally): (u32, RankTally)| Some(RelationRanks { relation, metrics: tally.finish()? });
        Some(SplitRanks {
            all: self.all.finish()?,
            source: self.sides[0].finish(),
            target: self.sides[1].finish(),
            relations: self.relations.into_iter().filter_map(each).collect(),
            auc: None,
            ap: None,
        })
    }
}

impl<B: LinkMath> Context<'_, B> {
    /// Ranks the edges of a split; `None` if it has none or evaluation is off. Representations of nodes are computed
    /// from `source`, whose next phase is the given one, or else from a separate source.
    pub fn rank(
        &mut self,
        split: SplitName,
        mode: EvaluationMode,
        source: Option<(&mut dyn BatchSource<B>, Phase)>,
    ) -> Result<Option<SplitRanks>> {
        let Some(links) = self.links.clone() else { return Err(TrainError::NodeBatch) };
        let Some(edges) = links.task.split(split).cloned() else { return Err(TrainError::TrainRanks) };
        if mode == EvaluationMode::None || edges.is_empty() {
            return Ok(None);
        }
        let nodes = self.representations(mode, source)?;
        let learner = self.learner;
        let seed = self.config.seed;
        let ranking = Ranking::new(learner, &nodes, seed)?;
        let prepared = links.prepared(split, &edges, &ranking.settings, seed)?;
        let (mut tally, fixed) = (SplitTally::default(), &prepared.fixed);
        let positive = learner.compute(|| ranking.edge_scores(&edges))?;
        let negative = match (fixed, &prepared.pairs) {
            (FixedCandidates::Shared(shared), _) => Some(shared),
            (_, pairs) => pairs.as_ref(),
        };
        let negative = negative.map(|pairs| learner.compute(|| ranking.edge_scores(pairs))).transpose()?;
        match (fixed, &negative) {
            (FixedCandidates::Shared(_), Some(negative)) => tally.add_shared(&prepared, &positive, negative),
            _ => self.rank_each(&prepared, &ranking, &mut tally)?,
        }
        let Some(mut ranks) = tally.finish() else { return Ok(None) };
        if let Some(negative) = negative {
            let negative = negative.into_iter().map(|score| (score, false));
            let mut scores: Vec<(f32, bool)> =
                positive.into_iter().map(|score| (score, true)).chain(negative).collect();
            (ranks.auc, ranks.ap) = (area(&mut scores), average_precision(&mut scores));
        }
        Ok(Some(ranks))
    }

    /// Ranks the queries of both sides. Ranks are added in the order of queries.
    fn rank_each(
        &self,
        prepared: &PreparedSplit,
        ranking: &Ranking<'_, B>,
        tally: &mut SplitTally,
    ) -> Result<()> {
        let (queries, learner) = (&prepared.queries, self.learner);
        let mut ranks = vec![None; queries.len()];
        for side in 0..2 {
            let fixed = match &prepared.fixed {
                FixedCandidates::None | FixedCandidates::Shared(_) => None,
                FixedCandidates::Own(sides) if sides[side].is_none() => continue,
                FixedCandidates::Own(sides) => sides[side].as_ref(),
            };
            let numbers: Vec<usize> = (side..queries.len()).step_by(2).collect();
            for piece in numbers.chunks(PIECE_QUERIES) {
                if (self.stop)() {
                    return Err(TrainError::Stopped);
                }
                let counts = learner.compute(|| ranking.counts(prepared, fixed, piece))?;
                for (number, counts) in piece.iter().zip(counts) {
                    ranks[*number] = Some(ranking.settings.ties.rank(counts.greater, counts.equal));
                }
            }
        }
        for (query, rank) in queries.iter().zip(&ranks) {
            rank.iter().for_each(|rank| tally.add(query, *rank));
        }
        Ok(())
    }

    /// The representation of every node, on the device: one row each.
    pub(crate) fn representations(
        &mut self,
        mode: EvaluationMode,
        source: Option<(&mut dyn BatchSource<B>, Phase)>,
    ) -> Result<B::Matrix> {
        let (learner, count) = (self.learner, self.job.dataset.manifest().nodes.count as usize);
        let backend = learner.backend().clone();
        let mut rows = backend.matrix(count, learner.objective().outputs());
        let layers = self.config.model.layers;
        match (mode, source) {
            (_, source) if layers == 0 => {
                let source = source.map(|(source, _)| source);
                let table = self.input_rows(source)?;
                let (mut read, mut values) = (table.reader()?, Vec::new());
                for first in (0..count).step_by(PIECE_NODES) {
                    let nodes: Vec<NodeId> =
                        (first..count.min(first + PIECE_NODES)).map(|node| NodeId(node as u64)).collect();
                    values.resize(nodes.len() * table.dim(), 0.0);
                    read(&nodes, &mut values)?;
                    backend.write(&mut rows, first, &values);
                }
            }
            (EvaluationMode::Sampled, Some((source, phase))) => {
                let mut first = 0;
                for batch in 0..self.job.count(phase) {
                    let at = RunPosition { phase, batch };
                    if (self.stop)() {
                        return Err(TrainError::Stopped);
                    }
                    let Some(batch) = source.next()?.filter(|batch| batch.at == at) else {
                        return Err(StrategyError::Ended { at: Box::new(at) }.into());
                    };
                    let (nodes, values) = learner.infer_seeds(batch, layers)?;
                    backend.write(&mut rows, first, &values);
                    first += nodes.len();
                }
            }
            (EvaluationMode::Sampled, None) => {
                let over = crate::evaluate::inference_of(self.config, count as u64, None)?;
                let (mut source, mut first) = (self.open_inference(&over)?, 0);
                while let Some(batch) = source.next()? {
                    let (nodes, values) = learner.infer_seeds(batch, layers)?;
                    backend.write(&mut rows, first, &values);
                    first += nodes.len();
                }
            }
            (_, source) => {
                let source = source.map(|(source, _)| source);
                self.infer_whole(None, layers, source, &mut |nodes, part| {
                    let nodes: Vec<u32> = nodes.iter().map(|node| node.0 as u32).collect();
                    backend.scatter_rows(Some(part), &nodes, &mut rows);
                    Ok(())
                })?;
            }
        }
        backend.check()?;
        Ok(rows)
    }
}

/// Average precision: the mean over positives of the precision at their score. Equal scores count together, as in
/// scikit-learn. `None` without positives.
fn average_precision(scores: &mut [(f32, bool)]) -> Option<f64> {
    scores.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
    let positives = scores.iter().filter(|(_, positive)| *positive).count();
    let (mut seen, mut right, mut sum) = (0, 0, 0.0);
    for group in scores.chunk_by(|a, b| a.0 == b.0) {
        let found = group.iter().filter(|(_, positive)| *positive).count();
        seen += group.len();
        right += found;
        sum += found as f64 * right as f64 / seen as f64;
    }
    (positives > 0).then(|| sum / positives as f64)
}
