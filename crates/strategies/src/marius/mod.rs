//! Marius++: only some node partitions are in memory, and training sees them and the edges between them. The order of
//! partitions (`plan`, `partition_orders`) decides what is read and what a model learns.
//!
//! ```text
//!  steps ──> read (buckets, features: the next step) ──> sample (residents) ──> gather ──> batch
//!                                                                                    ▲ slots │
//!  partitions on disk ── read ahead ──> buffer ── swap between two steps ──> table ──┘       ▼
//!                     <── written ─────        <───────────────────────────        <── updates
//! ```

mod inference;
mod read;
mod source;
mod steps;
mod table;

use crate::direct::{self, ReadsOn};
use crate::phases::{PhaseSource, Phases};
use crate::sampling::sampling_bytes;
use crate::{
    BatchSource, BufferSizes, CheckpointReader, EmbeddingUse, Inference, Job, JobOutline, MemoryTable, Needs,
    PartitionedGraph, Prepared, Result, RowTraining, RunPosition, Strategy, StrategyError,
};
use esker_device::Device;
use esker_fetch::partitions::{PartitionRowStream, PartitionedFeatures};
use esker_sample::{BucketCounts, EdgeBuckets, GraphWork, StepGraphs, Subgraph};
use esker_types::{Dtype, counted, grouped};
use inference::WholeGraph;
use source::{MariusParts, MariusSource};
use std::sync::Arc;
use table::{PartitionTable, TableParts};

/// Readers of learned rows that inference has at a time, at most.
const READERS: u64 = 2;
/// Edges and features are sorted within one part in this many of the graph's bytes, if that is enough.
const SORTING_PART: u64 = 4;

/// Learned rows, and what is read besides.
pub type LearnedRows<D> = Option<(Arc<dyn RowTraining<D>>, EmbeddingUse)>;

/// The strategy, with learned rows if training has any.
pub fn strategy<D: Device>(device: D, rows: LearnedRows<D>) -> Marius<D> {
    Marius { device, rows, opened: None }
}

/// Partitions in a buffer.
pub struct Marius<D: Device> {
    device: D,
    rows: LearnedRows<D>,
    opened: Option<Opened<D>>,
}

/// What a job opens once.
struct Opened<D: Device> {
    graph: PartitionedGraph,
    features: Option<Arc<PartitionedFeatures>>,
    reads: Option<Arc<ReadsOn<D>>>,
}

/// The sizes of the buffer. Fails without: a run on partitions has them.
fn sizes(job: &JobOutline) -> Result<BufferSizes> {
    job.out_of_core.buffer.ok_or(StrategyError::NoBuffer)
}

/// The least memory in which edges and features are sorted.
fn least_sorting_bytes(job: &JobOutline, sizes: BufferSizes) -> u64 {
    let features = if job.features { PartitionedFeatures::least_bytes(sizes.partitions) } else { 0 };
    EdgeBuckets::least_bytes(sizes.partitions).max(features)
}

/// Memory of what is known of every bucket.
fn index_bytes(partitions: u32) -> u64 {
    EdgeBuckets::index_bytes(partitions).saturating_add(BucketCounts::bytes_for(partitions))
}

