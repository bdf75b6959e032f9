//! Delimited text, with one flag per file: `--edges E.tsv.gz`. Ids and relations are numbers or strings.

use super::Format;
use super::csv_guess::{FirstRows, Guess};
use crate::delimited::{DelimitedRecords, Dialect, EdgeLayout, TextEdges, read_attributes};
use crate::dictionary::{NamedEdgeStream, NamedEdges, Numbered, Relations};
use crate::source::{EdgeColumns, ForeignEdge, ImportSource};
use crate::{ImportWorkspace, Location, Request, Result, given, input};
use esker_types::Unit;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Rows that are examined to decide whether ids and relations are numbers.
const SAMPLE_ROWS: usize = 1000;

/// The format.
pub struct Csv;

impl Format for Csv {
    fn name(&self) -> &'static str {
        "csv"
    }

    fn about(&self) -> &'static str {
        "delimited text, plain or .gz: --edges with source, target and perhaps relation columns, numbers or strings"
    }

    fn flags(&self) -> Vec<&'static str> {
        [&["edges", "header", "columns", "string-ids", "node-ids"], super::GIVEN].concat()
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let edges = request.need(&request.edges, "--edges E.csv")?;
        let mut inputs = vec![input::existing(edges, "--edges names it")?];
        inputs.extend(given::inputs(request)?);
        Ok(inputs)
    }

    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let path = request.need(&request.edges, "--edges E.csv")?;
        let plan = CsvPlan::new(request, path)?;
        plan.guess.notes.iter().for_each(|note| workspace.progress.note(note));
        if plan.guess.named_nodes {
            super::need_row_order(request)?;
        }
        let (relations, count) = match plan.guess.named_relations {
            true => plan.relations(path, workspace)?,
            false => (None, None),
        };
        let edges = TextEdges {
            path: path.to_path_buf(),
            dialect: plan.dialect,
            layout: plan.guess.layout,
            relations,
            count,
        };
        let relation_names = edges.relations.as_ref().map(|relations| relations.names().to_vec());
        let mut source = match plan.guess.named_nodes {
            false => given::open(request, workspace, None)?.with_edges(Box::new(edges)),
            true => {
                let numbered = Numbered::new(workspace, &edges, request.node_ids.as_deref())?;
                let given = given::open(request, workspace, Some((numbered.nodes, "the edge list")))?;
                let mut source = given.with_edges(numbered.edges(0, numbered.count));
                source.node_names = Some(numbered.names());
                source
            }
        };
        source.relation_names = relation_names.unwrap_or_default();
        Ok(source)
    }
}

impl NamedEdges for TextEdges {
    fn path(&self) -> &Path {
        &self.path
    }
    fn columns(&self) -> EdgeColumns {
        self.layout.columns()
    }
    fn open(&self) -> Result<Box<dyn NamedEdgeStream>> {
        let records = DelimitedRecords::open(&self.path, self.dialect)?;
        Ok(Box::new(TextNames { records, layout: self.layout, relations: self.relations.clone() }))
    }
}

/// Edges between named nodes in a text file.
pub struct TextNames {
    /// The file.
    pub records: DelimitedRecords,
    /// Its columns.
    pub layout: EdgeLayout,
    /// Numbers of its relations, if they have names.
    pub relations: Option<Arc<Relations>>,
}

impl NamedEdgeStream for TextNames {
    fn advance(&mut self) -> Result<bool> {
        self.records.advance()
    }
    fn ends(&self) -> Result<[&[u8]; 2]> {
        Ok([self.records.name(self.layout.source)?, self.records.name(self.layout.target)?])
    }
    fn attributes(&self) -> Result<ForeignEdge> {
        read_attributes(&self.records, &self.layout, self.relations.as_deref())
    }
    fn location(&self) -> Location {
        self.records.location()
    }
}

/// How to read an edge list, decided from the flags and its first rows.
struct CsvPlan {
    dialect: Dialect,
    guess: Guess,
}

