//! What the issues must show, small. `cargo xtask prove` runs the same at full size.

use std::path::Path;
use xtask::cgroup::Group;
use xtask::prove::{Bench, damage, import, io, kill, real, stripe, threads};

fn bench() -> Bench {
    // Beside the build: a real disk, where /tmp may be memory.
    Bench::new(Path::new(env!("CARGO_BIN_EXE_esker")), Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap()
}

#[test]
fn every_real_dataset_imports_with_the_counts_of_its_source() {
    if real::import_all(&bench()).unwrap().is_none() {
        println!("skipped: the real datasets are not beside the checkout");
    }
}

#[test]
fn the_engine_reads_each_block_once_and_whole_pages_where_asked() {
    io::reads_what_theory_says(&bench(), "64MiB", "0.02", "1").unwrap();
}

#[test]
fn edges_far_beyond_the_budget_are_imported_inside_a_memory_group() {
    match Group::create(1 << 30) {
        Ok(_) => println!("{:#}", import::in_group(&bench(), 8_000_000, 64 << 20, 96 << 20).unwrap()),
        Err(error) => println!("skipped: {error:#}"),
    }
}

#[test]
fn a_generated_graph_has_the_same_bytes_for_any_number_of_threads() {
    threads::same_bytes(&bench(), "0.0005", 64 << 20, false).unwrap();
}

#[test]
fn after_a_kill_there_is_no_dataset_or_a_whole_one_and_the_re_run_finishes() {
    println!("{:#}", kill::at_random_moments(&bench(), 300, 6, 11).unwrap());
}

#[test]
fn after_a_kill_a_dataset_is_striped_or_not_and_whole_and_the_re_run_finishes() {
    println!("{:#}", stripe::kill_at_random_moments(&bench(), 60, 9, 13).unwrap());
}

#[test]
fn flipped_bytes_and_cut_files_are_found_and_named() {
    println!("{:#}", damage::find_and_name(&bench(), 2000, 6, 5).unwrap());
}
