//! What the batch contract allows beyond rows in and loss out: rows that training changes, hidden rows that are pulled and
//! pushed, graphs that are on the device already, state in checkpoints. Each against a naive twin.

use crate::common::{Bench, StopAfter, finished, result};
use crate::lagging::Lagging;
use esker_cuda::Gpu;
use esker_fetch::FeatureRows;
use esker_fetch::pipeline::{Permit, StageTimes};
use esker_nn::{
    CpuBackend, CpuMatrix, CudaBackend, Device, HiddenRows, HiddenShape, LinkMath, NormKind, OptimizerKind,
    Shape,
};
use esker_sample::{InMemory, Position, Sample, Sampler};
use esker_store::Dataset;
use esker_strategies::{
    Batch, BatchSource, Blocks, CheckpointReader, CheckpointSink, DeviceBlocks, Exchange, Feedback,
    FixedRows, HiddenTable, Inference, Input, InputTable, Job, JobOutline, LiveRows, LiveTable, Needs, Phase,
    Prepared, Pull, Push, RunPosition, SavedState, SourceCounters, Strategy, StrategyError,
};
use esker_train::{
    EvaluationMode, OpenRun, Outcome, RunConfig, RunControl, RunDirectory, SplitName, Trainer, adjacency,
    evaluate_run,
};
use esker_types::{DeviceName, Dtype, NodeId};
use std::path::Path;
use std::sync::{Arc, Mutex};

type Result<T> = std::result::Result<T, StrategyError>;

/// The features of the graph as f32.
fn features(bench: &Bench) -> (Vec<f32>, usize) {
    let dataset = Dataset::open(&bench.path("g")).unwrap();
    let rows = FeatureRows::load(&dataset, u64::MAX).unwrap();
    let nodes: Vec<NodeId> = (0..rows.rows()).map(NodeId).collect();
    let mut values = vec![0.0; nodes.len() * rows.dim()];
    rows.gather(&nodes, &[], &mut values).unwrap();
    (values, rows.dim())
}

/// Rows that training changes, over any strategy: a row a node, which begins as its feature row. Batches name slots and the step
/// gathers; gradients flow back and move the rows. The table is in checkpoints.
struct Embeddings<D: Device> {
    inner: Box<dyn Strategy<D>>,
    device: D,
    rows: (Vec<f32>, usize),
    rate: f32,
}

struct EmbeddingSource<D: Device> {
    inner: Box<dyn BatchSource<D>>,
    device: D,
    table: Arc<LiveTable<D>>,
    rate: f32,
}

impl<D: Device> Strategy<D> for Embeddings<D> {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        let mut needs = self.inner.needs(job)?;
        needs.device.add("trained rows", self.rows.0.len() as u64 * 4);
        (needs.trains_rows, needs.exchange.input_gradient) = (true, true);
        Ok(needs)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared> {
        self.inner.prepare(job)
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        mut state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let table = self.table(&mut state)?;
        let inner = self.inner.batches(job, from, state)?;
        Ok(self.source(table, inner))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        mut state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let table = self.table(&mut state)?;
        let inner = self.inner.inference(job, over, state)?;
        Ok(self.source(table, inner))
    }
}

impl<D: Device> Embeddings<D> {
    /// The rows as they begin, or those of a checkpoint.
    fn table(&self, state: &mut Option<&mut dyn CheckpointReader>) -> Result<Arc<LiveTable<D>>> {
        let (mut values, dim) = self.rows.clone();
        if let Some(SavedState::Bytes(mut saved)) =
            state.as_mut().map(|state| state.take("table")).transpose()?.flatten()
        {
            let mut bytes = Vec::new();
            saved.read_to_end(&mut bytes).unwrap();
            values = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
        }
        let mut rows = self.device.matrix(values.len() / dim, dim);
        self.device.write(&mut rows, 0, &values);
        Ok(LiveTable::new(rows))
    }

