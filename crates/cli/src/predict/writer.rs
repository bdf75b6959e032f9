//! Predictions as files, written as they come.

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
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
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

/// A file under another name until it is whole.
struct PartialFile {
    name: PartialName,
    file: BufWriter<File>,
}

impl PartialFile {
    /// An npy file of so many rows.
    fn npy(path: PathBuf, descr: &str, shape: &str) -> anyhow::Result<PartialFile> {
        let (name, file) = PartialName::create(path)?;
        let mut part = PartialFile { name, file: BufWriter::new(file) };
        let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
        // Magic, version and length are 10 bytes; data starts at a multiple of 64.
        while (10 + header.len() + 1) % 64 != 0 {
            header.push(' ');
        }
        header.push('\n');
        part.file.write_all(b"\x93NUMPY\x01\x00")?;
        part.file.write_all(&(header.len() as u16).to_le_bytes())?;
        part.file.write_all(header.as_bytes())?;
        Ok(part)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.flush()?;
        self.file.get_ref().sync_all()
    }
}

/// The npy files.
pub struct PredictionArrays {
    values: PartialFile,
    classes: Option<PartialFile>,
    nodes: PartialFile,
}

/// A file of predictions in the making.
pub enum Writer {
    Npy(Box<PredictionArrays>),
    Parquet(Box<ParquetTable>),
    Safetensors(Box<TensorFile>),
}

/// A safetensors file: its tensors lie one after the other, and all of them grow at the same time.
pub struct TensorFile {
    name: PartialName,
    file: File,
    /// Where the next nodes, classes and numbers go.
    next: [u64; 3],
}

impl TensorFile {
    fn create(out: &Path, content: PredictionContent, count: u64) -> anyhow::Result<TensorFile> {
        let (name, file) = PartialName::create(out.to_path_buf())?;
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
        file.write_all_at(&(text.len() as u64).to_le_bytes(), 0).map_err(TrainError::io(out))?;
        file.write_all_at(text.as_bytes(), 8).map_err(TrainError::io(out))?;
        let start = 8 + text.len() as u64;
        Ok(TensorFile { name, file, next: [start, start + classes, start + values] })
    }

    fn write(&mut self, ids: &[NodeId], found: &[u32], numbers: &[f32]) -> io::Result<()> {
        let nodes: Vec<u8> = ids.iter().flat_map(|node| node.0.to_le_bytes()).collect();
        let parts: [&[u8]; 3] = [&nodes, bytemuck::cast_slice(found), bytemuck::cast_slice(numbers)];
        for (bytes, at) in parts.iter().zip(&mut self.next) {
            self.file.write_all_at(bytes, *at)?;
            *at += bytes.len() as u64;
        }
        Ok(())
    }

    fn finish(self) -> io::Result<()> {
        self.file.sync_all()?;
        self.name.finish()
    }
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
            Some("npy") => Ok(Writer::Npy(Box::new(PredictionArrays {
                values: PartialFile::npy(out.to_path_buf(), "<f4", &format!("{count}, {columns}"))?,
                classes: match has_class {
                    true => Some(PartialFile::npy(
                        out.with_extension("classes.npy"),
                        "<u4",
                        &format!("{count},"),
                    )?),
                    false => None,
                },
                nodes: PartialFile::npy(out.with_extension("nodes.npy"), "<u8", &format!("{count},"))?,
            }))),
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
                Ok(Writer::Safetensors(Box::new(TensorFile::create(out, content, count)?)))
            }
            _ => Err(super::no_ending(out, &super::ENDINGS)),
        }
    }

    /// Writes some nodes, their classes, if they have any, and their numbers.
    pub fn write(&mut self, ids: &[NodeId], found: &[u32], numbers: &[f32]) -> io::Result<()> {
        match self {
            Writer::Npy(arrays) => {
                let PredictionArrays { values, classes, nodes } = &mut **arrays;
                values.file.write_all(bytemuck::cast_slice(numbers))?;
                ids.iter().try_for_each(|node| nodes.file.write_all(&node.0.to_le_bytes()))?;
                if let Some(classes) = classes {
                    classes.file.write_all(bytemuck::cast_slice(found))?;
                }
            }
            Writer::Parquet(table) => table.write(ids, found, numbers)?,
            Writer::Safetensors(file) => file.write(ids, found, numbers)?,
        }
        Ok(())
    }

    /// The file that most bytes go to, if they go there at once.
    fn largest_file(&self) -> io::Result<Option<File>> {
        match self {
            Writer::Npy(arrays) => arrays.values.file.get_ref().try_clone().map(Some),
            Writer::Safetensors(file) => file.file.try_clone().map(Some),
            Writer::Parquet(_) => Ok(None),
        }
    }

    /// Gives the files their names.
    pub fn finish(self) -> io::Result<()> {
        match self {
            Writer::Npy(arrays) => {
                let PredictionArrays { values, classes, nodes } = *arrays;
                // All of them are whole before one has its name.
                let mut parts: Vec<PartialFile> =
                    [Some(nodes), classes, Some(values)].into_iter().flatten().collect();
                parts.iter_mut().try_for_each(PartialFile::sync)?;
                parts.into_iter().try_for_each(|part| part.name.finish())
            }
            Writer::Parquet(table) => table.finish(),
            Writer::Safetensors(file) => file.finish(),
        }
    }
}

