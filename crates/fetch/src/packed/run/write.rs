//! Makes a directory of rows packed for a run, from existing samples. A journal records which steps are done.

use super::super::order::close_rows;
use super::super::write::{PackWork, PackWriter};
use super::super::{Samples, file, pack};
use super::layout::{self, LaidRun, RunBytes, RunLayout};
use super::{ENCODING, KIND, RunPlan, RunRows};
use crate::format::features;
use crate::{FetchError, Result, RowFormat, StoredRow};
use esker_sample::trace::TraceHeader;
use esker_store::{Dataset, StoreError};
use std::path::{Path, PathBuf};

/// Version of the work directory. Work of another version starts again.
const WORK_VERSION: u64 = 1;

/// Makes a directory of rows packed for a run.
pub struct RunWriter<'a>(PackWriter<'a>);

impl<'a> RunWriter<'a> {
    /// Starts or resumes a directory for the training that `header` describes. Returns `None` if an earlier process had
    /// finished everything but the rename, which is done now.
    pub fn begin(
        dataset: &'a Dataset,
        directory: &Path,
        header: TraceHeader,
    ) -> Result<Option<RunWriter<'a>>> {
        let staging = dataset.derive_at(directory)?;
        if let Ok(found) = dataset.open_derived(staging.directory())
            && RunRows::describe(&found).is_some()
            && staging.is_complete(&found.manifest.inputs)
            && dataset.is_current(&found)
        {
            staging.put_in_place()?;
            return Ok(None);
        }
        let text = serde_json::to_string(&header).unwrap_or_default();
        let fingerprint = dataset.inputs_of(KIND, &serde_json::json!([text, WORK_VERSION]));
        let (journal, _) = staging.journal(&fingerprint)?;
        Ok(Some(RunWriter(PackWriter::of(dataset, staging, journal, header))))
    }

    /// Directory of temporary files.
    pub fn work(&self) -> PathBuf {
        self.0.work()
    }

    /// What packed rows will be as they are laid out, by this process or an earlier one.
    pub fn laid(&self) -> Result<Option<RunPlan>> {
        let row_bytes = RowFormat::of(self.0.dataset)?.row_bytes() as u64;
        Ok(self.0.journal.done::<LaidRun>("laid").map(|laid| plan_of(&laid, row_bytes)))
    }

    /// Memory of planning and laying out.
    pub fn memory_bytes<W: StoredRow>(
        nodes: u64,
        slots: u64,
        batches: u64,
        largest: u64,
        repeats: bool,
    ) -> u64 {
        layout::memory_bytes::<W>(nodes, slots, batches, largest, repeats)
    }

    /// Disk space of a laid run while it is planned or packed, without its samples.
    pub fn disk_bytes<W: StoredRow>(plan: &RunPlan) -> u64 {
        let RunPlan { accesses, misses, kept, around, batches, row_bytes, .. } = *plan;
        let repeats = plan.layout.laps.iter().any(|lap| lap.repeats);
        RunBytes { accesses, misses, kept: kept + around, batches }.of::<W>(row_bytes, repeats)
    }

    /// Removes everything that was made.
    pub fn discard(self) -> Result<()> {
        self.0.discard()
    }

    /// Plans the cache and lays rows out. Everything that is made, without samples, takes at most `allowed` bytes on disk.
    /// Work that followed another layout is dropped.
    pub fn lay_out<W: StoredRow>(
        &self,
        samples: &[Samples],
        layout: &RunLayout,
        allowed: u64,
        work: &PackWork,
    ) -> Result<()> {
        let arrays = [file::ROWS, file::WORDS, file::KEPT, file::KEPT_ROWS, file::LAPS, file::BATCHES];
        self.0.start_again(&arrays)?;
        let format = RowFormat::of(self.0.dataset)?;
        let folder = self.0.work();
        let directories = (self.0.directory(), &*folder);
        let rows = (format.rows(), format.row_bytes() as u64);
        let laid = layout::lay_out::<W>(directories, samples, layout, rows, allowed, work)?;
        Ok(self.0.journal.record("laid", &laid)?)
    }

    /// Packs rows as they are laid out, and gives the directory its final name.
    pub fn finish<W: StoredRow>(self, work: &PackWork) -> Result<RunPlan> {
        let laid = self.0.journal.done::<LaidRun>("laid");
        let laid = laid.ok_or_else(|| FetchError::from(StoreError::Missing { path: self.work() }))?;
        let (format, rows) = (RowFormat::of(self.0.dataset)?, features(self.0.dataset)?);
        pack::pack::<W>(&self.0, laid.sizes, rows, &format, work)?;
        let mut files = vec![close_rows(&self.0, laid.sizes.blocks)?];
        let plan = plan_of(&laid, format.row_bytes() as u64);
        files.extend(laid.files);
        self.0.publish(KIND, serde_json::to_value(&plan).unwrap_or_default(), files)?;
        Ok(plan)
    }
}

fn plan_of(laid: &LaidRun, row_bytes: u64) -> RunPlan {
    RunPlan {
        encoding: ENCODING,
        layout: laid.layout.clone(),
        batches: laid.batches,
        row_bytes,
        accesses: laid.accesses,
        misses: laid.misses,
        kept: laid.kept,
        around: laid.around,
        largest: laid.largest,
    }
}
