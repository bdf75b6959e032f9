//! Random settings: a partition buffer has the losses, metrics and weights of the same residents in memory, to the bit.

use crate::common::{Bench, StopAfter, batch_lines, finished, write_npy};
use crate::facts::{Facts, config_of};
use esker_import::{ImportJob, Request, import};
use esker_nn::{CpuBackend, DecoderKind, Kind, ModelConfig, RowInit};
use esker_plan::partition_orders::PartitionCounts;
use esker_sample::{Direction, Fanout, Form};
use esker_strategies::StrategyKind;
use esker_train::{
    Checkpoint, EmbeddingConfig, EvaluationMode, InputRows, OrderName, ResidentOnly, RunConfig, Trainer,
};
use esker_types::random::{Key, below};
use esker_types::{Budget, Silent};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trained {
    /// Labels of nodes, over features or with embeddings too.
    Labels,
    /// Typed links, over embeddings alone.
    Facts,
    /// Links with an encoder, and features.
    Links,
}

/// The settings of a run.
#[derive(Debug, Clone)]
struct Case {
    trained: Trained,
    order: usize,
    /// Partitions of a logical one, logical partitions, and those of them that are resident.
    sizes: (u32, u32, u32),
    lag: u64,
    columns: usize,
    threads: usize,
    kind: Kind,
    form: Form,
    both: bool,
    inputs: Option<InputRows>,
    drop_last: bool,
    batch: u64,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    use proptest::option::of;
    use proptest::sample::select;
    let trained = select(vec![Trained::Labels, Trained::Facts, Trained::Links]);
    let sizes = (1u32..4, 1u32..7, 0u32..6);
    let run = (select(vec![1u64, 2, 3, 7, 16]), select(vec![2usize, 6, 16]), select(vec![1usize, 2, 4]));
    let kind = select(vec![Kind::Sage, Kind::Gcn, Kind::Gat]);
    let form = select(vec![Form::Dense, Form::Layered, Form::Shadow]);
    let inputs = of(select(vec![InputRows::Embeddings, InputRows::Concatenated, InputRows::Summed]));
    let model = (kind, form, any::<bool>(), inputs);
    let batches = (any::<bool>(), select(vec![17u64, 60, 150]), 0u64..1000);
    (trained, 0usize..3, sizes, run, model, batches).prop_map(
        |(
            trained,
            order,
            sizes,
            (lag, columns, threads),
            (kind, form, both, inputs),
            (drop, batch, seed),
        )| {
            let drop_last = drop;
            Case {
                trained,
                order,
                sizes,
                lag,
                columns,
                threads,
                kind,
                form,
                both,
                inputs,
                drop_last,
                batch,
                seed,
            }
        },
    )
}

impl Case {
    /// The order, and sizes that it takes.
    fn order(&self) -> (OrderName, PartitionCounts) {
        let (each, logical, resident) = self.sizes;
        let counts = |each: u32, logical: u32, resident: u32| PartitionCounts {
            partitions: each * logical,
            resident: each * resident,
            logical,
        };
        match (self.trained, self.order) {
            (Trained::Labels, 0 | 1) => (OrderName::Dispersed, counts(each, logical, 1 + resident % logical)),
            (Trained::Labels, _) => {
                let logical = 4 + logical;
                (OrderName::TrainingFirst, counts(1, logical, 2 + resident % (logical - 2)))
            }
            (_, 0) => (OrderName::Beta, counts(1, logical + 3, 2 + resident % 3)),
            (_, 1) => (OrderName::TwoLevelBeta, counts(each, logical + 2, 2 + resident % 2)),
            _ => (OrderName::Tour, counts(each, [3, 5, 7][logical as usize % 3], 2)),
        }
    }

    fn config(&self, data: &Data) -> RunConfig {
        let base = match self.trained {
            Trained::Labels => self.labels(data),
            Trained::Facts => self.facts(data),
            Trained::Links => self.links(data),
        };
        let (order, counts) = self.order();
        // Inference layer by layer has no induced subgraphs.
        let is_shadow = base.form == Form::Shadow;
        let of = |mode: EvaluationMode| if is_shadow { EvaluationMode::Sampled } else { mode };
        RunConfig {
            eval: of(base.eval),
            final_eval: of(base.final_eval),
            order,
            partition_counts: Some(counts),
            resident_only: Some(ResidentOnly::All),
            lag: base.embeddings.is_some().then_some(self.lag),
            threads: self.threads,
            drop_last: self.drop_last,
            batch: self.batch,
            seed: self.seed,
            epochs: 2,
            ..base
        }
    }

    fn rows(&self, inputs: InputRows) -> EmbeddingConfig {
        let optimizer = adagrad();
        let init = RowInit::Normal { deviation: 0.1 };
        EmbeddingConfig { columns: self.columns, inputs, optimizer, lr: 0.05, init, init_file: None }
    }

