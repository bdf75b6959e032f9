//! Adjacency stored by partition, as derived data of the dataset: `derived/adjacency-DIRECTION-NAME` (OUTRE, section
//! 4.2). The neighbours of a partition's nodes are next to each other, so one read brings them into memory. The graph's
//! own adjacency is in the order of node ids, and a partition's nodes are scattered over it.
//!
//! ```text
//!  partition 0                                        partition 1
//!  its nodes, ascending | neighbours of each of them | its nodes | neighbours | ...
//! ```
//!
//! A part of the result that fits in memory is collected in one pass over the graph, then the next. Every part is kept
//! on disk, so that a killed process loses one part at most. docs/format.md has its bytes.

use super::group::read_options;
use super::{AdjacencyInOrder, Direction, DiskGraph, GraphWork, StoredId};
use crate::partition::StoredPartitioning;
use crate::{Result, SampleError};
use esker_io::Files;
use esker_store::{ArrayFile, ArrayWriter, Dataset, Derived, FileEntry, PAYLOAD_OFFSET, Staging};
use esker_types::{Dtype, NodeId, PartitionId, Unit};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

pub(super) const KIND: &str = "partition-adjacency";
const VERSION: u32 = 1;
const NEIGHBOURS: &str = "neighbours";
const STARTS: &str = "starts";
/// The step of the journal: words that are on disk.
const STEP: &str = "words";
/// Nodes between two looks at the stop signal.
const STOP_NODES: u64 = 1 << 14;
/// The fewest words that a pass over the graph collects.
const LEAST_PART: u64 = 1 << 16;
/// Memory beside parts: streams of partitions, and a writer.
const OTHER_BYTES: u64 = 4 << 20;

/// What determines adjacency by partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdjacencyRequest {
    /// Version of its layout.
    pub version: u32,
    /// The direction of edges along which neighbours are found.
    pub direction: Direction,
    /// Number of partitions.
    pub partitions: u32,
    /// A hash of the partitions of all nodes.
    pub digest: String,
}

/// The adjacency of a graph, partition by partition.
#[derive(Debug)]
pub struct PartitionedAdjacency {
    /// Where each partition's words start, and the number of nodes before it; of all partitions at the end.
    starts: Vec<[u64; 2]>,
    array: ArrayFile,
    dataset: Arc<Dataset>,
}

impl AdjacencyRequest {
    fn new(direction: Direction, stored: &StoredPartitioning) -> AdjacencyRequest {
        let (partitions, digest) = (stored.partitions(), stored.digest().to_string());
        AdjacencyRequest { version: VERSION, direction, partitions, digest }
    }

    fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("a request is plain data")
    }
}

/// The name of the derived data.
fn derived_name(direction: Direction, stored: &StoredPartitioning) -> String {
    format!("adjacency-{}-{}", direction.short(), stored.name())
}

impl PartitionedAdjacency {
    /// Bytes on disk.
    pub fn disk_bytes(dataset: &Dataset, direction: Direction, partitions: u32) -> u64 {
        let manifest = dataset.manifest();
        let directions = if direction == Direction::Both { 2 } else { 1 };
        let words = manifest.nodes.count + manifest.edges.count.saturating_mul(directions);
        let words = words.saturating_mul(manifest.id_dtype().bytes());
        // Checksums take 8 bytes per 64 KiB.
        words + words / 8192 + (partitions as u64 + 1) * 16 + 4 * PAYLOAD_OFFSET
    }

    /// What derived data is, if it is adjacency by partition.
    pub fn describe(derived: &Derived) -> Option<AdjacencyRequest> {
        let found: AdjacencyRequest = serde_json::from_value(derived.manifest.parameters.clone()).ok()?;
        (derived.manifest.kind == KIND && found.version == VERSION).then_some(found)
    }

    /// Finds the adjacency of a graph by a partitioning, or makes it within the memory of `work`. If that is killed, the
    /// same call continues after the last part that is on disk. What was made for other partitions is replaced.
    pub fn find_or_make<W: StoredId>(
        graph: &DiskGraph,
        stored: &StoredPartitioning,
        work: &GraphWork,
    ) -> Result<PartitionedAdjacency> {
        // What is damaged is made again.
        if let Ok(Some(found)) = PartitionedAdjacency::find(graph, stored) {
            return Ok(found);
        }
        let (dataset, direction) = (graph.dataset(), graph.direction());
        let request = AdjacencyRequest::new(direction, stored);
        let staging = dataset.derive(&derived_name(direction, stored))?;
        match staging.is_complete(&dataset.inputs_of(KIND, &request.to_json())) {
            true => drop(staging.put_in_place()?),
            false => AdjacencyMaking { dataset, stored, request, work }.run::<W>(staging)?,
        }
        PartitionedAdjacency::find(graph, stored)?.ok_or_else(|| SampleError::Adjacency {
            path: dataset.derived_path(&derived_name(direction, stored)),
            expected: "adjacency that was just made".into(),
            found: "none that opens".into(),
        })
    }

