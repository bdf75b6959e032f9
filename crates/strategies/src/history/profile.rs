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
use esker_fetch::DiskRows;
use esker_plan::{CacheSplit, HistorySaving, SplitTask, WorkSeconds, best_splits};
use esker_sample::bulk::Bulk;
use esker_sample::{AnyTopology, Batches, DiskGraph, NodeSet, OnDisk, Position, Sample, Topology};
use esker_types::random::mix;
use esker_types::{ByteCount, Dtype, NodeId, Unit};
use std::sync::Arc;
use std::time::Instant;

/// Bytes per node: five counts, two sorted ones, an index, and sums over them.
const NODE_BYTES: u64 = 5 * 4 + 4 + 4 + 8 + 24 + 24;
/// Rows that are read to see how long that takes.
const TIMED_ROWS: u64 = 2048;

/// What an epoch accesses, and what a history would save.
pub struct HistoryProfile {
    /// By node.
    accesses: Vec<u32>,
    rows: Vec<u32>,
    edges: Vec<u32>,
    computed: Vec<u32>,
    all: HistorySaving,
    /// What sampling and reading take. Computing is for whoever has the model to measure.
    pub seconds: WorkSeconds,
    /// The first batch.
    pub first: Sample,
}

/// A division of memory, and the nodes that it gives a history.
pub struct ProfiledSplit {
    /// The division.
    pub split: CacheSplit,
    /// The nodes.
    pub nodes: NodeSet,
    /// What work takes.
    pub seconds: WorkSeconds,
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
    /// Samples an epoch. Rows would be fresh for `staleness` batches.
    pub fn sample(job: &Job, staleness: u32) -> Result<HistoryProfile> {
        let nodes = job.dataset.manifest().nodes.count;
        let (counts, sampling) = (nodes.saturating_mul(NODE_BYTES), job.training_bound().bytes(4));
        let needed = counts.saturating_add(sampling);
        let left = job.strategy_bytes;
        if needed > left {
            return Err(StrategyError::ProfileMemory { needed: ByteCount(needed), left: ByteCount(left) });
        }
        let counting = EpochCounting::new(nodes, staleness);
        let room = left - counts;
        let in_memory = AnyTopology::bytes_for(&job.dataset, job.direction);
        let mut profile = match in_memory.saturating_add(sampling) <= room {
            true => match ResidentTopology::load(job)? {
                ResidentTopology::Narrow(graph) => counting.run(job, &graph, room - in_memory),
                ResidentTopology::Wide(graph) => counting.run(job, &graph, room - in_memory),
            },
            false => {
                let graph = Arc::new(DiskGraph::open(&job.dataset, job.direction)?);
                match job.dataset.manifest().id_dtype() {
                    Dtype::U64 => counting.run(job, &OnDisk::<u64>::new(graph, None), room),
                    _ => counting.run(job, &OnDisk::<u32>::new(graph, None), room),
                }
            }
        }?;
        profile.seconds.row = row_seconds(job)?;
        Ok(profile)
    }

    /// Divides memory between cached rows and a history, and chooses the nodes of the history.
    pub fn split(&self, job: &Job, budget_bytes: u64, history_row_bytes: u64) -> ProfiledSplit {
        self.divided(budget_bytes, job.row_bytes(), history_row_bytes)
    }

    /// The same, with memory that holds a history and no feature rows.
    pub fn split_beside(&self, budget_bytes: u64, history_row_bytes: u64) -> ProfiledSplit {
        self.divided(budget_bytes, u64::MAX, history_row_bytes)
    }

    fn divided(&self, budget_bytes: u64, row_bytes: u64, history_row_bytes: u64) -> ProfiledSplit {
        let count = self.accesses.len();
        let saving = |node: u32| HistorySaving {
            rows: self.rows[node as usize] as f64,
            edges: self.edges[node as usize] as f64,
            computed: self.computed[node as usize] as f64,
        };
        let mut accesses = self.accesses.clone();
        accesses.retain(|count| *count > 0);
        accesses.sort_unstable_by(|one, other| other.cmp(one));
        let seconds = |node: u32| self.seconds.of(&saving(node));
        let mut order: Vec<u32> = (0..count.min(u32::MAX as usize) as u32).collect();
        order.retain(|node| self.computed[*node as usize] > 0);
        // Of equal nodes, the smaller id comes first.
        order.sort_by(|one, other| seconds(*other).total_cmp(&seconds(*one)));
        let savings: Vec<HistorySaving> = order.iter().map(|node| saving(*node)).collect();
        let task = SplitTask {
            budget_bytes,
            row_bytes,
            history_row_bytes,
            accesses: &accesses,
            savings: &savings,
            all: self.all,
            seconds: self.seconds,
        };
        let split = best_splits(&task, 1)[0];
        let mut chosen = order[..split.history_rows as usize].to_vec();
        chosen.sort_unstable();
        let mut next = chosen.iter().copied().peekable();
        let nodes =
            NodeSet::choose(count as u64, |node| next.next_if(|chosen| *chosen as u64 == node.0).is_some());
        ProfiledSplit { split, nodes, seconds: self.seconds }
    }
}

