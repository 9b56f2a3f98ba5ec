#!/usr/bin/env bash
# All that can be known on a GPU, in less than ten minutes: it first compiles the kernels, without the
# device, and says what would fail; then facts, tests, compute-sanitizer, process groups, benchmark.
#
#   OUT=folder SYNCBN_COMMIT=$(git rev-parse --short HEAD) bash benchmarks/gpu_session.sh
#   DRY_RUN=1 OUT=folder bash benchmarks/gpu_session.sh     # tiny, on a CPU: is all of it in order?
#
# One JSON with everything and one log per stage go to OUT (benchmarks/results); what turns the JSON
# into tables and pictures is in docs/internals/gpu-results.md. A stage that fails does not stop those
# after it, except that nothing runs if no kernel can be compiled. The exit status is 1 if a stage has
# failed, 2 if there was nothing to run on. PYTHON: the interpreter.
set -u

SECONDS=0      # the clock of the whole script, also of what comes before the device is used
LIMIT=575      # seconds for everything; ten more for what a killed stage still prints
COMPILE=45     # of them at most for compiling without the device
BENCHMARK=265  # of them kept for the benchmark,
PROCESSES=45   # and for the process groups

python=${PYTHON:-python3}
dry=${DRY_RUN:-}
out=${OUT:-benchmarks/results}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=".:adapters${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PATH="$PATH:/usr/local/cuda/bin"
[ -d /usr/local/cuda ] && export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}" # where NVVM may be

# Kernels that no driver has loaded yet do not belong into the user's cache.
SYNCBN_CACHE_DIR=$(mktemp -d) || exit 2
export SYNCBN_CACHE_DIR
trap 'rm -rf "$SYNCBN_CACHE_DIR"' EXIT

parts=$out/parts
rm -rf "$parts" "$out"/{compile,facts,tests,sanitize,memcheck,racecheck,initcheck,processes,benchmark,replicas}.log
mkdir -p "$parts" || exit 2

summary=()
failed=0
status=0 # of the last stage
child=   # the stage that runs

# shellcheck disable=SC2329  # a trap calls it
stop() {
    [ "$child" ] && kill "$child" 2>/dev/null && wait "$child" # timeout ends all of the stage
    echo "gpu_session.sh: interrupted after $SECONDS s; logs in $out" >&2
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM

left() { echo $((LIMIT - SECONDS - ${1:-0})); } # seconds that are left, some of them kept

smaller() { echo $(($1 < $2 ? $1 : $2)); }

# stage NAME LIMIT COMMAND...: run it, write its log, note how it went
stage() {
    local name=$1 limit=$2 start=$SECONDS log=$out/$1.log last
    shift 2
    if ((limit < 10)); then
        status=1
        summary+=("SKIPPED  $name, for lack of time")
        [ "$name" = benchmark ] && failed=1
        printf '%s\t%s\t%s\t%s\n' "$name" 124 0 "no time" >>"$parts/stages.tsv"
        return
    fi
    echo "== $name (at most $limit s): $*" | tee "$log"
    timeout -k 5 "$limit" "$@" >>"$log" 2>&1 &
    child=$!
    wait $child
    status=$?
    child=
    last=$(tail -n 1 "$log" | tr '\t' ' ')
    printf '%s\t%s\t%s\t%s\n' "$name" $status $((SECONDS - start)) "$last" >>"$parts/stages.tsv"
    if ((status == 0)); then
        summary+=("ok       $((SECONDS - start)) s: $name | $last")
        return
    fi
    failed=1
    local why="status $status"
    ((status == 124 || status == 137)) && why="$why, out of time"
    summary+=("FAILED   $((SECONDS - start)) s: $name ($why; ${log##*/}) | $last")
    tail -n 15 "$log"
}

# sanitizer TOOL LIMIT OPTIONS...: memory is not cached, so that each tensor has its bounds
sanitizer() {
    local tool=$1 limit=$2
    shift 2
    ((limit < 40)) && limit=0 # it would check nothing
    local command=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1
        compute-sanitizer --tool "$tool" --error-exitcode 86 --print-limit 20 "$@"
        "$python" benchmarks/gpu_sanitize.py --seconds "$((limit - 20))")
    [ "$dry" ] && command=(echo "dry run of: ${command[*]}")
    stage "$tool" "$limit" "${command[@]}"
}

