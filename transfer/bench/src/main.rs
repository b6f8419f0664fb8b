//! `putget-transfer bench`: rates and latencies of one-sided writes, over the simulated network, TCP, shared memory and libfabric.
//!
//! Except in the simulated network the target is another process, which this program starts. Every size is checked byte by byte before it is
//! timed.

mod bare;
mod group;
mod harm;
mod idle;
mod measure;
mod notify;
mod plot;
mod target;
mod threads;
mod watch;

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};

use measure::Row;

type Outcome<T> = Result<T, Box<dyn Error>>;

#[derive(Parser)]
#[command(name = "putget-transfer", about = "Measures the transfer engine")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure single writes of 64 KiB to 32 MiB and paged writes of 1 to 64 KiB
    Bench {
        #[arg(long, value_enum)]
        provider: Provider,
        /// NICs of each side; over tcp all of them at --source
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
        nics: u8,
        /// Address of the NIC, for tcp
        #[arg(long, default_value = "127.0.0.1")]
        source: String,
        /// Seconds for each size
        #[arg(long, default_value_t = 1.0)]
        seconds: f64,
        /// Smallest single write in bytes; the next ones are twice as long each
        #[arg(long, default_value_t = 64 << 10, value_parser = clap::value_parser!(u64).range(1..))]
        smallest: u64,
        /// Largest single write in bytes
        #[arg(long, default_value_t = 32 << 20)]
        largest: u64,
        /// Only these of the sizes, in bytes, such as 65536,131072
        #[arg(long, value_delimiter = ',')]
        sizes: Vec<u64>,
        /// Writes under way at a time while the rate is measured
        #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
        window: u16,
        /// Keep the workers polling instead of letting them sleep
        #[arg(long = "busy_poll")]
        busy_poll: bool,
        /// How the end of a write is told while the latency is measured
        #[arg(long, value_enum, default_value_t = Told::Future)]
        told: Told,
        /// Measure libfabric alone instead, without the engine: one loop that writes and one that takes
        #[arg(long)]
        bare: bool,
        /// Write the rows as JSON too
        #[arg(long = "output_file")]
        output_file: Option<PathBuf>,
        /// Draw rate over size as SVG
        #[arg(long)]
        plot: Option<PathBuf>,
    },
    /// Measure what the engine itself costs a write, and how soon a target knows of one (sim, tcp, net and host, in one process)
    Notify {
        #[arg(long, value_enum)]
        provider: Provider,
        #[arg(long, default_value = "127.0.0.1")]
        source: String,
        #[arg(long, default_value_t = 5000)]
        count: u32,
        /// Keep the workers polling instead of letting them sleep
        #[arg(long = "busy_poll")]
        busy_poll: bool,
        /// Write to the engine's own memory: one worker, and nobody who contends with it
        #[arg(long)]
        own: bool,
    },
    /// Measure what two connected engines without work cost
    Idle {
        #[arg(long, value_enum)]
        provider: Provider,
        #[arg(long, default_value = "127.0.0.1")]
        source: String,
        #[arg(long, default_value_t = 5.0)]
        seconds: f64,
    },
    /// Measure how soon a word that changes every 5 to 30 ms is seen, and what looking at it costs
    Watch {
        /// Paces of a hot word in microseconds; a word without a pace is measured too
        #[arg(long = "pace_us", value_delimiter = ',', default_values_t = [0, 2, 5, 10, 20, 50, 100])]
        pace_us: Vec<u32>,
        /// Seconds for each pace
        #[arg(long, default_value_t = 5.0)]
        seconds: f64,
    },
    /// Measure barrier and scatter in a group of many peers (sim, tcp, net and host, in one process)
    Group {
        #[arg(long, value_enum)]
        provider: Provider,
        #[arg(long, default_value = "127.0.0.1")]
        source: String,
        #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=256))]
        peers: u16,
        #[arg(long, default_value_t = 200)]
        rounds: u32,
    },
    /// Measure how long a fence takes with writes under way (sim, tcp, net and host, in one process)
    Fence {
        #[arg(long, value_enum)]
        provider: Provider,
        #[arg(long, default_value = "127.0.0.1")]
        source: String,
        #[arg(long, default_value_t = 500)]
        rounds: u32,
    },
    /// Measure what a stranger's flood of Hellos costs a peer that has proved itself (tcp, in one process)
    Flood {
        #[arg(long, default_value = "127.0.0.1")]
        source: String,
        /// Hellos a second
        #[arg(long, default_value_t = 10_000.0)]
        rate: f64,
        /// Seconds of each half of a round
        #[arg(long, default_value_t = 10.0)]
        seconds: f64,
        #[arg(long, default_value_t = 3)]
        rounds: u32,
    },
    /// Be the target of another bench's bare loop (started by it)
    #[command(hide = true)]
    BareTarget { provider: Provider, source: String, len: usize },
    /// Be the target of another bench (started by it)
    #[command(hide = true)]
    Target {
        provider: Provider,
        nics: u8,
        source: String,
        #[arg(action = clap::ArgAction::Set)]
        busy_poll: bool,
    },
}

