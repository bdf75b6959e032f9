//! All tests that need a GPU, in one binary that can be copied to a machine with one: `esker-nn`'s, and whole runs. Skipped,
//! saying so, where there is none.

mod link;
#[path = "../../../nn/tests/gpu.rs"]
mod nn;

use crate::common::{
    Bench, StopAfter, check_cached_rows, check_kept_rows, check_large_device_batch, finished, result,
};
use esker_cuda::{Gpu, Precision};
use esker_nn::{CpuBackend, CudaBackend, Kind, LinkMath, NormKind};
use esker_sample::Fanout;
use esker_strategies::{MemoryLine, StrategyKind};
use esker_train::{
    EvaluationMode, HistoryConfig, OpenRun, Outcome, RunConfig, RunDirectory, Summary, TrainError, Trainer,
    predict,
};
use esker_types::DeviceName;
use std::path::Path;

fn gpu(config: &RunConfig) -> CudaBackend {
    CudaBackend::new(Gpu::open(0, config.gpu_memory, config.precision).unwrap())
}

fn train(config: &RunConfig, out: &Path) -> Summary {
    let trainer = Trainer::create(gpu(config), config.clone(), out).unwrap();
    finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap())
}

fn bench(test: &str) -> Option<(Bench, RunConfig)> {
    Gpu::or_skip(test)?;
    let bench = Bench::new();
    let config = RunConfig { device: DeviceName::Cuda(0), ..bench.config() };
    Some((bench, config))
}

#[test]
fn strategies_threads_and_runs_give_the_same_bits_on_the_gpu() {
    let Some((bench, config)) = bench("the same bits in every run") else { return };
    for kind in [Kind::Sage, Kind::Gcn, Kind::Gat, Kind::Gin] {
        let mut config = config.clone();
        config.model.kind = kind;
        config.model.heads = 4;
        if kind == Kind::Sage {
            config.model.norm = NormKind::Batch;
        }
        let mut seen = Vec::new();
        let runs = [
            (StrategyKind::Memory, 1),
            (StrategyKind::Memory, 4),
            (StrategyKind::Mmap, 2),
            (StrategyKind::Ginex, 2),
            (StrategyKind::DiskGnn, 1),
            (StrategyKind::DiskGnn, 4),
            (StrategyKind::DiskGnn, 2),
            (StrategyKind::DiskGnn, 3),
            (StrategyKind::Esker, 2),
        ];
        for (number, (strategy, threads)) in runs.into_iter().enumerate() {
            // Rows all on the GPU, then few of them anywhere, then some in caches of segments.
            let feature_cache = [None, Some(0), Some(20_000), Some(60_000)][number % 4];
            let segment = (number == 7).then_some(3);
            let out = bench.path(&format!("{kind:?}-{number}"));
            let summary =
                train(&RunConfig { strategy, threads, feature_cache, segment, ..config.clone() }, &out);
            seen.push(result(&summary, &out));
        }
        assert!(seen.iter().all(|found| *found == seen[0]), "{kind:?}");
    }
}

