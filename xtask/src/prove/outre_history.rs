//! OUTRE's history of hidden rows: epochs beside the other strategies with a tenth of the features in memory (the
//! paper's Table 6 and Figure 4), and accuracy by staleness (Table 9 and Figure 5). Ratios are of runs in turn.

use super::accuracy::{WORDNET, import};
use super::{Bench, number};
use anyhow::{Context, Result, ensure};
use esker_types::median;
use serde_json::{Value, json};
use std::fs;

/// The size of a comparison.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Nodes of the graph.
    pub nodes: u64,
    /// Features per node.
    pub dim: u64,
    /// Share of edges inside a class.
    pub homophily: &'static str,
    /// Seed nodes per batch.
    pub batch: &'static str,
    /// Hidden columns.
    pub hidden: &'static str,
    /// Memory of strategies that work from disk.
    pub memory: &'static str,
    /// Epochs. The first one is not measured.
    pub epochs: &'static str,
    /// Batches for which rows of a history are used.
    pub staleness: &'static str,
    /// The device that trains.
    pub device: &'static str,
}

/// A graph with communities.
pub(super) fn graph(bench: &Bench, size: Size) -> Result<()> {
    let (nodes, dim, classes) =
        (size.nodes.to_string(), size.dim.to_string(), (size.nodes / 1000).max(8).to_string());
    let words = ["generate", "graph", "--nodes", &nodes, "--degree", "15", "--dim", &dim, "--seed", "1"];
    let also = ["--classes", &classes, "--homophily", size.homophily, "--train", "0.1", "--overwrite"];
    bench.json(&[&words[..], &also].concat())?;
    bench.json(&["partition", "graph", "--batch", size.batch]).map(drop)
}

/// One run: its summary, and what it did in epochs after the first, per epoch.
pub(super) fn run(bench: &Bench, size: Size, name: &str, flags: &[&str]) -> Result<Value> {
    fs::remove_dir_all(bench.path(name)).ok();
    let words = ["train", "graph", "--fanout", "10,10,10", "--batch", size.batch, "--hidden", size.hidden];
    let more = ["--epochs", size.epochs, "--eval", "none", "--device", size.device, "--out", name];
    let summary = bench.json(&[&words[..], &more, flags].concat())?;
    let epochs = summary["epochs"].as_array().context("epochs")?;
    let each = |key: &str| -> f64 {
        median(&epochs.iter().skip(1).filter_map(|epoch| epoch[key].as_f64()).collect::<Vec<_>>())
    };
    let found = json!({
        "run": name, "flags": flags, "seconds": each("seconds"), "bytes_read": each("bytes_read"), "redundancy": each("redundancy"),
        "history": epochs.last().map(|epoch| epoch["history"].clone()), "split": summary["history_split"],
        "loss_digest": summary["loss_digest"], "loss": epochs.last().map(|epoch| epoch["loss"].clone()),
        "peak_host_bytes": summary["peak_host_bytes"],
    });
    println!("{found}");
    Ok(found)
}

/// Epochs of `outre` beside those of the other strategies.
pub fn speed(bench: &Bench, size: Size) -> Result<Value> {
    graph(bench, size)?;
    let disk = ["--memory", size.memory];
    let with = |strategy: &'static str, more: &[&'static str]| -> Vec<&str> {
        [&["--strategy", strategy][..], &disk, more].concat()
    };
    let ginex = run(bench, size, "ginex", &with("ginex", &[]))?;
    let groups = run(bench, size, "ginex-groups", &with("ginex", &["--order", "groups"]))?;
    let outre = run(bench, size, "outre", &with("outre", &["--staleness", size.staleness]))?;
    let diskgnn = run(bench, size, "diskgnn", &with("diskgnn", &[]))?;
    let mmap = run(bench, size, "mmap", &["--strategy", "mmap"])?;
    let memory = run(bench, size, "memory", &["--order", "groups"])?;
    let for_all = ["--order", "groups", "--history-rows", "1.0", "--staleness", size.staleness];
    let all = run(bench, size, "memory-all", &for_all)?;
    let twin = run(bench, size, "twin", &["--order", "groups", "--history-set", "outre"])?;
    ensure!(twin["loss_digest"] == outre["loss_digest"], "outre and memory differ: {twin} {outre}");
    ensure!(memory["loss_digest"] == groups["loss_digest"], "ginex and memory differ: {memory} {groups}");
    let ratio = |key: &str, one: &Value, other: &Value| {
        Ok::<f64, anyhow::Error>(number(one, key)? / number(other, key)?)
    };
    for (name, other) in [("ginex", &ginex), ("ginex by groups", &groups)] {
        let fewer = ratio("redundancy", &outre, other)?;
        ensure!(fewer < 1.0, "outre requests {fewer:.2} of the rows of {name}");
    }
    Ok(json!({
        "rows_of_ginex": ratio("redundancy", &outre, &ginex)?, "bytes_read_of_ginex": ratio("bytes_read", &outre, &ginex)?,
        "times_as_fast_as_ginex": ratio("seconds", &ginex, &outre)?, "times_as_fast_as_ginex_by_groups": ratio("seconds", &groups, &outre)?,
        "times_as_fast_as_diskgnn": ratio("seconds", &diskgnn, &outre)?, "times_as_fast_as_mmap": ratio("seconds", &mmap, &outre)?,
        "history_for_all_in_memory": { "rows": ratio("redundancy", &all, &memory)?, "times_as_fast": ratio("seconds", &memory, &all)? },
        "runs": [ginex, groups, outre, diskgnn, mmap, memory, all, twin],
    }))
}

