//! The whole command, from start to exit: preparing, epochs, validation after each, test. From disk inside a cgroup,
//! beside everything in memory.

use super::{Bench, ROUNDS, ginex, number, succeed};
use crate::cgroup::Group;
use anyhow::{Context, Result, ensure};
use esker_types::median;
use serde_json::{Value, json};
use std::fs;
use std::time::Instant;

/// The size of the comparison.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Nodes of the graph.
    pub nodes: u64,
    /// Seed nodes per batch.
    pub batch: u64,
    /// Hidden columns.
    pub hidden: u64,
    /// Bytes of the cgroup.
    pub group_bytes: u64,
    /// Rounds in turn.
    pub rounds: usize,
}

/// One run, from nothing. Its summary, with the seconds from start to exit.
fn one(bench: &Bench, size: Size, strategy: &str, group: Option<&Group>) -> Result<Value> {
    for left in ["graph/derived", "run"] {
        fs::remove_dir_all(bench.path(left)).ok();
    }
    let (batch, hidden) = (size.batch.to_string(), size.hidden.to_string());
    let words =
        ["train", "graph", "--fanout", "10,10,10", "--layers", "3", "--batch", &batch, "--hidden", &hidden];
    let more = ["--epochs", "3", "--strategy", strategy, "--out", "run", "--json"];
    let command = bench.esker(&[&words[..], &more].concat());
    let (mut command, started) = match group {
        Some(group) => (group.wrap(&command), Instant::now()),
        None => (command, Instant::now()),
    };
    let output = succeed(&mut command)?;
    let seconds = started.elapsed().as_secs_f64();
    let summary: Value = serde_json::from_slice(&output.stdout)?;
    let key = |key: &str| summary[key].clone();
    Ok(json!({
        "strategy": strategy, "seconds": seconds, "wall_seconds": key("wall_seconds"), "loss_digest": key("loss_digest"),
        "test": key("test"), "evaluation": key("evaluation"), "peak_host_bytes": key("peak_host_bytes"), "budget_host_bytes": key("budget_host_bytes"),
    }))
}

/// `diskgnn` and `ginex` inside a cgroup, `memory` without a limit, in turn.
pub fn beside_memory(bench: &Bench, size: Size) -> Result<Value> {
    let nodes = size.nodes.to_string();
    let words = ["generate", "graph", "--nodes", &nodes, "--degree", "15", "--dim", "128", "--seed", "1"];
    bench.json(&[&words[..], &["--train", "0.05", "--valid", "0.01", "--test", "0.02"]].concat())?;
    let mut all = Vec::new();
    for _ in 0..size.rounds {
        let mut round = serde_json::Map::new();
        for strategy in ["memory", "diskgnn", "ginex"] {
            let group = (strategy != "memory").then(|| Group::create(size.group_bytes)).transpose()?;
            let found = one(bench, size, strategy, group.as_ref())?;
            println!("{found}");
            round.insert(strategy.into(), found);
        }
        all.push(Value::Object(round));
    }
    let same = |key: &str| {
        let found = all.iter().flat_map(|round| ["memory", "diskgnn", "ginex"].map(|name| &round[name][key]));
        found.collect::<Vec<_>>().windows(2).all(|pair| pair[0] == pair[1])
    };
    ensure!(same("loss_digest") && same("test"), "losses or metrics differ: {all:#?}");
    let times = |strategy: &str| -> Result<f64> {
        let ratio = |round: &Value| {
            let seconds = |name: &str| round[name]["seconds"].as_f64().context("seconds");
            Ok(seconds(strategy)? / seconds("memory")?)
        };
        Ok(median(&all.iter().map(ratio).collect::<Result<Vec<_>>>()?))
    };
    Ok(json!({
        "diskgnn_over_memory": times("diskgnn")?, "ginex_over_memory": times("ginex")?,
        "ginex_evaluation": evaluation(bench, size, &all)?, "group_bytes": size.group_bytes, "rounds": all,
    }))
}

/// Validation and test of `ginex` beside the time that its missed rows take at the disk's rate, and beside the same
/// evaluation in memory, which reads nothing.
fn evaluation(bench: &Bench, size: Size, rounds: &[Value]) -> Result<Value> {
    // Three validations and a test, see `beside_memory`.
    let batches = size.nodes as f64 * (3.0 * 0.01 + 0.02) / size.batch as f64;
    let of = |round: &Value, key: &str| number(&round["ginex"]["evaluation"], key);
    let first = rounds.first().context("a round at least")?;
    let limit = ginex::read_limit(bench, "graph", 512, of(first, "bytes_useful")? / batches)?;
    let seconds = |round: &Value, strategy: &str| -> Result<f64> {
        let clock = &round[strategy]["wall_seconds"];
        Ok(number(clock, "validation")? + number(clock, "test")?)
    };
    let ratio = |round: &Value| -> Result<[f64; 3]> {
        let reading = (of(round, "rows")? - of(round, "hits")?) / limit;
        let (found, computing) = (seconds(round, "ginex")?, seconds(round, "memory")?);
        Ok([found / reading, found / reading.max(computing), reading])
    };
    let found: Vec<[f64; 3]> = rounds.iter().map(ratio).collect::<Result<_>>()?;
    let middle = |index: usize| median(&found.iter().map(|ratios| ratios[index]).collect::<Vec<_>>());
    Ok(json!({
        "disk_rows_per_second": limit, "reading_seconds": middle(2), "over_reading": middle(0),
        "over_the_larger_of_reading_and_memory": middle(1),
    }))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let (nodes, group_bytes) = (4_000_000, 1_900_000_000);
    let found = beside_memory(bench, Size { nodes, batch: 1000, hidden: 256, group_bytes, rounds: ROUNDS })?;
    let ratio = found["diskgnn_over_memory"].as_f64().unwrap_or(f64::INFINITY);
    ensure!(ratio <= 1.2, "diskgnn took {ratio:.2} times as long as memory, 1.2 were promised: {found:#}");
    let ratio = number(&found["ginex_evaluation"], "over_the_larger_of_reading_and_memory")?;
    ensure!(ratio <= 1.1, "ginex evaluates in {ratio:.2} times the least, 1.1 were promised: {found:#}");
    Ok(found)
}
