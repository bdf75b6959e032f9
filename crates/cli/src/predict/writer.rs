//! Predictions as files, written as they come.

use esker_io::{
    Access, AlignedBuffer, DIRECT_ALIGN, Disk, Layout, Options, Piece, Queue, ThisMachine, reserve,
};
use esker_train::TrainError;
use esker_types::NodeId;
use parquet::basic::Compression;
use parquet::data_type::{FloatType, Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

/// What is written for each node, apart from its id.
#[derive(Debug, Clone, Copy)]
pub struct PredictionContent {
    /// The name of a number.
    pub value: &'static str,
    /// Numbers per node.
    pub columns: usize,
    /// Whether there is a class.
    pub has_class: bool,
}

/// The name of a file until it is whole. It goes with whoever does not finish.
struct PartialName {
    path: PathBuf,
    partial: PathBuf,
}

impl PartialName {
    fn create(path: PathBuf) -> anyhow::Result<(PartialName, File)> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let file = File::create(&partial).map_err(TrainError::io(&partial))?;
        Ok((PartialName { path, partial }, file))
    }

    /// Gives the file its name.
    fn finish(self) -> io::Result<()> {
        fs::rename(&self.partial, &self.path)
    }
}

impl Drop for PartialName {
    fn drop(&mut self) {
        // After a rename there is none.
        let _ = fs::remove_file(&self.partial);
    }
}

/// A file of predictions in the making.
pub enum Writer {
    Arrays(Box<ArrayFiles>),
    Parquet(Box<ParquetTable>),
}

/// npy files, or one safetensors file: arrays that all grow at the same time.
pub struct ArrayFiles {
    files: Vec<PartialFile>,
    nodes: ArrayPosition,
    classes: Option<ArrayPosition>,
    values: ArrayPosition,
}

/// A file under another name until it is whole.
struct PartialFile {
    name: PartialName,
    file: File,
    /// Its length in the end.
    bytes: u64,
}

/// Where the next bytes of an array go.
#[derive(Clone, Copy)]
struct ArrayPosition {
    file: usize,
    offset: u64,
}

impl PartialFile {
    /// A file of this length that begins with a header.
    fn create(path: &Path, header: &[u8], bytes: u64) -> anyhow::Result<PartialFile> {
        let (name, file) = PartialName::create(path.to_path_buf())?;
        file.write_all_at(header, 0).map_err(TrainError::io(path))?;
        Ok(PartialFile { name, file, bytes })
    }
}

impl ArrayFiles {
    fn npy(out: &Path, content: PredictionContent, count: u64) -> anyhow::Result<ArrayFiles> {
        let mut files = Vec::new();
        let mut array = |path: &Path, descr: &str, shape: String, data_bytes: u64| -> anyhow::Result<_> {
            let header = npy_header(descr, &shape);
            let offset = header.len() as u64;
            files.push(PartialFile::create(path, &header, offset + data_bytes)?);
            Ok(ArrayPosition { file: files.len() - 1, offset })
        };
        let classes = out.with_extension("classes.npy");
        let columns = content.columns;
        // The file that was asked for gets its name last.
        let nodes = array(&out.with_extension("nodes.npy"), "<u8", format!("{count},"), count * 8)?;
        let classes = match content.has_class {
            true => Some(array(&classes, "<u4", format!("{count},"), count * 4)?),
            false => None,
        };
        let values = array(out, "<f4", format!("{count}, {columns}"), count * columns as u64 * 4)?;
        Ok(ArrayFiles { files, nodes, classes, values })
    }

