#!/usr/bin/env bash
# Sets up, builds, and trains a convolutional network on MNIST in two processes. Arguments go through to mnist:
#   ./apps/demo.sh --epochs 1 --seed 3
set -euo pipefail
lockstep_root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=../cmake/setup.sh
source "$lockstep_root/cmake/setup.sh"
lockstep_setup
lockstep_build "$lockstep_root/build" -DCMAKE_BUILD_TYPE=Release -- mnist lockstep-run
exec "$lockstep_root/build/bin/lockstep-run" -n 2 "$lockstep_root/build/bin/mnist" \
  --data "$lockstep_root/data/mnist" --save "$lockstep_root/build/mnist.safetensors" "$@"
