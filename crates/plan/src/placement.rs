//! Where each row of a batch comes from. Every strategy passes this decision to the code that assembles batches. It has
//! one encoding, in memory and on disk.
//!
//! A placement is stored in 32 bits. A hit is its slot. A row that is read is its index among the rows that the batch
//! reads. The slots of kept rows are in a separate array, in the order of these rows, because few rows are kept.

use esker_types::SlotIndex;

/// Where a row of a batch comes from, and whether it stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// From a slot of the cache, with its content before this batch.
    Hit(SlotIndex),
    /// From disk: the row with this index among those that the batch reads. It is not kept.
    Read(u32),
    /// The same. It is also copied to the next slot of [`Placements::kept`], after every hit of the batch has been
    /// copied.
    Keep(u32),
    /// No source: no layer needs the row.
    Skip,
}

/// Slots are below this.
pub const MOST_SLOTS: u32 = (1 << 31) - 1;
/// A batch reads fewer rows than this.
pub const MOST_READ: u32 = (1 << 30) - 1;

const MISSED: u32 = 1 << 31;
const KEPT: u32 = 1 << 30;
const SKIP: u32 = u32::MAX;
/// The bits of the index of a row that is read.
const INDEX: u32 = KEPT - 1;
/// Words counted at a time.
const COUNTED: usize = 1 << 16;

impl Placement {
    /// Its stored form.
    #[inline(always)]
    pub fn encode(self) -> u32 {
        match self {
            Placement::Hit(slot) => slot.0,
            Placement::Read(index) => MISSED | index,
            Placement::Keep(index) => MISSED | KEPT | index,
            Placement::Skip => SKIP,
        }
    }

    /// The placement of a stored form.
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
    /// One word per row, see [`Placement`].
    pub words: Vec<u32>,
    /// The slots of kept rows, in the order of these rows.
    pub kept: Vec<u32>,
}

/// Number of rows of a batch by source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlacementCounts {
    /// Rows from a slot.
    pub hits: u64,
    /// Rows from disk, including kept ones.
    pub reads: u64,
    /// Rows from disk that are kept.
    pub kept: u64,
    /// Skipped rows.
    pub skipped: u64,
    /// Slots of hits and of kept rows are below this.
    pub slots_end: u64,
    /// Indices of rows that are read are below this.
    pub reads_end: u64,
}

impl Placements {
    /// Counts rows by source.
    pub fn counts(&self) -> PlacementCounts {
        let mut counts = PlacementCounts::default();
        for words in self.words.chunks(COUNTED) {
            // Without branches and in 32 bits, so that it runs in vector registers: every batch is counted.
            let (mut hits, mut skipped, mut kept, mut slots_end, mut reads_end) = (0, 0, 0, 0, 0);
            for word in words {
                let (is_hit, is_skip) = (word & MISSED == 0, *word == SKIP);
                let is_read = !is_hit & !is_skip;
                hits += is_hit as u32;
                skipped += is_skip as u32;
                kept += (is_read & (word & KEPT != 0)) as u32;
                slots_end = slots_end.max(if is_hit { word + 1 } else { 0 });
                reads_end = reads_end.max(if is_read { (word & INDEX) + 1 } else { 0 });
            }
            counts.hits += hits as u64;
            counts.skipped += skipped as u64;
            counts.reads += words.len() as u64 - (hits + skipped) as u64;
            counts.kept += kept as u64;
            counts.slots_end = counts.slots_end.max(slots_end as u64);
            counts.reads_end = counts.reads_end.max(reads_end as u64);
        }
        counts.slots_end = counts.slots_end.max(self.kept.iter().max().map_or(0, |slot| *slot as u64 + 1));
        counts
    }

    /// Hits in slots below `slot`: those of a faster tier that has the first slots.
    pub fn hits_below(&self, slot: u64) -> u64 {
        self.words.iter().filter(|word| *word & MISSED == 0 && (**word as u64) < slot).count() as u64
    }

    /// Whether every hit and every kept row has a slot below `slots`, every row that is read has an index below
    /// `reads`, and every kept row has a slot. An assembler relies on this.
    pub fn are_valid(&self, slots: u64, reads: u64) -> bool {
        let counts = self.counts();
        counts.slots_end <= slots && counts.reads_end <= reads && counts.kept == self.kept.len() as u64
    }

    /// Removes all placements.
    pub fn clear(&mut self) {
        self.words.clear();
        self.kept.clear();
    }

    /// Inserts a [`Placement::Skip`] for every row that is marked in `skipped`, which has one mark per row of the
    /// batch. The existing placements are those of the other rows.
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

    /// Counts one placement after the other.
    fn counted_slowly(placements: &Placements) -> PlacementCounts {
        let mut counts = PlacementCounts::default();
        for word in &placements.words {
            match Placement::decode(*word) {
                Placement::Hit(slot) => {
                    counts.hits += 1;
                    counts.slots_end = counts.slots_end.max(slot.0 as u64 + 1);
                }
                Placement::Read(index) | Placement::Keep(index) => {
                    counts.reads += 1;
                    counts.kept += u64::from(matches!(Placement::decode(*word), Placement::Keep(_)));
                    counts.reads_end = counts.reads_end.max(index as u64 + 1);
                }
                Placement::Skip => counts.skipped += 1,
            }
        }
        counts
    }

    proptest! {
        #[test]
        fn any_words_are_counted(words in prop::collection::vec(prop_oneof![prop::num::u32::ANY, Just(SKIP)], 0..300)) {
            let placements = Placements { words, kept: Vec::new() };
            prop_assert_eq!(placements.counts(), counted_slowly(&placements));
        }

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
