#!/bin/sh
# The transfer engine's tests under ThreadSanitizer. Needs a nightly toolchain with rust-src, because the standard library has
# to be instrumented too (rustup toolchain install nightly --component rust-src).
#
# Left out: the nvlink provider with its imitated driver, and tests that fill memory anew which another process writes, or another
# engine over `host`. There the payload and the word that announces it are seen through different mappings of the same memory, or
# the order is made by the other process: ThreadSanitizer tells memory apart by address, and sees one process.
set -eu
cd "$(dirname "$0")/../transfer"
export RUSTUP_TOOLCHAIN="${RUSTUP_TOOLCHAIN:-nightly}" RUSTFLAGS="-Zsanitizer=thread"
exec cargo test --locked -Zbuild-std --target "$(rustc -vV | sed -n 's/^host: //p')" --target-dir target/tsan --lib --tests \
  -- --test-threads 2 --skip with_an_imitated_driver --skip memory_from_anywhere --skip what_is_fenced_stays_out --skip a_writer_that_was_stopped \
  --skip after_a_fence_nothing_lands "$@"
