use crate::gpu::{Gpu, launch};
use crate::memory::DeviceBuffer;
use crate::pinned::Pending;
use crate::{DeviceMatrix, Use};

/// As in `kernels/update.cu`.
const MOST_TENSORS: usize = 48;
const NUMBERS_EACH: usize = 1024;

/// An optimizer's rule in the form of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct DeviceRule {
    /// 0 for SGD, 1 for Adam, 2 for Adagrad.
    pub kind: u32,
    /// SGD: Nesterov momentum.
    pub nesterov: u32,
    /// SGD: momentum.
    pub momentum: f32,
    /// Adam.
    pub beta1: f32,
    /// Adam.
    pub beta2: f32,
    /// Added to denominators.
    pub epsilon: f32,
    /// Adam: 1 - beta1^step.
    pub correction1: f32,
    /// Adam: sqrt(1 - beta2^step).
    pub correction2_root: f32,
    /// Learning rate.
    pub rate: f32,
    /// Gradients are clipped to this absolute value.
    pub limit: f32,
    /// Added to the gradient, times the value.
    pub weight_decay: f32,
    /// The value is multiplied by this first.
    pub shrink: f32,
    /// All gradients together are scaled down to this norm, if the norm is computed.
    pub clip_norm: f32,
}

/// A parameter to be updated.
pub struct UpdatedMatrix<'a> {
    /// The numbers.
    pub value: &'a mut DeviceMatrix,
    /// Their gradient.
    pub gradient: &'a DeviceMatrix,
    /// State of the rule: up to two matrices of the same shape.
    pub state: Vec<&'a mut DeviceMatrix>,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Tensor {
    value: u64,
    gradient: u64,
    first: u64,
    second: u64,
    count: u32,
    first_block: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Tensors {
    tensor: [Tensor; MOST_TENSORS],
    count: u32,
}

impl Gpu {
    /// Updates parameters, all in one launch. With `clip`, the norm of all gradients is computed first, on the device,
    /// and returned.
    pub fn update(&self, rule: DeviceRule, clip: bool, parameters: &[UpdatedMatrix<'_>]) -> Option<Pending> {
        let states = match (rule.kind, rule.momentum) {
            (0, 0.0) => 0,
            (1, _) => 2,
            _ => 1,
        };
        let launches: Vec<(Tensors, u32)> =
            parameters.chunks(MOST_TENSORS).map(|part| group(part, states)).collect();
        let total_blocks: u32 = launches.iter().map(|(_, blocks)| blocks).sum();
        let sums = clip.then(|| DeviceBuffer::new(self, (total_blocks as usize + 1) * 8, Use::Compute));
        let length = sums.as_ref().map_or(0, |sums| sums.address() + total_blocks as u64 * 8);
        if let Some(sums) = &sums {
            let mut before = 0;
            for (tensors, blocks) in &launches {
                // SAFETY: the addresses and counts are those of whole matrices; there is one sum per block.
                unsafe { launch!(self, "squares", [*blocks, 1], [256, 1]; *tensors, sums.address(), before) }
                before += blocks;
            }
            // SAFETY: there is one sum per block, and one more element.
            unsafe {
                launch!(self, "add_numbers_f64", [1, 1], [256, 1]; sums.address(), length, total_blocks, 1.0f64, 1u32)
            }
        }
        for (tensors, blocks) in &launches {
            // SAFETY: as above; the states that the rule needs exist.
            unsafe { launch!(self, "update", [*blocks, 1], [256, 1]; *tensors, rule, length) }
        }
        // SAFETY: the norm is an f64 in the pool's memory.
        sums.map(|_| unsafe { Pending::copy(self, length) })
    }
}

/// The parameters of one launch, and its blocks.
fn group(parameters: &[UpdatedMatrix<'_>], states: usize) -> (Tensors, u32) {
    let mut tensors = Tensors { tensor: [Tensor::default(); MOST_TENSORS], count: 0 };
    let mut blocks = 0;
    // Empty matrices have no block, and must not precede one that has blocks.
    for moved in parameters.iter().filter(|moved| moved.value.count() > 0) {
        let count = moved.value.count();
        assert!(moved.gradient.count() == count && moved.state.len() == states);
        assert!(moved.state.iter().all(|state| state.count() == count), "state of the parameter's shape");
        assert!(count < (u32::MAX - 2048) as usize, "a parameter is counted in 32 bits");
        let state = |index: usize| moved.state.get(index).map_or(0, |state| state.address());
        tensors.tensor[tensors.count as usize] = Tensor {
            value: moved.value.address(),
            gradient: moved.gradient.address(),
            first: state(0),
            second: state(1),
            count: count as u32,
            first_block: blocks,
        };
        tensors.count += 1;
        blocks += count.div_ceil(NUMBERS_EACH) as u32;
    }
    (tensors, blocks)
}
