//! A GPU: its context, the compute stream, the copy stream, and the work launched on them.

use crate::blas::Blas;
use crate::compiled::{CompiledKernels, cache_directory};
use crate::kernels::{SOURCES, Source};
use crate::library::Library;
use crate::memory::DevicePool;
use crate::pinned::{PinnedPool, Slots};
use crate::{CudaError, Precision, Result};
use cudarc::driver::sys;
use esker_types::ByteCount;
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString, c_int};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The oldest supported driver: CUDA 12.0.
const OLDEST_DRIVER: i32 = 12000;

/// The oldest GPUs that kernels are compiled for: Turing.
const OLDEST_CAPABILITY: (u32, u32) = (7, 5);

/// Properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    /// Its number.
    pub number: u32,
    /// Its model.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Its memory.
    pub memory_bytes: u64,
    /// Its free memory.
    pub free_bytes: u64,
    /// The CUDA version that the driver supports: 13000 for 13.0.
    pub driver_version: i32,
    /// Multiprocessors.
    pub processors: u32,
}

/// An open GPU. Clones share it. Work is launched and runs asynchronously. The first failure is kept, nothing more is
/// launched after it, and [`Gpu::check`] returns it.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// Unique among the GPUs opened in this process.
    id: u64,
    pub compute: CudaStream,
    pub copy: CudaStream,
    pub info: GpuInfo,
    pub pool: DevicePool,
    pub pinned: PinnedPool,
    pub slots: OnceLock<Slots>,
    blas: OnceLock<Result<Mutex<Blas>>>,
    precision: Precision,
    functions: Mutex<HashMap<String, Function>>,
    modules: Mutex<HashMap<&'static str, Module>>,
    compiled: CompiledKernels,
    failed: AtomicBool,
    failure: Mutex<Option<CudaError>>,
    launches: AtomicU64,
    pub timings: Mutex<Timings>,
}

/// Events around work, converted to seconds when they are reached.
#[derive(Default)]
pub(crate) struct Timings {
    /// Start of the training step that is being launched.
    step: Option<Event>,
    steps: Timed,
    copies: Timed,
}

#[derive(Default)]
struct Timed {
    waiting: VecDeque<(Event, Event)>,
    seconds: f64,
}

impl Timed {
    fn push(&mut self, start: Event, end: Event) {
        self.waiting.push_back((start, end));
        self.resolve();
    }

    fn resolve(&mut self) {
        while let Some((start, end)) = self.waiting.front() {
            if !end.is_reached() {
                return;
            }
            self.seconds += end.seconds_since(start).unwrap_or(0.0);
            self.waiting.pop_front();
        }
    }
}

/// A kernel that can be launched.
#[derive(Clone, Copy)]
struct Function(sys::CUfunction);
#[derive(Clone, Copy)]
struct Module(sys::CUmodule);
// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Send for Module {}

/// A CUDA stream: its work runs in order.
pub(crate) struct CudaStream(sys::CUstream);
// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for CudaStream {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for CudaStream {}

// SAFETY: the context is a handle of the driver, which may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above; all mutable state is protected by locks.
unsafe impl Sync for Inner {}

thread_local! {
    /// The id of the GPU that is current on this thread.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Converts a driver result into a [`Result`].
pub(crate) fn done(what: &'static str, result: sys::CUresult) -> Result<()> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |get: unsafe fn(sys::CUresult, *mut *const i8) -> sys::CUresult| {
        let mut text = ptr::null();
        // SAFETY: the call writes a pointer to a text that is never freed, or leaves null.
        unsafe {
            get(result, &mut text);
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        }
    };
    let found = format!("{} ({})", text(sys::cuGetErrorName), text(sys::cuGetErrorString));
    if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return Err(CudaError::Full { what, found });
    }
    Err(CudaError::Call { what, found })
}

/// Initialises the driver and returns its version.
fn start_driver() -> Result<i32> {
    Library::Driver.open()?;
    let refused = |problem: String| CudaError::Library {
        library: Library::Driver.name(),
        problem,
        remedy: "install a driver that serves CUDA 12 or later and see whether `nvidia-smi` works; or take --device cpu",
    };
    let mut version = 0;
    // SAFETY: the library is open; the calls write to their arguments.
    unsafe {
        done("starting the driver", sys::cuInit(0)).map_err(|error| refused(error.to_string()))?;
        done("asking for the driver's version", sys::cuDriverGetVersion(&mut version))?;
    }
    if version < OLDEST_DRIVER {
        return Err(refused(format!("the driver serves CUDA {}.{}", version / 1000, version % 1000 / 10)));
    }
    Ok(version)
}

fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<u32> {
    let mut value: c_int = 0;
    // SAFETY: the call writes to the number.
    done("asking about the GPU", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
    Ok(value.max(0) as u32)
}

/// Number of GPUs.
pub fn count() -> Result<u32> {
    start_driver()?;
    let mut count: c_int = 0;
    // SAFETY: the call writes to the number.
    done("counting GPUs", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(count.max(0) as u32)
}

impl Gpu {
    /// Opens a GPU and limits its memory to `most_bytes`, or to all free memory except a reserve.
    pub fn open(number: u32, most_bytes: Option<u64>, precision: Precision) -> Result<Gpu> {
        Gpu::open_with(number, most_bytes, precision, false)
    }

    /// Like [`Gpu::open`], but with allocations of exactly the requested sizes and no reuse of memory. This is slow;
    /// tools that look for stray accesses need it.
    pub fn open_exact(number: u32, precision: Precision) -> Result<Gpu> {
        Gpu::open_with(number, None, precision, true)
    }

    fn open_with(number: u32, most_bytes: Option<u64>, precision: Precision, exact: bool) -> Result<Gpu> {
        // Large libraries are read from disk while the driver starts, which takes tenths of a second.
        let libraries =
            std::thread::spawn(|| [Library::Nvrtc, Library::Cublas].map(|library| drop(library.open())));
        let started = start_driver().and_then(|version| Ok((version, count()?)));
        let _ = libraries.join();
        let (driver_version, found) = started?;
        if number >= found {
            return Err(CudaError::NoDevice { asked: number, found });
        }
        Library::Nvrtc.open()?;
        Library::Cublas.open()?;
        // From here on, calls of this thread go to the new GPU.
        CURRENT.set(0);
        let (mut device, mut context) = (0, ptr::null_mut());
        let mut name = [0u8; 256];
        let (mut total, mut free, mut whole) = (0, 0, 0);
        // SAFETY: every call writes to its arguments, with the sizes given.
        unsafe {
            done("finding the GPU", sys::cuDeviceGet(&mut device, number as c_int))?;
            done("naming the GPU", sys::cuDeviceGetName(name.as_mut_ptr().cast(), 255, device))?;
            done("asking for the GPU's memory", sys::cuDeviceTotalMem_v2(&mut total, device))?;
            done("opening the GPU", sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
            done("opening the GPU", sys::cuCtxSetCurrent(context))?;
            done("asking for free memory", sys::cuMemGetInfo_v2(&mut free, &mut whole))?;
        }
        use sys::CUdevice_attribute as Attribute;
        let major = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let info = GpuInfo {
            number,
            name,
            capability: (major, minor),
            memory_bytes: total as u64,
            free_bytes: free as u64,
            driver_version,
            processors,
        };
        info.check(precision)?;
        let limit = most_bytes.unwrap_or(info.default_limit());
        if limit > info.free_bytes {
            let (asked, free) = (ByteCount(limit), ByteCount(info.free_bytes));
            return Err(CudaError::Memory { asked, held: ByteCount(0), limit: asked, free });
        }
        static OPENED: AtomicU64 = AtomicU64::new(1);
        Ok(Gpu {
            inner: Arc::new(Inner {
                device,
                context,
                id: OPENED.fetch_add(1, Relaxed),
                compute: CudaStream::new()?,
                copy: CudaStream::new()?,
                compiled: CompiledKernels::new(info.architecture(), cache_directory()),
                info,
                pool: DevicePool::new(limit, exact),
                pinned: PinnedPool::default(),
                slots: OnceLock::new(),
                blas: OnceLock::new(),
                precision,
                functions: Mutex::default(),
                modules: Mutex::default(),
                failed: AtomicBool::new(false),
                failure: Mutex::default(),
                launches: AtomicU64::new(0),
                timings: Mutex::default(),
            }),
        })
    }

    /// The first GPU. If there is none, prints the reason and returns `None`, so that tests and benches can be
    /// skipped.
    pub fn or_skip(what: &str) -> Option<Gpu> {
        match Gpu::open(0, None, Precision::F32) {
            Ok(gpu) => Some(gpu),
            Err(error) => {
                println!("skipped: {what} needs a GPU: {error}");
                None
            }
        }
    }

    /// Whether there is a GPU with a driver and the libraries needed for training. If there is, its context stays open
    /// until the process ends: who asks will open it next, and making a context takes tenths of a second.
    pub fn is_usable() -> bool {
        Gpu::open(0, None, Precision::F32).is_ok_and(|gpu| {
            let mut context = ptr::null_mut();
            // SAFETY: the call writes the handle. The driver counts its users and frees it when the process ends.
            unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, gpu.inner.device) };
            true
        })
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// Starts compiling kernels on other threads, so that their first use does not wait, or waits less. Returns whether
    /// they were compiled by an earlier process and only have to be loaded.
    pub fn compile_ahead(&self) -> bool {
        let are_cached = self.inner.compiled.are_cached();
        self.inner.compiled.compile_ahead();
        are_cached
    }

    /// Loads kernels and starts cuBLAS, so that the first step does not wait for them. Another thread than that of the
    /// steps calls it. An error comes out when something of it is needed.
    pub fn warm_up(&self) {
        if self.inner.bind().is_ok() {
            let _ = self.blas();
            SOURCES.iter().take_while(|source| self.inner.module(source).is_ok()).for_each(drop);
        }
    }

    /// Its properties.
    pub fn info(&self) -> &GpuInfo {
        &self.inner.info
    }

    /// The precision of matmuls.
    pub fn precision(&self) -> Precision {
        self.inner.precision
    }

    /// The first failure since it was opened, if any. Work still in progress may yet fail.
    pub fn check(&self) -> Result<()> {
        match &*self.inner.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    /// Waits until all launched work is done.
    pub fn synchronize(&self) -> Result<()> {
        self.attempt(|| {
            // SAFETY: the compute stream lives as long as the GPU.
            done("waiting for the GPU", unsafe { sys::cuStreamSynchronize(self.inner.compute.0) })?;
            // SAFETY: so does the copy stream.
            done("waiting for the GPU", unsafe { sys::cuStreamSynchronize(self.inner.copy.0) })
        });
        self.check()
    }

    /// Whether all work launched on the compute stream is done.
    pub fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream lives as long as the GPU.
        let idle = self.attempt(|| match unsafe { sys::cuStreamQuery(self.inner.compute.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => done("asking the GPU", other).map(|()| true),
        });
        self.check()?;
        Ok(idle.unwrap_or(true))
    }

    /// Marks the start of a training step, for [`Gpu::busy_seconds`].
    pub fn begin_step(&self) {
        let begun = self.attempt(|| Event::recorded(&self.inner.compute));
        self.timings().step = begun;
    }

    /// Marks its end.
    pub fn end_step(&self) {
        let ended = self.attempt(|| Event::recorded(&self.inner.compute));
        let mut timings = self.timings();
        if let Some((begun, ended)) = timings.step.take().zip(ended) {
            timings.steps.push(begun, ended);
        }
    }

    /// Records a copy between two events of the copy stream.
    pub(crate) fn copied(&self, begun: Event, ended: Event) {
        self.timings().copies.push(begun, ended);
    }

    /// Seconds that the device has spent on copies of rows and on finished training steps.
    pub fn busy_seconds(&self) -> (f64, f64) {
        let mut timings = self.timings();
        timings.copies.resolve();
        timings.steps.resolve();
        (timings.copies.seconds, timings.steps.seconds)
    }

    fn timings(&self) -> std::sync::MutexGuard<'_, Timings> {
        self.inner.timings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kernels launched so far.
    pub fn launches(&self) -> u64 {
        self.inner.launches.load(Relaxed)
    }

    /// Runs `work` unless the GPU has failed. A failure is kept.
    pub(crate) fn attempt<T>(&self, work: impl FnOnce() -> Result<T>) -> Option<T> {
        if self.inner.failed.load(Relaxed) {
            return None;
        }
        match self.inner.bind().and_then(|()| work()) {
            Ok(found) => Some(found),
            Err(error) => {
                self.inner.fail(error);
                None
            }
        }
    }

    /// The cuBLAS handle, created on first use.
    pub(crate) fn blas(&self) -> Result<&Mutex<Blas>> {
        let made = self.inner.blas.get_or_init(|| Blas::new(self).map(Mutex::new));
        made.as_ref().map_err(CudaError::clone)
    }

    /// Launches a kernel on one of the two streams.
    ///
    /// # Safety
    /// The arguments must be those of the kernel. Every address it reads or writes must be inside memory that stays
    /// allocated until the work is done. Memory of the pool satisfies this, since it is reused only in stream order. A
    /// kernel on the copy stream may read memory of the compute stream only if nothing writes it, and any computation
    /// on its result must wait for it.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        kernel: &str,
        grid: [u32; 2],
        block: [u32; 2],
        arguments: &mut Arguments,
    ) {
        if grid[0] == 0 || grid[1] == 0 {
            return;
        }
        self.attempt(|| {
            let function = self.inner.function(kernel)?;
            let mut pointers = arguments.pointers();
            self.inner.launches.fetch_add(1, Relaxed);
            // SAFETY: the caller guarantees the arguments; the pointers outlive the call, which copies the values.
            let result = unsafe {
                sys::cuLaunchKernel(
                    function.0,
                    grid[0],
                    grid[1],
                    1,
                    block[0],
                    block[1],
                    1,
                    0,
                    stream.0,
                    pointers.as_mut_ptr(),
                    ptr::null_mut(),
                )
            };
            done("launching a kernel", result)
        });
    }
}

impl GpuInfo {
    /// Refuses a GPU that is too old for the kernels, or a precision that it does not have.
    fn check(&self, precision: Precision) -> Result<()> {
        let (found, name) = (self.capability, self.name.clone());
        let needed = if precision == Precision::F32 { OLDEST_CAPABILITY } else { (8, 0) };
        if found < needed {
            return Err(CudaError::Capability { name, found, needed });
        }
        Ok(())
    }

    /// The default memory limit: the free memory except a reserve for the driver.
    pub fn default_limit(&self) -> u64 {
        let reserve = (self.memory_bytes / 32).max(512 << 20);
        self.free_bytes.saturating_sub(reserve)
    }

    /// Its name for NVRTC.
    pub fn architecture(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }
}

impl Inner {
    /// Makes this GPU current on this thread.
    pub fn bind(&self) -> Result<()> {
        if CURRENT.get() != self.id {
            // SAFETY: the context is retained until the last clone is dropped.
            done("choosing the GPU", unsafe { sys::cuCtxSetCurrent(self.context) })?;
            CURRENT.set(self.id);
        }
        Ok(())
    }

    pub fn fail(&self, error: CudaError) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(error);
        self.failed.store(true, Relaxed);
    }

    pub fn has_failed(&self) -> bool {
        self.failed.load(Relaxed)
    }

    fn function(&self, kernel: &str) -> Result<Function> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(kernel) {
            return Ok(*function);
        }
        let source = SOURCES.iter().find(|source| source.has(kernel)).expect("every kernel is in a file");
        let module = self.module(source)?;
        let name = CString::new(kernel).expect("names hold no zero byte");
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, and stays loaded until the GPU is closed.
        let found = unsafe { sys::cuModuleGetFunction(&mut function, module.0, name.as_ptr()) };
        done("finding a kernel", found)?;
        functions.insert(kernel.to_string(), Function(function));
        Ok(Function(function))
    }

    /// The loaded kernels of a file.
    fn module(&self, source: &Source) -> Result<Module> {
        // Whoever compiles must not keep others from kernels that are loaded.
        let cubin = self.compiled.get(source)?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(source.file) {
            return Ok(*module);
        }
        let mut module = ptr::null_mut();
        // SAFETY: the image is a whole CUBIN that outlives the call.
        done("loading kernels", unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) })?;
        modules.insert(source.file, Module(module));
        Ok(Module(module))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        // SAFETY: nobody else has a handle any more; work is waited for before its memory is freed.
        unsafe {
            sys::cuStreamSynchronize(self.compute.0);
            sys::cuStreamSynchronize(self.copy.0);
        }
        self.blas.take();
        self.slots.take();
        *self.timings.lock().unwrap_or_else(PoisonError::into_inner) = Timings::default();
        self.pool.clear();
        self.pinned.clear();
        let modules = std::mem::take(&mut *self.modules.lock().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: as above.
        unsafe {
            for module in modules.into_values() {
                sys::cuModuleUnload(module.0);
            }
            sys::cuStreamDestroy_v2(self.compute.0);
            sys::cuStreamDestroy_v2(self.copy.0);
            sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
        CURRENT.set(0);
    }
}

