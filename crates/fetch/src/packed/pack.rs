//! Batched packing (DiskGNN section 5.2). The features are read once from start to end, or, if parts have few rows, only
//! those. Every row is copied to each part that contains it, through one block of memory per part. If memory has no room
//! for a block of every part, parts are packed in episodes, each with a separate pass. Parts of caches whose final order
//! is another are put in order at once, as far as memory has room for whole parts; the others are moved later. A safe
//! point is written from time to time: synced data and the progress of each part, from which a later process resumes.

use super::outputs::{Output, OutputSizes, TARGETS, WANTS};
use super::plain::Plain;
use super::write::{PackWork, PackWriter, remove};
use super::{blocks_for, file};
use crate::{FetchError, Result, RowFormat, StoredRow};
use crossbeam_channel::{Receiver, Sender, bounded};
use esker_io::{
    AlignedBuffer, DIRECT_ALIGN, Files, IoError, Options, Piece, Queue, SequentialWriter, Stream,
};
use esker_plan::is_read_row_by_row;
use esker_store::{ArrayFile, BlockArray, PAYLOAD_OFFSET, StoreError};
use esker_types::Unit;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: usize = BlockArray::BLOCK_BYTES as usize;
/// Bytes of features read at a time, and the number of such chunks.
const CHUNK_BYTES: u64 = 8 << 20;
const CHUNKS: usize = 3;
/// Most rows that are read one by one: their numbers take the memory of a chunk.
const MOST_SINGLE_ROWS: u64 = CHUNK_BYTES / 8;
/// Such rows that are requested at a time.
const ROWS_AT_A_TIME: usize = 1 << 13;
/// Checksums read or written at a time.
const SUMS_AT_A_TIME: usize = 1 << 13;
/// Blocks in flight to the disk, per thread.
const WRITES: usize = 32;
/// Rows of a part's array that are in memory.
const WINDOW: usize = 1024;
/// Memory per part: its block, its window of rows, and its state.
const PART_MEMORY: u64 = BLOCK as u64 + (WINDOW * 8) as u64 + 128;
/// One part in this many of the memory is not used for whole parts.
const SPARED_PART: u64 = 32;

/// Memory apart from that of parts.
pub(crate) fn fixed_bytes(threads: u64) -> u64 {
    CHUNK_BYTES * (CHUNKS as u64 + 2)
        + threads * (WRITES as u64 * BLOCK as u64 + write_options().memory_bytes(WRITES as u64))
        + read_options().memory_bytes(CHUNKS as u64)
}

/// Memory for the whole file of rows: a checksum per block, and the location of each part.
fn lasting_bytes(blocks: u64, outputs: u64) -> u64 {
    blocks * 8 + outputs * size_of::<Output>() as u64
}

/// The smallest memory for packing `blocks` blocks of rows for `batches` batches.
pub(crate) fn least_bytes(threads: u64, blocks: u64, batches: u64) -> u64 {
    // Parts of caches are far larger than a block.
    let outputs = batches + blocks / 256;
    lasting_bytes(blocks, outputs) + fixed_bytes(threads) + threads * PART_MEMORY
}

/// Memory for this many parts at a time, without what depends on the packed data.
#[cfg(test)]
pub(crate) fn memory_for(threads: u64, parts: u64) -> u64 {
    fixed_bytes(threads) + parts * PART_MEMORY + (1 << 14)
}

fn write_options() -> Options {
    Options {
        depth: WRITES,
        max_bytes: BLOCK as u64,
        staging_bytes: BLOCK as u64,
        in_flight_bytes: (WRITES * BLOCK) as u64,
        ..Options::default()
    }
}

fn read_options() -> Options {
    Options { depth: 16, ..Options::default() }
}

/// A part being packed.
struct Part<W> {
    output: Output,
    /// Blocks written.
    written: u64,
    /// Bytes in the open block.
    filled: usize,
    /// The open block, or the whole part if it is put in order at once.
    block: AlignedBuffer,
    /// The next row of its array, and the rows of the array that are in memory. With their positions in the part, if
    /// the whole part is in memory.
    next: u64,
    window: Vec<W>,
    window_at: u64,
    positions: Option<Vec<u32>>,
}

