//! A run as its user writes it: flags, or the same keys in a TOML file. What is not said is resolved from the dataset and
//! the machine.

use super::link::{DecoderName, EncoderName, InputsName, LossName, NegativesName, TaskName};
use crate::exit::usage;
use anyhow::Context;
use esker_nn::{
    Activation, Degree, DistanceNorm, HeadMerge, Kind, ModelConfig, NeighbourAggregator, NormKind,
    OptimizerConfig, OptimizerKind, Precision, Schedule,
};
use esker_plan::partition_orders::{PartitionCounts, PartitionOrderKind};
use esker_sample::negatives::NegativeMask;
use esker_sample::partition::USUAL_GROUP;
use esker_sample::{Direction, Fanout, Form};
use esker_store::Dataset;
use esker_strategies::{CachePolicy, NeighbourPolicy, StrategyKind};
use esker_train::link::{EdgeWeights, LossReduction, TargetEdges, Ties};
use esker_train::{
    EvaluationMode, HistoryConfig, HistoryHop, LEAST_HISTORY_BATCHES, MetricName, OrderName, ResidentOnly,
    RunConfig, RunDirectory, training_partitions, usual_staleness,
};
use esker_types::{Budget, ByteCount, DeviceName, Dtype};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Fan-outs: `10,10,5`, `all,all`, or in TOML a list.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Fanouts(pub Vec<Fanout>);

impl FromStr for Fanouts {
    type Err = String;
    fn from_str(text: &str) -> Result<Fanouts, String> {
        text.split(',').map(|word| word.trim().parse()).collect::<Result<_, _>>().map(Fanouts)
    }
}

impl<'de> Deserialize<'de> for Fanouts {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Fanouts, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum FanoutsAsWritten {
            List(Vec<Fanout>),
            One(Fanout),
            Text(String),
        }
        match FanoutsAsWritten::deserialize(deserializer)? {
            FanoutsAsWritten::List(list) => Ok(Fanouts(list)),
            FanoutsAsWritten::One(one) => Ok(Fanouts(vec![one])),
            FanoutsAsWritten::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// `auto`, or a number of epochs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum EpochsSampled {
    /// So many.
    Count(u64),
    /// What the disk takes.
    Auto(AutoWord),
}

/// The word `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AutoWord {
    /// It.
    Auto,
}

impl FromStr for EpochsSampled {
    type Err = String;
    fn from_str(text: &str) -> Result<EpochsSampled, String> {
        match text {
            "auto" => Ok(EpochsSampled::Auto(AutoWord::Auto)),
            number => number
                .parse()
                .map(EpochsSampled::Count)
                .map_err(|_| format!("`{number}` is not a number of epochs; write one, or auto")),
        }
    }
}

/// A number of rows of a history, or a share of the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum HistoryRows {
    /// So many.
    Count(u64),
    /// So many of all nodes.
    Share(f64),
}

impl FromStr for HistoryRows {
    type Err = String;
    fn from_str(text: &str) -> Result<HistoryRows, String> {
        let wrong = || {
            format!(
                "`{text}` is not a number of rows; write one, or a share of the nodes such as 0.25 or 1.0"
            )
        };
        match text.parse() {
            Ok(count) => Ok(HistoryRows::Count(count)),
            Err(_) => text
                .parse()
                .ok()
                .filter(|share| (0.0..=1.0).contains(share))
                .map(HistoryRows::Share)
                .ok_or_else(wrong),
        }
    }
}

impl HistoryRows {
    /// How many of so many nodes.
    fn of(self, nodes: u64) -> anyhow::Result<u64> {
        match self {
            HistoryRows::Count(count) => Ok(count),
            HistoryRows::Share(share) if (0.0..=1.0).contains(&share) => {
                Ok((share * nodes as f64).round() as u64)
            }
            HistoryRows::Share(share) => {
                Err(usage(format!("--history-rows {share}: a share is between 0 and 1")))
            }
        }
    }
}

/// Reads a word as the value that files call by that name.
pub(super) fn word<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(serde_json::Value::String(text.to_string())).map_err(|error| {
        let text = error.to_string();
        text.split(" at line").next().unwrap_or(&text).to_string()
    })
}

/// Minutes in seconds.
fn seconds_of(minutes: u64) -> u64 {
    minutes.saturating_mul(60)
}

/// Reads a count.
fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "it must be a whole number, 0 or greater".to_string())
}

/// Reads a number.
fn number<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "it must be a number, as in 0.003 or 5e-4".to_string())
}

