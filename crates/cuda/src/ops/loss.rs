use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::memory::DeviceBuffer;
use crate::pinned::{Pending, Pinned};
use crate::{DeviceMatrix, Use};

/// The targets of a loss.
#[derive(Debug, Clone, Copy)]
pub enum LossTargets<'a> {
    /// One class per row, each below the number of columns: softmax cross-entropy.
    Classes(&'a [u32]),
    /// 0, 1 or NaN for each number: sigmoid cross-entropy.
    Binary(&'a [f32]),
    /// A number or NaN for each: mean squared error.
    Values(&'a [f32]),
}

impl Gpu {
    /// The mean loss over `counted` numbers of the `rows` of the logits, and its gradient. Other rows get zeros.
    pub fn loss(
        &self,
        logits: &DeviceMatrix,
        rows: &[u32],
        targets: LossTargets<'_>,
        counted: usize,
        gradient: &mut DeviceMatrix,
    ) -> Pending {
        let (count, columns) = (rows.len(), logits.columns());
        assert_eq!((gradient.rows(), gradient.columns()), (logits.rows(), columns));
        assert!(rows.iter().all(|row| (*row as usize) < logits.rows()), "rows of the logits");
        let (kind, bits): (u32, &[u32]) = match targets {
            LossTargets::Classes(classes) => {
                assert!(classes.len() == count && classes.iter().all(|class| (*class as usize) < columns));
                (0, classes)
            }
            LossTargets::Binary(values) => (1, bytemuck::cast_slice(values)),
            LossTargets::Values(values) => (2, bytemuck::cast_slice(values)),
        };
        assert!(kind == 0 || bits.len() == count * columns, "a target a number");
        let mut host = Pinned::new(self, count + bits.len());
        host.words_mut()[..count].copy_from_slice(rows);
        host.words_mut()[count..].copy_from_slice(bits);
        let uploaded = self.upload_words(host);
        let targets = uploaded.address() + count as u64 * 4;
        let distinct = are_distinct(rows);
        let own = (!distinct).then(|| DeviceMatrix::new(self, count, columns));
        let losses = DeviceBuffer::new(self, (count + 1) * 8, Use::Compute);
        let total = losses.address() + count as u64 * 8;
        self.fill(gradient, 0.0);
        let scale = 1.0 / counted.max(1) as f32;
        // SAFETY: rows and classes are inside the logits by the asserts above; every array has the entries that the
        // kernels read and write.
        unsafe {
            launch!(
                self, "losses", [blocks(count, 8), 1], [256, 1];
                logits.address(), uploaded.address(), targets, targets,
                own.as_ref().map_or(gradient.address(), DeviceMatrix::address), losses.address(), count as u32,
                columns as u32, kind, scale, distinct as u32
            );
            if let Some(own) = &own {
                launch!(
                    self, "add_rows_in_order", [blocks(columns, 32), 1], [32, 1];
                    own.address(), uploaded.address(), gradient.address(), count as u32, columns as u32
                );
            }
            launch!(
                self, "add_numbers_f64", [1, 1], [256, 1];
                losses.address(), total, count as u32, counted.max(1) as f64, 0u32
            );
            Pending::copy(self, total)
        }
    }
}

/// Whether no row occurs twice. Rows usually ascend.
pub(super) fn are_distinct(rows: &[u32]) -> bool {
    if rows.windows(2).all(|pair| pair[0] < pair[1]) {
        return true;
    }
    let mut sorted = rows.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).all(|pair| pair[0] < pair[1])
}
