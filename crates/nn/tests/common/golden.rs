//! Every layer, loss and optimizer of a backend against PyTorch and PyG (`fixtures/make.py`), relative to the largest number.

use esker_nn::*;
use serde::Deserialize;
use std::collections::HashMap;

#[derive(Deserialize)]
struct Block {
    inputs: usize,
    outputs: usize,
    offsets: Vec<u32>,
    nbrs: Vec<u32>,
    degrees: Vec<u32>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    config: ModelConfig,
    blocks: Vec<Block>,
    optimizer: OptimizerConfig,
    rate: f64,
    labels: Vec<u32>,
    losses: Vec<f64>,
}

#[derive(Deserialize)]
struct Losses {
    rows: Vec<u32>,
    classes: Vec<u32>,
    losses: HashMap<String, f64>,
}

struct Golden {
    tensors: HashMap<String, Vec<f32>>,
    cases: Vec<Case>,
    loss: Losses,
}

/// Tensors and metadata of a safetensors file.
pub fn read(bytes: &[u8]) -> (HashMap<String, Vec<f32>>, HashMap<String, String>) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let data = &bytes[8 + length..];
    let mut tensors = HashMap::new();
    for (name, entry) in header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
        let offset = |index: usize| entry["data_offsets"][index].as_u64().unwrap() as usize;
        let words = data[offset(0)..offset(1)].chunks_exact(4);
        tensors.insert(name.clone(), words.map(|w| f32::from_le_bytes(w.try_into().unwrap())).collect());
    }
    (tensors, serde_json::from_value(header["__metadata__"].clone()).unwrap())
}

fn golden() -> Golden {
    let (tensors, metadata) = read(include_bytes!("../../fixtures/golden.safetensors"));
    let cases = serde_json::from_str(&metadata["cases"]).unwrap();
    Golden { tensors, cases, loss: serde_json::from_str(&metadata["loss"]).unwrap() }
}

fn assert_close(tolerance: f32, what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    // The floor is for gradients that are zero but for rounding: a bias before batch norm.
    let largest = expected.iter().fold(1e-2f32, |largest, x| largest.max(x.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs() / largest;
        assert!(error <= tolerance, "{what}[{index}]: {found} against {expected}, error {error:e}");
    }
}

fn matrix<B: Backend>(backend: &B, rows: usize, values: &[f32]) -> B::Matrix {
    let mut matrix = backend.matrix(rows, values.len() / rows);
    backend.write(&mut matrix, 0, values);
    matrix
}

fn values<B: Backend>(backend: &B, matrix: &B::Matrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows() * matrix.columns()];
    backend.read(matrix, 0, &mut values);
    values
}

impl Golden {
    fn model<B: Backend + Clone>(&self, backend: &B, case: &Case) -> Model<B> {
        let input = self.tensors[&format!("{}/input", case.name)].len() / case.blocks[0].inputs;
        let outputs = case.blocks.last().unwrap().outputs;
        let output = self.tensors[&format!("{}/output", case.name)].len() / outputs;
        let mut model = Model::new(backend, &case.config, input, output, 1).unwrap();
        let start = model.export().into_iter().map(|named| {
            let golden = self.tensors.get(&format!("{}/start/{}", case.name, named.name));
            // Running statistics start as they are.
            Named { values: golden.unwrap_or(&named.values).clone(), ..named }
        });
        let start: Vec<Named> = start.collect();
        model.load(&start).unwrap();
        model
    }

    fn graphs<B: Backend>(&self, backend: &B, case: &Case) -> Vec<B::Graph> {
        let graph = |block: &Block| {
            backend.graph(&Adjacency {
                inputs: block.inputs,
                outputs: block.outputs,
                nbr_offsets: &block.offsets,
                nbrs: &block.nbrs,
                base: 0,
                input_degrees: &block.degrees,
            })
        };
        case.blocks.iter().map(graph).collect()
    }

    fn input<B: Backend>(&self, backend: &B, case: &Case) -> B::Matrix {
        matrix(backend, case.blocks[0].inputs, &self.tensors[&format!("{}/input", case.name)])
    }
}

