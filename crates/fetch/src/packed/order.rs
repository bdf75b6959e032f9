//! The last step: rows of caches lie in the order in which the features have them, and are moved to their own, part by part.
//! A part that is being moved is in a file of its own until it is safe in its place. Then rows that batches share get their
//! checksums.

use super::layout::{LAID, Laid, OUTPUTS, Output, TARGETS};
use super::pack::{replace, write_sums};
use super::plain::Plain;
use super::write::PackWriter;
use super::{Entry, SegmentEntry, blocks_for, file, shared_row_sum};
use crate::{Result, RowFormat};
use esker_io::{AlignedBuffer, DIRECT_ALIGN, Options, Piece, Queue};
use esker_store::{BlockArray, FileEntry, StoreError};
use esker_types::{Progress, Unit};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: u64 = BlockArray::BLOCK_BYTES;

/// Memory that it takes: a part twice.
pub(crate) fn memory_bytes(row_bytes: u64) -> u64 {
    let part = (super::layout::part_rows(row_bytes) * row_bytes).next_multiple_of(BLOCK);
    2 * part + super::layout::part_rows(row_bytes) * 4 + Options::default().memory_bytes(4)
}

/// Moves rows of caches, and closes the array. Returns it, and the entries with all their checksums.
pub(crate) fn order(
    writer: &PackWriter,
    laid: &Laid,
    format: &RowFormat,
    progress: &dyn Progress,
) -> Result<(FileEntry, Vec<Entry>)> {
    let (work, row_bytes) = (writer.work(), format.row_bytes() as u64);
    let mut outputs = Vec::new();
    Plain::<Output>::array(&work, OUTPUTS)?.read(0, laid.outputs as usize, &mut outputs)?;
    let targets = Plain::<u32>::array(&work, TARGETS)?;
    let array = BlockArray::reopen(writer.directory(), file::ROWS, laid.blocks);
    let sums_path = work.join("sums");
    let mut found = Vec::new();
    Plain::<u64>::open(&sums_path, 0)?.read(0, laid.blocks as usize, &mut found)?;
    let sums: Vec<AtomicU64> = found.into_iter().map(AtomicU64::new).collect();
    let mut queue = array.files(&Options::default())?.queue().map_err(StoreError::from)?;
    let moved: Vec<&Output> = outputs.iter().filter(|output| output.is_moved()).collect();
    let all: u64 = moved.iter().map(|output| output.rows * row_bytes).sum();
    progress.stage("order caches", Some(all), Unit::Bytes);
    let done: u64 = writer.journal.done("moved").unwrap_or(0);
    let moving: Option<u64> = writer.journal.done("moving");
    let aside = work.join("moving");
    let (mut from, mut to) = (AlignedBuffer::new(0, DIRECT_ALIGN), AlignedBuffer::new(0, DIRECT_ALIGN));
    let mut places = Vec::new();
    for (number, output) in moved.iter().enumerate() {
        let bytes = output.rows * row_bytes;
        progress.advance(bytes);
        if (number as u64) < done {
            continue;
        }
        let padded = (blocks_for(output.rows, row_bytes) * BLOCK) as usize;
        if to.len() < padded {
            (from, to) = (AlignedBuffer::new(padded, DIRECT_ALIGN), AlignedBuffer::new(padded, DIRECT_ALIGN));
        }
        let piece = Piece { offset: BlockArray::offset(output.block), bytes: padded as u64, at: 0 };
        if moving == Some(number as u64) {
            // It was safe aside when the kill came; what is in its place may be half of it.
            Plain::<u8>::open(&aside, 0)?.fill(0, &mut to[..padded])?;
        } else {
            queue.read(0, &[piece], &mut from[..padded]).map_err(StoreError::from)?;
            targets.read(output.targets_at, output.rows as usize, &mut places)?;
            let row_bytes = row_bytes as usize;
            to[bytes as usize..padded].fill(0);
            for (row, place) in from.chunks_exact(row_bytes.max(1)).zip(&places) {
                let at = *place as usize * row_bytes;
                to[at..at + row_bytes].copy_from_slice(row);
            }
            replace(&aside, |file| file.write_all(&to[..padded]))?;
            writer.journal.record("moving", &(number as u64))?;
        }
        queue.write(0, &[piece], &to[..padded]).map_err(StoreError::from)?;
        queue.sync().map_err(StoreError::from)?;
        for (block, content) in to[..padded].chunks_exact(BLOCK as usize).enumerate() {
            sums[output.block as usize + block].store(BlockArray::sum(content), Ordering::Relaxed);
        }
        write_sums(&sums_path, &sums)?;
        writer.journal.record("moved", &(number as u64 + 1))?;
    }
    progress.finish();
    let mut entries = writer.entries(LAID)?;
    if laid.shared > 0 {
        sum_shared(writer, laid, &mut queue, &mut entries, row_bytes, progress)?;
    }
    drop(queue);
    let all: Vec<u64> = sums.into_iter().map(AtomicU64::into_inner).collect();
    Ok((array.finish(&all)?, entries))
}

/// Reads every segment's cache once and adds up, for each batch, the checksums of the rows it will read of it.
fn sum_shared(
    writer: &PackWriter,
    laid: &Laid,
    queue: &mut Queue,
    entries: &mut [Entry],
    row_bytes: u64,
    progress: &dyn Progress,
) -> Result<()> {
    let (mut segments, mut places, mut sums) = (Vec::new(), Vec::<u32>::new(), Vec::new());
    let count = entries.len().div_ceil(laid.segment.max(1) as usize);
    Plain::<SegmentEntry>::array(writer.directory(), file::SEGMENTS)?.read(0, count, &mut segments)?;
    let shared = Plain::<u32>::array(writer.directory(), file::SHARED)?;
    progress.stage("check caches", Some(segments.iter().map(|one| one.rows * row_bytes).sum()), Unit::Bytes);
    let rows_at_a_time = super::layout::part_rows(row_bytes);
    let mut buffer = AlignedBuffer::new((rows_at_a_time * row_bytes) as usize, DIRECT_ALIGN);
    for (segment, batches) in segments.iter().zip(entries.chunks_mut(laid.segment.max(1) as usize)) {
        sums.clear();
        for first in (0..segment.rows).step_by(rows_at_a_time as usize) {
            let rows = rows_at_a_time.min(segment.rows - first);
            let bytes = rows * row_bytes;
            let offset = BlockArray::offset(segment.block) + first * row_bytes;
            let piece = Piece { offset, bytes, at: 0 };
            queue.read(0, &[piece], &mut buffer).map_err(StoreError::from)?;
            let all = buffer[..bytes as usize].chunks_exact(row_bytes.max(1) as usize);
            sums.extend(all.zip(first..).map(|(row, place)| shared_row_sum(row, place)));
            progress.advance(bytes);
        }
        for entry in batches {
            shared.read(entry.shared_at, entry.shared_rows as usize, &mut places)?;
            entry.shared_rows_sum =
                places.iter().fold(0u64, |sum, place| sum.wrapping_add(sums[*place as usize]));
        }
    }
    progress.finish();
    Ok(())
}
