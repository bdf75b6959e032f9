//! Opens a finished directory of rows packed for a run, with the samples beside it.

use super::super::open::read_options;
use super::super::plain::Plain;
use super::super::{Packed, Samples, blocks_for, file};
use super::{ENCODING, KIND, LapEntry, RunEntry, RunPlan};
use crate::{FetchError, Result};
use esker_io::Files;
use esker_sample::trace::RecordFormat;
use esker_store::{ArrayFile, Dataset, Derived, StoreError};
use std::path::{Path, PathBuf};

/// A directory of rows packed for a run that belongs to its dataset. Threads share it. All its files stay open.
pub struct RunRows {
    pub(super) plan: RunPlan,
    pub(super) entries: Vec<RunEntry>,
    pub(super) laps: Vec<LapEntry>,
    pub(super) sums: Vec<u64>,
    pub(super) files: Files,
    pub(super) directory: PathBuf,
    /// The records of each source, and their format.
    pub(super) samples: Vec<(Plain<u8>, RecordFormat)>,
    pub(super) words: Plain<u32>,
    pub(super) kept: Plain<u32>,
    /// Ids of kept rows, in either width.
    pub(super) kept_rows: Plain<u8>,
    pub(super) id_bytes: u64,
    disk_bytes: u64,
}

impl RunRows {
    /// Opens a directory and its samples. `None` if there is none of this dataset that can be opened.
    pub fn open(dataset: &Dataset, directory: &Path) -> Result<Option<RunRows>> {
        let Ok(found) = dataset.open_derived(directory) else { return Ok(None) };
        let Some(plan) = RunRows::describe(&found).filter(|_| dataset.is_current(&found)) else {
            return Ok(None);
        };
        let mut samples = Vec::new();
        for source in &plan.layout.sources {
            let opened = Samples::open(dataset, &directory.with_file_name(&source.name))?;
            let fits = |opened: &Samples| {
                opened.sampled().sampling == source.sampling
                    && opened.sampled().epochs.len() as u64 >= source.epochs
            };
            match opened.filter(fits) {
                Some(opened) => samples.push(opened),
                None => return Ok(None),
            }
        }
        RunRows::of(&found, plan, &samples).map(Some)
    }

    /// The parameters of a directory, without opening all of it.
    pub fn describe(found: &Derived) -> Option<RunPlan> {
        let plan = serde_json::from_value::<RunPlan>(found.manifest.parameters.clone());
        plan.ok().filter(|plan| found.manifest.kind == KIND && plan.encoding == ENCODING)
    }

    fn of(found: &Derived, plan: RunPlan, samples: &[Samples]) -> Result<RunRows> {
        let array = |name: &str| {
            let array = found.arrays.iter().find(|array| array.entry().name == name);
            array.ok_or_else(|| StoreError::Missing { path: found.directory.join(format!("{name}.bin")) })
        };
        let (rows, kept_rows) = (array(file::ROWS)?, array(file::KEPT_ROWS)?);
        let records = |samples: &Samples| {
            Ok((Plain::array(samples.directory(), file::SAMPLES)?, samples.record_format()))
        };
        let beside: u64 = samples.iter().map(Samples::disk_bytes).sum();
        let run = RunRows {
            sums: rows.block_sums()?,
            files: rows.open_files(&read_options())?,
            directory: found.directory.clone(),
            entries: array(file::BATCHES)?.read_whole::<RunEntry>()?,
            laps: array(file::LAPS)?.read_whole::<LapEntry>()?,
            samples: samples.iter().map(records).collect::<Result<_>>()?,
            words: Plain::array(&found.directory, file::WORDS)?,
            kept: Plain::array(&found.directory, file::KEPT)?,
            kept_rows: Plain::array(&found.directory, file::KEPT_ROWS)?,
            id_bytes: kept_rows.entry().dtype.bytes(),
            disk_bytes: beside + found.manifest.files.iter().map(|entry| entry.bytes).sum::<u64>(),
            plan,
        };
        let mut records = Vec::new();
        for source in samples {
            records.push(source.file(file::SAMPLES)?.rows);
        }
        run.check(array(file::WORDS)?, array(file::KEPT)?, kept_rows, &records)?;
        Ok(run)
    }

    /// Checks that every entry is within its files. Later reads rely on it.
    fn check(
        &self,
        words: &ArrayFile,
        kept: &ArrayFile,
        kept_rows: &ArrayFile,
        records: &[u64],
    ) -> Result<()> {
        let inside =
            |start: u64, count: u64, all: u64| start.checked_add(count).is_some_and(|end| end <= all);
        let all_kept = kept.entry().rows.min(kept_rows.entry().rows);
        let RunPlan { row_bytes, largest, .. } = self.plan;
        let fits = |entry: &RunEntry| {
            let record_bytes = records.get(entry.source as usize);
            record_bytes.is_some_and(|all| inside(entry.sample_at, entry.sample_bytes, *all))
                && inside(entry.words_at, entry.nodes, words.entry().rows)
                && inside(entry.kept_at, entry.kept, all_kept)
                && entry.packed_rows <= largest.packed_rows
                && entry.nodes <= largest.nodes
                && entry.lap < self.laps.len() as u64
                && inside(entry.block, blocks_for(entry.packed_rows, row_bytes), self.sums.len() as u64)
        };
        let lap_fits = |lap: &LapEntry| {
            inside(lap.first, lap.batches, self.entries.len() as u64)
                && inside(lap.around_at, lap.around, all_kept)
                && lap.around <= self.plan.layout.slots
        };
        let wrong = self.entries.iter().position(|entry| !fits(entry));
        let index = self.directory.join(format!("{}.bin", file::BATCHES));
        if let Some(number) = wrong {
            let expected = "batches that lie inside their files";
            return Err(StoreError::inconsistent(&index, expected, format!("batch {number}")).into());
        }
        let whole = self.laps.len() == self.plan.layout.laps.len() && self.laps.iter().all(lap_fits);
        if !whole || self.entries.len() as u64 != self.plan.batches {
            return Err(StoreError::inconsistent(&index, "what the manifest says", "something else").into());
        }
        Ok(())
    }

    /// Its parameters.
    pub fn plan(&self) -> &RunPlan {
        &self.plan
    }

    /// Its path.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Bytes on disk, including its samples.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// The I/O backend in use.
    pub fn io_backend(&self) -> &esker_io::ChosenBackend {
        self.files.io_backend()
    }

    /// Bytes of memory for the rows that any batch reads.
    pub fn rows_bytes(&self) -> u64 {
        Packed::rows_bytes_for(&self.plan.largest, self.plan.row_bytes)
    }

    pub(super) fn damaged(&self, number: usize, name: &str, what: &str) -> FetchError {
        let entry = &self.entries[number];
        let beside = self.samples[entry.source as usize].0.path().parent();
        let home = if name == file::SAMPLES { beside } else { None };
        let path = home.unwrap_or(&self.directory).join(format!("{name}.bin"));
        FetchError::Damaged { path, what: format!("{what} of epoch {}, batch {}", entry.epoch, entry.batch) }
    }
}
