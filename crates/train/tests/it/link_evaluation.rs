//! Ranks against naive oracles where they are less usual: negatives that came with a benchmark, by OGB's rules; graphs
//! with reverses; many drawn candidates. And what ends an evaluation early.

use crate::facts::{Facts, config_of};
use esker_import::{ImportJob, Request, import};
use esker_nn::{CpuBackend, DecoderKind, DistanceNorm, Kind, ModelConfig, OptimizerKind, initial_rows};
use esker_sample::negatives::{NegativeMask, Side};
use esker_sample::{Edge, EdgeRows, Fanout, FixedNegatives, HeldOut, for_each_edge};
use esker_store::Dataset;
use esker_strategies::{Phase, RunPosition};
use esker_train::link::{
    LinkTask, NegativeCount, PenaltyConfig, PenaltyName, RankConfig, RankRows, RankStream, SplitRanks,
    TargetEdges, Ties, with_link_model,
};
use esker_train::{
    Checkpoint, EvaluationMode, Metrics, OpenRun, Outcome, RunConfig, RunControl, RunDirectory, SplitName,
    TrainError, Trainer, Unwatched, evaluate_run, rank_run,
};
use esker_types::random::{Key, below};
use esker_types::{Budget, NodeId, Recorded, Silent, StopSignal};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn train(config: &RunConfig, out: &Path) {
    let trainer = Trainer::create(CpuBackend::new(), config.clone(), out).unwrap();
    assert!(matches!(trainer.run(&mut Unwatched).unwrap(), Outcome::Finished(_)));
}

fn load(
    out: &Path,
    mode: Option<EvaluationMode>,
    control: RunControl,
    ranks: RankConfig,
) -> OpenRun<CpuBackend> {
    let (directory, mut config) = RunDirectory::open(out).unwrap();
    config.link.as_mut().unwrap().ranks = ranks;
    OpenRun::load_watched(CpuBackend::new(), &directory, config.to_infer(mode), control).unwrap()
}

/// Rows that are read, a few at a time.
const STREAMED: RankRows =
    RankRows::Streamed(RankStream { block_nodes: 3, pass_edges: 2, end_bytes: 1 << 10, export_bytes: 0 });

/// Ranks, which are the same where rows are read.
fn ranks_of(out: &Path, split: SplitName, ranks: RankConfig) -> SplitRanks {
    let [resident, streamed] = [RankRows::Resident, STREAMED].map(|ranking| {
        let mut run = load(out, None, RunControl::default(), ranks);
        run.plan.ranking = ranking;
        rank_run(&mut run, split, EvaluationMode::Full).unwrap().unwrap()
    });
    assert_eq!(resident, streamed);
    resident
}

fn metrics_of(out: &Path, split: SplitName) -> Metrics {
    let [resident, streamed] = [RankRows::Resident, STREAMED].map(|ranking| {
        let mut run = load(out, None, RunControl::default(), RankConfig::default());
        run.plan.ranking = ranking;
        evaluate_run(&mut run, split, EvaluationMode::Full).unwrap().unwrap()
    });
    assert_eq!(format!("{resident:?}"), format!("{streamed:?}"));
    resident
}

fn scores_of(out: &Path, edges: &[Edge]) -> Vec<f32> {
    let mut run = load(out, None, RunControl::default(), RankConfig::default());
    with_link_model::<_, _, TrainError>(&mut run, EvaluationMode::Full, |model| model.scores(edges)).unwrap()
}

fn edge(source: u64, target: u64, relation: u32) -> Edge {
    Edge { source: NodeId(source), target: NodeId(target), relation }
}

