//! Knowledge graphs: `head<TAB>relation<TAB>tail` in train, valid and test files, as in FB15k-237 and WN18RR.

use super::Format;
use super::csv::TextNames;
use crate::delimited::{DelimitedRecords, Dialect, EdgeLayout};
use crate::dictionary::{NamedEdgeStream, NamedEdges, Numbered, Relations};
use crate::source::{EdgeColumns, ForeignEdge, ImportSource, Splits, Treatment};
use crate::{ImportError, ImportWorkspace, Location, Request, Result, input};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

const DIALECT: Dialect = Dialect { delimiter: b'\t', header: false };
const LAYOUT: EdgeLayout = EdgeLayout { source: 0, target: 2, relation: Some(1), weight: None, time: None };

/// The format.
pub struct Triples;

impl Format for Triples {
    fn name(&self) -> &'static str {
        "triples"
    }

    fn about(&self) -> &'static str {
        "a knowledge graph: --from a directory with train, valid and test .txt or .tsv, plain or .gz"
    }

    fn flags(&self) -> Vec<&'static str> {
        vec!["from"]
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let from = request.need(&request.from, "--from DIR")?;
        ["train", "valid", "test"].into_iter().map(|name| find(from, name)).collect()
    }

    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let files = self.inputs(request)?;
        let (names, counts) = workspace.step("relations", || relations(&files))?;
        workspace.hold("names of relations", Relations::memory_bytes(&names))?;
        let relations = Arc::new(Relations::new(names));
        let [train, valid, test]: [u64; 3] = counts;
        let graph = Graph { files, relations: relations.clone() };
        let numbered = Numbered::new(workspace, &graph, None)?;
        if numbered.count != train + valid + test {
            let expected = format!("{} triples, as in the first pass", train + valid + test);
            return Err(Location::file(graph.path()).bad(expected, numbered.count));
        }
        Ok(ImportSource {
            nodes: Some(numbered.nodes),
            edges: numbered.edges(0, train),
            features: None,
            labels: None,
            splits: Splits::Edges {
                valid: numbered.edges(train, valid),
                test: numbered.edges(train + valid, test),
                negatives: Box::new([None, None]),
            },
            usual: Treatment::AS_STORED,
            node_names: Some(numbered.names()),
            relation_names: relations.names().to_vec(),
            class_names: Vec::new(),
        })
    }
}

fn find(from: &Path, name: &str) -> Result<PathBuf> {
    let need = "a knowledge graph has train, valid and test files (.txt or .tsv, plain or .gz)";
    let found = input::plain_or_gz(&from.join(format!("{name}.txt")), need);
    found.or_else(|error: ImportError| {
        input::plain_or_gz(&from.join(format!("{name}.tsv")), need).map_err(|_| error)
    })
}

/// Names of the relations, and the number of triples in each file.
fn relations(files: &[PathBuf]) -> Result<(Vec<String>, [u64; 3])> {
    let (mut relations, mut counts) = (Relations::default(), [0; 3]);
    for (path, count) in files.iter().zip(&mut counts) {
        let mut records = DelimitedRecords::open(path, DIALECT)?;
        while records.advance()? {
            if records.width() != 3 {
                return Err(records.location().bad("3 fields: head, relation, tail", records.width()));
            }
            relations.see(records.name(1)?, || records.location())?;
            *count += 1;
        }
    }
    Ok((relations.into_names(), counts))
}

/// The three files, one after the other.
struct Graph {
    files: Vec<PathBuf>,
    relations: Arc<Relations>,
}

struct GraphStream {
    current: TextNames,
    next_files: std::vec::IntoIter<PathBuf>,
}

fn open_file(path: &Path, relations: &Arc<Relations>) -> Result<TextNames> {
    Ok(TextNames {
        records: DelimitedRecords::open(path, DIALECT)?,
        layout: LAYOUT,
        relations: Some(relations.clone()),
    })
}

impl NamedEdges for Graph {
    fn path(&self) -> &Path {
        &self.files[0]
    }
    fn columns(&self) -> EdgeColumns {
        LAYOUT.columns()
    }
    fn open(&self) -> Result<Box<dyn NamedEdgeStream>> {
        let mut next_files = self.files.clone().into_iter();
        let first = next_files.next().unwrap_or_default();
        Ok(Box::new(GraphStream { current: open_file(&first, &self.relations)?, next_files }))
    }
}

