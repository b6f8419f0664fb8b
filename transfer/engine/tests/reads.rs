//! One-sided reads: where the bytes go, what a failed one leaves alone, and that none lands after `done`.
//!
//! `PUTGET_TRANSFER_ROUNDS` makes the rounds of stopped servers as many as it says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::process::{filled, hex, read, unhex};
use common::*;
use putget_transfer::{
    Device, Done, DownReason, Engine, Error, Faults, Grid, MrDesc, MrHandle, NetAddr, NetworkError, Options, Pages,
    ReadItem, Reason, TransferFuture, Via, WriteItem,
};

const IMM: u32 = 11;

fn get(engine: &Engine, len: u64, src: (&MrDesc, u64), dst: (&MrHandle, u64)) -> putget_transfer::Outcome {
    outcome(|done| engine.submit_read(len, None, src, dst, &within(LONG), done))
}

/// Reads of a whole region that are under way at once.
fn flood(engine: &Engine, imm: Option<u32>, src: &MrDesc, dst: &MrHandle, count: usize) -> Vec<TransferFuture> {
    let begin = |_| {
        let (done, future) = Done::future();
        engine.submit_read(dst.len(), imm, (src, 0), (dst, 0), &within(LONG), done).unwrap();
        future
    };
    (0..count).map(begin).collect()
}

#[test]
fn bytes_of_every_length_come_to_their_place_and_to_no_other() {
    for network in Network::all(1) {
        let (a, b) = (engine(&network, 2), engine(&network, 2));
        let len = 5 << 20;
        let bytes = noise(len, 1);
        let (source, desc) = filled(&b, &bytes);
        for (place, size) in [(0, 1), (3, 24), (5, 25), (64, 4096), (100, 40_000), (7, 700_001), (1, len - 1)] {
            let (dst, _) = filled(&a, &vec![0xee; len + 64]);
            assert_eq!(get(&a, size as u64, (&desc, place as u64), (&dst, 32)), Ok(()), "{size}");
            let found = read(&dst, 0, len + 64);
            assert_eq!(found[32..32 + size], bytes[place..place + size], "{size}");
            assert!(found[..32].iter().chain(&found[32 + size..]).all(|byte| *byte == 0xee), "{size}");
        }
        assert_eq!(read(&source, 0, len), bytes);
        // Nothing to read is nothing to do.
        let (dst, _) = filled(&a, &[7; 8]);
        assert_eq!(get(&a, 0, (&desc, 0), (&dst, 0)), Ok(()));
        assert_eq!(read(&dst, 0, 8), [7; 8]);
        let metrics = a.metrics_text();
        assert!(metrics.lines().any(|line| line.starts_with("putget_transfer_reads_total{nic=\"1\"}")), "{metrics}");
    }
}

#[test]
fn pages_and_items_come_and_the_peer_counts_once_after_them() {
    for network in Network::all(2) {
        let (a, b) = (engine(&network, 2), engine(&network, 2));
        let bytes = noise(64 * 1000, 2);
        let (_source, desc) = filled(&b, &bytes);
        let (dst, _) = filled(&a, &vec![0; 2 * 64 * 1000]);
        let (from, to): (Vec<u64>, Vec<u64>) = ((0..32).rev().collect(), (0..32).map(|page| (page * 7) % 32).collect());
        let grid = |indices, stride, plane_stride| Grid {
            pages: Pages { indices, stride, offset: 0 },
            planes: 2,
            plane_stride,
        };
        let (src_grid, dst_grid) = (grid(&from, 1000, 32_000), grid(&to, 2000, 64_000));
        let (ends, options) = (((&desc, src_grid), (&dst, dst_grid)), Options::default());
        let got = outcome(|done| a.submit_paged_reads(1000, Some(IMM), ends.0, ends.1, &options, done));
        assert_eq!(got, Ok(()));
        for plane in 0..2 {
            for (from, to) in from.iter().zip(&to) {
                let from = plane * 32_000 + *from as usize * 1000;
                assert_eq!(read(&dst, (plane * 64_000) as u64 + to * 2000, 1000), bytes[from..from + 1000]);
            }
        }
        assert_eq!(expect_count(&b, IMM, 1), Ok(()));
        // Several regions on both sides, as one operation that counts once.
        let (_other, second) = filled(&b, &noise(5000, 3));
        let (x, y) = (filled(&a, &[0; 3000]).0, filled(&a, &[0; 3000]).0);
        let items = [
            ReadItem { len: 1000, src: (&desc, 10), dst: (&x, 0) },
            ReadItem { len: 500, src: (&second, 20), dst: (&x, 2000) },
            ReadItem { len: 3000, src: (&second, 1000), dst: (&y, 0) },
        ];
        assert_eq!(outcome(|done| a.submit_reads(Some(IMM), &items, &Options::default(), done)), Ok(()));
        assert_eq!(read(&x, 0, 1000), bytes[10..1010]);
        assert_eq!(read(&x, 2000, 500), noise(5000, 3)[20..520]);
        assert_eq!(read(&y, 0, 3000), noise(5000, 3)[1000..4000]);
        assert_eq!(expect_count(&b, IMM, 2), Ok(()));
        assert_eq!(b.imm_count(IMM), 2);
    }
}

