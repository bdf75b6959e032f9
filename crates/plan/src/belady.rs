//! Belady's algorithm at batch granularity, with bypass (Ginex sections 3.3 and 3.4), in linear time.
//!
//! One pass backwards finds each access's next use: the batch recorded last for a row is the next one that wants it. One
//! pass forwards replays the cache. Cached rows hang in a list for each batch, that of their next use, so a batch's hits are one
//! list and the row wanted last is in the highest list that is not empty. After a batch, of the rows cached and those just
//! read the ones used soonest stay; how many of each list that is follows from counts, so that a row just read goes to
//! a slot or never touches one. No step looks at more than the rows of the batch and those that leave.

use crate::access::{AccessTrace, Fetch, Row};
use crate::highest::HighestSet;
use esker_io::prefetch;
use esker_types::SlotIndex;

/// Slots are 31-bit numbers, and one of those means something else.
pub const MOST_SLOTS: u32 = (1 << 31) - 1;
/// No slot; no further use.
const NONE: u32 = u32::MAX;
/// Rows whose lines are asked for ahead.
const AHEAD: usize = 24;

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

#[derive(Debug, Clone, Copy, Default)]
struct Slot<R> {
    /// The row it holds.
    row: R,
    /// The next slot of its list.
    link: u32,
}

/// Slots whose rows are wanted next in the same batch.
#[derive(Debug, Clone, Copy)]
struct List {
    head: u32,
    count: u32,
    /// Rows just read that would join it.
    fresh: u32,
}

const EMPTY: List = List { head: NONE, count: 0, fresh: 0 };

/// A planner, with the memory it needs.
#[derive(Debug)]
pub struct Belady<R> {
    /// Looking back: the batch that wants the row next. Replaying: its slot.
    by_row: Vec<u32>,
    slots: Vec<Slot<R>>,
    lists: Vec<List>,
    /// Lists that may not be empty.
    keys: HighestSet,
    /// Slots without a row, as a list.
    free: u32,
    cached: usize,
    /// Places in the batch of rows just read that will be wanted again, and when.
    again: Vec<(u32, u32)>,
}

impl<R: Row> Belady<R> {
    /// A planner for a cache of `slots` of `rows` rows and traces of up to `batches` batches.
    pub fn new(rows: u64, slots: u64, batches: u32) -> Belady<R> {
        let slots = slots.min(rows).min(MOST_SLOTS as u64) as usize;
        assert!(batches < NONE, "{batches} batches: one number means never");
        Belady {
            by_row: vec![NONE; rows as usize],
            slots: vec![Slot::default(); slots],
            lists: vec![EMPTY; batches as usize],
            keys: HighestSet::new(batches as usize),
            free: NONE,
            cached: 0,
            again: Vec::new(),
        }
    }

