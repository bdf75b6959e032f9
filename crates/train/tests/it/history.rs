//! Runs with a history of hidden rows: the same losses whatever brings the rows, stopped anywhere; without a history,
//! those of a run that never had one.

use crate::common::{Bench, StopAfter, batch_lines, finished, result};
use crate::lagging::Lagging;
use esker_nn::{CpuBackend, Kind, NormKind};
use esker_sample::{Fanout, Form};
use esker_strategies::{CachePolicy, MemoryTable, NeighbourPolicy, RunPosition, StrategyKind, WorkCounts};
use esker_train::{
    EvaluationMode, HistoryConfig, HistoryHop, OpenRun, Outcome, RunConfig, RunDirectory, SplitName, Summary,
    TrainError, Trainer, evaluate_run,
};
use esker_types::{Dtype, NodeId};
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

/// A number as a history stores it.
fn stored(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::from_f32(value).to_f32(),
        _ => value,
    }
}

#[test]
fn hops_and_dtypes_pull_the_same_from_disk_and_from_memory() {
    let bench = Bench::new();
    let cases = [
        (Kind::Sage, 3, HistoryHop::Two, Dtype::F32, 9),
        (Kind::Gcn, 4, HistoryHop::All, Dtype::F16, 30),
        (Kind::Gat, 3, HistoryHop::All, Dtype::F16, 12),
        (Kind::Sage, 4, HistoryHop::Two, Dtype::F16, 25),
        (Kind::Gat, 2, HistoryHop::All, Dtype::F32, 7),
    ];
    let mut digests = std::collections::BTreeSet::new();
    for (number, (kind, depth, hop, dtype, staleness)) in cases.into_iter().enumerate() {
        let mut config = layers(with_history(&bench, 1500, staleness), depth);
        (config.model.kind, config.epochs, config.model.heads, config.lr) = (kind, 2, 4, 0.005);
        if let Some(history) = &mut config.history {
            (history.hop, history.dtype) = (hop, dtype);
        }
        let mut seen = Vec::new();
        for (strategy, threads, superbatch) in [
            (StrategyKind::Memory, 1, 1),
            (StrategyKind::Memory, 3, 1),
            (StrategyKind::Outre, 2, 1 + 5 * number as u64),
        ] {
            let name = format!("{number}-{strategy}-{threads}");
            let config = RunConfig { strategy, threads, superbatch: Some(superbatch), ..config.clone() };
            let out = bench.path(&name);
            let summary = train(&config, &out);
            assert!(pulls(&summary) > 100, "{name}");
            seen.push((name, result(&summary, &out)));
        }
        check_equal(&seen);
        digests.insert(seen[0].1.0.clone());
        // Another run with the same history takes hop and dtype, too.
        let taken = HistoryConfig::of_run(&bench.path(&format!("{number}-outre-2"))).unwrap();
        assert_eq!((taken.hop, taken.dtype), (hop, dtype));
    }
    assert_eq!(digests.len(), cases.len());
}

#[test]
fn hops_and_dtypes_change_what_is_trained() {
    let bench = Bench::new();
    let config = RunConfig { epochs: 1, ..layers(with_history(&bench, 3000, 50), 3) };
    let with = |hop: HistoryHop, dtype: Dtype| {
        let history = config.history.clone().map(|history| HistoryConfig { hop, dtype, ..history });
        let out = bench.path(&format!("{hop:?}-{dtype}"));
        (train(&RunConfig { history, ..config.clone() }, &out), out)
    };
    let (one, _) = with(HistoryHop::One, Dtype::F32);
    let (two, _) = with(HistoryHop::Two, Dtype::F32);
    let (all, _) = with(HistoryHop::All, Dtype::F32);
    let (half, _) = with(HistoryHop::One, Dtype::F16);
    assert_eq!(two.loss_digest, all.loss_digest, "with three layers, two hops are all");
    assert!(one.loss_digest != two.loss_digest && one.loss_digest != half.loss_digest);
    // What is pulled depends on stamps and not on values.
    assert_eq!(pulls(&one), pulls(&half));
    let near = |one: &Summary, other: &Summary| (one.epochs[0].loss - other.epochs[0].loss).abs() < 0.01;
    assert!(near(&one, &half), "{} {}", one.epochs[0].loss, half.epochs[0].loss);
    let saved = |summary: &Summary| summary.epochs[0].history.unwrap().saved;
    let (one, two) = (saved(&one), saved(&two));
    assert!(one.batches > 0 && one.batches == two.batches && one.without == two.without, "{one:?} {two:?}");
    // The second hop saves neighbours, rows and computed rows beyond the first.
    for of in
        [|work: &WorkCounts| work.rows, |work: &WorkCounts| work.edges, |work: &WorkCounts| work.computed]
    {
        assert!(of(&two.with) < of(&one.with) && of(&one.with) < of(&one.without), "{one:?} {two:?}");
    }
}

