//! Rows that a strategy holds for a whole run, where the backend holds them: what strategies ask for in their words, done in
//! the backend's.

use crate::BatchRows;
use esker_fetch::RowFormat;
use esker_nn::{Backend, HoldRows, HostBytes, NnError};
use esker_plan::Placements;
use esker_strategies::{FreshRows, HeldRows, Hold, Result, RowHolder, StrategyError};
use std::any::Any;
use std::sync::Arc;

/// Holds rows for a backend, up to so many bytes of them in its own memory.
pub(crate) struct BackendHolder<B> {
    pub backend: B,
    pub device_bytes: u64,
}

struct Held<B: Backend>(Arc<B::Held>);

struct Fresh<F>(F);

fn device(error: NnError) -> StrategyError {
    StrategyError::Device(error.to_string())
}

impl<B: Backend + 'static> RowHolder<BatchRows<B>> for BackendHolder<B> {
    fn device_slots(&self, format: &RowFormat) -> u64 {
        match self.backend.in_host_memory() {
            true => 0,
            false => format.stored_rows().rows_in(self.device_bytes),
        }
    }

    fn hold(&self, asked: &Hold<'_>) -> Result<Option<Arc<dyn HeldRows<BatchRows<B>>>>> {
        let held = self.backend.hold(&asked.format.stored_rows(), asked.slots, self.device_bytes);
        Ok(held.map_err(device)?.map(|held| Arc::new(Held::<B>(held)) as Arc<dyn HeldRows<BatchRows<B>>>))
    }
}

impl<B: Backend + 'static> HeldRows<BatchRows<B>> for Held<B> {
    fn device_slots(&self) -> u64 {
        self.0.device_slots()
    }

    fn fill(&self, first: u64, stored: &[u8]) -> Result<()> {
        self.0.fill(first, stored).map_err(device)
    }

    fn missed(&self, bytes: usize) -> Box<dyn FreshRows> {
        Box::new(Fresh(self.0.missed(bytes)))
    }

    fn batch(&self, placements: &Placements, fresh: Box<dyn FreshRows>) -> BatchRows<B> {
        let fresh = fresh.into_any().downcast::<Fresh<FreshOf<B>>>();
        let fresh = fresh.expect("fresh rows lie in memory that was made for them here");
        BatchRows(self.0.batch(placements, fresh.0))
    }
}

/// Memory of a backend for rows that a batch brings.
type FreshOf<B> = <<B as Backend>::Held as HoldRows<<B as Backend>::Rows>>::Missed;

impl<F: HostBytes> FreshRows for Fresh<F> {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
