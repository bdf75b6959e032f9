//! What the GPU and its kernels do: memory, the bus, aggregation, and whole training steps.

use crate::exit::usage;
use crate::output::{TextTable, print, print_json};
use anyhow::Context;
use esker_cuda::{DeviceMatrix, Gpu, Precision, Stopwatch, measure};
use esker_nn::*;
use esker_types::median;
use esker_types::random::{Key, below, normal};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Measure the GPU: memory, bus, aggregation, training steps
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker bench gpu                              rates of memory and bus, and steps of GraphSAGE and GAT
  esker bench gpu --model sage --precision tf32
  esker bench gpu --rows 240000,61500,8300,1000 --edges-each 7
  esker bench gpu --export batch --json        the batch of the steps as files, for bench/peers/gpu_step.py

A step is forward, loss, backward and Adam on one batch. Adjacency is uploaded from host memory each time and transposed on the GPU. `device` is the time on the GPU, measured by events; `wall` is the time of a loop of steps; `launching` is the time of the same loop over a batch of a thousandth of the rows: what the host alone takes per step."
)]
pub struct GpuArguments {
    /// Which GPU
    #[arg(long, default_value_t = 0)]
    number: u32,
    /// Input rows of each layer, then the seed nodes
    #[arg(long, value_delimiter = ',', default_value = "666000,101000,11000,1000")]
    rows: Vec<usize>,
    /// Neighbours per node
    #[arg(long, default_value_t = 10)]
    edges_each: u64,
    /// Features per node
    #[arg(long, default_value_t = 128)]
    dim: usize,
    /// Width of hidden layers; GAT takes 4 heads that share 128
    #[arg(long, default_value_t = 256)]
    hidden: usize,
    /// Models whose steps are measured
    #[arg(long, value_delimiter = ',', default_value = "sage,gat")]
    model: Vec<String>,
    /// How matmuls are computed
    #[arg(long, value_delimiter = ',', default_value = "f32,tf32")]
    precision: Vec<String>,
    /// Steps measured
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1000))]
    steps: u64,
    /// Rounds of everything; medians count
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Leave the rates of memory and bus out
    #[arg(long)]
    steps_only: bool,
    /// Write the batch to this directory, for others to train on
    #[arg(long)]
    export: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const CLASSES: usize = 172;

pub fn run(arguments: &GpuArguments) -> anyhow::Result<ExitCode> {
    if arguments.rows.len() < 2 || !arguments.rows.is_sorted_by(|a, b| a >= b) {
        return Err(usage(format!(
            "--rows {:?} does not shrink from layer to layer; give for example 240000,61500,8300,1000",
            arguments.rows
        )));
    }
    let batch = StepBatch::new(&arguments.rows, arguments.edges_each);
    let few: Vec<usize> = arguments.rows.iter().map(|rows| rows.div_ceil(1000)).collect();
    let tiny = StepBatch::new(&few, arguments.edges_each);
    if let Some(directory) = &arguments.export {
        batch.export(directory, arguments.dim)?;
    }
    let gpu = Gpu::open(arguments.number, None, Precision::F32)?;
    let mut found = json!({ "gpu": gpu.info().name, "rows": arguments.rows, "edges": batch.nbrs.len() });
    let mut table = TextTable::new();
    table.row("GPU", gpu.info().name.clone());
    if !arguments.steps_only {
        let rates = rates(&gpu, arguments.rounds as usize)?;
        for (name, value) in rates.as_object().into_iter().flatten() {
            table.row(name.clone(), format!("{:.1} GB/s", value.as_f64().unwrap_or(0.0) / 1e9));
        }
        found["bytes_per_second"] = rates;
    }
    drop(gpu);
    let mut steps = Vec::new();
    for model in &arguments.model {
        for precision in &arguments.precision {
            let mut step = measure_steps(arguments, &batch, model, precision)?;
            step["launching_ms"] = measure_steps(arguments, &tiny, model, precision)?["wall_ms"].take();
            let ms = |key: &str| step[key].as_f64().unwrap_or(0.0);
            table.row(
                format!("{model} {precision}"),
                format!(
                    "device {:.3} ms, wall {:.3} ms, launching {:.3} ms, {} launches",
                    ms("device_ms"),
                    ms("wall_ms"),
                    ms("launching_ms"),
                    step["launches"]
                ),
            );
            steps.push(step);
        }
    }
    found["steps"] = steps.into();
    if arguments.json { print_json(&found) } else { print(&table.render()) }
}

/// A batch in DENSE form with lists of one length, neighbours drawn from the rows that their layer reads.
struct StepBatch {
    rows: Vec<usize>,
    offsets: Vec<u32>,
    nbrs: Vec<u32>,
}

impl StepBatch {
    fn new(rows: &[usize], each: u64) -> StepBatch {
        let key = Key::new(7);
        let (mut offsets, mut nbrs) = (vec![0], Vec::new());
        for node in rows[0] - rows[1]..rows[0] {
            let layer =
                (0..rows.len() - 1).rev().find(|layer| node >= rows[0] - rows[layer + 1]).unwrap_or(0);
            let first = (rows[0] - rows[layer]) as u64;
            nbrs.extend((0..each).map(|place| {
                let bits = key.with(node as u64).at(place);
                (first + below(bits, rows[layer] as u64)) as u32
            }));
            offsets.push(nbrs.len() as u32);
        }
        StepBatch { rows: rows.to_vec(), offsets, nbrs }
    }

