//! How many rows of a history pay, and of which nodes (OUTRE, sections 5.2 and 5.3). One epoch is sampled without a
//! history: the second one, because rows stay fresh from one epoch to the next; of the first one, only first hops. For each node it counts how often its feature row is accessed, and what would be saved by pulling its hidden
//! row whenever that would be fresh. The paper counts every visit; here it is only those after a push that is not too
//! old. Feature rows are unique: a row belongs to the neighbour of a target through which it was found first.
//!
//! If a neighbour of a target is pulled, everything that was found through it is needed one layer less. So its last
//! generation is not needed at all: feature rows of hop L, neighbours of hop L - 1. And every node that was found through
//! it before that, itself included, has one hidden row less to compute.

use super::first_hop;
use crate::sampling::ResidentTopology;
use crate::{Job, Phase, Result, StrategyError};
use esker_plan::{CacheSplit, EpochWork, HistorySaving, SplitTask, WorkSeconds, splits};
use esker_sample::bulk::Bulk;
use esker_sample::{AnyTopology, Batches, DiskGraph, NodeSet, OnDisk, Position, Sample, Topology};
use esker_types::{ByteCount, Dtype, StopSignal, Unit};
use std::sync::Arc;

/// Bytes per node: four counts and two stamps, two sorted counts, an index and sums over them, and a planner.
const NODE_BYTES: u64 = 6 * 4 + 4 + 4 + 8 + 24 + 24 + 8;

/// What an epoch accesses, and what a history would save.
pub struct HistoryProfile {
    /// By node.
    accesses: Vec<u32>,
    rows: Vec<u32>,
    edges: Vec<u32>,
    computed: Vec<f32>,
    /// An epoch without a history and without a cache.
    all: EpochWork,
    pub(super) epoch: ProfiledEpoch,
}

/// The epoch that is profiled, and how a history finds it.
pub(super) struct ProfiledEpoch {
    /// Its number.
    pub number: u64,
    /// The batch before it that would have pushed each node's row last; 0 is never.
    pub stamps: Vec<u32>,
    /// Batches before it.
    pub before: u32,
    /// What computing a row of each layer takes, in rows of the first.
    pub weights: Vec<f64>,
    /// Memory of profiling and replaying: no history is in memory meanwhile.
    pub memory_bytes: u64,
}

/// Memory that is divided between cached rows and a history.
#[derive(Debug, Clone, Copy)]
pub struct DividedMemory {
    /// The memory.
    pub bytes: u64,
    /// Bytes of a row of the history, with what belongs to it.
    pub history_row_bytes: u64,
    /// Whether feature rows are cached in it, too.
    pub has_rows: bool,
}

/// Counts while an epoch is sampled.
struct EpochCounting {
    profile: HistoryProfile,
    staleness: u32,
    /// The batch that would have pushed each node's row last; 0 is never.
    stamps: Vec<u32>,
    batch: u32,
    /// The neighbour of a target through which each node of a batch was found.
    owners: Vec<u32>,
}

impl HistoryProfile {
    /// Samples an epoch. Rows would be fresh for `staleness` batches. `weights` tells what computing a row of each
    /// layer takes, in rows of the first.
    pub fn sample(job: &Job, staleness: u32, weights: Vec<f64>) -> Result<HistoryProfile> {
        let mut counting = EpochCounting::new(job.dataset.manifest().nodes.count, staleness, weights);
        counting.profile.epoch.memory_bytes = job.strategy_bytes;
        on_topology(job, job.strategy_bytes, Counted(counting))
    }

