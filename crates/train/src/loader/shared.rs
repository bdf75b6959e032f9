//! The promise of memory that the loaders of a process share. Each takes its share before it allocates anything large,
//! and returns it when it is dropped.

use crate::{Result, TrainError};
use esker_types::ByteCount;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory that several loaders share. Clones share it, too.
#[derive(Debug, Clone)]
pub struct SharedMemory(Arc<Mutex<SharedBytes>>);

#[derive(Debug)]
struct SharedBytes {
    allowed: u64,
    taken: u64,
}

impl SharedMemory {
    /// `allowed` bytes for all loaders together.
    pub fn new(allowed: u64) -> SharedMemory {
        SharedMemory(Arc::new(Mutex::new(SharedBytes { allowed, taken: 0 })))
    }

    /// Changes what is allowed. Shares that are taken stay.
    pub fn allow(&self, allowed: u64) {
        self.lock().allowed = allowed;
    }

    /// What is allowed, and what is taken of it.
    pub fn bytes(&self) -> (u64, u64) {
        let shared = self.lock();
        (shared.allowed, shared.taken)
    }

    /// What no loader has taken.
    pub fn left(&self) -> u64 {
        let shared = self.lock();
        shared.allowed.saturating_sub(shared.taken)
    }

    /// Takes a share. Fails if less is left.
    pub fn take(&self, bytes: u64) -> Result<MemoryShare> {
        let mut shared = self.lock();
        let left = shared.allowed.saturating_sub(shared.taken);
        if bytes > left {
            return Err(TrainError::SharedMemory {
                needed: ByteCount(bytes),
                left: ByteCount(left),
                others: ByteCount(shared.taken),
                all: ByteCount(shared.taken.saturating_add(bytes)),
            });
        }
        shared.taken += bytes;
        Ok(MemoryShare { of: self.clone(), bytes })
    }

    fn lock(&self) -> MutexGuard<'_, SharedBytes> {
        // Every change leaves it consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that a loader has taken. When dropped, it is free again.
#[derive(Debug)]
pub struct MemoryShare {
    of: SharedMemory,
    bytes: u64,
}

impl MemoryShare {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns all but `bytes` of it.
    pub(super) fn keep(&mut self, bytes: u64) {
        let kept = bytes.min(self.bytes);
        self.of.lock().taken -= self.bytes - kept;
        self.bytes = kept;
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.of.lock().taken -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_exceed_the_promise_together_never() {
        let shared = SharedMemory::new(100);
        let first = shared.take(70).unwrap();
        let refused = shared.clone().take(40).unwrap_err().to_string();
        assert!(
            refused.contains("40 B") && refused.contains("30 B") && refused.contains("110 B"),
            "{refused}"
        );
        let second = shared.take(30).unwrap();
        assert_eq!((shared.left(), shared.bytes(), second.bytes()), (0, (100, 100), 30));
        drop(first);
        assert_eq!(shared.left(), 70);
        shared.allow(20);
        assert_eq!((shared.left(), shared.bytes()), (0, (20, 30)));
    }
}
