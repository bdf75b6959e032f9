//! Training as a user meets it: stopped, resumed, evaluated from elsewhere, and told what is wrong.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

fn esker(directory: &Path, words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_esker"));
    command.args(words.split(' ')).current_dir(directory);
    command
}

fn json(directory: &Path, words: &str) -> Value {
    let output = esker(directory, words).arg("--json").output().unwrap();
    assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn with_graph() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    json(directory.path(), "generate g --nodes 5000 --degree 8 --dim 16 --classes 4 --seed 1");
    directory
}

#[test]
fn a_run_stopped_by_a_signal_goes_on_without_being_told_again() {
    let directory = with_graph();
    let flags = "--fanout 5,5 --hidden 32 --batch 10 --epochs 20 --lr 0.01 --dropout 0.2 --norm layer --schedule cosine:5";
    let whole = json(directory.path(), &format!("train g {flags} --out whole"));
    let mut command = esker(directory.path(), &format!("train g {flags} --out run"));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // The handler is set before the first batch, and the lines are opened before the handler.
    while !fs::metadata(directory.path().join("run/metrics.jsonl")).is_ok_and(|found| found.len() > 0) {
        assert!(child.try_wait().unwrap().is_none(), "it ended before anybody could stop it");
        std::thread::yield_now();
    }
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(directory.path().join("run/checkpoint.safetensors").exists());
    let said = esker(directory.path(), "train g --out run --resume --hidden 64").output().unwrap();
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("model.hidden is 64, was 32"), "{said}");
    let found = json(directory.path(), "train g --out run --resume");
    assert_eq!((&found["loss_digest"], &found["test"]), (&whole["loss_digest"], &whole["test"]));
    assert_eq!(found["device"], "cpu");
    // A run that has ended is shown again.
    assert_eq!(json(directory.path(), "train g --out run --resume"), found);
}

#[test]
fn sampling_a_superbatch_stops_at_once_and_what_was_sampled_is_used_again() {
    let directory = tempfile::tempdir().unwrap();
    json(directory.path(), "generate g --nodes 20000 --degree 15 --dim 8 --classes 4 --train 0.6 --seed 1");
    let flags = "--fanout 10,10 --hidden 8 --batch 100 --epochs 4 --lr 0.01 --eval none --final-eval none";
    let whole = json(directory.path(), &format!("train g {flags} --out whole"));
    let words = format!("train g {flags} --strategy ginex --superbatch 1000000 --threads 1 --out run");
    let mut child =
        esker(directory.path(), &words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let traces = || fs::read_dir(directory.path().join("run/scratch/superbatches")).into_iter().flatten();
    // The whole run is one superbatch: while its trace grows, nothing has been trained.
    let grows = |entry: &fs::DirEntry| {
        entry.path().extension().is_some_and(|ending| ending == "partial")
            && entry.metadata().is_ok_and(|found| found.len() > 0)
    };
    while !traces().flatten().any(|entry| grows(&entry)) {
        assert!(child.try_wait().unwrap().is_none(), "it ended before anybody could stop it");
        std::thread::yield_now();
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    let lines = fs::read_to_string(directory.path().join("run/metrics.jsonl")).unwrap();
    assert_eq!(lines, "", "it stopped before the first batch");
    assert_eq!(traces().count(), 1, "what was sampled is kept");
    let found = json(directory.path(), "train g --out run --resume");
    assert_eq!(found["loss_digest"], whole["loss_digest"]);
}

#[test]
fn a_run_is_evaluated_and_predicted_from_anywhere() {
    let directory = with_graph();
    let text = "dataset = \"g\"\nmodel = \"gcn\"\nlayers = 2\nhidden = 16\nfanout = \"5,5\"\nweight_decay = 5e-4\nbatch = 100\nepochs = 2\neval = \"full\"\n";
    fs::write(directory.path().join("run.toml"), text).unwrap();
    let summary = json(directory.path(), "train run.toml --out run");
    assert_eq!(summary["epochs"].as_array().unwrap().len(), 2);
    let elsewhere = directory.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    assert_eq!(json(&elsewhere, "eval ../run --device cpu")["metrics"], summary["test"]);
    let said = esker(&elsewhere, "eval ../run --device cuda:99").output().unwrap();
    assert!(String::from_utf8_lossy(&said.stderr).contains("--device cpu"));
    for (out, bytes) in [("p.npy", 128 + 5000 * 16), ("p.parquet", 1000)] {
        assert_eq!(json(&elsewhere, &format!("predict ../run --nodes all --out {out}"))["nodes"], 5000);
        assert!(fs::metadata(elsewhere.join(out)).unwrap().len() >= bytes);
    }
    assert!(
        json(directory.path(), "bench epoch g --fanout 5,5 --batch 50 --batches 2")["seconds_per_batch"]
            .is_number()
    );
}

#[test]
fn wrong_runs_are_told_what_to_do() {
    let directory = with_graph();
    let at = directory.path();
    let refused = |words: &str, expected: &str| {
        let output = esker(at, words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(expected), "{words}: {said}");
        assert!(!said.contains("panicked"), "{words}: {said}");
    };
    refused("train g --metric auc --out r", "auc needs two classes");
    refused("train g --out g", "is a dataset");
    refused("train g --fanout 5,5,5 --layers 2 --out r", "one a layer");
    refused("train g --hidden 1000000 --memory 1GiB --out r", "allow --memory");
    refused("train g --hidden 10000000000 --out r", "take at most");
    refused("train g --form shadow --final-eval full --fanout 5,5 --out r", "--final-eval sampled");
    refused("train g --schedule sometimes --out r", "cosine:WARMUP");
    refused("train g --memory 1MiB --out r", "together");
    refused("train g --strategy warp --out r", "memory, mmap");
    refused("train g --device cuda:99 --out r", "--device cpu");
    refused("bench gpu --number 99", "--device cpu");
    refused("train g --device gpu --out r", "auto, cpu, cuda or cuda:N");
    refused("train g --precision bf16 --out r", "the CPU computes products in f32, not in bf16");
    refused("bench epoch g --device cuda:98", "cuda:98");
    refused("eval nowhere", "holds no run");
    refused("train g --resume", "--resume needs --out");
    refused("bench epoch g --batches 0", "is not in 1..");
    fs::write(at.join("bad.toml"), "dataset = \"g\"\nhiden = 3\n").unwrap();
    refused("train bad.toml --out r", "hiden");
    assert!(!at.join("r").exists());
}

#[test]
fn the_library_has_the_defaults_of_the_program() {
    let directory = with_graph();
    let found = json(directory.path(), "train g --device cpu --dry-run");
    let dataset = esker_store::Dataset::open(&directory.path().join("g")).unwrap();
    let expected = serde_json::to_value(esker_train::RunConfig::for_dataset(&dataset)).unwrap();
    assert_eq!(found["config"], expected);
}
