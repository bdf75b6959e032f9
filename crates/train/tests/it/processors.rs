//! A processor that works on its own, behind the trainer's back: the same run as on the CPU, to the bit, and memory in two
//! tables.

use crate::common::{
    Bench, StopAfter, batch_lines, cache_bytes, check_cached_rows, check_kept_rows, check_large_device_batch,
    finished, result, row_format,
};
use crate::lagging::Lagging;
use esker_nn::{CpuBackend, Device, Kind, LinkMath, NormKind, OptimizerKind};
use esker_strategies::StrategyKind;
use esker_train::link::NegativeCount;
use esker_train::{
    EvaluationMode, Metrics, OpenRun, Outcome, RunConfig, RunDirectory, SplitName, Summary, TrainError,
    Trainer, evaluate_run, predict,
};
use std::path::Path;
use std::sync::atomic::Ordering;

fn train<B: LinkMath>(backend: B, config: &RunConfig, out: &Path) -> Summary {
    let trainer = Trainer::create(backend, config.clone(), out).unwrap();
    finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap())
}

fn epoch_losses(summary: &Summary) -> Vec<(u64, u64)> {
    let bits = |metrics: Option<esker_train::Metrics>| metrics.map_or(0, |metrics| metrics.loss.to_bits());
    summary.epochs.iter().map(|epoch| (epoch.loss.to_bits(), bits(epoch.valid))).collect()
}

/// Trains on the CPU and behind its back: whole, and stopped and resumed again and again.
fn check(change: impl Fn(&mut RunConfig)) {
    let bench = Bench::new();
    let mut config = bench.config();
    change(&mut config);
    let expected = train(CpuBackend::new(), &config, &bench.path("cpu"));
    let same = |found: &Summary, out: &Path| {
        assert!(result(found, out) == result(&expected, &bench.path("cpu")), "{}", found.loss_digest);
        assert_eq!(batch_lines(out), batch_lines(&bench.path("cpu")));
        assert_eq!(epoch_losses(found), epoch_losses(&expected));
        assert_eq!((found.best_epoch, &found.ended), (expected.best_epoch, &expected.ended));
        assert_eq!(found.steps, expected.steps);
    };
    let (backend, out) = (Lagging::default(), bench.path("lagging"));
    same(&train(backend.clone(), &config, &out), &out);
    let each = if config.optimizer.clip_norm.is_some() { 2 } else { 1 };
    let most = (Lagging::STEPS_IN_FLIGHT + 1) * each;
    assert_eq!(backend.most_late.load(Ordering::SeqCst), most, "it ran ahead as far as it may");
    let out = bench.path("stopped");
    let mut trainer = Trainer::create(Lagging::default(), config.clone(), &out).unwrap();
    let mut stops = 0;
    let summary = loop {
        match trainer.run(&mut StopAfter(2)).unwrap() {
            Outcome::Finished(summary) => break *summary,
            Outcome::Stopped(_) => stops += 1,
        }
        trainer = Trainer::resume(Lagging::default(), config.clone(), &out).unwrap();
    };
    assert!(stops >= 3, "{stops}");
    same(&summary, &out);
}

#[test]
fn losses_that_come_later_change_nothing() {
    check(|_| {});
}

#[test]
fn checkpoints_and_clipping_change_nothing() {
    check(|config| {
        config.checkpoint_batches = 4;
        config.optimizer.clip_norm = Some(1.0);
        config.model.norm = NormKind::Batch;
    });
}

#[test]
fn early_stopping_changes_nothing() {
    check(|config| {
        (config.lr, config.epochs, config.patience) = (0.05, 40, 2);
        config.model.kind = Kind::Gat;
        config.model.hidden = 16;
    });
}

#[test]
fn superbatches_change_nothing_in_any_memory() {
    for tight in [false, true] {
        check(|config| {
            (config.strategy, config.superbatch) = (StrategyKind::Ginex, Some(4));
            if tight {
                // Both must fit: on the CPU steps count as well, here batches ahead.
                let lagging = OpenRun::plan_only(&Lagging::default(), config).unwrap().smallest_bytes;
                let cpu = OpenRun::plan_only(&CpuBackend::new(), config).unwrap().smallest_bytes;
                config.memory = lagging.max(cpu);
            }
        });
    }
}