    /// All divisions of memory, from no history to nothing else, with the nodes that it gives a history: the first so
    /// many of an order.
    pub fn splits(
        &self,
        job: &Job,
        memory: DividedMemory,
        seconds: &WorkSeconds,
    ) -> (Vec<CacheSplit>, Vec<u32>) {
        let saving = |node: u32| HistorySaving {
            rows: self.rows[node as usize] as f64,
            edges: self.edges[node as usize] as f64,
            computed: self.computed[node as usize] as f64,
        };
        let mut accesses = self.accesses.clone();
        accesses.retain(|count| *count > 0);
        accesses.sort_unstable_by(|one, other| other.cmp(one));
        let saved = |node: u32| seconds.of(&saving(node));
        let mut order: Vec<u32> = (0..self.accesses.len().min(u32::MAX as usize) as u32).collect();
        order.retain(|node| self.computed[*node as usize] > 0.0);
        // Of equal nodes, the smaller id comes first.
        order.sort_by(|one, other| saved(*other).total_cmp(&saved(*one)));
        let savings: Vec<HistorySaving> = order.iter().map(|node| saving(*node)).collect();
        let task = SplitTask {
            budget_bytes: memory.bytes,
            row_bytes: if memory.has_rows { job.row_bytes() } else { u64::MAX },
            history_row_bytes: memory.history_row_bytes,
            accesses: &accesses,
            savings: &savings,
            all: self.all,
            seconds: *seconds,
        };
        (splits(&task), order)
    }

    /// The set of some nodes of an order.
    pub fn chosen(&self, nodes: &[u32]) -> NodeSet {
        let mut chosen = nodes.to_vec();
        chosen.sort_unstable();
        let mut next = chosen.iter().copied().peekable();
        NodeSet::choose(self.accesses.len() as u64, |node| {
            next.next_if(|chosen| *chosen as u64 == node.0).is_some()
        })
    }
}

/// Work on the topology of a job, whatever it is.
pub(super) trait OnTopology {
    type Output;
    /// The samplers may take so many bytes.
    fn run<T: Topology>(self, job: &Job, graph: &T, most_bytes: u64) -> Result<Self::Output>;
}

/// Loads the topology if it fits beside counts by node into so many bytes, and works on it.
pub(super) fn on_topology<W: OnTopology>(job: &Job, left: u64, work: W) -> Result<W::Output> {
    let nodes = job.dataset.manifest().nodes.count;
    let (counts, sampling) = (nodes.saturating_mul(NODE_BYTES), job.training_bound().bytes(4));
    let needed = counts.saturating_add(sampling);
    if needed > left {
        return Err(StrategyError::ProfileMemory { needed: ByteCount(needed), left: ByteCount(left) });
    }
    let room = left - counts;
    let in_memory = AnyTopology::bytes_for(&job.dataset, job.direction);
    match in_memory.saturating_add(sampling) <= room {
        true => match ResidentTopology::load(job)? {
            ResidentTopology::Narrow(graph) => work.run(job, &graph, room - in_memory),
            ResidentTopology::Wide(graph) => work.run(job, &graph, room - in_memory),
        },
        false => {
            let graph = Arc::new(DiskGraph::open(&job.dataset, job.direction)?);
            match job.dataset.manifest().id_dtype() {
                Dtype::U64 => work.run(job, &OnDisk::<u64>::new(graph, None), room),
                _ => work.run(job, &OnDisk::<u32>::new(graph, None), room),
            }
        }
    }
}

/// Threads that sample training batches within so many bytes.
pub(super) fn sampling_threads(job: &Job, most_bytes: u64) -> usize {
    let worker_bytes = job.training_bound().bytes(4).max(1);
    (most_bytes / worker_bytes).clamp(1, job.threads.max(1) as u64) as usize
}

/// The positions at which the batches of an epoch are sampled.
pub(super) fn positions_of(job: &Job, epoch: u64) -> Vec<Position> {
    let batches = job.count(Phase::Train { epoch });
    (0..batches).map(|batch| job.sampled_at(Position { epoch, batch })).collect()
}

