use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::memory::DeviceBuffer;
use crate::{DeviceMatrix, Use};

/// The statistics that columns are normalised by.
pub enum Columns<'a> {
    /// Their mean and variance in this batch, which update the running ones.
    Batch {
        /// One row.
        running_mean: &'a mut DeviceMatrix,
        /// One row.
        running_variance: &'a mut DeviceMatrix,
        /// Weight of this batch.
        momentum: f32,
    },
    /// The running mean and variance.
    Running {
        /// One row.
        mean: &'a DeviceMatrix,
        /// One row.
        variance: &'a DeviceMatrix,
    },
}

impl Gpu {
    /// Normalises rows in place and writes them scaled and shifted. Returns the reciprocal standard deviation of each.
    pub fn layer_norm(
        &self,
        values: &mut DeviceMatrix,
        [scale, shift]: [&DeviceMatrix; 2],
        epsilon: f32,
        to: &mut DeviceMatrix,
    ) -> DeviceMatrix {
        let (rows, columns) = (values.rows(), values.columns());
        assert_eq!((to.rows(), to.columns()), (rows, columns));
        assert!([scale, shift].iter().all(|row| row.is_row(columns)));
        let deviations = DeviceMatrix::new(self, rows, 1);
        // SAFETY: the shapes were just asserted.
        unsafe {
            launch!(
                self, "layer_norm", [blocks(rows, 8), 1], [256, 1];
                values.address(), to.address(), deviations.address(), scale.address(), shift.address(), rows as u32,
                columns as u32, epsilon
            )
        }
        deviations
    }

    /// The same by columns. Returns the reciprocal standard deviation of each.
    pub fn batch_norm(
        &self,
        by: Columns<'_>,
        values: &mut DeviceMatrix,
        [scale, shift]: [&DeviceMatrix; 2],
        epsilon: f32,
        to: &mut DeviceMatrix,
    ) -> DeviceMatrix {
        let (rows, columns) = (values.rows(), values.columns());
        assert_eq!((to.rows(), to.columns()), (rows, columns));
        assert!([scale, shift].iter().all(|row| row.is_row(columns)));
        let row = || DeviceMatrix::new(self, 1, columns);
        let (own_mean, own_variance, reciprocals) = (row(), row(), row());
        let unbias = rows as f32 / rows.saturating_sub(1).max(1) as f32;
        let (mean, variance, running, momentum) = match by {
            Columns::Batch { running_mean, running_variance, momentum } => {
                assert!(running_mean.is_row(columns) && running_variance.is_row(columns));
                self.column_sums(values, values, None, [Some(&own_mean), None], rows);
                self.column_sums(values, values, Some(&own_mean), [None, Some(&own_variance)], rows);
                let running = (running_mean.address(), running_variance.address());
                (own_mean.address(), own_variance.address(), running, momentum)
            }
            Columns::Running { mean, variance } => {
                assert!(mean.is_row(columns) && variance.is_row(columns));
                (mean.address(), variance.address(), (0, 0), 0.0)
            }
        };
        let count = values.count();
        // SAFETY: the shapes were just asserted.
        unsafe {
            launch!(
                self, "batch_statistics", [blocks(columns, 256), 1], [256, 1];
                mean, variance, running.0, running.1, reciprocals.address(), columns as u32, momentum, unbias, epsilon
            );
            launch!(
                self, "batch_norm", [blocks(count, 256), 1], [256, 1];
                values.address(), to.address(), mean, reciprocals.address(), scale.address(), shift.address(),
                count as u64, columns as u32
            );
        }
        reciprocals
    }

    /// Gradients of scale and shift, and the gradient of the input of the normalisation, in place.
    pub fn norm_back(
        &self,
        by_row: bool,
        gradient: &mut DeviceMatrix,
        normalised: &DeviceMatrix,
        [scale, deviations]: [&DeviceMatrix; 2],
        [scale_gradient, shift_gradient]: [&mut DeviceMatrix; 2],
    ) {
        let (rows, columns) = (gradient.rows(), gradient.columns());
        assert_eq!((normalised.rows(), normalised.columns()), (rows, columns));
        assert!([scale, &*scale_gradient, &*shift_gradient].iter().all(|row| row.is_row(columns)));
        assert_eq!(deviations.count(), if by_row { rows } else { columns });
        self.column_sums(gradient, normalised, None, [Some(shift_gradient), Some(scale_gradient)], 1);
        let count = gradient.count();
        if by_row {
            // SAFETY: the shapes were just asserted.
            return unsafe {
                launch!(
                    self, "layer_norm_back", [blocks(rows, 8), 1], [256, 1];
                    gradient.address(), normalised.address(), scale.address(), deviations.address(), rows as u32,
                    columns as u32
                )
            };
        }
        let (mean, along) = (DeviceMatrix::new(self, 1, columns), DeviceMatrix::new(self, 1, columns));
        self.column_sums(gradient, normalised, None, [Some(&mean), Some(&along)], rows);
        // SAFETY: the shapes were just asserted.
        unsafe {
            launch!(
                self, "batch_norm_back", [blocks(count, 256), 1], [256, 1];
                gradient.address(), normalised.address(), scale.address(), deviations.address(), mean.address(),
                along.address(), count as u64, columns as u32
            )
        }
    }

    /// Column sums in f64 over fixed chunks, divided: of `a`, and of `a x b` or of squared distances from `mean`.
    fn column_sums(
        &self,
        a: &DeviceMatrix,
        b: &DeviceMatrix,
        mean: Option<&DeviceMatrix>,
        [plain, along]: [Option<&DeviceMatrix>; 2],
        divisor: usize,
    ) {
        let (rows, columns) = (a.rows(), a.columns());
        let each = rows.div_ceil(256).max(64);
        let chunks = rows.div_ceil(each);
        let sums = DeviceBuffer::new(self, chunks * 2 * columns * 8, Use::Compute);
        let address = |matrix: Option<&DeviceMatrix>| matrix.map_or(0, DeviceMatrix::address);
        // SAFETY: callers checked the shapes; there are two sums per chunk and column.
        unsafe {
            launch!(
                self, "column_sums", [chunks as u32, blocks(columns, 32)], [32, 8];
                a.address(), b.address(), address(mean), sums.address(), rows as u32, columns as u32, each as u32
            );
            launch!(
                self, "add_column_sums", [blocks(columns, 64), 1], [64, 1];
                sums.address(), address(plain), address(along), chunks as u32, columns as u32, divisor as f64
            );
        }
    }
}
