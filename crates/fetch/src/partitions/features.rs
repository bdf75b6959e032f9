//! The feature rows of a dataset in the order of node partitions, as derived data, and those of the resident partitions
//! in memory. Rows are divided by partition in one pass over the features, and each part is then put in the order of
//! positions in memory; a part that does not fit is ordered window by window.

use crate::format::{RowFormat, features};
use crate::{FetchError, Result};
use esker_io::{AlignedBuffer, DIRECT_ALIGN, Options, Piece, Queue};
use esker_sample::{BufferRows, GraphWork, NodePartitions};
use esker_store::{
    ArrayFile, ArrayWriter, Dataset, FileEntry, GroupWriter, GroupedRecords, Journal, PAYLOAD_OFFSET,
    Staging, StoreError,
};
use esker_types::{Dtype, NodeId, PartitionId, Unit};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const KIND: &str = "partition-features";
const VERSION: u32 = 1;
const ROWS: &str = "rows";
const SUMS: &str = "sums";
/// Steps of the journal.
const DIVIDED: &str = "divided";
const ORDERED: &str = "ordered";
/// The smallest window of a part that is ordered at a time.
const LEAST_WINDOW_BYTES: u64 = 64 << 10;
/// Memory of streams and writers.
const OTHER_BYTES: u64 = 16 << 20;
/// Rows that are read at a time.
const READ_BYTES: u64 = 1 << 20;
/// Rows per parallel task.
const CHUNK_ROWS: usize = 512;
/// Bytes before a row while rows are divided: where it is in its partition.
const OFFSET_BYTES: usize = 8;

/// What determines feature rows by partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FeaturesRequest {
    version: u32,
    partitions: u32,
    /// Which nodes are in which partition.
    identity: String,
}

/// Feature rows divided by partition.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct DividedRows {
    records: GroupedRecords,
    all: bool,
}

/// The feature rows of a dataset by partition, on disk.
pub struct PartitionedFeatures {
    dataset: Arc<Dataset>,
    partitions: Arc<NodePartitions>,
    array: ArrayFile,
    sums: Vec<u64>,
    format: RowFormat,
}

fn derived_name(partitions: &NodePartitions) -> String {
    format!("partition-features-{}", partitions.label())
}

impl PartitionedFeatures {
    /// Bytes on disk while they are made.
    pub fn disk_bytes(dataset: &Dataset) -> Result<u64> {
        let entry = features(dataset)?.entry();
        let rows = entry.rows * (entry.row_bytes() * 2 + OFFSET_BYTES as u64);
        Ok(rows + rows / 8192 + 4 * PAYLOAD_OFFSET)
    }

    /// The smallest memory in which they are made.
    pub fn least_bytes(partitions: u32) -> u64 {
        OTHER_BYTES + READ_BYTES + GroupWriter::least_bytes(partitions as u64).max(LEAST_WINDOW_BYTES)
    }

    /// Finds the feature rows of a dataset by partition, or makes them within the memory of `work`. If that is killed, the
    /// same call continues where it was. Those of other partitions, as many, are replaced.
    pub fn find_or_make(
        dataset: &Arc<Dataset>,
        partitions: &Arc<NodePartitions>,
        work: &GraphWork,
    ) -> Result<PartitionedFeatures> {
        // What is damaged is made again.
        if let Ok(Some(found)) = PartitionedFeatures::find(dataset, partitions) {
            return Ok(found);
        }
        let parameters = parameters_of(partitions);
        let staging = dataset.derive(&derived_name(partitions))?;
        match staging.is_complete(&dataset.inputs_of(KIND, &parameters)) {
            true => drop(staging.put_in_place()?),
            false => MakingRows { dataset, partitions, work }.run(staging, parameters)?,
        }
        let path = dataset.derived_path(&derived_name(partitions));
        let expected = "feature rows by partition that were just made".to_string();
        PartitionedFeatures::find(dataset, partitions)?
            .ok_or(FetchError::PartitionedFeatures { path, expected })
    }

