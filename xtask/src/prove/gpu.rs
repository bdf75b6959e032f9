//! Training on a GPU: compared with the CPU, PyTorch's fixtures and PyG; its rates; and no stray memory accesses. Runs
//! from the folder that `cargo xtask gpu` fills, so that the machine needs no Rust.

use super::{Bench, ROUNDS, accuracy, repeated, succeed};
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Smallest bytes per second that GPU threads must read from host memory, by bytes per row: rates of the reference
/// machine.
const HOST_READS: [(usize, f64); 3] = [(512, 20e9), (1024, 37e9), (4096, 51e9)];
/// The tests of `gpu-tests` that need a GPU, by their modules.
const GPU_TESTS: [&str; 2] = ["gpu::", "contract::"];
/// Smallest ratio of PyG's device time per step to ours.
const FASTER: [(&str, &str, f64); 3] = [("sage", "f32", 1.6), ("sage", "tf32", 2.2), ("gat", "f32", 3.0)];

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let tests = bench.esker.with_file_name("gpu-tests");
    ensure!(tests.exists(), "{} is missing; fill the folder with `cargo xtask gpu`", tests.display());
    Ok(json!({
        "tests": passed(&mut Command::new(&tests))?,
        "memcheck": memcheck(&tests)?,
        "rates_and_steps": beside_pyg(bench)?,
        "same": same_losses(bench)?,
        "epoch": epochs(bench)?,
        "accuracy": accuracies(bench)?,
    }))
}

/// Number of passed tests; none may fail or be skipped.
fn passed(command: &mut Command) -> Result<Value> {
    let output = succeed(command.args(GPU_TESTS).args(["--test-threads", "2", "--nocapture"]))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(!text.contains("skipped:"), "a test was skipped:\n{text}");
    let line = text.lines().find(|line| line.contains("test result: ok")).context("no result of tests")?;
    let count = line.split_whitespace().nth(3).and_then(|word| word.parse::<u64>().ok());
    Ok(json!({ "passed": count.context("a count of tests")? }))
}

/// The same tests under compute-sanitizer.
fn memcheck(tests: &Path) -> Result<Value> {
    let tool = ["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"]
        .into_iter()
        .find(|tool| Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success()))
        .context("compute-sanitizer is not there")?;
    let mut command = Command::new(tool);
    command.args(["--tool", "memcheck", "--error-exitcode", "9"]).arg(tests);
    passed(&mut command)
}

fn number(value: &Value, keys: &[&str]) -> Result<f64> {
    let found = keys.iter().fold(value, |value, key| &value[*key]);
    found.as_f64().with_context(|| format!("{keys:?} in {value}"))
}

/// Rates of the device, and steps compared with PyG's on the same batch.
fn beside_pyg(bench: &Bench) -> Result<Value> {
    let mut found = bench.json(&["bench", "gpu", "--export", "batch", "--precision", "f32,tf32,bf16"])?;
    let rates = &found["bytes_per_second"];
    let copy = number(rates, &["copy on the device"])?;
    for bytes in [512, 1024] {
        let aggregation = number(rates, &[&format!("aggregation of rows of {bytes} bytes")])?;
        ensure!(
            aggregation >= 0.75 * copy,
            "aggregation at {aggregation:.3e} of {copy:.3e} bytes per second"
        );
    }
    for (bytes, expected) in HOST_READS {
        let rate = number(rates, &[&format!("host memory read by GPU threads, rows of {bytes} bytes")])?;
        ensure!(rate >= 0.95 * expected, "rows of {bytes} bytes are read at {rate:.3e} bytes per second");
    }
    let script = crate::root().join("bench/peers/gpu_step.py");
    let (mut ratios, mut peers) = (Map::new(), Vec::new());
    for (model, precision, least) in FASTER {
        let mut command = Command::new("python3");
        command.arg(&script).arg(bench.path("batch")).args(["--model", model, "--precision", precision]);
        let peer = bench.json_of(&mut command)?;
        let steps = found["steps"].as_array().context("steps")?;
        let own = steps.iter().find(|step| step["model"] == model && step["precision"] == precision);
        let ratio = number(&peer, &["device_ms"])? / number(own.context("a step")?, &["device_ms"])?;
        ensure!(ratio >= least, "{model} in {precision} is {ratio:.2} times as fast as PyG, not {least}");
        ratios.insert(format!("{model} {precision}"), ratio.into());
        peers.push(peer);
    }
    found["pyg"] = peers.into();
    found["times_as_fast_as_pyg"] = ratios.into();
    Ok(found)
}

