//! A source goes through a whole run: training, validation after epochs, test. It can leave batches out, stops when it is asked
//! to with nothing lost, and a stage that panics ends it with an error. Rows that nobody needs are not fetched.

use crate::common::{batches, build, dataset, job, rest, scheduled, strategy, whole_graph_strategies};
use esker_fetch::FeatureRows;
use esker_sample::{Batches, Edge, NodeSet, Position, SampleError};
use esker_strategies::{HistoryOutline, Job, Phase, RunPosition, StrategyError, StrategyKind};
use esker_types::{Dtype, NodeId, StopSignal};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn phases() -> Vec<(Phase, u64)> {
    vec![
        (Phase::Train { epoch: 0 }, 8),
        (Phase::Train { epoch: 1 }, 8),
        (Phase::Validation { epoch: 1 }, 3),
        (Phase::Train { epoch: 2 }, 8),
        (Phase::Validation { epoch: 2 }, 3),
        (Phase::Validation { epoch: 3 }, 1),
        (Phase::Test, 4),
    ]
}

#[test]
fn every_strategy_goes_through_all_phases_from_any_position() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let job = scheduled(job(&dataset, 3));
    let positions: Vec<RunPosition> = phases()
        .into_iter()
        .flat_map(|(phase, count)| (0..count).map(move |batch| RunPosition { phase, batch }))
        .collect();
    assert!(positions.is_sorted());
    let whole = |kind| rest(&mut *strategy(kind, &job).batches(&job, RunPosition::START, None).unwrap());
    let expected = whole(StrategyKind::Memory);
    assert!(expected.iter().map(|(at, ..)| *at).eq(positions.iter().copied()));
    // Batches of evaluation are those that inference alone gives.
    let over = job.schedule.test.as_ref().unwrap();
    let mut alone = strategy(StrategyKind::Memory, &job).inference(&job, over, None).unwrap();
    for (found, expected) in rest(&mut *alone).iter().zip(&expected[31..]) {
        assert_eq!((found.1, &found.2), (expected.1, &expected.2));
    }
    for kind in whole_graph_strategies() {
        assert!(whole(kind) == expected, "{kind}");
        // Training goes on where it was; an evaluation starts with its first batch.
        for (from, first) in [(19, 19), (18, 16), (34, 31), (27, 27), (8, 8)] {
            let mut source = strategy(kind, &job).batches(&job, positions[from], None).unwrap();
            assert!(rest(&mut *source) == expected[first..], "{kind} from {from}");
        }
        // After the last batch of an epoch comes its validation.
        let after = RunPosition::train(1, 8);
        let mut source = strategy(kind, &job).batches(&job, after, None).unwrap();
        assert!(rest(&mut *source) == expected[16..], "{kind}");
    }
}

#[test]
fn batches_that_are_left_out_do_not_come() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let job = scheduled(job(&dataset, 3));
    for kind in whole_graph_strategies() {
        let open = || strategy(kind, &job).batches(&job, RunPosition::START, None).unwrap();
        let expected = rest(&mut *open());
        for (taken, to) in [(3, 31), (0, 30), (10, 12), (9, 21), (17, 27), (20, 20), (33, 31)] {
            let mut source = open();
            (0..taken).for_each(|_| drop(source.next().unwrap().unwrap()));
            source.skip_to(expected[to].0).unwrap();
            assert!(rest(&mut *source) == expected[to.max(taken)..], "{kind} from {taken} to {to}");
        }
    }
    // Whoever goes on with the test leaves no trace behind.
    let mut ginex = strategy(StrategyKind::Ginex, &job).batches(&job, RunPosition::START, None).unwrap();
    drop(ginex.next().unwrap());
    let traces = || std::fs::read_dir(job.out_of_core.scratch.join("superbatches")).unwrap().count();
    assert!(traces() > 0);
    ginex.skip_to(RunPosition::start_of(Phase::Test)).unwrap();
    assert_eq!(traces(), 0);
}

#[test]
fn tables_are_the_rows_of_the_dataset_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 300, Dtype::F16);
    let job = job(&dataset, 3);
    let rows = FeatureRows::load(&dataset, u64::MAX).unwrap();
    let nodes: Vec<NodeId> = (0..2000).map(NodeId).collect();
    let mut expected = vec![0.0; 2000 * 300];
    rows.gather(&nodes, &[], &mut expected).unwrap();
    for kind in whole_graph_strategies() {
        let mut source = strategy(kind, &job).batches(&job, RunPosition::START, None).unwrap();
        let (table, mut found) = (source.table().unwrap(), Vec::new());
        assert_eq!(table.dim(), 300);
        assert_eq!(table.nodes(), 2000);
        let mut read = table.reader().unwrap();
        for some in nodes.chunks(700) {
            let mut rows = vec![0.0; some.len() * 300];
            read(some, &mut rows).unwrap();
            found.extend_from_slice(&rows);
        }
        assert!(found == expected, "{kind}");
        // Any nodes, in any order, by another reader.
        let some = [1999, 3, 3, 700].map(NodeId);
        let mut rows = vec![0.0; 4 * 300];
        table.reader().unwrap()(&some, &mut rows).unwrap();
        for at in 0..4 {
            assert!(rows[at * 300..][..300] == expected[some[at].index() * 300..][..300], "{kind}");
        }
    }
}

