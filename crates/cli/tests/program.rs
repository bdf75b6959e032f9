//! The program as a user meets it: outputs, exit codes, messages.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

fn esker(directory: &Path, words: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_esker")).args(words.split(' ')).current_dir(directory).output().unwrap()
}

fn check_refusal(words: &str, code: i32, expected: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let output = esker(directory.path(), words);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{words}: {said}");
    expected.iter().for_each(|word| assert!(said.contains(word), "{words}: `{word}` is not in: {said}"));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "{words} left something behind");
}

#[test]
fn json_is_one_object_alone_on_standard_output() {
    let directory = tempfile::tempdir().unwrap();
    let keys = [
        "nodes",
        "edges",
        "feature_dim",
        "feature_dtype",
        "classes",
        "relations",
        "train",
        "valid",
        "test",
        "bytes",
    ];
    let made = esker(directory.path(), "generate g --nodes 500 --dim 8 --classes 3 --json");
    let shown = esker(directory.path(), "info g --json");
    for output in [made, shown] {
        let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        keys.iter().for_each(|key| assert!(value.get(key).is_some(), "{key}"));
        assert_eq!((value["nodes"].as_u64(), value["classes"].as_u64()), (Some(500), Some(3)));
    }
    let verified = esker(directory.path(), "verify g --json");
    let value: serde_json::Value = serde_json::from_slice(&verified.stdout).unwrap();
    assert_eq!(value["ok"], true);
}

#[test]
fn bench_sample_answers_line_by_line() {
    let directory = tempfile::tempdir().unwrap();
    esker(directory.path(), "generate g --nodes 2000 --dim 2");
    let words = "bench sample g --fanout 5 --layers 1..3 --form dense,layered --threads 1,2 --batch 50 --batches 3 --json";
    let value: serde_json::Value = serde_json::from_slice(&esker(directory.path(), words).stdout).unwrap();
    let rows = value["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 12);
    assert!(rows.iter().all(|row| row["edges_per_second"].as_f64().unwrap() > 0.0));
    assert_eq!((rows[4]["layers"].as_u64(), rows[4]["fanout"].as_str()), (Some(3), Some("5,5,5")));
    let refused = esker(directory.path(), "bench sample g --direction both");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("--out-neighbours"), "{said}");
    let refused = esker(directory.path(), "bench sample g --memory 10KiB");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("10 KiB"), "{said}");
}

#[test]
fn bench_sample_measures_hop_samples_with_their_options() {
    let directory = tempfile::tempdir().unwrap();
    let edges: String = (0..300)
        .map(|edge| format!("{},{},{}.5,{edge}\n", edge * 7 % 40, edge * edge % 40, edge % 3))
        .collect();
    std::fs::write(directory.path().join("edges.csv"), format!("source,target,w,t\n{edges}")).unwrap();
    let import =
        "import g --format csv --edges edges.csv --weight-column w --time-column t --as-stored --json";
    json_of(directory.path(), import);
    let rows = |options: &str| {
        let words =
            format!("bench sample g --fanout 4,3 --batch 8 --batches 7 --digest --json --form {options}");
        json_of(directory.path(), words.trim())["rows"].as_array().unwrap().clone()
    };
    let number = |row: &serde_json::Value, key: &str| row[key].as_u64().unwrap();
    let both = rows("dense,hops");
    assert_eq!(both.len(), 2);
    assert_eq!((&both[0]["form"], &both[1]["form"]), (&"dense".into(), &"hops".into()));
    let modes = [
        "",
        "--replace",
        "--disjoint",
        "--subgraph induced",
        "--weights edge-weight",
        "--time edge-time --temporal last",
    ];
    for mode in modes {
        let rows = rows(&format!("hops --share bulk,within --threads 1,2,3 {mode}"));
        assert_eq!(rows.len(), 6, "{mode}");
        assert!(
            rows.iter().all(|row| row["digest"] == rows[0]["digest"]),
            "{mode}: the same for any threads"
        );
        assert!(rows.iter().all(|row| row["edges_per_second"].as_f64().unwrap() > 0.0));
        assert_eq!(mode.is_empty(), rows[0]["digest"] == both[1]["digest"], "{mode}");
    }
    let early =
        |time: i64| number(&rows(&format!("hops --time edge-time --seed-time={time}"))[0], "edges_per_batch");
    assert!(early(-1) == 0 && early(20) < early(300));
    let refused = |options: &str, words: &[&str]| {
        let output = esker(directory.path(), &format!("bench sample g {options}"));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && words.iter().all(|word| said.contains(word)),
            "{options}: {said}"
        );
    };
    refused("--form hops --weights edge-price", &["`edge-price`", "edge-weight"]);
    refused("--form hops --weights edge-time", &["f32", "i64"]);
    refused("--form dense,hops --replace", &["--replace", "--form hops"]);
    refused("--form hops --skew", &["--skew", "--form hops"]);
    refused("--form hops --disjoint --subgraph induced", &["induced", "disjoint"]);
    refused("--form hops --weights edge-weight --memory 1KiB", &["KiB"]);
}

