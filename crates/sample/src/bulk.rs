//! Many batches on many threads: each thread has a sampler of its own and samples every n-th batch; batches arrive in
//! order, and their buffers go back to where they came from. Threads, tables and buffers last from the first batch to
//! the last, across epochs.

use crate::topology::Topology;
use crate::{Batches, Bound, Position, Result, Sample, Sampler, Settings};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Samples ready and not yet taken, for each thread.
const QUEUE: usize = 2;
/// Samples of a thread: those ready, the one being made and the one being looked at.
const SAMPLES: usize = QUEUE + 2;

/// What to sample.
#[derive(Debug)]
pub struct Bulk<'a, T, B: ?Sized> {
    /// The graph.
    pub graph: &'a T,
    /// What batches start from.
    pub batches: &'a B,
    /// How.
    pub settings: &'a Settings,
    /// Threads that sample, at most.
    pub threads: usize,
    /// Bytes that all samplers and samples may use together.
    pub most_bytes: u64,
}

/// The positions of a run, from `from` to the end of epoch `epochs - 1`.
pub fn positions<B: Batches + ?Sized>(
    batches: &B,
    from: Position,
    epochs: u64,
) -> impl Iterator<Item = Position> + Clone + Send + '_ {
    (from.epoch..epochs).flat_map(move |epoch| {
        let first = if epoch == from.epoch { from.batch } else { 0 };
        (first..batches.count(epoch)).map(move |batch| Position { epoch, batch })
    })
}

impl<T: Topology, B: Batches + ?Sized> Bulk<'_, T, B> {
    /// Threads that it uses: as many as were asked for, fewer where batches of `largest` seeds might not fit the memory
    /// so many times. One is tried always.
    pub fn lanes(&self, largest: u64) -> usize {
        let (nodes, entries) = (self.graph.nodes(), self.graph.entries());
        let lane_bytes = Bound::new(self.settings, largest, nodes, entries, 1).bytes(SAMPLES as u64);
        (self.most_bytes / lane_bytes.max(1)).clamp(1, self.threads.max(1) as u64) as usize
    }

    /// Samples the batches at `positions` and hands them over in order. The first error, of a sampler or of `take`, ends
    /// it.
    pub fn run<E: From<crate::SampleError>>(
        &self,
        positions: impl Iterator<Item = Position> + Clone + Send,
        mut take: impl FnMut(Position, &Sample) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut seeds = Vec::new();
        let Some(first) = positions.clone().next() else { return Ok(()) };
        self.batches.seeds(first, &mut seeds)?;
        let threads = self.lanes(seeds.len() as u64);
        let most_bytes = self.most_bytes / threads as u64;
        std::thread::scope(|scope| {
            let lanes: Vec<_> = (0..threads)
                .map(|lane| {
                    let (ready, next) = sync_channel(QUEUE);
                    let (used, free) = sync_channel(SAMPLES);
                    // There is room for all of them.
                    (0..SAMPLES).for_each(|_| drop(used.try_send(Sample::default())));
                    let mine = positions.clone().skip(lane).step_by(threads);
                    scope.spawn(move || self.work(mine, most_bytes, &ready, &free));
                    (next, used)
                })
                .collect();
            for (at, turn) in positions.zip((0..threads).cycle()) {
                let (next, used): &(Receiver<Result<Sample>>, SyncSender<Sample>) = &lanes[turn];
                let sample = next.recv().expect("a lane ends only with its last batch or an error")?;
                take(at, &sample)?;
                // A lane that has ended needs no buffers.
                let _ = used.try_send(sample);
            }
            Ok(())
        })
    }

    fn work(
        &self,
        positions: impl Iterator<Item = Position>,
        most_bytes: u64,
        ready: &SyncSender<Result<Sample>>,
        free: &Receiver<Sample>,
    ) {
        let mut sampler = match Sampler::new(self.graph, self.settings.clone(), most_bytes) {
            Ok(sampler) => sampler.with_samples(SAMPLES as u64),
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let mut seeds = Vec::new();
        for at in positions {
            // Nobody takes batches any more after an error.
            let Ok(mut sample) = free.recv() else { return };
            let result = self.batches.seeds(at, &mut seeds);
            let result = result.and_then(|()| sampler.sample(at, &seeds, &mut sample));
            if ready.send(result.map(|()| sample)).is_err() {
                return;
            }
        }
    }
}
