//! Matrix products of one thread: a safe face of `gemm`. Threads share the work by rows, outside.

/// A matrix to read, with its steps from row to row and from column to column.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    values: &'a [f32],
    row_step: usize,
    column_step: usize,
}

impl<'a> View<'a> {
    /// Row after row.
    pub fn rows(values: &'a [f32], columns: usize) -> View<'a> {
        View { values, row_step: columns, column_step: 1 }
    }

    /// The transpose of a matrix that lies row after row.
    pub fn transposed(values: &'a [f32], columns: usize) -> View<'a> {
        View { values, row_step: 1, column_step: columns }
    }

    fn assert_holds(&self, rows: usize, columns: usize) {
        let last = (rows - 1) * self.row_step + (columns - 1) * self.column_step;
        assert!(last < self.values.len(), "{rows} x {columns} in {} numbers", self.values.len());
    }
}

/// `to (rows x columns, row after row) = left (rows x depth) right (depth x columns)`, added where `accumulate`.
pub(crate) fn product(
    to: &mut [f32],
    [rows, columns, depth]: [usize; 3],
    left: View<'_>,
    right: View<'_>,
    accumulate: bool,
) {
    assert_eq!(to.len(), rows * columns);
    if rows * columns == 0 {
        return;
    }
    if depth == 0 {
        if !accumulate {
            to.fill(0.0);
        }
        return;
    }
    left.assert_holds(rows, depth);
    right.assert_holds(depth, columns);
    let alpha = if accumulate { 1.0 } else { 0.0 };
    // SAFETY: `to` holds rows x columns numbers; the views hold theirs by the assertions above.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            depth,
            to.as_mut_ptr(),
            1,
            columns as isize,
            accumulate,
            left.values.as_ptr(),
            left.column_step as isize,
            left.row_step as isize,
            right.values.as_ptr(),
            right.column_step as isize,
            right.row_step as isize,
            alpha,
            1.0f32,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn products_equal_their_definition(
            rows in 0usize..9, columns in 0usize..9, depth in 0usize..9, flip in any::<[bool; 3]>(),
        ) {
            let [flip_left, flip_right, accumulate] = flip;
            let number = |index: usize| (index * 7 % 11) as f32 - 5.0;
            let left: Vec<f32> = (0..rows * depth).map(number).collect();
            let right: Vec<f32> = (0..depth * columns).map(|index| number(index + 3)).collect();
            let mut found: Vec<f32> = (0..rows * columns).map(number).collect();
            let mut expected = found.clone();
            let at = |values: &[f32], flipped: bool, row: usize, column: usize, rows: usize, columns: usize| {
                if flipped { values[column * rows + row] } else { values[row * columns + column] }
            };
            for row in 0..rows {
                for column in 0..columns {
                    let sum: f32 = (0..depth)
                        .map(|d| {
                            at(&left, flip_left, row, d, rows, depth)
                                * at(&right, flip_right, d, column, depth, columns)
                        })
                        .sum();
                    let old = &mut expected[row * columns + column];
                    *old = if accumulate { *old + sum } else { sum };
                }
            }
            let left = if flip_left { View::transposed(&left, rows) } else { View::rows(&left, depth) };
            let right = if flip_right { View::transposed(&right, depth) } else { View::rows(&right, columns) };
            product(&mut found, [rows, columns, depth], left, right, accumulate);
            prop_assert_eq!(found, expected);
        }
    }
}
