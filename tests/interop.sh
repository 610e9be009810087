#!/usr/bin/env bash
# interop.sh [BUILD]: two ranks under each real launcher that is installed: torchrun, accelerate, mpirun, srun and
# lockstep-run. Checks what they call themselves, their numbers and a sum, and that torchrun's report quotes a rank's
# own error. A launcher that is missing, or cannot run here, is skipped. TORCHRUN and ACCELERATE name other
# commands, e.g. those of a virtual environment.
set -uo pipefail
build=$(cd "${1:-$(dirname "$0")/../build}" && pwd)
test="$build/bin/tests/environment_test" mlp="$build/bin/mlp"
torchrun=${TORCHRUN:-torchrun} accelerate=${ACCELERATE:-accelerate}
report=("$test" "--test-case=rank: report" --no-skip)
[ -x "$test" ] || { echo "build environment_test first: $test is not there"; exit 2; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0

says() { echo "$1: $2"; }
# expect WHAT NAME: whether $scratch/out has the report of both ranks, launched by NAME.
expect() {
  for r in 0 1; do
    grep -qF "report: launcher=$2 rank=$r/2 local=$r/2 attempt=0 sum=3,30,300" "$scratch/out" || {
      says "$1" "FAILED: no report of rank $r"
      cat "$scratch/out"
      failed=1
      return
    }
  done
  says "$1" ok
}
run() { timeout 120 "$@" >"$scratch/out" 2>&1; }
usable() { command -v "$1" >/dev/null && timeout 60 "$@" >/dev/null 2>&1; }

run "$build/bin/lockstep-run" -n 2 "${report[@]}"
expect lockstep-run lockstep-run

# Underscores are what all versions know. With --redirects and --tee in this form version 1.13 runs on Python 3.11.
torchrun_options=(--nproc_per_node 2 --redirects "0:1,1:1" --tee "0:1,1:1" --log_dir "$scratch/logs" --no_python)
if usable "$torchrun" --standalone "${torchrun_options[@]}" true; then
  for store in --standalone --master_port=29417; do
    run "$torchrun" "$store" "${torchrun_options[@]}" "${report[@]}"
    expect "torchrun $store" torchrun
  done
  if [ -x "$mlp" ]; then
    run "$torchrun" --standalone "${torchrun_options[@]}" "$mlp" /nowhere
    if grep -q "lockstep::IoError: .*/nowhere" "$scratch/out"; then
      says "torchrun's report of an error" ok
    else
      says "torchrun's report of an error" "FAILED: it does not quote the rank"
      cat "$scratch/out"
      failed=1
    fi
  else
    says "torchrun's report of an error" "skipped: $mlp is not there"
  fi
else
  says torchrun "skipped: not installed, or not usable"
fi

if usable "$accelerate" launch --help; then
  run "$accelerate" launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no \
    --main_process_port 29418 --no_python "${report[@]}"
  expect "accelerate launch" torchrun
  # Its launcher of one process sets MASTER_ADDR and no RANK.
  run "$accelerate" launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    --no_python "${report[@]}"
  if grep -qF "rank=0/1 local=0/1 attempt=0 sum=1,10,100" "$scratch/out"; then
    says "accelerate launch, one process" ok
  else
    says "accelerate launch, one process" "FAILED"
    cat "$scratch/out"
    failed=1
  fi
else
  says accelerate "skipped: not installed, or not usable"
fi

if usable mpirun --version; then
  if mpirun --version | grep -q "Open MPI"; then
    options=(--oversubscribe) name="mpirun (Open MPI)"
    [ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
  else
    options=() name="mpiexec (PMI)"
  fi
  run mpirun "${options[@]}" -n 2 "${report[@]}"
  expect mpirun "$name"
else
  says mpirun "skipped: not installed, or not usable"
fi

# Outside an allocation srun asks for one, which may wait for ever.
if [ -n "${SLURM_JOB_ID:-}" ] && usable srun --version; then
  run srun -n 2 -N 1 "${report[@]}"
  expect srun srun
else
  says srun "skipped: not in a Slurm allocation"
fi
exit $failed
