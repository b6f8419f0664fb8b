//! Connections that do not come about: the error names the address, what the system says, and which side lacks what.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::net::TcpListener;
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::process::{MEMORY, Other, be_the_other, filled, read, role, serve};
use common::*;
use putget_transfer::{
    Builder, DeviceGroup, DownReason, Engine, NetAddr, NetworkError, Obstacle, Options, PeerEvent, Reason, Refusal,
    TransferError,
};

const NETWORKS: [&str; 2] = ["tcp", "host"];

fn on(network: &str) -> Builder {
    let group = if network == "tcp" { Network::Tcp.group(1) } else { DeviceGroup::host(1) };
    Engine::builder().group(group)
}

/// From now on this process may open few files more.
fn bound_files() {
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let last = files.map(|file| file.unwrap().file_name().to_str().unwrap().parse::<u64>().unwrap()).max().unwrap();
    let limit = libc::rlimit { rlim_cur: last, rlim_max: last };
    // SAFETY: the limit lives through the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

/// It has opened them.
fn use_up_files() {
    while let Ok(file) = std::fs::File::open("/dev/null") {
        std::mem::forget(file);
    }
}

/// Not a test of its own: the other process of the tests below.
#[test]
#[ignore = "started by other tests"]
fn other_process() {
    let Some(manner) = role() else { return };
    match manner.split_once(' ') {
        Some((network, "without files")) => {
            let engine = on(network).build().unwrap();
            let (handle, desc) = engine.alloc_mr(MEMORY).unwrap();
            bound_files();
            use_up_files();
            serve(&engine, &[desc], || vec![read(&handle, 0, MEMORY)]);
        }
        _ => be_the_other(on),
    }
}

/// The error of an operation that needs a connection to an address, and how long it took.
fn send(engine: &Engine, to: &NetAddr, deadline: Duration) -> (TransferError, Duration) {
    let begun = Instant::now();
    let error = failure(outcome(|done| engine.submit_send(to, b"words", &within(deadline), done)));
    assert!(!error.may_land, "{error}");
    (error, begun.elapsed())
}

/// The obstacle, and the address that the error names.
fn obstacle(error: &TransferError) -> (Obstacle, String) {
    match &error.reason {
        Reason::Network(NetworkError::NoConnection { address, why })
        | Reason::NotConnected(NetworkError::NoConnection { address, why }) => (why.clone(), address.clone()),
        reason => panic!("{reason:?}"),
    }
}

/// An address with another text in the place of its own, of the same length.
fn with_text(address: &NetAddr, own: &str, other: &str) -> NetAddr {
    assert_eq!(own.len(), other.len());
    let mut bytes = address.to_bytes();
    let at = bytes.windows(own.len()).position(|found| found == own.as_bytes()).unwrap();
    bytes[at..at + other.len()].copy_from_slice(other.as_bytes());
    NetAddr::from_bytes(&bytes).unwrap()
}

/// The text of a tcp address.
fn text(address: &NetAddr) -> String {
    let bytes = address.to_bytes();
    let at = bytes.windows(10).position(|found| found == b"127.0.0.1:").unwrap();
    let digits = bytes[at + 10..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    String::from_utf8(bytes[at..at + 10 + digits].to_vec()).unwrap()
}

#[test]
fn a_killed_peer_and_one_that_has_ended_refuse_soon() {
    for network in NETWORKS {
        let (sender, events) = channel();
        let notify = move |event: PeerEvent| sender.send(event).unwrap_or(());
        let engine = on(network).on_peer_event(notify).build().unwrap();
        let other = Other::start(network);
        let (killed, desc) = (other.address.clone(), other.desc.clone());
        let barrier = |done| engine.submit_barrier(None, 1, &[&desc], &within(LONG), done);
        assert_eq!(outcome(barrier), Ok(()));
        drop(other);
        let _ = events.recv_timeout(LONG).unwrap();
        let down = events.recv_timeout(LONG).unwrap().down;
        assert_eq!(down, Some(DownReason::NetworkLost));
        assert!(down.unwrap().to_string().contains("its process has ended"));
        let ended = on(network).build().unwrap();
        let left = ended.main_address();
        ended.close();
        for address in [killed, left] {
            let (error, took) = send(&engine, &address, LONG);
            let (why, place) = obstacle(&error);
            assert!(matches!(&why, Obstacle::Refused(words) if words.contains("refused")), "{error}");
            assert!(network != "tcp" || place == text(&address), "{error}");
            assert!(error.to_string().contains(&place) && took < Duration::from_secs(8), "{error} after {took:?}");
        }
    }
}

#[test]
fn an_address_of_nobody_is_an_error_at_once() {
    let (engine, other) = (on("tcp").build().unwrap(), on("tcp").build().unwrap());
    let own = text(&other.main_address());
    let nonsense = own.replacen("127", "x27", 1);
    let (error, _) = send(&engine, &with_text(&other.main_address(), &own, &nonsense), LONG);
    assert_eq!(obstacle(&error), (Obstacle::Address, nonsense));
    // The one beside it is reached all the same.
    let (_memory, desc) = other.alloc_mr(8).unwrap();
    let send = |done| engine.submit_barrier(None, 1, &[&desc], &Options::default(), done);
    assert_eq!(outcome(send), Ok(()));
}

/// Its kernel takes the connection, as that of a process which is stopped. Whether the operation's deadline or the set-up's time comes
/// first, the error says so.
#[test]
fn a_machine_without_an_engine_is_told_from_one_that_does_not_answer() {
    let (listener, other) = loop {
        // Both ports have as many digits.
        let found = (TcpListener::bind("127.0.0.1:0").unwrap(), on("tcp").build().unwrap());
        if found.0.local_addr().unwrap().to_string().len() == text(&found.1.main_address()).len() {
            break found;
        }
    };
    let silent = listener.local_addr().unwrap().to_string();
    let address = with_text(&other.main_address(), &text(&other.main_address()), &silent);
    let (whole, begun) = (Duration::from_millis(700), Instant::now());
    let engine = on("tcp").connect_timeout(whole).build().unwrap();
    for deadline in [Duration::from_millis(300), LONG] {
        let (error, _) = send(&engine, &address, deadline);
        assert_eq!(deadline == LONG, matches!(error.reason, Reason::Network(_)), "{error}");
        let (why, place) = obstacle(&error);
        // A busy machine begins late, and time without a turn of the engine does not count as waited.
        let least = if deadline == LONG { whole } else { Duration::ZERO };
        let right = |waited| waited >= least && waited <= begun.elapsed();
        assert!(matches!(why, Obstacle::Silent(waited) if right(waited)), "{error}");
        assert_eq!(place, silent);
        assert!(error.to_string().contains("timed out"), "{error}");
    }
    // A write, too.
    let (source, _) = filled(&engine, &[1; 8]);
    let desc = with_desc(&other, &text(&other.main_address()), &silent);
    let write = |done| {
        let ends = ((&source, 0), (&desc, 0));
        engine.submit_single_write(8, None, ends.0, ends.1, &within(Duration::from_millis(300)), done)
    };
    let error = failure(outcome(write));
    assert!(matches!((obstacle(&error).0, &error.reason), (Obstacle::Silent(_), Reason::NotConnected(_))), "{error}");
}

/// A descriptor with another address.
fn with_desc(engine: &Engine, own: &str, other: &str) -> putget_transfer::MrDesc {
    let mut bytes = engine.alloc_mr(8).unwrap().1.to_bytes();
    let at = bytes.windows(own.len()).position(|found| found == own.as_bytes()).unwrap();
    bytes[at..at + other.len()].copy_from_slice(other.as_bytes());
    putget_transfer::MrDesc::from_bytes(&bytes).unwrap()
}

#[test]
fn a_target_without_files_says_so() {
    for network in NETWORKS {
        let engine = on(network).build().unwrap();
        let other = Other::start(&format!("{network} without files"));
        for _ in 0..3 {
            let (error, _) = send(&engine, &other.address, LONG);
            assert_eq!(error.reason, Reason::Refused(Refusal::OutOfFiles), "{network}");
            assert!(error.to_string().contains("the target cannot accept: it has run out of file descriptors"));
        }
    }
}

/// Not a test of its own: a process that may open no more files, and needs a connection.
#[test]
#[ignore = "started by another test"]
fn process_without_files() {
    let pairs = NETWORKS.map(|network| (network, on(network).build().unwrap(), on(network).build().unwrap()));
    bound_files();
    for (network, engine, other) in &pairs {
        use_up_files();
        let (error, _) = send(engine, &other.main_address(), LONG);
        assert!(matches!(obstacle(&error).0, Obstacle::OutOfFiles(_)), "{network}, {error}");
        assert!(
            error.to_string().contains("this process has no file descriptors left (Too many open files"),
            "{error}"
        );
    }
}

#[test]
fn who_has_no_files_left_is_told_so() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let ran = command.args(["--exact", "process_without_files", "--ignored", "--nocapture"]).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}
