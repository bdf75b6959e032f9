use crate::exit::usage;
use crate::output::{print, print_json};
use crate::progress::Shown;
use esker_store::{Dataset, StripeRequest, Stripes};
use esker_types::ByteCount;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Stripe the large arrays of a dataset over several disks, or undo it
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker stripe papers --over /nvme1,/nvme2
  esker stripe papers --over /nvme1,/nvme2,/nvme3 --stripe-size 4MiB --min-size 1GiB
  esker stripe papers --undo

Reads of large arrays then use all disks in parallel. Each disk gets a directory for this dataset, such as /nvme1/papers.stripe-0, and the dataset gets a link to it, stripe-0. If a disk is mounted elsewhere later, make the link again. The copies are verified against checksums before the originals are deleted, so for a while both take space. If it is killed, the dataset is complete at any moment; the same command finishes the work, --undo cleans up. Do not run it while another program reads the dataset."
)]
pub struct StripeArguments {
    /// Directory of the dataset
    dataset: PathBuf,
    /// Directories on different disks, 2 to 64, separated by commas
    #[arg(long, value_name = "DIR,DIR", value_delimiter = ',', required_unless_present = "undo")]
    over: Vec<PathBuf>,
    /// Bring every array back into one file, and remove the directories on the disks
    #[arg(long, conflicts_with_all = ["over", "stripe_size", "min_size"])]
    undo: bool,
    /// Bytes of a stripe, a power of two from 64KiB to 1GiB
    #[arg(long, default_value = "1MiB", value_parser = stripe_size)]
    stripe_size: ByteCount,
    /// Arrays smaller than this stay in one file
    #[arg(long, default_value = "64MiB")]
    min_size: ByteCount,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn stripe_size(word: &str) -> Result<ByteCount, String> {
    let bytes: ByteCount = word.parse().map_err(|error: esker_types::ParseBytesError| error.to_string())?;
    Stripes::new(2, bytes.0).map(|_| bytes).map_err(|error| error.to_string())
}

pub fn run(arguments: &StripeArguments) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let (path, progress) = (&arguments.dataset, Shown::new());
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get().max(2));
    let moved = if arguments.undo {
        esker_store::unstripe(path, threads, &progress)?
    } else {
        let parts = u32::try_from(arguments.over.len())?;
        Stripes::new(parts, arguments.stripe_size.0)
            .map_err(|problem| usage(format!("--over: {problem}")))?;
        let request = StripeRequest {
            over: arguments.over.clone(),
            stripe_bytes: arguments.stripe_size.0,
            least_bytes: arguments.min_size.0,
        };
        esker_store::stripe(path, &request, threads, &progress)?
    };
    let seconds = started.elapsed().as_secs_f64();
    let dataset = Dataset::open(path)?;
    if arguments.json {
        return print_json(&json!({
            "path": path.to_string_lossy(), "id": dataset.manifest().id, "arrays": moved.arrays,
            "bytes": moved.bytes, "seconds": seconds, "striped": crate::info::striped_json(&dataset),
            "notes": progress.notes(),
        }));
    }
    if moved.arrays.is_empty() && arguments.undo {
        return print(&format!("{}: nothing in it is striped\n", path.display()));
    }
    if moved.arrays.is_empty() {
        let least = arguments.min_size;
        let text = "no array of at least";
        return print(&format!(
            "{}: nothing to do: {text} {least} is in one file; see --min-size\n{}",
            path.display(),
            crate::info::striped_text(&dataset)
        ));
    }
    let arrays = moved.arrays.join(", ");
    let verb = if arguments.undo { "brought back into single files" } else { "striped" };
    print(&format!(
        "{}: {arrays} {verb}, {} in {seconds:.1} s\n{}",
        path.display(),
        ByteCount(moved.bytes),
        crate::info::striped_text(&dataset)
    ))
}
