//! Opening files: the choice of their I/O backend, and the reason for it.

use crate::backend::{IoBackend, OpenPart, PoolBackend, UringBackend, build_ring};
use crate::backend_choice::{ChosenBackend, IoBackendKind, Options};
use crate::layout::Layout;
use crate::queue::Queue;
use crate::{DIRECT_ALIGN, DirectIo, IoError, probe, sequential};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

/// Access to files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read only.
    Read,
    /// Read and write.
    Write,
}

/// Where files are stored: on this machine, or on a simulated disk with faults.
pub trait Disk: Send + Sync {
    /// Opens files together: they share queues.
    fn open(&self, layouts: &[Layout], access: Access, options: &Options) -> Result<Files, IoError>;

    /// Creates a file of `bytes` bytes, replacing an existing one. Reserves its space on the disk if possible, so that
    /// a full disk shows here and not in the middle of writing.
    fn create(&self, layout: &Layout, bytes: u64) -> Result<(), IoError>;
}

type Connect = dyn Fn(&ChosenBackend, &Options) -> io::Result<Box<dyn IoBackend>> + Send + Sync;

/// Open files and their I/O backend. Threads share it; each makes its own [`Queue`].
pub struct Files {
    pub(crate) table: Arc<FileTable>,
    io_backend: ChosenBackend,
    options: Options,
    connect: Box<Connect>,
}

/// Metadata of open files.
pub(crate) struct FileTable {
    pub files: Vec<OpenFile>,
}

pub(crate) struct OpenFile {
    pub layout: Layout,
    /// Length when it was opened.
    pub bytes: u64,
    /// Lengths of its parts.
    part_bytes: Vec<u64>,
    /// Index of its first part among all parts.
    pub first_part: u32,
}

impl OpenFile {
    /// For a file shorter than `bytes`: the first part that is too short, and its length.
    pub(crate) fn shortest_for(&self, bytes: u64) -> (&Path, u64) {
        let parts = self.layout.parts().iter().zip(&self.part_bytes).enumerate();
        let mut short = parts.filter(|(part, (_, found))| **found < self.layout.part_bytes(*part, bytes));
        short.next().map_or((&self.layout.parts()[0], self.bytes), |(_, (path, found))| (path, *found))
    }
}

impl FileTable {
    /// From layouts and the lengths of their parts.
    pub(crate) fn new(layouts: &[Layout], part_bytes: &[u64]) -> FileTable {
        let mut first_part = 0;
        let files = layouts.iter().map(|layout| {
            let parts = layout.parts().len();
            let part_bytes = part_bytes[first_part..first_part + parts].to_vec();
            let bytes = layout.whole_bytes(&part_bytes);
            let file = OpenFile { layout: layout.clone(), bytes, part_bytes, first_part: first_part as u32 };
            first_part += parts;
            file
        });
        FileTable { files: files.collect() }
    }

    /// The path of a part.
    pub(crate) fn part_path(&self, part: u32) -> &Path {
        let file = self.files.iter().rev().find(|file| file.first_part <= part);
        let file = file.expect("parts belong to files");
        &file.layout.parts()[(part - file.first_part) as usize]
    }
}

impl Files {
    pub(crate) fn new(
        table: FileTable,
        io_backend: ChosenBackend,
        options: Options,
        connect: Box<Connect>,
    ) -> Files {
        Files { table: Arc::new(table), io_backend, options, connect }
    }

    /// Length of file `file` (in the order in which they were opened) when it was opened.
    pub fn bytes(&self, file: usize) -> u64 {
        self.table.files[file].bytes
    }

    /// The I/O backend of these files, and why no better one was chosen.
    pub fn io_backend(&self) -> &ChosenBackend {
        &self.io_backend
    }

