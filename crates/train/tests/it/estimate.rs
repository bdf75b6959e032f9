//! What GCN's sum over sampled neighbours estimates: its mean over many samples of the real sampler, beside the sum over all
//! neighbours.

use esker_nn::{CpuBackend, Degree, Device, Kind, Model, ModelConfig, Shape};
use esker_sample::{Carry, Fanout, Form, InMemory, Position, Sample, Sampler, Settings};
use esker_train::adjacency;
use esker_types::NodeId;
use esker_types::random::{Key, below, normal};

const NODES: u64 = 60;
const COLUMNS: usize = 3;
const SAMPLES: u64 = 4000;
/// Standard errors that no mean of 180 numbers is away from what it estimates, but for one seed in a thousand.
const MOST_ERRORS: f64 = 5.0;

/// Neighbours by node: none, one, and many, with repeats and self-loops.
fn lists() -> Vec<Vec<u64>> {
    let key = Key::new(5);
    let list = |node: u64| {
        let count = if node < 2 { node } else { below(key.at(node), 20) };
        let mut list: Vec<u64> = (0..count).map(|place| below(key.with(node + 1).at(place), NODES)).collect();
        list.extend((node % 7 == 3).then_some(node));
        list.sort_unstable();
        list
    };
    (0..NODES).map(list).collect()
}

/// A layer's rows of every node, for one sample after another.
fn rows(degree: Degree, fanout: Fanout, form: Form, samples: u64, mut take: impl FnMut(&[f32])) {
    let backend = CpuBackend::new();
    let config = ModelConfig { kind: Kind::Gcn, gcn_degree: degree, layers: 1, ..ModelConfig::default() };
    let model = Model::new(&backend, &config, COLUMNS, COLUMNS, 3).unwrap();
    let carry = Carry { degrees: true, ..Carry::default() };
    let settings = Settings { seed: 11, fanouts: vec![fanout], form, carry };
    let topology = InMemory::<u32>::from_adjacency(&lists(), None);
    let mut sampler = Sampler::new(topology, settings, 1 << 30).unwrap();
    let seeds: Vec<NodeId> = (0..NODES).map(NodeId).collect();
    let mut sample = Sample::default();
    for epoch in 0..samples {
        sampler.sample(Position { epoch, batch: 0 }, &seeds, &mut sample).unwrap();
        let graph = backend.graph(&adjacency(&sample.layer(0)));
        let mut input = backend.matrix(sample.node_ids.len(), COLUMNS);
        for (to, node) in input.values_mut().chunks_mut(COLUMNS).zip(&sample.node_ids) {
            let of_node = Key::new(7).with(node.0);
            to.iter_mut().zip(0..).for_each(|(to, column)| *to = 1.0 + normal(of_node.at(column)));
        }
        let found = model.infer(&[graph], &input);
        // A row a seed, as targets are all of them.
        assert_eq!(found.rows(), NODES as usize);
        let mut values = vec![0.0; found.rows() * COLUMNS];
        backend.read(&found, 0, &mut values);
        let ordered: Vec<f32> = sample
            .seeds
            .iter()
            .flat_map(|seed| {
                let row = seed.index() - (sample.node_ids.len() - found.rows());
                values[row * COLUMNS..][..COLUMNS].to_vec()
            })
            .collect();
        take(&ordered);
    }
}

/// The most standard errors that a mean over samples is away from the sum over all neighbours.
fn errors(degree: Degree, form: Form) -> f64 {
    let count = NODES as usize * COLUMNS;
    let mut full = Vec::new();
    rows(Degree::Whole, Fanout::All, form, 1, |found| full = found.to_vec());
    let (mut sums, mut squares) = (vec![0.0; count], vec![0.0; count]);
    rows(degree, Fanout::AtMost(4), form, SAMPLES, |found| {
        for (index, (found, full)) in found.iter().zip(&full).enumerate() {
            let difference = (*found - *full) as f64;
            sums[index] += difference;
            squares[index] += difference * difference;
        }
    });
    let samples = SAMPLES as f64;
    let error = |(sum, square): (&f64, &f64)| {
        let mean = sum / samples;
        // Rows that never vary may be away by what f32 leaves.
        mean.abs() / ((square / samples - mean * mean).max(0.0) / samples).sqrt().max(1e-6)
    };
    sums.iter().zip(&squares).map(error).fold(0.0, f64::max)
}

#[test]
fn the_expected_sum_over_a_sample_is_the_sum_over_all_neighbours() {
    for form in [Form::Dense, Form::Layered] {
        let found = errors(Degree::Unbiased, form);
        assert!(found < MOST_ERRORS, "{form:?}: {found} standard errors");
    }
}

#[test]
fn the_other_sums_over_a_sample_expect_something_else() {
    for degree in [Degree::Whole, Degree::Sampled] {
        let found = errors(degree, Form::Dense);
        assert!(found > 10.0 * MOST_ERRORS, "{degree:?}: {found} standard errors");
    }
}

#[test]
fn with_every_neighbour_sampled_nothing_is_weighed() {
    for form in [Form::Dense, Form::Layered, Form::Shadow] {
        let [mut unbiased, mut whole] = [Vec::new(), Vec::new()];
        rows(Degree::Unbiased, Fanout::All, form, 1, |found| unbiased = found.to_vec());
        rows(Degree::Whole, Fanout::All, form, 1, |found| whole = found.to_vec());
        assert!(unbiased == whole, "{form:?}");
    }
}
