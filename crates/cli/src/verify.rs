use crate::exit::DAMAGED;
use crate::note;
use crate::output::print_json;
use crate::progress::Shown;
use esker_store::Damage;
use esker_types::{ByteCount, Silent};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Check every byte of a dataset against its checksum
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker verify papers
  esker verify papers --json

Checks block checksums, headers, and that ids, offsets, labels and splits are in range. Names file and offset of every block that is damaged or cannot be read. Exits with code 3 if there is damage."
)]
pub struct VerifyArguments {
    /// Directory of the dataset
    dataset: PathBuf,
    /// Number of threads that read and hash
    #[arg(long)]
    threads: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &VerifyArguments) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    // One reads while another hashes; more than cores only get into each other's way.
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = arguments.threads.unwrap_or(cores.max(2));
    let path = &arguments.dataset;
    let verified = if arguments.json {
        esker_store::verify(path, threads, &Silent)?
    } else {
        esker_store::verify(path, threads, &Shown::new())?
    };
    let (damage, bytes, seconds) = (verified.damage, verified.bytes, started.elapsed().as_secs_f64());
    if arguments.json {
        let ok = damage.is_empty();
        print_json(&json!({
            "path": path.to_string_lossy(), "id": verified.id, "ok": ok, "bytes": bytes, "seconds": seconds,
            "damage": damage.iter().map(|part| json!({
                "path": part.path.to_string_lossy(), "offset": part.offset, "bytes": part.bytes, "problem": part.problem,
            })).collect::<Vec<_>>(),
        }))?;
    } else if damage.is_empty() {
        let rate = ByteCount((bytes as f64 / seconds.max(1e-9)) as u64);
        crate::output::print(&format!(
            "{}: whole. {} checked in {seconds:.1} s ({rate}/s)\n",
            path.display(),
            ByteCount(bytes)
        ))?;
    } else {
        for part in damage.iter().take(20) {
            let end = part.offset + part.bytes;
            note!("{}: bytes {} to {end}: {}", part.path.display(), part.offset, part.problem);
        }
        if damage.len() > 20 {
            note!("and {} more", damage.len() - 20);
        }
        note!("error: {}", remedy(path, &damage));
    }
    Ok(if damage.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(DAMAGED) })
}

/// How derived data is made again, by its name.
fn how_to_make(dataset: &Path, directory: &Path) -> String {
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    match name.strip_prefix("partitions-") {
        Some(name) => {
            format!("run `esker partition {} --name {name}` with its parameters", dataset.display())
        }
        None if ["neighbour-counts-", "cross-counts-", "adjacency-"]
            .iter()
            .any(|kind| name.starts_with(kind)) =>
        {
            "train again, which makes it where it is needed".into()
        }
        None => "prepare again".into(),
    }
}

/// What is lost, and what to do.
fn remedy(dataset: &Path, damage: &[Damage]) -> String {
    let derived = dataset.join("derived");
    let directories: Option<BTreeSet<PathBuf>> = damage
        .iter()
        .map(|part| Some(derived.join(part.path.strip_prefix(&derived).ok()?.components().next()?)))
        .collect();
    match directories {
        Some(directories) => {
            let all: Vec<String> = directories.iter().map(|one| one.display().to_string()).collect();
            let again: BTreeSet<String> = directories.iter().map(|one| how_to_make(dataset, one)).collect();
            let again: Vec<String> = again.into_iter().collect();
            format!(
                "the dataset is whole, what was made of it is damaged; remove {}, and {}",
                all.join(" and "),
                again.join(", and ")
            )
        }
        None => "the dataset is damaged; restore these files from a copy, or make the dataset again".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_to_packed_rows_costs_no_dataset() {
        let at = |path: &str| Damage { path: path.into(), offset: 0, bytes: 1, problem: String::new() };
        let said = remedy(
            Path::new("g"),
            &[at("g/derived/diskgnn-1/rows.bin"), at("g/derived/diskgnn-1/words.bin")],
        );
        assert!(
            said.contains("the dataset is whole") && said.contains("remove g/derived/diskgnn-1,"),
            "{said}"
        );
        let said = remedy(Path::new("g"), &[at("g/derived/diskgnn-1/rows.bin"), at("g/labels.bin")]);
        assert!(said.contains("restore these files"), "{said}");
    }
}
