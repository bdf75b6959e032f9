//! Plans the device's reads for the pieces that a job requests.
//!
//! Pieces are sorted by offset. Their blocks are merged if they are the same, touch, or have a gap that is cheaper to
//! read than to skip. A read ends at the size limit and at the end of a stripe. Each block is read once, however many
//! pieces share it. Planning is pure: it opens no file, so it is tested against a naive implementation.
//!
//! Planning is lazy. Pieces are distributed into buckets by offset at once, but a bucket is sorted, and its reads are
//! found, only when the device reaches it. The device would run idle while a large batch is sorted as a whole.

use crate::layout::Layout;
use std::ops::Range;

/// A requested range of a file, and its position in the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the file.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
    /// Offset in the buffer. If pieces overlap here, either one's bytes remain.
    pub at: u64,
}

impl Piece {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.bytes
    }

    /// The same for all pieces that have the same distances in the buffer as in the file.
    fn shift(&self) -> u64 {
        self.at.wrapping_sub(self.offset)
    }
}

/// Limits of a read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// Reads start and end at multiples of this.
    pub block_bytes: u64,
    /// Largest gap between two pieces that is read rather than skipped.
    pub gap_bytes: u64,
    /// Largest read. A multiple of `block_bytes`.
    pub max_bytes: u64,
}

/// One read or write of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// Offset in the whole file.
    pub offset: u64,
    /// Length in whole blocks. The file may end earlier.
    pub bytes: u32,
    /// Bytes up to the end of the last requested byte.
    pub needed: u32,
    /// Goes through the page cache: the unaligned ends of direct writes.
    pub buffered: bool,
    /// Its pieces, in [`TransferPlan::pieces_of`].
    fragments: Range<usize>,
}

impl Transfer {
    pub(crate) fn end(&self) -> u64 {
        self.offset + u64::from(self.bytes)
    }
}

/// Average pieces per bucket: few enough that sorting them takes less time than a full queue of reads.
const BUCKET_PIECES: usize = 1024;

/// The transfers of a job, as far as they have been found. It is reused for later jobs, so nothing is allocated once
/// it has grown.
#[derive(Debug, Default)]
pub(crate) struct TransferPlan {
    pub transfers: Vec<Transfer>,
    /// Indices of pieces, transfer after transfer.
    fragments: Vec<u32>,
    /// (offset, index) of pieces: buckets in order, and sorted within the buckets sorted so far.
    order: Vec<(u64, u32)>,
    /// Where each bucket ends in `order`.
    bucket_ends: Vec<usize>,
    /// Buckets that have been sorted.
    sorted_buckets: usize,
    /// Pieces taken from `order`.
    next: usize,
    /// The end of the last transfer found.
    covered: u64,
    /// Pieces that continue after it.
    open: Vec<u32>,
}

impl TransferPlan {
    pub(crate) fn clear(&mut self) {
        self.transfers.clear();
        self.fragments.clear();
        self.order.clear();
        self.bucket_ends.clear();
        self.open.clear();
        (self.sorted_buckets, self.next, self.covered) = (0, 0, 0);
    }

    /// The pieces of `transfer`.
    pub(crate) fn pieces_of(&self, transfer: &Transfer) -> &[u32] {
        &self.fragments[transfer.fragments.clone()]
    }

    /// Whether all transfers have been found.
    pub(crate) fn is_complete(&self) -> bool {
        self.next == self.order.len() && self.open.is_empty()
    }

