//! What the tests of whole engines share.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::time::{Duration, Instant};

use putget_transfer::{Builder, DeviceGroup, Done, Engine, Options, Outcome, SimNetwork, TransferError};

/// Longer than anything here takes, also on a loaded machine.
pub const LONG: Duration = Duration::from_secs(60);

pub fn builder(network: &SimNetwork, nics: usize) -> Builder {
    Engine::builder().group(DeviceGroup::sim(network, nics))
}

pub fn engine(network: &SimNetwork, nics: usize) -> Engine {
    builder(network, nics).build().unwrap()
}

/// An engine that notices lost peers quickly.
pub fn nervous(network: &SimNetwork, nics: usize) -> Builder {
    builder(network, nics)
        .heartbeat(Duration::from_millis(50), Duration::from_millis(1500))
        .connect_timeout(Duration::from_millis(1500))
        .grace(Duration::from_millis(300))
}

pub fn within(deadline: Duration) -> Options {
    Options { deadline: Some(deadline), nic: None }
}

/// Submits and waits for the outcome.
pub fn outcome<T>(submit: impl FnOnce(Done) -> Result<T, putget_transfer::Error>) -> Outcome {
    let (done, future) = Done::future();
    submit(done).unwrap();
    future.wait(LONG).expect("the operation did not end")
}

/// The one transfer error of an outcome.
pub fn failure(outcome: Outcome) -> TransferError {
    let error = outcome.unwrap_err();
    assert_eq!(error.transfer_errors().len(), 1, "{error}");
    error.transfer_errors()[0].clone()
}

pub fn expect_count(engine: &Engine, imm: u32, count: u64) -> Outcome {
    outcome(|done| engine.expect_imm_count(imm, count, Some(LONG), done))
}

pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}
