//! What the issues must show, small. `cargo xtask prove` runs the same at full size.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use std::path::Path;
use xtask::cgroup::Group;
use xtask::prove::{
    Bench, accuracy, damage, diskgnn, gcn, ginex, import, inference, io, kill, link, outre, outre_accuracy,
    outre_gpu, outre_history, outre_safe, outre_split, real, sample, skew, stripe, threads, train, whole_run,
};

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
    let small = skew::ExpectedSkew { scale: "0.0006", batch: "1", ..skew::TABLE[3] };
    println!("{:#}", skew::check(&bench(), &small, "500", 5.0).unwrap());
}

#[test]
fn the_peers_sample_the_same_graph() {
    let Some(python) = sample::peers_python() else {
        println!("skipped: bench/peers/setup.sh has not been run");
        return;
    };
    let bench = bench();
    sample::graph(&bench, 200_000, 15).unwrap();
    let size = sample::Size { layers: 2, rounds: 1, least_seconds: 0.1, peer_batches: 2 };
    let found = sample::beside_peers(&bench, &python, size).unwrap();
    let edges = |who: &str| found["rounds"][0][who]["edges_per_batch"].as_f64().unwrap();
    // DENSE and PyG expand a node once, the layered form and GraphBolt once a layer.
    let (once, each) = (edges("dense") / edges("pyg"), edges("layered") / edges("graphbolt"));
    assert!((0.95..1.05).contains(&once) && (0.95..1.05).contains(&each), "{once} {each}");
}

#[test]
fn losses_are_the_same_for_every_strategy_and_number_of_threads() {
    let bench = bench();
    train::graph(&bench, 20_000, 16).unwrap();
    train::same_losses(&bench, "2").unwrap();
}

#[test]
fn killed_training_goes_on_and_ends_with_the_same_weights() {
    let bench = bench();
    train::graph(&bench, 20_000, 16).unwrap();
    println!("{:#}", train::killed(&bench, "4", 10, 3).unwrap());
}

#[test]
fn training_keeps_its_budget_inside_a_memory_group() {
    match Group::create(1 << 30) {
        Ok(_) => {
            let bench = bench();
            train::graph(&bench, 20_000, 32).unwrap();
            println!("{:#}", train::in_group(&bench, "mmap", "full", &[]).unwrap());
            println!("{:#}", train::in_group(&bench, "memory", "sampled", &[]).unwrap());
            println!("{:#}", train::in_group(&bench, "ginex", "sampled", &[]).unwrap());
            println!("{:#}", train::in_group(&bench, "diskgnn", "sampled", &[]).unwrap());
            println!("{:#}", train::in_group(&bench, "diskgnn", "none", &["--segment", "4"]).unwrap());
        }
        Err(error) => println!("skipped: {error:#}"),
    }
}

#[test]
fn whole_runs_from_disk_end_as_in_memory() {
    match Group::create(1 << 30) {
        Ok(_) => {
            let size =
                whole_run::Size { nodes: 6000, batch: 50, hidden: 32, group_bytes: 1 << 30, rounds: 1 };
            println!("{:#}", whole_run::beside_memory(&bench(), size).unwrap());
        }
        Err(error) => println!("skipped: {error:#}"),
    }
}

#[test]
fn a_real_dataset_is_learned() {
    match accuracy::cora_is_learned(&bench()).unwrap() {
        Some(found) => println!("{found:#}"),
        None => println!("skipped: the real datasets are not beside the checkout"),
    }
}

#[test]
fn gcn_trained_on_few_neighbours_is_evaluated_on_all() {
    match gcn::sampled_is_near_full(&bench()).unwrap() {
        Some(found) => println!("{found:#}"),
        None => println!("skipped: the real datasets are not beside the checkout"),
    }
}

#[test]
fn ginex_trains_as_memory_does_for_any_cache_and_superbatch() {
    println!("{:#}", ginex::same_losses(&bench(), "6000", &["5", "130"], "2").unwrap());
}

