//! Reads partitions before they are needed and writes those that left a buffer, on a thread of its own. A buffer is free
//! again once its partition was written, so reading waits for writing and no memory is taken beyond the buffers.

use super::files::PartitionFiles;
use crate::pipeline::{StagePanicked, caught};
use crate::{FetchError, Result};
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use esker_io::{AlignedBuffer, DIRECT_ALIGN};
use esker_types::PartitionId;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

/// What the thread is asked to do.
enum StreamRequest {
    Read(PartitionId),
    Write {
        partition: PartitionId,
        version: u64,
        buffer: AlignedBuffer,
    },
    /// A buffer whose content is of no use.
    Free(AlignedBuffer),
    /// Answer when everything before is written.
    Settle(Sender<Result<()>>),
}

/// What a stream has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StreamCounters {
    /// Bytes read, without initial rows.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Nanoseconds in which it read or wrote.
    pub busy_nanoseconds: u64,
}

#[derive(Default)]
struct StreamTotals {
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    busy_nanoseconds: AtomicU64,
}

/// A thread that reads and writes partitions.
pub struct PartitionRowStream {
    files: Arc<PartitionFiles>,
    requests: Option<Sender<StreamRequest>>,
    read: Receiver<Result<(PartitionId, AlignedBuffer)>>,
    /// Partitions that were asked for and not taken, in order.
    asked: VecDeque<PartitionId>,
    counted: Arc<StreamTotals>,
    thread: Option<JoinHandle<()>>,
}

impl PartitionRowStream {
    /// Starts a thread with this many buffers, each for a partition.
    pub fn start(files: &Arc<PartitionFiles>, buffers: usize) -> PartitionRowStream {
        let (requests, asked) = unbounded();
        let (send, read) = bounded(buffers.max(1));
        let counted = Arc::new(StreamTotals::default());
        let thread = Worker {
            files: files.clone(),
            asked,
            send: send.clone(),
            free: (0..buffers.max(1))
                .map(|_| AlignedBuffer::new(files.numbers() * 4, DIRECT_ALIGN))
                .collect(),
            reads: VecDeque::new(),
            counted: counted.clone(),
        };
        let run = move || {
            let failed = caught::<(), FetchError>("partitions", || thread.run());
            if let Err(error) = failed {
                // If nobody waits for it, nobody needs the error.
                let _ = send.send(Err(error));
            }
        };
        let thread = std::thread::Builder::new().name("partitions".into()).spawn(run);
        let thread = Some(thread.expect("the system starts a thread"));
        let files = files.clone();
        PartitionRowStream { files, requests: Some(requests), read, asked: VecDeque::new(), counted, thread }
    }

    /// Memory of this many buffers.
    pub fn buffers_bytes(buffers: u64, partition_bytes: u64) -> u64 {
        buffers.max(1) * (partition_bytes + DIRECT_ALIGN as u64)
    }

    /// Asks for partitions, which are taken in this order. None of them may be in use.
    pub fn prefetch(&mut self, partitions: impl IntoIterator<Item = PartitionId>) -> Result<()> {
        for partition in partitions {
            self.asked.push_back(partition);
            self.send(StreamRequest::Read(partition))?;
        }
        Ok(())
    }

