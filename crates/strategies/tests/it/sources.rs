//! Every strategy yields the batches that sampling and looking rows up one by one would give, from any position, however
//! many are held; a source that nobody reads to its end stops.

use esker_import::ImportJob;
use esker_import::generate::{GraphShape, generate};
use esker_nn::CpuBackend;
use esker_sample::order::{Batching, Shuffled};
use esker_sample::{
    AnyTopology, Batches, Carry, Direction, Fanout, Form, NodeBatches, Position, Sample, Sampler, Seeds,
    Settings,
};
use esker_store::{Dataset, file};
use esker_strategies::{
    BatchRoom, Inference, Job, JobOutline, OutOfCore, RunPosition, Strategy, StrategyKind,
};
use esker_types::{Budget, NodeId, Silent};
use std::path::Path;
use std::sync::Arc;

const DIM: usize = 7;

fn dataset(directory: &Path) -> Arc<Dataset> {
    let shape = GraphShape { degree: 6.0, dim: DIM as u64, classes: 4, ..GraphShape::plain(2000) };
    let (target, budget) = (directory.join("g"), Budget { host_bytes: 64 << 20 });
    generate(&shape, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent }).unwrap();
    Arc::new(Dataset::open(&target).unwrap())
}

fn job(dataset: &Arc<Dataset>, prefetch_depth: usize) -> Job {
    let order = Shuffled { batching: Batching::new(500, 64, false).unwrap(), seed: 3 };
    let seeds = Seeds::Nodes((0..500).map(|node| NodeId(node * 3)).collect());
    let fanouts = vec![Fanout::AtMost(4), Fanout::AtMost(3)];
    let outline = JobOutline {
        dataset: dataset.clone(),
        largest_batch: 64,
        epochs: 2,
        epochs_sampled: None,
        epoch_batches: 8,
        settings: Settings { seed: 5, fanouts, form: Form::Dense, carry: Carry::default() },
        known: None,
        direction: Direction::Incoming,
        features: true,
        evaluation: None,
        threads: 2,
        samplers: 1,
        prefetch_depth,
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

fn build(kind: StrategyKind) -> Box<dyn Strategy<CpuBackend>> {
    kind.build(CpuBackend::new())
}

/// All batches from a position on: where, what was sampled, and the rows.
fn expected(job: &Job, from: Position) -> Vec<(Position, Sample, Vec<f32>)> {
    let AnyTopology::Narrow(graph) = AnyTopology::load(&job.dataset, job.direction, u64::MAX).unwrap() else {
        panic!("few nodes")
    };
    let features = job.dataset.array(file::NODE_FEATURES).unwrap();
    let mut sampler = Sampler::new(&graph, job.settings.clone(), 1 << 30).unwrap();
    let (mut all, mut seeds) = (Vec::new(), Vec::new());
    for epoch in from.epoch..job.epochs {
        let first = if epoch == from.epoch { from.batch } else { 0 };
        for batch in first..job.batches.count(epoch) {
            let (at, mut sample) = (Position { epoch, batch }, Sample::default());
            job.batches.seeds(at, &mut seeds).unwrap();
            sampler.sample(at, &seeds, &mut sample).unwrap();
            let mut rows = vec![0f32; sample.node_ids.len() * DIM];
            for (node, row) in sample.node_ids.iter().zip(rows.chunks_mut(DIM)) {
                features.read_at(node.0 * DIM as u64, row).unwrap();
            }
            all.push((at, sample, rows));
        }
    }
    all
}

#[test]
fn strategies_yield_the_batches_of_the_job_and_the_bytes_of_the_dataset() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path());
    for from in [Position { epoch: 0, batch: 0 }, Position { epoch: 1, batch: 5 }] {
        let expected = expected(&job(&dataset, 1), from);
        assert_eq!(expected.len() as u64, 8 * (2 - from.epoch) - from.batch);
        for kind in StrategyKind::ALL.into_iter().filter(|kind| *kind != StrategyKind::Marius) {
            for (depth, samplers, cached) in
                [(1, 1, 2000), (2, 1, 0), (3, 1, 200), (1, 3, 700), (4, 2, 1), (5, 8, 2000)]
            {
                let mut job = job(&dataset, depth);
                job.samplers = samplers;
                // So many rows: most caches must let some go.
                job.out_of_core.feature_cache_bytes = Some(cached * DIM as u64 * 4);
                job.out_of_core.prepared = Some(directory.path().join(format!("packed-{cached}")));
                let mut strategy = build(kind);
                strategy.prepare(&job).unwrap();
                let mut source = strategy.batches(&job, from.into(), None).unwrap();
                for (at, sample, rows) in &expected {
                    let mut batch = source.next().unwrap().unwrap();
                    assert!(
                        batch.at == (*at).into()
                            && batch.blocks.sample() == Some(sample)
                            && crate::common::rows_of(&mut batch) == *rows,
                        "{kind} {at:?}"
                    );
                }
                assert!(source.next().unwrap().is_none());
                let counters = source.counters();
                let rows: u64 = expected.iter().map(|(_, sample, _)| sample.node_ids.len() as u64).sum();
                assert_eq!((counters.rows, counters.bytes_useful), (rows, rows * DIM as u64 * 4));
                let stages: &[&str] = match kind {
                    StrategyKind::Ginex | StrategyKind::Outre => {
                        &["sample", "plan", "load", "read", "assemble"]
                    }
                    StrategyKind::DiskGnn | StrategyKind::Esker => &["list", "load", "read", "assemble"],
                    _ => &["sample", "gather"],
                };
                let names: Vec<&str> = counters.stages.iter().map(|stage| stage.name.as_str()).collect();
                assert_eq!(names, stages);
            }
        }
    }
}

