//! Executes jobs of many pieces and keeps the device busy.
//!
//! A queue belongs to one thread. Jobs start in order and finish in order. Transfers of the next job start while the
//! last ones of the previous job are in flight, so the device never runs idle between jobs. Jobs wait for each other
//! only if one of them writes and their ranges of the file overlap: then the job submitted first runs first. The queue
//! owns the memory that the kernel may write to, or borrows it for a call that does not return before the transfers
//! are complete. No memory is released earlier.

use crate::aligned::Allocation;
use crate::backend::{BrokenBackend, Completion, IoBackend, IoRequest};
use crate::disk::FileTable;
use crate::plan::{Piece, Rules, TransferPlan};
use crate::staging::StagingMemory;
use crate::{AlignedBuffer, ChosenBackend, DIRECT_ALIGN, IoCounters, IoError, Options};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A transfer that the kernel keeps deferring, or that makes no progress, fails after this many tries.
const MOST_TRIES: u32 = 100;
/// After this many tries, a pause precedes each further one: memory may be short for a moment.
const HASTY_TRIES: u32 = 30;
const PAUSE: Duration = Duration::from_millis(2);

/// Transfers that are planned at a time.
const PLANNED_TRANSFERS: usize = 64;

/// Reads and writes of open files, many in flight at once. Made by [`crate::Files::queue`].
pub struct Queue {
    // Declared first, so dropped first: the backend waits for requests in flight, and then memory may be freed.
    backend: Box<dyn IoBackend>,
    table: Arc<FileTable>,
    io_backend: ChosenBackend,
    options: Options,
    jobs: VecDeque<QueueJob>,
    /// Number of the oldest job.
    first_job: u64,
    /// Number of the job whose transfers are being started.
    issuing: u64,
    slots: Vec<TransferInFlight>,
    free: Vec<u32>,
    in_flight: usize,
    in_flight_bytes: u64,
    staging: StagingMemory,
    /// Memory registered with the backend, kept until the backend is dropped.
    registered: Vec<Arc<Allocation>>,
    completions: Vec<Completion>,
    spare_plans: Vec<TransferPlan>,
    stop: Stop,
    broken: bool,
    counters: IoCounters,
}

