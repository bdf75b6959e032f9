//! Bytes on disks. Knows files, offsets and alignment; knows nothing of graphs.
//!
//! So far: sequential streams that leave no trail in the page cache, aligned buffers with direct reads, and
//! probes of what this machine's IO can do. The reading engine builds on these. The only crate below `cuda`
//! that may use `unsafe`; every block says why it is sound.

mod aligned;
mod direct;
mod exchange;
mod prefetch;
mod probe;
mod sequential;

pub use aligned::AlignedBuffer;
pub use direct::{DIRECT_ALIGN, DirectFile};
pub use exchange::exchange;
pub use prefetch::{prefer_large_pages, prefetch};
pub use probe::{DirectIo, Refusal, available_bytes, direct_io, io_uring, locked_memory_limit};
pub use sequential::{SequentialReader, SequentialWriter};
