//! Training as a user meets it: stopped, resumed, evaluated from elsewhere, and told what is wrong.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod common;

use common::{esker, json, npy};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

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
    // A run that has ended is shown again, if it is the one that is meant.
    assert_eq!(json(directory.path(), "train g --out run --resume"), found);
    assert_eq!(json(directory.path(), "train --resume --out run"), found);
    json(directory.path(), "generate h --nodes 5000 --degree 8 --dim 16 --classes 4 --seed 2");
    check_refusal(
        directory.path(),
        "train g --out run --resume --hidden 64",
        2,
        "model.hidden is 64, was 32",
    );
    check_refusal(directory.path(), "train h --out run --resume", 2, "dataset_id");
}

#[test]
fn outre_chooses_its_history_and_memory_takes_it() {
    let directory = with_graph();
    let at = directory.path();
    let flags = "--fanout 5,5 --hidden 16 --batch 50 --epochs 3 --device cpu";
    // An epoch has few batches: by default there is no history, and the run says so.
    let plain = esker(at, &format!("train g --strategy outre {flags} --json --out plain")).output().unwrap();
    assert!(String::from_utf8_lossy(&plain.stderr).contains("no history: an epoch has"), "{plain:?}");
    let plain: Value = serde_json::from_slice(&plain.stdout).unwrap();
    assert!(plain["history_split"].is_null(), "{plain}");
    let memory = json(at, &format!("train g --order groups {flags} --out by-groups"));
    assert_eq!(memory["loss_digest"], plain["loss_digest"]);
    let staleness = (json(at, "info g")["train"].as_u64().unwrap() / 50 / 10).clamp(2, 100);
    let outre = format!("--strategy outre --memory 200MiB --staleness {staleness} {flags}");
    // Chosen ahead, and used by the run.
    let prepared = json(at, &format!("prepare g {outre}"));
    assert_eq!(prepared["history_split"]["is_reused"], false, "{prepared}");
    let outre = json(at, &format!("train g {outre} --out run"));
    assert_eq!(outre["history_split"]["is_reused"], true, "{outre}");
    assert_eq!(outre["history_split"]["history_rows"], prepared["history_split"]["history_rows"]);
    assert!(outre["history_split"]["predicted_seconds"].as_f64().unwrap() > 0.0, "{outre}");
    let config: Value = serde_json::from_slice(&fs::read(at.join("run/config.json")).unwrap()).unwrap();
    assert_eq!(config["order"], "groups");
    assert!(
        config["history"]["nodes"].is_string() && config["history"]["staleness"] == staleness,
        "{config}"
    );
    let twin = json(at, &format!("train g --order groups --history-set run {flags} --out twin"));
    assert_eq!(twin["loss_digest"], outre["loss_digest"]);
    // Given again, and stated otherwise.
    let half =
        json(at, &format!("train g --strategy outre --history-rows 0.5 --staleness 9 {flags} --out half"));
    let same =
        json(at, &format!("train g --order groups --history-rows 2500 --staleness 9 {flags} --out same"));
    assert_eq!(half["loss_digest"], same["loss_digest"]);
    assert_eq!(json(at, "train --resume --out half"), half);
    let shown = esker(at, "train --resume --out half").output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("history"), "{shown}");
    // Rows of every layer, rounded, and a cache with rows that stay.
    let deep = flags.replace("5,5", "5,4,3") + " --history-dtype f16 --staleness 9";
    let rows = "--history-rows 0.5 --history-hop all";
    let outre = json(at, &format!("train g --strategy outre --cache static {rows} {deep} --out deep"));
    let twin = json(at, &format!("train g --order groups --history-set deep {deep} --out deep-twin"));
    assert_eq!(twin["loss_digest"], outre["loss_digest"]);
    let history = &outre["epochs"][2]["history"];
    for key in ["pulls", "refreshed", "mean_drift"] {
        assert!(history[key].as_f64().unwrap() > 0.0, "{key}: {history}");
    }
    assert!(
        history["saved"]["with"]["edges"].as_u64() < history["saved"]["without"]["edges"].as_u64(),
        "{history}"
    );
    for (words, code, said) in [
        ("--history-rows 1.5", 2, "a share of the nodes"),
        ("--staleness 5", 2, "--staleness has no effect with no history"),
        ("--staleness 0 --history-rows 10", 2, "--staleness is 0"),
        ("--history-rows 10 --strategy ginex", 2, "--strategy outre"),
        ("--history-rows 10 --history-set run", 2, "leave --history-rows out"),
        ("--history-set nowhere", 1, "nowhere"),
        ("--strategy outre --staleness 5 --fanout 5 --layers 1", 2, "--layers 2"),
        ("--strategy outre --staleness 5 --form shadow", 2, "--form dense"),
        ("--strategy outre --staleness 5 --form layered", 2, "of form layered and have 3 layers"),
        ("--history-rows 10 --history-hop 2 --layers 2", 2, "--layers 3 or more"),
        ("--history-rows 10 --history-hop 3", 2, "write 1, 2 or all"),
        ("--history-rows 10 --history-dtype i8", 2, "--history-dtype f32 or f16"),
        ("--history-hop all", 2, "--history-hop has no effect with no history"),
        ("--history-dtype f16", 2, "--history-dtype has no effect with no history"),
        ("--cache static", 2, "--cache has no effect with --strategy memory"),
    ] {
        check_refusal(at, &format!("train g {words} --batch 50 --out refused"), code, said);
    }
    json(at, "generate h --nodes 5000 --degree 8 --dim 16 --classes 4 --seed 2");
    check_refusal(at, "train h --history-set run --out refused", 2, "another dataset");
    assert!(!at.join("refused").exists());
}

