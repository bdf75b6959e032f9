//! Topology on disk (Ginex). Offsets are in memory, with a few bits each. Adjacency is in files, some of it also in a
//! cache. The entries of a hop are fetched together: cached ones at once, the others by one asynchronous plan in file
//! order, so that nodes which share a block read it once.

mod lookup;

use super::cache::NeighbourCache;
use super::elias_fano::{EliasFano, EliasFanoBuilder};
use super::group::{GroupCache, GroupNeighbours, TakenGroup};
use super::{Direction, Fetched, NotInMemory, RequestedEntries, StoredId, Topology, TopologyWorkspace};
use crate::{Batches, Position, Result, SampleError};
use esker_io::{AlignedBuffer, DIRECT_ALIGN, Files, Options, Piece, Queue};
use esker_store::{ArrayFile, Dataset, Elements, PAYLOAD_OFFSET, StoreError, file};
use esker_types::{Dtype, EdgeId, NodeId};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes and pieces per job, and jobs in flight. The device has a full queue while a job is delivered.
const JOB_BYTES: usize = 256 << 10;
const JOB_PIECES: usize = 4096;
const JOBS: usize = 4;
/// Entries at most this far apart are read as one piece.
const GAP_BYTES: u64 = 256;
/// Offsets read at a time.
const CHUNK: usize = 1 << 15;
/// How far ahead offsets and cache members are prefetched.
const PREFETCH_DISTANCE: usize = 16;
/// Positions in a node's adjacency are 32 bits, over both directions together.
const MOST_DEGREE: u64 = 1 << 31;

/// Files and degrees of a dataset's adjacency.
pub struct DiskGraph {
    dataset: Arc<Dataset>,
    direction: Direction,
    nodes: u64,
    /// Adjacency of the first direction, and of the second if there are two.
    parts: Vec<DiskPart>,
    /// The adjacency of each part, then edge ids of outgoing adjacency, then relations. The last two may be absent.
    files: Files,
    edge_ids: Option<DiskColumn>,
    relations: Option<DiskColumn>,
    counters: DiskCounters,
}

struct DiskPart {
    offsets: EliasFano,
    entries: u64,
    is_outgoing: bool,
    array: usize,
}

/// An array that is read element by element.
#[derive(Clone, Copy)]
struct DiskColumn {
    file: usize,
    array: usize,
    bytes: u64,
    /// All elements are below this.
    bound: u64,
}

/// Counters of all samplers together.
#[derive(Debug, Default)]
struct DiskCounters {
    lists: AtomicU64,
    cached: AtomicU64,
    grouped: AtomicU64,
    reads: AtomicU64,
    read_bytes: AtomicU64,
    group_read_bytes: AtomicU64,
}

/// Counters of what sampling has read so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NeighbourCounters {
    /// Nodes of which neighbours were requested.
    pub lists: u64,
    /// Nodes that were in a cache.
    pub cached: u64,
    /// Those of them that were in the batch's group of partitions.
    pub grouped: u64,
    /// Disk reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Those of them that are the neighbours of groups.
    pub group_read_bytes: u64,
}

impl DiskGraph {
    /// Bytes of an open graph.
    pub fn bytes_for(dataset: &Dataset, direction: Direction) -> u64 {
        let (nodes, edges) = (dataset.manifest().nodes.count, dataset.manifest().edges.count);
        let one = EliasFano::bytes_for(nodes + 1, edges);
        one * if direction == Direction::Both { 2 } else { 1 }
    }

