//! A connection between two processes of one machine: a UNIX socket in the abstract namespace that never blocks.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::control::{Control, complete};
use crate::sys::os::checked;

/// Bytes that may wait to be sent before more is refused.
const BACKLOG: usize = 1 << 20;
/// Bytes that one look takes from a connection, so that no peer keeps the others waiting.
const SIP: usize = 256 << 10;
/// Descriptors that may wait to leave, or have come and not been taken.
const MOST_FILES: usize = 64;

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
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

/// Where others connect to.
pub(super) struct Listener {
    socket: OwnedFd,
}

impl Listener {
    pub fn bind(name: &[u8]) -> io::Result<Self> {
        let (socket, (address, len)) = (socket()?, address(name)?);
        // SAFETY: the address has this length and lives through the call.
        checked(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) })?;
        // SAFETY: the socket is open.
        checked(unsafe { libc::listen(socket.as_raw_fd(), 1024) })?;
        Ok(Self { socket })
    }

    /// The next connection, if one waits. Processes of other users are turned away: a region's key is the right to write.
    pub fn accept(&self) -> Option<Channel> {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        loop {
            let (none, no_len) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the socket is open, and nobody asks for the address; the new descriptor is nobody else's.
            let socket = unsafe {
                let raw = libc::accept4(self.socket.as_raw_fd(), none, no_len, flags);
                if raw < 0 {
                    return None;
                }
                OwnedFd::from_raw_fd(raw)
            };
            if is_own_user(&socket) {
                return Some(Channel::new(socket));
            }
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// The process at the other end, as the kernel says.
fn credentials(socket: &OwnedFd) -> io::Result<libc::ucred> {
    // SAFETY: plain bits, for which all zeros are valid.
    let mut credentials: libc::ucred = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let room = (&raw mut credentials).cast();
    // SAFETY: there is room for the credentials.
    checked(unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, room, &mut len) })?;
    Ok(credentials)
}

fn is_own_user(socket: &OwnedFd) -> bool {
    // SAFETY: a call without arguments.
    credentials(socket).is_ok_and(|other| other.uid == unsafe { libc::geteuid() })
}

/// Room for one descriptor beside the bytes.
#[repr(C, align(8))]
struct Ancillary([u8; 64]);

/// One connection.
pub(super) struct Channel {
    socket: OwnedFd,
    out: VecDeque<u8>,
    /// Bytes that were ever handed over, and ever sent.
    queued: u64,
    sent: u64,
    incoming: Vec<u8>,
    /// Where the next frame begins in `incoming`.
    start: usize,
    /// Descriptors that are to leave with the byte of this number, and all that follow.
    leaving: VecDeque<(u64, OwnedFd)>,
    /// Descriptors that came along, in the order of their frames.
    files: VecDeque<OwnedFd>,
    closed: bool,
}

impl Channel {
    fn new(socket: OwnedFd) -> Self {
        let (out, incoming, leaving, files) = (VecDeque::new(), Vec::new(), VecDeque::new(), VecDeque::new());
        Self { socket, out, queued: 0, sent: 0, incoming, start: 0, leaving, files, closed: false }
    }