#[test]
fn ginex_trains_on_far_more_than_its_memory_group_holds() {
    match Group::create(1 << 30) {
        Ok(_) => println!("{:#}", ginex::far_beyond_memory(&bench(), 92 << 20, "1", "100").unwrap()),
        Err(error) => println!("skipped: {error:#}"),
    }
}

#[test]
fn killed_ginex_goes_on_and_a_full_disk_is_named() {
    let bench = bench();
    train::graph(&bench, 20_000, 16).unwrap();
    let more = ["--strategy", "ginex", "--superbatch", "5"];
    println!("{:#}", train::killed_with(&bench, "4", 10, 3, &more).unwrap());
    match ginex::full_disk(&bench).unwrap() {
        Some(found) => println!("{found:#}"),
        None => println!("skipped: no small disk can be mounted here"),
    }
}

#[test]
fn ginex_is_measured_beside_mmap_in_one_group() {
    match Group::create(1 << 30) {
        Ok(_) => {
            let case =
                ginex::Case { preset: "papers100m", scale: "0.0015", batch: "10", features_over_group: 0.4 };
            let found = ginex::beside_mmap(&bench(), &case, 1, 5).unwrap();
            assert!(found["epoch_over_mmap"].as_f64().unwrap() > 0.0, "{found:#}");
        }
        Err(error) => println!("skipped: {error:#}"),
    }
}

#[test]
fn diskgnn_has_the_losses_of_memory_for_caches_and_disk_budgets() {
    let bench = bench();
    bench
        .json(&["generate", "small", "--nodes", "6000", "--degree", "8", "--dim", "50", "--seed", "1"])
        .unwrap();
    println!("{:#}", diskgnn::same_losses(&bench, "small", &[8.0], "60", "3").unwrap());
    bench.json(&["generate", "igb", "--preset", "igb", "--scale", "0.00002"]).unwrap();
    println!("{:#}", diskgnn::same_losses(&bench, "igb", &[], "20", "3").unwrap());
}

#[test]
fn preparing_that_was_killed_goes_on_to_the_same_bytes() {
    let bench = bench();
    train::graph(&bench, 20_000, 128).unwrap();
    println!("{:#}", diskgnn::killed(&bench, "graph", 20, 3).unwrap());
}

#[test]
fn diskgnn_is_measured_beside_ginex_memory_and_what_preparing_must_take() {
    match Group::create(1 << 30) {
        Ok(_) => {
            let bench = bench();
            train::graph(&bench, 60_000, 128).unwrap();
            let case = diskgnn::Case {
                graph: "graph",
                batch: "300",
                batches: "8",
                group_bytes: 400 << 20,
                seconds: "0.05",
            };
            let found = diskgnn::beside_ginex(&bench, &case, 1).unwrap();
            println!("{found:#}");
            assert!((0.999..=1.02).contains(&found["read_over_misses"].as_f64().unwrap()), "{found:#}");
            println!("{:#}", diskgnn::beside_memory(&bench, &case, 1, false).unwrap());
            println!("{:#}", diskgnn::preparing(&bench, "graph", "300", 2, &[]).unwrap());
        }
        Err(error) => println!("skipped: {error:#}"),
    }
}

#[test]
fn inference_with_all_neighbours_is_the_same_with_any_memory_and_after_kills() {
    let bench = bench();
    train::graph(&bench, 20_000, 32).unwrap();
    println!("{:#}", inference::same(&bench, &["sage", "gat"], 32).unwrap());
    println!("{:#}", inference::killed(&bench, "sage", "80MiB", 3).unwrap());
}

const SMALL_HISTORY: outre_history::Size = outre_history::Size {
    nodes: 20_000,
    dim: 64,
    homophily: "0.9",
    batch: "50",
    hidden: "16",
    memory: "120MiB",
    epochs: "3",
    staleness: "20",
    device: "cpu",
};

/// The proof of a GPU, on the CPU: what it compares is the same there.
#[test]
fn runs_that_are_compared_on_a_gpu_give_the_losses_of_memory() {
    let size = outre_history::Size { nodes: 10_000, memory: "300MiB", epochs: "2", ..SMALL_HISTORY };
    println!("{:#}", outre_gpu::epochs(&bench(), size, 1).unwrap());
}