    /// Starts planning reads of `pieces`; [`TransferPlan::find_reads`] finds them.
    pub(crate) fn begin_reads(&mut self, pieces: &[Piece]) {
        self.clear();
        let requested = || pieces.iter().zip(0u32..).filter(|(piece, _)| piece.bytes > 0);
        let (mut in_order, mut before) = (true, 0);
        let (mut least, mut most, mut count) = (u64::MAX, 0, 0);
        for (piece, _) in requested() {
            in_order &= before <= piece.offset;
            before = piece.offset;
            (least, most, count) = (least.min(piece.offset), most.max(piece.offset), count + 1);
        }
        if in_order || count <= BUCKET_PIECES {
            self.order.extend(requested().map(|(piece, index)| (piece.offset, index)));
            self.bucket_ends.push(self.order.len());
            self.sorted_buckets = usize::from(in_order);
            return;
        }
        // Buckets of equal width, since rows are spread over the file. If they are not, some buckets sort slower.
        let buckets = (count / BUCKET_PIECES + 1) as u64;
        let width = (most - least) / buckets + 1;
        let bucket = |piece: &Piece| ((piece.offset - least) / width) as usize;
        self.bucket_ends.resize(buckets as usize, 0);
        requested().for_each(|(piece, _)| self.bucket_ends[bucket(piece)] += 1);
        let mut start = 0;
        for end in &mut self.bucket_ends {
            // At first the bucket's start; the loop below moves it to its end.
            start += std::mem::replace(end, start);
        }
        self.order.resize(count, (0, 0));
        for (piece, index) in requested() {
            let place = &mut self.bucket_ends[bucket(piece)];
            self.order[*place] = (piece.offset, index);
            *place += 1;
        }
    }

    /// The next piece in the order of offsets.
    fn peek(&mut self) -> Option<(u64, u32)> {
        let sorted = self.sorted_buckets.checked_sub(1).map_or(0, |last| self.bucket_ends[last]);
        if self.next == sorted && self.next < self.order.len() {
            let mut end = sorted;
            while end == sorted {
                end = self.bucket_ends[self.sorted_buckets];
                self.sorted_buckets += 1;
            }
            self.order[sorted..end].sort_unstable();
        }
        self.order.get(self.next).copied()
    }

    /// Finds reads until `transfers` has at least `enough`, or all. The sweep grows one transfer at a time. A piece
    /// that extends beyond it stays open and starts the next one.
    pub(crate) fn find_reads(&mut self, pieces: &[Piece], rules: &Rules, layout: &Layout, enough: usize) {
        let block = rules.block_bytes;
        while self.transfers.len() < enough && !self.is_complete() {
            let start = match self.open.is_empty() {
                true => self.peek().map_or(0, |(offset, _)| floor(offset, block)),
                false => self.covered,
            };
            let limit = start + rules.max_bytes.min(layout.place(start).contiguous_bytes);
            let first_fragment = self.fragments.len();
            let (mut end, mut needed) = (start, start);
            self.fragments.append(&mut self.open);
            for &index in &self.fragments[first_fragment..] {
                let piece_end = pieces[index as usize].end();
                end = end.max(limit.min(ceil(piece_end, block)));
                needed = needed.max(piece_end.min(limit));
            }
            while let Some((offset, index)) = self.peek() {
                let from = floor(offset, block);
                if from > end.saturating_add(rules.gap_bytes) || from >= limit {
                    break;
                }
                let piece_end = pieces[index as usize].end();
                // A gap is read only if that saves a read: not before a piece that needs another read anyway.
                if from > end && ceil(piece_end, block) > limit {
                    break;
                }
                end = end.max(limit.min(ceil(piece_end, block)));
                needed = needed.max(piece_end.min(limit));
                self.fragments.push(index);
                self.next += 1;
            }
            let fragments = first_fragment..self.fragments.len();
            for &index in &self.fragments[fragments.clone()] {
                if pieces[index as usize].end() > end {
                    self.open.push(index);
                }
            }
            let (bytes, needed) = ((end - start) as u32, (needed - start) as u32);
            self.transfers.push(Transfer { offset: start, bytes, needed, buffered: false, fragments });
            self.covered = end;
        }
    }

