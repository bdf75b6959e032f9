//! What training promises: the same bits for any number of threads and after a restart, hooks between layers, errors
//! instead of panics, and no more memory than was said.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod common;

use common::{Batch, configs, matrix};
use esker_nn::*;
use esker_types::random::{Key, below};

const INPUT: usize = 20;
const OUTPUT: usize = 7;

struct Job {
    model: Model<CpuBackend>,
    optimizer: Optimizer<CpuBackend>,
    batch: Batch,
    labels: Vec<u32>,
    rows: Vec<u32>,
}

impl Job {
    fn new(config: &ModelConfig, rows: &[usize]) -> Job {
        let backend = CpuBackend::new();
        let model = Model::new(&backend, config, INPUT, OUTPUT, 3).unwrap();
        let optimizer = OptimizerConfig { clip_norm: Some(1.0), ..OptimizerConfig::default() };
        let optimizer = Optimizer::new(&model, &optimizer).unwrap();
        let targets = rows[rows.len() - 1] as u64;
        let pick = |seed: u64, bound: u64| -> Vec<u32> {
            (0..targets + 5).map(|index| below(Key::new(seed).at(index), bound) as u32).collect()
        };
        let (labels, seeds) = (pick(1, OUTPUT as u64), pick(2, targets));
        Job { model, optimizer, batch: Batch::new(rows, 8, 4), labels, rows: seeds }
    }

    fn step(&mut self, step: u64) -> f64 {
        let backend = self.model.backend().clone();
        let input = matrix(&backend, self.batch.rows[0], INPUT, 6);
        let graphs = self.batch.graphs(&backend);
        let activations = self.model.forward(&graphs, &input, step);
        let labels = Labels::Classes(&self.labels);
        let (loss, gradient) = self.model.loss(activations.logits(), &self.rows, labels).unwrap();
        self.model.backward(&graphs, &input, activations, gradient, false);
        self.optimizer.step(&mut self.model, 0.01).unwrap();
        loss.wait().unwrap()
    }

    fn bits(&self) -> Vec<u32> {
        self.model.export().iter().flat_map(|named| named.values.iter().map(|x| x.to_bits())).collect()
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    for config in configs() {
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut job = Job::new(&config, &[9000, 5000, 700]);
                let losses: Vec<u64> = (0..2).map(|step| job.step(step).to_bits()).collect();
                (losses, job.bits())
            })
        };
        let one = run(1);
        assert!(run(2) == one && run(4) == one, "{config:?}");
    }
}

#[test]
fn a_restarted_run_equals_an_uninterrupted_one() {
    for config in configs() {
        let mut whole = Job::new(&config, &[300, 120, 40]);
        let mut first = Job::new(&config, &[300, 120, 40]);
        (0..2).for_each(|step| assert_eq!(whole.step(step), first.step(step)));
        let (steps, state) = first.optimizer.export(&first.model);
        let mut second = Job::new(&config, &[300, 120, 40]);
        second.model.load(&first.model.export()).unwrap();
        second.optimizer.load(&second.model, steps, &state).unwrap();
        (2..4).for_each(|step| assert_eq!(whole.step(step), second.step(step), "{config:?}"));
        assert_eq!(whole.bits(), second.bits());
    }
}

#[test]
fn masks_belong_to_their_step() {
    let mut job = Job::new(&configs()[0], &[300, 120, 40]);
    let backend = job.model.backend().clone();
    let (graphs, input) = (job.batch.graphs(&backend), matrix(&backend, 300, INPUT, 6));
    let mut at = |step: u64| job.model.forward(&graphs, &input, step).logits().values().to_vec();
    assert_eq!(at(5), at(5));
    assert_ne!(at(5), at(6));
}

