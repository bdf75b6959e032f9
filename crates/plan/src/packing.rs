//! What is packed, and when it is packed again: how many batches share a cache on disk, whether existing packed rows
//! can be used for a run, and whether packing again would save enough.

use crate::segments::SegmentSizes;

/// Packed rows may miss at most this much more than newly packed ones would: a tenth.
const MORE_MISSES: (u128, u128) = (11, 10);
/// If misses are below this share of all accesses, packing again is not worth it: one in fifty.
const FEW_MISSES: u128 = 50;

/// Whether packing again saves enough, given the misses now, the misses after packing again, and all accesses.
pub fn is_worth_packing_again(misses: u64, misses_repacked: u64, accesses: u64) -> bool {
    let (more, than) = MORE_MISSES;
    let [misses, misses_repacked, accesses] = [misses, misses_repacked, accesses].map(u128::from);
    misses * FEW_MISSES > accesses && misses * than > misses_repacked * more
}

/// Bytes that a disk reads in order in the time of one read at random.
const BYTES_PER_READ: u64 = 16 << 10;

/// Whether reading each accessed row by itself takes less time than reading all `bytes` in order.
pub fn is_read_row_by_row(accesses: u64, row_bytes: u64, bytes: u64) -> bool {
    accesses.saturating_mul(BYTES_PER_READ.saturating_add(row_bytes)) < bytes
}

/// Disk space of packed rows, while they are made and after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskNeeds {
    /// Bytes that do not depend on segments.
    pub fixed_bytes: u64,
    /// Bytes per stored row.
    pub row_bytes: u64,
}

impl DiskNeeds {
    /// Bytes with this many stored rows.
    pub fn bytes(&self, rows: u64) -> u64 {
        self.fixed_bytes.saturating_add(self.row_bytes.saturating_mul(rows))
    }
}

/// The smallest number of batches per segment with which everything fits `allowed` bytes. Otherwise the smallest number
/// of bytes that works, as the error.
pub fn choose_segment(sizes: &SegmentSizes, needs: DiskNeeds, allowed: u64) -> Result<u32, u64> {
    let most = match allowed.checked_sub(needs.fixed_bytes) {
        Some(left) => left / needs.row_bytes.max(1),
        None => 0,
    };
    let found = sizes.smallest(most).map_err(|fewest| needs.bytes(fewest))?;
    match needs.bytes(found.1) <= allowed {
        true => Ok(found.0),
        false => Err(needs.bytes(found.1)),
    }
}

/// The properties of packed rows that decide whether they can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedLayout {
    /// Requested number of rows set aside for memory.
    pub slots_asked: u64,
    /// Batches per segment.
    pub segment: u32,
    /// The disk budget, if one was given.
    pub disk_bytes_allowed: Option<u64>,
}

/// What a run requests of packed rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedRequest {
    /// Rows that fit in memory.
    pub slots: u64,
    /// Whether that number was given explicitly and must match.
    pub slots_explicit: bool,
    /// Batches per segment, if given explicitly.
    pub segment: Option<u32>,
    /// The disk budget, if given explicitly.
    pub disk_bytes_allowed: Option<u64>,
}

impl PackedLayout {
    /// Whether unfinished work with this layout can be resumed for a request: it is what would be laid out now, or
    /// nearly.
    pub fn is_compatible(&self, request: &PackedRequest) -> bool {
        let slots = match request.slots_explicit {
            true => self.slots_asked == request.slots,
            false => self.slots_asked <= request.slots && self.slots_asked >= request.slots / 4 * 3,
        };
        slots
            && self.disk_bytes_allowed == request.disk_bytes_allowed
            && request.segment.is_none_or(|segment| segment == self.segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_are_read_one_by_one_and_many_in_order() {
        let features = 1_000_000 * 512;
        let most = features / ((16 << 10) + 512);
        assert!(is_read_row_by_row(most - 1, 512, features) && !is_read_row_by_row(most + 1, 512, features));
        assert!(!is_read_row_by_row(u64::MAX, 4, u64::MAX) && !is_read_row_by_row(0, 512, 0));
    }

    #[test]
    fn a_tenth_more_misses_or_few_of_all_are_not_worth_it() {
        assert!(!is_worth_packing_again(110, 100, 1000));
        assert!(is_worth_packing_again(111, 100, 1000));
        assert!(!is_worth_packing_again(20, 0, 1000));
        assert!(is_worth_packing_again(21, 0, 1000));
        assert!(!is_worth_packing_again(0, 0, 0));
        assert!(is_worth_packing_again(u64::MAX, 1, u64::MAX));
    }

    const LAYOUT: PackedLayout = PackedLayout { slots_asked: 80, segment: 4, disk_bytes_allowed: None };
    const REQUEST: PackedRequest =
        PackedRequest { slots: 100, slots_explicit: false, segment: None, disk_bytes_allowed: None };

    #[test]
    fn work_goes_on_for_nearly_the_same_slots_and_exactly_what_is_explicit() {
        assert!(LAYOUT.is_compatible(&REQUEST));
        assert!(!LAYOUT.is_compatible(&PackedRequest { slots: 79, ..REQUEST }));
        assert!(!LAYOUT.is_compatible(&PackedRequest { slots: 120, ..REQUEST }));
        assert!(!LAYOUT.is_compatible(&PackedRequest { slots_explicit: true, ..REQUEST }));
        assert!(LAYOUT.is_compatible(&PackedRequest { slots: 80, slots_explicit: true, ..REQUEST }));
        assert!(LAYOUT.is_compatible(&PackedRequest { segment: Some(4), ..REQUEST }));
        assert!(!LAYOUT.is_compatible(&PackedRequest { segment: Some(1), ..REQUEST }));
        assert!(!LAYOUT.is_compatible(&PackedRequest { disk_bytes_allowed: Some(9), ..REQUEST }));
    }

    /// Four batches of two rows each. Adjacent batches share one row.
    fn sizes() -> SegmentSizes {
        let mut sizes = SegmentSizes::new(8, 4);
        for batch in 0..4u32 {
            sizes.see(batch, [batch, batch + 1].into_iter());
        }
        sizes.close();
        sizes
    }

    #[test]
    fn the_fewest_batches_that_fit_are_chosen_and_else_the_least_is_said() {
        let needs = DiskNeeds { fixed_bytes: 100, row_bytes: 10 };
        assert_eq!(choose_segment(&sizes(), needs, 180), Ok(1));
        assert_eq!(choose_segment(&sizes(), needs, 179), Ok(2));
        assert_eq!(choose_segment(&sizes(), needs, 159), Ok(4));
        assert_eq!(choose_segment(&sizes(), needs, 149), Err(150));
        assert_eq!(choose_segment(&sizes(), needs, 10), Err(150));
    }
}
