use hdrhistogram::Histogram;
use std::time::{Duration, Instant};

/// What a queue has done so far.
#[derive(Debug, Clone)]
pub struct IoCounters {
    /// Pieces requested, whether or not they have arrived yet.
    pub requests: u64,
    /// Reads submitted to the device, including continuations of short reads.
    pub reads: u64,
    /// Writes submitted to the device.
    pub writes: u64,
    /// Bytes of the pieces of successful jobs. A byte shared by several pieces counts once per piece.
    pub useful_bytes: u64,
    /// Bytes that the device read.
    pub read_bytes: u64,
    /// Bytes that the device wrote.
    pub written_bytes: u64,
    /// Bytes that were copied because they could not be read directly into their buffer.
    pub copied_bytes: u64,
    /// Transfers that came back short and were continued.
    pub continued: u64,
    /// Transfers that were retried after EINTR or EAGAIN.
    pub retried: u64,
    /// Largest number of requests in flight at once.
    pub deepest: u64,
    /// Time with at least one request in flight.
    pub busy: Duration,
    /// Sum over all transfers of the requests in flight when each started.
    depth_sum: u64,
    latency_ns: Histogram<u32>,
    busy_since: Option<Instant>,
}

impl IoCounters {
    pub(crate) fn new() -> IoCounters {
        let minute = 60_000_000_000;
        IoCounters {
            requests: 0,
            reads: 0,
            writes: 0,
            useful_bytes: 0,
            read_bytes: 0,
            written_bytes: 0,
            copied_bytes: 0,
            continued: 0,
            retried: 0,
            deepest: 0,
            busy: Duration::ZERO,
            depth_sum: 0,
            latency_ns: Histogram::new_with_max(minute, 2).expect("bounds and digits are valid"),
            busy_since: None,
        }
    }

    pub(crate) fn started(&mut self, in_flight: usize, now: Instant) {
        self.depth_sum += in_flight as u64;
        self.deepest = self.deepest.max(in_flight as u64);
        self.busy_since.get_or_insert(now);
    }

    pub(crate) fn finished(&mut self, started: Instant, now: Instant) {
        self.latency_ns.saturating_record(now.duration_since(started).as_nanos() as u64);
    }

    pub(crate) fn idle(&mut self, now: Instant) {
        if let Some(since) = self.busy_since.take() {
            self.busy += now.duration_since(since);
        }
    }

    /// Read amplification: bytes read per useful byte. Below 1 if pieces share bytes.
    pub fn amplification(&self) -> f64 {
        self.read_bytes as f64 / (self.useful_bytes as f64).max(1.0)
    }

    /// Requests in flight when a transfer started, on average.
    pub fn mean_depth(&self) -> f64 {
        self.depth_sum as f64 / ((self.reads + self.writes) as f64).max(1.0)
    }

    /// The latency below which this share (0 to 1) of transfers completed.
    pub fn latency(&self, share: f64) -> Duration {
        Duration::from_nanos(self.latency_ns.value_at_quantile(share))
    }

    /// Adds the counters of another queue.
    pub fn add(&mut self, other: &IoCounters) {
        self.requests += other.requests;
        self.reads += other.reads;
        self.writes += other.writes;
        self.useful_bytes += other.useful_bytes;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.copied_bytes += other.copied_bytes;
        self.continued += other.continued;
        self.retried += other.retried;
        self.deepest = self.deepest.max(other.deepest);
        self.busy += other.busy;
        self.depth_sum += other.depth_sum;
        self.latency_ns.add(&other.latency_ns).expect("histograms of one shape");
    }
}

impl Default for IoCounters {
    fn default() -> IoCounters {
        IoCounters::new()
    }
}