/// Progress of a part at a safe point. The content of its open block is written to that block's location. It is written
/// there again later, with more after it, so a kill in between does not change it. The same goes for a whole part.
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct SafePart {
    written: u64,
    filled: u64,
    next: u64,
}

/// The parts of an episode: from `first` up to `end`, exclusive. Parts of caches before `ordered` are put in order at
/// once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Episode {
    first: u64,
    end: u64,
    ordered: u64,
}

impl Episode {
    /// As many parts as fit `bytes` bytes, from `first` on. As many of them as then fit as a whole are put in order, but
    /// at most `most` bytes: a safe point writes all of them.
    fn fitting(outputs: &[Output], first: u64, bytes: u64, row_bytes: u64, most: u64) -> Episode {
        let count = (bytes / PART_MEMORY).min(outputs.len() as u64 - first);
        let mut left = bytes.saturating_sub(count * PART_MEMORY + bytes / SPARED_PART).min(most);
        let parts = &outputs[first as usize..(first + count) as usize];
        let fits = |output: &Output| {
            left = left.checked_sub(more_bytes(output, row_bytes))?;
            Some(())
        };
        let ordered = parts.iter().map_while(fits).count() as u64;
        Episode { first, end: first + count, ordered: first + ordered }
    }

    /// Its memory.
    fn bytes(&self, outputs: &[Output], row_bytes: u64) -> u64 {
        let ordered = &outputs[self.first as usize..self.ordered as usize];
        (self.end - self.first) * PART_MEMORY
            + ordered.iter().map(|output| more_bytes(output, row_bytes)).sum::<u64>()
    }

    fn orders(&self, number: u64, output: &Output) -> bool {
        output.is_moved() && number < self.ordered
    }
}

/// Memory of a part that is put in order at once, beyond that of any part.
fn more_bytes(output: &Output, row_bytes: u64) -> u64 {
    match output.is_moved() {
        true => (blocks_for(output.rows, row_bytes) * BLOCK as u64) + (WINDOW * 4) as u64,
        false => 0,
    }
}

/// Parts of caches that are in order already: from the first number up to the second, exclusive.
pub(crate) fn ordered_parts(writer: &PackWriter) -> Vec<[u64; 2]> {
    writer.journal.done("ordered").unwrap_or_default()
}

/// The last safe point of an episode.
struct SafePoint {
    /// Feature rows processed.
    row: u64,
    /// Its parts. Empty if no row was processed.
    parts: Vec<SafePart>,
}

impl SafePoint {
    fn path(work: &Path) -> PathBuf {
        work.join("packing")
    }

    /// The safe point of an episode, if there is one.
    fn read(work: &Path, episode: Episode) -> Result<Option<SafePoint>> {
        let path = SafePoint::path(work);
        if !path.exists() {
            return Ok(None);
        }
        let mut head = [0u64; 4];
        Plain::<u64>::open(&path, 0)?.fill(0, &mut head)?;
        let [first, end, ordered, row] = head;
        if (Episode { first, end, ordered }) != episode {
            return Ok(None);
        }
        let mut parts = Vec::new();
        let start = size_of_val(&head) as u64;
        Plain::<SafePart>::open(&path, start)?.read(0, (end - first) as usize, &mut parts)?;
        Ok(Some(SafePoint { row, parts }))
    }

    fn write(&self, work: &Path, episode: Episode) -> Result<()> {
        replace(&SafePoint::path(work), |file| {
            let Episode { first, end, ordered } = episode;
            file.write_all(bytemuck::bytes_of(&[first, end, ordered, self.row]))?;
            file.write_all(bytemuck::cast_slice(&self.parts))
        })
    }
}

/// How the features are read, in ascending order of rows.
enum FeatureReads {
    /// All rows, in large reads.
    InOrder(Stream),
    /// Only rows that parts contain, because they are few.
    Single { queue: Queue, rows: Vec<u64>, row_bytes: u64 },
}

