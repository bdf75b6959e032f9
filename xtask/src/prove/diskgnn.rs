//! DiskGNN: the same losses as in memory, the bytes that its plan says, its speed beside ginex, memory and the disk, what
//! preparing costs, and preparing that was killed.

use super::ginex::{GROUP_SLACK_BYTES, drop_caches, epoch, number};
use super::{Bench, kill, sample, succeed, train};
use crate::cgroup::Group;
use anyhow::{Context, Result, ensure};
use esker_types::random::{Key, unit};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of all feature rows, and of one.
fn feature_bytes(bench: &Bench, graph: &str) -> Result<(u64, u64)> {
    let info = bench.json(&["info", graph])?;
    let width = match info["feature_dtype"].as_str() {
        Some("f32") => 4,
        Some("f16" | "bf16") => 2,
        _ => 1,
    };
    let row_bytes = number(&info, "feature_dim")? as u64 * width;
    Ok((number(&info, "nodes")? as u64 * row_bytes, row_bytes))
}

/// Losses to the bit those of `memory` on a graph, for caches and disk budgets given as multiples of the feature bytes
/// (beside as much as it likes); with a budget that is just feasible, and one that is not and says so.
pub fn same_losses(bench: &Bench, graph: &str, budgets: &[f64], batch: &str, epochs: &str) -> Result<Value> {
    let (all_bytes, _) = feature_bytes(bench, graph)?;
    let words = |strategy: &'static str, out: &str| -> Vec<String> {
        let words =
            ["train", graph, "--fanout", "8,4", "--hidden", "32", "--batch", batch, "--dropout", "0.2"];
        let more = [
            "--epochs",
            epochs,
            "--epochs-sampled",
            epochs,
            "--eval",
            "none",
            "--strategy",
            strategy,
            "--out",
            out,
        ];
        words.iter().chain(&more).map(ToString::to_string).collect()
    };
    let run = |words: &[String], more: &[String]| {
        let mut command = bench.esker(&words.iter().chain(more).map(String::as_str).collect::<Vec<_>>());
        command.arg("--json").output().context("esker train")
    };
    let expected = run(&words("memory", "same-memory"), &[])?;
    let expected: Value = serde_json::from_slice(&expected.stdout)?;
    let mut rows = Vec::new();
    let mut check = |name: String, cache: u64, budget: Option<u64>| -> Result<()> {
        let mut more = vec!["--feature-cache".to_string(), format!("{cache}B")];
        more.extend(budget.iter().flat_map(|bytes| ["--disk-budget".to_string(), format!("{bytes}B")]));
        let output = run(&words("diskgnn", "same-diskgnn"), &more)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{graph}, {name}: {said}");
        let found: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(
            expected["loss_digest"].is_string() && expected["loss_digest"] == found["loss_digest"],
            "{graph}, {name}: losses differ from those in memory"
        );
        let packing = &found["prepared"]["packing"];
        let taken = found["prepared"]["disk_bytes"].as_u64().unwrap_or(u64::MAX);
        ensure!(budget.is_none_or(|bytes| taken <= bytes), "{graph}, {name}: {taken} bytes on disk");
        rows.push(json!({
            "graph": graph, "disk": name, "cache_bytes": cache, "disk_budget": budget, "disk_bytes": taken,
            "disk_over_features": taken as f64 / all_bytes as f64, "segment": packing["segment"],
            "loss_digest": found["loss_digest"],
        }));
        fs::remove_dir_all(bench.path("same-diskgnn"))?;
        fs::remove_dir_all(bench.path(graph).join("derived"))?;
        Ok(())
    };
    for share in [0.0, 0.02, 0.1, 0.5] {
        check("unlimited".into(), (all_bytes as f64 * share) as u64, None)?;
    }
    // Without a cache in memory most is wanted of the disk.
    for multiple in budgets {
        check(format!("{multiple} times the features"), 0, Some((all_bytes as f64 * multiple) as u64))?;
    }
    let cache = all_bytes / 10;
    // Far too little is refused with what would just do, and that does.
    let far_too_little =
        ["--feature-cache".to_string(), format!("{cache}B"), "--disk-budget".into(), "1MB".into()];
    let refused = run(&words("diskgnn", "same-diskgnn"), &far_too_little)?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success(), "a disk budget of a megabyte was not refused");
    let least: u64 = said
        .split("--disk-budget ")
        .find_map(|rest| rest.split('B').next().and_then(|bytes| bytes.parse().ok()))
        .with_context(|| format!("the refusal says no budget: {said}"))?;
    check("just feasible".into(), cache, Some(least))?;
    let mut less = far_too_little.to_vec();
    less[3] = format!("{}B", least - 1);
    ensure!(!run(&words("diskgnn", "same-diskgnn"), &less)?.status.success(), "a byte less was not refused");
    fs::remove_dir_all(bench.path("same-memory"))?;
    fs::remove_dir_all(bench.path(graph).join("derived")).ok();
    Ok(Value::Array(rows))
}

