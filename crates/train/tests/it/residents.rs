//! Orders over partitions, and training that sees resident nodes only: with all partitions resident it is training on
//! the whole graph, to the bit; with fewer it can be stopped, and does not depend on threads.

use crate::common::{Bench, StopAfter, batch_lines, finished};
use crate::facts::Facts;
use esker_nn::{CpuBackend, Degree, Kind, ModelConfig};
use esker_plan::partition_orders::{PartitionCounts, PartitionOrderKind};
use esker_sample::{Fanout, Form};
use esker_strategies::StrategyKind;
use esker_train::link::NegativeCount;
use esker_train::{
    HistoryConfig, OpenRun, OrderName, Outcome, ResidentOnly, RunConfig, Summary, TrainError, Trainer,
    training_partitions,
};
use std::path::Path;

fn train(config: &RunConfig, out: &Path) -> Summary {
    let trainer = Trainer::create(CpuBackend::new(), config.clone(), out).unwrap();
    finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap())
}

/// A run in steps over partitions.
fn over(config: RunConfig, order: OrderName, (partitions, resident, logical): (u32, u32, u32)) -> RunConfig {
    let partition_counts = Some(PartitionCounts { partitions, resident, logical });
    RunConfig { order, partition_counts, ..config }
}

fn seen(config: &RunConfig, resident_only: ResidentOnly) -> RunConfig {
    RunConfig { resident_only: Some(resident_only), ..config.clone() }
}

/// Links with an encoder, and negatives of both kinds.
fn links(facts: &Facts, kind: Option<Kind>) -> RunConfig {
    let mut config = RunConfig { epochs: 2, ..facts.config() };
    config.link.as_mut().unwrap().negatives = NegativeCount::Shared { uniform: 5, by_degree: 3, chunks: 3 };
    if let Some(kind) = kind {
        config.model = ModelConfig {
            kind,
            layers: 1,
            hidden: 16,
            heads: 2,
            gcn_degree: Degree::Unbiased,
            ..ModelConfig::default()
        };
        (config.fanout, config.eval_fanout) = (vec![Fanout::AtMost(4)], vec![Fanout::AtMost(4)]);
    }
    config
}

#[test]
fn with_all_partitions_resident_links_train_as_with_the_whole_graph() {
    let facts = Facts::new();
    for (at, kind) in [None, Some(Kind::Sage), Some(Kind::Gcn), Some(Kind::Gat)].into_iter().enumerate() {
        let order = [OrderName::Beta, OrderName::TwoLevelBeta, OrderName::Tour, OrderName::TwoLevelBeta][at];
        let whole = over(links(&facts, kind), order, (8, 8, 1));
        let expected = train(&whole, &facts.path(&format!("whole-{at}")));
        for threads in [1, 2, 4] {
            for only in [ResidentOnly::All, ResidentOnly::Negatives] {
                let found = RunConfig { threads, ..seen(&whole, only) };
                let found = train(&found, &facts.path(&format!("{at}-{threads}-{only:?}")));
                assert_eq!(found.loss_digest, expected.loss_digest, "{kind:?} {threads} {only:?}");
                assert_eq!(found.test, expected.test);
            }
        }
    }
}

#[test]
fn with_all_partitions_resident_labels_train_as_with_the_whole_graph() {
    let bench = Bench::new();
    let models = [(Kind::Sage, Form::Dense), (Kind::Gcn, Form::Layered), (Kind::Gat, Form::Shadow)];
    for (at, (kind, form)) in models.into_iter().enumerate() {
        let order = [OrderName::Dispersed, OrderName::TrainingFirst, OrderName::Dispersed][at];
        let config = RunConfig { epochs: 2, form, ..bench.config() };
        let whole = over(config, order, (6, 6, 1));
        let whole = RunConfig { model: ModelConfig { kind, heads: 2, ..whole.model.clone() }, ..whole };
        let expected = train(&whole, &bench.path(&format!("whole-{at}")));
        for threads in [1, 2, 4] {
            let found = RunConfig { threads, ..seen(&whole, ResidentOnly::All) };
            let found = train(&found, &bench.path(&format!("{at}-{threads}")));
            assert_eq!(found.loss_digest, expected.loss_digest, "{kind:?} {threads}");
            assert_eq!(found.test, expected.test);
        }
    }
}

