#!/usr/bin/env bash
# All that can be known on a GPU, stage by stage, in calls that take as long as you like: kernels are
# compiled, without the device, and what would fail is said; then facts, tests, compute-sanitizer,
# process groups, CUDA graphs, torch.compile, benchmarks.
#
#   bash tools/gpu_session/gpu_session.sh [SECONDS [STAGE...]]
#
#   OUT=folder SYNCBN_COMMIT=$(git rev-parse --short HEAD) bash tools/gpu_session/gpu_session.sh 560
#   DRY_RUN=1 OUT=folder bash tools/gpu_session/gpu_session.sh     # tiny, on a CPU: is all of it in order?
#
# SECONDS: the whole call takes no longer (575, or 3600 for a dry run). A stage is skipped if less is
# left than it costs; the table below says what that is. Call again, with the same OUT, and it goes on
# with the stages that have no result yet, of this commit on this device. STAGE...: only these, once
# more if they have one.
#
# OUT (build/gpu-session) gets stages/NAME.json and NAME.log of each stage, and one JSON with
# everything; what turns that into tables and pictures is in docs/internals/gpu-results.md. A stage
# that fails or takes too long has a result too, and does not stop those after it, except that
# nothing runs if no kernel can be compiled. The exit status is 1 if a stage has failed, 2 if there
# was nothing to run on. PYTHON: the interpreter. WHEELS: a folder of wheels that it lacks.
set -u

#        seconds: it starts with, it ends after
STAGES="
facts       10   30
tests      130  200
sanitize    30   55
shared      60  100
capture     40   60
compiled    90  220
processes   45   65
benchmark  200  320
memcheck    45   60
racecheck   45   60
initcheck   45   90
doctor      60  150
driver      90  150
replicas    20   40"
COMPILE=50 # before all others, at most; it starts with 20

dry=${DRY_RUN:-}
limit=${1:-$([ "$dry" ] && echo 3600 || echo 575)}
asked=("${@:2}")
if ! [[ $limit =~ ^[0-9]+$ ]]; then
    echo "usage: gpu_session.sh [SECONDS [STAGE...]]; got $limit" >&2
    exit 2
fi
for name in "${asked[@]}"; do
    if ! grep -q "^$name " <<<"$STAGES"; then
        echo "gpu_session.sh: expected stages among" \
            "$(awk '{printf "%s ", $1}' <<<"$STAGES")- got $name" >&2
        exit 2
    fi
done

SECONDS=0 # the clock of the whole script
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd) || exit 2
out=${OUT:-$root/build/gpu-session}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
wheels=${WHEELS:+$(cd "$WHEELS" && pwd)}
cd "$root" || exit 2
site=$(mktemp -d) || exit 2
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$site:.:adapters${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PATH="$PATH:/usr/local/cuda/bin"
[ -d /usr/local/cuda ] && export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}" # where NVVM may be
if [ "${WHEELS:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --target "$site" "$wheels"/*.whl || exit 2
fi

# Kernels that no driver has loaded yet do not belong into the user's cache. The next call finds
# those of this one.
export NUMBA_CACHE_DIR=$out/kernels
parts=$out/parts
rm -rf "$parts"
mkdir -p "$parts" "$out/stages" || exit 2

summary=()
failed=0
status=0 # of the last stage
took=0
child= # the stage that runs

# shellcheck disable=SC2329  # a trap calls it
stop() {
    [ "$child" ] && kill "$child" 2>/dev/null && wait "$child" # timeout ends all of the stage
    echo "gpu_session.sh: interrupted after $SECONDS s; logs in $out" >&2
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM

# Merging needs a few seconds at the end.
left() { echo $((limit - SECONDS - 5)); }

smaller() { echo $(($1 < $2 ? $1 : $2)); }

# stage NAME LIMIT COMMAND...: run it, write its log
stage() {
    local name=$1 limit=$2 start=$SECONDS log=$out/$1.log last
    shift 2
    echo "== $name (at most $limit s): $*" | tee "$log"
    timeout -k 5 "$((limit - 5))" "$@" >>"$log" 2>&1 &
    child=$!
    wait $child
    status=$?
    child=
    took=$((SECONDS - start))
    last=$(tail -n 1 "$log" | tr '\t' ' ')
    if ((status == 0)); then
        summary+=("ok       $took s: $name | $last")
        return
    fi
    failed=1
    local why="status $status"
    ((status == 124 || status == 137)) && why="$why, out of time"
    summary+=("FAILED   $took s: $name ($why; ${log##*/}) | $last")
    tail -n 15 "$log"
}

# result NAME [--again]: the JSON of the last stage; with --again it runs in the next call too
result() {
    "$python" tools/gpu_session/gpu_merge.py "$out" --stage "$1" --status $status --seconds $took "${@:2}" ||
        failed=1
}

# shellcheck disable=SC2329  # a stage calls it
facts() {
    if command -v nvidia-smi; then
        nvidia-smi --format=csv \
            --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.max.mem,power.limit
    fi
    command -v nvcc && nvcc --version | tail -n 2
    command -v compute-sanitizer && compute-sanitizer --version | tail -n 2
    "$python" -c 'from syncbn_core.doctor import print_facts
from syncbn_verify.doctor import facts
found = facts()
shown = {topic: found[topic] for topic in ("versions", "arrays", "engines")}  # and no paths
print_facts(shown, print)'
}
# shellcheck disable=SC2329  # a stage calls it
doctor() {
    "$python" -m syncbn_torch doctor --json >"$1"
    local found=$?
    echo "the doctor's exit status is $found"
    ((found == 0 || found == 4)) # 4: one GPU is fewer than all its checks need
}
export -f facts doctor
export python

if [ "$dry" ]; then
    sizes=(9.0 --first 1) one=(--device cpu --seconds 0.1) dryly=(--dry-run)
    export SYNCBN_TEST_DEVICE=cpu OMP_NUM_THREADS=1
    tests=(tests/device/test_processes_on_device.py -k "over_torch and float32")
else
    sizes=() one=(--seconds 35) dryly=()
    tests=(tests/device)
fi

# sanitizer TOOL LIMIT OPTIONS...: memory is not cached, so that each tensor has its bounds
sanitizer() {
    local tool=$1 limit=$2
    shift 2
    command=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1
        compute-sanitizer --tool "$tool" --error-exitcode 86 --print-limit 20 "$@"
        "$python" tools/gpu_session/gpu_sanitize.py --seconds "$((limit - 25))")
    [ "$dry" ] && command=(echo "dry run of: ${command[*]}")
}

# command_of NAME LIMIT: set `command` to what the stage runs; it ends by itself a little earlier
command_of() {
    local name=$1 limit=$2 json=$parts/$1.json
    case $name in
    facts) command=(bash -c facts) ;;
    tests) # plugins may be missing, and what other packages warn of is not asked here
        command=("$python" -m pytest "${tests[@]}" -q -p no:cacheprovider
            --junitxml "$parts/tests.xml" -o addopts=--import-mode=importlib -o minversion=7
            -o filterwarnings=default)
        ;;
    driver)
        command=("$python" tools/gpu_session/gpu_driver.py --json "$json")
        [ "$dry" ] && command=(echo "dry run of: ${command[*]}")
        ;;
    sanitize) command=("$python" tools/gpu_session/gpu_sanitize.py "${one[@]}") ;;
    doctor) command=(bash -c "doctor '$json'") ;;
    replicas) command=("$python" tools/gpu_session/gpu_sanitize.py --replicas) ;;
    # errors of API calls are torch's and the loaders' way of asking what there is
    memcheck) sanitizer memcheck "$limit" --report-api-errors no --padding 64 ;;
    # of races it sees those in shared memory; what blocks tell each other is compared with float64
    racecheck | initcheck) sanitizer "$name" "$limit" ;;
    shared | capture | compiled | processes)
        command=("$python" "tools/gpu_session/gpu_$name.py" "${dryly[@]}" --seconds "$((limit - 12))"
            --json "$json")
        ;;
    benchmark)
        command=("$python" benchmarks/gpu.py "${dryly[@]}" --seconds "$((limit - 20))" --json "$json")
        ;;
    esac
}