/// The memory it needs, without learned rows.
pub fn needs(job: &JobOutline) -> Result<Needs> {
    let sizes = sizes(job)?;
    let manifest = job.dataset.manifest();
    let (nodes, largest) = (manifest.nodes.count, sizes.largest(manifest.nodes.count));
    let mut table = MemoryTable::default();
    let count = sizes.partitions;
    if job.largest_batch > 0 {
        let from = format!("{count} x {count} of 24 bytes");
        table.add_from("edge buckets: counts, where they start, checksums", index_bytes(count), from);
        let (members, edges) = (sizes.resident_nodes(nodes), sizes.edges.resident);
        let edge_bytes = EdgeBuckets::edge_bytes(&job.dataset);
        let reader = EdgeBuckets::reader_bytes(count, sizes.edges.bucket.saturating_mul(edge_bytes));
        table.add_from(
            "edge buckets of resident partitions",
            sizes.edges.with_next.saturating_mul(edge_bytes).saturating_add(reader),
            format!("{} edges, with those read ahead", grouped(sizes.edges.with_next)),
        );
        let shape = PartitionedGraph::shape(job);
        let subgraph = match manifest.id_dtype() {
            Dtype::U64 => Subgraph::<u64>::bytes_for(nodes, members, edges, shape),
            _ => Subgraph::<u32>::bytes_for(nodes, members, edges, shape),
        };
        table.add_from(
            "subgraphs of resident nodes",
            2 * subgraph,
            format!("2 x {} nodes, {} edges", grouped(members), grouped(edges)),
        );
        if job.features {
            let held = (sizes.resident + sizes.each).min(count) as u64;
            let from = format!("{held} partitions x {} nodes x {} bytes", grouped(largest), job.row_bytes());
            table.add_from("feature rows of resident partitions", held * largest * job.row_bytes(), from);
        }
        let (most, depth) = (job.most_nodes(), job.prefetch_depth as u64);
        table.add("sampling", sampling_bytes(job));
        if job.features {
            let from = format!("{depth} x {} nodes x {} x 4 bytes", grouped(most), job.dim());
            let what = format!("feature rows of {}", counted(depth, "batch", "batches"));
            table.add_from(what, most.saturating_mul(job.dim() * 4).saturating_mul(depth), from);
        }
    }
    direct::add_memory(job, &mut table);
    let mut disk_bytes = 0;
    if job.largest_batch > 0 {
        let more = least_sorting_bytes(job, sizes).saturating_sub(table.total());
        if more > 0 {
            table.add_from("sorting edges and features, beyond that", more, "before training");
        }
        let features = if job.features { PartitionedFeatures::disk_bytes(&job.dataset)? } else { 0 };
        disk_bytes = EdgeBuckets::disk_bytes(&job.dataset, count).saturating_add(features);
    }
    Ok(Needs { host: table, disk_bytes, ..Needs::default() })
}

impl<D: Device> Marius<D> {
    /// Adds the memory of learned rows.
    fn add_rows(&self, job: &JobOutline, needs: &mut Needs) -> Result<()> {
        let Some((training, _)) = &self.rows else { return Ok(()) };
        let sizes = sizes(job)?;
        (needs.trains_rows, needs.exchange.input_gradient) = (true, true);
        let (dim, states) = (training.dim() as u64, training.state_names().len() as u64);
        let largest = sizes.largest(job.dataset.manifest().nodes.count);
        let reading = table::reading_bytes(largest, dim * 4 * (1 + states), dim * 4);
        needs.host.add_from(
            "evaluation: reading embeddings",
            READERS * reading,
            format!("{READERS} readers"),
        );
        if let Some(evaluation) = &job.evaluation {
            // Those of the batch that is computed, and of the next.
            let nodes = job.bound(&evaluation.settings, evaluation.largest_batch).nodes;
            let from = format!("2 x {} nodes x {dim} x 4 bytes", grouped(nodes));
            let bytes = nodes.saturating_mul(2 * dim * 4);
            needs.host.add_from("evaluation: embeddings of batches", bytes, from);
        }
        if job.largest_batch == 0 {
            return Ok(());
        }
        let rows = largest * sizes.resident as u64;
        let from = format!("{} partitions x {} nodes x {dim} x 4 bytes", sizes.resident, grouped(largest));
        needs.device.add_from("embeddings of resident partitions", rows * dim * 4, &from);
        if states > 0 {
            needs.device.add_from(
                "optimizer of resident embeddings",
                states * rows * dim * 4,
                format!("{states} x {from}"),
            );
        }
        let partition = largest * dim * 4 * (1 + states);
        let ahead = PartitionRowStream::buffers_bytes(sizes.each as u64, partition);
        let from = format!(
            "{} of {} bytes",
            counted(sizes.each as u64, "partition", "partitions"),
            grouped(partition)
        );
        needs.host.add_from("partitions on their way", ahead, from);
        let lag = job.out_of_core.update_lag() as u64;
        if lag > 1 {
            needs.device.add("updates that wait", (lag - 1).saturating_mul(job.most_nodes() * dim * 4));
        }
        let slots = job.most_nodes().saturating_mul(4 * (job.prefetch_depth as u64 + 1));
        needs.host.add("slots of batches, saving embeddings", slots.saturating_add(12 << 20));
        // The last checkpoint's versions, those of the best model, and what left since.
        let table = partition.saturating_mul(sizes.partitions as u64);
        needs.disk_bytes = needs.disk_bytes.saturating_add(3 * table);
        Ok(())
    }

