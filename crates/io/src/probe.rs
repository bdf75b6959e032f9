//! Finds out by trying which kinds of I/O this machine supports.

use crate::AlignedBuffer;
use io_uring::{IoUring, opcode, types};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::{ffi::OsStrExt, fs::FileExt, fs::OpenOptionsExt};
use std::path::Path;

/// A readable reason why something is not available.
pub type Refusal = String;

/// Alignment of direct I/O on one file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectIo {
    /// Offsets and lengths must be multiples of this.
    pub offset_align: u32,
    /// Buffers must start at a multiple of this.
    pub memory_align: u32,
}

/// Whether io_uring works: builds a ring and reads from `file` through it.
pub fn io_uring(file: &Path) -> Result<(), Refusal> {
    let mut ring = IoUring::new(8).map_err(|error| match error.raw_os_error() {
        Some(libc::EPERM) => {
            "refused (EPERM): a seccomp profile or kernel.io_uring_disabled forbids it".to_string()
        }
        Some(libc::ENOSYS) => "this kernel has none (ENOSYS)".to_string(),
        Some(libc::ENOMEM) => "refused (ENOMEM): raise the locked-memory limit (ulimit -l)".to_string(),
        _ => format!("refused: {error}"),
    })?;
    let file = File::open(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let mut buffer = AlignedBuffer::new(4096, 4096);
    let read = opcode::Read::new(types::Fd(file.as_raw_fd()), buffer.as_mut_ptr(), 4096).build();
    // SAFETY: `buffer` and `file` outlive the request: the completion is awaited below before either is dropped.
    unsafe { ring.submission().push(&read) }.map_err(|_| "the submission queue is full".to_string())?;
    loop {
        match ring.submit_and_wait(1) {
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                // The request may still be in flight: leak the page rather than free it while the kernel may use it.
                std::mem::forget(buffer);
                return Err(format!("submission failed: {error}"));
            }
        }
    }
    match ring.completion().next().map(|entry| entry.result()) {
        Some(result) if result >= 0 => Ok(()),
        Some(result) => Err(format!("a read failed: {}", io::Error::from_raw_os_error(-result))),
        None => Err("a read never completed".to_string()),
    }
}

/// Whether `file` can be read directly, and with which alignment: the kernel's answer (`STATX_DIOALIGN`), verified by
/// a read, or the smallest alignment that a read accepts if the kernel has no answer.
pub fn direct_io(file: &Path) -> Result<DirectIo, Refusal> {
    let open = File::options().read(true).custom_flags(libc::O_DIRECT).open(file);
    let open = open.map_err(|error| format!("this file system refuses O_DIRECT: {error}"))?;
    let stated = stated_alignment(file).filter(|stated| stated.offset_align > 0);
    let candidates = match stated {
        Some(stated) => vec![stated],
        None => [512, 4096].map(|align| DirectIo { offset_align: align, memory_align: align }).to_vec(),
    };
    let mut refusal = String::new();
    for candidate in candidates {
        let align = candidate.offset_align.max(candidate.memory_align).max(512) as usize;
        let mut buffer = AlignedBuffer::new(candidate.offset_align as usize, align);
        match open.read_at(&mut buffer, 0) {
            Ok(_) => return Ok(candidate),
            Err(error) => refusal = format!("the first direct read failed: {error}"),
        }
    }
    Err(refusal)
}

fn stated_alignment(file: &Path) -> Option<DirectIo> {
    let path = CString::new(file.as_os_str().as_bytes()).ok()?;
    // SAFETY: `statx` is a plain C struct for which all zeros are a valid value.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string and `found` is writable; both live through the call.
    let code = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), 0, libc::STATX_DIOALIGN, &mut found) };
    if code != 0 || found.stx_mask & libc::STATX_DIOALIGN == 0 {
        return None;
    }
    Some(DirectIo { offset_align: found.stx_dio_offset_align, memory_align: found.stx_dio_mem_align })
}

/// How many bytes this process may lock in memory; `None` without a limit.
pub fn locked_memory_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is writable and lives through the call.
    let code = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    if code != 0 || limit.rlim_cur == libc::RLIM_INFINITY { None } else { Some(limit.rlim_cur) }
}

/// Bytes available to this user on the file system of `path`.
pub fn available_bytes(path: &Path) -> io::Result<u64> {
    let text = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `statvfs` is a plain C struct for which all zeros are a valid value.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string and `found` is writable; both live through the call.
    if unsafe { libc::statvfs(text.as_ptr(), &mut found) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(found.f_bavail * found.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_answer_for_a_real_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        std::fs::write(&path, vec![7u8; 8192]).unwrap();
        // Either answer is valid here; neither may panic or hang.
        println!("io_uring {:?}, direct {:?}", io_uring(&path), direct_io(&path));
        assert!(available_bytes(directory.path()).unwrap() > 0);
        assert!(direct_io(Path::new("/nonexistent")).is_err());
        assert!(io_uring(Path::new("/nonexistent")).is_err());
    }
}
