//! Batches without a trainer: those of `esker train`, from every exact strategy, for every rank, from any position, within
//! the memory that was promised.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use crate::common::Bench;
use esker_nn::CpuBackend;
use esker_sample::order::{Batching, Order, Shuffled};
use esker_sample::{Direction, Fanout, HopOrdered, Position, Rank, Seeds};
use esker_store::{Dataset, file};
use esker_strategies::{FixedRows, RunPosition, StrategyKind};
use esker_train::{
    EvaluationMode, GivenEpoch, LoadedBatch, Loader, LoaderConfig, LoaderOrder, LoaderRun, OpenRun,
    RunControl, SharedMemory, Task, TrainError,
};
use esker_types::{NodeId, StopSignal};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const EXACT: [StrategyKind; 5] = [
    StrategyKind::Memory,
    StrategyKind::Mmap,
    StrategyKind::Ginex,
    StrategyKind::DiskGnn,
    StrategyKind::Esker,
];

const START: Position = Position { epoch: 0, batch: 0 };

fn dataset(bench: &Bench) -> Arc<Dataset> {
    Arc::new(Dataset::open(&bench.path("g")).unwrap())
}

/// The loader of a run's batches.
fn config(bench: &Bench, strategy: StrategyKind) -> LoaderConfig {
    let run = bench.config();
    let seeds = Task::load(&dataset(bench)).unwrap().train.nodes().to_vec();
    let scratch = bench.path("scratch");
    std::fs::create_dir_all(&scratch).unwrap();
    LoaderConfig {
        strategy,
        seeds: Arc::new(Seeds::Nodes(seeds)),
        fanouts: run.fanout.clone(),
        batch: run.batch,
        order: LoaderOrder::Planned {
            seed: run.seed,
            epochs: run.epochs,
            shuffle: true,
            drop_last: false,
            rank: Rank::ALONE,
        },
        direction: Direction::Incoming,
        features: true,
        edge_ids: true,
        columns: vec![file::NODE_LABELS.into()],
        memory: 1 << 30,
        threads: 2,
        scratch,
        prepared: Some(bench.path(&format!("packed-{strategy}"))),
        disk_budget: None,
        epochs_sampled: None,
    }
}

fn open(bench: &Bench, config: LoaderConfig) -> Result<Loader<CpuBackend>, TrainError> {
    let shared = SharedMemory::new(u64::MAX);
    Loader::open(CpuBackend::new(), dataset(bench), config, &shared, RunControl::default())
}

fn all(mut run: LoaderRun) -> Vec<LoadedBatch> {
    std::iter::from_fn(|| run.next_batch().unwrap()).collect()
}

/// All that a batch says, with the bits of its rows.
fn said(batch: &LoadedBatch) -> (Position, Vec<u64>, HopOrdered, Vec<u32>, Vec<u8>) {
    let rows = batch.rows.as_ref().unwrap().iter().map(|value| value.to_bits()).collect();
    let LoadedBatch { at, items, graph, columns, .. } = batch;
    (
        *at,
        items.clone(),
        graph.clone(),
        rows,
        columns.iter().flat_map(|column| column.bytes.clone()).collect(),
    )
}

#[test]
fn every_exact_strategy_has_the_batches_of_a_training_run() {
    let bench = Bench::new();
    let expected = batches_of_run(&bench);
    for strategy in EXACT {
        let mut loader = open(&bench, config(&bench, strategy)).unwrap();
        let found = all(loader.run(START).unwrap());
        assert_eq!(found.len(), expected.len(), "{strategy}");
        for (found, expected) in found.iter().zip(&expected) {
            let rows: Vec<u32> = found.rows.as_ref().unwrap().iter().map(|value| value.to_bits()).collect();
            let edges = Vec::new();
            // A run carries no edge ids.
            let graph = HopOrdered { edges, ..found.graph.clone() };
            assert!(
                (found.at, &graph, &rows) == (expected.0, &expected.1, &expected.2),
                "{strategy} {:?}",
                found.at
            );
        }
    }
}

