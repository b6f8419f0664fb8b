#!/bin/sh
# tests.sh [TARGET...]: runs the engine's tests over verbs in a virtual machine; all of them unless targets of cargo are named,
# such as `writes` or `verbs`. VM_ARGUMENTS go to the test programs (`--skip ...`). Exit status 77 with a reason where there is no cargo or no virtual machine.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
targets=${*:-writes reads messages order peers soak verbs verbs_wire}
named=$(printf -- '--test %s ' $targets)
# shellcheck disable=SC2086
built=$("$root/scripts/cargo.sh" test --locked --workspace --no-run --message-format=json $named)
programs=$(echo "$built" | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
if test -z "$programs"; then
  echo "$built"
  exit 77
fi
job=$(mktemp)
trap 'rm -f "$job"' EXIT
{
  echo 'export PUTGET_TRANSFER_VERBS=rxe0,rxe1,rxe2,rxe3 PUTGET_TRANSFER_WIRE=rxe10,rxe11,wire0,wire1 RUST_BACKTRACE=1'
  echo 'status=0'
  # One test at a time: the processor is emulated, and each engine has threads of its own.
  for program in $programs; do
    echo "echo \"== $(basename "$program" | sed 's/-[0-9a-f]*$//')\""
    echo "'$program' --test-threads 1 ${VM_ARGUMENTS:-} || status=1"
  done
  echo 'exit $status'
} >"$job"
"$here/run.sh" "$job"
