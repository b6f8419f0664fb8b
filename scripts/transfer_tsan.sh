#!/bin/sh
# The transfer engine's tests under ThreadSanitizer. Needs a nightly toolchain with rust-src, because the standard library has
# to be instrumented too (rustup toolchain install nightly --component rust-src).
#
# Left out: the nvlink provider with its imitated driver. There the payload and the word that announces it are seen through
# different mappings of the same memory, and ThreadSanitizer tells memory apart by address.
set -eu
cd "$(dirname "$0")/../transfer"
export RUSTUP_TOOLCHAIN="${RUSTUP_TOOLCHAIN:-nightly}" RUSTFLAGS="-Zsanitizer=thread"
exec cargo test --locked -Zbuild-std --target "$(rustc -vV | sed -n 's/^host: //p')" --target-dir target/tsan --lib --tests \
  -- --test-threads 2 --skip with_an_imitated_driver "$@"
