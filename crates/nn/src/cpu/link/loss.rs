//! Losses of one edge: the score of the edge and a row of scores of its negatives, which becomes their gradient.
//! A masked negative has the score minus infinity, and its gradient is 0. Sums run in 64 lanes that are added in order.

use crate::LinkLoss;
use crate::cpu::wide::{exp, wide};

/// Sums and maxima run in this many lanes.
const LANES: usize = 64;

/// Loss of an edge, and the gradient of its own score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct EdgeLoss {
    pub loss: f64,
    pub own_gradient: f32,
}

/// The loss of an edge times `scale`. `negatives` is the number of scores that are not masked.
pub(super) fn edge_loss(
    loss: LinkLoss,
    scale: f32,
    own: f32,
    negatives: usize,
    scores: &mut [f32],
) -> EdgeLoss {
    let share = if negatives == 0 { 0.0 } else { 1.0 / negatives as f32 };
    match loss {
        LinkLoss::Softmax => softmax(scale, own, scores),
        LinkLoss::Logistic => {
            let (of_own, sigmoid) = softplus(-own);
            let sum = logistic(scale * share, scores);
            let loss = (of_own as f64 + sum * share as f64) * scale as f64;
            EdgeLoss { loss, own_gradient: -scale * sigmoid }
        }
        LinkLoss::Margin { margin } => {
            let (sum, above) = hinge(scale * share, margin - own, scores);
            let own_gradient = -(above as f32) * (scale * share);
            EdgeLoss { loss: sum * share as f64 * scale as f64, own_gradient }
        }
        LinkLoss::SelfAdversarial { margin, temperature } => {
            let (of_own, sigmoid) = softplus(-margin - own);
            let sum = self_adversarial(0.5 * scale, margin, temperature, scores);
            let loss = (of_own as f64 + sum) * 0.5 * scale as f64;
            EdgeLoss { loss, own_gradient: -0.5 * scale * sigmoid }
        }
    }
}

/// `log(1 + t)` for t from 0 to 1, within two units in the last place: the series of the inverse hyperbolic tangent at
/// t / (2 + t), which is at most a third.
#[inline(always)]
fn log_1p(t: f32) -> f32 {
    let s = t / (2.0 + t);
    let square = s * s;
    let mut p = 1.0 / 15.0f32;
    p = p * square + 1.0 / 13.0;
    p = p * square + 1.0 / 11.0;
    p = p * square + 1.0 / 9.0;
    p = p * square + 1.0 / 7.0;
    p = p * square + 1.0 / 5.0;
    p = p * square + 1.0 / 3.0;
    2.0 * s + 2.0 * s * square * p
}

/// `log(1 + exp(x))` and its derivative.
#[inline(always)]
fn softplus(x: f32) -> (f32, f32) {
    let small = exp(-x.abs());
    let reciprocal = 1.0 / (1.0 + small);
    let above = if x > 0.0 { x } else { 0.0 };
    // NaN stays NaN.
    let above = if x.is_nan() { x } else { above };
    (above + log_1p(small), if x >= 0.0 { reciprocal } else { small * reciprocal })
}

/// Calls `each` for every number with its lane.
#[inline(always)]
fn in_lanes(scores: &mut [f32], mut each: impl FnMut(usize, &mut f32)) {
    let mut chunks = scores.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (lane, score) in chunk.iter_mut().enumerate() {
            each(lane, score);
        }
    }
    chunks.into_remainder().iter_mut().enumerate().for_each(|(lane, score)| each(lane, score));
}

#[inline(always)]
fn sum(lanes: [f32; LANES]) -> f64 {
    lanes.iter().fold(0.0, |sum, lane| sum + *lane as f64)
}

#[inline(always)]
fn largest(scores: &mut [f32], at_least: f32) -> f32 {
    let mut lanes = [at_least; LANES];
    in_lanes(scores, |lane, score| lanes[lane] = if *score > lanes[lane] { *score } else { lanes[lane] });
    lanes.iter().fold(at_least, |most, lane| if *lane > most { *lane } else { most })
}

wide! {
    fn softmax(scale: f32, own: f32, scores: &mut [f32]) -> EdgeLoss {
        let most = largest(scores, own);
        let mut lanes = [0.0f32; LANES];
        in_lanes(scores, |lane, score| {
            *score = exp(*score - most);
            lanes[lane] += *score;
        });
        let of_own = exp(own - most);
        let sum = sum(lanes) + of_own as f64;
        let factor = (scale as f64 / sum) as f32;
        scores.iter_mut().for_each(|score| *score *= factor);
        let loss = (sum.ln() - (own - most) as f64) * scale as f64;
        // 1 - p without cancellation where p is close to 1.
        EdgeLoss { loss, own_gradient: -((scale as f64) * (sum - of_own as f64) / sum) as f32 }
    }

    fn logistic(factor: f32, scores: &mut [f32]) -> f64 {
        let mut lanes = [0.0f32; LANES];
        in_lanes(scores, |lane, score| {
            let (loss, slope) = softplus(*score);
            lanes[lane] += loss;
            *score = factor * slope;
        });
        sum(lanes)
    }

    /// The sum, and how many are above 0.
    fn hinge(factor: f32, base: f32, scores: &mut [f32]) -> (f64, f64) {
        let (mut lanes, mut above) = ([0.0f32; LANES], [0.0f32; LANES]);
        in_lanes(scores, |lane, score| {
            let distance = base + *score;
            let active = distance > 0.0;
            // NaN counts in the sum, so that it is seen.
            lanes[lane] += if distance <= 0.0 { 0.0 } else { distance };
            above[lane] += if active { 1.0 } else { 0.0 };
            *score = if active { factor } else { 0.0 };
        });
        (sum(lanes), sum(above))
    }

    fn self_adversarial(factor: f32, margin: f32, temperature: f32, scores: &mut [f32]) -> f64 {
        let most = largest(scores, f32::NEG_INFINITY);
        let weight = |score: f32| {
            let weight = exp(temperature * (score - most));
            if score == f32::NEG_INFINITY { 0.0 } else { weight }
        };
        let mut lanes = [0.0f32; LANES];
        in_lanes(scores, |lane, score| lanes[lane] += weight(*score));
        let total = sum(lanes);
        let share = if total == 0.0 { 0.0 } else { (1.0 / total) as f32 };
        let mut lanes = [0.0f32; LANES];
        // One exponential per loop: a loop with both is not vectorised.
        for chunk in scores.chunks_mut(LANES) {
            let mut weights = [0.0f32; LANES];
            for (to, score) in weights.iter_mut().zip(chunk.iter()) {
                *to = weight(*score) * share;
            }
            for ((score, weight), lane) in chunk.iter_mut().zip(&weights).zip(&mut lanes) {
                let (loss, slope) = softplus(margin + *score);
                *lane += weight * loss;
                *score = factor * weight * slope;
            }
        }
        sum(lanes)
    }
}
