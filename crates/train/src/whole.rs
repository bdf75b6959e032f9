//! Inference with all neighbours, layer by layer over the whole graph. A layer is computed block by block: some nodes, all
//! their neighbours, and the rows of those, which come from the strategy for the first layer and from what the layer
//! before wrote for the others. Hidden rows stay in memory where they fit and go to files of the run where they do not,
//! so that any graph can be inferred inside the budget that trained it.

use crate::evaluate::Context;
use crate::memory::{Bytes, Processor};
use crate::{Learner, Result, RunConfig, TrainError};
use esker_io::{Access, Disk, Layout, Options, Piece, Queue, SequentialWriter, ThisMachine};
use esker_nn::{Backend, HostRows, Shape, StepShape, memory_bytes};
use esker_sample::{Batches, Bound, Direction, Position, SampleError};
use esker_store::{Dataset, Elements, file};
use esker_strategies::{Evaluation, Job};
use esker_types::{ByteCount, NodeId};
use rayon::prelude::*;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Samples that a source of blocks holds: one being made, one waiting, one being inferred.
const SAMPLES: u64 = 3;
/// Offsets read at a time while blocks are cut.
const CHUNK: usize = 1 << 15;
/// No block needs more rows than this to be worth its set-up.
const MOST_ROWS: u64 = 1 << 20;

/// Rows are brought to a file through memory of this size.
const COPY_BYTES: u64 = 1 << 20;

/// Takes the logits of some nodes.
pub type TakeLogits<'a, B> = &'a mut dyn FnMut(&[NodeId], &<B as Backend>::Matrix) -> Result<()>;

impl<B: Backend + Clone + 'static> Context<'_, B> {
    /// Infers `targets`, ascending, or every node, and hands their logits over, block by block.
    pub fn infer_whole(&mut self, targets: Option<&Arc<Vec<NodeId>>>, take: TakeLogits<B>) -> Result<()> {
        let nodes = self.job.dataset.manifest().nodes.count;
        let model = self.learner.model();
        let layers = model.layer_count();
        let (_, outputs) = self.learner.task();
        let (hidden_bytes, most) = (self.hidden_bytes(), self.whole_bytes);
        let processor = Processor::of(self.learner.backend());
        let least = least_rows(self.config, self.job)?;
        let least = block_bytes(self.config, self.job, outputs, least, processor)?;
        let in_memory = hidden_bytes <= most.host / 2 && hidden_bytes + least.host <= most.host;
        let host = if in_memory { most.host - hidden_bytes } else { most.host };
        let limit = rows_within(self.config, self.job, outputs, Bytes { host, ..most }, processor)?;
        if !in_memory {
            self.check_disk(hidden_bytes)?;
        }
        let mut input = Hidden::Features;
        for layer in 0..layers {
            let last = layer + 1 == layers;
            let over = if last { targets } else { None };
            let blocks =
                Arc::new(Blocks::cut(&self.job.dataset, self.job.direction, over, self.hops(), limit)?);
            let width = self.config.model.widths(layer, self.job.dim() as usize, outputs).1;
            let mut output = match (last, in_memory) {
                (true, _) => None,
                (false, true) => Some(HiddenWriter::Memory(Vec::with_capacity(nodes as usize * width))),
                (false, false) => Some(HiddenWriter::file(self.scratch, layer)?),
            };
            let mut source =
                self.strategy.evaluation(self.job, &self.evaluation(&blocks, layer == 0, limit))?;
            while let Some(mut batch) = source.next()? {
                if (self.stop)() {
                    return Err(TrainError::Stopped);
                }
                let rows = match &mut input {
                    Hidden::Features => self.learner.land(&mut batch),
                    other => other.gather(self.learner, &batch.sample.node_ids)?,
                };
                let logits = self.learner.infer_layer(layer, &batch.sample, &rows);
                match &mut output {
                    None => take(batch.sample.targets(), &logits)?,
                    Some(writer) => writer.append(self.learner, &logits)?,
                }
            }
            if let Some(writer) = output {
                input = writer.finish(width)?;
            }
        }
        Ok(())
    }

    /// Bytes of the hidden rows that are there at a time: those a layer reads and those it writes.
    fn hidden_bytes(&self) -> u64 {
        let nodes = self.job.dataset.manifest().nodes.count;
        let live = self.config.model.layers.saturating_sub(1).min(2) as u64;
        nodes.saturating_mul(self.config.model.hidden as u64 * 4).saturating_mul(live)
    }

