//! BETA (Marius++ section 2): every pair of partitions meets in the buffer, with nearly the fewest swaps.
//!
//! All but one slot stay while the last slot takes every partition on disk in turn. Then those that stayed have met every
//! other partition, so they are replaced one by one and never return.

use super::{LogicalSwap, Shuffler, Walk};

/// A walk over `count` partitions, of which `resident` (2 at least) fit.
pub(super) fn walk(count: u32, resident: u32, random: &mut Shuffler) -> Walk {
    let mut slots = random.permutation(count);
    let mut on_disk = slots.split_off(resident as usize);
    let first = slots.clone();
    // A partition keeps its slot; what is shuffled is which slot is the last one.
    let mut turns: Vec<u32> = (0..resident).collect();
    let mut swaps = Vec::new();
    while !on_disk.is_empty() {
        random.shuffle(&mut turns);
        random.shuffle(&mut on_disk);
        let (last, stayed) = (turns[turns.len() - 1], &turns[..turns.len() - 1]);
        for partition in &mut on_disk {
            std::mem::swap(&mut slots[last as usize], partition);
            swaps.push(LogicalSwap { slot: last, enters: slots[last as usize] });
        }
        let replaced = stayed.len().min(on_disk.len());
        for (slot, enters) in stayed.iter().copied().zip(on_disk.drain(..replaced)) {
            slots[slot as usize] = enters;
            swaps.push(LogicalSwap { slot, enters });
        }
    }
    Walk { first, swaps }
}

/// Swaps of such a walk. Every round takes all that are on disk through the last slot, and leaves those out for good that
/// replace the ones that stayed.
pub(super) fn swaps(count: u64, resident: u64) -> u64 {
    let (on_disk, replaced) = (count - resident, resident - 1);
    let rounds = on_disk.div_ceil(replaced);
    on_disk + rounds * on_disk - replaced * (rounds * rounds.saturating_sub(1) / 2)
}
