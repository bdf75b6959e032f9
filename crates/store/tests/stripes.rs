//! Striped datasets: the same numbers as plain ones, damage named where it is, and nothing removed that is not ours.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod made;

use esker_store::{
    Damage, Dataset, MovedArrays, Staging, StoreError, StripeRequest, file, stripe, stripe_directory,
    unstripe, verify,
};
use esker_types::Silent;
use esker_types::random::{Key, below};
use made::{make, try_make};
use proptest::prelude::*;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

const KIB: u64 = 1 << 10;

/// A directory with a dataset `d` and three directories to stripe over.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        (0..3).for_each(|disk| fs::create_dir(place.disk(disk)).unwrap());
        place
    }

    /// With a dataset of about 400 KiB of features, striped over two directories.
    fn striped() -> Place {
        let place = Place::new();
        make(&place.at("d"), 3000, 33, 1);
        place.stripe(2, 64 * KIB).unwrap();
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn disk(&self, number: usize) -> PathBuf {
        self.at(&format!("disk-{number}"))
    }

    fn request(&self, parts: usize, stripe_bytes: u64) -> StripeRequest {
        let over = (0..parts).map(|part| self.disk(part)).collect();
        StripeRequest { over, stripe_bytes, least_bytes: 0 }
    }

    fn stripe(&self, parts: usize, stripe_bytes: u64) -> esker_store::Result<MovedArrays> {
        stripe(&self.at("d"), &self.request(parts, stripe_bytes), 2, &Silent)
    }

    fn undo(&self, name: &str) -> MovedArrays {
        unstripe(&self.at(name), 2, &Silent).unwrap()
    }

    fn damage(&self) -> Vec<Damage> {
        self.damage_of("d")
    }

    fn damage_of(&self, name: &str) -> Vec<Damage> {
        verify(&self.at(name), 2, &Silent).unwrap().damage
    }

    /// What `cp -a` does to a dataset that is striped as a whole.
    fn copy_with_links(&self, from: &str, to: &str) {
        fs::create_dir(self.at(to)).unwrap();
        fs::copy(self.at(from).join("esker.json"), self.at(to).join("esker.json")).unwrap();
        for part in 0..2 {
            let target = fs::read_link(stripe_directory(&self.at(from), part)).unwrap();
            std::os::unix::fs::symlink(target, stripe_directory(&self.at(to), part)).unwrap();
        }
    }

    /// Every file below a directory, without following links.
    fn files(&self, name: &str) -> Vec<String> {
        fn walk(directory: &Path, root: &Path, files: &mut Vec<String>) {
            for entry in fs::read_dir(directory).unwrap() {
                let entry = entry.unwrap();
                files.push(entry.path().strip_prefix(root).unwrap().to_str().unwrap().to_string());
                if entry.file_type().unwrap().is_dir() {
                    walk(&entry.path(), root, files);
                }
            }
        }
        let (mut files, root) = (Vec::new(), self.at(name));
        walk(&root, &root, &mut files);
        files.sort();
        files
    }

    fn assert_no_parts(&self) {
        (0..3).for_each(|disk| assert_eq!(self.files(&format!("disk-{disk}")), Vec::<String>::new()));
    }
}

