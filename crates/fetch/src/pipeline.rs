//! Stages that work at the same time, each a thread, joined by short queues. A stage takes an item, works on it and hands
//! it on; the time it spends working (busy), without an item (starved) and without room for its result (blocked) is
//! counted, so that a run can say what it was bound by. A stage that fails hands its error on as the last item; a
//! consumer that goes away stops everything before it.

use crossbeam_channel::{Receiver, Sender, bounded};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What a stage did with its time, in seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StageTimes {
    /// Its name.
    pub name: String,
    /// Items that went through it.
    pub items: u64,
    /// Working.
    pub busy: f64,
    /// Waiting for an item.
    pub starved: f64,
    /// Waiting for room.
    pub blocked: f64,
}

/// The time in which any of several threads was at something.
#[derive(Debug, Default)]
pub struct AnyBusy(Mutex<Busy>);

#[derive(Debug, Default)]
struct Busy {
    threads: usize,
    since: Option<Instant>,
    passed: Duration,
}

impl AnyBusy {
    /// Runs `work`; the clock runs meanwhile.
    pub fn busy<R>(&self, work: impl FnOnce() -> R) -> R {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut busy = lock();
            busy.threads += 1;
            busy.since.get_or_insert_with(Instant::now);
        }
        let result = work();
        let mut busy = lock();
        busy.threads -= 1;
        if busy.threads == 0
            && let Some(since) = busy.since.take()
        {
            busy.passed += since.elapsed();
        }
        result
    }

    /// What it shows.
    pub fn passed(&self) -> Duration {
        let busy = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        busy.passed + busy.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// Counts one stage's time; shared by the stage and whoever asks.
#[derive(Debug, Default)]
pub struct StageClock {
    name: String,
    items: AtomicU64,
    busy: AtomicU64,
    starved: AtomicU64,
    blocked: AtomicU64,
}

impl StageClock {
    /// A clock at zero.
    pub fn new(name: &str) -> Arc<StageClock> {
        Arc::new(StageClock { name: name.to_string(), ..StageClock::default() })
    }

    /// Runs `work` and counts its time as busy, and one item. What `work` counts as waiting is not busy. For one thread.
    pub fn busy<R>(&self, work: impl FnOnce() -> R) -> R {
        self.items.fetch_add(1, Ordering::Relaxed);
        let waited = || self.starved.load(Ordering::Relaxed) + self.blocked.load(Ordering::Relaxed);
        let (before, started) = (waited(), Instant::now());
        let result = work();
        let worked = (started.elapsed().as_nanos() as u64).saturating_sub(waited() - before);
        self.busy.fetch_add(worked, Ordering::Relaxed);
        result
    }

    /// Runs `wait` and counts its time as starved.
    pub fn starved<R>(&self, wait: impl FnOnce() -> R) -> R {
        timed(&self.starved, wait)
    }

    /// Runs `wait` and counts its time as blocked.
    pub fn blocked<R>(&self, wait: impl FnOnce() -> R) -> R {
        timed(&self.blocked, wait)
    }

    /// What it counted so far.
    pub fn times(&self) -> StageTimes {
        let seconds = |nanoseconds: &AtomicU64| nanoseconds.load(Ordering::Relaxed) as f64 * 1e-9;
        StageTimes {
            name: self.name.clone(),
            items: self.items.load(Ordering::Relaxed),
            busy: seconds(&self.busy),
            starved: seconds(&self.starved),
            blocked: seconds(&self.blocked),
        }
    }
}

impl StageTimes {
    /// What was counted since `before`.
    pub fn since(&self, before: &StageTimes) -> StageTimes {
        StageTimes {
            name: self.name.clone(),
            items: self.items - before.items,
            busy: self.busy - before.busy,
            starved: self.starved - before.starved,
            blocked: self.blocked - before.blocked,
        }
    }
}

/// Items of all, and the mean of their times.
fn mean_times(clocks: &[Arc<StageClock>]) -> StageTimes {
    let mut mean = StageTimes::default();
    for times in clocks.iter().map(|clock| clock.times()) {
        let share = |seconds: f64| seconds / clocks.len() as f64;
        mean.name = times.name;
        mean.items += times.items;
        mean.busy += share(times.busy);
        mean.starved += share(times.starved);
        mean.blocked += share(times.blocked);
    }
    mean
}

fn timed<R>(counter: &AtomicU64, work: impl FnOnce() -> R) -> R {
    let started = Instant::now();
    let result = work();
    counter.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
    result
}

/// The running end of a pipeline: items come out here, in order.
pub struct Pipeline<T, E> {
    next: Option<Receiver<Result<T, E>>>,
    /// For each stage the clocks of the threads that share it.
    clocks: Vec<Vec<Arc<StageClock>>>,
    threads: Vec<JoinHandle<()>>,
}

impl<T: Send + 'static, E: Send + 'static> Pipeline<T, E> {
    /// Starts the first stage: `make` is called until it has nothing more. `queue` items may wait behind it.
    pub fn start(
        name: &str,
        queue: usize,
        mut make: impl FnMut(&StageClock) -> Result<Option<T>, E> + Send + 'static,
    ) -> Pipeline<T, E> {
        let (send, next) = bounded(queue);
        let clock = StageClock::new(name);
        let mine = clock.clone();
        let thread = spawn(name, move || {
            while let Some(item) = mine.busy(|| make(&mine)).transpose() {
                let failed = item.is_err();
                if mine.blocked(|| send.send(item)).is_err() || failed {
                    return;
                }
            }
        });
        Pipeline { next: Some(next), clocks: vec![vec![clock]], threads: vec![thread] }
    }

    /// The items of several pipelines with the same stages, one of each in turn: how threads share a stage and keep its order.
    /// The first that ends is the end.
    pub fn in_turn(mut parts: Vec<Pipeline<T, E>>) -> Pipeline<T, E> {
        let (send, next) = bounded(1);
        let (mut receivers, mut threads) = (Vec::new(), Vec::new());
        let mut clocks: Vec<Vec<Arc<StageClock>>> = Vec::new();
        for part in &mut parts {
            receivers.extend(part.next.take());
            threads.append(&mut part.threads);
            for (stage, own) in std::mem::take(&mut part.clocks).into_iter().enumerate() {
                clocks.resize_with(clocks.len().max(stage + 1), Vec::new);
                clocks[stage].extend(own);
            }
        }
        let thread = spawn("in turn", move || {
            for receiver in receivers.iter().cycle() {
                let Ok(item) = receiver.recv() else { return };
                let failed = item.is_err();
                if send.send(item).is_err() || failed {
                    return;
                }
            }
        });
        threads.push(thread);
        Pipeline { next: Some(next), clocks, threads }
    }

    /// Adds a stage behind the last. `work` that has nothing to hand on ends the pipeline.
    pub fn then<U: Send + 'static>(
        self,
        name: &str,
        queue: usize,
        mut work: impl FnMut(&StageClock, T) -> Result<Option<U>, E> + Send + 'static,
    ) -> Pipeline<U, E> {
        self.then_with(name, queue, || Ok(()), move |clock, (), item| work(clock, item))
    }

    /// The same with something that the stage makes on its own thread, and that stays there: a queue to a disk.
    pub fn then_with<U: Send + 'static, S>(
        mut self,
        name: &str,
        queue: usize,
        make: impl FnOnce() -> Result<S, E> + Send + 'static,
        mut work: impl FnMut(&StageClock, &mut S, T) -> Result<Option<U>, E> + Send + 'static,
    ) -> Pipeline<U, E> {
        let (send, next): (Sender<Result<U, E>>, _) = bounded(queue);
        let clock = StageClock::new(name);
        let (mine, input) = (clock.clone(), self.next.take());
        let thread = spawn(name, move || {
            let Some(input) = input else { return };
            let mut made = match make() {
                Ok(made) => made,
                Err(error) => return drop(send.send(Err(error))),
            };
            while let Ok(item) = mine.starved(|| input.recv()) {
                let item = item.and_then(|item| mine.busy(|| work(&mine, &mut made, item)));
                let Some(item) = item.transpose() else { return };
                let failed = item.is_err();
                if mine.blocked(|| send.send(item)).is_err() || failed {
                    return;
                }
            }
        });
        let mut clocks = std::mem::take(&mut self.clocks);
        let mut threads = std::mem::take(&mut self.threads);
        clocks.push(vec![clock]);
        threads.push(thread);
        Pipeline { next: Some(next), clocks, threads }
    }
}

