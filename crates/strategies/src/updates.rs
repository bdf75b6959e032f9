//! Updates of learned rows with a fixed lag: a batch reads what batches up to itself less the lag have changed. What
//! waits at the end of a step over partitions, or of an epoch, is applied there.

use crate::{CheckpointReader, CheckpointSink, Pushed, Result, SavedState, StrategyError};
use esker_device::Device;
use esker_sample::{Batches, Position};
use esker_types::NodeId;
use std::collections::VecDeque;
use std::io::{Read, Write};

/// Name of the state in a checkpoint.
pub(crate) const UPDATES: &str = "embedding-updates";
/// The rate of a batch without labels, where updates are saved.
const NO_UPDATE: f64 = -1.0;
/// Rows are written in pieces of about this size.
const PIECE_BYTES: usize = 1 << 20;

/// A gradient and the learning rate of its step.
pub(crate) type WaitingUpdate<D> = (Pushed<D>, f64);

/// Updates in the order of their batches; nothing for a batch without labels.
pub(crate) struct WaitingUpdates<D: Device> {
    queue: VecDeque<Option<WaitingUpdate<D>>>,
    lag: usize,
}

impl<D: Device> WaitingUpdates<D> {
    pub fn new(lag: usize) -> WaitingUpdates<D> {
        WaitingUpdates { queue: VecDeque::new(), lag: lag.max(1) }
    }

    pub fn lag(&self) -> usize {
        self.lag
    }

    pub fn push(&mut self, update: Option<WaitingUpdate<D>>) {
        self.queue.push_back(update);
    }

    /// The next update whose turn it is: all of them at the end of a step.
    pub fn next(&mut self, ends: bool) -> Option<WaitingUpdate<D>> {
        let most = if ends { 0 } else { self.lag - 1 };
        while self.queue.len() > most {
            if let Some(Some(update)) = self.queue.pop_front() {
                return Some(update);
            }
        }
        None
    }

    /// Writes what waits: the rate, the nodes and the rows of each update, some rows at a time.
    pub fn save(
        &self,
        device: &D,
        dim: usize,
        to: &mut dyn CheckpointSink,
        nodes_of: impl Fn(&[u32]) -> Vec<u64>,
    ) -> Result<()> {
        if self.queue.is_empty() {
            return Ok(());
        }
        let piece = (PIECE_BYTES / 4 / dim.max(1)).max(1);
        let mut numbers = Vec::new();
        to.bytes(UPDATES, &mut |to: &mut dyn Write| {
            for update in &self.queue {
                let (slots, rate) = match update {
                    Some((gradient, rate)) => (&gradient.slots[..], *rate),
                    None => (&[][..], NO_UPDATE),
                };
                to.write_all(&rate.to_le_bytes())?;
                to.write_all(&(slots.len() as u64).to_le_bytes())?;
                for slots in slots.chunks(piece) {
                    to.write_all(bytemuck::cast_slice(&nodes_of(slots)))?;
                }
                let Some((gradient, _)) = update else { continue };
                for first in (0..slots.len()).step_by(piece) {
                    numbers.resize(piece.min(slots.len() - first) * dim, 0f32);
                    device.read(&gradient.rows, first, &mut numbers);
                    to.write_all(bytemuck::cast_slice(&numbers))?;
                }
            }
            Ok(())
        })?;
        // A device that failed gave other numbers: what was written counts only if it did not.
        Ok(device.check()?)
    }

    /// Reads what waited when a checkpoint was written, update by update.
    pub fn restore(
        &mut self,
        device: &D,
        dim: usize,
        state: &mut Option<&mut dyn CheckpointReader>,
        slots_of: impl Fn(&[NodeId]) -> Result<Vec<u32>>,
    ) -> Result<()> {
        let refused = |source| StrategyError::EmbeddingState { name: UPDATES, source };
        let Some(state) = state.as_deref_mut() else { return Ok(()) };
        let Some(SavedState::Bytes(mut from)) = state.take(UPDATES)? else { return Ok(()) };
        while let Some(saved) = SavedUpdate::read(&mut *from, dim).map_err(refused)? {
            if saved.rate < 0.0 {
                self.queue.push_back(None);
                continue;
            }
            let mut rows = device.matrix(saved.nodes.len(), dim);
            device.write(&mut rows, 0, &saved.numbers);
            self.queue.push_back(Some((Pushed { slots: slots_of(&saved.nodes)?, rows }, saved.rate)));
        }
        Ok(())
    }
}

/// An update as a checkpoint has it.
struct SavedUpdate {
    rate: f64,
    nodes: Vec<NodeId>,
    numbers: Vec<f32>,
}

impl SavedUpdate {
    /// Reads the next one; `None` after the last.
    fn read(from: &mut dyn Read, dim: usize) -> std::io::Result<Option<SavedUpdate>> {
        let head = read_most(from, 16)?;
        if head.is_empty() {
            return Ok(None);
        }
        let cut = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        let (rate, count) = head.split_at_checked(8).ok_or_else(cut)?;
        let rate = f64::from_le_bytes(rate.try_into().map_err(|_| cut())?);
        let count = u64::from_le_bytes(count.try_into().map_err(|_| cut())?);
        // Memory grows with what is there: a damaged count asks for none.
        let exactly = |from: &mut dyn Read, bytes: u64| match read_most(from, bytes)? {
            found if found.len() as u64 == bytes => Ok(found),
            _ => Err(cut()),
        };
        let nodes = exactly(from, count.saturating_mul(8))?;
        let numbers = exactly(from, count.saturating_mul(dim as u64 * 4))?;
        let nodes = nodes.chunks_exact(8).map(|node| NodeId(bytemuck::pod_read_unaligned(node))).collect();
        let numbers = numbers.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
        Ok(Some(SavedUpdate { rate, nodes, numbers }))
    }
}

/// So many bytes, or all that are left.
fn read_most(from: &mut dyn Read, bytes: u64) -> std::io::Result<Vec<u8>> {
    let mut found = Vec::new();
    from.take(bytes).read_to_end(&mut found)?;
    Ok(found)
}

/// Whether a batch is the last of its step over partitions, or of its epoch.
pub(crate) fn ends_step(batches: &dyn Batches, at: Position) -> bool {
    let end = batches.step(at).map_or_else(|| batches.count(at.epoch), |step| step.batches().end);
    at.batch + 1 == end
}
