//! Link prediction: edges are scored, and training edges must score above their negatives (Marius++ section 3).
//!
//! [`LinkTask`] is what is learned: every edge of the graph, and edges that were held out. `batches.rs` makes batches of
//! edges and negatives. [`LinkObjective`] scores them with a decoder over the encoder's output, and owns the rows of
//! relations. `rank.rs` evaluates: the answer of each held-out edge is ranked among all nodes, without those that make
//! another true edge (`split.rs`); `tally.rs` turns ranks into metrics. `predict.rs` scores what a user asks for.

mod batches;
mod config;
mod objective;
mod predict;
mod rank;
mod split;
mod tally;
mod task;

pub(crate) use batches::link_batches;
pub use config::{
    LinkConfig, LossReduction, NegativeCount, PenaltyConfig, PenaltyName, RankConfig, TargetEdges,
};
pub(crate) use objective::begins_with_ones;
pub use objective::{LinkObjective, RelationStart};
pub use predict::{LinkModel, ScoredNode, TakeLinkRows, with_link_model};
pub(crate) use rank::PIECE_QUERIES;
pub use rank::{RelationRanks, SplitRanks};
pub use split::Links;
pub use tally::{RankMetrics, RankTally, Ties};
pub use task::LinkTask;
