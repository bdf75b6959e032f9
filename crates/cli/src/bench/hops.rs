//! `esker bench sample --form hops`: samples in the order of PyG's loaders, with the options they have.

use super::sample::{LineVariant, SampleArguments, WorkShare};
use crate::exit::usage;
use anyhow::bail;
use esker_sample::hops::{
    HopEdges, HopSample, HopSampler, HopSettings, NeighbourChoice, NeighbourTimes, NeighbourWeights,
    TemporalStrategy, WeightColumn,
};
use esker_sample::{Batches, InMemory, Position, StoredId};
use esker_store::Dataset;
use esker_types::{ByteCount, Dtype, median};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Options of `--form hops`.
#[derive(clap::Args)]
#[command(next_help_heading = "Options of --form hops")]
pub struct HopArguments {
    /// Draw neighbours with replacement
    #[arg(long)]
    replace: bool,
    /// A tree for each seed, which shares no nodes with others
    #[arg(long)]
    disjoint: bool,
    /// Which edges samples have
    #[arg(long, value_name = "TYPE")]
    subgraph: Option<SubgraphType>,
    /// Draw in proportion to an edge column of f32, such as edge-weight; weight 0 is never drawn
    #[arg(long, value_name = "COLUMN", conflicts_with = "time")]
    weights: Option<String>,
    /// Take only edges that are not later than the seed, by an edge column of i64, such as edge-time
    #[arg(long, value_name = "COLUMN")]
    time: Option<String>,
    /// Which of these edges
    #[arg(long, value_name = "STRATEGY", requires = "time")]
    temporal: Option<StrategyName>,
    /// The time of every seed; default: that of the latest edge
    #[arg(long, value_name = "TIME", requires = "time")]
    seed_time: Option<i64>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum SubgraphType {
    /// Those that were sampled
    Directional,
    /// The reverse of each, too
    Bidirectional,
    /// All between the nodes
    Induced,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum StrategyName {
    /// Any
    Uniform,
    /// The latest
    Last,
}

impl HopArguments {
    /// Whether any of them is given.
    pub fn any(&self) -> bool {
        let columns = self.weights.is_some() || self.time.is_some();
        self.replace || self.disjoint || self.subgraph.is_some() || columns
    }
}

/// Measures hop samples.
pub struct HopBench<'a, W> {
    arguments: &'a SampleArguments,
    graph: &'a InMemory<W>,
    batches: &'a dyn Batches,
    choice: NeighbourChoice,
    /// The time of every seed, in temporal samples.
    seed_time: Option<i64>,
    most_bytes: u64,
}

/// What a batch had.
#[derive(Clone, Copy)]
struct HopBatchSize {
    number: u64,
    nodes: u64,
    edges: u64,
    digest: u64,
    seconds: f64,
}

impl<'a, W: StoredId> HopBench<'a, W> {
    pub fn new(
        arguments: &'a SampleArguments,
        dataset: &Dataset,
        graph: &'a InMemory<W>,
        batches: &'a dyn Batches,
        most_bytes: u64,
    ) -> anyhow::Result<HopBench<'a, W>> {
        let hops = &arguments.hops;
        let (choice, seed_time, shared_bytes) = match (&hops.weights, &hops.time) {
            (Some(name), _) => {
                let column: Vec<f32> = column(dataset, name, Dtype::F32, most_bytes)?;
                let left = most_bytes - column.len() as u64 * 4;
                let weights = NeighbourWeights::new(graph, WeightColumn::F32(&column), left)?;
                let bytes = weights.bytes();
                (NeighbourChoice::Weighted(Arc::new(weights)), None, bytes)
            }
            (None, Some(name)) => {
                let column: Vec<i64> = column(dataset, name, Dtype::I64, most_bytes)?;
                let left = most_bytes - column.len() as u64 * 8;
                let times = NeighbourTimes::of_edges(graph, &column, left)?;
                let latest = column.iter().copied().max().unwrap_or(0);
                let strategy = match hops.temporal {
                    None | Some(StrategyName::Uniform) => TemporalStrategy::Uniform,
                    Some(StrategyName::Last) => TemporalStrategy::Last,
                };
                let bytes = times.bytes();
                let seed_time = hops.seed_time.unwrap_or(latest);
                (NeighbourChoice::Temporal(Arc::new(times), strategy), Some(seed_time), bytes)
            }
            (None, None) => (NeighbourChoice::Uniform, None, 0),
        };
        let most_bytes = most_bytes.saturating_sub(shared_bytes);
        Ok(HopBench { arguments, graph, batches, choice, seed_time, most_bytes })
    }

    fn settings(&self, variant: &LineVariant) -> HopSettings {
        let hops = &self.arguments.hops;
        HopSettings {
            seed: self.arguments.seed,
            fanouts: variant.fanouts.clone(),
            replace: hops.replace,
            disjoint: hops.disjoint,
            edges: match hops.subgraph {
                None | Some(SubgraphType::Directional) => HopEdges::Directional,
                Some(SubgraphType::Bidirectional) => HopEdges::Bidirectional,
                Some(SubgraphType::Induced) => HopEdges::Induced,
            },
        }
    }

