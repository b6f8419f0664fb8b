//! The libfabric provider, with its software networks `tcp` and `shm`: inside one process and between processes.
//!
//! Without libfabric on the machine each test says so and ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::*;
use putget_transfer::{
    Builder, DeviceGroup, Done, DownReason, Engine, Error, MrDesc, MrHandle, NetAddr, NetworkError, Options, Pages,
    Reason, Refusal, ScatterDst,
};

const PROVIDERS: [&str; 2] = ["tcp", "shm"];

fn fabric(provider: &str, nics: usize) -> Builder {
    let source = (provider == "tcp").then_some("127.0.0.1");
    Engine::builder()
        .group(DeviceGroup::libfabric(provider, &vec![source; nics]))
        .heartbeat(Duration::from_millis(100), Duration::from_secs(3))
        .connect_timeout(Duration::from_secs(3))
        .grace(Duration::from_millis(500))
}

/// Builds engines, or says why there are none.
fn engines<const N: usize>(provider: &str, nics: usize) -> Option<[Engine; N]> {
    let built: Result<Vec<_>, _> = (0..N).map(|_| fabric(provider, nics).build()).collect();
    match built {
        Err(error @ Error::Unavailable { .. }) => {
            println!("skipped: {error}");
            None
        }
        built => Some(built.unwrap().try_into().unwrap()),
    }
}

fn filled(engine: &Engine, bytes: &[u8]) -> (MrHandle, MrDesc) {
    let (handle, desc) = engine.alloc_mr(bytes.len()).unwrap();
    handle.write(0, bytes).unwrap();
    (handle, desc)
}

fn read(handle: &MrHandle, start: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    handle.read(start, &mut bytes).unwrap();
    bytes
}

#[test]
fn writes_of_all_kinds_land_and_count_once() {
    let provider = "tcp";
    let Some([a, b]) = engines(provider, 2) else { return };
    let bytes = noise(9 << 20, 1);
    let ((src, own), (dst, desc)) = (filled(&a, &bytes), b.alloc_mr(10 << 20).unwrap());
    let options = within(LONG);
    for len in [0, 1, 100, 65536, 9 << 20] {
        let write = |done| a.submit_single_write(len, Some(1), (&src, 0), (&desc, 77), &options, done);
        assert_eq!(outcome(write), Ok(()), "{provider} {len}");
        assert_eq!(read(&dst, 77, len as usize), bytes[..len as usize], "{provider} {len}");
    }
    assert_eq!(expect_count(&b, 1, 5), Ok(()), "{provider}");
    let (from, to): (Vec<_>, Vec<_>) = ((0..200).collect(), (0..200).map(|page| (page * 7) % 200).collect());
    let (from, to) =
        (Pages { indices: &from, stride: 1000, offset: 3 }, Pages { indices: &to, stride: 1024, offset: 0 });
    let paged = |done| a.submit_paged_writes(1000, Some(2), (&src, from), (&desc, to), &options, done);
    assert_eq!(outcome(paged), Ok(()));
    for (from, to) in (0..200).map(|page| (page, (page * 7) % 200)) {
        assert_eq!(read(&dst, to * 1024, 1000), bytes[from as usize * 1000 + 3..][..1000]);
    }
    let dsts = [(&desc, 50u64), (&own, 0)].map(|(desc, len)| ScatterDst { len, src_offset: 9000, dst: (desc, 5) });
    let scatter = |done| a.submit_scatter(None, Some(2), &src, &dsts, &options, done);
    assert_eq!(outcome(scatter), Ok(()));
    let barrier = |done| a.submit_barrier(None, 2, &[&desc, &own], &options, done);
    assert_eq!(outcome(barrier), Ok(()));
    assert_eq!((expect_count(&b, 2, 3), expect_count(&a, 2, 2)), (Ok(()), Ok(())), "{provider}");
    assert_eq!((b.imm_count(1), b.imm_count(2), a.imm_count(2)), (5, 3, 2));
    let reset = |done| b.submit_reset_imm(2, &[a.main_address()], &options, done);
    assert_eq!((outcome(reset), b.imm_count(2)), (Ok(()), 0));
}

#[test]
fn many_writes_at_a_time() {
    let provider = "tcp";
    let Some([a, b]) = engines(provider, 1) else { return };
    let bytes = noise(1 << 20, 2);
    let ((src, _), (dst, desc)) = (filled(&a, &bytes), b.alloc_mr(1 << 20).unwrap());
    let flag = putget_transfer::Flag::new();
    for place in 0..256 {
        let at = place * 4096;
        let done = Done::flag(&flag);
        a.submit_single_write(4096, Some(1), (&src, at), (&desc, at), &within(LONG), done).unwrap();
    }
    assert_eq!(expect_count(&b, 1, 256), Ok(()), "{provider}");
    assert!(read(&dst, 0, 1 << 20) == bytes, "{provider}");
    eventually("all are over", || flag.pending() == 0);
    assert_eq!(flag.failed(), 0);
}

