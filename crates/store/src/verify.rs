//! Checks every byte of a dataset: checksums of all blocks and tables, headers, and that numbers are valid (ids below
//! the node count, offsets ascending, labels below the class count).

use crate::array::PAGE_BYTES;
use crate::scan::{Target, damage_in, scan, unreadable};
use crate::shared_disk::SharedDisk;
use crate::{ArrayFile, Dataset, FileEntry, LabelKind, Manifest, Result, SplitOver, StoreError, file, files};
use esker_io::{Disk, IoError};
use esker_types::{Dtype, Progress, Unit};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A damaged range of a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// Start of the damaged range.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
    /// What is wrong.
    pub problem: String,
}

/// The result of [`verify`].
#[derive(Debug)]
pub struct Verified {
    /// The dataset's id, if its manifest could be read.
    pub id: Option<String>,
    /// Bytes checked.
    pub bytes: u64,
    /// All damage; empty if the dataset is exactly what was written.
    pub damage: Vec<Damage>,
}

/// Checks every byte of the dataset in `directory` with `threads` threads. Damage of any kind is a finding, even a
/// manifest that cannot be parsed or blocks that the disk cannot read. An error means that the directory is not a
/// dataset, or that the failure is not the data's fault.
pub fn verify(directory: &Path, threads: usize, progress: &dyn Progress) -> Result<Verified> {
    verify_from(&SharedDisk::this_machine(), directory, threads, progress)
}

/// The same for a dataset that [`Dataset::open_on`] opens.
pub fn verify_on(
    directory: &Path,
    disk: Arc<dyn Disk>,
    threads: usize,
    progress: &dyn Progress,
) -> Result<Verified> {
    verify_from(&SharedDisk::new(disk), directory, threads, progress)
}

fn verify_from(
    disk: &SharedDisk,
    directory: &Path,
    threads: usize,
    progress: &dyn Progress,
) -> Result<Verified> {
    let path = directory.join(file::MANIFEST);
    let text = match files::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Dataset::open_from(disk.clone(), directory).map(|_| Vec::new())?
        }
        read => read.map_err(StoreError::io(&path))?,
    };
    let manifest = match Manifest::from_bytes(&text, &path) {
        Ok(manifest) => manifest,
        Err(StoreError::Manifest { problem, .. }) => {
            let (bytes, problem) = (text.len() as u64, problem.to_string());
            let damage = vec![Damage { path, offset: 0, bytes, problem }];
            return Ok(Verified { id: None, bytes, damage });
        }
        Err(error) => return Err(error),
    };
    let own = manifest.files.iter();
    let mut targets: Vec<Target> =
        own.map(|entry| Target { directory, entry, rule: NumberRule::of(entry, &manifest) }).collect();
    let (mut damage, mut derived) = (Vec::new(), Vec::new());
    if let Ok(dataset) = Dataset::open_from(disk.clone(), directory) {
        derived = dataset.all_derived()?;
    }
    for (_, derived) in &derived {
        match derived {
            Ok(derived) => {
                let (directory, files) = (&derived.directory, derived.manifest.files.iter());
                targets.extend(files.map(|entry| Target { directory, entry, rule: NumberRule::Any }));
            }
            Err(error) => damage.push(derived_damage(error)),
        }
    }
    let entries = targets.iter().map(|target| target.entry);
    let bytes = entries.fold(text.len() as u64, |sum, entry| sum.saturating_add(entry.bytes));
    progress.stage("verify", Some(bytes), Unit::Bytes);
    damage.extend(scan(&**disk, &targets, threads, progress)?);
    if damage.is_empty() {
        damage.extend(check_order(disk, directory, &manifest)?);
    }
    progress.finish();
    damage.sort();
    // Several blocks may have their checksums in one sector.
    damage.dedup();
    Ok(Verified { id: Some(manifest.id.clone()), bytes, damage })
}

fn derived_damage(error: &StoreError) -> Damage {
    let path = match error {
        StoreError::Io { path, .. }
        | StoreError::Missing { path }
        | StoreError::StripeMissing { path, .. }
        | StoreError::Manifest { path, .. }
        | StoreError::WrongLength { path, .. }
        | StoreError::Version { path, .. }
        | StoreError::Inconsistent { path, .. }
        | StoreError::Engine(
            IoError::Read { path, .. } | IoError::File { path, .. } | IoError::Ended { path, .. },
        ) => path.clone(),
        _ => PathBuf::new(),
    };
    Damage { path, offset: 0, bytes: 0, problem: format!("derived data does not open: {error}") }
}

/// A rule for the numbers of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NumberRule {
    Any,
    /// Unsigned, below a bound.
    Below(u64),
    /// A class or -1.
    Class(u64),
    /// 0, 1 or 255.
    Flag,
    /// Source and target below the first, relation below the second.
    Edge(u64, u64),
}

