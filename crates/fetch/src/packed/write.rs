//! Makes a directory of packed rows for existing samples, step by step. A journal records which steps are done.

use super::layout::{self, Laid, PackLayout};
use super::plain::Plain;
use super::samples::{EpochSampled, Samples};
use super::{Entry, KIND, Packing, file, order, pack};
use crate::format::features;
use crate::{FetchError, Result, RowFormat, StoredRow};
use esker_plan::{DiskNeeds, Hottest};
use esker_sample::trace::TraceHeader;
use esker_store::{ArrayWriter, BlockArray, Dataset, FileEntry, Journal, Staging, StoreError};
use esker_types::{Dtype, Progress, StopSignal};
use rayon::ThreadPool;
use std::fs;
use std::path::{Path, PathBuf};

/// Makes a directory of packed rows.
pub struct PackWriter<'a> {
    pub(crate) dataset: &'a Dataset,
    staging: Staging,
    pub(crate) journal: Journal,
    header: TraceHeader,
}

/// How much work may be lost if a process is killed: the amount between two safe points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SafePoints {
    /// Bytes of samples.
    pub sample_bytes: u64,
    /// Bytes of packed rows.
    pub packed_bytes: u64,
}

impl Default for SafePoints {
    fn default() -> SafePoints {
        SafePoints { sample_bytes: 64 << 20, packed_bytes: 16 << 30 }
    }
}

/// Resources for packing.
#[derive(Debug, Clone, Copy)]
pub struct PackSizes {
    /// Total memory.
    pub memory_bytes: u64,
    /// Number of packing threads.
    pub threads: usize,
    /// When safe points are written.
    pub safe_points: SafePoints,
    /// Whether rows are read one by one, instead of all features in order. `None`: whichever takes less time.
    pub row_by_row: Option<bool>,
}

/// What packing works with.
pub struct PackWork<'a> {
    /// Memory and threads.
    pub sizes: PackSizes,
    /// The threads that lay rows out.
    pub pool: &'a ThreadPool,
    /// Ends the work soon after a stop is requested. What is done is safe.
    pub stop: &'a StopSignal,
    /// Receives progress reports.
    pub progress: &'a dyn Progress,
}

impl PackWork<'_> {
    /// Fails if a stop was requested.
    pub(crate) fn check_stop(&self) -> Result<()> {
        if self.stop.is_asked() { Err(FetchError::Stopped) } else { Ok(()) }
    }
}

/// Disk space of packed rows while they are made, including their samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PackedBytes {
    /// For rows set aside for memory.
    pub cached: u64,
    /// For samples, placements, arrays of rows and block padding.
    pub others: u64,
    /// Per stored row.
    pub row: u64,
}

impl PackedBytes {
    /// Disk space for these batches, cached rows and misses. `samples_bytes` is the size of their samples.
    pub fn of<W>(
        samples_bytes: u64,
        batches: &EpochSampled,
        hottest: &Hottest,
        row_bytes: u64,
    ) -> PackedBytes {
        let (id_bytes, block) = (size_of::<W>() as u64, BlockArray::BLOCK_BYTES);
        // Block checksums: in the array, and twice while they are replaced.
        let row = row_bytes + row_bytes.div_ceil(2048) + id_bytes + 4;
        // Rows for memory are first distributed to parts, with 16 bytes each.
        let cached = hottest.cached() * (row + 16u64.saturating_sub(row_bytes)) + block;
        let others = samples_bytes
            + batches.accesses * 4
            + hottest.misses() * 4
            + batches.batches * (3 * Entry::COLUMNS * 8 + 2 * block);
        PackedBytes { cached, others, row }
    }

    /// The same, as input of the layout decision.
    pub fn needs(&self) -> DiskNeeds {
        DiskNeeds { fixed_bytes: self.cached + self.others, row_bytes: self.row }
    }
}

/// Version of the work directory. Work of another version starts again.
const WORK_VERSION: u64 = 5;

