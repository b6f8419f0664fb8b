use putget_transfer::{DeviceGroup, Engine, Error, SimNetwork};

use super::Armer;

#[test]
#[allow(unsafe_code)]
fn a_prefiller_that_is_dropped_in_a_fork_waits_for_no_lock_of_the_parent() -> Result<(), Error> {
    let engine = Engine::builder().group(DeviceGroup::sim(&SimNetwork::new(1), 1)).build()?;
    let armer = Armer::new(&engine);
    let shared = armer.shared.clone();
    let locked = shared.queue();
    let mut status = 0;
    // SAFETY: the child drops what a prefiller has of its thread and ends; a signal ends it if it waits.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::alarm(20);
            drop(armer);
            libc::_exit(0);
        }
        libc::waitpid(child, &raw mut status, 0);
    }
    assert_eq!(status, 0);
    drop(locked);
    Ok(())
}
