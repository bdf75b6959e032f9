use super::RowShape;
use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::memory::DeviceBuffer;
use crate::pinned::Pinned;
use crate::{DeviceMatrix, Result};

impl Gpu {
    /// Uploads words through pinned memory.
    pub(super) fn upload_slice(&self, words: &[u32]) -> DeviceBuffer {
        let mut host = Pinned::new(self, words.len());
        host.words_mut().copy_from_slice(words);
        self.upload_words(host)
    }

    /// `to[i] = from[rows[i]]`.
    pub fn gather_rows(&self, from: &DeviceMatrix, rows: &[u32], to: &mut DeviceMatrix) {
        assert_eq!((to.rows(), to.columns()), (rows.len(), from.columns()));
        assert!(rows.iter().all(|row| (*row as usize) < from.rows()), "rows of the matrix");
        self.gather(from.address(), &self.upload_slice(rows), to);
    }

    pub(super) fn gather(&self, from: u64, rows: &DeviceBuffer, to: &mut DeviceMatrix) {
        let (count, columns) = (to.rows(), to.columns());
        let shape = RowShape::of(columns);
        // SAFETY: callers checked that every row is a row of `from`.
        unsafe {
            launch!(
                self, &shape.kernel("gather"), shape.grid(count, columns), [256, 1];
                from, rows.address(), to.address(), count as u32, columns as u32
            )
        }
    }

    /// `to[rows[i]] = from[i]`, or zeros without `from`.
    pub fn scatter_rows(&self, from: Option<&DeviceMatrix>, rows: &[u32], to: &mut DeviceMatrix) {
        let columns = to.columns();
        assert!(from.is_none_or(|from| from.rows() == rows.len() && from.columns() == columns));
        assert!(rows.iter().all(|row| (*row as usize) < to.rows()), "rows of the matrix");
        let (uploaded, count) = (self.upload_slice(rows), rows.len() * columns);
        // SAFETY: every row is a row of `to`.
        unsafe {
            launch!(
                self, "scatter_rows", [blocks(count, 256), 1], [256, 1];
                from.map_or(0, DeviceMatrix::address), uploaded.address(), to.address(), count as u64, columns as u32
            )
        }
    }

    /// `to[rows[i]] += scale * from[i]`. Rows do not repeat.
    pub fn add_rows(&self, from: &DeviceMatrix, rows: &[u32], scale: f32, to: &mut DeviceMatrix) {
        let columns = to.columns();
        assert!(from.rows() == rows.len() && from.columns() == columns);
        assert!(rows.iter().all(|row| (*row as usize) < to.rows()), "rows of the matrix");
        let (uploaded, count) = (self.upload_slice(rows), rows.len() * columns);
        // SAFETY: every row is a row of `to`, and no two threads write the same one.
        unsafe {
            launch!(
                self, "add_rows", [blocks(count, 256), 1], [256, 1];
                from.address(), uploaded.address(), to.address(), count as u64, columns as u32, scale
            )
        }
    }

    /// `to[i][to_first + j] = from[i][from_first + j]` for `count` columns.
    pub fn copy_columns(
        &self,
        from: &DeviceMatrix,
        from_first: usize,
        to: &mut DeviceMatrix,
        to_first: usize,
        count: usize,
    ) {
        let (read, written) = (from.columns(), to.columns());
        assert!(from.rows() == to.rows() && from_first + count <= read && to_first + count <= written);
        let numbers = to.rows() * count;
        // SAFETY: both matrices have all rows, and the columns are inside of them.
        unsafe {
            launch!(
                self, "copy_columns", [blocks(numbers, 256), 1], [256, 1];
                from.address() + (from_first * 4) as u64, to.address() + (to_first * 4) as u64, numbers as u64,
                count as u32, read as u32, written as u32
            )
        }
    }

    /// `to[i] = from[rows[i]]`, with `from` in pinned host memory that the GPU's threads read over the bus.
    pub fn gather_from_host(&self, from: &Pinned, rows: &[u32], to: &mut DeviceMatrix) {
        let columns = to.columns();
        let last = from.words().len() / columns;
        assert!(
            to.rows() == rows.len() && rows.iter().all(|row| (*row as usize) < last),
            "rows of the host's memory"
        );
        let uploaded = self.upload_slice(rows);
        if let Some(address) = self.attempt(|| from.device_address()) {
            self.gather(address, &uploaded, to);
            self.attempt(|| from.read_by_kernels());
        }
    }

    /// Copies a matrix with a plain kernel, to measure the rate of the memory.
    pub fn copy_matrix(&self, from: &DeviceMatrix, to: &mut DeviceMatrix) {
        assert!(from.count() == to.count() && from.count().is_multiple_of(4));
        let packs = from.count() / 4;
        // SAFETY: both have the same number of elements.
        unsafe {
            launch!(
                self, "copy_packs", [blocks(packs, 1024), 1], [256, 1]; from.address(), to.address(), packs as u64
            )
        }
    }
}

