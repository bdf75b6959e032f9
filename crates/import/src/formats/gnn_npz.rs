//! The npz files of "Pitfalls of Graph Neural Network Evaluation" (Shchur et al., 2018): Amazon, Coauthor, and
//! others saved the same way. There are two layouts: in the original, sparse matrices are plain arrays (`adj_data`,
//! `adj_indices`, ...); copies have whole scipy matrices as pickles (`adj_matrix`, `node_attr`).

use super::{Format, classes};
use crate::csr::{CsrEdges, CsrRows, check_columns};
use crate::given;
use crate::input::{self, Member};
use crate::npy::{Header, NpyArray, NpyRows, find_member};
use crate::pickle;
use crate::source::{EdgeSource, ImportSource, RowSource, Splits, Treatment};
use crate::{ImportWorkspace, Request, Result};
use std::path::{Path, PathBuf};

pub(super) struct GnnNpz;

/// A pickled matrix is in memory twice for a moment: in the file's form and in Esker's.
const COPIES: u64 = 2;
/// Class names take a few hundred bytes; the metadata around them (names of nodes and attributes) may take more.
const METADATA_BYTES: u64 = 64 << 20;

impl Format for GnnNpz {
    fn name(&self) -> &'static str {
        "gnn-npz"
    }
    fn about(&self) -> &'static str {
        "gnn-benchmark npz (Amazon, Coauthor): --from FILE.npz; edges are made undirected"
    }
    fn flags(&self) -> Vec<&'static str> {
        super::FROM.to_vec()
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let from = request.need(&request.from, "--from FILE.npz")?;
        let mut inputs = vec![input::existing(from, "the npz to import")?];
        inputs.extend(given::split_inputs(request)?);
        Ok(inputs)
    }
    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let path = request.need(&request.from, "--from FILE.npz")?;
        let archive = Archive { path, members: input::zip_members(path)? };
        let (nodes, edges) = archive.edges(workspace)?;
        let features = archive.features(workspace)?;
        if let Some(features) = features.as_ref().filter(|features| features.rows() != nodes) {
            let expected = format!("{nodes} feature rows, one a node");
            return Err(features.location(0).bad(expected, features.rows()));
        }
        let labels = match archive.find(&["node_label", "labels"]) {
            Some(name) => Some(classes::from_npy(archive.array(name)?, nodes, request, false)?),
            None => None,
        };
        Ok(ImportSource {
            nodes: Some(nodes),
            edges,
            features,
            labels,
            splits: given::open_named_splits(request, workspace, nodes)?.unwrap_or(Splits::None),
            usual: Treatment::UNDIRECTED,
            node_names: None,
            relation_names: Vec::new(),
            class_names: archive.class_names(workspace)?,
        })
    }
}

struct Archive<'a> {
    path: &'a Path,
    members: Vec<Member>,
}

