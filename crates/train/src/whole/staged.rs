//! The adjacency of all tiles, brought to a device by a thread of its own: while rows are loaded and tiles are computed.

use super::lists::{ListPiece, ListReading};
use crate::{Result, TrainError};
use esker_fetch::pipeline::caught;
use esker_nn::Backend;
use esker_sample::StoredId;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

/// The neighbours of a tile, on the device.
pub(super) struct KeptTile<B: Backend> {
    pub degrees: Vec<u32>,
    pub graphs: Vec<B::Graph>,
    /// Bytes of adjacency that were read for it.
    pub bytes_read: u64,
}

/// Tiles, in order.
pub(super) struct StagedTiles<B: Backend> {
    tiles: Option<Receiver<Result<KeptTile<B>>>>,
    thread: Option<JoinHandle<()>>,
}

impl<B: Backend> StagedTiles<B> {
    /// Starts to read. Neighbours are among the rows of `nodes` nodes. All tiles may be on the device at a time.
    pub fn start<W: StoredId>(reading: ListReading, backend: &B, nodes: usize) -> Result<StagedTiles<B>> {
        let (send, tiles) = channel();
        let backend = backend.clone();
        let work = move || {
            if let Err(error) = caught("adjacency", || stage::<W, B>(reading, &backend, nodes, &send)) {
                let _ = send.send(Err(error));
            }
        };
        let thread = Builder::new().name("stage".to_string()).spawn(work);
        let thread = thread.map_err(|source| TrainError::Thread { source })?;
        Ok(StagedTiles { tiles: Some(tiles), thread: Some(thread) })
    }

    /// The next tile. `None` after the last.
    pub fn receive(&mut self) -> Result<Option<KeptTile<B>>> {
        self.tiles.as_ref().and_then(|tiles| tiles.recv().ok()).transpose()
    }
}

impl<B: Backend> Drop for StagedTiles<B> {
    fn drop(&mut self) {
        // Without a receiver, the thread ends.
        self.tiles = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sends every tile, until nobody receives them.
fn stage<W: StoredId, B: Backend>(
    reading: ListReading,
    backend: &B,
    nodes: usize,
    send: &Sender<Result<KeptTile<B>>>,
) -> Result<()> {
    let mut pieces = reading.start::<W>();
    let mut tile = KeptTile { degrees: Vec::new(), graphs: Vec::new(), bytes_read: 0 };
    while let Some(piece) = pieces.receive() {
        let ListPiece { degrees, offsets, nbrs, last, .. } = piece?;
        if let Some(degrees) = degrees {
            tile.degrees = degrees;
        }
        tile.bytes_read += size_of_val(&nbrs[..]) as u64;
        tile.graphs.push(backend.part_graph(nodes, &offsets, &narrowed(&nbrs)));
        if last {
            let next = KeptTile { degrees: Vec::new(), graphs: Vec::new(), bytes_read: 0 };
            if send.send(Ok(std::mem::replace(&mut tile, next))).is_err() {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Nodes as a device counts them. Rows that stay are counted in 32 bits.
pub(super) fn narrowed<W: StoredId>(nbrs: &[W]) -> std::borrow::Cow<'_, [u32]> {
    match bytemuck::try_cast_slice::<W, u32>(nbrs) {
        Ok(nbrs) if size_of::<W>() == 4 => nbrs.into(),
        _ => nbrs.iter().map(|nbr| nbr.node().0 as u32).collect(),
    }
}
