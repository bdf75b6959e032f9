//! Counter-based random numbers. A value is a pure function of its key, so it is the same for any thread, order and
//! restart. The mixer is the 64-bit finaliser of SplitMix64 (Steele et al., 2014), applied once per word of the key.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// One round of SplitMix64.
#[inline(always)]
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A stream of 64-bit values identified by its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// The root key of a random seed.
    pub fn new(seed: u64) -> Key {
        Key(mix(seed))
    }

    /// The sub-stream for `word`: another purpose, epoch, node.
    #[inline(always)]
    pub fn with(self, word: u64) -> Key {
        Key(mix(self.0 ^ mix(word)))
    }

    /// The number that identifies the stream, so that another device can continue it.
    pub fn word(self) -> u64 {
        self.0
    }

    /// The value at position `index` of this stream.
    #[inline(always)]
    pub fn at(self, index: u64) -> u64 {
        mix(self.0.wrapping_add(index.wrapping_mul(GOLDEN)))
    }
}

/// Maps 64 random bits to `0..bound` by multiplication. The bias is below `bound` / 2^64.
#[inline(always)]
pub fn below(bits: u64, bound: u64) -> u64 {
    ((bits as u128 * bound as u128) >> 64) as u64
}

/// A uniform number in `[0, 1)` with 53 random bits.
#[inline(always)]
pub fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// A number with mean 0 and variance 1, close to normal: the sum of four uniform 16-bit numbers (Irwin-Hall). It uses
/// integer arithmetic and one multiplication, so that results are bit-identical on every machine.
#[inline(always)]
pub fn normal(bits: u64) -> f32 {
    let sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    // Each term has mean 32767.5 and variance (2^32 - 1) / 12; 37837.22 is the standard deviation of the sum.
    (sum as f32 - 131_070.0) * (1.0 / 37_837.22)
}

/// A pseudo-random bijection of `0..count`, as a function: a balanced Feistel network over the next even number of
/// bits, iterated until the value is in range. It needs no table, so it takes no memory per node.
#[derive(Debug, Clone, Copy)]
pub struct Permutation {
    count: u64,
    half_bits: u32,
    keys: [u64; 4],
}

impl Permutation {
    /// The permutation of `0..count` identified by `key`.
    pub fn new(count: u64, key: Key) -> Permutation {
        let bits = 64 - count.saturating_sub(1).leading_zeros();
        let half_bits = bits.div_ceil(2).max(1);
        Permutation { count, half_bits, keys: [key.at(0), key.at(1), key.at(2), key.at(3)] }
    }

    /// The image of `index`.
    #[inline]
    pub fn forward(&self, index: u64) -> u64 {
        debug_assert!(index < self.count);
        let mut value = index;
        loop {
            value = self.rounds(value, [0, 1, 2, 3], true);
            if value < self.count {
                return value;
            }
        }
    }

    /// The inverse of `forward`.
    #[inline]
    pub fn backward(&self, index: u64) -> u64 {
        debug_assert!(index < self.count);
        let mut value = index;
        loop {
            value = self.rounds(value, [3, 2, 1, 0], false);
            if value < self.count {
                return value;
            }
        }
    }

    #[inline(always)]
    fn rounds(&self, value: u64, order: [usize; 4], forward: bool) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in order {
            if forward {
                (left, right) = (right, left ^ (mix(right ^ self.keys[round]) & mask));
            } else {
                (left, right) = (right ^ (mix(left ^ self.keys[round]) & mask), left);
            }
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_are_bijections_with_an_inverse() {
        for count in [1, 2, 3, 4, 5, 16, 17, 1000, 4096, 5001] {
            let permutation = Permutation::new(count, Key::new(count));
            let mut seen = vec![false; count as usize];
            for index in 0..count {
                let to = permutation.forward(index);
                assert!(!std::mem::replace(&mut seen[to as usize], true));
                assert_eq!(permutation.backward(to), index);
            }
        }
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let key = Key::new(3);
        let values: Vec<f64> = (0..200_000).map(|i| normal(key.at(i)) as f64).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }

    #[test]
    fn streams_of_different_keys_differ() {
        let root = Key::new(1);
        assert_ne!(root.with(1).at(0), root.with(2).at(0));
        assert_ne!(root.with(1).with(2), root.with(2).with(1));
        assert!((0..1000).all(|i| below(root.at(i), 7) < 7 && unit(root.at(i)) < 1.0));
    }
}
