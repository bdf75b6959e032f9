//! A run with every default resolved: what the run directory stores, and what a resumed run must match.

use crate::embeddings::{EmbeddingConfig, InputRows};
use crate::link::{LinkConfig, RelationInit, begins_with_ones};
use crate::{Difference, HistoryConfig, ResidentOnly, Result, TrainError, partition_orders};
use esker_nn::RowInit;
use esker_nn::{Degree, Kind, ModelConfig, NnError, OptimizerConfig, Precision, Schedule};
use esker_plan::partition_orders::{PartitionCounts, PartitionOrderKind};
use esker_sample::order::Grouping;
use esker_sample::partition::{StoredPartitioning, USUAL_GROUP};
use esker_sample::{Carry, Direction, Fanout, Form, SampleError, Settings};
use esker_store::{Dataset, LabelKind};
use esker_strategies::{CachePolicy, NeighbourPolicy, StrategyKind};
use esker_types::{Budget, DeviceName};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

/// The order of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OrderName {
    /// A new pseudo-random order in each epoch.
    #[default]
    Shuffled,
    /// Seeds in their given order.
    Sequential,
    /// By groups of partitions, so that neighbouring seeds are in the same batch.
    Groups,
    /// By pairs of partitions that are resident together, each when they first meet (Marius).
    Beta,
    /// The same over logical partitions, each pair at random in one of the steps that have it (Marius++).
    TwoLevelBeta,
    /// By pairs of partitions along Hamiltonian cycles of logical ones.
    Tour,
    /// Training nodes while their partition is resident; every partition is, at some time.
    Dispersed,
    /// Training nodes of the first partitions, which have all of them and are resident.
    TrainingFirst,
}

impl OrderName {
    /// How partitions take turns, in an order over partitions of which some are resident.
    pub fn over_partitions(self) -> Option<PartitionOrderKind> {
        match self {
            OrderName::Shuffled | OrderName::Sequential | OrderName::Groups => None,
            OrderName::Beta => Some(PartitionOrderKind::Beta),
            OrderName::TwoLevelBeta => Some(PartitionOrderKind::TwoLevelBeta),
            OrderName::Tour => Some(PartitionOrderKind::Tour),
            OrderName::Dispersed => Some(PartitionOrderKind::Dispersed),
            OrderName::TrainingFirst => Some(PartitionOrderKind::TrainingFirst),
        }
    }
}

/// The partitioning that an order by groups uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChosenPartitioning {
    /// Its name in the dataset.
    pub name: String,
    /// A hash of it. A run continues only with the same.
    pub digest: String,
    /// Number of partitions.
    pub partitions: u32,
    /// How it was made, for messages.
    #[serde(default)]
    pub made: Option<String>,
    /// Edges between partitions, of a thousand.
    #[serde(default)]
    pub cut_permille: Option<u32>,
}

impl ChosenPartitioning {
    /// Opens it. If it is gone, the error tells how it was made.
    pub fn open(&self, dataset: &Dataset) -> Result<StoredPartitioning> {
        StoredPartitioning::open(dataset, &self.name).map_err(|error| match error {
            SampleError::NoPartitioning { .. } => TrainError::LostPartitioning {
                dataset: dataset.directory().to_path_buf(),
                name: self.name.clone(),
                made: self.description(),
            },
            error => error.into(),
        })
    }

    /// What it was, for messages.
    pub(crate) fn description(&self) -> String {
        self.made.clone().unwrap_or_else(|| format!("{} partitions", self.partitions))
    }
}

impl From<&StoredPartitioning> for ChosenPartitioning {
    fn from(stored: &StoredPartitioning) -> ChosenPartitioning {
        ChosenPartitioning {
            name: stored.name().to_string(),
            digest: stored.digest().to_string(),
            partitions: stored.partitions(),
            made: Some(stored.request().to_string()),
            cut_permille: Some((stored.summary().cut_share() * 1000.0) as u32),
        }
    }
}

/// How validation and test nodes are evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvaluationMode {
    /// With sampled neighbourhoods, as in training.
    #[default]
    Sampled,
    /// With all neighbours, layer by layer over the whole graph.
    Full,
    /// Not at all.
    None,
}

