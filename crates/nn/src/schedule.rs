use crate::{NnError, Result};
use serde::{Deserialize, Serialize};

/// The learning rate as a function of the step alone, so that restarts repeat it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", deny_unknown_fields)]
pub enum Schedule {
    /// Constant.
    #[default]
    Constant,
    /// Multiplied by `factor` after every `every` steps.
    Step {
        /// Steps at one rate.
        every: u64,
        /// Factor of the rate.
        factor: f64,
    },
    /// Multiplied by `factor` after each step.
    Exponential {
        /// Factor of the rate.
        factor: f64,
    },
    /// Increases linearly over `warmup` steps, then decreases along half a cosine to `least` of the rate at `steps`.
    Cosine {
        /// Steps of the warm-up.
        warmup: u64,
        /// Total steps.
        steps: u64,
        /// Share of the rate that remains.
        least: f64,
    },
    /// Multiplied by `factor` when more than `patience` evaluations in a row found no better model. Whoever evaluates
    /// counts how often.
    Plateau {
        /// Factor of the rate.
        factor: f64,
        /// Evaluations without a better model that are waited for.
        patience: u64,
    },
    /// Increases linearly over `warmup` steps, then decreases linearly to `least` of the rate at `steps`.
    Linear {
        /// Steps of the warm-up.
        warmup: u64,
        /// Total steps.
        steps: u64,
        /// Share of the rate that remains.
        least: f64,
    },
}

impl Schedule {
    /// Refuses an invalid schedule.
    pub fn check(&self) -> Result<()> {
        match *self {
            Schedule::Constant => Ok(()),
            Schedule::Step { every: 0, .. } => {
                NnError::check_setting(false, "every", 0.0, "a number of steps, at least 1")
            }
            Schedule::Step { factor, .. }
            | Schedule::Exponential { factor }
            | Schedule::Plateau { factor, .. } => {
                let within = (0.0..=10.0).contains(&factor);
                NnError::check_setting(within, "factor", factor as f32, "a number from 0 to 10")
            }
            Schedule::Cosine { warmup, steps, .. } | Schedule::Linear { warmup, steps, .. }
                if warmup > steps =>
            {
                Err(NnError::Warmup { warmup, steps })
            }
            Schedule::Cosine { least, .. } | Schedule::Linear { least, .. } => {
                let within = (0.0..=1.0).contains(&least);
                NnError::check_setting(within, "least", least as f32, "a share of the rate, from 0 to 1")
            }
        }
    }

    /// The learning rate of step `step`, counted from 0.
    pub fn rate(&self, base: f64, step: u64) -> f64 {
        base * match *self {
            Schedule::Constant | Schedule::Plateau { .. } => 1.0,
            Schedule::Step { every, factor } => factor.powf((step / every.max(1)) as f64),
            Schedule::Exponential { factor } => factor.powf(step as f64),
            Schedule::Cosine { warmup, steps, least } => ramp(step, warmup, steps).unwrap_or_else(|way| {
                least + (1.0 - least) * 0.5 * (1.0 + (std::f64::consts::PI * way).cos())
            }),
            Schedule::Linear { warmup, steps, least } => {
                ramp(step, warmup, steps).unwrap_or_else(|way| least + (1.0 - least) * (1.0 - way))
            }
        }
    }
}

impl Schedule {
    /// The factor of the learning rate after so many plateaus; 1 for a schedule without them.
    pub fn after_plateaus(&self, plateaus: u64) -> f64 {
        match *self {
            Schedule::Plateau { factor, .. } => factor.powf(plateaus as f64),
            _ => 1.0,
        }
    }
}

/// `Ok`: the share of the rate during warm-up. `Err`: the progress of the decrease, from 0 to 1.
fn ramp(step: u64, warmup: u64, steps: u64) -> Result<f64, f64> {
    if step < warmup {
        return Ok((step + 1) as f64 / warmup as f64);
    }
    Err(((step - warmup) as f64 / (steps - warmup.min(steps)).max(1) as f64).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(schedule: Schedule, step: u64, expected: f64) {
        assert!(schedule.check().is_ok());
        let found = schedule.rate(0.1, step);
        assert!((found - expected).abs() < 1e-12, "{schedule:?} at {step}: {found}");
    }

    #[test]
    fn rates_follow_their_schedule() {
        check(Schedule::Constant, 1000, 0.1);
        check(Schedule::Step { every: 10, factor: 0.5 }, 9, 0.1);
        check(Schedule::Step { every: 10, factor: 0.5 }, 20, 0.025);
        check(Schedule::Exponential { factor: 0.9 }, 2, 0.081);
        let cosine = Schedule::Cosine { warmup: 10, steps: 110, least: 0.1 };
        check(cosine, 4, 0.05);
        check(cosine, 10, 0.1);
        check(cosine, 60, 0.055);
        check(cosine, 1000, 0.01);
        check(Schedule::Linear { warmup: 0, steps: 100, least: 0.0 }, 25, 0.075);
        let plateau = Schedule::Plateau { factor: 0.5, patience: 1 };
        check(plateau, 1000, 0.1);
        assert_eq!((plateau.after_plateaus(0), plateau.after_plateaus(3)), (1.0, 0.125));
        assert_eq!(Schedule::Constant.after_plateaus(3), 1.0);
    }

    #[test]
    fn nonsense_is_refused() {
        for schedule in [
            Schedule::Step { every: 0, factor: 0.5 },
            Schedule::Exponential { factor: -1.0 },
            Schedule::Linear { warmup: 5, steps: 4, least: 0.0 },
            Schedule::Cosine { warmup: 1, steps: 4, least: 2.0 },
        ] {
            assert!(schedule.check().is_err(), "{schedule:?}");
        }
    }
}
