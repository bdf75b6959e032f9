//! Where every row goes: which are set aside for memory, how large segments must be for the disk, which rows a batch has to
//! itself and in which order, and a word for each row of each batch that says where it will be found.

use super::plain::Plain;
use super::write::{ACCESSES, ENTRIES, Logged, PackWriter};
use super::{Entry, Largest, SegmentEntry, blocks_for, file, shared_start};
use crate::{FetchError, Result, RowFormat, StoredRow};
use esker_plan::{Hottest, MOST_READ, Placement, SegmentRows, SegmentSizes, ranks};
use esker_store::{ArrayWriter, BlockArray, FileEntry, StoreError};
use esker_types::{ByteCount, Dtype, Progress, SlotIndex, Unit};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::unix::fs::FileExt;
use xxhash_rust::xxh3::xxh3_64;

/// What the layout may take.
pub struct Room<'a> {
    /// Rows to set aside for memory, once the largest batch is known.
    pub slots: &'a dyn Fn(&Largest) -> Result<u64>,
    /// Whether somebody said how many; else a few more or less will do.
    pub slots_said: bool,
    /// Bytes on disk, those that preparing needs for a time included.
    pub disk_bytes: u64,
    /// Whether somebody said so; else a layout from before, made when another part of the disk was free, is as good.
    pub disk_bytes_said: bool,
    /// Batches of a segment, instead of the fewest that fit.
    pub segment: Option<u32>,
    /// Whether shared rows are ordered by the batches that want them; else by their numbers.
    pub by_hash: bool,
}

/// Rows that are ordered in memory at a time.
const PART_BYTES: u64 = 32 << 20;

/// What the layout came to; its lists are in the work directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Laid {
    pub slots: u64,
    pub slots_asked: u64,
    /// The disk budget that somebody gave.
    pub disk_bytes: Option<u64>,
    pub segment: u32,
    pub misses: u64,
    pub shared: u64,
    pub largest: Largest,
    /// Parts of the file of rows, each a list of rows in rising order.
    pub outputs: u64,
    /// Of those, at the front, parts of the cache for memory.
    pub blocks: u64,
    /// Arrays that are finished.
    pub files: Vec<FileEntry>,
}

impl Laid {
    /// Whether it is what a layout for this room would be, or as good.
    pub fn suits(&self, room: &Room, slots: u64) -> bool {
        let disk = self.disk_bytes == room.disk_bytes_said.then_some(room.disk_bytes);
        let rows = match room.slots_said {
            true => self.slots_asked == slots,
            false => self.slots_asked <= slots && self.slots_asked >= slots / 4 * 3,
        };
        disk && rows && room.segment.is_none_or(|segment| segment == self.segment)
    }
}

/// A part of the file of rows: a list of rows that are stored there, in rising order at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Output {
    /// The first of its blocks.
    pub block: u64,
    pub rows: u64,
    /// Where its list starts.
    pub wants_at: u64,
    /// Where the list of the places they are moved to in the end starts; `u64::MAX` where they stay.
    pub targets_at: u64,
}

impl Output {
    pub const COLUMNS: u64 = size_of::<Output>() as u64 / 8;

    pub fn is_moved(&self) -> bool {
        self.targets_at != u64::MAX
    }
}

pub(crate) const OUTPUTS: &str = "outputs";
pub(crate) const LAID: &str = "laid-entries";
pub(crate) const WANTS: &str = "wants";
pub(crate) const TARGETS: &str = "targets";

/// Rows of a part: as many whole blocks as make about [`PART_BYTES`], so that parts follow each other without a gap.
pub(crate) fn part_rows(row_bytes: u64) -> u64 {
    let block = BlockArray::BLOCK_BYTES;
    let (mut a, mut b) = (row_bytes.max(1), block);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    let unit = block / a;
    unit * (PART_BYTES / (unit * row_bytes.max(1))).max(1)
}

/// Bytes of memory that laying out takes at most.
pub(crate) fn memory_bytes(nodes: u64, batches: u64, largest_nodes: u64, threads: u64) -> u64 {
    let tables = Hottest::bytes_for(nodes)
        + SegmentSizes::bytes_for(nodes, batches).max(SegmentRows::bytes_for(nodes));
    // Its nodes, their words, lists that are being sorted, and as they come out; of others, which are written meanwhile, those.
    let batch = largest_nodes * (8 + 4 + 2 * 16 + 8 + 4) + largest_nodes * (4 + 8 + 4);
    let parts = PART_BYTES / 16;
    tables + batch * 2 * threads.max(1) + batches * (size_of::<Entry>() as u64 + 64) + parts
}

