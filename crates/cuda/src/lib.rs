//! NVIDIA GPUs, supported by the same binary: libraries are opened on first use, and kernels are compiled on the
//! machine they run on.
//!
//! [`Gpu`] is an open device with a compute stream and a copy stream. [`DeviceMatrix`] and [`DeviceAdjacency`] are
//! data on it. `ops` are kernels with checked shapes. Nothing waits inside a step: a failure is kept and returned by
//! [`Gpu::check`], and a number is returned as a [`Pending`]. All `unsafe` code for GPUs is in this crate; it knows no
//! models or files.
//!
//! # What always holds
//!
//! - Results do not depend on the grid or on what overlaps. One stream computes, with one cuBLAS handle and workspace.
//!   Sums have the order of the neighbours, and no float is added atomically.
//! - Memory of the compute stream is reused in the order of that stream. Memory for uploaded rows has an event for its
//!   last use.
//! - Cached rows are assembled on the copy stream, which only moves them and converts them to f32.
//! - The first failure is kept, nothing more is launched after it, and `Gpu::check` returns it.

mod adjacency;
mod blas;
mod compiled;
mod error;
mod gpu;
mod kernels;
mod library;
mod matrix;
pub mod measure;
mod memory;
mod ops;
mod pinned;

pub use adjacency::{DeviceAdjacency, StagedAdjacency};
pub use blas::{Precision, WORKSPACE_BYTES};
pub use error::{CudaError, Result};
pub use gpu::{Gpu, GpuInfo, Stopwatch, count};
pub use kernels::{SOURCES, Source, can_compile};
pub use library::Library;
pub use matrix::DeviceMatrix;
pub(crate) use memory::Use;
pub use memory::pooled_bytes;
pub use ops::*;
pub use pinned::{Pending, Pinned};
