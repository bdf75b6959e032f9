//! Feature rows: chooses their dtype, converts and writes them. Rows are streamed in order, one chunk at a time.

use super::selection::Selection;
use super::topology::TopologyResult;
use crate::npy::{NpyArray, NpyRows};
use crate::source::{RowSource, RowStream};
use crate::{ImportError, ImportWorkspace, Location, Result};
use esker_store::{ArrayFile, ArrayWriter, EdgeColumn, FeatureInfo, FileEntry, StoreError, file};
use esker_types::{Dtype, Unit};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

/// Bytes of rows between two checkpoints: the most work that a kill can lose.
const CHECKPOINT_BYTES: u64 = 256 << 20;

/// The user's options for features.
pub(crate) struct FeaturePlan {
    pub dtype: Option<Dtype>,
    pub row_normalise: bool,
    /// NaN and infinite numbers are accepted.
    pub allow_nan: bool,
}

/// How rows are stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Storage {
    dtype: Dtype,
    /// For 8-bit rows that are not whole numbers: the value of a stored 1, per column.
    scales: Option<Vec<f32>>,
}

/// Reads rows in chunks that fit the budget, normalises them if requested, and drops unselected ones.
struct Chunks<'a> {
    rows: &'a dyn RowSource,
    stream: Box<dyn RowStream>,
    selection: Option<&'a Selection>,
    plan: &'a FeaturePlan,
    buffer: Vec<f32>,
    chunk_rows: u64,
    /// Next row of the source.
    next: u64,
}

impl<'a> Chunks<'a> {
    fn open(
        rows: &'a dyn RowSource,
        plan: &'a FeaturePlan,
        selection: Option<&'a Selection>,
        first: u64,
        workspace: &ImportWorkspace,
    ) -> Result<Chunks<'a>> {
        let chunk_rows = (workspace.chunk_bytes() / (rows.dim() as u64 * 4).max(1)).max(1);
        let stream = rows.open(first)?;
        Ok(Chunks { rows, stream, selection, plan, buffer: Vec::new(), chunk_rows, next: first })
    }

    /// The next selected rows, and the source row of the first row read; `None` at the end.
    fn next(&mut self) -> Result<Option<(u64, &mut [f32])>> {
        let (dim, first) = (self.rows.dim(), self.next);
        let count = self.chunk_rows.min(self.rows.rows() - self.next);
        if count == 0 {
            return Ok(None);
        }
        self.buffer.resize(count as usize * dim, 0.0);
        self.stream.fill(&mut self.buffer)?;
        self.next += count;
        if let Some(selection) = self.selection {
            let mut kept = 0;
            for row in 0..count as usize {
                if selection.contains(first + row as u64) {
                    self.buffer.copy_within(row * dim..(row + 1) * dim, kept * dim);
                    kept += 1;
                }
            }
            self.buffer.truncate(kept * dim);
        }
        if !self.plan.allow_nan
            && let Some(at) = self.buffer.iter().position(|value| !value.is_finite())
        {
            let location = self.rows.location(source_row(self.selection, first, at / dim));
            return Err(not_finite(location, at % dim, self.buffer[at]));
        }
        if self.plan.row_normalise && dim > 0 {
            self.buffer.chunks_exact_mut(dim).for_each(normalise);
        }
        Ok(Some((first, &mut self.buffer)))
    }
}

/// The error for a feature that no model can learn from.
fn not_finite(location: Location, column: usize, value: f32) -> ImportError {
    let expected = "a finite number (--allow-nan imports NaN and infinity as they are)";
    location.column(column).bad(expected, value)
}

/// The source row of selected row number `index` in a chunk that starts at source row `first`.
fn source_row(selection: Option<&Selection>, first: u64, index: usize) -> u64 {
    match selection {
        Some(selection) => (first..).filter(|row| selection.contains(*row)).nth(index).unwrap_or(first),
        None => first + index as u64,
    }
}

