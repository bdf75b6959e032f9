//! The social networks of Rozemberczki et al. (MUSAE, FEATHER: deezer_europe, lastfm_asia, github): a folder or zip
//! with `*_edges.csv`, `*_features.json` (`{"0": [feature numbers], ...}`) and `*_target.csv`, all numbered from 0.
//! Published splits are a separate file, an npy of dictionaries. Edges stream; features and labels stay in memory.

use super::Format;
use crate::csr::check_columns;
use crate::given;
use crate::input::{self, Member};
use crate::npy::Header;
use crate::pickle;
use crate::source::{
    CHUNK, DenseRows, EdgeSource, EdgeStream, ForeignEdge, IdsInMemory, ImportSource, LabelKind, NodeLabels,
    SparseRows, Splits, Treatment,
};
use crate::{ImportError, ImportWorkspace, Location, Request, Result, SplitChoice};
use std::{
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

pub(super) struct Musae;

/// A feature number takes at least two bytes as text, and 8 (with its value) in memory.
const BYTES_PER_FEATURE_BYTE: u64 = 4;
/// Column of the class, in the various datasets.
const TARGET_COLUMNS: [&str; 4] = ["target", "ml_target", "page_type", "mature"];
/// Column of the node; Twitch's `id` is the user's, not the node's.
const NODE_COLUMNS: [&str; 2] = ["new_id", "id"];

impl Format for Musae {
    fn name(&self) -> &'static str {
        "musae"
    }
    fn about(&self) -> &'static str {
        "MUSAE networks (deezer_europe): --from DIR or ZIP [--split FILE.npy --split-index N]; made undirected"
    }
    fn flags(&self) -> Vec<&'static str> {
        super::FROM.to_vec()
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let files = MusaeFiles::find(request)?;
        let mut inputs: Vec<PathBuf> =
            [&files.edges, &files.features, &files.target].map(|text| text.path().to_path_buf()).into();
        inputs.extend(files.splits);
        inputs.extend(given::split_inputs(request)?);
        inputs.dedup();
        Ok(inputs)
    }
    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let files = MusaeFiles::find(request)?;
        let needs_bytes = files.features.bytes()?.saturating_mul(BYTES_PER_FEATURE_BYTE);
        workspace.hold("the features of every node", needs_bytes)?;
        workspace.hold("the class of every node", files.target.bytes()?.saturating_mul(2))?;
        let targets = MusaeTargets::read(&files.target)?;
        let nodes = targets.classes.len() as u64;
        let features = features(&files.features, nodes)?;
        let splits = match &files.splits {
            Some(path) if has_objects(path)? => splits(path, request.split_index, workspace)?,
            _ => given::open_named_splits(request, workspace, nodes)?.unwrap_or(Splits::None),
        };
        let rows =
            DenseRows { path: files.target.path().to_path_buf(), dim: 1, values: targets.classes.into() };
        let kind = request.label_kind.unwrap_or(LabelKind::Classes);
        Ok(ImportSource {
            nodes: Some(nodes),
            edges: Box::new(CsvEdges(files.edges)),
            features: Some(Box::new(features)),
            labels: Some(NodeLabels { kind, rows: Box::new(rows), nan_is_unlabelled: false }),
            splits,
            usual: Treatment::UNDIRECTED,
            node_names: None,
            relation_names: Vec::new(),
            class_names: targets.names,
        })
    }
}

/// A text file, or a member of a zip.
#[derive(Clone)]
enum Text {
    File(PathBuf),
    Member(PathBuf, Member),
}

impl Text {
    fn path(&self) -> &Path {
        match self {
            Text::File(path) | Text::Member(path, _) => path,
        }
    }

    fn bytes(&self) -> Result<u64> {
        match self {
            Text::File(path) => {
                Ok(std::fs::metadata(path).map_err(|error| Location::file(path).io(error))?.len())
            }
            Text::Member(_, member) => Ok(member.bytes),
        }
    }

    fn open(&self) -> Result<Box<dyn BufRead + Send>> {
        match self {
            Text::File(path) => input::open_text(path),
            Text::Member(_, member) => Ok(Box::new(BufReader::new(member.open()?))),
        }
    }

    fn location(&self) -> Location {
        match self {
            Text::File(path) => Location::file(path),
            Text::Member(_, member) => member.location(),
        }
    }

    fn row(&self, row: u64) -> Location {
        let location = self.location();
        let comma = if location.detail.is_empty() { "" } else { ", " };
        Location::at(&location.path, format!("{}{comma}row {row}", location.detail))
    }
}

