//! A set of small numbers with fast access to the largest one: a tree of 64-way bitmaps.

/// A set of numbers below a bound.
#[derive(Debug, Default)]
pub(crate) struct HighestSet {
    /// A bitmap of the numbers, then a bitmap of the non-empty words of the previous level, and so on up to one word.
    levels: Vec<Vec<u64>>,
}

impl HighestSet {
    /// An empty set of numbers below `bound`.
    pub fn new(bound: usize) -> HighestSet {
        let mut levels = Vec::new();
        let mut words = bound.max(1);
        loop {
            words = words.div_ceil(64);
            levels.push(vec![0; words]);
            if words == 1 {
                return HighestSet { levels };
            }
        }
    }

    #[inline(always)]
    pub fn insert(&mut self, mut number: usize) {
        for level in &mut self.levels {
            let word = &mut level[number / 64];
            let was_empty = *word == 0;
            *word |= 1 << (number % 64);
            if !was_empty {
                return;
            }
            number /= 64;
        }
    }

    pub fn remove(&mut self, mut number: usize) {
        for level in &mut self.levels {
            let word = &mut level[number / 64];
            *word &= !(1 << (number % 64));
            if *word != 0 {
                return;
            }
            number /= 64;
        }
    }

    pub fn highest(&self) -> Option<usize> {
        let mut at = 0;
        for level in self.levels.iter().rev() {
            let word = level[at];
            if word == 0 {
                return None;
            }
            at = at * 64 + 63 - word.leading_zeros() as usize;
        }
        Some(at)
    }

    pub fn bytes_for(bound: u64) -> u64 {
        bound.div_ceil(64) * 8 * 2 + 64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn the_highest_is_that_of_a_sorted_set(bound in 1usize..9000, steps in prop::collection::vec((any::<u16>(), any::<bool>()), 0..300)) {
            let (mut set, mut twin) = (HighestSet::new(bound), BTreeSet::new());
            for (number, add) in steps {
                let number = number as usize % bound;
                if add { set.insert(number); twin.insert(number); } else { set.remove(number); twin.remove(&number); }
                prop_assert_eq!(set.highest(), twin.last().copied());
            }
        }
    }
}
