//! Partitions in a buffer, as a user meets them who gives no numbers: they follow from memory, and a run goes on with them.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod common;

use common::{esker, json};

#[test]
fn a_run_whose_partitions_were_chosen_can_be_stopped_and_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    json(at, "generate g --nodes 20000 --degree 10 --dim 256 --classes 4 --train 0.3 --seed 2");
    // Reads of 4 KiB make many partitions of a small graph.
    let common = "train g --strategy marius --fanout 5 --layers 1 --hidden 8 --batch 700 --epochs 2 --eval none --final-eval none --schedule cosine --io-block 4KiB";
    let smallest = |more: &str| -> u64 {
        let planned = json(at, &format!("{common} {more} --dry-run"));
        planned["smallest_host_bytes"].as_u64().unwrap()
    };
    let everything = smallest("--memory 4GiB");
    let memory = everything - (1 << 20);
    let planned = json(at, &format!("{common} --memory {memory}B --dry-run"));
    let counts = &planned["config"]["partition_counts"];
    let [partitions, resident] = ["partitions", "resident"].map(|name| counts[name].as_u64().unwrap());
    assert!(resident < partitions, "{counts}");
    let said = esker(at, &format!("{common} --memory {memory}B --out whole")).output().unwrap();
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains(&format!("p {partitions}")) && said.contains("swaps of partitions"), "{said}");
    // Every step ends with a batch of its own size: the schedule ends with the last of them.
    let config = std::fs::read_to_string(at.join("whole/config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let steps = config["schedule"]["steps"].as_u64().unwrap_or_else(|| panic!("{config:#}"));
    assert!(steps > 2 * 6000_u64.div_ceil(700), "{steps} steps");
    // It is the same run that goes on: nothing is chosen anew.
    let resumed = json(at, "train --resume --out whole");
    let refused =
        esker(at, &format!("{common} --memory {memory}B --resident 4 --out other")).output().unwrap();
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--partitions"));
    assert!(resumed["loss_digest"].as_str().is_some());
}
