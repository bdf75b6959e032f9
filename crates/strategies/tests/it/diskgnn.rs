//! DiskGNN yields the batches and bytes of `memory`, whatever its caches, segments and row widths; what it reads is what its plan
//! says; damage is found and named; a disk that is too small is refused with what would do; killed or not, the result is the
//! same to the byte.

use crate::common::{batches, dataset, job, strategy};
use esker_sample::order::{Batching, Shuffled};
use esker_sample::{Form, NodeBatches, Position, Seeds};
use esker_store::Dataset;
use esker_strategies::{Job, StrategyError, StrategyKind};
use esker_types::{Dtype, NodeId, Progress, StopSignal, Unit};
use proptest::prelude::*;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

const START: Position = Position { epoch: 0, batch: 0 };

/// Directories of a kind, those made last at the end.
fn derived(job: &Job, kind: &str) -> Vec<PathBuf> {
    let derived = job.dataset.directory().join("derived");
    let found = fs::read_dir(&derived).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let mut found: Vec<PathBuf> =
        found.filter(|path| path.extension().is_none() && name(path).starts_with(kind)).collect();
    found.sort_by_key(|path| fs::metadata(path.join("derived.json")).unwrap().modified().unwrap());
    found
}

fn packed_at(job: &Job) -> PathBuf {
    derived(job, "diskgnn-").pop().unwrap()
}

fn packing(job: &Job) -> Value {
    let text = fs::read_to_string(packed_at(job).join("derived.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["parameters"].clone()
}

/// Compares with `memory` from some positions; returns what was counted for the whole run.
fn check(job: &Job) -> esker_strategies::SourceCounters {
    crate::common::same_as_memory(StrategyKind::DiskGnn, job, || {})
}

#[test]
fn caches_of_every_size_yield_the_same_batches() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut ratios = Vec::new();
    for (seed, rows) in [(1, 0), (2, 1), (3, 200), (4, 2000), (5, 100_000)] {
        let mut job = job(&dataset, seed);
        job.out_of_core.feature_cache_bytes = Some(rows * 28);
        let counters = check(&job);
        ratios.push(counters.hits[0].1 as f64 / counters.rows as f64);
    }
    assert!(ratios[0] == 0.0 && ratios[1] > 0.0 && ratios[4] == 1.0, "{ratios:?}");
    assert!(ratios.windows(2).all(|pair| pair[0] <= pair[1] + 0.01), "{ratios:?}");
}

#[test]
fn rows_of_every_width_and_type_yield_the_same_batches_packed_and_shared() {
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
        for segment in [1, 5, 1000] {
            let mut job = job(&dataset, 9);
            job.out_of_core.feature_cache_bytes = Some(100 * dim);
            job.out_of_core.segment = Some(segment);
            check(&job);
            let shared = packing(&job)["shared"].as_u64().unwrap();
            assert_eq!(shared > 0, segment > 1, "{dim} {dtype} {segment}");
        }
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

/// What a static cache of the rows accessed most misses, from the batches themselves.
fn static_misses(job: &Job, slots: usize) -> u64 {
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    for (_, sample, _) in batches(StrategyKind::Memory, job, START).0 {
        sample.node_ids.iter().for_each(|node| *counts.entry(node.0).or_default() += 1);
    }
    let mut counts: Vec<u64> = counts.into_values().collect();
    counts.sort_unstable_by_key(|count| std::cmp::Reverse(*count));
    counts[slots.min(counts.len())..].iter().sum()
}

#[test]
fn what_is_read_is_what_a_static_cache_misses() {
    let directory = tempfile::tempdir().unwrap();
    // Rows so wide that ends of pages hardly count.
    let dataset = dataset(directory.path(), 1024, Dtype::F32);
    for slots in [0, 150] {
        let mut job = job(&dataset, 3);
        job.out_of_core.feature_cache_bytes = Some(slots * 4096);
        let counters = batches(StrategyKind::DiskGnn, &job, START).1;
        let misses = static_misses(&job, slots as usize);
        assert_eq!(packing(&job)["misses"], misses);
        assert!(counters.bytes_read >= misses * 4096);
        assert!(counters.bytes_read as f64 <= misses as f64 * 4096.0 * 1.02, "{counters:?} {misses}");
        // One read of up to a MiB after the other, not one a row.
        assert!(counters.reads < misses / 8, "{counters:?}");
    }
}

#[test]
fn a_disk_too_small_makes_segments_and_one_far_too_small_is_refused_with_what_would_do() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 256, Dtype::F32);
    let with = |bytes: u64| {
        let mut job = job(&dataset, 4);
        job.out_of_core.feature_cache_bytes = Some(0);
        job.epochs_sampled = Some(3);
        (job.out_of_core.disk_bytes, job.out_of_core.disk_bytes_explicit) = (bytes, true);
        job
    };
    let refused = |job: &Job| {
        let mut strategy = crate::common::build(StrategyKind::DiskGnn);
        strategy.prepare(job).err().map(|error| error.to_string())
    };
    // Refused once while it samples, and once when it is known what all samples need.
    let mut least = 100_000u64;
    for _ in 0..2 {
        let said = refused(&with(least)).unwrap();
        least = said_to_do(&said);
    }
    assert!(refused(&with(least - 1)).is_some_and(|said| said.contains("--disk-budget")));
    let mut segments = Vec::new();
    for bytes in [least, least + least / 8, 1 << 30] {
        let job = with(bytes);
        check(&job);
        let taken: u64 = fs::read_dir(packed_at(&job))
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().len())
            .sum();
        assert!(taken <= bytes, "{taken} bytes of {bytes}");
        segments.push(packing(&job)["segment"].as_u64().unwrap());
    }
    assert!(segments[0] >= segments[1] && segments[1] > 1 && segments[2] == 1, "{segments:?}");
}

