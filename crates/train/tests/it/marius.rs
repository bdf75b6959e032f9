//! Partitions in a buffer, most of them on disk: the same losses, weights and learned rows as in memory, to the bit,
//! whatever is resident, after interruptions too; what is damaged is named.

use crate::common::{Bench, StopAfter, batch_lines, finished};
use crate::facts::Facts;
use esker_nn::{CpuBackend, Kind, ModelConfig};
use esker_plan::partition_orders::PartitionCounts;
use esker_sample::{Direction, Fanout};
use esker_strategies::StrategyKind;
use esker_train::{
    EvaluationMode, InputRows, OpenRun, OrderName, Outcome, ResidentOnly, RunConfig, RunDirectory, SplitName,
    TrainError, Trainer, rank_run,
};
use std::path::Path;

fn over(config: RunConfig, order: OrderName, (partitions, resident, logical): (u32, u32, u32)) -> RunConfig {
    let partition_counts = Some(PartitionCounts { partitions, resident, logical });
    RunConfig { order, partition_counts, ..config }
}

fn in_buffer(config: &RunConfig) -> RunConfig {
    RunConfig { strategy: StrategyKind::Marius, ..config.clone() }
}

fn seen(config: &RunConfig) -> RunConfig {
    RunConfig { resident_only: Some(ResidentOnly::All), ..config.clone() }
}

fn opened(config: &RunConfig, out: &Path) -> Trainer<CpuBackend> {
    Trainer::create(CpuBackend::new(), config.clone(), out).unwrap()
}

/// What must not depend on where rows are: losses, metrics, weights. Metrics of links are over all rows.
fn trained(config: &RunConfig, out: &Path) -> (Vec<String>, String, Vec<u8>) {
    let summary = finished(opened(config, out).run(&mut StopAfter(u64::MAX)).unwrap());
    result(&summary, out)
}

fn result(summary: &esker_train::Summary, out: &Path) -> (Vec<String>, String, Vec<u8>) {
    let weights = esker_train::Checkpoint::read(&out.join("last.safetensors")).unwrap();
    let weights = format!("{:?}", weights.model).into_bytes();
    (batch_lines(out), format!("{} {:?} {:?}", summary.loss_digest, summary.valid, summary.test), weights)
}

fn links(facts: &Facts) -> RunConfig {
    RunConfig { epochs: 2, ..facts.config() }
}

fn with_encoder(config: RunConfig) -> RunConfig {
    let model = ModelConfig { kind: Kind::Sage, layers: 1, hidden: 16, ..ModelConfig::default() };
    let fanout = vec![Fanout::AtMost(4)];
    RunConfig { model, eval_fanout: fanout.clone(), fanout, ..config }
}

#[test]
fn links_train_to_the_bit_as_in_memory_with_the_same_residents() {
    let facts = Facts::new();
    let cases = [
        (OrderName::TwoLevelBeta, (8, 2, 8), 1, 2),
        (OrderName::Tour, (10, 4, 5), 1, 1),
        (OrderName::Beta, (6, 3, 6), 3, 2),
        (OrderName::TwoLevelBeta, (12, 4, 6), 2, 2),
        (OrderName::Tour, (7, 2, 7), 16, 2),
    ];
    for (at, (order, counts, lag, threads)) in cases.into_iter().enumerate() {
        let config = over(RunConfig { lag: Some(lag), ..links(&facts) }, order, counts);
        let expected = trained(&seen(&config), &facts.path(&format!("memory{at}")));
        let found =
            trained(&in_buffer(&RunConfig { threads, ..config }), &facts.path(&format!("buffer{at}")));
        assert_eq!(found.0, expected.0, "{order:?} {counts:?}, lag {lag}");
        assert!(found == expected, "{order:?} {counts:?}, lag {lag}: {} {}", found.1, expected.1);
    }
}

#[test]
fn with_all_partitions_resident_it_is_training_in_memory() {
    let facts = Facts::new();
    let config = over(links(&facts), OrderName::TwoLevelBeta, (6, 6, 1));
    let expected = trained(&config, &facts.path("memory"));
    assert!(trained(&in_buffer(&config), &facts.path("buffer")) == expected);
}

#[test]
fn encoders_see_the_neighbours_that_are_resident() {
    let facts = Facts::new();
    for (at, direction) in [Direction::Incoming].into_iter().enumerate() {
        let mut config = with_encoder(over(links(&facts), OrderName::Tour, (10, 4, 5)));
        (config.direction, config.eval, config.final_eval) =
            (direction, EvaluationMode::Full, EvaluationMode::Sampled);
        let expected = trained(&seen(&config), &facts.path(&format!("memory{at}")));
        assert!(trained(&in_buffer(&config), &facts.path(&format!("buffer{at}"))) == expected);
    }
}

#[test]
fn labels_train_to_the_bit_as_in_memory_with_the_same_residents() {
    let bench = Bench::new();
    let cases = [
        (OrderName::Dispersed, (8, 2, 4), None),
        (OrderName::Dispersed, (9, 3, 3), Some(InputRows::Concatenated)),
        (OrderName::TrainingFirst, (16, 5, 16), None),
        (OrderName::TrainingFirst, (10, 4, 10), Some(InputRows::Summed)),
        (OrderName::Dispersed, (4, 4, 1), Some(InputRows::Embeddings)),
    ];
    for (at, (order, counts, inputs)) in cases.into_iter().enumerate() {
        let mut config = over(RunConfig { epochs: 2, ..bench.config() }, order, counts);
        if let Some(inputs) = inputs {
            let rows = Facts::new().config().embeddings.unwrap();
            config.embeddings = Some(esker_train::EmbeddingConfig { inputs, ..rows });
        }
        let expected = trained(&seen(&config), &bench.path(&format!("memory{at}")));
        let found = trained(&in_buffer(&config), &bench.path(&format!("buffer{at}")));
        assert!(found == expected, "{order:?} {counts:?} {inputs:?}: {} {}", found.1, expected.1);
    }
}

