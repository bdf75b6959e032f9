//! The proofs of the project's claims, as functions of a size.

pub mod accuracy;
pub mod damage;
pub mod diskgnn;
pub mod esker;
pub mod gcn;
pub mod ginex;
pub mod gpu;
pub mod import;
pub mod inference;
pub mod io;
pub mod kill;
pub mod link;
pub mod link_budget;
pub mod link_gpu;
pub mod link_inputs;
pub mod link_peers;
pub mod link_published;
pub mod marius_bytes;
pub mod marius_orders;
pub mod marius_safe;
pub mod marius_speed;
pub mod outre;
pub mod outre_accuracy;
pub mod outre_gpu;
pub mod outre_history;
pub mod outre_safe;
pub mod outre_speed;
pub mod outre_split;
pub mod real;
pub mod sample;
pub mod skew;
pub mod stripe;
pub mod threads;
pub mod train;
pub mod verify;
pub mod whole_gpu;
pub mod whole_run;

use anyhow::{Context, Result, bail};
use esker_types::median;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// A proof that `cargo xtask prove` runs in full.
pub struct Item {
    /// Its name in `prove`.
    pub name: &'static str,
    /// The claim it proves.
    pub about: &'static str,
    run: fn(&Bench) -> Result<Value>,
}

/// All proofs.
pub const ITEMS: &[Item] = &[
    Item {
        name: "io",
        about: "the reading engine against the disk's limit, the limit against fio",
        run: io::full,
    },
    Item {
        name: "import-real",
        about: "every real dataset imports with the counts its source gives",
        run: real::full,
    },
    Item {
        name: "import-scale",
        about: "100 million edges in 256 MiB inside a cgroup of 384 MiB",
        run: import::full,
    },
    Item {
        name: "generate",
        about: "papers100m x 0.05 under 512 MiB, the same bytes with 1 and 2 threads",
        run: threads::full,
    },
    Item {
        name: "kill",
        about: "SIGKILL at 50 random moments of an import and of a generate",
        run: kill::full,
    },
    Item {
        name: "stripe",
        about: "SIGKILL at 50 random moments of striping and of its undo",
        run: stripe::full,
    },
    Item { name: "damage", about: "flipped bytes and cut files are found and named", run: damage::full },
    Item {
        name: "verify-speed",
        about: "verify against the raw read rate of the disk, in one run",
        run: verify::full,
    },
    Item {
        name: "sample",
        about: "the same samples for any number of threads, their speed beside PyG and GraphBolt, bytes of a trace",
        run: sample::full,
    },
    Item {
        name: "skew",
        about: "accesses to the presets' nodes are as uneven as DiskGNN reports for the real graphs",
        run: skew::full,
    },
    Item {
        name: "train-accuracy",
        about: "accuracy on the real datasets, five seeds, beside what was published",
        run: accuracy::full,
    },
    Item {
        name: "gcn",
        about: "GCN trained on sampled neighbours: sampled against full accuracy, by what a sampled neighbour counts for",
        run: gcn::full,
    },
    Item {
        name: "train-same",
        about: "losses equal to the bit for every exact strategy with 1, 2 and 4 threads",
        run: train::full_same,
    },
    Item {
        name: "train-kill",
        about: "SIGKILL at 100 random moments of training: the resumed run ends with the same weights",
        run: train::full_kill,
    },
    Item {
        name: "train-budget",
        about: "the smallest budget suffices inside a cgroup; a byte less is refused with the table",
        run: train::full_budget,
    },
    Item {
        name: "train-speed",
        about: "epochs in memory beside PyG's on the same graph and machine, and the rate of the matmuls",
        run: train::full_speed,
    },
    Item {
        name: "link-marius",
        about: "FB15k-237 with the Marius authors' configuration: DistMult, SAGE and GAT, three seeds, MRR within 0.01",
        run: link::full_marius,
    },
    Item {
        name: "link-published",
        about: "published MRR on FB15k-237 and WN18RR: ten recipes on a GPU, resumable; --minutes, --only, --at-once (see cargo xtask gpu)",
        run: link_published::full,
    },
    Item {
        name: "link-budget",
        about: "links: the smallest budget suffices inside a cgroup, embeddings and evaluation included; a byte less is refused",
        run: link_budget::full,
    },
    Item {
        name: "link-inputs",
        about: "held-out edges of coauthor_cs and wordnet-synsets: AUC from features, embeddings, and both",
        run: link_inputs::full,
    },
    Item {
        name: "link-peers",
        about: "DistMult on FB15k-237, two threads: epochs beside the same arithmetic in PyTorch, and PyKEEN",
        run: link_peers::full,
    },
    Item {
        name: "link-gpu",
        about: "edges/s at the shape of a quarter of Freebase, embeddings on the GPU and in host memory (see cargo xtask gpu)",
        run: link_gpu::full,
    },
    Item {
        name: "marius-orders",
        about: "FB15k-237 in orders over partitions, a quarter resident: MRR beside Table 4 of Marius++, and what the order, resident negatives and resident neighbours each cost; --models",
        run: marius_orders::full,
    },
    Item {
        name: "marius-bytes",
        about: "bytes of rows that a partition buffer reads and writes, beside what the swaps of its order take: 1.01 times at most",
        run: marius_bytes::full,
    },
    Item {
        name: "marius-speed",
        about: "epochs of a partition buffer in 3 GB, 6.4 GB of embeddings, beside memory and beside the disk's rates: 1.1 times the larger at most",
        run: marius_speed::full,
    },
    Item {
        name: "marius-kill",
        about: "SIGKILL at 100 random moments each of training over partitions and of sorting for it, and full disks: the same weights, rows and bytes",
        run: marius_safe::full,
    },
    Item {
        name: "link-speed",
        about: "DistMult on FB15k-237 as multiples of its matmuls: an epoch at most 2.5 times, test ranking 3 times",
        run: link::full_speed,
    },
    Item {
        name: "link-same",
        about: "links: losses, metrics and embeddings equal to the bit for 1, 2 and 4 threads and any candidate block",
        run: link::full_same,
    },
    Item {
        name: "link-kill",
        about: "SIGKILL at 100 random moments of training links: the resumed run ends with the same embeddings",
        run: link::full_kill,
    },
    Item {
        name: "link-leak",
        about: "held-out edges of a random graph cannot be predicted: test AUC is 50 within 2",
        run: link::full_leak,
    },
    Item {
        name: "link-gae",
        about: "GCN 32-16 and dot on held-out edges of citation graphs, ten splits, beside the published AUC",
        run: link::full_gae,
    },
    Item {
        name: "ginex-same",
        about: "losses of ginex equal those of memory to the bit: seeds, caches, superbatches, row widths",
        run: ginex::full_same,
    },
    Item {
        name: "cache",
        about: "hit ratios of Belady, static and LRU on the presets; how fast superbatches are planned",
        run: ginex::full_cache,
    },
    Item {
        name: "ginex-budget",
        about: "features 4 times and topology twice as large as the cgroup: finishes inside its budget",
        run: ginex::full_budget,
    },
    Item {
        name: "ginex-kill",
        about: "SIGKILL at 100 random moments of ginex, and a full disk: resumed runs end with the same weights",
        run: ginex::full_kill,
    },
    Item {
        name: "ginex-speed",
        about: "data path and epoch against mmap in the same cgroup, against PyG with mapped features, reads of the disk's limit",
        run: ginex::full_speed,
    },
    Item {
        name: "ginex-sensitivity",
        about: "superbatch, feature dimension, memory and batch size: Ginex's Figures 16 to 19",
        run: ginex::full_sensitivity,
    },
    Item {
        name: "diskgnn-same",
        about: "losses of diskgnn equal those of memory to the bit: caches, disk budgets, presets, row widths",
        run: diskgnn::full_same,
    },
    Item {
        name: "diskgnn-kill",
        about: "SIGKILL at 50 random moments of preparing: the re-run makes the same bytes",
        run: diskgnn::full_kill,
    },
    Item {
        name: "diskgnn-speed",
        about: "bytes and data path beside ginex, epochs beside memory, PyG and GraphBolt, reads of the disk's limit",
        run: diskgnn::full_speed,
    },
    Item {
        name: "diskgnn-prepare",
        about: "what preparing costs, batched against individual packing, segments: heuristic against brute force",
        run: diskgnn::full_prepare,
    },
    Item {
        name: "diskgnn-sensitivity",
        about: "memory, disk budget, fan-out and batch size: DiskGNN's Figures 10, 12 to 14, 18 and 19",
        run: diskgnn::full_sensitivity,
    },
    Item {
        name: "diskgnn-gpu",
        about: "diskgnn on a GPU with a tenth of the rows cached: epochs beside memory and the disk (see cargo xtask gpu)",
        run: diskgnn::full_gpu,
    },
    Item {
        name: "esker-bytes",
        about: "bytes that esker reads beside the least for the whole run, 1.02 times at most; ginex, diskgnn, a static cache and LRU beside them",
        run: esker::full_bytes,
    },
    Item {
        name: "esker-kill",
        about: "SIGKILL at 50 random moments of preparing for esker: the re-run makes the same bytes",
        run: esker::full_kill,
    },
    Item {
        name: "esker-speed",
        about: "the data path of esker beside those of diskgnn and ginex, a tenth of the rows cached",
        run: esker::full_speed,
    },
    Item {
        name: "outre-redundancy",
        about: "nodes of all batches per training node: by groups of partitions against shuffled",
        run: outre::full,
    },
    Item {
        name: "outre-speed",
        about: "epochs of outre beside ginex, diskgnn, mmap and memory, with a tenth of the features in memory: rows of 4 KiB",
        run: outre_speed::full_wide,
    },
    Item {
        name: "outre-speed-communities",
        about: "the same where 98% of edges are inside communities",
        run: outre_speed::full_communities,
    },
    Item {
        name: "outre-speed-narrow",
        about: "the same on graph M: rows of 512 bytes",
        run: outre_speed::full_narrow,
    },
    Item {
        name: "outre-history",
        about: "accuracy and requested rows by staleness and hops of a history",
        run: outre_history::full,
    },
    Item {
        name: "outre-history-seconds",
        about: "seconds of an epoch by staleness and hops of a history",
        run: outre_history::full_seconds,
    },
    Item {
        name: "outre-gpu",
        about: "epochs of outre on a GPU beside ginex and memory, a tenth of the rows in host memory (see cargo xtask gpu)",
        run: outre_gpu::full,
    },
    Item {
        name: "outre-split",
        about: "the chosen division of memory between cached rows and a history beside others, predicted beside measured seconds",
        run: outre_split::full,
    },
    Item {
        name: "outre-accuracy",
        about: "accuracy of outre's defaults against shuffled batches in memory, five seeds",
        run: outre_accuracy::full,
    },
    Item {
        name: "outre-kill",
        about: "SIGKILL at 50 random moments of partitioning, profiling and training: the same weights as memory with the same history",
        run: outre_safe::full_kill,
    },
    Item {
        name: "outre-budget",
        about: "outre with features 4 times and topology twice as large as the cgroup: finishes inside its budget",
        run: outre_safe::full_budget,
    },
    Item {
        name: "inference",
        about: "inference with all neighbours: the same bytes with any memory, at the rate of disk or processor, after kills",
        run: inference::full,
    },
    Item {
        name: "whole-run",
        about: "the whole command, three epochs with validation and test: diskgnn and ginex in 1.9 GB beside memory",
        run: whole_run::full,
    },
    Item {
        name: "whole-run-gpu",
        about: "whole commands on a GPU: papers100m x 0.05 from disk beside memory, all nodes predicted, x 0.5 with 8 + 8 GiB (see cargo xtask gpu)",
        run: whole_gpu::full,
    },
    Item {
        name: "train-budget-gpu",
        about: "the smallest host memory of runs on a GPU suffices inside a cgroup (see cargo xtask gpu)",
        run: train::full_budget_gpu,
    },
    Item {
        name: "gpu",
        about: "training on a GPU: against the CPU, PyTorch and PyG, its rates, no stray access (see cargo xtask gpu)",
        run: gpu::full,
    },
];