/// Everything a reader sees of an array: all elements, and some spans of them.
fn read(dataset: &Dataset, name: &str, spans: &[(u64, u64)]) -> Vec<Vec<u8>> {
    fn numbers<T: bytemuck::AnyBitPattern + bytemuck::NoUninit + Default>(
        dataset: &Dataset,
        name: &str,
        spans: &[(u64, u64)],
    ) -> Vec<Vec<u8>> {
        let array = dataset.array(name).unwrap();
        let count = array.entry().rows * array.entry().columns;
        let mut seen = Vec::new();
        for (first, most) in [(0, count)].iter().chain(spans) {
            let first = first % (count + 1);
            let mut out = vec![T::default(); (count - first).min(*most) as usize];
            array.read_at(first, &mut out).unwrap();
            let (mut stream, mut streamed) = (array.elements(first).unwrap(), out.clone());
            streamed.fill(T::default());
            assert_eq!(stream.left(), count - first);
            for piece in streamed.chunks_mut(1000) {
                assert_eq!(stream.fill(piece).unwrap(), piece.len());
            }
            let (out, streamed): (&[u8], &[u8]) =
                (bytemuck::cast_slice(&out), bytemuck::cast_slice(&streamed));
            assert!(out == streamed, "{name}: a stream from {first} on differs from reading there");
            seen.push(out.to_vec());
        }
        seen
    }
    match dataset.array(name).unwrap().entry().dtype.bytes() {
        4 => numbers::<u32>(dataset, name, spans),
        _ => numbers::<u64>(dataset, name, spans),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn striped_and_plain_datasets_are_the_same_to_a_reader(
        nodes in 1u64..4000, dim in 1u64..120, parts in 2usize..4, stripe_kib in prop::sample::select(vec![64u64, 128, 1024]),
        spans in prop::collection::vec((0u64..1 << 40, 0u64..5000), 1..6), seed in any::<u64>(),
    ) {
        let place = Place::new();
        make(&place.at("d"), nodes, dim, seed);
        let names = [file::IN_OFFSETS, file::IN_NEIGHBOURS, file::NODE_FEATURES];
        let plain = Dataset::open(&place.at("d")).unwrap();
        let requested: Vec<_> = names.iter().map(|name| read(&plain, name, &spans)).collect();
        let bytes: Vec<Vec<u8>> = names.iter().map(|name| fs::read(place.at(&format!("d/{name}.bin"))).unwrap()).collect();
        let manifest = fs::read(place.at("d/esker.json")).unwrap();

        let moved = place.stripe(parts, stripe_kib * KIB).unwrap();
        prop_assert_eq!(moved.arrays.len(), 3);
        let striped = Dataset::open(&place.at("d")).unwrap();
        prop_assert_eq!(&striped.manifest().id, &plain.manifest().id);
        for (name, requested) in names.iter().zip(&requested) {
            prop_assert!(&read(&striped, name, &spans) == requested, "{}", name);
        }
        let verified = verify(&place.at("d"), 2, &Silent).unwrap();
        prop_assert_eq!(verified.damage, vec![]);
        // The definition: stripes are dealt to the parts in turn.
        for (name, bytes) in names.iter().zip(&bytes) {
            let mut dealt = vec![Vec::new(); parts];
            let turns = bytes.chunks((stripe_kib * KIB) as usize).enumerate();
            turns.for_each(|(number, stripe)| dealt[number % parts].extend_from_slice(stripe));
            for (part, dealt) in dealt.iter().enumerate() {
                let path = stripe_directory(&place.at("d"), part as u32).join(format!("{name}.bin"));
                prop_assert!(&fs::read(path).unwrap() == dealt, "part {} of {}", part, name);
            }
            let gone = !place.at(&format!("d/{name}.bin")).exists();
            prop_assert!(gone, "{} is there twice", name);
        }

        prop_assert_eq!(place.undo("d"), moved);
        prop_assert!(fs::read(place.at("d/esker.json")).unwrap() == manifest);
        for (name, bytes) in names.iter().zip(&bytes) {
            let back = fs::read(place.at(&format!("d/{name}.bin"))).unwrap();
            prop_assert!(&back == bytes, "{}", name);
        }
        prop_assert_eq!(place.files("d").len(), 4);
        place.assert_no_parts();
    }
}

#[test]
fn a_flipped_byte_in_any_part_is_found_and_named() {
    let place = Place::striped();
    let key = Key::new(3);
    assert_eq!(place.damage(), []);
    let dataset = Dataset::open(&place.at("d")).unwrap();
    for path in dataset.arrays().iter().flat_map(|array| array.layout().parts().to_vec()) {
        let whole = fs::read(&path).unwrap();
        let edges = [0, 4095, 4096, 65535, 65536, 69631, 69632, whole.len().saturating_sub(1)];
        let random = (0..25).map(|i| below(key.at(i), whole.len().max(1) as u64) as usize);
        for at in edges.into_iter().chain(random).filter(|at| *at < whole.len()) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (key.at(at as u64) % 8);
            fs::write(&path, &bytes).unwrap();
            let damage = place.damage();
            let at = at as u64;
            let named = |damage: &Damage| {
                damage.path == path && damage.offset <= at && at < damage.offset + damage.bytes
            };
            assert!(damage.iter().any(named), "byte {at} of {}: {damage:?}", path.display());
            // A block lies in two parts at most, so nobody has to look further than that.
            assert!(damage.len() <= 2, "{damage:?}");
        }
        fs::write(&path, &whole).unwrap();
    }
    assert_eq!(place.damage(), []);
}