/// A dataset with the committed splits of an OGB link dataset.
fn ogbl(directory: &Path, form: &str) -> PathBuf {
    let from = directory.join(form);
    let write = |name: &str, text: &str| {
        let path = from.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("raw/edge.csv", "0,1\n2,1\n5,4\n");
    write("raw/num-node-list.csv", "10\n");
    if form == "fact" {
        write("raw/edge_reltype.csv", "0\n2\n1\n");
    }
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../import/tests/fixtures/ogbl");
    for split in ["valid", "test"] {
        write(&format!("split/time/{split}.pt"), "");
        let to = from.join(format!("split/time/{split}.pt"));
        fs::copy(fixtures.join(format!("{form}.{split}.pt")), to).unwrap();
    }
    let target = directory.join(format!("{form}-dataset"));
    import_to(&Request { format: "ogb".into(), from: Some(from), ..Request::default() }, &target);
    target
}

fn import_to(request: &Request, target: &Path) {
    let budget = Budget { host_bytes: 64 << 20 };
    import(request, &ImportJob { target, budget, overwrite: true, progress: &Silent }).unwrap();
}

/// A run whose rows have two numbers from 1 to 3, which training leaves alone: many scores are equal.
fn with_ties(dataset: &Path, directory: &Path, seed: u64, decoder: DecoderKind) -> PathBuf {
    let mut config = config_of(dataset);
    let nodes = Dataset::open(dataset).unwrap().manifest().nodes.count;
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({nodes}, 2), }}");
    let header = format!("{header:<117}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    let value = |index: u64| (1 + below(Key::new(seed).at(index), 3)) as f32;
    bytes.extend((0..2 * nodes).flat_map(|index| value(index).to_le_bytes()));
    let rows = directory.join(format!("rows-{seed}.npy"));
    fs::write(&rows, bytes).unwrap();
    let link = config.link.as_mut().unwrap();
    (link.decoder, link.columns, link.inverse) = (decoder, 2, false);
    link.negatives = NegativeCount::Shared { uniform: 2, by_degree: 0, chunks: 1 };
    let embeddings = config.embeddings.as_mut().unwrap();
    (embeddings.columns, embeddings.init_file, embeddings.lr) = (2, Some(rows), 1e-30);
    (config.epochs, config.lr) = (1, 1e-30);
    let out = directory.join(format!("run-{seed}"));
    train(&config, &out);
    out
}

fn held_out(dataset: &Path, split: SplitName) -> (Vec<Edge>, HeldOut) {
    let task = LinkTask::load(&Dataset::open(dataset).unwrap()).unwrap();
    let which = if split == SplitName::Test { HeldOut::Test } else { HeldOut::Valid };
    (task.split(split).unwrap().to_vec(), which)
}

/// `Evaluator._eval_hits` of OGB.
fn ogb_hits(positive: &[f32], negative: &[f32], k: usize) -> f64 {
    if negative.len() < k {
        return 1.0;
    }
    let mut sorted = negative.to_vec();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    positive.iter().filter(|score| **score > sorted[k - 1]).count() as f64 / positive.len() as f64
}

/// The share of pairs of a positive and a negative that are in order; equal ones count half.
fn naive_auc(positive: &[f32], negative: &[f32]) -> f64 {
    let pairs = positive.iter().flat_map(|one| negative.iter().map(move |other| (*one, *other)));
    let wins: f64 = pairs
        .map(|(one, other)| if one > other { 1.0 } else { f64::from(u8::from(one == other)) / 2.0 })
        .sum();
    wins / (positive.len() * negative.len()) as f64
}

/// `average_precision_score` of scikit-learn: precision at each threshold, times the recall that it adds.
fn naive_ap(positive: &[f32], negative: &[f32]) -> f64 {
    let mut thresholds: Vec<f32> = positive.iter().chain(negative).copied().collect();
    thresholds.sort_unstable_by(|a, b| b.total_cmp(a));
    thresholds.dedup();
    let (mut sum, mut recall) = (0.0, 0.0);
    for threshold in thresholds {
        let count = |scores: &[f32]| scores.iter().filter(|score| **score >= threshold).count() as f64;
        let (right, wrong) = (count(positive), count(negative));
        sum += (right / positive.len() as f64 - recall) * right / (right + wrong);
        recall = right / positive.len() as f64;
    }
    sum
}

