#!/bin/bash
# `make gpu`: the checks and the table of a GPU, on a machine whose Python has torch with CUDA and Triton. See docs/gpu.md.
# What else is needed is installed beside it, from the wheels that `make gpu-wheels` laid down, or from the package index.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
out=${OUT:-build/gpu}
site=build/gpu-site
needed="llguidance msgspec safetensors psutil pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis"
mkdir -p "$out"
nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm,clocks.mem --format=csv,noheader
if compgen -G "build/gpu-wheels/*.whl" > /dev/null; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" build/gpu-wheels/*.whl
else
  "$python" -m pip install -q --no-compile --upgrade --target "$site" -c constraints.txt $needed
fi || exit 1
export PYTHONPATH="src:.:tests/support:$site" HEADRACE_CACHE_DIR=${HEADRACE_CACHE_DIR:-$PWD/build/gpu-cache}
timeout -k 5 75 "$python" -m pytest -q -W default -m gpu -n auto --maxprocesses 10 -p no:cacheprovider tests/tensor/kernels/gpu > "$out/tests.txt" 2>&1
tests=$?
tail -n 12 "$out/tests.txt"
timeout -k 5 155 "$python" -m bench.gpu --seconds 125 --output "$out/gpu.json" "$@" | tee "$out/gpu.txt"
table=${PIPESTATUS[0]}
[ "$tests" -eq 0 ] && [ "$table" -eq 0 ]
