//! Functions that the tests of whole engines share.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[macro_use]
pub mod device;
pub mod process;

use std::time::{Duration, Instant};

use putget_transfer::{Builder, DeviceGroup, Done, Engine, Faults, Options, Outcome, SimNetwork, TransferError};

/// Longer than anything here takes, also on a loaded machine.
pub const LONG: Duration = Duration::from_secs(60);

/// Waits a moment for another thread or process. It sleeps, because beside busy programs a yield costs a turn of the scheduler.
pub fn nap() {
    std::thread::sleep(Duration::from_micros(20));
}

/// The network that a test runs over: a simulated one, TCP where PUTGET_TRANSFER_TCP is set, this host's shared memory where
/// PUTGET_TRANSFER_HOST is, or the verbs devices that PUTGET_TRANSFER_VERBS names. All but the first behave as they like.
pub enum Network {
    Sim(SimNetwork),
    Tcp,
    Verbs(Vec<String>),
    Host,
}

/// The verbs devices to test with, if there are any.
pub fn verbs_devices() -> Option<Vec<String>> {
    let devices = std::env::var("PUTGET_TRANSFER_VERBS").ok()?;
    Some(devices.split(',').map(str::to_owned).collect())
}

impl Network {
    pub fn new(seed: u64) -> Self {
        match verbs_devices() {
            Some(devices) => Self::Verbs(devices),
            None if std::env::var_os("PUTGET_TRANSFER_TCP").is_some() => Self::Tcp,
            None if std::env::var_os("PUTGET_TRANSFER_HOST").is_some() => Self::Host,
            None => Self::Sim(SimNetwork::new(seed)),
        }
    }

    /// The networks of a test that is to hold on each of them.
    pub fn all(seed: u64) -> Vec<Self> {
        match verbs_devices() {
            Some(devices) => vec![Self::Verbs(devices)],
            None => vec![Self::Sim(SimNetwork::new(seed)), Self::Host, Self::Tcp],
        }
    }

    /// The simulated network, for tests that make it fail; over another one they say so and end.
    pub fn obedient(seed: u64) -> Option<SimNetwork> {
        match Self::new(seed) {
            Self::Sim(network) => Some(network),
            Self::Tcp | Self::Verbs(_) | Self::Host => {
                println!("skipped: this network cannot be made to fail");
                None
            }
        }
    }

    /// Changes how a simulated network misbehaves; others keep their ways.
    pub fn set_faults(&self, faults: Faults) {
        if let Self::Sim(network) = self {
            network.set_faults(faults).unwrap();
        }
    }
}

/// Networks that engines can be built on.
pub trait Grouping {
    fn group(&self, nics: usize) -> DeviceGroup;

    /// How many times longer than elsewhere things may take: emulated devices work in the posting thread.
    fn slowness(&self) -> u32 {
        1
    }
}

impl Grouping for SimNetwork {
    fn group(&self, nics: usize) -> DeviceGroup {
        DeviceGroup::sim(self, nics)
    }
}

impl Grouping for Network {
    fn group(&self, nics: usize) -> DeviceGroup {
        match self {
            Self::Sim(network) => network.group(nics),
            Self::Host => DeviceGroup::host(nics),
            Self::Tcp => DeviceGroup::tcp(&vec![Some("127.0.0.1"); nics]),
            Self::Verbs(devices) => {
                // More than there are is a number that no engine accepts.
                let devices: Vec<_> = devices.iter().cycle().take(nics).map(String::as_str).collect();
                DeviceGroup::verbs(&devices)
            }
        }
    }

    fn slowness(&self) -> u32 {
        match self {
            Self::Sim(_) | Self::Tcp | Self::Host => 1,
            Self::Verbs(_) => 6,
        }
    }
}

pub fn builder(network: &impl Grouping, nics: usize) -> Builder {
    let patience = Duration::from_secs(5) * network.slowness();
    Engine::builder().group(network.group(nics)).heartbeat(Duration::from_millis(500), patience)
}

pub fn engine(network: &impl Grouping, nics: usize) -> Engine {
    builder(network, nics).build().unwrap()
}

/// An engine that notices lost peers quickly, and loses none because a busy machine keeps its threads waiting.
pub fn nervous(network: &impl Grouping, nics: usize) -> Builder {
    let patience = Duration::from_secs(4) * network.slowness();
    builder(network, nics)
        .heartbeat(Duration::from_millis(50), patience)
        .connect_timeout(patience)
        .grace(Duration::from_millis(300))
}

/// Patience with a peer that is stopped in every round of a test. Where PUTGET_TRANSFER_ROUNDS makes the rounds many, the
/// test has the machine for itself, and nobody waits long for a turn.
pub fn short_patience(network: &impl Grouping) -> Duration {
    let alone = std::env::var_os("PUTGET_TRANSFER_ROUNDS").is_some();
    Duration::from_millis(if alone { 400 } else { 3000 }) * network.slowness()
}

/// How many rounds a test has that PUTGET_TRANSFER_ROUNDS makes as long as it says.
pub fn rounds(usual: usize) -> usize {
    std::env::var("PUTGET_TRANSFER_ROUNDS").map_or(usual, |rounds| rounds.parse().unwrap())
}

pub fn within(deadline: Duration) -> Options {
    Options { deadline: Some(deadline), ..Options::default() }
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

pub fn metric(engine: &Engine, name: &str) -> u64 {
    let text = engine.metrics_text();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("putget_transfer_{name} ")));
    line.unwrap().parse().unwrap()
}

pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Rounds of a test in which something is to come in the middle of work: `usual` of them, then others until it has once, at most
/// ten times as many. On a busy machine all may be over before it comes: the next round has twice the work then. A round says
/// whether it came in the middle.
pub fn in_the_middle(usual: usize, work: usize, mut round: impl FnMut(usize, usize) -> bool) {
    let (mut now, mut met) = (work, false);
    for number in 0..10 * usual {
        if number >= usual && met {
            return;
        }
        let came = round(number, now);
        met |= came;
        now = if came { work } else { (2 * now).min(16 * work) };
    }
    assert!(met, "it always came when all was over");
}

pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}
