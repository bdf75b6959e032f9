//! Divides memory between cached feature rows and a history of hidden rows (OUTRE, section 5.3). Every share of the
//! history is tried in steps of a hundredth. Sums over the best rows and the best histories are made once, so a step
//! costs nothing. That knows hits only of the rows accessed most, so the best share is then looked for among real
//! replays of an epoch, from there on.

use serde::{Deserialize, Serialize};

/// Steps of the share of a history.
const STEPS: u64 = 100;
/// Steps between two shares that are replayed: a coarse look around, then a finer one.
const STRIDES: [u64; 2] = [10, 5];

/// What a history of a node saves in an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct HistorySaving {
    /// Feature rows that are not accessed.
    pub rows: f64,
    /// Neighbours that are not sampled.
    pub edges: f64,
    /// Hidden rows that are not computed, in rows of the first layer.
    pub computed: f64,
}

/// What an epoch does.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct EpochWork {
    /// Batches.
    pub batches: f64,
    /// Feature rows that batches access.
    pub rows: f64,
    /// Those of them that are read from disk.
    pub misses: f64,
    /// Neighbours sampled.
    pub edges: f64,
    /// Neighbours of first hops that are drawn once more, to decide what is pulled.
    pub decided_edges: f64,
    /// Hidden rows computed, in rows of the first layer.
    pub computed: f64,
}

/// Seconds that work takes, as measured on some batches.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct WorkSeconds {
    /// To sample a neighbour and to write it, with all samplers.
    pub edge: f64,
    /// To plan where a row comes from.
    pub planned: f64,
    /// To load a sampled neighbour again.
    pub loaded: f64,
    /// To read a feature row from disk.
    pub row: f64,
    /// To put a row into its batch.
    pub assembled: f64,
    /// A training step, whatever its size.
    pub batch: f64,
    /// To compute a hidden row of the first layer, its gradient included.
    pub computed: f64,
}

impl WorkSeconds {
    /// The seconds that a history saves, if everything took turns.
    pub fn of(&self, saving: &HistorySaving) -> f64 {
        self.row * saving.rows + (self.edge + self.loaded) * saving.edges + self.computed * saving.computed
    }

    /// Sampling a neighbour in terms of reading a row: the paper's beta.
    pub fn beta(&self) -> f64 {
        self.edge / self.row.max(f64::MIN_POSITIVE)
    }

    /// Seconds of an epoch. A superbatch is sampled while the one before is planned; then batches go through loading,
    /// reading, assembling and training, and the slowest of these stages is what the others wait for.
    pub fn epoch(&self, work: &EpochWork) -> f64 {
        let sampling = (work.edges + work.decided_edges) * self.edge;
        let training = work.batches * self.batch + work.computed * self.computed;
        let stages = [work.edges * self.loaded, work.misses * self.row, work.rows * self.assembled, training];
        sampling.max(work.rows * self.planned) + stages.into_iter().fold(0.0, f64::max)
    }
}

/// The line `fixed + slope x` that fits points best, with both at least 0: the seconds of steps by their size.
pub fn fitted_line(points: &[(f64, f64)]) -> (f64, f64) {
    let count = points.len().max(1) as f64;
    let (x, y) = points.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
    let (mean_x, mean_y) = (x / count, y / count);
    let (mut along, mut spread) = (0.0, 0.0);
    for (x, y) in points {
        along += (x - mean_x) * (y - mean_y);
        spread += (x - mean_x) * (x - mean_x);
    }
    let slope = if spread > 0.0 { along / spread } else { f64::INFINITY };
    match mean_y - slope * mean_x {
        // Sizes that hardly differ tell nothing about what does not depend on size.
        fixed if fixed.is_nan() || fixed < 0.0 => (0.0, if mean_x > 0.0 { mean_y / mean_x } else { 0.0 }),
        fixed if slope < 0.0 => (fixed + slope * mean_x, 0.0),
        fixed => (fixed, slope),
    }
}

/// What is divided, and what an epoch does without caches and history.
#[derive(Debug, Clone, Copy)]
pub struct SplitTask<'a> {
    /// Memory for both.
    pub budget_bytes: u64,
    /// Bytes of a cached feature row, and of a row of the history with what belongs to it.
    pub row_bytes: u64,
    /// See above.
    pub history_row_bytes: u64,
    /// Accesses of each feature row, falling.
    pub accesses: &'a [u32],
    /// Savings of each node's history, the best first.
    pub savings: &'a [HistorySaving],
    /// An epoch without a history.
    pub all: EpochWork,
    /// What work takes.
    pub seconds: WorkSeconds,
}

/// A division.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CacheSplit {
    /// Memory of the history, in hundredths.
    pub step: u64,
    /// Rows of the history.
    pub history_rows: u64,
    /// Cached feature rows.
    pub cached_rows: u64,
    /// Seconds that an epoch should take.
    pub seconds: f64,
}

impl CacheSplit {
    /// The share of the history.
    pub fn share(&self) -> f64 {
        self.step as f64 / STEPS as f64
    }
}