/// Every file of the only packed directory of a dataset, by name, as a hash.
fn packed_files(folder: &Path) -> Result<BTreeMap<String, u64>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        all.insert(name, xxh3_64(&fs::read(&path)?));
    }
    Ok(all)
}

/// SIGKILL at random moments of preparing; the re-run completes, and what it made is what an undisturbed run makes.
pub fn killed(bench: &Bench, graph: &str, times: u64, seed: u64) -> Result<Value> {
    let (all_bytes, _) = feature_bytes(bench, graph)?;
    let cache = format!("{}B", all_bytes / 10);
    // Threads take different parts of the work, so moments differ from run to run. Segments make every step do something.
    let words = [
        "prepare",
        graph,
        "--strategy",
        "diskgnn",
        "--fanout",
        "8,4",
        "--batch",
        "300",
        "--epochs",
        "3",
        "--segment",
        "5",
        "--feature-cache",
        &cache,
        "--memory",
        "400MiB",
        "--prepared",
        "packed",
    ];
    let started = Instant::now();
    bench.json(&words)?;
    let whole = started.elapsed();
    let expected = packed_files(&bench.path("packed"))?;
    let (key, mut counts, mut moving) = (Key::new(seed), [0u64; 2], 0u64);
    for case in 0..times {
        fs::remove_dir_all(bench.path("packed")).ok();
        fs::remove_dir_all(bench.path("packed.partial")).ok();
        for kill in 0..1 + case % 3 {
            let moment = whole.mul_f64(unit(key.with(case).at(kill)));
            let finished = kill::run_until(bench.esker(&words), moment)?;
            counts[finished as usize] += 1;
            // Whether rows of caches were being moved.
            let journal =
                fs::read(bench.path("packed.partial").join("work/journal.json")).unwrap_or_default();
            let journal: Value = serde_json::from_slice(&journal).unwrap_or_default();
            let step = |name: &str| journal["steps"][name].as_u64().unwrap_or(0);
            moving += u64::from(step("touched") > step("moved"));
        }
        bench.json(&words)?;
        let found = packed_files(&bench.path("packed"))?;
        let differ: Vec<&String> =
            expected.keys().filter(|name| expected.get(*name) != found.get(*name)).collect();
        ensure!(found == expected, "case {case}: {differ:?} differ from those of an undisturbed run");
        ensure!(!bench.path("packed.partial").exists(), "case {case}: work was left behind");
    }
    fs::remove_dir_all(bench.path("packed"))?;
    let [killed, finished] = counts;
    ensure!(killed > 0, "every run finished before it was to be killed");
    Ok(json!({
        "cases": times, "kills": killed, "while_caches_were_ordered": moving, "finished_before_the_kill": finished,
        "undisturbed_seconds": whole.as_secs_f64(),
    }))
}

/// The disk's own rates: bytes of packed rows read from front to back, and random rows of a size, a second.
fn disk_rates(bench: &Bench, row_bytes: u64, packed: &str, seconds: &str) -> Result<(f64, f64)> {
    let directory = bench.directory.to_string_lossy().into_owned();
    let rows = if row_bytes > 2048 { "rows-4096" } else { "rows-512" };
    let packed_rows = format!("{packed}/rows.bin");
    let rate = |workload: &str, which: &str, place: &[&str]| -> Result<f64> {
        let words = ["bench", "io", "--only", workload, "--seconds", seconds, "--rounds", "3"];
        let found = bench.json(&[&words[..], place].concat())?;
        number(&found["workloads"][0], which)
    };
    // Sequential reads are of a MiB, to as much memory as batches are read to: what stays in the processor's cache is faster
    // than anything that is used. A small file read again and again may be in a cache of whoever lends the disk.
    let place = ["--file", &packed_rows, "--kept", "192MiB"];
    let sequential = rate("sequential", "kept_reads_per_second", &place)? * SEQUENTIAL_BYTES;
    Ok((sequential, rate(rows, "bare_reads_per_second", &["--dir", &directory, "--size", "2GiB"])?))
}