#[test]
fn a_cut_grown_or_missing_part_is_found_and_named() {
    let place = Place::striped();
    let dataset = Dataset::open(&place.at("d")).unwrap();
    for path in dataset.arrays().iter().flat_map(|array| array.layout().parts().to_vec()) {
        let whole = fs::read(&path).unwrap();
        let named = |what: &str| {
            let error = Dataset::open(&place.at("d")).expect_err(what).to_string();
            assert!(error.contains(path.to_str().unwrap()), "{what}: {error}");
            let damage = place.damage();
            assert!(damage.iter().any(|damage| damage.path == path), "{what}: {damage:?}");
        };
        for cut in [0, 1, whole.len() / 2, whole.len().saturating_sub(1)] {
            if cut < whole.len() {
                fs::write(&path, &whole[..cut]).unwrap();
                named("a cut part opened");
            }
        }
        fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
        named("a longer part opened");
        fs::remove_file(&path).unwrap();
        named("a missing part opened");
        fs::write(&path, &whole).unwrap();
    }
    assert_eq!(place.damage(), []);
}

#[test]
fn a_disk_that_is_not_there_is_told_with_the_remedy_and_a_new_link_brings_it_back() {
    let place = Place::striped();
    fs::rename(place.disk(1), place.at("elsewhere")).unwrap();
    let link = place.at("d/stripe-1");
    let check = |found: &str| {
        let error = Dataset::open(&place.at("d")).unwrap_err().to_string();
        for word in [link.to_str().unwrap(), found, "mount", "ln -sfn"] {
            assert!(error.contains(word), "`{word}` is not in: {error}");
        }
        let damage = place.damage();
        assert!(
            damage.len() == 3 && damage.iter().all(|damage| damage.path.starts_with(&link)),
            "{damage:?}"
        );
    };
    check("a link to");
    fs::remove_file(&link).unwrap();
    check("nothing");
    fs::write(&link, "x").unwrap();
    check("something else");
    fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(place.at("elsewhere/d.stripe-1"), &link).unwrap();
    assert_eq!(place.damage(), []);
    place.undo("d");
    assert_eq!((place.files("disk-0"), place.files("elsewhere")), (vec![], vec![]));
}

/// The manifest with this in the place of its stripes, sealed as a careful attacker would.
fn forge(place: &Place, stripes: &str) -> StoreError {
    let path = place.at("d/esker.json");
    let text = fs::read_to_string(&path).unwrap();
    // The last array is the one that has stripes to deal differently.
    let start = text.rfind("\"stripes\": {").unwrap();
    let end = start + text[start..].find('}').unwrap() + 1;
    let mut forged = format!("{}\"stripes\": {stripes}{}", &text[..start], &text[end..]).into_bytes();
    let key = b"\"checksum\": \"";
    let at = forged.windows(key.len()).position(|window| window == key).unwrap() + key.len();
    forged[at..at + 16].fill(b'0');
    let sum = format!("{:016x}", xxh3_64(&forged));
    forged[at..at + 16].copy_from_slice(sum.as_bytes());
    fs::write(&path, forged).unwrap();
    let error = Dataset::open(&place.at("d")).expect_err(stripes);
    fs::write(&path, text).unwrap();
    error
}

