//! Bias, residual, activation and dropout over rows that are still in the cache.

use super::wide::{exp, wide};
use crate::post::LEAKY_SLOPE;
use crate::{Activation, Dropout, Post};

wide! {
    /// `values = post(values + bias + add)` for rows that start at `first_row` of the whole matrix.
    pub(crate) fn finish_rows(
        values: &mut [f32], columns: usize, first_row: usize, bias: Option<&[f32]>, add: Option<&[f32]>, post: Post,
    ) {
        for (index, row) in values.chunks_exact_mut(columns).enumerate() {
            if let Some(bias) = bias {
                row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
            if let Some(add) = add {
                let add = &add[index * columns..][..columns];
                row.iter_mut().zip(add).for_each(|(value, add)| *value += add);
            }
            activate(row, post.activation);
            if let Some(dropout) = post.dropout {
                drop_row(row, first_row + index, dropout);
            }
        }
    }

    /// Converts the gradient of the output of `finish_rows` into the gradient of its input.
    pub(crate) fn unfinish_rows(
        gradient: &mut [f32], output: &[f32], columns: usize, first_row: usize, post: Post,
    ) {
        let scale = post.dropout.map_or(1.0, |dropout| dropout.scale);
        let rows = gradient.chunks_exact_mut(columns).zip(output.chunks_exact(columns));
        for (index, (gradient, output)) in rows.enumerate() {
            if post.activation == Activation::Relu {
                // Numbers that dropout or ReLU set to 0 are 0 in the output: one comparison handles both.
                for (gradient, output) in gradient.iter_mut().zip(output) {
                    *gradient = if *output > 0.0 { *gradient * scale } else { 0.0 };
                }
                continue;
            }
            if let Some(dropout) = post.dropout {
                drop_row(gradient, first_row + index, dropout);
            }
            deactivate(gradient, output, post.activation, scale);
        }
    }

    /// Adds each row to `sums`, in order.
    pub(crate) fn add_rows(values: &[f32], columns: usize, sums: &mut [f32]) {
        for row in values.chunks_exact(columns) {
            sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        }
    }

    /// `to += from`.
    pub(crate) fn add_into(to: &mut [f32], from: &[f32]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
    }
}

#[inline(always)]
fn activate(row: &mut [f32], activation: Activation) {
    // Comparisons are written so that NaN passes through and reaches the loss.
    match activation {
        Activation::Identity => {}
        Activation::Relu => row.iter_mut().for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x }),
        Activation::Elu => row.iter_mut().for_each(|x| {
            let below = exp(*x) - 1.0;
            *x = if *x <= 0.0 { below } else { *x };
        }),
        Activation::LeakyRelu => {
            row.iter_mut().for_each(|x| *x = if *x < 0.0 { *x * LEAKY_SLOPE } else { *x })
        }
    }
}

/// Multiplies by the derivative, computed from the output. `scale` is dropout's factor of the output. If dropout made
/// the output 0, the gradient is already 0.
#[inline(always)]
fn deactivate(gradient: &mut [f32], output: &[f32], activation: Activation, scale: f32) {
    let unscale = 1.0 / scale;
    let pairs = gradient.iter_mut().zip(output);
    match activation {
        Activation::Identity | Activation::Relu => {}
        Activation::Elu => pairs.for_each(|(gradient, output)| {
            *gradient *= if *output > 0.0 { 1.0 } else { *output * unscale + 1.0 };
        }),
        Activation::LeakyRelu => {
            pairs.for_each(|(gradient, output)| *gradient *= if *output > 0.0 { 1.0 } else { LEAKY_SLOPE })
        }
    }
}

#[inline(always)]
fn drop_row(row: &mut [f32], index: usize, dropout: Dropout) {
    let columns = row.len();
    let tiles = columns.div_ceil(32);
    let threshold = dropout.threshold as u64;
    let (whole, rest) = row.as_chunks_mut::<32>();
    for (tile, numbers) in whole.iter_mut().enumerate() {
        let first = ((index * tiles + tile) * 8) as u64;
        let bits: [u64; 8] = std::array::from_fn(|k| dropout.key.at(first + k as u64));
        for lane in 0..4 {
            for k in 0..8 {
                let dropped = (bits[k] >> (16 * lane)) & 0xffff < threshold;
                numbers[lane * 8 + k] = if dropped { 0.0 } else { numbers[lane * 8 + k] * dropout.scale };
            }
        }
    }
    let done = columns - rest.len();
    for (offset, number) in rest.iter_mut().enumerate() {
        let factor = dropout.factor(index, done + offset, columns);
        *number = if factor == 0.0 { 0.0 } else { *number * factor };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use esker_types::random::Key;

    #[test]
    fn dropout_drops_what_its_definition_says_and_about_as_much() {
        let dropout = Dropout::new(0.3, Key::new(5)).unwrap();
        for columns in [1, 8, 31, 32, 33, 100] {
            let mut values = vec![1.0; 500 * columns];
            let post = Post { activation: Activation::Identity, dropout: Some(dropout) };
            finish_rows(&mut values, columns, 7, None, None, post);
            for (index, value) in values.iter().enumerate() {
                assert_eq!(*value, dropout.factor(7 + index / columns, index % columns, columns));
            }
            let kept = values.iter().filter(|value| **value > 0.0).count() as f64 / values.len() as f64;
            assert!((kept - 0.7).abs() < 0.06, "{kept} of {columns} columns");
        }
        assert_eq!(Dropout::new(0.0, Key::new(5)), None);
    }
}
