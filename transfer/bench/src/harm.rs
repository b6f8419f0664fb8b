//! The time of shutting a peer out, and the cost of a stranger's flood of greetings for peers that have proved themselves.

use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use putget_transfer::{Done, Engine, MrDesc, MrHandle, NetAddr, Options, SimNetwork};

use crate::target::build;
use crate::threads::processor_times;
use crate::{Outcome, Provider};

const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a write while fences and floods are measured.
const LEN: u64 = 64 << 10;
/// Writes under way when a fence begins.
const WINDOW: usize = 4;

struct Pair {
    from: Engine,
    to: Engine,
    source: MrHandle,
    _target: MrHandle,
    desc: MrDesc,
}

impl Pair {
    fn build(provider: Provider, source: &str) -> Outcome<Self> {
        let network = SimNetwork::new(1);
        let (from, to) = (build(provider, &network, 1, source, false)?, build(provider, &network, 1, source, false)?);
        let ((source, _), (target, desc)) = (from.alloc_mr(LEN as usize)?, to.alloc_mr(LEN as usize)?);
        let pair = Self { from, to, source, _target: target, desc };
        pair.write()?;
        Ok(pair)
    }

    fn begin(&self) -> Outcome<putget_transfer::TransferFuture> {
        let (done, future) = Done::future();
        let (source, target) = ((&self.source, 0), (&self.desc, 0));
        self.from.submit_single_write(LEN, Some(1), source, target, &Options::default(), done)?;
        Ok(future)
    }

    fn write(&self) -> Outcome<()> {
        Ok(self.from.wait(&self.begin()?, PATIENCE)?)
    }

    /// Writes for so long and returns how many in a second.
    fn rate(&self, time: Duration) -> Outcome<f64> {
        let (begin, mut writes) = (Instant::now(), 0);
        while begin.elapsed() < time {
            let futures = (0..WINDOW).map(|_| self.begin()).collect::<Outcome<Vec<_>>>()?;
            futures.iter().try_for_each(|future| self.from.wait(future, PATIENCE))?;
            writes += futures.len();
        }
        Ok(writes as f64 / begin.elapsed().as_secs_f64())
    }
}

/// Measures and prints how long a fence takes with writes under way.
pub fn fence(provider: Provider, source: &str, rounds: u32) -> Outcome<()> {
    let pair = Pair::build(provider, source)?;
    let (address, mut times) = (pair.from.main_address(), Histogram::<u64>::new(3)?);
    for _ in 0..rounds {
        let under_way = (0..WINDOW).map(|_| pair.begin()).collect::<Outcome<Vec<_>>>()?;
        let (done, fenced) = Done::future();
        let begin = Instant::now();
        pair.to.fence(&address, done)?;
        pair.to.wait(&fenced, PATIENCE)?;
        times.record(u64::try_from(begin.elapsed().as_nanos())?)?;
        // They end, well or not; the next round's connect anew, once the writer is admitted.
        under_way.iter().for_each(|future| drop(pair.from.wait(future, PATIENCE)));
        pair.to.admit(&address)?;
        let end = Instant::now() + PATIENCE;
        while pair.write().is_err() {
            if Instant::now() > end {
                return Err("the fenced peer did not come back".into());
            }
        }
    }
    let at = |quantile| times.value_at_quantile(quantile) as f64 / 1e3;
    let name = provider.name();
    println!("{name} fence with {WINDOW} writes of 64 KiB under way: p50 {:.1} us, p99 {:.1} us", at(0.5), at(0.99));
    Ok(())
}

/// The endpoint of a NIC of tcp, its engine and its group, as its address has them.
fn victim(address: &NetAddr) -> Outcome<(String, Vec<u8>)> {
    // "PTNA", version, ways, provider, engine (8), group (2), NIC, length (2), endpoint: docs/transfer/wire_format.md.
    let bytes = address.to_bytes();
    let key = bytes.get(7..17).ok_or("a short address")?.to_vec();
    Ok((String::from_utf8(bytes.get(20..).ok_or("a short address")?.to_vec())?, key))
}

/// A Hello of an engine that does not exist.
fn hello(to: &[u8], number: u64) -> Vec<u8> {
    let mut frame = b"pt\x02\x01".to_vec();
    frame.extend(0_u64.to_le_bytes());
    frame.extend(to);
    // Session, nonce, heartbeat timeout, one NIC: tcp, engine, group 0, NIC 0, its endpoint.
    frame.extend((number + 1).to_le_bytes());
    frame.extend([7; 16]);
    frame.extend(5000_u32.to_le_bytes());
    frame.extend([1, 6]);
    frame.extend(number.to_le_bytes());
    frame.extend([0, 0, 0]);
    let endpoint = b"127.0.0.1:9";
    frame.extend((endpoint.len() as u16).to_le_bytes());
    frame.extend(endpoint);
    let mut message = (frame.len() as u16).to_le_bytes().to_vec();
    message.extend(frame);
    message
}