struct MusaeFiles {
    edges: Text,
    features: Text,
    target: Text,
    splits: Option<PathBuf>,
}

impl MusaeFiles {
    fn find(request: &Request) -> Result<MusaeFiles> {
        let from = request.need(&request.from, "--from DIR or ZIP")?;
        let listed = if from.is_dir() { list(from)? } else { Vec::new() };
        let ending = |end: &str| listed.iter().find(|path| path.to_string_lossy().ends_with(end)).cloned();
        let splits = match &request.split {
            Some(SplitChoice::File(path)) => {
                Some(input::existing(path, "the file that --split names, an npy of dictionaries")?)
            }
            // A split to draw, or given ids: they are not in the files.
            Some(_) => None,
            None if request.train.is_some() => None,
            None => ending("-splits.npy"),
        };
        let zip = if from.is_dir() { ending(".zip") } else { Some(from.to_path_buf()) };
        let texts: Vec<(String, Text)> = match (ending("_edges.csv"), zip) {
            (None, Some(zip)) => {
                let zip = input::existing(&zip, "the zip or folder of a MUSAE network")?;
                let members = input::zip_members(&zip)?.into_iter();
                members.map(|member| (member.name.clone(), Text::Member(zip.clone(), member))).collect()
            }
            _ => listed.iter().map(|path| (path.display().to_string(), Text::File(path.clone()))).collect(),
        };
        let text = |end: &str| {
            let found = texts.iter().find(|(name, _)| name.ends_with(end));
            found.map(|(_, text)| text.clone()).ok_or_else(|| ImportError::Missing {
                path: from.join(format!("*{end}")),
                need: "MUSAE networks have *_edges.csv, *_features.json and *_target.csv",
            })
        };
        Ok(MusaeFiles {
            edges: text("_edges.csv")?,
            features: text("_features.json")?,
            target: text("_target.csv")?,
            splits,
        })
    }
}

/// The files of a folder, sorted by name, so that the choice among several does not depend on the disk.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let io = |error| Location::file(folder).io(error);
    let entries = std::fs::read_dir(folder).map_err(io)?;
    let mut paths =
        entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>().map_err(io)?;
    paths.retain(|path| path.is_file());
    paths.sort();
    Ok(paths)
}

/// Class of each node.
struct MusaeTargets {
    classes: Vec<f32>,
    /// In order, if the file has words for classes.
    names: Vec<String>,
}

impl MusaeTargets {
    fn read(text: &Text) -> Result<MusaeTargets> {
        let mut reader = csv::Reader::from_reader(text.open()?);
        let broken = |error: csv::Error| text.location().undecodable("a csv file", error);
        let header = reader.headers().map_err(broken)?.clone();
        let column = |names: &[&str]| {
            let found = names.iter().find_map(|name| header.iter().position(|field| field == *name));
            found.ok_or_else(|| {
                let expected = format!("a column `{}`", names.join("` or `"));
                text.location().bad(expected, header.iter().collect::<Vec<_>>().join(", "))
            })
        };
        let (node_column, target_column) = (column(&NODE_COLUMNS)?, column(&TARGET_COLUMNS)?);
        let mut words: Vec<(u64, String)> = Vec::new();
        for (row, record) in (0..).zip(reader.records()) {
            let record = record.map_err(broken)?;
            let node = record.get(node_column).unwrap_or_default();
            let node = node.parse().map_err(|_| text.row(row).bad("a node id", format!("`{node}`")))?;
            words.push((node, record.get(target_column).unwrap_or_default().to_string()));
        }
        words.sort_by_key(|(node, _)| *node);
        if let Some((at, (node, _))) = (0..).zip(&words).find(|(at, (node, _))| at != node) {
            return Err(text.location().bad(format!("each node from 0 on once, and so {at}"), node));
        }
        Ok(MusaeTargets::from_words(words))
    }

    fn from_words(words: Vec<(u64, String)>) -> MusaeTargets {
        let numbers: Option<Vec<f32>> = words.iter().map(|(_, word)| word.parse().ok()).collect();
        if let Some(classes) = numbers {
            return MusaeTargets { classes, names: Vec::new() };
        }
        let mut names: Vec<String> = words.iter().map(|(_, word)| word.clone()).collect();
        names.sort();
        names.dedup();
        let class = |word: &String| names.binary_search(word).unwrap_or_default() as f32;
        MusaeTargets { classes: words.iter().map(|(_, word)| class(word)).collect(), names }
    }
}

