//! The side that is written to: in this process for the simulated network, in one of its own over libfabric.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use putget_transfer::{DeviceGroup, Done, Engine, MrDesc, MrHandle, NetAddr, Options, SimNetwork};

use crate::{Outcome, Plan, Provider};

const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of the question and of the answer about the target's memory.
const WORD: usize = 8;

/// Depends on every byte and its place.
pub fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte) + 1))
}

pub fn build(provider: Provider, network: &SimNetwork, nics: u8, source: &str, busy_poll: bool) -> Outcome<Engine> {
    let nics = usize::from(nics);
    let group = match provider {
        Provider::Sim => DeviceGroup::sim(network, nics),
        fabric => DeviceGroup::libfabric(fabric.name(), &fabric.sources(source, nics)),
    };
    Ok(Engine::builder().group(group).busy_poll(busy_poll).build()?)
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Outcome<Vec<u8>> {
    let digits = |pair: &[u8]| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?);
    text.as_bytes().chunks(2).map(digits).collect()
}

/// Both sides, as the measuring one sees them.
pub struct Pair {
    pub engine: Engine,
    pub desc: MrDesc,
    peer: NetAddr,
    answers: Receiver<u64>,
    /// The target of the simulated network; the other process answers by itself.
    local: Option<(Engine, MrHandle)>,
    child: Option<Child>,
}

impl Pair {
    pub fn start(plan: &Plan) -> Outcome<Self> {
        let network = SimNetwork::new(1);
        let engine = build(plan.provider, &network, plan.nics, &plan.source, plan.busy_poll)?;
        let (sender, answers) = channel();
        engine.submit_recvs(WORD, 4, move |_, bytes| {
            if let Ok(word) = bytes.try_into() {
                // Without a receiver the measurement is over.
                let _ = sender.send(u64::from_le_bytes(word));
            }
        })?;
        if plan.provider == Provider::Sim {
            let other = build(plan.provider, &network, plan.nics, &plan.source, plan.busy_poll)?;
            let (memory, desc) = other.alloc_mr(memory_len(plan.largest))?;
            let peer = other.main_address();
            return Ok(Self { engine, desc, peer, answers, local: Some((other, memory)), child: None });
        }
        let mut command = Command::new(std::env::current_exe()?);
        let (nics, busy_poll) = (plan.nics.to_string(), plan.busy_poll.to_string());
        command.args(["target", plan.provider.name(), &nics, &plan.source, &busy_poll]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        if let Some(stdin) = &mut child.stdin {
            writeln!(stdin, "{} {}", memory_len(plan.largest), hex(&engine.main_address().to_bytes()))?;
        }
        let mut line = String::new();
        if let Some(stdout) = &mut child.stdout {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let (address, desc) = line.trim().split_once(' ').ok_or("the target process did not start")?;
        let (peer, desc) = (NetAddr::from_bytes(&unhex(address)?)?, MrDesc::from_bytes(&unhex(desc)?)?);
        Ok(Self { engine, desc, peer, answers, local: None, child: Some(child) })
    }

    /// The target's process, if it is not this one.
    pub fn process(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// The digest of the first `len` bytes of the target.
    pub fn digest(&self, len: u64) -> Outcome<u64> {
        if let Some((_, memory)) = &self.local {
            return digest_of(memory, len);
        }
        let (done, sent) = Done::future();
        self.engine.submit_send(&self.peer, &len.to_le_bytes(), &Options::default(), done)?;
        self.engine.wait(&sent, PATIENCE)?;
        Ok(self.answers.recv_timeout(PATIENCE)?)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // The end of its input ends it.
            drop(child.stdin.take());
            let _ = child.wait();
        }
    }
}

fn digest_of(memory: &MrHandle, len: u64) -> Outcome<u64> {
    let mut bytes = vec![0; usize::try_from(len)?];
    memory.read(0, &mut bytes)?;
    Ok(digest(&bytes))
}

/// Room for the largest write and for the pages of the paged ones.
pub fn memory_len(largest: u64) -> usize {
    largest.max(32 << 20) as usize
}

/// The other process: says where its memory is, and answers questions about it until its input ends.
pub fn serve(provider: Provider, nics: u8, source: &str, busy_poll: bool) -> Outcome<()> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let (len, asker) = line.trim().split_once(' ').ok_or("no length and address came")?;
    let asker = NetAddr::from_bytes(&unhex(asker)?)?;
    let engine = build(provider, &SimNetwork::new(1), nics, source, busy_poll)?;
    let (memory, desc) = engine.alloc_mr(len.parse()?)?;
    let (answering, questioned) = (engine.clone(), memory.clone());
    engine.submit_recvs(WORD, 4, move |_, bytes| {
        let len = bytes.try_into().map(u64::from_le_bytes);
        if let Some(answer) = len.ok().and_then(|len| digest_of(&questioned, len).ok()) {
            // An asker that has gone needs no answer.
            let _ = answering.submit_send(&asker, &answer.to_le_bytes(), &Options::default(), Done::ignore());
        }
    })?;
    println!("{} {}", hex(&engine.main_address().to_bytes()), hex(&desc.to_bytes()));
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    engine.close();
    Ok(())
}
