//! OUTRE's history by its staleness and its hops (the paper's Tables 9 and 11): accuracy, requested rows, what pulls save,
//! and seconds. By default a row is used for a hundredth of an epoch: up to there its cost in accuracy is bounded. What older
//! rows cost is measured and not promised.

use super::outre_speed::{DiskMemory, Size, graph};
use super::{Bench, ROUNDS, number, side_by_side};
use crate::prove::accuracy::mean_and_deviation;
use anyhow::{Context, Result, ensure};
use esker_types::median;
use serde_json::{Value, json};
use std::fs;

/// Runs at a time.
const MOST_RUNS: usize = 8;

/// What is compared.
#[derive(Debug, Clone, Copy)]
pub struct HistoryProof {
    /// The graph and its training.
    pub size: Size,
    /// Batches for which rows are used.
    pub staleness: &'static [u32],
    /// Hops whose rows are pulled, with the staleness of `size`.
    pub hops: &'static [&'static str],
    /// Random seeds of accuracies.
    pub seeds: u64,
    /// How far below batches by groups without a history the accuracy may be, in points, up to a hundredth of an epoch and
    /// with rows of one hop, as by default. Or two standard errors of the difference, if that is more.
    pub most_points: f64,
}

/// A way to train.
struct Way {
    name: String,
    /// Hops that are pulled, if they are given.
    hops: Option<&'static str>,
    flags: Vec<String>,
    /// Its staleness; 0 without a history.
    staleness: u32,
}

impl Way {
    fn new(name: String, flags: &[&str], staleness: u32) -> Way {
        Way { name, hops: None, flags: flags.iter().map(|flag| flag.to_string()).collect(), staleness }
    }
}

impl HistoryProof {
    /// Shuffled, by groups without a history, by staleness, by hops.
    fn ways(&self) -> Vec<Way> {
        let mut ways = vec![
            Way::new("shuffled".into(), &["--order", "shuffled"], 0),
            Way::new("groups".into(), &["--order", "groups"], 0),
        ];
        let all = ["--order", "groups", "--history-rows", "1.0", "--staleness"];
        for staleness in self.staleness {
            let count = staleness.to_string();
            ways.push(Way::new(format!("S {count}"), &[&all[..], &[&count]].concat(), *staleness));
        }
        for hops in self.hops {
            let flags = [&all[..], &[self.size.staleness, "--history-hop", hops]].concat();
            let staleness = self.size.staleness.parse().unwrap_or(u32::MAX);
            let way = Way::new(format!("hops {hops}, S {}", self.size.staleness), &flags, staleness);
            ways.push(Way { hops: Some(*hops), ..way });
        }
        ways
    }
}

/// Trains once, and tests. `name` is the run's directory.
fn train(bench: &Bench, size: Size, name: &str, seed: u64, threads: usize, way: &Way) -> Result<Value> {
    fs::remove_dir_all(bench.path(name)).ok();
    let (seed, threads) = (seed.to_string(), threads.to_string());
    let words = ["train", "graph", "--device", size.device, "--out", name, "--seed", &seed];
    let shape = ["--fanout", size.fanout, "--batch", size.batch, "--hidden", size.hidden];
    // With the default rate, runs with small batches by groups differ by points from seed to seed.
    let also = ["--epochs", size.epochs, "--lr", "0.001", "--schedule", "cosine:0", "--threads", &threads];
    let eval = ["--eval", "none", "--final-eval", "sampled"];
    let flags: Vec<&str> = way.flags.iter().map(String::as_str).collect();
    let found = bench.json(&[&words[..], &shape, &also, &eval, &flags].concat())?;
    fs::remove_dir_all(bench.path(name)).ok();
    Ok(found)
}

/// The last epoch of a run.
fn last_epoch(summary: &Value) -> Result<&Value> {
    summary["epochs"].as_array().and_then(|epochs| epochs.last()).context("an epoch")
}

/// Accuracies of a way in percent, and what its epochs did.
fn row(way: &Way, runs: &[Value]) -> Result<Value> {
    let accuracies: Vec<f64> = runs
        .iter()
        .map(|run| run["test"]["accuracy"].as_f64().map(|share| share * 100.0).context("a test accuracy"))
        .collect::<Result<_>>()?;
    let (mean, deviation) = mean_and_deviation(&accuracies);
    let last = last_epoch(&runs[0])?;
    let digests: Vec<&Value> = runs.iter().map(|run| &run["loss_digest"]).collect();
    let row = json!({
        "way": way.name, "hops": way.hops, "flags": way.flags, "staleness": way.staleness, "accuracy": mean, "deviation": deviation,
        "accuracies": accuracies, "redundancy": last["redundancy"], "batches": last["batches"], "history": last["history"],
        "loss_digests": digests,
    });
    println!("{row}");
    Ok(row)
}

