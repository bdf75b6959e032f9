//! The npz files of "A critical look at the evaluation of GNNs under heterophily" (Platonov et al., 2023): plain
//! arrays, and the splits as boolean masks, several per file. Everything streams.

use super::{Format, classes};
use crate::given;
use crate::input::{self, Member};
use crate::npy::{NpyArray, NpyEdges, NpyRows, Scalar};
use crate::source::{CHUNK, IdSource, IdStream, ImportSource, RowSource, Splits, Treatment};
use crate::{ImportError, ImportWorkspace, Location, Request, Result};
use std::path::{Path, PathBuf};

pub(super) struct MaskedNpz;

impl Format for MaskedNpz {
    fn name(&self) -> &'static str {
        "masked-npz"
    }
    fn about(&self) -> &'static str {
        "npz with masks (tolokers and its kin): --from FILE.npz [--split-index N]; edges are made undirected"
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
        let members = input::zip_members(path)?;
        let array = |name: &str| NpyArray::member(&members, path, name);
        let features = NpyRows::new(array("node_features")?)?;
        let nodes = features.rows();
        let splits = match given::open_named_splits(request, workspace, nodes)? {
            Some(splits) => splits,
            None => splits(&members, path, nodes, request.split_index)?,
        };
        Ok(ImportSource {
            nodes: Some(nodes),
            edges: Box::new(NpyEdges::new(array("edges")?, true)?),
            features: Some(Box::new(features)),
            labels: Some(classes::from_npy(array("node_labels")?, nodes, request, false)?),
            splits,
            usual: Treatment::UNDIRECTED,
            node_names: None,
            relation_names: Vec::new(),
            class_names: Vec::new(),
        })
    }
}

fn splits(members: &[Member], path: &Path, nodes: u64, index: usize) -> Result<Splits> {
    if !members.iter().any(|member| member.name.ends_with("_masks.npy")) {
        return Ok(Splits::None);
    }
    let mask = |name: &str| -> Result<Box<dyn IdSource>> {
        Ok(Box::new(MaskIds::new(NpyArray::member(members, path, name)?, nodes, index)?))
    };
    Ok(Splits::Nodes { train: mask("train_masks")?, valid: mask("val_masks")?, test: mask("test_masks")? })
}

/// One row of a matrix of masks: the nodes where it is true.
struct MaskIds {
    masks: NpyArray,
    first: u64,
    nodes: u64,
}

impl MaskIds {
    fn new(masks: NpyArray, nodes: u64, index: usize) -> Result<MaskIds> {
        let (count, length) = match *masks.shape() {
            [length] => (1, length),
            [count, length] => (count, length),
            ref shape => return Err(masks.location().bad("masks by node", format!("shape {shape:?}"))),
        };
        if masks.scalar() != Scalar::Bool {
            return Err(masks.location().bad("boolean masks", format!("dtype {}", masks.scalar())));
        }
        if length != nodes || masks.fortran() && count > 1 {
            let found = format!("shape {:?}", masks.shape());
            return Err(masks.location().bad(format!("rows of {nodes} masks, one a node"), found));
        }
        if index as u64 >= count {
            return Err(ImportError::NoSuchMask { location: masks.location(), count, index });
        }
        Ok(MaskIds { masks, first: index as u64 * nodes, nodes })
    }
}

struct MaskIdStream {
    flags: crate::npy::NpyElements,
    node: u64,
    nodes: u64,
    chunk: Vec<i64>,
}

impl IdSource for MaskIds {
    fn open(&self) -> Result<Box<dyn IdStream>> {
        let flags = self.masks.stream(self.first)?;
        Ok(Box::new(MaskIdStream { flags, node: 0, nodes: self.nodes, chunk: Vec::new() }))
    }
    fn location(&self, _: u64) -> Location {
        self.masks.location()
    }
}