    /// The feature rows of a dataset by partition, if they are there.
    fn find(dataset: &Arc<Dataset>, partitions: &Arc<NodePartitions>) -> Result<Option<PartitionedFeatures>> {
        let name = derived_name(partitions);
        let Some(derived) = dataset.derived(&name, KIND, &parameters_of(partitions)) else { return Ok(None) };
        let array = |name: &str| derived.arrays.iter().find(|array| array.entry().name == name).cloned();
        let of = features(dataset)?.entry();
        let shape = |array: &ArrayFile| (array.entry().dtype, array.entry().columns, array.entry().rows);
        match (array(ROWS), array(SUMS)) {
            (Some(rows), Some(sums))
                if shape(&rows) == (of.dtype, of.columns, of.rows)
                    && shape(&sums) == (Dtype::U64, 1, partitions.count() as u64) =>
            {
                let (sums, format) = (sums.read_whole()?, RowFormat::of(dataset)?);
                let (dataset, partitions) = (dataset.clone(), partitions.clone());
                Ok(Some(PartitionedFeatures { dataset, partitions, array: rows, sums, format }))
            }
            _ => Err(FetchError::PartitionedFeatures {
                path: derived.directory,
                expected: format!("{} feature rows by {} partitions", of.rows, partitions.count()),
            }),
        }
    }

    /// The format of the rows.
    pub fn format(&self) -> &RowFormat {
        &self.format
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> u64 {
        self.array.entry().bytes
    }
}

fn parameters_of(partitions: &NodePartitions) -> serde_json::Value {
    let (count, identity) = (partitions.count(), partitions.identity());
    let request = FeaturesRequest { version: VERSION, partitions: count, identity };
    serde_json::to_value(request).expect("a request is plain data")
}

/// Feature rows by partition being made.
struct MakingRows<'a> {
    dataset: &'a Arc<Dataset>,
    partitions: &'a NodePartitions,
    work: &'a GraphWork<'a>,
}

