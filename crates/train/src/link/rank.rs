//! Ranks held-out edges: the answer of each query among all nodes, or among some that are drawn for it. Both ends of
//! every edge are asked for. Candidates that make another true edge are left out, unless ranks are raw.

use crate::evaluate::Context;
use crate::link::rows::NodeRows;
use crate::link::split::{
    EndsByPosition, FilteredQueries, FixedCandidates, PIECE_CANDIDATES, PIECE_QUERIES, PreparedSplit, Query,
    SplitWatch, queries_of,
};
use crate::link::stream::Streaming;
use crate::link::{LinkObjective, RankConfig, RankMetrics, RankTally, Ties};
use crate::metrics::{Metrics, area};
use crate::task::SplitName;
use crate::{EvaluationMode, Learner, Result, TrainError};
use esker_nn::{Backend, DeviceError, Shape};
use esker_nn::{Candidates, LinkMath, QueryCall, RankCall, RankCounts, ReplacedEnd, ScoreCall};
use esker_sample::negatives::Side;
use esker_sample::{Edge, FixedNegatives};
use esker_strategies::{BatchSource, Phase, RunPosition, StrategyError};
use esker_types::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Nodes whose rows are read, or copied, at a time.
pub(crate) const PIECE_NODES: usize = 1 << 14;

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
    /// Nodes of these edges that no training edge has. Their ranks count as all others do.
    #[serde(default)]
    pub unseen_nodes: u64,
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
            unseen_nodes: Some(self.unseen_nodes),
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
    pub settings: RankConfig,
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
    pub fn own_scores(&self, rows: &B::Matrix, queries: &[Query]) -> B::Matrix {
        let own: Vec<u32> = queries.iter().map(|query| query.answer.0 as u32).collect();
        let mut scores = self.objective.backend.matrix(queries.len(), 1);
        self.objective.backend.own_scores(&self.scores(rows, Candidates::All), &own, &mut scores);
        scores
    }

    /// How many of the queries with these numbers are ranked at a time, so that their candidates take bounded memory.
    fn piece(&self, split: &FilteredQueries<'_>, fixed: Option<&FixedNegatives>, numbers: &[usize]) -> usize {
        let most = PIECE_QUERIES.min(numbers.len());
        match (fixed.map(FixedNegatives::per_edge), self.settings.candidates) {
            (None, None) => split.fitting(numbers, most),
            (Some(each), _) => (PIECE_CANDIDATES / each.max(1)).clamp(1, most),
            (None, Some(each)) => (PIECE_CANDIDATES / (each as usize).max(1)).clamp(1, most),
        }
    }

    /// Counts candidates by their score, for the queries with these numbers, which have one side. They are the fixed
    /// ones, those that are drawn, or all nodes.
    fn counts(
        &self,
        split: &FilteredQueries<'_>,
        fixed: Option<&FixedNegatives>,
        numbers: &[usize],
    ) -> Result<Vec<RankCounts>> {
        let queries: Vec<Query> = numbers.iter().map(|number| split.queries[*number]).collect();
        let rows = self.query_rows(&queries);
        let thresholds = self.own_scores(&rows, &queries);
        self.check_thresholds(&thresholds)?;
        let mut counts = vec![RankCounts::default(); queries.len()];
        let count_own = |each: usize, own: &[u32], filtered: &[(u32, u32)], counts: &mut [RankCounts]| {
            let candidates = Candidates::Chunks { chunk_edges: 1, per_chunk: each, rows: own };
            let (scores, thresholds) = (self.scores(&rows, candidates), &thresholds);
            self.objective.backend.rank_counts(&RankCall { scores, thresholds, filtered, first: 0 }, counts)
        };
        match (fixed, self.settings.candidates) {
            (Some(fixed), _) => {
                let edges: Vec<u64> = numbers.iter().map(|number| *number as u64 / 2).collect();
                let mut nodes = Vec::with_capacity(edges.len() * fixed.per_edge());
                fixed.nodes(&edges, &mut nodes)?;
                let own: Vec<u32> = nodes.iter().map(|node| node.0 as u32).collect();
                count_own(fixed.per_edge(), &own, &[], &mut counts)?;
            }
            (None, Some(all)) => {
                let nodes = self.nodes.rows() as u64;
                for first in (0..all).step_by(PIECE_CANDIDATES) {
                    let indexes = first..all.min(first.saturating_add(PIECE_CANDIDATES as u32));
                    let (own, filtered) = split.draw(numbers, indexes.clone(), nodes, self.seed);
                    count_own(indexes.len(), &own, &filtered, &mut counts)?;
                }
            }
            (None, None) => self.count_all(&rows, &thresholds, split, numbers, &mut counts)?,
        }
        Ok(counts)
    }

    /// Counts among all nodes, a block at a time.
    fn count_all(
        &self,
        rows: &B::Matrix,
        thresholds: &B::Matrix,
        split: &FilteredQueries<'_>,
        numbers: &[usize],
        counts: &mut [RankCounts],
    ) -> Result<()> {
        let (backend, all) = (&self.objective.backend, self.nodes.rows());
        let is_too_long = numbers.iter().any(|number| split.left_out_of(*number) > PIECE_CANDIDATES);
        let block = block_nodes(&self.settings, all, is_too_long);
        if block == all {
            let (scores, filtered) =
                (self.scores(rows, Candidates::All), &split.left_out(numbers, 0..all as u32));
            return Ok(backend.rank_counts(&RankCall { scores, thresholds, filtered, first: 0 }, counts)?);
        }
        for first in (0..all).step_by(block) {
            let range = first as u32..all.min(first + block) as u32;
            let nodes: Vec<u32> = range.clone().collect();
            let mut part = backend.matrix(nodes.len(), self.nodes.columns());
            backend.gather_rows(self.nodes, &nodes, &mut part);
            let scores = ScoreCall { nodes: &part, ..self.scores(rows, Candidates::All) };
            let filtered = &split.left_out(numbers, range);
            let call = RankCall { scores, thresholds, filtered, first: first as u32 };
            backend.rank_counts(&call, counts)?;
        }
        Ok(())
    }

    /// Fails if the own score of a query is not a number. Edges are scored from their sources only; inverse relations have
    /// rows of their own for the other side.
    pub fn check_thresholds(&self, thresholds: &B::Matrix) -> Result<()> {
        let mut own = vec![0.0; thresholds.rows() * thresholds.columns()];
        self.objective.backend.read(thresholds, 0, &mut own);
        self.objective.backend.check()?;
        check_numbers(&own)
    }

    /// The scores of edges, in order.
    pub fn edge_scores(&self, edges: &[Edge]) -> Result<Vec<f32>> {
        let mut scores = vec![0.0; edges.len()];
        for (edges, scores) in edges.chunks(PIECE_QUERIES).zip(scores.chunks_mut(PIECE_QUERIES)) {
            let queries: Vec<Query> = queries_of(edges).into_iter().step_by(2).collect();
            let found = self.own_scores(&self.query_rows(&queries), &queries);
            self.objective.backend.read(&found, 0, scores);
        }
        self.objective.backend.check()?;
        check_numbers(&scores)?;
        Ok(scores)
    }
}

