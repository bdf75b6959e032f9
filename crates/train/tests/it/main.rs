//! The integration tests of runs, in one binary: every test is linked with the whole engine, which takes longer than to
//! compile it. `cargo test -p esker-train --test it marius::` runs those of a file.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]
#![allow(clippy::duplicate_mod, reason = "tests of `nn` that a GPU runs bring a helper that is here, too")]

mod common;
mod contract;
mod estimate;
mod facts;
mod faults;
mod gpu;
mod history;
mod lagging;
mod link;
mod link_evaluation;
mod loader;
mod marius;
mod marius_kept;
mod marius_matrix;
mod marius_memory;
mod processors;
mod residents;
mod runs;
mod streamed_ranks;
