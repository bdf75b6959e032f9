use super::hops::{HopArguments, HopBench};
use super::lines;
use crate::exit::usage;
use crate::output::{print, print_json};
use anyhow::{Context, bail};
use esker_sample::bulk::{Bulk, positions};
use esker_sample::order::{Batching, Shuffled};
use esker_sample::trace::{TraceHeader, TraceReader, TraceWriter};
use esker_sample::{
    AnyTopology, Batches, Carry, Direction, Fanout, Form, InMemory, LinkBatches, NodeBatches, Position,
    Sample, Sampler, Seeds, Settings, StoredId, Topology, Touched,
};
use esker_store::{Dataset, SplitOver, file};
use esker_types::{Budget, ByteCount, NodeId, grouped, median};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Sample batches: edges per second, memory touched, bytes of a trace
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker bench sample g                                          3 layers of fan-out 10, batches of 1000, all cores
  esker bench sample g --fanout 10,10,10 --batch 1000 --json
  esker bench sample g --fanout 10 --layers 1..5 --threads 1,2  how it grows with layers and threads
  esker bench sample g --form dense,layered,shadow              one draw a node, one a layer, induced subgraphs
  esker bench sample g --fanout 15,10,5 --skew                  how unevenly nodes are accessed
  esker bench sample g --fanout all,all --batch 100             full neighbourhoods
  esker bench sample g --form hops --disjoint                   in the order of PyG's loaders, with their options
  esker bench sample g --bound                                  its share of the random cache lines that the machine can read

