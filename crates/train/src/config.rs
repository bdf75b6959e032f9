//! A run with every default resolved: what the run directory prints whole, and what a resumed run must equal.

use crate::{Result, TrainError};
use esker_nn::{Degree, Kind, ModelConfig, OptimizerConfig, Precision, Schedule};
use esker_sample::{Carry, Direction, Fanout, Form, Settings};
use esker_store::{Dataset, LabelKind};
use esker_strategies::StrategyKind;
use esker_types::{Budget, DeviceName};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

/// The order of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OrderName {
    /// Each epoch another pseudo-random order.
    #[default]
    Shuffled,
    /// Seeds as they come.
    Sequential,
}

/// How validation and test nodes are evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvaluationMode {
    /// With sampled neighbourhoods, as training.
    #[default]
    Sampled,
    /// With all neighbours, layer by layer over the whole graph.
    Full,
    /// Not at all.
    None,
}

/// What "best" means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MetricName {
    /// Share of nodes whose class is right (of labels, where nodes have several).
    Accuracy,
    /// F1 of each class, averaged.
    MacroF1,
    /// Area under the ROC curve, of two classes or of each label, averaged.
    Auc,
    /// The loss itself; less is better.
    Loss,
    /// Accuracy and loss, both no worse than of any model before; patience goes on while either is.
    AccuracyAndLoss,
}

impl MetricName {
    /// What is usual for labels of this kind.
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
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// The learning rate.
    pub lr: f64,
    /// How it moves.
    pub schedule: Schedule,
    /// Neighbours a node takes, by hop; the first is next to the seeds. None for a model without neighbours.
    pub fanout: Vec<Fanout>,
    /// How neighbourhoods are sampled.
    pub form: Form,
    /// Along which edges.
    pub direction: Direction,
    /// Seeds of a batch.
    pub batch: u64,
    /// Epochs.
    pub epochs: u64,
    /// The order of batches.
    pub order: OrderName,
    /// Whether a last, smaller batch is left out.
    pub drop_last: bool,
    /// Seed of everything random.
    pub seed: u64,
    /// How nodes are evaluated while training.
    pub eval: EvaluationMode,
    /// Every so many epochs.
    pub eval_every: u64,
    /// Neighbours a node takes in sampled evaluation.
    pub eval_fanout: Vec<Fanout>,
    /// How the test nodes are evaluated in the end.
    pub final_eval: EvaluationMode,
    /// What "best" means.
    pub metric: MetricName,
    /// Evaluations without a better model after which training stops; 0 for never.
    pub patience: u64,
    /// Where rows come from.
    pub strategy: StrategyKind,
    /// What the run may use, in bytes.
    pub memory: u64,
    /// What traces and plans may take on disk, in bytes; half of what is free where it is not said.
    #[serde(default)]
    pub disk_budget: Option<u64>,
    /// Batches that are sampled and planned together, where it is said.
    #[serde(default)]
    pub superbatch: Option<u64>,
    /// Bytes for cached feature rows, where it is said.
    #[serde(default)]
    pub feature_cache: Option<u64>,
    /// Bytes for cached neighbour lists, where it is said.
    #[serde(default)]
    pub neighbour_cache: Option<u64>,
    /// Epochs whose batches differ; later ones repeat them. All of them where it is not said, but for strategies that choose.
    #[serde(default)]
    pub epochs_sampled: Option<u64>,
    /// Where packed rows are, where it is said.
    #[serde(default)]
    pub prepared: Option<PathBuf>,
    /// Batches of a segment that shares a cache on disk, where it is said.
    #[serde(default)]
    pub segment: Option<u32>,
    /// Read feature rows in blocks of so many bytes at least, where it is said.
    #[serde(default)]
    pub io_block: Option<u64>,
    /// One batch at a time, nothing ahead: to see what working ahead brings.
    #[serde(default)]
    pub sequential: bool,
    /// Bytes between two moments of safety while rows are packed; for tests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub safe_point: Option<u64>,
    /// Threads.
    pub threads: usize,
    /// The processor that trains.
    pub device: DeviceName,
    /// What the run may use of its memory, in bytes; none for a processor without memory of its own.
    #[serde(default)]
    pub gpu_memory: Option<u64>,
    /// How a GPU computes matmuls.
    #[serde(default)]
    pub precision: Precision,
    /// A checkpoint every so many batches; 0 for none.
    pub checkpoint_batches: u64,
    /// And every so many seconds; 0 for none.
    pub checkpoint_seconds: u64,
}

