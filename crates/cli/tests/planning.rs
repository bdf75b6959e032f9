//! The proof of planning, small. It measures the memory of its process, so it has one to itself.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use std::path::Path;
use xtask::prove::{Bench, ginex, train};

#[test]
fn belady_is_never_behind_and_plans_without_holding_the_trace() {
    esker_io::return_freed_memory();
    let bench =
        Bench::new(Path::new(env!("CARGO_BIN_EXE_esker")), Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap();
    println!("{:#}", ginex::hit_ratios(&bench, "papers100m", "0.0006", "3", "60").unwrap());
    train::graph(&bench, 100_000, 1).unwrap();
    println!("{:#}", ginex::planning(&bench, ["4", "40"], 1).unwrap());
}
