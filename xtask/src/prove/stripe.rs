//! SIGKILL at random moments of striping and of its undo: the dataset is complete at all times, stored the old way or
//! the new, and the same command finishes without leftovers.

use super::Bench;
use super::kill::run_until;
use anyhow::{Context, Result, ensure};
use esker_types::random::{Key, unit};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const STRIPE: [&str; 8] =
    ["stripe", "killed", "--over", "disk-0,disk-1,disk-2", "--min-size", "100KiB", "--stripe-size", "64KiB"];
const UNDO: [&str; 3] = ["stripe", "killed", "--undo"];

/// Kills both commands at `times` random moments. `size` is in thousands of nodes.
pub fn kill_at_random_moments(bench: &Bench, size: u64, times: u64, seed: u64) -> Result<Value> {
    let nodes = (size * 1000).to_string();
    let made = bench.json(&["generate", "killed", "--nodes", &nodes, "--dim", "64", "--memory", "64MiB"])?;
    (0..3).try_for_each(|disk| fs::create_dir(bench.path(&format!("disk-{disk}"))))?;
    let key = Key::new(seed);
    let (id, plain) = (&made["id"], files(bench)?);
    let stripe = kill(bench, "stripe", &STRIPE, &UNDO, times, key, id)?;
    ensure!(files(bench)? == plain, "something is left of the stripes: {:?}", files(bench)?);
    bench.json(&STRIPE)?;
    let striped = files(bench)?;
    let undo = kill(bench, "stripe --undo", &UNDO, &STRIPE, times, key.with(1), id)?;
    ensure!(files(bench)? == striped, "something is left of the single files: {:?}", files(bench)?);
    Ok(Value::Array(vec![stripe, undo]))
}

/// Kills `words` `times` times. Whenever it finishes, `back` restores the initial state.
fn kill(
    bench: &Bench,
    name: &str,
    words: &[&str],
    back: &[&str],
    times: u64,
    key: Key,
    id: &Value,
) -> Result<Value> {
    let whole = undisturbed(bench, words)?;
    bench.json(back)?;
    let mut counts = [0u64; 4];
    for case in 0..times {
        // The manifest is replaced near the end: aim there every other time.
        let share = unit(key.at(case));
        let moment = whole.mul_f64(if case % 2 == 0 { share } else { 0.7 + share * 0.4 });
        let finished = run_until(bench.esker(words), moment)?;
        counts[finished as usize] += 1;
        let found = bench.json(&["verify", "killed"]).with_context(|| format!("{name}, case {case}"))?;
        ensure!(found["id"] == *id, "{name}, case {case}: another dataset");
        let striped = !bench.json(&["info", "killed"])?["striped"].is_null();
        let arrived = striped == (words == STRIPE);
        counts[2] += (arrived && !finished) as u64;
        ensure!(arrived || !finished, "{name}, case {case}: it finished and changed nothing");
        // The leftovers of consecutive cases accumulate; then the same command finishes, or the other cleans up.
        if case % 3 == 2 {
            bench.json(words).with_context(|| format!("{name}, case {case}: the re-run"))?;
            counts[3] += 1;
        }
        if case % 3 == 2 || arrived {
            bench.json(back)?;
        }
    }
    bench.json(back)?;
    bench.json(&["verify", "killed"])?;
    let [killed, finished_first, behind, re_runs] = counts;
    Ok(json!({
        "job": name, "cases": times, "kills": killed, "finished_before_the_kill": finished_first,
        "killed_behind_the_manifest": behind, "re_runs_that_finished": re_runs,
        "undisturbed_seconds": whole.as_secs_f64(),
    }))
}

fn undisturbed(bench: &Bench, words: &[&str]) -> Result<Duration> {
    let started = Instant::now();
    bench.json(words)?;
    Ok(started.elapsed())
}

/// All names in the dataset and on the disks, without following links.
fn files(bench: &Bench) -> Result<Vec<String>> {
    fn walk(directory: &Path, names: &mut Vec<String>) -> Result<()> {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            names.push(entry.path().display().to_string());
            if entry.file_type()?.is_dir() {
                walk(&entry.path(), names)?;
            }
        }
        Ok(())
    }
    let mut names = Vec::new();
    walk(&bench.directory, &mut names)?;
    names.sort();
    Ok(names)
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    kill_at_random_moments(bench, 2000, 50, 1)
}
