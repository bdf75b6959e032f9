//! The last step of packing. Rows of caches are stored in feature order at first, where memory had no room for whole
//! parts. This step moves them to their final order, part by part and in place. A kill may leave some parts half moved. The journal records them before they are
//! touched, and their rows are then read from the features again. Finally, rows that batches share get their checksums.

use super::layout::Laid;
use super::outputs::{Output, TARGETS, WANTS, part_rows};
use super::pack::{ordered_parts, read_sums, write_sums};
use super::plain::Plain;
use super::write::{PackWork, PackWriter};
use super::{Entry, SegmentEntry, blocks_for, file, shared_row_sum};
use crate::{Result, RowFormat, StoredRow};
use esker_io::{AlignedBuffer, DIRECT_ALIGN, Files, Options, Piece, Queue};
use esker_store::{ArrayFile, BlockArray, FileEntry, PAYLOAD_OFFSET, StoreError};
use esker_types::Unit;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const BLOCK: u64 = BlockArray::BLOCK_BYTES;
/// Parts moved between two syncs.
const WINDOW: usize = 16;
/// Rows read from the features at a time, when parts are made again.
const ROWS_AT_A_TIME: usize = 4096;

/// Memory of each worker for a graph of `nodes` nodes: a part twice, the positions of its rows, and two queues.
fn worker_bytes(nodes: u64, row_bytes: u64) -> u64 {
    // A part has each row at most once.
    let rows = part_rows(row_bytes).min(nodes);
    let queues = 2 * Options::default().memory_bytes(ROWS_AT_A_TIME as u64);
    2 * (rows * row_bytes).next_multiple_of(BLOCK) + rows * 4 + ROWS_AT_A_TIME as u64 * 8 + queues
}

/// Memory that workers share: a queue that syncs and reads shared rows, a checksum per block, parts, and entries of
/// batches.
fn fixed_bytes(blocks: u64, parts: u64, batches: u64) -> u64 {
    let known = blocks * 8 + parts * 2 * size_of::<Output>() as u64 + batches * size_of::<Entry>() as u64;
    Options::default().memory_bytes(4) + known
}

/// Memory for the checksums of shared rows: a part, a checksum per row of a cache, and a batch's positions.
fn sums_bytes(nodes: u64, row_bytes: u64) -> u64 {
    part_rows(row_bytes).min(nodes) * row_bytes + nodes * 8 + nodes * 4
}

/// The smallest memory that works.
pub(crate) fn memory_bytes(nodes: u64, row_bytes: u64, blocks: u64, batches: u64) -> u64 {
    let parts = batches + blocks / 256;
    fixed_bytes(blocks, parts, batches) + worker_bytes(nodes, row_bytes).max(sums_bytes(nodes, row_bytes))
}

/// Moves rows of caches and closes the array, which begins the stage `finish`. Returns the array, and the entries with all their checksums.
pub(crate) fn order<W: StoredRow>(
    writer: &PackWriter,
    laid: &Laid,
    features: &ArrayFile,
    format: &RowFormat,
    work: &PackWork,
) -> Result<(FileEntry, Vec<Entry>)> {
    let (folder, row_bytes) = (writer.work(), format.row_bytes() as u64);
    let outputs = Output::all(&folder, laid.outputs)?;
    let array = BlockArray::reopen(writer.directory(), file::ROWS, laid.blocks);
    let sums_path = folder.join("sums");
    let sums = read_sums(&sums_path, laid.blocks)?;
    let files = array.files(&Options::default())?;
    let mut queue = files.queue().map_err(StoreError::from)?;
    let ordered = ordered_parts(writer);
    let is_ordered = |number: u64| ordered.iter().any(|[first, end]| (*first..*end).contains(&number));
    let moved = (0..).zip(outputs).filter(|(number, output)| output.is_moved() && !is_ordered(*number));
    let moved: Vec<Output> = moved.map(|(_, output)| output).collect();
    let mover = Mover {
        rows: &files,
        features: features.open_files(&Options::default())?,
        wants: Plain::<W>::array(&folder, WANTS)?,
        targets: Plain::<u32>::array(&folder, TARGETS)?,
        sums: &sums,
        row_bytes,
        work,
        workers: workers(laid, format, work),
        most_bytes: moved.iter().map(|output| blocks_for(output.rows, row_bytes) * BLOCK).max().unwrap_or(0),
    };
    let bytes_of = |moved: &[Output]| moved.iter().map(|output| output.rows * row_bytes).sum::<u64>();
    work.progress.stage("order caches", Some(bytes_of(&moved)), Unit::Bytes);
    let mut done: usize = writer.journal.done("moved").unwrap_or(0);
    // Parts before this one may be half moved.
    let touched: usize = writer.journal.done("touched").unwrap_or(0);
    work.progress.advance(bytes_of(&moved[..done]));
    while done < moved.len() {
        work.check_stop()?;
        let end = (done + WINDOW).max(touched).min(moved.len());
        if end > touched {
            writer.journal.record("touched", &end)?;
        }
        mover.place_all(&moved[..end], done, touched)?;
        queue.sync().map_err(StoreError::from)?;
        write_sums(&sums_path, &sums)?;
        writer.journal.record("moved", &end)?;
        done = end;
    }
    work.progress.finish();
    let mut entries = writer.laid_entries(laid)?;
    if laid.shared > 0 {
        sum_shared(writer, laid, &mut queue, &mut entries, row_bytes, work)?;
    }
    // What follows is all of closing the directory.
    work.progress.stage("finish", None, Unit::Bytes);
    drop(queue);
    let all: Vec<u64> = sums.into_iter().map(AtomicU64::into_inner).collect();
    Ok((array.finish(&all)?, entries))
}