    /// Hidden rows will need room on disk: better said now than in an hour.
    fn check_disk(&self, needed: u64) -> Result<()> {
        fs::create_dir_all(self.scratch).map_err(TrainError::io(self.scratch))?;
        match esker_io::available_bytes(self.scratch) {
            Ok(free) if free < needed => Err(TrainError::config(
                format!(
                    "{}: inference with all neighbours writes {} of hidden rows, and {} are free",
                    self.scratch.display(),
                    ByteCount(needed),
                    ByteCount(free)
                ),
                "make room, allow more memory, or evaluate with --eval sampled",
            )),
            _ => Ok(()),
        }
    }

    fn hops(&self) -> bool {
        !self.config.whole_settings().fanouts.is_empty()
    }

    fn evaluation(&self, blocks: &Arc<Blocks>, rows: bool, limit: u64) -> Evaluation {
        Evaluation {
            batches: blocks.clone(),
            largest_batch: limit,
            settings: self.config.whole_settings(),
            rows,
            sampling_bytes: Some(sampling_bytes(self.config, self.job, limit)),
        }
    }
}

/// What a block of so many rows, its lists' entries included, takes at most.
pub fn block_bytes(
    config: &RunConfig,
    job: &Job,
    outputs: usize,
    rows: u64,
    processor: Processor,
) -> Result<Bytes> {
    let layers = config.model.layers;
    let shape = StepShape {
        rows: vec![rows as usize; layers + 1],
        edges: vec![rows as usize; layers],
        seeds: 0,
        degrees: config.whole_settings().carry.degrees,
        input_gradient: false,
        memory: processor.memory(config),
    };
    let model = memory_bytes(&config.model, &config.optimizer, job.dim() as usize, outputs, &shape)?;
    let reading = Options::default().memory_bytes(rows) + rows * size_of::<Piece>() as u64;
    let sampling = sampling_bytes(config, job, rows);
    // Logits that are compared with labels are copied twice: where they were computed, and to the host.
    let compared = rows.saturating_mul(outputs as u64 * 4);
    let host = reading + compared + COPY_BYTES + sampling;
    let device = model.inference + compared;
    if processor.in_host_memory {
        return Ok(Bytes { host: host + device, device: 0 });
    }
    // Rows land from host memory.
    let widths = (0..layers).map(|layer| config.model.widths(layer, job.dim() as usize, outputs).0);
    let landing = rows.saturating_mul(widths.max().unwrap_or(0) as u64 * 4);
    Ok(Bytes { host: host + landing, device })
}

fn sampling_bytes(config: &RunConfig, job: &Job, rows: u64) -> u64 {
    let nodes = job.dataset.manifest().nodes.count;
    Bound::of_part(&config.whole_settings(), rows, (rows.min(nodes), rows), nodes).bytes(SAMPLES)
}

/// The fewest rows that a block must be able to have: a node and all its neighbours.
pub fn least_rows(config: &RunConfig, job: &Job) -> Result<u64> {
    let manifest = job.dataset.manifest();
    match job.direction {
        _ if config.whole_settings().fanouts.is_empty() => Ok(1),
        Direction::Incoming => Ok(1 + manifest.edges.max_in_degree),
        // The manifest knows the longest list of incoming edges only.
        direction => {
            let mut degrees = Degrees::open(&job.dataset, Some(direction))?;
            let mut longest = 0;
            for node in 0..manifest.nodes.count {
                longest = longest.max(degrees.of(node)?);
            }
            Ok(1 + longest)
        }
    }
}

/// The most rows that a block may have inside these bytes.
fn rows_within(
    config: &RunConfig,
    job: &Job,
    outputs: usize,
    most: Bytes,
    processor: Processor,
) -> Result<u64> {
    let manifest = job.dataset.manifest();
    let mut low = least_rows(config, job)?;
    let mut high = (manifest.nodes.count + manifest.edges.count * 2).min(MOST_ROWS).max(low);
    let needed = block_bytes(config, job, outputs, low, processor)?;
    if !needed.fit(most) {
        let (needed, left) = match needed.host > most.host {
            true => (needed.host, most.host),
            false => (needed.device, most.device),
        };
        return Err(TrainError::config(
            format!(
                "inference with all neighbours needs {} for the node with most of them, and {} are left for it",
                ByteCount(needed),
                ByteCount(left)
            ),
            "allow more memory, or evaluate with --eval sampled",
        ));
    }
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if block_bytes(config, job, outputs, middle, processor)?.fit(most) {
            low = middle
        } else {
            high = middle - 1
        }
    }
    Ok(low)
}

