use crate::MetricName;
use esker_nn::{NnError, Precision};
use esker_plan::partition_orders::{BufferTooSmall, PartitionOrderError, PartitionOrderKind};
use esker_sample::SampleError;
use esker_store::{LabelKind, StoreError};
use esker_strategies::{MemoryTable, RunPosition, StrategyError, StrategyKind};
use esker_types::{ByteCount, ErrorKind};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong while training, evaluating or predicting.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The dataset could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Sampling failed.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// A batch could not be fetched.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// The model failed.
    #[error(transparent)]
    Nn(#[from] NnError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] esker_nn::DeviceError),
    /// Reading or writing a file failed.
    #[error(transparent)]
    Engine(#[from] esker_io::IoError),
    /// A flag whose value is out of bounds.
    #[error("{flag} is {found}; it must be {allowed}")]
    Setting {
        /// The flag.
        flag: &'static str,
        /// The given value.
        found: f64,
        /// The allowed values.
        allowed: &'static str,
    },
    /// Fan-outs that do not match the layers.
    #[error("a {name} of {hops} hops for {layers} layers; give one number, or one a layer")]
    Fanout {
        /// The fan-out of training or of evaluation.
        name: &'static str,
        /// Number of hops.
        hops: usize,
        /// Number of layers.
        layers: usize,
    },
    /// ShaDow cannot be evaluated layer by layer.
    #[error(
        "ShaDow trains on induced subgraphs, which inference layer by layer does not have; evaluate with --eval sampled and --final-eval sampled"
    )]
    ShadowFull,
    /// A history with a strategy that does not keep one.
    #[error(
        "{strategy} keeps no history of hidden rows; leave --history-rows and --history-set out, or use --strategy outre, memory or mmap"
    )]
    NoHistory {
        /// The strategy.
        strategy: StrategyKind,
    },
    /// Pulled nodes of two hops in a model where those of the second have no hidden rows.
    #[error(
        "--history-hop 2 pulls what enters the layer before the last for nodes of the second hop, and with {layers} layers that is their feature rows; use --layers 3 or more, or --history-hop 1 or all"
    )]
    HistoryHop {
        /// Number of layers.
        layers: usize,
    },
    /// Rows of a history in a dtype that they cannot have.
    #[error("rows of a history are stored as f32 or f16, not as {found}; use --history-dtype f32 or f16")]
    HistoryDtype {
        /// The dtype.
        found: esker_types::Dtype,
    },
    /// A run without a history whose nodes are asked for.
    #[error(
        "{run}: the run has no history of hidden rows; give --history-rows, or another run to --history-set"
    )]
    RunWithoutHistory {
        /// Its directory.
        run: PathBuf,
    },
    /// Nodes of a history that are not those of the run.
    #[error(
        "{run}: the nodes of its history have the hash {found}, and the run began with {expected}; restore its history.nodes, or start the run again with another --out"
    )]
    OtherHistory {
        /// The run that they were taken from.
        run: PathBuf,
        /// The hash that was expected.
        expected: String,
        /// The hash of the nodes.
        found: String,
    },
    /// Repeated epochs with a strategy that cannot repeat them.
    #[error(
        "{strategy} samples every epoch again; leave --epochs-sampled out, or take diskgnn, esker, memory or mmap"
    )]
    RepeatsNothing {
        /// The strategy.
        strategy: StrategyKind,
    },
    /// No device was chosen.
    #[error("device auto; say which: cpu, or cuda:N")]
    DeviceAuto,
    /// A precision that the CPU does not have.
    #[error(
        "the CPU computes in f32, not in {}; leave --precision out, or train with --device cuda",
        format!("{asked:?}").to_lowercase()
    )]
    CpuPrecision {
        /// The given precision.
        asked: Precision,
    },
    /// Settings that differ from those of the run.
    #[error(
        "the run in {out} was started with other settings: {}; leave these out to resume it, or choose another --out for a new run",
        differences_text(differences)
    )]
    OtherRun {
        /// The run.
        out: PathBuf,
        /// What differs.
        differences: Vec<Difference>,
    },
    /// A run without weights.
    #[error("{run} holds no weights yet; finish the run with `esker train --resume`")]
    NoWeights {
        /// The run.
        run: PathBuf,
    },
    /// A dataset that differs from that of the run.
    #[error("{dataset} is not the dataset this run was made with; give the old one, or train anew")]
    OtherDataset {
        /// The dataset.
        dataset: PathBuf,
    },
    /// An order by groups without partitions.
    #[error("the order by groups has no partitioning; make one with `esker partition`, and choose it")]
    NoPartitioning,
    /// A partitioning that is gone.
    #[error(
        "{dataset} has no partitioning `{name}` any more; the run was started with {made}: make it again with `esker partition {dataset} --name {name}` and these parameters, or train anew"
    )]
    LostPartitioning {
        /// The dataset.
        dataset: PathBuf,
        /// The name.
        name: String,
        /// What it was.
        made: String,
    },
    /// A partitioning that differs from that of the run.
    #[error(
        "{dataset}: the partitioning `{name}` has changed since the run was started: its digest is {now}, was {before}; bring the old one back ({made}) with `esker partition --overwrite` and these parameters, or train anew"
    )]
    OtherPartitioning {
        /// The dataset.
        dataset: PathBuf,
        /// The name.
        name: String,
        /// The digest that it has.
        now: String,
        /// The digest of the run.
        before: String,
        /// How it was made.
        made: String,
    },
    /// A metric that these labels do not have.
    #[error("--metric {metric} does not fit {}; {}", labels_text(*kind, *outputs), metrics_text(*kind))]
    Metric {
        /// The given metric.
        metric: MetricName,
        /// The kind of labels.
        kind: LabelKind,
        /// Number of classes, or labels per node.
        outputs: usize,
    },
    /// No batch is full.
    #[error(
        "--drop-last leaves no batch of {batch} of {nodes} training nodes or edges; take a smaller --batch, or leave --drop-last out"
    )]
    NoFullBatch {
        /// Seed nodes per batch.
        batch: u64,
        /// Number of training nodes or edges.
        nodes: usize,
    },
    /// A node batch for an objective over links.
    #[error("a batch of nodes came to a model of links; leave --task out, or give a dataset of links")]
    NodeBatch,
    /// A dataset without held-out edges.
    #[error(
        "{dataset} has no held-out edges, so links cannot be evaluated; import it with --hold-out valid:5%,test:10%, or as --format triples"
    )]
    NoEdgeSplit {
        /// The dataset.
        dataset: PathBuf,
    },
    /// More relations than are told apart.
    #[error(
        "{dataset} has {found} relations; at most {most} can be learned; import it with relations of a coarser kind"
    )]
    TooManyRelations {
        /// The dataset.
        dataset: PathBuf,
        /// Its relations.
        found: u64,
        /// The most that have numbers.
        most: u64,
    },
    /// Ranks of edges that train.
    #[error("edges that train are not ranked; give --split valid or --split test")]
    TrainRanks,
    /// An order that links do not have.
    #[error(
        "edges are trained on in the order shuffled, sequential, beta, two-level-beta or tour; leave --order groups out"
    )]
    LinkOrder,
    /// Numbers of partitions that do not go together.
    #[error(transparent)]
    PartitionOrder(#[from] PartitionOrderError),
    /// A partition buffer for which there is too little memory, whatever the number of partitions.
    #[error(transparent)]
    Buffer(#[from] BufferTooSmall),
    /// An order over partitions without their number.
    #[error(
        "order {order} takes steps over partitions; give their number, as in --partitions 32 --resident 8"
    )]
    NoPartitionCounts {
        /// The order.
        order: PartitionOrderKind,
    },
    /// An order over partitions for the other task.
    #[error(
        "order {order} trains on {}, and the task is {}; use --order {}",
        if *links { "the nodes of partitions" } else { "the edges between partitions" },
        if *links { "links" } else { "node labels" },
        if *links { "two-level-beta, tour or beta" } else { "dispersed or training-first" }
    )]
    OrderOfTask {
        /// The order.
        order: PartitionOrderKind,
        /// Whether links are learned.
        links: bool,
    },
    /// Residents without partitions.
    #[error(
        "--resident-only is for orders over partitions; use --order two-level-beta, tour or beta for links, dispersed or training-first for node labels, or leave it out"
    )]
    ResidentsOfNoOrder,
    /// Resident negatives without negatives.
    #[error(
        "--resident-only negatives is for links, and node labels are learned; give --resident-only, or leave it out"
    )]
    ResidentNegatives,
    /// Residents with a strategy that does not hold the topology.
    #[error(
        "--resident-only imitates a partition buffer with the whole graph in memory, and {strategy} has it on disk; use --strategy memory, or leave it out"
    )]
    ResidentStrategy {
        /// The strategy.
        strategy: StrategyKind,
    },
    /// A buffer whose neighbours are not resident.
    #[error(
        "--strategy marius has resident nodes and the edges between them, so its batches see no others; leave --resident-only out, or use --strategy memory"
    )]
    BufferNeighbours,
    /// Residents and a history.
    #[error("--resident-only and a history of hidden rows do not go together; leave one of them out")]
    ResidentHistory,
    /// Residents, where all nodes are negatives.
    #[error(
        "every node is a negative, and --resident-only sees resident ones; give --negatives N, or leave it out"
    )]
    ResidentAllNodes,
    /// Edges weighed by how often their ends occur, which a partition buffer does not know.
    #[error(
        "--edge-weights subsampling counts every edge of the graph, and --strategy marius has those of resident partitions; leave it out, or use --strategy memory"
    )]
    BucketEdgeWeights,
    /// A strategy that links cannot use yet.
    #[error("--task link trains with --strategy memory or mmap for now, not with {strategy}")]
    LinkStrategy {
        /// The strategy.
        strategy: StrategyKind,
    },
    /// Embeddings alone with a strategy that fetches features.
    #[error(
        "{strategy} fetches feature rows, and --inputs z reads none; use --strategy memory or mmap, or --inputs concat or sum"
    )]
    EmbeddingStrategy {
        /// The strategy.
        strategy: StrategyKind,
    },
    /// No rows for the first layer.
    #[error(
        "{dataset} has no node features; learn embeddings with --embeddings 50, or import it with --features"
    )]
    NoInput {
        /// The dataset.
        dataset: PathBuf,
    },
    /// Rows that a decoder cannot take.
    #[error(
        "without an encoder the decoder reads the input rows, which have {found} columns, not {expected}; leave --out-channels out"
    )]
    NoEncoderColumns {
        /// Columns of the decoder.
        expected: usize,
        /// Columns of the input.
        found: usize,
    },
    /// A metric that links do not have.
    #[error("links have no --metric {metric}; take mrr, hits@10, auc or ap")]
    LinkMetric {
        /// The metric.
        metric: MetricName,
    },
    /// A history with rows that training changes, or with links.
    #[error(
        "a history of hidden rows is for node labels and fixed features; leave --history-rows and --history-set out"
    )]
    LinkHistory,
    /// Initial embeddings of another shape.
    #[error(
        "{path}: initial embeddings have {found}, and the run needs {expected}; give a matrix of that shape, or leave --init-embeddings out"
    )]
    InitialRows {
        /// The file.
        path: PathBuf,
        /// The shape needed.
        expected: String,
        /// The shape found.
        found: String,
    },
    /// A link batch for an objective over nodes.
    #[error("a batch of links came to a model of nodes; train links with a task of links")]
    LinkBatch,
    /// State that the strategy does not know.
    #[error(
        "the checkpoint holds {name}, which {strategy} does not keep; resume the run with the strategy it was started with, or choose another --out"
    )]
    UnknownState {
        /// Name of the state.
        name: String,
        /// The strategy that should load it.
        strategy: String,
    },
    /// The output directory is a dataset.
    #[error("{path} is a dataset; choose another --out for the run")]
    IsDataset {
        /// The directory.
        path: PathBuf,
    },
    /// The output directory has a run already.
    #[error("{path} holds a run already; resume it with --resume, or choose another --out")]
    HoldsRun {
        /// The directory.
        path: PathBuf,
    },
    /// Splits over edges, but training is over nodes.
    #[error(
        "{dataset} is split by edges, for link prediction; train it with --task link, or give a dataset with labels and splits over nodes"
    )]
    EdgeSplit {
        /// The dataset.
        dataset: PathBuf,
    },
    /// A dataset without features.
    #[error("{dataset} has no node features; import it with --features")]
    NoFeatures {
        /// The dataset.
        dataset: PathBuf,
    },
    /// A dataset without labels.
    #[error("{dataset} has no labels; import it with --labels")]
    NoLabels {
        /// The dataset.
        dataset: PathBuf,
    },
    /// A dataset without training nodes.
    #[error(
        "{dataset} has no nodes to train on; import it with splits over nodes, or with --split per-class:20,30"
    )]
    NoSplit {
        /// The dataset.
        dataset: PathBuf,
    },
    /// Training nodes, all without a label.
    #[error("{dataset}: no training node has a label; check which nodes are in the training split")]
    Unlabelled {
        /// The dataset.
        dataset: PathBuf,
    },
    /// Too little memory for inference with all neighbours.
    #[error(
        "inference with all neighbours needs {needed}, and {left} are left for it; allow more memory, or evaluate with --eval sampled"
    )]
    InferenceMemory {
        /// Bytes needed.
        needed: ByteCount,
        /// Bytes left.
        left: ByteCount,
    },
    /// Too little disk for inference with all neighbours.
    #[error(
        "{folder}: inference with all neighbours writes {needed} of hidden rows, and {free} are free; make room, allow more memory, or evaluate with --eval sampled"
    )]
    InferenceDisk {
        /// Directory of the hidden rows.
        folder: PathBuf,
        /// Bytes needed.
        needed: ByteCount,
        /// Bytes free.
        free: ByteCount,
    },
    /// A layer that the model does not have.
    #[error("--layer is {layer}; the model has layers 1 to {layers}")]
    NoLayer {
        /// The layer asked for.
        layer: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A thread that could not be started.
    #[error("a thread could not be started: {source}; allow more processes (ulimit -u), and try again")]
    Thread {
        /// What the system answered.
        source: io::Error,
    },
    /// Batches that ended early.
    #[error(
        "the batches ended in epoch {epoch}, and the run has {epochs}; resume the run with the configuration it was started with"
    )]
    Ended {
        /// The epoch.
        epoch: u64,
        /// Epochs of the run.
        epochs: u64,
    },
    /// A directory without a run.
    #[error("{path} does not hold a run; give the directory that `esker train --out` wrote")]
    NoRun {
        /// The directory.
        path: PathBuf,
    },
    /// Another process trains the run.
    #[error("{path} is being trained by another process; wait for it, or choose another --out")]
    Busy {
        /// The run.
        path: PathBuf,
    },
    /// A file of a run that cannot be parsed or written.
    #[error("{path}: expected {expected}, found {source}; {remedy}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The expected content.
        expected: &'static str,
        /// The error.
        source: Box<dyn std::error::Error + Send + Sync>,
        /// What to do.
        remedy: &'static str,
    },
    /// The run needs more memory than its budget.
    #[error(
        "this run needs {needed} ({} bytes), and --memory allows {allowed}:\n{table}\nuse --memory {}, or a smaller --batch, --fanout or --hidden{}",
        needed.0, needed.flag_value(), strategy_text(table, *needed, *allowed)
    )]
    Memory {
        /// The smallest budget that works.
        needed: ByteCount,
        /// The budget.
        allowed: ByteCount,
        /// The memory of the run, line by line.
        table: MemoryTable,
    },
    /// A loader needs more memory than it may take.
    #[error(
        "this loader needs {needed} ({} bytes), and may take {allowed}:\n{table}\ngive it --memory {}, or a smaller --batch or --fanout{}",
        needed.0, needed.flag_value(), strategy_text(table, *needed, *allowed)
    )]
    LoaderMemory {
        /// The smallest budget that works.
        needed: ByteCount,
        /// What it may take.
        allowed: ByteCount,
        /// The memory of the loader, line by line.
        table: MemoryTable,
    },
    /// The loaders of a process have taken the memory that they share.
    #[error(
        "a loader needs {needed}, and {left} are left: the other loaders of this process hold {others}; close one, give them less --memory, or allow all of them {all}"
    )]
    SharedMemory {
        /// Bytes needed.
        needed: ByteCount,
        /// Bytes left.
        left: ByteCount,
        /// Bytes that others have taken.
        others: ByteCount,
        /// What would do for all.
        all: ByteCount,
    },
    /// A strategy that a loader cannot have.
    #[error(
        "--strategy {strategy} changes what is trained, and needs Esker's own trainer; use memory, mmap, ginex or diskgnn"
    )]
    NoLoader {
        /// The strategy.
        strategy: StrategyKind,
    },
    /// A loader without seeds.
    #[error("no seed nodes are given; a loader needs at least one")]
    NoSeeds,
    /// A loader without batches.
    #[error(
        "{seeds} seeds are no full batch of {batch} for every rank, and smaller batches are dropped; take a smaller --batch, or keep the last"
    )]
    NoLoadedBatch {
        /// Seeds of a batch.
        batch: u64,
        /// Number of seeds.
        seeds: u64,
    },
    /// A batch that is given, and larger than the loader was opened for.
    #[error("a batch of {seeds} seeds, and the loader was opened for {most}; open it for {seeds}")]
    LargeGivenBatch {
        /// Seeds of the batch.
        seeds: u64,
        /// What the loader was opened for.
        most: u64,
    },
    /// A loader whose order is given is asked for a planned one.
    #[error("the loader has no order of its own; give each epoch's batches, or open it with a planned order")]
    NoPlannedOrder,
    /// Batches that a device is to assemble.
    #[error(
        "the device caches rows in memory of its own, which a loader cannot hand out; load batches on the CPU"
    )]
    LoaderDevice,
    /// The run needs more device memory than its budget.
    #[error(
        "this run needs {needed} ({} bytes) of the device's memory, and --gpu-memory allows {allowed}:\n{table}\nuse --gpu-memory {}, a smaller --batch, --fanout or --hidden, or --device cpu",
        needed.0, needed.flag_value()
    )]
    DeviceMemory {
        /// The smallest budget that works.
        needed: ByteCount,
        /// The budget.
        allowed: ByteCount,
        /// The memory of the run, line by line.
        table: MemoryTable,
    },
    /// A batch that is larger than the pilot's, and does not fit the device.
    #[error(
        "{} is larger than expected ({} nodes); with it the run takes {needed} of the device's memory, and --gpu-memory allows {allowed}; {} --gpu-memory {}",
        if *trains { at.to_string() } else { format!("batch {}", at.batch + 1) },
        esker_types::grouped(*nodes),
        if *trains { "the run is saved: continue it with --resume" } else { "use" }, needed.flag_value()
    )]
    LargeDeviceBatch {
        /// The batch.
        at: Box<RunPosition>,
        /// Whether it belongs to a run that trains, and so can be continued.
        trains: bool,
        /// Its nodes.
        nodes: u64,
        /// The budget that would do.
        needed: ByteCount,
        /// The budget.
        allowed: ByteCount,
    },
    /// A stop was requested during evaluation.
    #[error("stopped")]
    Stopped,
    /// An I/O error of the operating system.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A damaged file of a run.
    #[error("{path}: expected {expected}, found {found}; {remedy}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the format requires.
        expected: String,
        /// What the file has.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
}

