use super::io_workload::{Reached, Workload, WorkloadKind};
use crate::exit::usage;
use crate::output::{print, print_json};
use crate::progress::Shown;
use crate::scratch::MeasuringFile;
use esker_io::limit::{BareLoop, Rate, bare_loop};
use esker_io::{Access, Disk, Files, IoBackendKind, Layout, Options, ThisMachine};
use esker_types::{ByteCount, Progress, Silent, Unit, grouped, machine_memory_limit, median};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Measure the raw rate of a disk, and how close Esker's reader comes to it
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker bench io                               the disk of this directory
  esker bench io --dir /mnt/nvme --json
  esker bench io --io-block 4KiB               as on a disk without 512-byte sectors
  esker bench io --io-backend pread-direct     as on a machine that refuses io_uring
  esker bench io --size 256MiB --seconds 0.2 --rounds 3       a quick look

First a bare loop finds the limit of the disk. It reads blocks and does nothing with them: large blocks in order, then 4 KiB and the smallest block at random, with 1 and 2 threads and several depths. Then Esker's reader reads rows, in turn with the best bare loop of the same block size. Medians of all rounds are shown. `of limit` is the reads (or bytes) per second of the reader over those of a bare loop whose few buffers stay in the CPU cache; `of kept` is over those of a bare loop that fills the memory of whole batches, as the reader does. Writes a file of `--size` and removes it."
)]
pub struct IoArguments {
    /// Directory on the disk to measure
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Size of the file that is written and read (at most a tenth of the free space)
    #[arg(long, default_value = "5.12GB")]
    size: ByteCount,
    /// Read this file instead of writing one; it is only read
    #[arg(long, conflicts_with = "dir")]
    file: Option<PathBuf>,
    /// Smallest read, such as 4KiB to imitate a disk with 4-KiB sectors; default: the disk's own
    #[arg(long)]
    io_block: Option<ByteCount>,
    /// Requests in flight
    #[arg(long, default_value_t = Options::default().depth)]
    depth: usize,
    /// Rows at most this far apart are one read, the bytes between them included
    #[arg(long, default_value = "0")]
    gap: ByteCount,
    /// Reads shorter than this are copied from staging memory, even if they could be read in place
    #[arg(long, default_value_t = ByteCount(Options::default().in_place_bytes))]
    in_place: ByteCount,
    /// I/O backend; default: the best that works
    #[arg(long, alias = "rung", value_parser = io_backend)]
    io_backend: Option<IoBackendKind>,
    /// Memory that the bare loop of `of kept` fills; default: as much as the reader does
    #[arg(long)]
    kept: Option<ByteCount>,
    /// Seconds of one measurement
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Rounds of bare loop and reader, in turn
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Only workloads whose names contain this; `limit`: none, only the disk's limit
    #[arg(long)]
    only: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl IoArguments {
    /// Memory that a bare loop fills which keeps what it reads.
    fn kept_bytes(&self, workload: &Workload) -> usize {
        self.kept.map_or(workload.memory_bytes(), |bytes| bytes.0 as usize)
    }
}

fn io_backend(word: &str) -> Result<IoBackendKind, String> {
    let found = IoBackendKind::LADDER.into_iter().find(|kind| kind.name() == word);
    found.ok_or_else(|| format!("one of {}", IoBackendKind::LADDER.map(IoBackendKind::name).join(", ")))
}

const DEPTHS: [usize; 4] = [64, 128, 256, 512];
const LARGE_BYTES: usize = 1 << 20;
/// In large blocks less depth is as fast, and 512 MiB in flight would be no fair use of memory.
const LARGE_DEPTHS: [usize; 4] = [4, 8, 16, 32];
/// The grid only chooses a configuration, which is then measured properly.
const GRID_SHARE: f64 = 0.3;

/// The best bare loop of a kind, and what it reached.
struct Limit {
    how: BareLoop,
    rate: Rate,
}

struct Limits {
    sequential: Limit,
    page: Limit,
    small: Limit,
}

pub fn run(arguments: &IoArguments) -> anyhow::Result<ExitCode> {
    if !(arguments.seconds > 0.0 && arguments.seconds <= 600.0) {
        return Err(usage(format!(
            "--seconds is {}; it must be greater than 0 and at most 600",
            arguments.seconds
        )));
    }
    let options = Options {
        io_backend: arguments.io_backend,
        block_bytes: arguments.io_block.map(|bytes| bytes.0),
        depth: arguments.depth,
        gap_bytes: arguments.gap.0,
        in_place_bytes: arguments.in_place.0,
        ..Options::default()
    };
    let most = ByteCount(machine_memory_limit().bytes / 2);
    if let Some(kept) = arguments.kept.filter(|kept| kept.0 > most.0) {
        return Err(usage(format!(
            "--kept is {kept}; it must be at most {most}, half of what this machine has"
        )));
    }
    // Before minutes are spent on writing.
    options.check()?;
    let progress: Box<dyn Progress> = if arguments.json { Box::new(Silent) } else { Box::new(Shown::new()) };
    let scratch = match &arguments.file {
        Some(_) => None,
        None => {
            let directory = std::fs::canonicalize(&arguments.dir)
                .map_err(|error| anyhow::anyhow!("{}: {error}", arguments.dir.display()))?;
            Some(MeasuringFile::create(&directory, arguments.size.0, &*progress)?)
        }
    };
    let path = scratch.as_ref().map(|scratch| &scratch.path).or(arguments.file.as_ref());
    let Some(path) = path else { anyhow::bail!("no file to read") };
    let files = ThisMachine.open(&[Layout::file(path)], Access::Read, &options)?;
    let duration = Duration::from_secs_f64(arguments.seconds);
    let limits =
        Limits::find(path, files.io_backend().block_bytes, duration.mul_f64(GRID_SHARE), &*progress)?;
    let workloads = workloads(arguments.only.as_deref());
    let total = workloads.len() as u64 * u64::from(arguments.rounds);
    progress.stage("engine in turn", Some(total), Unit::Count("rounds"));
    let mut rows = Vec::new();
    for workload in workloads {
        let bare = workload.bare(
            files.io_backend().block_bytes,
            limits.small.how,
            limits.page.how,
            limits.sequential.how,
        );
        let mut turns = Vec::new();
        for round in 0..arguments.rounds {
            let kept = arguments.kept_bytes(&workload) / bare.threads;
            let bare = (bare, BareLoop { memory_bytes: kept, ..bare });
            turns.push(Turn::take(&workload, &files, path, bare, duration, round, scratch.is_some())?);
            progress.advance(1);
        }
        let kept_bytes = arguments.kept_bytes(&workload);
        rows.push(WorkloadRow { kept_bytes, ..WorkloadRow::of(workload, bare, turns) });
    }
    progress.finish();
    if arguments.json {
        return print_json(&as_json(arguments, &files, scratch.as_ref(), &limits, &rows));
    }
    print(&as_text(arguments, &files, scratch.as_ref(), &limits, &rows))
}

/// Random rows of every width that graphs have, sorted batches, shared blocks, and the file from front to back.
fn workloads(only: Option<&str>) -> Vec<Workload> {
    let rows = [512u64, 1024, 3072, 400, 4096];
    let mut all: Vec<Workload> = rows
        .map(|row_bytes| Workload {
            name: format!("rows-{row_bytes}"),
            kind: WorkloadKind::Rows { row_bytes, rows_at_once: 10_000 },
        })
        .to_vec();
    all.push(Workload {
        name: "sorted-512".into(),
        kind: WorkloadKind::Sorted { row_bytes: 512, rows_at_once: 100_000 },
    });
    all.push(Workload {
        name: "dense-400".into(),
        kind: WorkloadKind::Dense { row_bytes: 400, rows_at_once: 100_000, of_rows: 500_000 },
    });
    all.push(Workload { name: "sequential".into(), kind: WorkloadKind::Sequential });
    all.retain(|workload| only.is_none_or(|word| workload.name.contains(word)));
    all
}

impl Limits {
    fn find(
        path: &Path,
        block_bytes: u64,
        each: Duration,
        progress: &dyn Progress,
    ) -> anyhow::Result<Limits> {
        progress.stage("limit of the disk", Some(24), Unit::Count("loops"));
        let best = |block_bytes: usize, depths: [usize; 4], sequential: bool| -> anyhow::Result<Limit> {
            let mut best: Option<Limit> = None;
            for threads in [1, 2] {
                for depth in depths {
                    let how = BareLoop { block_bytes, depth, threads, sequential, memory_bytes: 0 };
                    let rate = bare_loop(path, how, each)?;
                    progress.advance(1);
                    if best.as_ref().is_none_or(|best| rate.reads_per_second() > best.rate.reads_per_second())
                    {
                        best = Some(Limit { how, rate });
                    }
                }
            }
            best.ok_or_else(|| anyhow::anyhow!("no bare loop ran"))
        };
        let small = block_bytes.max(512) as usize;
        let limits = Limits {
            sequential: best(LARGE_BYTES, LARGE_DEPTHS, true)?,
            page: best(small.max(4096), DEPTHS, false)?,
            small: best(small, DEPTHS, false)?,
        };
        progress.finish();
        Ok(limits)
    }
}

/// One round: the bare loops and the engine, one right behind the other.
struct Turn {
    bare: Rate,
    /// A bare loop that fills as much memory as the engine does.
    kept: Rate,
    engine: Reached,
}

impl Turn {
    fn take(
        workload: &Workload,
        files: &Files,
        path: &Path,
        (bare, kept): (BareLoop, BareLoop),
        duration: Duration,
        round: u16,
        check: bool,
    ) -> anyhow::Result<Turn> {
        // Whoever goes first may find the disk in another mood: take turns at that too.
        if round.is_multiple_of(2) {
            let bare = bare_loop(path, bare, duration)?;
            let engine = workload.measure(files, duration, check)?;
            return Ok(Turn { bare, engine, kept: bare_loop(path, kept, duration)? });
        }
        let kept = bare_loop(path, kept, duration)?;
        let engine = workload.measure(files, duration, check)?;
        Ok(Turn { kept, engine, bare: bare_loop(path, bare, duration)? })
    }
}

/// A workload's medians.
struct WorkloadRow {
    workload: Workload,
    bare: BareLoop,
    engine_reads: f64,
    engine_bytes: f64,
    bare_reads: f64,
    kept_reads: f64,
    kept_bytes: usize,
    /// Engine over bare loop, round by round: reads a second, or bytes where it is sequential.
    of_limit: f64,
    of_kept: f64,
    engine_cpu_per_read: f64,
    bare_cpu_per_read: f64,
    cpu_ratio: f64,
    cpu_of_kept: f64,
    cpu_per_gb: f64,
    cores: f64,
    /// Of the last round.
    last: Reached,
}

impl WorkloadRow {
    fn of(workload: Workload, bare: BareLoop, mut turns: Vec<Turn>) -> WorkloadRow {
        let by_bytes = workload.kind == WorkloadKind::Sequential;
        let of = |value: &dyn Fn(&Turn) -> f64| median(&turns.iter().map(value).collect::<Vec<_>>());
        let speed = |rate: &Rate| if by_bytes { rate.bytes_per_second() } else { rate.reads_per_second() };
        // Large reads differ in size between the two: there CPU is compared by the byte.
        let cost =
            |rate: &Rate| rate.cpu_seconds / if by_bytes { rate.bytes as f64 } else { rate.reads as f64 };
        let cpu_per_read = |rate: &Rate| rate.cpu_seconds / rate.reads as f64;
        WorkloadRow {
            bare,
            engine_reads: of(&|turn| turn.engine.rate.reads_per_second()),
            engine_bytes: of(&|turn| turn.engine.rate.bytes_per_second()),
            bare_reads: of(&|turn| turn.bare.reads_per_second()),
            kept_reads: of(&|turn| turn.kept.reads_per_second()),
            kept_bytes: workload.memory_bytes(),
            of_limit: of(&|turn| speed(&turn.engine.rate) / speed(&turn.bare)),
            of_kept: of(&|turn| speed(&turn.engine.rate) / speed(&turn.kept)),
            engine_cpu_per_read: of(&|turn| cpu_per_read(&turn.engine.rate)),
            bare_cpu_per_read: of(&|turn| cpu_per_read(&turn.bare)),
            cpu_ratio: of(&|turn| cost(&turn.engine.rate) / cost(&turn.bare)),
            cpu_of_kept: of(&|turn| cost(&turn.engine.rate) / cost(&turn.kept)),
            cpu_per_gb: of(&|turn| turn.engine.rate.cpu_seconds / turn.engine.rate.bytes as f64 * 1e9),
            cores: of(&|turn| turn.engine.rate.cpu_seconds / turn.engine.rate.seconds),
            last: turns.pop().expect("at least one round").engine,
            workload,
        }
    }