    /// The options they were opened with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The same files with another depth, gap or sizes. The I/O backend and the block size stay the same.
    pub fn with_options(mut self, change: impl FnOnce(&mut Options)) -> Result<Files, IoError> {
        let (io_backend, block_bytes) = (self.options.io_backend, self.options.block_bytes);
        change(&mut self.options);
        (self.options.io_backend, self.options.block_bytes) = (io_backend, block_bytes);
        self.options.check()?;
        Ok(self)
    }

    /// A queue to these files for the calling thread.
    pub fn queue(&self) -> Result<Queue, IoError> {
        let mut io_backend = self.io_backend.clone();
        let backend = match (self.connect)(&io_backend, &self.options) {
            // A ring worked when the files were opened, but this one does not. The pool still works.
            Err(error) if io_backend.kind.is_uring() && self.options.io_backend.is_none() => {
                io_backend.why_not_better.push(format!("io_uring: one more ring was refused: {error}"));
                io_backend.kind = if io_backend.kind.is_direct() {
                    IoBackendKind::PoolDirect
                } else {
                    IoBackendKind::PoolBuffered
                };
                (self.connect)(&io_backend, &self.options)
            }
            connected => connected,
        };
        let backend = backend.map_err(IoError::Queue)?;
        Ok(Queue::new(backend, self.table.clone(), io_backend, self.options))
    }
}

/// The disks of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct ThisMachine;

impl Disk for ThisMachine {
    fn open(&self, layouts: &[Layout], access: Access, options: &Options) -> Result<Files, IoError> {
        options.check()?;
        let paths: Vec<&Path> =
            layouts.iter().flat_map(|layout| layout.parts()).map(|path| path.as_path()).collect();
        let mut part_bytes = Vec::new();
        for path in &paths {
            part_bytes.push(regular_file_bytes(path).map_err(IoError::file(path, "open"))?);
        }
        let io_backend = choose(&paths, options)?;
        for layout in layouts {
            check_stripes(layout, &io_backend)?;
        }
        let parts =
            paths.iter().map(|path| open_part(path, access, &io_backend)).collect::<Result<Vec<_>, _>>()?;
        let parts = Arc::new(parts);
        let connect = Box::new(
            move |io_backend: &ChosenBackend, options: &Options| -> io::Result<Box<dyn IoBackend>> {
                Ok(match io_backend.kind.is_uring() {
                    true => Box::new(UringBackend::new(parts.clone(), options.depth)?),
                    false => Box::new(PoolBackend::new(parts.clone(), options.depth)?),
                })
            },
        );
        Ok(Files::new(FileTable::new(layouts, &part_bytes), io_backend, *options, connect))
    }

    fn create(&self, layout: &Layout, bytes: u64) -> Result<(), IoError> {
        for (number, path) in layout.parts().iter().enumerate() {
            let file = create_new(path).map_err(IoError::file(path, "create"))?;
            let part_bytes = layout.part_bytes(number, bytes);
            reserve(&file, part_bytes).map_err(|source| match source.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT) => {
                    IoError::Write { path: path.clone(), offset: 0, bytes: part_bytes, source }
                }
                _ => IoError::File { path: path.clone(), verb: "create", source },
            })?;
        }
        Ok(())
    }
}

/// The length of a regular file. Opening anything else, such as a pipe, might never return.
fn regular_file_bytes(path: &Path) -> io::Result<u64> {
    let found = std::fs::metadata(path)?;
    if !found.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    Ok(found.len())
}

/// A new file that replaces any file of this name. An existing symbolic link is replaced, not followed.
fn create_new(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => File::options().write(true).create_new(true).open(path),
    }
}

/// Sets the length of `file` to `bytes` and reserves the space if the file system can.
pub fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: a system call on an open descriptor that takes numbers only.
    let code = unsafe { libc::fallocate64(file.as_raw_fd(), 0, 0, bytes as i64) };
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        _ if code == 0 => Ok(()),
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => file.set_len(bytes),
        _ => Err(error),
    }
}

