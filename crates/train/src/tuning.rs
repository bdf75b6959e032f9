//! The numbers of partitions of a run with a partition buffer: chosen by memory and by what the disk reads at nearly its
//! full rate, unless they are given (Marius++ section 6). Everything else that takes memory is found by planning the run.

use crate::memory::Plan;
use crate::{OpenRun, OrderName, Result, RunConfig, RunControl, TrainError};
use esker_io::limit::smallest_fast_block;
use esker_nn::LinkMath;
use esker_plan::partition_orders::{BufferRequest, PartitionOrder, PartitionOrderKind, Tuning};
use esker_sample::{Direction, EdgeBuckets};
use esker_store::Dataset;
use esker_strategies::StrategyKind;
use esker_types::{ByteCount, Unit};
use std::time::Duration;

/// The smallest read has this share of the disk's rate.
const SHARE: f64 = 0.9;
/// Time for each size of reads.
const READING: Duration = Duration::from_millis(40);
/// Files that are too small to measure a disk by, and what is taken instead.
const LEAST_FILE_BYTES: u64 = 16 << 20;
const USUAL_READ_BYTES: u64 = 256 << 10;
/// Numbers of partitions that are planned at most: each plan says better what everything else takes.
const MOST_PLANS: usize = 8;

/// Numbers of partitions, and what they were chosen by.
#[derive(Debug, Clone, Copy)]
pub struct BufferChoice {
    /// What they were chosen by.
    pub request: BufferRequest,
    /// The numbers.
    pub tuning: Tuning,
}

impl BufferChoice {
    /// Why these numbers, line by line.
    pub fn reasons(&self) -> Vec<String> {
        self.tuning.reasons(&self.request)
    }

    /// What an epoch is expected to read and write, in a line.
    pub fn costs(&self) -> Option<String> {
        let order = PartitionOrder::new(self.tuning.kind, self.tuning.counts, 0, 0).ok()?;
        let cost = self.request.epoch_cost(&order);
        Some(format!(
            "an epoch: {} steps, {} swaps of partitions, {} of rows and {} of edges are read",
            cost.steps,
            cost.swaps,
            ByteCount(cost.row_bytes),
            ByteCount(cost.edge_bytes)
        ))
    }
}

/// Chooses the numbers of partitions of a run, if its strategy has a partition buffer and none are given. Fails if no
/// numbers fit its memory.
pub fn choose_buffer<B: LinkMath>(
    backend: &B,
    config: &mut RunConfig,
    control: &RunControl,
) -> Result<Option<BufferChoice>> {
    let (StrategyKind::Marius, None, Some(kind)) =
        (config.strategy, config.partition_counts, config.order.over_partitions())
    else {
        return Ok(None);
    };
    let dataset = Dataset::open(&config.dataset)?;
    control.progress.stage("measure reads of the disk", None, Unit::Count("reads"));
    let mut request = request(config, &dataset, kind)?;
    control.progress.finish();
    let mut search = BufferSearch { backend, config, control: control.clone() };
    // From all resident downwards: each plan says better what everything else takes.
    for _ in 0..MOST_PLANS {
        let Ok(tuning) = request.tune() else { break };
        match search.plan(&tuning) {
            Ok(_) => return Ok(Some(BufferChoice { request, tuning })),
            Err(error) => {
                let more = missing(&error).ok_or(error)?;
                let buffer = tuning.bytes.total() - tuning.bytes.working;
                let working = request.memory_bytes.saturating_add(more).saturating_sub(buffer);
                // More than before, so that it ends.
                request.working_bytes = working.max(request.working_bytes + (1 << 20));
            }
        }
    }
    // What a large buffer takes beside its rows may have said too much: the smallest one tells what there is for others.
    let smallest = request.smallest();
    let plan = search.plan(&smallest)?;
    let buffer = smallest.bytes.total() - smallest.bytes.working;
    request.working_bytes = plan.smallest_bytes.saturating_sub(buffer);
    if let Ok(tuning) = request.tune()
        && search.plan(&tuning).is_ok()
    {
        return Ok(Some(BufferChoice { request, tuning }));
    }
    search.set(&smallest);
    Ok(Some(BufferChoice { request, tuning: smallest }))
}

