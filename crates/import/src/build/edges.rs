//! Prepares edges for the topology: checks and treats them, packs them into records, sorts them by (target, source).

use super::hold_out::{HeldOutEdges, kept};
use super::selection::Selection;
use super::topology::{self, TopologyResult};
use crate::sort::{Run, Sorter};
use crate::source::{EdgeColumns, EdgeSource, EdgeStream, ForeignEdge, Treatment};
use crate::{ImportWorkspace, Location, Result};
use bytemuck::{Pod, Zeroable};
use esker_store::MOST_NODES;
use esker_types::{ByteCount, Unit};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A stream of edges whose ids are known to be below the number of nodes.
pub struct CheckedEdges<'a> {
    source: &'a dyn EdgeSource,
    stream: Box<dyn EdgeStream>,
    nodes: Option<u64>,
    /// Position of the next edge.
    pub position: u64,
}

impl<'a> CheckedEdges<'a> {
    /// Starts at edge `skip`.
    pub fn open(source: &'a dyn EdgeSource, nodes: Option<u64>, skip: u64) -> Result<CheckedEdges<'a>> {
        Ok(CheckedEdges { source, stream: source.open(skip)?, nodes, position: skip })
    }

    /// The next edges; `false` if there are no more.
    pub fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool> {
        if !self.stream.next(out)? || out.is_empty() {
            return Ok(false);
        }
        let nodes = self.nodes.unwrap_or(MOST_NODES);
        if out.iter().fold(0, |top, edge| top.max(edge.source).max(edge.target)) >= nodes {
            let (at, edge) = out
                .iter()
                .enumerate()
                .find(|(_, edge)| edge.source.max(edge.target) >= nodes)
                .expect("the maximum is one of them");
            let id = if edge.source >= nodes { edge.source } else { edge.target };
            let location = self.source.location(self.position + at as u64);
            let bound = match self.nodes {
                Some(_) => "the number of nodes (of feature or label rows, where there are any)",
                None => "the most a dataset can have",
            };
            return Err(location.bad(format!("node ids below {nodes}, {bound}"), id));
        }
        self.position += out.len() as u64;
        Ok(true)
    }
}

/// An edge as a fixed-size record that sorts by target, then source.
pub trait EdgeRecord: Pod + Ord + Send + Sync {
    fn pack(edge: &ForeignEdge, position: u64) -> Self;
    fn target(&self) -> u64;
    fn source(&self) -> u64;
    /// Same ends and relation.
    fn same_edge(&self, other: &Self) -> bool;
    fn relation(&self) -> u32 {
        0
    }
    fn weight(&self) -> f32 {
        0.0
    }
    fn time(&self) -> i64 {
        0
    }
    fn position(&self) -> u64 {
        0
    }
}

/// Two 32-bit ids in one word: enough for most graphs.
impl EdgeRecord for u64 {
    fn pack(edge: &ForeignEdge, _: u64) -> u64 {
        edge.target << 32 | edge.source
    }
    fn target(&self) -> u64 {
        self >> 32
    }
    fn source(&self) -> u64 {
        self & 0xffff_ffff
    }
    fn same_edge(&self, other: &u64) -> bool {
        self == other
    }
}

/// All columns that an edge may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WideEdge {
    target: u64,
    source: u64,
    position: u64,
    time: i64,
    relation: u32,
    weight_bits: u32,
}

impl Ord for WideEdge {
    fn cmp(&self, other: &WideEdge) -> std::cmp::Ordering {
        let key = |edge: &WideEdge| (edge.target, edge.source, edge.relation, edge.position, edge.time);
        key(self).cmp(&key(other)).then(self.weight_bits.cmp(&other.weight_bits))
    }
}

