//! The CPU against PyTorch and PyG, within 1e-5.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod common;

use common::{golden, link_golden};
use esker_nn::CpuBackend;

#[test]
fn forward_and_backward_agree_with_pytorch() {
    golden::forward_and_backward(&CpuBackend::new(), 1e-5);
}

#[test]
fn ten_optimizer_steps_agree_with_pytorch() {
    golden::ten_optimizer_steps(&CpuBackend::new(), 1e-5);
}

#[test]
fn losses_agree_with_pytorch() {
    golden::losses(&CpuBackend::new(), 1e-6);
}

#[test]
fn decoders_and_link_losses_agree_with_pytorch() {
    link_golden::decoders_and_losses(&CpuBackend::new(), 1e-5);
}

#[test]
fn ten_sparse_steps_agree_with_pytorch() {
    link_golden::ten_sparse_steps(&CpuBackend::new(), 1e-5);
}
