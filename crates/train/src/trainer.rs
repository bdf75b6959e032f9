//! The training loop: a batch, a step, a line in the record. At the end of an epoch there is a validation, and
//! sometimes a checkpoint. The checkpoint has everything that the next batch depends on. So a run that was killed
//! anywhere resumes as if it had not been.

use crate::checkpoint::Checkpoint;
use crate::embeddings::build_strategy;
use crate::metrics::Metrics;
use crate::open::check_initial;
use crate::record::{
    BatchRecord, EpochRecord, HistoryRecord, MetricsWriter, NeighbourRecord, RunDirectory, Summary,
};
use crate::state::{SavedWith, StatePart, StateReader, StateWriter, remove_others};
use crate::task::SplitName;
use crate::{
    EvaluationMode, InFlight, MetricName, OpenRun, Result, RunConfig, RunControl, StepDone, TrainError,
    WallClock, history,
};
use esker_fetch::pipeline::{StageClock, StageTimes};
use esker_nn::{Backend, LinkMath, Schedule};
use esker_sample::{Position, SampleError};
use esker_strategies::{
    Batch, BatchSource, CheckpointReader, Phase, RunPosition, SourceCounters, Strategy, StrategyError,
};
use esker_types::random::mix;
use esker_types::{ErrorKind, disk_bytes_read, peak_resident_bytes};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Observes a run, and may stop it.
pub trait Watcher {
    /// A batch is done.
    fn batch(&mut self, progress: &BatchProgress<'_>);
    /// Whether to stop, after a checkpoint. Called after every batch, and in every batch or block of an evaluation.
    fn stop(&self) -> bool;
    /// Validation or test begins.
    fn evaluation(&mut self, what: &str);
    /// An epoch is done.
    fn epoch(&mut self, record: &EpochRecord, best: bool);
}

/// No observer: the run continues to its end.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unwatched;

impl Watcher for Unwatched {
    fn batch(&mut self, _: &BatchProgress<'_>) {}
    fn stop(&self) -> bool {
        false
    }
    fn evaluation(&mut self, _: &str) {}
    fn epoch(&mut self, _: &EpochRecord, _: bool) {}
}

/// The progress of a run.
#[derive(Debug, Clone, Copy)]
pub struct BatchProgress<'a> {
    /// The batch just done.
    pub record: &'a BatchRecord,
    /// Batches in its epoch.
    pub batches: u64,
    /// Epochs of the run.
    pub epochs: u64,
    /// The times of stages so far. The trainer's stage is `train`, followed by those of a device with its own memory.
    pub stages: &'a [StageTimes],
}

/// How a run ended.
#[derive(Debug)]
pub enum Outcome {
    /// With a result.
    Finished(Box<Summary>),
    /// Stopped by its watcher. `resume` continues at this position.
    Stopped(Position),
}

/// What to do after a batch or an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Continue,
    Stop,
}

