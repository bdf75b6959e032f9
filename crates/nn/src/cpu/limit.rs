//! The matmul rate that `gemm` itself reaches on this machine. Esker's matmuls are measured against it.

use std::time::Instant;

/// The rate of `gemm` alone, called repeatedly on every thread of the surrounding pool, at the best of several sizes:
/// operations per second.
pub fn best_matmul_rate(threads: usize) -> f64 {
    let sizes = [[1024, 256, 256], [512, 512, 512], [256, 256, 256]];
    let rate = |[m, n, k]: [usize; 3]| {
        let calls = (4 << 30) / (2 * m * n * k);
        let start = Instant::now();
        rayon::broadcast(|_| {
            let (a, b, mut c) = (vec![0.5f32; m * k], vec![0.5f32; k * n], vec![0.0f32; m * n]);
            for _ in 0..calls {
                let (m_, n_, k_) = (n as isize, n as isize, k as isize);
                let none = gemm::Parallelism::None;
                // SAFETY: the three matrices have the sizes and steps given, row after row.
                unsafe {
                    gemm::gemm(
                        m,
                        n,
                        k,
                        c.as_mut_ptr(),
                        1,
                        m_,
                        false,
                        a.as_ptr(),
                        1,
                        k_,
                        b.as_ptr(),
                        1,
                        n_,
                        0.0f32,
                        1.0,
                        false,
                        false,
                        false,
                        none,
                    );
                }
            }
        });
        (threads * calls * 2 * m * n * k) as f64 / start.elapsed().as_secs_f64()
    };
    sizes.into_iter().map(rate).fold(0.0, f64::max)
}
