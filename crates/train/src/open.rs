//! An open run. Its dataset is read once, its job is made once, and its memory is summed up before anything large is
//! allocated.

use crate::checkpoint::Checkpoint;
use crate::early::EarlyRows;
use crate::embeddings::build_strategy;
use crate::evaluate::{Context, inference_of, inference_over};
use crate::link::{LinkConfig, LinkObjective, LinkTask, Links, RelationStart, bucket_batches, link_batches};
use crate::memory::{DeviceProfile, Plan, Purpose, loaded_links, program_bytes, too_little};
use crate::objective::Objective;
use crate::partition_orders::{CountedBuckets, OrderOverPartitions};
use crate::peak::PeakMeter;
use crate::record::STATE;
use crate::split::{Choosing, HistorySplit};
use crate::state::SavedWith;
use crate::task::{LabelKind, LabelledNodes, Task};
use crate::whole::{NoBatches, least_bytes};
use crate::{
    EvaluationMode, Learner, MetricName, OrderName, ResidentOnly, Result, RunConfig, RunDirectory, Step,
    StepsRecord, TrainError, WallClock, history,
};
use esker_nn::Backend;
use esker_nn::LinkMath;
use esker_sample::order::{BatchGroup, BatchStep, Batching, Groups, Order, Sequential, Shuffled};
use esker_sample::{AnyTopology, Batches, Edge, NodeBatches, NodeSet, Position, SampleError, Seeds, Targets};
use esker_store::Dataset;
use esker_strategies::{
    AfterPilot, Batch, BatchRoom, BatchSource, CheckpointReader, EvaluationOutline, EvaluationSchedule,
    Feedback, Inference, Job, JobOutline, JobPartitioning, LoadedTopology, Needs, OutOfCore,
    PartitionedGraph, Phase, Prepared, Residents, RunPosition, Strategy, StrategyKind, StrategyNeeds,
};
use esker_types::{NodeId, Progress, Silent, StopSignal, Unit};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Larger traces gain little (Ginex, section 5.4).
const MOST_DISK_BYTES: u64 = 100_000_000_000;
/// Largest number of batches sampled at a time if the training device has its own memory.
const MOST_SAMPLERS: usize = 8;

/// The pilot may use this much in any case, so that a refusal names the smallest budget. A run needs more than a pilot.
pub(crate) const LEAST_PILOT_BYTES: u64 = 64 << 20;

/// Epochs whose batches are counted one by one.
const MOST_COUNTED_EPOCHS: u64 = 1000;

/// Inference over a whole graph gains little from more host memory, if its rows stay on a device.
const LOADING_BYTES: u64 = 512 << 20;
/// Output that may wait to be written: some tenths of a second of a disk.
const MOST_OUTPUT_BYTES: u64 = 1 << 30;

/// Progress and stop signal of the work before training.
#[derive(Clone)]
pub struct RunControl {
    /// Receives progress.
    pub progress: Arc<dyn Progress + Send + Sync>,
    /// Ends the work.
    pub stop: StopSignal,
    /// Only the work on disk before training is wanted.
    pub prepare_only: bool,
    /// Rows that are read already.
    pub early_rows: Option<EarlyRows>,
    /// Edges by pair of partitions that an earlier plan counted.
    pub counted: CountedBuckets,
}

impl Default for RunControl {
    fn default() -> RunControl {
        let (progress, stop) = (Arc::new(Silent), StopSignal::default());
        RunControl {
            progress,
            stop,
            prepare_only: false,
            early_rows: None,
            counted: CountedBuckets::default(),
        }
    }
}

/// Called when a run can start. It may fail.
type Begun<'a> = &'a mut dyn FnMut(&RunConfig) -> Result<()>;

/// A run without its progress.
pub struct OpenRun<B: Backend> {
    /// The configuration.
    pub config: RunConfig,
    /// What is learned: labels. Empty if links are.
    pub task: Task,
    /// Links, if they are learned.
    pub links: Option<Links>,
    /// How memory is used.
    pub plan: Plan,
    pub(crate) job: Job,
    pub(crate) strategy: Box<dyn Strategy<B>>,
    pub(crate) learner: Learner<B>,
    prepared: Prepared,
    scratch: PathBuf,
    peak: PeakMeter,
    /// See [`Needs::trains_rows`](esker_strategies::Needs).
    trains_rows: bool,
    /// The state that the model was saved with, if it was loaded from a run.
    state: Option<SavedWith>,
    /// Seconds of starting and preparing.
    clock: WallClock,
    /// How memory was divided between caches and a history, if it was chosen now.
    pub(crate) split: Option<HistorySplit>,
    /// Rows that are read already, and memory of output that waits to be written: they take turns.
    pub(crate) early_rows: Option<EarlyRows>,
    output_bytes: u64,
}

impl<B: LinkMath> OpenRun<B> {
    /// Sums up memory without starting: the plan of [`OpenRun::new`], or why it would fail. Some batches are sampled for
    /// their size.
    pub fn plan_only(backend: &B, config: &RunConfig) -> Result<Plan> {
        OpenRun::plan_watched(backend, config, RunControl::default())
    }

