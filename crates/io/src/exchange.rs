use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Swaps two paths on one file system atomically. File systems that cannot do this answer `Unsupported`.
pub fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    let (a, b) = (CString::new(a.as_os_str().as_bytes())?, CString::new(b.as_os_str().as_bytes())?);
    // SAFETY: both are C strings that live through the call.
    let code = unsafe {
        libc::renameat2(libc::AT_FDCWD, a.as_ptr(), libc::AT_FDCWD, b.as_ptr(), libc::RENAME_EXCHANGE)
    };
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        _ if code == 0 => Ok(()),
        Some(libc::EINVAL | libc::ENOSYS) => Err(io::ErrorKind::Unsupported.into()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_directories_change_places() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = (directory.path().join("a"), directory.path().join("b"));
        std::fs::create_dir_all(a.join("of a")).unwrap();
        std::fs::create_dir_all(b.join("of b")).unwrap();
        match exchange(&a, &b) {
            Ok(()) => assert!(a.join("of b").exists() && b.join("of a").exists()),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::Unsupported),
        }
        assert!(exchange(&a, &directory.path().join("c")).is_err());
    }
}
