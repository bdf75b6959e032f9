//! Batched packing (DiskGNN section 5.2): the features are read once from front to back, and every row goes to each part that
//! wants it, through one block of memory a part. Where there is not memory for a block for every part, parts are packed in
//! episodes, each with a pass of its own. What is done is made safe from time to time.

use super::file;
use super::layout::{Laid, OUTPUTS, Output, WANTS};
use super::plain::Plain;
use super::write::{PackSizes, PackWriter};
use crate::{Result, RowFormat, StoredRow};
use crossbeam_channel::{Receiver, Sender, bounded};
use esker_io::{
    AlignedBuffer, DIRECT_ALIGN, Files, IoError, Options, Piece, Queue, SequentialWriter, Stream,
};
use esker_store::{ArrayFile, BlockArray, PAYLOAD_OFFSET, StoreError};
use esker_types::{Progress, Unit};
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: usize = BlockArray::BLOCK_BYTES as usize;
/// Bytes of features read at a time, and how many such pieces there are.
const CHUNK_BYTES: u64 = 8 << 20;
const CHUNKS: usize = 3;
/// What is written between two moments of safety.
const SAFE_BYTES: u64 = 4 << 30;
/// Blocks on their way to the disk, for each thread.
const WRITES: usize = 32;
/// Rows of a list that are in memory, for each part.
const WINDOW: usize = 1024;
/// Memory for a part: its block, its list, and what is known of it.
const PART_MEMORY: u64 = BLOCK as u64 + (WINDOW * 8) as u64 + 128;

/// Memory beside that of parts.
pub(crate) fn fixed_bytes(threads: u64) -> u64 {
    CHUNK_BYTES * (CHUNKS as u64 + 2)
        + threads * (WRITES as u64 * BLOCK as u64 + write_options().memory_bytes(WRITES as u64))
        + read_options().memory_bytes(CHUNKS as u64)
}

/// The least that packing takes.
pub(crate) fn least_bytes(threads: u64) -> u64 {
    fixed_bytes(threads) + threads * PART_MEMORY
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
    /// Blocks that were written.
    written: u64,
    /// Bytes of the block that is open.
    filled: usize,
    block: AlignedBuffer,
    /// The next row of its list, and those of the list that are in memory.
    next: u64,
    window: Vec<W>,
    window_at: u64,
}

/// What is known of a part when it is made safe; its open block follows.
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct SafePart {
    written: u64,
    filled: u64,
    next: u64,
}

/// How far packing is.
#[derive(Debug, Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
struct Packed {
    /// The first part of the episode.
    first: u64,
    /// Rows of the features that the episode has been through.
    row: u64,
    /// Lanes that packed it; each has a file of its parts where there were any rows.
    lanes: usize,
    /// Which of their files are meant.
    turn: u64,
}

/// The file of a lane's parts.
fn safe_path(work: &Path, lane: usize, turn: u64) -> PathBuf {
    work.join(format!("packing-{lane}-{turn}"))
}

/// A piece of the features.
struct Chunk {
    first_row: u64,
    bytes: Vec<u8>,
}

enum Order {
    /// Takes from a chunk what its parts want.
    Take(Arc<Chunk>),
    /// Makes everything written safe, and how far parts are, in files of this turn.
    Rest(u64),
    /// Closes parts.
    Close,
}

