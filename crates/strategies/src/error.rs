use crate::RunPosition;
use esker_device::DeviceError;
use esker_fetch::FetchError;
use esker_fetch::pipeline::StagePanicked;
use esker_sample::SampleError;
use esker_store::StoreError;
use esker_types::{ByteCount, ErrorKind};
use std::path::PathBuf;

/// What can go wrong between a dataset and a batch.
#[derive(Debug, thiserror::Error)]
pub enum StrategyError {
    /// Sampling failed.
    #[error(transparent)]
    Sample(SampleError),
    /// Rows could not be fetched.
    #[error(transparent)]
    Fetch(FetchError),
    /// A file could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A cache larger than the memory that is left.
    #[error("{flag} asks for {asked}, and {left} are left for it; give a smaller {flag}, or more --memory")]
    Cache {
        /// The flag of the cache.
        flag: &'static str,
        /// Requested bytes.
        asked: ByteCount,
        /// Bytes left.
        left: ByteCount,
    },
    /// Adjacency by partition that does not fit the disk budget.
    #[error(
        "neighbours stored by partition take {needed}, and --disk-budget allows {allowed}; give --disk-budget {}, or --neighbour-policy cross",
        needed.flag_value()
    )]
    AdjacencyDisk {
        /// Bytes needed.
        needed: ByteCount,
        /// Bytes allowed.
        allowed: ByteCount,
    },
    /// Batches that turned out larger than the memory that is left for them.
    #[error(
        "batches of {batch} seeds were sampled, and packing or training on them takes {needed} where {left} are left for it; give {} more ({} bytes) with --memory, or a smaller --batch, --fanout or --feature-cache",
        short_of(needed, left).flag_value(), short_of(needed, left).0
    )]
    BatchMemory {
        /// Seed nodes per batch.
        batch: u64,
        /// Bytes needed.
        needed: ByteCount,
        /// Bytes left.
        left: ByteCount,
    },
    /// A batch that is larger than the pilot's, and does not fit.
    #[error(
        "{} is larger than expected{}; with it the run takes {needed}, and --memory allows {allowed}; {} --memory {}",
        if *trains { at.to_string() } else { format!("batch {}", at.batch + 1) },
        nodes.map(|nodes| format!(" ({} nodes)", esker_types::grouped(nodes))).unwrap_or_default(),
        if *trains { "the run is saved: continue it with --resume" } else { "use" }, needed.flag_value()
    )]
    LargeBatch {
        /// The batch.
        at: Box<RunPosition>,
        /// Whether it belongs to a run that trains, and so can be continued.
        trains: bool,
        /// Its nodes, if they were sampled.
        nodes: Option<u64>,
        /// The budget that would do.
        needed: ByteCount,
        /// The budget.
        allowed: ByteCount,
    },
    /// Samples that exceed the disk budget.
    #[error(
        "samples of {done} of {batches} batches take {taken} on disk, and --disk-budget allows {allowed}; all of them take about {all} ({} bytes), and rows packed for them more; give --disk-budget {} at least, or sample fewer epochs with --epochs-sampled",
        all.0, all.flag_value()
    )]
    SamplesDisk {
        /// Batches sampled so far.
        done: u64,
        /// Batches to sample.
        batches: u64,
        /// Bytes on disk so far.
        taken: ByteCount,
        /// The disk budget.
        allowed: ByteCount,
        /// Estimated bytes of all samples.
        all: ByteCount,
    },
    /// Traces of two batches that exceed the disk budget.
    #[error(
        "{folder}: two batches at a time take more on disk than --disk-budget allows; give --disk-budget {} at least, or take smaller batches",
        least.flag_value()
    )]
    TraceDisk {
        /// Their directory.
        folder: PathBuf,
        /// The smallest budget that works.
        least: ByteCount,
    },
    /// A directory with packed rows of other batches.
    #[error(
        "{directory} holds packed rows of other batches than these; give the flags they were made with, or another --prepared, or remove it"
    )]
    OtherBatches {
        /// The directory.
        directory: PathBuf,
    },
    /// A column that is neither of nodes nor of edges.
    #[error("{name} has no row for each node or each edge; ask for columns that begin with node- or edge-")]
    Column {
        /// Its name.
        name: String,
    },
    /// A column of edges for samples without edge ids.
    #[error(
        "{name} is a column of edges, and the samples do not carry edge ids; let the samples carry edge ids"
    )]
    EdgeColumn {
        /// Its name.
        name: String,
    },
    /// The dataset's directory is not writable, so packed rows cannot go there.
    #[error(
        "{path}: packed rows go here, and it cannot be written: {source}; choose another directory for them with --prepared DIR, or make this one writable"
    )]
    ReadOnly {
        /// The directory.
        path: PathBuf,
        /// The error.
        source: std::io::Error,
    },
    /// The training device failed, or has too little memory.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A source ended before its run did.
    #[error("the batches ended before {at}; resume the run with the configuration it was started with")]
    Ended {
        /// The expected batch.
        at: Box<RunPosition>,
    },
    /// A stage panicked.
    #[error(transparent)]
    Panicked(#[from] StagePanicked),
    /// State of an earlier process could not be written or read.
    #[error("{name}: {path}: {source}; start the run again with another --out")]
    State {
        /// Name of the state.
        name: String,
        /// Its file.
        path: PathBuf,
        /// The error.
        source: std::io::Error,
    },
    /// State of an earlier process that was truncated.
    #[error(
        "{name}: {path}: {expected_bytes} bytes were written, {found_bytes} are there; start the run again with another --out"
    )]
    StateCut {
        /// Name of the state.
        name: String,
        /// Its file.
        path: PathBuf,
        /// Its length when written.
        expected_bytes: u64,
        /// Its length now.
        found_bytes: u64,
    },
    /// The state of a history that does not fit it.
    #[error("{name}: {source}; start the run again with another --out")]
    HistoryState {
        /// Name of the state.
        name: &'static str,
        /// The error.
        source: std::io::Error,
    },
    /// State of embeddings that cannot be read.
    #[error("{name}: {source}; start the run again with another --out")]
    EmbeddingState {
        /// Name of the state.
        name: &'static str,
        /// The error.
        source: std::io::Error,
    },
    /// Initial embeddings that cannot be read.
    #[error("{said}")]
    InitialRows {
        /// What is wrong with them.
        said: String,
    },
    /// Embeddings of another size than those of the run.
    #[error(
        "the checkpoint has {name} of {} rows and {} columns, and the run has {} rows and {} columns; give the --embeddings that it began with, or start again with another --out",
        found[0], found[1], expected[0], expected[1]
    )]
    EmbeddingShape {
        /// Name of the state.
        name: &'static str,
        /// Rows and columns of the run.
        expected: [u64; 2],
        /// Rows and columns in the checkpoint.
        found: [u64; 2],
    },
    /// Rows by partition of another run.
    #[error(
        "the checkpoint has embeddings by the partitions {found}, and the run has {expected}; give the flags that it began with, or start again with another --out"
    )]
    OtherPartitions {
        /// Partitions, numbers per row and optimizer of the run.
        expected: String,
        /// Those of the checkpoint.
        found: String,
    },
    /// No partition buffer.
    #[error(
        "strategy marius needs an order over partitions; give --order tour, two-level-beta, beta, dispersed or training-first"
    )]
    NoBuffer,
    /// Batches that have no steps over partitions.
    #[error(
        "strategy marius trains by steps over partitions, and the batches have none; give --order tour, two-level-beta, beta, dispersed or training-first"
    )]
    NoSteps,
    /// More edges between residents than were provided for.
    #[error(
        "{} edges are between the resident partitions of a step, and memory was provided for {}; give more --partitions or fewer --resident",
        esker_types::grouped(*found), esker_types::grouped(*allowed)
    )]
    ResidentEdges {
        /// The edges.
        found: u64,
        /// What was provided for.
        allowed: u64,
    },
    /// More nodes than embeddings have slots for.
    #[error("the graph has {} nodes, and embeddings can be learned for at most {}", esker_types::grouped(*nodes), u32::MAX)]
    EmbeddingRows {
        /// Nodes of the graph.
        nodes: u64,
    },
    /// Too little memory to find out how many rows of a history pay.
    #[error(
        "finding out how many rows of a history pay takes {needed}, and {left} are left for it; give their number with --history-rows, or more --memory"
    )]
    ProfileMemory {
        /// Bytes needed.
        needed: ByteCount,
        /// Bytes left.
        left: ByteCount,
    },
    /// A stop was requested before there was a batch.
    #[error("stopped")]
    Stopped,
    /// A pool of threads could not be started.
    #[error("{threads} threads could not be started: {source}; ask for fewer with --threads")]
    Threads {
        /// Number of threads.
        threads: usize,
        /// The error.
        source: rayon::ThreadPoolBuildError,
    },
}

