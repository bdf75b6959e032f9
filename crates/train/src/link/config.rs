//! How links are learned and ranked, with every default resolved.

use crate::link::Ties;
use crate::{Result, TrainError};
use esker_nn::{DecoderKind, LinkLoss, LinkShape, PenaltyKind, RowInit};
use esker_sample::Edge;
use esker_sample::negatives::{MaskedPairs, NegativeMask};
use serde::{Deserialize, Serialize};

/// Whether the losses of a batch's edges are summed up or averaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossReduction {
    /// Summed up, as Marius does: a row's step grows with the number of its edges.
    Sum,
    /// Averaged over the edges of a batch.
    #[default]
    Mean,
}

/// The negatives of an edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum NegativeCount {
    /// So many, shared by the edges of a chunk.
    Shared {
        /// Drawn uniformly from all nodes, per chunk and side.
        uniform: u32,
        /// Drawn by in-degree, per chunk and side.
        by_degree: u32,
        /// Chunks of a batch.
        chunks: u32,
    },
    /// All nodes.
    All,
}

/// How much each edge of a batch counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EdgeWeights {
    /// All alike.
    #[default]
    Equal,
    /// Edges of frequent queries less: `1 / sqrt(6 + n)`, where n is the number of edges with the same source and
    /// relation plus that with the same target and relation. RotatE's authors call it subsampling, after word2vec, and
    /// count from 4.
    Subsampling,
}

impl EdgeWeights {
    pub(crate) fn is_equal(&self) -> bool {
        *self == EdgeWeights::Equal
    }
}

/// How the rows of relations begin.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RelationInit {
    /// As ones: the neutral element of DistMult.
    Ones,
    /// Random.
    #[serde(untagged)]
    Random(RowInit),
}

/// Whether the edges of a batch are in the neighbourhoods that it is predicted from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TargetEdges {
    /// They and their reverses are not sampled.
    #[default]
    Drop,
    /// They may be sampled.
    Keep,
}

/// A penalty on the rows of a batch's edges: both ends, and the relation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PenaltyConfig {
    /// Its kind.
    pub kind: PenaltyName,
    /// Its weight.
    pub weight: f32,
}

/// The kind of a penalty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PenaltyName {
    /// Sum of squares.
    L2,
    /// Sum of absolute cubes: of moduli, where numbers are complex.
    N3,
}

impl PenaltyName {
    /// The penalty of a decoder's rows of nodes.
    pub(crate) fn of_nodes(self, decoder: DecoderKind) -> PenaltyKind {
        match (self, decoder) {
            (PenaltyName::L2, _) => PenaltyKind::L2,
            (PenaltyName::N3, DecoderKind::ComplEx | DecoderKind::RotatE { .. }) => PenaltyKind::ComplexN3,
            (PenaltyName::N3, _) => PenaltyKind::N3,
        }
    }

    /// The penalty of its rows of relations. A rotation has modulus 1 whatever its angle: N3 leaves it alone.
    pub(crate) fn of_relations(self, decoder: DecoderKind) -> Option<PenaltyKind> {
        match (self, decoder) {
            (PenaltyName::N3, DecoderKind::RotatE { .. }) => None,
            _ => Some(self.of_nodes(decoder)),
        }
    }
}

/// How held-out edges are ranked.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RankConfig {
    /// The rank among equal scores.
    pub ties: Ties,
    /// Whether candidates that make another true edge count: the raw setting.
    pub raw: bool,
    /// Candidates that are drawn for each edge; all nodes if not given.
    pub candidates: Option<u32>,
    /// Candidates that are compared at a time, if given. Ranks do not depend on it.
    pub block: Option<u32>,
}

/// How links are learned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkConfig {
    /// How an edge is scored.
    pub decoder: DecoderKind,
    /// Columns of the rows that it scores: the encoder's output.
    pub columns: usize,
    /// The loss of an edge.
    pub loss: LinkLoss,
    /// The loss of a batch.
    pub reduction: LossReduction,
    /// The negatives of an edge.
    pub negatives: NegativeCount,
    /// Numbers of negatives that replace sources, drawn uniformly and by degree, if they differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_negatives: Option<[u32; 2]>,
    /// Those that do not count.
    pub mask: NegativeMask,
    /// How much each edge counts.
    #[serde(default, skip_serializing_if = "EdgeWeights::is_equal")]
    pub edge_weights: EdgeWeights,
    /// How rows of relations begin, if not as usual for the decoder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relation_init: Option<RelationInit>,
    /// Whether edges are scored from their target with a relation of their own.
    pub inverse: bool,
    /// Whether target edges are sampled.
    pub target_edges: TargetEdges,
    /// Share of the relation rows' numbers that is dropped in training.
    pub relation_dropout: f32,
    /// The penalty, if there is one.
    pub penalty: Option<PenaltyConfig>,
    /// How edges are ranked.
    pub ranks: RankConfig,
}