    fn source(&self, table: Arc<LiveTable<D>>, inner: Box<dyn BatchSource<D>>) -> Box<dyn BatchSource<D>> {
        Box::new(EmbeddingSource { inner, device: self.device.clone(), table, rate: self.rate })
    }
}

impl<D: Device> BatchSource<D> for EmbeddingSource<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        let Some(mut batch) = self.inner.next()? else { return Ok(None) };
        let nodes = &batch.blocks.sample().unwrap().node_ids;
        let slots = nodes.iter().map(|node| node.0 as u32).collect();
        batch.input = Input::live(LiveRows { table: self.table.clone(), slots });
        batch.exchange.input_gradient = true;
        Ok(Some(batch))
    }

    fn apply(&mut self, feedback: Feedback<D>) -> Result<()> {
        if let Some(gradient) = feedback.input_gradient {
            self.device.add_rows(&gradient.rows, &gradient.slots, -self.rate, &mut self.table.lock());
        }
        Ok(())
    }

    fn lag(&self) -> usize {
        1
    }

    fn skip_to(&mut self, at: RunPosition) -> Result<()> {
        self.inner.skip_to(at)
    }

    fn save(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        let rows = self.table.lock();
        let mut values = vec![0.0; rows.rows() * rows.columns()];
        self.device.read(&rows, 0, &mut values);
        to.bytes("table", &mut |to| values.iter().try_for_each(|value| to.write_all(&value.to_le_bytes())))
    }

    fn table(&mut self) -> Result<InputTable> {
        let (table, device) = (self.table.clone(), self.device.clone());
        let (rows, dim) = {
            let rows = table.lock();
            (rows.rows() as u64, rows.columns())
        };
        Ok(InputTable::new(rows, dim, move || {
            let (table, device) = (table.clone(), device.clone());
            Ok(Box::new(move |nodes, values| {
                let table = table.lock();
                for (node, row) in nodes.iter().zip(values.chunks_exact_mut(dim)) {
                    device.read(&table, node.index(), row);
                }
                Ok(())
            }))
        }))
    }

    fn counters(&self) -> SourceCounters {
        self.inner.counters()
    }

    fn stages(&self) -> Vec<StageTimes> {
        self.inner.stages()
    }
}

const RATE: f32 = 0.05;

fn embeddings<D: Device>(bench: &Bench, device: &D, config: &RunConfig, rate: f32) -> Box<dyn Strategy<D>> {
    let (inner, device) = (config.strategy.build(device.clone()), device.clone());
    Box::new(Embeddings { inner, device, rows: features(bench), rate })
}

fn create<B: LinkMath>(bench: &Bench, device: &B, config: &RunConfig, out: &Path) -> Trainer<B> {
    let strategy = embeddings(bench, device, config, RATE);
    Trainer::create_with(device.clone(), config.clone(), out, RunControl::default(), strategy).unwrap()
}

fn resume<B: LinkMath>(bench: &Bench, device: &B, config: &RunConfig, out: &Path) -> Trainer<B> {
    let strategy = embeddings(bench, device, config, RATE);
    Trainer::resume_with(device.clone(), config.clone(), out, RunControl::default(), strategy).unwrap()
}

fn trained<B: LinkMath>(bench: &Bench, device: B, config: &RunConfig, out: &Path) -> String {
    let outcome = create(bench, &device, config, out).run(&mut StopAfter(u64::MAX)).unwrap();
    format!("{:?}", result(&finished(outcome), out))
}

