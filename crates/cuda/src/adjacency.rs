//! A layer's adjacency on the device. It is checked before the upload, so that kernels need no checks. Data that the
//! backward pass needs is computed on first use.

use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::memory::DeviceBuffer;
use crate::pinned::Pinned;
use std::sync::OnceLock;

/// A layer's adjacency: every neighbour is a row of the input.
pub struct DeviceAdjacency {
    pub(crate) gpu: Gpu,
    words: DeviceBuffer,
    inputs: usize,
    outputs: usize,
    edges: usize,
    has_degrees: bool,
    transposed: OnceLock<DeviceTransposed>,
    scales: [OnceLock<DeviceBuffer>; 2],
}

/// The transposed adjacency: for each input the outputs it is a neighbour of, ascending.
pub(crate) struct DeviceTransposed {
    pub starts: DeviceBuffer,
    pub edges: DeviceBuffer,
    pub outputs: DeviceBuffer,
}

/// As in `kernels/adjacency.cu`.
const SORT_ITEMS: usize = 2048;
const DIGIT_BITS: u32 = 7;

/// An adjacency in pinned memory, checked and ready to be uploaded.
pub struct StagedAdjacency {
    words: Pinned,
    inputs: usize,
    outputs: usize,
    edges: usize,
    has_degrees: bool,
}

impl StagedAdjacency {
    /// Copies an adjacency from host memory. The neighbours of output `i` are between its offset and the next; a
    /// neighbour is an input row plus `base`. There is one degree per input, or none. Asserts that every neighbour is
    /// an input.
    pub fn new(
        gpu: &Gpu,
        inputs: usize,
        nbr_offsets: &[u32],
        nbrs: &[u32],
        base: u32,
        input_degrees: &[u32],
    ) -> StagedAdjacency {
        assert!(nbr_offsets.len() <= inputs + 1, "outputs are the last rows of the inputs");
        StagedAdjacency::of_lists(gpu, inputs, nbr_offsets, nbrs, base, input_degrees)
    }

    fn of_lists(
        gpu: &Gpu,
        inputs: usize,
        nbr_offsets: &[u32],
        nbrs: &[u32],
        base: u32,
        input_degrees: &[u32],
    ) -> StagedAdjacency {
        assert!(!nbr_offsets.is_empty() && nbr_offsets.is_sorted(), "offsets ascend");
        assert!(inputs < u32::MAX as usize, "rows are counted in 32 bits");
        assert!(
            input_degrees.is_empty() || input_degrees.len() == inputs,
            "one degree an input row, or none"
        );
        let outputs = nbr_offsets.len() - 1;
        let first = nbr_offsets[0];
        let edges = (nbr_offsets[outputs] - first) as usize;
        assert!(edges < u32::MAX as usize - 64, "edges are counted in 32 bits, and some are looked at ahead");
        let mut words = Pinned::new(gpu, outputs + 1 + edges + input_degrees.len());
        let (to_offsets, rest) = words.words_mut().split_at_mut(outputs + 1);
        let (to_nbrs, to_degrees) = rest.split_at_mut(edges);
        to_offsets.iter_mut().zip(nbr_offsets).for_each(|(to, from)| *to = from - first);
        let mut largest = 0;
        for (to, from) in to_nbrs.iter_mut().zip(&nbrs[first as usize..][..edges]) {
            // A neighbour below `base` wraps around and is found too large.
            *to = from.wrapping_sub(base);
            largest = largest.max(*to);
        }
        assert!(edges == 0 || (largest as usize) < inputs, "every neighbour is an input row");
        to_degrees.copy_from_slice(input_degrees);
        StagedAdjacency { words, inputs, outputs, edges, has_degrees: !input_degrees.is_empty() }
    }

    /// Uploads it. The compute stream waits for it, the caller does not.
    pub fn upload(self, gpu: &Gpu) -> DeviceAdjacency {
        let StagedAdjacency { words, inputs, outputs, edges, has_degrees } = self;
        DeviceAdjacency {
            gpu: gpu.clone(),
            words: gpu.upload_words(words),
            inputs,
            outputs,
            edges,
            has_degrees,
            transposed: OnceLock::new(),
            scales: [const { OnceLock::new() }; 2],
        }
    }
}

impl DeviceAdjacency {
    /// Uploads an adjacency from host memory, as [`StagedAdjacency::new`] takes it.
    pub fn new(
        gpu: &Gpu,
        inputs: usize,
        nbr_offsets: &[u32],
        nbrs: &[u32],
        base: u32,
        input_degrees: &[u32],
    ) -> DeviceAdjacency {
        StagedAdjacency::new(gpu, inputs, nbr_offsets, nbrs, base, input_degrees).upload(gpu)
    }

