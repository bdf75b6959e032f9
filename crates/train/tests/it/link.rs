//! Link prediction: what is learned, that it is the same to the bit however it is computed, and that ranks are those of
//! a naive oracle.

use crate::common::{StopAfter, batch_lines, finished};
use crate::facts::{Facts, NODES, result};
use esker_nn::{CpuBackend, DecoderKind, Degree, Kind, ModelConfig, RowInit, Schedule, initial_rows};
use esker_sample::{Edge, Fanout};
use esker_store::Dataset;
use esker_train::link::{
    EdgeWeights, LinkTask, NegativeCount, PenaltyConfig, PenaltyName, RankConfig, SplitRanks, Ties,
    with_link_model,
};
use esker_train::{
    EmbeddingConfig, EvaluationMode, InputRows, OpenRun, Outcome, RunConfig, RunDirectory, SplitName,
    Summary, TrainError, Trainer, rank_run,
};
use esker_types::NodeId;
use esker_types::random::Key;
use std::collections::BTreeSet;
use std::path::Path;

fn train(config: &RunConfig, out: &Path) -> Summary {
    let trainer = Trainer::create(CpuBackend::new(), config.clone(), out).unwrap();
    finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap())
}

fn ranks_of(config: &RunConfig, out: &Path, set: impl FnOnce(&mut RankConfig)) -> SplitRanks {
    let (run, mut stored) = RunDirectory::open(out).unwrap();
    set(&mut stored.link.as_mut().unwrap().ranks);
    let stored = RunConfig { threads: config.threads, ..stored };
    let mut run = OpenRun::load(CpuBackend::new(), &run, stored.to_infer(None)).unwrap();
    rank_run(&mut run, SplitName::Test, EvaluationMode::Full).unwrap().unwrap()
}

#[test]
fn edges_of_a_plan_are_learned() {
    let facts = Facts::new();
    let mut config = RunConfig { epochs: 12, ..facts.config() };
    // DistMult would score an edge and its reverse alike.
    config.link.as_mut().unwrap().decoder = DecoderKind::ComplEx;
    let summary = train(&config, &facts.path("run"));
    let test = summary.test.unwrap();
    let ranks = test.ranks.unwrap();
    // The 20 nodes of a group are alike, but for those of known edges: a perfect model has an MRR of about 0.2.
    assert!(ranks.mrr > 0.12 && ranks.mr < 25.0, "{ranks:?}");
    assert!(test.auc.unwrap() > 0.9 && test.ap.unwrap() > 0.9, "{test:?}");
    let losses: Vec<f64> = summary.epochs.iter().map(|epoch| epoch.loss).collect();
    assert!(losses.last().unwrap() < &(losses[0] * 0.7), "{losses:?}");
    // `summary.json` has the names that a program asks for.
    let text = std::fs::read_to_string(facts.path("run").join("summary.json")).unwrap();
    let written: serde_json::Value = serde_json::from_str(&text).unwrap();
    for name in ["mrr", "mr", "hits@1", "hits@3", "hits@10"] {
        assert!(written["test"][name].as_f64().is_some(), "{name}: {}", written["test"]);
    }
    assert!(written["test"].get("loss").is_none());
    assert_eq!(written["test"]["mrr"].as_f64().unwrap().to_bits(), ranks.mrr.to_bits());
}

#[test]
fn threads_and_candidate_blocks_do_not_change_a_bit() {
    let facts = Facts::new();
    let with = |threads: usize, block: Option<u32>, name: &str| {
        let mut config = RunConfig { threads, ..facts.config() };
        config.link.as_mut().unwrap().ranks.block = block;
        let out = facts.path(name);
        result(&train(&config, &out), &out)
    };
    let expected = with(1, None, "one");
    for (at, (threads, block)) in
        [(2, None), (4, Some(1)), (2, Some(7)), (1, Some(100))].into_iter().enumerate()
    {
        assert!(
            with(threads, block, &format!("other{at}")) == expected,
            "{threads} threads, block {block:?}"
        );
    }
}