/// All divisions, from no history to nothing else.
pub fn splits(task: &SplitTask<'_>) -> Vec<CacheSplit> {
    let mut accessed = vec![0.0; task.accesses.len() + 1];
    for (index, count) in task.accesses.iter().enumerate() {
        // The first access fills the cache.
        accessed[index + 1] = accessed[index] + count.saturating_sub(1) as f64;
    }
    let mut saved = vec![HistorySaving::default(); task.savings.len() + 1];
    for (index, saving) in task.savings.iter().enumerate() {
        let before = saved[index];
        saved[index + 1] = HistorySaving {
            rows: before.rows + saving.rows,
            edges: before.edges + saving.edges,
            computed: before.computed + saving.computed,
        };
    }
    let split = |step: u64| {
        let history_bytes = (task.budget_bytes as u128 * step as u128 / STEPS as u128) as u64;
        let history = (history_bytes / task.history_row_bytes.max(1)).min(task.savings.len() as u64);
        let left = task.budget_bytes - history * task.history_row_bytes;
        let cached = (left / task.row_bytes.max(1)).min(task.accesses.len() as u64);
        let (saved, hits) = (saved[history as usize], accessed[cached as usize]);
        let rest = |all: f64, saved: f64| (all - saved).max(0.0);
        // Rows that are not requested any more cannot be hits: hits fall in proportion.
        let rows = rest(task.all.rows, saved.rows);
        let work = EpochWork {
            batches: task.all.batches,
            rows,
            misses: rows * (1.0 - (hits / task.all.rows.max(1.0)).min(1.0)),
            edges: rest(task.all.edges, saved.edges),
            decided_edges: if history > 0 { task.all.decided_edges } else { 0.0 },
            computed: rest(task.all.computed, saved.computed),
        };
        CacheSplit { step, history_rows: history, cached_rows: cached, seconds: task.seconds.epoch(&work) }
    };
    (0..=STEPS).map(split).collect()
}

/// The division with the fewest seconds; of equal ones, that with the smaller history.
pub fn best_split(all: &[CacheSplit]) -> CacheSplit {
    let best = all.iter().min_by(|one, other| one.seconds.total_cmp(&other.seconds));
    *best.expect("there is a division without a history")
}

