#!/usr/bin/env bash
# Everything that needs a GPU, in at most nine minutes: facts, tests, compute-sanitizer, benchmark.
#
#   OUT=folder SYNCBN_COMMIT=$(git rev-parse --short HEAD) bash benchmarks/gpu_session.sh
#
# One log per stage and the benchmark's JSON go to OUT (benchmarks/results). A stage that fails does
# not stop those after it; the exit status says whether any did. PYTHON: the interpreter.
set -u

SECONDS=0
LIMIT=530      # seconds for everything; ten more for what a killed stage still prints
BENCHMARK=285  # of them kept for the benchmark

python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=".:adapters${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PATH="$PATH:/usr/local/cuda/bin"
[ -d /usr/local/cuda ] && export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}" # where NVVM may be

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_session.sh: expected torch to see a CUDA device with $python, it does not;" \
        "set PYTHON to an interpreter whose torch does" >&2
    exit 2
fi

summary=()
failed=0

left() { echo $((LIMIT - SECONDS - ${1:-0})); } # seconds that are left, some of them kept

smaller() { echo $(($1 < $2 ? $1 : $2)); }

# stage LOG LIMIT COMMAND...: run it, append to its log, note how it went
stage() {
    local log=$out/$1 limit=$2 start=$SECONDS status
    shift 2
    if ((limit < 10)); then
        failed=1
        summary+=("NO TIME  $*")
        return
    fi
    echo "== $* (at most $limit s)" | tee -a "$log"
    timeout -k 5 "$limit" "$@" >>"$log" 2>&1
    status=$?
    if ((status == 0)); then
        summary+=("ok       $((SECONDS - start)) s: $* | $(tail -n 1 "$log")")
        return
    fi
    failed=1
    ((status == 124 || status == 137)) && status="$status, out of time"
    summary+=("FAILED   $((SECONDS - start)) s: $* (status $status; ${log##*/})")
    tail -n 15 "$log"
}

# sanitizer LOG TOOL LIMIT OPTIONS...: memory is not cached, so that each tensor has its bounds
sanitizer() {
    local log=$1 tool=$2 limit=$3
    shift 3
    ((limit < 40)) && limit=0 # it would check nothing
    stage "$log" "$limit" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --tool "$tool" --error-exitcode 86 --print-limit 20 "$@" \
        "$python" benchmarks/gpu_sanitize.py --seconds "$((limit - 20))"
}

# shellcheck disable=SC2329  # a stage calls it
facts() {
    nvidia-smi --format=csv \
        --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.max.mem,power.limit
    nvcc --version | tail -n 2
    compute-sanitizer --version | tail -n 2
    "$python" - <<'END'
import platform
from importlib import metadata

import torch

print("python", platform.python_version(), "cuda", torch.version.cuda)
for name in ("torch", "numpy", "numba", "numba-cuda", "cuda-bindings", "cupy-cuda13x", "triton",
             "pytest", "pytest-timeout", "hypothesis", "rich"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "missing")
print(torch.cuda.device_count(), "GPU:", torch.cuda.get_device_name())
END
}
export -f facts
export python

rm -f "$out"/{facts,tests,sanitize,benchmark,replicas,initcheck}.log

stage facts.log 30 bash -c facts
# Plugins may be missing, and what other packages warn of is not asked here.
stage tests.log 150 "$python" -m pytest tests/device -q -p no:cacheprovider \
    -o addopts=--import-mode=importlib -o minversion=7 -o filterwarnings=default

stage sanitize.log "$(smaller 50 "$(left $((BENCHMARK + 80)))")" \
    "$python" benchmarks/gpu_sanitize.py --seconds 40
# Errors of API calls are torch's and the loaders' way of asking what there is.
sanitizer sanitize.log memcheck "$(smaller 60 "$(left $((BENCHMARK + 40)))")" \
    --report-api-errors no --padding 64
# Of races it sees those in shared memory; what blocks tell each other is compared with float64 above.
sanitizer sanitize.log racecheck "$(smaller 60 "$(left $BENCHMARK)")"

seconds=$(smaller 260 "$(left 20)")
stage benchmark.log "$((seconds + 20))" \
    "$python" benchmarks/gpu.py --seconds "$seconds" --output "$out"

if [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ] 2>/dev/null; then
    stage replicas.log "$(smaller 40 "$(left)")" "$python" benchmarks/gpu_sanitize.py --replicas
fi
if (("$(left)" > 40)); then
    sanitizer initcheck.log initcheck "$(smaller 90 "$(left)")"
fi

echo
sed -n '/Device time/,$p' "$out/benchmark.log" | head -c 8000
echo
grep -h -E 'ERROR SUMMARY|RACECHECK SUMMARY|WRONG' "$out/sanitize.log" "$out/initcheck.log" \
    2>/dev/null | sort | uniq -c | head -n 12
echo "== $SECONDS s, logs in $out"
printf '%s\n' "${summary[@]}" | cut -c 1-220
exit $failed
