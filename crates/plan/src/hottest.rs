//! The most accessed rows, in order, without sorting them: DiskGNN's caches (section 4 of the paper). Of all caches
//! with fixed rows for the whole run, this one reads least.

use crate::access::Row;
use crate::coverage::Coverage;
use std::sync::atomic::{AtomicU32, Ordering};

/// No slot.
const NONE: u32 = u32::MAX;

/// How far ahead counts are prefetched.
const PREFETCH_DISTANCE: usize = 16;

/// Counts accesses to rows. Several threads may count at the same time: the counts do not depend on the order.
#[derive(Debug)]
pub struct RowCounts {
    by_row: Vec<AtomicU32>,
}

impl RowCounts {
    /// Starts with no accesses to `rows` rows.
    pub fn new(rows: u64) -> RowCounts {
        RowCounts { by_row: (0..rows).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Counts the accesses of a batch, which accesses a row at most once. There are fewer than 2^32 batches.
    pub fn see<R: Row>(&self, rows: &[R]) {
        for (at, row) in rows.iter().enumerate() {
            if let Some(soon) = rows.get(at + PREFETCH_DISTANCE) {
                esker_io::prefetch(&self.by_row, soon.index());
            }
            self.by_row[row.index()].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The rows by these counts, without slots.
    pub fn close(self) -> Hottest {
        let by_row = self.by_row.into_iter().map(AtomicU32::into_inner).collect();
        Hottest { by_row, cached: 0, misses: 0 }
    }
}

/// Rows by number of accesses. The first rows have slots.
#[derive(Debug)]
pub struct Hottest {
    /// First the number of accesses of each row, later its slot.
    by_row: Vec<u32>,
    cached: u64,
    misses: u64,
}

impl Hottest {
    /// Starts with no accesses to `rows` rows.
    pub fn new(rows: u64) -> Hottest {
        Hottest { by_row: vec![0; rows as usize], cached: 0, misses: 0 }
    }

    /// Its size in bytes.
    pub fn bytes_for(rows: u64) -> u64 {
        rows * 4
    }

    /// Step 1: counts accesses.
    pub fn see<R: Row>(&mut self, rows: &[R]) {
        for (at, row) in rows.iter().enumerate() {
            if let Some(soon) = rows.get(at + PREFETCH_DISTANCE) {
                esker_io::prefetch(&self.by_row, soon.index());
            }
            let count = &mut self.by_row[row.index()];
            *count = count.saturating_add(1);
        }
    }

    /// Number of rows with accesses, and the accesses to all of them.
    pub fn seen(&self) -> (u64, u64) {
        let accessed = self.by_row.iter().filter(|count| **count > 0);
        accessed.fold((0, 0), |(rows, accesses), count| (rows + 1, accesses + *count as u64))
    }

    /// Accesses to the most accessed rows. Only before slots are assigned.
    pub fn coverage(&self) -> Coverage {
        let most = self.by_row.iter().copied().max().unwrap_or(0) as usize;
        let mut rows_by_count = vec![0u64; most + 1];
        self.by_row.iter().for_each(|count| rows_by_count[*count as usize] += 1);
        let by_count = rows_by_count.iter().enumerate().skip(1).rev();
        Coverage::of(by_count.map(|(count, rows)| (count as u64, *rows)))
    }

    /// Step 2: assigns slots, the first to the most accessed row. Among equals the lower row comes first. A row without
    /// accesses gets none. No more accesses can be counted afterwards.
    pub fn choose(&mut self, slots: u64) {
        let most = self.by_row.iter().copied().max().unwrap_or(0) as usize;
        let mut starts = vec![0u64; most + 2];
        self.by_row.iter().for_each(|count| starts[*count as usize] += 1);
        // First slot of each count: after those of all higher counts.
        let mut start = 0;
        for class in starts.iter_mut().rev() {
            start += std::mem::replace(class, start);
        }
        self.misses = 0;
        self.cached = 0;
        for entry in &mut self.by_row {
            let count = *entry;
            let place = &mut starts[count as usize];
            let slot = *place;
            *place += 1;
            let gets = count > 0 && slot < slots.min(NONE as u64);
            self.misses += if gets { 0 } else { count as u64 };
            self.cached += u64::from(gets);
            *entry = if gets { slot as u32 } else { NONE };
        }
    }

    /// The slot of a row, if it has one.
    #[inline(always)]
    pub fn slot<R: Row>(&self, row: R) -> Option<u32> {
        Some(self.by_row[row.index()]).filter(|slot| *slot != NONE)
    }

    /// Number of rows with a slot.
    pub fn cached(&self) -> u64 {
        self.cached
    }

    /// Accesses to rows without a slot.
    pub fn misses(&self) -> u64 {
        self.misses
    }

    /// The slots of all rows.
    pub fn slots(&self) -> &[u32] {
        &self.by_row
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares with sorting.
        #[test]
        fn slots_follow_counts(accesses in prop::collection::vec(0u32..30, 0..200), slots in 0u64..40) {
            let mut hottest = Hottest::new(30);
            hottest.see(&accesses);
            let count = |row: u32| accesses.iter().filter(|access| **access == row).count();
            prop_assert_eq!(hottest.seen().1, accesses.len() as u64);
            hottest.choose(slots);
            let mut order: Vec<u32> = (0..30).filter(|row| count(*row) > 0).collect();
            order.sort_by_key(|row| (std::cmp::Reverse(count(*row)), *row));
            order.truncate(slots as usize);
            for row in 0..30 {
                let expected = order.iter().position(|found| *found == row).map(|slot| slot as u32);
                prop_assert_eq!(hottest.slot(row), expected);
            }
            let missed: usize = (0..30).filter(|row| !order.contains(row)).map(count).sum();
            prop_assert_eq!((hottest.cached(), hottest.misses()), (order.len() as u64, missed as u64));
        }

        /// Compares with counting on one thread.
        #[test]
        fn counts_of_several_threads_add_up(
            batches in prop::collection::vec(prop::collection::btree_set(0u32..30, 0..30), 0..12),
        ) {
            let batches: Vec<Vec<u32>> = batches.into_iter().map(|batch| batch.into_iter().collect()).collect();
            let (mut one, several) = (Hottest::new(30), RowCounts::new(30));
            batches.iter().for_each(|batch| one.see(batch));
            std::thread::scope(|scope| {
                for some in batches.chunks(3) {
                    let several = &several;
                    scope.spawn(move || some.iter().for_each(|batch| several.see(batch)));
                }
            });
            let several = several.close();
            prop_assert_eq!(several.slots(), one.slots());
        }

        #[test]
        fn coverage_is_exact_at_its_points_and_never_promises_fewer_misses(
            accesses in prop::collection::vec(0u32..30, 0..200), slots in 0u64..40,
        ) {
            let mut hottest = Hottest::new(30);
            hottest.see(&accesses);
            let coverage = hottest.coverage();
            hottest.choose(slots);
            let promised = coverage.misses(slots);
            prop_assert!(promised >= hottest.misses(), "{} {}", promised, hottest.misses());
            if slots.is_power_of_two() || slots == 0 || hottest.misses() == 0 {
                prop_assert_eq!(promised, hottest.misses());
            }
        }
    }
}
