//! Ginex: the same losses as in memory, an optimal cache, far more data than memory, kills and full disks, and its
//! speed compared with the page cache and PyG.

use super::{Bench, ROUNDS, number, sample, succeed, train};
use crate::cgroup::Group;
use anyhow::{Context, Result, ensure};
use esker_types::median;
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

/// Memory of the kernel for a process, on top of the budget: page tables, page cache of the program.
pub(super) const GROUP_SLACK_BYTES: u64 = 16 << 20;

/// Variation of the memory that the allocator keeps.
const NOISE_BYTES: f64 = 1024.0 * 1024.0;

/// Losses are bit-identical to those of `memory`, for several random seeds, caches, superbatches and row widths.
pub fn same_losses(bench: &Bench, nodes: &str, widths: &[&str], epochs: &str) -> Result<Value> {
    let mut rows = Vec::new();
    for dim in widths {
        let graph = format!("same-{dim}");
        bench.json(&["generate", &graph, "--nodes", nodes, "--degree", "12", "--dim", dim, "--seed", "1"])?;
        let row_bytes = dim.parse::<u64>()? * 4;
        let all = format!("{}B", nodes.parse::<u64>()? * row_bytes);
        // 0 rows, 1 row, a few, all; superbatches of 1, some that do not divide the epoch, one longer than all epochs.
        let (one, few) = (format!("{row_bytes}B"), format!("{}B", row_bytes * 500));
        let cases =
            [("1", "1", "0B"), ("2", "1", &one), ("3", "7", &one), ("4", "7", &few), ("5", "100000", &all)];
        for (seed, superbatch, cache) in cases {
            let run = |strategy: &str, more: &[&str]| {
                let out = format!("{graph}-{strategy}-{seed}");
                let mut words = vec!["train", &graph, "--fanout", "8,4", "--hidden", "32", "--batch", "300"];
                words.extend(["--dropout", "0.2", "--epochs", epochs, "--seed", seed, "--eval", "none"]);
                words.extend(["--strategy", strategy, "--out", &out]);
                words.extend(more);
                bench.json(&words)
            };
            let memory = run("memory", &[])?;
            let ginex = run("ginex", &["--superbatch", superbatch, "--feature-cache", cache])?;
            ensure!(memory["loss_digest"].is_string(), "{memory:#}");
            ensure!(
                memory["loss_digest"] == ginex["loss_digest"],
                "{graph}, seed {seed}, superbatch {superbatch}, cache {cache}: {} and {}",
                memory["loss_digest"],
                ginex["loss_digest"]
            );
            rows.push(json!({
                "dim": dim, "seed": seed, "superbatch": superbatch, "cache": cache,
                "loss_digest": ginex["loss_digest"], "hit_ratio": ginex["epochs"][0]["hit_ratio"]["host"],
            }));
        }
        fs::remove_dir_all(bench.path(&graph))?;
    }
    Ok(Value::Array(rows))
}

/// Hit ratios of Belady, static and LRU on a preset; Belady is never worse.
pub fn hit_ratios(bench: &Bench, preset: &str, scale: &str, batch: &str, batches: &str) -> Result<Value> {
    bench
        .json(&["generate", preset, "--preset", preset, "--scale", scale, "--dim", "1", "--dtype", "f32"])?;
    let plot = bench.text_path(&format!("{preset}.svg"));
    let (graph, scratch) = (bench.text_path(preset), bench.text_path(""));
    let words = ["cache", &graph, "--batch", batch, "--batches", batches, "--scratch", &scratch];
    let found = bench.experiment(&[&words[..], &["--plot", &plot]].concat())?;
    for size in found["sizes"].as_array().context("sizes")? {
        let misses = |policy: &str| number(size, &format!("{policy}_misses"));
        let belady = misses("belady")?;
        ensure!(
            belady <= misses("lru")? && belady <= misses("static")?,
            "{preset}: Belady misses more: {size:#}"
        );
    }
    ensure!(fs::read_to_string(&plot)?.matches("<polyline").count() == 3, "the plot has not three lines");
    fs::remove_dir_all(bench.path(preset))?;
    Ok(found)
}

