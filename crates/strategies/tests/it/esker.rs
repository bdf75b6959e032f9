//! Esker yields the batches and bytes of `memory`, whatever its cache, row widths and repeated epochs, from any position; it
//! reads what the best cache for the whole run misses, and nothing else; damage is found and named; where the disk has no
//! room, superbatches serve the run; stopped or not, the result is the same to the byte.

use crate::common::{batches, build, dataset, job, rest, sample_of, scheduled, strategy};
use esker_sample::{Form, Position};
use esker_strategies::{Job, Phase, RunPosition, SourceCounters, StrategyError, StrategyKind};
use esker_types::{Dtype, Progress, StopSignal, Unit};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

/// Directories of a kind, those made last at the end.
fn derived(home: &Path, kind: &str) -> Vec<PathBuf> {
    let found = fs::read_dir(home).into_iter().flatten().map(|entry| entry.unwrap().path());
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let mut found: Vec<PathBuf> = found.filter(|path| name(path).starts_with(kind)).collect();
    found.sort_by_key(|path| fs::metadata(path).unwrap().modified().unwrap());
    found
}

fn home(job: &Job) -> PathBuf {
    job.dataset.directory().join("derived")
}

fn packed_at(job: &Job) -> PathBuf {
    derived(&home(job), "esker-").pop().unwrap()
}

fn plan(job: &Job) -> Value {
    let text = fs::read_to_string(packed_at(job).join("derived.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["parameters"].clone()
}

fn check(job: &Job) -> SourceCounters {
    crate::common::same_as_memory(StrategyKind::Esker, job, || {})
}

/// A whole run and what it counted.
fn whole(kind: StrategyKind, job: &Job) -> (Vec<crate::common::Found>, SourceCounters) {
    let mut source = strategy(kind, job).batches(job, RunPosition::START, None).unwrap();
    (rest(&mut *source), source.counters())
}

#[test]
fn caches_of_every_size_yield_the_same_batches() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut ratios = Vec::new();
    for (seed, rows) in [(1, 0), (2, 1), (3, 200), (4, 700), (5, 100_000)] {
        let mut job = job(&dataset, seed);
        job.out_of_core.feature_cache_bytes = Some(rows * 28);
        let counters = check(&job);
        ratios.push(counters.hits[0].1 as f64 / counters.rows as f64);
    }
    assert!(ratios[0] == 0.0 && ratios[1] > 0.0 && ratios[4] > 0.5, "{ratios:?}");
    assert!(ratios.windows(2).all(|pair| pair[0] <= pair[1] + 0.01), "{ratios:?}");
    // With the whole memory for it, too.
    check(&job(&dataset, 6));
}

#[test]
fn rows_of_every_width_and_type_yield_the_same_batches() {
    for (dim, dtype) in [
        (1, Dtype::F32),
        (33, Dtype::F16),
        (1024, Dtype::F32),
        (1500, Dtype::Bf16),
        (130, Dtype::I8),
        (20_000, Dtype::I8),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let dataset = dataset(directory.path(), dim, dtype);
        let mut job = job(&dataset, 9);
        job.out_of_core.feature_cache_bytes = Some(150 * dim * dtype.bytes());
        check(&job);
    }
}

#[test]
fn layered_and_shadow_batches_are_packed_too() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    for form in [Form::Layered, Form::Shadow] {
        let mut job = job(&dataset, 2);
        job.settings.form = form;
        job.out_of_core.feature_cache_bytes = Some(3000);
        check(&job);
    }
}