#[test]
fn hostile_stripes_are_refused() {
    let place = Place::striped();
    for numbers in [
        "[0, 65536]",
        "[1, 65536]",
        "[65, 65536]",
        "[-1, 65536]",
        "[2, 4096]",
        "[2, 65537]",
        "[2, 2147483648]",
    ] {
        let (parts, bytes) = numbers.trim_matches(['[', ']']).split_once(", ").unwrap();
        let error = forge(&place, &format!("{{\"parts\": {parts}, \"bytes\": {bytes}}}"));
        assert!(matches!(error, StoreError::Manifest { .. }), "{numbers}: {error}");
    }
    assert!(matches!(forge(&place, "7"), StoreError::Manifest { .. }));
    assert!(matches!(forge(&place, "{}"), StoreError::Manifest { .. }));
    // Possible numbers that are not those of these files.
    assert!(matches!(forge(&place, "{\"parts\": 64, \"bytes\": 65536}"), StoreError::StripeMissing { .. }));
    let wrong = forge(&place, "{\"parts\": 2, \"bytes\": 131072}");
    assert!(matches!(wrong, StoreError::WrongLength { .. }), "{wrong}");
    assert!(matches!(forge(&place, "null"), StoreError::Missing { .. }));
    assert_eq!(place.damage(), []);
}

#[test]
fn a_run_that_was_killed_behind_the_manifest_is_finished_by_the_next() {
    let place = Place::new();
    make(&place.at("d"), 3000, 33, 1);
    let name = format!("{}.bin", file::NODE_FEATURES);
    fs::copy(place.at("d").join(&name), place.at("kept")).unwrap();
    place.stripe(2, 64 * KIB).unwrap();
    fs::copy(place.at("kept"), place.at("d").join(&name)).unwrap();
    assert_eq!(place.stripe(2, 64 * KIB).unwrap(), MovedArrays::default());
    assert_eq!(place.files("d"), ["esker.json", "stripe-0", "stripe-1"]);
    place.undo("d");
    // Now as if the undo had been killed before it removed the parts.
    fs::create_dir(place.disk(0).join("d.stripe-0")).unwrap();
    std::os::unix::fs::symlink(place.disk(0).join("d.stripe-0"), place.at("d/stripe-0")).unwrap();
    assert_eq!(place.undo("d"), MovedArrays::default());
    assert_eq!(place.files("d").len(), 4);
    place.assert_no_parts();
}

#[test]
fn a_run_that_was_killed_before_the_manifest_is_finished_or_cleaned_up() {
    let place = Place::new();
    make(&place.at("d"), 3000, 33, 1);
    let plain = fs::read(place.at("d/esker.json")).unwrap();
    let singles: Vec<(String, Vec<u8>)> = place
        .files("d")
        .into_iter()
        .map(|name| (name.clone(), fs::read(place.at("d").join(name)).unwrap()))
        .collect();
    let as_if_killed = || {
        place.stripe(2, 64 * KIB).unwrap();
        singles.iter().for_each(|(name, bytes)| fs::write(place.at("d").join(name), bytes).unwrap());
        fs::rename(
            place.disk(1).join("d.stripe-1/in-offsets.bin"),
            place.disk(1).join("d.stripe-1/in-offsets.bin.new"),
        )
        .unwrap();
        assert_eq!(fs::read(place.at("d/esker.json")).unwrap(), plain);
        assert_eq!(place.damage(), []);
    };
    as_if_killed();
    assert_eq!(place.stripe(2, 64 * KIB).unwrap().arrays.len(), 3);
    assert_eq!(place.damage(), []);
    assert_eq!(place.files("disk-1").len(), 5);
    place.undo("d");
    // Somebody changes his mind about the disks.
    as_if_killed();
    assert_eq!(place.stripe(3, 128 * KIB).unwrap().arrays.len(), 3);
    assert_eq!((place.damage(), place.files("disk-1").len()), (vec![], 5));
    place.undo("d");
    as_if_killed();
    assert_eq!(place.undo("d"), MovedArrays::default());
    assert_eq!(place.files("d").len(), 4);
    place.assert_no_parts();
}

