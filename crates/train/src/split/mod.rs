//! How memory is divided between cached feature rows and a history of hidden rows (OUTRE, sections 5.2 and 5.3): what
//! work takes is measured on some batches (`trial.rs`), an epoch is profiled, sums over its counts give a share to start
//! from, and the shares around it are replayed. What was found is kept in the dataset (`stored.rs`).

mod stored;
mod trial;

use crate::history::STAMP_BYTES;
use crate::open::CheckedDataset;
use crate::task::Task;
use crate::{Plan, Result, RunConfig, TrainError};
use esker_nn::Backend;
use esker_plan::{CacheSplit, EpochWork, WorkSeconds, best_replayed, best_split};
use esker_sample::NodeSet;
use esker_strategies::{DividedMemory, HistoryOutline, HistoryProfile, Job, StrategyError};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use stored::{SplitRequest, SplitStore};
use trial::Trial;

/// Batches with rows in memory, if memory allows.
const MOST_BATCHES: u64 = 3;

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
    /// The same without a history.
    #[serde(default)]
    pub predicted_seconds_without: f64,
    /// Measured: seconds to read a feature row.
    pub row_seconds: f64,
    /// Measured: seconds to sample a neighbour.
    pub edge_seconds: f64,
    /// Measured: seconds to compute a hidden row of the first layer, its gradient included.
    pub computed_seconds: f64,
    /// Sampling a neighbour in terms of reading a row.
    pub beta: f64,
    /// What an epoch was found to do, and what work takes.
    #[serde(default)]
    pub work: EpochWork,
    /// See above.
    #[serde(default)]
    pub seconds: WorkSeconds,
    /// Whether it was found before, in the dataset.
    #[serde(default)]
    pub is_reused: bool,
    /// Whether only what work takes was found there: of a job that differs in its history alone.
    #[serde(default)]
    pub seconds_are_reused: bool,
}

impl HistorySplit {
    fn new(split: &CacheSplit, without: f64, work: EpochWork, seconds: WorkSeconds) -> HistorySplit {
        HistorySplit {
            share: split.share(),
            history_rows: split.history_rows,
            cached_rows: split.cached_rows,
            predicted_seconds: split.seconds,
            predicted_seconds_without: without,
            row_seconds: seconds.row,
            edge_seconds: seconds.edge,
            computed_seconds: seconds.computed,
            beta: seconds.beta(),
            work,
            seconds,
            is_reused: false,
            seconds_are_reused: false,
        }
    }

    /// A readable description.
    pub fn note(&self) -> String {
        let found = match (self.is_reused, self.seconds_are_reused) {
            (true, _) => "; found in the dataset",
            (false, true) => "; what work takes was measured for another history, and found in the dataset",
            (false, false) => "",
        };
        format!(
            "history: {:.0}% of the memory for rows, an epoch should take {:.2} s, {:.2} s without one (a row {:.1} us, a neighbour {:.3} us, beta {:.4}, a hidden row {:.2} us){}",
            self.share * 100.0,
            self.predicted_seconds,
            self.predicted_seconds_without,
            self.row_seconds * 1e6,
            self.edge_seconds * 1e6,
            self.beta,
            self.computed_seconds * 1e6,
            found
        )
    }
}

/// Fits a run into its memory.
pub(crate) type Planning<'a> = &'a dyn Fn(&RunConfig, &mut Job) -> Result<Plan>;

/// What a choice is made with.
pub(crate) struct Choosing<'a, B: Backend> {
    backend: &'a B,
    task: &'a Task,
    plan: &'a Plan,
    planned: Planning<'a>,
    data: &'a CheckedDataset,
}

impl<'a, B: Backend> Choosing<'a, B> {
    pub fn new(
        backend: &'a B,
        task: &'a Task,
        plan: &'a Plan,
        planned: Planning<'a>,
        data: &'a CheckedDataset,
    ) -> Choosing<'a, B> {
        Choosing { backend, task, plan, planned, data }
    }
}

impl<B: Backend + Clone + 'static> Choosing<'_, B> {
    /// Divides the memory that is left for caches. If the device has its own memory, the history gets as much of that
    /// as pays.
    pub fn choose(&self, config: &mut RunConfig, job: &mut Job) -> Result<HistorySplit> {
        let store = SplitStore::new(&job.dataset, SplitRequest::of(config, job, self.plan));
        let fits = |nodes: &NodeSet| {
            let mut config = config.clone();
            let mut job = self.with_history(&mut config, job, nodes.clone());
            (self.planned)(&config, &mut job).is_ok()
        };
        let (split, nodes) = match store.find().filter(|(_, nodes)| fits(nodes)) {
            Some(found) => found,
            None => self.find(config, job, &store)?,
        };
        *job = self.with_history(config, job, nodes);
        Ok(split)
    }

    /// The job with a history of these nodes, or without one if there are none. The configuration then names them.
    fn with_history(&self, config: &mut RunConfig, job: &Job, nodes: NodeSet) -> Job {
        let mut job = job.clone();
        job.outline.history = config.take_history(&nodes, job.dataset.manifest().nodes.count, self.data.dim);
        job.history = job.outline.history.map(|_| Arc::new(nodes));
        job
    }

