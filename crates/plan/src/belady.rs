//! Belady's algorithm at batch granularity, with bypass (Ginex sections 3.3 and 3.4), in linear time.
//!
//! A row may stay in the cache between two batches that access it. If more rows would stay than there are slots, those
//! with the soonest next use stay. Counts are enough to decide this. One backward pass over the accesses finds the next
//! use of each access. For each batch it also counts how many of its rows each later batch accesses next. There are few
//! such counts. They determine, for each batch, up to which next use its rows stay. A forward pass over the counts
//! removes the surplus, furthest next use first. A backward pass corrects this: a row that is removed later was never
//! cached. So a row that would have to leave before its next use is not cached at all, a slot is occupied until its row
//! is accessed, and no row to evict is ever searched for. A last forward pass over the accesses assigns slots. Only the
//! first and the last pass read accesses, with one look-up per access in a table with one entry per row.

use crate::access::{AccessTrace, Row};
use crate::highest::HighestSet;
use crate::placement::{MOST_READ, MOST_SLOTS, Placement, Placements};
use esker_io::{prefer_large_pages, prefetch};
use std::marker::PhantomData;

/// No slot; no further use; no limit.
const NONE: u32 = u32::MAX;
/// The next use of a row that stays to the end of a lap, and is used in the next one.
const NEXT_LAP: u32 = u32::MAX - 1;
/// While slots are assigned: the row is read and not kept.
const READ: u32 = u32::MAX;
/// While slots are assigned: the row is read and kept in the slot given by the other bits.
const INTO: u32 = 1 << 31;
/// How many rows ahead table entries are prefetched.
const PREFETCH_DISTANCE: usize = 32;
/// Laps that show which rows stay from one to the next. The first one begins with an empty cache, and keeps rows for longer
/// than any later one can: those of its end are not typical.
pub const LAPS: u32 = 3;
/// If a batch has fewer rows than one per this many later batches, sorting is faster than scanning all counts.
const SPARSE: usize = 16;

/// Totals of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlanTally {
    /// Rows accessed.
    pub accesses: u64,
    /// Rows found in the cache.
    pub hits: u64,
    /// Rows kept after they were read.
    pub kept: u64,
}

impl PlanTally {
    /// Rows read, including the first filling of the cache.
    pub fn misses(&self) -> u64 {
        self.accesses - self.hits
    }
}

/// Which rows of a batch stay after it.
#[derive(Debug, Clone, Copy)]
struct Stay {
    /// Rows with a next use before this batch.
    before: u32,
    /// And this many rows with their next use in it.
    at: u32,
}

/// How many rows of one batch another batch accesses next.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct RequestCount {
    /// The batch that accesses them.
    pub by: u32,
    /// Number of rows.
    pub rows: u32,
}

/// Storage for the results of a planner's backward pass, until it replays.
pub trait NextUses {
    /// The error of storing and reading.
    type Error;

    /// Stores, for a batch, the next batch that accesses each of its rows (`u32::MAX` if none, one less if the next lap
    /// does), and how many rows each
    /// later batch accesses next, in order of batches. Batches come from the last to the first.
    fn put(&mut self, batch: u32, next: &[u32], accessed: &[RequestCount]) -> Result<(), Self::Error>;

    /// Reads the next uses of a batch.
    fn next(&mut self, batch: u32, next: &mut Vec<u32>) -> Result<(), Self::Error>;

    /// Reads how many rows of a batch each later batch accesses next.
    fn accessed(&mut self, batch: u32, accessed: &mut Vec<RequestCount>) -> Result<(), Self::Error>;
}

/// A planner, with the memory it needs.
#[derive(Debug)]
pub struct Belady<R> {
    /// Backward pass: the next batch that accesses the row. Replay: its slot.
    by_row: Vec<u32>,
    slots: u32,
    /// Free slots are at 1 to `left`. The elements at 0 and `left + 1` are written without a meaning.
    free: Vec<u32>,
    left: usize,
    /// For each batch: rows with their next use in it. The last element is for rows that are never used again. Rows at
    /// even and odd indices are counted separately, because consecutive increments of the same count would wait for
    /// each other.
    waiting: [Vec<u32>; 2],
    stays: Vec<Stay>,
    /// Batches that are the next use of some row.
    keys: HighestSet,
    /// For each batch: rows that stay from lap to lap and are in the cache after it. Empty if none do.
    lasting: Vec<u32>,
    /// Indices in the batch of rows that stay and have no slot yet.
    late: Vec<u32>,
    named: PhantomData<R>,
}

