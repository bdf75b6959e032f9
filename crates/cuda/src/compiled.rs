//! Compiled kernels: from the cache on disk, or from the compiler, ahead of their first use if requested. Compiling all
//! files takes seconds, and a run has other things to do meanwhile.

use crate::kernels::{SOURCES, Source};
use crate::{CudaError, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};
use xxhash_rust::xxh3::xxh3_128;

/// Threads that compile ahead. A file takes some tenths of a second.
const MOST_THREADS: usize = 4;

/// The compiled files for one architecture. Whoever needs one that is being compiled waits for it.
pub(crate) struct CompiledKernels {
    files: Arc<KernelFiles>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct KernelFiles {
    architecture: String,
    cache: Option<PathBuf>,
    /// By index in [`SOURCES`].
    compiled: Vec<OnceLock<Result<Vec<u8>>>>,
    /// The next file to compile ahead.
    next: AtomicUsize,
    is_closed: AtomicBool,
}

impl CompiledKernels {
    /// Compiles nothing yet.
    pub fn new(architecture: String, cache: Option<PathBuf>) -> CompiledKernels {
        let compiled = SOURCES.iter().map(|_| OnceLock::new()).collect();
        let (next, is_closed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let files = Arc::new(KernelFiles { architecture, cache, compiled, next, is_closed });
        CompiledKernels { files, threads: Mutex::default() }
    }

    /// The CUBIN of a file.
    pub fn get(&self, source: &Source) -> Result<&[u8]> {
        let index = SOURCES.iter().position(|other| other.file == source.file);
        self.files.get(index.expect("a file of kernels")).map_err(CudaError::clone)
    }

    /// Whether all files are in the cache.
    pub fn are_cached(&self) -> bool {
        let KernelFiles { architecture, cache, .. } = &*self.files;
        let path = |source: &Source| Some(cache.as_deref()?.join(source.cache_name(architecture)));
        SOURCES.iter().all(|source| path(source).is_some_and(|path| path.is_file()))
    }

    /// Compiles all files on threads of its own. The first call counts. An error comes out when a file is needed.
    pub fn compile_ahead(&self) {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if !threads.is_empty() {
            return;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..cores.min(MOST_THREADS) {
            let files = self.files.clone();
            // Without a thread, files are compiled when they are needed.
            threads.extend(Builder::new().name("kernels".into()).spawn(move || files.compile_all()).ok());
        }
    }
}

impl Drop for CompiledKernels {
    /// Waits for files that are being compiled: the compiler must not run while the process ends.
    fn drop(&mut self) {
        self.files.is_closed.store(true, Relaxed);
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl KernelFiles {
    fn get(&self, index: usize) -> Result<&[u8], &CudaError> {
        let source = &SOURCES[index];
        let compiled =
            self.compiled[index].get_or_init(|| source.load(&self.architecture, self.cache.as_deref()));
        compiled.as_ref().map(Vec::as_slice)
    }

    fn compile_all(&self) {
        while !self.is_closed.load(Relaxed) {
            let index = self.next.fetch_add(1, Relaxed);
            if index >= SOURCES.len() {
                return;
            }
            // An error is kept for whoever needs the file.
            let _ = self.get(index);
        }
    }
}

/// What is in a file of the cache, or what `make` makes, which is then cached. A file that is damaged is made again. A
/// cache that cannot be read or written is ignored.
pub(crate) fn cached(path: Option<&Path>, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    if let Some(found) = path.and_then(read_checked) {
        return Ok(found);
    }
    let made = make()?;
    if let Some(path) = path {
        let _ = write_checked(path, &made);
    }
    Ok(made)
}

/// Reads a file whose last 16 bytes are the hash of the rest. Anything else counts as missing.
fn read_checked(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    let hash = bytes.split_off(bytes.len().checked_sub(16)?);
    (xxh3_128(&bytes).to_le_bytes()[..] == hash[..]).then_some(bytes)
}

fn write_checked(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    // Another process may write the same file: each writes its own, and the last one wins.
    let own = path.with_extension(format!("{}.tmp", std::process::id()));
    let whole = [bytes, &xxh3_128(bytes).to_le_bytes()].concat();
    std::fs::write(&own, whole).and_then(|()| std::fs::rename(&own, path)).inspect_err(|_| {
        let _ = std::fs::remove_file(&own);
    })
}

/// Directory of compiled kernels.
pub(crate) fn cache_directory() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    base.map(|base| base.join("esker").join("kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(text: &str) -> Result<Vec<u8>> {
        Ok(text.as_bytes().to_vec())
    }

    #[test]
    fn files_of_the_cache_are_used_only_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/er/file.cubin");
        assert_eq!(read_checked(&path), None);
        assert_eq!(cached(Some(&path), || made("kernel")).unwrap(), b"kernel");
        assert_eq!(cached(Some(&path), || panic!("it is cached")).unwrap(), b"kernel");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[2] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read_checked(&path), None);
        assert_eq!(cached(Some(&path), || made("again")).unwrap(), b"again");
        for length in [0, 3, 15, 18] {
            std::fs::write(&path, &bytes[..length]).unwrap();
            assert_eq!(read_checked(&path), None, "{length}");
        }
        assert_eq!(cached(Some(&path), || made("again")).unwrap(), b"again");
        let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary file stays");
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        let in_the_way = directory.path().join("file");
        std::fs::write(&in_the_way, "not a directory").unwrap();
        assert_eq!(cached(Some(&in_the_way.join("kernel")), || made("kernel")).unwrap(), b"kernel");
        assert_eq!(cached(None, || made("kernel")).unwrap(), b"kernel");
        let failed = || Err(CudaError::NoDevice { asked: 1, found: 0 });
        let path = directory.path().join("failed");
        assert!(cached(Some(&path), failed).is_err() && !path.exists());
    }

    #[test]
    fn files_compiled_ahead_are_those_compiled_on_demand() {
        if let Err(error) = crate::can_compile() {
            return println!("skipped: {error}");
        }
        let directory = tempfile::tempdir().unwrap();
        let open = || CompiledKernels::new("sm_80".into(), Some(directory.path().to_path_buf()));
        let ahead = open();
        assert!(!ahead.are_cached());
        ahead.compile_ahead();
        ahead.compile_ahead();
        let expected: Vec<Vec<u8>> =
            SOURCES.iter().map(|source| ahead.get(source).unwrap().to_vec()).collect();
        assert!(ahead.are_cached());
        drop(ahead);
        let later = open();
        assert!(
            SOURCES.iter().zip(&expected).all(|(source, expected)| later.get(source).unwrap() == expected)
        );
        // Ends although most files were never compiled.
        let elsewhere = CompiledKernels::new("sm_90".into(), None);
        elsewhere.compile_ahead();
        drop(elsewhere);
    }
}
