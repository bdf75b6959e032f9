//! String ids: numbers nodes by first appearance, within the memory budget.
//!
//! If the names fit, this uses a table in memory. Otherwise it uses external sorts:
//!
//! 1. It sorts names together with the position of each appearance. Equal names come together, so each appearance gets
//!    the first position of its name.
//! 2. It sorts the appearances by that first position, which numbers the names in order.
//! 3. It sorts back by position, which gives the id of each appearance in file order.
//!
//! Both ways end with the same pass: it writes the edges with their ids, and each new name.

use crate::delimited::{Lines, quoted};
use crate::sort::{Sorted, Sorter};
use crate::source::{CHUNK, EdgeColumns, EdgeSource, EdgeStream, ForeignEdge, NameSource, NameStream};
use crate::string_sort::StringSorter;
use crate::{ImportError, ImportWorkspace, Location, Result};
use esker_io::{SequentialReader, SequentialWriter};
use esker_store::{StoreError, create_sequential};
use esker_types::Unit;
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    io::{BufReader, Read, Write},
    path::{Path, PathBuf},
};

/// Memory of a name in the table besides its bytes: the entry, a table twice as large while it grows, heap overhead.
const TABLE_ENTRY_BYTES: u64 = 104;

const MOST_RELATIONS: usize = 1_000_000;
const MOST_RELATION_BYTES: usize = 64 << 20;

/// Names of relations, numbered by first appearance. They are few enough to stay in memory.
#[derive(Debug, Default)]
pub struct Relations {
    names: Vec<String>,
    numbers: HashMap<Vec<u8>, u32>,
    bytes: usize,
}

impl Relations {
    /// Memory of the names and their table.
    pub fn memory_bytes(names: &[String]) -> u64 {
        names.iter().map(|name| name.len() as u64 * 3 + 128).sum()
    }

    /// Relations with these names, in this order.
    pub fn new(names: Vec<String>) -> Relations {
        let numbers =
            names.iter().zip(0..).map(|(name, number)| (name.clone().into_bytes(), number)).collect();
        let bytes = names.iter().map(String::len).sum();
        Relations { names, numbers, bytes }
    }

    /// The number of a relation.
    pub fn number(&self, name: &[u8]) -> Option<u32> {
        self.numbers.get(name).copied()
    }

    /// Adds a name that may be new; `location` is its position.
    pub fn see(&mut self, name: &[u8], location: impl FnOnce() -> Location) -> Result<()> {
        if self.numbers.contains_key(name) {
            return Ok(());
        }
        let Ok(text) = std::str::from_utf8(name) else {
            return Err(location().bad("a relation name in UTF-8", quoted(name)));
        };
        self.bytes += name.len();
        if self.names.len() == MOST_RELATIONS || self.bytes > MOST_RELATION_BYTES {
            let expected =
                format!("at most {MOST_RELATIONS} relations of {MOST_RELATION_BYTES} bytes in all");
            return Err(
                location().bad(expected, format!("one more, {}; is this the relation column?", quoted(name)))
            );
        }
        self.numbers.insert(name.to_vec(), self.names.len() as u32);
        self.names.push(text.to_string());
        Ok(())
    }

    /// The names, by number.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The names, by number.
    pub fn into_names(self) -> Vec<String> {
        self.names
    }
}

/// Edges between named nodes. They are streamed twice if the names do not fit into memory.
pub trait NamedEdges {
    /// The file, for messages.
    fn path(&self) -> &Path;
    /// The optional columns of the edges.
    fn columns(&self) -> EdgeColumns;
    /// Starts before the first edge.
    fn open(&self) -> Result<Box<dyn NamedEdgeStream>>;
}

/// Edges between named nodes, one at a time.
pub trait NamedEdgeStream {
    /// Moves to the next edge; `false` if there is none.
    fn advance(&mut self) -> Result<bool>;
    /// Names of source and target.
    fn ends(&self) -> Result<[&[u8]; 2]>;
    /// The other columns of the edge.
    fn attributes(&self) -> Result<ForeignEdge>;
    /// The position of the current edge, for messages.
    fn location(&self) -> Location;
}

/// Counts of what numbering wrote to the work directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Spooled {
    edges: u64,
    nodes: u64,
}

/// Edges with ids instead of names, and the names.
pub struct Numbered {
    /// Number of different names.
    pub nodes: u64,
    /// Number of edges.
    pub count: u64,
    spool: PathBuf,
    names: PathBuf,
    origin: PathBuf,
    columns: EdgeColumns,
}

