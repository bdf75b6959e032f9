//! Every real dataset imports with the counts stated by its source.

use super::Bench;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// A dataset: name, flags (`DATA` is the directory of datasets), and the expected output of `esker info`.
type Case = (&'static str, &'static str, &'static [(&'static str, u64)]);

const CASES: &[Case] = &[
    (
        "cora",
        "--format planetoid --from DATA/cora --name cora",
        &[
            ("nodes", 2708),
            ("edges", 2 * 5278),
            ("feature_dim", 1433),
            ("classes", 7),
            ("train", 140),
            ("valid", 500),
            ("test", 1000),
        ],
    ),
    (
        "citeseer",
        "--format planetoid --from DATA/citeseer --name citeseer",
        &[
            ("nodes", 3327),
            ("edges", 2 * 4552),
            ("feature_dim", 3703),
            ("classes", 6),
            ("train", 120),
            ("valid", 500),
            ("test", 1000),
        ],
    ),
    (
        "pubmed",
        "--format planetoid --from DATA/pubmed --name pubmed",
        &[
            ("nodes", 19_717),
            ("edges", 2 * 44_324),
            ("feature_dim", 500),
            ("classes", 3),
            ("train", 60),
            ("valid", 500),
            ("test", 1000),
        ],
    ),
    (
        "amazon_computers",
        "--format gnn-npz --from DATA/amazon_computers/amazon_cs.npz",
        &[("nodes", 13_752), ("edges", 2 * 245_861), ("feature_dim", 767), ("classes", 10)],
    ),
    (
        "amazon_computers, largest component",
        "--format gnn-npz --from DATA/amazon_computers/amazon_cs.npz --largest-component --split per-class:20,30",
        &[
            ("nodes", 13_381),
            ("edges", 2 * 245_778),
            ("classes", 10),
            ("train", 200),
            ("valid", 300),
            ("test", 12_881),
        ],
    ),
    (
        "coauthor_cs",
        "--format gnn-npz --from DATA/coauthor_cs/coauthor_cs.npz",
        &[("nodes", 18_333), ("edges", 2 * 81_894), ("feature_dim", 6805), ("classes", 15)],
    ),
    (
        "tolokers",
        "--format masked-npz --from DATA/tolokers/tolokers.npz",
        &[
            ("nodes", 11_758),
            ("edges", 2 * 519_000),
            ("feature_dim", 10),
            ("classes", 2),
            ("train", 5879),
            ("valid", 2939),
            ("test", 2940),
        ],
    ),
    (
        "deezer_europe",
        "--format musae --from DATA/deezer_europe",
        &[
            ("nodes", 28_281),
            ("edges", 2 * 92_752),
            ("feature_dim", 31_241),
            ("classes", 2),
            ("train", 14_140),
            ("valid", 7070),
            ("test", 7071),
        ],
    ),
    (
        "wordnet-synsets",
        "--format csv --edges DATA/wordnet-synsets/edges.tsv.gz --delimiter tab --features-csr DATA/wordnet-synsets/features.npz --labels DATA/wordnet-synsets/labels.npy --split DATA/wordnet-synsets/split.npy",
        &[
            ("nodes", 117_659),
            ("edges", 364_552),
            ("feature_dim", 1000),
            ("classes", 45),
            ("relations", 26),
            ("train", 70_595),
            ("valid", 23_532),
            ("test", 23_532),
        ],
    ),
    (
        "fb15k-237",
        "--format triples --from DATA/fb15k-237",
        &[
            ("nodes", 14_541),
            ("edges", 272_115),
            ("relations", 237),
            ("train", 272_115),
            ("valid", 17_535),
            ("test", 20_466),
        ],
    ),
    (
        "wn18rr",
        "--format triples --from DATA/wn18rr",
        &[
            ("nodes", 40_943),
            ("edges", 86_835),
            ("relations", 11),
            ("train", 86_835),
            ("valid", 3034),
            ("test", 3134),
        ],
    ),
];

/// Imports and verifies every dataset; `None` if they are missing.
pub fn import_all(bench: &Bench) -> Result<Option<Value>> {
    let Some(data) = crate::real_data() else { return Ok(None) };
    let data = data.to_str().context("the path of the datasets is not text")?;
    let mut figures = Vec::new();
    for (name, flags, expected) in CASES {
        let flags = flags.replace("DATA", data);
        let mut words = vec!["import", "imported", "--memory", "256MiB", "--overwrite"];
        words.extend(flags.split(' '));
        let found = bench.json(&words)?;
        for (key, value) in *expected {
            ensure!(found[*key] == *value, "{name}: {key} is {}, its source says {value}", found[*key]);
        }
        bench.json(&["verify", "imported"])?;
        figures.push(json!({
            "name": name, "nodes": found["nodes"], "edges": found["edges"], "bytes": found["bytes"],
            "feature_dtype": found["feature_dtype"], "seconds": found["seconds"], "peak_host_bytes": found["peak_host_bytes"],
        }));
    }
    Ok(Some(json!({ "budget_host_bytes": 256u64 << 20, "datasets": figures })))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    import_all(bench)?.context("the real datasets are not beside the checkout")
}