    /// Sorts edges and features by partition, if they are not yet. Nothing of training is in memory meanwhile.
    fn sort(&self, job: &Job, graph: &PartitionedGraph) -> Result<Option<Arc<PartitionedFeatures>>> {
        let sizes = sizes(job)?;
        let least = least_sorting_bytes(job, sizes);
        let graph_bytes: u64 = job.dataset.arrays().iter().map(|array| array.entry().bytes).sum();
        let granted = job.strategy_bytes.saturating_add(job.room.spare_bytes);
        let most_bytes = (graph_bytes / SORTING_PART).min(granted).max(least);
        let folder = job.dataset.derived_path("");
        let (pool, stop, progress) = (&*job.pool, &job.stop, &*job.progress);
        let safe_point_bytes = job.out_of_core.safe_point_bytes;
        let work = GraphWork { folder: &folder, most_bytes, pool, stop, progress, safe_point_bytes };
        graph.sort(&job.dataset, &work)?;
        if !job.features {
            return Ok(None);
        }
        Ok(Some(Arc::new(PartitionedFeatures::find_or_make(&job.dataset, &graph.partitions, &work)?)))
    }

    fn opened(&self) -> &Opened<D> {
        self.opened.as_ref().expect("a strategy is prepared before it yields batches")
    }

    fn parts<'a>(&'a self, training: &'a Arc<dyn RowTraining<D>>) -> TableParts<'a, D> {
        TableParts { device: &self.device, training, partitions: &self.opened().graph.partitions }
    }

    fn whole(&self, table: Option<Arc<PartitionTable<D>>>) -> WholeGraph<D> {
        let usage = self.rows.as_ref().map(|(_, usage)| *usage);
        WholeGraph {
            device: self.device.clone(),
            reads: self.opened().reads.clone(),
            table: table.zip(usage),
        }
    }
}

impl<D: Device> Strategy<D> for Marius<D> {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        let mut needs = needs(job)?;
        self.add_rows(job, &mut needs)?;
        Ok(needs)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared> {
        let graph = job.partitioned.clone().ok_or(StrategyError::NoBuffer)?;
        let features = if job.largest_batch > 0 { self.sort(job, &graph)? } else { None };
        let reads = match job.features || job.evaluation.is_some() {
            true => Some(Arc::new(ReadsOn::open(job, &self.device)?)),
            false => None,
        };
        let on_disk = (job.largest_batch > 0).then(|| {
            serde_json::json!({
                "partitions": graph.partitions.count(),
                "edge_bucket_bytes": graph.buckets().bytes(),
                "feature_bytes": features.as_ref().map_or(0, |features| features.bytes()),
            })
        });
        self.opened = Some(Opened { graph, features, reads });
        Ok(Prepared { on_disk, ..Prepared::default() })
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        mut state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let (sizes, opened) = (sizes(job)?, self.opened());
        let at = job.training_position(Phases::<D>::first_of(from));
        let table = match &self.rows {
            Some((training, _)) => {
                let slots = (sizes.resident as usize, sizes.each as usize);
                Some(PartitionTable::open(&self.parts(training), job, at, slots, &mut state)?)
            }
            None => None,
        };
        let (graph, features) = (opened.graph.clone(), opened.features.clone());
        let steps = graph.steps.clone();
        let parts = MariusParts { device: self.device.clone(), graph, features, table: table.clone() };
        let training: Box<dyn PhaseSource<D>> = match &steps {
            StepGraphs::Narrow(subgraphs) => Box::new(MariusSource::open(job, &parts, subgraphs, at)?),
            StepGraphs::Wide(subgraphs) => Box::new(MariusSource::open(job, &parts, subgraphs, at)?),
        };
        Ok(Box::new(Phases::new(job, from, training, self.whole(table))))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        mut state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let table = match &self.rows {
            Some((training, _)) => Some(PartitionTable::of_model(&self.parts(training), job, &mut state)?),
            None => None,
        };
        Ok(Box::new(Phases::alone(job, over, self.whole(table))?))
    }
}