    /// Opens the adjacency of a dataset and reads its offsets.
    pub fn open(dataset: &Arc<Dataset>, direction: Direction) -> Result<DiskGraph> {
        let manifest = dataset.manifest();
        let (nodes, edges) = (manifest.nodes.count, manifest.edges.count);
        let array = |name: &str| {
            let found = dataset.arrays().iter().position(|array| array.entry().name == name);
            found.ok_or_else(|| super::lookup::no_adjacency(dataset, name))
        };
        let incoming = (file::IN_OFFSETS, file::IN_NEIGHBOURS, false);
        let outgoing = (file::OUT_OFFSETS, file::OUT_NEIGHBOURS, true);
        let requested = match direction {
            Direction::Incoming => vec![incoming],
            Direction::Outgoing => vec![outgoing],
            Direction::Both => vec![incoming, outgoing],
        };
        let (mut parts, mut opened) = (Vec::new(), Vec::new());
        for (offsets, neighbours, is_outgoing) in requested {
            let offsets = load_offsets(&dataset.arrays()[array(offsets)?], nodes, edges)?;
            opened.push(array(neighbours)?);
            parts.push(DiskPart { offsets, entries: edges, is_outgoing, array: array(neighbours)? });
        }
        let mut column = |name: &str, bound: u64| -> Result<DiskColumn> {
            let array = array(name)?;
            opened.push(array);
            let bytes = dataset.arrays()[array].entry().dtype.bytes();
            Ok(DiskColumn { file: opened.len() - 1, array, bytes, bound })
        };
        let edge_ids = match direction {
            Direction::Incoming => None,
            _ => Some(column(file::OUT_EDGE_IDS, edges)?),
        };
        let relations = match &manifest.edges.relations {
            Some(relations) => Some(column(file::EDGE_RELATION, relations.count)?),
            None => None,
        };
        let arrays: Vec<&ArrayFile> = opened.iter().map(|array| &dataset.arrays()[*array]).collect();
        let files = dataset.open_files(&arrays, &Options::default())?;
        let counters = DiskCounters::default();
        Ok(DiskGraph {
            dataset: dataset.clone(),
            direction,
            nodes,
            parts,
            files,
            edge_ids,
            relations,
            counters,
        })
    }

    /// Nodes of the graph.
    pub fn nodes(&self) -> u64 {
        self.nodes
    }

    /// The direction of edges along which neighbours are found.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Entries of the whole adjacency.
    pub fn entries(&self) -> u64 {
        self.parts.iter().map(|part| part.entries).sum()
    }

    /// The I/O backend in use.
    pub fn io_backend(&self) -> &esker_io::ChosenBackend {
        self.files.io_backend()
    }

    /// The counters so far.
    pub fn counters(&self) -> NeighbourCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let DiskCounters { lists, cached, grouped, reads, read_bytes, group_read_bytes } = &self.counters;
        NeighbourCounters {
            lists: get(lists),
            cached: get(cached),
            grouped: get(grouped),
            reads: get(reads),
            read_bytes: get(read_bytes),
            group_read_bytes: get(group_read_bytes),
        }
    }

    /// Counts the reads of a group.
    pub(super) fn count_group(&self, reads: u64, bytes: u64) {
        self.counters.reads.fetch_add(reads, Ordering::Relaxed);
        self.counters.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.counters.group_read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A node's degree.
    pub fn degree(&self, node: NodeId) -> u64 {
        (0..self.parts.len()).map(|part| self.part_degree(part, node)).sum()
    }

    pub(super) fn parts(&self) -> usize {
        self.parts.len()
    }

    #[inline(always)]
    pub(super) fn bounds(&self, part: usize, node: NodeId) -> (u64, u64) {
        self.parts[part].offsets.pair(node.index())
    }

    #[inline(always)]
    pub(super) fn part_degree(&self, part: usize, node: NodeId) -> u64 {
        let (start, end) = self.bounds(part, node);
        end - start
    }

    /// The node whose neighbours have the entry of a part.
    pub(super) fn owner(&self, part: usize, entry: u64) -> NodeId {
        let (mut low, mut high) = (0, self.nodes);
        while low < high {
            let middle = low + (high - low) / 2;
            match self.bounds(part, NodeId(middle)).1 <= entry {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        NodeId(low)
    }

    pub(super) fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }

    /// Entries of each part.
    pub(super) fn part_entries(&self) -> u64 {
        self.parts[0].entries
    }

    /// The degrees of all nodes in order.
    pub fn degrees(&self) -> impl Iterator<Item = u64> + '_ {
        let mut offsets: Vec<_> = self.parts.iter().map(|part| (part.offsets.in_order(), 0)).collect();
        offsets.iter_mut().for_each(|(numbers, before)| *before = numbers.next().unwrap_or(0));
        (0..self.nodes).map(move |_| {
            let degree = |(numbers, before): &mut (_, u64)| {
                let end = Iterator::next(numbers).unwrap_or(*before);
                end - std::mem::replace(before, end)
            };
            offsets.iter_mut().map(degree).sum()
        })
    }

    /// Streams the adjacency of a part from an entry to the end.
    pub(super) fn stream_from(&self, part: usize, first: u64) -> Result<NeighbourStream> {
        let array = &self.dataset.arrays()[self.parts[part].array];
        Ok(NeighbourStream { elements: array.elements(first)?, array: array.clone(), nodes: self.nodes })
    }
}

