//! Parquet files, with one flag per file: `--edges E.parquet`. Ids and relations are integers or strings.

use super::Format;
use crate::dictionary::{NamedEdgeStream, NamedEdges, Numbered, Relations};
use crate::parquet_file::{ColumnKind, ParquetFile, TableStream, shown};
use crate::source::{CHUNK, EdgeColumns, EdgeSource, EdgeStream, ForeignEdge, ImportSource};
use crate::{ImportWorkspace, Location, Request, Result, given, input};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// The format.
pub struct Parquet;

impl Format for Parquet {
    fn name(&self) -> &'static str {
        "parquet"
    }

    fn about(&self) -> &'static str {
        "parquet files: --edges with source, target and perhaps relation columns, and the files other flags name"
    }

    fn flags(&self) -> Vec<&'static str> {
        [&["edges", "columns", "string-ids", "node-ids"], super::GIVEN].concat()
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let edges = request.need(&request.edges, "--edges E.parquet")?;
        let mut inputs = vec![input::existing(edges, "--edges names it")?];
        inputs.extend(given::inputs(request)?);
        Ok(inputs)
    }

    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let file = ParquetFile::open(request.need(&request.edges, "--edges E.parquet")?)?;
        let mut edges = ParquetEdges::new(file, request)?;
        workspace.hold("reading the edge list", edges.file.read_bytes(&edges.layout))?;
        if edges.kind(edges.relation) == Some(ColumnKind::Text) {
            let names = workspace.step("relations", || edges.relation_names())?;
            workspace.hold("names of relations", Relations::memory_bytes(&names))?;
            edges.relations = Some(Arc::new(Relations::new(names)));
        }
        let relation_names = edges.relations.as_ref().map(|relations| relations.names().to_vec());
        let mut source = if edges.kind(Some(0)) == Some(ColumnKind::Text) {
            super::need_row_order(request)?;
            let numbered = Numbered::new(workspace, &edges, request.node_ids.as_deref())?;
            let given = given::open(request, workspace, Some((numbered.nodes, "the edge list")))?;
            let mut source = given.with_edges(numbered.edges(0, numbered.count));
            source.node_names = Some(numbered.names());
            source
        } else if request.node_ids.is_some() || request.string_ids {
            let path = edges.file.path();
            return Err(Location::file(path).bad("string ids, for --node-ids or --string-ids", "integers"));
        } else {
            given::open(request, workspace, None)?.with_edges(Box::new(edges))
        };
        source.relation_names = relation_names.unwrap_or_default();
        Ok(source)
    }
}

/// An edge list in a parquet file.
#[derive(Clone)]
struct ParquetEdges {
    file: ParquetFile,
    /// Columns to read: source, target, then the others; `relation`, `weight` and `time` are positions in it.
    layout: Vec<usize>,
    relation: Option<usize>,
    weight: Option<usize>,
    time: Option<usize>,
    relations: Option<Arc<Relations>>,
}

impl ParquetEdges {
    fn new(file: ParquetFile, request: &Request) -> Result<ParquetEdges> {
        let names = &request.columns;
        let column = |word: &Option<String>, default: &str| file.find(word.as_deref().unwrap_or(default));
        let mut layout = vec![column(&names.source, "0")?, column(&names.target, "1")?];
        let mut add = |column: usize| {
            layout.push(column);
            layout.len() - 1
        };
        let mut optional = |word: &Option<String>| -> Result<Option<usize>> {
            Ok(word.as_ref().map(|word| file.find(word)).transpose()?.map(&mut add))
        };
        let mut relation = optional(&names.relation)?;
        let (weight, time) = (optional(&names.weight)?, optional(&names.time)?);
        let third = file.columns().get(2).filter(|_| *names == Default::default());
        if third
            .is_some_and(|third| matches!(third.kind, ColumnKind::Whole | ColumnKind::Text) && !third.list)
        {
            relation = Some(add(2));
        }
        let edges = ParquetEdges { file, layout, relation, weight, time, relations: None };
        edges.check()?;
        Ok(edges)
    }

