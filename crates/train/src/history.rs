//! The history of hidden rows that a run trains with: its settings, and its nodes, which are frozen in the run's
//! directory. They belong to the job and not to the strategy, so that another strategy gives the same losses.

use crate::checkpoint::write_atomically;
use crate::{HistorySplit, Result, RunConfig, RunDirectory, TrainError};
use esker_sample::NodeSet;
use esker_strategies::{HistoryOutline, Job, choose_nodes};
use esker_types::Dtype;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of host memory that belong to a row of a history: its stamps.
pub(crate) const STAMP_BYTES: u64 = 12;
/// The file of how memory was divided.
const SPLIT: &str = "history.json";

/// Batches after which a row is too old, at most by default (the paper's).
pub const USUAL_STALENESS: u32 = 100;

/// Batches of an epoch from which on a history is kept by default. On graphs with fewer it costs more accuracy than is
/// worth its time (docs/strategies.md has figures).
pub const LEAST_HISTORY_BATCHES: u64 = 1000;

/// The staleness for epochs of so many batches: a hundredth of an epoch. The paper's 100 is about a twelfth on
/// ogbn-papers100M, which costs more accuracy than saves time (docs/strategies.md has figures).
pub fn usual_staleness(epoch_batches: u64) -> u32 {
    (epoch_batches / 100).clamp(2, USUAL_STALENESS as u64) as u32
}

/// Which nodes of a batch may be pulled: a node that is met at hop h is pulled as it enters layer L - h, of L layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "WrittenHop", into = "WrittenHop")]
pub enum HistoryHop {
    /// Neighbours of targets (the paper's).
    #[default]
    One,
    /// Their neighbours, too. Every chosen node has two rows.
    Two,
    /// Every hop whose nodes have hidden rows. Every chosen node has a row per hidden layer.
    All,
}

/// As files and flags have it.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum WrittenHop {
    Number(u32),
    Word(String),
}

impl TryFrom<WrittenHop> for HistoryHop {
    type Error = String;
    fn try_from(written: WrittenHop) -> Result<HistoryHop, String> {
        let word = match written {
            WrittenHop::Number(number) => number.to_string(),
            WrittenHop::Word(word) => word,
        };
        match word.as_str() {
            "1" => Ok(HistoryHop::One),
            "2" => Ok(HistoryHop::Two),
            "all" => Ok(HistoryHop::All),
            _ => Err(format!("`{word}` is not a hop of a history; write 1, 2 or all")),
        }
    }
}

impl From<HistoryHop> for WrittenHop {
    fn from(hop: HistoryHop) -> WrittenHop {
        match hop {
            HistoryHop::One => WrittenHop::Number(1),
            HistoryHop::Two => WrittenHop::Number(2),
            HistoryHop::All => WrittenHop::Word("all".to_string()),
        }
    }
}

impl HistoryHop {
    /// Number of hops with a model of so many layers.
    fn hops(self, layers: usize) -> usize {
        match self {
            HistoryHop::One => 1,
            HistoryHop::Two => 2,
            HistoryHop::All => layers.saturating_sub(1),
        }
    }

    fn is_one(&self) -> bool {
        *self == HistoryHop::One
    }
}

fn single() -> Dtype {
    Dtype::F32
}

fn is_single(dtype: &Dtype) -> bool {
    *dtype == Dtype::F32
}

/// A history of hidden rows: what enters the last layer for chosen nodes, pulled instead of being computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HistoryConfig {
    /// Number of nodes that have a row. `None` until it is chosen by what pays.
    pub rows: Option<u64>,
    /// A row is pulled while fewer batches than this have passed since it was pushed. 1 is no history.
    pub staleness: u32,
    /// Which nodes of a batch may be pulled.
    #[serde(default, skip_serializing_if = "HistoryHop::is_one")]
    pub hop: HistoryHop,
    /// How rows are stored: f32 or f16.
    #[serde(default = "single", skip_serializing_if = "is_single")]
    pub dtype: Dtype,
    /// A hash of the nodes, once they are chosen. A run continues only with the same.
    #[serde(default)]
    pub nodes: Option<String>,
    /// The directory of a run whose nodes are taken. Otherwise they are chosen.
    #[serde(skip)]
    pub from: Option<PathBuf>,
}

impl HistoryConfig {
    /// So many rows, with nodes that are to be chosen.
    pub fn new(rows: u64) -> HistoryConfig {
        HistoryConfig { rows: Some(rows), ..HistoryConfig::chosen() }
    }

    /// As many rows as pay.
    pub fn chosen() -> HistoryConfig {
        let (hop, dtype) = (HistoryHop::default(), single());
        HistoryConfig { rows: None, staleness: USUAL_STALENESS, hop, dtype, nodes: None, from: None }
    }

    /// The history of another run.
    pub fn of_run(run: &Path) -> Result<HistoryConfig> {
        let (directory, config) = RunDirectory::open(run)?;
        match config.history.filter(|history| history.nodes.is_some()) {
            Some(history) => Ok(HistoryConfig { from: Some(directory.path().to_path_buf()), ..history }),
            None => Err(TrainError::RunWithoutHistory { run: run.to_path_buf() }),
        }
    }