/// Closes an array of rows none of which are moved.
pub(crate) fn close_rows(writer: &PackWriter, blocks: u64) -> Result<FileEntry> {
    let sums = read_sums(&writer.work().join("sums"), blocks)?;
    let sums: Vec<u64> = sums.into_iter().map(AtomicU64::into_inner).collect();
    Ok(BlockArray::reopen(writer.directory(), file::ROWS, blocks).finish(&sums)?)
}

/// Number of workers that fit the memory.
fn workers(laid: &Laid, format: &RowFormat, work: &PackWork) -> usize {
    let fixed = fixed_bytes(laid.blocks, laid.outputs, laid.batches);
    let left = work.sizes.memory_bytes.saturating_sub(fixed);
    let worker = worker_bytes(format.rows(), format.row_bytes() as u64);
    (left / worker).clamp(1, work.sizes.threads.max(1) as u64) as usize
}

/// State that is shared by workers.
struct Mover<'a, W> {
    rows: &'a Files,
    features: Files,
    wants: Plain<W>,
    targets: Plain<u32>,
    sums: &'a [AtomicU64],
    row_bytes: u64,
    work: &'a PackWork<'a>,
    workers: usize,
    /// Bytes of the largest part.
    most_bytes: u64,
}

/// State of one worker.
struct OrderWorker<W> {
    queue: Option<Queue>,
    from: AlignedBuffer,
    to: AlignedBuffer,
    places: Vec<u32>,
    accessed: Vec<W>,
}

impl<W> OrderWorker<W> {
    /// A worker for parts of at most `bytes` bytes.
    fn new(bytes: usize) -> OrderWorker<W> {
        let buffer = || AlignedBuffer::new(bytes, DIRECT_ALIGN);
        OrderWorker { queue: None, from: buffer(), to: buffer(), places: Vec::new(), accessed: Vec::new() }
    }
}