/// Sends Hellos at a rate until told to stop, over connections of 1000 each, and counts them.
fn flood(address: &NetAddr, rate: f64, stop: &AtomicBool, sent: &AtomicU64) -> Outcome<()> {
    let (endpoint, key) = victim(address)?;
    let (begin, mut number) = (Instant::now(), 0_u64);
    let mut way: Option<TcpStream> = None;
    while !stop.load(Ordering::Acquire) {
        if number as f64 > begin.elapsed().as_secs_f64() * rate {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        if way.is_none() || number % 1000 == 0 {
            let mut made = TcpStream::connect(&endpoint)?;
            made.set_nonblocking(true)?;
            made.write_all(&[b'p', b'c', 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])?;
            way = Some(made);
        }
        number += 1;
        let message = hello(&key, number);
        // A stranger that is not listened to goes on over another connection.
        if way.as_mut().is_some_and(|way| way.write_all(&message).is_err()) {
            way = None;
        }
        sent.store(number, Ordering::Relaxed);
    }
    Ok(())
}

/// The rate of writes while somebody else is flooded, or the target itself.
fn rate_beside(pair: &Pair, victim: &Engine, rate: f64, time: Duration) -> Outcome<f64> {
    let address = victim.main_address();
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let flooded = std::thread::scope(|scope| -> Outcome<f64> {
        let stranger = scope.spawn(|| flood(&address, rate, &stop, &sent).map_err(|error| error.to_string()));
        let flooded = pair.rate(time);
        stop.store(true, Ordering::Release);
        stranger.join().map_err(|_| "the stranger failed")??;
        flooded
    })?;
    let flow = sent.load(Ordering::Relaxed) as f64 / time.as_secs_f64();
    if flow < 0.9 * rate {
        return Err(format!("the stranger sent {flow:.0} Hellos/s only").into());
    }
    Ok(flooded)
}

/// Time on a processor of all engines' threads.
fn of_engines() -> Outcome<Duration> {
    Ok(processor_times("pt-worker")?.into_iter().sum())
}

/// Prints what a Hello costs the engines' threads that have nothing else to do.
fn cost_of_hello(victim: &Engine, rate: f64, time: Duration) -> Outcome<()> {
    let before = of_engines()?;
    std::thread::sleep(time);
    let idle = of_engines()?;
    let (address, stop, sent) = (victim.main_address(), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| -> Outcome<()> {
        let stranger = scope.spawn(|| flood(&address, rate, &stop, &sent).map_err(|error| error.to_string()));
        std::thread::sleep(time);
        stop.store(true, Ordering::Release);
        Ok(stranger.join().map_err(|_| "the stranger failed")??)
    })?;
    let (flooded, hellos) = (of_engines()?, sent.load(Ordering::Relaxed));
    let (rest, all) = (idle - before, flooded - idle);
    let each = all.saturating_sub(rest).as_secs_f64() * 1e6 / hellos as f64;
    let share = all.as_secs_f64() / time.as_secs_f64() * 100.0;
    println!(
        "{hellos} Hellos without other work: {each:.2} us of the engine's thread each, {share:.1}% of a processor"
    );
    Ok(())
}

/// Measures and prints the rate of a proved peer over tcp, by turns: alone, beside a flood of another engine, which takes as much of the
/// processors, and under a flood of its own target.
pub fn flooded(source: &str, rate: f64, time: Duration, rounds: u32) -> Outcome<()> {
    let pair = Pair::build(Provider::Tcp, source)?;
    let other = build(Provider::Tcp, &SimNetwork::new(1), 1, source, false)?;
    let (mut of_alone, mut of_beside) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let alone = pair.rate(time)?;
        let beside = rate_beside(&pair, &other, rate, time)?;
        let under = rate_beside(&pair, &pair.to, rate, time)?;
        println!("writes/s: alone {alone:.0}, beside a flooded engine {beside:.0}, flooded {under:.0}");
        of_alone.push(under / alone);
        of_beside.push(under / beside);
    }
    for (what, mut shares) in [("alone", of_alone), ("beside a flooded engine", of_beside)] {
        shares.sort_by(f64::total_cmp);
        println!("flooded over {what}: median {:.3}", shares.get(shares.len() / 2).copied().unwrap_or(0.0));
    }
    cost_of_hello(&other, rate, time)?;
    let metrics = pair.to.metrics_text();
    let dropped = metrics.lines().find(|line| line.starts_with("putget_transfer_greetings_dropped_total"));
    println!("{}", dropped.unwrap_or_default());
    Ok(())
}