impl CudaStream {
    /// A stream that does not implicitly wait for others.
    fn new() -> Result<CudaStream> {
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the call writes the handle.
        done("making a stream", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(CudaStream(stream))
    }

    pub fn handle(&self) -> sys::CUstream {
        self.0
    }

    /// Later work on the stream waits for the event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive.
        done("ordering streams", unsafe { sys::cuStreamWaitEvent(self.0, event.handle, 0) })
    }

    /// An event after all work on the stream so far.
    pub fn mark(&self) -> Result<Event> {
        let event = Event::new(false)?;
        event.record(self)?;
        Ok(event)
    }
}

/// A CUDA event: a position in a stream.
pub(crate) struct Event {
    handle: sys::CUevent,
}
// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(timed: bool) -> Result<Event> {
        let mut handle = ptr::null_mut();
        let flags = if timed { 0 } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 };
        // SAFETY: the call writes the handle.
        done("making an event", unsafe { sys::cuEventCreate(&mut handle, flags) })?;
        Ok(Event { handle })
    }

    /// An event with timing, after all work on the stream so far.
    pub fn recorded(stream: &CudaStream) -> Result<Event> {
        let event = Event::new(true)?;
        event.record(stream)?;
        Ok(event)
    }

    /// Whether the event is reached.
    pub fn is_reached(&self) -> bool {
        // SAFETY: the handle is alive.
        unsafe { sys::cuEventQuery(self.handle) == sys::CUresult::CUDA_SUCCESS }
    }

    pub fn record(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: both handles are alive.
        done("marking a stream", unsafe { sys::cuEventRecord(self.handle, stream.0) })
    }

    /// Waits until the event is reached.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        done("work on the GPU", unsafe { sys::cuEventSynchronize(self.handle) })
    }

    /// Seconds between two events that were reached.
    pub fn seconds_since(&self, before: &Event) -> Result<f64> {
        let mut milliseconds = 0.0;
        type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
        // SAFETY: all drivers have the function under this name (CUDA 12.8 added another). It writes to its argument.
        let found = unsafe {
            match sys::culib().get::<Elapsed>(b"cuEventElapsedTime") {
                Ok(elapsed) => elapsed(&mut milliseconds, before.handle, self.handle),
                Err(_) => sys::CUresult::CUDA_ERROR_NOT_FOUND,
            }
        };
        done("timing work on the GPU", found)?;
        Ok(milliseconds as f64 / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle is ours; the driver frees it once the event is reached.
        unsafe { sys::cuEventDestroy_v2(self.handle) };
    }
}