/// Ranks, areas and whoever reads a score take it for a number.
fn check_numbers(scores: &[f32]) -> Result<()> {
    match scores.iter().find(|score| score.is_nan()) {
        Some(score) => {
            let (what, found) = ("the score of an edge".to_string(), *score as f64);
            Err(DeviceError::NotFinite { what, found }.into())
        }
        None => Ok(()),
    }
}

/// Nodes that queries are compared with at a time: all, or so many that are copied.
fn block_nodes(settings: &RankConfig, nodes: usize, is_too_long: bool) -> usize {
    let block = settings.block.map_or(nodes, |block| nodes.min(block as usize));
    if is_too_long { block.min(PIECE_NODES) } else { block }
}

/// Nodes whose rows ranking copies at a time, at most.
pub(crate) fn copied_nodes(settings: &RankConfig, nodes: u64) -> u64 {
    if settings.candidates.is_some() {
        return 0;
    }
    // Only so many nodes can be more true candidates than are listed at a time.
    let is_too_long = nodes > PIECE_CANDIDATES as u64;
    let of = |is_too_long: bool| block_nodes(settings, nodes as usize, is_too_long) as u64;
    [of(false), of(is_too_long)].into_iter().filter(|block| *block < nodes).max().unwrap_or(0)
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
            unseen_nodes: 0,
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
        let rows = self.node_rows(mode, source)?;
        let (learner, seed) = (self.learner, self.config.seed);
        let Some(settings) = learner.objective().links().map(|links| links.config.ranks) else {
            return Err(TrainError::NodeBatch);
        };
        let watch = SplitWatch { progress: self.progress, stop: self.stop };
        let asked = (split, &settings, seed);
        match &rows {
            NodeRows::Resident(nodes) => {
                let ranking = Ranking::new(learner, nodes, seed)?;
                let prepared = links.prepared(&edges, asked, None, watch)?;
                let scores = |edges: &[Edge]| learner.compute(|| ranking.edge_scores(edges));
                let each = || self.rank_each(&prepared, &ranking);
                split_ranks(&prepared, &edges, &scores, &each)
            }
            NodeRows::Stored(rows) => {
                let streaming = Streaming { learner, rows, seed, settings, stop: self.stop };
                let (numbering, most_bytes) = (|node| rows.table.position(node), rows.stream.end_bytes);
                let ends = EndsByPosition { numbering: &numbering, most_bytes };
                let prepared = links.prepared(&edges, asked, Some(ends), watch)?;
                let scores = |edges: &[Edge]| streaming.edge_scores(edges);
                let each = || streaming.ranks(&prepared, &links, &edges, watch);
                split_ranks(&prepared, &edges, &scores, &each)
            }
        }
    }

    /// Ranks the queries of both sides, in the order of queries.
    fn rank_each(&self, prepared: &PreparedSplit, ranking: &Ranking<'_, B>) -> Result<Vec<Option<f64>>> {
        let (queries, learner) = (&prepared.by_node(), self.learner);
        let mut ranks = vec![None; prepared.queries.len()];
        for side in 0..2 {
            let Some(fixed) = prepared.fixed.of_side(side) else { continue };
            let numbers: Vec<usize> = (side..ranks.len()).step_by(2).collect();
            let mut rest = &numbers[..];
            while !rest.is_empty() {
                if (self.stop)() {
                    return Err(TrainError::Stopped);
                }
                let (piece, after) = rest.split_at(ranking.piece(queries, fixed, rest));
                rest = after;
                let counts = learner.compute(|| ranking.counts(queries, fixed, piece))?;
                for (number, counts) in piece.iter().zip(counts) {
                    ranks[*number] = Some(ranking.settings.ties.rank(counts.greater, counts.equal));
                }
            }
        }
        Ok(ranks)
    }

    /// The row of every node as the source has it, where the model has no layers.
    fn table_rows(&mut self, source: Option<&mut dyn BatchSource<B>>, rows: &mut B::Matrix) -> Result<()> {
        let (backend, table) = (self.learner.backend().clone(), self.input_rows(source)?);
        let (mut read, mut nodes, mut values) = (table.reader()?, Vec::new(), Vec::new());
        let count = rows.rows();
        for first in (0..count).step_by(PIECE_NODES) {
            // In the order in which they are stored: they may be on disk.
            table.nodes_at(first as u64, PIECE_NODES.min(count - first) as u64, &mut nodes);
            values.resize(nodes.len() * table.dim(), 0.0);
            read(&nodes, &mut values)?;
            let mut piece = backend.matrix(nodes.len(), table.dim());
            backend.write(&mut piece, 0, &values);
            let to: Vec<u32> = nodes.iter().map(|node| node.0 as u32).collect();
            backend.scatter_rows(Some(&piece), &to, rows);
        }
        Ok(())
    }

    /// Passes the representation of every node on, from sampled neighbourhoods of a separate source.
    fn sample_representations(&mut self, layers: usize, take: TakeHostRows<'_>) -> Result<()> {
        let nodes = self.job.dataset.manifest().nodes.count;
        let over = crate::evaluate::inference_of(self.config, nodes, None)?;
        let mut source = self.open_inference(&over)?;
        while let Some(batch) = source.next()? {
            if (self.stop)() {
                return Err(TrainError::Stopped);
            }
            self.check_device(&batch)?;
            let (nodes, values) = self.learner.infer_seeds(batch, layers)?;
            take(nodes.len(), &values)?;
        }
        Ok(())
    }

    /// The same from the source of the run, in the phase that is due.
    fn sample_phase(
        &mut self,
        layers: usize,
        (source, phase): (&mut dyn BatchSource<B>, Phase),
        take: TakeHostRows<'_>,
    ) -> Result<()> {
        for batch in 0..self.job.count(phase) {
            let at = RunPosition { phase, batch };
            if (self.stop)() {
                return Err(TrainError::Stopped);
            }
            let Some(batch) = source.next()?.filter(|batch| batch.at == at) else {
                return Err(StrategyError::Ended { at: Box::new(at) }.into());
            };
            self.check_device(&batch)?;
            let (nodes, values) = self.learner.infer_seeds(batch, layers)?;
            take(nodes.len(), &values)?;
        }
        Ok(())
    }

    /// Passes the representation of every node to one of the two, node after node: from sampled neighbourhoods they are
    /// in host memory, from all neighbours on the device.
    pub(super) fn each_representation(
        &mut self,
        mode: EvaluationMode,
        source: Option<(&mut dyn BatchSource<B>, Phase)>,
        take: &mut dyn RepresentationSink<B>,
    ) -> Result<()> {
        let layers = self.config.model.layers;
        match (mode, source) {
            (EvaluationMode::Sampled, Some(source)) => {
                self.sample_phase(layers, source, &mut |count, values| take.host(count, values))
            }
            (EvaluationMode::Sampled, None) => {
                self.sample_representations(layers, &mut |count, values| take.host(count, values))
            }
            (_, source) => {
                let source = source.map(|(source, _)| source);
                self.infer_whole(None, layers, source, &mut |nodes, part| take.device(nodes, part))?;
                Ok(())
            }
        }
    }

    /// The representation of every node, on the device: one row each.
    pub(super) fn representations(
        &mut self,
        mode: EvaluationMode,
        source: Option<(&mut dyn BatchSource<B>, Phase)>,
    ) -> Result<B::Matrix> {
        let (learner, count) = (self.learner, self.job.dataset.manifest().nodes.count as usize);
        let backend = learner.backend().clone();
        let mut rows = backend.matrix(count, learner.objective().outputs());
        match self.config.model.layers {
            0 => self.table_rows(source.map(|(source, _)| source), &mut rows)?,
            _ => {
                let mut sink = RepresentationMatrix { backend: backend.clone(), rows: &mut rows, first: 0 };
                self.each_representation(mode, source, &mut sink)?;
            }
        }
        backend.check()?;
        Ok(rows)
    }
}

