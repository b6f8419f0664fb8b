#!/usr/bin/env bash
# The runs that only eight GPUs can make, in parts of a few minutes; it works with two and four as well.
#
#   tests/gpu/run_eight.sh OUT [part...]     parts: tables details layer balancer domains suite    (default: tables details)
#
# tables    EP8 beside FlashInfer and NCCL (benchmarks/series_eight.txt), every size checked against the reference
# details   benchmarks/details.sh: roofline, ablations, overlap, profiles of models
# layer     a whole layer from ids, of two models' sizes, beside NCCL and FlashInfer, every size checked
# balancer  a task that changes, with experts that move
# domains   domains of all sizes that fit, staged on the host and over NVLink
# suite     the GPU suite with a rank a GPU
#
# Reports go to OUT, what was printed to OUT/*.txt. A part that takes longer than its limit leaves what it has. Predictions are in
# lab/2026-11-27_eight_gpus.md.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
out=${1:?the folder of the reports}
shift
parts=${*:-tables details}
mkdir -p "$out"
export PYTHONPATH="$PWD/python:$PWD/transfer/python${PYTHONPATH:+:$PYTHONPATH}"
export NCCL_NVLS_ENABLE=0 CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32 # no multicast; nothing loads late
ranks=$(python3 -c 'import torch; print(torch.cuda.device_count())')
failed=0

run() { # LIMIT NAME COMMAND...
  local limit=$1 name=$2 start=$SECONDS status=0
  shift 2
  timeout --signal=INT --kill-after=10 "$limit" "$@" >"$out/$name.txt" 2>&1 || status=$? failed=1
  echo "$name: exit code $status after $((SECONDS - start)) s"
}

layer() { # NAME EXPERTS_PER_RANK ARGUMENTS...
  local name=$1 experts=$(($2 * ranks))
  shift 2
  run "${LAYER_LIMIT:-150}" "$name" python3 benchmarks/moe_layer.py --from_ids --no_shared --groups 1 1 --num_experts "$experts" \
    --output_file "$out/$name.json" "$@"
}

for part in $parts; do
  case $part in
    tables)
      run "${TABLES_LIMIT:-260}" tables python3 benchmarks/series.py --ep_size "$ranks" --out "$out" benchmarks/series_eight.txt
      python3 benchmarks/contenders.py "$out"/{random,perfect,fp8,sms_8,sms_16,sms_32}.json
      ;;
    details) benchmarks/details.sh "$out" roofline ablate overlap profiles ;;
    layer)
      layer layer_v3 8 -b 8 -e 2048 -f 4 --peers nccl,flashinfer
      layer layer_v4_flash 32 --top_k 6 --hidden_size 4096 -b 8 -e 2048 -f 4 --peers flashinfer
      ;;
    balancer) run 120 balancer python3 benchmarks/balancer_ranks.py --ep_size "$ranks" ;;
    domains) run 240 domains python3 -m pytest -q -n 2 tests/gpu/test_domains_processes.py ;;
    suite) WORKERS=8 run 560 suite tests/gpu/run_device.sh build suiteN ;;
    *) echo "unknown part $part" >&2 && exit 2 ;;
  esac
done
exit $failed
