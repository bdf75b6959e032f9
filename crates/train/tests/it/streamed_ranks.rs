//! Ranks, scores and exports with rows that are read block by block are those of all rows in memory, to the bit.

use crate::facts::{Facts, NODES, config_of};
use esker_import::{ImportJob, Request, import};
use esker_nn::{CpuBackend, DecoderKind, DistanceNorm, Kind, ModelConfig, RowInit};
use esker_plan::partition_orders::PartitionCounts;
use esker_sample::Fanout;
use esker_sample::negatives::Side;
use esker_strategies::StrategyKind;
use esker_train::link::{
    LinkModel, NegativeCount, RankConfig, RankRows, RankStream, SplitRanks, Ties, with_link_model,
};
use esker_train::{
    EvaluationMode, InputRows, Metrics, OpenRun, OrderName, Outcome, ResidentOnly, RunConfig, RunDirectory,
    SplitName, TrainError, Trainer, Unwatched, rank_run,
};
use esker_types::random::{Key, below};
use esker_types::{Budget, NodeId, Silent};
use std::fmt::Write;
use std::path::Path;

fn train(config: &RunConfig, out: &Path) -> Metrics {
    let trainer = Trainer::create(CpuBackend::new(), config.clone(), out).unwrap();
    let Outcome::Finished(summary) = trainer.run(&mut Unwatched).unwrap() else { panic!("it was stopped") };
    summary.test.unwrap()
}

fn in_buffer(config: RunConfig) -> RunConfig {
    let partition_counts = Some(PartitionCounts { partitions: 10, resident: 4, logical: 5 });
    RunConfig { strategy: StrategyKind::Marius, order: OrderName::Tour, partition_counts, ..config }
}

fn load(out: &Path, ranks: RankConfig, ranking: RankRows) -> OpenRun<CpuBackend> {
    let (directory, mut config) = RunDirectory::open(out).unwrap();
    config.link.as_mut().unwrap().ranks = ranks;
    let mut run = OpenRun::load(CpuBackend::new(), &directory, config.to_infer(None)).unwrap();
    run.plan.ranking = ranking;
    run
}

fn ranks(out: &Path, ranks: RankConfig, ranking: RankRows, mode: EvaluationMode) -> SplitRanks {
    rank_run(&mut load(out, ranks, ranking), SplitName::Test, mode).unwrap().unwrap()
}

/// How much is in memory at a time, at random: the true ends of an edge at least.
fn some_stream(key: Key) -> RankRows {
    let up_to = |at: u64, most: u64| 1 + below(key.at(at), most);
    RankRows::Streamed(RankStream {
        block_nodes: [1, 7, 64, NODES][below(key.at(0), 4) as usize].max(up_to(1, NODES) / 2),
        pass_edges: up_to(2, 500),
        end_bytes: 64 + 4 * 2 * NODES * up_to(3, 40),
        export_bytes: up_to(4, 20_000),
    })
}

fn some_ranks(key: Key) -> RankConfig {
    RankConfig {
        ties: [Ties::Realistic, Ties::Optimistic, Ties::Pessimistic][below(key.at(10), 3) as usize],
        raw: below(key.at(11), 2) == 0,
        candidates: [None, None, Some(1), Some(77), Some(600)][below(key.at(12), 5) as usize],
        block: [None, Some(5)][below(key.at(13), 2) as usize],
    }
}

/// Compares some ways to rank with that of rows in memory.
fn check(out: &Path, seed: u64, cases: u64, mode: EvaluationMode) {
    for case in 0..cases {
        let key = Key::new(seed).with(case);
        let (config, stream) = (some_ranks(key), some_stream(key));
        let expected = ranks(out, config, RankRows::Resident, mode);
        let found = ranks(out, config, stream, mode);
        assert_eq!(found, expected, "{} {seed} {case}: {config:?} {stream:?}", out.display());
    }
}

fn with_decoder(facts: &Facts, decoder: DecoderKind, inverse: bool) -> RunConfig {
    let mut config = RunConfig { epochs: 1, ..facts.config() };
    let link = config.link.as_mut().unwrap();
    (link.decoder, link.inverse) = (decoder, inverse);
    config
}

