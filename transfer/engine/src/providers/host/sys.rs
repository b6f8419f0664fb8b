//! The kernel's services for the provider: sockets that carry packets and descriptors, memory that two processes map, and reading another
//! process's memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use super::packet::{MAX_PACKET, Mark, Packet};
use crate::error::obstacle::Obstacle;
use crate::error::{Error, NetworkError};
use crate::memory::region::Region;
use crate::sys::os::checked;

/// Room for one descriptor beside the bytes, and not for two.
#[repr(C, align(8))]
struct Ancillary([u8; 64]);

const ONE_FILE: u32 = size_of::<RawFd>() as u32;

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: a call without pointers; the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(checked(libc::socket(libc::AF_UNIX, kind, 0))?) })
}

/// An address in the abstract namespace, which needs no file and goes away with its socket.
fn address(name: &[u8]) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: plain bits, for which all zeros are valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The first byte stays 0: that is what makes it abstract.
    let room = address.sun_path.get_mut(1..=name.len());
    let room = room.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the name is too long"))?;
    room.iter_mut().zip(name).for_each(|(to, from)| *to = *from as libc::c_char);
    let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    Ok((address, len as libc::socklen_t))
}

/// Why there is no connection to somebody who should listen there.
pub(super) fn no_connection(endpoint: &[u8], error: &io::Error) -> NetworkError {
    match error.kind() {
        io::ErrorKind::InvalidInput => Obstacle::Address.at(endpoint),
        _ => Obstacle::of(error).at(endpoint),
    }
}

/// Where others connect to.
pub(super) struct Listener(OwnedFd);

