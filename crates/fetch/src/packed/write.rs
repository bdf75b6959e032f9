//! Making a directory of packed rows for samples that are there, step by step; a journal says which are done.

use super::layout::{self, Laid, PackLayout};
use super::plain::Plain;
use super::samples::{EpochSampled, Samples};
use super::{ENCODING, Entry, KIND, Packing, file, order, pack};
use crate::format::features;
use crate::{FetchError, Result, RowFormat, StoredRow};
use esker_plan::{DiskNeeds, Hottest};
use esker_sample::trace::TraceHeader;
use esker_store::{ArrayWriter, BlockArray, Dataset, FileEntry, Journal, Staging, StoreError};
use esker_types::{Dtype, Progress, StopSignal, Unit};
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

/// How much may be lost where a process is killed: what is made between two moments of safety.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SafePoints {
    /// Bytes of samples.
    pub sample_bytes: u64,
    /// Bytes of packed rows.
    pub packed_bytes: u64,
}

impl Default for SafePoints {
    fn default() -> SafePoints {
        SafePoints { sample_bytes: 64 << 20, packed_bytes: 4 << 30 }
    }
}

/// What packing may hold in memory.
#[derive(Debug, Clone, Copy)]
pub struct PackSizes {
    /// All of it.
    pub memory_bytes: u64,
    /// Threads that pack.
    pub threads: usize,
    /// When what is done is made safe.
    pub safe_points: SafePoints,
}

/// What packing works with, and who may end it.
pub struct PackWork<'a> {
    /// Memory and threads.
    pub sizes: PackSizes,
    /// Lays rows out.
    pub pool: &'a ThreadPool,
    /// Asked for an end, it ends soon, with what is done safe.
    pub stop: &'a StopSignal,
    /// Is told how far it is.
    pub progress: &'a dyn Progress,
}

impl PackWork<'_> {
    /// An error where somebody asked for an end.
    pub(crate) fn check_stop(&self) -> Result<()> {
        if self.stop.is_asked() { Err(FetchError::Stopped) } else { Ok(()) }
    }
}

/// What packed rows take on disk while they are made, their samples included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PackedBytes {
    /// For rows set aside for memory.
    pub cached: u64,
    /// For samples, placements, lists, ends of blocks.
    pub others: u64,
    /// For each row that is stored.
    pub row: u64,
}

impl PackedBytes {
    /// Of batches and of rows that have slots, and so many misses; `samples_bytes` is what their samples take.
    pub fn of<W>(
        samples_bytes: u64,
        batches: &EpochSampled,
        hottest: &Hottest,
        row_bytes: u64,
    ) -> PackedBytes {
        let (id_bytes, block) = (size_of::<W>() as u64, BlockArray::BLOCK_BYTES);
        // Checksums of blocks: in the array, and twice while they are replaced.
        let row = row_bytes + row_bytes.div_ceil(2048) + id_bytes + 4;
        // Before rows for memory are stored they are dealt out, 16 bytes each.
        let cached = hottest.cached() * (row + 16u64.saturating_sub(row_bytes)) + block;
        let others = samples_bytes
            + batches.accesses * 4
            + hottest.misses() * 4
            + batches.batches * (3 * Entry::COLUMNS * 8 + 2 * block);
        PackedBytes { cached, others, row }
    }

    /// As a decision is made about it.
    pub fn needs(&self) -> DiskNeeds {
        DiskNeeds { fixed_bytes: self.cached + self.others, row_bytes: self.row }
    }
}

/// Of what is in the work directory: work of another version starts anew.
const WORK_VERSION: u64 = 4;