/// How the best model is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MetricName {
    /// Share of nodes with the right class (of labels, if nodes have several).
    Accuracy,
    /// F1 of each class, averaged.
    MacroF1,
    /// Area under the ROC curve: of two classes, or of each label, averaged.
    Auc,
    /// The loss itself. Lower is better.
    Loss,
    /// Accuracy and loss: both must be no worse than those of any earlier model. Patience restarts if either is.
    AccuracyAndLoss,
    /// Links: mean of the reciprocal ranks.
    Mrr,
    /// Links: share of ranks that are at most 10.
    #[serde(rename = "hits@10")]
    HitsAt10,
    /// Links: average precision.
    #[serde(rename = "ap")]
    AveragePrecision,
}

impl MetricName {
    /// The usual metric for labels of this kind.
    fn for_labels(kind: Option<LabelKind>) -> MetricName {
        match kind {
            Some(LabelKind::Real) => MetricName::Loss,
            Some(LabelKind::Multilabel) => MetricName::MacroF1,
            _ => MetricName::Accuracy,
        }
    }
}

impl fmt::Display for MetricName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MetricName::Accuracy => "accuracy",
            MetricName::MacroF1 => "macro-f1",
            MetricName::Auc => "auc",
            MetricName::Loss => "loss",
            MetricName::AccuracyAndLoss => "accuracy-and-loss",
            MetricName::Mrr => "mrr",
            MetricName::HitsAt10 => "hits@10",
            MetricName::AveragePrecision => "ap",
        })
    }
}

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The dataset.
    pub dataset: PathBuf,
    /// The id of its content.
    pub dataset_id: String,
    /// The model.
    pub model: ModelConfig,
    /// Links, if they are learned; otherwise labels of nodes are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkConfig>,
    /// Learned embeddings, if nodes have any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embeddings: Option<EmbeddingConfig>,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// The learning rate.
    pub lr: f64,
    /// The schedule of the learning rate.
    pub schedule: Schedule,
    /// Fan-out by hop, the hop next to the seed nodes first. Empty for a model without neighbours.
    pub fanout: Vec<Fanout>,
    /// How neighbourhoods are sampled.
    pub form: Form,
    /// The direction of edges along which neighbours are found.
    pub direction: Direction,
    /// Seed nodes per batch.
    pub batch: u64,
    /// Number of epochs.
    pub epochs: u64,
    /// The order of batches.
    pub order: OrderName,
    /// Partitions in a group, if batches come by groups.
    #[serde(default)]
    pub group: Option<u32>,
    /// The partitioning, if batches come by groups.
    #[serde(default)]
    pub partitioning: Option<ChosenPartitioning>,
    /// Partitions, in an order over partitions of which some are resident.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition_counts: Option<PartitionCounts>,
    /// Whether training sees resident nodes only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_only: Option<ResidentOnly>,
    /// The history of hidden rows, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<HistoryConfig>,
    /// Whether a last, smaller batch is left out.
    pub drop_last: bool,
    /// Random seed of everything.
    pub seed: u64,
    /// How nodes are evaluated during training.
    pub eval: EvaluationMode,
    /// Evaluate every this many epochs.
    pub eval_every: u64,
    /// Fan-out by hop in sampled evaluation.
    pub eval_fanout: Vec<Fanout>,
    /// How the test nodes are evaluated at the end.
    pub final_eval: EvaluationMode,
    /// How the best model is chosen.
    pub metric: MetricName,
    /// Evaluations without a better model after which training stops; 0 for never.
    pub patience: u64,
    /// The strategy that brings feature rows.
    pub strategy: StrategyKind,
    /// The memory budget in bytes.
    pub memory: u64,
    /// The disk budget for traces and plans in bytes. By default half of what is free.
    #[serde(default)]
    pub disk_budget: Option<u64>,
    /// Batches that are sampled and planned together, if set.
    #[serde(default)]
    pub superbatch: Option<u64>,
    /// Size of the feature cache in bytes, if set.
    #[serde(default)]
    pub feature_cache: Option<u64>,
    /// Size of the neighbour cache in bytes, if set.
    #[serde(default)]
    pub neighbour_cache: Option<u64>,
    /// Which feature rows are cached, if set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CachePolicy>,
    /// Which neighbours are cached, if set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour_policy: Option<NeighbourPolicy>,
    /// Number of distinct epochs; later epochs repeat them. By default all epochs, unless the strategy chooses.
    #[serde(default)]
    pub epochs_sampled: Option<u64>,
    /// Directory of packed rows, if set.
    #[serde(default)]
    pub prepared: Option<PathBuf>,
    /// Batches per segment that shares a cache on disk, if set.
    #[serde(default)]
    pub segment: Option<u32>,
    /// Smallest size of reads of feature rows in bytes, if set.
    #[serde(default)]
    pub io_block: Option<u64>,
    /// One batch at a time without prefetching: to measure what prefetching saves.
    #[serde(default)]
    pub sequential: bool,
    /// Bytes between two safe points while rows are packed or sorted; for tests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub safe_point: Option<u64>,
    /// Number of threads.
    pub threads: usize,
    /// The training device.
    pub device: DeviceName,
    /// The device memory budget in bytes. `None` for a device without its own memory.
    #[serde(default)]
    pub gpu_memory: Option<u64>,
    /// How a GPU computes matmuls.
    #[serde(default)]
    pub precision: Precision,
    /// A batch reads the learned rows that the batch so many before it left, if set; 1 otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag: Option<u64>,
    /// Write a checkpoint every this many batches; 0 for never.
    pub checkpoint_batches: u64,
    /// And every this many seconds; 0 for never.
    pub checkpoint_seconds: u64,
}

