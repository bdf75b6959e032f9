//! Streams a dataset through FENNEL. Every finished pass is kept on disk, so that a killed process loses one pass at
//! most. The result is published at once, or not at all.

use super::clusters::{Merging, NodeVisitor, PROPAGATIONS, Propagation};
use super::fennel::PREFETCH_DISTANCE;
use super::stored::{ARRAY, KIND, PartitionParameters, VERSION, is_unusable, read_words};
use super::{
    Fennel, MOST_NARROW, MOST_PARTITIONS, PartitionMethod, PartitionRequest, PartitionShape,
    PartitionSummary, PartitionWord, StoredPartitioning, given, training_count,
};
use crate::topology::{AdjacencyInOrder, StoredId};
use crate::{Direction, Result, SampleError};
use esker_store::{ArrayFile, ArrayWriter, Dataset, FileEntry, Journal, Staging, StoreError, file};
use esker_types::{ByteCount, Dtype, NodeId, Progress, StopSignal, Unit};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Memory beside partitions and streams: the program, the writer of the result, and what the allocator keeps.
const OTHER_BYTES: u64 = 16 << 20;
/// Nodes between two looks at the stop signal.
const STOP_NODES: u64 = 1 << 14;
/// The step of the journal.
const STEP: &str = "pass";

/// Where partitions come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartitionSource {
    /// FENNEL.
    Fennel {
        /// Number of partitions.
        partitions: u32,
        /// Passes over the graph.
        passes: u32,
    },
    /// A file with a partition per line and a line per node.
    File {
        /// The file.
        path: PathBuf,
        /// Number of partitions, if it is not one more than the highest.
        partitions: Option<u32>,
    },
}

/// Memory and control of partitioning.
#[derive(Clone, Copy)]
pub struct PartitionWork<'a> {
    /// Memory in bytes.
    pub most_bytes: u64,
    /// Ends the work.
    pub stop: &'a StopSignal,
    /// Gets stages.
    pub progress: &'a dyn Progress,
}

/// A pass of this process.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PartitionPass {
    /// The pass, from 1.
    pub pass: u32,
    /// Nodes that chose another partition than they had.
    pub moved: u64,
    /// Neighbours counted.
    pub neighbours: u64,
    /// Its duration.
    pub seconds: f64,
}

/// A partitioning, and what this process did for it.
#[derive(Debug)]
pub struct PartitionMade {
    /// The partitioning.
    pub stored: StoredPartitioning,
    /// Passes of this process. None if it was there already.
    pub passes: Vec<PartitionPass>,
    /// Passes of this process in which clusters grew and merged.
    pub cluster_passes: Vec<PartitionPass>,
    /// Whether it was there already.
    pub is_reused: bool,
    /// The memory it takes at most.
    pub memory_bytes: u64,
}

/// A finished pass in the journal.
#[derive(Serialize, Deserialize)]
struct FinishedPass {
    pass: u32,
    entry: FileEntry,
}

/// Makes the partitioning `name` of a dataset, or finds it. Replaces one with other parameters only if `overwrite` is
/// set. If it is killed, the same call continues after the last finished pass.
pub fn make(
    dataset: &Dataset,
    name: &str,
    source: &PartitionSource,
    overwrite: bool,
    work: &PartitionWork,
) -> Result<PartitionMade> {
    let derived_name = StoredPartitioning::derived_name(name)?;
    let request = request_of(dataset, source)?;
    let memory_bytes = memory_bytes(dataset, request.partitions);
    match StoredPartitioning::open(dataset, name) {
        Ok(stored) if *stored.request() == request => {
            let (passes, cluster_passes) = (vec![], vec![]);
            return Ok(PartitionMade { stored, passes, cluster_passes, is_reused: true, memory_bytes });
        }
        Ok(stored) if !overwrite => {
            return Err(SampleError::PartitioningExists {
                dataset: dataset.directory().to_path_buf(),
                name: name.to_string(),
                found: stored.request().to_string(),
            });
        }
        Err(error) if !is_unusable(&error) && !matches!(error, SampleError::NoPartitioning { .. }) => {
            return Err(error);
        }
        _ => {}
    }
    if memory_bytes > work.most_bytes {
        let (needed, allowed) = (ByteCount(memory_bytes), ByteCount(work.most_bytes));
        let (nodes, partitions) = (dataset.manifest().nodes.count, request.partitions);
        return Err(SampleError::PartitionMemory { nodes, partitions, needed, allowed });
    }
    let staging = dataset.derive(&derived_name)?;
    let making = PartitionMaking { dataset, request: &request, source, work, staging };
    let is_narrow = request.partitions <= MOST_NARROW;
    let (passes, cluster_passes) = match (dataset.manifest().id_dtype() == Dtype::U64, is_narrow) {
        (false, true) => making.run::<u32, u16>()?,
        (false, false) => making.run::<u32, u32>()?,
        (true, true) => making.run::<u64, u16>()?,
        (true, false) => making.run::<u64, u32>()?,
    };
    let stored = StoredPartitioning::open(dataset, name)?;
    Ok(PartitionMade { stored, passes, cluster_passes, is_reused: false, memory_bytes })
}

