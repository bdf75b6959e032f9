//! Edges by pairs of node partitions, as derived data of the dataset: what a partition buffer reads of a graph
//! (Marius++ section 3). A bucket has the edges from the nodes of one partition to those of another, in the order of edge
//! ids. With c resident partitions, c x c buckets have all edges between residents.
//!
//! `make.rs` sorts the edges into buckets. [`ResidentBuckets`] keeps those of a step in memory and reads what a swap
//! adds. [`BucketSubgraphs`] are built from them, and [`BucketLinks`] are batches of their edges. [`BufferRows`] says
//! where the rows of resident nodes are.

mod counts;
mod links;
mod make;
mod resident;
mod rows;
mod subgraphs;

pub use counts::{BucketCounts, ResidentEdges};
pub use links::{BucketLinks, BucketPool, GraphSize};
pub use resident::{BucketWords, ResidentBuckets};
pub use rows::BufferRows;
pub use subgraphs::{BucketSubgraphs, BucketTopology, CurrentSubgraph, StepGraphs};

use crate::node_partitions::NodePartitions;
use crate::topology::{GraphWork, StoredId};
use crate::{Result, SampleError};
use bytemuck::Zeroable;
use esker_io::{Files, Options, Piece, Queue};
use esker_store::{ArrayFile, Dataset, Derived, PAYLOAD_OFFSET, StoreError};
use esker_types::{Dtype, EdgeBucket};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

const KIND: &str = "edge-buckets";
const VERSION: u32 = 1;
const EDGES: &str = "edges";
const STARTS: &str = "starts";
const SUMS: &str = "sums";
/// Buckets are read together up to this many bytes.
const READ_BYTES: u64 = 16 << 20;

/// What determines edge buckets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct BucketsRequest {
    version: u32,
    partitions: u32,
    /// Which nodes are in which partition.
    identity: String,
}

/// The edges of a graph by pairs of partitions, on disk.
#[derive(Debug)]
pub struct EdgeBuckets {
    partitions: u32,
    /// The first edge of each bucket, and the number of all edges.
    starts: Vec<u64>,
    /// A checksum of each bucket.
    sums: Vec<u64>,
    array: ArrayFile,
    dataset: Arc<Dataset>,
    words: usize,
}

/// Words of an edge: the target, the source, and the relation if there are any.
fn words_of(dataset: &Dataset) -> usize {
    2 + usize::from(dataset.manifest().edges.relations.is_some())
}

/// The name of the derived data.
fn derived_name(partitions: &NodePartitions) -> String {
    format!("edge-buckets-{}", partitions.label())
}

impl BucketsRequest {
    fn new(partitions: &NodePartitions) -> BucketsRequest {
        let (count, identity) = (partitions.count(), partitions.identity());
        BucketsRequest { version: VERSION, partitions: count, identity }
    }

    fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("a request is plain data")
    }
}

impl EdgeBuckets {
    /// Bytes on disk while they are made.
    pub fn disk_bytes(dataset: &Dataset, partitions: u32) -> u64 {
        let manifest = dataset.manifest();
        let edges = manifest.edges.count.saturating_mul(EdgeBuckets::edge_bytes(dataset));
        // Once as they are divided by source, once as they stay. Checksums take 8 bytes per 64 KiB.
        2 * edges + edges / 8192 + (partitions as u64).pow(2) * 16 + 4 * PAYLOAD_OFFSET
    }

    /// Bytes of an edge.
    pub fn edge_bytes(dataset: &Dataset) -> u64 {
        dataset.manifest().id_dtype().bytes() * words_of(dataset) as u64
    }

    /// Bytes in memory, for so many partitions.
    pub fn index_bytes(partitions: u32) -> u64 {
        (partitions as u64).pow(2) * 16
    }

    /// The smallest memory in which they are made.
    pub fn least_bytes(partitions: u32) -> u64 {
        make::least_bytes(partitions)
    }

    /// Finds the edge buckets of a dataset, or makes them within the memory of `work`. If that is killed, the same call
    /// continues where it was. Those of other partitions, as many, are replaced.
    pub fn find_or_make(
        dataset: &Arc<Dataset>,
        partitions: &NodePartitions,
        work: &GraphWork,
    ) -> Result<EdgeBuckets> {
        // What is damaged is made again.
        if let Ok(Some(found)) = EdgeBuckets::find(dataset, partitions) {
            return Ok(found);
        }
        let request = BucketsRequest::new(partitions);
        let staging = dataset.derive(&derived_name(partitions))?;
        match staging.is_complete(&dataset.inputs_of(KIND, &request.to_json())) {
            true => drop(staging.put_in_place()?),
            false => {
                let making = make::MakingBuckets { dataset, partitions, request, work };
                match dataset.manifest().id_dtype() {
                    Dtype::U64 => making.run::<u64>(staging)?,
                    _ => making.run::<u32>(staging)?,
                }
            }
        }
        EdgeBuckets::find(dataset, partitions)?.ok_or_else(|| SampleError::Adjacency {
            path: dataset.derived_path(&derived_name(partitions)),
            expected: "edge buckets that were just made".into(),
            found: "none that open".into(),
        })
    }

    /// The edge buckets of a dataset, if they are there.
    pub fn find(dataset: &Arc<Dataset>, partitions: &NodePartitions) -> Result<Option<EdgeBuckets>> {
        let (name, parameters) = (derived_name(partitions), BucketsRequest::new(partitions).to_json());
        let Some(derived) = dataset.derived(&name, KIND, &parameters) else { return Ok(None) };
        EdgeBuckets::open(dataset, partitions.count(), &derived).map(Some)
    }