#[test]
fn a_refused_key_leaves_its_neighbours_alone() {
    for network in Network::all(3) {
        let (a, b) = (engine(&network, 1), engine(&network, 1));
        let bytes = noise(64 << 10, 4);
        let ((_source, desc), (ended, stale)) = (filled(&b, &bytes), filled(&b, &bytes));
        let (target, writable) = filled(&b, &[0; 4096]);
        b.dereg_mr(ended).unwrap();
        let (dst, _) = filled(&a, &vec![0xee; 64 << 10]);
        let (untouched, _) = filled(&a, &[0xee; 1000]);
        let (good, bad): (Vec<_>, Vec<_>) = (0..100_u64)
            .map(|place| {
                let (done, good) = Done::future();
                let (src, into) = ((&desc, place * 600), (&dst, place * 600));
                a.submit_read(1 + place * 5, Some(IMM), src, into, &within(LONG), done).unwrap();
                let write = WriteItem { len: 8, src: (&dst, 0), dst: (&writable, place * 8) };
                let (done, written) = Done::future();
                a.submit_writes(None, &[write], &within(LONG), done).unwrap();
                let (done, bad) = Done::future();
                a.submit_read(1000, Some(IMM), (&stale, 0), (&untouched, 0), &within(LONG), done).unwrap();
                ([good, written], bad)
            })
            .unzip();
        for future in bad {
            let error = failure(future.wait(LONG).unwrap());
            assert_eq!((error.reason, error.may_land), (Reason::Network(NetworkError::BadKey), false));
        }
        good.into_iter().flatten().for_each(|future| assert_eq!(future.wait(LONG), Some(Ok(()))));
        for place in 0..100 {
            let (start, len) = (place * 600, 1 + place * 5);
            assert_eq!(read(&dst, start as u64, len), bytes[start..start + len], "{place}");
        }
        assert_eq!(read(&untouched, 0, 1000), [0xee; 1000]);
        assert_eq!(expect_count(&b, IMM, 100), Ok(()));
        assert_eq!(b.imm_count(IMM), 100, "a read that failed was counted");
        drop(target);
    }
}

