//! Segments of batches that share a cache on disk (DiskGNN section 5.1): how large they must be to fit a disk, which
//! rows of a segment are shared, and in which order they are stored, so that the rows of a batch are close together.

use crate::access::Row;
use esker_types::random::mix;

/// No batch; no row.
const NONE: u32 = u32::MAX;
/// Sizes are searched in steps that leave at most this many.
const MOST_GROUPS: u32 = 1024;
/// Number of permutations of batches whose smallest value orders rows.
const PERMUTATIONS: u64 = 4;

/// How many rows are stored for segments of any size, from one pass over the accesses. A row is stored once for every
/// segment that accesses it. So an access stores nothing if the same segment accessed the row before. Such pairs of
/// accesses are counted by the batches that they are in. A size is then a sum of squares along the diagonal.
#[derive(Debug)]
pub struct SegmentSizes {
    batches: u32,
    /// Batches per group. Batches of a group are not distinguished.
    step: u32,
    groups: usize,
    accesses: u64,
    /// Pairs by group of the earlier and of the later access. After `close`, sums over all groups up to both.
    pairs: Vec<u64>,
    /// The last batch that accessed each row.
    last: Vec<u32>,
}

impl SegmentSizes {
    /// For this many rows and batches.
    pub fn new(rows: u64, batches: u32) -> SegmentSizes {
        let step = batches.div_ceil(MOST_GROUPS).max(1);
        let groups = batches.div_ceil(step) as usize;
        let (pairs, last) = (vec![0; groups * groups], vec![NONE; rows as usize]);
        SegmentSizes { batches, step, groups, accesses: 0, pairs, last }
    }

    /// Its size in bytes.
    pub fn bytes_for(rows: u64, batches: u64) -> u64 {
        let groups = batches.min(MOST_GROUPS as u64);
        rows * 4 + groups * groups * 8
    }

    /// Counts a batch's accesses to rows on disk. Batches come in order.
    pub fn see<R: Row>(&mut self, batch: u32, rows: impl Iterator<Item = R>) {
        let later = (batch / self.step) as usize;
        for row in rows {
            let last = std::mem::replace(&mut self.last[row.index()], batch);
            self.accesses += 1;
            if last != NONE {
                self.pairs[(last / self.step) as usize * self.groups + later] += 1;
            }
        }
    }

    /// Sums up the counts after the last batch.
    pub fn close(&mut self) {
        self.last = Vec::new();
        for earlier in 0..self.groups {
            let mut row = 0;
            for later in 0..self.groups {
                row += self.pairs[earlier * self.groups + later];
                let above = earlier.checked_sub(1).map_or(0, |above| self.pairs[above * self.groups + later]);
                self.pairs[earlier * self.groups + later] = above + row;
            }
        }
    }

    /// Sizes that can be distinguished, ascending: 1, then steps up to all batches.
    pub fn sizes(&self) -> impl Iterator<Item = u32> + '_ {
        let coarse = (1..=self.groups as u32).map(|groups| groups * self.step);
        std::iter::once(1).chain(coarse.filter(|size| *size > 1)).map(|size| size.min(self.batches.max(1)))
    }

    /// Rows stored if segments have this many batches. `size` is one of [`SegmentSizes::sizes`].
    pub fn rows(&self, size: u32) -> u64 {
        if size < self.step {
            return self.accesses;
        }
        let width = (size.div_ceil(self.step) as usize).max(1);
        let at = |earlier: usize, later: usize| match (earlier, later) {
            (0, _) | (_, 0) => 0,
            _ => self.pairs[(earlier - 1) * self.groups + later - 1],
        };
        let mut inside = 0;
        for start in (0..self.groups).step_by(width) {
            let end = (start + width).min(self.groups);
            inside += at(end, end) + at(start, start) - at(start, end) - at(end, start);
        }
        self.accesses - inside
    }

    /// The smallest size with at most `most` rows, and its rows. Otherwise the fewest rows of any size, as the error.
    pub fn smallest(&self, most: u64) -> Result<(u32, u64), u64> {
        let mut fewest = u64::MAX;
        for size in self.sizes() {
            let rows = self.rows(size);
            if rows <= most {
                return Ok((size, rows));
            }
            fewest = fewest.min(rows);
        }
        Err(fewest)
    }
}

/// How many rows are stored for segments of one size, which may be any. With many batches, [`SegmentSizes`] knows sizes
/// only in steps and counts a size between two steps as the larger.
#[derive(Debug)]
pub struct RowsOfSegment {
    segment: u32,
    stored: u64,
    /// The last segment that accessed each row.
    last: Vec<u32>,
}

impl RowsOfSegment {
    /// For this many rows, and segments of `segment` batches.
    pub fn new(rows: u64, segment: u32) -> RowsOfSegment {
        RowsOfSegment { segment: segment.max(1), stored: 0, last: vec![NONE; rows as usize] }
    }

