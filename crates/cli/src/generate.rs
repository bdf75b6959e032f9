use crate::exit::usage;
use crate::output::{print, print_json};
use crate::progress::Shown;
use esker_import::ImportJob;
use esker_import::generate::{FactShape, GraphShape, PRESETS, Popularity, Preset};
use esker_store::Dataset;
use esker_types::{Budget, ByteCount, Dtype, peak_resident_bytes};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Generate a graph of any size, with features and labels that a GNN can learn
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker generate papers --preset papers100m --scale 0.01 --memory 512MiB --seed 1
  esker generate g --nodes 1000000 --degree 15 --dim 128 --classes 32 --seed 1
  esker generate fb --preset freebase86m --scale 0.01 --out-neighbours

Presets imitate the shape of real graphs at any --scale: papers100m (128-d f32, very skewed), mag240m (768-d f16, the most skewed), friendster (128-d f32, nearly flat), igb (1024-d f32). freebase86m is a knowledge graph for link prediction: typed edges, no features, edges held out. Flags beside --preset override it. The same flags give the same bytes, whatever --memory and --threads are."
)]
pub struct GenerateArguments {
    /// Directory of the new dataset
    out: PathBuf,
    /// Shape of a real graph: papers100m, mag240m, friendster, igb or freebase86m
    #[arg(long)]
    preset: Option<String>,
    /// Share of the preset's nodes; 1 is the whole graph, tens to hundreds of GiB
    #[arg(long, requires = "preset")]
    scale: Option<f64>,
    /// Number of nodes
    #[arg(long)]
    nodes: Option<u64>,
    /// Mean in-degree
    #[arg(long)]
    degree: Option<f64>,
    /// Features per node
    #[arg(long)]
    dim: Option<u64>,
    /// Type of stored features: f32, f16, bf16, u8 or i8
    #[arg(long)]
    dtype: Option<Dtype>,
    /// Number of classes
    #[arg(long)]
    classes: Option<u64>,
    /// Share of edges inside a class
    #[arg(long)]
    homophily: Option<f64>,
    /// Distance of class centroids, against noise of deviation 1
    #[arg(long)]
    signal: Option<f64>,
    /// Share of labels that are random
    #[arg(long)]
    label_noise: Option<f64>,
    /// How skewed popularity is: EXPONENT,PLATEAU,HUBS (see docs/generate.md)
    #[arg(long, value_parser = popularity, value_name = "E,P,H")]
    popularity: Option<Popularity>,
    /// Number of relations (freebase86m)
    #[arg(long)]
    relations: Option<u64>,
    /// Share of edges that follow no rule (freebase86m)
    #[arg(long)]
    noise: Option<f64>,
    /// Share of training nodes
    #[arg(long)]
    train: Option<f64>,
    /// Share of validation nodes; of held-out edges (freebase86m)
    #[arg(long)]
    valid: Option<f64>,
    /// Share of test nodes; of held-out edges (freebase86m)
    #[arg(long)]
    test: Option<f64>,
    /// Add the reverse of every edge
    #[arg(long)]
    undirected: bool,
    /// Store out-neighbours too, for --direction outgoing and both
    #[arg(long)]
    out_neighbours: bool,
    /// Random seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    pub common: Common,
}

/// Flags of every verb that makes a dataset.
#[derive(clap::Args, Default)]
pub struct Common {
    /// Memory limit, as in 512MiB; default: four fifths of the available memory
    #[arg(long)]
    pub memory: Option<ByteCount>,
    /// Number of threads; default: all cores
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
    /// Replace an existing dataset
    #[arg(long)]
    pub overwrite: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

impl Common {
    /// Sets up threads, makes the dataset, shows it and the memory it took.
    pub fn make(
        &self,
        out: &std::path::Path,
        make: impl FnOnce(&ImportJob) -> esker_import::Result<esker_store::Manifest>,
    ) -> anyhow::Result<ExitCode> {
        if let Some(threads) = self.threads {
            rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build_global()?;
        }
        // Work is resumable at any moment, so stopping needs no ceremony; a word of comfort all the same.
        let _ = ctrlc::set_handler(|| {
            if std::io::stderr().is_terminal() {
                crate::note!("\ninterrupted; the same command continues where it stopped");
            }
            std::process::exit(130)
        });
        let started = Instant::now();
        let budget = Budget::within_machine(self.memory).map_err(usage)?;
        let progress = Shown::new();
        make(&ImportJob { target: out, overwrite: self.overwrite, budget, progress: &progress })?;
        let dataset = Dataset::open(out)?;
        let notes = progress.notes();
        let (seconds, peak) = (started.elapsed().as_secs_f64(), peak_resident_bytes());
        if self.json {
            let mut value = crate::info::as_json(&dataset)?;
            value["notes"] = notes.into();
            value["seconds"] = seconds.into();
            value["peak_host_bytes"] = peak.into();
            value["budget_host_bytes"] = budget.host_bytes.into();
            return print_json(&value);
        }
        let promised = ByteCount(budget.host_bytes);
        print(&format!(
            "{}made in {seconds:.1} s; peak memory {} of {promised}\n",
            crate::info::as_text(&dataset)?,
            ByteCount(peak)
        ))
    }
}

impl GenerateArguments {
    /// The knowledge graph that is asked for, if one is.
    fn facts(&self) -> anyhow::Result<Option<FactShape>> {
        let of_facts = [("--relations", self.relations.is_some()), ("--noise", self.noise.is_some())];
        let of_others = [
            ("--dim", self.dim.is_some()),
            ("--dtype", self.dtype.is_some()),
            ("--classes", self.classes.is_some()),
            ("--homophily", self.homophily.is_some()),
            ("--signal", self.signal.is_some()),
            ("--label-noise", self.label_noise.is_some()),
            ("--train", self.train.is_some()),
            ("--undirected", self.undirected),
        ];
        let is_facts = self.preset.as_deref() == Some(FactShape::PRESET);
        let idle = if is_facts { &of_others[..] } else { &of_facts[..] };
        if let Some((flag, _)) = idle.iter().find(|(_, given)| *given) {
            return Err(usage(match is_facts {
                true => format!("--preset {} does not read {flag}", FactShape::PRESET),
                false => format!("{flag} needs --preset {}", FactShape::PRESET),
            }));
        }
        if !is_facts {
            return Ok(None);
        }
        let whole = ByteCount(FactShape::freebase86m(1.0).estimated_bytes());
        let base = FactShape::freebase86m(self.scale_of(FactShape::PRESET, whole)?);
        Ok(Some(FactShape {
            nodes: self.nodes.unwrap_or(base.nodes),
            degree: self.degree.unwrap_or(base.degree),
            relations: self.relations.unwrap_or(base.relations),
            noise: self.noise.unwrap_or(base.noise),
            popularity: self.popularity.unwrap_or(base.popularity),
            valid: self.valid.unwrap_or(base.valid),
            test: self.test.unwrap_or(base.test),
            out_neighbours: self.out_neighbours,
            seed: self.seed,
            ..base
        }))
    }

