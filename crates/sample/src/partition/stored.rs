//! A partitioning as derived data of its dataset: `derived/partitions-NAME`. docs/format.md has its bytes.

use super::PartitionWord;
use crate::{Direction, Result, SampleError};
use esker_store::{ArrayFile, Dataset, Derived, Elements, StoreError};
use esker_types::{Dtype, NodeId, PartitionId};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use xxhash_rust::xxh3::xxh3_64;

pub(super) const KIND: &str = "partitions";
pub(super) const ARRAY: &str = "partitions";
pub(super) const VERSION: u32 = 2;
const PREFIX: &str = "partitions-";
/// Bytes of a block with a checksum, and the multiple to which the last one is padded.
const BLOCK_BYTES: usize = 64 << 10;
const PAGE_BYTES: usize = 4096;
const LONGEST_NAME: usize = 100;
/// Bytes that a stream of partitions reads at a time: whole words.
const STREAM_CHUNK_BYTES: usize = 64 << 10;

/// How partitions are found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "kebab-case")]
pub enum PartitionMethod {
    /// [`Fennel`](super::Fennel).
    Fennel {
        /// Passes over the graph.
        passes: u32,
        /// The direction of edges along which neighbours are counted.
        direction: Direction,
    },
    /// From a file.
    File {
        /// A hash of the partitions in it.
        digest: String,
    },
}

/// What determines the partitions of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionRequest {
    /// Version of the algorithm: another version may choose other partitions.
    pub version: u32,
    /// Number of partitions.
    pub partitions: u32,
    /// How they are found.
    #[serde(flatten)]
    pub method: PartitionMethod,
}

impl std::fmt::Display for PartitionRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.method {
            PartitionMethod::Fennel { passes, direction } => {
                write!(f, "{} by fennel, {passes} passes over {direction} neighbours", self.partitions)
            }
            PartitionMethod::File { .. } => write!(f, "{} from a file", self.partitions),
        }
    }
}

/// The quality of a partitioning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionSummary {
    /// Nodes of the graph.
    pub nodes: u64,
    /// Training nodes.
    pub training: u64,
    /// Edges of the graph.
    pub edges: u64,
    /// Edges between partitions.
    pub cut_edges: u64,
    /// Nodes of the largest partition.
    pub most_nodes: u64,
    /// Training nodes of the partition that has the most.
    pub most_training: u64,
    /// Partitions without nodes.
    pub empty: u64,
}

impl PartitionSummary {
    /// The share of edges between partitions.
    pub fn cut_share(&self) -> f64 {
        self.cut_edges as f64 / self.edges.max(1) as f64
    }
}

/// The parameters in the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartitionParameters {
    pub request: PartitionRequest,
    pub summary: PartitionSummary,
}

/// The partitions of a dataset's nodes.
#[derive(Debug)]
pub struct StoredPartitioning {
    name: String,
    parameters: PartitionParameters,
    array: ArrayFile,
}

impl StoredPartitioning {
    /// The name of the derived data of a partitioning.
    pub(super) fn derived_name(name: &str) -> Result<String> {
        let is_fine = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_';
        match !name.is_empty() && name.len() <= LONGEST_NAME && name.chars().all(is_fine) {
            true => Ok(format!("{PREFIX}{name}")),
            false => Err(SampleError::PartitioningName { name: name.to_string() }),
        }
    }

    /// The names of a dataset's partitionings, damaged ones included.
    pub fn names(dataset: &Dataset) -> Result<Vec<String>> {
        let all = dataset.all_derived()?;
        Ok(all.iter().filter_map(|(name, _)| name.strip_prefix(PREFIX)).map(String::from).collect())
    }

    /// Opens the partitioning of this name.
    pub fn open(dataset: &Dataset, name: &str) -> Result<StoredPartitioning> {
        let directory = dataset.derived_path(&StoredPartitioning::derived_name(name)?);
        if !directory.exists() {
            let names = StoredPartitioning::names(dataset)?.join(", ");
            let names = if names.is_empty() { "none".into() } else { names };
            let dataset = dataset.directory().to_path_buf();
            return Err(SampleError::NoPartitioning { dataset, name: name.to_string(), names });
        }
        let derived = dataset.open_derived(&directory)?;
        let wrong = |expected: &str, found: &str| SampleError::Partitioning {
            path: directory.clone(),
            expected: expected.into(),
            found: found.into(),
        };
        let Some(parameters) = PartitionParameters::of(&derived) else {
            return Err(wrong("partitions of this version", "other data"));
        };
        if !dataset.is_current(&derived) {
            return Err(wrong("partitions of this dataset", "those of another"));
        }
        let nodes = dataset.manifest().nodes.count;
        let columns = parameters.request.word_bytes();
        let array = derived.arrays.into_iter().find(|array| {
            let entry = array.entry();
            (entry.name.as_str(), entry.dtype, entry.columns, entry.rows)
                == (ARRAY, Dtype::U8, columns, nodes)
        });
        let array = array.ok_or_else(|| wrong("a partition per node", "another array"))?;
        Ok(StoredPartitioning { name: name.to_string(), parameters, array })
    }