#[test]
fn a_history_gives_the_same_bits_from_disk_and_from_memory_on_the_gpu() {
    let Some((bench, config)) = bench("a history of hidden rows") else { return };
    let by_groups = RunConfig { device: config.device, ..bench.by_groups() };
    for (kind, layers, dropout) in [(Kind::Sage, 3, 0.3), (Kind::Gcn, 2, 0.3), (Kind::Gat, 3, 0.0)] {
        let fanout = vec![Fanout::AtMost(4); layers];
        let mut config = RunConfig { fanout: fanout.clone(), eval_fanout: fanout, ..by_groups.clone() };
        (config.model.kind, config.model.layers, config.model.dropout) = (kind, layers, dropout);
        config.model.heads = 4;
        if kind == Kind::Sage {
            config.model.norm = NormKind::Batch;
        }
        let history = Some(HistoryConfig { staleness: 20, ..HistoryConfig::new(1500) });
        let (mut seen, mut cpu_losses) = (Vec::new(), Vec::new());
        for (strategy, threads) in [
            (StrategyKind::Memory, 1),
            (StrategyKind::Memory, 8),
            (StrategyKind::Outre, 2),
            (StrategyKind::Outre, 4),
        ] {
            let out = bench.path(&format!("{kind:?}-{strategy}-{threads}"));
            let config = RunConfig { strategy, threads, history: history.clone(), ..config.clone() };
            let summary = train(&config, &out);
            assert!(
                summary.epochs.iter().filter_map(|epoch| epoch.history).any(|history| history.pulls > 100)
            );
            seen.push(result(&summary, &out));
            cpu_losses.push(summary.epochs.iter().map(|epoch| epoch.loss).collect::<Vec<_>>());
        }
        assert!(seen.iter().all(|found| *found == seen[0]), "{kind:?}");
        // No rows, or rows that are never fresh: a run without a history.
        let plain = bench.path(&format!("{kind:?}-plain"));
        let expected = result(&train(&config, &plain), &plain);
        assert!(expected != seen[0], "{kind:?}: the history is used");
        let out = bench.path(&format!("{kind:?}-stale"));
        let stale = Some(HistoryConfig { staleness: 1, ..HistoryConfig::new(1500) });
        let summary =
            train(&RunConfig { history: stale, strategy: StrategyKind::Outre, ..config.clone() }, &out);
        assert!(result(&summary, &out) == expected, "{kind:?}");
        // As the CPU does.
        let out = bench.path(&format!("{kind:?}-cpu"));
        let cpu = RunConfig { device: DeviceName::Cpu, history, ..config };
        let on_cpu = finished(
            Trainer::create(CpuBackend::new(), cpu, &out).unwrap().run(&mut StopAfter(u64::MAX)).unwrap(),
        );
        for (gpu, cpu) in cpu_losses[0].iter().zip(&on_cpu.epochs) {
            assert!((gpu - cpu.loss).abs() < 5e-3 * cpu.loss, "{kind:?}: {gpu} against {}", cpu.loss);
        }
    }
}

#[test]
fn a_history_on_the_gpu_survives_a_stop_and_stays_inside_its_memory() {
    let Some((bench, config)) = bench("a history that is resumed") else { return };
    let history = Some(HistoryConfig { staleness: 9, ..HistoryConfig::new(1500) });
    let config =
        RunConfig { device: config.device, history, strategy: StrategyKind::Outre, ..bench.by_groups() };
    let tight = RunConfig { gpu_memory: Some(1), ..config.clone() };
    let refused = OpenRun::new(gpu(&tight), tight, bench.path("scratch")).err().unwrap();
    let TrainError::DeviceMemory { needed, .. } = refused else { panic!("{refused}") };
    // All rows are on the device if it has room, and in pinned memory if it has none.
    let roomy = RunConfig { gpu_memory: Some(needed.0 + (1 << 20)), ..config.clone() };
    let plan = OpenRun::plan_only(&gpu(&roomy), &roomy).unwrap();
    let is_all = |line: &MemoryLine| line.what == "history: hidden rows" && line.bytes == 1500 * 24 * 4;
    assert!(plan.device_table.unwrap().lines.iter().any(is_all));
    let config = RunConfig { gpu_memory: Some(needed.0), ..config };
    let whole = train(&config, &bench.path("whole"));
    assert!(whole.peak_device_bytes.unwrap() <= needed.0, "{:?} of {}", whole.peak_device_bytes, needed.0);
    let out = bench.path("stopped");
    let mut trainer = Trainer::create(gpu(&config), config.clone(), &out).unwrap();
    let summary = loop {
        match trainer.run(&mut StopAfter(5)).unwrap() {
            Outcome::Finished(summary) => break *summary,
            Outcome::Stopped(_) => {}
        }
        trainer = Trainer::resume(gpu(&config), config.clone(), &out).unwrap();
    };
    assert!(result(&summary, &out) == result(&whole, &bench.path("whole")));
}

#[test]
fn a_batch_too_large_for_the_gpu_ends_a_run_with_the_budget_to_resume_with() {
    let Some((_, with_gpu)) = bench("a batch larger than expected") else { return };
    let (bench, config) = Bench::with_hub();
    check_large_device_batch(gpu, RunConfig { device: with_gpu.device, ..config }, &bench);
}

#[test]
fn rows_held_on_the_gpu_are_the_rows_of_the_dataset() {
    let Some((bench, config)) = bench("held rows of a dataset") else { return };
    check_cached_rows(&bench, gpu(&config));
}

#[test]
fn rows_kept_on_the_gpu_are_found_by_later_batches() {
    let Some((bench, config)) = bench("kept rows of a dataset") else { return };
    check_kept_rows(&bench, gpu(&config));
}

