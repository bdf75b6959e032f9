//! SIGKILL at random moments: afterwards there is no dataset or a complete one, and the same command finishes.

use super::Bench;
use super::import::write_edges;
use anyhow::{Result, ensure};
use esker_types::random::{Key, unit};
use serde_json::{Value, json};
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Kills each job at `times` random moments. `size` is in thousands of edges (import) and of nodes (generate).
pub fn at_random_moments(bench: &Bench, size: u64, times: u64, seed: u64) -> Result<Value> {
    write_edges(&bench.path("edges.npy"), size * 100, size * 1000, 1)?;
    let nodes = (size * 1000).to_string();
    let import = [
        "import",
        "killed",
        "--format",
        "npy",
        "--edges",
        "edges.npy",
        "--memory",
        "48MiB",
        "--out-neighbours",
        "--keep-positions",
    ];
    let generate =
        ["generate", "killed", "--nodes", &nodes, "--degree", "8", "--dim", "64", "--memory", "64MiB"];
    let mut results = Vec::new();
    for (name, words) in [("import", &import[..]), ("generate", &generate[..])] {
        results.push(kill_one(bench, name, words, times, Key::new(seed))?);
    }
    results.push(kill_overwriting(bench, &nodes, times, Key::new(seed).with(1))?);
    Ok(Value::Array(results))
}

/// Replacing a dataset: at every moment there is a complete one, the old or the new.
fn kill_overwriting(bench: &Bench, nodes: &str, times: u64, key: Key) -> Result<Value> {
    let words = |seed| {
        [
            "generate",
            "killed",
            "--nodes",
            nodes,
            "--dim",
            "64",
            "--memory",
            "64MiB",
            "--overwrite",
            "--seed",
            seed,
        ]
    };
    let started = Instant::now();
    let old = bench.json(&words("1"))?["id"].clone();
    let (whole, mut counts) = (started.elapsed(), [0u64; 2]);
    for case in 0..times {
        // The swap is at the very end: aim there more often than not.
        let share = unit(key.at(case));
        let finished = run_until(
            bench.esker(&words("2")),
            whole.mul_f64(if case % 3 == 0 { share } else { 0.9 + share * 0.2 }),
        )?;
        counts[finished as usize] += 1;
        let found = bench.json(&["verify", "killed"])?;
        let replaced = found["id"] != old;
        ensure!(replaced || !finished, "case {case}: it finished and the old dataset is still there");
        if replaced {
            bench.json(&words("1"))?;
        }
    }
    let found = bench.json(&words("2"))?;
    ensure!(found["id"] != old, "the last run did not replace the dataset");
    fs::remove_dir_all(bench.path("killed")).ok();
    let [killed, finished_first] = counts;
    Ok(json!({
        "job": "generate --overwrite", "cases": times, "kills": killed, "finished_before_the_kill": finished_first,
        "undisturbed_seconds": whole.as_secs_f64(),
    }))
}

fn kill_one(bench: &Bench, name: &str, words: &[&str], times: u64, key: Key) -> Result<Value> {
    let (started, mut counts) = (Instant::now(), [0u64; 4]);
    let undisturbed = bench.json(words)?;
    let whole = started.elapsed();
    for case in 0..times {
        // Half of the cases kill the same job repeatedly: progress must survive every time.
        let kills = 1 + case % 2 * 3;
        fs::remove_dir_all(bench.path("killed")).ok();
        fs::remove_dir_all(bench.path("killed.partial")).ok();
        for kill in 0..kills {
            let moment = whole.mul_f64(unit(key.with(case).at(kill)));
            let finished = run_until(bench.esker(words), moment)?;
            counts[finished as usize] += 1;
            let there = bench.path("killed").exists();
            if there {
                bench.json(&["verify", "killed"])?;
                break;
            }
            ensure!(!finished, "{name}: it finished and left nothing");
            counts[2] += bench.path("killed.partial").exists() as u64;
            let info = bench.esker(&["info", "killed"]).output()?;
            ensure!(!info.status.success(), "{name}: something opened that is not there");
        }
        if !bench.path("killed").exists() {
            let again = bench.esker(words).output()?;
            let said = String::from_utf8_lossy(&again.stderr);
            ensure!(again.status.success(), "{name}, case {case}: the re-run failed: {said}");
            counts[3] += said.contains("going on where it stopped") as u64;
        }
        let found = bench.json(&["info", "killed"])?;
        ensure!(
            found["id"] == undisturbed["id"],
            "{name}, case {case}: the bytes differ from an undisturbed run"
        );
        bench.json(&["verify", "killed"])?;
    }
    fs::remove_dir_all(bench.path("killed")).ok();
    let [killed, finished_first, left_work, resumed] = counts;
    Ok(json!({
        "job": name, "cases": times, "kills": killed, "finished_before_the_kill": finished_first,
        "left_unfinished_work": left_work, "re_runs_that_went_on": resumed, "undisturbed_seconds": whole.as_secs_f64(),
    }))
}

/// Runs a command and kills it after `moment`. Returns whether it finished before.
pub(super) fn run_until(mut command: Command, moment: Duration) -> Result<bool> {
    let started = Instant::now();
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    while started.elapsed() < moment {
        if let Some(status) = child.try_wait()? {
            ensure!(status.success(), "it failed before it was killed: {status}");
            return Ok(true);
        }
        std::thread::sleep((moment - started.elapsed().min(moment)).min(Duration::from_millis(2)));
    }
    let finished = child.try_wait()?.is_some();
    if !finished {
        child.kill()?;
        child.wait()?;
    }
    Ok(finished)
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    at_random_moments(bench, 3000, 50, 1)
}
