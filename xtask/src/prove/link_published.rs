//! Link prediction: the published recipes for FB15k-237 and WN18RR. Each recipe is a run of its own; several are trained at
//! the same time on one device. A call has a time limit: what it cuts off has checkpoints, and the next call continues.
//! Results of recipes that have ended stay in one file, which may be copied to another machine and back.

use super::{Bench, succeed};
use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A published result, and flags that should give it.
pub struct PublishedRecipe {
    /// Its name here.
    pub name: &'static str,
    /// The dataset, below the folder of runs.
    pub dataset: &'static str,
    /// Flags of `esker train`, without device and limits of this machine.
    pub flags: &'static str,
    /// The published MRR, and how far below it a result may be.
    pub published: [f64; 2],
    /// Whose settings these are, and what differs.
    pub settings: &'static str,
}

const LIBKGE: &str = "LibKGE's best configuration; negatives shared by the edges of a chunk";
const LIBKGE_ALL: &str = "LibKGE's best configuration";
const KBC: &str = "kbc";
const ROTATE: &str = "RotatE's authors; half as many edges, each for both sides, negatives shared by 8 edges";

/// All recipes, the ones with published settings first.
pub const RECIPES: [PublishedRecipe; 10] = [
    PublishedRecipe {
        name: "fb-rotate",
        dataset: "fb",
        flags: "--embeddings 2000 --decoder rotate --loss self-adversarial --margin 9 --temperature 1 --edge-weights subsampling --mask graph --negatives 256 --chunks 64 --batch 512 --optimizer adam --lr 5e-5 --schedule step:50000,0.1 --epochs 188 --eval-every 20",
        published: [0.337, 0.005],
        settings: ROTATE,
    },
    PublishedRecipe {
        name: "fb-complex-n3",
        dataset: "fb",
        flags: "--embeddings 2000 --decoder complex --inverse-relations --init normal:0.001 --loss softmax --mask none --negatives all --n3 0.05 --batch 500 --optimizer adagrad --lr 0.1 --epochs 100 --eval-every 5",
        published: [0.37, 0.005],
        settings: KBC,
    },
    PublishedRecipe {
        name: "wn-complex-n3",
        dataset: "wn",
        flags: "--embeddings 2000 --decoder complex --inverse-relations --init normal:0.001 --loss softmax --mask none --negatives all --n3 0.1 --batch 100 --optimizer adagrad --lr 0.1 --epochs 100 --eval-every 5",
        published: [0.49, 0.005],
        settings: "kbc; 100 edges for both sides where kbc has 100 queries",
    },
    PublishedRecipe {
        name: "fb-distmult",
        dataset: "fb",
        flags: "--embeddings 256 --decoder distmult --inverse-relations --init uniform:0.93522 --init-relations uniform:0.93522 --loss softmax --mask none --negatives 402 --source-negatives 255 --chunks 32 --batch 1024 --optimizer adagrad --lr 0.159537 --input-dropout 0.41968 --relation-dropout 0.40971 --schedule plateau:0.95,6 --epochs 400 --eval-every 5 --patience 10",
        published: [0.343, 0.005],
        settings: LIBKGE,
    },
    PublishedRecipe {
        name: "fb-complex",
        dataset: "fb",
        flags: "--embeddings 256 --decoder complex --inverse-relations --init uniform:0.83282 --loss softmax --mask none --negatives 1000 --source-negatives 529 --chunks 32 --batch 1024 --optimizer adagrad --lr 0.182554 --input-dropout 0.5 --relation-dropout 0.22684 --schedule plateau:0.95,7 --epochs 400 --eval-every 5 --patience 10",
        published: [0.348, 0.005],
        settings: LIBKGE,
    },
    PublishedRecipe {
        name: "fb-transe",
        dataset: "fb",
        flags: "--embeddings 128 --decoder transe --distance l2 --inverse-relations --init uniform:0.00001 --loss softmax --mask none --negatives 192 --source-negatives 61 --chunks 64 --batch 512 --optimizer adam --lr 6e-4 --schedule plateau:0.95,5 --epochs 400 --eval-every 5 --patience 10",
        published: [0.313, 0.005],
        settings: "LibKGE's best configuration with four times the batch and twice the learning rate; negatives shared by 8 edges",
    },
    PublishedRecipe {
        name: "wn-complex",
        dataset: "wn",
        flags: "--embeddings 128 --decoder complex --init uniform:0.281482 --loss softmax --mask none --negatives all --batch 512 --optimizer adagrad --lr 0.525581 --weight-decay 4.523e-6 --input-dropout 0.35927 --relation-dropout 0.31123 --schedule plateau:0.95,5 --epochs 400 --eval-every 5 --patience 10",
        published: [0.475, 0.005],
        settings: LIBKGE_ALL,
    },
    PublishedRecipe {
        name: "wn-distmult",
        dataset: "wn",
        flags: "--embeddings 512 --decoder distmult --inverse-relations --init uniform:0.722637 --init-relations uniform:0.722637 --loss softmax --mask none --negatives all --batch 512 --optimizer adagrad --lr 0.331268 --input-dropout 0.36679 --relation-dropout 0.5 --schedule plateau:0.95,7 --epochs 400 --eval-every 5 --patience 10",
        published: [0.452, 0.01],
        settings: "as LibKGE's best configuration, one answer at a time instead of all answers of a query",
    },
    PublishedRecipe {
        name: "wn-rotate",
        dataset: "wn",
        flags: "--embeddings 1000 --decoder rotate --loss self-adversarial --margin 6 --temperature 0.5 --edge-weights subsampling --mask graph --negatives 1024 --chunks 32 --batch 256 --optimizer adam --lr 5e-5 --schedule step:40000,0.1 --epochs 235 --eval-every 20",
        published: [0.477, 0.01],
        settings: ROTATE,
    },
    PublishedRecipe {
        name: "wn-transe",
        dataset: "wn",
        flags: "--embeddings 512 --decoder transe --distance l2 --inverse-relations --init normal:0.00695 --init-relations normal:0.0612 --loss softmax --mask none --negatives 158 --source-negatives 70 --chunks 16 --batch 256 --optimizer adagrad --lr 0.253272 --input-dropout 0.25192 --schedule plateau:0.95,5 --epochs 400 --eval-every 5 --patience 10",
        published: [0.228, 0.01],
        settings: "as LibKGE's best configuration with twice the batch; negatives shared by 16 edges",
    },
];

