//! Initial numbers of learned rows: a function of (seed, node, column), so that any part of a table can be made at any
//! time, on any device, in any order.

use esker_types::NodeId;
use esker_types::random::{Key, normal, unit};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// The distribution of initial numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowInit {
    /// Uniform in `[-bound, bound)`.
    Uniform {
        /// The bound.
        bound: f32,
    },
    /// Mean 0, close to normal.
    Normal {
        /// Standard deviation.
        deviation: f32,
    },
}

/// Rows per parallel task.
const ROWS: usize = 256;

/// Writes the initial rows of nodes `first`, `first + 1`, ... Column `c` of node `n` is made from
/// `key.with(n).at(c)`.
pub fn initial_rows(key: Key, init: RowInit, first: u64, columns: usize, rows: &mut [f32]) {
    assert!(columns > 0 && rows.len().is_multiple_of(columns), "whole rows");
    rows.par_chunks_mut(ROWS * columns).enumerate().for_each(|(part, rows)| {
        for (index, row) in rows.chunks_exact_mut(columns).enumerate() {
            initial_row(key.with(first + (part * ROWS + index) as u64), init, row);
        }
    });
}

/// Writes the initial rows of any nodes: the same as [`initial_rows`] writes for them.
pub fn initial_rows_of(key: Key, init: RowInit, nodes: &[NodeId], columns: usize, rows: &mut [f32]) {
    assert_eq!(rows.len(), nodes.len() * columns, "a row a node");
    let pieces = rows.par_chunks_mut(ROWS * columns.max(1)).zip(nodes.par_chunks(ROWS));
    pieces.for_each(|(rows, nodes)| {
        for (node, row) in nodes.iter().zip(rows.chunks_exact_mut(columns.max(1))) {
            initial_row(key.with(node.0), init, row);
        }
    });
}

fn initial_row(key: Key, init: RowInit, row: &mut [f32]) {
    for (column, number) in row.iter_mut().enumerate() {
        let bits = key.at(column as u64);
        *number = match init {
            RowInit::Uniform { bound } => (bound as f64 * (2.0 * unit(bits) - 1.0)) as f32,
            RowInit::Normal { deviation } => deviation * normal(bits),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(init: RowInit, first: u64, count: usize) -> Vec<f32> {
        let mut rows = vec![0.0; count * 7];
        initial_rows(Key::new(3), init, first, 7, &mut rows);
        rows
    }

    #[test]
    fn a_row_does_not_depend_on_the_rows_made_with_it() {
        for init in [RowInit::Uniform { bound: 0.5 }, RowInit::Normal { deviation: 0.1 }] {
            let all = rows(init, 0, 1000);
            for first in [0, 1, 255, 256, 900] {
                assert_eq!(rows(init, first, 30), all[first as usize * 7..][..210]);
                let mut one = vec![0.0; 14];
                initial_rows_of(Key::new(3), init, &[NodeId(first), NodeId(0)], 7, &mut one);
                assert_eq!((&one[..7], &one[7..]), (&all[first as usize * 7..][..7], &all[..7]));
            }
        }
    }

    #[test]
    fn numbers_have_the_bound_and_the_deviation() {
        let uniform = rows(RowInit::Uniform { bound: 0.5 }, 0, 4000);
        assert!(uniform.iter().all(|x| (-0.5..0.5).contains(x)));
        let variance =
            |all: &[f32]| all.iter().map(|x| *x as f64 * *x as f64).sum::<f64>() / all.len() as f64;
        assert!((variance(&uniform) - 1.0 / 12.0).abs() < 2e-3);
        let normal = rows(RowInit::Normal { deviation: 0.1 }, 0, 4000);
        assert!((variance(&normal) - 0.01).abs() < 3e-4);
    }
}