/// The losses of training rows on the host: rows are looked up before each step and moved after it.
fn naive_losses(bench: &Bench, config: &RunConfig, most: usize) -> Vec<u64> {
    let backend = CpuBackend::new();
    let mut run = OpenRun::new(backend.clone(), config.clone(), bench.path("naive-scratch")).unwrap();
    let mut source = run.source(RunPosition::START, None).unwrap();
    let ((mut table, dim), mut losses) = (features(bench), Vec::new());
    for _ in 0..most {
        let mut batch = source.next().unwrap().unwrap();
        let nodes = batch.blocks.sample().unwrap().node_ids.clone();
        let mut rows = backend.host_rows(nodes.len(), dim);
        for (node, row) in nodes.iter().zip(rows.values_mut().chunks_exact_mut(dim)) {
            row.copy_from_slice(&table[node.index() * dim..][..dim]);
        }
        batch.input = Input::fixed(FixedRows::Host(rows));
        batch.exchange.input_gradient = true;
        let (step, feedback) = run.step(batch).unwrap();
        losses.push(step.wait().unwrap().loss.unwrap().to_bits());
        let gradient = feedback.input_gradient.unwrap().rows;
        let mut values = vec![0.0; gradient.rows() * dim];
        backend.read(&gradient, 0, &mut values);
        for (node, row) in nodes.iter().zip(values.chunks_exact(dim)) {
            let own = &mut table[node.index() * dim..][..dim];
            own.iter_mut().zip(row).for_each(|(value, gradient)| *value += -0.05 * gradient);
        }
    }
    losses
}

fn losses_of(out: &Path) -> Vec<u64> {
    let number = |line: &String| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        value["loss"].as_f64().unwrap().to_bits()
    };
    crate::common::batch_lines(out).iter().map(number).collect()
}

#[test]
fn rows_that_training_changes_are_gathered_and_moved_in_the_order_of_steps() {
    let bench = Bench::new();
    let config = RunConfig { epochs: 2, ..bench.config() };
    let expected = trained(&bench, CpuBackend::new(), &config, &bench.path("cpu"));
    let losses = losses_of(&bench.path("cpu"));
    assert_eq!(losses[..6], naive_losses(&bench, &config, 6));
    // A device that works behind the host's back sees the same rows.
    let device = Lagging::default();
    assert_eq!(trained(&bench, device.clone(), &config, &bench.path("lagging")), expected);
    assert_eq!(device.most_late.load(std::sync::atomic::Ordering::SeqCst), 2, "one in flight, and the next");
    // And it learns more than features that stay as they are.
    let plain = Trainer::create(CpuBackend::new(), config, &bench.path("plain")).unwrap();
    finished(plain.run(&mut StopAfter(u64::MAX)).unwrap());
    assert!(losses_of(&bench.path("plain")) != losses);
}

#[test]
fn rows_that_training_changes_give_the_same_bits_in_every_run_on_a_gpu() {
    let Some(gpu) = Gpu::or_skip("rows that training changes") else { return };
    drop(gpu);
    let bench = Bench::new();
    let config = RunConfig { epochs: 2, device: DeviceName::Cuda(0), ..bench.config() };
    let open = || CudaBackend::new(Gpu::open(0, None, config.precision).unwrap());
    let runs = ["first", "second"].map(|name| trained(&bench, open(), &config, &bench.path(name)));
    assert_eq!(runs[0], runs[1]);
    let (found, expected) = (losses_of(&bench.path("first")), naive_losses(&bench, &config, 6));
    for (found, expected) in found.iter().zip(&expected) {
        let (found, expected) = (f64::from_bits(*found), f64::from_bits(*expected));
        assert!((found - expected).abs() < 1e-4 * expected.abs(), "{found} {expected}");
    }
    // Graphs that are on the GPU before the step asks for them.
    let out = bench.path("host");
    let trainer = Trainer::create(open(), config.clone(), &out).unwrap();
    let expected = result(&finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap()), &out);
    let (out, device) = (bench.path("device"), open());
    let strategy = Box::new(OnDevice(config.strategy.build(device.clone()), device.clone()));
    let trainer = Trainer::create_with(device, config, &out, RunControl::default(), strategy).unwrap();
    assert!(result(&finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap()), &out) == expected);
}

