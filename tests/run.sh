#!/usr/bin/env bash
# Sets up, builds everything in Release and runs every test. Arguments go through to ctest:
#   ./tests/run.sh -R collectives
set -euo pipefail
lockstep_root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=../cmake/setup.sh
source "$lockstep_root/cmake/setup.sh"
lockstep_setup
lockstep_build "$lockstep_root/build" -DCMAKE_BUILD_TYPE=Release
exec ctest --test-dir "$lockstep_root/build" --output-on-failure -j2 "$@"