#[test]
fn a_run_that_is_not_there_is_not_resumed() {
    let directory = with_graph();
    for words in ["train g --resume --out nowhere", "train --resume --out nowhere"] {
        check_refusal(directory.path(), words, 2, "nowhere: there is nothing to resume");
        check_refusal(directory.path(), words, 2, "leave --resume out");
    }
    assert!(!directory.path().join("nowhere").exists());
}

/// Sends an interrupt once the program has a handler for it and `is_due`; what it said and its exit code.
fn interrupted(mut command: Command, is_due: impl Fn() -> bool) -> (String, Option<i32>) {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let handles = || {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let caught = text.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0").trim();
        u64::from_str_radix(caught, 16).unwrap_or(0) & 2 != 0
    };
    while !handles() || !is_due() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before anybody could stop it");
        std::thread::yield_now();
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
}

const SAMPLED_LONG: &str =
    "--fanout 10,10 --hidden 8 --batch 100 --epochs 4 --lr 0.01 --eval none --final-eval none";

fn with_larger_graph() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    json(directory.path(), "generate g --nodes 20000 --degree 15 --dim 8 --classes 4 --train 0.6 --seed 1");
    directory
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_run_stopped_while_it_prepares_goes_on_without_being_told_again() {
    let directory = with_larger_graph();
    let at = directory.path();
    let whole = json(at, &format!("train g {SAMPLED_LONG} --out whole"));
    for strategy in ["diskgnn", "esker"] {
        // What one has sampled would serve the other.
        let _ = fs::remove_dir_all(at.join("g/derived"));
        let run = at.join(strategy);
        let words = format!("train g {SAMPLED_LONG} --strategy {strategy} --threads 1 --out {strategy}");
        let (said, code) = interrupted(esker(at, &words), || run.join("config.json").exists());
        assert_eq!(code, Some(130), "{said}");
        let expected =
            format!("stopped before training; resume with `esker train --resume --out {strategy}`");
        assert!(said.contains(&expected), "{said}");
        assert!(!run.join("metrics.jsonl").exists(), "it stopped before the first batch");
        let found = json(at, &format!("train --resume --out {strategy}"));
        assert_eq!((&found["loss_digest"], &found["strategy"]), (&whole["loss_digest"], &strategy.into()));
    }
}