impl<R: Row> Belady<R> {
    /// A planner for a cache of `slots` of `rows` rows and traces of up to `batches` batches.
    pub fn new(rows: u64, slots: u64, batches: u32) -> Belady<R> {
        let slots = slots.min(rows).min(MOST_SLOTS as u64) as u32;
        assert!(batches < NEXT_LAP, "{batches} batches: two numbers mean none of them");
        // The table is accessed at random, where every small page would be a TLB miss.
        let mut by_row = Vec::with_capacity(rows as usize);
        prefer_large_pages(by_row.spare_capacity_mut());
        by_row.resize(rows as usize, NONE);
        let counts = || vec![0; batches as usize + 1];
        Belady {
            by_row,
            slots,
            free: vec![NONE; slots as usize + 2],
            left: 0,
            waiting: [counts(), counts()],
            stays: vec![Stay { before: NONE, at: 0 }; batches as usize],
            keys: HighestSet::new(batches as usize),
            lasting: Vec::new(),
            late: Vec::new(),
            named: PhantomData,
        }
    }

    /// Bytes of a planner of laps, beyond those of one whose cache is empty at first.
    pub fn lap_bytes_for(slots: u64, batches: u64) -> u64 {
        // Rows that stay, twice while they are collected, and their slots.
        slots * (2 * 8 + 4) + batches * 4
    }

    /// Bytes of a planner, including buffers for batches of up to `largest` rows.
    pub fn bytes_for(rows: u64, slots: u64, batches: u64, largest: u64) -> u64 {
        let slots = slots.min(rows).min(MOST_SLOTS as u64);
        let a_batch = 2 * 4 + size_of::<Stay>() as u64 + size_of::<RequestCount>() as u64;
        let tables = rows * 4 + (slots + 2) * 4 + (batches + 1) * a_batch;
        // Rows, words, narrow next uses, and rows without a slot.
        tables + HighestSet::bytes_for(batches) + largest * (size_of::<R>() as u64 + 4 + 2 + 4)
    }

    /// Decides for every access where its row comes from and whether it stays, and emits the decisions batch by batch.
    /// The rows that a batch reads are numbered in access order. The cache is empty at first.
    pub fn plan<T: AccessTrace<Row = R>>(
        &mut self,
        trace: &mut T,
        uses: &mut impl NextUses<Error = T::Error>,
        emit: impl FnMut(u32, &Placements) -> Result<(), T::Error>,
    ) -> Result<PlanTally, T::Error> {
        Ok(self.plan_lap(trace, uses, &[], emit)?.0)
    }

    /// Plans a trace that is repeated, lap after lap. At the start of a lap, slot `i` has the row `around[i]`. At its end the
    /// same rows are in the cache again, in the slots that are returned. Every row of `around` is in the trace.
    pub fn plan_lap<T: AccessTrace<Row = R>>(
        &mut self,
        trace: &mut T,
        uses: &mut impl NextUses<Error = T::Error>,
        around: &[u64],
        emit: impl FnMut(u32, &Placements) -> Result<(), T::Error>,
    ) -> Result<(PlanTally, Vec<u32>), T::Error> {
        self.check(trace.batches());
        assert!(around.len() <= self.slots as usize, "more rows stay than there are slots");
        self.look_back(trace, uses, around)?;
        self.decide(trace.batches(), uses)?;
        let tally = self.replay(trace, trace.batches(), uses, around, emit)?;
        let slots: Vec<u32> = around.iter().map(|row| self.by_row[*row as usize]).collect();
        assert!(!slots.contains(&NONE), "a row that stays is there at the end");
        Ok((tally, slots))
    }

    /// The rows that stay from the end of a lap to the beginning of the next one, ascending: what [`LAPS`] laps in a row, as
    /// one trace, keep before the last of them. `trace` is one lap. The planner has room for the batches of all.
    pub fn between_laps<T: AccessTrace<Row = R>>(
        &mut self,
        trace: &mut T,
        uses: &mut impl NextUses<Error = T::Error>,
    ) -> Result<Vec<u64>, T::Error> {
        let lap = trace.batches();
        let mut laps = Laps(trace);
        self.check(laps.batches());
        self.look_back(&mut laps, uses, &[])?;
        self.decide(laps.batches(), uses)?;
        self.replay(&mut laps, lap * (LAPS - 1), uses, &[], |_, _| Ok(()))?;
        let staying = (0u64..).zip(&self.by_row).filter(|(_, slot)| **slot != NONE);
        Ok(staying.map(|(row, _)| row).collect())
    }