impl<T, E> Pipeline<T, E> {
    /// The next item; `None` behind the last. A stage that panicked panics here: a pipeline that lost one must not look
    /// as if it had come to its end.
    pub fn receive(&mut self) -> Option<Result<T, E>> {
        if let Ok(item) = self.next.as_ref()?.recv() {
            return Some(item);
        }
        self.next = None;
        for thread in self.threads.drain(..) {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
        None
    }

    /// What each stage did with its time so far, first stage first; the mean where threads share it.
    pub fn times(&self) -> Vec<StageTimes> {
        self.clocks.iter().map(|clocks| mean_times(clocks)).collect()
    }
}

impl<T, E> Drop for Pipeline<T, E> {
    fn drop(&mut self) {
        // Without a receiver the last stage stops at its next item, and each stage before it likewise.
        self.next = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let builder = std::thread::Builder::new().name(name.to_string());
    builder.spawn(work).expect("the system starts a thread")
}

/// Buffers that go round: a stage takes one, and whoever is done with it puts it back. Waiting for one is how a stage is
/// kept from running ahead of its memory.
#[derive(Debug)]
pub struct Buffers<T> {
    put: Sender<T>,
    take: Receiver<T>,
}

impl<T> Clone for Buffers<T> {
    fn clone(&self) -> Buffers<T> {
        Buffers { put: self.put.clone(), take: self.take.clone() }
    }
}

impl<T: Default> Buffers<T> {
    /// So many empty buffers.
    pub fn new(count: usize) -> Buffers<T> {
        let (put, take) = bounded(count);
        (0..count).for_each(|_| drop(put.try_send(T::default())));
        Buffers { put, take }
    }
}

impl<T> Buffers<T> {
    /// A buffer, as soon as there is one. `None` once `stop` is dropped elsewhere.
    pub fn take(&self, stop: &Receiver<()>) -> Option<T> {
        crossbeam_channel::select! {
            recv(self.take) -> buffer => buffer.ok(),
            recv(stop) -> _ => None,
        }
    }

