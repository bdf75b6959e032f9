//! Representations of all nodes, as ranking and prediction of links read them: all of them on the device, or read when they
//! are needed, in the order in which they are stored. Which of the two follows from the memory, and changes no bit.

use crate::evaluate::Context;
use crate::link::rank::RepresentationSink;
use crate::whole::table::{COPY_BYTES, StoredTable};
use crate::{EvaluationMode, Learner, Result, TrainError};
use esker_nn::{Backend, LinkMath, Shape};
use esker_store::ArrayWriter;
use esker_strategies::{BatchSource, Phase};
use esker_types::{ByteCount, Dtype, NodeId};
use std::fs;
use std::path::{Path, PathBuf};

/// The name of the file of representations.
const FILE: &str = "representations";

/// Where ranking has the representations of all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RankRows {
    /// On the device.
    #[default]
    Resident,
    /// In a file, or where the strategy has them. They are read block by block.
    Streamed(RankStream),
}

/// How much of what is read is in memory at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankStream {
    /// Candidates of a block.
    pub block_nodes: u64,
    /// Held-out edges that are ranked in one pass over all candidates.
    pub pass_edges: u64,
    /// Bytes of true ends.
    pub end_bytes: u64,
    /// Bytes of rows that an export brings in the order of nodes in one pass.
    pub export_bytes: u64,
}

/// Representations of all nodes.
pub(crate) enum NodeRows<B: Backend> {
    Resident(B::Matrix),
    Stored(StoredNodes),
}

/// Representations that are read.
pub(crate) struct StoredNodes {
    pub table: StoredTable,
    pub nodes: u64,
    pub stream: RankStream,
    /// Removed in the end.
    _folder: Option<ScratchFolder>,
}

/// A directory of this process that is removed in the end.
struct ScratchFolder(PathBuf);

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        // What is left is removed by the next process that opens the run.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A file of representations in the making.
struct RepresentationFile<'a, B: Backend> {
    learner: &'a Learner<B>,
    writer: ArrayWriter,
    columns: usize,
    next: u64,
}

impl<B: LinkMath> RepresentationSink<B> for RepresentationFile<'_, B> {
    fn host(&mut self, count: usize, values: &[f32]) -> Result<()> {
        self.next += count as u64;
        Ok(self.writer.write_elements(values)?)
    }

    fn device(&mut self, nodes: &[NodeId], rows: &B::Matrix) -> Result<()> {
        let ascend = (self.next..).zip(nodes).all(|(expected, node)| node.0 == expected);
        assert!(ascend, "representations come in the order of nodes");
        let most = (COPY_BYTES as usize / (4 * self.columns).max(1)).max(1);
        let mut copy = vec![0.0; most.min(rows.rows()) * self.columns];
        for first in (0..rows.rows()).step_by(most) {
            let copy = &mut copy[..most.min(rows.rows() - first) * self.columns];
            self.learner.read(rows, first, copy)?;
            self.writer.write_elements(copy)?;
        }
        self.next += nodes.len() as u64;
        Ok(())
    }
}

impl<B: LinkMath> Context<'_, B> {
    /// The representations of all nodes, from `source`, whose next phase is the given one, or else from a separate source.
    pub(crate) fn node_rows(
        &mut self,
        mode: EvaluationMode,
        source: Option<(&mut dyn BatchSource<B>, Phase)>,
    ) -> Result<NodeRows<B>> {
        let RankRows::Streamed(stream) = self.ranking else {
            return Ok(NodeRows::Resident(self.representations(mode, source)?));
        };
        let nodes = self.job.dataset.manifest().nodes.count;
        if self.config.model.layers == 0 {
            let table = StoredTable::input(self.input_rows(source.map(|(source, _)| source))?);
            return Ok(NodeRows::Stored(StoredNodes { table, nodes, stream, _folder: None }));
        }
        let columns = self.learner.objective().outputs();
        let path = self.scratch.join(format!("{FILE}-{}.partial", std::process::id()));
        fs::create_dir_all(&path).map_err(TrainError::io(&path))?;
        let folder = ScratchFolder(path);
        check_room(&folder.0, nodes * columns as u64 * 4)?;
        let writer = ArrayWriter::create(&folder.0, FILE, Dtype::F32, columns as u64)?;
        let mut sink = RepresentationFile { learner: self.learner, writer, columns, next: 0 };
        self.each_representation(mode, source, &mut sink)?;
        let table = StoredTable::file(&folder.0, &sink.writer.finish()?)?;
        Ok(NodeRows::Stored(StoredNodes { table, nodes, stream, _folder: Some(folder) }))
    }
}

/// Checks that the disk has room, before representations are computed for an hour.
fn check_room(folder: &Path, needed: u64) -> Result<()> {
    match esker_io::available_bytes(folder) {
        Ok(free) if free < needed => Err(TrainError::InferenceDisk {
            folder: folder.to_path_buf(),
            needed: ByteCount(needed),
            free: ByteCount(free),
        }),
        _ => Ok(()),
    }
}
