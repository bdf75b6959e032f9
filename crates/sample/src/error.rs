use crate::Direction;
use esker_store::StoreError;
use esker_types::{ByteCount, ErrorKind, counted};
use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong while sampling.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// The dataset could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Edges were given and nodes are needed.
    #[error("the seeds are edges, not nodes; give nodes as seeds, or make link batches")]
    SeedsAreEdges,
    /// Nodes were given and edges are needed.
    #[error("the seeds are nodes, not edges; give edges as seeds, or make node batches")]
    SeedsAreNodes,
    /// An order made for other seeds.
    #[error(
        "the order asks for seed {item}, there are {seeds} seeds; use an order that was made for these seeds"
    )]
    NoSuchSeed {
        /// Index of the seed.
        item: u64,
        /// Number of seeds.
        seeds: u64,
    },
    /// A batch after the last of its epoch.
    #[error(
        "batch {batch} of epoch {epoch} is asked for, the epoch has {batches} batches; count batches from 0, and continue with the next epoch"
    )]
    NoSuchBatch {
        /// The epoch.
        epoch: u64,
        /// The batch.
        batch: u64,
        /// Number of batches in the epoch.
        batches: u64,
    },
    /// Batches without seeds.
    #[error("batches of 0 seeds are asked for; a batch needs at least one seed")]
    EmptyBatches,
    /// Groups that may have no full batch.
    #[error(
        "{seeds} seeds in {groups} groups may have no full batch in epoch {epoch}: batches of {batch} are asked for, and smaller ones are dropped; take smaller batches, larger groups or fewer partitions"
    )]
    NoFullGroup {
        /// Seeds of a batch.
        batch: u64,
        /// Groups of an epoch.
        groups: u64,
        /// Number of seeds.
        seeds: u64,
        /// The epoch, from 0.
        epoch: u64,
    },
    /// A process that is not one of those that train together.
    #[error("rank {rank} of {world_size}; ranks count from 0, and there are {world_size} of them")]
    Rank {
        /// The given rank.
        rank: u64,
        /// How many there are.
        world_size: u64,
    },
    /// A hop that samples nothing.
    #[error("a fan-out of 0 samples nothing; leave the hop out")]
    ZeroFanout,
    /// Relations are requested and the graph has none.
    #[error("the graph has no kinds of edges to carry; leave relations out, or import them")]
    NoRelations,
    /// Pulled nodes in a sample that cannot have them.
    #[error(
        "a history needs samples of form dense and at least two layers, and these are of form {form} and have {}; use --form dense and --layers 2 or more, or train without a history",
        counted(*layers as u64, "layer", "layers")
    )]
    Pulls {
        /// The form.
        form: crate::Form,
        /// Number of layers.
        layers: usize,
    },
    /// More nodes than a sample can number.
    #[error(
        "a batch reached {nodes} nodes and may pass 2^31 with the next neighbours; take smaller batches or fan-outs"
    )]
    TooManyNodes {
        /// Number of nodes so far.
        nodes: u64,
    },
    /// More neighbours than a block can number.
    #[error(
        "a batch sampled {neighbours} neighbours for one block, more than 2^32; take smaller batches or fan-outs"
    )]
    TooManyNeighbours {
        /// Number of neighbours.
        neighbours: usize,
    },
    /// Negatives that cannot be drawn.
    #[error(
        "{uniform} + {by_degree} negatives are drawn for each of {chunks} chunks; give a batch one chunk at least, and a chunk fewer than 2^32 negatives"
    )]
    NegativeCounts {
        /// Drawn uniformly.
        uniform: u32,
        /// Drawn by degree.
        by_degree: u32,
        /// Chunks per batch.
        chunks: u32,
    },
    /// More negatives than a batch can number.
    #[error(
        "a batch of {edges} edges has {negatives} negatives, more than 2^31; take smaller batches, fewer chunks or fewer negatives"
    )]
    TooManyNegatives {
        /// Edges of the batch.
        edges: usize,
        /// Negatives of all chunks.
        negatives: u64,
    },
    /// Nothing to draw negatives from.
    #[error(
        "negatives are drawn from {nodes} nodes with {edges} incoming edges; give nodes to draw from; by degree, nodes that have incoming edges"
    )]
    EmptyPool {
        /// Nodes of the pool.
        nodes: u64,
        /// Edges into them.
        edges: u64,
    },
    /// Edges are held out nowhere.
    #[error(
        "{dataset} has no edge split: no validation and test edges; import it with --hold-out valid:5%,test:10%, or from a format that has them"
    )]
    NoEdgeSplit {
        /// The dataset.
        dataset: PathBuf,
    },
    /// Fixed negatives that do not fit the edges they belong to.
    #[error("{what}: expected {expected}, found {found}; give negatives that were made for these edges")]
    NegativeShape {
        /// The negatives.
        what: String,
        /// What is needed.
        expected: String,
        /// What there is.
        found: String,
    },
    /// Every node is a negative, and true edges of the graph are to be left out, but not known.
    #[error(
        "every node is a negative and pairs that are edges of the graph are to be left out: build their index first, or leave out those of the batch only (mask `batch`)"
    )]
    UnknownTrueEnds,
    /// More nodes than 32 bits number.
    #[error("every node is a candidate, and {nodes} nodes are more than 2^32; take sampled negatives")]
    TooManyCandidates {
        /// Nodes of the graph.
        nodes: u64,
    },
    /// Known true ends need more memory than they may use.
    #[error(
        "true ends of {queries} queries need {needed} of memory, {allowed} are allowed; give --memory {}, or evaluate fewer edges",
        needed.flag_value()
    )]
    TrueEndsMemory {
        /// Queries, both sides together.
        queries: u64,
        /// Bytes needed.
        needed: ByteCount,
        /// Bytes allowed.
        allowed: ByteCount,
    },
    /// Positions in adjacency that some edges were left out of.
    #[error(
        "positions in the stored adjacency are carried, and target edges are left out of it; carry edge ids instead, or keep target edges"
    )]
    PositionsOfDropped,
    /// Incoming edges are requested from a topology that has only outgoing ones.
    #[error(
        "true edges are looked up by their target, and the topology has outgoing adjacency only; load it with incoming adjacency, or with both"
    )]
    OnlyOutgoing,
    /// The dataset has no adjacency in this direction.
    #[error("{dataset} has no {array}; import or generate it with --out-neighbours")]
    NoAdjacency {
        /// The dataset.
        dataset: PathBuf,
        /// The array that is missing.
        array: String,
    },
    /// An edge id that the topology cannot find.
    #[error(
        "edge {edge} is looked up in {direction} adjacency of {edges} edges; use edge ids of this graph, and incoming adjacency or both"
    )]
    NoSuchEdge {
        /// Id of the edge.
        edge: u64,
        /// The direction that was loaded.
        direction: Direction,
        /// Number of edges.
        edges: u64,
    },
    /// More resident nodes than are numbered.
    #[error("{nodes} nodes are resident, more than 2^32; give a smaller --resident, or more --partitions")]
    TooManyResident {
        /// Resident nodes.
        nodes: u64,
    },
    /// A node whose neighbours are not in memory at present.
    #[error("node {node} is not resident; sample from nodes that are")]
    NotResident {
        /// The node.
        node: u64,
    },
    /// A sample that a trace cannot store.
    #[error(
        "{path}: a sample with {what} is not a sample of this trace; write samples made with the trace's settings"
    )]
    ForeignSample {
        /// The trace.
        path: PathBuf,
        /// What differs.
        what: &'static str,
    },
    /// A seed that is not a node of the graph.
    #[error("seed {found} is not a node: the graph has nodes 0 to {last}; check the list of seeds")]
    Seed {
        /// The seed.
        found: u64,
        /// The largest node id.
        last: u64,
    },
    /// A batch needs more memory than the sampler may use.
    #[error(
        "sampling {what} needs {needed}, the sampler may use {allowed}; allow {}, or take smaller batches or fan-outs",
        needed.flag_value()
    )]
    Memory {
        /// What grew too large.
        what: String,
        /// Bytes needed.
        needed: ByteCount,
        /// Bytes allowed.
        allowed: ByteCount,
    },
    /// A partitioning needs more memory than it may use.
    #[error(
        "{partitions} partitions of {nodes} nodes need {needed} of memory, {allowed} are allowed; give --memory {}",
        needed.flag_value()
    )]
    PartitionMemory {
        /// Nodes of the graph.
        nodes: u64,
        /// Number of partitions.
        partitions: u32,
        /// Bytes needed.
        needed: ByteCount,
        /// Bytes allowed.
        allowed: ByteCount,
    },
    /// A number that cannot be.
    #[error("{found} {what} are asked for; give from 1 to {most}")]
    PartitionCount {
        /// What is counted.
        what: &'static str,
        /// What was requested.
        found: u64,
        /// The most that can be.
        most: u64,
    },
    /// A name that cannot be.
    #[error(
        "`{name}` cannot be the name of a partitioning; use letters, digits, `-` and `_`, at most 100 of them"
    )]
    PartitioningName {
        /// The name.
        name: String,
    },
    /// No training nodes to choose the number of partitions by.
    #[error(
        "{dataset} has no training nodes, by which `auto` chooses the number of partitions; give --partitions N"
    )]
    NoTrainingNodes {
        /// The dataset.
        dataset: PathBuf,
    },
    /// A line of a file of partitions.
    #[error(
        "{path}, line {line}: expected {expected}, found {found}; the file must have a partition number per line, a line per node"
    )]
    PartitionLine {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What it may be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A file of partitions of another graph.
    #[error(
        "{path}: expected {expected} lines, one per node, found {found}; give the partitions of this graph, in the order of its node ids"
    )]
    PartitionLines {
        /// The file.
        path: PathBuf,
        /// Nodes of the graph.
        expected: u64,
        /// Lines of the file.
        found: u64,
    },
    /// The name has another partitioning.
    #[error(
        "{dataset} has a partitioning `{name}` with other parameters ({found}); choose another --name, or replace it with --overwrite"
    )]
    PartitioningExists {
        /// The dataset.
        dataset: PathBuf,
        /// The name.
        name: String,
        /// What it is.
        found: String,
    },
    /// A partitioning that is not there.
    #[error(
        "{dataset} has no partitioning `{name}`, it has {names}; make it with `esker partition {dataset} --name {name}`"
    )]
    NoPartitioning {
        /// The dataset.
        dataset: PathBuf,
        /// The name.
        name: String,
        /// Those that are there.
        names: String,
    },
    /// Damaged partitions, or those of another dataset.
    #[error(
        "{path}: expected {expected}, found {found}; remove the directory, and run `esker partition` again"
    )]
    Partitioning {
        /// The directory or file.
        path: PathBuf,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// Damaged adjacency by partition.
    #[error("{path}: expected {expected}, found {found}; remove the directory, and it is made again")]
    Adjacency {
        /// The directory or file.
        path: PathBuf,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// An edge that is not where its bucket says.
    #[error(
        "an edge from partition {from} to {to} names a node that is not there; remove the dataset's derived edge buckets, and they are made again"
    )]
    BucketEdge {
        /// The partition of its source.
        from: u32,
        /// The partition of its target.
        to: u32,
    },
    /// Borrowed adjacency that is none.
    #[error(
        "{what} of the adjacency: expected {expected}, found {found}; give the three arrays that PyG's `to_csc` makes of `edge_index`"
    )]
    Csc {
        /// The array.
        what: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// More trees than can be told apart.
    #[error(
        "a disjoint batch of {seeds} seeds on {nodes} nodes has more pairs of tree and node than 64 bits number; take smaller batches"
    )]
    TooManyTrees {
        /// Seeds of the batch.
        seeds: usize,
        /// Nodes of the graph.
        nodes: u64,
    },
    /// Options that exclude each other.
    #[error("{what}; {remedy}")]
    HopOptions {
        /// What was asked for.
        what: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// Times of seeds that do not fit the seeds.
    #[error(
        "times of seeds: expected {expected}, found {found}; give one time for each seed (`input_time`), and none to a sampler without times"
    )]
    SeedTimes {
        /// What is needed.
        expected: String,
        /// What there is.
        found: String,
    },
    /// Weights or times that cannot be.
    #[error("{what}: expected {expected}, found {found}; give one such number for each {of}")]
    HopColumn {
        /// The column.
        what: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
        /// What each number belongs to.
        of: &'static str,
    },
    /// A stop was requested.
    #[error("stopped")]
    Stopped,
    /// An I/O error of the operating system.
    #[error("{path}: {source}")]
    Io {
        /// The trace.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A damaged trace.
    #[error("{path}: expected {expected}, found {found}; delete the trace and sample again")]
    Trace {
        /// The trace.
        path: PathBuf,
        /// What the format requires.
        expected: String,
        /// What the file has.
        found: String,
    },
}

/// Result type of this crate.
pub type Result<T, E = SampleError> = std::result::Result<T, E>;

impl SampleError {
    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            SampleError::Store(error) => error.kind(),
            SampleError::Stopped => ErrorKind::Stopped,
            SampleError::Io { .. }
            | SampleError::Trace { .. }
            | SampleError::Partitioning { .. }
            | SampleError::Adjacency { .. }
            | SampleError::BucketEdge { .. } => ErrorKind::World,
            _ => ErrorKind::Asked,
        }
    }

    /// For `map_err` on I/O results.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> SampleError + '_ {
        move |source| match StoreError::io(path)(source) {
            StoreError::Io { path, source } => SampleError::Io { path, source },
            full => full.into(),
        }
    }

    pub(crate) fn trace(path: &Path, expected: impl ToString, found: impl ToString) -> SampleError {
        SampleError::Trace {
            path: path.to_path_buf(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}