#[test]
fn preparing_evaluating_and_predicting_say_what_was_stopped() {
    let directory = with_larger_graph();
    let at = directory.path();
    let flags = "--fanout 10,10 --hidden 8 --threads 1 --memory 1GiB";
    json(at, &format!("train g {flags} --batch 10000 --epochs 1 --eval none --final-eval none --out run"));
    let config = fs::read_to_string(at.join("run/config.json")).unwrap();
    // Small batches, so that there is time to stop.
    fs::write(at.join("run/config.json"), config.replace("\"batch\": 10000", "\"batch\": 10")).unwrap();
    let (said, code) = interrupted(esker(at, "eval run --split train"), || true);
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains("stopped evaluating run: nothing was written"), "{said}");
    for out in ["p.npy", "p.parquet"] {
        let command = esker(at, &format!("predict run --nodes all --out {out}"));
        let (said, code) = interrupted(command, || at.join(format!("{out}.partial")).exists());
        assert_eq!(code, Some(130), "{said}");
        assert!(said.contains(&format!("{out} was not written")), "{said}");
        assert!(!names_in(at).iter().any(|name| name.starts_with("p.")), "{:?}", names_in(at));
    }
    let command = esker(at, &format!("prepare g {flags} --batch 100 --epochs 4"));
    let (said, code) = interrupted(command, || !names_in(&at.join("g/derived")).is_empty());
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains("stopped preparing") && said.contains("the same command continues"), "{said}");
}

/// A small file system, as long as it is held; `None` where none can be mounted.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    fn mount(path: &Path, size: &str) -> Option<SmallDisk> {
        fs::create_dir(path).unwrap();
        let size = format!("size={size}");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(path).output();
        if !mounted.is_ok_and(|output| output.status.success()) {
            println!("skipped: no small file system can be mounted here");
            return None;
        }
        Some(SmallDisk(path.to_path_buf()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).output();
    }
}

#[test]
fn a_full_disk_is_told_with_how_to_go_on() {
    let directory = with_larger_graph();
    let at = directory.path();
    let Some(_disk) = SmallDisk::mount(&at.join("small"), "600k") else { return };
    check_refusal(
        at,
        &format!("train g {SAMPLED_LONG} --strategy ginex --disk-budget 1GiB --out small/run"),
        1,
        "no space left on this disk; free some and resume with `esker train --resume --out small/run`",
    );
    json(at, &format!("train g {SAMPLED_LONG} --out run"));
    let Some(_tiny) = SmallDisk::mount(&at.join("tiny"), "64k") else { return };
    for out in ["p.npy", "p.parquet"] {
        let words = format!("predict run --nodes all --mode sampled --out tiny/{out}");
        check_refusal(at, &words, 1, "no space left on this disk; free some, or choose another --out");
        assert_eq!(names_in(&at.join("tiny")).len(), 0, "{words} left something");
    }
}

#[test]
fn a_dataset_that_cannot_be_written_points_to_another_place_for_packed_rows() {
    let directory = with_graph();
    // Nobody makes directories there.
    std::os::unix::fs::symlink("/sys/kernel", directory.path().join("g/derived")).unwrap();
    let words = "train g --strategy diskgnn --fanout 5,5 --hidden 8 --epochs 1 --out run";
    check_refusal(directory.path(), words, 1, "--prepared DIR");
}