    /// A safetensors file: its tensors lie one after the other.
    fn safetensors(out: &Path, content: PredictionContent, count: u64) -> anyhow::Result<ArrayFiles> {
        let sizes =
            [count * 8, if content.has_class { count * 4 } else { 0 }, count * content.columns as u64 * 4];
        let (classes, values) = (sizes[0], sizes[0] + sizes[1]);
        let mut header = serde_json::Map::new();
        header.insert(
            "nodes".to_string(),
            json!({ "dtype": "I64", "shape": [count], "data_offsets": [0, classes] }),
        );
        if content.has_class {
            header.insert(
                "classes".to_string(),
                json!({ "dtype": "I32", "shape": [count], "data_offsets": [classes, values] }),
            );
        }
        let plural = match content.value {
            "probability" => "probabilities",
            "value" => "values",
            _ => "embeddings",
        };
        header.insert(
            plural.to_string(),
            json!({ "dtype": "F32", "shape": [count, content.columns], "data_offsets": [values, values + sizes[2]] }),
        );
        let mut text = serde_json::Value::Object(header).to_string();
        // Data starts at a multiple of 8.
        while !text.len().is_multiple_of(8) {
            text.push(' ');
        }
        let header = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        let start = header.len() as u64;
        let file = PartialFile::create(out, &header, start + values + sizes[2])?;
        let at = |offset: u64| ArrayPosition { file: 0, offset: start + offset };
        Ok(ArrayFiles {
            files: vec![file],
            nodes: at(0),
            classes: content.has_class.then(|| at(classes)),
            values: at(values),
        })
    }

    /// Length of all files together.
    fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Passes the bytes of some nodes on, with the array that they belong to and where they go.
    fn write(
        &mut self,
        rows: &PredictedRows,
        mut put: impl FnMut(&[PartialFile], usize, ArrayPosition, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let nodes: Vec<u8> = rows.nodes.iter().flat_map(|node| node.0.to_le_bytes()).collect();
        let arrays: [(Option<&mut ArrayPosition>, &[u8]); 3] = [
            (Some(&mut self.nodes), &nodes),
            (self.classes.as_mut(), bytemuck::cast_slice(&rows.classes)),
            (Some(&mut self.values), bytemuck::cast_slice(&rows.values)),
        ];
        for (array, (position, bytes)) in arrays.into_iter().enumerate() {
            if let Some(position) = position {
                put(&self.files, array, *position, bytes)?;
                position.offset += bytes.len() as u64;
            }
        }
        Ok(())
    }

    /// Gives the files their names. All of them are on the disk before one has its name.
    fn finish(self) -> io::Result<()> {
        self.files.iter().try_for_each(|file| file.file.sync_all())?;
        self.files.into_iter().try_for_each(|file| file.name.finish())
    }
}

fn npy_header(descr: &str, shape: &str) -> Vec<u8> {
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    // Magic, version and length are 10 bytes; data starts at a multiple of 64.
    while (10 + header.len() + 1) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    [&b"\x93NUMPY\x01\x00"[..], &(header.len() as u16).to_le_bytes(), header.as_bytes()].concat()
}

/// A Parquet file in the making. Rows are gathered into groups of some size: the description of every group is held until
/// the end.
pub struct ParquetTable {
    writer: SerializedFileWriter<File>,
    name: PartialName,
    has_class: bool,
    outputs: usize,
    group_rows: usize,
    nodes: Vec<i64>,
    classes: Vec<i32>,
    values: Vec<f32>,
}

/// Bytes of a group of rows.
const GROUP_BYTES: usize = 8 << 20;

impl ParquetTable {
    fn write(&mut self, ids: &[NodeId], found: &[u32], numbers: &[f32]) -> io::Result<()> {
        for (at, node) in ids.iter().enumerate() {
            self.nodes.push(node.0 as i64);
            self.classes.extend(found.get(at).map(|class| *class as i32));
            self.values.extend_from_slice(&numbers[at * self.outputs..(at + 1) * self.outputs]);
            if self.nodes.len() == self.group_rows {
                self.close_group().map_err(said_by_parquet)?;
            }
        }
        Ok(())
    }