/// The same losses on any number of threads, and after stops.
fn check_repeats(config: &RunConfig, path: &dyn Fn(&str) -> std::path::PathBuf) -> Summary {
    let config = RunConfig { checkpoint_batches: 5, ..config.clone() };
    let whole = train(&config, &path("one"));
    for threads in [1, 4] {
        let other = RunConfig { threads, ..config.clone() };
        assert_eq!(train(&other, &path(&format!("threads-{threads}"))).loss_digest, whole.loss_digest);
    }
    let out = path("parts");
    let mut trainer = Trainer::create(CpuBackend::new(), config.clone(), &out).unwrap();
    let summary = loop {
        match trainer.run(&mut StopAfter(7)).unwrap() {
            Outcome::Finished(summary) => break summary,
            Outcome::Stopped(_) => {
                trainer = Trainer::resume(CpuBackend::new(), config.clone(), &out).unwrap();
            }
        }
    };
    assert_eq!(summary.loss_digest, whole.loss_digest);
    assert_eq!((&summary.test, batch_lines(&out)), (&whole.test, batch_lines(&path("one"))));
    whole
}

#[test]
fn links_in_steps_are_the_same_however_they_are_computed() {
    let facts = Facts::new();
    let orders = [
        (OrderName::Beta, (8, 3, 8), None),
        (OrderName::TwoLevelBeta, (16, 4, 8), Some(Kind::Sage)),
        (OrderName::Tour, (20, 8, 5), Some(Kind::Gat)),
    ];
    for (order, counts, kind) in orders {
        let config = over(links(&facts, kind), order, counts);
        let path = |name: &str| facts.path(&format!("{order:?}-{name}"));
        let found = check_repeats(&seen(&config, ResidentOnly::All), &path);
        let digest = |config: &RunConfig, name: &str| train(config, &path(name)).loss_digest;
        // Each part of what is seen changes training.
        let alone = digest(&config, "alone");
        let negatives = digest(&seen(&config, ResidentOnly::Negatives), "negatives");
        let shuffled = digest(&RunConfig { order: OrderName::Shuffled, ..config }, "shuffled");
        assert!(alone != shuffled && negatives != alone);
        // Without layers, negatives are all that a batch sees.
        assert_eq!(negatives == found.loss_digest, kind.is_none());
        let steps = found.partition_steps.unwrap();
        let expected = match order {
            OrderName::Beta => (15, 14),
            OrderName::TwoLevelBeta => (28, 27 * 2),
            _ => (10, 9 * 4),
        };
        assert_eq!((steps.steps, steps.swaps), expected);
        assert!(steps.bias.is_some_and(|bias| bias > 0.2 && bias <= 1.0));
    }
}

#[test]
fn labels_in_steps_are_the_same_however_they_are_computed() {
    let bench = Bench::new();
    for (order, counts) in [(OrderName::Dispersed, (12, 4, 6)), (OrderName::TrainingFirst, (12, 4, 12))] {
        let config = over(bench.config(), order, counts);
        let path = |name: &str| bench.path(&format!("{order:?}-{name}"));
        let found = check_repeats(&seen(&config, ResidentOnly::All), &path);
        assert_ne!(train(&config, &path("alone")).loss_digest, found.loss_digest);
        let steps = found.partition_steps.unwrap();
        let expected = if order == OrderName::Dispersed { (5, 8) } else { (1, 0) };
        assert_eq!((steps.steps, steps.swaps, steps.bias), (expected.0, expected.1, None));
        // An order is a property of the job: a strategy on disk trains alike.
        let disk = RunConfig { strategy: StrategyKind::Ginex, ..config.clone() };
        assert_eq!(train(&disk, &path("disk")).loss_digest, train(&config, &path("memory")).loss_digest);
    }
}

