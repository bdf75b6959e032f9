//! Whole runs on small graphs: exact whatever carries them, stopped anywhere, inside their memory.

use esker_import::Job as ImportJob;
use esker_import::generate::{Shape, generate};
use esker_nn::{Degree, Kind, ModelConfig, NormKind, OptimizerConfig, Schedule};
use esker_sample::{Direction, Fanout, Form};
use esker_store::Dataset;
use esker_strategies::StrategyKind;
use esker_train::{
    BatchProgress, Checkpoint, EpochRecord, EvaluationMode, MetricName, OpenRun, OrderName, Outcome,
    RunConfig, SplitName, Summary, TrainError, Trainer, Watcher, evaluate_run, predict,
};
use esker_types::{Budget, Dtype, NodeId, Silent};
use std::path::{Path, PathBuf};
use std::sync::Arc;

struct Bench {
    directory: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
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

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn config(&self) -> RunConfig {
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
            device: "cpu".into(),
            checkpoint_batches: 0,
            checkpoint_seconds: 0,
        }
    }
}

/// Stops after so many batches.
struct StopAfter(u64);

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

fn finished(outcome: Outcome) -> Summary {
    match outcome {
        Outcome::Finished(summary) => *summary,
        Outcome::Stopped(at) => panic!("stopped at {at:?}"),
    }
}

fn train(config: &RunConfig, out: &Path) -> Summary {
    finished(Trainer::create(config.clone(), out).unwrap().run(&mut StopAfter(u64::MAX)).unwrap())
}

/// What must not depend on time or memory.
fn result(summary: &Summary, out: &Path) -> (String, Option<f64>, Option<f64>, Checkpoint) {
    let accuracy = |metrics: Option<esker_train::Metrics>| metrics.and_then(|metrics| metrics.accuracy);
    let weights = Checkpoint::read(&out.join("last.safetensors")).unwrap();
    (summary.loss_digest.clone(), accuracy(summary.test), accuracy(summary.valid), weights)
}

#[test]
fn strategies_threads_and_memory_do_not_change_a_bit() {
    let bench = Bench::new();
    let mut seen = Vec::new();
    for (number, (strategy, threads, memory)) in [
        (StrategyKind::Memory, 1, 1 << 30),
        (StrategyKind::Memory, 2, 1 << 30),
        (StrategyKind::Memory, 4, 1 << 30),
        (StrategyKind::Mmap, 1, 1 << 30),
        (StrategyKind::Mmap, 4, 90 << 20),
        (StrategyKind::Ginex, 1, 1 << 30),
        (StrategyKind::Ginex, 4, 160 << 20),
    ]
    .into_iter()
    .enumerate()
    {
        let config = RunConfig { strategy, threads, memory, ..bench.config() };
        let out = bench.path(&format!("run-{number}"));
        seen.push(result(&train(&config, &out), &out));
    }
    assert!(
        seen.iter().all(|one| *one == seen[0]),
        "{:?}",
        seen.iter().map(|one| &one.0).collect::<Vec<_>>()
    );
    let other = RunConfig { seed: 8, ..bench.config() };
    assert_ne!(train(&other, &bench.path("other")).loss_digest, seen[0].0);
}

#[test]
fn a_model_learns_what_was_planted() {
    let bench = Bench::new();
    let config = RunConfig { epochs: 8, ..bench.config() };
    let summary = train(&config, &bench.path("run"));
    let (first, last) = (&summary.epochs[0], &summary.epochs[7]);
    assert!(last.loss < first.loss * 0.7, "{} {}", first.loss, last.loss);
    assert!(summary.test.unwrap().accuracy.unwrap() > 0.7, "{:?}", summary.test);
    // A model without neighbours sees less of it.
    let mlp = ModelConfig { kind: Kind::Mlp, ..config.model.clone() };
    let alone = RunConfig { model: mlp, fanout: vec![], eval_fanout: vec![], ..config };
    let alone = train(&alone, &bench.path("mlp"));
    assert!(alone.test.unwrap().accuracy < summary.test.unwrap().accuracy);
}

