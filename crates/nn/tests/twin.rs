//! Every kind of layer against a slow twin in f64 that follows the definitions, and gradients against the finite
//! differences of that twin.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod common;

use common::{Batch, configs, matrix, numbers};
use esker_nn::*;
use esker_types::random::Key;
use proptest::prelude::*;
use std::collections::HashMap;

const INPUT: usize = 5;
const OUTPUT: usize = 3;
const SEED: u64 = 11;
const STEP: u64 = 4;

type Rows = Vec<Vec<f64>>;
type Parameters = HashMap<String, (usize, Vec<f64>)>;

/// A model's forward pass, by definition.
struct Twin<'a> {
    config: &'a ModelConfig,
    batch: &'a Batch,
    parameters: &'a Parameters,
}

impl Twin<'_> {
    fn row(&self, layer: usize, name: &str) -> &[f64] {
        &self.parameters[&format!("layers.{layer}.{name}")].1
    }

    /// `x W^T`, plus the bias where there is one.
    fn linear(&self, layer: usize, weight: &str, bias: Option<&str>, x: &Rows) -> Rows {
        let (columns, weight) = &self.parameters[&format!("layers.{layer}.{weight}")];
        let of = |x: &Vec<f64>| {
            let sums = weight.chunks(*columns).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>());
            sums.enumerate().map(|(o, sum)| sum + bias.map_or(0.0, |bias| self.row(layer, bias)[o])).collect()
        };
        x.iter().map(of).collect()
    }

    fn aggregate(&self, layer: usize, x: &Rows) -> Rows {
        let lists = self.batch.lists(layer);
        let first = lists.inputs - lists.outputs;
        let degree = |row: usize| match self.config.gcn_degree {
            Degree::Unbiased | Degree::Whole => lists.input_degrees[row] as f64,
            Degree::Sampled if row < first => 0.0,
            Degree::Sampled => {
                self.batch.list(layer, row - first).into_iter().filter(|nbr| *nbr != row).count() as f64
            }
        };
        let scale = |row: usize| 1.0 / (degree(row) + 1.0).sqrt();
        let of = |output: usize| {
            let (own, list) = (first + output, self.batch.list(layer, output));
            let column = |c: usize| {
                let values = || list.iter().map(|nbr| x[*nbr][c]);
                match (self.config.kind, self.config.aggregator) {
                    (Kind::Gcn, _) => {
                        let others = list.iter().filter(|nbr| **nbr != own);
                        let sum: f64 = others.map(|nbr| scale(*nbr) * scale(own) * x[*nbr][c]).sum();
                        let weight = match self.config.gcn_degree {
                            Degree::Unbiased => degree(own) / list.len().max(1) as f64,
                            Degree::Whole | Degree::Sampled => 1.0,
                        };
                        weight * sum + scale(own) * scale(own) * x[own][c]
                    }
                    (Kind::Gin, _) => {
                        values().sum::<f64>() + (1.0 + self.config.gin_epsilon as f64) * x[own][c]
                    }
                    (_, NeighbourAggregator::Mean) => values().sum::<f64>() / list.len().max(1) as f64,
                    (_, NeighbourAggregator::Sum) => values().sum(),
                    (_, NeighbourAggregator::Max) => values().reduce(f64::max).unwrap_or(0.0),
                }
            };
            (0..x[0].len()).map(column).collect()
        };
        (0..lists.outputs).map(of).collect()
    }

    fn attention(&self, layer: usize, x: &Rows) -> Rows {
        let lists = self.batch.lists(layer);
        let (first, edges, heads) = (lists.inputs - lists.outputs, lists.edge_count(), self.config.heads);
        let average = layer + 1 == self.config.layers || self.config.head_merge == HeadMerge::Average;
        let mut hidden = self.linear(layer, "weight", None, x);
        if let Some(dropout) = Dropout::new(self.config.projected_dropout, self.key(layer).with(2)) {
            for (r, row) in hidden.iter_mut().enumerate() {
                let columns = row.len();
                row.iter_mut().enumerate().for_each(|(c, x)| *x *= dropout.factor(r, c, columns) as f64);
            }
        }
        let width = hidden[0].len() / heads;
        let dropout = Dropout::new(self.config.attention_dropout, self.key(layer).with(1));
        let score = |row: usize, head: usize, name: &str| -> f64 {
            (head * width..(head + 1) * width).map(|c| hidden[row][c] * self.row(layer, name)[c]).sum()
        };
        let mut result = vec![vec![0.0; if average { width } else { heads * width }]; lists.outputs];
        for (output, to) in result.iter_mut().enumerate() {
            let (own, list) = (first + output, self.batch.list(layer, output));
            let start = (lists.nbr_offsets[output] - lists.nbr_offsets[0]) as usize;
            let others = list.iter().enumerate().map(|(place, nbr)| (start + place, *nbr));
            let entries: Vec<_> =
                others.filter(|entry| entry.1 != own).chain([(edges + output, own)]).collect();
            for head in 0..heads {
                let leaky = |x: f64| if x > 0.0 { x } else { 0.2 * x };
                let target = score(own, head, "target");
                let all: Vec<f64> = entries
                    .iter()
                    .map(|entry| leaky(score(entry.1, head, "source") + target).exp())
                    .collect();
                let sum: f64 = all.iter().sum();
                for ((edge, nbr), exp) in entries.iter().zip(&all) {
                    let kept = dropout.map_or(1.0, |dropout| dropout.factor(*edge, head, heads) as f64);
                    for c in 0..width {
                        let share = if average { 1.0 / heads as f64 } else { 1.0 };
                        let place = if average { c } else { head * width + c };
                        to[place] += exp / sum * kept * share * hidden[*nbr][head * width + c];
                    }
                }
            }
            to.iter_mut().zip(self.row(layer, "bias")).for_each(|(to, bias)| *to += bias);
        }
        result
    }

    fn key(&self, layer: usize) -> Key {
        Key::new(SEED).with(1).with(STEP).with(layer as u64)
    }

    fn convolution(&self, layer: usize, x: &Rows, own: &Rows) -> Rows {
        match self.config.kind {
            Kind::Mlp => self.linear(layer, "weight", Some("bias"), own),
            Kind::Gcn => self.linear(layer, "weight", Some("bias"), &self.aggregate(layer, x)),
            Kind::Gat => self.attention(layer, x),
            Kind::Gin => {
                let mut hidden =
                    self.linear(layer, "first.weight", Some("first.bias"), &self.aggregate(layer, x));
                hidden.iter_mut().flatten().for_each(|x| *x = x.max(0.0));
                self.linear(layer, "second.weight", Some("second.bias"), &hidden)
            }
            Kind::Sage => {
                let rows = self.aggregate(layer, x);
                let sum = self.linear(layer, "neighbours.weight", Some("neighbours.bias"), &rows);
                add(sum, &self.linear(layer, "self.weight", None, own))
            }
        }
    }

    fn norm(&self, layer: usize, x: &mut Rows) {
        let normalise = |values: Vec<&mut f64>| {
            let count = values.len() as f64;
            let mean = values.iter().map(|x| **x).sum::<f64>() / count;
            let variance = values.iter().map(|x| (**x - mean).powi(2)).sum::<f64>() / count;
            values.into_iter().for_each(|x| *x = (*x - mean) / (variance + 1e-5).sqrt());
        };
        match self.config.norm {
            NormKind::None => return,
            NormKind::Layer => x.iter_mut().for_each(|row| normalise(row.iter_mut().collect())),
            NormKind::Batch => {
                (0..x[0].len()).for_each(|c| normalise(x.iter_mut().map(|row| &mut row[c]).collect()))
            }
        }
        let (scale, shift) = (self.row(layer, "norm.scale"), self.row(layer, "norm.shift"));
        x.iter_mut().for_each(|row| (0..row.len()).for_each(|c| row[c] = row[c] * scale[c] + shift[c]));
    }

    fn forward(&self, input: &Rows) -> Rows {
        let mut x = input.clone();
        for layer in 0..self.config.layers {
            let lists = self.batch.lists(layer);
            let own = x[lists.inputs - lists.outputs..].to_vec();
            let mut out = self.convolution(layer, &x, &own);
            if self.config.residual {
                let projected = self.parameters.contains_key(&format!("layers.{layer}.residual.weight"));
                let added = if projected { self.linear(layer, "residual.weight", None, &own) } else { own };
                out = add(out, &added);
            }
            if layer + 1 < self.config.layers {
                self.norm(layer, &mut out);
                let dropout = Dropout::new(self.config.dropout, self.key(layer).with(0));
                for (r, row) in out.iter_mut().enumerate() {
                    let columns = row.len();
                    for (c, x) in row.iter_mut().enumerate() {
                        let factor = dropout.map_or(1.0, |dropout| dropout.factor(r, c, columns) as f64);
                        *x = factor * activate(self.config.activation, *x);
                    }
                }
            }
            x = out;
        }
        x
    }
}

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Identity => x,
        Activation::Relu => x.max(0.0),
        Activation::Elu if x < 0.0 => x.exp() - 1.0,
        Activation::LeakyRelu if x < 0.0 => LEAKY_SLOPE as f64 * x,
        Activation::Elu | Activation::LeakyRelu => x,
    }
}