#[test]
fn the_smallest_memory_is_enough_and_a_byte_less_is_not() {
    let facts = Facts::new();
    let config = over(links(&facts, Some(Kind::Sage)), OrderName::TwoLevelBeta, (16, 4, 8));
    let config = seen(&config, ResidentOnly::All);
    let plan = OpenRun::plan_only(&CpuBackend::new(), &config).unwrap();
    let lines: Vec<&str> = plan.table.lines.iter().map(|line| &line.what[..]).collect();
    assert!(
        lines.contains(&"subgraphs of resident nodes") && lines.contains(&"order over partitions"),
        "{lines:?}"
    );
    train(&RunConfig { memory: plan.smallest_bytes, ..config.clone() }, &facts.path("smallest"));
    let less = RunConfig { memory: plan.smallest_bytes - 1, ..config };
    let Err(error) = Trainer::create(CpuBackend::new(), less, &facts.path("less")) else {
        panic!("it trains")
    };
    assert!(matches!(error, TrainError::Memory { .. }), "{error}");
}

#[test]
fn what_cannot_be_trained_is_refused_by_name() {
    let (facts, bench) = (Facts::new(), Bench::new());
    let refused = |config: RunConfig, words: &[&str]| {
        let Err(error) = Trainer::create(CpuBackend::new(), config, &facts.path("refused")) else {
            panic!("it trains: {words:?}")
        };
        let said = error.to_string();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        assert!(!facts.path("refused").exists());
    };
    let link = || links(&facts, None);
    let steps = |order, counts| over(link(), order, counts);
    refused(RunConfig { order: OrderName::Tour, ..link() }, &["order tour", "--partitions"]);
    refused(seen(&link(), ResidentOnly::All), &["--resident-only", "--order"]);
    refused(steps(OrderName::Tour, (32, 8, 8)), &["odd number", "found 8"]);
    refused(steps(OrderName::TwoLevelBeta, (32, 6, 8)), &["--resident", "multiple of 4"]);
    refused(steps(OrderName::TwoLevelBeta, (32, 8, 64)), &["64 logical partitions of 32"]);
    refused(
        steps(OrderName::Beta, (100_000, 1000, 100_000)),
        &["100000 node partitions", &format!("{}", crate::facts::NODES)],
    );
    refused(steps(OrderName::Dispersed, (8, 4, 4)), &["dispersed", "task is links", "two-level-beta"]);
    refused(over(bench.config(), OrderName::Tour, (9, 2, 9)), &["tour", "task is node labels", "dispersed"]);
    // A fifth of the nodes trains: 2.4 of 12 partitions.
    refused(
        over(bench.config(), OrderName::TrainingFirst, (12, 3, 12)),
        &["fill 3 partitions", "3 are resident"],
    );
    let all = steps(OrderName::TwoLevelBeta, (16, 4, 8));
    let mut every = seen(&all, ResidentOnly::All);
    every.link.as_mut().unwrap().negatives = NegativeCount::All;
    refused(every, &["every node is a negative", "--negatives"]);
    let labels = over(bench.config(), OrderName::Dispersed, (12, 4, 3));
    refused(seen(&labels, ResidentOnly::Negatives), &["negatives is for links"]);
    let disk = RunConfig { strategy: StrategyKind::Ginex, ..seen(&labels, ResidentOnly::All) };
    refused(disk, &["ginex", "--strategy memory"]);
    let history = RunConfig { history: Some(HistoryConfig::new(100)), ..seen(&labels, ResidentOnly::All) };
    refused(history, &["history"]);
}

#[test]
fn counts_that_are_not_given_follow_the_paper() {
    let of = |kind, partitions, resident| PartitionCounts::of(kind, partitions, resident, None);
    let two_level = of(PartitionOrderKind::TwoLevelBeta, 32, 8);
    assert_eq!((two_level.logical, two_level.logical_resident()), (8, 2));
    let bench = Bench::new();
    let dataset = esker_store::Dataset::open(&bench.path("g")).unwrap();
    assert_eq!([1, 4, 12].map(|partitions| training_partitions(&dataset, partitions)), [1, 1, 3]);
}