impl Numbered {
    /// Numbers the nodes of `edges`. `node_ids` has all names, one per line, in the order of their ids.
    pub fn new(
        workspace: &ImportWorkspace,
        edges: &dyn NamedEdges,
        node_ids: Option<&Path>,
    ) -> Result<Numbered> {
        let work = Work { workspace, edges, node_ids };
        let spooled = workspace.step("string ids", || work.run())?;
        Ok(Numbered {
            nodes: spooled.nodes,
            count: spooled.edges,
            spool: work.spool_path(),
            names: work.names_path(),
            origin: edges.path().to_path_buf(),
            columns: edges.columns(),
        })
    }

    /// Edges number `first..first + count`.
    pub fn edges(&self, first: u64, count: u64) -> Box<dyn EdgeSource> {
        assert!(first + count <= self.count);
        let (path, origin) = (self.spool.clone(), self.origin.clone());
        Box::new(SpooledEdges { path, origin, columns: self.columns, first, count })
    }

    /// The names, by number.
    pub fn names(&self) -> Box<dyn NameSource> {
        Box::new(SpooledNames { path: self.names.clone(), count: self.nodes })
    }
}

struct Work<'a> {
    workspace: &'a ImportWorkspace<'a>,
    edges: &'a dyn NamedEdges,
    node_ids: Option<&'a Path>,
}

impl Work<'_> {
    fn spool_path(&self) -> PathBuf {
        self.workspace.path("edges.numbered")
    }

    fn names_path(&self) -> PathBuf {
        self.workspace.path("nodes.names")
    }

    fn run(&self) -> Result<Spooled> {
        let half_bytes = self.workspace.budget.host_bytes / 2;
        let progress = self.workspace.progress;
        progress.stage("number the string ids", None, Unit::Count("edges"));
        let table = Numbering::Table { ids: HashMap::new(), bytes: 0, limit_bytes: half_bytes };
        let spooled = match self.write(table)? {
            Some(spooled) => spooled,
            None => {
                progress.finish();
                progress.stage("sort the string ids", None, Unit::Count("edges"));
                let numbering = Numbering::Sorted(self.sort(half_bytes)?);
                self.write(numbering)?.expect("only a table can be too small")
            }
        };
        progress.finish();
        Ok(spooled)
    }

    /// Calls `each` for every appearance of a name, in the order that determines the numbering.
    fn each_name(&self, mut each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        if let Some(path) = self.node_ids {
            let mut lines = Lines::open(path)?;
            while lines.advance()? {
                each(lines.name())?;
            }
        }
        let mut edges = self.edges.open()?;
        while edges.advance()? {
            edges.ends()?.into_iter().try_for_each(&mut each)?;
        }
        Ok(())
    }

    /// Sorts appearances externally. The result has the id of each, in order of appearance.
    fn sort(&self, memory_bytes: u64) -> Result<SortedIds> {
        let directory = &self.workspace.directory;
        let mut strings = StringSorter::new(directory, "names", memory_bytes);
        let mut position = 0u64;
        self.each_name(|name| {
            position += 1;
            strings.push(name, position - 1)
        })?;
        let mut strings = strings.finish()?;
        // While the strings are merged, their buffers and this sorter share the memory.
        let mut by_first = Sorter::<[u64; 2]>::new(directory.clone(), "by-first", memory_bytes / 2)?;
        let (mut current, mut first) = (None, 0);
        while let Some((name, position)) = strings.next()? {
            if current.as_ref() != Some(&name) {
                (current, first) = (Some(name), position);
            }
            by_first.push(&[[first, position]])?;
        }
        strings.remove_files()?;
        let mut by_first = by_first.finish()?;
        let mut by_position = Sorter::<[u64; 2]>::new(directory.clone(), "by-position", memory_bytes / 2)?;
        let (mut chunk, mut last, mut id) = (Vec::new(), 0, 0u64);
        while by_first.next(&mut chunk)? {
            for record in &mut chunk {
                let [first, position] = *record;
                // Position 0 is a first appearance and comes first, so 0 is the right initial value of `last`.
                id += (first != last) as u64;
                last = first;
                *record = [position, id];
            }
            by_position.push(&chunk)?;
        }
        by_first.remove_files()?;
        Ok(SortedIds { sorted: by_position.finish()?, chunk: Vec::new(), at: 0 })
    }

    /// Writes the edges with ids, and the names; `None` if the table grew too large.
    fn write(&self, mut numbering: Numbering) -> Result<Option<Spooled>> {
        let mut names = NameFileWriter::create(self.names_path())?;
        if let Some(path) = self.node_ids {
            let mut lines = Lines::open(path)?;
            while lines.advance()? {
                let Some(id) = numbering.next(lines.name())? else { return Ok(None) };
                if id != names.count {
                    let found = format!("{}, which is line {} already", quoted(lines.name()), id + 1);
                    return Err(lines.location().bad("each id once", found));
                }
                names.push(lines.name())?;
            }
        }
        let spool_path = self.spool_path();
        let mut spool = create_sequential(&spool_path)?;
        let narrow = self.edges.columns().none();
        let (mut edges, mut count) = (self.edges.open()?, 0u64);
        while edges.advance()? {
            let mut ids = [0; 2];
            for (name, slot) in edges.ends()?.into_iter().zip(&mut ids) {
                let Some(id) = numbering.next(name)? else { return Ok(None) };
                if id == names.count {
                    self.check_known(name, || edges.location())?;
                    names.push(name)?;
                }
                *slot = id;
            }
            let record = pack(&ForeignEdge { source: ids[0], target: ids[1], ..edges.attributes()? });
            let record = if narrow { &record[..2] } else { &record[..] };
            spool.write_all(bytemuck::cast_slice(record)).map_err(StoreError::io(&spool_path))?;
            count += 1;
            if count.is_multiple_of(CHUNK as u64) {
                self.workspace.progress.advance(CHUNK as u64);
            }
        }
        spool.finish().map_err(StoreError::io(&spool_path))?;
        numbering.remove_files()?;
        Ok(Some(Spooled { edges: count, nodes: names.finish()? }))
    }

    fn check_known(&self, name: &[u8], location: impl FnOnce() -> Location) -> Result<(), ImportError> {
        match self.node_ids {
            Some(path) => Err(location().bad(format!("an id listed in {}", path.display()), quoted(name))),
            None => Ok(()),
        }
    }
}

