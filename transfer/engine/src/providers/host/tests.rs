//! Two NICs on one thread, polled by turns.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ring::MAX_COPIED;
use super::strangers::MOST_STRANGERS;
use super::*;
use crate::error::obstacle::Obstacle;
use crate::providers::interface::MayLand;

const SOON: Duration = Duration::from_secs(20);

/// The end of a work request.
type End = (u64, Result<(), (NetworkError, MayLand)>);

struct Side {
    nic: HostNic,
    events: Vec<Event>,
}

impl Side {
    fn new() -> Self {
        Self { nic: HostNic::open().unwrap(), events: Vec::new() }
    }

    fn poll(&mut self) {
        self.nic.poll(&mut self.events);
    }

    /// The results of work requests that have ended, in order.
    fn ended(&mut self) -> Vec<End> {
        let ended = |event: &mut Event| matches!(event, Event::Completed { .. });
        let ended = self.events.extract_if(.., ended);
        let one = |event| match event {
            Event::Completed { token, result } => Some((token, result)),
            _ => None,
        };
        ended.filter_map(one).collect()
    }

    fn immediates(&self) -> Vec<u32> {
        let imm = |event: &Event| match event {
            Event::Immediate { imm, .. } => Some(*imm),
            _ => None,
        };
        self.events.iter().filter_map(imm).collect()
    }

    fn is_over(&self, link: Link) -> bool {
        self.events.iter().any(|event| matches!(event, Event::Ended { link: ended, held: false } if *ended == link))
    }

    fn is_lost(&self, link: Link) -> bool {
        self.events.iter().any(|event| matches!(event, Event::Lost(lost) if *lost == link))
    }

    fn region(&mut self, region: Region) -> (Arc<Region>, Registered) {
        let region = Arc::new(region);
        let key = self.nic.register(&region).unwrap();
        (region, key)
    }
}

fn until(what: &str, sides: &mut [&mut Side], mut holds: impl FnMut(&mut [&mut Side]) -> bool) {
    let end = Instant::now() + SOON;
    while !holds(sides) {
        assert!(Instant::now() < end, "{what}");
        sides.iter_mut().for_each(|side| side.poll());
        crate::sys::sync::pause();
    }
}

/// Two NICs and a link of each to the other.
fn linked() -> (Side, Side, Link, Link) {
    let (mut a, mut b) = (Side::new(), Side::new());
    let passes = Passes { own: random().unwrap() | 1, theirs: random().unwrap() | 1 };
    let to_b = a.nic.connect(&b.nic.endpoint(), passes).unwrap();
    let to_a = b.nic.connect(&a.nic.endpoint(), Passes { own: passes.theirs, theirs: passes.own }).unwrap();
    (a, b, to_b, to_a)
}

fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(4).fill(&mut bytes);
    bytes
}

fn contents(region: &Region, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.read(offset, &mut bytes).unwrap();
    bytes
}

/// Posts a write of `len` bytes at the same offset on both sides.
fn write(side: &mut Side, link: Link, src: &(Arc<Region>, Registered), dst: &Registered, at: (u64, u64), token: u64) {
    let (src_offset, len) = at;
    let (src, src_key) = (&src.0, src.1.local);
    let imm = Some(token as u32);
    let write = Write { link, src, src_key, src_offset, dst: dst.base + src_offset, rkey: dst.rkey, len, imm, token };
    side.nic.write(&write).unwrap();
}