impl EpochCounting {
    fn new(nodes: u64, staleness: u32) -> EpochCounting {
        let count = || vec![0; nodes as usize];
        let (all, seconds) = (HistorySaving::default(), WorkSeconds::default());
        let profile = HistoryProfile {
            accesses: count(),
            rows: count(),
            edges: count(),
            computed: count(),
            all,
            seconds,
            first: Sample::default(),
        };
        EpochCounting { profile, staleness, stamps: count(), batch: 0, owners: Vec::new() }
    }

    /// Samples first hops of the first epoch, then the second one; of a run of one epoch, that one alone.
    fn run<T: Topology>(mut self, job: &Job, graph: &T, most_bytes: u64) -> Result<HistoryProfile> {
        let worker_bytes = job.training_bound().bytes(4).max(1);
        let threads = (most_bytes / worker_bytes).clamp(1, job.threads.max(1) as u64) as usize;
        let of_epoch = |epoch: u64| {
            let batches = job.count(Phase::Train { epoch });
            (batches, (0..batches).map(move |batch| job.sampled_at(Position { epoch, batch })))
        };
        let settings = first_hop(&job.settings);
        let first_hops: Bulk<'_, T, dyn Batches> =
            Bulk { graph, batches: &*job.batches, settings: &settings, threads, most_bytes };
        let bulk = Bulk { settings: &job.settings, ..first_hops };
        let profiled = u64::from(job.epochs > 1);
        if profiled > 0 {
            first_hops.run_with(threads, of_epoch(0).1, |_, sample| {
                self.find_fresh(sample);
                stopped(job)
            })?;
        }
        let (batches, positions) = of_epoch(profiled);
        job.progress.stage("sample for the history", Some(batches), Unit::Count("batches"));
        let started = Instant::now();
        bulk.run_with(threads, positions, |at, sample| {
            if at.batch == 0 {
                self.profile.first = sample.clone();
            }
            self.count(sample);
            job.progress.advance(1);
            stopped(job)
        })?;
        job.progress.finish();
        self.profile.seconds.edge = started.elapsed().as_secs_f64() / self.profile.all.edges.max(1.0);
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
        let all = &mut self.profile.all;
        all.rows += sample.node_ids.len() as f64;
        all.edges += sample.edge_count() as f64;
        all.computed += (0..layers).map(|layer| sample.layer(layer).outputs.len() as f64).sum::<f64>();
        for node in &sample.node_ids {
            let count = &mut self.profile.accesses[node.index()];
            *count = count.saturating_add(1);
        }
        let hop = |hop: usize| offsets[layers - hop]..offsets[layers - hop + 1];
        self.find_fresh(sample);
        for depth in 1..layers {
            let mut next = hop(depth + 1).start;
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
                add(&mut self.profile.computed[id], 1);
                if depth + 1 == layers {
                    add(&mut self.profile.rows[id], next - before);
                    add(&mut self.profile.edges[id], nbrs.len() as u32);
                }
            }
        }
    }
}

/// Fails if a stop was requested.
fn stopped(job: &Job) -> Result<()> {
    if job.stop.is_asked() { Err(StrategyError::Stopped) } else { Ok(()) }
}

/// Seconds to read a feature row from disk, among many at random places.
fn row_seconds(job: &Job) -> Result<f64> {
    let rows = Arc::new(DiskRows::open_with(&job.dataset, job.out_of_core.io_block_bytes)?);
    let (count, dim) = (rows.format().rows(), rows.format().dim());
    let timed = TIMED_ROWS.min(count);
    if timed == 0 || dim == 0 {
        return Ok(0.0);
    }
    let nodes: Vec<NodeId> = (0..timed).map(|index| NodeId(mix(index) % count)).collect();
    let (mut reader, mut values) = (rows.reader()?, vec![0.0; nodes.len() * dim]);
    let started = Instant::now();
    reader.read_all(&nodes, &[], &mut values, &job.pool)?;
    Ok(started.elapsed().as_secs_f64() / timed as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use esker_sample::{Carry, Fanout, Form, InMemory, Sampler, Settings};

    /// Two layers: target 0 has neighbours 1 and 2; 1 has 3 and 4, 2 has 4 and 5.
    #[test]
    fn what_is_found_first_through_a_fresh_neighbour_is_saved_by_it() {
        let lists: Vec<Vec<u64>> =
            vec![vec![1, 2], vec![3, 4], vec![4, 5], vec![], vec![], vec![], vec![1], vec![]];
        let graph = InMemory::<u32>::from_adjacency(&lists, None);
        let fanouts = vec![Fanout::All; 2];
        let settings = Settings { seed: 1, fanouts, form: Form::Dense, carry: Carry::default() };
        let mut sampler = Sampler::new(&graph, settings, 1 << 30).unwrap();
        let mut counting = EpochCounting::new(8, 2);
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
        assert_eq!(profile.computed, [0, 1, 1, 0, 0, 0, 0, 0]);
        // Layer 0 writes the targets and their neighbours, layer 1 the targets.
        assert_eq!((profile.all.rows, profile.all.edges, profile.all.computed), (16.0, 15.0, 11.0));
    }
}
