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

mod apart;
mod api;
mod auth;
mod batch;
pub mod bindings;
mod callbacks;
mod completion;
mod counter;
#[cfg(test)]
mod counter_tests;
mod counts;
mod descriptor;
mod domain;
mod doors;
mod ended;
mod engine;
mod error;
mod expect;
mod fence;
mod gate;
#[cfg(test)]
mod gate_tests;
mod gdrcopy;
mod gpu;
mod group;
mod handle;
mod helm;
mod host;
mod jobs;
#[cfg(test)]
mod jobs_tests;
mod joined;
mod libfabric;
mod mappings;
mod message;
mod metrics;
mod mirror;
mod nvlink;
mod obstacle;
mod once;
mod overlap;
mod patience;
mod place;
mod pools;
mod poster;
mod prepared;
mod provider;
mod queue;
mod region;
mod reserved;
mod reset;
mod roster;
mod route;
mod send;
mod shard;
mod shared;
mod sim;
mod sync;
mod sys;
mod tcp;
mod topology;
mod verbs;
mod watcher;
mod wire;
mod worker;

pub use api::{Grid, Options, Pages, PeerGroup, ScatterDst};
pub use callbacks::PeerEvent;
pub use completion::{Callback, Done, Flag, TransferFuture, TransferId};
pub use descriptor::{Device, MAX_NICS, MrDesc, NetAddr, ProviderKind};
pub use domain::Memory;
pub use doors::Readmit;
pub use engine::{Builder, Engine};
pub use error::{DownReason, Error, Miss, NetworkError, Outcome, PeerName, Reason, Refusal, TransferError};
pub use expect::{ExpectOptions, ImmRange};
pub use gate::WhenFull;
pub use group::DeviceGroup;
pub use handle::MrHandle;
pub use nvlink::{CudaStream, StepKernels};
pub use obstacle::Obstacle;
pub use pools::RecvOptions;
pub use poster::Poster;
pub use prepared::{Part, Prepared, ReadItem, ScatterTemplate, WriteItem};
pub use region::Owner;
pub use route::Via;
pub use sim::{Faults, SimNetwork};
pub use topology::{Gpu, Nic, Proximity, Topology, cpus_near};
pub use watcher::UvmWatcher;
pub use wire::DecodeError;

/// libfabric without the engine, for measurements.
#[cfg(feature = "bare")]
pub use libfabric::bare;

/// Functions for the fuzzer, which nobody else reaches.
#[cfg(fuzzing)]
pub mod fuzzing {
    /// Decodes a frame; one that is accepted must encode to the same bytes.
    pub fn frame(bytes: &[u8]) {
        if let Ok(frame) = crate::message::decode(bytes) {
            assert_eq!(frame.encode(), bytes);
        }
    }

    /// Decodes a frame between processes of one machine (nvlink), likewise.
    pub use crate::nvlink::fuzz_control as control;

    /// Decodes greetings, heads and answers of tcp, likewise.
    pub use crate::tcp::fuzz_stream as stream;

    /// Decodes a packet between ranks of one host, likewise.
    pub use crate::host::fuzz_packet as packet;

    /// Decodes a datagram of the verbs provider; one that is accepted must encode to the same bytes.
    pub fn datagram(bytes: &[u8]) {
        if let Some(again) = crate::verbs::recode(bytes) {
            assert_eq!(again, bytes);
        }
    }
}
