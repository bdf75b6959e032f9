//! Progress on standard error: a bar with rate and time left on a terminal, plain lines in a log.

use crate::note;
use crate::rate::RecentRate;
use esker_types::{ByteCount, Progress, Unit, grouped};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// In a log, a stage that takes long says so this often.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// On a terminal, rate and time left change this often.
const BAR_EVERY: Duration = Duration::from_millis(500);

/// Shows progress on standard error.
pub struct Shown {
    terminal: bool,
    done: AtomicU64,
    stage: Mutex<Option<ShownStage>>,
    notes: Mutex<Vec<String>>,
}

struct ShownStage {
    name: String,
    total: Option<u64>,
    unit: Unit,
    started: Instant,
    rate: RecentRate,
    /// When the next line is due, or the next text of the bar.
    next_line: Instant,
    bar: Option<ProgressBar>,
}

impl Shown {
    pub fn new() -> Shown {
        Shown {
            terminal: std::io::stderr().is_terminal(),
            done: AtomicU64::new(0),
            stage: Mutex::new(None),
            notes: Mutex::new(Vec::new()),
        }
    }

    /// What was noted so far.
    pub fn notes(&self) -> Vec<String> {
        self.notes.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<ShownStage>> {
        self.stage.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn bar(name: &str, total: Option<u64>, unit: Unit) -> ProgressBar {
    let bar = match total {
        Some(total) => ProgressBar::new(total),
        None => ProgressBar::new_spinner(),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(5));
    let counts = match unit {
        Unit::Bytes => "{binary_bytes} of {binary_total_bytes}",
        Unit::Count(_) => "{human_pos} of {human_len}",
    };
    let template = match total {
        Some(_) => format!("  {{msg:17}} {{bar:24}} {{percent:>3}}%  {counts}{{prefix}}"),
        None => "  {msg:17} {spinner} {human_pos}{prefix}".to_string(),
    };
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style.progress_chars("━╸─"));
    }
    bar.set_message(name.to_string());
    bar
}

fn amount(count: u64, unit: Unit) -> String {
    match unit {
        Unit::Bytes => ByteCount(count).to_string(),
        Unit::Count(name) => format!("{} {name}", grouped(count)),
    }
}

impl ShownStage {
    /// Rate and time left, as far as they are known.
    fn speed(&self, done: u64) -> String {
        let Some(rate) = self.rate.per_second() else { return String::new() };
        let left = self.total.and_then(|total| self.rate.seconds_for(total.saturating_sub(done)));
        let left = left.map_or(String::new(), |left| format!(", {left:.0} s left"));
        format!(", {}/s{left}", amount(rate as u64, self.unit))
    }

    fn line(&self, done: u64) -> String {
        match self.total.filter(|total| done < *total && *total > 0) {
            Some(total) => {
                // In 128 bits: bytes of a large dataset times 100 may not fit.
                let percent = done as u128 * 100 / total as u128;
                let of = amount(total, self.unit);
                format!("  {}: {percent}% of {of}{}", self.name, self.speed(done))
            }
            None => self.summary(done),
        }
    }

    /// The line at the end, with the rate over all of it.
    fn summary(&self, done: u64) -> String {
        let seconds = self.started.elapsed().as_secs_f64();
        if done == 0 {
            return format!("  {}: {seconds:.1} s", self.name);
        }
        let per_second = amount((done as f64 / seconds.max(1e-9)) as u64, self.unit);
        format!("  {}: {} in {seconds:.1} s, {per_second}/s", self.name, amount(done, self.unit))
    }
}

impl Progress for Shown {
    fn stage(&self, name: &str, total: Option<u64>, unit: Unit) {
        self.done.store(0, Ordering::Relaxed);
        let bar = self.terminal.then(|| bar(name, total, unit));
        let now = Instant::now();
        *self.lock() = Some(ShownStage {
            name: name.into(),
            total,
            unit,
            started: now,
            rate: RecentRate::default(),
            next_line: if bar.is_some() { now } else { now + LOG_EVERY },
            bar,
        });
    }

    fn advance(&self, count: u64) {
        let done = self.done.fetch_add(count, Ordering::Relaxed) + count;
        let mut stage = self.lock();
        let Some(stage) = stage.as_mut() else { return };
        let now = Instant::now();
        stage.rate.see(now, done);
        match &stage.bar {
            Some(bar) => {
                bar.set_position(done);
                if now >= stage.next_line {
                    bar.set_prefix(stage.speed(done));
                    stage.next_line = now + BAR_EVERY;
                }
            }
            None if now >= stage.next_line => {
                note!("{}", stage.line(done));
                stage.next_line = now + LOG_EVERY;
            }
            None => {}
        }
    }

    fn finish(&self) {
        let Some(stage) = self.lock().take() else { return };
        if let Some(bar) = &stage.bar {
            bar.finish_and_clear();
        }
        note!("{}", stage.summary(self.done.load(Ordering::Relaxed)));
    }

    fn note(&self, text: &str) {
        self.notes.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(text.to_string());
        match self.lock().as_ref().and_then(|stage| stage.bar.as_ref()) {
            Some(bar) => bar.println(format!("note: {text}")),
            None => note!("note: {text}"),
        }
    }
}