/// How far one way is below another in points, and how far it may be: `most`, or two standard errors of the difference.
fn points_below(one: &Value, other: &Value, most: f64) -> Result<(f64, f64)> {
    let count = one["accuracies"].as_array().map_or(1, Vec::len) as f64;
    let noise = (number(one, "deviation")?.powi(2) + number(other, "deviation")?.powi(2)) / count;
    Ok((number(other, "accuracy")? - number(one, "accuracy")?, most.max(2.0 * noise.sqrt())))
}

/// Accuracy and requested rows by staleness and hops, of runs side by side.
pub fn accuracies(bench: &Bench, proof: HistoryProof) -> Result<Value> {
    graph(bench, proof.size)?;
    let (ways, seeds) = (proof.ways(), proof.seeds as usize);
    let runs = side_by_side(ways.len() * seeds, MOST_RUNS, |case, threads| {
        let (way, seed) = (&ways[case / seeds], (case % seeds) as u64 + 1);
        train(bench, proof.size, &format!("run-{case}"), seed, threads, way)
    })?;
    let rows: Vec<Value> =
        ways.iter().zip(runs.chunks(seeds)).map(|(way, runs)| row(way, runs)).collect::<Result<_>>()?;
    check(&proof, &rows)?;
    Ok(rows.into())
}

/// What is promised: a staleness of 1 is no history, fresh rows cost little, older ones request less.
fn check(proof: &HistoryProof, rows: &[Value]) -> Result<()> {
    let (plain, by_staleness) = (&rows[1], &rows[2..2 + proof.staleness.len()]);
    let batches = number(plain, "batches")?;
    for row in &rows[2..] {
        let (staleness, way) = (number(row, "staleness")?, &row["way"]);
        if staleness <= 1.0 {
            ensure!(row["loss_digests"] == plain["loss_digests"], "{way} is no history: {row} {plain}");
            continue;
        }
        let pulls = row["history"]["pulls"].as_u64().unwrap_or(0);
        ensure!(pulls > 0, "{way} pulls nothing: {row}");
        let (below, most) = points_below(row, plain, proof.most_points)?;
        let is_bounded = staleness <= (batches / 100.0).max(2.0) && row["hops"].is_null();
        println!(
            "{way}: {below:.2} points below batches by groups{}",
            if is_bounded { format!(", {most:.2} allowed") } else { String::new() }
        );
        ensure!(!is_bounded || below <= most, "{way}: {below:.2} points below, {most:.2} allowed");
    }
    for pair in by_staleness.windows(2) {
        let (fresh, old) = (number(&pair[0], "redundancy")?, number(&pair[1], "redundancy")?);
        // Rows never get older than the run.
        ensure!(old <= fresh * 1.002, "an older history requests more: {} {}", pair[0], pair[1]);
    }
    let ends = by_staleness.first().zip(by_staleness.last()).context("several stalenesses")?;
    ensure!(number(ends.1, "redundancy")? < number(ends.0, "redundancy")?, "a history requests fewer rows");
    Ok(())
}

/// Seconds of an epoch after the first, by staleness and hops, in turn on the whole machine.
pub fn seconds(bench: &Bench, proof: HistoryProof, rounds: usize) -> Result<Value> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let ways: Vec<Way> = proof.ways().into_iter().skip(1).collect();
    let size = Size { epochs: "2", ..proof.size };
    let mut all = vec![Vec::new(); ways.len()];
    for _ in 0..rounds {
        for (way, seconds) in ways.iter().zip(&mut all) {
            let found = train(bench, size, "timed", 1, threads, way)?;
            seconds.push(number(last_epoch(&found)?, "seconds")?);
        }
    }
    let row = |(way, seconds): (&Way, &Vec<f64>)| {
        println!("{}: {:.2} s", way.name, median(seconds));
        json!({ "way": way.name, "epoch_seconds": median(seconds), "rounds": seconds })
    };
    Ok(ways.iter().zip(&all).map(row).collect())
}

/// A thousand batches an epoch, as on the paper's graphs; otherwise the shape of M.
const SIZE: Size = Size {
    nodes: 200_000,
    dim: 64,
    homophily: "0.7",
    train: "0.2",
    test: "0.2",
    fanout: "10,5,5",
    batch: "40",
    hidden: "64",
    memory: DiskMemory::TenthOfRows,
    epochs: "5",
    staleness: "10",
    device: "cpu",
};

const FULL: HistoryProof = HistoryProof {
    size: SIZE,
    staleness: &[1, 10, 30, 100, 300, 1000],
    // One hop is above. With three layers, all hops are two.
    hops: &["2"],
    seeds: 4,
    most_points: 0.5,
};

pub(super) fn full(bench: &Bench) -> Result<Value> {
    accuracies(bench, FULL)
}

pub(super) fn full_seconds(bench: &Bench) -> Result<Value> {
    graph(bench, SIZE)?;
    seconds(bench, FULL, ROUNDS)
}