/// Runs a command that must succeed, and reads its JSON.
fn json_of(directory: &Path, words: &str) -> serde_json::Value {
    let output = esker(directory, words);
    assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn prepare_says_what_its_stages_took() {
    let directory = tempfile::tempdir().unwrap();
    esker(directory.path(), "generate g --nodes 2000 --dim 8 --train 0.5");
    let words =
        "prepare g --device cpu --fanout 5,5 --batch 100 --epochs 2 --epochs-sampled 2 --memory 1GiB --json";
    let value = json_of(directory.path(), words);
    let stages = value["stages"].as_array().unwrap();
    let amount = |name: &str| {
        let stage = stages.iter().find(|stage| stage["name"] == name).unwrap();
        (stage["amount"].as_u64().unwrap(), stage["unit"].as_str().unwrap().to_string())
    };
    let packing = &value["packed"]["packing"];
    assert_eq!(amount("sample"), (packing["batches"].as_u64().unwrap(), "batches".into()));
    assert_eq!(amount("count rows"), (packing["accesses"].as_u64().unwrap(), "rows".into()));
    let all: f64 = stages.iter().map(|stage| stage["seconds"].as_f64().unwrap()).sum();
    assert!(all > 0.0 && all <= value["seconds"].as_f64().unwrap());
    // Found again, there is nothing to sample or to pack.
    let again = json_of(directory.path(), words);
    let names: Vec<&str> =
        again["stages"].as_array().unwrap().iter().map(|stage| stage["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["read labels", "load topology", "sample for sizes"]);
    // Stages follow one another.
    let at = |stage: &serde_json::Value, key: &str| stage[key].as_f64().unwrap();
    let ends = stages.iter().map(|stage| at(stage, "began") + at(stage, "seconds"));
    let begins = stages.iter().skip(1).map(|stage| at(stage, "began"));
    assert!(ends.zip(begins).all(|(end, begin)| end <= begin + 1e-9), "{stages:?}");
}

#[test]
fn doctor_answers_with_every_finding() {
    let directory = tempfile::tempdir().unwrap();
    let output = esker(directory.path(), "doctor --json");
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for key in
        ["io_uring", "direct_io", "direct_offset_align", "disk", "memory_bytes", "locked_memory_bytes", "gpu"]
    {
        assert!(value.get(key).is_some(), "{key}");
    }
    assert!(value["disk"]["sequential_bytes_per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "doctor left its file behind");
}

#[test]
fn wrong_usage_is_told_with_what_would_be_right() {
    check_refusal("generate g", 2, &["--preset", "--nodes"]);
    check_refusal("generate g --preset reddit", 2, &["reddit", "papers100m"]);
    check_refusal("generate g --nodes 0", 2, &["at least 1"]);
    check_refusal("generate g --nodes 100 --memory 1MiB", 2, &["--memory 48MiB"]);
    check_refusal("generate g --nodes 100 --memory lots", 2, &["lots", "8GiB"]);
    check_refusal("generate g --nodes 1000000000000 --dim 1000", 1, &["takes about", "free"]);
    check_refusal("import g --format dgl", 2, &["dgl", "planetoid", "graphbolt"]);
    check_refusal("import g --format npy", 2, &["--edges"]);
    check_refusal("import g --format npy --edges none.npy", 1, &["none.npy", "not found"]);
    check_refusal("import g --format triples --from . --labels y.npy", 2, &["does not read --labels"]);
    check_refusal("info nothing", 1, &["nothing", "not an Esker dataset"]);
    check_refusal("verify nothing", 1, &["nothing"]);
    check_refusal("stripe nothing --over a,b", 1, &["nothing", "not an Esker dataset"]);
    check_refusal("stripe nothing --undo", 1, &["nothing", "not an Esker dataset"]);
    check_refusal("stripe g", 2, &["--over"]);
    check_refusal("stripe g --over a", 2, &["--over", "2 to 64 directories, and 1 is given"]);
    check_refusal("stripe g --over a,b --undo", 2, &["--undo"]);
    check_refusal("stripe g --over a,b --stripe-size 3MiB", 2, &["powers of two", "64 KiB"]);
    check_refusal("bench io --io-block 1000", 2, &["1000 bytes", "powers of two"]);
    check_refusal("bench io --depth 0", 2, &["depth of 0", "1 to"]);
    check_refusal("bench io --file nothing", 1, &["nothing", "cannot open"]);
    check_refusal("bench sample nothing", 1, &["nothing", "not an Esker dataset"]);
    check_refusal("bench sample g --fanout 0", 2, &["`0`", "from 1"]);
    check_refusal("bench sample g --layers 5..1", 2, &["5..1", "1..5"]);
    check_refusal("inform", 2, &["info"]);
    check_refusal("generate g --nodes 100 --degree -1", 2, &["degree"]);
}

#[test]
fn a_dataset_is_striped_shown_and_brought_back() {
    let directory = tempfile::tempdir().unwrap();
    let run = |words: &str| {
        let output = esker(directory.path(), words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words}: {said}");
        (String::from_utf8(output.stdout).unwrap(), said)
    };
    let json = |words: &str| serde_json::from_str::<serde_json::Value>(&run(words).0).unwrap();
    (1..=2).for_each(|disk| fs::create_dir(directory.path().join(format!("disk{disk}"))).unwrap());
    let made = json("generate g --nodes 5000 --dim 64 --json");
    assert!(made["striped"].is_null());
    let (said, progress) = run("stripe g --over disk1,disk2 --min-size 1MiB --stripe-size 64KiB");
    assert!(said.contains("node-features") && said.contains("disk2/g.stripe-1"), "{said}");
    assert!(progress.contains("copy") && progress.contains("on one disk"), "{progress}");
    let (said, _) = run("info g");
    assert!(said.contains("in stripes of 64 KiB over 2 directories") && said.contains("stripe-0"), "{said}");
    let shown = json("info g --json");
    assert_eq!((&shown["id"], &shown["bytes"].is_u64()), (&made["id"], &true));
    assert_eq!(shown["striped"]["arrays"], serde_json::json!(["node-features"]));
    assert!(shown["striped"]["directories"][1].as_str().unwrap().ends_with("disk2/g.stripe-1"));
    assert_eq!(json("verify g --json")["ok"], true);
    let (said, _) = run("stripe g --over disk1,disk2 --min-size 1MiB --stripe-size 64KiB");
    assert!(said.contains("nothing to do"), "{said}");
    let refused = esker(directory.path(), "stripe g --over disk2,disk1");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && said.contains("--undo"), "{said}");
    let undone = json("stripe g --undo --json");
    assert_eq!((&undone["arrays"], &undone["id"]), (&serde_json::json!(["node-features"]), &made["id"]));
    assert!(undone["striped"].is_null());
    assert!(run("stripe g --undo").0.contains("nothing in it is striped"));
    // Replacing a striped dataset takes its parts along.
    run("stripe g --over disk1,disk2 --min-size 0");
    run("generate g --nodes 50 --dim 2 --overwrite");
    let left = |disk: &str| fs::read_dir(directory.path().join(disk)).unwrap().count();
    assert_eq!((left("disk1"), left("disk2")), (0, 0));
}

#[test]
fn datasets_that_were_moved_or_copied_keep_what_is_theirs() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let said = |words: &str, code: i32| {
        let output = esker(directory.path(), words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{words}: {said}");
        said
    };
    (1..=2).for_each(|disk| fs::create_dir(at(&format!("disk{disk}"))).unwrap());
    said("generate g --nodes 500 --dim 64", 0);
    said("stripe g --over disk1,disk2 --min-size 0", 0);
    fs::rename(at("g"), at("moved")).unwrap();
    // A new one of the old name.
    said("generate g --nodes 600 --dim 64", 0);
    let refused = said("stripe g --over disk1,disk2 --min-size 0", 1);
    assert!(refused.contains("disk1/g.stripe-0") && refused.contains("another dataset"), "{refused}");
    said("verify moved", 0);
    said("verify g", 0);
    // Copies, with the links.
    for words in ["stripe copy --undo", "generate copy --nodes 10 --dim 2 --overwrite"] {
        let copied = Command::new("cp").arg("-a").arg(at("moved")).arg(at("copy")).status().unwrap();
        assert!(copied.success());
        let told = said(words, 0);
        assert!(told.contains("disk1/g.stripe-0 is left"), "{words}: {told}");
        said("verify copy", 0);
        said("verify moved", 0);
        fs::remove_dir_all(at("copy")).unwrap();
    }
    said("stripe moved --undo", 0);
    said("stripe g --over disk1,disk2 --min-size 0", 0);
    said("verify g", 0);
    said("verify moved", 0);
}

#[test]
fn a_pipe_in_a_dataset_is_named_and_links_in_it_are_not_written_through() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    (1..=2).for_each(|disk| fs::create_dir(at(&format!("disk{disk}"))).unwrap());
    assert!(esker(directory.path(), "generate g --nodes 50 --dim 2").status.success());
    assert!(esker(directory.path(), "stripe g --over disk1,disk2 --min-size 0").status.success());
    fs::write(at("victim"), "mine").unwrap();
    std::os::unix::fs::symlink("../victim", at("g/node-features.bin.new")).unwrap();
    assert!(esker(directory.path(), "stripe g --undo").status.success());
    assert_eq!(fs::read_to_string(at("victim")).unwrap(), "mine");
    assert!(esker(directory.path(), "stripe g --over disk1,disk2 --min-size 0").status.success());
    let part = at("disk2/g.stripe-1/split-test.bin");
    fs::remove_file(&part).unwrap();
    assert!(Command::new("mkfifo").arg(&part).status().unwrap().success());
    for (verb, code) in [("info", 1), ("verify", 3)] {
        let mut program = Command::new("timeout");
        program.args(["20", env!("CARGO_BIN_EXE_esker"), verb, "g"]).current_dir(directory.path());
        let output = program.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{verb}: {said}");
        assert!(said.contains("stripe-1/split-test.bin") && said.contains("a pipe"), "{verb}: {said}");
    }
}

#[test]
fn a_disk_without_room_for_a_part_is_told_before_anything_is_copied() {
    let directory = tempfile::tempdir().unwrap();
    let small = directory.path().join("small");
    fs::create_dir(&small).unwrap();
    fs::create_dir(directory.path().join("large")).unwrap();
    assert!(esker(directory.path(), "generate g --nodes 5000 --dim 256").status.success());
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(&small).output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        println!("skipped: no small file system can be mounted here");
        return;
    }
    let refused = esker(directory.path(), "stripe g --over large,small --min-size 1MiB");
    let left =
        fs::read_dir(&small).unwrap().count() + directory.path().join("g/stripe-0").is_symlink() as usize;
    let grown = Command::new("mount").args(["-o", "remount,size=64m"]).arg(&small).output().unwrap();
    // Parts on a file system without direct IO, beside one with it.
    let striped = esker(directory.path(), "stripe g --over large,small --min-size 1MiB");
    let verified = esker(directory.path(), "verify g");
    let back = esker(directory.path(), "stripe g --undo");
    Command::new("umount").arg(&small).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("small") && said.contains("free"), "{said}");
    assert!(left == 0 && grown.status.success());
    for output in [striped, verified, back] {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_directory_without_permission_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let closed = directory.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o500)).unwrap();
    let output = esker(directory.path(), "generate closed/g --nodes 100 --dim 2");
    if output.status.success() {
        println!("skipped: this user may write everywhere");
        return;
    }
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("closed/g") && said.contains("ermission"), "{said}");
}

