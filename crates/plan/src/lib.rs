//! Pure decisions: which rows a cache holds, and when they change.
//!
//! [`Belady`] plans a cache whose future is known (Ginex section 3.4); [`Lru`] and [`Fixed`] are what it is compared
//! with; [`TopByScore`] takes the best under a budget without sorting (Ginex section 3.2). [`Hottest`] ranks rows by use, and
//! [`SegmentSizes`] and [`SegmentRows`] cut batches into segments that share rows on disk (DiskGNN section 5.1);
//! [`choose_segment`] and [`is_worth_packing_again`] decide what is packed and when. Nothing here opens a file, starts
//! a thread or reads a clock: accesses come through an [`AccessTrace`], what is found on the way goes
//! to [`NextUses`], decisions to a sink, and the state is proportional to rows and slots, never to the trace. The same input gives the same plan.
#![forbid(unsafe_code)]

mod access;
mod belady;
mod coverage;
mod highest;
mod hottest;
mod packing;
mod placement;
mod policies;
mod score;
mod segments;

pub use access::{AccessTrace, Row};
pub use belady::{Belady, NextUses, PlanTally, RequestCount};
pub use coverage::Coverage;
pub use hottest::Hottest;
pub use packing::{DiskNeeds, PackedLayout, PackedWish, choose_segment, is_worth_packing_again};
pub use placement::{MOST_READ, MOST_SLOTS, Placement, PlacementCounts, Placements};
pub use policies::{Fixed, Lru};
pub use score::TopByScore;
pub use segments::{PagesRead, RowsOfSegment, SegmentRows, SegmentSizes, pages_of, ranks};
