//! Segment caches on disk (DiskGNN, Figures 5 and 16 and Table 7): their reads and disk space for several segment
//! sizes, before and after rows are put in MinHash order, and the search for a size that fits the disk.

mod layout;
mod search;

use super::batches::{BatchFlags, Misses, OpenedGraph, slots_of};
use super::{Findings, plot};
use anyhow::{Context, ensure};
use esker_fetch::AccessFile;
use esker_sample::AnyTopology;
use esker_store::Dataset;
use esker_types::{ByteCount, grouped};
use layout::{RowsOnDisk, SegmentLayout};
use search::{Choice, SearchFound};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Compare layouts of packed rows without making them: traffic and space by segment size, and the search for one that fits
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask bench segments g                                     an epoch of batches, 10% of all rows in memory
  cargo xtask bench segments g --sizes 50,100,150 --blowup 3,5,7   other segments, other limits of disk space
  cargo xtask bench segments g --row-bytes 512 --page 4KiB --plot segments.svg --json

Batches of the training seeds are sampled as training would, and the rows accessed most are in memory. Rows that two batches of a segment want lie in its cache, others are packed for the batch that wants them. Packed rows are read to the byte, caches by the page, each page once a batch: amplification is what is read over what is accessed, space what is stored over all features. Nothing is packed or read here.

The search takes the smallest segments that fit the space allowed; brute force makes every layout of segments in tenths of all batches, with rows used more than 1, 2, 4 or 8 times in their caches, and takes the one that reads least.")]
pub struct SegmentArguments {
    #[command(flatten)]
    batches: BatchFlags,
    /// Rows in memory, in percent of all rows
    #[arg(long, default_value_t = 10.0)]
    cache_percent: f64,
    /// Batches of a segment; all batches as one segment are always looked at
    #[arg(long, value_delimiter = ',', default_value = "10,50,100,150", value_parser = clap::value_parser!(u32).range(1..))]
    sizes: Vec<u32>,
    /// Disk space that a layout may take, in multiples of all features
    #[arg(long, value_delimiter = ',', default_value = "3,5")]
    blowup: Vec<f64>,
    /// Bytes of a page
    #[arg(long, default_value = "4096")]
    page: ByteCount,
    /// Bytes of a row; default: as the dataset stores it
    #[arg(long)]
    row_bytes: Option<ByteCount>,
    /// Draw the amplification
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// Segments of one size.
struct SegmentLine {
    size: u32,
    by_number: SegmentLayout,
    by_hash: SegmentLayout,
}

pub fn run(arguments: &SegmentArguments) -> anyhow::Result<Findings> {
    let page_bytes = arguments.page.0;
    ensure!(page_bytes > 0, "--page 0: pages have a byte at least");
    for blowup in &arguments.blowup {
        ensure!(*blowup > 0.0 && blowup.is_finite(), "--blowup {blowup}: multiples are above 0");
    }
    slots_of(arguments.cache_percent, 0, "--cache-percent")?;
    let asked = &arguments.batches;
    let OpenedGraph { dataset, graph, most_bytes } = asked.open()?;
    let row_bytes = row_bytes(arguments, &dataset)?;
    let nodes = dataset.manifest().nodes.count;
    ensure!(nodes < u32::MAX as u64, "{} nodes: segments name rows by 32 bits", grouped(nodes));
    let slots = slots_of(arguments.cache_percent, nodes, "--cache-percent")?;
    let accesses: AccessFile<u32> = match &graph {
        AnyTopology::Narrow(graph) => asked.accesses(&dataset, graph, most_bytes)?,
        AnyTopology::Wide(graph) => asked.accesses(&dataset, graph, most_bytes)?,
    };
    drop(graph);
    let Misses { rows, cached } = Misses::of(&accesses, nodes, slots, &asked.scratch())?;
    let all = accesses.accesses();
    drop(accesses);
    let disk = RowsOnDisk { accessed: rows, nodes, row_bytes, page_bytes };
    let batches = disk.batches();
    let mut sizes: Vec<u32> = arguments.sizes.iter().copied().filter(|size| *size < batches).collect();
    sizes.push(batches);
    let mut lines = Vec::new();
    for size in sizes {
        let (by_number, by_hash) = (disk.lay_out(size, false)?, disk.lay_out(size, true)?);
        lines.push(SegmentLine { size, by_number, by_hash });
    }
    let mut found = Vec::new();
    for blowup in &arguments.blowup {
        found.push(search::search(&disk, *blowup)?);
    }
    let measured = SegmentsMeasured { disk, accesses: all, slots: cached, lines, found };
    measured.draw(arguments)?;
    Ok(Findings { json: measured.json(arguments), text: measured.text(arguments) })
}

fn row_bytes(arguments: &SegmentArguments, dataset: &Dataset) -> anyhow::Result<u64> {
    let features = dataset.manifest().nodes.features.as_ref();
    let stored = features.map(|features| features.dim * features.dtype.bytes());
    let bytes = arguments.row_bytes.map(|bytes| bytes.0).or(stored).filter(|bytes| *bytes > 0);
    bytes.with_context(|| {
        format!("{} has no features; say how long rows are with --row-bytes", dataset.directory().display())
    })
}

struct SegmentsMeasured {
    disk: RowsOnDisk,
    accesses: u64,
    slots: u64,
    lines: Vec<SegmentLine>,
    found: Vec<SearchFound>,
}

impl SegmentsMeasured {
    fn draw(&self, arguments: &SegmentArguments) -> anyhow::Result<()> {
        let Some(path) = &arguments.plot else { return Ok(()) };
        let line = |name: &str, layout: &dyn Fn(&SegmentLine) -> SegmentLayout| {
            let point =
                |line: &SegmentLine| Some((line.size as f64, self.disk.amplification(&layout(line))?));
            let mut points: Vec<(f64, f64)> = self.lines.iter().filter_map(point).collect();
            points.sort_by(|one, other| one.0.total_cmp(&other.0));
            plot::PlotLine { name: name.into(), points }
        };
        let lines = [line("by number", &|line| line.by_number), line("MinHash order", &|line| line.by_hash)];
        let title = format!("{}: read over wanted", arguments.batches.name());
        let svg = plot::amounts(&title, "batches of a segment", "amplification", &lines);
        std::fs::write(path, svg).with_context(|| path.display().to_string())
    }

