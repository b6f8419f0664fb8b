#!/bin/sh
# Runs cargo in transfer/ with the arguments given here; `with COMMAND...` runs a command that needs cargo. Where there is no cargo that is new enough, it tries Debian's and
# Ubuntu's packages, if it may; without any it says so and succeeds, because the transfer engine is an optional part.
#
# Why packages: they are signed, come from the mirror that the machine already uses, and need no further host. rustup works
# too (cargo is then found on the PATH), but its site is not reachable from everywhere.
set -u
cd "$(dirname "$0")/../transfer" || exit 1
oldest=$(sed -n 's/^rust-version = "\([0-9.]*\)"$/\1/p' Cargo.toml)

new_enough() {
  version=$("${1:-cargo}" --version 2>/dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p')
  test -n "$version" && test "$(printf '%s\n%s\n' "$oldest" "$version" | sort -V | head -n 1)" = "$oldest"
}

install() {
  test "$(id -u)" = 0 && command -v apt-get >/dev/null || return 1
  export DEBIAN_FRONTEND=noninteractive
  for update in no yes; do
    test "$update" = no || apt-get update -qq
    # Beside cargo itself, Debian has a newer one for its browsers, and Ubuntu several with their version in the name.
    for package in cargo cargo-web $(apt-cache pkgnames cargo-1. | sort -V); do
      candidate=$(apt-cache policy "$package" 2>/dev/null | sed -n 's/^  Candidate: \([0-9.]*\).*/\1/p')
      if test -n "$candidate" && test "$(printf '%s\n%s\n' "$oldest" "$candidate" | sort -V | head -n 1)" = "$oldest"; then
        apt-get install -qq -y --no-install-recommends "$package" gcc libc6-dev
        return
      fi
    done
  done
  return 1
}

PATH="$PATH:${CARGO_HOME:-$HOME/.cargo}/bin"
export PATH
if ! new_enough; then
  install >/dev/null 2>&1
  for named in cargo $(ls /usr/bin | grep -x 'cargo-1\.[0-9]*' | sort -V); do
    new_enough "$named" && break
  done
  if ! new_enough "$named"; then
    echo "transfer: skipped, cargo $oldest or later is not installed (apt-get install cargo, on Debian 12 cargo-web; or rustup)"
    exit 0
  fi
else
  named=cargo
fi
case "${1:-}" in
  with)
    shift
    CARGO=$(command -v "$named") exec "$@" ;;
  fmt | clippy)
    if ! "$named" "$1" --version >/dev/null 2>&1; then
      echo "transfer: cargo $1 skipped, this cargo has no such command (rustup component add rustfmt clippy)"
      exit 0
    fi ;;
esac
exec "$named" "$@"
