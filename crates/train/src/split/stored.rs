//! Measurements and divisions as derived data of the dataset: `derived/work-seconds-HASH` and `derived/history-split-HASH`.
//! docs/format.md has their bytes. Both are used again while everything that they depend on is the same. Finished replays
//! are in a journal, so that a killed process loses one at most.

use super::HistorySplit;
use crate::record::cpu;
use crate::{Plan, Result, RunConfig, TrainError};
use esker_plan::{EpochWork, WorkSeconds};
use esker_sample::NodeSet;
use esker_store::{ArrayWriter, Dataset, Derived, Journal, Staging};
use esker_strategies::{Job, StrategyError};
use esker_types::Dtype;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Kinds of derived data, and the version of both.
const SECONDS: &str = "work-seconds";
const SPLIT: &str = "history-split";
const VERSION: u32 = 2;
/// The array of nodes.
const NODES: &str = "nodes";
/// Bits of a size that count.
const ROUNDED_BITS: u32 = 4;
/// Characters of a hash in a name.
const HASH_CHARS: usize = 16;

/// What a division depends on.
pub(super) struct SplitRequest {
    /// What measured seconds depend on: the machine and its memory, too, because what is in memory takes less time.
    seconds: Value,
    /// What the division depends on in addition.
    split: Value,
}

impl SplitRequest {
    pub fn of(config: &RunConfig, job: &Job, plan: &Plan) -> SplitRequest {
        let files = &job.out_of_core;
        let seconds = json!({
            "version": VERSION, "strategy": config.strategy, "batches": job.batches.identity(),
            "settings": job.settings, "direction": job.direction, "model": config.model,
            "optimizer": config.optimizer, "threads": config.threads, "device": config.device,
            "precision": config.precision, "io_block": config.io_block, "machine": cpu(),
            "memory": rounded(config.memory), "strategy_bytes": rounded(plan.strategy_bytes),
            "gpu_memory": config.gpu_memory.map(rounded), "cache": files.cache,
            "neighbour_policy": files.neighbour_policy, "superbatch": config.superbatch,
            "feature_cache": config.feature_cache, "neighbour_cache": config.neighbour_cache,
            "disk_budget": config.disk_budget,
        });
        let history = job.outline.history;
        let split = json!({
            "seconds": seconds, "staleness": history.map(|history| history.staleness),
            "columns": history.map(|history| history.columns), "layer": history.map(|history| history.layer),
            "hops": history.map(|history| history.hops), "dtype": history.map(|history| history.dtype),
            "profiled_epoch": u64::from(job.epochs > 1), "epochs_sampled": job.epochs_sampled,
        });
        SplitRequest { seconds, split }
    }
}

/// A size without its small differences: the memory that a machine gives is not always the same.
fn rounded(bytes: u64) -> u64 {
    let low_bits = (u64::BITS - bytes.leading_zeros()).saturating_sub(ROUNDED_BITS);
    bytes >> low_bits << low_bits
}

/// Where measurements and divisions are kept.
pub(super) struct SplitStore<'a> {
    dataset: &'a Arc<Dataset>,
    request: SplitRequest,
}

/// Replays that are done, in a directory that becomes the derived data.
pub(super) struct Replays(Option<(Staging, Journal)>);

/// A finished replay. `None` is one that does not fit memory.
#[derive(serde::Serialize, Deserialize)]
struct Replayed {
    work: Option<EpochWork>,
}

fn step_name(step: u64) -> String {
    format!("replay-{step}")
}

impl Replays {
    /// What a replay of this step found.
    pub fn done(&self, step: u64) -> Option<Option<EpochWork>> {
        let (_, journal) = self.0.as_ref()?;
        journal.done::<Replayed>(&step_name(step)).map(|found| found.work)
    }

    /// Remembers a replay. Without a journal, or if that fails, a killed process does it again.
    pub fn record(&self, step: u64, work: &Option<EpochWork>) {
        if let Some((_, journal)) = &self.0 {
            let _ = journal.record(&step_name(step), &Replayed { work: *work });
        }
    }
}

impl<'a> SplitStore<'a> {
    pub fn new(dataset: &'a Arc<Dataset>, request: SplitRequest) -> SplitStore<'a> {
        SplitStore { dataset, request }
    }

    fn name(&self, kind: &str, request: &Value) -> String {
        let hash = self.dataset.inputs_of(kind, request);
        format!("{kind}-{}", &hash[..HASH_CHARS])
    }

    /// Derived data of this kind that was made from this request, with what it has beside it.
    fn open(&self, kind: &str, request: &Value) -> Option<Derived> {
        let path = self.dataset.derived_path(&self.name(kind, request));
        let found = self.dataset.open_derived(&path).ok()?;
        let manifest = &found.manifest;
        (manifest.kind == kind
            && manifest.parameters["request"] == *request
            && self.dataset.is_current(&found))
        .then_some(found)
    }

    /// Seconds that were measured before.
    pub fn seconds(&self) -> Option<WorkSeconds> {
        let found = self.open(SECONDS, &self.request.seconds)?;
        serde_json::from_value(found.manifest.parameters["seconds"].clone()).ok()
    }

    pub fn keep_seconds(&self, seconds: &WorkSeconds) -> Result<()> {
        let staging = self.dataset.derive(&self.name(SECONDS, &self.request.seconds)).map_err(stored)?;
        let parameters = json!({ "request": self.request.seconds, "seconds": seconds });
        staging.publish_derived(self.dataset, SECONDS, parameters, vec![]).map_err(stored)
    }

    /// The division that was found before, with its nodes.
    pub fn find(&self) -> Option<(HistorySplit, NodeSet)> {
        let found = self.open(SPLIT, &self.request.split)?;
        let split: HistorySplit = serde_json::from_value(found.manifest.parameters["split"].clone()).ok()?;
        let array = found.arrays.iter().find(|array| array.entry().name == NODES)?;
        let bytes: Vec<u8> = array.read_whole().ok()?;
        // The set has a checksum of its own.
        let nodes = NodeSet::read(&mut &bytes[..], self.dataset.manifest().nodes.count).ok()?;
        (nodes.count() == split.history_rows).then_some((HistorySplit { is_reused: true, ..split }, nodes))
    }

    /// Replays of an earlier process, and room for more. None are kept if the dataset cannot be written.
    pub fn replays(&self) -> Replays {
        let opened = || {
            let staging = self.dataset.derive(&self.name(SPLIT, &self.request.split))?;
            let (journal, _) = staging.journal(&self.dataset.inputs_of(SPLIT, &self.request.split))?;
            Ok::<_, esker_store::StoreError>((staging, journal))
        };
        Replays(opened().ok())
    }

    /// Stores a division and its nodes.
    pub fn keep(&self, replays: Replays, split: &HistorySplit, nodes: &NodeSet) -> Result<()> {
        let staging = match replays.0 {
            Some((staging, _)) => staging,
            None => self.dataset.derive(&self.name(SPLIT, &self.request.split)).map_err(stored)?,
        };
        let mut bytes = Vec::new();
        nodes.write(&mut bytes).map_err(TrainError::io(staging.directory()))?;
        let mut writer = ArrayWriter::create(staging.directory(), NODES, Dtype::U8, 1).map_err(stored)?;
        writer.write(&bytes).map_err(stored)?;
        let files = vec![writer.finish().map_err(stored)?];
        let parameters = json!({ "request": self.request.split, "split": split });
        staging.publish_derived(self.dataset, SPLIT, parameters, files).map_err(stored)
    }
}

fn stored(error: esker_store::StoreError) -> TrainError {
    StrategyError::from(error).into()
}