#[test]
fn a_run_that_is_stopped_goes_on_to_the_bit() {
    let facts = Facts::new();
    for penalty in [None, Some(PenaltyConfig { kind: PenaltyName::N3, weight: 1e-3 })] {
        let mut config = RunConfig { epochs: 2, checkpoint_batches: 5, ..facts.config() };
        config.model.input_dropout = 0.2;
        let link = config.link.as_mut().unwrap();
        (link.penalty, link.relation_dropout) = (penalty, 0.3);
        if penalty.is_some() {
            (link.edge_weights, link.source_negatives) = (EdgeWeights::Subsampling, Some([7, 2]));
        }
        let name = if penalty.is_some() { "with" } else { "without" };
        let whole = facts.path(&format!("whole-{name}"));
        let expected = result(&train(&config, &whole), &whole);
        let out = facts.path(&format!("parts-{name}"));
        let mut trainer = Trainer::create(CpuBackend::new(), config.clone(), &out).unwrap();
        let summary = loop {
            match trainer.run(&mut StopAfter(7)).unwrap() {
                Outcome::Finished(summary) => break summary,
                Outcome::Stopped(_) => {
                    trainer = Trainer::resume(CpuBackend::new(), config.clone(), &out).unwrap();
                }
            }
        };
        assert_eq!(batch_lines(&out), batch_lines(&whole));
        let found = result(&summary, &out);
        assert!((found.0, found.1, found.2) == (expected.0, expected.1, expected.2));
    }
}

/// Ranks one by one: every candidate's score is looked up, and those that are true edges are left out.
fn naive_ranks(run: &Path, ties: Ties, raw: bool) -> Vec<f64> {
    let (directory, config) = RunDirectory::open(run).unwrap();
    let dataset = Dataset::open(&config.dataset).unwrap();
    let task = LinkTask::load(&dataset).unwrap();
    let mut known: BTreeSet<Edge> = task.valid.iter().chain(task.test.iter()).copied().collect();
    known.extend(training_edges(&dataset));
    let mut run = OpenRun::load(CpuBackend::new(), &directory, config.to_infer(None)).unwrap();
    with_link_model::<_, _, TrainError>(&mut run, EvaluationMode::Full, |model| {
        let mut ranks = Vec::new();
        for edge in task.test.iter() {
            for replace_target in [true, false] {
                let candidate = |node: u64| match replace_target {
                    true => Edge { target: NodeId(node), ..*edge },
                    false => Edge { source: NodeId(node), ..*edge },
                };
                let all: Vec<Edge> = (0..task.nodes).map(candidate).collect();
                // Without inverse relations, an edge has one score from either end.
                let scores = model.scores(&all)?;
                let own = all.iter().position(|candidate| candidate == edge).unwrap();
                let (mut greater, mut equal) = (0, 0);
                for (at, score) in scores.iter().enumerate() {
                    if at == own || !raw && known.contains(&all[at]) {
                        continue;
                    }
                    greater += u64::from(*score > scores[own]);
                    equal += u64::from(*score == scores[own]);
                }
                ranks.push(ties.rank(greater, equal));
            }
        }
        Ok(ranks)
    })
    .unwrap()
}

fn training_edges(dataset: &Dataset) -> Vec<Edge> {
    use esker_sample::{AnyTopology, Direction, EdgeLookup};
    let AnyTopology::Narrow(graph) = AnyTopology::load(dataset, Direction::Incoming, u64::MAX).unwrap()
    else {
        unreachable!("a small graph")
    };
    let ids: Vec<_> = (0..graph.edge_count()).map(esker_types::EdgeId).collect();
    let mut edges = Vec::new();
    graph.edges_by_id(&ids, &mut edges).unwrap();
    edges
}