    /// The same, with progress reports and a stop signal.
    pub fn plan_watched(backend: &B, config: &RunConfig, control: RunControl) -> Result<Plan> {
        check_initial(config)?;
        let (checked, device) = (CheckedDataset::new(config)?, DeviceProfile::of(backend));
        let outline = checked.outline(config, Purpose::Train, device, Path::new(""));
        let strategy = build_strategy(config, backend);
        let needs = |job: &JobOutline| strategy.needs(job);
        let (_, job) = piloted(config, outline, Purpose::Train, device, control, &needs)?;
        Plan::new(config, &needs, &job, checked.columns(), Purpose::Train, device)
    }

    /// Sums up memory, and only then loads what the run needs. `scratch` is the directory of hidden rows.
    pub fn new(backend: B, config: RunConfig, scratch: PathBuf) -> Result<OpenRun<B>> {
        OpenRun::new_watched(backend, config, scratch, RunControl::default())
    }

    /// The same, with progress reports and a stop signal for the work before training.
    pub fn new_watched(
        backend: B,
        config: RunConfig,
        scratch: PathBuf,
        control: RunControl,
    ) -> Result<OpenRun<B>> {
        let strategy = build_strategy(&config, &backend);
        OpenRun::with_strategy(backend, config, scratch, control, strategy)
    }

    /// The same, with another strategy than the configured one: for instance, one that adds rows which training
    /// changes.
    pub fn with_strategy(
        backend: B,
        config: RunConfig,
        scratch: PathBuf,
        control: RunControl,
        strategy: Box<dyn Strategy<B>>,
    ) -> Result<OpenRun<B>> {
        OpenRun::begin(backend, config, scratch, control, strategy, &mut |_| Ok(()))
    }

    /// The same. `begun` is called when the run can start, before the strategy does its work on disk.
    pub(crate) fn begin(
        backend: B,
        config: RunConfig,
        scratch: PathBuf,
        control: RunControl,
        strategy: Box<dyn Strategy<B>>,
        begun: Begun<'_>,
    ) -> Result<OpenRun<B>> {
        OpenRun::open(backend, config, scratch, Purpose::Train, control, strategy, begun)
    }

    fn open(
        backend: B,
        mut config: RunConfig,
        scratch: PathBuf,
        purpose: Purpose,
        mut control: RunControl,
        mut strategy: Box<dyn Strategy<B>>,
        begun: Begun<'_>,
    ) -> Result<OpenRun<B>> {
        let started = Instant::now();
        let (checked, device) = (CheckedDataset::new(&config)?, DeviceProfile::of(&backend));
        let outline = checked.outline(&config, purpose, device, &scratch);
        let (peak, needs) = (PeakMeter::start(), |job: &JobOutline| strategy.needs(job));
        let early_rows = control.early_rows.take();
        let (learned, mut job) = piloted(&config, outline, purpose, device, control, &needs)?;
        let planned = |config: &RunConfig, job: &mut Job| {
            let plan = Plan::new(config, &needs, job, checked.columns(), purpose, device)?;
            take_plan(job, &plan, purpose);
            Ok::<Plan, TrainError>(plan)
        };
        let mut plan = planned(&config, &mut job)?;
        let early_rows = early_rows.filter(|early| early.most_bytes() <= plan.whole_bytes.host);
        let (starting, preparing, mut split) = (started.elapsed(), Instant::now(), None);
        if config.chooses_history() && job.outline.history.is_some() {
            begun(&config)?;
            let choosing = Choosing::new(&backend, &learned.task, &plan, &planned, &checked);
            split = Some(choosing.choose(&mut config, &mut job)?);
            plan = planned(&config, &mut job)?;
        }
        let objective = learned.objective(&config, &backend)?;
        backend.set_reuse_bytes(plan.reuse_bytes);
        let learner = Learner::new(backend, &config, checked.features, objective, job.pool.clone())?;
        if split.is_none() {
            begun(&config)?;
            job.history = history::find(&mut config, &job)?;
        }
        let (trains_rows, mut prepared) = (strategy.needs(&job)?.trains_rows, strategy.prepare(&job)?);
        prepared.notes.extend(split.iter().map(HistorySplit::note));
        plan.divide_caches(&prepared.caches);
        let clock = WallClock::opened(starting, preparing.elapsed());
        keep_epochs_sampled(&mut config, &mut job, &prepared);
        Ok(OpenRun {
            config,
            task: learned.task,
            links: learned.links,
            plan,
            job,
            strategy,
            learner,
            prepared,
            scratch,
            peak,
            trains_rows,
            state: None,
            clock,
            split,
            early_rows,
            output_bytes: 0,
        })
    }

    /// Loads the best model of a run directory, or its last if no best model was chosen, with the configuration of
    /// [`RunConfig::to_infer`].
    pub fn load(backend: B, run: &RunDirectory, config: RunConfig) -> Result<OpenRun<B>> {
        OpenRun::load_watched(backend, run, config, RunControl::default())
    }

