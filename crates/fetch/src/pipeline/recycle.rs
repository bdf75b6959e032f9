//! Buffers and permits that go round: a stage takes one, and whoever is done with it drops it. Waiting for one is how a stage is
//! kept from running ahead of its memory.

use super::sync::{Receiver, Sender, bounded, receive_until};
use std::fmt;
use std::ops::{Deref, DerefMut};

/// So many buffers that go round.
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
    /// So many empty buffers.
    pub fn new(count: usize) -> Recycler<T> {
        let (put, take) = bounded(count);
        (0..count).for_each(|_| drop(put.try_send(T::default())));
        Recycler { put, take }
    }

    /// A buffer, as soon as there is one. `None` once `stop` is dropped elsewhere.
    pub(super) fn take(&self, stop: &Receiver<()>) -> Option<Recycled<T>> {
        let content = receive_until(&self.take, stop);
        content.map(|content| Recycled { content, home: self.put.clone() })
    }
}

/// A buffer on its way; dropped, it serves again.
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
        // There is room for all that were made.
        let _ = self.home.try_send(std::mem::take(&mut self.content));
    }
}

impl<T: Default + fmt::Debug> fmt::Debug for Recycled<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.content.fmt(f)
    }
}

/// A value that belongs to no pipeline.
impl<T: Default> From<T> for Recycled<T> {
    fn from(content: T) -> Recycled<T> {
        Recycled { content, home: bounded(0).0 }
    }
}

/// How many batches may be on their way at a time.
#[derive(Clone)]
pub struct Permits(Recycler<()>);

/// One of them; dropped, it is free again.
#[derive(Debug)]
pub struct Permit(#[allow(dead_code)] Recycled<()>);

impl Permits {
    /// So many.
    pub fn new(count: usize) -> Permits {
        Permits(Recycler::new(count))
    }

    pub(super) fn take(&self, stop: &Receiver<()>) -> Option<Permit> {
        self.0.take(stop).map(Permit)
    }
}

impl Permit {
    /// One that belongs to no pipeline, for whoever makes batches without one.
    pub fn unlimited() -> Permit {
        Permit(Recycled::from(()))
    }
}