    fn check(&self, batches: u32) {
        assert!(batches as usize <= self.stays.len(), "more batches than there is room for");
    }

    /// Reads the trace backwards and finds for each access the next batch that accesses its row.
    fn look_back<T: AccessTrace<Row = R>>(
        &mut self,
        trace: &mut T,
        uses: &mut impl NextUses<Error = T::Error>,
        around: &[u64],
    ) -> Result<(), T::Error> {
        // The table is accessed at random. Half the size makes it faster.
        match trace.batches() < u16::MAX as u32 {
            true => self.look_back_by::<u16, T>(trace, uses, around),
            false => self.look_back_by::<u32, T>(trace, uses, around),
        }
    }

    fn look_back_by<N: BatchNumber, T: AccessTrace<Row = R>>(
        &mut self,
        trace: &mut T,
        uses: &mut impl NextUses<Error = T::Error>,
        around: &[u64],
    ) -> Result<(), T::Error> {
        let row_count = self.by_row.len();
        let by_row = &mut bytemuck::cast_slice_mut::<u32, N>(&mut self.by_row)[..row_count];
        by_row.fill(N::NEVER);
        around.iter().for_each(|row| by_row[*row as usize] = N::NEXT_LAP);
        self.lasting = vec![0; if around.is_empty() { 0 } else { trace.batches() as usize }];
        self.waiting.iter_mut().for_each(|counts| counts.fill(0));
        let (mut rows, mut next, mut accessed, mut soonest) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let never = trace.batches();
        for batch in (0..trace.batches()).rev() {
            trace.read(batch, &mut rows)?;
            next.clear();
            let [even, odd] = &mut self.waiting;
            let mut look = |at: usize, row: R, counts: &mut [u32]| {
                if let Some(soon) = rows.get(at + PREFETCH_DISTANCE) {
                    prefetch(by_row, soon.index());
                }
                let next = std::mem::replace(&mut by_row[row.index()], N::of(batch)).number();
                counts[next.min(never) as usize] += 1;
                next
            };
            let mut pairs = rows.chunks_exact(2).enumerate();
            for (at, pair) in &mut pairs {
                next.push(look(2 * at, pair[0], even));
                next.push(look(2 * at + 1, pair[1], odd));
            }
            if rows.len() % 2 == 1 {
                next.push(look(rows.len() - 1, rows[rows.len() - 1], even));
            }
            assert!(even[batch as usize] + odd[batch as usize] == 0, "a batch names a row once");
            accessed.clear();
            // Taking resets counts to zero, as they were.
            let mut take = |by: u32| {
                let rows = std::mem::take(&mut even[by as usize]) + std::mem::take(&mut odd[by as usize]);
                accessed.extend((rows > 0).then_some(RequestCount { by, rows }));
            };
            if next.len() >= (never - batch) as usize / SPARSE {
                (batch + 1..never).for_each(&mut take);
            } else {
                soonest.clone_from(&next);
                soonest.retain(|next| *next < never);
                soonest.sort_unstable();
                soonest.iter().copied().for_each(take);
            }
            (even[never as usize], odd[never as usize]) = (0, 0);
            if let Some(lasting) = self.lasting.get_mut(batch as usize) {
                *lasting = next.iter().filter(|next| **next == NEXT_LAP).count() as u32;
            }
            uses.put(batch, &next, &accessed)?;
        }
        let firsts = around.iter().map(|row| by_row[*row as usize].number());
        lasting_after(&mut self.lasting, firsts);
        Ok(())
    }

