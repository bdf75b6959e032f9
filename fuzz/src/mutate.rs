//! Damage that tends to matter: lengths and counts at their extremes, pieces missing, doubled or from elsewhere.
//! The same key gives the same damage.

use esker_types::random::{Key, below};

const BYTES: [u8; 10] = [0, 0xff, 0x7f, 0x80, b'0', b'9', b'-', b'\n', b',', b'"'];
const WORDS: [u64; 12] = [
    0,
    1,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    1 << 40,
    1 << 56,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];
const NUMBERS: [&str; 14] = [
    "0",
    "1",
    "-1",
    "255",
    "4294967295",
    "4294967296",
    "16777216",
    "72057594037927936",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "nan",
];
/// A damaged input may be longer than it was, within reason.
const MOST_BYTES: usize = 1 << 16;

/// Random numbers in a row.
struct Draw {
    key: Key,
    at: u64,
}

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        self.at += 1;
        below(self.key.at(self.at), bound as u64) as usize
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// A range inside `0..length`, short more often than long.
    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1);
        let most = 1 << self.below(9);
        start..(start + self.below(most + 1)).min(length)
    }
}

/// `bytes` with one to six pieces of damage; pieces may come from `other`.
pub fn mutate(bytes: &[u8], other: &[u8], key: Key) -> Vec<u8> {
    let (mut bytes, mut draw) = (bytes.to_vec(), Draw { key, at: 0 });
    for _ in 0..1 + draw.below(6).min(draw.below(6)) {
        damage(&mut bytes, other, &mut draw);
        bytes.truncate(MOST_BYTES);
    }
    bytes
}

fn damage(bytes: &mut Vec<u8>, other: &[u8], draw: &mut Draw) {
    let at = draw.below(bytes.len().max(1));
    match draw.below(12) {
        0 | 1 if !bytes.is_empty() => bytes[at] ^= 1 << draw.below(8),
        2 if !bytes.is_empty() => bytes[at] = draw.of(&BYTES),
        3 if !bytes.is_empty() => bytes[at] = draw.below(256) as u8,
        4 => bytes.truncate(at),
        5 => drop(bytes.drain(draw.range(bytes.len()))),
        6 => {
            let piece = bytes[draw.range(bytes.len())].to_vec();
            bytes.splice(at.min(bytes.len())..at.min(bytes.len()), piece);
        }
        7 => {
            let (location, piece) = (draw.range(bytes.len()), draw.range(other.len()));
            bytes.splice(location, other[piece].iter().copied());
        }
        8 => {
            let inserted: Vec<u8> = (0..1 + draw.below(8)).map(|_| draw.of(&BYTES)).collect();
            bytes.splice(at.min(bytes.len())..at.min(bytes.len()), inserted);
        }
        9 => {
            let (width, word) = (draw.of(&[4, 8]), draw.of(&WORDS).to_le_bytes());
            let end = (at + width).min(bytes.len());
            bytes[at.min(end)..end].copy_from_slice(&word[..end.saturating_sub(at)]);
        }
        _ => replace_number(bytes, at, draw),
    }
}

/// Writes another number over the first run of digits from `at` on.
fn replace_number(bytes: &mut Vec<u8>, at: usize, draw: &mut Draw) {
    let Some(start) = bytes.iter().skip(at).position(u8::is_ascii_digit).map(|found| found + at) else {
        return;
    };
    let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    bytes.splice(start..start + digits, draw.of(&NUMBERS).bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_key_gives_the_same_damage() {
        let whole: Vec<u8> = (0..200).collect();
        let all: Vec<_> = (0..100).map(|case| mutate(&whole, b"other", Key::new(case))).collect();
        assert!((0..100).all(|case| all[case as usize] == mutate(&whole, b"other", Key::new(case))));
        assert!(all.iter().filter(|damaged| **damaged != whole).count() > 90);
        assert!(mutate(b"", b"", Key::new(1)).len() < 100, "nothing can be damaged too");
    }
}