#[test]
fn shared_negatives_give_the_hits_of_ogb() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = ogbl(directory.path(), "edge");
    let (mut equal, mut values) = (0, BTreeSet::new());
    for seed in 0..24 {
        let out = with_ties(&dataset, directory.path(), seed, DecoderKind::Dot);
        for split in [SplitName::Valid, SplitName::Test] {
            let (edges, which) = held_out(&dataset, split);
            let mut negatives = Vec::new();
            let rows = EdgeRows::shared_negatives(&Dataset::open(&dataset).unwrap(), which).unwrap().unwrap();
            rows.for_each(|edge| negatives.push(edge)).unwrap();
            let (positive, negative) = (scores_of(&out, &edges), scores_of(&out, &negatives));
            equal += positive.iter().filter(|score| negative.contains(score)).count();
            let metrics = metrics_of(&out, split);
            let ranks = metrics.ranks.unwrap();
            for (k, found) in [(1, ranks.hits_at_1), (3, ranks.hits_at_3), (20, ranks.hits_at_20)] {
                assert_eq!(found, ogb_hits(&positive, &negative, k), "seed {seed}, {split:?}, {k}");
            }
            assert!((metrics.auc.unwrap() - naive_auc(&positive, &negative)).abs() < 1e-12);
            assert!((metrics.ap.unwrap() - naive_ap(&positive, &negative)).abs() < 1e-12);
            values.insert(format!("{:?}", ranks.hits_at_1));
        }
    }
    assert!(equal >= 10 && values.len() > 2, "{equal} equal scores, {values:?}");
}

#[test]
fn negatives_of_each_edge_give_the_mrr_of_ogb() {
    let directory = tempfile::tempdir().unwrap();
    let (mut equal, mut values) = (0, BTreeSet::new());
    for (form, decoder) in [("node", DecoderKind::Dot), ("fact", DecoderKind::DistMult)] {
        let dataset = ogbl(directory.path(), form);
        for seed in 0..12 {
            let seed = seed + if form == "fact" { 100 } else { 0 };
            let out = with_ties(&dataset, directory.path(), seed, decoder);
            for split in [SplitName::Valid, SplitName::Test] {
                let (edges, which) = held_out(&dataset, split);
                let (mut mrr, mut hits, mut count) = (0.0, 0.0, 0.0);
                for side in [Side::Target, Side::Source] {
                    let opened = Dataset::open(&dataset).unwrap();
                    let Some(fixed) = FixedNegatives::open(&opened, which, side).unwrap() else { continue };
                    for (row, positive) in edges.iter().enumerate() {
                        let mut nodes = Vec::new();
                        fixed.nodes(&[row as u64], &mut nodes).unwrap();
                        let replaced = nodes.iter().map(|node| match side {
                            Side::Target => Edge { target: *node, ..*positive },
                            Side::Source => Edge { source: *node, ..*positive },
                        });
                        let negative = scores_of(&out, &replaced.collect::<Vec<_>>());
                        let own = scores_of(&out, &[*positive])[0];
                        // `Evaluator._eval_mrr` of OGB.
                        let optimistic = negative.iter().filter(|score| **score > own).count() as f64;
                        let pessimistic = negative.iter().filter(|score| **score >= own).count() as f64;
                        let rank = 0.5 * (optimistic + pessimistic) + 1.0;
                        equal += usize::from(optimistic != pessimistic);
                        mrr += 1.0 / rank;
                        hits += f64::from(u8::from(rank <= 1.0));
                        count += 1.0;
                    }
                }
                let found = ranks_of(&out, split, RankConfig::default()).all;
                assert_eq!(found.ranks as f64, count, "{form} {split:?}");
                assert!((found.mrr - mrr / count).abs() < 1e-12, "{form} {seed} {split:?}: {found:?} {mrr}");
                assert!((found.hits_at_1 - hits / count).abs() < 1e-12);
                values.insert(format!("{:.9}", found.mrr));
            }
        }
    }
    assert!(equal > 10 && values.len() > 4, "{equal} equal scores, {values:?}");
}