    /// The scale of a preset, which takes `whole` in full.
    fn scale_of(&self, name: &str, whole: ByteCount) -> anyhow::Result<f64> {
        let scale = self.scale.filter(|scale| *scale > 0.0 && *scale <= 100.0);
        scale.ok_or_else(|| {
            usage(format!("--preset {name} needs --scale S, as in 0.01; 1 is the whole graph, {whole}"))
        })
    }

    /// The shape as asked for: the preset, or a middling default, with single flags on top.
    fn shape(&self) -> anyhow::Result<GraphShape> {
        let base = match &self.preset {
            Some(name) => {
                let names = PRESETS.iter().map(|preset| preset.name).chain([FactShape::PRESET]);
                let names: Vec<_> = names.collect();
                let preset = Preset::by_name(name).ok_or_else(|| {
                    usage(format!("`{name}` is not a preset; use one of {}", names.join(", ")))
                })?;
                let whole = ByteCount(preset.shape(1.0).estimated_bytes());
                preset.shape(self.scale_of(name, whole)?)
            }
            None => {
                let nodes = self.nodes.ok_or_else(|| usage("give --preset NAME --scale S, or --nodes N"))?;
                GraphShape::plain(nodes)
            }
        };
        // A preset scaled far down has fewer nodes than classes.
        let nodes = self.nodes.unwrap_or(base.nodes);
        let classes = self.classes.unwrap_or(base.classes.min((nodes / 16).max(1)));
        Ok(GraphShape {
            nodes,
            classes,
            degree: self.degree.unwrap_or(base.degree),
            dim: self.dim.unwrap_or(base.dim),
            dtype: self.dtype.unwrap_or(base.dtype),
            homophily: self.homophily.unwrap_or(base.homophily),
            signal: self.signal.unwrap_or(base.signal),
            label_noise: self.label_noise.unwrap_or(base.label_noise),
            popularity: self.popularity.unwrap_or(base.popularity),
            train: self.train.unwrap_or(base.train),
            valid: self.valid.unwrap_or(base.valid),
            test: self.test.unwrap_or(base.test),
            undirected: self.undirected,
            out_neighbours: self.out_neighbours,
            seed: self.seed,
            ..base
        })
    }
}

fn popularity(word: &str) -> Result<Popularity, String> {
    let numbers: Option<Vec<f64>> = word.split(',').map(|number| number.trim().parse().ok()).collect();
    match numbers.as_deref() {
        Some(&[exponent, plateau, hubs])
            if exponent > 1.0
                && exponent < 10.0
                && plateau > 0.0
                && plateau <= 1.0
                && (0.0..=1.0).contains(&hubs) =>
        {
            Ok(Popularity { exponent, plateau, hubs })
        }
        _ => Err(format!(
            "`{word}`: three numbers: exponent above 1, plateau above 0, hubs from 0 to 1, as in 2.4,0.02,0.02"
        )),
    }
}

pub fn run(arguments: &GenerateArguments) -> anyhow::Result<ExitCode> {
    if let Some(shape) = arguments.facts()? {
        let make = |job: &ImportJob| esker_import::generate::generate_facts(&shape, job);
        return arguments.common.make(&arguments.out, make);
    }
    let shape = arguments.shape()?;
    arguments.common.make(&arguments.out, |job| esker_import::generate::generate(&shape, job))
}