    /// The same, with a stop signal for loading and for what follows.
    pub fn load_watched(
        backend: B,
        run: &RunDirectory,
        config: RunConfig,
        control: RunControl,
    ) -> Result<OpenRun<B>> {
        let strategy = build_strategy(&config, &backend);
        OpenRun::load_controlled(backend, run, config, control, strategy)
    }

    /// The same, with another strategy than the configured one.
    pub fn load_with(
        backend: B,
        run: &RunDirectory,
        config: RunConfig,
        strategy: Box<dyn Strategy<B>>,
    ) -> Result<OpenRun<B>> {
        OpenRun::load_controlled(backend, run, config, RunControl::default(), strategy)
    }

    fn load_controlled(
        backend: B,
        run: &RunDirectory,
        config: RunConfig,
        control: RunControl,
        strategy: Box<dyn Strategy<B>>,
    ) -> Result<OpenRun<B>> {
        let path = [run.best_path(), run.last_path()].into_iter().find(|path| path.exists());
        let Some(path) = path else {
            return Err(TrainError::NoWeights { run: run.path().to_path_buf() });
        };
        let weights = Checkpoint::read(&path)?;
        let (scratch, begun) = (run.scratch_path(), &mut |_: &RunConfig| Ok(()));
        let mut opened = OpenRun::open(backend, config, scratch, Purpose::Infer, control, strategy, begun)?;
        opened.learner.load_model(&weights.model)?;
        let parts = weights.source_state(&path)?;
        opened.state = (!parts.is_empty()).then(|| SavedWith { folder: run.state_path(), parts });
        Ok(opened)
    }