impl Listener {
    pub fn bind(name: &[u8]) -> io::Result<Self> {
        let (socket, (address, len)) = (socket()?, address(name)?);
        // SAFETY: the address has this length and lives through the call.
        checked(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) })?;
        // SAFETY: the socket is open.
        checked(unsafe { libc::listen(socket.as_raw_fd(), 4096) })?;
        Ok(Self(socket))
    }

    /// The next connection, if one waits. Processes of other users are turned away.
    pub fn accept(&self) -> io::Result<Socket> {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        loop {
            let (none, no_len) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the socket is open, and nobody asks for the address; the new descriptor is nobody else's.
            let accepted = unsafe {
                let raw = libc::accept4(self.0.as_raw_fd(), none, no_len, flags);
                if raw < 0 {
                    return Err(io::Error::last_os_error());
                }
                Socket::of(OwnedFd::from_raw_fd(raw))
            };
            if accepted.is_ok() {
                return accepted;
            }
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// One connection, with what tells that the process at its other end has gone.
pub(super) struct Socket {
    file: OwnedFd,
    /// The other end's process, as this one calls it; 0 where it has no name here.
    pub process: libc::pid_t,
}

impl Socket {
    /// Refused too where the process that listened has ended, and a fork of it keeps the name: nobody would answer.
    pub fn connect(name: &[u8]) -> io::Result<Self> {
        let (socket, (address, len)) = (socket()?, address(name)?);
        // SAFETY: the address has this length and lives through the call.
        checked(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) })?;
        let socket = Self::of(socket)?;
        if socket.is_orphaned() { Err(io::ErrorKind::ConnectionRefused.into()) } else { Ok(socket) }
    }

    fn of(file: OwnedFd) -> io::Result<Self> {
        // SAFETY: plain bits, for which all zeros are valid.
        let mut other: libc::ucred = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        let room = (&raw mut other).cast();
        // SAFETY: there is room for the credentials.
        checked(unsafe { libc::getsockopt(file.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, room, &mut len) })?;
        // SAFETY: a call without arguments.
        if other.uid != unsafe { libc::geteuid() } {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(Self { file, process: other.pid })
    }

    /// A descriptor that becomes readable when the other end's process has ended, also where a fork of it keeps the socket open. None: the
    /// kernel has no such thing, or the process no name here.
    pub fn watch(&self) -> Option<OwnedFd> {
        self.find_process().ok()
    }

    fn find_process(&self) -> io::Result<OwnedFd> {
        if self.process <= 0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        // SAFETY: a call without pointers.
        let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, self.process, 0) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, closes at exec, and is nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(raw as RawFd) })
    }

    fn is_orphaned(&self) -> bool {
        match self.find_process() {
            Ok(process) => has_ended(&process),
            Err(error) => error.raw_os_error() == Some(libc::ESRCH),
        }
    }

    pub fn send(&self, packet: &Packet<'_>, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let bytes = packet.encode();
        // The kernel only reads what it is given to send.
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut ancillary = Ancillary([0; 64]);
        // SAFETY: the message and what it points to live through the call; `ancillary` is aligned and has room for one
        // descriptor.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            if let Some(file) = file {
                message.msg_control = (&raw mut ancillary).cast();
                message.msg_controllen = libc::CMSG_SPACE(ONE_FILE) as usize;
                let head = libc::CMSG_FIRSTHDR(&raw const message);
                (*head).cmsg_level = libc::SOL_SOCKET;
                (*head).cmsg_type = libc::SCM_RIGHTS;
                (*head).cmsg_len = libc::CMSG_LEN(ONE_FILE) as usize;
                libc::CMSG_DATA(head).cast::<RawFd>().write_unaligned(file.as_raw_fd());
            }
            libc::sendmsg(self.file.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The next packet, with its descriptor. None: there is none now. An error: the other end has gone, or sends what is none.
    pub fn receive(&self) -> io::Result<Option<(Vec<u8>, Option<OwnedFd>)>> {
        let mut room = [0_u8; MAX_PACKET + 1];
        let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        let mut ancillary = Ancillary([0; 64]);
        // SAFETY: the message and what it points to live through the call; the kernel writes at most as much as there is
        // room for, and says how much that was. A descriptor that comes along is new and nobody else's.
        let (got, file) = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            message.msg_control = (&raw mut ancillary).cast();
            // CMSG_SPACE is padded, and a second descriptor would fit into the padding.
            message.msg_controllen = libc::CMSG_LEN(ONE_FILE) as usize;
            let got = libc::recvmsg(self.file.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            let has_file = got >= 0
                && !head.is_null()
                && (*head).cmsg_level == libc::SOL_SOCKET
                && (*head).cmsg_type == libc::SCM_RIGHTS
                && (*head).cmsg_len == libc::CMSG_LEN(ONE_FILE) as usize;
            let file = |head| OwnedFd::from_raw_fd(libc::CMSG_DATA(head).cast::<RawFd>().read_unaligned());
            (got, has_file.then(|| file(head)))
        };
        let Ok(got) = usize::try_from(got) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        };
        match room.get(..got) {
            Some(bytes @ [_, ..]) if got <= MAX_PACKET => Ok(Some((bytes.to_vec(), file))),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Closing does not end the connection where a fork has a copy of the descriptor.
        // SAFETY: the socket is open.
        unsafe { libc::shutdown(self.file.as_raw_fd(), libc::SHUT_RDWR) };
    }
}

/// Says whether a watched process has ended.
pub(super) fn has_ended(process: &OwnedFd) -> bool {
    let mut watched = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry that lives through the call, which does not wait.
    unsafe { libc::poll(&raw mut watched, 1, 0) == 1 }
}