impl FeatureReads {
    /// Reads the rows of a chunk. Of rows that no part contains, the content is not specified.
    fn read(&mut self, chunk: &mut Chunk, features: &ArrayFile) -> Result<()> {
        match self {
            FeatureReads::InOrder(stream) => {
                stream.read_exact(&mut chunk.bytes).map_err(StoreError::io(features.path()))?;
            }
            FeatureReads::Single { queue, rows, row_bytes } => {
                let first = chunk.first_row;
                let end = first + chunk.bytes.len() as u64 / (*row_bytes).max(1);
                let inside = rows.partition_point(|row| *row < first)..rows.partition_point(|row| *row < end);
                for some in rows[inside].chunks(ROWS_AT_A_TIME) {
                    let pieces = some.iter().map(|row| Piece {
                        offset: PAYLOAD_OFFSET + row * *row_bytes,
                        bytes: *row_bytes,
                        at: (row - first) * *row_bytes,
                    });
                    let pieces: Vec<Piece> = pieces.collect();
                    queue.read(0, &pieces, &mut chunk.bytes).map_err(StoreError::from)?;
                }
            }
        }
        Ok(())
    }
}

/// A chunk of the features.
struct Chunk {
    first_row: u64,
    bytes: Vec<u8>,
}

enum WorkerOrder {
    /// Copy from a chunk the rows of its parts.
    Take(Arc<Chunk>),
    /// Sync everything written, open blocks included, and report the progress of parts.
    Rest,
    /// Close parts.
    Close,
}

/// Packs every part.
pub(crate) fn pack<W: StoredRow>(
    writer: &PackWriter,
    laid: OutputSizes,
    features: &ArrayFile,
    format: &RowFormat,
    work: &PackWork,
) -> Result<()> {
    if writer.journal.done::<bool>("packed").is_some() {
        return Ok(());
    }
    let (folder, row_bytes) = (writer.work(), format.row_bytes() as u64);
    let outputs = Output::all(&folder, laid.outputs)?;
    let bytes_of = |outputs: &[Output]| outputs.iter().map(|output| output.rows).sum::<u64>() * row_bytes;
    work.progress.stage("pack rows", Some(bytes_of(&outputs)), Unit::Bytes);
    let sums_path = folder.join("sums");
    let started: Option<Episode> = writer.journal.done("packing");
    let array = match started {
        Some(_) => BlockArray::reopen(writer.directory(), file::ROWS, laid.blocks),
        None => {
            remove(&SafePoint::path(&folder))?;
            let array = BlockArray::create(writer.directory(), file::ROWS, laid.blocks)?;
            write_sums(&sums_path, &no_sums(laid.blocks))?;
            array
        }
    };
    let sums = read_sums(&sums_path, laid.blocks)?;
    let threads = work.sizes.threads.max(1);
    let lasting = lasting_bytes(laid.blocks, laid.outputs) + fixed_bytes(threads as u64);
    // At least a part per thread.
    let left = work.sizes.memory_bytes.saturating_sub(lasting).max(threads as u64 * PART_MEMORY);
    let mut first = started.map_or(0, |episode| episode.first);
    work.progress.advance(bytes_of(&outputs[..first as usize]));
    while first < laid.outputs {
        // If an episode was started, finish it with the same parts, if memory has room for it.
        let fits = |episode: &Episode| episode.first == first && episode.bytes(&outputs, row_bytes) <= left;
        let begun = started.filter(fits);
        let safe = begun.map(|episode| SafePoint::read(&folder, episode)).transpose()?.flatten();
        let episode = match (&safe, begun) {
            (Some(_), Some(episode)) => episode,
            _ => Episode::fitting(&outputs, first, left, row_bytes, work.sizes.safe_points.packed_bytes),
        };
        if safe.is_none() {
            // The safe point is about blocks that are written again.
            remove(&SafePoint::path(&folder))?;
        }
        writer.journal.record("packing", &episode)?;
        let pass = Pass {
            writer,
            work,
            episode,
            files: array.files(&write_options())?,
            outputs: &outputs[first as usize..episode.end as usize],
            sums: &sums,
            sums_path: &sums_path,
            row_bytes,
            threads,
        };
        pass.run::<W>(features, safe)?;
        write_sums(&sums_path, &sums)?;
        let mut ordered = ordered_parts(writer);
        // This episode may have been packed before, up to here.
        ordered.retain(|[begin, _]| *begin < first);
        ordered.push([first, episode.ordered]);
        writer.journal.record("ordered", &ordered)?;
        first = episode.end;
        writer.journal.record("packing", &Episode { first, end: first, ordered: first })?;
        remove(&SafePoint::path(&folder))?;
    }
    work.progress.finish();
    Ok(writer.journal.record("packed", &true)?)
}

