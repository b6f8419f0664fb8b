//! An engine in another process, started by a test and told what to do line by line.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use putget_transfer::{Builder, MrDesc, MrHandle, NetAddr};

use super::expect_count;

/// Bytes that the other process registers.
pub const MEMORY: usize = 6 << 20;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// Depends on every byte and its place.
pub fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte) + 1))
}

pub fn read(handle: &MrHandle, start: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    handle.read(start, &mut bytes).unwrap();
    bytes
}

/// Says that a process is the other one.
const ROLE: &str = "PUTGET_TRANSFER_TEST_OTHER";

/// The other process: registers memory, takes messages, and answers each line, an immediate and its count, with a digest of the
/// memory that they came after. Not told to be the other process, it does nothing.
pub fn be_the_other(builder: impl FnOnce() -> Builder) {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let engine = builder().build().unwrap();
    let (handle, desc) = engine.alloc_mr(MEMORY).unwrap();
    println!("\nhere {} {}", hex(&engine.main_address().to_bytes()), hex(&desc.to_bytes()));
    std::io::stdout().flush().unwrap();
    engine.submit_recvs(1000, 2, |_, bytes| println!("\nmessage {}", hex(bytes))).unwrap();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (imm, count) = line.split_once(' ').unwrap();
        assert_eq!(expect_count(&engine, imm.parse().unwrap(), count.parse().unwrap()), Ok(()));
        println!("\ndigest {}", digest(&read(&handle, 0, MEMORY)));
        std::io::stdout().flush().unwrap();
    }
}

pub struct Other {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    pub address: NetAddr,
    pub desc: MrDesc,
}

impl Other {
    /// Starts this program's test `other_process`, which calls `be_the_other`.
    pub fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "other_process", "--ignored", "--nocapture"]).env(ROLE, "yes");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let found = line(&mut lines, "here ");
        let (address, desc) = found.split_once(' ').unwrap();
        let address = NetAddr::from_bytes(&unhex(address)).unwrap();
        let desc = MrDesc::from_bytes(&unhex(desc)).unwrap();
        Self { child, lines, address, desc }
    }

    /// Waits there for a count and compares the memory with what it should be.
    pub fn check(&mut self, imm: u32, count: u64, right: &[u8]) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{imm} {count}").unwrap();
        assert_eq!(line(&mut self.lines, "digest "), digest(right).to_string(), "immediate {imm}");
    }

    /// The next message that it has received.
    pub fn message(&mut self) -> Vec<u8> {
        unhex(&line(&mut self.lines, "message "))
    }

    /// Sends it a signal, by its name.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
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
