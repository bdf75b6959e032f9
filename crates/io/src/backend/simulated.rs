//! A simulated disk in memory with configurable faults, reproducible from a random seed: latency and reordering on a
//! clock of its own, short transfers, EAGAIN and EINTR, I/O errors, a disk that fills up, writes torn by a crash.

use super::{Completion, IoBackend, IoRequest};
use crate::IoError;
use crate::backend_choice::{ChosenBackend, IoBackendKind, Options};
use crate::disk::{Access, Disk, FileTable, Files};
use crate::layout::Layout;
use esker_types::random::{Key, below, unit};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const SECTOR_BYTES: usize = 512;

/// The faults of the disk. Shares are fractions of all requests, between 0 and 1.
#[derive(Debug, Clone, Copy)]
pub struct Faults {
    /// The random seed that determines all faults.
    pub seed: u64,
    /// Requests that move fewer bytes than requested.
    pub short: f64,
    /// Requests that come back with EAGAIN or EINTR.
    pub put_off: f64,
    /// Reads that fail with EIO.
    pub read_error: f64,
    /// Writes that fail with EIO after some sectors.
    pub write_error: f64,
    /// Waits that fail, as if the queue itself were broken.
    pub wait_error: f64,
    /// Syncs that fail with EIO.
    pub sync_error: f64,
    /// Whether memory can be registered.
    pub registers: bool,
    /// Capacity for all files together. Writes beyond it fail with ENOSPC.
    pub room_bytes: u64,
    /// Whether creating a file reserves its space. If not, a full disk shows only on writes.
    pub reserves: bool,
    /// Longest latency, in units of the simulated clock. With 1, requests complete in order.
    pub latency: u64,
    /// Required alignment of offset, length and memory of direct requests: 512 or 4096. Unaligned requests fail with
    /// EINVAL.
    pub align_bytes: u64,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults {
            seed: 0,
            short: 0.0,
            put_off: 0.0,
            read_error: 0.0,
            write_error: 0.0,
            wait_error: 0.0,
            sync_error: 0.0,
            registers: true,
            room_bytes: u64::MAX,
            reserves: true,
            latency: 100,
            align_bytes: SECTOR_BYTES as u64,
        }
    }
}

/// A simulated disk. Clones are the same disk.
#[derive(Clone)]
pub struct SimulatedDisk {
    faults: Faults,
    contents: Arc<Mutex<Contents>>,
}

#[derive(Default)]
struct Contents {
    files: BTreeMap<PathBuf, SimulatedFile>,
    /// Devices made so far. Each has its own random numbers.
    devices: u64,
}

#[derive(Default)]
struct SimulatedFile {
    /// The bytes that readers see.
    now: Vec<u8>,
    /// The bytes at the last sync.
    safe: Vec<u8>,
    /// Writes since the last sync, in order.
    unsafe_writes: Vec<(usize, Vec<u8>)>,
    /// Disk space it takes.
    taken_bytes: u64,
    /// Sectors that cannot be read.
    bad: Vec<Range<u64>>,
}

impl SimulatedDisk {
    /// An empty disk.
    pub fn new(faults: Faults) -> SimulatedDisk {
        SimulatedDisk { faults, contents: Arc::default() }
    }

    /// Puts a file on the disk, complete and synced.
    pub fn put(&self, path: &Path, bytes: Vec<u8>) {
        let taken_bytes = bytes.len() as u64;
        let file = SimulatedFile { safe: bytes.clone(), now: bytes, taken_bytes, ..SimulatedFile::default() };
        self.lock().files.insert(path.to_path_buf(), file);
    }

    /// The bytes that a reader would see in a file.
    pub fn get(&self, path: &Path) -> Option<Vec<u8>> {
        self.lock().files.get(path).map(|file| file.now.clone())
    }

    /// Makes bytes of a file unreadable: reads that touch them fail with EIO.
    pub fn damage(&self, path: &Path, range: Range<u64>) {
        if let Some(file) = self.lock().files.get_mut(path) {
            file.bad.push(range);
        }
    }