    /// Bytes that a planner takes, buffers for batches of up to `largest` rows included.
    pub fn bytes_for(rows: u64, slots: u64, batches: u64, largest: u64) -> u64 {
        let slots = slots.min(rows).min(MOST_SLOTS as u64);
        let tables = rows * 4 + slots * size_of::<Slot<R>>() as u64 + batches * size_of::<List>() as u64;
        // Rows, words, and those wanted again, in arrays that may have doubled.
        tables + HighestSet::bytes_for(batches) + largest * (size_of::<R>() as u64 + 4 + 2 * 8)
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

    /// Replays the trace with what [`Belady::look_back`] found, which `next_uses` hands back, and emits a word a row: see
    /// [`Fetch`]. The cache is empty at first.
    pub fn replay<T: AccessTrace<Row = R>>(
        &mut self,
        trace: &mut T,
        mut next_uses: impl FnMut(u32, &mut Vec<u32>) -> Result<(), T::Error>,
        mut emit: impl FnMut(u32, &[u32]) -> Result<(), T::Error>,
    ) -> Result<Tally, T::Error> {
        assert!(trace.batches() as usize <= self.lists.len(), "more batches than there are lists");
        self.empty();
        let (mut rows, mut words, mut tally) = (Vec::new(), Vec::new(), Tally::default());
        for batch in 0..trace.batches() {
            trace.read(batch, &mut rows)?;
            next_uses(batch, &mut words)?;
            assert_eq!(rows.len(), words.len(), "a next use a row");
            tally.accesses += rows.len() as u64;
            tally.hits += self.take_hits(batch, &rows, &mut words);
            tally.kept += self.keep(&rows, &mut words);
            emit(batch, &words)?;
        }
        Ok(tally)
    }

    fn empty(&mut self) {
        self.by_row.fill(NONE);
        self.lists.fill(EMPTY);
        self.keys = HighestSet::new(self.lists.len());
        let count = self.slots.len() as u32;
        self.slots
            .iter_mut()
            .zip(1..)
            .for_each(|(slot, next)| slot.link = if next < count { next } else { NONE });
        self.free = if count > 0 { 0 } else { NONE };
        self.cached = 0;
    }

    /// Serves hits, whose slots go to the lists of their next use or are free; notes the others that will be wanted
    /// again. On the way in `words` are next uses. Returns the number of hits.
    fn take_hits(&mut self, batch: u32, rows: &[R], words: &mut [u32]) -> u64 {
        // Every row of this list is in the batch, and is listed anew below.
        let due = std::mem::replace(&mut self.lists[batch as usize], EMPTY).count;
        self.keys.remove(batch as usize);
        self.cached -= due as usize;
        self.again.clear();
        let mut hits = 0;
        for (at, (row, word)) in rows.iter().zip(words.iter_mut()).enumerate() {
            if let Some(soon) = rows.get(at + AHEAD) {
                prefetch(&self.by_row, soon.index());
            }
            let (slot, next) = (self.by_row[row.index()], *word);
            if slot != NONE {
                hits += 1;
                *word = Fetch::Hit(SlotIndex(slot)).word();
                match next {
                    NONE => {
                        self.by_row[row.index()] = NONE;
                        self.set_free(slot);
                    }
                    next => self.list(slot, next),
                }
            } else {
                *word = Fetch::Read.word();
                if next != NONE {
                    self.again.push((at as u32, next));
                }
            }
        }
        debug_assert_eq!(hits, due as u64, "the list of a batch is its hits");
        hits
    }

    /// Of the rows cached and those noted, keeps those wanted soonest; returns how many of the noted stay.
    fn keep(&mut self, rows: &[R], words: &mut [u32]) -> u64 {
        let mut again = std::mem::take(&mut self.again);
        let over = (self.cached + again.len()).saturating_sub(self.slots.len());
        let (limit, mut at_limit) = match over {
            0 => (NONE, 0),
            over => self.make_room(&again, over),
        };
        let mut kept = 0;
        for (at, next) in again.drain(..) {
            self.lists[next as usize].fresh = 0;
            let stays = next < limit || (next == limit && at_limit > 0);
            if !stays {
                continue;
            }
            if next == limit {
                at_limit -= 1;
            }
            let slot = self.free;
            self.free = self.slots[slot as usize].link;
            let row = rows[at as usize];
            self.slots[slot as usize].row = row;
            self.by_row[row.index()] = slot;
            self.list(slot, next);
            words[at as usize] = Fetch::ReadInto(SlotIndex(slot)).word();
            kept += 1;
        }
        self.again = again;
        kept
    }

    /// Drops `over` of the rows cached and noted, those wanted last first. Returns the list where that ended, and how
    /// many of the noted may still join it.
    fn make_room(&mut self, again: &[(u32, u32)], mut over: usize) -> (u32, u32) {
        for (_, next) in again {
            let list = &mut self.lists[*next as usize];
            list.fresh += 1;
            if list.fresh == 1 && list.count == 0 {
                self.keys.insert(*next as usize);
            }
        }
        loop {
            let highest = self.keys.highest().expect("there are more rows than slots");
            let List { count, fresh, .. } = self.lists[highest];
            // Of rows wanted in the same batch those that are there already may as well stay.
            let refused = (fresh as usize).min(over);
            let dropped = (count as usize).min(over - refused);
            over -= refused + dropped;
            (0..dropped).for_each(|_| self.drop_from(highest));
            if over == 0 {
                return (highest as u32, fresh - refused as u32);
            }
            self.keys.remove(highest);
        }
    }

    fn drop_from(&mut self, list: usize) {
        let slot = self.lists[list].head;
        let Slot { row, link } = self.slots[slot as usize];
        self.by_row[row.index()] = NONE;
        (self.lists[list].head, self.lists[list].count) = (link, self.lists[list].count - 1);
        self.cached -= 1;
        self.set_free(slot);
    }

    #[inline(always)]
    fn list(&mut self, slot: u32, next: u32) {
        let list = &mut self.lists[next as usize];
        self.slots[slot as usize].link = list.head;
        list.head = slot;
        list.count += 1;
        self.cached += 1;
        if list.count == 1 {
            self.keys.insert(next as usize);
        }
    }

    #[inline(always)]
    fn set_free(&mut self, slot: u32) {
        self.slots[slot as usize].link = self.free;
        self.free = slot;
    }
}