    /// Counts a batch's accesses to rows on disk. Batches come in order.
    pub fn see<R: Row>(&mut self, batch: u32, rows: impl Iterator<Item = R>) {
        let segment = batch / self.segment;
        for row in rows {
            let last = std::mem::replace(&mut self.last[row.index()], segment);
            self.stored += u64::from(last != segment);
        }
    }

    /// Rows stored for the batches so far.
    pub fn stored(&self) -> u64 {
        self.stored
    }
}

/// The rows that the batches of one segment share, in the order of their cache.
#[derive(Debug)]
pub struct SegmentRows {
    /// By row: the two smallest ranks of batches that access it, 16 bits each. 0 for none yet.
    keys: Vec<u32>,
    /// By row: its position in the cache.
    places: Vec<u32>,
    /// Rows that at least two batches access.
    shared: Vec<u32>,
}

impl SegmentRows {
    /// For segments of a graph with this many rows, fewer than 2^32.
    pub fn new(rows: u64) -> SegmentRows {
        assert!(rows < NONE as u64, "{rows} rows: they are named by 32 bits here");
        let (keys, places) = (vec![0; rows as usize], vec![NONE; rows as usize]);
        SegmentRows { keys, places, shared: Vec::new() }
    }

    /// Its size in bytes.
    pub fn bytes_for(rows: u64) -> u64 {
        // The array of shared rows may have doubled.
        rows * (4 + 4 + 8)
    }

    /// Starts a segment.
    pub fn begin(&mut self) {
        self.keys.fill(0);
        for row in self.shared.drain(..) {
            self.places[row as usize] = NONE;
        }
    }

    /// Takes the rows on disk that a batch of the segment accesses. `rank` is the batch's rank in a permuted order, see
    /// [`ranks`].
    pub fn see<R: Row>(&mut self, rank: u16, rows: impl Iterator<Item = R>) {
        let rank = rank as u32;
        for row in rows {
            let key = &mut self.keys[row.index()];
            let (first, second) = (*key >> 16, *key & 0xFFFF);
            *key = match () {
                () if first == 0 => rank << 16,
                () if second == 0 => {
                    self.shared.push(row.index() as u32);
                    (first.min(rank) << 16) | first.max(rank)
                }
                () if rank < first => (rank << 16) | first,
                () if rank < second => (first << 16) | rank,
                () => *key,
            };
        }
    }

    /// Ends the segment and orders the shared rows. With `by_hash` it orders them by MinHash over the batches that
    /// access them: by the smallest rank, as in the paper, and among equals by the next smallest, which groups rows of
    /// the same two batches. Without `by_hash` they stay in the order of their ids.
    pub fn close(&mut self, by_hash: bool) {
        let keys = &self.keys;
        match by_hash {
            true => {
                self.shared.sort_unstable_by_key(|row| ((keys[*row as usize] as u64) << 32) | *row as u64)
            }
            false => self.shared.sort_unstable(),
        }
        for (place, row) in self.shared.iter().enumerate() {
            self.places[*row as usize] = place as u32;
        }
    }

    /// The position of a row in the segment's cache, if it is shared.
    #[inline(always)]
    pub fn place<R: Row>(&self, row: R) -> Option<u32> {
        Some(self.places[row.index()]).filter(|place| *place != NONE)
    }

    /// The rows of the cache, in order.
    pub fn shared(&self) -> &[u32] {
        &self.shared
    }
}

/// The MinHash value of each batch, as a rank from 1 on: the smallest value that any of some permutations gives it
/// (Algorithm 1).
pub fn ranks(batches: u32) -> Vec<u16> {
    let value = |batch: u32| {
        let of = |permutation: u64| mix(mix(permutation + 1) ^ batch as u64);
        (0..PERMUTATIONS).map(of).min().unwrap_or(0)
    };
    let mut order: Vec<u32> = (0..batches).collect();
    order.sort_by_key(|batch| (value(*batch), *batch));
    let mut ranks = vec![0; batches as usize];
    // If there are more batches than ranks, batches share ranks.
    let share = (batches as u64).div_ceil(u16::MAX as u64).max(1);
    for (place, batch) in order.into_iter().enumerate() {
        ranks[batch as usize] = (place as u64 / share) as u16 + 1;
    }
    ranks
}

/// Rows and pages of reads from a cache on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PagesRead {
    /// Rows accessed.
    pub rows: u64,
    /// Pages that contain them, each counted once per batch.
    pub pages: u64,
}

