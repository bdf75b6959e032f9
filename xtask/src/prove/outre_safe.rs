//! OUTRE after kills and in little memory. Its choices of rows depend on measured times, so a run that was killed while it
//! chose may choose others: `memory` with the nodes that it chose is the run to compare with.

use super::ginex::GROUP_SLACK_BYTES;
use super::train::{run_until, words};
use super::{Bench, number, succeed};
use crate::cgroup::Group;
use anyhow::{Context, Result, ensure};
use esker_types::random::{Key, unit};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Kills of a run before it may end.
const KILLS_OF_A_RUN: u64 = 6;

/// What a run does until it ends, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunStage {
    Partitioning,
    Profiling,
    Training,
}

const STAGES: [RunStage; 3] = [RunStage::Partitioning, RunStage::Profiling, RunStage::Training];

/// The stage of a run, by what it has left on disk.
fn stage(bench: &Bench, out: &str) -> RunStage {
    let run = bench.path(out);
    match (run.join("config.json").exists(), run.join("history.nodes").exists()) {
        (false, _) => RunStage::Partitioning,
        (true, false) => RunStage::Profiling,
        (true, true) => RunStage::Training,
    }
}

fn derived(bench: &Bench) -> PathBuf {
    bench.path("graph/derived")
}

/// Runs without disturbance from the first partition on. Returns the seconds that each stage took.
fn undisturbed(bench: &Bench, epochs: &str, more: &[&str]) -> Result<[f64; 3]> {
    fs::remove_dir_all(derived(bench)).ok();
    let (mut seconds, mut last) = ([0.0; 3], Instant::now());
    let mut child = bench
        .esker(&words("whole", epochs, more))
        .arg("--json")
        .stdout(std::process::Stdio::null())
        .spawn()?;
    loop {
        let ended = child.try_wait()?;
        seconds[stage(bench, "whole") as usize] += last.elapsed().as_secs_f64();
        last = Instant::now();
        if let Some(status) = ended {
            ensure!(status.success(), "the undisturbed run failed: {status}");
            return Ok(seconds);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Checks a run that was killed against `memory` with the nodes that it chose.
fn check_twin(bench: &Bench, epochs: &str, shape: &[&str], number: u64) -> Result<Value> {
    let twin = format!("twin-{number}");
    let more = [&["--strategy", "memory", "--order", "groups", "--history-set", "killed"], shape].concat();
    let expected = bench.json(&words(&twin, epochs, &more))?;
    let found: Value = serde_json::from_slice(&fs::read(bench.path("killed/summary.json"))?)?;
    for key in ["loss_digest", "test", "valid", "best_epoch", "steps"] {
        ensure!(found[key] == expected[key], "run {number}: {key} is {}, not {}", found[key], expected[key]);
    }
    for weights in ["last.safetensors", "best.safetensors"] {
        let read = |out: &str| fs::read(bench.path(out).join(weights)).context(weights);
        ensure!(read("killed")? == read(&twin)?, "run {number}: {weights} differs from that of memory");
    }
    let pulls = |epoch: &Value| epoch["history"]["pulls"].as_u64().unwrap_or(0);
    let pulled: u64 = found["epochs"].as_array().map_or(0, |epochs| epochs.iter().map(pulls).sum());
    ensure!(pulled > 0, "run {number} pulled nothing");
    fs::remove_dir_all(bench.path(&twin))?;
    Ok(found["loss_digest"].clone())
}

/// SIGKILL at random moments of partitioning, profiling and training, `--resume` until it ends: losses and weights are those
/// of `memory` with the same nodes, to the bit.
pub fn killed(bench: &Bench, epochs: &str, kills: u64, seed: u64) -> Result<Value> {
    let shape = ["--batch", "100", "--staleness", "20", "--device", "cpu"];
    let often = ["--strategy", "outre", "--superbatch", "5", "--checkpoint-batches", "3"];
    let more = [&often[..], &shape].concat();
    let (seconds, key) = (undisturbed(bench, epochs, &more)?, Key::new(seed));
    let (mut runs, mut done, mut of_stage, mut digests) = (0u64, 0u64, [0u64; 3], Vec::new());
    while done < kills {
        fs::remove_dir_all(bench.path("killed")).ok();
        fs::remove_dir_all(derived(bench)).ok();
        for turn in 0.. {
            let mut all = more.clone();
            let begun = bench.path("killed/config.json").exists();
            all.extend(begun.then_some("--resume"));
            let now = stage(bench, "killed");
            // A run is killed in the stage that it is in, or in one after it.
            let aimed = STAGES[(now as usize).max((done % 3) as usize)] as usize;
            let before: f64 = seconds[now as usize..aimed].iter().sum();
            let share = unit(key.with(runs).at(done * 1000 + turn)) / (1 + runs / kills.max(1)) as f64;
            let is_last = done >= kills || turn >= KILLS_OF_A_RUN;
            let wait = if is_last { 600.0 } else { before + seconds[aimed] * share };
            let mut command = bench.esker(&words("killed", epochs, &all));
            if run_until(&mut command, Duration::from_secs_f64(wait))? {
                break;
            }
            ensure!(!is_last, "a run that nobody killed did not end within 600 s");
            of_stage[stage(bench, "killed") as usize] += 1;
            done += 1;
        }
        digests.push(check_twin(bench, epochs, &shape, runs)?);
        runs += 1;
    }
    Ok(json!({
        "kills": done, "partitioning": of_stage[0], "profiling": of_stage[1], "training": of_stage[2], "runs": runs,
        "undisturbed_seconds": seconds, "loss_digests": digests,
    }))
}

/// Trains with features four times and topology twice as large as the memory of its cgroup, partitioning included.
pub fn far_beyond_memory(bench: &Bench, group_bytes: u64, epochs: &str, batch: &str) -> Result<Value> {
    // 96 neighbours of 4 bytes and 192 numbers of 4 bytes per node: features are twice the topology. A node has 192 bytes of
    // the group then; the profile takes 84.
    let nodes = (2 * group_bytes / (96 * 4) * 21 / 20).to_string();
    let made = ["--degree", "96", "--dim", "192", "--seed", "1", "--train", "0.05", "--memory", "256MiB"];
    bench.json(&[&["generate", "large", "--nodes", &nodes][..], &made].concat())?;
    let info = bench.json(&["info", "large"])?;
    let (features, lists) = (number(&info, "nodes")? * 768.0, number(&info, "edges")? * 4.0);
    ensure!(features >= 4.0 * group_bytes as f64 && lists >= 2.0 * group_bytes as f64, "{info:#}");
    let memory = format!("{}B", group_bytes - GROUP_SLACK_BYTES);
    let group = Group::create(group_bytes)?;
    let shape =
        ["--fanout", "10,5", "--hidden", "32", "--batch", batch, "--epochs", epochs, "--eval", "none"];
    // Looking for a GPU loads the libraries of a driver, which are none of this memory.
    let shape = [&shape[..], &["--device", "cpu"]].concat();
    let run = ["train", "large", "--strategy", "outre", "--memory", &memory, "--threads", "2", "--json"];
    // A given staleness asks for a history, whatever the number of batches.
    let also = ["--staleness", "20", "--out", "outre"];
    let output = succeed(&mut group.wrap(&bench.esker(&[&run[..], &shape, &also].concat())))?;
    let summary: Value = serde_json::from_slice(&output.stdout)?;
    let (peak, budget) = (number(&summary, "peak_host_bytes")?, number(&summary, "budget_host_bytes")?);
    ensure!(peak <= budget, "the run promised {budget} bytes and took {peak}");
    // The split may find that no history pays.
    let set: &[&str] =
        if bench.path("outre/history.nodes").exists() { &["--history-set", "outre"] } else { &[] };
    let twin = ["train", "large", "--strategy", "memory", "--order", "groups"];
    let inside = bench.json(&[&twin[..], &shape, set, &["--out", "memory", "--memory", "16GiB"]].concat())?;
    ensure!(inside["loss_digest"] == summary["loss_digest"], "losses differ from those in memory");
    fs::remove_dir_all(bench.path("large"))?;
    Ok(json!({
        "group_bytes": group_bytes, "feature_bytes": features, "topology_bytes": lists, "peak_host_bytes": peak,
        "budget_host_bytes": budget, "loss_digest": summary["loss_digest"], "split": summary["history_split"],
        "last_epoch": summary["epochs"].as_array().and_then(|epochs| epochs.last()),
    }))
}

pub(super) fn full_kill(bench: &Bench) -> Result<Value> {
    super::train::graph(bench, 200_000, 64)?;
    killed(bench, "4", 50, 7)
}

pub(super) fn full_budget(bench: &Bench) -> Result<Value> {
    far_beyond_memory(bench, 384 << 20, "2", "500")
}
