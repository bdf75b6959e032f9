//! Which slot of a buffer has which partition. A partition keeps its slot while it is resident, from epoch to epoch too.

use esker_sample::{BufferRows, NodePartitions};
use esker_types::{NodeId, PartitionId};
use std::collections::BTreeMap;

/// A change of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotSwap {
    /// The slot.
    pub slot: u32,
    /// The partition that leaves, if the slot was used.
    pub leaves: Option<PartitionId>,
    /// The partition that enters.
    pub enters: PartitionId,
}

/// The partition of every slot.
#[derive(Debug, Clone, Default)]
pub struct SlotAssignment {
    slots: Vec<Option<PartitionId>>,
}

impl SlotAssignment {
    /// No partition yet.
    pub fn new() -> SlotAssignment {
        SlotAssignment::default()
    }

    /// Makes these partitions resident: those that enter take the slots of those that leave, in order. Returns what
    /// changed.
    pub fn advance(&mut self, resident: &[PartitionId]) -> Vec<SlotSwap> {
        self.slots.resize(self.slots.len().max(resident.len()), None);
        let mut enters =
            resident.iter().filter(|one| !self.slots.contains(&Some(**one))).copied().collect::<Vec<_>>();
        enters.reverse();
        let mut swaps = Vec::new();
        for (slot, held) in (0..).zip(&mut self.slots) {
            if held.is_some_and(|held| resident.contains(&held)) {
                continue;
            }
            let Some(enters) = enters.pop() else { break };
            swaps.push(SlotSwap { slot, leaves: held.replace(enters), enters });
        }
        swaps
    }

    /// The partition of every slot. All slots are used once there was a step.
    pub fn resident(&self) -> Vec<PartitionId> {
        self.slots.iter().flatten().copied().collect()
    }
}

/// Marks the slots that have these rows, of so many rows each.
pub fn mark_slots(rows: &[u32], slot_rows: u64, marks: &mut [bool]) {
    rows.iter().for_each(|row| marks[(*row as u64 / slot_rows.max(1)) as usize] = true);
}

/// Nodes by where their rows are.
#[derive(Debug, Default)]
pub struct SplitNodes {
    /// The rows of those that are resident.
    pub slots: Vec<u32>,
    /// The index of each of these among all nodes.
    at: Vec<usize>,
    /// Positions in their partition of the others, and the index of each among all nodes.
    pub on_disk: BTreeMap<PartitionId, Vec<(u64, usize)>>,
}

/// Divides nodes into resident ones and others.
pub fn split_nodes(
    partitions: &NodePartitions,
    resident: Option<&BufferRows>,
    nodes: &[NodeId],
) -> SplitNodes {
    let mut split = SplitNodes::default();
    for (at, node) in nodes.iter().enumerate() {
        match resident.and_then(|resident| resident.row(*node)) {
            Some(row) => {
                split.slots.push(row);
                split.at.push(at);
            }
            None => {
                let (partition, offset) = partitions.place(*node);
                split.on_disk.entry(partition).or_default().push((offset, at));
            }
        }
    }
    split
}

impl SplitNodes {
    /// Copies the rows of resident nodes to the rows of all.
    pub fn place(&self, rows: &[f32], dim: usize, all: &mut [f32]) {
        for (at, row) in self.at.iter().zip(rows.chunks_exact(dim.max(1))) {
            all[at * dim..(at + 1) * dim].copy_from_slice(row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_keep_their_slots_while_they_are_resident() {
        let of = |all: &[u32]| all.iter().copied().map(PartitionId).collect::<Vec<_>>();
        let mut slots = SlotAssignment::new();
        assert_eq!(slots.advance(&of(&[4, 2, 9])).len(), 3);
        assert_eq!(slots.resident(), of(&[4, 2, 9]));
        let swaps = slots.advance(&of(&[9, 1, 4]));
        let expected = SlotSwap { slot: 1, leaves: Some(PartitionId(2)), enters: PartitionId(1) };
        assert_eq!((swaps, slots.resident()), (vec![expected], of(&[4, 1, 9])));
        let swaps = slots.advance(&of(&[0, 4, 2]));
        assert_eq!(swaps.iter().map(|swap| (swap.slot, swap.enters.0)).collect::<Vec<_>>(), [(1, 0), (2, 2)]);
    }
}
