//! Which step trains what. Partitions are resident for ranges of steps, so the steps in which two are resident together
//! are intersections of few ranges.

use super::Walk;
use esker_types::random::{Key, below};
use std::ops::Range;

/// The ranges of steps in which each logical partition is resident, ascending.
pub(super) struct Residency {
    ranges: Vec<Vec<Range<u32>>>,
}

impl Residency {
    pub fn of(walk: &Walk, logical: u32) -> Residency {
        let mut ranges = vec![Vec::new(); logical as usize];
        let mut slots: Vec<(u32, u32)> = walk.first.iter().map(|partition| (*partition, 0)).collect();
        for (step, swap) in (1..).zip(&walk.swaps) {
            let (left, since) = std::mem::replace(&mut slots[swap.slot as usize], (swap.enters, step));
            ranges[left as usize].push(since..step);
        }
        let steps = walk.swaps.len() as u32 + 1;
        slots.into_iter().for_each(|(partition, since)| ranges[partition as usize].push(since..steps));
        Residency { ranges }
    }

    /// The steps in which a partition is resident.
    pub fn of_one(&self, partition: u32) -> Vec<Range<u32>> {
        self.ranges[partition as usize].clone()
    }

    /// The steps in which both partitions are resident.
    pub fn of_pair(&self, one: u32, other: u32) -> Vec<Range<u32>> {
        let (mut one, mut other) = (&self.ranges[one as usize][..], &self.ranges[other as usize][..]);
        let mut together = Vec::new();
        while let (Some(first), Some(second)) = (one.first(), other.first()) {
            let both = first.start.max(second.start)..first.end.min(second.end);
            if !both.is_empty() {
                together.push(both);
            }
            match first.end <= second.end {
                true => one = &one[1..],
                false => other = &other[1..],
            }
        }
        together
    }
}

/// The first of these steps. Every walk lets all pairs meet, so there is one.
pub(super) fn greedy_step(ranges: &[Range<u32>]) -> usize {
    ranges[0].start as usize
}

/// One of these steps at random.
pub(super) fn random_step(ranges: &[Range<u32>], key: Key) -> usize {
    let count: u64 = ranges.iter().map(|range| range.len() as u64).sum();
    let mut drawn = below(key.at(0), count) as usize;
    for range in ranges {
        if drawn < range.len() {
            return range.start as usize + drawn;
        }
        drawn -= range.len();
    }
    unreachable!("a number below the sum of the lengths")
}