impl PartialOrd for WideEdge {
    fn partial_cmp(&self, other: &WideEdge) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl EdgeRecord for WideEdge {
    fn pack(edge: &ForeignEdge, position: u64) -> WideEdge {
        WideEdge {
            target: edge.target,
            source: edge.source,
            position,
            time: edge.time,
            relation: edge.relation,
            weight_bits: edge.weight.to_bits(),
        }
    }
    fn target(&self) -> u64 {
        self.target
    }
    fn source(&self) -> u64 {
        self.source
    }
    fn same_edge(&self, other: &WideEdge) -> bool {
        (self.target, self.source, self.relation) == (other.target, other.source, other.relation)
    }
    fn relation(&self) -> u32 {
        self.relation
    }
    fn weight(&self) -> f32 {
        f32::from_bits(self.weight_bits)
    }
    fn time(&self) -> i64 {
        self.time
    }
    fn position(&self) -> u64 {
        self.position
    }
}

/// Progress of spooling: the sorted runs so far and the number of edges in them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Spooled {
    runs: Vec<Run>,
    position: u64,
    /// Largest id so far, plus one, and its approximate position.
    ids_end: u64,
    ids_end_position: u64,
    relations: u64,
    /// Number of edges of the source, once it is read to its end.
    edges: u64,
}

/// If the number of nodes is not given, more than this many nodes per edge are taken for a mistake.
const MOST_NODES_PER_EDGE: u64 = 16;

/// How to treat a source's edges.
pub struct EdgePlan<'a> {
    pub source: &'a dyn EdgeSource,
    pub treatment: Treatment,
    pub stated_nodes: Option<u64>,
    pub selection: Option<&'a Selection>,
    pub held_out: Option<&'a HeldOutEdges>,
    pub keep_positions: bool,
    pub wide_ids: bool,
}

