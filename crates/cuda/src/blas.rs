//! Matmuls through cuBLAS. There is one handle, for the compute stream, with its own workspace, so that the same
//! matmul is always computed in the same way.

use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::memory::{DeviceBuffer, Use};
use crate::{CudaError, DeviceMatrix, Result};
use cudarc::cublas::sys;
use serde::{Deserialize, Serialize};
use std::ptr;

/// The precision of a GPU's matmuls. Sums, rows and weights are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// In f32 throughout.
    #[default]
    F32,
    /// Factors rounded to TF32 (10 mantissa bits), sums in f32.
    Tf32,
    /// Factors rounded to bf16 (7 mantissa bits), sums in f32.
    Bf16,
}

/// Hopper needs 32 MiB, other GPUs less.
pub const WORKSPACE_BYTES: usize = 32 << 20;

pub(crate) struct Blas {
    handle: sys::cublasHandle_t,
    workspace: u64,
}
// SAFETY: the handle may be used from any thread, one at a time, which a lock ensures.
unsafe impl Send for Blas {}

fn done(what: &'static str, status: sys::cublasStatus_t) -> Result<()> {
    match status {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED => {
            Err(CudaError::Full { what, found: format!("{status:?}") })
        }
        other => Err(CudaError::Call { what, found: format!("{other:?}") }),
    }
}

impl Blas {
    pub fn new(gpu: &Gpu) -> Result<Blas> {
        let workspace = gpu.inner().pool.reserve(WORKSPACE_BYTES)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the workspace lives as long as the handle; the stream as long as the GPU.
        unsafe {
            if let Err(error) = done("starting cuBLAS", sys::cublasCreate_v2(&mut handle)) {
                cudarc::driver::sys::cuMemFree_v2(workspace);
                return Err(error);
            }
            done("starting cuBLAS", sys::cublasSetStream_v2(handle, gpu.inner().compute.handle().cast()))?;
            let address = workspace as *mut std::ffi::c_void;
            done("starting cuBLAS", sys::cublasSetWorkspace_v2(handle, address, WORKSPACE_BYTES))?;
        }
        Ok(Blas { handle, workspace })
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: the handle and the workspace are ours, and the device is idle.
        unsafe {
            sys::cublasDestroy_v2(self.handle);
            cudarc::driver::sys::cuMemFree_v2(self.workspace);
        }
    }
}

/// Rows of a matrix: some or all.
#[derive(Clone, Copy)]
struct Rows {
    address: u64,
    rows: usize,
    columns: usize,
}

impl Rows {
    fn last(matrix: &DeviceMatrix, rows: usize) -> Rows {
        assert!(rows <= matrix.rows());
        let skipped = (matrix.rows() - rows) * matrix.columns() * 4;
        Rows { address: matrix.address() + skipped as u64, rows, columns: matrix.columns() }
    }
}

fn operation(transposed: bool) -> sys::cublasOperation_t {
    match transposed {
        true => sys::cublasOperation_t::CUBLAS_OP_T,
        false => sys::cublasOperation_t::CUBLAS_OP_N,
    }
}

fn compute(precision: Precision) -> sys::cublasComputeType_t {
    match precision {
        Precision::Tf32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        Precision::F32 | Precision::Bf16 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    }
}

impl Gpu {
    /// `to = from's last rows x weight transposed`, added to `to` if `add`.
    pub fn matmul(&self, from: &DeviceMatrix, weight: &DeviceMatrix, add: bool, to: &mut DeviceMatrix) {
        assert!(from.columns() == weight.columns() && weight.rows() == to.columns());
        let from = Rows::last(from, to.rows());
        let (n, m, k) = (weight.rows(), from.rows, from.columns);
        self.gemm([true, false], [n, m, k], (weight.address(), k), (from.address, k), add, (to.address(), n));
    }

    /// `to's last rows = gradient x weight`, added to `to` if `add`.
    pub fn matmul_backward(
        &self,
        gradient: &DeviceMatrix,
        weight: &DeviceMatrix,
        add: bool,
        to: &mut DeviceMatrix,
    ) {
        assert!(gradient.columns() == weight.rows() && weight.columns() == to.columns());
        let to = Rows::last(to, gradient.rows());
        let (k, m, n) = (weight.columns(), gradient.rows(), weight.rows());
        self.gemm(
            [false, false],
            [k, m, n],
            (weight.address(), k),
            (gradient.address(), n),
            add,
            (to.address, k),
        );
    }

    /// `to = gradient transposed x from's last rows`.
    pub fn matmul_weights(&self, gradient: &DeviceMatrix, from: &DeviceMatrix, to: &mut DeviceMatrix) {
        assert!(to.rows() == gradient.columns() && to.columns() == from.columns());
        let from = Rows::last(from, gradient.rows());
        let (k, n, m) = (from.columns, gradient.columns(), from.rows);
        self.gemm(
            [false, true],
            [k, n, m],
            (from.address, k),
            (gradient.address(), n),
            false,
            (to.address(), k),
        );
    }