#[test]
fn a_table_in_a_checkpoint_goes_on_as_if_nothing_had_happened() {
    let bench = Bench::new();
    let config = RunConfig { epochs: 2, checkpoint_batches: 2, ..bench.config() };
    let expected = trained(&bench, CpuBackend::new(), &config, &bench.path("whole"));
    let out = bench.path("parts");
    let device = CpuBackend::new();
    let mut trainer = create(&bench, &device, &config, &out);
    let summary = loop {
        match trainer.run(&mut StopAfter(3)).unwrap() {
            Outcome::Finished(summary) => break summary,
            Outcome::Stopped(_) => trainer = resume(&bench, &device, &config, &out),
        }
    };
    assert_eq!(format!("{:?}", result(&summary, &out)), expected);
    // That of the last checkpoint, and that of the best model.
    assert_eq!(std::fs::read_dir(RunDirectory::open(&out).unwrap().0.state_path()).unwrap().count(), 2);
}

#[test]
fn a_strategy_that_does_not_keep_what_a_checkpoint_holds_refuses_it_by_name() {
    let bench = Bench::new();
    let (config, out, device) = (bench.config(), bench.path("run"), CpuBackend::new());
    let trainer = create(&bench, &device, &config, &out);
    assert!(matches!(trainer.run(&mut StopAfter(3)).unwrap(), Outcome::Stopped(_)));
    let resumed = Trainer::resume(device.clone(), config.clone(), &out).unwrap();
    let said = resumed.run(&mut StopAfter(u64::MAX)).unwrap_err().to_string();
    assert!(said.contains("table") && said.contains("memory"), "{said}");
    // Damage to it is named, too.
    let state = RunDirectory::open(&out).unwrap().0.state_path();
    let file = std::fs::read_dir(state).unwrap().next().unwrap().unwrap().path();
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[1..]).unwrap();
    let resumed = resume(&bench, &device, &config, &out);
    let said = resumed.run(&mut StopAfter(u64::MAX)).unwrap_err().to_string();
    assert!(said.contains("table") && said.contains(&file.display().to_string()), "{said}");
}

#[test]
fn the_best_model_is_tested_and_predicts_with_the_rows_it_was_kept_with() {
    let bench = Bench::new();
    let device = CpuBackend::new();
    for mode in [EvaluationMode::Sampled, EvaluationMode::Full] {
        // Rows that move this fast overshoot: a later model is worse.
        let base = RunConfig { epochs: 6, eval: mode, final_eval: mode, lr: 0.02, ..bench.config() };
        let train = |config: &RunConfig, name: &str| {
            let (out, strategy) = (bench.path(name), embeddings(&bench, &device, config, 400.0));
            let control = RunControl::default();
            let trainer =
                Trainer::create_with(device.clone(), config.clone(), &out, control, strategy).unwrap();
            finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap())
        };
        let name = format!("{mode:?}");
        let summary = train(&base, &name);
        let best = summary.best_epoch.unwrap();
        assert!(best + 1 < base.epochs, "the last model is the best: nothing is tested here");
        // A run that ends there tests the same model with the rows that it has then.
        let twin = train(&RunConfig { epochs: best + 1, ..base.clone() }, &format!("{name}-twin"));
        assert_eq!((twin.best_epoch, twin.test), (Some(best), summary.test), "{mode:?}");
        // And so does whoever opens the run later.
        let (run, config) = RunDirectory::open(&bench.path(&name)).unwrap();
        let strategy = embeddings(&bench, &device, &base, 0.0);
        let mut opened = OpenRun::load_with(device.clone(), &run, config.clone(), strategy).unwrap();
        assert_eq!(evaluate_run(&mut opened, SplitName::Test, mode).unwrap(), summary.test, "{mode:?}");
        let mut without = OpenRun::load(device.clone(), &run, config).unwrap();
        let said = evaluate_run(&mut without, SplitName::Test, mode).unwrap_err().to_string();
        assert!(said.contains("table") && said.contains("memory"), "{said}");
    }
}

