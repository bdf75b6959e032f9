//! Epochs of OUTRE beside the other strategies, in turn, with memory for a tenth of the feature rows beyond what batches
//! need (the paper's Table 6 and Figure 4).

use super::{Bench, number, succeed};
use crate::cgroup::Group;
use crate::prove::ginex::{GROUP_SLACK_BYTES, drop_caches};
use anyhow::{Context, Result, ensure};
use esker_types::median;
use serde_json::{Value, json};
use std::fs;

/// Memory of strategies that work from disk.
#[derive(Debug, Clone, Copy)]
pub enum DiskMemory {
    /// As given.
    Bytes(u64),
    /// The smallest budget of `ginex` and `outre`, and a tenth of the feature rows.
    TenthOfRows,
}

/// The size of a comparison.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Nodes of the graph.
    pub nodes: u64,
    /// Features per node.
    pub dim: u64,
    /// Share of edges inside a class.
    pub homophily: &'static str,
    /// Share of training nodes.
    pub train: &'static str,
    /// Share of test nodes.
    pub test: &'static str,
    /// Sampled neighbours per hop.
    pub fanout: &'static str,
    /// Seed nodes per batch.
    pub batch: &'static str,
    /// Hidden columns.
    pub hidden: &'static str,
    /// Memory of strategies that work from disk.
    pub memory: DiskMemory,
    /// Epochs. The first one is not measured.
    pub epochs: &'static str,
    /// Batches for which rows of a history are used.
    pub staleness: &'static str,
    /// The device that trains.
    pub device: &'static str,
}

impl Size {
    /// The budget of `ginex` and `outre`.
    pub(super) fn budget(&self, bench: &Bench) -> Result<u64> {
        if let DiskMemory::Bytes(bytes) = self.memory {
            return Ok(bytes);
        }
        let (ginex, outre) =
            (self.smallest(bench, &["ginex"])?, self.smallest(bench, &["outre", "--history-rows", "0"])?);
        Ok(ginex.max(outre) + self.nodes * self.dim * 4 / 10)
    }

    /// The smallest budget of a strategy.
    fn smallest(&self, bench: &Bench, strategy: &[&str]) -> Result<u64> {
        let dry = ["--memory", "64GiB", "--dry-run", "--strategy"];
        let found = bench.json(&[&self.words()[..], &dry, strategy].concat())?;
        Ok(number(&found, "smallest_host_bytes")? as u64)
    }

    /// The words of a run, without its strategy and its directory.
    fn words(&self) -> [&'static str; 14] {
        [
            "train",
            "graph",
            "--fanout",
            self.fanout,
            "--batch",
            self.batch,
            "--hidden",
            self.hidden,
            "--epochs",
            self.epochs,
            "--eval",
            "none",
            "--device",
            self.device,
        ]
    }
}

/// A graph with communities, and its partitions.
pub(super) fn graph(bench: &Bench, size: Size) -> Result<()> {
    let (nodes, dim, classes) =
        (size.nodes.to_string(), size.dim.to_string(), (size.nodes / 1000).max(8).to_string());
    let words = ["generate", "graph", "--nodes", &nodes, "--degree", "15", "--dim", &dim, "--seed", "1"];
    let also = ["--classes", &classes, "--homophily", size.homophily, "--train", size.train];
    bench.json(&[&words[..], &also, &["--test", size.test, "--overwrite"]].concat())?;
    bench.json(&["partition", "graph", "--batch", size.batch]).map(drop)
}

/// One run: its summary, and what it did in epochs after the first, per epoch.
pub(super) fn run(bench: &Bench, size: Size, name: &str, flags: &[&str]) -> Result<Value> {
    fs::remove_dir_all(bench.path(name)).ok();
    let summary = bench.json(&[&size.words()[..], &["--out", name], flags].concat())?;
    let epochs = summary["epochs"].as_array().context("epochs")?;
    let each = |key: &str| -> f64 {
        median(&epochs.iter().skip(1).filter_map(|epoch| epoch[key].as_f64()).collect::<Vec<_>>())
    };
    let last = epochs.last().context("an epoch")?;
    let found = json!({
        "run": name, "flags": flags, "seconds": each("seconds"), "bytes_read": each("bytes_read"), "redundancy": each("redundancy"),
        "batches": last["batches"], "history": last["history"], "stages": last["stages"], "split": summary["history_split"],
        "loss_digest": summary["loss_digest"], "loss": last["loss"], "preparing_seconds": summary["wall_seconds"]["preparing"],
        "peak_host_bytes": summary["peak_host_bytes"], "budget_host_bytes": summary["budget_host_bytes"],
    });
    println!("{found}");
    Ok(found)
}

/// Seconds of an epoch with `mmap` in a group of this memory, from so many of its batches. Null where no group can be made.
fn mmap_epoch(bench: &Bench, size: Size, bytes: u64, batches: &str) -> Result<Value> {
    let memory = &format!("{bytes}B");
    let Ok(group) = Group::create(bytes + GROUP_SLACK_BYTES) else {
        println!("mmap: skipped, no memory group can be made here");
        return Ok(Value::Null);
    };
    let words = ["bench", "epoch", "graph", "--strategy", "mmap", "--memory", memory, "--warm", "2"];
    let shape = ["--fanout", size.fanout, "--batch", size.batch, "--hidden", size.hidden];
    let also = ["--batches", batches, "--device", size.device, "--json"];
    let output = succeed(&mut group.wrap(&bench.esker(&[&words[..], &shape, &also].concat())))?;
    let found: Value = serde_json::from_slice(&output.stdout)?;
    Ok(json!({ "batches": batches, "seconds_per_batch": number(&found, "seconds_per_batch")? }))
}

