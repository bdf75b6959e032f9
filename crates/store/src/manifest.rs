//! The description of a dataset: counts, dtypes and files. This is the schema of `esker.json`.

use crate::shared_disk::SharedDisk;
use crate::{ArrayFile, FileEntry, ManifestProblem, Result, StoreError, sealed};
use esker_types::Dtype;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// The version this code writes, and the newest it can read.
pub const FORMAT_VERSION: u32 = 1;

/// Largest number of nodes or edges. No disk fits more, and the bound keeps sums within 64 bits.
pub const MOST_NODES: u64 = 1 << 56;

/// Names of the files a dataset may have.
pub mod file {
    #![allow(missing_docs)]
    pub const MANIFEST: &str = "esker.json";
    pub const IN_OFFSETS: &str = "in-offsets";
    pub const IN_NEIGHBOURS: &str = "in-neighbours";
    pub const OUT_OFFSETS: &str = "out-offsets";
    pub const OUT_NEIGHBOURS: &str = "out-neighbours";
    pub const OUT_EDGE_IDS: &str = "out-edge-ids";
    pub const EDGE_RELATION: &str = "edge-relation";
    pub const EDGE_POSITION: &str = "edge-position";
    pub const EDGE_WEIGHT: &str = "edge-weight";
    pub const EDGE_TIME: &str = "edge-time";
    pub const EDGE_FEATURES: &str = "edge-features";
    pub const NODE_FEATURES: &str = "node-features";
    pub const NODE_FEATURE_SCALES: &str = "node-feature-scales";
    pub const NODE_LABELS: &str = "node-labels";
    pub const NODE_NAMES: &str = "node-names";
    pub const RELATION_NAMES: &str = "relation-names";
    pub const CLASS_NAMES: &str = "class-names";
    pub const SPLIT_TRAIN: &str = "split-train";
    pub const SPLIT_VALID: &str = "split-valid";
    pub const SPLIT_TEST: &str = "split-test";
    pub const VALID_NEGATIVE_EDGES: &str = "valid-negative-edges";
    pub const VALID_NEGATIVE_SOURCES: &str = "valid-negative-sources";
    pub const VALID_NEGATIVE_TARGETS: &str = "valid-negative-targets";
    pub const TEST_NEGATIVE_EDGES: &str = "test-negative-edges";
    pub const TEST_NEGATIVE_SOURCES: &str = "test-negative-sources";
    pub const TEST_NEGATIVE_TARGETS: &str = "test-negative-targets";
}

/// A dataset's manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format version.
    pub esker: u32,
    /// Seal over the whole file.
    pub checksum: String,
    /// Content id: a hash over all files. Derived data is tied to it.
    pub id: String,
    /// Program and version that wrote it.
    pub made_by: String,
    /// Where the data came from.
    pub source: Provenance,
    /// Nodes, their features and labels.
    pub nodes: NodeInfo,
    /// Edges and their columns.
    pub edges: EdgeInfo,
    /// Training, validation and test splits.
    pub splits: Option<SplitInfo>,
    /// All arrays.
    pub files: Vec<FileEntry>,
}

/// Where the data came from. Nothing in here depends on the machine, its memory or its threads.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Provenance {
    /// The source format, or `generate`.
    pub format: String,
    /// Options of the import, given or chosen.
    pub options: BTreeMap<String, serde_json::Value>,
}

/// Nodes, their features and labels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Number of nodes.
    pub count: u64,
    /// Node types; one for now.
    pub types: Vec<String>,
    /// Feature rows.
    pub features: Option<FeatureInfo>,
    /// Labels.
    pub labels: Option<LabelInfo>,
    /// Whether nodes have string ids.
    pub named: bool,
}

/// Feature rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FeatureInfo {
    /// Numbers per row.
    pub dim: u64,
    /// Dtype of a stored number.
    pub dtype: Dtype,
    /// For 8-bit rows: whether stored numbers must be multiplied by a scale per column.
    pub scaled: bool,
    /// Whether each row was divided by its sum.
    pub row_normalised: bool,
}

/// The meaning of labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LabelKind {
    /// One class per node, i32, -1 for none.
    Classes,
    /// One byte per node and class: 0, 1, or 255 for unknown.
    Multilabel,
    /// f32 values, NaN for none.
    Real,
}

/// Labels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LabelInfo {
    /// Their meaning.
    pub kind: LabelKind,
    /// Number of classes (or of columns, for real values).
    pub classes: u64,
    /// Number of labelled nodes.
    pub labelled: u64,
    /// Whether classes have names.
    pub named: bool,
}

