//! A small graph, a job on it, and all that a strategy yields.
#![allow(dead_code)]

use esker_import::ImportJob;
use esker_import::generate::{GraphShape, generate};
use esker_nn::CpuBackend;
use esker_sample::order::{Batching, Sequential, Shuffled};
use esker_sample::{Carry, Direction, Fanout, Form, NodeBatches, Position, Sample, Seeds, Settings};
use esker_store::Dataset;
use esker_strategies::{
    BatchRoom, BatchSource, EvaluationOutline, EvaluationSchedule, FixedRows, Inference, Job, JobOutline,
    OutOfCore, RunPosition, SourceCounters, Strategy, StrategyKind,
};
use esker_types::{Budget, Dtype, NodeId, Silent};
use std::path::Path;
use std::sync::Arc;

pub fn dataset(directory: &Path, dim: u64, dtype: Dtype) -> Arc<Dataset> {
    let shape =
        GraphShape { degree: 6.0, dim, dtype, classes: 4, out_neighbours: true, ..GraphShape::plain(2000) };
    let (target, budget) = (directory.join("g"), Budget { host_bytes: 64 << 20 });
    generate(&shape, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent }).unwrap();
    Arc::new(Dataset::open(&target).unwrap())
}

/// A graph of so many nodes with communities, and a number per row.
pub fn dataset_of(directory: &Path, nodes: u64) -> Arc<Dataset> {
    let communities = GraphShape { homophily: 0.95, classes: 40, ..GraphShape::plain(nodes) };
    let shape = GraphShape { degree: 6.0, dim: 1, ..communities };
    let (target, budget) = (directory.join("g"), Budget { host_bytes: 64 << 20 });
    generate(&shape, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent }).unwrap();
    Arc::new(Dataset::open(&target).unwrap())
}

pub fn job(dataset: &Arc<Dataset>, seed: u64) -> Job {
    let order = Shuffled { batching: Batching::new(500, 64, false).unwrap(), seed };
    let seeds = Seeds::Nodes((0..500).map(|node| NodeId(node * 3)).collect());
    let fanouts = vec![Fanout::AtMost(4), Fanout::AtMost(3)];
    let outline = JobOutline {
        dataset: dataset.clone(),
        largest_batch: 64,
        epochs: 3,
        epochs_sampled: None,
        epoch_batches: 8,
        settings: Settings { seed, fanouts, form: Form::Dense, carry: Carry::default() },
        known: None,
        direction: Direction::Incoming,
        features: true,
        evaluation: None,
        threads: 2,
        samplers: 1,
        prefetch_depth: 2,
        steps_in_flight: 0,
        strategy_bytes: 256 << 20,
        device_cache_bytes: 0,
        embedding_device_bytes: u64::MAX,
        room: BatchRoom::default(),
        columns: Vec::new(),
        history: None,
        residents: None,
        out_of_core: OutOfCore {
            scratch: dataset.directory().with_extension("scratch"),
            disk_bytes: 1 << 30,
            ..OutOfCore::default()
        },
    };
    Job::new(outline, Arc::new(NodeBatches::new(order, seeds).unwrap())).unwrap()
}

pub fn build(kind: StrategyKind) -> Box<dyn Strategy<CpuBackend>> {
    kind.build(CpuBackend::new())
}

/// A batch's sample, taken out of it.
pub fn sample_of(batch: &esker_strategies::Batch<CpuBackend>) -> Sample {
    batch.blocks.sample().unwrap().clone()
}

/// A batch's rows, where it has any.
pub fn rows_of(batch: &mut esker_strategies::Batch<CpuBackend>) -> Vec<f32> {
    match &mut batch.input.fixed {
        Some(FixedRows::Host(rows)) => rows.values().to_vec(),
        Some(FixedRows::Cached(_)) => unreachable!("the CPU caches no rows"),
        None => Vec::new(),
    }
}

pub fn strategy(kind: StrategyKind, job: &Job) -> Box<dyn Strategy<CpuBackend>> {
    let mut strategy = build(kind);
    strategy.prepare(job).unwrap();
    strategy
}

pub type Batch = (Position, Sample, Vec<f32>);

pub fn batches(kind: StrategyKind, job: &Job, from: Position) -> (Vec<Batch>, SourceCounters) {
    let mut source = strategy(kind, job).batches(job, from.into(), None).unwrap();
    let mut all = Vec::new();
    while let Some(mut batch) = source.next().unwrap() {
        all.push((batch.at.position(), sample_of(&batch), rows_of(&mut batch)));
    }
    (all, source.counters())
}

/// Strategies whose batches are of the whole graph, in any order.
pub fn whole_graph_strategies() -> impl Iterator<Item = StrategyKind> {
    StrategyKind::ALL.into_iter().filter(|kind| *kind != StrategyKind::Marius)
}

/// The batches of `memory` and of another strategy from some positions, to the bit; returns what that one counted for the whole
/// run. `behind` looks at what each leaves behind.
pub fn same_as_memory(kind: StrategyKind, job: &Job, behind: impl Fn()) -> SourceCounters {
    let mut whole = None;
    for (epoch, batch) in [(0, 0), (0, 3), (2, 7)] {
        let from = Position { epoch, batch };
        let expected = batches(StrategyKind::Memory, job, from).0;
        let (found, counters) = batches(kind, job, from);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found.0 == expected.0 && found.1 == expected.1, "{:?} {:?}", found.0, job.out_of_core);
            let bits = |rows: &[f32]| rows.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
            assert!(bits(&found.2) == bits(&expected.2), "{:?} {:?}", found.0, job.out_of_core);
        }
        behind();
        whole = whole.or(Some(counters));
    }
    whole.unwrap()
}

pub fn inference(job: &Job, first: u64, count: u64) -> Inference {
    let nodes = (first..first + count).map(NodeId).collect();
    let order = Sequential(Batching::new(count, 64, false).unwrap());
    Inference {
        batches: Arc::new(NodeBatches::new(order, Seeds::Nodes(nodes)).unwrap()),
        largest_batch: 64,
        settings: job.settings.clone(),
        rows: true,
        sampling_bytes: None,
    }
}

/// Three epochs of 8 batches, validated after the second and the third, and two evaluations in the end.
pub fn scheduled(job: Job) -> Job {
    let (settings, largest_batch) = (job.settings.clone(), 64);
    let mut job = Job {
        schedule: EvaluationSchedule {
            validation: Some(inference(&job, 100, 130)),
            every: 2,
            last_validation: Some(inference(&job, 400, 64)),
            test: Some(inference(&job, 900, 200)),
        },
        ..job
    };
    job.evaluation = Some(EvaluationOutline { largest_batch, batches: 8, settings });
    job
}

pub type Found = (RunPosition, u64, Vec<f32>);

pub fn rest(source: &mut dyn BatchSource<CpuBackend>) -> Vec<Found> {
    let mut all = Vec::new();
    while let Some(mut batch) = source.next().unwrap() {
        all.push((batch.at, sample_of(&batch).digest(), rows_of(&mut batch)));
    }
    all
}
