//! Link datasets of the Open Graph Benchmark (`ogbl-...`), as unpacked from their archives. `raw/` has the training edges
//! as text or, for vessel, in `data.npz`. `split/<name>/valid.pt` and `test.pt` have held-out edges with fixed negatives,
//! in one of three forms:
//!
//! | keys | datasets | negatives |
//! | --- | --- | --- |
//! | `edge`, `edge_neg` | ppa, collab, ddi, vessel | edges that all held-out edges share |
//! | `source_node`, `target_node`, `target_node_neg` | citation2 | targets for each edge |
//! | `head`, `relation`, `tail`, `head_neg`, `tail_neg` | wikikg2 | sources and targets for each edge |
//!
//! `train.pt` repeats the edges of `raw/` and is not read. biokg has several types of nodes and is not supported.

use super::ogb::{DIALECT, read_count, split_directory};
use crate::delimited::{DelimitedRecords, EdgeLayout, TextEdges, TextRows};
use crate::npy::{NpyArray, NpyEdges, NpyRows};
use crate::source::{
    EdgeColumns, EdgeSource, EdgeStream, EdgesInMemory, ForeignEdge, ForeignNegatives, IdMatrix,
    ImportSource, RowSource, Splits, Treatment,
};
use crate::torch::{self, IdTensor};
use crate::{ImportError, ImportWorkspace, Location, MINIMUM_MEMORY_BYTES, Request, Result, input};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The files of a link dataset.
pub(super) struct OgbLinkFiles {
    raw: RawFiles,
    valid: PathBuf,
    test: PathBuf,
}

enum RawFiles {
    /// `raw/data.npz`.
    Archive(PathBuf),
    Text {
        edges: PathBuf,
        relations: Option<PathBuf>,
        features: Option<PathBuf>,
        nodes_count: PathBuf,
        edges_count: Option<PathBuf>,
    },
}

impl OgbLinkFiles {
    /// The files, if the split that the request names is one of edges.
    pub fn find(request: &Request) -> Result<Option<OgbLinkFiles>> {
        let from = request.need(&request.from, "--from DIR")?;
        let Some(split) = split_directory(from, request.name.as_deref())? else { return Ok(None) };
        let (valid, test) = (split.join("valid.pt"), split.join("test.pt"));
        if !valid.is_file() && !test.is_file() {
            return Ok(None);
        }
        let need = "an OGB link dataset has it; datasets with several node types are not read";
        let raw = |name: &str| input::plain_or_gz(&from.join("raw").join(name), need);
        let archive = from.join("raw/data.npz");
        let raw = match archive.is_file() {
            true => RawFiles::Archive(archive),
            false => RawFiles::Text {
                edges: raw("edge.csv")?,
                relations: raw("edge_reltype.csv").ok(),
                features: raw("node-feat.csv").ok(),
                nodes_count: raw("num-node-list.csv")?,
                edges_count: raw("num-edge-list.csv").ok(),
            },
        };
        let [valid, test] = [valid, test].map(|path| input::existing(&path, "each split of edges has it"));
        Ok(Some(OgbLinkFiles { raw, valid: valid?, test: test? }))
    }

    /// All of them.
    pub fn inputs(self) -> Vec<PathBuf> {
        let raw = match self.raw {
            RawFiles::Archive(archive) => vec![Some(archive)],
            RawFiles::Text { edges, relations, features, nodes_count, edges_count } => {
                vec![Some(edges), relations, features, Some(nodes_count), edges_count]
            }
        };
        raw.into_iter().flatten().chain([self.valid, self.test]).collect()
    }

