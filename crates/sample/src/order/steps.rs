//! The order by steps over partitions, of which some are resident at a time (Marius++ section 5). A step trains the edges
//! of its buckets, or the training nodes of its partitions. They are shuffled by (seed, epoch, step) and cut into
//! batches; the last batch of a step may be smaller. No batch has items of two steps.
//!
//! [`StepBatching`] says which items of which buckets or partitions a batch has, from their numbers alone. So a strategy
//! whose edges are on disk, bucket by bucket, makes the same batches as [`StepOrder`], which knows all items. The items of a
//! bucket are its edges by id, those of a partition its training nodes in their given order.

use super::Order;
use crate::draw::PURPOSE_STEP_ITEMS;
use crate::topology::Sources;
use crate::{EdgeLookup, NodePartitions, Result, SampleError, StoredId};
use esker_types::random::{Key, Permutation};
use esker_types::{NodeId, PartitionStep, PartitionSteps, StepWork};
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Epochs whose steps are kept: the current one and one that is sampled ahead.
const KEPT_EPOCHS: usize = 2;
/// Nodes whose edges are read together.
const NODES_AT_ONCE: usize = 1 << 12;

/// Batches of the items of steps.
#[derive(Debug)]
pub struct StepBatching {
    steps: Arc<dyn PartitionSteps>,
    /// Items before each unit of work, and of all: buckets by source and target, or partitions.
    starts: Vec<u64>,
    batch: NonZeroU64,
    drop_last: bool,
    seed: u64,
    epochs: Mutex<Vec<Arc<EpochSteps>>>,
}

/// The steps of an epoch, and their batches.
#[derive(Debug)]
pub struct EpochSteps {
    /// The epoch.
    pub epoch: u64,
    /// Its steps.
    pub steps: Vec<PartitionStep>,
    /// The first batch of each step, and the number of all.
    first_batches: Vec<u64>,
}

/// The step of a batch.
#[derive(Debug, Clone)]
pub struct BatchStep {
    /// The step in its epoch, from 0.
    pub number: usize,
    of: Arc<EpochSteps>,
}

/// An item of a batch: the bucket or partition, and the item's index in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepItem {
    /// The bucket by [`esker_types::EdgeBucket::index`], or the partition.
    pub unit: usize,
    /// The item in it, from 0.
    pub index: u64,
}

impl EpochSteps {
    /// Number of batches.
    pub fn batches(&self) -> u64 {
        self.first_batches.last().copied().unwrap_or(0)
    }

    /// The batches of a step. A step may have none.
    pub fn batches_of(&self, step: usize) -> Range<u64> {
        self.first_batches[step]..self.first_batches[step + 1]
    }

    /// The step of a batch that exists.
    fn step_of(&self, batch: u64) -> usize {
        self.first_batches.partition_point(|first| *first <= batch) - 1
    }
}

impl BatchStep {
    /// The epoch.
    pub fn epoch(&self) -> u64 {
        self.of.epoch
    }

    /// Who is resident, and what is trained.
    pub fn step(&self) -> &PartitionStep {
        &self.of.steps[self.number]
    }

    /// All steps of its epoch.
    pub fn epoch_steps(&self) -> &EpochSteps {
        &self.of
    }

    /// The batches of the step.
    pub fn batches(&self) -> Range<u64> {
        self.of.batches_of(self.number)
    }
}

impl StepBatching {
    /// Batches of `batch` items over steps whose units of work have so many items each. Fails if batches are empty.
    pub fn new(
        steps: Arc<dyn PartitionSteps>,
        counts: &[u64],
        batch: u64,
        drop_last: bool,
        seed: u64,
    ) -> Result<StepBatching> {
        let Some(batch) = NonZeroU64::new(batch) else { return Err(SampleError::EmptyBatches) };
        assert_eq!(counts.len(), units_of(&*steps), "a number of items for every unit of work");
        let mut starts = Vec::with_capacity(counts.len() + 1);
        let mut before = 0;
        for count in counts {
            starts.push(before);
            before += count;
        }
        starts.push(before);
        Ok(StepBatching { steps, starts, batch, drop_last, seed, epochs: Mutex::default() })
    }

    /// The most batches that an epoch of so many items in steps can have.
    pub fn most_batches(items: u64, steps: u64, batch: u64, drop_last: bool) -> u64 {
        let full = items / batch.max(1);
        if drop_last { full } else { full.saturating_add(steps).min(items) }
    }

    /// Bytes of the batching of an order, without its items.
    pub fn bytes_for(steps: &dyn PartitionSteps, resident: u32) -> u64 {
        let units = units_of(steps) as u64;
        let of_step = resident as u64 * 4 + 64;
        (units + 1) * 8 + KEPT_EPOCHS as u64 * (units * 8 + steps.step_count() * of_step)
    }

