#!/usr/bin/env bash
# Sets up, builds everything in Release and runs every test. `--install` first lets it install packages by sudo; the
# other arguments go to ctest:
#   ./tests/run.sh -R collectives
set -euo pipefail
lockstep_root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=../cmake/setup.sh
source "$lockstep_root/cmake/setup.sh"
install=
[ "${1:-}" != --install ] || { install=$1; shift; }
lockstep_setup $install
echo "Building everything: $(lockstep_minutes 14) the first time."
lockstep_build "$lockstep_root/build" -DCMAKE_BUILD_TYPE=Release
exec ctest --test-dir "$lockstep_root/build" --output-on-failure -j2 "$@"
