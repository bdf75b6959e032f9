//! The log of samples. A process that resumes finds all samples up to the last sync. A log of fewer epochs is a prefix
//! of a log of more.

use super::plain::Plain;
use super::samples::{EpochSampled, Sampled, Samples, kind_of};
use super::{Entry, Largest, file};
use crate::{FetchError, Result, StoredRow};
use esker_sample::trace::{RecordFormat, SampleRecords, TraceHeader};
use esker_sample::{Position, Sample};
use esker_store::{ArrayWriter, Dataset, Journal, PAYLOAD_OFFSET, Staging, StoreError};
use esker_types::Dtype;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// Version of the work directory. Work of another version starts again.
const WORK_VERSION: u64 = 1;
/// Bytes copied at a time.
const COPY_BYTES: usize = 1 << 20;

/// Logs samples.
pub struct SampleLog<'a> {
    dataset: &'a Dataset,
    staging: Staging,
    journal: Journal,
    directory: PathBuf,
    header: TraceHeader,
    records: SampleRecords,
    arrays: Arrays,
    /// The samples so far, by epoch. The last epoch may be incomplete.
    epochs: Vec<EpochSampled>,
    /// Bytes of records since the last sync, and the size at which they are synced.
    unsafe_bytes: u64,
    safe_bytes: u64,
}

/// The arrays that grow while batches are sampled.
struct Arrays {
    samples: ArrayWriter,
    accesses: ArrayWriter,
    entries: ArrayWriter,
}

impl Arrays {
    /// Opens the arrays to append to what was logged.
    fn open<W>(directory: &Path, logged: &EpochSampled) -> Result<Arrays> {
        let resume = |name: &str, dtype: Dtype, columns: u64, rows: u64| -> Result<ArrayWriter> {
            Ok(ArrayWriter::resume(directory, name, dtype, columns, rows)?)
        };
        Ok(Arrays {
            samples: resume(file::SAMPLES, Dtype::U8, 1, logged.sample_bytes)?,
            accesses: resume(file::ACCESSES, id_dtype::<W>(), 1, logged.accesses)?,
            entries: resume(file::ENTRIES, Dtype::U64, Entry::COLUMNS, logged.batches)?,
        })
    }

    fn all(&mut self) -> [&mut ArrayWriter; 3] {
        [&mut self.samples, &mut self.accesses, &mut self.entries]
    }
}

/// The epochs of the log that are on disk. Earlier versions cut off the last block of an array when they opened it, so a
/// kill soon after left less than the journal records. The lost batches are sampled again.
fn whole<W>(directory: &Path, mut epochs: Vec<EpochSampled>) -> Result<Vec<EpochSampled>> {
    let logged = EpochSampled::sum(&epochs);
    if logged.batches == 0 {
        return Ok(Vec::new());
    }
    let payload = |name: &str| -> Result<u64> {
        let path = directory.join(format!("{name}.bin"));
        let found = std::fs::metadata(&path).map_err(StoreError::io(&path))?;
        Ok(found.len().saturating_sub(PAYLOAD_OFFSET))
    };
    let (samples, accesses) = (payload(file::SAMPLES)?, payload(file::ACCESSES)? / size_of::<W>() as u64);
    let batches = payload(file::ENTRIES)? / size_of::<Entry>() as u64;
    if samples >= logged.sample_bytes && accesses >= logged.accesses && batches >= logged.batches {
        return Ok(epochs);
    }
    let mut entries = Vec::new();
    let count = batches.min(logged.batches) as usize;
    Plain::<Entry>::array(directory, file::ENTRIES)?.read(0, count, &mut entries)?;
    let is_there = |entry: &Entry| {
        entry.sample_at + entry.sample_bytes <= samples && entry.words_at + entry.nodes <= accesses
    };
    entries.truncate(entries.iter().take_while(|entry| is_there(entry)).count());
    for (number, epoch) in epochs.iter_mut().enumerate() {
        let found = entries.iter().filter(|entry| entry.epoch == number as u64);
        // The epoch keeps its largest sizes: its batches are sampled again.
        *epoch =
            found.fold(EpochSampled { largest: epoch.largest, ..EpochSampled::default() }, |sum, entry| {
                EpochSampled {
                    batches: sum.batches + 1,
                    accesses: sum.accesses + entry.nodes,
                    sample_bytes: sum.sample_bytes + entry.sample_bytes,
                    largest: sum.largest,
                }
            });
    }
    epochs.retain(|epoch| epoch.batches > 0);
    Ok(epochs)
}

