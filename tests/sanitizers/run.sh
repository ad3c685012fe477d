#!/bin/sh
# Build core and drivers with a sanitizer of gcc, beside the usual build, and run the driver and core tests on them:
#
#   PYTHON=.venv/bin/python tests/sanitizers/run.sh address|thread [pytest arguments]
#
# `make asan` and `make tsan` call it.  It fails if a test fails, or if any process of the run has a report.
set -eu
cd "$(dirname "$0")/../.."

kind=$1
shift
case $kind in
    address) runtime=libasan.so ;;
    thread) runtime=libtsan.so ;;
    *) echo "which sanitizer? address or thread, not '$kind'" >&2; exit 2 ;;
esac

build=build/release-$kind
rm -rf "$build/reports"
mkdir -p "$build/lib" "$build/reports"
find "$build/lib" -name '*.py' -delete # modules that are gone from the source tree
echo "building with -fsanitize=$kind ..."
HIXL_ASYNC_SANITIZE=$kind "$PYTHON" setup.py --quiet build --build-lib "$build/lib"

# The runtime has to be in the process before Python starts; one that cannot be found would be ignored silently.
LD_PRELOAD=$(gcc -print-file-name=$runtime)
test -f "$LD_PRELOAD" || { echo "gcc has no $runtime; on Debian: apt-get install libasan8 libtsan2" >&2; exit 1; }
# So that it finds what throws exceptions; libraries that use it come later.
LD_PRELOAD="$LD_PRELOAD $(gcc -print-file-name=libstdc++.so.6)"

# Reports go into files, because pytest hides those of tests that pass, and a child's exit code may not be checked.
log=$PWD/$build/reports/report
export LD_PRELOAD
export PYTHONPATH="$build/lib"
export PYTHONMALLOC=malloc # else Python's own allocator hides what happens to small blocks
export PYTHONDONTWRITEBYTECODE=1
# Python leaks on purpose at its end, so leaks are left to the tests' balance sheets.
export ASAN_OPTIONS="detect_leaks=0:log_path='$log'"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:log_path='$log'"
export TSAN_OPTIONS="second_deadlock_stack=1:history_size=4:suppressions='$PWD/tests/sanitizers/thread.supp':log_path='$log'"

# -P: the package comes from $PYTHONPATH, not from the folder that we are in.
"$PYTHON" -P -c "import hixl_async._core as core; assert '$build' in core.__file__, core.__file__"

status=0
[ $# -gt 0 ] || set -- tests/drivers tests/core
"$PYTHON" -P -m pytest -p no:cacheprovider -m "not slow" --timeout 600 "$@" || status=$?

set -- "$build"/reports/*
if [ -e "$1" ]; then
    cat "$@"
    echo "$# reports of the $kind sanitizer, printed above" >&2
    exit 1
fi
exit $status