/// Hidden rows that a batch computes, in rows of the first layer.
pub fn weighted_rows(sample: &Sample, weights: &[f64]) -> f64 {
    (0..sample.layers()).map(|layer| sample.layer(layer).outputs.len() as f64 * weights[layer]).sum()
}

/// Neighbours of the first hop of a batch.
pub(super) fn first_hop_edges(sample: &Sample) -> f64 {
    let offsets = sample.layer(sample.layers() - 1).nbr_offsets;
    offsets.last().zip(offsets.first()).map_or(0.0, |(end, start)| (end - start) as f64)
}

struct Counted(EpochCounting);

impl OnTopology for Counted {
    type Output = HistoryProfile;
    fn run<T: Topology>(self, job: &Job, graph: &T, most_bytes: u64) -> Result<HistoryProfile> {
        self.0.run(job, graph, most_bytes)
    }
}

impl EpochCounting {
    fn new(nodes: u64, staleness: u32, weights: Vec<f64>) -> EpochCounting {
        let count = || vec![0; nodes as usize];
        let profile = HistoryProfile {
            accesses: count(),
            rows: count(),
            edges: count(),
            computed: vec![0.0; nodes as usize],
            all: EpochWork::default(),
            epoch: ProfiledEpoch { number: 0, stamps: Vec::new(), before: 0, weights, memory_bytes: 0 },
        };
        EpochCounting { profile, staleness, stamps: count(), batch: 0, owners: Vec::new() }
    }

    /// Samples first hops of the first epoch, then the second one; of a run of one epoch, that one alone.
    fn run<T: Topology>(mut self, job: &Job, graph: &T, most_bytes: u64) -> Result<HistoryProfile> {
        let threads = sampling_threads(job, most_bytes);
        let settings = first_hop(&job.settings);
        let first_hops: Bulk<'_, T, dyn Batches> =
            Bulk { graph, batches: &*job.batches, settings: &settings, threads, most_bytes };
        let bulk = Bulk { settings: &job.settings, ..first_hops };
        let profiled = u64::from(job.epochs > 1);
        if profiled > 0 {
            first_hops.run_with(threads, positions_of(job, 0).into_iter(), |_, sample| {
                self.find_fresh(sample);
                stopped(&job.stop)
            })?;
        }
        let epoch = &mut self.profile.epoch;
        (epoch.number, epoch.before, epoch.stamps) = (profiled, self.batch, self.stamps.clone());
        let positions = positions_of(job, profiled);
        job.progress.stage("sample for the history", Some(positions.len() as u64), Unit::Count("batches"));
        bulk.run_with(threads, positions.into_iter(), |_, sample| {
            self.count(sample);
            job.progress.advance(1);
            stopped(&job.stop)
        })?;
        job.progress.finish();
        Ok(self.profile)
    }

    /// Takes the next batch: neighbours of targets whose rows would be fresh own themselves, others are pushed.
    fn find_fresh(&mut self, sample: &Sample) {
        let (layers, offsets) = (sample.layers(), &sample.node_id_offsets);
        let (neighbours, targets) =
            (offsets[layers - 1]..offsets[layers], offsets[layers]..offsets[layers + 1]);
        self.batch += 1;
        self.owners.clear();
        self.owners.resize(sample.node_ids.len(), u32::MAX);
        for node in neighbours {
            let stamp = &mut self.stamps[sample.node_ids[node as usize].index()];
            match *stamp > 0 && self.batch - *stamp < self.staleness {
                true => self.owners[node as usize] = node,
                false => *stamp = self.batch,
            }
        }
        for node in targets {
            self.stamps[sample.node_ids[node as usize].index()] = self.batch;
        }
    }

