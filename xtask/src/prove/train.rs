//! Training: bit-identical for all strategies and threads, killed anywhere, within its memory, and compared with PyG.

use super::{Bench, ROUNDS, sample, side_by_side, succeed};
use crate::cgroup::Group;
use anyhow::{Context, Result, bail, ensure};
use esker_types::median;
use esker_types::random::{Key, unit};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Most cases of a proof that run at a time.
const MOST_CASES: usize = 8;

/// Makes a graph with features to learn from.
pub fn graph(bench: &Bench, nodes: u64, dim: u64) -> Result<()> {
    let (nodes, dim) = (nodes.to_string(), dim.to_string());
    bench.json(&["generate", "graph", "--nodes", &nodes, "--degree", "15", "--dim", &dim, "--seed", "1"])?;
    Ok(())
}

/// The command-line words of a run: the common ones, unless `more` has the same flag, followed by `more`.
pub(super) fn words<'a>(out: &'a str, epochs: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let common = [["--fanout", "10,5"], ["--hidden", "64"], ["--batch", "500"], ["--dropout", "0.3"]];
    let common = common.into_iter().filter(|[flag, _]| !more.contains(flag)).flatten();
    let words = ["train", "graph", "--epochs", epochs, "--out", out];
    words.into_iter().chain(common).chain(more.iter().copied()).collect()
}

/// Losses are bit-identical for all strategies and numbers of threads.
pub fn same_losses(bench: &Bench, epochs: &str) -> Result<Value> {
    let mut rows = Vec::new();
    for strategy in ["memory", "mmap", "ginex"] {
        for threads in ["1", "2", "4"] {
            let out = format!("same-{strategy}-{threads}");
            let found = bench.json(&words(&out, epochs, &["--strategy", strategy, "--threads", threads]))?;
            rows.push(json!({
                "strategy": strategy, "threads": threads, "loss_digest": found["loss_digest"],
                "test": found["test"]["accuracy"], "steps": found["steps"],
            }));
        }
    }
    let first = &rows[0];
    let same = |row: &Value| row["loss_digest"] == first["loss_digest"] && row["test"] == first["test"];
    ensure!(first["loss_digest"].is_string() && rows.iter().all(same), "losses differ: {rows:#?}");
    Ok(Value::Array(rows))
}

/// SIGKILL at random moments, `--resume` until it ends: the weights are bit-identical to those of an undisturbed run.
pub fn killed(bench: &Bench, epochs: &str, kills: u64, seed: u64) -> Result<Value> {
    killed_with(bench, epochs, kills, seed, &[])
}

/// The same with more words for every run.
pub fn killed_with(bench: &Bench, epochs: &str, kills: u64, seed: u64, words_too: &[&str]) -> Result<Value> {
    let often = [&["--checkpoint-batches", "3"], words_too].concat();
    let run = |out: &str, more: &[&str]| -> Vec<String> {
        words(out, epochs, &[&often, more].concat()).into_iter().map(String::from).collect()
    };
    let weights =
        |out: &str| Ok(vec![fs::read(bench.path(out).join("last.safetensors")).context("last weights")?]);
    killed_runs(bench, kills, seed, &run, &weights)
}

/// The command-line words of a run in a directory, with some more.
type RunWords<'a> = &'a dyn Fn(&str, &[&str]) -> Vec<String>;

/// What a run leaves in its directory.
type LeftBehind<'a> = &'a dyn Fn(&str) -> Result<Vec<Vec<u8>>>;

