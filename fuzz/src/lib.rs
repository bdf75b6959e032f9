//! Hostile bytes for everything that reads bytes from outside: manifests, traces and every foreign format. A reader may say
//! yes or no; it may not panic, hang or take memory that the input does not justify, and what the builder makes of
//! accepted bytes must be a whole dataset.
//!
//! Inputs are a function of target, seed and case number, so a failure is repeated by its numbers. A coverage-guided
//! engine needs no more than [`FuzzTarget::run`]: a `cargo fuzz` target is
//! `fuzz_target!(|bytes: &[u8]| { let _ = target.run(scratch, bytes); })`, with [`FuzzTarget::seeds`] as its corpus.
#![forbid(unsafe_code)]

mod formats;
mod manifests;
mod mutate;
mod recipe;
mod traces;

pub use recipe::Recipe;

use esker_types::{peak_resident_bytes, random::Key};
use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::time::{Duration, Instant};

/// What the resident memory of the process may grow by, whatever the inputs say: budgets are 64 MiB, a page of
/// parquet may take a few hundred more.
const MOST_GROWTH_BYTES: u64 = 1 << 30;
/// The inputs are tiny.
const MOST_TIME: Duration = Duration::from_secs(20);
/// A folder of the scratch directory that outlives a case.
const KEPT: &str = "kept";

/// Accepted, or refused with a message.
pub type Verdict = Result<(), String>;

/// Something that reads bytes from outside.
pub struct FuzzTarget {
    /// What the command line calls it.
    pub name: &'static str,
    door: Door,
}

enum Door {
    /// Files to import, one of them replaced.
    Import(fn() -> Recipe),
    /// The same, with seeds of its own.
    Seeded(fn() -> Recipe, fn() -> Vec<Vec<u8>>),
    /// Bytes as they are.
    Bytes(fn(&Path, &[u8]) -> Verdict, fn() -> Vec<Vec<u8>>),
}

/// Every target.
pub const TARGETS: &[FuzzTarget] = &[
    FuzzTarget { name: "manifest", door: Door::Bytes(manifests::run, manifests::seeds) },
    FuzzTarget { name: "derived", door: Door::Bytes(manifests::run_derived, manifests::derived_seeds) },
    FuzzTarget { name: "trace", door: Door::Bytes(traces::run, traces::seeds) },
    FuzzTarget { name: "pickle", door: Door::Bytes(pickle, formats::pickles) },
    FuzzTarget { name: "npy", door: Door::Import(formats::npy_arrays) },
    FuzzTarget { name: "empty", door: Door::Import(formats::empty) },
    FuzzTarget { name: "csr", door: Door::Import(formats::csr) },
    FuzzTarget { name: "csc", door: Door::Import(formats::csc) },
    FuzzTarget { name: "csv", door: Door::Import(formats::csv) },
    FuzzTarget { name: "csv-names", door: Door::Import(formats::csv_names) },
    FuzzTarget { name: "gzip-text", door: Door::Import(formats::gzip_text) },
    FuzzTarget { name: "id-list", door: Door::Import(formats::id_list) },
    FuzzTarget { name: "parquet", door: Door::Import(formats::parquet) },
    FuzzTarget { name: "parquet-names", door: Door::Import(formats::parquet_names) },
    FuzzTarget {
        name: "parquet-rows",
        door: Door::Seeded(formats::parquet_rows, formats::parquet_rows_seeds),
    },
    FuzzTarget { name: "triples", door: Door::Import(formats::triples) },
    FuzzTarget { name: "ogb", door: Door::Import(formats::ogb) },
    FuzzTarget { name: "ogb-bare", door: Door::Import(formats::ogb_bare) },
    FuzzTarget { name: "igb", door: Door::Import(formats::igb) },
    FuzzTarget { name: "igb-raw", door: Door::Import(formats::igb_raw) },
    FuzzTarget { name: "graphbolt", door: Door::Seeded(formats::graphbolt, formats::graphbolt_seeds) },
    FuzzTarget { name: "planetoid", door: Door::Import(formats::planetoid) },
    FuzzTarget { name: "gnn-npz", door: Door::Import(formats::gnn_npz) },
    FuzzTarget { name: "gnn-npz-pickled", door: Door::Import(formats::gnn_npz_pickled) },
    FuzzTarget { name: "masked-npz", door: Door::Import(formats::masked_npz) },
    FuzzTarget { name: "musae", door: Door::Import(formats::musae) },
    FuzzTarget { name: "musae-zip", door: Door::Import(formats::musae_zip) },
    FuzzTarget { name: "mag240m", door: Door::Import(formats::mag240m) },
    FuzzTarget { name: "torch", door: Door::Seeded(formats::torch, formats::torch_seeds) },
    FuzzTarget { name: "papers100m", door: Door::Import(formats::papers100m) },
];