/// Packs every part.
pub(crate) fn pack<W: StoredRow>(
    writer: &PackWriter,
    laid: &Laid,
    features: &ArrayFile,
    format: &RowFormat,
    sizes: PackSizes,
    progress: &dyn Progress,
) -> Result<()> {
    let work = writer.work();
    if writer.journal.done::<bool>("packed").is_some() {
        return Ok(());
    }
    let mut outputs = Vec::new();
    Plain::<Output>::array(&work, OUTPUTS)?.read(0, laid.outputs as usize, &mut outputs)?;
    let started: Option<Packed> = writer.journal.done("packing");
    let array = match started {
        Some(_) => BlockArray::reopen(writer.directory(), file::ROWS, laid.blocks),
        None => BlockArray::create(writer.directory(), file::ROWS, laid.blocks)?,
    };
    let mut at = started.unwrap_or_default();
    let sums: Vec<AtomicU64> = (0..laid.blocks).map(|_| AtomicU64::new(0)).collect();
    let sums_path = work.join("sums");
    if started.is_some() {
        let mut found = Vec::new();
        Plain::<u64>::open(&sums_path, 0)?.read(0, laid.blocks as usize, &mut found)?;
        sums.iter().zip(found).for_each(|(sum, found)| sum.store(found, Ordering::Relaxed));
    }
    // An episode is finished by as many lanes as began it.
    let threads = if at.row > 0 { at.lanes } else { sizes.threads.max(1) };
    let memory = sizes.memory_bytes.saturating_sub(fixed_bytes(threads as u64));
    let episode = (memory / PART_MEMORY).max(threads as u64);
    let wanted: u64 = outputs.iter().map(|output| output.rows).sum();
    progress.stage("pack rows", Some(wanted * format.row_bytes() as u64), Unit::Bytes);
    let done: u64 = outputs[..at.first as usize].iter().map(|output| output.rows).sum();
    progress.advance(done * format.row_bytes() as u64);
    while at.first < outputs.len() as u64 {
        let end = (at.first + episode).min(outputs.len() as u64);
        let pass = Pass {
            writer,
            files: array.files(&write_options())?,
            outputs: &outputs[at.first as usize..end as usize],
            wants: work.join(format!("{WANTS}.bin")),
            sums: &sums,
            row_bytes: format.row_bytes() as u64,
            threads,
            progress,
        };
        pass.run::<W>(features, at, &sums_path)?;
        write_sums(&sums_path, &sums)?;
        // Files of this episode must not be taken for those of the next.
        let turn = at.turn + wanted;
        at = Packed { first: end, turn, ..Packed::default() };
        writer.journal.record("packing", &at)?;
    }
    progress.finish();
    writer.journal.record("packed", &true)?;
    Ok(())
}

pub(crate) fn write_sums(path: &Path, sums: &[AtomicU64]) -> Result<()> {
    replace(path, |file| {
        sums.chunks(1 << 13).try_for_each(|some| {
            let some: Vec<u64> = some.iter().map(|sum| sum.load(Ordering::Relaxed)).collect();
            file.write_all(bytemuck::cast_slice(&some))
        })
    })
}

/// Writes a file under another name, syncs, renames.
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
    files: Files,
    outputs: &'a [Output],
    wants: PathBuf,
    sums: &'a [AtomicU64],
    row_bytes: u64,
    threads: usize,
    progress: &'a dyn Progress,
}

