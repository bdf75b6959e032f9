//! What `esker bench io` lets the engine read, and the bare loop that it is compared with.

use crate::scratch::word;
use anyhow::Context;
use esker_io::limit::{BareLoop, Rate, cpu_seconds};
use esker_io::{AlignedBuffer, DIRECT_ALIGN, Files, IoCounters, Piece, Queue, Stream};
use esker_types::random::{Key, Permutation, below};
use std::time::{Duration, Instant};

/// Jobs that take turns: while one is read, the next is in line.
const JOBS: usize = 3;
/// Chunks of a large page each: of small ones a disk takes only so many in a request, and a MiB would be cut in two.
const STREAM_CHUNK_BYTES: u64 = 2 << 20;
const STREAM_CHUNKS: usize = 4;

/// Something to read.
#[derive(Debug, Clone)]
pub struct Workload {
    /// What people call it.
    pub name: String,
    /// What is read.
    pub kind: WorkloadKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkloadKind {
    /// Rows anywhere in the file.
    Rows { row_bytes: u64, rows_at_once: u64 },
    /// Rows anywhere in the file, given in the order of the file.
    Sorted { row_bytes: u64, rows_at_once: u64 },
    /// Rows of a region that is small enough for many to share blocks.
    Dense { row_bytes: u64, rows_at_once: u64, of_rows: u64 },
    /// The whole file from front to back.
    Sequential,
}

/// What the engine achieved.
pub struct Reached {
    pub rate: Rate,
    pub counters: IoCounters,
    /// What each block once would take; nothing for a stream.
    pub by_theory: Option<Theory>,
}

/// Reads and bytes that touch each requested block once, counted without the engine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Theory {
    /// Runs of neighbouring blocks: the fewest reads, as long as none grows beyond the largest.
    pub reads: u64,
    /// Bytes of all blocks.
    pub bytes: u64,
}

impl Workload {
    /// The bare loop with the same reads, in the configuration that was best for their kind.
    pub fn bare(&self, block_bytes: u64, small: BareLoop, page: BareLoop, sequential: BareLoop) -> BareLoop {
        match self.kind {
            WorkloadKind::Sequential => sequential,
            WorkloadKind::Rows { row_bytes, .. }
            | WorkloadKind::Sorted { row_bytes, .. }
            | WorkloadKind::Dense { row_bytes, .. } => {
                // Rows that are no multiple of a block mostly take this many blocks.
                let blocks = (1.0 + (row_bytes - 1) as f64 / block_bytes as f64).round() as u64;
                let odd = !row_bytes.is_multiple_of(block_bytes);
                let bytes = if odd { blocks * block_bytes } else { row_bytes };
                let like = if bytes >= 2048 { page } else { small };
                BareLoop { block_bytes: (bytes as usize).max(512), ..like }
            }
        }
    }

    /// Memory that the engine fills: a bare loop that keeps what it reads must fill as much.
    pub fn memory_bytes(&self) -> usize {
        let bytes = match self.kind {
            WorkloadKind::Sequential => STREAM_CHUNK_BYTES * STREAM_CHUNKS as u64,
            WorkloadKind::Rows { row_bytes, rows_at_once }
            | WorkloadKind::Sorted { row_bytes, rows_at_once }
            | WorkloadKind::Dense { row_bytes, rows_at_once, .. } => row_bytes * rows_at_once * JOBS as u64,
        };
        bytes as usize
    }

    /// Lets the engine work for about `duration`, then checks what the last job brought, unless the file is
    /// somebody else's.
    pub fn measure(&self, files: &Files, duration: Duration, check: bool) -> anyhow::Result<Reached> {
        match self.kind {
            WorkloadKind::Sequential => stream(files, duration),
            _ => RowBatches::new(self.kind, files)?.measure(duration, check),
        }
    }
}

fn stream(files: &Files, duration: Duration) -> anyhow::Result<Reached> {
    let (cpu_before, started) = (cpu_seconds(), Instant::now());
    let mut counters = IoCounters::default();
    let mut bytes = 0;
    while started.elapsed() < duration {
        let mut stream = Stream::open(files, 0, 0..files.bytes(0), STREAM_CHUNK_BYTES, STREAM_CHUNKS)?;
        while started.elapsed() < duration
            && let Some(chunk) = stream.next_chunk()?
        {
            bytes += chunk.len() as u64;
        }
        counters.add(&stream.counters());
    }
    let (seconds, cpu_seconds) = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu_before);
    let rate = Rate { reads: counters.reads, bytes, seconds, cpu_seconds };
    Ok(Reached { rate, counters, by_theory: None })
}

/// Batches of rows with buffers that are registered once, as a training run has them.
struct RowBatches {
    queue: Queue,
    ready: Vec<(Vec<Piece>, AlignedBuffer)>,
}

