//! Words between two processes beside the GPUs: messages, keys, and writes into host memory.
//!
//! A frame is its length (u32, of kind and body), a kind (u8) and a body. Numbers are little-endian. Whatever is not
//! exactly as written here ends the connection.

use crate::wire::bytes::{DecodeError, Reader, Writer};

/// Longest frame, with its length.
pub(super) const MAX_FRAME: usize = 160 << 10;
/// Most bytes of host memory that one frame writes.
pub(super) const MAX_PUT: usize = 128 << 10;
const HEADER: usize = 4;
const VERSION: u8 = 3;

/// Where a registered region is, as its owner answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// There is none with this key.
    Unknown,
    /// Host memory: written through this connection.
    Host { len: u64 },
    /// Device memory of this process itself.
    Near { ordinal: u16, address: u64, len: u64 },
    /// Device memory of another process.
    Far { handle: [u8; 64], offset: u64, len: u64 },
    /// Device memory in pieces, so many with so many bytes together, which have to be asked for.
    Scattered { count: u32, total: u64, offset: u64, len: u64 },
}

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Control<'a> {
    /// The first frame of a connection. The ring of immediates comes with it. `process` tells one process from another. `pass` is what lets
    /// the sender in; 0 stands for a way, which carries messages alone, in both directions.
    Hello { process: u64, pass: u64 },
    /// A two-sided message.
    Message(&'a [u8]),
    /// Where is the region with this key?
    Resolve { rkey: u64 },
    /// The answer.
    Region { rkey: u64, place: Place },
    /// The region's registration ends: nothing may be written there any more.
    Revoke { rkey: u64 },
    /// Nothing of the sender's is under way to that region, and nothing will be.
    Released { rkey: u64 },
    /// Bytes for host memory. The last piece of a write carries its immediate.
    Put { id: u64, rkey: u64, offset: u64, last: bool, imm: Option<u32>, bytes: &'a [u8] },
    /// The last piece of a write has landed, or one was refused: 0 landed, 1 unknown key, 2 out of bounds.
    Landed { id: u64, status: u8 },
    /// A piece of a region's memory is asked for.
    Want { rkey: u64, index: u32 },
    /// The answer. Its descriptor comes with it.
    Piece { rkey: u64, index: u32, len: u64 },
}

impl Control<'_> {
    /// Appends the frame.
    pub fn write(&self, into: &mut impl Extend<u8>) {
        let writer = Writer::default();
        let (kind, body) = match *self {
            Self::Hello { process, pass } => (1, writer.u8(VERSION).u64(process).u64(pass)),
            Self::Message(bytes) => (2, writer.bytes(bytes)),
            Self::Resolve { rkey } => (3, writer.u64(rkey)),
            Self::Region { rkey, place } => {
                let writer = writer.u64(rkey);
                let body = match place {
                    Place::Unknown => writer.u8(0),
                    Place::Host { len } => writer.u8(1).u64(len),
                    Place::Near { ordinal, address, len } => writer.u8(2).u16(ordinal).u64(address).u64(len),
                    Place::Far { handle, offset, len } => writer.u8(3).bytes(&handle).u64(offset).u64(len),
                    Place::Scattered { count, total, offset, len } => {
                        writer.u8(4).u32(count).u64(total).u64(offset).u64(len)
                    }
                };
                (4, body)
            }
            Self::Revoke { rkey } => (5, writer.u64(rkey)),
            Self::Released { rkey } => (6, writer.u64(rkey)),
            Self::Put { id, rkey, offset, last, imm, bytes } => {
                let head = writer.u64(id).u64(rkey).u64(offset).u8(u8::from(last));
                (7, head.u8(u8::from(imm.is_some())).u32(imm.unwrap_or(0)).bytes(bytes))
            }
            Self::Landed { id, status } => (8, writer.u64(id).u8(status)),
            Self::Want { rkey, index } => (9, writer.u64(rkey).u32(index)),
            Self::Piece { rkey, index, len } => (10, writer.u64(rkey).u32(index).u64(len)),
        };
        let body = body.finish();
        // Bodies are bounded by MAX_FRAME.
        into.extend((body.len() as u32 + 1).to_le_bytes());
        into.extend([kind]);
        into.extend(body);
    }
}

