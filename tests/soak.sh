#!/usr/bin/env bash
# soak.sh [TIMES]: what takes too long for .ci/run, some hours on two cores. Every test of a fault TIMES times (20), the
# whole matrix of equality, ten minutes of random collectives, random programs against plain arrays and PyTorch, the
# errors of element-wise ops on every f32, the mutants of the formulas, all tests under the sanitizers, a bare machine,
# and other compilers and versions of oneDNN. Prints a line per part; ends with the number of failures.
set -euo pipefail
times=${1:-20}
lockstep_root=$(cd "$(dirname "$0")/.." && pwd)
cd "$lockstep_root"
# shellcheck source=../cmake/setup.sh
source cmake/setup.sh
lockstep_setup
lockstep_build build -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_TESTS=ON
tests=build/bin/tests
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

line() { printf '%-20s %s\n' "$1" "$2"; }
repeat() {  # TIMES NAME [VARIABLE=value ...]: a test, that often
  local n=$1 name=$2 bad=0 start=$SECONDS i
  shift 2
  for ((i = 0; i < n; ++i)); do
    env "$@" "$tests/${name}_test" >"$work/log" 2>&1 && continue
    bad=$((bad + 1))
    echo "--- $name, run $((i + 1)) of $n:"
    tail -40 "$work/log"
  done
  failed=$((failed + bad))
  line "$name" "$n runs, $bad failed, $((SECONDS - start)) s"
}
part() {  # NAME COMMAND ...: a script, whose last line is shown
  local name=$1 start=$SECONDS
  shift
  if "$@" >"$work/log" 2>&1 || [ $? -eq 77 ]; then  # 77: it says why it did not run
    line "$name" "$(tail -1 "$work/log"), $((SECONDS - start)) s"
  else
    echo "--- $name:"
    tail -60 "$work/log"
    failed=$((failed + 1))
    line "$name" "failed, $((SECONDS - start)) s"
  fi
}

before=$(find /dev/shm -maxdepth 1 | wc -l)
for name in faults training_faults launch_faults launcher checkpoint_faults mismatch transfers new_group store gloo hosts; do
  [ ! -x "$tests/${name}_test" ] || repeat "$times" "$name"
done
for test in "$tests"/cases_*_test; do
  name=$(basename "$test")
  repeat "$times" "${name%_test}"
done
[ "$(find /dev/shm -maxdepth 1 | wc -l)" -eq "$before" ] || { echo "something is left in /dev/shm"; failed=$((failed + 1)); }
repeat 1 equality_matrix LOCKSTEP_EQUALITY=all
repeat 1 stress LOCKSTEP_STRESS_SECONDS=600
for isa in '' avx2 sse4; do
  repeat 1 accuracy LOCKSTEP_ACCURACY=all LOCKSTEP_MAX_ISA=$isa
done

seed=$(($(date +%s) / 86400 * 1000000))  # other programs every day
echo "random programs from LOCKSTEP_PROGRAMS_SEED=$seed on"
repeat 1 programs LOCKSTEP_PROGRAMS=200000 LOCKSTEP_PROGRAMS_SEED=$seed
if python3 -c 'import torch' 2>/dev/null; then
  LOCKSTEP_PROGRAMS=5000 LOCKSTEP_PROGRAMS_SEED=$seed LOCKSTEP_PROGRAMS_DUMP=$work/programs "$tests/programs_test" >/dev/null || true
  part "programs, PyTorch" python3 tests/programs_torch.py "$work/programs"
else
  line "programs, PyTorch" "not run: python3 has no torch"
fi

part mutants tests/mutate_formulas.sh
LOCKSTEP_TEST_FRACTION=1 part addresses tests/sanitize.sh address
LOCKSTEP_TEST_FRACTION=1 part threads tests/sanitize.sh thread
part "bare machine" tests/bare_machine.sh
if python3 -m pip --version >/dev/null 2>&1; then
  part combinations tests/combinations.sh
else
  line combinations "not run: python3 has no pip"
fi
echo "$failed failed"
exit $((failed > 0))
