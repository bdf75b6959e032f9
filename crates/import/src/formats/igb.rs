//! The homogeneous graphs of IGB (Khatua et al., 2023): papers, citations as pairs, features and labels. In the large
//! sizes, features and labels are raw 32-bit floats under an `.npy` name. There are no split files. By convention the
//! first 60 percent of the labelled papers are for training, the next 20 for validation and the rest for testing.

use super::Format;
use crate::npy::{Header, NpyArray, NpyEdges, NpyRows, Scalar};
use crate::source::{CHUNK, IdSource, IdStream, ImportSource, LabelKind, NodeLabels, Splits, Treatment};
use crate::{ImportError, ImportWorkspace, Location, Request, Result, input};
use std::{
    io::{BufReader, Read},
    ops::Range,
    path::{Path, PathBuf},
};

/// In IGB-full only the first papers have labels.
const FULL_NODES: u64 = 269_346_174;
const FULL_LABELLED: u64 = 227_130_858;

/// The format.
pub struct Igb;

impl Format for Igb {
    fn name(&self) -> &'static str {
        "igb"
    }

    fn about(&self) -> &'static str {
        "an IGB graph: --from its size directory or processed/; --name 19 or 2K chooses the labels"
    }

    fn flags(&self) -> Vec<&'static str> {
        vec!["from", "name"]
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let files = IgbFiles::find(request)?;
        Ok([files.edges, files.features, files.labels].into_iter().chain(files.mapping).collect())
    }

    fn open(&self, request: &Request, _workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let files = IgbFiles::find(request)?;
        let nodes = count_nodes(&files)?;
        let features = open_array(&files.features, nodes, "feature rows")?;
        let labels = NpyRows::new(open_array(&files.labels, nodes, "labels")?)?;
        let labelled = if nodes == FULL_NODES { FULL_LABELLED } else { nodes };
        // Rounded as in IGB's loaders.
        let (train, valid) = ((labelled as f64 * 0.6) as u64, (labelled as f64 * 0.2) as u64);
        let span =
            |ids: Range<u64>| -> Box<dyn IdSource> { Box::new(Span { path: files.labels.clone(), ids }) };
        Ok(ImportSource {
            nodes: Some(nodes),
            edges: Box::new(NpyEdges::new(NpyArray::open(&files.edges)?, true)?),
            features: Some(Box::new(NpyRows::new(features)?)),
            labels: Some(NodeLabels {
                kind: LabelKind::Classes,
                rows: Box::new(labels),
                nan_is_unlabelled: true,
            }),
            splits: Splits::Nodes {
                train: span(0..train),
                valid: span(train..train + valid),
                test: span(train + valid..labelled),
            },
            usual: Treatment::AS_STORED,
            node_names: None,
            relation_names: Vec::new(),
            class_names: Vec::new(),
        })
    }
}

struct IgbFiles {
    edges: PathBuf,
    features: PathBuf,
    labels: PathBuf,
    mapping: Option<PathBuf>,
}

impl IgbFiles {
    fn find(request: &Request) -> Result<IgbFiles> {
        let from = request.need(&request.from, "--from DIR")?;
        let processed = from.join("processed");
        let root = if processed.is_dir() { &processed } else { from };
        let labels = match request.name.as_deref().unwrap_or("19") {
            "19" => "node_label_19.npy",
            "2K" | "2k" | "2983" => "node_label_2K.npy",
            other => return Err(ImportError::NoSuchIgbLabels { name: other.to_string() }),
        };
        let need = "--from names an IGB size directory (tiny, small, ...) or its processed/";
        let file = |name: &str| input::existing(&root.join(name), need);
        Ok(IgbFiles {
            edges: file("paper__cites__paper/edge_index.npy")?,
            features: file("paper/node_feat.npy")?,
            labels: file(&format!("paper/{labels}"))?,
            mapping: file("paper/paper_id_index_mapping.npy").ok(),
        })
    }
}

fn has_header(path: &Path) -> Result<bool> {
    let mut start = Vec::new();
    input::open(path)?.take(6).read_to_end(&mut start).map_err(|error| Location::file(path).io(error))?;
    Ok(start == b"\x93NUMPY")
}

fn file_bytes(path: &Path) -> Result<u64> {
    Ok(input::open(path)?.metadata().map_err(|error| Location::file(path).io(error))?.len())
}

/// From the id mapping if it is a vector (some releases have a dictionary there), else from the labels.
fn count_nodes(files: &IgbFiles) -> Result<u64> {
    if let Some(mapping) = &files.mapping
        && has_header(mapping)?
    {
        let header = Header::read(&mut BufReader::new(input::open(mapping)?), &Location::file(mapping))?;
        if let [nodes, ..] = header.shape[..] {
            return Ok(nodes);
        }
    }
    if has_header(&files.labels)? {
        let labels = NpyArray::open(&files.labels)?;
        return labels
            .shape()
            .first()
            .copied()
            .ok_or_else(|| labels.location().bad("a vector", "a single number"));
    }
    let bytes = file_bytes(&files.labels)?;
    if bytes % 4 != 0 || bytes == 0 {
        return Err(Location::file(&files.labels)
            .bad("32-bit floats, so a multiple of 4 bytes", format!("{bytes} bytes")));
    }
    Ok(bytes / 4)
}

