//! Divides memory between cached feature rows and a history of hidden rows (OUTRE, section 5.3). Every share of the
//! history is tried in steps of a hundredth. Sums over the best rows and the best histories are made once, so a step
//! costs nothing.

/// Steps of the share of a history.
const STEPS: u64 = 100;

/// What a history of a node saves in an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct HistorySaving {
    /// Feature rows that are not read.
    pub rows: f64,
    /// Neighbours that are not sampled.
    pub edges: f64,
    /// Hidden rows that are not computed.
    pub computed: f64,
}

/// Seconds that work takes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct WorkSeconds {
    /// To read a feature row from disk.
    pub row: f64,
    /// To sample a neighbour.
    pub edge: f64,
    /// To compute a hidden row, its gradient included.
    pub computed: f64,
}

impl WorkSeconds {
    /// The seconds that a history saves, if everything took turns.
    pub fn of(&self, saving: &HistorySaving) -> f64 {
        self.row * saving.rows + self.edge * saving.edges + self.computed * saving.computed
    }

    /// Sampling a neighbour in terms of reading a row: the paper's beta.
    pub fn beta(&self) -> f64 {
        self.edge / self.row.max(f64::MIN_POSITIVE)
    }
}

/// What is divided, and what an epoch takes without caches and history.
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
    /// Feature rows, neighbours and hidden rows of an epoch.
    pub all: HistorySaving,
    /// What work takes.
    pub seconds: WorkSeconds,
}

/// A division.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CacheSplit {
    /// The share of the history.
    pub share: f64,
    /// Rows of the history.
    pub history_rows: u64,
    /// Cached feature rows.
    pub cached_rows: u64,
    /// Seconds that an epoch should take: rows are read while hidden rows are computed, and both follow sampling.
    pub seconds: f64,
}

/// The divisions with the fewest seconds, the best first: at most `most`. Of equal ones, that with the smaller history
/// comes first.
pub fn best_splits(task: &SplitTask<'_>, most: usize) -> Vec<CacheSplit> {
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
        let misses = rows * (1.0 - (hits / task.all.rows.max(1.0)).min(1.0));
        let computed = rest(task.all.computed, saved.computed) * task.seconds.computed;
        let seconds =
            rest(task.all.edges, saved.edges) * task.seconds.edge + computed.max(misses * task.seconds.row);
        CacheSplit { share: step as f64 / STEPS as f64, history_rows: history, cached_rows: cached, seconds }
    };
    let mut all: Vec<CacheSplit> = (0..=STEPS).map(split).collect();
    // Stable, so that of equal ones the smaller history stays first.
    all.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
    all.dedup_by_key(|split| split.history_rows);
    all.truncate(most);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECONDS: WorkSeconds = WorkSeconds { row: 1.0, edge: 0.1, computed: 0.5 };

    fn saving(rows: f64) -> HistorySaving {
        HistorySaving { rows, edges: rows * 2.0, computed: rows / 2.0 }
    }

    /// The seconds of a division, sum by sum.
    fn naive(task: &SplitTask<'_>, step: u64) -> f64 {
        let mut left = task.budget_bytes;
        let allowed = (task.budget_bytes as f64 * step as f64 / 100.0).floor() as u64;
        let (mut rows, mut edges, mut computed) = (task.all.rows, task.all.edges, task.all.computed);
        for (before, saving) in (0..).zip(task.savings) {
            if (before + 1) * task.history_row_bytes > allowed {
                break;
            }
            left -= task.history_row_bytes;
            (rows, edges, computed) = (rows - saving.rows, edges - saving.edges, computed - saving.computed);
        }
        let mut hits = 0.0;
        for count in task.accesses {
            if left < task.row_bytes {
                break;
            }
            left -= task.row_bytes;
            hits += count.saturating_sub(1) as f64;
        }
        let misses = rows.max(0.0) * (1.0 - (hits / task.all.rows.max(1.0)).min(1.0));
        edges.max(0.0) * SECONDS.edge + (computed.max(0.0) * SECONDS.computed).max(misses * SECONDS.row)
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
            let all = HistorySaving { rows: total, edges: total * 3.0, computed: total };
            let task = SplitTask {
                budget_bytes, row_bytes, history_row_bytes, accesses: &accesses, savings: &savings, all, seconds: SECONDS,
            };
            let best = best_splits(&task, 5);
            let naive_best = (0..=100).map(|step| naive(&task, step)).fold(f64::INFINITY, f64::min);
            prop_assert!((best[0].seconds - naive_best).abs() < 1e-9 * (1.0 + naive_best), "{best:?} {naive_best}");
            prop_assert!(best.is_sorted_by(|one, other| one.seconds <= other.seconds));
            for split in &best {
                let bytes = split.history_rows * history_row_bytes + split.cached_rows * row_bytes;
                prop_assert!(bytes <= budget_bytes);
            }
        }
    }

    #[test]
    fn a_history_that_saves_nothing_gets_nothing() {
        let all = HistorySaving { rows: 100.0, edges: 100.0, computed: 0.0 };
        let task = SplitTask {
            budget_bytes: 1000,
            row_bytes: 10,
            history_row_bytes: 10,
            accesses: &[10; 10],
            savings: &[],
            all,
            seconds: SECONDS,
        };
        assert_eq!(best_splits(&task, 3).len(), 1);
        assert_eq!(best_splits(&task, 3)[0].history_rows, 0);
    }
}
