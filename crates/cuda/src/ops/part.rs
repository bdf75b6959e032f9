use super::RowShape;
use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::{DeviceAdjacency, DeviceMatrix};

/// How rows of neighbours are added to sums, as in `kernels/part.cu`.
#[derive(Clone, Copy)]
pub enum Adding<'a> {
    /// Added.
    Sum,
    /// Added, each times its factor.
    Scaled(&'a DeviceMatrix),
    /// The larger number stays.
    Max,
}

/// Attention over a part of the neighbours.
pub struct AttentionMore<'a> {
    /// Projected rows of this part.
    pub hidden: &'a DeviceMatrix,
    /// Their scores as neighbours.
    pub source_scores: &'a DeviceMatrix,
    /// The scores of all targets.
    pub target_scores: &'a DeviceMatrix,
    /// Slope of the leaky ReLU below 0.
    pub slope: f32,
}

impl Gpu {
    /// Adds the rows of a part of the neighbours to sums, one row per target.
    pub fn accumulate(
        &self,
        lists: &DeviceAdjacency,
        input: &DeviceMatrix,
        how: Adding<'_>,
        sums: &mut DeviceMatrix,
    ) {
        let columns = input.columns();
        assert_eq!((input.rows(), sums.rows(), sums.columns()), (lists.inputs(), lists.outputs(), columns));
        let (mode, scales) = match how {
            Adding::Sum => (0u32, 0),
            Adding::Scaled(scales) => {
                assert_eq!((scales.rows(), scales.columns()), (input.rows(), 1), "a factor a row");
                (1, scales.address())
            }
            Adding::Max => (2, 0),
        };
        let shape = RowShape::of(columns);
        // SAFETY: the adjacency is checked; the shapes were just asserted.
        unsafe {
            launch!(
                self, &shape.kernel("accumulate"), shape.grid(lists.outputs(), columns), [256, 1];
                lists.offsets(), lists.nbrs(), scales, input.address(), sums.address(), lists.outputs() as u32,
                columns as u32, mode
            )
        }
    }

    /// Multiplies each row by its factor.
    pub fn scale_rows(&self, factors: &DeviceMatrix, rows: &mut DeviceMatrix) {
        assert_eq!((factors.rows(), factors.columns()), (rows.rows(), 1), "a factor a row");
        let count = rows.count();
        // SAFETY: there is a factor per row.
        unsafe {
            launch!(
                self, "scale_rows", [blocks(count, 256), 1], [256, 1];
                factors.address(), rows.address(), count as u64, rows.columns() as u32
            )
        }
    }

    /// Scores of rows: each head's part times that part of the vector.
    pub fn attention_scores(&self, rows: &DeviceMatrix, vector: &DeviceMatrix, heads: usize) -> DeviceMatrix {
        let columns = rows.columns();
        assert!(heads > 0 && columns.is_multiple_of(heads) && vector.is_row(columns));
        let scores = DeviceMatrix::new(self, rows.rows(), heads);
        let count = rows.rows() as u32;
        // No row is scored as a target.
        // SAFETY: scores have a row per row; there are no targets.
        unsafe {
            launch!(
                self, "score_rows", [blocks(rows.rows(), 8), 1], [256, 1];
                rows.address(), vector.address(), vector.address(), scores.address(), 0u64, count, columns as u32,
                heads as u32, count
            )
        }
        scores
    }

    /// Adds a part of the neighbours to attention. `state` has the weighted sums, the largest scores and the sums of
    /// weights so far.
    pub fn attend_more(
        &self,
        lists: &DeviceAdjacency,
        call: &AttentionMore<'_>,
        state: [&mut DeviceMatrix; 3],
    ) {
        let [sums, most, total] = state;
        let (columns, heads, outputs) =
            (call.hidden.columns(), call.target_scores.columns(), lists.outputs());
        assert!(columns.is_multiple_of(heads), "{heads} heads in {columns} columns");
        assert_eq!((call.hidden.rows(), call.source_scores.rows()), (lists.inputs(), lists.inputs()));
        assert!([&*sums, &*most, &*total, call.target_scores].iter().all(|matrix| matrix.rows() == outputs));
        assert!(
            sums.columns() == columns && [&*most, &*total].iter().all(|matrix| matrix.columns() == heads)
        );
        let next = [(); 2].map(|_| DeviceMatrix::new(self, outputs, heads));
        let shape = RowShape::of_heads(columns, columns / heads);
        // SAFETY: the adjacency is checked; the shapes were just asserted.
        unsafe {
            launch!(
                self, &shape.kernel("attend_more"), shape.grid(outputs, columns), [256, 1];
                lists.offsets(), lists.nbrs(), call.hidden.address(), call.source_scores.address(),
                call.target_scores.address(), most.address(), total.address(), next[0].address(), next[1].address(),
                sums.address(), outputs as u32, columns as u32, heads as u32, call.slope
            )
        }
        [*most, *total] = next;
    }

    /// The result of attention. Heads are averaged or concatenated.
    pub fn attend_end(
        &self,
        sums: &DeviceMatrix,
        total: &DeviceMatrix,
        average: bool,
        output: &mut DeviceMatrix,
    ) {
        let heads = total.columns();
        let width = sums.columns() / heads;
        let columns = if average { width } else { sums.columns() };
        assert_eq!((output.rows(), output.columns(), total.rows()), (sums.rows(), columns, sums.rows()));
        let count = output.count();
        // SAFETY: the shapes were just asserted.
        unsafe {
            launch!(
                self, "end_attention", [blocks(count, 256), 1], [256, 1];
                sums.address(), total.address(), output.address(), count as u64, width as u32, heads as u32,
                average as u32
            )
        }
    }
}