#[test]
fn a_run_that_is_stopped_goes_on_to_the_bit() {
    let facts = Facts::new();
    for (lag, every) in [(1, 5), (4, 3)] {
        let config = RunConfig { lag: Some(lag), checkpoint_batches: every, epochs: 3, ..links(&facts) };
        let config = in_buffer(&over(config, OrderName::Tour, (10, 4, 5)));
        let expected = trained(&config, &facts.path(&format!("whole{lag}")));
        let out = facts.path(&format!("parts{lag}"));
        let mut trainer = opened(&config, &out);
        let summary = loop {
            match trainer.run(&mut StopAfter(7)).unwrap() {
                Outcome::Finished(summary) => break summary,
                Outcome::Stopped(_) => {
                    trainer = Trainer::resume(CpuBackend::new(), config.clone(), &out).unwrap();
                }
            }
        };
        assert!(result(&summary, &out) == expected, "lag {lag}");
    }
}

/// Bytes of the learned rows' files of a run.
fn table_bytes(out: &Path) -> u64 {
    let state = RunDirectory::open(out).unwrap().0.state_path();
    let files = std::fs::read_dir(state).unwrap().map(|file| file.unwrap());
    let rows = files.filter(|file| file.file_name().to_string_lossy().starts_with("embeddings-"));
    rows.map(|file| file.metadata().unwrap().len()).sum()
}

#[test]
fn a_run_keeps_the_files_of_its_checkpoint_and_of_its_best_model() {
    let facts = Facts::new();
    let config = RunConfig { epochs: 4, checkpoint_batches: 4, ..links(&facts) };
    let config = in_buffer(&over(config, OrderName::Tour, (10, 4, 5)));
    let out = facts.path("run");
    trained(&config, &out);
    // A partition has 24 rows, each with a state of the optimizer.
    let table = 10 * 24 * 16 * 4 * 2;
    assert!((table..=2 * table).contains(&table_bytes(&out)), "{}", table_bytes(&out));
    // The best model can be ranked again, from files alone.
    let (run, stored) = RunDirectory::open(&out).unwrap();
    let summary = run.summary().unwrap().unwrap();
    let mut again = OpenRun::load(CpuBackend::new(), &run, stored.to_infer(None)).unwrap();
    let ranks = rank_run(&mut again, SplitName::Test, EvaluationMode::Full).unwrap().unwrap();
    assert_eq!(ranks.all.mrr.to_bits(), summary.test.unwrap().ranks.unwrap().mrr.to_bits());
}

#[test]
fn a_damaged_partition_and_another_runs_table_are_named() {
    let facts = Facts::new();
    let config = RunConfig { checkpoint_batches: 5, ..links(&facts) };
    let config = in_buffer(&over(config, OrderName::Tour, (10, 4, 5)));
    let out = facts.path("run");
    assert!(matches!(opened(&config, &out).run(&mut StopAfter(12)).unwrap(), Outcome::Stopped(_)));
    let state = RunDirectory::open(&out).unwrap().0.state_path();
    let mut files: Vec<_> = std::fs::read_dir(state).unwrap().map(|file| file.unwrap().path()).collect();
    files.retain(|file| file.file_name().unwrap().to_string_lossy().starts_with("embeddings-"));
    assert!(!files.is_empty());
    for file in &files {
        let mut bytes = std::fs::read(file).unwrap();
        bytes[100] ^= 1;
        std::fs::write(file, bytes).unwrap();
    }
    let run = |config: &RunConfig| {
        let trainer = Trainer::resume(CpuBackend::new(), config.clone(), &out)?;
        trainer.run(&mut StopAfter(u64::MAX)).map(drop)
    };
    let said = run(&config).unwrap_err().to_string();
    assert!(
        said.contains("partition") && said.contains("embeddings-000") && said.contains("checksum"),
        "{said}"
    );
    let other = over(config, OrderName::Tour, (14, 4, 7));
    assert!(run(&other).is_err());
}

#[test]
fn what_it_cannot_do_is_refused() {
    let facts = Facts::new();
    let said = |config: RunConfig| -> String {
        let error: TrainError = Trainer::create(CpuBackend::new(), config, &facts.path("no")).err().unwrap();
        assert!(!facts.path("no").exists());
        error.to_string()
    };
    assert!(said(in_buffer(&links(&facts))).contains("--order"));
    let config = over(links(&facts), OrderName::Tour, (10, 4, 5));
    let negatives = RunConfig { resident_only: Some(ResidentOnly::Negatives), ..config.clone() };
    assert!(said(in_buffer(&negatives)).contains("--resident-only"));
    let little = RunConfig { memory: 1 << 20, ..in_buffer(&config) };
    let text = said(little);
    assert!(text.contains("embeddings of resident partitions") && text.contains("--memory"), "{text}");
}
