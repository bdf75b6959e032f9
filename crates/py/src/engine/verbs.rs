//! The verbs of the program as functions. Requests and results are JSON here, and plain dicts in Python.

use super::arrays::{NumpyArray, ids};
use super::dataset::DiskDataset;
use super::{of_import, of_store, of_train, watched};
use esker_import::generate::{GraphShape, Preset, generate};
use esker_import::{ImportJob, Request, SplitChoice, import};
use esker_nn::CpuBackend;
use esker_sample::Fanout;
use esker_store::Dataset;
use esker_train::{
    BatchProgress, EpochRecord, EvaluationMode, OpenRun, Outcome, RunConfig, RunControl, RunDirectory,
    SplitName, TrainError, Trainer, Watcher, evaluate_run, predict as predict_nodes,
};
use esker_types::{Budget, ByteCount, DeviceName, Dtype, NodeId, Silent, StopSignal};
use pyo3::exceptions::{PyKeyboardInterrupt, PyTypeError, PyValueError};
use pyo3::prelude::*;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Adds the functions.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(train, module)?)?;
    module.add_function(wrap_pyfunction!(evaluate, module)?)?;
    module.add_function(wrap_pyfunction!(predict, module)?)?;
    module.add_function(wrap_pyfunction!(import_, module)?)?;
    module.add_function(wrap_pyfunction!(generate_, module)?)?;
    module.add_function(wrap_pyfunction!(parse_bytes, module)?)
}