impl RunConfig {
    /// A run on a dataset with the defaults that `esker train` has, on the CPU.
    pub fn for_dataset(dataset: &Dataset) -> RunConfig {
        let model = ModelConfig::default();
        let fanout = vec![Fanout::AtMost(10); model.layers];
        RunConfig {
            // Whole, so that the run can be opened from anywhere.
            dataset: dataset.directory().canonicalize().unwrap_or_else(|_| dataset.directory().to_path_buf()),
            dataset_id: dataset.manifest().id.clone(),
            model,
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
            checkpoint_batches: 0,
            checkpoint_seconds: 600,
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

    /// One hop, all neighbours: what a layer of inference over the whole graph reads.
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

    /// To evaluate or predict in `mode`, or as the run was evaluated in the end.
    pub fn to_infer(self, mode: Option<EvaluationMode>) -> RunConfig {
        let mode = match mode.unwrap_or(self.final_eval) {
            EvaluationMode::None => EvaluationMode::Sampled,
            mode => mode,
        };
        RunConfig { eval: mode, final_eval: mode, ..self }
    }

    /// Refuses what cannot be run; what depends on the dataset is checked elsewhere.
    pub fn check(&self) -> Result<()> {
        let hops = if self.model.kind == Kind::Mlp { 0 } else { self.model.layers };
        for (name, fanout) in [("fan-out", &self.fanout), ("evaluation fan-out", &self.eval_fanout)] {
            if fanout.len() != hops {
                let problem = format!("a {name} of {} hops for {hops} layers", fanout.len());
                return Err(TrainError::config(problem, "give one number, or one a layer"));
            }
        }
        self.check_counts()?;
        if !(self.lr > 0.0 && self.lr.is_finite()) {
            return Err(TrainError::config(
                format!("--lr is {}", self.lr),
                "it must be greater than 0, and finite",
            ));
        }
        if self.form == Form::Shadow && [self.eval, self.final_eval].contains(&EvaluationMode::Full) {
            return Err(TrainError::config(
                "ShaDow trains on induced subgraphs, which inference layer by layer does not have",
                "evaluate with --eval sampled and --final-eval sampled",
            ));
        }
        if !self.strategy.repeats_epochs() && self.epochs_sampled.is_some_and(|epochs| epochs < self.epochs) {
            return Err(TrainError::config(
                format!("{} samples every epoch anew", self.strategy),
                "leave --epochs-sampled out, or take diskgnn, memory or mmap",
            ));
        }
        if self.device == DeviceName::Auto {
            return Err(TrainError::config("device auto", "say which: cpu, or cuda:N"));
        }
        if self.device == DeviceName::Cpu && self.precision != Precision::F32 {
            let asked = format!("{:?}", self.precision).to_lowercase();
            return Err(TrainError::config(
                format!("the CPU computes in f32, not in {asked}"),
                "leave --precision out, or train with --device cuda",
            ));
        }
        self.optimizer.check()?;
        self.schedule.check()?;
        Ok(())
    }

    /// Refuses counts of 0 where nothing could be done with them.
    fn check_counts(&self) -> Result<()> {
        let counts = [
            ("--epochs", Some(self.epochs)),
            ("--batch", Some(self.batch)),
            ("--eval-every", Some(self.eval_every)),
            ("--threads", Some(self.threads as u64)),
            ("--superbatch", self.superbatch),
            ("--epochs-sampled", self.epochs_sampled),
            ("--segment", self.segment.map(u64::from)),
        ];
        match counts.iter().find(|(_, count)| *count == Some(0)) {
            Some((flag, _)) => Err(TrainError::config(format!("{flag} is 0"), "it must be at least 1")),
            None => Ok(()),
        }
    }

    /// Refuses to go on with the run in `out`, which is `before`, where it was another one.
    pub fn check_resumes(&self, before: &RunConfig, out: &Path) -> Result<()> {
        match &self.differences(before)[..] {
            [] => Ok(()),
            differences => Err(TrainError::config(
                format!("{} was another run: {}", out.display(), differences.join("; ")),
                "resume it with what it was started with, or choose another --out",
            )),
        }
    }

    /// What must be the same for a run to be resumed, by name: everything that can change a result, but for the device,
    /// which changes the last bits of it.
    pub fn differences(&self, other: &RunConfig) -> Vec<String> {
        let free = [
            "dataset",
            "strategy",
            "memory",
            "disk_budget",
            "superbatch",
            "feature_cache",
            "neighbour_cache",
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
        ];
        // Another processor may not have the precision.
        let moved = self.device != other.device;
        let fields = |config: &RunConfig| {
            let mut all = BTreeMap::new();
            // Nothing said means all.
            let sampled = config.epochs_sampled.unwrap_or(config.epochs).min(config.epochs);
            let config = RunConfig { epochs_sampled: Some(sampled), ..config.clone() };
            flatten("", &serde_json::to_value(&config).unwrap_or_default(), &mut all);
            all.retain(|name, _| !(free.contains(&name.as_str()) || moved && name == "precision"));
            all
        };
        let (mine, theirs) = (fields(self), fields(other));
        let names: BTreeSet<&String> = mine.keys().chain(theirs.keys()).collect();
        let nothing = "nothing".to_string();
        let of = |all: &BTreeMap<String, String>, name: &String| all.get(name).unwrap_or(&nothing).clone();
        names
            .into_iter()
            .filter(|name| mine.get(*name) != theirs.get(*name))
            .map(|name| format!("{name} is {}, was {}", of(&mine, name), of(&theirs, name)))
            .collect()
    }
}

/// Every number and word of a value by its path: `model.hidden`.
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
