//! Runs with a history of hidden rows: the same losses whatever brings the rows, stopped anywhere; without a history,
//! those of a run that never had one.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod common;

use common::{Bench, StopAfter, batch_lines, finished, result};
use esker_nn::{CpuBackend, Kind, NormKind};
use esker_sample::{Fanout, Form};
use esker_strategies::{RunPosition, StrategyKind};
use esker_train::{
    EvaluationMode, HistoryConfig, OpenRun, Outcome, RunConfig, RunDirectory, SplitName, Summary, TrainError,
    Trainer, evaluate_run,
};
use esker_types::NodeId;
use std::collections::HashMap;
use std::path::Path;

fn train(config: &RunConfig, out: &Path) -> Summary {
    let trainer = Trainer::create(CpuBackend::new(), config.clone(), out).unwrap();
    finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap())
}

/// A run by groups with a history.
fn with_history(bench: &Bench, rows: u64, staleness: u32) -> RunConfig {
    let history = Some(HistoryConfig { staleness, ..HistoryConfig::new(rows) });
    RunConfig { history, ..bench.by_groups() }
}

fn layers(config: RunConfig, layers: usize) -> RunConfig {
    let fanout: Vec<Fanout> = [5, 3, 2, 2].into_iter().take(layers).map(Fanout::AtMost).collect();
    let mut config = RunConfig { fanout: fanout.clone(), eval_fanout: fanout, ..config };
    config.model.layers = layers;
    config
}

fn pulls(summary: &Summary) -> u64 {
    summary.epochs.iter().filter_map(|epoch| epoch.history).map(|history| history.pulls).sum()
}

fn check_equal(seen: &[(String, impl PartialEq)]) {
    let first = &seen[0];
    let others: Vec<&String> = seen.iter().filter(|one| one.1 != first.1).map(|one| &one.0).collect();
    assert!(others.is_empty(), "{} differs from {others:?}", first.0);
}

#[test]
fn strategies_threads_budgets_and_superbatches_pull_the_same() {
    let bench = Bench::new();
    for (rows, staleness) in [(3000, 100), (900, 7)] {
        let mut seen = Vec::new();
        for (strategy, threads, memory, superbatch) in [
            (StrategyKind::Memory, 1, 1 << 30, 1),
            (StrategyKind::Memory, 4, 1 << 30, 1),
            (StrategyKind::Mmap, 2, 1 << 30, 1),
            (StrategyKind::Outre, 1, 1 << 30, 100),
            (StrategyKind::Outre, 4, 170 << 20, 7),
            (StrategyKind::Outre, 2, 1 << 30, 1),
        ] {
            let name = format!("{strategy}-{threads}-{superbatch}-{rows}");
            let config = with_history(&bench, rows, staleness);
            let config = RunConfig { strategy, threads, memory, superbatch: Some(superbatch), ..config };
            let out = bench.path(&name);
            let summary = train(&config, &out);
            assert!(pulls(&summary) > 100, "{name}: {}", pulls(&summary));
            let ages = summary.epochs.iter().filter_map(|epoch| epoch.history);
            assert!(ages.clone().all(|history| history.mean_age < staleness as f64), "{name}");
            assert!(summary.epochs[0].redundancy > 1.0);
            seen.push((name, result(&summary, &out)));
        }
        check_equal(&seen);
    }
}

#[test]
fn kinds_depths_and_norms_pull_the_same_from_disk_and_from_memory() {
    let bench = Bench::new();
    let cases = [
        (Kind::Sage, 3, NormKind::Batch),
        (Kind::Gcn, 2, NormKind::None),
        (Kind::Gat, 2, NormKind::Layer),
        (Kind::Sage, 4, NormKind::None),
        (Kind::Gcn, 3, NormKind::Batch),
        (Kind::Gat, 3, NormKind::None),
        (Kind::Gin, 2, NormKind::None),
    ];
    for (kind, depth, norm) in cases {
        let mut config = layers(with_history(&bench, 1500, 30), depth);
        (config.model.kind, config.model.norm, config.epochs) = (kind, norm, 2);
        (config.model.heads, config.lr) = (4, 0.005);
        let mut seen = Vec::new();
        for strategy in [StrategyKind::Memory, StrategyKind::Outre] {
            let name = format!("{kind:?}-{depth}-{strategy}");
            let out = bench.path(&name);
            let summary = train(&RunConfig { strategy, ..config.clone() }, &out);
            assert!(pulls(&summary) > 100, "{name}");
            seen.push((name, result(&summary, &out)));
        }
        check_equal(&seen);
    }
}