/// Nodes in order, cut so that no block has more rows than allowed, counting each neighbour as one.
struct Blocks {
    /// The nodes; every node where there is no list.
    nodes: Option<Arc<Vec<NodeId>>>,
    /// Block `b` has places `starts[b]..starts[b + 1]`.
    starts: Vec<u64>,
}

impl Blocks {
    fn cut(
        dataset: &Dataset,
        direction: Direction,
        nodes: Option<&Arc<Vec<NodeId>>>,
        hops: bool,
        limit: u64,
    ) -> Result<Blocks> {
        let count = nodes.map_or(dataset.manifest().nodes.count, |nodes| nodes.len() as u64);
        let mut degrees = Degrees::open(dataset, if hops { Some(direction) } else { None })?;
        let (mut starts, mut rows) = (vec![0], 0);
        for place in 0..count {
            let node = nodes.map_or(place, |nodes| nodes[place as usize].0);
            let more = 1 + degrees.of(node)?;
            if rows + more > limit && rows > 0 {
                starts.push(place);
                rows = 0;
            }
            rows += more;
        }
        if count > 0 {
            starts.push(count);
        }
        Ok(Blocks { nodes: nodes.cloned(), starts })
    }
}

impl Batches for Blocks {
    fn count(&self, _: u64) -> u64 {
        self.starts.len() as u64 - 1
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<(), SampleError> {
        out.clear();
        let bounds = self.starts.get(at.batch as usize).zip(self.starts.get(at.batch as usize + 1));
        let (start, end) = bounds.map_or((0, 0), |(start, end)| (*start, *end));
        match &self.nodes {
            Some(nodes) => out.extend_from_slice(&nodes[start as usize..end as usize]),
            None => out.extend((start..end).map(NodeId)),
        }
        Ok(())
    }

    fn identity(&self) -> String {
        format!("{} blocks", self.starts.len() - 1)
    }
}

/// Degrees of ascending nodes, streamed.
struct Degrees {
    lists: Vec<Offsets>,
}

struct Offsets {
    elements: Elements,
    chunk: Vec<u64>,
    /// Index of the chunk's first offset, and how many it has.
    first: u64,
    count: usize,
}

impl Degrees {
    fn open(dataset: &Dataset, direction: Option<Direction>) -> Result<Degrees> {
        let names: &[&str] = match direction {
            None => &[],
            Some(Direction::Incoming) => &[file::IN_OFFSETS],
            Some(Direction::Outgoing) => &[file::OUT_OFFSETS],
            Some(Direction::Both) => &[file::IN_OFFSETS, file::OUT_OFFSETS],
        };
        let mut lists = Vec::new();
        for name in names {
            let array = dataset.array(name).ok_or_else(|| {
                TrainError::config(
                    format!("{} has no {name}", dataset.directory().display()),
                    "import or generate it with --out-neighbours",
                )
            })?;
            lists.push(Offsets { elements: array.elements(0)?, chunk: vec![0; CHUNK], first: 0, count: 0 });
        }
        Ok(Degrees { lists })
    }

