//! The file of a trace: header, records, index, footer.

use super::distinct::DistinctIds;
use super::records::{RecordFormat, SampleRecords};
use crate::{Direction, Position, Result, Sample, SampleError, Settings};
use esker_io::SequentialWriter;
use esker_store::MOST_NODES;
use serde::{Deserialize, Serialize};
use std::borrow::Borrow;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"ESKTRACE";
const END_MAGIC: &[u8; 8] = b"ESKTREND";
/// Magic, version and length before the header's text, and its checksum after it.
const FRAME_BYTES: u64 = 8 + 4 + 4 + 8;
const ENTRY_BYTES: u64 = 7 * 8;
const FOOTER_BYTES: u64 = 8 + 3 * 8 + 8;
/// Largest header.
const MOST_HEADER_BYTES: u64 = 1 << 20;
/// Largest number of hops. A forged header must not make decoding take forever.
const MOST_LAYERS: usize = 64;

/// The job and dataset that a trace has samples of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceHeader {
    /// The id of the dataset.
    pub dataset: String,
    /// Number of nodes.
    pub nodes: u64,
    /// Number of edges.
    pub edges: u64,
    /// Number of relations; 0 for none.
    pub relations: u64,
    /// The direction of edges along which neighbours were sampled.
    pub direction: Direction,
    /// The seeds of each batch, as [`crate::Batches::identity`].
    pub batches: String,
    /// How the samples were made.
    pub settings: Settings,
}

/// One sample of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceEntry {
    /// Which batch it is.
    pub at: Position,
    /// Nodes.
    pub nodes: u64,
    /// Neighbours in all blocks.
    pub edges: u64,
    offset: u64,
    bytes: u64,
    sum: u64,
}

impl TraceEntry {
    fn words(&self) -> [u64; 7] {
        [self.at.epoch, self.at.batch, self.nodes, self.edges, self.offset, self.bytes, self.sum]
    }

    fn from_words(words: [u64; 7]) -> TraceEntry {
        let [epoch, batch, nodes, edges, offset, bytes, sum] = words;
        TraceEntry { at: Position { epoch, batch }, nodes, edges, offset, bytes, sum }
    }
}

/// Totals of a finished trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceSummary {
    /// Samples.
    pub samples: u64,
    /// Neighbours in all samples.
    pub edges: u64,
    /// Length of the file.
    pub bytes: u64,
}

impl TraceSummary {
    /// Bytes of the file per sampled edge.
    pub fn bytes_per_edge(&self) -> f64 {
        self.bytes as f64 / self.edges.max(1) as f64
    }
}

/// Writes samples one after the other. The trace gets its final name when it is finished.
pub struct TraceWriter {
    path: PathBuf,
    partial: PathBuf,
    file: SequentialWriter,
    header: TraceHeader,
    records: SampleRecords,
    entries: Vec<TraceEntry>,
}

impl TraceWriter {
    /// Starts a trace. It replaces an unfinished one of the same name.
    pub fn create(path: &Path, header: TraceHeader) -> Result<TraceWriter> {
        TraceWriter::create_in(path, header, RecordFormat::default())
    }

    /// The same, with records of a format.
    pub fn create_in(path: &Path, header: TraceHeader, format: RecordFormat) -> Result<TraceWriter> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let mut file = SequentialWriter::create(&partial).map_err(SampleError::io(&partial))?;
        let text =
            serde_json::to_vec(&header).map_err(|error| SampleError::trace(path, "a header", error))?;
        let mut front = MAGIC.to_vec();
        front.extend(format.number().to_le_bytes());
        front.extend((text.len() as u32).to_le_bytes());
        front.extend(&text);
        let sum = xxh3_64(&front);
        front.extend(sum.to_le_bytes());
        file.write_all(&front).map_err(SampleError::io(&partial))?;
        let (path, records) = (path.to_path_buf(), SampleRecords::new(format));
        Ok(TraceWriter { path, partial, file, header, records, entries: Vec::new() })
    }

    /// Appends a sample made with the header's settings.
    pub fn write(&mut self, at: Position, sample: &Sample) -> Result<()> {
        let record = self.records.encode(&self.header, sample, &self.path)?;
        let offset = self.file.position();
        self.file.write_all(record).map_err(SampleError::io(&self.partial))?;
        let (nodes, edges) = (sample.node_ids.len() as u64, sample.edge_count());
        let (bytes, sum) = (record.len() as u64, xxh3_64(record));
        self.entries.push(TraceEntry { at, nodes, edges, offset, bytes, sum });
        Ok(())
    }

    /// Bytes written so far.
    pub fn bytes(&self) -> u64 {
        self.file.position()
    }

    /// Writes the index, syncs, and gives the trace its final name.
    pub fn finish(mut self) -> Result<TraceSummary> {
        let index_offset = self.file.position();
        let words = self.entries.iter().flat_map(TraceEntry::words);
        let index: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        let mut footer = Vec::with_capacity(FOOTER_BYTES as usize);
        for word in [index_offset, self.entries.len() as u64, xxh3_64(&index)] {
            footer.extend(word.to_le_bytes());
        }
        footer.extend(xxh3_64(&footer).to_le_bytes());
        footer.extend(END_MAGIC);
        let written = self.file.write_all(&index).and_then(|()| self.file.write_all(&footer));
        let bytes = written.and_then(|()| self.file.finish()).map_err(SampleError::io(&self.partial))?;
        fs::rename(&self.partial, &self.path).map_err(SampleError::io(&self.path))?;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(SampleError::io(folder))?;
        let edges = self.entries.iter().fold(0u64, |sum, entry| sum.saturating_add(entry.edges));
        Ok(TraceSummary { samples: self.entries.len() as u64, edges, bytes })
    }
}