fn pickle(_: &Path, bytes: &[u8]) -> Verdict {
    esker_import::read::pickle::fuzz(bytes).map_err(|error| error.to_string())
}

impl FuzzTarget {
    /// Small valid inputs.
    pub fn seeds(&self) -> Vec<Vec<u8>> {
        match self.door {
            Door::Import(recipe) => recipe().seeds(),
            Door::Seeded(_, seeds) | Door::Bytes(_, seeds) => seeds(),
        }
    }

    /// Reads an input in an existing directory and says what came of it.
    pub fn run(&self, scratch: &Path, input: &[u8]) -> Verdict {
        match self.door {
            Door::Import(recipe) | Door::Seeded(recipe, _) => recipe().run(scratch, input),
            Door::Bytes(run, _) => run(scratch, input),
        }
    }

    /// Bytes at the start that choose what is damaged.
    fn prefix_bytes(&self) -> usize {
        if matches!(self.door, Door::Bytes(..)) { 0 } else { recipe::PREFIX_BYTES }
    }
}

/// Inputs of one target and what they did.
pub struct Session<'a> {
    target: &'a FuzzTarget,
    seeds: Vec<Vec<u8>>,
    seed: u64,
    scratch: tempfile::TempDir,
    start_bytes: u64,
}

/// An input that did what none may.
#[derive(Debug)]
pub struct FuzzFailure {
    /// Which input.
    pub case: u64,
    /// What it did.
    pub problem: String,
    /// Its bytes.
    pub input: Vec<u8>,
}

thread_local! {
    /// What the hook saw last on this thread, so that a report can name the place.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Keeps panics of cases from the terminal: they are reported once, by their numbers.
pub fn quiet_panics() {
    panic::set_hook(Box::new(|info| PANIC.with(|panic| *panic.borrow_mut() = info.to_string())));
}

/// Every import syncs its files: thousands of them want a directory in memory, where there is one.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary directory")
}

impl<'a> Session<'a> {
    /// Prepares the inputs that `seed` names.
    pub fn new(target: &'a FuzzTarget, seed: u64) -> Session<'a> {
        Session {
            target,
            seeds: target.seeds(),
            seed,
            scratch: scratch(),
            start_bytes: peak_resident_bytes(),
        }
    }

    /// Input number `case`: first the valid ones, then damaged ones.
    pub fn input(&self, case: u64) -> Vec<u8> {
        if let Some(valid) = self.seeds.get(case as usize) {
            return valid.clone();
        }
        let key = Key::new(self.seed).with(case);
        let draw = |at: u64| &self.seeds[(key.at(at) % self.seeds.len() as u64) as usize];
        let prefix = self.target.prefix_bytes();
        let (head, whole) = draw(0).split_at(prefix);
        let mut input = [head, &mutate::mutate(whole, &draw(1)[prefix..], key.with(2))].concat();
        if prefix > 1 && key.at(3).is_multiple_of(2) {
            input[1] = key.at(4) as u8;
        }
        input
    }

    /// How many inputs are valid.
    pub fn valid(&self) -> u64 {
        self.seeds.len() as u64
    }

    /// Runs one input. The numbers of a case that takes the whole process down are left in the scratch directory.
    pub fn run(&mut self, case: u64) -> Result<Verdict, FuzzFailure> {
        let input = self.input(case);
        self.clear();
        let numbers = format!("{} --seed {} --case {case}\n", self.target.name, self.seed);
        std::fs::write(self.scratch.path().join("case"), numbers).expect("a scratch file");
        let started = Instant::now();
        let run = || self.target.run(self.scratch.path(), &input);
        let problem = match panic::catch_unwind(AssertUnwindSafe(run)) {
            Err(_) => {
                self.scratch = scratch();
                PANIC.with(|panic| format!("panic: {}", panic.take()))
            }
            Ok(Err(message)) if message.is_empty() => "refused without a message".to_string(),
            Ok(_) if started.elapsed() > MOST_TIME => format!("took {:?}", started.elapsed()),
            Ok(_) if self.growth_bytes() > MOST_GROWTH_BYTES => {
                format!("memory grew by {} MiB", self.growth_bytes() >> 20)
            }
            Ok(verdict) => return Ok(verdict),
        };
        Err(FuzzFailure { case, problem, input })
    }

    fn growth_bytes(&self) -> u64 {
        peak_resident_bytes().saturating_sub(self.start_bytes)
    }

    /// Nothing of one case may reach the next: a journal would be taken for this import's own.
    fn clear(&self) {
        for entry in std::fs::read_dir(self.scratch.path()).expect("the scratch directory").flatten() {
            let path = entry.path();
            if path.ends_with(KEPT) {
                continue;
            }
            let removed =
                if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.expect("the scratch directory is writable");
        }
    }
}