fn load_offsets(array: &ArrayFile, nodes: u64, edges: u64) -> Result<EliasFano> {
    let refuse = |expected: String, found: u64| {
        SampleError::from(StoreError::inconsistent(array.path(), expected, found))
    };
    let mut builder = EliasFanoBuilder::new(nodes + 1, edges);
    let (mut elements, mut chunk) = (array.elements(0)?, vec![0u64; CHUNK]);
    let (mut before, mut index) = (0, 0);
    loop {
        let filled = elements.fill_ids(&mut chunk)?;
        if filled == 0 {
            break;
        }
        for offset in &chunk[..filled] {
            let is_end = (index == 0 && *offset != 0) || (index == nodes && *offset != edges);
            if *offset < before || *offset > edges || is_end {
                return Err(refuse(format!("rising offsets from 0 to {edges}"), *offset));
            }
            if *offset - before > MOST_DEGREE {
                return Err(refuse(format!("nodes with at most {MOST_DEGREE} neighbours"), *offset - before));
            }
            builder.push(*offset);
            (before, index) = (*offset, index + 1);
        }
    }
    if index != nodes + 1 {
        return Err(refuse(format!("{} offsets", nodes + 1), index));
    }
    Ok(builder.finish())
}

/// A stream of adjacency entries, with their ids checked.
pub(super) struct NeighbourStream {
    elements: Elements,
    array: ArrayFile,
    nodes: u64,
}

impl NeighbourStream {
    /// Fills `out` as far as there are entries. Returns their number.
    pub fn fill<W: StoredId>(&mut self, out: &mut [W]) -> Result<usize> {
        let filled = self.elements.fill(out)?;
        check_ids(&out[..filled], self.nodes, &self.array)?;
        Ok(filled)
    }

    /// Moves on to entry `to`, which is at or after `at`.
    pub fn skip_to(&mut self, to: u64, at: &mut u64) -> Result<()> {
        // A stream only moves forward. A long skip opens another stream.
        if to > *at {
            let width = self.array.entry().dtype.bytes();
            if (to - *at) * width > FAR_BYTES {
                self.elements = self.array.elements(to)?;
            } else {
                let mut left = to - *at;
                let mut bin = vec![0u8; ((left.min(CHUNK as u64)) * width) as usize];
                while left > 0 {
                    let now = left.min(CHUNK as u64);
                    self.skip(&mut bin[..(now * width) as usize], width)?;
                    left -= now;
                }
            }
            *at = to;
        }
        Ok(())
    }

    fn skip(&mut self, bin: &mut [u8], width: u64) -> Result<()> {
        match width {
            4 => drop(self.elements.fill(bytemuck::cast_slice_mut::<u8, [u8; 4]>(bin))?),
            _ => drop(self.elements.fill(bytemuck::cast_slice_mut::<u8, [u8; 8]>(bin))?),
        }
        Ok(())
    }

