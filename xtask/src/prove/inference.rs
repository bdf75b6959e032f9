//! Inference with all neighbours: the same bytes with any memory, at the rate of the disk or of the processor, and after
//! a kill.

use super::{Bench, number, repeated, succeed, train};
use anyhow::{Context, Result, ensure};
use esker_types::random::{Key, unit};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3;

/// Hidden columns of the model at full size.
const HIDDEN: u64 = 256;
/// Memory, in percent of the hidden rows of all nodes.
const SHARES: [u64; 4] = [5, 10, 25, 100];

/// A run to predict with: a little training is enough.
pub fn run(bench: &Bench, model: &str, hidden: u64, more: &[&str]) -> Result<()> {
    let hidden = hidden.to_string();
    let words =
        ["train", "graph", "--model", model, "--layers", "3", "--fanout", "5,5,5", "--hidden", &hidden];
    let also = ["--batch", "5000", "--epochs", "1", "--eval", "none", "--final-eval", "none", "--out", model];
    bench.json(&[&words[..], &also, more].concat())?;
    Ok(())
}

/// Predicts every node with all neighbours. Adds the digest of the predictions and the seconds of the command.
fn predicted(bench: &Bench, run: &str, more: &[&str]) -> Result<Value> {
    let words = ["predict", run, "--nodes", "all", "--mode", "full", "--out", "found.npy"];
    let started = Instant::now();
    let mut found = bench.json(&[&words[..], more].concat())?;
    found["seconds"] = started.elapsed().as_secs_f64().into();
    found["digest"] = file_digest(&bench.path("found.npy"))?.into();
    Ok(found)
}

/// The digest of a file of any size.
pub(super) fn file_digest(path: &Path) -> Result<String> {
    let (mut file, mut hash, mut piece) = (File::open(path)?, Xxh3::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(format!("{:016x}", hash.digest())),
            count => hash.update(&piece[..count]),
        }
    }
}

/// The smallest memory that predicts.
pub fn smallest(bench: &Bench, run: &str) -> Result<u64> {
    let words =
        ["predict", run, "--nodes", "all", "--mode", "full", "--out", "found.npy", "--memory", "1MiB"];
    let output = bench.esker(&words).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let bytes =
        said.split("use --memory ").nth(1).and_then(|rest| rest.split(|c: char| !c.is_alphanumeric()).next());
    let bytes: esker_types::ByteCount =
        bytes.with_context(|| format!("no size in: {said}"))?.parse().map_err(anyhow::Error::msg)?;
    Ok(bytes.0)
}

/// Bytes of the rows that a SAGE of three layers reads, each once: features and two hidden layers, as f32.
fn tables(nodes: u64, dim: u64, hidden: u64) -> f64 {
    (nodes * (dim + 2 * hidden) * 4) as f64
}

/// The most that it writes: two hidden layers, and what is projected for the last one.
fn written(nodes: u64, hidden: u64) -> f64 {
    (nodes * hidden * 4 * 3) as f64
}

/// The same bytes with any memory, for every kind of model. The graph has so many nodes with feature rows of `dim` numbers.
pub fn same(bench: &Bench, models: &[&str], (nodes, dim): (u64, u64), hidden: u64) -> Result<Value> {
    let mut rows = Vec::new();
    for model in models {
        run(bench, model, hidden, &["--strategy", "ginex"])?;
        let expected = predicted(bench, model, &["--memory", "2GiB"])?;
        let least = smallest(bench, model)?;
        for memory in [least, least + (least >> 3), least * 2] {
            let found = predicted(bench, model, &["--memory", &format!("{memory}B")])?;
            ensure!(
                found["digest"] == expected["digest"],
                "{model}: other bytes with {memory} bytes of memory"
            );
            let peak = found["peak_host_bytes"].as_u64().unwrap_or(u64::MAX);
            ensure!(peak <= memory, "{model}: {peak} bytes at the peak, {memory} were allowed");
            if *model == "sage" {
                predicted_bytes(&found["inference"], tables(nodes, dim, hidden), written(nodes, hidden))?;
            }
            rows.push(json!({ "model": model, "memory_bytes": memory, "peak_host_bytes": peak, "inference": found["inference"] }));
        }
    }
    Ok(rows.into())
}

/// A command that predicts with some memory, and is killed.
fn doomed(bench: &Bench, run: &str, memory: &str) -> Result<Child> {
    let words =
        ["predict", run, "--nodes", "all", "--mode", "full", "--out", "killed.npy", "--memory", memory];
    Ok(bench.esker(&words).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?)
}

