//! How links are learned and ranked, with every default resolved.

use crate::link::Ties;
use crate::{Result, TrainError};
use esker_nn::{DecoderKind, LinkLoss, LinkShape, PenaltyKind};
use esker_sample::negatives::NegativeMask;
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
    /// The penalty for rows of a decoder.
    pub(crate) fn kind(self, decoder: DecoderKind) -> PenaltyKind {
        match (self, decoder) {
            (PenaltyName::L2, _) => PenaltyKind::L2,
            (PenaltyName::N3, DecoderKind::ComplEx | DecoderKind::RotatE { .. }) => PenaltyKind::ComplexN3,
            (PenaltyName::N3, _) => PenaltyKind::N3,
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
    /// Those that do not count.
    pub mask: NegativeMask,
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

    /// Seed nodes of a batch of so many edges.
    pub(crate) fn seeds_of(&self, edges: u64, nodes: u64) -> u64 {
        let negatives = match self.negatives {
            _ if edges == 0 => 0,
            NegativeCount::All => nodes,
            NegativeCount::Shared { uniform, by_degree, chunks } => {
                2 * (uniform as u64 + by_degree as u64) * (chunks as u64).min(edges)
            }
        };
        (2 * edges).saturating_add(negatives)
    }

    /// One side of a batch of so many edges.
    pub(crate) fn shape(&self, edges: u64, nodes: u64, relation_columns: usize) -> LinkShape {
        let (chunk_edges, candidates) = match self.negatives {
            NegativeCount::All => (edges, nodes),
            NegativeCount::Shared { uniform, by_degree, chunks } => {
                (edges.div_ceil(chunks.max(1) as u64), uniform as u64 + by_degree as u64)
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
            if chunks == 0 {
                return setting("--chunks", 0.0, "at least 1");
            }
        }
        if let Some(penalty) = self.penalty.filter(|penalty| penalty.weight < 0.0 || penalty.weight.is_nan())
        {
            return setting("--l2 or --n3", penalty.weight as f64, "0 or greater");
        }
        match self.ranks.candidates.or(self.ranks.block) {
            Some(0) => setting("--candidates or --candidate-block", 0.0, "at least 1"),
            _ => Ok(()),
        }
    }
}