fn no_sums(blocks: u64) -> Vec<AtomicU64> {
    (0..blocks).map(|_| AtomicU64::new(0)).collect()
}

/// Checksums of blocks, as of the last safe point.
pub(crate) fn read_sums(path: &Path, blocks: u64) -> Result<Vec<AtomicU64>> {
    let (file, sums) = (Plain::<u64>::open(path, 0)?, no_sums(blocks));
    let mut some = Vec::new();
    for (turn, sums) in sums.chunks(SUMS_AT_A_TIME).enumerate() {
        file.read((turn * SUMS_AT_A_TIME) as u64, sums.len(), &mut some)?;
        sums.iter().zip(&some).for_each(|(sum, found)| sum.store(*found, Ordering::Relaxed));
    }
    Ok(sums)
}

pub(crate) fn write_sums(path: &Path, sums: &[AtomicU64]) -> Result<()> {
    replace(path, |file| {
        sums.chunks(SUMS_AT_A_TIME).try_for_each(|some| {
            let some: Vec<u64> = some.iter().map(|sum| sum.load(Ordering::Relaxed)).collect();
            file.write_all(bytemuck::cast_slice(&some))
        })
    })
}

/// Writes a file under another name, syncs it and renames it.
pub(crate) fn replace(
    path: &Path,
    write: impl FnOnce(&mut SequentialWriter) -> std::io::Result<()>,
) -> Result<()> {
    let new = path.with_extension("new");
    let written = SequentialWriter::create(&new).and_then(|mut file| {
        write(&mut file)?;
        file.finish()
    });
    written.and_then(|_| fs::rename(&new, path)).map_err(StoreError::io(path))?;
    Ok(())
}

/// One pass over the features.
struct Pass<'a> {
    writer: &'a PackWriter<'a>,
    work: &'a PackWork<'a>,
    episode: Episode,
    files: Files,
    outputs: &'a [Output],
    sums: &'a [AtomicU64],
    sums_path: &'a Path,
    row_bytes: u64,
    threads: usize,
}

/// Packing threads, with a channel for orders and one for answers each.
struct Workers(Vec<(Sender<WorkerOrder>, Receiver<Answer>)>);

/// The progress of a worker's parts, if it was requested.
type Answer = Result<Vec<SafePart>>;

impl Workers {
    /// Gives a chunk to all workers.
    fn give(&self, chunk: &Arc<Chunk>) -> Result<()> {
        for (send, answers) in &self.0 {
            // A worker that has failed reports it in its answer.
            if send.send(WorkerOrder::Take(chunk.clone())).is_err() {
                answers.recv().unwrap_or(Ok(Vec::new()))?;
            }
        }
        Ok(())
    }

    /// Sends an order to all workers and waits for their answers.
    fn ask(&self, make: impl Fn() -> WorkerOrder) -> Result<Vec<Vec<SafePart>>> {
        self.0.iter().for_each(|(send, _)| drop(send.send(make())));
        self.0.iter().map(|(_, answers)| answers.recv().unwrap_or(Ok(Vec::new()))).collect()
    }
}