#[test]
fn packed_rows_are_used_again_until_something_changes() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 16, Dtype::F32);
    let mut job = job(&dataset, 1);
    job.out_of_core.feature_cache_bytes = Some(6400);
    let made = |job: &Job| {
        strategy(StrategyKind::DiskGnn, job);
        fs::metadata(packed_at(job).join("derived.json")).unwrap().modified().unwrap()
    };
    let first = made(&job);
    assert_eq!(made(&job), first);
    job.out_of_core.feature_cache_bytes = Some(12_800);
    let second = made(&job);
    assert!(second > first);
    // What has more epochs than are requested serves as well.
    job.epochs_sampled = Some(2);
    assert_eq!(made(&job), second);
    (job.epochs_sampled, job.epochs) = (Some(4), 5);
    assert!(made(&job) > second);
    assert_eq!(packing(&job)["epochs"], 4);
    // Other batches have another directory.
    job.settings.seed = 99;
    made(&job);
    assert_eq!(derived(&job, "samples-").len(), 2);
}

#[test]
fn epochs_repeat_those_that_were_sampled() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut job = job(&dataset, 8);
    job.epochs_sampled = Some(2);
    check(&job);
    let (all, _) = batches(StrategyKind::DiskGnn, &job, START);
    let of = |epoch: u64| all.iter().filter(move |batch| batch.0.epoch == epoch).map(|batch| &batch.1);
    assert!(of(0).eq(of(2)) && !of(0).eq(of(1)));
}

#[test]
fn a_directory_made_elsewhere_serves_from_anywhere() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut job = job(&dataset, 5);
    job.out_of_core.prepared = Some(directory.path().join("made"));
    strategy(StrategyKind::DiskGnn, &job);
    assert!(!dataset.directory().join("derived").exists());
    fs::rename(directory.path().join("made"), directory.path().join("moved")).unwrap();
    job.out_of_core.prepared = Some(directory.path().join("moved"));
    let before = fs::metadata(directory.path().join("moved/derived.json")).unwrap().modified().unwrap();
    check(&job);
    let after = fs::metadata(directory.path().join("moved/derived.json")).unwrap().modified().unwrap();
    assert_eq!(before, after);
}