/// Returns the id of each appearance of a name.
enum Numbering {
    Table { ids: HashMap<Box<[u8]>, u64>, bytes: u64, limit_bytes: u64 },
    Sorted(SortedIds),
}

struct SortedIds {
    sorted: Sorted<[u64; 2]>,
    chunk: Vec<[u64; 2]>,
    at: usize,
}

impl Numbering {
    /// The id of the next appearance, whose name is `name`; `None` if the table is full.
    fn next(&mut self, name: &[u8]) -> Result<Option<u64>> {
        match self {
            Numbering::Table { ids, bytes, limit_bytes } => {
                if let Some(id) = ids.get(name) {
                    return Ok(Some(*id));
                }
                *bytes += name.len() as u64 + TABLE_ENTRY_BYTES;
                if *bytes > *limit_bytes {
                    return Ok(None);
                }
                let id = ids.len() as u64;
                ids.insert(name.into(), id);
                Ok(Some(id))
            }
            Numbering::Sorted(ids) => {
                if ids.at == ids.chunk.len() {
                    ids.sorted.next(&mut ids.chunk)?;
                    ids.at = 0;
                }
                ids.at += 1;
                match ids.chunk.get(ids.at - 1) {
                    Some([_, id]) => Ok(Some(*id)),
                    None => Err(ImportError::EdgesGrew),
                }
            }
        }
    }

    fn remove_files(self) -> Result<()> {
        match self {
            Numbering::Table { .. } => Ok(()),
            Numbering::Sorted(ids) => ids.sorted.remove_files(),
        }
    }
}

/// An edge as four words. The first two are enough if there are no other columns.
fn pack(edge: &ForeignEdge) -> [u64; 4] {
    let last = edge.relation as u64 | (edge.weight.to_bits() as u64) << 32;
    [edge.source, edge.target, edge.time as u64, last]
}

fn unpack(words: &[u64]) -> ForeignEdge {
    let mut edge = ForeignEdge { source: words[0], target: words[1], ..ForeignEdge::default() };
    if let [_, _, time, last] = *words {
        edge.time = time as i64;
        edge.relation = last as u32;
        edge.weight = f32::from_bits((last >> 32) as u32);
    }
    edge
}

struct SpooledEdges {
    path: PathBuf,
    origin: PathBuf,
    columns: EdgeColumns,
    first: u64,
    count: u64,
}

struct SpooledEdgeStream {
    path: PathBuf,
    reader: SequentialReader,
    width: usize,
    left: u64,
    words: Vec<u64>,
}