impl Pass<'_> {
    fn run<W: StoredRow>(&self, features: &ArrayFile, from: Packed, sums_path: &Path) -> Result<()> {
        let work = self.writer.work();
        let rows_at_a_time = (CHUNK_BYTES / self.row_bytes.max(1)).max(1);
        let entry = features.entry();
        let bytes = entry.rows * self.row_bytes;
        let start = PAYLOAD_OFFSET + from.row * self.row_bytes;
        let files = features.open_files(&read_options())?;
        let mut stream =
            Stream::open(&files, 0, start..PAYLOAD_OFFSET + bytes, 2 << 20, 4).map_err(StoreError::from)?;
        std::thread::scope(|scope| {
            let mut lanes: Vec<(Sender<Order>, Receiver<Result<()>>)> = Vec::new();
            for number in 0..self.threads {
                let (send, orders) = bounded(1);
                let (answer, answers) = bounded(1);
                let safe = match from.row {
                    0 => None,
                    _ => Some(Plain::<u8>::open(&safe_path(&work, number, from.turn), 0)?),
                };
                let parts = self.parts::<W>(number, safe)?;
                scope.spawn(move || self.work(number, parts, &orders, &answer));
                lanes.push((send, answers));
            }
            let ask = |make: &dyn Fn() -> Order| -> Result<()> {
                // A lane that has failed says so in its answer.
                lanes.iter().for_each(|(send, _)| drop(send.send(make())));
                lanes.iter().try_for_each(|(_, answers)| answers.recv().unwrap_or(Ok(())))
            };
            let (mut row, mut unsafe_bytes, mut turn) = (from.row, 0u64, from.turn);
            let mut chunks: Vec<Arc<Chunk>> = Vec::new();
            while row < entry.rows {
                let count = rows_at_a_time.min(entry.rows - row);
                // A chunk that every lane is done with serves again; lanes have a chunk each and one waiting.
                let done = chunks.iter().position(|chunk| Arc::strong_count(chunk) == 1);
                let done = done.map(|index| chunks.swap_remove(index)).and_then(Arc::into_inner);
                let mut chunk = done.unwrap_or(Chunk { first_row: 0, bytes: Vec::new() });
                chunk.first_row = row;
                chunk.bytes.resize((count * self.row_bytes) as usize, 0);
                let read = stream.read_exact(&mut chunk.bytes);
                read.map_err(StoreError::io(features.path()))?;
                let chunk = Arc::new(chunk);
                for (send, answers) in &lanes {
                    if send.send(Order::Take(chunk.clone())).is_err() {
                        answers.recv().unwrap_or(Ok(()))?;
                    }
                }
                chunks.push(chunk);
                row += count;
                unsafe_bytes += self.progressed(count);
                if unsafe_bytes >= SAFE_BYTES && row < entry.rows {
                    unsafe_bytes = 0;
                    ask(&|| Order::Rest(turn + 1))?;
                    write_sums(sums_path, self.sums)?;
                    turn += 1;
                    let packed = Packed { first: from.first, row, lanes: self.threads, turn };
                    self.writer.journal.record("packing", &packed)?;
                    self.forget(turn - 1)?;
                }
            }
            ask(&|| Order::Close)
        })
    }

    /// Files of an earlier turn, or of an episode that is over, are not needed any more.
    fn forget(&self, turn: u64) -> Result<()> {
        for lane in 0..self.threads {
            let path = safe_path(&self.writer.work(), lane, turn);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(StoreError::io(&path)(error).into());
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// About what is written while so many rows are gone through.
    fn progressed(&self, rows: u64) -> u64 {
        let wanted: u64 = self.outputs.iter().map(|output| output.rows).sum();
        let all = self.writer.dataset.manifest().nodes.count.max(1);
        let bytes = (wanted as f64 * self.row_bytes as f64 * rows as f64 / all as f64) as u64;
        self.progress.advance(bytes);
        bytes
    }

    /// The parts of a lane, as they were made safe or from their start.
    fn parts<W: StoredRow>(&self, lane: usize, safe: Option<Plain<u8>>) -> Result<Vec<Part<W>>> {
        let mut parts = Vec::new();
        let head = size_of::<SafePart>() as u64;
        for (index, output) in self.outputs.iter().skip(lane).step_by(self.threads).enumerate() {
            let mut part = Part {
                output: *output,
                written: 0,
                filled: 0,
                block: AlignedBuffer::new(BLOCK, DIRECT_ALIGN),
                next: 0,
                window: Vec::new(),
                window_at: 0,
            };
            if let Some(safe) = &safe {
                let at = index as u64 * (head + BLOCK as u64);
                let mut known = [SafePart::default()];
                safe.fill(at, bytemuck::cast_slice_mut(&mut known))?;
                safe.fill(at + head, &mut part.block)?;
                let [SafePart { written, filled, next }] = known;
                (part.written, part.filled, part.next) = (written, filled as usize, next);
            }
            parts.push(part);
        }
        Ok(parts)
    }

    /// A lane: a thread with parts and a queue of its own.
    fn work<W: StoredRow>(
        &self,
        number: usize,
        parts: Vec<Part<W>>,
        orders: &Receiver<Order>,
        answer: &Sender<Result<()>>,
    ) {
        let mut lane = match Lane::new(self, parts) {
            Ok(lane) => lane,
            Err(error) => return drop(answer.send(Err(error))),
        };
        for order in orders {
            let done = match order {
                Order::Take(chunk) => match lane.take(&chunk) {
                    Ok(()) => continue,
                    Err(error) => Err(error),
                },
                Order::Rest(turn) => lane.rest(&safe_path(&self.writer.work(), number, turn)),
                Order::Close => lane.close(),
            };
            let failed = done.is_err();
            if answer.send(done).is_err() || failed {
                return;
            }
        }
    }
}

struct Lane<'a, W> {
    parts: Vec<Part<W>>,
    wants: Plain<W>,
    queue: Queue,
    spare: Vec<AlignedBuffer>,
    sums: &'a [AtomicU64],
    row_bytes: usize,
}

