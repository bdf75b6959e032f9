use crate::DeviceMatrix;
use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::memory::DeviceBuffer;

/// Dropout in the form of the kernels. A threshold of 0 drops nothing.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct DeviceDropout {
    /// The key's number.
    pub key: u64,
    /// Lanes below this are dropped.
    pub threshold: u32,
    /// Factor of the numbers that are kept.
    pub scale: f32,
}

/// Activations in the form of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum DeviceActivation {
    /// None.
    #[default]
    Identity = 0,
    /// max(x, 0).
    Relu = 1,
    /// x above 0, exp(x) - 1 below.
    Elu = 2,
    /// x above 0, a hundredth of it below.
    LeakyRelu = 3,
}

/// Activation, then dropout.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct DevicePost {
    /// Applied second.
    pub dropout: DeviceDropout,
    /// Applied first.
    pub activation: DeviceActivation,
}

/// Rows per partial sum: few enough that all multiprocessors have work, and the same on every GPU.
const SUM_ROWS: usize = 32;

impl Gpu {
    /// `values = post(values + bias + last rows of add)`.
    pub fn finish(
        &self,
        values: &mut DeviceMatrix,
        bias: Option<&DeviceMatrix>,
        add: Option<&DeviceMatrix>,
        post: DevicePost,
    ) {
        let (rows, columns) = (values.rows(), values.columns());
        assert!(bias.is_none_or(|bias| bias.columns() == columns && bias.rows() == 1));
        assert!(add.is_none_or(|add| add.columns() == columns));
        let bias = bias.map_or(0, DeviceMatrix::address);
        let add = add.map_or(0, |add| add.last(rows));
        if post.dropout.threshold == 0 && columns.is_multiple_of(4) {
            // SAFETY: the shapes were just asserted; rows start at multiples of 16 bytes.
            return unsafe {
                launch!(
                    self, "finish_packs", [blocks(rows, 8), 1], [32, 8];
                    values.address(), bias, add, rows as u32, columns as u32, post.activation
                )
            };
        }
        // SAFETY: the shapes were just asserted.
        unsafe {
            launch!(
                self, "finish_rows", [blocks(rows, 8), 1], [32, 8];
                values.address(), values.address(), bias, add, rows as u32, columns as u32, post
            )
        }
    }

    /// `to = post(last rows of from + bias)`.
    pub fn finish_copy(
        &self,
        from: &DeviceMatrix,
        bias: Option<&DeviceMatrix>,
        post: DevicePost,
        to: &mut DeviceMatrix,
    ) {
        let (rows, columns) = (to.rows(), to.columns());
        assert!(bias.is_none_or(|bias| bias.columns() == columns && bias.rows() == 1));
        assert_eq!(from.columns(), columns);
        // SAFETY: the shapes were just asserted.
        unsafe {
            launch!(
                self, "finish_rows", [blocks(rows, 8), 1], [32, 8];
                to.address(), from.last(rows), bias.map_or(0, DeviceMatrix::address), 0u64, rows as u32, columns as u32, post
            )
        }
    }

    /// If `post` is given, converts the gradient of the output of `finish` into the gradient of its sum, in place.
    /// Sets `sums` to the column sums of the result.
    pub fn unfinish(
        &self,
        gradient: &mut DeviceMatrix,
        post: Option<(&DeviceMatrix, DevicePost)>,
        sums: Option<&mut DeviceMatrix>,
    ) {
        let (rows, columns) = (gradient.rows(), gradient.columns());
        assert!(post.is_none_or(|(output, _)| (output.rows(), output.columns()) == (rows, columns)));
        assert!(sums.as_ref().is_none_or(|sums| sums.columns() == columns && sums.rows() == 1));
        if post.is_none() && sums.is_none() {
            return;
        }
        let chunks = rows.div_ceil(SUM_ROWS);
        let partials = sums.as_ref().map(|_| DeviceBuffer::words(self, chunks * columns));
        let (output, post) =
            post.map_or((0, DevicePost::default()), |(output, post)| (output.address(), post));
        let to = partials.as_ref().map_or(0, DeviceBuffer::address);
        let random = post.dropout.threshold > 0 && post.activation != DeviceActivation::Relu;
        let kernel = if !random && columns.is_multiple_of(4) { "unfinish_packs" } else { "unfinish_rows" };
        // SAFETY: the shapes were just asserted; there is one partial sum per chunk and column.
        unsafe {
            launch!(
                self, kernel, [chunks as u32, 1], [32, 8];
                gradient.address(), output, to, rows as u32, columns as u32, SUM_ROWS as u32, post
            );
        }
        if let Some(sums) = sums {
            self.add_chunks(to, chunks, sums);
        }
    }

    /// Adds up partial sums.
    fn add_chunks(&self, partials: u64, chunks: usize, to: &mut DeviceMatrix) {
        let columns = to.columns();
        // SAFETY: callers pass one partial sum per chunk and column.
        unsafe {
            launch!(
                self, "add_chunks", [blocks(columns, 32), 1], [32, 32];
                partials, to.address(), chunks as u32, columns as u32
            )
        }
    }

    /// One row: sums over the last rows of `values` of each head's part times the row's number for that head.
    pub(crate) fn weighted_sums(
        &self,
        values: &DeviceMatrix,
        rows: usize,
        numbers: &DeviceBuffer,
        heads: usize,
        to: &mut DeviceMatrix,
    ) {
        let columns = values.columns();
        assert!(to.is_row(columns) && numbers.bytes() >= rows * heads * 4);
        let each = rows.div_ceil(2048).max(64);
        let chunks = rows.div_ceil(each);
        let partials = DeviceBuffer::words(self, chunks * columns);
        // SAFETY: the shapes were just asserted.
        unsafe {
            launch!(
                self, "weighted_sums", [chunks as u32, 1], [32, 8];
                values.last(rows), numbers.address(), partials.address(), rows as u32, columns as u32, heads as u32,
                each as u32
            );
        }
        self.add_chunks(partials.address(), chunks, to);
    }
}
