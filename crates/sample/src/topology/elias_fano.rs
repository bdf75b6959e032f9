//! Non-decreasing numbers in a few bits each with random access: Elias-Fano. The lower bits of all numbers are packed
//! side by side. The upper bits are a string of ones, with a zero for every step up. Offsets of a graph with average
//! degree 15 take 7 bits each instead of 32 or 64.

use esker_io::prefetch;

/// The bit position of every `EVERY`-th one is stored.
const EVERY: usize = 64;

/// The numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct EliasFano {
    low_width: u32,
    low: Vec<u64>,
    high: Vec<u64>,
    /// Bit positions in `high` of the ones of numbers 0, `EVERY`, and so on.
    places: Vec<u64>,
    count: usize,
}

/// Builds the sequence number by number.
#[derive(Debug)]
pub(crate) struct EliasFanoBuilder {
    made: EliasFano,
    expected: usize,
    last: u64,
}

fn low_width(count: u64, last: u64) -> u32 {
    (last / count.max(1)).max(1).ilog2()
}

/// Words of the lower bits, words of the upper bits, and stored bit positions.
fn lengths(count: u64, last: u64) -> (u64, u64, u64) {
    let width = low_width(count, last);
    // One more of each, so that a reader may read one word further.
    let (low, high) = ((count * width as u64) / 64 + 2, (count + (last >> width)) / 64 + 2);
    (low, high, count.div_ceil(EVERY as u64))
}

impl EliasFanoBuilder {
    /// A builder for `count` numbers up to `last`.
    pub fn new(count: u64, last: u64) -> EliasFanoBuilder {
        let (low, high, places) = lengths(count, last);
        let made = EliasFano {
            low_width: low_width(count, last),
            low: vec![0; low as usize],
            high: vec![0; high as usize],
            places: Vec::with_capacity(places as usize),
            count: 0,
        };
        EliasFanoBuilder { made, expected: count as usize, last }
    }

    /// Appends a number. It is not below the previous one and not above `last`.
    pub fn push(&mut self, number: u64) {
        let EliasFano { low_width, low, high, places, count } = &mut self.made;
        let (width, index) = (*low_width, *count);
        assert!(number <= self.last && index < self.expected, "{number} is number {index}");
        let bits = number & ((1u64 << width) - 1);
        let at = index * width as usize;
        low[at / 64] |= bits << (at % 64);
        if at % 64 + width as usize > 64 {
            low[at / 64 + 1] |= bits >> (64 - at % 64);
        }
        let place = (number >> width) as usize + index;
        high[place / 64] |= 1 << (place % 64);
        if index.is_multiple_of(EVERY) {
            places.push(place as u64);
        }
        *count += 1;
    }

    /// Ends the sequence. All numbers must have been pushed.
    pub fn finish(self) -> EliasFano {
        assert_eq!(self.made.count, self.expected, "as many numbers as were promised");
        self.made
    }
}

impl EliasFano {
    /// Bytes for `count` numbers up to `last`.
    pub fn bytes_for(count: u64, last: u64) -> u64 {
        let (low, high, places) = lengths(count, last);
        (low + high + places) * 8
    }

    /// Number `index` and the next one.
    #[inline]
    pub fn pair(&self, index: usize) -> (u64, u64) {
        let place = self.place(index);
        // Searches the next one from here.
        let (mut word, mut at) = (self.high[place / 64] & (u64::MAX << (place % 64) << 1), place / 64);
        while word == 0 {
            at += 1;
            word = self.high[at];
        }
        let behind = at * 64 + word.trailing_zeros() as usize;
        (self.number(index, place), self.number(index + 1, behind))
    }

    /// All numbers in order, several times as fast as one by one.
    pub fn in_order(&self) -> impl Iterator<Item = u64> + '_ {
        let (mut at, mut word) = (0, self.high.first().copied().unwrap_or(0));
        (0..self.count).map(move |index| {
            while word == 0 {
                at += 1;
                word = self.high[at];
            }
            let place = at * 64 + word.trailing_zeros() as usize;
            word &= word - 1;
            self.number(index, place)
        })
    }

    /// Number `index`.
    #[cfg(test)]
    pub fn get(&self, index: usize) -> u64 {
        self.number(index, self.place(index))
    }

    /// Prefetches a number.
    #[inline(always)]
    pub fn prefetch(&self, index: usize) {
        prefetch(&self.places, index / EVERY);
        prefetch(&self.low, index * self.low_width as usize / 64);
    }

    /// Bit position of the one of number `index`.
    #[inline(always)]
    fn place(&self, index: usize) -> usize {
        debug_assert!(index < self.count);
        let start = self.places[index / EVERY] as usize;
        let mut left = index % EVERY;
        let mut at = start / 64;
        let mut word = self.high[at] & (u64::MAX << (start % 64));
        loop {
            let ones = word.count_ones() as usize;
            if left < ones {
                break;
            }
            left -= ones;
            at += 1;
            word = self.high[at];
        }
        (0..left).for_each(|_| word &= word - 1);
        at * 64 + word.trailing_zeros() as usize
    }

    #[inline(always)]
    fn number(&self, index: usize, place: usize) -> u64 {
        let (width, at) = (self.low_width as usize, index * self.low_width as usize);
        let pair = self.low[at / 64] as u128 | (self.low[at / 64 + 1] as u128) << 64;
        let low = (pair >> (at % 64)) as u64 & ((1u64 << width) - 1);
        ((place - index) as u64) << width | low
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_are_those_of_a_plain_array(
            steps in prop::collection::vec(prop_oneof![5 => 0u64..40, 1 => 0u64..100_000, 1 => Just(0u64)], 1..400), spare in 0u64..1000,
        ) {
            let mut sum = 0;
            let plain: Vec<u64> = steps.iter().map(|step| { sum += step; sum }).collect();
            let mut builder = EliasFanoBuilder::new(plain.len() as u64, sum + spare);
            plain.iter().for_each(|number| builder.push(*number));
            let rising = builder.finish();
            for (index, number) in plain.iter().enumerate() {
                prop_assert_eq!(rising.get(index), *number);
            }
            for (index, pair) in plain.windows(2).enumerate() {
                prop_assert_eq!(rising.pair(index), (pair[0], pair[1]));
            }
            prop_assert_eq!(rising.in_order().collect::<Vec<_>>(), plain.clone());
            let words = rising.low.len() + rising.high.len() + rising.places.len();
            prop_assert_eq!(words as u64 * 8, EliasFano::bytes_for(plain.len() as u64, sum + spare));
        }
    }

    #[test]
    fn offsets_of_a_graph_take_a_byte_a_node() {
        let bytes = EliasFano::bytes_for(1_000_001, 15_000_000);
        assert!(bytes < 1_000_000, "{bytes}");
    }
}
