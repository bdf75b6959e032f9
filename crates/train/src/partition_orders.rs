//! The orders over partitions of which some are resident at a time, as a run uses them (Marius++): which partitions, which
//! steps, and what batches of a step see.

use crate::memory::{Purpose, too_little};
use crate::task::Task;
use crate::{Result, RunConfig, RunControl, TrainError};
use esker_plan::partition_orders::{
    PartitionCounts, PartitionOrder, PartitionOrderKind, edge_permutation_bias,
};
use esker_sample::order::{StepBatching, StepOrder, StepSettings};
use esker_sample::{BucketCounts, EdgeLookup, NodePartitions, NodeSet, ResidentEdges, for_each_edge};
use esker_store::Dataset;
use esker_strategies::{
    BufferSizes, MemoryTable, PartitionedGraph, ResidentsOutline, StrategyError, StrategyKind,
};
use esker_types::{EdgeBucket, NodeId, PartitionSteps};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, PoisonError};

/// Partitions are those of the dataset, whatever the seed of a run: what is stored by partition serves all runs.
const PARTITION_SEED: u64 = 0;

/// What batches of a step see of nodes that are not resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResidentOnly {
    /// Nothing: neighbours, degrees and negatives are resident nodes.
    All,
    /// Neighbours; negatives are resident nodes.
    Negatives,
}

/// The order over partitions of a run, and how uneven its first epoch is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepsRecord {
    /// How many partitions there are, are resident, and are grouped.
    #[serde(flatten)]
    pub counts: PartitionCounts,
    /// Steps of an epoch.
    pub steps: u64,
    /// Swaps of single partitions in an epoch.
    pub swaps: u64,
    /// The edge permutation bias of the first epoch, if edges are trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<f64>,
}

/// The counts of edges by pair of partitions that were made last: several plans of a run use them.
#[derive(Debug, Clone, Default)]
pub struct CountedBuckets(Arc<Mutex<Option<(String, BucketCounts)>>>);

impl CountedBuckets {
    fn of(
        &self,
        dataset: &Arc<Dataset>,
        partitions: &NodePartitions,
        control: &RunControl,
    ) -> Result<BucketCounts> {
        let name = format!("{} {}", dataset.manifest().id, partitions.identity());
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, counts)) = kept.as_ref().filter(|(found, _)| *found == name) {
            return Ok(counts.clone());
        }
        let counts = BucketCounts::of(dataset, partitions, &control.stop, &*control.progress)?;
        *kept = Some((name, counts.clone()));
        Ok(counts)
    }
}

/// An order over partitions, ready for batches.
pub(crate) struct OrderOverPartitions {
    pub partitions: NodePartitions,
    pub order: Arc<PartitionOrder>,
}

impl RunConfig {
    /// How partitions take turns, and how many there are; `None` for an order without partitions.
    pub fn over_partitions(&self) -> Option<(PartitionOrderKind, PartitionCounts)> {
        Some((self.order.over_partitions()?, self.partition_counts?))
    }

    /// Fails if there are more partitions than nodes, or more pairs of partitions than memory has counts for. It costs
    /// nothing, so it comes before anything is made for each of them.
    pub(crate) fn check_partition_counts(&self, dataset: &Dataset) -> Result<()> {
        let Some((kind, counts)) = self.over_partitions() else { return Ok(()) };
        NodePartitions::random(dataset.manifest().nodes.count, counts.partitions, PARTITION_SEED)?;
        let bytes = BucketCounts::bytes_for(counts.partitions);
        let counts_edges = kind.trains_edges() || self.strategy == StrategyKind::Marius;
        if counts_edges && bytes > self.memory {
            let mut table = MemoryTable::default();
            let from = format!("{} x {} of 8 bytes", counts.partitions, counts.partitions);
            table.add_from("edges of every pair of partitions", bytes, from);
            return Err(too_little(table, self.memory));
        }
        Ok(())
    }

    /// The order over partitions of the run on its dataset, if it has one. Fails if the dataset has too few nodes, or
    /// too many training nodes.
    pub(crate) fn order_over_partitions(&self, dataset: &Dataset) -> Result<Option<OrderOverPartitions>> {
        let Some((kind, counts)) = self.over_partitions() else { return Ok(None) };
        let nodes = dataset.manifest().nodes.count;
        let partitions = match kind {
            PartitionOrderKind::TrainingFirst => {
                let training = Task::training_nodes(dataset)?;
                let training = Arc::new(NodeSet::of_members(nodes, training.into_iter()));
                NodePartitions::training_first(counts.partitions, PARTITION_SEED, training)?
            }
            _ => NodePartitions::random(nodes, counts.partitions, PARTITION_SEED)?,
        };
        let training = partitions.training_partitions().unwrap_or(0);
        let order = Arc::new(PartitionOrder::new(kind, counts, training, self.seed)?);
        Ok(Some(OrderOverPartitions { partitions, order }))
    }

