//! What a read costs on a disk, per read and per byte, and from that: the largest gap between two rows that are read
//! with one read.
//!
//! Reading two rows with a gap of `g` unneeded bytes together saves one read and costs `g` more bytes. A disk limits
//! both reads and bytes per second, so neither is free, and the break-even gap differs between disks by a factor of a
//! hundred. Hence it is measured, on the file itself and through the engine, with the overhead of engine and kernel.

use crate::backend_choice::{IoBackendKind, Options};
use crate::{AlignedBuffer, DIRECT_ALIGN, Files, IoError, Piece, Queue};
use esker_types::ByteCount;
use esker_types::random::{Key, Permutation};
use std::fmt;
use std::time::{Duration, Instant};

/// Shorter files are not measured: reading all of one takes less time than a bad choice could cost.
const LEAST_MEASURED_BYTES: u64 = 64 << 20;
/// Gap for files that are not measured. It is the page cache's smallest read, and cheaper than a read on every SSD.
const UNMEASURED_GAP_BYTES: u64 = 4096;
/// Largest gap, whatever a read costs.
const MOST_GAP_BYTES: u64 = 64 << 10;
/// Longest read of rows. Staging memory fits some tens of them, enough for a disk's full rate.
const MOST_READ_BYTES: u64 = 128 << 10;

/// Timed reads are in slots of this many bytes, one read per slot.
const SLOT_BYTES: u64 = 64 << 10;
/// Length of the long reads that are timed.
const SPAN_BYTES: u64 = 32 << 10;
/// Aligned reads of this length may be faster than shorter ones: many disks have pages of this size.
const PAGE_BYTES: u64 = 4096;
/// Trial reads. Their time determines how many reads fit into a turn.
const FIRST_READS: u64 = 16;
/// Largest number of reads in a turn.
const MOST_READS: u64 = 4096;
/// Duration of a turn: one timing of reads of one length.
const TURN: Duration = Duration::from_millis(8);
/// Largest number of turns. No turn starts after `ENOUGH`.
const MOST_TURNS: usize = 4;
const ENOUGH: Duration = Duration::from_millis(80);

/// The two costs of a read, while as many are in flight as the engine keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReadCost {
    /// Seconds per read, whatever its length.
    pub seconds_per_read: f64,
    /// Seconds per byte read.
    pub seconds_per_byte: f64,
}

impl ReadCost {
    /// From reads of two lengths: (bytes, seconds) of the short reads and of the long reads.
    pub fn from_lengths(short: (u64, f64), long: (u64, f64)) -> ReadCost {
        assert!(short.0 < long.0, "two lengths");
        // Noise may make long reads the faster ones. Then bytes count as free, not as a gain.
        let seconds_per_byte = ((long.1 - short.1) / (long.0 - short.0) as f64).max(0.0);
        let seconds_per_read = (short.1 - seconds_per_byte * short.0 as f64).max(0.0);
        ReadCost { seconds_per_read, seconds_per_byte }
    }

    /// Largest gap between two pieces that is read rather than skipped: two thirds of the bytes that cost as much as a
    /// read. At the break-even point itself nothing is gained, and if rows are close together, in long reads, a byte
    /// costs more than in the timed reads. Leaving out the last third loses at most 6% of the time if the costs are
    /// exact and rows are at random positions.
    pub fn gap_bytes(&self) -> u64 {
        let gap = self.seconds_per_read / self.seconds_per_byte * 2.0 / 3.0;
        // NaN if both costs are zero.
        if gap < MOST_GAP_BYTES as f64 { gap as u64 } else { MOST_GAP_BYTES }
    }

    /// Seconds for this many reads with this many bytes in total.
    pub fn seconds(&self, reads: u64, bytes: u64) -> f64 {
        reads as f64 * self.seconds_per_read + bytes as f64 * self.seconds_per_byte
    }
}

/// How a choice was made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReadChoiceReason {
    /// The user set the block size. Rows whose blocks overlap or touch share one read.
    Explicit,
    /// Measured on the file.
    Measured(ReadCost),
    /// The file is short.
    ShortFile,
    /// Reads go through the page cache or to a simulated disk.
    NotDirect,
    /// A read failed. The error is reported when these bytes are read for use.
    Failed,
}

