//! Several hosts, as network namespaces with a cable (veth) for each NIC: libfabric's tcp between them, a peer that is killed, a
//! cable that is pulled and put back.
//!
//! Needs root, iproute2, namespaces and libfabric; where one is missing it says which and ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::*;
use putget_transfer::{
    Builder, DeviceGroup, Done, DownReason, Engine, Error, MrDesc, MrHandle, NetAddr, Options, Pages, PeerEvent,
};

/// Which host a process is on ("a" or "b"), and what both are called.
const HOST: &str = "PUTGET_TRANSFER_TEST_HOST";
const NAME: &str = "PUTGET_TRANSFER_TEST_HOSTS";
const NICS: usize = 2;
const MEMORY: usize = 4 << 20;

fn ip(words: &str) -> Result<(), String> {
    let output = Command::new("ip").args(words.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {words}: {}", errors.trim())) }
}

/// Two hosts with two cables between them, as long as this lives.
struct Hosts(String);

impl Hosts {
    fn new() -> Result<Self, String> {
        let hosts = Self(format!("ptt{}", std::process::id()));
        let name = &hosts.0;
        for host in ["a", "b"] {
            ip(&format!("netns add {name}{host}"))?;
            ip(&format!("-n {name}{host} link set lo up"))?;
        }
        for nic in 0..NICS {
            ip(&format!("-n {name}a link add nic{nic} type veth peer name nic{nic} netns {name}b"))?;
            for (host, number) in [("a", 1), ("b", 2)] {
                ip(&format!("-n {name}{host} addr add 10.77.{nic}.{number}/24 dev nic{nic}"))?;
                ip(&format!("-n {name}{host} link set nic{nic} up"))?;
            }
        }
        Ok(hosts)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in ["a", "b"] {
            // One that was never made cannot be taken away.
            let _ = ip(&format!("netns del {}{host}", self.0));
        }
    }
}

fn on_host(name: &str, host: &str, test: &str) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &format!("{name}{host}")]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).env(HOST, host).env(NAME, name);
    command
}

fn pull(nic: usize, state: &str) {
    ip(&format!("-n {}b link set nic{nic} {state}", std::env::var(NAME).unwrap())).unwrap();
}

fn builder(nics: usize) -> Option<Builder> {
    let number = if std::env::var(HOST).ok()? == "a" { 1 } else { 2 };
    let addresses: Vec<_> = (0..nics).map(|nic| format!("10.77.{nic}.{number}")).collect();
    let sources: Vec<_> = addresses.iter().map(|address| Some(address.as_str())).collect();
    let engine = Engine::builder().group(DeviceGroup::libfabric("tcp", &sources)).secret(b"between hosts");
    let impatient = engine.heartbeat(Duration::from_millis(100), Duration::from_secs(2));
    Some(impatient.connect_timeout(Duration::from_secs(2)).grace(Duration::from_millis(500)))
}

/// Runs the scenarios below, each on hosts of its own.
#[test]
fn between_hosts() {
    if let Err(error @ Error::Unavailable { .. }) =
        Engine::builder().group(DeviceGroup::libfabric("tcp", &[Some("127.0.0.1")])).build()
    {
        println!("skipped: {error}");
        return;
    }
    for scenario in ["operations", "kill_9_on_another_host", "a_cable_is_pulled_and_put_back"] {
        let hosts = match Hosts::new() {
            Ok(hosts) => hosts,
            Err(missing) => {
                println!("skipped: {missing}");
                return;
            }
        };
        let output = on_host(&hosts.0, "a", scenario).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{scenario}: {text}");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// Depends on every byte and its place.
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte) + 1))
}

/// The other host's process. Each line says how many NICs it has (once), then an immediate and its count.
#[test]
#[ignore = "started by other tests"]
fn other_process() {
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let nics = lines.next().unwrap().parse().unwrap();
    let Some(builder) = builder(nics) else { return };
    let engine = builder.build().unwrap();
    let (handle, desc) = engine.alloc_mr(MEMORY).unwrap();
    println!("\nhere {} {}", hex(&engine.main_address().to_bytes()), hex(&desc.to_bytes()));
    engine.submit_recvs(1000, 2, |_, bytes| println!("\nmessage {}", hex(bytes))).unwrap();
    for line in lines {
        let (imm, count) = line.split_once(' ').unwrap();
        assert_eq!(expect_count(&engine, imm.parse().unwrap(), count.parse().unwrap()), Ok(()));
        let mut bytes = vec![0; MEMORY];
        handle.read(0, &mut bytes).unwrap();
        println!("\ndigest {}", digest(&bytes));
        std::io::stdout().flush().unwrap();
    }
}

