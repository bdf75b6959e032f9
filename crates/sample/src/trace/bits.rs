//! Bits, lowest first, in little-endian bytes.

/// Zero bytes after every record, so that a reader may load eight bytes anywhere.
pub(super) const PADDING: usize = 8;

/// Bits that one load of eight bytes has at any position.
const MOST_PEEKED: u32 = 56;
/// Numbers that share a width. Few enough that one large number costs the others little.
const GROUP: usize = 32;
const GROUP_WIDTH_BITS: u32 = 6;

/// Bits needed for every number below `bound`.
#[inline(always)]
pub(super) fn width_below(bound: u64) -> u32 {
    64 - bound.saturating_sub(1).leading_zeros()
}

/// Appends bits to bytes.
#[derive(Debug, Default)]
pub(super) struct BitWriter {
    bytes: Vec<u8>,
    pending: u64,
    filled: u32,
}

impl BitWriter {
    pub fn clear(&mut self) {
        self.bytes.clear();
        (self.pending, self.filled) = (0, 0);
    }

    /// Appends the lowest `width` bits of `value`. Higher bits must be zero.
    #[inline(always)]
    pub fn put(&mut self, value: u64, width: u32) {
        debug_assert!(width == 64 || value >> width == 0, "{value} in {width} bits");
        self.pending |= value << self.filled;
        let free = 64 - self.filled;
        if width < free {
            self.filled += width;
            return;
        }
        self.bytes.extend_from_slice(&self.pending.to_le_bytes());
        self.pending = if free == 64 { 0 } else { value.checked_shr(free).unwrap_or(0) };
        self.filled = width - free;
    }

    /// Appends a number in 2 log2 + 1 bits (Elias gamma of `value + 1`).
    pub fn put_gamma(&mut self, value: u64) {
        let width = 63 - (value + 1).leading_zeros();
        self.put_unary(width as u64);
        self.put(value + 1 - (1 << width), width);
    }

    /// Appends `value` ones, then a zero.
    pub fn put_unary(&mut self, mut value: u64) {
        while value >= 32 {
            self.put(u32::MAX as u64, 32);
            value -= 32;
        }
        self.put((1 << value) - 1, value as u32 + 1);
    }

    /// Appends a gap: its upper bits in unary, its `low` lower bits as they are (Rice).
    #[inline(always)]
    pub fn put_rice(&mut self, value: u64, low: u32) {
        self.put_unary(value >> low);
        self.put(value & ((1 << low) - 1), low);
    }

    /// Appends numbers in groups: the width of the largest, then each in this width.
    pub fn put_groups(&mut self, numbers: &[u32]) {
        for group in numbers.chunks(GROUP) {
            let width =
                group.iter().fold(0, |all, number| all | number).checked_ilog2().map_or(0, |top| top + 1);
            self.put(width as u64, GROUP_WIDTH_BITS);
            group.iter().for_each(|number| self.put(*number as u64, width));
        }
    }

    /// The bytes written so far, padded.
    pub fn finish(&mut self) -> &[u8] {
        let used = self.filled.div_ceil(8) as usize;
        self.bytes.extend_from_slice(&self.pending.to_le_bytes()[..used]);
        (self.pending, self.filled) = (0, 0);
        self.bytes.extend_from_slice(&[0; PADDING]);
        &self.bytes
    }
}

/// Reads bits. Beyond the end it reads zeros, and [`BitReader::is_over`] is true.
#[derive(Debug, Clone)]
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    position: u64,
}