    fn with_encoder(&self, base: RunConfig, layers: usize) -> RunConfig {
        let model = ModelConfig { kind: self.kind, layers, hidden: 16, heads: 2, ..base.model.clone() };
        let fanout = vec![Fanout::AtMost(3); layers];
        let direction = if self.both { Direction::Both } else { Direction::Incoming };
        RunConfig { model, eval_fanout: fanout.clone(), fanout, direction, form: self.form, ..base }
    }

    fn labels(&self, data: &Data) -> RunConfig {
        let base = self.with_encoder(data.labels.config(), 2);
        RunConfig { embeddings: self.inputs.map(|inputs| self.rows(inputs)), ..base }
    }

    fn facts(&self, data: &Data) -> RunConfig {
        let mut config = data.facts.config();
        config.link.as_mut().unwrap().columns = self.columns;
        config.embeddings = Some(self.rows(InputRows::Embeddings));
        config
    }

    fn links(&self, data: &Data) -> RunConfig {
        let mut config = self.with_encoder(config_of(&data.links), 1);
        let link = config.link.as_mut().unwrap();
        (link.decoder, link.inverse, link.columns) = (DecoderKind::Dot, false, 16);
        config.embeddings = self.inputs.map(|inputs| self.rows(inputs));
        (config.eval, config.final_eval) = (EvaluationMode::Sampled, EvaluationMode::Full);
        config
    }
}

fn adagrad() -> esker_nn::OptimizerConfig {
    esker_nn::OptimizerConfig { kind: esker_nn::OptimizerKind::Adagrad, ..Default::default() }
}

/// A graph for each task.
struct Data {
    labels: Bench,
    facts: Facts,
    links: PathBuf,
    runs: AtomicU64,
}

impl Data {
    fn new() -> Data {
        let labels = Bench::new();
        let links = linked(&labels);
        Data { labels, facts: Facts::new(), links, runs: AtomicU64::new(0) }
    }

    fn out(&self) -> PathBuf {
        self.labels.path(&format!("run-{}", self.runs.fetch_add(1, Ordering::Relaxed)))
    }
}

/// A graph with features, some of whose edges are held out.
fn linked(bench: &Bench) -> PathBuf {
    let (nodes, key) = (150, Key::new(3));
    let edges: Vec<i64> = (0..2 * 1500).map(|at| below(key.at(at), nodes) as i64).collect();
    let features: Vec<u8> =
        (0..nodes * 5).flat_map(|at| ((at * 37 % 11) as f32 / 11.0).to_le_bytes()).collect();
    let edges: Vec<u8> = edges.into_iter().flat_map(i64::to_le_bytes).collect();
    let request = Request {
        format: "npy".into(),
        edges: Some(write_npy(&bench.path("links.npy"), "<i8", "(2, 1500)", &edges)),
        features: Some(write_npy(&bench.path("links-features.npy"), "<f4", "(150, 5)", &features)),
        hold_out: Some("valid:5%,test:10%".parse().unwrap()),
        out_neighbours: true,
        ..Request::default()
    };
    let (target, budget) = (bench.path("links"), Budget { host_bytes: 64 << 20 });
    import(&request, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent }).unwrap();
    target
}

/// What must not depend on where rows are; an error as its text.
fn trained(config: &RunConfig, out: &Path) -> Result<(Vec<String>, String, String), String> {
    let trainer =
        Trainer::create(CpuBackend::new(), config.clone(), out).map_err(|error| error.to_string())?;
    let summary = finished(trainer.run(&mut StopAfter(u64::MAX)).map_err(|error| error.to_string())?);
    let weights = Checkpoint::read(&out.join("last.safetensors")).unwrap().model;
    let metrics = format!("{} {:?} {:?}", summary.loss_digest, summary.valid, summary.test);
    let found = (batch_lines(out), metrics, format!("{weights:?}"));
    std::fs::remove_dir_all(out).unwrap();
    Ok(found)
}

#[test]
fn a_buffer_trains_as_memory_with_the_same_residents() {
    let (data, ran, refused) = (Data::new(), AtomicU64::new(0), Mutex::new(Vec::new()));
    // Always the same settings: how many of them are possible must not depend on chance.
    let rng_seed = RngSeed::Fixed(8);
    let config = Config { cases: 60, failure_persistence: None, rng_seed, ..Config::default() };
    proptest!(config, |(case in cases())| {
        let memory = case.config(&data);
        let buffer =
            RunConfig { strategy: StrategyKind::Marius, resident_only: None, ..memory.clone() };
        match (trained(&memory, &data.out()), trained(&buffer, &data.out())) {
            (Ok(expected), Ok(found)) => {
                prop_assert_eq!(&found.0, &expected.0);
                prop_assert_eq!(&found.1, &expected.1);
                prop_assert!(found.2 == expected.2, "weights differ");
                ran.fetch_add(1, Ordering::Relaxed);
            }
            // Too few links for a whole batch in any step, for one.
            (Err(one), Err(_)) => refused.lock().unwrap().push(one),
            (one, other) => prop_assert!(false, "memory {:?}, buffer {:?}", one.err(), other.err()),
        }
    });
    assert!(ran.into_inner() >= 50, "most settings are possible: {:#?}", refused.into_inner());
}
