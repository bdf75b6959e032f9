//! Errors of Esker as exceptions of Python: the same text, and the type that a Python user expects.

use esker_sample::SampleError;
use esker_types::ErrorKind;
use pyo3::exceptions::{
    PyIndexError, PyKeyboardInterrupt, PyMemoryError, PyOSError, PyTypeError, PyValueError,
};
use pyo3::prelude::*;

/// A tensor that cannot be read where it lies.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DlpackError {
    /// It is on a GPU.
    #[error(
        "{what}: expected a tensor on the CPU, found one on a device of DLPack's kind {found}; move it with `.cpu()`"
    )]
    Device {
        /// What it is for.
        what: &'static str,
        /// Its device.
        found: i32,
    },
    /// It has rows.
    #[error("{what}: expected a tensor of 1 dimension, found {found}; flatten it")]
    Dimensions {
        /// What it is for.
        what: &'static str,
        /// Its dimensions.
        found: i32,
    },
    /// Its numbers are not side by side.
    #[error("{what}: expected numbers side by side, found a stride of {stride}; make it contiguous")]
    Gaps {
        /// What it is for.
        what: &'static str,
        /// Its stride.
        stride: i64,
    },
    /// Other numbers.
    #[error(
        "{what}: expected {expected}, found numbers of DLPack's code {code} with {bits} bits; convert it"
    )]
    Element {
        /// What it is for.
        what: &'static str,
        /// What is needed.
        expected: &'static str,
        /// DLPack's code.
        code: u8,
        /// Their bits.
        bits: u8,
    },
    /// An address that no number of its type can have.
    #[error("{what}: its memory is not aligned to its numbers; clone it")]
    Address {
        /// What it is for.
        what: &'static str,
    },
}

impl From<DlpackError> for PyErr {
    fn from(error: DlpackError) -> PyErr {
        let text = error.to_string();
        match error {
            DlpackError::Element { .. } => PyTypeError::new_err(text),
            _ => PyValueError::new_err(text),
        }
    }
}

/// An error of the samplers as an exception.
pub(crate) fn of_sampling(error: SampleError) -> PyErr {
    let text = error.to_string();
    match (&error, error.kind()) {
        (SampleError::Seed { .. }, _) => PyIndexError::new_err(text),
        (SampleError::Memory { .. }, _) => PyMemoryError::new_err(text),
        (_, ErrorKind::Asked) => PyValueError::new_err(text),
        (_, ErrorKind::Stopped) => PyKeyboardInterrupt::new_err(text),
        (_, ErrorKind::DiskFull | ErrorKind::World) => PyOSError::new_err(text),
    }
}