/// Writers of the lists.
struct Lists<W> {
    words: ArrayWriter,
    shared: ArrayWriter,
    wants: ArrayWriter,
    targets: ArrayWriter,
    outputs: ArrayWriter,
    wanted: u64,
    targeted: u64,
    count: u64,
    /// The next free block.
    block: u64,
    row_bytes: u64,
    rows: std::marker::PhantomData<W>,
}

impl<W: StoredRow> Lists<W> {
    /// Adds a part, given its rows in rising order and, where they are moved in the end, their places.
    fn add(&mut self, rows: &[W], targets: Option<&[u32]>) -> Result<u64> {
        let block = self.block;
        let output = Output {
            block,
            rows: rows.len() as u64,
            wants_at: self.wanted,
            targets_at: if targets.is_some() { self.targeted } else { u64::MAX },
        };
        self.wants.write_elements(rows)?;
        self.targets.write_elements(targets.unwrap_or_default())?;
        self.outputs.write(bytemuck::bytes_of(&output))?;
        self.wanted += rows.len() as u64;
        self.targeted += targets.map_or(0, |targets| targets.len() as u64);
        self.count += 1;
        self.block += blocks_for(rows.len() as u64, self.row_bytes);
        Ok(block)
    }

    /// Adds a cache part by part, given its rows in the order they are to lie in. Returns its first block.
    fn add_cache(&mut self, rows: &[W]) -> Result<u64> {
        let block = self.block;
        for part in rows.chunks(part_rows(self.row_bytes) as usize) {
            let mut order: Vec<(u64, u32)> =
                part.iter().zip(0..).map(|(row, place)| (row.index() as u64, place)).collect();
            order.sort_unstable();
            let rows: Vec<W> = order.iter().map(|(row, _)| W::of(esker_types::NodeId(*row))).collect();
            let targets: Vec<u32> = order.iter().map(|(_, place)| *place).collect();
            self.add(&rows, Some(&targets))?;
        }
        Ok(block)
    }
}

/// What one batch gets.
struct BatchLayout<W> {
    words: Vec<u32>,
    /// Its own rows, rising.
    packed: Vec<W>,
    /// Its places in the segment's cache, rising.
    shared: Vec<u32>,
    words_sum: u64,
    shared_sum: u64,
}

fn lay_batch<W: StoredRow>(
    nodes: &[W],
    hottest: &Hottest,
    segment: Option<&SegmentRows>,
    row_bytes: u64,
) -> Result<BatchLayout<W>> {
    let mut words = vec![0u32; nodes.len()];
    let (mut packed, mut shared) = (Vec::new(), Vec::new());
    for (at, node) in nodes.iter().enumerate() {
        if let Some(soon) = nodes.get(at + 16) {
            esker_io::prefetch(hottest.slots(), soon.index());
        }
        match hottest.slot(*node) {
            Some(slot) => words[at] = Placement::Hit(SlotIndex(slot)).word(),
            None => match segment.and_then(|segment| segment.place(*node)) {
                Some(place) => shared.push((place, at as u32)),
                None => packed.push((*node, at as u32)),
            },
        }
    }
    radsort::sort_by_key(&mut packed, |(node, _)| node.index() as u64);
    radsort::sort_by_key(&mut shared, |(place, _)| *place);
    let first_shared = shared_start(packed.len() as u64, row_bytes);
    let read = first_shared + shared.len() as u64;
    if read >= MOST_READ as u64 {
        let problem =
            format!("a batch reads {read} rows, and {} can be named; take smaller batches", MOST_READ - 1);
        return Err(FetchError::Request { problem });
    }
    for (index, (_, at)) in packed.iter().enumerate() {
        words[*at as usize] = Placement::Read(index as u32).word();
    }
    for (index, (_, at)) in shared.iter().enumerate() {
        words[*at as usize] = Placement::Read((first_shared + index as u64) as u32).word();
    }
    let shared: Vec<u32> = shared.into_iter().map(|(place, _)| place).collect();
    Ok(BatchLayout {
        words_sum: xxh3_64(bytemuck::cast_slice(&words)),
        shared_sum: xxh3_64(bytemuck::cast_slice(&shared)),
        words,
        packed: packed.into_iter().map(|(node, _)| node).collect(),
        shared,
    })
}

