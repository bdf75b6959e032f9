//! Shapes of real graphs. Popularity is fitted to DiskGNN's Table 3: under 3-hop sampling with fan-out 10,15,20 and
//! batches of 1024 x scale, the most popular rows get the reported share of accesses; see `docs/generate.md`.

use super::{GraphShape, Popularity};
use esker_types::Dtype;

/// A named shape.
pub struct Preset {
    /// Its name in `--preset`.
    pub name: &'static str,
    /// One line for `--help`.
    pub about: &'static str,
    nodes: u64,
    degree: f64,
    dim: u64,
    dtype: Dtype,
    classes: u64,
    train: f64,
    valid: f64,
    test: f64,
    popularity: Popularity,
}

impl Preset {
    /// The shape with `scale` times the nodes.
    pub fn shape(&self, scale: f64) -> GraphShape {
        GraphShape {
            preset: Some(self.name.to_string()),
            nodes: ((self.nodes as f64 * scale).round() as u64).max(1),
            degree: self.degree,
            dim: self.dim,
            dtype: self.dtype,
            classes: self.classes,
            homophily: 0.7,
            signal: 0.12,
            label_noise: 0.1,
            popularity: self.popularity,
            train: self.train,
            valid: self.valid,
            test: self.test,
            undirected: false,
            out_neighbours: false,
            seed: 1,
        }
    }

    /// The preset of that name.
    pub fn by_name(name: &str) -> Option<&'static Preset> {
        PRESETS.iter().find(|preset| preset.name == name)
    }
}

/// All presets. Counts are those of the real graphs with the edges that papers train on (DiskGNN, Table 2).
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "papers100m",
        about: "ogbn-papers100M with reverse edges: 111 million nodes, 29 in-neighbours, 128-d f32, very skewed",
        nodes: 111_059_956,
        degree: 29.1,
        dim: 128,
        dtype: Dtype::F32,
        classes: 172,
        train: 0.0109,
        valid: 0.0011,
        test: 0.0019,
        popularity: Popularity { exponent: 2.3, plateau: 0.0045, hubs: 0.015 },
    },
    Preset {
        name: "mag240m",
        about: "MAG240M: 244 million nodes, 14 in-neighbours, 768-d f16, the most skewed",
        nodes: 244_160_499,
        degree: 14.2,
        dim: 768,
        dtype: Dtype::F16,
        classes: 153,
        train: 0.0045,
        valid: 0.0006,
        test: 0.0006,
        popularity: Popularity { exponent: 3.0, plateau: 0.008, hubs: 0.03 },
    },
    Preset {
        name: "friendster",
        about: "Friendster: 66 million nodes, 55 in-neighbours, 128-d f32, nearly flat",
        nodes: 65_608_366,
        degree: 55.1,
        dim: 128,
        dtype: Dtype::F32,
        classes: 64,
        train: 0.01,
        valid: 0.002,
        test: 0.002,
        popularity: Popularity { exponent: 1.6, plateau: 0.022, hubs: 0.005 },
    },
    Preset {
        name: "igb",
        about: "IGB-HOM (260 million): 269 million nodes, 15 in-neighbours, 1024-d f32, mildly skewed",
        nodes: 269_346_174,
        degree: 14.8,
        dim: 1024,
        dtype: Dtype::F32,
        classes: 19,
        train: 0.0506,
        valid: 0.0169,
        test: 0.0169,
        popularity: Popularity { exponent: 1.8, plateau: 0.022, hubs: 0.02 },
    },
];