impl EdgeSource for SpooledEdges {
    fn count(&self) -> Option<u64> {
        Some(self.count)
    }
    fn columns(&self) -> EdgeColumns {
        self.columns
    }
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>> {
        let skip = skip.min(self.count);
        let width = if self.columns.none() { 2 } else { 4 };
        let offset = (self.first + skip) * width as u64 * 8;
        let reader = SequentialReader::open(&self.path, offset).map_err(StoreError::io(&self.path))?;
        let (path, left) = (self.path.clone(), self.count - skip);
        Ok(Box::new(SpooledEdgeStream { path, reader, width, left, words: Vec::new() }))
    }
    fn location(&self, position: u64) -> Location {
        Location::at(&self.origin, format!("edge {position}"))
    }
}

impl EdgeStream for SpooledEdgeStream {
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool> {
        out.clear();
        let count = self.left.min(CHUNK as u64) as usize;
        self.left -= count as u64;
        self.words.resize(count * self.width, 0);
        self.reader
            .read_exact(bytemuck::cast_slice_mut(&mut self.words))
            .map_err(StoreError::io(&self.path))?;
        out.extend(self.words.chunks_exact(self.width).map(unpack));
        Ok(count > 0)
    }
}

/// Names one after the other, each preceded by its length.
struct NameFileWriter {
    path: PathBuf,
    writer: SequentialWriter,
    count: u64,
}

impl NameFileWriter {
    fn create(path: PathBuf) -> Result<NameFileWriter> {
        let writer = create_sequential(&path)?;
        Ok(NameFileWriter { path, writer, count: 0 })
    }

    fn push(&mut self, name: &[u8]) -> Result<()> {
        let length = (name.len() as u32).to_le_bytes();
        self.writer
            .write_all(&length)
            .and_then(|()| self.writer.write_all(name))
            .map_err(StoreError::io(&self.path))?;
        self.count += 1;
        Ok(())
    }

    fn finish(self) -> Result<u64> {
        self.writer.finish().map_err(StoreError::io(&self.path))?;
        Ok(self.count)
    }
}

struct SpooledNames {
    path: PathBuf,
    count: u64,
}

struct SpooledNameStream {
    path: PathBuf,
    reader: BufReader<SequentialReader>,
    left: u64,
}

impl NameSource for SpooledNames {
    fn count(&self) -> u64 {
        self.count
    }
    fn open(&self) -> Result<Box<dyn NameStream>> {
        let reader = SequentialReader::open(&self.path, 0).map_err(StoreError::io(&self.path))?;
        let (path, reader) = (self.path.clone(), BufReader::with_capacity(256 << 10, reader));
        Ok(Box::new(SpooledNameStream { path, reader, left: self.count }))
    }
}