/// Planning speed of superbatches on one core, from files, medians of some rounds. Memory does not grow with the
/// trace.
pub fn planning(bench: &Bench, batches: [&str; 2], rounds: usize) -> Result<Value> {
    let (graph, scratch) = (bench.text_path("graph"), bench.text_path(""));
    let run = |batches: &str| {
        let words = ["cache", &graph, "--batches", batches, "--percent", "5,20,50", "--scratch", &scratch];
        bench.experiment(&words)
    };
    let short = run(batches[0])?;
    let all: Vec<Value> = (0..rounds).map(|_| run(batches[1])).collect::<Result<_>>()?;
    let long = all.first().context("a round at least")?;
    let (few, many) = (number(&short, "peak_plan_bytes")?, number(long, "peak_plan_bytes")?);
    let accesses = number(long, "accesses")? - number(&short, "accesses")?;
    ensure!(
        many - few < accesses * 0.5 + NOISE_BYTES && accesses * 4.0 > 2.0 * NOISE_BYTES,
        "planning {accesses} accesses more took {} bytes more; the trace must not be held",
        many - few
    );
    let sizes = long["sizes"].as_array().context("sizes")?.len();
    let rate = |size: usize| -> Result<f64> {
        let rounds = all.iter().map(|run| number(&run["sizes"][size], "planned_per_second"));
        Ok(median(&rounds.collect::<Result<Vec<_>>>()?))
    };
    let rates: Vec<f64> = (0..sizes).map(rate).collect::<Result<_>>()?;
    Ok(json!({
        "accesses": long["accesses"], "nodes": long["nodes"], "planned_per_second": rates,
        "plan_bytes": [few, many], "more_accesses": accesses,
    }))
}

/// Trains with features four times and topology twice as large as the memory of its cgroup.
pub fn far_beyond_memory(bench: &Bench, group_bytes: u64, epochs: &str, batch: &str) -> Result<Value> {
    // 64 neighbours of 4 bytes and 128 numbers of 4 bytes per node: features are twice the topology.
    // Slightly more nodes, because the in-degree is only about 64 on average.
    let nodes = (2 * group_bytes / (64 * 4) * 21 / 20).to_string();
    bench.json(&[
        "generate", "large", "--nodes", &nodes, "--degree", "64", "--dim", "128", "--seed", "1", "--memory",
        "256MiB",
    ])?;
    let info = bench.json(&["info", "large"])?;
    let (features, lists) = (number(&info, "nodes")? * 512.0, number(&info, "edges")? * 4.0);
    ensure!(features >= 4.0 * group_bytes as f64 && lists >= 2.0 * group_bytes as f64, "{info:#}");
    let memory = format!("{}B", group_bytes - GROUP_SLACK_BYTES);
    let group = Group::create(group_bytes)?;
    let mut words = vec!["train", "large", "--strategy", "ginex", "--memory", &memory, "--fanout", "10,5"];
    words.extend([
        "--hidden",
        "32",
        "--batch",
        batch,
        "--epochs",
        epochs,
        "--eval",
        "none",
        "--threads",
        "2",
    ]);
    words.extend(["--out", "large-run", "--json"]);
    let output = succeed(&mut group.wrap(&bench.esker(&words)))?;
    let summary: Value = serde_json::from_slice(&output.stdout)?;
    let peak = number(&summary, "peak_host_bytes")?;
    let budget = number(&summary, "budget_host_bytes")?;
    ensure!(peak <= budget, "the run promised {budget} bytes and took {peak}");
    // The same losses if everything fits.
    let mut words: Vec<&str> = words.into_iter().filter(|word| *word != "--json").collect();
    words[3] = "memory";
    words[5] = "16GiB";
    let at = words.iter().position(|word| *word == "large-run").context("--out")?;
    words[at] = "large-memory";
    let inside = bench.json(&words)?;
    ensure!(inside["loss_digest"] == summary["loss_digest"], "losses differ from those in memory");
    fs::remove_dir_all(bench.path("large"))?;
    Ok(json!({
        "group_bytes": group_bytes, "feature_bytes": features, "topology_bytes": lists,
        "peak_host_bytes": peak, "budget_host_bytes": budget, "loss_digest": summary["loss_digest"],
        "epoch": summary["epochs"][0],
    }))
}