    /// A line of the table.
    pub fn row(&self, variant: &LineVariant) -> anyhow::Result<Value> {
        let (mut runs, mut rates) = (Vec::new(), Vec::new());
        for _ in 0..self.arguments.repeat {
            let (found, seconds) = match variant.share {
                WorkShare::Bulk => self.bulk(variant)?,
                WorkShare::Within => self.within(variant)?,
            };
            let edges: u64 = found.iter().map(|batch| batch.edges).sum();
            rates.push(edges as f64 / seconds.max(1e-9));
            runs.push(found);
        }
        let (run, batches) = (&runs[0], self.arguments.batches);
        let sum = |of: fn(&HopBatchSize) -> u64| run.iter().map(of).sum::<u64>();
        let (nodes, edges) = (sum(|batch| batch.nodes), sum(|batch| batch.edges));
        let digest = run.iter().fold(0u64, |digest, batch| digest.rotate_left(1) ^ batch.digest);
        let (rate, best) = (median(&rates), rates.iter().copied().fold(0.0, f64::max));
        Ok(json!({
            "form": "hops", "layers": variant.fanouts.len(), "threads": variant.threads,
            "share": if variant.share == WorkShare::Bulk { "bulk" } else { "within" },
            "fanout": variant.fanouts.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
            "edges_per_second": rate, "edges_per_second_best": best,
            "seconds_per_batch": edges as f64 / batches as f64 / rate.max(1e-9),
            "nodes_per_batch": nodes / batches, "edges_per_batch": edges / batches,
            "digest": self.arguments.digest.then(|| format!("{digest:016x}")),
        }))
    }

    /// Each thread its own batches: every n-th. A thread's first batch, which still allocates, is sampled twice.
    fn bulk(&self, variant: &LineVariant) -> anyhow::Result<(Vec<HopBatchSize>, f64)> {
        let threads = variant.threads;
        let work = |worker: usize| -> anyhow::Result<(Vec<HopBatchSize>, f64)> {
            let most_bytes = self.most_bytes / threads as u64;
            let mut sampler =
                HopSampler::new(self.graph, self.settings(variant), self.choice.clone(), most_bytes)?;
            let (mut out, mut found) = (HopSample::default(), Vec::new());
            self.batch(&mut sampler, worker as u64, &mut out)?;
            let started = Instant::now();
            for number in (worker as u64..self.arguments.batches).step_by(threads) {
                found.push(self.batch(&mut sampler, number, &mut out)?);
            }
            Ok((found, started.elapsed().as_secs_f64()))
        };
        let results: Vec<anyhow::Result<(Vec<HopBatchSize>, f64)>> = std::thread::scope(|scope| {
            let work = &work;
            let workers: Vec<_> = (0..threads).map(|worker| scope.spawn(move || work(worker))).collect();
            let join = |worker: std::thread::ScopedJoinHandle<'_, _>| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            workers.into_iter().map(join).collect()
        });
        let (mut all, mut seconds) = (Vec::new(), 0f64);
        for result in results {
            let (found, of_worker) = result?;
            all.extend(found);
            seconds = seconds.max(of_worker);
        }
        all.sort_by_key(|batch| batch.number);
        Ok((all, seconds))
    }

    /// All threads one batch.
    fn within(&self, variant: &LineVariant) -> anyhow::Result<(Vec<HopBatchSize>, f64)> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(variant.threads).build()?;
        let sampler =
            HopSampler::new(self.graph, self.settings(variant), self.choice.clone(), self.most_bytes)?;
        let (mut sampler, mut out) = (sampler.with_threads(variant.threads), HopSample::default());
        pool.install(|| self.batch(&mut sampler, 0, &mut out))?;
        let mut found = Vec::new();
        for number in 0..self.arguments.batches {
            found.push(pool.install(|| self.batch(&mut sampler, number, &mut out))?);
        }
        let seconds = found.iter().map(|batch| batch.seconds).sum();
        Ok((found, seconds))
    }

    fn batch(
        &self,
        sampler: &mut HopSampler<&InMemory<W>>,
        number: u64,
        out: &mut HopSample,
    ) -> anyhow::Result<HopBatchSize> {
        let mut seeds = Vec::new();
        let started = Instant::now();
        self.batches.seeds(self.position(number), &mut seeds)?;
        let times = self.seed_time.map(|time| vec![time; seeds.len()]);
        sampler.sample(self.position(number), &seeds, times.as_deref(), out)?;
        let seconds = started.elapsed().as_secs_f64();
        let digest = if self.arguments.digest { out.digest() } else { 0 };
        let (nodes, edges) = (out.nodes.len() as u64, out.edges.len() as u64);
        Ok(HopBatchSize { number, nodes, edges, digest, seconds })
    }

    /// Batches epoch after epoch. Epochs in shuffled order have the same number of batches.
    fn position(&self, number: u64) -> Position {
        let count = self.batches.count(0).max(1);
        Position { epoch: number / count, batch: number % count }
    }
}

/// Loads an edge column.
fn column<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(
    dataset: &Dataset,
    name: &str,
    dtype: Dtype,
    most_bytes: u64,
) -> anyhow::Result<Vec<T>> {
    let columns = &dataset.manifest().edges.columns;
    let known: Vec<&str> = columns.iter().map(|column| &*column.name).collect();
    let found = columns.iter().find(|column| column.name == name);
    let (Some(found), Some(array)) = (found, dataset.array(name)) else {
        return Err(usage(format!(
            "{} has no edge column `{name}`, it has {}; import it with --edge-weights or --edge-times",
            dataset.directory().display(),
            if known.is_empty() { "none".into() } else { known.join(", ") },
        )));
    };
    if found.dtype != dtype || found.width != 1 {
        return Err(usage(format!(
            "edge column `{name}`: expected one {dtype} for each edge, found {} x {}; weights are f32, times are i64",
            found.width, found.dtype
        )));
    }
    let bytes = array.entry().rows * dtype.bytes();
    if bytes > most_bytes {
        bail!(
            "edge column `{name}` needs {}, {} are left; give more --memory",
            ByteCount(bytes),
            ByteCount(most_bytes)
        );
    }
    let mut values = vec![T::zeroed(); array.entry().rows as usize];
    array.elements(0)?.fill(&mut values)?;
    Ok(values)
}