    /// Describes their content.
    pub fn open(self, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let graph = self.raw.open()?;
        let sizes = [torch::unpacked_bytes(&self.valid)?, torch::unpacked_bytes(&self.test)?];
        let bytes = sizes[0].saturating_add(sizes[1]).saturating_add(sizes[0].max(sizes[1]));
        workspace.require("valid.pt and test.pt", bytes, MINIMUM_MEMORY_BYTES)?;
        let valid = HeldOutTensors::read(&self.valid)?;
        let test = HeldOutTensors::read(&self.test)?;
        workspace.hold("held-out edges and their negatives", valid.bytes() + test.bytes())?;
        if valid.has_edges_without_direction {
            workspace
                .progress
                .note("OGB's loader adds the reverse of every edge here: so does --add-reverse");
        }
        let [valid, test] = [valid, test].map(HeldOutTensors::split);
        let negatives = Box::new([valid.1, test.1]);
        let held_out = [&valid.0, &test.0].map(|edges| edges.columns.relation);
        if let Some(relation) = held_out.into_iter().find(|has| *has != graph.edges.columns().relation) {
            let (expected, found) = match relation {
                true => ("raw/edge_reltype.csv, the relations of training edges", "none"),
                false => ("a relation for each held-out edge", "none"),
            };
            return Err(Location::file(&self.valid).bad(expected, found));
        }
        Ok(ImportSource {
            nodes: Some(graph.nodes),
            edges: graph.edges,
            features: graph.features,
            labels: None,
            splits: Splits::Edges { valid: Box::new(valid.0), test: Box::new(test.0), negatives },
            usual: Treatment::AS_STORED,
            node_names: None,
            relation_names: Vec::new(),
            class_names: Vec::new(),
        })
    }
}

struct TrainingGraph {
    nodes: u64,
    edges: Box<dyn EdgeSource>,
    features: Option<Box<dyn RowSource>>,
}

impl RawFiles {
    fn open(&self) -> Result<TrainingGraph> {
        match self {
            RawFiles::Archive(path) => {
                let members = input::zip_members(path)?;
                let features = NpyRows::new(NpyArray::member(&members, path, "node_feat")?)?;
                let edges = NpyEdges::new(NpyArray::member(&members, path, "edge_index")?, false)?;
                let nodes = features.rows();
                Ok(TrainingGraph { nodes, edges: Box::new(edges), features: Some(Box::new(features)) })
            }
            RawFiles::Text { edges, relations, features, nodes_count, edges_count } => {
                let nodes = read_count(nodes_count)?;
                let count = edges_count.as_deref().map(read_count).transpose()?;
                let path = edges.clone();
                let (dialect, layout) = (DIALECT, EdgeLayout::ENDS);
                let ends = TextEdges { path, dialect, layout, relations: None, count };
                let edges: Box<dyn EdgeSource> = match relations {
                    Some(relations) => Box::new(RelationEdges { ends, relations: relations.clone() }),
                    None => Box::new(ends),
                };
                let features = match features {
                    Some(path) => {
                        Some(Box::new(TextRows::new(path, DIALECT, nodes, false)?) as Box<dyn RowSource>)
                    }
                    None => None,
                };
                Ok(TrainingGraph { nodes, edges, features })
            }
        }
    }
}

/// Edges with their relations in a second file, line by line.
struct RelationEdges {
    ends: TextEdges,
    relations: PathBuf,
}

struct RelationEdgeStream {
    ends: Box<dyn EdgeStream>,
    relations: DelimitedRecords,
}

impl EdgeSource for RelationEdges {
    fn count(&self) -> Option<u64> {
        self.ends.count()
    }
    fn columns(&self) -> EdgeColumns {
        EdgeColumns { relation: true, ..EdgeColumns::default() }
    }
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>> {
        let mut relations = DelimitedRecords::open(&self.relations, DIALECT)?;
        relations.skip(skip)?;
        Ok(Box::new(RelationEdgeStream { ends: self.ends.open(skip)?, relations }))
    }
    fn location(&self, position: u64) -> Location {
        self.ends.location(position)
    }
}

impl EdgeStream for RelationEdgeStream {
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool> {
        const EXPECTED: &str = "a relation for each edge of edge.csv";
        if !self.ends.next(out)? {
            return match self.relations.advance()? {
                true => Err(self.relations.location().bad(EXPECTED, "more")),
                false => Ok(false),
            };
        }
        for edge in out {
            if !self.relations.advance()? {
                return Err(self.relations.location().bad(EXPECTED, "fewer"));
            }
            let relation = self.relations.id(0, "a relation")?;
            edge.relation =
                u32::try_from(relation).map_err(|_| self.relations.bad(0, "a relation of 32 bits"))?;
        }
        Ok(true)
    }
}