/// Every byte of every file of a directory, by name.
fn content(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    files
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap()))
        .collect()
}

/// Damages every file of a directory here and there, and collects those that are named.
fn damage_each(job: &Job, at: &Path, named: &mut BTreeSet<String>) {
    let whole = content(at);
    for (file, bytes) in whole.iter().filter(|(file, _)| file.ends_with(".bin")) {
        // Behind the header and in front of the checksums.
        for place in (0..12).map(|step| 4096 + step * (bytes.len() - 4200) / 12) {
            let mut damaged = bytes.clone();
            damaged[place] ^= 0x10;
            fs::write(at.join(file), &damaged).unwrap();
            let mut strategy = crate::common::build(StrategyKind::DiskGnn);
            let mut used = None;
            let outcome = strategy.prepare(job).and_then(|_| {
                used = Some(());
                let mut source = strategy.batches(job, START.into(), None)?;
                while source.next()?.is_some() {}
                Ok(())
            });
            match outcome {
                // A byte that nobody reads was hit: after the last row, or of a segment's row that this run does not want.
                Ok(()) => assert!(used.is_some()),
                Err(error) => {
                    let said = error.to_string();
                    assert!(said.contains(file) || said.contains(".bin"), "{file} at {place}: {said}");
                    named.insert(file.clone());
                }
            }
            if content(at) != whole {
                fs::remove_dir_all(at).unwrap();
                fs::create_dir(at).unwrap();
                whole.iter().for_each(|(name, bytes)| fs::write(at.join(name), bytes).unwrap());
            }
        }
    }
}

#[test]
fn damage_is_found_when_it_is_read_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 100, Dtype::F32);
    let mut job = job(&dataset, 6);
    job.out_of_core.feature_cache_bytes = Some(40_000);
    job.out_of_core.segment = Some(4);
    strategy(StrategyKind::DiskGnn, &job);
    let mut named = BTreeSet::new();
    for at in [packed_at(&job), derived(&job, "samples-").remove(0)] {
        damage_each(&job, &at, &mut named);
    }
    for file in ["rows.bin", "samples.bin", "words.bin", "shared.bin", "batches.bin"] {
        assert!(named.contains(file), "{named:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Whatever is asked for, the batches are those of `memory`.
    #[test]
    fn any_room_yields_the_same_batches(
        seed in 0u64..1000, rows in 0u64..900, segment in 1u32..30, dim in 1u64..70, sequential in any::<bool>(),
        memory in 100u64..300,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let dataset = dataset(directory.path(), dim, Dtype::F16);
        let mut job = job(&dataset, seed);
        job.out_of_core.feature_cache_bytes = Some(rows * dim * 2);
        job.out_of_core.segment = Some(segment);
        job.out_of_core.sequential = sequential;
        job.strategy_bytes = memory << 20;
        check(&job);
    }
}

/// Keeps the names of stages and what is noted, and may ask for an end in a stage.
#[derive(Default)]
struct Watched {
    stages: Mutex<Vec<String>>,
    notes: Mutex<Vec<String>>,
    /// The stage, how much of it, and whom to ask.
    ends: Option<(&'static str, i64, StopSignal)>,
    done: AtomicI64,
}

impl Progress for Watched {
    fn stage(&self, name: &str, _: Option<u64>, _: Unit) {
        self.stages.lock().unwrap().push(name.to_string());
        self.done.store(0, Ordering::Relaxed);
    }
    fn advance(&self, amount: u64) {
        let done = self.done.fetch_add(amount as i64, Ordering::Relaxed) + amount as i64;
        if let Some((stage, most, stop)) = &self.ends
            && self.stages.lock().unwrap().last().is_some_and(|name| name == stage)
            && done > *most
        {
            stop.ask();
        }
    }
    fn finish(&self) {}
    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_string());
    }
}