if (($(left) < 20)); then
    echo "gpu_session.sh: expected at least 25 seconds, got $limit: nothing can run in that time" >&2
    rm -rf "$parts"
    rmdir "$out/stages" 2>/dev/null
    exit 2
fi
if [ ! -d "$NUMBA_CACHE_DIR/syncbn" ]; then
    stage compile "$(smaller $COMPILE "$(left)")" "$python" tools/gpu_session/gpu_compile.py "${sizes[@]}" \
        --seconds $((COMPILE - 10)) --cache "$NUMBA_CACHE_DIR" --json "$parts/compile.json"
    compiled=$status
    ((compiled == 0)) && tail -n +2 "$out/compile.log"
else
    compiled=
fi

# nothing COMMENT: there is nothing to run on
nothing() {
    echo "gpu_session.sh: $1" >&2
    rm -rf "$parts" "$NUMBA_CACHE_DIR"
    rmdir "$out/stages" 2>/dev/null
    exit 2
}

if ! "$python" benchmarks/gpu_timers.py "$parts/machine.json" "${dryly[@]}"; then
    nothing "expected torch to see a CUDA device with $python, it does not; set PYTHON to an \
interpreter whose torch does"
fi
if [ -z "$dry" ] && [ "$compiled" = 3 ]; then
    nothing "no kernel can be compiled, so nothing else is tried; first do what the line above says"
fi
[ "$compiled" ] && result compile

names=$(awk '{printf "%s ", $1}' <<<"$STAGES")
if ((${#asked[@]})); then
    waiting=" ${asked[*]} "
else
    # shellcheck disable=SC2086  # names are words
    waiting=" $("$python" tools/gpu_session/gpu_merge.py "$out" --waiting $names) "
fi
late=()
while read -r name least most; do
    [[ $waiting == *" $name "* ]] || continue
    if (($(left) < least)); then
        late+=("$name ($least s)")
        continue
    fi
    [ "$dry" ] && most=$((3 * most)) # a CPU also compiles the kernels of the CPU
    seconds=$(smaller "$most" "$(left)")
    command_of "$name" "$seconds"
    stage "$name" "$seconds" "${command[@]}"
    if ((seconds < most && (status == 124 || status == 137))); then
        result "$name" --again
        late+=("$name (cut short)")
    else
        result "$name"
    fi
done < <(grep . <<<"$STAGES")

echo
[[ $waiting == *" benchmark "* && -e $out/benchmark.log ]] &&
    sed -n '/Device time/,$p' "$out/benchmark.log" | head -c 8000
echo
grep -h -E 'ERROR SUMMARY|RACECHECK SUMMARY|WRONG' \
    "$out"/{sanitize,memcheck,racecheck,initcheck,shared,capture,compiled}.log \
    2>/dev/null | sort | uniq -c | head -n 12
echo "== $SECONDS s, logs in $out"
printf '%s\n' "${summary[@]}" | cut -c 1-220
if "$python" tools/gpu_session/gpu_merge.py "$out"; then rm -rf "$parts"; else failed=1; fi
if ((${#late[@]})); then
    echo "no time was left for: ${late[*]}; call again with the same OUT"
elif ((${#asked[@]} == 0)); then
    echo "all stages have a result"
    rm -rf "$NUMBA_CACHE_DIR"
fi
exit $failed
