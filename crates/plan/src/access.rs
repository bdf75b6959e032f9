//! What planners read and what they decide, an access at a time.

use esker_types::{NodeId, SlotIndex};
use std::convert::Infallible;

/// A row as traces name it.
pub trait Row: Copy + Default + Send + 'static {
    /// Its place in an array by row.
    fn index(self) -> usize;
}

impl Row for u32 {
    #[inline(always)]
    fn index(self) -> usize {
        self as usize
    }
}

impl Row for u64 {
    #[inline(always)]
    fn index(self) -> usize {
        self as usize
    }
}

impl Row for NodeId {
    #[inline(always)]
    fn index(self) -> usize {
        NodeId::index(self)
    }
}

/// The rows that batches access. A batch names a row once.
pub trait AccessTrace {
    /// How rows are named.
    type Row: Row;
    /// What reading can end with.
    type Error;

    /// Batches.
    fn batches(&self) -> u32;

    /// Replaces `rows` by those of a batch. Planners go through batches in order, from either end.
    fn read(&mut self, batch: u32, rows: &mut Vec<Self::Row>) -> Result<(), Self::Error>;
}

impl<R: Row> AccessTrace for &[Vec<R>] {
    type Row = R;
    type Error = Infallible;

    fn batches(&self) -> u32 {
        self.len() as u32
    }

    fn read(&mut self, batch: u32, rows: &mut Vec<R>) -> Result<(), Infallible> {
        rows.clear();
        rows.extend_from_slice(&self[batch as usize]);
        Ok(())
    }
}

/// Where a row of a batch comes from, and whether it stays. In a plan each is one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetch {
    /// From a slot of the cache, as it is before this batch.
    Hit(SlotIndex),
    /// From the disk, and not kept.
    Read,
    /// From the disk, and into a slot once every hit of the batch has been taken.
    ReadInto(SlotIndex),
}

/// The word of [`Fetch::Read`].
pub(crate) const READ: u32 = u32::MAX;
/// What the word of [`Fetch::ReadInto`] has beside its slot.
pub(crate) const INTO: u32 = 1 << 31;

impl Fetch {
    /// As a word.
    #[inline(always)]
    pub fn word(self) -> u32 {
        match self {
            Fetch::Hit(slot) => slot.0,
            Fetch::Read => READ,
            Fetch::ReadInto(slot) => INTO | slot.0,
        }
    }

    /// From a word.
    #[inline(always)]
    pub fn of(word: u32) -> Fetch {
        match word {
            READ => Fetch::Read,
            word if word & INTO != 0 => Fetch::ReadInto(SlotIndex(word ^ INTO)),
            word => Fetch::Hit(SlotIndex(word)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MOST_SLOTS;

    #[test]
    fn words_say_what_they_were_made_from() {
        for slot in [0, 1, 77, MOST_SLOTS - 1] {
            for fetch in [Fetch::Hit(SlotIndex(slot)), Fetch::ReadInto(SlotIndex(slot)), Fetch::Read] {
                assert_eq!(Fetch::of(fetch.word()), fetch);
            }
        }
    }
}
