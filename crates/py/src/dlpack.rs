//! Tensors in and out without a copy, by DLPack: the layout that torch, numpy, cupy and jax agree on, in memory alone. So no
//! library of theirs is linked, and one wheel serves every version.
//!
//! [`Borrowed`] is memory of somebody else's tensor, kept alive as long as it lives. [`Column`] is memory of ours that
//! `torch.from_dlpack` or `numpy.from_dlpack` takes over. Protocol and structs are those of dlpack.h, versions 0 and 1.

use crate::error::DlpackError;
use esker_types::{EdgeId, NodeId};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Mutex;

const UNVERSIONED: &CStr = c"dltensor";
const UNVERSIONED_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

/// Memory of the CPU, or of the CPU pinned for a GPU.
const DEVICE_CPU: i32 = 1;
const DEVICE_PINNED: i32 = 3;

const CODE_INT: u8 = 0;
const CODE_FLOAT: u8 = 2;

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DlDevice {
    kind: i32,
    index: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    dimensions: i32,
    element: DlType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

#[repr(C)]
struct DlManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// A number that tensors hold.
///
/// # Safety
/// It has the size and alignment that `TYPE` says, and every pattern of bits is a value of it.
pub(crate) unsafe trait TensorElement: Copy + Send + Sync + 'static {
    /// Its type in DLPack.
    const TYPE: DlType;
    /// Its name in torch and numpy.
    const NAME: &'static str;
}

macro_rules! elements {
    ($($element:ty, $code:expr, $name:literal;)*) => {$(
        // SAFETY: an integer or a float of its own size, or transparent over one.
        unsafe impl TensorElement for $element {
            const TYPE: DlType = DlType { code: $code, bits: 8 * size_of::<$element>() as u8, lanes: 1 };
            const NAME: &'static str = $name;
        }
    )*};
}

elements! {
    i32, CODE_INT, "int32";
    i64, CODE_INT, "int64";
    f32, CODE_FLOAT, "float32";
    f64, CODE_FLOAT, "float64";
    // torch has no unsigned ids; all of Esker's are below 2^63.
    NodeId, CODE_INT, "int64";
    EdgeId, CODE_INT, "int64";
}

/// A tensor of one dimension that somebody else owns. It lives as long as this, and its owner promises not to change it.
pub(crate) struct Borrowed {
    managed: NonNull<DlManaged>,
    what: &'static str,
}

// SAFETY: DLPack lets the deleter be called on any thread, and the memory is only read.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // SAFETY: `take` made this the only owner of the struct, which stays valid until its deleter was called: once, here.
        unsafe {
            if let Some(deleter) = self.managed.as_ref().deleter {
                deleter(self.managed.as_ptr());
            }
        }
    }
}

impl Borrowed {
    /// Borrows a tensor that lies in memory without gaps. `what` names it in errors.
    pub fn take(tensor: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Borrowed> {
        let capsule = tensor.call_method0("__dlpack__")?;
        // SAFETY: the capsule is a live object, the interpreter lock is held, and the names are static. DLPack says that a
        // capsule named `dltensor` holds a managed tensor, and that renaming it makes the caller its owner.
        let managed = unsafe {
            let pointer = ffi::PyCapsule_GetPointer(capsule.as_ptr(), UNVERSIONED.as_ptr());
            let Some(managed) = NonNull::new(pointer.cast::<DlManaged>()) else {
                return Err(PyErr::fetch(tensor.py()));
            };
            if ffi::PyCapsule_SetName(capsule.as_ptr(), UNVERSIONED_USED.as_ptr()) != 0 {
                return Err(PyErr::fetch(tensor.py()));
            }
            managed
        };
        let borrowed = Borrowed { managed, what };
        borrowed.check()?;
        Ok(borrowed)
    }

    fn tensor(&self) -> &DlTensor {
        // SAFETY: the struct lives until `drop` calls its deleter.
        unsafe { &self.managed.as_ref().tensor }
    }

    fn check(&self) -> Result<(), DlpackError> {
        let (tensor, what) = (self.tensor(), self.what);
        if ![DEVICE_CPU, DEVICE_PINNED].contains(&tensor.device.kind) {
            return Err(DlpackError::Device { what, found: tensor.device.kind });
        }
        if tensor.dimensions != 1 {
            return Err(DlpackError::Dimensions { what, found: tensor.dimensions });
        }
        // SAFETY: there is one dimension, so there is one stride, unless the pointer is null, which means no gaps.
        let stride = unsafe { tensor.strides.as_ref() }.copied().unwrap_or(1);
        if stride != 1 && self.len() > 1 {
            return Err(DlpackError::Gaps { what, stride });
        }
        Ok(())
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        // SAFETY: there is one dimension, checked when it was borrowed, so there is one extent.
        unsafe { *self.tensor().shape as usize }
    }

    /// Whether these are its numbers.
    pub fn is<T: TensorElement>(&self) -> bool {
        self.tensor().element == T::TYPE
    }

    /// Its numbers, if they are of this type.
    pub fn slice<T: TensorElement>(&self) -> Result<&[T], DlpackError> {
        let (tensor, what) = (self.tensor(), self.what);
        if !self.is::<T>() {
            let DlType { code, bits, .. } = tensor.element;
            return Err(DlpackError::Element { what, expected: T::NAME, code, bits });
        }
        if self.len() == 0 {
            return Ok(&[]);
        }
        let start = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize).cast::<T>();
        if start.is_null() || !start.is_aligned() {
            return Err(DlpackError::Address { what });
        }
        // SAFETY: the tensor has this many numbers of this type from here on, without gaps; the address is aligned. They
        // live as long as `self`. Nobody writes to them: callers hand in tensors of their own, or that users were told
        // to leave alone while a loader reads them.
        Ok(unsafe { std::slice::from_raw_parts(start, self.len()) })
    }
}

