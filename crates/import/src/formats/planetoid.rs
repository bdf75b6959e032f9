//! Cora, Citeseer and Pubmed as Planetoid pickled them (Yang et al., 2016): `ind.NAME.{x,tx,allx,y,ty,ally,graph}`
//! and `ind.NAME.test.index`. Rows of `allx` come first; row `i` of `tx` belongs to the node in line `i` of
//! `test.index`. Citeseer's file leaves out some isolated nodes: they get empty rows and no label.

use super::Format;
use crate::given;
use crate::idlist::TextIds;
use crate::pickle::{self, Pickle, Value};
use crate::source::{
    DenseRows, EdgeColumns, EdgesInMemory, ForeignEdge, IdSource, IdsInMemory, ImportSource, LabelKind,
    NodeLabels, RowSource, SparseRows, Splits, Treatment,
};
use crate::{ImportError, ImportWorkspace, Location, Request, Result, input};
use std::path::{Path, PathBuf};

pub(super) struct Planetoid;

/// By convention, the 500 nodes after the training nodes are for validation.
const VALID_NODES: u64 = 500;
/// A neighbour takes 3 bytes or more in the file, then 16 as a value and 32 as an edge.
const BYTES_PER_GRAPH_BYTE: u64 = 17;
/// Matrices are in memory in three forms: as in the file, as rows, and combined with the rows of the test nodes.
const BYTES_PER_MATRIX_BYTE: u64 = 3;

const PARTS: [&str; 8] = ["x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"];

impl Format for Planetoid {
    fn name(&self) -> &'static str {
        "planetoid"
    }
    fn about(&self) -> &'static str {
        "Planetoid pickles: --from DIR --name cora (citeseer, pubmed); edges are made undirected, loops dropped"
    }
    fn flags(&self) -> Vec<&'static str> {
        vec!["from", "name", "train", "valid", "test", "split"]
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let folder = Folder::of(request)?;
        let need = "a part of every Planetoid dataset; is --name right?";
        let parts = PARTS.iter().map(|part| input::existing(&folder.path(part), need));
        parts.chain(given::split_inputs(request)?.into_iter().map(Ok)).collect()
    }
    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        self.inputs(request)?;
        let folder = Folder::of(request)?;
        folder.hold(workspace)?;
        let order = TestOrder::read(&folder)?;
        let splits = match given::open_named_splits(request, workspace, order.nodes())? {
            Some(splits) => splits,
            None => splits(&folder, &order)?,
        };
        Ok(ImportSource {
            nodes: Some(order.nodes()),
            edges: Box::new(edges(&folder)?),
            features: Some(Box::new(features(&folder, &order)?)),
            labels: Some(labels(&folder, &order, request)?),
            splits,
            usual: Treatment { add_reverse: true, remove_duplicates: true, remove_self_loops: true },
            node_names: None,
            relation_names: Vec::new(),
            class_names: Vec::new(),
        })
    }
}

struct Folder {
    directory: PathBuf,
    name: String,
}

impl Folder {
    fn of(request: &Request) -> Result<Folder> {
        let directory = request.need(&request.from, "--from DIR")?.to_path_buf();
        let name = request.name.clone().ok_or(ImportError::NoPlanetoidName)?;
        Ok(Folder { directory, name })
    }

    fn path(&self, part: &str) -> PathBuf {
        self.directory.join(format!("ind.{}.{part}", self.name))
    }

    fn hold(&self, workspace: &mut ImportWorkspace) -> Result<()> {
        let mut needs_bytes = 0u64;
        for part in PARTS {
            let path = self.path(part);
            let bytes = std::fs::metadata(&path).map_err(|error| Location::file(&path).io(error))?.len();
            let times = if part == "graph" { BYTES_PER_GRAPH_BYTE } else { BYTES_PER_MATRIX_BYTE };
            needs_bytes = needs_bytes.saturating_add(bytes.saturating_mul(times));
        }
        workspace.hold("a Planetoid dataset, which is pickled whole,", needs_bytes)
    }

    fn pickled<T>(&self, part: &str, look: impl FnOnce(&Pickle, &Path) -> Result<T>) -> Result<T> {
        let path = self.path(part);
        let bytes = input::read_whole(&path, u64::MAX)?;
        look(&pickle::read(&bytes, &Location::file(&path))?, &path)
    }

    fn matrix<T>(&self, part: &str, look: impl FnOnce(SparseRows) -> Result<T>) -> Result<T> {
        self.pickled(part, |pickle, path| look(pickle.sparse(pickle.root())?.to_rows(path)?))
    }