/// Kills a run by leaving it alone: what a checkpoint says is what its numbers have seen.
#[test]
fn a_checkpoint_between_stops_is_whole() {
    let bench = Bench::new();
    let config = RunConfig { checkpoint_batches: 4, ..bench.config() };
    train(CpuBackend::new(), &config, &bench.path("cpu"));
    let out = bench.path("killed");
    let trainer = Trainer::create(Lagging::default(), config.clone(), &out).unwrap();
    let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| trainer.run(&mut DieAt(9))));
    assert!(killed.is_err());
    let resumed = Trainer::resume(Lagging::default(), config, &out).unwrap();
    assert_eq!((resumed.position().epoch, resumed.position().batch), (1, 2), "behind the eighth step");
    let summary = finished(resumed.run(&mut StopAfter(u64::MAX)).unwrap());
    let weights = |out: &Path| esker_train::Checkpoint::read(&out.join("last.safetensors")).unwrap();
    assert!(weights(&out) == weights(&bench.path("cpu")));
    assert_eq!(batch_lines(&out), batch_lines(&bench.path("cpu")));
    assert_eq!(summary.steps, 18);
}

/// Dies in the batch behind so many.
struct DieAt(u64);

impl esker_train::Watcher for DieAt {
    fn batch(&mut self, _: &esker_train::BatchProgress) {
        self.0 = self.0.checked_sub(1).expect("killed");
    }
    fn stop(&self) -> bool {
        false
    }
    fn evaluation(&mut self, _: &str) {}
    fn epoch(&mut self, _: &esker_train::EpochRecord, _: bool) {}
}

#[test]
fn what_went_wrong_is_said_when_it_is_known() {
    let bench = Bench::new();
    let config = RunConfig { lr: 1e30, ..bench.config() };
    let said = |result: Result<Outcome, TrainError>| result.err().unwrap().to_string();
    let cpu = Trainer::create(CpuBackend::new(), config.clone(), &bench.path("cpu")).unwrap();
    let late = Trainer::create(Lagging::default(), config, &bench.path("late")).unwrap();
    let expected = said(cpu.run(&mut StopAfter(u64::MAX)));
    assert!(expected.contains("lower the learning rate"), "{expected}");
    assert_eq!(said(late.run(&mut StopAfter(u64::MAX))), expected);
}

#[test]
fn evaluation_and_prediction_read_what_lies_elsewhere() {
    let bench = Bench::new();
    let full = EvaluationMode::Full;
    let config = RunConfig { epochs: 1, eval: full, final_eval: full, ..bench.config() };
    train(CpuBackend::new(), &config, &bench.path("run"));
    let (directory, config) = RunDirectory::open(&bench.path("run")).unwrap();
    for mode in [EvaluationMode::Full, EvaluationMode::Sampled] {
        let config = config.clone().to_infer(Some(mode));
        let expected = inferred(OpenRun::load(CpuBackend::new(), &directory, config.clone()).unwrap(), mode);
        let load = |config: &RunConfig| OpenRun::load(Lagging::default(), &directory, config.clone());
        assert!(inferred(load(&config).unwrap(), mode) == expected);
        // Where neither memory has room for more than a batch, or a node with its neighbours.
        let mut tight = RunConfig { memory: 1, gpu_memory: Some(1), ..config };
        let Err(TrainError::DeviceMemory { needed, .. }) = load(&tight) else { panic!("refused") };
        tight.gpu_memory = Some(needed.0);
        let Err(TrainError::Memory { needed, .. }) = load(&tight) else { panic!("refused") };
        tight.memory = needed.0;
        let run = load(&tight).unwrap();
        assert!(inferred(run, mode) == expected);
    }
}

/// Everything that inference finds: values and classes of all nodes, in order, and the test nodes' metrics.
fn inferred<B: LinkMath>(mut run: OpenRun<B>, mode: EvaluationMode) -> (Vec<f32>, Vec<u32>, Metrics) {
    let (mut all, mut all_classes, mut next) = (Vec::new(), Vec::new(), 0);
    predict(&mut run, None, mode, &mut |nodes, classes, values| {
        assert!(nodes.iter().map(|node| node.0).eq(next..next + nodes.len() as u64));
        next += nodes.len() as u64;
        all.extend_from_slice(values);
        all_classes.extend_from_slice(classes);
        Ok(())
    })
    .unwrap();
    assert_eq!(next, 3000);
    (all, all_classes, evaluate_run(&mut run, SplitName::Test, mode).unwrap().unwrap())
}

