//! Losses on the CPU: each row's loss and gradient on any thread, sums in the order of the rows.

use super::affine::for_chunks;
use super::buffer::Parts;
use super::post::add_into;
use super::wide::{exp, wide};
use super::{CpuBackend, CpuMatrix};
use crate::{DeviceError, Labels, NnError, Result, Shape};

wide! {
    /// Softmax cross-entropy of one row: writes the gradient, returns the loss.
    fn softmax_row(logits: &[f32], class: usize, scale: f32, gradient: &mut [f32]) -> f64 {
        let largest = logits.iter().fold(f32::NEG_INFINITY, |largest, x| if *x > largest { *x } else { largest });
        for (gradient, logit) in gradient.iter_mut().zip(logits) {
            *gradient = exp(logit - largest);
        }
        let sum = gradient.iter().fold(0.0f64, |sum, x| sum + *x as f64);
        let factor = scale / sum as f32;
        gradient.iter_mut().for_each(|gradient| *gradient *= factor);
        gradient[class] -= scale;
        sum.ln() - (logits[class] - largest) as f64
    }

    /// Sigmoid cross-entropy of one row; unknown targets are ignored.
    fn sigmoid_row(logits: &[f32], targets: &[f32], scale: f32, gradient: &mut [f32]) -> f64 {
        let mut loss = 0.0;
        for ((gradient, x), target) in gradient.iter_mut().zip(logits).zip(targets) {
            let small = exp(-x.abs());
            let sigmoid = if *x >= 0.0 { 1.0 / (1.0 + small) } else { small / (1.0 + small) };
            let known = !target.is_nan();
            *gradient = if known { (sigmoid - target) * scale } else { 0.0 };
            let positive = if *x <= 0.0 { 0.0 } else { *x };
            loss += if known { (positive - x * target) as f64 + (small as f64).ln_1p() } else { 0.0 };
        }
        loss
    }

    /// Squared error of one row; unknown targets are ignored.
    fn squared_row(logits: &[f32], targets: &[f32], scale: f32, gradient: &mut [f32]) -> f64 {
        let mut loss = 0.0;
        for ((gradient, x), target) in gradient.iter_mut().zip(logits).zip(targets) {
            let known = !target.is_nan();
            let difference = x - target;
            *gradient = if known { 2.0 * difference * scale } else { 0.0 };
            loss += if known { difference as f64 * difference as f64 } else { 0.0 };
        }
        loss
    }
}

impl CpuBackend {
    pub(crate) fn loss_of(
        &self,
        logits: &CpuMatrix,
        rows: &[u32],
        labels: Labels<'_>,
        gradient: &mut CpuMatrix,
    ) -> Result<f64> {
        let columns = logits.columns();
        assert_eq!((gradient.rows(), gradient.columns()), (logits.rows(), columns));
        let counted = counted(rows, labels, columns)?;
        let scale = 1.0 / counted.max(1) as f32;
        let mut own = CpuMatrix::new(&self.pool, rows.len(), columns);
        let mut losses = vec![0.0f64; rows.len()];
        let (own_parts, loss_parts) = (Parts::new(own.values_mut()), Parts::new(&mut losses));
        for_chunks(rows.len(), 64, |first, count| {
            for index in first..first + count {
                // SAFETY: each row has its own part, and both outlive the loop.
                let (to, loss) =
                    unsafe { (own_parts.part(index * columns, columns), loss_parts.part(index, 1)) };
                let logits = logits.row(rows[index] as usize);
                loss[0] = match labels {
                    Labels::Classes(classes) => softmax_row(logits, classes[index] as usize, scale, to),
                    Labels::Binary(targets) => {
                        sigmoid_row(logits, &targets[index * columns..][..columns], scale, to)
                    }
                    Labels::Values(targets) => {
                        squared_row(logits, &targets[index * columns..][..columns], scale, to)
                    }
                };
            }
        });
        gradient.values_mut().fill(0.0);
        for (index, row) in rows.iter().enumerate() {
            let to = &mut gradient.values_mut()[*row as usize * columns..][..columns];
            add_into(to, own.row(index));
        }
        let loss = losses.iter().fold(0.0, |sum, loss| sum + loss) / counted.max(1) as f64;
        if !loss.is_finite() {
            return Err(DeviceError::NotFinite { what: "the loss".to_string(), found: loss }.into());
        }
        Ok(loss)
    }
}

/// Number of values that the mean is over. Also checks the labels.
pub(crate) fn counted(rows: &[u32], labels: Labels<'_>, columns: usize) -> Result<usize> {
    match labels {
        Labels::Classes(classes) => {
            assert_eq!(classes.len(), rows.len(), "a label a row");
            match classes.iter().position(|class| *class as usize >= columns) {
                Some(index) => {
                    Err(NnError::Label { row: rows[index], found: classes[index], last: columns as u32 - 1 })
                }
                None => Ok(rows.len()),
            }
        }
        Labels::Binary(targets) | Labels::Values(targets) => {
            assert_eq!(targets.len(), rows.len() * columns, "a target a number");
            Ok(targets.iter().filter(|target| !target.is_nan()).count())
        }
    }
}
