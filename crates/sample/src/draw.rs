//! The draw: which positions of its adjacency a node samples. There is one algorithm, with integers only, so samples
//! are the same for any number of threads and on any device.
//!
//! **Key.** All words are 64 bits and wrap. `mix(x)`: `z = x + 0x9e3779b97f4a7c15`;
//! `z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9`; `z = (z ^ (z >> 27)) * 0x94d049bb133111eb`; `z ^ (z >> 31)`.
//! A key starts as `K = mix(seed)` and absorbs a word `w` by `K = mix(K ^ mix(w))`. The words of a draw are, in this
//! order: 0x73616d706c65 (the purpose), epoch, batch, hop, node. `hop` is the hop in which the node was discovered, 0
//! for targets (in the layered form: the depth at which its neighbours are sampled). Word `i` of the stream is
//! `u(i) = mix(K + i * 0x9e3779b97f4a7c15)`.
//!
//! **Integers below a bound.** `below(i, n)`: for attempt a = 0, 1, 2, ...: `p = u(i + a * 2^32) * n` as 128 bits. If
//! its lower 64 bits are at least `(2^64 - n) mod n`, the answer is its upper 64 bits (Lemire). Exactly uniform.
//!
//! **Positions.** A node has `n` neighbours, `k` are requested. If `n <= k`, it takes all of them. Otherwise let
//! `m = min(k, n - k)` and draw a set `S` of `m` positions by Floyd's algorithm: for `i` in `0..m`, `j = n - m + i`,
//! `t = below(i, j + 1)`; add `t` to `S`, or `j` if `t` is in `S` already. If `k <= n - k` the positions taken are `S`,
//! else all but `S`. They are taken in ascending order. Every `k`-subset is equally likely. Only the smaller of the
//! sets "taken" and "left out" is drawn.

use esker_types::random::Key;

/// First word of the key for neighbour sampling.
pub const PURPOSE_SAMPLE: u64 = 0x7361_6d70_6c65;
/// First word of the key for batch orders.
pub const PURPOSE_ORDER: u64 = 0x006f_7264_6572;
/// First word of the key for the order by groups of partitions.
pub const PURPOSE_GROUPS: u64 = 0x6772_6f75_7073;
/// First word of the key for node partitions.
pub const PURPOSE_PARTITIONS: u64 = 0x7061_7274_6974;
/// First word of the key for the items of a step over partitions.
pub const PURPOSE_STEP_ITEMS: u64 = 0x7374_6570_6974;
/// First word of the key for negatives.
pub const PURPOSE_NEGATIVES: u64 = 0x6e65_6761_7469;

/// Up to this many positions are sorted by counting, in vector registers.
const RANKED_DRAW: usize = 16;
/// Up to this many positions are kept as a sorted array instead of a bitmap.
const SHORT_DRAW: usize = 64;

/// An integer in `0..bound`, exactly uniform, from word `index` of the stream.
#[inline(always)]
pub fn below(key: Key, index: u64, bound: u64) -> u64 {
    let product = key.at(index) as u128 * bound as u128;
    // Rare. The division it needs is off the fast path.
    if (product as u64) < bound { below_again(key, index, bound) } else { (product >> 64) as u64 }
}

#[cold]
fn below_again(key: Key, index: u64, bound: u64) -> u64 {
    let least = bound.wrapping_neg() % bound;
    let mut counter = index;
    loop {
        let product = key.at(counter) as u128 * bound as u128;
        if product as u64 >= least {
            return (product >> 64) as u64;
        }
        counter = counter.wrapping_add(1 << 32);
    }
}

/// Draws positions. Owns the bitmap that high degrees need.
#[derive(Debug, Default)]
pub struct Drawer {
    bitmap: Vec<u64>,
}

