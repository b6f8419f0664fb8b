//! Where a rollout rank takes a version, and the bytes in which an offer carries it.

use putget_transfer::{Error, MrDesc};

/// Where a rollout rank's memory takes a version: one descriptor and offset for each memory, and the immediate that it counts.
#[derive(Debug, Clone)]
pub struct Place {
    /// The rollout rank.
    pub target: u32,
    /// The thing that it counts.
    pub imm: u32,
    /// Registered memory, and where in it each memory of the schedule begins.
    pub memory: Vec<(MrDesc, u64)>,
}

/// Bytes of a length before a descriptor, and of a row of `memory`: a descriptor's number and an offset.
const LENGTH: usize = 4;
const ROW: usize = 12;

/// Descriptors one after the other, each behind its length.
pub fn pack_descs(descs: impl IntoIterator<Item = MrDesc>) -> Vec<u8> {
    let mut packed = Vec::new();
    for desc in descs {
        let bytes = desc.to_bytes();
        packed.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        packed.extend_from_slice(&bytes);
    }
    packed
}

fn unsound() -> Error {
    Error::argument("offers", "descriptors and rows of memory came that are cut off")
}

fn unpack_descs(mut packed: &[u8]) -> Result<Vec<MrDesc>, Error> {
    let mut descs = Vec::new();
    while !packed.is_empty() {
        let (length, left) = packed.split_first_chunk::<LENGTH>().ok_or_else(unsound)?;
        let (bytes, left) = left.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or_else(unsound)?;
        descs.push(MrDesc::from_bytes(bytes).map_err(|error| Error::argument("offers", error.to_string()))?);
        packed = left;
    }
    Ok(descs)
}

fn row(bytes: &[u8]) -> Option<(u32, u64)> {
    let (number, base) = bytes.split_first_chunk::<LENGTH>()?;
    Some((u32::from_le_bytes(*number), u64::from_le_bytes(base.try_into().ok()?)))
}

impl Place {
    /// Reads what an offer says: `descs` as [`pack_descs`] makes them; `memory` has for each memory of the schedule the number of its
    /// descriptor (4 bytes) and the offset in it (8 bytes), both little-endian.
    ///
    /// # Errors
    /// [`Error::Argument`] for anything else.
    pub fn read(target: u32, imm: u32, memory: &[u8], descs: &[u8]) -> Result<Self, Error> {
        let descs = unpack_descs(descs)?;
        let found = |bytes: &[u8]| {
            let (number, base) = row(bytes).ok_or_else(unsound)?;
            let missing = || Error::argument("offers", format!("descriptor {number} came; there are {}", descs.len()));
            Ok((descs.get(number as usize).ok_or_else(missing)?.clone(), base))
        };
        Ok(Self { target, imm, memory: memory.chunks(ROW).map(found).collect::<Result<_, Error>>()? })
    }
}

#[cfg(test)]
mod tests {
    use putget_transfer::{DeviceGroup, Engine, SimNetwork};

    use super::*;

    fn rows(rows: &[(u32, u64)]) -> Vec<u8> {
        rows.iter().flat_map(|(number, base)| [&number.to_le_bytes()[..], &base.to_le_bytes()[..]].concat()).collect()
    }

    #[test]
    fn what_is_packed_is_read_and_what_is_cut_off_is_refused() {
        let network = SimNetwork::new(3);
        let engine = Engine::builder().group(DeviceGroup::sim(&network, 1)).build().unwrap();
        let own: Vec<_> = [64, 128].into_iter().map(|len| engine.alloc_mr(len).unwrap()).collect();
        let packed = pack_descs(own.iter().map(|(_, desc)| desc.clone()));
        let memory = rows(&[(1, 5), (0, 0), (1, 1 << 40)]);
        let place = Place::read(7, 9, &memory, &packed).unwrap();
        assert_eq!((place.target, place.imm), (7, 9));
        let wanted = [(&own[1].1, 5), (&own[0].1, 0), (&own[1].1, 1 << 40)];
        assert_eq!(place.memory.iter().map(|(desc, base)| (desc, *base)).collect::<Vec<_>>(), wanted);
        for end in 1..packed.len() {
            assert!(Place::read(7, 9, &memory, &packed[..end]).is_err(), "{end}");
        }
        for memory in [rows(&[(2, 0)]), memory[..memory.len() - 1].to_vec()] {
            assert!(Place::read(7, 9, &memory, &packed).is_err());
        }
        assert!(Place::read(7, 9, &rows(&[(0, 0)]), &[]).is_err());
        assert_eq!(Place::read(7, 9, &[], &[]).unwrap().memory, []);
        engine.close();
    }
}