Samples batches of the training nodes, in shuffled order, as training does. With `--share bulk` each thread samples its own batches; with `within` all threads work on one. The topology is in memory. Samples do not depend on threads or share: --digest shows it."
)]
pub struct SampleArguments {
    /// Directory of the dataset
    dataset: PathBuf,
    /// Neighbours sampled per node, hop by hop from the seed nodes: numbers, or `all`
    #[arg(long, value_delimiter = ',', default_value = "10,10,10")]
    fanout: Vec<Fanout>,
    /// Numbers of layers to measure: 3, 1,3 or 1..5 (inclusive); further layers use the last fan-out; default: as many as --fanout has numbers
    #[arg(long, value_parser = layers)]
    layers: Option<Layers>,
    /// Batch size: seed nodes per batch
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Batches to measure per line
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) batches: u64,
    /// Numbers of threads to measure; default: all cores
    #[arg(long, value_delimiter = ',')]
    threads: Vec<u16>,
    /// Forms to measure: those of `esker train --form`, or hops
    #[arg(long, value_delimiter = ',', default_value = "dense")]
    form: Vec<FormName>,
    /// How threads share the work
    #[arg(long, value_delimiter = ',', default_value = "bulk")]
    share: Vec<WorkShare>,
    /// Along which edges: outgoing and both need a dataset with out-neighbours
    #[arg(long, default_value = "incoming")]
    direction: DirectionName,
    /// Measure every line this many times, and show the median
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) repeat: u32,
    /// Write the samples to a trace, read it back, and show its bytes per edge
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Show which share of accesses goes to the most accessed nodes
    #[arg(long)]
    skew: bool,
    /// Let samples carry each neighbour's position in the adjacency, from which edge ids follow
    #[arg(long)]
    positions: bool,
    /// Show what bounds it: cache lines touched per second, beside those that this machine reads at random addresses
    #[arg(long)]
    bound: bool,
    /// Show a hash over the samples of the first batches
    #[arg(long)]
    pub(super) digest: bool,
    /// Random seed
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// Memory limit, as in 8GiB; default: four fifths of the available memory
    #[arg(long)]
    memory: Option<ByteCount>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) hops: HopArguments,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum FormName {
    Dense,
    Layered,
    Shadow,
    /// In the order of PyG's loaders, with the options they have
    Hops,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum WorkShare {
    /// Each thread its own batches
    Bulk,
    /// All threads one batch
    Within,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum DirectionName {
    Incoming,
    Outgoing,
    Both,
}

/// Numbers of layers.
#[derive(Clone)]
struct Layers(Vec<usize>);

fn layers(word: &str) -> Result<Layers, String> {
    let number = |word: &str| word.parse::<usize>().ok().filter(|count| (1..=64).contains(count));
    let bad = || format!("`{word}` is not a number of layers; write 3, 1,3 or 1..5");
    if let Some((first, last)) = word.split_once("..") {
        let (first, last) = (number(first).ok_or_else(bad)?, number(last).ok_or_else(bad)?);
        return if first <= last { Ok(Layers((first..=last).collect())) } else { Err(bad()) };
    }
    word.split(',').map(|part| number(part).ok_or_else(bad)).collect::<Result<_, _>>().map(Layers)
}

/// One line to measure.
#[derive(Clone)]
struct Line {
    form: Form,
    fanouts: Vec<Fanout>,
    threads: usize,
    share: WorkShare,
}

/// One line of hop samples to measure.
pub(super) struct LineVariant {
    pub fanouts: Vec<Fanout>,
    pub threads: usize,
    pub share: WorkShare,
}

/// What one line found.
#[derive(Default)]
struct SampledLine {
    nodes: u64,
    edges: u64,
    seconds: f64,
    digest: u64,
    touched: Touched,
    /// Table, buffers and sample; known where this thread has the sampler.
    sampler_bytes: Option<u64>,
}

pub fn run(arguments: &SampleArguments) -> anyhow::Result<ExitCode> {
    check_form(arguments)?;
    let dataset = Dataset::open(&arguments.dataset)?;
    let budget = Budget::within_machine(arguments.memory).map_err(usage)?;
    let direction = match arguments.direction {
        DirectionName::Incoming => Direction::Incoming,
        DirectionName::Outgoing => Direction::Outgoing,
        DirectionName::Both => Direction::Both,
    };
    let topology = AnyTopology::load(&dataset, direction, budget.host_bytes)?;
    let value = match &topology {
        AnyTopology::Narrow(graph) => measure(arguments, &dataset, graph, budget),
        AnyTopology::Wide(graph) => measure(arguments, &dataset, graph, budget),
    }?;
    if arguments.json { print_json(&value) } else { print(&as_text(&value)) }
}

fn measure<W: StoredId>(
    arguments: &SampleArguments,
    dataset: &Dataset,
    graph: &InMemory<W>,
    budget: Budget,
) -> anyhow::Result<Value> {
    let seeds = seeds_of(dataset)?;
    if seeds.is_empty() {
        return Err(usage(format!(
            "{}: there is nothing to train on; give it splits",
            dataset.directory().display()
        )));
    }
    let seed_count = seeds.len();
    let batching = Batching::new(seed_count, arguments.batch, false)?;
    let order = Shuffled { batching, seed: arguments.seed };
    let batches: Box<dyn Batches> = match seeds.are_edges() {
        true => Box::new(LinkBatches::new(order, seeds, graph)?),
        false => Box::new(NodeBatches::new(order, seeds)?),
    };
    let bench = SampleBench {
        arguments,
        graph,
        batches,
        most_bytes: budget.host_bytes.saturating_sub(graph.bytes()),
    };
    let mut rows = Vec::new();
    let lines = lines(arguments);
    for line in &lines {
        rows.push(bench.row(line)?);
    }
    if arguments.form.contains(&FormName::Hops) {
        let hops = HopBench::new(arguments, dataset, graph, &*bench.batches, bench.most_bytes)?;
        for variant in variants(arguments) {
            rows.push(hops.row(&variant)?);
        }
    }
    let mut value = json!({
        "dataset": dataset.directory().to_string_lossy(), "id": dataset.manifest().id,
        "nodes": graph.nodes(), "edges": dataset.manifest().edges.count, "seeds": seed_count,
        "batch": arguments.batch, "batches": arguments.batches,
        "positions": arguments.positions, "seed": arguments.seed,
        "topology_bytes": graph.bytes(), "budget_host_bytes": budget.host_bytes, "rows": rows,
    });
    if let (Some(path), Some(first)) = (&arguments.trace, lines.first()) {
        value["trace"] = bench.trace(path, dataset, first)?;
    }
    if let (true, Some(first)) = (arguments.skew, lines.first()) {
        value["skew"] = bench.skew(first)?;
    }
    Ok(value)
}

/// Training nodes; all edges where edges train; all nodes where there are no splits.
fn seeds_of(dataset: &Dataset) -> anyhow::Result<Seeds> {
    let manifest = dataset.manifest();
    match &manifest.splits {
        None => Ok(Seeds::AllNodes(manifest.nodes.count)),
        Some(splits) if splits.over == SplitOver::Edges => Ok(Seeds::AllEdges(manifest.edges.count)),
        Some(_) => {
            let array = dataset.array(file::SPLIT_TRAIN).context("the dataset has no training split")?;
            let mut ids = vec![0u64; array.entry().rows as usize];
            array.elements(0)?.fill_ids(&mut ids)?;
            Ok(Seeds::Nodes(ids.into_iter().map(NodeId).collect()))
        }
    }
}

/// Lines of forms that `esker train` has.
fn lines(arguments: &SampleArguments) -> Vec<Line> {
    let mut lines = Vec::new();
    for form in &arguments.form {
        let form = match form {
            FormName::Dense => Form::Dense,
            FormName::Layered => Form::Layered,
            FormName::Shadow => Form::Shadow,
            FormName::Hops => continue,
        };
        let line = |of: LineVariant| Line { form, fanouts: of.fanouts, threads: of.threads, share: of.share };
        lines.extend(variants(arguments).into_iter().map(line));
    }
    lines
}

/// What is measured of every form.
fn variants(arguments: &SampleArguments) -> Vec<LineVariant> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads: Vec<usize> = match arguments.threads[..] {
        [] => vec![cores],
        ref given => given.iter().map(|threads| (*threads).max(1) as usize).collect(),
    };
    let layers = arguments.layers.as_ref().map_or(vec![arguments.fanout.len()], |layers| layers.0.clone());
    let mut variants = Vec::new();
    for layers in &layers {
        let last = arguments.fanout[arguments.fanout.len() - 1];
        let fanouts: Vec<Fanout> =
            arguments.fanout.iter().copied().chain(std::iter::repeat(last)).take(*layers).collect();
        for share in &arguments.share {
            for threads in &threads {
                variants.push(LineVariant { fanouts: fanouts.clone(), threads: *threads, share: *share });
            }
        }
    }
    variants
}

/// Refuses flags that would have no effect.
fn check_form(arguments: &SampleArguments) -> anyhow::Result<()> {
    let others = arguments.form.iter().any(|form| *form != FormName::Hops);
    if arguments.hops.any() && others {
        return Err(usage(
            "--replace, --disjoint, --subgraph, --weights and --time are options of --form hops; leave them out, or measure no other form",
        ));
    }
    if !others && (arguments.trace.is_some() || arguments.skew || arguments.bound || arguments.positions) {
        return Err(usage(
            "--trace, --skew, --bound and --positions need --form dense, layered or shadow; leave them out of --form hops",
        ));
    }
    Ok(())
}

struct SampleBench<'a, W> {
    arguments: &'a SampleArguments,
    graph: &'a InMemory<W>,
    batches: Box<dyn Batches + 'a>,
    most_bytes: u64,
}

