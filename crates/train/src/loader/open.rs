//! An open loader: its memory is summed up and granted before anything large is allocated, and its strategy prepares.

use super::config::{LoaderConfig, LoaderOrder, SeedOrder};
use super::run::{LoaderRun, RunStart};
use super::scratch::ScratchFolder;
use super::shared::{MemoryShare, SharedMemory};
use crate::memory::THREAD_BYTES;
use crate::open::{LEAST_PILOT_BYTES, RunControl, default_disk_budget};
use crate::{GivenEpoch, Result, TrainError};
use esker_device::Device;
use esker_sample::{Fanout, HopOrdered, Position, Seeds};
use esker_store::Dataset;
use esker_strategies::{
    AfterPilot, BatchRoom, Grant, Job, JobOutline, MemoryTable, Needs, OutOfCore, Phase, Prepared,
    RunPosition, Strategy, grant,
};
use esker_types::{ByteCount, StopSignal};
use std::sync::Arc;

/// Batches outside the pipeline: the caller's, one that is ready, one that is being handed over.
const HANDED_OUT: u64 = 3;
/// Of the memory that a strategy does not ask for, batches that are larger than expected get one part in this many of what
/// it does.
const SPARE_PART: u64 = 4;
/// One part in this many of a loader's memory is left to the allocator, which shares its heaps with the caller's.
const SLACK_PART: u64 = 8;
/// The line of it.
const SLACK: &str = "left to the allocator";
/// Memory of the allocator and the I/O backend. The program itself is the caller's.
const PROGRAM_BYTES: u64 = 4 << 20;

/// How a loader uses its memory.
#[derive(Debug, Clone)]
pub struct LoaderPlan {
    /// Memory, line by line.
    pub table: MemoryTable,
    /// Batches with rows in its pipeline at a time.
    pub prefetch_depth: usize,
    /// The smallest budget that works.
    pub smallest_bytes: u64,
    /// Nodes and edges of the largest batch that is expected.
    pub largest: (u64, u64),
    /// The most that its files may take on disk, and the disk budget.
    pub disk_bytes: (u64, u64),
}

/// Batches of a dataset, without a trainer.
pub struct Loader<D: Device> {
    config: LoaderConfig,
    /// How its memory is used.
    pub plan: LoaderPlan,
    device: D,
    job: Job,
    order: SeedOrder,
    strategy: Box<dyn Strategy<D>>,
    prepared: Option<Prepared>,
    scratch: ScratchFolder,
    share: MemoryShare,
    /// Epochs of a given order so far, to name their files.
    given: u64,
}

impl<D: Device> Loader<D> {
    /// Samples some batches for their size, sums up memory, and takes it from what the loaders of the process share. Fails
    /// with the smallest memory that would do.
    pub fn open(
        device: D,
        dataset: Arc<Dataset>,
        config: LoaderConfig,
        shared: &SharedMemory,
        control: RunControl,
    ) -> Result<Loader<D>> {
        config.check()?;
        check_dataset(&config, &dataset)?;
        let scratch = ScratchFolder::inside(&config.scratch)?;
        let (strategy, order) = (config.strategy.build(device.clone()), config.seed_order()?);
        let outline = outline(&config, dataset, &scratch);
        let mut share = shared.take(config.memory.min(shared.left()).max(least_share(&outline)))?;
        let mut job = Job::new(outline, order.batches()?)?;
        (job.progress, job.stop) = (control.progress, control.stop);
        if job.count(Phase::Train { epoch: 0 }) == 0 {
            return Err(TrainError::NoLoadedBatch { batch: config.batch, seeds: config.seeds.len() });
        }
        let needs = |job: &JobOutline| strategy.needs(job);
        let after = match needs(&job)? {
            Needs { topology_in_memory: true, .. } => AfterPilot::Kept,
            Needs { samples_beforehand: true, .. } => AfterPilot::Lent,
            _ => AfterPilot::Dropped,
        };
        let program = program_bytes(&config).saturating_add(seed_bytes(&config));
        job.pilot(share.bytes().saturating_sub(program).max(LEAST_PILOT_BYTES), after)?;
        job.room.step_bytes = handed_bytes(&config, &job);
        let others = |job: &JobOutline| Ok::<_, TrainError>(others(&config, job));
        let granted = grant(&needs, &job, share.bytes() - share.bytes() / SLACK_PART, &others)?;
        let granted = granted.map_err(|table| too_little(table, share.bytes()))?;
        let smallest_bytes = match grant(&needs, &job, 0, &others)? {
            Ok(grant) => with_slack(grant.table).total(),
            Err(table) => with_slack(table).total(),
        };
        let disk_bytes = (needs(&job)?.disk_bytes, job.out_of_core.disk_bytes);
        let plan = take_grant(&mut job, granted, &mut share, smallest_bytes, disk_bytes);
        Ok(Loader { config, plan, device, job, order, strategy, prepared: None, scratch, share, given: 0 })
    }

