//! Which nodes (or edges) are for training, validation and testing: given as ids or codes, or drawn with a random
//! seed.

use super::edges::CheckedEdges;
use super::selection::{Bitmap, Selection, SmallestPriorities, share_of};
use super::topology::IdWriter;
use crate::source::{EdgeSource, ForeignNegatives, IdMatrix, IdSource, RowSource, Splits};
use crate::{ImportError, ImportWorkspace, Location, MINIMUM_MEMORY_BYTES, Result, SplitChoice};
use esker_store::{ArrayFile, FileEntry, LabelInfo, LabelKind, NegativeFile, SplitInfo, SplitOver, file};
use esker_types::random::{Key, Permutation};
use esker_types::{IdWidth, Unit};
use std::collections::BTreeMap;
use std::path::Path;

const NAMES: [&str; 3] = [file::SPLIT_TRAIN, file::SPLIT_VALID, file::SPLIT_TEST];

/// The source of the splits.
pub(super) struct SplitPlan<'a> {
    pub source: &'a Splits,
    pub choice: Option<&'a SplitChoice>,
    pub seed: u64,
    pub nodes: u64,
    pub edges: u64,
    pub id_width: IdWidth,
    pub selection: Option<&'a Selection>,
    pub has_relations: bool,
    /// Number of relations, named or met in training edges.
    pub relations: u64,
}

