use super::RowShape;
use crate::gpu::{Gpu, launch};
use crate::{DeviceAdjacency, DeviceMatrix};

/// How neighbours' rows are aggregated, as in `kernels/aggregate.cu`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gathering {
    /// Their mean.
    Mean,
    /// Their sum.
    Sum,
    /// Their sum plus this multiple of the node's own row.
    SumWithSelf(f32),
    /// GCN's, by whole-graph degrees; a neighbour counts `degree / sampled` times.
    GcnUnbiased,
    /// GCN's, by whole-graph degrees.
    GcnWhole,
    /// GCN's, by sampled degrees.
    GcnSampled,
    /// Maximum per column.
    Max,
}

impl Gathering {
    /// The kernel's number for it, its multiple, its scales, and the degrees that weight neighbours.
    fn parts(self, lists: &DeviceAdjacency) -> (u32, f32, u64, u64) {
        match self {
            Gathering::Mean => (0, 1.0, 0, 0),
            Gathering::Sum | Gathering::Max => (1, 1.0, 0, 0),
            Gathering::SumWithSelf(multiple) => (2, multiple, 0, 0),
            Gathering::GcnUnbiased => (3, 1.0, lists.gcn_scales(true), lists.degrees()),
            Gathering::GcnWhole => (3, 1.0, lists.gcn_scales(true), 0),
            Gathering::GcnSampled => (3, 1.0, lists.gcn_scales(false), 0),
        }
    }
}

impl Gpu {
    /// One row per output, from its neighbours' rows. `winners` gets the position of each maximum among the node's
    /// neighbours.
    pub fn aggregate(
        &self,
        lists: &DeviceAdjacency,
        input: &DeviceMatrix,
        how: Gathering,
        to: &mut DeviceMatrix,
        winners: Option<&mut DeviceMatrix>,
    ) {
        let columns = input.columns();
        assert_eq!(input.rows(), lists.inputs(), "the graph of this layer");
        assert_eq!((to.rows(), to.columns()), (lists.outputs(), columns));
        let shape = RowShape::of(columns);
        let grid = shape.grid(lists.outputs(), columns);
        let (outputs, width) = (lists.outputs() as u32, columns as u32);
        if how == Gathering::Max {
            let winners = winners.map_or(0, |winners| {
                assert_eq!((winners.rows(), winners.columns()), (to.rows(), columns));
                winners.address()
            });
            // SAFETY: the adjacency is checked; the shapes were just asserted.
            return unsafe {
                launch!(
                    self, &shape.kernel("largest"), grid, [256, 1];
                    lists.offsets(), lists.nbrs(), input.address(), to.address(), winners, outputs, width
                )
            };
        }
        let (mode, multiple, scales, degrees) = how.parts(lists);
        // SAFETY: the adjacency is checked; the shapes were just asserted; scales and degrees have an entry per input.
        unsafe {
            launch!(
                self, &shape.kernel("aggregate"), grid, [256, 1];
                lists.offsets(), lists.nbrs(), scales, degrees, input.address(), to.address(), outputs, width,
                lists.self_first(), mode, multiple
            )
        }
    }

    /// Sets the gradient of each input from the gradients of aggregated rows. With `add_to_last`, the last rows, which
    /// are the outputs' own, already contain a part of the sum.
    pub fn hand_back(
        &self,
        lists: &DeviceAdjacency,
        gradient: &DeviceMatrix,
        how: Gathering,
        winners: Option<&DeviceMatrix>,
        add_to_last: bool,
        to: &mut DeviceMatrix,
    ) {
        let columns = gradient.columns();
        assert_eq!((gradient.rows(), to.rows(), to.columns()), (lists.outputs(), lists.inputs(), columns));
        assert_eq!(how == Gathering::Max, winners.is_some(), "the largest need to be known");
        assert!(
            winners.is_none_or(|winners| (winners.rows(), winners.columns()) == (lists.outputs(), columns))
        );
        let shape = RowShape::of(columns);
        let (mode, multiple, scales, degrees) = how.parts(lists);
        let transposed = lists.transposed();
        // SAFETY: the adjacency is checked; the shapes were just asserted; scales and degrees have an entry per input.
        unsafe {
            launch!(
                self, &shape.kernel("hand_back"), shape.grid(lists.inputs(), columns), [256, 1];
                transposed.starts.address(), transposed.edges.address(), transposed.outputs.address(),
                lists.offsets(), scales, degrees, winners.map_or(0, DeviceMatrix::address), gradient.address(), to.address(),
                lists.inputs() as u32, columns as u32, lists.self_first(), mode, multiple, add_to_last as u32
            )
        }
    }
}
