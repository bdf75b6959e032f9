//! Sampling: the same for any number of threads, its speed beside PyG's and GraphBolt's, and what a trace takes.

use super::{Bench, succeed};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Makes a graph in which every node has `degree` in-neighbours on average.
pub fn graph(bench: &Bench, nodes: u64, degree: u64) -> Result<()> {
    let (nodes, degree) = (nodes.to_string(), degree.to_string());
    bench
        .json(&["generate", "graph", "--nodes", &nodes, "--degree", &degree, "--dim", "1", "--seed", "1"])?;
    Ok(())
}

/// Every form, batch by batch and in bulk, with 1, 2, 4 and 8 threads, has one digest.
pub fn same_for_any_threads(bench: &Bench, batch: &str, batches: &str) -> Result<Value> {
    let mut digests = Vec::new();
    for form in ["dense", "layered", "shadow"] {
        let words = [
            "bench",
            "sample",
            "graph",
            "--fanout",
            "10,10,10",
            "--batch",
            batch,
            "--batches",
            batches,
            "--form",
            form,
            "--threads",
            "1,2,4,8",
            "--share",
            "bulk,within",
            "--positions",
            "--digest",
        ];
        let found = bench.json(&words)?;
        let rows = found["rows"].as_array().cloned().unwrap_or_default();
        ensure!(rows.len() == 8, "{form}: {} lines instead of 8", rows.len());
        let digest = &rows[0]["digest"];
        ensure!(digest.is_string() && rows.iter().all(|row| row["digest"] == *digest), "{form}: {rows:#?}");
        digests.push(
            json!({ "form": form, "digest": digest, "threads": [1, 2, 4, 8], "share": ["bulk", "within"] }),
        );
    }
    Ok(Value::Array(digests))
}

/// A trace of some batches: read back from both ends by the program itself, and not larger than promised.
pub fn trace(bench: &Bench, batch: &str, batches: &str, most_bytes_per_edge: f64) -> Result<Value> {
    let words = [
        "bench",
        "sample",
        "graph",
        "--fanout",
        "10,10,10",
        "--batch",
        batch,
        "--batches",
        batches,
        "--threads",
        "2",
        "--trace",
        "samples.trace",
    ];
    let found = bench.json(&words)?["trace"].clone();
    let per_edge = found["bytes_per_edge"].as_f64().unwrap_or(f64::INFINITY);
    ensure!(per_edge <= most_bytes_per_edge, "{per_edge} bytes an edge, {most_bytes_per_edge} were promised");
    Ok(found)
}

/// Esker's edges per second for a line of the table.
fn ours(bench: &Bench, layers: usize, form: &str, batches: &str) -> Result<Value> {
    let layers = layers.to_string();
    let words = [
        "bench",
        "sample",
        "graph",
        "--fanout",
        "10",
        "--layers",
        &layers,
        "--batch",
        "1000",
        "--batches",
        batches,
        "--threads",
        "2",
        "--form",
        form,
        "--positions",
    ];
    Ok(bench.json(&words)?["rows"][0].clone())
}

fn peer(
    bench: &Bench,
    python: &Path,
    peer: &str,
    layers: usize,
    workers: &str,
    batches: &str,
) -> Result<Value> {
    let script = crate::root().join("bench/peers/sample.py");
    let fanout = vec!["10"; layers].join(",");
    // Workers run ahead: as many batches as they may hold ready are not timed.
    bench.json_of(Command::new(python).arg(script).arg(bench.path("graph")).args([
        "--peer",
        peer,
        "--fanout",
        &fanout,
        "--workers",
        workers,
        "--batches",
        batches,
        "--warm",
        "6",
    ]))
}

fn rate(row: &Value) -> f64 {
    row["edges_per_second"].as_f64().unwrap_or(0.0)
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// The Python that has the peers, once `bench/peers/setup.sh` has made it.
pub fn peers_python() -> Option<PathBuf> {
    let directory = crate::root().join("target/peers");
    directory.join("ready").exists().then(|| directory.join("bin/python"))
}

/// Rounds of Esker and its peers in turn; ratios are taken inside a round.
pub fn beside_peers(
    bench: &Bench,
    python: &Path,
    layers: usize,
    rounds: usize,
    batches: [&str; 2],
) -> Result<Value> {
    let (mut all, mut pyg_ratios, mut graphbolt_ratios, mut layered_ratios) =
        (Vec::new(), vec![], vec![], vec![]);
    for _ in 0..rounds {
        let dense = ours(bench, layers, "dense", batches[0])?;
        let layered = ours(bench, layers, "layered", batches[0])?;
        let pyg = peer(bench, python, "pyg", layers, "2", batches[1])?;
        // GraphBolt samples with two threads in one process, or with two processes: the better counts.
        let in_process = peer(bench, python, "graphbolt", layers, "0", batches[1])?;
        let in_workers = peer(bench, python, "graphbolt", layers, "2", batches[1])?;
        let graphbolt = if rate(&in_workers) > rate(&in_process) { in_workers } else { in_process };
        pyg_ratios.push(rate(&dense) / rate(&pyg));
        graphbolt_ratios.push(rate(&dense) / rate(&graphbolt));
        let seconds = |row: &Value| row["seconds_per_batch"].as_f64().unwrap_or(0.0);
        layered_ratios.push(seconds(&layered) / seconds(&dense));
        all.push(json!({ "dense": dense, "layered": layered, "pyg": pyg, "graphbolt": graphbolt }));
    }
    Ok(json!({
        "layers": layers, "edges_per_second_over_pyg": median(pyg_ratios),
        "edges_per_second_over_graphbolt": median(graphbolt_ratios),
        "time_of_layered_over_dense": median(layered_ratios), "rounds": all,
    }))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    graph(bench, 4_000_000, 15)?;
    let peers = crate::root().join("target/peers");
    succeed(Command::new(crate::root().join("bench/peers/setup.sh")).arg(&peers))?;
    let python = peers_python().context("bench/peers/setup.sh left no environment behind")?;
    let threads = same_for_any_threads(bench, "1000", "6")?;
    let trace = trace(bench, "1000", "20", 3.0)?;
    let three = beside_peers(bench, &python, 3, 3, ["40", "8"])?;
    let five = beside_peers(bench, &python, 5, 1, ["4", "3"])?;
    let layers: Vec<Value> = (1..=5)
        .map(|layers| ours(bench, layers, "dense", if layers < 4 { "20" } else { "4" }))
        .collect::<Result<_>>()?;
    Ok(json!({
        "graph": "4 000 000 nodes, in-degree 15, `esker generate` with its defaults; batches of 1000, fan-out 10",
        "threads": threads, "trace": trace, "three_layers": three, "five_layers": five, "dense_by_layers": layers,
    }))
}