#[test]
fn a_source_that_nobody_reads_to_its_end_stops() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path());
    for depth in [1, 3] {
        let mut job = job(&dataset, depth);
        job.epochs = u64::MAX;
        let mut strategy = build(StrategyKind::Memory);
        strategy.prepare(&job).unwrap();
        let mut source = strategy.batches(&job, RunPosition::START, None).unwrap();
        let mut kept = source.next().unwrap().unwrap();
        drop(source);
        // A batch may outlive its source.
        assert!(!crate::common::rows_of(&mut kept).is_empty());
    }
}

#[test]
fn an_error_of_a_stage_reaches_the_reader() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path());
    let mut job = job(&dataset, 2);
    let order = Shuffled { batching: Batching::new(3, 2, false).unwrap(), seed: 3 };
    job.batches = Arc::new(NodeBatches::new(order, Seeds::Nodes([5, 2000, 7].map(NodeId).to_vec())).unwrap());
    let mut strategy = build(StrategyKind::Mmap);
    strategy.prepare(&job).unwrap();
    let mut source = strategy.batches(&job, RunPosition::START, None).unwrap();
    let mut said = None;
    for _ in 0..4 {
        match source.next() {
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(error) => {
                said = Some(error.to_string());
                break;
            }
        }
    }
    assert!(said.unwrap().contains("nodes 0 to 1999"));
}

#[test]
fn batches_of_evaluation_come_with_or_without_rows() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path());
    let job = job(&dataset, 2);
    let mut strategy = build(StrategyKind::Memory);
    strategy.prepare(&job).unwrap();
    for rows in [true, false] {
        let over = Inference {
            batches: job.batches.clone(),
            largest_batch: 64,
            settings: job.settings.clone(),
            rows,
            sampling_bytes: None,
        };
        let mut source = strategy.inference(&job, &over, None).unwrap();
        let mut count = 0;
        while let Some(mut batch) = source.next().unwrap() {
            let nodes = batch.blocks.nodes() as usize;
            assert_eq!(crate::common::rows_of(&mut batch).len(), if rows { nodes * DIM } else { 0 });
            count += 1;
        }
        assert_eq!(count, 8, "one epoch");
    }
    let memory = strategy.needs(&job).unwrap().host;
    assert!(memory.lines.iter().any(|line| line.what == "features" && line.bytes >= 2000 * DIM as u64 * 4));
    assert_eq!(memory.total(), memory.lines.iter().map(|line| line.bytes).sum::<u64>());
}
