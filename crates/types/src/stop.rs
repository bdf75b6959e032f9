//! A request to stop. Long work checks it now and then, and ends without losing anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a stop was requested. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// Requests a stop. It cannot be withdrawn.
    pub fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether a stop was requested.
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
