#!/usr/bin/env bash
# The GPU proof on this machine: builds, then runs every GPU test, on one GPU (emulated ranks) and on all of them.
#
#   tests/gpu/run_device.sh [step...]      steps: build litmus suite1 suiteN sanitize stress    (default: all of them)
#
# Needs CMake, nvcc on PATH, a python3 with torch, and no network. Where pytest is missing, wheels of it (and of pytest-timeout,
# pytest-xdist, hypothesis and what they need) are taken from .whl/ in the checkout.
# Logs and JUnit reports go to $OUT (default: build/device_run); a table comes last.
# Variables: STRESS_ROUNDS, STRESS_SECONDS, LIMIT_<step> in seconds, WORKERS (pytest processes; they share the GPUs).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

# No multicast anywhere; kernels are loaded before a peer can be made to wait for them; a queue for every stream.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

export out=${OUT:-build/device_run}
mkdir -p "$out"
: >"$out/summary.txt"
site=/tmp/putget_site
export PYTHONPATH="$PWD/python:$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
# The GPUs to use: those of CUDA_VISIBLE_DEVICES, or all.
visible=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}
[ -n "$visible" ] || { echo "no GPU here" >&2; exit 2; }
IFS=, read -ra gpu <<<"$visible"
gpus=${#gpu[@]}
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(build litmus suite1 suiteN sanitize stress)
failed=0

wanted() { [[ " ${steps[*]} " == *" $1 "* ]]; }

# run STEP LIMIT_S LOG COMMAND...: runs the command under a time limit and adds a line to the table.
run() {
  local step=$1 limit=$2 log=$out/$3 start=$SECONDS status word
  shift 3
  echo "== $step: $*" >>"$log"
  # An interrupt first, so that pytest still says what it has found.
  timeout --signal=INT --kill-after=15 "$limit" "$@" >>"$log" 2>&1
  status=$?
  case $status in
    0) word=ok ;;
    124 | 137) word="TIME LIMIT ($limit s)" ;;
    *) word="FAILED ($status)" ;;
  esac
  printf '%-44s %-18s %4d s  %s\n' "$step" "$word" $((SECONDS - start)) "$(tail -n 1 "$log" | cut -c1-150)" >>"$out/summary.txt"
  if [ $status -ne 0 ]; then
    echo "-- $step: $word; the end of $log:"
    grep -E '^(E  |FAILED|ERROR|=========|.*Error)| FAILED ' "$log" | tail -n 25
    return 1
  fi
}

prepare_pytest() {
  python3 -c 'import pytest, pytest_timeout, xdist, hypothesis' 2>/dev/null && return
  [ -d .whl ] || { echo "pytest, pytest-timeout, pytest-xdist or hypothesis is missing, and there is no .whl/" >&2; return 1; }
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
}

build() {
  local generator=()
  command -v ninja >/dev/null && generator=(-G Ninja)
  cmake -S . -B build/device "${generator[@]}" -DPUTGET_CUDA=ON -DPUTGET_INPLACE=ON -DPython_EXECUTABLE="$(command -v python3)" &&
    cmake -S tests/gpu/litmus -B build/litmus "${generator[@]}" &&
    cmake --build build/device -j && cmake --build build/litmus -j
}

# Contexts of several workers take turns on a GPU, which tests with bounds of time do not bear: those come by themselves, in
# few workers, since most of their time is setting ranks up and waiting.
suite() { # shared|timed NAME
  local markers="gpu and not timed" workers=${WORKERS:-6}
  [[ $CUDA_VISIBLE_DEVICES == *,* ]] || workers=${WORKERS:-4}
  [ "$1" = shared ] || markers="gpu and timed" workers=$((workers / 2))
  python3 -m pytest -m "$markers" -n "$workers" --dist worksteal -v -p no:cacheprovider tests --ignore=tests/project --ignore=tests/native \
    --ignore=tests/protocol --ignore=tests/gpu/test_litmus.py --durations=40 --durations-min=2 --junitxml="$2.xml"
}

