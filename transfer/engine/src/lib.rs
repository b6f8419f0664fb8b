//! One-sided point-to-point transfers across hosts, with one interface over different networks.
//!
//! All that is assumed of a network is that it delivers, in any order. So completion is counted: a write may carry a 32-bit
//! immediate, which the target counts after the whole payload has landed. Method: "RDMA Point-to-Point Communication for LLM
//! Systems".
//!
//! ```
//! use std::time::Duration;
//! use putget_transfer::{DeviceGroup, Done, Engine, Options, SimNetwork};
//!
//! # fn main() -> Result<(), putget_transfer::Error> {
//! let network = SimNetwork::new(7);
//! let prefill = Engine::builder().group(DeviceGroup::sim(&network, 2)).build()?;
//! let decode = Engine::builder().group(DeviceGroup::sim(&network, 2)).build()?;
//!
//! let (kv_cache, descriptor) = decode.alloc_mr(1 << 20)?; // `descriptor.to_bytes()` travels to the writer
//! let (source, _) = prefill.alloc_mr(1 << 20)?;
//! source.write(4096, b"keys and values")?;
//!
//! let (arrived, future) = Done::future();
//! decode.expect_imm_count(42, 1, Some(Duration::from_secs(10)), arrived)?;
//! prefill.submit_single_write(8192, Some(42), (&source, 0), (&descriptor, 0), &Options::default(), Done::ignore())?;
//! decode.wait(&future, Duration::from_secs(10))?;
//!
//! let mut found = [0; 15];
//! kv_cache.read(4096, &mut found)?;
//! assert_eq!(&found, b"keys and values");
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod api;
mod counters;
mod engine;
mod error;
mod memory;
mod peers;
mod providers;
mod submit;
mod sys;
mod wire;
mod worker;

pub use api::bindings;
pub use counters::callbacks::PeerEvent;
pub use counters::completion::{Callback, Done, Flag, TransferFuture, TransferId};
pub use counters::gate::WhenFull;
pub use engine::builder::Builder;
pub use engine::domain::Memory;
pub use engine::group::DeviceGroup;
pub use engine::handle::MrHandle;
pub use engine::route::Via;
pub use engine::running::Engine;
pub use engine::topology::{Gpu, Nic, Proximity, Topology, cpus_near};
pub use engine::watcher::UvmWatcher;
pub use error::obstacle::Obstacle;
pub use error::{DownReason, Error, Miss, NetworkError, Outcome, PeerName, Reason, Refusal, TransferError};
pub use memory::region::Owner;
pub use peers::doors::Readmit;
pub use peers::pools::RecvOptions;
pub use providers::nvlink::{BlockFloat, CudaStream, Fp8Blocks, StepKernels};
pub use providers::sim::{Faults, SimNetwork};
pub use submit::arguments::{Grid, Options, Pages, PeerGroup, ScatterDst};
pub use submit::expect::{ExpectOptions, ImmRange};
pub use submit::poster::Poster;
pub use submit::prepared::{Part, Prepared, ReadItem, ScatterTemplate, WriteItem};
pub use wire::bytes::DecodeError;
pub use wire::descriptor::{Device, MAX_NICS, MrDesc, NetAddr, ProviderKind};

/// libfabric without the engine, for measurements.
#[cfg(feature = "bare")]
pub use providers::libfabric::bare;

/// Functions for the fuzzer, which nobody else reaches.
#[cfg(fuzzing)]
pub mod fuzzing {
    /// Decodes a frame; one that is accepted must encode to the same bytes.
    pub fn frame(bytes: &[u8]) {
        if let Ok(frame) = crate::peers::message::decode(bytes) {
            assert_eq!(frame.encode(), bytes);
        }
    }

    /// Decodes a frame between processes of one machine (nvlink), likewise.
    pub use crate::providers::nvlink::fuzz_control as control;

    /// Decodes greetings, heads and answers of tcp, likewise.
    pub use crate::providers::tcp::fuzz_stream as stream;

    /// Decodes a packet between ranks of one host, likewise.
    pub use crate::providers::host::fuzz_packet as packet;

    /// Decodes a datagram of the verbs provider; one that is accepted must encode to the same bytes.
    pub fn datagram(bytes: &[u8]) {
        if let Some(again) = crate::providers::verbs::recode(bytes) {
            assert_eq!(again, bytes);
        }
    }
}