#[test]
fn memory_has_room_for_rows_that_training_changes_and_for_what_is_exchanged() {
    let (bench, device) = (Bench::new(), CpuBackend::new());
    let (config, scratch) = (bench.config(), bench.path("scratch"));
    let plain = OpenRun::new(device.clone(), config.clone(), scratch.clone()).unwrap();
    let strategy = embeddings(&bench, &device, &config, RATE);
    let open = |config: &RunConfig, strategy: Box<dyn Strategy<CpuBackend>>| {
        OpenRun::with_strategy(
            device.clone(),
            config.clone(),
            scratch.clone(),
            RunControl::default(),
            strategy,
        )
    };
    let trained = open(&config, strategy).unwrap();
    let line = |run: &OpenRun<CpuBackend>, name: &str| {
        run.plan.table.lines.iter().find(|line| line.what == name).map_or(0, |line| line.bytes)
    };
    let rows = features(&bench).0.len() as u64 * 4;
    assert_eq!((line(&plain, "trained rows"), line(&trained, "trained rows")), (0, rows));
    assert!(line(&trained, "training step") > line(&plain, "training step"));
    assert_eq!(
        trained.plan.smallest_bytes - plain.plan.smallest_bytes,
        rows + line(&trained, "training step") - line(&plain, "training step")
    );
    // A byte less is refused before anything is read.
    let config = RunConfig { memory: trained.plan.smallest_bytes - 1, ..config };
    let strategy = embeddings(&bench, &device, &config, RATE);
    let said = open(&config, strategy).err().unwrap().to_string();
    assert!(said.contains("trained rows"), "{said}");
}

/// A run without norms, and its first batch as often as asked.
struct Repeated {
    run: OpenRun<CpuBackend>,
    backend: CpuBackend,
}

impl Repeated {
    fn new(bench: &Bench, lr: f64, dropout: f32) -> Repeated {
        let mut config = RunConfig { lr, ..bench.config() };
        (config.model.dropout, config.model.norm) = (dropout, NormKind::None);
        config.optimizer.kind = OptimizerKind::Sgd;
        let backend = CpuBackend::new();
        let run = OpenRun::new(backend.clone(), config, bench.path("repeated-scratch")).unwrap();
        Repeated { run, backend }
    }

    fn batch(&mut self, at: RunPosition) -> Batch<CpuBackend> {
        self.run.source(at, None).unwrap().next().unwrap().unwrap()
    }

    /// Rows that the last layer reads, and how many of them it writes.
    fn hidden_rows(&mut self) -> (u32, u32) {
        let batch = self.batch(RunPosition::START);
        let view = batch.blocks.sample().unwrap().layer(1);
        (view.inputs.len() as u32, view.outputs.len() as u32)
    }

    fn weights(&self) -> Vec<esker_nn::Named> {
        self.run.learner().export_model().unwrap()
    }

    /// Trains on the first batch; the bits of its loss, and the hidden rows that it pushed.
    fn step(&mut self, exchange: Exchange<CpuBackend>) -> (u64, Option<Vec<f32>>) {
        let mut batch = self.batch(RunPosition::START);
        batch.exchange = exchange;
        let (step, feedback) = self.run.step(batch).unwrap();
        let pushed = feedback.pushed.first().map(|pushed| pushed.rows.values().to_vec());
        (step.wait().unwrap().loss.unwrap().to_bits(), pushed)
    }
}

fn push(rows: impl Iterator<Item = u32>) -> Vec<Push> {
    let rows: Vec<u32> = rows.collect();
    vec![Push { layer: 1, slots: (0..rows.len() as u32).collect(), rows }]
}

/// A store of these rows, one slot each.
fn stored(backend: &CpuBackend, rows: &CpuMatrix) -> Arc<HiddenTable<CpuBackend>> {
    let (slots, columns) = (rows.rows() as u64, rows.columns());
    let shape = HiddenShape { slots, columns, dtype: Dtype::F32, device_bytes: u64::MAX };
    let mut hidden = backend.hidden_rows(shape).unwrap();
    hidden.push(rows, &(0..slots as u32).collect::<Vec<u32>>(), &vec![false; slots as usize]);
    HiddenTable::new(hidden)
}