impl NumberRule {
    pub(crate) fn of(entry: &FileEntry, manifest: &Manifest) -> NumberRule {
        let (nodes, edges) = (manifest.nodes.count, manifest.edges.count);
        match entry.name.as_str() {
            file::IN_NEIGHBOURS | file::OUT_NEIGHBOURS => NumberRule::Below(nodes),
            file::OUT_EDGE_IDS => NumberRule::Below(edges),
            file::IN_OFFSETS | file::OUT_OFFSETS => NumberRule::Below(edges + 1),
            file::EDGE_RELATION => {
                NumberRule::Below(manifest.edges.relations.as_ref().map_or(0, |r| r.count))
            }
            file::SPLIT_TRAIN | file::SPLIT_VALID | file::SPLIT_TEST
                if manifest.splits.as_ref().is_some_and(|splits| splits.over == SplitOver::Nodes) =>
            {
                NumberRule::Below(nodes)
            }
            file::VALID_NEGATIVE_SOURCES
            | file::VALID_NEGATIVE_TARGETS
            | file::TEST_NEGATIVE_SOURCES
            | file::TEST_NEGATIVE_TARGETS => NumberRule::Below(nodes),
            file::SPLIT_VALID | file::SPLIT_TEST | file::VALID_NEGATIVE_EDGES | file::TEST_NEGATIVE_EDGES => {
                NumberRule::Edge(
                    nodes,
                    manifest.edges.relations.as_ref().map_or(1, |relations| relations.count),
                )
            }
            file::NODE_LABELS => match &manifest.nodes.labels {
                Some(labels) if labels.kind == LabelKind::Classes => NumberRule::Class(labels.classes),
                Some(labels) if labels.kind == LabelKind::Multilabel => NumberRule::Flag,
                _ => NumberRule::Any,
            },
            _ => NumberRule::Any,
        }
    }

    /// The first number in `bytes` that violates the rule. `bytes` starts with element number `first`.
    pub(crate) fn broken_by(self, dtype: Dtype, first: u64, bytes: &[u8]) -> Option<(u64, String)> {
        let found = |at: usize, value: String| Some(((at as u64) * dtype.bytes(), value));
        match (self, dtype) {
            (NumberRule::Any, _) => None,
            (NumberRule::Below(bound), Dtype::U32) => {
                let words = || bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                // The maximum is vectorised; the position is searched only if it fails.
                if words().fold(0, u32::max) as u64 >= bound {
                    let at = words().position(|word| word as u64 >= bound)?;
                    return found(at, words().nth(at)?.to_string());
                }
                None
            }
            (NumberRule::Below(bound), Dtype::U64) => {
                let words =
                    || bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap_or_default()));
                let at = words().position(|word| word >= bound)?;
                found(at, words().nth(at)?.to_string())
            }
            (NumberRule::Class(classes), Dtype::I32) => {
                let words = || bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                let at = words().position(|word| word < -1 || word as i64 >= classes as i64)?;
                found(at, words().nth(at)?.to_string())
            }
            (NumberRule::Edge(nodes, relations), _) => {
                let width = dtype.bytes() as usize;
                let word = |b: &[u8]| b.iter().rev().fold(0u64, |word, byte| word << 8 | *byte as u64);
                let mut words = bytes.chunks_exact(width).map(word).enumerate();
                let bound = |at: usize| if (first + at as u64) % 3 == 2 { relations } else { nodes };
                let (at, value) = words.find(|(at, word)| *word >= bound(*at))?;
                found(at, value.to_string())
            }
            (NumberRule::Flag, Dtype::U8) => {
                let at = bytes.iter().position(|byte| !matches!(byte, 0 | 1 | 255))?;
                found(at, bytes[at].to_string())
            }
            _ => None,
        }
    }
}

/// Checks the order of numbers in a dataset whose blocks are all intact.
fn check_order(disk: &SharedDisk, directory: &Path, manifest: &Manifest) -> Result<Vec<Damage>> {
    let rising = [(file::IN_OFFSETS, false), (file::OUT_OFFSETS, false)]
        .into_iter()
        .chain([file::SPLIT_TRAIN, file::SPLIT_VALID, file::SPLIT_TEST].map(|name| (name, true)));
    let names =
        [file::NODE_NAMES, file::RELATION_NAMES, file::CLASS_NAMES].map(|name| format!("{name}-offsets"));
    let rising = rising.chain(names.iter().map(|name| (name.as_str(), false)));
    let mut damage = Vec::new();
    for (name, strictly) in rising {
        let Some(entry) = manifest.entry(name).filter(|entry| entry.columns == 1) else { continue };
        let array = ArrayFile::open_on(disk, directory, entry);
        match array.and_then(|array| check_rising(&array, strictly, &mut damage)) {
            Err(StoreError::Engine(error)) => damage.push(unreadable(error)?),
            checked => checked?,
        }
    }
    Ok(damage)
}

/// Checks that offsets ascend, and ids of a split ascend strictly.
fn check_rising(array: &ArrayFile, strictly: bool, damage: &mut Vec<Damage>) -> Result<()> {
    let width = array.entry().dtype.bytes();
    let (mut elements, mut chunk) = (array.elements(0)?, vec![0u64; 1 << 14]);
    let (mut least, mut at) = (0, 0u64);
    loop {
        let count = elements.fill_ids(&mut chunk)?;
        if count == 0 {
            return Ok(());
        }
        for value in &chunk[..count] {
            if *value < least {
                let problem = format!("{value} where at least {least} must stand: the numbers must rise");
                let offset = PAGE_BYTES + at * width;
                damage.extend(damage_in(array.layout(), offset, width, &problem));
                return Ok(());
            }
            (least, at) = (value + strictly as u64, at + 1);
        }
    }
}