    fn close_group(&mut self) -> parquet::errors::Result<()> {
        if self.nodes.is_empty() {
            return Ok(());
        }
        let mut group = self.writer.next_row_group()?;
        let (mut next, mut values) = (0, Vec::with_capacity(self.nodes.len()));
        while let Some(mut column) = group.next_column()? {
            if next == 0 {
                column.typed::<Int64Type>().write_batch(&self.nodes, None, None)?;
            } else if self.has_class && next == 1 {
                column.typed::<Int32Type>().write_batch(&self.classes, None, None)?;
            } else {
                let at = next - 1 - self.has_class as usize;
                values.clear();
                values.extend(self.values.chunks_exact(self.outputs).map(|row| row[at]));
                column.typed::<FloatType>().write_batch(&values, None, None)?;
            }
            column.close()?;
            next += 1;
        }
        group.close()?;
        self.nodes.clear();
        self.classes.clear();
        self.values.clear();
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        self.close_group().map_err(said_by_parquet)?;
        let file = self.writer.into_inner().map_err(said_by_parquet)?;
        file.sync_all()?;
        self.name.finish()
    }
}

/// What the operating system said to whoever writes Parquet, without the words around it.
fn said_by_parquet(error: ParquetError) -> io::Error {
    match error {
        ParquetError::External(inner) => match inner.downcast::<io::Error>() {
            Ok(inner) => *inner,
            Err(inner) => io::Error::other(inner),
        },
        other => io::Error::other(other),
    }
}

impl Writer {
    /// Starts a file for this many nodes. Its ending says what it is.
    pub fn create(out: &Path, content: PredictionContent, count: u64) -> anyhow::Result<Writer> {
        let PredictionContent { value, columns, has_class } = content;
        match out.extension().and_then(|extension| extension.to_str()) {
            Some("npy") => Ok(Writer::Arrays(Box::new(ArrayFiles::npy(out, content, count)?))),
            Some("parquet") => {
                let names: String =
                    (0..columns).map(|column| format!("required float {value}_{column}; ")).collect();
                let class = if has_class { "required int32 class; " } else { "" };
                let schema = parse_message_type(&format!(
                    "message prediction {{ required int64 node; {class}{names}}}"
                ))?;
                let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
                let (name, file) = PartialName::create(out.to_path_buf())?;
                let writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties))
                    .map_err(said_by_parquet)
                    .map_err(TrainError::io(out))?;
                Ok(Writer::Parquet(Box::new(ParquetTable {
                    writer,
                    name,
                    has_class,
                    outputs: columns,
                    group_rows: (GROUP_BYTES / (12 + 4 * columns)).max(1),
                    nodes: Vec::new(),
                    classes: Vec::new(),
                    values: Vec::new(),
                })))
            }
            Some("safetensors") => {
                Ok(Writer::Arrays(Box::new(ArrayFiles::safetensors(out, content, count)?)))
            }
            _ => Err(super::no_ending(out, &super::ENDINGS)),
        }
    }
}

/// Nodes, their classes, if they have any, and their numbers.
#[derive(Default)]
pub struct PredictedRows {
    pub nodes: Vec<NodeId>,
    pub classes: Vec<u32>,
    pub values: Vec<f32>,
}

/// A writer on the thread that writes: past the page cache, or through it.
pub enum OpenWriter {
    Direct { arrays: Box<ArrayFiles>, chunks: Box<DirectChunks> },
    Cached { arrays: Box<ArrayFiles>, sync: Option<EarlySync> },
    Parquet(Box<ParquetTable>),
}

impl OpenWriter {
    /// Opens the files. Large ones are written past the page cache if `direct_bytes` of memory suffice.
    pub fn open(writer: Writer, direct_bytes: u64) -> io::Result<OpenWriter> {
        let arrays = match writer {
            Writer::Parquet(table) => return Ok(OpenWriter::Parquet(table)),
            Writer::Arrays(arrays) => arrays,
        };
        if arrays.bytes() >= LEAST_DIRECT_BYTES && direct_bytes >= DirectChunks::LEAST_BYTES {
            let chunks = Box::new(DirectChunks::open(&arrays, direct_bytes)?);
            return Ok(OpenWriter::Direct { arrays, chunks });
        }
        let values = &arrays.files[arrays.values.file];
        let sync = match values.bytes >= SYNC_BYTES {
            true => Some(EarlySync::start(values.file.try_clone()?)?),
            false => None,
        };
        Ok(OpenWriter::Cached { arrays, sync })
    }

    /// Writes some nodes.
    pub fn write(&mut self, rows: &PredictedRows) -> io::Result<()> {
        match self {
            OpenWriter::Parquet(table) => table.write(&rows.nodes, &rows.classes, &rows.values),
            OpenWriter::Direct { arrays, chunks } => {
                arrays.write(rows, |_, array, position, bytes| chunks.append(array, position, bytes))
            }
            OpenWriter::Cached { arrays, sync } => {
                arrays.write(rows, |files, _, ArrayPosition { file, offset }, bytes| {
                    files[file].file.write_all_at(bytes, offset)
                })?;
                sync.iter_mut().try_for_each(|sync| sync.written(size_of_val(&rows.values[..]) as u64))
            }
        }
    }

