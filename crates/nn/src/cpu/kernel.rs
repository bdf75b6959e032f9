//! The innermost matmul on AVX-512: tiles of 6 rows and 64 columns in registers. `gemm` copies both sides into its own
//! layout on every call, which costs a tenth of the time for a chunk of rows and one weight. Here the weight is packed
//! once for all chunks, and rows are read in place.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::*;

/// Columns per panel: four registers.
pub(crate) const PANEL: usize = 64;
/// Rows per tile.
pub(crate) const TILE: usize = 6;

/// Position of the numbers of the left side: `(row, depth)` is at `row * row_step + depth * depth_step`.
#[derive(Clone, Copy)]
pub(crate) struct Steps {
    pub row: usize,
    pub depth: usize,
}

/// `to[row][column] += left[row][d] x right[d][column]` for `rows` rows and the `columns` of one panel. Calls
/// `between` before every tile. A tile takes a microsecond: long enough for a prefetch in `between` to complete.
///
/// # Safety
/// The CPU must have AVX-512F. `left` must have every (row, depth) of its steps, `right` `depth` rows of `PANEL`
/// numbers, and `to` `rows` rows of `columns` numbers, `to_step` apart, that nobody else uses.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn panel(
    to: *mut f32,
    to_step: usize,
    [rows, columns, depth]: [usize; 3],
    left: *const f32,
    steps: Steps,
    right: *const f32,
    accumulate: bool,
    between: &mut impl FnMut(),
) {
    let mut row = 0;
    while row < rows {
        between();
        let count = (rows - row).min(TILE);
        // SAFETY: by the caller's contract, for the rows of this tile.
        unsafe {
            let (to, left) = (to.add(row * to_step), left.add(row * steps.row));
            let shape = [columns, depth];
            match count {
                1 => columns_of::<1>(to, to_step, shape, left, steps, right, accumulate),
                2 => columns_of::<2>(to, to_step, shape, left, steps, right, accumulate),
                3 => columns_of::<3>(to, to_step, shape, left, steps, right, accumulate),
                4 => columns_of::<4>(to, to_step, shape, left, steps, right, accumulate),
                5 => columns_of::<5>(to, to_step, shape, left, steps, right, accumulate),
                _ => columns_of::<6>(to, to_step, shape, left, steps, right, accumulate),
            }
        }
        row += count;
    }
}

/// Chooses the tile by its registers of columns, and by the layout of the left side.
///
/// # Safety
/// As for `panel`.
#[inline(always)]
unsafe fn columns_of<const ROWS: usize>(
    to: *mut f32,
    to_step: usize,
    [columns, depth]: [usize; 2],
    left: *const f32,
    steps: Steps,
    right: *const f32,
    accumulate: bool,
) {
    // SAFETY: by the caller's contract.
    unsafe {
        match (columns.div_ceil(16), steps.depth == 1) {
            (1, true) => tile::<ROWS, 1, true>(to, to_step, [columns, depth], left, steps, right, accumulate),
            (2, true) => tile::<ROWS, 2, true>(to, to_step, [columns, depth], left, steps, right, accumulate),
            (3, true) => tile::<ROWS, 3, true>(to, to_step, [columns, depth], left, steps, right, accumulate),
            (_, true) => tile::<ROWS, 4, true>(to, to_step, [columns, depth], left, steps, right, accumulate),
            (1, false) => {
                tile::<ROWS, 1, false>(to, to_step, [columns, depth], left, steps, right, accumulate)
            }
            (2, false) => {
                tile::<ROWS, 2, false>(to, to_step, [columns, depth], left, steps, right, accumulate)
            }
            (3, false) => {
                tile::<ROWS, 3, false>(to, to_step, [columns, depth], left, steps, right, accumulate)
            }
            (_, false) => {
                tile::<ROWS, 4, false>(to, to_step, [columns, depth], left, steps, right, accumulate)
            }
        }
    }
}

/// One tile. `ALONG`: the left side is read along its rows, otherwise across.
///
/// # Safety
/// As for `panel`, with `ROWS` rows and at most `16 * WIDE` columns.
#[target_feature(enable = "avx512f")]
// Counted loops over registers read better than nested iterators.
#[allow(clippy::needless_range_loop)]
unsafe fn tile<const ROWS: usize, const WIDE: usize, const ALONG: bool>(
    to: *mut f32,
    to_step: usize,
    [columns, depth]: [usize; 2],
    left: *const f32,
    steps: Steps,
    right: *const f32,
    accumulate: bool,
) {
    let mut sums = [[_mm512_setzero_ps(); WIDE]; ROWS];
    for d in 0..depth {
        // SAFETY: row `d` of the panel and column `d` of the left side exist, by the caller's contract.
        unsafe {
            let right = right.add(d * PANEL);
            let mut part = [_mm512_setzero_ps(); WIDE];
            for wide in 0..WIDE {
                part[wide] = _mm512_loadu_ps(right.add(wide * 16));
            }
            for row in 0..ROWS {
                let place = if ALONG { row * steps.row + d } else { row + d * steps.depth };
                let number = _mm512_set1_ps(*left.add(place));
                for wide in 0..WIDE {
                    sums[row][wide] = _mm512_fmadd_ps(number, part[wide], sums[row][wide]);
                }
            }
        }
    }
    let last: __mmask16 = 0xffff >> (WIDE * 16 - columns);
    for row in 0..ROWS {
        for wide in 0..WIDE {
            let mask = if wide + 1 == WIDE { last } else { 0xffff };
            // SAFETY: the mask restricts the access to the columns of the row, which belongs to the caller.
            unsafe {
                let to = to.add(row * to_step + wide * 16);
                let mut sum = sums[row][wide];
                if accumulate {
                    sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum);
                }
                _mm512_mask_storeu_ps(to, mask, sum);
            }
        }
    }
}
