//! Several hosts, as network namespaces with a cable (veth) for each NIC: libfabric's tcp between them, a peer that is killed, a
//! cable that is pulled and put back.
//!
//! Needs root, iproute2, namespaces and libfabric; where one is missing it says which and ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::process::{MEMORY, Other, all_operations, be_the_other, filled};
use common::*;
use putget_transfer::{Builder, DeviceGroup, Done, Engine, Error, Options, PeerEvent, Readmit};

/// Which host a process is on ("a" or "b"), and what both are called.
const HOST: &str = "PUTGET_TRANSFER_TEST_HOST";
const NAME: &str = "PUTGET_TRANSFER_TEST_HOSTS";
const NICS: usize = 2;

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

/// This program, on one of the hosts.
fn on_host(name: &str, host: &str) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &format!("{name}{host}")]).arg(std::env::current_exe().unwrap());
    command.env(HOST, host).env(NAME, name);
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
    // A pulled cable loses the peer on both sides; they come back by themselves.
    Some(impatient.connect_timeout(Duration::from_secs(2)).grace(Duration::from_millis(500)).readmit(Readmit::Lost))
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
        let mut command = on_host(&hosts.0, "a");
        let output = command.args(["--exact", scenario, "--ignored", "--nocapture"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{scenario}: {text}");
    }
}

/// The other host's process; its role is how many NICs it has.
#[test]
#[ignore = "started by other tests"]
fn other_process() {
    be_the_other(|nics| builder(nics.parse().unwrap()).unwrap());
}

fn other(nics: usize) -> Other {
    Other::start_by(on_host(&std::env::var(NAME).unwrap(), "b"), &nics.to_string())
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
    all_operations(&engine, &mut other(NICS));
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
    let (src, _) = filled(&engine, &noise(MEMORY, 3));
    for _ in 0..2 {
        let other = other(1);
        let (address, desc) = (other.address.clone(), other.desc.clone());
        let write =
            || outcome(|done| engine.submit_single_write(1 << 20, Some(5), (&src, 0), (&desc, 0), &within(LONG), done));
        assert_eq!(write(), Ok(()));
        assert_eq!(events.recv_timeout(LONG).unwrap().down, None);
        drop(other);
        Other::was_lost(&address, events.recv_timeout(LONG).unwrap());
        assert_eq!(write().unwrap_err().transfer_errors()[0].peer, address.name());
    }
}

#[test]
#[ignore = "started by between_hosts"]
fn a_cable_is_pulled_and_put_back() {
    let Some((engine, events)) = watched() else { return };
    let (bytes, mut other) = (noise(MEMORY, 3), other(1));
    let ((src, _), address, desc) = (filled(&engine, &bytes), other.address.clone(), other.desc.clone());
    let write = |deadline| {
        let (done, future) = Done::future();
        let options = Options { deadline: Some(deadline), ..Options::default() };
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
    Other::was_lost(&address, events.recv_timeout(LONG).unwrap());
    pull(0, "up");
    let end = Instant::now() + LONG;
    while write(Duration::from_secs(5)).wait(LONG).unwrap().is_err() {
        assert!(Instant::now() < end, "writes did not work again");
    }
    // How often the immediate got through before is not known; the bytes are.
    assert_eq!(outcome(|done| engine.submit_barrier(None, 6, &[&desc], &within(LONG), done)), Ok(()));
    other.check(6, 1, &bytes);
}