/// Flags of all recipes.
const COMMON: &str =
    "--task link --encoder none --reduction mean --eval full --metric mrr --checkpoint-minutes 3";
/// Host memory of a run: several share a machine.
const MEMORY: &str = "8GB";
/// How long a run may take to write its checkpoint when it is told to stop.
const STOPPING: Duration = Duration::from_secs(60);

/// Flags of `cargo xtask prove link-published`.
#[derive(Debug, Clone, Parser)]
#[command(name = "link-published", no_binary_name = true)]
pub struct PublishedFlags {
    /// Minutes until runs are stopped; the next call continues them
    #[arg(long, default_value_t = 600.0)]
    pub minutes: f64,
    /// Recipes, separated by commas; all if not given
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
    /// Recipes that are trained at the same time
    #[arg(long, default_value_t = 10)]
    pub at_once: usize,
    /// The device
    #[arg(long, default_value = "cuda")]
    pub device: String,
    /// Threads of each run
    #[arg(long, default_value_t = 4)]
    pub threads: usize,
    /// Folder of runs and of results.json; default: target/link-published
    #[arg(long)]
    pub folder: Option<PathBuf>,
    /// Let the kernels of several runs share the device at the same time, by NVIDIA's multi-process service, where it works
    #[arg(long)]
    pub mps: bool,
    /// Only check that each run would start
    #[arg(long)]
    pub dry_run: bool,
}

impl PublishedFlags {
    /// The words after the name of the proof.
    pub fn parse(words: &[String]) -> Result<PublishedFlags> {
        Ok(PublishedFlags::try_parse_from(words)?)
    }
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let flags = PublishedFlags::parse(&bench.words)?;
    let folder = flags.folder.clone().unwrap_or_else(|| crate::root().join("target/link-published"));
    fs::create_dir_all(&folder)?;
    let folder = folder.canonicalize()?;
    ensure!(import(bench, &folder)?, "FB15k-237 and WN18RR are not beside the checkout");
    trained(bench, &RECIPES, &folder, &flags)
}