#[test]
fn pulled_rows_are_the_rows_that_were_pushed_and_no_gradient_flows_through_them() {
    let bench = Bench::new();
    // Nothing moves: what is pulled is what would be computed.
    let mut still = Repeated::new(&bench, 1e-30, 0.0);
    let (all, _) = still.hidden_rows();
    let some = || (0..all).filter(|row| row % 3 != 1);
    let (plain, _) = still.step(Exchange::none());
    let (loss, pushed) = still.step(Exchange { pushes: push(some()), ..Exchange::none() });
    let (pushed, width) = (pushed.unwrap(), 24);
    assert_eq!((loss, pushed.len()), (plain, some().count() * width));
    let mut rows = still.backend.matrix(pushed.len() / width, width);
    still.backend.write(&mut rows, 0, &pushed);
    let table = stored(&still.backend, &rows);
    let pull = |rows: Vec<u32>, table: &Arc<HiddenTable<CpuBackend>>| {
        let slots = (0..rows.len() as u32).collect();
        Exchange { pulls: vec![Pull { layer: 1, rows, table: table.clone(), slots }], ..Exchange::none() }
    };
    assert_eq!(still.step(pull(some().collect(), &table)).0, plain);
    // Other rows give another loss: they are really read.
    still.backend.fill(&mut rows, 0.5);
    assert!(still.step(pull(some().collect(), &stored(&still.backend, &rows))).0 != plain);
    // Where every row is pulled, the first layer has no gradient, and the last one has.
    let mut moving = Repeated::new(&bench, 0.1, 0.0);
    let mut rows = moving.backend.matrix(all as usize, width);
    moving.backend.fill(&mut rows, 0.25);
    let before = moving.weights();
    let table = stored(&moving.backend, &rows);
    moving.step(pull((0..all).collect(), &table));
    for (before, after) in before.iter().zip(moving.weights()) {
        let moved = before.values != after.values;
        assert_eq!(moved, after.name.starts_with("layers.1."), "{}", after.name);
    }
}

/// Hidden rows by node, which are made up.
fn made_up(node: NodeId) -> [f32; 24] {
    std::array::from_fn(|column| ((node.0 * 31 + column as u64 * 7) % 100) as f32 / 100.0)
}