impl SplitPlan<'_> {
    /// Writes the splits, if there are any. `labels` has been written to `directory` already.
    pub fn build(
        &self,
        directory: &Path,
        labels: Option<(&LabelInfo, &FileEntry)>,
        workspace: &ImportWorkspace,
    ) -> Result<Option<(SplitInfo, Vec<FileEntry>)>> {
        if self.choice.is_none() && matches!(self.source, Splits::None) {
            return Ok(None);
        }
        workspace.step("splits", || {
            workspace.progress.stage("write splits", None, Unit::Count("ids"));
            let result = self.write(directory, labels, workspace)?;
            workspace.progress.finish();
            Ok(result)
        })
    }

    fn write(
        &self,
        directory: &Path,
        labels: Option<(&LabelInfo, &FileEntry)>,
        workspace: &ImportWorkspace,
    ) -> Result<Option<(SplitInfo, Vec<FileEntry>)>> {
        if let (Splits::Edges { valid, test, negatives }, None | Some(SplitChoice::File(_))) =
            (self.source, self.choice)
        {
            let edges = [valid.as_ref(), test.as_ref()];
            return self.write_edges(directory, edges, negatives, workspace).map(Some);
        }
        let bytes = Bitmap::memory_bytes(self.nodes) * 4;
        workspace.require(&format!("splitting {} nodes", self.nodes), bytes, MINIMUM_MEMORY_BYTES / 2)?;
        let mut sets = [Bitmap::new(self.nodes), Bitmap::new(self.nodes), Bitmap::new(self.nodes)];
        match (self.choice, self.source) {
            (Some(SplitChoice::PerClass { train, valid }), _) => {
                self.per_class(*train, *valid, directory, labels, &mut sets, workspace)?;
            }
            (Some(SplitChoice::Share { train, valid, test }), _) => {
                self.by_share([*train, *valid, *test], directory, labels, &mut sets)?;
            }
            (_, Splits::Nodes { train, valid, test }) => {
                for (index, ids) in [train, valid, test].into_iter().enumerate() {
                    self.read_ids(ids.as_ref(), index, &mut sets, workspace)?;
                }
            }
            (_, Splits::Coded(codes)) => self.read_codes(codes.as_ref(), &mut sets, workspace)?,
            (_, Splits::None) => return Ok(None),
            (_, Splits::Edges { .. }) => unreachable!("written above"),
        }
        self.check_labelled(directory, labels, &sets)?;
        let mut files = Vec::new();
        for (name, set) in NAMES.into_iter().zip(&sets) {
            let mut writer = IdWriter::create(directory, name, self.id_width, 1)?;
            for node in set.iter() {
                writer.push(node)?;
            }
            files.push(writer.finish()?);
        }
        let [train, valid, test] = sets.map(|set| set.len());
        Ok(Some((SplitInfo { over: SplitOver::Nodes, train, valid, test, negatives: Vec::new() }, files)))
    }

    fn read_ids(
        &self,
        ids: &dyn IdSource,
        index: usize,
        sets: &mut [Bitmap; 3],
        workspace: &ImportWorkspace,
    ) -> Result<()> {
        let of = self.selection.map_or(self.nodes, Selection::of);
        let (mut stream, mut chunk, mut position) = (ids.open()?, Vec::new(), 0);
        while stream.next(&mut chunk)? {
            for id in &chunk {
                if *id >= of {
                    let expected = format!("node ids below {of}, the number of nodes");
                    return Err(ids.location(position).bad(expected, id));
                }
                let kept = self.selection.map_or(Some(*id), |selection| selection.rank(*id));
                if let Some(node) = kept {
                    if let Some(other) = (0..3).find(|other| sets[*other].contains(node)) {
                        let mask = if *id <= 1 { " (a mask of 0 and 1? save it as booleans)" } else { "" };
                        let found = format!("node {id}, which is in {} already{mask}", NAMES[other]);
                        return Err(ids.location(position).bad("each node once, in one split", found));
                    }
                    sets[index].insert(node);
                }
                position += 1;
            }
            workspace.progress.advance(chunk.len() as u64);
        }
        Ok(())
    }

    fn read_codes(
        &self,
        codes: &dyn RowSource,
        sets: &mut [Bitmap; 3],
        workspace: &ImportWorkspace,
    ) -> Result<()> {
        let of = self.selection.map_or(self.nodes, Selection::of);
        if codes.dim() != 1 || codes.rows() != of {
            let found = format!("{} rows of {}", codes.rows(), codes.dim());
            return Err(codes.location(0).bad(format!("{of} split codes, one a node"), found));
        }
        let (mut stream, mut values, mut id, mut others) = (codes.open(0)?, Vec::new(), 0, 0);
        while id < of {
            values.resize((of - id).min(1 << 14) as usize, 0.0);
            stream.fill(&mut values)?;
            for code in &values {
                let index = [0.0, 1.0, 2.0].iter().position(|known| known == code);
                others += index.is_none() as u64;
                let node = self.selection.map_or(Some(id), |selection| selection.rank(id));
                if let (Some(node), Some(index)) = (node, index) {
                    sets[index].insert(node);
                }
                id += 1;
            }
        }
        if others == of && of > 0 {
            return Err(codes.location(0).bad("some nodes with code 0, 1 or 2", "none"));
        }
        if others > 0 {
            let text = format!(
                "{}: {others} nodes have another code than 0, 1 or 2 and are in no split",
                codes.location(0).path.display()
            );
            workspace.progress.note(&text);
        }
        Ok(())
    }

    fn per_class(
        &self,
        train: u64,
        valid: u64,
        directory: &Path,
        labels: Option<(&LabelInfo, &FileEntry)>,
        sets: &mut [Bitmap; 3],
        workspace: &ImportWorkspace,
    ) -> Result<()> {
        let Some((_, entry)) = labels.filter(|(info, _)| info.kind == LabelKind::Classes) else {
            return Err(ImportError::NoClasses);
        };
        let key = Key::new(self.seed).with(0x5b117);
        let Some(requested) = train.checked_add(valid).filter(|requested| *requested <= self.nodes) else {
            return Err(ImportError::FewNodes { train, valid, nodes: self.nodes });
        };
        // One sample per class, created when the class first occurs.
        let mut samples: BTreeMap<i32, SmallestPriorities> = BTreeMap::new();
        let mut bytes = 0;
        for_each_class(directory, entry, |node, class| {
            let sample = samples.entry(class).or_insert_with(|| SmallestPriorities::new(requested as usize));
            if sample.offered < requested {
                bytes += if sample.offered == 0 { 160 } else { 32 };
                workspace.require("--split per-class", bytes, MINIMUM_MEMORY_BYTES / 2)?;
            }
            sample.offer(key.at(node), node);
            sets[2].insert(node);
            Ok(())
        })?;
        let test = std::mem::replace(&mut sets[2], Bitmap::new(self.nodes));
        for (class, sample) in samples {
            if sample.offered < requested {
                let found = sample.offered;
                return Err(ImportError::SmallClass { train, valid, class, found, needed: requested });
            }
            for (index, node) in sample.into_items().into_iter().enumerate() {
                sets[(index as u64 >= train) as usize].insert(node);
            }
        }
        let [train_set, valid_set, test_set] = sets;
        for node in test.iter().filter(|node| !train_set.contains(*node) && !valid_set.contains(*node)) {
            test_set.insert(node);
        }
        Ok(())
    }

    fn by_share(
        &self,
        shares: [f64; 3],
        directory: &Path,
        labels: Option<(&LabelInfo, &FileEntry)>,
        sets: &mut [Bitmap; 3],
    ) -> Result<()> {
        let classes = labels.filter(|(info, _)| info.kind == LabelKind::Classes);
        let of = classes.map_or(self.nodes, |(info, _)| info.labelled);
        let order = Permutation::new(of, Key::new(self.seed).with(0x54a5e));
        let train_end = share_of(of, shares[0]);
        let valid_end = train_end + share_of(of, shares[1]);
        // Shares that add up to one leave out no node, whatever the rounding.
        let all = shares.iter().sum::<f64>() > 1.0 - 1e-9;
        let test_end = if all { of } else { (valid_end + share_of(of, shares[2])).min(of) };
        let mut item = 0;
        let mut location = |node: u64| {
            let at = order.forward(item);
            item += 1;
            if let Some(index) = [train_end, valid_end, test_end].iter().position(|end| at < *end) {
                sets[index].insert(node);
            }
        };
        match classes {
            Some((_, entry)) => for_each_class(directory, entry, |node, _| {
                location(node);
                Ok(())
            })?,
            None => (0..self.nodes).for_each(location),
        }
        Ok(())
    }

    /// Refuses a training node without a label: the loss would silently ignore it.
    fn check_labelled(
        &self,
        directory: &Path,
        labels: Option<(&LabelInfo, &FileEntry)>,
        sets: &[Bitmap; 3],
    ) -> Result<()> {
        let Some((info, entry)) = labels.filter(|(info, _)| info.kind == LabelKind::Classes) else {
            return Ok(());
        };
        if info.labelled == self.nodes {
            return Ok(());
        }
        let mut unlabelled = None;
        let array = ArrayFile::open(directory, entry)?;
        let (mut elements, mut chunk, mut node) = (array.elements(0)?, vec![0i32; 1 << 14], 0u64);
        while unlabelled.is_none() {
            let count = elements.fill(&mut chunk)?;
            if count == 0 {
                break;
            }
            let lacking = |(node, class): &(u64, &i32)| **class < 0 && sets[0].contains(*node);
            unlabelled = (node..).zip(&chunk[..count]).find(lacking).map(|(node, _)| node);
            node += count as u64;
        }
        match unlabelled {
            Some(node) => Err(ImportError::Unlabelled { node }),
            None => Ok(()),
        }
    }

    fn write_edges(
        &self,
        directory: &Path,
        edges: [&dyn EdgeSource; 2],
        negatives: &[Option<ForeignNegatives>; 2],
        workspace: &ImportWorkspace,
    ) -> Result<(SplitInfo, Vec<FileEntry>)> {
        let (mut files, mut negative_files) = (Vec::new(), Vec::new());
        for (name, edges) in [file::SPLIT_VALID, file::SPLIT_TEST].into_iter().zip(edges) {
            files.push(self.write_rows(directory, name, edges, workspace)?);
        }
        let (valid, test) = (files[0].rows, files[1].rows);
        for (split, negatives) in negatives.iter().enumerate() {
            let Some(negatives) = negatives else { continue };
            let entries = self.write_negatives(directory, split, files[split].rows, negatives, workspace)?;
            for entry in &entries {
                let shared = matches!(negatives, ForeignNegatives::Shared(_));
                let count = if shared { entry.rows } else { entry.columns };
                negative_files.push(NegativeFile { name: entry.name.clone(), count });
            }
            files.extend(entries);
        }
        let (over, train, negatives) = (SplitOver::Edges, self.edges, negative_files);
        Ok((SplitInfo { over, train, valid, test, negatives }, files))
    }

    /// Writes edges as rows of source, target and relation.
    fn write_rows(
        &self,
        directory: &Path,
        name: &str,
        edges: &dyn EdgeSource,
        workspace: &ImportWorkspace,
    ) -> Result<FileEntry> {
        let of = self.selection.map_or(self.nodes, Selection::of);
        // Relations are 32-bit, so they fit either width.
        let mut writer = IdWriter::create(directory, name, self.id_width, 3)?;
        let (mut stream, mut chunk) = (CheckedEdges::open(edges, Some(of), 0)?, Vec::new());
        loop {
            let start = stream.position;
            if !stream.next(&mut chunk)? {
                break;
            }
            for (edge, position) in chunk.iter().zip(start..) {
                if self.has_relations && edge.relation as u64 >= self.relations {
                    let expected = format!("relations below {}, those of training edges", self.relations);
                    return Err(edges.location(position).bad(expected, edge.relation));
                }
                let rank = |node| self.selection.map_or(Some(node), |selection| selection.rank(node));
                if let (Some(source), Some(target)) = (rank(edge.source), rank(edge.target)) {
                    writer.push(source)?;
                    writer.push(target)?;
                    writer.push(if self.has_relations { edge.relation as u64 } else { 0 })?;
                }
            }
            workspace.progress.advance(chunk.len() as u64);
        }
        writer.finish()
    }

    /// Writes the fixed negatives of a split: 0 is validation, 1 is test.
    fn write_negatives(
        &self,
        directory: &Path,
        split: usize,
        edges: u64,
        negatives: &ForeignNegatives,
        workspace: &ImportWorkspace,
    ) -> Result<Vec<FileEntry>> {
        if self.selection.is_some() {
            return Err(ImportError::NegativesOfSome);
        }
        match negatives {
            ForeignNegatives::Shared(negatives) => {
                let name = [file::VALID_NEGATIVE_EDGES, file::TEST_NEGATIVE_EDGES][split];
                Ok(vec![self.write_rows(directory, name, negatives.as_ref(), workspace)?])
            }
            ForeignNegatives::PerEdge { sources, targets } => {
                let names = [
                    [file::VALID_NEGATIVE_SOURCES, file::VALID_NEGATIVE_TARGETS],
                    [file::TEST_NEGATIVE_SOURCES, file::TEST_NEGATIVE_TARGETS],
                ][split];
                let given = names.into_iter().zip([sources, targets]);
                given
                    .filter_map(|(name, matrix)| Some((name, matrix.as_ref()?)))
                    .map(|(name, matrix)| self.write_matrix(directory, name, edges, matrix))
                    .collect()
            }
        }
    }

    fn write_matrix(&self, directory: &Path, name: &str, edges: u64, matrix: &IdMatrix) -> Result<FileEntry> {
        if matrix.rows != edges || matrix.columns == 0 {
            let found = format!("{} rows of {}", matrix.rows, matrix.columns);
            let expected = format!("{edges} rows of negatives, one an edge");
            return Err(Location::at(&matrix.path, matrix.name.clone()).bad(expected, found));
        }
        let mut writer = IdWriter::create(directory, name, self.id_width, matrix.columns)?;
        for (at, node) in matrix.ids.iter().enumerate() {
            if *node >= self.nodes {
                let row = at as u64 / matrix.columns;
                let location = Location::at(&matrix.path, format!("{}, row {row}", matrix.name));
                return Err(location.bad(format!("node ids below {}", self.nodes), node));
            }
            writer.push(*node)?;
        }
        writer.finish()
    }
}

/// Streams the labelled nodes and their classes.
fn for_each_class(
    directory: &Path,
    entry: &FileEntry,
    mut take: impl FnMut(u64, i32) -> Result<()>,
) -> Result<()> {
    let array = ArrayFile::open(directory, entry)?;
    let (mut elements, mut chunk, mut node) = (array.elements(0)?, vec![0i32; 1 << 14], 0u64);
    loop {
        let count = elements.fill(&mut chunk)?;
        if count == 0 {
            return Ok(());
        }
        for class in &chunk[..count] {
            if *class >= 0 {
                take(node, *class)?;
            }
            node += 1;
        }
    }
}