    /// The configuration.
    pub fn config(&self) -> &LoaderConfig {
        &self.config
    }

    /// The memory that it has taken of what the process allows.
    pub fn share(&self) -> &MemoryShare {
        &self.share
    }

    /// The dataset.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.job.dataset
    }

    /// Number of batches in an epoch of a planned order.
    pub fn batches_of(&self, epoch: u64) -> u64 {
        self.job.count(Phase::Train { epoch })
    }

    /// Number of epochs of a planned order.
    pub fn epochs(&self) -> u64 {
        self.job.epochs
    }

    /// Asks for the end of work before the first batch.
    pub fn stop_signal(&self) -> StopSignal {
        self.job.stop.clone()
    }

    /// Opens and loads what batches need, and does the work on disk before the first. What was prepared is used again. Of
    /// a given order, packed rows are made when an epoch is known.
    pub fn prepare(&mut self) -> Result<&Prepared> {
        if self.prepared.is_none() {
            let prepared = match self.packs_each_epoch() {
                true => Prepared::default(),
                false => self.strategy.prepare(&self.job)?,
            };
            if let LoaderOrder::Planned { epochs, .. } = self.config.order {
                let sampled = self.config.epochs_sampled.or(prepared.epochs_sampled).unwrap_or(epochs);
                self.job.epochs_sampled = Some(sampled.min(epochs));
            }
            self.prepared = Some(prepared);
        }
        Ok(self.prepared.as_ref().expect("it was just prepared"))
    }

    /// The batches of a planned order, from a position to the end of its last epoch.
    pub fn run(&mut self, from: Position) -> Result<LoaderRun> {
        if matches!(self.config.order, LoaderOrder::Given { .. }) {
            return Err(TrainError::NoPlannedOrder);
        }
        self.prepare()?;
        let mut job = self.job.clone();
        job.stop = StopSignal::default();
        let source = self.strategy.batches(&job, RunPosition::train(from.epoch, from.batch), None)?;
        LoaderRun::start(RunStart {
            source,
            handover: self.handover(),
            order: self.order.clone(),
            stop: job.stop,
            files: None,
        })
    }

    /// The batches of an epoch whose order is given, from batch `from` on.
    pub fn run_given(&mut self, epoch: GivenEpoch, from: u64) -> Result<LoaderRun> {
        let order = self.config.given_order(epoch.batches)?;
        self.prepare()?;
        let mut job = self.job.clone();
        job.batches = order.batches()?;
        (job.settings.seed, job.epochs, job.epochs_sampled) = (epoch.seed, 1, None);
        job.epoch_batches = job.batches.count(0);
        let from = Position { epoch: 0, batch: from };
        let mut files = None;
        if self.packs_each_epoch() {
            self.given += 1;
            let folder = ScratchFolder::inside(self.scratch.path())?;
            job.out_of_core.prepared = Some(folder.path().join(format!("packed-{}", self.given)));
            files = Some(folder);
            // Rows of the epoch before are free when their strategy is.
            self.strategy = self.config.strategy.build(self.device.clone());
            self.strategy.prepare(&job)?;
        }
        job.stop = StopSignal::default();
        let source = self.strategy.batches(&job, RunPosition::train(0, from.batch), None)?;
        LoaderRun::start(RunStart { source, handover: self.handover(), order, stop: job.stop, files })
    }

    /// Whether the strategy's work on disk depends on the batches of an epoch, and is done again for each.
    fn packs_each_epoch(&self) -> bool {
        let is_given = matches!(self.config.order, LoaderOrder::Given { .. });
        is_given && self.config.strategy.keeps_beside_dataset()
    }

    fn handover(&self) -> super::batch::Handover {
        let dim = self.job.dim() as usize;
        super::batch::Handover { hops: self.config.fanouts.len(), dim, memory: Arc::default() }
    }
}

