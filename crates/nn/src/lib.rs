//! Graph neural networks with forward and backward passes written by hand over a small [`Backend`] trait.
//!
//! [`Model`] is a stack of layers (GraphSAGE, GCN, GAT, GIN, plain linear) built from a [`ModelConfig`]; [`Adjacency`] is
//! the graph one layer reads; [`Backend`] is what a device must compute, and [`CpuBackend`] does it with rayon and `gemm`.
//! Layers can be called one by one, so that a strategy may read or replace rows of a hidden state in between (OUTRE's
//! history) or ask for the gradient of the input rows (Marius's embeddings). Results have the same bits for any number
//! of threads: work is cut into fixed chunks, whose sums are combined in index order. Nothing here knows datasets,
//! samples or files; `unsafe` is confined to `cpu`.
#![deny(unsafe_code)]

mod backend;
mod config;
mod convolution;
#[allow(unsafe_code)]
pub mod cpu;
mod cuda;
mod error;
mod layer;
mod memory;
mod model;
mod optimizer;
mod parameter;
mod post;
mod schedule;

pub use backend::*;
pub use config::{Degree, HeadMerge, Kind, ModelConfig, NeighbourAggregator, NormKind};
pub use cpu::{CpuBackend, CpuCounters, CpuGraph, CpuMatrix, Ready, best_matmul_rate};
pub use cuda::{CudaBackend, CudaBytes, CudaCache, CudaGraph, CudaMatrix, CudaNumber, CudaRows};
pub use error::{NnError, Result};
pub use esker_cuda::Precision;
pub use esker_device::{
    Adjacency, AdjacencyShape, BatchOf, Deferred, Device, DeviceError, HostBytes, HostRows, MissedOf,
    RowCache, Shape,
};
/// What matmuls on a GPU take for themselves, whatever their size.
pub const DEVICE_MATMUL_BYTES: u64 = esker_cuda::WORKSPACE_BYTES as u64;
pub use layer::Saved;
pub use memory::{ExchangedRows, MemoryBytes, MemoryOf, StepShape, memory_bytes};
pub use model::{Activations, Model};
pub use optimizer::{Optimizer, OptimizerConfig, OptimizerKind, Trained};
pub use parameter::{Named, Parameter, export_parameters, load_parameters};
pub use post::{Activation, Dropout, LEAKY_SLOPE, Post};
pub use schedule::Schedule;
