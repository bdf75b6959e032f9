//! Datasets on disk, and rows of them by id.

use super::arrays::{NumpyArray, ids};
use super::{exception, of_fetch, of_store};
use esker_fetch::{ColumnFiles, FeatureRows};
use esker_store::{Dataset, StoreError};
use esker_types::{ErrorKind, NodeId};
use pyo3::exceptions::{PyFileNotFoundError, PyKeyError, PyValueError};
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// A dataset.
#[pyclass(frozen, module = "esker._esker")]
pub struct DiskDataset {
    pub dataset: Arc<Dataset>,
}

#[pymethods]
impl DiskDataset {
    /// Opens a dataset.
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<DiskDataset> {
        let dataset = py.detach(|| Dataset::open(&path)).map_err(|error| match path.exists() {
            true => of_store(error),
            false => PyFileNotFoundError::new_err(error.to_string()),
        })?;
        Ok(DiskDataset { dataset: Arc::new(dataset) })
    }

    /// Another process opens it again.
    fn __getnewargs__(&self) -> (PathBuf,) {
        (self.dataset.directory().to_path_buf(),)
    }

    /// Its directory.
    #[getter]
    fn directory(&self) -> PathBuf {
        self.dataset.directory().to_path_buf()
    }

    /// Its manifest, as JSON.
    fn manifest(&self) -> PyResult<String> {
        serde_json::to_string(self.dataset.manifest())
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Rows of an array as stored, from `first` on; all of them by default.
    #[pyo3(signature = (name, first = 0, count = None))]
    fn read(&self, py: Python<'_>, name: &str, first: u64, count: Option<u64>) -> PyResult<NumpyArray> {
        let array = self.dataset.array(name).ok_or_else(|| self.no_array(name))?;
        let entry = array.entry();
        let left = entry.rows.checked_sub(first);
        let Some(count) = left.map(|left| count.unwrap_or(left)).filter(|count| Some(*count) <= left) else {
            let rows = entry.rows;
            return Err(PyValueError::new_err(format!(
                "{name} has {rows} rows; rows from {first} on were asked for"
            )));
        };
        let (width, dtype) = (entry.columns as usize, entry.dtype);
        let bytes = py.detach(|| read_bytes(array, first, count)).map_err(of_store)?;
        Ok(NumpyArray::stored(bytes, dtype, width))
    }

    /// The rows of an array with these ids, as stored.
    fn gather(&self, py: Python<'_>, name: &str, ids_of: &Bound<'_, PyAny>) -> PyResult<NumpyArray> {
        let asked = ids(ids_of)?;
        let (dataset, names) = (self.dataset.clone(), [name.to_string()]);
        py.detach(move || {
            let columns = ColumnFiles::open(&dataset, &names)?;
            let bytes = columns.reader()?.read(0, asked.into_iter())?;
            let entry = &columns.entries()[0];
            Ok(NumpyArray::stored(bytes, entry.dtype, entry.columns as usize))
        })
        .map_err(of_fetch)
    }
}

impl DiskDataset {
    fn no_array(&self, name: &str) -> PyErr {
        let names: Vec<&str> = self.dataset.arrays().iter().map(|array| &*array.entry().name).collect();
        let directory = self.dataset.directory().display();
        PyKeyError::new_err(format!("{directory} has no array {name}; it has {}", names.join(", ")))
    }
}

/// The bytes of some rows.
fn read_bytes(array: &esker_store::ArrayFile, first: u64, count: u64) -> Result<Vec<u8>, StoreError> {
    let entry = array.entry();
    let start = first * entry.columns;
    let numbers = (count * entry.columns) as usize;
    fn of<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(
        array: &esker_store::ArrayFile,
        start: u64,
        numbers: usize,
    ) -> Result<Vec<u8>, StoreError> {
        let mut values = vec![T::zeroed(); numbers];
        array.read_at(start, &mut values)?;
        Ok(bytemuck::cast_slice(&values).to_vec())
    }
    match entry.dtype.bytes() {
        1 => of::<u8>(array, start, numbers),
        2 => of::<u16>(array, start, numbers),
        4 => of::<u32>(array, start, numbers),
        _ => of::<u64>(array, start, numbers),
    }
}

/// Feature rows of a dataset by node, as f32, through the page cache: none of them stay in the memory of the process.
#[pyclass(frozen, module = "esker._esker")]
pub struct DiskRowsOf {
    rows: FeatureRows,
    threads: usize,
    /// The threads that gather, and the process that made them: a forked one has none of them.
    pool: Mutex<Option<(u32, Arc<ThreadPool>)>>,
}

#[pymethods]
impl DiskRowsOf {
    /// Opens the rows of a dataset, to be read by this many threads.
    #[new]
    #[pyo3(signature = (dataset, threads = 1))]
    fn new(dataset: &DiskDataset, threads: usize) -> PyResult<DiskRowsOf> {
        let rows = FeatureRows::map(&dataset.dataset).map_err(of_fetch)?;
        Ok(DiskRowsOf { rows, threads, pool: Mutex::default() })
    }

    /// Number of rows, and numbers per row.
    #[getter]
    fn shape(&self) -> (u64, usize) {
        (self.rows.rows(), self.rows.dim())
    }

    /// The rows with these ids.
    fn gather(&self, py: Python<'_>, ids_of: &Bound<'_, PyAny>) -> PyResult<NumpyArray> {
        let asked = ids(ids_of)?;
        if let Some(id) = asked.iter().find(|id| **id >= self.rows.rows()) {
            let rows = self.rows.rows();
            return Err(pyo3::exceptions::PyIndexError::new_err(format!(
                "row {id} is asked for, and there are {rows}; ids count from 0"
            )));
        }
        py.detach(|| {
            let (pool, dim) = (self.pool()?, self.rows.dim());
            let nodes: Vec<NodeId> = asked.into_iter().map(NodeId).collect();
            let mut values = vec![0f32; nodes.len() * dim];
            pool.install(|| self.rows.gather(&nodes, &[], &mut values)).map_err(of_fetch)?;
            Ok(NumpyArray::floats(values, vec![nodes.len(), dim]))
        })
    }
}

impl DiskRowsOf {
    fn pool(&self) -> PyResult<Arc<ThreadPool>> {
        let mut kept = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        if let Some((made_by, pool)) = &*kept
            && *made_by == process
        {
            return Ok(pool.clone());
        }
        let pool = ThreadPoolBuilder::new().num_threads(self.threads.max(1)).build();
        let pool = Arc::new(pool.map_err(|error| exception(error, ErrorKind::World))?);
        // Dropping the pool of another process would wait for threads that this one does not have.
        std::mem::forget(kept.replace((process, pool.clone())));
        Ok(pool)
    }
}
