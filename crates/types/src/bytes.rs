use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A number of bytes that is read and written with units: `8GiB`, `512 MiB`, `1.5GB`, `4096`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct ByteCount(pub u64);

/// A number of bytes, or a size with a unit.
impl<'de> Deserialize<'de> for ByteCount {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<ByteCount, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum BytesAsWritten {
            Number(u64),
            Word(String),
        }
        match BytesAsWritten::deserialize(deserializer)? {
            BytesAsWritten::Number(bytes) => Ok(ByteCount(bytes)),
            BytesAsWritten::Word(word) => word.parse().map_err(serde::de::Error::custom),
        }
    }
}

const UNITS: [(&str, u64); 13] = [
    ("b", 1),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
];

impl ByteCount {
    /// As the value of a flag, rounded up so that it suffices: `716MiB`.
    pub fn flag_value(self) -> String {
        let (unit, scale) = match self.0 {
            0..1_048_576 => ("KiB", 1u64 << 10),
            bytes if bytes < 64 << 30 => ("MiB", 1 << 20),
            _ => ("GiB", 1 << 30),
        };
        format!("{}{unit}", self.0.div_ceil(scale))
    }
}

/// A word that is not a size.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is not a size; write a number and a unit, as in 512MiB, 8GiB or 1.5GB")]
pub struct ParseBytesError(String);

impl FromStr for ByteCount {
    type Err = ParseBytesError;

    fn from_str(word: &str) -> Result<ByteCount, ParseBytesError> {
        let bad = || ParseBytesError(word.to_string());
        let text = word.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = (&text[..digits], text[digits..].trim().to_ascii_lowercase());
        let scale = match unit.as_str() {
            "" => 1,
            unit => UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(bad)?.1,
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(ByteCount).ok_or_else(bad);
        }
        let bytes = number.parse::<f64>().map_err(|_| bad())? * scale as f64;
        if bytes.is_finite() && bytes < u64::MAX as f64 { Ok(ByteCount(bytes as u64)) } else { Err(bad()) }
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let (name, scale) = match bytes {
            0..=1023 => return f.pad(&format!("{bytes} B")),
            _ if bytes < 1 << 20 => ("KiB", 1u64 << 10),
            _ if bytes < 1 << 30 => ("MiB", 1 << 20),
            _ if bytes < 1 << 40 => ("GiB", 1 << 30),
            _ => ("TiB", 1 << 40),
        };
        if bytes.is_multiple_of(scale) && bytes / scale < 1024 {
            f.pad(&format!("{} {name}", bytes / scale))
        } else {
            f.pad(&format!("{:.1} {name}", bytes as f64 / scale as f64))
        }
    }
}

/// A count with spaces between groups of three digits: `5 552 998`.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

/// A count with its noun in singular or plural: `1 epoch`, `12 epochs`.
pub fn counted(count: u64, one: &str, several: &str) -> String {
    format!("{} {}", grouped(count), if count == 1 { one } else { several })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_are_counted_in_words() {
        let epochs = |count| counted(count, "epoch", "epochs");
        assert_eq!([epochs(0), epochs(1), epochs(1200)], ["0 epochs", "1 epoch", "1 200 epochs"]);
    }

    fn check(word: &str, bytes: u64) {
        assert_eq!(word.parse(), Ok(ByteCount(bytes)), "{word}");
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        check("0", 0);
        check("4096", 4096);
        check("512MiB", 512 << 20);
        check(" 512 mib ", 512 << 20);
        check("8GiB", 8 << 30);
        check("8g", 8 << 30);
        check("1.5GB", 1_500_000_000);
        check("2kB", 2000);
    }

    #[test]
    fn the_value_of_a_flag_suffices() {
        let cases = [(1, "1KiB"), (750_642_556, "716MiB"), (716 << 20, "716MiB"), (65 << 30, "65GiB")];
        for (bytes, expected) in cases {
            let word = ByteCount(bytes).flag_value();
            assert_eq!(word, expected);
            assert!(word.parse::<ByteCount>().unwrap().0 >= bytes, "{word}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for word in ["", "GiB", "-1", "1.2.3", "5 parsecs", "99999999999999999999", "99999999TiB", "1e9"] {
            assert!(word.parse::<ByteCount>().is_err(), "{word}");
        }
    }

    #[test]
    fn sizes_are_shown_short() {
        assert_eq!(ByteCount(17).to_string(), "17 B");
        assert_eq!(ByteCount(512 << 20).to_string(), "512 MiB");
        assert_eq!(ByteCount(1_500_000_000).to_string(), "1.4 GiB");
        assert_eq!(grouped(5_552_998), "5 552 998");
        assert_eq!(grouped(999), "999");
    }
}
