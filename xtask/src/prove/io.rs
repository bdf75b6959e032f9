//! The I/O engine and the disk: its reads compared with theory, its speed with a bare loop, and the bare loop with
//! fio.

use super::{Bench, ROUNDS, number, succeed};
use anyhow::{Context, Result, ensure};
use esker_types::median;
use serde_json::{Value, json};
use std::process::Command;

/// Runs `esker bench io` and checks everything that does not depend on the clock: each requested block is read once,
/// with as few reads as there are runs of blocks. With `--io-block`, whole pages are read.
pub fn reads_what_theory_says(bench: &Bench, size: &str, seconds: &str, rounds: &str) -> Result<Value> {
    let words = ["bench", "io", "--size", size, "--seconds", seconds, "--rounds", rounds];
    let plain = bench.json(&words)?;
    ensure!(plain["workloads"].as_array().is_some_and(|workloads| workloads.len() == 8), "{plain:#}");
    check_theory(&plain)?;
    let pages = bench.json(&[&words[..], &["--io-block", "4KiB", "--only", "rows-512"]].concat())?;
    check_theory(&pages)?;
    ensure!(pages["block_bytes"] == 4096, "--io-block 4KiB reads blocks of {}", pages["block_bytes"]);
    let reads = |record: &Value| number(&record["workloads"][0], "reads");
    let read_bytes = number(&pages["workloads"][0], "read_bytes")?;
    let least = reads(&pages)? * 4096.0;
    ensure!(read_bytes >= least, "{read_bytes} bytes in reads of whole pages are less than {least}");
    Ok(json!({ "engine": plain, "whole_pages": pages }))
}

fn check_theory(record: &Value) -> Result<()> {
    for workload in record["workloads"].as_array().context("workloads")? {
        if workload["name"] == "sequential" {
            ensure!(number(workload, "amplification")? >= 1.0, "{workload:#}");
            continue;
        }
        let (got, least) = (number(workload, "amplification")?, number(workload, "amplification_by_theory")?);
        ensure!(
            (got - least).abs() < 1e-9,
            "amplification {got}, each block once would be {least}: {workload:#}"
        );
        // Reads longer than the limit are split, so there may be a few more; never fewer.
        let (reads, fewest) = (number(workload, "reads")?, number(workload, "reads_by_theory")?);
        let split = number(workload, "read_bytes")? / f64::from(1 << 20);
        ensure!(
            reads >= fewest && reads <= fewest + split,
            "{reads} reads, {fewest} by theory: {workload:#}"
        );
    }
    Ok(())
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let mut record = reads_what_theory_says(bench, "5.12GB", "1", "9")?;
    for workload in record["engine"]["workloads"].as_array().context("workloads")? {
        println!(
            "{:12} of limit {:.2}, of kept {:.2}, CPU {:.2} x bare, {:.2} x kept, {:.2} cores",
            workload["name"].as_str().unwrap_or(""),
            number(workload, "of_limit")?,
            number(workload, "of_kept")?,
            number(workload, "cpu_over_bare")?,
            number(workload, "cpu_over_kept")?,
            number(workload, "cores")?,
        );
    }
    record["fio"] = match Command::new("fio").arg("--version").output() {
        Ok(_) => against_fio(bench)?,
        Err(_) => json!("skipped: fio is not installed"),
    };
    Ok(record)
}

/// The bare loop's limits over fio's. Each is the best over the same settings, measured in turn, medians.
fn against_fio(bench: &Bench) -> Result<Value> {
    let file = bench.path("fio.dat");
    let name = file.to_string_lossy().into_owned();
    let fio = |words: &[&str]| {
        let common = ["--name=limit", "--direct=1", "--ioengine=io_uring", "--output-format=json"];
        let mut command = Command::new("fio");
        command.args(common).arg(format!("--filename={name}")).args(words);
        let output = succeed(&mut command)?;
        serde_json::from_slice::<Value>(&output.stdout).context("fio printed no JSON")
    };
    fio(&["--size=4g", "--rw=write", "--bs=1m", "--iodepth=8", "--end_fsync=1"])?;
    let best = |rw: &str, block: &str, depths: [usize; 4]| -> Result<f64> {
        let mut best: f64 = 0.0;
        for threads in [1, 2] {
            for depth in depths {
                let words = [
                    format!("--rw={rw}"),
                    format!("--bs={block}"),
                    format!("--iodepth={depth}"),
                    format!("--numjobs={threads}"),
                ];
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                let fixed = [
                    "--time_based",
                    "--runtime=1",
                    "--fixedbufs",
                    "--registerfiles",
                    "--group_reporting",
                    "--size=4g",
                ];
                let found = fio(&[&words[..], &fixed[..]].concat())?;
                best = best.max(number(&found["jobs"][0]["read"], "iops")?);
            }
        }
        Ok(best)
    };
    let kinds = [
        ("sequential", "read", "1m", [4, 8, 16, 32]),
        ("random_page", "randread", "4k", [64, 128, 256, 512]),
        ("random_small", "randread", "512", [64, 128, 256, 512]),
    ];
    let mut ratios = vec![Vec::new(); kinds.len()];
    let mut taken = Vec::new();
    for _ in 0..ROUNDS {
        // Each loop that searches the limit takes a third of a measurement's seconds: one second, as with fio.
        let ours = bench.json(&["bench", "io", "--file", &name, "--only", "limit", "--seconds", "3.34"])?;
        for ((kind, rw, block, depths), ratios) in kinds.iter().zip(&mut ratios) {
            let (ours, fios) =
                (number(&ours["limits"][kind], "reads_per_second")?, best(rw, block, *depths)?);
            ratios.push(ours / fios);
            taken.push(json!({ "kind": kind, "bare_loop_per_second": ours, "fio_per_second": fios }));
        }
    }
    let medians: Vec<Value> = kinds
        .iter()
        .zip(&ratios)
        .map(|(kind, ratios)| json!({ "kind": kind.0, "bare_loop_over_fio": median(ratios) }))
        .collect();
    Ok(json!({ "medians": medians, "rounds": taken }))
}