#[test]
fn any_memory_that_is_granted_yields_the_same_batches_and_is_planned_for() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 64, Dtype::F32);
    let with = |sampled: Option<u64>| {
        let mut job = scheduled(job(&dataset, 5));
        job.epochs_sampled = sampled;
        job
    };
    for sampled in [None, Some(1)] {
        let expected = whole(StrategyKind::Memory, &with(sampled)).0;
        let least = StrategyKind::Esker.needs(&with(sampled)).unwrap().host.total();
        let mut slots = Vec::new();
        for (more, sequential) in [(0, false), (50 << 10, false), (400 << 10, true), (64 << 20, false)] {
            let mut job = with(sampled);
            job.strategy_bytes = least + more;
            job.out_of_core.sequential = sequential;
            assert!(whole(StrategyKind::Esker, &job).0 == expected, "{sampled:?} {more}");
            slots.push(plan(&job)["layout"]["slots"].as_u64().unwrap());
            fs::remove_dir_all(packed_at(&job)).unwrap();
        }
        assert!(slots.is_sorted() && slots[3] == 2000, "{slots:?}");
    }
}

/// Laps find in the cache what the one before left, where a run resumes in any of them.
#[test]
fn epochs_that_repeat_yield_the_batches_that_memory_repeats() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    for (epochs, sampled, rows) in [(3, 1, 0), (3, 1, 150), (5, 2, 300), (7, 3, 600), (4, 1, 100_000)] {
        let mut job = job(&dataset, 3);
        (job.epochs, job.epochs_sampled) = (epochs, Some(sampled));
        job.out_of_core.feature_cache_bytes = Some(rows * 28);
        check(&job);
        assert_eq!(plan(&job)["around"].as_u64().unwrap() > 0, rows > 0, "{rows}");
    }
}

/// Each schedule of validation, in laps or not: from every position the run is that of memory.
#[test]
fn evaluations_are_part_of_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let cases =
        [(3, None, 2), (3, None, 1), (4, Some(2), 1), (4, Some(2), 2), (5, Some(2), 2), (4, Some(3), 2)];
    for (epochs, sampled, every) in cases {
        let mut job = scheduled(job(&dataset, 3));
        (job.epochs, job.epochs_sampled, job.schedule.every) = (epochs, sampled, every);
        job.out_of_core.feature_cache_bytes = Some(350 * 28);
        let expected = whole(StrategyKind::Memory, &job).0;
        let mut strategy = strategy(StrategyKind::Esker, &job);
        for first in (0..expected.len()).step_by(5) {
            let at = expected[first].0;
            let mut source = strategy.batches(&job, at, None).unwrap();
            // An evaluation starts with its first batch.
            let start = if let Phase::Train { .. } = at.phase { first } else { first - at.batch as usize };
            assert!(rest(&mut *source) == expected[start..], "{epochs} {sampled:?} {every} from {at}");
        }
        // Training that ends early goes on with what comes after it.
        let mut source = strategy.batches(&job, RunPosition::START, None).unwrap();
        (0..11).for_each(|_| drop(source.next().unwrap()));
        let last = RunPosition::start_of(Phase::Validation { epoch: epochs });
        source.skip_to(last).unwrap();
        let from = expected.iter().position(|(at, ..)| *at == last).unwrap();
        assert!(rest(&mut *source) == expected[from..], "{epochs} {sampled:?} {every}");
    }
}

/// Rows that the batches of a run access.
fn trace(job: &Job) -> Vec<Vec<u64>> {
    let mut source = strategy(StrategyKind::Memory, job).batches(job, RunPosition::START, None).unwrap();
    let mut all = Vec::new();
    while let Some(batch) = source.next().unwrap() {
        all.push(sample_of(&batch).node_ids.iter().map(|node| node.0).collect());
    }
    all
}

/// Belady by the book: after each batch sort by next use, found by looking through the rest of the trace.
fn best(trace: &[Vec<u64>], slots: usize) -> u64 {
    let sets: Vec<BTreeSet<u64>> = trace.iter().map(|batch| batch.iter().copied().collect()).collect();
    let (mut cached, mut misses) = (BTreeSet::<u64>::new(), 0);
    for (at, batch) in sets.iter().enumerate() {
        misses += batch.difference(&cached).count() as u64;
        cached.extend(batch);
        let next = |row: &u64| sets[at + 1..].iter().position(|later| later.contains(row));
        let mut by_use: Vec<(usize, u64)> =
            cached.iter().filter_map(|row| Some((next(row)?, *row))).collect();
        by_use.sort_unstable();
        cached = by_use.into_iter().take(slots).map(|(_, row)| row).collect();
    }
    misses
}

