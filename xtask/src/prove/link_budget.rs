//! The promise of memory for links: the smallest budget that a run names is enough inside a cgroup, with embeddings, the
//! state of their optimizer and evaluation; a byte less is refused with the table.

use super::{Bench, link, succeed};
use crate::cgroup::Group;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;

const COMMON: &str =
    "train facts --task link --optimizer adagrad --lr 0.1 --epochs 2 --device cpu --threads 2";

/// Runs that take different memory: what dominates is the table, scores of all nodes, or an encoder.
const CASES: [(&str, &str); 5] = [
    ("table", "--encoder none --embeddings 64 --decoder distmult --negatives 200 --chunks 10 --batch 1000"),
    (
        "all nodes",
        "--encoder none --embeddings 32 --decoder complex --negatives all --n3 0.01 --edge-weights subsampling --batch 200 --embedding-optimizer adam",
    ),
    (
        "negatives of each edge",
        "--encoder none --embeddings 32 --decoder transe --negatives 50 --chunks 500 --batch 500",
    ),
    (
        "dropout",
        "--encoder none --embeddings 64 --decoder complex --input-dropout 0.3 --relation-dropout 0.3 --n3 0.01 --negatives 50 --chunks 10 --batch 2000",
    ),
    (
        "encoder",
        "--encoder sage --layers 1 --fanout 10 --embeddings 32 --decoder distmult --negatives 100 --batch 500",
    ),
];

/// The cgroup counts page cache and kernel memory of the process, too.
const KERNEL_BYTES: u64 = 16 << 20;

pub(super) fn full(bench: &Bench) -> Result<Value> {
    link::facts(bench, 200_000, 1_000_000)?;
    in_groups(bench)
}

/// All cases on `facts`.
pub fn in_groups(bench: &Bench) -> Result<Value> {
    let rows = CASES.iter().map(|(name, flags)| in_group(bench, name, flags).context(*name));
    rows.collect::<Result<Vec<Value>>>().map(Value::Array)
}

fn in_group(bench: &Bench, name: &str, flags: &str) -> Result<Value> {
    let words = |more: &[&str]| -> Vec<String> {
        let all = COMMON.split(' ').chain(flags.split(' ')).chain(more.iter().copied());
        all.map(String::from).collect()
    };
    let command = |more: &[&str]| {
        let words = words(more);
        bench.esker(&words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let planned = bench.json_of(&mut command(&["--memory", "64GiB", "--dry-run", "--json"]))?;
    let smallest = planned["smallest_bytes"].as_u64().context("the smallest budget")?;
    let less = format!("{}B", smallest - 1);
    let refused = command(&["--memory", &less, "--out", "refused"]).output()?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success(), "a byte less was not refused");
    ensure!(!bench.path("refused").exists(), "a refused run left a directory behind");
    for line in ["embeddings", "optimizer of embeddings", "evaluation: queries and ranks", "total"] {
        ensure!(said.contains(line), "the refusal has no `{line}`: {said}");
    }
    let (memory, limit) = (format!("{smallest}B"), smallest + KERNEL_BYTES);
    let group = Group::create(limit)?;
    let output = succeed(&mut group.wrap(&command(&["--memory", &memory, "--out", "budget", "--json"])))?;
    fs::remove_dir_all(bench.path("budget"))?;
    let summary: Value = serde_json::from_slice(&output.stdout)?;
    let peak = summary["peak_host_bytes"].as_u64().context("the peak")?;
    println!("{name:24} smallest {smallest}, peak {peak}");
    ensure!(peak <= smallest, "{name}: the run promised {smallest} bytes and took {peak}");
    Ok(json!({
        "case": name, "flags": flags, "smallest_budget_bytes": smallest, "peak_host_bytes": peak,
        "smallest_over_peak": smallest as f64 / peak as f64, "group_limit_bytes": limit, "mrr": summary["test"]["mrr"],
    }))
}
