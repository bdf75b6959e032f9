//! Datasets of the Open Graph Benchmark. Those whose split is of edges are read by `ogb_link.rs`. Node datasets, as unpacked from their csv archives: `raw/edge.csv.gz` and the files
//! next to it, `split/<name>/train.csv.gz`. Edges are stored as they are; `--add-reverse` corresponds to
//! `add_inverse_edge` in OGB's loader.

use super::Format;
use super::ogb_link::OgbLinkFiles;
use crate::delimited::{DelimitedRecords, Dialect, EdgeLayout, TextEdges, TextRows};
use crate::idlist::TextIds;
use crate::source::{IdSource, ImportSource, LabelKind, NodeLabels, RowSource, Splits, Treatment};
use crate::{ImportError, ImportWorkspace, Location, Request, Result, input};
use std::path::{Path, PathBuf};

pub(super) const DIALECT: Dialect = Dialect { delimiter: b',', header: false };

/// The format.
pub struct Ogb;

impl Format for Ogb {
    fn name(&self) -> &'static str {
        "ogb"
    }

    fn about(&self) -> &'static str {
        "an OGB dataset of nodes or links: --from the directory with raw/ and split/; --name chooses among several splits"
    }

    fn flags(&self) -> Vec<&'static str> {
        vec!["from", "name"]
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        if let Some(files) = OgbLinkFiles::find(request)? {
            return Ok(files.inputs());
        }
        let files = OgbFiles::find(request)?;
        let all =
            [Some(files.edges), files.features, files.labels, Some(files.nodes_count), files.edges_count];
        Ok(all.into_iter().flatten().chain(files.split.into_iter().flatten()).collect())
    }

    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        if let Some(files) = OgbLinkFiles::find(request)? {
            return files.open(workspace);
        }
        let files = OgbFiles::find(request)?;
        let nodes = read_count(&files.nodes_count)?;
        if let Ok(unread) = input::plain_or_gz(&files.edges.with_file_name("edge-feat.csv"), "") {
            workspace.progress.note(&format!("{}: edge features of OGB are not read", unread.display()));
        }
        let count = files.edges_count.as_deref().map(read_count).transpose()?;
        let edges = TextEdges {
            path: files.edges.clone(),
            dialect: DIALECT,
            layout: EdgeLayout::ENDS,
            relations: None,
            count,
        };
        let features = match &files.features {
            Some(path) => Some(Box::new(TextRows::new(path, DIALECT, nodes, false)?) as Box<dyn RowSource>),
            None => {
                workspace.progress.note("raw/ has no node-feat.csv: the dataset will have no features");
                None
            }
        };
        let labels = files.labels.as_deref().map(|path| open_labels(path, nodes, request)).transpose()?;
        let splits = match files.split {
            None => Splits::None,
            Some([train, valid, test]) => {
                let ids =
                    |path: PathBuf| -> Result<Box<dyn IdSource>> { Ok(Box::new(TextIds::open(&path)?)) };
                Splits::Nodes { train: ids(train)?, valid: ids(valid)?, test: ids(test)? }
            }
        };
        Ok(ImportSource {
            nodes: Some(nodes),
            edges: Box::new(edges),
            features,
            labels,
            splits,
            usual: Treatment::AS_STORED,
            node_names: None,
            relation_names: Vec::new(),
            class_names: Vec::new(),
        })
    }
}

/// One column means classes, several mean multilabel. An empty field or NaN means no label.
fn open_labels(path: &Path, nodes: u64, request: &Request) -> Result<NodeLabels> {
    let rows = TextRows::new(path, DIALECT, nodes, true)?;
    let guess = if rows.dim() == 1 { LabelKind::Classes } else { LabelKind::Multilabel };
    let kind = request.label_kind.unwrap_or(guess);
    Ok(NodeLabels { kind, rows: Box::new(rows), nan_is_unlabelled: true })
}

struct OgbFiles {
    edges: PathBuf,
    features: Option<PathBuf>,
    labels: Option<PathBuf>,
    nodes_count: PathBuf,
    edges_count: Option<PathBuf>,
    split: Option<[PathBuf; 3]>,
}

impl OgbFiles {
    fn find(request: &Request) -> Result<OgbFiles> {
        let from = request.need(&request.from, "--from DIR")?;
        let need = "an OGB node dataset has it; datasets with several node types are not read";
        let raw = |name: &str| input::plain_or_gz(&from.join("raw").join(name), need);
        let split = match split_directory(from, request.name.as_deref())? {
            None => None,
            Some(directory) => {
                let file = |name: &str| input::plain_or_gz(&directory.join(name), "each OGB split has it");
                Some([file("train.csv")?, file("valid.csv")?, file("test.csv")?])
            }
        };
        Ok(OgbFiles {
            edges: raw("edge.csv")?,
            features: raw("node-feat.csv").ok(),
            labels: raw("node-label.csv").ok(),
            nodes_count: raw("num-node-list.csv")?,
            edges_count: raw("num-edge-list.csv").ok(),
            split,
        })
    }
}

