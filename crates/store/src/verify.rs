//! Checks every byte of a dataset: checksums of all blocks and tables, headers, and that numbers mean what they
//! should (ids below the node count, offsets that rise, labels below the class count).

use crate::array::{BLOCK_BYTES, Layout, PAGE_BYTES, header_page};
use crate::{ArrayFile, Dataset, FileEntry, LabelKind, Manifest, Result, SplitOver, StoreError, file};
use esker_io::{AlignedBuffer, DIRECT_ALIGN, DirectFile};
use esker_types::{Dtype, Progress, Unit};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Blocks read at a time: large enough for the disk's full rate.
const BLOCKS_AT_ONCE: u64 = 32;

/// A place where a dataset is not what was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// Where the damaged part starts.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
    /// What is wrong.
    pub problem: String,
}

/// What [`verify`] found.
#[derive(Debug)]
pub struct Verified {
    /// The dataset's id, if its manifest could be read.
    pub id: Option<String>,
    /// Bytes checked.
    pub bytes: u64,
    /// Every damaged place; none means the dataset is what was written.
    pub damage: Vec<Damage>,
}

/// Checks every byte of the dataset in `directory` with `threads` threads. Damage of any kind, up to a manifest that
/// cannot be read, is a finding; an error is a directory that is no dataset, or a disk that does not answer.
pub fn verify(directory: &Path, threads: usize, progress: &dyn Progress) -> Result<Verified> {
    let path = directory.join(file::MANIFEST);
    let text = match fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Dataset::open(directory).map(|_| Vec::new())?
        }
        read => read.map_err(StoreError::io(&path))?,
    };
    let manifest = match Manifest::from_bytes(&text, &path) {
        Ok(manifest) => manifest,
        Err(StoreError::Manifest { problem, .. }) => {
            let damage = vec![Damage { path, offset: 0, bytes: text.len() as u64, problem }];
            return Ok(Verified { id: None, bytes: text.len() as u64, damage });
        }
        Err(error) => return Err(error),
    };
    let mut arrays: Vec<(PathBuf, &FileEntry, Rule)> = manifest
        .files
        .iter()
        .map(|entry| (entry.path(directory), entry, Rule::of(entry, &manifest)))
        .collect();
    let (mut damage, mut derived) = (Vec::new(), Vec::new());
    if let Ok(dataset) = Dataset::open(directory) {
        derived = dataset.all_derived()?;
    }
    for (_, derived) in &derived {
        match derived {
            Ok(derived) => {
                let files = derived.manifest.files.iter();
                arrays.extend(files.map(|entry| (entry.path(&derived.directory), entry, Rule::Any)));
            }
            Err(error) => damage.push(derived_damage(error)),
        }
    }
    let bytes = arrays.iter().fold(text.len() as u64, |sum, (_, entry, _)| sum.saturating_add(entry.bytes));
    progress.stage("verify", Some(bytes), Unit::Bytes);
    for (path, entry, rule) in &arrays {
        damage.extend(verify_file(path, entry, *rule, threads, progress)?);
    }
    if damage.is_empty() {
        let rising = [(file::IN_OFFSETS, false), (file::OUT_OFFSETS, false)]
            .into_iter()
            .chain([file::SPLIT_TRAIN, file::SPLIT_VALID, file::SPLIT_TEST].map(|name| (name, true)));
        let names =
            [file::NODE_NAMES, file::RELATION_NAMES, file::CLASS_NAMES].map(|name| format!("{name}-offsets"));
        let rising = rising.chain(names.iter().map(|name| (name.as_str(), false)));
        for (name, strictly) in rising {
            if let Some(entry) = manifest.entry(name).filter(|entry| entry.columns == 1) {
                check_rising(&ArrayFile::open(directory, entry)?, strictly, &mut damage)?;
            }
        }
    }
    progress.finish();
    damage.sort();
    Ok(Verified { id: Some(manifest.id.clone()), bytes, damage })
}

fn derived_damage(error: &StoreError) -> Damage {
    let path = match error {
        StoreError::Io { path, .. }
        | StoreError::Manifest { path, .. }
        | StoreError::WrongLength { path, .. }
        | StoreError::Version { path, .. }
        | StoreError::Inconsistent { path, .. } => path.clone(),
        _ => PathBuf::new(),
    };
    Damage { path, offset: 0, bytes: 0, problem: format!("derived data does not open: {error}") }
}

/// What the numbers of a file must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
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

