//! Matmuls of one thread: a safe interface to Esker's tiles if the CPU has AVX-512, otherwise to `gemm`. Callers split
//! the work among threads by rows. Each number is a sum in the order of the depth, in blocks that depend only on the
//! shapes.

use super::buffer::{Buffer, MatrixPool};
#[cfg(target_arch = "x86_64")]
use super::kernel::{self, PANEL, Steps};
#[cfg(target_arch = "x86_64")]
use super::wide::{Width, width};

/// Rows of a block of the depth: together with one panel of columns it fits the L1 cache.
#[cfg(target_arch = "x86_64")]
const DEPTH_BLOCK: usize = 128;
#[cfg(target_arch = "x86_64")]
const TURNED_BLOCK: usize = 64;

/// Columns per panel of a packed matrix.
fn panel_columns(columns: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if width() == Width::Avx512 {
        return PANEL;
    }
    columns.max(1)
}

/// Words of a packed matrix.
pub(crate) fn packed_words(depth: usize, columns: usize) -> usize {
    depth * columns.next_multiple_of(panel_columns(columns))
}

/// The right side of many matmuls (depth x columns), packed once: panel after panel of columns, each row by row.
pub(crate) struct PackedPanels {
    values: Buffer,
    depth: usize,
    columns: usize,
}

impl PackedPanels {
    pub fn new(pool: &MatrixPool, view: View<'_>, depth: usize, columns: usize) -> PackedPanels {
        if depth * columns > 0 {
            view.assert_size(depth, columns);
        }
        let mut values = pool.take(packed_words(depth, columns));
        let wide = panel_columns(columns);
        let panels = values.floats_mut().chunks_exact_mut((depth * wide).max(1));
        for (panel, to) in panels.enumerate() {
            let first = panel * wide;
            for (d, to) in to.chunks_exact_mut(wide).enumerate() {
                for (offset, to) in to.iter_mut().enumerate() {
                    let place = d * view.row_step + (first + offset) * view.column_step;
                    // Columns past the end are computed and discarded.
                    *to = if first + offset < columns { view.values[place] } else { 0.0 };
                }
            }
        }
        PackedPanels { values, depth, columns }
    }

    /// The same from rows that need not be neighbours: `depth` rows of `columns` numbers.
    pub fn gathered<'a>(
        pool: &MatrixPool,
        depth: usize,
        columns: usize,
        row: impl Fn(usize) -> &'a [f32],
    ) -> PackedPanels {
        let mut values = pool.take(packed_words(depth, columns));
        let wide = panel_columns(columns);
        for (panel, to) in values.floats_mut().chunks_exact_mut((depth * wide).max(1)).enumerate() {
            let first = panel * wide;
            let count = wide.min(columns.saturating_sub(first));
            for (d, to) in to.chunks_exact_mut(wide).enumerate() {
                to[..count].copy_from_slice(&row(d)[first..][..count]);
                to[count..].fill(0.0);
            }
        }
        PackedPanels { values, depth, columns }
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    pub fn depth(&self) -> usize {
        self.depth
    }
}

/// Approximate number of times that `matmul_packed` calls `between`.
pub(crate) fn matmul_calls(rows: usize, columns: usize, depth: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if width() == Width::Avx512 {
        return rows.div_ceil(kernel::TILE) * columns.div_ceil(PANEL) * depth.div_ceil(DEPTH_BLOCK).max(1);
    }
    let _ = (rows, columns, depth);
    1
}

/// `to (rows x columns) = left (rows x depth, row-major) right`, added to `to` if `accumulate`. `between` is called
/// now and then.
pub(crate) fn matmul_packed(
    to: &mut [f32],
    rows: usize,
    left: &[f32],
    right: &PackedPanels,
    accumulate: bool,
    between: &mut impl FnMut(),
) {
    assert_eq!(left.len(), rows * right.depth);
    matmul_strided(to, rows, left, right.depth, right, accumulate, between)
}

/// The same if rows of the left side are `left_step` numbers apart.
pub(crate) fn matmul_strided(
    to: &mut [f32],
    rows: usize,
    left: &[f32],
    left_step: usize,
    right: &PackedPanels,
    accumulate: bool,
    between: &mut impl FnMut(),
) {
    let (columns, depth) = (right.columns, right.depth);
    assert_eq!(to.len(), rows * columns);
    assert!(depth <= left_step && rows.saturating_sub(1) * left_step + depth.min(rows * depth) <= left.len());
    #[cfg(target_arch = "x86_64")]
    if width() == Width::Avx512 && depth > 0 {
        for start in (0..depth).step_by(DEPTH_BLOCK) {
            let block = DEPTH_BLOCK.min(depth - start);
            for (panel, values) in right.values.floats().chunks_exact(depth * PANEL).enumerate() {
                let first = panel * PANEL;
                let shape = [rows, PANEL.min(columns - first), block];
                let steps = Steps { row: left_step, depth: 1 };
                // SAFETY: AVX-512 is available; both sides and `to` have their sizes by the assertions above, and the
                // panel has `depth` rows.
                unsafe {
                    let (to, left) = (to.as_mut_ptr().add(first), left.as_ptr().add(start));
                    let values = values.as_ptr().add(start * PANEL);
                    let accumulate = accumulate || start > 0;
                    kernel::panel(to, columns, shape, left, steps, values, accumulate, between);
                }
            }
        }
        return;
    }
    between();
    let left = View { values: left, row_step: left_step, column_step: 1 };
    matmul(to, [rows, columns, depth], left, View::rows(right.values.floats(), columns), accumulate);
}

