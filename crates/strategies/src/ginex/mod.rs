//! Topology and features on disk, and an optimal cache (Ginex, VLDB 2022). Batches are sampled ahead, a superbatch at a time;
//! so the rows that they will want are known, and Belady's algorithm says which to keep. What the paper leaves to a GPU,
//! planning, one core does in linear time.

mod sizes;
mod source;
mod superbatch;

use crate::batch::{BatchSource, RowBuffer, RowMaker};
use crate::direct::{self, Reads};
use crate::lists::Lists;
use crate::{Evaluation, Job, MemoryTable, Result, Strategy, StrategyError};
use esker_fetch::{DiskRows, StoredRow};
use esker_sample::bulk::positions;
use esker_sample::{DiskGraph, OnDisk, Position, Sample, Sampler, Word};
use esker_store::StoreError;
use esker_types::{ByteCount, Dtype, NodeId};
use rayon::ThreadPool;
use sizes::Sizes;
use source::Source;
use std::sync::Arc;

/// Batches that are sampled to know how large they are.
const PROFILED: usize = 2;
/// About what an edge takes in a trace.
const EDGE_BYTES: u64 = 3;

/// Ginex over rows of any kind.
pub struct Ginex<R> {
    rows: RowMaker<R>,
    graph: Option<AnyGraph>,
}

/// What sources share.
struct Prepared<W> {
    lists: Arc<Lists>,
    rows: Arc<DiskRows>,
    pool: Arc<ThreadPool>,
    sizes: Sizes,
    word: std::marker::PhantomData<W>,
}

impl<W> Clone for Prepared<W> {
    fn clone(&self) -> Prepared<W> {
        let (lists, rows, pool) = (self.lists.clone(), self.rows.clone(), self.pool.clone());
        Prepared { lists, rows, pool, sizes: self.sizes.clone(), word: self.word }
    }
}

/// Ids as wide as they are stored.
enum AnyGraph {
    Narrow(Prepared<u32>),
    Wide(Prepared<u64>),
}

/// Topology and features on disk.
pub fn strategy<R: RowBuffer>(rows: RowMaker<R>) -> Ginex<R> {
    Ginex { rows, graph: None }
}

impl<R> Ginex<R> {
    /// The graph, once it was opened. Asking before is a bug.
    fn prepared(&self) -> &AnyGraph {
        self.graph.as_ref().expect("a strategy is prepared before it yields batches")
    }
}

impl<R: RowBuffer> Strategy<R> for Ginex<R> {
    fn memory(&self, job: &Job) -> Result<MemoryTable> {
        Ok(sizes::memory(job))
    }

    fn takes_the_rest(&self) -> bool {
        true
    }

    fn prepare(&mut self, job: &Job) -> Result<()> {
        self.graph = Some(match job.dataset.manifest().id_dtype() {
            Dtype::U64 => AnyGraph::Wide(Prepared::open(job)?),
            _ => AnyGraph::Narrow(Prepared::open(job)?),
        });
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        let (sizes, lists, rows) = match &self.graph {
            Some(AnyGraph::Narrow(graph)) => (&graph.sizes, &graph.lists, &graph.rows),
            Some(AnyGraph::Wide(graph)) => (&graph.sizes, &graph.lists, &graph.rows),
            None => return Vec::new(),
        };
        vec![
            format!(
                "superbatches of {} batches, up to {} on disk for each",
                sizes.superbatch,
                ByteCount(sizes.disk_bytes)
            ),
            lists.note(),
            format!("{} for batches and cached rows while gathering", ByteCount(sizes.phase_bytes)),
            format!("files are read by {}", rows.rung()),
        ]
    }

    fn batches(&mut self, job: &Job, from: Position) -> Result<Box<dyn BatchSource<R>>> {
        Ok(match self.prepared() {
            AnyGraph::Narrow(graph) => Box::new(Source::new(graph.clone(), job, from, &self.rows)?),
            AnyGraph::Wide(graph) => Box::new(Source::new(graph.clone(), job, from, &self.rows)?),
        })
    }

    fn evaluation(&mut self, job: &Job, over: &Evaluation) -> Result<Box<dyn BatchSource<R>>> {
        match self.prepared() {
            AnyGraph::Narrow(graph) => direct::source::<R, u32>(&graph.reads(), job, over, &self.rows),
            AnyGraph::Wide(graph) => direct::source::<R, u64>(&graph.reads(), job, over, &self.rows),
        }
    }

    fn rows(&mut self, nodes: &[NodeId], values: &mut [f32]) -> Result<()> {
        let (rows, pool) = match self.prepared() {
            AnyGraph::Narrow(graph) => (&graph.rows, &graph.pool),
            AnyGraph::Wide(graph) => (&graph.rows, &graph.pool),
        };
        let mut reader = rows.reader()?;
        Ok(reader.read_all(nodes, values, pool)?)
    }
}

impl<W: Word + StoredRow> Prepared<W> {
    /// For batches without a plan.
    fn reads(&self) -> Reads {
        Reads { graph: self.lists.graph.clone(), rows: self.rows.clone(), pool: self.pool.clone() }
    }

    /// Opens lists and rows, finds out how large batches are, and shares out what was granted.
    fn open(job: &Job) -> Result<Prepared<W>> {
        let scratch = &job.out_of_core.scratch;
        std::fs::create_dir_all(scratch).map_err(StoreError::io(scratch))?;
        let threads = job.threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(|error| StrategyError::Threads { threads, problem: error.to_string() })?;
        let graph = Arc::new(DiskGraph::open(&job.dataset, job.direction)?);
        let rows = Arc::new(DiskRows::open_with(&job.dataset, job.out_of_core.io_block_bytes)?);
        // Whoever only infers trains on no batch.
        let sizes = match job.largest_batch {
            0 => Sizes::none(),
            _ => {
                let epoch = job.batches.count(0);
                Sizes::new(job, profile::<W>(job, &graph)?, (epoch, epoch.saturating_mul(job.epochs)))?
            }
        };
        let lists = Arc::new(Lists::prepare::<W>(job, sizes.lists, graph)?);
        Ok(Prepared { lists, rows, pool: Arc::new(pool), sizes, word: std::marker::PhantomData })
    }
}

/// What the files of a batch take on disk, from a few batches.
fn profile<W: Word + StoredRow>(job: &Job, graph: &Arc<DiskGraph>) -> Result<u64> {
    let start = Position { epoch: 0, batch: 0 };
    let most_bytes = job.strategy_bytes.max(sizes::memory(job).total());
    let mut sampler = Sampler::new(OnDisk::<W>::new(graph.clone(), None), job.settings.clone(), most_bytes)?;
    let (mut seeds, mut sample, mut largest) = (Vec::new(), Sample::default(), 1);
    for at in positions(&*job.batches, start, job.epochs.min(1)).take(PROFILED) {
        job.batches.seeds(at, &mut seeds)?;
        sampler.sample(at, &seeds, &mut sample)?;
        let nodes = sample.node_ids.len() as u64;
        largest = largest.max(sizes::disk_bytes::<W>(1, nodes, sample.edge_count() * EDGE_BYTES));
    }
    Ok(largest)
}
