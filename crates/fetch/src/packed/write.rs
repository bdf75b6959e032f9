//! Making the directory, step by step; a journal says which are done.

use super::layout::{self, Room};
use super::plain::Plain;
use super::{ENCODING, Entry, KIND, Largest, Packing, file, order, pack};
use crate::format::features;
use crate::{Result, RowFormat, StoredRow};
use esker_sample::trace::{Records, TraceHeader};
use esker_sample::{Position, Sample};
use esker_store::{ArrayWriter, Dataset, FileEntry, Journal, Staging, StoreError};
use esker_types::{Dtype, Progress, Unit};
use rayon::ThreadPool;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// Samples are made safe when so many bytes of them have come together.
const SAFE_BYTES: u64 = 64 << 20;

/// Makes a directory of packed rows.
pub struct PackWriter<'a> {
    pub(crate) dataset: &'a Dataset,
    staging: Staging,
    pub(crate) journal: Journal,
    header: TraceHeader,
    records: Records,
    log: Option<Log>,
    /// Batches logged, the largest of them and their bytes.
    logged: Logged,
    safe_bytes: u64,
}

/// The arrays that grow while batches are sampled.
struct Log {
    samples: ArrayWriter,
    accesses: ArrayWriter,
    entries: ArrayWriter,
}

impl Log {
    /// Goes on behind what was logged.
    fn open<W>(directory: &Path, work: &Path, logged: &Logged) -> Result<Log> {
        let Logged { batches, accesses, sample_bytes, .. } = *logged;
        Ok(Log {
            samples: ArrayWriter::resume(directory, file::SAMPLES, Dtype::U8, 1, sample_bytes)?,
            accesses: ArrayWriter::resume(work, ACCESSES, id_dtype::<W>(), 1, accesses)?,
            entries: ArrayWriter::resume(work, ENTRIES, Dtype::U64, Entry::COLUMNS, batches)?,
        })
    }
}

/// What was logged so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Logged {
    pub batches: u64,
    pub accesses: u64,
    pub sample_bytes: u64,
    pub largest: Largest,
}

/// What packing may hold in memory.
#[derive(Debug, Clone, Copy)]
pub struct PackSizes {
    /// All of it.
    pub memory_bytes: u64,
    /// Threads that pack.
    pub threads: usize,
}

/// Of what is in the work directory: work of another version starts anew.
const WORK_VERSION: u64 = 3;

pub(crate) const ACCESSES: &str = "accesses";
pub(crate) const ENTRIES: &str = "entries";

fn id_dtype<W>() -> Dtype {
    if size_of::<W>() == 8 { Dtype::U64 } else { Dtype::U32 }
}