/// What `esker train` gets from its source, in the order of a loader.
fn batches_of_run(bench: &Bench) -> Vec<(Position, HopOrdered, Vec<u32>)> {
    let mut config = bench.config();
    (config.eval, config.final_eval) = (EvaluationMode::None, EvaluationMode::None);
    let mut run = OpenRun::new(CpuBackend::new(), config, bench.path("run")).unwrap();
    let mut source = run.source(RunPosition::START, None).unwrap();
    let mut found = Vec::new();
    while let Some(mut batch) = source.next().unwrap() {
        let graph = HopOrdered::of(batch.blocks.sample().unwrap());
        let Some(FixedRows::Host(mut rows)) = batch.input.fixed.take() else { panic!("rows in host memory") };
        let (values, dim) = (rows.values_mut(), 12);
        let runs = graph.node_runs.iter();
        let ordered =
            runs.flat_map(|run| values[run.start * dim..run.end * dim].iter().map(|value| value.to_bits()));
        found.push((batch.at.position(), graph.clone(), ordered.collect()));
    }
    found
}

#[test]
fn rows_labels_and_edges_are_those_of_the_nodes_beside_them() {
    let bench = Bench::new();
    let dataset = dataset(&bench);
    let mut features = vec![half::f16::ZERO; 3000 * 12];
    dataset.array(file::NODE_FEATURES).unwrap().read_at(0, &mut features).unwrap();
    let mut labels = vec![0i32; 3000];
    dataset.array(file::NODE_LABELS).unwrap().read_at(0, &mut labels).unwrap();
    let mut offsets = vec![0u64; 3001];
    dataset.array(file::IN_OFFSETS).unwrap().read_at(0, &mut offsets).unwrap();
    let mut neighbours = vec![0u32; *offsets.last().unwrap() as usize];
    dataset.array(file::IN_NEIGHBOURS).unwrap().read_at(0, &mut neighbours).unwrap();
    let config = config(&bench, StrategyKind::Ginex);
    let Seeds::Nodes(seeds) = &*config.seeds else { panic!("nodes") };
    let seeds = seeds.clone();
    let mut loader = open(&bench, config).unwrap();
    for batch in all(loader.run(START).unwrap()) {
        let (graph, rows) = (&batch.graph, batch.rows.as_ref().unwrap());
        for (node, row) in graph.nodes.iter().zip(rows.chunks(12)) {
            let stored = &features[*node as usize * 12..][..12];
            assert!(row.iter().zip(stored).all(|(found, stored)| *found == stored.to_f32()));
        }
        let found: &[i32] = bytemuck::cast_slice(&batch.columns[0].bytes);
        assert!(graph.nodes.iter().zip(found).all(|(node, label)| labels[*node as usize] == *label));
        for ((source, target), edge) in graph.sources.iter().zip(&graph.targets).zip(&graph.edges) {
            assert_eq!(neighbours[*edge as usize] as i64, graph.nodes[*source as usize]);
            let node = graph.nodes[*target as usize] as usize;
            assert!((offsets[node]..offsets[node + 1]).contains(&(*edge as u64)));
        }
        let named: Vec<i64> = batch.items.iter().map(|item| seeds[*item as usize].0 as i64).collect();
        assert_eq!(graph.nodes[..named.len()], named);
    }
}

#[test]
fn a_loader_that_resumes_in_an_epoch_goes_on_with_the_same_batches() {
    let bench = Bench::new();
    for strategy in EXACT {
        let expected: Vec<_> = all(open(&bench, config(&bench, strategy)).unwrap().run(START).unwrap())
            .iter()
            .map(said)
            .collect();
        for from in [
            Position { epoch: 0, batch: 4 },
            Position { epoch: 1, batch: 0 },
            Position { epoch: 2, batch: 5 },
        ] {
            let mut loader = open(&bench, config(&bench, strategy)).unwrap();
            let found: Vec<_> = all(loader.run(from).unwrap()).iter().map(said).collect();
            let index = expected.iter().position(|batch| batch.0 == from).unwrap();
            assert!(found == expected[index..], "{strategy} from {from:?}");
        }
    }
}