/// The same for any run, and anything that it leaves behind.
pub fn killed_runs(
    bench: &Bench,
    kills: u64,
    seed: u64,
    run: RunWords<'_>,
    weights: LeftBehind<'_>,
) -> Result<Value> {
    let started = Instant::now();
    let command = |out: &str, more: &[&str]| {
        let words = run(out, more);
        bench.esker(&words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let undisturbed = bench.json_of(&mut command("whole", &["--json"]))?;
    let (seconds, key) = (started.elapsed().as_secs_f64(), Key::new(seed));
    let (expected, mut runs, mut done, mut moments) = (weights("whole")?, 0u64, 0u64, KilledWhile::default());
    while done < kills {
        fs::remove_dir_all(bench.path("killed")).ok();
        let mut resume: &[&str] = &[];
        // A run is killed several times before it may end.
        for turn in 0.. {
            let mut command = command("killed", &[&["--json"], resume].concat());
            // If the timed run was slow, runs may end before the kill. Later kills come earlier, so it cannot repeat.
            let share = unit(key.with(runs).at(done * 1000 + turn)) / (1 + runs / kills.max(1)) as f64;
            let last = done >= kills || turn >= 8;
            let wait = if last { Duration::from_secs(600) } else { Duration::from_secs_f64(seconds * share) };
            let finished = run_until(&mut command, wait)?;
            if finished {
                break;
            }
            ensure!(!last, "a run that nobody killed did not end within 600 s");
            done += 1;
            moments.see(&bench.path("killed"));
            resume = if bench.path("killed/config.json").exists() { &["--resume"] } else { &[] };
        }
        ensure!(
            weights("killed")? == expected,
            "run {runs}: the last weights differ from those of the undisturbed run"
        );
        ends_as(bench, &undisturbed, runs)?;
        runs += 1;
    }
    Ok(json!({
        "kills": done, "runs": runs, "while_training": moments.training,
        "while_state_was_written": moments.writing, "undisturbed_seconds": seconds,
        "loss_digest": undisturbed["loss_digest"],
    }))
}

/// What runs did when they were killed, from what they left behind.
#[derive(Default)]
struct KilledWhile {
    training: u64,
    writing: u64,
}

impl KilledWhile {
    fn see(&mut self, run: &Path) {
        self.training += u64::from(run.join("checkpoint.safetensors").exists());
        let Ok(state) = fs::read_dir(run.join("state")) else { return };
        let unfinished = |name: &std::ffi::OsStr| name.to_string_lossy().ends_with(".partial");
        self.writing += u64::from(state.flatten().any(|file| unfinished(&file.file_name())));
    }
}

/// Whether the run `killed` ends as the undisturbed run `whole`: losses, metrics, epochs and the best weights.
pub(super) fn ends_as(bench: &Bench, undisturbed: &Value, run: u64) -> Result<()> {
    let summary: Value = serde_json::from_slice(&fs::read(bench.path("killed/summary.json"))?)?;
    for key in ["loss_digest", "test", "valid", "best_epoch", "steps"] {
        let (found, expected) = (&summary[key], &undisturbed[key]);
        ensure!(found == expected, "run {run}: {key} is {found}, was {expected}");
    }
    let epochs = |summary: &Value| -> Vec<Value> {
        let all = summary["epochs"].as_array().cloned().unwrap_or_default();
        all.iter().map(|epoch| json!([epoch["loss"], epoch["valid"], epoch["bytes_useful"]])).collect()
    };
    ensure!(epochs(&summary) == epochs(undisturbed), "run {run}: epochs differ");
    let best = |out: &str| fs::read(bench.path(out).join("best.safetensors")).context("best weights");
    ensure!(best("killed")? == best("whole")?, "run {run}: the best weights differ");
    Ok(())
}

/// Runs a command until it ends or `wait` is over. Returns whether it ended by itself.
pub(super) fn run_until(command: &mut Command, wait: Duration) -> Result<bool> {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let deadline = Instant::now() + wait;
    loop {
        if let Some(status) = child.try_wait()? {
            if !status.success() {
                let output = child.wait_with_output()?;
                bail!("{command:?}: {status}\n{}", String::from_utf8_lossy(&output.stderr));
            }
            return Ok(true);
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Epochs of runs inside a cgroup. A partition buffer has as much memory as the largest step of all epochs takes.
const IN_GROUP_EPOCHS: &str = "8";

/// The smallest budget that a run names is enough inside a cgroup with that limit, page cache included. One byte less
/// is refused, and the error has the table.
pub fn in_group(bench: &Bench, strategy: &str, eval: &str, also: &[&str]) -> Result<Value> {
    let more = [&["--strategy", strategy, "--eval", eval], also].concat();
    let refused = |memory: &str| -> Result<String> {
        let mut all = more.to_vec();
        all.extend(["--memory", memory]);
        let output = bench.esker(&words("refused", IN_GROUP_EPOCHS, &all)).output()?;
        ensure!(!output.status.success(), "a budget of {memory} was not refused");
        ensure!(!bench.path("refused").exists(), "a refused run left a directory behind");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    };
    refused("1MiB")?;
    let smallest = smallest_budget(bench, &more)?;
    let said = refused(&format!("{}B", smallest - 1))?;
    ensure!(
        ["topology", "neighbours", "edge buckets"].iter().any(|line| said.contains(line))
            && said.contains("total"),
        "the refusal has no table: {said}"
    );
    let out = format!("budget-{strategy}-{eval}");
    fs::remove_dir_all(bench.path(&out)).ok();
    let memory = format!("{smallest}B");
    let mut all = more.to_vec();
    all.extend(["--memory", &memory, "--json"]);
    // The cgroup also counts page cache and kernel memory of the process, so its limit is slightly above the budget.
    let limit = smallest + (16 << 20);
    let group = Group::create(limit)?;
    // Preparation must fit too.
    fs::remove_dir_all(bench.path("graph/derived")).ok();
    let output = succeed(&mut group.wrap(&bench.esker(&words(&out, IN_GROUP_EPOCHS, &all))))?;
    let summary: Value = serde_json::from_slice(&output.stdout)?;
    let peak = summary["peak_host_bytes"].as_u64().unwrap_or(u64::MAX);
    ensure!(peak <= smallest, "the run promised {smallest} bytes and took {peak}");
    Ok(json!({
        "strategy": strategy, "eval": eval, "flags": also, "smallest_budget_bytes": smallest, "peak_host_bytes": peak,
        "smallest_over_peak": smallest as f64 / peak as f64, "group_limit_bytes": limit, "seconds": summary["seconds"],
    }))
}

/// The smallest budget that works, according to the run.
fn smallest_budget(bench: &Bench, more: &[&str]) -> Result<u64> {
    let mut all = more.to_vec();
    all.extend(["--memory", "64GiB", "--dry-run"]);
    let found = bench.json(&words("refused", IN_GROUP_EPOCHS, &all))?;
    found["smallest_bytes"].as_u64().context("the smallest budget")
}

/// Epochs in memory compared with PyG's on the same graph with the same model, in turn.
pub fn beside_pyg(bench: &Bench, rounds: usize, batches: &str) -> Result<Value> {
    let python = sample::peers_python().context("bench/peers/setup.sh left no environment behind")?;
    let script = crate::root().join("bench/peers/train.py");
    let (mut all, mut ratios, mut shares, mut without_sampling) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let words = "bench epoch graph --fanout 10,10,10 --batch 1000 --hidden 256 --matmul --batches";
        let words: Vec<&str> = words.split(' ').chain([batches]).collect();
        let ours = bench.json(&words)?;
        let peer = |workers: &str| {
            let words = ["--workers", workers, "--batches", batches];
            bench.json_of(Command::new(&python).arg(&script).arg(bench.path("graph")).args(words))
        };
        let (alone, with_workers) = (peer("0")?, peer("2")?);
        let seconds = |value: &Value| value["seconds_per_batch"].as_f64().unwrap_or(f64::INFINITY);
        // PyG's time if its sampler took no time at all. Stages are timed separately only without workers.
        let stages = &alone["stage_seconds_per_batch"];
        let without = stages["gather"].as_f64().unwrap_or(0.0) + stages["compute"].as_f64().unwrap_or(0.0);
        without_sampling.push(without / seconds(&ours));
        let pyg = if seconds(&alone) < seconds(&with_workers) { &alone } else { &with_workers };
        ratios.push(seconds(pyg) / seconds(&ours));
        shares.push(ours["matmul"]["share_of_best"].as_f64().unwrap_or(0.0));
        println!(
            "round {round}: {} s a batch, PyG {} s, {without} s without sampling",
            seconds(&ours),
            seconds(pyg)
        );
        all.push(json!({ "esker": ours, "pyg": alone, "pyg_with_workers": with_workers }));
    }
    let (ratio, share) = (median(&ratios), median(&shares));
    ensure!(ratio >= 1.8, "{ratio:.2} times PyG's speed, 1.8 were promised");
    ensure!(share >= 0.8, "matmuls at {share:.2} of what gemm reaches at its best, 0.8 were promised");
    Ok(json!({
        "times_pyg": ratio, "times_pyg_without_its_sampling": median(&without_sampling),
        "matmul_share_of_best": share, "rounds": all,
    }))
}

pub(super) fn full_same(bench: &Bench) -> Result<Value> {
    graph(bench, 200_000, 64)?;
    same_losses(bench, "3")
}

pub(super) fn full_kill(bench: &Bench) -> Result<Value> {
    graph(bench, 200_000, 64)?;
    killed(bench, "6", 100, 5)
}

/// A run whose smallest budget is compared with its peak.
struct BudgetCase {
    /// The graph, by the name of its directory, with dimension and dtype of its rows.
    graph: &'static str,
    row: [&'static str; 2],
    strategy: &'static str,
    eval: &'static str,
    flags: Vec<&'static str>,
}

impl BudgetCase {
    /// All of them: strategies, models, widths of rows and kinds of evaluation.
    fn all(device: &'static str) -> Vec<BudgetCase> {
        // Evaluated every fourth epoch: `mmap` in a group this small reads every row from disk each time.
        let shape = ["--fanout", "10,10", "--hidden", "128", "--batch", "1000", "--eval-every", "4"];
        let shape = [&shape[..], &["--device", device]].concat();
        let mut cases = Vec::new();
        for (graph, dim, dtype) in [("narrow", "128", "f32"), ("wide", "768", "f16")] {
            for strategy in ["memory", "mmap", "ginex", "diskgnn"] {
                for model in [&["--model", "sage"][..], &["--model", "gat", "--heads", "4"]] {
                    for eval in ["sampled", "full"] {
                        let flags = [model, &shape].concat();
                        cases.push(BudgetCase { graph, row: [dim, dtype], strategy, eval, flags });
                    }
                }
            }
        }
        let flags = vec!["--segment", "20", "--device", device];
        let (row, strategy) = (["768", "f16"], "diskgnn");
        cases.push(BudgetCase { graph: "wide", row, strategy, eval: "none", flags });
        cases
    }

    /// Runs it in a directory of its own, with its own copy of the graph: no other case pays for its page cache.
    fn run(&self, bench: &Bench) -> Result<Value> {
        let own = Bench::new(&bench.esker, &bench.directory)?;
        copy_directory(&bench.path(self.graph), &own.path("graph"))?;
        let mut found = in_group(&own, self.strategy, self.eval, &self.flags)?;
        let [dim, dtype] = self.row;
        found["row"] = json!({ "dim": dim, "dtype": dtype });
        println!("{found}");
        Ok(found)
    }
}

pub(super) fn copy_directory(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy_directory(&entry.path(), &to)?,
            false => drop(fs::copy(entry.path(), &to)?),
        }
    }
    Ok(())
}

pub(super) fn full_budget(bench: &Bench) -> Result<Value> {
    smallest_budgets(bench, "cpu")
}

pub(super) fn full_budget_gpu(bench: &Bench) -> Result<Value> {
    smallest_budgets(bench, "cuda")
}

/// The smallest budget over the peak.
fn smallest_budgets(bench: &Bench, device: &'static str) -> Result<Value> {
    for (graph, nodes, dim, dtype) in [("narrow", "300000", "128", "f32"), ("wide", "150000", "768", "f16")] {
        let common =
            ["generate", graph, "--degree", "15", "--train", "0.03", "--valid", "0.02", "--test", "0.02"];
        let words = ["--nodes", nodes, "--dim", dim, "--dtype", dtype, "--seed", "1", "--overwrite"];
        bench.json(&[&common[..], &words].concat())?;
    }
    let cases = BudgetCase::all(device);
    // Cases keep the default number of threads, which is part of what they need.
    let rows = side_by_side(cases.len(), MOST_CASES, |case, _| cases[case].run(bench))?;
    let ratio = |row: &Value| row["smallest_over_peak"].as_f64().unwrap_or(f64::INFINITY);
    let largest = rows.iter().map(ratio).fold(0.0, f64::max);
    ensure!(
        largest <= 1.25,
        "the smallest budget is {largest:.2} times the peak, 1.25 were promised: {rows:#?}"
    );
    Ok(json!({ "largest_smallest_over_peak": largest, "runs": rows }))
}

pub(super) fn full_speed(bench: &Bench) -> Result<Value> {
    let peers = crate::root().join("target/peers");
    succeed(Command::new(crate::root().join("bench/peers/setup.sh")).arg(&peers))?;
    graph(bench, 4_000_000, 128)?;
    beside_pyg(bench, ROUNDS, "20")
}