#[test]
fn a_pulled_row_is_the_last_that_was_pushed_and_fresh() {
    let bench = Bench::new();
    let (backend, staleness) = (CpuBackend::new(), 6);
    for strategy in [StrategyKind::Memory, StrategyKind::Outre] {
        let config = RunConfig { strategy, superbatch: Some(5), ..with_history(&bench, 2000, staleness) };
        let mut run = OpenRun::new(backend.clone(), config, bench.path("scratch")).unwrap();
        run.leave_out_evaluation();
        let mut source = run.source(RunPosition::START, None).unwrap();
        let mut last: HashMap<NodeId, (u32, Vec<f32>)> = HashMap::new();
        let (mut number, mut pulled, mut oldest) = (0, 0, 0);
        while let Some(batch) = source.next().unwrap() {
            let sample = batch.blocks.sample().unwrap();
            let (first, ids) = (sample.pulled_nodes().start, sample.node_ids.clone());
            let node = |row: &u32| ids[(row + first) as usize];
            if let Some(pull) = &batch.exchange.pull {
                assert_eq!((pull.layer, pull.rows.len()), (1, sample.pulled as usize));
                let rows = pull.table.gather(&backend, &pull.slots);
                for (row, values) in pull.rows.iter().zip(rows.values().chunks_exact(24)) {
                    let (then, expected) = &last[&node(row)];
                    assert!(number - then < staleness && values == expected);
                    oldest = oldest.max(number - then);
                    pulled += 1;
                }
            }
            let pushed: Vec<NodeId> =
                batch.exchange.push.iter().flat_map(|push| &push.rows).map(node).collect();
            let (step, feedback) = run.step(batch).unwrap();
            step.wait().unwrap();
            if let Some(rows) = &feedback.pushed {
                for (node, values) in pushed.iter().zip(rows.rows.values().chunks_exact(24)) {
                    last.insert(*node, (number, values.to_vec()));
                }
            }
            source.apply(feedback).unwrap();
            number += 1;
        }
        assert!(pulled > 1000 && oldest == staleness - 1, "{strategy}: {pulled}, {oldest}");
    }
}

#[test]
fn without_rows_or_with_staleness_1_it_is_a_run_without_a_history() {
    let bench = Bench::new();
    let plain = bench.path("plain");
    let expected = result(&train(&bench.by_groups(), &plain), &plain);
    for (strategy, rows, staleness) in [
        (StrategyKind::Memory, 3000, 1),
        (StrategyKind::Outre, 3000, 1),
        (StrategyKind::Outre, 0, 100),
        (StrategyKind::Memory, 0, 100),
    ] {
        let config = RunConfig { strategy, ..with_history(&bench, rows, staleness) };
        let out = bench.path(&format!("{strategy}-{rows}"));
        let summary = train(&config, &out);
        assert!(result(&summary, &out) == expected, "{strategy} with {rows} rows, staleness {staleness}");
        assert!(summary.epochs[0].history.is_none());
        std::fs::remove_dir_all(&out).unwrap();
    }
    let out = bench.path("with");
    assert!(result(&train(&with_history(&bench, 3000, 100), &out), &out) != expected);
}

#[test]
fn a_history_saves_rows_and_still_learns() {
    let bench = Bench::new();
    let config = layers(RunConfig { epochs: 8, ..bench.by_groups() }, 3);
    let plain = train(&config, &bench.path("plain"));
    let history = Some(HistoryConfig::new(3000));
    let with = train(&RunConfig { history, ..config }, &bench.path("with"));
    let redundancy = |summary: &Summary| summary.epochs[7].redundancy;
    assert!(redundancy(&with) < 0.85 * redundancy(&plain), "{} {}", redundancy(&with), redundancy(&plain));
    let accuracy = |summary: &Summary| summary.test.unwrap().accuracy.unwrap();
    assert!(accuracy(&with) > accuracy(&plain) - 0.05, "{} {}", accuracy(&with), accuracy(&plain));
}

#[test]
fn a_stopped_run_continues_with_its_rows_and_stamps_with_any_strategy() {
    let bench = Bench::new();
    let config = RunConfig { checkpoint_batches: 3, ..with_history(&bench, 1500, 9) };
    let whole = train(&config, &bench.path("whole"));
    let expected = result(&whole, &bench.path("whole"));
    let (out, mut stops) = (bench.path("stopped"), 0);
    let mut trainer = Trainer::create(CpuBackend::new(), config.clone(), &out).unwrap();
    let summary = loop {
        match trainer.run(&mut StopAfter(5)).unwrap() {
            Outcome::Finished(summary) => break *summary,
            Outcome::Stopped(_) => stops += 1,
        }
        let strategy = [StrategyKind::Outre, StrategyKind::Outre, StrategyKind::Memory][stops % 3];
        let config = RunConfig { strategy, superbatch: Some(4), threads: 1 + stops % 3, ..config.clone() };
        trainer = Trainer::resume(CpuBackend::new(), config, &out).unwrap();
    };
    assert!(stops >= 4, "{stops}");
    assert!(result(&summary, &out) == expected);
    assert_eq!(batch_lines(&out), batch_lines(&bench.path("whole")));
    // The best model is kept without the history, which inference has no use for.
    let (directory, config) = RunDirectory::open(&out).unwrap();
    assert_eq!(std::fs::read_dir(directory.state_path()).unwrap().count(), 2);
    let mut run = OpenRun::load(CpuBackend::new(), &directory, config.to_infer(None)).unwrap();
    assert_eq!(evaluate_run(&mut run, SplitName::Test, EvaluationMode::Sampled).unwrap(), summary.test);
}

