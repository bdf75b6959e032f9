//! The pilot: some batches of every phase are sampled for their size, before memory is divided. What fan-outs allow is
//! often several times what batches are, because neighbours repeat and many nodes have few. Which batches are sampled
//! depends on the job alone, so a dry run and a run find the same sizes.

use crate::job::LoadedTopology;
use crate::residents::StepTopology;
use crate::sampling::ResidentTopology;
use crate::{Job, KnownSizes, Result, StrategyError};
use esker_sample::{
    AnyTopology, Batches, DiskGraph, HopSizes, OnDisk, Position, Sample, SampleError, Sampler, Settings,
    Topology,
};
use esker_types::{Dtype, Progress, Unit};
use std::sync::Arc;

/// Batches that are sampled per phase, at most and at least.
const MOST_BATCHES: u64 = 16;
const LEAST_BATCHES: u64 = 2;
/// Bytes that a neighbour on disk costs to read: most are alone in their block.
const READ_BYTES: u64 = 4096;
/// Memory of a thread that loads a part of the topology: a stream and a chunk.
const LOADER_BYTES: u64 = 2 << 20;
/// After so many neighbours, no further batch is sampled: large batches are alike.
const ENOUGH_EDGES: u64 = 2_000_000;
/// Batches may be larger than the largest one sampled, by this share or by the spread that was seen.
const MARGIN: f64 = 1.0 / 16.0;
const SPREADS: f64 = 3.0;

/// What becomes of a topology that the pilot loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterPilot {
    /// It stays in memory: training needs it.
    Kept,
    /// It stays until the work before training has sampled with it. The files of one on disk stay open.
    Lent,
    /// It is dropped. The files of one on disk stay open.
    Dropped,
}

impl Job {
    /// Samples some batches and keeps their sizes in the outline, using at most `allowed` bytes. If even that is too
    /// little, sizes stay what fan-outs allow.
    pub fn pilot(&mut self, allowed: u64, after: AfterPilot) -> Result<()> {
        let in_memory = AnyTopology::bytes_for(&self.dataset, self.direction);
        let on_disk = DiskGraph::bytes_for(&self.dataset, self.direction);
        let known = match after {
            AfterPilot::Lent if self.topology.resident.is_none() && self.is_loaded_faster(allowed) => {
                match self.pilot_and_lend(allowed - in_memory - on_disk) {
                    // The topology leaves too little for a batch.
                    Err(StrategyError::Sample(SampleError::Memory { .. })) => {
                        self.topology = LoadedTopology::default();
                        self.pilot_on_disk(allowed.saturating_sub(on_disk), after)
                    }
                    known => known,
                }
            }
            AfterPilot::Kept if in_memory <= allowed => self.pilot_in_memory(allowed - in_memory, after),
            _ if in_memory <= allowed / 2 => self.pilot_in_memory(allowed - in_memory, after),
            _ => self.pilot_on_disk(allowed.saturating_sub(on_disk), after),
        };
        self.known = match known {
            Err(StrategyError::Sample(SampleError::Memory { .. })) => None,
            known => Some(known?),
        };
        self.progress.finish();
        Ok(())
    }

    /// Whether the whole topology fits, and loading it takes less of the disk than the pilot's reads, a block each.
    fn is_loaded_faster(&self, allowed: u64) -> bool {
        let in_memory = AnyTopology::bytes_for(&self.dataset, self.direction);
        let taken = in_memory.saturating_add(DiskGraph::bytes_for(&self.dataset, self.direction));
        let batch = self.largest_bound().edges;
        let read =
            MOST_BATCHES.saturating_mul(batch).min(LEAST_BATCHES.saturating_mul(batch).max(ENOUGH_EDGES));
        let is_small = taken <= allowed / 2;
        let loading = self.threads.max(1) as u64 * LOADER_BYTES;
        taken.saturating_add(loading) <= allowed && (is_small || read.saturating_mul(READ_BYTES) >= in_memory)
    }

    /// Loads the topology and opens its files at the same time, for the pilot and for the work before training.
    fn pilot_and_lend(&mut self, left: u64) -> Result<KnownSizes> {
        self.progress.stage("load topology", Some(self.dataset.manifest().edges.count), Unit::Count("edges"));
        let (dataset, direction) = (&self.dataset, self.direction);
        let open = || DiskGraph::open(dataset, direction);
        let (opened, loaded) =
            self.pool.install(|| rayon::join(open, || ResidentTopology::of(dataset, direction)));
        let (opened, loaded) = (Arc::new(opened?), loaded?);
        self.progress.advance(self.dataset.manifest().edges.count);
        self.topology = LoadedTopology::lending(loaded.clone(), opened);
        self.sizes_in_memory(&loaded, left)
    }

    fn pilot_in_memory(&mut self, left: u64, after: AfterPilot) -> Result<KnownSizes> {
        self.progress.stage("load topology", None, Unit::Count("edges"));
        let topology = ResidentTopology::load(self)?;
        let known = self.sizes_in_memory(&topology, left);
        let resident = (after == AfterPilot::Kept).then_some(topology);
        self.topology = LoadedTopology { resident, ..LoadedTopology::default() };
        known
    }

    fn sizes_in_memory(&self, topology: &ResidentTopology, left: u64) -> Result<KnownSizes> {
        self.progress.stage("sample for sizes", None, Unit::Count("batches"));
        Ok(match (topology, self.residents.as_ref().map(|residents| residents.topology(topology))) {
            (_, Some(StepTopology::Narrow(graph))) => sizes(self, graph.by_step.clone(), left),
            (_, Some(StepTopology::Wide(graph))) => sizes(self, graph.by_step.clone(), left),
            (ResidentTopology::Narrow(graph), None) => sizes(self, graph.clone(), left),
            (ResidentTopology::Wide(graph), None) => sizes(self, graph.clone(), left),
        }?)
    }