/// How rows of a file are read: the block size, and the largest gap within one read. It changes how long reads take,
/// never their result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReadChoice {
    /// The options to open the file with. A queue takes as much memory as with the default options.
    pub options: Options,
    /// Why.
    pub reason: ReadChoiceReason,
}

impl ReadChoice {
    /// Reads blocks of at least this many bytes, and no gaps between blocks.
    pub fn explicit(block_bytes: u64) -> ReadChoice {
        let options = Options { block_bytes: Some(block_bytes), ..Options::default() };
        ReadChoice { options, reason: ReadChoiceReason::Explicit }
    }

    /// The fastest choice for rows of `row_bytes` in the first of `files`. Measuring takes about a tenth of a second;
    /// a file that is short or not read directly is not measured.
    pub fn for_rows(files: Files, row_bytes: u64) -> ReadChoice {
        let (io_backend, bytes) = (files.io_backend(), files.bytes(0));
        let reason = match () {
            () if !io_backend.kind.is_direct() || io_backend.kind == IoBackendKind::Simulated => {
                ReadChoiceReason::NotDirect
            }
            () if bytes < LEAST_MEASURED_BYTES => ReadChoiceReason::ShortFile,
            () => match measure(files, row_bytes) {
                Ok((block_bytes, cost)) => return ReadChoice::measured(block_bytes, cost),
                Err(_) => ReadChoiceReason::Failed,
            },
        };
        ReadChoice { options: merging(None, UNMEASURED_GAP_BYTES), reason }
    }

    /// The choice for this measured cost of reads in blocks of `block_bytes` (`None`: the disk's own alignment).
    pub fn measured(block_bytes: Option<u64>, cost: ReadCost) -> ReadChoice {
        let options = merging(block_bytes, cost.gap_bytes());
        ReadChoice { options, reason: ReadChoiceReason::Measured(cost) }
    }
}

fn merging(block_bytes: Option<u64>, gap_bytes: u64) -> Options {
    Options { block_bytes, gap_bytes, max_bytes: MOST_READ_BYTES, ..Options::default() }
}

impl fmt::Display for ReadChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { block_bytes, gap_bytes, .. } = self.options;
        if let (Some(block), ReadChoiceReason::Explicit) = (block_bytes, self.reason) {
            return write!(f, "rows are read in blocks of {} at least", ByteCount(block));
        }
        write!(f, "rows up to {} apart are read in one go", ByteCount(gap_bytes))?;
        if let Some(block) = block_bytes {
            write!(f, ", in blocks of {}", ByteCount(block))?;
        }
        match self.reason {
            ReadChoiceReason::Measured(cost) => {
                let (read, byte) = (cost.seconds_per_read * 1e6, cost.seconds_per_byte * 1e9);
                write!(f, ": a read costs {read:.1} us here, a byte {byte:.2} ns")
            }
            ReadChoiceReason::ShortFile => write!(f, " (not measured: the file is short)"),
            ReadChoiceReason::Failed => write!(f, " (not measured: a read failed)"),
            ReadChoiceReason::NotDirect | ReadChoiceReason::Explicit => Ok(()),
        }
    }
}

/// The block size to read with, and the cost of such reads.
fn measure(files: Files, row_bytes: u64) -> Result<(Option<u64>, ReadCost), IoError> {
    let started = Instant::now();
    let block = files.io_backend().block_bytes;
    let row = row_bytes.max(1).next_multiple_of(block).min(PAGE_BYTES);
    let mut timer = ReadTimer::new(files)?;
    // A span is read for the rows at its two ends, like merged rows, so its time includes that of the second row.
    let (rows, pages) = (&[(0, row)][..], &[(0, PAGE_BYTES)][..]);
    let spans = &[(0, row), (SPAN_BYTES - row, row)][..];
    let (mut by_row, mut by_span, mut by_page) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
    let mut pages_are_faster = row < PAGE_BYTES;
    for turn in 0..MOST_TURNS {
        if turn > 0 && started.elapsed() > ENOUGH {
            break;
        }
        // Disturbances only make a measurement longer, so the shortest of several counts.
        let row_now = timer.seconds_per_read(rows)?;
        (by_row, by_span) = (by_row.min(row_now), by_span.min(timer.seconds_per_read(spans)?));
        if pages_are_faster {
            let page_now = timer.seconds_per_read(pages)?;
            by_page = by_page.min(page_now);
            // Pages must be much faster in every turn: a page that is read for one row is mostly wasted.
            pages_are_faster = page_now < row_now * 0.8;
        }
    }
    let (block_bytes, short) = match pages_are_faster {
        true => (Some(PAGE_BYTES), (PAGE_BYTES, by_page)),
        false => (None, (row, by_row)),
    };
    Ok((block_bytes, ReadCost::from_lengths(short, (SPAN_BYTES, by_span))))
}