    /// Uploads neighbours among some rows, of targets that are not among them. It has no own rows.
    pub fn part(gpu: &Gpu, inputs: usize, nbr_offsets: &[u32], nbrs: &[u32]) -> DeviceAdjacency {
        StagedAdjacency::of_lists(gpu, inputs, nbr_offsets, nbrs, 0, &[]).upload(gpu)
    }

    /// Number of input rows.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Number of output rows.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Neighbours of all outputs.
    pub fn edge_count(&self) -> usize {
        self.edges
    }

    pub(crate) fn self_first(&self) -> u32 {
        (self.inputs - self.outputs) as u32
    }

    pub(crate) fn offsets(&self) -> u64 {
        self.words.address()
    }

    pub(crate) fn nbrs(&self) -> u64 {
        self.words.address() + (self.outputs as u64 + 1) * 4
    }

    /// Degree of each input in the whole graph.
    pub(crate) fn degrees(&self) -> u64 {
        assert!(self.has_degrees, "GCN by whole-graph degrees needs input_degrees");
        self.nbrs() + self.edges as u64 * 4
    }

    /// `1 / sqrt(degree + 1)` of each input, by whole-graph degrees or by sampled degrees.
    pub(crate) fn gcn_scales(&self, whole: bool) -> u64 {
        let scales = self.scales[whole as usize].get_or_init(|| {
            let scales = DeviceBuffer::words(&self.gpu, self.inputs);
            let grid = [blocks(self.inputs, 256), 1];
            let (to, inputs, outputs) = (scales.address(), self.inputs as u32, self.outputs as u32);
            // SAFETY: there is one degree and one scale per input; the adjacency is checked.
            unsafe {
                if whole {
                    launch!(self.gpu, "scales_by_degrees", grid, [256, 1]; self.degrees(), to, inputs);
                } else {
                    launch!(
                        self.gpu, "scales_by_lists", grid, [256, 1]; self.offsets(), self.nbrs(), to, inputs, outputs
                    );
                }
            }
            scales
        });
        scales.address()
    }

    /// Computes the transposed adjacency if it does not exist yet.
    pub fn transpose(&self) {
        self.transposed();
    }

    pub(crate) fn transposed(&self) -> &DeviceTransposed {
        self.transposed.get_or_init(|| {
            let gpu = &self.gpu;
            let words = |count| DeviceBuffer::words(gpu, count);
            let (starts, outputs) = (words(self.inputs + 1), words(self.edges));
            let owners = words(self.edges);
            let bits = usize::BITS - self.inputs.saturating_sub(1).leading_zeros();
            let passes = bits.div_ceil(DIGIT_BITS).max(1);
            let digit_bits = bits.div_ceil(passes).max(1);
            let grid = blocks(self.edges, SORT_ITEMS);
            let counts = words((grid as usize) << digit_bits);
            let (count, digits) = (self.edges as u32, 1u32 << digit_bits);
            let mut sorted: Option<(DeviceBuffer, DeviceBuffer)> = None;
            for pass in 0..passes {
                let shift = pass * digit_bits;
                let (to_keys, to_values) = (words(self.edges), words(self.edges));
                let (keys, values) =
                    sorted.as_ref().map_or((self.nbrs(), 0), |(keys, values)| (keys.address(), values.address()));
                // SAFETY: all arrays have an entry per edge, counts one per block and digit.
                unsafe {
                    launch!(
                        gpu, "count_digits", [grid, 1], [256, 1]; keys, counts.address(), count, shift, digits
                    );
                    if grid > 0 {
                        launch!(gpu, "scan_counts", [1, 1], [1024, 1]; counts.address(), grid * digits);
                    }
                    launch!(
                        gpu, "place_digits", [grid, 1], [256, 1];
                        keys, values, counts.address(), to_keys.address(), to_values.address(), count, shift, digits
                    );
                }
                sorted = Some((to_keys, to_values));
            }
            let (keys, edges) = sorted.expect("at least one pass");
            // SAFETY: as above; starts have one entry more than there are inputs.
            unsafe {
                launch!(
                    gpu, "edge_outputs", [blocks(self.outputs, 32), 1], [256, 1];
                    self.offsets(), owners.address(), self.outputs as u32
                );
                launch!(
                    gpu, "find_starts", [blocks(self.inputs + 1, 256), 1], [256, 1];
                    keys.address(), starts.address(), count, self.inputs as u32
                );
                launch!(
                    gpu, "pick_words", [blocks(self.edges, 256), 1], [256, 1];
                    owners.address(), edges.address(), outputs.address(), count
                );
            }
            DeviceTransposed { starts, edges, outputs }
        })
    }
}