#[test]
fn the_nodes_of_a_run_are_frozen_and_another_run_takes_them() {
    let bench = Bench::new();
    let first = train(&with_history(&bench, 1000, 20), &bench.path("first"));
    let taken = HistoryConfig::of_run(&bench.path("first")).unwrap();
    assert_eq!((taken.rows, taken.staleness), (Some(1000), 20));
    let config =
        RunConfig { history: Some(taken.clone()), strategy: StrategyKind::Outre, ..bench.by_groups() };
    let again = train(&config, &bench.path("again"));
    assert_eq!(again.loss_digest, first.loss_digest);
    let nodes = |run: &str| std::fs::read(bench.path(run).join("history.nodes")).unwrap();
    assert_eq!(nodes("first"), nodes("again"));
    // Other nodes are refused, and so is what is not a set of nodes.
    let path = bench.path("first").join("history.nodes");
    train(&with_history(&bench, 999, 20), &bench.path("other"));
    std::fs::copy(bench.path("other").join("history.nodes"), &path).unwrap();
    let refused = Trainer::create(CpuBackend::new(), config.clone(), &bench.path("new")).err().unwrap();
    assert!(matches!(refused, TrainError::OtherHistory { .. }), "{refused}");
    std::fs::write(&path, b"ESKNODES").unwrap();
    let refused = Trainer::create(CpuBackend::new(), config, &bench.path("new")).err().unwrap().to_string();
    assert!(refused.contains("history.nodes"), "{refused}");
    train(&bench.config(), &bench.path("without"));
    let refused = HistoryConfig::of_run(&bench.path("without")).err().unwrap().to_string();
    assert!(refused.contains("--history-rows"), "{refused}");
}

#[test]
fn rows_that_pay_are_chosen_once_and_stay() {
    let bench = Bench::new();
    let config = RunConfig {
        strategy: StrategyKind::Outre,
        history: Some(HistoryConfig::chosen()),
        ..bench.by_groups()
    };
    let out = bench.path("chosen");
    let trainer = Trainer::create(CpuBackend::new(), config.clone(), &out).unwrap();
    assert!(matches!(trainer.run(&mut StopAfter(4)).unwrap(), Outcome::Stopped(_)));
    // With other memory, it would be divided otherwise.
    let resumed = RunConfig { memory: 300 << 20, ..config };
    let trainer = Trainer::resume(CpuBackend::new(), resumed, &out).unwrap();
    let summary = finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap());
    let split = summary.history_split.unwrap();
    let taken = HistoryConfig::of_run(&out).unwrap();
    assert_eq!(taken.rows, Some(split.history_rows));
    assert!(split.history_rows > 0 && split.predicted_seconds > 0.0 && split.beta > 0.0, "{split:?}");
    assert!(pulls(&summary) > 0);
    let twin = train(&RunConfig { history: Some(taken), ..bench.by_groups() }, &bench.path("memory"));
    assert_eq!(twin.loss_digest, summary.loss_digest);
}

#[test]
fn what_cannot_have_a_history_is_refused_with_the_remedy() {
    let bench = Bench::new();
    let refused = |config: RunConfig| {
        Trainer::create(CpuBackend::new(), config, &bench.path("refused")).err().unwrap().to_string()
    };
    let said = refused(with_history(&bench, 100, 0));
    assert!(said.contains("--staleness") && said.contains("at least 1"), "{said}");
    let said = refused(layers(with_history(&bench, 100, 10), 1));
    assert!(said.contains("--layers 2"), "{said}");
    for form in [Form::Shadow, Form::Layered] {
        let said = refused(RunConfig { form, ..with_history(&bench, 100, 10) });
        assert!(said.contains("--form dense"), "{said}");
    }
    for strategy in [StrategyKind::Ginex, StrategyKind::DiskGnn] {
        let said = refused(RunConfig { strategy, ..with_history(&bench, 100, 10) });
        assert!(said.contains("--strategy outre"), "{said}");
    }
    assert!(!bench.path("refused").exists());
}

#[test]
fn memory_of_a_history_is_in_the_table_and_kept() {
    let bench = Bench::new();
    for strategy in [StrategyKind::Memory, StrategyKind::Outre] {
        let config = RunConfig { strategy, epochs: 1, ..with_history(&bench, 2000, 10) };
        let tiny = RunConfig { memory: 1 << 20, ..config.clone() };
        let Err(TrainError::Memory { needed, table, .. }) =
            OpenRun::new(CpuBackend::new(), tiny, bench.path("s"))
        else {
            panic!("refused")
        };
        let line =
            |name: &str| table.lines.iter().find(|line| line.what == name).map_or(0, |line| line.bytes);
        assert_eq!(line("history: hidden rows"), 2000 * 24 * 4);
        assert!(line("history: nodes and stamps") > 3000 / 8 + 2000 * 4);
        let just = RunConfig { memory: needed.0, ..config };
        let summary = train(&just, &bench.path(&format!("just-{strategy}")));
        assert!(summary.memory.total() <= needed.0);
    }
}
