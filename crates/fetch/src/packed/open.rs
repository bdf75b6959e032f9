//! Opens a finished directory of packed rows.

use super::plain::Plain;
use super::samples::Samples;
use super::{Entry, KIND, Packing, SegmentEntry, blocks_for, file};
use crate::Result;
use esker_io::{Files, Options};
use esker_sample::Position;
use esker_sample::trace::RecordFormat;
use esker_store::{ArrayFile, Dataset, Derived, StoreError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Rows of a segment at most this far apart are read together: one more read costs about as much as this many bytes.
const GAP_BYTES: u64 = 8 << 10;
/// Reads of a batch's rows: large, several at a time.
const READ_BYTES: u64 = 1 << 20;
const READ_DEPTH: usize = 256;
/// Enough to keep the disk busy while the reading thread waits for a core.
const IN_FLIGHT_BYTES: u64 = 64 << 20;

/// How often a directory is opened again if another took its name meanwhile.
const TRIES: usize = 8;

/// A directory of packed rows that belongs to its dataset. Threads share it. All its files stay open: even if the
/// directory is renamed or replaced, reads are of what was opened.
pub struct Packed {
    pub(crate) packing: Packing,
    pub(crate) entries: Vec<Entry>,
    pub(crate) segments: Vec<SegmentEntry>,
    pub(crate) sums: Vec<u64>,
    pub(crate) files: Files,
    pub(crate) directory: PathBuf,
    pub(crate) rows: ArrayFile,
    pub(crate) samples: Plain<u8>,
    pub(crate) record_format: RecordFormat,
    pub(crate) words: Plain<u32>,
    pub(crate) shared: Plain<u32>,
    disk_bytes: u64,
}

pub(crate) fn read_options() -> Options {
    Options {
        gap_bytes: GAP_BYTES,
        max_bytes: READ_BYTES,
        depth: READ_DEPTH,
        in_flight_bytes: IN_FLIGHT_BYTES,
        ..Options::default()
    }
}

impl Packed {
    /// Opens a directory with its samples. `None` if there is none of this dataset that can be opened.
    pub fn open(dataset: &Dataset, directory: &Path) -> Result<Option<Packed>> {
        for _ in 0..TRIES {
            let before = identity(directory);
            let opened = Packed::open_once(dataset, directory);
            // Files are opened one after the other. If the name did not change hands, they are all of one directory.
            if identity(directory) == before {
                return opened;
            }
        }
        Ok(None)
    }

    fn open_once(dataset: &Dataset, directory: &Path) -> Result<Option<Packed>> {
        let Ok(found) = dataset.open_derived(directory) else { return Ok(None) };
        if found.manifest.kind != KIND || !dataset.is_current(&found) {
            return Ok(None);
        }
        let Ok(packing) = serde_json::from_value::<Packing>(found.manifest.parameters.clone()) else {
            return Ok(None);
        };
        let home =
            packing.samples.as_ref().map_or(directory.to_path_buf(), |name| directory.with_file_name(name));
        let Some(samples) = Samples::open(dataset, &home)? else { return Ok(None) };
        if samples.sampled().sampling != packing.sampling
            || packing.record_format() != Some(samples.record_format())
            || samples.of_epochs(packing.epochs).batches != packing.batches
        {
            return Ok(None);
        }
        Packed::of(&found, packing, &samples).map(Some)
    }

    /// The parameters of a directory, without opening all of it.
    pub fn describe(found: &Derived) -> Option<Packing> {
        (found.manifest.kind == KIND)
            .then(|| serde_json::from_value(found.manifest.parameters.clone()).ok())?
    }

    fn of(found: &Derived, packing: Packing, samples: &Samples) -> Result<Packed> {
        let array = |name: &str| {
            let array = found.arrays.iter().find(|array| array.entry().name == name);
            array.ok_or_else(|| StoreError::Missing { path: found.directory.join(format!("{name}.bin")) })
        };
        let rows = array(file::ROWS)?;
        let beside = if packing.samples.is_some() { samples.disk_bytes() } else { 0 };
        let packed = Packed {
            sums: rows.block_sums()?,
            files: rows.open_files(&read_options())?,
            directory: found.directory.clone(),
            rows: rows.clone(),
            entries: array(file::BATCHES)?.read_whole::<Entry>()?,
            segments: array(file::SEGMENTS)?.read_whole::<SegmentEntry>()?,
            samples: Plain::array(samples.directory(), file::SAMPLES)?,
            record_format: samples.record_format(),
            words: Plain::array(&found.directory, file::WORDS)?,
            shared: Plain::array(&found.directory, file::SHARED)?,
            disk_bytes: beside + found.manifest.files.iter().map(|entry| entry.bytes).sum::<u64>(),
            packing,
        };
        packed.check(array(file::WORDS)?, array(file::SHARED)?, samples.file(file::SAMPLES)?.rows)?;
        Ok(packed)
    }

    /// Checks that every entry is within its files. Later reads rely on it.
    fn check(&self, words: &ArrayFile, shared: &ArrayFile, sample_bytes: u64) -> Result<()> {
        let blocks = self.sums.len() as u64;
        let inside =
            |start: u64, count: u64, all: u64| start.checked_add(count).is_some_and(|end| end <= all);
        let Packing { row_bytes, largest, slots, .. } = self.packing;
        let fits = |entry: &Entry| {
            let segment = self.segments.get(entry.segment as usize);
            inside(entry.sample_at, entry.sample_bytes, sample_bytes)
                && inside(entry.words_at, entry.nodes, words.entry().rows)
                && inside(entry.shared_at, entry.shared_rows, shared.entry().rows)
                && entry.packed_rows <= largest.packed_rows
                && entry.shared_rows <= largest.shared_rows
                && entry.nodes <= largest.nodes
                && inside(entry.block, blocks_for(entry.packed_rows, row_bytes), blocks)
                && segment
                    .is_some_and(|segment| inside(segment.block, blocks_for(segment.rows, row_bytes), blocks))
        };
        let wrong = self.entries.iter().position(|entry| !fits(entry));
        let index = self.directory.join(format!("{}.bin", file::BATCHES));
        if let Some(number) = wrong {
            let expected = "batches that lie inside their files";
            return Err(StoreError::inconsistent(&index, expected, format!("batch {number}")).into());
        }
        let stored_slots = if self.packing.cached_by.is_none() { slots } else { 0 };
        if blocks_for(stored_slots, row_bytes) > blocks || self.entries.len() as u64 != self.packing.batches {
            return Err(StoreError::inconsistent(&index, "what the manifest says", "something else").into());
        }
        Ok(())
    }

    /// Its parameters.
    pub fn packing(&self) -> &Packing {
        &self.packing
    }

    /// Its path.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Bytes of its index in memory.
    pub fn index_bytes(batches: u64, blocks: u64) -> u64 {
        batches * (size_of::<Entry>() + size_of::<SegmentEntry>()) as u64 + blocks * 8
    }

    /// The number of the batch at a position.
    pub fn number(&self, at: Position) -> Option<usize> {
        let found =
            self.entries.binary_search_by_key(&(at.epoch, at.batch), |entry| (entry.epoch, entry.batch));
        found.ok()
    }

    /// Bytes of a batch's rows on disk: the least that is read for it.
    pub fn planned_bytes(&self, number: usize) -> u64 {
        let entry = &self.entries[number];
        (entry.packed_rows + entry.shared_rows) * self.packing.row_bytes
    }

    /// Bytes on disk, including its samples.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// The I/O backend in use.
    pub fn io_backend(&self) -> &esker_io::ChosenBackend {
        self.files.io_backend()
    }
}

/// Distinguishes a directory from another of the same name.
fn identity(directory: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(directory).ok().map(|found| (found.dev(), found.ino()))
}