/// Prepares, and returns the names of stages and what was noted.
fn watched(job: &Job) -> (Vec<String>, Vec<String>) {
    let progress = Arc::new(Watched::default());
    let mut job = job.clone();
    job.progress = progress.clone();
    strategy(StrategyKind::DiskGnn, &job);
    let taken = |list: &Mutex<Vec<String>>| list.lock().unwrap().clone();
    (taken(&progress.stages), taken(&progress.notes))
}

/// What a job shows that finds everything on disk.
fn only_loaded() -> (Vec<String>, Vec<String>) {
    (vec!["load cached rows".to_string()], vec![])
}

#[test]
fn packed_rows_of_several_sizes_stand_beside_each_other_and_are_sampled_once() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 16, Dtype::F32);
    let mut job = job(&dataset, 1);
    let with = |job: &mut Job, bytes: u64| {
        job.out_of_core.feature_cache_bytes = Some(bytes);
        watched(job)
    };
    assert!(with(&mut job, 6400).0.contains(&"sample".to_string()));
    let (stages, notes) = with(&mut job, 12_800);
    assert!(
        !stages.contains(&"sample".to_string()) && stages.contains(&"pack rows".to_string()),
        "{stages:?}"
    );
    assert!(
        notes.iter().any(|note| note.contains("--feature-cache asks for 200: packing again")),
        "{notes:?}"
    );
    for bytes in [6400, 12_800, 6400] {
        assert_eq!(with(&mut job, bytes), only_loaded(), "both are there");
        check(&job);
    }
    assert_eq!((derived(&job, "diskgnn-").len(), derived(&job, "samples-").len()), (2, 1));
    // Fewer epochs than were sampled, and more.
    (job.epochs_sampled, job.epochs) = (Some(5), 5);
    let (stages, notes) = with(&mut job, 6400);
    assert!(stages.contains(&"sample".to_string()), "{stages:?}");
    assert!(notes.iter().any(|note| note.contains("have 3 of 5 epochs: packing again")), "{notes:?}");
    check(&job);
    assert_eq!(derived(&job, "samples-").len(), 1);
    (job.epochs_sampled, job.epochs) = (None, 3);
    assert_eq!(with(&mut job, 12_800), only_loaded(), "it reads the first epochs of longer samples");
    check(&job);
}

#[test]
fn memory_that_drifts_uses_what_is_packed_and_much_more_memory_says_why_it_packs_anew() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 65_536, Dtype::I8);
    let mut job = job(&dataset, 1);
    let with = |job: &mut Job, mebibytes: u64| {
        job.strategy_bytes = mebibytes << 20;
        watched(job).1
    };
    // Memory that holds a few rows beside the batches.
    let least = (60..400).step_by(5).find(|mebibytes| {
        job.strategy_bytes = mebibytes << 20;
        crate::common::build(StrategyKind::DiskGnn).prepare(&job).is_ok()
    });
    let least = least.unwrap();
    for mebibytes in [least, least + 1, least] {
        assert!(with(&mut job, mebibytes).is_empty(), "{mebibytes} MiB");
    }
    let first = packed_at(&job);
    let slots = packing(&job)["slots"].as_u64().unwrap();
    let notes = with(&mut job, least + 20);
    let said =
        notes.iter().find(|note| note.contains("packing again")).unwrap_or_else(|| panic!("{notes:?}"));
    assert!(
        said.contains(&first.display().to_string()) && said.contains(&esker_types::grouped(slots)),
        "{said}"
    );
    assert_eq!(derived(&job, "diskgnn-").len(), 2);
    for mebibytes in [least, least + 1, least + 20, least + 21, least] {
        assert!(with(&mut job, mebibytes).is_empty(), "{mebibytes} MiB");
    }
    // Where hardly anything is missed, more memory changes nothing.
    with(&mut job, 600);
    assert_eq!(packing(&job)["misses"], 0);
    assert!(with(&mut job, 900).is_empty());
}

