//! Adds a history to the batches of a strategy: what each step pulls and pushes, the rows themselves, their state in
//! checkpoints. Batches of evaluation pass unchanged.

use super::{History, HistoryCounters, ROWS, SAVED_BYTES, STAMPS, SharedStamps, Stamps};
use crate::phases::PhaseSource;
use crate::{
    Batch, CheckpointReader, CheckpointSink, Exchange, Feedback, LiveTable, Phase, Pull, Push, Result,
    RunPosition, SavedState, SourceCounters, StrategyError,
};
use esker_device::{Device, Shape};
use esker_sample::Sample;
use std::io::{self, Read, Write};
use std::sync::Arc;

/// The rows and stamps of a history.
pub(crate) struct OpenHistory<D: Device> {
    pub history: History,
    pub table: Arc<LiveTable<D>>,
    /// As of the last step.
    pub stamps: SharedStamps,
}

impl<D: Device> OpenHistory<D> {
    /// Empty, or as an earlier process left it.
    pub fn open(
        device: &D,
        history: History,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<OpenHistory<D>> {
        let (slots, columns) = (history.nodes.count(), history.outline.columns);
        let mut rows = device.matrix(slots as usize, columns);
        device.fill(&mut rows, 0.0);
        let mut stamps = Stamps::new(slots);
        if let Some(state) = state {
            if let Some(SavedState::Bytes(from)) = state.take(ROWS)? {
                read_rows(device, from, &mut rows).map_err(refused(ROWS))?;
            }
            if let Some(SavedState::Bytes(from)) = state.take(STAMPS)? {
                read_stamps(from, &mut stamps).map_err(refused(STAMPS))?;
            }
        }
        device.check()?;
        Ok(OpenHistory { history, table: LiveTable::new(rows), stamps: SharedStamps::new(stamps) })
    }
}

fn refused(name: &'static str) -> impl FnOnce(io::Error) -> StrategyError {
    move |source| StrategyError::HistoryState { name, source }
}

/// Rows per piece of a stream.
fn piece_rows(columns: usize) -> usize {
    (SAVED_BYTES as usize / (4 * columns.max(1))).max(1)
}

fn read_rows<D: Device>(device: &D, mut from: Box<dyn Read + '_>, rows: &mut D::Matrix) -> io::Result<()> {
    let columns = rows.columns();
    let mut values = Vec::new();
    for first in (0..rows.rows()).step_by(piece_rows(columns)) {
        let count = piece_rows(columns).min(rows.rows() - first);
        values.resize(count * columns, 0f32);
        from.read_exact(bytemuck::cast_slice_mut(&mut values))?;
        device.write(rows, first, &values);
    }
    read_end(from)
}

fn read_stamps(mut from: Box<dyn Read + '_>, stamps: &mut Stamps) -> io::Result<()> {
    from.read_exact(bytemuck::bytes_of_mut(&mut stamps.batch))?;
    from.read_exact(bytemuck::cast_slice_mut(&mut stamps.of_slot))?;
    match stamps.batch == 0 || stamps.of_slot.iter().any(|stamp| *stamp >= stamps.batch) {
        true => Err(io::Error::new(io::ErrorKind::InvalidData, "a row of a batch that is yet to come")),
        false => read_end(from),
    }
}

/// The end: the checksum is checked there.
fn read_end(mut from: Box<dyn Read + '_>) -> io::Result<()> {
    match from.read(&mut [0])? {
        0 => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "more rows than the history has")),
    }
}

/// Batches with a history.
pub(crate) struct HistorySource<D: Device> {
    inner: Box<dyn PhaseSource<D>>,
    device: D,
    opened: OpenHistory<D>,
    counted: HistoryCounters,
}

