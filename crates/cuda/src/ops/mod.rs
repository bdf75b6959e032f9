//! Safe functions that launch kernels. They check shapes, so that kernels stay inside their memory.

mod aggregate;
mod attention;
mod hidden;
mod learned;
mod link;
mod link_loss;
mod loss;
mod norm;
mod part;
mod post;
mod rows;
mod tiers;
mod update;

pub use aggregate::Gathering;
pub use attention::{AttentionCall, AttentionState};
pub use hidden::DeviceHidden;
pub use link::{
    DeviceCandidateGradients, DeviceDecoder, DeviceEdges, DeviceLinkLoss, DevicePairs, DeviceQueries,
    MaskedOfEdge,
};
pub use link_loss::link_loss_words;
pub use loss::LossTargets;
pub use norm::Columns;
pub use part::{Adding, AttentionMore};
pub use post::{DeviceActivation, DeviceDropout, DevicePost};
pub use rows::NodeCache;
pub use tiers::{TieredBatch, TieredRows};
pub use update::{DeviceRule, UpdatedMatrix};

/// How a kernel reads rows of a given number of columns: lanes per row, packs per lane, numbers per pack. As
/// `FOR_SHAPES` in `kernels/common.cuh`.
#[derive(Clone, Copy)]
pub(crate) struct RowShape {
    lanes: usize,
    packs: usize,
    numbers: usize,
}

impl RowShape {
    pub fn of(columns: usize) -> RowShape {
        let shape = |lanes, packs, numbers| RowShape { lanes, packs, numbers };
        if !columns.is_multiple_of(4) {
            return if columns <= 8 { shape(8, 1, 1) } else { shape(32, 4, 1) };
        }
        match columns / 4 {
            0..=1 => shape(1, 1, 4),
            2 => shape(2, 1, 4),
            3..=4 => shape(4, 1, 4),
            5..=8 => shape(8, 1, 4),
            9..=16 => shape(16, 1, 4),
            17..=32 => shape(32, 1, 4),
            33..=64 => shape(32, 2, 4),
            _ => shape(32, 4, 4),
        }
    }

    /// The shape of kernels in which a pack of a lane must not contain two heads.
    pub fn of_heads(columns: usize, width: usize) -> RowShape {
        if width.is_multiple_of(4) {
            RowShape::of(columns)
        } else if columns <= 8 {
            RowShape { lanes: 8, packs: 1, numbers: 1 }
        } else {
            RowShape { lanes: 32, packs: 4, numbers: 1 }
        }
    }

    /// The kernel of this shape.
    pub fn kernel(self, stem: &str) -> String {
        format!("{stem}_{}_{}_{}", self.lanes, self.packs, self.numbers)
    }

    /// Blocks of 256 threads for this many rows and columns.
    pub fn grid(self, rows: usize, columns: usize) -> [u32; 2] {
        let width = self.lanes * self.packs * self.numbers;
        [rows.div_ceil(256 / self.lanes) as u32, columns.div_ceil(width) as u32]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_has_its_kernels() {
        let common = include_str!("../../kernels/common.cuh");
        for columns in 1..2000 {
            let shape = RowShape::of(columns);
            let named = format!("KERNEL({}, {}, {})", shape.lanes, shape.packs, shape.numbers);
            assert!(common.contains(&named), "{columns} columns: {named}");
            assert!(columns.is_multiple_of(shape.numbers) && 32 % shape.lanes == 0);
            let [rows, parts] = shape.grid(100, columns);
            assert!(rows as usize * (256 / shape.lanes) >= 100);
            assert!(parts as usize * shape.lanes * shape.packs * shape.numbers >= columns);
        }
    }
}
