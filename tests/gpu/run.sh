#!/usr/bin/env bash
# On a machine with a GPU:
#     bash tests/gpu/run.sh [--correctness] [--benchmarks] [--engine] [--sweep] [--out DIR] [--dry-run]
#
# Each step takes less than four minutes; without one named, all but the sweep run. --engine compares the engine with
# transformers. Plain python3 with torch and triton; what tests or measures the engine needs transformers, pytest and
# hypothesis too, and is left out, with a line that says so, where these are missing. This package need not be
# installed. Results are appended to DIR/*.jsonl (default: ./gpu-results) one by one, so that a run that is killed keeps
# what it had. --dry-run goes through the same steps without a GPU, on a pretend one (pretend.py): tiny sizes, kernels in
# Triton's interpreter, figures of no meaning (by default in ./gpu-results/dry).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
out=""
dry_run=""
steps=""
while [ $# -gt 0 ]; do
    case "$1" in
        --correctness | --benchmarks | --engine | --sweep) steps="$steps ${1#--}"; shift ;;
        --out) out="${2:?--out needs a directory}"; shift 2 ;;
        --dry-run) dry_run=--dry-run; shift ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) echo "unknown argument $1; choose of --correctness, --benchmarks, --engine, --sweep, --out DIR, --dry-run" >&2
            exit 2 ;;
    esac
done
out="${out:-gpu-results${dry_run:+/dry}}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
processors=$(env -u OMP_NUM_THREADS nproc)
jobs=$((processors < 16 ? processors : 16)) # most of the time is compilation, so they can share the device
export OMP_NUM_THREADS=1 # so many processes with a thread for each core would compete for the cores
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" MINIPAGED_GPU_RECORDS="$out/correctness.jsonl"
cd "$root"

if [ -n "$dry_run" ]; then
    export TRITON_INTERPRET=1
elif ! python3 -c "import torch, triton"; then
    echo "torch and triton are needed: pip install torch triton" >&2
    exit 2
elif ! python3 -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
    echo "no CUDA or ROCm device: use --dry-run to go through the steps without one" >&2
    exit 2
fi

job=""
trap 'kill $job 2>/dev/null; exit 130' INT TERM # (`timeout` passes it on to all processes of the job)

limited() { # SECONDS MODULE [OPTION ...]: a kernel that hangs ends no other step
    local limit="$1" status=0
    shift
    timeout --kill-after 5 "$limit" python3 -m "$@" &
    job=$!
    wait $job || status=$?
    case $status in 124 | 137) echo "$1: stopped after $limit seconds" | tee -a "$out/left-out.txt" >&2 ;; esac
    return $status
}

left() { # SECONDS: so many, or fewer if the step's time ends before
    local rest=$((deadline - SECONDS))
    echo $((rest > $1 ? $1 : rest > 5 ? rest : 5))
}

engine_tests() { # MARKER [OPTION ...]
    local marker="$1"
    shift
    limited "$(left 200)" pytest -p tests.gpu.plugin -m "$marker" "$@" \
        tests/engine/test_{cuda_graphs,execution_gpu,execution_transfer}.py tests/gpu/test_engine.py
}

correctness() {
    local failed=0 workers="" missing deadline=$((SECONDS + 225))
    limited "$(left 160)" tests.gpu.check_kernels --out "$out" --jobs $jobs --seconds 120 $dry_run || failed=1
    [ -n "$dry_run" ] && return $failed
    limited "$(left 30)" tests.gpu.check_kernels --out "$out" --alone || failed=1
    if missing=$(python3 -c "import hypothesis, pytest, transformers, typer" 2>&1); then
        if python3 -c "import xdist" 2>/dev/null; then workers="-n $jobs"; fi
        engine_tests "gpu and alone" || failed=1 # few and short
        engine_tests "gpu and not alone" $workers || failed=1
    else
        echo "the engine's tests are left out: $(tail -1 <<<"$missing")" | tee -a "$out/left-out.txt" >&2
    fi
    return $failed
}

benchmarks() { limited 235 tests.gpu.benchmarks --out "$out" $dry_run; }

engine() { limited 235 tests.gpu.benchmarks engine transformers --out "$out" $dry_run; }

sweep() { limited 235 tests.gpu.sweep --out "$out" --jobs $jobs $dry_run; }

status=0
for step in ${steps:-correctness benchmarks engine}; do
    echo "== $step"
    if ! $step; then
        status=1
        echo "$step: FAILED, see above and $out" >&2
    fi
done
exit $status
