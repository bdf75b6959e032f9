use crate::{NnError, Result};
use serde::{Deserialize, Serialize};

/// How the learning rate moves with the steps, as a function of the step alone, so that restarts repeat it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", deny_unknown_fields)]
pub enum Schedule {
    /// Not at all.
    #[default]
    Constant,
    /// Times `factor` after every `every` steps.
    Step {
        /// Steps at one rate.
        every: u64,
        /// What the rate is multiplied by.
        factor: f64,
    },
    /// Times `factor` after each step.
    Exponential {
        /// What the rate is multiplied by.
        factor: f64,
    },
    /// Up in a straight line over `warmup` steps, then down half a cosine to `least` of the rate at `steps`.
    Cosine {
        /// Steps of the way up.
        warmup: u64,
        /// Steps in all.
        steps: u64,
        /// Share of the rate that remains.
        least: f64,
    },
    /// Up in a straight line over `warmup` steps, then down in a straight line to `least` of the rate at `steps`.
    Linear {
        /// Steps of the way up.
        warmup: u64,
        /// Steps in all.
        steps: u64,
        /// Share of the rate that remains.
        least: f64,
    },
}

impl Schedule {
    /// Refuses what describes no schedule.
    pub fn check(&self) -> Result<()> {
        let problem = match *self {
            Schedule::Constant => return Ok(()),
            Schedule::Step { every: 0, .. } => "a rate that changes every 0 steps".to_string(),
            Schedule::Step { factor, .. } | Schedule::Exponential { factor }
                if !(0.0..=10.0).contains(&factor) =>
            {
                format!("a rate times {factor}")
            }
            Schedule::Cosine { warmup, steps, .. } | Schedule::Linear { warmup, steps, .. }
                if warmup > steps =>
            {
                format!("{warmup} steps of warm-up of {steps} in all")
            }
            Schedule::Cosine { least, .. } | Schedule::Linear { least, .. }
                if !(0.0..=1.0).contains(&least) =>
            {
                format!("{least} of the rate in the end")
            }
            _ => return Ok(()),
        };
        Err(NnError::config(
            problem,
            "take every of at least 1, a factor from 0 to 10, warmup at most steps, least from 0 to 1",
        ))
    }

    /// The learning rate of step `step`, 0 being the first.
    pub fn rate(&self, base: f64, step: u64) -> f64 {
        base * match *self {
            Schedule::Constant => 1.0,
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

/// The share of the rate on the way up, or how far along the way down the step is.
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