#[test]
fn ranks_have_the_epoch_of_one_process_between_them() {
    let bench = Bench::new();
    for strategy in EXACT {
        let of = |rank: Rank| {
            let mut config = config(&bench, strategy);
            let LoaderOrder::Planned { rank: own, .. } = &mut config.order else { panic!("planned") };
            (*own, config.prepared) =
                (rank, Some(bench.path(&format!("packed-{strategy}-{}-{}", rank.rank, rank.world_size))));
            all(open(&bench, config).unwrap().run(START).unwrap())
        };
        let expected: Vec<_> = of(Rank::ALONE).iter().map(said).collect();
        let mut found = Vec::new();
        for rank in 0..3 {
            for batch in of(Rank { rank, world_size: 3 }) {
                let mut batch = said(&batch);
                batch.0.batch = batch.0.batch * 3 + rank;
                found.push(batch);
            }
        }
        found.sort_by_key(|batch| batch.0);
        assert!(found == expected, "{strategy}");
    }
}

#[test]
fn epochs_in_a_given_order_are_those_of_the_same_planned_order() {
    let bench = Bench::new();
    for strategy in EXACT {
        let planned = config(&bench, strategy);
        let order = Shuffled { batching: Batching::new(planned.seeds.len(), 100, false).unwrap(), seed: 7 };
        let batches = (0..order.batches(0)).map(|batch| {
            let mut items = Vec::new();
            order.items(0, batch, &mut items).unwrap();
            items
        });
        let epoch = GivenEpoch { seed: 7, batches: batches.collect() };
        let expected: Vec<_> = all(open(&bench, planned.clone()).unwrap().run(START).unwrap())
            .iter()
            .filter(|batch| batch.at.epoch == 0)
            .map(said)
            .collect();
        let given = LoaderConfig { order: LoaderOrder::Given { batches: 6 }, prepared: None, ..planned };
        let mut loader = open(&bench, given).unwrap();
        // Twice: a second epoch finds nothing of the first.
        for from in [0, 2] {
            let found: Vec<_> =
                all(loader.run_given(epoch.clone(), from).unwrap()).iter().map(said).collect();
            assert!(found == expected[from as usize..], "{strategy}");
        }
        assert!(matches!(loader.run(START), Err(TrainError::NoPlannedOrder)));
    }
}

#[test]
fn given_batches_may_repeat_seeds_and_have_any_size() {
    let bench = Bench::new();
    for strategy in EXACT {
        let order = LoaderOrder::Given { batches: 2 };
        let given = LoaderConfig { order, prepared: None, batch: 5, ..config(&bench, strategy) };
        let mut loader = open(&bench, given).unwrap();
        let batches = vec![vec![3, 3, 9], vec![0], vec![1, 2, 3, 4, 1]];
        let found = all(loader.run_given(GivenEpoch { seed: 1, batches: batches.clone() }, 0).unwrap());
        assert_eq!(found.iter().map(|batch| batch.items.clone()).collect::<Vec<_>>(), batches);
        let first = &found[0].graph;
        assert_eq!((first.nodes_by_hop[0], first.nodes[0]), (3, first.nodes[1]));
        let of = |target: i64| -> Vec<i64> {
            let edges = first.targets.iter().zip(&first.edges).filter(|(found, _)| **found == target);
            edges.map(|(_, edge)| *edge).collect()
        };
        assert_eq!(of(0), of(1));
        let refused = loader.run_given(GivenEpoch { seed: 1, batches: vec![vec![0; 6]] }, 0);
        assert!(matches!(refused, Err(TrainError::LargeGivenBatch { seeds: 6, most: 5 })));
        let refused = loader.run_given(GivenEpoch { seed: 1, batches: vec![vec![u64::MAX]] }, 0);
        assert!(refused.and_then(|mut run| run.next_batch().map(|_| ())).is_err());
    }
}