impl Rule {
    fn of(entry: &FileEntry, manifest: &Manifest) -> Rule {
        let (nodes, edges) = (manifest.nodes.count, manifest.edges.count);
        match entry.name.as_str() {
            file::IN_NEIGHBOURS | file::OUT_NEIGHBOURS => Rule::Below(nodes),
            file::OUT_EDGE_IDS => Rule::Below(edges),
            file::IN_OFFSETS | file::OUT_OFFSETS => Rule::Below(edges + 1),
            file::EDGE_RELATION => Rule::Below(manifest.edges.relations.as_ref().map_or(0, |r| r.count)),
            file::SPLIT_TRAIN | file::SPLIT_VALID | file::SPLIT_TEST
                if manifest.splits.as_ref().is_some_and(|splits| splits.over == SplitOver::Nodes) =>
            {
                Rule::Below(nodes)
            }
            file::SPLIT_VALID | file::SPLIT_TEST => {
                Rule::Edge(nodes, manifest.edges.relations.as_ref().map_or(1, |relations| relations.count))
            }
            file::NODE_LABELS => match &manifest.nodes.labels {
                Some(labels) if labels.kind == LabelKind::Classes => Rule::Class(labels.classes),
                Some(labels) if labels.kind == LabelKind::Multilabel => Rule::Flag,
                _ => Rule::Any,
            },
            _ => Rule::Any,
        }
    }

    /// The first number of `bytes`, which start with element number `first`, that breaks the rule.
    fn broken_by(self, dtype: Dtype, first: u64, bytes: &[u8]) -> Option<(u64, String)> {
        let found = |at: usize, value: String| Some(((at as u64) * dtype.bytes(), value));
        match (self, dtype) {
            (Rule::Any, _) => None,
            (Rule::Below(bound), Dtype::U32) => {
                let words = || bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                // The maximum is vectorised; the search for the culprit happens once.
                if words().fold(0, u32::max) as u64 >= bound {
                    let at = words().position(|word| word as u64 >= bound)?;
                    return found(at, words().nth(at)?.to_string());
                }
                None
            }
            (Rule::Below(bound), Dtype::U64) => {
                let words =
                    || bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap_or_default()));
                let at = words().position(|word| word >= bound)?;
                found(at, words().nth(at)?.to_string())
            }
            (Rule::Class(classes), Dtype::I32) => {
                let words = || bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                let at = words().position(|word| word < -1 || word as i64 >= classes as i64)?;
                found(at, words().nth(at)?.to_string())
            }
            (Rule::Edge(nodes, relations), _) => {
                let width = dtype.bytes() as usize;
                let word = |b: &[u8]| b.iter().rev().fold(0u64, |word, byte| word << 8 | *byte as u64);
                let mut words = bytes.chunks_exact(width).map(word).enumerate();
                let bound = |at: usize| if (first + at as u64) % 3 == 2 { relations } else { nodes };
                let (at, value) = words.find(|(at, word)| *word >= bound(*at))?;
                found(at, value.to_string())
            }
            (Rule::Flag, Dtype::U8) => {
                let at = bytes.iter().position(|byte| !matches!(byte, 0 | 1 | 255))?;
                found(at, bytes[at].to_string())
            }
            _ => None,
        }
    }
}

