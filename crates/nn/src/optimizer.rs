//! SGD, Adam, AdamW and Adagrad by PyTorch's formulas, with gradient clipping. State has names, for checkpoints.

use crate::error::SHARE;
use crate::parameter::{named, restore};
use crate::{Backend, Moved, Named, NnError, Parameter, Result, Rule, Shape, Update};
use serde::{Deserialize, Serialize};

/// The update rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Gradient descent, with optional momentum.
    Sgd,
    /// Adam; weight decay is added to the gradient.
    #[default]
    Adam,
    /// Adam; weight decay shrinks the weights themselves.
    AdamW,
    /// Adagrad.
    Adagrad,
}

/// An optimizer as a user describes it. The learning rate is given with each step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The rule.
    pub kind: OptimizerKind,
    /// SGD: momentum.
    pub momentum: f32,
    /// SGD: Nesterov momentum.
    pub nesterov: bool,
    /// Adam: decay of the two moments.
    pub betas: [f32; 2],
    /// Added to denominators; the default is PyTorch's for the rule.
    pub epsilon: Option<f32>,
    /// Weight decay (L2).
    pub weight_decay: f32,
    /// All gradients together are scaled down to this norm.
    pub clip_norm: Option<f32>,
    /// Each gradient is clipped to this absolute value.
    pub clip_value: Option<f32>,
}

impl Default for OptimizerConfig {
    fn default() -> OptimizerConfig {
        OptimizerConfig {
            kind: OptimizerKind::Adam,
            momentum: 0.0,
            nesterov: false,
            betas: [0.9, 0.999],
            epsilon: None,
            weight_decay: 0.0,
            clip_norm: None,
            clip_value: None,
        }
    }
}

impl OptimizerConfig {
    /// Refuses an invalid configuration.
    pub fn check(&self) -> Result<()> {
        for (name, share) in [("momentum", self.momentum), ("beta", self.betas[0]), ("beta", self.betas[1])] {
            NnError::check_setting((0.0..1.0).contains(&share), name, share, SHARE)?;
        }
        if self.nesterov && self.momentum == 0.0 {
            return Err(NnError::NoMomentum);
        }
        let decay = self.weight_decay;
        let within = (0.0..f32::INFINITY).contains(&decay);
        NnError::check_setting(within, "weight_decay", decay, "0 or a finite number above it")?;
        for (name, value) in
            [("epsilon", self.epsilon), ("clip_norm", self.clip_norm), ("clip_value", self.clip_value)]
        {
            let Some(value) = value else { continue };
            NnError::check_setting(value > 0.0, name, value, "a number above 0")?;
        }
        Ok(())
    }

    /// Names of the matrices kept for each parameter.
    pub(crate) fn states(&self) -> &'static [&'static str] {
        match self.kind {
            OptimizerKind::Sgd if self.momentum > 0.0 => &["momentum"],
            OptimizerKind::Sgd => &[],
            OptimizerKind::Adam | OptimizerKind::AdamW => &["first", "second"],
            OptimizerKind::Adagrad => &["sum"],
        }
    }

    fn rule(&self, step: u64) -> Rule {
        match self.kind {
            OptimizerKind::Sgd => Rule::Sgd { momentum: self.momentum, nesterov: self.nesterov },
            OptimizerKind::Adam | OptimizerKind::AdamW => {
                let correction = |beta: f32| 1.0 - (beta as f64).powf(step as f64);
                Rule::Adam {
                    beta1: self.betas[0],
                    beta2: self.betas[1],
                    epsilon: self.epsilon.unwrap_or(1e-8),
                    correction1: correction(self.betas[0]) as f32,
                    correction2_root: correction(self.betas[1]).sqrt() as f32,
                }
            }
            OptimizerKind::Adagrad => Rule::Adagrad { epsilon: self.epsilon.unwrap_or(1e-10) },
        }
    }
}