/// The state in a checkpoint in addition to tensors.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
struct State {
    epoch: u64,
    batch: u64,
    steps: u64,
    digest: u64,
    /// Of the current epoch.
    loss_sum: f64,
    loss_count: u64,
    epoch_seconds: f64,
    epoch_read: u64,
    epoch_useful: u64,
    #[serde(default)]
    epoch_nodes: u64,
    best: Option<Best>,
    /// The largest score and the smallest loss of all evaluations, which may be of different models.
    #[serde(default)]
    peaks: Option<Peaks>,
    without_better: u64,
    /// How often the learning rate fell on a plateau, and evaluations without a better model since it did.
    #[serde(default, skip_serializing_if = "Plateaus::is_empty")]
    plateaus: Plateaus,
    seconds: f64,
    metrics_bytes: u64,
    epochs: Vec<EpochRecord>,
    ended: Option<String>,
    /// State of the source, and the number of this checkpoint.
    #[serde(default)]
    source: Vec<StatePart>,
    #[serde(default)]
    turn: u64,
    /// Where the time of this process and of those before it went.
    #[serde(default)]
    clock: WallClock,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Best {
    epoch: u64,
    score: f64,
    valid: Metrics,
    /// State of the source, saved with the model.
    #[serde(default)]
    source: Vec<StatePart>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
struct Plateaus {
    count: u64,
    waited: u64,
}

impl Plateaus {
    fn is_empty(&self) -> bool {
        *self == Plateaus::default()
    }

    /// After an evaluation.
    fn evaluated(&mut self, schedule: &Schedule, better: bool) {
        let Schedule::Plateau { patience, .. } = *schedule else { return };
        self.waited = if better { 0 } else { self.waited + 1 };
        if self.waited > patience {
            *self = Plateaus { count: self.count + 1, waited: 0 };
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Peaks {
    score: f64,
    loss: f64,
}

/// Trains a run.
pub struct Trainer<B: Backend> {
    /// Steps that were taken but are not in the state yet.
    in_flight: InFlight<B>,
    run: OpenRun<B>,
    directory: RunDirectory,
    state: State,
    metrics: MetricsWriter,
    clock: Arc<StageClock>,
    last_checkpoint: Instant,
    batches_since: u64,
    /// Files of the best model that is on disk. After a kill it may be newer than the one that the checkpoint knows.
    best_files: Vec<StatePart>,
    /// Counters of the source and the disk at the start of the epoch or of this process.
    counted: SourceCounters,
    read_before: u64,
    epoch_started: Instant,
    /// Locked while the run is trained, so that no other process trains it.
    _lock: File,
}

impl<B: LinkMath> Trainer<B> {
    /// A new run in a new directory.
    pub fn create(backend: B, config: RunConfig, out: &Path) -> Result<Trainer<B>> {
        Trainer::create_watched(backend, config, out, RunControl::default())
    }

    /// The same, with progress reports and a stop signal for the work before training.
    pub fn create_watched(
        backend: B,
        config: RunConfig,
        out: &Path,
        control: RunControl,
    ) -> Result<Trainer<B>> {
        let strategy = build_strategy(&config, &backend);
        Trainer::create_with(backend, config, out, control, strategy)
    }

    /// The same, with another strategy than the configured one: for instance, one that adds rows which training
    /// changes.
    pub fn create_with(
        backend: B,
        config: RunConfig,
        out: &Path,
        control: RunControl,
        strategy: Box<dyn Strategy<B>>,
    ) -> Result<Trainer<B>> {
        let scratch = RunDirectory::create_checked(out)?.scratch_path();
        check_initial(&config)?;
        let mut begun = None;
        // The directory is created before the work on disk: if stopped there, the run can be resumed like any other.
        let run = OpenRun::begin(backend, config, scratch, control, strategy, &mut |config| {
            let directory = RunDirectory::create(out, config)?;
            begun = Some((directory.lock()?, directory));
            Ok(())
        });
        match (run, begun) {
            (Ok(run), Some((lock, directory))) => {
                // Before the configuration that names them.
                run.store_history(&directory)?;
                directory.write_config(&run.config)?;
                Trainer::new(run, directory, lock, State::default())
            }
            (Err(error), begun) => {
                // Only a run that can start leaves a directory.
                if let Some((_, directory)) = begun.filter(|_| error.kind() == ErrorKind::Asked) {
                    directory.withdraw();
                }
                Err(error)
            }
            (Ok(_), None) => unreachable!("a run is opened after its directory was made"),
        }
    }

    /// Resumes a run from its last checkpoint, or from the start if there is none.
    pub fn resume(backend: B, config: RunConfig, out: &Path) -> Result<Trainer<B>> {
        Trainer::resume_watched(backend, config, out, RunControl::default())
    }

    /// The same, with progress reports and a stop signal for the work before training.
    pub fn resume_watched(
        backend: B,
        config: RunConfig,
        out: &Path,
        control: RunControl,
    ) -> Result<Trainer<B>> {
        let strategy = build_strategy(&config, &backend);
        Trainer::resume_with(backend, config, out, control, strategy)
    }

    /// The same, with another strategy than the configured one.
    pub fn resume_with(
        backend: B,
        config: RunConfig,
        out: &Path,
        control: RunControl,
        strategy: Box<dyn Strategy<B>>,
    ) -> Result<Trainer<B>> {
        let (directory, before) = RunDirectory::open(out)?;
        config.check_resumes(&before, out)?;
        let lock = directory.lock()?;
        let has_begun = directory.has_begun();
        // With any strategy, batches are those that the run started with.
        let sampled = before.epochs_sampled.or(has_begun.then_some(before.epochs));
        let mut config = RunConfig { epochs_sampled: sampled.or(config.epochs_sampled), ..config };
        if let (Some(history), Some(before)) = (&mut config.history, &before.history) {
            history.nodes.clone_from(&before.nodes);
            history.rows = history.rows.or(before.rows);
            // A run that was stopped before may still choose.
            history.from = (has_begun || history::is_stored(out)).then(|| out.to_path_buf());
        }
        let path = directory.checkpoint_path();
        let checkpoint = if path.exists() { Some(Checkpoint::read(&path)?) } else { None };
        let scratch = directory.scratch_path();
        let mut run = OpenRun::with_strategy(backend, config, scratch, control, strategy)?;
        if !has_begun {
            run.store_history(&directory)?;
            let (epochs_sampled, history) = (run.config.epochs_sampled, run.config.history.clone());
            directory.write_config(&RunConfig { epochs_sampled, history, ..before })?;
        }
        let state = match checkpoint {
            None => State::default(),
            Some(checkpoint) => {
                let remedy = "delete it to start the run again";
                let state: State = serde_json::from_value(checkpoint.state.clone())
                    .map_err(TrainError::format(&path, "the state of a run", remedy))?;
                run.learner.load_model(&checkpoint.model)?;
                run.learner.load_optimizer(state.steps, &checkpoint.optimizer)?;
                state
            }
        };
        Trainer::new(run, directory, lock, state)
    }

    fn new(run: OpenRun<B>, directory: RunDirectory, lock: File, state: State) -> Result<Trainer<B>> {
        let metrics = directory.metrics(state.metrics_bytes)?;
        let best_files = files_of_best(&directory.best_path(), state.best.as_ref())?;
        let (now, mut state, opened) = (Instant::now(), state, run.clock());
        state.clock.starting += opened.starting;
        state.clock.preparing += opened.preparing;
        Ok(Trainer {
            in_flight: InFlight::new(usize::MAX),
            run,
            directory,
            state,
            metrics,
            clock: StageClock::new("train"),
            last_checkpoint: now,
            batches_since: 0,
            best_files,
            counted: SourceCounters::default(),
            read_before: disk_bytes_read(),
            epoch_started: now,
            _lock: lock,
        })
    }

    /// The run.
    pub fn open_run(&self) -> &OpenRun<B> {
        &self.run
    }

    /// The position at which it continues.
    pub fn position(&self) -> Position {
        Position { epoch: self.state.epoch, batch: self.state.batch }
    }

    /// Trains to the end, or until the watcher stops it.
    pub fn run(mut self, watcher: &mut dyn Watcher) -> Result<Outcome> {
        let mut source = self.open_source()?;
        self.in_flight = InFlight::new(source.lag());
        if self.state.ended.is_none() {
            self.begin_epoch(&*source);
            // Stopped between the last batch of an epoch and the end of its validation.
            let unfinished = self.state.epoch < self.run.config.epochs
                && self.state.batch > 0
                && self.state.batch == self.run.batches_of(self.state.epoch);
            if unfinished && self.end_epoch(&mut *source, watcher)? == Next::Stop {
                return self.stopped(&mut *source, watcher);
            }
            while self.state.ended.is_none() && self.state.epoch < self.run.config.epochs {
                let (clock, next) = (self.clock.clone(), &mut source);
                let batch = match clock.starved(|| next.next()) {
                    Err(StrategyError::Stopped) => return self.stopped(&mut *source, watcher),
                    Err(error) => return Err(self.kept(error.into(), &mut *source, watcher)),
                    Ok(batch) => batch,
                };
                let Some(batch) = batch else { break };
                if !matches!(batch.at.phase, Phase::Train { .. }) {
                    // The source evaluates and the run does not: they are out of step.
                    return Err(StrategyError::Ended { at: Box::new(batch.at) }.into());
                }
                match self.one_batch(batch, &mut *source, watcher) {
                    Ok(Next::Continue) => {}
                    Ok(Next::Stop) => return self.stopped(&mut *source, watcher),
                    Err(error) => return Err(self.kept(error, &mut *source, watcher)),
                }
            }
            let epochs = self.run.config.epochs;
            if self.state.ended.is_none() && self.state.epoch != epochs {
                return Err(TrainError::Ended { epoch: self.state.epoch, epochs });
            }
            self.state.ended.get_or_insert_with(|| "all epochs".into());
            self.checkpoint(&*source)?;
        }
        match self.summarise(source, watcher) {
            Err(TrainError::Stopped | TrainError::Strategy(StrategyError::Stopped)) => {
                Ok(Outcome::Stopped(self.position()))
            }
            summary => Ok(Outcome::Finished(Box::new(summary?))),
        }
    }

    /// Batches from the run's position on, with the source's state of the checkpoint.
    fn open_source(&mut self) -> Result<Box<dyn BatchSource<B>>> {
        let from = match &self.state.ended {
            None => RunPosition::from(self.position()),
            Some(_) => RunPosition::start_of(Phase::Validation { epoch: self.run.config.epochs }),
        };
        let folder = self.directory.state_path();
        let mut reader = StateReader::new(&folder, &self.state.source);
        // A new run has no state.
        let state = (self.state.turn > 0).then_some(&mut reader as &mut dyn CheckpointReader);
        let source = self.run.source(from, state)?;
        reader.finish(&self.run.config.strategy.to_string())?;
        Ok(source)
    }

    fn stopped(mut self, source: &mut dyn BatchSource<B>, watcher: &mut dyn Watcher) -> Result<Outcome> {
        self.settle(source, watcher)?;
        self.checkpoint(source)?;
        Ok(Outcome::Stopped(self.position()))
    }

    /// An error after which the run can continue with more memory: nothing of it is lost.
    fn kept(
        &mut self,
        error: TrainError,
        source: &mut dyn BatchSource<B>,
        watcher: &mut dyn Watcher,
    ) -> TrainError {
        use StrategyError::{BatchMemory, LargeBatch, Sample};
        let is_large = |error: &StrategyError| {
            matches!(error, LargeBatch { .. } | BatchMemory { .. } | Sample(SampleError::Memory { .. }))
        };
        match &error {
            TrainError::LargeDeviceBatch { .. } => {}
            TrainError::Strategy(error) if is_large(error) => {}
            _ => return error,
        }
        let saved = self.settle(source, watcher).and_then(|()| self.checkpoint(source));
        saved.err().unwrap_or(error)
    }

    /// Trains on a batch and does what is due after it.
    fn one_batch(
        &mut self,
        batch: Batch<B>,
        source: &mut dyn BatchSource<B>,
        watcher: &mut dyn Watcher,
    ) -> Result<Next> {
        self.run.plan.device_room.iter().try_for_each(|room| room.check(&batch, true))?;
        let (at, run, in_flight) = (batch.at.position(), &mut self.run, &mut self.in_flight);
        let schedule = &run.config.schedule;
        let lr = schedule.rate(run.config.lr, run.learner.steps())
            * schedule.after_plateaus(self.state.plateaus.count);
        let step = self.clock.busy(|| {
            let (step, feedback) = run.learner.step(batch, lr)?;
            source.apply(feedback)?;
            Ok::<_, TrainError>(step)
        })?;
        // Waits for an asynchronous device.
        let done = self.clock.blocked(|| in_flight.push(step))?;
        if let Some(done) = done {
            self.record(&done, source, watcher)?;
        }
        self.batches_since += 1;
        if self.checkpoint_due() {
            self.settle(source, watcher)?;
            self.checkpoint(source)?;
        }
        if at.batch + 1 == self.run.batches_of(at.epoch) {
            self.settle(source, watcher)?;
            if self.end_epoch(source, watcher)? == Next::Stop {
                return Ok(Next::Stop);
            }
        }
        if watcher.stop() && self.state.ended.is_none() {
            self.settle(source, watcher)?;
            return Ok(Next::Stop);
        }
        Ok(Next::Continue)
    }

    /// Waits for every step in flight, because the next action reads the model or the state.
    fn settle(&mut self, source: &dyn BatchSource<B>, watcher: &mut dyn Watcher) -> Result<()> {
        while let Some(done) = self.in_flight.finish_one()? {
            self.record(&done, source, watcher)?;
        }
        Ok(())
    }

    /// Adds a finished step to the state and the lines. Steps come in order.
    fn record(
        &mut self,
        done: &StepDone,
        source: &dyn BatchSource<B>,
        watcher: &mut dyn Watcher,
    ) -> Result<()> {
        let (at, loss) = (done.at.position(), done.loss);
        self.state.epoch_useful += done.nodes * self.run.row_bytes();
        self.state.epoch_nodes += done.nodes;
        let bits = loss.map_or(u64::MAX, f64::to_bits);
        self.state.digest = mix(self.state.digest ^ mix(bits));
        if let Some(loss) = loss {
            self.state.loss_sum += loss;
            self.state.loss_count += 1;
        }
        let record = BatchRecord { epoch: at.epoch, batch: at.batch, loss, lr: done.rate };
        self.metrics.line("batch", &record)?;
        self.state.batch = at.batch + 1;
        let (batches, epochs) = (self.run.batches_of(at.epoch), self.run.config.epochs);
        let stages = self.stages(source);
        watcher.batch(&BatchProgress { record: &record, batches, epochs, stages: &stages });
        Ok(())
    }

    fn begin_epoch(&mut self, source: &dyn BatchSource<B>) {
        self.epoch_started = Instant::now();
        self.counted = source.counters();
        self.counted.stages = self.stages(source);
        self.read_before = disk_bytes_read();
    }

    /// Validates and closes the epoch. If stopped in between, the epoch is still open.
    fn end_epoch(&mut self, source: &mut dyn BatchSource<B>, watcher: &mut dyn Watcher) -> Result<Next> {
        let mut record = self.epoch_record(source);
        let config = &self.run.config;
        let (epoch, last) = (self.state.epoch, self.state.epoch + 1 == config.epochs);
        let mut better = false;
        if config.eval != EvaluationMode::None && self.run.job.validates_after(epoch) {
            let started = Instant::now();
            let (metric, mode) = (config.metric, config.eval);
            watcher.evaluation("valid");
            let (stop, phase) = (|| watcher.stop(), Phase::Validation { epoch });
            record.valid =
                match self.run.context(&stop).evaluate(SplitName::Valid, mode, Some((source, phase))) {
                    Err(TrainError::Stopped | TrainError::Strategy(StrategyError::Stopped)) => {
                        return Ok(Next::Stop);
                    }
                    found => found?,
                };
            record.evaluation_seconds = started.elapsed().as_secs_f64();
            if let Some((valid, score)) = record.valid.and_then(|valid| Some((valid, valid.score(metric)?))) {
                better = self.keep_better(Best { epoch, score, valid, source: Vec::new() }, source)?;
                self.state.plateaus.evaluated(&self.run.config.schedule, better);
            }
        }
        self.metrics.line("epoch", &record)?;
        self.metrics.flush()?;
        watcher.epoch(&record, better);
        let state = &mut self.state;
        state.seconds += record.seconds + record.evaluation_seconds;
        state.clock.epochs += record.seconds;
        state.clock.validation += record.evaluation_seconds;
        state.epochs.push(record);
        (state.epoch, state.batch) = (epoch + 1, 0);
        (state.loss_sum, state.loss_count, state.epoch_seconds) = (0.0, 0, 0.0);
        (state.epoch_read, state.epoch_useful, state.epoch_nodes) = (0, 0, 0);
        let patience = self.run.config.patience;
        if patience > 0 && state.without_better >= patience && !last {
            state.ended = Some(format!("no better model in {patience} evaluations"));
        }
        self.begin_epoch(source);
        Ok(Next::Continue)
    }

    /// Saves a model that is better than all earlier ones.
    fn keep_better(&mut self, mut found: Best, source: &dyn BatchSource<B>) -> Result<bool> {
        let (better, hopeful) = match (self.run.config.metric, self.state.peaks, &self.state.best) {
            (MetricName::AccuracyAndLoss, Some(peaks), _) => {
                let (score, loss) = (found.score >= peaks.score, found.valid.loss <= peaks.loss);
                (score && loss, score || loss)
            }
            (_, _, best) => {
                let better = best.as_ref().is_none_or(|best| found.score > best.score);
                (better, better)
            }
        };
        let peaks = self.state.peaks.get_or_insert(Peaks { score: found.score, loss: found.valid.loss });
        (peaks.score, peaks.loss) = (peaks.score.max(found.score), peaks.loss.min(found.valid.loss));
        self.state.without_better = if hopeful { 0 } else { self.state.without_better + 1 };
        if better {
            // The current state of the source is saved with the model.
            let folder = self.directory.state_path();
            let mut writer = StateWriter::new(&folder, format!("best-{}", found.epoch));
            source.save_for_inference(&mut writer)?;
            found.source = writer.finish()?;
            let state = serde_json::to_value(&found).map_err(TrainError::format(
                &self.directory.best_path(),
                "a state",
                "report this",
            ))?;
            let model = self.run.learner.export_model()?;
            Checkpoint { model, optimizer: Vec::new(), state }.write(&self.directory.best_path())?;
            self.best_files.clone_from(&found.source);
            // Files of the model that was the best before: current ones are this model's.
            remove_others(&folder, &[&self.state.source, &found.source])?;
            self.state.best = Some(found);
        }
        Ok(better)
    }

    fn epoch_record(&self, source: &dyn BatchSource<B>) -> EpochRecord {
        let (now, state) = (source.counters(), &self.state);
        let stages = self.stages(source);
        let before = |stage: &StageTimes| self.counted.stages.iter().find(|b| b.name == stage.name).cloned();
        EpochRecord {
            epoch: state.epoch,
            seconds: state.epoch_seconds + self.epoch_started.elapsed().as_secs_f64(),
            evaluation_seconds: 0.0,
            batches: self.run.batches_of(state.epoch),
            redundancy: state.epoch_nodes as f64 / self.run.train_items().max(1) as f64,
            loss: state.loss_sum / state.loss_count.max(1) as f64,
            valid: None,
            bytes_read: now.bytes_read - self.counted.bytes_read,
            bytes_written: now.bytes_written - self.counted.bytes_written,
            edge_bytes_read: edge_bytes(&now, &self.counted),
            sample_bytes_read: now.sample_bytes_read - self.counted.sample_bytes_read,
            disk_bytes_read: state.epoch_read + disk_bytes_read().saturating_sub(self.read_before),
            bytes_useful: state.epoch_useful,
            reads: now.reads - self.counted.reads,
            hit_ratio: hit_ratio(&now, &self.counted),
            stages: stages.iter().map(|stage| stage.since(&before(stage).unwrap_or_default())).collect(),
            phases: phases(&now, &self.counted),
            neighbours: neighbours(&now, &self.counted),
            history: history_record(&now, &self.counted),
        }
    }

    fn stages(&self, source: &dyn BatchSource<B>) -> Vec<StageTimes> {
        let mut stages = source.stages();
        stages.push(self.clock.times());
        stages.extend(self.run.learner.device_stages());
        stages
    }

    fn checkpoint_due(&self) -> bool {
        let config = &self.run.config;
        let by_batches = config.checkpoint_batches > 0 && self.batches_since >= config.checkpoint_batches;
        let seconds = self.last_checkpoint.elapsed().as_secs();
        let by_time = config.checkpoint_seconds > 0 && seconds >= config.checkpoint_seconds;
        by_batches || by_time
    }

    fn checkpoint(&mut self, source: &dyn BatchSource<B>) -> Result<()> {
        assert!(self.in_flight.is_empty(), "a checkpoint knows every step that its numbers have taken");
        let (steps, optimizer) = self.run.learner.export_optimizer()?;
        self.state.steps = steps;
        // Lines first: a checkpoint must not refer to lines that do not exist.
        self.state.metrics_bytes = self.metrics.sync()?;
        let folder = self.directory.state_path();
        self.state.turn += 1;
        let mut writer = StateWriter::new(&folder, format!("{}-{}", self.state.epoch, self.state.batch));
        source.save(&mut writer)?;
        self.state.source = writer.finish()?;
        let mut state = self.state.clone();
        state.epoch_seconds += self.epoch_started.elapsed().as_secs_f64();
        state.epoch_read += disk_bytes_read().saturating_sub(self.read_before);
        let state = serde_json::to_value(&state).map_err(TrainError::format(
            &self.directory.checkpoint_path(),
            "a state",
            "report this",
        ))?;
        let model = self.run.learner.export_model()?;
        Checkpoint { model, optimizer, state }.write(&self.directory.checkpoint_path())?;
        remove_others(&folder, &[&self.state.source, &self.best_files])?;
        (self.last_checkpoint, self.batches_since) = (Instant::now(), 0);
        Ok(())
    }

    /// The position of the evaluations after the last epoch.
    fn last_evaluations(&self) -> RunPosition {
        RunPosition::start_of(Phase::Validation { epoch: self.run.config.epochs })
    }

    /// Loads the best model and the state that its source had then.
    fn load_best(&mut self, mut source: Box<dyn BatchSource<B>>) -> Result<Box<dyn BatchSource<B>>> {
        let from = self.last_evaluations();
        if self.state.best.is_some() {
            let best = Checkpoint::read(&self.directory.best_path())?;
            self.run.learner.load_model(&best.model)?;
            let parts = best.source_state(&self.directory.best_path())?;
            if !parts.is_empty() {
                // One source at a time: each may use all the granted memory.
                drop(source);
                let saved = SavedWith { folder: self.directory.state_path(), parts };
                let (strategy, run) = (self.run.config.strategy.to_string(), &mut self.run);
                source = saved.open(&strategy, |state| run.strategy.batches(&run.job, from, state))?;
            }
        }
        Ok(source)
    }

    /// Writes the last weights, evaluates the best model, and makes the summary.
    fn summarise(&mut self, source: Box<dyn BatchSource<B>>, watcher: &mut dyn Watcher) -> Result<Summary> {
        let model = self.run.learner.export_model()?;
        // Its state is that of the last checkpoint.
        let last = serde_json::json!({ "epoch": self.state.epoch, "source": self.state.source });
        Checkpoint { model, optimizer: Vec::new(), state: last }.write(&self.directory.last_path())?;
        let started = Instant::now();
        let mut source = self.load_best(source)?;
        source.skip_to(self.last_evaluations())?;
        let source = &mut *source;
        let mode = self.run.config.final_eval;
        let mut valid = self.state.best.as_ref().map(|best| best.valid);
        let mut test = None;
        if mode != EvaluationMode::None {
            watcher.evaluation("test");
            let stop = || watcher.stop();
            if mode != self.run.config.eval {
                let last = Phase::Validation { epoch: self.run.config.epochs };
                valid = self.run.context(&stop).evaluate(SplitName::Valid, mode, Some((source, last)))?;
            }
            test = self.run.context(&stop).evaluate(SplitName::Test, mode, Some((source, Phase::Test)))?;
        }
        let wall_seconds = WallClock { test: started.elapsed().as_secs_f64(), ..self.state.clock };
        let config = &self.run.config;
        let summary = Summary {
            loss_digest: format!("{:016x}", self.state.digest),
            strategy: config.strategy.to_string(),
            device: config.device.to_string(),
            epochs_sampled: config.epochs_sampled.filter(|epochs| *epochs < config.epochs),
            prepared: self.run.prepared(),
            test,
            valid,
            best_epoch: self.state.best.as_ref().map(|best| best.epoch),
            evaluation: source.counters().evaluation,
            ended: self.state.ended.clone().unwrap_or_default(),
            peak_host_bytes: self.run.peak_own_bytes(),
            peak_with_mapped_bytes: peak_resident_bytes(),
            budget_host_bytes: config.memory,
            memory: self.run.plan.table.clone(),
            peak_device_bytes: self.run.peak_device_bytes(),
            budget_device_bytes: self.run.budget_device_bytes(),
            device_memory: self.run.plan.device_table.clone(),
            history_split: history::stored_split(self.directory.path()),
            partition_steps: self.run.partition_steps(),
            steps: self.state.steps,
            redundancy: mean_redundancy(&self.state.epochs),
            seconds: self.state.seconds,
            wall_seconds,
            epochs: self.state.epochs.clone(),
        };
        self.directory.write_json("summary.json", &summary)?;
        Ok(summary)
    }
}

/// The files that the best model on disk names. Where it is damaged, those that the checkpoint knows: it may be restored from
/// a copy.
fn files_of_best(path: &Path, known: Option<&Best>) -> Result<Vec<StatePart>> {
    match path.exists().then(|| Checkpoint::read(path)) {
        Some(Ok(best)) => best.source_state(path),
        Some(Err(error @ TrainError::Io { .. })) => Err(error),
        Some(Err(_)) | None => Ok(known.map(|best| best.source.clone()).unwrap_or_default()),
    }
}

/// The mean over epochs whose nodes were counted.
fn mean_redundancy(epochs: &[EpochRecord]) -> Option<f64> {
    let counted: Vec<f64> =
        epochs.iter().map(|epoch| epoch.redundancy).filter(|redundancy| *redundancy > 0.0).collect();
    (!counted.is_empty()).then(|| counted.iter().sum::<f64>() / counted.len() as f64)
}

fn hit_ratio(now: &SourceCounters, before: &SourceCounters) -> std::collections::BTreeMap<String, f64> {
    let rows = (now.rows - before.rows).max(1) as f64;
    let hits = now.hits.iter().map(|(tier, count)| {
        let earlier = before.hits.iter().find(|(name, _)| name == tier).map_or(0, |(_, count)| *count);
        (tier.clone(), (count - earlier) as f64 / rows)
    });
    hits.collect()
}

fn phases(now: &SourceCounters, before: &SourceCounters) -> std::collections::BTreeMap<String, f64> {
    let phases = now.phases.iter().map(|(phase, seconds)| {
        let earlier =
            before.phases.iter().find(|(name, _)| name == phase).map_or(0.0, |(_, seconds)| *seconds);
        (phase.clone(), seconds - earlier)
    });
    phases.collect()
}

fn history_record(now: &SourceCounters, before: &SourceCounters) -> Option<HistoryRecord> {
    let (now, before) = (now.history?, before.history.unwrap_or_default());
    let (pulls, pushes) = (now.pulls - before.pulls, now.pushes - before.pushes);
    let mean_age = (now.ages - before.ages) as f64 / pulls.max(1) as f64;
    let (refreshed, saved) = (now.refreshed - before.refreshed, now.saved.since(&before.saved));
    let mean_drift = (now.drift - before.drift) / refreshed.max(1) as f64;
    Some(HistoryRecord { pulls, pushes, mean_age, refreshed, mean_drift, saved })
}

/// Bytes of the edges that a strategy without requests for single nodes reads.
fn edge_bytes(now: &SourceCounters, before: &SourceCounters) -> u64 {
    if now.neighbour_requests == 0 { now.neighbour_bytes_read - before.neighbour_bytes_read } else { 0 }
}

fn neighbours(now: &SourceCounters, before: &SourceCounters) -> Option<NeighbourRecord> {
    let requests = now.neighbour_requests - before.neighbour_requests;
    (requests > 0).then(|| NeighbourRecord {
        hit_ratio: (now.neighbour_hits - before.neighbour_hits) as f64 / requests as f64,
        group_hit_ratio: (now.neighbour_group_hits - before.neighbour_group_hits) as f64 / requests as f64,
        group_bytes_read: now.neighbour_group_bytes_read - before.neighbour_group_bytes_read,
        reads: now.neighbour_reads - before.neighbour_reads,
        bytes_read: now.neighbour_bytes_read - before.neighbour_bytes_read,
    })
}
