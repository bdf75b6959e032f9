//! DiskGNN: the same losses as in memory, and killed preparation. `evaluating.rs` kills whole runs. `speed.rs` compares
//! its speed with ginex, memory and the disk. `prepare.rs` measures the cost of preparation and what training depends on.

pub mod evaluating;
mod prepare;
mod speed;

pub(super) use prepare::{full_prepare, full_sensitivity};
pub use prepare::{preparing, sensitivity};
pub use speed::{Case, beside_ginex, beside_memory};
pub(super) use speed::{full_gpu, full_speed};

use super::{Bench, kill, number, train};
use anyhow::{Context, Result, ensure};
use esker_types::random::{Key, unit};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of all feature rows, and of one row.
pub(super) fn feature_bytes(bench: &Bench, graph: &str) -> Result<(u64, u64)> {
    let info = bench.json(&["info", graph])?;
    let width = match info["feature_dtype"].as_str() {
        Some("f32") => 4,
        Some("f16" | "bf16") => 2,
        _ => 1,
    };
    let row_bytes = number(&info, "feature_dim")? as u64 * width;
    Ok((number(&info, "nodes")? as u64 * row_bytes, row_bytes))
}

/// Losses are bit-identical to those of `memory` on a graph, for several caches and disk budgets. Budgets are
/// multiples of the feature bytes, plus no limit. One more budget is just feasible, and one is too small and is
/// refused.
pub fn same_losses(bench: &Bench, graph: &str, budgets: &[f64], batch: &str, epochs: &str) -> Result<Value> {
    let (all_bytes, _) = feature_bytes(bench, graph)?;
    let words = |strategy: &str, out: &str| -> Vec<String> {
        let model = format!("train {graph} --fanout 8,4 --hidden 32 --batch {batch} --dropout 0.2");
        let run = format!(
            "--epochs {epochs} --epochs-sampled {epochs} --eval none --strategy {strategy} --out {out}"
        );
        format!("{model} {run}").split(' ').map(str::to_string).collect()
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
    // Without a cache in memory, most rows are read from disk.
    for multiple in budgets {
        check(format!("{multiple} times the features"), 0, Some((all_bytes as f64 * multiple) as u64))?;
    }
    let cache = all_bytes / 10;
    // Far too little is refused; the error names the smallest budget (or first the size of samples), which works.
    let with = |bytes: u64| {
        ["--feature-cache".to_string(), format!("{cache}B"), "--disk-budget".into(), format!("{bytes}B")]
    };
    let mut least = 1_000_000u64;
    for _ in 0..3 {
        let refused = run(&words("diskgnn", "same-diskgnn"), &with(least))?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(!refused.status.success(), "a disk budget of {least} bytes was not refused");
        least = said
            .split('(')
            .find_map(|rest| rest.split(" bytes)").next().and_then(|bytes| bytes.parse().ok()))
            .with_context(|| format!("the refusal says no budget: {said}"))?;
        if said.contains("packed rows take") {
            break;
        }
    }
    check("just feasible".into(), cache, Some(least))?;
    let less = run(&words("diskgnn", "same-diskgnn"), &with(least - 1))?;
    ensure!(!less.status.success(), "a byte less was not refused");
    fs::remove_dir_all(bench.path("same-memory"))?;
    fs::remove_dir_all(bench.path(graph).join("derived")).ok();
    Ok(Value::Array(rows))
}

/// A hash of every file below a folder, by name: of a packed directory, evaluations included, or of all derived data.
pub(super) fn packed_files(folder: &Path) -> Result<BTreeMap<String, u64>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Killed after the rename, a process leaves its lock. It is empty of meaning by then.
        if name == "lock" {
            continue;
        }
        match path.is_dir() {
            true => all.extend(
                packed_files(&path)?.into_iter().map(|(inner, sum)| (format!("{name}/{inner}"), sum)),
            ),
            false => drop(all.insert(name, xxh3_64(&fs::read(&path)?))),
        }
    }
    Ok(all)
}

/// The smallest memory of a command, from its error if it gets next to none.
pub(super) fn least_memory(bench: &Bench, words: &[&str]) -> Result<u64> {
    let refused = bench.esker(&[words, &["--memory", "1MiB"]].concat()).output().context("esker")?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let found =
        said.split('(').find_map(|rest| rest.split(" bytes)").next().and_then(|bytes| bytes.parse().ok()));
    found.with_context(|| format!("the refusal says no memory: {said}"))
}