impl<'a> PackWriter<'a> {
    /// Starts, or goes on with, a directory of packed rows of what `header` says. `None`: an earlier process had finished it but
    /// for its name, which it has now.
    pub fn begin(
        dataset: &'a Dataset,
        directory: &Path,
        header: TraceHeader,
    ) -> Result<Option<PackWriter<'a>>> {
        let staging = dataset.derive_at(directory)?;
        if let Ok(found) = dataset.open_derived(staging.directory())
            && found.manifest.kind == KIND
            && staging.is_complete(&found.manifest.inputs)
            && dataset.is_fresh(&found)
            && let Ok(packing) = serde_json::from_value::<Packing>(found.manifest.parameters.clone())
        {
            if packing.sampling != header {
                let problem = format!(
                    "{} holds finished packed rows of other batches than these; give the flags they were made with, or another --prepared, or remove it",
                    staging.directory().display()
                );
                return Err(FetchError::Request { problem });
            }
            staging.put_in_place()?;
            return Ok(None);
        }
        let text = serde_json::to_string(&header).unwrap_or_default();
        let fingerprint = dataset.inputs_of(KIND, &serde_json::json!([text, WORK_VERSION]));
        let (journal, _) = staging.journal(&fingerprint)?;
        Ok(Some(PackWriter { dataset, staging, journal, header }))
    }

    pub(crate) fn directory(&self) -> &Path {
        self.staging.directory()
    }

    /// Where files go that are of no use when it is done.
    pub fn work(&self) -> PathBuf {
        self.staging.work_directory()
    }

    /// The layout that an earlier process began to follow.
    pub fn laid(&self) -> Option<PackLayout> {
        self.journal.done::<Laid>("laid").map(|laid| laid.layout)
    }

    /// Bytes of memory that laying out, packing and ordering take at least, whichever takes most, where packed rows have at most
    /// so many bytes.
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

    /// Lays rows out: those with a slot in `hottest` for memory, the others as the layout says. What followed another layout is
    /// let go.
    pub fn lay_out<W: StoredRow>(
        &self,
        samples: &Samples,
        hottest: &Hottest,
        layout: &PackLayout,
        work: &PackWork,
    ) -> Result<()> {
        for step in ["laid", "packing", "packed", "touched", "moved"] {
            self.journal.forget(step)?;
        }
        for array in [file::ROWS, file::WORDS, file::SHARED, file::SEGMENTS] {
            remove(&self.directory().join(format!("{array}.bin")))?;
        }
        let format = RowFormat::of(self.dataset)?;
        let laid = layout::lay_out::<W>(self, samples, hottest, layout, &format, work)?;
        Ok(self.journal.record("laid", &laid)?)
    }

    /// Packs rows as they are laid out, and gives the directory its name; `alone` with the samples inside, so that it can be
    /// moved.
    pub fn finish<W: StoredRow>(self, samples: &Samples, alone: bool, work: &PackWork) -> Result<Packing> {
        let laid = self.journal.done::<Laid>("laid");
        let laid = laid.ok_or_else(|| StoreError::Missing { path: self.work() })?;
        let (format, rows) = (RowFormat::of(self.dataset)?, features(self.dataset)?);
        pack::pack::<W>(&self, &laid, rows, &format, work)?;
        let (rows, entries) = order::order::<W>(&self, &laid, rows, &format, work)?;
        work.progress.stage("finish", None, Unit::Bytes);
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
            encoding: ENCODING,
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
            largest: laid.largest,
        }
    }

    /// Another name for an array of the samples, in this directory; a copy where the file system has no such names.
    fn link(&self, samples: &Samples, name: &str) -> Result<FileEntry> {
        let (from, to) = (samples.path(name), self.directory().join(format!("{name}.bin")));
        remove(&to)?;
        let linked = fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(drop));
        linked.and_then(|()| fs::File::open(&to)?.sync_all()).map_err(StoreError::io(&to))?;
        samples.file(name)
    }

    /// Entries as they were laid out.
    pub(crate) fn laid_entries(&self, laid: &Laid) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        Plain::<Entry>::array(&self.work(), layout::LAID)?.read(0, laid.batches as usize, &mut entries)?;
        Ok(entries)
    }
}

/// Removes a file, if it is there.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(StoreError::io(path)(error).into()),
        _ => Ok(()),
    }
}
