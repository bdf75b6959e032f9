//! Whole runs on small graphs: exact whatever carries them, stopped anywhere, inside their memory.

use crate::common::{Bench, StopAfter, batch_lines, finished, result};
use esker_nn::{CpuBackend, Degree, Kind, ModelConfig, NormKind, Schedule};
use esker_sample::{Direction, Fanout, Form};
use esker_strategies::StrategyKind;
use esker_train::{
    EpochRecord, EvaluationMode, MetricName, OpenRun, Outcome, RunConfig, RunDirectory, SplitName, Summary,
    TrainError, Trainer, evaluate_run, predict,
};
use esker_types::NodeId;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

fn train(config: &RunConfig, out: &Path) -> Summary {
    finished(
        Trainer::create(CpuBackend::new(), config.clone(), out)
            .unwrap()
            .run(&mut StopAfter(u64::MAX))
            .unwrap(),
    )
}

fn load(
    out: &Path,
    memory: Option<u64>,
    mode: Option<EvaluationMode>,
) -> Result<OpenRun<CpuBackend>, TrainError> {
    let (directory, config) = RunDirectory::open(out)?;
    let memory = memory.unwrap_or(config.memory);
    OpenRun::load(CpuBackend::new(), &directory, RunConfig { memory, ..config.to_infer(mode) })
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
        (StrategyKind::Outre, 2, 160 << 20),
        (StrategyKind::DiskGnn, 1, 1 << 30),
        (StrategyKind::DiskGnn, 4, 160 << 20),
        (StrategyKind::Esker, 1, 1 << 30),
        (StrategyKind::Esker, 2, 1 << 30),
        (StrategyKind::Esker, 4, 160 << 20),
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
fn strategies_train_by_groups_to_the_same_bit_and_epochs_differ_in_batches() {
    let bench = Bench::new();
    let config = RunConfig { epochs: 5, ..bench.by_groups() };
    let mut seen = Vec::new();
    for strategy in StrategyKind::ALL.into_iter().filter(|kind| *kind != StrategyKind::Marius) {
        let out = bench.path(&format!("run-{strategy}"));
        let summary = train(&RunConfig { strategy, superbatch: Some(7), ..config.clone() }, &out);
        let counts: BTreeSet<u64> = summary.epochs.iter().map(|epoch| epoch.batches).collect();
        assert!(counts.len() > 1, "{counts:?}");
        seen.push(result(&summary, &out));
    }
    assert!(
        seen.iter().all(|one| *one == seen[0]),
        "{:?}",
        seen.iter().map(|one| &one.0).collect::<Vec<_>>()
    );
    // Other groups are other batches.
    let other = RunConfig { group: Some(4), ..config.clone() };
    assert_ne!(train(&other, &bench.path("other")).loss_digest, seen[0].0);
    // Repeated epochs have the batches of those that they repeat, and as many.
    let mut repeated = Vec::new();
    for strategy in [StrategyKind::Memory, StrategyKind::DiskGnn, StrategyKind::Esker] {
        let out = bench.path(&format!("repeated-{strategy}"));
        let config = RunConfig { strategy, epochs_sampled: Some(2), ..config.clone() };
        let summary = train(&config, &out);
        let counts: Vec<u64> = summary.epochs.iter().map(|epoch| epoch.batches).collect();
        assert_eq!(counts[2..], counts[..3]);
        repeated.push(result(&summary, &out));
    }
    assert!(repeated.iter().all(|one| *one == repeated[0]) && repeated[0].0 != seen[0].0);
}

#[test]
fn runs_by_groups_resume_with_the_same_partitions_only() {
    let bench = Bench::new();
    let config = bench.by_groups();
    check_resume_of(&bench, config.clone(), 9);
    let mut trainer = Trainer::create(CpuBackend::new(), config.clone(), &bench.path("run")).unwrap();
    trainer = match trainer.run(&mut StopAfter(4)).unwrap() {
        Outcome::Stopped(_) => {
            Trainer::resume(CpuBackend::new(), config.clone(), &bench.path("run")).unwrap()
        }
        Outcome::Finished(_) => panic!("it ended before it was stopped"),
    };
    drop(trainer);
    let mut chosen = config.partitioning.clone().unwrap();
    chosen.digest = "0".repeat(16);
    let other = RunConfig { partitioning: Some(chosen), ..config.clone() };
    let said =
        Trainer::resume(CpuBackend::new(), other.clone(), &bench.path("run")).err().unwrap().to_string();
    assert!(said.contains("partitioning.digest"), "{said}");
    let said = Trainer::create(CpuBackend::new(), other, &bench.path("new")).err().unwrap().to_string();
    assert!(said.contains("`thirteen` has changed"), "{said}");
    let none = RunConfig { partitioning: None, ..config.clone() };
    let said = Trainer::create(CpuBackend::new(), none, &bench.path("new")).err().unwrap().to_string();
    assert!(said.contains("esker partition"), "{said}");
    let dropping = RunConfig { drop_last: true, batch: 300, ..config };
    let said = Trainer::create(CpuBackend::new(), dropping, &bench.path("new")).err().unwrap().to_string();
    assert!(said.contains("5 groups"), "{said}");
}

#[test]
fn predicting_needs_no_partitions() {
    let bench = Bench::new();
    let out = bench.path("run");
    train(&RunConfig { epochs: 1, ..bench.by_groups() }, &out);
    std::fs::remove_dir_all(bench.path("g").join("derived/partitions-thirteen")).unwrap();
    assert!(load(&out, None, None).is_ok());
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

/// Stopped after every k-th batch and resumed, whatever the model keeps from batch to batch.
fn check_resume(change: impl Fn(&mut RunConfig)) {
    let bench = Bench::new();
    let mut config = bench.config();
    change(&mut config);
    check_resume_of(&bench, config, 4);
}

/// Stopped after every so many batches.
fn check_resume_of(bench: &Bench, config: RunConfig, every: u64) {
    let whole = train(&config, &bench.path("whole"));
    let expected = result(&whole, &bench.path("whole"));
    let out = bench.path("stopped");
    let mut trainer = Trainer::create(CpuBackend::new(), config.clone(), &out).unwrap();
    let mut stops = 0;
    let summary = loop {
        match trainer.run(&mut StopAfter(every)).unwrap() {
            Outcome::Finished(summary) => break *summary,
            Outcome::Stopped(_) => stops += 1,
        }
        // Another strategy and other threads may go on with it.
        let others = [StrategyKind::Mmap, StrategyKind::Ginex, StrategyKind::DiskGnn, StrategyKind::Esker];
        let strategy = others[stops % others.len()];
        let config = RunConfig { strategy, threads: 1 + stops % 3, superbatch: Some(3), ..config.clone() };
        trainer = Trainer::resume(CpuBackend::new(), config, &out).unwrap();
    };
    assert!(stops >= 4, "{stops}");
    assert!(result(&summary, &out) == expected);
    assert_eq!(summary.epochs.len(), whole.epochs.len());
    let losses =
        |summary: &Summary| summary.epochs.iter().map(|epoch| epoch.loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(losses(&summary), losses(&whole));
    assert_eq!(batch_lines(&out), batch_lines(&bench.path("whole")));
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
fn a_run_that_is_refused_while_it_prepares_leaves_nothing() {
    let bench = Bench::new();
    let (strategy, neighbour_cache) = (StrategyKind::Ginex, Some(1 << 40));
    let config = RunConfig { strategy, neighbour_cache, ..bench.config() };
    let said = Trainer::create(CpuBackend::new(), config, &bench.path("runs/refused")).err().unwrap();
    assert!(said.to_string().contains("--neighbour-cache"), "{said}");
    assert!(!bench.path("runs").exists());
}

#[test]
fn a_run_that_is_stopped_while_it_prepares_is_resumed() {
    let bench = Bench::new();
    let (out, config) = (bench.path("run"), RunConfig { strategy: StrategyKind::DiskGnn, ..bench.config() });
    let control = esker_train::RunControl::default();
    control.stop.ask();
    let stopped = Trainer::create_watched(CpuBackend::new(), config, &out, control).err().unwrap();
    assert_eq!(stopped.kind(), esker_types::ErrorKind::Stopped, "{stopped}");
    let (directory, before) = RunDirectory::open(&out).unwrap();
    assert!(!directory.has_begun() && before.epochs_sampled.is_none());
    let trainer = Trainer::resume(CpuBackend::new(), before, &out).unwrap();
    let summary = finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap());
    let (directory, after) = RunDirectory::open(&out).unwrap();
    assert!(directory.has_begun() && after.epochs_sampled.is_some());
    assert_eq!(summary.loss_digest, train(&bench.config(), &bench.path("whole")).loss_digest);
}

#[test]
fn a_resumed_run_must_be_the_same_run() {
    let bench = Bench::new();
    let out = bench.path("run");
    train(&bench.config(), &out);
    let said = Trainer::create(CpuBackend::new(), bench.config(), &out).err().unwrap().to_string();
    assert!(said.contains("holds a run already") && said.contains("--resume"), "{said}");
    let other = RunConfig { lr: 0.02, ..bench.config() };
    let said = Trainer::resume(CpuBackend::new(), other, &out).err().unwrap().to_string();
    assert!(said.contains("lr is 0.02, was 0.01"), "{said}");
    // A run that has ended ends again, with the same result.
    let before = std::fs::read_to_string(out.join("last.safetensors").with_extension("x")).is_err();
    let again = finished(
        Trainer::resume(CpuBackend::new(), bench.config(), &out)
            .unwrap()
            .run(&mut StopAfter(u64::MAX))
            .unwrap(),
    );
    assert!(before && again.epochs.len() == 3);
    let nowhere =
        Trainer::resume(CpuBackend::new(), bench.config(), &bench.path("nowhere")).err().unwrap().to_string();
    assert!(nowhere.contains("does not hold a run"), "{nowhere}");
}

#[test]
fn a_budget_is_refused_with_the_arithmetic_to_the_byte() {
    let bench = Bench::new();
    for eval in [EvaluationMode::Sampled, EvaluationMode::Full] {
        let tiny = RunConfig { memory: 1 << 20, eval, final_eval: eval, ..bench.config() };
        let Err(TrainError::Memory { needed, table, .. }) =
            OpenRun::new(CpuBackend::new(), tiny.clone(), bench.path("s"))
        else {
            panic!("refused")
        };
        assert_eq!(needed.0, table.total());
        let short = RunConfig { memory: needed.0 - 1, ..tiny.clone() };
        let said = OpenRun::new(CpuBackend::new(), short, bench.path("s")).err().unwrap().to_string();
        assert!(
            said.contains("topology") && said.contains("training step") && said.contains("total"),
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
        let Err(TrainError::Memory { needed, table, .. }) =
            OpenRun::new(CpuBackend::new(), tiny.clone(), bench.path("s"))
        else {
            panic!("refused")
        };
        assert_eq!(needed.0, table.total());
        assert!(table.lines.iter().any(|line| line.what.contains("offsets of neighbours")), "{table}");
        assert!(
            OpenRun::new(
                CpuBackend::new(),
                RunConfig { memory: needed.0 - 1, ..tiny.clone() },
                bench.path("s")
            )
            .is_err()
        );
        assert!(!bench.path("s").exists(), "a refused run leaves nothing behind");
        for more in [0, 40 << 20] {
            let out = bench.path(&format!("just-{eval:?}-{more}"));
            let summary = train(&RunConfig { memory: needed.0 + more, ..tiny.clone() }, &out);
            let reused = summary.memory.lines.iter().find(|line| line.what.contains("freed matrices"));
            let spare = more - reused.map_or(0, |line| line.bytes);
            assert_eq!(
                summary.memory.total() + if eval == EvaluationMode::Full { spare / 4 } else { 0 },
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
        let mut run = load(&out, Some(memory), Some(mode)).unwrap();
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
    let smallest = match load(&out, Some(1), Some(EvaluationMode::Full)) {
        Err(TrainError::Memory { needed, .. }) => needed.0,
        other => panic!("{:?}", other.err()),
    };
    let (_, tight) = collect(smallest, EvaluationMode::Full, None);
    assert!(tight == roomy, "blocks do not change a bit");
    assert!(std::fs::read_dir(out.join("scratch")).map_or(0, Iterator::count) == 0, "nothing stays behind");
    let some: Arc<Vec<NodeId>> = Arc::new([5, 17, 1234, 2999].map(NodeId).to_vec());
    let (ids, of_some) = collect(smallest, EvaluationMode::Full, Some(&some));
    assert_eq!(ids, *some);
    let accessed: Vec<f32> = some.iter().flat_map(|node| roomy[node.index() * 5..][..5].to_vec()).collect();
    assert!(of_some == accessed);
    let mut run = load(&out, None, None).unwrap();
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
        (Kind::Gcn, Form::Dense, Degree::Unbiased),
        (Kind::Gcn, Form::Layered, Degree::Unbiased),
        (Kind::Gcn, Form::Shadow, Degree::Unbiased),
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
    let mut run = load(&bench.path("run"), None, None).unwrap();
    let again = evaluate_run(&mut run, SplitName::Valid, EvaluationMode::Sampled).unwrap().unwrap();
    assert_eq!(again.accuracy, Some(accuracy(&summary.epochs[best])));
}

#[test]
fn accuracy_and_loss_together_keep_a_model_that_is_no_worse_in_either() {
    let bench = Bench::new();
    let (metric, patience) = (MetricName::AccuracyAndLoss, 3);
    let config = RunConfig { lr: 0.05, epochs: 60, patience, metric, ..bench.config() };
    let summary = train(&config, &bench.path("run"));
    let (mut most, mut least, mut kept, mut without) = (0.0, f64::INFINITY, 0, 0);
    for epoch in &summary.epochs {
        assert!(without < patience, "epoch {} is one too many", epoch.epoch);
        let valid = epoch.valid.unwrap();
        let (right, loss) = (valid.accuracy.unwrap(), valid.loss);
        if right >= most && loss <= least {
            kept = epoch.epoch;
        }
        without = if right >= most || loss <= least { 0 } else { without + 1 };
        (most, least) = (f64::max(most, right), f64::min(least, loss));
    }
    assert_eq!((summary.best_epoch, without), (Some(kept), patience), "{}", summary.ended);
    assert_eq!(summary.valid, summary.epochs[kept as usize].valid);
    // Stopped after every few batches and resumed, it goes by what it saw before.
    let out = bench.path("stopped");
    let mut outcome =
        Trainer::create(CpuBackend::new(), config.clone(), &out).unwrap().run(&mut StopAfter(7)).unwrap();
    while matches!(outcome, Outcome::Stopped(_)) {
        outcome =
            Trainer::resume(CpuBackend::new(), config.clone(), &out).unwrap().run(&mut StopAfter(7)).unwrap();
    }
    let again = finished(outcome);
    assert_eq!((again.best_epoch, again.epochs.len()), (summary.best_epoch, summary.epochs.len()));
    assert_eq!(again.loss_digest, summary.loss_digest);
}
