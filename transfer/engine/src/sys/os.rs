//! Calls into the operating system that Rust's library does not have.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::Error;

/// Binds the calling thread to some processors.
pub(crate) fn pin_thread(cpus: &[usize]) -> Result<(), Error> {
    // SAFETY: the type is plain bits, and all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus.iter().filter(|cpu| **cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: the index is below CPU_SETSIZE.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: 0 is the calling thread, and the set lives through the call.
    if unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) } == 0 {
        Ok(())
    } else {
        let why = format!("processors {cpus:?}: {}", std::io::Error::last_os_error());
        Err(Error::System { what: "sched_setaffinity", why })
    }
}

/// Nanoseconds of the clock that all processes of a machine share between two boots.
pub(crate) fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call. This clock is on every Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// Has the calling thread's short sleeps end when they should: Linux makes them 50 us longer otherwise.
pub(crate) fn exact_timers() {
    // SAFETY: a call without pointers. It cannot fail with a positive number of nanoseconds.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000_u64) };
}

/// The kernel has found memory that is not there, or that must not be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault;

/// Copies bytes inside this process. The kernel does it: memory that is not there, or must not be written to, is an error and no signal.
/// Some of the bytes may have been copied then. Where the system forbids the call, this process copies itself.
///
/// # Safety
/// Whatever is mapped in both ranges must be memory that nobody forms Rust references into.
pub(crate) unsafe fn copy_guarded(from: *const u8, into: *mut u8, len: usize) -> Result<(), Fault> {
    let distance = (from as usize).abs_diff(into as usize);
    if distance < len {
        // The kernel copies page by page, in one direction.
        let mut between = vec![0; len];
        // SAFETY: the caller promises it; `between` is memory of its own.
        return unsafe {
            copy_guarded(from, between.as_mut_ptr(), len).and_then(|()| copy_guarded(between.as_ptr(), into, len))
        };
    }
    let local = libc::iovec { iov_base: into.cast(), iov_len: len };
    let remote = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: len };
    // SAFETY: one entry on each side, which live through the call; the kernel checks what they name.
    let copied = unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    if usize::try_from(copied) == Ok(len) {
        return Ok(());
    }
    match io::Error::last_os_error().raw_os_error() {
        Some(libc::ENOSYS | libc::EPERM) if copied < 0 => {
            // SAFETY: the caller promises it; the ranges do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from, into, len) };
            Ok(())
        }
        _ => Err(Fault),
    }
}

