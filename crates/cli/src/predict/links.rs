//! Predictions of runs with `--task link`: rows of nodes and relations, scores of given edges, the best candidates.

use super::writer::{Background, PredictionContent, Writer};
use super::{ENDINGS, PredictArguments};
use crate::device::WithBackend;
use crate::exit::usage;
use crate::output::{TextTable, print, print_json};
use crate::train::stop_on_interrupt;
use anyhow::Context;
use esker_nn::LinkMath;
use esker_sample::Edge;
use esker_sample::negatives::Side;
use esker_store::{Dataset, Names, file};
use esker_train::link::{LinkModel, ScoredNode, with_link_model};
use esker_train::{OpenRun, RunConfig, RunControl, RunDirectory, TrainError};
use esker_types::{NodeId, grouped};
use serde_json::json;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What is predicted of links.
#[derive(clap::Args)]
pub struct LinkArguments {
    /// Links: score the edges of this file: source, relation and target by name (or number) on each line, separated by
    /// tabs; without relations, source and target
    #[arg(long, help_heading = "Links")]
    edges: Option<PathBuf>,
    /// Links: write the rows of relations instead of nodes
    #[arg(long, help_heading = "Links")]
    relations: bool,
    /// Links: print the best targets of this source
    #[arg(long, help_heading = "Links", conflicts_with = "target")]
    source: Option<String>,
    /// Links: print the best sources of this target
    #[arg(long, help_heading = "Links")]
    target: Option<String>,
    /// Links: the relation for --source or --target
    #[arg(long, help_heading = "Links")]
    relation: Option<String>,
    /// Links: how many of the best are printed
    #[arg(long, default_value_t = 10, help_heading = "Links")]
    top: usize,
}

impl LinkArguments {
    /// Fails if something of links is asked of a run that has none.
    pub fn check_none(&self) -> anyhow::Result<()> {
        let given = [
            ("--edges", self.edges.is_some()),
            ("--relations", self.relations),
            ("--source", self.source.is_some()),
            ("--target", self.target.is_some()),
            ("--relation", self.relation.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(usage(format!("{flag} is for runs with --task link"))),
            None => Ok(()),
        }
    }
}

/// Nodes or relations by name, or by number if they have none.
struct Dictionary {
    what: &'static str,
    names: Option<Names>,
    count: u64,
}

impl Dictionary {
    fn nodes(dataset: &Dataset) -> Dictionary {
        let count = dataset.manifest().nodes.count;
        Dictionary { what: "node", names: Names::open(dataset, file::NODE_NAMES), count }
    }

    fn relations(dataset: &Dataset) -> Dictionary {
        let count = dataset.manifest().edges.relations.as_ref().map_or(1, |relations| relations.count);
        Dictionary { what: "relation", names: Names::open(dataset, file::RELATION_NAMES), count }
    }

    /// The numbers of some names.
    fn find(&self, wanted: &[&str]) -> anyhow::Result<Vec<u64>> {
        let found: Vec<Option<u64>> = match &self.names {
            Some(names) => names.find(wanted)?,
            None => wanted.iter().map(|word| word.parse().ok().filter(|id| *id < self.count)).collect(),
        };
        let known = || match self.names {
            Some(_) => format!("the dataset knows {} by name", grouped(self.count)),
            None => format!("they have numbers from 0 to {}", self.count.saturating_sub(1)),
        };
        let what = self.what;
        wanted
            .iter()
            .zip(found)
            .map(|(name, id)| id.ok_or_else(|| usage(format!("there is no {what} `{name}`; {}", known()))))
            .collect()
    }

    fn name(&self, id: u64) -> anyhow::Result<String> {
        match &self.names {
            Some(names) => Ok(names.name(id)?),
            None => Ok(id.to_string()),
        }
    }
}

/// Predicts links.
pub struct LinkPrediction<'a> {
    pub directory: RunDirectory,
    pub arguments: &'a PredictArguments,
}