impl CsvPlan {
    fn new(request: &Request, path: &Path) -> Result<CsvPlan> {
        let mut dialect = Dialect::guess(path, request.delimiter)?;
        let mut records = DelimitedRecords::open(path, dialect)?;
        let mut first = Vec::new();
        if records.advance()? {
            first = (0..records.width())
                .map(|column| Ok(records.field(column)?.to_vec()))
                .collect::<Result<Vec<Vec<u8>>>>()?;
        }
        if first.len() < 2 {
            let expected = "at least two columns, source and target (another --delimiter?)";
            return Err(Location::at(path, "line 1").bad(expected, first.len()));
        }
        let mut sample = FirstRows::new(first);
        for _ in 0..SAMPLE_ROWS {
            if !records.advance()? {
                break;
            }
            let fields =
                (0..records.width()).map(|column| records.field(column)).collect::<Result<Vec<_>>>()?;
            sample.see(fields.into_iter());
        }
        let guess = sample.guess(request, path)?;
        dialect.header = guess.header;
        Ok(CsvPlan { dialect, guess })
    }

    /// The names of the relations and the number of edges, from one pass over the file.
    fn relations(
        &self,
        path: &Path,
        workspace: &mut ImportWorkspace,
    ) -> Result<(Option<Arc<Relations>>, Option<u64>)> {
        let (names, count) = workspace.step("relations", || {
            let mut records = DelimitedRecords::open(path, self.dialect)?;
            let (mut relations, mut count) = (Relations::default(), 0u64);
            workspace.progress.stage("collect the relations", None, Unit::Count("edges"));
            while records.advance()? {
                if let Some(column) = self.guess.layout.relation {
                    relations.see(records.name(column)?, || records.location())?;
                }
                count += 1;
                if count.is_multiple_of(1 << 16) {
                    workspace.progress.advance(1 << 16);
                }
            }
            workspace.progress.finish();
            Ok((relations.into_names(), count))
        })?;
        workspace.hold("names of relations", Relations::memory_bytes(&names))?;
        Ok((Some(Arc::new(Relations::new(names))), Some(count)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EdgeColumnNames;
    use crate::fixture;

    type Found = (Vec<ForeignEdge>, Option<u64>, Vec<String>);

    fn read(name: &str, bytes: &[u8], change: impl FnOnce(&mut Request)) -> Result<Found> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let mut request = Request { format: "csv".into(), edges: Some(path), ..Request::default() };
        change(&mut request);
        Csv.inputs(&request)?;
        fixture::in_workspace(|workspace| {
            let source = Csv.open(&request, workspace)?;
            let (mut stream, mut chunk, mut edges) = (source.edges.open(0)?, Vec::new(), Vec::new());
            while stream.next(&mut chunk)? {
                edges.extend_from_slice(&chunk);
            }
            let tail = fixture::all_edges(&*source.edges, 1)?;
            assert_eq!(tail.len(), edges.len().saturating_sub(1));
            Ok((edges, source.nodes, source.relation_names))
        })
    }

    fn ends(text: &str) -> Vec<(u64, u64, u32)> {
        let (edges, ..) = read("e.csv", text.as_bytes(), |_| ()).unwrap();
        edges.iter().map(|edge| (edge.source, edge.target, edge.relation)).collect()
    }

    fn message(text: &str) -> String {
        read("e.csv", text.as_bytes(), |_| ()).unwrap_err().to_string()
    }

    #[test]
    fn numbers_are_read_with_and_without_a_header() {
        assert_eq!(ends("1,2\n3,4\n"), [(1, 2, 0), (3, 4, 0)]);
        assert_eq!(ends("src,dst\n1,2\n3,4\n"), [(1, 2, 0), (3, 4, 0)]);
        assert_eq!(ends("1 2\n3 4"), [(1, 2, 0), (3, 4, 0)]);
        assert_eq!(ends("# a graph\n# FromNodeId\tToNodeId\n1\t2\n3\t4\n"), [(1, 2, 0), (3, 4, 0)]);
        assert!(message("# a graph\n1,2\n3\n").contains("line 3"));
        assert_eq!(ends("7\t8\t1\r\n8\t7\t0\r\n"), [(7, 8, 1), (8, 7, 0)]);
    }

    #[test]
    fn strings_are_numbered_by_first_appearance() {
        let (edges, nodes, relations) =
            read("e.tsv", b"b\ta\tlikes\na\tc\tknows\nc\tb\tlikes\n", |_| ()).unwrap();
        let found: Vec<_> = edges.iter().map(|edge| (edge.source, edge.target, edge.relation)).collect();
        assert_eq!(found, [(0, 1, 0), (1, 2, 1), (2, 0, 0)]);
        assert_eq!((nodes, relations), (Some(3), vec!["likes".to_string(), "knows".to_string()]));
    }

    #[test]
    fn numbers_are_names_when_the_user_says_so() {
        let (edges, nodes, _) =
            read("e.csv", b"70,80\n80,90\n", |request| request.string_ids = true).unwrap();
        assert_eq!((edges[1].source, edges[1].target, nodes), (1, 2, Some(3)));
    }

    #[test]
    fn columns_go_by_name_or_number() {
        let text = b"when,to,from,how_much\n-5,1,2,0.5\n6,3,4,1.5\n";
        let names = |source: &str, target: &str| EdgeColumnNames {
            source: Some(source.into()),
            target: Some(target.into()),
            weight: Some("how_much".into()),
            time: Some("0".into()),
            ..Default::default()
        };
        let (edges, ..) = read("e.csv", text, |request| request.columns = names("from", "1")).unwrap();
        assert_eq!(edges[0], ForeignEdge { source: 2, target: 1, time: -5, relation: 0, weight: 0.5 });
        let error =
            read("e.csv", text, |request| request.columns = names("of", "to")).unwrap_err().to_string();
        assert!(
            error.contains("expected a column `of`, found the columns when, to, from, how_much"),
            "{error}"
        );
    }

    #[test]
    fn a_third_column_called_weight_is_one() {
        let (edges, ..) = read("e.csv", b"src,dst,weight\n1,2,0.5\n", |_| ()).unwrap();
        assert_eq!(edges[0].weight, 0.5);
    }

    #[test]
    fn bad_rows_are_named_with_line_and_value() {
        assert!(message("1,2\n3\n").contains("e.csv, line 2: expected 2 fields"));
        assert!(message("1,2\n3,\n").contains("line 2: expected an id"));
        assert!(message("1,2\n3,-4\n").contains("found `-4`"));
        assert!(message("p,q,x\na,b,\n").contains("line 2: expected a name in column 2, found nothing"));
        assert!(
            message("1,2,0.5x\n1,2,7\n3,4,\n").contains("line 3: expected a name in column 2, found nothing")
        );
        assert!(message("1\n2\n").contains("expected at least two columns"));
        assert!(message("").contains("expected at least two columns"));
        let late = "1,2\n".repeat(2000) + "3,x\n";
        let found = message(&late);
        assert!(found.contains("line 2001: expected an id") && found.contains("--string-ids"), "{found}");
    }

    #[test]
    fn a_cut_gzip_file_is_named() {
        let packed = fixture::gzip("1,2\n3,4\n".repeat(5000).as_bytes());
        let error = read("e.csv.gz", &packed[..packed.len() / 2], |_| ()).unwrap_err().to_string();
        assert!(error.contains("e.csv.gz"), "{error}");
    }

    #[test]
    fn wordnet_comes_in_whole() {
        let Some(data) = fixture::real_data("wordnet-synsets") else { return };
        let file = |name: &str| Some(data.join(name));
        let request = Request {
            edges: file("edges.tsv.gz"),
            delimiter: Some('\t'),
            features_csr: file("features.npz"),
            labels: file("labels.npy"),
            split: file("split.npy").map(crate::SplitChoice::File),
            ..Request::default()
        };
        fixture::in_workspace(|workspace| {
            let source = Csv.open(&request, workspace).unwrap();
            assert_eq!((source.nodes, source.relation_names.len()), (Some(117_659), 26));
            let edges = fixture::all_edges(&*source.edges, 0).unwrap();
            assert_eq!((edges.len(), edges[..2].to_vec()), (364_552, vec![(0, 1), (0, 2)]));
            assert_eq!(source.features.unwrap().dim(), 1000);
            let labels = fixture::all_rows(&*source.labels.unwrap().rows, 0).unwrap();
            assert_eq!(labels.iter().copied().fold(0.0, f32::max), 44.0);
        });
    }
}
