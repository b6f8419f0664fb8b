//! NetAddr and MrDesc: what one engine hands to another so that it can be reached and written to. Both are bytes to
//! whoever carries them, and both come from outside: decoding trusts nothing.

use std::fmt;
use std::sync::Arc;

use crate::error::PeerName;
use crate::wire::bytes::{DecodeError, Reader, Writer};

const ADDRESS_MAGIC: [u8; 4] = *b"PTNA";
const REGION_MAGIC: [u8; 4] = *b"PTMR";
const VERSION: u8 = 2;
/// Longest endpoint address of a provider, in bytes.
pub(crate) const MAX_ENDPOINT: usize = 256;
/// Most NICs of one device group.
pub const MAX_NICS: usize = 4;

/// Which kind of network an address belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProviderKind {
    /// The simulated network inside one process.
    Sim,
    /// libfabric.
    Libfabric,
    /// CUDA peer memory between processes of one machine.
    Nvlink,
    /// Verbs: InfiniBand and RoCE.
    Verbs,
    /// Ranks of one host, over shared memory.
    Host,
    /// TCP.
    Tcp,
}

impl ProviderKind {
    const fn code(self) -> u8 {
        match self {
            Self::Sim => 1,
            Self::Libfabric => 2,
            Self::Nvlink => 4,
            Self::Verbs => 3,
            Self::Host => 5,
            Self::Tcp => 6,
        }
    }

    fn from_code(code: u8) -> Result<Self, DecodeError> {
        match code {
            1 => Ok(Self::Sim),
            2 => Ok(Self::Libfabric),
            4 => Ok(Self::Nvlink),
            3 => Ok(Self::Verbs),
            5 => Ok(Self::Host),
            6 => Ok(Self::Tcp),
            _ => Err(DecodeError::Value("provider")),
        }
    }
}

/// One device group of one engine, as long as that engine lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PeerKey {
    pub engine: u64,
    pub group: u16,
}

impl PeerKey {
    pub const NOBODY: Self = Self { engine: 0, group: 0 };

    /// A name for messages. It must not give the identity away, because that is part of the address.
    pub fn name(self) -> PeerName {
        let mixed = (self.engine ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xff51_afd7_ed55_8ccd);
        PeerName { tag: (mixed >> 32) as u32, group: self.group }
    }
}

/// The address of one NIC of one engine.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct NicAddr {
    pub provider: ProviderKind,
    pub key: PeerKey,
    pub nic: u8,
    pub endpoint: Vec<u8>,
}

impl fmt::Debug for NicAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NicAddr({:?}, {}, NIC {})", self.provider, self.name(), self.nic)
    }
}

impl NicAddr {
    pub fn name(&self) -> PeerName {
        self.key.name()
    }

    pub fn write(&self, writer: Writer) -> Writer {
        // An endpoint is at most MAX_ENDPOINT bytes, whether it came from a provider or from `read`.
        let len = self.endpoint.len() as u16;
        writer
            .u8(self.provider.code())
            .u64(self.key.engine)
            .u16(self.key.group)
            .u8(self.nic)
            .u16(len)
            .bytes(&self.endpoint)
    }

    pub fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let provider = ProviderKind::from_code(reader.u8()?)?;
        let key = PeerKey { engine: reader.u64()?, group: reader.u16()? };
        let nic = reader.u8()?;
        let len = usize::from(reader.u16()?);
        if usize::from(nic) >= MAX_NICS || len > MAX_ENDPOINT {
            return Err(DecodeError::Value("nic"));
        }
        Ok(Self { provider, key, nic, endpoint: reader.bytes(len)?.to_vec() })
    }
}

/// The address of an engine: one NIC of each of its device groups, or of some of them. It is void once that engine has ended: a
/// restarted process has a new one.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct NetAddr {
    /// At least one, all of one engine, each of another device group.
    pub(crate) groups: Arc<[NicAddr]>,
}

impl From<NicAddr> for NetAddr {
    fn from(nic: NicAddr) -> Self {
        Self { groups: Arc::from([nic]) }
    }
}