    /// Puts a buffer back.
    pub fn put(&self, buffer: T) {
        // There is room for all that were made.
        let _ = self.put.try_send(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn numbers(range: impl Iterator<Item = u64> + Send + 'static) -> Pipeline<u64, String> {
        let mut range = range;
        Pipeline::start("make", 2, move |_| Ok(range.next()))
    }

    fn pause() {
        std::thread::sleep(Duration::from_millis(1));
    }

    #[test]
    fn items_come_out_in_order_and_times_add_up() {
        let started = Instant::now();
        let mut line = numbers(0..50).then("double", 2, |clock, number| {
            clock.starved(pause);
            pause();
            Ok(Some(number * 2))
        });
        let mut found = Vec::new();
        while let Some(item) = line.receive() {
            found.push(item.unwrap());
        }
        assert!(found.into_iter().eq((0..50).map(|number| number * 2)));
        let (times, wall) = (line.times(), started.elapsed().as_secs_f64());
        assert_eq!((times[0].items, times[1].items), (51, 50));
        assert!(times[1].busy >= 0.05 && times[1].starved >= 0.05, "{times:?}");
        assert!(times[0].blocked > times[0].busy, "{times:?}");
        assert!(times.iter().all(|stage| stage.busy + stage.starved + stage.blocked <= wall), "{times:?}");
    }

    #[test]
    fn pipelines_in_turn_keep_the_order_and_their_errors_and_panics() {
        let part = |first: u64, last: u64| {
            let mut numbers = (first..last).step_by(3);
            Pipeline::start("part", 1, move |_| match numbers.next() {
                Some(91) => Err("ninety-one".to_string()),
                number => Ok(number),
            })
        };
        let mut line = Pipeline::in_turn((0..3).map(|first| part(first, 50)).collect());
        for expected in 0..50 {
            assert_eq!(line.receive(), Some(Ok(expected)));
        }
        assert_eq!(line.receive(), None);
        assert_eq!((line.times().len(), line.times()[0].items), (1, 53));
        let mut line = Pipeline::in_turn((0..3).map(|first| part(first, u64::MAX)).collect());
        for expected in 0..91 {
            assert_eq!(line.receive(), Some(Ok(expected)));
        }
        assert_eq!(line.receive(), Some(Err("ninety-one".to_string())));
        let broken = Pipeline::<u64, String>::start("broken", 1, |_| panic!("broken"));
        let mut line = Pipeline::in_turn(vec![part(0, 10), broken]);
        let found =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| while line.receive().is_some() {}));
        assert!(found.is_err());
        drop(Pipeline::in_turn((0..3).map(|first| part(first, u64::MAX)).collect()));
    }

    #[test]
    fn an_error_comes_out_last_and_stops_the_stages() {
        let mut line = numbers(0..).then("check", 1, |_, number| match number {
            5 => Err("five".to_string()),
            number => Ok(Some(number)),
        });
        for expected in 0..5 {
            assert_eq!(line.receive(), Some(Ok(expected)));
        }
        assert_eq!(line.receive(), Some(Err("five".to_string())));
        assert_eq!(line.receive(), None);
    }

    #[test]
    fn a_consumer_that_goes_away_stops_endless_stages() {
        let mut line = numbers(0..).then("pass", 1, |_, number| Ok(Some(number)));
        assert_eq!(line.receive(), Some(Ok(0)));
        drop(line);
    }

    #[test]
    fn a_stage_that_panics_is_not_an_end() {
        let mut line = numbers(0..).then("break", 1, |_, number| {
            assert!(number < 3, "three");
            Ok(Some(number))
        });
        let found =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| while line.receive().is_some() {}));
        assert!(found.is_err());
    }

    #[test]
    fn buffers_go_round_and_a_stop_ends_the_wait() {
        let buffers: Buffers<Vec<u8>> = Buffers::new(2);
        let (stop, stopped) = bounded::<()>(0);
        let (first, _second) = (buffers.take(&stopped).unwrap(), buffers.take(&stopped).unwrap());
        buffers.put(first);
        assert!(buffers.take(&stopped).is_some());
        drop(stop);
        assert!(buffers.take(&stopped).is_none());
    }
}