impl MakingRows<'_> {
    fn run(self, staging: Staging, parameters: serde_json::Value) -> Result<()> {
        let (journal, _) = staging.journal(&self.dataset.inputs_of(KIND, &parameters))?;
        let records = match journal.done::<DividedRows>(DIVIDED) {
            Some(DividedRows { records, all: true }) => records,
            begun => self.divide(&staging, &journal, begun.map(|begun| begun.records))?,
        };
        let files = self.order(&staging, &journal, &records)?;
        self.work.progress.finish();
        Ok(staging.publish_derived(self.dataset, KIND, parameters, files)?)
    }

    fn check_stop(&self) -> Result<()> {
        if self.work.stop.is_asked() { Err(FetchError::Stopped) } else { Ok(()) }
    }

    fn divide(
        &self,
        staging: &Staging,
        journal: &Journal,
        begun: Option<GroupedRecords>,
    ) -> Result<GroupedRecords> {
        let array = features(self.dataset)?;
        let (rows, row_bytes) = (array.entry().rows, array.entry().row_bytes() as usize);
        self.work.progress.stage("divide feature rows", Some(rows), Unit::Count("rows"));
        let first = begun.as_ref().map_or(0, GroupedRecords::records);
        let (record_bytes, groups) = (OFFSET_BYTES + row_bytes, self.partitions.count() as usize);
        let memory = self.work.most_bytes.saturating_sub(OTHER_BYTES + READ_BYTES);
        let path = staging.work_directory().join("by-partition");
        let mut writer = GroupWriter::resume(&path, record_bytes as u64, groups, memory, begun)?;
        let (mut elements, mut safe_bytes) =
            (array.elements(first * array.entry().columns)?, writer.written_bytes());
        let piece = (READ_BYTES as usize / row_bytes.max(1)).max(1) as u64;
        let (mut bytes, mut record) = (Vec::new(), vec![0; record_bytes]);
        for start in (first..rows).step_by(piece as usize) {
            self.check_stop()?;
            let count = piece.min(rows - start);
            bytes.resize(count as usize * row_bytes, 0);
            match array.entry().dtype.bytes() {
                4 => drop(elements.fill::<u32>(cast(&mut bytes))?),
                2 => drop(elements.fill::<u16>(cast(&mut bytes))?),
                _ => drop(elements.fill::<u8>(&mut bytes)?),
            }
            for (node, row) in (start..).map(NodeId).zip(bytes.chunks_exact(row_bytes.max(1))) {
                let (partition, offset) = self.partitions.place(node);
                record[..OFFSET_BYTES].copy_from_slice(&offset.to_le_bytes());
                record[OFFSET_BYTES..].copy_from_slice(row);
                writer.push(partition.index(), &record)?;
            }
            self.work.progress.advance(count);
            if writer.written_bytes() - safe_bytes >= self.work.safe_point_bytes() {
                let records = writer.checkpoint()?.clone();
                safe_bytes = writer.written_bytes();
                journal.record(DIVIDED, &DividedRows { records, all: false })?;
            }
        }
        let records = writer.finish()?;
        journal.record(DIVIDED, &DividedRows { records: records.clone(), all: true })?;
        Ok(records)
    }

    fn order(
        &self,
        staging: &Staging,
        journal: &Journal,
        records: &GroupedRecords,
    ) -> Result<Vec<FileEntry>> {
        let entry = features(self.dataset)?.entry();
        let (row_bytes, count) = (entry.row_bytes() as usize, self.partitions.count());
        self.work.progress.stage("order feature rows", Some(entry.rows), Unit::Count("rows"));
        let first: u32 = journal.done(ORDERED).unwrap_or(0);
        let begun = match first {
            first if first < count => self.partitions.positions(PartitionId(first)).start,
            _ => entry.rows,
        };
        let folder = staging.directory();
        let mut rows = ArrayWriter::resume(folder, ROWS, entry.dtype, entry.columns, begun)?;
        let mut sums = ArrayWriter::resume(folder, SUMS, Dtype::U64, 1, first as u64)?;
        let path = staging.work_directory().join("by-partition");
        let mut reader = records.open(&path)?;
        let left = self.work.most_bytes.saturating_sub(GroupedRecords::READER_BYTES + OTHER_BYTES);
        let window = (left.max(LEAST_WINDOW_BYTES) / (row_bytes as u64).max(1)).max(1);
        let (mut out, mut safe_bytes) = (Vec::new(), 0);
        self.work.progress.advance(begun);
        for partition in (first..count).map(PartitionId) {
            let (size, mut hash) = (self.partitions.size_of(partition), Xxh3::new());
            for start in (0..size).step_by(window as usize) {
                self.check_stop()?;
                let end = (start + window).min(size);
                out.clear();
                out.resize((end - start) as usize * row_bytes, 0u8);
                reader.for_each(partition.index(), |bytes| {
                    for record in bytes.chunks_exact(OFFSET_BYTES + row_bytes) {
                        let (offset, row) = record.split_at(OFFSET_BYTES);
                        let offset: u64 = bytemuck::pod_read_unaligned(offset);
                        if (start..end).contains(&offset) {
                            out[(offset - start) as usize * row_bytes..][..row_bytes].copy_from_slice(row);
                        }
                    }
                })?;
                hash.update(&out);
                out.chunks(1 << 20).try_for_each(|some| rows.write(some))?;
                self.work.progress.advance(end - start);
                safe_bytes += out.len() as u64;
            }
            sums.write_elements(&[hash.digest()])?;
            if safe_bytes >= self.work.safe_point_bytes() {
                rows.checkpoint()?;
                sums.checkpoint()?;
                journal.record(ORDERED, &(partition.0 + 1))?;
                safe_bytes = 0;
            }
        }
        Ok(vec![rows.finish()?, sums.finish()?])
    }
}