/// Pages that a batch reads of a cache with rows of `row_bytes`, given the rows' positions in ascending order.
pub fn pages_of(places: impl Iterator<Item = u32>, row_bytes: u64, page_bytes: u64) -> PagesRead {
    let mut found = PagesRead::default();
    let mut next_page = 0;
    for place in places {
        let start = place as u64 * row_bytes;
        let (first, last) = (start / page_bytes, (start + row_bytes - 1) / page_bytes);
        found.rows += 1;
        found.pages += (last + 1).saturating_sub(first.max(next_page));
        next_page = last + 1;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    type Trace = Vec<BTreeSet<u32>>;

    fn traces() -> impl Strategy<Value = Trace> {
        prop::collection::vec(prop::collection::btree_set(0u32..40, 0..20), 1..30)
    }

    proptest! {
        /// Compares with sets.
        #[test]
        fn sizes_count_distinct_rows_of_segments(trace in traces(), most in 0u64..400) {
            let mut sizes = SegmentSizes::new(40, trace.len() as u32);
            for (batch, rows) in trace.iter().enumerate() {
                sizes.see(batch as u32, rows.iter().copied());
            }
            sizes.close();
            let distinct = |size: u32| -> u64 {
                let segments = trace.chunks(size as usize);
                segments.map(|batches| batches.iter().flatten().collect::<BTreeSet<_>>().len() as u64).sum()
            };
            for size in 1..=trace.len() as u32 {
                prop_assert_eq!(sizes.rows(size), distinct(size), "size {}", size);
                let mut stored = RowsOfSegment::new(40, size);
                for (batch, rows) in trace.iter().enumerate() {
                    stored.see(batch as u32, rows.iter().copied());
                }
                prop_assert_eq!(stored.stored(), distinct(size), "size {}", size);
            }
            let expected = (1..=trace.len() as u32).find(|size| distinct(*size) <= most);
            prop_assert_eq!(sizes.smallest(most).ok().map(|found| found.0), expected);
        }

        /// Compares with counting.
        #[test]
        fn rows_of_two_batches_are_shared_and_lie_by_their_batches(trace in traces(), other in traces()) {
            let mut rows = SegmentRows::new(40);
            for trace in [&trace, &other] {
                let ranks = ranks(trace.len() as u32);
                rows.begin();
                for (batch, accessed) in trace.iter().enumerate() {
                    rows.see(ranks[batch], accessed.iter().copied());
                }
                rows.close(true);
                let mut users: BTreeMap<u32, Vec<u16>> = BTreeMap::new();
                for (batch, accessed) in trace.iter().enumerate() {
                    accessed.iter().for_each(|row| users.entry(*row).or_default().push(ranks[batch]));
                }
                users.values_mut().for_each(|ranks| ranks.sort_unstable());
                let mut shared: Vec<u32> =
                    users.iter().filter(|(_, ranks)| ranks.len() > 1).map(|(row, _)| *row).collect();
                shared.sort_by_key(|row| (users[row][0], users[row][1], *row));
                prop_assert_eq!(rows.shared(), &shared[..]);
                for row in 0..40u32 {
                    let place = shared.iter().position(|found| *found == row).map(|place| place as u32);
                    prop_assert_eq!(rows.place(row), place);
                }
            }
        }

        #[test]
        fn pages_are_those_that_rows_touch(places in prop::collection::btree_set(0u32..500, 0..100), row_bytes in 1u64..9000) {
            let found = pages_of(places.iter().copied(), row_bytes, 4096);
            let pages: BTreeSet<u64> = places
                .iter()
                .flat_map(|place| {
                    let start = *place as u64 * row_bytes;
                    start / 4096..=(start + row_bytes - 1) / 4096
                })
                .collect();
            prop_assert_eq!(found, PagesRead { rows: places.len() as u64, pages: pages.len() as u64 });
        }
    }

    #[test]
    fn a_size_between_two_steps_is_counted_exactly_by_itself_alone() {
        // Every row is accessed by three consecutive batches. Sizes are distinguished in steps of two.
        let batches = 2 * MOST_GROUPS;
        let rows = |batch: u32| (batch.saturating_sub(2)..=batch).map(|row| row as u64);
        let (mut sizes, mut stored) =
            (SegmentSizes::new(batches as u64, batches), RowsOfSegment::new(batches as u64, 5));
        let mut segments = vec![BTreeSet::new(); batches.div_ceil(5) as usize];
        for batch in 0..batches {
            sizes.see(batch, rows(batch));
            stored.see(batch, rows(batch));
            segments[(batch / 5) as usize].extend(rows(batch));
        }
        sizes.close();
        let expected: u64 = segments.iter().map(|rows| rows.len() as u64).sum();
        assert_eq!(stored.stored(), expected);
        assert!(sizes.rows(5) < expected && sizes.sizes().all(|size| size == 1 || size % 2 == 0));
    }

    #[test]
    fn ranks_are_a_permutation() {
        let mut all = ranks(1000);
        all.sort_unstable();
        assert!(all.iter().zip(1..).all(|(rank, expected)| *rank == expected));
        assert!(ranks(70_000).iter().all(|rank| *rank > 0));
    }
}