/// Bytes of a sequential read of `esker bench io`.
const SEQUENTIAL_BYTES: f64 = 1048576.0;

/// What is run with each strategy: a graph, batches, and memory for a share of its rows.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    /// The graph.
    pub graph: &'a str,
    /// Seeds of a batch.
    pub batch: &'a str,
    /// Batches.
    pub batches: &'a str,
    /// The group that it runs in.
    pub group_bytes: u64,
    /// Of each measurement of the disk's own rates.
    pub seconds: &'a str,
}

/// `esker bench epoch` with a cache for a tenth of the rows, inside a group.
fn tenth(bench: &Bench, case: &Case, strategy: &str, more: &[&str]) -> Result<Value> {
    let (all_bytes, _) = feature_bytes(bench, case.graph)?;
    let cache = format!("{}B", all_bytes / 10);
    let words = [
        case.graph,
        "--fanout",
        "10,10,10",
        "--hidden",
        "256",
        "--batch",
        case.batch,
        "--batches",
        case.batches,
        "--feature-cache",
        &cache,
        "--strategy",
        strategy,
    ];
    // Room for every batch's rows, however little of the disk is free: segments are another proof's.
    let disk: &[&str] = if strategy == "diskgnn" { &["--disk-budget", "25GB"] } else { &[] };
    epoch(bench, case.group_bytes, &[&words[..], disk, more].concat())
}

/// The data path alone beside ginex, both with memory for a tenth of the rows: bytes, times, and the disk's limit.
pub fn beside_ginex(bench: &Bench, case: &Case, rounds: usize) -> Result<Value> {
    let (_, row_bytes) = feature_bytes(bench, case.graph)?;
    let packed = bench.path("packed-10").to_string_lossy().into_owned();
    let (mut all, mut times, mut of_disk, mut of_pages, mut of_sectors, mut of_rate, mut of_misses) =
        (vec![], vec![], vec![], vec![], vec![], vec![], vec![]);
    let ours = ["--no-compute", "--warm", "2", "--prepared", &packed];
    // The first run prepares.
    tenth(bench, case, "diskgnn", &ours)?;
    for _ in 0..rounds {
        // What the disk gives changes from minute to minute: its own rate is taken right behind.
        let diskgnn = tenth(bench, case, "diskgnn", &ours)?;
        let (sequential, random) = disk_rates(bench, row_bytes, &packed, case.seconds)?;
        let ginex = tenth(bench, case, "ginex", &["--no-compute", "--warm", "0"])?;
        let pages = tenth(bench, case, "ginex", &["--no-compute", "--warm", "0", "--io-block", "4KiB"])?;
        let seconds = |value: &Value| number(value, "seconds_per_batch");
        let bytes = |value: &Value| -> Result<f64> {
            Ok(number(&value["disk"], "bytes_read")? / number(value, "batches")?)
        };
        let misses = |value: &Value| -> Result<f64> {
            Ok((1.0 - number(&value["disk"], "hit_ratio")?) * number(&value["disk"], "rows")?
                / number(value, "batches")?)
        };
        times.push(seconds(&ginex)? / seconds(&diskgnn)?);
        of_pages.push(bytes(&diskgnn)? / bytes(&pages)?);
        of_sectors.push(bytes(&diskgnn)? / bytes(&ginex)?);
        of_misses.push(misses(&ginex)? / misses(&diskgnn)?);
        of_rate.push(sequential / (random * row_bytes as f64));
        let rate = number(&diskgnn["disk"], "bytes_read")? / number(&diskgnn["disk"], "read_seconds")?;
        of_disk.push(rate / sequential);
        println!(
            "{}: {times:.2?} of ginex, {of_pages:.3?} of its bytes in pages, {of_disk:.2?} of the disk",
            case.graph
        );
        all.push(json!({
            "diskgnn": diskgnn, "ginex": ginex, "ginex_4k": pages, "sequential_bytes_per_second": sequential,
            "random_rows_per_second": random,
        }));
    }
    // Every batch that was sampled, and none that is read ahead: all bytes of an epoch.
    let packing = &all[0]["diskgnn"]["prepared"]["packing"];
    let (batches, planned) =
        (number(packing, "batches")?.to_string(), number(packing, "misses")? * row_bytes as f64);
    let whole = Case { batches: &batches, ..*case };
    let whole = tenth(bench, &whole, "diskgnn", &["--no-compute", "--warm", "0", "--prepared", &packed])?;
    let read_over_misses = number(&whole["disk"], "bytes_read")? / planned;
    println!("{}: an epoch reads {read_over_misses:.4} of what its misses take", case.graph);
    fs::remove_dir_all(&packed).ok();
    Ok(json!({
        "graph": case.graph, "row_bytes": row_bytes, "times_ginex": sample::median(times),
        "bytes_over_ginex_4k": sample::median(of_pages), "bytes_over_ginex_512": sample::median(of_sectors),
        "belady_over_static_misses": sample::median(of_misses), "sequential_over_random": sample::median(of_rate),
        "of_the_disk": sample::median(of_disk), "read_over_misses": read_over_misses, "rounds": all,
    }))
}

