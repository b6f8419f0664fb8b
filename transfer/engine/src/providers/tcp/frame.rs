//! Frames of a connection. The side that connects sends a greeting of fixed length, then requests, each a head and a
//! payload. The other side answers in the order of the requests, and bytes of reads come between the answers.
//!
//! Numbers are little-endian. What is not exactly as written here ends the connection.

use crate::wire::bytes::{DecodeError, Reader, Writer};

const MAGIC: [u8; 2] = *b"pc";
const VERSION: u8 = 1;

/// Bytes of a greeting: magic, version, zero, pass.
pub(super) const GREETING: usize = 12;
/// Bytes of a head: kind, whether there is an immediate, two zeros, immediate, length, key, address.
pub(super) const HEAD: usize = 32;
/// Bytes of an answer: kind, why, two zeros, low bits of a request's number or a length.
pub(super) const ANSWER: usize = 8;

/// The greeting: the pass that lets the sender in, or 0 for a way.
pub(super) fn greeting(pass: u64) -> Vec<u8> {
    Writer::default().bytes(&MAGIC).u8(VERSION).u8(0).u64(pass).finish()
}

pub(super) fn read_greeting(bytes: &[u8]) -> Result<u64, DecodeError> {
    let mut reader = Reader::new(bytes);
    if reader.array()? != MAGIC {
        return Err(DecodeError::Magic);
    }
    match (reader.u8()?, reader.u8()?) {
        (VERSION, 0) => {}
        (other, _) => return Err(DecodeError::Version(other)),
    }
    let pass = reader.u64()?;
    reader.finish()?;
    Ok(pass)
}

/// The request; `len` bytes of payload follow, or are asked for by a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub kind: Kind,
    pub len: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Message,
    Write { rkey: u64, dst: u64, imm: Option<u32> },
    Read { rkey: u64, from: u64 },
}

impl Head {
    pub fn encode(&self) -> [u8; HEAD] {
        let (kind, has_imm, imm, rkey, dst) = match self.kind {
            Kind::Message => (1, 0, 0, 0, 0),
            Kind::Write { rkey, dst, imm } => (2, u8::from(imm.is_some()), imm.unwrap_or(0), rkey, dst),
            Kind::Read { rkey, from } => (3, 0, 0, rkey, from),
        };
        let writer = Writer::default().u8(kind).u8(has_imm).u16(0).u32(imm).u64(self.len).u64(rkey).u64(dst);
        writer.finish().try_into().unwrap_or([0; HEAD])
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let (kind, has_imm, zeros, imm) = (reader.u8()?, reader.u8()?, reader.u16()?, reader.u32()?);
        let (len, rkey, dst) = (reader.u64()?, reader.u64()?, reader.u64()?);
        reader.finish()?;
        let kind = match (kind, has_imm, zeros, imm, rkey, dst) {
            (1, 0, 0, 0, 0, 0) => Kind::Message,
            (2, 0, 0, 0, ..) => Kind::Write { rkey, dst, imm: None },
            (2, 1, 0, ..) => Kind::Write { rkey, dst, imm: Some(imm) },
            (3, 0, 0, 0, ..) => Kind::Read { rkey, from: dst },
            _ => return Err(DecodeError::Value("head")),
        };
        Ok(Self { kind, len })
    }
}

/// Why a write or a read was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    BadKey,
    OutOfBounds,
}

/// Outcomes of requests. They are counted from 0 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// All requests before this number are over; those that have landed had no other answer.
    Done(u32),
    /// The request of this number was refused, and nothing more of it lands.
    Refused(u32, Refused),
    /// So many bytes follow of the oldest read that has not all of its own.
    Data(u32),
}

impl Answer {
    pub fn encode(self) -> [u8; ANSWER] {
        let (kind, why, number) = match self {
            Self::Done(number) => (1, 0, number),
            Self::Refused(number, Refused::BadKey) => (2, 1, number),
            Self::Refused(number, Refused::OutOfBounds) => (2, 2, number),
            Self::Data(len) => (3, 0, len),
        };
        Writer::default().u8(kind).u8(why).u16(0).u32(number).finish().try_into().unwrap_or([0; ANSWER])
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let (kind, why, zeros, number) = (reader.u8()?, reader.u8()?, reader.u16()?, reader.u32()?);
        reader.finish()?;
        match (kind, why, zeros) {
            (1, 0, 0) => Ok(Self::Done(number)),
            (2, 1, 0) => Ok(Self::Refused(number, Refused::BadKey)),
            (2, 2, 0) => Ok(Self::Refused(number, Refused::OutOfBounds)),
            (3, 0, 0) if number > 0 => Ok(Self::Data(number)),
            _ => Err(DecodeError::Value("answer")),
        }
    }
}

/// For the fuzzer: what is accepted must encode to the same bytes.
#[cfg(fuzzing)]
pub fn fuzz_stream(bytes: &[u8]) {
    if let Ok(head) = Head::decode(bytes) {
        assert_eq!(head.encode(), bytes);
    }
    if let Ok(answer) = Answer::decode(bytes) {
        assert_eq!(answer.encode(), bytes);
    }
    if let Ok(pass) = read_greeting(bytes) {
        assert_eq!(greeting(pass), bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let write = |imm| Kind::Write { rkey: u64::MAX, dst: 3, imm };
        let read = Kind::Read { rkey: u64::MAX, from: 3 };
        for kind in [Kind::Message, write(None), write(Some(0)), write(Some(u32::MAX)), read] {
            let head = Head { kind, len: 1 << 40 };
            assert_eq!(Head::decode(&head.encode()), Ok(head));
        }
        let refused = [Answer::Refused(u32::MAX, Refused::BadKey), Answer::Refused(0, Refused::OutOfBounds)];
        for answer in refused.into_iter().chain([Answer::Done(7), Answer::Data(1)]) {
            assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
        }
        assert_eq!(read_greeting(&greeting(5)), Ok(5));
        assert!(read_greeting(b"GET / HTTP/1").is_err());
    }

    proptest! {
        #[test]
        fn bytes_from_outside_are_errors_or_come_back(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(head) = Head::decode(&bytes) {
                prop_assert_eq!(&head.encode()[..], &bytes[..]);
            }
            if let Ok(answer) = Answer::decode(&bytes) {
                prop_assert_eq!(&answer.encode()[..], &bytes[..]);
            }
            if let Ok(pass) = read_greeting(&bytes) {
                prop_assert_eq!(greeting(pass), bytes);
            }
        }
    }
}
