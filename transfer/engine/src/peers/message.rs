//! The frames that two engines exchange as two-sided messages. docs/transfer/wire_format.md has the format field by field.

use crate::error::Refusal;
use crate::peers::doors::Fences;
use crate::wire::bytes::{DecodeError, Reader, Writer};
use crate::wire::descriptor::{NicAddr, read_nics};

pub(crate) const MAGIC: [u8; 2] = *b"pt";
pub(crate) const VERSION: u8 = 5;
/// Bytes before the body: magic, version, kind, session.
pub(crate) const HEADER: usize = 12;
/// Bytes that a user's message grows by in a frame of its own, and each of its fragments.
pub(crate) const OVERHEAD: usize = HEADER + 12;
pub(crate) const FRAGMENT_OVERHEAD: usize = HEADER + 16;

pub(crate) type Nonce = [u8; 16];
pub(crate) type Mac = [u8; 32];

/// The beginning of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Engine and group that this is meant for: an address of an engine that has ended must not reach its successor.
    pub to_engine: u64,
    pub to_group: u16,
    pub from: Introduction,
}

/// The side that speaks, in both directions of the set-up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Introduction {
    /// The value that the other side puts into the `session` field of every frame that it sends here.
    pub session: u64,
    pub nonce: Nonce,
    pub heartbeat_timeout_ms: u32,
    /// How often the other side was shut out here. What it was given before is void.
    pub fences: Fences,
    pub nics: Vec<NicAddr>,
}

/// Why a message was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rejection {
    NoReceives,
    Exhausted,
    TooLong { allowed: u64 },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Body<'a> {
    Hello(Hello),
    Welcome(Introduction, Mac),
    /// The connecting side's proof, and once more what it has said of itself: the accepting side has kept nothing of it.
    Confirm(Introduction, Mac),
    Ready,
    Refuse(Refusal),
    Heartbeat,
    HeartbeatAck,
    Bye,
    Message {
        id: u64,
        pool: u32,
        bytes: &'a [u8],
    },
    /// A message of so many bytes, which come in fragments if they are granted.
    Offer {
        id: u64,
        pool: u32,
        len: u64,
    },
    Grant {
        id: u64,
    },
    Fragment {
        id: u64,
        offset: u64,
        bytes: &'a [u8],
    },
    /// No further fragments come.
    Abandon {
        id: u64,
    },
    Accepted {
        id: u64,
    },
    Rejected {
        id: u64,
        why: Rejection,
    },
    ResetAsk {
        id: u64,
        imm: u32,
    },
    ResetAck {
        id: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame<'a> {
    /// The number by which the receiver recognises the sender; 0 in Hello, and in a Refuse to one that is not known.
    pub session: u64,
    pub body: Body<'a>,
}

impl Introduction {
    fn write(&self, writer: Writer) -> Writer {
        let writer = writer.u64(self.session).bytes(&self.nonce).u32(self.heartbeat_timeout_ms);
        let writer =
            writer.u64(self.fences.count).u64(self.fences.at_ms).u64(self.fences.open_ns).u64(self.fences.clock);
        // At most MAX_NICS: a builder and `read_nics` both see to it.
        let writer = writer.u8(self.nics.len() as u8);
        self.nics.iter().fold(writer, |writer, nic| nic.write(writer))
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (session, nonce, heartbeat_timeout_ms) = (reader.u64()?, reader.array()?, reader.u32()?);
        if session == 0 {
            return Err(DecodeError::Value("session"));
        }
        let (count, at_ms) = (reader.u64()?, reader.u64()?);
        let fences = Fences { count, at_ms, open_ns: reader.u64()?, clock: reader.u64()? };
        let nics = read_nics(reader, NicAddr::read, |nic| nic)?;
        Ok(Self { session, nonce, heartbeat_timeout_ms, fences, nics })
    }

    /// The bytes that the shared secret is applied to.
    pub fn transcript(&self) -> Vec<u8> {
        self.write(Writer::default()).finish()
    }
}

