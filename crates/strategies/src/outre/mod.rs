//! Request less data (OUTRE, VLDB 2024). Batches come by groups of partitions, so that their seeds share neighbours
//! (`--order groups`). A history supplies what enters the last layer for neighbours of targets, so that what lies behind
//! them is neither sampled nor read. The rest is Ginex's: superbatches, and the cache of feature rows that is best for the
//! accesses that are known. The paper keeps the most accessed rows instead.
//!
//! ```text
//!  positions ── first hops ──> stamps ── pulled nodes ──> deep hops ──> trace ── plan, gather ──> Batch ── step
//!  (order by     (in parallel)  (batch by batch)          (in parallel)   (as ginex)              exchange:   │
//!   groups)                                                                                       pull, push  │
//!                                                 history ◄──────────────────── Feedback ────────────────────┘
//! ```
//!
//! Which nodes have a history is part of the job, so `memory` trains with the same ones and gives the same losses. The
//! neighbour cache is ginex's, see `neighbours.rs`.

use crate::ginex::{self, Ginex};
use crate::history::{self, History, HistorySource, OpenHistory, PullsAhead};
use crate::phases::Phases;
use crate::{
    BatchSource, CheckpointReader, Inference, Job, JobOutline, Needs, Prepared, Result, RunPosition, Strategy,
};
use esker_device::Device;

/// OUTRE for a device.
pub struct Outre<D> {
    device: D,
    ginex: Ginex<D>,
}

/// The memory it needs.
pub fn needs(job: &JobOutline) -> Result<Needs> {
    let mut needs = ginex::needs(job)?;
    history::add_needs(job, &mut needs);
    Ok(needs)
}

/// The strategy, not yet prepared.
pub fn strategy<D: Clone>(device: D) -> Outre<D> {
    Outre { ginex: ginex::strategy(device.clone()), device }
}

impl<D: Device> Strategy<D> for Outre<D> {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        needs(job)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared> {
        let mut prepared = self.ginex.prepare(job)?;
        prepared.notes.extend(History::of(job).iter().map(History::note));
        Ok(prepared)
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let Some(history) = History::of(job) else { return self.ginex.batches(job, from, state) };
        let opened = OpenHistory::open(&self.device, history.clone(), state)?;
        let ahead = PullsAhead::new(history, opened.stamps.clone());
        let batches = self.ginex.training(job, from, Some(ahead))?;
        let training = Box::new(HistorySource::new(batches, &self.device, opened));
        Ok(Box::new(Phases::new(job, from, training, self.ginex.graph())))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        history::leave(state)?;
        self.ginex.inference(job, over, None)
    }
}
