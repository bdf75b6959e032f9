//! The files of a dataset that have a flag each (`--features`, `--labels`, `--train`, ...), for the formats without a
//! layout of their own.

use crate::csr::open_csr;
use crate::delimited::{Dialect, Lines, TextRows, scan_table};
use crate::idlist::TextIds;
use crate::npy::{NpyArray, NpyIds, NpyRows, Scalar};
use crate::parquet_file::ParquetFile;
use crate::parquet_rows::{ParquetIds, ParquetRows};
use crate::source::{
    EdgeSource, IdSource, IdsInMemory, ImportSource, LabelKind, NameSource, NameStream, NodeLabels,
    RowSource, Splits, Treatment,
};
use crate::{ImportError, ImportWorkspace, Location, Request, Result, SplitChoice, input};
use std::path::{Path, PathBuf};

/// The opened files. Their lengths agree.
pub struct GivenFiles {
    /// Number of nodes, if a file or the user states it.
    pub nodes: Option<u64>,
    /// Feature rows.
    pub features: Option<Box<dyn RowSource>>,
    /// Labels.
    pub labels: Option<NodeLabels>,
    /// The splits.
    pub splits: Splits,
}

impl GivenFiles {
    /// The source that consists of these files and some edges.
    pub fn with_edges(self, edges: Box<dyn EdgeSource>) -> ImportSource {
        ImportSource {
            nodes: self.nodes,
            edges,
            features: self.features,
            labels: self.labels,
            splits: self.splits,
            usual: Treatment::AS_STORED,
            node_names: None,
            relation_names: Vec::new(),
            class_names: Vec::new(),
        }
    }
}

/// The files given by flags, checked to exist.
pub fn inputs(request: &Request) -> Result<Vec<PathBuf>> {
    let split = match &request.split {
        Some(SplitChoice::File(path)) => Some(path),
        _ => None,
    };
    let named = [
        (request.features.as_ref(), "--features names it"),
        (request.features_csr.as_ref(), "--features-csr names it"),
        (request.labels.as_ref(), "--labels names it"),
        (request.train.as_ref(), "--train names it"),
        (request.valid.as_ref(), "--valid names it"),
        (request.test.as_ref(), "--test names it"),
        (split, "--split names it (or write per-class:20,30 or share:0.6,0.2,0.2)"),
        (request.node_ids.as_ref(), "--node-ids names it"),
        (request.edge_weights.as_ref(), "--edge-weights names it"),
        (request.edge_times.as_ref(), "--edge-times names it"),
    ];
    named.into_iter().filter_map(|(path, need)| Some(input::existing(path?, need))).collect()
}

/// The split files given by flags, checked to exist.
pub fn split_inputs(request: &Request) -> Result<Vec<PathBuf>> {
    let (split, train) = (request.split.clone(), request.train.clone());
    let (valid, test) = (request.valid.clone(), request.test.clone());
    inputs(&Request { split, train, valid, test, ..Request::default() })
}

/// The split given by flags, for formats that have a split of their own. It replaces the format's split.
pub fn open_named_splits(
    request: &Request,
    workspace: &mut ImportWorkspace,
    nodes: u64,
) -> Result<Option<Splits>> {
    let mut count = NodeCount::new(request, Some((nodes, "the dataset")))?;
    match open_splits(request, workspace, &mut count)? {
        Splits::None => Ok(None),
        splits => Ok(Some(splits)),
    }
}