#[test]
fn messages_and_the_shared_secret() {
    let provider = "tcp";
    let Some([a, b]) = engines(provider, 1) else { return };
    let (sender, received) = channel();
    b.submit_recvs(10_000, 2, move |from, bytes| sender.send((from, bytes.to_vec())).unwrap()).unwrap();
    let mut sent: Vec<_> = (0..100).map(|number| noise(number * 99, number as u64)).collect();
    let futures: Vec<_> = sent
        .iter()
        .map(|bytes| {
            let (done, future) = Done::future();
            a.submit_send(&b.main_address(), bytes, &within(LONG), done).unwrap();
            future
        })
        .collect();
    for future in futures {
        assert_eq!(future.wait(LONG), Some(Ok(())), "{provider}");
    }
    let mut found: Vec<_> = (0..100).map(|_| received.recv_timeout(LONG).unwrap()).map(|(_, bytes)| bytes).collect();
    found.sort();
    sent.sort();
    assert!(found == sent, "{provider}");
    let stranger = fabric(provider, 1).secret(b"other").build().unwrap();
    let connect = |done| stranger.add_peer_group(&[b.main_address()], &Options::default(), done);
    assert_eq!(failure(outcome(connect)).reason, Refusal::Secret.into(), "{provider}");
}

#[test]
fn a_key_that_is_not_registered_is_an_error() {
    let provider = "tcp";
    let Some([a, b]) = engines(provider, 1) else { return };
    let ((src, _), (dst, desc)) = (filled(&a, &[7; 64]), b.alloc_mr(64).unwrap());
    let (_kept, kept) = b.alloc_mr(64).unwrap();
    b.dereg_mr(dst).unwrap();
    let write = |done| a.submit_single_write(64, Some(1), (&src, 0), (&desc, 0), &within(LONG), done);
    let error = failure(outcome(write));
    assert_eq!((error.peer, error.nic), (b.name(), Some(0)), "{provider}");
    assert!(matches!(error.reason, Reason::Network(_) | Reason::PeerDown(_)), "{provider}: {error}");
    assert_eq!(b.imm_count(1), 0);
    // The software provider drops the connection over it; the next writes have a new one.
    let write = |done| a.submit_single_write(64, Some(1), (&src, 0), (&kept, 0), &within(LONG), done);
    eventually("writes work again", || outcome(write).is_ok());
}

#[test]
fn nobody_at_an_address_is_an_error_and_disturbs_nobody_else() {
    let provider = "tcp";
    let Some([a, b, gone]) = engines(provider, 1) else { return };
    let address = gone.main_address();
    drop(gone);
    let (done, nobody) = Done::future();
    a.add_peer_group(&[address], &within(Duration::from_secs(2)), done).unwrap();
    let connect = |done| a.add_peer_group(&[b.main_address()], &within(LONG), done);
    assert_eq!(outcome(connect), Ok(()), "{provider}");
    let error = failure(nobody.wait(LONG).unwrap());
    assert!(
        matches!(error.reason, Reason::Deadline | Reason::Network(NetworkError::Unreachable)),
        "{provider}: {error}"
    );
}

#[test]
fn what_is_missing_is_said_by_name() {
    let error = Engine::builder().group(DeviceGroup::libfabric("carrier_pigeon", &[None])).build().unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("libfabric"), "{error}");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

const ROLE: &str = "PUTGET_TRANSFER_TEST_PROVIDER";

/// Not a test of its own: the other process of the tests below.
#[test]
#[ignore = "started by other tests"]
fn other_process() {
    let Ok(provider) = std::env::var(ROLE) else { return };
    let engine = fabric(&provider, 1).secret(b"between processes").build().unwrap();
    let (handle, desc) = engine.alloc_mr(MEMORY).unwrap();
    println!("\nhere {} {}", hex(&engine.main_address().to_bytes()), hex(&desc.to_bytes()));
    std::io::stdout().flush().unwrap();
    engine.submit_recvs(1000, 2, |_, bytes| println!("\nmessage {}", hex(bytes))).unwrap();
    for line in std::io::stdin().lines() {
        // Each line is an immediate and its count; the answer is a digest of the memory that they came after.
        let line = line.unwrap();
        let (imm, count) = line.split_once(' ').unwrap();
        assert_eq!(expect_count(&engine, imm.parse().unwrap(), count.parse().unwrap()), Ok(()));
        println!("\ndigest {}", digest(&read(&handle, 0, MEMORY)));
        std::io::stdout().flush().unwrap();
    }
}

const MEMORY: usize = 6 << 20;

/// Depends on every byte and its place.
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte) + 1))
}

struct Other {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Other {
    fn start(provider: &str) -> (Self, NetAddr, MrDesc) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "other_process", "--ignored", "--nocapture"]).env(ROLE, provider);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut other = Self { child, lines };
        let found = other.line("here ");
        let (address, desc) = found.split_once(' ').unwrap();
        (other, NetAddr::from_bytes(&unhex(address)).unwrap(), MrDesc::from_bytes(&unhex(desc)).unwrap())
    }

    fn line(&mut self, start: &str) -> String {
        loop {
            let line = self.lines.next().expect("the other process ended").unwrap();
            if let Some(rest) = line.strip_prefix(start) {
                return rest.to_owned();
            }
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        // What is killed cannot take its shared memory away.
        let own = format!("{}:", self.child.id());
        for file in std::fs::read_dir("/dev/shm").unwrap().map(Result::unwrap) {
            if file.file_name().to_string_lossy().starts_with(&own) {
                std::fs::remove_file(file.path()).unwrap();
            }
        }
    }
}

