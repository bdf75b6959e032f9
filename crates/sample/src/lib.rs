//! Batches as a pure function of the job: which seeds a batch has, and which neighbours are drawn for its nodes.
//!
//! [`order`] says which seeds make up a batch, [`batches`] which nodes those are, negatives included; [`Topology`] hands
//! out neighbour lists, a whole hop at a time; [`EdgeLookup`] finds edges by id and by their ends, wherever the graph is;
//! [`Sampler`] draws neighbours and relabels nodes, as DENSE (Marius++ section 4), in the classic layered form, or as
//! ShaDow's induced subgraph; [`bulk`] samples many batches on many threads, in order; [`trace`] keeps samples on
//! disk; [`negatives`] corrupts edges for link prediction. [`draw`] documents the draw so that any processor can
//! repeat it. Nothing here decides where feature rows come from.
#![forbid(unsafe_code)]

pub mod batches;
pub mod bulk;
#[cfg(test)]
mod by_the_text;
pub mod draw;
mod error;
mod found;
mod masks;
mod memory;
pub mod negatives;

pub mod order;
mod relabel;
mod sample;
mod sampler;
mod topology;
pub mod trace;

pub use batches::{Batches, LinkBatch, LinkBatches, NodeBatches, Targets};
pub use error::{Result, SampleError};
pub use memory::{Bound, Touched};
pub use order::{Order, Seeds};
pub use sample::{Block, Form, LayerView, Sample};
pub use sampler::{Carry, Expand, Fanout, Position, Sampler, Settings};
pub use topology::{
    AnyTopology, CacheIndex, CachedLists, CountStream, Direction, DiskGraph, DiskWorkspace, Edge, EdgeLookup,
    EntryCounts, Fetched, HopLists, InMemory, IncomingNeighbours, ListCounters, NeighbourCache,
    NeighbourList, NotAtHand, OnDisk, RequestedEntries, Sources, Topology, TopologyWorkspace, Word,
};
