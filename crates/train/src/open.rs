//! A run that was trained, opened again: its model, its graph and its memory, to evaluate or to predict.

use crate::checkpoint::Checkpoint;
use crate::evaluate::Context;
use crate::memory::{Plan, Processor, Purpose};
use crate::metrics::largest;
use crate::peak::PeakMeter;
use crate::task::{LabelKind, SplitBatches, Task};
use crate::{
    BatchRows, EvaluationMode, Learner, MetricName, OrderName, Result, RunConfig, RunDirectory, Step,
    TrainError,
};
use esker_nn::{Backend, Shape};
use esker_sample::order::{Batching, Order, Sequential, Shuffled};
use esker_sample::{Batches, NodeBatches, Position, SampleError, Seeds};
use esker_store::Dataset;
use esker_strategies::{Batch, BatchSource, Job, OutOfCore, Strategy, StrategyKind};
use esker_types::{NodeId, Progress, Silent, StopSignal};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Traces beyond this gain little (Ginex, section 5.4).
const MOST_DISK_BYTES: u64 = 100_000_000_000;
/// Batches sampled at a time beside a processor of its own: more than a GPU takes.
const MOST_SAMPLERS: usize = 8;

/// Everything of a run but its progress.
pub struct OpenRun<B: Backend> {
    /// The run.
    pub config: RunConfig,
    /// What is learned.
    pub task: Task,
    /// How memory is used.
    pub plan: Plan,
    pub(crate) job: Job,
    pub(crate) strategy: Box<dyn Strategy<BatchRows<B>>>,
    pub(crate) learner: Learner<B>,
    scratch: PathBuf,
    peak: PeakMeter,
}