/// Receives the number of some nodes, which follow those before, and their rows.
type TakeHostRows<'a> = &'a mut dyn FnMut(usize, &[f32]) -> Result<()>;

/// What receives the representations of all nodes, in order.
pub(super) trait RepresentationSink<B: Backend> {
    /// Rows in host memory, of so many nodes that follow those before.
    fn host(&mut self, count: usize, values: &[f32]) -> Result<()>;
    /// Rows on the device.
    fn device(&mut self, nodes: &[NodeId], rows: &B::Matrix) -> Result<()>;
}

/// A matrix of all rows.
struct RepresentationMatrix<'a, B: Backend> {
    backend: B,
    rows: &'a mut B::Matrix,
    first: usize,
}

impl<B: LinkMath> RepresentationSink<B> for RepresentationMatrix<'_, B> {
    fn host(&mut self, count: usize, values: &[f32]) -> Result<()> {
        self.backend.write(self.rows, self.first, values);
        self.first += count;
        Ok(())
    }

    fn device(&mut self, nodes: &[NodeId], rows: &B::Matrix) -> Result<()> {
        let nodes: Vec<u32> = nodes.iter().map(|node| node.0 as u32).collect();
        self.backend.scatter_rows(Some(rows), &nodes, self.rows);
        Ok(())
    }
}