/// An array with one row per node, with a header or raw.
fn open_array(path: &Path, nodes: u64, what: &str) -> Result<NpyArray> {
    if has_header(path)? {
        let array = NpyArray::open(path)?;
        if array.shape().first() != Some(&nodes) {
            return Err(array
                .location()
                .bad(format!("{nodes} {what}"), format!("shape {:?}", array.shape())));
        }
        return Ok(array);
    }
    let bytes = file_bytes(path)?;
    match nodes.checked_mul(4) {
        Some(column) if column > 0 && bytes > 0 && bytes % column == 0 => {
            NpyArray::raw(path, Scalar::F32, vec![nodes, bytes / column])
        }
        _ => {
            let expected = format!("{nodes} {what} of 32-bit floats (a multiple of 4 x {nodes} bytes)");
            Err(Location::file(path).bad(expected, format!("{bytes} bytes")))
        }
    }
}

/// Consecutive ids.
struct Span {
    path: PathBuf,
    ids: Range<u64>,
}

struct SpanStream(Range<u64>);

impl IdSource for Span {
    fn open(&self) -> Result<Box<dyn IdStream>> {
        Ok(Box::new(SpanStream(self.ids.clone())))
    }
    fn location(&self, position: u64) -> Location {
        Location::row(&self.path, self.ids.start + position)
    }
}

impl IdStream for SpanStream {
    fn next(&mut self, out: &mut Vec<u64>) -> Result<bool> {
        out.clear();
        out.extend(self.0.by_ref().take(CHUNK));
        Ok(!out.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    /// Ten papers; `raw` omits the headers of features and labels, as in the large sizes.
    fn dataset(raw: bool) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: Vec<u8>| {
            let path = directory.path().join("processed").join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        };
        let floats = |shape: &str, count: usize| {
            let values: Vec<f32> = (0..count).map(|value| value as f32).collect();
            if raw { bytemuck::cast_slice(&values).to_vec() } else { fixture::floats(shape, &values) }
        };
        write("paper__cites__paper/edge_index.npy", fixture::shaped_integers("(2, 2)", &[0, 1, 2, 3]));
        write("paper/node_feat.npy", floats("(10, 3)", 30));
        write("paper/node_label_19.npy", floats("(10,)", 10));
        directory
    }

    fn open(directory: &Path) -> Result<ImportSource> {
        let request = Request { from: Some(directory.to_path_buf()), ..Request::default() };
        Igb.inputs(&request)?;
        fixture::in_workspace(|workspace| Igb.open(&request, workspace))
    }

    #[test]
    fn files_with_and_without_headers_read_the_same() {
        for raw in [false, true] {
            let directory = dataset(raw);
            let source = open(directory.path()).unwrap();
            assert_eq!(fixture::all_edges(&*source.edges, 0).unwrap(), [(0, 1), (2, 3)], "pairs");
            assert_eq!(fixture::all_rows(&*source.features.unwrap(), 9).unwrap(), [27.0, 28.0, 29.0]);
            let labels = source.labels.unwrap().rows;
            assert_eq!((labels.rows(), labels.dim()), (10, 1));
            let Splits::Nodes { train, valid, test } = source.splits else { panic!("lists") };
            let ids = [train, valid, test].map(|list| fixture::all_ids(&*list).unwrap());
            assert_eq!(ids, [vec![0, 1, 2, 3, 4, 5], vec![6, 7], vec![8, 9]]);
            assert!(open(&directory.path().join("processed")).is_ok());
        }
    }

    #[test]
    fn lengths_that_do_not_divide_are_named() {
        let directory = dataset(true);
        let features = directory.path().join("processed/paper/node_feat.npy");
        std::fs::write(&features, [0; 50]).unwrap();
        let found = open(directory.path()).err().unwrap().to_string();
        assert!(
            found.contains("node_feat.npy: expected 10 feature rows") && found.contains("50 bytes"),
            "{found}"
        );
        std::fs::write(directory.path().join("processed/paper/node_label_19.npy"), [0; 41]).unwrap();
        assert!(open(directory.path()).err().unwrap().to_string().contains("41 bytes"));
    }

    #[test]
    fn absent_files_and_unknown_labels_are_named() {
        let directory = tempfile::tempdir().unwrap();
        assert!(open(directory.path()).err().unwrap().to_string().contains("edge_index.npy: not found"));
        let from = Some(directory.path().to_path_buf());
        let request = Request { from, name: Some("20".into()), ..Request::default() };
        assert!(Igb.inputs(&request).unwrap_err().to_string().contains("labels 19 and 2K"));
    }
}