    /// Counts a batch of form DENSE without pulled nodes.
    fn count(&mut self, sample: &Sample) {
        let (layers, offsets, block) = (sample.layers(), &sample.node_id_offsets, &sample.blocks[0]);
        let HistoryProfile { all, epoch, .. } = &mut self.profile;
        all.batches += 1.0;
        all.rows += sample.node_ids.len() as f64;
        all.misses = all.rows;
        all.edges += sample.edge_count() as f64;
        all.decided_edges += first_hop_edges(sample);
        all.computed += weighted_rows(sample, &epoch.weights);
        for node in &sample.node_ids {
            let count = &mut self.profile.accesses[node.index()];
            *count = count.saturating_add(1);
        }
        let hop = |hop: usize| offsets[layers - hop]..offsets[layers - hop + 1];
        self.find_fresh(sample);
        for depth in 1..layers {
            let mut next = hop(depth + 1).start;
            // A node of this hop is computed by one layer less.
            let weight = self.profile.epoch.weights[layers - 1 - depth] as f32;
            for node in hop(depth) {
                let owner = self.owners[node as usize];
                let at = (node - block.first) as usize;
                let nbrs = &block.nbrs[block.nbr_offsets[at] as usize..block.nbr_offsets[at + 1] as usize];
                let before = next;
                for nbr in
                    nbrs.iter().filter(|nbr| nbr.0 >= hop(depth + 1).start && nbr.0 < hop(depth + 1).end)
                {
                    // New nodes are numbered in order of first appearance.
                    if nbr.0 == next {
                        self.owners[next as usize] = owner;
                        next += 1;
                    }
                }
                if owner == u32::MAX {
                    continue;
                }
                let id = sample.node_ids[owner as usize].index();
                let add = |count: &mut u32, more: u32| *count = count.saturating_add(more);
                self.profile.computed[id] += weight;
                if depth + 1 == layers {
                    add(&mut self.profile.rows[id], next - before);
                    add(&mut self.profile.edges[id], nbrs.len() as u32);
                }
            }
        }
    }
}

/// Fails if a stop was requested.
pub(super) fn stopped(stop: &StopSignal) -> Result<()> {
    if stop.is_asked() { Err(StrategyError::Stopped) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use esker_sample::{Carry, Fanout, Form, InMemory, Sampler, Settings};
    use esker_types::NodeId;

    /// Two layers: target 0 has neighbours 1 and 2; 1 has 3 and 4, 2 has 4 and 5.
    #[test]
    fn what_is_found_first_through_a_fresh_neighbour_is_saved_by_it() {
        let lists: Vec<Vec<u64>> =
            vec![vec![1, 2], vec![3, 4], vec![4, 5], vec![], vec![], vec![], vec![1], vec![]];
        let graph = InMemory::<u32>::from_adjacency(&lists, None);
        let fanouts = vec![Fanout::All; 2];
        let settings = Settings { seed: 1, fanouts, form: Form::Dense, carry: Carry::default() };
        let mut sampler = Sampler::new(&graph, settings, 1 << 30).unwrap();
        let mut counting = EpochCounting::new(8, 2, vec![1.0, 0.5]);
        let mut sample = Sample::default();
        // Rows of 1 and 2 are pushed, then fresh, then 1 is fresh no more.
        for (batch, seed) in [0, 0, 6].into_iter().enumerate() {
            let at = Position { epoch: 0, batch: batch as u64 };
            sampler.sample(at, &[NodeId(seed)], &mut sample).unwrap();
            counting.count(&sample);
        }
        let profile = counting.profile;
        assert_eq!(profile.accesses, [2, 3, 2, 3, 3, 2, 1, 0]);
        assert_eq!(profile.rows, [0, 2, 1, 0, 0, 0, 0, 0]);
        assert_eq!(profile.edges, [0, 2, 2, 0, 0, 0, 0, 0]);
        assert_eq!(profile.computed, [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        // Layer 0 writes the targets and their neighbours, layer 1 the targets, which count half.
        let all = profile.all;
        assert_eq!((all.batches, all.rows, all.edges, all.computed), (3.0, 16.0, 15.0, 9.5));
        assert_eq!(all.decided_edges, 5.0);
    }
}
