//! The native half of the Python package `esker`; the other half is `python/esker/`, which users see.
//!
//! It knows tensors only as memory ([`dlpack`]), takes and gives plain values otherwise, and releases the interpreter lock
//! while it works. What a PyG loader is, is Python's to know.

mod csc;
mod dlpack;
mod engine;
mod error;
mod hops;
mod rows;

use pyo3::prelude::*;

/// The native half of `esker`.
#[pymodule]
fn _esker(module: &Bound<'_, PyModule>) -> PyResult<()> {
    esker_io::use_few_heaps();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    csc::register(module)?;
    engine::register(module)?;
    hops::register(module)?;
    rows::register(module)
}
