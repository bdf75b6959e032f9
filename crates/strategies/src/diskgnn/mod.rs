//! Pack what will be needed, read it in one go (DiskGNN, SIGMOD 2025). Batches are sampled before training; rows wanted most
//! wait in memory, of a GPU first and then of the host, and the others lie on disk batch by batch. Training loads samples,
//! reads rows and assembles batches, each while the others work on their own.

mod prepare;
mod sizes;
mod source;

use crate::batch::{BatchSource, RowBuffer, RowMaker};
use crate::direct::{self, Reads};
use crate::{Evaluation, HeldRows, Hold, Job, MemoryTable, Result, RowHolder, Strategy, StrategyError};
use esker_fetch::packed::Packed;
use esker_fetch::{DiskRows, HostCache, StoredRow};
use esker_sample::{DiskGraph, Position, Word};
use esker_types::{ByteCount, Dtype, NodeId, counted, grouped};
use sizes::{Sizes, Training};
use source::Source;
use std::sync::Arc;
use std::time::Instant;

/// DiskGNN over rows of any kind.
pub struct DiskGnn<R> {
    rows: RowMaker<R>,
    holder: Option<Arc<dyn RowHolder<R>>>,
    graph: Option<Prepared<R>>,
}

/// What sources share.
struct Prepared<R> {
    reads: Reads,
    wide: bool,
    /// Nothing where nobody trains.
    packed: Option<Arc<Packed>>,
    training: Training,
    cache: Cache<R>,
    /// Epochs that others repeat.
    epochs: u64,
    seconds: f64,
}

/// Where rows wanted most are.
enum Cache<R> {
    /// In host memory, as stored; batches are assembled there.
    Host(Arc<HostCache>),
    /// Where the processor that trains reads them; it assembles batches.
    Held(Arc<dyn HeldRows<R>>),
}

impl<R> Clone for Cache<R> {
    fn clone(&self) -> Cache<R> {
        match self {
            Cache::Host(rows) => Cache::Host(rows.clone()),
            Cache::Held(held) => Cache::Held(held.clone()),
        }
    }
}

/// Rows packed as batches will want them.
pub fn strategy<R: RowBuffer>(rows: RowMaker<R>, holder: Option<Arc<dyn RowHolder<R>>>) -> DiskGnn<R> {
    DiskGnn { rows, holder, graph: None }
}

impl<R> DiskGnn<R> {
    /// What was opened. Asking before is a bug.
    fn opened(&self) -> &Prepared<R> {
        self.graph.as_ref().expect("a strategy is prepared before it yields batches")
    }
}

impl<R: RowBuffer> Strategy<R> for DiskGnn<R> {
    fn memory(&self, job: &Job) -> Result<MemoryTable> {
        Ok(sizes::memory(job))
    }

    fn takes_the_rest(&self) -> bool {
        true
    }

    fn holds_rows(&self) -> bool {
        true
    }

    fn prepare(&mut self, job: &Job) -> Result<()> {
        let started = Instant::now();
        let wide = job.dataset.manifest().id_dtype() == Dtype::U64;
        let threads = job.threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(|error| StrategyError::Threads { threads, problem: error.to_string() })?;
        let reads = Reads {
            graph: Arc::new(DiskGraph::open(&job.dataset, job.direction)?),
            rows: Arc::new(DiskRows::open_with(&job.dataset, job.out_of_core.io_block_bytes)?),
            pool: Arc::new(pool),
        };
        // Whoever only infers trains on no batch.
        if job.largest_batch == 0 {
            let cache = Cache::Host(Arc::new(HostCache::new(0, reads.rows.format())));
            let training = Training::default();
            let (packed, epochs, seconds) = (None, 1, 0.0);
            self.graph = Some(Prepared { reads, wide, packed, training, cache, epochs, seconds });
            return Ok(());
        }
        let format = reads.rows.format();
        let device_slots = self.holder.as_ref().map_or(0, |holder| holder.device_slots(format));
        let device_bytes = device_slots * format.row_bytes() as u64;
        let sizes = Sizes::new(job, device_bytes)?;
        let packed = match wide {
            true => self.packed::<u64>(job, &sizes, &reads)?,
            false => self.packed::<u32>(job, &sizes, &reads)?,
        };
        let training = sizes.training(job, packed.packing())?;
        let cache = self.load(&packed, &reads)?;
        let seconds = started.elapsed().as_secs_f64();
        let epochs = job.epochs_sampled.unwrap_or(job.epochs).min(packed.packing().epochs).max(1);
        self.graph = Some(Prepared { reads, wide, packed: Some(packed), training, cache, epochs, seconds });
        Ok(())
    }

