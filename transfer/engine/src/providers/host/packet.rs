//! Packets between two processes of one host: who comes, what else there is to map, and "wake up". Each is one packet of
//! a `SOCK_SEQPACKET` connection: a kind (u8) and a body, little-endian. What is not exactly as written here ends the connection.

use crate::providers::interface::MAX_GREETING;
use crate::wire::bytes::{DecodeError, Reader, Writer};

const VERSION: u8 = 1;
/// Longest packet in bytes.
pub(super) const MAX_PACKET: usize = MAX_GREETING + 1;

/// Bytes at an address of a process, by which a reader of its memory knows that it is still the same process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    pub address: u64,
    pub bytes: [u8; 16],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packet<'a> {
    /// The first packet of a link. The ring comes with it.
    Present { pass: u64, mark: Mark },
    /// A message of a handshake.
    Greeting(&'a [u8]),
    /// There is something in a ring.
    Bell,
    /// Memory that later requests name as their source comes with it.
    Segment { id: u32, len: u64 },
    /// No further request names that memory.
    Forget { id: u32 },
}

impl Packet<'_> {
    pub fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        match *self {
            Self::Present { pass, mark } => {
                writer.u8(1).u8(VERSION).u64(pass).u64(mark.address).bytes(&mark.bytes).finish()
            }
            Self::Greeting(bytes) => writer.u8(2).bytes(bytes).finish(),
            Self::Bell => writer.u8(3).finish(),
            Self::Segment { id, len } => writer.u8(4).u32(id).u64(len).finish(),
            Self::Forget { id } => writer.u8(5).u32(id).finish(),
        }
    }
}

pub(super) fn decode(bytes: &[u8]) -> Result<Packet<'_>, DecodeError> {
    let mut reader = Reader::new(bytes);
    let packet = match reader.u8()? {
        1 => match reader.u8()? {
            VERSION => {
                let (pass, address, bytes) = (reader.u64()?, reader.u64()?, reader.array()?);
                Packet::Present { pass, mark: Mark { address, bytes } }
            }
            other => return Err(DecodeError::Version(other)),
        },
        2 => Packet::Greeting(reader.rest()),
        3 => Packet::Bell,
        4 => Packet::Segment { id: reader.u32()?, len: reader.u64()? },
        5 => Packet::Forget { id: reader.u32()? },
        _ => return Err(DecodeError::Value("kind")),
    };
    reader.finish()?;
    Ok(packet)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mark = Mark { address: 1 << 47, bytes: [3; 16] };
        let greeting = [7; MAX_GREETING];
        let packets = [
            Packet::Present { pass: u64::MAX, mark },
            Packet::Greeting(b""),
            Packet::Greeting(&greeting),
            Packet::Bell,
            Packet::Segment { id: 3, len: 1 << 40 },
            Packet::Forget { id: 3 },
        ];
        for packet in packets {
            let bytes = packet.encode();
            assert!(bytes.len() <= MAX_PACKET);
            assert_eq!(decode(&bytes), Ok(packet));
            if !matches!(packet, Packet::Greeting(_)) {
                assert!((0..bytes.len()).all(|shorter| decode(&bytes[..shorter]).is_err()));
                assert!(decode(&[&bytes[..], &[0]].concat()).is_err());
            }
        }
    }

    proptest! {
        #[test]
        fn bytes_from_outside_never_harm(bytes in proptest::collection::vec(any::<u8>(), 0..60), kind in 0_u8..7) {
            let bytes = [&[kind], &bytes[..]].concat();
            if let Ok(packet) = decode(&bytes) {
                prop_assert_eq!(packet.encode(), bytes);
            }
        }
    }
}
