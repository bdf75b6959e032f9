//! The part of a graph that one layer reads.

/// Size of a layer's adjacency.
pub trait AdjacencyShape {
    /// Number of input rows.
    fn inputs(&self) -> usize;
    /// Number of output rows.
    fn outputs(&self) -> usize;
}

/// The adjacency that one layer reads, in host memory: for each output its neighbours among the input rows. The
/// outputs are always the last `outputs` rows of the inputs (DENSE, Marius++ section 4), so a node's own row is
/// `inputs - outputs + i` and needs no look-up.
#[derive(Debug, Clone, Copy)]
pub struct Adjacency<'a> {
    /// Rows of the input matrix.
    pub inputs: usize,
    /// Number of output rows.
    pub outputs: usize,
    /// Output `i` has the neighbours `nbrs[nbr_offsets[i]..nbr_offsets[i + 1]]`. The first offset may be above 0.
    pub nbr_offsets: &'a [u32],
    /// Neighbours; each is an input row plus `base`.
    pub nbrs: &'a [u32],
    /// The difference between a neighbour and its input row: the first input's local index in the batch.
    pub base: u32,
    /// Degree of each input row in the whole graph, or empty if no layer needs it.
    pub input_degrees: &'a [u32],
}

impl Adjacency<'_> {
    /// Neighbours of all outputs.
    pub fn edge_count(&self) -> usize {
        match self.nbr_offsets {
            [first, .., last] => (last - first) as usize,
            _ => 0,
        }
    }

    /// Asserts that the neighbours of every output are inside `nbrs`.
    pub fn assert_valid(&self) {
        assert!(self.outputs <= self.inputs, "outputs are the last rows of the inputs");
        self.assert_lists();
    }

    /// Asserts the same, whether or not outputs are among the inputs.
    pub fn assert_lists(&self) {
        assert!(self.inputs < u32::MAX as usize, "rows are counted in 32 bits");
        assert_eq!(self.nbr_offsets.len(), self.outputs + 1, "one offset an output, and the end");
        assert!(self.nbr_offsets.is_sorted(), "offsets ascend");
        assert!(self.nbr_offsets[self.outputs] as usize <= self.nbrs.len(), "neighbours end inside nbrs");
        assert!(
            self.input_degrees.is_empty() || self.input_degrees.len() == self.inputs,
            "one degree an input row, or none"
        );
    }
}

impl<'a> Adjacency<'a> {
    /// Neighbours among `inputs` rows, of targets that are not among them.
    pub fn part(inputs: usize, nbr_offsets: &'a [u32], nbrs: &'a [u32]) -> Adjacency<'a> {
        let outputs = nbr_offsets.len().saturating_sub(1);
        Adjacency { inputs, outputs, nbr_offsets, nbrs, base: 0, input_degrees: &[] }
    }
}

/// An adjacency without neighbours: every row is input and output.
impl Adjacency<'_> {
    /// Offsets of this many rows without neighbours, for [`Adjacency::without_neighbours`].
    pub fn no_offsets(rows: usize) -> Vec<u32> {
        vec![0; rows + 1]
    }

    /// Rows without neighbours, given by their offsets.
    pub fn without_neighbours(offsets: &[u32]) -> Adjacency<'_> {
        let rows = offsets.len() - 1;
        Adjacency {
            inputs: rows,
            outputs: rows,
            nbr_offsets: offsets,
            nbrs: &[],
            base: 0,
            input_degrees: &[],
        }
    }
}