/// The progress of preparation when it was killed, from its journal.
#[derive(Default)]
struct KilledWhile {
    packing: u64,
    in_a_later_episode: u64,
    ordering: u64,
}

impl KilledWhile {
    fn see(&mut self, work: &Path) {
        let journal = fs::read(work.join("journal.json")).unwrap_or_default();
        let journal: Value = serde_json::from_slice(&journal).unwrap_or_default();
        let steps = &journal["steps"];
        let step = |name: &str| steps[name].as_u64().unwrap_or(0);
        let is_packing = steps["packing"].is_object() && steps["packed"].is_null();
        self.packing += u64::from(is_packing);
        self.in_a_later_episode += u64::from(is_packing && steps["packing"]["first"].as_u64() > Some(0));
        self.ordering += u64::from(step("touched") > step("moved"));
    }
}

/// SIGKILL at random moments of preparation, in any of several passes over the features. Every run has another memory
/// budget and number of threads. The re-run completes, and its result is that of an undisturbed run.
pub fn killed(bench: &Bench, graph: &str, times: u64, seed: u64) -> Result<Value> {
    let (all_bytes, _) = feature_bytes(bench, graph)?;
    let cache = format!("{}B", all_bytes / 10);
    // Threads take different parts of the work, so moments differ between runs. With segments, every step does work.
    let words =
        ["prepare", graph, "--strategy", "diskgnn", "--fanout", "4,2", "--hidden", "16", "--batch", "20"];
    let more = ["--epochs", "3", "--epochs-sampled", "3", "--segment", "5", "--feature-cache", &cache];
    // Checkpoints are frequent, so that kills fall between them.
    let words = [&words[..], &more, &["--prepared", "packed", "--safe-point", "2MiB"]].concat();
    let least = least_memory(bench, &[&words[..], &["--threads", "3"]].concat())?;
    // From a few parts at a time to a hundred.
    let with = |random: u64| -> Vec<String> {
        let (memory, threads) = (least + random % (8 << 20), 1 + (random >> 32) % 3);
        let chosen = ["--memory".into(), format!("{memory}B"), "--threads".into(), threads.to_string()];
        words.iter().map(ToString::to_string).chain(chosen).collect()
    };
    let borrowed = |words: &[String]| bench.esker(&words.iter().map(String::as_str).collect::<Vec<_>>());
    bench.json(&[&words[..], &["--memory", "400MiB"]].concat())?;
    let expected = packed_files(&bench.path("packed"))?;
    fs::remove_dir_all(bench.path("packed"))?;
    let started = Instant::now();
    bench.json(&with(0).iter().map(String::as_str).collect::<Vec<_>>())?;
    let whole = started.elapsed();
    let (key, mut counts, mut seen) = (Key::new(seed), [0u64; 2], KilledWhile::default());
    for case in 0..times {
        fs::remove_dir_all(bench.path("packed")).ok();
        fs::remove_dir_all(bench.path("packed.partial")).ok();
        for kill in 0..1 + case % 4 {
            let moment = whole.mul_f64(unit(key.with(case).at(kill)));
            let finished = kill::run_until(borrowed(&with(key.with(case).at(100 + kill))), moment)?;
            counts[finished as usize] += 1;
            seen.see(&bench.path("packed.partial/work"));
        }
        let last = with(key.with(case).at(200));
        bench.json(&last.iter().map(String::as_str).collect::<Vec<_>>())?;
        let found = packed_files(&bench.path("packed"))?;
        let names = expected.keys().chain(found.keys());
        let differ: BTreeSet<&String> =
            names.filter(|name| expected.get(*name) != found.get(*name)).collect();
        ensure!(found == expected, "case {case}: {differ:?} differ from those of an undisturbed run");
        ensure!(!bench.path("packed.partial").exists(), "case {case}: work was left behind");
    }
    fs::remove_dir_all(bench.path("packed"))?;
    let [killed, finished] = counts;
    ensure!(killed > 0, "every run finished before it was to be killed");
    Ok(json!({
        "cases": times, "kills": killed, "while_rows_were_packed": seen.packing,
        "in_a_later_episode": seen.in_a_later_episode, "while_caches_were_ordered": seen.ordering,
        "finished_before_the_kill": finished, "undisturbed_seconds": whole.as_secs_f64(),
    }))
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
    let preparing = killed(bench, "graph", 50, 7)?;
    Ok(json!({ "preparing": preparing, "running": evaluating::killed(bench, "3", 20, 11)? }))
}
