//! The objective of links: the score of each edge of a batch against those of its negatives, for both of its ends.

use crate::link::{EdgeWeights, LinkConfig, LinkTask, LossReduction};
use crate::metrics::Tally;
use crate::objective::{BatchTargets, Losses, Objective, Picked};
use crate::task::{LabelKind, SplitName};
use crate::{Result, TrainError};
use esker_nn::{Activation, Affine, Backend, Dropout, Model, Parameter, Post, Shape};
use esker_nn::{
    CandidateGradients, Candidates, DecoderKind, LinkGradients, LinkMath, LossCall, MaskedCandidates,
    QueryCall, ReplacedEnd, RowInit, ScoreCall, initial_rows,
};
use esker_sample::negatives::{Negatives, Side};
use esker_sample::{Edge, LinkBatch, Targets};
use esker_types::random::Key;

/// Streams of random numbers.
const INITIAL: u64 = 2;
const DROPOUT: u64 = 3;
/// Rows of relations that are made at a time.
const PIECE_ROWS: usize = 1024;

/// Scores edges, and owns the rows of relations.
pub struct LinkObjective<B: Backend> {
    pub(super) backend: B,
    pub(super) config: LinkConfig,
    /// Relations of the graph, without inverse ones.
    relations: u32,
    /// One row per relation, then one per inverse relation. `None` for a decoder without relations.
    rows: Option<Parameter<B>>,
    dropout_key: Key,
}

/// How the rows of relations begin.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RelationStart {
    /// The random seed of the run.
    pub seed: u64,
    /// The distribution. `None` for ones, the neutral element of DistMult.
    pub init: Option<RowInit>,
}

impl<B: Backend> LinkObjective<B> {
    /// With new rows of relations.
    pub fn new(backend: &B, config: &LinkConfig, task: &LinkTask, start: RelationStart) -> Result<Self> {
        let key = Key::new(start.seed).with(INITIAL);
        let columns = config.decoder.relation_columns(config.columns)?;
        let rows = (columns > 0).then(|| {
            let count = config.relation_rows(task.relations);
            let (mut value, mut gradient) = (backend.matrix(count, columns), backend.matrix(count, columns));
            backend.fill(&mut value, 1.0);
            backend.fill(&mut gradient, 0.0);
            let mut numbers = Vec::new();
            for first in (0..count).step_by(PIECE_ROWS) {
                let Some(init) = start.init else { break };
                numbers.resize(PIECE_ROWS.min(count - first) * columns, 0.0);
                initial_rows(key, init, first as u64, columns, &mut numbers);
                backend.write(&mut value, first, &numbers);
            }
            Parameter { name: "relations".into(), value, gradient }
        });
        let dropout_key = Key::new(start.seed).with(DROPOUT);
        Ok(LinkObjective {
            backend: backend.clone(),
            config: config.clone(),
            relations: task.relations,
            rows,
            dropout_key,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &LinkConfig {
        &self.config
    }

    /// The rows of relations, if the decoder has any.
    pub fn relation_rows(&self) -> Option<&B::Matrix> {
        self.rows.as_ref().map(|rows| &rows.value)
    }

    /// The row of a relation for queries with this end replaced, and how they are formed.
    pub(super) fn relation_of(&self, relation: u32, side: Side) -> (u32, ReplacedEnd) {
        match side {
            Side::Target => (relation, ReplacedEnd::Target),
            Side::Source if self.config.inverse => (relation + self.relations, ReplacedEnd::Target),
            Side::Source => (relation, ReplacedEnd::Source),
        }
    }
}

/// One side of a batch: which rows of the output its edges and negatives are.
struct BatchSide<'a> {
    side: Side,
    known: Vec<u32>,
    own: Vec<u32>,
    candidates: Vec<u32>,
    /// The row of each row of the candidates' gradient.
    gradient_of: Vec<u32>,
    /// Whether every row of the output is a candidate of every edge.
    all: bool,
    chunk_edges: usize,
    per_chunk: usize,
    masked: SideMasks<'a>,
    relation_of: Vec<u32>,
    replaced: ReplacedEnd,
}

/// The candidates of a side that are not negatives.
#[derive(Debug)]
struct SideMasks<'a> {
    edges: &'a [Edge],
    negatives: &'a Negatives,
    /// The row of each node in the output, if every node is a negative.
    of_node: Option<&'a [u32]>,
}

impl MaskedCandidates for SideMasks<'_> {
    fn for_each(&self, edge: usize, take: &mut dyn FnMut(u32)) {
        self.negatives.for_each_masked(edge, &self.edges[edge], &mut |negative| match self.of_node {
            Some(rows) => take(rows[negative as usize]),
            None => take(negative),
        });
    }
}

