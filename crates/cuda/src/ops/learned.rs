use super::update::DeviceRule;
use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::memory::DeviceBuffer;
use crate::pinned::Pending;
use crate::{DeviceMatrix, Use};

/// As in `kernels/learned.cu`.
const MOST_PARTS: usize = 8;
/// Members of a row from which several warps sum it.
const MANY_MEMBERS: u32 = 64;

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct PartAddresses {
    part: [u64; MOST_PARTS],
    end: [u32; MOST_PARTS],
}

impl Gpu {
    /// `to[i]` = sum of the rows `members[offsets[i]..offsets[i + 1]]` of all parts, in a fixed order.
    pub fn sum_rows(&self, parts: &[&DeviceMatrix], offsets: &[u32], members: &[u32], to: &mut DeviceMatrix) {
        let (rows, columns) = (to.rows(), to.columns());
        assert!(parts.len() <= MOST_PARTS && parts.iter().all(|part| part.columns() == columns));
        assert!(offsets.len() == rows + 1 && offsets.is_sorted() && offsets[rows] as usize <= members.len());
        let mut addresses = PartAddresses::default();
        let mut end = 0;
        for (at, address) in addresses.part.iter_mut().enumerate() {
            *address = parts.get(at).map_or(0, |part| part.address());
            end += parts.get(at).map_or(0, |part| part.rows());
            addresses.end[at] = u32::try_from(end).expect("rows are counted in 32 bits");
        }
        assert!(members.iter().all(|member| (*member as usize) < end), "members are rows of the parts");
        let most = offsets.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        let [offsets, members] = [offsets, members].map(|words| self.upload_slice(words));
        // SAFETY: members are rows of the parts, by the assertions above.
        unsafe {
            if most >= MANY_MEMBERS {
                launch!(
                    self, "sum_many_rows", [(rows * columns.div_ceil(32)) as u32, 1], [256, 1];
                    addresses, offsets.address(), members.address(), to.address(), columns as u32
                )
            } else {
                launch!(
                    self, "sum_rows", [blocks(rows * columns, 256), 1], [256, 1];
                    addresses, offsets.address(), members.address(), to.address(), rows as u32, columns as u32
                )
            }
        }
    }

    /// Updates some rows of a table and of its state. Asserts that none occurs twice.
    pub fn update_rows(
        &self,
        rule: DeviceRule,
        rows: &[u32],
        gradient: &DeviceMatrix,
        table: &mut DeviceMatrix,
        state: &[&mut DeviceMatrix],
    ) {
        let (columns, count) = (table.columns(), rows.len() * table.columns());
        assert_eq!((gradient.rows(), gradient.columns()), (rows.len(), columns));
        assert!(rows.iter().all(|row| (*row as usize) < table.rows()), "rows of the table");
        assert!(super::loss::are_distinct(rows), "rows do not repeat");
        let shape = (table.rows(), columns);
        assert!(state.iter().all(|state| (state.rows(), state.columns()) == shape));
        let states = match (rule.kind, rule.momentum) {
            (0, 0.0) => 0,
            (1, _) => 2,
            _ => 1,
        };
        assert_eq!(state.len(), states, "the states that the rule needs");
        let state = |index: usize| state.get(index).map_or(0, |state| state.address());
        let uploaded = self.upload_slice(rows);
        // SAFETY: every row is one of the table and of its states, and no two threads have the same number.
        unsafe {
            launch!(
                self, "update_rows", [blocks(count, 256), 1], [256, 1];
                table.address(), gradient.address(), state(0), state(1), uploaded.address(), count as u64,
                columns as u32, rule
            )
        }
    }

    /// The sum of each row's penalty times its weight; the gradient is added. `kind` is 0 for squares, 1 for cubes, 2
    /// for cubes of complex numbers.
    pub fn penalty(
        &self,
        kind: u32,
        weights: &[f32],
        rows: &DeviceMatrix,
        gradient: &mut DeviceMatrix,
    ) -> Pending {
        let (count, columns) = (rows.rows(), rows.columns());
        assert_eq!((gradient.rows(), gradient.columns(), weights.len()), (count, columns, count));
        assert!(kind < 2 || columns.is_multiple_of(2), "complex numbers have two columns");
        let uploaded = self.upload_slice(bytemuck::cast_slice(weights));
        let sums = DeviceBuffer::new(self, (count + 1) * 8, Use::Compute);
        let total = sums.address() + count as u64 * 8;
        // SAFETY: all have a row, a weight and a sum per row, and there is one more element.
        unsafe {
            launch!(
                self, "penalties", [blocks(count, 8), 1], [256, 1];
                rows.address(), uploaded.address(), gradient.address(), sums.address(), count as u32,
                columns as u32, kind
            );
            launch!(self, "add_numbers_f64", [1, 1], [256, 1]; sums.address(), total, count as u32, 1.0f64, 0u32);
            Pending::copy(self, total)
        }
    }
}