    /// Batches from a position on, with the state of an earlier process if there is any. A trainer takes them.
    pub fn source(
        &mut self,
        from: RunPosition,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<B>>> {
        Ok(self.strategy.batches(&self.job, from, state)?)
    }

    /// Removes validation and test: a source then yields only training batches.
    pub fn leave_out_evaluation(&mut self) {
        self.job.schedule = EvaluationSchedule::default();
    }

    /// Ends the run after this many batches of its first epoch. Nothing is sampled or planned for later ones.
    pub fn end_after(&mut self, batches: u64) {
        let all = self.job.batches.clone();
        self.job.batches = Arc::new(FirstBatches { all, batches });
        self.job.epochs = 1;
    }

    /// One training step, without a record.
    pub fn step(&mut self, batch: Batch<B>) -> Result<(Step<B>, Feedback<B>)> {
        self.learner.step(batch, self.config.lr)
    }

    /// How the strategy divided the granted memory, as readable lines.
    pub fn notes(&self) -> Vec<String> {
        self.prepared.notes.clone()
    }

    /// The order over partitions, if it has one.
    pub fn partition_steps(&self) -> Option<StepsRecord> {
        // It was made of the same configuration.
        let over = self.config.order_over_partitions(&self.job.dataset).ok().flatten()?;
        Some(over.record())
    }

    /// Seconds of starting and preparing.
    pub(crate) fn clock(&self) -> WallClock {
        self.clock
    }

    /// What the work before training stored on disk, if anything.
    pub fn prepared(&self) -> Option<serde_json::Value> {
        self.prepared.on_disk.clone()
    }

    /// The model and its threads.
    pub fn learner(&self) -> &Learner<B> {
        &self.learner
    }

    /// Stores what belongs to its history in its directory, if it has one.
    pub(crate) fn store_history(&self, directory: &RunDirectory) -> Result<()> {
        history::store(directory, self.history_nodes(), self.split.as_ref())
    }

    /// How memory was divided between caches and a history, if it was chosen now.
    pub fn history_split(&self) -> Option<HistorySplit> {
        self.split
    }

    /// The nodes of its history of hidden rows, if it has one.
    pub fn history_nodes(&self) -> Option<&NodeSet> {
        self.job.history.as_deref()
    }

    /// Nodes of the graph.
    pub fn node_count(&self) -> u64 {
        self.job.dataset.manifest().nodes.count
    }

    /// Training nodes, or edges.
    pub(crate) fn train_items(&self) -> u64 {
        match &self.links {
            Some(links) => links.task.train,
            None => self.task.train.nodes().len() as u64,
        }
    }

    /// Number of batches in the first epoch.
    pub fn batches_of_epoch(&self) -> u64 {
        self.batches_of(0)
    }

    /// Number of batches in an epoch.
    pub(crate) fn batches_of(&self, epoch: u64) -> u64 {
        self.job.count(Phase::Train { epoch })
    }

    /// Bytes of a feature row as stored.
    pub fn row_bytes(&self) -> u64 {
        self.job.row_bytes()
    }

    /// The largest resident memory of the process itself since the run was opened.
    pub fn peak_own_bytes(&self) -> u64 {
        self.peak.bytes()
    }

    /// The largest device memory in use, if the device has its own.
    pub fn peak_device_bytes(&self) -> Option<u64> {
        let backend = self.learner.backend();
        (!backend.in_host_memory()).then(|| backend.peak_bytes())
    }

    /// The device memory budget.
    pub fn budget_device_bytes(&self) -> Option<u64> {
        let backend = self.learner.backend();
        self.config.gpu_memory.or(backend.memory_limit()).filter(|_| !backend.in_host_memory())
    }

    /// Takes memory for output that waits to be written from that of inference over the whole graph: at most `asked`
    /// bytes, and no more than it can do without. Returns how much.
    pub fn reserve_output(&mut self, asked: u64) -> u64 {
        // Otherwise batches that are larger than expected may take it.
        if self.config.final_eval != EvaluationMode::Full {
            return 0;
        }
        let device = DeviceProfile::of(self.learner.backend());
        let outputs = self.learner.objective().outputs();
        let Ok(least) = least_bytes(&self.config, &self.job, outputs, device) else { return 0 };
        let spare = self.plan.whole_bytes.host.saturating_sub(least.host);
        let free = match device.in_host_memory {
            // All memory is of use: less of it means more passes over the rows.
            true => spare / 16,
            // Once rows and adjacency can be loaded at the rate of a disk, more is of no use.
            false => (spare / 8).max(spare.saturating_sub(LOADING_BYTES) / 2),
        };
        let taken = asked.min(free).min(MOST_OUTPUT_BYTES);
        self.plan.whole_bytes.host -= taken;
        self.output_bytes += taken;
        taken
    }

    /// The stop signal.
    pub(crate) fn stop_signal(&self) -> StopSignal {
        self.job.stop.clone()
    }

    pub(crate) fn progress(&self) -> Arc<dyn Progress + Send + Sync> {
        self.job.progress.clone()
    }

    /// What evaluation needs. Its progress is not shown.
    pub(crate) fn context<'a>(&'a mut self, stop: &'a dyn Fn() -> bool) -> Context<'a, B> {
        Context {
            config: &self.config,
            task: &self.task,
            job: &self.job,
            strategy: &mut *self.strategy,
            learner: &self.learner,
            whole_bytes: self.plan.whole_bytes,
            early_rows: self.early_rows.take(),
            output_bytes: self.output_bytes,
            device_room: self.plan.device_room,
            scratch: &self.scratch,
            progress: &Silent,
            stop,
            trains_rows: self.trains_rows,
            state: self.state.as_ref(),
            links: self.links.clone(),
            ranking: self.plan.ranking,
        }
    }
}

/// Gives a job the memory of a plan.
fn take_plan(job: &mut Job, plan: &Plan, purpose: Purpose) {
    (job.prefetch_depth, job.samplers) = (plan.prefetch_depth, plan.samplers);
    (job.strategy_bytes, job.room) = (plan.strategy_bytes, plan.room);
    job.outline.history.iter_mut().for_each(|history| history.device_bytes = plan.history_device_bytes);
    job.outline.embedding_device_bytes = plan.embedding_device_bytes;
    // Inference alone reads a row too rarely to cache it.
    job.device_cache_bytes = if purpose == Purpose::Train { plan.cache_device_bytes } else { 0 };
    job.settle_topology();
}

/// How many epochs are sampled becomes part of the run: a resumed run must have the same.
fn keep_epochs_sampled(config: &mut RunConfig, job: &mut Job, prepared: &Prepared) {
    let sampled = config.epochs_sampled.or(prepared.epochs_sampled).unwrap_or(config.epochs);
    [config.epochs_sampled, job.epochs_sampled] = [Some(sampled.min(config.epochs)); 2];
}

/// The first batches of an epoch.
pub(crate) struct FirstBatches {
    pub all: Arc<dyn Batches>,
    pub batches: u64,
}

impl Batches for FirstBatches {
    fn count(&self, epoch: u64) -> u64 {
        self.all.count(epoch).min(self.batches)
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<(), SampleError> {
        self.all.seeds(at, out)
    }

    fn targets(&self, at: Position) -> Result<Targets, SampleError> {
        self.all.targets(at)
    }

    fn dropped(&self, at: Position, out: &mut Vec<Edge>) -> Result<(), SampleError> {
        self.all.dropped(at, out)
    }

    fn drawn_at(&self, at: Position) -> Position {
        self.all.drawn_at(at)
    }

    fn group(&self, at: Position) -> Option<BatchGroup> {
        self.all.group(at)
    }

    fn step(&self, at: Position) -> Option<BatchStep> {
        self.all.step(at)
    }

    fn identity(&self) -> String {
        self.all.identity()
    }
}

/// Checks the file that rows of a new run begin with. A run that has begun does not need it.
pub(crate) fn check_initial(config: &RunConfig) -> Result<()> {
    let embeddings = config.embeddings.as_ref().filter(|embeddings| embeddings.init_file.is_some());
    let Some(embeddings) = embeddings else { return Ok(()) };
    embeddings.check_initial(CheckedDataset::new(config)?.dataset.manifest().nodes.count)
}

/// A dataset that is valid for the run.
pub(crate) struct CheckedDataset {
    dataset: Arc<Dataset>,
    /// Columns of the model's output, and of the rows that its first layer reads.
    pub outputs: usize,
    pub dim: usize,
    /// Columns of feature rows; 0 if batches have none.
    features: usize,
}

impl CheckedDataset {
    /// Opens the dataset and checks that it is valid for the run.
    fn new(config: &RunConfig) -> Result<CheckedDataset> {
        config.check()?;
        let dataset = Dataset::open(&config.dataset)?;
        if dataset.manifest().id != config.dataset_id {
            return Err(TrainError::OtherDataset { dataset: config.dataset.clone() });
        }
        config.check_partition_counts(&dataset)?;
        let outputs = match &config.link {
            Some(link) => {
                LinkTask::of(&dataset)?;
                check_link_metric(config.metric)?;
                link.columns
            }
            None => check_labels(config, &dataset)?,
        };
        let features = dataset.manifest().nodes.features.as_ref().map(|features| features.dim as usize);
        if features.is_none() && config.reads_features() {
            let dataset = dataset.directory().to_path_buf();
            return Err(match (&config.link, &config.embeddings) {
                (None, None) => TrainError::NoFeatures { dataset },
                _ => TrainError::NoInput { dataset },
            });
        }
        let features = features.filter(|_| config.reads_features()).unwrap_or(0);
        let dim = config.input_columns(features);
        if config.model.layers == 0 && dim != outputs {
            return Err(TrainError::NoEncoderColumns { expected: outputs, found: dim });
        }
        config.model.check(dim, outputs)?;
        Ok(CheckedDataset { dataset: Arc::new(dataset), outputs, dim, features })
    }