/// Opens the files given by flags. `nodes` is the node count in the files of the edges, and the name of its source.
pub fn open(
    request: &Request,
    workspace: &mut ImportWorkspace,
    nodes: Option<(u64, &'static str)>,
) -> Result<GivenFiles> {
    let mut count = NodeCount::new(request, nodes)?;
    if request.features.is_some() && request.features_csr.is_some() {
        return Err(ImportError::NotBoth { flags: "--features or --features-csr" });
    }
    let features = match (&request.features, &request.features_csr) {
        (Some(path), _) => Some(open_rows(path, request, workspace, false)?.rows),
        (_, Some(path)) => Some(open_csr(path)?),
        _ => None,
    };
    if let Some(features) = &features {
        count.check_rows(&**features, "feature rows")?;
    }
    let labels = request.labels.as_ref().map(|path| open_labels(path, request, workspace)).transpose()?;
    if let Some(labels) = &labels {
        count.check_rows(&*labels.rows, "label rows")?;
    }
    let splits = open_splits(request, workspace, &mut count)?;
    Ok(GivenFiles { nodes: count.nodes.map(|(nodes, _)| nodes), features, labels, splits })
}

/// The number of nodes and its first source.
struct NodeCount {
    nodes: Option<(u64, String)>,
}

impl NodeCount {
    fn new(request: &Request, nodes: Option<(u64, &'static str)>) -> Result<NodeCount> {
        if let (Some(asked), Some((found, who))) = (request.nodes, nodes)
            && asked != found
        {
            return Err(ImportError::NodesDiffer { asked, who, found });
        }
        let asked = request.nodes.map(|nodes| (nodes, "--nodes"));
        Ok(NodeCount { nodes: nodes.or(asked).map(|(nodes, who)| (nodes, who.to_string())) })
    }

    fn check_rows(&mut self, rows: &dyn RowSource, what: &str) -> Result<()> {
        let path = rows.location(0).path;
        if rows.dim() == 0 {
            return Err(Location::file(&path).bad(format!("{what} of at least one number"), "rows of none"));
        }
        self.check(rows.rows(), what, &path)
    }

    fn check(&mut self, found: u64, what: &str, path: &Path) -> Result<()> {
        match &self.nodes {
            Some((nodes, who)) if *nodes != found => {
                Err(Location::file(path).bad(format!("{nodes} {what}, as {who} has nodes"), found))
            }
            Some(_) => Ok(()),
            None => {
                self.nodes = Some((found, path.display().to_string()));
                Ok(())
            }
        }
    }
}

/// Rows, and whether their dtype is an integer.
struct OpenRows {
    rows: Box<dyn RowSource>,
    whole: bool,
}

fn extension(path: &Path) -> String {
    let name = path.to_string_lossy().to_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.rsplit_once('.').map(|(_, extension)| extension.to_string()).unwrap_or_default()
}

fn open_rows(
    path: &Path,
    request: &Request,
    workspace: &mut ImportWorkspace,
    missing_is_nan: bool,
) -> Result<OpenRows> {
    match extension(path).as_str() {
        "npy" => {
            let array = NpyArray::open(path)?;
            let whole = !matches!(array.scalar(), Scalar::F16 | Scalar::F32 | Scalar::F64);
            Ok(OpenRows { rows: Box::new(NpyRows::new(array)?), whole })
        }
        "parquet" => {
            let rows = ParquetRows::new(ParquetFile::open(path)?)?;
            workspace.hold(&format!("reading {}", path.display()), rows.read_bytes())?;
            let whole = rows.whole();
            Ok(OpenRows { rows: Box::new(rows), whole })
        }
        "csv" | "tsv" | "txt" => {
            let dialect = Dialect::guess(path, request.delimiter)?;
            let shape =
                workspace.step(&format!("shape of {}", path.display()), || scan_table(path, dialect))?;
            let dialect = Dialect { header: shape.header, ..dialect };
            let rows = Box::new(TextRows::new(path, dialect, shape.rows, missing_is_nan)?);
            Ok(OpenRows { rows, whole: shape.whole })
        }
        other => Err(Location::file(path)
            .bad("a file called .npy, .csv, .tsv, .txt or .parquet", format!("`.{other}`"))),
    }
}

/// Integers in one column are classes, in several they are multilabel. Floats are real numbers unless the user gives
/// `--label-kind classes` or declares that NaN means "no label", which only classes need.
fn open_labels(path: &Path, request: &Request, workspace: &mut ImportWorkspace) -> Result<NodeLabels> {
    let OpenRows { rows, whole } = open_rows(path, request, workspace, request.nan_is_unlabelled)?;
    let kind = match (request.label_kind, whole, rows.dim()) {
        (Some(kind), ..) => kind,
        (None, true, 1) => LabelKind::Classes,
        (None, true, _) => LabelKind::Multilabel,
        (None, false, _) => guess_float_labels(&*rows, path, workspace)?,
    };
    if kind == LabelKind::Classes && rows.dim() != 1 {
        let expected = "one column of classes (for several give --label-kind multilabel or real)";
        return Err(Location::file(path).bad(expected, format!("{} columns", rows.dim())));
    }
    Ok(NodeLabels { kind, rows, nan_is_unlabelled: request.nan_is_unlabelled })
}

/// Classes are often stored as floats. Whole numbers in one column are taken for classes, zeros and ones in several
/// for multilabel, anything else for real values. NaN is compatible with all of them.
fn guess_float_labels(rows: &dyn RowSource, path: &Path, workspace: &ImportWorkspace) -> Result<LabelKind> {
    let (dim, mut row) = (rows.dim().max(1), 0);
    let (mut stream, mut values) = (rows.open(0)?, Vec::new());
    let (mut whole, mut flags) = (true, true);
    while row < rows.rows() && (whole || flags) {
        let count = (rows.rows() - row).min((LABELS_AT_ONCE / dim as u64).max(1));
        values.resize(count as usize * dim, 0.0f32);
        stream.fill(&mut values)?;
        let mut known = values.iter().filter(|value| !value.is_nan());
        whole = whole
            && known.clone().all(|value| *value >= -1.0 && *value == value.trunc() && value.is_finite());
        flags = flags && known.all(|value| *value == 0.0 || *value == 1.0);
        row += count;
    }
    let (kind, text) = match (dim, whole, flags) {
        (1, true, _) => (LabelKind::Classes, "whole numbers, taken for classes"),
        (2.., _, true) => (LabelKind::Multilabel, "zeros and ones, taken for several labels a node"),
        _ => (LabelKind::Real, "taken for real values"),
    };
    workspace.progress.note(&format!("{}: labels are {text} (--label-kind says otherwise)", path.display()));
    Ok(kind)
}

/// Label values examined at a time.
const LABELS_AT_ONCE: u64 = 1 << 16;

fn open_splits(request: &Request, workspace: &mut ImportWorkspace, count: &mut NodeCount) -> Result<Splits> {
    let lists = [&request.train, &request.valid, &request.test];
    let listed = lists.iter().any(|list| list.is_some());
    match &request.split {
        Some(SplitChoice::File(_)) if listed => {
            Err(ImportError::NotBoth { flags: "--split FILE or --train, --valid and --test" })
        }
        Some(SplitChoice::File(path)) => {
            let rows = open_rows(path, request, workspace, false)?.rows;
            count.check_rows(&*rows, "split codes")?;
            if rows.dim() != 1 {
                let expected = "one number a node: 0 train, 1 valid, 2 test";
                return Err(Location::file(path).bad(expected, format!("{} columns", rows.dim())));
            }
            Ok(Splits::Coded(rows))
        }
        // Drawing a split is the builder's task.
        _ if !listed => Ok(Splits::None),
        _ => {
            let mut open = |list: &Option<PathBuf>| match list {
                Some(path) => open_ids(path, request, count),
                None => Ok(IdsInMemory::boxed(Path::new("(no file)"), Vec::new())),
            };
            Ok(Splits::Nodes { train: open(lists[0])?, valid: open(lists[1])?, test: open(lists[2])? })
        }
    }
}

fn open_ids(path: &Path, request: &Request, count: &mut NodeCount) -> Result<Box<dyn IdSource>> {
    match extension(path).as_str() {
        "npy" => {
            let array = NpyArray::open(path)?;
            if array.scalar() == Scalar::Bool {
                return mask(array, path, request.split_index, count);
            }
            Ok(Box::new(NpyIds::new(array)?))
        }
        "parquet" => Ok(Box::new(ParquetIds::new(ParquetFile::open(path)?)?)),
        _ => Ok(Box::new(TextIds::open(path)?)),
    }
}

fn mask(
    array: NpyArray,
    path: &Path,
    split_index: usize,
    count: &mut NodeCount,
) -> Result<Box<dyn IdSource>> {
    if split_index != 0 {
        return Err(ImportError::SingleMask { path: path.to_path_buf(), index: split_index });
    }
    count.check(array.elements(), "mask entries", path)?;
    Ok(Box::new(NpyIds::new(array)?))
}

/// Names, one per line.
pub struct LineNames {
    path: PathBuf,
    count: u64,
}

impl LineNames {
    /// Counts the lines of `path`. This is done once per import.
    pub fn open(path: &Path, workspace: &ImportWorkspace) -> Result<LineNames> {
        let count = workspace.step("count the node ids", || {
            let (mut lines, mut count) = (Lines::open(path)?, 0u64);
            while lines.advance()? {
                count += 1;
            }
            Ok(count)
        })?;
        Ok(LineNames { path: path.to_path_buf(), count })
    }
}

struct LineNameStream(Lines);

impl NameSource for LineNames {
    fn count(&self) -> u64 {
        self.count
    }
    fn open(&self) -> Result<Box<dyn NameStream>> {
        Ok(Box::new(LineNameStream(Lines::open(&self.path)?)))
    }
}

impl NameStream for LineNameStream {
    fn next(&mut self, out: &mut Vec<u8>) -> Result<bool> {
        out.clear();
        let found = self.0.advance()?;
        if found {
            out.extend_from_slice(self.0.name());
        }
        Ok(found)
    }
}

/// Opens `--node-ids` as plain names, for formats whose ids are already positions.
pub fn open_names(request: &Request, workspace: &ImportWorkspace) -> Result<Option<LineNames>> {
    request.node_ids.as_ref().map(|path| LineNames::open(path, workspace)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, floats, integers, npy, shaped_integers};

    /// Opens the flags that `set` sets; `set` also writes the files.
    fn given(set: impl FnOnce(&Path, &mut Request)) -> Result<GivenFiles> {
        let directory = tempfile::tempdir().unwrap();
        let mut request = Request { format: "npy".into(), ..Request::default() };
        set(directory.path(), &mut request);
        inputs(&request)?;
        let result = fixture::in_workspace(|workspace| open(&request, workspace, None))?;
        if let Some(features) = &result.features {
            fixture::all_rows(&**features, 0)?;
        }
        Ok(result)
    }

    fn file(directory: &Path, name: &str, bytes: &[u8]) -> Option<PathBuf> {
        std::fs::write(directory.join(name), bytes).unwrap();
        Some(directory.join(name))
    }

    fn label_kind(name: &str, bytes: &[u8], set: impl FnOnce(&mut Request)) -> Result<LabelKind> {
        let given = given(|directory, request| {
            request.labels = file(directory, name, bytes);
            set(request);
        })?;
        Ok(given.labels.unwrap().kind)
    }

    fn message(set: impl FnOnce(&Path, &mut Request)) -> String {
        given(set).err().expect("an error").to_string()
    }

    #[test]
    fn label_kinds_follow_type_and_width() {
        let check = |name: &str, bytes: &[u8], kind| {
            assert_eq!(label_kind(name, bytes, |_| ()).unwrap(), kind, "{name}")
        };
        check("y.npy", &integers(&[0, 1]), LabelKind::Classes);
        check("y.npy", &shaped_integers("(2, 2)", &[0, 1, 1, 1]), LabelKind::Multilabel);
        check("y.npy", &floats("(2,)", &[0.0, 3.0]), LabelKind::Classes);
        check("y.npy", &floats("(2,)", &[0.0, 1.5]), LabelKind::Real);
        check("y.npy", &floats("(2, 2)", &[0.0, 1.0, 1.0, 0.0]), LabelKind::Multilabel);
        check("y.npy", &floats("(2, 2)", &[0.0, 2.0, 1.0, 0.0]), LabelKind::Real);
        check("y.csv", b"0\n1\n", LabelKind::Classes);
        check("y.csv", b"0.5\n1\n", LabelKind::Real);
        check("y.tsv", b"0\t1\n1\t1\n", LabelKind::Multilabel);
        let float = floats("(2,)", &[0.0, f32::NAN]);
        let kind = |set: fn(&mut Request)| label_kind("y.npy", &float, set).unwrap();
        assert_eq!(kind(|request| request.nan_is_unlabelled = true), LabelKind::Classes);
        assert_eq!(kind(|request| request.label_kind = Some(LabelKind::Classes)), LabelKind::Classes);
    }

    #[test]
    fn lengths_that_differ_are_named() {
        let found = message(|directory, request| {
            request.features = file(directory, "x.npy", &floats("(3, 2)", &[0.0; 6]));
            request.labels = file(directory, "y.npy", &integers(&[0, 1]));
        });
        assert!(found.contains("y.npy: expected 3 label rows, as") && found.ends_with("found 2"), "{found}");
        let found = message(|directory, request| {
            request.nodes = Some(3);
            request.train = file(directory, "a.npy", &npy("|b1", "(2,)", &[1, 0]));
        });
        assert!(found.contains("a.npy: expected 3 mask entries, as --nodes"), "{found}");
        let found = message(|directory, request| {
            request.nodes = Some(3);
            request.split = Some(SplitChoice::File(file(directory, "s.npy", &integers(&[0, 1])).unwrap()));
        });
        assert!(found.contains("s.npy: expected 3 split codes"), "{found}");
    }

    #[test]
    fn files_that_are_missing_or_of_another_type_are_named() {
        let found = message(|directory, request| request.labels = Some(directory.join("y.npy")));
        assert!(found.contains("y.npy: not found; --labels names it"), "{found}");
        let found = message(|directory, request| request.features = file(directory, "x.h5", b"?"));
        assert!(found.contains("x.h5: expected a file called .npy, .csv"), "{found}");
        let found = message(|directory, request| request.features = file(directory, "x.npy", b"1,2\n"));
        assert!(found.contains("x.npy: expected a numpy array"), "{found}");
    }

    #[test]
    fn lists_come_as_npy_masks_or_text_and_some_may_be_absent() {
        let given = given(|directory, request| {
            request.nodes = Some(4);
            request.train = file(directory, "a.npy", &npy("|b1", "(4,)", &[1, 0, 0, 1]));
            request.test = file(directory, "c.csv.gz", &fixture::gzip(b"2\n1\n"));
        });
        let Splits::Nodes { train, valid, .. } = given.unwrap().splits else { panic!("lists") };
        assert_eq!(fixture::all_ids(&*valid).unwrap(), [0u64; 0]);
        // The files are deleted with their directory: opening must fail instead of returning nothing.
        assert!(fixture::all_ids(&*train).is_err());
    }

    #[test]
    fn contradicting_flags_are_refused() {
        let request = Request { nodes: Some(3), ..Request::default() };
        let nodes = fixture::in_workspace(|workspace| open(&request, workspace, Some((2, "--indptr"))));
        assert_eq!(nodes.err().unwrap().to_string(), "--nodes says 3, but --indptr has 2");
        let both = message(|directory, request| {
            request.features = file(directory, "x.npy", &floats("(1, 1)", &[0.0]));
            request.features_csr = file(directory, "x.npz", b"");
        });
        assert!(both.contains("not both"), "{both}");
        let both = message(|directory, request| {
            request.train = file(directory, "a.npy", &integers(&[0]));
            request.split = Some(SplitChoice::File(file(directory, "s.npy", &integers(&[0])).unwrap()));
        });
        assert!(both.contains("not both"), "{both}");
    }
}
