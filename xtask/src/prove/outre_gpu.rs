//! OUTRE on a GPU (the paper's Table 6 and Figure 4): epochs beside ginex and memory with a tenth of the feature rows in host
//! memory, in turn. The history is in the GPU's memory.

use super::outre_speed::{DiskMemory, Size, graph, run};
use super::{Bench, ROUNDS, number};
use crate::prove::ginex::drop_caches;
use anyhow::{Result, ensure};
use esker_types::median;
use serde_json::{Value, json};

/// What is promised: `outre` against `ginex`, and a history for all nodes against none in memory.
const TIMES_GINEX: f64 = 1.4;
const TIMES_MEMORY: f64 = 1.3;

/// Runs that are compared: name and flags.
fn ways(size: Size, memory: &str) -> Vec<(&'static str, Vec<&str>)> {
    // A tenth of 200 000 rows of 4 KiB.
    let disk = ["--memory", memory, "--feature-cache", "80MiB"];
    let with = |more: &[&'static str]| [&disk[..], more].concat();
    let stale = ["--staleness", size.staleness];
    vec![
        ("ginex", with(&["--strategy", "ginex"])),
        ("ginex-groups", with(&["--strategy", "ginex", "--order", "groups"])),
        ("outre", with(&["--strategy", "outre", "--staleness", size.staleness])),
        ("memory", vec!["--order", "groups"]),
        ("memory-all", [&["--order", "groups", "--history-rows", "1.0"], &stale[..]].concat()),
        ("twin", vec!["--order", "groups", "--history-set", "outre"]),
    ]
}

/// All ways in turn, several times.
pub fn epochs(bench: &Bench, size: Size, rounds: usize) -> Result<Value> {
    graph(bench, size)?;
    let memory = format!("{}B", size.budget(bench)?);
    let ways = ways(size, &memory);
    let (mut seconds, mut last) = (vec![Vec::new(); ways.len()], vec![Value::Null; ways.len()]);
    for _ in 0..rounds {
        for (at, (name, flags)) in ways.iter().enumerate() {
            drop_caches();
            last[at] = run(bench, size, name, flags)?;
            seconds[at].push(number(&last[at], "seconds")?);
        }
    }
    let of = |name: &str| ways.iter().position(|(way, _)| *way == name).unwrap_or(0);
    let same = |one: &str, other: &str| last[of(one)]["loss_digest"] == last[of(other)]["loss_digest"];
    ensure!(same("memory", "ginex-groups"), "ginex and memory differ: {last:#?}");
    ensure!(same("twin", "outre"), "outre and memory with its history differ: {last:#?}");
    let ratio = |one: &str, other: &str| median(&seconds[of(one)]) / median(&seconds[of(other)]);
    let table: Vec<Value> = ways
        .iter()
        .zip(&seconds)
        .zip(&last)
        .map(|(((name, flags), seconds), last)| json!({ "run": name, "flags": flags, "seconds": seconds, "last": last }))
        .collect();
    Ok(json!({
        "times_as_fast_as_ginex": ratio("ginex", "outre"),
        "times_as_fast_as_ginex_by_groups": ratio("ginex-groups", "outre"),
        "history_for_all_in_memory": ratio("memory", "memory-all"), "runs": table,
    }))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let size = Size {
        nodes: 200_000,
        dim: 1024,
        homophily: "0.7",
        train: "0.1",
        test: "0.02",
        fanout: "10,10,10",
        batch: "250",
        hidden: "256",
        memory: DiskMemory::Bytes(4 << 30),
        epochs: "2",
        staleness: "100",
        device: "cuda",
    };
    let found = epochs(bench, size, ROUNDS)?;
    let ginex = number(&found, "times_as_fast_as_ginex")?;
    let memory = number(&found, "history_for_all_in_memory")?;
    println!(
        "{found:#}\n{ginex:.2} times as fast as ginex; in memory a history makes {memory:.2} times as fast"
    );
    ensure!(
        ginex >= TIMES_GINEX,
        "{ginex:.2} times as fast as ginex, {TIMES_GINEX} were promised: {found:#}"
    );
    ensure!(
        memory >= TIMES_MEMORY,
        "a history for all: {memory:.2} times, {TIMES_MEMORY} promised: {found:#}"
    );
    Ok(found)
}
