//! A valid set of foreign files, of which one at a time is replaced. An input starts with two bytes: which file (or
//! which member of an archive, or which packed file inside out), and which of the builder's options. The rest takes
//! the file's place. Members are damaged before they are packed, or checksums would hide the parsers after them.

use crate::Verdict;
use esker_import::{ImportJob, Request, SplitChoice, hostile};
use esker_store::{Dataset, LabelKind, verify};
use esker_types::{Budget, Dtype, Silent};
use std::fs;
use std::io::{Read, Write};
use std::path::Path;

/// Bytes before the content of a file.
pub const PREFIX_BYTES: usize = 2;
/// A claim of more nodes is read but not built: each takes 8 bytes of disk, whether or not it has edges.
const MOST_NODES: u64 = 1 << 17;
const BUDGET: Budget = Budget { host_bytes: 64 << 20 };

/// What one file holds.
pub enum Content {
    /// The bytes themselves.
    Plain(Vec<u8>),
    /// Packed by gzip.
    Gzip(Vec<u8>),
    /// Members of a zip archive, npz among them.
    Zip(Vec<(String, Vec<u8>)>),
}

/// Files and how to import them.
pub struct Recipe {
    /// Paths in the directory and what is there.
    pub files: Vec<(&'static str, Content)>,
    /// The request, of files in that directory.
    pub request: fn(&Path) -> Request,
}

/// The members of a committed archive, so that each can be damaged on its own.
pub fn unpacked(archive: &[u8]) -> Content {
    let mut archive = zip::ZipArchive::new(std::io::Cursor::new(archive)).expect("a committed archive");
    let members = (0..archive.len()).map(|index| {
        let mut member = archive.by_index(index).expect("a member");
        let (name, mut bytes) = (member.name().expect("a plain name").into_owned(), Vec::new());
        member.read_to_end(&mut bytes).expect("a whole member");
        (name, bytes)
    });
    Content::Zip(members.collect())
}

fn zipped<'a>(members: impl Iterator<Item = (&'a str, &'a [u8])>) -> Vec<u8> {
    let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, bytes) in members {
        archive.start_file(name, zip::write::SimpleFileOptions::default()).expect("a new member");
        archive.write_all(bytes).expect("memory");
    }
    archive.finish().expect("memory").into_inner()
}

fn gzipped(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

impl Content {
    /// What may be replaced: the insides first, the packed file last.
    fn slots(&self) -> Vec<Vec<u8>> {
        match self {
            Content::Plain(bytes) => vec![bytes.clone()],
            Content::Gzip(bytes) => vec![bytes.clone(), gzipped(bytes)],
            Content::Zip(members) => {
                members.iter().map(|(_, bytes)| bytes.clone()).chain([self.with(None)]).collect()
            }
        }
    }

    /// The file, with one slot replaced.
    fn with(&self, replaced: Option<(usize, &[u8])>) -> Vec<u8> {
        let inside = |slot: usize, bytes| match replaced {
            Some((at, other)) if at == slot => other,
            _ => bytes,
        };
        match (self, replaced) {
            (Content::Plain(bytes), _) => inside(0, bytes).to_vec(),
            (Content::Gzip(_), Some((1, whole))) => whole.to_vec(),
            (Content::Gzip(bytes), _) => gzipped(inside(0, bytes)),
            (Content::Zip(members), Some((at, whole))) if at == members.len() => whole.to_vec(),
            (Content::Zip(members), _) => {
                let members = members.iter().enumerate();
                zipped(members.map(|(slot, (name, bytes))| (name.as_str(), inside(slot, bytes))))
            }
        }
    }
}

impl Recipe {
    /// One valid input for each slot.
    pub fn seeds(&self) -> Vec<Vec<u8>> {
        let slots = self.files.iter().flat_map(|(_, content)| content.slots());
        slots.enumerate().map(|(slot, bytes)| [&[slot as u8, 0], &bytes[..]].concat()).collect()
    }

    /// The slot of a file's first part.
    pub fn slot(&self, name: &str) -> u8 {
        let before = self.files.iter().take_while(|(found, _)| *found != name);
        before.map(|(_, content)| content.slots().len() as u8).sum()
    }

    /// Writes the files, reads them through and, unless they claim too many nodes, builds a dataset and checks it.
    pub fn run(&self, scratch: &Path, input: &[u8]) -> Verdict {
        let (prefix, bytes) = input.split_at(PREFIX_BYTES.min(input.len()));
        let byte = |at: usize| prefix.get(at).copied().unwrap_or(0);
        let files = scratch.join("files");
        self.write(&files, byte(0) as usize, bytes);
        let request = with_options((self.request)(&files), byte(1));
        let nodes = hostile::nodes(scratch, &request).map_err(|error| error.to_string())?;
        // Components are found in memory: the budget refuses what the disk could not take either.
        let held = request.largest_component && nodes > BUDGET.host_bytes / 8;
        if nodes > MOST_NODES && !held {
            return Ok(());
        }
        let target = scratch.join("dataset");
        let job = ImportJob { target: &target, overwrite: true, budget: BUDGET, progress: &Silent };
        esker_import::import(&request, &job).map_err(|error| error.to_string())?;
        Dataset::open(&target).expect("what was imported opens");
        let verified = verify(&target, 1, &Silent).expect("what was imported can be read");
        assert!(verified.damage.is_empty(), "imported, but damaged: {:?}", verified.damage);
        Ok(())
    }

    fn write(&self, directory: &Path, slot: usize, bytes: &[u8]) {
        let slots = |content: &Content| match content {
            Content::Plain(_) => 1,
            Content::Gzip(_) => 2,
            Content::Zip(members) => members.len() + 1,
        };
        let mut slot = slot % self.files.iter().map(|(_, content)| slots(content)).sum::<usize>();
        let mut replaced = Some(bytes);
        for (name, content) in &self.files {
            let here = if slot < slots(content) { replaced.take() } else { None };
            let path = directory.join(name);
            fs::create_dir_all(path.parent().unwrap_or(directory))
                .expect("the scratch directory is writable");
            fs::write(&path, content.with(here.map(|bytes| (slot, bytes)))).expect("a scratch file");
            slot = slot.saturating_sub(slots(content));
        }
    }
}

/// Sends the same files down other paths of the builder.
fn with_options(request: Request, options: u8) -> Request {
    let bit = |at: u8| options >> at & 1 == 1;
    let mut request = Request {
        add_reverse: bit(0),
        remove_duplicates: bit(0),
        remove_self_loops: bit(1),
        row_normalise: bit(1),
        largest_component: bit(2),
        out_neighbours: bit(3),
        keep_positions: bit(3),
        wide_ids: bit(4),
        ..request
    };
    match options >> 5 {
        1 => request.nan_is_unlabelled = true,
        2 => request.split = Some(SplitChoice::Share { train: 0.6, valid: 0.2, test: 0.2 }),
        3 => request.split = Some(SplitChoice::PerClass { train: 1, valid: 1 }),
        4 => request.dtype = Some(Dtype::U8),
        5 => request.dtype = Some(Dtype::F16),
        6 => request.label_kind = Some(LabelKind::Real),
        7 => request.label_kind = Some(LabelKind::Multilabel),
        _ => {}
    }
    request
}
