#!/usr/bin/env bash
# The CPU backend beside gloo and beside plain copies, with as many threads as cores: each rank has its share of them.
#
#   benchmarks/cpu.sh OUT [ranks...]     (default: 4 ranks)      reports: OUT/cpu_ep<ranks>.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?the folder of the reports}
shift
mkdir -p "$out"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
for ranks in "${@:-4}"; do
  python3 -m putget bench --device cpu --ep_size "$ranks" -b 1 -e 2048 --iters 30 --warmup 5 --peers nccl \
    --output_file "$out/cpu_ep$ranks.json"
done