/// Bytes of everything in a directory.
fn bytes_in(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes = |entry: fs::DirEntry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes_in(&entry.path()),
        found => found.map_or(0, |found| found.len()),
    };
    entries.map(bytes).sum()
}

/// The most that is in the dataset's derived data while something is done.
fn most_bytes(dataset: &Dataset, work: impl FnOnce()) -> u64 {
    let (derived, is_over) = (dataset.directory().join("derived"), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most = 0;
            while !is_over.load(Ordering::Relaxed) {
                most = most.max(bytes_in(&derived));
            }
            most
        });
        work();
        is_over.store(true, Ordering::Relaxed);
        watcher.join().unwrap()
    })
}

/// What a refusal says would do.
fn said_to_do(error: &str) -> u64 {
    let number = |rest: &str| rest.split(" bytes)").next().and_then(|number| number.parse().ok());
    error.split('(').find_map(number).unwrap_or_else(|| panic!("{error}"))
}

#[test]
fn preparing_keeps_to_the_disk_budget_from_the_first_sample_on() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 64, Dtype::F32);
    let prepare = |bytes: u64, epochs: Option<u64>| {
        let mut job = job(&dataset, 4);
        job.epochs_sampled = epochs;
        job.out_of_core.feature_cache_bytes = Some(20_000);
        (job.out_of_core.disk_bytes, job.out_of_core.disk_bytes_explicit) = (bytes, true);
        crate::common::build(StrategyKind::DiskGnn).prepare(&job).map(|_| packing(&job))
    };
    // Not even the samples: it ends while it samples.
    let most = most_bytes(&dataset, || {
        let said = prepare(80_000, Some(3)).unwrap_err().to_string();
        assert!(said.contains("samples of") && said_to_do(&said) > 80_000, "{said}");
    });
    assert!(most < 80_000 + 20_000, "{most} bytes in 80 000");
    let mut budget = 80_000;
    for _ in 0..2 {
        budget = said_to_do(&prepare(budget, Some(3)).unwrap_err().to_string());
    }
    for bytes in [budget, budget + budget / 4, budget * 2] {
        let most = most_bytes(&dataset, || drop(prepare(bytes, Some(3)).unwrap()));
        assert!(most <= bytes, "{most} bytes in {bytes}");
    }
    // Where the disk says how many epochs there are, it takes those that fit.
    fs::remove_dir_all(dataset.directory().join("derived")).unwrap();
    let mut epochs = 0;
    let most = most_bytes(&dataset, || epochs = prepare(budget, None).unwrap()["epochs"].as_u64().unwrap());
    assert!((1..3).contains(&epochs) && most <= budget, "{epochs} epochs, {most} bytes in {budget}");
}

#[test]
fn packed_rows_that_were_not_used_for_longest_give_way_and_that_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 64, Dtype::F32);
    let mut job = job(&dataset, 4);
    let with = |job: &mut Job, rows: u64| {
        job.out_of_core.feature_cache_bytes = Some(rows * 256);
        watched(job).1
    };
    with(&mut job, 100);
    let (one, samples) = (bytes_in(&packed_at(&job)), bytes_in(&derived(&job, "samples-")[0]));
    with(&mut job, 200);
    let (first, second) = (derived(&job, "diskgnn-").remove(0), packed_at(&job));
    // The first is used again, so the second goes.
    with(&mut job, 100);
    let budget = samples + one * 7 / 2;
    (job.out_of_core.disk_bytes, job.out_of_core.disk_bytes_explicit) = (budget, true);
    let notes = with(&mut job, 50);
    let said = notes.iter().find(|note| note.contains("is removed")).unwrap_or_else(|| panic!("{notes:?}"));
    assert!(said.contains(&second.display().to_string()), "{said}");
    assert!(first.exists() && derived(&job, "diskgnn-").len() == 2);
    assert!(bytes_in(&dataset.directory().join("derived")) <= budget);
    check(&job);
}

