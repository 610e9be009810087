#!/usr/bin/env bash
# Sets up, builds, and trains a convolutional network on MNIST in two processes. `--install` first lets it install
# packages by sudo; the other arguments go to mnist:
#   ./apps/demo.sh --epochs 1 --seed 3
set -euo pipefail
lockstep_root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=../cmake/setup.sh
source "$lockstep_root/cmake/setup.sh"
install=
[ "${1:-}" != --install ] || { install=$1; shift; }
echo "1/3 Set-up: what is missing to build Lockstep."
lockstep_setup $install
echo "2/3 Build of the library, the demo and the launcher: $(lockstep_minutes 5) the first time."
lockstep_build "$lockstep_root/build" -DCMAKE_BUILD_TYPE=Release -- mnist lockstep-run
echo "3/3 Training on two ranks: a minute or two. The model goes to build/mnist.safetensors."
exec "$lockstep_root/build/bin/lockstep-run" -n 2 "$lockstep_root/build/bin/mnist" \
  --data "$lockstep_root/data/mnist" --save "$lockstep_root/build/mnist.safetensors" "$@"
