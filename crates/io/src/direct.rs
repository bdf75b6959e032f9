use crate::AlignedBuffer;
use crate::sequential::drop_cached;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Offsets, lengths and addresses that are multiples of this suit every disk's direct IO.
pub const DIRECT_ALIGN: usize = 4096;

/// A file read past the page cache where the file system allows it, through it (and dropped behind) where not.
pub struct DirectFile {
    file: File,
    direct: bool,
}

impl DirectFile {
    /// Opens `path`, with O_DIRECT if that works.
    pub fn open(path: &Path) -> io::Result<DirectFile> {
        match File::options().read(true).custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => Ok(DirectFile { file, direct: true }),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Ok(DirectFile { file: File::open(path)?, direct: false })
            }
            Err(error) => Err(error),
        }
    }

    /// Length of the file.
    pub fn bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Fills `buffer` from `offset` on, up to the end of the file; returns how many bytes there were. `offset` and
    /// the buffer's length must be multiples of [`DIRECT_ALIGN`].
    pub fn read(&mut self, buffer: &mut AlignedBuffer, offset: u64, path: &Path) -> io::Result<usize> {
        assert!(buffer.len().is_multiple_of(DIRECT_ALIGN) && offset.is_multiple_of(DIRECT_ALIGN as u64));
        let mut filled = 0;
        while filled < buffer.len() {
            match self.file.read_at(&mut buffer[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => {
                    filled += count;
                    // Direct reads come short only at the end of the file, where going on would be unaligned.
                    if self.direct && !filled.is_multiple_of(DIRECT_ALIGN) {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Some file systems accept the flag and refuse the first read.
                Err(error) if self.direct && error.raw_os_error() == Some(libc::EINVAL) => {
                    *self = DirectFile { file: File::open(path)?, direct: false };
                }
                Err(error) => return Err(error),
            }
        }
        if !self.direct {
            drop_cached(&self.file, offset, offset + buffer.len() as u64);
        }
        Ok(filled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_stop_at_the_end_of_the_file_on_disk_and_in_memory() {
        for root in [std::env::temp_dir(), "/dev/shm".into()] {
            let Ok(directory) = tempfile::tempdir_in(&root) else { continue };
            let path = directory.path().join("f");
            let bytes: Vec<u8> = (0..10_000u32).map(|i| (i % 251) as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            let mut file = DirectFile::open(&path).unwrap();
            let mut buffer = AlignedBuffer::new(8192, DIRECT_ALIGN);
            assert_eq!(file.read(&mut buffer, 0, &path).unwrap(), 8192);
            assert!(buffer[..] == bytes[..8192]);
            assert_eq!(file.read(&mut buffer, 8192, &path).unwrap(), 10_000 - 8192);
            assert!(buffer[..10_000 - 8192] == bytes[8192..]);
            assert_eq!(file.read(&mut buffer, 12288, &path).unwrap(), 0);
        }
    }
}