    fn pilot_on_disk(&mut self, left: u64, after: AfterPilot) -> Result<KnownSizes> {
        self.progress.stage("sample for sizes", None, Unit::Count("batches"));
        let graph = Arc::new(DiskGraph::open(&self.dataset, self.direction)?);
        self.topology.on_disk = (after != AfterPilot::Kept).then(|| graph.clone());
        Ok(match self.dataset.manifest().id_dtype() {
            Dtype::U64 => sizes(self, OnDisk::<u64>::new(graph, None), left),
            _ => sizes(self, OnDisk::<u32>::new(graph, None), left),
        }?)
    }
}

/// The sizes of all phases.
fn sizes<T: Topology + Clone>(job: &Job, topology: T, bytes: u64) -> Result<KnownSizes, SampleError> {
    let phase = |batches: &dyn Batches, settings: &Settings, epochs: u64| {
        let mut sampler = Sampler::new(topology.clone(), settings.clone(), bytes)?;
        sizes_of(batches, &mut sampler, epochs, &*job.progress)
    };
    let schedule = &job.schedule;
    let mut evaluation: Option<HopSizes> = None;
    for over in [&schedule.validation, &schedule.last_validation, &schedule.test].into_iter().flatten() {
        let found = phase(&*over.batches, &over.settings, 1)?;
        evaluation = match (evaluation, found) {
            (Some(before), Some(found)) => Some(before.max(&found)),
            (before, found) => before.or(found),
        };
    }
    // Groups of partitions and steps differ from epoch to epoch; other batches are alike in all of them.
    let first = Position { epoch: 0, batch: 0 };
    let differ = job.batches.group(first).is_some() || job.batches.step(first).is_some();
    let epochs = if differ { job.epochs } else { 1 };
    let training = if job.largest_batch > 0 { phase(&*job.batches, &job.settings, epochs)? } else { None };
    Ok(KnownSizes { training, evaluation })
}

/// The batches that are sampled: spread over an epoch, each of the next one if there are several.
fn pilot_positions(batches: &dyn Batches, epochs: u64) -> Vec<Position> {
    let sampled = batches.count(0).min(MOST_BATCHES);
    let at = |number: u64| {
        let epoch = number % epochs.clamp(1, MOST_BATCHES);
        Position { epoch, batch: number * batches.count(epoch) / sampled }
    };
    // An epoch may have no batches.
    (0..sampled).map(at).filter(|at| at.batch < batches.count(at.epoch)).collect()
}

/// The sizes of some batches, with a margin. `None` if there are no batches.
fn sizes_of<T: Topology>(
    batches: &dyn Batches,
    sampler: &mut Sampler<T>,
    epochs: u64,
    progress: &dyn Progress,
) -> Result<Option<HopSizes>, SampleError> {
    let positions = pilot_positions(batches, epochs);
    let (mut seeds, mut sample, mut largest) = (Vec::new(), Sample::default(), HopSizes::default());
    let (mut edges, mut nodes, mut full) = (0, Vec::new(), 0);
    for (number, at) in (0..).zip(&positions) {
        let at = *at;
        batches.seeds(at, &mut seeds)?;
        sampler.begin(batches, at)?;
        sampler.sample(at, &seeds, &mut sample)?;
        progress.advance(1);
        largest = largest.max(&HopSizes::of(&sample));
        edges += sample.edge_count();
        // The last batch may have fewer seeds, which says nothing of the others.
        full = full.max(seeds.len());
        if seeds.len() == full {
            nodes.push(sample.node_ids.len() as f64);
        }
        if edges >= ENOUGH_EDGES && number + 1 >= LEAST_BATCHES {
            break;
        }
    }
    Ok((!positions.is_empty()).then(|| largest.enlarged(margin(&nodes))))
}

/// The share by which batches may be larger than the largest of some.
fn margin(nodes: &[f64]) -> f64 {
    let mean = nodes.iter().sum::<f64>() / nodes.len() as f64;
    let variance = nodes.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / nodes.len() as f64;
    (SPREADS * variance.sqrt() / mean.max(1.0)).max(MARGIN)
}

#[cfg(test)]
mod tests {
    use super::{margin, pilot_positions};
    use esker_sample::order::{Grouping, Groups};
    use esker_sample::{Batches, NodeBatches, Seeds};
    use esker_types::PartitionId;
    use std::collections::BTreeSet;

    #[test]
    fn batches_of_several_epochs_are_sampled_where_they_differ() {
        let grouping =
            Grouping { partitions: 40, digest: "d".into(), group: 4, batch: 10, drop_last: false, seed: 1 };
        let of_seeds: Vec<PartitionId> = (0..400).map(|seed| PartitionId(seed % 40)).collect();
        let order = Groups::new(grouping, &of_seeds).unwrap();
        let batches = NodeBatches::new(order, Seeds::AllNodes(400)).unwrap();
        let epochs = |count: u64| {
            let positions = pilot_positions(&batches, count);
            assert_eq!(positions.len(), 16);
            assert!(positions.iter().all(|at| at.batch < batches.count(at.epoch)));
            positions.iter().map(|at| at.epoch).collect::<BTreeSet<u64>>().len()
        };
        assert_eq!((epochs(1), epochs(3), epochs(100)), (1, 3, 16));
    }

    #[test]
    fn batches_that_differ_much_get_a_larger_margin() {
        assert_eq!(margin(&[1000.0, 1000.0, 1001.0]), 1.0 / 16.0);
        assert_eq!(margin(&[1000.0, 500.0]), 1.0);
        assert_eq!(margin(&[0.0]), 1.0 / 16.0);
    }
}
