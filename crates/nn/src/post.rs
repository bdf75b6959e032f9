//! Operations on each number after a layer's matmuls: activation and dropout, specified so that every backend computes
//! the same.

use esker_types::random::Key;
use serde::{Deserialize, Serialize};

/// The function between layers.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// None.
    Identity,
    /// max(x, 0).
    #[default]
    Relu,
    /// x above 0, exp(x) - 1 below.
    Elu,
    /// x above 0, a hundredth of it below.
    LeakyRelu,
}

/// Slope of [`Activation::LeakyRelu`] below 0.
pub const LEAKY_SLOPE: f32 = 0.01;

/// Dropout whose mask is a function of the key and the position of the number, so that a restart repeats it.
///
/// The numbers of row r, tile t of 32 columns, use the 16-bit lanes of eight values: column `32t + 8l + k` uses lane
/// `l` of `key.at((r * tiles + t) * 8 + k)`, and is dropped if the lane is below `threshold`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Lanes below this are dropped.
    pub threshold: u32,
    /// Factor of the numbers that are kept.
    pub scale: f32,
    /// Identifies (seed, step, layer, purpose).
    pub key: Key,
}

impl Dropout {
    /// Dropout of this rate, to the nearest 1/65536; `None` if nothing is dropped.
    pub fn new(rate: f32, key: Key) -> Option<Dropout> {
        let threshold = (rate as f64 * 65536.0).round().clamp(0.0, 65535.0) as u32;
        let scale = (65536.0 / (65536 - threshold) as f64) as f32;
        (threshold > 0).then_some(Dropout { threshold, scale, key })
    }

    /// The factor of the number at this position, in a matrix with this many columns.
    #[inline(always)]
    pub fn factor(&self, row: usize, column: usize, columns: usize) -> f32 {
        let tiles = columns.div_ceil(32);
        let bits = self.key.at(((row * tiles + column / 32) * 8 + column % 8) as u64);
        let lane = (bits >> (column % 32 / 8 * 16)) as u32 & 0xffff;
        if lane < self.threshold { 0.0 } else { self.scale }
    }
}

/// Activation, then dropout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Post {
    /// Applied first.
    pub activation: Activation,
    /// Applied second.
    pub dropout: Option<Dropout>,
}

impl Post {
    /// Does not change numbers.
    pub const NONE: Post = Post { activation: Activation::Identity, dropout: None };

    /// Whether it changes anything.
    pub fn is_none(&self) -> bool {
        self.activation == Activation::Identity && self.dropout.is_none()
    }
}
