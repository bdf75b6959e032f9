//! A tiny valid dataset in each foreign format.

use crate::recipe::{Content, Recipe, unpacked};
use esker_import::{EdgeColumnNames, Request, SplitChoice};

macro_rules! fixture {
    ($name:literal) => {
        include_bytes!(concat!("../../crates/import/tests/fixtures/", $name))
    };
}

fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn integers(shape: &str, values: &[i64]) -> Vec<u8> {
    npy("<i8", shape, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
}

fn floats(shape: &str, values: &[f32]) -> Vec<u8> {
    npy("<f4", shape, &raw(values))
}

fn raw(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn plain(bytes: impl AsRef<[u8]>) -> Content {
    Content::Plain(bytes.as_ref().to_vec())
}

fn gzip(text: &str) -> Content {
    Content::Gzip(text.into())
}

fn members<const N: usize>(members: [(&str, Vec<u8>); N]) -> Content {
    Content::Zip(members.map(|(name, bytes)| (name.to_string(), bytes)).into())
}

fn some(word: &str) -> Option<String> {
    Some(word.to_string())
}

/// Every array that flags can name, of four nodes and four edges.
pub fn npy_arrays() -> Recipe {
    Recipe {
        files: vec![
            ("edges.npy", plain(integers("(2, 4)", &[0, 1, 2, 0, 1, 2, 0, 1]))),
            ("x.npy", plain(floats("(4, 2)", &[0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]))),
            ("y.npy", plain(npy("|i1", "(4,)", &[0, 1, 0, 1]))),
            ("train.npy", plain(integers("(2,)", &[0, 1]))),
            ("valid.npy", plain(npy("|b1", "(4,)", &[0, 0, 1, 0]))),
            ("test.npy", plain(npy("<u2", "(1,)", &[3, 0]))),
            ("weights.npy", plain(npy("<f2", "(4,)", &[0, 60, 0, 64, 0, 60, 0, 60]))),
            ("times.npy", plain(integers("(4,)", &[5, -6, 7, 8]))),
            ("names.txt", plain("a\nb\nc\nd\n")),
            ("edge-features.npy", plain(floats("(4, 1)", &[1.0, 2.0, 3.0, 4.0]))),
        ],
        request: |files| Request {
            format: "npy".into(),
            edges: Some(files.join("edges.npy")),
            features: Some(files.join("x.npy")),
            labels: Some(files.join("y.npy")),
            train: Some(files.join("train.npy")),
            valid: Some(files.join("valid.npy")),
            test: Some(files.join("test.npy")),
            edge_weights: Some(files.join("weights.npy")),
            edge_times: Some(files.join("times.npy")),
            node_ids: Some(files.join("names.txt")),
            edge_features: Some(files.join("edge-features.npy")),
            ..Request::default()
        },
    }
}

/// Nothing at all, in files that say so: one file's claims meet no others.
pub fn empty() -> Recipe {
    Recipe {
        files: vec![
            ("edges.npy", plain(integers("(2, 0)", &[]))),
            ("x.npy", plain(floats("(0, 3)", &[]))),
            ("y.npy", plain(npy("|i1", "(0,)", &[]))),
            ("train.npy", plain(npy("|b1", "(0,)", &[]))),
        ],
        request: |files| Request {
            format: "npy".into(),
            edges: Some(files.join("edges.npy")),
            features: Some(files.join("x.npy")),
            labels: Some(files.join("y.npy")),
            train: Some(files.join("train.npy")),
            ..Request::default()
        },
    }
}

/// In-neighbours by offsets.
pub fn csc() -> Recipe {
    Recipe {
        files: vec![
            ("starts.npy", plain(integers("(5,)", &[0, 1, 1, 3, 4]))),
            ("indices.npy", plain(npy("|u1", "(4,)", &[1, 0, 3, 2]))),
            ("weights.npy", plain(floats("(4,)", &[1.0, 2.0, 3.0, 4.0]))),
        ],
        request: |files| Request {
            format: "csc".into(),
            indptr: Some(files.join("starts.npy")),
            indices: Some(files.join("indices.npy")),
            edge_weights: Some(files.join("weights.npy")),
            ..Request::default()
        },
    }
}

/// Edges, features, classes and a coded split as text.
pub fn csv() -> Recipe {
    Recipe {
        files: vec![
            ("edges.csv", plain("src,dst,kind,w,t\n0,1,0,0.5,7\n2,3,1,1,-8\n\"3\",0,0,2,9\n")),
            ("x.csv", plain("x,y\n1,2\n-3,4e5\n0.5,6\n7,8\n")),
            ("y.csv", plain("0\n1\n0\n1\n")),
            ("split.csv", plain("0\n1\n2\n0\n")),
        ],
        request: |files| Request {
            format: "csv".into(),
            edges: Some(files.join("edges.csv")),
            features: Some(files.join("x.csv")),
            labels: Some(files.join("y.csv")),
            split: Some(SplitChoice::File(files.join("split.csv"))),
            columns: EdgeColumnNames {
                source: some("src"),
                target: some("dst"),
                relation: some("kind"),
                weight: some("w"),
                time: some("t"),
            },
            ..Request::default()
        },
    }
}

/// Edges between strings, with the order of the nodes in a list.
pub fn csv_names() -> Recipe {
    Recipe {
        files: vec![
            ("edges.csv", plain("a,b,\"likes, a lot\"\nb,c,knows\n\u{e9},a,\"say \"\"hi\"\"\"\n")),
            ("names.txt", plain("c\na\n\u{e9}\nb\nnobody\n")),
        ],
        request: |files| Request {
            format: "csv".into(),
            edges: Some(files.join("edges.csv")),
            node_ids: Some(files.join("names.txt")),
            ..Request::default()
        },
    }
}

/// Text packed by gzip.
pub fn gzip_text() -> Recipe {
    Recipe {
        files: vec![("edges.csv.gz", gzip("0,1\n2,3\n3,0\n")), ("x.csv.gz", gzip("1,2\n3,4\n5,6\n7,8\n"))],
        request: |files| Request {
            format: "csv".into(),
            edges: Some(files.join("edges.csv.gz")),
            features: Some(files.join("x.csv.gz")),
            ..Request::default()
        },
    }
}

/// Lists of ids as text, plain and packed.
pub fn id_list() -> Recipe {
    Recipe {
        files: vec![
            ("train.txt", plain("0\n7\r\n1\n")),
            ("valid.txt.gz", gzip("2\n\n")),
            ("test.parquet", plain(fixture!("parquet/ids.parquet"))),
            ("edges.csv", plain("0,1\n2,3\n3,199\n")),
        ],
        request: |files| Request {
            format: "csv".into(),
            edges: Some(files.join("edges.csv")),
            train: Some(files.join("train.txt")),
            valid: Some(files.join("valid.txt.gz")),
            test: Some(files.join("test.parquet")),
            nodes: Some(200),
            ..Request::default()
        },
    }
}

/// A sparse matrix as scipy saves it.
pub fn csr() -> Recipe {
    let matrix = members([
        ("data.npy", floats("(4,)", &[1.5, 2.0, 3.0, 4.0])),
        ("indices.npy", npy("<i4", "(4,)", &[1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])),
        ("indptr.npy", integers("(5,)", &[0, 1, 2, 2, 4])),
        ("shape.npy", integers("(2,)", &[4, 3])),
        ("format.npy", npy("|S3", "()", b"csr")),
    ]);
    Recipe {
        files: vec![("x.npz", matrix), ("edges.csv", plain("0,1\n2,3\n"))],
        request: |files| Request {
            format: "csv".into(),
            edges: Some(files.join("edges.csv")),
            features_csr: Some(files.join("x.npz")),
            ..Request::default()
        },
    }
}

fn parquet_edges(bytes: &[u8]) -> Recipe {
    Recipe {
        files: vec![("edges.parquet", plain(bytes))],
        request: |files| Request {
            format: "parquet".into(),
            edges: Some(files.join("edges.parquet")),
            ..Request::default()
        },
    }
}

/// Edges between numbers.
pub fn parquet() -> Recipe {
    parquet_edges(fixture!("parquet/numbers.parquet"))
}

/// Edges between strings.
pub fn parquet_names() -> Recipe {
    parquet_edges(fixture!("parquet/names.parquet"))
}

/// Rows in parquet, in the three shapes they come in.
pub fn parquet_rows() -> Recipe {
    Recipe {
        files: vec![
            ("columns.parquet", plain(fixture!("parquet/columns.parquet"))),
            ("ids.parquet", plain(fixture!("parquet/ids.parquet"))),
            ("edges.csv", plain("0,1\n2,3\n")),
        ],
        request: |files| Request {
            format: "csv".into(),
            edges: Some(files.join("edges.csv")),
            features: Some(files.join("columns.parquet")),
            labels: Some(files.join("columns.parquet")),
            train: Some(files.join("ids.parquet")),
            ..Request::default()
        },
    }
}

/// The other shapes, in the place of the columns.
pub fn parquet_rows_seeds() -> Vec<Vec<u8>> {
    let slot = [parquet_rows().slot("columns.parquet"), 0];
    let lists = [&fixture!("parquet/lists.parquet")[..], fixture!("parquet/fixed.parquet")];
    lists.map(|bytes| [&slot, bytes].concat()).into_iter().chain(parquet_rows().seeds()).collect()
}

/// A knowledge graph.
pub fn triples() -> Recipe {
    Recipe {
        files: vec![
            ("train.txt", plain("a\tlikes\tb\nb\tknows\tc\n/m/1\tlikes\ta\n")),
            ("valid.txt", plain("c\tlikes\ta\n")),
            ("test.txt.gz", gzip("b\tknows\tb\n")),
        ],
        request: |files| Request { format: "triples".into(), from: Some(files.into()), ..Request::default() },
    }
}

/// An OGB node dataset.
pub fn ogb() -> Recipe {
    Recipe {
        files: vec![
            ("raw/edge.csv.gz", gzip("0,1\n2,1\n")),
            ("raw/node-feat.csv", plain("0.5,1\n1.5,2\n2.5,3\n")),
            ("raw/node-label.csv.gz", gzip("4\n\"\"\n1.0\n")),
            ("raw/num-node-list.csv.gz", gzip("3\n")),
            ("raw/num-edge-list.csv", plain("2\n")),
            ("split/time/train.csv.gz", gzip("0\n")),
            ("split/time/valid.csv", plain("2\n")),
            ("split/time/test.csv", plain("1\n")),
        ],
        request: |files| Request { format: "ogb".into(), from: Some(files.into()), ..Request::default() },
    }
}

/// OGB without rows that would contradict the count of nodes.
pub fn ogb_bare() -> Recipe {
    let mut recipe = ogb();
    recipe.files.retain(|(name, _)| !name.starts_with("raw/node-") && !name.starts_with("split/"));
    recipe
}

fn igb_of(features: Vec<u8>, labels: Vec<u8>, mapping: Vec<u8>) -> Recipe {
    Recipe {
        files: vec![
            ("processed/paper__cites__paper/edge_index.npy", plain(integers("(3, 2)", &[0, 1, 2, 3, 4, 0]))),
            ("processed/paper/node_feat.npy", plain(features)),
            ("processed/paper/node_label_19.npy", plain(labels)),
            ("processed/paper/paper_id_index_mapping.npy", plain(mapping)),
        ],
        request: |files| Request { format: "igb".into(), from: Some(files.into()), ..Request::default() },
    }
}

const FIVE: [f32; 5] = [0.0, 1.0, 2.0, 1.0, 0.0];

/// IGB with npy headers, and the number of nodes in its mapping.
pub fn igb() -> Recipe {
    let mapping = integers("(5, 2)", &[0, 9, 1, 8, 2, 7, 3, 6, 4, 5]);
    igb_of(floats("(5, 1)", &FIVE), floats("(5,)", &FIVE), mapping)
}

/// IGB without headers, as the large sizes are.
pub fn igb_raw() -> Recipe {
    igb_of(raw(&FIVE), raw(&FIVE), b"a pickle".to_vec())
}

const YAML: &str = "\
graph:
  nodes:
    - num: 4
  edges:
    - {format: numpy, path: edges.npy}
feature_data:
  - &a {domain: node, type: null, name: feat, format: numpy, in_memory: false, path: feat.npy}
  - *a
tasks:
  - name: node_classification
    num_classes: 5
    train_set:
      - data:
          - {name: seeds, format: numpy, path: train.npy}
          - {name: labels, format: numpy, path: train_labels.npy}
    validation_set:
      - data:
          - {name: seed_nodes, format: numpy, path: valid.npy}
          - {name: labels, format: numpy, path: valid_labels.npy}
";

/// GraphBolt's description and the arrays it names.
pub fn graphbolt() -> Recipe {
    Recipe {
        files: vec![
            ("metadata.yaml", plain(YAML.replace("  - *a\n", ""))),
            ("edges.npy", plain(integers("(2, 3)", &[0, 1, 2, 1, 2, 3]))),
            ("feat.npy", plain(floats("(4, 1)", &[0.0, 1.0, 2.0, 3.0]))),
            ("train.npy", plain(integers("(2,)", &[3, 1]))),
            ("train_labels.npy", plain(integers("(2,)", &[4, 2]))),
            ("valid.npy", plain(integers("(1,)", &[0]))),
            ("valid_labels.npy", plain(integers("(1,)", &[1]))),
            ("edges.csv", plain("0,1\n1,2\n")),
        ],
        request: |files| Request {
            format: "graphbolt".into(),
            from: Some(files.into()),
            ..Request::default()
        },
    }
}

/// The description again, with anchors and with text edges.
pub fn graphbolt_seeds() -> Vec<Vec<u8>> {
    let other =
        [YAML.to_string(), YAML.replace("format: numpy, path: edges.npy", "format: csv, path: edges.csv")];
    let other = other.map(|yaml| [&[0, 0], yaml.as_bytes()].concat());
    graphbolt().seeds().into_iter().chain(other).collect()
}

/// Planetoid's eight files.
pub fn planetoid() -> Recipe {
    Recipe {
        files: vec![
            ("ind.tiny.x", plain(fixture!("planetoid/ind.tiny.x"))),
            ("ind.tiny.tx", plain(fixture!("planetoid/ind.tiny.tx"))),
            ("ind.tiny.allx", plain(fixture!("planetoid/ind.tiny.allx"))),
            ("ind.tiny.y", plain(fixture!("planetoid/ind.tiny.y"))),
            ("ind.tiny.ty", plain(fixture!("planetoid/ind.tiny.ty"))),
            ("ind.tiny.ally", plain(fixture!("planetoid/ind.tiny.ally"))),
            ("ind.tiny.graph", plain(fixture!("planetoid/ind.tiny.graph"))),
            ("ind.tiny.test.index", plain(fixture!("planetoid/ind.tiny.test.index"))),
        ],
        request: |files| Request {
            format: "planetoid".into(),
            from: Some(files.into()),
            name: some("tiny"),
            ..Request::default()
        },
    }
}

fn gnn(content: Content) -> Recipe {
    Recipe {
        files: vec![("gnn.npz", content)],
        request: |files| Request {
            format: "gnn-npz".into(),
            from: Some(files.join("gnn.npz")),
            ..Request::default()
        },
    }
}

/// Amazon and Coauthor as plain arrays.
pub fn gnn_npz() -> Recipe {
    gnn(members([
        ("adj_data.npy", floats("(3,)", &[1.0; 3])),
        ("adj_indices.npy", integers("(3,)", &[1, 0, 2])),
        ("adj_indptr.npy", integers("(5,)", &[0, 1, 2, 2, 3])),
        ("adj_shape.npy", integers("(2,)", &[4, 4])),
        ("attr_data.npy", floats("(4,)", &[1.5, 2.0, 3.0, 4.0])),
        ("attr_indices.npy", integers("(4,)", &[1, 0, 1, 2])),
        ("attr_indptr.npy", integers("(5,)", &[0, 1, 2, 2, 4])),
        ("attr_shape.npy", integers("(2,)", &[4, 3])),
        ("labels.npy", integers("(4,)", &[0, 1, 1, 0])),
        ("class_names.npy", npy("|S3", "(2,)", b"catdog")),
    ]))
}

/// The same with pickled matrices.
pub fn gnn_npz_pickled() -> Recipe {
    gnn(unpacked(fixture!("gnn.npz")))
}

/// An npz with masks.
pub fn masked_npz() -> Recipe {
    let mask = |flags: [u8; 6]| npy("|b1", "(2, 3)", &flags);
    let archive = members([
        ("node_features.npy", floats("(3, 1)", &[1.0, 2.0, 3.0])),
        ("node_labels.npy", integers("(3,)", &[0, 1, 0])),
        ("edges.npy", integers("(2, 2)", &[0, 1, 1, 2])),
        ("train_masks.npy", mask([1, 0, 0, 0, 0, 1])),
        ("val_masks.npy", mask([0, 1, 0, 0, 1, 0])),
        ("test_masks.npy", mask([0, 0, 1, 1, 0, 0])),
    ]);
    Recipe {
        files: vec![("masked.npz", archive)],
        request: |files| Request {
            format: "masked-npz".into(),
            from: Some(files.join("masked.npz")),
            ..Request::default()
        },
    }
}

const MUSAE: [(&str, &str); 3] = [
    ("tiny_edges.csv", "node_1,node_2\n0,1\n1,3\n\n3,2\n"),
    ("tiny_features.json", r#"{"1": [4, 0, 4], "0": [2], "3": []}"#),
    ("tiny_target.csv", "id,name,ml_target\n1,\"b, c\",1\n0,a,0\n3,d,0\n2,e,1\n"),
];

/// A MUSAE folder with a split beside it.
pub fn musae() -> Recipe {
    let mut files: Vec<_> = MUSAE.into_iter().map(|(name, text)| (name, plain(text))).collect();
    files.push(("tiny-splits.npy", plain(fixture!("tiny-splits.npy"))));
    Recipe {
        files,
        request: |files| Request { format: "musae".into(), from: Some(files.into()), ..Request::default() },
    }
}

/// A MUSAE network in a zip.
pub fn musae_zip() -> Recipe {
    Recipe {
        files: vec![("tiny.zip", members(MUSAE.map(|(name, text)| (name, text.into()))))],
        request: |files| Request {
            format: "musae".into(),
            from: Some(files.join("tiny.zip")),
            ..Request::default()
        },
    }
}

/// MAG240M, whose split is a file of torch.
pub fn mag240m() -> Recipe {
    let halves: Vec<u8> = [0u8, 0x3c, 0, 0x40].repeat(6);
    Recipe {
        files: vec![
            ("processed/paper/node_feat.npy", plain(npy("<f2", "(6, 2)", &halves))),
            ("processed/paper/node_label.npy", plain(floats("(6,)", &[0.0, 1.0, 0.0, f32::NAN, 0.0, 2.0]))),
            ("processed/paper___cites___paper/edge_index.npy", plain(integers("(2, 2)", &[0, 1, 4, 5]))),
            ("split_dict.pt", unpacked(fixture!("tensors.zip.pt"))),
        ],
        request: |files| Request { format: "mag240m".into(), from: Some(files.into()), ..Request::default() },
    }
}

/// MAG240M again: torch's older container and arrays in place of tensors.
pub fn torch() -> Recipe {
    let mut recipe = mag240m();
    recipe.files.retain(|(name, _)| *name != "split_dict.pt");
    recipe.files.insert(0, ("split_dict.pt", plain(fixture!("tensors.legacy.pt"))));
    recipe
}

/// The four kinds of files that torch writes.
pub fn torch_seeds() -> Vec<Vec<u8>> {
    let kinds = [
        &fixture!("tensors.legacy.pt")[..],
        fixture!("arrays.legacy.pt"),
        fixture!("tensors.zip.pt"),
        fixture!("arrays.zip.pt"),
    ];
    kinds.map(|bytes| [&[0, 0], bytes].concat()).into()
}

/// ogbn-papers100M.
pub fn papers100m() -> Recipe {
    let data = members([
        ("edge_index.npy", integers("(2, 3)", &[0, 1, 2, 3, 3, 3])),
        ("node_feat.npy", floats("(4, 2)", &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])),
        ("node_year.npy", integers("(4, 1)", &[2000, 2001, 2002, 2003])),
    ]);
    let labels = members([("node_label.npy", floats("(4, 1)", &[0.0, f32::NAN, 1.0, 2.0]))]);
    Recipe {
        files: vec![
            ("raw/data.npz", data),
            ("raw/node-label.npz", labels),
            ("split/time/train.csv.gz", gzip("0\n")),
            ("split/time/valid.csv.gz", gzip("2\n")),
            ("split/time/test.csv.gz", gzip("3\n1\n")),
        ],
        request: |files| Request {
            format: "papers100m".into(),
            from: Some(files.into()),
            ..Request::default()
        },
    }
}

/// Pickles of every protocol, and those that other formats carry.
pub fn pickles() -> Vec<Vec<u8>> {
    let all = [
        &fixture!("everything.0.pkl")[..],
        fixture!("everything.1.pkl"),
        fixture!("everything.2.pkl"),
        fixture!("everything.3.pkl"),
        fixture!("everything.4.pkl"),
        fixture!("everything.5.pkl"),
        fixture!("planetoid/ind.tiny.graph"),
        fixture!("planetoid/ind.tiny.tx"),
        fixture!("planetoid/ind.tiny.ty"),
    ];
    all.map(|bytes| bytes.to_vec()).into()
}