fn check_stripes(layout: &Layout, io_backend: &ChosenBackend) -> Result<(), IoError> {
    let stripe_bytes = layout.place(0).contiguous_bytes;
    if layout.parts().len() > 1 && !stripe_bytes.is_multiple_of(io_backend.block_bytes) {
        let block_bytes = io_backend.block_bytes;
        return Err(IoError::StripeBlock { layout: layout.clone(), stripe_bytes, block_bytes });
    }
    Ok(())
}

/// The best I/O backend that works for all of `paths`, found by reading from them.
fn choose(paths: &[&Path], options: &Options) -> Result<ChosenBackend, IoError> {
    let first = paths.first().copied().unwrap_or(Path::new(""));
    let mut why_not_better = Vec::new();
    for kind in IoBackendKind::LADDER {
        if options.io_backend.is_some_and(|asked| asked != kind) {
            continue;
        }
        let ring = if kind.is_uring() { ring_works(first, options.depth) } else { Ok(()) };
        let direct = if kind.is_direct() { direct_for_all(paths, options) } else { Ok(ANYWHERE) };
        let why = match (ring, direct) {
            (Ok(()), Ok(direct)) => return Ok(io_backend(kind, why_not_better, direct, options)),
            (Err(why), _) => format!("io_uring: {why}"),
            (_, Err(why)) => format!("O_DIRECT: {why}"),
        };
        if options.io_backend.is_some() {
            return Err(IoError::Refused { path: first.to_path_buf(), io_backend: kind.name(), why });
        }
        if !why_not_better.contains(&why) {
            why_not_better.push(why);
        }
    }
    let asked = options.io_backend.map_or("none", IoBackendKind::name);
    Err(IoError::Refused {
        path: first.to_path_buf(),
        io_backend: asked,
        why: "this disk is real".to_string(),
    })
}

/// Whether io_uring can read a file, with a ring of this depth.
fn ring_works(path: &Path, depth: usize) -> Result<(), String> {
    probe::io_uring(path)?;
    build_ring(depth).map(|_| ()).map_err(|error| format!("a ring of depth {depth} is refused: {error}"))
}

/// Reads through the page cache need no alignment.
const ANYWHERE: DirectIo = DirectIo { offset_align: 1, memory_align: 1 };

fn io_backend(
    kind: IoBackendKind,
    why_not_better: Vec<String>,
    direct: DirectIo,
    options: &Options,
) -> ChosenBackend {
    let align_bytes = u64::from(direct.offset_align);
    ChosenBackend {
        kind,
        why_not_better,
        align_bytes,
        block_bytes: options.block_bytes.unwrap_or(align_bytes).max(align_bytes),
        memory_align: direct.memory_align as usize,
    }
}

/// The alignment that works for all of `paths`.
fn direct_for_all(paths: &[&Path], options: &Options) -> Result<DirectIo, String> {
    let mut all = ANYWHERE;
    for path in paths {
        let one = probe::direct_io(path)?;
        all.offset_align = all.offset_align.max(one.offset_align);
        all.memory_align = all.memory_align.max(one.memory_align);
    }
    if u64::from(all.offset_align) > options.max_bytes.min(DIRECT_ALIGN as u64) {
        return Err(format!("its blocks of {} bytes are larger than a page", all.offset_align));
    }
    Ok(all)
}

fn open_part(path: &Path, access: Access, io_backend: &ChosenBackend) -> Result<OpenPart, IoError> {
    let open = |direct: bool| {
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let file = File::options().read(true).write(access == Access::Write).custom_flags(flags).open(path);
        file.map_err(IoError::file(path, "open"))
    };
    let direct = io_backend.kind.is_direct().then(|| open(true)).transpose()?;
    let buffered = (direct.is_none() || access == Access::Write).then(|| open(false)).transpose()?;
    if let Some(buffered) = &buffered {
        // Plans already contain every byte they need; the kernel's read-ahead would only add to it.
        sequential::advise(buffered, 0, 0, libc::POSIX_FADV_RANDOM);
    }
    Ok(OpenPart { direct, buffered })
}
