//! A cache with the same rows for a whole run: those that some batches access most (OUTRE section 4.4, PaGraph). [`Belady`]
//! reads less, because it knows what comes next; this one shows by how much.
//!
//! [`Belady`]: crate::Belady

use crate::access::AccessTrace;
use crate::belady::PlanTally;
use crate::hottest::Hottest;
use crate::placement::{MOST_SLOTS, Placement, Placements};
use crate::{MOST_READ, Row};
use esker_types::SlotIndex;

/// Rows by how often they are accessed. A cache has the first ones.
#[derive(Debug)]
pub struct StaticRows {
    by_accesses: Hottest,
}

impl StaticRows {
    /// Ranks the rows of a graph by the accesses of some batches. Among equals the lower row comes first.
    pub fn choose<T: AccessTrace>(rows: u64, trace: &mut T) -> Result<StaticRows, T::Error> {
        let (mut by_accesses, mut accessed) = (Hottest::new(rows), Vec::new());
        for batch in 0..trace.batches() {
            trace.read(batch, &mut accessed)?;
            by_accesses.see(&accessed);
        }
        by_accesses.choose(MOST_SLOTS as u64);
        Ok(StaticRows { by_accesses })
    }

    /// Its size in bytes.
    pub fn bytes_for(rows: u64) -> u64 {
        Hottest::bytes_for(rows)
    }

    /// Says for every access where its row comes from, batch by batch. The first `slots` rows stay once they are read. The
    /// cache is empty at first.
    pub fn plan<T: AccessTrace>(
        &self,
        slots: u64,
        trace: &mut T,
        mut emit: impl FnMut(u32, &Placements) -> Result<(), T::Error>,
    ) -> Result<PlanTally, T::Error> {
        let slots = slots.min(self.by_accesses.cached());
        let mut filled = vec![0u64; slots.div_ceil(64) as usize];
        let (mut rows, mut placements, mut tally) = (Vec::new(), Placements::default(), PlanTally::default());
        for batch in 0..trace.batches() {
            trace.read(batch, &mut rows)?;
            placements.clear();
            let mut reads = 0;
            for row in &rows {
                let place = self.place(*row, slots, reads, &mut filled);
                match place {
                    Placement::Hit(_) => tally.hits += 1,
                    _ => reads += 1,
                }
                if let Placement::Keep(_) = place {
                    placements.kept.extend(self.by_accesses.slot(*row));
                }
                placements.words.push(place.encode());
            }
            assert!(reads < MOST_READ, "a batch reads fewer rows");
            tally.accesses += rows.len() as u64;
            tally.kept += placements.kept.len() as u64;
            emit(batch, &placements)?;
        }
        Ok(tally)
    }

    fn place<R: Row>(&self, row: R, slots: u64, reads: u32, filled: &mut [u64]) -> Placement {
        let Some(slot) = self.by_accesses.slot(row).filter(|slot| (*slot as u64) < slots) else {
            return Placement::Read(reads);
        };
        let (word, bit) = (&mut filled[slot as usize / 64], 1u64 << (slot % 64));
        let is_there = *word & bit != 0;
        *word |= bit;
        if is_there { Placement::Hit(SlotIndex(slot)) } else { Placement::Keep(reads) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeSet, HashMap};

    fn traces() -> impl Strategy<Value = Vec<Vec<u32>>> {
        let batch = prop::collection::btree_set(0u32..40, 0..20).prop_map(|rows| rows.into_iter().collect());
        prop::collection::vec(batch, 0..12)
    }

    proptest! {
        /// The naive twin: a map from slots to rows, and rows sorted by their accesses in the batches that chose them.
        #[test]
        fn the_most_accessed_rows_stay_once_they_are_read(
            chosen_by in traces(), trace in traces(), slots in 0u64..30,
        ) {
            let rows = StaticRows::choose(40, &mut &chosen_by[..]).unwrap();
            let count = |row: &u32| chosen_by.iter().flatten().filter(|one| *one == row).count();
            let mut order: Vec<u32> = (0..40).filter(|row| count(row) > 0).collect();
            order.sort_by_key(|row| (std::cmp::Reverse(count(row)), *row));
            order.truncate(slots as usize);
            let mut cache: HashMap<u32, u32> = HashMap::new();
            let (mut expected, mut batches) = (PlanTally::default(), 0);
            let tally = rows.plan(slots, &mut &trace[..], |batch, placements| {
                let accessed = &trace[batch as usize];
                assert_eq!(placements.words.len(), accessed.len());
                assert!(placements.are_valid(slots, accessed.len() as u64));
                let (mut reads, mut kept) = (0, placements.kept.iter());
                let before = cache.clone();
                for (row, word) in accessed.iter().zip(&placements.words) {
                    let is_cached = before.values().any(|cached| cached == row);
                    match Placement::decode(*word) {
                        Placement::Hit(slot) => assert_eq!(before[&slot.0], *row),
                        Placement::Keep(index) => {
                            assert!(index == reads && !is_cached && order.contains(row));
                            assert_eq!(cache.insert(*kept.next().unwrap(), *row), None, "a slot has one row");
                        }
                        Placement::Read(index) => assert!(index == reads && !order.contains(row)),
                        Placement::Skip => panic!("every row is accessed"),
                    }
                    reads += u32::from(!is_cached);
                    expected.hits += u64::from(is_cached);
                }
                expected.accesses += accessed.len() as u64;
                batches += 1;
                Ok(())
            }).unwrap();
            expected.kept = cache.len() as u64;
            prop_assert_eq!((tally, batches), (expected, trace.len()));
            let accessed: BTreeSet<u32> = trace.iter().flatten().copied().collect();
            let stay: BTreeSet<u32> = order.into_iter().filter(|row| accessed.contains(row)).collect();
            prop_assert_eq!(cache.into_values().collect::<BTreeSet<u32>>(), stay);
        }
    }
}
