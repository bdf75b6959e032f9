//! What `outre` costs in accuracy with its defaults, over several random seeds, against shuffled batches in memory (the
//! paper's Table 7). `outre` gives the losses of `memory` with the same history, so runs are in memory: by groups, and with
//! a history for all nodes where the default rule keeps one. That is the most that the default can cost.

use super::accuracy::{self, Case, import, mean_and_deviation};
use super::{Bench, number, succeed};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs;

/// How far below shuffled batches a mean accuracy may be.
#[derive(Clone, Copy)]
enum Allowed {
    /// Points.
    Points(f64),
    /// Points, or two standard errors of the difference if that is more.
    PointsOrNoise(f64),
}

/// WordNet with a learning rate that falls to zero: without, runs end in the noise of their last batches, and that of
/// batches by groups is larger.
const WORDNET_FALLING: &str = "--layers 2 --hidden 128 --fanout 10,10 --dropout 0.2 --lr 0.01 --epochs 12 --schedule cosine:0 --eval sampled --eval-every 4 --final-eval full";

/// A generated graph of the shape of graph M (in-degree 15, default homophily).
#[derive(Debug, Clone, Copy)]
pub struct ShapeOfM {
    /// Nodes.
    pub nodes: &'static str,
    /// Seed nodes per batch.
    pub batch: &'static str,
    /// Epochs.
    pub epochs: &'static str,
}

/// Accuracies in percent of both ways to train, for the same seeds.
struct BothWays {
    shuffled: Vec<f64>,
    groups: Vec<f64>,
    /// Whether the default rule keeps a history.
    has_history: bool,
    batches: f64,
    redundancy: [f64; 2],
}

/// Trains once. Returns the accuracy in percent and the summary.
fn accuracy(bench: &Bench, dataset: &str, flags: &[&str], seed: u64, how: &[&str]) -> Result<(f64, Value)> {
    fs::remove_dir_all(bench.path("accuracy")).ok();
    let seed = seed.to_string();
    let words = ["train", dataset, "--device", "cpu", "--out", "accuracy", "--seed", &seed];
    let summary = bench.json(&[&words[..], flags, how].concat())?;
    let found = summary["test"]["accuracy"].as_f64().context("a test accuracy")?;
    Ok((found * 100.0, summary))
}

/// Whether `outre` keeps a history by default: its memory then has a line for it.
fn keeps_history(bench: &Bench, dataset: &str, flags: &[&str]) -> Result<bool> {
    let words = ["train", dataset, "--device", "cpu", "--strategy", "outre", "--dry-run"];
    let output = succeed(&mut bench.esker(&[&words[..], flags].concat()))?;
    let shown = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&shown).contains("history: hidden rows"))
}

/// Trains with every seed both ways. `prepare` makes the dataset of a seed.
fn both_ways(
    bench: &Bench,
    dataset: &str,
    flags: &[&str],
    seeds: u64,
    mut prepare: impl FnMut(u64) -> Result<()>,
) -> Result<BothWays> {
    let batch = flags.windows(2).find(|pair| pair[0] == "--batch").map_or("1000", |pair| pair[1]);
    let mut found =
        BothWays { shuffled: vec![], groups: vec![], has_history: false, batches: 0.0, redundancy: [0.0; 2] };
    for seed in 1..=seeds {
        prepare(seed)?;
        bench.json(&["partition", dataset, "--batch", batch])?;
        found.batches = (number(&bench.json(&["info", dataset])?, "train")? / batch.parse::<f64>()?).floor();
        found.has_history = keeps_history(bench, dataset, flags)?;
        let all = if found.has_history { &["--history-rows", "1.0"][..] } else { &[] };
        let groups = [&["--order", "groups"][..], all].concat();
        let ways = [(&["--order", "shuffled"][..], &mut found.shuffled), (&groups[..], &mut found.groups)];
        for (way, (how, accuracies)) in ways.into_iter().enumerate() {
            let (percent, summary) = accuracy(bench, dataset, flags, seed, how)?;
            accuracies.push(percent);
            found.redundancy[way] = number(&summary, "redundancy").unwrap_or(f64::NAN);
        }
    }
    Ok(found)
}