impl Archive<'_> {
    fn find<'n>(&self, names: &[&'n str]) -> Option<&'n str> {
        let has = |name: &str| self.members.iter().any(|m| m.name.strip_suffix(".npy") == Some(name));
        names.iter().copied().find(|name| has(name))
    }

    fn array(&self, name: &str) -> Result<NpyArray> {
        NpyArray::member(&self.members, self.path, name)
    }

    fn member(&self, name: &str) -> Result<&Member> {
        find_member(&self.members, self.path, name)
    }

    /// Number of nodes, and the entries of the adjacency matrix.
    fn edges(&self, workspace: &mut ImportWorkspace) -> Result<(u64, Box<dyn EdgeSource>)> {
        let (shape, (starts, columns)) = if self.find(&["adj_indptr"]).is_some() {
            let matrix = CsrRows::open(&self.members, self.path, "adj_")?;
            let bytes = matrix.entries().saturating_mul(4) + matrix.rows().saturating_mul(8);
            workspace.hold("the adjacency matrix", bytes.saturating_mul(COPIES))?;
            ((matrix.rows(), matrix.dim() as u64), matrix.structure()?)
        } else {
            let member = self.member("adj_matrix")?;
            let bytes = held(workspace, "the adjacency matrix", member)?;
            let pickle = pickle::read_object_npy(&bytes, &member.location())?;
            let matrix = pickle.sparse(pickle.root())?;
            ((matrix.rows, matrix.columns), matrix.structure()?)
        };
        if shape.0 != shape.1 {
            let location = crate::Location::at(self.path, "adjacency matrix");
            return Err(location.bad("as many rows as columns", format!("{} x {}", shape.0, shape.1)));
        }
        Ok((shape.0, Box::new(CsrEdges::new(self.path, starts, columns))))
    }

    fn features(&self, workspace: &mut ImportWorkspace) -> Result<Option<Box<dyn RowSource>>> {
        if self.find(&["attr_indptr"]).is_some() {
            let matrix = CsrRows::open(&self.members, self.path, "attr_")?;
            check_columns(matrix.dim() as u64, self.member("attr_shape")?.location())?;
            return Ok(Some(Box::new(matrix)));
        }
        let Some(name) = self.find(&["node_attr", "attr_matrix"]) else { return Ok(None) };
        let member = self.member(name)?;
        if Header::read(&mut member.open()?, &member.location())?.descr != "|O" {
            return Ok(Some(Box::new(NpyRows::new(self.array(name)?)?)));
        }
        let bytes = held(workspace, "the feature matrix", member)?;
        let pickle = pickle::read_object_npy(&bytes, &member.location())?;
        Ok(Some(Box::new(pickle.sparse(pickle.root())?.to_rows(self.path)?)))
    }

    /// From an array of their own, or from a dictionary of metadata.
    fn class_names(&self, workspace: &mut ImportWorkspace) -> Result<Vec<String>> {
        let Some(name) = self.find(&["class_names", "metadata"]) else { return Ok(Vec::new()) };
        let member = self.member(name)?;
        if member.bytes > METADATA_BYTES {
            workspace.progress.note(&format!("{}: too long to look for names of classes", member.location()));
            return Ok(Vec::new());
        }
        let bytes = member.read_whole(METADATA_BYTES)?;
        let mut rest = &bytes[..];
        let header = Header::read(&mut rest, &member.location())?;
        if header.descr != "|O" {
            let names = pickle::strings_of(&header.descr, rest);
            return names.ok_or_else(|| member.location().bad("strings", format!("dtype {}", header.descr)));
        }
        let pickle = pickle::read(rest, &member.location())?;
        match (name, pickle.get(pickle.root(), "class_names")) {
            ("class_names", _) => pickle.strings(pickle.root()),
            (_, Some(names)) => pickle.strings(names),
            _ => Ok(Vec::new()),
        }
    }
}

