//! DGL GraphBolt's `metadata.yaml`, before its own preprocessing: one node type, one edge type, a feature called
//! `feat`, and a node classification task. Paths are relative to the yaml.

use super::Format;
use crate::delimited::{Dialect, EdgeLayout, TextEdges};
use crate::npy::{NpyArray, NpyEdges, NpyElements, NpyIds, NpyRows, Scalar};
use crate::source::{
    CHUNK, DenseRows, EdgeSource, IdSource, IdsInMemory, ImportSource, LabelKind, NodeLabels, RowSource,
    Splits, Treatment,
};
use crate::{ImportWorkspace, Location, Request, Result, input};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Far more than any description needs.
const YAML_BYTES: u64 = 1 << 20;

/// The format.
pub struct GraphBolt;

#[derive(Deserialize)]
struct Metadata {
    graph: Option<Graph>,
    graph_topology: Option<serde::de::IgnoredAny>,
    #[serde(default)]
    feature_data: Option<Vec<Feature>>,
    #[serde(default)]
    tasks: Option<Vec<GraphboltTask>>,
}

#[derive(Deserialize)]
struct Graph {
    nodes: Vec<Nodes>,
    edges: Vec<Edges>,
}

#[derive(Deserialize)]
struct Nodes {
    r#type: Option<String>,
    num: u64,
}

#[derive(Deserialize)]
struct Edges {
    r#type: Option<String>,
    format: String,
    path: PathBuf,
}

#[derive(Deserialize)]
struct Feature {
    domain: Option<String>,
    name: String,
    format: String,
    path: PathBuf,
}

#[derive(Deserialize)]
struct GraphboltTask {
    name: Option<String>,
    #[serde(default)]
    train_set: Option<Vec<Set>>,
    #[serde(default)]
    validation_set: Option<Vec<Set>>,
    #[serde(default)]
    test_set: Option<Vec<Set>>,
}

#[derive(Deserialize)]
struct Set {
    r#type: Option<String>,
    data: Vec<Datum>,
}

#[derive(Deserialize)]
struct Datum {
    name: Option<String>,
    format: String,
    path: PathBuf,
}

impl Format for GraphBolt {
    fn name(&self) -> &'static str {
        "graphbolt"
    }

    fn about(&self) -> &'static str {
        "a GraphBolt dataset: --from its directory or metadata.yaml; --name chooses among several tasks"
    }

    fn flags(&self) -> Vec<&'static str> {
        vec!["from", "name"]
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let description = Description::read(request)?;
        let mut inputs = vec![description.yaml.clone(), description.edges.1.clone()];
        inputs.extend(description.features.clone());
        for set in description.sets.iter().flatten() {
            inputs.extend([Some(set.seeds.clone()), set.labels.clone()].into_iter().flatten());
        }
        let need = "metadata.yaml names it";
        inputs.iter().map(|path| input::existing(path, need)).collect()
    }

    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let description = Description::read(request)?;
        for name in &description.ignored {
            workspace.progress.note(&format!("metadata.yaml: {name} is not imported"));
        }
        let nodes = description.nodes;
        let features = description.features.as_deref().map(NpyArray::open).transpose()?;
        if let Some(features) = features.as_ref().filter(|features| features.shape().first() != Some(&nodes))
        {
            let found = format!("shape {:?}", features.shape());
            return Err(features
                .location()
                .bad(format!("{nodes} feature rows, as metadata.yaml says"), found));
        }
        let features = features.map(NpyRows::new).transpose()?;
        let labels = assemble_labels(&description, request, workspace)?;
        Ok(ImportSource {
            nodes: Some(nodes),
            edges: description.open_edges()?,
            features: features.map(|rows| Box::new(rows) as Box<dyn RowSource>),
            labels,
            splits: description.open_splits()?,
            usual: Treatment::AS_STORED,
            node_names: None,
            relation_names: Vec::new(),
            class_names: Vec::new(),
        })
    }
}

