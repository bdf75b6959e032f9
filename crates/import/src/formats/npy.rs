//! Numpy arrays, with one flag per file: `--edges E.npy --features X.npy --labels Y.npy --train A.npy ...`

use super::Format;
use crate::npy::{NpyArray, NpyEdges};
use crate::source::{ImportSource, NameSource};
use crate::{ImportWorkspace, Request, Result, given, input};
use std::path::PathBuf;

/// The format.
pub struct Npy;

impl Format for Npy {
    fn name(&self) -> &'static str {
        "npy"
    }

    fn about(&self) -> &'static str {
        "numpy arrays: --edges of shape (2, E) or (E, 2), and the files other flags name"
    }

    fn flags(&self) -> Vec<&'static str> {
        [&["edges", "edge-weights", "edge-times", "node-ids"], super::GIVEN].concat()
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let edges = request.need(&request.edges, "--edges E.npy")?;
        let mut inputs = vec![input::existing(edges, "--edges names it")?];
        inputs.extend(given::inputs(request)?);
        Ok(inputs)
    }

    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let edges = NpyArray::open(request.need(&request.edges, "--edges E.npy")?)?;
        let column = |path: &Option<PathBuf>| path.as_deref().map(NpyArray::open).transpose();
        let (weights, times) = (column(&request.edge_weights)?, column(&request.edge_times)?);
        let edges = NpyEdges::new(edges, false)?.with(None, weights, times)?;
        let names = given::open_names(request, workspace)?;
        let nodes = names.as_ref().map(|names| (names.count(), "the --node-ids file"));
        let mut source = given::open(request, workspace, nodes)?.with_edges(Box::new(edges));
        source.node_names = names.map(|names| Box::new(names) as Box<dyn NameSource>);
        Ok(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use std::path::Path;

    fn open(directory: &Path, change: impl FnOnce(&mut Request)) -> Result<ImportSource> {
        let write = |name: &str, bytes: Vec<u8>| std::fs::write(directory.join(name), bytes).unwrap();
        write("e.npy", fixture::shaped_integers("(2, 3)", &[0, 1, 2, 1, 2, 0]));
        write("w.npy", fixture::floats("(3,)", &[0.5, 1.5, 2.5]));
        write("short.npy", fixture::integers(&[1, 2]));
        write("ids.txt", b"a\nb\nc\n".to_vec());
        let mut request =
            Request { format: "npy".into(), edges: Some(directory.join("e.npy")), ..Request::default() };
        change(&mut request);
        Npy.inputs(&request)?;
        fixture::in_workspace(|workspace| Npy.open(&request, workspace))
    }

    #[test]
    fn edges_weights_and_names_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let source = open(directory.path(), |request| {
            request.edge_weights = Some(directory.path().join("w.npy"));
            request.node_ids = Some(directory.path().join("ids.txt"));
        });
        let source = source.unwrap();
        assert_eq!(fixture::all_edges(&*source.edges, 1).unwrap(), [(1, 2), (2, 0)]);
        assert!(source.edges.columns().weight);
        assert_eq!((source.nodes, source.node_names.unwrap().count()), (Some(3), 3));
    }

    #[test]
    fn missing_edges_and_columns_of_another_length_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let message =
            |change: &dyn Fn(&mut Request)| open(directory.path(), change).err().unwrap().to_string();
        assert!(message(&|request| request.edges = None).contains("needs --edges"));
        let found = message(&|request| request.edge_times = Some(directory.path().join("short.npy")));
        assert!(found.contains("short.npy: expected 3 times, one an edge, found 2"), "{found}");
    }
}