impl RowBatches {
    fn new(kind: WorkloadKind, files: &Files) -> anyhow::Result<RowBatches> {
        let mut queue = files.queue()?;
        let mut ready = Vec::new();
        for job in 0..JOBS as u64 {
            let pieces = pieces(kind, files.bytes(0), job);
            let bytes = pieces.iter().map(|piece| piece.bytes).sum::<u64>();
            let buffer = AlignedBuffer::new(bytes as usize, DIRECT_ALIGN);
            queue.register(&buffer);
            ready.push((pieces, buffer));
        }
        Ok(RowBatches { queue, ready })
    }

    fn measure(mut self, duration: Duration, check: bool) -> anyhow::Result<Reached> {
        let block_bytes = self.queue.io_backend().block_bytes;
        let each: Vec<Theory> =
            self.ready.iter().map(|(pieces, _)| Theory::of(pieces, block_bytes)).collect();
        let (cpu_before, started) = (cpu_seconds(), Instant::now());
        let (mut jobs, mut by_theory) = (0, Theory::default());
        // At least every batch once: what is counted below must be of whole batches.
        while started.elapsed() < duration || jobs < JOBS {
            let (pieces, buffer) = match self.ready.pop() {
                Some(ready) => ready,
                None => self.finish_one()?,
            };
            // Batches are taken from the back at first, and then come back in that order.
            let expected = each[JOBS - 1 - jobs % JOBS];
            by_theory =
                Theory { reads: by_theory.reads + expected.reads, bytes: by_theory.bytes + expected.bytes };
            jobs += 1;
            self.queue.submit(0, pieces, buffer);
        }
        let mut last = None;
        while self.queue.pending() > 0 {
            last = Some(self.finish_one()?);
        }
        let (seconds, cpu_seconds) = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu_before);
        if let Some((pieces, buffer)) = last.filter(|_| check) {
            check_rows(&pieces, &buffer)?;
        }
        let counters = self.queue.counters();
        let rate = Rate { reads: counters.reads, bytes: counters.useful_bytes, seconds, cpu_seconds };
        Ok(Reached { rate, counters, by_theory: Some(by_theory) })
    }

    fn finish_one(&mut self) -> anyhow::Result<(Vec<Piece>, AlignedBuffer)> {
        let finished = self.queue.wait().context("a job is in line")?;
        finished.result?;
        Ok((finished.pieces, finished.buffer))
    }
}

/// The rows of one batch, one behind the other in the buffer.
fn pieces(kind: WorkloadKind, file_bytes: u64, job: u64) -> Vec<Piece> {
    let key = Key::new(7).with(job);
    let (row_bytes, rows): (u64, Vec<u64>) = match kind {
        WorkloadKind::Rows { row_bytes, rows_at_once } => {
            (row_bytes, (0..rows_at_once).map(|turn| below(key.at(turn), file_bytes / row_bytes)).collect())
        }
        WorkloadKind::Sorted { row_bytes, rows_at_once } => {
            let rows = file_bytes / row_bytes;
            let mut rows: Vec<u64> = (0..rows_at_once).map(|turn| below(key.at(turn), rows)).collect();
            rows.sort_unstable();
            (row_bytes, rows)
        }
        WorkloadKind::Dense { row_bytes, rows_at_once, of_rows } => {
            let all = file_bytes / row_bytes;
            let of_rows = of_rows.min(all);
            let first = below(key.at(0), all - of_rows + 1);
            let shuffled = Permutation::new(of_rows, key.with(1));
            let rows = (0..rows_at_once.min(of_rows)).map(|turn| first + shuffled.forward(turn));
            (row_bytes, rows.collect())
        }
        WorkloadKind::Sequential => unreachable!("a stream has no rows"),
    };
    let row = |(row, number): (&u64, u64)| Piece {
        offset: row * row_bytes,
        bytes: row_bytes,
        at: number * row_bytes,
    };
    rows.iter().zip(0..).map(row).collect()
}

impl Theory {
    fn of(pieces: &[Piece], block_bytes: u64) -> Theory {
        let mut blocks: Vec<u64> = pieces
            .iter()
            .flat_map(|piece| piece.offset / block_bytes..(piece.offset + piece.bytes).div_ceil(block_bytes))
            .collect();
        blocks.sort_unstable();
        blocks.dedup();
        let reads = 1 + blocks.windows(2).filter(|pair| pair[1] != pair[0] + 1).count() as u64;
        Theory { reads, bytes: blocks.len() as u64 * block_bytes }
    }
}

fn check_rows(pieces: &[Piece], buffer: &[u8]) -> anyhow::Result<()> {
    for piece in pieces {
        let row = &buffer[piece.at as usize..(piece.at + piece.bytes) as usize];
        let mut words = row.chunks_exact(8).zip(piece.offset / 8..);
        let right = words.all(|(bytes, number)| bytes == word(number).to_le_bytes());
        anyhow::ensure!(right, "the bytes read at offset {} are not those written there", piece.offset);
    }
    Ok(())
}