/// The environment of a proof: the program under test and an empty directory.
pub struct Bench {
    /// The `esker` program.
    pub esker: PathBuf,
    /// This program as a release build; without it, experiments run in this process.
    pub xtask: Option<PathBuf>,
    /// What the command line says after the name of the proof.
    pub words: Vec<String>,
    /// Scratch space, removed when dropped.
    pub directory: PathBuf,
}

static BENCHES: AtomicU64 = AtomicU64::new(0);

impl Bench {
    /// Scratch space below `parent`.
    pub fn new(esker: &Path, parent: &Path) -> Result<Bench> {
        let number = BENCHES.fetch_add(1, Ordering::Relaxed);
        let directory = parent.join(format!("esker-bench-{}-{number}", std::process::id()));
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        Ok(Bench { esker: esker.to_path_buf(), xtask: None, words: Vec::new(), directory })
    }

    /// A path in the scratch space.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The same as a command-line word.
    pub fn text_path(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    /// The command `esker` with these words.
    pub fn esker(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.esker);
        command.current_dir(&self.directory).args(words);
        command
    }

    /// Runs `esker` with these words and `--json`. A non-zero exit code is an error with its output.
    pub fn json(&self, words: &[&str]) -> Result<Value> {
        self.json_of(self.esker(words).arg("--json"))
    }