impl Pass<'_> {
    /// Reads the features from the last safe point of the episode on.
    fn run<W: StoredRow>(&self, features: &ArrayFile, safe: Option<SafePoint>) -> Result<()> {
        let entry = features.entry();
        let from = safe.as_ref().map_or(0, |safe| safe.row);
        let mut reads = self.feature_reads::<W>(features, from)?;
        let parts = safe.map_or_else(Vec::new, |safe| safe.parts);
        self.progressed(from);
        std::thread::scope(|scope| {
            let mut workers = Workers(Vec::new());
            for number in 0..self.threads {
                let (send, orders) = bounded(1);
                let (answer, answers) = bounded(1);
                let parts = &parts;
                // A worker allocates the memory of its parts.
                scope.spawn(move || self.worker(self.parts::<W>(number, parts), &orders, &answer));
                workers.0.push((send, answers));
            }
            let (mut row, mut unsafe_bytes) = (from, 0u64);
            let mut chunks: Vec<Arc<Chunk>> = Vec::new();
            while row < entry.rows {
                let stopped = self.work.stop.is_asked();
                if stopped || unsafe_bytes >= self.work.sizes.safe_points.packed_bytes {
                    unsafe_bytes = 0;
                    self.make_safe(&workers, row)?;
                }
                if stopped {
                    return Err(FetchError::Stopped);
                }
                let mut chunk = spare(&mut chunks);
                let chunk_bytes = CHUNK_BYTES.min(self.work.sizes.safe_points.packed_bytes);
                let count = (chunk_bytes / self.row_bytes.max(1)).clamp(1, entry.rows - row);
                chunk.first_row = row;
                chunk.bytes.resize((count * self.row_bytes) as usize, 0);
                reads.read(&mut chunk, features)?;
                let chunk = Arc::new(chunk);
                workers.give(&chunk)?;
                chunks.push(chunk);
                row += count;
                unsafe_bytes += self.progressed(count);
            }
            workers.ask(|| WorkerOrder::Close).map(drop)
        })
    }

    /// The way to read rows from `from` on that takes less time.
    fn feature_reads<W: StoredRow>(&self, features: &ArrayFile, from: u64) -> Result<FeatureReads> {
        let (rows, row_bytes) = (features.entry().rows, self.row_bytes);
        let accessed: u64 = self.outputs.iter().map(|output| output.rows).sum();
        let faster = || is_read_row_by_row(accessed, row_bytes, (rows - from) * row_bytes);
        if accessed <= MOST_SINGLE_ROWS && self.work.sizes.row_by_row.unwrap_or_else(faster) {
            let wants = Plain::<W>::array(&self.writer.work(), WANTS)?;
            let (mut single, mut some) = (Vec::with_capacity(accessed as usize), Vec::new());
            for output in self.outputs {
                for first in (0..output.rows).step_by(WINDOW) {
                    let count = (WINDOW as u64).min(output.rows - first) as usize;
                    wants.read(output.wants_at + first, count, &mut some)?;
                    single.extend(some.iter().map(|row| row.index() as u64));
                }
            }
            single.sort_unstable();
            single.dedup();
            let queue = features.open_files(&Options::default())?.queue().map_err(StoreError::from)?;
            return Ok(FeatureReads::Single { queue, rows: single, row_bytes });
        }
        let range = PAYLOAD_OFFSET + from * row_bytes..PAYLOAD_OFFSET + rows * row_bytes;
        let files = features.open_files(&read_options())?;
        let stream = Stream::open(&files, 0, range, 2 << 20, 4).map_err(StoreError::from)?;
        Ok(FeatureReads::InOrder(stream))
    }

    /// Writes a safe point: what was packed of the rows before `row`.
    fn make_safe(&self, workers: &Workers, row: u64) -> Result<()> {
        let found = workers.ask(|| WorkerOrder::Rest)?;
        let part = |index: usize| found[index % self.threads].get(index / self.threads).copied();
        let parts = (0..self.outputs.len()).map(|index| part(index).unwrap_or_default()).collect();
        write_sums(self.sums_path, self.sums)?;
        SafePoint { row, parts }.write(&self.writer.work(), self.episode)
    }

    /// Approximate bytes written while this many rows are processed.
    fn progressed(&self, rows: u64) -> u64 {
        let accessed: u64 = self.outputs.iter().map(|output| output.rows).sum();
        let all = self.writer.dataset.manifest().nodes.count.max(1);
        let bytes = (accessed as f64 * self.row_bytes as f64 * rows as f64 / all as f64) as u64;
        self.work.progress.advance(bytes);
        bytes
    }

    /// The parts of a worker, from their safe point or from the start.
    fn parts<W>(&self, worker: usize, safe: &[SafePart]) -> Vec<Part<W>> {
        let mine = (worker..self.outputs.len()).step_by(self.threads);
        let part = |index: usize| {
            let SafePart { written, filled, next } = safe.get(index).copied().unwrap_or_default();
            let output = self.outputs[index];
            let is_ordered = self.episode.orders(self.episode.first + index as u64, &output);
            let blocks = if is_ordered { blocks_for(output.rows, self.row_bytes) as usize } else { 1 };
            Part {
                output,
                written,
                filled: filled as usize,
                block: AlignedBuffer::new(blocks * BLOCK, DIRECT_ALIGN),
                next,
                window: Vec::new(),
                window_at: 0,
                positions: is_ordered.then(Vec::new),
            }
        };
        mine.map(part).collect()
    }

    /// A worker: a thread with its own parts and its own queue.
    fn worker<W: StoredRow>(
        &self,
        parts: Vec<Part<W>>,
        orders: &Receiver<WorkerOrder>,
        answer: &Sender<Answer>,
    ) {
        let mut worker = match PackWorker::new(self, parts) {
            Ok(worker) => worker,
            Err(error) => return drop(answer.send(Err(error))),
        };
        for order in orders {
            let done = match order {
                WorkerOrder::Take(chunk) => match worker.take(&chunk) {
                    Ok(()) => continue,
                    Err(error) => Err(error),
                },
                WorkerOrder::Rest => worker.rest(),
                WorkerOrder::Close => worker.close().map(|()| Vec::new()),
            };
            let failed = done.is_err();
            if answer.send(done).is_err() || failed {
                return;
            }
        }
    }
}

