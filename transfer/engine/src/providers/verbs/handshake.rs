//! Datagrams between NICs: which queue pairs belong together, and what a connection has received when it
//! ended. Datagrams get lost and overtake each other, so everything is repeated until it is answered, and every answer can
//! be given again. All bytes come from outside: decoding trusts nothing.

use crate::wire::bytes::{DecodeError, Reader, Writer};

const MAGIC: [u8; 2] = *b"pv";
const VERSION: u8 = 1;

/// The two queue pairs of a connection: messages on one, writes on the other. Both consume receives in the order of
/// posting, so on one queue pair a write's immediate would take a receive that was meant for a message.
pub(super) const LANES: usize = 2;
pub(super) const MESSAGES: usize = 0;
pub(super) const WRITES: usize = 1;

/// Where a NIC takes datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Endpoint {
    pub gid: [u8; 16],
    /// The local identifier, on InfiniBand.
    pub lid: u16,
    pub qpn: u32,
    /// A sender without it cannot send a datagram.
    pub qkey: u32,
    /// The largest packet, as verbs counts: 1 is 256 bytes, and each step doubles.
    pub mtu: u8,
    pub ethernet: bool,
}

/// Queue pairs and packet numbers are 24 bits.
const MAX_24: u32 = (1 << 24) - 1;

impl Endpoint {
    pub fn to_bytes(self) -> Vec<u8> {
        self.write(Writer::default()).finish()
    }

    /// The GID, as text. Nothing else of it is for errors.
    pub fn host(self) -> String {
        std::net::Ipv6Addr::from(self.gid).to_string()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let endpoint = Self::read(&mut reader)?;
        reader.finish()?;
        Ok(endpoint)
    }

    fn write(self, writer: Writer) -> Writer {
        let writer = writer.u8(VERSION).bytes(&self.gid).u16(self.lid).u32(self.qpn).u32(self.qkey);
        writer.u8(self.mtu).u8(u8::from(self.ethernet))
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match reader.u8()? {
            VERSION => {}
            other => return Err(DecodeError::Version(other)),
        }
        let (gid, lid, qpn, qkey) = (reader.array()?, reader.u16()?, reader.u32()?, reader.u32()?);
        let (mtu, ethernet) = (reader.u8()?, reader.u8()?);
        if qpn > MAX_24 || !(1..=5).contains(&mtu) || ethernet > 1 {
            return Err(DecodeError::Value("endpoint"));
        }
        Ok(Self { gid, lid, qpn, qkey, mtu, ethernet: ethernet == 1 })
    }
}

/// One side's end of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    pub qpn: u32,
    /// The number of the first packet that it sends.
    pub psn: u32,
}

/// One side's ends of both.
pub(super) type Ends = [End; LANES];

/// How many receives a connection has consumed on each queue pair, in its whole life.
pub(super) type Received = [u64; LANES];

/// The word itself. `from` and `to` are the two sides' names of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    /// I want a connection, and these are my ends. `pass` is what the receiver lets its sender in by.
    Open { from: u64, ends: Ends, pass: u64 },
    /// It stands on my side.
    Accept { to: u64, from: u64, ends: Ends, pass: u64 },
    /// On mine too: send what you have.
    Ready { to: u64, from: u64 },
    /// My ends are gone for good. `to` is 0 where it was never learnt.
    Close { to: u64, from: u64, received: Received },
    /// Mine too.
    Closed { to: u64, received: Received },
    /// The connection that this pass let in has ended here.
    Gone { pass: u64 },
}

/// The word and its speaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Datagram {
    pub sender: Endpoint,
    pub body: Body,
}

/// Room for every datagram but greetings, in bytes; and for those.
pub(super) const MAX_DATAGRAM: usize = 128;
pub(super) const MAX_GREETING: usize = 440;
/// The kind of a datagram that carries a frame of the engines' handshake.
const GREETING: u8 = 6;

fn write_ends(writer: Writer, ends: &Ends) -> Writer {
    ends.iter().fold(writer, |writer, end| writer.u32(end.qpn).u32(end.psn))
}

fn read_ends(reader: &mut Reader<'_>) -> Result<Ends, DecodeError> {
    let mut ends = [End { qpn: 0, psn: 0 }; LANES];
    for end in &mut ends {
        *end = End { qpn: reader.u32()?, psn: reader.u32()? };
        if end.qpn > MAX_24 || end.psn > MAX_24 {
            return Err(DecodeError::Value("ends"));
        }
    }
    Ok(ends)
}

/// A frame of the engines' handshake, as a datagram.
pub(super) fn encode_greeting(sender: &Endpoint, bytes: &[u8]) -> Vec<u8> {
    sender.write(Writer::default().bytes(&MAGIC).u8(GREETING)).bytes(bytes).finish()
}