/// The gradients of a side: of known ends, true ends, candidates and relations.
struct SideGradients<M> {
    known: M,
    own: M,
    candidates: M,
    relations: Option<M>,
}

impl<B: LinkMath> LinkObjective<B> {
    fn side<'a>(&self, links: &'a LinkBatch, rows: &'a [u32], output: usize, side: Side) -> BatchSide<'a> {
        let (negatives, start) = match side {
            Side::Target => (&links.targets, links.targets_start),
            Side::Source => (&links.sources, links.sources_start),
        };
        let ends = |end: usize| (0..links.edges.len()).map(|edge| rows[2 * edge + end]).collect();
        let (known, own) = match side {
            Side::Target => (ends(0), ends(1)),
            Side::Source => (ends(1), ends(0)),
        };
        let of = |relation| self.relation_of(relation, side).0;
        let relation_of = match &self.rows {
            Some(_) => links.edges.iter().map(|edge| of(edge.relation)).collect(),
            None => Vec::new(),
        };
        let Negatives { chunk_edges, per_chunk, all_nodes, .. } = *negatives;
        // All nodes follow the other seed nodes, and rows of the output are in an order of their own.
        let of_node = all_nodes.then(|| &rows[links.sources_start + links.sources.nodes.len()..]);
        let masked = SideMasks { edges: &links.edges, negatives, of_node };
        let candidates = match all_nodes {
            false => rows[start..start + negatives.nodes.len()].to_vec(),
            true => (0..output as u32).collect(),
        };
        let (chunk_edges, replaced) = (chunk_edges.max(1), self.relation_of(0, side).1);
        // Candidates of every edge are too many for a row of gradients each.
        let gradient_of = match chunk_edges == 1 {
            true => (0..output as u32).collect(),
            false => candidates.clone(),
        };
        BatchSide {
            side,
            known,
            own,
            candidates,
            gradient_of,
            all: all_nodes,
            chunk_edges,
            per_chunk,
            masked,
            relation_of,
            replaced,
        }
    }

