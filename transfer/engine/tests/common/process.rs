//! An engine in another process, started by a test and told what to do line by line.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use putget_transfer::{Builder, Done, DownReason, Engine, Flag, MrDesc, MrHandle, NetAddr, Pages, PeerEvent};

use super::{expect_count, noise, outcome, within};

/// Bytes that the other process registers.
pub const MEMORY: usize = 6 << 20;

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// Depends on every byte and its place.
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte) + 1))
}

fn digests<'a>(memories: impl Iterator<Item = &'a [u8]>) -> String {
    memories.map(|bytes| digest(bytes).to_string()).collect::<Vec<_>>().join(" ")
}

pub fn read(handle: &MrHandle, start: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    handle.read(start, &mut bytes).unwrap();
    bytes
}

pub fn filled(engine: &Engine, bytes: &[u8]) -> (MrHandle, MrDesc) {
    let (handle, desc) = engine.alloc_mr(bytes.len()).unwrap();
    handle.write(0, bytes).unwrap();
    (handle, desc)
}

/// Says that a process is the other one, and what it is to be.
const ROLE: &str = "PUTGET_TRANSFER_TEST_OTHER";

/// The role of the other process; None in a process that is not it.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// The other process, with host memory. Not told to be the other process, it does nothing.
pub fn be_the_other(builder: impl FnOnce(&str) -> Builder) {
    let Some(role) = role() else { return };
    let engine = builder(&role).build().unwrap();
    let (handle, desc) = engine.alloc_mr(MEMORY).unwrap();
    serve(&engine, &[desc], || vec![read(&handle, 0, MEMORY)]);
}

/// Says who and where this process is.
pub fn introduce(engine: &Engine, descs: &[MrDesc]) {
    let all = std::iter::once(engine.main_address().to_bytes()).chain(descs.iter().map(MrDesc::to_bytes));
    println!("\nhere {}", all.map(|bytes| hex(&bytes)).collect::<Vec<_>>().join(" "));
    std::io::stdout().flush().unwrap();
}

/// Takes messages, and answers each line, an immediate and its count, with digests of what `look` finds in the memories after
/// they have come.
pub fn serve(engine: &Engine, descs: &[MrDesc], look: impl Fn() -> Vec<Vec<u8>>) {
    introduce(engine, descs);
    engine.submit_recvs(1000, 2, |_, bytes| println!("\nmessage {}", hex(bytes))).unwrap();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (imm, count) = line.split_once(' ').unwrap();
        assert_eq!(expect_count(engine, imm.parse().unwrap(), count.parse().unwrap()), Ok(()));
        println!("\ndigest {}", digests(look().iter().map(Vec::as_slice)));
        std::io::stdout().flush().unwrap();
    }
}

pub struct Other {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    pub address: NetAddr,
    /// Its memories, and the first of them.
    pub descs: Vec<MrDesc>,
    pub desc: MrDesc,
}

impl Other {
    /// Starts this program's test `other_process`, which calls `be_the_other`.
    pub fn start(role: &str) -> Self {
        Self::start_by(Command::new(std::env::current_exe().unwrap()), role)
    }

    /// The same by a command that this program's path is part of.
    pub fn start_by(mut command: Command, role: &str) -> Self {
        command.args(["--exact", "other_process", "--ignored", "--nocapture"]).env(ROLE, role);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let found: Vec<_> = line(&mut lines, "here ").split(' ').map(unhex).collect();
        let descs: Vec<_> = found[1..].iter().map(|bytes| MrDesc::from_bytes(bytes).unwrap()).collect();
        let (address, desc) = (NetAddr::from_bytes(&found[0]).unwrap(), descs[0].clone());
        Self { child, lines, address, descs, desc }
    }

    /// Waits there for a count and compares the memory with what it should be.
    pub fn check(&mut self, imm: u32, count: u64, right: &[u8]) {
        self.check_all(imm, count, &[right]);
    }

