//! What earlier versions wrote is opened by this one, or refused by name. `fixtures/v0.1` holds what version 0.1 wrote: a dataset `g`
//! with packed rows, a trace, a run that ended and one that was stopped. A version that changes a format keeps the fixture, says here
//! what it refuses and with which words, and adds a folder of its own with `cargo xtask fixtures`.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_nn::{CpuBackend, ModelConfig};
use esker_sample::trace::TraceReader;
use esker_sample::{Fanout, Sample};
use esker_store::Dataset;
use esker_train::{BatchProgress, EpochRecord, Outcome, RunConfig, Trainer, Watcher};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What shapes batches; the same for all.
const BATCHES: &str =
    "--fanout 3,2 --batch 10 --epochs 2 --hidden 4 --memory 256MiB --threads 1 --device cpu";
/// Few rows wait in memory, so that the others are packed.
const PACKED: &str = "--strategy diskgnn --feature-cache 160";

fn fixtures(version: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(version)
}

fn esker(directory: &Path, words: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_esker"));
    command.args(words.split_whitespace()).current_dir(directory).output().unwrap()
}

fn json(directory: &Path, words: &str) -> Value {
    let output = esker(directory, &format!("{words} --json"));
    assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, target) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        match path.is_dir() {
            true => copy(&path, &target),
            false => drop(fs::copy(&path, &target).unwrap()),
        }
    }
}

/// A copy of a fixture, to work in: runs name their dataset relative to it.
fn copied(version: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    copy(&fixtures(version), directory.path());
    directory
}

#[test]
fn datasets_of_version_0_1_open_and_are_whole() {
    let directory = copied("v0.1");
    let info = json(directory.path(), "info g");
    assert_eq!((&info["edges"], &info["feature_dim"]), (&207.into(), &4.into()), "{info}");
    assert!(info["derived"].as_array().unwrap().iter().all(|derived| derived["fresh"] == true), "{info}");
    json(directory.path(), "verify g");
}

#[test]
fn traces_of_version_0_1_are_read() {
    let trace = TraceReader::open(&fixtures("v0.1").join("trace")).unwrap();
    let (mut cursor, mut sample, mut batches) = (trace.forwards(), Sample::default(), 0);
    while cursor.next(&mut sample).unwrap().is_some() {
        assert!(sample.targets().len() == 10 && sample.edge_count() > 0);
        batches += 1;
    }
    assert_eq!(batches, 3);
}

/// The stages of preparing, apart from reading and sampling some batches for their size.
fn made(prepared: &Value) -> Vec<&str> {
    let names = prepared["stages"].as_array().unwrap().iter().map(|stage| stage["name"].as_str().unwrap());
    let opening = ["read labels", "load topology", "sample for sizes"];
    names.filter(|name| !opening.contains(name)).collect()
}

#[test]
fn packed_rows_of_version_0_1_are_found() {
    let directory = copied("v0.1");
    let found = json(directory.path(), &format!("prepare g {BATCHES} {PACKED} --eval none"));
    assert_eq!(made(&found), Vec::<&str>::new(), "nothing is sampled or packed anew");
    // That version packed no evaluations. They are added, and found the next time.
    json(directory.path(), &format!("prepare g {BATCHES} {PACKED}"));
    let found = json(directory.path(), &format!("prepare g {BATCHES} {PACKED}"));
    assert_eq!(made(&found), Vec::<&str>::new());
    let summary = json(directory.path(), &format!("train g {BATCHES} {PACKED} --out packed"));
    assert_eq!(
        summary["loss_digest"],
        json(directory.path(), &format!("train g {BATCHES} --out memory"))["loss_digest"]
    );
}