#[test]
fn memory_is_divided_ahead_and_the_division_is_used() {
    // At this size seconds are noise: that the division is found, used and about right in rows is checked elsewhere.
    let tenths = &[0, 5];
    let proof = outre_split::SplitProof { size: SMALL_HISTORY, tenths, rounds: 1, most: 4.0 };
    println!("{:#}", outre_split::shares(&bench(), proof).unwrap());
}

#[test]
fn outre_by_default_is_about_as_accurate_as_shuffled_batches() {
    let bench = bench();
    let size = outre_accuracy::ShapeOfM { nodes: "12000", batch: "40", epochs: "4" };
    println!("{:#}", outre_accuracy::generated(&bench, size, 1, 5.0).unwrap());
    match outre_accuracy::real_graphs(&bench, &[("cora", "gcn")], 1).unwrap() {
        Some(found) => println!("{found:#}"),
        None => println!("skipped: the real datasets are not beside the checkout"),
    }
}

#[test]
fn outre_requests_fewer_rows_than_ginex_and_trains_as_memory_does() {
    println!("{:#}", outre_history::speed(&bench(), SMALL_HISTORY).unwrap());
}

#[test]
fn a_history_requests_fewer_rows_and_costs_little_accuracy() {
    let size = outre_history::Size { nodes: 8000, epochs: "6", ..SMALL_HISTORY };
    println!("{:#}", outre_history::staleness(&bench(), size, &["1", "20"], 1).unwrap());
}

#[test]
fn batches_by_groups_of_partitions_reach_fewer_nodes() {
    let bench = bench();
    // Large enough that a share of its topology has room for groups and for reading them.
    println!("{:#}", outre::generated(&bench, 200_000, "500").unwrap());
    let sampling = outre::SampledBatches { fanout: "10,10", batch: "500" };
    let caches = outre::neighbour_caches(&bench, "graph", sampling, "20", &[0.5]).unwrap();
    println!("{caches:#}");
    let hits = |at: usize| caches["table"][at]["hit_ratio"].as_f64().unwrap();
    assert!(hits(2) > hits(0) && hits(2) > hits(1), "{caches:#}");
    println!("{:#}", outre::partitioner(&bench, &[2_000_000], &["40"]).unwrap());
    match outre::wordnet(&bench).unwrap() {
        Some(found) => println!("{found:#}"),
        None => println!("skipped: the real datasets are not beside the checkout"),
    }
}

#[test]
fn killed_outre_goes_on_and_ends_as_memory_with_the_same_history() {
    let bench = bench();
    train::graph(&bench, 20_000, 16).unwrap();
    let found = outre_safe::killed(&bench, "3", 9, 3).unwrap();
    println!("{found:#}");
    assert_eq!(found["kills"].as_u64().unwrap(), 9);
}

#[test]
fn outre_trains_on_far_more_than_its_memory_group_holds() {
    match Group::create(1 << 30) {
        Ok(_) => println!("{:#}", outre_safe::far_beyond_memory(&bench(), 92 << 20, "2", "100").unwrap()),
        Err(error) => println!("skipped: {error:#}"),
    }
}

#[test]
fn links_are_the_same_to_the_bit_for_any_threads_and_candidate_blocks() {
    let bench = bench();
    link::facts(&bench, 400, 4000).unwrap();
    println!("{:#}", link::same(&bench, "2").unwrap());
}

#[test]
fn links_killed_anywhere_end_with_the_same_embeddings() {
    let bench = bench();
    link::facts(&bench, 400, 4000).unwrap();
    println!("{:#}", link::killed(&bench, "3", 6, 21).unwrap());
}

#[test]
fn edges_without_structure_are_not_predicted() {
    println!("{:#}", link::no_leak(&bench(), 2000, 10_000, "2", 5.0).unwrap());
}

#[test]
fn distmult_learns_fb15k_237() {
    match link::facts_are_learned(&bench(), "1", 0.1).unwrap() {
        Some(found) => println!("{found:#}"),
        None => println!("skipped: FB15k-237 is not beside the checkout"),
    }
}
