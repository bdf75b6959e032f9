//! An NVIDIA GPU from the same binary: libraries are opened when asked for, kernels are compiled on the machine they run
//! on.
//!
//! [`Gpu`] is an opened device with one stream that computes and one that copies; [`DeviceMatrix`] and [`DeviceAdjacency`]
//! are what lives on it; `ops` are kernels with their shapes checked. Nothing is waited for inside a step: a failure is kept and
//! told by [`Gpu::check`], a number comes back as a [`Pending`]. Results do not depend on the grid or on what overlaps: sums have
//! one order, matmuls one handle and one stream. All `unsafe` of GPUs is here; nothing here knows models or files.
//!
//! # What always holds
//!
//! - On a GPU nothing depends on the grid or on what overlaps: one stream computes, with one cuBLAS handle and
//!   workspace; sums have the order of their lists; no float is added atomically. Memory that computes is used
//!   again in that stream's order; memory that rows are uploaded to carries a mark of its last use. Cached rows are
//!   assembled on the stream that copies, which only moves and widens them. What fails is kept, nothing more is
//!   launched, and `Gpu::check` says it.

mod adjacency;
mod blas;
mod error;
mod gpu;
mod kernels;
mod library;
mod matrix;
pub mod measure;
mod memory;
mod ops;
mod pinned;

pub use adjacency::DeviceAdjacency;
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
