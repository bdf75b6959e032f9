//! Reads arrays from front to back with several threads and compares every block with its checksum.
//!
//! Each thread has its own queue and keeps a few groups of blocks in flight while it hashes one, so the disk never
//! waits for a hash. Groups of all arrays are distributed together, so no thread is idle at the end of an array.

use crate::array::{BLOCK_BYTES, PAGE_BYTES, Sections, check_part, header_page};
use crate::verify::{Damage, NumberRule};
use crate::{FileEntry, Result, StoreError};
use esker_io::{Access, AlignedBuffer, DIRECT_ALIGN, Disk, Files, IoError, Layout, Options, Piece, Queue};
use esker_types::Progress;
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Blocks read at a time: large enough for the disk's full rate.
const BLOCKS_AT_ONCE: u64 = 32;
const GROUP_BYTES: u64 = BLOCKS_AT_ONCE * BLOCK_BYTES;
/// Groups in flight or being hashed, per thread.
const PREFETCH_GROUPS: usize = 4;
/// Part files open at a time: well below the usual limit of 1024 open files.
const MOST_PARTS_OPEN: usize = 256;

/// An array to be checked.
pub(crate) struct Target<'a> {
    /// Directory of its dataset or derived data.
    pub directory: &'a Path,
    /// Its entry in the manifest.
    pub entry: &'a FileEntry,
    /// The rule for its numbers.
    pub rule: NumberRule,
}

/// An array whose files exist with the right lengths.
struct Array<'a> {
    entry: &'a FileEntry,
    rule: NumberRule,
    layout: Layout,
    sections: Sections,
}

/// All damage of the arrays.
pub(crate) fn scan(
    disk: &dyn Disk,
    targets: &[Target],
    threads: usize,
    progress: &dyn Progress,
) -> Result<Vec<Damage>> {
    let (mut damage, mut arrays) = (Vec::new(), Vec::new());
    for target in targets {
        match find(disk, target, &mut damage)? {
            Some(array) => arrays.push(array),
            None => progress.advance(target.entry.bytes),
        }
    }
    while !arrays.is_empty() {
        let mut parts = 0;
        let fits = |array: &&Array| {
            parts += array.layout.parts().len();
            parts <= MOST_PARTS_OPEN
        };
        let count = arrays.iter().take_while(fits).count().max(1);
        let later = arrays.split_off(count);
        damage.extend(scan_together(disk, arrays, threads, progress)?);
        arrays = later;
    }
    Ok(damage)
}

/// Checks what can be checked without reading: shape, directories, lengths of the parts.
fn find<'a>(disk: &dyn Disk, target: &Target<'a>, damage: &mut Vec<Damage>) -> Result<Option<Array<'a>>> {
    let entry = target.entry;
    let layout = entry.layout(target.directory);
    let Ok(sections) = entry.sections() else {
        let problem = "its shape and its length in the manifest contradict each other".to_string();
        damage.push(Damage { path: layout.parts()[0].clone(), offset: 0, bytes: 0, problem });
        return Ok(None);
    };
    let before = damage.len();
    if let Some(stripes) = &entry.stripes
        && let Err(StoreError::StripeMissing { path, found }) = stripes.check_directories(target.directory)
    {
        let problem = StoreError::StripeMissing { path: path.clone(), found }.to_string();
        damage.push(Damage {
            path: path.join(crate::array::file_name(&entry.name)),
            offset: 0,
            bytes: 0,
            problem,
        });
        return Ok(None);
    }
    for number in 0..layout.parts().len() {
        let (offset, bytes, problem) = match check_part(disk, &layout, number, entry.bytes) {
            Ok(()) => continue,
            Err(StoreError::Missing { .. }) => {
                (0, layout.part_bytes(number, entry.bytes), "the file is missing".to_string())
            }
            Err(StoreError::WrongLength { expected_bytes, found_bytes, .. }) => {
                let (short, long) = (found_bytes.min(expected_bytes), found_bytes.max(expected_bytes));
                let problem =
                    format!("the manifest promises {expected_bytes} bytes, the file has {found_bytes}");
                (short, long - short, problem)
            }
            Err(StoreError::Inconsistent { expected, found, .. }) => {
                (0, layout.part_bytes(number, entry.bytes), format!("expected {expected}, found {found}"))
            }
            Err(StoreError::Engine(error)) => {
                damage.push(unreadable(error)?);
                continue;
            }
            Err(error) => return Err(error),
        };
        damage.push(Damage { path: layout.parts()[number].clone(), offset, bytes, problem });
    }
    Ok((damage.len() == before).then_some(Array { entry, rule: target.rule, layout, sections }))
}

