//! Memory of a partition buffer: it is planned before anything is sorted, for what steps really have; numbers of
//! partitions that are not given follow from it.

use crate::common::{Bench, StopAfter, finished};
use crate::facts::{Facts, config_of};
use esker_import::ImportJob;
use esker_import::generate::{FactShape, generate_facts};
use esker_nn::CpuBackend;
use esker_plan::partition_orders::PartitionCounts;
use esker_strategies::StrategyKind;
use esker_train::link::NegativeCount;
use esker_train::{
    EvaluationMode, OpenRun, OrderName, RunConfig, RunControl, Summary, TrainError, Trainer, choose_buffer,
};
use esker_types::{Budget, Silent};
use std::path::Path;
use std::time::{Duration, Instant};

fn buffer(
    config: RunConfig,
    order: OrderName,
    (partitions, resident, logical): (u32, u32, u32),
) -> RunConfig {
    let partition_counts = Some(PartitionCounts { partitions, resident, logical });
    RunConfig { strategy: StrategyKind::Marius, order, partition_counts, ..config }
}

fn derived(dataset: &Path) -> Vec<String> {
    let Ok(found) = std::fs::read_dir(dataset.join("derived")) else { return Vec::new() };
    let mut names: Vec<String> =
        found.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn trained(config: &RunConfig, out: &Path) -> Result<Summary, TrainError> {
    let trainer = Trainer::create(CpuBackend::new(), config.clone(), out)?;
    Ok(finished(trainer.run(&mut StopAfter(u64::MAX))?))
}

#[test]
fn memory_is_planned_and_refused_before_anything_is_sorted() {
    let facts = Facts::new();
    let links = RunConfig { epochs: 2, ..facts.config() };
    let bench = Bench::new();
    let labels = RunConfig { epochs: 1, ..bench.config() };
    for (config, path, order, counts) in [
        (links, facts.path("run"), OrderName::Tour, (10, 4, 5)),
        (labels, bench.path("run"), OrderName::Dispersed, (8, 4, 4)),
    ] {
        let config = buffer(config, order, counts);
        let plan = OpenRun::plan_only(&CpuBackend::new(), &config).unwrap();
        assert!(derived(&config.dataset).iter().all(|name| !name.contains("edge-buckets")), "a plan sorts");
        let too_little = RunConfig { memory: plan.smallest_bytes - 1, ..config.clone() };
        let error = trained(&too_little, &path).unwrap_err();
        assert!(matches!(error, TrainError::Memory { .. }), "{error}");
        assert!(derived(&config.dataset).iter().all(|name| !name.contains("edge-buckets")), "{error}");
        let least = RunConfig { memory: plan.smallest_bytes, ..config.clone() };
        let summary = trained(&least, &path).unwrap();
        assert!(derived(&config.dataset).iter().any(|name| name.contains("edge-buckets")));
        assert!(summary.loss_digest.len() > 8);
        // What is sorted is counted by itself: the plan stays the same.
        let again = OpenRun::plan_only(&CpuBackend::new(), &config).unwrap();
        assert_eq!(again.smallest_bytes, plan.smallest_bytes);
    }
}

#[test]
fn numbers_of_partitions_that_cannot_be_are_refused_at_once() {
    let facts = Facts::new();
    let began = Instant::now();
    for (order, counts) in [
        (OrderName::Beta, (100_000, 2, 100_000)),
        (OrderName::TwoLevelBeta, (4_000_000_000, 2, 4_000_000_000)),
        (OrderName::Tour, (99_999, 2, 99_999)),
    ] {
        for strategy in [StrategyKind::Marius, StrategyKind::Memory] {
            let config = RunConfig { strategy, ..buffer(facts.config(), order, counts) };
            let error = trained(&config, &facts.path("no")).unwrap_err().to_string();
            assert!(error.contains(&counts.0.to_string()) && error.contains("240"), "{error}");
        }
    }
    assert!(began.elapsed() < Duration::from_secs(30), "nothing is made for every swap or pair");
}

#[test]
fn layouts_with_as_many_partitions_do_not_replace_each_other() {
    let bench = Bench::new();
    let config = RunConfig { epochs: 1, eval: EvaluationMode::None, ..bench.config() };
    let run = |order, name: &str| {
        trained(
            &buffer(config.clone(), order, (10, 5, if order == OrderName::Dispersed { 2 } else { 10 })),
            &bench.path(name),
        )
        .unwrap()
        .loss_digest
    };
    let (first, dispersed) = (run(OrderName::TrainingFirst, "first"), run(OrderName::Dispersed, "dispersed"));
    let names = derived(&config.dataset);
    for name in ["edge-buckets-10", "edge-buckets-10-training-first", "partition-features-10-training-first"]
    {
        assert!(names.iter().any(|found| found == name), "{names:?}");
    }
    let written = |name: &str| {
        let path = config.dataset.join("derived").join(name).join("edges.bin");
        std::fs::metadata(path).unwrap().modified().unwrap()
    };
    let before = written("edge-buckets-10-training-first");
    assert_eq!(
        (run(OrderName::TrainingFirst, "again"), run(OrderName::Dispersed, "again2")),
        (first, dispersed)
    );
    assert_eq!(written("edge-buckets-10-training-first"), before);
}

/// A knowledge graph whose table is most of a run's memory.
fn large_table(folder: &Path) -> RunConfig {
    let target = folder.join("large");
    let budget = Budget { host_bytes: 64 << 20 };
    let job = ImportJob { target: &target, budget, overwrite: false, progress: &Silent };
    generate_facts(&FactShape { nodes: 20_000, ..FactShape::freebase86m(3e-4) }, &job).unwrap();
    let config = config_of(&target);
    let mut link = config.link.clone().unwrap();
    link.columns = 256;
    link.negatives = NegativeCount::Shared { uniform: 8, by_degree: 0, chunks: 1 };
    let mut embeddings = config.embeddings.clone().unwrap();
    embeddings.columns = 256;
    RunConfig {
        link: Some(link),
        embeddings: Some(embeddings),
        batch: 2000,
        epochs: 1,
        eval: EvaluationMode::None,
        final_eval: EvaluationMode::None,
        strategy: StrategyKind::Marius,
        order: OrderName::Tour,
        // Reads of this size make many partitions of a small graph.
        io_block: Some(4096),
        ..config
    }
}

#[test]
fn numbers_of_partitions_follow_from_memory() {
    let folder = tempfile::tempdir().unwrap();
    let config = large_table(folder.path());
    let chosen = |memory: u64| {
        let mut config = RunConfig { memory, ..config.clone() };
        let choice = choose_buffer(&CpuBackend::new(), &mut config, &RunControl::default())?;
        Ok::<_, TrainError>((config, choice.expect("none were given")))
    };
    // Rows and their state take 41 MB.
    let (all, choice) = chosen(1 << 30).unwrap();
    let counts = all.partition_counts.unwrap();
    assert_eq!(
        (counts, counts.resident),
        (choice.tuning.counts, counts.partitions),
        "{:?}",
        choice.reasons()
    );
    let everything = OpenRun::plan_only(&CpuBackend::new(), &all).unwrap().smallest_bytes;
    let (some, choice) = chosen(everything - (1 << 20)).unwrap();
    let counts = some.partition_counts.unwrap();
    assert!(counts.resident < counts.partitions && counts.logical >= 3, "{:?}", choice.reasons());
    let plan = OpenRun::plan_only(&CpuBackend::new(), &some).unwrap();
    assert!(plan.smallest_bytes < everything - (1 << 20));
    assert!(choice.reasons().len() >= 3 && choice.costs().unwrap().contains("swaps"));
    // The run is possible, and does what was expected.
    let summary = trained(&some, &folder.path().join("run")).unwrap();
    assert!(summary.loss_digest.len() > 8);
    // Given numbers stay, and no numbers help where nothing fits.
    assert!(choose_buffer(&CpuBackend::new(), &mut some.clone(), &RunControl::default()).unwrap().is_none());
    let error = chosen(20 << 20).unwrap_err();
    assert!(error.to_string().contains("--memory"), "{error}");
}
