//! Link prediction beside its peers on two threads: DistMult on FB15k-237 as the Marius authors configured it, the same
//! arithmetic in PyTorch, and PyKEEN's training loop, in turn.

use super::{Bench, ROUNDS, link, succeed};
use anyhow::{Context, Result, ensure};
use esker_types::median;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Smallest ratio of PyTorch's epoch to ours.
const FASTER: f64 = 2.0;

/// The size of the comparison.
pub struct Size {
    /// Rounds of Esker and its peers in turn.
    pub rounds: usize,
    /// Measured epochs of Esker in a round.
    pub epochs: u32,
    /// Smallest ratio of PyTorch's epoch to ours.
    pub faster: f64,
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let peers = crate::root().join("target/peers-links");
    succeed(Command::new(crate::root().join("bench/peers/setup_links.sh")).arg(&peers))?;
    let python = python().context("bench/peers/setup_links.sh left no environment behind")?;
    let found = beside(bench, &python, &Size { rounds: ROUNDS, epochs: 4, faster: FASTER })?;
    found.context("FB15k-237 is not beside the checkout")
}

/// The Python that has the peers, if `bench/peers/setup_links.sh` has made it.
pub fn python() -> Option<PathBuf> {
    let directory = crate::root().join("target/peers-links");
    directory.join("ready").exists().then(|| directory.join("bin/python"))
}

/// Epochs in turn; ratios are taken inside a round. `None` if the dataset is missing.
pub fn beside(bench: &Bench, python: &Path, size: &Size) -> Result<Option<Value>> {
    let Some(data) = crate::real_data() else { return Ok(None) };
    ensure!(link::import_facts(bench)?, "FB15k-237 is not beside the checkout");
    let script = crate::root().join("bench/peers/link.py");
    let triples = data.join("fb15k-237");
    let peer = |words: &[&str]| bench.json_of(Command::new(python).arg(&script).arg(&triples).args(words));
    let (mut rounds, mut ratios) = (Vec::new(), Vec::new());
    for round in 0..size.rounds {
        let ours = ours(bench, size.epochs)?;
        let (sparse, dense) = (peer(&["--gradients", "sparse"])?, peer(&["--gradients", "dense"])?);
        let seconds = |value: &Value| value["seconds_per_epoch"].as_f64().unwrap_or(f64::INFINITY);
        // The better one counts.
        let torch = if seconds(&sparse) < seconds(&dense) { &sparse } else { &dense };
        println!("round {round}: an epoch takes {:.2} s, PyTorch's {:.2} s", seconds(&ours), seconds(torch));
        ratios.push(seconds(torch) / seconds(&ours));
        rounds.push(json!({ "esker": ours, "pytorch_sparse": sparse, "pytorch_dense": dense }));
    }
    // It may not be installed.
    let pykeen = match peer(&["--peer", "pykeen"]) {
        Ok(found) => found,
        Err(error) => format!("{error:#}").lines().last().unwrap_or_default().into(),
    };
    let ratio = median(&ratios);
    println!("PyTorch takes {ratio:.2} times as long; PyKEEN: {pykeen}");
    ensure!(ratio >= size.faster, "{ratio:.2} times as fast as PyTorch, {} was asked", size.faster);
    Ok(Some(json!({
        "times_as_fast_as_pytorch": ratio, "ratios": ratios, "pykeen": pykeen, "rounds": rounds, "flags": link::MARIUS,
    })))
}

/// Seconds of an epoch of Esker, without evaluation.
fn ours(bench: &Bench, epochs: u32) -> Result<Value> {
    let out = "beside-peers";
    let words = format!(
        "train fb {} --encoder none --device cpu --threads 2 --epochs {epochs} --eval none --final-eval none --out {out}",
        link::MARIUS
    );
    let found = bench.json(&words.split(' ').collect::<Vec<_>>())?;
    fs::remove_dir_all(bench.path(out))?;
    let all = found["epochs"].as_array().context("epochs")?;
    let seconds: Vec<f64> = all.iter().filter_map(|epoch| epoch["seconds"].as_f64()).collect();
    Ok(json!({ "seconds_per_epoch": median(&seconds), "epochs": seconds }))
}
