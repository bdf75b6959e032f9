//! x
mod engine;

use pyo3::prelude::*;

/// The native half of `esker`.
#[pymodule]
fn _esker(module: &Bound<'_, PyModule>) -> PyResult<()> {
    engine::add(module)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