#[test]
fn ranks_are_those_of_a_naive_oracle() {
    let facts = Facts::new();
    let mut config = RunConfig { epochs: 2, ..facts.config() };
    config.link.as_mut().unwrap().inverse = false;
    let out = facts.path("run");
    let summary = train(&config, &out);
    for (ties, raw) in [(Ties::Realistic, false), (Ties::Optimistic, true), (Ties::Pessimistic, false)] {
        let found = ranks_of(&config, &out, |ranks| (ranks.ties, ranks.raw) = (ties, raw));
        let naive = naive_ranks(&out, ties, raw);
        let mrr = naive.iter().map(|rank| 1.0 / rank).sum::<f64>() / naive.len() as f64;
        let mr = naive.iter().sum::<f64>() / naive.len() as f64;
        assert!((found.all.mrr - mrr).abs() < 1e-9, "{ties:?} {raw}: {} {mrr}", found.all.mrr);
        assert!((found.all.mr - mr).abs() < 1e-9);
        // Both sides together are all of them, and so are all relations.
        let (source, target) = (found.source.unwrap(), found.target.unwrap());
        assert!(((source.mrr + target.mrr) / 2.0 - found.all.mrr).abs() < 1e-12);
        let of_relations: u64 = found.relations.iter().map(|relation| relation.metrics.ranks).sum();
        assert_eq!(of_relations, found.all.ranks);
    }
    // Evaluated again, the same comes out as at the end of training.
    let again = ranks_of(&config, &out, |_| {});
    assert_eq!(again.all, summary.test.unwrap().ranks.unwrap());
}

#[test]
fn rows_that_no_batch_reads_stay_as_they_began() {
    let facts = Facts::new();
    let mut config = RunConfig { epochs: 1, ..facts.config() };
    // Few negatives: some nodes are in no batch that was stopped after.
    config.link.as_mut().unwrap().negatives = NegativeCount::Shared { uniform: 3, by_degree: 0, chunks: 1 };
    config.batch = 20;
    let rows = |out: &Path, batches: u64| {
        let trainer = Trainer::create(CpuBackend::new(), config.clone(), out).unwrap();
        assert!(matches!(trainer.run(&mut StopAfter(batches)).unwrap(), Outcome::Stopped(_)));
        let state = RunDirectory::open(out).unwrap().0.state_path();
        let file = std::fs::read_dir(state).unwrap().map(|file| file.unwrap().path());
        let file = file.into_iter().find(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.contains("embeddings") && !name.contains("squares") && !name.contains("steps")
        });
        let bytes = std::fs::read(file.unwrap()).unwrap();
        bytes[bytes.len() - NODES as usize * 64..].to_vec()
    };
    let (first, second) = (rows(&facts.path("a"), 1), rows(&facts.path("b"), 2));
    let changed = first.chunks(64).zip(second.chunks(64)).filter(|(a, b)| a != b).count();
    // Both ends of 20 edges and 6 negatives at most.
    assert!(changed > 0 && changed <= 46, "{changed}");
}

#[test]
fn encoders_are_trained_over_embeddings() {
    let facts = Facts::new();
    for kind in [Kind::Sage, Kind::Gcn, Kind::Gat] {
        let model = ModelConfig {
            kind,
            layers: 1,
            hidden: 16,
            heads: 2,
            gcn_degree: Degree::Sampled,
            ..ModelConfig::default()
        };
        let mut config = RunConfig {
            model,
            fanout: vec![Fanout::All],
            eval_fanout: vec![Fanout::All],
            epochs: 8,
            ..facts.config()
        };
        config.link.as_mut().unwrap().decoder = DecoderKind::ComplEx;
        let name = format!("{kind:?}");
        let full = train(&config, &facts.path(&name));
        let losses: Vec<f64> = full.epochs.iter().map(|epoch| epoch.loss).collect();
        assert!(losses[7] < losses[0] * 0.95, "{kind:?} {losses:?}");
        let ranks = full.test.unwrap().ranks.unwrap();
        println!("{kind:?} {ranks:?} {losses:?}");
        // A random order has a mean rank of about 120.
        assert!(ranks.mr < 70.0, "{kind:?} {ranks:?}");
        // With all neighbours sampled, representations are the same but for the order of sums.
        if kind != Kind::Gcn {
            let sampled =
                RunConfig { eval: EvaluationMode::Sampled, final_eval: EvaluationMode::Sampled, ..config };
            let sampled = train(&sampled, &facts.path(&format!("{name}-sampled")));
            assert_eq!(sampled.loss_digest, full.loss_digest);
            let other = sampled.test.unwrap().ranks.unwrap();
            assert!((other.mrr - ranks.mrr).abs() < 1e-3, "{kind:?} {} {}", other.mrr, ranks.mrr);
        }
    }
}