#[test]
fn what_is_read_is_what_the_best_cache_of_the_whole_run_misses() {
    let directory = tempfile::tempdir().unwrap();
    // Rows of a page: ends of pages do not count.
    let dataset = dataset(directory.path(), 1024, Dtype::F32);
    let mut job = scheduled(job(&dataset, 3));
    let trace = trace(&job);
    for slots in [0, 20, 100, 200, 500, 1000] {
        job.out_of_core.feature_cache_bytes = Some(slots * 4096);
        let counters = whole(StrategyKind::Esker, &job).1;
        let misses = best(&trace, slots as usize);
        assert_eq!(plan(&job)["misses"], misses, "{slots}");
        let read = counters.bytes_read + counters.evaluation.bytes_read;
        assert_eq!(read, misses * 4096, "{slots}");
        let rows = counters.rows + counters.evaluation.rows;
        let hits = counters.hits[0].1 + counters.evaluation.hits;
        assert_eq!(rows - hits, misses, "{slots}");
        // One read of up to a MiB after the other, not one a row.
        assert!(counters.reads < misses / 8, "{slots}: {counters:?}");
        // A static cache of that size, filled once, and that of superbatches read no less.
        if slots == 200 {
            let ginex = whole(StrategyKind::Ginex, &job).1;
            assert!(ginex.bytes_read + ginex.evaluation.bytes_read >= read);
        }
    }
}

/// A run that resumes reads what its cache has lost, at most once.
#[test]
fn a_run_that_resumes_reads_its_cache_again_and_no_more() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 1024, Dtype::F32);
    let mut job = job(&dataset, 3);
    job.out_of_core.feature_cache_bytes = Some(300 * 4096);
    let start = Position { epoch: 0, batch: 0 };
    let all = batches(StrategyKind::Esker, &job, start).1;
    let rest = batches(StrategyKind::Esker, &job, Position { epoch: 1, batch: 4 }).1;
    assert!(rest.bytes_read > 300 * 4096 / 2 && rest.bytes_read <= all.bytes_read + 300 * 4096);
}

#[test]
fn samples_are_those_of_diskgnn_and_packed_rows_are_used_again() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 16, Dtype::F32);
    let mut job = job(&dataset, 1);
    job.out_of_core.feature_cache_bytes = Some(6400);
    strategy(StrategyKind::DiskGnn, &job);
    let samples = derived(&home(&job), "samples-");
    let made = fs::metadata(samples[0].join("samples.bin")).unwrap().modified().unwrap();
    strategy(StrategyKind::Esker, &job);
    assert_eq!(derived(&home(&job), "samples-"), samples);
    assert_eq!(fs::metadata(samples[0].join("samples.bin")).unwrap().modified().unwrap(), made);
    let first = packed_at(&job);
    strategy(StrategyKind::Esker, &job);
    assert_eq!(packed_at(&job), first);
    // Other slots, another schedule: another plan beside it.
    job.out_of_core.feature_cache_bytes = Some(12_800);
    strategy(StrategyKind::Esker, &job);
    job.epochs = 2;
    strategy(StrategyKind::Esker, &job);
    assert_eq!(derived(&home(&job), "esker-").len(), 3);
    // And the first is still used.
    job.epochs = 3;
    strategy(StrategyKind::Esker, &job);
    assert_eq!(derived(&home(&job), "esker-").len(), 3);
    check(&job);
}