/// A whole epoch beside the same in memory and the least that the disk allows.
pub fn beside_memory(bench: &Bench, case: &Case, rounds: usize, peers: bool) -> Result<Value> {
    let (_, row_bytes) = feature_bytes(bench, case.graph)?;
    let packed = bench.path("packed-m").to_string_lossy().into_owned();
    let (mut all, mut ratios) = (Vec::new(), Vec::new());
    tenth(bench, case, "diskgnn", &["--warm", "2", "--prepared", &packed, "--no-compute"])?;
    for _ in 0..rounds {
        let ours = tenth(bench, case, "diskgnn", &["--warm", "2", "--prepared", &packed])?;
        let sequential_stages =
            tenth(bench, case, "diskgnn", &["--warm", "2", "--prepared", &packed, "--sequential"])?;
        let words =
            ["bench", "epoch", case.graph, "--fanout", "10,10,10", "--hidden", "256", "--batch", case.batch];
        let memory = bench
            .json(&[&words[..], &["--batches", case.batches, "--warm", "2", "--eval", "none"]].concat())?;
        let (sequential, _) = disk_rates(bench, row_bytes, &packed, case.seconds)?;
        let planned = number(&ours["disk"], "bytes_read")? / number(&ours, "batches")? / sequential;
        let seconds = |value: &Value| number(value, "seconds_per_batch");
        let least = seconds(&memory)?.max(planned);
        ratios.push(seconds(&ours)? / least);
        println!(
            "{}: {:.1} ms a batch, in memory {:.1}, the disk's {:.1}; one after the other {:.1}",
            case.graph,
            seconds(&ours)? * 1e3,
            seconds(&memory)? * 1e3,
            planned * 1e3,
            seconds(&sequential_stages)? * 1e3
        );
        all.push(json!({
            "diskgnn": ours, "diskgnn_sequential": sequential_stages, "memory": memory, "planned_disk_seconds_per_batch": planned,
        }));
    }
    let pyg = if peers { beside_peers(bench, case)? } else { Value::Null };
    fs::remove_dir_all(&packed).ok();
    let pipeline: Vec<f64> = all
        .iter()
        .map(|round| {
            let seconds = |name: &str| number(&round[name], "seconds_per_batch");
            Ok(seconds("diskgnn_sequential")? / seconds("diskgnn")?)
        })
        .collect::<Result<_>>()?;
    Ok(json!({
        "graph": case.graph, "over_the_least": sample::median(ratios), "pipeline_over_sequential": sample::median(pipeline),
        "peers": pyg, "rounds": all,
    }))
}

/// PyG with mapped features and GraphBolt with its own, in the same group.
fn beside_peers(bench: &Bench, case: &Case) -> Result<Value> {
    let python = sample::peers_python().context("bench/peers/setup.sh left no environment behind")?;
    let mut found = serde_json::Map::new();
    for (name, script, words) in [
        ("pyg_mapped", "train.py", &["--mapped", "--batches", "6", "--warm", "1"][..]),
        ("graphbolt_mapped", "train_graphbolt.py", &["--batches", "6", "--warm", "1"][..]),
    ] {
        drop_caches();
        let group = Group::create(case.group_bytes)?;
        let mut command = Command::new(&python);
        command.arg(crate::root().join("bench/peers").join(script)).arg(bench.path(case.graph)).args(words);
        found.insert(name.into(), bench.json_of(&mut group.wrap(&command))?);
    }
    Ok(Value::Object(found))
}