impl fmt::Debug for NetAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NetAddr({}", self.name())?;
        self.groups.iter().try_for_each(|nic| write!(f, ", {:?} NIC {}", nic.provider, nic.nic))?;
        f.write_str(")")
    }
}

impl NetAddr {
    /// The name under which errors and events speak of the engine behind this address, in its first device group.
    pub fn name(&self) -> PeerName {
        self.key().name()
    }

    /// The provider of each device group.
    pub fn providers(&self) -> Vec<ProviderKind> {
        self.groups.iter().map(|nic| nic.provider).collect()
    }

    pub(crate) fn key(&self) -> PeerKey {
        self.groups.first().map_or(PeerKey::NOBODY, |nic| nic.key)
    }

    /// The address as bytes, to be carried to other engines.
    pub fn to_bytes(&self) -> Vec<u8> {
        // An engine has at most 255 device groups.
        let writer = Writer::default().bytes(&ADDRESS_MAGIC).u8(VERSION).u8(self.groups.len() as u8);
        self.groups.iter().fold(writer, |writer, nic| nic.write(writer)).finish()
    }

    /// Reads an address.
    ///
    /// # Errors
    /// [`DecodeError`] for anything that `to_bytes` did not write.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        open(&mut reader, ADDRESS_MAGIC)?;
        let groups = read_groups(&mut reader, NicAddr::read, |nic| nic.key)?;
        reader.finish()?;
        Ok(Self { groups: groups.into() })
    }
}

/// Reads what leads to one engine: at least one device group of it, each once.
fn read_groups<T>(
    reader: &mut Reader<'_>,
    mut read: impl FnMut(&mut Reader<'_>) -> Result<T, DecodeError>,
    key: impl Fn(&T) -> PeerKey,
) -> Result<Vec<T>, DecodeError> {
    let count = reader.u8()?;
    let mut groups: Vec<T> = Vec::new();
    for _ in 0..count {
        let group = read(reader)?;
        let own = key(&group);
        if groups.iter().map(&key).any(|other| other.engine != own.engine || other.group == own.group) {
            return Err(DecodeError::Value("device groups"));
        }
        groups.push(group);
    }
    if groups.is_empty() { Err(DecodeError::Value("device groups")) } else { Ok(groups) }
}

fn open(reader: &mut Reader<'_>, magic: [u8; 4]) -> Result<(), DecodeError> {
    if reader.array()? != magic {
        return Err(DecodeError::Magic);
    }
    match reader.u8()? {
        VERSION => Ok(()),
        other => Err(DecodeError::Version(other)),
    }
}

/// Reads the NICs of one device group: 1 to `MAX_NICS`, in order, all of the same engine, group and provider.
pub(crate) fn read_nics<T>(
    reader: &mut Reader<'_>,
    mut read: impl FnMut(&mut Reader<'_>) -> Result<T, DecodeError>,
    address: impl Fn(&T) -> &NicAddr,
) -> Result<Vec<T>, DecodeError> {
    let count = usize::from(reader.u8()?);
    if count == 0 || count > MAX_NICS {
        return Err(DecodeError::Value("NICs"));
    }
    let mut nics: Vec<T> = Vec::with_capacity(count);
    for index in 0..count {
        let nic = read(reader)?;
        let (own, first) = (address(&nic), address(nics.first().unwrap_or(&nic)));
        if usize::from(own.nic) != index || own.key != first.key || own.provider != first.provider {
            return Err(DecodeError::Value("NICs"));
        }
        nics.push(nic);
    }
    Ok(nics)
}

/// Where memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host's memory.
    Host,
    /// The memory of a CUDA device, by its ordinal.
    Cuda(u16),
}

/// The data that a NIC needs to write into a region of a peer.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct NicKey {
    pub address: NicAddr,
    /// The name of the region's offset 0 on the wire: a virtual address, or 0, as the provider has it.
    pub base: u64,
    pub rkey: u64,
}

/// The keys for writing into a region over one device group of its owner: one key per NIC.
pub(crate) type GroupKeys = Arc<[NicKey]>;