    fn check(&self) -> Result<()> {
        let kinds = [self.kind(Some(0)), self.kind(Some(1))];
        let bad = |slot: usize, expected: &str| {
            let column = &self.file.columns()[self.layout[slot]];
            let found = format!("{}{}", if column.list { "lists of " } else { "" }, column.kind);
            Err(Location::at(self.file.path(), format!("column {}", column.name)).bad(expected, found))
        };
        for (slot, kind) in kinds.iter().enumerate() {
            if self.is_list(slot) || !matches!(kind, Some(ColumnKind::Whole | ColumnKind::Text)) {
                return bad(slot, "ids, integers or strings");
            }
        }
        if kinds[0] != kinds[1] {
            return bad(1, "ids like those of the source column");
        }
        for slot in self.relation.iter().chain(&self.weight).chain(&self.time) {
            if self.is_list(*slot) || self.kind(Some(*slot)) == Some(ColumnKind::Other) {
                return bad(*slot, "one plain value an edge");
            }
        }
        Ok(())
    }

    fn is_list(&self, slot: usize) -> bool {
        self.file.columns()[self.layout[slot]].list
    }

    fn kind(&self, slot: Option<usize>) -> Option<ColumnKind> {
        Some(self.file.columns()[self.layout[slot?]].kind)
    }

    fn relation_names(&self) -> Result<Vec<String>> {
        let mut relations = Relations::default();
        let Some(slot) = self.relation else { return Ok(Vec::new()) };
        let mut table = self.file.read(&[self.layout[slot]], 0)?;
        loop {
            let count = table.load(CHUNK)?;
            if count == 0 {
                return Ok(relations.into_names());
            }
            for (at, name) in table.texts(0)?.iter().enumerate() {
                relations.see(name.data(), || table.location(at, count))?;
            }
        }
    }

    fn rows(&self, first: u64) -> Result<ParquetEdgeRows> {
        Ok(ParquetEdgeRows {
            table: self.file.read(&self.layout, first)?,
            edges: self.clone(),
            at: 0,
            loaded: 0,
        })
    }
}

/// The loaded rows of an edge list.
struct ParquetEdgeRows {
    table: TableStream,
    edges: ParquetEdges,
    at: usize,
    loaded: usize,
}

impl ParquetEdgeRows {
    /// All columns of the edge at `at` except its ends.
    fn attributes_at(&self, at: usize) -> Result<ForeignEdge> {
        let mut edge = ForeignEdge::default();
        let location = || self.table.location(at, self.loaded);
        if let Some(slot) = self.edges.relation {
            edge.relation = match &self.edges.relations {
                Some(relations) => {
                    let name = &self.table.texts(slot)?[at];
                    relations
                        .number(name.data())
                        .ok_or_else(|| location().bad("a relation seen before", shown(name)))?
                }
                None => {
                    let number = self.table.whole(slot)?[at];
                    number
                        .try_into()
                        .map_err(|_| location().bad("a relation number from 0 to 2^32 - 1", number))?
                }
            };
        }
        if let Some(slot) = self.edges.weight {
            edge.weight = self.table.float(slot, at)?;
        }
        if let Some(slot) = self.edges.time {
            edge.time = self.table.whole(slot)?[at];
        }
        Ok(edge)
    }
}

impl EdgeSource for ParquetEdges {
    fn count(&self) -> Option<u64> {
        Some(self.file.rows())
    }
    fn columns(&self) -> EdgeColumns {
        EdgeColumns {
            relation: self.relation.is_some(),
            weight: self.weight.is_some(),
            time: self.time.is_some(),
        }
    }
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>> {
        Ok(Box::new(self.rows(skip)?))
    }
    fn location(&self, position: u64) -> Location {
        Location::row(self.file.path(), position)
    }
}

impl EdgeStream for ParquetEdgeRows {
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool> {
        out.clear();
        self.loaded = self.table.load(CHUNK)?;
        for at in 0..self.loaded {
            let id = |slot: usize| -> Result<u64> {
                let id = self.table.whole(slot)?[at];
                u64::try_from(id)
                    .map_err(|_| self.table.location(at, self.loaded).bad("an id, 0 or more", id))
            };
            out.push(ForeignEdge { source: id(0)?, target: id(1)?, ..self.attributes_at(at)? });
        }
        Ok(self.loaded > 0)
    }
}

impl NamedEdges for ParquetEdges {
    fn path(&self) -> &Path {
        self.file.path()
    }
    fn columns(&self) -> EdgeColumns {
        EdgeSource::columns(self)
    }
    fn open(&self) -> Result<Box<dyn NamedEdgeStream>> {
        Ok(Box::new(self.rows(0)?))
    }
}

