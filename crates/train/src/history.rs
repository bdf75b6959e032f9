//! The history of hidden rows that a run trains with: its settings, and its nodes, which are frozen in the run's
//! directory. They belong to the job and not to the strategy, so that another strategy gives the same losses.

use crate::checkpoint::write_atomically;
use crate::task::Task;
use crate::{Learner, Plan, Result, RunConfig, RunDirectory, TrainError, adjacency};
use esker_fetch::pipeline::Permit;
use esker_nn::LinkMath;
use esker_nn::{Backend, HostRows};
use esker_sample::{NodeSet, Sample, Targets};
use esker_strategies::{
    Batch, Blocks, DeviceBlocks, Exchange, FixedRows, HistoryOutline, HistoryProfile, Input, Job,
    ProfiledSplit, RunPosition, choose_nodes,
};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of host memory that belong to a row of a history: its stamps.
const STAMP_BYTES: u64 = 12;
/// Batches with rows in memory, if memory allows.
const MOST_BATCHES: u64 = 3;
/// Steps that are timed. The first one allocates.
const TIMED_STEPS: usize = 3;
/// The file of how memory was divided.
const SPLIT: &str = "history.json";

/// Batches after which a row is too old, at most by default (the paper's).
pub const USUAL_STALENESS: u32 = 100;

/// The staleness for epochs of so many batches: a tenth of an epoch. The paper's 100 is about a twelfth on
/// ogbn-papers100M. Older rows cost accuracy.
pub fn usual_staleness(epoch_batches: u64) -> u32 {
    (epoch_batches / 10).clamp(2, USUAL_STALENESS as u64) as u32
}

/// A history of hidden rows: what enters the last layer for chosen nodes, pulled instead of being computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HistoryConfig {
    /// Number of nodes that have a row. `None` until it is chosen by what pays.
    pub rows: Option<u64>,
    /// A row is pulled while fewer batches than this have passed since it was pushed. 1 is no history.
    pub staleness: u32,
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
        HistoryConfig { rows: None, staleness: USUAL_STALENESS, nodes: None, from: None }
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
        Ok(())
    }

    /// The size of the history on a graph of so many nodes, with so many features.
    pub(crate) fn history_outline(&self, nodes: u64, dim: usize) -> Option<HistoryOutline> {
        let history = self.active_history()?;
        let layer = self.model.layers - 1;
        let columns = self.model.widths(layer, dim, 0).0;
        // Until the number is chosen, what belongs to any history.
        let rows = history.rows.unwrap_or(1).min(nodes).min(u32::MAX as u64);
        Some(HistoryOutline { rows, staleness: history.staleness, layer, columns })
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

/// How memory was divided between cached feature rows and a history.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HistorySplit {
    /// The share of the history.
    pub share: f64,
    /// Rows of the history.
    pub history_rows: u64,
    /// Feature rows that fit into the rest.
    pub cached_rows: u64,
    /// Seconds that an epoch should take.
    pub predicted_seconds: f64,
    /// Measured: seconds to read a feature row.
    pub row_seconds: f64,
    /// Measured: seconds to sample a neighbour.
    pub edge_seconds: f64,
    /// Measured: seconds to compute a hidden row, its gradient included.
    pub computed_seconds: f64,
    /// Sampling a neighbour in terms of reading a row.
    pub beta: f64,
}

impl HistorySplit {
    /// A readable description.
    pub fn note(&self) -> String {
        format!(
            "history: {:.0}% of the memory for rows, an epoch should take {:.2} s (a row {:.1} us, a neighbour {:.3} us, beta {:.4}, a hidden row {:.2} us)",
            self.share * 100.0,
            self.predicted_seconds,
            self.row_seconds * 1e6,
            self.edge_seconds * 1e6,
            self.beta,
            self.computed_seconds * 1e6
        )
    }
}

/// What a choice is made with.
pub(crate) struct Choosing<'a, B: Backend> {
    pub backend: &'a B,
    pub task: &'a Task,
    pub plan: &'a Plan,
    /// Columns of features.
    pub dim: usize,
}

impl<B: LinkMath> Choosing<'_, B> {
    /// Samples an epoch without a history, measures what work takes, and divides the memory that is left for caches. If
    /// the device has its own memory, the history gets as much of that as pays.
    pub fn choose(&self, config: &mut RunConfig, job: &mut Job) -> Result<HistorySplit> {
        let Some(history) = job.outline.history else { unreachable!("a history is chosen if there is one") };
        let mut profile = HistoryProfile::sample(job, history.staleness)?;
        profile.seconds.computed = self.computed_seconds(config, job, &profile.first)?;
        let row_bytes = history.columns as u64 * 4 + STAMP_BYTES;
        let ProfiledSplit { split, nodes, seconds } = match self.backend.in_host_memory() {
            true => {
                // Prefetched batches come before cached rows, as long as they leave a quarter of the memory.
                let batch_bytes = job.most_nodes().saturating_mul(job.dim() * 4).max(1);
                let batches = (self.plan.strategy_bytes / 4 * 3 / batch_bytes).clamp(1, MOST_BATCHES);
                let left = self.plan.caches_bytes.saturating_sub((batches - 1) * batch_bytes);
                profile.split(job, left, row_bytes)
            }
            // Rows that host memory caches are no alternative.
            false => profile.split_beside(self.plan.whole_bytes.device / 2, row_bytes),
        };
        job.outline.history = config.take_history(&nodes, job.dataset.manifest().nodes.count, self.dim);
        job.history = job.outline.history.map(|_| Arc::new(nodes));
        Ok(HistorySplit {
            share: split.share,
            history_rows: split.history_rows,
            cached_rows: split.cached_rows,
            predicted_seconds: split.seconds,
            row_seconds: seconds.row,
            edge_seconds: seconds.edge,
            computed_seconds: seconds.computed,
            beta: seconds.beta(),
        })
    }

    /// Seconds to compute a hidden row: of a step on the first batch, with a model that is then dropped.
    fn computed_seconds(&self, config: &RunConfig, job: &Job, sample: &Sample) -> Result<f64> {
        let (backend, task) = (self.backend, Box::new(self.task.clone()));
        let mut learner = Learner::new(backend.clone(), config, self.dim, task, job.pool.clone())?;
        let views: Vec<_> = (0..sample.layers()).map(|layer| sample.layer(layer)).collect();
        let computed: usize = views.iter().map(|view| view.outputs.len()).sum();
        let first = views.last().map_or(0, |view| view.outputs.start);
        let mut least = f64::INFINITY;
        for _ in 0..TIMED_STEPS {
            let graphs =
                learner.compute(|| views.iter().map(|view| backend.graph(&adjacency(view))).collect());
            let seeds = sample.seeds.iter().map(|seed| sample.node_ids[seed.index()]).collect();
            let seed_rows = sample.seeds.iter().map(|seed| seed.0 - first).collect();
            let blocks = DeviceBlocks { graphs, edges: sample.edge_count(), seeds, seed_rows };
            let mut rows = backend.host_rows(sample.node_ids.len(), self.dim);
            rows.values_mut().fill(0.5);
            let batch = Batch {
                at: RunPosition::START,
                blocks: Blocks::Device(blocks),
                input: Input::fixed(FixedRows::Host(rows)),
                targets: Targets::Nodes,
                exchange: Exchange::none(),
                permit: Permit::unlimited(),
            };
            let started = Instant::now();
            let (step, _) = learner.step(batch, config.lr)?;
            step.wait()?;
            least = least.min(started.elapsed().as_secs_f64());
        }
        Ok(least / computed.max(1) as f64)
    }
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