/// The parts of a `metadata.yaml` that are imported, with paths that can be opened.
struct Description {
    yaml: PathBuf,
    nodes: u64,
    edges: (String, PathBuf),
    features: Option<PathBuf>,
    /// Train, validation and test.
    sets: [Option<SeedSet>; 3],
    ignored: Vec<String>,
}

struct SeedSet {
    seeds: PathBuf,
    labels: Option<PathBuf>,
}

/// Parses the text of a `metadata.yaml` at path `yaml`, without opening any file it names.
pub fn check_metadata(yaml: &Path, text: &[u8]) -> Result<()> {
    Description::parse(yaml, text, &Request::default()).map(|_| ())
}

impl Description {
    fn read(request: &Request) -> Result<Description> {
        let from = request.need(&request.from, "--from DIR or metadata.yaml")?;
        let yaml = if from.is_dir() { from.join("metadata.yaml") } else { from.to_path_buf() };
        let yaml = input::existing(&yaml, "a GraphBolt dataset is described by its metadata.yaml")?;
        Description::parse(&yaml, &input::read_whole(&yaml, YAML_BYTES)?, request)
    }

    fn parse(yaml: &Path, text: &[u8], request: &Request) -> Result<Description> {
        let metadata: Metadata = serde_saphyr::from_slice(text)
            .map_err(|error| Location::file(yaml).bad("a GraphBolt metadata.yaml", error))?;
        let graph = metadata.graph.ok_or_else(|| {
            let found = match metadata.graph_topology {
                Some(_) => "`graph_topology`: what preprocessing wrote; give the original metadata.yaml",
                None => "none",
            };
            Location::file(yaml).bad("a `graph`", found)
        })?;
        let base = yaml.parent().unwrap_or(Path::new("."));
        let nodes = one(yaml, "node type", &graph.nodes, |nodes| nodes.r#type.as_deref())?;
        let edges = one(yaml, "edge type", &graph.edges, |edges| edges.r#type.as_deref())?;
        if !["csv", "numpy"].contains(&edges.format.as_str()) {
            return Err(Location::at(yaml, "graph.edges").bad("format csv or numpy", &edges.format));
        }
        let mut ignored = Vec::new();
        let mut features = None;
        for feature in metadata.feature_data.unwrap_or_default() {
            let domain = feature.domain.as_deref().unwrap_or("node");
            if domain == "node" && feature.name == "feat" && features.is_none() {
                need_numpy(yaml, &feature.format, "feature_data feat")?;
                features = Some(base.join(&feature.path));
            } else {
                ignored.push(format!("{domain} feature `{}`", feature.name));
            }
        }
        let sets = match choose_task(yaml, metadata.tasks.unwrap_or_default(), request.name.as_deref())? {
            None => [None, None, None],
            Some(task) => {
                let set =
                    |sets: Option<Vec<Set>>, name: &str| read_set(yaml, base, sets.unwrap_or_default(), name);
                [
                    set(task.train_set, "train_set")?,
                    set(task.validation_set, "validation_set")?,
                    set(task.test_set, "test_set")?,
                ]
            }
        };
        let edges = (edges.format.clone(), base.join(&edges.path));
        Ok(Description { yaml: yaml.to_path_buf(), nodes: nodes.num, edges, features, sets, ignored })
    }

    fn open_edges(&self) -> Result<Box<dyn EdgeSource>> {
        let (format, path) = &self.edges;
        if format == "numpy" {
            return Ok(Box::new(NpyEdges::new(NpyArray::open(path)?, false)?));
        }
        Ok(Box::new(TextEdges {
            path: path.clone(),
            dialect: Dialect { delimiter: b',', header: false },
            layout: EdgeLayout::ENDS,
            relations: None,
            count: None,
        }))
    }

    fn open_splits(&self) -> Result<Splits> {
        if self.sets.iter().all(Option::is_none) {
            return Ok(Splits::None);
        }
        let open = |set: &Option<SeedSet>| -> Result<Box<dyn IdSource>> {
            match set {
                None => Ok(IdsInMemory::boxed(&self.yaml, Vec::new())),
                Some(set) => Ok(Box::new(NpyIds::new(open_seeds(&set.seeds)?)?)),
            }
        };
        let [train, valid, test] = &self.sets;
        Ok(Splits::Nodes { train: open(train)?, valid: open(valid)?, test: open(test)? })
    }
}

/// The only element; an error if there are several.
fn one<'a, T>(yaml: &Path, what: &str, all: &'a [T], name: impl Fn(&T) -> Option<&str>) -> Result<&'a T> {
    match all {
        [one] => Ok(one),
        several => {
            let names: Vec<_> =
                several.iter().take(16).map(|thing| name(thing).unwrap_or("(no name)")).collect();
            let found = if names.is_empty() { "none".into() } else { names.join(", ") };
            Err(Location::file(yaml).bad(format!("one {what} (several are not read yet)"), found))
        }
    }
}

