//! Writes the adjacency (CSC) from edges sorted by (target, source): offsets, neighbours, and columns by edge id. An
//! edge's id is its position in this order.

use super::edges::EdgeRecord;
use crate::sort::{Sorted, Sorter};
use crate::{ImportWorkspace, Result};
use esker_store::{ArrayWriter, EdgeColumn, FileEntry, file};
use esker_types::{Dtype, IdWidth, Unit};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Properties of the topology that was written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TopologyResult {
    pub nodes: u64,
    pub edges: u64,
    pub id_width: IdWidth,
    pub max_in_degree: u64,
    pub without_in_neighbours: u64,
    /// Largest relation plus one.
    pub relations: u64,
    /// Edges of the source, before anything was added or removed.
    pub source_edges: u64,
    pub columns: Vec<EdgeColumn>,
    pub files: Vec<FileEntry>,
}

/// Which columns to write.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ColumnChoice {
    pub relation: bool,
    pub weight: bool,
    pub time: bool,
    pub position: bool,
}

/// Options of the adjacency.
pub(crate) struct EdgeLayout {
    pub nodes: u64,
    pub columns: ColumnChoice,
    pub remove_duplicates: bool,
    pub relations: u64,
    pub source_edges: u64,
    pub wide_ids: bool,
}

/// Elements collected before they are written.
const PIECE: usize = 1 << 14;

/// Writes ids in the width of the dataset.
pub(crate) struct IdWriter {
    writer: ArrayWriter,
    width: IdWidth,
    narrow: Vec<u32>,
    wide: Vec<u64>,
}

impl IdWriter {
    pub fn create(directory: &Path, name: &str, width: IdWidth, columns: u64) -> Result<IdWriter> {
        let writer = ArrayWriter::create(directory, name, width.dtype(), columns)?;
        Ok(IdWriter { writer, width, narrow: Vec::with_capacity(PIECE), wide: Vec::with_capacity(PIECE) })
    }

    #[inline]
    pub fn push(&mut self, id: u64) -> Result<()> {
        match self.width {
            IdWidth::U32 => self.narrow.push(id as u32),
            IdWidth::U64 => self.wide.push(id),
        }
        if self.narrow.len() + self.wide.len() >= PIECE { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        match self.width {
            IdWidth::U32 => self.writer.write_elements(&self.narrow)?,
            IdWidth::U64 => self.writer.write_elements(&self.wide)?,
        }
        self.narrow.clear();
        self.wide.clear();
        Ok(())
    }

    pub fn finish(mut self) -> Result<FileEntry> {
        self.flush()?;
        Ok(self.writer.finish()?)
    }
}

/// Elements of one type, collected in pieces.
struct ColumnWriter<T> {
    writer: ArrayWriter,
    piece: Vec<T>,
}

impl<T: bytemuck::NoUninit> ColumnWriter<T> {
    fn create(directory: &Path, name: &str, dtype: Dtype) -> Result<ColumnWriter<T>> {
        let writer = ArrayWriter::create(directory, name, dtype, 1)?;
        Ok(ColumnWriter { writer, piece: Vec::with_capacity(PIECE) })
    }

    #[inline]
    fn push(&mut self, value: T) -> Result<()> {
        self.piece.push(value);
        if self.piece.len() >= PIECE {
            self.writer.write_elements(&self.piece)?;
            self.piece.clear();
        }
        Ok(())
    }

    fn finish(mut self) -> Result<FileEntry> {
        self.writer.write_elements(&self.piece)?;
        Ok(self.writer.finish()?)
    }
}

/// Writes offsets and neighbours for nodes in ascending order.
pub(crate) struct AdjacencyWriter {
    offsets: ColumnWriter<u64>,
    neighbours: IdWriter,
    width: IdWidth,
    nodes: u64,
    /// Nodes whose neighbours are complete.
    closed: u64,
    edges: u64,
    node_start: u64,
    max_degree: u64,
    without_neighbours: u64,
}

impl AdjacencyWriter {
    pub fn create(directory: &Path, names: [&str; 2], nodes: u64, width: IdWidth) -> Result<AdjacencyWriter> {
        let mut offsets = ColumnWriter::create(directory, names[0], Dtype::U64)?;
        offsets.push(0)?;
        let neighbours = IdWriter::create(directory, names[1], width, 1)?;
        Ok(AdjacencyWriter {
            offsets,
            neighbours,
            width,
            nodes,
            closed: 0,
            edges: 0,
            node_start: 0,
            max_degree: 0,
            without_neighbours: 0,
        })
    }

