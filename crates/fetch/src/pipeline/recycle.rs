//! Buffers and permits that are reused: a stage takes one, and it returns when dropped. Waiting for one limits how much
//! memory a stage may use.

use super::sync::{Receiver, Sender, bounded, receive_until};
use std::fmt;
use std::ops::{Deref, DerefMut};

/// A fixed number of buffers for reuse.
pub struct Recycler<T> {
    put: Sender<T>,
    take: Receiver<T>,
}

impl<T> Clone for Recycler<T> {
    fn clone(&self) -> Recycler<T> {
        Recycler { put: self.put.clone(), take: self.take.clone() }
    }
}

impl<T: Default> Recycler<T> {
    /// A pool of `count` empty buffers.
    pub fn new(count: usize) -> Recycler<T> {
        let (put, take) = bounded(count);
        (0..count).for_each(|_| drop(put.try_send(T::default())));
        Recycler { put, take }
    }

    /// Waits for a buffer. `None` once the other end of `stop` is dropped.
    pub(super) fn take(&self, stop: &Receiver<()>) -> Option<Recycled<T>> {
        let content = receive_until(&self.take, stop);
        content.map(|content| Recycled { content, home: self.put.clone() })
    }
}

/// A buffer in use. When dropped, it can be used again.
pub struct Recycled<T: Default> {
    content: T,
    home: Sender<T>,
}

impl<T: Default> Deref for Recycled<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.content
    }
}

impl<T: Default> DerefMut for Recycled<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.content
    }
}

impl<T: Default> Drop for Recycled<T> {
    fn drop(&mut self) {
        // There is room for all buffers.
        let _ = self.home.try_send(std::mem::take(&mut self.content));
    }
}

impl<T: Default + fmt::Debug> fmt::Debug for Recycled<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.content.fmt(f)
    }
}

/// A value that does not belong to a pipeline.
impl<T: Default> From<T> for Recycled<T> {
    fn from(content: T) -> Recycled<T> {
        Recycled { content, home: bounded(0).0 }
    }
}

/// Limits what may be in flight at a time: batches, or units of their memory.
#[derive(Clone)]
pub struct Permits(Recycler<()>);

/// Permission for a batch. When dropped, it is free again.
#[derive(Debug)]
pub struct Permit(#[allow(dead_code)] Vec<Recycled<()>>);

impl Permits {
    /// A pool of `count` permits.
    pub fn new(count: usize) -> Permits {
        Permits(Recycler::new(count))
    }

    /// Takes one after the other. So only one stage may take several: two could each wait for what the other has.
    pub(super) fn take(&self, count: usize, stop: &Receiver<()>) -> Option<Permit> {
        (0..count).map(|_| self.0.take(stop)).collect::<Option<Vec<_>>>().map(Permit)
    }
}

impl Permit {
    /// A permit outside any pipeline, for code that makes batches without one.
    pub fn unlimited() -> Permit {
        Permit(Vec::new())
    }
}
