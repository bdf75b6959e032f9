//! Manifests, put in the place of a valid dataset's own. A seal keeps damage away from everything after it, so half
//! of the inputs are sealed again: what a careful attacker would do.

use crate::Verdict;
use esker_import::{ImportJob, Request, import};
use esker_store::{ArrayWriter, Dataset, Manifest, StripeRequest, file, stripe, verify};
use esker_types::{Budget, Dtype, Silent};
use std::fs;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

const KEY: &[u8] = b"\"checksum\": \"";
const DIGITS: usize = 16;
const DERIVED: &str = "derived/squares/derived.json";

/// A dataset with most kinds of files and derived data, one with nothing but edges (there, no other file would
/// contradict a count), and one that is striped.
const DATASETS: [&str; 3] = ["full", "bare", "striped"];

fn make_datasets(directory: &Path) {
    let recipe = crate::formats::npy_arrays();
    let files = directory.join("files");
    fs::create_dir_all(&files).expect("the scratch directory is writable");
    for (seed, (name, _)) in recipe.seeds().iter().zip(&recipe.files) {
        fs::write(files.join(name), &seed[crate::recipe::PREFIX_BYTES..]).expect("a scratch file");
    }
    let full = Request { out_neighbours: true, dtype: Some(Dtype::U8), ..(recipe.request)(&files) };
    let bare = Request { format: full.format.clone(), edges: full.edges.clone(), ..Request::default() };
    for (name, request) in DATASETS.into_iter().zip([full.clone(), bare, full]) {
        let (target, budget) = (directory.join(name), Budget { host_bytes: 64 << 20 });
        let job = ImportJob { target: &target, overwrite: true, budget, progress: &Silent };
        import(&request, &job).expect("valid files");
    }
    let over: Vec<PathBuf> = ["disk-0", "disk-1"].map(|disk| directory.join(disk)).into();
    over.iter().for_each(|disk| fs::create_dir_all(disk).expect("a scratch directory"));
    let request = StripeRequest { over, stripe_bytes: 64 << 10, least_bytes: 0 };
    stripe(&directory.join(DATASETS[2]), &request, 1, &Silent).expect("a whole dataset");
    derive_squares(&Dataset::open(&directory.join(DATASETS[0])).expect("a whole dataset"));
}

fn derive_squares(dataset: &Dataset) {
    let staging = dataset.derive("squares").expect("a new name");
    let mut writer = ArrayWriter::create(staging.directory(), "squares", Dtype::U32, 2).expect("a new array");
    writer.write_elements(&[0u32, 1, 4, 9]).expect("a scratch file");
    let files = vec![writer.finish().expect("whole rows")];
    staging.publish_derived(dataset, "squares", serde_json::json!({"of": 4}), files).expect("whole files");
}

fn text_of<const N: usize>(paths: [PathBuf; N]) -> Vec<Vec<u8>> {
    let directory = crate::scratch();
    make_datasets(directory.path());
    paths.map(|path| fs::read(directory.path().join(path)).expect("a manifest")).into()
}

/// The manifests of the datasets.
pub fn seeds() -> Vec<Vec<u8>> {
    text_of(DATASETS.map(|name| Path::new(name).join(file::MANIFEST)))
}

/// The manifest of derived data.
pub fn derived_seeds() -> Vec<Vec<u8>> {
    text_of([Path::new(DATASETS[0]).join(DERIVED)])
}

/// The bytes with a seal that fits them, if they have a place for one.
fn sealed(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let found = bytes.windows(KEY.len()).position(|window| window == KEY).map(|at| at + KEY.len());
    if let Some(at) = found.filter(|at| at + DIGITS <= bytes.len()) {
        bytes[at..at + DIGITS].fill(b'0');
        let sum = format!("{:016x}", xxh3_64(&bytes));
        bytes[at..at + DIGITS].copy_from_slice(sum.as_bytes());
    }
    bytes
}

/// Reads a manifest as it is, sealed again, and with the id that its files call for.
pub fn run(scratch: &Path, bytes: &[u8]) -> Verdict {
    let kept = cached(scratch);
    let text = |name: &str| open_with(&kept.join(name), file::MANIFEST, bytes);
    // Whose it was, nobody knows any more: it is accepted if it fits any of them.
    let verdict =
        DATASETS[1..].iter().fold(text(DATASETS[0]), |verdict, name| verdict.or_else(|_| text(name)));
    let completed =
        serde_json::from_slice::<Manifest>(bytes).ok().map(|manifest| manifest.complete().to_text());
    for name in DATASETS {
        let _ = open_with(&kept.join(name), file::MANIFEST, &sealed(bytes));
        if let Some(text) = &completed {
            let _ = open_with(&kept.join(name), file::MANIFEST, text.as_bytes());
        }
    }
    verdict
}

/// Reads a manifest of derived data as it is, and sealed again.
pub fn run_derived(scratch: &Path, bytes: &[u8]) -> Verdict {
    let dataset = cached(scratch).join(DATASETS[0]);
    let verdict = open_with(&dataset, DERIVED, bytes);
    let _ = open_with(&dataset, DERIVED, &sealed(bytes));
    verdict
}

/// The datasets stay from case to case: only one of their manifests changes.
fn cached(scratch: &Path) -> PathBuf {
    let kept = scratch.join(crate::KEPT);
    if !kept.exists() {
        make_datasets(&kept);
    }
    kept
}

/// Opens and checks a dataset with `bytes` in the place of one manifest, then puts the old one back.
fn open_with(directory: &Path, manifest: &str, bytes: &[u8]) -> Verdict {
    let path = directory.join(manifest);
    let whole = fs::read(&path).expect("the manifest is there");
    fs::write(&path, bytes).expect("a scratch file");
    if let Ok(manifest) = Manifest::from_bytes(bytes, &path) {
        manifest.bytes();
    }
    // Verifying looks at damaged datasets too, where opening gives up.
    let verified = verify(directory, 1, &Silent);
    let opened = Dataset::open(directory).and(verified);
    // A case that panics leaves its manifest behind; the session then throws the directory away.
    fs::write(&path, whole).expect("a scratch file");
    match opened {
        Ok(verified) if verified.damage.is_empty() => Ok(()),
        Ok(verified) => Err(format!("{:?}", verified.damage)),
        Err(error) => Err(error.to_string()),
    }
}
