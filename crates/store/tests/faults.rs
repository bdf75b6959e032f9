//! Datasets on a simulated disk: right numbers from a disk that stutters, named errors from one that fails.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod made;

use esker_io::{Faults, SimulatedDisk};
use esker_store::{Damage, Dataset, StripeRequest, file, stripe, verify_on};
use esker_types::Silent;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NODES: u64 = 3000;
const DIM: u64 = 33;

/// A dataset whose manifest is on this machine and whose arrays are on a simulated disk alone.
struct Simulated {
    place: tempfile::TempDir,
    disk: SimulatedDisk,
    features: Vec<u32>,
}

impl Simulated {
    fn new(faults: Faults, striped: bool) -> Simulated {
        let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = |name: &str| place.path().join(name);
        made::make(&at("d"), NODES, DIM, 1);
        if striped {
            let over = vec![at("disk-0"), at("disk-1")];
            over.iter().for_each(|disk| fs::create_dir(disk).unwrap());
            let request = StripeRequest { over, stripe_bytes: 64 << 10, least_bytes: 0 };
            stripe(&at("d"), &request, 1, &Silent).unwrap();
        }
        let disk = SimulatedDisk::new(faults);
        let dataset = Dataset::open(&at("d")).unwrap();
        let features = features(&dataset).unwrap();
        for path in dataset.arrays().iter().flat_map(|array| array.layout().parts()) {
            disk.put(path, fs::read(path).unwrap());
            fs::remove_file(path).unwrap();
        }
        Simulated { place, disk, features }
    }

    fn directory(&self) -> PathBuf {
        self.place.path().join("d")
    }

    fn open(&self) -> esker_store::Result<Dataset> {
        Dataset::open_on(&self.directory(), Arc::new(self.disk.clone()))
    }

    fn damage(&self) -> Vec<Damage> {
        verify_on(&self.directory(), Arc::new(self.disk.clone()), 2, &Silent).unwrap().damage
    }

    /// The single file of an array.
    fn file(&self, name: &str) -> PathBuf {
        self.directory().join(format!("{name}.bin"))
    }

    fn flip(&self, path: &Path, at: usize) {
        let mut bytes = self.disk.get(path).unwrap();
        bytes[at] ^= 1;
        self.disk.put(path, bytes);
    }
}

/// Every feature, read as a stream, and compared with what reading at a position says.
fn features(dataset: &Dataset) -> esker_store::Result<Vec<u32>> {
    let array = dataset.array(file::NODE_FEATURES).unwrap();
    let mut numbers = vec![0u32; (NODES * DIM) as usize];
    assert_eq!(array.elements(0)?.fill(&mut numbers)?, numbers.len());
    let mut some = vec![0u32; 5000];
    array.read_at(777, &mut some)?;
    assert!(some == numbers[777..5777]);
    Ok(numbers)
}

#[test]
fn a_disk_that_moves_less_than_asked_and_puts_off_gives_the_right_numbers() {
    for (seed, striped) in (0..8).flat_map(|seed| [(seed, false), (seed, true)]) {
        let align_bytes = [512, 4096][(seed % 2) as usize];
        let faults = Faults { seed, short: 0.3, put_off: 0.2, align_bytes, ..Faults::default() };
        let simulated = Simulated::new(faults, striped);
        let dataset = simulated.open().unwrap();
        assert!(features(&dataset).unwrap() == simulated.features, "seed {seed}, striped: {striped}");
        assert_eq!(simulated.damage(), [], "seed {seed}, striped: {striped}");
    }
}

#[test]
fn a_disk_that_fails_is_a_named_error() {
    let simulated = Simulated::new(Faults::default(), false);
    let path = simulated.file(file::NODE_FEATURES);
    simulated.disk.damage(&path, 200_000..200_001);
    let error = features(&simulated.open().unwrap()).unwrap_err().to_string();
    for word in [path.to_str().unwrap(), "offset", "dmesg"] {
        assert!(error.contains(word), "`{word}` is not in: {error}");
    }
    let simulated = Simulated::new(Faults { read_error: 1.0, ..Faults::default() }, false);
    let error = simulated.open().unwrap_err().to_string();
    assert!(error.contains(simulated.directory().to_str().unwrap()), "{error}");
}

#[test]
fn verify_lists_what_cannot_be_read_and_goes_on() {
    for striped in [false, true] {
        let simulated = Simulated::new(Faults::default(), striped);
        let dataset = simulated.open().unwrap();
        let layout = dataset.array(file::NODE_FEATURES).unwrap().layout().clone();
        let bad = [5000, 150_000, 150_600, 300_000].map(|at| layout.place(at));
        let bad = bad.map(|place| (layout.parts()[place.part].clone(), place.offset));
        // Behind what cannot be read, in the same array and in another.
        let (flipped, other) = (layout.place(250_000), dataset.array(file::IN_NEIGHBOURS).unwrap().layout());
        let flipped = (layout.parts()[flipped.part].clone(), flipped.offset);
        let other = (other.parts()[0].clone(), 9000);
        [&flipped, &other].iter().for_each(|(path, at)| simulated.flip(path, *at as usize));
        bad.iter().for_each(|(path, at)| simulated.disk.damage(path, *at..at + 1));
        let damage = simulated.damage();
        let found = |(path, at): &(PathBuf, u64), problem: &str| {
            damage.iter().any(|damage| {
                let covers = damage.offset <= *at && *at < damage.offset + damage.bytes;
                damage.path == *path && covers && damage.problem.contains(problem)
            })
        };
        bad.iter().for_each(|bad| assert!(found(bad, "cannot be read"), "{bad:?}: {damage:?}"));
        assert!(found(&flipped, "checksum") && found(&other, "checksum"), "{damage:?}");
        // Nobody has to give up more than the blocks it is about, and what lies between stays.
        let unreadable: u64 = damage.iter().map(|damage| damage.bytes).sum();
        assert!(unreadable <= 6 * (64 << 10), "{damage:?}");
        assert!(damage.len() <= 7 && damage.windows(2).all(|two| two[0] != two[1]), "{damage:?}");
    }
}

#[test]
fn verify_lists_headers_and_tables_that_cannot_be_read() {
    let simulated = Simulated::new(Faults::default(), false);
    let (features, offsets) = (simulated.file(file::NODE_FEATURES), simulated.file(file::IN_OFFSETS));
    let table = simulated.disk.get(&features).unwrap().len() as u64 - 1;
    simulated.disk.damage(&features, table..table + 1);
    simulated.disk.damage(&offsets, 10..11);
    let damage = simulated.damage();
    let at = |path: &Path, at: u64| {
        damage
            .iter()
            .any(|damage| damage.path == path && damage.offset <= at && at < damage.offset + damage.bytes)
    };
    assert!(damage.len() == 2 && at(&features, table) && at(&offsets, 10), "{damage:?}");
}

#[test]
fn faults_here_and_there_do_not_stop_verify() {
    for seed in 0..8 {
        let simulated = Simulated::new(Faults { seed, read_error: 0.02, ..Faults::default() }, false);
        let damage = simulated.damage();
        assert!(
            damage.iter().all(|damage| damage.problem.contains("cannot be read")),
            "seed {seed}: {damage:?}"
        );
    }
}