/// The sender of a greeting, and its bytes; None if it is none.
pub(super) fn decode_greeting(bytes: &[u8]) -> Option<(Endpoint, &[u8])> {
    let mut reader = Reader::new(bytes);
    if reader.array().ok()? != MAGIC || reader.u8().ok()? != GREETING {
        return None;
    }
    Some((Endpoint::read(&mut reader).ok()?, reader.rest()))
}

impl Datagram {
    pub fn encode(&self) -> Vec<u8> {
        let kind = match self.body {
            Body::Open { .. } => 1,
            Body::Accept { .. } => 2,
            Body::Ready { .. } => 3,
            Body::Close { .. } => 4,
            Body::Closed { .. } => 5,
            Body::Gone { .. } => 7,
        };
        let writer = self.sender.write(Writer::default().bytes(&MAGIC).u8(kind));
        let writer = match self.body {
            Body::Open { from, ends, pass } => write_ends(writer.u64(from), &ends).u64(pass),
            Body::Accept { to, from, ends, pass } => write_ends(writer.u64(to).u64(from), &ends).u64(pass),
            Body::Ready { to, from } => writer.u64(to).u64(from),
            Body::Close { to, from, received: [messages, writes] } => {
                writer.u64(to).u64(from).u64(messages).u64(writes)
            }
            Body::Closed { to, received: [messages, writes] } => writer.u64(to).u64(messages).u64(writes),
            Body::Gone { pass } => writer.u64(pass),
        };
        writer.finish()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        if reader.array()? != MAGIC {
            return Err(DecodeError::Magic);
        }
        let kind = reader.u8()?;
        let sender = Endpoint::read(&mut reader)?;
        let body = match kind {
            1 => Body::Open { from: reader.u64()?, ends: read_ends(&mut reader)?, pass: reader.u64()? },
            2 => Body::Accept {
                to: reader.u64()?,
                from: reader.u64()?,
                ends: read_ends(&mut reader)?,
                pass: reader.u64()?,
            },
            3 => Body::Ready { to: reader.u64()?, from: reader.u64()? },
            4 => Body::Close { to: reader.u64()?, from: reader.u64()?, received: [reader.u64()?, reader.u64()?] },
            5 => Body::Closed { to: reader.u64()?, received: [reader.u64()?, reader.u64()?] },
            7 => Body::Gone { pass: reader.u64()? },
            _ => return Err(DecodeError::Value("kind")),
        };
        reader.finish()?;
        Ok(Self { sender, body })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn datagram() -> impl Strategy<Value = Datagram> {
        let endpoint = (any::<[u8; 16]>(), any::<u16>(), 0..=MAX_24, any::<u32>(), 1u8..=5, any::<bool>())
            .prop_map(|(gid, lid, qpn, qkey, mtu, ethernet)| Endpoint { gid, lid, qpn, qkey, mtu, ethernet });
        let end = || (0..=MAX_24, 0..=MAX_24).prop_map(|(qpn, psn)| End { qpn, psn });
        let ends = || [end(), end()];
        let body = prop_oneof![
            (any::<u64>(), ends(), any::<u64>()).prop_map(|(from, ends, pass)| Body::Open { from, ends, pass }),
            (any::<u64>(), any::<u64>(), ends(), any::<u64>()).prop_map(|(to, from, ends, pass)| Body::Accept {
                to,
                from,
                ends,
                pass
            }),
            any::<u64>().prop_map(|pass| Body::Gone { pass }),
            (any::<u64>(), any::<u64>()).prop_map(|(to, from)| Body::Ready { to, from }),
            (any::<u64>(), any::<u64>(), any::<[u64; 2]>()).prop_map(|(to, from, received)| Body::Close {
                to,
                from,
                received
            }),
            (any::<u64>(), any::<[u64; 2]>()).prop_map(|(to, received)| Body::Closed { to, received }),
        ];
        (endpoint, body).prop_map(|(sender, body)| Datagram { sender, body })
    }

    proptest! {
        #[test]
        fn datagrams_come_back(datagram in datagram()) {
            let bytes = datagram.encode();
            prop_assert!(bytes.len() <= MAX_DATAGRAM);
            prop_assert_eq!(Datagram::decode(&bytes), Ok(datagram));
            prop_assert_eq!(Endpoint::from_bytes(&datagram.sender.to_bytes()), Ok(datagram.sender));
            for cut in 0..bytes.len() {
                prop_assert!(Datagram::decode(&bytes[..cut]).is_err());
            }
            prop_assert_eq!(Datagram::decode(&[&bytes[..], b"x"].concat()), Err(DecodeError::Trailing(1)));
        }

        #[test]
        fn hostile_bytes_are_errors_or_come_back(datagram in datagram(), at in any::<prop::sample::Index>(), value: u8) {
            let mut bytes = datagram.encode();
            let at = at.index(bytes.len());
            bytes[at] = value;
            if let Ok(read) = Datagram::decode(&bytes) {
                prop_assert_eq!(read.encode(), bytes);
            }
        }

        #[test]
        fn noise_is_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(Datagram::decode(&bytes).is_err());
        }
    }
}
