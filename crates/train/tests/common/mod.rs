//! A small graph, a run on it, what is compared of two runs, and rows that a backend holds.
#![allow(dead_code)]

use esker_fetch::{FeatureRows, RowFormat};
use esker_import::Job as ImportJob;
use esker_import::generate::{Shape, generate};
use esker_nn::{Backend, Kind, ModelConfig, OptimizerConfig, Precision, Schedule};
use esker_sample::{Direction, Fanout, Form};
use esker_store::{Dataset, file};
use esker_strategies::{Hold, RowHolder, StrategyKind};
use esker_train::{
    BatchProgress, BatchRows, Checkpoint, EpochRecord, EvaluationMode, LabelKind, Learner, MetricName,
    OrderName, Outcome, RunConfig, Summary, Watcher,
};
use esker_types::{Budget, DeviceName, Dtype, NodeId, Silent};
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
            epochs_sampled: None,
            prepared: None,
            segment: None,
            io_block: None,
            sequential: false,
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

/// What holds rows for a backend, 100 of them in its own memory.
pub fn row_holder<B: Backend + Clone + 'static>(
    bench: &Bench,
    backend: B,
) -> (Learner<B>, RowFormat, Arc<dyn RowHolder<BatchRows<B>>>) {
    let format = RowFormat::of(&Dataset::open(&bench.path("g")).unwrap()).unwrap();
    let learner = Learner::new(backend, &bench.config(), format.dim(), 5, LabelKind::Classes).unwrap();
    // Not quite enough for one more.
    let holder = learner.row_holder(101 * format.row_bytes() as u64 - 1);
    (learner, format, holder)
}

/// Batches from all that a backend holds, and from rows of their own, are the rows of the dataset.
pub fn check_held_rows<B: Backend + Clone + 'static>(bench: &Bench, backend: B) {
    let (learner, format, holder) = row_holder(bench, backend);
    let (dim, row_bytes) = (format.dim(), format.row_bytes());
    let dataset = Dataset::open(&bench.path("g")).unwrap();
    let mut stored = vec![0u16; 400 * dim];
    dataset.array(file::NODE_FEATURES).unwrap().read_at(0, &mut stored).unwrap();
    let stored: Vec<u8> = stored.into_iter().flat_map(u16::to_le_bytes).collect();
    let all = FeatureRows::load(&dataset, u64::MAX).unwrap();
    assert_eq!(holder.device_slots(&format), 100);
    for slots in [0, 60, 100, 250u32] {
        let held = holder.hold(&Hold { slots: slots as u64, format: &format }).unwrap().unwrap();
        assert_eq!(held.device_slots(), slots.min(100) as u64);
        for first in (0..slots).step_by(64) {
            let rows = first as usize * row_bytes..(first + 64).min(slots) as usize * row_bytes;
            held.fill(first as u64, &stored[rows]).unwrap();
        }
        for fresh in [0, 1, 50] {
            // Node `slots + i` is the batch's fresh row `i`, so words are nodes.
            let words: Vec<u32> = (0..700).map(|at| at * at % (slots + fresh).max(1)).collect();
            let words = if slots + fresh == 0 { &[][..] } else { &words };
            let own = &stored[slots as usize * row_bytes..][..fresh as usize * row_bytes];
            let mut memory = held.fresh(own.len());
            memory.bytes_mut().copy_from_slice(own);
            let rows = held.batch(words, memory);
            let landed = learner.backend().land(rows.0, dim);
            let mut found = vec![f32::NAN; words.len() * dim];
            if !found.is_empty() {
                learner.read(&landed, 0, &mut found).unwrap();
            }
            let nodes: Vec<NodeId> = words.iter().map(|word| NodeId(*word as u64)).collect();
            let mut expected = vec![0.0; found.len()];
            all.gather(&nodes, &mut expected).unwrap();
            assert!(found == expected, "{slots} slots, {fresh} fresh rows");
        }
    }
}
