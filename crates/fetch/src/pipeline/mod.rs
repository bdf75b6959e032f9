//! Stages that work at the same time, each a thread, joined by short queues. A stage takes an item, works on it and hands
//! it on; the time it spends working (busy), without an item (starved) and without room for its result (blocked) is
//! counted, so that a run can say what it was bound by.
//!
//! A pipeline always comes to an end: a stage that fails or panics hands an error on as the last item, and a consumer that
//! goes away, or has met an error, stops everything before it, whatever it waits for.

mod clock;
mod recycle;

pub use clock::{AnyBusy, StageClock, StageTimes};
pub use recycle::{Permit, Permits, Recycled, Recycler};

use super::sync::{self, Builder, JoinHandle, Receiver, Sender, bounded};
use clock::mean_times;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A stage that panicked, which is a bug: its run ends with this error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the stage `{stage}` ended unexpectedly ({message}); this is a bug of esker: report it, and resume the run"
)]
pub struct StagePanicked {
    /// Its name.
    pub stage: String,
    /// What it said.
    pub message: String,
}

impl StagePanicked {
    fn new(stage: &str, panic: &(dyn Any + Send)) -> StagePanicked {
        let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        StagePanicked { stage: stage.to_string(), message: text.unwrap_or_else(|| "without a word".into()) }
    }
}

/// What a stage works with: its clock, and the consumer's word that nobody waits for it any more.
pub struct Stage {
    clock: Arc<StageClock>,
    stopped: Receiver<()>,
}

impl Stage {
    /// A buffer, as soon as there is one; waiting counts as blocked. `None` once nobody waits for this stage any more: it is
    /// to end.
    pub fn take<T: Default>(&self, from: &Recycler<T>) -> Option<Recycled<T>> {
        self.clock.blocked(|| from.take(&self.stopped))
    }

    /// A permit, likewise.
    pub fn permit(&self, from: &Permits) -> Option<Permit> {
        self.clock.blocked(|| from.take(&self.stopped))
    }

    /// Its clock.
    pub fn clock(&self) -> &StageClock {
        &self.clock
    }
}

/// The running end of a pipeline: items come out here, in order.
pub struct Pipeline<T, E> {
    /// Dropped first: stages that wait for buffers or permits give up.
    stop: Vec<Sender<()>>,
    stopped: Receiver<()>,
    next: Option<Receiver<Result<T, E>>>,
    /// For each stage the clocks of the threads that share it.
    clocks: Vec<Vec<Arc<StageClock>>>,
    threads: Vec<JoinHandle<()>>,
}

impl<T: Send + 'static, E: From<StagePanicked> + Send + 'static> Pipeline<T, E> {
    /// Starts the first stage: `make` is called until it has nothing more. `queue` items may wait after it.
    pub fn start(
        name: &str,
        queue: usize,
        mut make: impl FnMut(&Stage) -> Result<Option<T>, E> + Send + 'static,
    ) -> Pipeline<T, E> {
        let (stop, stopped) = bounded(0);
        let (send, next) = bounded(queue);
        let stage = Stage { clock: StageClock::new(name), stopped: stopped.clone() };
        let clock = stage.clock.clone();
        let thread = spawn(name, send, move |send| {
            while let Some(item) = stage.clock.busy(|| make(&stage)).transpose() {
                let failed = item.is_err();
                if stage.clock.blocked(|| send.send(item)).is_err() || failed {
                    return;
                }
            }
        });
        Pipeline {
            stop: vec![stop],
            stopped,
            next: Some(next),
            clocks: vec![vec![clock]],
            threads: vec![thread],
        }
    }

    /// The items of several pipelines with the same stages, one of each in turn: how workers share a stage and keep its order.
    /// The first that ends is the end.
    pub fn in_turn(mut parts: Vec<Pipeline<T, E>>) -> Pipeline<T, E> {
        if parts.len() == 1 {
            return parts.remove(0);
        }
        let (own_stop, stopped) = bounded(0);
        let (send, next) = bounded(1);
        let (mut receivers, mut threads, mut stop) = (Vec::new(), Vec::new(), vec![own_stop]);
        let mut clocks: Vec<Vec<Arc<StageClock>>> = Vec::new();
        for part in &mut parts {
            stop.append(&mut part.stop);
            receivers.extend(part.next.take());
            threads.append(&mut part.threads);
            for (stage, own) in std::mem::take(&mut part.clocks).into_iter().enumerate() {
                clocks.resize_with(clocks.len().max(stage + 1), Vec::new);
                clocks[stage].extend(own);
            }
        }
        threads.push(spawn("in turn", send, move |send| {
            for receiver in receivers.iter().cycle() {
                let Ok(item) = receiver.recv() else { return };
                let failed = item.is_err();
                if send.send(item).is_err() || failed {
                    return;
                }
            }
        }));
        Pipeline { stop, stopped, next: Some(next), clocks, threads }
    }

