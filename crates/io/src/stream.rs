use crate::disk::Files;
use crate::plan::Piece;
use crate::queue::Queue;
use crate::{AlignedBuffer, ChosenBackend, DIRECT_ALIGN, IoCounters, IoError};
use std::collections::VecDeque;
use std::io::{self, Read};
use std::ops::Range;

/// A range of a file from front to back, read ahead in large chunks. It does not fill the page cache.
pub struct Stream {
    queue: Queue,
    file: usize,
    /// Start of the next chunk to request.
    ahead: u64,
    range: Range<u64>,
    chunk_bytes: u64,
    /// Ranges of the chunks being read.
    coming: VecDeque<Range<u64>>,
    spare: Vec<(AlignedBuffer, Vec<Piece>)>,
    /// The chunk returned last: its buffer, its pieces and its range.
    current: Option<(AlignedBuffer, Vec<Piece>, Range<u64>)>,
    /// The position of [`Read`].
    position: u64,
    /// After a chunk has failed, there are no more chunks.
    failed: bool,
}

impl Stream {
    /// Streams `range` of `file` with `chunks` chunks of `chunk_bytes` (whole pages) in memory: the reader has one,
    /// the others are being read. Chunks of 2 MiB or more are on large pages, which a disk reads in one piece.
    pub fn open(
        files: &Files,
        file: usize,
        range: Range<u64>,
        chunk_bytes: u64,
        chunks: usize,
    ) -> Result<Stream, IoError> {
        assert!(chunk_bytes > 0 && chunk_bytes.is_multiple_of(DIRECT_ALIGN as u64), "chunks are whole pages");
        let mut queue = files.queue()?;
        let buffers = (0..chunks.max(2)).map(|_| AlignedBuffer::new(chunk_bytes as usize, DIRECT_ALIGN));
        let spare: Vec<(AlignedBuffer, Vec<Piece>)> = buffers.map(|buffer| (buffer, Vec::new())).collect();
        for (buffer, _) in &spare {
            queue.register(buffer);
        }
        let end = range.end.max(range.start);
        let mut stream = Stream {
            queue,
            file,
            // Chunks start on page boundaries, so that they are read without a copy.
            ahead: range.start / DIRECT_ALIGN as u64 * DIRECT_ALIGN as u64,
            position: range.start,
            range: range.start..end,
            chunk_bytes,
            coming: VecDeque::new(),
            spare,
            current: None,
            failed: false,
        };
        stream.read_ahead();
        Ok(stream)
    }

    /// The next chunk, in order; `None` at the end of the range.
    pub fn next_chunk(&mut self) -> Result<Option<&[u8]>, IoError> {
        self.recycle();
        if self.failed {
            return Err(IoError::Cancelled);
        }
        let (Some(finished), Some(range)) = (self.queue.wait(), self.coming.pop_front()) else {
            return Ok(None);
        };
        // A chunk is missing: no later one may be taken for it.
        self.failed = finished.result.is_err();
        finished.result?;
        self.read_ahead();
        let chunk_start = range.start;
        let requested = range.start.max(self.range.start)..range.end;
        let (buffer, ..) = self.current.insert((finished.buffer, finished.pieces, range));
        self.position = requested.end;
        Ok(Some(&buffer[(requested.start - chunk_start) as usize..(requested.end - chunk_start) as usize]))
    }

    /// Its counters so far.
    pub fn counters(&self) -> IoCounters {
        self.queue.counters()
    }

    /// Its I/O backend.
    pub fn io_backend(&self) -> &ChosenBackend {
        self.queue.io_backend()
    }

    fn recycle(&mut self) {
        if let Some((buffer, pieces, range)) = self.current.take() {
            self.queue.forget(self.file, range.start, range.end - range.start);
            self.spare.push((buffer, pieces));
        }
    }

    fn read_ahead(&mut self) {
        while self.ahead < self.range.end
            && let Some((buffer, mut pieces)) = self.spare.pop()
        {
            let end = self.range.end.min(self.ahead + self.chunk_bytes);
            pieces.clear();
            pieces.push(Piece { offset: self.ahead, bytes: end - self.ahead, at: 0 });
            self.queue.submit(self.file, pieces, buffer);
            self.coming.push_back(self.ahead..end);
            self.ahead = end;
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.recycle();
        // A direct backend has no cached pages to drop, and the queue itself waits for requests in flight.
        if self.queue.io_backend().kind.is_direct() {
            return;
        }
        for range in std::mem::take(&mut self.coming) {
            self.queue.wait();
            self.queue.forget(self.file, range.start, range.end - range.start);
        }
    }
}

impl Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        if self.current.as_ref().is_none_or(|(_, _, range)| self.position >= range.end) {
            let start = self.position;
            if self.next_chunk()?.is_none() {
                return Ok(0);
            }
            self.position = start;
        }
        let Some((buffer, _, range)) = &self.current else { return Ok(0) };
        let from = (self.position - range.start) as usize;
        let count = out.len().min((range.end - self.position) as usize);
        out[..count].copy_from_slice(&buffer[from..from + count]);
        self.position += count as u64;
        Ok(count)
    }
}