fn scan_together(
    disk: &dyn Disk,
    arrays: Vec<Array>,
    threads: usize,
    progress: &dyn Progress,
) -> Result<Vec<Damage>> {
    let layouts: Vec<Layout> = arrays.iter().map(|array| array.layout.clone()).collect();
    let options = Options { depth: 32, staging_bytes: 1 << 20, max_bytes: 1 << 20, ..Options::default() };
    let files = disk.open(&layouts, Access::Read, &options)?;
    let mut queue = files.queue()?;
    let (mut damage, mut shares, mut groups) = (Vec::new(), Vec::new(), 0);
    for (file, array) in arrays.iter().enumerate() {
        if !array.check_frame(&mut queue, file, &mut damage)? {
            // Report the damaged table, not every block that it no longer matches.
            progress.advance(array.entry.bytes);
            continue;
        }
        progress.advance(array.entry.bytes - array.sections.padded_bytes);
        if array.sections.blocks > 0 {
            shares.push(Share { file, array, first_group: groups });
            groups += array.sections.blocks.div_ceil(BLOCKS_AT_ONCE);
        }
    }
    drop(queue);
    let largest = arrays.iter().map(|array| array.sections.padded_bytes).max().unwrap_or(0).min(GROUP_BYTES);
    let next = AtomicU64::new(0);
    let scan = Scan { files: &files, shares, groups, largest, next, found: Mutex::new(damage) };
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let workers = (threads as u64).clamp(1, groups.max(1));
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(|| scan.run(progress))).collect();
        workers.into_iter().map(|worker| worker.join().expect("verify workers do not panic")).collect()
    });
    results.into_iter().collect::<Result<()>>()?;
    Ok(scan.found.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

impl Array<'_> {
    /// Checks the header and the table. Returns whether the table can be trusted.
    fn check_frame(&self, queue: &mut Queue, file: usize, damage: &mut Vec<Damage>) -> Result<bool> {
        let mut page = [0u8; PAGE_BYTES as usize];
        match queue.read(file, &[Piece { offset: 0, bytes: PAGE_BYTES, at: 0 }], &mut page) {
            Ok(()) if page == header_page(self.entry, &self.sections) => {}
            Ok(()) => {
                damage.extend(self.damage(0, PAGE_BYTES, "the header differs from the manifest".to_string()))
            }
            Err(error) => damage.push(unreadable(error)?),
        }
        let (table, end) = (self.sections.table_offset, self.sections.file_bytes);
        let mut hash = Xxh3::new();
        let mut piece = vec![0u8; (end - table).min(1 << 20) as usize];
        let (mut offset, before) = (table, damage.len());
        while offset < end {
            let bytes = (end - offset).min(piece.len() as u64);
            if let Err(error) = queue.read(file, &[Piece { offset, bytes, at: 0 }], &mut piece) {
                damage.push(unreadable(error)?);
            }
            hash.update(&piece[..bytes as usize]);
            offset += bytes;
        }
        if damage.len() > before {
            return Ok(false);
        }
        if format!("{:016x}", hash.digest()) == self.entry.sums {
            return Ok(true);
        }
        let problem = "the checksum table differs from the manifest".to_string();
        damage.extend(self.damage(table, end - table, problem));
        Ok(false)
    }

    fn damage(&self, offset: u64, bytes: u64, problem: String) -> Vec<Damage> {
        damage_in(&self.layout, offset, bytes, &problem)
    }

    fn check_block(&self, start: u64, block: &[u8], sum: &[u8]) -> Vec<Damage> {
        if xxh3_64(block).to_le_bytes() != sum {
            let problem = "the checksum does not match".to_string();
            return self.damage(PAGE_BYTES + start, block.len() as u64, problem);
        }
        let payload_bytes = self.sections.payload_bytes;
        let payload = (payload_bytes - start.min(payload_bytes)).min(block.len() as u64);
        let width = self.entry.dtype.bytes();
        let broken = self.rule.broken_by(self.entry.dtype, start / width, &block[..payload as usize]);
        broken.map_or(Vec::new(), |(at, value)| {
            let problem = format!("{value} is out of range ({:?})", self.rule);
            self.damage(PAGE_BYTES + start + at, width, problem)
        })
    }
}

