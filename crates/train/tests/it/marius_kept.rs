//! What a run over partitions leaves on disk: at every moment the last checkpoint and the best model have all that they name,
//! and a checkpoint writes no more than what changed.

use crate::common::{Bench, StopAfter, batch_lines, finished};
use crate::facts::Facts;
use esker_fetch::pipeline::StageTimes;
use esker_nn::CpuBackend;
use esker_plan::partition_orders::PartitionCounts;
use esker_strategies::{
    Batch, BatchSource, CheckpointReader, CheckpointSink, Feedback, Inference, InputTable, Job, JobOutline,
    Needs, Prepared, Result, RunPosition, SourceCounters, Strategy, StrategyError, StrategyKind,
};
use esker_train::{
    BatchProgress, EpochRecord, EvaluationMode, OpenRun, OrderName, Outcome, ResidentOnly, RunConfig,
    RunControl, RunDirectory, SplitName, Summary, TrainError, Trainer, Watcher, build_strategy, rank_run,
};
use esker_types::ByteCount;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Links in 10 partitions, 4 of them resident.
fn config(facts: &Facts) -> RunConfig {
    let counts = PartitionCounts { partitions: 10, resident: 4, logical: 5 };
    RunConfig {
        order: OrderName::Tour,
        partition_counts: Some(counts),
        strategy: StrategyKind::Marius,
        epochs: 3,
        ..facts.config()
    }
}

/// The same with the whole table in memory.
fn in_memory(config: &RunConfig) -> RunConfig {
    let resident_only = Some(ResidentOnly::All);
    RunConfig { strategy: StrategyKind::Memory, resident_only, ..config.clone() }
}

fn create(config: &RunConfig, out: &Path) -> Trainer<CpuBackend> {
    Trainer::create(CpuBackend::new(), config.clone(), out).unwrap()
}

fn resume(config: &RunConfig, out: &Path) -> Trainer<CpuBackend> {
    Trainer::resume(CpuBackend::new(), config.clone(), out).unwrap()
}

fn to_the_end(trainer: Trainer<CpuBackend>) -> Summary {
    finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap())
}

fn result(summary: &Summary, out: &Path) -> (Vec<String>, String) {
    (batch_lines(out), format!("{} {:?} {:?}", summary.loss_digest, summary.valid, summary.test))
}

/// A strategy whose first batch after opening is larger than memory allows.
struct TooLarge(Box<dyn Strategy<CpuBackend>>);

struct TooLargeSource(Box<dyn BatchSource<CpuBackend>>);

impl Strategy<CpuBackend> for TooLarge {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        self.0.needs(job)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared> {
        self.0.prepare(job)
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<CpuBackend>>> {
        Ok(Box::new(TooLargeSource(self.0.batches(job, from, state)?)))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<CpuBackend>>> {
        self.0.inference(job, over, state)
    }
}

impl BatchSource<CpuBackend> for TooLargeSource {
    fn next(&mut self) -> Result<Option<Batch<CpuBackend>>> {
        let at = Box::new(RunPosition::from(esker_sample::Position { epoch: 0, batch: 0 }));
        let (needed, allowed) = (ByteCount(2), ByteCount(1));
        Err(StrategyError::LargeBatch { at, trains: true, nodes: Some(1), needed, allowed })
    }

    fn apply(&mut self, feedback: Feedback<CpuBackend>) -> Result<()> {
        self.0.apply(feedback)
    }

    fn lag(&self) -> usize {
        self.0.lag()
    }

    fn skip_to(&mut self, at: RunPosition) -> Result<()> {
        self.0.skip_to(at)
    }

    fn save(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.0.save(to)
    }

    fn table(&mut self) -> Result<InputTable> {
        self.0.table()
    }

    fn counters(&self) -> SourceCounters {
        self.0.counters()
    }

