//! A cache in registered memory, and how a prefiller describes itself.

use putget_transfer::{DecodeError, Engine, Error, MrHandle, NetAddr};

use crate::codec::{Reader, Result as Decoded, Writer};
use crate::geometry::Geometry;
use crate::message::VERSION;

/// A rank's cache: its geometry and the registered memory that it lies in.
#[derive(Debug, Clone)]
pub struct KvCache {
    engine: Engine,
    geometry: Geometry,
    memory: Vec<MrHandle>,
}

impl KvCache {
    /// Binds a geometry to memory that `engine` has registered, in the order of [`Geometry::memory`].
    ///
    /// # Errors
    /// [`Error::Argument`] if the geometry is not possible, or memory is missing or of another length.
    pub fn new(engine: &Engine, geometry: Geometry, memory: Vec<MrHandle>) -> Result<Self, Error> {
        geometry.check()?;
        let found: Vec<_> = memory.iter().map(MrHandle::len).collect();
        if found != geometry.memory {
            let problem = format!("{found:?} bytes came; the geometry has {:?}", geometry.memory);
            return Err(Error::argument("memory", problem));
        }
        Ok(Self { engine: engine.clone(), geometry, memory })
    }

    /// The engine that has registered it.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Where its bytes lie.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(crate) fn handle(&self, memory: u32) -> Option<&MrHandle> {
        self.memory.get(memory as usize)
    }

    pub(crate) fn handles(&self) -> impl Iterator<Item = &MrHandle> {
        self.memory.iter()
    }
}

/// A prefill rank, as decoders know it: its address and its geometry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Where it can be asked.
    pub address: NetAddr,
    /// The pool of receives that takes requests.
    pub pool: u32,
    /// Where its bytes lie.
    pub geometry: Geometry,
}

const MAGIC: [u8; 4] = *b"PTKS";

impl Source {
    /// Its bytes, for a router or a directory.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.raw(&MAGIC);
        writer.u8(VERSION);
        writer.blob(&self.address.to_bytes());
        writer.u32(self.pool);
        self.geometry.encode(&mut writer);
        writer.finish()
    }

    /// Reads one.
    ///
    /// # Errors
    /// [`DecodeError`] for anything but the bytes of a source.
    pub fn from_bytes(bytes: &[u8]) -> Decoded<Self> {
        let mut reader = Reader::new(bytes);
        if reader.array()? != MAGIC {
            return Err(DecodeError::Magic);
        }
        match reader.u8()? {
            VERSION => {}
            version => return Err(DecodeError::Version(version)),
        }
        let address = NetAddr::from_bytes(reader.blob(65_536)?)?;
        let pool = reader.u32()?;
        let geometry = Geometry::decode(&mut reader)?;
        reader.end()?;
        Ok(Self { address, pool, geometry })
    }
}
