//! Engines with several device groups, of one provider or of several: one counter space, and a provider that is chosen for each peer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{LONG, eventually, expect_count, noise, outcome};
use putget_transfer::{
    Builder, DeviceGroup, Done, Engine, Error, ExpectOptions, Faults, Flag, MrDesc, MrHandle, NetAddr, Options,
    PeerEvent, ReadItem, Reason, ScatterDst, SimNetwork, Via, WhenFull, WriteItem,
};

const LEN: usize = 64 << 10;

fn tcp() -> DeviceGroup {
    DeviceGroup::tcp(&[Some("127.0.0.1")])
}

/// Inside the machine over shared memory, and otherwise over TCP.
fn both() -> Builder {
    Engine::builder().group(DeviceGroup::host(1)).group(tcp())
}

fn through(device_group: usize) -> Options {
    Options { device_group: Some(device_group), ..Options::default() }
}

/// An engine, and the device groups of this engine over which peers have come.
fn watched(builder: Builder) -> (Engine, Arc<Mutex<Vec<PeerEvent>>>) {
    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&events);
    (builder.on_peer_event(move |event| seen.lock().unwrap().push(event)).build().unwrap(), events)
}

/// The device groups of peers that have come.
fn came(events: &Mutex<Vec<PeerEvent>>) -> Vec<u16> {
    events.lock().unwrap().iter().filter(|event| event.down.is_none()).map(|event| event.peer.device_group()).collect()
}

/// An event is told by a thread of its own, which may be behind what the operation's caller has seen.
fn came_over(events: &Mutex<Vec<PeerEvent>>, groups: &[u16]) {
    eventually("every device group that was asked for, and no other, has connected", || came(events) == groups);
}

fn filled(engine: &Engine, seed: u64) -> (MrHandle, Vec<u8>) {
    let (handle, bytes) = (engine.alloc_mr(LEN).unwrap().0, noise(LEN, seed));
    handle.write(0, &bytes).unwrap();
    (handle, bytes)
}

fn holds(handle: &MrHandle, bytes: &[u8]) {
    let mut found = vec![0; bytes.len()];
    handle.read(0, &mut found).unwrap();
    assert!(found == bytes);
}

/// Descriptions that travel as bytes are equal to the others.
fn carried(address: &NetAddr, desc: &MrDesc) -> (NetAddr, MrDesc) {
    (NetAddr::from_bytes(&address.to_bytes()).unwrap(), MrDesc::from_bytes(&desc.to_bytes()).unwrap())
}

#[test]
fn every_call_takes_its_device_group() {
    let network = SimNetwork::new(1);
    let build = || {
        let (one, two) = (DeviceGroup::sim(&network, 1), DeviceGroup::sim(&network, 2));
        watched(Engine::builder().group(one).group(two))
    };
    let ((a, _), (b, events)) = (build(), build());
    let ((src, bytes), (memory, desc)) = (filled(&a, 1), b.alloc_mr(LEN).unwrap());
    let (address, desc) = carried(&b.main_address(), &desc);

    for (round, group) in [1, 0].into_iter().enumerate() {
        let options = through(group);
        let (done, future) = Done::future();
        let peers = a.add_peer_group(std::slice::from_ref(&address), &options, done).unwrap();
        future.wait(LONG).unwrap().unwrap();
        eventually("only the device group that was asked for connects", || came(&events).len() == round + 1);
        assert_eq!(came(&events).last(), Some(&(group as u16)));

        outcome(|done| a.submit_barrier(Some(&peers), 1, &[&desc], &Options::default(), done)).unwrap();
        outcome(|done| a.submit_single_write(LEN as u64, Some(1), (&src, 0), (&desc, 0), &options, done)).unwrap();
        let dsts = [ScatterDst { len: LEN as u64, src_offset: 0, dst: (&desc, 0) }];
        outcome(|done| a.submit_scatter(Some(&peers), Some(1), &src, &dsts, &options, done)).unwrap();
        let item = WriteItem { len: LEN as u64, src: (&src, 0), dst: (&desc, 0) };
        let prepared = a.prepare_writes(&[item], Via { device_group: Some(group), nic: None }).unwrap();
        outcome(|done| a.submit_prepared(&prepared, Some(1), &Options::default(), done)).unwrap();
        expect_count(&b, 1, 4 * (round as u64 + 1)).unwrap();
        holds(&memory, &bytes);
        assert_eq!(came(&events).len(), round + 1, "nothing took the other one");
    }
    // The second group alone has a second NIC.
    let nic = |device_group| Options { nic: Some(1), ..through(device_group) };
    let write = |options: &Options, done| a.submit_single_write(8, None, (&src, 0), (&desc, 0), options, done);
    outcome(|done| write(&nic(1), done)).unwrap();
    assert!(matches!(write(&nic(0), Done::ignore()), Err(Error::Argument { argument: "nic", .. })));
    assert!(matches!(write(&through(2), Done::ignore()), Err(Error::Argument { argument: "device_group", .. })));
}