/// Reuses a chunk that every worker is done with. Each worker has one chunk in use and one waiting.
fn spare(chunks: &mut Vec<Arc<Chunk>>) -> Chunk {
    let done = chunks.iter().position(|chunk| Arc::strong_count(chunk) == 1);
    let done = done.map(|index| chunks.swap_remove(index)).and_then(Arc::into_inner);
    done.unwrap_or(Chunk { first_row: 0, bytes: Vec::new() })
}

struct PackWorker<'a, W> {
    parts: Vec<Part<W>>,
    wants: Plain<W>,
    targets: Plain<u32>,
    queue: Queue,
    spare: Vec<AlignedBuffer>,
    sums: &'a [AtomicU64],
    row_bytes: usize,
}

impl<W> Part<W> {
    /// The location of its open block, as far as it is filled, or of the whole part, if any of it is.
    fn open_block(&self) -> Piece {
        if self.positions.is_some() {
            let bytes = if self.next > 0 { self.block.len() as u64 } else { 0 };
            return Piece { offset: BlockArray::offset(self.output.block), bytes, at: 0 };
        }
        let offset = BlockArray::offset(self.output.block + self.written);
        Piece { offset, bytes: self.filled.next_multiple_of(DIRECT_ALIGN) as u64, at: 0 }
    }
}