/// Converts a failed read to a finding. Errors that are not the file's fault (no memory, no permission, a broken
/// queue) stay errors: they are no evidence about the data.
pub(crate) fn unreadable(error: IoError) -> Result<Damage> {
    let (path, offset, bytes, problem) = match error {
        IoError::Read { path, offset, bytes, source } if is_fault(&source) => {
            (path, offset, bytes, format!("cannot be read: {source}"))
        }
        IoError::File { path, verb, source } if is_fault(&source) => {
            (path, 0, 0, format!("cannot {verb}: {source}"))
        }
        IoError::Ended { path, expected_bytes, found_bytes } => {
            let problem = format!("the file ends after {found_bytes} bytes; it was cut meanwhile");
            (path, found_bytes, expected_bytes.saturating_sub(found_bytes), problem)
        }
        error => return Err(error.into()),
    };
    Ok(Damage { path, offset, bytes, problem })
}

/// Whether the disk or its content is at fault.
fn is_fault(source: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, OutOfMemory, PermissionDenied, WouldBlock};
    // ENFILE and EMFILE. The standard library has no names for them.
    let too_many_open_files = matches!(source.raw_os_error(), Some(23 | 24));
    !too_many_open_files
        && !matches!(source.kind(), Interrupted | OutOfMemory | PermissionDenied | WouldBlock)
}

/// One finding for each part that contains some of the bytes. Stripes of one part follow each other directly, so a
/// part's share is one range.
pub(crate) fn damage_in(layout: &Layout, offset: u64, bytes: u64, problem: &str) -> Vec<Damage> {
    let mut shares: Vec<(usize, u64, u64)> = Vec::new();
    let (mut at, end) = (offset, offset.saturating_add(bytes));
    while at < end {
        let place = layout.place(at);
        let now = place.contiguous_bytes.min(end - at);
        match shares.iter_mut().find(|share| share.0 == place.part) {
            Some(share) => share.2 += now,
            None => shares.push((place.part, place.offset, now)),
        }
        at += now;
    }
    let shared = match shares.len() {
        1 => String::new(),
        parts => format!(" (the bytes lie in {parts} parts; at least one is damaged)"),
    };
    let found = |(part, offset, bytes): (usize, u64, u64)| {
        let path: PathBuf = layout.parts()[part].clone();
        Damage { path, offset, bytes, problem: format!("{problem}{shared}") }
    };
    shares.into_iter().map(found).collect()
}

/// An array's groups of blocks among those of all arrays.
struct Share<'a> {
    file: usize,
    array: &'a Array<'a>,
    first_group: u64,
}

/// The blocks of all arrays, taken in groups by whichever thread is free.
struct Scan<'a> {
    files: &'a Files,
    shares: Vec<Share<'a>>,
    groups: u64,
    /// Length of the longest group.
    largest: u64,
    next: AtomicU64,
    found: Mutex<Vec<Damage>>,
}

/// Blocks that are read together.
struct BlockGroup<'a> {
    file: usize,
    array: &'a Array<'a>,
    /// Their start in the payload.
    start: u64,
    bytes: u64,
    blocks: u64,
}