struct Other {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Other {
    fn start(nics: usize) -> (Self, NetAddr, MrDesc) {
        let mut command = on_host(&std::env::var(NAME).unwrap(), "b", "other_process");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        writeln!(child.stdin.as_mut().unwrap(), "{nics}").unwrap();
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

    /// Waits there for a count and compares the memory with what it should be.
    fn check(&mut self, imm: u32, count: u64, right: &[u8]) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{imm} {count}").unwrap();
        assert_eq!(self.line("digest "), digest(right).to_string(), "immediate {imm}");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn filled(engine: &Engine) -> (MrHandle, Vec<u8>) {
    let (bytes, (handle, _)) = (noise(MEMORY, 3), engine.alloc_mr(MEMORY).unwrap());
    handle.write(0, &bytes).unwrap();
    (handle, bytes)
}

fn watched() -> Option<(Engine, Receiver<PeerEvent>)> {
    let (sender, events) = channel();
    let engine = builder(1)?.on_peer_event(move |event| sender.send(event).unwrap_or(())).build().unwrap();
    Some((engine, events))
}

#[test]
#[ignore = "started by between_hosts"]
fn operations() {
    let Some(builder) = builder(NICS) else { return };
    let engine = builder.build().unwrap();
    let ((src, bytes), (mut other, address, desc)) = (filled(&engine), Other::start(NICS));
    let (mut right, options) = (vec![0; MEMORY], within(LONG));
    for (index, len) in [0, 1, 65536, 3 << 20].into_iter().enumerate() {
        let write = |done| engine.submit_single_write(len, Some(1), (&src, 9), (&desc, 77), &options, done);
        assert_eq!(outcome(write), Ok(()), "{len}");
        right[77..77 + len as usize].copy_from_slice(&bytes[9..9 + len as usize]);
        other.check(1, index as u64 + 1, &right);
    }
    let (from, to): (Vec<u64>, Vec<u64>) = ((0..200).collect(), (0..200).map(|page| (page * 7) % 200).collect());
    for (from, to) in from.iter().zip(&to) {
        let (from, to) = (*from as usize * 1000 + 3, *to as usize * 1024);
        right[to..to + 1000].copy_from_slice(&bytes[from..from + 1000]);
    }
    let pages = (Pages { indices: &from, stride: 1000, offset: 3 }, Pages { indices: &to, stride: 1024, offset: 0 });
    let paged = |done| engine.submit_paged_writes(1000, Some(2), (&src, pages.0), (&desc, pages.1), &options, done);
    assert_eq!(outcome(paged), Ok(()));
    other.check(2, 1, &right);
    for number in 0..20_u8 {
        assert_eq!(outcome(|done| engine.submit_send(&address, &[number; 500], &options, done)), Ok(()));
        assert_eq!(other.line("message "), hex(&[number; 500]));
    }
    assert_eq!(outcome(|done| engine.submit_barrier(None, 3, &[&desc], &options, done)), Ok(()));
    other.check(3, 1, &right);
    // Both cables were used.
    let text = engine.metrics_text();
    for nic in 0..NICS {
        let line =
            text.lines().find(|line| line.starts_with(&format!("putget_transfer_write_bytes_total{{nic=\"{nic}\"")));
        assert!(line.unwrap().rsplit(' ').next().unwrap().parse::<u64>().unwrap() > 1 << 20, "{text}");
    }
}

#[test]
#[ignore = "started by between_hosts"]
fn kill_9_on_another_host() {
    let Some((engine, events)) = watched() else { return };
    let (src, _) = filled(&engine);
    for _ in 0..2 {
        let (other, address, desc) = Other::start(1);
        let write =
            || outcome(|done| engine.submit_single_write(1 << 20, Some(5), (&src, 0), (&desc, 0), &within(LONG), done));
        assert_eq!(write(), Ok(()));
        assert_eq!(events.recv_timeout(LONG).unwrap().down, None);
        drop(other);
        let event = events.recv_timeout(LONG).unwrap();
        assert_eq!(event.peer, address.name());
        assert!(matches!(event.down, Some(DownReason::HeartbeatLost | DownReason::NetworkLost)), "{event:?}");
        assert_eq!(write().unwrap_err().transfer_errors()[0].peer, address.name());
    }
}

#[test]
#[ignore = "started by between_hosts"]
fn a_cable_is_pulled_and_put_back() {
    let Some((engine, events)) = watched() else { return };
    let ((src, bytes), (mut other, address, desc)) = (filled(&engine), Other::start(1));
    let write = |deadline| {
        let (done, future) = Done::future();
        let options = Options { deadline: Some(deadline), nic: None };
        engine.submit_single_write(MEMORY as u64, Some(5), (&src, 0), (&desc, 0), &options, done).unwrap();
        future
    };
    assert_eq!(write(LONG).wait(LONG), Some(Ok(())));
    assert_eq!(events.recv_timeout(LONG).unwrap().down, None);
    pull(0, "down");
    let pulled = Instant::now();
    // Nothing says that it is gone: the heartbeat notices, and what is under way fails with the peer's name, in time.
    let error = write(Duration::from_secs(20)).wait(LONG).unwrap().unwrap_err();
    assert_eq!(error.transfer_errors()[0].peer, address.name(), "{error}");
    assert!(pulled.elapsed() < Duration::from_secs(15), "{:?}", pulled.elapsed());
    let event = events.recv_timeout(LONG).unwrap();
    assert_eq!(event.peer, address.name());
    assert!(matches!(event.down, Some(DownReason::HeartbeatLost | DownReason::NetworkLost)), "{event:?}");
    pull(0, "up");
    let end = Instant::now() + LONG;
    while write(Duration::from_secs(5)).wait(LONG).unwrap().is_err() {
        assert!(Instant::now() < end, "writes did not work again");
    }
    // How often the immediate got through before is not known; the bytes are.
    assert_eq!(outcome(|done| engine.submit_barrier(None, 6, &[&desc], &within(LONG), done)), Ok(()));
    other.check(6, 1, &bytes);
}
