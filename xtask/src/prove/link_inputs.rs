//! Links predicted from features X, from embeddings Z, and from both: AUC on held-out edges of two real graphs.

use super::{Bench, link};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;

/// A graph, how it is imported, and epochs.
pub struct LinkedGraph {
    name: &'static str,
    import: &'static str,
    batch: &'static str,
    epochs: &'static str,
}

/// The graphs of the proof.
pub const GRAPHS: [LinkedGraph; 2] = [
    LinkedGraph {
        name: "coauthor_cs",
        import: "--format gnn-npz --from DATA/coauthor_cs/coauthor_cs.npz",
        batch: "200000",
        epochs: "60",
    },
    LinkedGraph {
        name: "wordnet-synsets",
        import: "--format csv --edges DATA/wordnet-synsets/edges.tsv.gz --delimiter tab --features-csr DATA/wordnet-synsets/features.npz --add-reverse --remove-duplicates",
        batch: "100000",
        epochs: "15",
    },
];

/// A smaller one for the tests.
pub const SMALL: LinkedGraph = LinkedGraph {
    name: "cora",
    import: "--format planetoid --from DATA/cora --name cora",
    batch: "100000",
    epochs: "40",
};

/// What the encoder reads.
const INPUTS: [(&str, &str); 4] = [
    ("x", ""),
    ("z", "--embeddings 64"),
    ("concat", "--embeddings 64 --inputs concat"),
    ("sum", "--embeddings 64 --inputs sum"),
];

/// Smallest AUC that counts as learned, in percent: guessing has 50.
const LEARNED: f64 = 65.0;

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let rows = GRAPHS.iter().map(|graph| {
        inputs(bench, graph, 3, graph.epochs)?.context("the real datasets are not beside the checkout")
    });
    rows.collect::<Result<Vec<Value>>>().map(Value::Array)
}

/// AUC by what the encoder reads, over splits by seed; `None` if the dataset is missing.
pub fn inputs(bench: &Bench, graph: &LinkedGraph, splits: u64, epochs: &str) -> Result<Option<Value>> {
    let Some(data) = crate::real_data() else { return Ok(None) };
    let data = data.to_str().context("the path of the datasets is not text")?;
    let import = graph.import.replace("DATA", data);
    let mut found = vec![Vec::new(); INPUTS.len()];
    for seed in 1..=splits {
        let words = format!("import linked --overwrite {import} --hold-out valid:5%,test:10% --seed {seed}");
        bench.json(&words.split(' ').collect::<Vec<_>>())?;
        for ((name, flags), found) in INPUTS.iter().zip(&mut found) {
            let words = format!(
                "train linked {} {flags} --batch {} --epochs {epochs} --eval-every 5 --seed {seed} --device cpu --out linked-run",
                link::GAE,
                graph.batch
            );
            let summary = bench.json(&words.split_whitespace().collect::<Vec<_>>())?;
            fs::remove_dir_all(bench.path("linked-run"))?;
            let auc = summary["test"]["auc"].as_f64().context("a test AUC")? * 100.0;
            println!("{} {name}: AUC {auc:.2}", graph.name);
            found.push(auc);
        }
    }
    let mut rows = Vec::new();
    for ((name, flags), aucs) in INPUTS.iter().zip(&found) {
        let mean = aucs.iter().sum::<f64>() / aucs.len() as f64;
        ensure!(mean >= LEARNED, "{} {name}: AUC {mean:.2} in the mean", graph.name);
        rows.push(json!({ "inputs": name, "flags": flags, "auc": mean, "by_split": aucs }));
    }
    let (batch, epochs) = (graph.batch, epochs);
    Ok(Some(
        json!({ "dataset": graph.name, "batch": batch, "epochs": epochs, "flags": link::GAE, "inputs": rows }),
    ))
}