/// What preparing some epochs costs, beside sampling alone and the disk's rate of writing; the stages of it.
pub fn preparing(bench: &Bench, graph: &str, batch: &str, epochs: u64, more: &[&str]) -> Result<Value> {
    let (all_bytes, _) = feature_bytes(bench, graph)?;
    let (cache, sampled) = (format!("{}B", all_bytes / 10), epochs.to_string());
    fs::remove_dir_all(bench.path("packed-p")).ok();
    drop_caches();
    let words = [
        "prepare",
        graph,
        "--fanout",
        "10,10,10",
        "--batch",
        batch,
        "--epochs",
        &sampled,
        "--epochs-sampled",
        &sampled,
        "--feature-cache",
        &cache,
        "--prepared",
        "packed-p",
        "--memory",
        "1900MB",
        "--eval",
        "none",
    ];
    let found = bench.json(&[&words[..], more].concat())?;
    let stages = found["stages"].as_array().context("stages")?;
    let seconds = |name: &str| -> f64 {
        let named = stages.iter().filter(|stage| stage["name"] == name);
        named.filter_map(|stage| stage["seconds"].as_f64()).sum()
    };
    let written = number(&found["packed"], "disk_bytes")?;
    fs::remove_dir_all(bench.path("packed-p")).ok();
    // As much again, written from front to back and synced.
    let (directory, size) = (bench.directory.to_string_lossy().into_owned(), format!("{written:.0}B"));
    let words =
        ["bench", "io", "--dir", &directory, "--size", &size, "--only", "sequential", "--seconds", "0.1"];
    let io = bench.json(&[&words[..], &["--rounds", "1"]].concat())?;
    let write_rate =
        number(&io, "write_bytes_per_second").or_else(|_| number(&io["scratch"], "bytes_per_second"))?;
    let least = seconds("sample") + written / write_rate;
    println!(
        "{graph}, {epochs} epochs: {:.1} s, of which sampling {:.1}, laying out {:.1}, packing {:.1}, ordering {:.1}; {:.2} times the least, {least:.1} s",
        number(&found, "seconds")?,
        seconds("sample"),
        seconds("count rows") + seconds("lay rows out"),
        seconds("pack rows"),
        seconds("order caches"),
        number(&found, "seconds")? / least
    );
    Ok(json!({
        "epochs_sampled": epochs, "prepare": found, "bytes_written": written, "write_bytes_per_second": write_rate,
        "least_seconds": least, "over_the_least": number(&found, "seconds")? / least,
    }))
}

/// Memory, disk budget, fan-out and batch size: DiskGNN's Figures 10, 12 to 14.
pub fn sensitivity(bench: &Bench, graph: &str, batch: &str, batches: &str) -> Result<Value> {
    let (all_bytes, _) = feature_bytes(bench, graph)?;
    let packed = bench.path("packed-s").to_string_lossy().into_owned();
    let run = |fanout: &str, batch: &str, batches: &str, more: &[&str]| -> Result<Value> {
        fs::remove_dir_all(&packed).ok();
        let words = [
            "bench",
            "epoch",
            graph,
            "--strategy",
            "diskgnn",
            "--fanout",
            fanout,
            "--hidden",
            "256",
            "--eval",
            "none",
        ];
        let words = [
            &words[..],
            &["--batch", batch, "--batches", batches, "--warm", "2", "--prepared", &packed],
            more,
        ]
        .concat();
        let found = bench.json(&words)?;
        let packing = &found["prepared"]["packing"];
        Ok(json!({
            "fanout": fanout, "batch": batch, "more": more, "seconds_per_batch": found["seconds_per_batch"],
            "bytes_read_per_batch": number(&found["disk"], "bytes_read")? / number(&found, "batches")?,
            "hit_ratio": found["disk"]["hit_ratio"], "segment": packing["segment"],
            "disk_over_features": number(&found["prepared"], "disk_bytes")? / all_bytes as f64, "stages": found["stages"],
        }))
    };
    let cache = |share: f64| format!("{}B", (all_bytes as f64 * share) as u64);
    let mut found = serde_json::Map::new();
    let memory: Vec<Value> = [0.0, 0.05, 0.1, 0.3, 0.5]
        .iter()
        .map(|share| run("10,10,10", batch, batches, &["--feature-cache", &cache(*share)]))
        .collect::<Result<_>>()?;
    found.insert("memory (Figures 10, 13 and 18)".into(), Value::Array(memory));
    let unlimited = run("10,10,10", batch, batches, &["--feature-cache", &cache(0.1)])?;
    let most = number(&unlimited, "disk_over_features")?;
    let mut rows = vec![unlimited];
    for share in [0.8, 0.6] {
        let budget = format!("{}B", (all_bytes as f64 * most * share) as u64);
        rows.push(run(
            "10,10,10",
            batch,
            batches,
            &["--feature-cache", &cache(0.1), "--disk-budget", &budget],
        )?);
    }
    found.insert("disk budget (Figure 12)".into(), Value::Array(rows));
    let fanouts: Vec<Value> = ["10,10", "5,5,5", "10,10,10", "15,10,5"]
        .iter()
        .map(|fanout| run(fanout, batch, batches, &["--feature-cache", &cache(0.1)]))
        .collect::<Result<_>>()?;
    found.insert("fan-out (Figure 14)".into(), Value::Array(fanouts));
    let sizes: Vec<Value> = [1u64, 2, 4]
        .iter()
        .map(|part| {
            let seeds = (batch.parse::<u64>()? / part).max(1).to_string();
            let count = (batches.parse::<u64>()? * part).to_string();
            run("10,10,10", &seeds, &count, &["--feature-cache", &cache(0.1)])
        })
        .collect::<Result<_>>()?;
    found.insert("batch size (Figure 14)".into(), Value::Array(sizes));
    fs::remove_dir_all(&packed).ok();
    Ok(Value::Object(found))
}