impl IdStream for MaskIdStream {
    fn next(&mut self, out: &mut Vec<u64>) -> Result<bool> {
        out.clear();
        while out.is_empty() && self.node < self.nodes {
            let count = (self.nodes - self.node).min(CHUNK as u64);
            self.chunk.clear();
            self.flags.integers(count as usize, &mut self.chunk)?;
            out.extend((self.node..).zip(&self.chunk).filter(|(_, flag)| **flag != 0).map(|(node, _)| node));
            self.node += count;
        }
        Ok(!out.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn open(path: &Path, split_index: usize) -> Result<ImportSource> {
        let request = Request { from: Some(path.to_path_buf()), split_index, ..Request::default() };
        fixture::in_workspace(|workspace| MaskedNpz.open(&request, workspace))
    }

    fn open_tiny(masks: Vec<u8>, split_index: usize) -> Result<Vec<u64>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tiny.npz");
        let members = [
            ("node_features.npy", fixture::floats("(3, 1)", &[1.0, 2.0, 3.0])),
            ("node_labels.npy", fixture::integers(&[0, 1, 0])),
            ("edges.npy", fixture::shaped_integers("(2, 2)", &[0, 1, 1, 2])),
            ("train_masks.npy", masks),
            ("val_masks.npy", fixture::npy("|b1", "(2, 3)", &[0; 6])),
            ("test_masks.npy", fixture::npy("|b1", "(2, 3)", &[0; 6])),
        ];
        fixture::write_zip(&path, &members);
        let source = open(&path, split_index)?;
        assert_eq!(fixture::all_edges(&*source.edges, 0)?, [(0, 1), (1, 2)]);
        let Splits::Nodes { train, .. } = source.splits else { panic!("no split") };
        fixture::all_ids(&*train)
    }

    fn check_refused(masks: Vec<u8>, split_index: usize, words: &[&str]) {
        let message = open_tiny(masks, split_index).unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }

    #[test]
    fn the_index_chooses_the_mask() {
        let masks = fixture::npy("|b1", "(2, 3)", &[1, 0, 1, 0, 1, 0]);
        assert_eq!(open_tiny(masks.clone(), 0).unwrap(), [0, 2]);
        assert_eq!(open_tiny(masks.clone(), 1).unwrap(), [1]);
        check_refused(masks, 2, &["train_masks", "2 splits, 0 to 1"]);
    }

    #[test]
    fn masks_of_another_length_or_type_are_refused() {
        check_refused(fixture::npy("|b1", "(3, 2)", &[0; 6]), 0, &["train_masks", "rows of 3", "[3, 2]"]);
        check_refused(fixture::shaped_integers("(2, 3)", &[0; 6]), 0, &["boolean", "dtype i64"]);
    }

    #[test]
    fn lists_that_flags_name_take_the_place_of_the_masks() {
        let Some(path) = fixture::real_data("tolokers/tolokers.npz") else { return };
        let directory = tempfile::tempdir().unwrap();
        let train = directory.path().join("train.csv");
        std::fs::write(&train, "5\n7\n").unwrap();
        let request = Request { from: Some(path), train: Some(train), ..Request::default() };
        assert_eq!(MaskedNpz.inputs(&request).unwrap().len(), 2);
        let source = fixture::in_workspace(|workspace| MaskedNpz.open(&request, workspace)).unwrap();
        assert_eq!(fixture::split_sizes(&source.splits).unwrap(), [2, 0, 0]);
    }

    #[test]
    fn tolokers_has_its_published_size() {
        let Some(path) = fixture::real_data("tolokers/tolokers.npz") else { return };
        for split_index in [0, 9] {
            let source = open(&path, split_index).unwrap();
            assert_eq!((source.nodes, source.edges.count()), (Some(11_758), Some(519_000)));
            assert_eq!(fixture::all_edges(&*source.edges, 0).unwrap().len(), 519_000);
            assert_eq!(source.features.unwrap().dim(), 10);
            let labels = fixture::all_rows(&*source.labels.unwrap().rows, 0).unwrap();
            let share = labels.iter().sum::<f32>() / labels.len() as f32;
            assert!((share - 0.218).abs() < 0.001, "{share}");
            let sizes = fixture::split_sizes(&source.splits).unwrap();
            assert_eq!(sizes.iter().sum::<usize>(), 11_758);
            assert_eq!(sizes[0], 5_879);
        }
        assert!(open(&path, 10).err().unwrap().to_string().contains("10 splits"));
    }
}