#[test]
fn a_pulled_row_is_the_last_that_was_pushed_and_fresh() {
    let bench = Bench::new();
    let (backend, staleness) = (CpuBackend::new(), 6);
    for (strategy, depth, hop, dtype) in [
        (StrategyKind::Memory, 2, HistoryHop::One, Dtype::F32),
        (StrategyKind::Outre, 2, HistoryHop::One, Dtype::F32),
        (StrategyKind::Memory, 3, HistoryHop::Two, Dtype::F16),
        (StrategyKind::Outre, 4, HistoryHop::All, Dtype::F32),
    ] {
        let mut config = RunConfig { strategy, superbatch: Some(5), ..with_history(&bench, 2000, staleness) };
        if let Some(history) = &mut config.history {
            (history.hop, history.dtype) = (hop, dtype);
        }
        let config = layers(config, depth);
        let mut run = OpenRun::new(backend.clone(), config, bench.path("scratch")).unwrap();
        run.leave_out_evaluation();
        let mut source = run.source(RunPosition::START, None).unwrap();
        let mut last: HashMap<(usize, NodeId), (u32, Vec<f32>)> = HashMap::new();
        let (mut number, mut pulled, mut oldest) = (0, vec![0; depth], 0);
        while let Some(batch) = source.next().unwrap() {
            let sample = batch.blocks.sample().unwrap();
            let ids = sample.node_ids.clone();
            let firsts: Vec<u32> = (0..depth).map(|layer| sample.layer(layer).inputs.start).collect();
            let node = |layer: usize, row: &u32| ids[(row + firsts[layer]) as usize];
            for pull in &batch.exchange.pulls {
                assert_eq!(pull.rows.len(), sample.pulled_at(depth - pull.layer) as usize);
                let rows = pull.table.gather(&backend, &pull.slots);
                for (row, values) in pull.rows.iter().zip(rows.values().chunks_exact(24)) {
                    let (then, expected) = &last[&(pull.layer, node(pull.layer, row))];
                    assert!(number - then < staleness && values == expected);
                    oldest = oldest.max(number - then);
                    pulled[pull.layer] += 1;
                }
            }
            let mut pushed: Vec<(usize, Vec<NodeId>)> = batch
                .exchange
                .pushes
                .iter()
                .map(|push| (push.layer, push.rows.iter().map(|row| node(push.layer, row)).collect()))
                .collect();
            pushed.sort_by_key(|(layer, _)| *layer);
            let (step, feedback) = run.step(batch).unwrap();
            step.wait().unwrap();
            // They come in the order of layers.
            assert_eq!(pushed.len(), feedback.pushed.len());
            for ((layer, nodes), rows) in pushed.iter().zip(&feedback.pushed) {
                for (node, values) in nodes.iter().zip(rows.rows.values().chunks_exact(24)) {
                    let values = values.iter().map(|value| stored(*value, dtype)).collect();
                    last.insert((*layer, *node), (number, values));
                }
            }
            source.apply(feedback).unwrap();
            number += 1;
        }
        let hops = if hop == HistoryHop::One { 1 } else { depth - 1 };
        assert!(pulled[depth - 1] > 1000 && oldest == staleness - 1, "{strategy}: {pulled:?}, {oldest}");
        assert!(pulled[depth - hops..].iter().all(|count| *count > 30), "{strategy}: {pulled:?}");
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
fn a_division_is_found_again_for_the_same_caches_and_memory_alone() {
    let bench = Bench::new();
    let config = RunConfig {
        strategy: StrategyKind::Outre,
        history: Some(HistoryConfig::chosen()),
        epochs: 1,
        ..bench.by_groups()
    };
    let split = |out: &str, change: &dyn Fn(&mut RunConfig)| {
        let mut config = config.clone();
        change(&mut config);
        let split = train(&config, &bench.path(out)).history_split.unwrap();
        assert_eq!(
            split.note().contains("found in the dataset"),
            split.is_reused || split.seconds_are_reused
        );
        (split.is_reused, split.seconds_are_reused)
    };
    assert_eq!(split("first", &|_| ()), (false, false));
    assert_eq!(split("again", &|_| ()), (true, false));
    assert_eq!(split("belady", &|config| config.cache = Some(CachePolicy::Belady)), (true, false));
    assert_eq!(split("static", &|config| config.cache = Some(CachePolicy::Static)), (false, false));
    let policy = Some(NeighbourPolicy::Cross);
    assert_eq!(split("cross", &|config| config.neighbour_policy = policy), (false, false));
    assert_eq!(split("memory", &|config| config.memory *= 2), (false, false));
    // Batches are the same, and only their pulls are others.
    let staleness = |config: &mut RunConfig| config.history.as_mut().unwrap().staleness = 7;
    assert_eq!(split("staleness", &staleness), (false, true));
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

#[test]
fn rows_drift_if_weights_move_and_what_pulls_save_is_counted() {
    let bench = Bench::new();
    let mut config = layers(with_history(&bench, 3000, 4), 2);
    (config.fanout, config.epochs) = (vec![Fanout::All; 2], 2);
    for (strategy, lr) in
        [(StrategyKind::Memory, 1e-30), (StrategyKind::Outre, 0.01), (StrategyKind::Memory, 0.01)]
    {
        let out = bench.path(&format!("{strategy}-{lr}"));
        let summary = train(&RunConfig { strategy, lr, ..config.clone() }, &out);
        for epoch in &summary.epochs {
            let history = epoch.history.unwrap();
            assert!(history.refreshed > 100 && history.refreshed <= history.pushes, "{history:?}");
            // With all neighbours and weights that stand still, a row is computed to the same bits.
            assert_eq!(history.mean_drift == 0.0, lr < 1e-20, "{history:?}");
            assert!(history.mean_drift < 2.0, "{history:?}");
            let saved = history.saved;
            assert_eq!(saved.batches, (epoch.batches + 12) / 16);
            assert!(
                saved.with.edges < saved.without.edges && saved.with.rows <= saved.without.rows,
                "{saved:?}"
            );
        }
    }
}

#[test]
fn a_static_cache_has_the_same_losses_and_fewer_hits() {
    let bench = Bench::new();
    for (strategy, history) in
        [(StrategyKind::Ginex, None), (StrategyKind::Outre, Some(HistoryConfig::new(700)))]
    {
        let mut seen = Vec::new();
        for cache in [CachePolicy::Belady, CachePolicy::Static] {
            let config = RunConfig {
                strategy,
                history: history.clone(),
                cache: Some(cache),
                feature_cache: Some(300 * 24),
                superbatch: Some(25),
                ..bench.by_groups()
            };
            let out = bench.path(&format!("{strategy}-{cache:?}"));
            let summary = train(&config, &out);
            let hits: f64 = summary.epochs.iter().map(|epoch| epoch.hit_ratio["host"]).sum();
            let line = summary.memory.lines.iter().find(|line| line.what == "ranks of cached rows");
            assert_eq!(line.map(|line| line.bytes), (cache == CachePolicy::Static).then_some(3000 * 4));
            seen.push((result(&summary, &out), hits));
        }
        assert!(seen[0].0 == seen[1].0, "{strategy}: losses do not depend on the cache");
        assert!(seen[1].1 > 0.0 && seen[1].1 < seen[0].1, "{strategy}: {} {}", seen[1].1, seen[0].1);
    }
}

#[test]
fn a_run_continues_with_the_history_that_it_began_with() {
    let bench = Bench::new();
    let mut config = layers(with_history(&bench, 1500, 9), 3);
    (config.epochs, config.checkpoint_batches) = (2, 3);
    if let Some(history) = &mut config.history {
        (history.hop, history.dtype) = (HistoryHop::Two, Dtype::F16);
    }
    let whole = bench.path("whole");
    let expected = result(&train(&config, &whole), &whole);
    let out = bench.path("stopped");
    let trainer = Trainer::create(CpuBackend::new(), config.clone(), &out).unwrap();
    assert!(matches!(trainer.run(&mut StopAfter(7)).unwrap(), Outcome::Stopped(_)));
    let refused = |change: fn(&mut HistoryConfig)| {
        let mut config = config.clone();
        config.history.iter_mut().for_each(change);
        Trainer::resume(CpuBackend::new(), config, &out).err().unwrap().to_string()
    };
    assert!(refused(|history| history.staleness = 10).contains("history.staleness"));
    assert!(refused(|history| history.dtype = Dtype::F32).contains("history.dtype"));
    assert!(refused(|history| history.hop = HistoryHop::One).contains("history.hop"));
    let path = out.join("history.nodes");
    let nodes = std::fs::read(&path).unwrap();
    for damaged in [&nodes[..nodes.len() / 2], b"", &[&nodes[..20], b"x", &nodes[21..]].concat()[..]] {
        std::fs::write(&path, damaged).unwrap();
        let said = Trainer::resume(CpuBackend::new(), config.clone(), &out).err().unwrap().to_string();
        assert!(said.contains("history.nodes") && said.contains("--history-set"), "{said}");
    }
    std::fs::write(&path, &nodes).unwrap();
    let outre = RunConfig { strategy: StrategyKind::Outre, superbatch: Some(3), ..config };
    let trainer = Trainer::resume(CpuBackend::new(), outre, &out).unwrap();
    let summary = finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap());
    assert!(result(&summary, &out) == expected);
}

#[test]
fn more_rows_than_nodes_are_all_nodes_and_hops_without_hidden_rows_are_refused() {
    let bench = Bench::new();
    let run = |rows: u64, hop: HistoryHop, depth: usize| {
        let mut config = layers(with_history(&bench, rows, 8), depth);
        config.epochs = 1;
        config.history.iter_mut().for_each(|history| history.hop = hop);
        let out = bench.path(&format!("{rows}-{hop:?}-{depth}"));
        Trainer::create(CpuBackend::new(), config, &out).map(|trainer| {
            let summary = finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap());
            result(&summary, &out)
        })
    };
    assert!(run(3000, HistoryHop::One, 2).unwrap() == run(u64::MAX, HistoryHop::One, 2).unwrap());
    let said = run(100, HistoryHop::Two, 2).err().unwrap().to_string();
    assert!(said.contains("--layers 3") && said.contains("--history-hop 1"), "{said}");
    for (form, word) in [(Form::Shadow, "form shadow"), (Form::Layered, "form layered")] {
        let config = RunConfig { form, ..with_history(&bench, 100, 10) };
        let said = Trainer::create(CpuBackend::new(), config, &bench.path("form")).err().unwrap().to_string();
        assert!(said.contains(word), "{said}");
    }
}

#[test]
fn a_device_without_room_for_all_rows_leaves_some_to_pinned_memory() {
    let bench = Bench::new();
    let config = RunConfig { epochs: 1, ..with_history(&bench, 3000, 10) };
    let all = 3000 * 24 * 4;
    let planned = |gpu_memory: Option<u64>| {
        let config = RunConfig { gpu_memory, ..config.clone() };
        let run = OpenRun::new(Lagging::default(), config, bench.path("s"));
        let plan = run.unwrap().plan;
        let of = |table: &MemoryTable, what: &str| {
            table.lines.iter().find(|line| line.what == what).map_or(0, |line| line.bytes)
        };
        let device = plan.device_table.unwrap();
        (of(&device, "history: hidden rows"), of(&plan.table, "history: hidden rows, pinned"), device.total())
    };
    let (on_device, pinned, total) = planned(None);
    assert_eq!((on_device, pinned), (all, 0));
    let (on_device, pinned, _) = planned(Some(total - all / 2));
    assert!(on_device + pinned == all && pinned >= all / 2 && on_device > all / 3, "{on_device} {pinned}");
    let (on_device, pinned, _) = planned(Some(total - all));
    assert_eq!((on_device, pinned), (0, all));
    // The same losses, wherever rows are.
    let digest = |gpu_memory: Option<u64>, out: &str| {
        let config = RunConfig { gpu_memory, ..config.clone() };
        let trainer = Trainer::create(Lagging::default(), config, &bench.path(out)).unwrap();
        finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap()).loss_digest
    };
    assert_eq!(digest(None, "all"), digest(Some(total - all / 2), "half"));
}