    /// The adjacency of a graph by a partitioning, if it is there.
    fn find(graph: &DiskGraph, stored: &StoredPartitioning) -> Result<Option<PartitionedAdjacency>> {
        let (dataset, name) = (graph.dataset(), derived_name(graph.direction(), stored));
        let parameters = AdjacencyRequest::new(graph.direction(), stored).to_json();
        let Some(derived) = dataset.derived(&name, KIND, &parameters) else { return Ok(None) };
        let array = |name: &str| derived.arrays.iter().find(|array| array.entry().name == name).cloned();
        let (Some(starts), Some(array)) = (array(STARTS), array(NEIGHBOURS)) else { return Ok(None) };
        let wrong = |found: String| SampleError::Adjacency {
            path: derived.directory.clone(),
            expected: format!("the neighbours of {} nodes by partition", graph.nodes()),
            found,
        };
        let (found, words) = (starts.entry(), array.entry());
        let is_whole = (found.dtype, found.columns, found.rows)
            == (Dtype::U64, 2, stored.partitions() as u64 + 1)
            && (words.dtype, words.columns) == (dataset.manifest().id_dtype(), 1);
        if !is_whole {
            return Err(wrong("other arrays".into()));
        }
        let flat: Vec<u64> = starts.read_whole()?;
        let starts: Vec<[u64; 2]> = flat.as_chunks::<2>().0.to_vec();
        // A partition's words are its nodes and their neighbours.
        let rises = |pair: &[[u64; 2]]| {
            pair[0][0] <= pair[1][0]
                && pair[0][1] <= pair[1][1]
                && pair[1][1] - pair[0][1] <= pair[1][0] - pair[0][0]
        };
        let ends = (starts.first(), starts.last());
        let all = [graph.nodes() + graph.entries(), graph.nodes()];
        if ends != (Some(&[0, 0]), Some(&all)) || words.rows != all[0] || !starts.windows(2).all(rises) {
            return Err(wrong("other numbers of nodes and neighbours".into()));
        }
        Ok(Some(PartitionedAdjacency { starts, array, dataset: dataset.clone() }))
    }

    /// Bytes in memory, for so many partitions.
    pub fn index_bytes(partitions: u32) -> u64 {
        (partitions as u64 + 1) * 16
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> u64 {
        self.array.entry().bytes + (self.starts.len() * 16) as u64
    }

    /// The file, for messages.
    pub(super) fn path(&self) -> PathBuf {
        self.array.path().to_path_buf()
    }

    /// Opens the file for reading.
    pub(super) fn files(&self) -> Result<Files> {
        Ok(self.dataset.open_files(&[&self.array], &read_options())?)
    }

    /// The words of a partition in the file.
    pub(super) fn words_of(&self, partition: PartitionId) -> Range<u64> {
        let at = partition.0 as usize;
        self.starts[at][0]..self.starts[at + 1][0]
    }

    /// The number of nodes of a partition.
    pub(super) fn nodes_of(&self, partition: PartitionId) -> u64 {
        let at = partition.0 as usize;
        self.starts[at + 1][1] - self.starts[at][1]
    }
}

/// Adjacency being stored by partition.
struct AdjacencyMaking<'a> {
    dataset: &'a Dataset,
    stored: &'a StoredPartitioning,
    request: AdjacencyRequest,
    work: &'a GraphWork<'a>,
}

