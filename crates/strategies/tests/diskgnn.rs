//! DiskGNN yields the batches and bytes of `memory`, whatever its caches, segments and row widths; what it reads is what its plan
//! says; damage is found and named; a disk that is too small is refused with what would do; killed or not, the result is the
//! same to the byte.

mod common;

use common::{batches, dataset, job, strategy};
use esker_sample::{Form, Position};
use esker_store::Dataset;
use esker_strategies::{Job, StrategyKind};
use esker_types::Dtype;
use proptest::prelude::*;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const START: Position = Position { epoch: 0, batch: 0 };

fn packed_at(job: &Job) -> PathBuf {
    let derived = job.dataset.directory().join("derived");
    let found: Vec<PathBuf> = fs::read_dir(&derived).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.into_iter().find(|path| path.extension().is_none()).unwrap()
}

fn packing(job: &Job) -> Value {
    let text = fs::read_to_string(packed_at(job).join("derived.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["parameters"].clone()
}

/// Compares with `memory` from some positions; returns what was counted for the whole run.
fn check(job: &Job) -> esker_strategies::SourceCounters {
    common::same_as_memory(StrategyKind::DiskGnn, job, || {})
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

/// What a static cache of the rows wanted most misses, from the batches themselves.
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
        (job.out_of_core.disk_bytes, job.out_of_core.disk_bytes_said) = (bytes, true);
        job
    };
    let refused = |job: &Job| {
        let mut strategy = common::build(StrategyKind::DiskGnn);
        strategy.prepare(job).err().map(|error| error.to_string())
    };
    let said = refused(&with(100_000)).unwrap();
    let least: u64 = said
        .split("--disk-budget ")
        .find_map(|rest| rest.split('B').next().and_then(|number| number.parse().ok()))
        .unwrap_or_else(|| panic!("{said}"));
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
    // What has more epochs than are wanted serves as well.
    job.epochs_sampled = Some(2);
    assert_eq!(made(&job), second);
    (job.epochs_sampled, job.epochs) = (Some(4), 5);
    assert!(made(&job) > second);
    assert_eq!(packing(&job)["epochs"], 4);
    // Other batches have another directory.
    job.settings.seed = 99;
    made(&job);
    assert_eq!(fs::read_dir(dataset.directory().join("derived")).unwrap().count(), 2);
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

#[test]
fn damage_is_found_when_it_is_read_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 100, Dtype::F32);
    let mut job = job(&dataset, 6);
    job.out_of_core.feature_cache_bytes = Some(40_000);
    job.out_of_core.segment = Some(4);
    strategy(StrategyKind::DiskGnn, &job);
    let at = packed_at(&job);
    let whole = content(&at);
    let mut named = BTreeSet::new();
    for (file, bytes) in whole.iter().filter(|(file, _)| file.ends_with(".bin")) {
        // Behind the header and in front of the checksums.
        for place in (0..12).map(|step| 4096 + step * (bytes.len() - 4200) / 12) {
            let mut damaged = bytes.clone();
            damaged[place] ^= 0x10;
            fs::write(at.join(file), &damaged).unwrap();
            let mut strategy = common::build(StrategyKind::DiskGnn);
            let mut used = None;
            let outcome = strategy.prepare(&job).and_then(|()| {
                used = Some(());
                let mut source = strategy.batches(&job, START)?;
                while source.next()?.is_some() {}
                Ok(())
            });
            match outcome {
                // A byte that nobody reads was hit: behind the last row, or of a segment's row that this run does not want.
                Ok(()) => assert!(used.is_some()),
                Err(error) => {
                    let said = error.to_string();
                    assert!(said.contains(file) || said.contains(".bin"), "{file} at {place}: {said}");
                    named.insert(file.clone());
                }
            }
            if content(&at) != whole {
                fs::remove_dir_all(&at).unwrap();
                fs::create_dir(&at).unwrap();
                whole.iter().for_each(|(name, bytes)| fs::write(at.join(name), bytes).unwrap());
            }
        }
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