/// Imports the datasets, unless they are there; `false` if their files are missing.
pub fn import(bench: &Bench, folder: &Path) -> Result<bool> {
    let Some(data) = crate::real_data() else { return Ok(false) };
    for (name, from) in [("fb", "fb15k-237"), ("wn", "wn18rr")] {
        let out = folder.join(name);
        if out.exists() {
            continue;
        }
        let mut command = bench.esker(&["import"]);
        command.arg(&out).args(["--format", "triples", "--from"]).arg(data.join(from));
        succeed(&mut command)?;
    }
    Ok(true)
}

/// Trains what has not ended yet, and compares all results with what was published. An error if the time is over before.
pub fn trained(
    bench: &Bench,
    recipes: &[PublishedRecipe],
    folder: &Path,
    flags: &PublishedFlags,
) -> Result<Value> {
    let chosen = |recipe: &&PublishedRecipe| {
        flags.only.is_empty() || flags.only.iter().any(|name| name == recipe.name)
    };
    for name in &flags.only {
        let known: Vec<&str> = recipes.iter().map(|recipe| recipe.name).collect();
        ensure!(known.contains(&name.as_str()), "`{name}` is not a recipe; there are {}", known.join(", "));
    }
    let recipes: Vec<&PublishedRecipe> = recipes.iter().filter(chosen).collect();
    if flags.dry_run {
        let tried = recipes.iter().map(|recipe| would_start(bench, recipe, folder, flags));
        return Ok(Value::Array(tried.collect::<Result<_>>()?));
    }
    let mut results = Results::open(folder)?;
    let service = if flags.mps { Service::start(bench, folder)? } else { None };
    let waiting = recipes.iter().copied().filter(|recipe| !results.has(recipe.name)).collect();
    let mut runs = Runs { bench, folder, flags, service: service.as_ref(), waiting, running: Vec::new() };
    let failed = runs.train(&mut results)?;
    drop(service);
    ensure!(failed.is_empty(), "runs failed:\n  {}", failed.join("\n  "));
    compared(&recipes, &results)
}

/// The results beside the published ones.
fn compared(recipes: &[&PublishedRecipe], results: &Results) -> Result<Value> {
    let (mut rows, mut short, mut open) = (Vec::new(), Vec::new(), Vec::new());
    for recipe in recipes {
        let Some(found) = results.all.get(recipe.name) else {
            open.push(recipe.name);
            continue;
        };
        let mrr = found["test"]["mrr"].as_f64().context("a test MRR")?;
        let [published, within] = recipe.published;
        println!("{:14} MRR {mrr:.4}, published {published} ({})", recipe.name, recipe.settings);
        if mrr < published - within {
            short.push(format!("{}: MRR {mrr:.4}, published {published}", recipe.name));
        }
        rows.push(json!({
            "recipe": recipe.name, "published": published, "within": within, "mrr": mrr, "settings": recipe.settings,
            "above_by_more": mrr > published + within, "run": found,
        }));
    }
    let open_text = open.join(", ");
    ensure!(
        open.is_empty(),
        "the time is over before these have ended: {open_text}; the same command continues them"
    );
    match short.is_empty() {
        true => Ok(rows.into()),
        false => bail!("below what was published:\n  {}\n{rows:#?}", short.join("\n  ")),
    }
}

/// The words of a run.
fn words(recipe: &PublishedRecipe, folder: &Path, flags: &PublishedFlags) -> Result<Vec<String>> {
    let path = |name: &str| folder.join(name).to_str().map(String::from).context("a path that is not text");
    let mut words = vec!["train".to_string(), path(recipe.dataset)?];
    words.extend(COMMON.split(' ').chain(recipe.flags.split(' ')).map(String::from));
    let limits = ["--memory", MEMORY, "--device", &flags.device, "--threads", &flags.threads.to_string()];
    words.extend(limits.map(String::from));
    if flags.device != "cpu" && recipe.flags.contains("--negatives all") {
        // Scores of all nodes are large matmuls.
        words.extend(["--precision", "tf32"].map(String::from));
    }
    words.extend(["--out".to_string(), path(recipe.name)?]);
    Ok(words)
}

