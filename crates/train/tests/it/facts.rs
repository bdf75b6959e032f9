//! A small knowledge graph with a plan: relation `r` leads from a node of group `g` to nodes of group `g + r + 1`. Some
//! of its edges are held out.
#![allow(dead_code)]

use esker_import::{ImportJob, Request, import};
use esker_nn::{DecoderKind, LinkLoss, ModelConfig, OptimizerConfig, OptimizerKind, RowInit};
use esker_sample::negatives::NegativeMask;
use esker_store::Dataset;
use esker_train::link::{EdgeWeights, LinkConfig, LossReduction, NegativeCount, RankConfig, TargetEdges};
use esker_train::{
    Checkpoint, EmbeddingConfig, EvaluationMode, InputRows, MetricName, RunConfig, RunDirectory, Summary,
};
use esker_types::random::{Key, below};
use esker_types::{Budget, Silent};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

pub const NODES: u64 = 240;
pub const GROUPS: u64 = 12;
pub const RELATIONS: u64 = 4;

pub struct Facts {
    directory: tempfile::TempDir,
}

impl Facts {
    pub fn new() -> Facts {
        let directory = tempfile::tempdir().unwrap();
        let mut facts = BTreeSet::new();
        let key = Key::new(5);
        for index in 0..3600 {
            let (source, relation) =
                (below(key.at(3 * index), NODES), below(key.at(3 * index + 1), RELATIONS));
            let group = (source % GROUPS + relation + 1) % GROUPS;
            let target = group + GROUPS * below(key.at(3 * index + 2), NODES / GROUPS);
            facts.insert((source, relation, target));
        }
        let mut texts = [String::new(), String::new(), String::new()];
        for (index, (source, relation, target)) in facts.iter().enumerate() {
            let split = match below(Key::new(6).at(index as u64), 20) {
                0 => 1,
                1 | 2 => 2,
                _ => 0,
            };
            writeln!(texts[split], "n{source}\tr{relation}\tn{target}").unwrap();
        }
        let folder = directory.path().join("facts");
        std::fs::create_dir(&folder).unwrap();
        for (name, text) in ["train", "valid", "test"].iter().zip(&texts) {
            std::fs::write(folder.join(format!("{name}.txt")), text).unwrap();
        }
        let request = Request { format: "triples".into(), from: Some(folder), ..Request::default() };
        let target = directory.path().join("g");
        let budget = Budget { host_bytes: 64 << 20 };
        import(&request, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent })
            .unwrap();
        Facts { directory }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn config(&self) -> RunConfig {
        config_of(&self.path("g"))
    }
}

/// DistMult over embeddings, without an encoder.
pub fn config_of(path: &Path) -> RunConfig {
    let dataset = Dataset::open(path).unwrap();
    let optimizer = OptimizerConfig { kind: OptimizerKind::Adagrad, ..OptimizerConfig::default() };
    RunConfig {
        model: ModelConfig { kind: esker_nn::Kind::Mlp, layers: 0, ..ModelConfig::default() },
        link: Some(LinkConfig {
            decoder: DecoderKind::DistMult,
            columns: 16,
            loss: LinkLoss::Softmax,
            reduction: LossReduction::Sum,
            negatives: NegativeCount::Shared { uniform: 40, by_degree: 10, chunks: 4 },
            source_negatives: None,
            mask: NegativeMask::Graph,
            edge_weights: EdgeWeights::Equal,
            relation_init: None,
            inverse: true,
            target_edges: TargetEdges::Drop,
            relation_dropout: 0.0,
            penalty: None,
            ranks: RankConfig::default(),
        }),
        embeddings: Some(EmbeddingConfig {
            columns: 16,
            inputs: InputRows::Embeddings,
            optimizer: optimizer.clone(),
            lr: 0.1,
            init: RowInit::Normal { deviation: 0.1 },
            init_file: None,
        }),
        optimizer,
        lr: 0.1,
        fanout: Vec::new(),
        eval_fanout: Vec::new(),
        batch: 100,
        epochs: 4,
        seed: 3,
        eval: EvaluationMode::Full,
        final_eval: EvaluationMode::Full,
        metric: MetricName::Mrr,
        memory: 1 << 30,
        threads: 2,
        checkpoint_seconds: 0,
        ..RunConfig::for_dataset(&dataset)
    }
}

/// Everything that must not depend on threads, blocks or interruptions: losses, metrics, weights, embeddings.
pub fn result(summary: &Summary, out: &Path) -> (String, String, Checkpoint, Vec<Vec<u8>>) {
    let metrics = format!("{:?} {:?}", summary.valid, summary.test);
    let weights = Checkpoint::read(&out.join("last.safetensors")).unwrap();
    let weights = Checkpoint { state: serde_json::Value::Null, ..weights };
    let state = RunDirectory::open(out).unwrap().0.state_path();
    let mut files: Vec<_> = std::fs::read_dir(state).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    let bytes = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    (summary.loss_digest.clone(), metrics, weights, bytes)
}
