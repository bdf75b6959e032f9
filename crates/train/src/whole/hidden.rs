//! Hidden rows of every node: in memory, or in a file that is removed when it is dropped.

use super::COPY_BYTES;
use crate::{Learner, Result, TrainError};
use esker_io::{Access, Disk, Layout, Options, Piece, Queue, SequentialWriter, ThisMachine};
use esker_nn::{Backend, HostRows, Shape};
use esker_types::NodeId;
use rayon::prelude::*;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The source of a layer's input rows.
pub(super) enum Hidden {
    /// From the strategy.
    Features,
    /// From memory.
    Memory(Vec<f32>, usize),
    /// From a file.
    File(Box<HiddenFile>),
}

pub(super) struct HiddenFile {
    _file: Doomed,
    queue: Queue,
    width: usize,
    pieces: Vec<Piece>,
}

impl Hidden {
    /// Gathers the rows of nodes for upload to the device.
    pub fn gather<B: Backend + Clone + 'static>(
        &mut self,
        learner: &Learner<B>,
        nodes: &[NodeId],
    ) -> Result<B::Matrix> {
        let width = match self {
            Hidden::Features => unreachable!("feature rows come with the batch"),
            Hidden::Memory(_, width) => *width,
            Hidden::File(file) => file.width,
        };
        let mut rows = learner.backend().host_rows(nodes.len(), width);
        match self {
            Hidden::Features => {}
            Hidden::Memory(values, _) => {
                let (values, rows) = (&*values, rows.values_mut());
                learner.install(|| {
                    rows.par_chunks_mut(width).zip(nodes.par_iter()).with_min_len(256).for_each(
                        |(row, node)| row.copy_from_slice(&values[node.index() * width..][..width]),
                    );
                });
            }
            Hidden::File(file) => file.read(nodes, rows.values_mut())?,
        }
        Ok(learner.backend().upload(rows, width))
    }
}

impl HiddenFile {
    fn read(&mut self, nodes: &[NodeId], values: &mut [f32]) -> Result<()> {
        let bytes = self.width as u64 * 4;
        self.pieces.clear();
        let places = nodes.iter().zip(0u64..);
        self.pieces.extend(places.map(|(node, at)| Piece { offset: node.0 * bytes, bytes, at: at * bytes }));
        Ok(self.queue.read(0, &self.pieces, bytemuck::cast_slice_mut(values))?)
    }
}

/// A file that is removed when dropped, however that happens. It can be computed again.
pub(super) struct Doomed(PathBuf);

impl Drop for Doomed {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The destination of a layer's output rows, node after node.
pub(super) enum HiddenWriter {
    Memory(Vec<f32>),
    File(Doomed, SequentialWriter),
}

impl HiddenWriter {
    pub fn file(scratch: &Path, layer: usize) -> Result<HiddenWriter> {
        fs::create_dir_all(scratch).map_err(TrainError::io(scratch))?;
        // One file per process: two may use the same run for inference.
        let path = scratch.join(format!("hidden-{layer}-{}.partial", std::process::id()));
        let file = SequentialWriter::create(&path).map_err(TrainError::io(&path))?;
        Ok(HiddenWriter::File(Doomed(path), file))
    }

    pub fn append<B: Backend + Clone + 'static>(
        &mut self,
        learner: &Learner<B>,
        rows: &B::Matrix,
    ) -> Result<()> {
        let (count, width) = (rows.rows(), rows.columns());
        match self {
            HiddenWriter::Memory(all) => {
                let before = all.len();
                all.resize(before + count * width, 0.0);
                learner.read(rows, 0, &mut all[before..])
            }
            HiddenWriter::File(path, file) => {
                let most = (COPY_BYTES as usize / (4 * width)).max(1);
                let mut copy = vec![0.0; most.min(count) * width];
                for first in (0..count).step_by(most) {
                    let copy = &mut copy[..most.min(count - first) * width];
                    learner.read(rows, first, copy)?;
                    file.write_all(bytemuck::cast_slice(copy)).map_err(TrainError::io(&path.0))?;
                }
                Ok(())
            }
        }
    }

    /// Appends rows that are in host memory.
    pub fn append_values(&mut self, rows: &[f32]) -> Result<()> {
        match self {
            HiddenWriter::Memory(all) => {
                all.extend_from_slice(rows);
                Ok(())
            }
            HiddenWriter::File(path, file) => {
                file.write_all(bytemuck::cast_slice(rows)).map_err(TrainError::io(&path.0))
            }
        }
    }

    pub fn finish(self, width: usize) -> Result<Hidden> {
        match self {
            HiddenWriter::Memory(values) => Ok(Hidden::Memory(values, width)),
            HiddenWriter::File(path, file) => {
                file.finish().map_err(TrainError::io(&path.0))?;
                let options = Options::default();
                let queue = ThisMachine.open(&[Layout::file(&path.0)], Access::Read, &options)?.queue()?;
                Ok(Hidden::File(Box::new(HiddenFile { _file: path, queue, width, pieces: Vec::new() })))
            }
        }
    }
}