impl LinkConfig {
    /// The rows of relations: a second one each, if there are inverse relations.
    pub(crate) fn relation_rows(&self, relations: u32) -> usize {
        relations as usize * if self.inverse { 2 } else { 1 }
    }

    /// Whether every node is a negative of every edge.
    pub(crate) fn scores_all_nodes(&self) -> bool {
        self.negatives == NegativeCount::All
    }

    /// Seed nodes of a batch of so many edges.
    pub(crate) fn seeds_of(&self, edges: u64, nodes: u64) -> u64 {
        let negatives = match self.negatives {
            _ if edges == 0 => 0,
            NegativeCount::All => nodes,
            NegativeCount::Shared { uniform, by_degree, chunks } => {
                let targets = uniform as u64 + by_degree as u64;
                (targets + self.of_sources(targets)) * (chunks as u64).min(edges)
            }
        };
        (2 * edges).saturating_add(negatives)
    }

    /// Negatives of a chunk that replace sources, where so many replace targets.
    fn of_sources(&self, targets: u64) -> u64 {
        self.source_negatives.map_or(targets, |[uniform, by_degree]| uniform as u64 + by_degree as u64)
    }

    /// What says which pairs of a batch of so many edges are masked, for both sides.
    pub(crate) fn mask_bytes(&self, edges: u64) -> u64 {
        match (self.negatives, self.mask) {
            (NegativeCount::Shared { .. }, NegativeMask::None) => 0,
            (NegativeCount::Shared { uniform, by_degree, .. }, _) => {
                let targets = uniform as u64 + by_degree as u64;
                let sides = [targets, self.of_sources(targets)];
                sides.iter().map(|each| MaskedPairs::bytes_for(edges, *each)).sum()
            }
            // The ends of a batch's edges, sorted for either side.
            (NegativeCount::All, NegativeMask::Batch) => edges.saturating_mul(2 * size_of::<Edge>() as u64),
            // Looked up where they are counted already.
            (NegativeCount::All, _) => 0,
        }
    }

    /// The larger side of a batch of so many edges.
    pub(crate) fn shape(&self, edges: u64, nodes: u64, relation_columns: usize) -> LinkShape {
        let (chunk_edges, candidates) = match self.negatives {
            NegativeCount::All => (edges, nodes),
            NegativeCount::Shared { uniform, by_degree, chunks } => {
                let targets = uniform as u64 + by_degree as u64;
                (edges.div_ceil(chunks.max(1) as u64), targets.max(self.of_sources(targets)))
            }
        };
        LinkShape {
            edges: edges as usize,
            chunk_edges: chunk_edges.max(1) as usize,
            candidates: candidates as usize,
            all_nodes: self.negatives == NegativeCount::All,
            columns: self.columns,
            relation_columns,
        }
    }

    /// Refuses what makes no sense.
    pub(crate) fn check(&self) -> Result<()> {
        self.decoder.relation_columns(self.columns)?;
        let share = (0.0..1.0).contains(&self.relation_dropout);
        let setting = |flag, found: f64, allowed| Err(TrainError::Setting { flag, found, allowed });
        if !share {
            return setting("--relation-dropout", self.relation_dropout as f64, "at least 0, and below 1");
        }
        if let NegativeCount::Shared { uniform, by_degree, chunks } = self.negatives {
            if uniform as u64 + by_degree as u64 == 0 {
                return setting("--negatives", 0.0, "at least 1, or all");
            }
            if self.of_sources(1) == 0 {
                return setting("--source-negatives", 0.0, "at least 1");
            }
            if chunks == 0 {
                return setting("--chunks", 0.0, "at least 1");
            }
        }
        if let Some(penalty) = self.penalty.filter(|penalty| penalty.weight < 0.0 || penalty.weight.is_nan())
        {
            return setting("--l2 or --n3", penalty.weight as f64, "0 or greater");
        }
        match [self.ranks.candidates, self.ranks.block].contains(&Some(0)) {
            true => setting("--candidates or --candidate-block", 0.0, "at least 1"),
            false => Ok(()),
        }
    }
}