    /// Losses and gradients of one side.
    fn one_side(
        &self,
        side: &BatchSide<'_>,
        weights: &[f32],
        output: &B::Matrix,
        step: u64,
        losses: &mut Losses<B>,
    ) -> Result<SideGradients<B::Matrix>> {
        let (backend, config) = (&self.backend, &self.config);
        let (edges, columns) = (side.known.len(), output.columns());
        let dropped = self.dropped_relations(side.side, &side.relation_of, step);
        let each: Vec<u32> = (0..edges as u32).collect();
        let (relations, relation_of) = match &dropped {
            Some((rows, _)) => (Some(rows), &each),
            None => (self.relation_rows(), &side.relation_of),
        };
        let call = QueryCall {
            decoder: config.decoder,
            replaced: side.replaced,
            nodes: output,
            known: &side.known,
            relations,
            relation_of,
        };
        let mut queries = backend.matrix(edges, columns);
        backend.link_queries(&call, &mut queries);
        let mut gradients = SideGradients {
            known: backend.matrix(edges, columns),
            own: backend.matrix(edges, columns),
            candidates: backend.matrix(side.gradient_of.len(), columns),
            relations: relations.map(|rows| backend.matrix(edges, rows.columns())),
        };
        let BatchSide { chunk_edges, per_chunk, .. } = *side;
        let candidates = match side.all {
            true => Candidates::All,
            false => Candidates::Chunks { chunk_edges, per_chunk, rows: &side.candidates },
        };
        let score = ScoreCall { decoder: config.decoder, queries: &queries, nodes: output, candidates };
        let scale = self.weighted_scale(edges, weights);
        let loss = LossCall { loss: config.loss, scale, weights, own: &side.own, masked: &side.masked };
        let to = &mut gradients.candidates;
        let by_node = (chunk_edges == 1 && !side.all)
            .then(|| members_of(output.rows(), std::iter::once(&side.candidates[..])));
        let of_candidates = match &by_node {
            Some((offsets, members)) => CandidateGradients::ByNode { offsets, members, to },
            None => CandidateGradients::Rows(to),
        };
        let into = LinkGradients {
            queries: &mut gradients.known,
            own: &mut gradients.own,
            candidates: of_candidates,
        };
        losses.push(backend.link_loss(&score, &loss, into)?);
        backend.link_queries_backward(&call, &mut gradients.known, gradients.relations.as_mut());
        if let (Some((rows, post)), Some(gradient)) = (&dropped, &mut gradients.relations) {
            backend.weight_gradients(gradient, Some((rows, *post)), Vec::new(), None);
        }
        Ok(gradients)
    }

    /// The weight of each edge of a batch; empty if all are 1.
    fn weights(&self, links: &LinkBatch) -> Vec<f32> {
        match self.config.edge_weights {
            EdgeWeights::Equal => Vec::new(),
            EdgeWeights::Subsampling => {
                assert_eq!(links.frequencies.len(), links.edges.len(), "a batch that was counted");
                links.frequencies.iter().map(|count| 1.0 / ((6 + *count) as f32).sqrt()).collect()
            }
        }
    }

    /// Factor of the losses of edges with these weights: a mean divides by their sum.
    fn weighted_scale(&self, edges: usize, weights: &[f32]) -> f32 {
        match self.config.reduction {
            LossReduction::Mean if !weights.is_empty() => {
                (1.0 / weights.iter().map(|weight| *weight as f64).sum::<f64>()) as f32
            }
            _ => self.scale(edges),
        }
    }

    /// Factor of the loss of an edge.
    fn scale(&self, edges: usize) -> f32 {
        match self.config.reduction {
            LossReduction::Sum => 1.0,
            LossReduction::Mean => 1.0 / edges.max(1) as f32,
        }
    }

    /// The rows of each edge's relation after dropout, if there is any. Each side of an edge has a mask of its own.
    fn dropped_relations(&self, side: Side, relation_of: &[u32], step: u64) -> Option<(B::Matrix, Post)> {
        let rows = self.relation_rows()?;
        let key = self.dropout_key.with(step).with(u64::from(side == Side::Target));
        let dropout = Dropout::new(self.config.relation_dropout, key)?;
        let mut gathered = self.backend.matrix(relation_of.len(), rows.columns());
        self.backend.gather_rows(rows, relation_of, &mut gathered);
        let post = Post { activation: Activation::Identity, dropout: Some(dropout) };
        let mut dropped = self.backend.matrix(gathered.rows(), gathered.columns());
        let call = Affine { terms: Vec::new(), accumulate: false, bias: None, add: Some(&gathered), post };
        self.backend.affine(call, &mut dropped);
        Some((dropped, post))
    }
}

impl<B: LinkMath> Objective<B> for LinkObjective<B> {
    fn outputs(&self) -> usize {
        self.config.columns
    }

    fn pick(&self, split: SplitName, of: &BatchTargets<'_>) -> Result<Picked> {
        match of.targets {
            Targets::Links(links) if split == SplitName::Train => {
                Ok(Picked::Links { rows: of.rows.to_vec(), links: links.clone() })
            }
            _ => Err(TrainError::NodeBatch),
        }
    }

