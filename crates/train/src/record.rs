//! The run directory: everything about a run, in files that people and programs read.
//!
//! `config.json` has the resolved configuration, `environment.json` where it ran, `metrics.jsonl` one line per batch
//! and per epoch, `summary.json` the result, `best.safetensors` and `last.safetensors` the weights, and
//! `checkpoint.safetensors` what a resumed run needs.

use crate::checkpoint::write_atomically;
use crate::{Metrics, Result, RunConfig, TrainError};
use esker_fetch::pipeline::StageTimes;
use esker_strategies::{EvaluationCounters, MemoryTable, SavedWork};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The directory of the state of a source.
pub(crate) const STATE: &str = "state";
const CONFIG: &str = "config.json";
const ENVIRONMENT: &str = "environment.json";
const LOCK: &str = "lock";

/// A batch in `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchRecord {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The batch in its epoch, from 0.
    pub batch: u64,
    /// Its loss. `None` if no seed node had a label.
    pub loss: Option<f64>,
    /// The learning rate.
    pub lr: f64,
}

/// An epoch in `metrics.jsonl` and `summary.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EpochRecord {
    /// The epoch, from 0.
    pub epoch: u64,
    /// Wall time of its batches, without evaluation.
    pub seconds: f64,
    /// Wall time of its evaluation.
    pub evaluation_seconds: f64,
    /// Number of batches.
    pub batches: u64,
    /// Redundancy ratio: nodes of all batches per training node (OUTRE).
    #[serde(default)]
    pub redundancy: f64,
    /// Mean loss of its batches.
    pub loss: f64,
    /// Validation, if it was due.
    pub valid: Option<Metrics>,
    /// Bytes read from disk for feature rows. For memory-mapped features, all that the kernel read.
    pub bytes_read: u64,
    /// Bytes written to disk for learned rows: partitions that left a buffer, and those of checkpoints.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_written: u64,
    /// Bytes read from disk for the edges between resident partitions.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub edge_bytes_read: u64,
    /// Bytes read from disk for samples and placements that were made before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sample_bytes_read: u64,
    /// Bytes that the kernel read from disks for this process, whatever for.
    #[serde(default)]
    pub disk_bytes_read: u64,
    /// Bytes of the feature rows that batches needed.
    pub bytes_useful: u64,
    /// Disk reads that we issued; 0 if the page cache reads.
    pub reads: u64,
    /// Share of rows found in each tier.
    pub hit_ratio: BTreeMap<String, f64>,
    /// How each stage spent its time.
    pub stages: Vec<StageTimes>,
    /// Seconds of each phase, if phases take turns: `inspect` (sampling and planning), `switch`, `main loop`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub phases: BTreeMap<String, f64>,
    /// Neighbours, if not all adjacency is in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(alias = "lists")]
    pub neighbours: Option<NeighbourRecord>,
    /// What a history of hidden rows was used for, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<HistoryRecord>,
}

/// The use of a history of hidden rows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HistoryRecord {
    /// Rows that were pulled instead of being computed.
    pub pulls: u64,
    /// Rows that were pushed.
    pub pushes: u64,
    /// Batches since a pulled row was pushed, on average.
    pub mean_age: f64,
    /// Pushed rows that replaced one.
    #[serde(default)]
    pub refreshed: u64,
    /// How far these moved, on average: the norm of the difference over that of the row before.
    #[serde(default)]
    pub mean_drift: f64,
    /// What pulls saved, in every sixteenth batch: rows, neighbours and computed rows with them and without.
    #[serde(default)]
    pub saved: SavedWork,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Statistics of sampling neighbours from disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NeighbourRecord {
    /// Share of requests for a node's neighbours that a cache served.
    pub hit_ratio: f64,
    /// Share of requests that the neighbours of the batch's group of partitions served.
    #[serde(default)]
    pub group_hit_ratio: f64,
    /// Disk reads for the others, and of groups.
    pub reads: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Those of them that are the neighbours of groups.
    #[serde(default)]
    pub group_bytes_read: u64,
}

/// Where the wall-clock time of a run went, in seconds. If it was resumed, of all its processes that wrote a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct WallClock {
    /// Opening the dataset, the device and the model.
    pub starting: f64,
    /// The strategy's work before training.
    pub preparing: f64,
    /// Training.
    pub epochs: f64,
    /// Validation after epochs.
    pub validation: f64,
    /// Evaluating the best model at the end.
    pub test: f64,
}

impl WallClock {
    /// A run that is open.
    pub(crate) fn opened(starting: Duration, preparing: Duration) -> WallClock {
        let (starting, preparing) = (starting.as_secs_f64(), preparing.as_secs_f64());
        WallClock { starting, preparing, ..WallClock::default() }
    }

    /// All of it.
    pub fn total(&self) -> f64 {
        self.starting + self.preparing + self.epochs + self.validation + self.test
    }
}