impl<W: StoredRow> Mover<'_, W> {
    /// Moves all parts from number `first` on. Those before `touched` may be half moved.
    fn place_all(&self, moved: &[Output], first: usize, touched: usize) -> Result<()> {
        let next = AtomicUsize::new(first);
        let worker = || -> Result<()> {
            let mut worker = OrderWorker::<W>::new(self.most_bytes as usize);
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(output) = moved.get(number) else { return Ok(()) };
                self.place(output, number < touched, &mut worker)?;
            }
        };
        std::thread::scope(|scope| {
            let handles: Vec<_> = (0..self.workers).map(|_| scope.spawn(worker)).collect();
            handles
                .into_iter()
                .try_for_each(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Puts a part's rows in order. It reads them from the part, or from the features if the part may be half moved.
    fn place(&self, output: &Output, touched: bool, worker: &mut OrderWorker<W>) -> Result<()> {
        let bytes = (output.rows * self.row_bytes) as usize;
        let padded = (blocks_for(output.rows, self.row_bytes) * BLOCK) as usize;
        let queue = match &mut worker.queue {
            Some(queue) => queue,
            none => none.insert(self.rows.queue().map_err(StoreError::from)?),
        };
        self.targets.read(output.targets_at, output.rows as usize, &mut worker.places)?;
        let piece = Piece { offset: BlockArray::offset(output.block), bytes: padded as u64, at: 0 };
        worker.to[bytes..padded].fill(0);
        if touched {
            self.gather(output, worker)?;
        } else {
            queue.read(0, &[piece], &mut worker.from[..padded]).map_err(StoreError::from)?;
            let row_bytes = self.row_bytes as usize;
            for (row, place) in worker.from.chunks_exact(row_bytes.max(1)).zip(&worker.places) {
                let at = *place as usize * row_bytes;
                worker.to[at..at + row_bytes].copy_from_slice(row);
            }
        }
        let Some(queue) = &mut worker.queue else { return Ok(()) };
        queue.write(0, &[piece], &worker.to[..padded]).map_err(StoreError::from)?;
        for (block, content) in worker.to[..padded].chunks_exact(BLOCK as usize).enumerate() {
            self.sums[output.block as usize + block].store(BlockArray::sum(content), Ordering::Relaxed);
        }
        self.work.progress.advance(bytes as u64);
        Ok(())
    }

    /// Reads a part's rows from the features, each to its position.
    fn gather(&self, output: &Output, worker: &mut OrderWorker<W>) -> Result<()> {
        let mut queue = self.features.queue().map_err(StoreError::from)?;
        let mut pieces = Vec::with_capacity(ROWS_AT_A_TIME);
        let bytes = self.row_bytes;
        for (turn, places) in worker.places.chunks(ROWS_AT_A_TIME).enumerate() {
            let first = output.wants_at + (turn * ROWS_AT_A_TIME) as u64;
            self.wants.read(first, places.len(), &mut worker.accessed)?;
            pieces.clear();
            pieces.extend(worker.accessed.iter().zip(places).map(|(row, place)| Piece {
                offset: PAYLOAD_OFFSET + row.index() as u64 * bytes,
                bytes,
                at: *place as u64 * bytes,
            }));
            queue.read(0, &pieces, &mut worker.to).map_err(StoreError::from)?;
        }
        Ok(())
    }
}

/// Reads every segment's cache once. For each batch it sums the checksums of the rows that the batch will read of it.
fn sum_shared(
    writer: &PackWriter,
    laid: &Laid,
    queue: &mut Queue,
    entries: &mut [Entry],
    row_bytes: u64,
    work: &PackWork,
) -> Result<()> {
    let (mut segments, mut places, mut sums) = (Vec::new(), Vec::<u32>::new(), Vec::new());
    let count = entries.len().div_ceil(laid.layout.segment.max(1) as usize);
    Plain::<SegmentEntry>::array(writer.directory(), file::SEGMENTS)?.read(0, count, &mut segments)?;
    let shared = Plain::<u32>::array(writer.directory(), file::SHARED)?;
    work.progress.stage(
        "check caches",
        Some(segments.iter().map(|one| one.rows * row_bytes).sum()),
        Unit::Bytes,
    );
    let most = segments.iter().map(|segment| segment.rows).max().unwrap_or(0);
    let rows_at_a_time = part_rows(row_bytes).min(most).max(1);
    let mut buffer = AlignedBuffer::new((rows_at_a_time * row_bytes) as usize, DIRECT_ALIGN);
    for (segment, batches) in segments.iter().zip(entries.chunks_mut(laid.layout.segment.max(1) as usize)) {
        work.check_stop()?;
        sums.clear();
        for first in (0..segment.rows).step_by(rows_at_a_time as usize) {
            let rows = rows_at_a_time.min(segment.rows - first);
            let bytes = rows * row_bytes;
            let offset = BlockArray::offset(segment.block) + first * row_bytes;
            let piece = Piece { offset, bytes, at: 0 };
            queue.read(0, &[piece], &mut buffer).map_err(StoreError::from)?;
            let all = buffer[..bytes as usize].chunks_exact(row_bytes.max(1) as usize);
            sums.extend(all.zip(first..).map(|(row, place)| shared_row_sum(row, place)));
            work.progress.advance(bytes);
        }
        for entry in batches {
            shared.read(entry.shared_at, entry.shared_rows as usize, &mut places)?;
            entry.shared_rows_sum =
                places.iter().fold(0u64, |sum, place| sum.wrapping_add(sums[*place as usize]));
        }
    }
    work.progress.finish();
    Ok(())
}
