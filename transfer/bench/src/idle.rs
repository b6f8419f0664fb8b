//! The cost of an engine without work: processor time of both processes of a connected pair.

use std::time::{Duration, Instant};

use putget_transfer::{Done, Options};

use crate::target::Pair;
use crate::{Outcome, Plan};

const PATIENCE: Duration = Duration::from_secs(60);

/// Processor time that a process has used, in user and system mode.
fn used(process: u32) -> Outcome<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name of the program stands in brackets and may hold anything.
    let (_, fields) = stat.rsplit_once(')').ok_or("unknown form of /proc/PID/stat")?;
    let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<u64>).sum::<Result<u64, _>>()?;
    // Linux shows hundredths of a second.
    Ok(Duration::from_millis(10 * ticks))
}

/// Measures and prints.
pub fn run(plan: &Plan) -> Outcome<()> {
    let pair = Pair::start(plan)?;
    let (source, _) = pair.engine.alloc_mr(4096)?;
    let (done, over) = Done::future();
    pair.engine.submit_single_write(8, Some(1), (&source, 0), (&pair.desc, 0), &Options::default(), done)?;
    pair.engine.wait(&over, PATIENCE)?;
    let processes = [("writer", Some(std::process::id())), ("target", pair.process())];
    let processes = processes.into_iter().filter_map(|(role, process)| Some((role, process?)));
    let before: Vec<_> =
        processes.map(|(role, process)| Ok((role, process, used(process)?))).collect::<Outcome<_>>()?;
    let begin = Instant::now();
    std::thread::sleep(plan.time);
    for (role, process, before) in before {
        let share = (used(process)? - before).as_secs_f64() / begin.elapsed().as_secs_f64();
        println!("{} idle {role}: {:.1}% of a processor", plan.provider.name(), 100.0 * share);
    }
    Ok(())
}
