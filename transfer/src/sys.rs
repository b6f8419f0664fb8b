//! Calls into the operating system that Rust's library does not have.
#![allow(unsafe_code)]

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

/// Has the calling thread's short sleeps end when they should: Linux makes them 50 us longer otherwise.
pub(crate) fn exact_timers() {
    // SAFETY: a call without pointers. It cannot fail with a positive number of nanoseconds.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000_u64) };
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
}