/// The ranks of a split, from the scores of edges and the rank of each query.
fn split_ranks(
    prepared: &PreparedSplit,
    edges: &[Edge],
    scores: &dyn Fn(&[Edge]) -> Result<Vec<f32>>,
    each: &dyn Fn() -> Result<Vec<Option<f64>>>,
) -> Result<Option<SplitRanks>> {
    let positive = scores(edges)?;
    let negative = match (&prepared.fixed, &prepared.pairs) {
        (FixedCandidates::Shared(shared), _) => Some(shared),
        (_, pairs) => pairs.as_ref(),
    };
    let negative = negative.map(|pairs| scores(pairs)).transpose()?;
    let mut tally = SplitTally::default();
    match (&prepared.fixed, &negative) {
        (FixedCandidates::Shared(_), Some(negative)) => tally.add_shared(prepared, &positive, negative),
        _ => {
            for (query, rank) in prepared.queries.iter().zip(each()?) {
                rank.iter().for_each(|rank| tally.add(query, *rank));
            }
        }
    }
    let Some(mut ranks) = tally.finish() else { return Ok(None) };
    ranks.unseen_nodes = prepared.unseen_nodes;
    if let Some(negative) = negative {
        let negative = negative.into_iter().map(|score| (score, false));
        let mut scores: Vec<(f32, bool)> =
            positive.into_iter().map(|score| (score, true)).chain(negative).collect();
        (ranks.auc, ranks.ap) = (area(&mut scores), average_precision(&mut scores));
    }
    Ok(Some(ranks))
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