impl<B: Backend + Clone + 'static> OpenRun<B> {
    /// Adds memory up and reads nothing: what [`OpenRun::new`] would promise, or why it would refuse.
    pub fn plan_only(backend: &B, config: &RunConfig) -> Result<Plan> {
        let (dataset, _, outputs, _) = checked(config)?;
        Ok(plan(config, Arc::new(dataset), outputs, Purpose::Train, Processor::of(backend), Path::new(""))?.1)
    }

    /// Adds memory up, and only then reads what the run needs. `scratch` is where hidden rows may go.
    pub fn new(backend: B, config: RunConfig, scratch: PathBuf) -> Result<OpenRun<B>> {
        OpenRun::new_watched(backend, config, scratch, Arc::new(Silent))
    }

    /// The same, and somebody is told how far the work before training is.
    pub fn new_watched(
        backend: B,
        config: RunConfig,
        scratch: PathBuf,
        progress: Arc<dyn Progress + Send + Sync>,
    ) -> Result<OpenRun<B>> {
        OpenRun::open(backend, config, scratch, Purpose::Train, progress)
    }

    fn open(
        backend: B,
        mut config: RunConfig,
        scratch: PathBuf,
        purpose: Purpose,
        progress: Arc<dyn Progress + Send + Sync>,
    ) -> Result<OpenRun<B>> {
        let (dataset, kind, outputs, dim) = checked(&config)?;
        let processor = Processor::of(&backend);
        let (job, plan) = plan(&config, Arc::new(dataset), outputs, purpose, processor, &scratch)?;
        let peak = PeakMeter::start();
        let task = Task::load(&job.dataset)?;
        let learner = Learner::new(backend, &config, dim, outputs, kind)?;
        // Who only infers reads a row too seldom to hold it.
        let holder = (purpose == Purpose::Train).then(|| learner.row_holder(plan.held_device_bytes));
        let mut strategy = config.strategy.build(learner.row_maker(), holder);
        let job = real_job(&config, Job { progress, ..job }, &task)?;
        strategy.prepare(&job)?;
        // What was chosen belongs to the run: resumed, it must be the same.
        config.epochs_sampled = Some(
            config.epochs_sampled.or(strategy.epochs_sampled()).unwrap_or(config.epochs).min(config.epochs),
        );
        let job = Job { epochs_sampled: config.epochs_sampled, ..job };
        Ok(OpenRun { config, task, plan, job, strategy, learner, scratch, peak })
    }

    /// The best model of a run directory, or its last where nothing chose a best one, with the configuration that
    /// [`RunConfig::to_infer`] gives.
    pub fn load(backend: B, run: &RunDirectory, config: RunConfig) -> Result<OpenRun<B>> {
        let path = [run.best_path(), run.last_path()].into_iter().find(|path| path.exists());
        let Some(path) = path else {
            return Err(TrainError::config(
                format!("{} holds no weights yet", run.path().display()),
                "finish the run with `esker train --resume`",
            ));
        };
        let weights = Checkpoint::read(&path)?;
        let mut opened =
            OpenRun::open(backend, config, run.scratch_path(), Purpose::Infer, Arc::new(Silent))?;
        opened.learner.load_model(&weights.model)?;
        Ok(opened)
    }

    /// Batches from a position on: what a trainer takes.
    pub fn source(&mut self, from: Position) -> Result<Box<dyn BatchSource<BatchRows<B>>>> {
        Ok(self.strategy.batches(&self.job, from)?)
    }

    /// Ends the run behind so many batches of its first epoch: nothing is sampled or planned for those behind them.
    pub fn end_behind(&mut self, batches: u64) {
        let all = self.job.batches.clone();
        self.job.batches = Arc::new(FirstBatches { all, batches });
        self.job.epochs = 1;
    }

    /// One training step, without a record.
    pub fn step(&mut self, batch: Batch<BatchRows<B>>) -> Result<Step<B>> {
        self.learner.step(batch, &self.task.train, self.config.lr)
    }

    /// How the strategy shared out what it was granted, in lines for a person.
    pub fn notes(&self) -> Vec<String> {
        self.strategy.notes()
    }

    /// What the work before training left on disk, where there was any.
    pub fn prepared(&self) -> Option<serde_json::Value> {
        self.strategy.prepared()
    }

    /// The model and its threads.
    pub fn learner(&self) -> &Learner<B> {
        &self.learner
    }

    /// Nodes of the graph.
    pub fn node_count(&self) -> u64 {
        self.job.dataset.manifest().nodes.count
    }

    /// Batches of the first epoch.
    pub fn batches_of_epoch(&self) -> u64 {
        self.job.batches.count(0)
    }

    /// Bytes of a feature row as stored.
    pub fn row_bytes(&self) -> u64 {
        self.job.row_bytes()
    }

    /// The most memory of its own that the process was seen to have since the run was opened.
    pub fn peak_own_bytes(&self) -> u64 {
        self.peak.bytes()
    }

    /// The most that was in use of the processor's own memory, where it has any.
    pub fn peak_device_bytes(&self) -> Option<u64> {
        let backend = self.learner.backend();
        (!backend.in_host_memory()).then(|| backend.peak_bytes())
    }

    /// What may be used of it.
    pub fn budget_device_bytes(&self) -> Option<u64> {
        let backend = self.learner.backend();
        self.config.gpu_memory.or(backend.memory_limit()).filter(|_| !backend.in_host_memory())
    }

    pub(crate) fn context<'a>(&'a mut self, stop: &'a dyn Fn() -> bool) -> Context<'a, B> {
        Context {
            config: &self.config,
            job: &self.job,
            strategy: &mut *self.strategy,
            learner: &self.learner,
            whole_bytes: self.plan.whole_bytes,
            scratch: &self.scratch,
            stop,
        }
    }
}

/// The first batches of an epoch.
struct FirstBatches {
    all: Arc<dyn Batches>,
    batches: u64,
}