pub fn forward_and_backward<B: Backend + Clone>(backend: &B, tolerance: f32) {
    let golden = golden();
    for case in &golden.cases {
        let mut model = golden.model(backend, case);
        let (graphs, input) = (golden.graphs(backend, case), golden.input(backend, case));
        let of = |part: &str| &golden.tensors[&format!("{}/{part}", case.name)];
        let what = |part: &str| format!("{} {part}", case.name);
        if case.config.norm != NormKind::Batch {
            assert_close(
                tolerance,
                &what("inferred"),
                &values(backend, &model.infer(&graphs, &input)),
                of("output"),
            );
        }
        let activations = model.forward(&graphs, &input, 0);
        assert_close(tolerance, &what("output"), &values(backend, activations.logits()), of("output"));
        let direction = matrix(backend, graphs.last().unwrap().outputs(), of("direction"));
        let gradient = model.backward(&graphs, &input, activations, direction, true).unwrap();
        assert_close(tolerance, &what("input gradient"), &values(backend, &gradient), of("input_gradient"));
        let mut seen = 0;
        for parameter in model.parameters() {
            let expected = of(&format!("gradient/{}", parameter.name));
            assert_close(tolerance, &what(&parameter.name), &values(backend, &parameter.gradient), expected);
            seen += 1;
        }
        let prefix = format!("{}/gradient/", case.name);
        assert_eq!(seen, golden.tensors.keys().filter(|key| key.starts_with(&prefix)).count());
    }
}

pub fn ten_optimizer_steps<B: Backend + Clone>(backend: &B, tolerance: f32) {
    let golden = golden();
    for case in &golden.cases {
        let mut model = golden.model(backend, case);
        let (graphs, input) = (golden.graphs(backend, case), golden.input(backend, case));
        if case.config.norm == NormKind::Batch {
            // The fixture's forward pass before training moved its running statistics too.
            model.forward(&graphs, &input, 0);
        }
        let mut optimizer = Optimizer::new(&model, &case.optimizer).unwrap();
        let rows: Vec<u32> = (0..case.labels.len() as u32).collect();
        for (step, expected) in case.losses.iter().enumerate() {
            let activations = model.forward(&graphs, &input, step as u64);
            let (loss, gradient) =
                model.loss(activations.logits(), &rows, Labels::Classes(&case.labels)).unwrap();
            let loss = loss.wait().unwrap();
            assert!(
                (loss - expected).abs() < tolerance as f64 * expected.abs().max(1.0),
                "{}: {loss} {expected}",
                case.name
            );
            assert!(model.backward(&graphs, &input, activations, gradient, false).is_none());
            optimizer.step(&mut model, case.rate).unwrap();
        }
        for named in model.export() {
            let expected = &golden.tensors[&format!("{}/end/{}", case.name, named.name)];
            assert_close(
                tolerance,
                &format!("{} {} after ten steps", case.name, named.name),
                &named.values,
                expected,
            );
        }
        if case.config.norm == NormKind::Batch {
            let expected = &golden.tensors[&format!("{}/inferred", case.name)];
            assert_close(
                tolerance,
                &format!("{} inferred", case.name),
                &values(backend, &model.infer(&graphs, &input)),
                expected,
            );
        }
    }
}

pub fn losses<B: Backend + Clone>(backend: &B, tolerance: f32) {
    let golden = golden();
    let logits = matrix(backend, 9, &golden.tensors["loss/logits"]);
    for (name, labels) in [
        ("classes", Labels::Classes(&golden.loss.classes)),
        ("binary", Labels::Binary(&golden.tensors["loss/binary"])),
        ("values", Labels::Values(&golden.tensors["loss/values"])),
    ] {
        let mut gradient = backend.matrix(logits.rows(), logits.columns());
        let loss = backend.loss(&logits, &golden.loss.rows, labels, &mut gradient).unwrap().wait().unwrap();
        let expected = golden.loss.losses[name];
        assert!((loss - expected).abs() < tolerance as f64 * expected, "{name}: {loss} against {expected}");
        assert_close(
            tolerance,
            name,
            &values(backend, &gradient),
            &golden.tensors[&format!("loss/gradient/{name}")],
        );
    }
}
