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
lockstep_setup $install
echo "Building the library, the demo and the launcher: two minutes on two cores the first time."
lockstep_build "$lockstep_root/build" -DCMAKE_BUILD_TYPE=Release -- mnist lockstep-run
echo "Training on two ranks: about a minute."
exec "$lockstep_root/build/bin/lockstep-run" -n 2 "$lockstep_root/build/bin/mnist" \
  --data "$lockstep_root/data/mnist" --save "$lockstep_root/build/mnist.safetensors" "$@"