/// Feature numbers by node, in the order of the file.
#[derive(Default)]
struct Bags {
    nodes: u64,
    /// Node, and the start and end of its numbers in `columns`.
    spans: Vec<(u64, usize, usize)>,
    columns: Vec<u32>,
}

impl<'de> serde::de::Visitor<'de> for Bags {
    type Value = Bags;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("a dictionary from node to feature numbers")
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(mut self, mut map: A) -> Result<Bags, A::Error> {
        use serde::de::Error;
        while let Some(key) = map.next_key::<String>()? {
            let node = key.parse().ok().filter(|node| *node < self.nodes);
            let node =
                node.ok_or_else(|| A::Error::custom(format!("`{key}` is not a node below {}", self.nodes)))?;
            let start = self.columns.len();
            self.columns.extend(map.next_value::<Vec<u32>>()?);
            self.spans.push((node, start, self.columns.len()));
        }
        Ok(self)
    }
}

fn features(text: &Text, nodes: u64) -> Result<SparseRows> {
    let mut json = serde_json::Deserializer::from_reader(text.open()?);
    let empty = Bags { nodes, ..Bags::default() };
    let bags = serde::Deserializer::deserialize_map(&mut json, empty)
        .and_then(|bags| json.end().map(|()| bags))
        .map_err(|error| text.location().undecodable("features by node, as json", error))?;
    let mut spans = bags.spans;
    spans.sort_unstable();
    if let Some(pair) = spans.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(text.location().bad("each node once", format!("node {} twice", pair[0].0)));
    }
    let dim = bags.columns.iter().max().map_or(0, |largest| *largest as usize + 1);
    check_columns(dim as u64, text.location())?;
    let (mut starts, mut columns) = (vec![0], Vec::with_capacity(bags.columns.len()));
    let (mut spans, mut bag) = (spans.into_iter().peekable(), Vec::new());
    for node in 0..nodes {
        bag.clear();
        if let Some((_, start, end)) = spans.next_if(|span| span.0 == node) {
            bag.extend_from_slice(&bags.columns[start..end]);
        }
        // A feature number listed twice counts once; sparse rows would add the two up.
        bag.sort_unstable();
        bag.dedup();
        columns.extend_from_slice(&bag);
        starts.push(columns.len() as u64);
    }
    let values = vec![1.0; columns.len()].into();
    let path = text.path().to_path_buf();
    Ok(SparseRows { path, dim, starts: starts.into(), columns: columns.into(), values })
}

/// Whether `path` is an npy of dictionaries, and not one of the forms that formats share.
fn has_objects(path: &Path) -> Result<bool> {
    let header = Header::read(&mut BufReader::new(input::open(path)?), &Location::file(path));
    Ok(header.is_ok_and(|header| header.descr == "|O"))
}

fn splits(path: &Path, index: usize, workspace: &mut ImportWorkspace) -> Result<Splits> {
    let bytes = std::fs::metadata(path).map_err(|error| Location::file(path).io(error))?.len();
    // A number takes 2 bytes or more, then 16 as a value and 8 as an id.
    workspace.hold("the splits", bytes.saturating_mul(12))?;
    let whole = input::read_whole(path, u64::MAX)?;
    let pickle = pickle::read_object_npy(&whole, &Location::file(path))?;
    let splits = pickle.items(pickle.root());
    let splits = splits.ok_or_else(|| pickle.bad("splits", "an array of dictionaries", pickle.root()))?;
    let Some(split) = splits.get(index) else {
        let count = splits.len() as u64;
        return Err(ImportError::NoSuchSplit { path: path.to_path_buf(), count, index });
    };
    let list = |keys: [&str; 2]| {
        let Some(ids) = keys.iter().find_map(|key| pickle.get(*split, key)) else {
            return Err(pickle.bad(&format!("split {index}"), &format!("a key `{}`", keys[0]), *split));
        };
        Ok(IdsInMemory::boxed(path, pickle.ids(ids)?))
    };
    Ok(Splits::Nodes {
        train: list(["train", "train"])?,
        valid: list(["valid", "val"])?,
        test: list(["test", "test"])?,
    })
}

/// Two columns of node ids under a header.
struct CsvEdges(Text);

struct CsvEdgeStream {
    text: Text,
    reader: Box<dyn BufRead + Send>,
    line: Vec<u8>,
    row: u64,
}

/// Longest line accepted: two ids, and any spaces around them.
const LINE_BYTES: u64 = 256;

