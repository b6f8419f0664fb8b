//! Where a process runs, as far as shared memory reaches: the same boot of the same machine, the same user, the same network namespace. The
//! endpoints of providers inside a machine begin with it, so that everybody else is reached over a network.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use sha2::{Digest, Sha256};

use crate::sys::os::user;

/// Characters of a place.
const LEN: usize = 16;

/// The place of this process. It says nothing of the machine to those who are elsewhere.
fn here() -> &'static str {
    static HERE: OnceLock<String> = OnceLock::new();
    HERE.get_or_init(|| {
        let boot = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        // Where the kernel does not say, a process is somewhere else than those whose kernel does.
        let number = |path: &str| fs::metadata(path).map_or(0, |found| found.ino());
        let mut hash = Sha256::new_with_prefix(b"putget_transfer place");
        hash.update(boot);
        hash.update(number("/proc/self/ns/net").to_le_bytes());
        hash.update(user().to_le_bytes());
        let hash = hash.finalize();
        hash.iter().take(LEN / 2).map(|byte| format!("{byte:02x}")).collect()
    })
}

/// Names the monotonic clock of this process: where it is the same, times of two processes can be compared. 0 stands for one that the
/// kernel does not name.
pub(crate) fn clock() -> u64 {
    static CLOCK: OnceLock<u64> = OnceLock::new();
    *CLOCK.get_or_init(|| {
        let Ok(boot) = fs::read("/proc/sys/kernel/random/boot_id") else { return 0 };
        // A container may have a time namespace of its own.
        let namespace = fs::metadata("/proc/self/ns/time").map_or(0, |found| found.ino());
        let hash =
            Sha256::new_with_prefix(b"putget_transfer clock").chain_update(boot).chain_update(namespace.to_le_bytes());
        hash.finalize().first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    })
}

/// Makes the name of an endpoint that is reached from this place alone.
pub(crate) fn endpoint(kind: &str, random: [u64; 2]) -> Vec<u8> {
    let [high, low] = random;
    format!("{}/putget_transfer/{kind}/{high:016x}{low:016x}", here()).into_bytes()
}

/// Says whether an endpoint is at this place.
pub(crate) fn is_here(endpoint: &[u8]) -> bool {
    endpoint.get(..LEN) == Some(here().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_says_where_it_is() {
        let own = endpoint("host", [1, 2]);
        assert!(is_here(&own));
        let mut elsewhere = own.clone();
        elsewhere[3] ^= 1;
        assert!(!is_here(&elsewhere));
        assert!(!is_here(&own[..LEN - 1]) && !is_here(b""));
        // The longest name of a socket is 107 bytes.
        assert!(own.len() < 107, "{}", own.len());
    }

    #[test]
    fn a_place_is_the_same_again() {
        assert_eq!(here(), here());
        assert_eq!(here().len(), LEN);
    }
}
