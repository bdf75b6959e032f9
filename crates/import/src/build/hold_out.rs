//! Holds out edges for validation and test. Which edges leave is a function of (seed, edge): each edge has a random
//! priority, and those with the smallest leave. Equal edges leave together. So do an edge and its reverse, if every edge
//! has its reverse or gets it.
//!
//! Edges are sorted by priority on disk, within the memory budget. The first are written down, and the last of them is
//! the threshold by which the topology leaves edges out: no set of held-out edges is ever in memory.

use super::edges::CheckedEdges;
use super::selection::{Selection, share_of};
use super::topology::IdWriter;
use crate::request::{HeldOutCount, HoldOut};
use crate::sort::{Sorted, Sorter};
use crate::source::{EdgeSource, ForeignEdge, Treatment};
use crate::{ImportError, ImportWorkspace, Result};
use bytemuck::{Pod, Zeroable};
use esker_io::SequentialReader;
use esker_store::{FileEntry, SplitInfo, SplitOver, StoreError, create_sequential, file};
use esker_types::random::Key;
use esker_types::{IdWidth, Unit};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::path::Path;

/// First word of the keys of priorities: "hold".
const PURPOSE: u64 = 0x686f_6c64;
/// The file of edges that may be held out, by priority.
const CANDIDATES: &str = "held-out";

/// An edge that leaves or stays as a whole. It sorts by its priority, and equal edges are neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Pod, Zeroable, Serialize, Deserialize)]
#[repr(C)]
pub(crate) struct PriorityEdge {
    priority: u64,
    source: u64,
    target: u64,
    relation: u32,
    /// If direction does not matter, the smaller end is the source, and this tells an edge that was turned.
    turned: u32,
}

impl PriorityEdge {
    fn new(edge: &ForeignEdge, seed: u64, undirected: bool) -> PriorityEdge {
        let turned = undirected && edge.source > edge.target;
        let (source, target) = if turned { (edge.target, edge.source) } else { (edge.source, edge.target) };
        let key = Key::new(seed).with(PURPOSE).with(source).with(target).with(edge.relation as u64);
        PriorityEdge { priority: key.at(0), source, target, relation: edge.relation, turned: turned as u32 }
    }

    /// The same for an edge and its reverse.
    fn unit(&self) -> PriorityEdge {
        PriorityEdge { turned: 0, ..*self }
    }
}

/// Which edges are held out.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct HeldOutEdges {
    pub valid: u64,
    pub test: u64,
    seed: u64,
    /// Whether an edge leaves with its reverse.
    pub undirected: bool,
    /// The last one by priority; `None` if none is held out.
    last: Option<PriorityEdge>,
}

impl HeldOutEdges {
    /// Whether an edge is held out.
    pub fn contains(&self, edge: &ForeignEdge) -> bool {
        let last = self.last.as_ref();
        last.is_some_and(|last| PriorityEdge::new(edge, self.seed, self.undirected).unit() <= *last)
    }

    /// Writes the held-out edges as splits.
    pub fn write(
        &self,
        directory: &Path,
        id_width: IdWidth,
        train: u64,
        workspace: &ImportWorkspace,
    ) -> Result<(SplitInfo, Vec<FileEntry>)> {
        let path = workspace.path(CANDIDATES);
        let mut reader = SequentialReader::open(&path, 0).map_err(StoreError::io(&path))?;
        let mut files = Vec::new();
        for (name, count) in [(file::SPLIT_VALID, self.valid), (file::SPLIT_TEST, self.test)] {
            let mut writer = IdWriter::create(directory, name, id_width, 3)?;
            for _ in 0..count {
                let mut edge = [PriorityEdge::zeroed()];
                reader.read_exact(bytemuck::cast_slice_mut(&mut edge)).map_err(StoreError::io(&path))?;
                writer.push(edge[0].source)?;
                writer.push(edge[0].target)?;
                writer.push(edge[0].relation as u64)?;
            }
            files.push(writer.finish()?);
        }
        let (over, valid, test) = (SplitOver::Edges, self.valid, self.test);
        Ok((SplitInfo { over, train, valid, test, negatives: Vec::new() }, files))
    }
}

/// How edges are held out.
pub(super) struct HoldOutPlan<'a> {
    pub source: &'a dyn EdgeSource,
    pub choice: &'a HoldOut,
    pub seed: u64,
    pub treatment: Treatment,
    pub stated_nodes: Option<u64>,
    pub selection: Option<&'a Selection>,
}

/// What a pass over the sorted edges finds.
struct CountedEdges {
    units: u64,
    /// Edges whose reverse is there too, and loops.
    symmetric: u64,
}

