//! Finds the CUDA libraries. They are opened once by their full path, before anything loads them by name. If one is
//! missing, the error names it, and nothing panics.

use crate::{CudaError, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A library that training on a GPU needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// The driver's own.
    Driver,
    /// The compiler of kernels.
    Nvrtc,
    /// Matmuls.
    Cublas,
}

impl Library {
    /// All of them.
    pub const ALL: [Library; 3] = [Library::Driver, Library::Nvrtc, Library::Cublas];

    /// Its name without a version.
    pub fn name(self) -> &'static str {
        match self {
            Library::Driver => "libcuda.so",
            Library::Nvrtc => "libnvrtc.so",
            Library::Cublas => "libcublas.so",
        }
    }

    /// The remedy if it is missing.
    pub fn remedy(self) -> &'static str {
        match self {
            Library::Driver => "install NVIDIA's driver, or take --device cpu",
            Library::Nvrtc => {
                "install CUDA 12 or 13, or `pip install nvidia-cuda-nvrtc`, or set CUDA_HOME; or take --device cpu"
            }
            Library::Cublas => {
                "install CUDA 12 or 13, or `pip install nvidia-cublas`, or set CUDA_HOME; or take --device cpu"
            }
        }
    }

    /// Its path: the first file found.
    pub fn find(self) -> Option<PathBuf> {
        self.all().next()
    }

    /// All files of that name, directory by directory, the newest version first.
    fn all(self) -> impl Iterator<Item = PathBuf> {
        directories().iter().flat_map(move |directory| {
            let mut names: Vec<PathBuf> =
                children(directory).into_iter().filter(|path| self.is_at(path)).collect();
            names.sort_by_key(|path| std::cmp::Reverse(version(path)));
            names
        })
    }

    fn is_at(self, path: &Path) -> bool {
        let name = path.file_name().and_then(|name| name.to_str());
        name.and_then(|name| name.strip_prefix(self.name()))
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }

    /// Opens it for the rest of the process.
    pub(crate) fn open(self) -> Result<()> {
        static OPENED: [OnceLock<Result<()>>; 3] = [const { OnceLock::new() }; 3];
        OPENED[self as usize].get_or_init(|| self.open_first()).clone()
    }

    fn open_first(self) -> Result<()> {
        let missing = |problem| CudaError::Library { library: self.name(), problem, remedy: self.remedy() };
        let mut problem = "not found".to_string();
        for path in self.all() {
            // SAFETY: the library is NVIDIA's, whose initialisation requires nothing of the caller.
            match unsafe { libloading::Library::new(&path) } {
                Ok(opened) => {
                    // It stays open, so that cudarc finds it by its own name.
                    std::mem::forget(opened);
                    break;
                }
                // A dangling link, or a library for another machine: the next one may work.
                Err(error) => problem = error.to_string(),
            }
        }
        // SAFETY: as above; these calls only try to open it.
        let there = unsafe {
            match self {
                Library::Driver => cudarc::driver::sys::is_culib_present(),
                Library::Nvrtc => cudarc::nvrtc::sys::is_culib_present(),
                Library::Cublas => cudarc::cublas::sys::is_culib_present(),
            }
        };
        if there { Ok(()) } else { Err(missing(problem)) }
    }
}

/// The directories to search, in order: CUDA_HOME, the system, Python's nvidia packages.
fn directories() -> &'static [PathBuf] {
    static FOUND: OnceLock<Vec<PathBuf>> = OnceLock::new();
    FOUND.get_or_init(|| {
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
                let packages = children(&python.join(packages).join("nvidia"));
                directories.extend(packages.iter().map(|package| package.join("lib")));
            }
        }
        directories
    })
}

/// The numbers after `.so` in a file's name.
fn version(path: &Path) -> Vec<u32> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let numbers = name.split(".so").nth(1).unwrap_or_default();
    numbers.split('.').filter_map(|number| number.parse().ok()).collect()
}

fn children(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let of = |name: &str| version(Path::new(name));
        assert!(of("libcublas.so.12.4.5.8") > of("libcublas.so.11.11.3.6"));
        assert!(of("libcublas.so.13") > of("libcublas.so.9.2"));
        assert!(of("libcublas.so").is_empty());
    }
}