    /// Gives the files their names.
    pub fn finish(self) -> io::Result<()> {
        match self {
            OpenWriter::Parquet(table) => table.finish(),
            OpenWriter::Direct { arrays, chunks } => chunks.finish().and_then(|()| arrays.finish()),
            OpenWriter::Cached { arrays, sync } => {
                sync.map_or(Ok(()), EarlySync::finish)?;
                arrays.finish()
            }
        }
    }
}

/// Smaller files are written through the page cache.
const LEAST_DIRECT_BYTES: u64 = if cfg!(test) { 1 << 18 } else { 64 << 20 };
/// Bytes written at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// Chunks being written, at most: more do not make a disk faster.
const MOST_CHUNKS: u64 = 16;

/// Writes arrays past the page cache, each from front to back: a chunk of an array is filled while others are written.
/// One thread that copies to the page cache is slower than a disk.
pub struct DirectChunks {
    queue: Queue,
    /// The chunk of each array that is being filled.
    filling: [Option<FillingChunk>; 3],
    spare: Vec<AlignedBuffer>,
    /// Chunks that may still be allocated.
    left: u64,
}

/// A chunk from `start` to `end` of a file. Bytes are where they are relative to a multiple of [`CHUNK_BYTES`].
struct FillingChunk {
    buffer: AlignedBuffer,
    file: usize,
    start: u64,
    end: u64,
}

impl DirectChunks {
    /// The smallest memory: a chunk of each array, and some being written.
    pub const LEAST_BYTES: u64 = 8 * CHUNK_BYTES + DirectChunks::QUEUE_BYTES;
    const QUEUE_BYTES: u64 = 2 << 20;

    fn open(arrays: &ArrayFiles, most_bytes: u64) -> io::Result<DirectChunks> {
        let mut layouts = Vec::new();
        for PartialFile { name, file, bytes } in &arrays.files {
            // A full disk shows here, and the disk need not find room while it writes.
            reserve(file, *bytes)?;
            layouts.push(Layout::file(&name.partial));
        }
        let options = Options {
            depth: 64,
            in_flight_bytes: MOST_CHUNKS * CHUNK_BYTES,
            staging_bytes: CHUNK_BYTES,
            max_bytes: CHUNK_BYTES,
            ..Options::default()
        };
        let queue = ThisMachine.open(&layouts, Access::Write, &options)?.queue()?;
        let left = ((most_bytes - DirectChunks::QUEUE_BYTES) / CHUNK_BYTES).min(MOST_CHUNKS + 3);
        Ok(DirectChunks { queue, filling: [const { None }; 3], spare: Vec::new(), left })
    }

    /// Appends bytes to an array.
    fn append(&mut self, array: usize, position: ArrayPosition, mut bytes: &[u8]) -> io::Result<()> {
        let ArrayPosition { file, mut offset } = position;
        while !bytes.is_empty() {
            if self.filling[array].is_none() {
                let buffer = self.free_buffer()?;
                self.filling[array] = Some(FillingChunk { buffer, file, start: offset, end: offset });
            }
            let chunk = self.filling[array].as_mut().expect("set above");
            let at = (offset % CHUNK_BYTES) as usize;
            let count = bytes.len().min(CHUNK_BYTES as usize - at);
            let (now, rest) = bytes.split_at(count);
            chunk.buffer[at..at + count].copy_from_slice(now);
            (bytes, offset) = (rest, offset + count as u64);
            chunk.end = offset;
            if offset.is_multiple_of(CHUNK_BYTES) {
                self.submit(array);
            }
        }
        Ok(())
    }

    fn free_buffer(&mut self) -> io::Result<AlignedBuffer> {
        if let Some(buffer) = self.spare.pop() {
            return Ok(buffer);
        }
        if self.left > 0 {
            self.left -= 1;
            let buffer = AlignedBuffer::new(CHUNK_BYTES as usize, DIRECT_ALIGN);
            self.queue.register(&buffer);
            return Ok(buffer);
        }
        let finished = self.queue.wait().expect("there are more chunks than arrays");
        finished.result?;
        Ok(finished.buffer)
    }

