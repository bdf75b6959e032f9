//! What the issues must show, small. `cargo xtask prove` runs the same at full size.

use std::path::Path;
use xtask::cgroup::Group;
use xtask::prove::{Bench, damage, import, kill, real, sample, skew, threads};

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
fn flipped_bytes_and_cut_files_are_found_and_named() {
    println!("{:#}", damage::find_and_name(&bench(), 2000, 6, 5).unwrap());
}

#[test]
fn samples_are_the_same_for_any_number_of_threads() {
    let bench = bench();
    sample::graph(&bench, 20_000, 15).unwrap();
    println!("{:#}", sample::same_for_any_threads(&bench, "100", "3").unwrap());
}

#[test]
fn a_trace_takes_few_bytes_and_reads_the_same_from_both_ends() {
    let bench = bench();
    sample::graph(&bench, 200_000, 15).unwrap();
    println!("{:#}", sample::trace(&bench, "200", "4", 2.4).unwrap());
}

#[test]
fn accesses_are_as_uneven_as_in_the_real_graph() {
    // A quarter of the scale that `prove skew` takes.
    let small = skew::Expected { scale: "0.0006", batch: "1", ..skew::TABLE[3] };
    println!("{:#}", skew::check(&bench(), &small, "500", 5.0).unwrap());
}