impl BlockGroup<'_> {
    fn check(&self, payload: &[u8], sums: &[u8]) -> Vec<Damage> {
        let blocks = payload.chunks(BLOCK_BYTES as usize).zip(sums.chunks_exact(8));
        let starts = (self.start..).step_by(BLOCK_BYTES as usize);
        starts
            .zip(blocks)
            .flat_map(|(start, (block, sum))| self.array.check_block(start, block, sum))
            .collect()
    }

    /// Reads a group block by block after reading it as a whole failed: the other blocks may be intact, and are
    /// checked.
    fn check_one_by_one(&self, queue: &mut Queue) -> Result<Vec<Damage>> {
        let mut damage = Vec::new();
        let mut block = vec![0u8; BLOCK_BYTES as usize + 8];
        for start in (self.start..self.start + self.bytes).step_by(BLOCK_BYTES as usize) {
            let bytes = (self.start + self.bytes - start).min(BLOCK_BYTES);
            let sum = self.array.sections.table_offset + start / BLOCK_BYTES * 8;
            let pieces = [
                Piece { offset: PAGE_BYTES + start, bytes, at: 0 },
                Piece { offset: sum, bytes: 8, at: BLOCK_BYTES },
            ];
            match queue.read(self.file, &pieces, &mut block) {
                Ok(()) => {
                    let (payload, sum) = block.split_at(BLOCK_BYTES as usize);
                    damage.extend(self.array.check_block(start, &payload[..bytes as usize], sum));
                }
                Err(error) => damage.push(unreadable(error)?),
            }
        }
        Ok(damage)
    }
}

impl Scan<'_> {
    fn take(&self) -> Option<BlockGroup<'_>> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if number >= self.groups {
            return None;
        }
        let share = self.shares.iter().rev().find(|share| share.first_group <= number)?;
        let sections = &share.array.sections;
        let first = (number - share.first_group) * BLOCKS_AT_ONCE;
        let start = first * BLOCK_BYTES;
        let bytes = (sections.padded_bytes - start).min(GROUP_BYTES);
        Some(BlockGroup {
            file: share.file,
            array: share.array,
            start,
            bytes,
            blocks: bytes.div_ceil(BLOCK_BYTES),
        })
    }

    fn run(&self, progress: &dyn Progress) -> Result<()> {
        let mut queue = self.files.queue()?;
        let sums_at = self.largest;
        let mut spare = Vec::new();
        for _ in 0..PREFETCH_GROUPS.min(self.groups as usize) {
            let buffer = AlignedBuffer::new((sums_at + BLOCKS_AT_ONCE * 8) as usize, DIRECT_ALIGN);
            queue.register(&buffer);
            spare.push((buffer, Vec::new()));
        }
        let mut coming: VecDeque<BlockGroup> = VecDeque::new();
        loop {
            while let Some((buffer, mut pieces)) = spare.pop() {
                let Some(group) = self.take() else { break };
                let sums = group.array.sections.table_offset + group.start / BLOCK_BYTES * 8;
                pieces.clear();
                pieces.push(Piece { offset: PAGE_BYTES + group.start, bytes: group.bytes, at: 0 });
                pieces.push(Piece { offset: sums, bytes: group.blocks * 8, at: sums_at });
                queue.submit(group.file, pieces, buffer);
                coming.push_back(group);
            }
            let (Some(finished), Some(group)) = (queue.wait(), coming.pop_front()) else { return Ok(()) };
            let damage = match finished.result {
                Ok(()) => {
                    let (payload, sums) = finished.buffer.split_at(sums_at as usize);
                    group.check(&payload[..group.bytes as usize], sums)
                }
                Err(error) => {
                    unreadable(error)?;
                    group.check_one_by_one(&mut queue)?
                }
            };
            if !damage.is_empty() {
                self.found.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).extend(damage);
            }
            queue.forget(group.file, PAGE_BYTES + group.start, group.bytes);
            progress.advance(group.bytes);
            spare.push((finished.buffer, finished.pieces));
        }
    }
}
