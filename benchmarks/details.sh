#!/usr/bin/env bash
# Takes the measurements of docs/performance/bounds.md on all visible GPUs, in about four minutes.
#
#   benchmarks/details.sh OUT [part...]     parts: roofline ablate overlap profiles deadlines    (default: all of them)
#
# Reports go to OUT, what was printed to OUT/*.txt; a part that takes longer than its limit leaves what it has. `deadlines` needs
# WITHOUT_DEADLINES, a library built with cmake -DPUTGET_ABLATE=deadlines. Then: python benchmarks/tables.py OUT
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
out=${1:?the folder of the reports}
shift
parts=${*:-roofline ablate overlap profiles deadlines}
mkdir -p "$out"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
export NCCL_NVLS_ENABLE=0 CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32 # no multicast; nothing loads late
ranks=$(python3 -c 'import torch; print(torch.cuda.device_count())')
failed=0

run() { # LIMIT NAME COMMAND...
  local limit=$1 name=$2 start=$SECONDS status=0
  shift 2
  timeout --signal=INT --kill-after=10 "$limit" "$@" >"$out/$name.txt" 2>&1 || status=$? failed=1
  echo "$name: exit code $status after $((SECONDS - start)) s"
  grep -E '^(==|MISMATCH)|correct;|of the longer|long gap|[Ee]rror' "$out/$name.txt" | cut -c1-400
}

for part in $parts; do
  case $part in
    roofline) run 40 roofline python3 -m putget roofline --ep_size "$ranks" --iters 20 --output_file "$out/roofline.json" ;;
    ablate) run 110 ablate python3 benchmarks/series.py --ep_size "$ranks" --out "$out" benchmarks/series_ablate.txt ;;
    profiles) run 110 profiles python3 benchmarks/series.py --ep_size "$ranks" --out "$out/ep$ranks" benchmarks/series_profiles.txt ;;
    overlap)
      run 50 overlap python3 benchmarks/overlap.py --ep_size "$ranks" --tokens 512 --num_sms 4,8,16 --product_rows 512,2048,8192 \
        --combine sentinel,got --output_file "$out/overlap.json"
      ;;
    deadlines)
      run 120 deadlines python3 benchmarks/builds.py --out "$out" deadlines_with \
        "deadlines_without=${WITHOUT_DEADLINES:?a library without deadlines}" -- \
        --ep_size "$ranks" --batches 1,8,32,128,2048 --perfect_router --iters 200
      ;;
    *) echo "unknown part $part" >&2 && exit 2 ;;
  esac
done
exit $failed