impl BothWays {
    /// The result as a row, and what is wrong with it.
    fn row(&self, name: &str, model: &str, allowed: Allowed) -> (Value, Option<String>) {
        let (shuffled, groups) = (mean_and_deviation(&self.shuffled), mean_and_deviation(&self.groups));
        let count = self.shuffled.len() as f64;
        let noise = 2.0 * ((shuffled.1.powi(2) + groups.1.powi(2)) / count).sqrt();
        let most = match allowed {
            Allowed::Points(points) => points,
            Allowed::PointsOrNoise(points) => points.max(noise),
        };
        let worse = shuffled.0 - groups.0;
        println!(
            "{name} {model}: {:.2} +- {:.2} shuffled, {:.2} +- {:.2} as outre{}; {worse:.2} worse, {most:.2} allowed",
            shuffled.0,
            shuffled.1,
            groups.0,
            groups.1,
            if self.has_history { " with a history for all nodes" } else { " without a history" }
        );
        let row = json!({
            "dataset": name, "model": model, "batches": self.batches, "history": self.has_history,
            "shuffled": { "mean": shuffled.0, "deviation": shuffled.1, "runs": self.shuffled, "redundancy": self.redundancy[0] },
            "outre": { "mean": groups.0, "deviation": groups.1, "runs": self.groups, "redundancy": self.redundancy[1] },
            "points_worse": worse, "points_allowed": most,
        });
        (row, (worse > most).then(|| format!("{name} {model}: {worse:.2} points worse, {most:.2} allowed")))
    }
}

/// A real dataset with the recipe of its accuracy.
fn real(
    bench: &Bench,
    case: &Case,
    data: &str,
    seeds: u64,
    allowed: Allowed,
) -> Result<(Value, Option<String>)> {
    let train = if case.dataset == "wordnet-synsets" { WORDNET_FALLING } else { case.train };
    let mut flags = vec!["--model", case.model];
    flags.extend(train.split(' '));
    let found = both_ways(bench, "real", &flags, seeds, |seed| {
        // Splits that do not depend on the random seed are imported once.
        match seed == 1 || case.import.contains("SEED") || case.import.contains("INDEX") {
            true => import(bench, case.import, case.dataset, data, seed),
            false => Ok(()),
        }
    })?;
    Ok(found.row(case.dataset, case.model, allowed))
}

/// A generated graph: the cost of the default in points, which must be at most `most`.
pub fn generated(bench: &Bench, size: ShapeOfM, seeds: u64, most: f64) -> Result<Value> {
    let words = ["generate", "graph", "--overwrite", "--nodes", size.nodes, "--degree", "15", "--dim", "64"];
    bench.json(&[&words[..], &["--train", "0.2", "--seed", "1"]].concat())?;
    let flags = ["--fanout", "10,10", "--hidden", "64", "--schedule", "cosine:0", "--batch", size.batch];
    let flags =
        [&flags[..], &["--epochs", size.epochs, "--eval", "none", "--final-eval", "sampled"]].concat();
    let found = both_ways(bench, "graph", &flags, seeds, |_| Ok(()))?;
    match found.row("shape of M", "sage", Allowed::Points(most)) {
        (row, None) => Ok(row),
        (row, Some(wrong)) => bail!("{wrong}\n{row:#}"),
    }
}

/// Real datasets by name and model. `None` if they are not beside the checkout.
pub fn real_graphs(bench: &Bench, names: &[(&str, &str)], seeds: u64) -> Result<Option<Value>> {
    let Some(data) = crate::real_data() else { return Ok(None) };
    let data = data.to_str().context("the path of the datasets is not text")?;
    let (mut rows, mut wrong) = (Vec::new(), Vec::new());
    for (name, model) in names {
        let case = accuracy::find(name, model).with_context(|| format!("no recipe for {name} {model}"))?;
        let allowed = match *name {
            "wordnet-synsets" => Allowed::Points(0.3),
            _ => Allowed::PointsOrNoise(0.5),
        };
        let (row, short) = real(bench, case, data, seeds, allowed)?;
        rows.push(row);
        wrong.extend(short);
    }
    if !wrong.is_empty() {
        bail!("{}\n{rows:#?}", wrong.join("\n"));
    }
    Ok(Some(rows.into()))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let m = ShapeOfM { nodes: "300000", batch: "50", epochs: "3" };
    let generated = generated(bench, m, 5, 0.2)?;
    let names = [
        ("wordnet-synsets", "sage"),
        ("pubmed", "gcn"),
        ("coauthor_cs", "sage"),
        ("amazon_computers", "sage"),
    ];
    let real = real_graphs(bench, &names, 5)?;
    // Rows of 31 241 columns are slow to aggregate.
    let wide = real_graphs(bench, &[("deezer_europe", "sage")], 2)?;
    Ok(json!({ "shape_of_m": generated, "real": real, "deezer_europe": wide }))
}