/// Keys of a run, all of them optional.
#[derive(Debug, Clone, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Flags {
    /// The dataset, where a configuration file does not say it
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dataset: Option<PathBuf>,
    /// Output directory; default: runs/DATASET-MODEL-NUMBER
    #[arg(long)]
    pub out: Option<PathBuf>,

    /// What is learned: node (labels of nodes) or link (edges); default: node
    #[arg(long, value_parser = word::<TaskName>)]
    pub task: Option<TaskName>,

    /// sage, gcn, gat, gin, mlp, or with --task link none (no layers: the decoder reads the input rows); default: sage
    #[arg(long, visible_alias = "encoder", help_heading = "Model", default_missing_value = "sage")]
    #[serde(alias = "encoder")]
    pub model: Option<EncoderName>,
    /// Number of layers; default: as many as --fanout lists, if it lists several, else 3
    #[arg(long, value_parser = whole::<usize>, help_heading = "Model")]
    pub layers: Option<usize>,
    /// Hidden channels: the width between layers; default: 256
    #[arg(long, value_parser = whole::<usize>, help_heading = "Model")]
    pub hidden: Option<usize>,
    /// Dropout after each hidden layer; default: 0
    #[arg(long, value_parser = number::<f32>, help_heading = "Model")]
    pub dropout: Option<f32>,
    /// Dropout of the input features; default: 0
    #[arg(long, value_parser = number::<f32>, help_heading = "Model")]
    pub input_dropout: Option<f32>,
    /// relu, elu, leaky-relu or identity; default: relu
    #[arg(long, value_parser = word::<Activation>, help_heading = "Model")]
    pub activation: Option<Activation>,
    /// Norm between layers: none, layer or batch; default: none
    #[arg(long, value_parser = word::<NormKind>, help_heading = "Model")]
    pub norm: Option<NormKind>,
    /// Add each layer's input to its output; default: false
    #[arg(long, num_args = 0..=1, default_missing_value = "true", help_heading = "Model")]
    pub residual: Option<bool>,
    /// GraphSAGE: aggregator: mean, max or sum; default: mean
    #[arg(long, value_parser = word::<NeighbourAggregator>, help_heading = "Model")]
    pub aggregator: Option<NeighbourAggregator>,
    /// GCN: which degrees normalise a sampled neighbourhood: sampled (those in the sample, as GCNConv under NeighborLoader), whole
    /// (those in the whole graph), or unbiased (whole, and each sampled neighbour weighted by degree / sampled, so that the
    /// sum is that over all neighbours on average); default: unbiased
    #[arg(long, value_parser = word::<Degree>, help_heading = "Model")]
    pub gcn_degree: Option<Degree>,
    /// GAT: number of attention heads; default: 4
    #[arg(long, value_parser = whole::<usize>, help_heading = "Model")]
    pub heads: Option<usize>,
    /// GAT: heads of the last layer, which are averaged; default: --heads
    #[arg(long, value_parser = whole::<usize>, help_heading = "Model")]
    pub output_heads: Option<usize>,
    /// GAT: concat or average the heads of hidden layers; default: concat
    #[arg(long, value_parser = word::<HeadMerge>, help_heading = "Model")]
    pub head_merge: Option<HeadMerge>,
    /// GAT: dropout of the attention coefficients; default: 0
    #[arg(long, value_parser = number::<f32>, help_heading = "Model")]
    pub attention_dropout: Option<f32>,
    /// GAT: dropout of the projected features, between projection and attention; default: 0
    #[arg(long, value_parser = number::<f32>, help_heading = "Model")]
    pub projected_dropout: Option<f32>,
    /// GIN: epsilon, not trained; a node itself is weighted by 1 + epsilon; default: 0
    #[arg(long, value_parser = number::<f32>, help_heading = "Model")]
    pub gin_epsilon: Option<f32>,

    /// Learn an embedding of this many numbers for every node
    #[arg(long, value_parser = whole::<usize>, help_heading = "Embeddings")]
    pub embeddings: Option<usize>,
    /// What the first layer reads of features X and embeddings Z: x, z, concat (side by side) or sum (X through a weight, plus Z); default: z with --embeddings, else x
    #[arg(long, value_parser = word::<InputsName>, help_heading = "Embeddings")]
    pub inputs: Option<InputsName>,
    /// Optimizer of embeddings: sgd, adagrad or adam; only rows that a batch reads are updated; default: --optimizer
    #[arg(long, value_parser = word::<OptimizerKind>, help_heading = "Embeddings")]
    pub embedding_optimizer: Option<OptimizerKind>,
    /// Learning rate of embeddings; default: --lr
    #[arg(long, value_parser = number::<f64>, help_heading = "Embeddings")]
    pub embedding_lr: Option<f64>,
    /// Initial embeddings, and rows of relations: normal:DEVIATION or uniform:BOUND; default: normal:0.1
    #[arg(long, help_heading = "Embeddings")]
    pub init: Option<String>,
    /// Initial embeddings from an npy matrix of f32, a row a node in the order of their numbers; default: --init
    #[arg(long, value_name = "FILE", help_heading = "Embeddings")]
    pub init_embeddings: Option<PathBuf>,

    /// How an edge is scored: dot, distmult, transe, complex or rotate; default: distmult, dot if the graph has no relations
    #[arg(long, value_parser = word::<DecoderName>, help_heading = "Links")]
    pub decoder: Option<DecoderName>,
    /// Columns of the rows that the decoder reads: the output of the last layer; default: --embeddings, else --hidden
    #[arg(long, value_parser = whole::<usize>, help_heading = "Links")]
    pub out_channels: Option<usize>,
    /// RotatE: factor of the angles, as a run has it that is resumed; follows from --init and --margin in a new one
    #[arg(skip)]
    pub phase_scale: Option<f32>,
    /// TransE: l1 or l2; default: l2
    #[arg(long, value_parser = word::<DistanceNorm>, help_heading = "Links")]
    pub distance: Option<DistanceNorm>,
    /// Loss of an edge and its negatives: softmax, logistic, margin or self-adversarial; default: softmax
    #[arg(long, value_parser = word::<LossName>, help_heading = "Links")]
    pub loss: Option<LossName>,
    /// Margin of --loss margin and self-adversarial; default: 9
    #[arg(long, value_parser = number::<f32>, help_heading = "Links")]
    pub margin: Option<f32>,
    /// Temperature of --loss self-adversarial; default: 1
    #[arg(long, value_parser = number::<f32>, help_heading = "Links")]
    pub temperature: Option<f32>,
    /// The losses of a batch's edges: sum or mean; default: mean
    #[arg(long, value_parser = word::<LossReduction>, help_heading = "Links")]
    pub reduction: Option<LossReduction>,
    /// Negatives per chunk and side, or all (every node); default: 500
    #[arg(long, help_heading = "Links")]
    pub negatives: Option<NegativesName>,
    /// Negatives per chunk that replace sources; default: --negatives, which then is the number of those that replace targets
    #[arg(long, value_parser = whole::<u32>, help_heading = "Links")]
    pub source_negatives: Option<u32>,
    /// Share of the negatives that is drawn by in-degree; default: 0
    #[arg(long, value_parser = number::<f32>, help_heading = "Links")]
    pub degree_share: Option<f32>,
    /// Chunks of a batch: the edges of a chunk share their negatives; default: 10
    #[arg(long, value_parser = whole::<u32>, help_heading = "Links")]
    pub chunks: Option<u32>,
    /// Negatives that are left out because they make a true edge: none, batch (an edge of the batch) or graph (an edge of the graph); default: graph
    #[arg(long, value_parser = word::<NegativeMask>, help_heading = "Links")]
    pub mask: Option<NegativeMask>,
    /// How much each edge counts: equal, or subsampling (edges of frequent queries less, as RotatE's authors do); default: equal
    #[arg(long, value_parser = word::<EdgeWeights>, help_heading = "Links")]
    pub edge_weights: Option<EdgeWeights>,
    /// Initial rows of relations: ones, normal:DEVIATION or uniform:BOUND; default: --init, ones for distmult
    #[arg(long, help_heading = "Links")]
    pub init_relations: Option<String>,
    /// A second row for every relation, for queries from its target; default: false
    #[arg(long, num_args = 0..=1, default_missing_value = "true", help_heading = "Links")]
    pub inverse_relations: Option<bool>,
    /// Whether the edges of a batch are sampled as neighbours: drop (neither they nor their reverses) or keep; default: drop
    #[arg(long, value_parser = word::<TargetEdges>, help_heading = "Links")]
    pub target_edges: Option<TargetEdges>,
    /// Dropout of relation rows; default: 0
    #[arg(long, value_parser = number::<f32>, help_heading = "Links")]
    pub relation_dropout: Option<f32>,
    /// L2 penalty on the rows of each edge; default: 0
    #[arg(long, value_parser = number::<f32>, help_heading = "Links")]
    pub l2: Option<f32>,
    /// N3 penalty on the rows of each edge; default: 0
    #[arg(long, value_parser = number::<f32>, help_heading = "Links")]
    pub n3: Option<f32>,
    /// Rank of an answer among equal scores: realistic (in the middle), optimistic or pessimistic; default: realistic
    #[arg(long, value_parser = word::<Ties>, help_heading = "Links")]
    pub ties: Option<Ties>,
    /// Rank among all candidates, true edges included; default: false (filtered)
    #[arg(long, num_args = 0..=1, default_missing_value = "true", help_heading = "Links")]
    pub raw: Option<bool>,
    /// Rank among this many nodes, drawn for every query; default: all nodes
    #[arg(long, value_parser = whole::<u32>, help_heading = "Links")]
    pub candidates: Option<u32>,
    /// Candidates that are compared at a time; ranks do not depend on it; default: all
    #[arg(long, value_parser = whole::<u32>, help_heading = "Links")]
    pub candidate_block: Option<u32>,

    /// Neighbours sampled per node, hop by hop from the seed nodes (num_neighbors): 10,10,5 or all,all; a single number is used for every layer; default: 10
    #[arg(long, help_heading = "Batches")]
    pub fanout: Option<Fanouts>,
    /// Batch size: seed nodes per batch; default: 1000
    #[arg(long, value_parser = whole::<u64>, help_heading = "Batches")]
    pub batch: Option<u64>,
    /// Order of the seed nodes: shuffled in every epoch, sequential, groups (by groups of partitions, so that neighbouring seed nodes are in the same batch and fewer nodes are sampled), or by steps over --partitions of which --resident are in memory: for links two-level-beta, tour or beta, for node labels dispersed or training-first; default: shuffled, with outre groups, with marius two-level-beta or dispersed
    #[arg(long, value_parser = word::<OrderName>, help_heading = "Batches")]
    pub order: Option<OrderName>,
    /// --order groups: partitions in a group; default: 40
    #[arg(long, value_parser = whole::<u32>, help_heading = "Batches")]
    pub group: Option<u32>,
    /// --order groups: name of the partitioning that `esker partition` made; default: the only one, or a new one if there is none
    #[arg(long, help_heading = "Batches")]
    pub partitioning: Option<String>,
    /// Orders over partitions: number of equal, random partitions of the nodes (not those of `esker partition`); default: with marius as many as the disk reads at nearly its full rate, and --resident and --logical by --memory
    #[arg(long, value_parser = whole::<u32>, help_heading = "Batches")]
    pub partitions: Option<u32>,
    /// Orders over partitions: how many are resident at a time; default: all of the given --partitions
    #[arg(long, value_parser = whole::<u32>, help_heading = "Batches")]
    pub resident: Option<u32>,
    /// Orders over partitions: logical partitions, into which they are grouped at random in every epoch; tour needs an odd number, two of them resident; default: 2 x partitions / resident, with dispersed partitions / resident
    #[arg(long, value_parser = whole::<u32>, help_heading = "Batches")]
    pub logical: Option<u32>,
    /// Orders over partitions with --strategy memory: training sees resident nodes only, as with a partition buffer: all (neighbours, degrees and negatives) or negatives; evaluation sees the whole graph; default: training sees everything
    #[arg(long, value_parser = word::<ResidentOnly>, num_args = 0..=1, default_missing_value = "all", help_heading = "Batches")]
    pub resident_only: Option<ResidentOnly>,
    /// Train with a history: hidden rows that enter the last layer are kept for this many nodes (or a share of all nodes, such as 0.25; 1.0: all) and used again instead of being computed, which changes training; 0: none; default: with outre as many as pay if an epoch has at least 1000 batches or --staleness is given, else none
    #[arg(long, help_heading = "Batches")]
    pub history_rows: Option<HistoryRows>,
    /// With a history: a row is used while fewer batches than this have passed since it was computed; 1: never; default: a hundredth of an epoch's batches, at most 100
    #[arg(long, value_parser = whole::<u32>, help_heading = "Batches")]
    pub staleness: Option<u32>,
    /// With a history: which nodes of a batch may use their rows: 1 (neighbours of seed nodes: what enters the last layer), 2 (their neighbours, too: what enters the layer before; two rows per node, from three layers on) or all (a row per hidden layer); default: 1
    #[arg(long, value_parser = word::<HistoryHop>, help_heading = "Batches")]
    pub history_hop: Option<HistoryHop>,
    /// With a history: how its rows are stored: f32, or f16, which takes half the memory and rounds them; default: f32
    #[arg(long, value_parser = word::<Dtype>, help_heading = "Batches")]
    pub history_dtype: Option<Dtype>,
    /// With a history: take the nodes of this run's history, so that both runs train alike
    #[arg(long, value_name = "RUN", help_heading = "Batches")]
    pub history_set: Option<PathBuf>,
    /// Drop the last, incomplete batch; default: false
    #[arg(long, num_args = 0..=1, default_missing_value = "true", help_heading = "Batches")]
    pub drop_last: Option<bool>,
    /// How a batch is sampled: dense (a node's neighbours are sampled once and used in every layer, as NeighborLoader does), layered (every layer samples again, as DGL's NeighborSampler does) or shadow (ShaDow: the induced subgraph of the sampled nodes); default: dense
    #[arg(long, value_parser = word::<Form>, help_heading = "Batches")]
    pub form: Option<Form>,
    /// Along which edges neighbours are sampled: incoming (messages flow from source to target), outgoing or both; default: incoming
    #[arg(long, value_parser = word::<Direction>, help_heading = "Batches")]
    pub direction: Option<Direction>,
    /// Random seed, for initialisation, sampling, shuffling and dropout; default: 1
    #[arg(long, value_parser = whole::<u64>, help_heading = "Batches")]
    pub seed: Option<u64>,

    /// Number of epochs; default: 10
    #[arg(long, value_parser = whole::<u64>, help_heading = "Training")]
    pub epochs: Option<u64>,
    /// Learning rate; default: 0.003
    #[arg(long, value_parser = number::<f64>, help_heading = "Training")]
    pub lr: Option<f64>,
    /// Learning rate schedule: constant, step:EVERY,FACTOR, exponential:FACTOR, plateau:FACTOR,PATIENCE, cosine:WARMUP or linear:WARMUP; EVERY and WARMUP count batches, PATIENCE evaluations without a better model, and the last two end with the last epoch; default: constant
    #[arg(long, help_heading = "Training")]
    pub schedule: Option<String>,
    /// adam, adamw, sgd or adagrad, as in PyTorch; default: adam
    #[arg(long, value_parser = word::<OptimizerKind>, help_heading = "Training")]
    pub optimizer: Option<OptimizerKind>,
    /// Weight decay: an L2 penalty, decoupled with adamw; default: 0
    #[arg(long, value_parser = number::<f32>, help_heading = "Training")]
    pub weight_decay: Option<f32>,
    /// SGD: momentum; default: 0
    #[arg(long, value_parser = number::<f32>, help_heading = "Training")]
    pub momentum: Option<f32>,
    /// SGD: Nesterov momentum; default: false
    #[arg(long, num_args = 0..=1, default_missing_value = "true", help_heading = "Training")]
    pub nesterov: Option<bool>,
    /// Adam: betas; default: 0.9,0.999
    #[arg(long, value_delimiter = ',', help_heading = "Training")]
    pub betas: Option<Vec<f32>>,
    /// Added to denominators for stability (eps); default: that of PyTorch's optimizer
    #[arg(long, value_parser = number::<f32>, help_heading = "Training")]
    pub epsilon: Option<f32>,
    /// Clip the gradient norm to this, as clip_grad_norm_ does; default: no clipping
    #[arg(long, value_parser = number::<f32>, help_heading = "Training")]
    pub clip_norm: Option<f32>,
    /// Clip every element of the gradient to this, as clip_grad_value_ does; default: no clipping
    #[arg(long, value_parser = number::<f32>, help_heading = "Training")]
    pub clip_value: Option<f32>,
    /// Early stopping: stop after this many evaluations without a better model; 0: never; default: 0
    #[arg(long, value_parser = whole::<u64>, help_heading = "Training")]
    pub patience: Option<u64>,

    /// Evaluation after an epoch: sampled, full (all neighbours, layer by layer over the whole graph) or none; default: sampled
    #[arg(long, value_parser = word::<EvaluationMode>, help_heading = "Evaluation")]
    pub eval: Option<EvaluationMode>,
    /// Evaluate every this many epochs; default: 1
    #[arg(long, value_parser = whole::<u64>, help_heading = "Evaluation")]
    pub eval_every: Option<u64>,
    /// Fan-outs of sampled evaluation; default: --fanout
    #[arg(long, help_heading = "Evaluation")]
    pub eval_fanout: Option<Fanouts>,
    /// How the best model is tested in the end: sampled, full or none; default: --eval
    #[arg(long, value_parser = word::<EvaluationMode>, help_heading = "Evaluation")]
    pub final_eval: Option<EvaluationMode>,
    /// Metric on the validation split that chooses the best model: accuracy, macro-f1, auc, loss or accuracy-and-loss (neither is worse); default: accuracy, macro-f1 if multi-label, loss for regression
    #[arg(long, value_parser = word::<MetricName>, help_heading = "Evaluation")]
    pub metric: Option<MetricName>,

    /// Where batches come from: memory (everything in RAM), mmap (features memory-mapped, a baseline), ginex (topology and
    /// features on disk, a Belady-optimal cache), outre (ginex with --order groups and a history of hidden rows, which
    /// changes training: fewer rows are read and computed), diskgnn (batches sampled before training, the feature rows
    /// of each stored contiguously on disk), esker (the same, with a Belady-optimal cache over the whole run: only what it
    /// misses is stored) or marius (some of --partitions in memory at a time, with their features,
    /// embeddings and the edges between them: training sees no others); default: memory
    #[arg(long, help_heading = "Machine")]
    pub strategy: Option<StrategyKind>,
    /// Memory limit of the run, page cache not counted: a run that cannot stay below it is refused with the size it needs; default: four fifths of the available memory or of the cgroup's limit, whichever is smaller
    #[arg(long, help_heading = "Machine")]
    pub memory: Option<ByteCount>,
    /// ginex, outre, diskgnn, esker: disk limit for traces and plans, or for samples and packed rows; default: half of the free space, at most 100 GB
    #[arg(long, help_heading = "Machine")]
    pub disk_budget: Option<ByteCount>,
    /// ginex, outre: batches that are sampled and planned together; default: an epoch and its validation, at least 64, fewer if --disk-budget is reached
    #[arg(long, value_parser = whole::<u64>, help_heading = "Machine")]
    pub superbatch: Option<u64>,
    /// ginex, outre, diskgnn, esker: memory for cached feature rows; default: the rest of --memory beside batches
    #[arg(long, help_heading = "Machine")]
    pub feature_cache: Option<ByteCount>,
    /// ginex, outre, diskgnn, esker: memory for cached neighbours; default: the rest of --memory during sampling
    #[arg(long, help_heading = "Machine")]
    pub neighbour_cache: Option<ByteCount>,
    /// ginex, outre: which feature rows are cached: belady (those that are accessed soonest, which reads least) or static (for the whole run, those that the first superbatch accesses most, as OUTRE does); default: belady
    #[arg(long, value_parser = word::<CachePolicy>, help_heading = "Machine")]
    pub cache: Option<CachePolicy>,
    /// ginex, outre with --order groups: which neighbours are cached if not all fit: ginex (of nodes with the highest out-degree / in-degree), cross (counting only edges from other partitions) or group (those of the partitions of a batch's group, stored by partition on disk and read when the group begins; the rest by cross); default: group if at most 55% of the edges are between partitions, else ginex
    #[arg(long, value_parser = word::<NeighbourPolicy>, help_heading = "Machine")]
    pub neighbour_policy: Option<NeighbourPolicy>,
    /// Number of epochs to sample; later epochs repeat their batches, which changes training (not with ginex or outre). auto: with diskgnn as many as fit --disk-budget, else all (esker then does without packing); default: auto
    #[arg(long, help_heading = "Machine")]
    pub epochs_sampled: Option<EpochsSampled>,
    /// diskgnn, esker: directory to read packed rows from, or to make them in; default: in the dataset
    #[arg(long, help_heading = "Machine")]
    pub prepared: Option<PathBuf>,
    /// diskgnn: batches per segment, which stores rows that its batches share once; default: 1, or the fewest that fit --disk-budget
    #[arg(long, value_parser = whole::<u32>, help_heading = "Machine")]
    pub segment: Option<u32>,
    /// ginex, outre, and evaluation of diskgnn: smallest read of feature rows, such as 4KiB to imitate a disk with 4-KiB sectors; marius: the smallest read that is not slow, by which --partitions are chosen; default: the disk's own
    #[arg(long, help_heading = "Machine")]
    pub io_block: Option<ByteCount>,
    /// diskgnn, esker: read one batch at a time, nothing ahead, to measure what prefetching brings; default: false
    #[arg(long, alias = "sequential", num_args = 0..=1, default_missing_value = "true", help_heading = "Machine")]
    #[serde(alias = "sequential")]
    pub no_prefetch: Option<bool>,
    /// Bytes between two moments of safety while rows are packed or sorted, to be killed there by tests
    #[arg(long, hide = true)]
    pub safe_point: Option<ByteCount>,
    /// Device: cpu, cuda, cuda:N or auto (a GPU if there is one that Esker can use, else the CPU); default: auto
    #[arg(long, help_heading = "Machine")]
    pub device: Option<DeviceName>,
    /// GPU memory limit of the run, refused as --memory is; default: what is free, less 1/32 of the GPU's memory or 512 MiB, whichever is larger
    #[arg(long, help_heading = "Machine")]
    pub gpu_memory: Option<ByteCount>,
    /// Precision of matmuls on a GPU: f32, tf32 or bf16; the latter are faster and less precise, sums and weights stay f32; default: f32
    #[arg(long, value_parser = word::<Precision>, help_heading = "Machine")]
    pub precision: Option<Precision>,
    /// Number of threads; default: all cores
    #[arg(long, value_parser = whole::<usize>, help_heading = "Machine")]
    pub threads: Option<usize>,
    /// Updates of embeddings have this lag: a batch reads what the batch so many before it left; default: 1
    #[arg(long, value_parser = whole::<u64>, help_heading = "Embeddings")]
    pub lag: Option<u64>,
    /// Checkpoint every this many batches; 0: never; default: 0
    #[arg(long, value_parser = whole::<u64>, help_heading = "Machine")]
    pub checkpoint_batches: Option<u64>,
    /// Checkpoint every this many minutes; 0: never; default: 10
    #[arg(long, value_parser = whole::<u64>, help_heading = "Machine")]
    pub checkpoint_minutes: Option<u64>,
}