fn add(a: Rows, b: &Rows) -> Rows {
    a.into_iter().zip(b).map(|(a, b)| a.into_iter().zip(b).map(|(a, b)| a + b).collect()).collect()
}

fn rows_of(values: &[f32], columns: usize) -> Rows {
    values.chunks(columns).map(|row| row.iter().map(|x| *x as f64).collect()).collect()
}

fn assert_close(what: &str, found: f64, expected: f64, scale: f64) {
    assert!((found - expected).abs() <= scale * 2e-5, "{what}: {found} against {expected}");
}

/// Forward pass, then gradients of some of every matrix's numbers.
fn check(config: &ModelConfig, rows: &[usize], most: u64, seed: u64) {
    let batch = Batch::new(rows, most, seed);
    let backend = CpuBackend::new();
    let mut model = Model::new(&backend, config, INPUT, OUTPUT, SEED).unwrap();
    let mut start = model.export();
    for (index, named) in start.iter_mut().enumerate() {
        if !named.name.contains("running") {
            // Zeros and ones would hide mistakes.
            let offset = if named.name.ends_with("norm.scale") { 1.0 } else { 0.0 };
            let random = numbers(named.values.len(), seed + 100 + index as u64);
            named.values.iter_mut().zip(random).for_each(|(x, random)| *x = 0.4 * random + offset);
        }
    }
    model.load(&start).unwrap();
    let parameters: Parameters = start
        .iter()
        .map(|n| (n.name.clone(), (n.shape[1], n.values.iter().map(|x| *x as f64).collect())))
        .collect();
    let (graphs, input) = (batch.graphs(&backend), matrix(&backend, rows[0], INPUT, seed + 1));
    let direction = matrix(&backend, rows[rows.len() - 1], OUTPUT, seed + 2);
    let objective = |parameters: &Parameters, input: &Rows| -> (f64, Rows) {
        let logits = Twin { config, batch: &batch, parameters }.forward(input);
        let flat = logits.iter().flatten().zip(direction.values());
        (flat.map(|(logit, direction)| logit * *direction as f64).sum(), logits)
    };
    let input_rows = rows_of(input.values(), INPUT);
    let (_, logits) = objective(&parameters, &input_rows);
    let activations = model.forward(&graphs, &input, STEP);
    let scale = logits.iter().flatten().fold(1e-2f64, |largest, x| largest.max(x.abs()));
    for (found, expected) in activations.logits().values().iter().zip(logits.iter().flatten()) {
        assert_close("logits", *found as f64, *expected, scale);
    }
    let mut gradient = backend.matrix(direction.rows(), direction.columns());
    backend.write(&mut gradient, 0, direction.values());
    let input_gradient = model.backward(&graphs, &input, activations, gradient, true).unwrap();
    let h = 1e-6;
    let scale_of = |values: &[f32]| values.iter().fold(1e-1f64, |largest, x| largest.max(x.abs() as f64));
    for place in (0..input_gradient.values().len()).step_by(17) {
        let moved = |by: f64| {
            let mut rows = input_rows.clone();
            rows[place / INPUT][place % INPUT] += by;
            objective(&parameters, &rows).0
        };
        let expected = (moved(h) - moved(-h)) / (2.0 * h);
        let found = input_gradient.values()[place] as f64;
        assert_close(&format!("{config:?} input"), found, expected, scale_of(input_gradient.values()));
    }
    for parameter in model.parameters() {
        let found = parameter.gradient.values();
        for place in (0..found.len()).step_by(11) {
            let moved = |by: f64| {
                let mut all = parameters.clone();
                all.get_mut(&parameter.name).unwrap().1[place] += by;
                objective(&all, &input_rows).0
            };
            let expected = (moved(h) - moved(-h)) / (2.0 * h);
            assert_close(&parameter.name, found[place] as f64, expected, scale_of(found));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn layers_and_their_gradients_follow_the_definitions(
        which in 0usize..11, inputs in 0usize..30, hidden in 0usize..20, outputs in 1usize..10, most in 0u64..7,
        seed in 0u64..1000,
    ) {
        let config = &configs()[which];
        // Columns of two or three rows that nearly agree are normalised by what rounding left of their difference.
        let hidden = if config.norm == NormKind::Batch { hidden + 4 } else { hidden };
        check(config, &[outputs + hidden + inputs, outputs + hidden, outputs], most, seed);
    }
}

#[test]
fn every_configuration_follows_the_definitions() {
    for config in configs() {
        check(&config, &[60, 25, 9], 6, 5);
    }
}

#[test]
fn wide_and_long_layers_follow_the_definitions() {
    // Several chunks of rows, whole and part tiles of columns.
    for which in [0, 1, 3, 6] {
        let config = ModelConfig { hidden: 36, layers: 1, residual: true, ..configs()[which].clone() };
        check(&config, &[700, 300], 9, 8);
    }
}

#[test]
fn with_every_neighbour_there_unbiased_has_the_bits_of_whole() {
    let mut batch = Batch::new(&[60, 25, 9], 6, 5);
    let listed = batch.rows[0] - batch.rows[1];
    for (index, offsets) in batch.offsets.windows(2).enumerate() {
        batch.degrees[listed + index] = offsets[1] - offsets[0];
    }
    let [unbiased, whole] = [Degree::Unbiased, Degree::Whole].map(|gcn_degree| {
        let config = ModelConfig { gcn_degree, ..configs()[3].clone() };
        let backend = CpuBackend::new();
        let mut model = Model::new(&backend, &config, INPUT, OUTPUT, SEED).unwrap();
        let (graphs, input) = (batch.graphs(&backend), matrix(&backend, 60, INPUT, 1));
        let activations = model.forward(&graphs, &input, STEP);
        let logits = activations.logits().values().to_vec();
        let gradient = matrix(&backend, 9, OUTPUT, 2);
        let input_gradient = model.backward(&graphs, &input, activations, gradient, true).unwrap();
        let mut all = [logits, input_gradient.values().to_vec()].concat();
        model.parameters().iter().for_each(|parameter| all.extend(parameter.gradient.values()));
        all
    });
    assert!(unbiased == whole);
}

#[test]
fn a_configuration_without_the_degree_is_one_of_whole_degrees() {
    let old: ModelConfig = serde_json::from_str(r#"{"kind":"gcn"}"#).unwrap();
    assert_eq!(old.gcn_degree, Degree::Whole);
    assert_eq!(ModelConfig::default().gcn_degree, Degree::Unbiased);
    let written = serde_json::to_string(&ModelConfig::default()).unwrap();
    assert!(written.contains(r#""gcn_degree":"unbiased""#), "{written}");
}

#[test]
fn gradients_of_losses_are_their_finite_differences() {
    let backend = CpuBackend::new();
    let logits = matrix(&backend, 6, OUTPUT, 3);
    let rows = [5, 0, 0, 2];
    let binary: Vec<f32> = (0..12).map(|i| if i == 4 { f32::NAN } else { (i % 2) as f32 }).collect();
    let values = numbers(12, 4);
    for labels in [Labels::Classes(&[1, 2, 0, 1]), Labels::Binary(&binary), Labels::Values(&values)] {
        let mut gradient = backend.matrix(6, OUTPUT);
        backend.loss(&logits, &rows, labels, &mut gradient).unwrap();
        for place in 0..logits.values().len() {
            let moved = |by: f32| {
                let mut other = matrix(&backend, 6, OUTPUT, 3);
                other.values_mut()[place] += by;
                let mut unused = backend.matrix(6, OUTPUT);
                let loss = backend.loss(&other, &rows, labels, &mut unused).unwrap();
                (loss.wait().unwrap(), other.values()[place] as f64)
            };
            // The distance is what f32 made of it.
            let ((above, high), (below, low)) = (moved(0.005), moved(-0.005));
            let expected = (above - below) / (high - low);
            assert!((gradient.values()[place] as f64 - expected).abs() < 2e-5, "{labels:?} {place}");
        }
    }
}

#[test]
fn whole_layers_are_the_same_in_any_parts() {
    common::whole::layers_in_any_parts(&CpuBackend::new(), 0.0);
}
