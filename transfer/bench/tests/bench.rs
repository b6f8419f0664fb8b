//! The program as a user runs it, for a moment.
#![allow(missing_docs, clippy::panic, clippy::unwrap_used, clippy::indexing_slicing)]

use std::process::Command;

fn bench(provider: &str) -> Option<serde_json::Value> {
    let file = std::env::temp_dir().join(format!("putget_transfer_bench_{}_{provider}.json", std::process::id()));
    let mut command = Command::new(env!("CARGO_BIN_EXE_putget-transfer"));
    command.args(["bench", "--provider", provider, "--seconds", "0.02", "--largest", "131072", "--nics", "1"]);
    let picture = file.with_extension("svg");
    let output = command.arg("--output_file").arg(&file).arg("--plot").arg(&picture).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("libfabric is not available") {
        println!("skipped: {errors}");
        return None;
    }
    assert!(output.status.success(), "{errors}");
    let document = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    std::fs::remove_file(file).unwrap();
    let drawn = std::fs::read_to_string(&picture).unwrap();
    std::fs::remove_file(picture).unwrap();
    // A dot for each row, a line for each kind, and what they mean.
    assert_eq!(drawn.matches("<circle").count(), 9);
    for words in ["Gbit/s", "64 KiB", "single", "paged", &format!("over {provider}, NICs: 1")] {
        assert!(drawn.contains(words), "{words}");
    }
    // The header and one line for each row.
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 10);
    Some(document)
}

#[test]
fn every_provider_is_measured() {
    for provider in ["sim", "tcp", "host"] {
        let Some(document) = bench(provider) else { return };
        assert_eq!(document["provider"], provider);
        let rows = document["rows"].as_array().unwrap();
        let sizes: Vec<_> =
            rows.iter().map(|row| (row["kind"].as_str().unwrap(), row["bytes"].as_u64().unwrap())).collect();
        let paged = (0..7).map(|power| ("paged", 1024 << power));
        assert_eq!(sizes, [("single", 65536), ("single", 131_072)].into_iter().chain(paged).collect::<Vec<_>>());
        for row in rows {
            let number = |name: &str| row[name].as_f64().unwrap();
            assert!(number("ops_per_s") > 0.0 && number("p50_us") > 0.0 && number("submit_us") > 0.0);
            assert!(number("p50_us") <= number("p90_us") && number("p90_us") <= number("p99_us"));
        }
    }
}

/// Runs the program with these words and returns what it prints.
fn printed(words: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_putget-transfer")).args(words).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn an_end_may_be_told_in_each_way() {
    for told in ["future", "flag", "callback"] {
        let table = printed(&["bench", "--provider", "sim", "--seconds", "0.02", "--sizes", "65536", "--told", told]);
        let row = table.lines().nth(1).unwrap();
        let p50 = row.split_whitespace().nth(4).unwrap().parse::<f64>().unwrap();
        assert!(row.starts_with("single") && p50 > 0.0, "{told}: {table}");
    }
}

#[test]
fn every_pace_of_a_word_is_measured() {
    let table = printed(&["watch", "--pace_us", "20", "--seconds", "0.1"]);
    let rows: Vec<Vec<_>> = table.lines().skip(1).map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), ["20", "none"]);
    for row in rows {
        assert!(row[1..].iter().all(|number| number.parse::<f64>().unwrap() > 0.0), "{table}");
    }
}

/// Returns the printed words about a flood, once the machine has let the stranger send at its rate.
fn flooded() -> String {
    for _ in 0..20 {
        let words = ["flood", "--seconds", "0.5", "--rounds", "1", "--rate", "3000"];
        let output = Command::new(env!("CARGO_BIN_EXE_putget-transfer")).args(words).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        if output.status.success() {
            return String::from_utf8(output.stdout).unwrap();
        }
        assert!(errors.contains("the stranger sent"), "{errors}");
    }
    panic!("the stranger never had its rate");
}

#[test]
fn fences_and_floods_are_measured() {
    let fence = printed(&["fence", "--provider", "tcp", "--rounds", "5"]);
    assert!(fence.starts_with("tcp fence") && fence.contains("p99"), "{fence}");
    let flood = flooded();
    let dropped = flood.split_whitespace().last().unwrap().parse::<u64>().unwrap();
    // The engine looks at 1,000 greetings a second at most.
    assert!(flood.contains("flooded over alone") && dropped > 0, "{flood}");
}

#[test]
fn a_wrong_argument_is_said_by_name() {
    let output = Command::new(env!("CARGO_BIN_EXE_putget-transfer"))
        .args(["bench", "--provider", "sim", "--nics", "5"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("--nics"));
}