impl NameStream for SpooledNameStream {
    fn next(&mut self, out: &mut Vec<u8>) -> Result<bool> {
        out.clear();
        if self.left == 0 {
            return Ok(false);
        }
        self.left -= 1;
        let mut length = [0; 4];
        self.reader.read_exact(&mut length).map_err(StoreError::io(&self.path))?;
        out.resize(u32::from_le_bytes(length) as usize, 0);
        self.reader.read_exact(out).map_err(StoreError::io(&self.path))?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use proptest::prelude::*;

    type Pair = (String, String);
    type Found = (Vec<(u64, u64)>, Vec<String>);

    struct Pairs(Vec<Pair>);
    struct PairStream(Vec<Pair>, usize);

    impl NamedEdges for Pairs {
        fn path(&self) -> &Path {
            Path::new("edges.csv")
        }
        fn columns(&self) -> EdgeColumns {
            EdgeColumns { weight: true, ..EdgeColumns::default() }
        }
        fn open(&self) -> Result<Box<dyn NamedEdgeStream>> {
            Ok(Box::new(PairStream(self.0.clone(), 0)))
        }
    }

    impl NamedEdgeStream for PairStream {
        fn advance(&mut self) -> Result<bool> {
            self.1 += 1;
            Ok(self.1 <= self.0.len())
        }
        fn ends(&self) -> Result<[&[u8]; 2]> {
            let (source, target) = &self.0[self.1 - 1];
            Ok([source.as_bytes(), target.as_bytes()])
        }
        fn attributes(&self) -> Result<ForeignEdge> {
            Ok(ForeignEdge { weight: self.1 as f32, ..ForeignEdge::default() })
        }
        fn location(&self) -> Location {
            Location::row(Path::new("edges.csv"), self.1 as u64 - 1)
        }
    }

    /// Ends of the edges by name, read back through the ids, and the names.
    fn number(pairs: &[Pair], node_ids: Option<&str>, budget_bytes: u64) -> Result<Found> {
        fixture::in_workspace(|workspace| {
            workspace.budget.host_bytes = budget_bytes;
            let path = node_ids.map(|text| {
                std::fs::write(workspace.path("ids"), text).unwrap();
                workspace.path("ids")
            });
            let numbered = Numbered::new(workspace, &Pairs(pairs.to_vec()), path.as_deref())?;
            assert_eq!(numbered.count, pairs.len() as u64);
            let (mut stream, mut name, mut names) = (numbered.names().open()?, Vec::new(), Vec::new());
            while stream.next(&mut name)? {
                names.push(String::from_utf8(name.clone()).unwrap());
            }
            let edges = numbered.edges(0, numbered.count);
            let tail = fixture::all_edges(&*edges, numbered.count / 2)?;
            let all = fixture::all_edges(&*edges, 0)?;
            assert!(all.ends_with(&tail));
            let mut left: Vec<_> =
                std::fs::read_dir(&workspace.directory).unwrap().map(|e| e.unwrap().file_name()).collect();
            left.retain(|file| {
                !["ids", "journal.json", "edges.numbered", "nodes.names"].iter().any(|known| file == known)
            });
            assert!(left.is_empty(), "{left:?}");
            Ok((all, names))
        })
    }

    fn pairs(text: &[(&str, &str)]) -> Vec<Pair> {
        text.iter().map(|(source, target)| (source.to_string(), target.to_string())).collect()
    }

    const IN_MEMORY: u64 = 1 << 30;
    const OUTSIDE: u64 = 0;

    #[test]
    fn names_are_numbered_by_first_appearance_source_before_target() {
        for budget_bytes in [IN_MEMORY, OUTSIDE] {
            let (edges, names) =
                number(&pairs(&[("b", "a"), ("a", "c"), ("b", "b")]), None, budget_bytes).unwrap();
            assert_eq!(edges, [(0, 1), (1, 2), (0, 0)]);
            assert_eq!(names, ["b", "a", "c"]);
        }
    }

    #[test]
    fn a_list_of_ids_comes_before_the_edges() {
        for budget_bytes in [IN_MEMORY, OUTSIDE] {
            let (edges, names) = number(&pairs(&[("b", "a")]), Some("a\nx\nb\n"), budget_bytes).unwrap();
            assert_eq!(edges, [(2, 0)]);
            assert_eq!(names, ["a", "x", "b"]);
        }
    }

    #[test]
    fn ids_that_are_not_in_the_list_or_twice_in_it_are_named() {
        for budget_bytes in [IN_MEMORY, OUTSIDE] {
            let message = number(&pairs(&[("a", "b"), ("b", "z")]), Some("a\nb\n"), budget_bytes)
                .unwrap_err()
                .to_string();
            assert!(
                message.contains("edges.csv, row 1: expected an id listed in") && message.contains("`z`"),
                "{message}"
            );
            let message =
                number(&pairs(&[("a", "b")]), Some("a\nb\na"), budget_bytes).unwrap_err().to_string();
            assert!(
                message.contains("line 3: expected each id once, found `a`, which is line 1 already"),
                "{message}"
            );
        }
    }

    #[test]
    fn a_finished_numbering_is_not_done_again() {
        fixture::in_workspace(|workspace| {
            let first = Numbered::new(workspace, &Pairs(pairs(&[("a", "b")])), None).unwrap();
            let again = Numbered::new(workspace, &Pairs(vec![]), None).unwrap();
            assert_eq!((first.nodes, first.count), (again.nodes, again.count));
        });
    }

    #[test]
    fn too_many_relations_are_refused() {
        let mut relations = Relations::default();
        for number in 0..MOST_RELATIONS {
            relations.see(format!("{number}").as_bytes(), || unreachable!()).unwrap();
        }
        assert_eq!(relations.number(b"17"), Some(17));
        let error = relations.see(b"more", || Location::row(Path::new("e.csv"), 7)).unwrap_err().to_string();
        assert!(error.contains("e.csv, row 7: expected at most 1000000 relations"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn sorting_outside_numbers_like_the_table(ends in prop::collection::vec(("[a-d]{1,4}", "[a-d]{0,3}é?"), 0..3000)) {
            prop_assert_eq!(number(&ends, None, IN_MEMORY).unwrap(), number(&ends, None, OUTSIDE).unwrap());
        }
    }
}