impl CsvEdgeStream {
    /// The next line that is not empty; `None` at the end.
    fn line(&mut self) -> Result<Option<String>> {
        loop {
            self.line.clear();
            let read = (&mut self.reader).take(LINE_BYTES).read_until(b'\n', &mut self.line);
            let count = read.map_err(|error| self.text.row(self.row).io(error))?;
            if count == 0 {
                return Ok(None);
            }
            if count as u64 == LINE_BYTES && !self.line.ends_with(b"\n") {
                let found = format!("a line of more than {LINE_BYTES} characters");
                return Err(self.text.row(self.row).bad("two node ids", found));
            }
            let line = String::from_utf8_lossy(&self.line);
            if !line.trim().is_empty() {
                return Ok(Some(line.trim().to_string()));
            }
        }
    }

    fn edge(&mut self) -> Result<Option<ForeignEdge>> {
        let Some(line) = self.line()? else { return Ok(None) };
        let mut ends = line.split(',').map(|field| field.trim().parse::<u64>());
        let (Some(Ok(source)), Some(Ok(target))) = (ends.next(), ends.next()) else {
            return Err(self.text.row(self.row).bad("two node ids", format!("`{line}`")));
        };
        self.row += 1;
        Ok(Some(ForeignEdge { source, target, ..ForeignEdge::default() }))
    }
}

impl EdgeSource for CsvEdges {
    fn count(&self) -> Option<u64> {
        None
    }
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>> {
        let (text, reader) = (self.0.clone(), self.0.open()?);
        let mut stream = CsvEdgeStream { text, reader, line: Vec::new(), row: 0 };
        stream.line()?;
        for _ in 0..skip {
            if stream.edge()?.is_none() {
                break;
            }
        }
        Ok(Box::new(stream))
    }
    fn location(&self, position: u64) -> Location {
        self.0.row(position)
    }
}

