//! Generated graphs: within the budget, and the same bytes for any number of threads.

use super::Bench;
use crate::cgroup::Group;
use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::fs;

/// Generates papers100m at `scale` with 1 and 2 threads inside a cgroup as large as the budget, and compares bytes.
pub fn same_bytes(bench: &Bench, scale: &str, memory_bytes: u64, grouped: bool) -> Result<Value> {
    let memory = memory_bytes.to_string();
    let mut runs = Vec::new();
    for threads in ["1", "2"] {
        let out = format!("threads-{threads}");
        let words = [
            "generate",
            &out,
            "--preset",
            "papers100m",
            "--scale",
            scale,
            "--memory",
            &memory,
            "--threads",
            threads,
            "--overwrite",
            "--json",
        ];
        let mut command = bench.esker(&words);
        let group = if grouped { Some(Group::create(memory_bytes)?) } else { None };
        if let Some(group) = &group {
            command = group.wrap(&command);
        }
        let found = bench.json_of(&mut command)?;
        let peak = found["peak_host_bytes"].as_u64().unwrap_or(u64::MAX);
        ensure!(peak <= memory_bytes, "{memory_bytes} bytes were promised, {peak} were used");
        runs.push(json!({
            "threads": threads, "nodes": found["nodes"], "edges": found["edges"], "bytes": found["bytes"], "id": found["id"],
            "seconds": found["seconds"], "peak_host_bytes": peak, "group_peak_bytes": group.and_then(|g| g.peak_bytes()),
        }));
    }
    // The id is a hash over every block; the manifests contain everything else.
    ensure!(runs[0]["id"] == runs[1]["id"], "1 and 2 threads gave different bytes");
    let manifest = |out: &str| fs::read(bench.path(out).join("esker.json"));
    ensure!(manifest("threads-1")? == manifest("threads-2")?, "1 and 2 threads gave different manifests");
    bench.json(&["verify", "threads-1"])?;
    Ok(
        json!({ "scale": scale, "budget_host_bytes": memory_bytes, "group_limit_bytes": grouped.then_some(memory_bytes), "runs": runs }),
    )
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    same_bytes(bench, "0.05", 512 << 20, true)
}