/// Stopped behind every k-th batch and resumed, whatever the model keeps from batch to batch.
fn check_resume(change: impl Fn(&mut RunConfig)) {
    let bench = Bench::new();
    let mut config = bench.config();
    change(&mut config);
    let whole = train(&config, &bench.path("whole"));
    let expected = result(&whole, &bench.path("whole"));
    let out = bench.path("stopped");
    let mut trainer = Trainer::create(config.clone(), &out).unwrap();
    let mut stops = 0;
    let summary = loop {
        match trainer.run(&mut StopAfter(4)).unwrap() {
            Outcome::Finished(summary) => break *summary,
            Outcome::Stopped(_) => stops += 1,
        }
        // Another strategy and other threads may go on with it.
        let strategy = [StrategyKind::Mmap, StrategyKind::Ginex, StrategyKind::Ginex][stops % 3];
        let config = RunConfig { strategy, threads: 1 + stops % 3, superbatch: Some(3), ..config.clone() };
        trainer = Trainer::resume(config, &out).unwrap();
    };
    assert!(stops >= 4, "{stops}");
    assert!(result(&summary, &out) == expected);
    assert_eq!(summary.epochs.len(), whole.epochs.len());
    let losses =
        |summary: &Summary| summary.epochs.iter().map(|epoch| epoch.loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(losses(&summary), losses(&whole));
    let batches = |out: &Path| {
        let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        text.lines()
            .filter(|line| line.contains("\"kind\":\"batch\""))
            .map(str::to_string)
            .collect::<Vec<_>>()
    };
    assert_eq!(batches(&out), batches(&bench.path("whole")));
}

#[test]
fn a_stopped_run_equals_an_uninterrupted_one() {
    check_resume(|_| {});
}

#[test]
fn batch_norm_momentum_schedules_and_clipping_survive_a_stop() {
    check_resume(|config| {
        config.model.norm = NormKind::Batch;
        config.optimizer.kind = esker_nn::OptimizerKind::Sgd;
        config.optimizer.momentum = 0.9;
        config.optimizer.clip_norm = Some(1.0);
        config.schedule = Schedule::Cosine { warmup: 3, steps: 18, least: 0.1 };
    });
}

#[test]
fn a_resumed_run_must_be_the_same_run() {
    let bench = Bench::new();
    let out = bench.path("run");
    train(&bench.config(), &out);
    let said = Trainer::create(bench.config(), &out).err().unwrap().to_string();
    assert!(said.contains("holds a run already") && said.contains("--resume"), "{said}");
    let other = RunConfig { lr: 0.02, ..bench.config() };
    let said = Trainer::resume(other, &out).err().unwrap().to_string();
    assert!(said.contains("lr is 0.02, was 0.01"), "{said}");
    // A run that has ended ends again, with the same result.
    let before = std::fs::read_to_string(out.join("last.safetensors").with_extension("x")).is_err();
    let again =
        finished(Trainer::resume(bench.config(), &out).unwrap().run(&mut StopAfter(u64::MAX)).unwrap());
    assert!(before && again.epochs.len() == 3);
    let nowhere = Trainer::resume(bench.config(), &bench.path("nowhere")).err().unwrap().to_string();
    assert!(nowhere.contains("holds no run"), "{nowhere}");
}

#[test]
fn a_budget_is_refused_with_the_arithmetic_to_the_byte() {
    let bench = Bench::new();
    for eval in [EvaluationMode::Sampled, EvaluationMode::Full] {
        let tiny = RunConfig { memory: 1 << 20, eval, final_eval: eval, ..bench.config() };
        let Err(TrainError::Memory { needed, table, .. }) = OpenRun::new(tiny.clone(), bench.path("s"))
        else {
            panic!("refused")
        };
        assert_eq!(needed.0, table.total());
        let short = RunConfig { memory: needed.0 - 1, ..tiny.clone() };
        let said = OpenRun::new(short, bench.path("s")).err().unwrap().to_string();
        assert!(
            said.contains("topology") && said.contains("training step") && said.contains("together"),
            "{said}"
        );
        let out = bench.path(&format!("just-{eval:?}"));
        let just = RunConfig { memory: needed.0, epochs: 1, ..tiny };
        let summary = train(&just, &out);
        assert_eq!(summary.memory.total(), needed.0);
    }
    assert!(!bench.path("s").exists(), "a refused run leaves nothing behind");
}

#[test]
fn caches_superbatches_and_seeds_of_ginex_do_not_change_a_bit() {
    let bench = Bench::new();
    for (number, (seed, superbatch, rows, lists)) in
        [(1, 1, 0, 0), (2, 4, 1, 30_000), (3, 6, 3000, 1 << 20), (4, 100, 500, 0)].into_iter().enumerate()
    {
        let config = RunConfig { seed, ..bench.config() };
        let out = bench.path(&format!("memory-{number}"));
        let expected = result(&train(&config, &out), &out);
        let config = RunConfig {
            strategy: StrategyKind::Ginex,
            superbatch: Some(superbatch),
            feature_cache: Some(rows * 24),
            neighbour_cache: Some(lists),
            ..config
        };
        let out = bench.path(&format!("ginex-{number}"));
        let summary = train(&config, &out);
        assert!(
            result(&summary, &out) == expected,
            "seed {seed}, {superbatch} batches, {rows} rows, {lists} bytes"
        );
        let epoch = &summary.epochs[0];
        assert!(epoch.reads > 0 && epoch.phases.contains_key("switch"), "{epoch:?}");
        assert_eq!(epoch.hit_ratio["host"] > 0.0, rows > 0 && superbatch > 1, "{epoch:?}");
        assert_eq!(std::fs::read_dir(out.join("scratch/superbatches")).unwrap().count(), 0, "no trace stays");
    }
}

#[test]
fn ginex_keeps_the_smallest_budget_and_refuses_a_byte_less() {
    let bench = Bench::new();
    for eval in [EvaluationMode::Sampled, EvaluationMode::Full] {
        let tiny = RunConfig {
            strategy: StrategyKind::Ginex,
            memory: 1 << 20,
            eval,
            final_eval: eval,
            epochs: 1,
            ..bench.config()
        };
        let Err(TrainError::Memory { needed, table, .. }) = OpenRun::new(tiny.clone(), bench.path("s"))
        else {
            panic!("refused")
        };
        assert_eq!(needed.0, table.total());
        assert!(table.lines.iter().any(|line| line.what.contains("offsets of neighbour lists")), "{table}");
        assert!(OpenRun::new(RunConfig { memory: needed.0 - 1, ..tiny.clone() }, bench.path("s")).is_err());
        assert!(!bench.path("s").exists(), "a refused run leaves nothing behind");
        for more in [0, 40 << 20] {
            let out = bench.path(&format!("just-{eval:?}-{more}"));
            let summary = train(&RunConfig { memory: needed.0 + more, ..tiny.clone() }, &out);
            assert_eq!(
                summary.memory.total() + if eval == EvaluationMode::Full { more / 4 } else { 0 },
                needed.0 + more
            );
        }
    }
}

/// Inference over the whole graph, against a naive one: all neighbours of all neighbours as one batch.
fn check_whole(change: impl Fn(&mut RunConfig)) {
    let bench = Bench::new();
    let mut config = RunConfig {
        epochs: 1,
        eval: EvaluationMode::Full,
        final_eval: EvaluationMode::Full,
        ..bench.config()
    };
    change(&mut config);
    let layers = config.model.layers;
    let hops = if config.model.kind == Kind::Mlp { 0 } else { layers };
    let out = bench.path("run");
    train(&config, &out);
    let collect = |memory: u64, mode: EvaluationMode, nodes: Option<&Arc<Vec<NodeId>>>| {
        let mut run = OpenRun::load(&out, Some(memory), Some(mode)).unwrap();
        run.config.eval_fanout = vec![Fanout::All; hops];
        let (mut ids, mut values) = (Vec::new(), Vec::new());
        predict(&mut run, nodes, mode, &mut |nodes, _, found| {
            ids.extend_from_slice(nodes);
            values.extend_from_slice(found);
            Ok(())
        })
        .unwrap();
        (ids, values)
    };
    let (ids, expected) = collect(4 << 30, EvaluationMode::Sampled, None);
    assert!(ids.iter().map(|node| node.0).eq(0..3000));
    let near = |found: &[f32], expected: &[f32]| {
        assert_eq!(found.len(), expected.len());
        let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 2e-5, "{worst}");
    };
    let (ids, roomy) = collect(4 << 30, EvaluationMode::Full, None);
    assert!(ids.iter().map(|node| node.0).eq(0..3000));
    near(&roomy, &expected);
    // Under the smallest budget hidden rows go to files, and blocks are small: the same to the bit.
    let smallest = match OpenRun::load(&out, Some(1), Some(EvaluationMode::Full)) {
        Err(TrainError::Memory { needed, .. }) => needed.0,
        other => panic!("{:?}", other.err()),
    };
    let (_, tight) = collect(smallest, EvaluationMode::Full, None);
    assert!(tight == roomy, "blocks do not change a bit");
    assert!(std::fs::read_dir(out.join("scratch")).map_or(0, Iterator::count) == 0, "nothing stays behind");
    let some: Arc<Vec<NodeId>> = Arc::new([5, 17, 1234, 2999].map(NodeId).to_vec());
    let (ids, of_some) = collect(smallest, EvaluationMode::Full, Some(&some));
    assert_eq!(ids, *some);
    let wanted: Vec<f32> = some.iter().flat_map(|node| roomy[node.index() * 5..][..5].to_vec()).collect();
    assert!(of_some == wanted);
    let mut run = OpenRun::load(&out, None, None).unwrap();
    let metrics = evaluate_run(&mut run, SplitName::Test, EvaluationMode::Full).unwrap().unwrap();
    assert_eq!(metrics.nodes, 300);
}