#[test]
fn hops_after_a_fanout_of_none_are_empty() {
    let bench = Bench::new();
    let fanouts = vec![Fanout::AtMost(4), Fanout::AtMost(0), Fanout::AtMost(3)];
    let mut loader = open(&bench, LoaderConfig { fanouts, ..config(&bench, StrategyKind::Memory) }).unwrap();
    let batch = loader.run(START).unwrap().next_batch().unwrap().unwrap();
    assert_eq!(
        (batch.graph.nodes_by_hop[2..].to_vec(), batch.graph.edges_by_hop[1..].to_vec()),
        (vec![0; 2], vec![0; 2])
    );
    assert!(batch.graph.edges_by_hop[0] > 0 && batch.graph.nodes_by_hop.len() == 4);
}

#[test]
fn too_little_memory_is_refused_with_the_smallest_that_would_do() {
    let bench = Bench::new();
    for strategy in EXACT {
        let with = |memory: u64| open(&bench, LoaderConfig { memory, ..config(&bench, strategy) });
        let Err(TrainError::LoaderMemory { needed, allowed, table }) = with(1 << 20) else {
            panic!("{strategy}")
        };
        assert!(allowed.0 == 1 << 20 && needed.0 == table.total(), "{strategy}");
        let mut loader = with(needed.0).unwrap_or_else(|error| panic!("{strategy}: {error}"));
        assert!(loader.plan.table.total() <= needed.0 && loader.plan.smallest_bytes <= needed.0);
        assert_eq!(loader.share().bytes(), loader.plan.table.total());
        assert_eq!(all(loader.run(START).unwrap()).len(), 18, "{strategy}");
    }
}

#[test]
fn loaders_of_a_process_share_one_promise() {
    let bench = Bench::new();
    let smallest = open(&bench, config(&bench, StrategyKind::Memory)).unwrap().plan.table.total();
    let shared = SharedMemory::new(2 * smallest + smallest / 2);
    let open = |strategy| {
        let config = config(&bench, strategy);
        Loader::open(CpuBackend::new(), dataset(&bench), config, &shared, RunControl::default())
    };
    let (mut first, mut second) = (open(StrategyKind::Memory).unwrap(), open(StrategyKind::Memory).unwrap());
    assert!(shared.bytes().1 == first.share().bytes() + second.share().bytes());
    assert!(matches!(open(StrategyKind::Memory), Err(TrainError::LoaderMemory { .. })));
    let (mut one, mut other) = (first.run(START).unwrap(), second.run(START).unwrap());
    for _ in 0..18 {
        assert_eq!(said(&one.next_batch().unwrap().unwrap()), said(&other.next_batch().unwrap().unwrap()));
    }
    drop((one, other, first, second));
    assert_eq!(shared.bytes().1, 0);
    assert!(open(StrategyKind::Memory).is_ok());
}

#[test]
fn a_loader_that_is_dropped_midway_leaves_nothing() {
    let bench = Bench::new();
    for strategy in EXACT {
        let order = LoaderOrder::Given { batches: 6 };
        let given = LoaderConfig { order, prepared: None, ..config(&bench, strategy) };
        let scratch: PathBuf = given.scratch.clone();
        let mut loader = open(&bench, given).unwrap();
        let batches = (0..6).map(|batch| (batch * 100..batch * 100 + 100).collect()).collect();
        let epoch = GivenEpoch { seed: 7, batches };
        for taken in 0..3 {
            let mut run = loader.run_given(epoch.clone(), 0).unwrap();
            (0..taken).for_each(|_| assert!(run.next_batch().unwrap().is_some()));
            drop(run);
        }
        // A batch outlives its loader.
        let batch = loader.run_given(epoch.clone(), 0).unwrap().next_batch().unwrap().unwrap();
        drop(loader);
        assert_eq!(std::fs::read_dir(&scratch).unwrap().count(), 0, "{strategy}");
        assert_eq!(batch.rows.unwrap().len(), batch.graph.nodes.len() * 12);
    }
}