    /// cuBLAS's matmul of column-major matrices `a` and `b` into `c`, each with its leading dimension.
    fn gemm(
        &self,
        transposed: [bool; 2],
        [m, n, k]: [usize; 3],
        a: (u64, usize),
        b: (u64, usize),
        add: bool,
        c: (u64, usize),
    ) {
        if m == 0 || n == 0 {
            return;
        }
        assert!([m, n, k].iter().all(|size| *size <= i32::MAX as usize), "cuBLAS counts rows in 31 bits");
        // In its fast bf16 mode, cuBLAS may still use TF32. Rounding the factors here prevents that.
        let rounded = (self.precision() == Precision::Bf16)
            .then(|| [(a.0, m * k), (b.0, k * n)].map(|(from, count)| self.rounded(from, count)));
        let (a_address, b_address, kind) = match &rounded {
            Some([a, b]) => (a.address(), b.address(), sys::cudaDataType::CUDA_R_16BF),
            None => (a.0, b.0, sys::cudaDataType::CUDA_R_32F),
        };
        let compute = compute(self.precision());
        let (one, zero) = (1.0f32, 0.0f32);
        let beta = if add { &one } else { &zero };
        self.attempt(|| {
            let blas = self.blas()?.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            // SAFETY: the callers checked the shapes; the matrices are memory of the pool, used in stream order.
            let status = unsafe {
                sys::cublasGemmEx(
                    blas.handle,
                    operation(transposed[0]),
                    operation(transposed[1]),
                    m as i32,
                    n as i32,
                    k as i32,
                    ptr::from_ref(&one).cast(),
                    a_address as *const _,
                    kind,
                    a.1.max(1) as i32,
                    b_address as *const _,
                    kind,
                    b.1.max(1) as i32,
                    ptr::from_ref(beta).cast(),
                    c.0 as *mut _,
                    sys::cudaDataType::CUDA_R_32F,
                    c.1.max(1) as i32,
                    compute,
                    sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
                )
            };
            done("a matmul", status)
        });
    }

    /// `count` matmuls at once, as `gemm`: each matrix has an address, a leading dimension and a step to the next.
    pub(crate) fn gemm_batched(
        &self,
        transposed: [bool; 2],
        [m, n, k]: [usize; 3],
        [a, b]: [(u64, usize, usize); 2],
        add: bool,
        c: (u64, usize, usize),
        count: usize,
    ) {
        if m == 0 || n == 0 || count == 0 {
            return;
        }
        let sizes = [m, n, k, count];
        assert!(sizes.iter().all(|size| *size <= i32::MAX as usize), "cuBLAS counts rows in 31 bits");
        let rounded = (self.precision() == Precision::Bf16)
            .then(|| [(a.0, a.2 * count), (b.0, b.2 * count)].map(|(from, count)| self.rounded(from, count)));
        let (a_address, b_address, kind) = match &rounded {
            Some([a, b]) => (a.address(), b.address(), sys::cudaDataType::CUDA_R_16BF),
            None => (a.0, b.0, sys::cudaDataType::CUDA_R_32F),
        };
        let compute = compute(self.precision());
        let (one, zero) = (1.0f32, 0.0f32);
        let beta = if add { &one } else { &zero };
        self.attempt(|| {
            let blas = self.blas()?.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            // SAFETY: the callers checked the shapes; the matrices are memory of the pool, used in stream order.
            let status = unsafe {
                sys::cublasGemmStridedBatchedEx(
                    blas.handle,
                    operation(transposed[0]),
                    operation(transposed[1]),
                    m as i32,
                    n as i32,
                    k as i32,
                    ptr::from_ref(&one).cast(),
                    a_address as *const _,
                    kind,
                    a.1.max(1) as i32,
                    a.2 as i64,
                    b_address as *const _,
                    kind,
                    b.1.max(1) as i32,
                    b.2 as i64,
                    ptr::from_ref(beta).cast(),
                    c.0 as *mut _,
                    sys::cudaDataType::CUDA_R_32F,
                    c.1.max(1) as i32,
                    c.2 as i64,
                    count as i32,
                    compute,
                    sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
                )
            };
            done("matmuls", status)
        });
    }

    /// `count` numbers rounded to bf16.
    fn rounded(&self, from: u64, count: usize) -> DeviceBuffer {
        let to = DeviceBuffer::new(self, count * 2, Use::Compute);
        // SAFETY: callers pass a whole matrix of `count` numbers.
        unsafe {
            launch!(self, "round_to_bf16", [blocks(count, 1024), 1], [256, 1]; from, to.address(), count as u64)
        }
        to
    }
}
