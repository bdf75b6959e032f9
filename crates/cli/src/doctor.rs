use crate::gpu;
use crate::output::{print, print_json};
use crate::scratch::MeasuringFile;
use esker_io::limit::{BareLoop, bare_loop};
use esker_io::{
    Access, AlignedBuffer, ChosenBackend, DIRECT_ALIGN, Disk as _, Files, IoBackendKind, Layout, Options,
    ThisMachine,
};
use esker_types::{ByteCount, Silent, grouped, machine_memory_limit};
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Check memory, disk and GPU of this machine, and say what follows for Esker
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker doctor
  esker doctor --dir /mnt/nvme       the disk where datasets will be
  esker doctor --json

Writes a file of 256 MiB (or a tenth of the free space, if that is less) to measure the disk, and removes it. `esker bench io` measures thoroughly."
)]
pub struct DoctorArguments {
    /// Directory on the disk to check
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

const PROBE_BYTES: u64 = 256 << 20;
const REGISTERED_BYTES: u64 = 64 << 20;
const PROBE_TIME: Duration = Duration::from_millis(700);
/// Settings at which disks reach their limit, or nearly so; `esker bench io` searches for the best.
const LARGE: BareLoop =
    BareLoop { block_bytes: 1 << 20, depth: 8, threads: 1, sequential: true, memory_bytes: 0 };
const SMALL: BareLoop =
    BareLoop { block_bytes: 4096, depth: 256, threads: 1, sequential: false, memory_bytes: 0 };

/// One finding: what, how it is, and what follows.
#[derive(Serialize)]
struct Finding {
    name: &'static str,
    good: bool,
    found: String,
    follows: String,
}

#[derive(Serialize)]
struct MeasuredDisk {
    sequential_bytes_per_second: f64,
    random_reads_per_second: f64,
    direct: bool,
}

pub fn run(arguments: &DoctorArguments) -> anyhow::Result<ExitCode> {
    let directory = fs::canonicalize(&arguments.dir)
        .map_err(|error| anyhow::anyhow!("{}: {error}", arguments.dir.display()))?;
    let probe = MeasuringFile::create(&directory, PROBE_BYTES, &Silent).map_err(|error| error.to_string());
    // Without a file of our own, any file will do to see whether io_uring works.
    let ring = esker_io::io_uring(probe.as_ref().map_or(Path::new("/proc/self/exe"), |probe| &probe.path));
    let direct = probe.as_ref().map_err(Clone::clone).and_then(|probe| esker_io::direct_io(&probe.path));
    let disk = probe.as_ref().map_err(Clone::clone).and_then(|probe| measure(&probe.path));
    let files = probe.as_ref().map_err(Clone::clone).and_then(|probe| open(&probe.path));
    let io_backend = files.as_ref().map(|files| files.io_backend().clone()).map_err(Clone::clone);
    let registered = files.is_ok_and(|files| registers(&files));
    let memory = machine_memory_limit();
    let locked = esker_io::locked_memory_limit();
    let gpu = gpu::look();
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let findings = vec![
        finding(
            "cores",
            true,
            cores.to_string(),
            "sampling, sorting and training use them all; --threads takes fewer",
        ),
        finding(
            "memory",
            true,
            format!("{}, by {}", ByteCount(memory.bytes), memory.from),
            &memory_follows(memory.bytes),
        ),
        io_backend_finding(&io_backend),
        ring_finding(&ring),
        direct_finding(&direct),
        disk_finding(&disk, esker_io::available_bytes(&directory).unwrap_or(0)),
        locked_finding(locked, registered),
        gpu_finding(&gpu),
    ];
    if arguments.json {
        return print_json(&serde_json::json!({
            "directory": directory.to_string_lossy(),
            "cores": cores,
            "memory_bytes": memory.bytes,
            "memory_from": memory.from,
            "io_backend": io_backend.as_ref().ok().map(|io_backend| io_backend.kind.name()),
            "why_no_better_backend": io_backend.as_ref().ok().map(|io_backend| &io_backend.why_not_better),
            "io_uring": ring.is_ok(),
            "io_uring_refusal": ring.err(),
            "direct_io": direct.is_ok(),
            "direct_io_refusal": direct.as_ref().err(),
            "direct_offset_align": direct.as_ref().ok().map(|direct| direct.offset_align),
            "direct_memory_align": direct.as_ref().ok().map(|direct| direct.memory_align),
            "disk": disk.as_ref().ok(),
            "disk_refusal": disk.as_ref().err(),
            "locked_memory_bytes": locked,
            "registers_buffers": registered,
            "gpu": gpu,
            "findings": findings,
        }));
    }
    print(&render(&directory, &findings))
}

fn render(directory: &Path, findings: &[Finding]) -> String {
    let mut text = format!("This machine, with datasets in {}:\n", directory.display());
    for finding in findings {
        let mark = if finding.good { "ok" } else { "--" };
        text.push_str(&format!(
            "  {mark}  {:14} {}\n      {:14} -> {}\n",
            finding.name, finding.found, "", finding.follows
        ));
    }
    text
}

fn finding(name: &'static str, good: bool, found: impl Into<String>, follows: &str) -> Finding {
    Finding { name, good, found: found.into(), follows: follows.into() }
}

fn memory_follows(bytes: u64) -> String {
    let default = ByteCount(bytes / 5 * 4);
    format!("--memory defaults to {default}; whatever it is, datasets may be far larger")
}

fn io_backend_finding(io_backend: &Result<ChosenBackend, String>) -> Finding {
    let io_backend = match io_backend {
        Ok(io_backend) => io_backend,
        Err(why) => return finding("reads", false, why.clone(), "no file could be made to try on"),
    };
    let follows = match io_backend.kind {
        IoBackendKind::UringDirect => "the fastest way there is",
        IoBackendKind::UringBuffered => {
            "the memory limit counts the page cache: another file system may be faster"
        }
        IoBackendKind::PoolDirect => "nearly the same rate for several times the CPU",
        IoBackendKind::PoolBuffered | IoBackendKind::Simulated => "slow: try another disk, or allow io_uring",
    };
    finding(
        "reads",
        io_backend.kind == IoBackendKind::UringDirect,
        format!("by {}", io_backend.kind),
        follows,
    )
}

fn ring_finding(ring: &Result<(), String>) -> Finding {
    match ring {
        Ok(()) => finding("io_uring", true, "works", "one thread keeps hundreds of reads in flight"),
        Err(why) => finding(
            "io_uring",
            false,
            why.clone(),
            "a pool of threads takes its place. In Docker: --security-opt seccomp=unconfined",
        ),
    }
}

fn direct_finding(direct: &Result<esker_io::DirectIo, String>) -> Finding {
    match direct {
        Ok(direct) => {
            let found =
                format!("offsets by {} bytes, buffers by {}", direct.offset_align, direct.memory_align);
            let follows = match direct.offset_align {
                0..=512 => "a 512-byte row costs one 512-byte read".to_string(),
                align => format!(
                    "a read is at least {align} bytes: smaller rows are packed or read more than once"
                ),
            };
            finding("O_DIRECT", true, found, &follows)
        }
        Err(why) => finding(
            "O_DIRECT",
            false,
            why.clone(),
            "reads go through the page cache, which the memory limit counts",
        ),
    }
}

fn disk_finding(disk: &Result<MeasuredDisk, String>, free_bytes: u64) -> Finding {
    let disk = match disk {
        Ok(disk) => disk,
        Err(why) => {
            return finding(
                "disk",
                false,
                why.clone(),
                "not measured; datasets need a directory that can be written",
            );
        }
    };
    let sequential = disk.sequential_bytes_per_second;
    let random = disk.random_reads_per_second * SMALL.block_bytes as f64;
    let found = format!(
        "{}/s in large blocks, {} random 4-KiB reads/s ({}/s), {} free",
        ByteCount(sequential as u64),
        grouped(disk.random_reads_per_second as u64),
        ByteCount(random as u64),
        ByteCount(free_bytes)
    );
    let ratio = sequential / random.max(1.0);
    let follows = if !disk.direct {
        "measured through the page cache: an upper bound".to_string()
    } else if ratio > 2.0 {
        format!("large reads are {ratio:.1}x faster by the byte: packing rows pays")
    } else {
        "small reads are nearly as fast by the byte as large ones".to_string()
    };
    finding("disk", true, found, &follows)
}

fn locked_finding(locked: Option<u64>, registered: bool) -> Finding {
    let limit = locked.map_or("no limit".to_string(), |bytes| ByteCount(bytes).to_string());
    if registered {
        let found = format!("{limit}; {} of IO buffers were registered", ByteCount(REGISTERED_BYTES));
        return finding("locked memory", true, found, "the kernel knows the buffers: less CPU for each read");
    }
    let follows = "IO buffers are not registered: a quarter more CPU for each read. Raise it with ulimit -l";
    finding("locked memory", false, limit, follows)
}

fn gpu_finding(found: &gpu::GpuFindings) -> Finding {
    let driver = found.driver.as_deref().unwrap_or("unknown");
    if let Some(gpu) = &found.first {
        let giga = |rate: f64| format!("{:.0}", rate / 1e9);
        let rows: Vec<String> = gpu.host_reads_bytes_per_second.iter().map(|rate| giga(*rate)).collect();
        let text = format!(
            "{} ({}), {} of {} free, driver {driver} with CUDA {}.{}; bus {} GB/s by copies, {} GB/s read by GPU threads in rows of 512, 1024, 4096 bytes out of 256 MiB (`esker bench gpu` takes 2 GiB, where small rows are slower)",
            gpu.name,
            gpu.architecture,
            ByteCount(gpu.free_bytes),
            ByteCount(gpu.memory_bytes),
            gpu.cuda / 1000,
            gpu.cuda % 1000 / 10,
            giga(gpu.bus_bytes_per_second),
            rows.join(", ")
        );
        return finding("GPU", true, text, "training runs on it; --device cpu does without");
    }
    if found.gpus.is_empty() && found.driver.is_none() {
        return finding("GPU", false, "none found", "training runs on the CPU");
    }
    let text = format!("{}, driver {driver}", found.gpus.join(", "));
    let refusal = found.refusal.as_deref().unwrap_or("it could not be opened");
    finding("GPU", false, text, &format!("training runs on the CPU: {refusal}"))
}

fn open(path: &Path) -> Result<Files, String> {
    let files = ThisMachine.open(&[Layout::file(path)], Access::Read, &Options::default());
    files.map_err(|error| error.to_string())
}

/// Whether a buffer of the size that training has can be registered.
fn registers(files: &Files) -> bool {
    let buffer = AlignedBuffer::new(REGISTERED_BYTES as usize, DIRECT_ALIGN);
    files.queue().is_ok_and(|mut queue| queue.register(&buffer))
}

fn measure(path: &Path) -> Result<MeasuredDisk, String> {
    let rate = |how| bare_loop(path, how, PROBE_TIME).map_err(|error| error.to_string());
    Ok(MeasuredDisk {
        sequential_bytes_per_second: rate(LARGE)?.bytes_per_second(),
        random_reads_per_second: rate(SMALL)?.reads_per_second(),
        direct: esker_io::direct_io(path).is_ok(),
    })
}