    /// Fills `out` with the next entries.
    pub fn take<W: StoredId>(&mut self, at: &mut u64, out: &mut [W]) -> Result<()> {
        let filled = self.fill(out)?;
        assert_eq!(filled, out.len(), "offsets end where entries do");
        *at += out.len() as u64;
        Ok(())
    }
}

/// From this distance on, a new stream costs less than reading and discarding.
const FAR_BYTES: u64 = 8 << 20;

pub(super) fn check_ids<W: StoredId>(words: &[W], nodes: u64, array: &ArrayFile) -> Result<()> {
    match words.iter().max().filter(|word| word.node().0 >= nodes) {
        Some(word) => {
            let expected = format!("node ids below {nodes}");
            Err(StoreError::inconsistent(array.path(), expected, word.node().0).into())
        }
        None => Ok(()),
    }
}

/// A graph whose adjacency is on disk, with an optional cache of some nodes' neighbours, and optionally those of the
/// group of partitions that a batch is of.
pub struct OnDisk<W> {
    graph: Arc<DiskGraph>,
    cache: Option<Arc<NeighbourCache<W>>>,
    groups: Option<Arc<GroupCache<W>>>,
}

impl<W> Clone for OnDisk<W> {
    fn clone(&self) -> OnDisk<W> {
        OnDisk { graph: self.graph.clone(), cache: self.cache.clone(), groups: self.groups.clone() }
    }
}

impl<W: StoredId> OnDisk<W> {
    /// The topology of a graph whose ids are stored as `W`.
    pub fn new(graph: Arc<DiskGraph>, cache: Option<Arc<NeighbourCache<W>>>) -> OnDisk<W> {
        let narrow = graph.dataset.manifest().id_dtype() != Dtype::U64;
        assert_eq!(narrow, size_of::<W>() == 4, "words as wide as they are stored");
        OnDisk { graph, cache, groups: None }
    }

    /// The same topology with the neighbours of groups of partitions, which [`Topology::begin`] brings into memory.
    pub fn with_groups(self, groups: Option<Arc<GroupCache<W>>>) -> OnDisk<W> {
        OnDisk { groups, ..self }
    }

    /// Largest size of a sampler's workspace for hops of up to `nodes` nodes and `entries` entries, in bytes. It
    /// includes what sampling keeps for adjacency that must be fetched.
    pub fn workspace_bytes(nodes: u64, entries: u64) -> u64 {
        let job = JOB_BYTES as u64 + JOB_PIECES as u64 * size_of::<Piece>() as u64;
        let queue = Options::default().memory_bytes((JOBS * JOB_PIECES) as u64) + JOBS as u64 * job;
        // Arrays grow by doubling: requests, nodes, words and positions.
        let grown =
            entries.saturating_mul(16 + size_of::<W>() as u64 + 4).saturating_add(nodes.saturating_mul(16));
        queue.saturating_add(grown.saturating_mul(2))
    }
}

/// An entry to be read: its element in the file and its index in the output.
type DiskEntry = (u64, u32);

/// Workspace of a sampler on a graph on disk. It stays on the sampling thread, as its queue must.
pub struct DiskWorkspace<W> {
    reading: DiskReading,
    /// The group of the batch that is sampled, if its neighbours are in memory.
    group: Option<TakenGroup<W>>,
}

impl<W> Default for DiskWorkspace<W> {
    fn default() -> DiskWorkspace<W> {
        DiskWorkspace { reading: DiskReading::default(), group: None }
    }
}

impl<W> TopologyWorkspace for DiskWorkspace<W> {
    /// Without its group, which others have too.
    fn bytes(&self) -> u64 {
        self.reading.bytes()
    }
}

/// What reading entries from disk needs.
#[derive(Default)]
struct DiskReading {
    queue: Option<Queue>,
    /// Nodes to be read: node id, index of the first entry and number of entries.
    lists: Vec<(u64, u32, u32)>,
    entries: Vec<DiskEntry>,
    spare: Vec<(AlignedBuffer, Vec<Piece>)>,
}