impl Flags {
    /// Reads a configuration file.
    pub fn read(path: &Path) -> anyhow::Result<Flags> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let wrong = |error: toml::de::Error| usage(format!("{}: {error}", path.display()));
        let table: toml::Table = toml::from_str(&text).map_err(wrong)?;
        // weight_decay is as good as weight-decay.
        let table: toml::Table =
            table.into_iter().map(|(key, value)| (key.replace('_', "-"), value)).collect();
        let mut flags: Flags = table.try_into().map_err(wrong)?;
        // Paths in a file are meant from where the file is.
        let folder = path.parent().unwrap_or(Path::new("."));
        flags.dataset = flags.dataset.map(|dataset| folder.join(dataset));
        flags.out = flags.out.map(|out| folder.join(out));
        flags.prepared = flags.prepared.map(|prepared| folder.join(prepared));
        flags.history_set = flags.history_set.map(|run| folder.join(run));
        flags.init_embeddings = flags.init_embeddings.map(|rows| folder.join(rows));
        Ok(flags)
    }

    /// These flags, and those of `file` where these say nothing.
    pub fn over(self, file: Flags) -> anyhow::Result<Flags> {
        let (mut all, mine) = (serde_json::to_value(file)?, serde_json::to_value(self)?);
        if let (Some(all), Some(mine)) = (all.as_object_mut(), mine.as_object()) {
            all.extend(
                mine.iter().filter(|(_, value)| !value.is_null()).map(|(k, v)| (k.clone(), v.clone())),
            );
        }
        Ok(serde_json::from_value(all)?)
    }

    /// The flags that give this configuration of a run, which has begun or may still choose what it samples.
    pub fn of(config: &RunConfig, has_begun: bool) -> Flags {
        let (model, optimizer) = (config.model.clone(), config.optimizer.clone());
        // A run from before that could be said sampled all of them.
        let sampled = config.epochs_sampled.or(has_begun.then_some(config.epochs));
        Flags {
            dataset: Some(config.dataset.clone()),
            out: None,
            model: Some(EncoderName::of(&model)),
            layers: Some(model.layers),
            hidden: Some(model.hidden),
            dropout: Some(model.dropout),
            input_dropout: Some(model.input_dropout),
            activation: Some(model.activation),
            norm: Some(model.norm),
            residual: Some(model.residual),
            aggregator: Some(model.aggregator),
            gcn_degree: Some(model.gcn_degree),
            heads: Some(model.heads),
            output_heads: model.output_heads,
            head_merge: Some(model.head_merge),
            attention_dropout: Some(model.attention_dropout),
            projected_dropout: Some(model.projected_dropout),
            gin_epsilon: Some(model.gin_epsilon),
            fanout: Some(Fanouts(config.fanout.clone())).filter(|fanouts| !fanouts.0.is_empty()),
            batch: Some(config.batch),
            order: Some(config.order),
            group: config.group,
            partitioning: config.partitioning.as_ref().map(|chosen| chosen.name.clone()),
            history_rows: config.history.as_ref().and_then(|history| history.rows).map(HistoryRows::Count),
            staleness: config.history.as_ref().map(|history| history.staleness),
            history_hop: config.history.as_ref().map(|history| history.hop),
            history_dtype: config.history.as_ref().map(|history| history.dtype),
            history_set: None,
            drop_last: Some(config.drop_last),
            form: Some(config.form),
            direction: Some(config.direction),
            seed: Some(config.seed),
            epochs: Some(config.epochs),
            lr: Some(config.lr),
            schedule: Some(schedule_text(&config.schedule)),
            optimizer: Some(optimizer.kind),
            weight_decay: Some(optimizer.weight_decay),
            momentum: Some(optimizer.momentum),
            nesterov: Some(optimizer.nesterov),
            betas: Some(optimizer.betas.to_vec()),
            epsilon: optimizer.epsilon,
            clip_norm: optimizer.clip_norm,
            clip_value: optimizer.clip_value,
            patience: Some(config.patience),
            eval: Some(config.eval),
            eval_every: Some(config.eval_every),
            eval_fanout: Some(Fanouts(config.eval_fanout.clone())).filter(|fanouts| !fanouts.0.is_empty()),
            final_eval: Some(config.final_eval),
            metric: Some(config.metric),
            strategy: Some(config.strategy),
            memory: Some(ByteCount(config.memory)),
            disk_budget: config.disk_budget.map(ByteCount),
            superbatch: config.superbatch,
            feature_cache: config.feature_cache.map(ByteCount),
            neighbour_cache: config.neighbour_cache.map(ByteCount),
            cache: config.cache,
            neighbour_policy: config.neighbour_policy,
            epochs_sampled: sampled.map(EpochsSampled::Count),
            prepared: config.prepared.clone(),
            segment: config.segment,
            io_block: config.io_block.map(ByteCount),
            no_prefetch: Some(config.sequential),
            safe_point: config.safe_point.map(ByteCount),
            device: Some(config.device),
            gpu_memory: config.gpu_memory.map(ByteCount),
            precision: Some(config.precision),
            threads: Some(config.threads),
            lag: config.lag,
            checkpoint_batches: Some(config.checkpoint_batches),
            checkpoint_minutes: Some(config.checkpoint_seconds / 60),
            ..Flags::partitions_of(config)
        }
    }

    /// The flags that give the partitions of a configuration, its links and its embeddings.
    fn partitions_of(config: &RunConfig) -> Flags {
        Flags {
            partitions: config.partition_counts.map(|counts| counts.partitions),
            resident: config.partition_counts.map(|counts| counts.resident),
            logical: config.partition_counts.map(|counts| counts.logical),
            resident_only: config.resident_only,
            ..Flags::links_of(config)
        }
    }

    /// Resolves everything that was not said.
    pub fn resolve(&self, dataset: &Dataset) -> anyhow::Result<RunConfig> {
        let usual = RunConfig::for_dataset(dataset);
        let model = self.model_config();
        let hops = if model.kind == Kind::Mlp { 0 } else { model.layers };
        let fanout = spread(self.fanout.as_ref(), &[Fanout::AtMost(10)], hops, "--fanout")?;
        let eval_fanout = spread(self.eval_fanout.as_ref(), &fanout, hops, "--eval-fanout")?;
        let batch = self.batch.unwrap_or(usual.batch);
        let epochs = self.epochs.unwrap_or(usual.epochs);
        let eval = self.eval.unwrap_or(self.usual_eval(usual.eval));
        let (optimizer, lr) = (self.optimizer_config()?, self.lr.unwrap_or(usual.lr));
        let strategy = self.strategy.unwrap_or(usual.strategy);
        let (order, partition_counts) = self.order(dataset, strategy);
        let train = dataset.manifest().splits.as_ref().map_or(0, |splits| splits.train);
        let batches = match self.drop_last {
            Some(true) => train / batch.max(1),
            _ => train.div_ceil(batch.max(1)),
        };
        let steps = epochs.saturating_mul(batches);
        Ok(RunConfig {
            link: self.link_config(dataset, &model)?,
            embeddings: self.embedding_config(&optimizer, lr)?,
            model,
            optimizer,
            lr,
            schedule: schedule(self.schedule.as_deref().unwrap_or("constant"), steps)?,
            fanout,
            form: self.form.unwrap_or(usual.form),
            direction: self.direction.unwrap_or(usual.direction),
            batch,
            epochs,
            order,
            group: (order == OrderName::Groups).then_some(self.group.unwrap_or(USUAL_GROUP)),
            partition_counts,
            resident_only: self.resident_only,
            history: self.history(dataset, strategy, batch)?,
            drop_last: self.drop_last.unwrap_or(usual.drop_last),
            seed: self.seed.unwrap_or(usual.seed),
            eval,
            eval_every: self.eval_every.unwrap_or(usual.eval_every),
            eval_fanout,
            final_eval: self.final_eval.unwrap_or(eval),
            metric: self.metric.unwrap_or(self.usual_metric(usual.metric)),
            patience: self.patience.unwrap_or(usual.patience),
            strategy,
            memory: Budget::resolve(self.memory).host_bytes,
            disk_budget: self.disk_budget.map(|bytes| bytes.0),
            superbatch: self.superbatch,
            feature_cache: self.feature_cache.map(|bytes| bytes.0),
            neighbour_cache: self.neighbour_cache.map(|bytes| bytes.0),
            cache: self.cache,
            neighbour_policy: self.neighbour_policy,
            epochs_sampled: match self.epochs_sampled {
                Some(EpochsSampled::Count(epochs)) => Some(epochs),
                _ => None,
            },
            // Whole, so that the run can be resumed from anywhere.
            prepared: self.prepared.as_ref().map(|path| std::path::absolute(path).unwrap_or(path.clone())),
            segment: self.segment,
            io_block: self.io_block.map(|bytes| bytes.0),
            sequential: self.no_prefetch.unwrap_or(false),
            safe_point: self.safe_point.map(|bytes| bytes.0),
            threads: self.threads.unwrap_or(usual.threads),
            device: crate::device::resolve(self.device.unwrap_or_default()),
            gpu_memory: self.gpu_memory.map(|bytes| bytes.0),
            precision: self.precision.unwrap_or_default(),
            lag: self.lag.filter(|lag| *lag > 1),
            checkpoint_batches: self.checkpoint_batches.unwrap_or(usual.checkpoint_batches),
            checkpoint_seconds: self.checkpoint_minutes.map_or(usual.checkpoint_seconds, seconds_of),
            ..usual
        })
    }

    fn optimizer_config(&self) -> anyhow::Result<OptimizerConfig> {
        Ok(OptimizerConfig {
            kind: self.optimizer.unwrap_or_default(),
            weight_decay: self.weight_decay.unwrap_or(0.0),
            momentum: self.momentum.unwrap_or(0.0),
            nesterov: self.nesterov.unwrap_or(false),
            betas: self.betas.as_ref().map_or(Ok(OptimizerConfig::default().betas), |betas| {
                <[f32; 2]>::try_from(&betas[..]).map_err(|_| usage("--betas takes two numbers: 0.9,0.999"))
            })?,
            epsilon: self.epsilon,
            clip_norm: self.clip_norm,
            clip_value: self.clip_value,
        })
    }

    /// The order, and its partitions if it takes steps over them. Training nodes that would fill all residents are
    /// dispersed instead.
    fn order(&self, dataset: &Dataset, strategy: StrategyKind) -> (OrderName, Option<PartitionCounts>) {
        let order = self.order.unwrap_or(usual_order(strategy, self.learns_links()));
        let (Some(kind), Some(partitions)) = (order.over_partitions(), self.partitions) else {
            return (order, None);
        };
        let resident = self.resident.unwrap_or(partitions);
        let counts = |kind| Some(PartitionCounts::of(kind, partitions, resident, self.logical));
        let training = training_partitions(dataset, partitions);
        if order == OrderName::TrainingFirst && training >= resident && resident < partitions {
            return (OrderName::Dispersed, counts(PartitionOrderKind::Dispersed));
        }
        (order, counts(kind))
    }

    /// Tells if training nodes do not come first because they fill all residents.
    pub fn note_order(&self, config: &RunConfig, dataset: &Dataset) {
        if let (Some(OrderName::TrainingFirst), OrderName::Dispersed, Some(counts)) =
            (self.order, config.order, config.partition_counts)
        {
            crate::note!(
                "order dispersed instead of training-first: training nodes would fill {} partitions, and {} are resident",
                training_partitions(dataset, counts.partitions),
                counts.resident
            );
        }
    }

    /// The history of hidden rows, if one is asked for, or if the strategy is made of one.
    fn history(
        &self,
        dataset: &Dataset,
        strategy: StrategyKind,
        batch: u64,
    ) -> anyhow::Result<Option<HistoryConfig>> {
        let nodes = dataset.manifest().nodes.count;
        let batches = epoch_batches(dataset, batch);
        let staleness = usual_staleness(batches);
        let mut history = match (self.history_rows, &self.history_set) {
            (Some(_), Some(_)) => {
                return Err(usage("--history-set has its own rows; leave --history-rows out"));
            }
            (None, Some(run)) => {
                let history = HistoryConfig::of_run(run)?;
                let (_, config) = RunDirectory::open(run)?;
                if config.dataset_id != dataset.manifest().id {
                    let (run, dataset) = (run.display(), dataset.directory().display());
                    return Err(usage(format!(
                        "--history-set {run}: that run is on another dataset than {dataset}; give a run on this one, or --history-rows"
                    )));
                }
                history
            }
            (Some(rows), None) => HistoryConfig { staleness, ..HistoryConfig::new(rows.of(nodes)?) },
            (None, None) if strategy == StrategyKind::Outre => match self.staleness {
                // Fewer batches between two uses of a row are a larger part of training.
                None if batches < LEAST_HISTORY_BATCHES => {
                    HistoryConfig { staleness, ..HistoryConfig::new(0) }
                }
                _ => HistoryConfig { staleness, ..HistoryConfig::chosen() },
            },
            (None, None) => return Ok(None),
        };
        history.staleness = self.staleness.unwrap_or(history.staleness);
        history.hop = self.history_hop.unwrap_or(history.hop);
        history.dtype = self.history_dtype.unwrap_or(history.dtype);
        Ok(Some(history))
    }

    /// Tells if there is no history because epochs are short.
    pub fn note_history(&self, config: &RunConfig, dataset: &Dataset) {
        let batches = epoch_batches(dataset, config.batch);
        let is_default =
            self.history_rows.is_none() && self.history_set.is_none() && self.staleness.is_none();
        if config.strategy == StrategyKind::Outre && is_default && batches < LEAST_HISTORY_BATCHES {
            crate::note!(
                "no history: an epoch has {batches} batches, and with fewer than {LEAST_HISTORY_BATCHES} old rows cost accuracy; --staleness S keeps one"
            );
        }
    }

    fn model_config(&self) -> ModelConfig {
        let default = ModelConfig::default();
        let said = self.fanout.as_ref().map(|fanouts| fanouts.0.len()).filter(|hops| *hops > 1);
        let encoder = self.model.unwrap_or(EncoderName::Layers(default.kind));
        ModelConfig {
            kind: encoder.kind(),
            layers: match encoder {
                EncoderName::None => 0,
                EncoderName::Layers(_) => self.layers.or(said).unwrap_or(default.layers),
            },
            hidden: self.hidden.unwrap_or(default.hidden),
            dropout: self.dropout.unwrap_or(0.0),
            input_dropout: self.input_dropout.unwrap_or(0.0),
            activation: self.activation.unwrap_or_default(),
            norm: self.norm.unwrap_or_default(),
            residual: self.residual.unwrap_or(false),
            aggregator: self.aggregator.unwrap_or_default(),
            gcn_degree: self.gcn_degree.unwrap_or_default(),
            heads: self.heads.unwrap_or(default.heads),
            output_heads: self.output_heads,
            head_merge: self.head_merge.unwrap_or_default(),
            attention_dropout: self.attention_dropout.unwrap_or(0.0),
            projected_dropout: self.projected_dropout.unwrap_or(0.0),
            gin_epsilon: self.gin_epsilon.unwrap_or(0.0),
        }
    }
}

