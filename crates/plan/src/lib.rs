//! Pure decisions: which rows a cache has, and when they change.
//!
//! [`Belady`] plans a cache whose future is known (Ginex section 3.4). [`Lru`] and [`Fixed`] are its baselines.
//! [`StaticRows`] plans one that has the same
//! rows for a run. [`TopByScore`] takes the best candidates under a budget without sorting (Ginex section 3.2). [`Hottest`] ranks rows
//! by accesses. [`SegmentSizes`] and [`SegmentRows`] cut batches into segments that share rows on disk (DiskGNN section
//! 5.1). [`choose_segment`] and [`is_worth_packing_again`] decide what is packed and when. [`partition_orders`] decides which
//! partitions are resident when, and what is trained then (Marius++ sections 5 and 6). Nothing here opens a file,
//! starts a thread or reads a clock. Accesses come from an [`AccessTrace`], intermediate results go to [`NextUses`],
//! and decisions go to a callback. The state is proportional to rows and slots, never to the trace. The same input
//! gives the same plan.
#![forbid(unsafe_code)]

mod access;
mod belady;
mod coverage;
mod highest;
mod hottest;
mod packing;
pub mod partition_orders;
mod placement;
mod policies;
mod score;
mod segments;
mod split;
mod static_rows;

pub use access::{AccessTrace, Row};
pub use belady::{Belady, LAPS, NextUses, PlanTally, RequestCount};
pub use coverage::Coverage;
pub use hottest::{Hottest, RowCounts};
pub use packing::{
    DiskNeeds, PackedLayout, PackedRequest, choose_segment, is_read_row_by_row, is_worth_packing_again,
};
pub use placement::{MOST_READ, MOST_SLOTS, Placement, PlacementCounts, Placements};
pub use policies::{Fixed, Lru};
pub use score::TopByScore;
pub use segments::{PagesRead, RowsOfSegment, SegmentRows, SegmentSizes, pages_of, ranks};
pub use split::{
    CacheSplit, EpochWork, HistorySaving, SplitTask, WorkSeconds, best_replayed, best_split, fitted_line,
    splits,
};
pub use static_rows::StaticRows;
