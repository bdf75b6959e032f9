//! Disks that fail while diskgnn trains: packed rows of an evaluation that cannot be read, a disk that is full while they are
//! packed or while a checkpoint is written. The error names the file, the last checkpoint is what it was, and the resumed
//! run ends as one that nothing disturbed.

use crate::common::{Bench, StopAfter, finished, result};
use esker_io::{Access, Disk, Faults, Files, IoError, Layout, Options, SimulatedDisk, ThisMachine};
use esker_nn::CpuBackend;
use esker_store::Dataset;
use esker_strategies::{
    BatchSource, CheckpointReader, Inference, Job, JobOutline, Needs, Prepared, RunPosition, Strategy,
    StrategyError, StrategyKind,
};
use esker_train::{Checkpoint, Outcome, RunConfig, RunControl, Trainer};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// This machine, but for some files.
struct PartlySimulated {
    simulated: SimulatedDisk,
    paths: Vec<PathBuf>,
}

impl PartlySimulated {
    fn new(paths: Vec<PathBuf>) -> PartlySimulated {
        PartlySimulated { simulated: SimulatedDisk::new(Faults::default()), paths }
    }

    /// Nothing of these files can be read any more.
    fn damage(&self) {
        self.paths.iter().for_each(|path| self.simulated.damage(path, 0..u64::MAX));
    }
}

impl Disk for PartlySimulated {
    fn open(&self, layouts: &[Layout], access: Access, options: &Options) -> Result<Files, IoError> {
        let parts: Vec<&PathBuf> = layouts.iter().flat_map(|layout| layout.parts()).collect();
        if !parts.iter().any(|part| self.paths.contains(part)) {
            return ThisMachine.open(layouts, access, options);
        }
        // Files that are opened together are on one disk.
        for part in parts.into_iter().filter(|part| self.simulated.get(part).is_none()) {
            self.simulated.put(part, fs::read(part).unwrap());
        }
        self.simulated.open(layouts, access, options)
    }

    fn create(&self, layout: &Layout, bytes: u64) -> Result<(), IoError> {
        ThisMachine.create(layout, bytes)
    }
}

/// DiskGNN on a disk that fails once everything is opened.
struct OnBadDisk {
    inner: Box<dyn Strategy<CpuBackend>>,
    disk: Arc<PartlySimulated>,
}

impl OnBadDisk {
    fn moved(&self, job: &Job) -> Job {
        let mut job = job.clone();
        let dataset = Dataset::open_on(job.dataset.directory(), self.disk.clone()).unwrap();
        job.outline.dataset = Arc::new(dataset);
        job
    }
}

impl Strategy<CpuBackend> for OnBadDisk {
    fn needs(&self, job: &JobOutline) -> Result<Needs, StrategyError> {
        self.inner.needs(job)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared, StrategyError> {
        let job = self.moved(job);
        self.inner.prepare(&job)
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<CpuBackend>>, StrategyError> {
        self.disk.damage();
        let job = self.moved(job);
        self.inner.batches(&job, from, state)
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<CpuBackend>>, StrategyError> {
        let job = self.moved(job);
        self.inner.inference(&job, over, state)
    }
}

/// Nothing is cached, so that evaluations read packed rows. A checkpoint after every batch.
fn config(bench: &Bench) -> RunConfig {
    RunConfig {
        strategy: StrategyKind::DiskGnn,
        feature_cache: Some(0),
        checkpoint_batches: 1,
        epochs: 2,
        ..bench.config()
    }
}

type Ended = (String, Option<f64>, Option<f64>, Checkpoint);

fn ended(trainer: Trainer<CpuBackend>, out: &Path) -> Ended {
    result(&finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap()), out)
}

fn undisturbed(bench: &Bench) -> Ended {
    let out = bench.path("whole");
    ended(Trainer::create(CpuBackend::new(), config(bench), &out).unwrap(), &out)
}

fn checkpoint_of(out: &Path) -> PathBuf {
    out.join("checkpoint.safetensors")
}

/// Directories of packed evaluations inside those of packed training rows below a directory.
fn evaluations(inside: &Path) -> Vec<PathBuf> {
    let children = |path: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(path).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let all = children(inside).into_iter().flat_map(|path| [children(&path), vec![path]].concat());
    let mut found: Vec<PathBuf> = all.filter(|path| name(path).starts_with("evaluation-")).collect();
    found.sort();
    found
}

#[test]
fn packed_rows_of_an_evaluation_that_cannot_be_read_are_named_and_the_run_resumes() {
    let bench = Bench::new();
    let expected = undisturbed(&bench);
    let packed = evaluations(&bench.path("g/derived"));
    assert_eq!(packed.len(), 2, "of validation and test: {packed:?}");
    let mut steps = Vec::new();
    for (number, directory) in packed.iter().enumerate() {
        let (path, out) = (directory.join("rows.bin"), bench.path(&format!("bad-{number}")));
        let disk = Arc::new(PartlySimulated::new(vec![path.clone()]));
        let strategy = Box::new(OnBadDisk { inner: StrategyKind::DiskGnn.build(CpuBackend::new()), disk });
        let control = RunControl::default();
        let run = Trainer::create_with(CpuBackend::new(), config(&bench), &out, control, strategy);
        let said = run.unwrap().run(&mut StopAfter(u64::MAX)).err().unwrap().to_string();
        assert!(said.contains(&path.display().to_string()) && said.contains("os error 5"), "{said}");
        steps.push(Checkpoint::read(&checkpoint_of(&out)).unwrap().state["steps"].as_u64().unwrap());
        let resumed = Trainer::resume(CpuBackend::new(), config(&bench), &out).unwrap();
        assert!(ended(resumed, &out) == expected, "{}", path.display());
    }
    steps.sort();
    // The one fails in or before the first validation, the other after both epochs of six batches.
    assert!(steps[0] >= 1 && steps[0] <= 6 && steps[1] > 6, "{steps:?}");
}

/// A small disk, unmounted at the end.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(path: PathBuf) -> Option<SmallDisk> {
        fs::create_dir_all(&path).unwrap();
        let words = ["-t", "tmpfs", "-o", "size=48m", "esker-test"];
        let mounted = Command::new("mount").args(words).arg(&path).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(SmallDisk(path))
    }

