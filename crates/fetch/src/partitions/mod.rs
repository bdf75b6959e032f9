//! Rows by node partition: what a partition buffer reads and writes in large pieces (Marius++ section 3).
//!
//! [`PartitionedFeatures`] are the feature rows of a dataset in the order of partitions, as derived data;
//! [`ResidentFeatures`] are those of the partitions that a step needs. [`PartitionFiles`] are rows that training changes,
//! each partition in a file of its own and in versions; a [`PartitionRowStream`] reads partitions ahead and writes those that
//! left, on a thread of its own. [`SlotAssignment`] says which slots of a buffer change from step to step. Which
//! partitions are resident when is decided elsewhere.

mod features;
mod files;
mod slots;
mod stream;

pub use features::{PartitionRows, PartitionedFeatures, ResidentFeatures};
pub use files::{InitialRows, PartitionFiles, PartitionReader, PartitionVersion, RowFileShape};
pub use slots::{SlotAssignment, SlotSwap, SplitNodes, mark_slots, split_nodes};
pub use stream::{PartitionRowStream, StreamCounters};