/// Cached rows of some nodes on the device, found by a table with an entry per node. Rows of the other nodes come with
/// the batch, or the GPU's threads read them from host memory.
pub struct NodeCache {
    gpu: Gpu,
    slots: DeviceBuffer,
    nodes: usize,
    rows: DeviceMatrix,
    filled: usize,
    /// A bitmap of the cached nodes, for the host.
    kept: Vec<u64>,
}

impl NodeCache {
    /// A cache for up to `rows` rows, of a graph with this many nodes.
    pub fn new(gpu: &Gpu, nodes: usize, rows: usize, columns: usize) -> Result<NodeCache> {
        let slots = DeviceBuffer::words(gpu, nodes);
        gpu.fill_words(slots.address(), nodes, u32::MAX);
        let rows = DeviceMatrix::new(gpu, rows, columns);
        gpu.check()?;
        let kept = vec![0; nodes.div_ceil(64)];
        Ok(NodeCache { gpu: gpu.clone(), slots, nodes, rows, filled: 0, kept })
    }

    /// Device bytes of such a cache.
    pub fn bytes_for(nodes: u64, rows: u64, columns: u64) -> u64 {
        nodes * 4 + rows * columns * 4
    }

    /// Caches rows of nodes that are not cached yet, one whole row per node. Asserts that there is space.
    pub fn add(&mut self, nodes: &[u32], values: &[f32]) {
        assert_eq!(values.len(), nodes.len() * self.rows.columns());
        assert!(self.filled + nodes.len() <= self.rows.rows(), "room for {} more", nodes.len());
        for node in nodes {
            assert!((*node as usize) < self.nodes && !self.has(*node), "a node that is not kept yet");
            self.kept[*node as usize / 64] |= 1 << (node % 64);
        }
        self.gpu.write(&mut self.rows, self.filled, values);
        let uploaded = self.gpu.upload_slice(nodes);
        // SAFETY: every node has its entry, and every slot its row.
        unsafe {
            launch!(
                self.gpu, "set_slots", [blocks(nodes.len(), 256), 1], [256, 1];
                self.slots.address(), uploaded.address(), self.filled as u32, nodes.len() as u32
            )
        }
        self.filled += nodes.len();
    }

    /// Whether a node's row is cached.
    pub fn has(&self, node: u32) -> bool {
        self.kept[node as usize / 64] >> (node % 64) & 1 == 1
    }

    /// Number of cached rows.
    pub fn len(&self) -> usize {
        self.filled
    }

    /// Whether no row is cached.
    pub fn is_empty(&self) -> bool {
        self.filled == 0
    }

    /// The rows of a batch: cached rows from here, the others in order from `others`, which has one row per uncached
    /// node.
    pub fn assemble(&self, nodes: &[u32], others: &DeviceMatrix, to: &mut DeviceMatrix) {
        let mut missing = 0;
        let places: Vec<u32> = nodes
            .iter()
            .map(|node| {
                let place = missing;
                missing += !self.has(*node) as u32;
                place
            })
            .collect();
        assert!(missing as usize <= others.rows() && others.columns() == self.rows.columns());
        self.gather(nodes, &places, others.address(), to);
    }

    /// The same with the others in pinned host memory, which has a row for every node of the graph.
    pub fn assemble_from_host(&self, nodes: &[u32], host: &Pinned, to: &mut DeviceMatrix) {
        assert_eq!(host.words().len(), self.nodes * self.rows.columns(), "a row a node");
        if let Some(address) = self.gpu.attempt(|| host.device_address()) {
            self.gather(nodes, nodes, address, to);
            self.gpu.attempt(|| host.read_by_kernels());
        }
    }

    fn gather(&self, nodes: &[u32], places: &[u32], others: u64, to: &mut DeviceMatrix) {
        let columns = self.rows.columns();
        assert!(nodes.iter().all(|node| (*node as usize) < self.nodes), "nodes of the graph");
        assert_eq!((to.rows(), to.columns()), (nodes.len(), columns));
        let uploaded = self.gpu.upload_slice(&[nodes, places].concat());
        let (count, shape) = (nodes.len(), RowShape::of(columns));
        // SAFETY: nodes have entries, slots are cached rows, other positions are rows of `others`: callers checked it.
        unsafe {
            launch!(
                self.gpu, &shape.kernel("assemble"), shape.grid(count, columns), [256, 1];
                uploaded.address(), self.slots.address(), uploaded.address() + count as u64 * 4, self.rows.address(),
                others, to.address(), count as u32, columns as u32
            )
        }
    }
}
