//! Batches without a trainer, for models that Esker does not know. A [`Loader`] opens any strategy that yields exact
//! batches, divides a memory budget without a model, and hands batches out in the order of PyTorch Geometric. A batch that
//! was handed out belongs to the caller, with plain memory of its own.
//!
//! ```text
//!  LoaderConfig ── pilot, grant ──> Loader ── prepare ──> strategy ── run ──> LoaderRun ── next ──> LoadedBatch
//!                                                        (open.rs)           (run.rs: a thread     (batch.rs: seeds
//!                                                                             hands batches over)   first, by hop)
//! ```
//!
//! With a planned order ([`LoaderOrder::Planned`]) all batches of all epochs are known, so plans span them, and they are
//! those of `esker train` with the same seed. With a given order ([`LoaderOrder::Given`]) the batches of an epoch become
//! known when it begins, and plans span that epoch.
//!
//! Several loaders of a process share one promise of memory ([`SharedMemory`]).

mod batch;
mod config;
mod open;
mod run;
mod scratch;
mod shared;

pub use batch::{BatchValues, HandedColumn, LoadedBatch};
pub use config::{GivenEpoch, LoaderConfig, LoaderOrder};
pub use open::{Loader, LoaderPlan};
pub use run::LoaderRun;
pub use shared::{MemoryShare, SharedMemory};