#[test]
fn exit_codes_are_told_by_help() {
    let directory = tempfile::tempdir().unwrap();
    let said = String::from_utf8(esker(directory.path(), "--help").stdout).unwrap();
    for line in [
        "0    done",
        "1    something failed",
        "2    the request cannot be met",
        "3    `verify`",
        "130  interrupted",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
}

#[test]
fn an_archive_that_was_cut_off_is_told_as_such() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("g.npz"), b"PK\x03\x04 and nothing else").unwrap();
    let output = esker(directory.path(), "import g --format gnn-npz --from g.npz");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("g.npz") && said.contains("cut off, or not a zip or npz"), "{said}");
}

#[test]
fn completions_know_the_verbs() {
    let directory = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script =
            String::from_utf8(esker(directory.path(), &format!("completions {shell}")).stdout).unwrap();
        ["generate", "import", "verify", "stripe", "doctor"]
            .iter()
            .for_each(|verb| assert!(script.contains(verb), "{shell}"));
    }
}

#[test]
fn a_full_disk_is_a_clear_error_and_the_work_goes_on_once_there_is_room() {
    let directory = tempfile::tempdir().unwrap();
    let mount = directory.path().join("small");
    fs::create_dir(&mount).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=3m", "tmpfs"]).arg(&mount).output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        println!("skipped: no small file system can be mounted here");
        return;
    }
    let edges: Vec<u8> = (0..400_000u64).flat_map(|i| (i * 7919 % 100_000).to_le_bytes()).collect();
    let mut npy = b"\x93NUMPY\x01\x00\x46\x00".to_vec();
    npy.extend(
        format!("{:<69}\n", "{'descr': '<i8', 'fortran_order': False, 'shape': (2, 200000), }").as_bytes(),
    );
    npy.extend(edges);
    fs::write(directory.path().join("edges.npy"), npy).unwrap();
    let words = "import small/g --format npy --edges edges.npy --keep-positions --out-neighbours";
    let refused = esker(directory.path(), words);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let gone = !mount.join("g").exists();
    let grown = Command::new("mount").args(["-o", "remount,size=64m"]).arg(&mount).output().unwrap();
    let again = esker(directory.path(), words);
    let verified = esker(directory.path(), "verify small/g");
    Command::new("umount").arg(&mount).output().unwrap();
    assert!(
        !refused.status.success() && said.contains("no space left") && said.contains("small/g"),
        "{said}"
    );
    assert!(gone && grown.status.success());
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    assert!(verified.status.success());
}