/// Ranks one by one, over all nodes but those that make a true edge: each edge as given, and its reverse.
fn naive_mrr(dataset: &Path, out: &Path, with_reverses: bool) -> f64 {
    let opened = Dataset::open(dataset).unwrap();
    let task = LinkTask::load(&opened).unwrap();
    let mut known: BTreeSet<Edge> = task.valid.iter().chain(task.test.iter()).copied().collect();
    if with_reverses {
        let reverses: Vec<Edge> =
            known.iter().map(|edge| Edge { source: edge.target, target: edge.source, ..*edge }).collect();
        known.extend(reverses);
    }
    for_each_edge(&opened, &mut |edge| {
        known.insert(edge);
    })
    .unwrap();
    let mut run = load(out, None, RunControl::default(), RankConfig::default());
    let ranks = with_link_model::<_, _, TrainError>(&mut run, EvaluationMode::Full, |model| {
        let mut ranks = Vec::new();
        for own in task.test.iter() {
            for side in [Side::Target, Side::Source] {
                let all: Vec<Edge> = (0..task.nodes)
                    .map(|node| match side {
                        Side::Target => Edge { target: NodeId(node), ..*own },
                        Side::Source => Edge { source: NodeId(node), ..*own },
                    })
                    .collect();
                let (scores, score) = (model.scores(&all)?, model.scores(&[*own])?[0]);
                let counted = || scores.iter().zip(&all).filter(|(_, edge)| !known.contains(edge));
                let greater = counted().filter(|(other, _)| **other > score).count() as u64;
                let equal = counted().filter(|(other, _)| **other == score).count() as u64;
                ranks.push(Ties::Realistic.rank(greater, equal));
            }
        }
        Ok(ranks)
    });
    let ranks = ranks.unwrap();
    ranks.iter().map(|rank| 1.0 / rank).sum::<f64>() / ranks.len() as f64
}

fn check_reverses(dataset: &Path, out: &Path) {
    let mut config = config_of(dataset);
    let link = config.link.as_mut().unwrap();
    (link.decoder, link.inverse) = (DecoderKind::ComplEx, false);
    config.epochs = 2;
    train(&config, out);
    let found = ranks_of(out, SplitName::Test, RankConfig::default()).all.mrr;
    let (expected, without) = (naive_mrr(dataset, out, true), naive_mrr(dataset, out, false));
    assert!((found - expected).abs() < 1e-9, "{found} {expected}");
    assert!((expected - without).abs() > 1e-6, "a test that tells them apart: {expected} {without}");
}

/// A graph of few nodes, so that many candidates of an edge are the reverse of another that was held out.
fn lines(relations: u64, separator: &str) -> Vec<String> {
    let key = Key::new(11);
    let edges: BTreeSet<[u64; 3]> = (0..700)
        .map(|at| {
            [below(key.at(3 * at), 40), below(key.at(3 * at + 1), relations), below(key.at(3 * at + 2), 40)]
        })
        .filter(|[source, _, target]| source != target)
        .collect();
    let line = |[source, relation, target]: &[u64; 3]| match relations {
        1 => format!("{source}{separator}{target}\n"),
        _ => format!("n{source}{separator}r{relation}{separator}n{target}\n"),
    };
    edges.iter().map(line).collect()
}

#[test]
fn an_edge_that_was_held_out_is_true_both_ways_where_reverses_were_added() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("edges.csv"), lines(1, ",").concat()).unwrap();
    for remove_duplicates in [false, true] {
        let request = Request {
            format: "csv".into(),
            edges: Some(at("edges.csv")),
            add_reverse: true,
            remove_duplicates,
            hold_out: Some("valid:10%,test:20%".parse().unwrap()),
            ..Request::default()
        };
        let dataset = at(&format!("dataset-{remove_duplicates}"));
        import_to(&request, &dataset);
        check_reverses(&dataset, &at(&format!("run-{remove_duplicates}")));
    }
    // A split that came with the edges, of which no duplicates are removed.
    fs::create_dir(at("triples")).unwrap();
    let lines = lines(2, "\t");
    let third = |skip: usize| lines.iter().skip(skip).step_by(3).cloned().collect::<String>();
    for (at_line, name) in ["train", "valid", "test"].into_iter().enumerate() {
        fs::write(at("triples").join(format!("{name}.txt")), third(at_line)).unwrap();
    }
    let from = Some(at("triples"));
    let request = Request { format: "triples".into(), from, add_reverse: true, ..Request::default() };
    import_to(&request, &at("dataset-triples"));
    check_reverses(&at("dataset-triples"), &at("run-triples"));
}