#[test]
fn a_mistake_is_refused_before_any_effect() {
    let network = Network::all(4).remove(0);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let ((_source, desc), (dst, _)) = (filled(&b, &[1; 100]), filled(&a, &[2; 100]));
    let refused = |len, from, to| match a.submit_read(
        len,
        None,
        (&desc, from),
        (&dst, to),
        &Options::default(),
        Done::ignore(),
    ) {
        Err(Error::Argument { argument, .. }) => argument,
        other => panic!("{other:?}"),
    };
    assert_eq!((refused(101, 0, 0), refused(50, 51, 0), refused(50, 0, 51)), ("dst", "src", "dst"));
    assert_eq!(refused(1, u64::MAX, 0), "src");
    let pages = |indices| Pages { indices, stride: 10, offset: 0 };
    let (src, into) = ((&desc, pages(&[0, 1])), (&dst, pages(&[0])));
    let uneven = a.submit_paged_reads(10, None, src, into, &Options::default(), Done::ignore());
    assert!(matches!(uneven, Err(Error::Argument { argument: "dst", .. })), "{uneven:?}");
    assert!(matches!(a.prepare_reads(&[], Via::default()), Err(Error::Argument { argument: "items", .. })));
    assert_eq!(read(&dst, 0, 100), [2; 100]);
    // Memory that a read goes to stays registered until the read is over.
    let (done, future) = Done::future();
    a.submit_read(100, None, (&desc, 0), (&dst, 0), &within(LONG), done).unwrap();
    assert_eq!(future.wait(LONG), Some(Ok(())));
    eventually("nothing uses it", || a.dereg_mr(dst.clone()).is_err());
    a.close();
    let closed = a.submit_read(1, None, (&desc, 0), (&dst, 0), &Options::default(), Done::ignore());
    assert_eq!(closed, Err(Error::Closed));
}

#[test]
fn nothing_lands_after_a_cancelled_read_has_ended() {
    for network in Network::all(5) {
        let len = 1 << 20;
        network.set_faults(Faults { max_delay_polls: 60, depth: 8, ..Faults::default() });
        let (a, b) = (engine(&network, 1), engine(&network, 1));
        let (_source, desc) = filled(&b, &vec![0xaa; len]);
        let (dst, _) = filled(&a, &vec![0; len]);
        in_the_middle(20, 20, |round, reads| {
            let transfers: Vec<_> = (0..reads)
                .map(|_| {
                    let (done, future) = Done::future();
                    let id = a.submit_read(len as u64, None, (&desc, 0), (&dst, 0), &within(LONG), done).unwrap();
                    (id, future)
                })
                .collect();
            std::thread::sleep(Duration::from_micros(200 * round as u64 % 4000));
            for (id, _) in &transfers {
                a.cancel(*id).unwrap();
            }
            let mut stopped = 0;
            for (_, future) in transfers {
                if let Err(error) = future.wait(LONG).unwrap() {
                    let error = failure(Err(error));
                    assert_eq!((error.reason, error.may_land), (Reason::Cancelled, false));
                    stopped += 1;
                }
            }
            dst.write(0, &vec![0x5c; len]).unwrap();
            std::thread::sleep(Duration::from_millis(2));
            assert!(read(&dst, 0, len).iter().all(|byte| *byte == 0x5c), "round {round}");
            stopped > 0
        });
    }
}

#[test]
fn after_the_end_of_a_registration_nobody_reads() {
    for network in Network::all(6) {
        let len = if matches!(network, Network::Tcp | Network::Host) { 2 << 20 } else { 96 << 10 };
        network.set_faults(Faults { max_delay_polls: 60, depth: 8, ..Faults::default() });
        let (a, b) = (engine(&network, 1), engine(&network, 1));
        let (dst, _) = filled(&a, &vec![0; len]);
        in_the_middle(10, 40, |round, reads| {
            let (source, desc) = filled(&b, &vec![0xaa; len]);
            let before = b.imm_count(IMM);
            let futures = flood(&a, Some(IMM), &desc, &dst, reads);
            let end = Instant::now() + LONG;
            while b.imm_count(IMM) == before {
                assert!(Instant::now() < end, "none has come");
                nap();
            }
            b.dereg_mr(source).unwrap();
            let mut refused = 0;
            for future in futures {
                match future.wait(LONG).unwrap() {
                    // Whatever ends well has all of its bytes.
                    Ok(()) => {}
                    Err(error) => {
                        let error = failure(Err(error));
                        let right = (Reason::Network(NetworkError::BadKey), false);
                        assert_eq!((error.reason, error.may_land), right, "round {round}");
                        refused += 1;
                    }
                }
            }
            refused > 0
        });
    }
}