impl NamedEdgeStream for GraphStream {
    fn advance(&mut self) -> Result<bool> {
        while !self.current.advance()? {
            let Some(path) = self.next_files.next() else { return Ok(false) };
            let relations = self.current.relations.take().unwrap_or_default();
            self.current = open_file(&path, &relations)?;
        }
        Ok(true)
    }
    fn ends(&self) -> Result<[&[u8]; 2]> {
        self.current.ends()
    }
    fn attributes(&self) -> Result<ForeignEdge> {
        self.current.attributes()
    }
    fn location(&self) -> Location {
        self.current.location()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn open<T>(directory: &Path, look: impl FnOnce(ImportSource) -> T) -> Result<T> {
        let request = Request { from: Some(directory.to_path_buf()), ..Request::default() };
        fixture::in_workspace(|workspace| Ok(look(Triples.open(&request, workspace)?)))
    }

    fn write(directory: &Path, files: [(&str, &[u8]); 3]) {
        files.iter().for_each(|(name, bytes)| std::fs::write(directory.join(name), bytes).unwrap());
    }

    #[test]
    fn entities_and_relations_are_numbered_over_the_three_files() {
        let directory = tempfile::tempdir().unwrap();
        let valid = fixture::gzip(b"z\tlikes\t\"a\n");
        write(
            directory.path(),
            [("train.txt", b"b\tlikes\t\"a\n"), ("valid.tsv.gz", &valid), ("test.tsv", b"y\tis\tz")],
        );
        let check = |source: ImportSource| {
            assert_eq!((source.nodes, source.relation_names), (Some(4), vec!["likes".into(), "is".into()]));
            assert_eq!(fixture::all_edges(&*source.edges, 0).unwrap(), [(0, 1)]);
            let Splits::Edges { valid, test, .. } = source.splits else { panic!("held out edges") };
            assert_eq!(fixture::all_edges(&*valid, 0).unwrap(), [(2, 1)]);
            assert_eq!(fixture::all_edges(&*test, 0).unwrap(), [(3, 2)]);
        };
        open(directory.path(), check).unwrap();
    }

    #[test]
    fn missing_files_and_short_lines_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let message = || open(directory.path(), |_| ()).unwrap_err().to_string();
        assert!(message().contains("train.txt: not found"));
        write(directory.path(), [("train.txt", b"a\tr\tb\n"), ("valid.txt", b"a\tr\n"), ("test.txt", b"")]);
        assert!(message().contains("valid.txt, line 1: expected 3 fields"), "{}", message());
        write(directory.path(), [("train.txt", b"a\tr\tb\na\t\tb\n"), ("valid.txt", b""), ("test.txt", b"")]);
        assert!(message().contains("train.txt, line 2: expected a name in column 1, found nothing"));
        write(directory.path(), [("train.txt", b"a\tr\t\n"), ("valid.txt", b""), ("test.txt", b"")]);
        assert!(message().contains("train.txt, line 1: expected a name in column 2"));
    }

    fn check_real(name: &str, nodes: u64, relations: usize, counts: [u64; 3]) {
        let Some(data) = fixture::real_data(name) else { return };
        open(&data, |source| {
            assert_eq!((source.nodes, source.relation_names.len()), (Some(nodes), relations));
            let Splits::Edges { valid, test, .. } = source.splits else { panic!("held out edges") };
            assert_eq!([source.edges.count(), valid.count(), test.count()], counts.map(Some));
            let ends = fixture::all_edges(&*source.edges, 0).unwrap();
            assert_eq!(ends.len() as u64, counts[0]);
            assert_eq!(ends[0], (0, 1));
        })
        .unwrap();
    }

    #[test]
    fn fb15k_237_comes_in_whole() {
        check_real("fb15k-237", 14_541, 237, [272_115, 17_535, 20_466]);
    }

    #[test]
    fn wn18rr_comes_in_whole() {
        check_real("wn18rr", 40_943, 11, [86_835, 3_034, 3_134]);
    }
}