/// Divides a row by its sum. A row with sum zero is not changed.
fn normalise(row: &mut [f32]) {
    let sum: f64 = row.iter().map(|value| *value as f64).sum();
    if sum != 0.0 && sum.is_finite() {
        row.iter_mut().for_each(|value| *value = (*value as f64 / sum) as f32);
    }
}

/// Writes feature rows. Returns their description in the manifest and their files.
pub(crate) fn write_features(
    rows: &dyn RowSource,
    plan: &FeaturePlan,
    selection: Option<&Selection>,
    directory: &Path,
    workspace: &ImportWorkspace,
) -> Result<(FeatureInfo, Vec<FileEntry>)> {
    if rows.dim() == 0 {
        return Err(rows.location(0).bad("feature rows of at least one number", "rows of none"));
    }
    let storage: Storage =
        workspace.step("feature dtype", || choose_storage(rows, plan, selection, workspace))?;
    let entries =
        workspace.step("features", || write_rows(rows, plan, selection, &storage, directory, workspace))?;
    let info = FeatureInfo {
        dim: rows.dim() as u64,
        dtype: storage.dtype,
        scaled: storage.scales.is_some(),
        row_normalised: plan.row_normalise,
    };
    Ok((info, entries))
}

fn choose_storage(
    rows: &dyn RowSource,
    plan: &FeaturePlan,
    selection: Option<&Selection>,
    workspace: &ImportWorkspace,
) -> Result<Storage> {
    let exact = |dtype| Storage { dtype, scales: None };
    match plan.dtype {
        Some(dtype @ (Dtype::F32 | Dtype::F16 | Dtype::Bf16)) => return Ok(exact(dtype)),
        Some(Dtype::U8 | Dtype::I8) => {}
        Some(dtype) => return Err(ImportError::NoFeatureDtype { dtype }),
        None if rows.natural_dtype() != Dtype::F32 || plan.row_normalise => {
            return Ok(exact(rows.natural_dtype()));
        }
        None => {}
    }
    let requested = plan.dtype.unwrap_or(Dtype::U8);
    // Casts saturate and turn NaN into 0, so a value that is unchanged is whole and in range.
    let fits = |value: &f32| match requested {
        Dtype::U8 => (*value as u8) as f32 == *value,
        _ => (*value as i8) as f32 == *value,
    };
    workspace.progress.stage("look at features", Some(rows.rows()), Unit::Count("rows"));
    let mut chunks = Chunks::open(rows, plan, selection, 0, workspace)?;
    let (mut integral, mut largest, dim) = (true, vec![0f32; rows.dim()], rows.dim());
    while let Some((first, chunk)) = chunks.next()? {
        integral = integral && chunk.iter().all(fits);
        workspace.progress.advance((chunk.len() / dim) as u64);
        match (plan.dtype, integral) {
            (None, true) => continue,
            (None, false) => break,
            (Some(_), _) => {}
        }
        for (index, row) in chunk.chunks_exact(dim).enumerate() {
            if let Some(value) = row.iter().find(|v| !v.is_finite() || (requested == Dtype::U8 && **v < 0.0))
            {
                let expected = if requested == Dtype::U8 {
                    "numbers from 0 up for u8; use i8"
                } else {
                    "finite numbers"
                };
                return Err(rows.location(source_row(selection, first, index)).bad(expected, value));
            }
            largest.iter_mut().zip(row).for_each(|(largest, value)| *largest = largest.max(value.abs()));
        }
    }
    workspace.progress.finish();
    Ok(match (integral, plan.dtype) {
        (true, _) => exact(requested),
        (false, None) => exact(Dtype::F32),
        (false, Some(_)) => {
            let top = if requested == Dtype::U8 { 255.0 } else { 127.0 };
            let scale = |largest: f32| if largest == 0.0 { 1.0 } else { largest / top };
            Storage { dtype: requested, scales: Some(largest.into_iter().map(scale).collect()) }
        }
    })
}