/// The twin of a sample with pulled nodes: one that has all of them computed, and then overwritten.
#[test]
fn rows_that_are_not_computed_train_as_if_they_were_computed_and_overwritten() {
    let bench = Bench::new();
    let pulls = |node: NodeId| !node.0.is_multiple_of(3);
    let trained = |leaves_out: bool| {
        let mut run = Repeated::new(&bench, 0.1, 0.0);
        let dataset = Dataset::open(&bench.path("g")).unwrap();
        let graph = InMemory::<u32>::load(&dataset, run.run.config.direction).unwrap();
        let mut sampler = Sampler::new(&graph, run.run.config.settings(), 1 << 30).unwrap();
        let mut batch = run.batch(RunPosition::START);
        let (seeds, mut sample) = (batch.blocks.seeds().0, Sample::default());
        let pulled = &mut |_: usize, _: usize, node: NodeId| leaves_out && pulls(node);
        sampler.sample_with_pulls(Position { epoch: 0, batch: 0 }, &seeds, pulled, &mut sample).unwrap();
        let view = sample.layer(1);
        let (first, targets) = (view.inputs.start, view.outputs.start);
        let rows: Vec<u32> = (first..targets)
            .filter(|local| pulls(sample.node_ids[*local as usize]))
            .map(|local| local - first)
            .collect();
        assert_eq!(rows.iter().copied().eq(0..sample.pulled_at(1)), leaves_out);
        let mut hidden = run.backend.matrix(rows.len(), 24);
        for (row, local) in rows.iter().enumerate() {
            run.backend.write(&mut hidden, row, &made_up(sample.node_ids[(local + first) as usize]));
        }
        let slots = (0..rows.len() as u32).collect();
        let pull = Pull { layer: 1, rows, table: stored(&run.backend, &hidden), slots };
        // What is pushed is what was computed, found by node.
        let computed: Vec<u32> = (sample.pulled_nodes(1).end..sample.node_ids.len() as u32)
            .filter(|local| *local >= targets || !pulls(sample.node_ids[*local as usize]))
            .collect();
        let nodes: Vec<NodeId> = computed.iter().map(|local| sample.node_ids[*local as usize]).collect();
        batch.exchange = Exchange {
            pulls: vec![pull],
            pushes: push(computed.iter().map(|local| local - first)),
            input_gradient: false,
        };
        let dim = 12;
        let mut values = vec![0.0; sample.node_ids.len() * dim];
        FeatureRows::load(&dataset, u64::MAX).unwrap().gather(&sample.node_ids, &[], &mut values).unwrap();
        let mut input = run.backend.host_rows(sample.node_ids.len(), dim);
        input.values_mut().copy_from_slice(&values);
        batch.input = Input::fixed(FixedRows::Host(input));
        let graphs = (0..2).map(|layer| run.backend.graph(&adjacency(&sample.layer(layer)))).collect();
        let seed_rows = sample.seeds.iter().map(|seed| seed.0 - targets).collect();
        batch.blocks = Blocks::Device(DeviceBlocks { graphs, edges: sample.edge_count(), seeds, seed_rows });
        let (step, feedback) = run.run.step(batch).unwrap();
        let pushed = feedback.pushed[0].rows.values().to_vec();
        let by_node: std::collections::BTreeMap<NodeId, Vec<f32>> =
            nodes.into_iter().zip(pushed.chunks_exact(24).map(<[f32]>::to_vec)).collect();
        (step.wait().unwrap().loss.unwrap(), by_node, run.weights())
    };
    let (without, with) = (trained(false), trained(true));
    assert!((without.0 - with.0).abs() < 1e-6, "{} {}", without.0, with.0);
    assert_eq!(without.1.keys().collect::<Vec<_>>(), with.1.keys().collect::<Vec<_>>());
    let near =
        |one: &[f32], other: &[f32]| one.iter().zip(other).all(|(one, other)| (one - other).abs() < 1e-5);
    assert!(without.1.iter().all(|(node, row)| near(row, &with.1[node])));
    for (one, other) in without.2.iter().zip(&with.2) {
        assert!(near(&one.values, &other.values), "{}", one.name);
    }
    // And a model that has not moved is another one.
    let still = Repeated::new(&bench, 0.1, 0.0).weights();
    assert!(still.iter().zip(&with.2).any(|(one, other)| !near(&one.values, &other.values)));
}

#[test]
fn rows_are_pushed_and_pulled_before_dropout() {
    let bench = Bench::new();
    let pushed_by = |dropout: f32| {
        let mut run = Repeated::new(&bench, 1e-30, dropout);
        let all = run.hidden_rows().0;
        run.step(Exchange { pushes: push(0..all), ..Exchange::none() })
    };
    let ((_, whole), (with_push, dropped)) = (pushed_by(0.0), pushed_by(0.5));
    assert_eq!(whole, dropped, "dropout does not reach what is pushed");
    // And it reaches what comes after: masks are those of a step that exchanges nothing.
    let plain = Repeated::new(&bench, 1e-30, 0.5).step(Exchange::none()).0;
    assert_eq!(with_push, plain);
    let mut run = Repeated::new(&bench, 1e-30, 0.5);
    let values = whole.unwrap();
    let mut rows = run.backend.matrix(values.len() / 24, 24);
    run.backend.write(&mut rows, 0, &values);
    let all: Vec<u32> = (0..rows.rows() as u32).collect();
    let pull = Pull { layer: 1, rows: all.clone(), table: stored(&run.backend, &rows), slots: all };
    assert_eq!(run.step(Exchange { pulls: vec![pull], ..Exchange::none() }).0, plain);
}