/// A pair of events around work, to measure its time on the device.
pub struct Stopwatch {
    gpu: Gpu,
    start: Option<Event>,
}

impl Stopwatch {
    /// Starts after all work launched so far.
    pub fn start(gpu: &Gpu) -> Stopwatch {
        let start = gpu.attempt(|| Event::recorded(&gpu.inner.compute));
        Stopwatch { gpu: gpu.clone(), start }
    }

    /// Waits for all work launched since the start, and returns its seconds.
    pub fn stop(self) -> Result<f64> {
        let seconds = self.gpu.attempt(|| {
            let end = Event::recorded(&self.gpu.inner.compute)?;
            end.synchronize()?;
            self.start.as_ref().map_or(Ok(0.0), |start| end.seconds_since(start))
        });
        self.gpu.check()?;
        Ok(seconds.unwrap_or(0.0))
    }
}

/// The arguments of a kernel, as their bytes.
pub(crate) struct Arguments {
    words: [u64; 320],
    used: usize,
    starts: [u16; 24],
    count: usize,
}

impl Arguments {
    pub fn new() -> Arguments {
        Arguments { words: [0; 320], used: 0, starts: [0; 24], count: 0 }
    }

    /// Adds a value with the layout of C.
    pub fn push<T: Copy>(&mut self, value: T) {
        let (bytes, first) = (size_of::<T>(), self.used);
        assert!(first * 8 + bytes <= size_of_val(&self.words) && self.count < self.starts.len());
        // SAFETY: there is enough space, and the position is aligned for anything of at most 8 bytes.
        unsafe { ptr::write_unaligned(self.words.as_mut_ptr().add(first).cast(), value) };
        self.starts[self.count] = first as u16;
        self.count += 1;
        self.used += bytes.div_ceil(8);
    }

    fn pointers(&mut self) -> [*mut std::ffi::c_void; 24] {
        let base = self.words.as_mut_ptr();
        // SAFETY: every start is inside the words.
        std::array::from_fn(|at| unsafe { base.add(self.starts[at] as usize).cast() })
    }
}

/// Launches a kernel with these arguments on the compute stream; with `on copy`, on the copy stream, after the
/// uploads.
macro_rules! launch {
    (on $stream:ident, $gpu:expr, $kernel:expr, $grid:expr, $block:expr; $($argument:expr),* $(,)?) => {{
        let mut arguments = $crate::gpu::Arguments::new();
        $(arguments.push($argument);)*
        $gpu.launch(&$gpu.inner().$stream, $kernel, $grid, $block, &mut arguments)
    }};
    ($gpu:expr, $kernel:expr, $grid:expr, $block:expr; $($argument:expr),* $(,)?) => {
        $crate::gpu::launch!(on compute, $gpu, $kernel, $grid, $block; $($argument),*)
    };
}
pub(crate) use launch;