    /// The disk as the next start may find it if power fails now. Synced bytes are there. Each sector written since
    /// the last sync has either its new or its old bytes, chosen by `seed`.
    pub fn crash(&self, seed: u64) -> SimulatedDisk {
        let key = Key::new(self.faults.seed).with(seed);
        let after = SimulatedDisk::new(self.faults);
        let mut draws = 0;
        for (path, file) in &self.lock().files {
            let mut bytes = file.safe.clone();
            for (offset, written) in &file.unsafe_writes {
                for sector in (offset / SECTOR_BYTES..(offset + written.len()).div_ceil(SECTOR_BYTES))
                    .map(|s| s * SECTOR_BYTES)
                {
                    draws += 1;
                    if below(key.at(draws), 2) == 0 {
                        continue;
                    }
                    let from = sector.max(*offset);
                    let to = (sector + SECTOR_BYTES).min(offset + written.len());
                    bytes.resize(bytes.len().max(to), 0);
                    bytes[from..to].copy_from_slice(&written[from - offset..to - offset]);
                }
            }
            after.put(path, bytes);
        }
        after
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        // A test that panicked elsewhere must not be masked by a poisoned lock.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Disk for SimulatedDisk {
    fn open(&self, layouts: &[Layout], _access: Access, options: &Options) -> Result<Files, IoError> {
        options.check()?;
        let paths: Vec<PathBuf> = layouts.iter().flat_map(|layout| layout.parts().to_vec()).collect();
        let mut part_bytes = Vec::new();
        for path in &paths {
            let bytes = self.lock().files.get(path).map(|file| file.now.len() as u64);
            let missing = || IoError::file(path, "open")(io::ErrorKind::NotFound.into());
            part_bytes.push(bytes.ok_or_else(missing)?);
        }
        let align_bytes = self.faults.align_bytes;
        let io_backend = ChosenBackend {
            kind: IoBackendKind::Simulated,
            why_not_better: Vec::new(),
            align_bytes,
            block_bytes: options.block_bytes.unwrap_or(align_bytes).max(align_bytes),
            memory_align: align_bytes as usize,
        };
        let disk = self.clone();
        let connect =
            Box::new(move |_: &ChosenBackend, options: &Options| -> io::Result<Box<dyn IoBackend>> {
                Ok(Box::new(SimulatedBackend::new(&disk, paths.clone(), options.depth)))
            });
        Ok(Files::new(FileTable::new(layouts, &part_bytes), io_backend, *options, connect))
    }

    fn create(&self, layout: &Layout, bytes: u64) -> Result<(), IoError> {
        for (number, path) in layout.parts().iter().enumerate() {
            let part_bytes = layout.part_bytes(number, bytes);
            let mut contents = self.lock();
            contents.files.remove(path);
            let taken_bytes = if self.faults.reserves { part_bytes } else { 0 };
            if contents.taken_bytes() + taken_bytes > self.faults.room_bytes {
                let source = io::Error::from_raw_os_error(libc::ENOSPC);
                return Err(IoError::Write { path: path.clone(), offset: 0, bytes: part_bytes, source });
            }
            let zeros = vec![0; part_bytes as usize];
            let file =
                SimulatedFile { now: zeros.clone(), safe: zeros, taken_bytes, ..SimulatedFile::default() };
            contents.files.insert(path.clone(), file);
        }
        Ok(())
    }
}

impl Contents {
    fn taken_bytes(&self) -> u64 {
        self.files.values().map(|file| file.taken_bytes).sum()
    }
}

struct SimulatedBackend {
    disk: SimulatedDisk,
    paths: Vec<PathBuf>,
    depth: usize,
    key: Key,
    draws: u64,
    clock: u64,
    /// When each request completes, and whether its cancellation was requested.
    pending: Vec<(u64, IoRequest, bool)>,
}

impl SimulatedBackend {
    fn new(disk: &SimulatedDisk, paths: Vec<PathBuf>, depth: usize) -> SimulatedBackend {
        let mut contents = disk.lock();
        contents.devices += 1;
        let key = Key::new(disk.faults.seed).with(contents.devices);
        drop(contents);
        let disk = disk.clone();
        SimulatedBackend { disk, paths, depth, key, draws: 0, clock: 0, pending: Vec::new() }
    }

    fn draw(&mut self) -> u64 {
        self.draws += 1;
        self.key.at(self.draws)
    }

    fn happens(&mut self, share: f64) -> bool {
        unit(self.draw()) < share
    }

    fn carry_out(&mut self, request: &IoRequest, given_up: bool) -> i32 {
        let faults = self.disk.faults;
        if given_up && self.happens(0.5) {
            return -libc::ECANCELED;
        }
        let align = if request.buffered { 1 } else { faults.align_bytes };
        let odd = [request.offset, u64::from(request.bytes), request.memory as u64]
            .iter()
            .any(|number| !number.is_multiple_of(align));
        if odd {
            return -libc::EINVAL;
        }
        if self.happens(faults.put_off) {
            return if self.happens(0.5) { -libc::EAGAIN } else { -libc::EINTR };
        }
        let mut bytes = request.bytes as usize;
        if bytes > 1 && self.happens(faults.short) {
            // At least one byte. A real disk stops at a sector boundary, except at the end of the file.
            bytes = 1 + below(self.draw(), bytes as u64 - 1) as usize;
        }
        if request.write { self.write(request, bytes) } else { self.read(request, bytes) }
    }