pub(super) fn full_same(bench: &Bench) -> Result<Value> {
    let mut rows = Vec::new();
    for dim in ["7", "100", "128", "1024"] {
        let graph = format!("same-{dim}");
        bench
            .json(&["generate", &graph, "--nodes", "60000", "--degree", "12", "--dim", dim, "--seed", "1"])?;
        rows.push(same_losses(bench, &graph, &[], "300", "3")?);
        fs::remove_dir_all(bench.path(&graph))?;
    }
    for (preset, scale, batch, epochs) in [("friendster", "0.004", "100", "18"), ("igb", "0.0005", "60", "4")]
    {
        bench.json(&["generate", preset, "--preset", preset, "--scale", scale])?;
        let found = same_losses(bench, preset, &[5.0, 3.0], batch, epochs)?;
        let segments = |row: &Value| row["segment"].as_u64().is_some_and(|segment| segment > 1);
        let shared = found.as_array().context("rows")?.iter().filter(|row| segments(row)).count();
        ensure!(
            shared == 3,
            "{preset}: 5 and 3 times the features, and what just does, were to need segments"
        );
        rows.push(found);
        fs::remove_dir_all(bench.path(preset))?;
    }
    Ok(Value::Array(rows))
}

pub(super) fn full_kill(bench: &Bench) -> Result<Value> {
    train::graph(bench, 200_000, 128)?;
    killed(bench, "graph", 50, 7)
}

pub(super) fn full_speed(bench: &Bench) -> Result<Value> {
    train::graph(bench, 4_000_000, 128)?;
    let rows_512 =
        Case { graph: "graph", batch: "1000", batches: "100", group_bytes: 1_900_000_000, seconds: "1" };
    let narrow = beside_ginex(bench, &rows_512, 2)?;
    let least = |found: &Value, key: &str, least: f64| -> Result<()> {
        let reached = number(found, key)?;
        ensure!(reached >= least, "{}: {key} is {reached:.3}, {least:.3} were promised", found["graph"]);
        Ok(())
    };
    ensure!(
        (0.999..=1.02).contains(&number(&narrow, "read_over_misses")?),
        "{} of what misses take is read",
        narrow["read_over_misses"]
    );
    ensure!(
        number(&narrow, "bytes_over_ginex_4k")? <= 0.2,
        "{} of ginex's bytes",
        narrow["bytes_over_ginex_4k"]
    );
    least(&narrow, "times_ginex", 6.0)?;
    least(&narrow, "of_the_disk", 0.9)?;
    let peers = crate::root().join("target/peers");
    succeed(Command::new(crate::root().join("bench/peers/setup.sh")).arg(&peers))?;
    let epoch = beside_memory(bench, &rows_512, 3, true)?;
    let over = number(&epoch, "over_the_least")?;
    ensure!(over <= 1.1, "an epoch takes {over:.3} times the least, 1.1 were promised");
    fs::remove_dir_all(bench.path("graph"))?;
    bench.json(&["generate", "igb", "--preset", "igb", "--scale", "0.002"])?;
    let (bytes, _) = feature_bytes(bench, "igb")?;
    let rows_4k = Case {
        graph: "igb",
        batch: "60",
        batches: "100",
        group_bytes: bytes / 10 + GROUP_SLACK_BYTES + (900 << 20),
        seconds: "1",
    };
    let wide = beside_ginex(bench, &rows_4k, 2)?;
    let asked = 0.8 * number(&wide, "sequential_over_random")? * number(&wide, "belady_over_static_misses")?;
    least(&wide, "times_ginex", asked)?;
    Ok(json!({ "rows_of_512_bytes": narrow, "epoch": epoch, "rows_of_4_kib": wide, "asked_of_4_kib": asked }))
}