    fn lists(&self, layer: usize) -> Adjacency<'_> {
        Adjacency {
            inputs: self.rows[layer],
            outputs: self.rows[layer + 1],
            nbr_offsets: &self.offsets[self.rows[1] - self.rows[layer + 1]..],
            nbrs: &self.nbrs,
            base: (self.rows[0] - self.rows[layer]) as u32,
            input_degrees: &[],
        }
    }

    fn export(&self, directory: &Path, dim: usize) -> anyhow::Result<()> {
        let write = |name: &str, bytes: &[u8]| {
            let path = directory.join(name);
            std::fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))
        };
        std::fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
        write("offsets.u32", bytemuck::cast_slice(&self.offsets))?;
        write("nbrs.u32", bytemuck::cast_slice(&self.nbrs))?;
        let shape = json!({ "rows": self.rows, "dim": dim, "classes": CLASSES });
        write("batch.json", shape.to_string().as_bytes())
    }
}

/// Bytes per second of memory, of the bus and of aggregation.
fn rates(gpu: &Gpu, rounds: usize) -> anyhow::Result<Value> {
    let widths = [128usize, 256, 1024];
    let mut found = serde_json::Map::new();
    found.insert("copy on the device".into(), measure::copy_rate(gpu, rounds)?.into());
    for columns in &widths[..2] {
        let name = format!("aggregation of rows of {} bytes", columns * 4);
        found.insert(name, measure::aggregation_rate(gpu, rounds, *columns)?.into());
    }
    for (columns, rate) in widths.iter().zip(measure::host_read_rates(gpu, rounds, 2 << 30, &widths)?) {
        found.insert(format!("host memory read by GPU threads, rows of {} bytes", columns * 4), rate.into());
    }
    found.insert("copy from pinned host memory".into(), measure::bus_rate(gpu, rounds, 1 << 30)?.into());
    Ok(Value::Object(found))
}

fn measure_steps(
    arguments: &GpuArguments,
    batch: &StepBatch,
    model: &str,
    precision: &str,
) -> anyhow::Result<Value> {
    let word = |word: &str| Value::String(word.to_string());
    let kind: Kind = serde_json::from_value(word(model))
        .map_err(|error| usage(format!("`{model}` is not a model: {error}")))?;
    let precision_found: Precision = serde_json::from_value(word(precision))
        .map_err(|error| usage(format!("`{precision}` is not a precision: {error}")))?;
    let gpu = Gpu::open(arguments.number, None, precision_found)?;
    let backend = CudaBackend::new(gpu.clone());
    let layers = batch.rows.len() - 1;
    let hidden = if kind == Kind::Gat { 128 } else { arguments.hidden };
    let config = ModelConfig {
        kind,
        layers,
        hidden,
        heads: 4,
        dropout: 0.0,
        gcn_degree: Degree::Sampled,
        activation: if kind == Kind::Gat { Activation::Elu } else { Activation::Relu },
        ..ModelConfig::default()
    };
    let mut network = Model::new(&backend, &config, arguments.dim, CLASSES, 1)?;
    let mut optimizer = Optimizer::new(&network, &OptimizerConfig::default())?;
    let key = Key::new(9);
    let mut host = backend.host_rows(batch.rows[0], arguments.dim);
    host.values_mut().iter_mut().zip(0..).for_each(|(x, at)| *x = normal(key.at(at)));
    let input = backend.upload(host, arguments.dim);
    let rows: Vec<u32> = (0..batch.rows[layers] as u32).collect();
    let labels: Vec<u32> = rows.iter().map(|row| below(key.at(*row as u64), CLASSES as u64) as u32).collect();
    let mut step = |number: u64| -> anyhow::Result<CudaNumber> {
        let graphs: Vec<CudaGraph> = (0..layers).map(|layer| backend.graph(&batch.lists(layer))).collect();
        let activations = network.forward(&graphs, &input, number);
        let (loss, gradient) = network.loss(activations.logits(), &rows, Labels::Classes(&labels))?;
        network.backward(&graphs, &input, activations, gradient, false);
        optimizer.step(&mut network, 0.003)?;
        Ok(loss)
    };
    for number in 0..3 {
        step(number)?.wait()?;
    }
    let (mut device, mut wall, mut launches) = (vec![], vec![], 0);
    let mut loss = 0.0;
    let peak = gpu.peak_bytes();
    let from = DeviceMatrix::new(&gpu, 1 << 20, 512);
    let mut to = DeviceMatrix::new(&gpu, 1 << 20, 512);
    for _ in 0..arguments.rounds {
        gpu.synchronize()?;
        let started = Instant::now();
        let numbers: Vec<CudaNumber> = (0..arguments.steps).map(&mut step).collect::<anyhow::Result<_>>()?;
        gpu.synchronize()?;
        wall.push(started.elapsed().as_secs_f64() / arguments.steps as f64 * 1e3);
        for number in numbers {
            loss = number.wait()?;
        }
        // Work that keeps the GPU busy while the host runs ahead.
        (0..40).for_each(|_| gpu.copy_matrix(&from, &mut to));
        let before = gpu.launches();
        let watch = Stopwatch::start(&gpu);
        let numbers: Vec<CudaNumber> = (0..5).map(&mut step).collect::<anyhow::Result<_>>()?;
        launches = (gpu.launches() - before) / 5;
        device.push(watch.stop()? / 5.0 * 1e3);
        drop(numbers);
    }
    Ok(json!({
        "model": model,
        "precision": precision,
        "device_ms": median(&device),
        "wall_ms": median(&wall),
        "launches": launches,
        "loss": loss,
        "peak_device_bytes": peak,
    }))
}