impl Other {
    /// Waits there for a count and compares the memory with what it should be.
    fn check(&mut self, imm: u32, count: u64, right: &[u8]) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{imm} {count}").unwrap();
        assert_eq!(self.line("digest "), digest(right).to_string(), "immediate {imm}");
    }
}

/// An engine and its peer events, or None with the reason said.
fn watched(provider: &str) -> Option<(Engine, std::sync::mpsc::Receiver<putget_transfer::PeerEvent>)> {
    engines::<1>(provider, 1)?;
    let (sender, events) = channel();
    let notify = move |event: putget_transfer::PeerEvent| sender.send(event).unwrap_or(());
    Some((fabric(provider, 1).secret(b"between processes").on_peer_event(notify).build().unwrap(), events))
}

#[test]
fn operations_between_processes() {
    for provider in PROVIDERS {
        let Some((a, _events)) = watched(provider) else { return };
        let (mut other, address, desc) = Other::start(provider);
        let bytes = noise(MEMORY, 3);
        let ((src, _), mut right) = (filled(&a, &bytes), vec![0; MEMORY]);
        let options = within(LONG);
        for (index, len) in [0, 1, 100, 65536, 5 << 20].into_iter().enumerate() {
            let write = |done| a.submit_single_write(len, Some(1), (&src, 9), (&desc, 77), &options, done);
            assert_eq!(outcome(write), Ok(()), "{provider} {len}");
            right[77..77 + len as usize].copy_from_slice(&bytes[9..9 + len as usize]);
            other.check(1, index as u64 + 1, &right);
        }
        let (from, to): (Vec<u64>, Vec<u64>) = ((0..200).collect(), (0..200).map(|page| (page * 7) % 200).collect());
        for (from, to) in from.iter().zip(&to) {
            let (from, to) = (*from as usize * 1000 + 3, *to as usize * 1024);
            right[to..to + 1000].copy_from_slice(&bytes[from..from + 1000]);
        }
        let (from, to) =
            (Pages { indices: &from, stride: 1000, offset: 3 }, Pages { indices: &to, stride: 1024, offset: 0 });
        let paged = |done| a.submit_paged_writes(1000, Some(2), (&src, from), (&desc, to), &options, done);
        assert_eq!(outcome(paged), Ok(()), "{provider}");
        other.check(2, 1, &right);
        for number in 0..20_u8 {
            let send = |done| a.submit_send(&address, &[number; 500], &options, done);
            assert_eq!(outcome(send), Ok(()), "{provider}");
            assert_eq!(other.line("message "), hex(&[number; 500]));
        }
        let barrier = |done| a.submit_barrier(None, 3, &[&desc], &options, done);
        assert_eq!(outcome(barrier), Ok(()), "{provider}");
        other.check(3, 1, &right);
    }
}

#[test]
fn kill_9_is_noticed_and_a_new_process_is_a_new_peer() {
    for provider in PROVIDERS {
        let Some((a, events)) = watched(provider) else { return };
        let (src, _) = filled(&a, &noise(1 << 20, 3));
        let write = |desc: &MrDesc| {
            let (done, future) = Done::future();
            a.submit_single_write(1 << 20, Some(5), (&src, 0), (desc, 0), &within(LONG), done).unwrap();
            future.wait(LONG).unwrap()
        };
        let (mut other, mut address, mut desc) = Other::start(provider);
        for _ in 0..2 {
            assert_eq!(write(&desc), Ok(()), "{provider}");
            assert_eq!(events.recv_timeout(LONG).unwrap().down, None);
            // Nobody says goodbye.
            drop(other);
            let started = Instant::now();
            let event = events.recv_timeout(LONG).unwrap();
            assert_eq!(event.peer, address.name());
            assert!(matches!(event.down, Some(DownReason::HeartbeatLost | DownReason::NetworkLost)), "{event:?}");
            assert!(started.elapsed() < Duration::from_secs(20), "{provider}: {:?}", started.elapsed());
            let error = write(&desc).unwrap_err();
            assert_eq!(error.transfer_errors()[0].peer, address.name(), "{provider}: {error}");
            (other, address, desc) = Other::start(provider);
        }
        assert_eq!(write(&desc), Ok(()), "{provider}");
    }
}

#[test]
fn shm_refuses_engines_of_one_process() {
    let Some([a, b]) = engines("shm", 1) else { return };
    let connect = |to: &Engine| outcome(|done| a.add_peer_group(&[to.main_address()], &within(LONG), done));
    assert_eq!(connect(&a), Ok(()));
    let error = failure(connect(&b));
    assert!(error.to_string().contains("shm connects processes"), "{error}");
}