#[test]
fn a_damaged_array_is_not_dealt_out() {
    let place = Place::new();
    make(&place.at("d"), 3000, 33, 1);
    let path = place.at("d/node-features.bin");
    let mut bytes = fs::read(&path).unwrap();
    bytes[200_000] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let error = place.stripe(2, 64 * KIB).unwrap_err().to_string();
    assert!(error.contains("node-features.bin") && error.contains("esker verify"), "{error}");
    assert!(fs::read(&path).unwrap() == bytes && Dataset::open(&place.at("d")).is_ok());
    place.undo("d");
    place.assert_no_parts();
}

#[test]
fn replacing_a_striped_dataset_removes_its_parts_and_nothing_of_others() {
    let place = Place::striped();
    fs::write(place.disk(0).join("thesis.txt"), "x").unwrap();
    fs::write(place.disk(1).join("d.stripe-1/thesis.txt"), "x").unwrap();
    make(&place.at("d"), 100, 3, 2);
    assert_eq!(place.damage(), []);
    assert_eq!(place.files("d").len(), 4);
    assert_eq!(place.files("disk-0"), ["thesis.txt"]);
    assert_eq!(place.files("disk-1"), ["d.stripe-1", "d.stripe-1/thesis.txt"]);
}

#[test]
fn parts_of_a_replaced_dataset_that_a_kill_left_are_removed_by_the_next_run() {
    let place = Place::striped();
    fs::write(place.at("d/lock"), "replaced").unwrap();
    fs::rename(place.at("d"), place.at("d.partial")).unwrap();
    make(&place.at("d"), 100, 3, 2);
    assert_eq!(place.files("d").len(), 4);
    assert!(!place.at("d.partial").exists());
    place.assert_no_parts();
}

#[test]
fn a_copy_with_the_links_leaves_the_parts_to_its_original() {
    let place = Place::striped();
    place.copy_with_links("d", "copy");
    assert_eq!(place.undo("copy").arrays.len(), 3);
    assert_eq!(place.damage_of("copy"), []);
    assert_eq!(place.files("copy").len(), 4);
    assert_eq!(place.damage(), []);
    // Moved instead, it is the original that the links belong to.
    fs::rename(place.at("d"), place.at("moved")).unwrap();
    place.undo("moved");
    assert_eq!(place.files("moved").len(), 4);
    place.assert_no_parts();
}

#[test]
fn a_copy_leaves_the_parts_to_an_original_that_is_not_where_it_was() {
    type Remove = fn(&Place);
    let ways: [(&str, Remove); 4] = [
        ("undone", |place| drop(place.undo("copy"))),
        ("replaced", |place| make(&place.at("copy"), 10, 3, 2)),
        ("undone in the original's place", |place| {
            fs::rename(place.at("copy"), place.at("d")).unwrap();
            place.undo("d");
        }),
        ("replaced in the original's place", |place| {
            fs::rename(place.at("copy"), place.at("d")).unwrap();
            make(&place.at("d"), 10, 3, 2);
        }),
    ];
    for (way, remove) in ways {
        let place = Place::striped();
        place.copy_with_links("d", "copy");
        fs::rename(place.at("d"), place.at("moved")).unwrap();
        remove(&place);
        assert_eq!(place.damage_of("moved"), [], "the copy was {way}");
    }
}

