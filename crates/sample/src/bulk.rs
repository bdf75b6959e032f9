//! Many batches on many threads: each thread has a sampler of its own and samples every n-th batch; batches arrive in
//! order, and their buffers go back to where they came from.

use crate::topology::{InMemory, Word};
use crate::{Order, Position, Result, Sample, Sampler, Seeds, Settings};
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Samples ready and not yet taken, for each thread.
const QUEUE: usize = 2;

/// What to sample.
pub struct Bulk<'a, W> {
    /// The graph.
    pub graph: &'a InMemory<W>,
    /// What is trained on.
    pub seeds: &'a Seeds,
    /// In which order.
    pub order: &'a dyn Order,
    /// How.
    pub settings: &'a Settings,
    /// Threads that sample.
    pub threads: usize,
    /// Bytes that all samplers may use together.
    pub most_bytes: u64,
}

impl<W: Word> Bulk<'_, W> {
    /// Samples the batches of an epoch and hands them over in order. The first error, of a sampler or of `take`, ends it.
    pub fn run<E: From<crate::SampleError>>(
        &self,
        epoch: u64,
        batches: Range<u64>,
        mut take: impl FnMut(u64, &Sample) -> Result<(), E>,
    ) -> Result<(), E> {
        let threads = self.threads.max(1);
        std::thread::scope(|scope| {
            let lanes: Vec<_> = (0..threads as u64)
                .map(|lane| {
                    let (ready, next) = sync_channel(QUEUE);
                    let (used, free) = sync_channel(QUEUE + 2);
                    let mine = (batches.start + lane..batches.end).step_by(threads);
                    scope.spawn(move || self.work(epoch, mine, &ready, &free));
                    (next, used)
                })
                .collect();
            for (batch, turn) in batches.zip((0..threads).cycle()) {
                let (next, used): &(Receiver<Result<Sample>>, SyncSender<Sample>) = &lanes[turn];
                let sample = next.recv().expect("a lane ends only with its last batch or an error")?;
                take(batch, &sample)?;
                // A lane that has ended needs no buffers.
                let _ = used.try_send(sample);
            }
            Ok(())
        })
    }

    fn work(
        &self,
        epoch: u64,
        batches: impl Iterator<Item = u64>,
        ready: &SyncSender<Result<Sample>>,
        free: &Receiver<Sample>,
    ) {
        let most_bytes = self.most_bytes / self.threads.max(1) as u64;
        let mut sampler = match Sampler::new(self.graph, self.settings.clone(), most_bytes) {
            Ok(sampler) => sampler,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let (mut items, mut nodes) = (Vec::new(), Vec::new());
        for batch in batches {
            let mut sample = free.try_recv().unwrap_or_default();
            let result = self
                .order
                .items(epoch, batch, &mut items)
                .and_then(|()| self.seeds.nodes(self.graph, &items, &mut nodes))
                .and_then(|()| sampler.sample(Position { epoch, batch }, &nodes, &mut sample));
            // Nobody takes batches any more after an error.
            if ready.send(result.map(|()| sample)).is_err() {
                return;
            }
        }
    }
}