    fn json(&self, arguments: &SegmentArguments) -> Value {
        let (asked, disk) = (&arguments.batches, &self.disk);
        let order = |layout: &SegmentLayout| {
            json!({
                "amplification": disk.amplification(layout),
                "cache_amplification": disk.cache_amplification(layout), "cache_pages": layout.cache_pages,
            })
        };
        let segments = self.lines.iter().map(|line| {
            json!({
                "size": line.size, "global": line.size == disk.batches(), "space": disk.space(&line.by_hash),
                "stored_rows": line.by_hash.stored_rows, "packed_rows": line.by_hash.packed_rows,
                "cache_rows": line.by_hash.cache_rows,
                "by_number": order(&line.by_number), "minhash": order(&line.by_hash),
            })
        });
        let choice = |choice: &Option<Choice>, seconds: f64| {
            let found = choice.map(|choice| {
                json!({
                    "size": choice.size, "threshold": choice.threshold, "stored_rows": choice.layout.stored_rows,
                    "space": disk.space(&choice.layout), "amplification": disk.amplification(&choice.layout),
                })
            });
            json!({ "found": found, "seconds": seconds })
        };
        let search = self.found.iter().map(|found| {
            json!({
                "blowup": found.blowup, "fits": found.heuristic.is_some(), "speedup": found.speedup(),
                "heuristic": choice(&found.heuristic, found.heuristic_seconds),
                "brute_force": choice(&found.brute_force, found.brute_force_seconds),
                "tried": found.tried, "fitting": found.fitting,
            })
        });
        json!({
            "dataset": asked.dataset, "nodes": disk.nodes, "fanout": asked.fanout, "batch": asked.batch,
            "batches": disk.batches(), "accesses": self.accesses, "cache_percent": arguments.cache_percent,
            "slots": self.slots, "misses": disk.accessed.accesses(), "row_bytes": disk.row_bytes,
            "page_bytes": disk.page_bytes, "segments": segments.collect::<Vec<_>>(),
            "search": search.collect::<Vec<_>>(),
        })
    }

    fn text(&self, arguments: &SegmentArguments) -> String {
        let disk = &self.disk;
        let times = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.2}x"));
        let mut text = format!(
            "{}: {} batches want {} rows, {} of them from the disk beside {} in memory; rows of {}, pages of {}\n\
             \n  read over accessed             all            caches alone\n\
             \x20  segment     space   by number   MinHash   by number   MinHash\n",
            arguments.batches.dataset.display(),
            grouped(disk.batches() as u64),
            grouped(self.accesses),
            grouped(disk.accessed.accesses()),
            grouped(self.slots),
            ByteCount(disk.row_bytes),
            ByteCount(disk.page_bytes)
        );
        for line in &self.lines {
            let size = if line.size == disk.batches() { "all".into() } else { line.size.to_string() };
            text += &format!(
                "  {size:>8} {:>8.2}x {:>11} {:>9} {:>11} {:>9}\n",
                disk.space(&line.by_hash),
                times(disk.amplification(&line.by_number)),
                times(disk.amplification(&line.by_hash)),
                times(disk.cache_amplification(&line.by_number)),
                times(disk.cache_amplification(&line.by_hash))
            );
        }
        text += "\n  space        heuristic                          brute force\n  allowed  segment    read   seconds   segment  used over    read   seconds   speedup\n";
        for found in &self.found {
            let allowed = format!("{}x", found.blowup);
            let (Some(quick), Some(slow)) = (&found.heuristic, &found.brute_force) else {
                let least = self.lines.iter().map(|line| disk.space(&line.by_hash)).fold(f64::MAX, f64::min);
                text +=
                    &format!("  {allowed:>7}  nothing fits: one segment of all batches takes {least:.2}x\n");
                continue;
            };
            text += &format!(
                "  {allowed:>7} {:>8} {:>7} {:>9.3} {:>9} {:>10} {:>7} {:>9.3} {:>8.0}x\n",
                quick.size,
                times(disk.amplification(&quick.layout)),
                found.heuristic_seconds,
                slow.size,
                slow.threshold,
                times(disk.amplification(&slow.layout)),
                found.brute_force_seconds,
                found.speedup()
            );
        }
        text
    }
}

impl SearchFound {
    fn speedup(&self) -> f64 {
        self.brute_force_seconds / self.heuristic_seconds.max(1e-9)
    }
}