/// Copies bytes with stores that do not fetch the lines that they overwrite. Four pages are on their way at a time, because memory
/// takes more from several pages than from one.
///
/// # Safety
/// As for `std::ptr::copy_nonoverlapping`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy_past_caches(from: *const u8, into: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const WORD: usize = size_of::<__m128i>();
    const LINE: usize = 64;
    const PAGE: usize = 4096;
    const BLOCK: usize = 4 * PAGE;
    let head = into.align_offset(LINE).min(len);
    let blocks = (len - head) / BLOCK;
    let end = head + blocks * BLOCK;
    // SAFETY: all offsets are below `len`, and from `head` on those of lines are aligned in `into`. The fence orders these stores
    // before all that this thread stores later.
    unsafe {
        std::ptr::copy_nonoverlapping(from, into, head);
        for block in (head..end).step_by(BLOCK) {
            for line in (block..block + PAGE).step_by(LINE) {
                for page in (line..line + BLOCK).step_by(PAGE) {
                    for word in (page..page + LINE).step_by(WORD) {
                        _mm_stream_si128(into.add(word).cast(), _mm_loadu_si128(from.add(word).cast()));
                    }
                }
            }
        }
        _mm_sfence();
        std::ptr::copy_nonoverlapping(from.add(end), into.add(end), len - end);
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
use std::ptr::copy_nonoverlapping as copy_past_caches;

/// Memory in a file without a name, mapped as long as this lives.
pub(super) struct Segment {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is this value's own; whoever uses it follows the rules of the methods, from whichever thread.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// A file that shrinks would end the process that has it mapped.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

impl Segment {
    /// Makes zeroed memory that other processes can map.
    pub fn create(len: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a constant, terminated name; the descriptor is new and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(checked(libc::memfd_create(c"putget_transfer".as_ptr(), flags))?) };
        let file = File::from(file);
        file.set_len(len as u64)?;
        // SAFETY: the file is open.
        checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) })?;
        Ok((Self::map(file.as_fd(), len, libc::PROT_READ | libc::PROT_WRITE)?, file.into()))
    }

    /// Maps memory that another process has made. It has to be as long as that process says, and has to stay so.
    pub fn open(file: &OwnedFd, len: usize, may_write: bool) -> io::Result<Self> {
        // SAFETY: the file is open.
        let seals = checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) })?;
        let found = File::from(file.try_clone()?).metadata()?.len();
        if seals & libc::F_SEAL_SHRINK == 0 || found != len as u64 || len == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let write = if may_write { libc::PROT_WRITE } else { 0 };
        Self::map(file.as_fd(), len, libc::PROT_READ | write)
    }

    fn map(file: BorrowedFd<'_>, len: usize, protection: libc::c_int) -> io::Result<Self> {
        let (none, shared) = (std::ptr::null_mut(), libc::MAP_SHARED);
        // SAFETY: a new mapping at a place of the kernel's choice.
        let start = unsafe { libc::mmap(none, len, protection, shared, file.as_raw_fd(), 0) };
        match NonNull::new(start.cast::<u8>()) {
            Some(first) if start != libc::MAP_FAILED => Ok(Self { start: first, len }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The 64-bit word of this number. Numbers wrap around at the end.
    pub fn word(&self, number: usize) -> &AtomicU64 {
        let number = number % (self.len / 8).max(1);
        // SAFETY: inside the mapping, which begins at a page and lives as long as `self`; words are only accessed atomically.
        unsafe { self.start.cast::<AtomicU64>().add(number).as_ref() }
    }

    fn at(&self, offset: u64, len: u64) -> Result<*mut u8, Error> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len as u64);
        let outside = || Error::argument("offset", "bytes outside of shared memory came");
        // SAFETY: inside the mapping, or one past its end.
        inside.then(|| unsafe { self.start.as_ptr().add(offset as usize) }).ok_or_else(outside)
    }

    /// Copies bytes of a region in.
    pub fn put(&self, offset: u64, (region, from): (&Region, u64), len: u64) -> Result<(), Error> {
        let into = self.at(offset, len)?;
        // SAFETY: `at` has checked the range. Another process may read it meanwhile, which finds nothing published.
        unsafe { region.copy_out(from, into, len) }
    }

    /// Copies bytes into a region.
    pub fn give(&self, offset: u64, to: (&Region, u64), len: u64) -> Result<(), Error> {
        self.give_by(std::ptr::copy_nonoverlapping, offset, to, len)
    }

    /// The same past the caches: for parts of a copy of which they could not keep both ends.
    pub fn stream(&self, offset: u64, to: (&Region, u64), len: u64) -> Result<(), Error> {
        self.give_by(copy_past_caches, offset, to, len)
    }

    fn give_by(
        &self,
        copy: unsafe fn(*const u8, *mut u8, usize),
        offset: u64,
        (region, to): (&Region, u64),
        len: u64,
    ) -> Result<(), Error> {
        let from = self.at(offset, len)?;
        // SAFETY: `at` has checked the range. A process that breaks the rules may change the bytes meanwhile: then any will do.
        // Both kinds of `copy` copy bytes that do not overlap, and do nothing else.
        unsafe { region.copy_in(to, (from, len), copy) }
    }

    /// Copies bytes in.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let into = self.at(offset, bytes.len() as u64)?;
        // SAFETY: `at` has checked the range, and `bytes` is memory of its own.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into, bytes.len()) };
        Ok(())
    }

    /// Copies bytes out.
    pub fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, Error> {
        let from = self.at(offset, len)?;
        let mut bytes = vec![0; len as usize];
        // SAFETY: as above, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(bytes)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, with this length.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Allocates zeroed host memory that peers can map to read from.
pub(super) fn allocate(len: usize) -> Result<Region, Error> {
    if len == 0 {
        return Err(Error::argument("len", "0 bytes came; at least 1 is needed"));
    }
    let failed = |error: io::Error| Error::argument("len", format!("{len} bytes could not be allocated: {error}"));
    let (memory, file) = Segment::create(len).map_err(failed)?;
    let address = memory.start.as_ptr() as usize;
    // SAFETY: the region keeps the mapping, which is all of that file and nobody else's.
    unsafe { Region::of_file(address, len, file, Some(Box::new(memory))) }
}

/// The words that this process shows to those who may read its memory.
pub(super) fn own_mark() -> Result<Mark, Error> {
    static MARK: OnceLock<Box<[u8; 16]>> = OnceLock::new();
    let mark = match MARK.get() {
        Some(mark) => mark,
        None => {
            let mut bytes = [0; 16];
            let failed = |error: getrandom::Error| Error::System { what: "getrandom", why: error.to_string() };
            getrandom::fill(&mut bytes).map_err(failed)?;
            MARK.get_or_init(|| Box::new(bytes))
        }
    };
    Ok(Mark { address: std::ptr::from_ref(&**mark) as u64, bytes: **mark })
}

/// Bytes of another process and where they go.
pub(super) struct Stretch<'a> {
    pub from: u64,
    pub region: &'a Region,
    pub to: u64,
    pub len: u64,
}