/// A setting of a run that differs from before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Its name in the configuration.
    pub name: String,
    /// Its value now.
    pub now: String,
    /// Its value before.
    pub before: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, was {}", self.name, self.now, self.before)
    }
}

/// Another strategy helps if it stores on disk what does not fit in memory.
fn strategy_text(table: &MemoryTable, needed: ByteCount, allowed: ByteCount) -> &'static str {
    let on_disk = table.lines.iter().filter(|line| ["features", "topology"].contains(&line.what.as_str()));
    match on_disk.map(|line| line.bytes).sum::<u64>() >= needed.0.saturating_sub(allowed.0) {
        true => ", or --strategy ginex or diskgnn, which leave features and topology on disk",
        false => "",
    }
}

fn differences_text(differences: &[Difference]) -> String {
    differences.iter().map(Difference::to_string).collect::<Vec<_>>().join("; ")
}

fn labels_text(kind: LabelKind, outputs: usize) -> String {
    match kind {
        LabelKind::Classes => format!("labels of {outputs} classes"),
        LabelKind::Multilabel => format!("{outputs} labels a node"),
        LabelKind::Real => "real labels".into(),
    }
}

fn metrics_text(kind: LabelKind) -> &'static str {
    match kind {
        LabelKind::Real => "take --metric loss",
        _ => "take --metric accuracy, macro-f1 or loss; auc needs two classes or several labels a node",
    }
}