#[test]
fn messages_take_their_device_group() {
    let network = SimNetwork::new(2);
    let build = || Engine::builder().group(DeviceGroup::sim(&network, 1)).group(DeviceGroup::sim(&network, 1));
    let (a, b) = (build().build().unwrap(), build().build().unwrap());
    let heard = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&heard);
    b.submit_recvs(64, 4, move |from, bytes| into.lock().unwrap().push((from.name().device_group(), bytes.to_vec())))
        .unwrap();
    // Device groups keep no order between each other: the next message is sent when the last one is there.
    let arrived = |messages| eventually("the message arrives", || heard.lock().unwrap().len() == messages);
    for (group, messages) in [(1, 1), (0, 2)] {
        outcome(|done| a.submit_send(&b.main_address(), b"hello", &through(group), done)).unwrap();
        arrived(messages);
    }
    // An address of one device group alone leads there.
    outcome(|done| a.submit_send(&b.group_address(1).unwrap(), b"again", &Options::default(), done)).unwrap();
    arrived(3);
    let expected = [(1, b"hello".to_vec()), (0, b"hello".to_vec()), (0, b"again".to_vec())];
    assert_eq!(*heard.lock().unwrap(), expected);
}

#[test]
fn shared_memory_inside_the_machine_and_tcp_to_those_who_have_no_other() {
    let ((a, _), (b, of_b), (c, of_c)) = (watched(both()), watched(both()), watched(Engine::builder().group(tcp())));
    let (src, bytes) = filled(&a, 2);
    let ((at_b, to_b), (at_c, to_c)) = (b.alloc_mr(LEN).unwrap(), c.alloc_mr(LEN).unwrap());
    let ((b_address, to_b), (c_address, to_c)) = (carried(&b.main_address(), &to_b), carried(&c.main_address(), &to_c));

    // One operation: two providers, one end, and each counts once.
    let (done, future) = Done::future();
    let peers = a.add_peer_group(&[b_address.clone(), c_address.clone()], &Options::default(), done).unwrap();
    future.wait(LONG).unwrap().unwrap();
    let dst = |desc| ScatterDst { len: LEN as u64, src_offset: 0, dst: (desc, 0) };
    let dsts = [dst(&to_b), dst(&to_c)];
    outcome(|done| a.submit_scatter(Some(&peers), Some(5), &src, &dsts, &Options::default(), done)).unwrap();
    outcome(|done| a.submit_barrier(Some(&peers), 5, &[&to_b, &to_c], &Options::default(), done)).unwrap();
    for (engine, memory) in [(&b, &at_b), (&c, &at_c)] {
        expect_count(engine, 5, 2).unwrap();
        assert_eq!(engine.imm_count(5), 2);
        holds(memory, &bytes);
    }
    // a's group 0 is its shared memory, its group 1 is TCP.
    came_over(&of_b, &[0]);
    came_over(&of_c, &[1]);

    // Over both, one counter.
    let write = |options: &Options, done| a.submit_single_write(8, Some(6), (&src, 0), (&to_b, 0), options, done);
    outcome(|done| write(&through(0), done)).unwrap();
    outcome(|done| write(&through(1), done)).unwrap();
    expect_count(&b, 6, 2).unwrap();
    came_over(&of_b, &[0, 1]);

    // Messages choose, too.
    let heard = Arc::new(Mutex::new(0));
    for engine in [&b, &c] {
        let heard = Arc::clone(&heard);
        engine.submit_recvs(64, 4, move |_, _| *heard.lock().unwrap() += 1).unwrap();
    }
    for to in [&b_address, &c_address] {
        outcome(|done| a.submit_send(to, b"hello", &Options::default(), done)).unwrap();
    }
    eventually("both messages arrive", || *heard.lock().unwrap() == 2);

    // Over a group that does not lead there nothing begins.
    let refused = a.submit_single_write(8, None, (&src, 0), (&to_c, 0), &through(0), Done::ignore());
    assert!(matches!(refused, Err(Error::Argument { argument: "dst", .. })), "{refused:?}");
}