fn verify_file(
    path: &Path,
    entry: &FileEntry,
    rule: Rule,
    threads: usize,
    progress: &dyn Progress,
) -> Result<Vec<Damage>> {
    let damaged =
        |offset, bytes, problem: &str| Damage { path: path.into(), offset, bytes, problem: problem.into() };
    let Some(layout) = entry.layout().filter(|layout| layout.file_bytes == entry.bytes) else {
        return Ok(vec![damaged(0, 0, "its shape and its length in the manifest contradict each other")]);
    };
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(vec![damaged(0, layout.file_bytes, "the file is missing")]);
        }
        file => file.map_err(StoreError::io(path))?,
    };
    let found_bytes = file.metadata().map_err(StoreError::io(path))?.len();
    if found_bytes != layout.file_bytes {
        let problem =
            format!("the manifest promises {} bytes, the file has {found_bytes}", layout.file_bytes);
        let (short, long) = (found_bytes.min(layout.file_bytes), found_bytes.max(layout.file_bytes));
        return Ok(vec![damaged(short, long - short, &problem)]);
    }
    let mut page = [0u8; PAGE_BYTES as usize];
    file.read_exact_at(&mut page, 0).map_err(StoreError::io(path))?;
    let mut damage = Vec::new();
    if page != header_page(entry, &layout) {
        damage.push(damaged(0, PAGE_BYTES, "the header differs from the manifest"));
    }
    if table_sum(&file, path, &layout)? != entry.sums {
        let bytes = layout.blocks * 8;
        damage.push(damaged(layout.table_offset, bytes, "the checksum table differs from the manifest"));
        // Blame the table, not every block it no longer describes.
        progress.advance(entry.bytes);
        return Ok(damage);
    }
    progress.advance(PAGE_BYTES + layout.blocks * 8);
    let scan =
        Scan { path, entry, layout, rule, file: &file, next: AtomicU64::new(0), found: Mutex::new(damage) };
    let groups = layout.blocks.div_ceil(BLOCKS_AT_ONCE) as usize;
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let workers: Vec<_> =
            (0..threads.clamp(1, groups.max(1))).map(|_| scope.spawn(|| scan.run(progress))).collect();
        workers.into_iter().map(|worker| worker.join().expect("verify workers do not panic")).collect()
    });
    results.into_iter().collect::<Result<()>>()?;
    Ok(scan.found.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

fn table_sum(file: &File, path: &Path, layout: &Layout) -> Result<String> {
    let (mut hash, mut piece, mut at) = (Xxh3::new(), vec![0u8; BLOCK_BYTES as usize], layout.table_offset);
    while at < layout.file_bytes {
        let count = (layout.file_bytes - at).min(BLOCK_BYTES) as usize;
        file.read_exact_at(&mut piece[..count], at).map_err(StoreError::io(path))?;
        hash.update(&piece[..count]);
        at += count as u64;
    }
    Ok(format!("{:016x}", hash.digest()))
}

/// The blocks of one file, taken in groups by whichever thread is free.
struct Scan<'a> {
    path: &'a Path,
    entry: &'a FileEntry,
    layout: Layout,
    rule: Rule,
    file: &'a File,
    next: AtomicU64,
    found: Mutex<Vec<Damage>>,
}

impl Scan<'_> {
    fn run(&self, progress: &dyn Progress) -> Result<()> {
        let mut direct = DirectFile::open(self.path).map_err(StoreError::io(self.path))?;
        let mut buffer = AlignedBuffer::new((BLOCKS_AT_ONCE * BLOCK_BYTES) as usize, DIRECT_ALIGN);
        let mut sums = vec![0u8; (BLOCKS_AT_ONCE * 8) as usize];
        loop {
            let first = self.next.fetch_add(BLOCKS_AT_ONCE, Ordering::Relaxed);
            if first >= self.layout.blocks {
                return Ok(());
            }
            let start = first * BLOCK_BYTES;
            let count = (self.layout.padded_bytes - start).min(BLOCKS_AT_ONCE * BLOCK_BYTES) as usize;
            let read =
                direct.read(&mut buffer, PAGE_BYTES + start, self.path).map_err(StoreError::io(self.path))?;
            if read < count {
                let found_bytes = PAGE_BYTES + start + read as u64;
                return Err(StoreError::WrongLength {
                    path: self.path.into(),
                    expected_bytes: self.layout.file_bytes,
                    found_bytes,
                });
            }
            let blocks = (self.layout.blocks - first).min(BLOCKS_AT_ONCE);
            let sums = &mut sums[..(blocks * 8) as usize];
            self.file
                .read_exact_at(sums, self.layout.table_offset + first * 8)
                .map_err(StoreError::io(self.path))?;
            for (index, (block, sum)) in
                buffer[..count].chunks(BLOCK_BYTES as usize).zip(sums.chunks_exact(8)).enumerate()
            {
                self.check(start + index as u64 * BLOCK_BYTES, block, sum);
            }
            progress.advance(count as u64);
        }
    }

    fn check(&self, start: u64, block: &[u8], sum: &[u8]) {
        let damage = |offset, bytes, problem| Damage { path: self.path.into(), offset, bytes, problem };
        let problem = if xxh3_64(block).to_le_bytes() != sum {
            Some(damage(PAGE_BYTES + start, block.len() as u64, "the checksum does not match".to_string()))
        } else {
            let payload =
                (self.layout.payload_bytes - start.min(self.layout.payload_bytes)).min(block.len() as u64);
            self.rule
                .broken_by(self.entry.dtype, start / self.entry.dtype.bytes(), &block[..payload as usize])
                .map(|(at, value)| {
                    let problem = format!("{value} is out of range ({:?})", self.rule);
                    damage(PAGE_BYTES + start + at, self.entry.dtype.bytes(), problem)
                })
        };
        if let Some(problem) = problem {
            self.found.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(problem);
        }
    }
}

/// Offsets rise, ids of a split rise strictly.
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
                damage.push(Damage { path: array.path().into(), offset, bytes: width, problem });
                return Ok(());
            }
            (least, at) = (value + strictly as u64, at + 1);
        }
    }
}