#[test]
fn many_drawn_candidates_rank_as_all_nodes_do_on_average() {
    let facts = Facts::new();
    let config = RunConfig { epochs: 2, ..facts.config() };
    train(&config, &facts.path("run"));
    let check = |out: &Path, nodes: u64, candidates: u32, tolerance: f64| {
        let of = |candidates| {
            ranks_of(out, SplitName::Test, RankConfig { candidates, ..RankConfig::default() }).all
        };
        let (all, found) = (of(None), of(Some(candidates)));
        assert_eq!(found.ranks, all.ranks);
        // Each draw is above the answer with the probability that a node is.
        let expected = (all.mr - 1.0) * candidates as f64 / nodes as f64;
        let share = (found.mr - 1.0) / expected;
        assert!((share - 1.0).abs() < tolerance, "{candidates} candidates: {} {expected}", found.mr);
    };
    // All queries of a side are ranked at a time, or some of them.
    check(&facts.path("run"), crate::facts::NODES, 10, 0.1);
    check(&facts.path("run"), crate::facts::NODES, 4000, 0.02);
    // Not even the candidates of one query are listed at once.
    fs::write(facts.path("edges.csv"), lines(1, ",").concat()).unwrap();
    let (edges, hold_out) = (Some(facts.path("edges.csv")), Some("valid:2,test:3".parse().unwrap()));
    import_to(&Request { format: "csv".into(), edges, hold_out, ..Request::default() }, &facts.path("few"));
    let nodes = Dataset::open(&facts.path("few")).unwrap().manifest().nodes.count;
    train(&RunConfig { epochs: 1, ..config_of(&facts.path("few")) }, &facts.path("few-run"));
    check(&facts.path("few-run"), nodes, 300_000, 0.02);
}

#[test]
fn scores_that_are_not_numbers_are_refused() {
    let facts = Facts::new();
    let mut config = RunConfig { epochs: 1, batch: 10_000, lr: 1e30, ..facts.config() };
    config.embeddings.as_mut().unwrap().lr = 1e30;
    // The only step has a finite loss, and leaves rows whose scores are infinity minus infinity.
    let trainer = Trainer::create(CpuBackend::new(), config, &facts.path("run")).unwrap();
    let Err(error) = trainer.run(&mut Unwatched) else { panic!("it is evaluated") };
    assert!(error.to_string().contains("score of an edge is NaN"), "{error}");
}

#[test]
fn scores_of_sources_that_are_not_numbers_are_refused() {
    let facts = Facts::new();
    let out = facts.path("run");
    train(&RunConfig { epochs: 1, ..facts.config() }, &out);
    // Inverse relations are asked for sources only.
    let path = out.join("best.safetensors");
    let mut best = Checkpoint::read(&path).unwrap();
    let rows = best.model.iter_mut().find(|named| named.name == "relations").unwrap();
    let half = rows.values.len() / 2;
    rows.values[half..].fill(f32::NAN);
    best.write(&path).unwrap();
    let mut run = load(&out, None, RunControl::default(), RankConfig::default());
    let Err(error) = rank_run(&mut run, SplitName::Test, EvaluationMode::Full) else {
        panic!("it is ranked")
    };
    assert!(error.to_string().contains("score of an edge is NaN"), "{error}");
}

#[test]
fn a_stop_ends_representations_from_sampled_neighbourhoods() {
    let facts = Facts::new();
    let model = ModelConfig { kind: Kind::Sage, layers: 1, hidden: 16, ..ModelConfig::default() };
    let (fanout, eval_fanout) = (vec![Fanout::AtMost(3)], vec![Fanout::AtMost(3)]);
    let config = RunConfig { model, fanout, eval_fanout, epochs: 1, ..facts.config() };
    let out = facts.path("run");
    train(&config, &out);
    let stop = StopSignal::default();
    let control = RunControl { stop: stop.clone(), ..RunControl::default() };
    let mode = EvaluationMode::Sampled;
    let mut run = load(&out, Some(mode), control, RankConfig::default());
    let scored = [edge(0, 1, 0)];
    let scores = |run: &mut OpenRun<CpuBackend>| {
        with_link_model::<_, _, TrainError>(run, mode, |model| model.scores(&scored))
    };
    assert_eq!(scores(&mut run).unwrap().len(), 1);
    stop.ask();
    assert!(matches!(scores(&mut run), Err(TrainError::Stopped)));
}

