use std::path::{Path, PathBuf};

/// Where the bytes of a file are stored: in one file, or in stripes over several, one on each disk.
///
/// Stripe `s` is in part `s % parts`, after the stripes that the part already has. Callers see one contiguous range of
/// bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    parts: Vec<PathBuf>,
    stripe_bytes: u64,
}

/// A position in one part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartPosition {
    /// Which part.
    pub part: usize,
    /// Offset in the part.
    pub offset: u64,
    /// Bytes of the whole that follow contiguously in this part.
    pub contiguous_bytes: u64,
}

impl Layout {
    /// One plain file.
    pub fn file(path: &Path) -> Layout {
        Layout { parts: vec![path.to_path_buf()], stripe_bytes: u64::MAX }
    }

    /// Stripes of `stripe_bytes` over `parts`. The stripe size is a multiple of 4096, so that no direct read crosses
    /// two.
    pub fn striped(parts: Vec<PathBuf>, stripe_bytes: u64) -> Layout {
        assert!(!parts.is_empty(), "a file has at least one part");
        assert!(stripe_bytes > 0 && stripe_bytes.is_multiple_of(4096), "stripes are whole pages");
        if parts.len() == 1 {
            return Layout::file(&parts[0]);
        }
        Layout { parts, stripe_bytes }
    }

    /// The files.
    pub fn parts(&self) -> &[PathBuf] {
        &self.parts
    }

    /// The position of byte `offset` of the whole.
    pub fn place(&self, offset: u64) -> PartPosition {
        if self.parts.len() == 1 {
            return PartPosition { part: 0, offset, contiguous_bytes: u64::MAX - offset };
        }
        let (stripe, within) = (offset / self.stripe_bytes, offset % self.stripe_bytes);
        let parts = self.parts.len() as u64;
        let part_offset = stripe / parts * self.stripe_bytes + within;
        let part = (stripe % parts) as usize;
        PartPosition { part, offset: part_offset, contiguous_bytes: self.stripe_bytes - within }
    }

    /// Length of part `part` if the whole has `bytes`.
    pub fn part_bytes(&self, part: usize, bytes: u64) -> u64 {
        if self.parts.len() == 1 {
            return bytes;
        }
        let (stripes, rest) = (bytes / self.stripe_bytes, bytes % self.stripe_bytes);
        let (rounds, turn) = (stripes / self.parts.len() as u64, stripes % self.parts.len() as u64);
        let own = match (part as u64).cmp(&turn) {
            std::cmp::Ordering::Less => self.stripe_bytes,
            std::cmp::Ordering::Equal => rest,
            std::cmp::Ordering::Greater => 0,
        };
        rounds * self.stripe_bytes + own
    }

    /// Bytes of the whole that can be read if the parts have these lengths: up to the first missing byte.
    pub fn whole_bytes(&self, part_bytes: &[u64]) -> u64 {
        if self.parts.len() == 1 {
            return part_bytes[0];
        }
        let parts = self.parts.len() as u64;
        let ends = part_bytes.iter().zip(0..).map(|(bytes, part)| {
            let (stripes, rest) = (bytes / self.stripe_bytes, bytes % self.stripe_bytes);
            // A sparse file can claim any length: saturate instead of overflowing 64 bits.
            (stripes.saturating_mul(parts).saturating_add(part))
                .saturating_mul(self.stripe_bytes)
                .saturating_add(rest)
        });
        ends.min().unwrap_or(0)
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.parts[0].display())?;
        match self.parts.len() {
            1 => Ok(()),
            parts => write!(f, " and {} more", parts - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parts_that_claim_to_be_endless_do_not_overflow() {
        let layout = Layout::striped(vec![PathBuf::from("a"), PathBuf::from("b")], 1 << 30);
        assert_eq!(layout.whole_bytes(&[i64::MAX as u64, i64::MAX as u64]), u64::MAX - (1 << 30));
        assert_eq!(layout.whole_bytes(&[u64::MAX, u64::MAX]), u64::MAX);
        assert_eq!(layout.whole_bytes(&[u64::MAX, 5]), (1 << 30) + 5);
    }

    proptest! {
        #[test]
        fn every_byte_has_one_place_and_parts_are_as_long_as_said(parts in 1usize..5, pages in 1u64..4, bytes in 0u64..100_000) {
            let names = (0..parts).map(|part| PathBuf::from(part.to_string())).collect();
            let layout = Layout::striped(names, pages * 4096);
            let mut ends = vec![0u64; parts];
            let mut at = 0;
            while at < bytes {
                let place = layout.place(at);
                // Parts are filled from front to back, without holes or overlaps.
                prop_assert_eq!(place.offset, ends[place.part]);
                let now = place.contiguous_bytes.min(bytes - at).min(1000);
                ends[place.part] += now;
                at += now;
            }
            let said: Vec<u64> = (0..parts).map(|part| layout.part_bytes(part, bytes)).collect();
            prop_assert_eq!(&said, &ends);
            prop_assert_eq!(layout.whole_bytes(&said), bytes);
            if let Some(longest) = said.iter().position(|&bytes| bytes > 0) {
                let mut cut = said.clone();
                cut[longest] -= 1;
                prop_assert!(layout.whole_bytes(&cut) < bytes);
            }
        }
    }
}