#[test]
fn segments_of_any_number_of_batches_are_counted_exactly() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 64, Dtype::F32);
    // More batches than sizes that are told apart: these come in steps of two.
    let with = |segment: u32, bytes: u64| {
        let mut job = job(&dataset, 4);
        let order = Shuffled { batching: Batching::new(500, 1, false).unwrap(), seed: 4 };
        let seeds = Seeds::Nodes((0..500).map(|node| NodeId(node * 3)).collect());
        (job.batches, job.largest_batch) = (Arc::new(NodeBatches::new(order, seeds).unwrap()), 1);
        (job.epochs, job.epochs_sampled) = (3, Some(3));
        job.out_of_core.feature_cache_bytes = Some(0);
        job.out_of_core.segment = Some(segment);
        (job.out_of_core.disk_bytes, job.out_of_core.disk_bytes_explicit) = (bytes, true);
        job
    };
    let refused =
        crate::common::build(StrategyKind::DiskGnn).prepare(&with(7, 4 << 20)).unwrap_err().to_string();
    let least = said_to_do(&refused);
    assert!(crate::common::build(StrategyKind::DiskGnn).prepare(&with(7, least - 1)).is_err());
    let most = most_bytes(&dataset, || drop(check(&with(7, least))));
    assert!(most <= least && packing(&with(7, least))["segment"] == 7, "{most} bytes in {least}");
    // More than there are: all of them; and they are found again.
    let job = with(100_000, 1 << 30);
    strategy(StrategyKind::DiskGnn, &job);
    assert_eq!(packing(&job)["segment"], 1500);
    assert_eq!(watched(&job), only_loaded());
}

#[test]
fn a_wish_to_stop_ends_preparing_soon_and_the_next_run_goes_on_to_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let (dataset, job, expected) = undisturbed(directory.path());
    let samples = content(&derived(&job, "samples-")[0]);
    fs::remove_dir_all(dataset.directory().join("derived")).unwrap();
    for (stage, done) in
        [("sample", 5), ("sample", 17), ("lay rows out", 9), ("pack rows", 0), ("order caches", 0)]
    {
        let mut stopped = job.clone();
        stopped.stop = StopSignal::default();
        let ends = Some((stage, done, stopped.stop.clone()));
        stopped.progress = Arc::new(Watched { ends, ..Watched::default() });
        let ended = crate::common::build(StrategyKind::DiskGnn).prepare(&stopped);
        // The last part of a cache may have been moved by then.
        let is_over = stage == "order caches" && ended.is_ok();
        assert!(is_over || matches!(ended, Err(StrategyError::Stopped)), "{stage}: {:?}", ended.err());
    }
    strategy(StrategyKind::DiskGnn, &job);
    assert!(content(&packed_at(&job)) == expected);
    assert!(content(&derived(&job, "samples-")[0]) == samples);
}

#[test]
fn a_directory_that_holds_everything_keeps_its_samples_for_another_memory() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut job = job(&dataset, 5);
    let at = directory.path().join("made");
    job.out_of_core.prepared = Some(at.clone());
    job.out_of_core.feature_cache_bytes = Some(2800);
    assert!(watched(&job).0.contains(&"sample".to_string()));
    let samples = || fs::metadata(at.join("samples.bin")).unwrap().ino();
    let before = samples();
    job.out_of_core.feature_cache_bytes = Some(5600);
    let (stages, notes) = watched(&job);
    assert!(
        !stages.contains(&"sample".to_string()) && notes[0].contains("packing again"),
        "{stages:?} {notes:?}"
    );
    assert_eq!(samples(), before);
    check(&job);
    (job.epochs, job.epochs_sampled) = (5, Some(5));
    assert!(watched(&job).0.contains(&"sample".to_string()));
    check(&job);
    let names: Vec<String> = content(&at).into_keys().collect();
    assert!(names.iter().all(|name| name.ends_with(".bin") || name == "derived.json"), "{names:?}");
    job.settings.seed = 99;
    let said = crate::common::build(StrategyKind::DiskGnn).prepare(&job).unwrap_err().to_string();
    assert!(said.contains("other batches"), "{said}");
}

