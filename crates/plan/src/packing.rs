//! What is packed, and when again: how many batches share a cache on disk, whether rows that were packed before serve a run, and
//! whether packing anew would gain enough.

use crate::segments::SegmentSizes;

/// Rows that are packed may miss so much more than rows packed anew would: a tenth.
const MORE_MISSES: (u128, u128) = (11, 10);
/// Misses below this share of all accesses are not worth packing again: one in fifty.
const FEW_MISSES: u128 = 50;

/// Whether packing anew gains enough: misses of what is there, of what would be, and all accesses.
pub fn is_worth_packing_again(misses: u64, misses_anew: u64, accesses: u64) -> bool {
    let (more, than) = MORE_MISSES;
    let [misses, misses_anew, accesses] = [misses, misses_anew, accesses].map(u128::from);
    misses * FEW_MISSES > accesses && misses * than > misses_anew * more
}

/// What packed rows take on disk, while they are made and after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskNeeds {
    /// Whatever segments share.
    pub fixed_bytes: u64,
    /// For each row that is stored.
    pub row_bytes: u64,
}

impl DiskNeeds {
    /// With so many rows stored.
    pub fn bytes(&self, rows: u64) -> u64 {
        self.fixed_bytes.saturating_add(self.row_bytes.saturating_mul(rows))
    }
}

/// The fewest batches that a segment must have for everything to fit `allowed` bytes; else the least bytes that would do.
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

/// A layout of packed rows, as far as it decides whether it serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedLayout {
    /// Rows that were to be set aside for memory.
    pub slots_asked: u64,
    /// Batches of a segment.
    pub segment: u32,
    /// The disk budget that somebody gave.
    pub disk_bytes_allowed: Option<u64>,
}

/// What a run asks of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedWish {
    /// Rows that memory holds.
    pub slots: u64,
    /// Whether it must be so many.
    pub slots_explicit: bool,
    /// Batches of a segment, where that is explicit.
    pub segment: Option<u32>,
    /// The disk budget, where that is explicit.
    pub disk_bytes_allowed: Option<u64>,
}

impl PackedLayout {
    /// Whether work that follows it may go on for a wish: it is what would be laid out now, or nearly.
    pub fn is_compatible(&self, wish: &PackedWish) -> bool {
        let slots = match wish.slots_explicit {
            true => self.slots_asked == wish.slots,
            false => self.slots_asked <= wish.slots && self.slots_asked >= wish.slots / 4 * 3,
        };
        slots
            && self.disk_bytes_allowed == wish.disk_bytes_allowed
            && wish.segment.is_none_or(|segment| segment == self.segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    const WISH: PackedWish =
        PackedWish { slots: 100, slots_explicit: false, segment: None, disk_bytes_allowed: None };

    #[test]
    fn work_goes_on_for_nearly_the_same_slots_and_exactly_what_is_explicit() {
        assert!(LAYOUT.is_compatible(&WISH));
        assert!(!LAYOUT.is_compatible(&PackedWish { slots: 79, ..WISH }));
        assert!(!LAYOUT.is_compatible(&PackedWish { slots: 120, ..WISH }));
        assert!(!LAYOUT.is_compatible(&PackedWish { slots_explicit: true, ..WISH }));
        assert!(LAYOUT.is_compatible(&PackedWish { slots: 80, slots_explicit: true, ..WISH }));
        assert!(LAYOUT.is_compatible(&PackedWish { segment: Some(4), ..WISH }));
        assert!(!LAYOUT.is_compatible(&PackedWish { segment: Some(1), ..WISH }));
        assert!(!LAYOUT.is_compatible(&PackedWish { disk_bytes_allowed: Some(9), ..WISH }));
    }

    /// Four batches of two rows each; neighbours share one.
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
