//! A second implementation of the random functions in docs/sample.md. It is written from that text alone, and tests
//! compare it with the crate.

/// `mix(x)`.
pub fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `K` after the seed and these words.
pub fn key(seed: u64, words: &[u64]) -> u64 {
    words.iter().fold(mix(seed), |key, word| mix(key ^ mix(*word)))
}

/// `u(i)`.
pub fn word(key: u64, i: u64) -> u64 {
    mix(key.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// `below(i, n)`.
pub fn below(key: u64, i: u64, n: u64) -> u64 {
    for attempt in 0u64.. {
        let product = word(key, i.wrapping_add(attempt << 32)) as u128 * n as u128;
        if product as u64 >= n.wrapping_neg() % n {
            return (product >> 64) as u64;
        }
    }
    unreachable!()
}

/// `item(x)` of `n` items under a key.
pub fn item(key: u64, n: u64, x: u64) -> u64 {
    let h = (1..=32).find(|h| 4u128.pow(*h) >= n as u128).expect("n has 64 bits");
    let mut y = x;
    loop {
        let (mut left, mut right) = (y >> h, y % (1 << h));
        for r in 0..4 {
            (left, right) = (right, left ^ (mix(right ^ word(key, r)) % (1 << h)));
        }
        y = (left << h) + right;
        if y < n {
            return y;
        }
    }
}