pub(super) fn full_prepare(bench: &Bench) -> Result<Value> {
    // As many epochs as are trained, with room for all: of a smaller graph, or no disk would do.
    train::graph(bench, 1_000_000, 128)?;
    let all = ["--disk-budget", "25GB"];
    let rounds: Vec<Value> =
        (0..3).map(|_| preparing(bench, "graph", "1000", 3, &all)).collect::<Result<_>>()?;
    let over = rounds.iter().map(|round| number(round, "over_the_least")).collect::<Result<_>>()?;
    let over = sample::median(over);
    // The same in three fifths of that disk, where segments share rows.
    let half = format!("{:.0}B", number(&rounds[0], "bytes_written")? * 0.6);
    let segmented = preparing(bench, "graph", "1000", 3, &["--disk-budget", &half])?;
    let segment = number(&segmented["prepare"]["packed"]["packing"], "segment")?;
    ensure!(segment > 1.0, "less disk made no segments");
    fs::remove_dir_all(bench.path("graph"))?;
    train::graph(bench, 4_000_000, 128)?;
    let one = preparing(bench, "graph", "1000", 1, &all)?;
    // One epoch, beside fifty of training with it.
    let packed = bench.path("packed-1").to_string_lossy().into_owned();
    let case =
        Case { graph: "graph", batch: "1000", batches: "60", group_bytes: 1_900_000_000, seconds: "1" };
    tenth(bench, &case, "diskgnn", &["--warm", "2", "--prepared", &packed, "--no-compute"])?;
    let trained = tenth(bench, &case, "diskgnn", &["--warm", "2", "--prepared", &packed])?;
    fs::remove_dir_all(&packed).ok();
    let batches = number(&one["prepare"]["packed"]["packing"], "batches")?;
    let run = 50.0 * batches * number(&trained, "seconds_per_batch")?;
    let share = number(&one["prepare"], "seconds")? / run;
    println!("preparing one epoch is {:.2}% of fifty", share * 100.0);
    let words = ["bench", "pack", "graph", "--batch", "1000", "--batches", "40", "--fanout", "10,10,10"];
    let pack = bench.json(&words)?;
    fs::remove_dir_all(bench.path("graph"))?;
    let mut segments = Vec::new();
    for (preset, scale, batch) in [("friendster", "0.02", "100"), ("igb", "0.003", "60")] {
        bench.json(&["generate", preset, "--preset", preset, "--scale", scale])?;
        let plot = crate::root().join("bench/record").join(format!("segments-{preset}.svg"));
        let words = [
            "bench",
            "segments",
            preset,
            "--batch",
            batch,
            "--batches",
            "150",
            "--sizes",
            "10,50,100",
            "--json",
        ];
        segments.push(bench.json_of(bench.esker(&words).arg("--plot").arg(&plot))?);
        fs::remove_dir_all(bench.path(preset))?;
    }
    ensure!(share <= 0.05, "preparing one epoch takes {share:.3} of fifty epochs, 0.05 were promised");
    ensure!(over <= 1.3, "preparing takes {over:.2} times the least, 1.3 were promised");
    Ok(json!({
        "as_many_epochs_as_are_trained": rounds, "over_the_least": over, "with_segments": segmented,
        "one_epoch": one, "share_of_fifty_epochs": share, "individual_and_batched": pack, "segments": segments,
    }))
}