impl WithBackend for LinkPrediction<'_> {
    type Output = ExitCode;

    fn run<B: LinkMath>(self, backend: B, config: RunConfig) -> anyhow::Result<ExitCode> {
        let links = &self.arguments.links;
        if self.arguments.layer.is_some() {
            return Err(usage(
                "--layer is for runs with --task node; rows of links are the encoder's output",
            ));
        }
        let dataset = Dataset::open(&config.dataset)?;
        let stop = stop_on_interrupt("stopping; press again to stop at once");
        let control = RunControl { stop, ..RunControl::default() };
        let edges = match &links.edges {
            Some(path) => Some(read_edges(&dataset, path)?),
            None => None,
        };
        let query = self.query(&dataset)?;
        let mut run = OpenRun::load_watched(backend, &self.directory, config, control)?;
        let mode = run.config.final_eval;
        match (edges, query) {
            (Some(edges), None) => {
                let scores = with_link_model(&mut run, mode, |model| model.scores(&edges))?;
                self.write_scores(&dataset, &edges, &scores)
            }
            (None, Some((known, relation, side))) => {
                let best =
                    with_link_model(&mut run, mode, |model| model.best(known, relation, side, links.top))?;
                self.print_best(&dataset, &best)
            }
            (None, None) => {
                let out = self.arguments.file(&ENDINGS)?;
                let written = with_link_model(&mut run, mode, |model| self.write_rows(model, out))?;
                let what = if links.relations { "relations" } else { "nodes" };
                match self.arguments.json {
                    true => print_json(&json!({ "out": out, what: written, "mode": mode })),
                    false => print(&format!("{}: {} {what}\n", out.display(), grouped(written))),
                }
            }
            (Some(_), Some(_)) => Err(usage("--edges and --source or --target: give one of them")),
        }
    }
}