    /// Fails on an order over partitions that is invalid. What depends on the dataset is checked elsewhere.
    pub(crate) fn check_partitions(&self) -> Result<()> {
        let in_buffer = self.strategy == StrategyKind::Marius;
        let Some(kind) = self.order.over_partitions() else {
            if in_buffer {
                return Err(StrategyError::NoBuffer.into());
            }
            return match self.resident_only {
                Some(_) => Err(TrainError::ResidentsOfNoOrder),
                None => Ok(()),
            };
        };
        let Some(counts) = self.partition_counts else {
            return Err(TrainError::NoPartitionCounts { order: kind });
        };
        if kind.trains_edges() != self.link.is_some() {
            return Err(TrainError::OrderOfTask { order: kind, links: self.link.is_some() });
        }
        PartitionOrder::new(kind, counts, 0, self.seed)?;
        if self.resident_only.is_none() && !in_buffer {
            return Ok(());
        }
        if self.resident_only == Some(ResidentOnly::Negatives) && self.link.is_none() {
            return Err(TrainError::ResidentNegatives);
        }
        if in_buffer && self.resident_only == Some(ResidentOnly::Negatives) {
            return Err(TrainError::BufferNeighbours);
        }
        if !self.strategy.holds_topology() && !in_buffer {
            return Err(TrainError::ResidentStrategy { strategy: self.strategy });
        }
        if self.history.is_some() {
            return Err(TrainError::ResidentHistory);
        }
        match self.link.as_ref().is_some_and(|link| link.scores_all_nodes()) {
            true => Err(TrainError::ResidentAllNodes),
            false => Ok(()),
        }
    }

    /// Resident nodes, if training sees no others.
    pub(crate) fn residents_outline(&self, nodes: u64, purpose: Purpose) -> Option<ResidentsOutline> {
        let (_, counts) = self.over_partitions()?;
        let in_memory = self.resident_only.is_some() && self.strategy != StrategyKind::Marius;
        let sees_no_others = in_memory && purpose == Purpose::Train;
        let largest = nodes.div_ceil(counts.partitions.max(1) as u64);
        sees_no_others.then(|| ResidentsOutline { nodes: nodes.min(largest * counts.resident as u64) })
    }
}

impl OrderOverPartitions {
    fn settings(&self, config: &RunConfig) -> StepSettings {
        let (batch, drop_last, seed) = (config.batch, config.drop_last, config.seed);
        StepSettings { steps: self.order.clone(), batch, drop_last, seed }
    }

    /// Batches of these training nodes.
    pub fn of_nodes(&self, config: &RunConfig, nodes: &[NodeId]) -> Result<StepOrder> {
        self.checked(config, StepOrder::of_nodes(&self.settings(config), &self.partitions, nodes)?)
    }

    /// Batches of all edges of a graph.
    pub fn of_edges(&self, config: &RunConfig, graph: &dyn EdgeLookup) -> Result<StepOrder> {
        self.checked(config, StepOrder::of_edges(&self.settings(config), &self.partitions, graph)?)
    }

    /// Fails if no step of the first epoch has a full batch, and smaller ones are dropped.
    fn checked(&self, config: &RunConfig, steps: StepOrder) -> Result<StepOrder> {
        match steps.batching().epoch(0).batches() {
            0 => Err(TrainError::NoFullBatch {
                batch: config.batch,
                nodes: steps.batching().items_count() as usize,
            }),
            _ => Ok(steps),
        }
    }

    /// Batches of the first `epochs` epochs.
    pub fn batch_counts(&self, config: &RunConfig, dataset: &Dataset, epochs: u64) -> Result<Vec<u64>> {
        let (steps, partitions) = (&self.order, self.partitions.count());
        let counts = match steps.trains_edges() {
            true => {
                let mut counts = vec![0; (partitions as usize).pow(2)];
                for_each_edge(dataset, &mut |edge| {
                    let (source, target) =
                        (self.partitions.partition(edge.source), self.partitions.partition(edge.target));
                    counts[EdgeBucket { source, target }.index(partitions)] += 1;
                })?;
                counts
            }
            false => {
                let mut counts = vec![0; partitions as usize];
                for node in Task::training_nodes(dataset)? {
                    counts[self.partitions.partition(node).0 as usize] += 1;
                }
                counts
            }
        };
        let batching =
            StepBatching::new(steps.clone(), &counts, config.batch, config.drop_last, config.seed)?;
        Ok((0..epochs).map(|epoch| batching.epoch(epoch).batches()).collect())
    }