    /// What derived data is, if it is a partitioning.
    pub fn describe(derived: &Derived) -> Option<(PartitionRequest, PartitionSummary)> {
        PartitionParameters::of(derived).map(|parameters| (parameters.request, parameters.summary))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it was made from.
    pub fn request(&self) -> &PartitionRequest {
        &self.parameters.request
    }

    /// Its quality.
    pub fn summary(&self) -> &PartitionSummary {
        &self.parameters.summary
    }

    /// Number of partitions.
    pub fn partitions(&self) -> u32 {
        self.parameters.request.partitions
    }

    /// A hash of the partitions of all nodes. [`StoredPartitioning::of_nodes`] verifies it.
    pub fn digest(&self) -> &str {
        &self.array.entry().sums
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> u64 {
        self.array.entry().bytes
    }

    /// The partitions of ascending nodes. Reads all partitions, and verifies every byte.
    pub fn of_nodes(&self, nodes: &[NodeId]) -> Result<Vec<PartitionId>> {
        let mut partitions = Vec::with_capacity(nodes.len());
        let mut next = nodes.iter().peekable();
        self.each_block(|first, words| {
            let end = first + words.len() as u64;
            while let Some(node) = next.next_if(|node| node.0 < end) {
                partitions.push(PartitionId(words[(node.0 - first) as usize]));
            }
            Ok(())
        })?;
        assert_eq!(partitions.len(), nodes.len(), "nodes of the graph, ascending");
        Ok(partitions)
    }

    /// Streams the partitions of nodes from `first` on.
    pub(crate) fn stream_from(&self, first: NodeId) -> Result<PartitionStream> {
        let word_bytes = self.parameters.request.word_bytes();
        Ok(PartitionStream {
            elements: self.array.elements(first.0 * word_bytes)?,
            word_bytes: word_bytes as usize,
            bytes: Vec::new(),
            at: 0,
            path: self.array.path().to_path_buf(),
        })
    }

    /// Gives the partitions of all nodes to `take`, some at a time, each with the first node. Verifies every byte.
    pub(crate) fn each_block(&self, take: impl FnMut(u64, &[u32]) -> Result<()>) -> Result<()> {
        read_blocks(&self.array, self.parameters.request.word_bytes(), self.partitions(), take)
    }
}

/// The partitions of nodes in order.
pub(crate) struct PartitionStream {
    elements: Elements,
    word_bytes: usize,
    bytes: Vec<u8>,
    at: usize,
    path: PathBuf,
}

impl PartitionStream {
    /// Memory in bytes.
    pub const BYTES: u64 = (1 << 20) + STREAM_CHUNK_BYTES as u64;

    /// The partition of the next node. It is not verified: whoever only compares partitions need not.
    #[inline]
    pub fn take(&mut self) -> Result<u32> {
        if self.at == self.bytes.len() {
            self.bytes.resize(STREAM_CHUNK_BYTES, 0);
            let filled = self.elements.fill(&mut self.bytes)?;
            self.bytes.truncate(filled);
            self.at = 0;
            if filled == 0 {
                return Err(StoreError::inconsistent(&self.path, "a partition per node", "fewer").into());
            }
        }
        let word = &self.bytes[self.at..self.at + self.word_bytes];
        self.at += self.word_bytes;
        Ok(word.iter().rev().fold(0, |number, byte| number << 8 | *byte as u32))
    }
}

/// Reads an array of partitions block by block, each verified by its checksum, and checks that all are below the
/// number of partitions.
fn read_blocks(
    array: &ArrayFile,
    word_bytes: u64,
    partitions: u32,
    mut take: impl FnMut(u64, &[u32]) -> Result<()>,
) -> Result<()> {
    let (mut elements, sums) = (array.elements(0)?, array.block_sums()?);
    let (mut bytes, mut words, mut first) = (vec![0u8; BLOCK_BYTES], Vec::new(), 0);
    let damaged = |block: usize, found: String| SampleError::Partitioning {
        path: array.path().to_path_buf(),
        expected: format!("block {block} as it was written"),
        found,
    };
    for (block, sum) in sums.into_iter().enumerate() {
        let filled = elements.fill(&mut bytes)?;
        bytes[filled..].fill(0);
        if xxh3_64(&bytes[..filled.next_multiple_of(PAGE_BYTES)]) != sum {
            return Err(damaged(block, "other bytes, by its checksum".into()));
        }
        words.clear();
        match word_bytes {
            2 => {
                let pairs = bytes[..filled].as_chunks::<2>().0;
                words.extend(pairs.iter().map(|word| u16::from_le_bytes(*word) as u32));
            }
            _ => {
                words.extend(bytes[..filled].as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)))
            }
        }
        if let Some(wrong) = words.iter().find(|word| **word >= partitions) {
            return Err(damaged(block, format!("partition {wrong} of {partitions}")));
        }
        take(first, &words)?;
        first += words.len() as u64;
    }
    Ok(())
}

/// Reads a whole array of partitions, verified.
pub(super) fn read_words<W: PartitionWord>(array: &ArrayFile, partitions: u32) -> Result<Vec<W>> {
    let mut all = Vec::with_capacity(array.entry().rows as usize);
    read_blocks(array, size_of::<W>() as u64, partitions, |_, words| {
        all.extend(words.iter().map(|word| W::of(*word)));
        Ok(())
    })?;
    Ok(all)
}

impl PartitionRequest {
    /// Bytes of a partition's number on disk.
    pub(super) fn word_bytes(&self) -> u64 {
        if self.partitions <= super::MOST_NARROW { 2 } else { 4 }
    }

    pub(super) fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("a request is plain data")
    }
}

impl PartitionParameters {
    fn of(derived: &Derived) -> Option<PartitionParameters> {
        let manifest = &derived.manifest;
        let found: PartitionParameters = serde_json::from_value(manifest.parameters.clone()).ok()?;
        (manifest.kind == KIND && found.request.version == VERSION && found.request.partitions > 0)
            .then_some(found)
    }
}

/// Whether an error says that the derived data must be made again.
pub(super) fn is_unusable(error: &SampleError) -> bool {
    matches!(
        error,
        SampleError::Partitioning { .. }
            | SampleError::Store(
                StoreError::Manifest { .. }
                    | StoreError::Missing { .. }
                    | StoreError::WrongLength { .. }
                    | StoreError::Inconsistent { .. }
            )
    )
}