fn would_start(
    bench: &Bench,
    recipe: &PublishedRecipe,
    folder: &Path,
    flags: &PublishedFlags,
) -> Result<Value> {
    let words = words(recipe, folder, flags)?;
    let mut command = bench.esker(&words.iter().map(String::as_str).collect::<Vec<_>>());
    succeed(command.arg("--dry-run")).with_context(|| recipe.name)?;
    Ok(json!({ "recipe": recipe.name, "words": words.join(" ") }))
}

/// Results of recipes that have ended, in one file.
struct Results {
    path: PathBuf,
    all: Map<String, Value>,
}

impl Results {
    fn open(folder: &Path) -> Result<Results> {
        let path = folder.join("results.json");
        let all = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?,
            Err(_) => Map::new(),
        };
        Ok(Results { path, all })
    }

    fn has(&self, name: &str) -> bool {
        self.all.contains_key(name)
    }

    fn add(&mut self, name: &str, result: Value) -> Result<()> {
        self.all.insert(name.to_string(), result);
        let half = self.path.with_extension("half");
        fs::write(&half, format!("{:#}\n", Value::Object(self.all.clone())))?;
        Ok(fs::rename(half, &self.path)?)
    }
}

/// Runs of a call.
struct Runs<'a> {
    bench: &'a Bench,
    folder: &'a Path,
    flags: &'a PublishedFlags,
    service: Option<&'a Service>,
    waiting: VecDeque<&'a PublishedRecipe>,
    running: Vec<Running<'a>>,
}

struct Running<'a> {
    recipe: &'a PublishedRecipe,
    child: Child,
    started: Instant,
}