/// Accuracy, requested rows and seconds by staleness, with a history for all nodes, beside shuffled batches without one.
fn by_staleness(
    bench: &Bench,
    dataset: &str,
    flags: &[&str],
    staleness: &[&str],
    seeds: u64,
) -> Result<Value> {
    let mut found = Vec::new();
    let shuffled = [&["--order", "shuffled"][..]];
    let stale = staleness
        .iter()
        .map(|count| vec!["--order", "groups", "--history-rows", "1.0", "--staleness", count]);
    for how in shuffled.into_iter().map(<[&str]>::to_vec).chain(stale) {
        let (mut accuracy, mut seconds, mut redundancy, mut age) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for seed in 0..seeds {
            fs::remove_dir_all(bench.path("stale")).ok();
            let seed = (seed + 1).to_string();
            let words = ["train", dataset, "--device", "cpu", "--seed", &seed, "--out", "stale"];
            let summary = bench.json(&[&words[..], flags, &how].concat())?;
            accuracy.push(summary["test"]["accuracy"].as_f64().context("accuracy")?);
            let epoch = summary["epochs"].as_array().and_then(|epochs| epochs.last()).context("an epoch")?;
            seconds.push(number(epoch, "seconds")?);
            redundancy.push(number(epoch, "redundancy")?);
            age.extend(epoch["history"]["mean_age"].as_f64());
        }
        let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len().max(1) as f64;
        let deviation = (accuracy.iter().map(|one| (one - mean(&accuracy)).powi(2)).sum::<f64>()
            / accuracy.len().max(2).saturating_sub(1) as f64)
            .sqrt();
        let row = json!({
            "how": how.join(" "), "accuracy": mean(&accuracy), "deviation": deviation, "seeds": seeds,
            "epoch_seconds": median(&seconds), "redundancy": median(&redundancy), "mean_age": mean(&age),
        });
        println!("{dataset}: {row}");
        found.push(row);
    }
    Ok(json!({ "dataset": dataset, "flags": flags, "rows": found }))
}

/// Accuracy by staleness on a generated graph. A history that is fresh enough costs little.
pub fn staleness(bench: &Bench, size: Size, staleness: &[&str], seeds: u64) -> Result<Value> {
    graph(bench, size)?;
    let flags =
        ["--fanout", "10,10,10", "--batch", size.batch, "--hidden", size.hidden, "--epochs", size.epochs];
    let found = by_staleness(bench, "graph", &flags, staleness, seeds)?;
    let rows = found["rows"].as_array().context("rows")?;
    let (plain, fresh, stale) = (&rows[0], &rows[1], rows.last().context("a row")?);
    ensure!(
        number(stale, "redundancy")? < number(fresh, "redundancy")?,
        "a history requests fewer rows: {stale} {fresh}"
    );
    let worse = number(plain, "accuracy")? - number(stale, "accuracy")?;
    ensure!(worse < 0.05, "a history costs {:.1} points", worse * 100.0);
    Ok(found)
}

pub(super) fn full_speed(bench: &Bench) -> Result<Value> {
    let wide = Size {
        nodes: 1_000_000,
        dim: 1024,
        homophily: "0.7",
        batch: "250",
        hidden: "256",
        memory: "600MiB",
        epochs: "2",
        staleness: "100",
        device: "cpu",
    };
    let found = speed(bench, wide)?;
    let communities = speed(bench, Size { homophily: "0.98", ..wide })?;
    // Rows of 512 bytes: a row of the history takes as much as two of them.
    let narrow = speed(bench, Size { dim: 128, memory: "300MiB", ..wide })?;
    Ok(json!({ "wide_rows": found, "wide_rows_homophily_098": communities, "rows_of_512_bytes": narrow }))
}

pub(super) fn full_history(bench: &Bench) -> Result<Value> {
    let size = Size {
        nodes: 100_000,
        dim: 64,
        homophily: "0.7",
        batch: "100",
        hidden: "64",
        memory: "1GiB",
        epochs: "10",
        staleness: "100",
        device: "cpu",
    };
    let counts = ["1", "10", "30", "100", "300", "1000"];
    let generated = staleness(bench, size, &counts, 3)?;
    let wordnet = match crate::real_data() {
        None => Value::Null,
        Some(data) => {
            let data = data.to_str().context("the path of the datasets is not text")?;
            import(bench, WORDNET, "wordnet-synsets", data, 1)?;
            let flags = ["--fanout", "10,10,10", "--batch", "250", "--hidden", "64", "--epochs", "10"];
            by_staleness(bench, "real", &flags, &["1", "30", "100"], 3)?
        }
    };
    Ok(json!({ "generated": generated, "wordnet": wordnet }))
}