#[test]
fn flags_that_change_nothing_are_refused_with_what_would_make_them_count() {
    let directory = with_graph();
    let at = directory.path();
    for (flag, choice, counts_with) in [
        ("--superbatch 3", "--strategy memory", "--strategy ginex"),
        ("--superbatch 3 --strategy diskgnn", "--strategy diskgnn", "--strategy ginex"),
        ("--segment 3 --strategy esker", "--strategy esker", "--strategy diskgnn"),
        ("--segment 3 --strategy ginex", "--strategy ginex", "--strategy diskgnn"),
        ("--prepared there", "--strategy memory", "--strategy diskgnn"),
        ("--no-prefetch", "--strategy memory", "--strategy diskgnn"),
        ("--feature-cache 1MiB", "--strategy memory", "--strategy ginex, outre, diskgnn or esker"),
        ("--neighbour-cache 1MiB", "--strategy memory", "--strategy ginex"),
        ("--disk-budget 1GiB --strategy mmap", "--strategy mmap", "--strategy ginex"),
        ("--io-block 4KiB", "--strategy memory", "--strategy ginex"),
        ("--gpu-memory 1GiB --device cpu", "--device cpu", "--device cuda"),
        ("--heads 2", "--model sage", "--model gat"),
        ("--attention-dropout 0.1", "--model sage", "--model gat"),
        ("--gin-epsilon 0.1 --model gcn", "--model gcn", "--model gin"),
        ("--gcn-degree sampled", "--model sage", "--model gcn"),
        ("--aggregator max --model gin", "--model gin", "--model sage"),
        ("--fanout 5 --model mlp", "--model mlp", "a --model that has neighbours"),
        ("--momentum 0.9", "--optimizer adam", "--optimizer sgd"),
        ("--betas 0.9,0.99 --optimizer sgd", "--optimizer sgd", "--optimizer adam"),
        ("--patience 3 --eval none", "--eval none", "--eval sampled"),
    ] {
        let name = flag.split(' ').next().unwrap();
        let expected = format!("{name} has no effect with {choice}; leave it out, or use {counts_with}");
        check_refusal(at, &format!("train g {flag} --out r"), 2, &expected);
    }
    fs::write(at.join("idle.toml"), "dataset = \"g\"\nsuperbatch = 3\n").unwrap();
    check_refusal(at, "train idle.toml --out r", 2, "--superbatch has no effect with --strategy memory");
    check_refusal(at, "bench epoch g --segment 3", 2, "--segment has no effect");
    assert!(!at.join("r").exists());
    // What a run directory holds is not looked at, and may be resumed with another strategy.
    let flags = "--fanout 5,5 --hidden 8 --batch 50 --epochs 1 --strategy ginex --superbatch 2";
    json(at, &format!("train g {flags} --out old"));
    fs::remove_file(at.join("old/summary.json")).unwrap();
    json(at, "train g --resume --strategy memory --out old");
    check_refusal(at, "eval old --gpu-memory 1GiB --device cpu", 2, "--gpu-memory has no effect");
}

#[test]
fn numbers_that_cannot_be_are_refused_in_plain_words() {
    let directory = with_graph();
    let at = directory.path();
    for (flags, expected) in [
        ("--epochs 0", "--epochs is 0; it must be at least 1"),
        ("--batch 0", "--batch is 0; it must be at least 1"),
        ("--eval-every 0", "--eval-every is 0; it must be at least 1"),
        ("--threads 0", "--threads is 0; it must be at least 1"),
        ("--superbatch 0 --strategy ginex", "--superbatch is 0; it must be at least 1"),
        ("--lr -1", "--lr is -1; it must be greater than 0"),
        ("--epochs -1", "it must be a whole number, 0 or greater"),
        ("--dropout -0.5", "dropout"),
        ("--memory -1", "`-1` is not a size"),
        ("--metric auc", "--metric auc does not fit labels of 4 classes"),
    ] {
        check_refusal(at, &format!("train g {flags} --out r"), 2, expected);
    }
    assert!(!at.join("r").exists());
}

