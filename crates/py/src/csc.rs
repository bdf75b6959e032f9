//! The adjacency that samplers read, of the edges that a PyG graph holds: a counting sort by target, which keeps the order of
//! edges. torch's general sort, with the gathers after it, takes several times as long.

use crate::dlpack::{Borrowed, Column, TensorElement};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Sources by target and their offsets, as numbers of this width, and the edge of each entry.
struct IncomingArrays<I> {
    offsets: Vec<I>,
    sources: Vec<I>,
    edges: Vec<i64>,
}

/// An id that a tensor holds, in either width.
trait TensorId: TensorElement + Into<i64> + Default {
    /// An id, or a number of edges, which fits since ids of this width number the edges too.
    fn of(number: usize) -> Self;
}

impl TensorId for i32 {
    fn of(number: usize) -> i32 {
        number as i32
    }
}

impl TensorId for i64 {
    fn of(number: usize) -> i64 {
        number as i64
    }
}

fn sort_by_target<I: TensorId>(row: &[I], col: &[I], nodes: usize) -> PyResult<IncomingArrays<I>> {
    if row.len() != col.len() {
        return Err(PyValueError::new_err(format!(
            "edge_index: expected as many targets as sources, found {} and {}",
            col.len(),
            row.len()
        )));
    }
    if size_of::<I>() == 4 && row.len() > i32::MAX as usize {
        return Err(PyValueError::new_err(format!(
            "edge_index: {} edges cannot be numbered by 32-bit ids; convert it to int64",
            row.len()
        )));
    }
    let mut next = vec![0usize; nodes + 1];
    for (edge, target) in col.iter().enumerate() {
        let target: i64 = (*target).into();
        let slot = usize::try_from(target).ok().filter(|target| *target < nodes);
        let slot = slot.ok_or_else(|| {
            PyValueError::new_err(format!(
                "edge_index: expected node ids from 0 to {}, found {target} as target of edge {edge}; set data.num_nodes, or \
                 check the edges",
                nodes as i64 - 1
            ))
        })?;
        next[slot + 1] += 1;
    }
    for node in 0..nodes {
        next[node + 1] += next[node];
    }
    let offsets = next.iter().map(|offset| I::of(*offset)).collect();
    let (mut sources, mut edges) = (vec![I::default(); row.len()], vec![0i64; row.len()]);
    for (edge, (source, target)) in row.iter().zip(col).enumerate() {
        let target: i64 = (*target).into();
        let entry = next[target as usize];
        next[target as usize] += 1;
        (sources[entry], edges[entry]) = (*source, edge as i64);
    }
    Ok(IncomingArrays { offsets, sources, edges })
}

/// Sorts edges by target, stably: returns `colptr`, `row` and `perm`, as PyG's `to_csc` does.
#[pyfunction]
fn csc(
    py: Python<'_>,
    row: &Bound<'_, PyAny>,
    col: &Bound<'_, PyAny>,
    nodes: usize,
) -> PyResult<(Column, Column, Column)> {
    fn columns<I: TensorId>(
        row: &Borrowed,
        col: &Borrowed,
        nodes: usize,
    ) -> PyResult<(Column, Column, Column)> {
        let arrays = sort_by_target::<I>(row.slice()?, col.slice()?, nodes)?;
        Ok((Column::flat(arrays.offsets), Column::flat(arrays.sources), Column::flat(arrays.edges)))
    }
    let (row, col) = (Borrowed::take(row, "edge_index")?, Borrowed::take(col, "edge_index")?);
    py.detach(|| match row.is::<i32>() {
        true => columns::<i32>(&row, &col, nodes),
        false => columns::<i64>(&row, &col, nodes),
    })
}

/// Adds what this file offers.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(csc, module)?)
}
