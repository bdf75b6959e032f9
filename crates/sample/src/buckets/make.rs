//! Sorts the edges of a dataset into buckets, within a memory budget: they are divided by the partition of their source
//! first, in one pass over the graph, and each part is then ordered by the partition of the target in memory. A part that
//! does not fit is ordered window by window. Edges come in the order of their ids and keep it.

use super::{BucketsRequest, EDGES, KIND, STARTS, SUMS, words_of};
use crate::node_partitions::NodePartitions;
use crate::topology::{GraphWork, StoredId};
use crate::{Result, SampleError, for_each_edge};
use esker_store::{
    ArrayFile, ArrayWriter, Dataset, FileEntry, GroupWriter, GroupedRecords, Journal, Staging,
};
use esker_types::{Dtype, EdgeBucket, NodeId, PartitionId, Unit};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::PathBuf;
use xxhash_rust::xxh3::Xxh3;

/// Steps of the journal.
const DIVIDED: &str = "divided";
const ORDERED: &str = "ordered";
/// The smallest window of a part that is ordered at a time.
const LEAST_WINDOW_BYTES: u64 = 64 << 10;
/// Memory of streams and writers.
const OTHER_BYTES: u64 = 16 << 20;
/// Edges between two looks at the stop signal.
const STOP_EDGES: u64 = 1 << 20;

/// The smallest memory for so many partitions.
pub(super) fn least_bytes(partitions: u32) -> u64 {
    let tables = (partitions as u64 + 1).pow(2) * 8;
    tables + OTHER_BYTES + GroupWriter::least_bytes(partitions as u64).max(LEAST_WINDOW_BYTES)
}

/// Edges divided by the partition of their source.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct DividedEdges {
    records: GroupedRecords,
    /// Where buckets start, once all are divided.
    starts: Option<FileEntry>,
}

/// Edge buckets being made.
pub(super) struct MakingBuckets<'a> {
    pub dataset: &'a Dataset,
    pub partitions: &'a NodePartitions,
    pub request: BucketsRequest,
    pub work: &'a GraphWork<'a>,
}

