//! Where each row of a batch comes from: the one decision that every strategy hands to whoever assembles batches, and its one
//! encoding, in memory and on disk.
//!
//! A placement is stored in 32 bits. Hits are slots as they are; a row that is read is named by its index among the rows that
//! the batch reads; the slots of rows that are kept stand in a list of their own, in the order of these rows, because few
//! rows are kept.

use esker_types::SlotIndex;

/// Where a row of a batch comes from, and whether it stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// From a slot of the cache, as it is before this batch.
    Hit(SlotIndex),
    /// From the disk: the row with this index among those that the batch reads. Not kept.
    Read(u32),
    /// The same, and into the next of [`Placements::kept`] once every hit of the batch has been taken.
    Keep(u32),
    /// From nowhere: no layer needs the row.
    Skip,
}

/// Slots are numbered below this.
pub const MOST_SLOTS: u32 = (1 << 31) - 1;
/// A batch reads fewer rows than this.
pub const MOST_READ: u32 = (1 << 30) - 1;

const MISSED: u32 = 1 << 31;
const KEPT: u32 = 1 << 30;
const SKIP: u32 = u32::MAX;

impl Placement {
    /// As it is stored.
    #[inline(always)]
    pub fn encode(self) -> u32 {
        match self {
            Placement::Hit(slot) => slot.0,
            Placement::Read(index) => MISSED | index,
            Placement::Keep(index) => MISSED | KEPT | index,
            Placement::Skip => SKIP,
        }
    }

    /// From how it is stored.
    #[inline(always)]
    pub fn decode(code: u32) -> Placement {
        match code {
            SKIP => Placement::Skip,
            hit if hit & MISSED == 0 => Placement::Hit(SlotIndex(hit)),
            read if read & KEPT == 0 => Placement::Read(read ^ MISSED),
            kept => Placement::Keep(kept ^ (MISSED | KEPT)),
        }
    }

    /// Whether a stored placement is a row that is read.
    #[inline(always)]
    pub fn is_read(code: u32) -> bool {
        code & MISSED != 0 && code != SKIP
    }
}

/// The placements of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Placements {
    /// A word a row, see [`Placement`].
    pub words: Vec<u32>,
    /// The slots of rows that are kept, in the order of these rows.
    pub kept: Vec<u32>,
}

/// How many rows of a batch come from where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlacementCounts {
    /// From a slot.
    pub hits: u64,
    /// From the disk, those that are kept included.
    pub reads: u64,
    /// Of those, kept.
    pub kept: u64,
    /// From nowhere.
    pub skipped: u64,
    /// Slots that hits name lie below this, and so do those of kept rows.
    pub slots_end: u64,
    /// Indices of rows that are read lie below this.
    pub reads_end: u64,
}

impl Placements {
    /// Counts rows by where they come from.
    pub fn counts(&self) -> PlacementCounts {
        let mut counts = PlacementCounts::default();
        for word in &self.words {
            match Placement::decode(*word) {
                Placement::Hit(slot) => {
                    counts.hits += 1;
                    counts.slots_end = counts.slots_end.max(slot.0 as u64 + 1);
                }
                Placement::Read(index) | Placement::Keep(index) => {
                    counts.reads += 1;
                    counts.kept += u64::from(word & KEPT != 0);
                    counts.reads_end = counts.reads_end.max(index as u64 + 1);
                }
                Placement::Skip => counts.skipped += 1,
            }
        }
        counts.slots_end = counts.slots_end.max(self.kept.iter().max().map_or(0, |slot| *slot as u64 + 1));
        counts
    }

    /// Hits in slots below one: those of a faster tier, where it has the first slots.
    pub fn hits_below(&self, slot: u64) -> u64 {
        self.words.iter().filter(|word| *word & MISSED == 0 && (**word as u64) < slot).count() as u64
    }

    /// Whether every hit and every kept row names one of so many slots, every row that is read one of so many, and every kept
    /// row has a slot: what an assembler relies on.
    pub fn are_valid(&self, slots: u64, reads: u64) -> bool {
        let counts = self.counts();
        counts.slots_end <= slots && counts.reads_end <= reads && counts.kept == self.kept.len() as u64
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.words.clear();
        self.kept.clear();
    }

    /// Puts a [`Placement::Skip`] wherever `skipped` says so, one a row of the batch; the placements that are there are those
    /// of the other rows.
    pub fn insert_skipped(&mut self, skipped: &[bool]) {
        if skipped.is_empty() {
            return;
        }
        let mut from = self.words.len();
        self.words.resize(skipped.len(), SKIP);
        for at in (0..skipped.len()).rev() {
            self.words[at] = match skipped[at] {
                true => SKIP,
                false => {
                    from -= 1;
                    self.words[from]
                }
            };
        }
        assert_eq!(from, 0, "a placement for every row that is not skipped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_say_what_they_were_made_from() {
        for slot in [0, 1, 77, MOST_SLOTS - 1] {
            let hit = Placement::Hit(SlotIndex(slot));
            assert_eq!(Placement::decode(hit.encode()), hit);
            assert!(!Placement::is_read(hit.encode()));
        }
        for index in [0, 1, 77, MOST_READ - 1] {
            for read in [Placement::Read(index), Placement::Keep(index)] {
                assert_eq!(Placement::decode(read.encode()), read);
                assert!(Placement::is_read(read.encode()));
            }
        }
        assert_eq!(Placement::decode(Placement::Skip.encode()), Placement::Skip);
        assert!(!Placement::is_read(Placement::Skip.encode()));
    }

    fn any() -> impl Strategy<Value = Placement> {
        prop_oneof![
            (0..9u32).prop_map(|slot| Placement::Hit(SlotIndex(slot))),
            (0..9u32).prop_map(Placement::Read),
            (0..9u32).prop_map(Placement::Keep),
        ]
    }

    proptest! {
        #[test]
        fn skipped_rows_come_between_the_others(
            rows in prop::collection::vec((any(), prop::bool::ANY), 0..40),
        ) {
            let skipped: Vec<bool> = rows.iter().map(|(_, skip)| *skip).collect();
            let words = rows.iter().filter(|(_, skip)| !skip).map(|(placement, _)| placement.encode());
            let mut placements = Placements { words: words.collect(), kept: Vec::new() };
            let before = placements.counts();
            placements.insert_skipped(&skipped);
            for (word, (placement, skip)) in placements.words.iter().zip(&rows) {
                let expected = if *skip { Placement::Skip } else { *placement };
                prop_assert_eq!(Placement::decode(*word), expected);
            }
            let skips = skipped.iter().filter(|skip| **skip).count() as u64;
            prop_assert_eq!(placements.counts(), PlacementCounts { skipped: skips, ..before });
        }

        #[test]
        fn what_names_no_slot_or_row_is_found(
            rows in prop::collection::vec(any(), 0..40), slots in 0u64..10, reads in 0u64..10, kept in 0usize..4,
        ) {
            let words: Vec<u32> = rows.iter().map(|placement| placement.encode()).collect();
            let placements = Placements { words, kept: vec![2; kept] };
            let fits = |placement: &Placement| match placement {
                Placement::Hit(slot) => (slot.0 as u64) < slots,
                Placement::Read(index) | Placement::Keep(index) => (*index as u64) < reads,
                Placement::Skip => true,
            };
            let keeps = rows.iter().filter(|placement| matches!(placement, Placement::Keep(_))).count();
            let expected = rows.iter().all(fits) && keeps == kept && (kept == 0 || slots > 2);
            prop_assert_eq!(placements.are_valid(slots, reads), expected);
        }
    }
}