    fn of(&mut self, node: u64) -> Result<u64> {
        let mut sum = 0;
        for list in &mut self.lists {
            let start = list.at(node)?;
            sum += list.at(node + 1)?.saturating_sub(start);
        }
        Ok(sum)
    }
}

impl Offsets {
    /// Offset `index`; indices never fall by more than one.
    fn at(&mut self, index: u64) -> Result<u64> {
        while index >= self.first + self.count as u64 {
            // Keep the last: the next node's list starts where this one's ends.
            let kept = self.count.min(1);
            if kept == 1 {
                self.chunk[0] = self.chunk[self.count - 1];
            }
            self.first += (self.count - kept) as u64;
            let more = self.elements.fill_ids(&mut self.chunk[kept..])?;
            self.count = kept + more;
            if more == 0 {
                return Ok(self.chunk[kept.saturating_sub(1)]);
            }
        }
        Ok(self.chunk[(index - self.first) as usize])
    }
}

/// Where a layer reads its rows.
enum Hidden {
    /// From the strategy.
    Features,
    /// From memory.
    Memory(Vec<f32>, usize),
    /// From a file.
    File(Box<HiddenFile>),
}

struct HiddenFile {
    _file: Doomed,
    queue: Queue,
    width: usize,
    pieces: Vec<Piece>,
}

impl Hidden {
    /// The rows of nodes, on their way to the processor.
    fn gather<B: Backend + Clone + 'static>(
        &mut self,
        learner: &Learner<B>,
        nodes: &[NodeId],
    ) -> Result<B::Matrix> {
        let width = match self {
            Hidden::Features => unreachable!("feature rows come with the batch"),
            Hidden::Memory(_, width) => *width,
            Hidden::File(file) => file.width,
        };
        let mut rows = learner.backend().rows(nodes.len(), width);
        match self {
            Hidden::Features => {}
            Hidden::Memory(values, _) => {
                let (values, rows) = (&*values, rows.values_mut());
                learner.install(|| {
                    rows.par_chunks_mut(width).zip(nodes.par_iter()).with_min_len(256).for_each(
                        |(row, node)| row.copy_from_slice(&values[node.index() * width..][..width]),
                    );
                });
            }
            Hidden::File(file) => file.read(nodes, rows.values_mut())?,
        }
        Ok(learner.backend().land(rows, width))
    }
}

impl HiddenFile {
    fn read(&mut self, nodes: &[NodeId], values: &mut [f32]) -> Result<()> {
        let bytes = self.width as u64 * 4;
        self.pieces.clear();
        let places = nodes.iter().zip(0u64..);
        self.pieces.extend(places.map(|(node, at)| Piece { offset: node.0 * bytes, bytes, at: at * bytes }));
        Ok(self.queue.read(0, &self.pieces, bytemuck::cast_slice_mut(values))?)
    }
}

/// A file that goes when nobody uses it any more, however that comes. It can be computed again.
struct Doomed(PathBuf);

impl Drop for Doomed {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Where a layer writes its rows, node after node.
enum HiddenWriter {
    Memory(Vec<f32>),
    File(Doomed, SequentialWriter),
}

impl HiddenWriter {
    fn file(scratch: &Path, layer: usize) -> Result<HiddenWriter> {
        fs::create_dir_all(scratch).map_err(TrainError::io(scratch))?;
        // By process: two may infer with one run.
        let path = scratch.join(format!("hidden-{layer}-{}.partial", std::process::id()));
        let file = SequentialWriter::create(&path).map_err(TrainError::io(&path))?;
        Ok(HiddenWriter::File(Doomed(path), file))
    }

    fn append<B: Backend + Clone + 'static>(&mut self, learner: &Learner<B>, rows: &B::Matrix) -> Result<()> {
        let (count, width) = (rows.rows(), rows.columns());
        match self {
            HiddenWriter::Memory(all) => {
                let before = all.len();
                all.resize(before + count * width, 0.0);
                learner.read(rows, 0, &mut all[before..])
            }
            HiddenWriter::File(path, file) => {
                let most = (COPY_BYTES as usize / (4 * width)).max(1);
                let mut copy = vec![0.0; most.min(count) * width];
                for first in (0..count).step_by(most) {
                    let copy = &mut copy[..most.min(count - first) * width];
                    learner.read(rows, first, copy)?;
                    file.write_all(bytemuck::cast_slice(copy)).map_err(TrainError::io(&path.0))?;
                }
                Ok(())
            }
        }
    }

    fn finish(self, width: usize) -> Result<Hidden> {
        match self {
            HiddenWriter::Memory(values) => Ok(Hidden::Memory(values, width)),
            HiddenWriter::File(path, file) => {
                file.finish().map_err(TrainError::io(&path.0))?;
                let options = Options::default();
                let queue = ThisMachine.open(&[Layout::file(&path.0)], Access::Read, &options)?.queue()?;
                Ok(Hidden::File(Box::new(HiddenFile { _file: path, queue, width, pieces: Vec::new() })))
            }
        }
    }
}