#[test]
fn streamed_ranks_are_those_of_rows_in_memory() {
    let facts = Facts::new();
    let decoders = [
        DecoderKind::Dot,
        DecoderKind::DistMult,
        DecoderKind::TransE { norm: DistanceNorm::L1 },
        DecoderKind::TransE { norm: DistanceNorm::L2 },
        DecoderKind::ComplEx,
        DecoderKind::RotatE { phase_scale: 1.5 },
    ];
    for (at, decoder) in (0..).zip(decoders) {
        let config = with_decoder(&facts, decoder, at % 2 == 0);
        for (name, config) in [("memory", config.clone()), ("buffer", in_buffer(config))] {
            let out = facts.path(&format!("{name}{at}"));
            train(&config, &out);
            check(&out, at, 8, EvaluationMode::Full);
        }
    }
}

#[test]
fn equal_scores_and_other_inputs_are_streamed_too() {
    let facts = Facts::new();
    // Products of such numbers are zero: all scores are equal.
    let mut equal = in_buffer(with_decoder(&facts, DecoderKind::DistMult, true));
    equal.embeddings.as_mut().unwrap().init = RowInit::Normal { deviation: 1e-30 };
    (equal.lr, equal.embeddings.as_mut().unwrap().lr) = (1e-37, 1e-37);
    train(&equal, &facts.path("equal"));
    check(&facts.path("equal"), 50, 6, EvaluationMode::Full);
}

#[test]
fn representations_of_an_encoder_are_streamed_from_a_file() {
    let facts = Facts::new();
    let model = ModelConfig { kind: Kind::Sage, layers: 1, hidden: 16, ..ModelConfig::default() };
    let fanout = vec![Fanout::AtMost(4)];
    let config = RunConfig { model, eval_fanout: fanout.clone(), fanout, epochs: 1, ..facts.config() };
    for mode in [EvaluationMode::Full, EvaluationMode::Sampled] {
        let config = RunConfig { eval: mode, final_eval: mode, ..config.clone() };
        for (name, config) in [("memory", config.clone()), ("buffer", in_buffer(config))] {
            let out = facts.path(&format!("{name}-{mode:?}"));
            train(&config, &out);
            check(&out, 70, 4, mode);
            let scratch = RunDirectory::open(&out).unwrap().0.scratch_path();
            let left = std::fs::read_dir(scratch).into_iter().flatten().map(|file| file.unwrap().path());
            assert_eq!(left.filter(|path| path.to_string_lossy().contains("representations")).count(), 0);
        }
    }
}

/// Everything that is predicted.
type Predicted = (Vec<(u64, Vec<f32>)>, Vec<f32>, Vec<(NodeId, f32)>, Vec<f32>);

fn predicted(out: &Path, ranking: RankRows) -> Predicted {
    let mut run = load(out, RankConfig::default(), ranking);
    let edges = run.links.as_ref().unwrap().task.test.clone();
    let work = |model: &LinkModel<'_, CpuBackend>| -> Result<Predicted, TrainError> {
        let (mut rows, columns) = (Vec::new(), model.columns());
        model.each_node(&mut |nodes, values| {
            let of = nodes.iter().zip(values.chunks(columns));
            rows.extend(of.map(|(node, row)| (node.0, row.to_vec())));
            Ok(())
        })?;
        let mut relations = Vec::new();
        model.each_relation(&mut |_, values| {
            relations.extend_from_slice(values);
            Ok(())
        })?;
        let mut best = Vec::new();
        for (side, count) in [(Side::Target, 10), (Side::Source, 1), (Side::Target, 1000), (Side::Source, 0)]
        {
            let found = model.best(NodeId(17), 2, side, count)?;
            best.extend(found.into_iter().map(|found| (found.node, found.score)));
        }
        Ok((rows, model.scores(&edges)?, best, relations))
    };
    with_link_model(&mut run, EvaluationMode::Full, work).unwrap()
}

#[test]
fn exports_and_predictions_are_streamed() {
    let facts = Facts::new();
    let config = RunConfig { epochs: 1, ..facts.config() };
    for (name, config) in [("memory", config.clone()), ("buffer", in_buffer(config))] {
        let out = facts.path(name);
        train(&config, &out);
        let expected = predicted(&out, RankRows::Resident);
        assert!(expected.0.iter().map(|(node, _)| *node).eq(0..NODES));
        for case in 0..6 {
            assert!(predicted(&out, some_stream(Key::new(90).with(case))) == expected, "{name} {case}");
        }
    }
}