impl<D: Device> HistorySource<D> {
    /// Adds a history to batches. Their samples are decided with its stamps.
    pub fn new(inner: Box<dyn PhaseSource<D>>, device: &D, opened: OpenHistory<D>) -> HistorySource<D> {
        HistorySource { inner, device: device.clone(), opened, counted: HistoryCounters::default() }
    }

    /// What the step of a batch pulls and pushes.
    fn exchange(&mut self, sample: &Sample) -> Exchange<D> {
        let OpenHistory { history, table, stamps } = &self.opened;
        let (layer, first) = (history.outline.layer, sample.pulled_nodes().start);
        let split = |all: &mut dyn Iterator<Item = (u32, u32)>| {
            all.map(|(local, slot)| (local - first, slot)).unzip::<u32, u32, Vec<u32>, Vec<u32>>()
        };
        let (rows, slots) = split(&mut history.slots(sample, sample.pulled_nodes()));
        assert_eq!(rows.len(), sample.pulled as usize, "only nodes that have a row are pulled");
        let ages = stamps.lock();
        self.counted.pulls += slots.len() as u64;
        self.counted.ages += slots.iter().filter_map(|slot| ages.age(*slot)).map(u64::from).sum::<u64>();
        let pull = (!rows.is_empty()).then(|| Pull { layer, rows, table: table.clone(), slots });
        let (rows, slots) = split(&mut history.pushed(sample));
        self.counted.pushes += slots.len() as u64;
        let push = (!rows.is_empty()).then_some(Push { layer, rows, slots });
        Exchange { pull, push, input_gradient: false }
    }
}

impl<D: Device> PhaseSource<D> for HistorySource<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        let Some(mut batch) = self.inner.next()? else { return Ok(None) };
        if let (Phase::Train { .. }, Some(sample)) = (batch.at.phase, batch.blocks.sample()) {
            batch.exchange = self.exchange(sample);
        }
        Ok(Some(batch))
    }

    fn counters(&self) -> SourceCounters {
        SourceCounters { history: Some(self.counted), ..self.inner.counters() }
    }

    fn apply(&mut self, mut feedback: Feedback<D>) -> Result<()> {
        if matches!(feedback.at.phase, Phase::Train { .. }) {
            let pushed = feedback.pushed.take();
            let slots = pushed.as_ref().map_or(&[][..], |pushed| &pushed.slots);
            self.opened.stamps.lock().push(slots.iter().copied());
            if let Some(pushed) = &pushed {
                self.device.scatter_rows(Some(&pushed.rows), &pushed.slots, &mut self.opened.table.lock());
            }
        }
        self.inner.apply(feedback)
    }

    /// A batch pulls what the batch before it pushed.
    fn lag(&self) -> usize {
        1
    }

    fn save(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        {
            let rows = self.opened.table.lock();
            let columns = rows.columns();
            let mut values = Vec::new();
            to.bytes(ROWS, &mut |to: &mut dyn Write| {
                for first in (0..rows.rows()).step_by(piece_rows(columns)) {
                    values.resize(piece_rows(columns).min(rows.rows() - first) * columns, 0f32);
                    self.device.read(&rows, first, &mut values);
                    to.write_all(bytemuck::cast_slice(&values))?;
                }
                Ok(())
            })?;
        }
        self.device.check()?;
        let stamps = self.opened.stamps.lock();
        to.bytes(STAMPS, &mut |to: &mut dyn Write| {
            to.write_all(bytemuck::bytes_of(&stamps.batch))?;
            to.write_all(bytemuck::cast_slice(&stamps.of_slot))
        })?;
        self.inner.save(to)
    }

    fn save_for_inference(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.inner.save_for_inference(to)
    }

    fn evaluates(&self) -> bool {
        self.inner.evaluates()
    }

    fn rest(&mut self) -> bool {
        self.inner.rest()
    }

    fn restart(&mut self, at: RunPosition) -> Result<()> {
        self.inner.restart(at)
    }

    fn end(&mut self) -> Result<()> {
        self.inner.end()
    }
}