impl DiskReading {
    fn bytes(&self) -> u64 {
        let queue =
            self.queue.as_ref().map_or(0, |_| Options::default().memory_bytes((JOBS * JOB_PIECES) as u64));
        let jobs = self.spare.len() as u64 * (JOB_BYTES + JOB_PIECES * size_of::<Piece>()) as u64;
        let arrays = self.lists.capacity() * 16 + self.entries.capacity() * size_of::<DiskEntry>();
        queue + jobs + arrays as u64
    }
}

impl<W: StoredId> Topology for OnDisk<W> {
    type StoredId = W;
    type Workspace = DiskWorkspace<W>;
    type HopInMemory<'a> = NotInMemory<W>;

    fn nodes(&self) -> u64 {
        self.graph.nodes
    }

    fn entries(&self) -> u64 {
        self.graph.entries()
    }

    fn has_relations(&self) -> bool {
        self.graph.relations.is_some()
    }

    fn hop_in_memory(&self, _: &[NodeId], _: &DiskWorkspace<W>) -> Result<Option<NotInMemory<W>>> {
        Ok(None)
    }

    fn degrees(&self, nodes: &[NodeId], _: &DiskWorkspace<W>, out: &mut Vec<u32>) -> Result<()> {
        out.extend(nodes.iter().enumerate().map(|(at, node)| {
            if let Some(soon) = nodes.get(at + PREFETCH_DISTANCE) {
                self.graph.parts.iter().for_each(|part| part.offsets.prefetch(soon.index()));
            }
            self.graph.degree(*node) as u32
        }));
        Ok(())
    }

    fn begin(&self, batches: &dyn Batches, at: Position, workspace: &mut DiskWorkspace<W>) -> Result<()> {
        let Some(groups) = &self.groups else { return Ok(()) };
        let group = batches.group(at);
        let id = group.as_ref().map(|group| (group.epoch, group.number));
        if workspace.group.as_ref().map(|(id, _)| *id) != id {
            // A sampler has one group at most.
            workspace.group = None;
            workspace.group = group.map_or(Ok(None), |group| groups.take(group, batches))?;
        }
        Ok(())
    }

    fn fetch(
        &self,
        requested: RequestedEntries<'_>,
        workspace: &mut DiskWorkspace<W>,
        out: &mut Fetched<W>,
    ) -> Result<()> {
        let DiskWorkspace { reading: workspace, group } = workspace;
        let group = group.as_ref().map(|(_, group)| &**group);
        out.edges.clear();
        out.relations.clear();
        out.words.clear();
        out.words.resize(requested.positions.len(), W::default());
        self.take_cached(&requested, group, workspace, &mut out.words);
        // In file order.
        workspace.lists.sort_unstable();
        for part in 0..self.graph.parts.len() {
            let lists = std::mem::take(&mut workspace.lists);
            self.part_entries(part, &requested, lists.iter().copied(), &mut workspace.entries);
            workspace.lists = lists;
            let array = &self.graph.dataset.arrays()[self.graph.parts[part].array];
            let words = &mut out.words;
            let bytes = size_of::<W>() as u64;
            self.graph.read(part, bytes, workspace, |place, bytes| {
                let word: W = bytemuck::pod_read_unaligned(bytes);
                words[place as usize] = word;
                check_ids(&[word], self.graph.nodes, array)
            })?;
        }
        if requested.edges || requested.relations {
            self.fetch_edges(&requested, workspace, out)?;
        }
        Ok(())
    }
}

