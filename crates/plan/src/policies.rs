//! The baselines of Ginex's cache: the least recently used row leaves, or no row ever leaves. The rows that first fill
//! the cache count as misses of every policy.

use crate::access::Row;

const NONE: u32 = u32::MAX;

/// Keeps the most recently accessed rows.
#[derive(Debug)]
pub struct Lru<R> {
    by_row: Vec<u32>,
    /// Row, previous slot and next slot in order of use.
    slots: Vec<(R, u32, u32)>,
    capacity: usize,
    oldest: u32,
    newest: u32,
}

impl<R: Row> Lru<R> {
    /// An empty cache of `slots` of `rows` rows.
    pub fn new(rows: u64, slots: u64) -> Lru<R> {
        let capacity = slots.min(rows) as usize;
        Lru {
            by_row: vec![NONE; rows as usize],
            slots: Vec::with_capacity(capacity),
            capacity,
            oldest: NONE,
            newest: NONE,
        }
    }

    /// Accesses the rows of a batch, one after the other. Returns the number of misses.
    pub fn batch(&mut self, rows: &[R]) -> u64 {
        rows.iter().filter(|row| !self.want(**row)).count() as u64
    }

    fn want(&mut self, row: R) -> bool {
        let slot = self.by_row[row.index()];
        if slot != NONE {
            self.unlink(slot);
            self.append(slot);
            return true;
        }
        if self.capacity == 0 {
            return false;
        }
        let slot = match self.slots.len() < self.capacity {
            true => {
                self.slots.push((row, NONE, NONE));
                self.slots.len() as u32 - 1
            }
            false => {
                let slot = self.oldest;
                self.unlink(slot);
                self.by_row[self.slots[slot as usize].0.index()] = NONE;
                self.slots[slot as usize].0 = row;
                slot
            }
        };
        self.by_row[row.index()] = slot;
        self.append(slot);
        false
    }

    fn unlink(&mut self, slot: u32) {
        let (_, before, behind) = self.slots[slot as usize];
        match before {
            NONE => self.oldest = behind,
            before => self.slots[before as usize].2 = behind,
        }
        match behind {
            NONE => self.newest = before,
            behind => self.slots[behind as usize].1 = before,
        }
    }

    fn append(&mut self, slot: u32) {
        let newest = self.newest;
        (self.slots[slot as usize].1, self.slots[slot as usize].2) = (newest, NONE);
        match newest {
            NONE => self.oldest = slot,
            newest => self.slots[newest as usize].2 = slot,
        }
        self.newest = slot;
    }
}

/// Keeps the same rows forever. PaGraph's are those of the nodes with most out-neighbours.
#[derive(Debug)]
pub struct Fixed {
    members: Vec<u64>,
    fills: u64,
}

impl Fixed {
    /// A cache of these rows, out of `rows`.
    pub fn new<R: Row>(rows: u64, members: impl IntoIterator<Item = R>) -> Fixed {
        let mut fixed = Fixed { members: vec![0; rows.div_ceil(64) as usize], fills: 0 };
        for row in members {
            let (word, bit) = (&mut fixed.members[row.index() / 64], 1u64 << (row.index() % 64));
            fixed.fills += u64::from(*word & bit == 0);
            *word |= bit;
        }
        fixed
    }

    /// Rows that it was filled with: misses, before any batch.
    pub fn fills(&self) -> u64 {
        self.fills
    }

    /// Accesses the rows of a batch. Returns the number of misses.
    pub fn batch<R: Row>(&self, rows: &[R]) -> u64 {
        rows.iter().filter(|row| self.members[row.index() / 64] >> (row.index() % 64) & 1 == 0).count() as u64
    }
}