#[test]
fn only_what_a_split_is_ranked_with_is_read() {
    let directory = tempfile::tempdir().unwrap();
    // How often all edges are read for the true ones among them.
    let passes = |name: &str, ranks: RankConfig| {
        let progress = Arc::new(Recorded::default());
        let control = RunControl { progress: progress.clone(), ..RunControl::default() };
        let mut run = load(&directory.path().join(name), None, control, ranks);
        // What is found is kept for the second time.
        for _ in 0..2 {
            rank_run(&mut run, SplitName::Test, EvaluationMode::Full).unwrap().unwrap();
        }
        progress.stages().iter().filter(|stage| stage.name == "find true edges").count()
    };
    let raw = |ranks| RankConfig { raw: true, ..ranks };
    with_ties(&ogbl(directory.path(), "edge"), directory.path(), 1, DecoderKind::Dot);
    // Shared negatives are what edges are ranked among, and compared with.
    assert_eq!(passes("run-1", RankConfig::default()), 0);
    let drawn = RankConfig { candidates: Some(3), ..RankConfig::default() };
    assert_eq!(passes("run-1", drawn), passes("run-1", raw(drawn)) + 1);
    // Edges that have their own negatives are compared with pairs that are not edges.
    with_ties(&ogbl(directory.path(), "fact"), directory.path(), 2, DecoderKind::DistMult);
    let own = passes("run-2", RankConfig::default());
    assert!(own > 0 && own == passes("run-2", raw(RankConfig::default())));
}

/// The losses of the first steps of a run, of which only so many batches are left if a number is given.
fn first_losses(config: &RunConfig, scratch: &Path, count: usize, end_after: Option<u64>) -> Vec<(u64, f64)> {
    let mut run = OpenRun::new(CpuBackend::new(), config.clone(), scratch.to_path_buf()).unwrap();
    run.leave_out_evaluation();
    end_after.into_iter().for_each(|batches| run.end_after(batches));
    let from = RunPosition { phase: Phase::Train { epoch: 0 }, batch: 0 };
    let mut source = run.source(from, None).unwrap();
    let step = |_| {
        let batch = source.next().unwrap().unwrap();
        let (step, feedback) = run.step(batch).unwrap();
        source.apply(feedback).unwrap();
        let done = step.wait().unwrap();
        (done.nodes, done.loss.unwrap())
    };
    (0..count).map(step).collect()
}

#[test]
fn the_first_batches_of_a_run_leave_their_edges_out_as_all_do() {
    let facts = Facts::new();
    let model = ModelConfig { kind: Kind::Sage, layers: 1, hidden: 16, ..ModelConfig::default() };
    let (fanout, eval_fanout) = (vec![Fanout::All], vec![Fanout::All]);
    let config = RunConfig { model, fanout, eval_fanout, ..facts.config() };
    let of = |config: &RunConfig, end_after| first_losses(config, &facts.path("scratch"), 3, end_after);
    assert_eq!(of(&config, Some(3)), of(&config, None));
    let mut kept = config.clone();
    kept.link.as_mut().unwrap().target_edges = TargetEdges::Keep;
    assert_ne!(of(&kept, None), of(&config, None));
}

#[test]
fn masks_leave_out_candidates_and_nothing_else() {
    let facts = Facts::new();
    for negatives in [NegativeCount::Shared { uniform: 40, by_degree: 10, chunks: 4 }, NegativeCount::All] {
        let [none, batch, graph] =
            [NegativeMask::None, NegativeMask::Batch, NegativeMask::Graph].map(|mask| {
                let mut config = facts.config();
                let link = config.link.as_mut().unwrap();
                (link.mask, link.negatives) = (mask, negatives);
                first_losses(&config, &facts.path("scratch"), 1, None)[0]
            });
        // The nodes are the same, and a sum over fewer candidates is smaller.
        assert!(none.0 == batch.0 && batch.0 == graph.0, "{none:?} {batch:?} {graph:?}");
        assert!(none.1 > batch.1 && batch.1 > graph.1, "{none:?} {batch:?} {graph:?}");
    }
}