impl<W: StoredId> OnDisk<W> {
    /// Copies entries from the group and from the cache. Notes the nodes that are in neither.
    fn take_cached(
        &self,
        requested: &RequestedEntries<'_>,
        group: Option<&GroupNeighbours<W>>,
        workspace: &mut DiskReading,
        words: &mut [W],
    ) {
        let (lists, counters) = (&mut workspace.lists, &self.graph.counters);
        lists.clear();
        let (mut start, mut asked, mut grouped) = (0usize, 0u64, 0u64);
        for (at, (node, length)) in requested.nodes.iter().zip(requested.lengths).enumerate() {
            if let Some(soon) = requested.nodes.get(at + PREFETCH_DISTANCE) {
                self.cache.iter().for_each(|cache| cache.prefetch(*soon));
                group.iter().for_each(|group| group.prefetch(*soon));
            }
            let range = start..start + *length as usize;
            start = range.end;
            if range.is_empty() {
                continue;
            }
            asked += 1;
            let in_group = group.and_then(|group| group.list(*node));
            grouped += in_group.is_some() as u64;
            match in_group.or_else(|| self.cache.as_ref().and_then(|cache| cache.list(*node))) {
                Some(list) => {
                    let positions = &requested.positions[range.clone()];
                    words[range].iter_mut().zip(positions).for_each(|(word, at)| *word = list[*at as usize]);
                }
                None => lists.push((node.0, range.start as u32, *length)),
            }
        }
        counters.lists.fetch_add(asked, Ordering::Relaxed);
        counters.cached.fetch_add(asked - lists.len() as u64, Ordering::Relaxed);
        counters.grouped.fetch_add(grouped, Ordering::Relaxed);
    }

    /// Collects in `entries` those requested entries that are in a part, in file order.
    fn part_entries(
        &self,
        part: usize,
        requested: &RequestedEntries<'_>,
        lists: impl Iterator<Item = (u64, u32, u32)>,
        entries: &mut Vec<DiskEntry>,
    ) {
        entries.clear();
        for (node, first, length) in lists {
            let node = NodeId(node);
            // The second part's positions follow those of the first.
            let skipped = if part == 1 { self.graph.part_degree(0, node) } else { 0 };
            let (start, end) = self.graph.bounds(part, node);
            for place in first..first + length {
                let position = requested.positions[place as usize] as u64;
                if position >= skipped && position - skipped < end - start {
                    entries.push((start + position - skipped, place));
                }
            }
        }
    }

    /// Edge ids and relations of all entries.
    fn fetch_edges(
        &self,
        requested: &RequestedEntries<'_>,
        workspace: &mut DiskReading,
        out: &mut Fetched<W>,
    ) -> Result<()> {
        out.edges.resize(requested.positions.len(), EdgeId(0));
        let mut lists = std::mem::take(&mut workspace.lists);
        lists.clear();
        let mut start = 0;
        for (node, length) in requested.nodes.iter().zip(requested.lengths) {
            lists.push((node.0, start, *length));
            start += length;
        }
        lists.sort_unstable();
        for (part, lists_of) in self.graph.parts.iter().enumerate() {
            self.part_entries(part, requested, lists.iter().copied(), &mut workspace.entries);
            let edges = &mut out.edges;
            match self.graph.edge_ids.filter(|_| lists_of.is_outgoing) {
                // The id of an edge is its position in the incoming adjacency.
                None => {
                    workspace.entries.iter().for_each(|(edge, place)| edges[*place as usize] = EdgeId(*edge));
                }
                Some(column) => self.graph.read_column(column, workspace, |place, edge| {
                    edges[place as usize] = EdgeId(edge);
                })?,
            }
        }
        workspace.lists = lists;
        if let (true, Some(column)) = (requested.relations, self.graph.relations) {
            out.relations.resize(requested.positions.len(), 0);
            workspace.entries.clear();
            workspace.entries.extend(out.edges.iter().zip(0..).map(|(edge, place)| (edge.0, place)));
            workspace.entries.sort_unstable();
            let relations = &mut out.relations;
            self.graph
                .read_column(column, workspace, |place, kind| relations[place as usize] = kind as u32)?;
        }
        if !requested.edges {
            out.edges.clear();
        }
        Ok(())
    }
}

