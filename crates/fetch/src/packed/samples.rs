//! Samples of some epochs, as logged before rows are packed: their records, the rows that they access, and an entry per
//! batch. They have a separate directory, so that rows can be packed in several ways for the same samples. Or they are
//! inside a self-contained directory of packed rows. More epochs are appended to what is there, byte for byte, so
//! packed rows of fewer epochs can still use it.

use super::plain::Plain;
use super::{Entry, KIND, Largest, Packing, file};
use crate::{FetchError, Result, StoredRow};
use esker_plan::{Hottest, RowCounts, RowsOfSegment, SegmentSizes};
use esker_sample::trace::{RecordFormat, TraceHeader};
use esker_store::{Dataset, Derived, StoreError};
use esker_types::{Progress, StopSignal, Unit};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Rows whose accesses a thread counts at a time.
const COUNTED_AT_A_TIME: u64 = 1 << 16;

/// The kind of this derived data in its manifest. It names the format of records, so that earlier versions of Esker
/// do not read what they do not know.
pub(super) fn kind_of(format: RecordFormat) -> &'static str {
    match format {
        RecordFormat::Gaps => "diskgnn-samples",
        RecordFormat::Columns => "diskgnn-samples-3",
    }
}

fn format_of(kind: &str) -> Option<RecordFormat> {
    [RecordFormat::Gaps, RecordFormat::Columns].into_iter().find(|format| kind_of(*format) == kind)
}

/// Totals of a sampled epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EpochSampled {
    /// Its batches.
    pub batches: u64,
    /// Rows that they access.
    pub accesses: u64,
    /// Bytes of their records.
    pub sample_bytes: u64,
    /// The largest batch sizes. Numbers of rows on disk are not known yet.
    pub largest: Largest,
}

impl EpochSampled {
    /// The totals of several epochs.
    pub fn sum(epochs: &[EpochSampled]) -> EpochSampled {
        epochs.iter().fold(EpochSampled::default(), |sum, epoch| EpochSampled {
            batches: sum.batches + epoch.batches,
            accesses: sum.accesses + epoch.accesses,
            sample_bytes: sum.sample_bytes + epoch.sample_bytes,
            largest: Largest {
                nodes: sum.largest.nodes.max(epoch.largest.nodes),
                sample_bytes: sum.largest.sample_bytes.max(epoch.largest.sample_bytes),
                record_bytes: sum.largest.record_bytes.max(epoch.largest.record_bytes),
                ..Largest::default()
            },
        })
    }

    /// Bytes of the log of these batches on disk, with `id_bytes` per row id.
    pub fn log_bytes(&self, id_bytes: u64) -> u64 {
        let payload = self.sample_bytes + self.accesses * id_bytes + self.batches * size_of::<Entry>() as u64;
        // Headers, padding, a checksum per block, and again the checksums of an open block.
        payload + payload / 4096 + 3 * (3 << 12)
    }
}

/// The parameters in a manifest of samples: what they were made with and what there is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampled {
    /// What was sampled, and how.
    pub sampling: TraceHeader,
    /// The epochs.
    pub epochs: Vec<EpochSampled>,
}

/// An open directory with samples.
#[derive(Debug)]
pub struct Samples {
    pub(super) found: Derived,
    sampled: Sampled,
    /// The array with an entry per batch.
    entries: &'static str,
    format: RecordFormat,
}

impl Samples {
    /// Opens a directory. `None` if there is none with samples of this dataset that can be opened.
    pub fn open(dataset: &Dataset, directory: &Path) -> Result<Option<Samples>> {
        let Ok(found) = dataset.open_derived(directory) else { return Ok(None) };
        if !dataset.is_current(&found) {
            return Ok(None);
        }
        let parameters = found.manifest.parameters.clone();
        let (described, entries) = match found.manifest.kind.as_str() {
            KIND => {
                let packing = serde_json::from_value::<Packing>(parameters).ok();
                let alone = packing.filter(|packing| packing.samples.is_none());
                let described = alone.and_then(|packing| {
                    let format = packing.record_format()?;
                    Some((Sampled { sampling: packing.sampling, epochs: packing.epochs_sampled }, format))
                });
                (described, file::BATCHES)
            }
            kind => (serde_json::from_value::<Sampled>(parameters).ok().zip(format_of(kind)), file::ENTRIES),
        };
        let has = |name: &str| found.arrays.iter().any(|array| array.entry().name == name);
        let whole = [file::SAMPLES, file::ACCESSES, entries].into_iter().all(has);
        Ok(described.filter(|_| whole).map(|(sampled, format)| Samples { found, sampled, entries, format }))
    }

    /// Its parameters.
    pub fn sampled(&self) -> &Sampled {
        &self.sampled
    }

    /// The format of its records.
    pub fn record_format(&self) -> RecordFormat {
        self.format
    }

    /// Totals of the first `epochs` epochs.
    pub fn of_epochs(&self, epochs: u64) -> EpochSampled {
        let epochs = (epochs as usize).min(self.sampled.epochs.len());
        EpochSampled::sum(&self.sampled.epochs[..epochs])
    }