#[test]
fn a_new_dataset_of_an_old_name_leaves_the_parts_of_the_moved_one() {
    for seed in [1, 2] {
        let place = Place::striped();
        fs::rename(place.at("d"), place.at("moved")).unwrap();
        make(&place.at("d"), 3000, 33, seed);
        let error = place.stripe(2, 64 * KIB).unwrap_err().to_string();
        for word in ["d.stripe-0", "another dataset", "choose another directory"] {
            assert!(error.contains(word), "`{word}` is not in: {error}");
        }
        assert_eq!((place.damage_of("moved"), place.damage()), (vec![], vec![]));
        assert_eq!(place.files("d").len(), 4);
        // Once its owner has left, the place is free.
        place.undo("moved");
        assert_eq!(place.stripe(2, 64 * KIB).unwrap().arrays.len(), 3);
        assert_eq!((place.damage_of("moved"), place.damage()), (vec![], vec![]));
    }
}

#[test]
fn a_moved_dataset_can_be_striped_further_and_replaced_with_its_parts() {
    let place = Place::new();
    make(&place.at("d"), 3000, 33, 1);
    let request = StripeRequest { least_bytes: 100 * KIB, ..place.request(2, 64 * KIB) };
    stripe(&place.at("d"), &request, 1, &Silent).unwrap();
    fs::create_dir(place.at("other")).unwrap();
    fs::rename(place.at("d"), place.at("other/d")).unwrap();
    let moved = stripe(&place.at("other/d"), &place.request(2, 64 * KIB), 1, &Silent).unwrap();
    assert_eq!((moved.arrays.len(), place.damage_of("other/d")), (2, vec![]));
    make(&place.at("other/d"), 10, 3, 1);
    place.assert_no_parts();
}

/// Makes a pipe, which nobody writes to.
fn make_pipe(path: &Path) {
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Does something that must not take for ever.
fn in_time<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(std::time::Duration::from_secs(20)).unwrap_or_else(|_| panic!("{what} hangs"))
}

#[test]
fn a_pipe_in_place_of_a_file_is_named_and_nobody_waits_for_it() {
    let place = Place::new();
    make(&place.at("d"), 20, 3, 1);
    place.stripe(2, 64 * KIB).unwrap();
    // So short that the second part is empty, as a pipe is.
    let part = place.at("d/stripe-1/node-features.bin");
    assert_eq!(fs::metadata(&part).unwrap().len(), 0);
    fs::remove_file(&part).unwrap();
    make_pipe(&part);
    let dataset = place.at("d");
    let opened = in_time("opening", move || Dataset::open(&dataset).unwrap_err().to_string());
    assert!(opened.contains(part.to_str().unwrap()) && opened.contains("a pipe"), "{opened}");
    let dataset = place.at("d");
    let damage = in_time("verify", move || verify(&dataset, 1, &Silent).unwrap().damage);
    assert!(
        damage.len() == 1 && damage[0].path == part && damage[0].problem.contains("a pipe"),
        "{damage:?}"
    );
    for name in ["esker.json", "stripe-0/esker-stripe.json", "lock"] {
        let place = Place::striped();
        let _ = fs::remove_file(place.at("d").join(name));
        make_pipe(&place.at("d").join(name));
        let dataset = place.at("d");
        in_time(name, move || {
            let _ = (Dataset::open(&dataset), verify(&dataset, 1, &Silent));
            let _ = Staging::is_in_place(&dataset, "test");
            let _ = (unstripe(&dataset, 1, &Silent), try_make(&dataset, 10, 3, 1));
        });
    }
}

