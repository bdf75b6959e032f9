//! Importing many random edges inside a memory cgroup.

use super::Bench;
use crate::cgroup::Group;
use anyhow::{Result, ensure};
use esker_types::median;
use esker_types::random::{Key, below};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

/// Writes `edges` random edges among `nodes` nodes as an npy of shape (2, edges).
pub fn write_edges(path: &Path, nodes: u64, edges: u64, seed: u64) -> Result<()> {
    let header = format!("{{'descr': '<i8', 'fortran_order': False, 'shape': (2, {edges}), }}\n");
    let mut writer = esker_io::SequentialWriter::create(path)?;
    writer.write_all(b"\x93NUMPY\x01\x00")?;
    writer.write_all(&(header.len() as u16).to_le_bytes())?;
    writer.write_all(header.as_bytes())?;
    let key = Key::new(seed);
    for at in 0..edges * 2 {
        writer.write_all(&below(key.at(at), nodes).to_le_bytes())?;
    }
    writer.finish()?;
    Ok(())
}

/// Imports `edges` random edges with `--memory` inside a cgroup of `limit_bytes`, and checks count, peak memory and
/// bytes. An error of [`Group::create`] is passed on.
pub fn in_group(bench: &Bench, edges: u64, memory_bytes: u64, limit_bytes: u64) -> Result<Value> {
    let group = Group::create(limit_bytes)?;
    let nodes = (edges / 10).max(1);
    write_edges(&bench.path("edges.npy"), nodes, edges, 1)?;
    let memory = memory_bytes.to_string();
    let words = [
        "import",
        "many",
        "--format",
        "npy",
        "--edges",
        "edges.npy",
        "--memory",
        &memory,
        "--overwrite",
        "--json",
    ];
    let found = bench.json_of(&mut group.wrap(&bench.esker(&words)))?;
    let peak = found["peak_host_bytes"].as_u64().unwrap_or(u64::MAX);
    ensure!(found["edges"] == edges, "{} of {edges} edges arrived", found["edges"]);
    ensure!(peak <= memory_bytes, "{memory_bytes} bytes were promised, {peak} were used");
    bench.json(&["verify", "many"])?;
    let seconds = found["seconds"].as_f64().unwrap_or(0.0);
    Ok(json!({
        "edges": edges, "nodes": found["nodes"], "budget_host_bytes": memory_bytes, "group_limit_bytes": limit_bytes,
        "peak_host_bytes": peak, "group_peak_bytes": group.peak_bytes(), "seconds": seconds,
        "nanoseconds_per_edge": seconds * 1e9 / edges as f64,
    }))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let (memory, limit) = (256 << 20, 384 << 20);
    // Interleaved, so that changes of the machine's speed affect both sizes.
    let mut runs = Vec::new();
    for edges in [10_000_000, 100_000_000, 10_000_000, 100_000_000, 10_000_000, 100_000_000] {
        runs.push(in_group(bench, edges, memory, limit)?);
    }
    let per_edge = |edges: u64| {
        let times: Vec<f64> = runs
            .iter()
            .filter(|run| run["edges"] == edges)
            .filter_map(|run| run["nanoseconds_per_edge"].as_f64())
            .collect();
        median(&times)
    };
    let ratio = per_edge(100_000_000) / per_edge(10_000_000);
    ensure!(
        (1.0 / 1.5..=1.5).contains(&ratio),
        "an edge of 100 million costs {ratio:.2} times one of 10 million"
    );
    Ok(json!({ "runs": runs, "cost_per_edge_100m_over_10m": ratio }))
}