impl LinkPrediction<'_> {
    /// The query that is asked for, if any.
    fn query(&self, dataset: &Dataset) -> anyhow::Result<Option<(NodeId, u32, Side)>> {
        let links = &self.arguments.links;
        let (name, side) = match (&links.source, &links.target) {
            (Some(name), _) => (name, Side::Target),
            (None, Some(name)) => (name, Side::Source),
            (None, None) => return Ok(None),
        };
        let relations = Dictionary::relations(dataset);
        let relation = match &links.relation {
            Some(relation) => relations.find(&[relation])?[0],
            None if relations.count > 1 => return Err(usage("give the relation with --relation NAME")),
            None => 0,
        };
        let node = Dictionary::nodes(dataset).find(&[name])?[0];
        Ok(Some((NodeId(node), relation as u32, side)))
    }

    fn print_best(&self, dataset: &Dataset, best: &[ScoredNode]) -> anyhow::Result<ExitCode> {
        let nodes = Dictionary::nodes(dataset);
        let named: Vec<(String, f32)> = best
            .iter()
            .map(|found| Ok((nodes.name(found.node.0)?, found.score)))
            .collect::<anyhow::Result<_>>()?;
        if self.arguments.json {
            let one = |(name, score): &(String, f32)| json!({ "node": name, "score": score });
            return print_json(&json!({ "best": named.iter().map(one).collect::<Vec<_>>() }));
        }
        let mut table = TextTable::new();
        named.iter().for_each(|(name, score)| table.row(name, format!("{score:.4}")));
        print(&table.render())
    }

    /// Writes edges by name with their scores, or scores alone.
    fn write_scores(&self, dataset: &Dataset, edges: &[Edge], scores: &[f32]) -> anyhow::Result<ExitCode> {
        let out = self.arguments.file(&["tsv", "npy"])?;
        if out.extension().is_some_and(|ending| ending == "npy") {
            let content = PredictionContent { value: "score", columns: 1, has_class: false };
            let mut writer = Writer::create(out, content, edges.len() as u64)?;
            let numbers: Vec<NodeId> = (0..edges.len() as u64).map(NodeId).collect();
            writer.write(&numbers, &[], scores).map_err(TrainError::io(out))?;
            writer.finish().map_err(TrainError::io(out))?;
        } else {
            let (nodes, relations) = (Dictionary::nodes(dataset), Dictionary::relations(dataset));
            let partial = out.with_extension("tsv.partial");
            let file = std::fs::File::create(&partial).map_err(TrainError::io(&partial))?;
            let mut file = std::io::BufWriter::new(file);
            for (edge, score) in edges.iter().zip(scores) {
                let (source, target) = (nodes.name(edge.source.0)?, nodes.name(edge.target.0)?);
                let relation = relations.name(edge.relation as u64)?;
                writeln!(file, "{source}\t{relation}\t{target}\t{score}").map_err(TrainError::io(out))?;
            }
            let file = file.into_inner().map_err(|error| TrainError::io(out)(error.into_error()))?;
            file.sync_all().map_err(TrainError::io(out))?;
            std::fs::rename(&partial, out).map_err(TrainError::io(out))?;
        }
        match self.arguments.json {
            true => print_json(&json!({ "out": out, "edges": edges.len() })),
            false => print(&format!("{}: {} edges\n", out.display(), grouped(edges.len() as u64))),
        }
    }

    /// Writes the rows of nodes or relations. Returns how many.
    fn write_rows<B: LinkMath>(&self, model: &LinkModel<'_, B>, out: &Path) -> anyhow::Result<u64> {
        let relations = self.arguments.links.relations;
        let (rows, columns) = match relations {
            true => {
                model.relation_shape().ok_or_else(|| usage("the decoder dot has no rows of relations"))?
            }
            false => (model.nodes(), model.columns()),
        };
        let content = PredictionContent { value: "embedding", columns, has_class: false };
        let mut writer = Background::start(Writer::create(out, content, rows as u64)?)?;
        let mut write =
            |ids: &[NodeId], values: &[f32]| writer.write(ids, &[], values).map_err(TrainError::io(out));
        match relations {
            true => model.each_relation(&mut write)?,
            false => model.each_node(&mut write)?,
        }
        writer.finish()?;
        Ok(rows as u64)
    }
}

/// The edges of a file, by name.
fn read_edges(dataset: &Dataset, path: &Path) -> anyhow::Result<Vec<Edge>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let mut rows = Vec::new();
    for (line, words) in (1..).zip(text.lines()).filter(|(_, text)| !text.is_empty()) {
        let words: Vec<&str> = words.split('\t').collect();
        let row = match words[..] {
            [source, relation, target] => (source, Some(relation), target),
            [source, target] => (source, None, target),
            _ => {
                let found = words.len();
                return Err(usage(format!(
                    "{}: line {line} has {found} words; write source, relation and target, separated by tabs",
                    path.display()
                )));
            }
        };
        rows.push(row);
    }
    let all = |words: &mut dyn Iterator<Item = &str>, of: &Dictionary| -> anyhow::Result<_> {
        let distinct: Vec<&str> = words.collect::<BTreeSet<&str>>().into_iter().collect();
        let found = of.find(&distinct).with_context(|| path.display().to_string())?;
        Ok(distinct.into_iter().map(str::to_string).zip(found).collect::<std::collections::HashMap<_, _>>())
    };
    let nodes = all(
        &mut rows.iter().flat_map(|(source, _, target)| [*source, *target]),
        &Dictionary::nodes(dataset),
    )?;
    let relations =
        all(&mut rows.iter().filter_map(|(_, relation, _)| *relation), &Dictionary::relations(dataset))?;
    let edge = |(source, relation, target): &(&str, Option<&str>, &str)| Edge {
        source: NodeId(nodes[*source]),
        target: NodeId(nodes[*target]),
        relation: relation.map_or(0, |relation| relations[relation] as u32),
    };
    Ok(rows.iter().map(edge).collect())
}
