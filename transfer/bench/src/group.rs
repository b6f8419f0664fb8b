//! Barrier and scatter in a group of many peers, and what each peer costs.

use std::time::{Duration, Instant};

use putget_transfer::{Done, Engine, MrDesc, MrHandle, NetAddr, Options, ScatterDst, SimNetwork};

use crate::target::build;
use crate::{Outcome, Provider};

const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes for each peer of a scatter.
const SHARE: u64 = 4096;

struct Member {
    engine: Engine,
    memory: MrHandle,
    desc: MrDesc,
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times.get(times.len() / 2).map_or(0.0, Duration::as_secs_f64) * 1e6
}

/// Measures and prints.
pub fn run(provider: Provider, source: &str, peers: usize, rounds: u32) -> Outcome<()> {
    let network = SimNetwork::new(1);
    let one = build(provider, &network, 1, source, false)?;
    let len = SHARE * peers as u64;
    let (memory, _) = one.alloc_mr(usize::try_from(len)?)?;
    let mut bytes = vec![0; usize::try_from(len)?];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    memory.write(0, &bytes)?;
    let members = (0..peers).map(|_| {
        let engine = build(provider, &network, 1, source, false)?;
        let (memory, desc) = engine.alloc_mr(SHARE as usize)?;
        Ok(Member { engine, memory, desc })
    });
    let members = members.collect::<Outcome<Vec<_>>>()?;
    let options = Options { deadline: Some(PATIENCE), ..Options::default() };
    let addresses: Vec<NetAddr> = members.iter().map(|member| member.engine.main_address()).collect();
    let begin = Instant::now();
    let (done, connected) = Done::future();
    let group = one.add_peer_group(&addresses, &options, done)?;
    one.wait(&connected, PATIENCE)?;
    let connecting = begin.elapsed().as_secs_f64() * 1e6;
    let descs: Vec<_> = members.iter().map(|member| &member.desc).collect();
    let parts: Vec<_> = (0..)
        .zip(&descs)
        .map(|(index, desc)| ScatterDst { len: SHARE, src_offset: index * SHARE, dst: (*desc, 0) })
        .collect();
    let (mut scatters, mut barriers) = (Vec::new(), Vec::new());
    for round in 1..=u64::from(rounds) {
        for (imm, times) in [(1, &mut scatters), (2, &mut barriers)] {
            let (done, over) = Done::future();
            let begin = Instant::now();
            match imm {
                1 => one.submit_scatter(Some(&group), Some(imm), &memory, &parts, &options, done)?,
                _ => one.submit_barrier(Some(&group), imm, &descs, &options, done)?,
            };
            one.wait(&over, PATIENCE)?;
            for member in &members {
                let (done, arrived) = Done::future();
                member.engine.expect_imm_count(imm, round, Some(PATIENCE), done)?;
                member.engine.wait(&arrived, PATIENCE)?;
            }
            times.push(begin.elapsed());
        }
    }
    for (member, right) in members.iter().zip(bytes.chunks_exact(SHARE as usize)) {
        let mut found = vec![0; SHARE as usize];
        member.memory.read(0, &mut found)?;
        if found != right || [1, 2].map(|imm| member.engine.imm_count(imm)) != [u64::from(rounds); 2] {
            return Err("wrong bytes or counts at a peer".into());
        }
    }
    println!("{} group of {peers} peers: connected in {connecting:.0} us", provider.name());
    for (what, time) in [("scatter of 4 KiB each", median(scatters)), ("barrier", median(barriers))] {
        println!("{} {what}: {time:.0} us until all know, {:.2} us a peer", provider.name(), time / peers as f64);
    }
    Ok(())
}