impl Drawer {
    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        self.bitmap.capacity() as u64 * 8
    }

    /// Bytes that [`Drawer::reserve`] would add.
    pub fn more_bytes(&self, degree: u32) -> u64 {
        if degree <= 64 { 0 } else { (degree as u64).div_ceil(64) * 8 }.saturating_sub(self.bytes())
    }

    /// Makes room for draws from this many neighbours.
    pub fn reserve(&mut self, degree: u32) {
        let words = (degree as usize).div_ceil(64);
        if degree > 64 && words > self.bitmap.capacity() {
            self.bitmap.reserve_exact(words - self.bitmap.len());
        }
    }

    /// Fills `out` with `out.len()` positions out of `0..degree`, ascending. `out` must be shorter than `degree`.
    #[inline]
    pub fn draw(&mut self, key: Key, degree: u32, out: &mut [u32]) {
        debug_assert!(out.len() < degree as usize);
        let left_out = degree as usize - out.len();
        if degree <= 64 {
            draw_short(key, degree, left_out, out);
        } else if out.len() <= RANKED_DRAW && degree <= i32::MAX as u32 {
            draw_ranked(key, degree, out);
        } else if out.len() <= SHORT_DRAW && out.len() <= left_out {
            draw_few(key, degree, out);
        } else {
            self.draw_many(key, degree, left_out, out);
        }
    }

    /// Keeps the set as a bitmap over all positions.
    fn draw_many(&mut self, key: Key, degree: u32, left_out: usize, out: &mut [u32]) {
        let words = (degree as usize).div_ceil(64);
        self.bitmap.clear();
        self.bitmap.resize(words, 0);
        let draws = left_out.min(out.len()) as u64;
        for index in 0..draws {
            let last = degree as u64 - draws + index;
            let mut at = below(key, index, last + 1);
            if self.bitmap[at as usize / 64] >> (at % 64) & 1 == 1 {
                at = last;
            }
            self.bitmap[at as usize / 64] |= 1 << (at % 64);
        }
        let flip = if left_out < out.len() { u64::MAX } else { 0 };
        let taken = self.bitmap.iter().enumerate().flat_map(|(word, bits)| {
            let mut bits = bits ^ flip;
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros())?;
                bits &= bits - 1;
                Some(word as u32 * 64 + bit)
            })
        });
        // The flipped bits after `degree` come last and are not taken.
        out.iter_mut().zip(taken).for_each(|(slot, position)| *slot = position);
    }
}

/// Keeps the set as the bits of one word.
#[inline(always)]
fn draw_short(key: Key, degree: u32, left_out: usize, out: &mut [u32]) {
    let draws = left_out.min(out.len()) as u64;
    let mut set = 0u64;
    for index in 0..draws {
        let last = degree as u64 - draws + index;
        let at = below(key, index, last + 1);
        let bit = 1u64 << at;
        set |= if set & bit == 0 { bit } else { 1 << last };
    }
    if left_out < out.len() {
        set = !set;
    }
    for slot in out {
        *slot = set.trailing_zeros();
        set &= set.wrapping_sub(1);
    }
}

/// Sorts a few numbers by their ranks (how many are smaller). The degree is above 64, so most draws have no duplicate.
/// If there is one, the ranks do not add up.
#[inline]
fn draw_ranked(key: Key, degree: u32, out: &mut [u32]) {
    let draws = out.len();
    let mut drawn = [i32::MAX; RANKED_DRAW];
    for (index, slot) in drawn[..draws].iter_mut().enumerate() {
        let last = degree - (draws - index) as u32;
        *slot = below(key, index as u64, last as u64 + 1) as i32;
    }
    let mut ranks = ranks_of(&drawn);
    if ranks[..draws].iter().sum::<u32>() as usize != draws * (draws - 1) / 2 {
        for index in 1..draws {
            if drawn[..index].contains(&drawn[index]) {
                drawn[index] = (degree - (draws - index) as u32) as i32;
            }
        }
        ranks = ranks_of(&drawn);
    }
    for (rank, position) in ranks[..draws].iter().zip(&drawn) {
        out[*rank as usize] = *position as u32;
    }
}

/// For each number, how many are smaller.
#[inline(always)]
fn ranks_of(numbers: &[i32; RANKED_DRAW]) -> [u32; RANKED_DRAW] {
    let mut ranks = [0u32; RANKED_DRAW];
    for (rank, mine) in ranks.iter_mut().zip(numbers) {
        *rank = numbers.iter().map(|other| (other < mine) as u32).sum();
    }
    ranks
}