    fn read(&mut self, request: &IoRequest, bytes: usize) -> i32 {
        if self.happens(self.disk.faults.read_error) {
            return -libc::EIO;
        }
        let contents = self.disk.lock();
        let Some(file) = contents.files.get(&self.paths[request.part as usize]) else { return -libc::ENOENT };
        let start = (request.offset as usize).min(file.now.len());
        let end = (start + bytes).min(file.now.len());
        let touched = start as u64..end as u64;
        if file.bad.iter().any(|bad| bad.start < touched.end && touched.start < bad.end) {
            return -libc::EIO;
        }
        // SAFETY: the pusher keeps the request's memory valid until its completion, which has not been returned yet.
        unsafe { std::ptr::copy_nonoverlapping(file.now[start..].as_ptr(), request.memory, end - start) };
        (end - start) as i32
    }

    fn write(&mut self, request: &IoRequest, bytes: usize) -> i32 {
        let torn = self.happens(self.disk.faults.write_error);
        let bytes = if torn { bytes / 2 / SECTOR_BYTES * SECTOR_BYTES } else { bytes };
        let mut written = vec![0u8; bytes];
        // SAFETY: as in `read`; the memory is only read.
        unsafe { std::ptr::copy_nonoverlapping(request.memory, written.as_mut_ptr(), bytes) };
        let room_bytes = self.disk.faults.room_bytes;
        let mut contents = self.disk.lock();
        let taken_bytes = contents.taken_bytes();
        let Some(file) = contents.files.get_mut(&self.paths[request.part as usize]) else {
            return -libc::ENOENT;
        };
        let start = request.offset as usize;
        // Previously written ranges are not tracked: every write takes space until the file has its full length.
        let growth = (bytes as u64).min(file.now.len() as u64 - file.taken_bytes);
        if taken_bytes + growth > room_bytes {
            return -libc::ENOSPC;
        }
        file.taken_bytes += growth;
        file.now[start..start + bytes].copy_from_slice(&written);
        file.unsafe_writes.push((start, written));
        if torn { -libc::EIO } else { bytes as i32 }
    }
}

impl IoBackend for SimulatedBackend {
    unsafe fn push(&mut self, request: IoRequest) {
        assert!(
            self.pending.len() < self.depth,
            "more requests than the depth that the backend was made for"
        );
        let latency = below(self.draw(), self.disk.faults.latency.max(1));
        let due = if self.disk.faults.latency <= 1 { self.draws } else { self.clock + latency };
        self.pending.push((due, request, false));
    }

    fn wait(&mut self, at_least: usize, done: &mut Vec<Completion>) -> io::Result<()> {
        assert!(at_least <= self.pending.len(), "this wait would never end");
        if self.happens(self.disk.faults.wait_error) {
            return Err(io::Error::other("simulated: the queue is broken"));
        }
        self.pending.sort_by_key(|(due, ..)| *due);
        if let Some((due, ..)) = at_least.checked_sub(1).and_then(|last| self.pending.get(last)) {
            self.clock = self.clock.max(*due);
        }
        while self.pending.first().is_some_and(|(due, ..)| *due <= self.clock) {
            let (_, request, given_up) = self.pending.remove(0);
            let result = self.carry_out(&request, given_up);
            done.push(Completion { tag: request.tag, result });
        }
        Ok(())
    }

    fn cancel(&mut self) {
        self.pending.iter_mut().for_each(|(.., given_up)| *given_up = true);
    }

    unsafe fn register(&mut self, _memory: *mut u8, _bytes: usize) -> bool {
        self.disk.faults.registers
    }

    fn sync(&mut self) -> Result<(), (u32, io::Error)> {
        if self.happens(self.disk.faults.sync_error) {
            return Err((0, io::Error::from_raw_os_error(libc::EIO)));
        }
        let mut contents = self.disk.lock();
        for path in &self.paths {
            if let Some(file) = contents.files.get_mut(path) {
                file.safe = file.now.clone();
                file.unsafe_writes.clear();
            }
        }
        Ok(())
    }
}

impl Drop for SimulatedBackend {
    fn drop(&mut self) {
        // Like the kernel, it still writes to memory until the last request is complete.
        for (_, request, given_up) in std::mem::take(&mut self.pending) {
            self.carry_out(&request, given_up);
        }
    }
}