/// Edges and their columns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EdgeInfo {
    /// Number of edges. The two directions of an undirected edge count separately.
    pub count: u64,
    /// Edge types; one for now.
    pub types: Vec<String>,
    /// Whether every edge is known to have its reverse.
    pub undirected: bool,
    /// The largest in-degree.
    pub max_in_degree: u64,
    /// Nodes without in-neighbours.
    pub without_in_neighbours: u64,
    /// Whether out-neighbours are stored too.
    pub out_neighbours: bool,
    /// Relations.
    pub relations: Option<RelationInfo>,
    /// Further columns by edge id.
    pub columns: Vec<EdgeColumn>,
}

/// Relations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RelationInfo {
    /// Number of relations.
    pub count: u64,
    /// Whether they have names.
    pub named: bool,
}

/// A column by edge id.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EdgeColumn {
    /// Its file.
    pub name: String,
    /// Elements per row.
    pub width: u64,
    /// Element type.
    pub dtype: Dtype,
}

/// The items that splits divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SplitOver {
    /// Node ids, ascending.
    Nodes,
    /// Every edge of the graph trains; validation and test edges are (source, target, relation) rows.
    Edges,
}

/// Sizes of the splits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SplitInfo {
    /// The items that are divided.
    pub over: SplitOver,
    /// Training items.
    pub train: u64,
    /// Validation items.
    pub valid: u64,
    /// Test items.
    pub test: u64,
    /// Files of fixed negatives, of splits over edges.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub negatives: Vec<NegativeFile>,
}

/// A file of negatives that a benchmark fixed for a split.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NegativeFile {
    /// Its name: one of `valid-negative-...` and `test-negative-...`.
    pub name: String,
    /// Negative edges, if they are shared by all edges of the split; else nodes per edge.
    pub count: u64,
}

impl SplitInfo {
    /// Rows and columns of a file of negatives: edges that a split shares, or nodes for each of its edges.
    fn negative_file(&self, given: &NegativeFile) -> Option<(u64, u64)> {
        match given.name.as_str() {
            file::VALID_NEGATIVE_EDGES | file::TEST_NEGATIVE_EDGES => Some((given.count, 3)),
            file::VALID_NEGATIVE_SOURCES | file::VALID_NEGATIVE_TARGETS => Some((self.valid, given.count)),
            file::TEST_NEGATIVE_SOURCES | file::TEST_NEGATIVE_TARGETS => Some((self.test, given.count)),
            _ => None,
        }
    }
}

impl Manifest {
    /// Fills in the content id and blanks the seal.
    pub fn complete(mut self) -> Manifest {
        self.files.sort_by(|a, b| a.name.cmp(&b.name));
        self.id = content_id(&self.files);
        self.checksum = sealed::OPEN.to_string();
        self
    }

    /// The text of `esker.json`.
    pub fn to_text(&self) -> String {
        sealed::seal(self)
    }