#[test]
fn a_fence_ends_reads_and_a_new_connection_works() {
    for network in Network::all(7) {
        let len = 1 << 20;
        network.set_faults(Faults { max_delay_polls: 60, depth: 8, ..Faults::default() });
        let (a, b) = (engine(&network, 1), engine(&network, 1));
        let (_source, desc) = filled(&b, &vec![0xaa; len]);
        let (dst, _) = filled(&a, &vec![0; len]);
        in_the_middle(20, 20, |round, reads| {
            assert_eq!(get(&a, 10, (&desc, 0), (&dst, 0)), Ok(()), "round {round}");
            let futures = flood(&a, Some(IMM), &desc, &dst, reads);
            // By turns from the side that reads and from the side that serves.
            let (fencing, fenced) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
            assert_eq!(outcome(|done| fencing.fence(&fenced.main_address(), done)), Ok(()));
            let own = round % 2 == 0;
            if own {
                dst.write(0, &vec![0x5c; len]).unwrap();
            }
            let mut failed = 0;
            for future in futures {
                if let Err(error) = future.wait(LONG).unwrap() {
                    assert!(!failure(Err(error)).may_land, "round {round}");
                    failed += 1;
                }
            }
            if own {
                assert!(read(&dst, 0, len).iter().all(|byte| *byte == 0x5c), "round {round}");
            }
            fencing.admit(&fenced.main_address()).unwrap();
            failed > 0
        });
    }
}

#[test]
fn a_dead_peer_fails_the_reads_that_it_serves() {
    let Some(network) = Network::obedient(8) else { return };
    let (lost, events) = channel();
    let a = nervous(&network, 1).on_peer_event(move |event| lost.send(event.down).unwrap_or(())).build().unwrap();
    let b = nervous(&network, 1).build().unwrap();
    let ((_source, desc), (dst, _)) = (filled(&b, &[3; 1000]), filled(&a, &[0; 1000]));
    assert_eq!(get(&a, 1000, (&desc, 0), (&dst, 0)), Ok(()));
    network.kill(&b.main_address());
    let error = failure(get(&a, 1000, (&desc, 0), (&dst, 0)));
    assert_eq!((error.reason, error.may_land), (Reason::PeerDown(DownReason::HeartbeatLost), false));
    eventually("it is down", || events.try_iter().any(|down| down == Some(DownReason::HeartbeatLost)));
}

#[test]
fn lost_requests_are_told_and_others_go_on() {
    let Some(network) = Network::obedient(9) else { return };
    network.set_faults(Faults { drop_writes: 0.2, max_delay_polls: 5, reorder: true, ..Faults::default() }).unwrap();
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let bytes = noise(100_000, 9);
    let (_source, desc) = filled(&b, &bytes);
    let (mut well, mut lost) = (0, 0);
    for place in 0..200_u64 {
        let (dst, _) = filled(&a, &[0; 100]);
        match get(&a, 100, (&desc, place * 100), (&dst, 0)) {
            Ok(()) => {
                assert_eq!(read(&dst, 0, 100), bytes[place as usize * 100..][..100]);
                well += 1;
            }
            Err(error) => {
                assert_eq!(failure(Err(error)).reason, Reason::Network(NetworkError::Lost));
                lost += 1;
            }
        }
    }
    assert!(well > 100 && lost > 10, "{well} {lost}");
}

const ROLE: &str = "PUTGET_TRANSFER_TEST_SERVER";

/// Not a test of its own: the process that the tests below read from.
#[test]
#[ignore = "started by other tests"]
fn server_process() {
    let Ok(network) = std::env::var(ROLE) else { return };
    let network = Network::all(0).remove(network.parse().unwrap());
    // Filled before the engine has threads: ThreadSanitizer does not see the order that another process makes.
    let bytes = vec![0xaa_u8; 4 << 20].leak();
    let engine = builder(&network, 1).heartbeat(Duration::from_millis(100), LONG).build().unwrap();
    // SAFETY: the memory is never freed, and nobody looks at it but the engine.
    let (_memory, desc) = unsafe { engine.reg_mr(bytes.as_mut_ptr(), bytes.len(), Device::Host).unwrap() };
    println!("\nhere {} {}", hex(&engine.main_address().to_bytes()), hex(&desc.to_bytes()));
    std::io::stdout().flush().unwrap();
    // Until the test ends it, or its input.
    std::io::stdin().lines().for_each(drop);
}

