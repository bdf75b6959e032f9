use crate::{Backend, NnError, Result, Shape};
use esker_types::random::Key;

/// A trained matrix and its gradient.
pub struct Parameter<B: Backend> {
    /// Its name in the model: `layers.0.self.weight`.
    pub name: String,
    /// The numbers.
    pub value: B::Matrix,
    /// Overwritten by each backward pass.
    pub gradient: B::Matrix,
}

/// Numbers with a name and a shape, in host memory: an entry of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Named {
    /// The name.
    pub name: String,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// The numbers, row after row.
    pub values: Vec<f32>,
}

/// Makes parameters one after another, each from its own stream of random numbers.
pub(crate) struct Maker<'a, B: Backend> {
    pub backend: &'a B,
    pub key: Key,
    pub prefix: String,
    pub made: u64,
}

impl<B: Backend> Maker<'_, B> {
    /// Uniform numbers between plus and minus `bound`; 0 gives zeros.
    pub fn uniform(&mut self, name: &str, rows: usize, columns: usize, bound: f32) -> Parameter<B> {
        let key = self.key.with(self.made);
        self.made += 1;
        self.of(name, rows, columns, |value| self.backend.fill_uniform(value, key, bound))
    }

    /// A row of equal numbers.
    pub fn constant(&mut self, name: &str, columns: usize, value: f32) -> Parameter<B> {
        self.of(name, 1, columns, |matrix| self.backend.fill(matrix, value))
    }

    /// A weight with the initial values of PyTorch's linear layers: within the reciprocal root of its inputs.
    pub fn linear(&mut self, name: &str, outputs: usize, inputs: usize) -> Parameter<B> {
        self.uniform(name, outputs, inputs, 1.0 / (inputs as f32).sqrt())
    }

    /// Its bias.
    pub fn linear_bias(&mut self, name: &str, outputs: usize, inputs: usize) -> Parameter<B> {
        self.uniform(name, 1, outputs, 1.0 / (inputs as f32).sqrt())
    }

    /// A weight by Glorot's rule, the initial values of PyG's GCN and GAT.
    pub fn glorot(&mut self, name: &str, outputs: usize, inputs: usize) -> Parameter<B> {
        self.uniform(name, outputs, inputs, (6.0 / (outputs + inputs) as f32).sqrt())
    }

    fn of(&self, name: &str, rows: usize, columns: usize, set: impl FnOnce(&mut B::Matrix)) -> Parameter<B> {
        let mut value = self.backend.matrix(rows, columns);
        set(&mut value);
        let mut gradient = self.backend.matrix(rows, columns);
        self.backend.fill(&mut gradient, 0.0);
        Parameter { name: format!("{}{name}", self.prefix), value, gradient }
    }
}

/// A host copy of a matrix.
pub(crate) fn named<B: Backend>(backend: &B, name: &str, matrix: &B::Matrix) -> Named {
    let shape = [matrix.rows(), matrix.columns()];
    let mut values = vec![0.0; shape[0] * shape[1]];
    backend.read(matrix, 0, &mut values);
    Named { name: name.to_string(), shape, values }
}

/// Writes the numbers of that name into the matrix.
pub(crate) fn restore<B: Backend>(
    backend: &B,
    from: &[Named],
    name: &str,
    matrix: &mut B::Matrix,
) -> Result<()> {
    let shape = [matrix.rows(), matrix.columns()];
    let found = from.iter().find(|found| found.name == name);
    match found {
        Some(found) if found.shape == shape && found.values.len() == shape[0] * shape[1] => {
            backend.write(matrix, 0, &found.values);
            Ok(())
        }
        _ => {
            let (name, found) = (name.to_string(), found.map(|found| found.shape));
            Err(NnError::Load { name, expected: shape, found })
        }
    }
}

/// Host copies of parameters, for a checkpoint.
pub fn export_parameters<B: Backend>(backend: &B, parameters: &[&Parameter<B>]) -> Vec<Named> {
    parameters.iter().map(|parameter| named(backend, &parameter.name, &parameter.value)).collect()
}

/// Loads the result of [`export_parameters`]. Names and shapes must match.
pub fn load_parameters<B: Backend>(
    backend: &B,
    from: &[Named],
    parameters: Vec<&mut Parameter<B>>,
) -> Result<()> {
    parameters
        .into_iter()
        .try_for_each(|parameter| restore(backend, from, &parameter.name, &mut parameter.value))
}