impl DiskGraph {
    /// Reads the workspace's entries from a column.
    fn read_column(
        &self,
        column: DiskColumn,
        workspace: &mut DiskReading,
        mut take: impl FnMut(u32, u64),
    ) -> Result<()> {
        let array = &self.dataset.arrays()[column.array];
        self.read(column.file, column.bytes, workspace, |place, bytes| {
            let mut wide = [0; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            let value = u64::from_le_bytes(wide);
            if value >= column.bound {
                let expected = format!("numbers below {}", column.bound);
                return Err(StoreError::inconsistent(array.path(), expected, value).into());
            }
            take(place, value);
            Ok(())
        })
    }

    /// Reads the workspace's entries, which ascend, from a file whose elements have `width` bytes. Several jobs are
    /// always in flight while one is delivered.
    fn read(
        &self,
        file: usize,
        width: u64,
        workspace: &mut DiskReading,
        mut take: impl FnMut(u32, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let DiskReading { queue: kept, entries, spare, .. } = workspace;
        if entries.is_empty() {
            return Ok(());
        }
        let mut queue = match kept.take() {
            Some(queue) => queue,
            None => self.files.queue().map_err(StoreError::from)?,
        };
        let before = queue.counters();
        let (mut next, mut coming) = (0, VecDeque::<Range<usize>>::new());
        while next < entries.len() || !coming.is_empty() {
            while next < entries.len() && coming.len() < JOBS {
                let (buffer, mut pieces) = spare.pop().unwrap_or_else(new_job);
                let end = next + cut(&entries[next..], width, &mut pieces);
                queue.submit(file, pieces, buffer);
                coming.push_back(next..end);
                next = end;
            }
            let (Some(finished), Some(range)) = (queue.wait(), coming.pop_front()) else { break };
            // On an error the queue is dropped, which waits for jobs in flight.
            finished.result.map_err(StoreError::from)?;
            deliver(&entries[range], width, &finished.pieces, &finished.buffer, &mut take)?;
            spare.push((finished.buffer, finished.pieces));
        }
        let after = queue.counters();
        self.counters.reads.fetch_add(after.reads - before.reads, Ordering::Relaxed);
        self.counters.read_bytes.fetch_add(after.read_bytes - before.read_bytes, Ordering::Relaxed);
        *kept = Some(queue);
        Ok(())
    }
}

fn new_job() -> (AlignedBuffer, Vec<Piece>) {
    (AlignedBuffer::new(JOB_BYTES, DIRECT_ALIGN), Vec::with_capacity(JOB_PIECES))
}

/// Cuts as many entries into pieces as a job takes. Returns their number.
fn cut(entries: &[DiskEntry], width: u64, pieces: &mut Vec<Piece>) -> usize {
    pieces.clear();
    for (number, (element, _)) in entries.iter().enumerate() {
        let offset = PAYLOAD_OFFSET + element * width;
        let (used, count) = (pieces.last().map_or(0, |last| last.at + last.bytes), pieces.len());
        match pieces.last_mut() {
            Some(last) if offset + width <= last.offset + last.bytes => {}
            Some(last) if offset <= last.offset + last.bytes + GAP_BYTES => {
                let bytes = offset + width - last.offset;
                if last.at + bytes > JOB_BYTES as u64 {
                    return number;
                }
                last.bytes = bytes;
            }
            _ if count == JOB_PIECES || used + width > JOB_BYTES as u64 => return number,
            _ => pieces.push(Piece { offset, bytes: width, at: used }),
        }
    }
    entries.len()
}

fn deliver(
    entries: &[DiskEntry],
    width: u64,
    pieces: &[Piece],
    buffer: &[u8],
    take: &mut impl FnMut(u32, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut piece = 0;
    for (element, place) in entries {
        let offset = PAYLOAD_OFFSET + element * width;
        while offset >= pieces[piece].offset + pieces[piece].bytes {
            piece += 1;
        }
        let at = (pieces[piece].at + offset - pieces[piece].offset) as usize;
        take(*place, &buffer[at..at + width as usize])?;
    }
    Ok(())
}
