//! Bytes of messages: little-endian, length-prefixed, bounded. A reader never trusts a length.

use putget_transfer::DecodeError;

pub(crate) type Result<T> = std::result::Result<T, DecodeError>;

/// Appends fields.
#[derive(Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub fn u32(&mut self, value: u32) {
        self.bytes.extend(value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.bytes.extend(value.to_le_bytes());
    }

    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    pub fn blob(&mut self, bytes: &[u8]) {
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.raw(bytes);
    }

    pub fn text(&mut self, text: &str) {
        self.blob(text.as_bytes());
    }

    pub fn list<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Self, &T)) {
        self.u32(u32::try_from(items.len()).unwrap_or(u32::MAX));
        items.iter().for_each(|item| write(self, item));
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

/// Takes fields off the front of a slice.
pub(crate) struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes }
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (taken, left) = self.left.split_first_chunk::<N>().ok_or(DecodeError::Truncated)?;
        self.left = left;
        Ok(*taken)
    }

    pub fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub fn flag(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(DecodeError::Value("flag")),
        }
    }

    pub fn blob(&mut self, most: usize) -> Result<&'a [u8]> {
        let len = self.u32()? as usize;
        if len > most {
            return Err(DecodeError::Value("length"));
        }
        let (taken, left) = self.left.split_at_checked(len).ok_or(DecodeError::Truncated)?;
        self.left = left;
        Ok(taken)
    }

    pub fn text(&mut self, most: usize) -> Result<String> {
        let text = std::str::from_utf8(self.blob(most)?).map_err(|_| DecodeError::Value("text"))?;
        Ok(text.to_owned())
    }

    /// A list of at most `most` items, each of at least `least` bytes: a length that the bytes cannot hold costs no memory.
    pub fn list<T>(
        &mut self,
        most: usize,
        least: usize,
        mut read: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        let count = self.u32()? as usize;
        if count > most {
            return Err(DecodeError::Value("count"));
        }
        if count.checked_mul(least).is_none_or(|bytes| bytes > self.left.len()) {
            return Err(DecodeError::Truncated);
        }
        (0..count).map(|_| read(self)).collect()
    }

    /// Nothing is left over.
    pub fn end(&self) -> Result<()> {
        if self.left.is_empty() { Ok(()) } else { Err(DecodeError::Trailing(self.left.len())) }
    }
}