fn check_refusal(directory: &Path, words: &str, code: i32, expected: &str) {
    let output = esker(directory, words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{words}: {said}");
    assert!(said.contains(expected), "{words}: `{expected}` is not in: {said}");
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
    let refused = |words: &str, expected: &str| check_refusal(at, words, 2, expected);
    let failed = |words: &str, expected: &str| {
        let output = esker(at, words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(expected), "{words}: {said}");
        assert!(!said.contains("panicked"), "{words}: {said}");
    };
    refused("train g --metric auc --out r", "auc needs two classes");
    refused("train g --out g", "is a dataset");
    refused("train g --fanout 5,5,5 --layers 2 --out r", "one a layer");
    refused("train g --hidden 1000000 --memory 1GiB --out r", "GiB, or a smaller --batch");
    refused("train g --hidden 10000000000 --out r", "take at most");
    refused("train g --form shadow --final-eval full --fanout 5,5 --out r", "--final-eval sampled");
    refused("train g --schedule sometimes --out r", "cosine:WARMUP");
    refused("train g --memory 1MiB --out r", "total");
    refused("train g --memory 900TiB --out r", "this process can get at most");
    refused("prepare g --memory 900TiB", "this process can get at most");
    refused("train g --strategy warp --out r", "memory, mmap");
    failed("train g --device cuda:99 --out r", "--device cpu");
    failed("bench gpu --number 99", "--device cpu");
    refused("train g --device gpu --out r", "auto, cpu, cuda or cuda:N");
    refused("train g --precision bf16 --out r", "the CPU computes in f32, not in bf16");
    failed("bench epoch g --device cuda:98", "cuda:98");
    check_refusal(at, "eval nowhere", 1, "does not hold a run");
    check_refusal(at, "train nowhere", 1, "nowhere");
    refused("train g --resume", "--resume needs --out");
    refused("bench epoch g --batches 0", "is not in 1..");
    fs::write(at.join("bad.toml"), "dataset = \"g\"\nhiden = 3\n").unwrap();
    refused("train bad.toml --out r", "hiden");
    assert!(!at.join("r").exists());
}

#[test]
fn the_library_has_the_defaults_of_the_program() {
    let directory = with_graph();
    let mut found = json(directory.path(), "train g --device cpu --dry-run");
    let dataset = esker_store::Dataset::open(&directory.path().join("g")).unwrap();
    let mut expected = serde_json::to_value(esker_train::RunConfig::for_dataset(&dataset)).unwrap();
    // Memory is a share of what is free at that moment, and other processes come and go between the two.
    for config in [&mut found["config"], &mut expected] {
        assert!(config["memory"].take().as_u64().is_some_and(|bytes| bytes > 0));
    }
    assert_eq!(found["config"], expected);
}

/// 64 training nodes with one neighbour each, but for the second, which has 2900. No pilot samples its batch.
fn with_hub() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let integers = |name: &str, shape: &str, values: &mut dyn Iterator<Item = i64>| {
        npy(
            &directory.path().join(name),
            "<i8",
            shape,
            &values.flat_map(i64::to_le_bytes).collect::<Vec<_>>(),
        );
    };
    let edges: Vec<(i64, i64)> =
        (0..80).map(|node| (node + 100, node)).chain((100..3000).map(|node| (node, 1))).collect();
    let shape = format!("(2, {})", edges.len());
    let mut ends = edges.iter().map(|edge| edge.0).chain(edges.iter().map(|edge| edge.1));
    integers("edges.npy", &shape, &mut ends);
    integers("labels.npy", "(3000,)", &mut (0..3000).map(|node| node % 2));
    integers("train.npy", "(64,)", &mut (0..64));
    integers("valid.npy", "(8,)", &mut (64..72));
    integers("test.npy", "(8,)", &mut (72..80));
    let features: Vec<u8> = (0..3000 * 1024).flat_map(|at| ((at % 7) as f32).to_le_bytes()).collect();
    npy(&directory.path().join("features.npy"), "<f4", "(3000, 1024)", &features);
    let words = "import g --format npy --edges edges.npy --features features.npy --labels labels.npy";
    json(directory.path(), &format!("{words} --train train.npy --valid valid.npy --test test.npy"));
    directory
}

