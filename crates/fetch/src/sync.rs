//! What a pipeline waits with: this machine's threads, and channels between them. `model/sync.rs` takes their place where every
//! order of events is tried.

pub(crate) use crossbeam_channel::{Receiver, Sender, bounded};
pub(crate) use std::thread::{Builder, JoinHandle};

/// The next item; `None` once there are none to come, or `stop` has no sender any more.
pub(crate) fn receive_until<T>(items: &Receiver<T>, stop: &Receiver<()>) -> Option<T> {
    crossbeam_channel::select! {
        recv(items) -> item => item.ok(),
        recv(stop) -> _ => None,
    }
}