    /// Reads the first `batches` batches of the trace forwards and assigns slots.
    fn replay<T: AccessTrace<Row = R>>(
        &mut self,
        trace: &mut T,
        batches: u32,
        uses: &mut impl NextUses<Error = T::Error>,
        around: &[u64],
        mut emit: impl FnMut(u32, &Placements) -> Result<(), T::Error>,
    ) -> Result<PlanTally, T::Error> {
        let (mut rows, mut placements, mut tally) = (Vec::new(), Placements::default(), PlanTally::default());
        self.by_row.fill(NONE);
        let taken = around.len() as u32;
        around.iter().zip(0..).for_each(|(row, slot)| self.by_row[*row as usize] = slot);
        // Lower slots are taken first.
        self.left = (self.slots - taken) as usize;
        let free = self.free[1..=self.left].iter_mut();
        free.zip((taken..self.slots).rev()).for_each(|(free, slot)| *free = slot);
        for batch in 0..batches {
            trace.read(batch, &mut rows)?;
            uses.next(batch, &mut placements.words)?;
            assert_eq!(rows.len(), placements.words.len(), "a next use a row");
            let (hits, kept) = self.batch(self.stays[batch as usize], &rows, &mut placements.words);
            number_reads(&mut placements, kept as usize);
            tally.accesses += rows.len() as u64;
            tally.hits += hits;
            tally.kept += kept;
            emit(batch, &placements)?;
        }
        Ok(tally)
    }

    /// Decides which rows of each batch stay after it.
    fn decide<E>(&mut self, batches: u32, uses: &mut impl NextUses<Error = E>) -> Result<(), E> {
        self.waiting[0].fill(0);
        self.keys = HighestSet::new(self.stays.len());
        let (mut staying, mut accessed) = (0usize, Vec::new());
        for batch in 0..batches {
            // These rows are accessed now. Whether they stay is decided again.
            staying -= std::mem::take(&mut self.waiting[0][batch as usize]) as usize;
            self.keys.remove(batch as usize);
            uses.accessed(batch, &mut accessed)?;
            for RequestCount { by, rows } in &accessed {
                self.waiting[0][*by as usize] += rows;
                staying += *rows as usize;
                self.keys.insert(*by as usize);
            }
            let lasting = self.lasting.get(batch as usize).copied().unwrap_or(0);
            let over = staying.saturating_sub((self.slots - lasting) as usize);
            staying -= over;
            self.stays[batch as usize] = self.give_up(over);
        }
        // Among rows with the same next use, the latest ones are given up first. So the rows of a batch stay up to the
        // earliest next use that this batch or a later one gives up.
        let (mut limit, mut given_up) = (NONE, 0u32);
        for batch in (0..batches).rev() {
            let found = &mut self.stays[batch as usize];
            match found.before {
                NONE => {}
                before if before < limit => (limit, given_up) = (before, found.at),
                before if before == limit => given_up += found.at,
                _ => {}
            }
            // Rows that are never used again do not stay, whatever the limit is.
            *found = Stay { before: limit, at: if limit == NONE { 0 } else { NONE } };
            if given_up > 0 {
                uses.accessed(batch, &mut accessed)?;
                let there = accessed.binary_search_by_key(&limit, |accessed| accessed.by);
                let there = there.map_or(0, |at| accessed[at].rows);
                found.at = there - given_up.min(there);
                given_up -= given_up.min(there);
            }
        }
        Ok(())
    }

