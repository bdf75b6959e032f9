//! MAG240M as OGB-LSC unpacks it: the papers and their citations. Features, labels and edges stream from their npy
//! files. The split's ids come from a torch file and stay in memory.

use super::{Format, classes};
use crate::given;
use crate::npy::{NpyArray, NpyEdges, NpyRows};
use crate::source::{IdsInMemory, ImportSource, RowSource, Splits, Treatment};
use crate::{ImportWorkspace, Request, Result, input, torch};
use std::path::{Path, PathBuf};

pub(super) struct Mag240m;

/// Ids of a split in the torch file, their decoded copy, and the resulting ids.
const BYTES_PER_SPLIT_BYTE: u64 = 4;

struct Mag240mFiles {
    features: PathBuf,
    labels: PathBuf,
    edges: PathBuf,
    split: PathBuf,
}

fn files(request: &Request) -> Result<Mag240mFiles> {
    let from = request.need(&request.from, "--from DIR")?;
    let named = from.join("mag240m_kddcup2021");
    let root = if named.is_dir() { named } else { from.to_path_buf() };
    let need = |path: &str, what: &'static str| input::existing(&root.join(path), what);
    Ok(Mag240mFiles {
        features: need(
            "processed/paper/node_feat.npy",
            "features of MAG240M; point --from at the folder that holds processed/ and split_dict.pt",
        )?,
        labels: need("processed/paper/node_label.npy", "labels of MAG240M")?,
        edges: need("processed/paper___cites___paper/edge_index.npy", "citations of MAG240M")?,
        split: need("split_dict.pt", "the split of MAG240M")?,
    })
}

impl Format for Mag240m {
    fn name(&self) -> &'static str {
        "mag240m"
    }
    fn about(&self) -> &'static str {
        "MAG240M's papers and citations, unpacked: --from DIR with processed/ and split_dict.pt"
    }
    fn flags(&self) -> Vec<&'static str> {
        super::FROM.to_vec()
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let Mag240mFiles { features, labels, edges, split } = files(request)?;
        let mut inputs = vec![features, labels, edges, split];
        inputs.extend(given::split_inputs(request)?);
        Ok(inputs)
    }
    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let files = files(request)?;
        let features = NpyRows::new(NpyArray::open(&files.features)?)?;
        let nodes = features.rows();
        let labels = classes::from_npy(NpyArray::open(&files.labels)?, nodes, request, true)?;
        let splits = match given::open_named_splits(request, workspace, nodes)? {
            Some(splits) => splits,
            None => splits(&files.split, workspace)?,
        };
        Ok(ImportSource {
            nodes: Some(nodes),
            edges: Box::new(NpyEdges::new(NpyArray::open(&files.edges)?, false)?),
            features: Some(Box::new(features)),
            labels: Some(labels),
            splits,
            usual: Treatment::AS_STORED,
            node_names: None,
            relation_names: Vec::new(),
            class_names: Vec::new(),
        })
    }
}

fn splits(path: &Path, workspace: &mut ImportWorkspace) -> Result<Splits> {
    let bytes = torch::unpacked_bytes(path)?;
    workspace.hold("the split of MAG240M", bytes.saturating_mul(BYTES_PER_SPLIT_BYTE))?;
    let torch::Split { train, valid, test } = torch::read_split(path)?;
    if test.key != "test" {
        let text = format!("the test nodes are `{}` of {}: it has no `test`", test.key, path.display());
        workspace.progress.note(&text);
    }
    let held = |list: torch::IdList| IdsInMemory::boxed(path, list.ids);
    Ok(Splits::Nodes { train: held(train), valid: held(valid), test: held(test) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use esker_types::Dtype;
    use std::fs;

    fn write(folder: &Path) {
        let papers = folder.join("processed/paper");
        let cites = folder.join("processed/paper___cites___paper");
        fs::create_dir_all(&papers).unwrap();
        fs::create_dir_all(&cites).unwrap();
        let halves: Vec<u8> = [0x3c00u16, 0x4000].repeat(6).iter().flat_map(|v| v.to_le_bytes()).collect();
        fs::write(papers.join("node_feat.npy"), fixture::npy("<f2", "(6, 2)", &halves)).unwrap();
        let labels = [0.0, 1.0, f32::NAN, 3.0, 0.0, 2.0];
        fs::write(papers.join("node_label.npy"), fixture::floats("(6,)", &labels)).unwrap();
        let edges = fixture::shaped_integers("(2, 2)", &[0, 1, 4, 5]);
        fs::write(cites.join("edge_index.npy"), edges).unwrap();
        fs::copy(fixture::committed("tensors.zip.pt"), folder.join("split_dict.pt")).unwrap();
    }

    fn open(from: &Path) -> Result<ImportSource> {
        let request = Request { from: Some(from.to_path_buf()), ..Request::default() };
        fixture::in_workspace(|workspace| Mag240m.open(&request, workspace))
    }

    #[test]
    fn papers_keep_their_half_precision_and_edges_their_direction() {
        let directory = tempfile::tempdir().unwrap();
        write(&directory.path().join("mag240m_kddcup2021"));
        let source = open(directory.path()).unwrap();
        assert_eq!(source.nodes, Some(6));
        // (2, 2) is the only ambiguous shape: here it means two rows.
        assert_eq!(fixture::all_edges(&*source.edges, 0).unwrap(), [(0, 4), (1, 5)]);
        let features = source.features.unwrap();
        assert_eq!(features.natural_dtype(), Dtype::F16);
        assert_eq!(fixture::all_rows(&*features, 5).unwrap(), [1.0, 2.0]);
        assert_eq!(fixture::split_sizes(&source.splits).unwrap(), [3, 1, 2]);
    }

    #[test]
    fn a_missing_split_is_named() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path());
        fs::remove_file(directory.path().join("split_dict.pt")).unwrap();
        let message = open(directory.path()).err().unwrap().to_string();
        assert!(message.contains("split_dict.pt: not found"), "{message}");
    }

    #[test]
    fn labels_of_another_length_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path());
        let labels = fixture::floats("(2,)", &[0.0, 1.0]);
        fs::write(directory.path().join("processed/paper/node_label.npy"), labels).unwrap();
        let message = open(directory.path()).err().unwrap().to_string();
        assert!(message.contains("6 labels") && message.contains("[2]"), "{message}");
    }
}