/// Says whether the process can write to an aligned word, which stays as it is.
pub(crate) fn is_writable(address: usize) -> bool {
    // Adds 0, atomically, and wakes nobody: no thread waits for a word of a region.
    const ADD_0: libc::c_int = libc::FUTEX_OP_ADD << 28;
    let (op, word) = (libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG, address & !3);
    // SAFETY: the kernel checks the address.
    let code = unsafe { libc::syscall(libc::SYS_futex, word, op, 0, 0, word, ADD_0) };
    code >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

/// A word in somebody else's memory that counts operations which are over: all of them in its low half, those that failed in
/// its high half.
pub struct Word(std::ptr::NonNull<u64>);

// SAFETY: whoever gave the address promised that it is valid from every thread.
unsafe impl Send for Word {}

impl Word {
    /// The word at an address; none at null.
    ///
    /// # Errors
    /// [`Error::Argument`] for an address that is not divisible by 8.
    ///
    /// # Safety
    /// `address` must be valid for atomic accesses until `count` has been called or this is dropped.
    pub unsafe fn at(address: *mut u64) -> Result<Option<Self>, Error> {
        if !(address as usize).is_multiple_of(align_of::<u64>()) {
            return Err(Error::argument("word", format!("{address:p} came; an address divisible by 8 is needed")));
        }
        Ok(std::ptr::NonNull::new(address).map(Self))
    }

    /// Counts one that is over. What it has done is seen by whoever loads the word with acquire ordering.
    pub fn count(self, failed: bool) {
        // SAFETY: `at` demands that it is valid, and has checked that it is aligned.
        let word = unsafe { AtomicU64::from_ptr(self.0.as_ptr()) };
        word.fetch_add(1 + (u64::from(failed) << 32), Ordering::AcqRel);
    }
}

/// How often this process has come out of a fork.
static FORKS: AtomicU64 = AtomicU64::new(0);

extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The process that something belongs to. A fork has copies of an engine's memory, but none of its threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Home(u64);

impl Home {
    pub fn here() -> Self {
        static NOTICED: Once = Once::new();
        // SAFETY: the function may run in a child: it uses one atomic word. Without memory for this a fork goes unnoticed.
        NOTICED.call_once(|| unsafe { _ = libc::pthread_atfork(None, None, Some(forked)) });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// An error in a fork of that process.
    pub fn check(self) -> Result<(), Error> {
        if self == Self(FORKS.load(Ordering::Relaxed)) {
            return Ok(());
        }
        let why = "this process is a fork of the one that has its threads; build an engine here".into();
        Err(Error::System { what: "using an engine", why })
    }
}

/// Says whether this process may open so many files more.
pub(crate) fn has_room_for_files(count: usize) -> io::Result<()> {
    (0..count).map(|_| EventFd::open()).collect::<io::Result<Vec<_>>>().map(drop)
}

/// A descriptor that is there to be closed: where this process may open no more files, one more connection can be taken then, to be told so.
pub(crate) struct Spare(Option<EventFd>);

impl Spare {
    pub fn new() -> io::Result<Self> {
        Ok(Self(Some(EventFd::open()?)))
    }

    /// Makes room for one file, after such an error. False: the error says something else, or there is none to give.
    pub fn lend(&mut self, error: &io::Error) -> bool {
        matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) && self.0.take().is_some()
    }

    /// Says whether it was lent.
    pub fn is_lent(&self) -> bool {
        self.0.is_none()
    }

    /// Opens it again, if that is possible.
    pub fn renew(&mut self) {
        if self.is_lent() {
            self.0 = EventFd::open().ok();
        }
    }
}

/// Wakes a thread that waits for descriptors.
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub fn new() -> Result<Self, Error> {
        Self::open().map_err(|error| Error::System { what: "eventfd", why: error.to_string() })
    }

    fn open() -> io::Result<Self> {
        // SAFETY: a call without pointers; the descriptor is new and nobody else's.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(raw) }))
    }

    /// Makes it readable.
    pub fn ring(&self) {
        let one = 1_u64;
        // SAFETY: 8 bytes of a live word. It fails only where the count is at its end, and then it is readable anyway.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Makes it unreadable.
    pub fn silence(&self) {
        let mut count = 0_u64;
        // SAFETY: there is room for 8 bytes. Without a ring it has nothing to say.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// The events to wait for.
pub(crate) fn readable(descriptor: RawFd) -> libc::pollfd {
    libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 }
}

/// Waits until one of these is readable, at most `timeout`, and says in each whether it is. A signal ends it early.
pub(crate) fn wait_readable(descriptors: &mut [libc::pollfd], timeout: Duration) {
    descriptors.iter_mut().for_each(|descriptor| descriptor.revents = 0);
    let timeout = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    let count = descriptors.len() as libc::nfds_t;
    // SAFETY: the list has that many entries, it and the time live through the call, and no mask is given.
    unsafe { libc::ppoll(descriptors.as_mut_ptr(), count, &timeout, std::ptr::null()) };
}

/// Which of many connections have something to say.
pub(crate) struct Selector {
    epoll: OwnedFd,
}

impl Selector {
    pub fn new() -> io::Result<Self> {
        // SAFETY: a call without pointers; the descriptor is new and nobody else's.
        Ok(Self { epoll: unsafe { OwnedFd::from_raw_fd(checked(libc::epoll_create1(libc::EPOLL_CLOEXEC))?) } })
    }

    /// Watches a descriptor until it is closed.
    pub fn add(&self, descriptor: &impl AsRawFd, name: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: name };
        let raw = descriptor.as_raw_fd();
        // SAFETY: both descriptors are open, and the event lives through the call.
        checked(unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, raw, &raw mut event) })?;
        Ok(())
    }

    /// Ends that. Closing the descriptor is not enough where a fork has a copy of it.
    pub fn remove(&self, descriptor: &impl AsRawFd) {
        let (epoll, raw) = (self.epoll.as_raw_fd(), descriptor.as_raw_fd());
        // SAFETY: both descriptors are open. It fails only for what is not watched.
        unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, raw, std::ptr::null_mut()) };
    }

    /// Appends the names of those that are ready now.
    pub fn ready(&self, names: &mut Vec<u64>) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: there is room for that many events.
        let count = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), 64, 0) };
        names.extend(events.iter().take(usize::try_from(count).unwrap_or(0)).map(|event| event.u64));
    }
}