/// A registered memory region, as others see it: whoever holds it may write to the region, so treat it as a secret.
#[derive(Clone, PartialEq, Eq)]
pub struct MrDesc {
    pub(crate) len: u64,
    pub(crate) device: Device,
    /// At least one, all of one engine, each of another device group.
    pub(crate) groups: Arc<[GroupKeys]>,
}

impl fmt::Debug for MrDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MrDesc({}, {} bytes, {:?}", self.name(), self.len, self.device)?;
        for keys in self.groups.iter() {
            let provider = keys.first().map(|nic| nic.address.provider);
            provider.map_or(Ok(()), |provider| write!(f, ", {provider:?} {} NICs", keys.len()))?;
        }
        f.write_str(")")
    }
}

impl MrDesc {
    /// Length of the region in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Says whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the region lies, on its owner's machine.
    pub fn device(&self) -> Device {
        self.device
    }

    /// How many NICs the first device group has that its owner has registered it for.
    pub fn num_nics(&self) -> usize {
        self.groups.first().map_or(0, |keys| keys.len())
    }

    /// The name under which errors and events speak of the region's owner, in its first device group.
    pub fn name(&self) -> PeerName {
        self.key().name()
    }

    pub(crate) fn key(&self) -> PeerKey {
        self.groups.first().map_or(PeerKey::NOBODY, |keys| group_key(keys))
    }

    /// The descriptor as bytes, to be carried to those who may write to the region.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (kind, ordinal) = match self.device {
            Device::Host => (0, 0),
            Device::Cuda(ordinal) => (1, ordinal),
        };
        let writer = Writer::default().bytes(&REGION_MAGIC).u8(VERSION).u64(self.len).u8(kind).u16(ordinal);
        let writer = writer.u8(self.groups.len() as u8);
        // At most MAX_NICS each: a builder and `read_nics` both see to it.
        let nic = |writer: Writer, nic: &NicKey| nic.address.write(writer).u64(nic.base).u64(nic.rkey);
        let keys = |writer: Writer, keys: &GroupKeys| keys.iter().fold(writer.u8(keys.len() as u8), nic);
        self.groups.iter().fold(writer, keys).finish()
    }

    /// Reads a descriptor.
    ///
    /// # Errors
    /// [`DecodeError`] for anything that `to_bytes` did not write.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        open(&mut reader, REGION_MAGIC)?;
        let len = reader.u64()?;
        let device = match (reader.u8()?, reader.u16()?) {
            (0, 0) => Device::Host,
            (1, ordinal) => Device::Cuda(ordinal),
            _ => return Err(DecodeError::Value("device")),
        };
        let nic = |reader: &mut Reader<'_>| {
            let key = NicKey { address: NicAddr::read(reader)?, base: reader.u64()?, rkey: reader.u64()? };
            match key.base.checked_add(len) {
                Some(_) => Ok(key),
                None => Err(DecodeError::Value("base")),
            }
        };
        let keys = |reader: &mut Reader<'_>| Ok(read_nics(reader, nic, |nic| &nic.address)?.into());
        let groups = read_groups(&mut reader, keys, |keys: &GroupKeys| group_key(keys))?;
        reader.finish()?;
        Ok(Self { len, device, groups: groups.into() })
    }
}