    fn loss(
        &mut self,
        _: &Model<B>,
        output: &B::Matrix,
        picked: &Picked,
        step: u64,
    ) -> Result<(Losses<B>, B::Matrix)> {
        let Picked::Links { rows, links } = picked else { return Err(TrainError::NodeBatch) };
        let mut losses: Losses<B> = Vec::new();
        let both = [Side::Target, Side::Source].map(|side| self.side(links, rows, output.rows(), side));
        let sides: Vec<BatchSide<'_>> = both.into_iter().filter(|side| !side.candidates.is_empty()).collect();
        let (weights, mut gradients) = (self.weights(links), Vec::with_capacity(sides.len()));
        for side in &sides {
            gradients.push(self.one_side(side, &weights, output, step, &mut losses)?);
        }
        let mut gradient = self.backend.matrix(output.rows(), output.columns());
        let targets = sides.iter().flat_map(|side| [&side.known[..], &side.own, &side.gradient_of]);
        let (offsets, members) = members_of(output.rows(), targets);
        let parts: Vec<&B::Matrix> =
            gradients.iter().flat_map(|side| [&side.known, &side.own, &side.candidates]).collect();
        self.backend.sum_rows(&parts, &offsets, &members, &mut gradient);
        if let Some(rows) = &mut self.rows {
            let (offsets, members) =
                members_of(rows.value.rows(), sides.iter().map(|side| &side.relation_of[..]));
            let parts: Vec<&B::Matrix> =
                gradients.iter().filter_map(|side| side.relations.as_ref()).collect();
            self.backend.sum_rows(&parts, &offsets, &members, &mut rows.gradient);
        }
        Ok((losses, gradient))
    }

    /// The penalty of both ends and of the relation of every query, if the relation has one. Those of relations are the
    /// rows without dropout, too.
    fn penalize(
        &mut self,
        picked: &Picked,
        output: &B::Matrix,
        gradient: &mut B::Matrix,
        losses: &mut Losses<B>,
    ) -> Result<()> {
        let Picked::Links { rows, links } = picked else { return Err(TrainError::NodeBatch) };
        let Some(penalty) = self.config.penalty.filter(|penalty| penalty.weight > 0.0) else { return Ok(()) };
        let is_asked = |negatives: &Negatives| negatives.all_nodes || !negatives.nodes.is_empty();
        let sides = [(Side::Target, &links.targets), (Side::Source, &links.sources)];
        let sides: Vec<Side> =
            sides.into_iter().filter(|(_, negatives)| is_asked(negatives)).map(|(side, _)| side).collect();
        let weight = penalty.weight * self.scale(links.edges.len());
        let mut of_output = vec![0.0; output.rows()];
        for row in sides.iter().flat_map(|_| &rows[..2 * links.edges.len()]) {
            of_output[*row as usize] += weight;
        }
        let kind = penalty.kind.of_nodes(self.config.decoder);
        losses.push(self.backend.penalty(kind, &of_output, output, gradient)?);
        let Some(kind) = penalty.kind.of_relations(self.config.decoder) else { return Ok(()) };
        let mut of_relations = vec![0.0; self.rows.as_ref().map_or(0, |rows| rows.value.rows())];
        let asked = sides.iter().flat_map(|side| links.edges.iter().map(move |edge| (edge.relation, *side)));
        for (relation, side) in asked.filter(|_| self.rows.is_some()) {
            of_relations[self.relation_of(relation, side).0 as usize] += weight;
        }
        if let Some(rows) = &mut self.rows {
            losses.push(self.backend.penalty(kind, &of_relations, &rows.value, &mut rows.gradient)?);
        }
        Ok(())
    }

    fn tally(&self, _: SplitName) -> Tally {
        Tally::new(LabelKind::Real, self.config.columns, 0)
    }

    fn predictions(&self, _: &mut [f32]) -> Vec<u32> {
        Vec::new()
    }

    fn parameters(&self) -> Vec<&Parameter<B>> {
        self.rows.iter().collect()
    }

    fn parameters_mut(&mut self) -> Vec<&mut Parameter<B>> {
        self.rows.iter_mut().collect()
    }

