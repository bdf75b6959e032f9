//! Shows a run: a line that moves on a terminal, plain lines in a log.

use super::metrics_text;
use crate::note;
use crate::rate::RecentRate;
use esker_train::StageTimes;
use esker_train::{BatchProgress, EpochRecord, RunConfig, Watcher};
use esker_types::StopSignal;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// In a log, an epoch that takes long says so this often.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// In a log, no more than so many lines about epochs.
const MOST_LINES: u64 = 50;

/// Watches a run for a person.
pub struct Watch {
    stop: StopSignal,
    quiet: bool,
    bar: Option<ProgressBar>,
    epochs: u64,
    /// Batches of this run. Preparing does not count, nor does an evaluation between epochs.
    rate: RecentRate,
    next_line: Instant,
}

impl Watch {
    pub fn new(config: &RunConfig, stop: StopSignal, quiet: bool) -> Watch {
        let terminal = std::io::stderr().is_terminal() && !quiet;
        let now = Instant::now();
        Watch {
            stop,
            quiet,
            bar: terminal.then(bar),
            epochs: config.epochs,
            rate: RecentRate::default(),
            next_line: now + LOG_EVERY,
        }
    }

    fn line(&self, progress: &BatchProgress) -> String {
        let record = progress.record;
        let epochs = (progress.epochs - record.epoch - 1) * progress.batches;
        let left = epochs + progress.batches - record.batch - 1;
        let speed = match (self.rate.per_second(), self.rate.seconds_for(left)) {
            (Some(rate), Some(seconds)) => format!("{rate:.1} batches/s  {seconds:.0} s left  "),
            _ => String::new(),
        };
        let loss = record.loss.map_or("no labels".to_string(), |loss| format!("loss {loss:.4}"));
        format!(
            "epoch {}/{}  batch {}/{}  {loss}  {speed}{}",
            record.epoch + 1,
            progress.epochs,
            record.batch + 1,
            progress.batches,
            bound_by(progress.stages, trainer_seconds(progress.stages))
        )
    }
}

fn bar() -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(5));
    if let Ok(style) = ProgressStyle::with_template("  {spinner} {msg}") {
        bar.set_style(style);
    }
    bar
}

/// All the time of the trainer, whatever it did with it.
fn trainer_seconds(stages: &[StageTimes]) -> f64 {
    let trainer = stages.iter().find(|stage| stage.name == "train");
    trainer.map_or(0.0, |stage| stage.busy + stage.starved + stage.blocked)
}

/// The stage that was busiest, and how busy.
pub fn bound_by(stages: &[StageTimes], seconds: f64) -> String {
    let busiest = stages.iter().max_by(|a, b| a.busy.total_cmp(&b.busy));
    match busiest {
        Some(stage) if seconds > 0.0 => {
            let share = (stage.busy / seconds * 100.0).min(100.0);
            let others = stages.iter().filter(|other| other.name != stage.name);
            let others: Vec<String> = others
                .map(|other| format!("{} {:.0}%", other.name, (other.busy / seconds * 100.0).min(100.0)))
                .collect();
            format!("{} {share:.0}% busy ({})", stage.name, others.join(", "))
        }
        _ => "nothing yet".into(),
    }
}

impl Watcher for Watch {
    fn batch(&mut self, progress: &BatchProgress) {
        let record = &progress.record;
        self.rate.see(Instant::now(), record.epoch * progress.batches + record.batch + 1);
        match &self.bar {
            Some(bar) => bar.set_message(self.line(progress)),
            None if !self.quiet && Instant::now() >= self.next_line => {
                note!("  {}", self.line(progress));
                self.next_line = Instant::now() + LOG_EVERY;
            }
            None => {}
        }
    }

    fn stop(&self) -> bool {
        self.stop.is_asked()
    }

    fn evaluation(&mut self, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("evaluating {what} nodes"));
        }
    }

    fn epoch(&mut self, record: &EpochRecord, best: bool) {
        let valid =
            record.valid.as_ref().map_or(String::new(), |valid| format!("  valid: {}", metrics_text(valid)));
        let mark = if best { " *" } else { "" };
        let line = format!(
            "  epoch {}/{}  loss {:.4}  {:.2} s{valid}{mark}",
            record.epoch + 1,
            self.epochs,
            record.loss,
            record.seconds
        );
        // Every epoch of a short run, some of a long one.
        let every = self.epochs.div_ceil(MOST_LINES).max(1);
        let due = (record.epoch + 1).is_multiple_of(every) || record.epoch + 1 == self.epochs;
        match &self.bar {
            Some(bar) if due => bar.println(line),
            None if due && !self.quiet => note!("{line}"),
            _ => {}
        }
        self.rate = RecentRate::default();
        self.next_line = Instant::now() + LOG_EVERY;
    }
}