    /// Reads `esker.json`; the path is for messages.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Manifest> {
        // The seal first: a flipped version is damage. Then only the version: a newer format may have another schema.
        #[derive(Deserialize)]
        struct VersionOnly {
            esker: u64,
        }
        let VersionOnly { esker: found } = sealed::unseal(bytes, path)?;
        if found > FORMAT_VERSION as u64 {
            return Err(StoreError::Version { path: path.to_path_buf(), found, supported: FORMAT_VERSION });
        }
        let manifest: Manifest = sealed::unseal(bytes, path)?;
        manifest.check(path)?;
        Ok(manifest)
    }

    /// The entry of a file.
    pub fn entry(&self, name: &str) -> Option<&FileEntry> {
        self.files.iter().find(|entry| entry.name == name)
    }

    /// Bytes of all arrays and the manifest itself.
    pub fn bytes(&self) -> u64 {
        let text_bytes = self.to_text().len() as u64;
        self.files.iter().fold(text_bytes, |sum, entry| sum.saturating_add(entry.bytes))
    }

    /// The dtype of stored node ids.
    pub fn id_dtype(&self) -> Dtype {
        self.entry(file::IN_NEIGHBOURS).map_or(Dtype::U32, |entry| entry.dtype)
    }

    /// Checks that the parts of the manifest agree with each other.
    fn check(&self, path: &Path) -> Result<()> {
        let damaged = |problem| Err(StoreError::manifest(path, problem));
        if self.id != content_id(&self.files) {
            return damaged(ManifestProblem::WrongId);
        }
        check_names(&self.files, path)?;
        let classes = self.nodes.labels.as_ref().map_or(0, |labels| labels.classes);
        let relations = self.edges.relations.as_ref().map_or(0, |relations| relations.count);
        let counts = [self.nodes.count, self.edges.count, classes, relations];
        if let Some(count) = counts.into_iter().find(|count| *count > MOST_NODES) {
            return damaged(ManifestProblem::Count { count });
        }
        for (name, rows, columns, dtypes) in self.expected_files() {
            let Some(entry) = self.entry(&name) else {
                return damaged(ManifestProblem::NoFile { name });
            };
            let fits = rows.is_none_or(|rows| rows == entry.rows)
                && columns == entry.columns
                && dtypes.contains(&entry.dtype);
            if !fits {
                return damaged(ManifestProblem::FileShape {
                    name,
                    rows,
                    columns,
                    dtypes,
                    found_rows: entry.rows,
                    found_columns: entry.columns,
                    found_dtype: entry.dtype,
                });
            }
        }
        Ok(())
    }

    /// The files that the counts require: name, rows if they are known, columns, allowed dtypes.
    fn expected_files(&self) -> Vec<(String, Option<u64>, u64, Vec<Dtype>)> {
        let (nodes, edges) = (self.nodes.count, self.edges.count);
        let ids = vec![Dtype::U32, Dtype::U64];
        let mut files = vec![
            (file::IN_OFFSETS.to_string(), Some(nodes + 1), 1, vec![Dtype::U64]),
            (file::IN_NEIGHBOURS.to_string(), Some(edges), 1, ids.clone()),
        ];
        if self.edges.out_neighbours {
            files.push((file::OUT_OFFSETS.into(), Some(nodes + 1), 1, vec![Dtype::U64]));
            files.push((file::OUT_NEIGHBOURS.into(), Some(edges), 1, ids.clone()));
            files.push((file::OUT_EDGE_IDS.into(), Some(edges), 1, ids.clone()));
        }
        if let Some(relations) = &self.edges.relations {
            files.push((file::EDGE_RELATION.into(), Some(edges), 1, vec![Dtype::U32]));
            if relations.named {
                push_names(&mut files, file::RELATION_NAMES, relations.count);
            }
        }
        for column in &self.edges.columns {
            files.push((column.name.clone(), Some(edges), column.width, vec![column.dtype]));
        }
        if let Some(features) = &self.nodes.features {
            files.push((file::NODE_FEATURES.into(), Some(nodes), features.dim, vec![features.dtype]));
            if features.scaled {
                files.push((file::NODE_FEATURE_SCALES.into(), Some(features.dim), 1, vec![Dtype::F32]));
            }
        }
        if let Some(labels) = &self.nodes.labels {
            let (columns, dtype) = match labels.kind {
                LabelKind::Classes => (1, Dtype::I32),
                LabelKind::Multilabel => (labels.classes, Dtype::U8),
                LabelKind::Real => (labels.classes, Dtype::F32),
            };
            files.push((file::NODE_LABELS.into(), Some(nodes), columns, vec![dtype]));
            if labels.named {
                push_names(&mut files, file::CLASS_NAMES, labels.classes);
            }
        }
        if self.nodes.named {
            push_names(&mut files, file::NODE_NAMES, nodes);
        }
        if let Some(splits) = &self.splits {
            let columns = if splits.over == SplitOver::Nodes { 1 } else { 3 };
            if splits.over == SplitOver::Nodes {
                files.push((file::SPLIT_TRAIN.into(), Some(splits.train), 1, ids.clone()));
            }
            files.push((file::SPLIT_VALID.into(), Some(splits.valid), columns, ids.clone()));
            files.push((file::SPLIT_TEST.into(), Some(splits.test), columns, ids.clone()));
            for given in &splits.negatives {
                // No file has 0 columns, so an unknown name is damage.
                let (rows, columns) = splits.negative_file(given).unwrap_or((given.count, 0));
                files.push((given.name.clone(), Some(rows), columns, ids.clone()));
            }
        }
        files
    }

    /// Opens every file and checks lengths and headers.
    pub(crate) fn open_files(&self, disk: &SharedDisk, directory: &Path) -> Result<Vec<ArrayFile>> {
        self.files.iter().map(|entry| ArrayFile::open_on(disk, directory, entry)).collect()
    }
}

type Expected = (String, Option<u64>, u64, Vec<Dtype>);

fn push_names(files: &mut Vec<Expected>, name: &str, count: u64) {
    files.push((format!("{name}-offsets"), Some(count + 1), 1, vec![Dtype::U64]));
    files.push((format!("{name}-bytes"), None, 1, vec![Dtype::U8]));
}

/// Reports a name that could leave the directory as damage.
pub(crate) fn check_names(files: &[FileEntry], path: &Path) -> Result<()> {
    match files.iter().find(|entry| !plain_name(&entry.name)) {
        Some(bad) => Err(StoreError::manifest(path, ManifestProblem::FileName { name: bad.name.clone() })),
        None => Ok(()),
    }
}

/// Lower-case letters, digits and dashes: nothing that could leave the directory.
pub(crate) fn plain_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// A hash over names, shapes and checksums of files.
pub(crate) fn content_id(files: &[FileEntry]) -> String {
    let mut hash = Xxh3::new();
    for entry in files {
        let line =
            format!("{} {} {} {} {}\n", entry.name, entry.dtype, entry.rows, entry.columns, entry.sums);
        hash.update(line.as_bytes());
    }
    format!("{:032x}", hash.digest128())
}