impl<W: StoredId> SampleBench<'_, W> {
    fn settings(&self, line: &Line) -> Settings {
        Settings {
            seed: self.arguments.seed,
            fanouts: line.fanouts.clone(),
            form: line.form,
            carry: Carry { positions: self.arguments.positions, ..Carry::default() },
        }
    }

    fn row(&self, line: &Line) -> anyhow::Result<Value> {
        let mut runs = Vec::new();
        for _ in 0..self.arguments.repeat {
            runs.push(match line.share {
                WorkShare::Bulk => self.bulk(line)?,
                WorkShare::Within => self.within(line)?,
            });
        }
        let rates: Vec<f64> = runs.iter().map(|run| run.edges as f64 / run.seconds.max(1e-9)).collect();
        let (run, batches) = (&runs[0], self.arguments.batches);
        let digest = self.arguments.digest.then(|| format!("{:016x}", run.digest));
        let (rate, best) = (median(&rates), rates.iter().copied().fold(0.0, f64::max));
        let mut row = json!({
            "form": line.form, "layers": line.fanouts.len(), "threads": line.threads,
            "share": if line.share == WorkShare::Bulk { "bulk" } else { "within" },
            "fanout": line.fanouts.iter().map(Fanout::to_string).collect::<Vec<_>>().join(","),
            "edges_per_second": rate, "edges_per_second_best": best,
            "seconds_per_batch": run.edges as f64 / batches as f64 / rate,
            "nodes_per_batch": run.nodes / batches, "edges_per_batch": run.edges / batches,
            "touched_bytes_per_batch": run.touched.bytes() / batches,
            "touched_list_bytes": run.touched.adjacency_bytes / batches,
            "touched_table_bytes": run.touched.table_bytes / batches,
            "touched_sample_bytes": run.touched.sample_bytes / batches,
            "sampler_bytes": run.sampler_bytes, "digest": digest,
        });
        if self.arguments.bound && line.form != Form::Shadow {
            let lines_per_edge = self.lines_per_edge(line)?;
            let bytes = (self.graph.bytes() + 4 * self.graph.nodes()).min(self.most_bytes);
            let (reached, machine) = (rate * lines_per_edge, lines::of_machine(bytes, line.threads));
            row["bound"] = json!({
                "lines_per_edge": lines_per_edge, "lines_per_second": reached,
                "machine_lines_per_second": machine, "share": reached / machine,
            });
        }
        Ok(row)
    }

    /// Cache lines touched for an edge, counted in the first batch.
    fn lines_per_edge(&self, line: &Line) -> anyhow::Result<f64> {
        let mut settings = self.settings(line);
        settings.carry.positions = true;
        let (mut nodes, mut sample) = (Vec::new(), Sample::default());
        let at = Position { epoch: 0, batch: 0 };
        self.batches.seeds(at, &mut nodes)?;
        Sampler::new(self.graph, settings, self.most_bytes)?.sample(at, &nodes, &mut sample)?;
        Ok(lines::of_sample(self.graph, &sample) as f64 / sample.edge_count().max(1) as f64)
    }

    /// Hands the line's batches over in order, epoch after epoch.
    fn each(
        &self,
        line: &Line,
        batches: u64,
        take: impl FnMut(Position, &Sample) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let bulk = Bulk {
            graph: self.graph,
            batches: &*self.batches,
            settings: &self.settings(line),
            threads: line.threads,
            most_bytes: self.most_bytes,
        };
        bulk.run(self.positions().take(batches as usize), take)
    }

    fn positions(&self) -> impl Iterator<Item = Position> + Clone + Send {
        positions(&*self.batches, Position { epoch: 0, batch: 0 }, u64::MAX)
    }

    /// Each thread its own batches. The first batches, which still allocate, are not timed.
    fn bulk(&self, line: &Line) -> anyhow::Result<SampledLine> {
        let warm = 2 * line.threads as u64;
        let probe = Sampler::new(self.graph, self.settings(line), self.most_bytes)?;
        let (mut found, mut seen, mut started) = (SampledLine::default(), 0, Instant::now());
        self.each(line, warm + self.arguments.batches, |_, sample| {
            if seen >= warm {
                count(&mut found, sample, &probe);
            }
            self.digest(&mut found, seen, sample);
            seen += 1;
            if seen == warm {
                started = Instant::now();
            }
            Ok(())
        })?;
        found.seconds = started.elapsed().as_secs_f64();
        Ok(found)
    }

    /// All threads one batch.
    fn within(&self, line: &Line) -> anyhow::Result<SampledLine> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(line.threads).build()?;
        let sampler = Sampler::new(self.graph, self.settings(line), self.most_bytes)?;
        let mut sampler = sampler.with_threads(line.threads);
        let (mut found, mut sample) = (SampledLine::default(), Sample::default());
        let (warm, mut nodes) = (2, Vec::new());
        for (number, at) in (0..warm + self.arguments.batches).zip(self.positions()) {
            let started = Instant::now();
            self.batches.seeds(at, &mut nodes)?;
            pool.install(|| sampler.sample(at, &nodes, &mut sample))?;
            if number >= warm {
                found.seconds += started.elapsed().as_secs_f64();
                count(&mut found, &sample, &sampler);
                found.sampler_bytes = Some(sampler.bytes() + sample.bytes());
            }
            self.digest(&mut found, number, &sample);
        }
        Ok(found)
    }

    /// Takes up the first batches, the same ones for every line: lines time others.
    fn digest(&self, found: &mut SampledLine, number: u64, sample: &Sample) {
        if self.arguments.digest && number < self.arguments.batches {
            found.digest = found.digest.rotate_left(1) ^ sample.digest();
        }
    }

    /// Writes the first line's samples to a trace and reads it back from both ends.
    fn trace(&self, path: &std::path::Path, dataset: &Dataset, line: &Line) -> anyhow::Result<Value> {
        let manifest = dataset.manifest();
        let header = TraceHeader {
            dataset: manifest.id.clone(),
            nodes: manifest.nodes.count,
            edges: manifest.edges.count,
            relations: manifest.edges.relations.as_ref().map_or(0, |relations| relations.count),
            direction: self.graph.direction(),
            batches: self.batches.identity(),
            settings: self.settings(line),
        };
        let (mut writer, mut digests) = (TraceWriter::create(path, header)?, Vec::new());
        let started = Instant::now();
        self.each(line, self.arguments.batches, |at, sample| {
            digests.push((at, sample.digest()));
            Ok(writer.write(at, sample)?)
        })?;
        let summary = writer.finish()?;
        let written = started.elapsed().as_secs_f64();
        let (trace, mut sample, started) = (TraceReader::open(path)?, Sample::default(), Instant::now());
        for backwards in [false, true] {
            let mut cursor = if backwards { trace.backwards() } else { trace.forwards() };
            let mut found = Vec::new();
            while let Some(at) = cursor.next(&mut sample)? {
                found.push((at, sample.digest()));
            }
            if backwards {
                found.reverse();
            }
            if found != digests {
                bail!("{}: the samples read are not the samples written", path.display());
            }
        }
        Ok(json!({
            "path": path.to_string_lossy(), "samples": summary.samples, "edges": summary.edges, "bytes": summary.bytes,
            "bytes_per_edge": summary.bytes_per_edge(),
            "written_edges_per_second": summary.edges as f64 / written,
            "read_edges_per_second": 2.0 * summary.edges as f64 / started.elapsed().as_secs_f64(),
        }))
    }

    /// Shares of accesses by rank of the node: a node counts once a batch.
    fn skew(&self, line: &Line) -> anyhow::Result<Value> {
        let mut counts = vec![0u32; self.graph.nodes() as usize];
        self.each(line, self.arguments.batches, |_, sample| {
            sample.node_ids.iter().for_each(|node| counts[node.index()] += 1);
            Ok(())
        })?;
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let total: u64 = counts.iter().map(|count| *count as u64).sum();
        let share = |from: f64, to: f64| {
            let at = |part: f64| (counts.len() as f64 * part).round() as usize;
            let sum: u64 = counts[at(from)..at(to)].iter().map(|count| *count as u64).sum();
            sum as f64 / total.max(1) as f64
        };
        Ok(json!({
            "accesses": total, "top_1_percent": share(0.0, 0.01), "1_to_5_percent": share(0.01, 0.05),
            "5_to_10_percent": share(0.05, 0.1), "rest": share(0.1, 1.0),
        }))
    }
}