    /// Plans writes of `pieces`: whole pages (of `page_bytes`) directly, the unaligned ends through the page cache, so
    /// that nothing around a piece is touched. A page that a buffered write touches is never written directly as a
    /// whole page of another piece, so the two paths do not conflict. With `direct` false, everything goes through the
    /// page cache.
    pub(crate) fn writes(
        &mut self,
        pieces: &[Piece],
        direct: bool,
        page_bytes: u64,
        max_bytes: u64,
        layout: &Layout,
    ) {
        self.clear();
        for (piece, index) in pieces.iter().zip(0u32..) {
            let (mut from, end) = (piece.offset, piece.end());
            while from < end {
                let limit = end.min(from + max_bytes.min(layout.place(from).contiguous_bytes));
                let page = floor(from, page_bytes);
                let (to, buffered) = match () {
                    () if !direct => (limit, true),
                    () if page < from => (limit.min(page + page_bytes), true),
                    () if floor(limit, page_bytes) > from => (floor(limit, page_bytes), false),
                    () => (limit, true),
                };
                let bytes = (to - from) as u32;
                let fragments = self.fragments.len()..self.fragments.len() + 1;
                self.fragments.push(index);
                self.transfers.push(Transfer { offset: from, bytes, needed: bytes, buffered, fragments });
                from = to;
            }
        }
    }

    /// The position in the buffer at which `transfer` can happen without a copy, if the buffer's memory allows it. It
    /// exists if one piece, or pieces with the same distances in the buffer as in the file, cover the transfer
    /// completely, and no other piece needs its bytes. (A copy from there could conflict with another request that
    /// writes to the same position.)
    pub(crate) fn in_place(&self, transfer: &Transfer, pieces: &[Piece]) -> Option<u64> {
        let indices = self.pieces_of(transfer);
        let first = &pieces[*indices.first()? as usize];
        let mut covered = transfer.offset;
        for &index in indices {
            let piece = &pieces[index as usize];
            if piece.shift() != first.shift() || piece.offset > covered {
                return None;
            }
            covered = covered.max(piece.end());
        }
        (covered >= transfer.end()).then(|| transfer.offset.wrapping_add(first.shift()))
    }

    /// Calls `copy(from, to, bytes)` for every piece of `transfer`. `from` counts from the start of the transfer, `to`
    /// from the start of the buffer.
    pub(crate) fn copies(
        &self,
        transfer: &Transfer,
        pieces: &[Piece],
        mut copy: impl FnMut(usize, usize, usize),
    ) {
        for &index in self.pieces_of(transfer) {
            let piece = &pieces[index as usize];
            let from = piece.offset.max(transfer.offset);
            let to = piece.end().min(transfer.end());
            if from < to {
                let target = piece.at + (from - piece.offset);
                copy((from - transfer.offset) as usize, target as usize, (to - from) as usize);
            }
        }
    }
}

fn floor(offset: u64, block: u64) -> u64 {
    offset / block * block
}