#[test]
fn a_run_that_is_stopped_ends_and_one_that_is_not_awaited_waits() {
    let bench = Bench::new();
    let mut loader = open(&bench, config(&bench, StrategyKind::Ginex)).unwrap();
    let mut run = loader.run(START).unwrap();
    let first = loop {
        if let Some(batch) = run.next_within(Duration::from_micros(50)).unwrap() {
            break batch.unwrap();
        }
    };
    assert_eq!(first.at, START);
    run.stop();
    assert!(run.next_batch().unwrap().is_none());
    drop(run);
    let stop = StopSignal::default();
    stop.ask();
    let control = RunControl { stop, ..RunControl::default() };
    let config = config(&bench, StrategyKind::DiskGnn);
    let shared = SharedMemory::new(u64::MAX);
    let mut loader = Loader::open(CpuBackend::new(), dataset(&bench), config, &shared, control).unwrap();
    let stopped = loader.run(START).err().unwrap();
    assert_eq!(stopped.kind(), esker_types::ErrorKind::Stopped);
}

#[test]
fn a_batch_that_turns_out_too_large_is_an_error_that_names_what_would_do() {
    let (bench, run) = Bench::with_hub();
    let seeds = Seeds::Nodes((0..64).map(NodeId).collect());
    let order =
        LoaderOrder::Planned { seed: 7, epochs: 1, shuffle: false, drop_last: false, rank: Rank::ALONE };
    let asked = |memory| LoaderConfig {
        strategy: StrategyKind::Mmap,
        seeds: Arc::new(seeds.clone()),
        fanouts: run.fanout.clone(),
        batch: 1,
        order,
        memory,
        columns: Vec::new(),
        prepared: None,
        ..config(&bench, StrategyKind::Mmap)
    };
    let smallest = open(&bench, asked(1 << 30)).unwrap().plan.smallest_bytes;
    let mut loader = open(&bench, asked(smallest)).unwrap();
    let mut run = loader.run(START).unwrap();
    assert_eq!(run.next_batch().unwrap().unwrap().at, START);
    let error = run.next_batch().unwrap_err();
    assert!(error.to_string().contains("larger than expected"), "{error}");
    assert!(run.next_batch().unwrap().is_none());
}

#[test]
fn what_a_loader_cannot_do_is_refused_by_name() {
    let bench = Bench::new();
    let refused = |change: &dyn Fn(&mut LoaderConfig)| {
        let mut config = config(&bench, StrategyKind::Memory);
        change(&mut config);
        open(&bench, config).err().unwrap().to_string()
    };
    assert!(refused(&|config| config.strategy = StrategyKind::Marius).contains("marius"));
    assert!(refused(&|config| config.strategy = StrategyKind::Outre).contains("outre"));
    assert!(refused(&|config| config.seeds = Arc::new(Seeds::Nodes(Vec::new()))).contains("no seed"));
    assert!(refused(&|config| config.seeds = Arc::new(Seeds::Nodes(vec![NodeId(3000)]))).contains("3000"));
    assert!(refused(&|config| config.batch = 0).contains("--batch"));
    assert!(refused(&|config| config.columns = vec!["no-such".into()]).contains("no-such"));
    let rank = Rank { rank: 9, world_size: 10 };
    let order = LoaderOrder::Planned { seed: 7, epochs: 1, shuffle: true, drop_last: true, rank };
    assert!(refused(&|config| config.order = order).contains("full batch"));
}
