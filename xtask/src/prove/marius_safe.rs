//! Partitions in a buffer after kills and on a full disk: whenever a run or its sorting ends, it continues to the same
//! weights, learned rows and sorted bytes.

use super::diskgnn::packed_files;
use super::ginex::{SmallDisk, free_bytes};
use super::train::{killed_runs, run_until, words as label_words};
use super::{Bench, link, number, train};
use anyhow::{Context, Result, ensure};
use esker_types::random::{Key, unit};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Lags of updates.
const LAGS: [&str; 2] = ["1", "4"];
/// Least share of kills that must fall into sorting.
const SORTING_PART: u64 = 4;
/// Kills may be this many times as many as asked for, until enough were during sorting.
const MOST_TIMES: u64 = 10;

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KilledTask {
    Labels,
    Links,
}

impl KilledTask {
    const ALL: [KilledTask; 2] = [KilledTask::Labels, KilledTask::Links];

    /// The dataset, by the name of its directory.
    fn dataset(self) -> &'static str {
        match self {
            KilledTask::Labels => "graph",
            KilledTask::Links => "facts",
        }
    }

    /// The words of a run on partitions, a few of them resident.
    fn words(self, out: &str, epochs: &str, more: &[&str]) -> Vec<String> {
        let flags = match self {
            KilledTask::Labels => {
                "--order dispersed --partitions 12 --resident 4 --embeddings 16 --inputs concat --device cpu"
            }
            KilledTask::Links => "--order tour --partitions 14 --resident 4",
        };
        let flags: Vec<&str> = flags.split(' ').chain(more.iter().copied()).collect();
        match self {
            KilledTask::Labels => label_words(out, epochs, &flags).into_iter().map(String::from).collect(),
            KilledTask::Links => link::words(out, epochs, &flags),
        }
    }

    /// Sorting alone. Safe points are frequent, so that kills fall between them.
    fn prepare(self, safe_point: &str) -> Vec<String> {
        let more = ["--strategy", "marius", "--safe-point", safe_point];
        let mut words = self.words("none", "1", &more);
        words[0] = "prepare".into();
        let out = words.iter().position(|word| word == "--out").unwrap_or(words.len() - 1);
        words.drain(out..out + 2);
        words
    }
}

