//! Adds a history to the batches of a strategy: what each step pulls and pushes, the rows themselves, their state in
//! checkpoints. Batches of evaluation pass unchanged.

use super::{History, HistoryCounters, HistoryOutline, SAVED_BYTES, STAMPS, SharedStamps, Stamps};
use crate::phases::PhaseSource;
use crate::{
    Batch, CheckpointReader, CheckpointSink, Exchange, Feedback, HiddenTable, Phase, Pull, Push, Pushed,
    Result, RunPosition, SavedState, SourceCounters, StrategyError,
};
use esker_device::{Device, HiddenRows, HiddenShape};
use esker_fetch::pipeline::StageTimes;
use esker_sample::Sample;
use std::io::{self, Read, Write};
use std::sync::Arc;

/// The rows and stamps of a history.
pub(crate) struct OpenHistory<D: Device> {
    pub history: History,
    pub table: Arc<HiddenTable<D>>,
    /// As of the last step.
    pub stamps: SharedStamps,
}

impl<D: Device> OpenHistory<D> {
    /// Empty, or as an earlier process left it. Rows that are stored otherwise than this history has them stay in the
    /// checkpoint, and are refused by their name.
    pub fn open(
        device: &D,
        history: History,
        state: Option<&mut dyn CheckpointReader>,
    ) -> Result<OpenHistory<D>> {
        // Fewer nodes than the outline may be chosen.
        let shape = HistoryOutline { rows: history.nodes.count(), ..history.outline }.shape();
        let (mut rows, mut stamps) = (device.hidden_rows(shape)?, Stamps::new(shape.slots));
        if let Some(state) = state {
            let name = history.outline.state_name();
            if let Some(SavedState::Bytes(from)) = state.take(name)? {
                read_rows(from, &mut rows).map_err(refused(name))?;
            }
            if let Some(SavedState::Bytes(from)) = state.take(STAMPS)? {
                read_stamps(from, &mut stamps).map_err(refused(STAMPS))?;
            }
        }
        device.check()?;
        Ok(OpenHistory { history, table: HiddenTable::new(rows), stamps: SharedStamps::new(stamps) })
    }
}

fn refused(name: &'static str) -> impl FnOnce(io::Error) -> StrategyError {
    move |source| StrategyError::HistoryState { name, source }
}

/// Pieces of a stream of rows: the first slot of each, and its bytes.
fn pieces(shape: HiddenShape) -> impl Iterator<Item = (u64, usize)> {
    let row_bytes = shape.row_bytes();
    let rows = (SAVED_BYTES / row_bytes.max(1) as u64).max(1);
    let count = move |first: u64| rows.min(shape.slots - first) as usize;
    (0..shape.slots).step_by(rows as usize).map(move |first| (first, count(first) * row_bytes))
}

fn read_rows(mut from: Box<dyn Read + '_>, rows: &mut impl HiddenRows) -> io::Result<()> {
    let mut stored = Vec::new();
    for (first, bytes) in pieces(rows.shape()) {
        stored.resize(bytes, 0);
        from.read_exact(&mut stored)?;
        rows.write(first, &stored);
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
        let (ages, mut exchange) = (stamps.lock(), Exchange::none());
        for hop in 1..=history.outline.hops {
            let (layer, pulled) = (history.outline.layer_of(hop), sample.pulled_nodes(hop));
            let first = pulled.start;
            let split = |all: &mut dyn Iterator<Item = (u32, u32)>| {
                all.map(|(local, slot)| (local - first, slot)).unzip::<u32, u32, Vec<u32>, Vec<u32>>()
            };
            let (rows, slots) = split(&mut history.slots(sample, hop, pulled));
            assert_eq!(rows.len() as u32, sample.pulled_at(hop), "only nodes that have a row are pulled");
            self.counted.pulls += slots.len() as u64;
            let of_pulled = slots.iter().filter_map(|slot| ages.age(*slot));
            self.counted.ages += of_pulled.map(u64::from).sum::<u64>();
            exchange.pulls.push(Pull { layer, rows, table: table.clone(), slots });
            let (rows, slots) = split(&mut history.pushed(sample, hop));
            self.counted.pushes += slots.len() as u64;
            exchange.pushes.push(Push { layer, rows, slots });
        }
        exchange.pulls.retain(|pull| !pull.rows.is_empty());
        exchange.pushes.retain(|push| !push.rows.is_empty());
        exchange
    }
}

impl<D: Device> PhaseSource<D> for HistorySource<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        let Some(mut batch) = self.inner.next()? else { return Ok(None) };
        if let (Phase::Train { .. }, Some(sample)) = (batch.at.phase, batch.blocks.sample()) {
            self.opened.stamps.work.compare(batch.at.position(), sample, &mut self.counted.saved);
            batch.exchange = self.exchange(sample);
        }
        Ok(Some(batch))
    }

    fn counters(&self) -> SourceCounters {
        // This waits for the steps in flight. A device that has failed says so elsewhere.
        let drift = self.opened.table.lock().drift().unwrap_or(0.0);
        SourceCounters { history: Some(HistoryCounters { drift, ..self.counted }), ..self.inner.counters() }
    }

    fn stages(&self) -> Vec<StageTimes> {
        self.inner.stages()
    }

    fn apply(&mut self, mut feedback: Feedback<D>) -> Result<()> {
        if matches!(feedback.at.phase, Phase::Train { .. }) {
            let mut stamps = self.opened.stamps.lock();
            for Pushed { slots, rows } in feedback.pushed.drain(..) {
                let replaces: Vec<bool> = slots.iter().map(|slot| stamps.age(*slot).is_some()).collect();
                self.counted.refreshed += replaces.iter().filter(|replaces| **replaces).count() as u64;
                stamps.push(slots.iter().copied());
                self.opened.table.lock().push(&rows, &slots, &replaces);
            }
            stamps.end_batch();
        }
        self.inner.apply(feedback)
    }

    /// A batch pulls what the batch before it pushed.
    fn lag(&self) -> usize {
        1
    }

    fn save(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        {
            let (rows, mut stored) = (self.opened.table.lock(), Vec::new());
            to.bytes(self.opened.history.outline.state_name(), &mut |to: &mut dyn Write| {
                for (first, bytes) in pieces(rows.shape()) {
                    stored.resize(bytes, 0);
                    rows.read(first, &mut stored);
                    to.write_all(&stored)?;
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