/// An opened trace. Header, footer and index have been checked. Records are checked when they are read.
pub struct TraceReader {
    path: PathBuf,
    file: File,
    header: TraceHeader,
    format: RecordFormat,
    entries: Vec<TraceEntry>,
    bytes: u64,
}

impl TraceReader {
    /// Opens a trace and reads its index.
    pub fn open(path: &Path) -> Result<TraceReader> {
        let file = File::open(path).map_err(SampleError::io(path))?;
        let bytes = file.metadata().map_err(SampleError::io(path))?.len();
        let flaw = |expected: &str, found: String| SampleError::trace(path, expected, found);
        if bytes < FRAME_BYTES + FOOTER_BYTES {
            return Err(flaw("a trace", format!("a file of {bytes} bytes")));
        }
        let (header, format) = read_header(path, &file, bytes)?;
        let footer = read(path, &file, bytes - FOOTER_BYTES, FOOTER_BYTES)?;
        let word = |at: usize| u64::from_le_bytes(footer[at..at + 8].try_into().unwrap_or_default());
        if &footer[32..] != END_MAGIC || word(24) != xxh3_64(&footer[..24]) {
            return Err(flaw(
                "the end of a trace in its last 40 bytes",
                "something else: it is cut or damaged".into(),
            ));
        }
        let (index_offset, count) = (word(0), word(8));
        let length = count.checked_mul(ENTRY_BYTES);
        if length.and_then(|length| index_offset.checked_add(length)) != Some(bytes - FOOTER_BYTES) {
            return Err(flaw(
                "an index that ends at the footer",
                format!("{count} entries from {index_offset}"),
            ));
        }
        let index = read(path, &file, index_offset, bytes - FOOTER_BYTES - index_offset)?;
        if xxh3_64(&index) != word(16) {
            return Err(flaw("the index that was written", "another one, by its checksum".into()));
        }
        let entries: Vec<TraceEntry> = index
            .chunks_exact(ENTRY_BYTES as usize)
            .map(|entry| {
                let mut words = [0u64; 7];
                for (word, bytes) in words.iter_mut().zip(entry.chunks_exact(8)) {
                    *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
                }
                TraceEntry::from_words(words)
            })
            .collect();
        let inside = |entry: &&TraceEntry| {
            entry.offset.checked_add(entry.bytes).is_some_and(|end| end <= index_offset)
        };
        if let Some(entry) = entries.iter().find(|entry| !inside(entry)) {
            return Err(flaw("records in front of the index", format!("one at {}", entry.offset)));
        }
        Ok(TraceReader { path: path.to_path_buf(), file, header, format, entries, bytes })
    }

    /// The format of its records.
    pub fn format(&self) -> RecordFormat {
        self.format
    }

    /// The header.
    pub fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// Its samples, in the order in which they were written.
    pub fn entries(&self) -> &[TraceEntry] {
        &self.entries
    }

    /// Bytes of a sample's record.
    pub fn record_bytes(&self, at: usize) -> u64 {
        self.entries[at].bytes
    }

    /// Its totals.
    pub fn summary(&self) -> TraceSummary {
        let edges = self.entries.iter().map(|entry| entry.edges).sum();
        TraceSummary { samples: self.entries.len() as u64, edges, bytes: self.bytes }
    }

    /// A cursor from the first sample to the last.
    pub fn forwards(&self) -> Cursor<&TraceReader> {
        Cursor::new(self, false)
    }

    /// A cursor from the last sample to the first.
    pub fn backwards(&self) -> Cursor<&TraceReader> {
        Cursor::new(self, true)
    }

