//! Immediates on their way from one process to another: a ring of words in memory that both have mapped.
//!
//! The writer reserves a slot, and either stores the immediate itself or has its GPU do so once the payload has landed.
//! Several may be under way and filled in any order; the reader takes whatever is filled.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Immediates that may be under way on one link.
const SLOTS: u64 = 1024;
/// Words before the slots: how many were reserved, and, a cache line later, how many were taken.
const RESERVED: usize = 0;
const TAKEN: usize = 8;
const FIRST: usize = 16;
const BYTES: usize = (FIRST + SLOTS as usize).next_multiple_of(512) * 8;

/// Shared memory, mapped as long as this lives.
struct Words {
    start: NonNull<AtomicU64>,
}

impl Words {
    fn map(file: BorrowedFd<'_>) -> io::Result<Self> {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
        // SAFETY: a new mapping at a place of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, prot, flags, file.as_raw_fd(), 0) };
        match NonNull::new(start.cast::<AtomicU64>()) {
            Some(words) if start != libc::MAP_FAILED => Ok(Self { start: words }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        let index = index % (BYTES / 8);
        // SAFETY: inside the mapping, which lives as long as `self`; words are only ever accessed atomically, and a GPU's
        // 64-bit store is one, too.
        unsafe { self.start.add(index).as_ref() }
    }

    fn slot(&self, sequence: u64) -> &AtomicU64 {
        self.word(FIRST + (sequence % SLOTS) as usize)
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, with this length.
        unsafe { libc::munmap(self.start.as_ptr().cast(), BYTES) };
    }
}

/// The value of a slot once the immediate of this turn is in it. Never 0, and never the value of the turn before.
fn filled(sequence: u64, imm: u32) -> u64 {
    let lap = (sequence / SLOTS + 1) as u32;
    (u64::from(lap.max(1)) << 32) | u64::from(imm)
}

fn failed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The writing side.
pub(super) struct RingWriter {
    words: Words,
    file: OwnedFd,
    next: u64,
}

impl RingWriter {
    pub fn new() -> io::Result<Self> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a constant, terminated name.
        let raw = unsafe { libc::memfd_create(c"putget_transfer".as_ptr(), flags) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, and nobody else's.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(raw) });
        file.set_len(BYTES as u64)?;
        // The reader insists on this: a file that shrinks would end its process.
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: the file is open.
        if unsafe { libc::fcntl(raw, libc::F_ADD_SEALS, seals) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let words = Words::map(file.as_fd())?;
        Ok(Self { words, file: file.into(), next: 0 })
    }

    /// The memory that the reader maps.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where the ring lies in this process, and how long it is, for pinning.
    pub fn span(&self) -> (usize, usize) {
        (self.words.start.as_ptr() as usize, BYTES)
    }

    /// Says whether a slot is free.
    pub fn has_room(&self) -> bool {
        self.next - self.words.word(TAKEN).load(Ordering::Acquire).min(self.next) < SLOTS
    }

    /// Reserves the next slot: its number, its address, and the word that has to be stored there.
    pub fn reserve(&mut self, imm: u32) -> (u64, usize, u64) {
        let sequence = self.next;
        self.next += 1;
        self.words.word(RESERVED).store(self.next, Ordering::Release);
        (sequence, std::ptr::from_ref(self.words.slot(sequence)) as usize, filled(sequence, imm))
    }

    /// Stores an immediate at once.
    pub fn store(&mut self, imm: u32) {
        let (sequence, _, word) = self.reserve(imm);
        self.words.slot(sequence).store(word, Ordering::Release);
    }

    /// Says whether the GPU has stored this word. The reader may have taken it since, and the slot have a new tenant.
    pub fn is_stored(&self, sequence: u64, word: u64) -> bool {
        self.words.slot(sequence).load(Ordering::Acquire) == word
            || self.words.word(TAKEN).load(Ordering::Acquire) > sequence
    }
}

/// The reading side.
pub(super) struct RingReader {
    words: Words,
    taken: u64,
    /// Which of the slots from `taken` on have been read already.
    ahead: u64,
}

/// How far ahead of the oldest missing immediate the reader looks.
const AHEAD: u64 = 64;

impl RingReader {
    /// Maps a ring that came from another process.
    pub fn open(file: OwnedFd) -> io::Result<Self> {
        // SAFETY: the file is open.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        let file = File::from(file);
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 || file.metadata()?.len() != BYTES as u64 {
            return Err(failed("this is not a ring"));
        }
        Ok(Self { words: Words::map(file.as_fd())?, taken: 0, ahead: 0 })
    }

    /// Takes the immediates that are there, each once. An error: the writer does not keep to the rules.
    pub fn take(&mut self, mut arrived: impl FnMut(u32)) -> io::Result<bool> {
        let reserved = self.words.word(RESERVED).load(Ordering::Acquire);
        let waiting = reserved.wrapping_sub(self.taken);
        if waiting == 0 {
            return Ok(false);
        }
        if waiting > SLOTS {
            return Err(failed("more immediates than there are slots"));
        }
        let mut any = false;
        for index in 0..waiting.min(AHEAD) {
            let sequence = self.taken + index;
            let word = self.words.slot(sequence).load(Ordering::Acquire);
            if self.ahead & (1 << index) == 0 && word >> 32 == filled(sequence, 0) >> 32 {
                self.ahead |= 1 << index;
                any = true;
                arrived(word as u32);
            }
        }
        let done = self.ahead.trailing_ones();
        self.ahead = self.ahead.checked_shr(done).unwrap_or(0);
        self.taken += u64::from(done);
        self.words.word(TAKEN).store(self.taken, Ordering::Release);
        Ok(any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (RingWriter, RingReader) {
        let writer = RingWriter::new().unwrap();
        let reader = RingReader::open(writer.file().try_clone_to_owned().unwrap()).unwrap();
        (writer, reader)
    }

    fn taken(reader: &mut RingReader) -> Vec<u32> {
        let mut found = Vec::new();
        reader.take(|imm| found.push(imm)).unwrap();
        found
    }

    #[test]
    fn every_immediate_comes_once_over_many_laps() {
        let (mut writer, mut reader) = pair();
        let mut random = fastrand::Rng::with_seed(3);
        let (mut sent, mut got) = (0, 0);
        while got < 20_000 {
            for _ in 0..random.u32(0..200) {
                if writer.has_room() {
                    writer.store(sent);
                    sent += 1;
                }
            }
            for imm in taken(&mut reader) {
                assert_eq!(imm, got);
                got += 1;
            }
        }
    }

    #[test]
    fn what_is_filled_late_does_not_hold_the_others_up() {
        let (mut writer, mut reader) = pair();
        let (first, _, word) = writer.reserve(7);
        writer.store(8);
        assert_eq!(taken(&mut reader), [8]);
        assert_eq!(taken(&mut reader), [0; 0]);
        assert!(!writer.is_stored(first, word));
        writer.words.slot(first).store(word, Ordering::Release);
        assert!(writer.is_stored(first, word));
        assert_eq!(taken(&mut reader), [7]);
    }

    #[test]
    fn a_full_ring_has_no_room_until_it_is_read() {
        let (mut writer, mut reader) = pair();
        for imm in 0..SLOTS as u32 {
            assert!(writer.has_room());
            writer.store(imm);
        }
        assert!(!writer.has_room());
        assert_eq!(taken(&mut reader).len(), AHEAD as usize);
        assert!(writer.has_room());
    }

    #[test]
    fn what_is_not_a_ring_is_refused() {
        let file = File::from(RingWriter::new().unwrap().file);
        assert!(RingReader::open(file.into()).is_ok());
        // SAFETY: a constant, terminated name.
        let raw = unsafe { libc::memfd_create(c"short".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: just opened.
        assert!(RingReader::open(unsafe { OwnedFd::from_raw_fd(raw) }).is_err());
        let (writer, mut reader) = pair();
        writer.words.word(RESERVED).store(SLOTS + 1, Ordering::Release);
        assert!(reader.take(|_| ()).is_err());
    }
}
