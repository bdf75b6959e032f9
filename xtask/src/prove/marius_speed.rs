//! An epoch of a partition buffer beside the same steps with the whole graph in memory, and beside what its bytes take at
//! the disk's rates, measured in turn.

use super::{Bench, at_most, number, repeated, succeed};
use crate::cgroup::Group;
use anyhow::{Context, Result, ensure};
use esker_io::SequentialWriter;
use esker_io::limit::{BareLoop, bare_loop};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

/// An epoch may take this much of the larger of both bounds.
const MOST: f64 = 1.1;

/// The cgroup counts page cache and kernel memory of the process, too.
const KERNEL_BYTES: u64 = 64 << 20;

/// A graph in the shape of Freebase86m, and how it is trained.
#[derive(Debug, Clone, Copy)]
pub struct SpeedSize {
    /// Of Freebase86m.
    pub scale: &'static str,
    /// Numbers per row.
    pub dim: u64,
    /// Edges of a batch, and the chunks that share negatives.
    pub batch: u64,
    /// See above.
    pub chunks: u64,
    /// Negatives of a chunk and side, run by run.
    pub negatives: &'static [u64],
    /// The budget of the buffer; its cgroup has a little more.
    pub memory: u64,
    /// Partitions, resident ones, logical ones.
    pub counts: [u64; 3],
    /// The order.
    pub order: &'static str,
    /// Epochs; the first of a run is left out.
    pub epochs: u64,
    /// Rounds, in turn.
    pub rounds: usize,
    /// Bytes that the disk's rates are measured by.
    pub rate_bytes: u64,
}

/// Bytes per second that the disk writes and reads in order, past the page cache or synced.
fn rates(bench: &Bench, bytes: u64) -> Result<[f64; 2]> {
    let path = bench.path("rates");
    let piece = vec![0x5au8; 4 << 20];
    let began = Instant::now();
    let mut writer = SequentialWriter::create(&path)?;
    for _ in 0..bytes.div_ceil(piece.len() as u64) {
        writer.write_all(&piece)?;
    }
    let written = writer.finish()? as f64 / began.elapsed().as_secs_f64();
    let how =
        BareLoop { block_bytes: 1 << 20, depth: 16, threads: 1, sequential: true, memory_bytes: 64 << 20 };
    let read = bare_loop(&path, how, Duration::from_secs(2))?.bytes_per_second();
    fs::remove_file(&path)?;
    Ok([written, read])
}

/// Seconds and bytes of the epochs after the first.
fn epochs_of(summary: &Value) -> Result<Value> {
    let all = summary["epochs"].as_array().context("epochs")?;
    let later = &all[1.min(all.len() - 1)..];
    let mean = |key: &str| -> f64 {
        later.iter().filter_map(|epoch| epoch[key].as_f64()).sum::<f64>() / later.len() as f64
    };
    Ok(json!({
        "seconds": mean("seconds"), "bytes_read": mean("bytes_read") + mean("edge_bytes_read"),
        "bytes_written": mean("bytes_written"), "loss_digest": summary["loss_digest"],
        "peak_host_bytes": summary["peak_host_bytes"], "steps": summary["partition_steps"],
        "bound_by": all.last().map(|epoch| &epoch["bound_by"]), "wall_seconds": summary["wall_seconds"],
    }))
}

/// Both runs and the disk's rates, some rounds in turn, for each number of negatives. Expects `freebase`.
pub fn beside_memory(bench: &Bench, size: SpeedSize) -> Result<Value> {
    let rows = size.negatives.iter().map(|negatives| one(bench, size, *negatives));
    let rows: Vec<Value> = rows.collect::<Result<_>>()?;
    let asked: Vec<Value> = rows
        .iter()
        .map(|row| Ok(at_most("an epoch over its bound", number(row, "over_bound")?, MOST)))
        .collect::<Result<_>>()?;
    Ok(json!({ "scale": size.scale, "dim": size.dim, "batch": size.batch, "cases": rows, "asked": asked }))
}