/// The result of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// A hash over the bits of every batch's loss, in order. Bit-identical runs have the same hash.
    pub loss_digest: String,
    /// The strategy.
    pub strategy: String,
    /// The training device.
    pub device: String,
    /// Number of distinct epochs, if later ones repeated them.
    #[serde(default)]
    pub epochs_sampled: Option<u64>,
    /// What the work before training stored on disk, if anything.
    #[serde(default)]
    pub prepared: Option<serde_json::Value>,
    /// Metrics of the best model on test nodes.
    pub test: Option<Metrics>,
    /// Metrics of the best model on validation nodes.
    pub valid: Option<Metrics>,
    /// The epoch of the best model.
    pub best_epoch: Option<u64>,
    /// Feature rows of sampled evaluations, test included, in the process that ended the run.
    #[serde(default)]
    pub evaluation: EvaluationCounters,
    /// Why it ended: all epochs are done, or no better model was found for a while.
    pub ended: String,
    /// The largest resident memory of the process itself, measured every few milliseconds.
    pub peak_host_bytes: u64,
    /// The largest resident memory including memory-mapped file pages, which belong to the page cache.
    pub peak_with_mapped_bytes: u64,
    /// The memory budget. A run that cannot keep to it is refused.
    pub budget_host_bytes: u64,
    /// The planned memory, line by line.
    pub memory: MemoryTable,
    /// The largest device memory in use, if the device has its own.
    pub peak_device_bytes: Option<u64>,
    /// The device memory budget.
    pub budget_device_bytes: Option<u64>,
    /// The planned device memory, line by line.
    pub device_memory: Option<MemoryTable>,
    /// How memory was divided between cached feature rows and a history, if that was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history_split: Option<crate::HistorySplit>,
    /// The order over partitions, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition_steps: Option<crate::StepsRecord>,
    /// Number of optimizer steps.
    pub steps: u64,
    /// Redundancy ratio: nodes of all batches of an epoch per training node, the mean over epochs (OUTRE).
    #[serde(default)]
    pub redundancy: Option<f64>,
    /// Wall time of all epochs, without interrupted parts.
    pub seconds: f64,
    /// Where the wall-clock time went.
    #[serde(default)]
    pub wall_seconds: WallClock,
    /// The epochs.
    pub epochs: Vec<EpochRecord>,
}

/// The directory of a run.
#[derive(Debug, Clone)]
pub struct RunDirectory {
    path: PathBuf,
    /// Directories that were created for it, the innermost first.
    made: Vec<PathBuf>,
}

impl RunDirectory {
    /// A directory for a new run. Fails if it has a run already. Writes nothing.
    pub(crate) fn create_checked(path: &Path) -> Result<RunDirectory> {
        let run = RunDirectory { path: path.to_path_buf(), made: Vec::new() };
        if path.join(esker_store::file::MANIFEST).exists() {
            return Err(TrainError::IsDataset { path: path.to_path_buf() });
        }
        if RunDirectory::holds_run(path) {
            return Err(TrainError::HoldsRun { path: path.to_path_buf() });
        }
        Ok(run)
    }

    /// Creates the directory of a new run. Fails if it has a run already.
    pub fn create(path: &Path, config: &RunConfig) -> Result<RunDirectory> {
        let mut run = RunDirectory::create_checked(path)?;
        let missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
        run.made = path.ancestors().take_while(missing).map(Path::to_path_buf).collect();
        fs::create_dir_all(path).map_err(TrainError::io(path))?;
        let environment = serde_json::json!({
            "esker": env!("CARGO_PKG_VERSION"),
            "cores": std::thread::available_parallelism().map_or(0, usize::from),
            "memory_bytes": esker_types::machine_memory_limit().bytes,
            "cpu": cpu(),
            "kernel": fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim(),
        });
        run.write_json(ENVIRONMENT, &environment)?;
        // The configuration comes last: a directory with it has a run.
        run.write_config(config)?;
        Ok(run)
    }

    /// Writes the configuration.
    pub(crate) fn write_config(&self, config: &RunConfig) -> Result<()> {
        self.write_json(CONFIG, config)
    }

    /// Whether the work before training is done. Until then a strategy may still choose its settings.
    pub fn has_begun(&self) -> bool {
        self.metrics_path().exists() || self.checkpoint_path().exists()
    }

    /// Removes what [`create`](RunDirectory::create) wrote, for a run that was refused. Other files stay.
    pub(crate) fn withdraw(self) {
        for name in [CONFIG, ENVIRONMENT, LOCK] {
            let _ = fs::remove_file(self.path.join(name));
        }
        let _ = fs::remove_dir(self.scratch_path());
        for folder in self.made {
            let _ = fs::remove_dir(folder);
        }
    }

    /// Whether a directory has a run.
    pub fn holds_run(path: &Path) -> bool {
        path.join(CONFIG).exists()
    }