impl Frame<'_> {
    pub fn encode(&self) -> Vec<u8> {
        let start = |kind| Writer::default().bytes(&MAGIC).u8(VERSION).u8(kind).u64(self.session);
        match &self.body {
            Body::Hello(hello) => hello.from.write(start(1).u64(hello.to_engine).u16(hello.to_group)),
            Body::Welcome(from, mac) => from.write(start(2).bytes(mac)),
            Body::Confirm(from, mac) => from.write(start(3).bytes(mac)),
            Body::Ready => start(4),
            Body::Refuse(refusal) => write_refusal(start(5), *refusal),
            Body::Heartbeat => start(6),
            Body::HeartbeatAck => start(7),
            Body::Bye => start(8),
            Body::Message { id, pool, bytes } => start(9).u64(*id).u32(*pool).bytes(bytes),
            Body::Accepted { id } => start(10).u64(*id),
            Body::Rejected { id, why } => match why {
                Rejection::NoReceives => start(11).u64(*id).u8(1).u64(0),
                Rejection::Exhausted => start(11).u64(*id).u8(2).u64(0),
                Rejection::TooLong { allowed } => start(11).u64(*id).u8(3).u64(*allowed),
            },
            Body::ResetAsk { id, imm } => start(12).u64(*id).u32(*imm),
            Body::ResetAck { id } => start(13).u64(*id),
            Body::Offer { id, pool, len } => start(14).u64(*id).u32(*pool).u64(*len),
            Body::Grant { id } => start(15).u64(*id),
            Body::Fragment { id, offset, bytes } => start(16).u64(*id).u64(*offset).bytes(bytes),
            Body::Abandon { id } => start(17).u64(*id),
        }
        .finish()
    }
}

fn write_refusal(writer: Writer, refusal: Refusal) -> Writer {
    let (code, theirs, ours) = match refusal {
        Refusal::Version => (1, 0, 0),
        Refusal::NicCount { theirs, ours } => (2, theirs, ours),
        Refusal::Secret => (3, 0, 0),
        Refusal::Stale => (4, 0, 0),
        Refusal::Busy => (5, 0, 0),
        Refusal::Fenced { count, at_ms } => return writer.u8(6).u64(count).u64(at_ms),
        Refusal::Void => (7, 0, 0),
        Refusal::OutOfFiles => (8, 0, 0),
    };
    writer.u8(code).u16(theirs).u16(ours)
}

fn read_refusal(reader: &mut Reader<'_>) -> Result<Refusal, DecodeError> {
    let code = reader.u8()?;
    if code == 6 {
        return Ok(Refusal::Fenced { count: reader.u64()?, at_ms: reader.u64()? });
    }
    match (code, reader.u16()?, reader.u16()?) {
        (1, 0, 0) => Ok(Refusal::Version),
        (2, theirs, ours) => Ok(Refusal::NicCount { theirs, ours }),
        (3, 0, 0) => Ok(Refusal::Secret),
        (4, 0, 0) => Ok(Refusal::Stale),
        (5, 0, 0) => Ok(Refusal::Busy),
        (7, 0, 0) => Ok(Refusal::Void),
        (8, 0, 0) => Ok(Refusal::OutOfFiles),
        _ => Err(DecodeError::Value("refusal")),
    }
}