#[test]
fn a_batch_without_labels_still_exchanges() {
    let bench = Bench::new();
    let mut repeated = Repeated::new(&bench, 0.1, 0.0);
    // Nodes of validation have no label to train on.
    let mut batch = repeated.batch(RunPosition::start_of(Phase::Validation { epoch: 0 }));
    assert_eq!(batch.at.phase, Phase::Validation { epoch: 0 });
    let (before, seeds) = (repeated.weights(), batch.blocks.seeds().0.len());
    batch.exchange = Exchange { pushes: push(0..5), input_gradient: true, ..Exchange::none() };
    let (step, feedback) = repeated.run.step(batch).unwrap();
    assert!(seeds > 0 && step.wait().unwrap().loss.is_none());
    assert_eq!(feedback.pushed[0].rows.rows(), 5);
    assert!(feedback.rate.is_none() && feedback.input_gradient.is_none());
    assert_eq!(repeated.weights(), before);
}

/// A source whose graphs are on the device before the step asks.
struct OnDevice<D: Device>(Box<dyn Strategy<D>>, D);
struct OnDeviceSource<D: Device>(Box<dyn BatchSource<D>>, D, Arc<Mutex<u64>>);

impl<D: Device> Strategy<D> for OnDevice<D> {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        self.0.needs(job)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared> {
        self.0.prepare(job)
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        Ok(Box::new(OnDeviceSource(self.0.batches(job, from, state)?, self.1.clone(), Arc::default())))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        self.0.inference(job, over, state)
    }
}

impl<D: Device> BatchSource<D> for OnDeviceSource<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        let Some(mut batch) = self.0.next()? else { return Ok(None) };
        let (seeds, seed_rows) = batch.blocks.seeds();
        let (nodes, edges) = (batch.blocks.nodes(), batch.blocks.edges());
        let sample = batch.blocks.sample().unwrap();
        let graphs =
            (0..sample.layers()).map(|layer| self.1.graph(&adjacency(&sample.layer(layer)))).collect();
        batch.blocks = Blocks::Device(DeviceBlocks { graphs, edges, seeds, seed_rows });
        assert_eq!((batch.blocks.nodes(), batch.blocks.edges()), (nodes, edges));
        // A batch of its own, too: whoever makes one needs no pipeline.
        let Batch { at, blocks, input, targets, exchange, .. } = batch;
        Ok(Some(Batch { at, blocks, input, targets, exchange, permit: Permit::unlimited() }))
    }

    fn apply(&mut self, feedback: Feedback<D>) -> Result<()> {
        assert!(feedback.pushed.is_empty() && feedback.input_gradient.is_none());
        *self.2.lock().unwrap() += 1;
        self.0.apply(feedback)
    }

    fn lag(&self) -> usize {
        self.0.lag()
    }

    fn skip_to(&mut self, at: RunPosition) -> Result<()> {
        self.0.skip_to(at)
    }

    fn save(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.0.save(to)
    }

    fn table(&mut self) -> Result<InputTable> {
        self.0.table()
    }

    fn counters(&self) -> SourceCounters {
        self.0.counters()
    }

    fn stages(&self) -> Vec<StageTimes> {
        self.0.stages()
    }
}

#[test]
fn graphs_that_are_on_the_device_already_train_and_evaluate_alike() {
    let bench = Bench::new();
    let config = RunConfig { epochs: 2, ..bench.config() };
    let out = bench.path("host");
    let trainer = Trainer::create(CpuBackend::new(), config.clone(), &out).unwrap();
    let expected = result(&finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap()), &out);
    let out = bench.path("device");
    let device = Lagging::default();
    let strategy = Box::new(OnDevice(config.strategy.build(device.clone()), device.clone()));
    let trainer = Trainer::create_with(device, config, &out, RunControl::default(), strategy).unwrap();
    assert!(result(&finished(trainer.run(&mut StopAfter(u64::MAX)).unwrap()), &out) == expected);
}
