#!/bin/sh
# The transfer engine's unit tests under miri, which finds undefined behaviour. Needs a nightly toolchain with miri and
# rust-src (rustup toolchain install nightly --component miri,rust-src).
#
# Left out: what calls foreign libraries or parts of the system that miri does not have (sockets, memory files, affinity),
# whole workers, whose deadlines are over before the interpreter has done anything, and one property test that takes minutes.
set -eu
cd "$(dirname "$0")/../transfer"
export RUSTUP_TOOLCHAIN="${RUSTUP_TOOLCHAIN:-nightly}" MIRIFLAGS="-Zmiri-disable-isolation" PROPTEST_CASES=8
exec cargo miri test --locked --target-dir target/miri --lib -- --skip libfabric:: --skip nvlink::channel --skip nvlink::ring --skip host::ring --skip host::tests \
  --skip sys::os:: --skip tcp::sys:: --skip host::sys:: --skip place:: --skip gpu:: --skip gdrcopy:: --skip route::tests::shared_memory --skip worker:: --skip pages_are_covered_once "$@"
