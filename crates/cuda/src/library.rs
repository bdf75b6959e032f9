//! Where the CUDA libraries lie. They are opened by their full path, once and for all, before anything asks for them by
//! name: a machine without them is told which one is missing, and nothing panics.

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
    /// Products.
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

    /// What to do when it is missing.
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

    /// Where it lies, if anywhere: the newest version in the first directory that has one.
    pub fn find(self) -> Option<PathBuf> {
        directories().iter().find_map(|directory| {
            let names = children(directory).into_iter().filter(|path| self.is_at(path));
            names.max_by_key(|path| path.as_os_str().len())
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
        if let Some(path) = self.find() {
            // SAFETY: the library is NVIDIA's, whose start-up code asks nothing of the caller.
            let opened = unsafe { libloading::Library::new(&path) };
            // It stays open: cudarc finds it by its own name then.
            opened.map(std::mem::forget).map_err(|error| missing(error.to_string()))?;
        }
        // SAFETY: as above; these only try to open it.
        let there = unsafe {
            match self {
                Library::Driver => cudarc::driver::sys::is_culib_present(),
                Library::Nvrtc => cudarc::nvrtc::sys::is_culib_present(),
                Library::Cublas => cudarc::cublas::sys::is_culib_present(),
            }
        };
        if there { Ok(()) } else { Err(missing("not found".to_string())) }
    }
}

/// In the order libraries are searched: CUDA_HOME, the system, Python's nvidia packages.
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

fn children(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}
