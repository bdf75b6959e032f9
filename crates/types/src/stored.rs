use crate::Dtype;

/// How rows of numbers are stored, one row behind the other.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredRows {
    /// Numbers in a row.
    pub columns: usize,
    /// How a number is stored; one that [`Dtype::holds_features`].
    pub dtype: Dtype,
    /// What 8-bit numbers of each column are multiplied by; without, they are taken as they are.
    pub scales: Option<Vec<f32>>,
}

impl StoredRows {
    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.columns * self.dtype.bytes() as usize
    }

    /// Whole rows that so many bytes hold.
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