#[test]
fn a_batch_too_large_ends_a_run_with_a_checkpoint_and_the_budget_to_resume_with() {
    let directory = with_hub();
    let at = directory.path();
    let flags = "--layers 1 --fanout all --hidden 8 --batch 1 --order sequential --epochs 2";
    let whole = json(at, &format!("train g {flags} --memory 1GiB --out whole"));
    let dry = json(at, &format!("train g {flags} --dry-run --memory 1GiB"));
    let smallest = dry["smallest_host_bytes"].as_u64().unwrap();
    assert!(
        dry["largest_batch"]["sampled"] == true && dry["largest_batch"]["training"][0].as_u64() < Some(100)
    );
    let output = esker(at, &format!("train g {flags} --memory {smallest}B --out run")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("batch 2 of epoch 1 is larger than expected"), "{said}");
    assert!(at.join("run/checkpoint.safetensors").exists());
    // First its sample does not fit, then its rows: each error names a budget that goes further.
    let (mut said, mut found) = (said, None);
    for _ in 0..3 {
        let memory = said.split("--resume --memory ").nth(1).unwrap();
        let memory: String = memory.chars().take_while(|c| c.is_alphanumeric() || *c == '.').collect();
        let mut command = esker(at, &format!("train --resume --out run --memory {memory} --json"));
        let output = command.output().unwrap();
        said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() {
            found = Some(serde_json::from_slice::<Value>(&output.stdout).unwrap());
            break;
        }
    }
    let found = found.unwrap_or_else(|| panic!("{said}"));
    assert_eq!((&found["loss_digest"], &found["test"]), (&whole["loss_digest"], &whole["test"]));
    let (peak, budget) = (found["peak_host_bytes"].as_u64(), found["budget_host_bytes"].as_u64());
    assert!(peak <= budget && budget > Some(smallest), "{found}");
}

/// The size that a message tells to use.
fn told_memory(said: &str) -> String {
    let rest = said.split("use --memory ").nth(1).unwrap_or_else(|| panic!("no size in: {said}"));
    rest.chars().take_while(|c| c.is_alphanumeric() || *c == '.').collect()
}

#[test]
fn predictions_take_the_memory_of_their_batches_and_name_the_budget_of_a_larger_one() {
    let directory = with_hub();
    let at = directory.path();
    let flags = "--layers 1 --fanout all --hidden 8 --batch 1 --order sequential --epochs 1";
    json(at, &format!("train g {flags} --memory 1GiB --out run"));
    let predict = "predict run --nodes all --mode sampled";
    json(at, &format!("{predict} --out expected.npy"));
    for strategy in ["memory", "ginex"] {
        let out = format!("of-{strategy}");
        json(at, &format!("train g {flags} --memory 1GiB --strategy {strategy} --out {out}"));
        let words = format!("predict {out} --nodes all --mode sampled --out found.npy");
        // Too little for anything, then too little for the hub, which no pilot sees.
        let (mut memory, mut refused, mut done) = ("1MiB".to_string(), 0, false);
        for _ in 0..5 {
            let output = esker(at, &format!("{words} --memory {memory} --json")).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            if output.status.success() {
                let found: Value = serde_json::from_slice(&output.stdout).unwrap();
                assert!(found["peak_host_bytes"].as_u64() <= found["budget_host_bytes"].as_u64(), "{found}");
                done = true;
                break;
            }
            assert_eq!(output.status.code(), Some(2), "{said}");
            assert!(!said.contains("--resume") && !said.contains("the test"), "{said}");
            (memory, refused) = (told_memory(&said), refused + said.contains("larger than expected") as u32);
        }
        assert!(done && refused > 0, "{strategy}: {refused} refusals, {memory} at last");
        let read = |name: &str| std::fs::read(at.join(name)).unwrap();
        assert!(read("found.npy") == read("expected.npy"), "{strategy}");
    }
}

#[test]
fn ginex_tells_its_disk_space_and_what_it_reads_of_samples() {
    let directory = with_graph();
    let at = directory.path();
    let flags = "--strategy ginex --fanout 4,4 --hidden 8 --batch 100 --epochs 2 --disk-budget 40MiB";
    let dry = json(at, &format!("train g {flags} --dry-run"));
    let most = dry["most_disk_bytes"].as_u64().unwrap();
    assert!(most > 0 && most <= 40 << 20, "{dry}");
    let found = json(at, &format!("train g {flags} --out ginex"));
    let epochs = found["epochs"].as_array().unwrap();
    // Samples are loaded ahead, so those of a small epoch may count in the one before.
    let read = |epoch: &Value| epoch["sample_bytes_read"].as_u64().unwrap_or(0);
    assert!(epochs.len() == 2 && epochs.iter().map(read).sum::<u64>() > 0, "{found}");
}