impl<'a> BitReader<'a> {
    pub fn new(bytes: &'a [u8]) -> BitReader<'a> {
        BitReader { bytes, position: 0 }
    }

    /// Whether it has read beyond the end.
    #[inline(always)]
    pub fn is_over(&self) -> bool {
        self.position > (self.bytes.len() as u64).saturating_sub(PADDING as u64) * 8
    }

    /// Whether reading `bits` more bits would pass the end.
    pub fn is_over_after(&self, bits: u64) -> bool {
        BitReader { bytes: self.bytes, position: self.position.saturating_add(bits) }.is_over()
    }

    /// Whether only the rest of the last byte is left.
    pub fn is_at_end(&self) -> bool {
        !self.is_over() && self.position.div_ceil(8) + PADDING as u64 == self.bytes.len() as u64
    }

    /// At least 57 bits from the current position.
    #[inline(always)]
    fn peek(&self) -> u64 {
        let bytes = self.bytes.get((self.position / 8) as usize..).and_then(|bytes| bytes.first_chunk());
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes)) >> (self.position % 8)
    }

    #[inline(always)]
    pub fn take(&mut self, width: u32) -> u64 {
        if width > MOST_PEEKED {
            let low = self.take(32);
            return low | self.take(width - 32) << 32;
        }
        let value = self.peek() & ((1 << width) - 1);
        self.position += width as u64;
        value
    }

    /// Takes a number of this width for each of `out`. Positions do not depend on values, so several loads are in
    /// flight at a time.
    #[inline(always)]
    pub fn take_each<T>(&mut self, width: u32, out: &mut [T], mut of: impl FnMut(u64) -> T) {
        if width > MOST_PEEKED {
            return out.iter_mut().for_each(|to| *to = of(self.take(width)));
        }
        let mask = (1 << width) - 1;
        for to in out {
            *to = of(self.peek() & mask);
            self.position += width as u64;
        }
    }

    /// Takes this many bits. Returns how many are ones.
    pub fn take_ones(&mut self, mut bits: u64) -> u64 {
        let mut ones = 0;
        while bits > 0 {
            let some = bits.min(MOST_PEEKED as u64);
            ones += self.take(some as u32).count_ones() as u64;
            bits -= some;
        }
        ones
    }

    /// Takes numbers in groups. `None` if a width is larger than any that is written.
    pub fn take_groups(&mut self, out: &mut [u32]) -> Option<()> {
        for group in out.chunks_mut(GROUP) {
            let width = self.take(GROUP_WIDTH_BITS) as u32;
            if width > u32::BITS {
                return None;
            }
            self.take_each(width, group, |number| number as u32);
        }
        Some(())
    }

    /// Takes a run of ones and the zero after it. `None` if it is longer than any that is written.
    #[inline(always)]
    pub fn take_unary(&mut self) -> Option<u64> {
        let mut count = 0;
        loop {
            let ones = self.peek().trailing_ones().min(56) as u64;
            self.position += ones;
            count += ones;
            if ones < 56 {
                self.position += 1;
                return Some(count);
            }
            if self.is_over() {
                return None;
            }
        }
    }

    pub fn take_gamma(&mut self) -> Option<u64> {
        let width = self.take_unary().filter(|width| *width < 63)? as u32;
        Some(self.take(width) + (1 << width) - 1)
    }

    #[inline(always)]
    pub fn take_rice(&mut self, low: u32) -> Option<u64> {
        let high = self.take_unary()?.checked_mul(1 << low)?;
        Some(high | self.take(low))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As many numbers as `count`, some of them small.
    fn numbers(value: u64, count: u32) -> Vec<u32> {
        (0..count).map(|at| (value.rotate_left(at) as u32) >> (at % 33).min(31)).collect()
    }

    proptest! {
        #[test]
        fn what_is_put_is_taken(values in prop::collection::vec((any::<u64>(), 0u32..=64, 0u32..6), 0..200)) {
            let mut writer = BitWriter::default();
            let cut = |value: u64, width: u32| if width == 64 { value } else { value & ((1 << width) - 1) };
            for (value, width, kind) in &values {
                match kind {
                    0 => writer.put(cut(*value, *width), *width),
                    1 => writer.put_gamma(value >> 2),
                    2 => writer.put_unary(value % 200),
                    3 => writer.put_groups(&numbers(*value, *width)),
                    4 => (0..5).for_each(|_| writer.put(cut(*value, *width), *width)),
                    _ => writer.put_rice(value >> 40, 18),
                }
            }
            let bytes = writer.finish().to_vec();
            let mut reader = BitReader::new(&bytes);
            for (value, width, kind) in &values {
                match kind {
                    0 => prop_assert_eq!(reader.take(*width), cut(*value, *width)),
                    1 => prop_assert_eq!(reader.take_gamma(), Some(value >> 2)),
                    2 => prop_assert_eq!(reader.take_unary(), Some(value % 200)),
                    3 => {
                        let mut found = vec![7; *width as usize];
                        prop_assert_eq!(reader.take_groups(&mut found), Some(()));
                        prop_assert_eq!(found, numbers(*value, *width));
                    }
                    4 => {
                        let (mut found, mut bits) = ([0; 5], reader.clone());
                        reader.take_each(*width, &mut found, |number| number);
                        prop_assert_eq!(found, [cut(*value, *width); 5]);
                        let ones = cut(*value, *width).count_ones() as u64 * 5;
                        prop_assert_eq!(bits.take_ones(*width as u64 * 5), ones);
                    }
                    _ => prop_assert_eq!(reader.take_rice(18), Some(value >> 40)),
                }
            }
            prop_assert!(reader.is_at_end());
            reader.take(8);
            prop_assert!(reader.is_over());
        }
    }

    #[test]
    fn widths_hold_their_bound() {
        for (bound, width) in [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1 << 22, 22), (u64::MAX, 64)]
        {
            assert_eq!(width_below(bound), width, "{bound}");
        }
    }
}
