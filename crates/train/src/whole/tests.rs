//! Every way to compute a layer gives the same bits, and a run that was stopped continues.

use super::sizes::{LayerShape, LayerSizes};
use crate::early::{EarlyRows, ReadEarly};
use crate::evaluate::Context;
use crate::memory::Bytes;
use crate::{EvaluationMode, OpenRun, Result, RunConfig, TrainError, WholeCounters};
use esker_import::ImportJob;
use esker_import::generate::{GraphShape, generate};
use esker_nn::{CpuBackend, CpuMatrix, Kind, ModelConfig, NeighbourAggregator, NormKind};
use esker_sample::{Direction, Fanout};
use esker_store::Dataset;
use esker_strategies::StrategyKind;
use esker_types::{Budget, Dtype, NodeId, Silent};
use proptest::prelude::*;
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

const NODES: u64 = 1500;

fn graph() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let shape = GraphShape {
        degree: 9.0,
        dim: 12,
        dtype: Dtype::F16,
        classes: 5,
        out_neighbours: true,
        ..GraphShape::plain(NODES)
    };
    let (target, budget) = (directory.path().join("g"), Budget { host_bytes: 64 << 20 });
    generate(&shape, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent }).unwrap();
    directory
}

fn open(at: &Path, model: ModelConfig, direction: Direction) -> OpenRun<CpuBackend> {
    let dataset = Dataset::open(&at.join("g")).unwrap();
    let hops = if model.kind == Kind::Mlp { vec![] } else { vec![Fanout::AtMost(3); model.layers] };
    let config = RunConfig {
        dataset: at.join("g"),
        dataset_id: dataset.manifest().id.clone(),
        model,
        direction,
        eval: EvaluationMode::Full,
        final_eval: EvaluationMode::Full,
        fanout: hops.clone(),
        eval_fanout: hops,
        memory: 1 << 30,
        threads: 2,
        ..RunConfig::for_dataset(&dataset)
    };
    OpenRun::new(CpuBackend::new(), config, at.join("scratch")).unwrap()
}

/// What is changed of the sizes of each layer.
type Change<'a> = &'a dyn Fn(usize, LayerSizes) -> LayerSizes;

fn infer(
    run: &mut OpenRun<CpuBackend>,
    targets: Option<&Arc<Vec<NodeId>>>,
    change: Change,
    stop: &dyn Fn() -> bool,
) -> Result<(Vec<f32>, WholeCounters)> {
    let layers = run.config.model.layers;
    let mut context: Context<CpuBackend> = run.context(stop);
    let shapes = context.shapes(layers)?;
    let sizes = context.sizes(&shapes)?;
    let sizes: Vec<(LayerShape, LayerSizes)> = shapes
        .into_iter()
        .zip(sizes)
        .enumerate()
        .map(|(layer, (shape, sizes))| (shape, change(layer, sizes)))
        .collect();
    let (mut ids, mut found) = (Vec::new(), Vec::new());
    let counters = context.infer_sized(targets, sizes, None, None, &mut |nodes, rows: &CpuMatrix| {
        ids.extend_from_slice(nodes);
        found.extend_from_slice(rows.values());
        Ok(())
    })?;
    match targets {
        Some(targets) => assert_eq!(&ids, &**targets),
        None => assert!(ids.iter().map(|node| node.0).eq(0..NODES)),
    }
    Ok((found, counters))
}

fn models() -> Vec<(ModelConfig, Direction)> {
    let base = ModelConfig { layers: 3, hidden: 16, heads: 2, ..ModelConfig::default() };
    let sage = |aggregator| ModelConfig { aggregator, ..base.clone() };
    let kind = |kind| ModelConfig { kind, ..base.clone() };
    vec![
        (sage(NeighbourAggregator::Mean), Direction::Incoming),
        (ModelConfig { norm: NormKind::Layer, ..sage(NeighbourAggregator::Max) }, Direction::Both),
        (kind(Kind::Gcn), Direction::Both),
        (ModelConfig { residual: true, ..kind(Kind::Gin) }, Direction::Outgoing),
        (ModelConfig { residual: true, ..kind(Kind::Gat) }, Direction::Incoming),
        (kind(Kind::Gat), Direction::Both),
        (kind(Kind::Mlp), Direction::Incoming),
    ]
}

fn never() -> bool {
    false
}

fn as_they_are(_: usize, sizes: LayerSizes) -> LayerSizes {
    sizes
}