    /// Completes the neighbours of all nodes before `node`.
    #[inline]
    fn close_before(&mut self, node: u64) -> Result<()> {
        while self.closed < node {
            let degree = self.edges - self.node_start;
            self.max_degree = self.max_degree.max(degree);
            self.without_neighbours += (degree == 0) as u64;
            self.node_start = self.edges;
            self.closed += 1;
            self.offsets.push(self.edges)?;
        }
        Ok(())
    }

    /// Appends a neighbour of `node`. Calls must have ascending nodes.
    #[inline]
    pub fn push(&mut self, node: u64, neighbour: u64) -> Result<()> {
        self.close_before(node)?;
        self.edges += 1;
        self.neighbours.push(neighbour)
    }

    pub fn finish(mut self) -> Result<TopologyResult> {
        self.close_before(self.nodes)?;
        Ok(TopologyResult {
            nodes: self.nodes,
            edges: self.edges,
            id_width: self.width,
            max_in_degree: self.max_degree,
            without_in_neighbours: self.without_neighbours,
            relations: 0,
            source_edges: self.edges,
            columns: Vec::new(),
            files: vec![self.offsets.finish()?, self.neighbours.finish()?],
        })
    }
}

/// Writes in-neighbours and columns from sorted records.
pub(crate) fn write_sorted<R: EdgeRecord>(
    sorted: &mut Sorted<R>,
    layout: &EdgeLayout,
    directory: &Path,
    workspace: &ImportWorkspace,
) -> Result<TopologyResult> {
    workspace.progress.stage("write topology", None, Unit::Count("edges"));
    let width = if layout.wide_ids { IdWidth::U64 } else { IdWidth::for_nodes(layout.nodes) };
    let mut lists =
        AdjacencyWriter::create(directory, [file::IN_OFFSETS, file::IN_NEIGHBOURS], layout.nodes, width)?;
    let mut columns = ColumnWriters::create(directory, layout.columns)?;
    let (mut chunk, mut last, mut duplicates) = (Vec::new(), None::<R>, 0u64);
    while sorted.next(&mut chunk)? {
        for record in &chunk {
            if layout.remove_duplicates && last.as_ref().is_some_and(|last| last.same_edge(record)) {
                duplicates += 1;
                continue;
            }
            lists.push(record.target(), record.source())?;
            columns.push(record)?;
            last = Some(*record);
        }
        workspace.progress.advance(chunk.len() as u64);
    }
    let mut result = lists.finish()?;
    result.relations = layout.relations;
    result.source_edges = layout.source_edges;
    columns.finish(&mut result)?;
    workspace.progress.finish();
    if duplicates > 0 {
        workspace.progress.note(&format!("{} duplicate edges left out", esker_types::grouped(duplicates)));
    }
    Ok(result)
}

struct ColumnWriters {
    relation: Option<ColumnWriter<u32>>,
    weight: Option<ColumnWriter<f32>>,
    time: Option<ColumnWriter<i64>>,
    position: Option<ColumnWriter<u64>>,
}

impl ColumnWriters {
    fn create(directory: &Path, choice: ColumnChoice) -> Result<ColumnWriters> {
        fn column<T: bytemuck::NoUninit>(
            requested: bool,
            directory: &Path,
            name: &str,
            dtype: Dtype,
        ) -> Result<Option<ColumnWriter<T>>> {
            if requested { ColumnWriter::create(directory, name, dtype).map(Some) } else { Ok(None) }
        }
        Ok(ColumnWriters {
            relation: column(choice.relation, directory, file::EDGE_RELATION, Dtype::U32)?,
            weight: column(choice.weight, directory, file::EDGE_WEIGHT, Dtype::F32)?,
            time: column(choice.time, directory, file::EDGE_TIME, Dtype::I64)?,
            position: column(choice.position, directory, file::EDGE_POSITION, Dtype::U64)?,
        })
    }

    #[inline]
    fn push<R: EdgeRecord>(&mut self, record: &R) -> Result<()> {
        if let Some(column) = &mut self.relation {
            column.push(record.relation())?;
        }
        if let Some(column) = &mut self.weight {
            column.push(record.weight())?;
        }
        if let Some(column) = &mut self.time {
            column.push(record.time())?;
        }
        if let Some(column) = &mut self.position {
            column.push(record.position())?;
        }
        Ok(())
    }