    /// Its path.
    pub fn directory(&self) -> &Path {
        &self.found.directory
    }

    /// Bytes of its arrays on disk.
    pub fn disk_bytes(&self) -> u64 {
        let names = [file::SAMPLES, file::ACCESSES, self.entries];
        let files = self.found.manifest.files.iter();
        files.filter(|entry| names.contains(&entry.name.as_str())).map(|entry| entry.bytes).sum()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.found.directory.join(format!("{name}.bin"))
    }

    pub(crate) fn file(&self, name: &str) -> Result<esker_store::FileEntry> {
        let found = self.found.manifest.files.iter().find(|entry| entry.name == name);
        Ok(found.cloned().ok_or_else(|| StoreError::Missing { path: self.path(name) })?)
    }

    /// Entries of the batches of the first `epochs` epochs, without what a layout adds.
    pub(crate) fn entries(&self, epochs: u64) -> Result<Vec<Entry>> {
        let mut entries: Vec<Entry> = Vec::new();
        let batches = self.of_epochs(epochs).batches;
        Plain::<Entry>::array(&self.found.directory, self.entries)?.read(
            0,
            batches as usize,
            &mut entries,
        )?;
        entries.iter_mut().for_each(|entry| *entry = entry.as_logged());
        Ok(entries)
    }

    pub(crate) fn accesses<W: StoredRow>(&self) -> Result<Plain<W>> {
        Plain::array(&self.found.directory, file::ACCESSES)
    }

    /// Counts how often batches of the first epochs access each of `rows` rows, with the threads of the current rayon
    /// pool.
    pub fn count<W: StoredRow>(
        &self,
        epochs: u64,
        rows: u64,
        stop: &StopSignal,
        progress: &dyn Progress,
    ) -> Result<Hottest> {
        let (counts, accesses) = (RowCounts::new(rows), self.accesses::<W>()?);
        progress.stage("count rows", Some(self.of_epochs(epochs).accesses), Unit::Count("rows"));
        let count = |nodes: &mut Vec<W>, entry: &Entry| -> Result<()> {
            accesses.read_ahead(entry.words_at, entry.nodes);
            for first in (0..entry.nodes).step_by(COUNTED_AT_A_TIME as usize) {
                if stop.is_asked() {
                    return Err(FetchError::Stopped);
                }
                let some = COUNTED_AT_A_TIME.min(entry.nodes - first);
                accesses.read(entry.words_at + first, some as usize, nodes)?;
                counts.see(nodes);
                progress.advance(some);
            }
            Ok(())
        };
        self.entries(epochs)?.par_iter().try_for_each_init(Vec::new, count)?;
        progress.finish();
        Ok(counts.close())
    }

    /// For segments of every size, counts the rows without a slot that they would store.
    pub fn segment_sizes<W: StoredRow>(
        &self,
        epochs: u64,
        hottest: &Hottest,
        stop: &StopSignal,
        progress: &dyn Progress,
    ) -> Result<SegmentSizes> {
        let batches = self.of_epochs(epochs).batches;
        let mut sizes = SegmentSizes::new(segment_rows(hottest)?, batches as u32);
        progress.stage("size segments", Some(batches), Unit::Count("batches"));
        self.each_batch::<W>(epochs, stop, |batch, nodes| {
            sizes.see(batch, nodes.iter().copied().filter(|node| hottest.slot(*node).is_none()));
            progress.advance(1);
        })?;
        sizes.close();
        progress.finish();
        Ok(sizes)
    }

    /// For segments of `segment` batches, counts the rows without a slot that they would store.
    pub fn stored_rows<W: StoredRow>(
        &self,
        epochs: u64,
        hottest: &Hottest,
        segment: u32,
        stop: &StopSignal,
        progress: &dyn Progress,
    ) -> Result<u64> {
        let mut stored = RowsOfSegment::new(segment_rows(hottest)?, segment);
        let batches = self.of_epochs(epochs).batches;
        progress.stage("size segments", Some(batches), Unit::Count("batches"));
        self.each_batch::<W>(epochs, stop, |batch, nodes| {
            stored.see(batch, nodes.iter().copied().filter(|node| hottest.slot(*node).is_none()));
            progress.advance(1);
        })?;
        progress.finish();
        Ok(stored.stored())
    }

    fn each_batch<W: StoredRow>(
        &self,
        epochs: u64,
        stop: &StopSignal,
        mut see: impl FnMut(u32, &[W]),
    ) -> Result<()> {
        let (accesses, mut nodes) = (self.accesses::<W>()?, Vec::new());
        for (batch, entry) in self.entries(epochs)?.iter().enumerate() {
            if stop.is_asked() {
                return Err(FetchError::Stopped);
            }
            accesses.read(entry.words_at, entry.nodes as usize, &mut nodes)?;
            see(batch as u32, &nodes);
        }
        Ok(())
    }
}

/// Number of rows of a graph, checked for being cut into segments.
fn segment_rows(hottest: &Hottest) -> Result<u64> {
    let rows = hottest.slots().len() as u64;
    match rows < u32::MAX as u64 {
        true => Ok(rows),
        false => Err(FetchError::SegmentRows { rows }),
    }
}