impl Batches for FirstBatches {
    fn count(&self, epoch: u64) -> u64 {
        self.all.count(epoch).min(self.batches)
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<(), SampleError> {
        self.all.seeds(at, out)
    }

    fn identity(&self) -> String {
        self.all.identity()
    }
}

/// Opens the dataset and checks that the run can be of it: what labels mean, logits' columns, features' columns.
fn checked(config: &RunConfig) -> Result<(Dataset, LabelKind, usize, usize)> {
    config.check()?;
    let dataset = Dataset::open(&config.dataset)?;
    if dataset.manifest().id != config.dataset_id {
        return Err(TrainError::config(
            format!("{} is not the dataset this run was made with", config.dataset.display()),
            "give the old one, or train anew",
        ));
    }
    let (labels, _) = Task::of(&dataset)?;
    let (kind, outputs) = (labels.kind, labels.classes as usize);
    let has = match config.metric {
        MetricName::Loss => true,
        MetricName::Accuracy | MetricName::AccuracyAndLoss | MetricName::MacroF1 => kind != LabelKind::Real,
        MetricName::Auc => kind == LabelKind::Multilabel || (kind == LabelKind::Classes && outputs == 2),
    };
    if !has {
        return Err(TrainError::config(
            format!("{:?} is no metric of {outputs} {kind:?}", config.metric),
            "take --metric accuracy, macro-f1 or loss; auc needs two classes or several labels a node",
        ));
    }
    let dim = dataset.manifest().nodes.features.as_ref().map_or(0, |features| features.dim as usize);
    config.model.check(dim, outputs)?;
    Ok((dataset, kind, outputs, dim))
}

/// The job as far as memory depends on it, and how it fits.
fn plan(
    config: &RunConfig,
    dataset: Arc<Dataset>,
    outputs: usize,
    purpose: Purpose,
    processor: Processor,
    scratch: &Path,
) -> Result<(Job, Plan)> {
    let splits = dataset.manifest().splits.as_ref();
    // Inference trains on nothing, and may be asked about any node.
    let (count, evaluated) = match purpose {
        Purpose::Train => splits.map_or((0, 0), |splits| (splits.train, splits.valid.max(splits.test))),
        Purpose::Infer => (0, dataset.manifest().nodes.count),
    };
    let sampled = [config.eval, config.final_eval].contains(&EvaluationMode::Sampled);
    let placeholder: Arc<dyn Batches> =
        Arc::new(NodeBatches::new(Sequential(Batching::new(0, 1, false)?), Seeds::Nodes(Vec::new()))?);
    let mut job = Job {
        dataset,
        batches: placeholder.clone(),
        largest_batch: config.batch.min(count),
        epochs: config.epochs,
        epochs_sampled: config.epochs_sampled,
        settings: config.settings(),
        direction: config.direction,
        evaluation: (sampled && evaluated > 0).then(|| esker_strategies::Evaluation {
            batches: placeholder,
            largest_batch: config.batch.min(evaluated),
            settings: config.eval_settings(),
            rows: true,
            sampling_bytes: None,
        }),
        threads: config.threads,
        // A processor of its own leaves the host's threads free.
        samplers: if processor.in_host_memory { 1 } else { (config.threads / 2).clamp(1, MOST_SAMPLERS) },
        batches_held: 1,
        steps_ahead: processor.steps_ahead,
        strategy_bytes: 0,
        progress: Arc::new(Silent),
        stop: StopSignal::default(),
        out_of_core: OutOfCore {
            scratch: scratch.to_path_buf(),
            disk_bytes: config.disk_budget.unwrap_or_else(|| default_disk_budget(config, scratch)),
            disk_bytes_said: config.disk_budget.is_some(),
            superbatch: config.superbatch,
            feature_cache_bytes: config.feature_cache,
            neighbour_cache_bytes: config.neighbour_cache,
            io_block_bytes: config.io_block,
            prepared: config.prepared.clone(),
            segment: config.segment,
            sequential: config.sequential,
        },
    };
    let plan = Plan::new(config, &job, outputs, purpose, processor)?;
    (job.batches_held, job.samplers) = (plan.batches_held, plan.samplers);
    job.strategy_bytes = plan.strategy_bytes;
    Ok((job, plan))
}

/// Half of what is free where scratch files go, and no more than Ginex takes in its paper.
fn default_disk_budget(config: &RunConfig, scratch: &Path) -> u64 {
    // Packed rows go elsewhere than traces.
    let folder = match config.strategy {
        StrategyKind::DiskGnn => config.prepared.as_deref().unwrap_or(&config.dataset),
        _ => scratch,
    };
    let there = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
    let free = esker_io::available_bytes(there).unwrap_or(MOST_DISK_BYTES);
    (free / 2).min(MOST_DISK_BYTES)
}

/// The job with the seeds it trains on.
fn real_job(config: &RunConfig, job: Job, task: &Task) -> Result<Job> {
    let nodes = task.train.nodes();
    let batching = Batching::new(nodes.len() as u64, config.batch, config.drop_last)?;
    if batching.batches() == 0 {
        return Err(TrainError::config(
            format!(
                "{} training nodes make no batch of {} with the last left out",
                nodes.len(),
                config.batch
            ),
            "take a smaller batch, or keep the last",
        ));
    }
    let order: Arc<dyn Order> = match config.order {
        OrderName::Shuffled => Arc::new(Shuffled { batching, seed: config.seed }),
        OrderName::Sequential => Arc::new(Sequential(batching)),
    };
    let batches = SplitBatches { order, nodes: nodes.clone() };
    Ok(Job { batches: Arc::new(batches), ..job })
}

/// Takes nodes, their classes and their probabilities or values.
pub type TakePredictions<'a> = &'a mut dyn FnMut(&[NodeId], &[u32], &[f32]) -> Result<()>;

/// Predicts nodes, ascending, or every node: hands over nodes, classes and probabilities (values, for real labels), block by
/// block and in order.
pub fn predict<B: Backend + Clone + 'static>(
    run: &mut OpenRun<B>,
    nodes: Option<&Arc<Vec<NodeId>>>,
    mode: EvaluationMode,
    take: TakePredictions,
) -> Result<()> {
    let (kind, outputs) = run.learner.task();
    let mut hand_over = |nodes: &[NodeId], mut values: Vec<f32>| {
        let classes: Vec<u32> = match kind {
            LabelKind::Classes => values.chunks_exact(outputs).map(|row| largest(row) as u32).collect(),
            _ => Vec::new(),
        };
        match kind {
            LabelKind::Classes => values.chunks_exact_mut(outputs).for_each(softmax),
            LabelKind::Multilabel => {
                values.iter_mut().for_each(|value| *value = 1.0 / (1.0 + (-*value).exp()))
            }
            LabelKind::Real => {}
        }
        take(nodes, &classes, &values)
    };
    let mut context = run.context(&|| false);
    match mode {
        EvaluationMode::Sampled | EvaluationMode::None => {
            let all = context.job.dataset.manifest().nodes.count;
            let count = nodes.map_or(all, |nodes| nodes.len() as u64);
            let order = Sequential(Batching::new(count, context.config.batch, false)?);
            let over = esker_strategies::Evaluation {
                batches: match nodes {
                    Some(nodes) => Arc::new(SplitBatches { order, nodes: nodes.clone() }),
                    None => Arc::new(NodeBatches::new(order, Seeds::AllNodes(all))?),
                },
                largest_batch: context.config.batch,
                settings: context.config.eval_settings(),
                rows: true,
                sampling_bytes: None,
            };
            let mut source = context.strategy.evaluation(context.job, &over)?;
            while let Some(batch) = source.next()? {
                let (nodes, logits) = context.learner.infer_seeds(batch)?;
                hand_over(&nodes, logits)?;
            }
            Ok(())
        }
        EvaluationMode::Full => {
            let learner = context.learner;
            context.infer_whole(nodes, &mut |nodes: &[NodeId], logits: &B::Matrix| {
                let mut values = vec![0.0; logits.rows() * logits.columns()];
                learner.read(logits, 0, &mut values)?;
                hand_over(nodes, values)
            })
        }
    }
}

fn softmax(row: &mut [f32]) {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|value| *value = (*value - most).exp());
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|value| *value /= sum);
}
