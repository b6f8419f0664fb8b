//! Errors, in words that name peer, NIC and reason, and the address where there is no connection. Keys never appear in them.

pub(crate) mod obstacle;

use std::fmt;
use std::time::{Duration, SystemTime};

use crate::error::obstacle::{Obstacle, spelled};

/// Short name of an engine's device group, safe to log: it is derived from the engine's random identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerName {
    pub(crate) tag: u32,
    pub(crate) group: u16,
}

impl PeerName {
    /// Which of its engine's device groups it is.
    pub fn device_group(&self) -> u16 {
        self.group
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}/{}", self.tag, self.group)
    }
}

/// The outcome of an operation: nothing, or the reason why not.
pub type Outcome = Result<(), Error>;

/// Everything that a call or a completion can report.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A caller's mistake, found before any effect.
    #[error("{argument}: {problem}")]
    Argument {
        /// The argument's name.
        argument: &'static str,
        /// The value that came, and the allowed ones.
        problem: String,
    },
    /// A library, device or permission that this machine lacks.
    #[error("{what} is not available: {why}")]
    Unavailable {
        /// The thing that was asked for.
        what: String,
        /// The missing part.
        why: String,
    },
    /// The engine is closed.
    #[error("the engine is closed")]
    Closed,
    /// A counter did not reach the expected count in time.
    #[error("immediate {imm}: {found} of {expected} arrived before {why}{}", name(.missing))]
    CountMissed {
        /// The immediate.
        imm: u32,
        /// The expected count.
        expected: u64,
        /// The count at the end.
        found: u64,
        /// The event that came first.
        why: Miss,
        /// The senders that are to blame, among those that were named.
        missing: Vec<PeerName>,
    },
    /// As many operations are under way as the builder has allowed.
    #[error("{most} operations are under way, and no more are allowed at a time (max_submissions)")]
    Busy {
        /// How many are allowed.
        most: usize,
    },
    /// A counter cannot be reset while somebody waits for it.
    #[error("immediate {imm} cannot be reset: {waiting} expectations wait for it")]
    CounterBusy {
        /// The immediate.
        imm: u32,
        /// How many expectations wait.
        waiting: usize,
    },
    /// A transfer failed, in one place or in several.
    #[error("{}", join(.0))]
    Transfer(Vec<TransferError>),
    /// A call into the engine's own thread was not answered in time.
    #[error("{what}: no answer within {after:?}")]
    Timeout {
        /// The thing that was asked for.
        what: &'static str,
        /// How long was waited.
        after: Duration,
    },
    /// The operating system refused something.
    #[error("{what}: {why}")]
    System {
        /// The call that was tried.
        what: &'static str,
        /// The system's words.
        why: String,
    },
}

impl Error {
    /// A caller's mistake in `argument`. The words say what came and what is allowed.
    pub fn argument(argument: &'static str, problem: impl Into<String>) -> Self {
        Self::Argument { argument, problem: problem.into() }
    }

    /// The single failures of a transfer; empty for every other error.
    pub fn transfer_errors(&self) -> &[TransferError] {
        match self {
            Self::Transfer(errors) => errors,
            _ => &[],
        }
    }
}

