//! Optimizer steps on the CPU, by PyTorch's formulas.

use super::CpuMatrix;
use super::affine::for_chunks;
use super::buffer::Parts;
use super::wide::wide;
use crate::{Rule, Shape, Update};

const UNIT: usize = 16 << 10;

wide! {
    fn sgd(update: &Update, scale: f32, momentum: f32, nesterov: bool, value: &mut [f32], gradient: &[f32], past: &mut [f32]) {
        for index in 0..value.len() {
            let gradient = prepared(update, scale, gradient[index], value[index]);
            let moved = if past.is_empty() {
                gradient
            } else {
                past[index] = momentum * past[index] + gradient;
                if nesterov { gradient + momentum * past[index] } else { past[index] }
            };
            value[index] = value[index] * update.shrink - update.rate * moved;
        }
    }

    fn adam(
        update: &Update, scale: f32, betas: [f32; 2], epsilon: f32, corrections: [f32; 2], value: &mut [f32], gradient: &[f32],
        first: &mut [f32], second: &mut [f32],
    ) {
        let rate = update.rate / corrections[0];
        let reciprocal = 1.0 / corrections[1];
        let numbers = value.iter_mut().zip(gradient).zip(first).zip(second);
        for (((value, gradient), first), second) in numbers {
            let gradient = prepared(update, scale, *gradient, *value);
            *first += (1.0 - betas[0]) * (gradient - *first);
            *second = betas[1] * *second + (1.0 - betas[1]) * gradient * gradient;
            let denominator = second.sqrt() * reciprocal + epsilon;
            *value = *value * update.shrink - rate * (*first / denominator);
        }
    }

    fn adagrad(update: &Update, scale: f32, epsilon: f32, value: &mut [f32], gradient: &[f32], sum: &mut [f32]) {
        for ((value, gradient), sum) in value.iter_mut().zip(gradient).zip(sum) {
            let gradient = prepared(update, scale, *gradient, *value);
            *sum += gradient * gradient;
            *value = *value * update.shrink - update.rate * (gradient / (sum.sqrt() + epsilon));
        }
    }
}

/// The gradient after clipping and weight decay.
#[inline(always)]
fn prepared(update: &Update, scale: f32, gradient: f32, value: f32) -> f32 {
    let (scaled, limit) = (gradient * scale, update.gradient_limit);
    let low = if scaled < -limit { -limit } else { scaled };
    let cut = if low > limit { limit } else { low };
    cut + update.weight_decay * value
}

/// Updates a parameter with its gradient times `scale`.
pub(crate) fn update(
    update: &Update,
    scale: f32,
    value: &mut CpuMatrix,
    gradient: &CpuMatrix,
    state: &mut [CpuMatrix],
) {
    let count = value.values().len();
    assert_eq!((value.rows(), value.columns()), (gradient.rows(), gradient.columns()));
    assert!(state.iter().all(|state| state.values().len() == count), "state of the parameter's shape");
    let value = Parts::new(value.values_mut());
    let state: Vec<Parts<f32>> = state.iter_mut().map(|state| Parts::new(state.values_mut())).collect();
    for_chunks(count, UNIT, |first, count| {
        // SAFETY: chunks do not overlap, and the matrices are borrowed until all are done.
        let value = unsafe { value.part(first, count) };
        let gradient = &gradient.values()[first..][..count];
        // SAFETY: as above; each state is another matrix.
        let state = state.iter().map(|state| unsafe { state.part(first, count) });
        update_numbers(update, scale, value, gradient, state);
    });
}

/// Updates some numbers of a parameter.
pub(super) fn update_numbers<'a>(
    update: &Update,
    scale: f32,
    value: &mut [f32],
    gradient: &[f32],
    mut state: impl Iterator<Item = &'a mut [f32]>,
) {
    match update.rule {
        Rule::Sgd { momentum, nesterov } => {
            sgd(update, scale, momentum, nesterov, value, gradient, state.next().unwrap_or_default())
        }
        Rule::Adam { beta1, beta2, epsilon, correction1, correction2_root } => {
            let (Some(one), Some(two)) = (state.next(), state.next()) else { panic!("Adam has two states") };
            let corrections = [correction1, correction2_root];
            adam(update, scale, [beta1, beta2], epsilon, corrections, value, gradient, one, two)
        }
        Rule::Adagrad { epsilon } => {
            let Some(sum) = state.next() else { panic!("Adagrad has a state") };
            adagrad(update, scale, epsilon, value, gradient, sum)
        }
    }
}
