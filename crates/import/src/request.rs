use crate::source::LabelKind;
use crate::{ImportError, Result};
use esker_types::Dtype;
use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

/// The user's import request, resolved. Everything in it that affects the result is part of the fingerprint, which
/// decides whether an interrupted import can be resumed. Memory and threads are not part of it.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct Request {
    /// The format's name.
    pub format: String,
    /// Directory or file of the dataset, for formats with a layout of their own.
    pub from: Option<PathBuf>,
    /// Name inside that directory (Planetoid: `cora`; OGB: the split).
    pub name: Option<String>,
    /// Edge list.
    pub edges: Option<PathBuf>,
    /// Dense feature matrix.
    pub features: Option<PathBuf>,
    /// Sparse feature matrix, a scipy CSR npz.
    pub features_csr: Option<PathBuf>,
    /// Labels.
    pub labels: Option<PathBuf>,
    /// Meaning of the labels, if the format's guess is wrong.
    pub label_kind: Option<LabelKind>,
    /// NaN labels mean "no label".
    pub nan_is_unlabelled: bool,
    /// NaN and infinite features are accepted.
    pub allow_nan: bool,
    /// Training ids.
    pub train: Option<PathBuf>,
    /// Validation ids.
    pub valid: Option<PathBuf>,
    /// Test ids.
    pub test: Option<PathBuf>,
    /// A split to make, or a file with one.
    pub split: Option<SplitChoice>,
    /// Edges to hold out for validation and test.
    pub hold_out: Option<HoldOut>,
    /// Index of the split, in a file with several.
    pub split_index: usize,
    /// CSC: start of each node's in-neighbours.
    pub indptr: Option<PathBuf>,
    /// CSC: in-neighbours.
    pub indices: Option<PathBuf>,
    /// Field separator of text files.
    pub delimiter: Option<char>,
    /// Columns of the edge list by header name or number from 0: source, target, and optional relation, weight, time.
    pub columns: EdgeColumnNames,
    /// Whether the edge list starts with a header; guessed if not given.
    pub header: Option<bool>,
    /// File of string ids, one per line, in the order of the feature rows.
    pub node_ids: Option<PathBuf>,
    /// Edge weights, an npy in edge order.
    pub edge_weights: Option<PathBuf>,
    /// Edge times, an npy in edge order.
    pub edge_times: Option<PathBuf>,
    /// Edge feature rows, an npy in edge order.
    pub edge_features: Option<PathBuf>,
    /// Ids in the edge list are strings even if they look like numbers.
    pub string_ids: bool,
    /// Number of nodes, if no file determines it.
    pub nodes: Option<u64>,
    /// Take edges exactly as stored, whatever is usual for the format.
    pub as_stored: bool,
    /// Add the reverse of every edge.
    pub add_reverse: bool,
    /// Keep one of several equal edges.
    pub remove_duplicates: bool,
    /// Drop self-loops.
    pub remove_self_loops: bool,
    /// Keep the largest weakly connected component.
    pub largest_component: bool,
    /// Divide each feature row by its sum.
    pub row_normalise: bool,
    /// Store features in this dtype.
    pub dtype: Option<Dtype>,
    /// Store out-neighbours too.
    pub out_neighbours: bool,
    /// Store each edge's position in the original list.
    pub keep_positions: bool,
    /// Random seed of splits that are drawn.
    pub seed: u64,
    /// Store 64-bit ids even if 32 bits are enough.
    pub wide_ids: bool,
}

/// Names of the edge list's columns.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct EdgeColumnNames {
    /// Message source.
    pub source: Option<String>,
    /// Message target.
    pub target: Option<String>,
    /// Edge type.
    pub relation: Option<String>,
    /// Weight.
    pub weight: Option<String>,
    /// Time.
    pub time: Option<String>,
}

/// The split, if the format has none or its own is not to be used.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SplitChoice {
    /// This many training and validation nodes of each class; the other labelled nodes are test nodes.
    PerClass {
        /// Training nodes per class.
        train: u64,
        /// Validation nodes per class.
        valid: u64,
    },
    /// Shares of the labelled nodes (of all nodes if there are no labels).
    Share {
        /// Training share.
        train: f64,
        /// Validation share.
        valid: f64,
        /// Test share.
        test: f64,
    },
    /// A file with the split.
    File(PathBuf),
}

impl FromStr for SplitChoice {
    type Err = ImportError;

    fn from_str(word: &str) -> Result<SplitChoice> {
        if let Some(counts) = word.strip_prefix("per-class:") {
            let counts: Vec<u64> = counts
                .split(',')
                .map(|n| n.trim().parse().map_err(|_| ImportError::NoCount { word: n.to_string() }))
                .collect::<Result<_>>()?;
            return match counts[..] {
                [train, valid] => Ok(SplitChoice::PerClass { train, valid }),
                _ => Err(ImportError::NoCounts { word: word.to_string() }),
            };
        }
        if let Some(shares) = word.strip_prefix("share:") {
            let shares: Vec<f64> = shares
                .split(',')
                .map(|n| n.trim().parse().map_err(|_| ImportError::NoShare { word: n.to_string() }))
                .collect::<Result<_>>()?;
            return match shares[..] {
                [train, valid, test]
                    if shares.iter().all(|s| (0.0..=1.0).contains(s))
                        && shares.iter().sum::<f64>() <= 1.0 + 1e-9 =>
                {
                    Ok(SplitChoice::Share { train, valid, test })
                }
                _ => Err(ImportError::NoShares { word: word.to_string() }),
            };
        }
        Ok(SplitChoice::File(word.into()))
    }
}