pub(crate) fn group_key(keys: &[NicKey]) -> PeerKey {
    keys.first().map_or(PeerKey::NOBODY, |nic| nic.address.key)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(engine: u64, group: u16, nic: u8, endpoint: Vec<u8>) -> NicAddr {
        NicAddr { provider: ProviderKind::Sim, key: PeerKey { engine, group }, nic, endpoint }
    }

    fn region_of(len: u64, groups: Vec<Vec<NicKey>>) -> MrDesc {
        MrDesc { len, device: Device::Host, groups: groups.into_iter().map(GroupKeys::from).collect() }
    }

    fn region() -> impl Strategy<Value = MrDesc> {
        let endpoints = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..=MAX_NICS);
        let device = prop_oneof![Just(Device::Host), any::<u16>().prop_map(Device::Cuda)];
        let groups = prop::collection::vec((endpoints, any::<u64>()), 1..4);
        (any::<u64>(), any::<u16>(), 0..=u64::MAX / 2, device, groups, 0..u64::MAX / 2).prop_map(
            |(engine, group, len, device, groups, base)| {
                let keys = |(at, (endpoints, rkey)): (u16, (Vec<Vec<u8>>, u64))| {
                    let address = |nic, endpoint| address(engine, group.wrapping_add(at), nic, endpoint);
                    let key = |(nic, endpoint)| NicKey { address: address(nic, endpoint), base, rkey };
                    (0..).zip(endpoints).map(key).collect()
                };
                MrDesc { len, device, groups: (0..).zip(groups).map(keys).collect() }
            },
        )
    }

    proptest! {
        #[test]
        fn descriptors_come_back(region in region()) {
            let bytes = region.to_bytes();
            prop_assert_eq!(&MrDesc::from_bytes(&bytes), &Ok(region.clone()));
            let address = NetAddr { groups: region.groups.iter().map(|keys| keys[0].address.clone()).collect() };
            prop_assert_eq!(&NetAddr::from_bytes(&address.to_bytes()), &Ok(address));
            for cut in 0..bytes.len() {
                prop_assert!(MrDesc::from_bytes(&bytes[..cut]).is_err());
            }
            prop_assert_eq!(MrDesc::from_bytes(&[&bytes[..], b"x"].concat()), Err(DecodeError::Trailing(1)));
        }

        #[test]
        fn hostile_bytes_are_errors_or_come_back(region in region(), at in any::<prop::sample::Index>(), value: u8) {
            let mut bytes = region.to_bytes();
            let at = at.index(bytes.len());
            bytes[at] = value;
            if let Ok(read) = MrDesc::from_bytes(&bytes) {
                prop_assert_eq!(read.to_bytes(), bytes);
            }
        }

        #[test]
        fn noise_is_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(MrDesc::from_bytes(&bytes).is_err());
            prop_assert!(NetAddr::from_bytes(&bytes).is_err());
        }
    }

    #[test]
    fn nothing_shown_gives_an_address_or_a_key_away() {
        let address = address(0x1122_3344_5566_7788, 0, 0, vec![10, 1, 2, 3]);
        let key = NicKey { address: address.clone(), base: 0xabcd_ef01, rkey: 987_654_321 };
        let region = region_of(4096, vec![vec![key]]);
        for shown in [format!("{:?}", NetAddr::from(address)), format!("{region:?}"), region.name().to_string()] {
            for secret in ["11223344", "1234605616436508552", "10, 1, 2, 3", "abcdef01", "987654321"] {
                assert!(!shown.contains(secret), "{shown}");
            }
        }
    }

    #[test]
    fn nics_are_of_one_group_and_in_order() {
        let key = |engine, nic| NicKey { address: address(engine, 0, nic, vec![1]), base: 0, rkey: 1 };
        for nics in [vec![], vec![key(1, 1)], vec![key(1, 0), key(1, 0)], vec![key(1, 0), key(2, 1)]] {
            let region = region_of(1, vec![nics]);
            assert_eq!(MrDesc::from_bytes(&region.to_bytes()), Err(DecodeError::Value("NICs")));
        }
    }

    #[test]
    fn device_groups_are_of_one_engine_and_differ() {
        let key = |engine, group| vec![NicKey { address: address(engine, group, 0, vec![1]), base: 0, rkey: 1 }];
        for groups in [vec![], vec![key(1, 0), key(1, 0)], vec![key(1, 0), key(2, 1)]] {
            let region = region_of(1, groups.clone());
            assert_eq!(MrDesc::from_bytes(&region.to_bytes()), Err(DecodeError::Value("device groups")));
            let address = NetAddr { groups: groups.iter().map(|keys| keys[0].address.clone()).collect() };
            assert_eq!(NetAddr::from_bytes(&address.to_bytes()), Err(DecodeError::Value("device groups")));
        }
    }

    #[test]
    fn a_region_ends_inside_the_address_space() {
        let nics = vec![NicKey { address: address(1, 0, 0, vec![]), base: u64::MAX, rkey: 0 }];
        let region = region_of(1, vec![nics]);
        assert_eq!(MrDesc::from_bytes(&region.to_bytes()), Err(DecodeError::Value("base")));
    }
}