/// The directory of the split called `name`, or of the only split.
pub(super) fn split_directory(from: &Path, name: Option<&str>) -> Result<Option<PathBuf>> {
    let parent = from.join("split");
    if let Some(name) = name {
        let directory = parent.join(name);
        if directory.is_dir() {
            return Ok(Some(directory));
        }
        let need = "--name names a split of this dataset";
        return Err(ImportError::Missing { path: directory, need });
    }
    let Ok(entries) = std::fs::read_dir(&parent) else { return Ok(None) };
    let mut splits: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    splits.sort();
    match &splits[..] {
        [] => Ok(None),
        [one] => Ok(Some(one.clone())),
        several => {
            let names: Vec<_> = several.iter().filter_map(|path| path.file_name()?.to_str()).collect();
            let found = format!("{}; choose one with --name", names.join(", "));
            Err(Location::file(&parent).bad("one split", found))
        }
    }
}

/// The only number in a file: OGB writes one per graph.
pub(super) fn read_count(path: &Path) -> Result<u64> {
    let mut records = DelimitedRecords::open(path, DIALECT)?;
    if !records.advance()? {
        return Err(Location::file(path).bad("a number", "an empty file"));
    }
    let count = records.id(0, "a count")?;
    if records.width() != 1 || records.advance()? {
        return Err(Location::file(path).bad("one graph, so one number", "more"));
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn dataset() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let bytes =
                if name.ends_with(".gz") { fixture::gzip(text.as_bytes()) } else { text.as_bytes().to_vec() };
            std::fs::write(path, bytes).unwrap();
        };
        write("raw/edge.csv.gz", "0,1\n2,1\n");
        write("raw/node-feat.csv", "0.5,1\n1.5,2\n2.5,3\n");
        write("raw/node-label.csv.gz", "4\n\"\"\n1.0\n");
        write("raw/num-node-list.csv.gz", "3\n");
        write("raw/num-edge-list.csv.gz", "2\n");
        write("split/time/train.csv.gz", "0\n");
        write("split/time/valid.csv.gz", "2\n");
        write("split/time/test.csv.gz", "1\n");
        directory
    }

    fn open(directory: &Path, name: Option<&str>) -> Result<ImportSource> {
        let from = Some(directory.to_path_buf());
        let request = Request { from, name: name.map(Into::into), ..Request::default() };
        Ogb.inputs(&request)?;
        let source = fixture::in_workspace(|workspace| Ogb.open(&request, workspace))?;
        fixture::all_edges(&*source.edges, 0)?;
        fixture::all_rows(&**source.features.as_ref().unwrap(), 0)?;
        Ok(source)
    }

    fn message(file: &str, text: &str) -> String {
        let directory = dataset();
        let _ = std::fs::remove_file(directory.path().join(format!("{file}.gz")));
        std::fs::write(directory.path().join(file), text).unwrap();
        open(directory.path(), None).err().expect("an error").to_string()
    }

    #[test]
    fn packed_and_unpacked_files_make_a_dataset() {
        let directory = dataset();
        let source = open(directory.path(), None).unwrap();
        assert_eq!((source.nodes, source.edges.count()), (Some(3), Some(2)));
        assert_eq!(fixture::all_edges(&*source.edges, 0).unwrap(), [(0, 1), (2, 1)]);
        assert_eq!(fixture::all_rows(&*source.features.unwrap(), 1).unwrap(), [1.5, 2.0, 2.5, 3.0]);
        let labels = fixture::all_rows(&*source.labels.unwrap().rows, 0).unwrap();
        assert!(labels[0] == 4.0 && labels[1].is_nan() && labels[2] == 1.0);
        let Splits::Nodes { valid, .. } = source.splits else { panic!("lists") };
        assert_eq!(fixture::all_ids(&*valid).unwrap(), [2]);
    }

    #[test]
    fn several_label_columns_are_multilabel() {
        let directory = dataset();
        std::fs::write(directory.path().join("raw/node-label.csv"), "0,1\n1,1\n0,0\n").unwrap();
        assert_eq!(open(directory.path(), None).unwrap().labels.unwrap().kind, LabelKind::Multilabel);
    }

    #[test]
    fn several_splits_want_a_name() {
        let directory = dataset();
        std::fs::create_dir_all(directory.path().join("split/random")).unwrap();
        let found = open(directory.path(), None).err().unwrap().to_string();
        assert!(found.contains("random, time; choose one with --name"), "{found}");
        assert!(open(directory.path(), Some("time")).is_ok());
        assert!(
            open(directory.path(), Some("sales")).err().unwrap().to_string().contains("sales: not found")
        );
    }

    #[test]
    fn counts_that_disagree_are_named() {
        let found = message("raw/edge.csv", "0,1\n");
        assert!(found.contains("edge.csv: expected 2 edges, found 1 edges"), "{found}");
        let found = message("raw/edge.csv", "0,1\n1,2\n2,0\n");
        assert!(found.contains("edge.csv: expected 2 edges, found 3 edges"), "{found}");
        assert!(message("raw/node-feat.csv", "1,2\n").contains("expected 3 rows, found 1 rows"));
        assert!(message("raw/num-node-list.csv", "3\n4\n").contains("expected one graph"));
        assert!(message("raw/num-node-list.csv", "x\n").contains("expected a count"));
        assert!(message("raw/num-node-list.csv", "").contains("an empty file"));
    }

    #[test]
    fn a_dataset_without_edges_says_which_file_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        assert!(open(directory.path(), None).err().unwrap().to_string().contains("edge.csv: not found"));
    }
}