    /// The steps of an epoch: those that are kept, or made now.
    pub fn epoch(&self, epoch: u64) -> Arc<EpochSteps> {
        let mut kept = self.epochs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = kept.iter().find(|steps| steps.epoch == epoch) {
            return found.clone();
        }
        if kept.len() == KEPT_EPOCHS {
            kept.remove(0);
        }
        let made = Arc::new(self.make(epoch));
        kept.push(made.clone());
        made
    }

    /// Number of items.
    pub fn items_count(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    fn make(&self, epoch: u64) -> EpochSteps {
        let steps = self.steps.steps(epoch);
        let (mut first_batches, mut batches) = (Vec::with_capacity(steps.len() + 1), 0);
        for step in &steps {
            first_batches.push(batches);
            let items: u64 = self.units(step).map(|unit| self.count(unit)).sum();
            batches += if self.drop_last { items / self.batch } else { items.div_ceil(self.batch.get()) };
        }
        first_batches.push(batches);
        EpochSteps { epoch, steps, first_batches }
    }

    fn count(&self, unit: usize) -> u64 {
        self.starts[unit + 1] - self.starts[unit]
    }

    /// The units of work of a step.
    fn units<'a>(&self, step: &'a PartitionStep) -> Box<dyn Iterator<Item = usize> + 'a> {
        let partitions = self.steps.partitions();
        match &step.work {
            StepWork::Buckets(buckets) => {
                Box::new(buckets.iter().map(move |bucket| bucket.index(partitions)))
            }
            StepWork::Partitions(trained) => Box::new(trained.iter().map(|partition| partition.0 as usize)),
        }
    }

    /// The step of a batch; `None` if the epoch has no such batch.
    pub fn step(&self, epoch: u64, batch: u64) -> Option<BatchStep> {
        let of = self.epoch(epoch);
        (batch < of.batches()).then(|| BatchStep { number: of.step_of(batch), of })
    }

    /// Replaces `out` by the items of a batch. Fails if the epoch has no such batch.
    pub fn items(&self, epoch: u64, batch: u64, out: &mut Vec<StepItem>) -> Result<()> {
        let steps = self.epoch(epoch);
        if batch >= steps.batches() {
            return Err(SampleError::NoSuchBatch { epoch, batch, batches: steps.batches() });
        }
        let number = steps.step_of(batch);
        let units: Vec<usize> = self.units(&steps.steps[number]).collect();
        // Where the items of each unit end among those of the step.
        let mut end = 0;
        let ends = units.iter().map(|unit| {
            end += self.count(*unit);
            end
        });
        let ends: Vec<u64> = ends.collect();
        let items = ends.last().copied().unwrap_or(0);
        let key = Key::new(self.seed).with(PURPOSE_STEP_ITEMS).with(epoch).with(number as u64);
        let shuffled = Permutation::new(items, key);
        let start = (batch - steps.first_batches[number]) * self.batch.get();
        out.clear();
        out.extend((start..start.saturating_add(self.batch.get()).min(items)).map(|at| {
            let item = shuffled.forward(at);
            let at = ends.partition_point(|end| *end <= item);
            StepItem { unit: units[at], index: item - if at == 0 { 0 } else { ends[at - 1] } }
        }));
        Ok(())
    }

    /// A short text. On one graph, with the same partitions, equal texts mean equal batches.
    pub fn identity(&self) -> String {
        let (steps, items) = (self.steps.identity(), self.items_count());
        let StepBatching { batch, drop_last, seed, .. } = self;
        format!("steps({steps},count={items},batch={batch},drop_last={drop_last},seed={seed})")
    }
}

/// Passes the unit of every seed on, in the order of seeds.
type EachUnit<'a> = dyn FnMut(&mut dyn FnMut(usize)) -> Result<()> + 'a;

/// Number of buckets, or of partitions.
fn units_of(steps: &dyn PartitionSteps) -> usize {
    let partitions = steps.partitions() as usize;
    if steps.trains_edges() { partitions * partitions } else { partitions }
}

/// Seeds by steps, with an index over all of them.
#[derive(Debug)]
pub struct StepOrder {
    batching: StepBatching,
    items: StepItems,
    partitions: String,
}

/// Seeds by unit of work.
#[derive(Debug)]
enum StepItems {
    Narrow(Vec<u32>),
    Wide(Vec<u64>),
}

impl StepItems {
    fn zeros(count: u64) -> StepItems {
        match count <= u32::MAX as u64 {
            true => StepItems::Narrow(vec![0; count as usize]),
            false => StepItems::Wide(vec![0; count as usize]),
        }
    }

