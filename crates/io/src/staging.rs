use crate::AlignedBuffer;
use crate::aligned::Allocation;
use std::collections::VecDeque;
use std::sync::Arc;

/// Memory for transfers that cannot use their buffer directly. It is a ring: pieces of any size are taken in order and
/// returned in any order.
pub(crate) struct StagingMemory {
    buffer: AlignedBuffer,
    align: usize,
    /// Taken ranges, oldest first. The flag marks a range that was returned while an older one was still in use.
    taken: VecDeque<(usize, usize, bool)>,
    first_ticket: u64,
}

/// A taken piece.
pub(crate) struct Staged {
    pub ticket: u64,
    pub memory: *mut u8,
}

impl StagingMemory {
    pub(crate) fn new(bytes: usize, align: usize) -> StagingMemory {
        StagingMemory {
            buffer: AlignedBuffer::new(bytes, align),
            align,
            taken: VecDeque::new(),
            first_ticket: 0,
        }
    }

    pub(crate) fn allocation(&self) -> &Arc<Allocation> {
        self.buffer.allocation()
    }

    /// `bytes` contiguous bytes; `None` until older pieces are returned.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<Staged> {
        let bytes = bytes.next_multiple_of(self.align);
        let capacity = self.buffer.len();
        let start = match (self.taken.front(), self.taken.back()) {
            (Some(&(oldest, ..)), Some(&(_, newest, _))) if newest > oldest => {
                // The middle is in use: use the space after it, else before it.
                if newest + bytes <= capacity { newest } else { (bytes <= oldest).then_some(0)? }
            }
            (Some(&(oldest, ..)), Some(&(_, newest, _))) => {
                // Both ends are in use: use the space in the middle.
                (newest + bytes <= oldest).then_some(newest)?
            }
            _ => (bytes <= capacity).then_some(0)?,
        };
        let ticket = self.first_ticket + self.taken.len() as u64;
        self.taken.push_back((start, start + bytes, false));
        // The kernel writes to pieces in use: no reference to the whole buffer may be made, only an address.
        // SAFETY: `start + bytes` was just found to be within the buffer.
        let memory = unsafe { self.buffer.allocation().start().add(start) };
        Some(Staged { ticket, memory })
    }

    /// Returns a piece.
    pub(crate) fn release(&mut self, ticket: u64) {
        self.taken[(ticket - self.first_ticket) as usize].2 = true;
        while self.taken.front().is_some_and(|piece| piece.2) {
            self.taken.pop_front();
            self.first_ticket += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn pieces_never_overlap_and_all_room_comes_back(steps in prop::collection::vec((1usize..5000, any::<u8>()), 1..100)) {
            let mut staging = StagingMemory::new(16_384, 512);
            let base = staging.buffer.as_ptr() as usize;
            let mut out: Vec<(u64, usize, usize)> = Vec::new();
            for (bytes, choice) in steps {
                if let Some(staged) = staging.take(bytes) {
                    let start = staged.memory as usize - base;
                    prop_assert!(start.is_multiple_of(512) && start + bytes <= 16_384);
                    prop_assert!(out.iter().all(|&(_, from, to)| start + bytes <= from || to <= start));
                    out.push((staged.ticket, start, start + bytes));
                } else {
                    prop_assert!(!out.is_empty(), "an empty ring has room");
                }
                if choice % 2 == 0 && !out.is_empty() {
                    let (ticket, ..) = out.swap_remove(choice as usize % out.len());
                    staging.release(ticket);
                }
            }
            for (ticket, ..) in out {
                staging.release(ticket);
            }
            prop_assert!(staging.take(16_384).is_some());
        }
    }
}