impl AsRawFd for Selector {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

/// The user that this process works for.
pub(crate) fn user() -> u32 {
    // SAFETY: a call without arguments.
    unsafe { libc::geteuid() }
}

/// The value that a call of the system returned, or the reason of its failure.
pub(crate) fn checked(code: libc::c_int) -> io::Result<libc::c_int> {
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(code) }
}

/// The processors that the calling thread may use.
#[cfg(test)]
pub(crate) fn thread_cpus() -> Vec<usize> {
    // SAFETY: as in `pin_thread`.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: as in `pin_thread`.
    unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    // SAFETY: the index is below CPU_SETSIZE.
    (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_ends_a_wait_and_is_heard_once() {
        let (bell, other) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        let mut both = [readable(bell.as_raw_fd()), readable(other.as_raw_fd())];
        let heard = |both: &mut [libc::pollfd; 2], timeout| {
            wait_readable(both, timeout);
            both.map(|one| one.revents != 0)
        };
        let begin = std::time::Instant::now();
        assert_eq!(heard(&mut both, Duration::from_millis(20)), [false, false]);
        assert!(begin.elapsed() >= Duration::from_millis(20));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                other.ring();
                other.ring();
            });
            assert_eq!(heard(&mut both, Duration::from_secs(60)), [false, true]);
        });
        other.silence();
        assert_eq!(heard(&mut both, Duration::ZERO), [false, false]);
    }

    #[test]
    fn a_thread_stays_where_it_is_put() {
        let before = thread_cpus();
        let last = before.last().copied().into_iter().collect::<Vec<_>>();
        let (pinned, found, refused) =
            std::thread::scope(|scope| scope.spawn(|| (pin_thread(&last), thread_cpus(), pin_thread(&[]))).join())
                .unwrap();
        assert_eq!((pinned, found), (Ok(()), last));
        assert!(refused.is_err());
        assert_eq!(thread_cpus(), before);
    }

    const PAGE: usize = 4096;

    #[test]
    fn bad_memory_is_an_error_and_no_signal() {
        // SAFETY: a new mapping, which replaces none. Its place is far from where the kernel puts those of other threads, so that
        // the page that goes stays away.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            let both = libc::PROT_READ | libc::PROT_WRITE;
            let start = libc::mmap(0x1000_0000_0000_usize as *mut _, 3 * PAGE, both, flags, -1, 0).cast::<u8>();
            assert_ne!(start.cast(), libc::MAP_FAILED);
            start.write_bytes(7, PAGE);
            assert!(is_writable(start as usize + PAGE));
            assert_eq!(copy_guarded(start, start.add(PAGE), PAGE), Ok(()));
            assert_eq!(start.add(2 * PAGE - 1).read(), 7);
            // Overlapping.
            start.write(9);
            assert_eq!(copy_guarded(start, start.add(1), PAGE), Ok(()));
            assert_eq!((start.add(1).read(), start.add(2).read(), start.add(PAGE).read()), (9, 7, 7));

            assert_eq!(libc::mprotect(start.add(PAGE).cast(), PAGE, libc::PROT_READ), 0);
            assert!(!is_writable(start as usize + PAGE) && is_writable(start as usize));
            assert_eq!(copy_guarded(start.add(PAGE), start, 8), Ok(()));
            assert_eq!(copy_guarded(start, start.add(PAGE), 8), Err(Fault));
            assert_eq!(copy_guarded(start.add(2 * PAGE), start.add(PAGE - 8), 16), Err(Fault));
            assert_eq!(libc::munmap(start.add(PAGE).cast(), PAGE), 0);
            assert!(!is_writable(start as usize + PAGE));
            assert_eq!(copy_guarded(start.add(PAGE), start, 8), Err(Fault));
            assert_eq!(copy_guarded(start, start.add(PAGE), 8), Err(Fault));
            libc::munmap(start.cast(), 3 * PAGE);
        }
    }
}
