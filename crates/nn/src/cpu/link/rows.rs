//! Learned rows on the CPU: gradients of a repeated row are summed in a fixed order, and only touched rows move.

use crate::cpu::CpuMatrix;
use crate::cpu::affine::for_chunks;
use crate::cpu::buffer::Parts;
use crate::cpu::post::add_into;
use crate::cpu::update::update_numbers;
use crate::cpu::wide::wide;
use crate::{MOST_PARTS, PenaltyKind, Shape, Update};

/// Rows per parallel task.
const ROWS: usize = 64;

pub(super) fn sum(parts: &[&CpuMatrix], offsets: &[u32], members: &[u32], to: &mut CpuMatrix) {
    let columns = to.columns();
    assert!(parts.len() <= MOST_PARTS && parts.iter().all(|part| part.columns() == columns));
    assert!(offsets.len() == to.rows() + 1 && offsets.is_sorted());
    assert!(offsets[to.rows()] as usize <= members.len());
    let row = |member: u32| {
        let mut index = member as usize;
        for part in parts {
            if index < part.rows() {
                return part.row(index);
            }
            index -= part.rows();
        }
        panic!("member {member} is beyond all parts")
    };
    let rows = to.rows();
    let to = Parts::new(to.values_mut());
    for_chunks(rows, ROWS, |first, count| {
        for index in first..first + count {
            // SAFETY: each row is its own part, and the matrix outlives the loop.
            let to = unsafe { to.part(index * columns, columns) };
            match &members[offsets[index] as usize..offsets[index + 1] as usize] {
                [] => to.fill(0.0),
                [one, others @ ..] => {
                    to.copy_from_slice(row(*one));
                    others.iter().for_each(|member| add_into(to, row(*member)));
                }
            }
        }
    });
}

pub(super) fn update(
    update: &Update,
    rows: &[u32],
    gradient: &CpuMatrix,
    value: &mut CpuMatrix,
    state: &mut [CpuMatrix],
) {
    let columns = value.columns();
    assert_eq!((gradient.rows(), gradient.columns()), (rows.len(), columns));
    let shape = (value.rows(), columns);
    assert!(state.iter().all(|state| (state.rows(), state.columns()) == shape), "state of the table's shape");
    let order = ascending(rows);
    let table = Parts::new(value.values_mut());
    let state: Vec<Parts<f32>> = state.iter_mut().map(|state| Parts::new(state.values_mut())).collect();
    for_chunks(rows.len(), ROWS, |first, count| {
        for at in first..first + count {
            let (row, from) = order_at(&order, rows, at);
            // SAFETY: rows ascend strictly, so no two tasks have the same one; tables outlive the loop.
            let value = unsafe { table.part(row * columns, columns) };
            // SAFETY: as above; each state is another matrix.
            let state = state.iter().map(|state| unsafe { state.part(row * columns, columns) });
            update_numbers(update, 1.0, value, gradient.row(from), state);
        }
    });
}

/// Rows and their positions, in ascending order; empty if they ascend already. Asserts that none occurs twice.
fn ascending(rows: &[u32]) -> Vec<(u32, u32)> {
    if rows.windows(2).all(|pair| pair[0] < pair[1]) {
        return Vec::new();
    }
    let mut order: Vec<(u32, u32)> = rows.iter().copied().zip(0..).collect();
    order.sort_unstable();
    assert!(order.windows(2).all(|pair| pair[0].0 < pair[1].0), "rows do not repeat");
    order
}

fn order_at(order: &[(u32, u32)], rows: &[u32], at: usize) -> (usize, usize) {
    match order.get(at) {
        Some((row, from)) => (*row as usize, *from as usize),
        None => (rows[at] as usize, at),
    }
}

wide! {
    fn squares(weight: f32, row: &[f32], gradient: &mut [f32]) -> f64 {
        let mut sum = 0.0;
        for (gradient, x) in gradient.iter_mut().zip(row) {
            *gradient += 2.0 * weight * x;
            sum += *x as f64 * *x as f64;
        }
        sum
    }

    fn cubes(weight: f32, row: &[f32], gradient: &mut [f32]) -> f64 {
        let mut sum = 0.0;
        for (gradient, x) in gradient.iter_mut().zip(row) {
            *gradient += 3.0 * weight * x * x.abs();
            sum += (*x as f64 * *x as f64) * x.abs() as f64;
        }
        sum
    }

    fn complex_cubes(weight: f32, row: &[f32], gradient: &mut [f32]) -> f64 {
        let half = row.len() / 2;
        let (g_re, g_im) = gradient.split_at_mut(half);
        let (re, im) = row.split_at(half);
        let mut sum = 0.0;
        for at in 0..half {
            let modulus = (re[at] * re[at] + im[at] * im[at]).sqrt();
            g_re[at] += 3.0 * weight * modulus * re[at];
            g_im[at] += 3.0 * weight * modulus * im[at];
            sum += (modulus as f64 * modulus as f64) * modulus as f64;
        }
        sum
    }
}

pub(super) fn penalty(kind: PenaltyKind, weights: &[f32], rows: &CpuMatrix, gradient: &mut CpuMatrix) -> f64 {
    let columns = rows.columns();
    assert_eq!((gradient.rows(), gradient.columns()), (rows.rows(), columns));
    assert_eq!(weights.len(), rows.rows(), "a weight a row");
    assert!(kind != PenaltyKind::ComplexN3 || columns.is_multiple_of(2), "complex numbers have two columns");
    let mut sums = vec![0.0f64; weights.len()];
    let (parts, sum_parts) = (Parts::new(gradient.values_mut()), Parts::new(&mut sums));
    for_chunks(weights.len(), ROWS, |first, count| {
        for (index, weight) in (first..).zip(&weights[first..first + count]) {
            // SAFETY: each row has its own parts, and both outlive the loop.
            let (to, sum) = unsafe { (parts.part(index * columns, columns), sum_parts.part(index, 1)) };
            let (weight, row) = (*weight, rows.row(index));
            let found = match kind {
                PenaltyKind::L2 => squares(weight, row, to),
                PenaltyKind::N3 => cubes(weight, row, to),
                PenaltyKind::ComplexN3 => complex_cubes(weight, row, to),
            };
            sum[0] = weight as f64 * found;
        }
    });
    sums.iter().fold(0.0, |sum, part| sum + part)
}