# shellcheck disable=SC2329  # a stage calls it
facts() {
    if command -v nvidia-smi; then
        nvidia-smi --format=csv \
            --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.max.mem,power.limit
    fi
    command -v nvcc && nvcc --version | tail -n 2
    command -v compute-sanitizer && compute-sanitizer --version | tail -n 2
    "$python" - <<'END'
import platform
from importlib import metadata

import torch

print("python", platform.python_version(), "cuda", torch.version.cuda)
for name in ("torch", "numpy", "numba", "numba-cuda", "cuda-bindings", "cupy-cuda13x", "triton",
             "apex", "pytest", "pytest-timeout", "hypothesis", "rich"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "missing")
if torch.cuda.is_available() and torch.distributed.is_nccl_available():
    print("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
count = torch.cuda.device_count()
print(count, "GPU:", torch.cuda.get_device_name() if count else "none")
END
}
export -f facts
export python

if [ "$dry" ]; then
    sizes=(9.0 --first 1) one=(--device cpu --seconds 0.1) dryly=(--dry-run)
    export SYNCBN_TEST_DEVICE=cpu OMP_NUM_THREADS=1
    tests=(tests/device/test_processes_on_device.py -k check_order)
else
    sizes=() one=(--seconds 40) dryly=()
    tests=(tests/device)
fi

stage compile "$((COMPILE + 5))" "$python" benchmarks/gpu_compile.py "${sizes[@]}" \
    --seconds $COMPILE --cache "$SYNCBN_CACHE_DIR" --json "$parts/compile.json"
((status == 0)) && tail -n +2 "$out/compile.log"
if [ -z "$dry" ]; then
    compiled=$status
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "gpu_session.sh: expected torch to see a CUDA device with $python, it does not;" \
            "set PYTHON to an interpreter whose torch does" >&2
        rm -rf "$parts"
        exit 2
    fi
    if ((compiled == 3)); then
        echo "gpu_session.sh: no kernel can be compiled, so nothing else is tried; first do what" \
            "the line above says" >&2
        rm -rf "$parts"
        exit 2
    fi
fi

stage facts 30 bash -c facts
# Plugins may be missing, and what other packages warn of is not asked here.
stage tests 150 "$python" -m pytest "${tests[@]}" -q -p no:cacheprovider --junitxml "$parts/tests.xml" \
    -o addopts=--import-mode=importlib -o minversion=7 -o filterwarnings=default

kept=$((BENCHMARK + PROCESSES))
stage sanitize "$(smaller 50 "$(left $((kept + 80)))")" \
    "$python" benchmarks/gpu_sanitize.py "${one[@]}"
# Errors of API calls are torch's and the loaders' way of asking what there is.
sanitizer memcheck "$(smaller 60 "$(left $((kept + 40)))")" --report-api-errors no --padding 64
# Of races it sees those in shared memory; what blocks tell each other is compared with float64 above.
sanitizer racecheck "$(smaller 60 "$(left $kept)")"

seconds=$(smaller 60 "$(left $((BENCHMARK + 5)))")
stage processes "$((seconds + 5))" "$python" benchmarks/gpu_processes.py "${dryly[@]}" \
    --seconds "$seconds" --json "$parts/processes.json"

seconds=$(smaller 300 "$(left 20)")
stage benchmark "$((seconds + 20))" \
    "$python" benchmarks/gpu.py "${dryly[@]}" --seconds "$seconds" --output "$out"

gpus=0
[ "$dry" ] || gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((gpus > 1)); then
    stage replicas "$(smaller 40 "$(left)")" "$python" benchmarks/gpu_sanitize.py --replicas
fi
if (("$(left)" > 40)); then
    sanitizer initcheck "$(smaller 90 "$(left)")"
fi

echo
sed -n '/Device time/,$p' "$out/benchmark.log" | head -c 8000
echo
grep -h -E 'ERROR SUMMARY|RACECHECK SUMMARY|WRONG' "$out"/{sanitize,memcheck,racecheck,initcheck}.log \
    2>/dev/null | sort | uniq -c | head -n 12
echo "== $SECONDS s, logs in $out"
printf '%s\n' "${summary[@]}" | cut -c 1-220
if "$python" benchmarks/gpu_merge.py "$out"; then rm -rf "$parts"; else failed=1; fi
exit $failed
