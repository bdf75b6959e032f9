//! Esker: what it reads beside the least possible, computed without its planner, and beside other caches of the same size;
//! preparing that is killed; its data path beside those of diskgnn and ginex.

use super::diskgnn::{least_memory, packed_files};
use super::{Bench, ROUNDS, at_most, kill, number, skew, train};
use anyhow::{Context, Result, ensure};
use esker_plan::Lru;
use esker_store::Dataset;
use esker_types::median;
use esker_types::random::{Key, unit};
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::time::Instant;

/// A preset, its size, and how it is sampled.
#[derive(Clone, Copy)]
pub struct BytesCase {
    /// The preset.
    pub preset: &'static str,
    /// Its scale.
    pub scale: &'static str,
    /// Seed nodes per batch.
    pub batch: &'static str,
    /// Fan-outs.
    pub fanout: &'static str,
    /// Epochs, each sampled.
    pub epochs: &'static str,
    /// Caches, in percent of all rows.
    pub percents: &'static [f64],
}

/// The accesses of all batches of a dataset's only samples, in the order of training.
fn accesses_of(bench: &Bench, graph: &str) -> Result<Vec<Vec<u32>>> {
    let dataset = Dataset::open(&bench.path(graph))?;
    let (_, samples) = dataset
        .all_derived()?
        .into_iter()
        .find(|(name, _)| name.starts_with("samples-"))
        .context("samples beside the packed rows")?;
    let samples = samples?;
    let array = |name: &str| {
        samples.arrays.iter().find(|array| array.entry().name == name).context("an array of samples")
    };
    let accesses = array("accesses")?.read_whole::<u32>()?;
    let (mut all, mut at) = (Vec::new(), 0);
    for entry in array("entries")?.read_whole::<[u64; 15]>()? {
        let end = at + entry[2] as usize;
        all.push(accesses[at..end].to_vec());
        at = end;
    }
    Ok(all)
}

/// Misses of the best cache: after each batch, those rows stay that are used soonest. By a sorted set of next uses, not by
/// the planner's counts.
fn least_misses(trace: &[Vec<u32>], slots: usize) -> u64 {
    let mut uses: HashMap<u32, Vec<u32>> = HashMap::new();
    for (batch, rows) in trace.iter().enumerate().rev() {
        rows.iter().for_each(|row| uses.entry(*row).or_default().push(batch as u32));
    }
    let (mut cached, mut staying, mut misses) = (HashMap::<u32, u32>::new(), BTreeSet::new(), 0);
    for rows in trace {
        for row in rows {
            match cached.remove(row) {
                Some(next) => drop(staying.remove(&(next, *row))),
                None => misses += 1,
            }
        }
        for row in rows {
            let left = uses.get_mut(row).expect("every row was seen");
            left.pop();
            if let Some(next) = left.last() {
                cached.insert(*row, *next);
                staying.insert((*next, *row));
            }
        }
        while staying.len() > slots {
            let Some((_, row)) = staying.pop_last() else { break };
            cached.remove(&row);
        }
    }
    misses
}

/// Misses of a cache that has the rows accessed most for the whole run, including those that fill it.
fn static_misses(trace: &[Vec<u32>], slots: usize) -> u64 {
    let mut counts: HashMap<u32, u64> = HashMap::new();
    trace.iter().flatten().for_each(|row| *counts.entry(*row).or_default() += 1);
    let mut counts: Vec<u64> = counts.into_values().collect();
    counts.sort_unstable_by_key(|count| std::cmp::Reverse(*count));
    let slots = slots.min(counts.len());
    slots as u64 + counts[slots..].iter().sum::<u64>()
}

/// Bytes that epochs of training read, by the summary of a run.
fn bytes_read(summary: &Value) -> Result<f64> {
    let epochs = summary["epochs"].as_array().context("epochs")?;
    epochs.iter().map(|epoch| number(epoch, "bytes_read")).sum()
}

