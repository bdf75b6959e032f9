//! The reads of batches that have some rows packed and share others in segment caches.

use esker_fetch::AccessFile;
use esker_fetch::FetchError;
use esker_plan::{AccessTrace, SegmentRows, pages_of, ranks};
use std::ops::Range;

/// Rows that batches read from disk, and the properties of the disk.
pub struct RowsOnDisk {
    /// Of each batch, in ascending row order.
    pub accessed: AccessFile<u32>,
    /// Number of nodes, each with one row.
    pub nodes: u64,
    pub row_bytes: u64,
    pub page_bytes: u64,
}

/// The size of a layout, and the reads of all batches from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SegmentLayout {
    /// Rows on disk, in caches and packed.
    pub stored_rows: u64,
    /// Packed rows that batches read, without any other bytes.
    pub packed_rows: u64,
    /// Rows that batches read from caches.
    pub cache_rows: u64,
    /// Pages that contain those rows, counted once per batch.
    pub cache_pages: u64,
}

impl RowsOnDisk {
    pub fn batches(&self) -> u32 {
        (&self.accessed).batches()
    }

    pub fn read(&self, batch: u32, rows: &mut Vec<u32>) -> Result<(), FetchError> {
        (&mut &self.accessed).read(batch, rows)
    }

    /// Segments of this many batches.
    pub fn segments(&self, size: u32) -> impl Iterator<Item = Range<u32>> + use<> {
        let (batches, size) = (self.batches(), size.max(1));
        (0..batches.div_ceil(size)).map(move |number| {
            let first = number * size;
            first..(first + size).min(batches)
        })
    }

    /// Lays rows out as `prepare` does: rows that two batches of a segment access are in its cache, ordered by MinHash
    /// or by id.
    pub fn lay_out(&self, size: u32, by_hash: bool) -> Result<SegmentLayout, FetchError> {
        let (mut layout, mut accessed) = (SegmentLayout::default(), Vec::new());
        let mut sharing = SegmentRows::new(self.nodes);
        for segment in self.segments(size) {
            sharing.begin();
            for (batch, rank) in segment.clone().zip(ranks(segment.len() as u32)) {
                self.read(batch, &mut accessed)?;
                sharing.see(rank, accessed.iter().copied());
            }
            sharing.close(by_hash);
            layout.stored_rows += sharing.shared().len() as u64;
            self.read_segment(segment, |row| sharing.place(row), &mut layout)?;
        }
        Ok(layout)
    }

    /// Reads every batch of a segment. `place` is the position of a row in the segment's cache; rows without one are
    /// packed.
    pub fn read_segment(
        &self,
        segment: Range<u32>,
        place: impl Fn(u32) -> Option<u32>,
        layout: &mut SegmentLayout,
    ) -> Result<(), FetchError> {
        let (mut accessed, mut places) = (Vec::new(), Vec::new());
        for batch in segment {
            self.read(batch, &mut accessed)?;
            places.clear();
            places.extend(accessed.iter().filter_map(|row| place(*row)));
            places.sort_unstable();
            let packed = (accessed.len() - places.len()) as u64;
            let found = pages_of(places.iter().copied(), self.row_bytes, self.page_bytes);
            layout.stored_rows += packed;
            layout.packed_rows += packed;
            layout.cache_rows += found.rows;
            layout.cache_pages += found.pages;
        }
        Ok(())
    }

    /// Read amplification: bytes read over bytes needed. `None` if none are needed.
    pub fn amplification(&self, layout: &SegmentLayout) -> Option<f64> {
        let read = layout.packed_rows * self.row_bytes + layout.cache_pages * self.page_bytes;
        self.ratio(read, layout.packed_rows + layout.cache_rows)
    }

    /// The same for the caches only.
    pub fn cache_amplification(&self, layout: &SegmentLayout) -> Option<f64> {
        self.ratio(layout.cache_pages * self.page_bytes, layout.cache_rows)
    }

    fn ratio(&self, read_bytes: u64, wanted_rows: u64) -> Option<f64> {
        (wanted_rows > 0).then(|| read_bytes as f64 / (wanted_rows * self.row_bytes) as f64)
    }

    /// Stored rows over all rows: the disk space as a multiple of all features.
    pub fn space(&self, layout: &SegmentLayout) -> f64 {
        layout.stored_rows as f64 / self.nodes.max(1) as f64
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use esker_types::NodeId;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    pub const ROWS: u32 = 60;
    pub type Trace = Vec<BTreeSet<u32>>;

    pub fn traces() -> impl Strategy<Value = Trace> {
        prop::collection::vec(prop::collection::btree_set(0..ROWS, 0..25), 1..24)
    }

    pub fn on_disk(trace: &Trace, row_bytes: u64, page_bytes: u64) -> RowsOnDisk {
        let mut accessed = AccessFile::create(&std::env::temp_dir()).unwrap();
        for rows in trace {
            accessed.append(&rows.iter().map(|row| NodeId(*row as u64)).collect::<Vec<_>>(), &[]).unwrap();
        }
        RowsOnDisk { accessed, nodes: ROWS as u64, row_bytes, page_bytes }
    }

    proptest! {
        /// Compares with an implementation by sets.
        #[test]
        fn layouts_store_distinct_rows_of_segments_and_read_what_is_wanted(
            trace in traces(),
            size in 1u32..26,
            row_bytes in 1u64..300,
            by_hash: bool,
        ) {
            let disk = on_disk(&trace, row_bytes, 128);
            let layout = disk.lay_out(size, by_hash).unwrap();
            let distinct = |batches: &[BTreeSet<u32>]| batches.iter().flatten().collect::<BTreeSet<_>>().len();
            let stored: usize = trace.chunks(size as usize).map(distinct).sum();
            prop_assert_eq!(layout.stored_rows, stored as u64);
            let accessed: usize = trace.iter().map(BTreeSet::len).sum();
            prop_assert_eq!(layout.packed_rows + layout.cache_rows, accessed as u64);
            let amplification = disk.amplification(&layout);
            prop_assert_eq!(amplification.is_none(), accessed == 0);
            prop_assert!(amplification.is_none_or(|found| found >= 1.0), "{:?}", amplification);
        }
    }

    #[test]
    fn pages_of_caches_are_read_whole_and_packed_rows_to_the_byte() {
        // Rows 0 to 3 are in both batches, four per page by id; 7 and 9 are packed.
        let trace = vec![BTreeSet::from([0, 1, 2, 3, 7]), BTreeSet::from([0, 1, 2, 3, 9])];
        let disk = on_disk(&trace, 32, 128);
        let expected = SegmentLayout { stored_rows: 6, packed_rows: 2, cache_rows: 8, cache_pages: 2 };
        assert_eq!(disk.lay_out(2, false).unwrap(), expected);
        assert_eq!(disk.amplification(&expected), Some(1.0));
        // With one batch per segment, every batch has its own rows.
        let alone = disk.lay_out(1, true).unwrap();
        assert_eq!((alone.packed_rows, alone.cache_rows, disk.cache_amplification(&alone)), (10, 0, None));
        // Each row has its own page.
        let disk = on_disk(&trace, 32, 32);
        assert_eq!(disk.lay_out(2, false).unwrap().cache_pages, 8);
    }
}
