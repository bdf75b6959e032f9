//! Columns by name for a loader. They are the last stage of every strategy, if a job requests any. They are read from
//! disk as stored.

use crate::{Batch, Job, JobOutline, MemoryTable, NamedColumn, Result, StrategyError};
use esker_device::Device;
use esker_fetch::pipeline::Pipeline;
use esker_fetch::{ColumnFiles, ColumnReader};
use esker_sample::{Sample, Settings};
use esker_store::FileEntry;
use std::sync::Arc;

/// Whether an array has one row per node. Otherwise it has one row per edge.
fn is_by_node(entry: &FileEntry) -> Option<bool> {
    match entry.name.split_once('-') {
        Some(("node", _)) => Some(true),
        Some(("edge", _)) => Some(false),
        _ => None,
    }
}

/// Opens the columns that a job requests, and checks that batches can have them.
fn open(job: &JobOutline, settings: &Settings) -> Result<Arc<ColumnFiles>> {
    let columns = ColumnFiles::open(&job.dataset, &job.columns)?;
    let manifest = job.dataset.manifest();
    for entry in columns.entries() {
        let rows = is_by_node(entry).map(|by_node| match by_node {
            true => manifest.nodes.count,
            false => manifest.edges.count,
        });
        if rows != Some(entry.rows) {
            return Err(StrategyError::Column { name: entry.name.clone() });
        }
        if is_by_node(entry) == Some(false) && !settings.carry.edges {
            return Err(StrategyError::EdgeColumn { name: entry.name.clone() });
        }
    }
    Ok(columns)
}

/// Adds the memory of the columns of batches.
pub(crate) fn add_memory(job: &JobOutline, table: &mut MemoryTable) -> Result<()> {
    if job.columns.is_empty() {
        return Ok(());
    }
    let columns = open(job, &job.settings)?;
    let bound = job.bound(&job.settings, job.largest_batch);
    let bytes = |entry: &FileEntry| {
        let rows = if is_by_node(entry) == Some(true) { bound.nodes } else { bound.edges };
        rows.saturating_mul(entry.row_bytes())
    };
    let batch: u64 = columns.entries().iter().map(bytes).fold(0, u64::saturating_add);
    table.add(
        format!("columns of {} batches", job.prefetch_depth),
        batch.saturating_mul(job.prefetch_depth as u64),
    );
    table.add("reading columns", ColumnFiles::reader_bytes(bound.nodes.max(bound.edges)));
    Ok(())
}

/// Adds the columns that the job requests to batches.
pub(crate) fn added<D: Device>(
    job: &Job,
    settings: &Settings,
    batches: Pipeline<Batch<D>, StrategyError>,
) -> Result<Pipeline<Batch<D>, StrategyError>> {
    if job.columns.is_empty() {
        return Ok(batches);
    }
    let columns = open(job, settings)?;
    let shared = columns.clone();
    let open_reader = move || Ok(shared.reader()?);
    Ok(batches.then_with("columns", 0, open_reader, move |_, reader, mut batch| {
        if let Some(sample) = batch.blocks.sample() {
            let each = columns.entries().iter().enumerate();
            let read = each.map(|(number, entry)| read(reader, number, entry, sample));
            batch.input.columns = read.collect::<Result<_>>()?;
        }
        Ok(Some(batch))
    }))
}

/// The values of a column for the nodes or edges of a sample.
fn read(reader: &mut ColumnReader, number: usize, entry: &FileEntry, sample: &Sample) -> Result<NamedColumn> {
    let by_node = is_by_node(entry) == Some(true);
    let bytes = match by_node {
        true => reader.read(number, sample.node_ids.iter().map(|node| node.0))?,
        false => {
            let edges = sample.blocks.iter().flat_map(|block| &block.edges);
            reader.read(number, edges.map(|edge| edge.0))?
        }
    };
    let width = entry.columns as usize;
    Ok(NamedColumn { name: entry.name.clone(), by_node, dtype: entry.dtype, width, bytes })
}
