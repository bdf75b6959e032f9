//! Predictions of runs with `--task link`: rows of nodes and relations, scores of given edges, the best candidates.

use super::background::Background;
use super::writer::{PredictionContent, Writer};
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
use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader, BufWriter, Lines, Write};
use std::iter::Enumerate;
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

/// Endings of files for the scores of edges.
const SCORE_ENDINGS: [&str; 2] = ["tsv", "npy"];
/// Edges of a file that are read and scored at a time. Their names are found in one pass over all names.
const PIECE_EDGES: usize = 1 << 16;

/// Source, relation and target of an edge, as written.
type EdgeWords<'a> = (&'a str, Option<&'a str>, &'a str);

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
        self.check_out()?;
        let dataset = Dataset::open(&config.dataset)?;
        let stop = stop_on_interrupt("stopping; press again to stop at once");
        let control = RunControl { stop, ..RunControl::default() };
        // The first piece is read before the model is: most mistakes are found in it.
        let edges = match &links.edges {
            Some(path) => Some(EdgeFile::open(&dataset, path)?.with_first()?),
            None => None,
        };
        if let Some((edges, _)) = edges.as_ref().filter(|_| self.writes_count()) {
            edges.check_countable()?;
        }
        let query = self.query(&dataset)?;
        let mut run = OpenRun::load_watched(backend, &self.directory, config, control)?;
        let mode = run.config.final_eval;
        match (edges, query) {
            (Some((edges, first)), None) => {
                let out = self.arguments.file(&SCORE_ENDINGS)?;
                let written =
                    with_link_model(&mut run, mode, |model| write_scores(model, edges, first, out))?;
                match self.arguments.json {
                    true => print_json(&json!({ "out": out, "edges": written })),
                    false => print(&format!("{}: {} edges\n", out.display(), grouped(written))),
                }
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
    /// Refuses a file that cannot be written, before anything is computed.
    fn check_out(&self) -> anyhow::Result<()> {
        let links = &self.arguments.links;
        match (&links.edges, &links.source, &links.target) {
            (Some(_), _, _) => self.arguments.file(&SCORE_ENDINGS).map(|_| ()),
            (None, None, None) => self.arguments.file(&ENDINGS).map(|_| ()),
            _ => Ok(()),
        }
    }

    /// Whether the file to write begins with the number of its scores.
    fn writes_count(&self) -> bool {
        self.arguments.out.as_deref().is_some_and(begins_with_count)
    }

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
        let mut writer = Background::start(Writer::create(out, content, rows as u64)?, 0)?;
        let mut copy = Vec::new();
        let mut write = |ids: &[NodeId], values: &[f32]| {
            copy.clear();
            copy.extend_from_slice(values);
            writer.write(ids, &[], &mut copy).map_err(TrainError::io(out))
        };
        match relations {
            true => model.each_relation(&mut write)?,
            false => model.each_node(&mut write)?,
        }
        writer.finish()?;
        Ok(rows as u64)
    }
}

/// Writes edges by name with their scores, or scores alone. Returns how many.
fn write_scores<B: LinkMath>(
    model: &LinkModel<'_, B>,
    edges: EdgeFile<'_>,
    first: Vec<Edge>,
    out: &Path,
) -> anyhow::Result<u64> {
    if begins_with_count(out) {
        let content = PredictionContent { value: "score", columns: 1, has_class: false };
        let count = edges.count(&first)?;
        let mut writer = Background::start(Writer::create(out, content, count)?, 0)?;
        let mut written = 0;
        edges.for_each_piece(first, |edges| {
            let mut scores = model.scores(edges)?;
            let numbers: Vec<NodeId> = (written..written + edges.len() as u64).map(NodeId).collect();
            written += edges.len() as u64;
            match written > count {
                true => Err(changed(out, count)),
                false => Ok(writer.write(&numbers, &[], &mut scores).map_err(TrainError::io(out))?),
            }
        })?;
        if written != count {
            return Err(changed(out, count));
        }
        writer.finish().map_err(TrainError::io(out))?;
        return Ok(written);
    }
    let (nodes, relations) = (Dictionary::nodes(edges.dataset), Dictionary::relations(edges.dataset));
    let partial = out.with_extension("tsv.partial");
    let file = std::fs::File::create(&partial).map_err(TrainError::io(&partial))?;
    let (mut file, mut written) = (BufWriter::new(file), 0);
    edges.for_each_piece(first, |edges| {
        for (edge, score) in edges.iter().zip(model.scores(edges)?) {
            let (source, target) = (nodes.name(edge.source.0)?, nodes.name(edge.target.0)?);
            let relation = relations.name(edge.relation as u64)?;
            writeln!(file, "{source}\t{relation}\t{target}\t{score}").map_err(TrainError::io(out))?;
        }
        written += edges.len() as u64;
        Ok(())
    })?;
    let file = file.into_inner().map_err(|error| TrainError::io(out)(error.into_error()))?;
    file.sync_all().map_err(TrainError::io(out))?;
    std::fs::rename(&partial, out).map_err(TrainError::io(out))?;
    Ok(written)
}