/// The disk becomes full while a trace is written. The error is clear, dataset and checkpoint are intact, and with
/// free space the run resumes to the same losses. `None` if no small disk can be made.
pub fn full_disk(bench: &Bench) -> Result<Option<Value>> {
    let Some(mounted) = SmallDisk::mount(bench)? else { return Ok(None) };
    let disk = mounted.path().to_path_buf();
    let run = disk.join("run").to_string_lossy().into_owned();
    let words = |superbatch: &'static str, more: &[&str]| {
        let mut words = vec!["train", "graph", "--fanout", "10,5", "--hidden", "32", "--batch", "200"];
        words.extend(["--epochs", "4", "--eval", "none", "--strategy", "ginex", "--superbatch", superbatch]);
        words.extend(["--checkpoint-batches", "1", "--disk-budget", "10GiB"]);
        words.iter().chain(more).map(|word| word.to_string()).collect::<Vec<String>>()
    };
    let esker = |words: &[String]| bench.esker(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let expected = bench.json_of(&mut esker(&words("3", &["--out", "full-disk-whole", "--json"])))?;
    // Some batches on a disk with enough space, stopped once a checkpoint exists.
    let mut child = esker(&words("1", &["--out", &run])).stderr(std::process::Stdio::null()).spawn()?;
    let checkpoint = disk.join("run/checkpoint.safetensors");
    while !checkpoint.exists() {
        ensure!(child.try_wait()?.is_none(), "the run ended before its first checkpoint");
        std::thread::yield_now();
    }
    child.kill()?;
    child.wait()?;
    let before = fs::read(&checkpoint)?;
    // Another file takes almost all of the remaining disk space.
    let free = free_bytes(&disk)?;
    fs::write(disk.join("ballast"), vec![1u8; free.saturating_sub(300 << 10) as usize])?;
    let refused = esker(&words("100000", &["--out", &run, "--resume"])).output()?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success(), "a full disk did not stop the run");
    ensure!(said.contains("no space left on this disk") && said.contains("superbatches"), "{said}");
    ensure!(!said.contains("panicked"), "{said}");
    ensure!(fs::read(&checkpoint)? == before, "the checkpoint is not what it was");
    bench.json(&["verify", "graph"])?;
    fs::remove_file(disk.join("ballast"))?;
    let found = bench.json_of(&mut esker(&words("3", &["--out", &run, "--resume", "--json"])))?;
    ensure!(found["loss_digest"] == expected["loss_digest"], "the resumed run differs");
    drop(mounted);
    let folder = bench.directory.to_string_lossy().into_owned();
    let said = said.lines().last().unwrap_or_default().replace(&folder, "...");
    Ok(Some(json!({ "said": said, "loss_digest": found["loss_digest"] })))
}

pub(super) fn free_bytes(folder: &std::path::Path) -> Result<u64> {
    let output = succeed(Command::new("df").args(["--output=avail", "-B1"]).arg(folder))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().nth(1).and_then(|line| line.trim().parse().ok()).context("df says how much is free")
}