#[test]
fn bytes_of_every_length_land_by_every_path() {
    const ALL: usize = 3 << 20;
    let (mut a, mut b, link, _) = linked();
    let bytes = noise(ALL);
    let (into, key) = b.region(Region::allocate(ALL).unwrap());
    let sources = [a.region(allocate(ALL).unwrap()), a.region(Region::allocate(ALL).unwrap())];
    let mut token = 0;
    // Mapped; pulled; and through the ring, as where the kernel does not let the target pull.
    for (source, may_pull) in [(0, true), (1, true), (1, false)] {
        let source = &sources[source];
        source.0.write(0, &bytes).unwrap();
        until("the target has let it in", &mut [&mut a, &mut b], |sides| {
            sides[1].nic.connections[0].incoming.is_some()
        });
        a.nic.connections[0].outgoing.allow_pull(may_pull);
        for len in [0, 1, 24, 25, 4096, MAX_COPIED, MAX_COPIED + 1, 300_000, ALL as u64 - 7] {
            into.write(0, &vec![0; ALL]).unwrap();
            token += 1;
            write(&mut a, link, source, &key, (7, len), token);
            until("it lands", &mut [&mut a, &mut b], |sides| sides[0].ended() == [(token, Ok(()))]);
            assert!(contents(&into, 7, len as usize) == bytes[7..7 + len as usize], "{len}");
            assert!(contents(&into, 7 + len, ALL - 7 - len as usize).iter().all(|byte| *byte == 0), "{len}");
            assert_eq!(b.immediates().last(), Some(&(token as u32)));
        }
    }
    assert_eq!(b.immediates().len() as u64, token);
}

#[test]
fn a_bad_key_harms_its_own_work_request_alone() {
    let (mut a, mut b, link, _) = linked();
    let source = a.region(Region::allocate(1 << 20).unwrap());
    let (_into, good) = b.region(Region::allocate(1 << 20).unwrap());
    let (_ended, bad) = b.region(Region::allocate(1 << 20).unwrap());
    b.nic.deregister(bad.local).unwrap();
    let mut right = Vec::new();
    for token in 0..300 {
        let (key, at, result) = match token % 3 {
            0 => (&good, (token, 100), Ok(())),
            1 => (&bad, (0, 500_000), Err((NetworkError::BadKey, false))),
            _ => (&Registered { base: 900_000, ..good }, (0, 200_000), Err((NetworkError::OutOfBounds, false))),
        };
        until("there is room", &mut [&mut a, &mut b], |sides| sides[0].nic.connections[0].outgoing.has_room());
        write(&mut a, link, &source, key, at, token);
        right.push((token, result));
    }
    let mut ended = Vec::new();
    until("all end", &mut [&mut a, &mut b], |sides| {
        ended.extend(sides[0].ended());
        ended.len() == right.len()
    });
    assert_eq!(ended, right);
    assert_eq!(b.immediates(), (0..300).step_by(3).collect::<Vec<_>>());
}

/// In a work request of several pieces, a bad piece takes the immediate with it.
#[test]
fn a_work_request_counts_whole_or_not_at_all() {
    let (mut a, mut b, link, _) = linked();
    let (src, src_key) = a.region(Region::allocate(1 << 20).unwrap());
    let (_into, key) = b.region(Region::allocate(1 << 20).unwrap());
    for (token, bad) in [(1, None), (2, Some(3)), (3, Some(199)), (4, None)] {
        let piece = |index: u64| Piece {
            nic: 0,
            src: index * 5000,
            dst: if bad == Some(index) { 1 << 20 } else { index * 5000 },
            len: 5000,
        };
        let pieces: Vec<_> = (0..200).map(piece).collect();
        let (src, src_key) = (&src, src_key.local);
        let write = Write {
            link,
            src,
            src_key,
            src_offset: 0,
            dst: key.base,
            rkey: key.rkey,
            len: 0,
            imm: Some(token as u32),
            token,
        };
        assert_eq!(a.nic.write_run(&write, &pieces).unwrap(), 200);
        let mut ended = Vec::new();
        until("it ends", &mut [&mut a, &mut b], |sides| {
            ended.extend(sides[0].ended());
            !ended.is_empty()
        });
        assert_eq!(ended, [(token, bad.map_or(Ok(()), |_| Err((NetworkError::OutOfBounds, false))))]);
    }
    assert_eq!(b.immediates(), [1, 4]);
}

