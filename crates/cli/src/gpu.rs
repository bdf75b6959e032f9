//! What can be known of a GPU without calling its driver: the driver's own files and where the libraries lie.

use std::fs;
use std::path::{Path, PathBuf};

/// What was found.
#[derive(serde::Serialize)]
pub struct Found {
    /// Model of each GPU.
    pub gpus: Vec<String>,
    /// Driver version.
    pub driver: Option<String>,
    /// Where each library lies; `None` when it is missing.
    pub libraries: Vec<(&'static str, Option<PathBuf>)>,
}

/// The libraries training on a GPU needs.
const LIBRARIES: [&str; 3] = ["libcuda.so", "libnvrtc.so", "libcublas.so"];

pub fn look() -> Found {
    let directories = library_directories();
    let libraries =
        LIBRARIES.map(|name| (name, directories.iter().find_map(|directory| find(directory, name))));
    Found { gpus: models(), driver: driver_version(), libraries: libraries.into() }
}

fn models() -> Vec<String> {
    let mut models: Vec<String> = children(Path::new("/proc/driver/nvidia/gpus"))
        .iter()
        .filter_map(|gpu| fs::read_to_string(gpu.join("information")).ok())
        .filter_map(|text| {
            Some(text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_string())
        })
        .collect();
    models.sort();
    models
}

fn driver_version() -> Option<String> {
    let text = fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let line = text.lines().next()?;
    let version = line
        .split_whitespace()
        .find(|word| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit()));
    Some(version.unwrap_or(line).to_string())
}

/// In the order libraries are searched: CUDA_HOME, the system, Python's nvidia packages.
fn library_directories() -> Vec<PathBuf> {
    let mut directories = Vec::new();
    if let Some(home) = std::env::var_os("CUDA_HOME") {
        directories.extend(["lib64", "lib"].map(|name| Path::new(&home).join(name)));
    }
    if let Some(paths) = std::env::var_os("LD_LIBRARY_PATH") {
        directories.extend(std::env::split_paths(&paths));
    }
    let system = [
        "/usr/local/cuda/lib64",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
    ];
    directories.extend(system.map(PathBuf::from));
    let mut pythons: Vec<PathBuf> = vec!["/usr/lib".into(), "/usr/local/lib".into()];
    for home in ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os) {
        pythons.push(Path::new(&home).join("lib"));
    }
    if let Some(home) = std::env::var_os("HOME") {
        pythons.push(Path::new(&home).join(".local/lib"));
    }
    for python in pythons.iter().flat_map(|root| children(root)) {
        for packages in ["site-packages", "dist-packages"] {
            directories.extend(
                children(&python.join(packages).join("nvidia")).iter().map(|package| package.join("lib")),
            );
        }
    }
    directories
}

fn children(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// `libx.so`, `libx.so.1` or `libx.so.13` in a directory.
fn find(directory: &Path, name: &str) -> Option<PathBuf> {
    children(directory).into_iter().find(|path| {
        path.file_name().and_then(|file| file.to_str()).is_some_and(|file| {
            file.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    })
}