#[test]
fn a_directory_can_be_made_elsewhere_and_moved() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut job = scheduled(job(&dataset, 1));
    job.out_of_core.feature_cache_bytes = Some(2800);
    let (made, moved) = (directory.path().join("made"), directory.path().join("moved"));
    job.out_of_core.prepared = Some(made.clone());
    strategy(StrategyKind::Esker, &job);
    assert!(derived(&home(&job), "esker-").is_empty() && derived(&home(&job), "samples-").is_empty());
    fs::rename(&made, &moved).unwrap();
    job.out_of_core.prepared = Some(moved.clone());
    let expected = whole(StrategyKind::Memory, &job).0;
    assert!(whole(StrategyKind::Esker, &job).0 == expected);
    assert!(!made.exists());
    assert_eq!(derived(&moved, "esker-").len(), 1);
}

/// The files of a directory.
fn content(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    files.filter(|path| path.is_file()).map(|path| (name(&path), fs::read(&path).unwrap())).collect()
}

#[test]
fn damage_is_named_and_nothing_is_trained_on_it() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 64, Dtype::F32);
    let mut job = job(&dataset, 5);
    (job.epochs, job.epochs_sampled) = (3, Some(1));
    job.out_of_core.feature_cache_bytes = Some(300 * 256);
    let expected = whole(StrategyKind::Memory, &job).0;
    strategy(StrategyKind::Esker, &job);
    let (packed, samples) = (packed_at(&job), derived(&home(&job), "samples-").pop().unwrap());
    let files = [("rows", &packed), ("words", &packed), ("kept", &packed), ("samples", &samples)];
    for (name, folder) in files {
        let path = folder.join(format!("{name}.bin"));
        let whole_file = fs::read(&path).unwrap();
        let mut bytes = whole_file.clone();
        bytes[4096 + 40] ^= 0x04;
        fs::write(&path, &bytes).unwrap();
        let mut source = strategy(StrategyKind::Esker, &job).batches(&job, RunPosition::START, None).unwrap();
        let error = loop {
            match source.next() {
                Ok(Some(_)) => {}
                Ok(None) => panic!("damage in {name} was not found"),
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains(&path.display().to_string()), "{error}");
        fs::write(&path, &whole_file).unwrap();
    }
    // What restores the cache: a run that begins in the middle.
    let path = packed.join("kept-rows.bin");
    let mut bytes = fs::read(&path).unwrap();
    bytes[4096 + 8] ^= 0x01;
    fs::write(&path, &bytes).unwrap();
    let at = RunPosition::train(1, 4);
    let error = strategy(StrategyKind::Esker, &job).batches(&job, at, None).unwrap().next().err().unwrap();
    assert!(error.to_string().contains("kept-rows.bin"), "{error}");
    bytes[4096 + 8] ^= 0x01;
    fs::write(&path, &bytes).unwrap();
    assert!(whole(StrategyKind::Esker, &job).0 == expected);
    // A file that is cut off does not open: rows are packed again.
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert!(whole(StrategyKind::Esker, &job).0 == expected);
}

/// Stops, or goes away as a killed process does, after some progress in a stage.
#[derive(Default)]
struct Ends {
    stage: &'static str,
    left: AtomicI64,
    stop: Option<StopSignal>,
    is_there: Mutex<bool>,
    notes: Mutex<Vec<String>>,
}

impl Progress for Ends {
    fn stage(&self, name: &str, _: Option<u64>, _: Unit) {
        *self.is_there.lock().unwrap() = name == self.stage;
        self.advance(0);
    }
    fn advance(&self, amount: u64) {
        if !*self.is_there.lock().unwrap() || self.left.fetch_sub(amount as i64, Ordering::Relaxed) > 0 {
            return;
        }
        match &self.stop {
            Some(stop) => stop.ask(),
            None => panic!("gone"),
        }
    }
    fn finish(&self) {}
    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_string());
    }
}

