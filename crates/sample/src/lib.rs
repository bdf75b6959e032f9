//! Batches as a pure function of the job: which seed nodes a batch has, and which neighbours are sampled for them.
//!
//! [`order`] defines which seeds make up a batch. [`batches`] turns them into seed nodes, negatives included.
//! [`Topology`] provides the neighbours of a whole hop at a time. [`EdgeLookup`] finds edges by id and by their ends,
//! whether the graph is in memory or on disk. [`Sampler`] samples neighbours and relabels nodes, as DENSE (Marius++
//! section 4), in the classic layered form, or as ShaDow's induced subgraph. [`hops`] samples in the order of PyG's
//! loaders, with their options. [`bulk`] samples many batches on many
//! threads, in order. [`trace`] stores samples on disk. [`negatives`] corrupts edges for link prediction, [`EdgeRows`]
//! are held-out edges, and [`TrueEnds`] knows every true end of a query. [`draw`]
//! specifies the random draw so that any device can repeat it. [`partition`] divides the nodes of a graph, for an order
//! by groups of partitions. Nothing here decides where feature rows come from.
//!
//! ```
//! use esker_sample::{Carry, Direction, Fanout, Form, InMemory, Position, Sample, Sampler, Settings};
//! use esker_store::Dataset;
//! use esker_types::NodeId;
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("g");
//! # let shape = esker_import::generate::GraphShape { dim: 8, ..esker_import::generate::GraphShape::plain(1000) };
//! # let budget = esker_types::Budget { host_bytes: 64 << 20 };
//! # let job = esker_import::ImportJob { target: &path, budget, overwrite: false, progress: &esker_types::Silent };
//! # esker_import::generate::generate(&shape, &job)?;
//!
//! let dataset = Dataset::open(&path)?;
//! let topology = InMemory::<u32>::load(&dataset, Direction::Incoming)?;
//! let fanouts = vec![Fanout::AtMost(10), Fanout::AtMost(5)];
//! let settings = Settings { seed: 1, fanouts, form: Form::Dense, carry: Carry::default() };
//! // The sampler refuses a batch that would take more than 64 MiB.
//! let mut sampler = Sampler::new(&topology, settings, 64 << 20)?;
//!
//! let seeds: Vec<NodeId> = (0..20).map(NodeId).collect();
//! let mut sample = Sample::default();
//! sampler.sample(Position { epoch: 0, batch: 0 }, &seeds, &mut sample)?;
//! // Every node once, the deepest hop first, the seeds last.
//! assert!(sample.node_ids.ends_with(&seeds));
//! assert!(sample.edge_count() <= 20 * 10 + 20 * 10 * 5 + 20 * 5);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The life of a sample
//!
//! ```text
//!  Seeds ── Order ──> items of a batch ──> targets ── hop after hop ──> Found ── assemble ──> Sample ──> trace
//!           (seed,                                    draw, relabel     (order of             (canonical
//!            epoch)                                                      discovery)            order)
//! ```
//!
//! 1. `order.rs`: which seeds batch b of an epoch has. Each batch is computed on its own. A new order is one more
//!    `Order`; `order/groups.rs` is the one by groups of partitions. `batches.rs` turns seeds into nodes: the seeds themselves, or the ends of edges and
//!    their negatives.
//! 2. `Topology`: adjacency in memory is read directly. Other topologies give degrees first, and then fetch the sampled
//!    entries of a whole hop together.
//! 3. `sampler/hop.rs`: `draw.rs` picks positions, the neighbours are read, and `relabel.rs` turns node ids into local
//!    indices. Each step runs some nodes after the previous one, so that cache misses overlap. `sampler/levels.rs`
//!    leaves out what pulled hidden rows make unnecessary.
//! 4. `found.rs` puts the batch in canonical order: deepest hop first, targets last. `Sample::layer` is what a layer
//!    reads.
//! 5. `bulk.rs` does this for many batches on many threads, in order. `trace/` writes samples to disk and reads them
//!    back.
//!
//! # What always holds
//!
//! - A buffer that grows with a batch asks the sampler's `Ledger` first: memory is refused before it is allocated.
//! - Traces are found again by their header. Access files and plans are unlinked temporary files and vanish with their
//!   process.
#![forbid(unsafe_code)]

pub mod batches;
mod buckets;
pub mod bulk;
mod by_hop;
pub mod draw;
mod error;
mod found;
mod held_out;
mod leaks;
mod masks;
mod memory;
pub mod negatives;
mod node_partitions;
mod node_set;
#[cfg(test)]
mod reference;

pub mod hops;
pub mod order;
pub mod partition;
mod ranks;
mod relabel;
mod sample;
mod sampler;
mod topology;
pub mod trace;
mod true_ends;

pub use batches::{Batches, LinkBatch, LinkBatches, NodeBatches, SideNegatives, Targets};
pub use buckets::{
    BucketCounts, BucketLinks, BucketPool, BucketReader, BucketSubgraphs, BucketTopology, BucketWords,
    BufferRows, CurrentSubgraph, EdgeBuckets, GraphSize, ResidentBuckets, ResidentEdges, StepGraphs,
};
pub use by_hop::HopOrdered;
pub use error::{Result, SampleError};
pub use held_out::{EdgeRows, FixedNegatives, HeldOut};
pub use leaks::{SplitLeaks, unseen_node_bytes, unseen_nodes};
pub use memory::{Bound, HopSizes, Touched};
pub use node_partitions::NodePartitions;
pub use node_set::NodeSet;
pub use order::{Order, Seeds};
pub use ranks::{Rank, RankBatches};
pub use sample::{Block, Form, LayerView, Sample};
pub use sampler::{Carry, Fanout, Position, Pulls, Sampler, Settings};
pub use topology::{
    AdjacencyRequest, AnyTopology, ByStep, CacheIndex, CountStream, CountedNeighbours, Direction, DiskGraph,
    DiskWorkspace, Edge, EdgeLookup, EntryCounts, Fetched, GraphWork, GroupCache, GroupNeighbours, GroupRoom,
    HopNeighbours, InMemory, IncomingNeighbours, NeighbourCache, NeighbourCacheFile, NeighbourCounters,
    Neighbours, NotInMemory, OnDisk, PartitionedAdjacency, RequestedEntries, ResidentPool, Sources, StepHop,
    StepSubgraphs, StepWorkspace, StoredId, Subgraph, SubgraphBuilder, SubgraphHop, SubgraphShape,
    SubgraphsInMemory, Topology, TopologyWorkspace, resident_nodes,
};
pub use true_ends::{Queries, TrueEnds, TrueEndsRequest, for_each_edge, true_edges};