/// The order of batches with a strategy, if none is given.
fn usual_order(strategy: StrategyKind, links: bool) -> OrderName {
    match strategy {
        StrategyKind::Outre => OrderName::Groups,
        StrategyKind::Marius if links => OrderName::TwoLevelBeta,
        StrategyKind::Marius => OrderName::Dispersed,
        _ => OrderName::default(),
    }
}

/// One fan-out a layer: one serves all.
fn spread(
    given: Option<&Fanouts>,
    default: &[Fanout],
    hops: usize,
    flag: &str,
) -> anyhow::Result<Vec<Fanout>> {
    let fanouts = given.map_or(default, |given| &given.0);
    match fanouts {
        _ if hops == 0 => Ok(Vec::new()),
        [one] => Ok(vec![*one; hops]),
        some if some.len() == hops => Ok(some.to_vec()),
        some => Err(usage(format!(
            "{flag} has {} numbers for {hops} layers; give one, or one a layer",
            some.len()
        ))),
    }
}

/// Reads `cosine:100` and the like.
fn schedule(text: &str, steps: u64) -> anyhow::Result<Schedule> {
    let (name, numbers) = text.split_once(':').unwrap_or((text, ""));
    let numbers: Vec<&str> = numbers.split(',').filter(|number| !number.is_empty()).collect();
    let how = "write constant, step:EVERY,FACTOR, exponential:FACTOR, plateau:FACTOR,PATIENCE, cosine:WARMUP or linear:WARMUP";
    let number = |at: usize| -> anyhow::Result<f64> {
        let word = numbers.get(at).copied().unwrap_or("0");
        word.parse().map_err(|_| usage(format!("--schedule {text}: `{word}` is not a number; {how}")))
    };
    let count = |at: usize| -> anyhow::Result<u64> {
        let found = number(at)?;
        match found >= 0.0 && found.fract() == 0.0 {
            true => Ok(found as u64),
            false => Err(usage(format!("--schedule {text}: {found} is not a whole number from 0 up; {how}"))),
        }
    };
    Ok(match (name, numbers.len()) {
        ("constant", 0) => Schedule::Constant,
        ("step", 2) => Schedule::Step { every: count(0)?, factor: number(1)? },
        ("plateau", 2) => Schedule::Plateau { factor: number(0)?, patience: count(1)? },
        ("exponential", 1) => Schedule::Exponential { factor: number(0)? },
        ("cosine", 0 | 1) => Schedule::Cosine { warmup: count(0)?, steps, least: 0.0 },
        ("linear", 0 | 1) => Schedule::Linear { warmup: count(0)?, steps, least: 0.0 },
        _ => return Err(usage(format!("--schedule {text}: {how}"))),
    })
}

/// A schedule as `schedule` reads it.
fn schedule_text(schedule: &Schedule) -> String {
    match schedule {
        Schedule::Constant => "constant".into(),
        Schedule::Step { every, factor } => format!("step:{every},{factor}"),
        Schedule::Exponential { factor } => format!("exponential:{factor}"),
        Schedule::Plateau { factor, patience } => format!("plateau:{factor},{patience}"),
        Schedule::Cosine { warmup, .. } => format!("cosine:{warmup}"),
        Schedule::Linear { warmup, .. } => format!("linear:{warmup}"),
    }
}

/// Batches of an epoch, without smaller ones.
fn epoch_batches(dataset: &Dataset, batch: u64) -> u64 {
    dataset.manifest().splits.as_ref().map_or(0, |splits| splits.train) / batch.max(1)
}