impl<'a> Runs<'a> {
    /// Trains until everything has ended or the time is over. Returns what failed.
    fn train(&mut self, results: &mut Results) -> Result<Vec<String>> {
        let end = Instant::now() + Duration::from_secs_f64(self.flags.minutes * 60.0);
        let (mut failed, mut told) = (Vec::new(), false);
        loop {
            let over = Instant::now() >= end;
            while !over && self.running.len() < self.flags.at_once.max(1) {
                let Some(recipe) = self.waiting.pop_front() else { break };
                let run = self.start(recipe)?;
                self.running.push(run);
            }
            let (ended, running) = divided(std::mem::take(&mut self.running))?;
            self.running = running;
            for (run, code) in ended {
                if let Err(error) = self.end(&run, code, results) {
                    failed.push(format!("{}: {error:#}", run.recipe.name));
                }
            }
            if self.running.is_empty() && (over || self.waiting.is_empty()) {
                return Ok(failed);
            }
            if over && !told {
                self.running.iter().for_each(Running::stop);
                told = true;
            }
            if Instant::now() >= end + STOPPING {
                self.running.iter_mut().for_each(|run| drop(run.child.kill()));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Starts or continues a run. Its output goes to a file beside it.
    fn start(&self, recipe: &'a PublishedRecipe) -> Result<Running<'a>> {
        let out = self.folder.join(recipe.name);
        let mut command = match out.join("config.json").exists() {
            true => {
                let mut command = self.bench.esker(&["train", "--resume", "--out"]);
                command.arg(&out);
                command
            }
            false => {
                let words = words(recipe, self.folder, self.flags)?;
                self.bench.esker(&words.iter().map(String::as_str).collect::<Vec<_>>())
            }
        };
        let log = File::options().create(true).append(true).open(self.log_path(recipe))?;
        command.arg("--json").stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        if let Some(service) = self.service {
            command.envs(service.variables());
        }
        let child = command.spawn().with_context(|| format!("{command:?}"))?;
        Ok(Running { recipe, child, started: Instant::now() })
    }

    fn log_path(&self, recipe: &PublishedRecipe) -> PathBuf {
        self.folder.join(format!("{}.log", recipe.name))
    }

    /// Keeps the result of a run that has ended. One that was stopped continues with the next call.
    fn end(&self, run: &Running<'_>, code: Option<i32>, results: &mut Results) -> Result<()> {
        let (recipe, seconds) = (run.recipe, run.started.elapsed().as_secs_f64());
        let out = self.folder.join(recipe.name);
        match code {
            Some(0) => {
                let summary: Value = serde_json::from_slice(&fs::read(out.join("summary.json"))?)?;
                println!("{:14} ended, {seconds:.0} s in this call", recipe.name);
                let flags = words(recipe, Path::new(""), self.flags)?[2..].join(" ");
                let result = json!({
                    "test": summary["test"], "valid": summary["valid"], "best_epoch": summary["best_epoch"],
                    "epochs": summary["epochs"].as_array().map(Vec::len), "steps": summary["steps"],
                    "wall_seconds": summary["wall_seconds"], "runs_at_once": self.flags.at_once,
                    "peak_device_bytes": summary["peak_device_bytes"], "flags": flags,
                });
                results.add(recipe.name, result)?;
                fs::remove_dir_all(&out).with_context(|| out.display().to_string())
            }
            // Stopped by the signal, or killed because it took too long to stop.
            Some(130) | None => {
                println!("{:14} stopped after {seconds:.0} s: {}", recipe.name, progress(&out));
                Ok(())
            }
            Some(code) => {
                let log = fs::read_to_string(self.log_path(recipe)).unwrap_or_default();
                let last: Vec<&str> = log.lines().rev().take(5).collect();
                bail!("exit code {code}: {}", last.into_iter().rev().collect::<Vec<_>>().join("\n"))
            }
        }
    }
}

/// The last epoch of a run.
fn progress(out: &Path) -> String {
    let lines = fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    let parsed = lines.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut epochs = parsed.filter(|line| line["valid"].is_object());
    match epochs.next() {
        Some(epoch) => format!("validation MRR {} after epoch {}", epoch["valid"]["mrr"], epoch["epoch"]),
        None => "not validated yet".into(),
    }
}

impl Running<'_> {
    /// Asks it to write a checkpoint and to end.
    fn stop(&self) {
        let id = self.child.id().to_string();
        drop(Command::new("kill").args(["-TERM", &id]).status());
    }
}

/// Runs that have ended, with their exit codes, and the others.
type SplitRuns<'a> = (Vec<(Running<'a>, Option<i32>)>, Vec<Running<'a>>);

fn divided(runs: Vec<Running<'_>>) -> Result<SplitRuns<'_>> {
    let (mut ended, mut running) = (Vec::new(), Vec::new());
    for mut run in runs {
        match run.child.try_wait()? {
            Some(status) => ended.push((run, status.code())),
            None => running.push(run),
        }
    }
    Ok((ended, running))
}

/// NVIDIA's multi-process service, for the time of a call.
struct Service {
    folder: PathBuf,
}

impl Service {
    /// Starts it, and tries whether programs can open the device through it. `None` if not.
    fn start(bench: &Bench, folder: &Path) -> Result<Option<Service>> {
        let folder = folder.join("mps");
        fs::create_dir_all(&folder)?;
        let mut command = Command::new("nvidia-cuda-mps-control");
        let started = command.arg("-d").envs(variables(&folder)).stdin(Stdio::null()).status();
        if !started.is_ok_and(|status| status.success()) {
            println!("nvidia-cuda-mps-control does not start: runs take turns on the device");
            return Ok(None);
        }
        let service = Service { folder };
        let found = bench.esker(&["doctor", "--json"]).envs(service.variables()).output()?;
        let found: Value = serde_json::from_slice(&found.stdout).unwrap_or_default();
        if found["gpu"]["first"].is_object() {
            return Ok(Some(service));
        }
        println!("the device cannot be opened through the multi-process service: runs take turns");
        Ok(None)
    }

    fn variables(&self) -> [(&'static str, PathBuf); 2] {
        variables(&self.folder)
    }
}

/// What tells programs where the service is.
fn variables(folder: &Path) -> [(&'static str, PathBuf); 2] {
    ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"].map(|name| (name, folder.to_path_buf()))
}

impl Drop for Service {
    fn drop(&mut self) {
        let mut command = Command::new("nvidia-cuda-mps-control");
        let child = command.envs(self.variables()).stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        if let Ok(mut child) = child {
            if let Some(mut input) = child.stdin.take() {
                drop(input.write_all(b"quit\n"));
            }
            drop(child.wait());
        }
    }
}