impl<'a> PackWriter<'a> {
    /// Starts or resumes a directory of packed rows of the samples that `header` describes. Returns `None` if an
    /// earlier process had finished everything but the rename, which is done now.
    pub fn begin(
        dataset: &'a Dataset,
        directory: &Path,
        header: TraceHeader,
    ) -> Result<Option<PackWriter<'a>>> {
        let staging = dataset.derive_at(directory)?;
        if let Ok(found) = dataset.open_derived(staging.directory())
            && found.manifest.kind == KIND
            && staging.is_complete(&found.manifest.inputs)
            && dataset.is_current(&found)
            && let Ok(packing) = serde_json::from_value::<Packing>(found.manifest.parameters.clone())
        {
            if packing.sampling != header {
                return Err(FetchError::OtherBatches { directory: staging.directory().to_path_buf() });
            }
            staging.put_in_place()?;
            return Ok(None);
        }
        let text = serde_json::to_string(&header).unwrap_or_default();
        let fingerprint = dataset.inputs_of(KIND, &serde_json::json!([text, WORK_VERSION]));
        let (journal, _) = staging.journal(&fingerprint)?;
        Ok(Some(PackWriter { dataset, staging, journal, header }))
    }

    /// A directory of packed rows of another kind, whose samples include those that `header` describes.
    pub(crate) fn of(
        dataset: &'a Dataset,
        staging: Staging,
        journal: Journal,
        header: TraceHeader,
    ) -> PackWriter<'a> {
        PackWriter { dataset, staging, journal, header }
    }

    /// Drops every step, and the arrays of rows and placements.
    pub(crate) fn start_again(&self, arrays: &[&str]) -> Result<()> {
        for step in ["laid", "packing", "ordered", "packed", "touched", "moved"] {
            self.journal.forget(step)?;
        }
        arrays.iter().try_for_each(|array| remove(&self.directory().join(format!("{array}.bin"))))
    }

    /// Removes the unfinished directory.
    pub(crate) fn discard(self) -> Result<()> {
        Ok(self.staging.discard()?)
    }

    /// Gives the directory its manifest and its final name.
    pub(crate) fn publish(
        self,
        kind: &str,
        parameters: serde_json::Value,
        files: Vec<FileEntry>,
    ) -> Result<()> {
        Ok(self.staging.publish_derived(self.dataset, kind, parameters, files)?)
    }

    pub(crate) fn directory(&self) -> &Path {
        self.staging.directory()
    }

    /// Directory of temporary files.
    pub fn work(&self) -> PathBuf {
        self.staging.work_directory()
    }

    /// The layout that an earlier process started to follow.
    pub fn laid(&self) -> Option<PackLayout> {
        self.journal.done::<Laid>("laid").map(|laid| laid.layout)
    }

    /// What packed rows will be as they are laid out.
    pub fn laid_packing(&self, samples: &Samples) -> Result<Option<Packing>> {
        let row_bytes = RowFormat::of(self.dataset)?.row_bytes() as u64;
        let laid = self.journal.done::<Laid>("laid");
        Ok(laid.map(|laid| self.packing(samples, true, &laid, row_bytes)))
    }

    /// Smallest memory of laying out, packing and ordering, whichever takes most, for packed rows of at most this many
    /// bytes.
    pub fn memory_bytes(
        nodes: u64,
        row_bytes: u64,
        batches: u64,
        largest_nodes: u64,
        packed_bytes: u64,
        threads: u64,
    ) -> u64 {
        let blocks = packed_bytes / BlockArray::BLOCK_BYTES;
        layout::memory_bytes(nodes, row_bytes, batches, largest_nodes, threads)
            .max(pack::least_bytes(threads, blocks, batches))
            .max(order::memory_bytes(nodes, row_bytes, blocks, batches))
    }

    /// Lays rows out: those with a slot in `hottest` for memory, the others by the layout. Work that followed another
    /// layout is dropped.
    pub fn lay_out<W: StoredRow>(
        &self,
        samples: &Samples,
        hottest: &Hottest,
        layout: &PackLayout,
        work: &PackWork,
    ) -> Result<()> {
        self.start_again(&[file::ROWS, file::WORDS, file::SHARED, file::SEGMENTS])?;
        let format = RowFormat::of(self.dataset)?;
        let laid = layout::lay_out::<W>(self, samples, hottest, layout, &format, work)?;
        Ok(self.journal.record("laid", &laid)?)
    }

    /// Packs rows as they are laid out, and gives the directory its final name. With `alone`, samples are inside, so
    /// that it can be moved.
    pub fn finish<W: StoredRow>(self, samples: &Samples, alone: bool, work: &PackWork) -> Result<Packing> {
        let laid = self.journal.done::<Laid>("laid");
        let laid = laid.ok_or_else(|| StoreError::Missing { path: self.work() })?;
        let (format, rows) = (RowFormat::of(self.dataset)?, features(self.dataset)?);
        pack::pack::<W>(&self, laid.sizes(), rows, &format, work)?;
        let (rows, entries) = order::order::<W>(&self, &laid, rows, &format, work)?;
        let mut batches = ArrayWriter::create(self.directory(), file::BATCHES, Dtype::U64, Entry::COLUMNS)?;
        batches.write_elements(bytemuck::cast_slice::<Entry, u64>(&entries))?;
        let mut files = vec![rows, batches.finish()?];
        if alone {
            files.push(self.link(samples, file::SAMPLES)?);
            files.push(self.link(samples, file::ACCESSES)?);
        }
        let packing = self.packing(samples, alone, &laid, format.row_bytes() as u64);
        files.extend(laid.files);
        let parameters = serde_json::to_value(&packing).unwrap_or_default();
        self.staging.publish_derived(self.dataset, KIND, parameters, files)?;
        work.progress.finish();
        Ok(packing)
    }

    fn packing(&self, samples: &Samples, alone: bool, laid: &Laid, row_bytes: u64) -> Packing {
        let layout = &laid.layout;
        let sampled = samples.of_epochs(layout.epochs);
        let epochs = samples.sampled().epochs.iter().take(layout.epochs as usize);
        let beside = samples.directory().file_name().map(|name| name.to_string_lossy().into_owned());
        Packing {
            encoding: samples.record_format().number(),
            sampling: self.header.clone(),
            samples: beside.filter(|_| !alone),
            epochs_sampled: epochs.filter(|_| alone).copied().collect(),
            epochs: layout.epochs,
            limited_by_disk: layout.limited_by_disk,
            batches: sampled.batches,
            row_bytes,
            slots: laid.slots,
            slots_asked: layout.slots_asked,
            disk_bytes_allowed: layout.disk_bytes_allowed,
            segment: layout.segment,
            accesses: sampled.accesses,
            misses: laid.misses,
            shared: laid.shared,
            coverage: layout.coverage.clone(),
            cached_by: layout.cached_by.clone(),
            largest: laid.largest,
        }
    }

    /// Hard-links an array of the samples into this directory. Copies it if the file system has no hard links.
    fn link(&self, samples: &Samples, name: &str) -> Result<FileEntry> {
        let (from, to) = (samples.path(name), self.directory().join(format!("{name}.bin")));
        remove(&to)?;
        let linked = fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(drop));
        linked.and_then(|()| fs::File::open(&to)?.sync_all()).map_err(StoreError::io(&to))?;
        samples.file(name)
    }

    /// Entries as laid out.
    pub(crate) fn laid_entries(&self, laid: &Laid) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        Plain::<Entry>::array(&self.work(), layout::LAID)?.read(0, laid.batches as usize, &mut entries)?;
        Ok(entries)
    }
}

/// Removes a file, if it exists.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(StoreError::io(path)(error).into()),
        _ => Ok(()),
    }
}
