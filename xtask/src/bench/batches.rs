//! Batches of the training nodes as training would sample them, and their row accesses. Several measurements use them.

use anyhow::{Context, bail, ensure};
use esker_fetch::{AccessFile, StoredRow};
use esker_plan::{AccessTrace, Hottest};
use esker_sample::bulk::{Bulk, positions};
use esker_sample::order::{Batching, Shuffled};
use esker_sample::trace::TraceHeader;
use esker_sample::{
    AnyTopology, Batches, Carry, Direction, Fanout, Form, InMemory, NodeBatches, Position, Sample, Seeds,
    Settings, StoredId,
};
use esker_store::{Dataset, SplitOver, file};
use esker_types::{Budget, ByteCount, NodeId};
use std::path::{Path, PathBuf};

/// Which batches, and where they are worked on.
#[derive(clap::Args, Clone)]
pub struct BatchFlags {
    /// The dataset
    pub dataset: PathBuf,
    /// Neighbours a node takes, hop by hop from the targets
    #[arg(long, value_delimiter = ',', default_value = "10,10,10")]
    pub fanout: Vec<Fanout>,
    /// Seeds of a batch
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    pub batch: u64,
    /// Batches; default: an epoch
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub batches: Option<u64>,
    /// Seed of order and draws
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where files go that are of no use afterwards; default: the system's folder for such
    #[arg(long)]
    pub scratch: Option<PathBuf>,
    /// Memory to use; default: four fifths of what is available
    #[arg(long)]
    pub memory: Option<ByteCount>,
}

/// A dataset with its topology in memory, and the memory limit.
pub struct OpenedGraph {
    pub dataset: Dataset,
    pub graph: AnyTopology,
    pub most_bytes: u64,
}

impl BatchFlags {
    pub fn open(&self) -> anyhow::Result<OpenedGraph> {
        let dataset = Dataset::open(&self.dataset)?;
        let most_bytes = Budget::resolve(self.memory).host_bytes;
        let graph = AnyTopology::load(&dataset, Direction::Incoming, most_bytes)?;
        Ok(OpenedGraph { dataset, graph, most_bytes })
    }

    /// The folder for temporary files.
    pub fn scratch(&self) -> PathBuf {
        self.scratch.clone().unwrap_or_else(std::env::temp_dir)
    }

    /// The name of the dataset.
    pub fn name(&self) -> String {
        self.dataset.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn settings(&self) -> Settings {
        let (form, carry) = (Form::Dense, Carry::default());
        Settings { seed: self.seed, fanouts: self.fanout.clone(), form, carry }
    }

    fn seeds(&self, dataset: &Dataset) -> anyhow::Result<NodeBatches<Shuffled, Seeds>> {
        let splits = dataset.manifest().splits.as_ref().filter(|splits| splits.over == SplitOver::Nodes);
        let Some(splits) = splits.filter(|splits| splits.train > 0) else {
            bail!("{} has no training nodes; import or generate it with a split", self.dataset.display());
        };
        let mut seeds = vec![0u64; splits.train as usize];
        let array = dataset.array(file::SPLIT_TRAIN).context("the training nodes are not there")?;
        array.elements(0)?.fill_ids(&mut seeds)?;
        let batching = Batching::new(splits.train, self.batch, false)?;
        let order = Shuffled { batching, seed: self.seed };
        Ok(NodeBatches::new(order, Seeds::Nodes(seeds.into_iter().map(NodeId).collect()))?)
    }

    /// The header of a trace of these batches.
    pub fn trace_header(&self, dataset: &Dataset) -> anyhow::Result<TraceHeader> {
        let manifest = dataset.manifest();
        Ok(TraceHeader {
            dataset: manifest.id.clone(),
            nodes: manifest.nodes.count,
            edges: manifest.edges.count,
            relations: manifest.edges.relations.as_ref().map_or(0, |relations| relations.count),
            direction: Direction::Incoming,
            batches: self.seeds(dataset)?.identity(),
            settings: self.settings(),
        })
    }

    /// Samples the batches and passes them on in order.
    pub fn sample<W: StoredId>(
        &self,
        dataset: &Dataset,
        graph: &InMemory<W>,
        most_bytes: u64,
        take: impl FnMut(Position, &Sample) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (batches, settings) = (self.seeds(dataset)?, self.settings());
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let most_bytes = most_bytes.saturating_sub(graph.bytes());
        let bulk = Bulk { graph, batches: &batches, settings: &settings, threads, most_bytes };
        let accessed = self.batches.unwrap_or_else(|| batches.count(0));
        let all = positions(&batches, Position { epoch: 0, batch: 0 }, u64::MAX).take(accessed as usize);
        bulk.run(all, take)
    }

    /// The row accesses of the batches.
    pub fn accesses<W: StoredId, R: StoredRow>(
        &self,
        dataset: &Dataset,
        graph: &InMemory<W>,
        most_bytes: u64,
    ) -> anyhow::Result<AccessFile<R>> {
        let mut accesses = AccessFile::create(&self.scratch())?;
        self.sample(dataset, graph, most_bytes, |_, sample| Ok(accesses.append(&sample.node_ids, &[])?))?;
        accesses.close();
        Ok(accesses)
    }
}

/// The given percentage of all rows.
pub fn slots_of(percent: f64, nodes: u64, flag: &str) -> anyhow::Result<u64> {
    ensure!((0.0..=100.0).contains(&percent), "{flag} {percent}: sizes go from 0 to 100");
    Ok((nodes as f64 * percent / 100.0).round() as u64)
}

/// The rows read from disk if the most accessed rows are cached in memory.
pub struct Misses<R> {
    /// Of each batch, in ascending row order.
    pub rows: AccessFile<R>,
    /// Number of cached rows.
    pub cached: u64,
}

impl<R: StoredRow> Misses<R> {
    /// Assigns the cache slots; `folder` is for an unlinked temporary file.
    pub fn of(
        mut accesses: &AccessFile<R>,
        nodes: u64,
        slots: u64,
        folder: &Path,
    ) -> anyhow::Result<Misses<R>> {
        let (mut hottest, mut accessed) = (Hottest::new(nodes), Vec::new());
        for batch in 0..accesses.batches() {
            accesses.read(batch, &mut accessed)?;
            hottest.see(&accessed);
        }
        hottest.choose(slots);
        let (mut rows, mut missed) = (AccessFile::create(folder)?, Vec::new());
        for batch in 0..accesses.batches() {
            accesses.read(batch, &mut accessed)?;
            missed.clear();
            let on_disk = accessed.iter().filter(|row| hottest.slot(**row).is_none());
            missed.extend(on_disk.map(|row| NodeId(row.index() as u64)));
            missed.sort_unstable();
            rows.append(&missed, &[])?;
        }
        rows.close();
        Ok(Misses { rows, cached: hottest.cached() })
    }
}