impl OptimizerConfig {
    /// Number of state matrices of a table of learned rows, and the names of its states.
    pub fn row_states(&self) -> &'static [&'static str] {
        self.states()
    }

    /// The update of learned rows by step `step` (the first is 1) at a learning rate, as of PyTorch's `SparseAdam`,
    /// `Adagrad` and `SGD` with sparse gradients. Refuses what those have no form for: momentum, clipping by the norm,
    /// and weight decay of rows that a step does not touch (AdamW).
    pub fn row_update(&self, step: u64, rate: f64) -> Result<Update> {
        self.check()?;
        let clip = self.clip_norm.unwrap_or(0.0);
        let decay = if self.kind == OptimizerKind::AdamW { self.weight_decay } else { 0.0 };
        for (name, found) in [("momentum", self.momentum), ("clip_norm", clip), ("weight_decay", decay)] {
            if found != 0.0 {
                return Err(NnError::SparseSetting { name, found });
            }
        }
        let mut rule = self.rule(step);
        if let Rule::Adam { epsilon, correction2_root, .. } = &mut rule {
            // `SparseAdam` adds epsilon before the bias correction.
            *epsilon /= *correction2_root;
        }
        let gradient_limit = self.clip_value.unwrap_or(f32::INFINITY);
        let weight_decay = self.weight_decay;
        Ok(Update { rule, rate: rate as f32, clip_norm: None, gradient_limit, weight_decay, shrink: 1.0 })
    }
}

/// A model that an optimizer can update.
pub trait Trained<B: Backend> {
    /// The backend it computes on.
    fn backend(&self) -> &B;
    /// All trained parameters, in a fixed order.
    fn parameters(&self) -> Vec<&Parameter<B>>;
    /// The same, mutable.
    fn parameters_mut(&mut self) -> Vec<&mut Parameter<B>>;
}

/// Updates parameters.
pub struct Optimizer<B: Backend> {
    config: OptimizerConfig,
    /// Steps taken so far.
    steps: u64,
    /// The state matrices of each parameter.
    states: Vec<Vec<B::Matrix>>,
}

impl<B: Backend + Clone> Optimizer<B> {
    /// An optimizer that has taken no step.
    pub fn new(model: &impl Trained<B>, config: &OptimizerConfig) -> Result<Optimizer<B>> {
        config.check()?;
        let backend = model.backend();
        let zeros = |like: &B::Matrix| {
            let mut matrix = backend.matrix(like.rows(), like.columns());
            backend.fill(&mut matrix, 0.0);
            matrix
        };
        let states = model
            .parameters()
            .into_iter()
            .map(|parameter| config.states().iter().map(|_| zeros(&parameter.value)).collect())
            .collect();
        Ok(Optimizer { config: config.clone(), steps: 0, states })
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// One step with the gradients of the last backward pass. If `clip_norm` is given, returns their norm before
    /// clipping. Then infinite or NaN gradients are an error, and no parameter is updated.
    pub fn step(&mut self, model: &mut impl Trained<B>, rate: f64) -> Result<Option<B::Number>> {
        let backend = model.backend().clone();
        let decoupled = self.config.kind == OptimizerKind::AdamW;
        let update = Update {
            rule: self.config.rule(self.steps + 1),
            rate: rate as f32,
            clip_norm: self.config.clip_norm,
            gradient_limit: self.config.clip_value.unwrap_or(f32::INFINITY),
            weight_decay: if decoupled { 0.0 } else { self.config.weight_decay },
            shrink: if decoupled { (1.0 - rate * self.config.weight_decay as f64) as f32 } else { 1.0 },
        };
        let parameters = model.parameters_mut().into_iter().zip(&mut self.states);
        let moved = parameters.map(|(parameter, state)| {
            let Parameter { value, gradient, .. } = parameter;
            Moved { value, gradient, state }
        });
        let norm = backend.update(&update, moved.collect())?;
        self.steps += 1;
        Ok(norm)
    }

    /// Host copies of the state, named after their parameters (`layers.0.self.weight.first`), and the number of steps.
    pub fn export(&self, model: &impl Trained<B>) -> (u64, Vec<Named>) {
        let mut all = Vec::new();
        for (parameter, state) in model.parameters().into_iter().zip(&self.states) {
            for (kind, matrix) in self.config.states().iter().zip(state) {
                all.push(named(model.backend(), &format!("{}.{kind}", parameter.name), matrix));
            }
        }
        (self.steps, all)
    }

    /// Loads the result of `export`.
    pub fn load(&mut self, model: &impl Trained<B>, steps: u64, from: &[Named]) -> Result<()> {
        for (parameter, state) in model.parameters().into_iter().zip(&mut self.states) {
            for (kind, matrix) in self.config.states().iter().zip(state) {
                restore(model.backend(), from, &format!("{}.{kind}", parameter.name), matrix)?;
            }
        }
        self.steps = steps;
        Ok(())
    }
}
