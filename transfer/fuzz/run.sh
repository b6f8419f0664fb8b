#!/bin/sh
# run.sh [SECONDS [TARGET...]]: fuzzes every decoder of bytes from outside, or those that are named, for so many seconds each (60). Needs a
# nightly toolchain and a C++ compiler; cargo-fuzz is not needed, for this builds the targets as it does. What is found stays in
# `corpus` and, if a target fails, in `artifacts`.
set -eu
cd "$(dirname "$0")"
seconds=${1:-60}
test $# -gt 0 && shift
targets=${*:-$(sed -n 's/^name = "\([a-z]*\)"$/\1/p' Cargo.toml)}
export RUSTUP_TOOLCHAIN="${RUSTUP_TOOLCHAIN:-nightly}"
host=$(rustc -vV | sed -n 's/^host: //p')
export RUSTFLAGS="--cfg fuzzing -Cdebug-assertions -Ccodegen-units=1 -Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
cargo build --release --locked --target "$host" --bins
for target in $targets; do
  mkdir -p "corpus/$target" "artifacts/$target"
  echo "== $target"
  "target/$host/release/$target" -max_total_time="$seconds" -print_final_stats=1 -artifact_prefix="artifacts/$target/" "corpus/$target"
done