/// Edges to hold out, written `valid:5%,test:10%`.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct HoldOut {
    /// Validation edges.
    pub valid: HeldOutCount,
    /// Test edges.
    pub test: HeldOutCount,
}

/// How many edges are held out. The two directions of an undirected edge count once.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeldOutCount {
    /// This many.
    Edges(u64),
    /// This share of all edges, rounded to the nearest.
    Share(f64),
}

impl HoldOut {
    /// Validation and test.
    pub(crate) fn counts(&self) -> [HeldOutCount; 2] {
        [self.valid, self.test]
    }
}

impl FromStr for HoldOut {
    type Err = ImportError;

    fn from_str(text: &str) -> Result<HoldOut> {
        let bad = || ImportError::NoHoldOut { word: text.to_string() };
        let (mut valid, mut test) = (None, None);
        for part in text.split(',') {
            let (name, count) = part.trim().split_once(':').ok_or_else(bad)?;
            let count = match count.strip_suffix('%') {
                Some(percent) => {
                    percent.parse().ok().map(|percent: f64| HeldOutCount::Share(percent / 100.0))
                }
                None => count.parse().ok().map(HeldOutCount::Edges),
            };
            let slot = match name {
                "valid" => &mut valid,
                "test" => &mut test,
                _ => return Err(bad()),
            };
            if slot.replace(count.ok_or_else(bad)?).is_some() {
                return Err(bad());
            }
        }
        let none = HeldOutCount::Edges(0);
        let hold_out = HoldOut { valid: valid.unwrap_or(none), test: test.unwrap_or(none) };
        let share = |count| if let HeldOutCount::Share(share) = count { share } else { 0.0 };
        let shares = hold_out.counts().map(share);
        match shares.iter().all(|share| (0.0..1.0).contains(share)) && shares.iter().sum::<f64>() < 1.0 {
            true => Ok(hold_out),
            false => Err(bad()),
        }
    }
}

impl Request {
    /// A copy in which non-UTF-8 parts of paths are replaced, for people to read.
    pub(crate) fn with_readable_paths(&self) -> Request {
        let mut request = self.clone();
        let split = match &mut request.split {
            Some(SplitChoice::File(path)) => Some(path),
            _ => None,
        };
        let paths = [
            &mut request.from,
            &mut request.edges,
            &mut request.features,
            &mut request.features_csr,
            &mut request.labels,
            &mut request.train,
            &mut request.valid,
            &mut request.test,
            &mut request.indptr,
            &mut request.indices,
            &mut request.node_ids,
            &mut request.edge_weights,
            &mut request.edge_times,
            &mut request.edge_features,
        ];
        for path in paths.into_iter().flatten().chain(split) {
            *path = path.to_string_lossy().into_owned().into();
        }
        request
    }

    /// The names of the given input flags, without those that every format accepts.
    pub(crate) fn given_flags(&self) -> Vec<&'static str> {
        let flags = [
            ("from", self.from.is_some()),
            ("name", self.name.is_some()),
            ("edges", self.edges.is_some()),
            ("indptr", self.indptr.is_some()),
            ("indices", self.indices.is_some()),
            ("features", self.features.is_some()),
            ("features-csr", self.features_csr.is_some()),
            ("labels", self.labels.is_some()),
            ("train", self.train.is_some()),
            ("valid", self.valid.is_some()),
            ("test", self.test.is_some()),
            ("split", matches!(self.split, Some(SplitChoice::File(_)))),
            ("split-index", self.split_index != 0),
            ("delimiter", self.delimiter.is_some()),
            ("columns", self.columns != EdgeColumnNames::default()),
            ("header", self.header.is_some()),
            ("node-ids", self.node_ids.is_some()),
            ("edge-weights", self.edge_weights.is_some()),
            ("edge-times", self.edge_times.is_some()),
            ("string-ids", self.string_ids),
            ("nodes", self.nodes.is_some()),
        ];
        flags.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }

    /// The value of a flag that this format requires.
    pub fn need<'a>(&self, value: &'a Option<PathBuf>, flag: &'static str) -> Result<&'a Path> {
        value.as_deref().ok_or_else(|| ImportError::NoFlag { format: self.format.clone(), flag })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_to_hold_out_are_read_as_people_write_them() {
        let read = |text: &str| text.parse::<HoldOut>();
        let (share, edges) = (HeldOutCount::Share, HeldOutCount::Edges);
        assert_eq!(read("valid:5%,test:10%").unwrap(), HoldOut { valid: share(0.05), test: share(0.1) });
        assert_eq!(read("test:100, valid:7").unwrap(), HoldOut { valid: edges(7), test: edges(100) });
        assert_eq!(read("test:2.5%").unwrap(), HoldOut { valid: edges(0), test: share(0.025) });
        for text in [
            "",
            "5%",
            "valid:5%,valid:6%",
            "train:5%",
            "valid:-1%",
            "test:100%",
            "valid:60%,test:40%",
            "test:x",
        ] {
            let said = read(text).unwrap_err().to_string();
            assert!(said.contains("valid:5%,test:10%"), "{text}: {said}");
        }
    }

    #[test]
    fn splits_are_read_as_people_write_them() {
        let read = |word: &str| word.parse::<SplitChoice>().unwrap();
        assert_eq!(read("per-class:20,30"), SplitChoice::PerClass { train: 20, valid: 30 });
        assert_eq!(read("share:0.6,0.2,0.2"), SplitChoice::Share { train: 0.6, valid: 0.2, test: 0.2 });
        assert_eq!(read("S.npy"), SplitChoice::File("S.npy".into()));
        for word in ["per-class:20", "per-class:a,b", "share:0.9,0.9,0.1", "share:1"] {
            assert!(word.parse::<SplitChoice>().is_err(), "{word}");
        }
    }
}