    /// Measures, profiles and replays.
    fn find(&self, config: &RunConfig, job: &Job, store: &SplitStore<'_>) -> Result<(HistorySplit, NodeSet)> {
        let Some(history) = job.outline.history else { unreachable!("a history is chosen if there is one") };
        let weights = self.layer_weights(config);
        let measured = store.seconds();
        let seconds = match measured {
            Some(seconds) => seconds,
            None => {
                if self.backend.in_host_memory() {
                    self.backend.set_reuse_bytes(self.plan.reuse_bytes);
                }
                let trial =
                    Trial { backend: self.backend, task: self.task, dim: self.data.dim, weights: &weights };
                let seconds = trial.measure(config, job)?;
                self.kept(job, store.keep_seconds(&seconds))?;
                seconds
            }
        };
        // Its batches are gone, and profiling gets their memory.
        self.backend.release_free();
        esker_io::trim_freed_memory();
        let profile = HistoryProfile::sample(job, history.staleness, weights)?;
        let (all, order) = profile.splits(job, self.divided(job, &history), &seconds);
        let (replays, mut works) = (store.replays(), Vec::new());
        let best = best_replayed(&all, best_split(&all), |split| {
            let work = match replays.done(split.step) {
                Some(work) => work,
                None => {
                    let nodes = profile.chosen(&order[..split.history_rows as usize]);
                    let work = self.replay(config, job, &profile, nodes)?;
                    replays.record(split.step, &work);
                    work
                }
            };
            let found = work.map_or(f64::INFINITY, |work| seconds.epoch(&work));
            works.push((split.history_rows, work.unwrap_or_default(), found));
            Ok::<f64, TrainError>(found)
        })?;
        let of = |rows: u64| works.iter().find(|(of, ..)| *of == rows).copied().unwrap_or_default();
        let split = HistorySplit::new(&best, of(0).2, of(best.history_rows).1, seconds);
        let split = HistorySplit { seconds_are_reused: measured.is_some(), ..split };
        let nodes = profile.chosen(&order[..best.history_rows as usize]);
        self.kept(job, store.keep(replays, &split, &nodes))?;
        // Counts by node are gone, and training gets their memory.
        drop((profile, all, order));
        esker_io::trim_freed_memory();
        Ok((split, nodes))
    }

    /// What an epoch does with a history of these nodes; `None` if it does not fit.
    fn replay(
        &self,
        config: &RunConfig,
        job: &Job,
        profile: &HistoryProfile,
        nodes: NodeSet,
    ) -> Result<Option<EpochWork>> {
        let mut config = config.clone();
        let mut job = self.with_history(&mut config, job, nodes);
        let planned = (self.planned)(&config, &mut job);
        match planned.and_then(|_| Ok(profile.replay(&job)?)) {
            Ok(work) => Ok(Some(work)),
            Err(
                TrainError::Memory { .. }
                | TrainError::DeviceMemory { .. }
                | TrainError::Strategy(StrategyError::BatchMemory { .. } | StrategyError::Cache { .. }),
            ) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A dataset that cannot be written is an error only if nothing else is to be done.
    fn kept(&self, job: &Job, kept: Result<()>) -> Result<()> {
        match kept {
            Err(error) if !job.out_of_core.prepare_only => {
                job.progress.note(&format!("how memory is divided is not kept for later runs: {error}"));
                Ok(())
            }
            kept => kept,
        }
    }

    fn divided(&self, job: &Job, history: &HistoryOutline) -> DividedMemory {
        let history_row_bytes = (history.row_bytes() + STAMP_BYTES) * history.hops as u64;
        match self.backend.in_host_memory() {
            true => {
                // Prefetched batches come before cached rows, as long as they leave a quarter of the memory.
                let batch_bytes = job.most_nodes().saturating_mul(job.dim() * 4).max(1);
                let batches = (self.plan.strategy_bytes / 4 * 3 / batch_bytes).clamp(1, MOST_BATCHES);
                let bytes = self.plan.caches_bytes.saturating_sub((batches - 1) * batch_bytes);
                DividedMemory { bytes, history_row_bytes, has_rows: true }
            }
            // Rows that host memory caches are no alternative.
            false => {
                let bytes = self.plan.whole_bytes.device / 2;
                DividedMemory { bytes, history_row_bytes, has_rows: false }
            }
        }
    }

    /// What computing a row of each layer takes, in rows of the first: multiply-adds forwards and for both gradients. The
    /// first layer has no gradient of its input.
    fn layer_weights(&self, config: &RunConfig) -> Vec<f64> {
        let work = |layer: usize| {
            let (inputs, outputs) = config.model.widths(layer, self.data.dim, self.data.outputs);
            (inputs * outputs * if layer == 0 { 2 } else { 3 }) as f64
        };
        (0..config.model.layers).map(|layer| work(layer) / work(0).max(1.0)).collect()
    }
}