/// The penalty of a row: the sum of squares, or of the cubes of absolute values; of moduli where numbers are complex.
fn naive_penalty(name: PenaltyName, complex: bool, row: &[f32]) -> f64 {
    let squares: Vec<f64> = row.iter().map(|x| *x as f64 * *x as f64).collect();
    match (name, complex) {
        (PenaltyName::L2, _) => squares.iter().sum(),
        (PenaltyName::N3, false) => squares.iter().map(|square| square.powf(1.5)).sum(),
        (PenaltyName::N3, true) => {
            let (re, im) = squares.split_at(squares.len() / 2);
            re.iter().zip(im).map(|(re, im)| (re + im).powf(1.5)).sum()
        }
    }
}

#[test]
fn every_decoder_has_every_penalty() {
    let facts = Facts::new();
    let mut edges = Vec::new();
    for_each_edge(&Dataset::open(&facts.path("g")).unwrap(), &mut |edge| edges.push(edge)).unwrap();
    let norm = DistanceNorm::L1;
    let decoders = [
        DecoderKind::Dot,
        DecoderKind::DistMult,
        DecoderKind::TransE { norm },
        DecoderKind::ComplEx,
        DecoderKind::RotatE { phase_scale: 1.5 },
    ];
    // Rows are penalised as they are stored, whatever is dropped from them.
    for (decoder, dropout) in decoders.into_iter().flat_map(|decoder| [(decoder, 0.0), (decoder, 0.5)]) {
        let complex = matches!(decoder, DecoderKind::ComplEx | DecoderKind::RotatE { .. });
        for name in [PenaltyName::L2, PenaltyName::N3] {
            // 18 columns are 9 complex numbers.
            let mut config = RunConfig { batch: 10_000, epochs: 1, ..facts.config() };
            config.embeddings.as_mut().unwrap().columns = 18;
            let link = config.link.as_mut().unwrap();
            (link.decoder, link.columns, link.relation_dropout) = (decoder, 18, dropout);
            config.model.input_dropout = dropout;
            let without = first_losses(&config, &facts.path("scratch"), 1, None)[0].1;
            config.link.as_mut().unwrap().penalty = Some(PenaltyConfig { kind: name, weight: 0.5 });
            let with = first_losses(&config, &facts.path("scratch"), 1, None)[0].1;
            let rows = |stream: u64, count: usize, columns: usize| {
                let mut values = vec![0.0; count * columns];
                let (key, init) =
                    (Key::new(config.seed).with(stream), config.embeddings.as_ref().unwrap().init);
                initial_rows(key, init, 0, columns, &mut values);
                values.chunks(columns).map(<[f32]>::to_vec).collect::<Vec<_>>()
            };
            let nodes = rows(6, crate::facts::NODES as usize, 18);
            // Relations, then their inverses.
            let relations = 2 * crate::facts::RELATIONS as usize;
            let relations = match decoder {
                DecoderKind::Dot => vec![Vec::new(); relations],
                DecoderKind::DistMult => vec![vec![1.0; 18]; relations],
                DecoderKind::RotatE { .. } => rows(2, relations, 9),
                _ => rows(2, relations, 18),
            };
            let of_relation = |relation: usize| match (name, decoder) {
                // A rotation has modulus 1.
                (PenaltyName::N3, DecoderKind::RotatE { .. }) => 0.0,
                _ => naive_penalty(name, complex, &relations[relation]),
            };
            let of = |edge: &Edge| {
                let ends =
                    [edge.source, edge.target].map(|node| naive_penalty(name, complex, &nodes[node.index()]));
                let inverse = edge.relation as usize + crate::facts::RELATIONS as usize;
                2.0 * (ends[0] + ends[1]) + of_relation(edge.relation as usize) + of_relation(inverse)
            };
            let expected = 0.5 * edges.iter().map(of).sum::<f64>();
            let found = with - without;
            assert!(
                (found / expected - 1.0).abs() < 1e-4,
                "{decoder:?} {name:?} {dropout}: {found} {expected}"
            );
        }
    }
}

