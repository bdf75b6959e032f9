//! Clocks of pipeline stages.

use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How a stage spent its time, in seconds.
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

/// The time in which at least one of several threads was busy.
#[derive(Debug, Default)]
pub struct AnyBusy(Mutex<Busy>);

#[derive(Debug, Default)]
struct Busy {
    threads: usize,
    since: Option<Instant>,
    passed: Duration,
}

impl AnyBusy {
    /// Runs `work` and counts its time.
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

    /// The time counted so far.
    pub fn passed(&self) -> Duration {
        let busy = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        busy.passed + busy.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// Counts one stage's time. The stage shares it with its observers.
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

    /// Runs `work` and counts its time as busy, and one item. Time that `work` counts as waiting is not busy. For one
    /// thread.
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

    /// The times so far.
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
    /// The times since `before`. A stage that was started again since then has begun to count anew.
    pub fn since(&self, before: &StageTimes) -> StageTimes {
        if self.items < before.items || self.busy < before.busy {
            return self.clone();
        }
        StageTimes {
            name: self.name.clone(),
            items: self.items - before.items,
            busy: self.busy - before.busy,
            starved: self.starved - before.starved,
            blocked: self.blocked - before.blocked,
        }
    }
}

/// The sum of items and the mean of times.
pub(super) fn mean_times(clocks: &[Arc<StageClock>]) -> StageTimes {
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