#[test]
fn every_way_gives_the_same_bits() {
    let directory = graph();
    let some: Arc<Vec<NodeId>> =
        Arc::new((0..NODES).filter(|node| node % 7 == 2 || *node < 40).map(NodeId).collect());
    for (model, direction) in models() {
        let mut run = open(directory.path(), model.clone(), direction);
        let width = 5;
        let (expected, counters) = infer(&mut run, None, &as_they_are, &never).unwrap();
        assert_eq!(counters.row_bytes_written, 0, "everything stays: {model:?}");
        let accessed: Vec<f32> =
            some.iter().flat_map(|node| expected[node.index() * width..][..width].to_vec()).collect();
        let (found, _) = infer(&mut run, Some(&some), &as_they_are, &never).unwrap();
        assert!(found == accessed, "some targets: {model:?}");
        // As on a device with its own memory: the adjacency is read once, in several pieces per tile.
        let kept = |_: usize, sizes: LayerSizes| LayerSizes { adjacency_stays: true, entries: 500, ..sizes };
        let (found, once) = infer(&mut run, None, &kept, &never).unwrap();
        assert!(found == expected, "adjacency that stays: {model:?}");
        assert_eq!(once.adjacency_bytes_read * 3, counters.adjacency_bytes_read, "{model:?}");
        let strategy = (1u64..400, 1u64..1700, prop::bool::weighted(0.3), 0u64..6, any::<bool>(), 1usize..4);
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(6));
        let result = runner.run(&strategy, |(entries, chunk_rows, input_stays, tiles, few, readers)| {
            let change = |layer: usize, _: LayerSizes| LayerSizes {
                entries,
                chunk_rows,
                readers,
                input_stays: input_stays && layer > 0,
                output_stays: false,
                adjacency_stays: false,
                block: Bytes { host: tiles * 30_000, device: 0 },
            };
            let mut run = open(directory.path(), model.clone(), direction);
            let targets = few.then_some(&some);
            let (found, counters) = infer(&mut run, targets, &change, &never).unwrap();
            prop_assert!(&found == if few { &accessed } else { &expected }, "{:?}", model);
            let least = NODES * 16 * 4;
            prop_assert!(counters.row_bytes_written >= 2 * least);
            prop_assert!(counters.gather_bytes <= counters.stream_bytes);
            Ok(())
        });
        result.unwrap();
    }
    assert!(!directory.path().join("scratch/inference").exists(), "nothing stays behind");
}

#[test]
fn inference_that_was_stopped_continues() {
    let directory = graph();
    let on_disk = |_: usize, _: LayerSizes| LayerSizes {
        entries: 200,
        chunk_rows: 300,
        readers: 2,
        input_stays: false,
        output_stays: false,
        adjacency_stays: false,
        block: Bytes { host: 60_000, device: 0 },
    };
    for (model, direction) in models() {
        let (expected, whole) =
            infer(&mut open(directory.path(), model.clone(), direction), None, &on_disk, &never).unwrap();
        let (mut written, mut stops) = (0, 0);
        let found = loop {
            let calls = Cell::new(0);
            // Later and later, so that every part of the work is stopped in.
            let limit = 3 + 4 * stops;
            let stop = || calls.replace(calls.get() + 1) >= limit;
            match infer(&mut open(directory.path(), model.clone(), direction), None, &on_disk, &stop) {
                Ok((found, counters)) => {
                    written += counters.row_bytes_written;
                    break found;
                }
                Err(TrainError::Stopped) => stops += 1,
                Err(error) => panic!("{error}"),
            }
            assert!(directory.path().join("scratch/inference/journal.json").exists());
        };
        assert!(found == expected, "{model:?}");
        assert!(stops >= 2, "{stops}");
        assert!(
            written < whole.row_bytes_written,
            "{written} of {}: it started over",
            whole.row_bytes_written
        );
        assert!(!directory.path().join("scratch/inference").exists());
    }
}

#[test]
fn hidden_rows_of_another_model_are_not_used() {
    let directory = graph();
    let on_disk = |_: usize, _: LayerSizes| LayerSizes {
        entries: 200,
        chunk_rows: 300,
        readers: 2,
        input_stays: false,
        output_stays: false,
        adjacency_stays: false,
        block: Bytes { host: 1 << 20, device: 0 },
    };
    let (model, direction) = models().remove(0);
    let seeded = |seed: u64| {
        let run = open(directory.path(), model.clone(), direction);
        let config = RunConfig { seed, ..run.config.clone() };
        OpenRun::new(CpuBackend::new(), config, directory.path().join("scratch")).unwrap()
    };
    let expected = infer(&mut seeded(2), None, &as_they_are, &never).unwrap().0;
    let calls = Cell::new(0);
    let stop = || calls.replace(calls.get() + 1) >= 25;
    assert!(matches!(infer(&mut seeded(1), None, &on_disk, &stop), Err(TrainError::Stopped)));
    assert!(directory.path().join("scratch/inference/journal.json").exists());
    assert!(infer(&mut seeded(2), None, &on_disk, &never).unwrap().0 == expected);
}