/// A disk of 64 MB, unmounted at the end.
pub(super) struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    /// `None` if nothing can be mounted here.
    pub fn mount(bench: &Bench) -> Result<Option<SmallDisk>> {
        let path = bench.path("small-disk");
        fs::create_dir_all(&path)?;
        let words = ["-t", "tmpfs", "-o", "size=64m", "esker-test"];
        let mounted = Command::new("mount").args(words).arg(&path).output();
        Ok(mounted.is_ok_and(|output| output.status.success()).then_some(SmallDisk(path)))
    }

    pub fn path(&self) -> &std::path::Path {
        &self.0
    }

    /// From now on nothing can be written.
    pub fn make_read_only(&self) -> Result<()> {
        succeed(Command::new("mount").args(["-o", "remount,ro"]).arg(&self.0))?;
        Ok(())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// A preset and the memory it is measured with.
#[derive(Clone, Copy)]
pub struct Case {
    /// The preset.
    pub preset: &'static str,
    /// Its scale.
    pub scale: &'static str,
    /// Seed nodes per batch.
    pub batch: &'static str,
    /// Size of the features as a multiple of the cgroup's memory.
    pub features_over_group: f64,
}

/// Full size. `mmap` keeps the whole topology in memory, which must fit into the cgroup.
pub const CASES: [Case; 3] = [
    Case { preset: "papers100m", scale: "0.02", batch: "100", features_over_group: 2.0 },
    Case { preset: "friendster", scale: "0.03", batch: "100", features_over_group: 1.25 },
    Case { preset: "igb", scale: "0.0015", batch: "30", features_over_group: 4.0 },
];

/// Batches of `mmap` that are measured, and those before them.
const MAPPED_BATCHES: &str = "14";
const MAPPED_WARM: &str = "8";

/// `esker bench epoch` inside a cgroup, after emptying the page cache.
pub(super) fn epoch(bench: &Bench, group_bytes: u64, words: &[&str]) -> Result<Value> {
    drop_caches();
    let group = Group::create(group_bytes)?;
    let memory = format!("{}B", group_bytes - GROUP_SLACK_BYTES);
    let scratch = bench.directory.to_string_lossy().into_owned();
    let mut all = vec!["bench", "epoch"];
    all.extend(words);
    all.extend(["--memory", &memory, "--eval", "none", "--scratch", &scratch, "--json"]);
    let found = bench.json_of(&mut group.wrap(&bench.esker(&all)))?;
    let (peak, budget) = (number(&found, "peak_host_bytes")?, number(&found, "budget_host_bytes")?);
    ensure!(peak <= budget, "{words:?}: {budget} bytes were promised and {peak} taken");
    Ok(found)
}

pub(super) fn drop_caches() {
    let _ = Command::new("sync").status();
    let _ = fs::write("/proc/sys/vm/drop_caches", "3");
}

/// An epoch, and the data path alone, against `mmap` inside the same group, in turn; the missed rows per second while
/// gathering against the rate at which the disk gives single rows to a bare loop, in the same minutes.
pub fn beside_mmap(bench: &Bench, case: &Case, rounds: usize, most_batches: u64) -> Result<Value> {
    let Case { preset, scale, batch, features_over_group } = *case;
    bench.json(&["generate", preset, "--preset", preset, "--scale", scale])?;
    let info = bench.json(&["info", preset])?;
    let row_bytes = number(&info, "feature_dim")? * if info["feature_dtype"] == "f32" { 4.0 } else { 2.0 };
    let group_bytes = (number(&info, "nodes")? * row_bytes / features_over_group) as u64;
    let epoch_batches = (number(&info, "train")? / batch.parse::<f64>()?).ceil() as u64;
    let batches = epoch_batches.min(most_batches).to_string();
    let common = [preset, "--fanout", "10,10,10", "--hidden", "256", "--batch", batch];
    let (mut all, mut path_ratios, mut epoch_ratios, mut limits) = (vec![], vec![], vec![], vec![]);
    for _ in 0..rounds {
        // Ginex samples and plans an epoch before its first batch, so the whole epoch counts. All batches of mmap are
        // alike once the page cache is full; some batches before that are left out.
        let ginex = |more: &[&str]| {
            let words = ["--strategy", "ginex", "--warm", "0", "--batches", &batches];
            epoch(bench, group_bytes, &[&common[..], &words, more].concat())
        };
        let mmap = |more: &[&str]| {
            let words = ["--strategy", "mmap", "--warm", MAPPED_WARM, "--batches", MAPPED_BATCHES];
            epoch(bench, group_bytes, &[&common[..], &words, more].concat())
        };
        let (path, mapped_path) = (ginex(&["--no-compute"])?, mmap(&["--no-compute"])?);
        let (whole, mapped) = (ginex(&[])?, mmap(&[])?);
        let limit = read_limit(bench, preset, row_bytes as u64, number(&path, "bytes_useful_per_batch")?)?;
        let seconds = |value: &Value| number(value, "seconds_per_batch");
        path_ratios.push(seconds(&mapped_path)? / seconds(&path)?);
        epoch_ratios.push(seconds(&mapped)? / seconds(&whole)?);
        // Rows, not reads: rows that are close to each other are one read.
        let disk = &path["disk"];
        let missed = number(disk, "rows")? * (1.0 - number(disk, "hit_ratio")?);
        limits.push(missed / number(disk, "read_seconds")? / limit);
        println!(
            "{preset}: {path_ratios:.2?} of mmap's data path, {epoch_ratios:.2?} of its epoch, {limits:.2?} of the disk's rows"
        );
        all.push(json!({
            "ginex_data_path": path, "mmap_data_path": mapped_path, "ginex": whole, "mmap": mapped,
            "disk_rows_per_second": limit,
        }));
    }
    fs::remove_dir_all(bench.path(preset))?;
    Ok(json!({
        "preset": preset, "scale": scale, "batch": batch, "batches": batches, "group_bytes": group_bytes,
        "features_over_group": features_over_group,
        "data_path_over_mmap": median(&path_ratios), "epoch_over_mmap": median(&epoch_ratios),
        "rows_of_limit": median(&limits), "bound_by": all[0]["ginex"]["bound_by"], "rounds": all,
    }))
}

/// Single rows of this size per second that a bare loop reads from a graph's features, to as much memory as prefetched
/// batches have: what stays in the CPU cache is faster than anything that is used.
pub(super) fn read_limit(bench: &Bench, graph: &str, row_bytes: u64, batch_bytes: f64) -> Result<f64> {
    let workload = match row_bytes {
        0..=512 => "rows-512",
        513..=2048 => "rows-1024",
        _ => "rows-4096",
    };
    let features = bench.path(graph).join("node-features.bin").to_string_lossy().into_owned();
    let kept = format!("{}B", (batch_bytes * 3.0) as u64);
    let words = ["bench", "io", "--file", &features, "--kept", &kept, "--only", workload];
    let found = bench.json(&[&words[..], &["--seconds", "1", "--rounds", "3"]].concat())?;
    number(&found["workloads"][0], "kept_reads_per_second")
}

/// Compared with PyG with memory-mapped features, on the graph and in the memory of the published comparison.
pub fn beside_pyg(
    bench: &Bench,
    group_bytes: u64,
    rounds: usize,
    batches: &str,
    pyg_batches: &str,
) -> Result<Value> {
    let python = sample::peers_python().context("bench/peers/setup.sh left no environment behind")?;
    let script = crate::root().join("bench/peers/train.py");
    let (mut all, mut ratios) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let words = ["graph", "--fanout", "10,10,10", "--hidden", "256", "--batch", "1000", "--warm", "0"];
        let ours = epoch(
            bench,
            group_bytes,
            &[&words[..], &["--strategy", "ginex", "--batches", batches]].concat(),
        )?;
        drop_caches();
        let group = Group::create(group_bytes)?;
        let mut command = Command::new(&python);
        command.arg(&script).arg(bench.path("graph")).args([
            "--mapped",
            "--batches",
            pyg_batches,
            "--warm",
            "1",
        ]);
        let pyg = bench.json_of(&mut group.wrap(&command))?;
        ratios.push(number(&pyg, "seconds_per_batch")? / number(&ours, "seconds_per_batch")?);
        all.push(json!({ "ginex": ours, "pyg_mapped": pyg }));
    }
    Ok(json!({ "group_bytes": group_bytes, "times_pyg": median(&ratios), "rounds": all }))
}