    fn finish(self, result: &mut TopologyResult) -> Result<()> {
        // Relations have a field of their own in the manifest; the others are columns.
        if let Some(column) = self.relation {
            result.files.push(column.finish()?);
        }
        let mut add = |entry: FileEntry| {
            result.columns.push(EdgeColumn {
                name: entry.name.clone(),
                width: entry.columns,
                dtype: entry.dtype,
            });
            result.files.push(entry);
        };
        if let Some(column) = self.weight {
            add(column.finish()?);
        }
        if let Some(column) = self.time {
            add(column.finish()?);
        }
        if let Some(column) = self.position {
            add(column.finish()?);
        }
        Ok(())
    }
}

/// Writes out-neighbours from the in-neighbours just written. A node's out-neighbours are sorted by neighbour, then
/// edge id.
pub(crate) fn out_neighbours(
    requested: bool,
    directory: &Path,
    topology: &TopologyResult,
    workspace: &ImportWorkspace,
) -> Result<Vec<FileEntry>> {
    if !requested {
        return Ok(Vec::new());
    }
    workspace.step("out-neighbours", || {
        // With 32-bit ids one word has both ends: two thirds of the bytes to sort.
        if topology.id_width == IdWidth::U32 {
            write_out(
                directory,
                topology,
                workspace,
                |source, target, edge| [source << 32 | target, edge],
                |record: &[u64; 2]| (record[0] >> 32, record[0] & 0xffff_ffff, record[1]),
            )
        } else {
            write_out(
                directory,
                topology,
                workspace,
                |source, target, edge| [source, target, edge],
                |record: &[u64; 3]| (record[0], record[1], record[2]),
            )
        }
    })
}

fn write_out<R: bytemuck::Pod + Ord + Send + Sync>(
    directory: &Path,
    topology: &TopologyResult,
    workspace: &ImportWorkspace,
    pack: impl Fn(u64, u64, u64) -> R,
    unpack: impl Fn(&R) -> (u64, u64, u64),
) -> Result<Vec<FileEntry>> {
    workspace.progress.stage("out-neighbours", Some(topology.edges), Unit::Count("edges"));
    let mut sorter = Sorter::new(workspace.directory.clone(), "out", workspace.sort_bytes())?;
    for_each_edge(directory, topology, |edges| {
        workspace.progress.advance(edges.len() as u64);
        let records: Vec<R> =
            edges.iter().map(|(source, target, edge)| pack(*source, *target, *edge)).collect();
        sorter.push(&records)
    })?;
    let width = topology.id_width;
    let mut lists =
        AdjacencyWriter::create(directory, [file::OUT_OFFSETS, file::OUT_NEIGHBOURS], topology.nodes, width)?;
    let mut ids = IdWriter::create(directory, file::OUT_EDGE_IDS, IdWidth::for_nodes(topology.edges), 1)?;
    let (mut sorted, mut chunk) = (sorter.finish()?, Vec::new());
    while sorted.next(&mut chunk)? {
        for record in &chunk {
            let (source, target, edge) = unpack(record);
            lists.push(source, target)?;
            ids.push(edge)?;
        }
    }
    let mut files = lists.finish()?.files;
    files.push(ids.finish()?);
    sorted.remove_files()?;
    workspace.progress.finish();
    Ok(files)
}

/// Streams (source, target, edge id) over the in-neighbours in `directory`.
fn for_each_edge(
    directory: &Path,
    topology: &TopologyResult,
    mut take: impl FnMut(&[(u64, u64, u64)]) -> Result<()>,
) -> Result<()> {
    let open = |name: &str| {
        let entry =
            topology.files.iter().find(|entry| entry.name == name).expect("written with the topology");
        esker_store::ArrayFile::open(directory, entry)?.elements(0)
    };
    let (mut offsets, mut neighbours) = (open(file::IN_OFFSETS)?, open(file::IN_NEIGHBOURS)?);
    let (mut ends, mut sources) = (vec![0u64; PIECE], vec![0u64; PIECE]);
    let (mut ends_loaded, mut ends_used) = (offsets.fill(&mut ends)?, 1);
    let (mut target, mut edge, mut edges) = (0u64, 0u64, Vec::with_capacity(PIECE));
    loop {
        let count = neighbours.fill_ids(&mut sources)?;
        if count == 0 {
            return Ok(());
        }
        edges.clear();
        for source in &sources[..count] {
            loop {
                if ends_used == ends_loaded {
                    (ends_loaded, ends_used) = (offsets.fill(&mut ends)?, 0);
                }
                if edge < ends[ends_used] {
                    break;
                }
                target += 1;
                ends_used += 1;
            }
            edges.push((*source, target, edge));
            edge += 1;
        }
        take(&edges)?;
    }
}
