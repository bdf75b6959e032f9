//! A small graph, a run on it, and what is compared of two runs.
#![allow(dead_code)]

use esker_import::Job as ImportJob;
use esker_import::generate::{Shape, generate};
use esker_nn::{Kind, ModelConfig, OptimizerConfig, Precision, Schedule};
use esker_sample::{Direction, Fanout, Form};
use esker_store::Dataset;
use esker_strategies::StrategyKind;
use esker_train::{
    BatchProgress, Checkpoint, EpochRecord, EvaluationMode, MetricName, OrderName, Outcome, RunConfig,
    Summary, Watcher,
};
use esker_types::{Budget, DeviceName, Dtype, Silent};
use std::path::{Path, PathBuf};

pub struct Bench {
    directory: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let shape = Shape {
            degree: 8.0,
            dim: 12,
            dtype: Dtype::F16,
            classes: 5,
            homophily: 0.8,
            signal: 0.3,
            label_noise: 0.05,
            train: 0.2,
            valid: 0.1,
            test: 0.1,
            out_neighbours: true,
            ..Shape::plain(3000)
        };
        let target = directory.path().join("g");
        let budget = Budget { host_bytes: 64 << 20 };
        generate(&shape, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent })
            .unwrap();
        Bench { directory }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn config(&self) -> RunConfig {
        let dataset = Dataset::open(&self.path("g")).unwrap();
        RunConfig {
            dataset: self.path("g"),
            dataset_id: dataset.manifest().id.clone(),
            model: ModelConfig {
                kind: Kind::Sage,
                layers: 2,
                hidden: 24,
                dropout: 0.3,
                ..ModelConfig::default()
            },
            optimizer: OptimizerConfig::default(),
            lr: 0.01,
            schedule: Schedule::Constant,
            fanout: vec![Fanout::AtMost(5), Fanout::AtMost(3)],
            form: Form::Dense,
            direction: Direction::Incoming,
            batch: 100,
            epochs: 3,
            order: OrderName::Shuffled,
            drop_last: false,
            seed: 7,
            eval: EvaluationMode::Sampled,
            eval_every: 1,
            eval_fanout: vec![Fanout::AtMost(5), Fanout::AtMost(3)],
            final_eval: EvaluationMode::Sampled,
            metric: MetricName::Accuracy,
            patience: 0,
            strategy: StrategyKind::Memory,
            memory: 1 << 30,
            disk_budget: None,
            superbatch: None,
            feature_cache: None,
            neighbour_cache: None,
            threads: 2,
            device: DeviceName::Cpu,
            gpu_memory: None,
            precision: Precision::F32,
            checkpoint_batches: 0,
            checkpoint_seconds: 0,
        }
    }
}

/// Stops after so many batches.
pub struct StopAfter(pub u64);

impl Watcher for StopAfter {
    fn batch(&mut self, _: &BatchProgress) {
        self.0 = self.0.saturating_sub(1);
    }
    fn stop(&self) -> bool {
        self.0 == 0
    }
    fn evaluation(&mut self, _: &str) {}
    fn epoch(&mut self, _: &EpochRecord, _: bool) {}
}

pub fn finished(outcome: Outcome) -> Summary {
    match outcome {
        Outcome::Finished(summary) => *summary,
        Outcome::Stopped(at) => panic!("stopped at {at:?}"),
    }
}

/// What must not depend on time or memory.
pub fn result(summary: &Summary, out: &Path) -> (String, Option<f64>, Option<f64>, Checkpoint) {
    let accuracy = |metrics: Option<esker_train::Metrics>| metrics.and_then(|metrics| metrics.accuracy);
    let weights = Checkpoint::read(&out.join("last.safetensors")).unwrap();
    (summary.loss_digest.clone(), accuracy(summary.test), accuracy(summary.valid), weights)
}

/// The lines about batches.
pub fn batch_lines(out: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    text.lines().filter(|line| line.contains("\"kind\":\"batch\"")).map(str::to_string).collect()
}