/// The effect of superbatch, feature width, memory and batch size on an epoch: the paper's Figures 16 to 19.
pub fn sensitivity(bench: &Bench, nodes: &str, batches: u64, rounds: usize) -> Result<Value> {
    let sweep = Sweep { bench, nodes: nodes.parse()?, batches, rounds };
    sweep.make("base", "128")?;
    let found = json!({
        "superbatch (Figure 16)": sweep.superbatches()?,
        "feature dimension (Figure 17)": sweep.dimensions()?,
        "memory (Figure 18)": sweep.memories()?,
        "batch (Figure 19)": sweep.batch_sizes()?,
    });
    fs::remove_dir_all(bench.path("base"))?;
    Ok(found)
}

/// Epochs that differ in one setting. Each is measured in several rounds; medians count.
struct Sweep<'a> {
    bench: &'a Bench,
    nodes: u64,
    /// Number of batches of 500 seed nodes.
    batches: u64,
    rounds: usize,
}

impl Sweep<'_> {
    fn make(&self, name: &str, dim: &str) -> Result<Value> {
        let nodes = self.nodes.to_string();
        self.bench.json(&["generate", name, "--nodes", &nodes, "--degree", "15", "--dim", dim, "--seed", "1"])
    }

    /// A cgroup with memory for a share of the features.
    fn group_bytes(&self, dim: u64, share: f64) -> u64 {
        (self.nodes as f64 * dim as f64 * 4.0 * share) as u64 + (160 << 20)
    }

    fn seconds(&self, graph: &str, group: u64, words: &[&str]) -> Result<f64> {
        let common = [graph, "--fanout", "10,10", "--hidden", "128", "--warm", "0"];
        let rounds = (0..self.rounds)
            .map(|_| number(&epoch(self.bench, group, &[&common[..], words].concat())?, "seconds"));
        Ok(median(&rounds.collect::<Result<Vec<_>>>()?))
    }

    /// Both strategies with batches of this many seed nodes. `mmap` is measured on a quarter of them and extrapolated:
    /// it plans nothing, and its page cache is full after the first few.
    fn both(&self, graph: &str, group: u64, batch: u64) -> Result<[f64; 2]> {
        let (all, size) = ((self.batches * 500 / batch).max(1), batch.to_string());
        let seconds = |strategy: &str, count: u64| -> Result<f64> {
            let number = count.to_string();
            let words = ["--batch", &size, "--batches", &number, "--strategy", strategy];
            Ok(self.seconds(graph, group, &words)? * all as f64 / count as f64)
        };
        Ok([seconds("ginex", all)?, seconds("mmap", all.div_ceil(4))?])
    }

    fn superbatches(&self) -> Result<Vec<Value>> {
        let (group, count) = (self.group_bytes(128, 0.25), self.batches.to_string());
        let mut rows = Vec::new();
        for parts in [8, 4, 2, 1] {
            let superbatch = (self.batches / parts).max(1);
            let word = superbatch.to_string();
            let words = ["--batch", "500", "--batches", &count, "--strategy", "ginex", "--superbatch", &word];
            rows.push(json!({ "superbatch": superbatch, "seconds": self.seconds("base", group, &words)? }));
        }
        Ok(rows)
    }

    fn dimensions(&self) -> Result<Vec<Value>> {
        let mut rows = Vec::new();
        for dim in ["64", "128", "256", "384"] {
            let graph = format!("dim-{dim}");
            self.make(&graph, dim)?;
            let [ginex, mmap] = self.both(&graph, self.group_bytes(dim.parse()?, 0.25), 500)?;
            rows.push(
                json!({ "dim": dim, "ginex_seconds": ginex, "mmap_seconds": mmap, "speedup": mmap / ginex }),
            );
            fs::remove_dir_all(self.bench.path(&graph))?;
        }
        Ok(rows)
    }

    fn memories(&self) -> Result<Vec<Value>> {
        let mut rows = Vec::new();
        for share in [0.125, 0.25, 0.5] {
            let group = self.group_bytes(128, share);
            let [ginex, mmap] = self.both("base", group, 500)?;
            rows.push(json!({
                "features_in_memory": share, "group_bytes": group, "ginex_seconds": ginex, "mmap_seconds": mmap,
                "speedup": mmap / ginex,
            }));
        }
        Ok(rows)
    }

    fn batch_sizes(&self) -> Result<Vec<Value>> {
        let mut rows = Vec::new();
        for batch in [125, 250, 500, 1000] {
            let [ginex, mmap] = self.both("base", self.group_bytes(128, 0.25), batch)?;
            rows.push(
                json!({ "batch": batch, "ginex_seconds": ginex, "mmap_seconds": mmap, "speedup": mmap / ginex }),
            );
        }
        Ok(rows)
    }
}

