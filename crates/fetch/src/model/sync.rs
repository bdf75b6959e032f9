//! Threads that a scheduler runs one at a time, and channels that behave as crossbeam's documentation specifies. Every
//! operation starts with a point at which the scheduler may switch to another thread. A waiting thread retries, so an
//! endless wait runs out of steps, which fails the test.

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use shuttle::thread::{Builder, JoinHandle};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

struct Channel<T> {
    capacity: usize,
    // Never locked at a switch point, so nobody waits for it.
    state: Mutex<State<T>>,
}

struct State<T> {
    items: VecDeque<T>,
    senders: usize,
    receivers: usize,
    /// Receivers that wait for any item. Without capacity, an item needs one of them.
    waiting: usize,
}

impl<T> State<T> {
    fn has_room(&self, capacity: usize) -> bool {
        self.items.len() < if capacity == 0 { self.waiting } else { capacity }
    }
}

impl<T> Channel<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A switch point. It does nothing during a panic, because a second panic would end the process.
fn point() {
    if !std::thread::panicking() {
        AtomicUsize::new(0).load(Ordering::SeqCst);
    }
}

pub(crate) struct Sender<T>(Arc<Channel<T>>);

pub(crate) struct Receiver<T>(Arc<Channel<T>>);

/// The other end was dropped.
#[derive(Debug)]
pub(crate) struct Gone;

pub(crate) fn bounded<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let state = State { items: VecDeque::new(), senders: 1, receivers: 1, waiting: 0 };
    let channel = Arc::new(Channel { capacity, state: Mutex::new(state) });
    (Sender(channel.clone()), Receiver(channel))
}

impl<T> Sender<T> {
    pub(crate) fn send(&self, item: T) -> Result<(), Gone> {
        loop {
            point();
            let mut state = self.0.state();
            if state.receivers == 0 {
                return Err(Gone);
            }
            if state.has_room(self.0.capacity) {
                state.items.push_back(item);
                return Ok(());
            }
            drop(state);
            shuttle::thread::yield_now();
        }
    }

    pub(crate) fn try_send(&self, item: T) -> Result<(), Gone> {
        point();
        let mut state = self.0.state();
        if state.receivers == 0 || !state.has_room(self.0.capacity) {
            return Err(Gone);
        }
        state.items.push_back(item);
        Ok(())
    }
}

impl<T> Receiver<T> {
    pub(crate) fn recv(&self) -> Result<T, Gone> {
        self.0.state().waiting += 1;
        loop {
            point();
            let mut state = self.0.state();
            let item = state.items.pop_front();
            if item.is_some() || state.senders == 0 {
                state.waiting -= 1;
                return item.ok_or(Gone);
            }
            drop(state);
            shuttle::thread::yield_now();
        }
    }
}

/// Like crossbeam's `select!`: if both are ready, either may be taken. Without capacity, an item that was sent was taken.
pub(crate) fn receive_until<T>(items: &Receiver<T>, stop: &Receiver<()>) -> Option<T> {
    items.0.state().waiting += 1;
    loop {
        point();
        let stopped = stop.0.state().senders == 0;
        let mut state = items.0.state();
        let ready = !state.items.is_empty() || state.senders == 0;
        let taken = items.0.capacity == 0 && !state.items.is_empty();
        let stops = stopped && !taken && (!ready || thread_rng().gen_bool(0.5));
        if stops || ready {
            state.waiting -= 1;
            return if stops { None } else { state.items.pop_front() };
        }
        drop(state);
        shuttle::thread::yield_now();
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Sender<T> {
        self.0.state().senders += 1;
        Sender(self.0.clone())
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Receiver<T> {
        self.0.state().receivers += 1;
        Receiver(self.0.clone())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        point();
        self.0.state().senders -= 1;
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        point();
        // Items that wait stay until the last sender is gone, too: crossbeam drops them with the channel.
        self.0.state().receivers -= 1;
    }
}
