//! Hit ratios of cache policies over the accesses of sampled batches (Ginex, Figures 5 and 15), and the planning speed
//! of the optimal one.

use super::batches::{BatchFlags, OpenedGraph, slots_of};
use super::{Findings, plot};
use anyhow::Context;
use esker_fetch::{AccessFile, FetchError, PlanFile, StoredRow};
use esker_plan::{AccessTrace, Belady, Fixed, Lru, PlanTally};
use esker_sample::{AnyTopology, InMemory, StoredId};
use esker_store::Dataset;
use esker_types::{NodeId, grouped, own_resident_bytes};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;

/// Compare cache policies on the accesses of sampled batches: Belady, static by out-degree, LRU
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask bench cache g                                       an epoch of batches, caches of 1% to 50% of all rows
  cargo xtask bench cache g --percent 5,10,20 --superbatch 100    Belady knows 100 batches ahead, and starts each time empty
  cargo xtask bench cache g --plot hits.svg --json

Batches of the training seeds are sampled as training would; every policy sees the same accesses. Rows that fill a cache at first are misses of every policy. Belady is planned on one core from files, in memory that does not grow with the number of batches.")]
pub struct CacheArguments {
    #[command(flatten)]
    batches: BatchFlags,
    /// Batches that Belady knows ahead; default: all
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    superbatch: Option<u32>,
    /// Sizes of the cache, in percent of all rows
    #[arg(long, value_delimiter = ',', default_value = "1,2,5,10,20,30,40,50")]
    percent: Vec<f64>,
    /// Draw the hit ratios
    #[arg(long)]
    plot: Option<PathBuf>,
}

pub fn run(arguments: &CacheArguments) -> anyhow::Result<Findings> {
    for percent in &arguments.percent {
        slots_of(*percent, 0, "--percent")?;
    }
    let OpenedGraph { dataset, graph, most_bytes } = arguments.batches.open()?;
    match graph {
        AnyTopology::Narrow(graph) => measure(arguments, &dataset, graph, most_bytes),
        AnyTopology::Wide(graph) => measure(arguments, &dataset, graph, most_bytes),
    }
}

/// CPU seconds of this thread; 0 if the kernel does not report them.
fn thread_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|nanos| nanos.parse::<f64>().ok()).unwrap_or(0.0) * 1e-9
}

/// Accesses of some batches of a file, as a trace of their own.
struct Window<'a, W> {
    file: &'a AccessFile<W>,
    first: u32,
    count: u32,
}

impl<W: StoredRow> AccessTrace for Window<'_, W> {
    type Row = W;
    type Error = FetchError;
    fn batches(&self) -> u32 {
        self.count
    }
    fn read(&mut self, batch: u32, rows: &mut Vec<W>) -> Result<(), FetchError> {
        (&mut &*self.file).read(self.first + batch, rows)
    }
}

/// The result for one cache size.
struct SizeFound {
    percent: f64,
    slots: u64,
    belady: PlanTally,
    lru_misses: u64,
    fixed_misses: u64,
    plan_seconds: f64,
    plan_cpu_seconds: f64,
}

fn measure<W: StoredId + StoredRow>(
    arguments: &CacheArguments,
    dataset: &Dataset,
    graph: InMemory<W>,
    most_bytes: u64,
) -> anyhow::Result<Findings> {
    let nodes = dataset.manifest().nodes.count;
    let accesses: AccessFile<W> = arguments.batches.accesses(dataset, &graph, most_bytes)?;
    let by_degree = by_out_degree(&graph, nodes);
    drop(graph);
    let count = (&accesses).batches();
    let superbatch = arguments.superbatch.unwrap_or(count).min(count);
    let plan = PlanFile::create(&accesses)?;
    let (mut found, mut peak) = (Vec::new(), 0);
    for percent in &arguments.percent {
        let slots = slots_of(*percent, nodes, "--percent")?;
        let (started, worked) = (Instant::now(), thread_seconds());
        let belady = belady(&accesses, &plan, nodes, slots, superbatch, &mut peak)?;
        let (plan_seconds, plan_cpu_seconds) = (started.elapsed().as_secs_f64(), thread_seconds() - worked);
        let (mut lru, fixed) =
            (Lru::new(nodes, slots), Fixed::new(nodes, by_degree.iter().copied().take(slots as usize)));
        let (mut lru_misses, mut fixed_misses, mut rows) = (0, fixed.fills(), Vec::new());
        for batch in 0..count {
            (&mut &accesses).read(batch, &mut rows)?;
            lru_misses += lru.batch(&rows);
            fixed_misses += fixed.batch(&rows);
        }
        found.push(SizeFound {
            percent: *percent,
            slots,
            belady,
            lru_misses,
            fixed_misses,
            plan_seconds,
            plan_cpu_seconds,
        });
    }
    // Everything else is freed: besides the order of nodes, only the planner and the policies use memory.
    findings(arguments, &found, (nodes, count, superbatch), peak)
}