pub(super) fn full_same(bench: &Bench) -> Result<Value> {
    same_losses(bench, "100000", &["7", "100", "128", "1024"], "2")
}

pub(super) fn full_cache(bench: &Bench) -> Result<Value> {
    let cases = [("papers100m", "0.03", "31"), ("friendster", "0.03", "31"), ("igb", "0.01", "10")];
    let mut rows = Vec::new();
    for (preset, scale, batch) in cases {
        rows.push(hit_ratios(bench, preset, scale, batch, "1000")?);
        let plot = crate::root().join("bench/record").join(format!("cache-{preset}.svg"));
        fs::copy(bench.path(&format!("{preset}.svg")), plot)?;
    }
    // Tables by row fit the CPU caches with a million nodes. With four million they do not, and are only reported.
    train::graph(bench, 4_000_000, 1)?;
    let far = planning(bench, ["20", "100"], ROUNDS)?;
    fs::remove_dir_all(bench.path("graph"))?;
    train::graph(bench, 1_000_000, 1)?;
    let planning = planning(bench, ["10", "50"], ROUNDS)?;
    for rate in planning["planned_per_second"].as_array().context("rates")? {
        let rate = rate.as_f64().unwrap_or(0.0);
        ensure!(rate >= 50e6, "planning at {:.1} million accesses a second, 50 were promised", rate / 1e6);
    }
    Ok(json!({ "hit_ratios": rows, "planning": planning, "planning_of_four_million_nodes": far }))
}