    /// Opens a directory that has a run.
    pub fn open(path: &Path) -> Result<(RunDirectory, RunConfig)> {
        let run = RunDirectory { path: path.to_path_buf(), made: Vec::new() };
        let file = run.config_path();
        let bytes = fs::read(&file).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => TrainError::NoRun { path: path.to_path_buf() },
            _ => TrainError::Io { path: file.clone(), source },
        })?;
        let config = serde_json::from_slice(&bytes).map_err(TrainError::format(
            &file,
            "a run's configuration",
            "train again",
        ))?;
        Ok((run, config))
    }

    /// Locks the run against other training processes, and removes files that a killed inference left.
    pub(crate) fn lock(&self) -> Result<File> {
        let path = self.path.join(LOCK);
        let file = File::create(&path).map_err(TrainError::io(&path))?;
        if file.try_lock().is_err() {
            return Err(TrainError::Busy { path: self.path.clone() });
        }
        for entry in fs::read_dir(self.scratch_path()).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let process = name.trim_end_matches(".partial").rsplit('-').next().unwrap_or("").to_string();
            if name.ends_with(".partial") && !Path::new("/proc").join(process).exists() {
                let _ = fs::remove_file(entry.path()).or_else(|_| fs::remove_dir_all(entry.path()));
            }
        }
        Ok(file)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn config_path(&self) -> PathBuf {
        self.path.join(CONFIG)
    }

    fn metrics_path(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// The file with what a resumed run needs.
    pub fn checkpoint_path(&self) -> PathBuf {
        self.path.join("checkpoint.safetensors")
    }

    /// The file with the weights of the best model.
    pub fn best_path(&self) -> PathBuf {
        self.path.join("best.safetensors")
    }

    /// The file with the weights at the end.
    pub fn last_path(&self) -> PathBuf {
        self.path.join("last.safetensors")
    }

    /// The file with the result.
    pub fn summary_path(&self) -> PathBuf {
        self.path.join("summary.json")
    }

    /// The directory with the state of a source that a checkpoint refers to.
    pub fn state_path(&self) -> PathBuf {
        self.path.join(STATE)
    }

    /// The directory for hidden rows of whole-graph inference that do not fit in memory.
    pub fn scratch_path(&self) -> PathBuf {
        self.path.join("scratch")
    }

    /// The result, if the run has ended.
    pub fn summary(&self) -> Result<Option<Summary>> {
        let path = self.summary_path();
        if !path.exists() {
            return Ok(None);
        }
        let bytes = fs::read(&path).map_err(TrainError::io(&path))?;
        let summary = serde_json::from_slice(&bytes).map_err(TrainError::format(
            &path,
            "a run's summary",
            "train again",
        ))?;
        Ok(Some(summary))
    }

    /// Writes readable JSON to a file.
    pub fn write_json<T: Serialize>(&self, name: &str, value: &T) -> Result<()> {
        let path = self.path.join(name);
        let text = serde_json::to_string_pretty(value).map_err(TrainError::format(
            &path,
            "a value",
            "report this",
        ))?;
        write_atomically(&path, (text + "\n").as_bytes())
    }

    /// Opens the lines and keeps the first `bytes` bytes: those that a checkpoint knows.
    pub(crate) fn metrics(&self, bytes: u64) -> Result<MetricsWriter> {
        let path = self.metrics_path();
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let mut file = file.map_err(TrainError::io(&path))?;
        let found = file.metadata().map_err(TrainError::io(&path))?.len();
        if found < bytes {
            let expected = format!("{bytes} bytes at least, as the checkpoint says");
            return Err(TrainError::file(&path, expected, found, "train again with another --out"));
        }
        file.set_len(bytes).map_err(TrainError::io(&path))?;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0)).map_err(TrainError::io(&path))?;
        Ok(MetricsWriter { path, file: BufWriter::new(file), bytes })
    }
}

/// Appends lines.
pub(crate) struct MetricsWriter {
    path: PathBuf,
    file: BufWriter<File>,
    bytes: u64,
}

impl MetricsWriter {
    pub fn line<T: Serialize>(&mut self, kind: &str, value: &T) -> Result<()> {
        let mut value = serde_json::to_value(value)
            .map_err(|error| TrainError::file(&self.path, "a value", error, "report this"))?;
        value["kind"] = kind.into();
        let line = format!("{value}\n");
        self.bytes += line.len() as u64;
        self.file.write_all(line.as_bytes()).map_err(TrainError::io(&self.path))
    }

    /// Syncs the lines so far. Returns their bytes.
    pub fn sync(&mut self) -> Result<u64> {
        let done = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        done.map_err(TrainError::io(&self.path))?;
        Ok(self.bytes)
    }

    pub fn flush(&mut self) -> Result<()> {
        self.file.flush().map_err(TrainError::io(&self.path))
    }
}

/// The name of the CPU.
pub(crate) fn cpu() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split(':').nth(1)).unwrap_or("unknown").trim().to_string()
}
