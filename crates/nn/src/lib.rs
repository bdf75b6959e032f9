//! Graph neural networks with forward and backward passes written by hand over a small [`Backend`] trait.
//!
//! [`Model`] is a stack of layers (GraphSAGE, GCN, GAT, GIN, plain linear) built from a [`ModelConfig`]. [`Adjacency`]
//! is the graph that one layer reads. [`Backend`] is the set of operations a device must compute; [`CpuBackend`]
//! implements it with rayon and `gemm`. Layers can be called one by one, so that a strategy can read or replace rows
//! of a hidden state in between (OUTRE's history) or get the gradient of the input rows (Marius's embeddings). Results
//! are bit-identical for any number of threads: work is split into fixed chunks, whose sums are combined in index
//! order. [`LinkMath`] adds what link prediction needs: decoders, losses against negatives, ranks and updates of learned
//! rows. This crate knows no datasets, samples or files; `unsafe` is confined to `cpu`.
#![deny(unsafe_code)]

mod backend;
mod config;
mod convolution;
#[allow(unsafe_code)]
pub mod cpu;
mod cuda;
mod error;
mod layer;
mod link;
mod memory;
mod model;
mod optimizer;
mod parameter;
mod post;
mod schedule;
mod whole;

pub use backend::*;
pub use config::{Degree, HeadMerge, Kind, ModelConfig, NeighbourAggregator, NormKind};
pub use cpu::{CpuBackend, CpuCounters, CpuGraph, CpuHidden, CpuMatrix, Ready, best_matmul_rate};
pub use cuda::{CudaBackend, CudaBytes, CudaCache, CudaGraph, CudaHidden, CudaMatrix, CudaNumber, CudaRows};
pub use error::{NnError, Result};
pub use esker_cuda::Precision;
pub use esker_device::{
    Adjacency, AdjacencyShape, BatchOf, Deferred, Device, DeviceError, HiddenRows, HiddenShape, HostBytes,
    HostRows, MissedOf, RowCache, Shape,
};
/// Fixed workspace of matmuls on a GPU, whatever their size.
pub const DEVICE_MATMUL_BYTES: u64 = esker_cuda::WORKSPACE_BYTES as u64;
pub use layer::Saved;
pub use link::*;
pub use memory::{ExchangedRows, MemoryBytes, MemoryOf, StepShape, memory_bytes};
pub use model::{Activations, Model};
pub use optimizer::{Optimizer, OptimizerConfig, OptimizerKind, Trained};
pub use parameter::{Named, Parameter, export_parameters, load_parameters};
pub use post::{Activation, Dropout, LEAKY_SLOPE, Post};
pub use schedule::Schedule;
pub use whole::{WholeFactors, WholeLayer, WholeNeeds, WholeSums, WholeTargets};
