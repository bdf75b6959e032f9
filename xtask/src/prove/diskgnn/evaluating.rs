//! SIGKILL of whole runs of diskgnn while they train, validate and test. What a run does is read from what it leaves on
//! disk, so a kill is counted for what it hit, and the proof fails if one of them was never hit.

use crate::prove::{Bench, number, train};
use anyhow::{Context, Result, ensure};
use esker_types::random::{Key, unit};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// What a run is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    Preparing,
    Training,
    Validation,
    Test,
    Ended,
}

/// So many times the runs are made at most until every phase was hit.
const MOST_TIMES: u64 = 10;

/// What is killed in each run, in this order.
const TARGETS: [Doing; 3] = [Doing::Training, Doing::Validation, Doing::Test];

impl Doing {
    /// Of a run with a checkpoint after every batch: lines about all batches of an epoch are there before it is validated,
    /// and the last weights before the test.
    fn of(out: &Path, batches: u64) -> Doing {
        if out.join("summary.json").exists() {
            return Doing::Ended;
        }
        if out.join("last.safetensors").exists() {
            return Doing::Test;
        }
        let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
        let count = |kind: &str| text.matches(&format!("\"kind\":\"{kind}\"")).count() as u64;
        match (count("batch"), count("epoch")) {
            (0, _) => Doing::Preparing,
            (trained, epochs) if trained == (epochs + 1) * batches => Doing::Validation,
            _ => Doing::Training,
        }
    }
}

/// Kills a run some time after it begins something, as seen every millisecond. Returns what it was doing then.
fn kill_while(
    command: &mut Command,
    out: &Path,
    batches: u64,
    target: Doing,
    after: Duration,
) -> Result<Doing> {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    // What an earlier process was killed in is on disk until this one has got beyond it.
    let mut is_stale = Doing::of(out, batches) == target;
    loop {
        if let Some(status) = child.try_wait()? {
            ensure!(status.success(), "it failed before it was killed: {status}");
            return Ok(Doing::Ended);
        }
        let is_there = Doing::of(out, batches) == target;
        if is_there && !is_stale {
            break;
        }
        is_stale &= is_there;
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(after);
    if child.try_wait()?.is_some() {
        return Ok(Doing::Ended);
    }
    child.kill()?;
    child.wait()?;
    Ok(Doing::of(out, batches))
}

/// Runs that are killed once while they train, once while they validate and once while they test, and are then resumed to
/// their end.
pub fn killed(bench: &Bench, epochs: &str, runs: u64, seed: u64) -> Result<Value> {
    let often = ["--strategy", "diskgnn", "--checkpoint-batches", "1", "--feature-cache", "0B"];
    let command =
        |out: &str, more: &[&str]| bench.esker(&train::words(out, epochs, &[&often[..], more].concat()));
    let undisturbed = bench.json_of(&mut command("whole", &["--json"]))?;
    let first = &undisturbed["epochs"][0];
    let batches = first["batches"].as_u64().context("batches of an epoch")?;
    let seconds = |target: Doing| match target {
        Doing::Validation => number(first, "evaluation_seconds"),
        Doing::Test => number(&undisturbed["wall_seconds"], "test"),
        _ => number(first, "seconds"),
    };
    let (key, out, mut hits, mut made) = (Key::new(seed), bench.path("killed"), [0u64; TARGETS.len()], 0);
    // A busy machine may let a phase pass before it is killed: more runs are made then.
    for run in 0..runs * MOST_TIMES {
        if run >= runs && hits.iter().all(|hits| *hits > 0) {
            break;
        }
        made += 1;
        fs::remove_dir_all(&out).ok();
        for (turn, target) in TARGETS.into_iter().enumerate() {
            let resume: &[&str] = if out.join("config.json").exists() { &["--resume"] } else { &[] };
            // The phase may be shorter in a run that reads what another one has just read.
            let share = unit(key.with(run).at(turn as u64)) / 2.0;
            let after = Duration::from_secs_f64(seconds(target)? * share);
            let hit = kill_while(&mut command("killed", resume), &out, batches, target, after)?;
            if hit == Doing::Ended {
                break;
            }
            TARGETS.iter().zip(&mut hits).filter(|(of, _)| **of == hit).for_each(|(_, hits)| *hits += 1);
        }
        let resume: &[&str] = if out.join("config.json").exists() { &["--resume"] } else { &[] };
        if !out.join("summary.json").exists() {
            bench.json_of(&mut command("killed", &[&["--json"], resume].concat()))?;
        }
        let last = |out: &str| fs::read(bench.path(out).join("last.safetensors")).context("last weights");
        ensure!(last("killed")? == last("whole")?, "run {run}: the last weights differ");
        train::ends_as(bench, &undisturbed, run)?;
    }
    let [training, validation, test] = hits;
    ensure!(
        hits.iter().all(|hits| *hits > 0),
        "{training} kills hit training, {validation} validation and {test} the test: each must be hit"
    );
    Ok(json!({
        "runs": made, "kills_in_training": training, "kills_in_validation": validation, "kills_in_test": test,
        "loss_digest": undisturbed["loss_digest"],
    }))
}