/// The type of stored row ids.
pub(crate) fn id_dtype<W>() -> Dtype {
    if size_of::<W>() == 8 { Dtype::U64 } else { Dtype::U32 }
}

impl<'a> SampleLog<'a> {
    /// Starts or resumes the samples that `header` describes. A new log starts with a copy of `earlier`, and goes on
    /// in the format of its records, so that packed rows that use these records still can. Samples are
    /// synced every `safe_bytes` bytes. Returns `None` if an earlier process had finished everything but the rename,
    /// which is done now.
    pub fn begin<W: StoredRow>(
        dataset: &'a Dataset,
        directory: &Path,
        header: TraceHeader,
        earlier: Option<&Samples>,
        safe_bytes: u64,
    ) -> Result<Option<SampleLog<'a>>> {
        let staging = dataset.derive_at(directory)?;
        if let Some(found) = Samples::open(dataset, staging.directory())?
            && staging.is_complete(&found.found.manifest.inputs)
            && found.sampled().sampling == header
        {
            staging.put_in_place()?;
            return Ok(None);
        }
        let text = serde_json::to_string(&header).unwrap_or_default();
        let format = earlier.map_or(RecordFormat::default(), Samples::record_format);
        let fingerprint = dataset.inputs_of(kind_of(format), &serde_json::json!([text, WORK_VERSION]));
        let (journal, _) = staging.journal(&fingerprint)?;
        let mut epochs = whole::<W>(staging.directory(), journal.done("logged").unwrap_or_default())?;
        let earlier = earlier.filter(|_| epochs.is_empty());
        if let Some(earlier) = earlier {
            epochs = earlier.sampled().epochs.clone();
            copy::<W>(earlier, staging.directory(), &EpochSampled::sum(&epochs))?;
            journal.record("logged", &epochs)?;
        }
        let arrays = Arrays::open::<W>(staging.directory(), &EpochSampled::sum(&epochs))?;
        let (records, directory) = (SampleRecords::new(format), directory.to_path_buf());
        let mut log = SampleLog {
            dataset,
            staging,
            journal,
            directory,
            header,
            records,
            arrays,
            epochs,
            unsafe_bytes: 0,
            safe_bytes,
        };
        log.make_safe()?;
        Ok(Some(log))
    }

    /// Directory of temporary files.
    pub fn work(&self) -> PathBuf {
        self.staging.work_directory()
    }

    /// What was logged of the first `epochs` epochs, by this process and earlier ones.
    pub fn logged(&self, epochs: u64) -> EpochSampled {
        EpochSampled::sum(&self.epochs[..self.epochs.len().min(epochs as usize)])
    }

    /// A value that an earlier process recorded.
    pub fn recall<T: serde::de::DeserializeOwned>(&self, what: &str) -> Option<T> {
        self.journal.done(what)
    }

    /// Records a value for a process that resumes this one.
    pub fn remember<T: serde::Serialize>(&self, what: &str, value: &T) -> Result<()> {
        Ok(self.journal.record(what, value)?)
    }

    /// Adds a batch. Batches come in order.
    pub fn append<W: StoredRow>(&mut self, at: Position, sample: &Sample) -> Result<()> {
        let logged = self.logged(u64::MAX);
        let record = self.records.encode(&self.header, sample, self.staging.directory())?;
        let ids: Vec<W> = sample.node_ids.iter().map(|node| W::of(*node)).collect();
        let entry = Entry {
            epoch: at.epoch,
            batch: at.batch,
            nodes: ids.len() as u64,
            sample_at: logged.sample_bytes,
            sample_bytes: record.len() as u64,
            sample_sum: xxh3_64(record),
            words_at: logged.accesses,
            ..Entry::default()
        };
        self.arrays.samples.write(record)?;
        self.arrays.accesses.write_elements(&ids)?;
        self.arrays.entries.write(bytemuck::bytes_of(&entry))?;
        if self.epochs.len() as u64 <= at.epoch {
            self.epochs.resize(at.epoch as usize + 1, EpochSampled::default());
        }
        let epoch = &mut self.epochs[at.epoch as usize];
        let batch = EpochSampled {
            batches: 1,
            accesses: entry.nodes,
            sample_bytes: entry.sample_bytes,
            largest: Largest {
                nodes: sample.node_ids.len() as u64,
                sample_bytes: sample.bytes(),
                record_bytes: entry.sample_bytes,
                ..Largest::default()
            },
        };
        *epoch = EpochSampled::sum(&[*epoch, batch]);
        self.unsafe_bytes += entry.sample_bytes;
        if self.unsafe_bytes >= self.safe_bytes {
            self.make_safe()?;
        }
        Ok(())
    }

    /// Syncs what was added so far, for a process that resumes.
    pub fn make_safe(&mut self) -> Result<()> {
        self.arrays.all().into_iter().try_for_each(ArrayWriter::checkpoint)?;
        self.journal.record("logged", &self.epochs)?;
        self.unsafe_bytes = 0;
        Ok(())
    }

    /// Counts the row accesses of the first epoch, or of what there is of it. The log may continue afterwards.
    pub fn count<W: StoredRow>(&mut self, rows: u64) -> Result<esker_plan::Hottest> {
        self.make_safe()?;
        let mut hottest = esker_plan::Hottest::new(rows);
        let accesses = Plain::<W>::array(self.staging.directory(), file::ACCESSES)?;
        let (all, mut nodes) = (self.logged(1).accesses, Vec::new());
        for first in (0..all).step_by(COPY_BYTES / 8) {
            accesses.read(first, (all - first).min(COPY_BYTES as u64 / 8) as usize, &mut nodes)?;
            hottest.see(&nodes);
        }
        Ok(hottest)
    }

    /// Finishes the log after every batch of the first `epochs` epochs was added. Drops what there is of later epochs.
    /// Gives the directory its final name.
    pub fn finish<W: StoredRow>(mut self, epochs: u64) -> Result<Samples> {
        self.make_safe()?;
        let SampleLog {
            dataset,
            staging,
            journal,
            directory,
            header,
            records,
            mut arrays,
            epochs: mut logged,
            ..
        } = self;
        if logged.len() as u64 > epochs {
            logged.truncate(epochs as usize);
            journal.record("logged", &logged)?;
            arrays = Arrays::open::<W>(staging.directory(), &EpochSampled::sum(&logged))?;
        }
        let Arrays { samples, accesses, entries } = arrays;
        let files = vec![samples.finish()?, accesses.finish()?, entries.finish()?];
        let parameters =
            serde_json::to_value(Sampled { sampling: header, epochs: logged }).unwrap_or_default();
        staging.publish_derived(dataset, kind_of(records.format()), parameters, files)?;
        let opened = Samples::open(dataset, &directory)?;
        opened.ok_or_else(|| StoreError::Missing { path: directory }.into())
    }
}

/// Copies the arrays of an earlier log.
fn copy<W: StoredRow>(earlier: &Samples, directory: &Path, logged: &EpochSampled) -> Result<()> {
    let mut arrays = Arrays::open::<W>(directory, &EpochSampled::default())?;
    let mut buffer = Vec::new();
    let mut whole = |name: &str, bytes: u64, to: &mut ArrayWriter| -> Result<()> {
        let from = Plain::<u8>::open(&earlier.path(name), PAYLOAD_OFFSET)?;
        for first in (0..bytes).step_by(COPY_BYTES) {
            from.read(first, (bytes - first).min(COPY_BYTES as u64) as usize, &mut buffer)?;
            to.write(&buffer)?;
        }
        Ok::<(), FetchError>(())
    };
    whole(file::SAMPLES, logged.sample_bytes, &mut arrays.samples)?;
    whole(file::ACCESSES, logged.accesses * size_of::<W>() as u64, &mut arrays.accesses)?;
    let entries = earlier.entries(u64::MAX)?;
    arrays.entries.write(bytemuck::cast_slice(&entries))?;
    arrays.all().into_iter().try_for_each(ArrayWriter::checkpoint)?;
    Ok(())
}