/// The memory that partitioning a dataset takes.
pub(super) fn memory_bytes(dataset: &Dataset, partitions: u32) -> u64 {
    let nodes = dataset.manifest().nodes.count;
    let fennel = match partitions <= MOST_NARROW {
        true => Fennel::<u16>::bytes_for(nodes, partitions),
        false => Fennel::<u32>::bytes_for(nodes, partitions),
    };
    let streams = directions(dataset).len() as u64 * AdjacencyInOrder::<u64>::BYTES;
    // Clusters come first, with the bits of training nodes.
    let clusters = Propagation::bytes_for(nodes, partitions).saturating_add(nodes / 8 + 8);
    fennel.max(clusters).saturating_add(streams).saturating_add(OTHER_BYTES)
}

/// The adjacency that is streamed: all that is stored, unless both directions have the same edges.
fn directions(dataset: &Dataset) -> &'static [Direction] {
    let edges = &dataset.manifest().edges;
    match edges.out_neighbours && !edges.undirected {
        true => &[Direction::Incoming, Direction::Outgoing],
        false => &[Direction::Incoming],
    }
}

fn request_of(dataset: &Dataset, source: &PartitionSource) -> Result<PartitionRequest> {
    let refuse = |what, found: u32, most: u32| {
        (found == 0 || found > most).then_some(SampleError::PartitionCount {
            what,
            found: found as u64,
            most: most as u64,
        })
    };
    let (partitions, method) = match source {
        PartitionSource::Fennel { partitions, passes } => {
            if let Some(refusal) = refuse("passes", *passes, u32::MAX) {
                return Err(refusal);
            }
            let direction = match directions(dataset) {
                [_, _] => Direction::Both,
                _ => Direction::Incoming,
            };
            (*partitions, PartitionMethod::Fennel { passes: *passes, direction })
        }
        PartitionSource::File { path, partitions } => {
            let found = given::check(path, dataset.manifest().nodes.count, *partitions)?;
            (found.partitions, PartitionMethod::File { digest: found.digest })
        }
    };
    match refuse("partitions", partitions, MOST_PARTITIONS) {
        Some(refusal) => Err(refusal),
        None => Ok(PartitionRequest { version: VERSION, partitions, method }),
    }
}

/// A partitioning being made.
struct PartitionMaking<'a> {
    dataset: &'a Dataset,
    request: &'a PartitionRequest,
    source: &'a PartitionSource,
    work: &'a PartitionWork<'a>,
    staging: Staging,
}

