//! Progress on standard error: a bar with rate and time left on a terminal, plain lines in a log.

use crate::note;
use esker_types::{ByteCount, Progress, Unit, grouped};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// In a log, a stage that takes long says so this often.
const LOG_EVERY: Duration = Duration::from_secs(10);

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
    let (counts, rate) = match unit {
        Unit::Bytes => ("{binary_bytes} of {binary_total_bytes}", "{binary_bytes_per_sec}"),
        Unit::Count(_) => ("{human_pos} of {human_len}", "{per_sec}"),
    };
    let template = match total {
        Some(_) => format!("  {{msg:17}} {{bar:24}} {{percent:>3}}%  {counts}, {rate}, {{eta}} left"),
        None => format!("  {{msg:17}} {{spinner}} {{human_pos}}, {rate}"),
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
    fn line(&self, done: u64) -> String {
        let seconds = self.started.elapsed().as_secs_f64();
        let rate = done as f64 / seconds.max(1e-9);
        let per_second = amount(rate as u64, self.unit);
        match self.total.filter(|total| done < *total && *total > 0) {
            Some(total) => {
                let left = (total - done) as f64 / rate.max(1e-9);
                let percent = done * 100 / total;
                let of = amount(total, self.unit);
                format!("  {}: {percent}% of {of}, {per_second}/s, {left:.0} s left", self.name)
            }
            None if done == 0 => format!("  {}: {seconds:.1} s", self.name),
            None => format!("  {}: {} in {seconds:.1} s, {per_second}/s", self.name, amount(done, self.unit)),
        }
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
            next_line: now + LOG_EVERY,
            bar,
        });
    }

    fn advance(&self, count: u64) {
        let done = self.done.fetch_add(count, Ordering::Relaxed) + count;
        let mut stage = self.lock();
        let Some(stage) = stage.as_mut() else { return };
        match &stage.bar {
            Some(bar) => bar.set_position(done),
            None if Instant::now() >= stage.next_line => {
                note!("{}", stage.line(done));
                stage.next_line = Instant::now() + LOG_EVERY;
            }
            None => {}
        }
    }

    fn finish(&self) {
        let Some(stage) = self.lock().take() else { return };
        if let Some(bar) = &stage.bar {
            bar.finish_and_clear();
        }
        note!("{}", ShownStage { total: None, ..stage }.line(self.done.load(Ordering::Relaxed)));
    }

    fn note(&self, text: &str) {
        self.notes.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(text.to_string());
        match self.lock().as_ref().and_then(|stage| stage.bar.as_ref()) {
            Some(bar) => bar.println(format!("note: {text}")),
            None => note!("note: {text}"),
        }
    }
}