#[test]
fn rows_between_layers_can_be_replaced_and_their_gradients_cut_off() {
    for config in configs().into_iter().filter(|config| config.norm == NormKind::None) {
        let mut job = Job::new(&config, &[300, 120, 40]);
        let backend = job.model.backend().clone();
        let (graphs, input) = (job.batch.graphs(&backend), matrix(&backend, 300, INPUT, 6));
        let history = matrix(&backend, 2, 8, 9);
        let mut layer0 = job.model.forward_layer(0, &graphs[0], &input, 0);
        backend.scatter_rows(Some(&history), &[7, 90], &mut layer0.output);
        let mut read = backend.matrix(1, 8);
        backend.gather_rows(&layer0.output, &[90], &mut read);
        assert_eq!(read.values(), history.row(1));
        let layer1 = job.model.forward_layer(1, &graphs[1], &layer0.output, 0);
        let (_, gradient) = job.model.loss(&layer1.output, &job.rows, Labels::Classes(&job.labels)).unwrap();
        let mut hidden =
            job.model.backward_layer(1, &graphs[1], &layer0.output, layer1, gradient, true).unwrap();
        assert!(hidden.values().iter().any(|x| *x != 0.0));
        // All rows from history: nothing may reach the first layer.
        let all: Vec<u32> = (0..120).collect();
        backend.scatter_rows(None, &all, &mut hidden);
        assert!(job.model.backward_layer(0, &graphs[0], &input, layer0, hidden, false).is_none());
        let first = job.model.parameters().into_iter().filter(|p| p.name.starts_with("layers.0."));
        assert!(first.flat_map(|p| p.gradient.values()).all(|x| *x == 0.0), "{config:?}");
    }
}

#[test]
fn no_more_memory_is_held_than_was_said() {
    let rows = [9000, 5000, 700];
    for config in configs() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        pool.install(|| {
            let mut job = Job::new(&config, &rows);
            let edges = (0..2).map(|layer| job.batch.lists(layer).edge_count()).collect();
            let shape = StepShape {
                rows: rows.to_vec(),
                edges,
                seeds: job.rows.len(),
                degrees: true,
                input_gradient: false,
                pulled: Vec::new(),
                pushed: Vec::new(),
                memory: MemoryOf::Host { threads: 2 },
            };
            let said = memory_bytes(&config, &OptimizerConfig::default(), INPUT, OUTPUT, &shape).unwrap();
            let said = said.model + said.optimizer + said.step;
            // Without room to keep freed matrices, then with a quarter.
            job.model.backend().set_reuse_bytes(0);
            job.step(0);
            let held = job.model.backend().peak_bytes();
            assert!(held <= said && said < held * 3 / 2, "{config:?}: said {said}, held {held}");
            job.model.backend().set_reuse_bytes(said / 4);
            for step in 1..3 {
                job.step(step);
            }
            let held = job.model.backend().peak_bytes();
            assert!(held <= said + said / 4, "{config:?}: said {said} and a quarter, held {held}");
            let before = job.model.backend().counters().allocated_bytes;
            job.step(3);
            let made = job.model.backend().counters().allocated_bytes - before;
            // Sizes that are in use at different times may not all find room to wait for the next step.
            assert!(
                made < held / 10,
                "{config:?}: a warm step made {made} bytes of buffers, {held} are held"
            );
        });
    }
}