/// All nodes by descending out-degree: PaGraph's order.
fn by_out_degree<W: StoredId + StoredRow>(graph: &InMemory<W>, nodes: u64) -> Vec<W> {
    let mut degrees = vec![0u32; nodes as usize];
    for node in 0..nodes {
        let list = graph.list(NodeId(node));
        list.first.iter().for_each(|word| degrees[StoredId::index(*word)] += 1);
    }
    let mut order: Vec<W> = (0..nodes).map(|node| <W as StoredRow>::of(NodeId(node))).collect();
    order.sort_by_key(|node| std::cmp::Reverse(degrees[StoredId::index(*node)]));
    order
}

/// Plans superbatch after superbatch, each with an empty cache, as ginex does.
fn belady<W: StoredRow>(
    accesses: &AccessFile<W>,
    plan: &PlanFile,
    nodes: u64,
    slots: u64,
    superbatch: u32,
    peak: &mut u64,
) -> anyhow::Result<PlanTally> {
    let count = { accesses }.batches();
    let (mut planner, mut all) = (Belady::<W>::new(nodes, slots, superbatch), PlanTally::default());
    for first in (0..count).step_by(superbatch as usize) {
        let mut window = Window { file: accesses, first, count: superbatch.min(count - first) };
        let mut uses = plan.next_uses(first..first + window.count)?;
        let tally = planner.plan(&mut window, &mut uses, |batch, words| {
            *peak = own_resident_bytes().max(*peak);
            plan.put(first + batch, words)
        })?;
        all.accesses += tally.accesses;
        all.hits += tally.hits;
        all.kept += tally.kept;
        *peak = own_resident_bytes().max(*peak);
    }
    Ok(all)
}

fn findings(
    arguments: &CacheArguments,
    found: &[SizeFound],
    sizes: (u64, u32, u32),
    peak_plan_bytes: u64,
) -> anyhow::Result<Findings> {
    let (asked, (nodes, batches, superbatch)) = (&arguments.batches, sizes);
    let accesses = found.first().map_or(0, |one| one.belady.accesses);
    let ratio = |misses: u64| 1.0 - misses as f64 / accesses.max(1) as f64;
    let line = |name: &str, misses: &dyn Fn(&SizeFound) -> u64| plot::PlotLine {
        name: name.into(),
        points: found.iter().map(|one| (one.percent, ratio(misses(one)).max(0.0))).collect(),
    };
    if let Some(path) = &arguments.plot {
        let lines = [
            line("Belady (ginex)", &|one| one.belady.misses()),
            line("static, by out-degree (PaGraph)", &|one| one.fixed_misses),
            line("LRU", &|one| one.lru_misses),
        ];
        let name = asked.name();
        let svg = plot::shares(
            &format!("{name}: rows found in a cache"),
            "cache, percent of all rows",
            "hit ratio",
            &lines,
        );
        std::fs::write(path, svg).with_context(|| path.display().to_string())?;
    }
    let rows: Vec<Value> = found
        .iter()
        .map(|one| {
            json!({
                "percent": one.percent, "slots": one.slots,
                "belady": ratio(one.belady.misses()), "static": ratio(one.fixed_misses), "lru": ratio(one.lru_misses),
                "belady_misses": one.belady.misses(), "static_misses": one.fixed_misses, "lru_misses": one.lru_misses,
                "plan_seconds": one.plan_seconds, "plan_cpu_seconds": one.plan_cpu_seconds,
                "planned_per_cpu_second": accesses as f64 / one.plan_cpu_seconds.max(1e-9),
                "planned_per_second": accesses as f64 / one.plan_seconds.max(1e-9),
            })
        })
        .collect();
    let json = json!({
        "dataset": asked.dataset, "nodes": nodes, "fanout": asked.fanout, "batch": asked.batch,
        "batches": batches, "superbatch": superbatch, "accesses": accesses, "sizes": rows,
        "peak_plan_bytes": peak_plan_bytes,
    });
    let mut text = format!(
        "{}: {} accesses of {batches} batches to {} rows; hit ratios, first fills counted as misses\n   cache      rows   Belady   static      LRU   planned\n",
        asked.dataset.display(),
        grouped(accesses),
        grouped(nodes)
    );
    for one in found {
        text += &format!(
            "  {:>5}%{:>10} {:>8.3} {:>8.3} {:>8.3} {:>7.1} M/s\n",
            one.percent,
            grouped(one.slots),
            ratio(one.belady.misses()),
            ratio(one.fixed_misses),
            ratio(one.lru_misses),
            accesses as f64 / one.plan_seconds.max(1e-9) / 1e6
        );
    }
    Ok(Findings { json, text })
}