    /// Runs `cargo xtask bench` with these words.
    pub fn experiment(&self, words: &[&str]) -> Result<Value> {
        match &self.xtask {
            Some(program) => self.json_of(Command::new(program).arg("bench").args(words).arg("--json")),
            None => Ok(crate::bench::run(words)?.json),
        }
    }

    /// Runs a command that prints one JSON object.
    pub fn json_of(&self, command: &mut Command) -> Result<Value> {
        let output = succeed(command)?;
        serde_json::from_slice(&output.stdout).context("standard output is not a JSON object")
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Rounds of all speed measurements at full size. A median needs at least three.
pub(crate) const ROUNDS: usize = 3;

/// The first of several runs, with these numbers replaced by their medians over all runs; `rounds` has all values.
pub(crate) fn repeated(
    rounds: usize,
    keys: &[&str],
    mut run: impl FnMut() -> Result<Value>,
) -> Result<Value> {
    let runs: Vec<Value> = (0..rounds).map(|_| run()).collect::<Result<_>>()?;
    let mut found = runs.first().context("a round at least")?.clone();
    let mut all = serde_json::Map::new();
    for key in keys {
        let values: Vec<f64> = runs.iter().map(|run| number(run, key)).collect::<Result<_>>()?;
        found[*key] = median(&values).into();
        all.insert(key.to_string(), values.into());
    }
    found["rounds"] = all.into();
    Ok(found)
}

/// Threads that share the machine when several runs are made at a time, and as many threads for each run.
fn shares_of_machine(most: usize) -> (usize, usize) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = (cores / 2).clamp(1, most);
    (workers, (cores / workers).max(1))
}

/// Runs several cases at a time, for proofs that measure no time. A case gets its number and the threads that are its
/// share. Results are in the order of cases; the first error ends it after the cases that have begun.
pub(crate) fn side_by_side<T: Send>(
    count: usize,
    most: usize,
    run: impl Fn(usize, usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (workers, threads) = shares_of_machine(most);
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let case = next.fetch_add(1, Ordering::Relaxed);
                    if case >= count {
                        return;
                    }
                    let result = run(case, threads);
                    if result.is_err() {
                        next.store(count, Ordering::Relaxed);
                    }
                    found.lock().unwrap_or_else(PoisonError::into_inner).push((case, result));
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_by_key(|(case, _)| *case);
    found.into_iter().map(|(_, result)| result).collect()
}

/// A number that must exist.
pub(crate) fn number(value: &Value, key: &str) -> Result<f64> {
    value[key].as_f64().with_context(|| format!("no number `{key}` in {value:#}"))
}

/// A bound that was asked for, for a record: `run` fails after it has written a record with one that is missed.
pub(crate) fn at_most(what: &str, found: f64, most: f64) -> Value {
    json!({ "what": what, "found": found, "at_most": most, "is_as_asked": found <= most })
}

/// The bounds of several parts of a result.
pub(crate) fn all_asked(parts: &[&Value]) -> Vec<Value> {
    parts.iter().flat_map(|part| part["asked"].as_array().cloned().unwrap_or_default()).collect()
}

/// Fails if a result misses one of its bounds.
fn check_asked(result: &Value) -> Result<()> {
    let asked = result["asked"].as_array().map_or(&[][..], Vec::as_slice);
    let of_bounds = asked.iter().filter(|bound| bound["is_as_asked"] != true).map(|bound| {
        format!("{}: {}, at most {} was asked", bound["what"], bound["found"], bound["at_most"])
    });
    let others = result["missed"].as_array().map_or(&[][..], Vec::as_slice);
    let missed: Vec<String> =
        of_bounds.chain(others.iter().filter_map(Value::as_str).map(String::from)).collect();
    if !missed.is_empty() {
        bail!("the record is written, but: {}", missed.join("; "));
    }
    Ok(())
}

/// Runs a command that must succeed.
pub fn succeed(command: &mut Command) -> Result<Output> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(output)
}

/// Proofs with flags of their own.
const WITH_FLAGS: [&str; 2] = ["link-published", "marius-orders"];

/// Runs the named proof at full size with a release build and writes its record.
pub fn run(name: &str, words: &[&str]) -> Result<()> {
    let item = ITEMS.iter().find(|item| item.name == name).with_context(|| {
        let known: Vec<String> =
            ITEMS.iter().map(|item| format!("  {:17} {}", item.name, item.about)).collect();
        format!("`{name}` is not a proof; there are\n{}", known.join("\n"))
    })?;
    if !words.is_empty() && !WITH_FLAGS.contains(&name) {
        bail!("`{name}` has no flags");
    }
    let root = crate::root();
    let [esker, xtask] = built(&root)?;
    let mut bench = Bench::new(&esker, &root.join("target"))?;
    bench.xtask = Some(xtask);
    bench.words = words.iter().map(|word| word.to_string()).collect();
    let result = (item.run)(&bench)?;
    let command = [&["cargo xtask prove", item.name], words].concat().join(" ");
    let record = json!({
        "item": item.name,
        "shows": item.about,
        "date": said("date", &["-u", "+%Y-%m-%d"]),
        "commit": said("git", &["rev-parse", "--short", "HEAD"]),
        "command": command,
        "machine": machine(),
        "result": result,
    });
    let path = root.join("bench/record").join(format!("{}.json", item.name));
    fs::create_dir_all(path.parent().unwrap_or(&root))?;
    // The record must not contain paths of this machine.
    let places = [&bench.directory, &root].map(|place| place.to_string_lossy().into_owned());
    let record = places.iter().fold(format!("{record:#}"), |text, place| text.replace(place.as_str(), "..."));
    fs::write(&path, format!("{record}\n"))?;
    println!("{record}\nwritten to {}", path.strip_prefix(&root).unwrap_or(&path).display());
    check_asked(&result)
}

/// Release builds of `esker` and this program: from a folder that was filled elsewhere, or built now.
fn built(root: &Path) -> Result<[PathBuf; 2]> {
    if let Ok(own) = std::env::current_exe()
        && own.parent().is_some_and(|folder| folder.ends_with("gpu"))
    {
        return Ok([own.with_file_name("esker"), own]);
    }
    let words = ["build", "--release", "--package", "esker", "--package", "xtask"];
    if !Command::new("cargo").args(words).current_dir(root).status()?.success() {
        bail!("the release build failed");
    }
    Ok(["esker", "xtask"].map(|name| root.join("target/release").join(name)))
}

fn said(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).current_dir(crate::root()).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_string()).unwrap_or_default()
}

