//! Link prediction on a GPU: whole runs, with the table of embeddings and the state of its optimizer on the device.

use super::{gpu, train};
use crate::common::{StopAfter, finished};
use crate::facts::{Facts, result};
use esker_cuda::Gpu;
use esker_nn::{CpuBackend, DecoderKind, DistanceNorm, Kind, LinkLoss, ModelConfig, OptimizerKind};
use esker_sample::Fanout;
use esker_train::link::{LossReduction, NegativeCount, PenaltyConfig, PenaltyName};
use esker_train::{OpenRun, Outcome, RunConfig, Summary, TrainError, Trainer};
use esker_types::DeviceName;

fn facts(test: &str) -> Option<(Facts, RunConfig)> {
    Gpu::or_skip(test)?;
    let facts = Facts::new();
    let config = RunConfig { device: DeviceName::Cuda(0), epochs: 2, ..facts.config() };
    Some((facts, config))
}

/// Every decoder, loss and optimizer of embeddings; negatives of chunks, of each edge, and all nodes; an encoder.
fn configs(config: &RunConfig) -> Vec<(&'static str, RunConfig)> {
    let with = |decoder: DecoderKind, loss: LinkLoss, negatives: NegativeCount| {
        let mut config = config.clone();
        let link = config.link.as_mut().unwrap();
        (link.decoder, link.loss, link.negatives) = (decoder, loss, negatives);
        config
    };
    let of_chunks = NegativeCount::Shared { uniform: 40, by_degree: 10, chunks: 4 };
    let of_edges = NegativeCount::Shared { uniform: 20, by_degree: 5, chunks: 100 };
    let translation = |norm| DecoderKind::TransE { norm };
    let mut dot = with(DecoderKind::Dot, LinkLoss::Logistic, of_edges);
    dot.embeddings.as_mut().unwrap().optimizer.kind = OptimizerKind::Sgd;
    let mut rotate = with(
        DecoderKind::RotatE { phase_scale: 3.0 },
        LinkLoss::SelfAdversarial { margin: 3.0, temperature: 1.0 },
        of_chunks,
    );
    let rows = rotate.embeddings.as_mut().unwrap();
    (rows.optimizer.kind, rows.lr) = (OptimizerKind::Adam, 0.01);
    let mut complex = with(DecoderKind::ComplEx, LinkLoss::Softmax, NegativeCount::All);
    complex.model.input_dropout = 0.2;
    let link = complex.link.as_mut().unwrap();
    (link.reduction, link.relation_dropout) = (LossReduction::Mean, 0.3);
    link.penalty = Some(PenaltyConfig { kind: PenaltyName::N3, weight: 1e-3 });
    let mut encoded = with(DecoderKind::DistMult, LinkLoss::Softmax, of_chunks);
    encoded.model = ModelConfig { kind: Kind::Sage, layers: 1, hidden: 16, ..ModelConfig::default() };
    (encoded.fanout, encoded.eval_fanout) = (vec![Fanout::All], vec![Fanout::All]);
    vec![
        ("distmult", with(DecoderKind::DistMult, LinkLoss::Softmax, of_chunks)),
        ("dot", dot),
        ("l1", with(translation(DistanceNorm::L1), LinkLoss::Margin { margin: 1.0 }, of_edges)),
        ("l2", with(translation(DistanceNorm::L2), LinkLoss::Softmax, of_chunks)),
        ("l2-all", with(translation(DistanceNorm::L2), LinkLoss::Logistic, NegativeCount::All)),
        ("rotate", rotate),
        ("complex", complex),
        ("sage", encoded),
    ]
}

#[test]
fn links_have_the_same_bits_in_every_run_and_are_learned_as_on_the_cpu() {
    let Some((facts, config)) = facts("links in every run") else { return };
    for (name, config) in configs(&config) {
        let mut seen = Vec::new();
        for (number, threads) in [1, 4, 2].into_iter().enumerate() {
            let out = facts.path(&format!("{name}-{number}"));
            let mut config = RunConfig { threads, ..config.clone() };
            config.link.as_mut().unwrap().ranks.block = (number == 2).then_some(37);
            let summary = train(&config, &out);
            seen.push((result(&summary, &out), summary));
        }
        assert!(seen.iter().all(|(found, _)| *found == seen[0].0), "{name}");
        let cpu = RunConfig { device: DeviceName::Cpu, ..config };
        let trainer = Trainer::create(CpuBackend::new(), cpu, &facts.path(&format!("{name}-cpu"))).unwrap();
        let on_cpu = finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap());
        let on_gpu = &seen[0].1;
        assert_eq!(on_gpu.steps, on_cpu.steps, "{name}");
        for (gpu, cpu) in on_gpu.epochs.iter().zip(&on_cpu.epochs) {
            let (gpu, cpu) = (gpu.loss, cpu.loss);
            assert!((gpu - cpu).abs() < 5e-3 * cpu.abs(), "{name}: {gpu} against {cpu}");
        }
        let mrr = |summary: &Summary| summary.test.and_then(|test| test.ranks).unwrap().mrr;
        let (gpu, cpu) = (mrr(on_gpu), mrr(&on_cpu));
        assert!((gpu - cpu).abs() < 0.02, "{name}: MRR {gpu} against {cpu}");
    }
}

#[test]
fn links_on_the_gpu_survive_a_stop() {
    let Some((facts, config)) = facts("links that are resumed") else { return };
    for (name, config) in
        configs(&config).into_iter().filter(|(name, _)| ["rotate", "complex"].contains(name))
    {
        let config = RunConfig { checkpoint_batches: 5, ..config };
        let whole = facts.path(&format!("{name}-whole"));
        let expected = result(&train(&config, &whole), &whole);
        let out = facts.path(&format!("{name}-parts"));
        let mut trainer = Trainer::create(gpu(&config), config.clone(), &out).unwrap();
        let summary = loop {
            match trainer.run(&mut StopAfter(7)).unwrap() {
                Outcome::Finished(summary) => break *summary,
                Outcome::Stopped(_) => {}
            }
            trainer = Trainer::resume(gpu(&config), config.clone(), &out).unwrap();
        };
        let found = result(&summary, &out);
        assert!((found.0, found.1, found.2) == (expected.0, expected.1, expected.2), "{name}");
    }
}

#[test]
fn links_stay_inside_the_device_memory_that_was_promised() {
    let Some((facts, config)) = facts("the device memory of links") else { return };
    for (name, config) in configs(&config) {
        let tight = RunConfig { gpu_memory: Some(1), ..config.clone() };
        let refused = OpenRun::new(gpu(&tight), tight, facts.path("scratch")).err().unwrap();
        let TrainError::DeviceMemory { needed, table, .. } = refused else { panic!("{name}: {refused}") };
        assert_eq!(table.total(), needed.0, "{name}");
        let has = |what: &str| table.lines.iter().any(|line| line.what == what);
        assert!(has("embeddings"), "{name}: {table:?}");
        let enough = RunConfig { gpu_memory: Some(needed.0), ..config.clone() };
        let summary = train(&enough, &facts.path(name));
        let peak = summary.peak_device_bytes.unwrap();
        assert!(peak > 0 && peak <= needed.0, "{name}: {peak} of {}", needed.0);
        let less = RunConfig { gpu_memory: Some(needed.0 - 1), ..config };
        assert!(OpenRun::new(gpu(&less), less, facts.path("scratch")).is_err(), "{name}");
    }
}