/// Records that are added have the format of those that are there, so packed rows that use them still can.
#[test]
fn samples_of_version_0_1_are_continued() {
    let directory = copied("v0.1");
    let more = BATCHES.replace("--epochs 2", "--epochs 3");
    let found = json(directory.path(), &format!("prepare g {more} {PACKED} --eval none"));
    assert_ne!(made(&found), Vec::<&str>::new(), "an epoch is sampled");
    let found = json(directory.path(), &format!("prepare g {BATCHES} {PACKED} --eval none"));
    assert_eq!(made(&found), Vec::<&str>::new(), "nothing is sampled or packed anew");
    let summary = json(directory.path(), &format!("train g {more} {PACKED} --eval none --out packed"));
    let memory = json(directory.path(), &format!("train g {more} --eval none --out memory"));
    assert_eq!(summary["loss_digest"], memory["loss_digest"]);
}

#[test]
fn runs_of_version_0_1_are_evaluated_and_predicted() {
    let directory = copied("v0.1");
    let text = fs::read(directory.path().join("run/summary.json")).unwrap();
    let summary: Value = serde_json::from_slice(&text).unwrap();
    let found = json(directory.path(), "eval run --device cpu");
    let loss = |metrics: &Value| metrics["loss"].as_f64().unwrap();
    // Another processor may round another way.
    let (found, expected) = (loss(&found["metrics"]), loss(&summary["test"]));
    assert!((found - expected).abs() < 1e-3 * expected, "{found} for {expected}");
    assert_eq!(json(directory.path(), "predict run --nodes all --device cpu --out p.npy")["nodes"], 60);
}

#[test]
fn runs_of_version_0_1_are_resumed() {
    let directory = copied("v0.1");
    let summary = json(directory.path(), "train g --out unfinished --resume");
    assert_eq!((&summary["steps"], summary["epochs"].as_array().unwrap().len()), (&6.into(), 2), "{summary}");
}

/// Stops after so many batches.
struct StopAfter(u64);

impl Watcher for StopAfter {
    fn batch(&mut self, _: &BatchProgress) {
        self.0 = self.0.saturating_sub(1);
    }
    fn stop(&self) -> bool {
        self.0 == 0
    }
    fn evaluation(&mut self, _: &str) {}
    fn epoch(&mut self, _: &EpochRecord, _: bool) {}
}

/// A run that was stopped in the middle of its second epoch.
fn make_unfinished(directory: &Path) {
    let dataset = Dataset::open(&directory.join("g")).unwrap();
    let fanout = vec![Fanout::AtMost(3), Fanout::AtMost(2)];
    let config = RunConfig {
        model: ModelConfig { layers: 2, hidden: 4, ..ModelConfig::default() },
        eval_fanout: fanout.clone(),
        fanout,
        batch: 10,
        epochs: 2,
        memory: 256 << 20,
        threads: 1,
        ..RunConfig::for_dataset(&dataset)
    };
    let trainer = Trainer::create(CpuBackend::new(), config, &directory.join("unfinished")).unwrap();
    assert!(matches!(trainer.run(&mut StopAfter(4)).unwrap(), Outcome::Stopped(_)));
}

#[test]
#[ignore = "writes into the checkout: `cargo xtask fixtures`"]
fn make_fixtures() {
    let version: Vec<&str> = env!("CARGO_PKG_VERSION").split('.').take(2).collect();
    let target = fixtures(&format!("v{}", version.join(".")));
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    json(
        at,
        "generate g --nodes 60 --degree 4 --dim 4 --classes 3 --train 0.5 --valid 0.2 --test 0.2 --seed 1",
    );
    json(at, "bench sample g --fanout 3,2 --batch 10 --batches 3 --threads 1 --trace trace");
    json(at, &format!("prepare g {BATCHES} {PACKED}"));
    json(at, &format!("train g {BATCHES} --out run"));
    make_unfinished(at);
    let here = at.canonicalize().unwrap().display().to_string();
    for run in ["run", "unfinished"] {
        let config = at.join(run).join("config.json");
        let text = fs::read_to_string(&config).unwrap().replace(&format!("{here}/g"), "g");
        fs::write(&config, text).unwrap();
        // Whose machine it was is nobody's business.
        fs::remove_file(at.join(run).join("environment.json")).unwrap();
    }
    let _ = fs::remove_dir_all(&target);
    copy(at, &target);
}