/// A run from disk on f32 rows.
fn from_disk(at: &Path, model: ModelConfig, direction: Direction) -> OpenRun<CpuBackend> {
    let shape =
        GraphShape { degree: 9.0, dim: 12, classes: 5, out_neighbours: true, ..GraphShape::plain(NODES) };
    let (target, budget) = (at.join("f32"), Budget { host_bytes: 64 << 20 });
    generate(&shape, &ImportJob { target: &target, budget, overwrite: true, progress: &Silent }).unwrap();
    let config = RunConfig {
        dataset_id: Dataset::open(&target).unwrap().manifest().id.clone(),
        dataset: target,
        strategy: StrategyKind::DiskGnn,
        ..open(at, model, direction).config
    };
    OpenRun::new(CpuBackend::new(), config, at.join("scratch")).unwrap()
}

/// Infers with some rows read early.
fn infer_early(run: &mut OpenRun<CpuBackend>, early: Option<ReadEarly>) -> (Vec<f32>, WholeCounters) {
    let layers = run.config.model.layers;
    let mut context: Context<CpuBackend> = run.context(&never);
    let shapes = context.shapes(layers).unwrap();
    let sizes = context.sizes(&shapes).unwrap();
    let sizes = shapes.into_iter().zip(sizes).collect();
    let mut found = Vec::new();
    let counters = context.infer_sized(None, sizes, None, early, &mut |_, rows: &CpuMatrix| {
        found.extend_from_slice(rows.values());
        Ok(())
    });
    (found, counters.unwrap())
}

fn infer_whole(run: &mut OpenRun<CpuBackend>) -> (Vec<f32>, WholeCounters) {
    let (layers, mut found) = (run.config.model.layers, Vec::new());
    let counters = run.context(&never).infer_whole(None, layers, None, &mut |_, rows: &CpuMatrix| {
        found.extend_from_slice(rows.values());
        Ok(())
    });
    (found, counters.unwrap())
}

#[test]
fn rows_that_are_read_early_give_the_same_bits() {
    let directory = graph();
    for (model, direction) in models() {
        let mut run = from_disk(directory.path(), model.clone(), direction);
        let (expected, without) = infer_early(&mut run, None);
        assert_eq!(without.row_bytes_early, 0);
        // All of them, all but the last, and those of one reader.
        let all = EarlyRows::start(&run.config).unwrap().complete();
        assert_eq!(all.bytes(), NODES * 12 * 4, "{model:?}");
        let mut fewer = EarlyRows::start(&run.config).unwrap().complete();
        fewer.drop_last();
        let any = EarlyRows::start(&run.config).unwrap().take();
        for early in [all, fewer, any] {
            let bytes = early.bytes();
            let (found, counters) = infer_early(&mut run, Some(early));
            assert!(found == expected, "{model:?}");
            assert_eq!((counters.row_bytes_early, counters.row_bytes_read), (bytes, without.row_bytes_read));
        }
        // As a run takes them.
        run.early_rows = EarlyRows::start(&run.config);
        assert!(infer_whole(&mut run).0 == expected, "{model:?}");
    }
}

#[test]
fn rows_are_read_early_only_if_they_leave_the_memory_of_the_first_layer() {
    let directory = graph();
    let model = ModelConfig { layers: 2, hidden: 16, ..ModelConfig::default() };
    let mut run = from_disk(directory.path(), model, Direction::Incoming);
    let whole = run.plan.whole_bytes.host;
    let early = |run: &mut OpenRun<CpuBackend>| {
        let started = EarlyRows::start(&run.config).unwrap();
        run.early_rows = Some(started.clone());
        let mut context: Context<CpuBackend> = run.context(&never);
        let shapes = context.shapes(2).unwrap();
        let mut sizes = context.sizes(&shapes).unwrap();
        let before = sizes.clone();
        context.early_rows.take();
        let mut kept = started.complete();
        let kept = context.beside(&shapes, &mut sizes, &mut kept).then(|| kept.bytes());
        assert!(sizes.iter().zip(&before).all(|(now, before)| now.input_stays == before.input_stays));
        kept
    };
    assert_eq!(early(&mut run), Some(NODES * 12 * 4));
    // Memory in which rows stay, but little more.
    let mut least = whole;
    let stays = |run: &mut OpenRun<CpuBackend>, host: u64| {
        run.plan.whole_bytes.host = host;
        let context: Context<CpuBackend> = run.context(&never);
        let shapes = context.shapes(2).unwrap();
        context.sizes(&shapes).is_ok_and(|sizes| sizes[0].input_stays && sizes[0].output_stays)
    };
    while stays(&mut run, least - (8 << 10)) {
        least -= 8 << 10;
    }
    run.plan.whole_bytes.host = least;
    let kept = early(&mut run);
    assert!(kept.is_none_or(|bytes| bytes < 16 << 10), "{kept:?}");
}