fn short_of(needed: &ByteCount, left: &ByteCount) -> ByteCount {
    ByteCount(needed.0.saturating_sub(left.0))
}

/// Result type of this crate.
pub type Result<T, E = StrategyError> = std::result::Result<T, E>;

impl From<SampleError> for StrategyError {
    fn from(error: SampleError) -> StrategyError {
        match error {
            SampleError::Stopped => StrategyError::Stopped,
            error => StrategyError::Sample(error),
        }
    }
}

impl From<FetchError> for StrategyError {
    fn from(error: FetchError) -> StrategyError {
        match error {
            FetchError::Stopped => StrategyError::Stopped,
            error => StrategyError::Fetch(error),
        }
    }
}

impl StrategyError {
    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            StrategyError::Sample(error) => error.kind(),
            StrategyError::Fetch(error) => error.kind(),
            StrategyError::Store(error) => error.kind(),
            StrategyError::Cache { .. }
            | StrategyError::AdjacencyDisk { .. }
            | StrategyError::BatchMemory { .. }
            | StrategyError::LargeBatch { .. }
            | StrategyError::SamplesDisk { .. }
            | StrategyError::TraceDisk { .. }
            | StrategyError::OtherBatches { .. }
            | StrategyError::Column { .. }
            | StrategyError::EdgeColumn { .. }
            | StrategyError::EmbeddingShape { .. }
            | StrategyError::EmbeddingRows { .. }
            | StrategyError::OtherPartitions { .. }
            | StrategyError::NoBuffer
            | StrategyError::NoSteps
            | StrategyError::ResidentEdges { .. }
            | StrategyError::ProfileMemory { .. } => ErrorKind::Asked,
            StrategyError::Stopped => ErrorKind::Stopped,
            StrategyError::ReadOnly { .. }
            | StrategyError::Device(_)
            | StrategyError::Ended { .. }
            | StrategyError::Panicked(_)
            | StrategyError::State { .. }
            | StrategyError::StateCut { .. }
            | StrategyError::HistoryState { .. }
            | StrategyError::EmbeddingState { .. }
            | StrategyError::InitialRows { .. }
            | StrategyError::Threads { .. } => ErrorKind::World,
        }
    }
}
