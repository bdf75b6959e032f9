//! Arrays that cross to NumPy and back without a copy.

use esker_train::BatchValues;
use esker_types::Dtype;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Numbers that Rust owns. `numpy.asarray` shares their memory, and keeps them as long as it needs them.
#[pyclass(frozen, module = "esker._esker")]
pub struct NumpyArray {
    values: ArrayValues,
    shape: Vec<usize>,
}

/// The memory of an array.
enum ArrayValues {
    Rows(BatchValues),
    Floats(Vec<f32>),
    Integers(Vec<i64>),
    Stored(Vec<u8>, Dtype),
}

impl NumpyArray {
    /// Feature rows of a batch.
    pub fn rows(rows: BatchValues) -> NumpyArray {
        let shape = vec![rows.len() / rows.dim.max(1), rows.dim];
        NumpyArray { values: ArrayValues::Rows(rows), shape }
    }

    /// Rows of f32.
    pub fn floats(values: Vec<f32>, shape: Vec<usize>) -> NumpyArray {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        NumpyArray { values: ArrayValues::Floats(values), shape }
    }

    /// Ids.
    pub fn integers(values: Vec<i64>, shape: Vec<usize>) -> NumpyArray {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        NumpyArray { values: ArrayValues::Integers(values), shape }
    }

    /// Rows of `width` numbers as a dataset stores them.
    pub fn stored(bytes: Vec<u8>, dtype: Dtype, width: usize) -> NumpyArray {
        let rows = bytes.len() / (width.max(1) * dtype.bytes() as usize);
        let shape = if width == 1 { vec![rows] } else { vec![rows, width] };
        NumpyArray { values: ArrayValues::Stored(bytes, dtype), shape }
    }
}

#[pymethods]
impl NumpyArray {
    /// NumPy's array interface, version 3.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (address, kind) = match &self.values {
            ArrayValues::Rows(rows) => (rows.as_ptr() as usize, "<f4"),
            ArrayValues::Floats(values) => (values.as_ptr() as usize, "<f4"),
            ArrayValues::Integers(values) => (values.as_ptr() as usize, "<i8"),
            ArrayValues::Stored(bytes, dtype) => (bytes.as_ptr() as usize, kind_of(*dtype)),
        };
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", pyo3::types::PyTuple::new(py, &self.shape)?)?;
        interface.set_item("typestr", kind)?;
        // Nobody else reads or writes it: the batch belongs to the caller.
        interface.set_item("data", (address, false))?;
        Ok(interface)
    }

    /// The stored dtype, for those that NumPy lacks.
    #[getter]
    fn dtype(&self) -> &'static str {
        match &self.values {
            ArrayValues::Rows(_) | ArrayValues::Floats(_) => "f32",
            ArrayValues::Integers(_) => "i64",
            ArrayValues::Stored(_, dtype) => dtype.name(),
        }
    }
}

/// A dtype as NumPy writes it. It has no bf16: those numbers are shown by their bits.
fn kind_of(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::U8 => "|u1",
        Dtype::I8 => "|i1",
        Dtype::F16 => "<f2",
        Dtype::Bf16 => "<u2",
        Dtype::U32 => "<u4",
        Dtype::I32 => "<i4",
        Dtype::F32 => "<f4",
        Dtype::U64 => "<u8",
        Dtype::I64 => "<i8",
    }
}

/// Copies a contiguous array of 64-bit integers out of Python.
pub fn integers(array: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let interface = array.getattr("__array_interface__")?;
    let kind: String = interface.get_item("typestr")?.extract()?;
    let shape: Vec<usize> = interface.get_item("shape")?.extract()?;
    let (address, _): (usize, bool) = interface.get_item("data")?.extract()?;
    let strided = interface.get_item("strides").is_ok_and(|strides| !strides.is_none());
    if kind != "<i8" || shape.len() != 1 || strided {
        return Err(PyTypeError::new_err(format!(
            "expected a contiguous one-dimensional array of int64, found {kind} of shape {shape:?}"
        )));
    }
    if shape[0] == 0 {
        return Ok(Vec::new());
    }
    if address == 0 || !address.is_multiple_of(8) {
        return Err(PyValueError::new_err("expected an array that is aligned to 8 bytes"));
    }
    // SAFETY: the array interface says that so many numbers of 64 bits are there, aligned as was just checked, for as long
    // as the array lives. It outlives this call, which holds the interpreter lock.
    let numbers = unsafe { std::slice::from_raw_parts(address as *const i64, shape[0]) };
    Ok(numbers.to_vec())
}

/// The same, of ids that are not negative.
pub fn ids(array: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let found = integers(array)?;
    match found.iter().find(|id| **id < 0) {
        Some(id) => Err(PyValueError::new_err(format!("{id} is not an id; ids count from 0"))),
        None => Ok(found.into_iter().map(|id| id as u64).collect()),
    }
}