#[test]
fn steps_that_exchange_rows_hold_no_more_than_was_said() {
    let rows = [9000, 5000, 700];
    let exchanged = ExchangedRows { layer: 1, rows: 3000 };
    for config in configs() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        pool.install(|| {
            let mut job = Job::new(&config, &rows);
            let backend = job.model.backend().clone();
            backend.set_reuse_bytes(0);
            let edges = (0..2).map(|layer| job.batch.lists(layer).edge_count()).collect();
            let shape = StepShape {
                rows: rows.to_vec(),
                edges,
                seeds: job.rows.len(),
                degrees: true,
                input_gradient: true,
                pulled: vec![exchanged],
                pushed: vec![exchanged],
                memory: MemoryOf::Host { threads: 2 },
            };
            let said = memory_bytes(&config, &OptimizerConfig::default(), INPUT, OUTPUT, &shape).unwrap();
            let (graphs, input) = (job.batch.graphs(&backend), matrix(&backend, 9000, INPUT, 6));
            let some: Vec<u32> = (0..3000).collect();
            let mut pushed = Vec::new();
            let activations = job.model.forward_with(&graphs, &input, 0, &[1], |layer, hidden| {
                assert_eq!(layer, 1);
                let mut copy = backend.matrix(3000, hidden.columns());
                backend.gather_rows(hidden, &some, &mut copy);
                let pulled = backend.matrix(3000, hidden.columns());
                backend.scatter_rows(Some(&pulled), &some, hidden);
                pushed.push(copy);
            });
            let labels = Labels::Classes(&job.labels);
            let (_, gradient) = job.model.loss(activations.logits(), &job.rows, labels).unwrap();
            let found = job.model.backward(&graphs, &input, activations, gradient, true);
            assert!(found.is_some() && pushed.len() == 1);
            let (said, held) = (said.model + said.optimizer + said.step, backend.peak_bytes());
            assert!(held <= said && said < held * 3 / 2, "{config:?}: said {said}, held {held}");
        });
    }
}

#[test]
fn inference_holds_no_more_than_was_said_and_agrees_with_a_step_without_dropout() {
    for config in configs().into_iter().filter(|config| config.norm != NormKind::Batch) {
        let config =
            ModelConfig { dropout: 0.0, attention_dropout: 0.0, projected_dropout: 0.0, layers: 1, ..config };
        let rows = [900, 500];
        let backend = CpuBackend::new();
        backend.set_reuse_bytes(0);
        let mut model = Model::new(&backend, &config, INPUT, OUTPUT, 3).unwrap();
        let batch = Batch::new(&rows, 8, 4);
        let said = {
            let edges = vec![batch.lists(0).edge_count()];
            let threads = rayon::current_num_threads();
            let shape = StepShape {
                rows: rows.to_vec(),
                edges,
                seeds: 1,
                degrees: true,
                input_gradient: false,
                pulled: Vec::new(),
                pushed: Vec::new(),
                memory: MemoryOf::Host { threads },
            };
            memory_bytes(&config, &OptimizerConfig::default(), INPUT, OUTPUT, &shape).unwrap()
        };
        let (graphs, input) = (batch.graphs(&backend), matrix(&backend, 900, INPUT, 6));
        let inferred = model.infer_layer(0, &graphs[0], &input);
        assert!(backend.peak_bytes() <= said.model + said.inference, "{config:?}");
        let trained = model.forward(&graphs, &input, 0);
        assert!(trained.logits().values() == model.infer(&graphs, &input).values(), "{config:?}");
        // A layer over a whole graph normalises by whole-graph degrees and has every neighbour, whatever training sees.
        let sampled = config.kind == Kind::Gcn && config.gcn_degree != Degree::Whole;
        assert_eq!(trained.logits().values() == inferred.values(), !sampled, "{config:?}");
    }
}

#[test]
fn numbers_that_are_none_are_errors() {
    let mut job = Job::new(&configs()[0], &[300, 120, 40]);
    let backend = job.model.backend().clone();
    let (graphs, mut input) = (job.batch.graphs(&backend), matrix(&backend, 300, INPUT, 6));
    input.values_mut().fill(f32::NAN);
    let activations = job.model.forward(&graphs, &input, 0);
    let error = job.model.loss(activations.logits(), &job.rows, Labels::Classes(&job.labels)).err().unwrap();
    assert!(matches!(error, NnError::Device(DeviceError::NotFinite { .. })), "{error}");
    let mut logits = backend.matrix(2, 3);
    backend.fill(&mut logits, 0.0);
    let error = job.model.loss(&logits, &[1], Labels::Classes(&[3])).err().unwrap();
    assert_eq!(error, NnError::Label { row: 1, found: 3, last: 2 });
}