fn held(workspace: &mut ImportWorkspace, what: &str, member: &Member) -> Result<Vec<u8>> {
    workspace.hold(what, member.bytes.saturating_mul(COPIES))?;
    member.read_whole(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn open(path: &Path) -> Result<ImportSource> {
        let request = Request { from: Some(path.to_path_buf()), ..Request::default() };
        GnnNpz.inputs(&request)?;
        fixture::in_workspace(|workspace| GnnNpz.open(&request, workspace))
    }

    fn check_tiny(source: &ImportSource) {
        assert_eq!(source.nodes, Some(4));
        assert_eq!(source.usual, Treatment::UNDIRECTED);
        assert_eq!(fixture::all_edges(&*source.edges, 0).unwrap(), [(0, 1), (1, 0), (3, 2)]);
        let features = source.features.as_ref().unwrap();
        assert_eq!(fixture::all_rows(&**features, 3).unwrap(), [0.0, 3.0, 4.0]);
        let labels = source.labels.as_ref().unwrap();
        assert_eq!(fixture::all_rows(&*labels.rows, 0).unwrap(), [0.0, 1.0, 1.0, 0.0]);
        assert_eq!(source.class_names, ["cat", "dog"]);
    }

    fn original(labels: Vec<u8>) -> Vec<(&'static str, Vec<u8>)> {
        vec![
            ("adj_data.npy", fixture::floats("(3,)", &[1.0; 3])),
            ("adj_indices.npy", fixture::integers(&[1, 0, 2])),
            ("adj_indptr.npy", fixture::integers(&[0, 1, 2, 2, 3])),
            ("adj_shape.npy", fixture::integers(&[4, 4])),
            ("attr_data.npy", fixture::floats("(4,)", &[1.5, 2.0, 3.0, 4.0])),
            ("attr_indices.npy", fixture::integers(&[1, 0, 1, 2])),
            ("attr_indptr.npy", fixture::integers(&[0, 1, 2, 2, 4])),
            ("attr_shape.npy", fixture::integers(&[4, 3])),
            ("labels.npy", labels),
            ("class_names.npy", fixture::npy("|S3", "(2,)", b"catdog")),
        ]
    }

    fn open_original(labels: Vec<u8>) -> Result<ImportSource> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tiny.npz");
        fixture::write_zip(&path, &original(labels));
        let source = open(&path)?;
        // The features stream from the file: check them while it exists.
        check_tiny(&source);
        Ok(source)
    }

    #[test]
    fn pickled_matrices_and_plain_arrays_give_the_same_graph() {
        check_tiny(&open(&fixture::committed("gnn.npz")).unwrap());
        open_original(fixture::integers(&[0, 1, 1, 0])).unwrap();
    }

    #[test]
    fn labels_that_do_not_fit_are_refused() {
        let message = open_original(fixture::integers(&[0, 1, 1])).err().unwrap().to_string();
        assert!(message.contains("labels.npy") && message.contains("4 labels"), "{message}");
        let message = open_original(fixture::floats("(4,)", &[0.5; 4])).err().unwrap().to_string();
        assert!(message.contains("whole numbers") && message.contains("dtype f32"), "{message}");
    }

    #[test]
    fn a_file_without_a_graph_says_what_it_has() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("other.npz");
        fixture::write_zip(&path, &[("x.npy", fixture::integers(&[1]))]);
        let message = open(&path).err().unwrap().to_string();
        assert!(message.contains("adj_matrix") && message.contains("x.npy"), "{message}");
    }

    fn check_real(name: &str, nodes: u64, stored: u64, dim: usize, entries: usize, classes: usize) {
        let Some(path) = fixture::real_data(name) else { return };
        let source = open(&path).unwrap();
        assert_eq!((source.nodes, source.edges.count()), (Some(nodes), Some(stored)));
        let edges = fixture::all_edges(&*source.edges, 0).unwrap();
        assert!(edges.iter().all(|(source, target)| *source < nodes && *target < nodes));
        let features = source.features.unwrap();
        assert_eq!((features.rows(), features.dim()), (nodes, dim));
        let set = fixture::all_rows(&*features, 0).unwrap().iter().filter(|value| **value != 0.0).count();
        assert_eq!(set, entries);
        let labels = fixture::all_rows(&*source.labels.unwrap().rows, 0).unwrap();
        assert_eq!(labels.iter().copied().fold(0.0, f32::max), classes as f32 - 1.0);
        assert_eq!(source.class_names.len(), classes);
        let both: rustc_hash::FxHashSet<_> = edges.iter().flat_map(|(a, b)| [(*a, *b), (*b, *a)]).collect();
        assert_eq!(both.len(), if name.starts_with("amazon") { 491_722 } else { 163_788 });
    }

    #[test]
    fn amazon_computers_has_its_published_size() {
        check_real("amazon_computers/amazon_cs.npz", 13_752, 287_209, 767, 3_675_081, 10);
    }

    #[test]
    fn coauthor_cs_has_its_published_size() {
        check_real("coauthor_cs/coauthor_cs.npz", 18_333, 163_788, 6_805, 1_092_079, 15);
    }
}
