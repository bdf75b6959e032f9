//! The I/O backends, best first, and the choice among them by probing.

use crate::IoError;
use std::fmt;

/// An I/O backend: how a disk is read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum IoBackendKind {
    /// io_uring, bypassing the page cache.
    UringDirect,
    /// io_uring through the page cache.
    UringBuffered,
    /// A pool of threads, bypassing the page cache.
    PoolDirect,
    /// A pool of threads through the page cache. Works everywhere.
    PoolBuffered,
    /// A simulated disk in memory, with faults.
    Simulated,
}

impl IoBackendKind {
    /// The real backends, best first.
    pub const LADDER: [IoBackendKind; 4] = [
        IoBackendKind::UringDirect,
        IoBackendKind::UringBuffered,
        IoBackendKind::PoolDirect,
        IoBackendKind::PoolBuffered,
    ];

    /// Whether it bypasses the page cache.
    pub fn is_direct(self) -> bool {
        matches!(self, IoBackendKind::UringDirect | IoBackendKind::PoolDirect | IoBackendKind::Simulated)
    }

    /// Whether it needs io_uring.
    pub fn is_uring(self) -> bool {
        matches!(self, IoBackendKind::UringDirect | IoBackendKind::UringBuffered)
    }

    /// Its name in output and flags.
    pub fn name(self) -> &'static str {
        match self {
            IoBackendKind::UringDirect => "uring-direct",
            IoBackendKind::UringBuffered => "uring-buffered",
            IoBackendKind::PoolDirect => "pread-direct",
            IoBackendKind::PoolBuffered => "pread-buffered",
            IoBackendKind::Simulated => "simulated",
        }
    }
}

impl fmt::Display for IoBackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoBackendKind::UringDirect => "io_uring + O_DIRECT",
            IoBackendKind::UringBuffered => "io_uring through the page cache",
            IoBackendKind::PoolDirect => "a pread pool + O_DIRECT",
            IoBackendKind::PoolBuffered => "a pread pool through the page cache",
            IoBackendKind::Simulated => "a simulated disk",
        })
    }
}

/// The chosen I/O backend, why no better one was chosen, and the alignment it requires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenBackend {
    /// The backend.
    pub kind: IoBackendKind,
    /// Why better backends were not chosen; empty for the best one.
    pub why_not_better: Vec<String>,
    /// Required alignment of offsets and lengths.
    pub align_bytes: u64,
    /// Reads start and end at multiples of this: the disk's alignment, or more if the options set it.
    pub block_bytes: u64,
    /// Buffers must start at a multiple of this to be read into without a copy.
    pub memory_align: usize,
}

impl fmt::Display for ChosenBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        match self.why_not_better.is_empty() {
            true => Ok(()),
            false => write!(f, " ({})", self.why_not_better.join("; ")),
        }
    }
}

/// How files are read and written. The defaults are for an SSD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// The I/O backend to use. `None`: the best that works.
    pub io_backend: Option<IoBackendKind>,
    /// Smallest read size and its alignment, a power of two; disks without 512-byte sectors need it. `None`: the
    /// disk's own alignment.
    pub block_bytes: Option<u64>,
    /// Requests in flight.
    pub depth: usize,
    /// Largest gap between two pieces that is read rather than skipped.
    pub gap_bytes: u64,
    /// Largest transfer. A power of two.
    pub max_bytes: u64,
    /// Limit on the bytes in flight: large transfers do not need the depth of small ones.
    pub in_flight_bytes: u64,
    /// Memory for reads that cannot go directly into their buffer.
    pub staging_bytes: u64,
    /// Shorter reads go through staging memory even if they could go directly into their buffer. The device then
    /// writes to a few buffers that stay in the CPU cache, and a short copy costs less than a write to distant memory.
    pub in_place_bytes: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            io_backend: None,
            block_bytes: None,
            depth: 512,
            gap_bytes: 0,
            max_bytes: 1 << 20,
            in_flight_bytes: 8 << 20,
            staging_bytes: 4 << 20,
            in_place_bytes: 8192,
        }
    }
}

impl Options {
    /// The largest depth of a queue.
    pub const MOST_DEPTH: usize = 16_384;

    /// Checks the options. The error names the invalid one and its valid values.
    pub fn check(&self) -> Result<(), IoError> {
        if !(1..=Options::MOST_DEPTH).contains(&self.depth) {
            return Err(IoError::Depth { found: self.depth, most: Options::MOST_DEPTH });
        }
        let block = self.block_bytes.unwrap_or(1);
        if !block.is_power_of_two() || block > 1 << 20 {
            return Err(IoError::Block { found: block });
        }
        if !self.max_bytes.is_power_of_two() || !(4096.max(block)..=1 << 30).contains(&self.max_bytes) {
            return Err(IoError::LargestRead { found: self.max_bytes });
        }
        if self.staging_bytes < self.max_bytes {
            return Err(IoError::Staging { found: self.staging_bytes, largest_read: self.max_bytes });
        }
        Ok(())
    }

    /// Memory that a queue with these options takes, without the buffers of its jobs, while its jobs have at most this
    /// many pieces together.
    pub fn memory_bytes(&self, pieces: u64) -> u64 {
        // A slot, its entries in the free list and in the ring, and a completion.
        let each_request = 256;
        // A piece as its owner gives it, its entry in the order, as a fragment, and a transfer of its own.
        let each_piece = 24 + 16 + 4 + 40;
        self.staging_bytes + self.depth as u64 * each_request + pieces * each_piece
    }
}