    /// The class of each row of a 0/1 matrix, NaN if a row has no 1; and the number of classes.
    fn classes(&self, part: &str) -> Result<(Vec<f32>, u64)> {
        self.pickled(part, |pickle, path| {
            let matrix = pickle.numbers(pickle.root())?;
            let [rows, columns] = *matrix.shape else {
                return Err(pickle.bad("labels", "a matrix of nodes by classes", pickle.root()));
            };
            let class = |row: u64| {
                let set = |column: &u64| matrix.float(matrix.position(row as usize, *column as usize)) != 0.0;
                let mut classes = (0..columns).filter(set);
                match (classes.next(), classes.next()) {
                    (None, _) => Ok(f32::NAN),
                    (Some(class), None) => Ok(class as f32),
                    (Some(_), Some(_)) => Err(Location::row(path, row).bad("one class", "several")),
                }
            };
            // A matrix without columns has no data that would limit its number of rows.
            let rows = if columns == 0 { 0 } else { rows };
            Ok(((0..rows).map(class).collect::<Result<_>>()?, columns))
        })
    }
}

/// The node of each test row.
struct TestOrder {
    path: PathBuf,
    /// Nodes of `allx`.
    first: u64,
    /// For each later node the row of `tx`; `None` if the file leaves the node out.
    rows: Vec<Option<usize>>,
}

impl TestOrder {
    fn read(folder: &Folder) -> Result<TestOrder> {
        let path = folder.path("test.index");
        let mut ids = Vec::new();
        let (mut stream, mut chunk) = (TextIds::open(&path)?.open()?, Vec::new());
        while stream.next(&mut chunk)? {
            ids.extend_from_slice(&chunk);
        }
        let first = folder.matrix("allx", |matrix| Ok(matrix.rows()))?;
        if ids.iter().min() != Some(&first) {
            let found = ids.iter().min().map_or("none".to_string(), u64::to_string);
            return Err(Location::file(&path).bad(format!("ids from {first}, the rows of allx, on"), found));
        }
        // Gaps are few: a forged id must not determine how much is allocated.
        let most = first + 2 * ids.len() as u64 + 1024;
        let mut rows = Vec::new();
        for (row, id) in ids.iter().enumerate() {
            let offset = (*id - first) as usize;
            if *id >= most || rows.get(offset).is_some_and(Option::is_some) {
                let expected = format!("a node id below {most} that was not listed before");
                return Err(Location::row(&path, row as u64).bad(expected, id));
            }
            rows.resize(rows.len().max(offset + 1), None);
            rows[offset] = Some(row);
        }
        Ok(TestOrder { path, first, rows })
    }

    fn nodes(&self) -> u64 {
        self.first + self.rows.len() as u64
    }

    fn listed(&self) -> u64 {
        self.rows.iter().flatten().count() as u64
    }
}

fn edges(folder: &Folder) -> Result<EdgesInMemory> {
    folder.pickled("graph", |pickle, path| {
        let Some(pairs) = pickle.pairs(pickle.root()) else {
            return Err(pickle.bad("graph", "a dictionary from node to neighbours", pickle.root()));
        };
        let mut edges = Vec::new();
        for (node, neighbours) in pairs {
            let source = match node {
                Value::Int(node) if *node >= 0 => *node as u64,
                other => return Err(pickle.bad("a key", "a node id", *other)),
            };
            let ends = pickle.ids(*neighbours)?;
            edges.extend(ends.into_iter().map(|target| ForeignEdge {
                source,
                target,
                ..ForeignEdge::default()
            }));
        }
        Ok(EdgesInMemory { path: path.to_path_buf(), edges: edges.into(), columns: EdgeColumns::default() })
    })
}

fn features(folder: &Folder, order: &TestOrder) -> Result<SparseRows> {
    let all = folder.matrix("allx", Ok)?;
    let test = folder.matrix("tx", Ok)?;
    if test.dim() != all.dim() || test.rows() != order.listed() {
        let expected = format!("{} rows, one an id of test.index, of {} columns", order.listed(), all.dim());
        return Err(Location::file(&test.path).bad(expected, format!("{} of {}", test.rows(), test.dim())));
    }
    let mut starts = all.starts.to_vec();
    let mut columns = all.columns.to_vec();
    let mut values = all.values.to_vec();
    for row in &order.rows {
        if let Some(row) = *row {
            let entries = test.starts[row] as usize..test.starts[row + 1] as usize;
            columns.extend_from_slice(&test.columns[entries.clone()]);
            values.extend_from_slice(&test.values[entries]);
        }
        starts.push(columns.len() as u64);
    }
    let (path, dim) = (all.path, all.dim);
    Ok(SparseRows { path, dim, starts: starts.into(), columns: columns.into(), values: values.into() })
}

