//! The limits of a GPU, its memory and its bus, against which everything else is compared.

use crate::gpu::{Gpu, Stopwatch};
use crate::pinned::Pinned;
use crate::{CudaError, DeviceAdjacency, DeviceMatrix, Gathering, Result};
use esker_types::median;
use esker_types::random::{Key, below};
use std::time::Instant;

/// Repetitions timed together. One more, before them, is not timed.
const REPEATS: usize = 5;

/// The median rate over some rounds of device work that moves `bytes` bytes.
fn rate(gpu: &Gpu, rounds: usize, bytes: usize, mut work: impl FnMut()) -> Result<f64> {
    work();
    gpu.synchronize()?;
    let mut rates = Vec::new();
    for _ in 0..rounds.max(1) {
        let watch = Stopwatch::start(gpu);
        (0..REPEATS).for_each(|_| work());
        rates.push((REPEATS * bytes) as f64 / watch.stop()?);
    }
    Ok(median(&rates))
}

/// Bytes read and written per second by a plain copy of 1 GiB in device memory.
pub fn copy_rate(gpu: &Gpu, rounds: usize) -> Result<f64> {
    let (rows, columns) = (1 << 21, 128);
    let mut from = DeviceMatrix::new(gpu, rows, columns);
    gpu.fill(&mut from, 1.0);
    let mut to = DeviceMatrix::new(gpu, rows, columns);
    rate(gpu, rounds, 2 * rows * columns * 4, || gpu.copy_matrix(&from, &mut to))
}

/// Bytes per second of a mean of ten random rows out of 1 GiB: rows read and written, and indices.
pub fn aggregation_rate(gpu: &Gpu, rounds: usize, columns: usize) -> Result<f64> {
    let (rows, outputs) = ((1 << 30) / (columns * 4), 200_000);
    let mut input = DeviceMatrix::new(gpu, rows, columns);
    gpu.fill(&mut input, 1.0);
    let offsets: Vec<u32> = (0..=outputs as u32).map(|output| output * 10).collect();
    let nbrs = random_rows(outputs * 10, rows);
    let lists = DeviceAdjacency::new(gpu, rows, &offsets, &nbrs, 0, &[]);
    let mut to = DeviceMatrix::new(gpu, outputs, columns);
    let bytes = (nbrs.len() + outputs) * columns * 4 + (nbrs.len() + offsets.len()) * 4;
    rate(gpu, rounds, bytes, || gpu.aggregate(&lists, &input, Gathering::Mean, &mut to, None))
}

/// Bytes per second that the GPU's threads read from pinned host memory, in random rows of each of these widths.
pub fn host_read_rates(gpu: &Gpu, rounds: usize, host_bytes: usize, columns: &[usize]) -> Result<Vec<f64>> {
    let words = host_bytes / 4;
    let mut host = Pinned::new(gpu, words);
    if !host.is_pinned() {
        let found = "raise the limit of locked memory (ulimit -l)".to_string();
        return Err(CudaError::Call { what: "pinning host memory", found });
    }
    host.floats_mut().fill(1.0);
    let of = |columns: &usize| {
        // Half of it: rows that the next round reads again must not still be in the device's cache.
        let taken = random_rows(host_bytes / 2 / (columns * 4), words / columns);
        let mut to = DeviceMatrix::new(gpu, taken.len(), *columns);
        rate(gpu, rounds, taken.len() * columns * 4, || gpu.gather_from_host(&host, &taken, &mut to))
    };
    columns.iter().map(of).collect()
}

/// Bytes per second of copies from pinned host memory. Timed by the host's clock: they are on a stream of their own.
pub fn bus_rate(gpu: &Gpu, rounds: usize, bytes: usize) -> Result<f64> {
    let mut rates = Vec::new();
    for _ in 0..rounds.max(1) + 1 {
        let host = Pinned::new(gpu, bytes / 4);
        gpu.synchronize()?;
        let started = Instant::now();
        let uploaded = gpu.upload(host, 1);
        gpu.synchronize()?;
        rates.push(bytes as f64 / started.elapsed().as_secs_f64());
        drop(uploaded);
    }
    // The first one includes the allocation.
    Ok(median(&rates.split_off(1)))
}

fn random_rows(count: usize, below_rows: usize) -> Vec<u32> {
    let key = Key::new(3);
    (0..count as u64).map(|at| below(key.at(at), below_rows as u64) as u32).collect()
}
