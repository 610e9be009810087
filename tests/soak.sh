#!/usr/bin/env bash
# soak.sh [TIMES]: what takes too long for run.sh. Every test of a fault TIMES times (20), the whole matrix of
# equality, ten minutes of random collectives, the errors of element-wise ops on every f32, and the mutants of the
# formulas. Prints a line per part; ends with the number of failures.
set -euo pipefail
times=${1:-20}
lockstep_root=$(cd "$(dirname "$0")/.." && pwd)
cd "$lockstep_root"
# shellcheck source=../cmake/setup.sh
source cmake/setup.sh
lockstep_setup
lockstep_build build -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_TESTS=ON
tests=build/bin/tests
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0

repeat() {  # TIMES NAME [VARIABLE=value ...]
  local n=$1 name=$2 bad=0 start=$SECONDS i
  shift 2
  for ((i = 0; i < n; ++i)); do
    env "$@" "$tests/${name}_test" >"$log" 2>&1 && continue
    bad=$((bad + 1))
    echo "--- $name, run $((i + 1)) of $n:"
    tail -40 "$log"
  done
  failed=$((failed + bad))
  printf '%-20s %3d runs, %d failed, %d s\n' "$name" "$n" "$bad" $((SECONDS - start))
}

before=$(find /dev/shm -maxdepth 1 | wc -l)
for name in faults training_faults launch_faults launcher checkpoint_faults mismatch transfers new_group store gloo hosts; do
  [ -x "$tests/${name}_test" ] && repeat "$times" "$name"
done
for test in "$tests"/cases_*_test; do
  name=$(basename "$test")
  repeat "$times" "${name%_test}"
done
repeat 1 equality_matrix LOCKSTEP_EQUALITY=all
repeat 1 stress LOCKSTEP_STRESS_SECONDS=600
for isa in '' avx2 sse4; do
  repeat 1 accuracy LOCKSTEP_ACCURACY=all LOCKSTEP_MAX_ISA=$isa
done
tests/mutate_formulas.sh || failed=$((failed + 1))
[ "$(find /dev/shm -maxdepth 1 | wc -l)" -eq "$before" ] || { echo "something is left in /dev/shm"; failed=$((failed + 1)); }
echo "$failed failed"
exit $((failed > 0))
