//! Sockets that never block, and the selector that says which of them are ready.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::error::Error;
use crate::memory::region::Region;
use crate::wire::descriptor::Device;

fn checked(code: libc::c_int) -> io::Result<libc::c_int> {
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(code) }
}

/// The address of this machine that listens and connects: the given one, or one that leads elsewhere.
pub(super) fn source_address(source: Option<&str>) -> Result<IpAddr, Error> {
    let what = || format!("tcp at {}", source.unwrap_or("any address"));
    let unavailable = |why: String| Error::Unavailable { what: what(), why };
    match source {
        Some(source) => {
            let found = (source, 0).to_socket_addrs().map_err(|error| unavailable(error.to_string()))?;
            let first = found.map(|address| address.ip()).next();
            first.ok_or_else(|| unavailable("the name stands for no address".into()))
        }
        None => {
            // Nothing is sent: the kernel says which address it would use for a way out. Documentation's own network.
            let way_out = || -> io::Result<IpAddr> {
                let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
                socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
                Ok(socket.local_addr()?.ip())
            };
            Ok(way_out().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)))
        }
    }
}

/// Listens on a port of the kernel's choice.
pub(super) fn listen(source: IpAddr) -> Result<TcpListener, Error> {
    let unavailable =
        |error: io::Error| Error::Unavailable { what: format!("tcp at {source}"), why: error.to_string() };
    let listener = TcpListener::bind((source, 0)).map_err(unavailable)?;
    listener.set_nonblocking(true).map_err(unavailable)?;
    Ok(listener)
}

/// Takes a connection, if one waits.
pub(super) fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    let (stream, _) = listener.accept()?;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// An address as the kernel wants it.
fn raw_address(address: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: plain bits, for which all zeros are valid.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let len = match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage is large enough and aligned for every kind of address.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
            size_of::<libc::sockaddr_in6>()
        }
    };
    (storage, len as libc::socklen_t)
}

/// Begins a connection from an address of this machine. It stands once the socket can be written to.
pub(super) fn connect(source: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: a call without pointers; the descriptor is new and nobody else's.
    let socket = unsafe { TcpStream::from_raw_fd(checked(libc::socket(family, kind, 0))?) };
    socket.set_nodelay(true)?;
    if source.is_ipv4() == to.is_ipv4() {
        let (one, (own, len)) = (1_i32, raw_address(SocketAddr::new(source, 0)));
        let raw = socket.as_raw_fd();
        // SAFETY: option and address live through the calls and have these lengths.
        unsafe {
            let (option, size) = ((&raw const one).cast(), size_of::<i32>() as libc::socklen_t);
            // Without it every connection takes one of the machine's ports for itself.
            libc::setsockopt(raw, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, option, size);
            checked(libc::bind(raw, (&raw const own).cast(), len))?;
        }
    }
    let (address, len) = raw_address(to);
    // SAFETY: the address has this length and lives through the call.
    match checked(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) }) {
        Ok(_) => Ok(socket),
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// A stretch of memory, for the kernel to read from.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Part<'a>(libc::iovec, PhantomData<&'a [u8]>);

impl<'a> Part<'a> {
    pub fn none() -> Self {
        Self(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }, PhantomData)
    }

    pub fn bytes(bytes: &'a [u8]) -> Self {
        Self(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }, PhantomData)
    }

    /// A stretch of registered host memory; nothing of it where it does not lie inside.
    pub fn region(region: &'a Region, offset: u64, len: u64) -> Self {
        if !region.contains(offset, len) || region.device() != Device::Host {
            return Self::none();
        }
        let start = (region.address() + offset as usize) as *mut libc::c_void;
        Self(libc::iovec { iov_base: start, iov_len: len as usize }, PhantomData)
    }

    pub fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }
}

/// The same for the kernel to write to.
#[repr(transparent)]
pub(super) struct Room<'a>(libc::iovec, PhantomData<&'a mut [u8]>);

impl<'a> Room<'a> {
    pub fn none() -> Self {
        Self(Part::none().0, PhantomData)
    }

    pub fn bytes(bytes: &'a mut [u8]) -> Self {
        Self(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }, PhantomData)
    }

    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Transfers write to registered memory: nobody holds references into it.
    pub fn region(region: &'a Region, offset: u64, len: u64) -> Self {
        Self(Part::region(region, offset, len).0, PhantomData)
    }
}

/// Sends from several stretches.
pub(super) fn send(socket: &TcpStream, parts: &[Part<'_>]) -> io::Result<usize> {
    // SAFETY: plain bits, for which all zeros are valid; each part is memory that can be read as long as it is borrowed, and the
    // kernel only reads.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (parts.as_ptr().cast_mut().cast(), parts.len());
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives into two stretches, one after the other.
pub(super) fn receive(socket: &TcpStream, rooms: &[Room<'_>; 2]) -> io::Result<usize> {
    // SAFETY: each room is memory that can be written to and is borrowed for that alone, or registered memory.
    let got = unsafe { libc::readv(socket.as_raw_fd(), rooms.as_ptr().cast(), 2) };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

/// Says whether an error only means that there is nothing to do now.
pub(super) fn is_patient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::NotConnected)
}

/// Which of many sockets are ready. Readable itself when one is.
pub(super) struct Selector {
    epoll: OwnedFd,
}

/// A socket that is ready: its name, and whether it can be read and written.
pub(super) struct Ready {
    pub name: u64,
    pub write: bool,
}

impl Selector {
    pub fn new() -> io::Result<Self> {
        // SAFETY: a call without pointers; the descriptor is new and nobody else's.
        Ok(Self { epoll: unsafe { OwnedFd::from_raw_fd(checked(libc::epoll_create1(libc::EPOLL_CLOEXEC))?) } })
    }

    fn control(&self, operation: libc::c_int, socket: &impl AsRawFd, events: libc::c_int, name: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: name };
        // SAFETY: both descriptors are open, and the event lives through the call.
        checked(unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), operation, socket.as_raw_fd(), &raw mut event) })?;
        Ok(())
    }

    /// Watches a socket until it is closed: for something to read, or also for room to write.
    pub fn add(&self, socket: &impl AsRawFd, name: u64, write: bool) -> io::Result<()> {
        let events = libc::EPOLLIN | if write { libc::EPOLLOUT } else { 0 };
        self.control(libc::EPOLL_CTL_ADD, socket, events, name)
    }

    pub fn change(&self, socket: &impl AsRawFd, name: u64, write: bool) -> io::Result<()> {
        let events = libc::EPOLLIN | if write { libc::EPOLLOUT } else { 0 };
        self.control(libc::EPOLL_CTL_MOD, socket, events, name)
    }

    /// Watches a socket for room to write alone: what can be read there has to wait.
    pub fn await_room(&self, socket: &impl AsRawFd, name: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, socket, libc::EPOLLOUT, name)
    }

    /// Watches a socket no more, for a while.
    pub fn pause(&self, socket: &impl AsRawFd, name: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, socket, 0, name)
    }

    /// Appends those that are ready now.
    pub fn ready(&self, found: &mut Vec<Ready>) {
        let mut events = [const { MaybeUninit::<libc::epoll_event>::uninit() }; 64];
        // SAFETY: there is room for that many events.
        let count = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr().cast(), 64, 0) };
        for event in events.iter().take(usize::try_from(count).unwrap_or(0)) {
            // SAFETY: the kernel has written so many.
            let event = unsafe { event.assume_init_read() };
            let (name, events) = (event.u64, event.events as libc::c_int);
            found.push(Ready { name, write: events & (libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP) != 0 });
        }
    }
}

impl AsRawFd for Selector {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}
