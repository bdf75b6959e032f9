//! Stages that work at the same time, one thread each, connected by short queues. A stage takes an item, works on it
//! and passes it on. Its time is counted as working (busy), waiting for an item (starved) or waiting for room for its
//! result (blocked). So a run can report its bottleneck.
//!
//! A pipeline always ends. A stage that fails or panics sends an error as its last item. A consumer that is dropped, or
//! has received an error, stops all stages before it, whatever they wait for.

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
    /// The panic message.
    pub message: String,
}

impl StagePanicked {
    fn new(stage: &str, panic: &(dyn Any + Send)) -> StagePanicked {
        let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        StagePanicked { stage: stage.to_string(), message: text.unwrap_or_else(|| "without a word".into()) }
    }
}

/// The context of a stage: its clock, and the signal that the consumer no longer waits for it.
pub struct Stage {
    clock: Arc<StageClock>,
    stopped: Receiver<()>,
}

impl Stage {
    /// Waits for a buffer; the time counts as blocked. `None` once nobody waits for this stage any more: it should end.
    pub fn take<T: Default>(&self, from: &Recycler<T>) -> Option<Recycled<T>> {
        self.clock.blocked(|| from.take(&self.stopped))
    }

    /// Waits for a permit in the same way.
    pub fn permit(&self, from: &Permits) -> Option<Permit> {
        self.permit_of(from, 1)
    }

    /// Waits until `count` permits are free, and takes them as one. There must be as many. Only one stage may do so.
    pub fn permit_of(&self, from: &Permits, count: usize) -> Option<Permit> {
        self.clock.blocked(|| from.take(count, &self.stopped))
    }

    /// Waits until all senders of a channel are dropped, or until nobody waits for this stage any more. The time counts as
    /// blocked.
    pub fn wait_for_drop(&self, of: &Receiver<()>) {
        let _: Option<()> = self.clock.blocked(|| sync::receive_until(of, &self.stopped));
    }

    /// Its clock.
    pub fn clock(&self) -> &StageClock {
        &self.clock
    }
}

/// The output end of a running pipeline: items come out here, in order.
pub struct Pipeline<T, E> {
    /// Dropped first, so that stages stop waiting for buffers or permits.
    stop: Vec<Sender<()>>,
    stopped: Receiver<()>,
    next: Option<Receiver<Result<T, E>>>,
    /// For each stage, the clocks of the threads that share it.
    clocks: Vec<Vec<Arc<StageClock>>>,
    threads: Vec<JoinHandle<()>>,
}

impl<T: Send + 'static, E: From<StagePanicked> + Send + 'static> Pipeline<T, E> {
    /// Starts the first stage. It calls `make` until that returns nothing. `queue` items may wait after it.
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

    /// Merges several pipelines with the same stages, taking one item of each in turn. This is how workers share a
    /// stage and keep its order. The result ends with the first pipeline that ends.
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

    /// Adds a stage at the end. If `work` returns nothing, the pipeline ends.
    pub fn then<U: Send + 'static>(
        self,
        name: &str,
        queue: usize,
        mut work: impl FnMut(&Stage, T) -> Result<Option<U>, E> + Send + 'static,
    ) -> Pipeline<U, E> {
        self.then_with(name, queue, || Ok(()), move |stage, (), item| work(stage, item))
    }

    /// The same with a value that the stage creates on its own thread and that stays there, such as a queue to a disk.
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
    /// The next item. `None` after the last item and after an error.
    pub fn receive(&mut self) -> Option<Result<T, E>> {
        let found = self.next.as_ref()?.recv().ok();
        self.received(found)
    }

    /// The same for a stage of another pipeline: `None`, and the end of this one, also once nobody waits for that stage any
    /// more. What it passed on may still be in a queue then, and this pipeline may wait until that is dropped.
    pub fn receive_for(&mut self, stage: &Stage) -> Option<Result<T, E>> {
        let next = self.next.as_ref()?;
        let found = stage.clock.starved(|| sync::receive_until(next, &stage.stopped));
        self.received(found)
    }

    fn received(&mut self, found: Option<Result<T, E>>) -> Option<Result<T, E>> {
        if !matches!(found, Some(Ok(_))) {
            self.end();
        }
        found
    }

    /// The times of each stage so far, first stage first. If threads share a stage, it is their mean.
    pub fn times(&self) -> Vec<StageTimes> {
        self.clocks.iter().map(|clocks| mean_times(clocks)).collect()
    }

    /// Drops the receiver. The last stage stops at its next item, then each stage before it, and waiting stages give
    /// up.
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

/// Runs work outside a pipeline as a stage would: a panic becomes an error.
pub fn caught<R, E: From<StagePanicked>>(stage: &str, work: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(panic) => Err(StagePanicked::new(stage, &*panic).into()),
    }
}

/// Starts a thread that sends a panic as an error.
fn spawn<T: Send + 'static, E: From<StagePanicked> + Send + 'static>(
    name: &str,
    send: Sender<Result<T, E>>,
    work: impl FnOnce(&Sender<Result<T, E>>) + Send + 'static,
) -> JoinHandle<()> {
    let (builder, stage) = (Builder::new().name(name.to_string()), name.to_string());
    let caught = move || {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&send))) {
            // If nobody waits for it, nobody needs the error.
            let _ = send.send(Err(StagePanicked::new(&stage, &*panic).into()));
        }
    };
    builder.spawn(caught).expect("the system starts a thread")
}