#[test]
fn a_run_on_the_gpu_learns_as_the_cpu_does() {
    let Some((bench, config)) = bench("learning as the CPU does") else { return };
    let on_gpu = train(&config, &bench.path("gpu"));
    let out = bench.path("cpu");
    let cpu = RunConfig { device: DeviceName::Cpu, ..config };
    let trainer = Trainer::create(CpuBackend::new(), cpu, &out).unwrap();
    let on_cpu = finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap());
    assert_eq!(on_gpu.steps, on_cpu.steps);
    for (gpu, cpu) in on_gpu.epochs.iter().zip(&on_cpu.epochs) {
        assert!((gpu.loss - cpu.loss).abs() < 2e-3 * cpu.loss, "{} against {}", gpu.loss, cpu.loss);
    }
    let accuracy = |summary: &Summary| summary.test.and_then(|test| test.accuracy).unwrap();
    assert!((accuracy(&on_gpu) - accuracy(&on_cpu)).abs() < 0.02);
}

#[test]
fn a_run_on_the_gpu_that_is_stopped_and_resumed_equals_an_uninterrupted_one() {
    let Some((bench, config)) = bench("stopping and resuming") else { return };
    let whole = train(&config, &bench.path("whole"));
    let out = bench.path("stopped");
    let mut trainer = Trainer::create(gpu(&config), config.clone(), &out).unwrap();
    let mut stops = 0;
    let summary = loop {
        match trainer.run(&mut StopAfter(3)).unwrap() {
            Outcome::Finished(summary) => break *summary,
            Outcome::Stopped(_) => stops += 1,
        }
        trainer = Trainer::resume(gpu(&config), config.clone(), &out).unwrap();
    };
    assert!(stops >= 2, "{stops}");
    assert!(result(&summary, &out) == result(&whole, &bench.path("whole")));
}

#[test]
fn device_memory_stays_inside_what_was_promised_and_less_is_refused() {
    let Some((bench, config)) = bench("the promise of device memory") else { return };
    for (kind, precision) in
        [(Kind::Sage, Precision::F32), (Kind::Gat, Precision::F32), (Kind::Gcn, Precision::Bf16)]
    {
        let mut config = RunConfig { precision, eval: EvaluationMode::Full, ..config.clone() };
        config.model.kind = kind;
        config.model.heads = 4;
        let tight = RunConfig { gpu_memory: Some(1), ..config.clone() };
        let refused = OpenRun::new(gpu(&tight), tight, bench.path("scratch")).err().unwrap();
        let TrainError::DeviceMemory { needed, table, .. } = refused else { panic!("{refused}") };
        assert_eq!(table.total(), needed.0);
        let enough = RunConfig { gpu_memory: Some(needed.0), ..config.clone() };
        let out = bench.path(&format!("{kind:?}"));
        let summary = train(&enough, &out);
        let peak = summary.peak_device_bytes.unwrap();
        assert!(peak > 0 && peak <= needed.0, "{kind:?}: {peak} of {}", needed.0);
        let plenty = train(&config, &bench.path(&format!("{kind:?}-plenty")));
        assert!(summary.loss_digest == plenty.loss_digest, "{kind:?}: memory changes no bit");
        let less = RunConfig { gpu_memory: Some(needed.0 - 1), ..config.clone() };
        assert!(OpenRun::new(gpu(&less), less, bench.path("scratch")).is_err());
    }
}

#[test]
fn a_model_trained_on_the_gpu_serves_on_the_cpu() {
    let Some((bench, config)) = bench("moving between processors") else { return };
    let out = bench.path("run");
    train(&config, &out);
    let (directory, config) = RunDirectory::open(&out).unwrap();
    let config = config.to_infer(Some(EvaluationMode::Full));
    fn classes<B: LinkMath>(run: &mut OpenRun<B>) -> Vec<u32> {
        let mut all = Vec::new();
        predict(run, None, EvaluationMode::Full, &mut |_, classes, _| {
            all.extend_from_slice(classes);
            Ok(())
        })
        .unwrap();
        all
    }
    let on_gpu = classes(&mut OpenRun::load(gpu(&config), &directory, config.clone()).unwrap());
    let cpu = RunConfig { device: DeviceName::Cpu, gpu_memory: None, ..config };
    let on_cpu = classes(&mut OpenRun::load(CpuBackend::new(), &directory, cpu).unwrap());
    let same = on_gpu.iter().zip(&on_cpu).filter(|(gpu, cpu)| gpu == cpu).count();
    assert!(on_gpu.len() == on_cpu.len() && same * 1000 >= on_cpu.len() * 995, "{same} of {}", on_cpu.len());
}