/// Kills a command when the rows of the first layer are complete on disk and those of the second are not. Returns whether
/// it came to that.
fn kill_after_a_layer(bench: &Bench, run: &str, memory: &str) -> Result<bool> {
    let work = bench.path(run).join("scratch/inference");
    fs::remove_dir_all(&work).ok();
    let mut child = doomed(bench, run, memory)?;
    while child.try_wait()?.is_none() {
        let journal = fs::read(work.join("journal.json")).unwrap_or_default();
        let journal: Value = serde_json::from_slice(&journal).unwrap_or_default();
        let is_complete = |layer: &str| journal["steps"][layer]["entry"].is_object();
        if is_complete("layer-1") && !is_complete("layer-2") {
            child.kill()?;
            child.wait()?;
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(false)
}

/// SIGKILL at random moments, the last time between two layers: the command that follows continues, and writes the same
/// bytes. The memory must be too small for the rows of a layer.
pub fn killed(bench: &Bench, run: &str, memory: &str, kills: u64) -> Result<Value> {
    let expected = predicted(bench, run, &["--memory", memory])?;
    let written = |found: &Value| number(&found["inference"], "row_bytes_written");
    let whole = written(&expected)?;
    ensure!(whole > 0.0, "with {memory} no row is written, so nothing can be resumed");
    let (seconds, key) = (number(&expected, "seconds")?, Key::new(9));
    let (mut done, mut tries) = (0, 0);
    while done < kills && tries < 4 * kills {
        tries += 1;
        if done + 1 == kills {
            done += u64::from(kill_after_a_layer(bench, run, memory)?);
            continue;
        }
        let mut child = doomed(bench, run, memory)?;
        let until = Instant::now() + Duration::from_secs_f64(seconds * unit(key.at(tries)));
        while Instant::now() < until && child.try_wait()?.is_none() {
            std::thread::yield_now();
        }
        if child.try_wait()?.is_none() {
            child.kill()?;
            done += 1;
        }
        child.wait()?;
        ensure!(
            !bench.path("killed.npy.partial").exists() || done > 0,
            "nothing stays of a command that ended"
        );
    }
    ensure!(done == kills, "{done} of {kills} commands were killed in {tries} tries");
    let found = predicted(bench, run, &["--memory", memory])?;
    ensure!(found["digest"] == expected["digest"], "other bytes after {done} kills");
    ensure!(!bench.path(run).join("scratch/inference").exists(), "hidden rows stay behind");
    let last = written(&found)?;
    ensure!(
        last > 0.0 && last < whole,
        "{last} bytes of rows written after the kills, {whole} by a whole run"
    );
    Ok(
        json!({ "kills": done, "seconds": seconds, "row_bytes_written": whole, "last_row_bytes_written": last }),
    )
}

/// Bytes of rows that were moved, which may not be more than the engine predicts: the way with more bytes, streaming in every
/// pass, and each row of `table_bytes` once in addition, for targets themselves and for rows that stay. Otherwise traffic
/// in excess would allow for more seconds.
fn predicted_bytes(counted: &Value, table_bytes: f64, most_written: f64) -> Result<f64> {
    let (stream, gather) = (number(counted, "stream_bytes")?, number(counted, "gather_bytes")?);
    let (read, written) = (number(counted, "row_bytes_read")?, number(counted, "row_bytes_written")?);
    ensure!(gather <= stream, "gathering has {gather} bytes, streaming {stream}");
    ensure!(
        read <= stream + table_bytes,
        "{read} bytes of rows were read; streaming has {stream}, and every row once {table_bytes}"
    );
    ensure!(written <= most_written, "{written} bytes of rows were written, {most_written} are enough");
    Ok(read + written)
}

/// Seconds against the larger of computing and of the bytes over the disk's rate, by memory.
fn by_memory(bench: &Bench, nodes: u64) -> Result<Value> {
    let doctor = bench.json(&["doctor", "--dir", &bench.directory.to_string_lossy()])?;
    let rate = number(&doctor["disk"], "sequential_bytes_per_second")?;
    let rounds = |more: &[&str]| repeated(3, &["seconds"], || predicted(bench, "sage", more));
    let whole = rounds(&["--memory", "20GiB"])?;
    let computing = number(&whole, "seconds")?;
    println!("in memory: {computing:.1} s; the disk reads {:.2} GB/s", rate / 1e9);
    let widest = nodes * HIDDEN * 4;
    let (mut rows, mut worst) = (Vec::new(), 0.0f64);
    for share in SHARES {
        let memory = format!("{}B", widest / 100 * share);
        let found = rounds(&["--memory", &memory])?;
        ensure!(found["digest"] == whole["digest"], "other bytes with {memory}");
        let counted = &found["inference"];
        let of_rows = predicted_bytes(counted, tables(nodes, 128, HIDDEN), written(nodes, HIDDEN))?;
        let bytes = of_rows + number(counted, "adjacency_bytes_read")?;
        let least = computing.max(bytes / rate);
        let times = number(&found, "seconds")? / least;
        worst = worst.max(times);
        println!("{share}%: {:.1} s, {times:.2} times the least; {counted}", number(&found, "seconds")?);
        rows.push(json!({ "memory_percent": share, "times_the_least": times, "bytes": bytes, "run": found }));
    }
    ensure!(worst <= 1.25, "{worst:.2} times the least, 1.25 were promised");
    Ok(json!({ "disk_bytes_per_second": rate, "in_memory": whole, "by_memory": rows, "worst": worst }))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    train::graph(bench, 4_000_000, 128)?;
    run(bench, "sage", HIDDEN, &["--strategy", "ginex", "--memory", "4GiB"])?;
    let by_memory = by_memory(bench, 4_000_000)?;
    let killed = killed(bench, "sage", "1GiB", 10)?;
    succeed(std::process::Command::new("rm").args(["-rf", "graph", "sage"]).current_dir(&bench.directory))?;
    train::graph(bench, 200_000, 64)?;
    let same = same(bench, &["sage", "gcn", "gin", "gat"], (200_000, 64), 64)?;
    Ok(json!({ "by_memory": by_memory, "killed": killed, "same": same }))
}