fn machine() -> Value {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpu.lines().find_map(|line| line.strip_prefix("model name")?.split(':').nth(1)).unwrap_or("").trim();
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory =
        memory.lines().next().unwrap_or("").split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    json!({
        "cores": cores,
        "cpu": model,
        "memory_bytes": memory.map(|kib| kib * 1024),
        "kernel": said("uname", &["-r"]),
        "gpu": said("nvidia-smi", &["--query-gpu=name,driver_version", "--format=csv,noheader"]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_that_is_missed_in_any_part_fails_the_proof() {
        let part =
            |found: f64| json!({ "asked": [at_most("seconds", 1.0, 1.3), at_most("bytes", found, 1.3)] });
        let result = |found: f64| json!({ "asked": all_asked(&[&part(1.3), &part(found), &json!({})]) });
        assert_eq!(result(1.0)["asked"].as_array().unwrap().len(), 4);
        assert!(check_asked(&result(1.3)).is_ok() && check_asked(&json!({ "seconds": 7 })).is_ok());
        let said = check_asked(&result(1.31)).unwrap_err().to_string();
        assert!(said.contains("bytes") && said.contains("1.31") && !said.contains("seconds"), "{said}");
        assert!(check_asked(&result(f64::NAN)).is_err(), "nothing was measured");
        assert!(check_asked(&json!({ "missed": ["MRR .25"] })).is_err());
        assert!(check_asked(&json!({ "missed": [] })).is_ok());
    }

    #[test]
    fn cases_side_by_side_are_in_order_and_an_error_ends_them() {
        let found = side_by_side(20, 4, |case, threads| Ok(case * threads.min(1))).unwrap();
        assert_eq!(found, (0..20).collect::<Vec<_>>());
        let begun = AtomicUsize::new(0);
        let failed = side_by_side(1000, 4, |case, _| {
            begun.fetch_add(1, Ordering::Relaxed);
            if case == 3 { bail!("the fourth case") } else { Ok(case) }
        });
        assert_eq!(failed.unwrap_err().to_string(), "the fourth case");
        assert!(begun.load(Ordering::Relaxed) < 1000);
    }

    #[test]
    fn repeated_runs_show_the_median_and_each_round() {
        let mut seconds = [3.0, 1.0, 2.0].into_iter();
        let mut run = || Ok(json!({ "name": "run", "seconds": seconds.next() }));
        let found = repeated(3, &["seconds"], &mut run).unwrap();
        assert_eq!(found, json!({ "name": "run", "seconds": 2.0, "rounds": { "seconds": [3.0, 1.0, 2.0] } }));
        assert!(repeated(1, &["seconds"], run).is_err());
    }
}