impl RunConfig {
    /// A run on a dataset with the defaults of `esker train`, on the CPU.
    pub fn for_dataset(dataset: &Dataset) -> RunConfig {
        let model = ModelConfig::default();
        let fanout = vec![Fanout::AtMost(10); model.layers];
        RunConfig {
            // The absolute path, so that the run can be opened from any directory.
            dataset: dataset.directory().canonicalize().unwrap_or_else(|_| dataset.directory().to_path_buf()),
            dataset_id: dataset.manifest().id.clone(),
            model,
            link: None,
            embeddings: None,
            optimizer: OptimizerConfig::default(),
            lr: 0.003,
            schedule: Schedule::Constant,
            eval_fanout: fanout.clone(),
            fanout,
            form: Form::Dense,
            direction: Direction::Incoming,
            batch: 1000,
            epochs: 10,
            order: OrderName::default(),
            group: None,
            partitioning: None,
            partition_counts: None,
            resident_only: None,
            history: None,
            drop_last: false,
            seed: 1,
            eval: EvaluationMode::default(),
            eval_every: 1,
            final_eval: EvaluationMode::default(),
            metric: MetricName::for_labels(
                dataset.manifest().nodes.labels.as_ref().map(|labels| labels.kind),
            ),
            patience: 0,
            strategy: StrategyKind::default(),
            memory: Budget::resolve(None).host_bytes,
            disk_budget: None,
            superbatch: None,
            feature_cache: None,
            neighbour_cache: None,
            cache: None,
            neighbour_policy: None,
            epochs_sampled: None,
            prepared: None,
            segment: None,
            io_block: None,
            sequential: false,
            safe_point: None,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            device: DeviceName::Cpu,
            gpu_memory: None,
            precision: Precision::default(),
            lag: None,
            checkpoint_batches: 0,
            checkpoint_seconds: 600,
        }
    }

    /// How an order by groups groups training nodes; `None` for another order, or without a partitioning.
    pub fn grouping(&self) -> Option<Grouping> {
        let chosen = self.partitioning.as_ref().filter(|_| self.order == OrderName::Groups)?;
        Some(Grouping {
            partitions: chosen.partitions,
            digest: chosen.digest.clone(),
            group: self.group.unwrap_or(USUAL_GROUP),
            batch: self.batch,
            drop_last: self.drop_last,
            seed: self.seed,
        })
    }

    /// The most batches that an epoch with so many training nodes or edges can have.
    pub(crate) fn most_batches(&self, nodes: u64) -> u64 {
        if let Some(most) = partition_orders::most_batches(self, nodes) {
            return most;
        }
        match (self.grouping(), self.drop_last) {
            (Some(grouping), _) => grouping.most_batches(nodes),
            (None, true) => nodes / self.batch.max(1),
            (None, false) => nodes.div_ceil(self.batch.max(1)),
        }
    }

    /// Memory of the order of training batches.
    pub(crate) fn order_bytes(&self, dataset: &Dataset) -> u64 {
        let train = dataset.manifest().splits.as_ref().map_or(0, |splits| splits.train);
        let over_partitions = partition_orders::order_bytes(self, dataset.manifest().nodes.count, train);
        self.grouping().map_or(over_partitions, |grouping| grouping.bytes_for(train))
    }

