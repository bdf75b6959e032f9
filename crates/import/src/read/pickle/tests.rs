use super::*;
use crate::fixture;

fn committed(name: &str) -> Vec<u8> {
    std::fs::read(fixture::committed(name)).unwrap()
}

fn location() -> Location {
    Location::file(Path::new("a.pkl"))
}

/// Reads the same dictionary from every protocol and examines the value of `key`.
fn check(key: &str, look: impl Fn(&Pickle, Value)) {
    for protocol in 0..=5 {
        let bytes = committed(&format!("everything.{protocol}.pkl"));
        let pickle = read(&bytes, &location()).unwrap();
        let value = pickle.get(pickle.root(), key);
        look(&pickle, value.unwrap_or_else(|| panic!("protocol {protocol} has no {key}")));
    }
}

fn refused(bytes: &[u8]) -> String {
    match read(bytes, &location()) {
        Ok(pickle) => panic!("read as {}", pickle.describe(pickle.root())),
        Err(error) => error.to_string(),
    }
}

#[test]
fn small_values_read_as_they_are() {
    check("none", |_, value| assert_eq!(value, Value::None));
    check("truth", |p, value| {
        assert_eq!(p.items(value).unwrap(), [Value::Bool(true), Value::Bool(false)]);
    });
    check("integers", |p, value| {
        let expected = [0, 255, 256, 65535, 65536, -1, -(1 << 31), 1 << 40, -(1 << 62)];
        assert_eq!(p.items(value).unwrap(), expected.map(Value::Int));
    });
    check("floats", |p, value| {
        assert_eq!(p.items(value).unwrap(), [Value::Float(1.5), Value::Float(-2.0)]);
    });
    check("big", |p, value| assert_eq!(p.describe(value), "an integer beyond 64 bits"));
}

#[test]
fn strings_of_bytes_and_of_text_read_as_they_are() {
    check("bytes", |p, value| assert_eq!(p.bytes(value).unwrap(), [0, 255, 128]));
    check("empty bytes", |p, value| assert!(p.bytes(value).unwrap().is_empty()));
    check("text", |p, value| assert_eq!(p.text(value).unwrap(), "grün ≤ 3"));
}