    fn links(&self) -> Option<&LinkObjective<B>> {
        Some(self)
    }
}

/// Which members go to each of `count` rows, in ascending order. Member `m` is the m-th number of all parts together, and
/// goes to the row that it names.
fn members_of<'a>(count: usize, parts: impl Iterator<Item = &'a [u32]>) -> (Vec<u32>, Vec<u32>) {
    let targets: Vec<u32> = parts.flatten().copied().collect();
    let mut offsets = vec![0u32; count + 1];
    targets.iter().for_each(|row| offsets[*row as usize + 1] += 1);
    (1..=count).for_each(|row| offsets[row] += offsets[row - 1]);
    let (mut next, mut members) = (offsets.clone(), vec![0u32; targets.len()]);
    for (member, row) in (0..).zip(&targets) {
        members[next[*row as usize] as usize] = member;
        next[*row as usize] += 1;
    }
    (offsets, members)
}

/// Whether the rows of relations begin as ones by default.
pub(crate) fn begins_with_ones(decoder: DecoderKind) -> bool {
    decoder == DecoderKind::DistMult
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]
mod tests {
    use super::*;
    use crate::link::{NegativeCount, RankConfig, TargetEdges};
    use esker_nn::{CpuBackend, Device, LinkLoss};
    use esker_sample::negatives::NegativeMask;
    use proptest::prelude::*;
    use std::sync::Arc;

    /// Which numbers of 40 edges' relations stay, side by side.
    fn masks(inverse: bool, step: u64) -> [Vec<bool>; 2] {
        let config = LinkConfig {
            decoder: DecoderKind::DistMult,
            columns: 16,
            loss: LinkLoss::Softmax,
            reduction: LossReduction::Mean,
            negatives: NegativeCount::All,
            source_negatives: None,
            mask: NegativeMask::None,
            edge_weights: EdgeWeights::Equal,
            relation_init: None,
            inverse,
            target_edges: TargetEdges::Keep,
            relation_dropout: 0.5,
            penalty: None,
            ranks: RankConfig::default(),
        };
        let (valid, test) = (Arc::default(), Arc::default());
        let task = LinkTask { nodes: 9, relations: 1, train: 40, valid, test };
        let start = RelationStart { seed: 3, init: None };
        let objective = LinkObjective::new(&CpuBackend::new(), &config, &task, start).unwrap();
        [Side::Target, Side::Source].map(|side| {
            let relation_of = vec![objective.relation_of(0, side).0; 40];
            let (rows, _) = objective.dropped_relations(side, &relation_of, step).unwrap();
            let mut values = vec![0.0; 40 * 16];
            objective.backend.read(&rows, 0, &mut values);
            values.iter().map(|value| *value != 0.0).collect()
        })
    }

    #[test]
    fn each_side_and_each_step_drops_other_numbers_of_relations() {
        for inverse in [false, true] {
            let ([targets, sources], [later, _]) = (masks(inverse, 1), masks(inverse, 2));
            let alike = |one: &[bool], other: &[bool]| one.iter().zip(other).filter(|(a, b)| a == b).count();
            // Of 640 numbers about half are alike by chance.
            for (one, other) in [(&targets, &sources), (&targets, &later)] {
                assert!((240..400).contains(&alike(one, other)), "{inverse}: {}", alike(one, other));
            }
            assert_eq!(masks(inverse, 1)[1], sources);
        }
    }

    proptest! {
        #[test]
        fn members_are_in_ascending_order_at_their_row(
            parts in prop::collection::vec(prop::collection::vec(0u32..9, 0..20), 0..4),
        ) {
            let (offsets, members) = members_of(9, parts.iter().map(|part| &part[..]));
            let all: Vec<u32> = parts.concat();
            for row in 0..9u32 {
                let naive: Vec<u32> =
                    (0..all.len() as u32).filter(|member| all[*member as usize] == row).collect();
                let found = &members[offsets[row as usize] as usize..offsets[row as usize + 1] as usize];
                prop_assert_eq!(found, naive);
            }
        }
    }
}