/// What esker reads with caches of several sizes: exactly what the best cache of that size misses, in whole pages. Beside it
/// what ginex and diskgnn read, and what a static cache and LRU would. Losses are those of memory.
pub fn bytes(bench: &Bench, case: &BytesCase, most: f64) -> Result<Value> {
    let BytesCase { preset, scale, batch, fanout, epochs, percents } = *case;
    bench.json(&["generate", preset, "--preset", preset, "--scale", scale])?;
    let info = bench.json(&["info", preset])?;
    let (nodes, all_bytes) = (number(&info, "nodes")?, super::diskgnn::feature_bytes(bench, preset)?.0);
    let row_bytes = all_bytes as f64 / nodes;
    let run = |strategy: &str, more: &[&str]| -> Result<Value> {
        let out = format!("run-{strategy}");
        let words = ["train", preset, "--fanout", fanout, "--hidden", "8", "--batch", batch, "--seed", "3"];
        let run = ["--epochs", epochs, "--eval", "none", "--final-eval", "none", "--device", "cpu"];
        let summary =
            bench.json(&[&words[..], &run, &["--strategy", strategy, "--out", &out], more].concat())?;
        fs::remove_dir_all(bench.path(&out))?;
        Ok(summary)
    };
    let expected = run("memory", &[])?["loss_digest"].clone();
    let (mut rows, mut worst, mut trace) = (Vec::new(), 0f64, Vec::new());
    for percent in percents {
        let slots = (nodes * percent / 100.0) as u64;
        let cache = format!("{}B", (slots as f64 * row_bytes) as u64);
        let words = ["--feature-cache", &cache, "--disk-budget", "40GB"];
        let esker = run("esker", &words)?;
        ensure!(esker["loss_digest"] == expected, "{preset}, {percent}%: losses differ from those in memory");
        let plan = &esker["prepared"]["plan"];
        if trace.is_empty() {
            trace = accesses_of(bench, preset)?;
        }
        let least = least_misses(&trace, slots as usize);
        ensure!(
            plan["misses"] == least,
            "{preset}, {percent}%: {} rows are planned to be read, {least} are the least",
            plan["misses"]
        );
        let mut lru = Lru::new(nodes as u64, slots);
        let lru: u64 = trace.iter().map(|rows| lru.batch(rows)).sum();
        let (read, bound) = (bytes_read(&esker)?, least as f64 * row_bytes);
        remove_derived(bench, preset, "esker-")?;
        let ginex = bytes_read(&run("ginex", &words)?)?;
        let diskgnn = run("diskgnn", &[&words[..], &["--epochs-sampled", epochs]].concat())?;
        remove_derived(bench, preset, "diskgnn-")?;
        let filled = number(&diskgnn["prepared"]["packing"], "slots")? * row_bytes;
        let of_rows = |rows: u64| rows as f64 * row_bytes;
        worst = worst.max(read / bound);
        rows.push(json!({
            "percent": percent, "slots": slots, "accesses": plan["accesses"], "least_bytes": bound,
            "esker_bytes": read, "esker_over_least": read / bound, "esker_disk_bytes": esker["prepared"]["disk_bytes"],
            "ginex_bytes": ginex, "diskgnn_bytes": bytes_read(&diskgnn)? + filled,
            "static_bytes": of_rows(static_misses(&trace, slots as usize)), "lru_bytes": of_rows(lru),
        }));
    }
    fs::remove_dir_all(bench.path(preset))?;
    ensure!(worst <= most, "{preset}: {worst:.4} times the least bytes, {most} were promised: {rows:#?}");
    Ok(
        json!({ "preset": preset, "scale": scale, "batch": batch, "fanout": fanout, "epochs": epochs, "sizes": rows, "worst": worst }),
    )
}

/// Removes derived data of a kind.
fn remove_derived(bench: &Bench, graph: &str, kind: &str) -> Result<()> {
    for entry in fs::read_dir(bench.path(graph).join("derived"))? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(kind)) {
            fs::remove_dir_all(path)?;
        }
    }
    Ok(())
}

