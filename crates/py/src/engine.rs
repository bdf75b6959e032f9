//! Batches whose rows come from Esker's engine: datasets on disk, loaders over strategies, and the verbs of the program.
//! The interpreter lock is released while Rust works, and Ctrl-C is looked for meanwhile. Arrays pass to NumPy and torch
//! without a copy, by NumPy's array interface.

mod arrays;
mod dataset;
mod loader;
mod verbs;

use esker_types::{ErrorKind, StopSignal};
use pyo3::exceptions::{
    PyFileNotFoundError, PyKeyboardInterrupt, PyMemoryError, PyOSError, PyPermissionError, PyRuntimeError,
    PyValueError,
};
use pyo3::prelude::*;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// How often Ctrl-C is looked for.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Adds what is defined here to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<arrays::NumpyArray>()?;
    module.add_class::<dataset::DiskDataset>()?;
    module.add_class::<dataset::DiskRowsOf>()?;
    module.add_class::<loader::Promise>()?;
    module.add_class::<loader::EngineLoader>()?;
    module.add_class::<loader::EngineBatch>()?;
    verbs::register(module)
}

/// A Python exception with the text of an error, of the type that fits it.
fn exception(error: impl std::error::Error + 'static, kind: ErrorKind) -> PyErr {
    let text = keywords(&error.to_string());
    if let Some(found) = source_io(&error) {
        match found {
            io::ErrorKind::NotFound => return PyFileNotFoundError::new_err(text),
            io::ErrorKind::PermissionDenied => return PyPermissionError::new_err(text),
            _ => {}
        }
    }
    match kind {
        ErrorKind::Asked => PyValueError::new_err(text),
        ErrorKind::Stopped => PyKeyboardInterrupt::new_err(text),
        ErrorKind::DiskFull | ErrorKind::World => PyOSError::new_err(text),
    }
}

/// The kind of the system error that an error came from, if any.
fn source_io(error: &(dyn std::error::Error + 'static)) -> Option<io::ErrorKind> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<io::Error>() {
            return Some(found.kind());
        }
        next = error.source();
    }
    None
}

/// Flags of the program as keywords: `--disk-budget 4GiB` is `disk_budget="4GiB"` here.
fn keywords(text: &str) -> String {
    let mut words = Vec::new();
    let mut parts = text.split(' ').peekable();
    while let Some(word) = parts.next() {
        let Some(name) =
            word.strip_prefix("--").filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase()))
        else {
            words.push(word.to_string());
            continue;
        };
        let end = name.find(|c: char| !(c.is_ascii_lowercase() || c == '-')).unwrap_or(name.len());
        let (name, rest) = name.split_at(end);
        let name = name.replace('-', "_");
        let value =
            parts.peek().filter(|next| rest.is_empty() && next.starts_with(|c: char| c.is_ascii_digit()));
        match value.map(|next| next.trim_end_matches([',', ';', '.', ')']).to_string()) {
            Some(value) => {
                let next = parts.next().unwrap_or_default();
                words.push(format!("{name}=\"{value}\"{}", &next[value.len()..]));
            }
            None => words.push(format!("{name}={rest}")),
        }
    }
    words.join(" ")
}

fn of_store(error: esker_store::StoreError) -> PyErr {
    let kind = error.kind();
    exception(error, kind)
}

fn of_fetch(error: esker_fetch::FetchError) -> PyErr {
    let kind = error.kind();
    exception(error, kind)
}

fn of_import(error: esker_import::ImportError) -> PyErr {
    let kind = error.kind();
    exception(error, kind)
}

fn of_train(error: esker_train::TrainError) -> PyErr {
    use esker_train::TrainError;
    let kind = error.kind();
    match error {
        TrainError::Memory { .. }
        | TrainError::LoaderMemory { .. }
        | TrainError::SharedMemory { .. }
        | TrainError::DeviceMemory { .. } => PyMemoryError::new_err(keywords(&error.to_string())),
        error => exception(error, kind),
    }
}

/// Runs work on a thread of its own without the interpreter lock. Ctrl-C asks for its end and is raised when it has ended.
fn watched<R: Send>(py: Python<'_>, stop: &StopSignal, work: impl FnOnce() -> R + Send) -> PyResult<R> {
    py.detach(|| {
        std::thread::scope(|scope| {
            let (done, waiting) = sync_channel::<()>(0);
            let thread = scope.spawn(move || {
                // Dropped with the thread, however it ends.
                let _done = done;
                work()
            });
            let mut interrupted = None;
            while waiting.recv_timeout(SIGNALS_EVERY) == Err(RecvTimeoutError::Timeout) {
                if interrupted.is_none()
                    && let Err(error) = Python::attach(|py| py.check_signals())
                {
                    stop.ask();
                    interrupted = Some(error);
                }
            }
            let done = thread.join().map_err(|_| {
                PyRuntimeError::new_err("esker ended unexpectedly; this is a bug of esker: report it")
            })?;
            match interrupted {
                Some(error) => Err(error),
                None => Ok(done),
            }
        })
    })
}
