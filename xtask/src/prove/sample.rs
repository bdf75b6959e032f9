//! Sampling: the same for any number of threads, its speed compared with PyG's and GraphBolt's, and the size of a
//! trace.

use super::{Bench, ROUNDS, repeated, succeed};
use anyhow::{Context, Result, ensure};
use esker_types::median;
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

/// `esker bench sample` on the graph, with these options.
fn sample(bench: &Bench, options: &str) -> Result<Value> {
    let words: Vec<&str> =
        ["bench", "sample", "graph"].into_iter().chain(options.split_whitespace()).collect();
    bench.json(&words)
}

/// Every form, batch by batch and in bulk, with 1, 2, 4 and 8 threads, has one digest.
pub fn same_for_any_threads(bench: &Bench, batch: &str, batches: &str) -> Result<Value> {
    let mut digests = Vec::new();
    for form in ["dense", "layered", "shadow"] {
        let size = format!("--fanout 10,10,10 --batch {batch} --batches {batches}");
        let ways = "--threads 1,2,4,8 --share bulk,within --positions --digest";
        let found = sample(bench, &format!("{size} --form {form} {ways}"))?;
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

/// A trace of some batches: the program reads it back from both ends, and its size is within the limit.
pub fn trace(bench: &Bench, batch: &str, batches: &str, most_bytes_per_edge: f64) -> Result<Value> {
    let size = format!("--fanout 10,10,10 --batch {batch} --batches {batches}");
    let found = sample(bench, &format!("{size} --threads 2 --trace samples.trace"))?["trace"].clone();
    let per_edge = found["bytes_per_edge"].as_f64().unwrap_or(f64::INFINITY);
    ensure!(per_edge <= most_bytes_per_edge, "{per_edge} bytes an edge, {most_bytes_per_edge} were promised");
    Ok(found)
}

/// Esker's line of the table, over enough batches to take `least_seconds`.
fn ours(bench: &Bench, layers: usize, form: &str, least_seconds: f64) -> Result<Value> {
    let mut batches = 4u64;
    loop {
        let size = format!("--fanout 10 --layers {layers} --batch 1000 --batches {batches}");
        let options = format!("{size} --threads 2 --form {form} --positions --bound");
        let mut row = sample(bench, &options)?["rows"][0].clone();
        let seconds = seconds_per_batch(&row)? * batches as f64;
        if seconds >= least_seconds {
            row["batches"] = json!(batches);
            row["seconds"] = json!(seconds);
            return Ok(row);
        }
        // A fifth more than needed, and at least one more: the machine may be faster next time.
        batches = ((1.2 * least_seconds / seconds * batches as f64) as u64).max(batches + 1);
    }
}

fn peer(
    bench: &Bench,
    python: &Path,
    peer: &str,
    layers: usize,
    workers: u32,
    batches: u32,
) -> Result<Value> {
    let script = crate::root().join("bench/peers/sample.py");
    let fanout = vec!["10"; layers].join(",");
    // Workers prefetch batches: as many as they may have ready are not timed.
    let options = format!("--peer {peer} --fanout {fanout} --workers {workers} --batches {batches} --warm 6");
    let mut command = Command::new(python);
    bench.json_of(command.arg(script).arg(bench.path("graph")).args(options.split_whitespace()))
}

/// A number of a row that must exist and be above 0.
fn number(row: &Value, key: &str) -> Result<f64> {
    row[key].as_f64().filter(|number| *number > 0.0).with_context(|| format!("no {key} in {row}"))
}

fn rate(row: &Value) -> Result<f64> {
    number(row, "edges_per_second")
}

fn seconds_per_batch(row: &Value) -> Result<f64> {
    number(row, "seconds_per_batch")
}

/// The Python that has the peers, if `bench/peers/setup.sh` has made it.
pub fn peers_python() -> Option<PathBuf> {
    let directory = crate::root().join("target/peers");
    directory.join("ready").exists().then(|| directory.join("bin/python"))
}

/// The size of the comparison with the peers.
#[derive(Clone, Copy)]
pub struct Size {
    /// Number of layers of fan-out 10.
    pub layers: usize,
    /// Rounds of Esker and its peers in turn.
    pub rounds: usize,
    /// Smallest duration of our round in seconds.
    pub least_seconds: f64,
    /// Batches per round of a peer.
    pub peer_batches: u32,
}

/// Rounds of Esker and its peers in turn; ratios are taken inside a round.
pub fn beside_peers(bench: &Bench, python: &Path, size: Size) -> Result<Value> {
    let Size { layers, rounds, least_seconds, peer_batches } = size;
    let (mut all, mut pyg_ratios, mut graphbolt_ratios, mut layered_ratios) =
        (Vec::new(), vec![], vec![], vec![]);
    for _ in 0..rounds {
        let dense = ours(bench, layers, "dense", least_seconds)?;
        let layered = ours(bench, layers, "layered", least_seconds)?;
        let pyg = peer(bench, python, "pyg", layers, 2, peer_batches)?;
        // GraphBolt samples with two threads in one process, or with two processes: the better one counts.
        let in_process = peer(bench, python, "graphbolt", layers, 0, peer_batches)?;
        let in_workers = peer(bench, python, "graphbolt", layers, 2, peer_batches)?;
        let graphbolt = if rate(&in_workers)? > rate(&in_process)? { in_workers } else { in_process };
        pyg_ratios.push(rate(&dense)? / rate(&pyg)?);
        graphbolt_ratios.push(rate(&dense)? / rate(&graphbolt)?);
        layered_ratios.push(seconds_per_batch(&layered)? / seconds_per_batch(&dense)?);
        all.push(json!({ "dense": dense, "layered": layered, "pyg": pyg, "graphbolt": graphbolt }));
    }
    Ok(json!({
        "layers": layers, "edges_per_second_over_pyg": median(&pyg_ratios),
        "edges_per_second_over_graphbolt": median(&graphbolt_ratios),
        "time_of_layered_over_dense": median(&layered_ratios), "rounds": all,
    }))
}

/// Esker must sample at least `least` times as many edges per second as each peer.
fn ensure_faster(found: &Value, least: f64) -> Result<()> {
    for (name, key) in
        [("PyG", "edges_per_second_over_pyg"), ("GraphBolt", "edges_per_second_over_graphbolt")]
    {
        let (ratio, layers) = (number(found, key)?, &found["layers"]);
        ensure!(
            ratio >= least,
            "{layers} layers: {ratio:.2} times the edges per second of {name}, at least {least} are asked for; {found:#}"
        );
    }
    Ok(())
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    graph(bench, 4_000_000, 15)?;
    let peers = crate::root().join("target/peers");
    succeed(Command::new(crate::root().join("bench/peers/setup.sh")).arg(&peers))?;
    let python = peers_python().context("bench/peers/setup.sh left no environment behind")?;
    let threads = same_for_any_threads(bench, "1000", "6")?;
    let trace = trace(bench, "1000", "20", 3.0)?;
    let three = Size { layers: 3, rounds: ROUNDS, least_seconds: 2.0, peer_batches: 20 };
    let five = Size { layers: 5, rounds: ROUNDS, least_seconds: 10.0, peer_batches: 6 };
    let three = beside_peers(bench, &python, three)?;
    let mut five = beside_peers(bench, &python, five)?;
    ensure_faster(&three, 5.0)?;
    ensure_faster(&five, 5.0)?;
    // Not asserted: if no node occurs twice in a layer, the layered form samples at most L times as much as DENSE.
    let layered = five["time_of_layered_over_dense"].take();
    five["time_of_layered_over_dense"] = json!({ "found": layered, "asked": 15 });
    let rates = ["edges_per_second", "seconds_per_batch"];
    let by_layers = |layers| repeated(ROUNDS, &rates, || ours(bench, layers, "dense", 2.0));
    let layers: Vec<Value> = (1..=5).map(by_layers).collect::<Result<_>>()?;
    Ok(json!({
        "graph": "4 000 000 nodes, in-degree 15, `esker generate` with its defaults; batches of 1000, fan-out 10",
        "threads": threads, "trace": trace, "three_layers": three, "five_layers": five, "dense_by_layers": layers,
    }))
}
