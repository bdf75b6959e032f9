//! What there is of GPUs, for `esker doctor`: the driver's own files, where the libraries lie, and what an opened GPU can do.

use esker_cuda::{Gpu, Library, Precision, measure};
use std::fs;
use std::path::{Path, PathBuf};

/// What was found.
#[derive(serde::Serialize)]
pub struct GpuFindings {
    /// Model of each GPU.
    pub gpus: Vec<String>,
    /// Driver version.
    pub driver: Option<String>,
    /// Where each library lies; `None` when it is missing.
    pub libraries: Vec<(&'static str, Option<PathBuf>)>,
    /// The first GPU, opened.
    pub first: Option<OpenedGpu>,
    /// Why it could not be opened.
    pub refusal: Option<String>,
}

/// A GPU that training could use.
#[derive(serde::Serialize)]
pub struct OpenedGpu {
    /// Its model.
    pub name: String,
    /// Compute capability.
    pub architecture: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// What of it is free.
    pub free_bytes: u64,
    /// The CUDA version that the driver serves: 13000 for 13.0.
    pub cuda: i32,
    /// Copies from pinned host memory.
    pub bus_bytes_per_second: f64,
    /// Pinned host memory read by the GPU's own threads, in rows of 512, 1024 and 4096 bytes.
    pub host_reads_bytes_per_second: Vec<f64>,
}

/// Host memory that is pinned to measure the bus: half of it is more than caches of GPUs hold.
const PROBE_BYTES: usize = 256 << 20;

pub fn look() -> GpuFindings {
    let (first, refusal) = match open() {
        Ok(opened) => (Some(opened), None),
        Err(error) => (None, Some(error.to_string())),
    };
    let libraries = Library::ALL.map(|library| (library.name(), library.find())).into();
    GpuFindings { gpus: models(), driver: driver_version(), libraries, first, refusal }
}

fn open() -> Result<OpenedGpu, esker_cuda::CudaError> {
    let gpu = Gpu::open(0, None, Precision::F32)?;
    let bus_bytes_per_second = measure::bus_rate(&gpu, 3, PROBE_BYTES)?;
    let host_reads_bytes_per_second = measure::host_read_rates(&gpu, 3, PROBE_BYTES, &[128, 256, 1024])?;
    let info = gpu.info();
    Ok(OpenedGpu {
        name: info.name.clone(),
        architecture: info.architecture(),
        memory_bytes: info.memory_bytes,
        free_bytes: info.free_bytes,
        cuda: info.driver_version,
        bus_bytes_per_second,
        host_reads_bytes_per_second,
    })
}

fn models() -> Vec<String> {
    let entries = fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let mut models: Vec<String> = entries
        .filter_map(|gpu| fs::read_to_string(gpu.path().join("information")).ok())
        .filter_map(|text| {
            Some(text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_string())
        })
        .collect();
    models.sort();
    models
}

fn driver_version() -> Option<String> {
    let text = fs::read_to_string(Path::new("/proc/driver/nvidia/version")).ok()?;
    let line = text.lines().next()?;
    let version = line
        .split_whitespace()
        .find(|word| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit()));
    Some(version.unwrap_or(line).to_string())
}