    /// A cursor that shares the trace.
    pub fn shared_cursor(self: Arc<Self>) -> Cursor<Arc<TraceReader>> {
        Cursor::new(self, false)
    }
}

/// Walks a trace, owned or borrowed, with one sample in memory.
pub struct Cursor<T> {
    trace: T,
    backwards: bool,
    done: usize,
    record: Vec<u8>,
    records: SampleRecords,
}

impl<T: Borrow<TraceReader>> Cursor<T> {
    /// Memory of a cursor over samples of at most `nodes` nodes and `sample_bytes` bytes of a graph of `graph_nodes`
    /// nodes, for records as they are written today.
    pub fn bytes_for(graph_nodes: u64, nodes: u64, sample_bytes: u64) -> u64 {
        // A record, and the decoder's arrays, take less than the sample each.
        sample_bytes.saturating_mul(2).saturating_add(DistinctIds::bytes_for(graph_nodes, nodes))
    }

    fn new(trace: T, backwards: bool) -> Cursor<T> {
        let records = SampleRecords::new(trace.borrow().format);
        Cursor { trace, backwards, done: 0, record: Vec::new(), records }
    }

    /// Reads the next sample; `None` after the last.
    pub fn next(&mut self, out: &mut Sample) -> Result<Option<Position>> {
        let count = self.trace.borrow().entries.len();
        if self.done == count {
            return Ok(None);
        }
        let at = if self.backwards { count - 1 - self.done } else { self.done };
        self.done += 1;
        self.read(at, out).map(Some)
    }

    /// Reads any sample by its position in the trace.
    pub fn read(&mut self, at: usize, out: &mut Sample) -> Result<Position> {
        let TraceReader { path, file, header, entries, .. } = self.trace.borrow();
        let entry = &entries[at];
        self.record.resize(entry.bytes as usize, 0);
        file.read_exact_at(&mut self.record, entry.offset).map_err(SampleError::io(path))?;
        let place = || format!("sample {at} (epoch {}, batch {})", entry.at.epoch, entry.at.batch);
        if xxh3_64(&self.record) != entry.sum {
            let expected = format!("the bytes of {} that were written", place());
            return Err(SampleError::trace(path, expected, "others, by their checksum"));
        }
        let decoded = self.records.take(header, &self.record, out);
        decoded.map_err(|found| SampleError::trace(path, place(), found))?;
        if (out.node_ids.len() as u64, out.edge_count()) != (entry.nodes, entry.edges) {
            let found = format!("{} and {}", out.node_ids.len(), out.edge_count());
            let expected = format!("{} with {} nodes and {} edges", place(), entry.nodes, entry.edges);
            return Err(SampleError::trace(path, expected, found));
        }
        Ok(entry.at)
    }
}

fn read(path: &Path, file: &File, offset: u64, bytes: u64) -> Result<Vec<u8>> {
    let mut buffer = vec![0; bytes as usize];
    file.read_exact_at(&mut buffer, offset).map_err(SampleError::io(path))?;
    Ok(buffer)
}

fn read_header(path: &Path, file: &File, bytes: u64) -> Result<(TraceHeader, RecordFormat)> {
    let flaw = |expected: &str, found: String| SampleError::trace(path, expected, found);
    let front = read(path, file, 0, 16)?;
    let word = |at: usize| u32::from_le_bytes(front[at..at + 4].try_into().unwrap_or_default());
    if &front[..8] != MAGIC {
        return Err(flaw("a trace, which starts with ESKTRACE", format!("{:?}", &front[..8])));
    }
    let length = word(12) as u64;
    if length > MOST_HEADER_BYTES || length + FRAME_BYTES + FOOTER_BYTES > bytes {
        return Err(flaw("a header inside the file", format!("one of {length} bytes")));
    }
    let whole = read(path, file, 0, length + FRAME_BYTES)?;
    let (text, sum) = whole.split_at(16 + length as usize);
    if xxh3_64(text).to_le_bytes() != *sum {
        return Err(flaw("the header that was written", "another one, by its checksum".into()));
    }
    // Verify the checksum first: a flipped version is damage.
    let Some(format) = RecordFormat::of_number(word(8)) else {
        return Err(flaw("trace version 2 or 3", format!("version {}; another esker wrote it", word(8))));
    };
    let header: TraceHeader =
        serde_json::from_slice(&text[16..]).map_err(|error| flaw("a header", error.to_string()))?;
    let (nodes, layers) = (header.nodes, header.settings.fanouts.len());
    if nodes > MOST_NODES || layers > MOST_LAYERS {
        let expected = format!("at most {MOST_NODES} nodes and {MOST_LAYERS} layers");
        return Err(flaw(&expected, format!("{nodes} nodes and {layers} layers")));
    }
    Ok((header, format))
}
