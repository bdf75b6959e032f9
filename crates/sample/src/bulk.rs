//! Samples many batches on many threads. Each thread has its own sampler and samples every n-th batch. Batches arrive
//! in order, and their buffers return to the thread that filled them. Threads, tables and buffers last from the first
//! batch to the last, across epochs.

use crate::topology::Topology;
use crate::{Batches, Bound, Position, Result, Sample, Sampler, Settings};
use esker_types::NodeId;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::ScopedJoinHandle;

/// Samples per thread that are ready and not yet taken.
const QUEUE: usize = 2;
/// Samples per thread: those that are ready, the one being made and the one being read.
const SAMPLES: usize = QUEUE + 2;

/// Whether a node is pulled: the batch, the hop, the index among the nodes of that hop, the node.
pub type BatchPulls<'a> = dyn Fn(Position, usize, usize, NodeId) -> bool + Sync + 'a;

/// What to sample.
#[derive(Debug)]
pub struct Bulk<'a, T, B: ?Sized> {
    /// The graph.
    pub graph: &'a T,
    /// The batches.
    pub batches: &'a B,
    /// How to sample.
    pub settings: &'a Settings,
    /// Maximum number of sampling threads.
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
    /// Number of threads to use. It is the number given, or fewer if that many samplers with batches of `largest` seed
    /// nodes might not fit the memory. It is at least one.
    pub fn workers(&self, largest: u64) -> usize {
        let (nodes, entries) = (self.graph.nodes(), self.graph.entries());
        let worker_bytes = Bound::new(self.settings, largest, nodes, entries, 1).bytes(SAMPLES as u64);
        (self.most_bytes / worker_bytes.max(1)).clamp(1, self.threads.max(1) as u64) as usize
    }

    /// Samples the batches at `positions` and passes them to `take` in order. It ends at the first error of a sampler
    /// or of `take`: no further batch is started, and batches in progress are waited for. A panic of a sampler is
    /// propagated.
    pub fn run<E: From<crate::SampleError>>(
        &self,
        positions: impl Iterator<Item = Position> + Clone + Send,
        take: impl FnMut(Position, &Sample) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut seeds = Vec::new();
        let Some(first) = positions.clone().next() else { return Ok(()) };
        self.batches.seeds(first, &mut seeds)?;
        self.run_with(self.workers(seeds.len() as u64), positions, take)
    }

    /// The same with this many threads, for batches that are known to be smaller than fan-outs allow.
    pub fn run_with<E: From<crate::SampleError>>(
        &self,
        threads: usize,
        positions: impl Iterator<Item = Position> + Clone + Send,
        take: impl FnMut(Position, &Sample) -> Result<(), E>,
    ) -> Result<(), E> {
        self.run_with_pulls(threads, positions, None, take)
    }

    /// The same. `pulls` decides which nodes are pulled.
    pub fn run_with_pulls<E: From<crate::SampleError>>(
        &self,
        threads: usize,
        positions: impl Iterator<Item = Position> + Clone + Send,
        pulls: Option<&BatchPulls<'_>>,
        mut take: impl FnMut(Position, &Sample) -> Result<(), E>,
    ) -> Result<(), E> {
        let most_bytes = self.most_bytes / threads as u64;
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut workers = Vec::with_capacity(threads);
            for worker in 0..threads {
                let (ready, next) = sync_channel(QUEUE);
                let (used, free) = sync_channel(SAMPLES);
                // The channel has room for all of them.
                (0..SAMPLES).for_each(|_| drop(used.try_send(Sample::default())));
                let mine = positions.clone().skip(worker).step_by(threads);
                let ended = &ended;
                let thread = scope.spawn(move || self.work(mine, pulls, most_bytes, &ready, &free, ended));
                workers.push(BulkWorker { next, used, thread });
            }
            // Dropped before the channels, whether this ends normally, with an error or with a panic.
            let _end = RaiseOnDrop(&ended);
            for (at, turn) in positions.zip((0..threads).cycle()) {
                let Ok(sample) = workers[turn].next.recv() else {
                    let ended = workers.swap_remove(turn).thread.join();
                    resume_unwind(ended.expect_err("a worker ends with its last batch, an error or a panic"))
                };
                let sample = sample?;
                take(at, &sample)?;
                // A worker that has ended needs no buffers.
                let _ = workers[turn].used.try_send(sample);
            }
            Ok(())
        })
    }

    fn work(
        &self,
        positions: impl Iterator<Item = Position>,
        pulls: Option<&BatchPulls<'_>>,
        most_bytes: u64,
        ready: &SyncSender<Result<Sample>>,
        free: &Receiver<Sample>,
        ended: &AtomicBool,
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
            // After an error nobody takes batches, but free samples may still be in the channel.
            let Ok(mut sample) = free.recv() else { return };
            if ended.load(Ordering::Acquire) {
                return;
            }
            let result = self.batches.seeds(at, &mut seeds);
            let result = result.and_then(|()| sampler.begin(&self.batches, at));
            let result = result.and_then(|()| match pulls {
                None => sampler.sample(at, &seeds, &mut sample),
                Some(pulls) => {
                    let of_batch = &mut |hop: usize, index: usize, node: NodeId| pulls(at, hop, index, node);
                    sampler.sample_with_pulls(at, &seeds, of_batch, &mut sample)
                }
            });
            if ready.send(result.map(|()| sample)).is_err() {
                return;
            }
        }
    }
}

/// A sampling thread, as seen by the thread that takes its samples.
struct BulkWorker<'scope> {
    next: Receiver<Result<Sample>>,
    used: SyncSender<Sample>,
    thread: ScopedJoinHandle<'scope, ()>,
}

/// Sets a flag when dropped.
struct RaiseOnDrop<'a>(&'a AtomicBool);

impl Drop for RaiseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