fn esker(bench: &Bench, words: &[String]) -> Command {
    bench.esker(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// SIGKILL at random moments of training, `--resume` until it ends: weights, learned rows and metrics of an undisturbed run,
/// whose losses are those of `memory` with the same residents.
fn killed_training(bench: &Bench, epochs: &str, kills: u64, seed: u64) -> Result<Value> {
    let (mut rows, mut trained, mut written) = (Vec::new(), 0.0, 0.0);
    for task in KilledTask::ALL {
        for lag in LAGS {
            let common = ["--checkpoint-batches", "3", "--lag", lag];
            let seen = [&["--strategy", "memory", "--resident-only"][..], &common].concat();
            let memory = bench.json_of(esker(bench, &task.words("memory", epochs, &seen)).arg("--json"))?;
            let buffer = [&["--strategy", "marius"][..], &common].concat();
            let run = |out: &str, more: &[&str]| task.words(out, epochs, &[&buffer[..], more].concat());
            let found = killed_runs(bench, kills, seed, &run, &|out| link::left_behind(bench, out))?;
            ensure!(
                found["loss_digest"] == memory["loss_digest"],
                "{task:?}, lag {lag}: losses are not those of memory with the same residents"
            );
            trained += number(&found, "while_training")?;
            written += number(&found, "while_state_was_written")?;
            for out in ["memory", "whole", "killed"] {
                fs::remove_dir_all(bench.path(out))?;
            }
            rows.push(json!({ "task": format!("{task:?}").to_lowercase(), "lag": lag, "found": found }));
        }
    }
    ensure!(trained > 0.0, "no kill was during training: {rows:#?}");
    Ok(json!({ "runs": rows, "while_training": trained, "while_state_was_written": written }))
}

/// How far a sort was when it was killed.
#[derive(Debug, Default)]
struct KilledSorts {
    kills: u64,
    finished: u64,
    edges: u64,
    features: u64,
    after_a_safe_point: u64,
}

impl KilledSorts {
    /// Looks at what a killed process left in the folder of derived data.
    fn see(&mut self, bench: &Bench, dataset: &str) -> Result<()> {
        let Ok(entries) = fs::read_dir(bench.path(dataset).join("derived")) else { return Ok(()) };
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let journal = fs::read(path.join("work/journal.json")).unwrap_or_default();
            let Ok(journal) = serde_json::from_slice::<Value>(&journal) else { continue };
            match name.starts_with("partition-features") {
                true => self.features += 1,
                false => self.edges += 1,
            }
            let (steps, divided) = (&journal["steps"], &journal["steps"]["divided"]);
            // Once all is divided there is no safe point inside of that step.
            let inside = divided["all"] == false || divided.is_object() && divided["starts"].is_null();
            let inside = inside && divided["all"] != true;
            self.after_a_safe_point += u64::from(inside || steps["ordered"].as_u64() > Some(0));
        }
        Ok(())
    }
}

/// SIGKILL at random moments of sorting edges and features: the re-run makes the bytes of an undisturbed one.
fn killed_sorting(bench: &Bench, task: KilledTask, safe_point: &str, times: u64, seed: u64) -> Result<Value> {
    let (dataset, words, key) = (task.dataset(), task.prepare(safe_point), Key::new(seed));
    let derived = bench.path(dataset).join("derived");
    fs::remove_dir_all(&derived).ok();
    let started = Instant::now();
    bench.json_of(esker(bench, &words).arg("--json"))?;
    let whole = started.elapsed();
    let (expected, mut seen, mut runs) = (packed_files(&derived)?, KilledSorts::default(), 0u64);
    let sorting = |seen: &KilledSorts| seen.edges + seen.features;
    while seen.kills < times || sorting(&seen) < times.div_ceil(SORTING_PART) {
        ensure!(runs < times * MOST_TIMES, "{task:?}: kills missed the sorts: {seen:?}");
        fs::remove_dir_all(&derived).ok();
        for kill in 0..1 + runs % 4 {
            let moment = whole.mul_f64(unit(key.with(runs).at(kill)));
            match run_until(&mut esker(bench, &words), moment)? {
                true => seen.finished += 1,
                false => {
                    seen.kills += 1;
                    seen.see(bench, dataset)?;
                }
            }
        }
        bench.json_of(esker(bench, &words).arg("--json"))?;
        ensure!(
            packed_files(&derived)? == expected,
            "{task:?}, run {runs}: sorted bytes differ from those of an undisturbed run"
        );
        runs += 1;
    }
    Ok(json!({
        "dataset": dataset, "runs": runs, "kills": seen.kills, "finished_before_the_kill": seen.finished,
        "while_edges_were_sorted": seen.edges, "while_features_were_sorted": seen.features,
        "after_a_safe_point": seen.after_a_safe_point, "undisturbed_seconds": whole.as_secs_f64(),
    }))
}

/// Sizes of a proof of kills.
#[derive(Debug, Clone, Copy)]
pub struct KillSize {
    /// Epochs of every run.
    pub epochs: &'static str,
    /// Kills of training, for each task and lag.
    pub training: u64,
    /// Kills of sorting, for each task.
    pub sorting: u64,
    /// Bytes between two safe points of a sort.
    pub safe_point: &'static str,
}

/// Kills of sorting and of training. Expects `graph` and `facts`.
pub fn killed(bench: &Bench, size: KillSize, seed: u64) -> Result<Value> {
    let sorted: Vec<Value> = KilledTask::ALL
        .iter()
        .map(|task| killed_sorting(bench, *task, size.safe_point, size.sorting, seed))
        .collect::<Result<_>>()?;
    let trained = killed_training(bench, size.epochs, size.training, seed)?;
    Ok(json!({ "sorting": sorted, "training": trained }))
}

/// A file that takes what is left of a disk but `least` bytes. Dropped, it leaves.
struct Ballast(PathBuf);

impl Ballast {
    fn fill(disk: &SmallDisk, least: u64) -> Result<Ballast> {
        let path = disk.path().join("ballast");
        fs::write(&path, vec![1u8; free_bytes(disk.path())?.saturating_sub(least) as usize])?;
        Ok(Ballast(path))
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// What a command says that must fail, without a panic and with these words.
fn refusal(bench: &Bench, words: &[String], said: &[&str]) -> Result<String> {
    let output = esker(bench, words).output()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success(), "{words:?} was to fail");
    ensure!(said.iter().all(|word| text.contains(word)) && !text.contains("panicked"), "{text}");
    Ok(text.lines().last().unwrap_or_default().replace(&*bench.directory.to_string_lossy(), "..."))
}

const FULL: [&str; 1] = ["no space left on this disk"];

/// The disk of a run becomes full while partitions are written: the checkpoint is as it was, and with free space the run
/// goes on to the same end.
fn full_while_training(bench: &Bench, disk: &SmallDisk, epochs: &str) -> Result<Value> {
    let run = disk.path().join("run").to_string_lossy().into_owned();
    let words = |out: &str, more: &[&str]| {
        let common = ["--strategy", "marius", "--lag", "4", "--checkpoint-batches", "1"];
        KilledTask::Links.words(out, epochs, &[&common[..], more].concat())
    };
    let expected = bench.json_of(esker(bench, &words("undisturbed", &[])).arg("--json"))?;
    let mut child = esker(bench, &words(&run, &[])).stderr(Stdio::null()).spawn()?;
    let checkpoint = disk.path().join("run/checkpoint.safetensors");
    while !checkpoint.exists() {
        ensure!(child.try_wait()?.is_none(), "the run ended before its first checkpoint");
        std::thread::yield_now();
    }
    child.kill()?;
    child.wait()?;
    let (before, ballast) = (fs::read(&checkpoint)?, Ballast::fill(disk, 8 << 10)?);
    let said = refusal(bench, &words(&run, &["--resume"]), &FULL)?;
    ensure!(fs::read(&checkpoint)? == before, "the checkpoint is not what it was");
    drop(ballast);
    let found = bench.json_of(esker(bench, &words(&run, &["--resume"])).arg("--json"))?;
    for key in ["loss_digest", "test", "valid"] {
        ensure!(found[key] == expected[key], "the resumed run differs in {key}");
    }
    fs::remove_dir_all(&run)?;
    fs::remove_dir_all(bench.path("undisturbed"))?;
    Ok(json!({ "said": said, "loss_digest": found["loss_digest"] }))
}

/// The disk of a dataset becomes full while it is sorted: with free space the same command makes the same bytes.
fn full_while_sorting(bench: &Bench, disk: &SmallDisk) -> Result<Value> {
    let copy = disk.path().join("facts");
    let sort = KilledTask::Links.prepare("64KiB");
    bench.json_of(esker(bench, &sort).arg("--json"))?;
    train::copy_directory(&bench.path("facts"), &copy)?;
    fs::remove_dir_all(copy.join("derived"))?;
    let mut again = sort;
    again[1] = copy.to_string_lossy().into_owned();
    let ballast = Ballast::fill(disk, 16 << 10)?;
    let said = refusal(bench, &again, &FULL)?;
    drop(ballast);
    bench.json_of(esker(bench, &again).arg("--json"))?;
    let whole = packed_files(&bench.path("facts/derived"))?;
    ensure!(packed_files(&copy.join("derived"))? == whole, "sorted bytes differ after a full disk");
    bench.json(&["verify", copy.to_str().context("a path that is text")?])?;
    fs::remove_dir_all(&copy)?;
    Ok(json!({ "said": said }))
}

/// Full disks of a run and of a dataset. `None` if no small disk can be made.
pub fn full_disk(bench: &Bench, epochs: &str) -> Result<Option<Value>> {
    let Some(disk) = SmallDisk::mount(bench)? else { return Ok(None) };
    let trained = full_while_training(bench, &disk, epochs)?;
    Ok(Some(json!({ "training": trained, "sorting": full_while_sorting(bench, &disk)? })))
}

/// A dataset on a disk that cannot be written: what is sorted is used, and what is not is refused by name. `None` if no such
/// disk can be made.
pub fn read_only_dataset(bench: &Bench, epochs: &str) -> Result<Option<Value>> {
    let Some(disk) = SmallDisk::mount(bench)? else { return Ok(None) };
    let own = KilledTask::Links.words("written", epochs, &["--strategy", "marius"]);
    let expected = bench.json_of(esker(bench, &own).arg("--json"))?;
    let copy = disk.path().join("facts");
    train::copy_directory(&bench.path("facts"), &copy)?;
    disk.make_read_only()?;
    let from_copy = |out: &str, more: &[&str]| {
        let mut words = KilledTask::Links.words(out, epochs, &[&["--strategy", "marius"][..], more].concat());
        words[1] = copy.to_string_lossy().into_owned();
        words
    };
    let found = bench.json_of(esker(bench, &from_copy("read-only", &[])).arg("--json"))?;
    ensure!(found["loss_digest"] == expected["loss_digest"], "a read-only dataset trains something else");
    // Other partitions have to be sorted first.
    let mut other = from_copy("refused", &[]);
    let at = other.iter().position(|word| word == "14").context("the number of partitions")?;
    other[at] = "10".into();
    let said = refusal(bench, &other, &["facts/derived", "Read-only"])?;
    Ok(Some(json!({ "said": said, "loss_digest": found["loss_digest"] })))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    train::graph(bench, 100_000, 64)?;
    link::facts(bench, 20_000, 200_000)?;
    let size = KillSize { epochs: "4", training: 25, sorting: 50, safe_point: "1MiB" };
    let found = killed(bench, size, 9)?;
    let seen = |at: usize, what: &str| number(&found["sorting"][at], what);
    ensure!(seen(0, "while_features_were_sorted")? > 0.0, "no kill was during a sort of features");
    ensure!(
        seen(0, "after_a_safe_point")? > 0.0 && seen(1, "while_edges_were_sorted")? > 0.0,
        "no kill was after a safe point of a sort: {found:#}"
    );
    ensure!(
        number(&found["training"], "while_state_was_written")? > 0.0,
        "no kill was while partitions were written: {found:#}"
    );
    let (full_disk, read_only) = (full_disk(bench, "2")?, read_only_dataset(bench, "2")?);
    Ok(json!({ "killed": found, "full_disk": full_disk, "read_only_dataset": read_only }))
}