impl HoldOutPlan<'_> {
    /// Chooses the edges. Their candidates stay in the work directory, for [`HeldOutEdges::write`].
    pub fn build(&self, workspace: &ImportWorkspace) -> Result<HeldOutEdges> {
        workspace.step("hold out edges", || {
            let undirected = self.treatment.add_reverse || self.is_symmetric(workspace)?;
            let (mut sorted, records) = self.sort(undirected, workspace)?;
            let counted = self.write_candidates(&mut sorted, records, workspace)?;
            sorted.remove_files()?;
            let [valid, test] = self.choice.counts().map(|count| count.of(counted.units));
            let held = valid.saturating_add(test);
            if held >= counted.units && held > 0 {
                return Err(ImportError::AllHeldOut { valid, test, edges: counted.units });
            }
            let last = self.candidate(held, workspace)?;
            Ok(HeldOutEdges { valid, test, seed: self.seed, undirected, last })
        })
    }

    /// Whether the source has the reverse of every edge.
    fn is_symmetric(&self, workspace: &ImportWorkspace) -> Result<bool> {
        let (mut sorted, _) = self.sort(true, workspace)?;
        let counted = count(&mut sorted, &mut |_, _| Ok(()))?;
        sorted.remove_files()?;
        Ok(counted.units > 0 && counted.symmetric == counted.units)
    }

    fn sort(&self, undirected: bool, workspace: &ImportWorkspace) -> Result<(Sorted<PriorityEdge>, u64)> {
        workspace.progress.stage("hold out edges", self.source.count(), Unit::Count("edges"));
        let mut sorter = Sorter::new(workspace.directory.clone(), "hold-out", workspace.sort_bytes())?;
        let mut edges = CheckedEdges::open(self.source, self.stated_nodes, 0)?;
        let (mut chunk, mut records, mut count) = (Vec::new(), Vec::new(), 0);
        while edges.next(&mut chunk)? {
            let kept = chunk.iter().filter_map(|edge| kept(edge, self.selection, self.treatment));
            records.clear();
            records.extend(kept.map(|edge| PriorityEdge::new(&edge, self.seed, undirected)));
            sorter.push(&records)?;
            count += records.len() as u64;
            workspace.progress.advance(chunk.len() as u64);
        }
        workspace.progress.finish();
        Ok((sorter.finish()?, count))
    }

    /// Writes the edges that can be held out: there are at most as many edges as records.
    fn write_candidates(
        &self,
        sorted: &mut Sorted<PriorityEdge>,
        records: u64,
        workspace: &ImportWorkspace,
    ) -> Result<CountedEdges> {
        let most = self
            .choice
            .counts()
            .map(|count| count.of(records))
            .iter()
            .fold(1, |sum: u64, count| sum.saturating_add(*count).saturating_add(1));
        let path = workspace.path(CANDIDATES);
        let mut writer = create_sequential(&path)?;
        let counted = count(sorted, &mut |at, edge| {
            if at < most {
                writer.write_all(bytemuck::bytes_of(edge)).map_err(StoreError::io(&path))?;
            }
            Ok(())
        })?;
        writer.finish().map_err(StoreError::io(&path))?;
        Ok(counted)
    }

    /// The last of `held` candidates.
    fn candidate(&self, held: u64, workspace: &ImportWorkspace) -> Result<Option<PriorityEdge>> {
        let Some(last) = held.checked_sub(1) else { return Ok(None) };
        let path = workspace.path(CANDIDATES);
        let offset = last * size_of::<PriorityEdge>() as u64;
        let mut reader = SequentialReader::open(&path, offset).map_err(StoreError::io(&path))?;
        let mut edge = [PriorityEdge::zeroed()];
        reader.read_exact(bytemuck::cast_slice_mut(&mut edge)).map_err(StoreError::io(&path))?;
        Ok(Some(edge[0]))
    }
}

/// The edge in the graph to be made; `None` if it is dropped.
pub(super) fn kept(
    edge: &ForeignEdge,
    selection: Option<&Selection>,
    treatment: Treatment,
) -> Option<ForeignEdge> {
    let mut edge = *edge;
    if let Some(selection) = selection {
        // Both ends are in the same component: both are kept or both are dropped.
        (edge.source, edge.target) = (selection.rank(edge.source)?, selection.rank(edge.target)?);
    }
    (edge.source != edge.target || !treatment.remove_self_loops).then_some(edge)
}

/// Passes each distinct edge to `take`, with its number, by priority.
fn count(
    sorted: &mut Sorted<PriorityEdge>,
    take: &mut dyn FnMut(u64, &PriorityEdge) -> Result<()>,
) -> Result<CountedEdges> {
    let mut counted = CountedEdges { units: 0, symmetric: 0 };
    let (mut chunk, mut last) = (Vec::new(), None::<PriorityEdge>);
    while sorted.next(&mut chunk)? {
        for edge in &chunk {
            match last {
                Some(before) if before.unit() == edge.unit() => {
                    counted.symmetric += (before.turned != edge.turned) as u64;
                }
                _ => {
                    take(counted.units, &edge.unit())?;
                    counted.units += 1;
                    counted.symmetric += (edge.source == edge.target) as u64;
                }
            }
            last = Some(*edge);
        }
    }
    Ok(counted)
}

impl HeldOutCount {
    /// How many of `edges`.
    fn of(self, edges: u64) -> u64 {
        match self {
            HeldOutCount::Edges(count) => count,
            HeldOutCount::Share(share) => share_of(edges, share),
        }
    }
}
