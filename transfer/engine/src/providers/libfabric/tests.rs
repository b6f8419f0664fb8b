//! Two NICs on one thread: what tells a target's thread that there is something for it.

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use super::*;
use crate::sys::os::{readable, wait_readable};

const SOON: Duration = Duration::from_secs(20);
const LEN: usize = 1 << 20;

struct Side {
    nic: FabricNic,
    events: Vec<Event>,
}

impl Side {
    fn poll(&mut self) {
        self.nic.poll(&mut self.events);
    }

    fn region(&mut self) -> (Arc<Region>, Registered) {
        let region = Arc::new(Region::allocate(LEN).unwrap());
        let key = self.nic.register(&region).unwrap();
        (region, key)
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        crate::sys::sync::pause();
    }
}

fn is_readable(descriptor: RawFd) -> bool {
    let mut watched = [readable(descriptor)];
    wait_readable(&mut watched, Duration::ZERO);
    watched[0].revents != 0
}

/// A pair whose first NIC writes to the second without immediates, which make no event there.
struct Pair {
    a: Side,
    b: Side,
    link: Link,
    src: (Arc<Region>, Registered),
    dst: (Arc<Region>, Registered),
    writes: u64,
}

impl Pair {
    /// None: the library is not there.
    fn new(provider: &str) -> Option<Self> {
        let open = || match FabricNic::open(provider, Some("127.0.0.1"), Device::Host) {
            Err(error @ Error::Unavailable { .. }) => {
                println!("skipped: {error}");
                None
            }
            nic => Some(Side { nic: nic.unwrap(), events: Vec::new() }),
        };
        let (mut a, mut b) = (open()?, open()?);
        let link = a.nic.connect(&b.nic.endpoint(), Passes { own: 1, theirs: 2 }).unwrap();
        let (src, dst) = (a.region(), b.region());
        let mut pair = Self { a, b, link, src, dst, writes: 0 };
        // From the second on, nothing is set up any more.
        pair.post();
        pair.land();
        Some(pair)
    }

    fn post(&mut self) {
        self.writes += 1;
        let (src, key) = (&self.src.0, self.dst.1);
        let (src_key, link, token) = (self.src.1.local, self.link, self.writes);
        let write = Write {
            link,
            src,
            src_key,
            src_offset: 0,
            dst: key.base,
            rkey: key.rkey,
            len: LEN as u64,
            imm: None,
            token,
        };
        until("it is posted", || {
            self.b.poll();
            self.a.poll();
            match self.a.nic.write(&write) {
                Ok(()) => true,
                Err(Post::Failed(why)) => panic!("{why:?}"),
                Err(Post::Full | Post::Busy) => false,
            }
        });
    }

    fn land(&mut self) {
        let Self { a, b, writes, .. } = self;
        until("it lands", || {
            a.poll();
            b.poll();
            a.events.iter().any(|event| matches!(event, Event::Completed { token, result: Ok(()) } if token == writes))
        });
        assert!(b.events.is_empty(), "{:?}", b.events);
    }
}

#[test]
fn a_sleeper_hears_of_bytes_that_make_no_event() {
    for provider in ["tcp", "net"] {
        let Some(mut pair) = Pair::new(provider) else { return };
        let waker: Waker = Arc::new(|| {});
        let Wait::Descriptor(descriptor) = pair.b.nic.wait(waker) else { panic!("{provider} has no descriptor") };
        for _ in 0..20 {
            let Pair { a, b, .. } = &mut pair;
            until("it may sleep", || {
                a.poll();
                b.poll();
                b.nic.may_wait() && !is_readable(descriptor)
            });
            pair.post();
            let a = &mut pair.a;
            until("the target's descriptor is readable", || {
                a.poll();
                is_readable(descriptor)
            });
            pair.land();
        }
    }
}