/// Lays everything out.
pub(crate) fn lay_out<W: StoredRow>(
    writer: &PackWriter,
    logged: &Logged,
    format: &RowFormat,
    room: &Room,
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<Laid> {
    let (work, row_bytes) = (writer.work(), format.row_bytes() as u64);
    let accesses = Plain::<W>::array(&work, ACCESSES)?;
    let mut entries = writer.entries(ENTRIES)?;
    let slots_asked = (room.slots)(&logged.largest)?;
    let hottest = count::<W>(writer, &entries, format, slots_asked, progress)?;
    let mut nodes: Vec<W> = Vec::new();
    let slots = hottest.cached();
    let segment = choose_segment(&accesses, &entries, &hottest, logged, room, row_bytes, progress)?;
    let mut lists = Lists::<W> {
        words: ArrayWriter::create(writer.directory(), file::WORDS, Dtype::U32, 1)?,
        shared: ArrayWriter::create(writer.directory(), file::SHARED, Dtype::U32, 1)?,
        wants: ArrayWriter::create(
            &work,
            WANTS,
            if size_of::<W>() == 8 { Dtype::U64 } else { Dtype::U32 },
            1,
        )?,
        targets: ArrayWriter::create(&work, TARGETS, Dtype::U32, 1)?,
        outputs: ArrayWriter::create(&work, OUTPUTS, Dtype::U64, Output::COLUMNS)?,
        wanted: 0,
        targeted: 0,
        count: 0,
        block: 0,
        row_bytes,
        rows: std::marker::PhantomData,
    };
    add_hottest(&mut lists, &hottest, slots, &work.join("ranked"))?;
    let mut segments = ArrayWriter::create(
        writer.directory(),
        file::SEGMENTS,
        Dtype::U64,
        size_of::<SegmentEntry>() as u64 / 8,
    )?;
    let mut sharing = (segment > 1).then(|| SegmentRows::new(format.rows()));
    let (mut largest, mut shared_at) = (logged.largest, 0);
    progress.stage("lay rows out", Some(logged.batches), Unit::Count("batches"));
    // Some batches are laid out while those before them are written.
    let at_a_time = pool.current_num_threads().max(1) * 2;
    let batches_of_cache = if sharing.is_some() { segment as usize } else { entries.len().max(1) };
    for (number, batches) in entries.chunks_mut(batches_of_cache).enumerate() {
        if let Some(sharing) = &mut sharing {
            let ranks = ranks(batches.len() as u32);
            sharing.begin();
            for (entry, rank) in batches.iter().zip(ranks) {
                accesses.read(entry.words_at, entry.nodes as usize, &mut nodes)?;
                sharing.see(rank, nodes.iter().copied().filter(|node| hottest.slot(*node).is_none()));
            }
            sharing.close(room.by_hash);
            let rows: Vec<W> =
                sharing.shared().iter().map(|row| W::of(esker_types::NodeId(*row as u64))).collect();
            let cache = SegmentEntry { block: lists.add_cache(&rows)?, rows: rows.len() as u64 };
            segments.write(bytemuck::bytes_of(&cache))?;
        } else {
            let none = vec![SegmentEntry::default(); batches.len()];
            segments.write(bytemuck::cast_slice(&none))?;
        }
        let lay = |entry: &Entry| {
            let mut nodes: Vec<W> = Vec::new();
            accesses.read(entry.words_at, entry.nodes as usize, &mut nodes)?;
            lay_batch(&nodes, &hottest, sharing.as_ref(), row_bytes)
        };
        let mut write = |first: usize, batches: &mut [Entry], all: Vec<Result<BatchLayout<W>>>| {
            for ((at, entry), laid) in batches.iter_mut().enumerate().zip(all) {
                let laid = laid?;
                lists.words.write_elements(&laid.words)?;
                lists.shared.write_elements(&laid.shared)?;
                (entry.words_sum, entry.shared_sum) = (laid.words_sum, laid.shared_sum);
                entry.packed_rows = laid.packed.len() as u64;
                entry.shared_rows = laid.shared.len() as u64;
                entry.segment = if segment > 1 { number } else { first + at } as u64;
                entry.shared_at = shared_at;
                entry.block = lists.add(&laid.packed, None)?;
                shared_at += entry.shared_rows;
                largest.packed_rows = largest.packed_rows.max(entry.packed_rows);
                largest.shared_rows = largest.shared_rows.max(entry.shared_rows);
                progress.advance(1);
            }
            Ok::<(), FetchError>(())
        };
        let mut before: (usize, &mut [Entry], Vec<Result<BatchLayout<W>>>) = (0, &mut [], Vec::new());
        for (turn, some) in batches.chunks_mut(at_a_time).enumerate() {
            let (first, written, laid) = before;
            let (done, all) = pool.install(|| {
                rayon::join(|| write(first, written, laid), || some.par_iter().map(lay).collect())
            });
            done?;
            before = (turn * at_a_time, some, all);
        }
        let (first, written, laid) = before;
        write(first, written, laid)?;
    }
    let mut laid = ArrayWriter::create(&work, LAID, Dtype::U64, Entry::COLUMNS)?;
    laid.write_elements(bytemuck::cast_slice::<Entry, u64>(&entries))?;
    laid.finish()?;
    let (outputs, blocks) = (lists.count, lists.block);
    lists.wants.finish()?;
    lists.targets.finish()?;
    lists.outputs.finish()?;
    let files = vec![lists.words.finish()?, lists.shared.finish()?, segments.finish()?];
    progress.finish();
    let misses = hottest.misses();
    let disk_bytes = room.disk_bytes_said.then_some(room.disk_bytes);
    Ok(Laid {
        slots,
        slots_asked,
        disk_bytes,
        segment,
        misses,
        shared: shared_at,
        largest,
        outputs,
        blocks,
        files,
    })
}

/// Counts what batches want, and gives slots to the rows wanted most.
pub(crate) fn count<W: StoredRow>(
    writer: &PackWriter,
    entries: &[Entry],
    format: &RowFormat,
    slots: u64,
    progress: &dyn Progress,
) -> Result<Hottest> {
    let accesses = Plain::<W>::array(&writer.work(), ACCESSES)?;
    let all = entries.iter().map(|entry| entry.nodes).sum();
    progress.stage("count rows", Some(all), Unit::Count("rows"));
    let (mut hottest, mut nodes) = (Hottest::new(format.rows()), Vec::<W>::new());
    for entry in entries {
        accesses.read(entry.words_at, entry.nodes as usize, &mut nodes)?;
        hottest.see(&nodes);
        progress.advance(entry.nodes);
    }
    hottest.choose(slots);
    progress.finish();
    Ok(hottest)
}

/// What is on disk whatever the segments: samples, words, rows for memory, lists of work, ends of blocks.
fn fixed_bytes<W>(hottest: &Hottest, logged: &Logged, row_bytes: u64) -> (u64, u64) {
    let id_bytes = size_of::<W>() as u64;
    let cached = hottest.cached() * (row_bytes + id_bytes + 4) + BlockArray::BLOCK_BYTES;
    let others = logged.sample_bytes
        + logged.accesses * (4 + id_bytes)
        + hottest.misses() * 4
        + logged.batches * (3 * Entry::COLUMNS * 8 + 2 * BlockArray::BLOCK_BYTES);
    (cached, others)
}

/// A row on disk, and what preparing keeps of it.
fn stored_bytes<W>(row_bytes: u64) -> u64 {
    row_bytes + size_of::<W>() as u64 + 4
}

/// Bytes of rows set aside, and of all else where every batch's rows are packed.
pub(crate) fn packed_bytes<W>(hottest: &Hottest, logged: &Logged, row_bytes: u64) -> (u64, u64) {
    let (cached, others) = fixed_bytes::<W>(hottest, logged, row_bytes);
    (cached, others + hottest.misses() * stored_bytes::<W>(row_bytes))
}

/// Parts of the cache for memory. Rows come in rising order and go to the part of their slot; what a part has is known, so
/// each has its place in a file from the start.
fn add_hottest<W: StoredRow>(
    lists: &mut Lists<W>,
    hottest: &Hottest,
    slots: u64,
    path: &std::path::Path,
) -> Result<()> {
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
    let file = file.map_err(StoreError::io(path))?;
    let rows_of_part = part_rows(lists.row_bytes);
    let parts = slots.div_ceil(rows_of_part) as usize;
    // A few entries of each part wait in memory: row and place.
    let most = ((PART_BYTES / 16) as usize / parts.max(1)).clamp(16, 4096);
    let mut waiting: Vec<Vec<[u64; 2]>> = vec![Vec::new(); parts];
    let mut written = vec![0u64; parts];
    let mut flush = |part: usize, entries: &mut Vec<[u64; 2]>| -> Result<()> {
        let at = (part as u64 * rows_of_part + written[part]) * 16;
        file.write_all_at(bytemuck::cast_slice(entries), at).map_err(StoreError::io(path))?;
        written[part] += entries.len() as u64;
        entries.clear();
        Ok(())
    };
    for (row, slot) in hottest.slots().iter().enumerate().filter(|(_, slot)| **slot != u32::MAX) {
        let part = (*slot as u64 / rows_of_part) as usize;
        waiting[part].push([row as u64, *slot as u64 % rows_of_part]);
        if waiting[part].len() == most {
            flush(part, &mut waiting[part])?;
        }
    }
    for (part, entries) in waiting.iter_mut().enumerate() {
        flush(part, entries)?;
    }
    drop(waiting);
    for part in 0..parts as u64 {
        let count = rows_of_part.min(slots - part * rows_of_part) as usize;
        let mut entries = vec![[0u64; 2]; count];
        let at = part * rows_of_part * 16;
        file.read_exact_at(bytemuck::cast_slice_mut(&mut entries), at).map_err(StoreError::io(path))?;
        let rows: Vec<W> = entries.iter().map(|[row, _]| W::of(esker_types::NodeId(*row))).collect();
        let targets: Vec<u32> = entries.iter().map(|[_, place]| *place as u32).collect();
        lists.add(&rows, Some(&targets))?;
    }
    std::fs::remove_file(path).map_err(StoreError::io(path))?;
    Ok(())
}

/// The fewest batches that a segment must have for everything to fit the disk.
fn choose_segment<W: StoredRow>(
    accesses: &Plain<W>,
    entries: &[Entry],
    hottest: &Hottest,
    logged: &Logged,
    room: &Room,
    row_bytes: u64,
    progress: &dyn Progress,
) -> Result<u32> {
    let batches = entries.len() as u64;
    let (cached, others) = fixed_bytes::<W>(hottest, logged, row_bytes);
    let (fixed, stored_bytes) = (cached + others, stored_bytes::<W>(row_bytes));
    let most = room.disk_bytes.saturating_sub(fixed) / stored_bytes;
    let asked = room.segment.map(|segment| segment.clamp(1, batches.max(1) as u32));
    let fits = hottest.misses() <= most && room.disk_bytes >= fixed;
    if fits && asked.is_none_or(|segment| segment == 1) {
        return Ok(1);
    }
    let rows = hottest.slots().len() as u64;
    if rows >= u32::MAX as u64 {
        let problem =
            format!("segments name rows by 32 bits, and there are {rows}; allow more --disk-budget");
        return Err(FetchError::Request { problem });
    }
    let mut sizes = SegmentSizes::new(rows, batches as u32);
    progress.stage("size segments", Some(batches), Unit::Count("batches"));
    let mut nodes: Vec<W> = Vec::new();
    for (batch, entry) in entries.iter().enumerate() {
        accesses.read(entry.words_at, entry.nodes as usize, &mut nodes)?;
        let on_disk = nodes.iter().copied().filter(|node| hottest.slot(*node).is_none());
        sizes.see(batch as u32, on_disk);
        progress.advance(1);
    }
    sizes.close();
    progress.finish();
    let allowed = if room.disk_bytes >= fixed { most } else { 0 };
    let found = match asked {
        Some(size) => Some(sizes.rows(size)).filter(|rows| *rows > allowed).map_or(Ok((size, 0)), Err),
        None => sizes.smallest(allowed),
    };
    match found {
        Ok((size, _)) => Ok(size),
        Err(fewest) => Err(FetchError::Disk {
            needed: ByteCount(fixed + fewest * stored_bytes),
            allowed: ByteCount(room.disk_bytes),
        }),
    }
}