/// Batches that do something when one of them is asked for.
struct Watched {
    all: Arc<dyn Batches>,
    asked: AtomicU64,
    act: Box<dyn Fn(u64) + Send + Sync>,
}

impl Batches for Watched {
    fn count(&self, epoch: u64) -> u64 {
        self.all.count(epoch)
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<(), SampleError> {
        (self.act)(self.asked.fetch_add(1, Ordering::SeqCst));
        self.all.seeds(at, out)
    }

    fn dropped(&self, at: Position, out: &mut Vec<Edge>) -> Result<(), SampleError> {
        self.all.dropped(at, out)
    }

    fn identity(&self) -> String {
        self.all.identity()
    }
}

fn watched(job: &Job, act: impl Fn(u64) + Send + Sync + 'static) -> Job {
    let batches = Watched { all: job.batches.clone(), asked: AtomicU64::new(0), act: Box::new(act) };
    Job { batches: Arc::new(batches), ..job.clone() }
}

#[test]
fn sampling_ahead_stops_when_it_is_asked_to_and_nothing_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut plain = job(&dataset, 3);
    plain.out_of_core.superbatch = Some(24);
    plain.threads = 1;
    let expected = batches(StrategyKind::Memory, &plain, Position { epoch: 0, batch: 0 }).0;
    let stop = StopSignal::default();
    let asked = stop.clone();
    let job = Job {
        stop,
        ..watched(&plain, move |number| {
            if number == 12 {
                asked.ask()
            }
        })
    };
    let mut source = strategy(StrategyKind::Ginex, &job).batches(&job, RunPosition::START, None).unwrap();
    assert!(matches!(source.next(), Err(StrategyError::Stopped)));
    drop(source);
    // What was sampled is taken up again.
    let sampled = Arc::new(AtomicU64::new(0));
    let count = sampled.clone();
    let job = watched(&plain, move |_| {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let found = batches(StrategyKind::Ginex, &job, Position { epoch: 0, batch: 0 }).0;
    assert!(found == expected);
    // 24 batches, two to know how large they are, and one to know how many seeds a batch has.
    assert!(sampled.load(Ordering::SeqCst) <= 24 + 3 - 4, "{sampled:?}");
}

/// Of outre, after so many batches have asked for their seeds: batches that ask for theirs afterwards. Then another
/// process goes on.
fn check_stop_while_deciding(after: u64) -> u64 {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut plain = with_history(job(&dataset, 3));
    (plain.threads, plain.out_of_core.superbatch) = (1, Some(24));
    let expected = batches(StrategyKind::Memory, &plain, Position { epoch: 0, batch: 0 }).0;
    let (stop, later) = (StopSignal::default(), Arc::new(AtomicU64::new(0)));
    let (asked, count) = (stop.clone(), later.clone());
    let watched = watched(&plain, move |number| {
        if number >= after {
            asked.ask();
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    let job = Job { stop, ..watched };
    let mut source = strategy(StrategyKind::Outre, &job).batches(&job, RunPosition::START, None).unwrap();
    assert!(matches!(source.next(), Err(StrategyError::Stopped)));
    drop(source);
    let found = batches(StrategyKind::Outre, &plain, Position { epoch: 0, batch: 0 }).0;
    assert!(found == expected, "{after}");
    later.load(Ordering::SeqCst)
}

fn with_history(mut job: Job) -> Job {
    let nodes = NodeSet::choose(job.dataset.manifest().nodes.count, |node| node.0 % 2 == 0);
    job.outline.history = Some(HistoryOutline {
        rows: nodes.count(),
        staleness: 20,
        layer: 1,
        hops: 1,
        columns: 4,
        dtype: Dtype::F32,
        device_bytes: u64::MAX,
    });
    job.history = Some(Arc::new(nodes));
    job
}

#[test]
fn deciding_pulls_stops_when_it_is_asked_to_and_nothing_is_lost() {
    // Three batches ask for their seeds before; then first hops of 24 are drawn, and some are compared.
    for after in [6, 14, 27] {
        let later = check_stop_while_deciding(after);
        // Those that are ready, being made and being read.
        assert!(later <= 5, "{after}: {later} batches were begun after the stop");
    }
}

#[test]
fn a_stage_that_panics_ends_the_run_with_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    for kind in [StrategyKind::Memory, StrategyKind::Mmap, StrategyKind::Ginex] {
        let job = watched(&job(&dataset, 3), |number| assert!(number < 11, "eleven"));
        let mut strategy = build(kind);
        strategy.prepare(&job).unwrap();
        let mut source = strategy.batches(&job, RunPosition::START, None).unwrap();
        let error = loop {
            match source.next() {
                Ok(batch) => drop(batch.unwrap()),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, StrategyError::Panicked(_)), "{kind}: {error}");
        assert!(error.to_string().contains("eleven"), "{kind}: {error}");
    }
}