    /// Columns of the rows that the model reads and gives.
    fn columns(&self) -> (usize, usize) {
        (self.dim, self.outputs)
    }

    /// The properties of the job that determine memory.
    fn outline(
        &self,
        config: &RunConfig,
        purpose: Purpose,
        device: DeviceProfile,
        scratch: &Path,
    ) -> JobOutline {
        let manifest = self.dataset.manifest();
        let splits = manifest.splits.as_ref();
        // Inference does not train, and may be requested for any node.
        let (count, evaluated) = match purpose {
            Purpose::Train => splits.map_or((0, 0), |splits| (splits.train, splits.valid.max(splits.test))),
            Purpose::Infer => (0, manifest.nodes.count),
        };
        let seeds = |edges: u64| match &config.link {
            Some(link) => link.seeds_of(edges, manifest.nodes.count),
            None => edges,
        };
        // Links are ranked from the representations of all nodes. Without layers these are input rows.
        let evaluated = if config.link.is_some() { manifest.nodes.count } else { evaluated };
        let sampled =
            config.model.layers > 0 && [config.eval, config.final_eval].contains(&EvaluationMode::Sampled);
        JobOutline {
            dataset: self.dataset.clone(),
            largest_batch: seeds(config.batch.min(count)),
            epochs: config.epochs,
            epochs_sampled: config.epochs_sampled,
            epoch_batches: config.most_batches(count),
            settings: config.settings(),
            known: None,
            direction: config.direction,
            features: config.reads_features(),
            evaluation: (sampled && evaluated > 0).then(|| EvaluationOutline {
                largest_batch: config.batch.min(evaluated),
                batches: match &config.link {
                    Some(_) => 2 * manifest.nodes.count.div_ceil(config.batch.max(1)),
                    None => splits.map_or(0, |splits| {
                        splits.valid.div_ceil(config.batch.max(1)) + splits.test.div_ceil(config.batch.max(1))
                    }),
                },
                settings: config.eval_settings(),
            }),
            threads: config.threads,
            // A device with its own memory leaves the host's threads free.
            samplers: if device.in_host_memory { 1 } else { (config.threads / 2).clamp(1, MOST_SAMPLERS) },
            prefetch_depth: 1,
            steps_in_flight: device.steps_in_flight,
            strategy_bytes: 0,
            device_cache_bytes: 0,
            embedding_device_bytes: u64::MAX,
            room: BatchRoom::default(),
            columns: Vec::new(),
            history: match purpose {
                Purpose::Train => config.history_outline(manifest.nodes.count, self.dim),
                Purpose::Infer => None,
            },
            residents: config.residents_outline(manifest.nodes.count, purpose),
            out_of_core: out_of_core(config, scratch),
        }
    }
}

/// Budgets of strategies that work from disk.
fn out_of_core(config: &RunConfig, scratch: &Path) -> OutOfCore {
    OutOfCore {
        scratch: scratch.to_path_buf(),
        disk_bytes: config.disk_budget.unwrap_or_else(|| default_disk_budget(disk_folder(config, scratch))),
        disk_bytes_explicit: config.disk_budget.is_some(),
        superbatch: config.superbatch,
        feature_cache_bytes: config.feature_cache,
        neighbour_cache_bytes: config.neighbour_cache,
        cache: config.cache.unwrap_or_default(),
        neighbour_policy: config.neighbour_policy,
        partitioning: config.grouping().zip(config.partitioning.as_ref()).map(|(_, chosen)| {
            JobPartitioning {
                name: chosen.name.clone(),
                partitions: chosen.partitions,
                cut_permille: chosen.cut_permille,
            }
        }),
        io_block_bytes: config.io_block,
        prepared: config.prepared.clone(),
        segment: config.segment,
        safe_point_bytes: config.safe_point,
        sequential: config.sequential,
        prepare_only: false,
        buffer: config.buffer(),
        lag: config.lag.unwrap_or(1),
        // Beside the scratch files, where checkpoints have their state.
        tables: scratch.with_file_name(STATE),
    }
}

/// Where a run's files take most room. Packed rows have another directory than traces.
fn disk_folder<'a>(config: &'a RunConfig, scratch: &'a Path) -> &'a Path {
    match config.strategy.keeps_beside_dataset() {
        true => config.prepared.as_deref().unwrap_or(&config.dataset),
        false => scratch,
    }
}

/// Half of what is free on the disk of a directory, and at most what Ginex takes in its paper.
pub(crate) fn default_disk_budget(folder: &Path) -> u64 {
    let there = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
    let free = esker_io::available_bytes(there).unwrap_or(MOST_DISK_BYTES);
    (free / 2).min(MOST_DISK_BYTES)
}

/// The job, with the sizes of its batches. Inference alone may be over any nodes: some batches of all nodes are sampled.
fn piloted(
    config: &RunConfig,
    mut outline: JobOutline,
    purpose: Purpose,
    device: DeviceProfile,
    control: RunControl,
    needs: StrategyNeeds<'_>,
) -> Result<(Learned, Job)> {
    let partitioned = partitioned(config, &mut outline, purpose, &control)?;
    let (learned, mut job) = match &config.link {
        Some(link) => {
            let dataset = outline.dataset.clone();
            let (mut job, topology) = match &partitioned {
                Some((over, graph)) => {
                    let batches = match purpose {
                        Purpose::Train => bucket_batches(config, link, &dataset, over, graph)?,
                        Purpose::Infer => Arc::new(NoBatches),
                    };
                    (Job::new(outline, batches)?, LoadedTopology::default())
                }
                None => link_job(config, link, outline, purpose, &control.stop, needs)?,
            };
            let task = LinkTask::load(&dataset)?;
            (job.topology, job.schedule) = (topology, link_schedule(config, &dataset, &task, purpose)?);
            (Learned { task: Task::none(link.columns), links: Some(Links::new(task, dataset)) }, job)
        }
        None => {
            control.progress.stage("read labels", None, Unit::Count("nodes"));
            let task = Task::load(&outline.dataset)?;
            let batches = training_batches(config, &outline.dataset, &task, purpose)?;
            let residents = residents(config, &outline)?;
            let mut job = Job::new(outline, batches)?;
            (job.schedule, job.residents) = (schedule(config, &task, purpose)?, residents);
            (Learned { task, links: None }, job)
        }
    };
    job.partitioned = partitioned.map(|(_, graph)| graph);
    (job.progress, job.stop) = (control.progress, control.stop);
    job.out_of_core.prepare_only = control.prepare_only;
    if purpose == Purpose::Infer && job.evaluation.is_some() {
        job.schedule.test = Some(inference_of(config, job.dataset.manifest().nodes.count, None)?);
    }
    // Links in buckets are not in memory yet: their batches are as large as fan-outs allow.
    let is_sampled = config.link.is_none() || job.partitioned.is_none();
    if is_sampled && (purpose == Purpose::Train || job.evaluation.is_some()) {
        let after = after_pilot(config, &needs(&job)?);
        let beside = program_bytes(config, device)
            .saturating_add(Task::bytes_for(&job.dataset))
            .saturating_add(loaded_links(config, &job.dataset, purpose).total())
            .saturating_add(config.order_bytes(&job.dataset));
        job.pilot(config.memory.saturating_sub(beside).max(LEAST_PILOT_BYTES), after)?;
    }
    if purpose == Purpose::Infer {
        job.schedule = EvaluationSchedule::default();
    }
    Ok((learned, job))
}

/// What becomes of the topology that a pilot loads.
fn after_pilot(config: &RunConfig, needed: &Needs) -> AfterPilot {
    // Tables of embeddings are made before rows are packed, and take memory.
    let lends = needed.samples_beforehand && config.embeddings.is_none();
    match (needed.topology_in_memory, lends) {
        (true, _) => AfterPilot::Kept,
        (false, true) => AfterPilot::Lent,
        (false, false) => AfterPilot::Dropped,
    }
}

/// A job on links, with its topology in memory.
fn link_job(
    config: &RunConfig,
    link: &LinkConfig,
    outline: JobOutline,
    purpose: Purpose,
    stop: &StopSignal,
    needs: StrategyNeeds<'_>,
) -> Result<(Job, LoadedTopology)> {
    check_loaded(config, &outline, purpose, needs)?;
    let topology = LoadedTopology::load(&outline.dataset, outline.direction)?;
    let (dataset, residents) = (outline.dataset.clone(), residents(config, &outline)?);
    let batches = link_batches(config, link, &dataset, &topology, residents.as_ref(), purpose, stop)?;
    let mut job = Job::new(outline, batches)?;
    job.residents = residents.filter(|_| config.resident_only == Some(ResidentOnly::All));
    Ok((job, topology))
}

/// The graph by node partitions, for a strategy with a partition buffer: how much of it is in memory becomes part of the
/// outline.
fn partitioned(
    config: &RunConfig,
    outline: &mut JobOutline,
    purpose: Purpose,
    control: &RunControl,
) -> Result<Option<(OrderOverPartitions, PartitionedGraph)>> {
    if config.strategy != StrategyKind::Marius {
        return Ok(None);
    }
    let Some(over) = config.order_over_partitions(&outline.dataset)? else { return Ok(None) };
    let (graph, edges) = over.graph(config, &outline.dataset, purpose, control)?;
    outline.out_of_core.buffer.iter_mut().for_each(|sizes| sizes.edges = edges);
    Ok(Some((over, graph)))
}

/// The resident nodes of each step, if training sees no others.
fn residents(config: &RunConfig, outline: &JobOutline) -> Result<Option<Residents>> {
    let Some(over) = config.order_over_partitions(&outline.dataset)? else { return Ok(None) };
    let (edge_ids, samplers) = (outline.settings.carry.edges, outline.samplers);
    Ok(outline.residents.map(|_| Residents::new(over.partitions, edge_ids, samplers)))
}

/// Refuses a budget that is exceeded by what batches of links need in any case, before it is loaded: the topology, and
/// what is known of edges.
fn check_loaded(
    config: &RunConfig,
    outline: &JobOutline,
    purpose: Purpose,
    needs: StrategyNeeds<'_>,
) -> Result<()> {
    let mut table = loaded_links(config, &outline.dataset, purpose);
    let topology = AnyTopology::bytes_for(&outline.dataset, outline.direction);
    if table.total().saturating_add(topology) <= config.memory {
        return Ok(());
    }
    table.extend(needs(outline)?.host);
    Err(too_little(table, config.memory))
}

/// What a run learns: labels, or links.
struct Learned {
    task: Task,
    links: Option<Links>,
}

impl Learned {
    fn objective<B: LinkMath>(&self, config: &RunConfig, backend: &B) -> Result<Box<dyn Objective<B>>> {
        match (&self.links, &config.link) {
            (Some(links), Some(link)) => {
                let init = config.relation_init(link);
                let start = RelationStart { seed: config.seed, init };
                Ok(Box::new(LinkObjective::new(backend, link, &links.task, start)?))
            }
            _ => Ok(Box::new(self.task.clone())),
        }
    }
}

/// Fails if links have no such metric.
fn check_link_metric(metric: MetricName) -> Result<()> {
    match metric {
        MetricName::Mrr | MetricName::HitsAt10 | MetricName::Auc | MetricName::AveragePrecision => Ok(()),
        metric => Err(TrainError::LinkMetric { metric }),
    }
}

/// Columns of logits. Fails if the dataset has no labels to train on, or no such metric.
fn check_labels(config: &RunConfig, dataset: &Dataset) -> Result<usize> {
    let (labels, _) = Task::of(dataset)?;
    let (kind, outputs) = (labels.kind, labels.classes as usize);
    let has = match config.metric {
        MetricName::Loss => true,
        MetricName::Accuracy | MetricName::AccuracyAndLoss | MetricName::MacroF1 => kind != LabelKind::Real,
        MetricName::Auc => kind == LabelKind::Multilabel || (kind == LabelKind::Classes && outputs == 2),
        MetricName::Mrr | MetricName::HitsAt10 | MetricName::AveragePrecision => false,
    };
    match has {
        true => Ok(outputs),
        false => Err(TrainError::Metric { metric: config.metric, kind, outputs }),
    }
}

/// When a run on links computes representations of all nodes from sampled neighbourhoods.
fn link_schedule(
    config: &RunConfig,
    dataset: &Dataset,
    task: &LinkTask,
    purpose: Purpose,
) -> Result<EvaluationSchedule> {
    let nodes = dataset.manifest().nodes.count;
    let over = |mode: EvaluationMode, edges: &[Edge]| -> Result<Option<Inference>> {
        let sampled = mode == EvaluationMode::Sampled && config.model.layers > 0;
        let due = sampled && purpose == Purpose::Train && !edges.is_empty();
        due.then(|| inference_of(config, nodes, None)).transpose()
    };
    let again = config.final_eval != config.eval;
    Ok(EvaluationSchedule {
        validation: over(config.eval, &task.valid)?,
        every: config.eval_every,
        last_validation: if again { over(config.final_eval, &task.valid)? } else { None },
        test: over(config.final_eval, &task.test)?,
    })
}

/// The training batches. Inference has no use for their order, nor for what the order needs.
fn training_batches(
    config: &RunConfig,
    dataset: &Dataset,
    task: &Task,
    purpose: Purpose,
) -> Result<Arc<dyn Batches>> {
    let nodes = task.train.nodes();
    let batching = Batching::new(nodes.len() as u64, config.batch, config.drop_last)?;
    if batching.batches() == 0 {
        return Err(TrainError::NoFullBatch { batch: config.batch, nodes: nodes.len() });
    }
    let order: Arc<dyn Order> = match (config.order, config.order_over_partitions(dataset)?) {
        (_, Some(over)) if purpose == Purpose::Train => Arc::new(over.of_nodes(config, nodes)?),
        (OrderName::Sequential, _) => Arc::new(Sequential(batching)),
        (OrderName::Groups, _) if purpose == Purpose::Train => Arc::new(groups(config, dataset, nodes)?),
        _ => Arc::new(Shuffled { batching, seed: config.seed }),
    };
    Ok(Arc::new(NodeBatches::new(order, Seeds::Shared(nodes.clone()))?))
}

/// The order by groups of the partitioning that the run was configured with.
fn groups(config: &RunConfig, dataset: &Dataset, nodes: &[NodeId]) -> Result<Groups> {
    let (Some(grouping), Some(chosen)) = (config.grouping(), &config.partitioning) else {
        return Err(TrainError::NoPartitioning);
    };
    let stored = chosen.open(dataset)?;
    if (stored.digest(), stored.partitions()) != (chosen.digest.as_str(), chosen.partitions) {
        return Err(TrainError::OtherPartitioning {
            dataset: config.dataset.clone(),
            name: chosen.name.clone(),
            now: stored.digest().to_string(),
            before: chosen.digest.clone(),
            made: chosen.description(),
        });
    }
    let groups = Groups::new(grouping, &stored.of_nodes(nodes)?)?;
    groups.check_full(sampled_epochs(config))?;
    Ok(groups)
}

/// Distinct epochs of a run, as far as its configuration tells.
fn sampled_epochs(config: &RunConfig) -> u64 {
    config.epochs_sampled.unwrap_or(config.epochs).clamp(1, config.epochs.max(1))
}

/// Optimizer steps of a whole run. Epochs of the order by groups differ in their number of batches, and later ones may
/// repeat the first; of very many, some are counted.
pub fn count_steps(config: &RunConfig, dataset: &Dataset) -> Result<u64> {
    config.check_partition_counts(dataset)?;
    let train = dataset.manifest().splits.as_ref().map_or(0, |splits| splits.train);
    let (distinct, over) = (sampled_epochs(config), config.order_over_partitions(dataset)?);
    let counted = distinct.min(MOST_COUNTED_EPOCHS);
    let counts: Vec<u64> = match over {
        Some(over) => over.batch_counts(config, dataset, counted)?,
        None if config.order == OrderName::Groups => {
            let order = groups(config, dataset, &Task::training_nodes(dataset)?)?;
            (0..counted).map(|epoch| order.batches(epoch)).collect()
        }
        None => return Ok(config.epochs.saturating_mul(config.most_batches(train))),
    };
    Ok(repeated_sum(&counts, distinct, config.epochs))
}

/// The sum over `epochs` epochs, of which `distinct` are repeated and `counts` are known. Those that are not known are
/// like the others.
fn repeated_sum(counts: &[u64], distinct: u64, epochs: u64) -> u64 {
    let all: u64 = counts.iter().sum();
    let known = counts.len() as u64;
    if known < distinct {
        return (all as u128 * epochs as u128 / known.max(1) as u128) as u64;
    }
    let rest: u64 = counts.iter().take((epochs % known.max(1)) as usize).sum();
    (epochs / known.max(1)).saturating_mul(all).saturating_add(rest)
}

/// When the run evaluates with sampled neighbourhoods, and on which nodes.
fn schedule(config: &RunConfig, task: &Task, purpose: Purpose) -> Result<EvaluationSchedule> {
    let over = |mode: EvaluationMode, nodes: &LabelledNodes| -> Result<Option<Inference>> {
        let sampled = mode == EvaluationMode::Sampled && purpose == Purpose::Train && nodes.labelled() > 0;
        sampled.then(|| inference_over(config, nodes)).transpose()
    };
    // If the final evaluation differs from the one that chose the model, the best model is validated again in the same
    // way.
    let again = config.final_eval != config.eval;
    Ok(EvaluationSchedule {
        validation: over(config.eval, &task.valid)?,
        every: config.eval_every,
        last_validation: if again { over(config.final_eval, &task.valid)? } else { None },
        test: over(config.final_eval, &task.test)?,
    })
}

#[cfg(test)]
mod tests {
    use super::repeated_sum;

    #[test]
    fn steps_are_those_of_the_epochs_that_are_repeated() {
        let counts = [5, 7, 6];
        let naive = |epochs: u64| (0..epochs).map(|epoch| counts[(epoch % 3) as usize]).sum::<u64>();
        (1..20).for_each(|epochs| assert_eq!(repeated_sum(&counts, 3, epochs), naive(epochs)));
        // Of epochs that all differ, as many as were counted.
        assert_eq!(repeated_sum(&counts, 3, 3), 18);
        assert_eq!(repeated_sum(&counts, 300, 300), 1800);
    }
}