/// Losses are bit-identical for all strategies and runs.
pub fn same_losses(bench: &Bench) -> Result<Value> {
    super::train::graph(bench, 300_000, 64)?;
    let mut rows = Vec::new();
    for (run, strategy) in ["memory", "memory", "mmap", "mmap"].into_iter().enumerate() {
        let out = format!("gpu-{run}");
        let words =
            ["train", "graph", "--fanout", "10,5", "--hidden", "64", "--batch", "500", "--dropout", "0.3"];
        let more = ["--epochs", "2", "--device", "cuda", "--strategy", strategy, "--out", &out];
        let found = bench.json(&[&words[..], &more].concat())?;
        rows.push(json!({
            "strategy": strategy, "loss_digest": found["loss_digest"], "test": found["test"]["accuracy"],
            "peak_device_bytes": found["peak_device_bytes"], "budget_device_bytes": found["budget_device_bytes"],
        }));
    }
    let same = |row: &Value| row["loss_digest"] == rows[0]["loss_digest"] && row["test"] == rows[0]["test"];
    ensure!(rows[0]["loss_digest"].is_string() && rows.iter().all(same), "losses differ: {rows:#?}");
    Ok(rows.into())
}

/// Batches end to end with everything in host memory, and their bottleneck.
fn epochs(bench: &Bench) -> Result<Value> {
    bench.json(&["generate", "large", "--preset", "papers100m", "--scale", "0.05"])?;
    let mut rows = Map::new();
    for (name, device, precision) in
        [("gpu, f32", "cuda", "f32"), ("gpu, tf32", "cuda", "tf32"), ("cpu", "cpu", "f32")]
    {
        let words = ["bench", "epoch", "large", "--fanout", "10,10,10", "--batch", "1000", "--hidden", "256"];
        let more = [
            "--batches",
            if device == "cpu" { "10" } else { "60" },
            "--device",
            device,
            "--precision",
            precision,
        ];
        let words = [&words[..], &more].concat();
        let found = repeated(ROUNDS, &["seconds_per_batch"], || bench.json(&words))?;
        let mut row = Map::new();
        for key in [
            "seconds_per_batch",
            "rounds",
            "nodes_per_batch",
            "edges_per_batch",
            "stages",
            "bound_by",
            "peak_device_bytes",
        ] {
            row.insert(key.to_string(), found[key].clone());
        }
        row.insert("batches_per_second".into(), (1.0 / number(&found, &["seconds_per_batch"])?).into());
        rows.insert(name.to_string(), row.into());
    }
    Ok(rows.into())
}

/// Accuracy on real data next to the CPU's, if the datasets exist.
fn accuracies(bench: &Bench) -> Result<Value> {
    let Some(data) = crate::real_data() else {
        return Ok(json!("the real datasets are not beside the checkout"));
    };
    accuracy::on_both(bench, &data, 3)
}

/// Builds the program, the tests that need a GPU and xtask, stripped, into one folder that can be copied to a machine
/// with a GPU.
pub fn fill_folder() -> Result<PathBuf> {
    let root = crate::root();
    let folder = root.join("target/gpu");
    std::fs::create_dir_all(&folder)?;
    let cargo = |words: &[&str]| {
        let mut command = Command::new("cargo");
        command.args(words).current_dir(&root);
        command.envs([("CARGO_PROFILE_RELEASE_STRIP", "symbols"), ("CARGO_PROFILE_RELEASE_DEBUG", "0")]);
        succeed(command.args(["--release", "--target-dir", "target/stripped"]))
    };
    cargo(&["build", "--package", "esker", "--package", "xtask"])?;
    for name in ["esker", "xtask"] {
        std::fs::copy(root.join("target/stripped/release").join(name), folder.join(name))?;
    }
    let built =
        cargo(&["test", "--package", "esker-train", "--test", "it", "--no-run", "--message-format", "json"])?;
    let messages = String::from_utf8_lossy(&built.stdout).into_owned();
    let mut executables = messages.lines().rev().filter_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        message["executable"].as_str().map(PathBuf::from)
    });
    let tests = executables.next().context("cargo named no test binary")?;
    std::fs::copy(tests, folder.join("gpu-tests"))?;
    Ok(folder)
}
