//! Reading and writing of bytes that travel: little-endian, length-prefixed, bounded. A reader never trusts a length.

/// Why bytes could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes end too early.
    #[error("the bytes end too early")]
    Truncated,
    /// Bytes are left over.
    #[error("{0} bytes are left over")]
    Trailing(usize),
    /// They do not begin as they should.
    #[error("this is something else")]
    Magic,
    /// Another version of the format.
    #[error("version {0} of the format is not known")]
    Version(u8),
    /// A field has a value that is not allowed.
    #[error("field {0} has a value that is not allowed")]
    Value(&'static str),
}

type Result<T> = std::result::Result<T, DecodeError>;

/// Takes fields off the front of a slice.
pub(crate) struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes }
    }

    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        let (taken, left) = self.left.split_at_checked(len).ok_or(DecodeError::Truncated)?;
        self.left = left;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (taken, left) = self.left.split_first_chunk::<N>().ok_or(DecodeError::Truncated)?;
        self.left = left;
        Ok(*taken)
    }

    pub fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.left)
    }

    pub fn finish(self) -> Result<()> {
        if self.left.is_empty() { Ok(()) } else { Err(DecodeError::Trailing(self.left.len())) }
    }
}

/// Appends fields to a vector.
#[derive(Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub fn u8(self, value: u8) -> Self {
        self.bytes(&[value])
    }

    pub fn u16(self, value: u16) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}