pub(super) fn full_budget(bench: &Bench) -> Result<Value> {
    far_beyond_memory(bench, 384 << 20, "1", "500")
}

pub(super) fn full_kill(bench: &Bench) -> Result<Value> {
    train::graph(bench, 200_000, 64)?;
    let killed = train::killed_with(bench, "6", 100, 5, &["--strategy", "ginex", "--superbatch", "5"])?;
    let full = full_disk(bench)?;
    Ok(json!({ "killed": killed, "full_disk": full }))
}

pub(super) fn full_speed(bench: &Bench) -> Result<Value> {
    let mut rows = Vec::new();
    for case in &CASES {
        let found = beside_mmap(bench, case, ROUNDS, 400)?;
        for key in ["data_path_over_mmap", "epoch_over_mmap"] {
            ensure!(
                number(&found, key)? >= 2.1,
                "{}: {key} is {}, 2.1 were promised",
                case.preset,
                found[key]
            );
        }
        ensure!(
            number(&found, "rows_of_limit")? >= 0.9,
            "{}: {} of the disk's rows",
            case.preset,
            found["rows_of_limit"]
        );
        rows.push(found);
    }
    let peers = crate::root().join("target/peers");
    succeed(Command::new(crate::root().join("bench/peers/setup.sh")).arg(&peers))?;
    train::graph(bench, 4_000_000, 128)?;
    let pyg = beside_pyg(bench, 1_900_000_000, ROUNDS, "200", "8")?;
    ensure!(number(&pyg, "times_pyg")? >= 6.0, "{} times PyG's speed, 6 were promised", pyg["times_pyg"]);
    Ok(json!({ "presets": rows, "pyg": pyg }))
}

pub(super) fn full_sensitivity(bench: &Bench) -> Result<Value> {
    sensitivity(bench, "1000000", 64, ROUNDS)
}