    /// Adds a stage after the last. `work` that has nothing to hand on ends the pipeline.
    pub fn then<U: Send + 'static>(
        self,
        name: &str,
        queue: usize,
        mut work: impl FnMut(&Stage, T) -> Result<Option<U>, E> + Send + 'static,
    ) -> Pipeline<U, E> {
        self.then_with(name, queue, || Ok(()), move |stage, (), item| work(stage, item))
    }

    /// The same with something that the stage makes on its own thread, and that stays there: a queue to a disk.
    pub fn then_with<U: Send + 'static, S>(
        mut self,
        name: &str,
        queue: usize,
        make: impl FnOnce() -> Result<S, E> + Send + 'static,
        mut work: impl FnMut(&Stage, &mut S, T) -> Result<Option<U>, E> + Send + 'static,
    ) -> Pipeline<U, E> {
        let (send, next): (Sender<Result<U, E>>, _) = bounded(queue);
        let stage = Stage { clock: StageClock::new(name), stopped: self.stopped.clone() };
        let (clock, input) = (stage.clock.clone(), self.next.take());
        let thread = spawn(name, send, move |send| {
            let Some(input) = input else { return };
            let mut made = match make() {
                Ok(made) => made,
                Err(error) => return drop(send.send(Err(error))),
            };
            while let Ok(item) = stage.clock.starved(|| input.recv()) {
                let item = item.and_then(|item| stage.clock.busy(|| work(&stage, &mut made, item)));
                let Some(item) = item.transpose() else { return };
                let failed = item.is_err();
                if stage.clock.blocked(|| send.send(item)).is_err() || failed {
                    return;
                }
            }
        });
        let (stop, stopped) = (std::mem::take(&mut self.stop), self.stopped.clone());
        let mut clocks = std::mem::take(&mut self.clocks);
        let mut threads = std::mem::take(&mut self.threads);
        clocks.push(vec![clock]);
        threads.push(thread);
        Pipeline { stop, stopped, next: Some(next), clocks, threads }
    }
}

impl<T, E> Pipeline<T, E> {
    /// The next item; `None` after the last, and after an error: nothing follows it.
    pub fn receive(&mut self) -> Option<Result<T, E>> {
        match self.next.as_ref()?.recv() {
            Ok(Ok(item)) => Some(Ok(item)),
            Ok(Err(error)) => {
                self.end();
                Some(Err(error))
            }
            Err(_) => {
                self.end();
                None
            }
        }
    }

    /// What each stage did with its time so far, first stage first; the mean where threads share it.
    pub fn times(&self) -> Vec<StageTimes> {
        self.clocks.iter().map(|clocks| mean_times(clocks)).collect()
    }

    /// Without a receiver the last stage stops at its next item, each stage before it likewise, and who waits gives up.
    fn end(&mut self) {
        self.stop.clear();
        self.next = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl<T, E> Drop for Pipeline<T, E> {
    fn drop(&mut self) {
        self.end();
    }
}

/// Runs work beside a pipeline as a stage would: a panic is an error.
pub fn caught<R, E: From<StagePanicked>>(stage: &str, work: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(panic) => Err(StagePanicked::new(stage, &*panic).into()),
    }
}

/// A thread that hands a panic on as an error.
fn spawn<T: Send + 'static, E: From<StagePanicked> + Send + 'static>(
    name: &str,
    send: Sender<Result<T, E>>,
    work: impl FnOnce(&Sender<Result<T, E>>) + Send + 'static,
) -> JoinHandle<()> {
    let (builder, stage) = (Builder::new().name(name.to_string()), name.to_string());
    let caught = move || {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&send))) {
            // Where nobody waits for it, nobody needs to know.
            let _ = send.send(Err(StagePanicked::new(&stage, &*panic).into()));
        }
    };
    builder.spawn(caught).expect("the system starts a thread")
}
