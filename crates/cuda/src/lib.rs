//! An NVIDIA GPU from the same binary: libraries are opened when asked for, kernels are compiled on the machine they run
//! on.
//!
//! [`Gpu`] is an opened device with one stream that computes and one that copies; [`DeviceMatrix`] and [`DeviceLists`]
//! are what lives on it; `ops` are kernels with their shapes checked. Nothing is waited for inside a step: a failure is kept and
//! told by [`Gpu::check`], a number comes back as a [`Pending`]. Results do not depend on the grid or on what overlaps: sums have
//! one order, products one handle and one stream. All `unsafe` of GPUs is here; nothing here knows models or files.

mod blas;
mod error;
mod gpu;
mod kernels;
mod library;
mod lists;
mod matrix;
pub mod measure;
mod memory;
mod ops;
mod pinned;

pub use blas::{Precision, WORKSPACE_BYTES};
pub use error::{CudaError, Result};
pub use gpu::{Gpu, GpuInfo, Stopwatch, count};
pub use kernels::{SOURCES, Source, can_compile};
pub use library::Library;
pub use lists::DeviceLists;
pub use matrix::DeviceMatrix;
pub(crate) use memory::Use;
pub use memory::pooled_bytes;
pub use ops::*;
pub use pinned::{Pending, Pinned};