    /// A file takes all space but so many bytes.
    fn fill(&self, left: u64) {
        let mut ballast = File::create(self.0.join("ballast")).unwrap();
        let mut bytes = 0;
        while ballast.write_all(&[1; 4096]).is_ok() {
            bytes += 4096;
        }
        ballast.set_len(bytes - left).unwrap();
    }

    fn empty(&self) {
        fs::remove_file(self.0.join("ballast")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Trains four batches, fills the disk and resumes: refused with a name. With free space it ends as `expected`.
fn check_full(
    disk: &SmallDisk,
    left: u64,
    config: &RunConfig,
    out: &Path,
    full: impl Fn(),
    expected: &Ended,
) -> String {
    let trainer = Trainer::create(CpuBackend::new(), config.clone(), out).unwrap();
    assert!(matches!(trainer.run(&mut StopAfter(4)).unwrap(), Outcome::Stopped(_)));
    let before = fs::read(checkpoint_of(out)).unwrap();
    full();
    disk.fill(left);
    let resumed = Trainer::resume(CpuBackend::new(), config.clone(), out);
    let said = resumed.and_then(|trainer| trainer.run(&mut StopAfter(u64::MAX))).expect_err("a full disk");
    assert!(fs::read(checkpoint_of(out)).unwrap() == before, "the checkpoint is what it was");
    disk.empty();
    let resumed = Trainer::resume(CpuBackend::new(), config.clone(), out).unwrap();
    assert!(ended(resumed, out) == *expected);
    said.to_string()
}

#[test]
fn a_disk_that_is_full_while_rows_of_an_evaluation_are_packed_is_named_and_the_run_resumes() {
    let bench = Bench::new();
    let Some(disk) = SmallDisk::mount(bench.path("small")) else {
        return println!("skipped: no small disk can be mounted here");
    };
    let expected = undisturbed(&bench);
    let packed = disk.0.join("packed");
    let config = RunConfig { prepared: Some(packed.clone()), disk_budget: Some(10 << 30), ..config(&bench) };
    let remove = || {
        let found = evaluations(&disk.0);
        assert_eq!(found.len(), 2, "{found:?}");
        found.iter().for_each(|path| fs::remove_dir_all(path).unwrap());
    };
    let said = check_full(&disk, 16 << 10, &config, &bench.path("out"), remove, &expected);
    let folder = packed.join("evaluation-").display().to_string();
    assert!(said.contains(&folder) && said.to_lowercase().contains("no space left"), "{said}");
}

#[test]
fn a_disk_that_is_full_while_a_checkpoint_is_written_is_named_and_the_run_resumes() {
    let bench = Bench::new();
    let Some(disk) = SmallDisk::mount(bench.path("small")) else {
        return println!("skipped: no small disk can be mounted here");
    };
    let expected = undisturbed(&bench);
    let out = disk.0.join("run");
    // Room for lines of metrics, not for weights.
    let said = check_full(&disk, 8 << 10, &config(&bench), &out, || (), &expected);
    let named = said.contains("checkpoint.safetensors") && said.contains(&out.display().to_string());
    assert!(named && said.to_lowercase().contains("no space left"), "{said}");
}