/// Memory for a tensor, with what keeps it alive.
struct TensorMemory {
    start: *mut c_void,
    element: DlType,
    device: DlDevice,
    shape: Vec<i64>,
    /// Dropped when the tensor is.
    _owner: Box<dyn Send>,
}

// SAFETY: the owner is `Send`, and the pointer is into it.
unsafe impl Send for TensorMemory {}

impl TensorMemory {
    fn tensor(&mut self) -> DlTensor {
        DlTensor {
            data: self.start,
            device: self.device,
            dimensions: self.shape.len() as i32,
            element: self.element,
            shape: self.shape.as_mut_ptr(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        }
    }
}

/// A tensor of ours, until somebody takes it over: by `torch.from_dlpack`, `numpy.from_dlpack` and the like, once.
#[pyclass(module = "esker._esker", frozen)]
pub(crate) struct Column {
    memory: Mutex<Option<TensorMemory>>,
    device: DlDevice,
}

impl Column {
    /// A tensor of this shape, row by row. There are as many numbers as it says.
    pub fn new<T: TensorElement>(numbers: Vec<T>, shape: Vec<usize>) -> Column {
        assert_eq!(numbers.len(), shape.iter().product::<usize>(), "the shape does not fit the numbers");
        let mut numbers = numbers;
        let device = DlDevice { kind: DEVICE_CPU, index: 0 };
        let memory = TensorMemory {
            start: numbers.as_mut_ptr().cast(),
            element: T::TYPE,
            device,
            shape: shape.into_iter().map(|extent| extent as i64).collect(),
            _owner: Box::new(numbers),
        };
        Column { memory: Mutex::new(Some(memory)), device }
    }

    /// A tensor of one dimension.
    pub fn flat<T: TensorElement>(numbers: Vec<T>) -> Column {
        let count = numbers.len();
        Column::new(numbers, vec![count])
    }
}

#[pymethods]
impl Column {
    /// A capsule that owns the memory.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // The memory is written before Python sees it: no stream has to wait for another.
        let _ = stream;
        if copy == Some(true)
            || dl_device.is_some_and(|device| device != (self.device.kind, self.device.index))
        {
            return Err(PyBufferError::new_err(
                "this memory is handed over as it is, where it is, not copied",
            ));
        }
        let memory = self.memory.lock().ok().and_then(|mut memory| memory.take());
        let memory =
            Box::new(memory.ok_or_else(|| PyBufferError::new_err("somebody took over this memory already"))?);
        match max_version {
            Some((1.., _)) => versioned_capsule(py, memory),
            _ => unversioned_capsule(py, memory),
        }
    }

    /// Where the memory is.
    fn __dlpack_device__(&self) -> (i32, i32) {
        (self.device.kind, self.device.index)
    }
}

fn unversioned_capsule<'py>(py: Python<'py>, mut memory: Box<TensorMemory>) -> PyResult<Bound<'py, PyAny>> {
    let tensor = memory.tensor();
    let context = Box::into_raw(memory).cast();
    let managed = Box::into_raw(Box::new(DlManaged { tensor, context, deleter: Some(delete) }));
    // SAFETY: the interpreter lock is held, the name is static, and the pointer stays valid until `delete` frees it.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), UNVERSIONED.as_ptr(), Some(destroy)) };
    if capsule.is_null() {
        // SAFETY: nobody else has the pointer.
        unsafe { delete(managed) };
    }
    // SAFETY: a new reference, or null after an exception was set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

fn versioned_capsule<'py>(py: Python<'py>, mut memory: Box<TensorMemory>) -> PyResult<Bound<'py, PyAny>> {
    let tensor = memory.tensor();
    let context = Box::into_raw(memory).cast();
    let deleter = Some(delete_versioned as unsafe extern "C" fn(*mut DlManagedVersioned));
    let managed = DlManagedVersioned { major: 1, minor: 0, context, deleter, flags: 0, tensor };
    let managed = Box::into_raw(Box::new(managed));
    // SAFETY: as for capsules without a version.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), VERSIONED.as_ptr(), Some(destroy_versioned)) };
    if capsule.is_null() {
        // SAFETY: nobody else has the pointer.
        unsafe { delete_versioned(managed) };
    }
    // SAFETY: a new reference, or null after an exception was set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

unsafe extern "C" fn delete(managed: *mut DlManaged) {
    // SAFETY: both pointers come from `Box::into_raw` in `unversioned_capsule`, and their owner calls this once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<TensorMemory>()));
    }
}

unsafe extern "C" fn delete_versioned(managed: *mut DlManagedVersioned) {
    // SAFETY: both pointers come from `Box::into_raw` in `versioned_capsule`, and their owner calls this once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<TensorMemory>()));
    }
}

/// Frees the memory of a capsule that nobody took over: who does renames it.
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the lock held, once, with a capsule of `unversioned_capsule`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNVERSIONED.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, UNVERSIONED.as_ptr()).cast());
        }
    }
}

/// As [`destroy`], with a version.
unsafe extern "C" fn destroy_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the lock held, once, with a capsule of `versioned_capsule`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}
