//! What the issues must show, small. `cargo xtask prove` runs the same at full size.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use std::path::Path;
use xtask::cgroup::Group;
use xtask::prove::{
    Bench, accuracy, damage, diskgnn, esker, gcn, ginex, import, inference, io, kill, link, link_budget,
    link_gpu, link_inputs, link_peers, link_published, marius_bytes, marius_orders, marius_safe,
    marius_speed, outre, outre_accuracy, outre_gpu, outre_history, outre_safe, outre_speed, outre_split,
    real, sample, skew, stripe, threads, train, whole_run,
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
            println!("{:#}", train::in_group(&bench, "esker", "sampled", &[]).unwrap());
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
fn esker_reads_what_the_best_cache_of_the_whole_run_misses() {
    let bench = bench();
    // Few batches of small graphs end in the middle of a page more often than the full proof's: rows of a KiB and more.
    let small = |preset, scale, batch| esker::BytesCase {
        preset,
        scale,
        batch,
        fanout: "5,5",
        epochs: "2",
        percents: &[1.0, 10.0, 50.0],
    };
    for (preset, scale, batch) in [("igb", "0.0002", "60"), ("mag240m", "0.0001", "20")] {
        println!("{:#}", esker::bytes(&bench, &small(preset, scale, batch), 1.02).unwrap());
    }
}

#[test]
fn esker_that_is_killed_while_it_prepares_makes_the_same_bytes() {
    let bench = bench();
    train::graph(&bench, 20_000, 16).unwrap();
    println!("{:#}", esker::killed(&bench, "graph", 8, 3).unwrap());
}

#[test]
fn diskgnn_that_is_killed_while_it_trains_validates_and_tests_goes_on() {
    let bench = bench();
    train::graph(&bench, 20_000, 16).unwrap();
    println!("{:#}", diskgnn::evaluating::killed(&bench, "2", 2, 3).unwrap());
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
    println!("{:#}", inference::same(&bench, &["sage", "gat"], (20_000, 32), 32).unwrap());
    // Too little for the rows of a layer.
    let memory = format!("{}B", inference::smallest(&bench, "sage").unwrap());
    println!("{:#}", inference::killed(&bench, "sage", &memory, 3).unwrap());
}

const SMALL_HISTORY: outre_speed::Size = outre_speed::Size {
    nodes: 20_000,
    dim: 64,
    homophily: "0.9",
    train: "0.1",
    test: "0.02",
    fanout: "10,10,10",
    batch: "50",
    hidden: "16",
    memory: outre_speed::DiskMemory::Bytes(120 << 20),
    epochs: "3",
    staleness: "20",
    device: "cpu",
};

/// The proof of a GPU, on the CPU: what it compares is the same there.
#[test]
fn runs_that_are_compared_on_a_gpu_give_the_losses_of_memory() {
    let memory = outre_speed::DiskMemory::Bytes(300 << 20);
    let size = outre_speed::Size { nodes: 10_000, memory, epochs: "2", ..SMALL_HISTORY };
    println!("{:#}", outre_gpu::epochs(&bench(), size, 1).unwrap());
}

#[test]
fn memory_is_divided_ahead_and_the_division_is_used() {
    // At this size seconds are noise: that the division is found, used and about right in rows is checked elsewhere.
    let tenths = &[0, 5];
    let proof = outre_split::SplitProof { size: SMALL_HISTORY, tenths, rounds: 1, best: 1, most: 4.0 };
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
    println!("{:#}", outre_speed::speed(&bench(), SMALL_HISTORY, "4").unwrap());
}

#[test]
fn a_history_requests_fewer_rows_and_costs_little_accuracy() {
    // 200 batches an epoch: a hundredth is the least staleness that is a history.
    let size = outre_speed::Size { nodes: 10_000, batch: "5", epochs: "2", staleness: "2", ..SMALL_HISTORY };
    let (staleness, hops) = (&[1, 2, 50], &["all"]);
    let proof = outre_history::HistoryProof { size, staleness, hops, seeds: 1, most_points: 10.0 };
    let bench = bench();
    println!("{:#}", outre_history::accuracies(&bench, proof).unwrap());
    println!("{:#}", outre_history::seconds(&bench, proof, 1).unwrap());
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
    println!("{:#}", link::same(&bench, "8").unwrap());
}

#[test]
fn links_are_learned_in_orders_over_partitions() {
    let bench = bench();
    link::facts(&bench, 400, 4000).unwrap();
    println!("{:#}", marius_orders::small(&bench, "3").unwrap());
}

#[test]
fn a_partition_buffer_reads_and_writes_no_more_than_its_swaps() {
    let bench = bench();
    let size = marius_bytes::BytesSize { nodes: 4000, dim: 16, epochs: 2 };
    train::graph(&bench, size.nodes, size.dim).unwrap();
    link::facts(&bench, size.nodes, 20_000).unwrap();
    println!("{:#}", marius_bytes::beside_swaps(&bench, size).unwrap());
}

#[test]
fn a_partition_buffer_trains_as_in_memory_at_its_smallest_budget() {
    if let Err(error) = Group::create(1 << 30) {
        println!("skipped: {error:#}");
        return;
    }
    let bench = bench();
    bench.json(&["generate", "freebase", "--preset", "freebase86m", "--scale", "0.0001"]).unwrap();
    let mut size = marius_speed::SpeedSize {
        scale: "0.0001",
        dim: 64,
        batch: 2000,
        chunks: 2,
        negatives: &[20],
        memory: 0,
        counts: [16, 4, 8],
        order: "two-level-beta",
        epochs: 2,
        rounds: 3,
        rate_bytes: 8 << 20,
    };
    size.memory = marius_speed::smallest(&bench, &size).unwrap();
    println!("{:#}", marius_speed::beside_memory(&bench, size).unwrap());
    train::graph(&bench, 20_000, 32).unwrap();
    let order = ["--order", "dispersed", "--partitions", "8", "--resident", "4"];
    println!("{:#}", train::in_group(&bench, "marius", "sampled", &order).unwrap());
}

#[test]
fn partitions_killed_anywhere_end_with_the_same_rows_and_a_full_disk_is_named() {
    let bench = bench();
    train::graph(&bench, 20_000, 32).unwrap();
    link::facts(&bench, 1000, 8000).unwrap();
    let size = marius_safe::KillSize { epochs: "2", training: 3, sorting: 6, safe_point: "32KiB" };
    println!("{:#}", marius_safe::killed(&bench, size, 5).unwrap());
    let on_a_small_disk =
        [marius_safe::full_disk(&bench, "2").unwrap(), marius_safe::read_only_dataset(&bench, "2").unwrap()];
    for found in on_a_small_disk {
        match found {
            Some(found) => println!("{found:#}"),
            None => println!("skipped: no small disk can be mounted here"),
        }
    }
}

#[test]
fn links_killed_anywhere_end_with_the_same_embeddings() {
    let bench = bench();
    link::facts(&bench, 400, 4000).unwrap();
    println!("{:#}", link::killed(&bench, "8", 6, 21).unwrap());
}

#[test]
fn edges_without_structure_are_not_predicted() {
    println!("{:#}", link::no_leak(&bench(), 2000, 10_000, ["2", "30"], 5.0).unwrap());
}

#[test]
fn a_generated_graph_of_facts_is_learned() {
    let bench = bench();
    bench.json(&["generate", "fb", "--preset", "freebase86m", "--scale", "0.00003"]).unwrap();
    let words = "train fb --task link --encoder none --embeddings 32 --decoder complex --negatives 100 --chunks 4 --batch 500 --epochs 20 --optimizer adagrad --lr 0.1 --device cpu --out fb-run";
    let found = bench.json(&words.split(' ').collect::<Vec<_>>()).unwrap();
    link::check_learned(&bench, "fb", &found).unwrap();
}

#[test]
fn links_are_predicted_from_features_embeddings_and_both() {
    match link_inputs::inputs(&bench(), &link_inputs::SMALL, 1, "40").unwrap() {
        Some(found) => println!("{found:#}"),
        None => println!("skipped: the real datasets are not beside the checkout"),
    }
}

#[test]
fn distmult_learns_fb15k_237() {
    match link::facts_are_learned(&bench(), "1", 0.1).unwrap() {
        Some(found) => println!("{found:#}"),
        None => println!("skipped: FB15k-237 is not beside the checkout"),
    }
}

const QUICK_FLAGS: &str =
    "--embeddings 8 --decoder complex --negatives 10 --chunks 2 --batch 50 --epochs 3 --checkpoint-batches 5";

#[test]
fn published_recipes_that_a_call_cuts_off_are_continued_by_the_next() {
    let bench = bench();
    link::facts(&bench, 400, 4000).unwrap();
    let recipe = |name, least| link_published::PublishedRecipe {
        name,
        dataset: "facts",
        flags: QUICK_FLAGS,
        published: [least, 0.005],
        settings: "quick",
    };
    let recipes = [recipe("one", 0.0), recipe("other", 0.0), recipe("third", 1.0)];
    let trained = |words: &str| {
        let words: Vec<String> = words.split(' ').map(String::from).collect();
        let flags = link_published::PublishedFlags::parse(&words).unwrap();
        link_published::trained(&bench, &recipes, &bench.directory, &flags)
    };
    let said = |words: &str| format!("{:#}", trained(words).unwrap_err());
    // Stopped at once, or after a moment: nothing is lost, and nothing fails.
    for minutes in ["0.001", "0.003"] {
        let said = said(&format!("--device cpu --threads 1 --only one,other --minutes {minutes}"));
        assert!(said.contains("continues them"), "{said}");
    }
    let found = trained("--device cpu --threads 1 --only one,other --at-once 2").unwrap();
    assert_eq!(found.as_array().unwrap().len(), 2);
    assert_eq!(found[0]["run"]["test"], found[1]["run"]["test"], "runs of the same seed");
    assert_eq!(found[0]["run"]["epochs"], 3);
    let low = said("--device cpu --threads 1 --only third");
    assert!(low.contains("below what was published:\n  third"), "{low}");
    // Kept results are not made again.
    std::fs::remove_dir_all(bench.path("facts")).unwrap();
    assert_eq!(trained("--device cpu --threads 1 --only one,other").unwrap(), found);
}

#[test]
fn every_published_recipe_would_start() {
    let bench = bench();
    if !link_published::import(&bench, &bench.directory).unwrap() {
        println!("skipped: the real datasets are not beside the checkout");
        return;
    }
    let words = ["--device", "cpu", "--dry-run"].map(String::from);
    let flags = link_published::PublishedFlags::parse(&words).unwrap();
    let found = link_published::trained(&bench, &link_published::RECIPES, &bench.directory, &flags).unwrap();
    assert_eq!(found.as_array().unwrap().len(), link_published::RECIPES.len());
}

#[test]
fn links_keep_their_budget_inside_a_memory_group() {
    match Group::create(1 << 30) {
        Ok(_) => {
            let bench = bench();
            link::facts(&bench, 4000, 20_000).unwrap();
            println!("{:#}", link_budget::in_groups(&bench).unwrap());
        }
        Err(error) => println!("skipped: {error:#}"),
    }
}

#[test]
fn links_at_the_shape_of_freebase_are_measured() {
    let size = link_gpu::Size { scale: "0.0005", batch: 2000, batches: 3, device: "cpu", least: [1.0, 1.0] };
    println!("{:#}", link_gpu::beside_each_other(&bench(), &size).unwrap());
}

#[test]
fn links_are_trained_beside_pytorch() {
    let Some(python) = link_peers::python() else {
        println!("skipped: bench/peers/setup_links.sh target/peers-links makes the peers");
        return;
    };
    let size = link_peers::Size { rounds: 1, epochs: 1, faster: 0.0 };
    if link_peers::beside(&bench(), &python, &size).unwrap().is_none() {
        println!("skipped: FB15k-237 is not beside the checkout");
    }
}