/// The same on a GPU: rows for a tenth of the graph on the GPU and the host together, an epoch beside the same in memory and the
/// least that the disk allows.
pub(super) fn full_gpu(bench: &Bench) -> Result<Value> {
    train::graph(bench, 4_000_000, 128)?;
    let (all_bytes, row_bytes) = feature_bytes(bench, "graph")?;
    let (cache, packed) =
        (format!("{}B", all_bytes / 10), bench.path("packed-g").to_string_lossy().into_owned());
    let run = |strategy: &str, more: &[&str]| {
        let words =
            ["bench", "epoch", "graph", "--device", "cuda", "--strategy", strategy, "--fanout", "10,10,10"];
        let others =
            ["--hidden", "256", "--batch", "1000", "--batches", "180", "--warm", "10", "--eval", "none"];
        bench.json(&[&words[..], &others, more].concat())
    };
    let ours = ["--feature-cache", &cache, "--prepared", &packed, "--disk-budget", "40GB"];
    run("diskgnn", &[&ours[..], &["--no-compute"]].concat())?;
    succeed(&mut Command::new("sync"))?;
    let (mut all, mut ratios) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let (diskgnn, memory) = (run("diskgnn", &ours)?, run("memory", &[])?);
        let (sequential, _) = disk_rates(bench, row_bytes, &packed, "1")?;
        let seconds = |value: &Value| number(value, "seconds_per_batch");
        let planned = number(&diskgnn["disk"], "bytes_read")? / number(&diskgnn, "batches")? / sequential;
        ratios.push(seconds(&diskgnn)? / seconds(&memory)?.max(planned));
        println!(
            "{:.2} ms a batch, in memory {:.2}, the disk's {:.2}",
            seconds(&diskgnn)? * 1e3,
            seconds(&memory)? * 1e3,
            planned * 1e3
        );
        all.push(json!({ "diskgnn": diskgnn, "memory": memory, "sequential_bytes_per_second": sequential }));
    }
    let over = sample::median(ratios);
    ensure!(over <= 1.1, "an epoch takes {over:.3} times the least, 1.1 were promised");
    fs::remove_dir_all(&packed)?;
    let caches = caches_one_by_one(bench, all_bytes)?;
    Ok(json!({ "over_the_least": over, "rounds": all, "caches_one_by_one": caches }))
}

/// No cache, one on the GPU, one on the GPU and one on the host, one on the host alone (Figure 18): epochs and their stages.
fn caches_one_by_one(bench: &Bench, all_bytes: u64) -> Result<Value> {
    let packed = bench.path("packed-c").to_string_lossy().into_owned();
    let words = |cache: u64, gpu_bytes: Option<u64>| -> Vec<String> {
        let words = "bench epoch graph --device cuda --strategy diskgnn --fanout 10,10,10 --hidden 256 --batch 1000 --batches 120 --warm 10 --eval none --disk-budget 40GB";
        let mut words: Vec<String> = words.split(' ').map(String::from).collect();
        words.extend(["--prepared".into(), packed.clone(), "--feature-cache".into(), format!("{cache}B")]);
        words.extend(gpu_bytes.iter().flat_map(|bytes| ["--gpu-memory".into(), format!("{bytes}B")]));
        words
    };
    // What the GPU needs without rows is said by a run that is refused.
    let tenth = all_bytes / 10;
    let refused = words(tenth, Some(1 << 20));
    let refused = bench.esker(&refused.iter().map(String::as_str).collect::<Vec<_>>()).output()?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let least: u64 = said
        .split("--gpu-memory ")
        .find_map(|rest| rest.split('B').next()?.parse().ok())
        .with_context(|| format!("no smallest GPU memory is said: {said}"))?;
    let cases = [
        ("none", 0, None),
        ("5% on the GPU", tenth / 2, None),
        ("10% on the GPU", tenth, None),
        ("5% on the GPU, 5% on the host", tenth, Some(least + tenth / 2)),
        ("10% on the host", tenth, Some(least)),
    ];
    let (mut rows, mut packed_for) = (Vec::new(), None);
    for (name, cache, gpu_bytes) in cases {
        let words = words(cache, gpu_bytes);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        if packed_for.replace(cache) != Some(cache) {
            fs::remove_dir_all(&packed).ok();
            bench.json(&[&words[..], &["--no-compute"]].concat())?;
        }
        let found = bench.json(&words)?;
        println!("{name}: {:.1} ms a batch", number(&found, "seconds_per_batch")? * 1e3);
        rows.push(json!({
            "caches": name, "seconds_per_batch": found["seconds_per_batch"], "disk": found["disk"], "stages": found["stages"],
        }));
    }
    fs::remove_dir_all(&packed)?;
    Ok(Value::Array(rows))
}

pub(super) fn full_sensitivity(bench: &Bench) -> Result<Value> {
    bench.json(&["generate", "friendster", "--preset", "friendster", "--scale", "0.01"])?;
    sensitivity(bench, "friendster", "400", "16")
}
