//! What a read costs on a disk, by the read and by the byte, and from that: how far apart two rows may lie to be read
//! in one go.
//!
//! Two rows with `g` unwanted bytes between them take a read less in one go, and `g` bytes more. A disk has a limit of
//! reads and one of bytes, so neither is free, and where they balance differs from disk to disk by a factor of a
//! hundred. Hence it is measured, on the file itself and through the engine, with what engine and kernel add.

use crate::backend_choice::{IoBackendKind, Options};
use crate::{AlignedBuffer, DIRECT_ALIGN, Files, IoError, Piece, Queue};
use esker_types::ByteCount;
use esker_types::random::{Key, Permutation};
use std::fmt;
use std::time::{Duration, Instant};

/// Shorter files are not measured: reading all of one takes less time than a bad choice could cost.
const LEAST_MEASURED_BYTES: u64 = 64 << 20;
/// Rows at most this far apart are read in one go where nothing is measured: what the page cache reads at least, and
/// cheaper than a read on every SSD.
const UNMEASURED_GAP_BYTES: u64 = 4096;
/// No gap is wider, whatever a read costs.
const MOST_GAP_BYTES: u64 = 64 << 10;
/// No read of rows is longer: staging memory holds some tens of them, enough for a disk's full rate.
const MOST_READ_BYTES: u64 = 128 << 10;

/// Reads that are timed lie in slots of this many bytes, one in each.
const SLOT_BYTES: u64 = 64 << 10;
/// The long reads that are timed.
const SPAN_BYTES: u64 = 32 << 10;
/// Aligned reads of this length may be faster than shorter ones: many disks store pages of it.
const PAGE_BYTES: u64 = 4096;
/// Reads that say how many more fit the time.
const FIRST_READS: u64 = 16;
/// Reads that are timed at once, at most.
const MOST_READS: u64 = 4096;
/// How long reads of one length are timed at once.
const TURN: Duration = Duration::from_millis(8);
/// How often they are timed at most, and after how long not once more.
const MOST_TURNS: usize = 4;
const ENOUGH: Duration = Duration::from_millis(80);

/// The two costs of a read, while as many are in flight as the engine keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReadCost {
    /// Seconds for a read of any length.
    pub seconds_per_read: f64,
    /// Seconds for each of its bytes.
    pub seconds_per_byte: f64,
}

impl ReadCost {
    /// From reads of two lengths: (bytes, seconds) of the short ones and of the long ones.
    pub fn from_lengths(short: (u64, f64), long: (u64, f64)) -> ReadCost {
        assert!(short.0 < long.0, "two lengths");
        // Noise may make long reads the faster ones: then bytes are cheap, not better than free.
        let seconds_per_byte = ((long.1 - short.1) / (long.0 - short.0) as f64).max(0.0);
        let seconds_per_read = (short.1 - seconds_per_byte * short.0 as f64).max(0.0);
        ReadCost { seconds_per_read, seconds_per_byte }
    }

    /// Bytes that nobody requested that are read rather than skipped: two thirds of what costs as much as a read. At that point
    /// itself nothing is gained, and where rows lie close, in long reads, a byte costs more than in those timed.
    /// Leaving out the last third loses 6% of the time at most where the costs are exact and rows lie at random.
    pub fn gap_bytes(&self) -> u64 {
        let gap = self.seconds_per_read / self.seconds_per_byte * 2.0 / 3.0;
        // Not a number where both cost nothing.
        if gap < MOST_GAP_BYTES as f64 { gap as u64 } else { MOST_GAP_BYTES }
    }

    /// What so many reads of so many bytes together take.
    pub fn seconds(&self, reads: u64, bytes: u64) -> f64 {
        reads as f64 * self.seconds_per_read + bytes as f64 * self.seconds_per_byte
    }
}

/// Where a choice comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReadChoiceReason {
    /// A user's block size: rows that share or touch blocks are one read.
    Explicit,
    /// Measured on the file.
    Measured(ReadCost),
    /// The file is short.
    ShortFile,
    /// Reads go through the page cache, or to no disk at all.
    NotDirect,
    /// A read failed. Whoever needs those bytes will be told.
    Failed,
}

/// How rows of a file are read: in which blocks, and which of them in one go. Changes how long reads take, never what
/// they bring.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReadChoice {
    /// What to open the file with. The memory of a queue is that of the default options.
    pub options: Options,
    /// Why.
    pub reason: ReadChoiceReason,
}

impl ReadChoice {
    /// Reads in blocks of so many bytes at least, and nothing between blocks.
    pub fn explicit(block_bytes: u64) -> ReadChoice {
        let options = Options { block_bytes: Some(block_bytes), ..Options::default() };
        ReadChoice { options, reason: ReadChoiceReason::Explicit }
    }

    /// The fastest for rows of `row_bytes` in the first of `files`: takes about a tenth of a second to measure it, and
    /// no time where the file is short or not read directly.
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

    /// What follows from these costs of reads in blocks of `block_bytes` (`None`: what the disk asks for).
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

/// The block to read in, and what reads cost then.
fn measure(files: Files, row_bytes: u64) -> Result<(Option<u64>, ReadCost), IoError> {
    let started = Instant::now();
    let block = files.io_backend().block_bytes;
    let row = row_bytes.max(1).next_multiple_of(block).min(PAGE_BYTES);
    let mut timer = ReadTimer::new(files)?;
    // A span is read for the rows at its two ends, as rows that are merged are: its cost has that of one more row.
    let (rows, pages) = (&[(0, row)][..], &[(0, PAGE_BYTES)][..]);
    let spans = &[(0, row), (SPAN_BYTES - row, row)][..];
    let (mut by_row, mut by_span, mut by_page) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
    let mut pages_are_faster = row < PAGE_BYTES;
    for turn in 0..MOST_TURNS {
        if turn > 0 && started.elapsed() > ENOUGH {
            break;
        }
        // What disturbs a measurement makes it longer, never shorter: the shortest of several counts.
        let row_now = timer.seconds_per_read(rows)?;
        (by_row, by_span) = (by_row.min(row_now), by_span.min(timer.seconds_per_read(spans)?));
        if pages_are_faster {
            let page_now = timer.seconds_per_read(pages)?;
            by_page = by_page.min(page_now);
            // Every time and by far: a page that is read for one row is mostly wasted.
            pages_are_faster = page_now < row_now * 0.8;
        }
    }
    let (block_bytes, short) = match pages_are_faster {
        true => (Some(PAGE_BYTES), (PAGE_BYTES, by_page)),
        false => (None, (row, by_row)),
    };
    Ok((block_bytes, ReadCost::from_lengths(short, (SPAN_BYTES, by_span))))
}

/// Times reads all over a file, a slot after the other in no order.
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
        // Merges what is in one slot: the last row of a slot and the first of the next are at least this far apart.
        let files = files.with_options(|options| options.gap_bytes = SLOT_BYTES - SPAN_BYTES - 1)?;
        let memory = AlignedBuffer::new(1 << 20, DIRECT_ALIGN);
        let slots = Permutation::new(slot_count, Key::new(3));
        Ok(ReadTimer { queue: files.queue()?, slots, slot_count, next: 0, pieces: Vec::new(), memory })
    }

    /// Seconds for the read that brings `pieces` (offset in a slot, bytes), while the queue is kept full.
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
        // A disk that turns: a read costs milliseconds.
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
                // Not every I/O backend is there on every machine.
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