impl AdjacencyMaking<'_> {
    fn run<W: StoredId>(self, staging: Staging) -> Result<()> {
        let parameters = self.request.to_json();
        let (journal, _) = staging.journal(&self.dataset.inputs_of(KIND, &parameters))?;
        let starts = self.starts::<W>()?;
        let all = starts.last().map_or(0, |last| last[0]);
        let mut done: u64 = journal.done(STEP).unwrap_or(0);
        let dtype = self.dataset.manifest().id_dtype();
        let mut writer = ArrayWriter::resume(staging.directory(), NEIGHBOURS, dtype, 1, done)?;
        let part = self.part_words::<W>().min(all);
        let passes = (all - done).div_ceil(part.max(1));
        let name = "store neighbours by partition";
        self.work.progress.stage(name, Some(passes * self.entries()), Unit::Count("neighbours"));
        let mut words = vec![W::default(); part as usize];
        while done < all {
            let window = done..(done + part).min(all);
            let words = &mut words[..(window.end - window.start) as usize];
            self.collect(&starts, window.clone(), words)?;
            // In pieces, so that the writer need not keep much.
            words.chunks(1 << 18).try_for_each(|some| writer.write_elements(some))?;
            done = window.end;
            if done < all {
                writer.checkpoint()?;
                journal.record(STEP, &done)?;
            }
        }
        drop(words);
        let files = vec![writer.finish()?, write_starts(&staging, &starts)?];
        self.work.progress.finish();
        Ok(staging.publish_derived(self.dataset, KIND, parameters, files)?)
    }

    fn directions(&self) -> &'static [Direction] {
        match self.request.direction {
            Direction::Incoming => &[Direction::Incoming],
            Direction::Outgoing => &[Direction::Outgoing],
            Direction::Both => &[Direction::Incoming, Direction::Outgoing],
        }
    }

    fn entries(&self) -> u64 {
        self.dataset.manifest().edges.count * self.directions().len() as u64
    }

    /// Words that a pass over the graph collects.
    fn part_words<W: StoredId>(&self) -> u64 {
        let streams = self.directions().len() as u64 * AdjacencyInOrder::<W>::BYTES;
        let cursors = (self.request.partitions as u64 + 1) * 2 * 16;
        let left = self.work.most_bytes.saturating_sub(streams + cursors + OTHER_BYTES);
        (left / size_of::<W>() as u64).max(LEAST_PART)
    }

    /// Where each partition's words start, and the number of nodes before it.
    fn starts<W: StoredId>(&self) -> Result<Vec<[u64; 2]>> {
        let mut starts = vec![[0; 2]; self.request.partitions as usize + 1];
        self.each_node::<W>(|_, partition, degrees, _| {
            let [words, nodes] = &mut starts[partition + 1];
            *words += 1 + degrees.iter().sum::<u64>();
            *nodes += 1;
            Ok(())
        })?;
        for at in 1..starts.len() {
            starts[at] = [starts[at][0] + starts[at - 1][0], starts[at][1] + starts[at - 1][1]];
        }
        Ok(starts)
    }

    /// Fills `out` with the words of `window`, in one pass over the graph.
    fn collect<W: StoredId>(&self, starts: &[[u64; 2]], window: Range<u64>, out: &mut [W]) -> Result<()> {
        // Where the next node of each partition goes, and its neighbours.
        let mut next: Vec<[u64; 2]> =
            starts.windows(2).map(|pair| [pair[0][0], pair[0][0] + pair[1][1] - pair[0][1]]).collect();
        let mut counted = 0;
        self.each_node::<W>(|node, partition, degrees, streams| {
            let [node_at, entries_at] = &mut next[partition];
            if window.contains(node_at) {
                out[(*node_at - window.start) as usize] = W::of(NodeId(node));
            }
            *node_at += 1;
            for (degree, stream) in degrees.iter().zip(streams) {
                let mut left = *degree;
                while left > 0 {
                    let (words, range) = stream.next_entries(left)?;
                    copy_within(&words[range.clone()], *entries_at, &window, out);
                    *entries_at += range.len() as u64;
                    left -= range.len() as u64;
                }
                counted += degree;
            }
            if node % STOP_NODES == 0 {
                self.work.progress.advance(std::mem::take(&mut counted));
            }
            Ok(())
        })?;
        self.work.progress.advance(counted);
        Ok(())
    }

    /// Calls `take` for all nodes in order, with the partition, the degree in each direction, and the streams of
    /// neighbours. It takes all of a node's neighbours, or never any.
    fn each_node<W: StoredId>(
        &self,
        mut take: impl FnMut(u64, usize, &[u64], &mut [AdjacencyInOrder<W>]) -> Result<()>,
    ) -> Result<()> {
        let open = |direction: &Direction| AdjacencyInOrder::<W>::open(self.dataset, *direction);
        let mut streams = self.directions().iter().map(open).collect::<Result<Vec<_>>>()?;
        let mut degrees = vec![0; streams.len()];
        self.stored.each_block(|first, partitions| {
            for (node, partition) in (first..).zip(partitions) {
                if node % STOP_NODES == 0 {
                    self.work.check_stop()?;
                }
                for (degree, stream) in degrees.iter_mut().zip(&mut streams) {
                    *degree = stream.next_degree()?;
                }
                take(node, *partition as usize, &degrees, &mut streams)?;
            }
            Ok(())
        })
    }
}

/// Copies words that start at `at` of the whole, as far as they are in the window.
fn copy_within<W: StoredId>(words: &[W], at: u64, window: &Range<u64>, out: &mut [W]) {
    let (first, end) = (at.max(window.start), (at + words.len() as u64).min(window.end));
    if first < end {
        let to = (first - window.start) as usize..(end - window.start) as usize;
        out[to].copy_from_slice(&words[(first - at) as usize..(end - at) as usize]);
    }
}

fn write_starts(staging: &Staging, starts: &[[u64; 2]]) -> Result<FileEntry> {
    let mut writer = ArrayWriter::create(staging.directory(), STARTS, Dtype::U64, 2)?;
    writer.write_elements(starts.as_flattened())?;
    Ok(writer.finish()?)
}