#[test]
fn work_that_was_cut_short_goes_on_to_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 300, Dtype::F32);
    let mut job = scheduled(job(&dataset, 7));
    job.out_of_core.feature_cache_bytes = Some(120_000);
    strategy(StrategyKind::Esker, &job);
    let expected = content(&packed_at(&job));
    let moments = [("sample", 5), ("sample", 17), ("plan", 9), ("pack rows", 0), ("pack rows", 400_000)];
    for is_kill in [false, true] {
        fs::remove_dir_all(home(&job)).unwrap();
        for (stage, left) in moments {
            let mut cut_short = job.clone();
            cut_short.stop = StopSignal::default();
            cut_short.out_of_core.safe_point_bytes = Some(50_000);
            let stop = (!is_kill).then(|| cut_short.stop.clone());
            cut_short.progress =
                Arc::new(Ends { stage, left: AtomicI64::new(left), stop, ..Ends::default() });
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                build(StrategyKind::Esker).prepare(&cut_short).map(drop)
            }));
            match (ended, is_kill) {
                (Err(_), true) | (Ok(Err(StrategyError::Stopped)), false) => {}
                (Ok(ended), _) => panic!("{stage} {left}: {:?}", ended.err()),
                (Err(_), false) => panic!("{stage} {left}: a panic"),
            }
        }
        strategy(StrategyKind::Esker, &job);
        assert!(content(&packed_at(&job)) == expected, "{is_kill}");
        assert_eq!(derived(&home(&job), "esker-").len(), 1);
    }
}

#[test]
fn a_disk_without_room_is_named_and_superbatches_serve_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 256, Dtype::F32);
    let with = |bytes: u64| {
        let mut job = scheduled(job(&dataset, 4));
        job.out_of_core.feature_cache_bytes = Some(100 * 1024);
        (job.out_of_core.disk_bytes, job.out_of_core.disk_bytes_explicit) = (bytes, true);
        job
    };
    let expected = whole(StrategyKind::Memory, &with(0)).0;
    // No room for samples, then none for rows.
    for bytes in [400_000, 4_000_000] {
        let job = with(bytes);
        let mut strategy = build(StrategyKind::Esker);
        let notes = strategy.prepare(&job).unwrap().notes;
        assert!(notes[0].contains("superbatches") && notes[0].contains("--disk-budget"), "{notes:?}");
        let mut source = strategy.batches(&job, RunPosition::START, None).unwrap();
        assert!(rest(&mut *source) == expected, "{bytes}");
        // Nothing is left of what was begun.
        let left: Vec<PathBuf> = derived(&home(&job), "").into_iter().collect();
        assert!(left.is_empty(), "{left:?}");
        // Preparing alone, and epochs that repeat, are refused with what would do.
        let mut alone = job.clone();
        alone.out_of_core.prepare_only = true;
        let error = build(StrategyKind::Esker).prepare(&alone).err().unwrap().to_string();
        assert!(error.contains("--disk-budget"), "{error}");
        let mut repeated = job.clone();
        repeated.epochs_sampled = Some(2);
        let error = build(StrategyKind::Esker).prepare(&repeated).err().unwrap().to_string();
        assert!(error.contains("--disk-budget"), "{error}");
        let _ = fs::remove_dir_all(home(&job));
    }
    // With enough, what is there afterwards is within it.
    let job = with(40_000_000);
    assert!(whole(StrategyKind::Esker, &job).0 == expected);
    let taken = |path: &PathBuf| -> u64 {
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
    };
    let all: u64 = derived(&home(&job), "").iter().map(taken).sum();
    assert!(all <= 40_000_000, "{all}");
}

#[test]
fn memory_too_small_for_the_cache_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 64, Dtype::F32);
    let mut job = job(&dataset, 4);
    job.out_of_core.feature_cache_bytes = Some(1 << 30);
    let error = build(StrategyKind::Esker).prepare(&job).err().unwrap();
    assert!(matches!(error, StrategyError::Cache { .. }), "{error}");
}