/// Looks for the division that a replay finds best, from one that is probably close. `replayed` gives the seconds of a
/// division, at most once each. No history at all is always among them. Divisions with equally many rows are one.
pub fn best_replayed<E>(
    all: &[CacheSplit],
    from: CacheSplit,
    mut replayed: impl FnMut(&CacheSplit) -> Result<f64, E>,
) -> Result<CacheSplit, E> {
    let mut seen: Vec<CacheSplit> = Vec::new();
    let mut look = |step: u64| -> Result<CacheSplit, E> {
        let asked = all[step as usize];
        if let Some(found) = seen.iter().find(|found| found.history_rows == asked.history_rows) {
            return Ok(*found);
        }
        let found = CacheSplit { seconds: replayed(&asked)?, ..asked };
        seen.push(found);
        Ok(found)
    };
    let none = look(0)?;
    // No history has a cost of its own: it is not on the way down.
    let mut best = look(from.step.max(1))?;
    for stride in STRIDES {
        loop {
            let before = best;
            for step in [best.step.saturating_sub(stride).max(1), (best.step + stride).min(STEPS)] {
                let found = look(step)?;
                if found.seconds < best.seconds {
                    best = found;
                }
            }
            if best.step == before.step {
                break;
            }
        }
    }
    Ok(if none.seconds <= best.seconds { none } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECONDS: WorkSeconds = WorkSeconds {
        edge: 0.1,
        planned: 0.01,
        loaded: 0.02,
        row: 1.0,
        assembled: 0.05,
        batch: 2.0,
        computed: 0.5,
    };

    fn saving(rows: f64) -> HistorySaving {
        HistorySaving { rows, edges: 2.0 * rows, computed: rows / 2.0 }
    }

    /// One division, with sums from the start.
    fn naive(task: &SplitTask<'_>, step: u64) -> f64 {
        let history = task.budget_bytes * step / 100 / task.history_row_bytes;
        let (mut work, mut left) = (task.all, task.budget_bytes);
        work.decided_edges = 0.0;
        for saving in task.savings.iter().take(history as usize) {
            left -= task.history_row_bytes;
            work.rows -= saving.rows;
            work.edges -= saving.edges;
            work.computed -= saving.computed;
            work.decided_edges = task.all.decided_edges;
        }
        let mut hits = 0.0;
        for count in task.accesses {
            if left < task.row_bytes {
                break;
            }
            left -= task.row_bytes;
            hits += count.saturating_sub(1) as f64;
        }
        let (rows, edges, computed) = (work.rows.max(0.0), work.edges.max(0.0), work.computed.max(0.0));
        let misses = rows * (1.0 - (hits / task.all.rows.max(1.0)).min(1.0));
        let sampling = ((edges + work.decided_edges) * SECONDS.edge).max(rows * SECONDS.planned);
        let training = work.batches * SECONDS.batch + computed * SECONDS.computed;
        let reading = misses * SECONDS.row;
        sampling + training.max(reading).max(edges * SECONDS.loaded).max(rows * SECONDS.assembled)
    }

    proptest! {
        #[test]
        fn the_best_division_is_as_good_as_any_that_is_tried(
            budget_bytes in 0u64..4000, row_bytes in 1u64..60, history_row_bytes in 1u64..90,
            mut accesses in prop::collection::vec(1u32..30, 0..60), mut rows in prop::collection::vec(0u32..50, 0..60),
        ) {
            accesses.sort_unstable_by(|one, other| other.cmp(one));
            rows.sort_unstable_by(|one, other| other.cmp(one));
            let savings: Vec<HistorySaving> = rows.iter().map(|rows| saving(*rows as f64)).collect();
            let total = accesses.iter().map(|count| *count as f64).sum();
            let all = EpochWork {
                batches: 4.0, rows: total, misses: total, edges: total * 3.0, decided_edges: total, computed: total,
            };
            let task = SplitTask {
                budget_bytes, row_bytes, history_row_bytes, accesses: &accesses, savings: &savings, all, seconds: SECONDS,
            };
            let all = splits(&task);
            for split in &all {
                let expected = naive(&task, split.step);
                prop_assert!((split.seconds - expected).abs() < 1e-9 * (1.0 + expected), "{split:?} {expected}");
                let bytes = split.history_rows * history_row_bytes + split.cached_rows * row_bytes;
                prop_assert!(bytes <= budget_bytes);
            }
            let least = (0..=100).map(|step| naive(&task, step)).fold(f64::INFINITY, f64::min);
            let best = best_split(&all);
            prop_assert!((best.seconds - least).abs() < 1e-9 * (1.0 + least), "{best:?} {least}");
        }

        #[test]
        fn from_anywhere_replays_lead_to_the_bottom_of_a_valley(
            bottom in 0u64..=100, from in 0u64..=100, left in 1u32..9, right in 1u32..9, none in 0u32..400,
        ) {
            let cost = |step: u64| match step {
                0 => none as f64,
                step if step < bottom => (left as u64 * (bottom - step)) as f64 + 50.0,
                step => (right as u64 * (step - bottom)) as f64 + 50.0,
            };
            let all: Vec<CacheSplit> = (0..=100)
                .map(|step| CacheSplit { step, history_rows: step * 7, cached_rows: 0, seconds: 0.0 })
                .collect();
            let mut replays = Vec::new();
            let found = best_replayed(&all, all[from as usize], |split| {
                replays.push(split.step);
                Ok::<f64, ()>(cost(split.step))
            });
            let found = found.unwrap();
            let mut distinct = replays.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), replays.len(), "each division is replayed once");
            // Brute force: nothing beyond the last stride is better, and no history is not better either.
            let least = (1..=100).map(cost).fold(cost(0), f64::min);
            prop_assert!(found.seconds <= cost(0));
            let is_close = found.step.abs_diff(bottom.max(1)) < 5;
            prop_assert!(is_close || found.seconds == least || found.step == 0, "{found:?} {least}");
            prop_assert!(found.step > 0 || cost(0) <= cost(bottom.max(1)) + 5.0 * left.max(right) as f64);
            prop_assert_eq!(found.seconds, cost(found.step));
        }

        #[test]
        fn a_line_through_points_is_found(fixed in 0u32..50, slope in 0u32..50, sizes in prop::collection::vec(1u32..1000, 2..20)) {
            let points: Vec<(f64, f64)> =
                sizes.iter().map(|size| (*size as f64, (fixed + slope * size) as f64)).collect();
            let found = fitted_line(&points);
            for (x, y) in &points {
                prop_assert!((found.0 + found.1 * x - y).abs() < 1e-6 * (1.0 + y), "{found:?} {points:?}");
            }
            prop_assert!(found.0 >= 0.0 && found.1 >= 0.0);
        }
    }

    #[test]
    fn a_line_never_falls_and_never_starts_below_zero() {
        assert_eq!(fitted_line(&[(1.0, 5.0), (2.0, 3.0)]), (4.0, 0.0));
        assert_eq!(fitted_line(&[(1.0, 1.0), (2.0, 4.0)]), (0.0, 2.5 / 1.5));
        assert_eq!(fitted_line(&[]), (0.0, 0.0));
    }

    #[test]
    fn a_history_that_saves_nothing_gets_nothing() {
        let all = EpochWork { rows: 100.0, misses: 100.0, edges: 100.0, ..EpochWork::default() };
        let task = SplitTask {
            budget_bytes: 1000,
            row_bytes: 10,
            history_row_bytes: 10,
            accesses: &[10; 10],
            savings: &[],
            all,
            seconds: SECONDS,
        };
        assert_eq!(best_split(&splits(&task)).history_rows, 0);
    }
}