impl<'a, W: StoredRow> PackWorker<'a, W> {
    fn new(pass: &'a Pass<'a>, parts: Vec<Part<W>>) -> Result<PackWorker<'a, W>> {
        let mut worker = PackWorker {
            parts,
            wants: Plain::array(&pass.writer.work(), WANTS)?,
            targets: Plain::array(&pass.writer.work(), TARGETS)?,
            queue: pass.files.queue().map_err(StoreError::from)?,
            spare: (0..WRITES).map(|_| AlignedBuffer::new(BLOCK, DIRECT_ALIGN)).collect(),
            sums: pass.sums,
            row_bytes: pass.row_bytes as usize,
        };
        for part in worker.parts.iter_mut() {
            let piece = part.open_block();
            if piece.bytes == 0 {
                continue;
            }
            let read = worker.queue.read(0, &[piece], &mut part.block[..piece.bytes as usize]);
            read.map_err(StoreError::from)?;
        }
        Ok(worker)
    }

    fn take(&mut self, chunk: &Chunk) -> Result<()> {
        let end = chunk.first_row + (chunk.bytes.len() / self.row_bytes.max(1)) as u64;
        let mut parts = std::mem::take(&mut self.parts);
        for part in &mut parts {
            while part.next < part.output.rows {
                let mut place = (part.next - part.window_at) as usize;
                if place >= part.window.len() {
                    let count = (WINDOW as u64).min(part.output.rows - part.next) as usize;
                    self.wants.read(part.output.wants_at + part.next, count, &mut part.window)?;
                    if let Some(positions) = &mut part.positions {
                        self.targets.read(part.output.targets_at + part.next, count, positions)?;
                    }
                    (part.window_at, place) = (part.next, 0);
                }
                let row = part.window[place].index() as u64;
                if row >= end {
                    break;
                }
                let from = (row - chunk.first_row) as usize * self.row_bytes;
                let bytes = &chunk.bytes[from..from + self.row_bytes];
                match &part.positions {
                    Some(positions) => {
                        let to = positions[place] as usize * self.row_bytes;
                        part.block[to..to + self.row_bytes].copy_from_slice(bytes);
                    }
                    None => self.put(part, bytes)?,
                }
                part.next += 1;
            }
        }
        self.parts = parts;
        Ok(())
    }

    fn put(&mut self, part: &mut Part<W>, mut row: &[u8]) -> Result<()> {
        while !row.is_empty() {
            let (now, later) = row.split_at(row.len().min(BLOCK - part.filled));
            part.block[part.filled..part.filled + now.len()].copy_from_slice(now);
            part.filled += now.len();
            row = later;
            if part.filled == BLOCK {
                self.write(part)?;
            }
        }
        Ok(())
    }

    /// Submits the write of a part's block.
    fn write(&mut self, part: &mut Part<W>) -> Result<()> {
        let fresh = self.spare()?;
        let block = std::mem::replace(&mut part.block, fresh);
        let number = part.output.block + part.written;
        self.sums[number as usize].store(BlockArray::sum(&block), Ordering::Relaxed);
        let piece = Piece { offset: BlockArray::offset(number), bytes: BLOCK as u64, at: 0 };
        self.queue.submit_write(0, vec![piece], block);
        part.written += 1;
        part.filled = 0;
        Ok(())
    }

    /// An unused block.
    fn spare(&mut self) -> Result<AlignedBuffer> {
        match self.spare.pop() {
            Some(spare) => Ok(spare),
            None => Ok(self.wait()?.ok_or(IoError::Cancelled).map_err(StoreError::from)?),
        }
    }

    fn wait(&mut self) -> Result<Option<AlignedBuffer>> {
        let Some(done) = self.queue.wait() else { return Ok(None) };
        done.result.map_err(StoreError::from)?;
        Ok(Some(done.buffer))
    }

    /// Waits for all writes and syncs them.
    fn settle(&mut self) -> Result<()> {
        while let Some(buffer) = self.wait()? {
            self.spare.push(buffer);
        }
        Ok(self.queue.sync().map_err(StoreError::from)?)
    }

    /// Writes and syncs everything, including open blocks.
    fn rest(&mut self) -> Result<Vec<SafePart>> {
        let parts = std::mem::take(&mut self.parts);
        for part in &parts {
            let piece = part.open_block();
            if piece.bytes == 0 {
                continue;
            }
            if part.positions.is_some() {
                self.queue.write(0, &[piece], &part.block).map_err(StoreError::from)?;
                continue;
            }
            let mut copy = self.spare()?;
            let bytes = piece.bytes as usize;
            copy[..bytes].copy_from_slice(&part.block[..bytes]);
            self.queue.submit_write(0, vec![piece], copy);
        }
        self.parts = parts;
        self.settle()?;
        let safe =
            |part: &Part<W>| SafePart { written: part.written, filled: part.filled as u64, next: part.next };
        Ok(self.parts.iter().map(safe).collect())
    }

    /// Writes open blocks, padded with zeros, and whole parts.
    fn close(&mut self) -> Result<()> {
        let mut parts = std::mem::take(&mut self.parts);
        for part in parts.iter_mut().filter(|part| part.filled > 0) {
            part.block[part.filled..].fill(0);
            self.write(part)?;
        }
        for part in parts.iter().filter(|part| part.positions.is_some() && part.next > 0) {
            self.queue.write(0, &[part.open_block()], &part.block).map_err(StoreError::from)?;
            for (block, content) in part.block.chunks_exact(BLOCK).enumerate() {
                self.sums[part.output.block as usize + block]
                    .store(BlockArray::sum(content), Ordering::Relaxed);
            }
        }
        self.settle()
    }
}