/// Keeps the set as a short sorted array.
fn draw_few(key: Key, degree: u32, out: &mut [u32]) {
    let draws = out.len();
    for index in 0..draws {
        let last = degree - (draws - index) as u32;
        let drawn = below(key, index as u64, last as u64 + 1) as u32;
        let place = out[..index].partition_point(|position| *position < drawn);
        if place < index && out[place] == drawn {
            // Every position so far is below `last`.
            out[index] = last;
        } else {
            let mut at = index;
            while at > place {
                out[at] = out[at - 1];
                at -= 1;
            }
            out[place] = drawn;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Follows the definition in the module comment step by step.
    fn by_definition(key: Key, degree: u32, take: usize) -> Vec<u32> {
        if degree as usize <= take {
            return (0..degree).collect();
        }
        let fewer = take.min(degree as usize - take);
        let mut set = BTreeSet::new();
        for index in 0..fewer {
            let last = degree - fewer as u32 + index as u32;
            let drawn = exactly_below(key, index as u64, last as u64 + 1) as u32;
            set.insert(if set.contains(&drawn) { last } else { drawn });
        }
        (0..degree).filter(|position| set.contains(position) == (take <= degree as usize - take)).collect()
    }

    fn exactly_below(key: Key, index: u64, bound: u64) -> u64 {
        for attempt in 0u64.. {
            let product = key.at(index.wrapping_add(attempt << 32)) as u128 * bound as u128;
            if product as u64 >= ((1u128 << 64) % bound as u128) as u64 {
                return (product >> 64) as u64;
            }
        }
        unreachable!()
    }

    fn draw(key: Key, degree: u32, take: usize) -> Vec<u32> {
        let mut out = vec![0; take];
        Drawer::default().draw(key, degree, &mut out);
        out
    }

    proptest! {
        #[test]
        fn every_path_equals_the_definition(seed: u64, degree in 2u32..700, share in 0.0f64..1.0) {
            let take = 1 + (share * (degree - 1) as f64) as usize;
            prop_assume!(take < degree as usize);
            let key = Key::new(seed);
            prop_assert_eq!(draw(key, degree, take), by_definition(key, degree, take));
        }

        #[test]
        fn bounds_near_the_word_size_are_met(seed: u64, bound in 1u64..) {
            let key = Key::new(seed);
            prop_assert_eq!(below(key, 3, bound), exactly_below(key, 3, bound));
            prop_assert!(below(key, 3, bound) < bound);
        }
    }

    /// Chi-square test of how often each position is taken, over many nodes; the 99.9% quantile by Wilson and Hilferty.
    fn check_uniform(degree: u32, take: usize) {
        let (draws, root) = (40_000u64, Key::new(degree as u64 * 1000 + take as u64));
        let mut counts = vec![0u64; degree as usize];
        for node in 0..draws {
            let taken = draw(root.with(node), degree, take);
            assert!(taken.windows(2).all(|pair| pair[0] < pair[1]), "ascending, none twice: {taken:?}");
            taken.iter().for_each(|position| counts[*position as usize] += 1);
        }
        let (n, k) = (degree as f64, take as f64);
        let expected = draws as f64 * k / n;
        // Counts vary less without replacement. The factor (n - 1) / (n - k) makes the sum chi-square with n - 1.
        let sum: f64 = counts.iter().map(|count| (*count as f64 - expected).powi(2) / expected).sum();
        let (found, freedom) = (sum * (n - 1.0) / (n - k), n - 1.0);
        let spread = 2.0 / (9.0 * freedom);
        let most = freedom * (1.0 - spread + 3.09 * spread.sqrt()).powi(3);
        assert!(found < most, "{take} of {degree}: chi-square {found:.1}, at most {most:.1}");
    }

    #[test]
    fn degrees_around_the_fan_out_are_drawn_uniformly() {
        for degree in [11, 12, 15, 19, 20, 21, 40] {
            check_uniform(degree, 10);
        }
    }

    #[test]
    fn long_lists_are_drawn_uniformly() {
        check_uniform(64, 10);
        check_uniform(65, 10);
        check_uniform(300, 10);
        check_uniform(130, 70);
        check_uniform(300, 90);
        check_uniform(2, 1);
    }

    #[test]
    fn pairs_are_drawn_uniformly() {
        let (draws, root) = (30_000u64, Key::new(8));
        let mut counts = [0u64; 36];
        for node in 0..draws {
            let taken = draw(root.with(node), 6, 2);
            counts[(taken[0] * 6 + taken[1]) as usize] += 1;
        }
        let seen: Vec<u64> = counts.into_iter().filter(|count| *count > 0).collect();
        let found: f64 = seen.iter().map(|count| (*count as f64 - 2000.0).powi(2) / 2000.0).sum();
        // 14 degrees of freedom: 36.1 is the 99.9% quantile.
        assert!(seen.len() == 15 && found < 36.1, "{found}");
    }
}