/// Fails if the dataset does not have what is asked for.
fn check_dataset(config: &LoaderConfig, dataset: &Dataset) -> Result<()> {
    let manifest = dataset.manifest();
    if config.features && manifest.nodes.features.is_none() {
        return Err(TrainError::NoFeatures { dataset: dataset.directory().to_path_buf() });
    }
    let nodes = manifest.nodes.count;
    if let Some(seed) = listed(&config.seeds).iter().find(|seed| seed.0 >= nodes) {
        return Err(TrainError::Sample(esker_sample::SampleError::Seed {
            found: seed.0,
            last: nodes.saturating_sub(1),
        }));
    }
    Ok(())
}

/// The seeds, if they are listed.
fn listed(seeds: &Seeds) -> &[esker_types::NodeId] {
    match seeds {
        Seeds::Nodes(nodes) => nodes,
        Seeds::Shared(nodes) => nodes,
        _ => &[],
    }
}

/// The properties of the job that determine memory.
fn outline(config: &LoaderConfig, dataset: Arc<Dataset>, scratch: &ScratchFolder) -> JobOutline {
    let seeds = config.seeds.len();
    let packed = config.prepared.as_deref().unwrap_or(dataset.directory());
    let folder = if config.strategy.keeps_beside_dataset() { packed } else { scratch.path() };
    let disk_bytes = config.disk_budget.unwrap_or_else(|| default_disk_budget(folder));
    JobOutline {
        largest_batch: config.batch.min(match config.order {
            LoaderOrder::Planned { .. } => seeds,
            // Samplers may draw seeds repeatedly.
            LoaderOrder::Given { .. } => u64::MAX,
        }),
        epochs: config.epochs(),
        epochs_sampled: config.epochs_sampled,
        epoch_batches: match config.order {
            LoaderOrder::Planned { rank, .. } => seeds.div_ceil(config.batch).div_ceil(rank.world_size),
            LoaderOrder::Given { batches } => batches,
        },
        settings: config.settings(config.seed()),
        known: None,
        direction: config.direction,
        features: config.features,
        evaluation: None,
        threads: config.threads,
        samplers: 1,
        prefetch_depth: 1,
        steps_in_flight: 0,
        strategy_bytes: 0,
        device_cache_bytes: 0,
        embedding_device_bytes: u64::MAX,
        room: BatchRoom::default(),
        columns: config.columns.clone(),
        history: None,
        residents: None,
        out_of_core: OutOfCore {
            scratch: scratch.path().to_path_buf(),
            disk_bytes,
            disk_bytes_explicit: config.disk_budget.is_some(),
            prepared: config.prepared.clone(),
            tables: scratch.path().to_path_buf(),
            ..OutOfCore::default()
        },
        dataset,
    }
}

