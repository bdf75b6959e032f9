//! What stored rows are as f32, number by number.

use esker_types::{Dtype, StoredRows};
use half::{bf16, f16};

/// Rows, as stored, one after the other.
pub fn as_f32(rows: &StoredRows, stored: &[u8]) -> Vec<f32> {
    let scale = |at: usize| rows.scales.as_ref().map_or(1.0, |scales| scales[at % rows.columns]);
    let number = |(at, bytes): (usize, &[u8])| match (rows.dtype, bytes) {
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (Dtype::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (Dtype::U8, &[a]) => a as f32 * scale(at),
        (Dtype::I8, &[a]) => a as i8 as f32 * scale(at),
        (other, _) => panic!("rows are not stored as {other}"),
    };
    stored.chunks_exact(rows.dtype.bytes() as usize).enumerate().map(number).collect()
}
