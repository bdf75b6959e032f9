use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

/// The unit of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown with units.
    Bytes,
    /// Things of this name.
    Count(&'static str),
}

impl Unit {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Unit::Bytes => "bytes",
            Unit::Count(name) => name,
        }
    }
}

/// Receives progress reports of long work. Stages follow one another; `advance` may be called from any thread.
pub trait Progress: Sync {
    /// A stage starts. `total` is given if known.
    fn stage(&self, name: &str, total: Option<u64>, unit: Unit);
    /// This much more of the current stage is done.
    fn advance(&self, amount: u64);
    /// The current stage is finished.
    fn finish(&self);
    /// A message that the user should read once.
    fn note(&self, text: &str);
}

/// Ignores all reports.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn stage(&self, _: &str, _: Option<u64>, _: Unit) {}
    fn advance(&self, _: u64) {}
    fn finish(&self) {}
    fn note(&self, _: &str) {}
}

/// Records the duration of stages, and shows nothing.
#[derive(Debug, Default)]
pub struct Recorded {
    done: AtomicU64,
    stages: Mutex<Vec<StageTaken>>,
}

/// A finished stage, or the current one.
#[derive(Debug, Clone)]
pub struct StageTaken {
    /// Its name.
    pub name: String,
    /// Its unit.
    pub unit: Unit,
    /// The amount done.
    pub amount: u64,
    /// When it began.
    pub began: Instant,
    /// When it ended, if it has.
    pub ended: Option<Instant>,
}

impl StageTaken {
    /// Its duration, so far if it has not ended.
    pub fn seconds(&self) -> f64 {
        self.ended.unwrap_or_else(Instant::now).duration_since(self.began).as_secs_f64()
    }
}

impl Recorded {
    /// Stages so far, in order.
    pub fn stages(&self) -> Vec<StageTaken> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<StageTaken>> {
        self.stages.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Progress for Recorded {
    fn stage(&self, name: &str, _: Option<u64>, unit: Unit) {
        // Ends a stage that was not finished.
        self.finish();
        let stage = StageTaken { name: name.into(), unit, amount: 0, began: Instant::now(), ended: None };
        self.lock().push(stage);
    }

    fn advance(&self, count: u64) {
        self.done.fetch_add(count, Ordering::Relaxed);
    }

    fn finish(&self) {
        let amount = self.done.swap(0, Ordering::Relaxed);
        if let Some(stage) = self.lock().last_mut().filter(|stage| stage.ended.is_none()) {
            (stage.amount, stage.ended) = (amount, Some(Instant::now()));
        }
    }

    fn note(&self, _: &str) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_kept_in_order_with_what_each_did() {
        let progress = Recorded::default();
        progress.stage("read", Some(10), Unit::Bytes);
        progress.advance(4);
        progress.advance(6);
        // Not finished explicitly: the next stage ends it.
        progress.stage("sort", None, Unit::Count("rows"));
        progress.advance(3);
        progress.finish();
        // After the end: counts for no stage.
        progress.advance(100);
        progress.finish();
        progress.stage("write", None, Unit::Bytes);
        progress.finish();
        let kept: Vec<_> = progress.stages().into_iter().map(|stage| (stage.name, stage.amount)).collect();
        assert_eq!(kept, [("read".into(), 10), ("sort".into(), 3), ("write".into(), 0)]);
        let stages = progress.stages();
        assert!(stages.windows(2).all(|two| two[0].ended.is_some_and(|ended| ended <= two[1].began)));
        assert_eq!(stages[1].unit.name(), "rows");
    }
}
