//! The processor a run asks for: the one place that knows which there are.

use crate::note;
use anyhow::Context;
use esker_cuda::Gpu;
use esker_nn::{CpuBackend, CudaBackend, LinkMath};
use esker_train::RunConfig;
use esker_types::DeviceName;

/// Work that any processor can do.
pub trait WithBackend {
    /// What comes out.
    type Output;
    /// Called before a device with its own memory is opened, which takes a while.
    fn before_opening(&mut self, _config: &RunConfig) {}
    /// Does it. The configuration is complete: the device's memory is decided where it has any.
    fn run<B: LinkMath>(self, backend: B, config: RunConfig) -> anyhow::Result<Self::Output>;
}

/// The processor that `auto` means on this machine; others mean themselves.
pub fn resolve(device: DeviceName) -> DeviceName {
    match device {
        DeviceName::Auto if esker_cuda::Gpu::is_usable() => DeviceName::Cuda(0),
        DeviceName::Auto => DeviceName::Cpu,
        named => named,
    }
}

/// Does work on the processor that the configuration names.
pub fn on_device<W: WithBackend>(config: RunConfig, mut work: W) -> anyhow::Result<W::Output> {
    match resolve(config.device) {
        DeviceName::Auto | DeviceName::Cpu => {
            let (device, gpu_memory) = (DeviceName::Cpu, None);
            work.run(CpuBackend::new(), RunConfig { device, gpu_memory, ..config })
        }
        device @ DeviceName::Cuda(number) => {
            work.before_opening(&config);
            let gpu = Gpu::open(number, config.gpu_memory, config.precision)
                .with_context(|| format!("--device {device}"))?;
            // While the dataset is opened and batches are prepared.
            if !gpu.compile_ahead() {
                let architecture = gpu.info().architecture();
                note!(
                    "compiling kernels for {architecture} in the background; later runs find them compiled"
                );
            }
            std::thread::scope(|scope| {
                let opened = gpu.clone();
                scope.spawn(move || opened.warm_up());
                work.run(CudaBackend::new(gpu), RunConfig { device, ..config })
            })
        }
    }
}