/// Stops a queue from another thread.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Jobs that are not finished, and all jobs submitted later, end with [`IoError::Cancelled`].
    pub fn stop(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A finished job. It returns its buffer and pieces for reuse.
pub struct Finished {
    /// The job's number, as returned by [`Queue::submit`].
    pub job: u64,
    /// The buffer. After an error its bytes are undefined.
    pub buffer: AlignedBuffer,
    /// The pieces.
    pub pieces: Vec<Piece>,
    /// Whether all pieces arrived.
    pub result: Result<(), IoError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TransferDirection {
    Read,
    Write,
}

struct QueueJob {
    file: usize,
    direction: TransferDirection,
    pieces: Vec<Piece>,
    plan: TransferPlan,
    /// Transfers started.
    issued: usize,
    /// Transfers in flight.
    running: usize,
    /// The range of the file from the first to the last byte of the job.
    span: Range<u64>,
    memory: *mut u8,
    /// The buffer, if the queue owns the memory.
    owned: Option<AlignedBuffer>,
    failure: Option<IoError>,
}

impl QueueJob {
    /// Whether `later` must wait until this job is finished.
    fn holds_up(&self, later: &QueueJob) -> bool {
        let writes =
            self.direction == TransferDirection::Write || later.direction == TransferDirection::Write;
        let meet = self.span.start < later.span.end && later.span.start < self.span.end;
        writes && meet && self.file == later.file && !self.is_finished()
    }

    fn is_finished(&self) -> bool {
        self.running == 0 && (self.failure.is_some() || self.is_issued())
    }

    /// Whether every transfer has been started.
    fn is_issued(&self) -> bool {
        self.issued == self.plan.transfers.len() && self.plan.is_complete()
    }
}

/// The consequence of a completion.
enum CompletionOutcome {
    Done,
    Again,
    /// `None`: the file ended, or a write made no progress.
    Failed(Option<io::Error>),
}

/// A transfer in flight.
struct TransferInFlight {
    job: u64,
    transfer: usize,
    request: IoRequest,
    /// Bytes moved by earlier requests of this transfer.
    done: u32,
    tries: u32,
    /// Its piece of staging memory; `None`: the transfer uses the job's buffer directly.
    ticket: Option<u64>,
    started: Instant,
}

impl Queue {
    pub(crate) fn new(
        mut backend: Box<dyn IoBackend>,
        table: Arc<FileTable>,
        io_backend: ChosenBackend,
        options: Options,
    ) -> Queue {
        let align = (io_backend.align_bytes as usize).max(io_backend.memory_align).max(512);
        let staging = StagingMemory::new((options.staging_bytes as usize).next_multiple_of(align), align);
        let memory = staging.allocation();
        // SAFETY: the staging memory is dropped after the backend.
        unsafe { backend.register(memory.start(), memory.bytes()) };
        Queue {
            backend,
            table,
            io_backend,
            options,
            jobs: VecDeque::new(),
            first_job: 0,
            issuing: 0,
            slots: Vec::with_capacity(options.depth),
            free: Vec::new(),
            in_flight: 0,
            in_flight_bytes: 0,
            staging,
            registered: Vec::new(),
            completions: Vec::with_capacity(options.depth),
            spare_plans: Vec::new(),
            stop: Stop::default(),
            broken: false,
            counters: IoCounters::new(),
        }
    }

    /// The I/O backend of this queue.
    pub fn io_backend(&self) -> &ChosenBackend {
        &self.io_backend
    }

    /// Its counters so far.
    pub fn counters(&self) -> IoCounters {
        let mut counters = self.counters.clone();
        counters.idle(Instant::now());
        counters
    }

    /// A handle with which another thread can stop it.
    pub fn stopper(&self) -> Stop {
        self.stop.clone()
    }

    /// Registers a buffer that many jobs will use with the kernel: reads into it then cost less. Returns whether the
    /// kernel accepted it. If not (a limit on locked memory, no ring), everything works as before. The memory stays
    /// allocated as long as the queue lives.
    pub fn register(&mut self, buffer: &AlignedBuffer) -> bool {
        let memory = buffer.allocation();
        if self.registered.iter().any(|known| Arc::ptr_eq(known, memory)) {
            return true;
        }
        // Kept even after a refusal: part of it may have been registered before the table was full.
        self.registered.push(memory.clone());
        // SAFETY: the queue keeps the allocation alive until after the backend is dropped.
        unsafe { self.backend.register(memory.start(), memory.bytes()) }
    }

    /// Jobs submitted and not yet returned by [`Queue::wait`].
    pub fn pending(&self) -> usize {
        self.jobs.len()
    }

    /// Starts reading `pieces` of `file` into `buffer`. Returns at once with the job's number; [`Queue::wait`] returns
    /// the buffer. Pieces must be within the buffer.
    pub fn submit(&mut self, file: usize, pieces: Vec<Piece>, buffer: AlignedBuffer) -> u64 {
        self.submit_owned(file, TransferDirection::Read, pieces, buffer)
    }

    /// Starts writing `pieces` of `file` from `buffer`. Pieces of one job must not overlap in the file.
    pub fn submit_write(&mut self, file: usize, pieces: Vec<Piece>, buffer: AlignedBuffer) -> u64 {
        self.submit_owned(file, TransferDirection::Write, pieces, buffer)
    }

    /// Waits for the oldest job. `None`: there is no job.
    pub fn wait(&mut self) -> Option<Finished> {
        if self.jobs.is_empty() {
            return None;
        }
        self.run(self.first_job);
        self.take_first()
    }

    /// The oldest job, if it is finished. Starts further transfers and does not wait.
    pub fn try_wait(&mut self) -> Option<Finished> {
        self.heed_stop();
        self.top_up();
        self.jobs.front().is_some_and(QueueJob::is_finished).then(|| self.take_first()).flatten()
    }

    fn take_first(&mut self) -> Option<Finished> {
        let mut job = self.jobs.pop_front()?;
        let number = self.first_job;
        self.first_job += 1;
        self.issuing = self.issuing.max(self.first_job);
        let buffer = job.owned.take().expect("a borrowed job does not outlive its call");
        let result = self.close(&mut job);
        self.spare_plans.push(job.plan);
        Some(Finished { job: number, buffer, pieces: job.pieces, result })
    }

    /// Reads `pieces` of `file` into `out` and returns when all have been read. Earlier jobs continue meanwhile.
    pub fn read(&mut self, file: usize, pieces: &[Piece], out: &mut [u8]) -> Result<(), IoError> {
        self.borrowed(file, TransferDirection::Read, pieces, out.as_mut_ptr(), out.len())
    }

    /// Writes `pieces` of `file` from `bytes` and returns when the system has them; [`Queue::sync`] makes them
    /// durable.
    pub fn write(&mut self, file: usize, pieces: &[Piece], bytes: &[u8]) -> Result<(), IoError> {
        // The device only reads from the memory of a write.
        self.borrowed(file, TransferDirection::Write, pieces, bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// Finishes all submitted jobs and makes everything written durable.
    pub fn sync(&mut self) -> Result<(), IoError> {
        if let Some(last) = self.jobs.len().checked_sub(1) {
            self.run(self.first_job + last as u64);
        }
        self.backend.sync().map_err(|(part, source)| IoError::File {
            path: self.table.part_path(part).to_path_buf(),
            verb: "sync",
            source,
        })
    }

    /// Drops bytes that were read through the page cache from the cache. Does nothing on direct backends.
    pub fn forget(&mut self, file: usize, offset: u64, bytes: u64) {
        if self.io_backend.kind.is_direct() {
            return;
        }
        let file = &self.table.files[file];
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let place = file.layout.place(at);
            let now = place.contiguous_bytes.min(end - at);
            self.backend.forget(file.first_part + place.part as u32, place.offset, now);
            at += now;
        }
    }

    fn submit_owned(
        &mut self,
        file: usize,
        direction: TransferDirection,
        pieces: Vec<Piece>,
        buffer: AlignedBuffer,
    ) -> u64 {
        let memory = buffer.allocation();
        let (start, bytes) = (memory.start(), memory.bytes());
        let number = self.begin(file, direction, pieces, start, bytes, Some(buffer));
        self.top_up();
        number
    }

    /// Starts the transfers that can start without waiting.
    fn top_up(&mut self) {
        if self.in_flight > 0 {
            self.take_completions(0);
        }
        self.fill();
        if self.in_flight > 0 {
            self.take_completions(0);
        }
    }

    fn borrowed(
        &mut self,
        file: usize,
        direction: TransferDirection,
        pieces: &[Piece],
        memory: *mut u8,
        bytes: usize,
    ) -> Result<(), IoError> {
        let number = self.begin(file, direction, pieces.to_vec(), memory, bytes, None);
        // If this panics, the caller's memory must not be freed while the kernel uses it.
        let guard = Drain(self);
        guard.0.run(number);
        let queue = guard.defuse();
        let mut job = queue.jobs.pop_back().expect("the job begun last is the last");
        queue.issuing = queue.issuing.min(number);
        let result = queue.close(&mut job);
        queue.spare_plans.push(job.plan);
        result
    }

    /// A finished job's result. Updates the counters.
    fn close(&mut self, job: &mut QueueJob) -> Result<(), IoError> {
        if let Some(failure) = job.failure.take() {
            return Err(failure);
        }
        if job.direction == TransferDirection::Read {
            self.counters.useful_bytes += job.pieces.iter().map(|piece| piece.bytes).sum::<u64>();
        }
        Ok(())
    }

    /// Plans a job and queues it.
    fn begin(
        &mut self,
        file: usize,
        direction: TransferDirection,
        pieces: Vec<Piece>,
        memory: *mut u8,
        memory_bytes: usize,
        owned: Option<AlignedBuffer>,
    ) -> u64 {
        for piece in &pieces {
            let end = piece.at.checked_add(piece.bytes);
            assert!(end.is_some_and(|end| end <= memory_bytes as u64), "{piece:?}: beyond the buffer");
        }
        // Planning takes a moment: give the device work meanwhile.
        self.top_up();
        let mut plan = self.spare_plans.pop().unwrap_or_default();
        plan.clear();
        let failure = self.check(file, direction, &pieces).err();
        let start = pieces.iter().map(|piece| piece.offset).min().unwrap_or(0);
        let end = pieces.iter().map(|piece| piece.offset.saturating_add(piece.bytes)).max().unwrap_or(0);
        let layout = &self.table.files[file].layout;
        if failure.is_none() && direction == TransferDirection::Read {
            plan.begin_reads(&pieces);
        } else if failure.is_none() {
            let page = self.io_backend.block_bytes.max(DIRECT_ALIGN as u64);
            plan.writes(&pieces, self.io_backend.kind.is_direct(), page, self.options.max_bytes, layout);
        }
        self.counters.requests += pieces.len() as u64;
        self.jobs.push_back(QueueJob {
            file,
            direction,
            pieces,
            plan,
            issued: 0,
            running: 0,
            span: start..end,
            memory,
            owned,
            failure,
        });
        self.first_job + self.jobs.len() as u64 - 1
    }

    /// All checks that are possible before a byte is moved.
    fn check(&self, file: usize, direction: TransferDirection, pieces: &[Piece]) -> Result<(), IoError> {
        if self.broken {
            return Err(IoError::Queue(io::Error::other("it failed before")));
        }
        let file = &self.table.files[file];
        let end = pieces.iter().map(|piece| piece.offset.saturating_add(piece.bytes)).max().unwrap_or(0);
        if end > file.bytes {
            let (path, found_bytes) = file.shortest_for(end);
            let path = path.to_path_buf();
            return Err(match direction {
                TransferDirection::Read => {
                    let part = file.layout.parts().iter().position(|part| *part == path).unwrap_or(0);
                    let expected_bytes = file.layout.part_bytes(part, end);
                    IoError::Ended { path, expected_bytes, found_bytes }
                }
                TransferDirection::Write => IoError::Beyond { path, offset: end, found_bytes },
            });
        }
        Ok(())
    }

    /// Works until job `number` is finished.
    fn run(&mut self, number: u64) {
        loop {
            self.heed_stop();
            self.fill();
            if self.job(number).is_finished() {
                return;
            }
            assert!(self.in_flight > 0, "a job that is not finished has transfers in flight");
            // Waits for several at once: fewer system calls, and the device still has nearly all of its queue.
            self.take_completions((self.in_flight / 64).clamp(1, 8));
        }
    }

    fn heed_stop(&mut self) {
        if self.stop.0.load(Ordering::Acquire) {
            self.give_up(|| IoError::Cancelled);
        }
    }

    fn job(&mut self, number: u64) -> &mut QueueJob {
        &mut self.jobs[(number - self.first_job) as usize]
    }

    /// Starts as many transfers as the depth, the bytes in flight and the staging memory allow.
    fn fill(&mut self) {
        let now = Instant::now();
        let (block_bytes, gap_bytes) = (self.io_backend.block_bytes, self.options.gap_bytes);
        let rules = Rules { block_bytes, gap_bytes, max_bytes: self.options.max_bytes };
        loop {
            let here = (self.issuing - self.first_job) as usize;
            let Some(job) = self.jobs.get(here) else { return };
            if job.failure.is_some() || job.is_issued() {
                self.issuing += 1;
                continue;
            }
            if job.issued == 0 && self.jobs.range(..here).any(|earlier| earlier.holds_up(job)) {
                return;
            }
            let job = &mut self.jobs[here];
            if job.issued == job.plan.transfers.len() {
                let layout = &self.table.files[job.file].layout;
                job.plan.find_reads(&job.pieces, &rules, layout, job.issued + PLANNED_TRANSFERS);
            }
            if self.in_flight >= self.options.depth || !self.start_next(now) {
                return;
            }
        }
    }

    /// Starts the next transfer of the current job. `false` if it must wait for memory or for bytes of other jobs.
    fn start_next(&mut self, now: Instant) -> bool {
        let number = self.issuing;
        let job = &mut self.jobs[(number - self.first_job) as usize];
        let transfer = &job.plan.transfers[job.issued];
        let bytes = transfer.bytes;
        if self.in_flight > 0 && self.in_flight_bytes + u64::from(bytes) > self.options.in_flight_bytes {
            return false;
        }
        let align = if transfer.buffered { 1 } else { self.io_backend.memory_align };
        let through =
            job.direction == TransferDirection::Read && u64::from(bytes) < self.options.in_place_bytes;
        let placed = if through { None } else { job.plan.in_place(transfer, &job.pieces) };
        let placed = placed.filter(|at| (job.memory as usize + *at as usize).is_multiple_of(align));
        let (memory, ticket) = match placed {
            // SAFETY: `in_place` returns a range of pieces, and pieces were checked to be within the memory.
            Some(at) => (unsafe { job.memory.add(at as usize) }, None),
            None => match self.staging.take(bytes as usize) {
                Some(staged) => (staged.memory, Some(staged.ticket)),
                None => return false,
            },
        };
        if job.direction == TransferDirection::Write && ticket.is_some() {
            job.plan.copies(transfer, &job.pieces, |to, from, bytes| {
                // SAFETY: the source is within the job's memory. The target is within the staged piece, which belongs
                // to the queue.
                unsafe { std::ptr::copy_nonoverlapping(job.memory.add(from), memory.add(to), bytes) };
            });
            self.counters.copied_bytes += u64::from(bytes);
        }
        let file = &self.table.files[job.file];
        let place = file.layout.place(transfer.offset);
        let tag = self.free.pop().unwrap_or(self.slots.len() as u32);
        let request = IoRequest {
            tag,
            write: job.direction == TransferDirection::Write,
            buffered: transfer.buffered,
            part: file.first_part + place.part as u32,
            offset: place.offset,
            memory,
            bytes,
        };
        let transfer = job.issued;
        job.issued += 1;
        job.running += 1;
        let slot =
            TransferInFlight { job: number, transfer, request, done: 0, tries: 0, ticket, started: now };
        match self.slots.get_mut(tag as usize) {
            Some(place) => *place = slot,
            None => self.slots.push(slot),
        }
        self.in_flight += 1;
        self.in_flight_bytes += u64::from(bytes);
        self.push(request, now);
        true
    }

    fn push(&mut self, request: IoRequest, now: Instant) {
        self.counters.started(self.in_flight, now);
        *(if request.write { &mut self.counters.writes } else { &mut self.counters.reads }) += 1;
        // SAFETY: the memory is the job's or the staging ring's. A job's memory is owned by the queue, which drops
        // its backend first, or borrowed by `borrowed`, which returns only when the job is finished.
        unsafe { self.backend.push(request) };
    }

    fn take_completions(&mut self, at_least: usize) {
        let mut completions = std::mem::take(&mut self.completions);
        let waited = self.backend.wait(at_least, &mut completions);
        let now = Instant::now();
        for completion in completions.drain(..) {
            self.complete(completion, now);
        }
        self.completions = completions;
        if let Err(error) = waited {
            self.break_down(error);
        }
        if self.in_flight == 0 {
            self.counters.idle(now);
        }
    }

    /// Handles a completed request: it is done, continued, retried, or failed.
    fn complete(&mut self, completion: Completion, now: Instant) {
        let slot = &mut self.slots[completion.tag as usize];
        let number = slot.job;
        let job = &mut self.jobs[(number - self.first_job) as usize];
        let transfer = &job.plan.transfers[slot.transfer];
        let moved = completion.result.max(0) as u32;
        let bytes =
            if slot.request.write { &mut self.counters.written_bytes } else { &mut self.counters.read_bytes };
        *bytes += u64::from(moved);
        let outcome = match completion.result {
            result if result >= 0 && slot.done + moved >= transfer.needed => CompletionOutcome::Done,
            0 => CompletionOutcome::Failed(None),
            result if result > 0 => {
                // Direct transfers resume at a block boundary.
                let direct_align =
                    self.io_backend.align_bytes.max(self.io_backend.memory_align as u64) as u32;
                let align = if transfer.buffered { 1 } else { direct_align };
                let done = (slot.done + moved) / align * align;
                self.counters.continued += 1;
                slot.tries = if done > slot.done { 0 } else { slot.tries + 1 };
                slot.done = done;
                if slot.tries > MOST_TRIES {
                    CompletionOutcome::Failed(None)
                } else {
                    CompletionOutcome::Again
                }
            }
            result if matches!(-result, libc::EINTR | libc::EAGAIN) && slot.tries < MOST_TRIES => {
                self.counters.retried += 1;
                slot.tries += 1;
                CompletionOutcome::Again
            }
            result => CompletionOutcome::Failed(Some(io::Error::from_raw_os_error(-result))),
        };
        match outcome {
            // Nobody waits for the bytes of a job that has failed.
            CompletionOutcome::Done | CompletionOutcome::Again if job.failure.is_some() => {}
            CompletionOutcome::Done if job.direction == TransferDirection::Read && slot.ticket.is_some() => {
                self.deliver(completion.tag);
            }
            CompletionOutcome::Done => {}
            CompletionOutcome::Again => {
                if slot.tries > HASTY_TRIES {
                    std::thread::sleep(PAUSE);
                }
                let mut request = slot.request;
                request.offset += u64::from(slot.done);
                request.bytes -= slot.done;
                // SAFETY: the first `done` bytes of the transfer's memory are filled; the rest follows them.
                request.memory = unsafe { request.memory.add(slot.done as usize) };
                self.push(request, now);
                return;
            }
            CompletionOutcome::Failed(source) => {
                let failure = self.failure(completion.tag, source);
                self.job(number).failure.get_or_insert(failure);
            }
        }
        self.retire(completion.tag, now);
    }

    /// Copies the bytes of a finished read from staging memory to the job's buffer.
    fn deliver(&mut self, tag: u32) {
        let slot = &self.slots[tag as usize];
        let job = &self.jobs[(slot.job - self.first_job) as usize];
        let transfer = &job.plan.transfers[slot.transfer];
        let mut copied = 0;
        job.plan.copies(transfer, &job.pieces, |from, to, bytes| {
            copied += bytes;
            // SAFETY: the source is this transfer's own piece of staging memory, to which nothing writes any more. The
            // target is within the job's memory, of which other transfers write only their own pieces.
            unsafe {
                std::ptr::copy_nonoverlapping(slot.request.memory.add(from), job.memory.add(to), bytes);
            }
        });
        self.counters.copied_bytes += copied as u64;
    }

    /// `source` is `None` if the file ended, or a write made no progress.
    fn failure(&self, tag: u32, source: Option<io::Error>) -> IoError {
        let slot = &self.slots[tag as usize];
        let IoRequest { part, write, .. } = slot.request;
        let path: PathBuf = self.table.part_path(part).to_path_buf();
        let offset = slot.request.offset + u64::from(slot.done);
        let bytes = u64::from(slot.request.bytes - slot.done);
        match source {
            Some(source) if source.raw_os_error() == Some(libc::ECANCELED) => IoError::Cancelled,
            None if !write => IoError::Ended { path, expected_bytes: offset + bytes, found_bytes: offset },
            None => IoError::Write { path, offset, bytes, source: io::ErrorKind::WriteZero.into() },
            Some(source) if write => IoError::Write { path, offset, bytes, source },
            Some(source) => IoError::Read { path, offset, bytes, source },
        }
    }

    /// Frees a finished or failed transfer.
    fn retire(&mut self, tag: u32, now: Instant) {
        let slot = &mut self.slots[tag as usize];
        self.counters.finished(slot.started, now);
        self.in_flight -= 1;
        self.in_flight_bytes -= u64::from(slot.request.bytes);
        if let Some(ticket) = slot.ticket.take() {
            self.staging.release(ticket);
        }
        let number = slot.job;
        self.free.push(tag);
        self.job(number).running -= 1;
    }

    /// Fails every job that is not finished. Requests in flight are still waited for.
    fn give_up(&mut self, why: impl Fn() -> IoError) {
        let mut any = false;
        for job in self.jobs.iter_mut().filter(|job| job.failure.is_none() && !job.is_finished()) {
            job.failure = Some(why());
            any = true;
        }
        if any && self.in_flight > 0 {
            self.backend.cancel();
        }
    }

    /// Handles a failure of the backend itself. Dropping it waits for the kernel; then every request is complete.
    fn break_down(&mut self, error: io::Error) {
        self.backend = Box::new(BrokenBackend);
        self.broken = true;
        self.give_up(|| IoError::Queue(io::Error::new(error.kind(), error.to_string())));
        self.in_flight = 0;
        self.in_flight_bytes = 0;
        for job in &mut self.jobs {
            job.running = 0;
        }
    }
}

/// Waits for everything in flight if a panic unwinds.
struct Drain<'a>(&'a mut Queue);

impl<'a> Drain<'a> {
    fn defuse(self) -> &'a mut Queue {
        let queue: *mut Queue = self.0;
        std::mem::forget(self);
        // SAFETY: `self` had the unique borrow for 'a and is gone without having run its drop.
        unsafe { &mut *queue }
    }
}

impl Drop for Drain<'_> {
    fn drop(&mut self) {
        self.0.break_down(io::Error::other("a job panicked"));
    }
}
