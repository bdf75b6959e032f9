//! The embeddings of all nodes and the state of their optimizer: in memory of the device, or, where that is too small, as
//! rows of a store whose first slots are on the device and whose others are in pinned host memory that it reads and
//! writes. A node's embedding and its state are next to each other there, so that a batch accesses each node once.

use super::RowTraining;
use crate::{LiveSource, Pushed, Result, StrategyError};
use esker_device::{Device, HiddenRows, HiddenShape, Shape};
use esker_types::Dtype;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The parts of a node's row: its embedding, then each matrix of the optimizer's state.
pub(super) struct EmbeddingTable<D: Device> {
    rows: usize,
    columns: usize,
    stored: Mutex<EmbeddingPlaces<D>>,
}

enum EmbeddingPlaces<D: Device> {
    /// A matrix for each part.
    OnDevice(Vec<D::Matrix>),
    /// Slot `node x parts + part`.
    Tiered(Tiered<D>),
}

struct Tiered<D: Device> {
    store: D::Hidden,
    parts: usize,
    /// What the last batch gathered: its update reads it again.
    gathered: Option<Gathered<D>>,
}

struct Gathered<D: Device> {
    /// The slots of its nodes.
    slots: Vec<u32>,
    /// The parts of each node, one after the other.
    rows: D::Matrix,
}

/// The size of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EmbeddingSize {
    /// Nodes.
    pub rows: u64,
    /// Numbers per part of a row.
    pub columns: u64,
    /// Embeddings, and the matrices of the optimizer's state.
    pub parts: u64,
    /// Memory for it on a device that has its own. The others are in host memory.
    pub device_bytes: u64,
}

impl EmbeddingSize {
    /// Bytes of everything.
    pub fn bytes(&self) -> u64 {
        self.rows.saturating_mul(self.columns * 4).saturating_mul(self.parts)
    }

    /// Whether some of it is in host memory.
    pub fn is_tiered(&self) -> bool {
        self.device_bytes < self.bytes()
    }

    fn slots(&self) -> HiddenShape {
        let (columns, slots) = (self.columns as usize, self.rows.saturating_mul(self.parts));
        HiddenShape { slots, columns, dtype: Dtype::F32, device_bytes: self.device_bytes }
    }

    /// Bytes on the device, if it has its own memory.
    pub fn on_device(&self) -> u64 {
        self.slots().device_slots().saturating_mul(self.columns * 4)
    }
}

impl<D: Device> EmbeddingTable<D> {
    /// A table with unspecified embeddings, and zeros as state.
    pub fn new(device: &D, shape: EmbeddingSize) -> Result<Arc<EmbeddingTable<D>>> {
        let too_many = shape.rows.saturating_mul(if shape.is_tiered() { shape.parts } else { 1 });
        if too_many > u32::MAX as u64 {
            return Err(StrategyError::EmbeddingRows { nodes: shape.rows });
        }
        let (rows, columns, parts) = (shape.rows as usize, shape.columns as usize, shape.parts as usize);
        let stored = match shape.is_tiered() {
            true => EmbeddingPlaces::Tiered(Tiered {
                store: device.hidden_rows(shape.slots())?,
                parts,
                gathered: None,
            }),
            false => EmbeddingPlaces::OnDevice(
                (0..parts).map(|part| filled(device, rows, columns, part > 0)).collect(),
            ),
        };
        device.check()?;
        Ok(Arc::new(EmbeddingTable { rows, columns, stored: Mutex::new(stored) }))
    }

    fn lock(&self) -> MutexGuard<'_, EmbeddingPlaces<D>> {
        // A panic while it was locked has ended the run.
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nodes.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Changes the rows of a gradient.
    pub fn update(
        &self,
        device: &D,
        training: &dyn RowTraining<D>,
        gradient: Pushed<D>,
        rate: f64,
        step: u64,
    ) -> Result<()> {
        match &mut *self.lock() {
            EmbeddingPlaces::OnDevice(parts) => match parts.split_first_mut() {
                Some((table, state)) => training.update(device, table, state, &gradient, rate, step),
                None => Ok(()),
            },
            EmbeddingPlaces::Tiered(tiered) => tiered.update(device, training, gradient, rate, step),
        }
    }

    /// Copies a part of the rows from `first` on to host memory. Waits for the device.
    pub fn read(&self, device: &D, part: usize, first: usize, values: &mut [f32]) {
        match &*self.lock() {
            EmbeddingPlaces::OnDevice(parts) => device.read(&parts[part], first, values),
            EmbeddingPlaces::Tiered(tiered) => {
                let whole = tiered.read(first, values.len() / self.columns, self.columns);
                let rows = whole.chunks_exact(self.columns).skip(part).step_by(tiered.parts);
                let to = values.chunks_exact_mut(self.columns);
                to.zip(rows).for_each(|(to, row)| to.copy_from_slice(row));
            }
        }
    }

