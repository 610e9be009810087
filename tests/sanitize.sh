#!/usr/bin/env bash
# sanitize.sh address|thread: builds with the sanitizers for addresses and undefined behaviour, or the one for threads, and
# runs the tests: with `thread` those that use threads, without oneDNN, whose generated code that sanitizer cannot see.
# LOCKSTEP_TEST_FRACTION=0.1 LOCKSTEP_TEST_SEED=7 runs the seventh tenth of the longest tests.
set -euo pipefail
lockstep_root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=../cmake/setup.sh
source "$lockstep_root/cmake/setup.sh"
lockstep_setup
options=(-DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1" -DLOCKSTEP_APPS=OFF)
case ${1:-} in
  address)
    build=$lockstep_root/build-asan chosen=()
    lockstep_build "$build" "${options[@]}" -DLOCKSTEP_SANITIZE=address,undefined
    ;;
  thread)
    build=$lockstep_root/build-tsan chosen=(-L threads)
    lockstep_build "$build" "${options[@]}" -DLOCKSTEP_SANITIZE=thread -DLOCKSTEP_ONEDNN=OFF -- thread_tests
    ;;
  *) sed -n '2,4s/^# //p' "$0" >&2; exit 2 ;;
esac
exec ctest --test-dir "$build" --output-on-failure -j2 "${chosen[@]}"
