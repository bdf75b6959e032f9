//! Measures the peak of the process's own resident memory at short intervals, because the kernel's peak includes
//! memory-mapped pages.

use esker_types::own_resident_bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// The interval.
const EVERY: Duration = Duration::from_millis(10);

/// A thread that measures.
pub(crate) struct PeakMeter {
    peak: Arc<AtomicU64>,
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl PeakMeter {
    pub fn start() -> PeakMeter {
        let peak = Arc::new(AtomicU64::new(own_resident_bytes()));
        let (stop, stopped) = sync_channel::<()>(0);
        let mine = peak.clone();
        let thread = std::thread::spawn(move || {
            while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                mine.fetch_max(own_resident_bytes(), Ordering::Relaxed);
            }
        });
        PeakMeter { peak, stop: Some(stop), thread: Some(thread) }
    }

    pub fn bytes(&self) -> u64 {
        self.peak.fetch_max(own_resident_bytes(), Ordering::Relaxed);
        self.peak.load(Ordering::Relaxed)
    }
}

impl Drop for PeakMeter {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_gone_again_was_seen() {
        let meter = PeakMeter::start();
        let before = meter.bytes();
        let much = std::hint::black_box(vec![1u8; 64 << 20]);
        // Until the thread has measured.
        while meter.peak.load(Ordering::Relaxed) < before + (60 << 20) {
            std::thread::yield_now();
        }
        drop(much);
        assert!(meter.bytes() >= before + (60 << 20));
    }
}