impl<'a> PackWriter<'a> {
    /// Starts, or goes on with, a directory of what `header` says; `request` names everything else that shapes the result.
    /// `None`: an earlier process had finished it but for its name, which it has now.
    pub fn begin<W>(
        dataset: &'a Dataset,
        directory: &Path,
        header: TraceHeader,
        request: &str,
    ) -> Result<Option<PackWriter<'a>>> {
        let staging = dataset.derive_at(directory)?;
        if let Ok(found) = dataset.open_derived(staging.directory())
            && staging.is_complete(&found.manifest.inputs)
            && dataset.is_fresh(&found)
        {
            staging.put_in_place()?;
            return Ok(None);
        }
        let text = serde_json::to_string(&header).unwrap_or_default();
        let fingerprint = dataset.inputs_of(KIND, &serde_json::json!([text, request, WORK_VERSION]));
        let (journal, _) = staging.journal(&fingerprint)?;
        let logged: Logged = journal.done("logged").unwrap_or_default();
        let mut writer = PackWriter {
            dataset,
            staging,
            journal,
            header,
            records: Records::default(),
            log: None,
            logged,
            safe_bytes: logged.sample_bytes,
        };
        if !writer.is_sampled() {
            let (directory, work) = (writer.directory().to_path_buf(), writer.work());
            writer.log = Some(match Log::open::<W>(&directory, &work, &logged) {
                Ok(log) => log,
                // Some of its files had been closed, and the kill came before all were: it starts anew.
                Err(_) if logged.batches > 0 => {
                    writer.journal.forget("logged")?;
                    (writer.logged, writer.safe_bytes) = (Logged::default(), 0);
                    Log::open::<W>(&directory, &work, &writer.logged)?
                }
                Err(error) => return Err(error),
            });
        }
        Ok(Some(writer))
    }

    pub(crate) fn directory(&self) -> &Path {
        self.staging.directory()
    }

    /// Where files go that are of no use when it is done.
    pub fn work(&self) -> PathBuf {
        self.staging.work_directory()
    }

    /// Batches sampled so far, by this process and those before it.
    pub fn batches(&self) -> u64 {
        self.logged.batches
    }

    /// The largest of them; rows on disk are not known yet.
    pub fn largest(&self) -> Largest {
        self.logged.largest
    }

    /// Rows that they want.
    pub fn accesses(&self) -> u64 {
        self.logged.accesses
    }

    /// Bytes of their samples.
    pub fn sample_bytes(&self) -> u64 {
        self.logged.sample_bytes
    }

    /// Whether all were.
    pub fn is_sampled(&self) -> bool {
        self.journal.done::<FileEntry>("sampled").is_some()
    }

    /// Adds a batch.
    pub fn append<W: StoredRow>(&mut self, at: Position, sample: &Sample) -> Result<()> {
        let Some(log) = &mut self.log else { return Ok(()) };
        let record = self.records.encode(&self.header, sample, self.staging.directory())?;
        let logged = &mut self.logged;
        let needed = |at: usize| sample.unneeded.get(at).is_none_or(|unneeded| !unneeded);
        let ids = sample.node_ids.iter().enumerate().filter(|(at, _)| needed(*at));
        let ids: Vec<W> = ids.map(|(_, node)| W::of(*node)).collect();
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
        log.samples.write(record)?;
        log.accesses.write_elements(&ids)?;
        log.entries.write(bytemuck::bytes_of(&entry))?;
        let largest = &mut logged.largest;
        largest.nodes = largest.nodes.max(sample.node_ids.len() as u64);
        largest.sample_bytes = largest.sample_bytes.max(sample.bytes());
        largest.record_bytes = largest.record_bytes.max(entry.sample_bytes);
        logged.batches += 1;
        logged.accesses += entry.nodes;
        logged.sample_bytes += entry.sample_bytes;
        if logged.sample_bytes - self.safe_bytes >= SAFE_BYTES {
            self.make_safe()?;
        }
        Ok(())
    }

    /// What was added so far is there for the next process.
    pub fn make_safe(&mut self) -> Result<()> {
        let Some(log) = &mut self.log else { return Ok(()) };
        [&mut log.samples, &mut log.accesses, &mut log.entries]
            .into_iter()
            .try_for_each(ArrayWriter::checkpoint)?;
        self.journal.record("logged", &self.logged)?;
        self.safe_bytes = self.logged.sample_bytes;
        Ok(())
    }

    /// Every batch was added.
    pub fn close_samples(&mut self) -> Result<()> {
        self.make_safe()?;
        let Some(log) = self.log.take() else { return Ok(()) };
        let samples = log.samples.finish()?;
        log.accesses.finish()?;
        log.entries.finish()?;
        self.journal.record("sampled", &samples)?;
        Ok(())
    }

    /// What an earlier process remembered.
    pub fn recall<T: serde::de::DeserializeOwned>(&self, what: &str) -> Option<T> {
        self.journal.done(what)
    }

    /// Remembers something for a process that goes on with this.
    pub fn remember<T: serde::Serialize>(&self, what: &str, value: &T) -> Result<()> {
        Ok(self.journal.record(what, value)?)
    }

    /// Bytes that what was logged would take with `slots` rows set aside and every batch's other rows packed: those rows, and
    /// all else.
    pub fn packed_bytes<W: StoredRow>(&mut self, slots: u64) -> Result<(u64, u64)> {
        self.make_safe()?;
        let format = RowFormat::of(self.dataset)?;
        let hottest =
            layout::count::<W>(self, &self.entries(ENTRIES)?, &format, slots, &esker_types::Silent)?;
        Ok(layout::packed_bytes::<W>(&hottest, &self.logged, format.row_bytes() as u64))
    }

    /// Bytes of memory that laying out, packing and ordering take at least, whichever takes most.
    pub fn memory_bytes(nodes: u64, row_bytes: u64, batches: u64, largest_nodes: u64, threads: u64) -> u64 {
        let laying = layout::memory_bytes(nodes, batches, largest_nodes, threads);
        laying.max(pack::least_bytes(threads)).max(order::memory_bytes(nodes, row_bytes))
    }

    /// Lays rows out, packs them, and gives the directory its name. `epochs` were sampled, and whether more were wanted than
    /// the disk takes.
    pub fn finish<W: StoredRow>(
        self,
        (epochs, limited_by_disk): (u64, bool),
        room: &Room,
        sizes: PackSizes,
        pool: &ThreadPool,
        progress: &dyn Progress,
    ) -> Result<Packing> {
        let format = RowFormat::of(self.dataset)?;
        let slots = (room.slots)(&self.logged.largest)?;
        let laid = match self.journal.done::<layout::Laid>("laid").filter(|laid| laid.suits(room, slots)) {
            Some(laid) => laid,
            None => {
                // Nothing that followed another layout is of use.
                for step in ["laid", "packing", "packed", "touched", "moved"] {
                    self.journal.forget(step)?;
                }
                let laid = layout::lay_out::<W>(&self, &self.logged, &format, room, pool, progress)?;
                self.journal.record("laid", &laid)?;
                laid
            }
        };
        let rows = features(self.dataset)?;
        pack::pack::<W>(&self, &laid, rows, &format, sizes, progress)?;
        let (rows, entries) = order::order::<W>(&self, &laid, rows, &format, sizes, progress)?;
        progress.stage("finish", None, Unit::Bytes);
        let work = self.work();
        let mut batches = ArrayWriter::create(self.directory(), file::BATCHES, Dtype::U64, Entry::COLUMNS)?;
        batches.write_elements(bytemuck::cast_slice::<Entry, u64>(&entries))?;
        let samples = self.journal.done::<FileEntry>("sampled");
        let samples = samples.ok_or(StoreError::Missing { path: work })?;
        let packing = Packing {
            encoding: ENCODING,
            sampling: self.header.clone(),
            epochs,
            limited_by_disk,
            batches: self.logged.batches,
            row_bytes: format.row_bytes() as u64,
            slots: laid.slots,
            slots_asked: laid.slots_asked,
            disk_bytes_allowed: laid.disk_bytes,
            segment: laid.segment,
            accesses: self.logged.accesses,
            misses: laid.misses,
            shared: laid.shared,
            largest: laid.largest,
        };
        let mut files = vec![samples, rows, batches.finish()?];
        files.extend(laid.files);
        let parameters = serde_json::to_value(&packing).unwrap_or_default();
        self.staging.publish_derived(self.dataset, KIND, parameters, files)?;
        progress.finish();
        Ok(packing)
    }

    /// Entries as they were laid out.
    pub(crate) fn entries(&self, name: &str) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        Plain::<Entry>::array(&self.work(), name)?.read(0, self.logged.batches as usize, &mut entries)?;
        Ok(entries)
    }
}