#[test]
fn what_links_cannot_be_trained_with_is_refused_by_name() {
    let facts = Facts::new();
    let refused = |set: &dyn Fn(&mut RunConfig), words: &[&str]| {
        let mut config = facts.config();
        set(&mut config);
        let Err(error) = Trainer::create(CpuBackend::new(), config, &facts.path("refused")) else {
            panic!("it trains: {words:?}")
        };
        let said = error.to_string();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        assert!(!facts.path("refused").exists());
    };
    refused(&|config| config.embeddings.as_mut().unwrap().columns = 0, &["--embeddings"]);
    refused(
        &|config| {
            let link = config.link.as_mut().unwrap();
            (link.decoder, link.columns) = (DecoderKind::ComplEx, 15);
            config.embeddings.as_mut().unwrap().columns = 15;
        },
        &["complex", "15", "16"],
    );
    refused(&|config| config.embeddings.as_mut().unwrap().columns = 20, &["16", "20"]);
    refused(&|config| config.embeddings = None, &["--embeddings"]);
    refused(&|config| config.strategy = esker_strategies::StrategyKind::Ginex, &["ginex", "memory"]);
    refused(&|config| config.metric = esker_train::MetricName::Accuracy, &["accuracy", "mrr"]);
    refused(
        &|config| {
            config.link = None;
            config.model = ModelConfig { layers: 1, ..ModelConfig::default() };
            config.fanout = vec![Fanout::All];
            config.eval_fanout = vec![Fanout::All];
        },
        &["--task link"],
    );
    refused(&|config| config.memory = 1 << 20, &["memory"]);
}

#[test]
fn the_smallest_memory_is_enough_and_a_byte_less_is_not() {
    let facts = Facts::new();
    let config = RunConfig { epochs: 1, ..facts.config() };
    let plan = OpenRun::plan_only(&CpuBackend::new(), &config).unwrap();
    let lines: Vec<&str> = plan.table.lines.iter().map(|line| &line.what[..]).collect();
    for name in ["embeddings", "optimizer of embeddings", "evaluation: representations of nodes"] {
        assert!(lines.contains(&name), "{lines:?}");
    }
    let smallest = RunConfig { memory: plan.smallest_bytes, ..config.clone() };
    train(&smallest, &facts.path("smallest"));
    let less = RunConfig { memory: plan.smallest_bytes - 1, ..config };
    let Err(error) = Trainer::create(CpuBackend::new(), less, &facts.path("less")) else {
        panic!("it trains")
    };
    assert!(matches!(error, TrainError::Memory { .. }), "{error}");
}