impl PartitionMaking<'_> {
    fn run<I: StoredId, W: PartitionWord>(self) -> Result<(Vec<PartitionPass>, Vec<PartitionPass>)> {
        let (journal, _) = self.staging.journal(&self.dataset.inputs_of(KIND, &self.request.to_json()))?;
        let mut cluster_passes = Vec::new();
        let (fennel, passes) = match self.source {
            PartitionSource::Fennel { passes, .. } => {
                self.passes::<I, W>(*passes, &journal, &mut cluster_passes)?
            }
            PartitionSource::File { path, .. } => {
                let shape = self.shape();
                let words = given::read(path, shape.nodes, shape.partitions, &self.request.method)?;
                (Fennel::continued(shape, training_bits(self.dataset)?, words), vec![])
            }
        };
        let (most_nodes, most_training) = fennel.largest();
        let shape = self.shape();
        let summary = PartitionSummary {
            nodes: shape.nodes,
            training: shape.training,
            edges: self.dataset.manifest().edges.count,
            cut_edges: self.cut_edges::<I, W>(fennel.words())?,
            most_nodes,
            most_training,
            empty: fennel.empty(),
        };
        let entry = write(self.staging.directory(), ARRAY, fennel.words())?;
        drop(fennel);
        let parameters = PartitionParameters { request: self.request.clone(), summary };
        let parameters = serde_json::to_value(parameters).expect("parameters are plain data");
        self.staging.publish_derived(self.dataset, KIND, parameters, vec![entry])?;
        Ok((passes, cluster_passes))
    }

    fn shape(&self) -> PartitionShape {
        let manifest = self.dataset.manifest();
        PartitionShape {
            nodes: manifest.nodes.count,
            edges: manifest.edges.count * directions(self.dataset).len() as u64,
            training: training_count(self.dataset),
            partitions: self.request.partitions,
        }
    }

    /// All passes that are not finished yet.
    fn passes<I: StoredId, W: PartitionWord>(
        &self,
        count: u32,
        journal: &Journal,
        cluster_passes: &mut Vec<PartitionPass>,
    ) -> Result<(Fennel<W>, Vec<PartitionPass>)> {
        let (shape, folder) = (self.shape(), self.staging.work_directory());
        let training = training_bits(self.dataset)?;
        let finished: Option<FinishedPass> = journal.done(STEP);
        let (mut fennel, done) = match finished {
            Some(FinishedPass { pass, entry }) => {
                // After clusters alone, some nodes have none yet.
                let most = shape.partitions + u32::from(pass == 0);
                let words = read_words(&ArrayFile::open(&folder, &entry)?, most)?;
                (Fennel::continued(shape, training, words), pass)
            }
            None => match self.seeds::<I, W>(&shape, &training, cluster_passes)? {
                Some(words) => {
                    let entry = write(&folder, "pass-0", &words)?;
                    journal.record(STEP, &FinishedPass { pass: 0, entry })?;
                    (Fennel::continued(shape, training, words), 0)
                }
                None => (Fennel::new(shape, training), 0),
            },
        };
        let mut passes = Vec::new();
        for pass in done + 1..=count {
            let started = Instant::now();
            fennel.begin_pass();
            let neighbours = self.pass::<I, _>(&mut fennel, &format!("pass {pass} of {count}"))?;
            passes.push(PartitionPass {
                pass,
                moved: fennel.moved(),
                neighbours,
                seconds: started.elapsed().as_secs_f64(),
            });
            if pass < count {
                let entry = write(&folder, &format!("pass-{pass}"), fennel.words())?;
                journal.record(STEP, &FinishedPass { pass, entry })?;
                let before = folder.join(format!("pass-{}.bin", pass - 1));
                if before.exists() {
                    fs::remove_file(&before).map_err(StoreError::io(&before))?;
                }
            }
        }
        Ok((fennel, passes))
    }

    /// The partitions of nodes in large clusters; `None` if partitions are too small for clusters.
    fn seeds<I: StoredId, W: PartitionWord>(
        &self,
        shape: &PartitionShape,
        training: &[u64],
        passes: &mut Vec<PartitionPass>,
    ) -> Result<Option<Vec<W>>> {
        let Some(mut growing) = Propagation::new(shape) else { return Ok(None) };
        for number in 1..=PROPAGATIONS {
            let started = Instant::now();
            let neighbours = self.pass::<I, _>(&mut growing, &format!("clusters {number}"))?;
            let (moved, seconds) = (std::mem::take(&mut growing.moved), started.elapsed().as_secs_f64());
            passes.push(PartitionPass { pass: passes.len() as u32 + 1, moved, neighbours, seconds });
        }
        let mut merging = Merging::new(growing, shape, training);
        loop {
            // What the passes before have freed is not kept beside what comes.
            esker_io::trim_freed_memory();
            let started = Instant::now();
            merging.begin_round();
            let name = format!("merge clusters {}", passes.len() as u32 + 1 - PROPAGATIONS);
            let neighbours = self.pass::<I, _>(&mut merging, &name)?;
            let (moved, is_due) = merging.end_round();
            let seconds = started.elapsed().as_secs_f64();
            passes.push(PartitionPass { pass: passes.len() as u32 + 1, moved, neighbours, seconds });
            if !is_due {
                break;
            }
        }
        let (labels, of_cluster) = merging.seeds(shape.partitions);
        esker_io::trim_freed_memory();
        let partition = |label: u32| of_cluster.get(label as usize).copied().unwrap_or(shape.partitions);
        Ok(Some(labels.into_iter().map(|label| W::of(partition(label))).collect()))
    }

    /// One pass over all nodes. Returns the number of neighbours.
    fn pass<I: StoredId, V: NodeVisitor>(&self, visitor: &mut V, name: &str) -> Result<u64> {
        let mut streams = directions(self.dataset)
            .iter()
            .map(|direction| AdjacencyInOrder::<I>::open(self.dataset, *direction))
            .collect::<Result<Vec<_>>>()?;
        let (nodes, edges) = (self.dataset.manifest().nodes.count, self.dataset.manifest().edges.count);
        let all = edges * streams.len() as u64;
        self.work.progress.stage(name, Some(all), Unit::Count("edges"));
        let mut counted = 0;
        for node in 0..nodes {
            if node % STOP_NODES == 0 {
                self.go_on(&mut counted)?;
            }
            visitor.begin(NodeId(node));
            for stream in &mut streams {
                let mut left = stream.next_degree()?;
                counted += left;
                while left > 0 {
                    let (words, range) = stream.next_entries(left)?;
                    left -= range.len() as u64;
                    visitor.count(words, range);
                }
            }
            visitor.end();
        }
        self.go_on(&mut counted)?;
        self.work.progress.finish();
        Ok(all)
    }

    /// Edges between partitions.
    fn cut_edges<I: StoredId, W: PartitionWord>(&self, partitions: &[W]) -> Result<u64> {
        let mut stream = AdjacencyInOrder::<I>::open(self.dataset, Direction::Incoming)?;
        let edges = self.dataset.manifest().edges.count;
        self.work.progress.stage("count edges cut", Some(edges), Unit::Count("edges"));
        let (mut cut, mut counted) = (0, 0);
        for (node, own) in (0..).zip(partitions) {
            if node % STOP_NODES == 0 {
                self.go_on(&mut counted)?;
            }
            let mut left = stream.next_degree()?;
            counted += left;
            while left > 0 {
                let (words, range) = stream.next_entries(left)?;
                left -= range.len() as u64;
                cut += other_partitions(partitions, words, range, *own);
            }
        }
        self.go_on(&mut counted)?;
        self.work.progress.finish();
        Ok(cut)
    }

    /// Reports what was counted, and fails if a stop was requested.
    fn go_on(&self, counted: &mut u64) -> Result<()> {
        self.work.progress.advance(std::mem::take(counted));
        if self.work.stop.is_asked() { Err(SampleError::Stopped) } else { Ok(()) }
    }
}