fn need_numpy(yaml: &Path, format: &str, key: &str) -> Result<()> {
    if format == "numpy" { Ok(()) } else { Err(Location::at(yaml, key).bad("format numpy", format)) }
}

fn choose_task(yaml: &Path, tasks: Vec<GraphboltTask>, name: Option<&str>) -> Result<Option<GraphboltTask>> {
    let Some(name) = name else { return Ok(tasks.into_iter().next()) };
    let names: Vec<_> = tasks.iter().map(|task| task.name.clone().unwrap_or_default()).collect();
    match tasks.into_iter().find(|task| task.name.as_deref() == Some(name)) {
        Some(task) => Ok(Some(task)),
        None => Err(Location::at(yaml, "tasks").bad(format!("a task `{name}`"), names.join(", "))),
    }
}

fn read_set(yaml: &Path, base: &Path, sets: Vec<Set>, key: &str) -> Result<Option<SeedSet>> {
    if sets.is_empty() {
        return Ok(None);
    }
    let set = one(yaml, &format!("node type in {key}"), &sets, |set| set.r#type.as_deref())?;
    let find = |names: &[&str]| -> Result<Option<PathBuf>> {
        let datum =
            set.data.iter().find(|datum| datum.name.as_deref().is_some_and(|name| names.contains(&name)));
        let Some(datum) = datum else { return Ok(None) };
        need_numpy(yaml, &datum.format, key)?;
        Ok(Some(base.join(&datum.path)))
    };
    // Earlier versions call the seeds `seed_nodes`.
    let seeds = find(&["seeds", "seed_nodes"])?;
    let labels = find(&["labels"])?;
    match seeds {
        Some(seeds) => Ok(Some(SeedSet { seeds, labels })),
        None => {
            let names: Vec<_> =
                set.data.iter().map(|datum| datum.name.as_deref().unwrap_or("(no name)")).collect();
            Err(Location::at(yaml, key).bad("data called seeds", names.join(", ")))
        }
    }
}

fn open_seeds(path: &Path) -> Result<NpyArray> {
    let seeds = NpyArray::open(path)?;
    if seeds.shape().len() != 1 {
        let found = format!("shape {:?} (link prediction tasks are not read yet)", seeds.shape());
        return Err(seeds.location().bad("seeds of shape (n,), node ids", found));
    }
    Ok(seeds)
}

/// Each set has labels for its seed nodes. This puts them in node order in memory, one row per node. A node in no set
/// has no label, shown by NaN.
fn assemble_labels(
    description: &Description,
    request: &Request,
    workspace: &mut ImportWorkspace,
) -> Result<Option<NodeLabels>> {
    let mut pairs = Vec::new();
    for set in description.sets.iter().flatten() {
        if let Some(labels) = &set.labels {
            pairs.push((open_seeds(&set.seeds)?, NpyArray::open(labels)?));
        }
    }
    let Some((_, first)) = pairs.first() else { return Ok(None) };
    let dim = first.shape().get(1).copied().unwrap_or(1);
    let float =
        pairs.iter().any(|(_, labels)| matches!(labels.scalar(), Scalar::F16 | Scalar::F32 | Scalar::F64));
    for (seeds, labels) in &pairs {
        if labels.shape().len() > 2 || labels.shape().get(1).copied().unwrap_or(1) != dim || dim == 0 {
            return Err(labels
                .location()
                .bad(format!("labels of {dim} columns"), format!("shape {:?}", labels.shape())));
        }
        if labels.fortran() && dim > 1 {
            return Err(labels.location().bad("a row-major matrix", "a column-major one"));
        }
        if labels.shape().first() != Some(&seeds.elements()) {
            let expected = format!("{} labels, one a seed", seeds.elements());
            return Err(labels.location().bad(expected, format!("shape {:?}", labels.shape())));
        }
    }
    let values = description.nodes.checked_mul(dim).filter(|values| *values < 1 << 60).ok_or_else(|| {
        Location::at(&description.yaml, "graph.nodes").bad("a number of nodes", description.nodes)
    })?;
    // Twice: the vector and its shared copy exist at the same time.
    workspace.hold("labels in node order", values * 8)?;
    let mut rows = vec![f32::NAN; values as usize];
    for (seeds, labels) in &pairs {
        scatter(seeds, labels, description.nodes, dim as usize, &mut rows)?;
    }
    let guess = match (dim, float) {
        (1, false) => LabelKind::Classes,
        (_, false) => LabelKind::Multilabel,
        (_, true) => LabelKind::Real,
    };
    let rows = DenseRows { path: description.yaml.clone(), dim: dim as usize, values: rows.into() };
    let kind = request.label_kind.unwrap_or(guess);
    Ok(Some(NodeLabels { kind, rows: Box::new(rows), nan_is_unlabelled: true }))
}

fn scatter(seeds: &NpyArray, labels: &NpyArray, nodes: u64, dim: usize, rows: &mut [f32]) -> Result<()> {
    let (mut ids, mut values): (NpyElements, NpyElements) = (seeds.stream(0)?, labels.stream(0)?);
    let (mut chunk, mut floats) = (Vec::new(), Vec::new());
    let (mut row, count) = (0, seeds.elements());
    let at_a_time = (CHUNK / dim).max(1) as u64;
    while row < count {
        let now = (count - row).min(at_a_time) as usize;
        chunk.clear();
        ids.ids(now, &mut chunk)?;
        floats.resize(now * dim, 0.0);
        values.floats(&mut floats)?;
        for (id, label) in chunk.iter().zip(floats.chunks_exact(dim)) {
            if *id >= nodes {
                return Err(seeds.row_location(row).bad(format!("a node id below {nodes}"), id));
            }
            let slot = &mut rows[*id as usize * dim..][..dim];
            if slot.iter().zip(label).any(|(old, new)| !old.is_nan() && old != new) {
                let expected = format!("one label for node {id}: {slot:?} was given before");
                return Err(labels.row_location(row).bad(expected, format!("{label:?}")));
            }
            slot.copy_from_slice(label);
            row += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    const YAML: &str = "\
dataset_name: tiny
graph:
  nodes:
    - num: 4
  edges:
    - format: csv
      path: edges/cites.csv
feature_data:
  - domain: node
    type: null
    name: feat
    format: numpy
    in_memory: false
    path: data/feat.npy
  - domain: node
    name: year
    format: numpy
    path: data/year.npy
tasks:
  - name: node_classification
    num_classes: 5
    train_set:
      - type: null
        data:
          - name: seeds
            format: numpy
            path: set/train.npy
          - name: labels
            format: numpy
            path: set/train_labels.npy
    validation_set:
      - data:
          - {name: seed_nodes, format: numpy, path: set/valid.npy}
          - {name: labels, format: numpy, path: set/valid_labels.npy}
";

    fn open(yaml: &str, change: impl FnOnce(&dyn Fn(&str, Vec<u8>), &mut Request)) -> Result<ImportSource> {
        let directory = tempfile::tempdir().unwrap().keep();
        let write = |name: &str, bytes: Vec<u8>| {
            let path = directory.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        };
        write("metadata.yaml", yaml.into());
        write("edges/cites.csv", b"0,1\n1,2\n".to_vec());
        write("edges/cites.npy", fixture::shaped_integers("(2, 3)", &[0, 1, 2, 1, 2, 3]));
        write("data/feat.npy", fixture::floats("(4, 1)", &[0.0, 1.0, 2.0, 3.0]));
        write("set/train.npy", fixture::integers(&[3, 1]));
        write("set/train_labels.npy", fixture::integers(&[4, 2]));
        write("set/valid.npy", fixture::integers(&[0]));
        write("set/valid_labels.npy", fixture::integers(&[1]));
        let mut request = Request { from: Some(directory.clone()), ..Request::default() };
        change(&write, &mut request);
        let result = GraphBolt.inputs(&request).and_then(|_| {
            fixture::in_workspace(|workspace| {
                let source = GraphBolt.open(&request, workspace)?;
                fixture::all_edges(&*source.edges, 0)?;
                Ok(source)
            })
        });
        std::fs::remove_dir_all(directory).unwrap();
        result
    }

    fn message(yaml: &str) -> String {
        open(yaml, |_, _| ()).err().expect("an error").to_string()
    }

    #[test]
    fn labels_are_put_in_node_order() {
        let source = open(YAML, |_, _| ()).unwrap();
        assert_eq!(source.nodes, Some(4));
        let labels = source.labels.unwrap();
        assert_eq!(labels.kind, LabelKind::Classes);
        let rows = fixture::all_rows(&*labels.rows, 0).unwrap();
        assert!(rows[0] == 1.0 && rows[1] == 2.0 && rows[2].is_nan() && rows[3] == 4.0, "{rows:?}");
    }

    #[test]
    fn edges_come_as_numpy_too() {
        let yaml = YAML.replace("format: csv", "format: numpy").replace("cites.csv", "cites.npy");
        assert_eq!(open(&yaml, |_, _| ()).unwrap().edges.count(), Some(3));
    }

    #[test]
    fn what_is_not_read_yet_is_named() {
        let several =
            YAML.replace("    - num: 4\n", "    - {type: author, num: 4}\n    - {type: paper, num: 4}\n");
        assert!(
            message(&several)
                .contains("expected one node type (several are not read yet), found author, paper")
        );
        assert!(
            message(&YAML.replace("format: csv", "format: torch"))
                .contains("expected format csv or numpy, found torch")
        );
        let preprocessed = "graph_topology: {type: FusedCSCSamplingGraph, path: x.pt}\n";
        assert!(message(preprocessed).contains("give the original metadata.yaml"));
        let links =
            open(YAML, |write, _| write("set/train.npy", fixture::shaped_integers("(1, 2)", &[0, 1])));
        assert!(links.err().unwrap().to_string().contains("link prediction tasks are not read yet"));
    }

    #[test]
    fn broken_descriptions_and_lengths_are_named() {
        assert!(message("graph: [").contains("metadata.yaml: expected a GraphBolt metadata.yaml"));
        assert!(message("a: 1").contains("expected a `graph`"));
        assert!(message(&YAML.replace("num: 4", "num: 5")).contains("feat.npy: expected 5 feature rows"));
        assert!(message(&YAML.replace("cites.csv", "sites.csv")).contains("sites.csv: not found"));
        let short = open(YAML, |write, _| write("set/train_labels.npy", fixture::integers(&[4])));
        assert!(short.err().unwrap().to_string().contains("train_labels.npy: expected 2 labels, one a seed"));
        let beyond = open(YAML, |write, _| write("set/valid.npy", fixture::integers(&[4])));
        assert!(
            beyond
                .err()
                .unwrap()
                .to_string()
                .contains("valid.npy, row 0: expected a node id below 4, found 4")
        );
        let twice = open(YAML, |write, _| write("set/valid.npy", fixture::integers(&[3])));
        assert!(twice.err().unwrap().to_string().contains("expected one label for node 3"));
    }

    #[test]
    fn tasks_go_by_name() {
        assert!(open(YAML, |_, request| request.name = Some("node_classification".into())).is_ok());
        let other = open(YAML, |_, request| request.name = Some("links".into())).err().unwrap().to_string();
        assert!(other.contains("expected a task `links`, found node_classification"), "{other}");
    }
}