    fn stages(&self) -> Vec<StageTimes> {
        self.0.stages()
    }
}

#[test]
fn updates_that_wait_survive_a_run_that_ends_before_its_first_batch() {
    let facts = Facts::new();
    let marius = RunConfig { lag: Some(4), ..config(&facts) };
    for (name, config) in [("buffer", marius.clone()), ("memory", in_memory(&marius))] {
        let whole = facts.path(&format!("{name}-whole"));
        let expected = result(&to_the_end(create(&config, &whole)), &whole);
        let out = facts.path(name);
        for batches in [3, 5, 2] {
            let trainer = if out.exists() { resume(&config, &out) } else { create(&config, &out) };
            assert!(matches!(trainer.run(&mut StopAfter(batches)).unwrap(), Outcome::Stopped(_)));
            let backend = CpuBackend::new();
            let strategy = Box::new(TooLarge(build_strategy(&config, &backend)));
            let control = RunControl::default();
            let trainer = Trainer::resume_with(backend, config.clone(), &out, control, strategy).unwrap();
            let error = trainer.run(&mut StopAfter(u64::MAX)).unwrap_err();
            assert!(matches!(error, TrainError::Strategy(StrategyError::LargeBatch { .. })), "{error}");
        }
        assert!(result(&to_the_end(resume(&config, &out)), &out) == expected, "{name}");
    }
}

/// Ends the process, as far as a test can, when an epoch has a best model and the checkpoint after it is still to come.
struct DiesAfterBest {
    epochs: u64,
}

impl Watcher for DiesAfterBest {
    fn batch(&mut self, _: &BatchProgress<'_>) {}

    fn stop(&self) -> bool {
        false
    }

    fn evaluation(&mut self, _: &str) {}

    fn epoch(&mut self, record: &EpochRecord, best: bool) {
        assert!(!(best && record.epoch + 1 == self.epochs), "the process ends here");
    }
}

/// The MRR of the best model, read from files alone.
fn mrr_of_best(out: &Path) -> f64 {
    let (run, stored) = RunDirectory::open(out).unwrap();
    let mut again = OpenRun::load(CpuBackend::new(), &run, stored.to_infer(None)).unwrap();
    rank_run(&mut again, SplitName::Test, EvaluationMode::Full).unwrap().unwrap().all.mrr
}

#[test]
fn the_best_model_keeps_its_files_after_a_kill_before_the_next_checkpoint() {
    let facts = Facts::new();
    let marius = RunConfig { checkpoint_batches: 7, ..config(&facts) };
    for (name, config) in [("buffer", marius.clone()), ("memory", in_memory(&marius))] {
        let whole = facts.path(&format!("{name}-whole"));
        let expected = result(&to_the_end(create(&config, &whole)), &whole);
        for epochs in [1, 2] {
            let out = facts.path(&format!("{name}-{epochs}"));
            let trainer = create(&config, &out);
            let dies = AssertUnwindSafe(|| trainer.run(&mut DiesAfterBest { epochs }).map(drop));
            assert!(catch_unwind(dies).is_err(), "{name}: epoch {epochs} had no best model");
            let best = mrr_of_best(&out);
            // The checkpoint of a resumed run, which knows the best model of its own past.
            for _ in 0..2 {
                assert!(matches!(resume(&config, &out).run(&mut StopAfter(2)).unwrap(), Outcome::Stopped(_)));
                assert_eq!(mrr_of_best(&out).to_bits(), best.to_bits(), "{name} {epochs}");
            }
            assert!(result(&to_the_end(resume(&config, &out)), &out) == expected, "{name} {epochs}");
        }
    }
}

/// The files of learned rows, with their sizes and when they were written.
fn row_files(out: &Path) -> BTreeMap<String, (u64, SystemTime)> {
    let state = RunDirectory::open(out).unwrap().0.state_path();
    let files = std::fs::read_dir(state).unwrap().map(|file| file.unwrap());
    let known = files.map(|file| {
        let about = file.metadata().unwrap();
        (file.file_name().into_string().unwrap(), (about.len(), about.modified().unwrap()))
    });
    known.filter(|(name, _)| name.starts_with("embeddings-")).collect()
}

#[test]
fn a_checkpoint_writes_no_more_than_the_residents_that_changed() {
    let facts = Facts::new();
    let config = RunConfig { epochs: 1, ..config(&facts) };
    let out = facts.path("run");
    // 24 nodes of 16 numbers, each with a state of its optimizer.
    let (partition, mut before, mut checkpoints) = (24 * 16 * 4 * 2, BTreeMap::new(), 0);
    loop {
        let trainer = if out.exists() { resume(&config, &out) } else { create(&config, &out) };
        if matches!(trainer.run(&mut StopAfter(1)).unwrap(), Outcome::Finished(_)) {
            break;
        }
        let after = row_files(&out);
        let written = after.iter().filter(|(name, about)| before.get(*name) != Some(*about));
        let bytes: u64 = written.map(|(_, (bytes, _))| bytes).sum();
        assert!((partition..=4 * partition).contains(&bytes), "{bytes} bytes after a batch");
        // Nothing was trained, so nothing is written or removed.
        let backend = CpuBackend::new();
        let (strategy, control) = (TooLarge(build_strategy(&config, &backend)), RunControl::default());
        let idle = Trainer::resume_with(backend, config.clone(), &out, control, Box::new(strategy)).unwrap();
        if idle.run(&mut StopAfter(u64::MAX)).is_ok() {
            break;
        }
        assert_eq!(row_files(&out), after);
        (before, checkpoints) = (after, checkpoints + 1);
    }
    assert!(checkpoints > 10, "{checkpoints}");
}

#[test]
fn epochs_count_the_bytes_of_rows_and_edges() {
    let facts = Facts::new();
    let config = RunConfig { eval: EvaluationMode::None, ..config(&facts) };
    let summary = to_the_end(create(&config, &facts.path("run")));
    let steps = summary.partition_steps.unwrap();
    let of = |count: fn(&EpochRecord) -> u64| summary.epochs.iter().map(count).sum::<u64>();
    let (read, written) = (of(|epoch| epoch.bytes_read), of(|epoch| epoch.bytes_written));
    let table = 10 * 24 * 16 * 4 * 2;
    // Each swap brings a tenth of the table, and so does each of the four that an epoch begins with.
    let most = summary.epochs.len() as u64 * (steps.swaps + 4) * table / 10;
    assert!(read > table && read <= most, "{read} of {most} bytes read");
    // What left, and the residents at the end.
    assert!(written > table && written <= most + 4 * table / 10, "{written} of {most} bytes written");
    assert!(summary.epochs.iter().all(|epoch| epoch.edge_bytes_read > 0));
    let memory = to_the_end(create(&in_memory(&config), &facts.path("memory")));
    assert!(memory.epochs.iter().all(|epoch| epoch.bytes_written == 0 && epoch.edge_bytes_read == 0));
}

/// Labels over features, 2 of 8 partitions resident.
fn labels(bench: &Bench) -> RunConfig {
    let counts = PartitionCounts { partitions: 8, resident: 2, logical: 4 };
    let (order, partition_counts) = (OrderName::Dispersed, Some(counts));
    RunConfig { order, partition_counts, strategy: StrategyKind::Marius, epochs: 2, ..bench.config() }
}

/// Damages all parts of a file, of which a run may read few; another time, it mends them.
fn flip(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[4096..].iter_mut().step_by(501).for_each(|byte| *byte ^= 1);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn damaged_buckets_and_features_are_named_and_nothing_is_lost() {
    let bench = Bench::new();
    let config = labels(&bench);
    let whole = bench.path("whole");
    let expected = result(&to_the_end(create(&config, &whole)), &whole);
    let folders = std::fs::read_dir(bench.path("g/derived")).unwrap().map(|entry| entry.unwrap().path());
    let folders: Vec<_> = folders.collect();
    for (start, file) in [("edge-buckets", "edges.bin"), ("partition-features", "rows.bin")] {
        let of = |path: &&PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(start);
        let path = folders.iter().find(of).unwrap().join(file);
        let out = bench.path(start);
        assert!(matches!(create(&config, &out).run(&mut StopAfter(3)).unwrap(), Outcome::Stopped(_)));
        flip(&path);
        let trainer = Trainer::resume(CpuBackend::new(), config.clone(), &out);
        let error = trainer.and_then(|trainer| trainer.run(&mut StopAfter(u64::MAX))).unwrap_err();
        assert!(error.to_string().contains(file), "{error}");
        flip(&path);
        assert!(result(&to_the_end(resume(&config, &out)), &out) == expected, "{start}");
    }
}

#[test]
fn rows_of_another_run_are_refused_and_the_own_ones_go_on() {
    let facts = Facts::new();
    let config = config(&facts);
    let whole = facts.path("whole");
    let expected = result(&to_the_end(create(&config, &whole)), &whole);
    let other = RunConfig { seed: 11, ..config.clone() };
    let outs = [(&config, facts.path("own")), (&other, facts.path("other"))];
    for (config, out) in &outs {
        assert!(matches!(create(config, out).run(&mut StopAfter(30)).unwrap(), Outcome::Stopped(_)));
    }
    let [own, other] = outs.map(|(_, out)| RunDirectory::open(&out).unwrap().0.state_path());
    let mut kept = Vec::new();
    for name in row_files(&facts.path("own")).into_keys() {
        if other.join(&name).exists() {
            kept.push((own.join(&name), std::fs::read(own.join(&name)).unwrap()));
            std::fs::copy(other.join(&name), own.join(&name)).unwrap();
        }
    }
    assert!(!kept.is_empty(), "no file of both has the same name");
    let error = resume(&config, &facts.path("own")).run(&mut StopAfter(u64::MAX)).unwrap_err().to_string();
    assert!(error.contains("embeddings-000") && error.contains("checksum"), "{error}");
    kept.into_iter().for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    let own = facts.path("own");
    assert!(result(&to_the_end(resume(&config, &own)), &own) == expected);
}

#[test]
fn more_partitions_than_nodes_are_refused() {
    let facts = Facts::new();
    let counts = PartitionCounts { partitions: 250, resident: 100, logical: 5 };
    let config = RunConfig { partition_counts: Some(counts), ..config(&facts) };
    let out = facts.path("none");
    let said = Trainer::create(CpuBackend::new(), config, &out).err().unwrap().to_string();
    assert!(said.contains("250") && said.contains("240"), "{said}");
    assert!(!out.exists());
}