#[test]
fn what_is_written_does_not_follow_links() {
    let check = |name: &str, write: fn(&Place)| {
        let place = Place::striped();
        fs::write(place.at("victim"), "mine").unwrap();
        std::os::unix::fs::symlink(place.at("victim"), place.at("d").join(name)).unwrap();
        write(&place);
        assert_eq!(fs::read_to_string(place.at("victim")).unwrap(), "mine", "through {name}");
        assert!(!place.at("d").join(name).is_symlink(), "{name} is there still");
        assert_eq!(place.damage(), []);
    };
    let undo: fn(&Place) = |place| drop(place.undo("d"));
    check("node-features.bin.new", undo);
    check("node-features.bin", undo);
    check("esker.new", undo);
    check("stripe-0/esker-stripe.new", |place| {
        place.undo("d");
        place.stripe(2, 64 * KIB).unwrap();
    });
    check("lock", |place| {
        let refused = try_make(&place.at("d"), 10, 3, 1).unwrap_err().to_string();
        assert!(refused.contains("d/lock"), "{refused}");
        fs::remove_file(place.at("d/lock")).unwrap();
    });
}

#[test]
fn what_is_built_does_not_follow_links() {
    for name in ["esker.new", "in-offsets.bin", "in-offsets.sums", "work/journal.new", "lock"] {
        let place = Place::new();
        fs::write(place.at("victim"), "mine").unwrap();
        // As a run of the same job left it, so that nothing is thrown away.
        let staging = Staging::begin(&place.at("d"), true).unwrap();
        staging.journal("test").unwrap().0.record("begun", &1).unwrap();
        drop(staging);
        let path = place.at("d.partial").join(name);
        let _ = fs::remove_file(&path);
        std::os::unix::fs::symlink(place.at("victim"), &path).unwrap();
        match name {
            "lock" => drop(Staging::begin(&place.at("d"), true).map(drop).expect_err("a link as lock")),
            _ => make(&place.at("d"), 10, 3, 1),
        }
        assert_eq!(fs::read_to_string(place.at("victim")).unwrap(), "mine", "through {name}");
    }
}

#[test]
fn parts_that_are_the_datasets_own_files_or_one_another_are_left_alone() {
    let link = |place: &Place, to: &str| {
        let part = stripe_directory(&place.at("d"), 0);
        for file in fs::read_dir(&part).unwrap().map(|file| file.unwrap()) {
            fs::copy(file.path(), place.at("d").join(to).join(file.file_name())).unwrap();
        }
        fs::remove_file(&part).unwrap();
        std::os::unix::fs::symlink(to, &part).unwrap();
    };
    for to in [".", "derived"] {
        let place = Place::striped();
        fs::create_dir(place.at("d/derived")).unwrap();
        link(&place, to);
        assert_eq!(place.damage(), []);
        let before = place.files("d");
        for error in [unstripe(&place.at("d"), 1, &Silent), place.stripe(2, 64 * KIB)] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("stripe-0") && error.contains("inside the dataset"), "{error}");
        }
        assert_eq!((place.files("d"), place.damage()), (before, vec![]));
    }
    let place = Place::new();
    make(&place.at("d"), 20, 3, 1);
    place.stripe(3, 64 * KIB).unwrap();
    fs::remove_file(place.at("d/stripe-1")).unwrap();
    std::os::unix::fs::symlink("stripe-2", place.at("d/stripe-1")).unwrap();
    let error = unstripe(&place.at("d"), 1, &Silent).unwrap_err().to_string();
    assert!(error.contains("stripe-2") && error.contains("same file"), "{error}");
    assert_eq!(place.damage(), []);
}

#[test]
fn a_link_to_a_part_is_no_copy_of_the_array() {
    let place = Place::new();
    make(&place.at("d"), 20, 3, 1);
    place.stripe(2, 64 * KIB).unwrap();
    // So short that the first part holds all of it.
    std::os::unix::fs::symlink("stripe-0/node-features.bin", place.at("d/node-features.bin")).unwrap();
    place.undo("d");
    assert_eq!((place.damage(), place.files("d").len()), (vec![], 4));
    place.assert_no_parts();
}

