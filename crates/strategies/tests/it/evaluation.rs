//! DiskGNN packs the rows of evaluations beside those of training: once, for the rows that training caches. They yield the
//! batches and bytes of `memory`. Damage is found and named. If there is no room for them, evaluation reads rows one by
//! one, and a note says so.

use crate::common::{dataset, job, rest, scheduled, strategy};
use esker_strategies::{Job, Phase, RunPosition, StrategyKind};
use esker_types::{Dtype, Progress, Unit};
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// The stages and notes of preparing.
#[derive(Default)]
struct Watched {
    stages: Mutex<Vec<String>>,
    notes: Mutex<Vec<String>>,
}

impl Progress for Watched {
    fn stage(&self, name: &str, _: Option<u64>, _: Unit) {
        self.stages.lock().unwrap().push(name.to_string());
    }
    fn advance(&self, _: u64) {}
    fn finish(&self) {}
    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_string());
    }
}

/// Compares a whole run with `memory`. Returns the stages and notes of preparing it.
fn check(job: &Job) -> (Vec<String>, Vec<String>) {
    let whole =
        |kind, job: &Job| rest(&mut *strategy(kind, job).batches(job, RunPosition::START, None).unwrap());
    let progress = Arc::new(Watched::default());
    let watched = Job { progress: progress.clone(), ..job.clone() };
    assert!(whole(StrategyKind::DiskGnn, &watched) == whole(StrategyKind::Memory, job));
    let taken = |list: &Mutex<Vec<String>>| list.lock().unwrap().clone();
    (taken(&progress.stages), taken(&progress.notes))
}

/// Directories inside those of packed rows.
fn evaluations(job: &Job) -> Vec<PathBuf> {
    let inside = |path: PathBuf| fs::read_dir(path).into_iter().flatten().map(|entry| entry.unwrap().path());
    let packed = inside(job.dataset.directory().join("derived"));
    let mut found: Vec<PathBuf> = packed
        .flat_map(inside)
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("evaluation-"))
        .collect();
    found.sort();
    found
}

#[test]
fn evaluations_are_packed_once_for_the_rows_that_training_caches() {
    for (dim, dtype, rows) in
        [(7, Dtype::F32, 0), (7, Dtype::F32, 200), (7, Dtype::F32, 100_000), (300, Dtype::F16, 90)]
    {
        let directory = tempfile::tempdir().unwrap();
        let dataset = dataset(directory.path(), dim, dtype);
        let mut job = scheduled(job(&dataset, 3));
        job.epochs_sampled = Some(3);
        job.out_of_core.feature_cache_bytes = Some(rows * dim * dtype.bytes());
        let (stages, notes) = check(&job);
        // Training, validation, the last validation and the test.
        let count = |name: &str| stages.iter().filter(|stage| *stage == name).count();
        assert_eq!((count("sample"), evaluations(&job).len()), (4, 3), "{stages:?} {notes:?}");
        let (stages, notes) = check(&job);
        assert!(stages == ["load cached rows"] && notes.is_empty(), "{stages:?} {notes:?}");
        // Other cached rows need other packed rows. Batches are sampled again inside them.
        job.out_of_core.feature_cache_bytes = Some((rows + 50) * dim * dtype.bytes());
        check(&job);
        let expected = if rows > 2000 { 3 } else { 6 };
        assert!(evaluations(&job).len() >= expected, "{rows}: {:?}", evaluations(&job));
    }
}

#[test]
fn a_disk_without_room_reads_rows_of_evaluation_one_by_one_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 300, Dtype::F32);
    let mut job = scheduled(job(&dataset, 3));
    job.out_of_core.feature_cache_bytes = Some(0);
    job.out_of_core.disk_bytes_explicit = true;
    job.epochs_sampled = Some(3);
    // What training takes, and little more.
    let training = Job { schedule: Default::default(), ..job.clone() };
    check(&training);
    let taken = |path: &PathBuf| -> u64 {
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
    };
    let derived =
        fs::read_dir(dataset.directory().join("derived")).unwrap().map(|entry| entry.unwrap().path());
    job.out_of_core.disk_bytes = derived.map(|path| taken(&path)).sum::<u64>() + (1 << 20);
    let (_, notes) = check(&job);
    assert!(notes.iter().any(|note| note.contains("evaluation reads rows one by one")), "{notes:?}");
}

#[test]
fn damaged_rows_of_an_evaluation_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 300, Dtype::F32);
    let mut job = scheduled(job(&dataset, 3));
    job.out_of_core.feature_cache_bytes = Some(100 * 1200);
    check(&job);
    for evaluation in evaluations(&job) {
        let path = evaluation.join("rows.bin");
        let mut bytes = fs::read(&path).unwrap();
        bytes[5000] ^= 0x10;
        fs::write(&path, &bytes).unwrap();
        let mut source =
            strategy(StrategyKind::DiskGnn, &job).batches(&job, RunPosition::START, None).unwrap();
        let error = loop {
            match source.next() {
                Ok(Some(_)) => {}
                Ok(None) => panic!("damage in {} was not found", path.display()),
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains(&path.display().to_string()) && error.contains("batch 0"), "{error}");
        bytes[5000] ^= 0x10;
        fs::write(&path, &bytes).unwrap();
    }
    check(&job);
}

#[test]
fn an_evaluation_that_was_cut_short_is_packed_again() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 30, Dtype::F32);
    let mut job = scheduled(job(&dataset, 3));
    job.out_of_core.feature_cache_bytes = Some(100 * 120);
    check(&job);
    let found = evaluations(&job);
    // As if it had been killed before the last one was finished, and another lost a file.
    fs::remove_dir_all(&found[0]).unwrap();
    fs::remove_file(found[1].join("words.bin")).unwrap();
    let (stages, notes) = check(&job);
    assert_eq!(evaluations(&job), found, "{stages:?} {notes:?}");
    assert!(stages.contains(&"pack rows".to_string()) || stages.contains(&"pack".to_string()), "{stages:?}");
    let mut source = strategy(StrategyKind::DiskGnn, &job).batches(&job, RunPosition::START, None).unwrap();
    source.skip_to(RunPosition::start_of(Phase::Test)).unwrap();
    assert!(matches!(source.next().unwrap().unwrap().at.phase, Phase::Test));
}
