use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// The type of one element of an array on disk. The codes are part of the format (`docs/format.md`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u32)]
pub enum Dtype {
    /// Unsigned byte.
    U8 = 1,
    /// Signed byte.
    I8 = 2,
    /// IEEE half precision.
    F16 = 3,
    /// bfloat16: the upper half of an f32.
    Bf16 = 4,
    /// Unsigned 32-bit integer.
    U32 = 5,
    /// Signed 32-bit integer.
    I32 = 6,
    /// IEEE single precision.
    F32 = 7,
    /// Unsigned 64-bit integer.
    U64 = 8,
    /// Signed 64-bit integer.
    I64 = 9,
}

impl Dtype {
    /// Every dtype, in code order.
    pub const ALL: [Dtype; 9] = [
        Dtype::U8,
        Dtype::I8,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::U32,
        Dtype::I32,
        Dtype::F32,
        Dtype::U64,
        Dtype::I64,
    ];

    /// Bytes per element.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::U8 | Dtype::I8 => 1,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::U32 | Dtype::I32 | Dtype::F32 => 4,
            Dtype::U64 | Dtype::I64 => 8,
        }
    }

    /// The code stored in array headers.
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The dtype of a stored code.
    pub fn from_code(code: u32) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.code() == code)
    }

    /// Its name in flags and manifests.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::U8 => "u8",
            Dtype::I8 => "i8",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::U32 => "u32",
            Dtype::I32 => "i32",
            Dtype::F32 => "f32",
            Dtype::U64 => "u64",
            Dtype::I64 => "i64",
        }
    }

    /// Whether feature rows may be stored in this dtype.
    pub fn holds_features(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::U8 | Dtype::I8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A word that is not the name of a dtype.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is not a dtype; use one of u8, i8, f16, bf16, u32, i32, f32, u64, i64")]
pub struct ParseDtypeError(String);

impl FromStr for Dtype {
    type Err = ParseDtypeError;

    fn from_str(word: &str) -> Result<Dtype, ParseDtypeError> {
        Dtype::ALL
            .into_iter()
            .find(|dtype| dtype.name() == word)
            .ok_or_else(|| ParseDtypeError(word.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_come_back() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
        }
        assert!("f64".parse::<Dtype>().is_err());
        assert_eq!(Dtype::from_code(0), None);
    }
}
