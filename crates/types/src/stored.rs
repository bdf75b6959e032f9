use crate::Dtype;

/// The stored form of rows of numbers, one row after the other.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredRows {
    /// Numbers per row.
    pub columns: usize,
    /// The dtype of a number; [`Dtype::holds_features`] is true for it.
    pub dtype: Dtype,
    /// Factors of 8-bit numbers per column; without them, numbers are used as stored.
    pub scales: Option<Vec<f32>>,
}

impl StoredRows {
    /// Bytes per row.
    pub fn row_bytes(&self) -> usize {
        self.columns * self.dtype.bytes() as usize
    }

    /// Number of whole rows in this many bytes.
    pub fn rows_in(&self, bytes: u64) -> u64 {
        bytes.checked_div(self.row_bytes() as u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_as_wide_as_their_numbers() {
        for (dtype, row_bytes, rows) in [(Dtype::F32, 28, 3), (Dtype::Bf16, 14, 7), (Dtype::I8, 7, 14)] {
            let stored = StoredRows { columns: 7, dtype, scales: None };
            assert_eq!((stored.row_bytes(), stored.rows_in(100)), (row_bytes, rows));
        }
        assert_eq!(StoredRows { columns: 0, dtype: Dtype::U8, scales: None }.rows_in(100), 0);
    }
}
