//! Layer norm and batch norm on the CPU. Row sums use sixteen SIMD lanes, column sums use fixed chunks in f64: neither
//! depends on the threads.

use super::affine::for_chunks;
use super::buffer::Parts;
use super::post::{finish_rows, unfinish_rows};
use super::wide::wide;
use super::{CpuBackend, CpuMatrix};
use crate::{Normalise, NormaliseBackward, Normaliser, Shape};
use rayon::prelude::*;

const UNIT_ROWS: usize = 512;

wide! {
    /// Normalises rows in place; `deviations` gets the reciprocal standard deviation of each.
    fn layer_rows(values: &mut [f32], columns: usize, epsilon: f32, deviations: &mut [f32]) {
        for (row, deviation) in values.chunks_exact_mut(columns).zip(deviations) {
            let mean = lanes(row, row, |x, _| x) / columns as f32;
            let variance = lanes(row, row, |x, _| (x - mean) * (x - mean)) / columns as f32;
            let reciprocal = 1.0 / (variance + epsilon).sqrt();
            row.iter_mut().for_each(|x| *x = (*x - mean) * reciprocal);
            *deviation = reciprocal;
        }
    }

    /// `to = values x scale + shift`.
    fn scale_shift_rows(values: &[f32], columns: usize, scale: &[f32], shift: &[f32], to: &mut [f32]) {
        for (to, row) in to.chunks_exact_mut(columns).zip(values.chunks_exact(columns)) {
            for (((to, x), scale), shift) in to.iter_mut().zip(row).zip(scale).zip(shift) {
                *to = x * scale + shift;
            }
        }
    }

    /// Converts the gradient of the scaled rows into the gradient of the rows before `layer_rows`.
    fn layer_rows_backward(
        gradient: &mut [f32], normalised: &[f32], columns: usize, scale: &[f32], deviations: &[f32],
    ) {
        let rows = gradient.chunks_exact_mut(columns).zip(normalised.chunks_exact(columns)).zip(deviations);
        for ((gradient, normalised), deviation) in rows {
            gradient.iter_mut().zip(scale).for_each(|(gradient, scale)| *gradient *= scale);
            let mean = lanes(gradient, gradient, |g, _| g) / columns as f32;
            let along = lanes(gradient, normalised, |g, x| g * x) / columns as f32;
            for (gradient, x) in gradient.iter_mut().zip(normalised) {
                *gradient = (*gradient - mean - x * along) * deviation;
            }
        }
    }

    /// `values = (values - mean) x reciprocal`, by column.
    fn batch_rows(values: &mut [f32], columns: usize, mean: &[f32], reciprocal: &[f32]) {
        for row in values.chunks_exact_mut(columns) {
            for ((x, mean), reciprocal) in row.iter_mut().zip(mean).zip(reciprocal) {
                *x = (*x - mean) * reciprocal;
            }
        }
    }

    /// Converts the gradient of the scaled columns into that of the input; `factors` has scale x reciprocal deviation.
    fn batch_rows_backward(
        gradient: &mut [f32], normalised: &[f32], columns: usize, factors: &[f32], mean: &[f32], along: &[f32],
    ) {
        for (gradient, normalised) in gradient.chunks_exact_mut(columns).zip(normalised.chunks_exact(columns)) {
            for column in 0..columns {
                gradient[column] =
                    factors[column] * (gradient[column] - mean[column] - normalised[column] * along[column]);
            }
        }
    }

    /// Adds the column sums of `a` to the first half of `sums`, and those of `a x b` to the second half.
    fn column_sums(a: &[f32], b: &[f32], columns: usize, sums: &mut [f64]) {
        let (plain, along) = sums.split_at_mut(columns);
        for (a, b) in a.chunks_exact(columns).zip(b.chunks_exact(columns)) {
            for column in 0..columns {
                plain[column] += a[column] as f64;
                along[column] += a[column] as f64 * b[column] as f64;
            }
        }
    }

    /// Adds the squared distances from the mean.
    fn square_sums(values: &[f32], columns: usize, mean: &[f32], sums: &mut [f64]) {
        for row in values.chunks_exact(columns) {
            for column in 0..columns {
                let distance = (row[column] - mean[column]) as f64;
                sums[column] += distance * distance;
            }
        }
    }
}

/// The sum of a function of two rows, in sixteen SIMD lanes, which are added in order.
#[inline(always)]
fn lanes(a: &[f32], b: &[f32], of: impl Fn(f32, f32) -> f32) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a_whole, a_rest) = a.as_chunks::<16>();
    let (b_whole, b_rest) = b.as_chunks::<16>();
    for (a, b) in a_whole.iter().zip(b_whole) {
        for lane in 0..16 {
            sums[lane] += of(a[lane], b[lane]);
        }
    }
    for (lane, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[lane] += of(*a, *b);
    }
    sums.iter().fold(0.0, |sum, lane| sum + lane)
}

/// Sums by fixed chunks of rows, combined in order. `work` adds a chunk to its sums.
fn chunked_sums(rows: usize, width: usize, work: impl Fn(usize, usize, &mut [f64]) + Sync) -> Vec<f64> {
    // Few chunks, so that their sums are small compared to the matrix.
    let unit = rows.div_ceil(64).max(UNIT_ROWS);
    let partials: Vec<Vec<f64>> = (0..rows.div_ceil(unit))
        .into_par_iter()
        .map(|chunk| {
            let mut sums = vec![0.0; width];
            work(chunk * unit, unit.min(rows - chunk * unit), &mut sums);
            sums
        })
        .collect();
    let mut total = vec![0.0; width];
    for partial in partials {
        total.iter_mut().zip(partial).for_each(|(total, partial)| *total += partial);
    }
    total
}

