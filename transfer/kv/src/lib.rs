//! KV caches between prefill and decode, on the transfer engine.
//!
//! The decoder owns a transfer: it names its pages, and the prefill ranks write them while they compute. Both sides [`plan`] a
//! request from their caches' [`Geometry`] alone, so the decoder knows the count that it waits for and nobody has to say that all has
//! been sent.
#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod cache;
mod codec;
mod decoder;
mod geometry;
mod locked;
mod message;
#[cfg(test)]
mod message_tests;
mod metrics;
mod plan;
#[cfg(test)]
mod plan_tests;
mod prefiller;

use std::time::Duration;

use putget_transfer::{Engine, Error, NetAddr, Options, RecvOptions};

pub use cache::{KvCache, Source};
pub use decoder::{Decoder, DecoderOptions, Events, Group, Receive, Receiving, Wanted};
pub use geometry::{Digest, Geometry, Kind, Layout, Region};
pub use message::{Hello, Message, Refusal, Request};
pub use plan::{Ask, Plan, Portion, SourcePlan, Write, plan, plan_drawn};
pub use prefiller::{End, Prefiller, PrefillerOptions, Work};

/// How long a message may be under way: the sender gives up then. A prefiller knows a cancelled request for longer.
const DELIVERY: Duration = Duration::from_secs(30);

fn delivery() -> Options {
    Options { deadline: Some(DELIVERY), ..Options::default() }
}

/// The number of a new pool: apart from those that a program uses itself, and from other prefillers and decoders of the engine.
fn new_pool() -> u32 {
    fastrand::u32(1 << 31..)
}

/// Buffers by length: most messages are short, and a Hello or long page lists need more.
const BUFFERS: [(usize, usize); 3] = [(4 << 10, 64), (64 << 10, 16), (4 << 20, 2)];

/// A pool of receives, until this is dropped.
struct Pool {
    engine: Engine,
    number: u32,
}

impl Pool {
    /// A pool without receives, whose number is a new one.
    fn new(engine: &Engine) -> Self {
        Self { engine: engine.clone(), number: new_pool() }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.engine.end_recvs(self.number);
    }
}

/// Receives messages in a pool of its own, whose number its peers are told. What is not a message is left aside, and said.
fn receive_messages(
    pool: &Pool,
    hear: impl Fn(&NetAddr, message::Message) + Clone + Send + 'static,
) -> Result<(), Error> {
    for (len, count) in BUFFERS {
        let hear = hear.clone();
        let options = RecvOptions { pool: pool.number, ..RecvOptions::default() };
        pool.engine.submit_recvs_to(len, count, &options, move |from, bytes| match Message::decode(bytes) {
            Ok(message) => hear(from, message),
            Err(error) => tracing::warn!(from = %from.name(), %error, "a message that cannot be read"),
        })?;
    }
    Ok(())
}
