//! Link prediction: decoders score edges, losses compare the score of an edge with those of its negatives, ranking
//! counts the candidates above it, and learned rows are updated where they were touched (Marius++ section 3).
//!
//! A decoder scores (source, relation, target) in two steps. The known end and the relation form a **query** row; its
//! score with a candidate for the other end is a dot product (dot, DistMult, ComplEx) or a negated distance (TransE,
//! RotatE). So the edges of a chunk are scored against their negatives by one matmul or one tiled kernel, and nothing
//! has the size edges x negatives x columns. [`LinkMath`] is the set of operations; the module knows no datasets and no
//! batches.

mod initial;
mod math;
mod memory;

pub use initial::{RowInit, initial_rows, initial_rows_of};
pub use math::*;
pub use memory::{LinkBytes, LinkShape, link_bytes, matrix_bytes};

use crate::{NnError, Result};
use serde::{Deserialize, Serialize};

/// The distance of [`DecoderKind::TransE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DistanceNorm {
    /// Sum of absolute differences.
    L1,
    /// Euclidean distance.
    L2,
}

/// How an edge is scored. Complex rows have their real parts in the first half and their imaginary parts in the
/// second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DecoderKind {
    /// Dot product of both ends; relations do not matter.
    Dot,
    /// Sum of source x relation x target.
    DistMult,
    /// Minus the distance of source + relation and target.
    TransE {
        /// The distance.
        norm: DistanceNorm,
    },
    /// Real part of the sum of source x relation x conjugate of target.
    ComplEx,
    /// Minus the sum of the moduli of source x relation - target, where relations are rotations.
    RotatE {
        /// A rotation's angle is this times the number in the relation's row. Its authors use pi over the range of
        /// initial numbers; 1 for rows in radians.
        phase_scale: f32,
    },
}

impl DecoderKind {
    /// Its name, as users write it.
    pub fn name(self) -> &'static str {
        match self {
            DecoderKind::Dot => "dot",
            DecoderKind::DistMult => "distmult",
            DecoderKind::TransE { .. } => "transe",
            DecoderKind::ComplEx => "complex",
            DecoderKind::RotatE { .. } => "rotate",
        }
    }

    /// Columns of a relation's row for nodes of `columns` columns. Refuses an odd number if numbers are complex.
    pub fn relation_columns(self, columns: usize) -> Result<usize> {
        match self {
            DecoderKind::Dot => Ok(0),
            DecoderKind::DistMult | DecoderKind::TransE { .. } => Ok(columns),
            DecoderKind::ComplEx | DecoderKind::RotatE { .. } if columns % 2 == 1 => {
                Err(NnError::OddColumns { decoder: self.name(), columns })
            }
            DecoderKind::ComplEx => Ok(columns),
            DecoderKind::RotatE { .. } => Ok(columns / 2),
        }
    }

    /// Whether a score is the dot product of a query and a candidate.
    pub(crate) fn is_dot(self) -> bool {
        matches!(self, DecoderKind::Dot | DecoderKind::DistMult | DecoderKind::ComplEx)
    }
}

/// The loss of an edge's score `s` and the scores `n` of its negatives. Masked negatives count as absent, and a mean
/// is over the others.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkLoss {
    /// Cross-entropy of the edge among itself and its negatives: `log(exp(s) + sum of exp(n)) - s`.
    Softmax,
    /// `softplus(-s) + mean of softplus(n)`.
    Logistic,
    /// `mean of max(0, margin - s + n)`.
    Margin {
        /// The margin.
        margin: f32,
    },
    /// Half of `softplus(-margin - s) + sum of p softplus(margin + n)`, where the weights `p` are the softmax of
    /// `temperature x n` and get no gradient (RotatE).
    SelfAdversarial {
        /// The margin.
        margin: f32,
        /// Factor of scores in the weights.
        temperature: f32,
    },
}