fn count<W: StoredId>(found: &mut SampledLine, sample: &Sample, sampler: &Sampler<&InMemory<W>>) {
    found.nodes += sample.node_ids.len() as u64;
    found.edges += sample.edge_count();
    let touched = sampler.touched(sample);
    found.touched.adjacency_bytes += touched.adjacency_bytes;
    found.touched.table_bytes += touched.table_bytes;
    found.touched.sample_bytes += touched.sample_bytes;
}

fn as_text(value: &Value) -> String {
    let number = |value: &Value| grouped(value.as_f64().unwrap_or(0.0) as u64);
    let bytes = |value: &Value| value.as_u64().map_or("".into(), |bytes| ByteCount(bytes).to_string());
    let word = |value: &Value| value.as_str().unwrap_or("").to_string();
    let name = word(&value["dataset"]);
    let mut text = format!(
        "{name}  {} nodes, {} edges, batches of {}\n  {:8} {:>6} {:>7} {:7} {:>14} {:>11} {:>11} {:>10} {:>10}\n",
        number(&value["nodes"]),
        number(&value["edges"]),
        number(&value["batch"]),
        "form",
        "layers",
        "threads",
        "share",
        "edges/s",
        "nodes/batch",
        "edges/batch",
        "ms/batch",
        "touched"
    );
    for row in value["rows"].as_array().into_iter().flatten() {
        text.push_str(&format!(
            "  {:8} {:>6} {:>7} {:7} {:>14} {:>11} {:>11} {:>10.2} {:>10}",
            word(&row["form"]),
            number(&row["layers"]),
            number(&row["threads"]),
            word(&row["share"]),
            number(&row["edges_per_second"]),
            number(&row["nodes_per_batch"]),
            number(&row["edges_per_batch"]),
            row["seconds_per_batch"].as_f64().unwrap_or(0.0) * 1000.0,
            bytes(&row["touched_bytes_per_batch"]),
        ));
        text.push_str(&row["digest"].as_str().map_or("\n".into(), |digest| format!("  {digest}\n")));
        if let Some(bound) = row.get("bound") {
            text.push_str(&format!(
                "           {:.2} cache lines per edge, {} per second: {:.0}% of the {} that this machine reads at random\n",
                bound["lines_per_edge"].as_f64().unwrap_or(0.0),
                number(&bound["lines_per_second"]),
                bound["share"].as_f64().unwrap_or(0.0) * 100.0,
                number(&bound["machine_lines_per_second"]),
            ));
        }
    }
    if let Some(trace) = value.get("trace") {
        let per_edge = trace["bytes_per_edge"].as_f64().unwrap_or(0.0);
        text.push_str(&format!(
            "  trace    {} for {} edges: {per_edge:.2} bytes per edge\n",
            bytes(&trace["bytes"]),
            number(&trace["edges"])
        ));
    }
    if let Some(skew) = value.get("skew") {
        let percent = |key: &str| skew[key].as_f64().unwrap_or(0.0) * 100.0;
        text.push_str(&format!(
            "  accesses by rank of the node: {:.1}% to the top 1%, {:.1}% to 1-5%, {:.1}% to 5-10%, {:.1}% to the rest\n",
            percent("top_1_percent"), percent("1_to_5_percent"), percent("5_to_10_percent"), percent("rest"),
        ));
    }
    text
}