#[test]
fn collections_keep_their_order_and_what_they_share() {
    check("tuples", |p, value| {
        let lengths = p.items(value).unwrap().iter().map(|tuple| p.items(*tuple).unwrap().len());
        assert_eq!(lengths.collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    });
    check("shared", |p, value| {
        let items = p.items(value).unwrap();
        assert_eq!(items[0], items[1]);
        assert_eq!(p.ids(items[0]).unwrap(), [1, 2, 3]);
    });
    check("set", |p, value| assert_eq!(p.ids(value).unwrap(), [7]));
    check("ordered", |p, value| assert_eq!(p.get(value, "b"), Some(Value::Int(2))));
    check("neighbours", |p, value| {
        let (node, neighbours) = p.pairs(value).unwrap()[0];
        assert_eq!((node, p.ids(neighbours).unwrap()), (Value::Int(0), vec![1, 2]));
    });
}

#[test]
fn numpy_arrays_keep_type_shape_and_order() {
    check("array", |p, value| {
        let numbers = p.numbers(value).unwrap();
        assert_eq!((numbers.scalar, numbers.shape), (Scalar::I32, &[2, 3][..]));
        assert_eq!(numbers.ids(&location()).unwrap(), [0, 1, 2, 3, 4, 5]);
    });
    check("fortran", |p, value| {
        let numbers = p.numbers(value).unwrap();
        assert_eq!(numbers.float(numbers.position(1, 0)), 3.0);
        assert_eq!(numbers.float(numbers.position(0, 2)), 2.0);
    });
    check("swapped", |p, value| assert_eq!(p.ids(value).unwrap(), [1, 256]));
    check("mask", |p, value| assert_eq!(p.numbers(value).unwrap().value(0), Some(Value::Bool(true))));
    check("names", |p, value| assert_eq!(p.strings(value).unwrap(), ["Desktops", "Webcams"]));
    check("scalar", |_, value| assert_eq!(value, Value::Int(17)));
    check("half", |_, value| assert_eq!(value, Value::Float(0.5)));
    check("objects", |p, value| {
        let items = p.items(value).unwrap();
        assert_eq!(p.get(items[1], "a"), Some(Value::Int(2)));
    });
}

#[test]
fn scipy_matrices_become_rows() {
    check("csr", |p, value| {
        let rows = p.sparse(value).unwrap().to_rows(Path::new("a.pkl")).unwrap();
        let dense = [0.0, 1.5, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0];
        assert_eq!(fixture::all_rows(&rows, 0).unwrap(), dense);
    });
}

#[test]
fn names_that_are_not_listed_are_refused_and_told() {
    let message = refused(&committed("refused.pkl"));
    assert!(message.contains("builtins.print") && message.contains("byte"), "{message}");
    let message = refused(b"cos\nsystem\n(S'true'\ntR.");
    assert!(message.contains("os.system"), "{message}");
}

#[test]
fn a_cut_pickle_says_where_it_ends() {
    let bytes = committed("everything.4.pkl");
    let message = refused(&bytes[..bytes.len() / 2]);
    assert!(message.contains("a.pkl, byte") && message.contains("end of the file"), "{message}");
    assert!(refused(b"").contains("1 more bytes"));
}

#[test]
fn lengths_beyond_the_input_are_refused_before_anything_is_allocated() {
    let huge = u64::MAX.to_le_bytes();
    for opcode in [0x8e, 0x96, 0x8d] {
        refused(&[&[opcode], &huge[..]].concat());
    }
    refused(b"T\xff\xff\xff\xff");
    refused(b"\x8b\xff\xff\xff\xff");
}

#[test]
fn a_list_that_holds_itself_is_harmless() {
    let pickle = read(b"]q\x00h\x00a.", &location()).unwrap();
    assert_eq!(pickle.items(pickle.root()).unwrap(), [pickle.root()]);
    assert!(pickle.ids(pickle.root()).is_err());
}

#[test]
fn deep_nesting_and_repeated_sharing_cost_what_their_bytes_cost() {
    let deep = [vec![b']'; 1 << 20], vec![b'a'; (1 << 20) - 1], vec![b'.']].concat();
    assert!(read(&deep, &location()).is_ok());
    // Each list contains the previous one twice: 2^1000 leaves, if they were counted.
    let mut shared = b"]q\x00".to_vec();
    for _ in 0..1000 {
        shared.extend(b"0]h\x00ah\x00aq\x00");
    }
    shared.push(b'.');
    assert!(fuzz(&shared).is_ok());
    // The same long string, encoded again and again.
    let mut copies = b"c_codecs\nencode\nq\x00X\x00\x00\x01\x00".to_vec();
    copies.extend([b'a'; 1 << 16]);
    copies.extend(b"X\x06\x00\x00\x00latin1\x86q\x01");
    copies.extend(b"h\x00h\x01R".repeat(10_000));
    copies.push(b'.');
    assert!(refused(&copies).contains("copies"));
}

#[test]
fn an_opcode_without_its_operands_is_an_error() {
    for opcode in 0..=255u8 {
        for tail in [&b"."[..], b"", b"(.", b"\x00\x00\x00\x00\x00\x00\x00\x00.", b"\n\n."] {
            let _ = fuzz(&[&[opcode], tail].concat());
            let _ = fuzz(&[&b"N"[..], &[opcode], tail].concat());
            let _ = fuzz(&[&b"(NN"[..], &[opcode], tail].concat());
            let _ = fuzz(&[&b"c_codecs\nencode\n)"[..], &[opcode], tail].concat());
        }
    }
}

#[test]
fn broken_pickles_never_panic() {
    let whole: Vec<Vec<u8>> = (0..=5).map(|n| committed(&format!("everything.{n}.pkl"))).collect();
    for seed in 0..6_000u64 {
        let (one, other) = (seed as usize % whole.len(), seed as usize / 7 % whole.len());
        let bytes = fixture::damaged(&whole[one], &whole[other], seed);
        let outcome = std::panic::catch_unwind(|| fuzz(&bytes).is_ok());
        assert!(outcome.is_ok(), "seed {seed}");
    }
}
