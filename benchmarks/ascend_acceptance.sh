#!/usr/bin/env bash
# Check hixl_async over HIXL on a machine with two NPUs, measure it, and pack the results so that they can be sent back.
#
#     benchmarks/ascend_acceptance.sh                         # devices 0 and 1, HIXL's own choice of back-end
#     DEVICES=2,3 benchmarks/ascend_acceptance.sh --option backend=cs
#
# Further arguments go to benchmarks/acceptance.py. PYTHON chooses the interpreter. Nothing is installed, and nothing leaves this
# machine: the archive holds what is printed here, and versions of software and hardware; look at it before you send it.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
DEVICES=${DEVICES:-0,1}
OUT=${OUT:-ascend-acceptance-$(date -u +%Y%m%d-%H%M%S)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export ASCEND_GLOBAL_LOG_LEVEL=${ASCEND_GLOBAL_LOG_LEVEL:-3}

if ! "$PYTHON" -c 'import hixl_async' 2>/dev/null; then
    echo "hixl_async is not built for $PYTHON; run: make build, and PYTHON=.venv/bin/python $0" >&2
    exit 2
fi
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
    echo "note: ASCEND_HOME_PATH is not set; source set_env.sh of CANN if its library is not found" >&2
fi
mkdir -p "$OUT" || exit 2

failed=0
# Run a command; show and keep its output.
step() {
    local name=$1 status
    shift
    echo "── $name"
    "$@" 2>&1 | tee "$OUT/$name.txt"
    status=${PIPESTATUS[0]}
    echo "exit code $status" >>"$OUT/$name.txt"
    return "$status"
}
# The same for commands that only describe the machine, and may be missing.
note() {
    local name=$1
    shift
    { command -v "$1" >/dev/null && "$@"; } >"$OUT/$name.txt" 2>&1 || echo "(none)" >>"$OUT/$name.txt"
}

note npu npu-smi info
note topology npu-smi info -t topo
note kernel uname -a
note python "$PYTHON" -m pip list
env | grep -E '^(ASCEND|HCCL|HIXL|LD_LIBRARY_PATH)' | sort >"$OUT/environment.txt"
git rev-parse HEAD >"$OUT/commit.txt" 2>/dev/null || true

options=() before=
for word in "$@"; do
    [ "$before" = --option ] && options+=(--option "hixl.$word")
    before=$word
done
step info "$PYTHON" -m hixl_async info ${options[@]+"${options[@]}"} || failed=1
step acceptance "$PYTHON" benchmarks/acceptance.py --devices "$DEVICES" --json "$OUT/acceptance.json" "$@" || failed=1

tar -czf "$OUT.tar.gz" "$OUT"
echo
if [ "$failed" -ne 0 ]; then
    echo "FAILED: see above"
elif grep -q "no memory of an NPU" "$OUT/acceptance.txt"; then
    echo "PASSED, on host memory only: to test memory of NPUs, $PYTHON needs torch and torch_npu"
else
    echo "PASSED"
fi
echo "Please send $OUT.tar.gz back, whichever it is."
exit "$failed"
