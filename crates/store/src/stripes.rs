//! Arrays striped over several disks: how a manifest describes them, and where the parts are stored.
//!
//! The manifest contains only numbers. Part `i` is accessed through `stripe-i` beside the manifest, a directory or a
//! link to one. If a disk is mounted elsewhere, only the link must change.

use crate::{Result, StoreError};
use esker_io::Layout;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// The striping of an array: stripe `s` is in part `s % parts`. The numbers are always valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedStripes", into = "UncheckedStripes")]
pub struct Stripes {
    parts: u32,
    bytes: u64,
}

/// Invalid numbers of a striping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StripesError {
    /// Too few parts, or too many.
    #[error("arrays are striped over 2 to {} directories, and {parts} is given", Stripes::MOST_PARTS)]
    Parts {
        /// The given number.
        parts: u32,
    },
    /// Stripes are too short, too long, or not a power of two.
    #[error("stripes of {bytes} bytes; powers of two from 64 KiB to 1 GiB work")]
    Bytes {
        /// The given length.
        bytes: u64,
    },
}

/// The numbers in a manifest, before they are checked.
#[derive(Clone, Serialize, Deserialize)]
struct UncheckedStripes {
    parts: u32,
    bytes: u64,
}

impl Stripes {
    /// Largest number of parts.
    pub const MOST_PARTS: u32 = 64;
    /// The smallest stripe.
    pub const LEAST_BYTES: u64 = 64 << 10;
    /// The largest stripe.
    pub const MOST_BYTES: u64 = 1 << 30;

    /// Stripes of `bytes` over `parts` parts, or the reason why the numbers are invalid.
    pub fn new(parts: u32, bytes: u64) -> Result<Stripes, StripesError> {
        if !(2..=Stripes::MOST_PARTS).contains(&parts) {
            return Err(StripesError::Parts { parts });
        }
        if !bytes.is_power_of_two() || !(Stripes::LEAST_BYTES..=Stripes::MOST_BYTES).contains(&bytes) {
            return Err(StripesError::Bytes { bytes });
        }
        Ok(Stripes { parts, bytes })
    }

    /// Number of parts.
    pub fn parts(&self) -> u32 {
        self.parts
    }

    /// Length of a stripe.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The parts of file `file_name` in the dataset `directory`.
    pub(crate) fn layout(&self, directory: &Path, file_name: &str) -> Layout {
        let parts = (0..self.parts).map(|part| stripe_directory(directory, part).join(file_name));
        Layout::striped(parts.collect(), self.bytes)
    }

    /// Checks that every part has a directory. The error names the missing one and a remedy.
    pub(crate) fn check_directories(&self, directory: &Path) -> Result<()> {
        (0..self.parts).try_for_each(|part| {
            let path = stripe_directory(directory, part);
            if path.is_dir() {
                return Ok(());
            }
            let found = match fs::read_link(&path) {
                Ok(target) => format!("a link to {}, where no directory is", target.display()),
                Err(_) if path.exists() => "something else".to_string(),
                Err(_) => "nothing".to_string(),
            };
            Err(StoreError::StripeMissing { path, found })
        })
    }
}

impl TryFrom<UncheckedStripes> for Stripes {
    type Error = StripesError;

    fn try_from(numbers: UncheckedStripes) -> Result<Stripes, StripesError> {
        Stripes::new(numbers.parts, numbers.bytes)
    }
}

impl From<Stripes> for UncheckedStripes {
    fn from(stripes: Stripes) -> UncheckedStripes {
        UncheckedStripes { parts: stripes.parts, bytes: stripes.bytes }
    }
}

/// The directory, or the link to it, of part `part`.
pub fn stripe_directory(dataset: &Path, part: u32) -> PathBuf {
    dataset.join(format!("stripe-{part}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_that_can_be_are_read() {
        let read = |text: &str| serde_json::from_str::<Stripes>(text);
        let good = read(r#"{"parts": 2, "bytes": 65536}"#).unwrap();
        assert_eq!(serde_json::to_string(&good).unwrap(), r#"{"parts":2,"bytes":65536}"#);
        assert!(read(r#"{"parts": 64, "bytes": 1073741824}"#).is_ok());
        for (parts, bytes) in [
            (0, 65536),
            (1, 65536),
            (65, 65536),
            (2, 0),
            (2, 32768),
            (2, 65537),
            (2, 1u64 << 31),
            (2, 3 << 20),
        ] {
            let error = read(&format!("{{\"parts\": {parts}, \"bytes\": {bytes}}}")).unwrap_err().to_string();
            let expected = if (2..=64).contains(&parts) { "powers of two" } else { "2 to 64" };
            assert!(error.contains(expected), "{error}");
        }
        assert!(read(r#"{"parts": -1, "bytes": 65536}"#).is_err());
        assert!(read(r#"{"parts": 4294967298, "bytes": 65536}"#).is_err());
    }
}
