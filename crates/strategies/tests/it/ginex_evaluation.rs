//! Ginex plans evaluations with training: it yields the batches and bytes of `memory` in every phase, whatever its
//! superbatches and caches. Evaluations are sampled once, also by a resumed run, if the disk budget allows it.

use crate::common::{Found, dataset, job, rest, scheduled, strategy};
use esker_sample::{Batches, Edge, Fanout, Position, SampleError};
use esker_store::Dataset;
use esker_strategies::{Inference, Job, Phase, RunPosition, StrategyKind};
use esker_types::{Dtype, NodeId, Progress, Unit};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Batches of a run: 16 of training, 3 of validation, 8, 3, one of the last validation, 4 of the test.
const BATCHES: usize = 35;

fn whole(kind: StrategyKind, job: &Job) -> Vec<Found> {
    rest(&mut *strategy(kind, job).batches(job, RunPosition::START, None).unwrap())
}

/// What is on disk, apart from unlinked files.
fn files(job: &Job) -> Vec<String> {
    let inside = |name: &str| fs::read_dir(job.out_of_core.scratch.join(name)).into_iter().flatten();
    let all = inside("superbatches").chain(inside("evaluation"));
    let mut names: Vec<String> = all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Compares a whole run, and runs from some positions, with `memory`.
fn check(job: &Job) {
    let expected = whole(StrategyKind::Memory, job);
    assert_eq!(expected.len(), BATCHES);
    for (from, first) in [(0, 0), (13, 13), (18, 16), (19, 19), (29, 27), (30, 30), (33, 31)] {
        let at = expected[from].0;
        let mut source = strategy(StrategyKind::Ginex, job).batches(job, at, None).unwrap();
        assert!(rest(&mut *source) == expected[first..], "from {at} with {:?}", job.out_of_core);
        assert!(files(job).is_empty(), "{:?}", files(job));
    }
}

fn small() -> (tempfile::TempDir, Arc<Dataset>) {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    (directory, dataset)
}

#[test]
fn superbatches_of_every_length_yield_the_same_evaluations() {
    let (_directory, dataset) = small();
    for superbatch in [1, 2, 5, 8, 11, 19, 1000] {
        let mut job = scheduled(job(&dataset, 3));
        job.out_of_core.superbatch = Some(superbatch);
        check(&job);
        // They are planned together with training.
        let mut source = strategy(StrategyKind::Ginex, &job).batches(&job, RunPosition::START, None).unwrap();
        assert_eq!(rest(&mut *source).len(), BATCHES);
        assert_eq!(source.counters().stages[1].items, (BATCHES as u64).div_ceil(superbatch), "plans");
    }
}

#[test]
fn caches_of_every_size_yield_the_same_evaluations() {
    let (_directory, dataset) = small();
    for rows in [0, 1, 200, 100_000] {
        let mut job = scheduled(job(&dataset, 3));
        job.out_of_core.feature_cache_bytes = Some(rows * 28);
        check(&job);
    }
}

/// Changes all evaluations of a job.
fn change(job: &mut Job, change: impl Fn(&mut Inference)) {
    let schedule = &mut job.schedule;
    let all = [&mut schedule.validation, &mut schedule.last_validation, &mut schedule.test];
    all.into_iter().flatten().for_each(change);
}

#[test]
fn evaluations_with_more_neighbours_fit_the_memory_of_the_table() {
    let (_directory, dataset) = small();
    let mut job = scheduled(job(&dataset, 3));
    let fanouts = vec![Fanout::AtMost(9), Fanout::AtMost(7)];
    change(&mut job, |over| over.settings.fanouts = fanouts.clone());
    let training_bytes = StrategyKind::Ginex.needs(&job).unwrap().host.total();
    job.evaluation.as_mut().unwrap().settings.fanouts = fanouts;
    let table = StrategyKind::Ginex.needs(&job).unwrap().host;
    assert!(table.total() > training_bytes, "evaluation is the larger phase");
    assert!(table.lines.iter().all(|line| !line.what.contains("evaluation")), "{table}");
    for steps_in_flight in [0, 2] {
        job.steps_in_flight = steps_in_flight;
        job.strategy_bytes = StrategyKind::Ginex.needs(&job).unwrap().host.total();
        check(&job);
    }
    // A job without training reads without a plan, and has memory for it.
    job.largest_batch = 0;
    let table = StrategyKind::Ginex.needs(&job).unwrap().host;
    assert!(table.lines.iter().any(|line| line.what == "evaluation: sampling"), "{table}");
}

#[test]
fn evaluations_without_rows_come_without_rows() {
    let (_directory, dataset) = small();
    let mut job = scheduled(job(&dataset, 3));
    job.out_of_core.superbatch = Some(11);
    change(&mut job, |over| over.rows = false);
    check(&job);
}

#[test]
fn rows_and_neighbours_of_evaluations_are_not_counted_as_training() {
    let (_directory, dataset) = small();
    let count = |job: &Job| {
        let mut source = strategy(StrategyKind::Ginex, job).batches(job, RunPosition::START, None).unwrap();
        rest(&mut *source);
        source.counters()
    };
    let mut job = job(&dataset, 3);
    job.out_of_core.neighbour_cache_bytes = Some(20_000);
    let (without, with) = (count(&job), count(&scheduled(job)));
    assert_eq!((with.rows, with.neighbour_requests), (without.rows, without.neighbour_requests));
    assert!(with.stages[4].items == BATCHES as u64 && without.stages[4].items == 24, "times are of both");
}

/// Batches that count how often seeds are requested.
struct Counted {
    all: Arc<dyn Batches>,
    asked: Arc<AtomicU64>,
}

impl Batches for Counted {
    fn count(&self, epoch: u64) -> u64 {
        self.all.count(epoch)
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<(), SampleError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.all.seeds(at, out)
    }

    fn dropped(&self, at: Position, out: &mut Vec<Edge>) -> Result<(), SampleError> {
        self.all.dropped(at, out)
    }

    fn identity(&self) -> String {
        self.all.identity()
    }
}

/// The job, and a counter of the batches that are sampled for its evaluations.
fn counted(job: &Job) -> (Job, Arc<AtomicU64>) {
    let (mut job, asked) = (job.clone(), Arc::new(AtomicU64::new(0)));
    change(&mut job, |over| {
        over.batches = Arc::new(Counted { all: over.batches.clone(), asked: asked.clone() });
    });
    (job, asked)
}

/// The batches of three evaluations.
const SAMPLED_ONCE: u64 = 8;

#[test]
fn evaluations_are_sampled_once_and_a_resumed_run_uses_their_traces() {
    let (_directory, dataset) = small();
    for superbatch in [1, 5, 1000] {
        let mut job = scheduled(job(&dataset, 3));
        job.out_of_core.superbatch = Some(superbatch);
        let expected = whole(StrategyKind::Memory, &job);
        let (watched, asked) = counted(&job);
        assert!(whole(StrategyKind::Ginex, &watched) == expected);
        assert_eq!(asked.load(Ordering::SeqCst), SAMPLED_ONCE, "superbatches of {superbatch}");
        // Killed in the middle of the first validation.
        let mut source = strategy(StrategyKind::Ginex, &job).batches(&job, RunPosition::START, None).unwrap();
        (0..17).for_each(|_| drop(source.next().unwrap().unwrap()));
        drop(source);
        let kept = ["last-validation.trace", "test.trace", "validation.trace"];
        assert!(kept.iter().all(|name| files(&job).contains(&name.to_string())), "{:?}", files(&job));
        let (watched, asked) = counted(&job);
        let at = RunPosition::start_of(Phase::Validation { epoch: 1 });
        let mut source = strategy(StrategyKind::Ginex, &watched).batches(&watched, at, None).unwrap();
        assert!(rest(&mut *source) == expected[16..]);
        assert_eq!(asked.load(Ordering::SeqCst), 0, "superbatches of {superbatch}");
        assert!(files(&job).is_empty(), "{:?}", files(&job));
    }
}

#[test]
fn an_early_stop_keeps_the_traces_that_are_still_needed() {
    let (_directory, dataset) = small();
    for superbatch in [3, 8, 1000] {
        let mut job = scheduled(job(&dataset, 3));
        job.out_of_core.superbatch = Some(superbatch);
        let expected = whole(StrategyKind::Memory, &job);
        let (watched, asked) = counted(&job);
        let mut source =
            strategy(StrategyKind::Ginex, &watched).batches(&watched, RunPosition::START, None).unwrap();
        (0..19).for_each(|_| drop(source.next().unwrap().unwrap()));
        source.skip_to(RunPosition::start_of(Phase::Validation { epoch: 3 })).unwrap();
        assert!(files(&job).iter().all(|name| !name.contains("0.trace")), "{:?}", files(&job));
        assert!(rest(&mut *source) == expected[30..]);
        assert_eq!(asked.load(Ordering::SeqCst), SAMPLED_ONCE);
        assert!(files(&job).is_empty(), "{:?}", files(&job));
        // Without a test, the run is over.
        (job.schedule.last_validation, job.schedule.test) = (None, None);
        let mut source = strategy(StrategyKind::Ginex, &job).batches(&job, RunPosition::START, None).unwrap();
        (0..19).for_each(|_| drop(source.next().unwrap().unwrap()));
        source.skip_to(RunPosition::start_of(Phase::Validation { epoch: 3 })).unwrap();
        assert!(source.next().unwrap().is_none() && files(&job).is_empty(), "{:?}", files(&job));
    }
}

#[test]
fn traces_of_another_evaluation_damaged_ones_and_unfinished_ones_are_sampled_again() {
    let (_directory, dataset) = small();
    let job = scheduled(job(&dataset, 3));
    let mut other = job.clone();
    change(&mut other, |over| over.settings.seed += 1);
    drop(strategy(StrategyKind::Ginex, &other).batches(&other, RunPosition::START, None).unwrap().next());
    let folder = job.out_of_core.scratch.join("evaluation");
    fs::write(folder.join("test.trace"), b"damaged").unwrap();
    fs::write(folder.join("validation.trace.partial"), b"half").unwrap();
    let (watched, asked) = counted(&job);
    assert!(whole(StrategyKind::Ginex, &watched) == whole(StrategyKind::Memory, &job));
    assert_eq!(asked.load(Ordering::SeqCst), SAMPLED_ONCE);
    assert!(files(&job).is_empty(), "{:?}", files(&job));
}

/// The notes of a run.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Progress for Notes {
    fn stage(&self, _: &str, _: Option<u64>, _: Unit) {}
    fn advance(&self, _: u64) {}
    fn finish(&self) {}
    fn note(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_string());
    }
}