/// Times reads all over a file, one per slot, in random slot order.
struct ReadTimer {
    queue: Queue,
    slots: Permutation,
    slot_count: u64,
    next: u64,
    pieces: Vec<Piece>,
    memory: AlignedBuffer,
}

impl ReadTimer {
    fn new(files: Files) -> Result<ReadTimer, IoError> {
        let slot_count = files.bytes(0) / SLOT_BYTES;
        // Merges the pieces of one slot only: rows of adjacent slots are further apart than this gap.
        let files = files.with_options(|options| options.gap_bytes = SLOT_BYTES - SPAN_BYTES - 1)?;
        let memory = AlignedBuffer::new(1 << 20, DIRECT_ALIGN);
        let slots = Permutation::new(slot_count, Key::new(3));
        Ok(ReadTimer { queue: files.queue()?, slots, slot_count, next: 0, pieces: Vec::new(), memory })
    }

    /// Seconds for the read that covers `pieces` (offset in a slot, bytes), with a full queue.
    fn seconds_per_read(&mut self, pieces: &[(u64, u64)]) -> Result<f64, IoError> {
        let first = self.time(FIRST_READS, pieces)?;
        let reads = (TURN.as_secs_f64() / first * FIRST_READS as f64) as u64;
        let reads = reads.min(MOST_READS).min(self.slot_count);
        match reads <= FIRST_READS {
            true => Ok(first / FIRST_READS as f64),
            false => Ok(self.time(reads, pieces)? / reads as f64),
        }
    }