/// Bytes as numbers, if they are aligned to them.
fn cast<T: bytemuck::Pod>(bytes: &mut [u8]) -> &mut [T] {
    bytemuck::cast_slice_mut(bytes)
}

/// Feature rows of partitions in memory, by partition. Rows never change, so whoever still uses a partition that left
/// keeps it.
pub type PartitionRows = HashMap<PartitionId, Arc<AlignedBuffer>>;

/// The feature rows of the resident partitions. It stays on the thread that made it.
pub struct ResidentFeatures {
    of: Arc<PartitionedFeatures>,
    queue: Queue,
    rows: PartitionRows,
    bytes_read: u64,
}

impl ResidentFeatures {
    /// No partitions yet.
    pub fn new(of: &Arc<PartitionedFeatures>) -> Result<ResidentFeatures> {
        let options =
            Options { depth: 32, in_flight_bytes: 16 << 20, staging_bytes: 1 << 20, ..Options::default() };
        let files = of.dataset.open_files(&[&of.array], &options)?;
        let queue = files.queue().map_err(StoreError::from)?;
        Ok(ResidentFeatures { of: of.clone(), queue, rows: PartitionRows::new(), bytes_read: 0 })
    }

    /// Drops partitions that are not resident any more, and reads those that are missing. The checksum of each is
    /// compared.
    pub fn advance(&mut self, resident: &[PartitionId]) -> Result<Arc<PartitionRows>> {
        self.rows.retain(|partition, _| resident.contains(partition));
        let row_bytes = self.of.format.row_bytes() as u64;
        for partition in resident {
            if self.rows.contains_key(partition) {
                continue;
            }
            let positions = self.of.partitions.positions(*partition);
            let bytes = (positions.end - positions.start) * row_bytes;
            let mut rows = AlignedBuffer::new(bytes.max(1) as usize, DIRECT_ALIGN);
            let piece = Piece { offset: PAYLOAD_OFFSET + positions.start * row_bytes, bytes, at: 0 };
            self.queue.read(0, &[piece], &mut rows[..bytes as usize]).map_err(StoreError::from)?;
            self.bytes_read += bytes;
            if xxh3_64(&rows[..bytes as usize]) != self.of.sums[partition.index()] {
                let (path, partition) = (self.of.array.path().to_path_buf(), partition.0);
                return Err(FetchError::FeaturePartition { path, partition });
            }
            self.rows.insert(*partition, Arc::new(rows));
        }
        Ok(Arc::new(self.rows.clone()))
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }
}

impl PartitionedFeatures {
    /// Writes the rows of resident nodes to `values`, one after the other, with the threads of the current rayon pool.
    pub fn gather(
        &self,
        resident: &BufferRows,
        rows: &PartitionRows,
        nodes: &[NodeId],
        values: &mut [f32],
    ) -> Result<()> {
        let (dim, row_bytes) = (self.format.dim(), self.format.row_bytes());
        assert_eq!(values.len(), nodes.len() * dim, "a row a node");
        if dim == 0 {
            return Ok(());
        }
        let pieces = values.par_chunks_mut(CHUNK_ROWS * dim).zip(nodes.par_chunks(CHUNK_ROWS));
        let gathered = pieces.map(|(values, nodes)| {
            for (node, values) in nodes.iter().zip(values.chunks_exact_mut(dim)) {
                let (partition, offset) = resident.partitions().place(*node);
                let Some(rows) = rows.get(&partition) else {
                    return Err(esker_sample::SampleError::NotResident { node: node.0 }.into());
                };
                let start = offset as usize * row_bytes;
                self.format.convert(&rows[start..start + row_bytes], values);
            }
            Ok::<(), FetchError>(())
        });
        gathered.collect()
    }
}