fn write_rows(
    rows: &dyn RowSource,
    plan: &FeaturePlan,
    selection: Option<&Selection>,
    storage: &Storage,
    directory: &Path,
    workspace: &ImportWorkspace,
) -> Result<Vec<FileEntry>> {
    let dim = rows.dim() as u64;
    let kept_rows = selection.map_or(rows.rows(), Selection::len);
    let row_bytes = dim * storage.dtype.bytes();
    // Source rows read, rows written.
    let (read, written): (u64, u64) = workspace.journal.done("feature rows").unwrap_or((0, 0));
    let resumed = ArrayWriter::resume(directory, file::NODE_FEATURES, storage.dtype, dim, written);
    let (mut writer, read, mut written) = match resumed {
        Ok(writer) => (writer, read, written),
        // The rows that the journal counts are missing: a kill came between finishing the array and recording it.
        Err(StoreError::WrongLength { .. }) => {
            (ArrayWriter::create(directory, file::NODE_FEATURES, storage.dtype, dim)?, 0, 0)
        }
        Err(StoreError::Io { source, .. })
            if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) =>
        {
            (ArrayWriter::create(directory, file::NODE_FEATURES, storage.dtype, dim)?, 0, 0)
        }
        Err(error) => return Err(error.into()),
    };
    workspace.progress.stage("write features", Some(kept_rows * row_bytes), Unit::Bytes);
    workspace.progress.advance(written * row_bytes);
    let mut chunks = Chunks::open(rows, plan, selection, read, workspace)?;
    let (mut room, mut first_nan, mut since_checkpoint) = (Converted::default(), None, 0);
    while let Some((first, chunk)) = chunks.next()? {
        let bytes = convert(chunk, storage, rows.dim(), &mut room).map_err(|(index, value)| {
            let expected = format!("numbers that fit {}; use --dtype f32", storage.dtype);
            rows.location(source_row(selection, first, index / rows.dim())).bad(expected, value)
        })?;
        if plan.allow_nan && first_nan.is_none() {
            let at = chunk.iter().position(|value| !value.is_finite());
            first_nan = at.map(|at| source_row(selection, first, at / rows.dim()));
        }
        writer.write(bytes)?;
        written += (chunk.len() / rows.dim()) as u64;
        since_checkpoint += bytes.len() as u64;
        workspace.progress.advance(bytes.len() as u64);
        if since_checkpoint >= CHECKPOINT_BYTES {
            writer.checkpoint()?;
            workspace.journal.record("feature rows", &(chunks.next, written))?;
            since_checkpoint = 0;
        }
    }
    if let Some(row) = first_nan {
        workspace.progress.note(&format!(
            "{}: NaN or infinite features; training on them gives NaN losses",
            rows.location(row)
        ));
    }
    let mut entries = vec![writer.finish()?];
    if let Some(scales) = &storage.scales {
        let mut writer = ArrayWriter::create(directory, file::NODE_FEATURE_SCALES, Dtype::F32, 1)?;
        writer.write_elements(scales)?;
        entries.push(writer.finish()?);
    }
    workspace.progress.finish();
    Ok(entries)
}

/// Buffers for converted values.
#[derive(Default)]
struct Converted {
    bytes: Vec<u8>,
    halves: Vec<u16>,
}

