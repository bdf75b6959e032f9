//! Evaluation and inference see the whole graph: neighbours and features are read from disk as they are needed, learned
//! rows from the buffer or from the files of their partitions.

use super::table::PartitionTable;
use crate::direct::{LastStage, ReadsOn};
use crate::embeddings::joined;
use crate::phases::{InferenceGraph, PhaseSource};
use crate::{Batch, EmbeddingUse, Inference, InputTable, Job, LiveRows, LiveTable, Result, SourceCounters};
use crossbeam_channel::{Receiver, Sender, bounded};
use esker_device::{Device, HostRows, Shape};
use std::sync::Arc;

/// What inference reads.
pub(super) struct WholeGraph<D: Device> {
    pub device: D,
    /// `None` if nothing is sampled and there are no features.
    pub reads: Option<Arc<ReadsOn<D>>>,
    pub table: Option<(Arc<PartitionTable<D>>, EmbeddingUse)>,
}

impl<D: Device> InferenceGraph<D> for WholeGraph<D> {
    fn infer(&self, job: &Job, over: &Inference) -> Result<Box<dyn PhaseSource<D>>> {
        // Only the table is requested.
        if over.batches.count(0) == 0 {
            return Ok(Box::new(EmptyEvaluation));
        }
        let own = match &self.reads {
            Some(_) => None,
            None => Some(ReadsOn::open(job, &self.device)?),
        };
        let reads = self.reads.as_deref().or(own.as_ref()).expect("one of them is there");
        match &self.table {
            Some((table, _)) if over.rows => {
                table.settle()?;
                let (send, rows) = bounded(1);
                let added = AddedRows { device: self.device.clone(), table: table.clone(), send };
                let inner = reads.infer_then(job, over, Some(added.stage()))?;
                Ok(Box::new(WithRows { inner, device: self.device.clone(), dim: table.dim(), rows }))
            }
            _ => reads.infer(job, over),
        }
    }

    fn table(&self) -> Result<InputTable> {
        match (&self.table, &self.reads) {
            (Some((table, EmbeddingUse::WithFeatures)), Some(reads)) => {
                Ok(joined(reads.table()?, table.input_table()?))
            }
            (Some((table, _)), _) => table.input_table(),
            (None, Some(reads)) => reads.table(),
            (None, None) => unreachable!("a table of rows is asked for where batches have them"),
        }
    }
}

/// An evaluation of no batches.
struct EmptyEvaluation;

impl<D: Device> PhaseSource<D> for EmptyEvaluation {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        Ok(None)
    }

    fn counters(&self) -> SourceCounters {
        SourceCounters::default()
    }
}

/// Reads the learned rows of batches, on the thread of a stage.
struct AddedRows<D: Device> {
    device: D,
    table: Arc<PartitionTable<D>>,
    send: Sender<D::HostRows>,
}

impl<D: Device> AddedRows<D> {
    /// The stage. Its reader stays on its thread, and serves all batches.
    fn stage(self) -> LastStage<D> {
        Box::new(move || {
            let mut reader = self.table.reader();
            Box::new(move |batch: &Batch<D>| {
                let nodes = batch.blocks.sample().map_or(&[][..], |sample| &sample.node_ids);
                let mut rows = self.device.host_rows(nodes.len(), self.table.dim());
                self.table.read(&mut reader, nodes, rows.values_mut())?;
                // If nobody receives rows, nobody receives batches.
                let _ = self.send.send(rows);
                Ok(())
            })
        })
    }
}

/// Batches with learned rows of their own: their nodes are not all resident.
struct WithRows<D: Device> {
    /// The rows of each batch. Dropped first: the stage that sends them may wait for room.
    rows: Receiver<D::HostRows>,
    inner: Box<dyn PhaseSource<D>>,
    device: D,
    dim: usize,
}

impl<D: Device> PhaseSource<D> for WithRows<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        let Some(mut batch) = self.inner.next()? else { return Ok(None) };
        let rows = self.rows.recv().expect("the rows of a batch are sent before it");
        let rows = self.device.upload(rows, self.dim);
        let slots = (0..rows.rows() as u32).collect();
        batch.input.live = Some(LiveRows { table: LiveTable::new(rows), slots });
        Ok(Some(batch))
    }

    fn counters(&self) -> SourceCounters {
        self.inner.counters()
    }
}