    fn time(&mut self, reads: u64, pieces: &[(u64, u64)]) -> Result<f64, IoError> {
        self.pieces.clear();
        for turn in self.next..self.next + reads {
            let start = self.slots.forward(turn % self.slot_count) * SLOT_BYTES;
            for &(offset, bytes) in pieces {
                let at = (self.pieces.len() as u64 * PAGE_BYTES) % self.memory.len() as u64;
                self.pieces.push(Piece { offset: start + offset, bytes, at });
            }
        }
        self.next += reads;
        let started = Instant::now();
        self.queue.read(0, &self.pieces, &mut self.memory)?;
        Ok(started.elapsed().as_secs_f64().max(1e-9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Disk, Faults, Layout, SimulatedDisk, ThisMachine};
    use std::path::Path;

    fn close(one: f64, other: f64) -> bool {
        (one - other).abs() <= 1e-9 * other.abs()
    }

    #[test]
    fn costs_follow_from_two_lengths() {
        let cost = ReadCost::from_lengths((512, 5.512e-6), (32_768, 37.768e-6));
        assert!(close(cost.seconds_per_read, 5e-6) && close(cost.seconds_per_byte, 1e-9), "{cost:?}");
        assert!(close(cost.seconds(3, 4000), 19e-6));
    }

    #[test]
    fn the_gap_is_two_thirds_of_what_costs_a_read() {
        let gap = |read, byte| ReadCost { seconds_per_read: read, seconds_per_byte: byte }.gap_bytes();
        assert_eq!(gap(6e-6, 1e-9), 4000);
        assert_eq!(gap(6e-6, 4e-9), 1000);
        assert_eq!(gap(0.0, 1e-9), 0);
        // A spinning disk: a read costs milliseconds.
        assert_eq!(gap(8e-3, 10e-9), MOST_GAP_BYTES);
        assert_eq!(gap(1e-6, 0.0), MOST_GAP_BYTES);
    }

    #[test]
    fn noise_makes_no_negative_costs() {
        let cost = ReadCost::from_lengths((4096, 2e-6), (32_768, 1e-6));
        assert_eq!((cost.seconds_per_byte, cost.gap_bytes()), (0.0, MOST_GAP_BYTES));
        let steep = ReadCost::from_lengths((16_384, 1e-6), (32_768, 9e-6));
        assert_eq!((steep.seconds_per_read, steep.gap_bytes()), (0.0, 0));
    }

    #[test]
    fn a_queue_takes_no_more_memory_than_by_default() {
        let dear = ReadCost { seconds_per_read: 1.0, seconds_per_byte: 1e-9 };
        for choice in [ReadChoice::explicit(4096), ReadChoice::measured(Some(4096), dear)] {
            choice.options.check().unwrap();
            assert_eq!(choice.options.memory_bytes(1000), Options::default().memory_bytes(1000));
            assert!(choice.options.staging_bytes >= 16 * choice.options.max_bytes.min(MOST_READ_BYTES));
        }
    }

    #[test]
    fn an_explicit_block_changes_nothing_else() {
        let Options { block_bytes, gap_bytes, max_bytes, .. } = ReadChoice::explicit(4096).options;
        assert_eq!((block_bytes, gap_bytes, max_bytes), (Some(4096), 0, Options::default().max_bytes));
        assert_eq!(ReadChoice::explicit(4096).to_string(), "rows are read in blocks of 4 KiB at least");
    }

    #[test]
    fn a_choice_says_what_it_measured() {
        let cost = ReadCost { seconds_per_read: 6.144e-6, seconds_per_byte: 0.4e-9 };
        assert_eq!(
            ReadChoice::measured(None, cost).to_string(),
            "rows up to 10 KiB apart are read in one go: a read costs 6.1 us here, a byte 0.40 ns"
        );
    }

    #[test]
    fn a_simulated_disk_is_not_measured() {
        let (disk, path) = (SimulatedDisk::new(Faults::default()), Path::new("/simulated/f"));
        disk.put(path, vec![0; 1 << 20]);
        let files = disk.open(&[Layout::file(path)], Access::Read, &Options::default()).unwrap();
        let choice = ReadChoice::for_rows(files, 512);
        assert_eq!((choice.reason, choice.options.gap_bytes), (ReadChoiceReason::NotDirect, 4096));
    }

    #[test]
    fn real_files_are_measured_where_they_are_long_and_read_directly() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        let file = std::fs::File::create(&path).unwrap();
        for (bytes, row_bytes) in
            [(1 << 20, 512), (LEAST_MEASURED_BYTES, 512), (LEAST_MEASURED_BYTES + 77, 100_000)]
        {
            file.set_len(bytes).unwrap();
            for kind in IoBackendKind::LADDER {
                let options = Options { io_backend: Some(kind), ..Options::default() };
                // Not every I/O backend is available on every machine.
                let Ok(files) = ThisMachine.open(&[Layout::file(&path)], Access::Read, &options) else {
                    continue;
                };
                let choice = ReadChoice::for_rows(files, row_bytes);
                println!("{kind}, {bytes} bytes: {choice}");
                choice.options.check().unwrap();
                let measured = matches!(choice.reason, ReadChoiceReason::Measured(_));
                assert_eq!(measured, kind.is_direct() && bytes >= LEAST_MEASURED_BYTES);
            }
        }
    }

    #[test]
    fn reads_that_are_timed_are_one_for_each_slot() {
        let (disk, path) = (SimulatedDisk::new(Faults::default()), Path::new("/simulated/f"));
        disk.put(path, vec![0; 8 << 20]);
        let files = disk.open(&[Layout::file(path)], Access::Read, &Options::default()).unwrap();
        let mut timer = ReadTimer::new(files).unwrap();
        for (pieces, bytes) in [(&[(0, 512)][..], 512), (&[(0, 4096), (SPAN_BYTES - 4096, 4096)], SPAN_BYTES)]
        {
            let before = timer.queue.counters();
            timer.time(128, pieces).unwrap();
            let after = timer.queue.counters();
            assert_eq!(after.reads - before.reads, 128);
            assert_eq!(after.read_bytes - before.read_bytes, 128 * bytes);
        }
    }
}