/// Result type of this crate.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

impl TrainError {
    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            TrainError::Store(error) => error.kind(),
            TrainError::Sample(error) => error.kind(),
            TrainError::Strategy(error) => error.kind(),
            TrainError::Nn(error) => error.kind(),
            TrainError::Engine(error) => error.kind(),
            TrainError::Stopped => ErrorKind::Stopped,
            TrainError::Device(_)
            | TrainError::InferenceDisk { .. }
            | TrainError::NoRun { .. }
            | TrainError::Busy { .. }
            | TrainError::Io { .. }
            | TrainError::Thread { .. }
            | TrainError::Format { .. }
            | TrainError::File { .. } => ErrorKind::World,
            _ => ErrorKind::Asked,
        }
    }

    /// For `map_err` on I/O results.
    pub fn io(path: &Path) -> impl FnOnce(io::Error) -> TrainError + '_ {
        move |source| match StoreError::io(path)(source) {
            StoreError::Io { path, source } => TrainError::Io { path, source },
            full => full.into(),
        }
    }

    /// For `map_err` on parsing or formatting the content of a file.
    pub(crate) fn format<E: std::error::Error + Send + Sync + 'static>(
        path: &Path,
        expected: &'static str,
        remedy: &'static str,
    ) -> impl FnOnce(E) -> TrainError {
        let path = path.to_path_buf();
        move |error| TrainError::Format { path, expected, source: Box::new(error), remedy }
    }

    pub(crate) fn file(
        path: &Path,
        expected: impl ToString,
        found: impl ToString,
        remedy: &'static str,
    ) -> TrainError {
        TrainError::File {
            path: path.to_path_buf(),
            expected: expected.to_string(),
            found: found.to_string(),
            remedy,
        }
    }
}

impl From<esker_fetch::pipeline::StagePanicked> for TrainError {
    fn from(panicked: esker_fetch::pipeline::StagePanicked) -> TrainError {
        TrainError::Strategy(panicked.into())
    }
}