/// The length of the first frame, once its bytes are all there.
pub(super) fn complete(bytes: &[u8]) -> Result<Option<usize>, DecodeError> {
    let Some((len, _)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
    let len = (u32::from_le_bytes(*len) as usize).saturating_add(HEADER);
    if len <= HEADER || len > MAX_FRAME {
        return Err(DecodeError::Value("length"));
    }
    Ok((bytes.len() >= len).then_some(len))
}

/// Reads one frame, which is all of `bytes`.
pub(super) fn decode(bytes: &[u8]) -> Result<Control<'_>, DecodeError> {
    let mut reader = Reader::new(bytes);
    if reader.u32()? as usize != bytes.len() - HEADER {
        return Err(DecodeError::Value("length"));
    }
    let yes = |value| match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Value("flag")),
    };
    let frame = match reader.u8()? {
        1 => match reader.u8()? {
            VERSION => Control::Hello { process: reader.u64()?, pass: reader.u64()? },
            other => return Err(DecodeError::Version(other)),
        },
        2 => Control::Message(reader.rest()),
        3 => Control::Resolve { rkey: reader.u64()? },
        4 => {
            let rkey = reader.u64()?;
            let place = match reader.u8()? {
                0 => Place::Unknown,
                1 => Place::Host { len: reader.u64()? },
                2 => Place::Near { ordinal: reader.u16()?, address: reader.u64()?, len: reader.u64()? },
                3 => Place::Far { handle: reader.array()?, offset: reader.u64()?, len: reader.u64()? },
                4 => Place::Scattered {
                    count: reader.u32()?,
                    total: reader.u64()?,
                    offset: reader.u64()?,
                    len: reader.u64()?,
                },
                _ => return Err(DecodeError::Value("place")),
            };
            Control::Region { rkey, place }
        }
        5 => Control::Revoke { rkey: reader.u64()? },
        6 => Control::Released { rkey: reader.u64()? },
        7 => {
            let (id, rkey, offset) = (reader.u64()?, reader.u64()?, reader.u64()?);
            let (last, has_imm, imm) = (yes(reader.u8()?)?, yes(reader.u8()?)?, reader.u32()?);
            if !has_imm && imm != 0 {
                return Err(DecodeError::Value("imm"));
            }
            Control::Put { id, rkey, offset, last, imm: has_imm.then_some(imm), bytes: reader.rest() }
        }
        8 => {
            let (id, status) = (reader.u64()?, reader.u8()?);
            if status > 2 {
                return Err(DecodeError::Value("status"));
            }
            Control::Landed { id, status }
        }
        9 => Control::Want { rkey: reader.u64()?, index: reader.u32()? },
        10 => Control::Piece { rkey: reader.u64()?, index: reader.u32()?, len: reader.u64()? },
        _ => return Err(DecodeError::Value("kind")),
    };
    reader.finish()?;
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(frame: &Control<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame.write(&mut bytes);
        bytes
    }

    #[test]
    fn what_is_written_is_read() {
        let places = [
            Place::Unknown,
            Place::Host { len: 5 },
            Place::Near { ordinal: 3, address: 1 << 40, len: 9 },
            Place::Far { handle: [7; 64], offset: 512, len: 1 << 30 },
            Place::Scattered { count: 2, total: 4 << 20, offset: 512, len: 1 << 20 },
        ];
        let regions = places.map(|place| Control::Region { rkey: 4, place });
        let others = [
            Control::Hello { process: 1, pass: 7 },
            Control::Message(b"text"),
            Control::Message(b""),
            Control::Resolve { rkey: u64::MAX },
            Control::Revoke { rkey: 2 },
            Control::Released { rkey: 2 },
            Control::Put { id: 1, rkey: 2, offset: 3, last: true, imm: Some(0), bytes: b"abc" },
            Control::Put { id: 1, rkey: 2, offset: 3, last: false, imm: None, bytes: b"" },
            Control::Landed { id: 1, status: 2 },
            Control::Want { rkey: 2, index: 1 },
            Control::Piece { rkey: 2, index: 1, len: 2 << 20 },
        ];
        for frame in regions.into_iter().chain(others) {
            let bytes = bytes(&frame);
            assert_eq!(complete(&bytes), Ok(Some(bytes.len())));
            assert_eq!(decode(&bytes), Ok(frame));
            for shorter in 0..bytes.len() {
                assert_eq!(complete(&bytes[..shorter]), Ok(None));
            }
        }
        assert!(
            bytes(&Control::Put { id: 0, rkey: 0, offset: 0, last: true, imm: None, bytes: &[0; MAX_PUT] }).len()
                < MAX_FRAME
        );
    }

    #[test]
    fn what_is_wrong_is_refused() {
        let with_length = |body: &[u8]| [&(body.len() as u32).to_le_bytes()[..], body].concat();
        for body in
            [&[][..], &[0], &[9], &[11], &[1, 9, 0, 0, 0, 0, 0, 0, 0, 0], &[3, 1], &[8, 0, 0, 0, 0, 0, 0, 0, 0, 3]]
        {
            assert!(decode(&with_length(body)).is_err(), "{body:?}");
        }
        assert!(complete(&u32::MAX.to_le_bytes()).is_err());
        assert!(complete(&0_u32.to_le_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn bytes_from_outside_never_harm(body in proptest::collection::vec(any::<u8>(), 0..120), kind in 0_u8..12) {
            let mut frame = (body.len() as u32 + 1).to_le_bytes().to_vec();
            frame.push(kind);
            frame.extend(body);
            if let Ok(found) = decode(&frame) {
                prop_assert_eq!(bytes(&found), frame);
            }
        }
    }
}