impl<'a, W: StoredRow> Lane<'a, W> {
    fn new(pass: &'a Pass<'a>, parts: Vec<Part<W>>) -> Result<Lane<'a, W>> {
        let queue = pass.files.queue().map_err(StoreError::from)?;
        let spare = (0..WRITES).map(|_| AlignedBuffer::new(BLOCK, DIRECT_ALIGN)).collect();
        let wants = Plain::open(&pass.wants, PAYLOAD_OFFSET)?;
        Ok(Lane { parts, wants, queue, spare, sums: pass.sums, row_bytes: pass.row_bytes as usize })
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
                    (part.window_at, place) = (part.next, 0);
                }
                let row = part.window[place].index() as u64;
                if row >= end {
                    break;
                }
                let from = (row - chunk.first_row) as usize * self.row_bytes;
                self.put(part, &chunk.bytes[from..from + self.row_bytes])?;
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

    /// Sends a part's block on its way.
    fn write(&mut self, part: &mut Part<W>) -> Result<()> {
        let fresh = match self.spare.pop() {
            Some(fresh) => fresh,
            None => self.wait()?.ok_or(IoError::Cancelled).map_err(StoreError::from)?,
        };
        let block = std::mem::replace(&mut part.block, fresh);
        let number = part.output.block + part.written;
        self.sums[number as usize].store(BlockArray::sum(&block), Ordering::Relaxed);
        let piece = Piece { offset: BlockArray::offset(number), bytes: BLOCK as u64, at: 0 };
        self.queue.submit_write(0, vec![piece], block);
        part.written += 1;
        part.filled = 0;
        Ok(())
    }

    fn wait(&mut self) -> Result<Option<AlignedBuffer>> {
        let Some(done) = self.queue.wait() else { return Ok(None) };
        done.result.map_err(StoreError::from)?;
        Ok(Some(done.buffer))
    }

    /// Waits for every block, and makes them safe.
    fn settle(&mut self) -> Result<()> {
        while let Some(buffer) = self.wait()? {
            self.spare.push(buffer);
        }
        Ok(self.queue.sync().map_err(StoreError::from)?)
    }

    fn rest(&mut self, path: &Path) -> Result<()> {
        self.settle()?;
        replace(path, |file| {
            self.parts.iter().try_for_each(|part| {
                let known = SafePart { written: part.written, filled: part.filled as u64, next: part.next };
                file.write_all(bytemuck::bytes_of(&known))?;
                file.write_all(&part.block)
            })
        })
    }

    /// Writes what is in open blocks, zeros behind it.
    fn close(&mut self) -> Result<()> {
        let mut parts = std::mem::take(&mut self.parts);
        for part in parts.iter_mut().filter(|part| part.filled > 0) {
            part.block[part.filled..].fill(0);
            self.write(part)?;
        }
        self.settle()
    }
}