/// `to (rows x columns) += left transposed right`, both sides `depth` long and row-major.
pub(crate) fn add_transposed(
    to: &mut [f32],
    [rows, columns, depth]: [usize; 3],
    left: &[f32],
    right: &[f32],
) {
    assert_eq!(left.len(), depth * rows);
    add_transposed_strided(to, [rows, columns, depth], left, rows, right)
}

/// The same if rows of the left side are `left_step` numbers apart.
pub(crate) fn add_transposed_strided(
    to: &mut [f32],
    [rows, columns, depth]: [usize; 3],
    left: &[f32],
    left_step: usize,
    right: &[f32],
) {
    assert_eq!((to.len(), right.len()), (rows * columns, depth * columns));
    if rows * depth == 0 {
        return;
    }
    assert!(rows <= left_step && (depth - 1) * left_step + rows <= left.len());
    #[cfg(target_arch = "x86_64")]
    if width() == Width::Avx512 {
        let mut panel = [0.0f32; TURNED_BLOCK * PANEL];
        for start in (0..depth).step_by(TURNED_BLOCK) {
            let block = TURNED_BLOCK.min(depth - start);
            for first in (0..columns).step_by(PANEL) {
                let wide = PANEL.min(columns - first);
                for (d, to) in panel.chunks_exact_mut(PANEL).take(block).enumerate() {
                    let from = &right[(start + d) * columns + first..];
                    match from.first_chunk::<PANEL>() {
                        // A whole panel, whose length is known: no call per row.
                        Some(from) if wide == PANEL => to.copy_from_slice(from),
                        _ => to[..wide].copy_from_slice(&from[..wide]),
                    }
                }
                let steps = Steps { row: 1, depth: left_step };
                // SAFETY: as in `matmul_packed`; the panel has `block` rows.
                unsafe {
                    let (to, left) = (to.as_mut_ptr().add(first), left.as_ptr().add(start * left_step));
                    let shape = [rows, wide, block];
                    kernel::panel(to, columns, shape, left, steps, panel.as_ptr(), true, &mut || {});
                }
            }
        }
        return;
    }
    let left = View { values: left, row_step: 1, column_step: left_step };
    matmul(to, [rows, columns, depth], left, View::rows(right, columns), true);
}

/// A matrix to read, with its steps from row to row and from column to column.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    values: &'a [f32],
    row_step: usize,
    column_step: usize,
}

impl<'a> View<'a> {
    /// A row-major matrix.
    pub fn rows(values: &'a [f32], columns: usize) -> View<'a> {
        View { values, row_step: columns, column_step: 1 }
    }

    /// The transpose of a row-major matrix.
    pub fn transposed(values: &'a [f32], columns: usize) -> View<'a> {
        View { values, row_step: 1, column_step: columns }
    }

    fn assert_size(&self, rows: usize, columns: usize) {
        let last = (rows - 1) * self.row_step + (columns - 1) * self.column_step;
        assert!(last < self.values.len(), "{rows} x {columns} in {} numbers", self.values.len());
    }
}

/// `to (rows x columns, row-major) = left (rows x depth) right (depth x columns)`, added to `to` if `accumulate`.
fn matmul(
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
    left.assert_size(rows, depth);
    right.assert_size(depth, columns);
    let alpha = if accumulate { 1.0 } else { 0.0 };
    // SAFETY: `to` has rows x columns numbers; the views have theirs by the assertions above.
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
        fn packed_and_transposed_matmuls_equal_plain_ones(
            rows in 0usize..20, columns in 0usize..150, depth in 0usize..300, accumulate in any::<bool>(),
        ) {
            // Small whole numbers: every order of addition gives the same result.
            let number = |index: usize| (index * 7 % 11) as f32 - 5.0;
            let left: Vec<f32> = (0..rows * depth).map(number).collect();
            let right: Vec<f32> = (0..depth * columns).map(|index| number(index + 3)).collect();
            let mut turned = vec![0.0; depth * rows];
            for (row, left) in left.chunks(depth.max(1)).enumerate() {
                left.iter().enumerate().for_each(|(d, x)| turned[d * rows + row] = *x);
            }
            let start: Vec<f32> = (0..rows * columns).map(number).collect();
            let mut expected = start.clone();
            let (left_view, right_view) = (View::rows(&left, depth), View::rows(&right, columns));
            matmul(&mut expected, [rows, columns, depth], left_view, right_view, accumulate);
            let mut found = start.clone();
            let packed = PackedPanels::new(&MatrixPool::default(), right_view, depth, columns);
            matmul_packed(&mut found, rows, &left, &packed, accumulate, &mut || {});
            prop_assert_eq!(&found, &expected);
            if accumulate {
                let mut found = start.clone();
                add_transposed(&mut found, [rows, columns, depth], &turned, &right);
                prop_assert_eq!(&found, &expected);
            }
        }

        #[test]
        fn matmuls_equal_their_definition(
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
            matmul(&mut found, [rows, columns, depth], left, right, accumulate);
            prop_assert_eq!(found, expected);
        }
    }
}