impl EdgeStream for CsvEdgeStream {
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool> {
        out.clear();
        while out.len() < CHUNK
            && let Some(edge) = self.edge()?
        {
            out.push(edge);
        }
        Ok(!out.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use std::fs;

    const EDGES: &str = "node_1,node_2\n0,1\n1,3\n\n3,2\n";
    const FEATURES: &str = r#"{"1": [4, 0, 4], "0": [2], "3": []}"#;
    const TARGET: &str = "id,name,ml_target\n1,\"b, c\",1\n0,a,0\n3,d,0\n2,e,1\n";

    fn open(from: &Path, split: Option<PathBuf>, split_index: usize) -> Result<ImportSource> {
        let split = split.map(SplitChoice::File);
        let request = Request { from: Some(from.to_path_buf()), split, split_index, ..Request::default() };
        Musae.inputs(&request)?;
        fixture::in_workspace(|workspace| Musae.open(&request, workspace))
    }

    fn write(folder: &Path, edges: &str, features: &str, target: &str) {
        fs::write(folder.join("tiny_edges.csv"), edges).unwrap();
        fs::write(folder.join("tiny_features.json"), features).unwrap();
        fs::write(folder.join("tiny_target.csv"), target).unwrap();
    }

    fn check_tiny(source: ImportSource) {
        assert_eq!(source.nodes, Some(4));
        assert_eq!(fixture::all_edges(&*source.edges, 0).unwrap(), [(0, 1), (1, 3), (3, 2)]);
        assert_eq!(fixture::all_edges(&*source.edges, 2).unwrap(), [(3, 2)]);
        let features = source.features.unwrap();
        assert_eq!(features.dim(), 5);
        let rows = fixture::all_rows(&*features, 0).unwrap();
        assert_eq!(rows[..10], [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]);
        assert_eq!(rows[10..], [0.0; 10]);
        let labels = fixture::all_rows(&*source.labels.unwrap().rows, 0).unwrap();
        assert_eq!(labels, [0.0, 1.0, 1.0, 0.0]);
    }

    #[test]
    fn a_folder_and_a_zip_give_the_same_graph() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), EDGES, FEATURES, TARGET);
        check_tiny(open(directory.path(), None, 0).unwrap());
        let packed = tempfile::tempdir().unwrap();
        let zip = packed.path().join("tiny.zip");
        let members = [
            ("tiny/tiny_edges.csv", EDGES.into()),
            ("tiny/tiny_features.json", FEATURES.into()),
            ("tiny/tiny_target.csv", TARGET.into()),
        ];
        fixture::write_zip(&zip, &members);
        check_tiny(open(&zip, None, 0).unwrap());
        check_tiny(open(packed.path(), None, 0).unwrap());
    }

    #[test]
    fn splits_lie_beside_the_files_or_where_the_user_says() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), EDGES, FEATURES, TARGET);
        let splits = fixture::committed("tiny-splits.npy");
        let sizes = |source: Result<ImportSource>| fixture::split_sizes(&source.unwrap().splits).unwrap();
        assert_eq!(sizes(open(directory.path(), Some(splits.clone()), 0)), [2, 1, 1]);
        fs::copy(splits, directory.path().join("tiny-splits.npy")).unwrap();
        assert_eq!(sizes(open(directory.path(), None, 1)), [1, 1, 2]);
        let codes = directory.path().join("codes.npy");
        fs::write(&codes, fixture::integers(&[0, 0, 1, 2])).unwrap();
        let source = open(directory.path(), Some(codes), 0).unwrap();
        assert!(matches!(source.splits, Splits::Coded(_)));
        let message = open(directory.path(), None, 2).err().unwrap().to_string();
        assert!(message.contains("2 splits"), "{message}");
    }

    #[test]
    fn words_for_classes_become_names() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), EDGES, FEATURES, "id,page_type\n0,tv\n1,company\n2,tv\n3,company\n");
        let source = open(directory.path(), None, 0).unwrap();
        assert_eq!(source.class_names, ["company", "tv"]);
        let labels = fixture::all_rows(&*source.labels.unwrap().rows, 0).unwrap();
        assert_eq!(labels, [1.0, 0.0, 1.0, 0.0]);
    }

    fn check_refused(edges: &str, features: &str, target: &str, words: &[&str]) {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), edges, features, target);
        let outcome =
            open(directory.path(), None, 0).and_then(|source| fixture::all_edges(&*source.edges, 0));
        let message = outcome.unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }

    #[test]
    fn what_does_not_fit_is_named_with_file_and_location() {
        check_refused("a,b\n0,1\n2\n", FEATURES, TARGET, &["tiny_edges.csv, row 1", "`2`"]);
        check_refused("a,b\n0,x\n", FEATURES, TARGET, &["tiny_edges.csv, row 0", "`0,x`"]);
        check_refused(EDGES, r#"{"7": [1]}"#, TARGET, &["tiny_features.json", "`7`", "below 4", "line 1"]);
        check_refused(EDGES, r#"{"0": [-1]}"#, TARGET, &["tiny_features.json", "-1"]);
        check_refused(
            EDGES,
            r#"{"0": [4294967295]}"#,
            TARGET,
            &["tiny_features.json", "columns", "4294967296"],
        );
        check_refused(EDGES, r#"{"0": [1], "0": []}"#, TARGET, &["node 0 twice"]);
        check_refused(EDGES, r#"{"0": [1]"#, TARGET, &["tiny_features.json", "EOF"]);
        check_refused(EDGES, FEATURES, "id,target\n0,1\n2,1\n", &["tiny_target.csv", "so 1", "found 2"]);
        check_refused(EDGES, FEATURES, "id,colour\n0,1\n", &["`target`", "id, colour"]);
        check_refused(EDGES, FEATURES, "id,target\nx,1\n", &["tiny_target.csv, row 0", "`x`"]);
    }

    #[test]
    fn a_folder_without_the_files_says_what_it_needs() {
        let directory = tempfile::tempdir().unwrap();
        let message = open(directory.path(), None, 0).err().unwrap().to_string();
        assert!(message.contains("*_edges.csv: not found"), "{message}");
        let message = open(&directory.path().join("no.zip"), None, 0).err().unwrap().to_string();
        assert!(message.contains("no.zip: not found"), "{message}");
    }

    #[test]
    fn deezer_europe_has_its_published_size() {
        let Some(path) = fixture::real_data("deezer_europe") else { return };
        for split_index in 0..5 {
            let source = open(&path, None, split_index).unwrap();
            assert_eq!(source.nodes, Some(28_281));
            assert_eq!(fixture::all_edges(&*source.edges, 0).unwrap().len(), 92_752);
            assert_eq!(source.features.unwrap().dim(), 31_241);
            let labels = fixture::all_rows(&*source.labels.unwrap().rows, 0).unwrap();
            assert_eq!(labels.iter().filter(|label| **label == 1.0).count(), 12_538);
            assert_eq!(labels.iter().filter(|label| **label == 0.0).count(), 15_743);
            assert_eq!(fixture::split_sizes(&source.splits).unwrap(), [14_140, 7_070, 7_071]);
        }
        assert!(open(&path, None, 5).err().unwrap().to_string().contains("5 splits"));
    }
}