impl CpuBackend {
    pub(crate) fn normalise_forward(
        &self,
        call: Normalise<'_, CpuBackend>,
        values: &mut CpuMatrix,
        output: &mut CpuMatrix,
    ) -> CpuMatrix {
        let (rows, columns) = (values.rows(), values.columns());
        assert_eq!((rows, columns), (output.rows(), output.columns()));
        assert!(call.scale.columns() == columns && call.shift.columns() == columns);
        let by_column = match call.by {
            Normaliser::Layer => None,
            Normaliser::Batch { running_mean, running_variance, momentum } => {
                let (mean, variance) = batch_statistics(values);
                let unbias = rows as f32 / rows.saturating_sub(1).max(1) as f32;
                for column in 0..columns {
                    let running = &mut running_mean.values_mut()[column];
                    *running += momentum * (mean[column] - *running);
                    let running = &mut running_variance.values_mut()[column];
                    *running += momentum * (variance[column] * unbias - *running);
                }
                Some((mean, reciprocals(&variance, call.epsilon)))
            }
            Normaliser::Running { running_mean, running_variance } => {
                Some((running_mean.values().to_vec(), reciprocals(running_variance.values(), call.epsilon)))
            }
        };
        let mut deviations = match &by_column {
            None => CpuMatrix::new(&self.pool, rows, 1),
            Some((_, reciprocals)) => {
                let mut deviations = CpuMatrix::new(&self.pool, 1, columns);
                deviations.values_mut().copy_from_slice(reciprocals);
                deviations
            }
        };
        let (from, to) = (Parts::new(values.values_mut()), Parts::new(output.values_mut()));
        let by_row = Parts::new(deviations.values_mut());
        for_chunks(rows, UNIT_ROWS, |first, count| {
            let place = (first * columns, count * columns);
            // SAFETY: chunks do not overlap, and the matrices are borrowed until all are done.
            let (from, to) = unsafe { (from.part(place.0, place.1), to.part(place.0, place.1)) };
            match &by_column {
                // SAFETY: as above.
                None => layer_rows(from, columns, call.epsilon, unsafe { by_row.part(first, count) }),
                Some((mean, reciprocals)) => batch_rows(from, columns, mean, reciprocals),
            }
            scale_shift_rows(from, columns, call.scale.values(), call.shift.values(), to);
            finish_rows(to, columns, first, None, None, call.post);
        });
        deviations
    }

    pub(crate) fn normalise_back(&self, call: NormaliseBackward<'_, CpuBackend>, gradient: &mut CpuMatrix) {
        let (rows, columns) = (gradient.rows(), gradient.columns());
        let (normalised, output) = (call.normalised.values(), call.output.values());
        assert_eq!((normalised.len(), output.len()), (rows * columns, rows * columns));
        let parts = Parts::new(gradient.values_mut());
        // SAFETY: chunks of `chunked_sums` and `for_chunks` do not overlap; `gradient` is borrowed throughout.
        let part = |first: usize, count: usize| unsafe { parts.part(first * columns, count * columns) };
        let sums = chunked_sums(rows, 2 * columns, |first, count, sums| {
            let range = first * columns..(first + count) * columns;
            let gradient = part(first, count);
            unfinish_rows(gradient, &output[range.clone()], columns, first, call.post);
            column_sums(gradient, &normalised[range], columns, sums);
        });
        let (plain, along) = sums.split_at(columns);
        let set = |matrix: &mut CpuMatrix, sums: &[f64]| {
            matrix.values_mut().iter_mut().zip(sums).for_each(|(to, sum)| *to = *sum as f32);
        };
        set(call.shift_gradient, plain);
        set(call.scale_gradient, along);
        let (scale, deviations) = (call.scale.values(), call.deviations.values());
        let mean_of = |sums: &[f64]| sums.iter().map(|sum| (sum / rows as f64) as f32).collect::<Vec<_>>();
        let (mean, along) = (mean_of(plain), mean_of(along));
        let factors: Vec<f32> =
            if call.by_row { Vec::new() } else { scale.iter().zip(deviations).map(|(s, d)| s * d).collect() };
        for_chunks(rows, UNIT_ROWS, |first, count| {
            let normalised = &normalised[first * columns..][..count * columns];
            let gradient = part(first, count);
            if call.by_row {
                layer_rows_backward(gradient, normalised, columns, scale, &deviations[first..][..count]);
            } else {
                batch_rows_backward(gradient, normalised, columns, &factors, &mean, &along);
            }
        });
    }
}

fn reciprocals(variance: &[f32], epsilon: f32) -> Vec<f32> {
    variance.iter().map(|variance| 1.0 / (variance + epsilon).sqrt()).collect()
}

/// Mean and (biased) variance of each column.
fn batch_statistics(values: &CpuMatrix) -> (Vec<f32>, Vec<f32>) {
    let (rows, columns) = (values.rows(), values.columns());
    let numbers = values.values();
    let part = |first: usize, count: usize| &numbers[first * columns..][..count * columns];
    let sums = chunked_sums(rows, 2 * columns, |first, count, sums| {
        column_sums(part(first, count), part(first, count), columns, sums)
    });
    let mean: Vec<f32> = sums[..columns].iter().map(|sum| (sum / rows as f64) as f32).collect();
    let squares = chunked_sums(rows, columns, |first, count, sums| {
        square_sums(part(first, count), columns, &mean, sums)
    });
    (mean, squares.iter().map(|sum| (sum / rows as f64) as f32).collect())
}