impl EdgePlan<'_> {
    /// Sorts the edges and writes in-neighbours and columns.
    pub fn build(&self, directory: &Path, workspace: &ImportWorkspace) -> Result<TopologyResult> {
        if let Some(done) = workspace.journal.done("topology") {
            return Ok(done);
        }
        let columns = self.source.columns();
        let few_nodes = self.stated_nodes.is_none_or(|nodes| nodes <= 1 << 32);
        if columns.none()
            && !self.keep_positions
            && few_nodes
            && workspace.journal.done::<bool>("ids are wide").is_none()
            && let Some(result) = self.build_with::<u64>(directory, workspace)?
        {
            return Ok(result);
        }
        let result = self.build_with::<WideEdge>(directory, workspace)?;
        Ok(result.expect("wide records hold every id"))
    }

    /// `None` if an id does not fit into the record.
    fn build_with<R: EdgeRecord>(
        &self,
        directory: &Path,
        workspace: &ImportWorkspace,
    ) -> Result<Option<TopologyResult>> {
        let Some((sorter, spooled)) = self.spool::<R>(workspace)? else {
            workspace.journal.forget("edge runs")?;
            workspace.journal.record("ids are wide", &true)?;
            return Ok(None);
        };
        let nodes = match (self.selection, self.stated_nodes) {
            (Some(selection), _) => selection.len(),
            (None, Some(nodes)) => nodes,
            (None, None) => spooled.ids_end,
        };
        self.check_space(nodes, &spooled, directory)?;
        let mut sorted = sorter.finish()?;
        let layout = topology::EdgeLayout {
            nodes,
            columns: self.columns(),
            remove_duplicates: self.treatment.remove_duplicates,
            relations: spooled.relations,
            source_edges: spooled.edges,
            wide_ids: self.wide_ids,
        };
        let result = topology::write_sorted(&mut sorted, &layout, directory, workspace)?;
        workspace.journal.record("topology", &result)?;
        sorted.remove_files()?;
        Ok(Some(result))
    }

    fn columns(&self) -> topology::ColumnChoice {
        let EdgeColumns { relation, weight, time } = self.source.columns();
        topology::ColumnChoice { relation, weight, time, position: self.keep_positions }
    }

    fn spool<R: EdgeRecord>(&self, workspace: &ImportWorkspace) -> Result<Option<(Sorter<R>, Spooled)>> {
        let directory = &workspace.directory;
        let mut spooled: Spooled = workspace.journal.done("edge runs").unwrap_or_default();
        if !spooled.runs.iter().all(|run| run.is_whole::<R>(directory)) {
            spooled = Spooled::default();
        }
        let memory_bytes = workspace.sort_bytes();
        let mut sorter = Sorter::resume(directory.clone(), "edges", memory_bytes, spooled.runs.clone())?;
        workspace.progress.stage("sort edges", self.source.count(), Unit::Count("edges"));
        workspace.progress.advance(spooled.position);
        let mut edges = CheckedEdges::open(self.source, self.stated_nodes, spooled.position)?;
        let (mut chunk, mut records) = (Vec::new(), Vec::<R>::new());
        loop {
            let start = edges.position;
            if !edges.next(&mut chunk)? {
                break;
            }
            let top = chunk.iter().fold(0, |top, edge| top.max(edge.source).max(edge.target));
            if size_of::<R>() == 8 && top >> 32 != 0 {
                return Ok(None);
            }
            if top >= spooled.ids_end {
                let at = chunk.iter().position(|edge| edge.source.max(edge.target) == top).unwrap_or(0);
                (spooled.ids_end, spooled.ids_end_position) = (top + 1, start + at as u64);
            }
            records.clear();
            self.treat(&chunk, start, &mut records, &mut spooled.relations);
            if sorter.is_full_for(records.len()) {
                spooled.runs = sorter.spill()?.to_vec();
                spooled.position = start;
                workspace.journal.record("edge runs", &spooled)?;
            }
            sorter.push(&records)?;
            workspace.progress.advance(chunk.len() as u64);
        }
        if let Some(count) = self.source.count().filter(|count| *count != edges.position) {
            let location = Location { detail: String::new(), ..self.source.location(0) };
            return Err(location.bad(format!("{count} edges"), edges.position));
        }
        spooled.edges = edges.position;
        workspace.progress.finish();
        Ok(Some((sorter, spooled)))
    }

    /// A single wrong id, or ids that are not row numbers, can require terabytes of offsets. This is an error, instead
    /// of filling the disk.
    fn check_space(&self, nodes: u64, spooled: &Spooled, directory: &Path) -> Result<()> {
        let most = spooled.edges.saturating_mul(MOST_NODES_PER_EDGE).saturating_add(1 << 20);
        if self.stated_nodes.is_none() && nodes > most {
            let expected = "ids that count nodes from 0 (--string-ids numbers them anew where a format has it; --nodes N if this is meant)";
            return Err(self.source.location(spooled.ids_end_position).bad(expected, nodes - 1));
        }
        let needs = nodes.saturating_add(1).saturating_mul(8);
        let free = esker_io::available_bytes(directory).unwrap_or(u64::MAX);
        if needs > free {
            let (needs, free) = (ByteCount(needs), ByteCount(free));
            let location = match self.stated_nodes {
                Some(_) => Location { detail: String::new(), ..self.source.location(0) },
                None => self.source.location(spooled.ids_end_position),
            };
            let expected = format!("node ids whose offsets fit the {free} free on this disk");
            return Err(
                location.bad(expected, format!("ids up to {}, which take {needs}", nodes.saturating_sub(1)))
            );
        }
        Ok(())
    }

    fn treat<R: EdgeRecord>(
        &self,
        edges: &[ForeignEdge],
        start: u64,
        records: &mut Vec<R>,
        relations: &mut u64,
    ) {
        for (edge, position) in edges.iter().zip(start..) {
            let Some(mut edge) = kept(edge, self.selection, self.treatment) else { continue };
            *relations = (*relations).max(edge.relation as u64 + 1);
            if self.held_out.is_some_and(|held_out| held_out.contains(&edge)) {
                continue;
            }
            let is_loop = edge.source == edge.target;
            records.push(R::pack(&edge, position));
            if self.treatment.add_reverse && !is_loop {
                (edge.source, edge.target) = (edge.target, edge.source);
                records.push(R::pack(&edge, position));
            }
        }
    }
}
