//! Belady's algorithm at batch granularity, with bypass (Ginex sections 3.3 and 3.4), in linear time.
//!
//! A row that a batch wants and a later one wants again may stay in between; of all that would stay at a time, those
//! wanted soonest do. Which ones follows from counts alone: one pass backwards finds each access's next use; one forwards
//! counts, for each batch, the rows that wait for it, and takes those that are too many from the batch furthest away; one
//! backwards says up to which batch rows of each batch stay. What would have to leave before it is wanted never comes, so a
//! slot is taken until its row is wanted and nothing is ever looked for in order to drop it. The last pass gives out slots.
//! The first and the last meet a table by row, once an access; those between only count.

use crate::access::{AccessTrace, Fetch, Row};
use crate::highest::HighestSet;
use esker_io::{prefer_large_pages, prefetch};
use esker_types::SlotIndex;
use std::marker::PhantomData;

/// Slots are 31-bit numbers, and one of those means something else.
pub const MOST_SLOTS: u32 = (1 << 31) - 1;
/// No slot; no further use; no limit.
const NONE: u32 = u32::MAX;
/// Rows whose lines are asked for ahead.
const AHEAD: usize = 32;

/// What a plan comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Rows wanted.
    pub accesses: u64,
    /// Rows found in the cache.
    pub hits: u64,
    /// Rows that were kept when they had been read.
    pub kept: u64,
}

impl Tally {
    /// Rows read, the first filling of the cache included.
    pub fn misses(&self) -> u64 {
        self.accesses - self.hits
    }
}

/// Which rows of a batch stay behind it.
#[derive(Debug, Clone, Copy)]
struct Stay {
    /// Those wanted before this batch.
    before: u32,
    /// And so many of those wanted in it.
    at: u32,
}

/// A planner, with the memory it needs.
#[derive(Debug)]
pub struct Belady<R> {
    /// Looking back: the batch that wants the row next. Replaying: its slot.
    by_row: Vec<u32>,
    slots: u32,
    /// Slots that were used and have no row.
    free: Vec<u32>,
    /// Slots below have been used.
    used: u32,
    /// For each batch the rows that wait for it; then what stays behind it.
    waiting: Vec<u32>,
    stays: Vec<Stay>,
    /// Batches that rows wait for.
    keys: HighestSet,
    /// Places in the batch of rows that stay and wait for a slot.
    late: Vec<u32>,
    rows: PhantomData<R>,
}

impl<R: Row> Belady<R> {
    /// A planner for a cache of `slots` of `rows` rows and traces of up to `batches` batches.
    pub fn new(rows: u64, slots: u64, batches: u32) -> Belady<R> {
        let slots = slots.min(rows).min(MOST_SLOTS as u64) as u32;
        assert!(batches < NONE, "{batches} batches: one number means never");
        // It is met at random, where every small page would be a miss of its own.
        let mut by_row = Vec::with_capacity(rows as usize);
        prefer_large_pages(by_row.spare_capacity_mut());
        by_row.resize(rows as usize, NONE);
        Belady {
            by_row,
            slots,
            free: Vec::with_capacity(slots as usize),
            used: 0,
            waiting: vec![0; batches as usize],
            stays: vec![Stay { before: NONE, at: 0 }; batches as usize],
            keys: HighestSet::new(batches as usize),
            late: Vec::new(),
            rows: PhantomData,
        }
    }

    /// Bytes that a planner takes, buffers for batches of up to `largest` rows included.
    pub fn bytes_for(rows: u64, slots: u64, batches: u64, largest: u64) -> u64 {
        let slots = slots.min(rows).min(MOST_SLOTS as u64);
        let tables = rows * 4 + slots * 4 + batches * (4 + size_of::<Stay>() as u64);
        // Rows, words, what is read of them, and those without a slot, in an array that may have doubled.
        tables + HighestSet::bytes_for(batches) + largest * (size_of::<R>() as u64 + 4 + 2 + 2 * 4)
    }

    /// Walks the trace backwards and emits, for each batch, the next batch that wants each of its rows; `u32::MAX` where
    /// none does.
    pub fn look_back<T: AccessTrace<Row = R>>(
        &mut self,
        trace: &mut T,
        mut emit: impl FnMut(u32, &[u32]) -> Result<(), T::Error>,
    ) -> Result<(), T::Error> {
        self.by_row.fill(NONE);
        let (mut rows, mut next) = (Vec::new(), Vec::new());
        for batch in (0..trace.batches()).rev() {
            trace.read(batch, &mut rows)?;
            next.clear();
            next.extend(rows.iter().enumerate().map(|(at, row)| {
                if let Some(soon) = rows.get(at + AHEAD) {
                    prefetch(&self.by_row, soon.index());
                }
                let next = std::mem::replace(&mut self.by_row[row.index()], batch);
                assert!(next != batch, "a batch names a row once");
                next
            }));
            emit(batch, &next)?;
        }
        Ok(())
    }