/// Copies bytes out of another process's memory. It has to be the process with this mark: a process that has ended, whose number
/// another one has, or that runs another program by now, is none. Says how many bytes were copied, from the first on.
pub(super) fn pull(process: libc::pid_t, mark: Mark, stretches: &[Stretch<'_>]) -> io::Result<u64> {
    let mut found = [0_u8; 16];
    let mut local = Vec::with_capacity(stretches.len() + 1);
    let mut remote = Vec::with_capacity(stretches.len() + 1);
    let iovec = |address: usize, len: usize| libc::iovec { iov_base: address as *mut libc::c_void, iov_len: len };
    local.push(iovec(found.as_mut_ptr() as usize, found.len()));
    remote.push(iovec(mark.address as usize, found.len()));
    for stretch in stretches {
        let Some(to) = stretch.region.host_span(stretch.to, stretch.len) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        local.push(iovec(to, stretch.len as usize));
        remote.push(iovec(stretch.from as usize, stretch.len as usize));
    }
    let (many, count) = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
    // SAFETY: the lists have so many entries and live through the call. Local memory is room on this stack and spans of regions,
    // which are alive and valid for writes. The kernel checks remote addresses.
    let got = unsafe { libc::process_vm_readv(process, local.as_ptr(), many, remote.as_ptr(), count, 0) };
    let got = u64::try_from(got).map_err(|_| io::Error::last_os_error())?;
    if got < found.len() as u64 || found != mark.bytes {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(got - found.len() as u64)
}