fn labels(folder: &Folder, order: &TestOrder, request: &Request) -> Result<NodeLabels> {
    let (mut values, columns) = folder.classes("ally")?;
    if values.len() as u64 != order.first {
        let expected = format!("{} rows, as in allx", order.first);
        return Err(Location::file(&folder.path("ally")).bad(expected, values.len()));
    }
    let (test, test_columns) = folder.classes("ty")?;
    if test.len() as u64 != order.listed() || test_columns != columns {
        let expected = format!("{} rows, as in tx, of {columns} classes", order.listed());
        return Err(
            Location::file(&folder.path("ty")).bad(expected, format!("{} of {test_columns}", test.len()))
        );
    }
    values.extend(order.rows.iter().map(|row| row.map_or(f32::NAN, |row| test[row])));
    let rows = DenseRows { path: folder.path("ally"), dim: 1, values: values.into() };
    let kind = request.label_kind.unwrap_or(LabelKind::Classes);
    Ok(NodeLabels { kind, rows: Box::new(rows), nan_is_unlabelled: true })
}

fn splits(folder: &Folder, order: &TestOrder) -> Result<Splits> {
    let train_nodes = folder.matrix("x", |matrix| Ok(matrix.rows()))?;
    let (labelled, _) = folder.classes("y")?;
    if labelled.len() as u64 != train_nodes {
        let expected = format!("{train_nodes} rows, as in x");
        return Err(Location::file(&folder.path("y")).bad(expected, labelled.len()));
    }
    let valid = train_nodes..train_nodes + VALID_NODES;
    if valid.end > order.first {
        let expected = format!("{} rows: those of x, and {VALID_NODES} to validate on", valid.end);
        return Err(Location::file(&folder.path("allx")).bad(expected, order.first));
    }
    let listed = (order.first..).zip(&order.rows).filter(|(_, row)| row.is_some());
    let path = folder.path("x");
    Ok(Splits::Nodes {
        train: IdsInMemory::boxed(&path, Vec::from_iter(0..train_nodes)),
        valid: IdsInMemory::boxed(&path, Vec::from_iter(valid)),
        test: IdsInMemory::boxed(&order.path, listed.map(|(node, _)| node).collect::<Vec<u64>>()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use rustc_hash::FxHashSet;
    use std::fs;

    fn open(from: &Path, name: &str) -> Result<ImportSource> {
        let request = Request {
            from: Some(from.to_path_buf()),
            name: Some(name.to_string()),
            format: "planetoid".to_string(),
            ..Request::default()
        };
        fixture::in_workspace(|workspace| Planetoid.open(&request, workspace))
    }

    /// A copy of the committed dataset, to be broken.
    fn copy() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for part in PARTS {
            let name = format!("ind.tiny.{part}");
            fs::copy(fixture::committed("planetoid").join(&name), directory.path().join(&name)).unwrap();
        }
        directory
    }

    fn check_refused(part: &str, break_it: impl FnOnce(&mut Vec<u8>), words: &[&str]) {
        let directory = copy();
        let path = directory.path().join(format!("ind.tiny.{part}"));
        let mut bytes = fs::read(&path).unwrap();
        break_it(&mut bytes);
        fs::write(&path, bytes).unwrap();
        let message = open(directory.path(), "tiny").err().unwrap().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }

    #[test]
    fn test_rows_go_where_the_index_says_and_gaps_stay_empty() {
        let source = open(&fixture::committed("planetoid"), "tiny").unwrap();
        assert_eq!(source.nodes, Some(509));
        let features = source.features.unwrap();
        // test.index has 507, 505, 508, and not 506.
        let expected = [0.0, 11.0, 0.0, 0.0, 10.0, 0.0, 12.0, 0.0];
        assert_eq!(fixture::all_rows(&*features, 505).unwrap(), expected);
        let labels = fixture::all_rows(&*source.labels.unwrap().rows, 505).unwrap();
        assert_eq!((labels[0], labels[2], labels[3]), (1.0, 0.0, 0.0));
        assert!(labels[1].is_nan());
        assert_eq!(fixture::all_edges(&*source.edges, 0).unwrap(), [(0, 1), (0, 505), (1, 0), (505, 0)]);
        let Splits::Nodes { train, valid, test } = source.splits else { panic!("no split") };
        assert_eq!(fixture::all_ids(&*train).unwrap(), [0, 1]);
        assert_eq!(fixture::all_ids(&*valid).unwrap(), Vec::from_iter(2..502));
        assert_eq!(fixture::all_ids(&*test).unwrap(), [505, 507, 508]);
    }

    #[test]
    fn a_missing_part_or_name_is_told() {
        let message = open(&fixture::committed("planetoid"), "cora").err().unwrap().to_string();
        assert!(message.contains("ind.cora.x: not found"), "{message}");
        let request = Request { from: Some("here".into()), ..Request::default() };
        assert!(Planetoid.inputs(&request).unwrap_err().to_string().contains("--name"));
    }

    #[test]
    fn broken_parts_are_named() {
        check_refused("allx", |bytes| bytes.truncate(200), &["ind.tiny.allx, byte", "end of the file"]);
        check_refused("test.index", |b| b.extend(b"505\n"), &["test.index, row 3", "found 505"]);
        check_refused("test.index", |b| b.extend(b"99999999999\n"), &["test.index, row 3", "99999999999"]);
        check_refused("test.index", |b| b.extend(b"4\n"), &["test.index", "from 505", "found 4"]);
        check_refused("test.index", |b| b.extend(b"509\n"), &["tx", "4 rows"]);
        check_refused("graph", |b| *b = b"].".to_vec(), &["ind.tiny.graph", "a dictionary", "a list of 0"]);
        check_refused("ally", |b| *b = b"].".to_vec(), &["ind.tiny.ally", "array of numbers"]);
    }

    #[test]
    fn damaged_parts_never_panic() {
        let directory = copy();
        let wholes: Vec<_> = PARTS.map(|part| directory.path().join(format!("ind.tiny.{part}"))).into();
        for seed in 0..400u64 {
            let path = &wholes[seed as usize % wholes.len()];
            let whole = fs::read(path).unwrap();
            fs::write(path, fixture::damaged(&whole, &whole, seed)).unwrap();
            let outcome = std::panic::catch_unwind(|| open(directory.path(), "tiny").is_ok());
            assert!(outcome.is_ok(), "seed {seed}");
            fs::write(path, whole).unwrap();
        }
    }

    struct Published {
        nodes: u64,
        directed: usize,
        dim: usize,
        classes: usize,
        train: usize,
        unlabelled: usize,
    }

    fn check_real(name: &str, published: Published) {
        let Some(path) = fixture::real_data(name) else { return };
        let source = open(&path, name).unwrap();
        assert_eq!(source.nodes, Some(published.nodes));
        let edges = fixture::all_edges(&*source.edges, 0).unwrap();
        let both = edges.iter().flat_map(|(a, b)| [(*a, *b), (*b, *a)]).filter(|(a, b)| a != b);
        assert_eq!(both.collect::<FxHashSet<_>>().len(), published.directed);
        let features = source.features.unwrap();
        assert_eq!((features.rows(), features.dim()), (published.nodes, published.dim));
        let labels = fixture::all_rows(&*source.labels.unwrap().rows, 0).unwrap();
        assert_eq!(labels.iter().filter(|label| label.is_nan()).count(), published.unlabelled);
        assert_eq!(labels.iter().copied().fold(0.0, f32::max), published.classes as f32 - 1.0);
        assert_eq!(fixture::split_sizes(&source.splits).unwrap(), [published.train, 500, 1000]);
    }

    #[test]
    fn cora_has_its_published_size() {
        let (nodes, directed, dim, classes) = (2_708, 10_556, 1_433, 7);
        check_real("cora", Published { nodes, directed, dim, classes, train: 140, unlabelled: 0 });
    }

    #[test]
    fn citeseer_has_its_published_size() {
        let (nodes, directed, dim, classes) = (3_327, 9_104, 3_703, 6);
        check_real("citeseer", Published { nodes, directed, dim, classes, train: 120, unlabelled: 15 });
    }

    #[test]
    fn pubmed_has_its_published_size() {
        let (nodes, directed, dim, classes) = (19_717, 88_648, 500, 3);
        check_real("pubmed", Published { nodes, directed, dim, classes, train: 60, unlabelled: 0 });
    }
}