/// Asks the disk for what is written while more is, so that little is left to wait for at the end.
struct EarlySync {
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
fn joined<T>(thread: JoinHandle<io::Result<T>>) -> io::Result<T> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread that writes ended unexpectedly")))
}

/// Writes on a thread of its own, while more is computed.
pub struct Background {
    send: Option<SyncSender<PredictedRows>>,
    /// Buffers whose rows are written.
    written: Receiver<PredictedRows>,
    thread: Option<JoinHandle<io::Result<Written>>>,
}

/// A writer after its last row, and the requests to its disk.
type Written = (Writer, Option<EarlySync>);

/// Nodes, classes and numbers.
type PredictedRows = (Vec<NodeId>, Vec<u32>, Vec<f32>);

/// Rows of so many tiles or batches may wait.
const WAITING: usize = 2;

impl Background {
    pub fn start(mut writer: Writer) -> io::Result<Background> {
        let (send, receive) = sync_channel::<PredictedRows>(WAITING);
        // There is room for every buffer, so nothing waits here.
        let (back, written) = sync_channel(WAITING + 2);
        let mut sync = writer.largest_file()?.map(EarlySync::start).transpose()?;
        let work = move || {
            while let Ok(rows) = receive.recv() {
                writer.write(&rows.0, &rows.1, &rows.2)?;
                sync.iter_mut().try_for_each(|sync| sync.written(size_of_val(&rows.2[..]) as u64))?;
                let _ = back.try_send(rows);
            }
            Ok((writer, sync))
        };
        let thread = Builder::new().name("write".to_string()).spawn(work)?;
        Ok(Background { send: Some(send), written, thread: Some(thread) })
    }

    /// Hands rows over. Fails with what an earlier write failed with.
    pub fn write(&mut self, ids: &[NodeId], found: &[u32], numbers: &[f32]) -> io::Result<()> {
        let (mut nodes, mut classes, mut values) = self.written.try_recv().unwrap_or_default();
        nodes.clear();
        nodes.extend_from_slice(ids);
        classes.clear();
        classes.extend_from_slice(found);
        values.clear();
        values.extend_from_slice(numbers);
        let rows = (nodes, classes, values);
        let sent = self.send.as_ref().is_some_and(|send| send.send(rows).is_ok());
        if sent { Ok(()) } else { self.join().map(drop) }
    }

    /// Waits for the last write, and gives the files their names.
    pub fn finish(mut self) -> io::Result<()> {
        let Some((writer, sync)) = self.join()? else { return Ok(()) };
        sync.map_or(Ok(()), EarlySync::finish)?;
        writer.finish()
    }

    fn join(&mut self) -> io::Result<Option<Written>> {
        self.send = None;
        self.thread.take().map(joined).transpose()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.join();
    }
}