/// Reads a frame that came from the network.
pub(crate) fn decode(bytes: &[u8]) -> Result<Frame<'_>, DecodeError> {
    let mut reader = Reader::new(bytes);
    if reader.array()? != MAGIC {
        return Err(DecodeError::Magic);
    }
    match reader.u8()? {
        VERSION => {}
        other => return Err(DecodeError::Version(other)),
    }
    let kind = reader.u8()?;
    let session = reader.u64()?;
    let body = match kind {
        1 => {
            let (to_engine, to_group) = (reader.u64()?, reader.u16()?);
            Body::Hello(Hello { to_engine, to_group, from: Introduction::read(&mut reader)? })
        }
        2 => {
            let mac = reader.array()?;
            Body::Welcome(Introduction::read(&mut reader)?, mac)
        }
        3 => {
            let mac = reader.array()?;
            Body::Confirm(Introduction::read(&mut reader)?, mac)
        }
        4 => Body::Ready,
        5 => Body::Refuse(read_refusal(&mut reader)?),
        6 => Body::Heartbeat,
        7 => Body::HeartbeatAck,
        8 => Body::Bye,
        9 => Body::Message { id: reader.u64()?, pool: reader.u32()?, bytes: reader.rest() },
        10 => Body::Accepted { id: reader.u64()? },
        11 => {
            let id = reader.u64()?;
            let why = match (reader.u8()?, reader.u64()?) {
                (1, 0) => Rejection::NoReceives,
                (2, 0) => Rejection::Exhausted,
                (3, allowed) => Rejection::TooLong { allowed },
                _ => return Err(DecodeError::Value("rejection")),
            };
            Body::Rejected { id, why }
        }
        12 => Body::ResetAsk { id: reader.u64()?, imm: reader.u32()? },
        13 => Body::ResetAck { id: reader.u64()? },
        14 => Body::Offer { id: reader.u64()?, pool: reader.u32()?, len: reader.u64()? },
        15 => Body::Grant { id: reader.u64()? },
        16 => Body::Fragment { id: reader.u64()?, offset: reader.u64()?, bytes: reader.rest() },
        17 => Body::Abandon { id: reader.u64()? },
        _ => return Err(DecodeError::Value("kind")),
    };
    reader.finish()?;
    Ok(Frame { session, body })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::descriptor::{PeerKey, ProviderKind};

    fn nics(count: u8) -> Vec<NicAddr> {
        let key = PeerKey { engine: 7, group: 1 };
        (0..count).map(|nic| NicAddr { provider: ProviderKind::Sim, key, nic, endpoint: vec![nic; 5] }).collect()
    }

    fn bodies() -> Vec<Body<'static>> {
        let from = Introduction {
            session: 3,
            nonce: [4; 16],
            heartbeat_timeout_ms: 5,
            fences: Fences { count: 6, at_ms: 7, open_ns: 8, clock: 9 },
            nics: nics(2),
        };
        let mut bodies = vec![
            Body::Hello(Hello { to_engine: 1, to_group: 2, from: from.clone() }),
            Body::Welcome(from.clone(), [9; 32]),
            Body::Confirm(from, [8; 32]),
            Body::Ready,
            Body::Heartbeat,
            Body::HeartbeatAck,
            Body::Bye,
            Body::Message { id: 1 << 40, pool: 7, bytes: b"hello" },
            Body::Message { id: 1, pool: 0, bytes: b"" },
            Body::Offer { id: 3, pool: 1, len: 1 << 40 },
            Body::Grant { id: 3 },
            Body::Fragment { id: 3, offset: 9, bytes: b"part" },
            Body::Abandon { id: 3 },
            Body::Accepted { id: 2 },
            Body::ResetAsk { id: 5, imm: u32::MAX },
            Body::ResetAck { id: 5 },
        ];
        for why in [Rejection::NoReceives, Rejection::Exhausted, Rejection::TooLong { allowed: 77 }] {
            bodies.push(Body::Rejected { id: 3, why });
        }
        let refused = Refusal::NicCount { theirs: 2, ours: 1 };
        let fenced = Refusal::Fenced { count: 3, at_ms: 1 << 40 };
        let plain =
            [Refusal::Version, Refusal::Secret, Refusal::Stale, Refusal::Busy, Refusal::Void, Refusal::OutOfFiles];
        for refusal in plain.into_iter().chain([refused, fenced]) {
            bodies.push(Body::Refuse(refusal));
        }
        bodies
    }

    #[test]
    fn frames_come_back_and_no_prefix_does() {
        for body in bodies() {
            let fixed = match body {
                Body::Message { .. } => OVERHEAD,
                Body::Fragment { .. } => FRAGMENT_OVERHEAD,
                _ => usize::MAX,
            };
            let frame = Frame { session: 0x0102_0304_0506_0708, body };
            let bytes = frame.encode();
            assert_eq!(decode(&bytes), Ok(frame));
            for cut in 0..bytes.len() {
                assert!(decode(&bytes[..cut]).is_err() || cut >= fixed);
            }
        }
        let message = Frame { session: 1, body: Body::Message { id: 1, pool: 2, bytes: b"abc" } };
        assert_eq!(message.encode().len(), OVERHEAD + 3);
        let fragment = Frame { session: 1, body: Body::Fragment { id: 1, offset: 2, bytes: b"abc" } };
        assert_eq!(fragment.encode().len(), FRAGMENT_OVERHEAD + 3);
    }

    proptest! {
        #[test]
        fn a_changed_byte_is_an_error_or_another_frame(pick: prop::sample::Index, at: prop::sample::Index, value: u8) {
            let body = bodies().swap_remove(pick.index(bodies().len()));
            let mut bytes = Frame { session: 6, body }.encode();
            let at = at.index(bytes.len());
            bytes[at] = value;
            if let Ok(frame) = decode(&bytes) {
                prop_assert_eq!(frame.encode(), bytes);
            }
        }

        #[test]
        fn noise_never_crashes(mut bytes in prop::collection::vec(any::<u8>(), 4..120), kind in 0u8..20) {
            bytes[..3].copy_from_slice(b"pt\x05");
            bytes[3] = kind;
            if let Ok(frame) = decode(&bytes) {
                prop_assert_eq!(frame.encode(), bytes);
            }
        }
    }
}
