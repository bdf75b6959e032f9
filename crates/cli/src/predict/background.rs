//! Writes predictions on a thread of its own, while more is computed.

use super::writer::{OpenWriter, PredictedRows, Writer, joined};
use esker_types::NodeId;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

/// Writes on a thread of its own.
pub struct Background {
    send: Option<Sender<WriterOrder>>,
    /// Buffers whose rows are written.
    written: Receiver<PredictedRows>,
    /// Buffers that may still be made. They are counted with the first rows.
    left: Option<u64>,
    waiting_bytes: u64,
    thread: Option<JoinHandle<io::Result<()>>>,
}

enum WriterOrder {
    Write(PredictedRows),
    Finish,
}

/// Rows of so many tiles or batches wait or are written, at least.
const LEAST_BUFFERS: u64 = 3;
/// Of the memory for output, this part is for writing past the page cache, and at most [`MOST_DIRECT_BYTES`].
const DIRECT_PART: u64 = 2;
const MOST_DIRECT_BYTES: u64 = 24 << 20;

impl Background {
    /// Starts to write, with this much memory besides that of [`LEAST_BUFFERS`].
    pub fn start(writer: Writer, bytes: u64) -> io::Result<Background> {
        let (send, receive) = channel::<WriterOrder>();
        let (back, written) = channel();
        let direct_bytes = (bytes / DIRECT_PART).min(MOST_DIRECT_BYTES);
        let work = move || {
            // A queue to a disk stays on its thread, so it is made here.
            let mut writer = OpenWriter::open(writer, direct_bytes)?;
            while let Ok(order) = receive.recv() {
                match order {
                    WriterOrder::Write(rows) => writer.write(&rows).map(|()| drop(back.send(rows)))?,
                    WriterOrder::Finish => return writer.finish(),
                }
            }
            // Whoever does not finish leaves no file.
            Ok(())
        };
        let thread = Some(Builder::new().name("write".to_string()).spawn(work)?);
        let waiting_bytes = bytes - direct_bytes;
        Ok(Background { send: Some(send), written, left: None, waiting_bytes, thread })
    }

    /// Hands rows over. Fails with what an earlier write failed with. `values` then has other numbers, for which the
    /// caller has no use.
    pub fn write(&mut self, ids: &[NodeId], classes: &[u32], values: &mut Vec<f32>) -> io::Result<()> {
        let Some(mut rows) = self.free_buffer(size_of_val(&values[..]) + ids.len() * 12) else {
            return self.join();
        };
        rows.nodes.clear();
        rows.nodes.extend_from_slice(ids);
        rows.classes.clear();
        rows.classes.extend_from_slice(classes);
        std::mem::swap(&mut rows.values, values);
        match self.send.as_ref().is_some_and(|send| send.send(WriterOrder::Write(rows)).is_ok()) {
            true => Ok(()),
            false => self.join(),
        }
    }

    /// A buffer for rows of about this many bytes. `None` if the thread has ended.
    fn free_buffer(&mut self, bytes: usize) -> Option<PredictedRows> {
        let waiting_bytes = self.waiting_bytes;
        let left = self.left.get_or_insert_with(|| LEAST_BUFFERS + waiting_bytes / (bytes as u64).max(1));
        if let Ok(rows) = self.written.try_recv() {
            return Some(rows);
        }
        match *left {
            0 => self.written.recv().ok(),
            _ => {
                *left -= 1;
                Some(PredictedRows::default())
            }
        }
    }

    /// Waits for the last write, and gives the files their names.
    pub fn finish(mut self) -> io::Result<()> {
        let sent = self.send.take().map(|send| send.send(WriterOrder::Finish));
        drop(sent);
        self.join()
    }

    fn join(&mut self) -> io::Result<()> {
        self.send = None;
        self.thread.take().map_or(Ok(()), joined)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.join();
    }
}