/// SIGKILL at random moments of preparing, with other memory and threads each time. The re-run completes, and its result is
/// that of an undisturbed run.
pub fn killed(bench: &Bench, graph: &str, times: u64, seed: u64) -> Result<Value> {
    let cache = format!("{}B", super::diskgnn::feature_bytes(bench, graph)?.0 / 10);
    let words =
        ["prepare", graph, "--strategy", "esker", "--fanout", "4,2", "--hidden", "16", "--batch", "20"];
    let more = ["--epochs", "3", "--feature-cache", &cache, "--prepared", "packed", "--safe-point", "2MiB"];
    let words = [&words[..], &more].concat();
    let least = least_memory(bench, &[&words[..], &["--threads", "3"]].concat())?;
    let with = |random: u64| -> Vec<String> {
        let (memory, threads) = (least + random % (8 << 20) + (8 << 20), 1 + (random >> 32) % 3);
        let chosen = ["--memory".into(), format!("{memory}B"), "--threads".into(), threads.to_string()];
        words.iter().map(ToString::to_string).chain(chosen).collect()
    };
    let borrowed = |words: &[String]| bench.esker(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let started = Instant::now();
    bench.json_of(borrowed(&with(0)).arg("--json"))?;
    let whole = started.elapsed();
    let expected = packed_files(&bench.path("packed"))?;
    let (key, mut counts) = (Key::new(seed), [0u64; 2]);
    for case in 0..times {
        fs::remove_dir_all(bench.path("packed")).ok();
        for kill in 0..1 + case % 4 {
            let moment = whole.mul_f64(unit(key.with(case).at(kill)));
            let finished = kill::run_until(borrowed(&with(key.with(case).at(100 + kill))), moment)?;
            counts[finished as usize] += 1;
        }
        bench.json_of(borrowed(&with(key.with(case).at(200))).arg("--json"))?;
        let found = packed_files(&bench.path("packed"))?;
        let names = expected.keys().chain(found.keys());
        let differ: BTreeSet<&String> =
            names.filter(|name| expected.get(*name) != found.get(*name)).collect();
        ensure!(differ.is_empty(), "case {case}: {differ:?} differ after kills");
    }
    fs::remove_dir_all(bench.path("packed"))?;
    Ok(json!({ "cases": times, "killed": counts[0], "finished_before": counts[1] }))
}

/// The data path of esker beside those of diskgnn and ginex, in turn, with a tenth of the rows cached: seconds per batch
/// without training, medians of some rounds.
pub fn speed(bench: &Bench, graph: &str, batch: &str, batches: &str, rounds: usize) -> Result<Value> {
    let cache = format!("{}B", super::diskgnn::feature_bytes(bench, graph)?.0 / 10);
    let run = |strategy: &str| -> Result<Value> {
        let packed = bench.text_path(&format!("speed-{strategy}"));
        let words =
            ["bench", "epoch", graph, "--strategy", strategy, "--fanout", "10,10,10", "--batch", batch];
        let more = ["--batches", batches, "--warm", "2", "--no-compute", "--feature-cache", &cache];
        let prepared: &[&str] = if strategy == "ginex" { &[] } else { &["--prepared", &packed] };
        super::ginex::drop_caches();
        bench.json(&[&words[..], &more, prepared].concat())
    };
    let (mut rounds_found, mut ratios) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let [esker, diskgnn, ginex] = ["esker", "diskgnn", "ginex"].map(run);
        let (esker, diskgnn, ginex) = (esker?, diskgnn?, ginex?);
        let seconds = |found: &Value| number(found, "seconds_per_batch");
        ratios.push([seconds(&diskgnn)? / seconds(&esker)?, seconds(&ginex)? / seconds(&esker)?]);
        rounds_found.push(json!({ "esker": esker, "diskgnn": diskgnn, "ginex": ginex }));
    }
    let of = |at: usize| median(&ratios.iter().map(|ratio| ratio[at]).collect::<Vec<f64>>());
    Ok(json!({ "rounds": rounds_found, "over_diskgnn": of(0), "over_ginex": of(1) }))
}

/// The presets of the skew proof, with batches that are a small part of the graph.
const FULL: [BytesCase; 4] = {
    let percents: &[f64] = &[1.0, 5.0, 10.0, 25.0, 50.0];
    let shared = BytesCase { preset: "", scale: "", batch: "100", fanout: "10,10,10", epochs: "2", percents };
    [
        BytesCase { preset: skew::TABLE[0].preset, scale: "0.01", ..shared },
        BytesCase { preset: skew::TABLE[1].preset, scale: "0.002", ..shared },
        BytesCase { preset: skew::TABLE[2].preset, scale: "0.01", ..shared },
        BytesCase { preset: skew::TABLE[3].preset, scale: "0.0025", ..shared },
    ]
};

pub(super) fn full_bytes(bench: &Bench) -> Result<Value> {
    let cases = FULL.iter().map(|case| bytes(bench, case, f64::MAX)).collect::<Result<Vec<Value>>>()?;
    let worst = cases.iter().map(|case| number(case, "worst")).collect::<Result<Vec<f64>>>()?;
    let asked: Vec<Value> = cases
        .iter()
        .zip(worst)
        .map(|(case, worst)| at_most(&format!("bytes over the least, {}", case["preset"]), worst, 1.02))
        .collect();
    Ok(json!({ "presets": cases, "asked": asked }))
}

pub(super) fn full_kill(bench: &Bench) -> Result<Value> {
    train::graph(bench, 100_000, 64)?;
    killed(bench, "graph", 50, 5)
}

pub(super) fn full_speed(bench: &Bench) -> Result<Value> {
    train::graph(bench, 1_000_000, 128)?;
    speed(bench, "graph", "1000", "40", ROUNDS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_is_that_of_the_book() {
        let trace = [vec![1], vec![2], vec![3], vec![1], vec![1, 2]];
        assert_eq!(least_misses(&trace, 0), 6);
        assert_eq!(least_misses(&trace, 1), 4);
        assert_eq!(least_misses(&trace, 2), 3);
        assert_eq!(static_misses(&trace, 1), 1 + 3);
    }
}