    /// Partitions that were asked for and not taken.
    pub fn asked(&self) -> impl Iterator<Item = PartitionId> + '_ {
        self.asked.iter().copied()
    }

    /// Waits for the partition that was asked for first.
    pub fn take(&mut self) -> Result<(PartitionId, AlignedBuffer)> {
        let expected = self.asked.pop_front();
        match self.read.recv() {
            Ok(taken) => {
                let (partition, buffer) = taken?;
                assert_eq!(
                    Some(partition),
                    expected,
                    "partitions come in the order in which they were asked for"
                );
                Ok((partition, buffer))
            }
            Err(_) => Err(self.ended()),
        }
    }

    /// Writes the numbers of a partition that left as a new version.
    pub fn write(&mut self, partition: PartitionId, version: u64, buffer: AlignedBuffer) -> Result<()> {
        self.send(StreamRequest::Write { partition, version, buffer })
    }

    /// Returns a buffer whose partition need not be written.
    pub fn free(&mut self, buffer: AlignedBuffer) -> Result<()> {
        self.send(StreamRequest::Free(buffer))
    }

    /// Waits until all partitions that left are written.
    pub fn settle(&self) -> Result<()> {
        let (answer, settled) = bounded(1);
        self.send(StreamRequest::Settle(answer))?;
        settled.recv().unwrap_or_else(|_| Err(self.ended()))
    }

    /// Its counters so far.
    pub fn counters(&self) -> StreamCounters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let StreamTotals { bytes_read, bytes_written, busy_nanoseconds } = &*self.counted;
        StreamCounters {
            bytes_read: of(bytes_read),
            bytes_written: of(bytes_written),
            busy_nanoseconds: of(busy_nanoseconds),
        }
    }

    /// The files.
    pub fn files(&self) -> &Arc<PartitionFiles> {
        &self.files
    }

    fn send(&self, request: StreamRequest) -> Result<()> {
        let sent = self.requests.as_ref().map(|requests| requests.send(request).is_ok());
        if sent == Some(true) { Ok(()) } else { Err(self.ended()) }
    }

    /// Why the thread ended: its last item is its error.
    fn ended(&self) -> FetchError {
        let last = self.read.iter().find_map(|item| item.err());
        let unknown = || StagePanicked { stage: "partitions".into(), message: "without a word".into() };
        last.unwrap_or_else(|| unknown().into())
    }
}

impl Drop for PartitionRowStream {
    fn drop(&mut self) {
        self.requests = None;
        // It may wait for room for what it read.
        while self.read.recv().is_ok() {}
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread.
struct Worker {
    files: Arc<PartitionFiles>,
    asked: Receiver<StreamRequest>,
    send: Sender<Result<(PartitionId, AlignedBuffer)>>,
    free: Vec<AlignedBuffer>,
    reads: VecDeque<PartitionId>,
    counted: Arc<StreamTotals>,
}

impl Worker {
    fn run(mut self) -> Result<()> {
        loop {
            // Everything that was asked for is known before the next read: a partition that left is written before it is
            // read again.
            let request = match self.reads.is_empty() || self.free.is_empty() {
                true => self.asked.recv().ok(),
                false => match self.asked.try_recv() {
                    Ok(request) => Some(request),
                    Err(error) if error.is_empty() => {
                        self.read()?;
                        continue;
                    }
                    Err(_) => None,
                },
            };
            match request {
                None => return Ok(()),
                Some(StreamRequest::Read(partition)) => self.reads.push_back(partition),
                Some(StreamRequest::Free(buffer)) => self.free.push(buffer),
                Some(StreamRequest::Settle(answer)) => drop(answer.send(Ok(()))),
                Some(StreamRequest::Write { partition, version, buffer }) => {
                    self.write(partition, version, buffer)?
                }
            }
        }
    }

    fn read(&mut self) -> Result<()> {
        let (Some(partition), Some(mut buffer)) = (self.reads.pop_front(), self.free.pop()) else {
            return Ok(());
        };
        let started = Instant::now();
        let bytes = self.files.numbers() * 4;
        let is_stored = self.files.versions()[partition.index()].is_some();
        self.files.read(partition, bytemuck::cast_slice_mut(&mut buffer[..bytes]))?;
        self.count(started, if is_stored { bytes } else { 0 }, 0);
        // If nobody waits for it, nobody needs it.
        let _ = self.send.send(Ok((partition, buffer)));
        Ok(())
    }

    fn write(&mut self, partition: PartitionId, version: u64, buffer: AlignedBuffer) -> Result<()> {
        let (started, bytes) = (Instant::now(), self.files.numbers() * 4);
        self.files.write(partition, version, bytemuck::cast_slice(&buffer[..bytes]))?;
        self.count(started, 0, bytes);
        self.free.push(buffer);
        Ok(())
    }

    fn count(&self, started: Instant, read: usize, written: usize) {
        let StreamTotals { bytes_read, bytes_written, busy_nanoseconds } = &*self.counted;
        bytes_read.fetch_add(read as u64, Ordering::Relaxed);
        bytes_written.fetch_add(written as u64, Ordering::Relaxed);
        busy_nanoseconds.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
}
