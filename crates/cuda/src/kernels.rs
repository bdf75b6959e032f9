//! Kernels: CUDA C++ in `kernels/`. NVRTC compiles a file for the GPU of this machine on first use. The result is
//! cached on disk, keyed by a hash of its inputs.

use crate::compiled::cached;
use crate::library::Library;
use crate::{CudaError, Result};
use cudarc::nvrtc::sys;
use std::ffi::{CStr, CString, c_char};
use std::path::Path;
use std::ptr;
use xxhash_rust::xxh3::xxh3_128;

/// A file of kernels.
pub struct Source {
    /// Its name.
    pub file: &'static str,
    text: &'static str,
}

const COMMON: &str = include_str!("../kernels/common.cuh");

macro_rules! sources {
    ($($file:literal),*) => {
        &[$(Source { file: $file, text: include_str!(concat!("../kernels/", $file)) }),*]
    };
}

/// All files of kernels.
pub const SOURCES: &[Source] = sources![
    "aggregate.cu",
    "attention.cu",
    "adjacency.cu",
    "hidden.cu",
    "learned.cu",
    "link.cu",
    "loss.cu",
    "norm.cu",
    "part.cu",
    "post.cu",
    "rows.cu",
    "tiers.cu",
    "update.cu"
];

/// Options besides the architecture. Divisions and roots stay exact, as on the CPU.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=true"];

impl Source {
    fn whole(&self) -> String {
        format!("{COMMON}\n#line 1 \"{}\"\n{}", self.file, self.text)
    }

    /// Whether this file has a kernel.
    pub(crate) fn has(&self, kernel: &str) -> bool {
        self.text.contains(&format!(" {kernel}(")) || self.has_shape(kernel)
    }

    /// Kernels of many shapes: `aggregate_32_1_4` is made by a macro that contains `aggregate_##G`.
    fn has_shape(&self, kernel: &str) -> bool {
        let stem = kernel.trim_end_matches(|c: char| c.is_ascii_digit() || c == '_');
        stem.len() < kernel.len() && self.text.contains(&format!(" {stem}_##G"))
    }

    /// Compiles the file for an architecture (`sm_90`).
    pub fn compile(&self, architecture: &str) -> Result<Vec<u8>> {
        Library::Nvrtc.open()?;
        let text = CString::new(self.whole()).expect("kernels hold no zero byte");
        let name = CString::new(self.file).expect("names hold no zero byte");
        let options: Vec<CString> = std::iter::once(format!("--gpu-architecture={architecture}"))
            .chain(OPTIONS.map(String::from))
            .map(|option| CString::new(option).expect("options hold no zero byte"))
            .collect();
        let failed =
            |log: String| CudaError::Compile { file: self.file, architecture: architecture.to_string(), log };
        let mut program = ptr::null_mut();
        // SAFETY: all strings outlive the calls; sizes are those returned by the library.
        unsafe {
            let made = sys::nvrtcCreateProgram(
                &mut program,
                text.as_ptr(),
                name.as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            );
            if made != sys::nvrtcResult::NVRTC_SUCCESS {
                return Err(failed(message(made)));
            }
            let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
            let compiled = sys::nvrtcCompileProgram(program, pointers.len() as i32, pointers.as_ptr());
            let result = if compiled == sys::nvrtcResult::NVRTC_SUCCESS {
                let mut bytes = 0;
                let sized = sys::nvrtcGetCUBINSize(program, &mut bytes);
                let mut cubin = vec![0u8; bytes];
                let read = sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast());
                let ok = sys::nvrtcResult::NVRTC_SUCCESS;
                if sized == ok && read == ok { Ok(cubin) } else { Err(failed(message(read))) }
            } else {
                let mut bytes = 0;
                sys::nvrtcGetProgramLogSize(program, &mut bytes);
                let mut log = vec![0u8; bytes.max(1)];
                sys::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
                let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string();
                Err(failed(if log.is_empty() { message(compiled) } else { log }))
            };
            sys::nvrtcDestroyProgram(&mut program);
            result
        }
    }

    /// The compiled file from the cache, or compiled now and cached.
    pub(crate) fn load(&self, architecture: &str, cache: Option<&Path>) -> Result<Vec<u8>> {
        Library::Nvrtc.open()?;
        let path = cache.map(|cache| cache.join(self.cache_name(architecture)));
        cached(path.as_deref(), || self.compile(architecture))
    }

    /// The name of its compiled file: a hash of everything it is made from. NVRTC must be open.
    pub(crate) fn cache_name(&self, architecture: &str) -> String {
        let made_from = format!("{}\0{}\0{:?}", self.whole(), OPTIONS.join(" "), nvrtc_version());
        format!("{}-{architecture}-{:032x}.cubin", self.file, xxh3_128(made_from.as_bytes()))
    }
}

/// Version of NVRTC; it must be open.
pub(crate) fn nvrtc_version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the call writes to the two numbers.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    (major, minor)
}

/// Whether NVRTC is available, so that kernels can be compiled without a GPU.
pub fn can_compile() -> Result<()> {
    Library::Nvrtc.open()
}

fn message(result: sys::nvrtcResult) -> String {
    // SAFETY: the library returns a static string that is never freed.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) };
    text.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_compiles_for_every_architecture() {
        if let Err(error) = can_compile() {
            return println!("skipped: {error}");
        }
        for source in SOURCES {
            for architecture in ["sm_75", "sm_80", "sm_90"] {
                let cubin = source.compile(architecture).unwrap();
                assert_eq!(&cubin[..4], b"\x7fELF", "{} {architecture}", source.file);
            }
        }
    }

    #[test]
    fn a_kernel_that_is_wrong_is_named_with_the_compilers_words() {
        if let Err(error) = can_compile() {
            return println!("skipped: {error}");
        }
        let wrong = Source { file: "wrong.cu", text: "__global__ void f() { return 1 +; }" };
        let error = wrong.compile("sm_80").unwrap_err().to_string();
        assert!(error.contains("wrong.cu") && error.contains("expression"), "{error}");
    }

    #[test]
    fn kernels_are_found_in_their_files() {
        let file = |kernel: &str| {
            let files: Vec<&str> =
                SOURCES.iter().filter(|source| source.has(kernel)).map(|source| source.file).collect();
            assert_eq!(files.len(), 1, "{kernel}: {files:?}");
            files[0]
        };
        assert_eq!(file("aggregate_32_1_4"), "aggregate.cu");
        assert_eq!(file("attend_back_8_1_1"), "attention.cu");
        assert_eq!(file("attend_32_2_4"), "attention.cu");
        assert_eq!(file("gather_1_1_4"), "rows.cu");
        assert_eq!(file("tiers_half_32_4_1"), "tiers.cu");
        assert_eq!(file("slope_parts_8"), "attention.cu");
        assert_eq!(file("add_numbers"), "post.cu");
        assert_eq!(file("add_numbers_f64"), "loss.cu");
    }
}
