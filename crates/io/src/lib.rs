//! Disk I/O. This crate knows files, offsets and alignment, and knows nothing of graphs.
//!
//! A [`Disk`] (this machine's, or a simulated one) opens files together and chooses the best I/O backend that works:
//! io_uring or a pool of threads, bypassing the page cache or through it. Each thread makes its own [`Queue`] and
//! submits jobs of many [`Piece`]s to it. A [`Stream`] reads a range from front to back. This is the only crate below
//! `cuda` that may use `unsafe`; every block explains why it is sound.
//!
//! # The life of a read
//!
//! ```text
//!  Disk::open ──> Files ── queue() ──> Queue ── submit(pieces, buffer) ──> wait() ──> buffer
//!  (picks the      (shared by          (one thread's: plan.rs merges, IoBackend moves, queue.rs
//!   I/O backend)           threads)            continues, retries, delivers, counts)
//! ```
//!
//! `Disk` is this machine or a `SimulatedDisk` with faults from a random seed; everything that reads accepts either
//! (`Dataset::open_on`, `verify_on`). A `Layout` is one file or stripes over several. A plan is found lazily, bucket
//! by bucket, because the device would run idle while a large batch is sorted. A `Queue` belongs to the thread that
//! made it, as its ring does. It owns the memory of its jobs, or borrows it for a call that does not return before the
//! kernel has finished with it. `Stream` is a queue that reads ahead.
//!
//! # What always holds
//!
//! - No memory is freed or handed out while a request to it is in flight: an `IoBackend` waits when it is dropped, and
//!   is dropped before the memory.
//! - A backend only reports results. `queue.rs` alone decides what short counts and errors mean.
//! - A job reads a block once, however many pieces share it. A write touches no byte around its pieces.
//! - Streams do not fill the page cache (`io/sequential.rs`), because a cgroup counts it.

mod aligned;
mod backend;
mod backend_choice;
mod cost;
mod counters;
mod disk;
mod error;
mod exchange;
mod layout;
pub mod limit;
mod map;
mod plan;
mod prefetch;
mod probe;
mod queue;
mod scratch;
mod sequential;
mod staging;
mod stream;

pub use aligned::{AlignedBuffer, DIRECT_ALIGN};
pub use backend::simulated::{Faults, SimulatedDisk};
pub use backend::{Completion, IoBackend, IoRequest};
pub use backend_choice::{ChosenBackend, IoBackendKind, Options};
pub use cost::{ReadChoice, ReadChoiceReason, ReadCost};
pub use counters::IoCounters;
pub use disk::{Access, Disk, Files, ThisMachine, reserve};
pub use error::IoError;
pub use exchange::exchange;
pub use layout::{Layout, PartPosition};
pub use map::{Map, Touch};
pub use plan::Piece;
pub use prefetch::{
    gather_past_caches, prefer_large_pages, prefetch, return_freed_memory, trim_freed_memory, use_few_heaps,
};
pub use probe::{DirectIo, Refusal, available_bytes, direct_io, io_uring, locked_memory_limit};
pub use queue::{Finished, Queue, Stop};
pub use scratch::ScratchFile;
pub use sequential::{SequentialReader, SequentialWriter, read_ahead};
pub use stream::Stream;