/// The held-out edges of a file and their negatives.
struct HeldOutTensors {
    path: PathBuf,
    edges: Vec<ForeignEdge>,
    has_relations: bool,
    has_edges_without_direction: bool,
    /// Edges that all share.
    shared: Option<Vec<ForeignEdge>>,
    /// Instead of sources and of targets.
    per_edge: [Option<(&'static str, IdTensor)>; 2],
}

const KEYS: [&str; 10] = [
    "edge",
    "edge_neg",
    "source_node",
    "target_node",
    "target_node_neg",
    "head",
    "relation",
    "tail",
    "head_neg",
    "tail_neg",
];

impl HeldOutTensors {
    fn read(path: &Path) -> Result<HeldOutTensors> {
        let found = torch::read_tensors(path, &KEYS)?;
        let [edge, edge_neg, source, target, target_neg, head, relation, tail, head_neg, tail_neg] =
            <[Option<IdTensor>; KEYS.len()]>::try_from(found).expect("one for each key");
        let mut tensors = HeldOutTensors {
            path: path.to_path_buf(),
            edges: Vec::new(),
            has_relations: false,
            has_edges_without_direction: false,
            shared: None,
            per_edge: [None, None],
        };
        match (edge, source.zip(target), head.zip(relation).zip(tail)) {
            (Some(edge), None, None) => {
                tensors.edges = pairs(path, "edge", &edge)?;
                tensors.has_edges_without_direction = true;
                tensors.shared = edge_neg.map(|edges| pairs(path, "edge_neg", &edges)).transpose()?;
            }
            (None, Some((source, target)), None) => {
                tensors.edges = columns(path, &source, &target, None)?;
                tensors.per_edge[1] = target_neg.map(|negatives| ("target_node_neg", negatives));
            }
            (None, None, Some(((head, relation), tail))) => {
                tensors.edges = columns(path, &head, &tail, Some(&relation))?;
                tensors.has_relations = true;
                tensors.per_edge[0] = head_neg.map(|negatives| ("head_neg", negatives));
                tensors.per_edge[1] = tail_neg.map(|negatives| ("tail_neg", negatives));
            }
            _ => {
                let expected = "`edge`; `source_node` and `target_node`; or `head`, `relation` and `tail`";
                return Err(Location::file(path).bad(expected, "other keys"));
            }
        }
        Ok(tensors)
    }

    fn bytes(&self) -> u64 {
        let edges = self.edges.len() + self.shared.as_ref().map_or(0, Vec::len);
        let negatives: usize = self.per_edge.iter().flatten().map(|(_, tensor)| tensor.ids.len()).sum();
        (edges * size_of::<ForeignEdge>() + negatives * 8) as u64
    }

    /// Edges and negatives as sources.
    fn split(self) -> (EdgesInMemory, Option<ForeignNegatives>) {
        let HeldOutTensors { path, edges, has_relations, shared, per_edge, .. } = self;
        let columns = EdgeColumns { relation: has_relations, ..EdgeColumns::default() };
        let in_memory =
            |edges: Vec<ForeignEdge>| EdgesInMemory { path: path.clone(), edges: Arc::from(edges), columns };
        let matrix = |(name, tensor): (&str, IdTensor)| IdMatrix {
            path: path.clone(),
            name: name.to_string(),
            rows: tensor.rows,
            columns: tensor.columns,
            ids: tensor.ids.into(),
        };
        let negatives = match (shared, per_edge.map(|tensor| tensor.map(matrix))) {
            (Some(shared), _) => Some(ForeignNegatives::Shared(Box::new(in_memory(shared)))),
            (None, [None, None]) => None,
            (None, [sources, targets]) => Some(ForeignNegatives::PerEdge { sources, targets }),
        };
        (in_memory(edges), negatives)
    }
}

/// Edges of a matrix with two columns.
fn pairs(path: &Path, name: &str, tensor: &IdTensor) -> Result<Vec<ForeignEdge>> {
    if tensor.columns != 2 {
        return Err(shape(path, name, "rows of two nodes", tensor));
    }
    let edge = |pair: &[u64]| ForeignEdge { source: pair[0], target: pair[1], ..ForeignEdge::default() };
    Ok(tensor.ids.chunks_exact(2).map(edge).collect())
}

/// Edges of two or three vectors.
fn columns(
    path: &Path,
    sources: &IdTensor,
    targets: &IdTensor,
    relations: Option<&IdTensor>,
) -> Result<Vec<ForeignEdge>> {
    let rows = sources.rows;
    for tensor in [Some(sources), Some(targets), relations].into_iter().flatten() {
        if tensor.columns != 1 || tensor.rows != rows {
            return Err(shape(path, "edges", &format!("vectors of {rows}"), tensor));
        }
    }
    let edge = |at: usize| {
        let relation = relations.map_or(Ok(0), |relations| u32::try_from(relations.ids[at]));
        let relation = relation.map_err(|_| {
            Location::at(path, format!("relation {at}")).bad("a relation of 32 bits", "a larger number")
        })?;
        let (source, target) = (sources.ids[at], targets.ids[at]);
        Ok(ForeignEdge { source, target, relation, ..ForeignEdge::default() })
    };
    (0..rows as usize).map(edge).collect()
}

fn shape(path: &Path, name: &str, expected: &str, found: &IdTensor) -> ImportError {
    Location::at(path, name.to_string()).bad(expected, format!("{} rows of {}", found.rows, found.columns))
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::super::ogb::Ogb;
    use super::*;
    use crate::fixture;

    /// A dataset of ten nodes with the committed splits of this form.
    fn dataset(form: &str) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::create_dir_all(at("raw")).unwrap();
        std::fs::create_dir_all(at("split/time")).unwrap();
        std::fs::write(at("raw/edge.csv.gz"), fixture::gzip(b"0,1\n2,1\n5,4\n")).unwrap();
        std::fs::write(at("raw/num-node-list.csv"), "10\n").unwrap();
        std::fs::write(at("raw/num-edge-list.csv"), "3\n").unwrap();
        if form == "fact" {
            std::fs::write(at("raw/edge_reltype.csv.gz"), fixture::gzip(b"0\n2\n1\n")).unwrap();
        }
        for split in ["valid", "test"] {
            let fixture = fixture::committed(&format!("ogbl/{form}.{split}.pt"));
            std::fs::copy(fixture, at(&format!("split/time/{split}.pt"))).unwrap();
        }
        directory
    }

    fn open<T>(directory: &Path, look: impl FnOnce(ImportSource) -> T) -> Result<T> {
        let request = Request { from: Some(directory.to_path_buf()), ..Request::default() };
        assert!(Ogb.inputs(&request)?.len() >= 5);
        fixture::in_workspace(|workspace| Ok(look(Ogb.open(&request, workspace)?)))
    }

    fn edges(source: &dyn EdgeSource) -> Vec<(u64, u32, u64)> {
        let (mut stream, mut chunk, mut all) = (source.open(0).unwrap(), Vec::new(), Vec::new());
        while stream.next(&mut chunk).unwrap() {
            all.extend(chunk.iter().map(|edge| (edge.source, edge.relation, edge.target)));
        }
        all
    }

    type Parts = ([Vec<(u64, u32, u64)>; 3], [Option<ForeignNegatives>; 2]);

    fn parts(form: &str) -> Parts {
        open(dataset(form).path(), |source| {
            assert_eq!(source.nodes, Some(10));
            let Splits::Edges { valid, test, negatives } = source.splits else {
                panic!("edges are held out")
            };
            ([edges(&*source.edges), edges(&*valid), edges(&*test)], *negatives)
        })
        .unwrap()
    }

    #[test]
    fn shared_negatives_are_edges_of_their_own() {
        let ([train, valid, test], negatives) = parts("edge");
        assert_eq!(train, [(0, 0, 1), (2, 0, 1), (5, 0, 4)]);
        assert_eq!(valid, [(0, 0, 5), (1, 0, 6), (2, 0, 7)]);
        assert_eq!(test, [(3, 0, 4)]);
        let shared = negatives.map(|negatives| match negatives {
            Some(ForeignNegatives::Shared(negatives)) => edges(&*negatives),
            _ => panic!("shared negatives"),
        });
        assert_eq!(shared, [vec![(8, 0, 9), (9, 0, 8)], vec![(1, 0, 9)]]);
    }

    fn matrices(negatives: Option<ForeignNegatives>) -> [Option<(u64, Vec<u64>)>; 2] {
        let Some(ForeignNegatives::PerEdge { sources, targets }) = negatives else { panic!("per edge") };
        [sources, targets].map(|matrix| matrix.map(|matrix| (matrix.columns, matrix.ids.to_vec())))
    }

    #[test]
    fn negatives_for_each_edge_replace_targets_or_both_ends() {
        let ([_, valid, test], [first, second]) = parts("node");
        assert_eq!((valid, test), (vec![(0, 0, 2), (1, 0, 3)], vec![(9, 0, 8)]));
        assert_eq!(matrices(first), [None, Some((3, vec![7, 8, 9, 4, 5, 6]))]);
        assert_eq!(matrices(second), [None, Some((2, vec![7, 6]))]);
        let ([train, valid, test], [first, _]) = parts("fact");
        assert_eq!(train, [(0, 0, 1), (2, 2, 1), (5, 1, 4)]);
        assert_eq!((valid, test), (vec![(4, 0, 5), (4, 2, 7)], vec![(4, 0, 6), (4, 2, 7)]));
        assert_eq!(matrices(first), [Some((2, vec![1, 2, 3, 0])), Some((2, vec![8, 9, 9, 8]))]);
    }

    #[test]
    fn files_that_do_not_fit_are_named() {
        let directory = dataset("fact");
        let at = |name: &str| directory.path().join(name);
        let message = || {
            let read = |source: ImportSource| {
                let (mut stream, mut chunk) = (source.edges.open(0)?, Vec::new());
                while stream.next(&mut chunk)? {}
                Ok(())
            };
            open(directory.path(), read).and_then(|read| read).unwrap_err().to_string()
        };
        std::fs::write(at("raw/edge_reltype.csv.gz"), fixture::gzip(b"0\n2\n")).unwrap();
        assert!(
            message().contains("expected a relation for each edge of edge.csv, found fewer"),
            "{}",
            message()
        );
        std::fs::write(at("raw/edge_reltype.csv.gz"), fixture::gzip(b"0\n2\n1\n1\n")).unwrap();
        assert!(message().contains("found more"), "{}", message());
        std::fs::remove_file(at("raw/edge_reltype.csv.gz")).unwrap();
        assert!(message().contains("edge_reltype.csv"), "{}", message());
        std::fs::remove_file(at("split/time/test.pt")).unwrap();
        assert!(message().contains("test.pt: not found"), "{}", message());
        let other = fixture::committed("arrays.zip.pt");
        std::fs::copy(&other, at("split/time/test.pt")).unwrap();
        std::fs::copy(other, at("split/time/valid.pt")).unwrap();
        assert!(message().contains("`head`, `relation` and `tail`, found other keys"), "{}", message());
    }

    #[test]
    fn damaged_splits_never_panic() {
        let directory = dataset("edge");
        let path = directory.path().join("split/time/valid.pt");
        for form in ["edge.valid", "edge.test", "node.test", "fact.valid"] {
            let whole = std::fs::read(fixture::committed(&format!("ogbl/{form}.pt"))).unwrap();
            for seed in 0..300 {
                std::fs::write(&path, fixture::damaged(&whole, &whole, seed)).unwrap();
                let outcome = std::panic::catch_unwind(|| HeldOutTensors::read(&path).is_ok());
                assert!(outcome.is_ok(), "{form}, seed {seed}");
            }
        }
    }
}