#[test]
fn each_memory_has_its_table_and_its_promise() {
    let bench = Bench::new();
    for eval in [EvaluationMode::Sampled, EvaluationMode::Full] {
        let config = RunConfig { epochs: 1, eval, final_eval: eval, ..bench.config() };
        let on_cpu = OpenRun::plan_only(&CpuBackend::new(), &config).unwrap();
        let elsewhere = OpenRun::plan_only(&Lagging::default(), &config).unwrap();
        assert!(on_cpu.device_table.is_none());
        assert_eq!((on_cpu.prefetch_depth, elsewhere.prefetch_depth), (3, 5));
        let has = |table: &esker_strategies::MemoryTable, what: &str| {
            table.lines.iter().any(|line| line.what == what && line.bytes > 0)
        };
        let device = elsewhere.device_table.unwrap();
        for what in ["model and gradients", "optimizer", "training step"] {
            assert!(has(&on_cpu.table, what) && has(&device, what) && !has(&elsewhere.table, what), "{what}");
        }
        assert!(
            has(&elsewhere.table, "feature rows of 5 batches")
                && has(&device, "rows and adjacency of 4 batches")
        );
        assert!(has(&elsewhere.table, "checkpoint") && has(&elsewhere.table, "sampling"));
        let short = RunConfig { gpu_memory: Some(device.total() - 1), ..config.clone() };
        let said = OpenRun::plan_only(&Lagging::default(), &short).err().unwrap().to_string();
        let (bytes, enough) = (device.total(), esker_types::ByteCount(device.total()).flag_value());
        assert!(said.contains(&format!("({bytes} bytes) of the device's memory")), "{said}");
        assert!(said.contains(&format!("use --gpu-memory {enough},")), "{said}");
        OpenRun::plan_only(&CpuBackend::new(), &short).unwrap();
        // The smallest of both is enough, and kept.
        let config =
            RunConfig { gpu_memory: Some(device.total()), memory: elsewhere.smallest_bytes, ..config };
        let summary = train(Lagging::default(), &config, &bench.path(&format!("just-{eval:?}")));
        assert_eq!(summary.budget_device_bytes, Some(device.total()));
        assert_eq!(summary.device_memory.unwrap().total(), device.total());
        assert!(summary.peak_device_bytes.unwrap() <= device.total(), "{:?}", summary.peak_device_bytes);
        let roomy = RunConfig { gpu_memory: None, memory: 1 << 30, ..config };
        let same = train(CpuBackend::new(), &roomy, &bench.path(&format!("cpu-{eval:?}")));
        assert_eq!(same.loss_digest, summary.loss_digest);
        assert_eq!(
            (same.peak_device_bytes, same.budget_device_bytes, same.device_memory),
            (None, None, None)
        );
    }
}

#[test]
fn a_batch_too_large_for_the_device_ends_a_run_with_the_budget_to_resume_with() {
    let (bench, config) = Bench::with_hub();
    check_large_device_batch(|_| Lagging::default(), config, &bench);
}

#[test]
fn graphs_that_workers_stage_change_nothing() {
    let bench = Bench::new();
    let config = RunConfig { strategy: StrategyKind::DiskGnn, threads: 8, ..bench.config() };
    let expected = train(CpuBackend::new(), &config, &bench.path("cpu"));
    let (backend, out) = (Lagging::default(), bench.path("staged"));
    let found = train(backend.clone(), &config, &out);
    assert!(result(&found, &out) == result(&expected, &bench.path("cpu")));
    // Two layers of every batch, each by a worker; batches of evaluation, too.
    let staged = backend.staged_ahead.load(Ordering::SeqCst) as u64;
    assert!(staged > 2 * found.steps && staged.is_multiple_of(2), "{staged} graphs, {} steps", found.steps);
}

#[test]
fn rows_that_are_cached_elsewhere_are_the_rows_of_the_dataset() {
    check_cached_rows(&Bench::new(), Lagging::default());
}

#[test]
fn rows_that_are_kept_elsewhere_are_found_by_later_batches() {
    check_kept_rows(&Bench::new(), Lagging::default());
}