/// A job with a cache in memory and caches of segments, and what it packs.
fn undisturbed(directory: &Path) -> (Arc<Dataset>, Job, BTreeMap<String, Vec<u8>>) {
    let dataset = dataset(directory, 300, Dtype::F32);
    let mut job = job(&dataset, 7);
    job.out_of_core.feature_cache_bytes = Some(120_000);
    job.out_of_core.segment = Some(6);
    strategy(StrategyKind::DiskGnn, &job);
    let content = content(&packed_at(&job));
    (dataset, job, content)
}

#[test]
fn work_that_was_cut_short_goes_on_to_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let (dataset, job, expected) = undisturbed(directory.path());
    // A journal that knows nothing, half a log, another job's work: whatever is there, the result is the same.
    fs::remove_dir_all(dataset.directory().join("derived")).unwrap();
    let started: Arc<Dataset> = dataset.clone();
    let partial = packed_partial(&started, &job);
    fs::create_dir_all(partial.join("work")).unwrap();
    fs::write(partial.join("lock"), "").unwrap();
    fs::write(partial.join("work/journal.json"), "{").unwrap();
    fs::write(partial.join("rows.bin"), "half").unwrap();
    strategy(StrategyKind::DiskGnn, &job);
    assert!(content(&packed_at(&job)) == expected);
}

/// Goes away, as a killed process does, when the first part of a cache has been moved.
struct Gone(std::sync::Mutex<bool>);

impl esker_types::Progress for Gone {
    fn stage(&self, name: &str, _: Option<u64>, _: esker_types::Unit) {
        *self.0.lock().unwrap() = name == "order caches";
    }
    fn advance(&self, amount: u64) {
        let is_moving = *self.0.lock().unwrap();
        assert!(!is_moving || amount == 0, "gone");
    }
    fn finish(&self) {}
    fn note(&self, _: &str) {}
}

#[test]
fn a_part_that_was_being_moved_comes_from_the_features_again() {
    use std::os::unix::fs::FileExt;
    let directory = tempfile::tempdir().unwrap();
    let (dataset, job, expected) = undisturbed(directory.path());
    let partial = packed_partial(&dataset, &job);
    let mut cut_short = job.clone();
    // Parts are put in order at once only if a safe point may write them.
    cut_short.out_of_core.safe_point_bytes = Some(50_000);
    cut_short.progress = Arc::new(Gone(Default::default()));
    let gone = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        strategy(StrategyKind::DiskGnn, &cut_short);
    }));
    assert!(gone.is_err() && partial.exists(), "it was to end while caches were being ordered");
    // What a kill leaves of a part is not known.
    let rows = fs::OpenOptions::new().write(true).open(partial.join("rows.bin")).unwrap();
    rows.write_all_at(&[0xAB; 5000], 4096 + 700).unwrap();
    strategy(StrategyKind::DiskGnn, &job);
    assert!(content(&packed_at(&job)) == expected);
}

fn packed_partial(dataset: &Dataset, job: &Job) -> PathBuf {
    strategy(StrategyKind::DiskGnn, job);
    let made = packed_at(job);
    let name = made.file_name().unwrap().to_string_lossy().into_owned();
    fs::remove_dir_all(dataset.directory().join("derived")).unwrap();
    dataset.directory().join("derived").join(format!("{name}.partial"))
}