#[test]
fn a_small_disk_budget_samples_evaluations_again_each_time_and_says_so() {
    let (_directory, dataset) = small();
    let mut most = 0;
    for disk_bytes in [60_000, 100_000, 160_000] {
        let mut job = scheduled(job(&dataset, 3));
        job.out_of_core.disk_bytes = disk_bytes;
        check(&job);
        let notes = Arc::new(Notes::default());
        let (watched, asked) = counted(&Job { progress: notes.clone(), ..job.clone() });
        assert!(whole(StrategyKind::Ginex, &watched) == whole(StrategyKind::Memory, &job));
        let (asked, notes) = (asked.load(Ordering::SeqCst), notes.0.lock().unwrap().clone());
        most = most.max(asked);
        let said = notes.iter().filter(|note| note.contains("drawn again each time")).count();
        assert_eq!(said > 0, asked > SAMPLED_ONCE, "{disk_bytes}: {asked} {notes:?}");
    }
    assert!(most > SAMPLED_ONCE, "{most}");
}

#[test]
fn files_stay_within_the_disk_budget() {
    let (_directory, dataset) = small();
    for disk_bytes in [60_000, 160_000, 400_000] {
        let mut job = scheduled(job(&dataset, 3));
        job.out_of_core.disk_bytes = disk_bytes;
        let mut source = strategy(StrategyKind::Ginex, &job).batches(&job, RunPosition::START, None).unwrap();
        while let Some(batch) = source.next().unwrap() {
            drop(batch);
            let folders = ["superbatches", "evaluation"].map(|name| job.out_of_core.scratch.join(name));
            let bytes = |folder: PathBuf| -> u64 {
                let entries = fs::read_dir(folder).into_iter().flatten();
                entries.map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
            };
            let used: u64 = folders.into_iter().map(bytes).sum();
            assert!(used <= disk_bytes, "{used} of {disk_bytes}");
        }
    }
}
