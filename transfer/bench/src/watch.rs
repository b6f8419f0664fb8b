//! How soon a changed word is seen, and what looking at it costs, by pace.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use putget_transfer::{DeviceGroup, Engine, SimNetwork};

use crate::Outcome;
use crate::threads::processor_times;

const PATIENCE: Duration = Duration::from_secs(60);
/// Milliseconds from one change of the word to the next: decode steps of a model.
const STEPS_MS: std::ops::RangeInclusive<u64> = 5..=30;

/// Processor time of this process's thread that watches, once the one before has left and this one has its name.
fn watching() -> Outcome<Duration> {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if let [time] = *processor_times("watcher")? {
            return Ok(time);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err("there is no thread that watches".into())
}

/// Measures each pace for so long, and prints. None: no pace.
pub fn run(paces_us: &[Option<u32>], time: Duration) -> Outcome<()> {
    println!("pace us   changes    p50 us    p99 us    max us  % of a processor");
    for pace_us in paces_us {
        let engine = Engine::builder().group(DeviceGroup::sim(&SimNetwork::new(1), 1)).build()?;
        let (sender, seen) = channel();
        let watcher = engine.alloc_uvm_watcher(move |_, new| {
            // Without a receiver the measurement is over.
            let _ = sender.send((new, Instant::now()));
        })?;
        watcher.set_pace(*pace_us)?;
        let mut latencies = Histogram::<u64>::new(3)?;
        let (begin, before) = (Instant::now(), watching()?);
        for value in 1.. {
            std::thread::sleep(Duration::from_millis(fastrand::u64(STEPS_MS)));
            let stored = Instant::now();
            watcher.store(value);
            let (new, told) = seen.recv_timeout(PATIENCE)?;
            if new != value {
                return Err(format!("{value} was stored and {new} told").into());
            }
            latencies.record(u64::try_from((told - stored).as_nanos())?)?;
            if begin.elapsed() > time {
                break;
            }
        }
        let share = 100.0 * (watching()? - before).as_secs_f64() / begin.elapsed().as_secs_f64();
        let pace = pace_us.map_or("none".into(), |pace_us| pace_us.to_string());
        let at = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
        let (count, p50, p99, max) = (latencies.len(), at(0.5), at(0.99), at(1.0));
        println!("{pace:>7} {count:9} {p50:9.1} {p99:9.1} {max:9.1} {share:17.2}");
    }
    Ok(())
}
