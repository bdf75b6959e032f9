//! ogbn-papers100M as unpacked from OGB's download: two npz archives and three files of split ids. Nothing is loaded
//! as a whole: the archives are decompressed while they stream (zip64 members cannot be memory-mapped).

use super::{Format, classes};
use crate::given;
use crate::idlist::TextIds;
use crate::npy::{NpyArray, NpyEdges, NpyRows};
use crate::source::{IdSource, ImportSource, RowSource, Splits, Treatment};
use crate::{ImportWorkspace, Request, Result, input};
use std::path::{Path, PathBuf};

pub(super) struct Papers100m;

/// The folder that contains `raw/`: `--from` itself, or OGB's folder inside it.
fn root(request: &Request) -> Result<PathBuf> {
    let from = request.need(&request.from, "--from DIR")?;
    let named = ["papers100M-bin", "ogbn_papers100M"].map(|name| from.join(name));
    Ok(named.into_iter().find(|folder| folder.join("raw").is_dir()).unwrap_or(from.to_path_buf()))
}

struct Papers100mFiles {
    data: PathBuf,
    labels: PathBuf,
    splits: [PathBuf; 3],
}

fn files(request: &Request) -> Result<Papers100mFiles> {
    let root = root(request)?;
    let split = |name: &str| {
        let path = root.join(format!("split/time/{name}.csv"));
        input::plain_or_gz(&path, "the split by time comes with OGB's papers100M-bin.zip")
    };
    Ok(Papers100mFiles {
        data: input::existing(
            &root.join("raw/data.npz"),
            "edges and features of papers100M; point --from at the folder that holds raw/ and split/",
        )?,
        labels: input::existing(&root.join("raw/node-label.npz"), "labels of papers100M")?,
        splits: [split("train")?, split("valid")?, split("test")?],
    })
}

fn ids(path: &Path) -> Result<Box<dyn IdSource>> {
    Ok(Box::new(TextIds::open(path)?))
}

impl Format for Papers100m {
    fn name(&self) -> &'static str {
        "papers100m"
    }
    fn about(&self) -> &'static str {
        "ogbn-papers100M, unpacked: --from DIR with raw/data.npz, raw/node-label.npz, split/time/"
    }
    fn flags(&self) -> Vec<&'static str> {
        super::FROM.to_vec()
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let Papers100mFiles { data, labels, splits: [train, valid, test] } = files(request)?;
        let mut inputs = vec![data, labels, train, valid, test];
        inputs.extend(given::split_inputs(request)?);
        Ok(inputs)
    }
    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let Papers100mFiles { data, labels, splits: [train, valid, test] } = files(request)?;
        let members = input::zip_members(&data)?;
        let features = NpyRows::new(NpyArray::member(&members, &data, "node_feat")?)?;
        let nodes = features.rows();
        let label_members = input::zip_members(&labels)?;
        let label_array = NpyArray::member(&label_members, &labels, "node_label")?;
        let splits = match given::open_named_splits(request, workspace, nodes)? {
            Some(splits) => splits,
            None => Splits::Nodes { train: ids(&train)?, valid: ids(&valid)?, test: ids(&test)? },
        };
        Ok(ImportSource {
            nodes: Some(nodes),
            edges: Box::new(NpyEdges::new(NpyArray::member(&members, &data, "edge_index")?, false)?),
            features: Some(Box::new(features)),
            labels: Some(classes::from_npy(label_array, nodes, request, true)?),
            splits,
            usual: Treatment::AS_STORED,
            node_names: None,
            relation_names: Vec::new(),
            class_names: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use std::fs;

    fn write(folder: &Path, labels: &str) {
        fs::create_dir_all(folder.join("raw")).unwrap();
        fs::create_dir_all(folder.join("split/time")).unwrap();
        let data = [
            ("edge_index.npy", fixture::shaped_integers("(2, 3)", &[0, 1, 2, 3, 3, 3])),
            ("node_feat.npy", fixture::floats("(4, 2)", &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])),
            ("node_year.npy", fixture::shaped_integers("(4, 1)", &[2000, 2001, 2002, 2003])),
        ];
        fixture::write_zip(&folder.join("raw/data.npz"), &data);
        let label_values = fixture::floats(labels, &[0.0, f32::NAN, 1.0, 2.0]);
        fixture::write_zip(&folder.join("raw/node-label.npz"), &[("node_label.npy", label_values)]);
        for (name, ids) in [("train", "0\n"), ("valid", "2\n"), ("test", "3\n1\n")] {
            let packed = fixture::gzip(ids.as_bytes());
            fs::write(folder.join(format!("split/time/{name}.csv.gz")), packed).unwrap();
        }
    }

    fn open(from: &Path) -> Result<ImportSource> {
        let request = Request { from: Some(from.to_path_buf()), ..Request::default() };
        assert_eq!(Papers100m.inputs(&request)?.len(), 5);
        fixture::in_workspace(|workspace| Papers100m.open(&request, workspace))
    }

    #[test]
    fn everything_streams_out_of_the_archives() {
        let directory = tempfile::tempdir().unwrap();
        write(&directory.path().join("papers100M-bin"), "(4, 1)");
        let source = open(directory.path()).unwrap();
        assert_eq!(source.nodes, Some(4));
        assert_eq!(fixture::all_edges(&*source.edges, 1).unwrap(), [(1, 3), (2, 3)]);
        assert_eq!(fixture::all_rows(&*source.features.unwrap(), 2).unwrap(), [4.0, 5.0, 6.0, 7.0]);
        let labels = source.labels.unwrap();
        assert!(labels.nan_is_unlabelled && fixture::all_rows(&*labels.rows, 1).unwrap()[0].is_nan());
        assert_eq!(fixture::split_sizes(&source.splits).unwrap(), [1, 1, 2]);
    }

    #[test]
    fn labels_of_another_length_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), "(2, 2)");
        let message = open(directory.path()).err().unwrap().to_string();
        assert!(message.contains("node-label.npz") && message.contains("4 labels"), "{message}");
    }

    #[test]
    fn a_missing_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), "(4, 1)");
        fs::remove_file(directory.path().join("split/time/valid.csv.gz")).unwrap();
        let message = open(directory.path()).err().unwrap().to_string();
        assert!(message.contains("split/time/valid.csv: not found"), "{message}");
    }
}