/// How a caller learns of the end: by looking or by waiting.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Told {
    Future,
    Flag,
    Callback,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Provider {
    Sim,
    Tcp,
    Net,
    Host,
}

impl Provider {
    /// The addresses of so many NICs, as libfabric wants them.
    fn sources(self, source: &str, nics: usize) -> Vec<Option<&str>> {
        vec![matches!(self, Self::Tcp | Self::Net).then_some(source); nics]
    }

    fn name(self) -> &'static str {
        match self {
            Self::Sim => "sim",
            Self::Tcp => "tcp",
            Self::Net => "net",
            Self::Host => "host",
        }
    }

    /// The same in libfabric's words.
    fn of_libfabric(self) -> &'static str {
        if self == Self::Host { "shm" } else { self.name() }
    }
}

/// The measurement and its duration.
struct Plan {
    provider: Provider,
    nics: u8,
    source: String,
    time: Duration,
    smallest: u64,
    largest: u64,
    /// Those of the sizes that are measured; all if empty.
    sizes: Vec<u64>,
    window: usize,
    busy_poll: bool,
    told: Told,
}

fn main() -> Outcome<()> {
    match Cli::parse().command {
        Command::Target { provider, nics, source, busy_poll } => target::serve(provider, nics, &source, busy_poll),
        Command::Notify { provider, source, count, busy_poll, own } => {
            notify::run(provider, &source, count, busy_poll, own)
        }
        Command::Group { provider, source, peers, rounds } => group::run(provider, &source, peers.into(), rounds),
        Command::Idle { provider, source, seconds } => {
            let time = Duration::try_from_secs_f64(seconds)?;
            let (smallest, largest, window, sizes) = (4096, 4096, 1, Vec::new());
            let (nics, busy_poll, told) = (1, false, Told::Future);
            idle::run(&Plan { provider, nics, source, time, smallest, largest, sizes, window, busy_poll, told })
        }
        Command::Watch { pace_us, seconds } => {
            let paces: Vec<_> = pace_us.into_iter().map(Some).chain([None]).collect();
            watch::run(&paces, Duration::try_from_secs_f64(seconds)?)
        }
        Command::Fence { provider, source, rounds } => harm::fence(provider, &source, rounds),
        Command::Flood { source, rate, seconds, rounds } => {
            harm::flooded(&source, rate, Duration::try_from_secs_f64(seconds)?, rounds)
        }
        Command::BareTarget { provider, source, len } => bare::serve(provider, &source, len),
        Command::Bench {
            provider,
            nics,
            source,
            seconds,
            smallest,
            largest,
            sizes,
            window,
            busy_poll,
            told,
            bare,
            output_file,
            plot,
        } => {
            let time = Duration::try_from_secs_f64(seconds)?;
            let window = window.into();
            let plan = Plan { provider, nics, source, time, smallest, largest, sizes, window, busy_poll, told };
            if measure::Shape::all(&plan).is_empty() {
                return Err(format!("--sizes: {:?} came; none of them is a size that is measured", plan.sizes).into());
            }
            let mut show = |row: &str| println!("{row}");
            let rows = if bare { bare::all(&plan, &mut show)? } else { measure::all(&plan, &mut show)? };
            if let Some(path) = output_file {
                std::fs::write(path, serde_json::to_string_pretty(&document(&plan, bare, &rows)?)?)?;
            }
            if let Some(path) = plot {
                plot::draw(&title(&plan, bare), &rows, &path)?;
            }
            Ok(())
        }
    }
}

/// The measurement, in words.
fn title(plan: &Plan, bare: bool) -> String {
    let how = if plan.busy_poll { ", busy_poll" } else { "" };
    let who = if bare { "libfabric alone" } else { "putget_transfer" };
    let (provider, nics, window) = (plan.provider.name(), plan.nics, plan.window);
    format!("{who} over {provider}, NICs: {nics}, window: {window}{how}")
}

fn document(plan: &Plan, bare: bool, rows: &[Row]) -> Outcome<serde_json::Value> {
    Ok(serde_json::json!({
        "schema": 1,
        "version": env!("CARGO_PKG_VERSION"),
        "engine": if bare { "bare" } else { "putget_transfer" },
        "provider": plan.provider.name(),
        "nics": plan.nics,
        "window": plan.window,
        "seconds": plan.time.as_secs_f64(),
        "busy_poll": plan.busy_poll,
        "processors": std::thread::available_parallelism()?.get(),
        "rows": rows,
    }))
}