    /// The steps of the first epoch in numbers.
    pub fn record(&self) -> StepsRecord {
        let counts = self.order.counts();
        let bias =
            self.order.trains_edges().then(|| edge_permutation_bias(counts.partitions, &self.order.steps(0)));
        StepsRecord { counts, steps: self.order.step_count(), swaps: self.order.swaps(), bias }
    }
}

impl StepsRecord {
    /// A readable line.
    pub fn text(&self) -> String {
        let StepsRecord { counts, steps, swaps, bias } = self;
        let bias = bias
            .map_or(String::new(), |bias| format!(", edge permutation bias {bias:.3} in the first epoch"));
        format!(
            "p {}, c {}, l {}: {steps} steps and {swaps} swaps of partitions in an epoch{bias}",
            counts.partitions, counts.resident, counts.logical
        )
    }
}

impl RunConfig {
    /// The partition buffer, if the strategy has one.
    pub(crate) fn buffer(&self) -> Option<BufferSizes> {
        let (_, counts) = self.over_partitions().filter(|_| self.strategy == StrategyKind::Marius)?;
        let PartitionCounts { partitions, resident, logical } = counts;
        let each = if resident >= partitions { 1 } else { partitions / logical.max(1) };
        Some(BufferSizes { partitions, resident, each, edges: ResidentEdges::default() })
    }
}

impl OrderOverPartitions {
    /// The graph by these partitions, and the most edges that steps of the run have in memory. Edges are counted, which
    /// takes one pass; they are sorted when memory is divided. Inference sees the whole graph, and counts nothing.
    pub fn graph(
        &self,
        config: &RunConfig,
        dataset: &Arc<Dataset>,
        purpose: Purpose,
        control: &RunControl,
    ) -> Result<(PartitionedGraph, ResidentEdges)> {
        let partitions = self.partitions.clone();
        if purpose == Purpose::Infer {
            let graph = PartitionedGraph::new(dataset, partitions, BucketCounts::default());
            return Ok((graph, ResidentEdges::default()));
        }
        let counts = control.counted.of(dataset, &partitions, control)?;
        let most = counts.most(&*self.order, config.epochs);
        Ok((PartitionedGraph::new(dataset, partitions, counts), most))
    }

    /// Which items batches have, from the number of edges of each bucket alone.
    pub fn batching(&self, config: &RunConfig, counts: &[u64]) -> Result<StepBatching> {
        let StepSettings { steps, batch, drop_last, seed } = self.settings(config);
        let batching = StepBatching::new(steps, counts, batch, drop_last, seed)?;
        match batching.epoch(0).batches() {
            0 => Err(TrainError::NoFullBatch { batch, nodes: counts.iter().sum::<u64>() as usize }),
            _ => Ok(batching),
        }
    }
}

/// Memory of an order over partitions of so many training nodes or edges, while it is made and after.
pub(crate) fn order_bytes(config: &RunConfig, nodes: u64, items: u64) -> u64 {
    let Some((kind, counts)) = config.over_partitions() else { return 0 };
    let Ok(order) = PartitionOrder::new(kind, counts, 0, config.seed) else { return 0 };
    let set = if kind == PartitionOrderKind::TrainingFirst { NodeSet::bytes_for(nodes) } else { 0 };
    // Partitions of all nodes, or of all seeds.
    let made = 4 * if kind.trains_edges() { nodes } else { items };
    // A buffer has the edges of its buckets, and no index.
    if config.strategy == StrategyKind::Marius && kind.trains_edges() {
        return StepBatching::bytes_for(&order, counts.resident);
    }
    StepOrder::bytes_for(items) + StepBatching::bytes_for(&order, counts.resident) + set + made
}

/// The most batches of an epoch over steps.
pub(crate) fn most_batches(config: &RunConfig, items: u64) -> Option<u64> {
    let (kind, counts) = config.over_partitions()?;
    let steps = PartitionOrder::new(kind, counts, 0, config.seed).map_or(0, |order| order.step_count());
    Some(StepBatching::most_batches(items, steps, config.batch, config.drop_last))
}

/// The partitions that training nodes would fill, if they came first.
pub fn training_partitions(dataset: &Dataset, partitions: u32) -> u32 {
    let manifest = dataset.manifest();
    let training = manifest.splits.as_ref().map_or(0, |splits| splits.train);
    let places = NodePartitions::random(manifest.nodes.count, partitions, PARTITION_SEED);
    match (places, training) {
        (Ok(places), 1..) => places.place_of(training - 1).0.0 + 1,
        _ => 0,
    }
}
