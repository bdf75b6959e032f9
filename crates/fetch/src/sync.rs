//! The synchronisation primitives of the pipeline: OS threads and channels between them. `model/sync.rs` replaces them
//! when every order of events is tried.

pub(crate) use crossbeam_channel::{Receiver, Sender, bounded};
pub(crate) use std::thread::{Builder, JoinHandle};

/// The next item. `None` if no more follow, or if all senders of `stop` are dropped.
pub(crate) fn receive_until<T>(items: &Receiver<T>, stop: &Receiver<()>) -> Option<T> {
    crossbeam_channel::select! {
        recv(items) -> item => item.ok(),
        recv(stop) -> _ => None,
    }
}