#[test]
fn after_a_disconnect_nothing_lands_and_nothing_counts() {
    for by_target in [true, false] {
        let (mut a, mut b, to_b, to_a) = linked();
        let source = a.region(Region::allocate(4 << 20).unwrap());
        let (into, key) = b.region(Region::allocate(4 << 20).unwrap());
        source.0.write(0, &vec![1; 4 << 20]).unwrap();
        write(&mut a, to_b, &source, &key, (0, 4 << 20), 1);
        write(&mut a, to_b, &source, &key, (0, 4 << 20), 2);
        until("some of it has landed", &mut [&mut a, &mut b], |_| contents(&into, 0, 1) == [1]);
        let side = if by_target { &mut b } else { &mut a };
        side.nic.disconnect(if by_target { to_a } else { to_b });
        if by_target {
            // The writer goes on, and the target need not hear of anything for that to have no effect.
            into.write(0, &vec![2; 4 << 20]).unwrap();
            until("the fence stands", &mut [&mut b], |sides| sides[0].is_over(to_a));
        }
        let mut ended = Vec::new();
        until("the writer learns of it", &mut [&mut a, &mut b], |sides| {
            ended.extend(sides[0].ended());
            ended.len() == 2 && (sides[0].is_lost(to_b) || sides[0].is_over(to_b))
        });
        assert!(ended.iter().all(|(_, result)| matches!(result, Err((_, false)))), "{ended:?}");
        let before = contents(&into, 0, 4 << 20);
        for _ in 0..100 {
            a.poll();
            b.poll();
        }
        assert!(contents(&into, 0, 4 << 20) == before);
        assert!(!by_target || before.iter().all(|byte| *byte == 2));
        assert_eq!(b.immediates(), [0; 0]);
    }
}

#[test]
fn a_target_that_does_not_answer_cannot_count_later() {
    let (mut a, mut b, to_b, _) = linked();
    let source = a.region(Region::allocate(1 << 20).unwrap());
    let (_into, key) = b.region(Region::allocate(1 << 20).unwrap());
    until("both are let in", &mut [&mut a, &mut b], |sides| sides[1].nic.connections[0].incoming.is_some());
    for token in 0..3 {
        write(&mut a, to_b, &source, &key, (0, 10), token);
    }
    // As if it were stopped: it is not polled.
    let before = Instant::now();
    a.nic.disconnect(to_b);
    a.poll();
    assert!(a.is_over(to_b), "it is over at the next look");
    let mut ended = Vec::new();
    until("what was under way ends without the target", &mut [&mut a], |sides| {
        ended.extend(sides[0].ended());
        ended.len() == 3
    });
    assert!(before.elapsed() >= PATIENCE);
    assert!(ended.iter().all(|(_, result)| *result == Err((NetworkError::Disconnected, true))));
    until("the target hears of it", &mut [&mut a, &mut b], |sides| sides[1].nic.connections[0].incoming.is_none());
    assert_eq!(b.immediates(), [0; 0]);
}

#[test]
fn after_a_deregistration_nothing_lands() {
    let (mut a, mut b, to_b, _) = linked();
    let source = a.region(Region::allocate(4 << 20).unwrap());
    let (into, key) = b.region(Region::allocate(4 << 20).unwrap());
    source.0.write(0, &vec![1; 4 << 20]).unwrap();
    write(&mut a, to_b, &source, &key, (0, 4 << 20), 1);
    until("some of it has landed", &mut [&mut a, &mut b], |_| contents(&into, 0, 1) == [1]);
    b.nic.deregister(key.local).unwrap();
    into.write(0, &vec![2; 4 << 20]).unwrap();
    let mut ended = Vec::new();
    until("it fails", &mut [&mut a, &mut b], |sides| {
        ended.extend(sides[0].ended());
        !ended.is_empty()
    });
    assert_eq!(ended, [(1, Err((NetworkError::BadKey, false)))]);
    assert!(contents(&into, 0, 4 << 20).iter().all(|byte| *byte == 2));
}