#[test]
fn nodes_without_features_are_classified_by_embeddings() {
    let bench = crate::common::Bench::new();
    for inputs in [InputRows::Embeddings, InputRows::Concatenated, InputRows::Summed] {
        let plain = bench.config();
        let embeddings = EmbeddingConfig {
            columns: 8,
            inputs,
            optimizer: plain.optimizer.clone(),
            lr: 0.01,
            init: esker_nn::RowInit::Normal { deviation: 0.1 },
            init_file: None,
        };
        let config = RunConfig { embeddings: Some(embeddings), epochs: 2, ..plain };
        let name = format!("{inputs:?}");
        let summary = train(&config, &bench.path(&name));
        assert!(summary.epochs[1].loss < summary.epochs[0].loss, "{inputs:?}");
        // Stopped and resumed, with full evaluation too, everything is the same.
        let full = RunConfig { eval: EvaluationMode::Full, final_eval: EvaluationMode::Full, ..config };
        let whole = bench.path(&format!("{name}-whole"));
        let expected = train(&full, &whole);
        assert_eq!(expected.loss_digest, summary.loss_digest);
        let out = bench.path(&format!("{name}-parts"));
        let mut trainer = Trainer::create(CpuBackend::new(), full.clone(), &out).unwrap();
        let found = loop {
            match trainer.run(&mut StopAfter(4)).unwrap() {
                Outcome::Finished(summary) => break summary,
                Outcome::Stopped(_) => {
                    trainer = Trainer::resume(CpuBackend::new(), full.clone(), &out).unwrap();
                }
            }
        };
        assert_eq!((found.loss_digest, found.test), (expected.loss_digest, expected.test), "{inputs:?}");
    }
}

#[test]
fn the_learning_rate_falls_on_a_plateau_and_a_resumed_run_knows() {
    let facts = Facts::new();
    // After the first evaluation without a better model the rate is next to nothing.
    let schedule = Schedule::Plateau { factor: 1e-9, patience: 0 };
    let config = RunConfig { schedule, lr: 1.0, epochs: 25, checkpoint_batches: 9, ..facts.config() };
    let whole = facts.path("whole");
    let summary = train(&config, &whole);
    let found: Vec<f64> =
        summary.epochs.iter().map(|epoch| epoch.valid.unwrap().ranks.unwrap().mrr).collect();
    let last = found.windows(2).position(|pair| pair[1] <= pair[0]).expect("a plateau within all epochs") + 1;
    assert!(last + 2 < found.len(), "{found:?}");
    assert!(found[last..].iter().all(|mrr| (mrr - found[last]).abs() < 1e-6), "{found:?}");
    let out = facts.path("parts");
    let mut trainer = Trainer::create(CpuBackend::new(), config.clone(), &out).unwrap();
    let again = loop {
        match trainer.run(&mut StopAfter(100)).unwrap() {
            Outcome::Finished(summary) => break summary,
            Outcome::Stopped(_) => {
                trainer = Trainer::resume(CpuBackend::new(), config.clone(), &out).unwrap();
            }
        }
    };
    assert_eq!((again.loss_digest, again.test), (summary.loss_digest, summary.test));
}

#[test]
fn embeddings_begin_with_the_rows_of_a_file() {
    let facts = Facts::new();
    let config = RunConfig { epochs: 1, ..facts.config() };
    let rows = config.embeddings.clone().unwrap();
    let mut values = vec![0.0f32; NODES as usize * rows.columns];
    // As a run without a file begins.
    initial_rows(Key::new(config.seed).with(6), rows.init, 0, rows.columns, &mut values);
    let file = |name: &str, rows: u64| {
        let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, 16), }}");
        let header = format!("{header:<117}\n");
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(values[..rows as usize * 16].iter().flat_map(|value| value.to_le_bytes()));
        std::fs::write(facts.path(name), bytes).unwrap();
        RunConfig {
            embeddings: Some(EmbeddingConfig {
                init: RowInit::Normal { deviation: 7.0 },
                init_file: Some(facts.path(name)),
                ..config.embeddings.clone().unwrap()
            }),
            ..config.clone()
        }
    };
    let expected = train(&config, &facts.path("drawn")).loss_digest;
    assert_eq!(train(&file("rows.npy", NODES), &facts.path("given")).loss_digest, expected);
    let Err(error) = Trainer::create(CpuBackend::new(), file("few.npy", NODES - 1), &facts.path("few"))
    else {
        panic!("it trains")
    };
    let said = error.to_string();
    assert!(said.contains("few.npy") && said.contains("239 rows of 16"), "{said}");
}