#[test]
fn whole_graph_inference_equals_naive_sage() {
    check_whole(|_| {});
}

#[test]
fn whole_graph_inference_equals_naive_gcn_in_both_directions() {
    check_whole(|config| {
        config.model.kind = Kind::Gcn;
        config.direction = Direction::Both;
    });
}

#[test]
fn whole_graph_inference_equals_naive_gat_with_norm() {
    check_whole(|config| {
        config.model.kind = Kind::Gat;
        config.model.norm = NormKind::Batch;
        config.model.layers = 3;
        config.model.output_heads = Some(1);
        (config.fanout, config.eval_fanout) = (vec![Fanout::AtMost(3); 3], vec![Fanout::AtMost(3); 3]);
    });
}

#[test]
fn whole_graph_inference_equals_naive_mlp() {
    check_whole(|config| {
        config.model.kind = Kind::Mlp;
        (config.fanout, config.eval_fanout) = (vec![], vec![]);
    });
}

#[test]
fn every_form_and_kind_trains() {
    let bench = Bench::new();
    for (number, (kind, form, degree)) in [
        (Kind::Sage, Form::Layered, Degree::Whole),
        (Kind::Sage, Form::Shadow, Degree::Whole),
        (Kind::Gcn, Form::Dense, Degree::Sampled),
        (Kind::Gcn, Form::Shadow, Degree::Whole),
        (Kind::Gin, Form::Dense, Degree::Whole),
        (Kind::Gat, Form::Layered, Degree::Whole),
    ]
    .into_iter()
    .enumerate()
    {
        let model = ModelConfig { kind, gcn_degree: degree, input_dropout: 0.1, ..bench.config().model };
        let config = RunConfig { model, form, epochs: 2, ..bench.config() };
        let summary = train(&config, &bench.path(&format!("run-{number}")));
        assert!(summary.epochs[1].loss < summary.epochs[0].loss, "{kind:?} {form:?}");
    }
}

#[test]
fn patience_ends_a_run_and_the_best_model_is_kept() {
    let bench = Bench::new();
    let config = RunConfig { lr: 0.05, epochs: 60, patience: 3, ..bench.config() };
    let summary = train(&config, &bench.path("run"));
    assert!(summary.epochs.len() < 60 && summary.ended.contains("3 evaluations"), "{}", summary.ended);
    let best = summary.best_epoch.unwrap() as usize;
    assert_eq!(summary.epochs.len(), best + 4);
    let accuracy = |epoch: &EpochRecord| epoch.valid.unwrap().accuracy.unwrap();
    assert!(summary.epochs.iter().all(|epoch| accuracy(epoch) <= accuracy(&summary.epochs[best])));
    let mut run = OpenRun::load(&bench.path("run"), None, None).unwrap();
    let again = evaluate_run(&mut run, SplitName::Valid, EvaluationMode::Sampled).unwrap().unwrap();
    assert_eq!(again.accuracy, Some(accuracy(&summary.epochs[best])));
}