#[test]
fn strangers_are_heard_and_let_nowhere() {
    let (mut a, mut b) = (Side::new(), Side::new());
    let way = a.nic.greet(&b.nic.endpoint()).unwrap();
    a.nic.send(way, b"hello".to_vec(), 1).unwrap();
    assert!(matches!(a.nic.send(way, vec![0; MAX_GREETING + 1], 2), Err(Post::Failed(_))));
    let mut back = None;
    until("it is greeted", &mut [&mut a, &mut b], |sides| {
        let greeting = |event: &Event| match event {
            Event::Greeted { way, bytes } if bytes == b"hello" => Some(*way),
            _ => None,
        };
        back = sides[1].events.iter().find_map(greeting);
        back.is_some()
    });
    b.nic.send(back.unwrap(), b"welcome".to_vec(), 3).unwrap();
    until("it is answered", &mut [&mut a, &mut b], |sides| {
        sides[0]
            .events
            .iter()
            .any(|event| matches!(event, Event::Greeted { way: from, bytes } if *from == way && bytes == b"welcome"))
    });
    // With a pass that nobody knows: whatever is posted stays where it is.
    let link = a.nic.connect(&b.nic.endpoint(), Passes { own: 1, theirs: 2 }).unwrap();
    a.nic.send(link, b"let me in".to_vec(), 4).unwrap();
    b.events.clear();
    for _ in 0..1000 {
        a.poll();
        b.poll();
    }
    assert!(b.events.is_empty(), "{:?}", b.events);
    // Many of them.
    let ways: Vec<_> = (0..2 * MOST_STRANGERS).map(|_| a.nic.greet(&b.nic.endpoint()).unwrap()).collect();
    until("all have come", &mut [&mut b], |sides| sides[0].nic.next_number > 2 * MOST_STRANGERS);
    assert!(b.nic.strangers.len() <= MOST_STRANGERS);
    ways.into_iter().for_each(|way| a.nic.disconnect(way));
    let address = "putget_transfer/host/nobody";
    let Err(NetworkError::NoConnection { address: named, why: Obstacle::Refused(_) }) = a.nic.greet(address.as_bytes())
    else {
        panic!("somebody is there");
    };
    assert_eq!(named, address);
}

#[test]
fn a_sleeper_is_woken_and_the_last_look_misses_nothing() {
    let (mut a, mut b, to_b, to_a) = linked();
    until("both are let in", &mut [&mut a, &mut b], |sides| {
        sides.iter().all(|side| side.nic.connections[0].incoming.is_some())
    });
    let readable = |side: &Side| {
        let mut watched = [crate::sys::os::readable(side.nic.selector.as_raw_fd())];
        crate::sys::os::wait_readable(&mut watched, Duration::from_millis(1));
        watched[0].revents != 0
    };
    // Posted before: seen at the last look. Posted after: heard.
    a.nic.send(to_b, b"before".to_vec(), 1).unwrap();
    assert!(!b.nic.may_wait());
    until("it is there", &mut [&mut a, &mut b], |sides| sides[0].ended().len() == 1);
    assert!(b.nic.may_wait() && !readable(&b));
    a.nic.send(to_b, b"after".to_vec(), 2).unwrap();
    assert!(readable(&b));
    // The poster sleeps until its message is taken.
    assert!(a.nic.may_wait() && !readable(&a));
    // A thread that has slept on the descriptor says so, and hears what woke it.
    b.nic.woken();
    b.poll();
    assert!(readable(&a));
    a.nic.woken();
    until("it is over", &mut [&mut a], |sides| sides[0].ended().len() == 1);
    assert!(!readable(&a) && !readable(&b));
    // A write rings as well as a message.
    let (source, (_into, key)) = (a.region(Region::allocate(64).unwrap()), b.region(Region::allocate(64).unwrap()));
    assert!(b.nic.may_wait());
    write(&mut a, to_b, &source, &key, (0, 64), 3);
    assert!(readable(&b));
    b.nic.woken();
    until("it lands", &mut [&mut a, &mut b], |sides| sides[0].ended().len() == 1);
    // An end is heard, too.
    assert!(b.nic.may_wait());
    a.nic.disconnect(to_b);
    until("a is over", &mut [&mut a], |sides| sides[0].is_over(to_b));
    assert!(readable(&b));
    until("b knows", &mut [&mut b], |sides| sides[0].is_lost(to_a));
}