/// Neighbours that are not in a node's own partition.
fn other_partitions<I: StoredId, W: PartitionWord>(
    partitions: &[W],
    words: &[I],
    range: std::ops::Range<usize>,
    own: W,
) -> u64 {
    let is_cut = |at: usize| {
        if let Some(soon) = words.get(at + PREFETCH_DISTANCE) {
            esker_io::prefetch(partitions, soon.index());
        }
        partitions[words[at].index()] != own
    };
    range.filter(|at| is_cut(*at)).count() as u64
}

/// Writes the partitions of all nodes as an array.
fn write<W: PartitionWord>(folder: &Path, name: &str, words: &[W]) -> Result<FileEntry> {
    let mut writer = ArrayWriter::create(folder, name, Dtype::U8, size_of::<W>() as u64)?;
    // In pieces, so that the writer need not keep much.
    words.chunks(1 << 18).try_for_each(|some| writer.write(bytemuck::cast_slice(some)))?;
    Ok(writer.finish()?)
}

/// A bit per node, set for training nodes.
fn training_bits(dataset: &Dataset) -> Result<Vec<u64>> {
    let nodes = dataset.manifest().nodes.count;
    let mut bits = vec![0u64; nodes.div_ceil(64) as usize];
    let Some(array) = dataset.array(file::SPLIT_TRAIN).filter(|_| training_count(dataset) > 0) else {
        return Ok(bits);
    };
    let (mut elements, mut chunk, mut before) = (array.elements(0)?, vec![0u64; 1 << 14], None);
    loop {
        let filled = elements.fill_ids(&mut chunk)?;
        if filled == 0 {
            return Ok(bits);
        }
        for id in &chunk[..filled] {
            if *id >= nodes || before >= Some(*id) {
                let expected = format!("ascending node ids below {nodes}");
                return Err(StoreError::inconsistent(array.path(), expected, id).into());
            }
            bits[(id / 64) as usize] |= 1 << (id % 64);
            before = Some(*id);
        }
    }
}