    /// Replays the trace with what [`Belady::look_back`] found, which `next_uses` hands back, in order from either end, until
    /// a batch's plan is emitted: a word a row, see [`Fetch`]. The cache is empty at first.
    pub fn replay<T: AccessTrace<Row = R>>(
        &mut self,
        trace: &mut T,
        mut next_uses: impl FnMut(u32, &mut Vec<u32>) -> Result<(), T::Error>,
        mut emit: impl FnMut(u32, &[u32]) -> Result<(), T::Error>,
    ) -> Result<Tally, T::Error> {
        assert!(trace.batches() as usize <= self.stays.len(), "more batches than there is room for");
        let (mut rows, mut words, mut tally) = (Vec::new(), Vec::new(), Tally::default());
        self.decide(trace.batches(), &mut words, &mut next_uses)?;
        self.by_row.fill(NONE);
        self.free.clear();
        self.used = 0;
        for batch in 0..trace.batches() {
            trace.read(batch, &mut rows)?;
            next_uses(batch, &mut words)?;
            assert_eq!(rows.len(), words.len(), "a next use a row");
            let (hits, kept) = self.batch(self.stays[batch as usize], &rows, &mut words);
            tally.accesses += rows.len() as u64;
            tally.hits += hits;
            tally.kept += kept;
            emit(batch, &words)?;
        }
        Ok(tally)
    }

    /// Says which rows of each batch stay behind it.
    fn decide<E>(
        &mut self,
        batches: u32,
        words: &mut Vec<u32>,
        mut next_uses: impl FnMut(u32, &mut Vec<u32>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.waiting.fill(0);
        self.keys = HighestSet::new(self.waiting.len());
        let mut staying = 0usize;
        for batch in 0..batches {
            // They are wanted now, and stay or leave anew.
            staying -= std::mem::take(&mut self.waiting[batch as usize]) as usize;
            self.keys.remove(batch as usize);
            next_uses(batch, words)?;
            for next in words.iter().filter(|next| **next != NONE) {
                let waiting = &mut self.waiting[*next as usize];
                *waiting += 1;
                staying += 1;
                if *waiting == 1 {
                    self.keys.insert(*next as usize);
                }
            }
            let over = staying.saturating_sub(self.slots as usize);
            staying -= over;
            self.stays[batch as usize] = self.give_up(over);
        }
        // Whatever leaves behind a batch, of rows wanted in one batch those that came last: so rows that a batch wants stay
        // as long as no later one gives up what is wanted as soon.
        let (mut limit, mut given_up) = (NONE, 0u32);
        for batch in (0..batches).rev() {
            let found = &mut self.stays[batch as usize];
            match found.before {
                NONE => {}
                before if before < limit => (limit, given_up) = (before, found.at),
                before if before == limit => given_up += found.at,
                _ => {}
            }
            *found = Stay { before: limit, at: NONE };
            if given_up > 0 {
                next_uses(batch, words)?;
                let wanted_there = words.iter().filter(|next| **next == limit).count() as u32;
                found.at = wanted_there - given_up.min(wanted_there);
                given_up -= given_up.min(wanted_there);
            }
        }
        Ok(())
    }

    /// Takes `over` from the rows that wait, those wanted last first. Returns the batch where that ended, and how many of its
    /// rows were taken.
    fn give_up(&mut self, mut over: usize) -> Stay {
        let mut last = Stay { before: NONE, at: 0 };
        while over > 0 {
            let highest = self.keys.highest().expect("more rows wait than there are slots");
            let waiting = &mut self.waiting[highest];
            let taken = over.min(*waiting as usize);
            *waiting -= taken as u32;
            over -= taken;
            if *waiting == 0 {
                self.keys.remove(highest);
            }
            last = Stay { before: highest as u32, at: taken as u32 };
        }
        last
    }

    /// Turns the next uses of a batch into its plan. Returns hits, and rows that were read and stay.
    fn batch(&mut self, mut stay: Stay, rows: &[R], words: &mut [u32]) -> (u64, u64) {
        let (mut hits, mut kept) = (0, 0);
        self.late.clear();
        for (at, (row, word)) in rows.iter().zip(words.iter_mut()).enumerate() {
            if let Some(soon) = rows.get(at + AHEAD) {
                prefetch(&self.by_row, soon.index());
            }
            let stays = match *word {
                NONE => false,
                next if next == stay.before => {
                    let room = stay.at > 0;
                    stay.at -= u32::from(room);
                    room
                }
                next => next < stay.before,
            };
            let home = &mut self.by_row[row.index()];
            if *home != NONE {
                hits += 1;
                *word = Fetch::Hit(SlotIndex(*home)).word();
                if !stays {
                    self.free.push(std::mem::replace(home, NONE));
                }
            } else if !stays {
                *word = Fetch::Read.word();
            } else {
                kept += 1;
                let fresh = (self.used < self.slots).then_some(self.used);
                match self.free.pop().or(fresh) {
                    Some(slot) => {
                        self.used = self.used.max(slot + 1);
                        *home = slot;
                        *word = Fetch::ReadInto(SlotIndex(slot)).word();
                    }
                    // A later row of this batch leaves one.
                    None => self.late.push(at as u32),
                }
            }
        }
        for at in &self.late {
            let slot = self.free.pop().expect("no more rows stay than there are slots");
            self.by_row[rows[*at as usize].index()] = slot;
            words[*at as usize] = Fetch::ReadInto(SlotIndex(slot)).word();
        }
        (hits, kept)
    }
}