    /// Whether anything is ever pulled.
    pub fn is_active(&self) -> bool {
        self.rows != Some(0) && self.staleness > 1
    }
}

impl RunConfig {
    /// The history, if it is used.
    pub fn active_history(&self) -> Option<&HistoryConfig> {
        self.history.as_ref().filter(|history| history.is_active())
    }

    /// Whether it is yet to be chosen how many rows pay.
    pub(crate) fn chooses_history(&self) -> bool {
        self.active_history().is_some_and(|history| history.rows.is_none() && history.from.is_none())
    }

    /// Takes the nodes that were chosen. Returns the size of the history, if it has any.
    pub(crate) fn take_history(&mut self, nodes: &NodeSet, all: u64, dim: usize) -> Option<HistoryOutline> {
        if let Some(history) = &mut self.history {
            (history.rows, history.nodes) = (Some(nodes.count()), Some(nodes.digest()));
        }
        self.history_outline(all, dim)
    }

    /// Fails if the run cannot have its history.
    pub(crate) fn check_history(&self) -> Result<()> {
        if self.history.as_ref().is_some_and(|history| history.staleness == 0) {
            let allowed = "at least 1, which uses no history";
            return Err(TrainError::Setting { flag: "--staleness", found: 0.0, allowed });
        }
        if self.active_history().is_some() {
            if !self.strategy.keeps_history() {
                return Err(TrainError::NoHistory { strategy: self.strategy });
            }
            self.settings().check_pulls()?;
        }
        if let Some(history) = self.active_history() {
            if ![Dtype::F32, Dtype::F16].contains(&history.dtype) {
                return Err(TrainError::HistoryDtype { found: history.dtype });
            }
            if history.hop.hops(self.model.layers) >= self.model.layers {
                return Err(TrainError::HistoryHop { layers: self.model.layers });
            }
        }
        Ok(())
    }

    /// The size of the history on a graph of so many nodes, with so many features.
    pub(crate) fn history_outline(&self, nodes: u64, dim: usize) -> Option<HistoryOutline> {
        let history = self.active_history()?;
        let layer = self.model.layers - 1;
        let columns = self.model.widths(layer, dim, 0).0;
        let hops = history.hop.hops(self.model.layers);
        // Until the number is chosen, what belongs to any history.
        let rows = history.rows.unwrap_or(1).min(nodes).min(u32::MAX as u64 / hops as u64);
        let (staleness, dtype) = (history.staleness, history.dtype);
        Some(HistoryOutline { rows, staleness, layer, hops, columns, dtype, device_bytes: u64::MAX })
    }
}

/// The file of a run's nodes.
fn path(run: &Path) -> PathBuf {
    run.join("history.nodes")
}

/// Whether a run's nodes are stored.
pub(crate) fn is_stored(run: &Path) -> bool {
    path(run).exists()
}

fn load(run: &Path, nodes: u64) -> Result<NodeSet> {
    let path = path(run);
    let mut file = File::open(&path).map_err(TrainError::io(&path))?;
    let remedy = "take the nodes of another run with --history-set, or start the run again";
    NodeSet::read(&mut file, nodes).map_err(TrainError::format(&path, "a set of the graph's nodes", remedy))
}

/// Stores what a run's history is: its nodes, and how they were chosen.
pub(crate) fn store(
    directory: &RunDirectory,
    nodes: Option<&NodeSet>,
    split: Option<&HistorySplit>,
) -> Result<()> {
    let (path, mut bytes) = (path(directory.path()), Vec::new());
    split.map_or(Ok(()), |split| directory.write_json(SPLIT, split))?;
    let Some(nodes) = nodes else { return Ok(()) };
    nodes.write(&mut bytes).map_err(TrainError::io(&path))?;
    write_atomically(&path, &bytes)
}

/// How the memory of a run was divided, if it was chosen.
pub(crate) fn stored_split(run: &Path) -> Option<HistorySplit> {
    serde_json::from_slice(&std::fs::read(run.join(SPLIT)).ok()?).ok()
}

/// The nodes of a run's history, if they are not chosen by what pays: those of the run that it takes them from, or those
/// that are a neighbour most often. The configuration then names them.
pub(crate) fn find(config: &mut RunConfig, job: &Job) -> Result<Option<Arc<NodeSet>>> {
    let (Some(outline), Some(history)) = (job.outline.history, &mut config.history) else { return Ok(None) };
    let nodes = match &history.from {
        Some(run) => load(run, job.dataset.manifest().nodes.count)?,
        None => choose_nodes(job, outline.rows)?,
    };
    let found = nodes.digest();
    if nodes.count() > outline.rows || history.nodes.as_ref().is_some_and(|expected| *expected != found) {
        let run = history.from.clone().unwrap_or_default();
        let expected = history.nodes.clone().unwrap_or_default();
        return Err(TrainError::OtherHistory { run, expected, found });
    }
    history.nodes = Some(found);
    Ok(Some(Arc::new(nodes)))
}