    fn open(dataset: &Arc<Dataset>, partitions: u32, derived: &Derived) -> Result<EdgeBuckets> {
        let edges = dataset.manifest().edges.count;
        let wrong = |found: &str| SampleError::Adjacency {
            path: derived.directory.clone(),
            expected: format!("{edges} edges by pairs of {partitions} partitions"),
            found: found.into(),
        };
        let array = |name: &str| derived.arrays.iter().find(|array| array.entry().name == name).cloned();
        let (Some(starts), Some(sums), Some(array)) = (array(STARTS), array(SUMS), array(EDGES)) else {
            return Err(wrong("other arrays"));
        };
        let (buckets, words) = ((partitions as u64).pow(2), words_of(dataset));
        let shape = |array: &ArrayFile| (array.entry().dtype, array.entry().columns, array.entry().rows);
        let is_whole = shape(&starts) == (Dtype::U64, 1, buckets + 1)
            && shape(&sums) == (Dtype::U64, 1, buckets)
            && shape(&array) == (dataset.manifest().id_dtype(), words as u64, edges);
        if !is_whole {
            return Err(wrong("arrays of other sizes"));
        }
        let (starts, sums): (Vec<u64>, Vec<u64>) = (starts.read_whole()?, sums.read_whole()?);
        if starts.first() != Some(&0) || starts.last() != Some(&edges) || !starts.is_sorted() {
            return Err(wrong("buckets that do not follow each other"));
        }
        Ok(EdgeBuckets { partitions, starts, sums, array, dataset: dataset.clone(), words })
    }

    /// Number of partitions.
    pub fn partitions(&self) -> u32 {
        self.partitions
    }

    /// Number of edges of every bucket, by its index.
    pub fn counts(&self) -> Vec<u64> {
        self.starts.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Number of edges of a bucket.
    pub fn count(&self, bucket: EdgeBucket) -> u64 {
        let at = bucket.index(self.partitions);
        self.starts[at + 1] - self.starts[at]
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> u64 {
        self.array.entry().bytes + self.starts.len() as u64 * 16
    }

    /// Memory of a reader of buckets, the largest of which has so many bytes.
    pub fn reader_bytes(partitions: u32, largest_bytes: u64) -> u64 {
        Options::default().memory_bytes((partitions as u64).pow(2).min(1 << 16))
            + READ_BYTES.max(largest_bytes)
    }

    /// A reader for the calling thread.
    pub fn reader<W: StoredId>(self: &Arc<EdgeBuckets>) -> Result<BucketReader<W>> {
        let files: Files = self.dataset.open_files(&[&self.array], &Options::default())?;
        let queue = files.queue().map_err(StoreError::from)?;
        Ok(BucketReader { buckets: self.clone(), queue, words: Vec::new(), bytes_read: 0 })
    }
}

/// Reads buckets. It stays on the thread that made it.
pub struct BucketReader<W> {
    buckets: Arc<EdgeBuckets>,
    queue: Queue,
    words: Vec<W>,
    bytes_read: u64,
}

impl<W: StoredId + Zeroable> BucketReader<W> {
    /// Reads buckets, many at a time, and passes each with its words. The checksum of each is compared first.
    pub fn read(&mut self, buckets: &[EdgeBucket], mut take: impl FnMut(EdgeBucket, &[W])) -> Result<()> {
        let (of, edge_bytes) = (self.buckets.clone(), (self.buckets.words * size_of::<W>()) as u64);
        let bytes_of = |bucket: &EdgeBucket| of.count(*bucket) * edge_bytes;
        let mut left = buckets;
        while !left.is_empty() {
            let mut sum = 0;
            let fits = |bucket: &&EdgeBucket| {
                sum += bytes_of(bucket);
                sum <= READ_BYTES
            };
            let count = left.iter().take_while(fits).count().max(1);
            let (now, rest) = left.split_at(count);
            left = rest;
            let (mut pieces, mut at) = (Vec::with_capacity(count), 0);
            for bucket in now.iter().filter(|bucket| of.count(**bucket) > 0) {
                let start = of.starts[bucket.index(of.partitions)] * edge_bytes;
                let bytes = bytes_of(bucket);
                pieces.push(Piece { offset: PAYLOAD_OFFSET + start, bytes, at });
                at += bytes;
            }
            // No larger than what is read: a vector that grows may take twice that.
            let count = (at / size_of::<W>() as u64) as usize;
            self.words.clear();
            self.words.reserve_exact(count);
            self.words.resize(count, W::zeroed());
            self.queue
                .read(0, &pieces, bytemuck::cast_slice_mut(&mut self.words))
                .map_err(StoreError::from)?;
            self.bytes_read += at;
            let mut words = &self.words[..];
            for bucket in now {
                let (own, others) = words.split_at((bytes_of(bucket) / size_of::<W>() as u64) as usize);
                words = others;
                if xxh3_64(bytemuck::cast_slice(own)) != of.sums[bucket.index(of.partitions)] {
                    return Err(of.damaged(*bucket));
                }
                take(*bucket, own);
            }
        }
        Ok(())
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }
}

impl EdgeBuckets {
    fn damaged(&self, bucket: EdgeBucket) -> SampleError {
        let EdgeBucket { source, target } = bucket;
        SampleError::Adjacency {
            path: self.array.path().to_path_buf(),
            expected: format!("the edges from partition {} to {} as they were written", source.0, target.0),
            found: "other bytes, by their checksum".into(),
        }
    }
}