    /// The line of this memory, and what it is for.
    pub(crate) fn order_line(&self) -> (&'static str, &'static str) {
        match self.over_partitions() {
            Some(_) => ("order over partitions", "all items by bucket or partition, steps of some epochs"),
            None => ("order by groups", "training nodes by partition, groups of some epochs"),
        }
    }

    /// How training batches are sampled.
    pub fn settings(&self) -> Settings {
        self.sampling(&self.fanout, self.form, false)
    }

    /// How evaluation batches are sampled.
    pub fn eval_settings(&self) -> Settings {
        self.sampling(&self.eval_fanout, self.form, false)
    }

    /// One hop with all neighbours: what a layer of whole-graph inference reads.
    pub fn whole_settings(&self) -> Settings {
        let hops = if self.model.kind == Kind::Mlp { vec![] } else { vec![Fanout::All] };
        self.sampling(&hops, Form::Dense, true)
    }

    fn sampling(&self, fanouts: &[Fanout], form: Form, is_whole: bool) -> Settings {
        let whole = self.model.gcn_degree != Degree::Sampled || is_whole;
        let degrees = self.model.kind == Kind::Gcn && whole;
        let carry = Carry { degrees, ..Carry::default() };
        Settings { seed: self.seed, fanouts: fanouts.to_vec(), form, carry }
    }

    /// The configuration for evaluating or predicting in `mode`, by default the mode of the run's final evaluation.
    pub fn to_infer(self, mode: Option<EvaluationMode>) -> RunConfig {
        let mode = match mode.unwrap_or(self.final_eval) {
            EvaluationMode::None => EvaluationMode::Sampled,
            mode => mode,
        };
        RunConfig { eval: mode, final_eval: mode, ..self }
    }

    /// Fails if the run is invalid. What depends on the dataset is checked elsewhere.
    pub fn check(&self) -> Result<()> {
        let hops = if self.model.kind == Kind::Mlp { 0 } else { self.model.layers };
        for (name, fanout) in [("fan-out", &self.fanout), ("evaluation fan-out", &self.eval_fanout)] {
            if fanout.len() != hops {
                return Err(TrainError::Fanout { name, hops: fanout.len(), layers: hops });
            }
        }
        self.check_counts()?;
        self.check_history()?;
        self.check_links()?;
        self.check_partitions()?;
        if !(self.lr > 0.0 && self.lr.is_finite()) {
            let allowed = "greater than 0, and finite";
            return Err(TrainError::Setting { flag: "--lr", found: self.lr, allowed });
        }
        if self.form == Form::Shadow && [self.eval, self.final_eval].contains(&EvaluationMode::Full) {
            return Err(TrainError::ShadowFull);
        }
        if !self.strategy.repeats_epochs() && self.epochs_sampled.is_some_and(|epochs| epochs < self.epochs) {
            return Err(TrainError::RepeatsNothing { strategy: self.strategy });
        }
        if self.device == DeviceName::Auto {
            return Err(TrainError::DeviceAuto);
        }
        if self.device == DeviceName::Cpu && self.precision != Precision::F32 {
            return Err(TrainError::CpuPrecision { asked: self.precision });
        }
        self.optimizer.check()?;
        self.schedule.check()?;
        Ok(())
    }

    /// Fails on links or embeddings that are invalid.
    fn check_links(&self) -> Result<()> {
        let fetches =
            !matches!(self.strategy, StrategyKind::Memory | StrategyKind::Mmap | StrategyKind::Marius);
        if self.history.is_some() && (self.link.is_some() || self.embeddings.is_some()) {
            return Err(TrainError::LinkHistory);
        }
        match &self.link {
            None if self.model.layers == 0 => return Err(NnError::NoLayers.into()),
            None => {}
            Some(_) if fetches => return Err(TrainError::LinkStrategy { strategy: self.strategy }),
            Some(_) if self.order == OrderName::Groups => return Err(TrainError::LinkOrder),
            Some(link) => link.check()?,
        }
        match &self.embeddings {
            None => Ok(()),
            Some(embeddings) if embeddings.inputs == InputRows::Embeddings && fetches => {
                Err(TrainError::EmbeddingStrategy { strategy: self.strategy })
            }
            Some(embeddings) => embeddings.check(),
        }
    }

