//! The pilot samples some batches for their size. Memory follows from it, and a batch that is larger still waits or is
//! refused with the budget that would do.

use crate::common::{dataset, job, rest, scheduled, strategy, whole_graph_strategies};
use esker_import::ImportJob;
use esker_import::generate::{GraphShape, generate};
use esker_sample::HopSizes;
use esker_store::Dataset;
use esker_strategies::{AfterPilot, BatchRoom, Job, KnownSizes, RunPosition, StrategyError, StrategyKind};
use esker_types::{Budget, Dtype, Silent};
use std::sync::Arc;

fn piloted(job: &Job, memory: u64, after: AfterPilot) -> Job {
    let mut job = job.clone();
    job.pilot(memory, after).unwrap();
    job
}

#[test]
fn sizes_bound_all_batches_and_are_below_what_fan_outs_allow() {
    let directory = tempfile::tempdir().unwrap();
    let job = scheduled(job(&dataset(directory.path(), 7, Dtype::F32), 3));
    let (allowed, found) = (job.largest_bound(), piloted(&job, 1 << 30, AfterPilot::Kept));
    let bound = found.largest_bound();
    assert!(bound.nodes < allowed.nodes && bound.edges < allowed.edges, "{bound:?} {allowed:?}");
    let mut source =
        strategy(StrategyKind::Memory, &found).batches(&found, RunPosition::START, None).unwrap();
    let (mut nodes, mut edges) = (0, 0);
    while let Some(batch) = source.next().unwrap() {
        let sample = crate::common::sample_of(&batch);
        (nodes, edges) = (nodes.max(sample.node_ids.len() as u64), edges.max(sample.edge_count()));
    }
    assert!(nodes <= bound.nodes && nodes * 5 > bound.nodes * 4, "{nodes} {bound:?}");
    assert!(edges <= bound.edges && edges * 5 > bound.edges * 4, "{edges} {bound:?}");
}

#[test]
fn sizes_depend_on_the_job_alone() {
    let directory = tempfile::tempdir().unwrap();
    let shape = GraphShape { degree: 12.0, dim: 4, classes: 4, ..GraphShape::plain(300_000) };
    let (target, budget) = (directory.path().join("g"), Budget { host_bytes: 64 << 20 });
    generate(&shape, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent }).unwrap();
    let job = scheduled(job(&Arc::new(Dataset::open(&target).unwrap()), 3));
    let expected = piloted(&job, 1 << 30, AfterPilot::Kept).known.clone();
    assert!(expected.as_ref().is_some_and(|known| known.training.is_some() && known.evaluation.is_some()));
    // In memory for the pilot alone; from disk, because there is no room for the topology.
    assert_eq!(piloted(&job, 1 << 30, AfterPilot::Dropped).known, expected);
    let topology = 300_001 * 4 + job.dataset.manifest().edges.count * 4;
    assert_eq!(piloted(&job, topology - 1, AfterPilot::Kept).known, expected);
    // For the work before training: in memory, and from disk again where a topology in memory leaves too little.
    for memory in [1 << 30, topology + (1 << 20), topology - 1] {
        assert_eq!(piloted(&job, memory, AfterPilot::Lent).known, expected, "{memory}");
    }
    // Too little even for that: what fan-outs allow.
    assert_eq!(piloted(&job, 1000, AfterPilot::Dropped).known, None);
}

#[test]
fn no_strategy_yields_other_batches_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let job = scheduled(job(&dataset(directory.path(), 7, Dtype::F32), 3));
    let all =
        |job: &Job, kind| rest(&mut *strategy(kind, job).batches(job, RunPosition::START, None).unwrap());
    let expected = all(&job, StrategyKind::Memory);
    let after = |kind| match kind {
        StrategyKind::Memory => AfterPilot::Kept,
        StrategyKind::DiskGnn | StrategyKind::Esker => AfterPilot::Lent,
        _ => AfterPilot::Dropped,
    };
    for kind in whole_graph_strategies() {
        assert!(all(&piloted(&job, 1 << 30, after(kind)), kind) == expected, "{kind}");
    }
}

/// A job that expects tiny batches.
fn expecting_little(job: &Job, depth: usize, spare_bytes: u64) -> Job {
    let mut job = job.clone();
    let few = |sizes: &[u64]| HopSizes { found: sizes.to_vec(), sampled: vec![u64::MAX; 2], edges: u64::MAX };
    job.known = Some(KnownSizes { training: Some(few(&[60, 60])), evaluation: None });
    job.evaluation = None;
    job.prefetch_depth = depth;
    job.room = BatchRoom { spare_bytes, step_bytes: 1 << 20, budget_bytes: 10 << 20 };
    job
}

#[test]
fn a_batch_that_does_not_fit_is_refused_with_the_budget_that_would_do() {
    let directory = tempfile::tempdir().unwrap();
    let plain = job(&dataset(directory.path(), 7, Dtype::F32), 3);
    let tight = expecting_little(&plain, 1, 0);
    let mut source =
        strategy(StrategyKind::Memory, &tight).batches(&tight, RunPosition::START, None).unwrap();
    let error = source.next().err().unwrap();
    let StrategyError::LargeBatch { nodes, needed, allowed, .. } = &error else { panic!("{error}") };
    assert!(*nodes > Some(184) && needed.0 > allowed.0 && allowed.0 == 10 << 20, "{error}");
    assert!(error.to_string().starts_with("batch 1 of epoch 1 is larger than expected ("), "{error}");
    assert!(error.to_string().contains("--resume --memory "), "{error}");
    // With as much more as the error names, all batches come, whichever of them was named.
    let all = |job: &Job| {
        rest(&mut *strategy(StrategyKind::Memory, job).batches(job, RunPosition::START, None).unwrap())
    };
    let expected = all(&plain);
    assert!(all(&expecting_little(&plain, 1, 16 << 20)) == expected);
    assert!(all(&expecting_little(&plain, 3, 16 << 20)) == expected);
}