impl MakingBuckets<'_> {
    pub fn run<W: StoredId>(self, staging: Staging) -> Result<()> {
        let parameters = self.request.to_json();
        let (journal, _) = staging.journal(&self.dataset.inputs_of(KIND, &parameters))?;
        let divided = match journal.done::<DividedEdges>(DIVIDED) {
            Some(done @ DividedEdges { starts: Some(_), .. }) => done,
            begun => self.divide::<W>(&staging, &journal, begun.map(|begun| begun.records))?,
        };
        let Some(starts) = divided.starts.clone() else { unreachable!("all edges are divided") };
        let table: Vec<u64> = ArrayFile::open(staging.directory(), &starts)?.read_whole()?;
        let files = self.order::<W>(&staging, &journal, &divided.records, &table)?;
        self.work.progress.finish();
        let files = files.into_iter().chain([starts]).collect();
        Ok(staging.publish_derived(self.dataset, KIND, parameters, files)?)
    }

    fn file(staging: &Staging) -> PathBuf {
        staging.work_directory().join("by-source")
    }

    /// Divides edges by the partition of their source, and counts those of every bucket.
    fn divide<W: StoredId>(
        &self,
        staging: &Staging,
        journal: &Journal,
        begun: Option<GroupedRecords>,
    ) -> Result<DividedEdges> {
        let (edges, count) = (self.dataset.manifest().edges.count, self.partitions.count());
        let words = words_of(self.dataset);
        self.work.progress.stage("divide edges", Some(edges), Unit::Count("edges"));
        let mut counts = vec![0u64; (count as usize).pow(2)];
        let tables = (count as u64 + 1).pow(2) * 8 + OTHER_BYTES;
        let memory = self.work.most_bytes.saturating_sub(tables);
        let (record_bytes, path) = ((words * size_of::<W>()) as u64, MakingBuckets::file(staging));
        let (mut skipped, mut seen) = (begun.as_ref().map_or(0, GroupedRecords::records), 0u64);
        let mut writer = GroupWriter::resume(&path, record_bytes, count as usize, memory, begun)?;
        let (mut safe_bytes, mut failed) = (writer.written_bytes(), Ok(()));
        // The target of the edge before, and its partition.
        let (mut target, mut target_at) = (None, PartitionId(0));
        let relations = self.dataset.manifest().edges.relations.as_ref().map(|relations| relations.count);
        for_each_edge(self.dataset, &mut |edge| {
            if failed.is_err() {
                return;
            }
            if target != Some(edge.target) {
                (target, target_at) = (Some(edge.target), self.partitions.partition(edge.target));
            }
            let source = self.partitions.partition(edge.source);
            counts[EdgeBucket { source, target: target_at }.index(count)] += 1;
            seen += 1;
            if skipped > 0 {
                skipped -= 1;
                return;
            }
            let record = [edge.target.0, edge.source.0, edge.relation as u64].map(|word| W::of(NodeId(word)));
            failed = (|| {
                if relations.is_some_and(|count| edge.relation as u64 >= count) {
                    return Err(self.wrong_relation(edge.relation));
                }
                writer.push(source.index(), bytemuck::cast_slice(&record[..words]))?;
                if writer.written_bytes() - safe_bytes >= self.work.safe_point_bytes() {
                    let records = writer.checkpoint()?.clone();
                    safe_bytes = writer.written_bytes();
                    journal.record(DIVIDED, &DividedEdges { records, starts: None })?;
                }
                if seen.is_multiple_of(STOP_EDGES) {
                    self.work.progress.advance(STOP_EDGES);
                    self.work.check_stop()?;
                }
                Ok(())
            })();
        })?;
        failed?;
        let records = writer.finish()?;
        let divided = DividedEdges { records, starts: Some(write_starts(staging, &counts)?) };
        journal.record(DIVIDED, &divided)?;
        Ok(divided)
    }

    fn wrong_relation(&self, found: u32) -> SampleError {
        let dataset = self.dataset.directory().to_path_buf();
        let expected = "relations that the manifest counts".to_string();
        SampleError::Adjacency { path: dataset, expected, found: format!("relation {found}") }
    }

    /// Orders each part by the partition of the target, and writes it with the checksums of its buckets.
    fn order<W: StoredId>(
        &self,
        staging: &Staging,
        journal: &Journal,
        divided: &GroupedRecords,
        starts: &[u64],
    ) -> Result<Vec<FileEntry>> {
        let (count, words) = (self.partitions.count() as usize, words_of(self.dataset));
        let (dtype, all) = (self.dataset.manifest().id_dtype(), divided.records());
        self.work.progress.stage("order edges", Some(all), Unit::Count("edges"));
        let first: usize = journal.done(ORDERED).unwrap_or(0);
        let folder = staging.directory();
        let begun = starts[first * count];
        let mut edges = ArrayWriter::resume(folder, EDGES, dtype, words as u64, begun)?;
        let mut sums = ArrayWriter::resume(folder, SUMS, Dtype::U64, 1, (first * count) as u64)?;
        let path = MakingBuckets::file(staging);
        let mut reader = divided.open(&path)?;
        let edge_bytes = (words * size_of::<W>()) as u64;
        let used = (count as u64 + 1).pow(2) * 8 + GroupedRecords::READER_BYTES + OTHER_BYTES;
        let window = self.work.most_bytes.saturating_sub(used).max(LEAST_WINDOW_BYTES) / edge_bytes;
        let (mut out, mut safe_at) = (Vec::<W>::new(), begun);
        self.work.progress.advance(begun);
        for source in first..count {
            let starts = &starts[source * count..=(source + 1) * count];
            let (begin, end) = (starts[0], starts[count]);
            let mut hashes = BucketSums::new(starts);
            for at in (begin..end).step_by(window.max(1) as usize) {
                self.work.check_stop()?;
                let window = at..(at + window).min(end);
                out.clear();
                out.resize((window.end - window.start) as usize * words, W::default());
                let mut next = starts.to_vec();
                reader.for_each(source, |bytes| {
                    let records: &[W] = bytemuck::cast_slice(bytes);
                    self.place(records.chunks_exact(words), &mut next, &window, &mut out);
                })?;
                hashes.add(window.clone(), bytemuck::cast_slice(&out), edge_bytes);
                out.chunks(1 << 18).try_for_each(|some| edges.write_elements(some))?;
                self.work.progress.advance(window.end - window.start);
            }
            sums.write_elements(&hashes.finish())?;
            if (end - safe_at) * edge_bytes >= self.work.safe_point_bytes() {
                edges.checkpoint()?;
                sums.checkpoint()?;
                journal.record(ORDERED, &(source + 1))?;
                safe_at = end;
            }
        }
        Ok(vec![edges.finish()?, sums.finish()?])
    }

    /// Puts records in their positions, as far as those are in the window. `next` has the next position of each bucket.
    fn place<'r, W: StoredId>(
        &self,
        records: impl Iterator<Item = &'r [W]>,
        next: &mut [u64],
        window: &Range<u64>,
        out: &mut [W],
    ) {
        for record in records {
            let target = self.partitions.partition(record[0].node());
            let at = next[target.index()];
            next[target.index()] += 1;
            if window.contains(&at) {
                let to = &mut out[(at - window.start) as usize * record.len()..][..record.len()];
                to.copy_from_slice(record);
            }
        }
    }
}

/// Writes where buckets start.
fn write_starts(staging: &Staging, counts: &[u64]) -> Result<FileEntry> {
    let mut starts = ArrayWriter::create(staging.directory(), STARTS, Dtype::U64, 1)?;
    let mut start = 0u64;
    for count in [0].iter().chain(counts) {
        start += count;
        starts.write_elements(&[start])?;
    }
    Ok(starts.finish()?)
}

/// Checksums of the buckets of a part, whose bytes come in windows.
struct BucketSums<'a> {
    starts: &'a [u64],
    bucket: usize,
    hash: Xxh3,
    sums: Vec<u64>,
}

impl<'a> BucketSums<'a> {
    fn new(starts: &'a [u64]) -> BucketSums<'a> {
        BucketSums { starts, bucket: 0, hash: Xxh3::new(), sums: Vec::new() }
    }

    /// Adds the bytes of a range of edges, which follows the one before.
    fn add(&mut self, range: Range<u64>, mut bytes: &[u8], edge_bytes: u64) {
        let mut at = range.start;
        while at < range.end {
            let end = self.starts[self.bucket + 1].min(range.end);
            let (own, others) = bytes.split_at(((end - at) * edge_bytes) as usize);
            self.hash.update(own);
            (bytes, at) = (others, end);
            if at == self.starts[self.bucket + 1] && at < range.end {
                self.close();
            }
        }
    }

    fn close(&mut self) {
        self.sums.push(self.hash.digest());
        self.hash.reset();
        self.bucket += 1;
    }

    fn finish(mut self) -> Vec<u64> {
        while self.bucket + 1 < self.starts.len() {
            self.close();
        }
        self.sums
    }
}