struct Server {
    child: Child,
    address: NetAddr,
    desc: MrDesc,
    /// Open as long as it lives: after a minute it says that it is still running.
    _says: Lines<BufReader<ChildStdout>>,
}

/// The networks that lead to another process, with what `Server::start` calls them.
fn between_processes(seed: u64) -> impl Iterator<Item = (usize, Network)> {
    Network::all(seed).into_iter().enumerate().filter(|(_, network)| !matches!(network, Network::Sim(_)))
}

impl Server {
    fn start(network: usize) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "server_process", "--ignored", "--nocapture"]).env(ROLE, network.to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut says = BufReader::new(child.stdout.take().unwrap()).lines();
        let here = |line: String| line.strip_prefix("here ").map(str::to_owned);
        let here = says.by_ref().map_while(Result::ok).find_map(here).unwrap();
        let (address, desc) = here.split_once(' ').unwrap();
        let (address, desc) =
            (NetAddr::from_bytes(&unhex(address)).unwrap(), MrDesc::from_bytes(&unhex(desc)).unwrap());
        Self { child, address, desc, _says: says }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the child has not been waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The serving side is stopped in the middle, the reader fills its memory anew when it is told that the reads are over, and the serving side
/// goes on.
#[test]
fn a_server_that_was_stopped_brings_nothing_after_its_reads_have_failed() {
    for (number, network) in between_processes(10) {
        let server = Server::start(number);
        let a = builder(&network, 1).heartbeat(Duration::from_millis(100), short_patience(&network)).build().unwrap();
        let len = 4 << 20;
        let (dst, _) = filled(&a, &vec![0; len]);
        let rounds = rounds(4);
        let mut late = 0;
        in_the_middle(rounds, 200, |round, reads| {
            assert_eq!(get(&a, 8, (&server.desc, 0), (&dst, 0)), Ok(()));
            let futures = flood(&a, None, &server.desc, &dst, reads);
            eventually("some have come", || futures[1].is_done());
            server.signal(libc::SIGSTOP);
            if round % 2 == 0 {
                assert_eq!(outcome(|done| a.fence(&server.address, done)), Ok(()));
            }
            let mut failed = 0;
            for future in futures {
                if let Err(error) = future.wait(LONG).unwrap() {
                    assert!(!failure(Err(error)).may_land, "round {round}");
                    failed += 1;
                }
            }
            dst.write(0, &vec![0x5c; len]).unwrap();
            server.signal(libc::SIGCONT);
            std::thread::sleep(Duration::from_millis(100));
            late += read(&dst, 0, len).iter().filter(|byte| **byte != 0x5c).count();
            assert_eq!(late, 0, "round {round}: late bytes");
            a.admit(&server.address).unwrap();
            failed > 0
        });
        println!("{rounds} rounds over network {number}: {late} late bytes");
    }
}

#[test]
fn a_server_that_is_killed_fails_its_reads_in_time() {
    for (number, network) in between_processes(11) {
        let mut server = Server::start(number);
        let a = nervous(&network, 1).build().unwrap();
        let (dst, _) = filled(&a, &vec![0; 4 << 20]);
        // An emulated device reads in the posting thread: all may have come before anybody looks.
        let emulated = matches!(network, Network::Verbs(_));
        let mut failed = 0;
        for _ in 0..10 {
            let futures = flood(&a, None, &server.desc, &dst, 100);
            eventually("some have come", || futures[1].is_done());
            let begin = Instant::now();
            server.child.kill().unwrap();
            for future in futures {
                if let Err(error) = future.wait(LONG).unwrap() {
                    assert!(!failure(Err(error)).may_land);
                    failed += 1;
                }
            }
            assert!(begin.elapsed() < LONG / 2 * network.slowness(), "{:?}", begin.elapsed());
            if failed > 0 || emulated {
                break;
            }
            server = Server::start(number);
        }
        assert!(failed > 0 || emulated, "it was killed after the last read each time");
        server = Server::start(number);
        assert_eq!(get(&a, 8, (&server.desc, 0), (&dst, 0)), Ok(()));
        assert_eq!(read(&dst, 0, 8), [0xaa; 8]);
    }
}