fn begins_with_count(out: &Path) -> bool {
    out.extension().is_some_and(|ending| ending == "npy")
}

fn changed(out: &Path, count: u64) -> anyhow::Error {
    usage(format!(
        "--edges changed while it was read: it had {} edges at first; write scores as .tsv, not as {}",
        grouped(count),
        out.display()
    ))
}

/// A file of edges by name, read some at a time.
struct EdgeFile<'a> {
    dataset: &'a Dataset,
    path: &'a Path,
    lines: Enumerate<Lines<BufReader<std::fs::File>>>,
    relations: u64,
    /// Whether it can be read again from the start, which a pipe cannot.
    can_repeat: bool,
    /// Whether all of it was read.
    has_ended: bool,
}

impl<'a> EdgeFile<'a> {
    fn open(dataset: &'a Dataset, path: &'a Path) -> anyhow::Result<EdgeFile<'a>> {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        let relations = Dictionary::relations(dataset).count;
        let can_repeat = file.metadata().with_context(|| path.display().to_string())?.is_file();
        let lines = BufReader::new(file).lines().enumerate();
        Ok(EdgeFile { dataset, path, lines, relations, can_repeat, has_ended: false })
    }

    /// Fails if edges are left of a file that cannot be read twice.
    fn check_countable(&self) -> anyhow::Result<()> {
        match self.has_ended || self.can_repeat {
            true => Ok(()),
            false => Err(usage(format!(
                "{}: npy begins with the number of scores, and a pipe of {} edges or more would have to be read twice; write scores as .tsv, or give a file",
                self.path.display(),
                grouped(PIECE_EDGES as u64)
            ))),
        }
    }

    /// The number of all edges. If `first` are not all of them, they are read again from the start.
    fn count(&self, first: &[Edge]) -> anyhow::Result<u64> {
        if self.has_ended {
            return Ok(first.len() as u64);
        }
        self.check_countable()?;
        let again = EdgeFile::open(self.dataset, self.path)?;
        let mut count = 0;
        for (_, line) in again.lines {
            count += u64::from(!line.with_context(|| self.path.display().to_string())?.is_empty());
        }
        Ok(count)
    }

    fn with_first(mut self) -> anyhow::Result<(EdgeFile<'a>, Vec<Edge>)> {
        let first = self.next_piece()?;
        Ok((self, first))
    }

    /// Passes `first` and all edges after it to `take`.
    fn for_each_piece(
        mut self,
        first: Vec<Edge>,
        mut take: impl FnMut(&[Edge]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut edges = first;
        while !edges.is_empty() {
            take(&edges)?;
            edges = self.next_piece()?;
        }
        Ok(())
    }

    /// The next edges; none at the end.
    fn next_piece(&mut self) -> anyhow::Result<Vec<Edge>> {
        let mut lines = Vec::new();
        while lines.len() < PIECE_EDGES {
            let Some((at, line)) = self.lines.next() else {
                self.has_ended = true;
                break;
            };
            let line = line.with_context(|| self.path.display().to_string())?;
            if !line.is_empty() {
                lines.push((at + 1, line));
            }
        }
        let rows: Vec<_> =
            lines.iter().map(|(line, text)| self.words(*line, text)).collect::<anyhow::Result<_>>()?;
        let numbers = |words: BTreeSet<&'_ str>, of: &Dictionary| -> anyhow::Result<HashMap<String, u64>> {
            let distinct: Vec<&str> = words.into_iter().collect();
            let found = match distinct.is_empty() {
                true => Vec::new(),
                false => of.find(&distinct).with_context(|| self.path.display().to_string())?,
            };
            Ok(distinct.into_iter().map(str::to_string).zip(found).collect())
        };
        let ends = rows.iter().flat_map(|(source, _, target)| [*source, *target]).collect();
        let nodes = numbers(ends, &Dictionary::nodes(self.dataset))?;
        let named = rows.iter().filter_map(|(_, relation, _)| *relation).collect();
        let relations = numbers(named, &Dictionary::relations(self.dataset))?;
        let edge = |(source, relation, target): &EdgeWords<'_>| Edge {
            source: NodeId(nodes[*source]),
            target: NodeId(nodes[*target]),
            relation: relation.map_or(0, |relation| relations[relation] as u32),
        };
        Ok(rows.iter().map(edge).collect())
    }

    fn words<'t>(&self, line: usize, text: &'t str) -> anyhow::Result<EdgeWords<'t>> {
        let (path, words): (_, Vec<&str>) = (self.path.display(), text.split('\t').collect());
        let remedy = "write source, relation and target, separated by tabs";
        match words[..] {
            [source, relation, target] => Ok((source, Some(relation), target)),
            [source, target] if self.relations <= 1 => Ok((source, None, target)),
            [_, _] => Err(usage(format!(
                "{path}: line {line} has no relation, and the dataset has {}; {remedy}",
                grouped(self.relations)
            ))),
            _ => Err(usage(format!("{path}: line {line} has {} words; {remedy}", words.len()))),
        }
    }
}