    fn get(&self, at: u64) -> u64 {
        match self {
            StepItems::Narrow(items) => items[at as usize] as u64,
            StepItems::Wide(items) => items[at as usize],
        }
    }

    fn set(&mut self, at: u64, item: u64) {
        match self {
            StepItems::Narrow(items) => items[at as usize] = item as u32,
            StepItems::Wide(items) => items[at as usize] = item,
        }
    }
}

/// How batches are made of steps.
#[derive(Debug, Clone)]
pub struct StepSettings {
    /// The order over partitions.
    pub steps: Arc<dyn PartitionSteps>,
    /// Seeds in a batch.
    pub batch: u64,
    /// Whether the smaller batch of a step is left out.
    pub drop_last: bool,
    /// The random seed.
    pub seed: u64,
}

impl StepOrder {
    /// Bytes of the index of so many seeds. While it is made, it also takes 4 bytes for each node if seeds are edges, or
    /// for each seed.
    pub fn bytes_for(seeds: u64) -> u64 {
        seeds.saturating_mul(if seeds <= u32::MAX as u64 { 4 } else { 8 })
    }

    /// The order of these training nodes.
    pub fn of_nodes(
        settings: &StepSettings,
        partitions: &NodePartitions,
        nodes: &[NodeId],
    ) -> Result<StepOrder> {
        let units: Vec<u32> = nodes.iter().map(|node| partitions.partition(*node).0).collect();
        StepOrder::of_units(settings, partitions, nodes.len() as u64, &mut |take| {
            units.iter().for_each(|unit| take(*unit as usize));
            Ok(())
        })
    }

    /// The order of all edges of a graph.
    pub fn of_edges(
        settings: &StepSettings,
        partitions: &NodePartitions,
        graph: &(impl EdgeLookup + ?Sized),
    ) -> Result<StepOrder> {
        let count = partitions.count() as usize;
        let of_node: Vec<u32> =
            (0..partitions.nodes()).map(|node| partitions.partition(NodeId(node)).0).collect();
        let mut nodes = Vec::with_capacity(NODES_AT_ONCE);
        StepOrder::of_units(settings, partitions, graph.edge_count(), &mut |take| {
            // Edge ids ascend from target to target, and in each of their lists.
            (0..graph.node_count()).step_by(NODES_AT_ONCE).try_for_each(|first| {
                let end = (first + NODES_AT_ONCE as u64).min(graph.node_count());
                nodes.clear();
                nodes.extend((first..end).map(NodeId));
                graph.incoming(&nodes, &mut |at, found| {
                    let target = of_node[nodes[at].index()] as usize;
                    match found.sources {
                        Sources::Narrow(sources) => each(sources, |source| {
                            take(of_node[source.index()] as usize * count + target);
                        }),
                        Sources::Wide(sources) => each(sources, |source| {
                            take(of_node[source.index()] as usize * count + target);
                        }),
                    }
                })
            })
        })
    }

    /// The order of seeds whose units `each_unit` gives, twice, in the order of seeds.
    fn of_units(
        settings: &StepSettings,
        partitions: &NodePartitions,
        seeds: u64,
        each_unit: &mut EachUnit<'_>,
    ) -> Result<StepOrder> {
        let mut counts = vec![0u64; units_of(&*settings.steps)];
        each_unit(&mut |unit| counts[unit] += 1)?;
        let StepSettings { steps, batch, drop_last, seed } = settings;
        let batching = StepBatching::new(steps.clone(), &counts, *batch, *drop_last, *seed)?;
        let (mut items, mut next, mut seed) = (StepItems::zeros(seeds), batching.starts.clone(), 0);
        each_unit(&mut |unit| {
            items.set(next[unit], seed);
            next[unit] += 1;
            seed += 1;
        })?;
        Ok(StepOrder { batching, items, partitions: partitions.identity() })
    }

    /// Which items a batch has.
    pub fn batching(&self) -> &StepBatching {
        &self.batching
    }
}

fn each<W: StoredId>(words: &[W], take: impl FnMut(NodeId)) {
    words.iter().map(|word| word.node()).for_each(take);
}

impl Order for StepOrder {
    fn batches(&self, epoch: u64) -> u64 {
        self.batching.epoch(epoch).batches()
    }

    fn items(&self, epoch: u64, batch: u64, out: &mut Vec<u64>) -> Result<()> {
        let mut items = Vec::new();
        self.batching.items(epoch, batch, &mut items)?;
        out.clear();
        out.extend(items.iter().map(|item| self.items.get(self.batching.starts[item.unit] + item.index)));
        Ok(())
    }

    fn step(&self, epoch: u64, batch: u64) -> Option<BatchStep> {
        self.batching.step(epoch, batch)
    }

    fn identity(&self) -> String {
        format!("{} {}", self.batching.identity(), self.partitions)
    }
}