/// A run that is planned with one buffer after the other.
struct BufferSearch<'a, B> {
    backend: &'a B,
    config: &'a mut RunConfig,
    control: RunControl,
}

impl<B: LinkMath> BufferSearch<'_, B> {
    fn set(&mut self, tuning: &Tuning) {
        (self.config.partition_counts, self.config.order) = (Some(tuning.counts), order_name(tuning.kind));
    }

    fn plan(&mut self, tuning: &Tuning) -> Result<Plan> {
        self.set(tuning);
        OpenRun::plan_watched(self.backend, self.config, self.control.clone())
    }
}

/// The bytes that a refused plan lacks, of host memory or of the device's; `None` if it was refused for something else.
fn missing(error: &TrainError) -> Option<u64> {
    match error {
        TrainError::Memory { needed, allowed, .. } | TrainError::DeviceMemory { needed, allowed, .. } => {
            Some(needed.0.saturating_sub(allowed.0))
        }
        _ => None,
    }
}

fn order_name(kind: PartitionOrderKind) -> OrderName {
    match kind {
        PartitionOrderKind::Beta => OrderName::Beta,
        PartitionOrderKind::TwoLevelBeta => OrderName::TwoLevelBeta,
        PartitionOrderKind::Tour => OrderName::Tour,
        PartitionOrderKind::Dispersed => OrderName::Dispersed,
        PartitionOrderKind::TrainingFirst => OrderName::TrainingFirst,
    }
}

/// Sizes of the graph, as the paper names them, and the smallest read of the disk.
fn request(config: &RunConfig, dataset: &Dataset, kind: PartitionOrderKind) -> Result<BufferRequest> {
    let manifest = dataset.manifest();
    let (nodes, edges) = (manifest.nodes.count, manifest.edges.count);
    let learned = config.embeddings.as_ref().map_or(0, |embeddings| {
        let matrices = 1 + embeddings.optimizer.row_states().len() as u64;
        embeddings.columns as u64 * 4 * matrices
    });
    let features = manifest.nodes.features.as_ref().filter(|_| config.reads_features());
    let stored = features.map_or(0, |features| features.dim * features.dtype.bytes());
    let edge_bytes = EdgeBuckets::edge_bytes(dataset);
    let directions = if config.direction == Direction::Both { 2 } else { 1 };
    // A neighbour, an edge id while the subgraph is built, and a relation.
    let in_subgraph =
        manifest.id_dtype().bytes() + 8 + if manifest.edges.relations.is_some() { 4 } else { 0 };
    Ok(BufferRequest {
        kind,
        nodes,
        training_nodes: manifest.splits.as_ref().map_or(0, |splits| splits.train),
        row_bytes: nodes.saturating_mul(learned + stored),
        edge_bytes: edges.saturating_mul(edge_bytes),
        // Words, and the subgraphs of two steps.
        edge_copies: 1 + (2 * directions * in_subgraph).div_ceil(edge_bytes),
        read_bytes: config.io_block.map_or_else(|| smallest_read(dataset), Ok)?,
        memory_bytes: config.memory,
        working_bytes: 0,
    })
}

/// The smallest read at nearly the rate of the disk that has the dataset.
fn smallest_read(dataset: &Dataset) -> Result<u64> {
    let largest = dataset.arrays().iter().max_by_key(|array| array.entry().bytes);
    match largest.filter(|array| array.entry().bytes >= LEAST_FILE_BYTES) {
        Some(array) => Ok(smallest_fast_block(array.path(), SHARE, READING)?),
        None => Ok(USUAL_READ_BYTES),
    }
}