fn ceil(offset: u64, block: u64) -> u64 {
    offset.next_multiple_of(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    fn striped(parts: usize) -> Layout {
        Layout::striped((0..parts).map(|part| PathBuf::from(part.to_string())).collect(), 8192)
    }

    fn file(bytes: u64) -> Vec<u8> {
        (0..bytes).map(|at| (at.wrapping_mul(0x9E37_79B9) >> 13) as u8).collect()
    }

    /// All reads, found a few at a time.
    fn planned(pieces: &[Piece], rules: &Rules, layout: &Layout) -> TransferPlan {
        let mut plan = TransferPlan::default();
        plan.begin_reads(pieces);
        while !plan.is_complete() {
            let enough = plan.transfers.len() + 3;
            plan.find_reads(pieces, rules, layout, enough);
        }
        plan
    }

    /// Executes the plan in memory and compares with the definition: each piece is a slice of the file.
    fn check(pieces: &[Piece], rules: &Rules, layout: &Layout, file_bytes: u64) {
        let file = file(file_bytes);
        let plan = planned(pieces, rules, layout);
        let room = pieces.iter().map(|piece| piece.at + piece.bytes).max().unwrap_or(0) as usize;
        let mut buffer = vec![0u8; room];
        let mut blocks = BTreeSet::new();
        for transfer in &plan.transfers {
            assert!(u64::from(transfer.bytes) <= rules.max_bytes && transfer.bytes > 0);
            assert_eq!(transfer.offset % rules.block_bytes, 0);
            assert_eq!(u64::from(transfer.bytes) % rules.block_bytes, 0);
            assert!(u64::from(transfer.bytes) <= layout.place(transfer.offset).contiguous_bytes);
            for block in transfer.offset / rules.block_bytes..transfer.end() / rules.block_bytes {
                assert!(blocks.insert(block), "block {block} is read twice");
            }
            let got = &file[transfer.offset as usize..(transfer.end().min(file_bytes)) as usize];
            assert!(got.len() >= transfer.needed as usize);
            if let Some(placed) = plan.in_place(transfer, pieces) {
                let bytes = transfer.bytes as usize;
                buffer[placed as usize..placed as usize + bytes].copy_from_slice(&got[..bytes]);
                continue;
            }
            plan.copies(transfer, pieces, |from, to, bytes| {
                assert!(from + bytes <= transfer.needed as usize);
                buffer[to..to + bytes].copy_from_slice(&got[from..from + bytes]);
            });
        }
        for piece in pieces {
            let got = &buffer[piece.at as usize..(piece.at + piece.bytes) as usize];
            assert!(got == &file[piece.offset as usize..piece.end() as usize], "{piece:?}");
        }
        if rules.gap_bytes == 0 {
            let requested: BTreeSet<u64> = pieces
                .iter()
                .filter(|piece| piece.bytes > 0)
                .flat_map(|piece| piece.offset / rules.block_bytes..piece.end().div_ceil(rules.block_bytes))
                .collect();
            assert_eq!(blocks, requested, "each block that is wanted, and no other");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn plans_bring_every_piece_and_each_block_once(
            spans in prop::collection::vec((0u64..60_000, 0u64..9_000), 0..40),
            shuffled in any::<bool>(),
            block in prop::sample::select(vec![1u64, 512, 4096]),
            gap in prop::sample::select(vec![0u64, 100, 5_000]),
            parts in 1usize..4,
        ) {
            let mut at = 0;
            let mut pieces: Vec<Piece> = spans
                .into_iter()
                .map(|(offset, bytes)| {
                    let piece = Piece { offset, bytes, at };
                    at += bytes;
                    piece
                })
                .collect();
            if !shuffled {
                pieces.sort_by_key(|piece| piece.offset);
            }
            let rules = Rules { block_bytes: block, gap_bytes: gap, max_bytes: 8192 };
            check(&pieces, &rules, &striped(parts), 69_000);
        }

        #[test]
        fn writes_cover_each_piece_once_and_touch_nothing_else(
            spans in prop::collection::vec((0u64..5_000, 0u64..20_000), 0..10),
            direct in any::<bool>(),
            parts in 1usize..4,
        ) {
            let (mut offset, mut at) = (0, 0);
            let mut pieces = Vec::new();
            for (skip, bytes) in spans {
                pieces.push(Piece { offset: offset + skip, bytes, at });
                offset += skip + bytes;
                at += bytes;
            }
            let layout = striped(parts);
            let mut plan = TransferPlan::default();
            plan.writes(&pieces, direct, 4096, 12_288, &layout);
            let mut written = vec![0u32; offset as usize];
            let (mut by_cache, mut by_disk) = (BTreeSet::new(), BTreeSet::new());
            for transfer in &plan.transfers {
                let range = transfer.offset as usize..transfer.end() as usize;
                written[range].iter_mut().for_each(|count| *count += 1);
                prop_assert!(plan.in_place(transfer, &pieces).is_some());
                prop_assert!(u64::from(transfer.bytes) <= layout.place(transfer.offset).contiguous_bytes);
                let pages = transfer.offset / 4096..transfer.end().div_ceil(4096);
                if transfer.buffered { by_cache.extend(pages) } else { by_disk.extend(pages) }
                prop_assert!(transfer.buffered || transfer.offset % 4096 == 0 && transfer.bytes % 4096 == 0);
            }
            prop_assert!(by_cache.is_disjoint(&by_disk));
            prop_assert!(direct || by_disk.is_empty());
            for (position, count) in written.iter().enumerate() {
                let requested = pieces.iter().any(|p| (p.offset..p.end()).contains(&(position as u64)));
                prop_assert_eq!(*count, u32::from(requested));
            }
        }
    }

    #[test]
    fn large_batches_are_sorted_bucket_by_bucket() {
        for spread in [1, 64, 700_000] {
            let many = 20_000u64;
            let pieces: Vec<Piece> = (0..many)
                .map(|row| Piece { offset: row * 7919 % many * spread % 1_000_000, bytes: 10, at: row * 10 })
                .collect();
            check(&pieces, &RULES, &striped(2), 1_000_010);
        }
    }

    fn transfers(spans: &[(u64, u64)], rules: Rules) -> Vec<(u64, u32)> {
        let pieces: Vec<Piece> =
            spans.iter().map(|&(offset, bytes)| Piece { offset, bytes, at: 0 }).collect();
        let plan = planned(&pieces, &rules, &Layout::file("f".as_ref()));
        plan.transfers.iter().map(|transfer| (transfer.offset, transfer.bytes)).collect()
    }

    const RULES: Rules = Rules { block_bytes: 512, gap_bytes: 0, max_bytes: 4096 };

    #[test]
    fn rows_of_one_block_are_one_read() {
        assert_eq!(transfers(&[(0, 100), (100, 100), (300, 100)], RULES), [(0, 512)]);
    }

    #[test]
    fn a_row_across_an_edge_reads_both_blocks() {
        assert_eq!(transfers(&[(400, 400)], RULES), [(0, 1024)]);
    }

    #[test]
    fn distant_rows_stay_apart_until_the_gap_allows() {
        let spans = [(0, 512), (1024, 512)];
        assert_eq!(transfers(&spans, RULES), [(0, 512), (1024, 512)]);
        assert_eq!(transfers(&spans, Rules { gap_bytes: 512, ..RULES }), [(0, 1536)]);
    }

    #[test]
    fn no_gap_is_read_before_a_piece_that_does_not_fit() {
        let rules = Rules { gap_bytes: 1024, ..RULES };
        assert_eq!(transfers(&[(0, 512), (1024, 3072)], rules), [(0, 4096)]);
        assert_eq!(transfers(&[(0, 512), (1024, 3584)], rules), [(0, 512), (1024, 3584)]);
    }

    #[test]
    fn the_largest_size_splits() {
        assert_eq!(transfers(&[(100, 9000)], RULES), [(0, 4096), (4096, 4096), (8192, 1024)]);
    }

    #[test]
    fn rows_in_file_order_land_without_a_copy() {
        let pieces: Vec<Piece> =
            (0..4).map(|row| Piece { offset: 1024 + row * 512, bytes: 512, at: 512 * row }).collect();
        let plan = planned(&pieces, &RULES, &Layout::file("f".as_ref()));
        assert_eq!(plan.transfers.len(), 1);
        assert_eq!(plan.in_place(&plan.transfers[0], &pieces), Some(0));
    }

    #[test]
    fn a_row_that_is_requested_twice_is_copied_twice() {
        let pieces = [0, 512].map(|at| Piece { offset: 0, bytes: 512, at });
        let plan = planned(&pieces, &RULES, &Layout::file("f".as_ref()));
        assert_eq!(plan.in_place(&plan.transfers[0], &pieces), None);
    }
}
