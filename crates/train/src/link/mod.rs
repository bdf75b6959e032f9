//! Link prediction: edges are scored, and training edges must score above their negatives (Marius++ section 3).
//!
//! [`LinkTask`] is what is learned: every edge of the graph, and edges that were held out. `batches.rs` makes batches of
//! edges and negatives. [`LinkObjective`] scores them with a decoder over the encoder's output, and owns the rows of
//! relations. `rank.rs` evaluates: the answer of each held-out edge is ranked among all nodes, without those that make
//! another true edge (`split.rs`); where the rows of all nodes are too many for the memory (`rows.rs`), they pass by in blocks
//! (`stream.rs`). `tally.rs` turns ranks into metrics. `predict.rs` scores what a user asks for.

mod batches;
mod config;
mod objective;
mod predict;
mod rank;
mod rows;
mod split;
mod stream;
mod tally;
mod task;

pub(crate) use batches::{bucket_batches, link_batches};
pub use config::{
    EdgeWeights, LinkConfig, LossReduction, NegativeCount, PenaltyConfig, PenaltyName, RankConfig,
    RelationInit, TargetEdges,
};
pub(crate) use objective::begins_with_ones;
pub use objective::{LinkObjective, RelationStart};
pub use predict::{LinkModel, ScoredNode, TakeLinkRows, with_link_model};
pub(crate) use rank::{PIECE_NODES, copied_nodes};
pub use rank::{RelationRanks, SplitRanks};
pub use rows::{RankRows, RankStream};
pub use split::Links;
pub(crate) use split::{PIECE_QUERIES, listed_bytes};
pub use tally::{RankMetrics, RankTally, Ties};
pub use task::LinkTask;