#[test]
fn a_copy_with_directories_instead_of_links_is_a_dataset_of_its_own() {
    let place = Place::striped();
    for part in 0..2 {
        let (from, to) = (stripe_directory(&place.at("d"), part), stripe_directory(&place.at("copy"), part));
        fs::create_dir_all(&to).unwrap();
        for file in fs::read_dir(&from).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    fs::copy(place.at("d/esker.json"), place.at("copy/esker.json")).unwrap();
    assert!(verify(&place.at("copy"), 2, &Silent).unwrap().damage.is_empty());
    place.undo("copy");
    assert_eq!(place.files("copy").len(), 4);
    assert!(verify(&place.at("copy"), 2, &Silent).unwrap().damage.is_empty());
    assert_eq!(place.damage(), []);
}

#[test]
fn striping_another_way_needs_an_undo_and_strange_directories_are_refused() {
    let place = Place::striped();
    let refusal =
        |place: &Place, parts, stripe_bytes| place.stripe(parts, stripe_bytes).unwrap_err().to_string();
    for error in [refusal(&place, 3, 64 * KIB), refusal(&place, 2, 128 * KIB)] {
        assert!(error.contains("--undo") && error.contains("disk-1"), "{error}");
    }
    make(&place.at("other/d"), 10, 3, 1);
    let error =
        stripe(&place.at("other/d"), &place.request(2, 64 * KIB), 1, &Silent).unwrap_err().to_string();
    assert!(error.contains(place.at("d").to_str().unwrap()), "{error}");
    let place = Place::new();
    make(&place.at("d"), 10, 3, 1);
    fs::create_dir(place.disk(0).join("d.stripe-0")).unwrap();
    fs::write(place.disk(0).join("d.stripe-0/thesis.txt"), "x").unwrap();
    assert!(refusal(&place, 2, 64 * KIB).contains("not Esker's"));
    let with = |over: [PathBuf; 2]| {
        let request = StripeRequest { over: over.into(), stripe_bytes: 64 * KIB, least_bytes: 0 };
        stripe(&place.at("d"), &request, 1, &Silent).unwrap_err().to_string()
    };
    assert!(with([place.disk(1), place.at("nowhere")]).contains("mount"));
    assert!(with([place.disk(1), place.disk(1)]).contains("twice"));
    fs::create_dir(place.at("d/inside")).unwrap();
    assert!(with([place.disk(1), place.at("d/inside")]).contains("inside"));
    assert!(place.disk(0).join("d.stripe-0/thesis.txt").exists());
    assert_eq!(place.damage(), []);
}

#[test]
fn one_job_at_a_time_touches_a_dataset() {
    let place = Place::striped();
    let held = File::open(place.at("d")).unwrap();
    held.lock().unwrap();
    assert!(matches!(place.stripe(2, 64 * KIB), Err(StoreError::Busy { .. })));
    assert!(matches!(unstripe(&place.at("d"), 1, &Silent), Err(StoreError::Busy { .. })));
    assert!(matches!(try_make(&place.at("d"), 10, 3, 2), Err(StoreError::Busy { .. })));
    assert_eq!(place.damage(), []);
    drop(held);
    assert_eq!(place.stripe(2, 64 * KIB).unwrap(), MovedArrays::default());
}

#[test]
fn small_arrays_stay_and_more_can_follow() {
    let place = Place::new();
    make(&place.at("d"), 3000, 33, 1);
    let request = StripeRequest { least_bytes: 100 * KIB, ..place.request(2, 64 * KIB) };
    assert_eq!(stripe(&place.at("d"), &request, 1, &Silent).unwrap().arrays, ["node-features"]);
    assert_eq!(place.damage(), []);
    assert_eq!(place.stripe(2, 64 * KIB).unwrap().arrays, ["in-neighbours", "in-offsets"]);
    assert_eq!(place.damage(), []);
}