/// The words of both runs.
fn words(size: &SpeedSize, negatives: u64) -> String {
    let SpeedSize { dim, batch, chunks, counts: [partitions, resident, logical], order, epochs, .. } = size;
    format!(
        "train freebase --task link --encoder none --embeddings {dim} --decoder distmult --negatives {negatives} --chunks {chunks} --batch {batch} --optimizer adagrad --lr 0.1 --epochs {epochs} --eval none --final-eval none --device cpu --threads 2 --order {order} --partitions {partitions} --resident {resident} --logical {logical} --json"
    )
}

/// The smallest budget of the buffer.
pub fn smallest(bench: &Bench, size: &SpeedSize) -> Result<u64> {
    let words = format!("{} --strategy marius --memory 64GiB --dry-run", words(size, size.negatives[0]));
    let planned = bench.json_of(&mut bench.esker(&words.split_whitespace().collect::<Vec<_>>()))?;
    planned["smallest_bytes"].as_u64().context("the smallest budget")
}

fn one(bench: &Bench, size: SpeedSize, negatives: u64) -> Result<Value> {
    let (common, memory) = (format!("{} --out speed", words(&size, negatives)), size.memory);
    let run = |more: &str, group: Option<&Group>| -> Result<Value> {
        let words = format!("{common} {more}");
        let command = bench.esker(&words.split_whitespace().collect::<Vec<_>>());
        let output = match group {
            Some(group) => succeed(&mut group.wrap(&command))?,
            None => succeed(&mut { command })?,
        };
        fs::remove_dir_all(bench.path("speed"))?;
        epochs_of(&serde_json::from_slice(&output.stdout)?)
    };
    let mut pairs = Vec::new();
    let round = || -> Result<Value> {
        let [write_rate, read_rate] = rates(bench, size.rate_bytes)?;
        let whole = run("--strategy memory --resident-only", None)?;
        let group = Group::create(memory + KERNEL_BYTES)?;
        let buffer = run(&format!("--strategy marius --memory {memory}B"), Some(&group))?;
        ensure!(
            buffer["loss_digest"] == whole["loss_digest"],
            "a partition buffer trains something else than its residents in memory"
        );
        let peak = number(&buffer, "peak_host_bytes")?;
        ensure!(peak <= memory as f64, "{memory} bytes were promised, and {peak} taken");
        let disk =
            number(&buffer, "bytes_read")? / read_rate + number(&buffer, "bytes_written")? / write_rate;
        let (in_memory, seconds) = (number(&whole, "seconds")?, number(&buffer, "seconds")?);
        println!(
            "{negatives} negatives: in memory {in_memory:.1} s, at the disk's rates {disk:.1} s, partition buffer {seconds:.1} s"
        );
        let found = json!({
            "negatives": negatives, "in_memory_seconds": in_memory, "disk_seconds": disk, "seconds": seconds,
            "over_bound": seconds / in_memory.max(disk), "read_rate": read_rate, "write_rate": write_rate,
        });
        pairs.push(json!({ "in_memory": whole, "buffer": buffer }));
        Ok(found)
    };
    let keys = ["in_memory_seconds", "disk_seconds", "seconds", "over_bound", "read_rate", "write_rate"];
    let mut row = repeated(size.rounds, &keys, round)?;
    row["runs"] = pairs.into();
    Ok(row)
}

/// 8 million nodes with rows of 100 numbers and a state of Adagrad, 6.4 GB, and 32 million edges, in 3 GB.
pub(super) fn full(bench: &Bench) -> Result<Value> {
    bench.json(&[
        "generate",
        "freebase",
        "--preset",
        "freebase86m",
        "--scale",
        "0.093",
        "--memory",
        "4GiB",
    ])?;
    beside_memory(
        bench,
        SpeedSize {
            scale: "0.093",
            dim: 100,
            batch: 50_000,
            chunks: 10,
            negatives: &[50, 500],
            memory: 3_000_000_000 - KERNEL_BYTES,
            counts: [32, 8, 8],
            order: "two-level-beta",
            epochs: 2,
            rounds: 3,
            rate_bytes: 4 << 30,
        },
    )
}