#[test]
fn nonsense_is_refused_with_a_remedy() {
    let backend = CpuBackend::new();
    let base = ModelConfig::default();
    for (config, remedy) in [
        (ModelConfig { layers: 0, ..base.clone() }, "at least 1"),
        (ModelConfig { hidden: 0, ..base.clone() }, "at least 1"),
        (ModelConfig { dropout: 1.0, ..base.clone() }, "below 1"),
        (ModelConfig { kind: Kind::Gat, heads: 0, ..base.clone() }, "at least 1"),
        (ModelConfig { kind: Kind::Gat, heads: 3, ..base.clone() }, "hidden = 258"),
    ] {
        let error = Model::new(&backend, &config, INPUT, OUTPUT, 0).err().unwrap().to_string();
        assert!(error.contains(remedy), "{error}");
    }
    let model = Model::new(&backend, &base, INPUT, OUTPUT, 0).unwrap();
    let momentum = OptimizerConfig { momentum: 2.0, ..OptimizerConfig::default() };
    assert!(Optimizer::new(&model, &momentum).is_err());
    let mut other = Model::new(&backend, &ModelConfig { hidden: 8, ..base }, INPUT, OUTPUT, 0).unwrap();
    let error = other.load(&model.export()).unwrap_err().to_string();
    assert!(error.contains("layers.0.neighbours.weight: expected 8 x 20 numbers, found 256 x 20"), "{error}");
}

#[test]
fn a_batch_without_edges_or_outputs_is_a_batch() {
    for config in configs() {
        let backend = CpuBackend::new();
        let mut model = Model::new(&backend, &ModelConfig { layers: 1, ..config }, INPUT, OUTPUT, 0).unwrap();
        for outputs in [0, 2] {
            let batch = Batch::new(&[4, outputs], 0, 1);
            let (graphs, input) = (batch.graphs(&backend), matrix(&backend, 4, INPUT, 1));
            let activations = model.forward(&graphs, &input, 0);
            let gradient = matrix(&backend, outputs, OUTPUT, 2);
            let back = model.backward(&graphs, &input, activations, gradient, true).unwrap();
            assert!(back.values().iter().all(|x| x.is_finite()));
        }
    }
}

/// Input dropout against the definition: each input number times its factor, whatever the pool's buffers held before.
#[test]
fn dropped_inputs_are_what_the_mask_says() {
    for config in configs().into_iter().filter(|config| config.norm != NormKind::Batch) {
        let config =
            ModelConfig { dropout: 0.0, attention_dropout: 0.0, layers: 1, input_dropout: 0.4, ..config };
        let (batch, step) = (Batch::new(&[900, 500], 8, 4), 7);
        let backend = CpuBackend::new();
        let mut model = Model::new(&backend, &config, INPUT, OUTPUT, 3).unwrap();
        let (graphs, input) = (batch.graphs(&backend), matrix(&backend, 900, INPUT, 6));
        // Buffers that others have used.
        (0..3).for_each(|_| backend.fill(&mut backend.matrix(900, INPUT), 1e9));
        let found = model.forward(&graphs, &input, step).logits().values().to_vec();
        let key = Key::new(3).with(1).with(step).with(1);
        let dropout = Dropout::new(0.4, key).unwrap();
        let mut dropped = backend.matrix(900, INPUT);
        for (at, (to, from)) in dropped.values_mut().iter_mut().zip(input.values()).enumerate() {
            *to = from * dropout.factor(at / INPUT, at % INPUT, INPUT);
        }
        let zeros = dropped.values().iter().filter(|value| **value == 0.0).count() as f64;
        assert!((zeros / (900 * INPUT) as f64 - 0.4).abs() < 0.03, "{zeros}");
        let plain = ModelConfig { input_dropout: 0.0, ..config.clone() };
        let mut twin = Model::new(&backend, &plain, INPUT, OUTPUT, 3).unwrap();
        assert!(found == twin.forward(&graphs, &dropped, step).logits().values(), "{config:?}");
    }
}