    fn submit(&mut self, array: usize) {
        if let Some(FillingChunk { buffer, file, start, end }) = self.filling[array].take() {
            let piece = Piece { offset: start, bytes: end - start, at: start % CHUNK_BYTES };
            self.queue.submit_write(file, vec![piece], buffer);
        }
    }

    /// Writes what is left, and returns when everything is on the disk.
    fn finish(mut self) -> io::Result<()> {
        (0..self.filling.len()).for_each(|array| self.submit(array));
        while let Some(finished) = self.queue.wait() {
            finished.result?;
        }
        Ok(self.queue.sync()?)
    }
}

/// Asks the disk for what is written while more is, so that little is left to wait for at the end.
pub struct EarlySync {
    send: SyncSender<()>,
    thread: Option<JoinHandle<io::Result<()>>>,
    bytes: u64,
}

/// Bytes between two requests.
const SYNC_BYTES: u64 = 128 << 20;

impl EarlySync {
    fn start(file: File) -> io::Result<EarlySync> {
        // While one request is served, one may wait.
        let (send, receive) = sync_channel::<()>(1);
        let work = move || receive.iter().try_for_each(|()| file.sync_data());
        let thread = Builder::new().name("sync".to_string()).spawn(work)?;
        Ok(EarlySync { send, thread: Some(thread), bytes: 0 })
    }

    /// Counts written bytes. Fails with what a request failed with: the kernel reports an error only once.
    fn written(&mut self, bytes: u64) -> io::Result<()> {
        self.bytes += bytes;
        if self.bytes >= SYNC_BYTES && self.send.try_send(()).is_ok() {
            self.bytes = 0;
        }
        match self.thread.take_if(|thread| thread.is_finished()) {
            None => Ok(()),
            Some(ended) => joined(ended),
        }
    }

    /// Waits for the last request.
    fn finish(self) -> io::Result<()> {
        drop(self.send);
        self.thread.map_or(Ok(()), joined)
    }
}

/// What a thread ended with.
pub fn joined<T>(thread: JoinHandle<io::Result<T>>) -> io::Result<T> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread that writes ended unexpectedly")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]
mod tests {
    use super::*;

    /// Writes rows of several sizes. Returns all files, by name.
    fn written(ending: &str, content: PredictionContent, direct_bytes: u64) -> Vec<(String, Vec<u8>)> {
        let directory = tempfile::tempdir().unwrap();
        let count = 60_000;
        let writer = Writer::create(&directory.path().join(format!("out.{ending}")), content, count).unwrap();
        let mut writer = OpenWriter::open(writer, direct_bytes).unwrap();
        assert_eq!(matches!(writer, OpenWriter::Direct { .. }), direct_bytes > 0);
        let (mut first, mut step) = (0, 1);
        while first < count {
            let nodes = first..(first + step).min(count);
            let values = nodes.start * content.columns as u64..nodes.end * content.columns as u64;
            writer
                .write(&PredictedRows {
                    nodes: nodes.clone().map(NodeId).collect(),
                    classes: nodes
                        .clone()
                        .filter(|_| content.has_class)
                        .map(|node| node as u32 % 7)
                        .collect(),
                    values: values.map(|value| value as f32).collect(),
                })
                .unwrap();
            (first, step) = (nodes.end, step * 3 % 7_919);
        }
        writer.finish().unwrap();
        let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
            .collect();
        files.sort();
        files
    }

    #[test]
    fn files_are_the_same_past_the_page_cache_and_through_it() {
        for ending in ["npy", "safetensors"] {
            for (columns, has_class) in [(172, true), (13, false), (1, true)] {
                let content = PredictionContent { value: "probability", columns, has_class };
                let expected = written(ending, content, 0);
                for direct_bytes in [DirectChunks::LEAST_BYTES, 64 << 20] {
                    assert!(written(ending, content, direct_bytes) == expected, "{ending} {columns}");
                }
            }
        }
    }

    #[test]
    fn a_writer_that_does_not_finish_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let content = PredictionContent { value: "probability", columns: 40, has_class: true };
        let writer = Writer::create(&directory.path().join("out.npy"), content, 60_000).unwrap();
        let mut writer = OpenWriter::open(writer, 64 << 20).unwrap();
        let rows = PredictedRows { nodes: vec![NodeId(0)], classes: vec![1], values: vec![0.5; 40] };
        writer.write(&rows).unwrap();
        drop(writer);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