    fn json(&self) -> Value {
        let counters = &self.last.counters;
        json!({
            "name": self.workload.name,
            "of_limit": self.of_limit,
            "of_kept": self.of_kept,
            "reads_per_second": self.engine_reads,
            "useful_bytes_per_second": self.engine_bytes,
            "bare": how_json(self.bare),
            "bare_reads_per_second": self.bare_reads,
            "kept_reads_per_second": self.kept_reads,
            "kept_memory_bytes": self.kept_bytes,
            "cpu_us_per_read": self.engine_cpu_per_read * 1e6,
            "bare_cpu_us_per_read": self.bare_cpu_per_read * 1e6,
            "cpu_over_bare": self.cpu_ratio,
            "cpu_over_kept": self.cpu_of_kept,
            "cpu_seconds_per_gb": self.cpu_per_gb,
            "cores": self.cores,
            "amplification": counters.amplification(),
            "amplification_by_theory": self.last.by_theory.map(|theory| theory.bytes as f64 / counters.useful_bytes as f64),
            "requests": counters.requests,
            "reads": counters.reads,
            "reads_by_theory": self.last.by_theory.map(|theory| theory.reads),
            "useful_bytes": counters.useful_bytes,
            "read_bytes": counters.read_bytes,
            "copied_bytes": counters.copied_bytes,
            "mean_depth": counters.mean_depth(),
            "busy_seconds": counters.busy.as_secs_f64(),
            "latency_us": json!({
                "p50": counters.latency(0.5).as_micros() as u64,
                "p99": counters.latency(0.99).as_micros() as u64,
                "p999": counters.latency(0.999).as_micros() as u64,
            }),
        })
    }
}

fn how_json(how: BareLoop) -> Value {
    json!({ "block_bytes": how.block_bytes, "depth": how.depth, "threads": how.threads })
}

fn as_json(
    arguments: &IoArguments,
    files: &Files,
    scratch: Option<&MeasuringFile>,
    limits: &Limits,
    rows: &[WorkloadRow],
) -> Value {
    let limit = |limit: &Limit| {
        json!({
            "reads_per_second": limit.rate.reads_per_second(),
            "bytes_per_second": limit.rate.bytes_per_second(),
            "cpu_us_per_read": limit.rate.cpu_seconds / limit.rate.reads as f64 * 1e6,
            "best": how_json(limit.how),
        })
    };
    json!({
        "place": arguments.file.as_ref().unwrap_or(&arguments.dir).to_string_lossy(),
        "file_bytes": files.bytes(0),
        "io_backend": files.io_backend().kind.name(),
        "why_not_better": files.io_backend().why_not_better,
        "block_bytes": files.io_backend().block_bytes,
        "depth": arguments.depth,
        "gap_bytes": arguments.gap.0,
        "in_place_bytes": arguments.in_place.0,
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "limits": {
            "sequential": limit(&limits.sequential),
            "random_page": limit(&limits.page),
            "random_small": limit(&limits.small),
        },
        "write_bytes_per_second": scratch.map(write_rate),
        "workloads": rows.iter().map(WorkloadRow::json).collect::<Vec<_>>(),
    })
}

fn write_rate(scratch: &MeasuringFile) -> f64 {
    scratch.written.written_bytes as f64 / scratch.seconds.as_secs_f64()
}

fn as_text(
    arguments: &IoArguments,
    files: &Files,
    scratch: Option<&MeasuringFile>,
    limits: &Limits,
    rows: &[WorkloadRow],
) -> String {
    let gb = |bytes: f64| format!("{:.2} GB/s", bytes / 1e9);
    let place = arguments.file.as_ref().unwrap_or(&arguments.dir);
    let mut text = format!(
        "The disk of {}, by {}, in blocks of {}:\n",
        place.display(),
        files.io_backend(),
        ByteCount(files.io_backend().block_bytes)
    );
    for (name, limit) in
        [("in order", &limits.sequential), ("anywhere", &limits.page), ("anywhere", &limits.small)]
    {
        let BareLoop { block_bytes, depth, threads, .. } = limit.how;
        text.push_str(&format!(
            "  {:8} {name}  {:>10} reads/s  {:>11}   best with {threads} thread{} and a depth of {depth}\n",
            ByteCount(block_bytes as u64).to_string(),
            grouped(limit.rate.reads_per_second() as u64),
            gb(limit.rate.bytes_per_second()),
            if threads == 1 { "" } else { "s" },
        ));
    }
    if let Some(scratch) = scratch {
        text.push_str(&format!("  written at {}, synced\n", gb(write_rate(scratch))));
    }
    if rows.is_empty() {
        return text;
    }
    text.push_str(&format!(
        "\nThe engine, depth {}, medians of {} rounds in turn with bare loops:\n\n  {:12} {:>9} {:>11} {:>8} {:>7}  {:>6} {:>6} {:>6} {:>8}  {:>5} {:>9}\n",
        arguments.depth,
        arguments.rounds,
        "",
        "reads/s",
        "useful",
        "of limit",
        "of kept",
        "us CPU",
        "x bare",
        "x kept",
        "CPU s/GB",
        "ampl.",
        "p99",
    ));
    for row in rows {
        let counters = &row.last.counters;
        text.push_str(&format!(
            "  {:12} {:>9} {:>11} {:>8.2} {:>7.2}  {:>6.2} {:>6.2} {:>6.2} {:>8.2}  {:>5.2} {:>6} us\n",
            row.workload.name,
            grouped(row.engine_reads as u64),
            gb(row.engine_bytes),
            row.of_limit,
            row.of_kept,
            row.engine_cpu_per_read * 1e6,
            row.cpu_ratio,
            row.cpu_of_kept,
            row.cpu_per_gb,
            counters.amplification(),
            grouped(counters.latency(0.99).as_micros() as u64),
        ));
    }
    for row in rows.iter().filter(|row| matches!(row.workload.kind, WorkloadKind::Dense { .. })) {
        let counters = &row.last.counters;
        text.push_str(&format!(
            "\n  {}: {} rows in {} reads; each run of blocks once would be {}\n",
            row.workload.name,
            grouped(counters.requests),
            grouped(counters.reads),
            grouped(row.last.by_theory.map_or(0, |theory| theory.reads)),
        ));
    }
    text
}
