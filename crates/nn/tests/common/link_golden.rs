//! Link prediction of a backend against PyTorch (`fixtures/make_link.py`).

use super::golden::read;
use super::link::{LinkCase, RELATIONS, assert_close, csr};
use esker_nn::*;
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    name: String,
    decoder: String,
    loss: String,
    replaced: String,
    known: Vec<u32>,
    own: Vec<u32>,
    relation_of: Vec<u32>,
    /// Candidates of chunks of four edges, or all nodes.
    rows: Option<Vec<u32>>,
    masked: Vec<(u32, u32)>,
    value: f64,
}

#[derive(Deserialize)]
struct Steps {
    kind: OptimizerKind,
    rate: f64,
    rows: Vec<Vec<u32>>,
}

const COLUMNS: usize = 6;

fn decoder(name: &str) -> DecoderKind {
    match name {
        "dot" => DecoderKind::Dot,
        "distmult" => DecoderKind::DistMult,
        "transe-l1" => DecoderKind::TransE { norm: DistanceNorm::L1 },
        "transe-l2" => DecoderKind::TransE { norm: DistanceNorm::L2 },
        "complex" => DecoderKind::ComplEx,
        "rotate" => DecoderKind::RotatE { phase_scale: 1.5 },
        other => panic!("{other}"),
    }
}

fn loss(name: &str) -> LinkLoss {
    match name {
        "softmax" => LinkLoss::Softmax,
        "logistic" => LinkLoss::Logistic,
        "margin" => LinkLoss::Margin { margin: 1.5 },
        "self-adversarial" => LinkLoss::SelfAdversarial { margin: 2.0, temperature: 0.7 },
        other => panic!("{other}"),
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| *x as f64).collect()
}

pub fn decoders_and_losses<B: LinkMath>(backend: &B, tolerance: f64) {
    let (tensors, metadata) = read(include_bytes!("../../fixtures/link.safetensors"));
    let cases: Vec<Case> = serde_json::from_str(&metadata["cases"]).unwrap();
    assert_eq!(cases.len(), 6 * 4 * 2 * 2);
    for case in cases {
        let of = |part: &str| tensors[&format!("{}/{part}", case.name)].clone();
        let replaced = if case.replaced == "source" { ReplacedEnd::Source } else { ReplacedEnd::Target };
        let built = LinkCase {
            weights: Vec::new(),
            decoder: decoder(&case.decoder),
            replaced,
            loss: loss(&case.loss),
            scale: 0.25,
            columns: COLUMNS,
            nodes: of("nodes"),
            relations: of("relations"),
            known: case.known,
            own: case.own,
            relation_of: case.relation_of,
            chunks: case.rows.map(|rows| (4, 7, rows)),
            masked: case.masked,
        };
        assert_eq!(built.relations.len() % RELATIONS, 0);
        for by_node in [false, true] {
            let found = built.run(backend, by_node);
            let error = (found.loss - case.value).abs() / case.value.abs().max(1.0);
            assert!(error < tolerance, "{}: {} against {}", case.name, found.loss, case.value);
            assert_close(&case.name, tolerance, &found.nodes, &wide(&of("nodes_gradient")));
            assert_close(&case.name, tolerance, &found.relations, &wide(&of("relations_gradient")));
        }
    }
}

pub fn ten_sparse_steps<B: LinkMath>(backend: &B, tolerance: f64) {
    let (tensors, metadata) = read(include_bytes!("../../fixtures/link.safetensors"));
    let all: Vec<Steps> = serde_json::from_str(&metadata["steps"]).unwrap();
    assert_eq!(all.len(), 3);
    for steps in all {
        let name = serde_json::to_value(steps.kind).unwrap();
        let of = |part: &str| &tensors[&format!("{}/{part}", name.as_str().unwrap())];
        let matrix = |values: &[f32]| {
            let mut matrix = backend.matrix(values.len() / COLUMNS, COLUMNS);
            backend.write(&mut matrix, 0, values);
            matrix
        };
        let config = OptimizerConfig { kind: steps.kind, ..OptimizerConfig::default() };
        let mut table = matrix(of("start"));
        let nodes = table.rows();
        let zeros = |_| matrix(&vec![0.0; nodes * COLUMNS]);
        let mut state: Vec<B::Matrix> = config.row_states().iter().map(zeros).collect();
        for (step, rows) in steps.rows.iter().enumerate() {
            let gradients = matrix(of(&format!("weights/{step}")));
            let mut touched = rows.clone();
            touched.sort_unstable();
            touched.dedup();
            let slots: Vec<u32> = rows.iter().map(|row| touched.binary_search(row).unwrap() as u32).collect();
            let (offsets, members) = csr(touched.len(), &[&slots]);
            let mut summed = backend.matrix(touched.len(), COLUMNS);
            backend.sum_rows(&[&gradients], &offsets, &members, &mut summed);
            let update = config.row_update(step as u64 + 1, steps.rate).unwrap();
            backend.update_rows(&update, &touched, &summed, &mut table, &mut state);
        }
        let mut found = vec![0.0; nodes * COLUMNS];
        backend.read(&table, 0, &mut found);
        assert_close(&format!("{:?}", steps.kind), tolerance, &found, &wide(of("end")));
    }
}