    /// How the rows of relations begin; by default as embeddings do, unless ones are neutral for the decoder. `None` for
    /// ones.
    pub(crate) fn relation_init(&self, link: &LinkConfig) -> Option<RowInit> {
        match link.relation_init {
            Some(RelationInit::Ones) => return None,
            Some(RelationInit::Random(init)) => return Some(init),
            None => {}
        }
        let bound = 1.0 / (link.columns.max(1) as f32).sqrt();
        let usual = self.embeddings.as_ref().map_or(RowInit::Uniform { bound }, |rows| rows.init);
        (!begins_with_ones(link.decoder)).then_some(usual)
    }

    /// Columns of the rows that the first layer reads, where features have so many.
    pub(crate) fn input_columns(&self, features: usize) -> usize {
        self.embeddings.as_ref().map_or(features, |embeddings| embeddings.input_columns(features))
    }

    /// Whether batches have feature rows.
    pub(crate) fn reads_features(&self) -> bool {
        self.embeddings.as_ref().is_none_or(|embeddings| embeddings.inputs != InputRows::Embeddings)
    }

    /// Fails on counts of 0 that make no sense.
    fn check_counts(&self) -> Result<()> {
        let counts = [
            ("--epochs", Some(self.epochs)),
            ("--batch", Some(self.batch)),
            ("--eval-every", Some(self.eval_every)),
            ("--threads", Some(self.threads as u64)),
            ("--superbatch", self.superbatch),
            ("--epochs-sampled", self.epochs_sampled),
            ("--segment", self.segment.map(u64::from)),
            ("--group", self.group.map(u64::from)),
        ];
        match counts.iter().find(|(_, count)| *count == Some(0)) {
            Some((flag, _)) => Err(TrainError::Setting { flag, found: 0.0, allowed: "at least 1" }),
            None => Ok(()),
        }
    }

    /// Fails if the run in `out` cannot be resumed, because its configuration `before` was another.
    pub fn check_resumes(&self, before: &RunConfig, out: &Path) -> Result<()> {
        let differences = self.differences(before);
        match differences.is_empty() {
            true => Ok(()),
            false => Err(TrainError::OtherRun { out: out.to_path_buf(), differences }),
        }
    }

    /// The settings, by name, that prevent a run from being resumed: everything that can change a result, except the
    /// device, which changes only the last bits.
    pub fn differences(&self, other: &RunConfig) -> Vec<Difference> {
        let free = [
            "dataset",
            "partitioning.name",
            "partitioning.made",
            "partitioning.cut_permille",
            "strategy",
            "memory",
            "disk_budget",
            "superbatch",
            "feature_cache",
            "neighbour_cache",
            "cache",
            "neighbour_policy",
            "prepared",
            "segment",
            "io_block",
            "sequential",
            "safe_point",
            "threads",
            "device",
            "gpu_memory",
            "checkpoint_batches",
            "checkpoint_seconds",
            "link.ranks.block",
            "embeddings.init_file",
        ];
        // Another device may not have the precision.
        let moved = self.device != other.device;
        let fields = |config: &RunConfig, other: &RunConfig| {
            let mut all = BTreeMap::new();
            // By default all epochs are sampled.
            let sampled = config.epochs_sampled.unwrap_or(config.epochs).min(config.epochs);
            let mut config = RunConfig { epochs_sampled: Some(sampled), ..config.clone() };
            // Nodes that are not chosen yet will be the same.
            if let (Some(history), Some(other)) = (&mut config.history, &other.history) {
                history.nodes = history.nodes.take().or_else(|| other.nodes.clone());
                history.rows = history.rows.or(other.rows);
            }
            flatten("", &serde_json::to_value(&config).unwrap_or_default(), &mut all);
            all.retain(|name, _| !(free.contains(&name.as_str()) || moved && name == "precision"));
            all
        };
        let (mine, theirs) = (fields(self, other), fields(other, self));
        let names: BTreeSet<&String> = mine.keys().chain(theirs.keys()).collect();
        let nothing = "nothing".to_string();
        let of = |all: &BTreeMap<String, String>, name: &String| all.get(name).unwrap_or(&nothing).clone();
        names
            .into_iter()
            .filter(|name| mine.get(*name) != theirs.get(*name))
            .map(|name| Difference { name: name.clone(), now: of(&mine, name), before: of(&theirs, name) })
            .collect()
    }
}

/// Every number and word of a value by its path, such as `model.hidden`.
fn flatten(path: &str, value: &serde_json::Value, out: &mut BTreeMap<String, String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, value, out);
            }
        }
        other => drop(out.insert(path.to_string(), other.to_string())),
    }
}
