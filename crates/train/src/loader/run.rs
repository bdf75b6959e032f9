//! A running loader: a thread takes batches from their source, brings them into the order of the caller, and hands them
//! over one at a time. So the next batch is ready while the caller works on this one.

use super::batch::{Handover, LoadedBatch};
use super::config::SeedOrder;
use super::scratch::ScratchFolder;
use crate::{Result, TrainError};
use esker_device::Device;
use esker_fetch::pipeline::{StageClock, StageTimes, caught};
use esker_strategies::{BatchSource, SourceCounters};
use esker_types::StopSignal;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// What the thread of a run starts with.
pub(super) struct RunStart<D: Device> {
    pub source: Box<dyn BatchSource<D>>,
    pub handover: Handover,
    pub order: SeedOrder,
    /// Ends sampling in advance.
    pub stop: StopSignal,
    /// Files that only this run reads.
    pub files: Option<ScratchFolder>,
}

/// Batches from a position on. Dropping it ends its threads and frees its memory.
pub struct LoaderRun {
    /// Dropped first, so that the thread gives up.
    next: Option<Receiver<Result<LoadedBatch>>>,
    thread: Option<JoinHandle<()>>,
    stop: StopSignal,
    counters: Arc<Mutex<SourceCounters>>,
    clock: Arc<StageClock>,
}

impl LoaderRun {
    /// Starts the thread.
    pub(super) fn start<D: Device>(start: RunStart<D>) -> Result<LoaderRun> {
        let (send, next) = sync_channel(0);
        let (counters, clock) = (Arc::<Mutex<SourceCounters>>::default(), StageClock::new("hand over"));
        let (stop, shared, busy) = (start.stop.clone(), counters.clone(), clock.clone());
        let work = move || {
            let failed = send.clone();
            if let Err(error) = caught("hand over", || hand_over(start, &send, &shared, &busy)) {
                // If nobody waits for it, nobody needs the error.
                let _ = failed.send(Err(error));
            }
        };
        let thread = std::thread::Builder::new().name("hand over".into()).spawn(work);
        let thread = thread.map_err(|source| TrainError::Thread { source })?;
        Ok(LoaderRun { next: Some(next), thread: Some(thread), stop, counters, clock })
    }

    /// The next batch. `None` after the last, and after an error.
    pub fn next_batch(&mut self) -> Result<Option<LoadedBatch>> {
        let Some(next) = &self.next else { return Ok(None) };
        let found = self.clock.starved(|| next.recv().ok());
        self.received(found)
    }

    /// The same, unless it takes longer than `most`: then `None` of the outer option.
    pub fn next_within(&mut self, most: Duration) -> Result<Option<Option<LoadedBatch>>> {
        let Some(next) = &self.next else { return Ok(Some(None)) };
        match self.clock.starved(|| next.recv_timeout(most)) {
            Ok(found) => self.received(Some(found)).map(Some),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => self.received(None).map(Some),
        }
    }

    /// What its stages have done so far, as of the batch that was handed over last.
    pub fn counters(&self) -> SourceCounters {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Times of the thread that hands batches over. Starved is the time for which the caller waited.
    pub fn times(&self) -> StageTimes {
        self.clock.times()
    }

    /// Asks for the end. Batches that are being made are given up soon; dropping the run waits for that.
    pub fn stop(&mut self) {
        self.stop.ask();
        self.next = None;
    }

    fn received(&mut self, found: Option<Result<LoadedBatch>>) -> Result<Option<LoadedBatch>> {
        if !matches!(found, Some(Ok(_))) {
            self.next = None;
        }
        found.transpose()
    }
}

impl Drop for LoaderRun {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Hands over batch after batch, until nobody waits for one.
fn hand_over<D: Device>(
    start: RunStart<D>,
    send: &SyncSender<Result<LoadedBatch>>,
    counters: &Mutex<SourceCounters>,
    clock: &StageClock,
) -> Result<()> {
    // Threads that read the files end first: what is bound last is dropped first, also after an error.
    let RunStart { source, handover, order, stop, files, .. } = start;
    let _files = files;
    let mut source = source;
    while let Some(batch) = source.next()? {
        let handed = clock.busy(|| {
            let items = order.items(batch.at.position())?;
            handover.take(batch, items)
        })?;
        *counters.lock().unwrap_or_else(PoisonError::into_inner) = source.counters();
        if clock.blocked(|| send.send(Ok(handed)).is_err()) || stop.is_asked() {
            break;
        }
    }
    Ok(())
}