both_suites() { # WHAT LIMIT LOG: all GPU tests; a third of the time is kept for the second part
  local start=$SECONDS
  run "suite, $1" $(($2 * 2 / 3)) "$3.log" bash -c "suite shared '$out/$3'" || failed=1
  run "tests with bounds of time, $1" $(($2 - SECONDS + start)) "$3_timed.log" bash -c "suite timed '$out/$3_timed'" || failed=1
  return $failed
}

sanitize() {
  # torch's own kernels are left out, and its modules are loaded as they are used. The tool's exit status alone does not say
  # that the program came to its end. What it prints is kept as it comes, so that it is there if it never ends.
  local shown=$out/sanitize_$1_$2.log
  CUDA_MODULE_LOADING=LAZY compute-sanitizer --tool "$1" --target-processes all --error-exitcode 1 \
    --require-cuda-init no --kernel-name kns=putget --report-api-errors no --launch-timeout 120 \
    python3 tests/gpu/sanitize_case.py "$2" >"$shown" 2>&1
  local status=$?
  cat "$shown"
  [ $status -eq 0 ] && grep -q 'equal the oracle' "$shown"
}

export -f build suite sanitize
export CUDA_VISIBLE_DEVICES=$visible

litmus_fleet() { # GPUS RANKS [VISIBLE]
  run "litmus, $1 GPU(s), $2 ranks" "${LIMIT_litmus:-60}" litmus.jsonl \
    env ${3:+CUDA_VISIBLE_DEVICES=$3} build/litmus/litmus --gpus "$1" --ranks "$2" || failed=1
}

sanitize_all() { # VISIBLE
  local tool mode modes="single processes"
  if python3 -c 'import putget_transfer._native' 2>/dev/null; then modes+=" domains"; fi
  for mode in $modes; do
    for tool in memcheck racecheck synccheck; do
      CUDA_VISIBLE_DEVICES=$1 run "$tool, $mode" "${LIMIT_sanitize:-90}" sanitize.log bash -c "sanitize $tool $mode" || failed=1
    done
  done
  return $failed
}

if wanted build; then
  run build "${LIMIT_build:-240}" build.log bash -c build || failed=1
fi
prepare_pytest || failed=1

# What needs one GPU runs side by side where there are several.
if wanted sanitize && [ "$gpus" -gt 1 ]; then
  (sanitize_all "${gpu[1]}") &
  sanitizing=$!
fi
if wanted suite1; then
  CUDA_VISIBLE_DEVICES=${gpu[0]} both_suites "1 GPU (emulated ranks)" "${LIMIT_suite1:-180}" suite_1gpu || failed=1
fi
if wanted litmus; then
  litmus_fleet 1 2 "${gpu[0]}"
  litmus_fleet 1 4 "${gpu[0]}"
  litmus_fleet 1 8 "${gpu[0]}"
fi
if wanted sanitize; then
  if [ "$gpus" -gt 1 ]; then
    wait "$sanitizing" || failed=1
  else
    sanitize_all "${gpu[0]}"
  fi
fi

# What needs them all.
if [ "$gpus" -gt 1 ]; then
  if wanted litmus; then
    litmus_fleet "$gpus" "$gpus"
    litmus_fleet 2 4
  fi
  if wanted suiteN; then
    both_suites "$gpus GPUs" "${LIMIT_suiteN:-240}" suite_ngpu || failed=1
  fi
fi
if wanted stress; then
  ranks=$((gpus > 1 ? gpus : 8))
  run "stress, $ranks ranks, $gpus GPU(s)" "${LIMIT_stress:-180}" stress.log python3 tests/stress/rounds.py --ranks $ranks \
    --device cuda --rounds "${STRESS_ROUNDS:-100000}" --seconds "${STRESS_SECONDS:-90}" || failed=1
fi

echo
cat "$out/summary.txt"
exit $failed
