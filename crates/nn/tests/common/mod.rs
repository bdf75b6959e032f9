//! Random batches for the tests.
#![allow(dead_code)]

pub mod golden;
pub mod link;
pub mod link_golden;
pub mod stored;
pub mod whole;

use esker_nn::*;
use esker_types::random::{Key, below, normal};

/// Adjacency of every layer as one DENSE sample would give them, with their own place in larger arrays.
pub struct Batch {
    /// Rows that layer `l` reads; the last entry is what the last layer writes.
    pub rows: Vec<usize>,
    pub offsets: Vec<u32>,
    pub nbrs: Vec<u32>,
    pub degrees: Vec<u32>,
}

impl Batch {
    /// Adjacency of 0 to `most` neighbours, with repeats and self-loops.
    pub fn new(rows: &[usize], most: u64, seed: u64) -> Batch {
        let key = Key::new(seed);
        // Something before the first list, as under a sample's later layers.
        let mut batch =
            Batch { rows: rows.to_vec(), offsets: vec![3], nbrs: vec![0; 3], degrees: Vec::new() };
        for node in rows[0] - rows[1]..rows[0] {
            let layer = (0..rows.len() - 1).rev().find(|l| node >= rows[0] - rows[l + 1]).unwrap();
            let first = (rows[0] - rows[layer]) as u64;
            for place in 0..below(key.with(1).at(node as u64), most + 1) {
                let pick = below(key.with(node as u64 + 2).at(place), rows[layer] as u64);
                batch.nbrs.push((first + pick) as u32);
            }
            batch.offsets.push(batch.nbrs.len() as u32);
        }
        batch.degrees = (0..rows[0] as u64).map(|node| below(key.with(99).at(node), 30) as u32).collect();
        batch
    }

    pub fn lists(&self, layer: usize) -> Adjacency<'_> {
        let base = self.rows[0] - self.rows[layer];
        Adjacency {
            inputs: self.rows[layer],
            outputs: self.rows[layer + 1],
            nbr_offsets: &self.offsets[self.rows[1] - self.rows[layer + 1]..],
            nbrs: &self.nbrs,
            base: base as u32,
            input_degrees: &self.degrees[base..],
        }
    }

    pub fn graphs<B: Backend>(&self, backend: &B) -> Vec<B::Graph> {
        (0..self.rows.len() - 1).map(|layer| backend.graph(&self.lists(layer))).collect()
    }

    /// The list of an output, as input rows.
    pub fn list(&self, layer: usize, output: usize) -> Vec<usize> {
        let lists = self.lists(layer);
        let range = lists.nbr_offsets[output] as usize..lists.nbr_offsets[output + 1] as usize;
        lists.nbrs[range].iter().map(|nbr| (nbr - lists.base) as usize).collect()
    }
}

pub fn numbers(count: usize, seed: u64) -> Vec<f32> {
    (0..count as u64).map(|index| normal(Key::new(seed).at(index))).collect()
}

pub fn matrix(backend: &CpuBackend, rows: usize, columns: usize, seed: u64) -> CpuMatrix {
    let mut matrix = backend.matrix(rows, columns);
    matrix.values_mut().copy_from_slice(&numbers(rows * columns, seed));
    matrix
}

/// One configuration of every kind, with everything turned on somewhere.
pub fn configs() -> Vec<ModelConfig> {
    let base = ModelConfig { layers: 2, hidden: 8, heads: 2, dropout: 0.3, ..ModelConfig::default() };
    let sage = |aggregator| ModelConfig { aggregator, ..base.clone() };
    let kind = |kind| ModelConfig { kind, ..base.clone() };
    vec![
        sage(NeighbourAggregator::Mean),
        ModelConfig { norm: NormKind::Layer, ..sage(NeighbourAggregator::Max) },
        ModelConfig {
            norm: NormKind::Batch,
            activation: Activation::LeakyRelu,
            ..sage(NeighbourAggregator::Sum)
        },
        kind(Kind::Gcn),
        ModelConfig { gcn_degree: Degree::Whole, ..kind(Kind::Gcn) },
        ModelConfig {
            gcn_degree: Degree::Sampled,
            residual: true,
            activation: Activation::Elu,
            ..kind(Kind::Gcn)
        },
        ModelConfig { attention_dropout: 0.3, activation: Activation::Elu, ..kind(Kind::Gat) },
        ModelConfig {
            head_merge: HeadMerge::Average,
            residual: true,
            norm: NormKind::Batch,
            ..kind(Kind::Gat)
        },
        ModelConfig {
            projected_dropout: 0.4,
            attention_dropout: 0.3,
            activation: Activation::Elu,
            ..kind(Kind::Gat)
        },
        ModelConfig { gin_epsilon: 0.25, residual: true, ..kind(Kind::Gin) },
        ModelConfig { norm: NormKind::Layer, activation: Activation::Elu, ..kind(Kind::Mlp) },
    ]
}

/// Columns of a matrix are copied where they belong, and nothing else changes.
#[allow(dead_code, reason = "not every test copies columns")]
pub fn columns_are_copied<B: Backend>(backend: &B) {
    for (rows, read, written, [from, to, count]) in
        [(5, 3, 7, [0, 4, 3]), (300, 70, 33, [37, 0, 33]), (4, 6, 6, [2, 1, 0]), (0, 2, 4, [0, 2, 2])]
    {
        let (source, before) = (numbers(rows * read, 1), numbers(rows * written, 2));
        let matrix = |columns: usize, values: &[f32]| {
            let mut matrix = backend.matrix(rows, columns);
            backend.write(&mut matrix, 0, values);
            matrix
        };
        let (source_matrix, mut found_matrix) = (matrix(read, &source), matrix(written, &before));
        backend.copy_columns(&source_matrix, from, &mut found_matrix, to, count);
        let (mut found, mut expected) = (vec![0.0; rows * written], before);
        backend.read(&found_matrix, 0, &mut found);
        for row in 0..rows {
            for column in 0..count {
                expected[row * written + to + column] = source[row * read + from + column];
            }
        }
        assert_eq!(found, expected, "{rows} rows, {read} to {written} columns");
    }
}