    /// Replaces a part of the rows from `first` on.
    pub fn write(&self, device: &D, part: usize, first: usize, values: &[f32]) {
        match &mut *self.lock() {
            EmbeddingPlaces::OnDevice(parts) => device.write(&mut parts[part], first, values),
            EmbeddingPlaces::Tiered(tiered) => {
                let mut whole = tiered.read(first, values.len() / self.columns, self.columns);
                let rows = whole.chunks_exact_mut(self.columns).skip(part).step_by(tiered.parts);
                rows.zip(values.chunks_exact(self.columns)).for_each(|(row, from)| row.copy_from_slice(from));
                tiered.store.write((first * tiered.parts) as u64, bytemuck::cast_slice(&whole));
                tiered.gathered = None;
            }
        }
    }

    /// Embeddings of some nodes, in host memory. Waits for the device.
    pub fn read_nodes(&self, device: &D, nodes: &[u32], values: &mut [f32]) {
        if nodes.is_empty() {
            return;
        }
        let rows = match &*self.lock() {
            EmbeddingPlaces::OnDevice(parts) => picked(device, &parts[0], nodes),
            EmbeddingPlaces::Tiered(tiered) => {
                let slots: Vec<u32> = nodes.iter().map(|node| node * tiered.parts as u32).collect();
                tiered.pull(device, &slots, self.columns)
            }
        };
        device.read(&rows, 0, values);
    }
}

impl<D: Device> LiveSource<D> for EmbeddingTable<D> {
    fn gather(&self, device: &D, nodes: &[u32]) -> D::Matrix {
        match &mut *self.lock() {
            EmbeddingPlaces::OnDevice(parts) => picked(device, &parts[0], nodes),
            EmbeddingPlaces::Tiered(tiered) => {
                // What the last batch gathered is freed first.
                tiered.gathered = None;
                let slots = tiered.slots(nodes);
                let rows = tiered.pull(device, &slots, self.columns);
                let gathered = tiered.gathered.insert(Gathered { slots, rows });
                gathered.part(device, 0, tiered.parts)
            }
        }
    }
}

impl<D: Device> Tiered<D> {
    /// The slots of all parts of some nodes.
    fn slots(&self, nodes: &[u32]) -> Vec<u32> {
        let parts = self.parts as u32;
        nodes.iter().flat_map(|node| (0..parts).map(move |part| node * parts + part)).collect()
    }

    fn pull(&self, device: &D, slots: &[u32], columns: usize) -> D::Matrix {
        let mut rows = device.matrix(slots.len(), columns);
        self.store.pull(slots, &mut rows);
        rows
    }

    /// All parts of some rows in host memory.
    fn read(&self, first: usize, rows: usize, columns: usize) -> Vec<f32> {
        let mut whole = vec![0.0; rows * self.parts * columns];
        self.store.read((first * self.parts) as u64, bytemuck::cast_slice_mut(&mut whole));
        whole
    }

    fn update(
        &mut self,
        device: &D,
        training: &dyn RowTraining<D>,
        gradient: Pushed<D>,
        rate: f64,
        step: u64,
    ) -> Result<()> {
        let (slots, count) = (self.slots(&gradient.slots), gradient.slots.len());
        let columns = gradient.rows.columns();
        let mut gathered = match self.gathered.take().filter(|gathered| gathered.slots == slots) {
            Some(gathered) => gathered,
            None => Gathered { rows: self.pull(device, &slots, columns), slots },
        };
        let mut parts: Vec<D::Matrix> =
            (0..self.parts).map(|part| gathered.part(device, part, self.parts)).collect();
        let of_batch = Pushed { slots: (0..count as u32).collect(), rows: gradient.rows };
        if let Some((table, state)) = parts.split_first_mut() {
            training.update(device, table, state, &of_batch, rate, step)?;
        }
        for (part, rows) in parts.iter().enumerate() {
            let indices = indices_of(part, self.parts, gathered.rows.rows());
            device.scatter_rows(Some(rows), &indices, &mut gathered.rows);
        }
        self.store.push(&gathered.rows, &gathered.slots, &vec![false; gathered.slots.len()]);
        Ok(())
    }
}

impl<D: Device> Gathered<D> {
    /// A part of each node.
    fn part(&self, device: &D, part: usize, parts: usize) -> D::Matrix {
        picked(device, &self.rows, &indices_of(part, parts, self.rows.rows()))
    }
}

/// The rows of a part, where the parts of each node are next to each other.
fn indices_of(part: usize, parts: usize, rows: usize) -> Vec<u32> {
    (part as u32..rows as u32).step_by(parts).collect()
}

fn picked<D: Device>(device: &D, from: &D::Matrix, rows: &[u32]) -> D::Matrix {
    let mut picked = device.matrix(rows.len(), from.columns());
    device.gather_rows(from, rows, &mut picked);
    picked
}

fn filled<D: Device>(device: &D, rows: usize, columns: usize, with_zeros: bool) -> D::Matrix {
    let mut matrix = device.matrix(rows, columns);
    if with_zeros {
        device.fill(&mut matrix, 0.0);
    }
    matrix
}