    /// Connects, and sends the first frame with a descriptor.
    pub fn connect(name: &[u8], hello: &Control<'_>, file: BorrowedFd<'_>) -> io::Result<Self> {
        let (socket, (address, len)) = (socket()?, address(name)?);
        // SAFETY: the address has this length and lives through the call.
        checked(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) })?;
        // The listener there learns where this process keeps its immediates.
        if !is_own_user(&socket) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let channel = Self::new(socket);
        let mut bytes = Vec::new();
        hello.write(&mut bytes);
        // A fresh connection has room for a few bytes.
        if channel.send_with(&bytes, file)? == bytes.len() {
            Ok(channel)
        } else {
            Err(io::ErrorKind::WouldBlock.into())
        }
    }

    /// Sends some of the bytes, with a descriptor at the first of them.
    fn send_with(&self, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<usize> {
        // The kernel only reads what it is given to send.
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut ancillary = Ancillary([0; 64]);
        // SAFETY: the message and what it points to live through the call; `ancillary` is aligned and has room for one
        // descriptor.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            message.msg_control = (&raw mut ancillary).cast();
            message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as usize;
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
            libc::CMSG_DATA(head).cast::<RawFd>().write_unaligned(file.as_raw_fd());
            libc::sendmsg(self.socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Says whether the other side is this process, too.
    pub fn is_within_process(&self) -> bool {
        credentials(&self.socket).is_ok_and(|other| u32::try_from(other.pid) == Ok(std::process::id()))
    }

    /// Says whether the other side is gone.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Says whether another frame may be queued.
    pub fn has_room(&self) -> bool {
        self.out.len() < BACKLOG
    }

    pub fn has_unsent(&self) -> bool {
        !self.out.is_empty()
    }

    /// Queues a frame; what `sent` has to reach until it has left.
    pub fn queue(&mut self, frame: &Control<'_>) -> u64 {
        let before = self.out.len();
        frame.write(&mut self.out);
        self.queued += (self.out.len() - before) as u64;
        self.queued
    }

    /// The same for a frame with a descriptor. None: too many wait to leave.
    pub fn queue_with(&mut self, frame: &Control<'_>, file: OwnedFd) -> Option<()> {
        self.leaving.push_back((self.queued, file));
        self.queue(frame);
        (self.leaving.len() <= MOST_FILES).then_some(())
    }

    /// How many bytes have left this process.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends what waits, as far as it goes.
    pub fn flush(&mut self) {
        while !self.closed && !self.out.is_empty() {
            match self.send_some() {
                Ok(sent) => {
                    self.out.drain(..sent);
                    self.sent += sent as u64;
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted => {}
                    _ => self.closed = true,
                },
            }
        }
    }

    /// Sends bytes up to the next one that a descriptor leaves with.
    fn send_some(&mut self) -> io::Result<usize> {
        let (front, _) = self.out.as_slices();
        let with = self.leaving.front().is_some_and(|(at, _)| *at == self.sent);
        let next = self.leaving.get(usize::from(with)).map_or(u64::MAX, |(at, _)| *at);
        let len = usize::try_from(next - self.sent).unwrap_or(usize::MAX).min(front.len());
        let bytes = front.get(..len).unwrap_or_default();
        if with && let Some((_, file)) = self.leaving.front() {
            let sent = self.send_with(bytes, file.as_fd())?;
            // It has left with the first byte.
            self.leaving.pop_front();
            return Ok(sent);
        }
        // SAFETY: the bytes belong to the queue, which does not change during the call.
        let sent = unsafe { libc::send(self.socket.as_raw_fd(), bytes.as_ptr().cast(), len, libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Takes what has come. False: that was not everything.
    pub fn receive(&mut self) -> bool {
        self.incoming.drain(..std::mem::take(&mut self.start));
        let end = self.incoming.len() + SIP;
        while !self.closed && self.incoming.len() < end {
            match self.receive_some() {
                Ok(0) => self.closed = true,
                Ok(_) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return true,
                    io::ErrorKind::Interrupted => {}
                    _ => self.closed = true,
                },
            }
        }
        self.closed
    }

    fn receive_some(&mut self) -> io::Result<usize> {
        self.incoming.reserve(SIP / 4);
        let room = self.incoming.spare_capacity_mut();
        let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        let mut ancillary = MaybeUninit::<Ancillary>::zeroed();
        // SAFETY: the message and what it points to live through the call; the kernel writes at most as much as there is
        // room for, and says how much that was. A descriptor that comes along is new and nobody else's.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            message.msg_control = ancillary.as_mut_ptr().cast();
            // Exactly one: the padding of CMSG_SPACE would let in a second descriptor, which nobody would close.
            message.msg_controllen = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
            let got = libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
            let Ok(got) = usize::try_from(got) else { return Err(io::Error::last_os_error()) };
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            let one = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
            if !head.is_null()
                && (*head).cmsg_level == libc::SOL_SOCKET
                && (*head).cmsg_type == libc::SCM_RIGHTS
                && (*head).cmsg_len == one
            {
                let raw = libc::CMSG_DATA(head).cast::<RawFd>().read_unaligned();
                self.files.push_back(OwnedFd::from_raw_fd(raw));
            }
            self.incoming.set_len(self.incoming.len() + got);
            // Nobody was asked for so many.
            if self.files.len() > MOST_FILES { Err(io::ErrorKind::InvalidData.into()) } else { Ok(got) }
        }
    }

    /// The descriptor of the frame that was taken, if it had one: the first that came.
    pub fn take_file(&mut self) -> Option<OwnedFd> {
        self.files.pop_front()
    }

    /// The bytes of the next frame. What is no frame closes the connection.
    pub fn next_frame(&mut self) -> Option<Vec<u8>> {
        let left = self.incoming.get(self.start..)?;
        match complete(left) {
            Ok(len) => {
                let frame = left.get(..len?)?.to_vec();
                self.start += frame.len();
                Some(frame)
            }
            Err(_) => {
                self.close();
                None
            }
        }
    }

    /// Ends the connection.
    pub fn close(&mut self) {
        self.closed = true;
        self.out.clear();
        self.leaving.clear();
        self.files.clear();
        self.start = self.incoming.len();
        // SAFETY: the socket is open.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::super::control::decode;
    use super::*;

    fn name(what: &str) -> Vec<u8> {
        format!("putget_transfer_test/{}/{what}", std::process::id()).into_bytes()
    }

    fn pair(what: &str) -> (Channel, Channel) {
        let listener = Listener::bind(&name(what)).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let one = Channel::connect(&name(what), &Control::Hello { process: 3, pass: 1 }, file.as_fd()).unwrap();
        let mut two = listener.accept().unwrap();
        assert!(listener.accept().is_none());
        assert!(one.is_within_process() && two.is_within_process());
        two.receive();
        assert_eq!(decode(&two.next_frame().unwrap()), Ok(Control::Hello { process: 3, pass: 1 }));
        assert!(two.take_file().is_some());
        (one, two)
    }

    #[test]
    fn frames_arrive_whole_and_in_order() {
        let (mut one, mut two) = pair("frames");
        let mut random = fastrand::Rng::with_seed(5);
        let sizes: Vec<_> = (0..300).map(|_| random.usize(0..20_000)).collect();
        let mut found = 0;
        let mut last = 0;
        for (index, size) in sizes.iter().enumerate() {
            last = one.queue(&Control::Message(&vec![index as u8; *size]));
            one.flush();
            two.receive();
            while let Some(frame) = two.next_frame() {
                assert_eq!(decode(&frame), Ok(Control::Message(&vec![found as u8; sizes[found]])));
                found += 1;
            }
        }
        while found < sizes.len() {
            one.flush();
            two.receive();
            while two.next_frame().is_some() {
                found += 1;
            }
        }
        assert_eq!(one.sent(), last);
    }

    /// A file that is told from others by its length.
    fn file_of(len: u64) -> OwnedFd {
        // SAFETY: a terminated name; the descriptor is new and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(checked(libc::memfd_create(c"numbered".as_ptr(), 0)).unwrap()) };
        // SAFETY: the descriptor is open.
        checked(unsafe { libc::ftruncate(file.as_raw_fd(), len as libc::off_t) }).unwrap();
        file
    }

    #[test]
    fn descriptors_arrive_with_their_frames() {
        let (mut one, mut two) = pair("descriptors");
        let mut random = fastrand::Rng::with_seed(6);
        let (mut sent, mut found) = (0, 0);
        while found < 400 {
            if sent < 400 && one.leaving.len() < 16 {
                one.queue(&Control::Message(&vec![1; random.usize(0..40_000)]));
                one.queue_with(&Control::Piece { rkey: 1, index: sent, len: 3 }, file_of(sent.into())).unwrap();
                sent += 1;
            }
            one.flush();
            two.receive();
            while let Some(frame) = two.next_frame() {
                if let Control::Piece { index, .. } = decode(&frame).unwrap() {
                    let len = std::fs::File::from(two.take_file().unwrap()).metadata().unwrap().len();
                    assert_eq!((index, len), (found, found.into()));
                    found += 1;
                }
            }
        }
        assert!(two.take_file().is_none() && one.leaving.is_empty() && !two.is_closed());
    }

    #[test]
    fn descriptors_that_nobody_asked_for_end_the_connection() {
        let (mut one, mut two) = pair("flood");
        for index in 0..2 * MOST_FILES as u32 {
            one.queue_with(&Control::Piece { rkey: 1, index, len: 3 }, file_of(1));
            one.flush();
        }
        two.receive();
        assert!(two.is_closed());
        // The sending side says so before it comes to that.
        let (mut one, _two) = pair("full");
        let mut queue = |index| one.queue_with(&Control::Piece { rkey: 1, index, len: 3 }, file_of(1));
        assert!((0..MOST_FILES as u32).all(|index| queue(index).is_some()));
        assert!(queue(0).is_none());
    }

    #[test]
    fn an_end_is_noticed() {
        let (one, mut two) = pair("end");
        assert!(two.receive() && !two.is_closed());
        drop(one);
        assert!(two.receive() && two.is_closed());
    }

    #[test]
    fn noise_ends_the_connection() {
        let (mut one, mut two) = pair("noise");
        one.out.extend([255; 64]);
        one.flush();
        two.receive();
        assert!(two.next_frame().is_none() && two.is_closed());
    }

    #[test]
    fn nobody_is_there() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(Channel::connect(&name("nobody"), &Control::Hello { process: 3, pass: 1 }, file.as_fd()).is_err());
        assert!(Listener::bind(&[b'x'; 200]).is_err());
    }
}
