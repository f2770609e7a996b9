#!/usr/bin/env bash
# Correctness, then benchmarks, on a machine with a GPU: bash tests/gpu/run.sh [--out DIR] [--dry-run]
#
# Plain python3 with torch, triton, transformers and pytest; this package need not be installed. The results are
# printed as a short table and written to DIR/results.json (default: ./gpu-results). --dry-run goes through the same
# steps without a GPU: tiny sizes, kernels in Triton's interpreter, figures of no meaning.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
out=gpu-results
dry_run=""
while [ $# -gt 0 ]; do
    case "$1" in
        --out) out="${2:?--out needs a directory}"; shift 2 ;;
        --dry-run) dry_run=--dry-run; shift ;;
        *) echo "unknown argument $1; usage: run.sh [--out DIR] [--dry-run]" >&2; exit 2 ;;
    esac
done
mkdir -p "$out"
out="$(cd "$out" && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
cd "$root"

workers=""
if [ -n "$dry_run" ]; then
    export TRITON_INTERPRET=1
    marker=interpreter
elif python3 -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
    marker=gpu
    if python3 -c "import xdist" 2>/dev/null; then workers="-n 6"; fi # mostly compilation: the device is shared
else
    echo "no CUDA or ROCm device: use --dry-run to go through the steps without one" >&2
    exit 2
fi

echo "== correctness"
correct=0
python3 -m pytest -m "$marker" $workers tests/kernels tests/gpu \
    tests/engine/test_cuda_graphs.py tests/engine/test_execution_gpu.py || correct=$?
echo "== benchmarks"
python3 tests/gpu/benchmarks --out "$out" $dry_run
if [ "$correct" -ne 0 ]; then
    echo "CORRECTNESS FAILED: the figures above are of wrong kernels" >&2
    exit "$correct"
fi