/// Gives a job the memory of a grant, and returns to the process what it does not use.
fn take_grant(
    job: &mut Job,
    granted: Grant,
    share: &mut MemoryShare,
    smallest_bytes: u64,
    disk_bytes: (u64, u64),
) -> LoaderPlan {
    let Grant { mut table, prefetch_depth, samplers, least_strategy_bytes, spare, takes_the_rest } = granted;
    let spare = if takes_the_rest { spare } else { spare.min(table.total() / SPARE_PART) };
    let to_strategy = if takes_the_rest { spare } else { 0 };
    table.add(if takes_the_rest { "caches and prefetched batches" } else { "larger batches" }, spare);
    // What rounding leaves is the allocator's.
    let slack = table.total().div_ceil(SLACK_PART - 1).min(share.bytes() - table.total());
    table.add(SLACK, slack);
    share.keep(table.total());
    (job.prefetch_depth, job.samplers) = (prefetch_depth, samplers);
    job.strategy_bytes = least_strategy_bytes + to_strategy;
    job.room.spare_bytes = spare - to_strategy;
    job.room.budget_bytes = table.total();
    job.settle_topology();
    let bound = job.training_bound();
    LoaderPlan { table, prefetch_depth, smallest_bytes, largest: (bound.nodes, bound.edges), disk_bytes }
}

/// The refusal of a loader that has too little memory.
fn too_little(table: MemoryTable, allowed: u64) -> TrainError {
    let table = with_slack(table);
    TrainError::LoaderMemory { needed: ByteCount(table.total()), allowed: ByteCount(allowed), table }
}

/// A table with what is left to the allocator.
fn with_slack(mut table: MemoryTable) -> MemoryTable {
    let slack = table.total().div_ceil(SLACK_PART - 1);
    table.add(SLACK, slack);
    table
}

/// Less than this no loader takes: what it has in memory before its batches are known.
fn least_share(job: &JobOutline) -> u64 {
    job.dataset.manifest().nodes.count.min(PROGRAM_BYTES)
}

/// Memory of the loader's threads.
fn program_bytes(config: &LoaderConfig) -> u64 {
    PROGRAM_BYTES + (config.threads as u64 * 2 + 1) * THREAD_BYTES
}

/// Memory of seeds, and of the order of an epoch that is given.
fn seed_bytes(config: &LoaderConfig) -> u64 {
    let listed = listed(&config.seeds).len() as u64 * 8;
    match config.order {
        LoaderOrder::Planned { .. } => listed,
        LoaderOrder::Given { batches } => {
            listed.saturating_add(batches.saturating_mul(config.batch * 8 + size_of::<Vec<u64>>() as u64))
        }
    }
}

/// Memory of the batches that are handed out.
fn handed_bytes(config: &LoaderConfig, job: &JobOutline) -> u64 {
    let bound = job.training_bound();
    // Repeated seeds have rows and edges of their own.
    let repeated = match config.fanouts.first() {
        Some(Fanout::AtMost(most)) => config.batch.saturating_mul(*most as u64).min(bound.edges),
        _ => bound.edges,
    };
    let nodes = bound.nodes.saturating_add(config.batch);
    let rows = nodes.saturating_mul(job.dim() * 4 + 8);
    let graph = HopOrdered::bytes_for(nodes, bound.edges.saturating_add(repeated));
    let columns = config.columns.iter().filter_map(|name| job.dataset.array(name));
    let columns = columns.map(|array| array.entry()).map(|entry| {
        let count = if entry.name.starts_with("node-") { nodes } else { bound.edges };
        count.saturating_mul(entry.row_bytes())
    });
    let batch = columns.fold(rows.saturating_add(graph), u64::saturating_add);
    batch.saturating_mul(HANDED_OUT)
}

/// Memory apart from the strategy's.
fn others(config: &LoaderConfig, job: &JobOutline) -> MemoryTable {
    let mut table = MemoryTable::default();
    let from =
        format!("{} + {} x {}", ByteCount(PROGRAM_BYTES), config.threads * 2 + 1, ByteCount(THREAD_BYTES));
    table.add_from("the loader and its threads", program_bytes(config), from);
    table.add("seeds and their order", seed_bytes(config));
    let from = "the caller's, one that is ready, one on its way";
    table.add_from("batches handed out", handed_bytes(config, job), from);
    table
}
