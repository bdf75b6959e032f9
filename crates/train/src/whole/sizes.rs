//! The memory of blocks of whole-graph inference, and how large they may be.

use super::blocks::Degrees;
use super::{COPY_BYTES, MOST_ROWS, SAMPLES};
use crate::memory::{Bytes, DeviceProfile};
use crate::{Result, RunConfig, TrainError};
use esker_io::{Options, Piece};
use esker_nn::{StepShape, memory_bytes};
use esker_sample::{Bound, Direction};
use esker_strategies::JobOutline;
use esker_types::ByteCount;

/// The largest memory of a block of `rows` rows, adjacency entries included.
pub fn block_bytes(
    config: &RunConfig,
    job: &JobOutline,
    outputs: usize,
    rows: u64,
    device: DeviceProfile,
) -> Result<Bytes> {
    let layers = config.model.layers;
    let shape = StepShape {
        rows: vec![rows as usize; layers + 1],
        edges: vec![rows as usize; layers],
        seeds: 0,
        degrees: config.whole_settings().carry.degrees,
        input_gradient: false,
        pulled: None,
        pushed: None,
        memory: device.memory(config),
    };
    let model = memory_bytes(&config.model, &config.optimizer, job.dim() as usize, outputs, &shape)?;
    let reading = Options::default().memory_bytes(rows) + rows * size_of::<Piece>() as u64;
    let sampling = sampling_bytes(config, job, rows);
    // Logits that are compared with labels are copied twice: on their device, and to the host.
    let compared = rows.saturating_mul(outputs as u64 * 4);
    let host = reading + compared + COPY_BYTES + sampling;
    let device_bytes = model.inference + compared;
    if device.in_host_memory {
        return Ok(Bytes { host: host + device_bytes, device: 0 });
    }
    // Rows are uploaded from host memory.
    let widths = (0..layers).map(|layer| config.model.widths(layer, job.dim() as usize, outputs).0);
    let uploading = rows.saturating_mul(widths.max().unwrap_or(0) as u64 * 4);
    Ok(Bytes { host: host + uploading, device: device_bytes })
}

/// The memory of sampling a block, including that of reading neighbours from disk.
pub(super) fn sampling_bytes(config: &RunConfig, job: &JobOutline, rows: u64) -> u64 {
    let nodes = job.dataset.manifest().nodes.count;
    let bound = Bound::of_part(&config.whole_settings(), rows, (rows.min(nodes), rows), nodes);
    bound.bytes(SAMPLES) + config.strategy.workspace_bytes(job, rows)
}

/// The smallest number of rows that a block must allow: a node and all its neighbours.
pub fn least_rows(config: &RunConfig, job: &JobOutline) -> Result<u64> {
    let manifest = job.dataset.manifest();
    match job.direction {
        _ if config.whole_settings().fanouts.is_empty() => Ok(1),
        Direction::Incoming => Ok(1 + manifest.edges.max_in_degree),
        // The manifest has only the largest in-degree.
        direction => {
            let mut degrees = Degrees::open(&job.dataset, Some(direction))?;
            let mut longest = 0;
            for node in 0..manifest.nodes.count {
                longest = longest.max(degrees.of(node)?);
            }
            Ok(1 + longest)
        }
    }
}

/// The largest number of rows of a block within these bytes.
pub(super) fn rows_within(
    config: &RunConfig,
    job: &JobOutline,
    outputs: usize,
    most: Bytes,
    device: DeviceProfile,
) -> Result<u64> {
    let manifest = job.dataset.manifest();
    let mut low = least_rows(config, job)?;
    let mut high = (manifest.nodes.count + manifest.edges.count * 2).min(MOST_ROWS).max(low);
    let needed = block_bytes(config, job, outputs, low, device)?;
    if !needed.fit(most) {
        let (needed, left) = match needed.host > most.host {
            true => (needed.host, most.host),
            false => (needed.device, most.device),
        };
        return Err(TrainError::InferenceMemory { needed: ByteCount(needed), left: ByteCount(left) });
    }
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if block_bytes(config, job, outputs, middle, device)?.fit(most) {
            low = middle
        } else {
            high = middle - 1
        }
    }
    Ok(low)
}