    /// The same with several memories.
    pub fn check_all(&mut self, imm: u32, count: u64, right: &[&[u8]]) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{imm} {count}").unwrap();
        assert_eq!(line(&mut self.lines, "digest "), digests(right.iter().copied()), "immediate {imm}");
    }

    /// The next message that it has received.
    pub fn message(&mut self) -> Vec<u8> {
        unhex(&line(&mut self.lines, "message "))
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Tells it something that it does not answer.
    pub fn tell(&mut self, words: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{words}").unwrap();
    }

    /// Sends it a signal, by its name.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }

    /// Stops it, and waits until it stands still: its threads stop one after the other.
    pub fn stop(&self) {
        self.signal("STOP");
        super::eventually("it stands still", || is_stopped(self.process()));
    }

    /// Checks that it was noticed that this process is gone.
    pub fn was_lost(address: &NetAddr, event: PeerEvent) {
        assert_eq!(event.peer, address.name());
        assert!(matches!(event.down, Some(DownReason::HeartbeatLost | DownReason::NetworkLost)), "{event:?}");
    }
}

fn line(lines: &mut Lines<BufReader<ChildStdout>>, start: &str) -> String {
    loop {
        let line = lines.next().expect("the other process ended").unwrap();
        if let Some(rest) = line.strip_prefix(start) {
            return rest.to_owned();
        }
    }
}

impl Drop for Other {
    /// Nobody says goodbye.
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Says whether every thread of a process is stopped.
fn is_stopped(process: u32) -> bool {
    let state = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    threads
        .map(|thread| state(thread.unwrap()))
        .all(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')))
}

/// Processor time that a process has used, in hundredths of a second.
pub fn processor_time(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
    fields.skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

/// Pages of 1000 bytes that a paged write moves: the place of each in the source and in the target.
pub fn scattered_pages() -> (Vec<u64>, Vec<u64>) {
    ((0..200).collect(), (0..200).map(|page| (page * 7) % 200).collect())
}

/// Writes such pages into what the target should have.
pub fn move_pages(source: &[u8], target: &mut [u8]) {
    let (from, to) = scattered_pages();
    for (from, to) in from.iter().zip(&to) {
        let (from, to) = (*from as usize * 1000 + 3, *to as usize * 1024);
        target[to..to + 1000].copy_from_slice(&source[from..from + 1000]);
    }
}

/// Has an engine do everything that there is to a fresh process with host memory, and every byte compared there.
pub fn all_operations(engine: &Engine, other: &mut Other) {
    let bytes = noise(MEMORY, 3);
    let ((src, _), mut right) = (filled(engine, &bytes), vec![0; MEMORY]);
    let (options, desc, address) = (within(super::LONG), other.desc.clone(), other.address.clone());
    for (index, len) in [0, 1, 100, 65536, 5 << 20].into_iter().enumerate() {
        let write = |done| engine.submit_single_write(len, Some(1), (&src, 9), (&desc, 77), &options, done);
        assert_eq!(outcome(write), Ok(()), "{len}");
        right[77..77 + len as usize].copy_from_slice(&bytes[9..9 + len as usize]);
        other.check(1, index as u64 + 1, &right);
    }
    let (from, to) = scattered_pages();
    let pages = (Pages { indices: &from, stride: 1000, offset: 3 }, Pages { indices: &to, stride: 1024, offset: 0 });
    let paged = |done| engine.submit_paged_writes(1000, Some(2), (&src, pages.0), (&desc, pages.1), &options, done);
    assert_eq!(outcome(paged), Ok(()));
    move_pages(&bytes, &mut right);
    other.check(2, 1, &right);
    // Short and long writes under way at a time, which some networks treat in different ways.
    let (mut random, flag, mut place) = (fastrand::Rng::with_seed(6), Flag::new(), 0);
    for _ in 0..150 {
        let len = 1 << random.u32(0..16);
        let len = random.usize(len / 2..=len);
        let ends = ((&src, place as u64), (&desc, place as u64));
        engine.submit_single_write(len as u64, Some(4), ends.0, ends.1, &options, Done::flag(&flag)).unwrap();
        right[place..place + len].copy_from_slice(&bytes[place..place + len]);
        place += len;
    }
    super::eventually("all are over", || flag.pending() == 0);
    assert_eq!(flag.failed(), 0);
    other.check(4, 150, &right);
    for number in 0..20_u8 {
        assert_eq!(outcome(|done| engine.submit_send(&address, &[number; 500], &options, done)), Ok(()));
        assert_eq!(other.message(), [number; 500]);
    }
    assert_eq!(outcome(|done| engine.submit_barrier(None, 3, &[&desc], &options, done)), Ok(()));
    other.check(3, 1, &right);
}
