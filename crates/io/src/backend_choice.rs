//! Ways of reaching a disk, best first, and how one is chosen: by trying.

use crate::IoError;
use std::fmt;

/// A way of reaching a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum IoBackendKind {
    /// io_uring past the page cache.
    UringDirect,
    /// io_uring through the page cache.
    UringBuffered,
    /// A pool of threads past the page cache.
    PoolDirect,
    /// A pool of threads through the page cache. Works everywhere.
    PoolBuffered,
    /// No disk at all: memory that behaves like a bad one.
    Simulated,
}

impl IoBackendKind {
    /// The ladder, best first.
    pub const LADDER: [IoBackendKind; 4] = [
        IoBackendKind::UringDirect,
        IoBackendKind::UringBuffered,
        IoBackendKind::PoolDirect,
        IoBackendKind::PoolBuffered,
    ];

    /// Whether it goes past the page cache.
    pub fn is_direct(self) -> bool {
        matches!(self, IoBackendKind::UringDirect | IoBackendKind::PoolDirect | IoBackendKind::Simulated)
    }

    /// Whether it needs io_uring.
    pub fn is_uring(self) -> bool {
        matches!(self, IoBackendKind::UringDirect | IoBackendKind::UringBuffered)
    }

    /// What people and flags call it.
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

/// The I/O backend that was taken, why no better one, and what it asks of offsets and memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenBackend {
    /// The way.
    pub kind: IoBackendKind,
    /// Why better ways were not taken; empty on the best one.
    pub why_not_better: Vec<String>,
    /// What the disk asks of offsets and lengths.
    pub align_bytes: u64,
    /// Reads start and end at multiples of this: what the disk asks for, or more where the options say so.
    pub block_bytes: u64,
    /// Buffers that are read into without a copy start at a multiple of this.
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

/// How files are read and written. The defaults suit an SSD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// An I/O backend to take whether or not it is the best; `None`: the best that works.
    pub io_backend: Option<IoBackendKind>,
    /// Read at least this much at a time, aligned to it, as disks without 512-byte sectors force; `None`: what the
    /// disk asks for. A power of two.
    pub block_bytes: Option<u64>,
    /// Requests in flight.
    pub depth: usize,
    /// Bytes that nobody requested between two pieces that are read rather than skipped.
    pub gap_bytes: u64,
    /// No transfer is longer. A power of two.
    pub max_bytes: u64,
    /// Bytes in flight: large transfers do not need the depth of small ones.
    pub in_flight_bytes: u64,
    /// Memory for what cannot be read in place.
    pub staging_bytes: u64,
    /// Shorter reads go through staging memory even where they could land in place: the device then writes to a few
    /// buffers that stay in the processor's cache, and a short copy costs less than writing to memory far away does.
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
    /// Most requests in flight that a queue takes.
    pub const MOST_DEPTH: usize = 16_384;

    /// Whether these options can be; the error says which cannot, and what can.
    pub fn check(&self) -> Result<(), IoError> {
        let refuse = |text: String| Err(IoError::Option(text));
        if !(1..=Options::MOST_DEPTH).contains(&self.depth) {
            return refuse(format!("an IO depth of {} was asked for; 1 to 16384 work", self.depth));
        }
        let block = self.block_bytes.unwrap_or(1);
        if !block.is_power_of_two() || block > 1 << 20 {
            return refuse(format!(
                "an IO block of {block} bytes was asked for; powers of two up to 1 MiB work"
            ));
        }
        if !self.max_bytes.is_power_of_two() || !(4096.max(block)..=1 << 30).contains(&self.max_bytes) {
            let max = self.max_bytes;
            return refuse(format!(
                "a largest read of {max} bytes was asked for; powers of two from 4096 and the IO block to 1 GiB work"
            ));
        }
        if self.staging_bytes < self.max_bytes {
            return refuse(format!(
                "{} bytes of staging memory are less than one read of {}",
                self.staging_bytes, self.max_bytes
            ));
        }
        Ok(())
    }

    /// Memory that a queue with these options takes, beside the buffers of its jobs, while its jobs have no more
    /// than this many pieces together.
    pub fn memory_bytes(&self, pieces: u64) -> u64 {
        // A slot, its place in the free list and in the ring, and a completion.
        let each_request = 256;
        // A piece as its owner gives it, its place in the order, as a fragment, and a transfer of its own.
        let each_piece = 24 + 16 + 4 + 40;
        self.staging_bytes + self.depth as u64 * each_request + pieces * each_piece
    }
}