fn join(errors: &[TransferError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn name(missing: &[PeerName]) -> String {
    match missing {
        [] => String::new(),
        names => format!("; missing: {}", names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// The event that came before the count that somebody waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Miss {
    /// Its deadline.
    #[error("the deadline")]
    Deadline,
    /// Its owner cancelled it.
    #[error("it was cancelled")]
    Cancelled,
    /// The end of a sender that was named.
    #[error("a sender went down ({0})")]
    SenderDown(DownReason),
}

/// One failure of a transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferError {
    /// The peer that the transfer went to.
    pub peer: PeerName,
    /// The NIC of this engine, where the failure belongs to one.
    pub nic: Option<usize>,
    /// Why.
    pub reason: Reason,
    /// True where the network could not confirm that nothing more can land: in the peer's memory, or of a read in the own.
    pub may_land: bool,
}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer {}", self.peer)?;
        if let Some(nic) = self.nic {
            write!(f, ", NIC {nic}")?;
        }
        write!(f, ": {}", self.reason)?;
        if self.may_land {
            f.write_str(" (bytes may still land)")?;
        }
        Ok(())
    }
}

impl std::error::Error for TransferError {}

/// Why a transfer failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// Its deadline passed.
    #[error("the deadline passed")]
    Deadline,
    /// Its deadline passed before there was a connection.
    #[error("the deadline passed before there was a connection: {0}")]
    NotConnected(NetworkError),
    /// Its owner cancelled it.
    #[error("cancelled")]
    Cancelled,
    /// The peer is gone.
    #[error("the peer is down: {0}")]
    PeerDown(#[from] DownReason),
    /// The connection was refused.
    #[error("connection refused: {0}")]
    Refused(#[from] Refusal),
    /// The network reported a failure.
    #[error("{0}")]
    Network(#[from] NetworkError),
    /// The receive pool of the peer had no free buffer, or none at all, until the deadline.
    #[error("the peer's receive pool was exhausted until the deadline")]
    PoolExhausted,
    /// The peer has submitted no receives, until the deadline.
    #[error("the peer had submitted no receives until the deadline")]
    NoReceives,
    /// The message is longer than the buffers of the peer's receive pool.
    #[error("the message is longer than the peer's receive buffers of {allowed} bytes")]
    MessageTooLong {
        /// The peer's buffer size in bytes.
        allowed: u64,
    },
    /// The engine closed while the transfer was under way.
    #[error("the engine closed")]
    Closed,
}

/// Why a peer counts as down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum DownReason {
    /// Nothing was heard of it for the heartbeat timeout.
    #[error("its heartbeat stopped: its process stands still or has ended, or the network to it has failed")]
    HeartbeatLost,
    /// It said goodbye.
    #[error("it left")]
    Left,
    /// It opened a new connection, so the old one is void.
    #[error("it connected anew")]
    Reconnected,
    /// The connection to it broke.
    #[error("its connection broke without a goodbye: its process has ended, or the network has failed")]
    NetworkLost,
    /// This process could open no more files for the connection.
    #[error("this process has no file descriptors left for the connection; close some, or raise its limit (ulimit -n)")]
    OutOfFiles,
    /// This engine has shut it out. It stays out until it is admitted.
    #[error("this engine has fenced it")]
    Fenced,
    /// It has shut this engine out: by a fence, or because it lost this engine's heartbeat.
    #[error("it fenced this engine {}; what it was given before is void, and it takes nothing more until it admits this engine", ago(.at))]
    FencedByPeer {
        /// When, by the peer's clock.
        at: SystemTime,
    },
    /// It was down before and could still write; now it cannot any more.
    #[error("it cannot write any more")]
    Drained,
    /// This engine closed.
    #[error("this engine closed")]
    Closed,
}

fn ago(at: &SystemTime) -> String {
    match SystemTime::now().duration_since(*at) {
        Ok(since) => format!("{:.3} s ago", since.as_secs_f64()),
        // Its clock is ahead of this one.
        Err(_) => "just now".into(),
    }
}

/// Why a connection was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Another version of the wire format.
    #[error("it speaks another version of the wire format")]
    Version,
    /// The two device groups have different numbers of NICs.
    #[error("it has {theirs} NICs a device and this engine has {ours}")]
    NicCount {
        /// NICs of the peer's device group.
        theirs: u16,
        /// NICs of this engine's device group.
        ours: u16,
    },
    /// The shared secret is missing on one side, or differs.
    #[error("the shared secret is missing or differs")]
    Secret,
    /// The address belongs to an engine that is no longer there.
    #[error("the address belongs to an engine that has ended; ask for the new address")]
    Stale,
    /// The target may open no more files.
    #[error(
        "the target cannot accept: it has run out of file descriptors; close some there, or raise its limit (ulimit -n)"
    )]
    OutOfFiles,
    /// Too many connections are being set up.
    #[error("it has too many half-open connections")]
    Busy,
    /// It has shut this engine out, so often and then.
    #[error("it has fenced this engine")]
    Fenced {
        /// How often.
        count: u64,
        /// Milliseconds since 1970, by the peer's clock.
        at_ms: u64,
    },
    /// An operation that was begun with it is over; it has to begin again.
    #[error("it has ended what was begun, which has to begin again")]
    Void,
}

/// A provider's report about one work request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// The network lost it. Nothing of it has landed.
    #[error("the network dropped the work request")]
    Lost,
    /// The peer does not know the key, or no longer.
    #[error("the peer's memory region is not registered (any more)")]
    BadKey,
    /// The write would leave the peer's region.
    #[error("the write would leave the peer's memory region")]
    OutOfBounds,
    /// The connection was dropped with the work request in flight.
    #[error("the connection was dropped")]
    Disconnected,
    /// The peer cannot be reached any more.
    #[error("the peer cannot be reached: its process has ended, or the network to it has failed")]
    Unreachable,
    /// There is no connection to the peer's address.
    #[error("the peer cannot be reached at {address}: {why}")]
    NoConnection {
        /// Where the peer should be.
        address: String,
        /// The obstacle, and its side.
        why: Obstacle,
    },
    /// Anything else, in the provider's words.
    #[error("{0}")]
    Other(String),
}

impl Obstacle {
    /// The obstacle on the way to this address.
    pub(crate) fn at(self, endpoint: &[u8]) -> NetworkError {
        NetworkError::NoConnection { address: spelled(endpoint), why: self }
    }
}