/// A transfer that has waited for room is handed on whole, also by an engine that has closed: all that counts as submitted ends.
#[test]
fn what_gets_room_because_the_engine_closes_is_told_or_refused() {
    common::in_the_middle(10, 0, |round, _| {
        let mut handed_on = 0;
        let network = SimNetwork::new(4);
        let build = || {
            let groups = Engine::builder().group(DeviceGroup::sim(&network, 1)).group(DeviceGroup::sim(&network, 1));
            groups.max_submissions(1, WhenFull::Wait).build().unwrap()
        };
        let (a, b) = (build(), build());
        let ((src, _), (_memory, desc)) = (filled(&a, 1), b.alloc_mr(LEN).unwrap());
        // In both device groups: a reset has a part in each.
        let senders = [b.group_address(0).unwrap(), b.group_address(1).unwrap()];
        network.cut(&a.group_address(0).unwrap(), &senders[0]);
        let flag = Flag::new();
        let write = |done| a.submit_single_write(8, Some(3), (&src, 0), (&desc, 0), &common::within(LONG), done);
        write(Done::flag(&flag)).unwrap();
        let submitted: Vec<_> = std::thread::scope(|scope| {
            let reset = scope.spawn(|| {
                let (done, future) = Done::future();
                (a.submit_reset_imm(2, &senders, &common::within(LONG), done).err(), future)
            });
            let written = scope.spawn(|| {
                let (done, future) = Done::future();
                (write(done).err(), future)
            });
            std::thread::sleep(Duration::from_millis(5 * round as u64));
            a.close();
            [reset, written].into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (refused, future) in submitted {
            match refused {
                None => {
                    handed_on += 1;
                    let outcome = future.wait(LONG);
                    assert!(matches!(outcome, Some(Err(_))), "{outcome:?}");
                }
                Some(error) => assert_eq!((error, future.wait(Duration::ZERO)), (Error::Closed, None)),
            }
        }
        let counted = |name| common::metric(&a, name);
        assert_eq!(counted("submitted_total"), counted("completed_total") + counted("failed_total"));
        assert_eq!((flag.pending(), flag.failed()), (0, 1));
        handed_on > 0
    });
}

#[test]
fn a_scatter_over_two_providers_fails_for_each_peer_on_its_own_and_is_cancelled_as_one() {
    let a = both().default_deadline(LONG).build().unwrap();
    let (b, c) = (both().build().unwrap(), Engine::builder().group(tcp()).build().unwrap());
    let (src, _) = filled(&a, 3);
    let (_at_b, to_b) = b.alloc_mr(LEN).unwrap();
    let (at_c, to_c) = c.alloc_mr(LEN).unwrap();
    let dst = |desc| ScatterDst { len: LEN as u64, src_offset: 0, dst: (desc, 0) };
    let dsts = [dst(&to_b), dst(&to_c)];

    c.dereg_mr(at_c).unwrap();
    let error = outcome(|done| a.submit_scatter(None, Some(7), &src, &dsts, &Options::default(), done)).unwrap_err();
    let failed: Vec<_> = error.transfer_errors().iter().map(|error| error.peer).collect();
    assert_eq!(failed, [to_c.name()], "{error}");
    expect_count(&b, 7, 1).unwrap();

    // Both peers end: the operation names both, once.
    b.close();
    c.close();
    let error =
        outcome(|done| a.submit_scatter(None, Some(7), &src, &dsts, &common::within(Duration::from_secs(1)), done));
    let error = error.unwrap_err();
    let mut failed: Vec<_> = error.transfer_errors().iter().map(|error| error.peer).collect();
    failed.sort_unstable();
    let mut both = vec![to_b.name(), to_c.name()];
    both.sort_unstable();
    assert_eq!(failed, both, "{error}");

    // Writes that wait for a word go back as one.
    let (word, (done, future)) = (a.alloc_uvm_word().unwrap(), Done::future());
    let item = |desc| WriteItem { len: 8, src: (&src, 0), dst: (desc, 0) };
    let prepared = a.prepare_writes(&[item(&to_b), item(&to_c)], Via::default()).unwrap();
    let id = a.submit_when(&word, 1, &prepared, Some(1), &Options::default(), done).unwrap();
    a.cancel(id).unwrap();
    let error = future.wait(LONG).unwrap().unwrap_err();
    assert_eq!(error.transfer_errors().len(), 2, "{error}");
    assert!(error.transfer_errors().iter().all(|error| error.reason == Reason::Cancelled), "{error}");
}

#[test]
fn a_fence_shuts_out_every_device_group_and_a_sender_is_its_engine() {
    let ((a, of_a), (b, of_b)) = (watched(both()), watched(both()));
    let (src, _) = filled(&a, 4);
    let (_memory, desc) = b.alloc_mr(LEN).unwrap();
    for group in [0, 1] {
        outcome(|done| a.submit_single_write(8, Some(8), (&src, 0), (&desc, 0), &through(group), done)).unwrap();
    }
    expect_count(&b, 8, 2).unwrap();

    // An expectation names a by any of its addresses: it is one sender, as long as one of its connections stands.
    let expect = |senders: &[NetAddr], count| {
        let options = ExpectOptions { deadline: Some(LONG), senders, ..ExpectOptions::default() };
        let (done, future) = Done::future();
        b.expect_imm(8, count, &options, done).unwrap();
        future
    };
    let (met, missed) = (expect(&[a.group_address(1).unwrap()], 3), expect(&[a.group_address(0).unwrap()], 4));
    outcome(|done| a.submit_single_write(8, Some(8), (&src, 0), (&desc, 0), &through(0), done)).unwrap();
    met.wait(LONG).unwrap().unwrap();

    outcome(|done| b.fence(&a.group_address(0).unwrap(), done)).unwrap();
    for events in [&of_b, &of_a] {
        let downs = || events.lock().unwrap().iter().filter(|event| event.down.is_some()).count();
        eventually("both connections of the fenced engine are down, on both sides", || downs() == 2);
    }
    let error = missed.wait(LONG).unwrap().unwrap_err();
    assert!(matches!(&error, Error::CountMissed { missing, .. } if missing.len() == 1), "{error}");
    // Over every device group it stays out, until it is admitted.
    let write = || outcome(|done| a.submit_single_write(8, Some(8), (&src, 0), (&desc, 0), &through(1), done));
    assert!(write().is_err());
    b.admit(&a.main_address()).unwrap();
    write().unwrap();
    expect_count(&b, 8, 4).unwrap();
}

#[test]
fn memory_may_be_registered_for_some_device_groups_alone() {
    let (a, b) = (both().build().unwrap(), both().build().unwrap());
    let (src, _) = filled(&a, 5);
    let (_memory, desc) = b.alloc_mr_in(LEN, &[1]).unwrap();
    outcome(|done| a.submit_single_write(8, Some(1), (&src, 0), (&desc, 0), &Options::default(), done)).unwrap();
    let refused = a.submit_single_write(8, None, (&src, 0), (&desc, 0), &through(0), Done::ignore());
    assert!(matches!(refused, Err(Error::Argument { argument: "dst", .. })), "{refused:?}");
    for groups in [&[][..], &[2], &[0, 0]] {
        let refused = b.alloc_mr_in(LEN, groups).map(|_| ());
        assert!(matches!(refused, Err(Error::Argument { argument: "groups", .. })), "{groups:?}: {refused:?}");
    }
}

/// The sender is asked over one device group, and answers for all of them.
#[test]
fn a_reset_waits_for_writes_over_every_device_group() {
    let network = SimNetwork::new(3);
    let build = || Engine::builder().group(DeviceGroup::sim(&network, 1)).group(DeviceGroup::sim(&network, 1));
    let (a, b) = (build().build().unwrap(), build().build().unwrap());
    let (src, _) = filled(&a, 6);
    let (_memory, desc) = b.alloc_mr(LEN).unwrap();
    let write = |group, done| a.submit_single_write(8, Some(9), (&src, 0), (&desc, 0), &through(group), done);
    for group in [0, 1] {
        outcome(|done| write(group, done)).unwrap();
    }
    // The NIC of group 1 is busy for a second; the question and its answer need a fifth of that.
    network.set_faults(Faults { write_cost: Duration::from_millis(100), reorder: false, ..Faults::default() }).unwrap();
    let futures: Vec<_> =
        (0..10).map(|_| Done::future()).map(|(done, future)| write(1, done).map(|_| future)).collect();
    outcome(|done| b.submit_reset_imm(9, &[a.main_address()], &Options::default(), done)).unwrap();
    assert_eq!(b.imm_count(9), 0);
    futures.into_iter().for_each(|future| future.unwrap().wait(LONG).unwrap().unwrap());
    assert_eq!(b.imm_count(9), 0, "a write of before the reset has counted after it");

    // Over both, as one.
    let id =
        b.submit_reset_imm(9, &[a.main_address(), a.group_address(1).unwrap()], &Options::default(), Done::ignore());
    b.cancel(id.unwrap()).unwrap();
}

#[test]
fn reads_take_their_device_group_and_choose_one() {
    let ((a, _), (b, of_b), (c, of_c)) = (watched(both()), watched(both()), watched(Engine::builder().group(tcp())));
    let bytes = noise(LEN, 8);
    let source = |engine: &Engine| {
        let (handle, desc) = engine.alloc_mr(LEN).unwrap();
        handle.write(0, &bytes).unwrap();
        (handle, desc)
    };
    let ((_at_b, from_b), (_at_c, from_c)) = (source(&b), source(&c));
    let (dst, _) = a.alloc_mr(2 * LEN).unwrap();
    let item = |src, at| ReadItem { len: LEN as u64, src: (src, 0), dst: (&dst, at) };
    let items = [item(&from_b, 0), item(&from_c, LEN as u64)];
    outcome(|done| a.submit_reads(Some(3), &items, &Options::default(), done)).unwrap();
    holds(&dst, &[bytes.clone(), bytes.clone()].concat());
    assert_eq!((expect_count(&b, 3, 1), expect_count(&c, 3, 1)), (Ok(()), Ok(())));
    came_over(&of_b, &[0]);
    came_over(&of_c, &[1]);
    outcome(|done| a.submit_read(8, None, (&from_b, 0), (&dst, 0), &through(1), done)).unwrap();
    came_over(&of_b, &[0, 1]);
}
