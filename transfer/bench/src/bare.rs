//! libfabric alone, measured with the same sizes: what the engine is compared with.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use putget_transfer::bare::{Bare, Target};

use crate::measure::{HEADER, PAGES, Row, Shape};
use crate::target::{hex, memory_len, unhex};
use crate::{Outcome, Plan, Provider};

struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn pieces(shape: Shape) -> Vec<(u64, u64, usize)> {
    let (_, len, count) = shape.parts();
    (0..count).map(|page| (2 * page * len, page * len, len as usize)).collect()
}

/// Measures every size.
pub fn all(plan: &Plan, show: &mut dyn FnMut(&str)) -> Outcome<Vec<Row>> {
    if plan.provider == Provider::Sim || plan.nics != 1 {
        return Err("--bare: a provider of libfabric with --nics 1 is needed".into());
    }
    let len = memory_len(plan.largest);
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["bare-target", plan.provider.name(), &plan.source, &len.to_string()]);
    let mut other = Other(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
    let mut line = String::new();
    if let Some(stdout) = &mut other.0.stdout {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    let mut words = line.split_whitespace();
    let mut word = || words.next().ok_or("the target process did not start");
    let target = Target { name: unhex(word()?)?, base: word()?.parse()?, key: word()?.parse()? };
    let source = plan.provider.sources(&plan.source, 1).first().copied().flatten();
    let mut bare = Bare::open(plan.provider.of_libfabric(), source, len)?;
    let mut noise = vec![0; len];
    fastrand::Rng::with_seed(1).fill(&mut noise);
    bare.fill(&noise)?;
    bare.connect(&target)?;
    show(HEADER);
    let mut rows = Vec::new();
    for shape in Shape::all(plan) {
        let ((kind, bytes, count), pieces) = (shape.parts(), pieces(shape));
        // A paged transfer carries one immediate, a single write its own.
        let imm = kind == "single";
        let window = if imm { plan.window } else { plan.window * PAGES as usize };
        let (writes, time) = bare.write(&target, &pieces, (imm, window), plan.time)?;
        let mut latencies = Histogram::<u64>::new(3)?;
        let end = Instant::now() + plan.time;
        while latencies.len() < 10 || (Instant::now() < end && latencies.len() < 10_000) {
            let (_, time) = bare.write(&target, &pieces, (imm, count as usize), Duration::from_nanos(1))?;
            latencies.record(u64::try_from(time.as_nanos())?)?;
        }
        let percentile = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
        let per_s = writes as f64 / time.as_secs_f64();
        let row = Row {
            kind,
            bytes,
            ops_per_s: per_s,
            gbit_per_s: per_s * bytes as f64 * 8e-9,
            p50_us: percentile(0.5),
            p90_us: percentile(0.9),
            p99_us: percentile(0.99),
            submit_us: 0.0,
        };
        show(&row.to_string());
        rows.push(row);
    }
    Ok(rows)
}

/// The other process: takes what comes until its input ends.
pub fn serve(provider: Provider, source: &str, len: usize) -> Outcome<()> {
    let source = provider.sources(source, 1).first().copied().flatten();
    let mut bare = Bare::open(provider.of_libfabric(), source, len)?;
    let Target { name, base, key } = bare.target()?;
    println!("{} {base} {key}", hex(&name));
    std::io::stdout().flush()?;
    let ended = Arc::new(AtomicBool::new(false));
    let end = Arc::clone(&ended);
    let waiting = std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        end.store(true, Ordering::Release);
    });
    bare.serve(|| ended.load(Ordering::Acquire))?;
    waiting.join().map_err(|_| "the thread that waits for the end failed")?;
    Ok(())
}
