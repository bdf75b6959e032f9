use std::io::{self, Write};
use std::process::ExitCode;

/// Writes to standard output. A reader that has gone away (`esker info D | head`) is no error.
pub fn print(text: &str) -> anyhow::Result<ExitCode> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Writes one JSON object, alone.
pub fn print_json(value: &serde_json::Value) -> anyhow::Result<ExitCode> {
    print(&format!("{value:#}\n"))
}

/// Lines of `name  value`, names padded to one width.
pub struct TextTable(Vec<(String, String)>);

impl TextTable {
    pub fn new() -> TextTable {
        TextTable(Vec::new())
    }

    pub fn row(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.push((name.into(), value.into()));
    }

    pub fn render(&self) -> String {
        let width = self.0.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        self.0.iter().map(|(name, value)| format!("  {name:width$}  {value}\n")).collect()
    }
}

/// Says something on standard error. A reader that has gone away is no reason to stop working.
pub fn say(text: std::fmt::Arguments) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// `eprintln!` that survives a closed pipe.
#[macro_export]
macro_rules! note {
    ($($words:tt)*) => { $crate::output::say(format_args!($($words)*)) };
}