impl NamedEdgeStream for ParquetEdgeRows {
    fn advance(&mut self) -> Result<bool> {
        self.at += 1;
        if self.at >= self.loaded {
            self.loaded = self.table.load(CHUNK)?;
            self.at = 0;
        }
        Ok(self.loaded > 0)
    }
    fn ends(&self) -> Result<[&[u8]; 2]> {
        Ok([self.table.texts(0)?[self.at].data(), self.table.texts(1)?[self.at].data()])
    }
    fn attributes(&self) -> Result<ForeignEdge> {
        self.attributes_at(self.at)
    }
    fn location(&self) -> Location {
        self.table.location(self.at, self.loaded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EdgeColumnNames;
    use crate::fixture;

    fn open<T>(
        file: &str,
        change: impl FnOnce(&mut Request),
        look: impl FnOnce(ImportSource) -> Result<T>,
    ) -> Result<T> {
        let edges = Some(fixture::committed("parquet").join(file));
        let mut request = Request { edges, ..Request::default() };
        change(&mut request);
        Parquet.inputs(&request)?;
        fixture::in_workspace(|workspace| look(Parquet.open(&request, workspace)?))
    }

    fn message(file: &str, change: impl FnOnce(&mut Request)) -> String {
        open(file, change, |source| fixture::all_edges(&*source.edges, 0)).unwrap_err().to_string()
    }

    fn edges(source: &ImportSource) -> Result<Vec<ForeignEdge>> {
        let (mut stream, mut chunk, mut all) = (source.edges.open(0)?, Vec::new(), Vec::new());
        while stream.next(&mut chunk)? {
            all.extend_from_slice(&chunk);
        }
        Ok(all)
    }

    #[test]
    fn numbers_are_read_over_row_groups_from_any_row() {
        let check = |source: ImportSource| {
            assert_eq!(source.edges.count(), Some(100));
            assert!(source.edges.columns().relation);
            let all = edges(&source)?;
            assert!(
                all.iter()
                    .zip(0..)
                    .all(|(edge, k)| (edge.source, edge.target, edge.relation)
                        == (k, k * 7 % 100, k as u32 % 3))
            );
            for skip in [0, 1, 39, 40, 41, 99, 100] {
                assert_eq!(fixture::all_edges(&*source.edges, skip)?.len() as u64, 100 - skip, "from {skip}");
            }
            Ok(())
        };
        open("numbers.parquet", |_| (), check).unwrap();
    }

    #[test]
    fn columns_go_by_name_or_number() {
        let names = EdgeColumnNames {
            source: Some("target".into()),
            target: Some("0".into()),
            weight: Some("weight".into()),
            time: Some("when".into()),
            ..Default::default()
        };
        let all =
            open("numbers.parquet", |request| request.columns = names, |source| edges(&source)).unwrap();
        assert_eq!(all[3], ForeignEdge { source: 21, target: 3, time: -47, relation: 0, weight: 1.5 });
        let wrong = EdgeColumnNames { source: Some("src".into()), ..Default::default() };
        let found = message("numbers.parquet", |request| request.columns = wrong);
        assert!(found.contains("expected a column `src`, found the columns source, target, kind"), "{found}");
    }

    #[test]
    fn unsigned_numbers_keep_their_sign() {
        let ends = open("unsigned.parquet", |_| (), |source| fixture::all_edges(&*source.edges, 0)).unwrap();
        assert_eq!(ends, [(u32::MAX as u64, 0)]);
    }

    #[test]
    fn strings_are_numbered_by_first_appearance() {
        let check = |source: ImportSource| {
            assert_eq!((source.nodes, source.relation_names.join(" ")), (Some(100), "knows likes".into()));
            // node 0 -> node 0, node 0 -> node 1, node 1 -> node 2, ...
            let all = edges(&source)?;
            assert!(
                all.iter()
                    .zip(0..)
                    .all(|(edge, k)| (edge.source, edge.target, edge.relation as u64) == (k / 2, k, k % 2))
            );
            Ok(())
        };
        open("names.parquet", |_| (), check).unwrap();
    }

    #[test]
    fn nulls_negatives_and_other_types_are_named() {
        let found = message("nulls.parquet", |_| ());
        assert!(
            found.contains("nulls.parquet, row 2: expected a value in column source, found null"),
            "{found}"
        );
        let found = message("negative.parquet", |_| ());
        assert!(found.contains("negative.parquet, row 2: expected an id, 0 or more, found -3"), "{found}");
        let found = message("columns.parquet", |_| ());
        assert!(found.contains("column a: expected ids, integers or strings, found floats"), "{found}");
        assert!(message("make.py", |_| ()).contains("make.py: expected readable parquet data"));
        let found = message("numbers.parquet", |request| request.string_ids = true);
        assert!(found.contains("expected string ids"), "{found}");
    }
}
