//! What an epoch does with a history of some nodes, without training: it is sampled with their pulls, and the cache of
//! feature rows is planned over what it accesses, with the memory that this history leaves.

use super::profile::{OnTopology, first_hop_edges, on_topology, positions_of, sampling_threads, stopped};
use super::{History, HistoryProfile, PullsAhead, SharedStamps, Stamps, weighted_rows};
use crate::ginex::RowCacheSizes;
use crate::{CachePolicy, Job, Result};
use esker_fetch::{AccessFile, PlanFile, StoredRow};
use esker_plan::{Belady, EpochWork, StaticRows};
use esker_sample::bulk::{BatchPulls, Bulk};
use esker_sample::{Batches, Position, Sample, Topology};
use esker_store::StoreError;
use esker_types::{Dtype, NodeId, Unit};

impl HistoryProfile {
    /// Replays the profiled epoch with the history of a job, or without one.
    pub fn replay(&self, job: &Job) -> Result<EpochWork> {
        let ahead = History::of(job).map(|history| {
            let stamps = self.stamps_of(&history);
            PullsAhead::new(history, SharedStamps::new(stamps))
        });
        on_topology(job, self.epoch.memory_bytes, Replay { profile: self, ahead })
    }

    /// The stamps that a history of these nodes has before the epoch. A row is pushed whenever it is not pulled, so the
    /// rows of other nodes make no difference to it. Only first hops were profiled: rows of later ones are not there yet.
    fn stamps_of(&self, history: &History) -> Stamps {
        let (all, nodes) = (&self.epoch.stamps, &history.nodes);
        let members = (0..all.len()).filter(|node| nodes.slot(NodeId(*node as u64)).is_some());
        let mut of_slot: Vec<u32> = members.map(|node| all[node]).collect();
        of_slot.resize(of_slot.len() * history.outline.hops, 0);
        Stamps { of_slot, batch: self.epoch.before + 1 }
    }
}

struct Replay<'a> {
    profile: &'a HistoryProfile,
    ahead: Option<PullsAhead>,
}

impl OnTopology for Replay<'_> {
    type Output = EpochWork;

    fn run<T: Topology>(self, job: &Job, graph: &T, most_bytes: u64) -> Result<EpochWork> {
        match job.dataset.manifest().id_dtype() {
            Dtype::U64 => self.epoch::<u64, T>(job, graph, most_bytes),
            _ => self.epoch::<u32, T>(job, graph, most_bytes),
        }
    }
}

impl Replay<'_> {
    fn epoch<W: StoredRow, T: Topology>(
        mut self,
        job: &Job,
        graph: &T,
        most_bytes: u64,
    ) -> Result<EpochWork> {
        let (sizes, threads) = (RowCacheSizes::of(job)?, sampling_threads(job, most_bytes));
        let bulk: Bulk<'_, T, dyn Batches> =
            Bulk { graph, batches: &*job.batches, settings: &job.settings, threads, most_bytes };
        let positions = positions_of(job, self.profile.epoch.number);
        let superbatch = sizes.superbatch().max(1) as usize;
        job.progress.stage("replay a history", Some(positions.len() as u64), Unit::Count("batches"));
        let stay = match job.out_of_core.cache {
            CachePolicy::Belady => None,
            CachePolicy::Static => Some(self.stay::<W, T>(job, &bulk, superbatch)?),
        };
        let mut work = EpochWork::default();
        for superbatch in positions.chunks(superbatch) {
            self.superbatch::<W, T>(job, &bulk, superbatch, &sizes, stay.as_ref(), &mut work)?;
        }
        job.progress.finish();
        Ok(work)
    }

    /// The rows of a static cache: those that the first superbatch of the run accesses most, as far as that is of the
    /// first epoch. No row was pushed before it.
    fn stay<W: StoredRow, T: Topology>(
        &self,
        job: &Job,
        bulk: &Bulk<'_, T, dyn Batches + '_>,
        superbatch: usize,
    ) -> Result<StaticRows> {
        let mut ahead = History::of(job).map(|history| {
            let slots = history.nodes.count() * history.outline.hops as u64;
            PullsAhead::new(history, SharedStamps::new(Stamps::new(slots)))
        });
        let mut positions = positions_of(job, 0);
        positions.truncate(superbatch);
        let (accesses, _) = accessed::<W, T>(job, bulk, &positions, &mut ahead, |_| ())?;
        Ok(StaticRows::choose(job.dataset.manifest().nodes.count, &mut &accesses)?)
    }

    /// Samples some batches that are planned together, and plans them. A cache is empty before them.
    fn superbatch<W: StoredRow, T: Topology>(
        &mut self,
        job: &Job,
        bulk: &Bulk<'_, T, dyn Batches + '_>,
        positions: &[Position],
        sizes: &RowCacheSizes,
        stay: Option<&StaticRows>,
        work: &mut EpochWork,
    ) -> Result<()> {
        let (weights, has_history) = (&self.profile.epoch.weights, self.ahead.is_some());
        let (accesses, sample_bytes) = accessed::<W, T>(job, bulk, positions, &mut self.ahead, |sample| {
            work.batches += 1.0;
            work.rows += sample.node_ids.len() as f64;
            work.edges += sample.edge_count() as f64;
            work.computed += weighted_rows(sample, weights);
            if has_history {
                work.decided_edges += first_hop_edges(sample);
            }
            job.progress.advance(1);
        })?;
        let slots = sizes.slots(job, accesses.largest(), sample_bytes)?;
        let tally = match stay {
            Some(stay) => stay.plan(slots, &mut &accesses, |_, _| Ok(()))?,
            None => {
                let plan = PlanFile::create(&accesses)?;
                let mut uses = plan.next_uses(0..positions.len() as u32)?;
                let nodes = job.dataset.manifest().nodes.count;
                let mut planner = Belady::<W>::new(nodes, slots, positions.len() as u32);
                planner.plan(&mut &accesses, &mut uses, |_, _| Ok(()))?
            }
        };
        work.misses += (tally.accesses - tally.hits) as f64;
        Ok(())
    }
}

/// Samples some batches: the rows that they access, and the bytes of the largest sample. `ahead` decides what they pull.
fn accessed<W: StoredRow, T: Topology>(
    job: &Job,
    bulk: &Bulk<'_, T, dyn Batches + '_>,
    positions: &[Position],
    ahead: &mut Option<PullsAhead>,
    mut see: impl FnMut(&Sample),
) -> Result<(AccessFile<W>, u64)> {
    let folder = &job.out_of_core.scratch;
    std::fs::create_dir_all(folder).map_err(StoreError::io(folder))?;
    let mut accesses = AccessFile::<W>::create(folder)?;
    let decided = ahead.as_ref().map(|ahead| ahead.decide(bulk, positions, &job.stop)).transpose()?;
    let is_pulled =
        |at, hop, index, _: NodeId| decided.as_ref().is_some_and(|decided| decided.is_pulled(at, hop, index));
    let pulls = decided.is_some().then_some(&is_pulled as &BatchPulls<'_>);
    let mut sample_bytes = 0;
    bulk.run_with_pulls(bulk.threads, positions.iter().copied(), pulls, |_, sample| {
        accesses.append(&sample.node_ids, &[])?;
        sample_bytes = sample_bytes.max(sample.bytes());
        if let Some(ahead) = ahead {
            ahead.advance(sample);
        }
        see(sample);
        stopped(&job.stop)
    })?;
    accesses.close();
    Ok((accesses, sample_bytes))
}