/// Rows of all nodes after one step of SGD over all edges.
fn rows_after_a_step(config: &RunConfig, out: &Path) -> Vec<f32> {
    train(config, out);
    let mut run = load(out, None, RunControl::default(), RankConfig::default());
    let mut rows = Vec::new();
    with_link_model::<_, _, TrainError>(&mut run, EvaluationMode::Full, |model| {
        model.each_node(&mut |_, values| {
            rows.extend_from_slice(values);
            Ok(())
        })
    })
    .unwrap();
    rows
}

#[test]
fn penalties_pull_at_numbers_that_were_dropped() {
    let facts = Facts::new();
    let mut degrees = vec![0.0f32; crate::facts::NODES as usize];
    for_each_edge(&Dataset::open(&facts.path("g")).unwrap(), &mut |edge| {
        [edge.source, edge.target].into_iter().for_each(|node| degrees[node.index()] += 1.0);
    })
    .unwrap();
    let mut config = RunConfig { batch: 10_000, epochs: 1, ..facts.config() };
    config.model.input_dropout = 0.5;
    let embeddings = config.embeddings.as_mut().unwrap();
    embeddings.optimizer.kind = OptimizerKind::Sgd;
    embeddings.lr = 0.01;
    let mut before = vec![0.0; degrees.len() * 16];
    initial_rows(Key::new(config.seed).with(6), embeddings.init, 0, 16, &mut before);
    let without = rows_after_a_step(&config, &facts.path("without"));
    config.link.as_mut().unwrap().penalty = Some(PenaltyConfig { kind: PenaltyName::L2, weight: 0.1 });
    let with = rows_after_a_step(&config, &facts.path("with"));
    for (at, ((with, without), before)) in with.iter().zip(&without).zip(&before).enumerate() {
        // Each edge has two queries, and the gradient of x^2 is 2x.
        let expected = -0.01 * 0.1 * 2.0 * degrees[at / 16] * 2.0 * before;
        assert!((with - without - expected).abs() < 1e-5, "{at}: {} {expected}", with - without);
    }
}

#[test]
fn a_run_that_has_begun_needs_its_file_of_initial_rows_no_more() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = ogbl(directory.path(), "fact");
    let out = with_ties(&dataset, directory.path(), 5, DecoderKind::DistMult);
    let (edges, _) = held_out(&dataset, SplitName::Test);
    let before = (scores_of(&out, &edges), ranks_of(&out, SplitName::Test, RankConfig::default()));
    let (_, config) = RunDirectory::open(&out).unwrap();
    fs::remove_file(directory.path().join("rows-5.npy")).unwrap();
    let after = (scores_of(&out, &edges), ranks_of(&out, SplitName::Test, RankConfig::default()));
    assert_eq!(before, after);
    let resumed = Trainer::resume(CpuBackend::new(), config.clone(), &out).unwrap();
    assert!(matches!(resumed.run(&mut Unwatched).unwrap(), Outcome::Finished(_)));
    // A new run needs it, and so does its plan.
    let Err(error) = Trainer::create(CpuBackend::new(), config.clone(), &directory.path().join("new")) else {
        panic!("it trains")
    };
    assert!(error.to_string().contains("rows-5.npy"), "{error}");
    assert!(OpenRun::plan_only(&CpuBackend::new(), &config).is_err());
}

#[test]
fn a_memory_without_room_for_the_true_edges_is_refused_before_they_are_found() {
    let facts = Facts::new();
    let mut config = facts.config();
    config.link.as_mut().unwrap().negatives = NegativeCount::All;
    // Enough for the topology, and too little for what masks need beside it.
    config.memory = 120_000;
    let Err(error) = Trainer::create(CpuBackend::new(), config, &facts.path("run")) else {
        panic!("it trains")
    };
    let TrainError::Memory { table, .. } = &error else { panic!("{error}") };
    assert!(table.lines.iter().any(|line| line.what == "true edges of every query"), "{table:?}");
}