fn bad_json(error: serde_json::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn json_of(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(bad_json)
}

/// Bytes of a size such as "4GiB".
#[pyfunction]
fn parse_bytes(text: &str) -> PyResult<u64> {
    let parsed: Result<ByteCount, _> = text.parse();
    parsed.map(|bytes| bytes.0).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Ends a run when it is asked to.
struct StopWatcher(StopSignal);

impl Watcher for StopWatcher {
    fn batch(&mut self, _: &BatchProgress<'_>) {}
    fn stop(&self) -> bool {
        self.0.is_asked()
    }
    fn evaluation(&mut self, _: &str) {}
    fn epoch(&mut self, _: &EpochRecord, _: bool) {}
}

/// Trains a model on the CPU. Returns the summary of the run.
#[pyfunction]
fn train(py: Python<'_>, dataset: PathBuf, out: PathBuf, settings: &str, resume: bool) -> PyResult<String> {
    let settings: Map<String, Value> = serde_json::from_str(settings).map_err(bad_json)?;
    let config = match resume {
        true => RunDirectory::open(&out).map_err(of_train)?.1,
        false => RunConfig::for_dataset(&Dataset::open(&dataset).map_err(of_store)?),
    };
    let config = changed(&config, settings)?;
    if !matches!(config.device, DeviceName::Cpu | DeviceName::Auto) {
        return Err(PyValueError::new_err(
            "esker.train trains on the CPU; train on a GPU with the program, `esker train`",
        ));
    }
    let (stop, config) = (StopSignal::default(), RunConfig { device: DeviceName::Cpu, ..config });
    let control = RunControl { stop: stop.clone(), ..RunControl::default() };
    let asked = stop.clone();
    let outcome = watched(py, &stop, move || {
        let trainer = match resume {
            true => Trainer::resume_watched(CpuBackend::new(), config, &out, control)?,
            false => Trainer::create_watched(CpuBackend::new(), config, &out, control)?,
        };
        trainer.run(&mut StopWatcher(asked))
    })?;
    match outcome.map_err(of_train)? {
        Outcome::Finished(summary) => json_of(&*summary),
        Outcome::Stopped(_) => {
            Err(PyKeyboardInterrupt::new_err("the run is saved: continue it with resume=True"))
        }
    }
}

/// A configuration with some settings changed. Those of the model and the optimizer are named without their part.
fn changed(config: &RunConfig, settings: Map<String, Value>) -> PyResult<RunConfig> {
    let Value::Object(mut all) = serde_json::to_value(config).map_err(bad_json)? else {
        return Err(PyTypeError::new_err("a configuration is an object"));
    };
    let given = |name: &str| settings.contains_key(name);
    let (fanout, eval_fanout, eval, final_eval) =
        (given("fanout"), given("eval_fanout"), given("eval"), given("final_eval"));
    for (name, value) in settings {
        let part = match name.as_str() {
            "model" | "optimizer" => Some((name.as_str(), "kind")),
            _ if all.contains_key(&name) => None,
            _ => ["model", "optimizer"]
                .into_iter()
                .find(|part| all[*part].get(&name).is_some())
                .map(|part| (part, name.as_str())),
        };
        match part {
            Some((part, key)) => all[part][key] = value,
            None if all.contains_key(&name) => drop(all.insert(name, value)),
            None => return Err(PyTypeError::new_err(format!("esker.train has no setting {name}"))),
        }
    }
    let mut config: RunConfig = serde_json::from_value(Value::Object(all)).map_err(bad_json)?;
    let hops = config.model.layers;
    config.fanout = spread(config.fanout, hops);
    if fanout && !eval_fanout {
        config.eval_fanout = config.fanout.clone();
    }
    config.eval_fanout = spread(config.eval_fanout, hops);
    if eval && !final_eval {
        config.final_eval = config.eval;
    }
    Ok(config)
}

/// One fan-out for all hops, or one each.
fn spread(fanouts: Vec<Fanout>, hops: usize) -> Vec<Fanout> {
    let alike = fanouts.windows(2).all(|pair| pair[0] == pair[1]);
    match fanouts.first() {
        Some(first) if alike && fanouts.len() != hops => vec![*first; hops],
        _ => fanouts,
    }
}

/// A run with its best model, to evaluate or predict.
fn open_run(
    run: &Path,
    mode: Option<&str>,
    memory: Option<u64>,
    control: RunControl,
) -> Result<OpenRun<CpuBackend>, TrainError> {
    let (directory, config) = RunDirectory::open(run)?;
    let mode = match mode {
        Some("full") => Some(EvaluationMode::Full),
        Some("sampled") => Some(EvaluationMode::Sampled),
        _ => None,
    };
    let memory = memory.unwrap_or(config.memory);
    let config = RunConfig { memory, device: DeviceName::Cpu, gpu_memory: None, ..config.to_infer(mode) };
    OpenRun::load_watched(CpuBackend::new(), &directory, config, control)
}

/// Evaluates the best model of a run on a split. Returns its metrics.
#[pyfunction]
#[pyo3(signature = (run, split, mode = None, memory = None))]
fn evaluate(
    py: Python<'_>,
    run: PathBuf,
    split: &str,
    mode: Option<&str>,
    memory: Option<u64>,
) -> PyResult<String> {
    let split: SplitName = serde_json::from_value(Value::String(split.into())).map_err(bad_json)?;
    let (stop, mode) = (StopSignal::default(), mode.map(str::to_string));
    let control = RunControl { stop: stop.clone(), ..RunControl::default() };
    let metrics = watched(py, &stop, move || {
        let mut run = open_run(&run, mode.as_deref(), memory, control)?;
        let mode = run.config.final_eval;
        evaluate_run(&mut run, split, mode)
    })?;
    json_of(&metrics.map_err(of_train)?)
}

/// Predicts nodes, or every node. Returns their classes, and probabilities or values per class.
#[pyfunction]
#[pyo3(signature = (run, nodes = None, mode = None, memory = None))]
fn predict(
    py: Python<'_>,
    run: PathBuf,
    nodes: Option<&Bound<'_, PyAny>>,
    mode: Option<&str>,
    memory: Option<u64>,
) -> PyResult<(NumpyArray, NumpyArray)> {
    let nodes =
        nodes.map(ids).transpose()?.map(|nodes| Arc::new(nodes.into_iter().map(NodeId).collect::<Vec<_>>()));
    if let Some(nodes) = &nodes
        && !nodes.is_sorted_by(|one, next| one < next)
    {
        return Err(PyValueError::new_err("nodes to predict must be ascending, each once"));
    }
    let (stop, mode) = (StopSignal::default(), mode.map(str::to_string));
    let control = RunControl { stop: stop.clone(), ..RunControl::default() };
    let found = watched(py, &stop, move || {
        let mut run = open_run(&run, mode.as_deref(), memory, control)?;
        let mode = run.config.final_eval;
        let (mut classes, mut values) = (Vec::new(), Vec::new());
        predict_nodes(&mut run, nodes.as_ref(), mode, &mut |_, predicted, scores| {
            classes.extend(predicted.iter().map(|class| *class as i64));
            values.append(scores);
            Ok(())
        })?;
        Ok::<_, TrainError>((classes, values))
    })?;
    let (classes, values) = found.map_err(of_train)?;
    let rows = classes.len().max(values.len() / values.len().max(1));
    let columns = values.len() / rows.max(1);
    let classes_shape = vec![classes.len()];
    Ok((NumpyArray::integers(classes, classes_shape), NumpyArray::floats(values, vec![rows, columns])))
}

/// Imports a dataset. Returns its directory.
#[pyfunction]
fn import_(
    py: Python<'_>,
    target: PathBuf,
    request: &str,
    memory: Option<u64>,
    overwrite: bool,
) -> PyResult<DiskDataset> {
    let settings: Map<String, Value> = serde_json::from_str(request).map_err(bad_json)?;
    let request = settings.into_iter().try_fold(Request::default(), set)?;
    make(py, target, memory, overwrite, move |job| import(&request, job).map(drop))
}

/// Generates a graph. Returns its directory.
#[pyfunction]
fn generate_(
    py: Python<'_>,
    target: PathBuf,
    preset: Option<&str>,
    scale: f64,
    settings: &str,
    memory: Option<u64>,
    overwrite: bool,
) -> PyResult<DiskDataset> {
    let settings: Map<String, Value> = serde_json::from_str(settings).map_err(bad_json)?;
    let shape = match preset {
        Some(name) => {
            let preset = Preset::by_name(name);
            preset.ok_or_else(|| PyValueError::new_err(format!("there is no preset {name}")))?.shape(scale)
        }
        None => GraphShape::plain(1000),
    };
    let Value::Object(mut all) = serde_json::to_value(shape).map_err(bad_json)? else {
        return Err(PyTypeError::new_err("a shape is an object"));
    };
    for (name, value) in settings {
        if !all.contains_key(&name) {
            return Err(PyTypeError::new_err(format!("esker.generate has no setting {name}")));
        }
        all.insert(name, value);
    }
    let shape: GraphShape = serde_json::from_value(Value::Object(all)).map_err(bad_json)?;
    make(py, target, memory, overwrite, move |job| generate(&shape, job).map(drop))
}

/// Makes a dataset and opens it.
fn make(
    py: Python<'_>,
    target: PathBuf,
    memory: Option<u64>,
    overwrite: bool,
    work: impl FnOnce(&ImportJob) -> Result<(), esker_import::ImportError> + Send,
) -> PyResult<DiskDataset> {
    let budget = Budget::resolve(memory.map(ByteCount));
    let path = target.clone();
    // Import does not look for a stop: killed at any moment, the next one goes on.
    watched(py, &StopSignal::default(), move || {
        work(&ImportJob { target: &path, budget, overwrite, progress: &Silent })
    })?
    .map_err(of_import)?;
    let dataset = Arc::new(Dataset::open(&target).map_err(of_store)?);
    Ok(DiskDataset { dataset })
}

/// Takes a value of a request to import.
fn set(mut request: Request, (name, value): (String, Value)) -> PyResult<Request> {
    let path = || value.as_str().map(PathBuf::from);
    let flag = || value.as_bool().ok_or_else(|| PyTypeError::new_err(format!("{name} is True or False")));
    match name.as_str() {
        "format" => request.format = value.as_str().unwrap_or_default().to_string(),
        "source" => request.from = path(),
        "name" => request.name = value.as_str().map(str::to_string),
        "edges" => request.edges = path(),
        "features" => request.features = path(),
        "features_csr" => request.features_csr = path(),
        "labels" => request.labels = path(),
        "train" => request.train = path(),
        "valid" => request.valid = path(),
        "test" => request.test = path(),
        "indptr" => request.indptr = path(),
        "indices" => request.indices = path(),
        "edge_weights" => request.edge_weights = path(),
        "edge_times" => request.edge_times = path(),
        "edge_features" => request.edge_features = path(),
        "node_ids" => request.node_ids = path(),
        "split" => {
            let split: Result<SplitChoice, _> = value.as_str().unwrap_or_default().parse();
            request.split = Some(split.map_err(of_import)?);
        }
        "nodes" => request.nodes = value.as_u64(),
        "seed" => request.seed = value.as_u64().unwrap_or_default(),
        "dtype" => {
            let dtype: Result<Dtype, _> = value.as_str().unwrap_or_default().parse();
            request.dtype = Some(dtype.map_err(|error| PyValueError::new_err(error.to_string()))?);
        }
        "allow_nan" => request.allow_nan = flag()?,
        "nan_is_unlabelled" => request.nan_is_unlabelled = flag()?,
        "as_stored" => request.as_stored = flag()?,
        "add_reverse" => request.add_reverse = flag()?,
        "remove_duplicates" => request.remove_duplicates = flag()?,
        "remove_self_loops" => request.remove_self_loops = flag()?,
        "largest_component" => request.largest_component = flag()?,
        "row_normalise" => request.row_normalise = flag()?,
        "out_neighbours" => request.out_neighbours = flag()?,
        "keep_positions" => request.keep_positions = flag()?,
        "wide_ids" => request.wide_ids = flag()?,
        _ => return Err(PyTypeError::new_err(format!("esker.import_ has no setting {name}"))),
    }
    Ok(request)
}
