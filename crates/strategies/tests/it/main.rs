//! The integration tests of strategies, in one binary: `cargo test -p esker-strategies --test it ginex::` runs those of a
//! file.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod columns;
mod common;
mod diskgnn;
mod esker;
mod evaluation;
mod ginex;
mod ginex_evaluation;
mod phases;
mod pilot;
mod replay;
mod sources;