/// `values` in their stored form, in `room` if they must be converted. The error is the position and value of a value
/// that does not fit.
fn convert<'a>(
    values: &'a [f32],
    storage: &Storage,
    dim: usize,
    room: &'a mut Converted,
) -> Result<&'a [u8], (usize, f32)> {
    match storage.dtype {
        Dtype::F16 | Dtype::Bf16 => {
            room.halves.resize(values.len(), 0);
            let overflow = if storage.dtype == Dtype::F16 {
                let halves: &mut [f16] = bytemuck::cast_slice_mut(&mut room.halves);
                halves.convert_from_f32_slice(values);
                values
                    .iter()
                    .zip(halves.iter())
                    .position(|(value, half)| half.is_infinite() && value.is_finite())
            } else {
                let halves: &mut [bf16] = bytemuck::cast_slice_mut(&mut room.halves);
                halves.convert_from_f32_slice(values);
                values
                    .iter()
                    .zip(halves.iter())
                    .position(|(value, half)| half.is_infinite() && value.is_finite())
            };
            match overflow {
                Some(at) => Err((at, values[at])),
                None => Ok(bytemuck::cast_slice(&room.halves)),
            }
        }
        Dtype::U8 | Dtype::I8 => {
            room.bytes.clear();
            let quantise = |value: f32| match storage.dtype {
                Dtype::U8 => value.round() as u8,
                _ => value.round() as i8 as u8,
            };
            match &storage.scales {
                // These are known to be whole numbers in range.
                None if storage.dtype == Dtype::U8 => {
                    room.bytes.extend(values.iter().map(|value| *value as u8))
                }
                None => room.bytes.extend(values.iter().map(|value| *value as i8 as u8)),
                Some(scales) => {
                    for row in values.chunks_exact(dim) {
                        room.bytes
                            .extend(row.iter().zip(scales).map(|(value, scale)| quantise(value / scale)));
                    }
                }
            }
            Ok(&room.bytes)
        }
        _ => Ok(bytemuck::cast_slice(values)),
    }
}

/// Writes edge feature rows in the order of edge ids instead of their file's order. Each pass over the file fills as
/// many edges as fit into half the budget.
pub(crate) fn edge_features(
    path: &Path,
    directory: &Path,
    topology: &TopologyResult,
    allow_nan: bool,
    workspace: &ImportWorkspace,
) -> Result<(EdgeColumn, FileEntry)> {
    let rows = NpyRows::new(NpyArray::open(path)?)?;
    let dim = rows.dim();
    if dim == 0 || rows.rows() != topology.source_edges {
        let found = format!("{} rows of {dim}", rows.rows());
        return Err(Location::file(path).bad(format!("{} rows, one an edge", topology.source_edges), found));
    }
    let entry = workspace.step("edge features", || {
        let positions = topology.files.iter().find(|entry| entry.name == file::EDGE_POSITION);
        let positions = ArrayFile::open(directory, positions.expect("kept with edge features"))?;
        let mut positions = positions.elements(0)?;
        let mut writer = ArrayWriter::create(directory, file::EDGE_FEATURES, Dtype::F32, dim as u64)?;
        let edge_bytes = dim as u64 * 4 + 16;
        let most = (workspace.sort_bytes() / 2 / edge_bytes)
            .clamp(1, topology.edges.clamp(1, u32::MAX as u64)) as usize;
        let stage_rows = rows.rows() * topology.edges.div_ceil(most as u64);
        workspace.progress.stage("edge features", Some(stage_rows), Unit::Count("rows"));
        let (mut requested, mut taken, mut row) = (vec![0u64; most], vec![0f32; most * dim], vec![0f32; dim]);
        loop {
            let count = positions.fill(&mut requested)?;
            if count == 0 {
                break;
            }
            let mut order: Vec<(u64, u32)> = requested[..count].iter().copied().zip(0..).collect();
            order.sort_unstable();
            let (mut stream, mut at) = (rows.open(0)?, 0);
            for (position, slot) in order {
                while at <= position {
                    stream.fill(&mut row)?;
                    if !allow_nan && let Some(column) = row.iter().position(|value| !value.is_finite()) {
                        return Err(not_finite(rows.location(at), column, row[column]));
                    }
                    at += 1;
                }
                taken[slot as usize * dim..][..dim].copy_from_slice(&row);
            }
            workspace.progress.advance(at);
            writer.write_elements(&taken[..count * dim])?;
        }
        workspace.progress.finish();
        Ok(writer.finish()?)
    })?;
    Ok((EdgeColumn { name: entry.name.clone(), width: entry.columns, dtype: entry.dtype }, entry))
}