#[test]
fn a_device_that_computes_in_host_memory_caches_no_rows() {
    let format = row_format(&Bench::new());
    let cache = CpuBackend::new().cache(&format.stored_rows(), 10, cache_bytes(&format));
    assert!(cache.unwrap().is_none());
}

#[test]
fn a_model_without_neighbours_is_the_same_too() {
    check(|config| {
        config.model.kind = Kind::Mlp;
        (config.fanout, config.eval_fanout) = (vec![], vec![]);
    });
}

/// Embeddings that a device has no room for are in host memory: all of them, a part, or none. The bits are the same, also
/// of a run that was stopped and resumed, and what either memory takes is in its table.
#[test]
fn embeddings_that_a_device_has_no_room_for_are_in_host_memory() {
    let facts = crate::facts::Facts::new();
    for kind in [OptimizerKind::Sgd, OptimizerKind::Adagrad, OptimizerKind::Adam] {
        // Batches have few of the nodes.
        let mut config = RunConfig { epochs: 2, batch: 5, checkpoint_batches: 50, ..facts.config() };
        let negatives = NegativeCount::Shared { uniform: 4, by_degree: 1, chunks: 1 };
        config.link.as_mut().unwrap().negatives = negatives;
        config.embeddings.as_mut().unwrap().optimizer.kind = kind;
        let path = |name: &str| facts.path(&format!("{kind:?}-{name}"));
        let roomy = train(CpuBackend::new(), &config, &path("cpu"));
        let expected = crate::facts::result(&roomy, &path("cpu"));
        let bytes = |table: &esker_strategies::MemoryTable, what: &str| -> Option<u64> {
            let mut lines = table.lines.iter().filter(|line| line.what.starts_with(what));
            lines.next().map(|line| line.bytes)
        };
        let plan = |gpu_memory: Option<u64>| {
            let config = RunConfig { gpu_memory, ..config.clone() };
            OpenRun::plan_only(&Lagging::default(), &config)
        };
        let whole = plan(None).unwrap();
        let states = config.embeddings.as_ref().unwrap().optimizer.row_states().len() as u64;
        let all = crate::facts::NODES * 16 * 4 * (1 + states);
        assert_eq!(bytes(&whole.table, "embeddings"), None);
        let device = whole.device_table.unwrap();
        let found = bytes(&device, "embeddings").unwrap();
        assert_eq!(found + bytes(&device, "optimizer of embeddings").unwrap_or(0), all);
        // The least that is enough has none of them on the device, and a byte less is refused.
        let Err(TrainError::DeviceMemory { needed, .. }) = plan(Some(1)) else { panic!("a byte is enough") };
        assert!(plan(Some(needed.0 - 1)).is_err());
        for (name, gpu_memory) in [("least", needed.0), ("some", needed.0 + all / 2 + 40)] {
            let found = plan(Some(gpu_memory)).unwrap();
            let on_device = bytes(&found.device_table.unwrap(), "embeddings").unwrap();
            let pinned = bytes(&found.table, "embeddings").unwrap();
            assert_eq!(on_device + pinned, all, "{kind:?} {name}");
            assert_eq!(on_device > 0, name == "some", "{kind:?} {name}");
            let tight =
                RunConfig { gpu_memory: Some(gpu_memory), memory: found.smallest_bytes, ..config.clone() };
            let out = path(name);
            let summary = train(Lagging::default(), &tight, &out);
            assert!(crate::facts::result(&summary, &out) == expected, "{kind:?} {name}");
            let out = path(&format!("{name}-parts"));
            let mut trainer = Trainer::create(Lagging::default(), tight.clone(), &out).unwrap();
            let summary = loop {
                match trainer.run(&mut StopAfter(300)).unwrap() {
                    Outcome::Finished(summary) => break *summary,
                    Outcome::Stopped(_) => {}
                }
                trainer = Trainer::resume(Lagging::default(), tight.clone(), &out).unwrap();
            };
            let found = crate::facts::result(&summary, &out);
            // A best model that was not the last leaves files of other names.
            assert_eq!((&found.0, &found.1), (&expected.0, &expected.1), "{kind:?} {name}");
            assert!(found.2 == expected.2, "{kind:?} {name}");
        }
    }
}