    /// Gives up `over` of the waiting rows, furthest next use first. Returns the last next use given up, and how many
    /// of its rows.
    fn give_up(&mut self, mut over: usize) -> Stay {
        let mut last = Stay { before: NONE, at: 0 };
        while over > 0 {
            let highest = self.keys.highest().expect("more rows wait than there are slots");
            let waiting = &mut self.waiting[0][highest];
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

    /// Turns the next uses of a batch into its plan. Returns the number of hits, and of rows that are read and stay.
    /// The outcome of an access is unpredictable, so there are no branches on it: everything is written, and counts
    /// tell which values are valid.
    fn batch(&mut self, stay: Stay, rows: &[R], words: &mut [u32]) -> (u64, u64) {
        let Stay { before, at: mut room } = stay;
        let (mut hits, mut kept, mut waiting, mut left) = (0, 0, 0, self.left);
        self.late.resize(rows.len(), 0);
        for (at, (row, word)) in rows.iter().zip(words.iter_mut()).enumerate() {
            if let Some(soon) = rows.get(at + PREFETCH_DISTANCE) {
                prefetch(&self.by_row, soon.index());
            }
            let among = (*word == before) & (room > 0);
            room -= u32::from(among);
            let stays = (*word < before) | among | (*word == NEXT_LAP);
            let home = &mut self.by_row[row.index()];
            let held = *home;
            let hit = held != NONE;
            // A hit that does not stay frees its slot.
            self.free[left + 1] = held;
            left += usize::from(hit & !stays);
            // A row that is read and stays takes a free slot. If there is none, a later row of this batch frees one.
            let comes = !hit & stays;
            let given = self.free[left];
            let takes = comes & (left > 0);
            left -= usize::from(takes);
            self.late[waiting] = at as u32;
            waiting += usize::from(comes & !takes);
            // All bits are set if it is true.
            let (hit_mask, stays_mask, takes_mask) = (mask(hit), mask(stays), mask(takes));
            *word = (held & hit_mask) | ((given | INTO) & takes_mask) | (READ & !hit_mask & !takes_mask);
            *home = (held & stays_mask & hit_mask)
                | (given & takes_mask)
                | !((hit_mask & stays_mask) | takes_mask);
            hits += u64::from(hit);
            kept += u64::from(comes);
        }
        for at in &self.late[..waiting] {
            assert!(left > 0, "no more rows stay than there are slots");
            let slot = self.free[left];
            left -= 1;
            self.by_row[rows[*at as usize].index()] = slot;
            words[*at as usize] = INTO | slot;
        }
        self.left = left;
        (hits, kept)
    }
}

/// Turns the words of a batch into placements, with `kept` rows that are read and kept. It numbers the rows that are
/// read and collects the slots of kept rows. There are no branches, as above.
fn number_reads(placements: &mut Placements, kept: usize) {
    assert!(placements.words.len() < MOST_READ as usize, "a batch of too many rows");
    // Every word writes a slot. The next word overwrites it unless it counted.
    placements.kept.resize(kept + 1, 0);
    let (mut reads, mut listed) = (0u32, 0usize);
    for word in &mut placements.words {
        let (missed, keeps) = (*word & INTO != 0, (*word & INTO != 0) & (*word != READ));
        placements.kept[listed] = *word & !INTO;
        listed += usize::from(keeps);
        let read = [Placement::Read(reads).encode(), Placement::Keep(reads).encode()][usize::from(keeps)];
        *word = (*word & !mask(missed)) | (read & mask(missed));
        reads += u32::from(missed);
    }
    assert_eq!(listed, kept, "a slot a row that is kept");
    placements.kept.truncate(kept);
}

/// Turns how many rows each batch uses for the last time in a lap into how many of these rows are in the cache after it:
/// those used for the last time so far, and those still waiting for their first use, in batches `firsts`.
fn lasting_after(lasting: &mut [u32], firsts: impl ExactSizeIterator<Item = u32>) {
    let mut waiting = firsts.len() as u32;
    let mut first_used = vec![0u32; lasting.len()];
    firsts.for_each(|batch| first_used[batch as usize] += 1);
    let mut done = 0;
    for (lasting, first) in lasting.iter_mut().zip(first_used) {
        waiting -= first;
        done += *lasting;
        *lasting = waiting + done;
    }
}

/// A trace several times, one after the other.
struct Laps<'a, T>(&'a mut T);

impl<T: AccessTrace> AccessTrace for Laps<'_, T> {
    type Row = T::Row;
    type Error = T::Error;

    fn batches(&self) -> u32 {
        self.0.batches() * LAPS
    }

    fn read(&mut self, batch: u32, rows: &mut Vec<T::Row>) -> Result<(), T::Error> {
        self.0.read(batch % self.0.batches(), rows)
    }
}

/// A batch number in the table by row.
trait BatchNumber: bytemuck::Pod {
    const NEVER: Self;
    const NEXT_LAP: Self;
    fn of(batch: u32) -> Self;
    /// `u32::MAX` for never, one less for the next lap.
    fn number(self) -> u32;
}

impl BatchNumber for u32 {
    const NEVER: u32 = NONE;
    const NEXT_LAP: u32 = NEXT_LAP;
    fn of(batch: u32) -> u32 {
        batch
    }
    fn number(self) -> u32 {
        self
    }
}

impl BatchNumber for u16 {
    const NEVER: u16 = u16::MAX;
    const NEXT_LAP: u16 = u16::MAX - 1;
    fn of(batch: u32) -> u16 {
        batch as u16
    }
    fn number(self) -> u32 {
        if self >= u16::NEXT_LAP { NONE - (u16::MAX - self) as u32 } else { self as u32 }
    }
}

/// All bits set if `holds`, else none.
#[inline(always)]
fn mask(holds: bool) -> u32 {
    u32::from(holds).wrapping_neg()
}