    fn epochs_sampled(&self) -> Option<u64> {
        self.graph.as_ref().filter(|graph| graph.packed.is_some()).map(|graph| graph.epochs)
    }

    fn prepared(&self) -> Option<serde_json::Value> {
        let packed = self.graph.as_ref()?.packed.as_ref()?;
        Some(serde_json::json!({
            "directory": packed.directory(), "seconds": self.graph.as_ref()?.seconds, "disk_bytes": packed.disk_bytes(), "packing": packed.packing(),
        }))
    }

    fn notes(&self) -> Vec<String> {
        let Some(Prepared { packed: Some(packed), cache, training, .. }) = &self.graph else {
            return Vec::new();
        };
        let packing = packed.packing();
        let share = |part: u64, all: u64| part as f64 / all.max(1) as f64 * 100.0;
        let hits = share(packing.accesses - packing.misses, packing.accesses);
        let held = match cache {
            Cache::Host(_) => String::new(),
            Cache::Held(held) => format!(", {} of them on the GPU", grouped(held.device_slots())),
        };
        let layout = match packing.segment {
            _ if packing.misses == 0 => "nothing is read from disk".to_string(),
            1 => "all others packed batch by batch".to_string(),
            segment => format!(
                "of the others {:.0}% in caches of {segment} batches, the rest packed batch by batch",
                share(packing.shared, packing.misses)
            ),
        };
        vec![
            format!(
                "{} of {} sampled and packed, {} on disk: {}",
                counted(packing.batches, "batch", "batches"),
                counted(packing.epochs, "epoch", "epochs"),
                ByteCount(packed.disk_bytes()),
                packed.directory().display()
            ),
            format!(
                "{} rows in memory{held}: {hits:.1}% of what batches want; {layout}",
                grouped(packing.slots)
            ),
            format!(
                "{} read at a time; files are read by {}",
                counted(training.lanes as u64, "batch", "batches"),
                packed.rung()
            ),
        ]
    }

    fn batches(&mut self, job: &Job, from: Position) -> Result<Box<dyn BatchSource<R>>> {
        let prepared = self.opened();
        Ok(Box::new(Source::new(prepared, job, from, &self.rows)?))
    }

    fn evaluation(&mut self, job: &Job, over: &Evaluation) -> Result<Box<dyn BatchSource<R>>> {
        let prepared = self.opened();
        match prepared.wide {
            true => direct::source::<R, u64>(&prepared.reads, job, over, &self.rows),
            false => direct::source::<R, u32>(&prepared.reads, job, over, &self.rows),
        }
    }

    fn rows(&mut self, nodes: &[NodeId], values: &mut [f32]) -> Result<()> {
        let Reads { rows, pool, .. } = &self.opened().reads;
        Ok(rows.reader()?.read_all(nodes, values, pool)?)
    }
}

impl<R: RowBuffer> DiskGnn<R> {
    fn packed<W: Word + StoredRow>(&self, job: &Job, sizes: &Sizes, reads: &Reads) -> Result<Arc<Packed>> {
        Ok(Arc::new(prepare::prepare::<W>(job, sizes, reads)?))
    }

    /// Reads the rows wanted most to where they wait.
    fn load(&self, packed: &Packed, reads: &Reads) -> Result<Cache<R>> {
        let slots = packed.packing().slots;
        let asked = Hold { slots, format: reads.rows.format() };
        if let Some(holder) = &self.holder
            && let Some(held) = holder.hold(&asked)?
        {
            let mut failed = None;
            packed.cached_rows(|first, stored| {
                failed = failed.take().or(held.fill(first, stored).err());
                Ok(())
            })?;
            return failed.map_or(Ok(Cache::Held(held)), Err);
        }
        let mut cache = HostCache::new(slots, reads.rows.format());
        packed.cached_rows(|first, stored| {
            cache.fill(first, stored);
            Ok(())
        })?;
        Ok(Cache::Host(Arc::new(cache)))
    }
}
