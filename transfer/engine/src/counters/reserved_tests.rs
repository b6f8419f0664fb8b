use crate::{DeviceGroup, Engine, Error, SimNetwork};

#[test]
#[allow(unsafe_code)]
fn a_range_that_is_dropped_in_a_fork_waits_for_no_lock_of_the_parent() -> Result<(), Error> {
    let engine = Engine::builder().group(DeviceGroup::sim(&SimNetwork::new(1), 1)).build()?;
    let range = engine.reserve_imms("own", None, 1)?;
    let locked = engine.inner.shared.reserved.0.lock();
    let mut status = 0;
    // SAFETY: the child drops the range and ends; a signal ends it if it waits.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::alarm(20);
            drop(range);
            libc::_exit(0);
        }
        libc::waitpid(child, &raw mut status, 0);
    }
    assert_eq!(status, 0);
    drop(locked);
    Ok(())
}