#[test]
fn inference_sorts_no_edges_and_names_a_damaged_partition() {
    let facts = Facts::new();
    let config = in_buffer(RunConfig { epochs: 1, ..facts.config() });
    let out = facts.path("run");
    let expected = train(&config, &out).ranks.unwrap();
    let derived = facts.path("g").join("derived");
    std::fs::remove_dir_all(&derived).unwrap();
    let stream = some_stream(Key::new(1));
    let found = ranks(&out, RankConfig::default(), stream, EvaluationMode::Full).all;
    assert_eq!(found.mrr.to_bits(), expected.mrr.to_bits());
    assert!(!derived.exists(), "what is evaluated is not prepared");

    let state = RunDirectory::open(&out).unwrap().0.state_path();
    let files = std::fs::read_dir(state).unwrap().map(|file| file.unwrap().path());
    let of_three = files.filter(|path| path.to_string_lossy().contains("embeddings-00003."));
    for path in of_three {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[100] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    for ranking in [RankRows::Resident, stream] {
        let mut run = load(&out, RankConfig::default(), ranking);
        let error = rank_run(&mut run, SplitName::Test, EvaluationMode::Full).unwrap_err().to_string();
        assert!(error.contains("embeddings-00003.") && error.contains("expected checksum"), "{error}");
    }
}

/// A graph of many nodes and few edges.
fn wide_graph(folder: &Path, nodes: u64) -> std::path::PathBuf {
    let from = folder.join("from");
    std::fs::create_dir(&from).unwrap();
    for (name, seed, edges) in [("train", 1, nodes), ("valid", 2, 200), ("test", 3, 300)] {
        let mut text = String::new();
        for at in 0..edges {
            // Every node has an edge.
            let source = if seed == 1 { at } else { below(Key::new(seed).at(2 * at), nodes) };
            let target = below(Key::new(seed).at(2 * at + 1), nodes);
            writeln!(text, "n{source}\tr{}\tn{target}", at % 3).unwrap();
        }
        std::fs::write(from.join(format!("{name}.txt")), text).unwrap();
    }
    let request = Request { format: "triples".into(), from: Some(from), ..Request::default() };
    let (target, budget) = (folder.join("g"), Budget { host_bytes: 256 << 20 });
    import(&request, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent }).unwrap();
    target
}

#[test]
fn a_quarter_of_a_table_that_memory_cannot_hold_gives_the_same_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let nodes = 200_000;
    let mut config = RunConfig { batch: 1000, epochs: 1, ..config_of(&wide_graph(folder.path(), nodes)) };
    let embeddings = config.embeddings.as_mut().unwrap();
    (embeddings.columns, embeddings.inputs) = (128, InputRows::Embeddings);
    let link = config.link.as_mut().unwrap();
    link.columns = 128;
    link.negatives = NegativeCount::Shared { uniform: 20, by_degree: 0, chunks: 5 };
    (config.eval, config.threads) = (EvaluationMode::Full, 2);
    let partition_counts = Some(PartitionCounts { partitions: 16, resident: 4, logical: 8 });
    let config = RunConfig { order: OrderName::TwoLevelBeta, partition_counts, ..config };
    let seen = RunConfig { resident_only: Some(ResidentOnly::All), ..config.clone() };
    let expected = train(&seen, &folder.path().join("memory"));

    let buffer = RunConfig { strategy: StrategyKind::Marius, ..config };
    let plan = OpenRun::plan_only(&CpuBackend::new(), &buffer).unwrap();
    let table = nodes * 128 * 4 * 2;
    assert!(plan.smallest_bytes < table, "{} of {table}: {}", plan.smallest_bytes, plan.table);
    let memory = plan.smallest_bytes;
    let little = RunConfig { memory, ..buffer };
    let plan = OpenRun::plan_only(&CpuBackend::new(), &little).unwrap();
    assert!(matches!(plan.ranking, RankRows::Streamed(_)), "{}", plan.table);
    let found = train(&little, &folder.path().join("buffer"));
    assert_eq!(format!("{found:?}"), format!("{expected:?}"));
    let less = RunConfig { memory: memory - 1, ..little };
    let error = OpenRun::plan_only(&CpuBackend::new(), &less).map(drop).unwrap_err().to_string();
    assert!(error.contains("evaluation: blocks of candidates"), "{error}");
}
