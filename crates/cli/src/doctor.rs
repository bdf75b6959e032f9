use crate::gpu;
use crate::output::{print, print_json};
use esker_io::{AlignedBuffer, DIRECT_ALIGN, DirectFile};
use esker_types::random::{Key, below};
use esker_types::{ByteCount, grouped, machine_memory_limit};
use serde::Serialize;
use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Say what this machine can do, and what follows from it
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  esker doctor
  esker doctor --dir /mnt/nvme       the disk where datasets will live
  esker doctor --json

Writes a file of 256 MiB (or a tenth of the free space, if that is less) to measure the disk, and removes it.")]
pub struct Arguments {
    /// Directory on the disk to look at
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// One JSON object on standard output
    #[arg(long)]
    json: bool,
}

const PROBE_BYTES: u64 = 256 << 20;
const PROBE_TIME: Duration = Duration::from_millis(1000);
const LARGE_BYTES: usize = 2 << 20;
const SMALL_BYTES: usize = 4096;

/// One finding: what, how it is, and what follows.
#[derive(Serialize)]
struct Finding {
    name: &'static str,
    good: bool,
    found: String,
    follows: String,
}

#[derive(Serialize)]
struct Disk {
    sequential_bytes_per_second: f64,
    random_reads_per_second: f64,
    direct: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let directory = fs::canonicalize(&arguments.dir)
        .map_err(|error| anyhow::anyhow!("{}: {error}", arguments.dir.display()))?;
    let probe = Probe::create(&directory).map_err(|error| error.to_string());
    // Without a file of our own, any file will do to see whether io_uring works.
    let ring = esker_io::io_uring(probe.as_ref().map_or(Path::new("/proc/self/exe"), |probe| &probe.path));
    let direct = probe.as_ref().map_err(Clone::clone).and_then(|probe| esker_io::direct_io(&probe.path));
    let disk = probe
        .as_ref()
        .map_err(Clone::clone)
        .and_then(|probe| probe.measure().map_err(|error| error.to_string()));
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
        ring_finding(&ring, &direct),
        direct_finding(&direct),
        disk_finding(&disk, esker_io::available_bytes(&directory).unwrap_or(0)),
        locked_finding(locked),
        gpu_finding(&gpu),
    ];
    if arguments.json {
        return print_json(&serde_json::json!({
            "directory": directory.to_string_lossy(),
            "cores": cores,
            "memory_bytes": memory.bytes,
            "memory_from": memory.from,
            "io_uring": ring.is_ok(),
            "io_uring_refusal": ring.err(),
            "direct_io": direct.is_ok(),
            "direct_io_refusal": direct.as_ref().err(),
            "direct_offset_align": direct.as_ref().ok().map(|direct| direct.offset_align),
            "direct_memory_align": direct.as_ref().ok().map(|direct| direct.memory_align),
            "disk": disk.as_ref().ok(),
            "disk_refusal": disk.as_ref().err(),
            "locked_memory_bytes": locked,
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

fn ring_finding(ring: &Result<(), String>, direct: &Result<esker_io::DirectIo, String>) -> Finding {
    match (ring, direct) {
        (Ok(()), Ok(_)) => finding(
            "io_uring",
            true,
            "works",
            "reads go through io_uring past the page cache: the fastest way",
        ),
        (Ok(()), Err(_)) => {
            finding("io_uring", true, "works", "reads go through io_uring and the page cache")
        }
        (Err(why), Ok(_)) => finding(
            "io_uring",
            false,
            why.clone(),
            "reads fall back to a pool of threads: the same rate for several times the CPU. In Docker: --security-opt seccomp=unconfined",
        ),
        (Err(why), Err(_)) => finding(
            "io_uring",
            false,
            why.clone(),
            "reads fall back to threads and the page cache: slow. Try another disk",
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

fn disk_finding(disk: &Result<Disk, String>, free_bytes: u64) -> Finding {
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
    let random = disk.random_reads_per_second * SMALL_BYTES as f64;
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

fn locked_finding(locked: Option<u64>) -> Finding {
    match locked {
        None => finding("locked memory", true, "no limit", "IO buffers can be registered with the kernel"),
        Some(bytes) if bytes >= 64 << 20 => finding(
            "locked memory",
            true,
            ByteCount(bytes).to_string(),
            "IO buffers up to this can be registered",
        ),
        Some(bytes) => finding(
            "locked memory",
            false,
            ByteCount(bytes).to_string(),
            "too little to register IO buffers: plain reads, a little more CPU. Raise it with ulimit -l",
        ),
    }
}

fn gpu_finding(found: &gpu::Found) -> Finding {
    let missing: Vec<&str> =
        found.libraries.iter().filter(|(_, path)| path.is_none()).map(|(name, _)| *name).collect();
    if found.gpus.is_empty() && found.driver.is_none() {
        return finding("GPU", false, "none found", "training runs on the CPU");
    }
    let driver = found.driver.as_deref().unwrap_or("unknown");
    let text = format!("{}, driver {driver}", found.gpus.join(", "));
    if missing.is_empty() {
        return finding(
            "GPU",
            true,
            text,
            "driver, NVRTC and cuBLAS are there; training on it comes with a later release",
        );
    }
    let follows = format!(
        "missing {}: install the CUDA toolkit's runtime libraries, or pip install nvidia-cuda-nvrtc nvidia-cublas",
        missing.join(", ")
    );
    finding("GPU", false, text, &follows)
}

/// A file to read. It has no name any more, so nothing is left behind however this ends.
struct Probe {
    path: PathBuf,
    bytes: u64,
    _file: fs::File,
}

impl Probe {
    fn create(directory: &Path) -> anyhow::Result<Probe> {
        let free = esker_io::available_bytes(directory).unwrap_or(PROBE_BYTES * 10);
        let bytes = (free / 10).min(PROBE_BYTES) / LARGE_BYTES as u64 * LARGE_BYTES as u64;
        anyhow::ensure!(
            bytes > 0,
            "{}: less than 20 MiB free; free some to measure the disk",
            directory.display()
        );
        let name = directory.join(format!(".esker-doctor-{}", std::process::id()));
        let named = |error| anyhow::anyhow!("{}: {error}", name.display());
        let mut writer = esker_io::SequentialWriter::create(&name).map_err(named)?;
        let file = fs::File::open(&name).map_err(named)?;
        fs::remove_file(&name).map_err(named)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let mut block = vec![0u8; 1 << 20];
        let key = Key::new(1);
        for at in 0..bytes / block.len() as u64 {
            // Not compressible, not shareable: some disks cheat on zeros.
            let words = block.chunks_exact_mut(8).zip(0..);
            words.for_each(|(word, i)| word.copy_from_slice(&key.at(at << 20 | i).to_le_bytes()));
            writer.write_all(&block).map_err(named)?;
        }
        writer.finish().map_err(named)?;
        Ok(Probe { path, bytes, _file: file })
    }

    fn measure(&self) -> anyhow::Result<Disk> {
        let sequential = self.read_for(4, LARGE_BYTES)?;
        let random = self.read_for(32, SMALL_BYTES)?;
        let direct = esker_io::direct_io(&self.path).is_ok();
        Ok(Disk {
            sequential_bytes_per_second: sequential * LARGE_BYTES as f64,
            random_reads_per_second: random,
            direct,
        })
    }

    /// Reads per second of `threads` threads that read blocks of one size for a while: large ones in order, small
    /// ones anywhere.
    fn read_for(&self, threads: u64, block_bytes: usize) -> anyhow::Result<f64> {
        let blocks = self.bytes / block_bytes as u64;
        let next = AtomicU64::new(0);
        let started = Instant::now();
        let counts: Vec<std::io::Result<u64>> = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..threads)
                .map(|_| {
                    scope.spawn(|| {
                        let mut file = DirectFile::open(&self.path)?;
                        let mut buffer = AlignedBuffer::new(block_bytes, DIRECT_ALIGN);
                        let mut count = 0;
                        while started.elapsed() < PROBE_TIME {
                            let turn = next.fetch_add(1, Ordering::Relaxed);
                            let block = if block_bytes == LARGE_BYTES {
                                turn % blocks
                            } else {
                                below(Key::new(2).at(turn), blocks)
                            };
                            file.read(&mut buffer, block * block_bytes as u64, &self.path)?;
                            count += 1;
                        }
                        Ok(count)
                    })
                })
                .collect();
            readers.into_iter().map(|reader| reader.join().expect("readers do not panic")).collect()
        });
        let seconds = started.elapsed().as_secs_f64();
        let total: u64 = counts.into_iter().collect::<std::io::Result<Vec<u64>>>()?.into_iter().sum();
        Ok(total as f64 / seconds)
    }
}
