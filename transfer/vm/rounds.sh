#!/bin/sh
# rounds.sh [ARGUMENT...]: runs the tests of rounds across domains over verbs, with CPU ranks, in a virtual machine; arguments go to
# pytest. They need the package built in place (`make build`, `make transfer`). Exit status 77 with a reason where there is no
# virtual machine.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
job=$(mktemp)
trap 'rm -f "$job"' EXIT
{
  echo "cd '$root'"
  echo 'export PUTGET_TEST_VERBS=rxe0,rxe1,rxe2,rxe3 PYTHONDONTWRITEBYTECODE=1'
  echo "exec .venv/bin/python -m pytest -p no:cacheprovider tests/alltoall/test_domains_verbs.py $*"
} >"$job"
# torch wants more than the oldest processor of QEMU has.
VM_CPU=max "$here/run.sh" "$job"