/// Epochs of `outre` beside those of the other strategies. `mmap` gets so many batches in a group of the same memory.
pub fn speed(bench: &Bench, size: Size, mmap_batches: &str) -> Result<Value> {
    graph(bench, size)?;
    let budget = size.budget(bench)?;
    let memory = format!("{budget}B");
    let disk = ["--memory", &memory];
    let timed = |name: &str, flags: &[&str]| {
        drop_caches();
        run(bench, size, name, flags)
    };
    let with = |name: &str, strategy: &str, more: &[&str]| {
        timed(name, &[&["--strategy", strategy][..], &disk, more].concat())
    };
    let packing = format!("{}B", budget.max(size.smallest(bench, &["diskgnn"])?));
    let ginex = with("ginex", "ginex", &[])?;
    let groups = with("ginex-groups", "ginex", &["--order", "groups"])?;
    let outre = with("outre", "outre", &["--staleness", size.staleness])?;
    let flags =
        ["--strategy", "diskgnn", "--memory", &packing, "--epochs-sampled", "1", "--prepared", "packed"];
    let diskgnn = timed("diskgnn", &flags)?;
    fs::remove_dir_all(bench.path("packed")).ok();
    let in_memory = timed("memory", &["--order", "groups"])?;
    let for_all = ["--order", "groups", "--history-rows", "1.0", "--staleness", size.staleness];
    let all = timed("memory-all", &for_all)?;
    let twin = timed("twin", &["--order", "groups", "--history-set", "outre"])?;
    let mut mmap = mmap_epoch(bench, size, budget, mmap_batches)?;
    ensure!(twin["loss_digest"] == outre["loss_digest"], "outre and memory differ: {twin} {outre}");
    ensure!(
        in_memory["loss_digest"] == groups["loss_digest"],
        "ginex and memory differ: {in_memory} {groups}"
    );
    let ratio = |key: &str, one: &Value, other: &Value| {
        Ok::<f64, anyhow::Error>(number(one, key)? / number(other, key)?)
    };
    for (name, other) in [("ginex", &ginex), ("ginex by groups", &groups)] {
        let fewer = ratio("redundancy", &outre, other)?;
        ensure!(fewer < 1.0, "outre requests {fewer:.2} of the rows of {name}");
    }
    if let Some(batch) = mmap["seconds_per_batch"].as_f64() {
        let seconds = batch * number(&outre, "batches")?;
        mmap["epoch_seconds"] = seconds.into();
        mmap["times_as_fast_as_mmap"] = (seconds / number(&outre, "seconds")?).into();
    }
    Ok(json!({
        "rows_of_ginex": ratio("redundancy", &outre, &ginex)?, "bytes_read_of_ginex": ratio("bytes_read", &outre, &ginex)?,
        "times_as_fast_as_ginex": ratio("seconds", &ginex, &outre)?, "times_as_fast_as_ginex_by_groups": ratio("seconds", &groups, &outre)?,
        "times_as_fast_as_diskgnn": ratio("seconds", &diskgnn, &outre)?, "mmap_in_a_group": mmap,
        "history_for_all_in_memory": { "rows": ratio("redundancy", &all, &in_memory)?, "times_as_fast": ratio("seconds", &in_memory, &all)? },
        "budget_bytes": budget, "runs": [ginex, groups, outre, diskgnn, in_memory, all, twin],
    }))
}

/// Rows of 4 KiB: a million nodes, batches of 250. A hundred batches an epoch, and half of M's hidden columns.
const WIDE: Size = Size {
    nodes: 1_000_000,
    dim: 1024,
    homophily: "0.7",
    train: "0.025",
    test: "0.02",
    fanout: "10,10,10",
    batch: "250",
    hidden: "128",
    memory: DiskMemory::TenthOfRows,
    epochs: "2",
    staleness: "100",
    device: "cpu",
};

/// What is promised of a comparison.
struct Promised {
    times_ginex: f64,
    /// A history for all nodes in memory, against none.
    times_memory: Option<f64>,
}

fn check(bench: &Bench, size: Size, promised: &Promised) -> Result<Value> {
    let found = speed(bench, size, "12")?;
    println!("{found:#}");
    let ginex = number(&found, "times_as_fast_as_ginex")?;
    let memory = number(&found["history_for_all_in_memory"], "times_as_fast")?;
    println!("{ginex:.2} times as fast as ginex; in memory a history makes {memory:.2} times as fast");
    let times_ginex = promised.times_ginex;
    ensure!(ginex >= times_ginex, "{ginex:.2} times as fast as ginex, {times_ginex} were promised");
    if let Some(times) = promised.times_memory {
        ensure!(memory >= times, "a history for all nodes: {memory:.2} times as fast, {times} promised");
    }
    Ok(found)
}

pub(super) fn full_wide(bench: &Bench) -> Result<Value> {
    check(bench, WIDE, &Promised { times_ginex: 1.4, times_memory: Some(1.5) })
}

pub(super) fn full_communities(bench: &Bench) -> Result<Value> {
    let size = Size { homophily: "0.98", ..WIDE };
    check(bench, size, &Promised { times_ginex: 1.7, times_memory: None })
}

/// Graph M: rows of 512 bytes, of which a row of the history takes two. `diskgnn` stays ahead.
pub(super) fn full_narrow(bench: &Bench) -> Result<Value> {
    let size = Size { nodes: 4_000_000, dim: 128, train: "0.05", batch: "1000", hidden: "256", ..WIDE };
    check(bench, size, &Promised { times_ginex: 1.05, times_memory: None })
}
