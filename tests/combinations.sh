#!/usr/bin/env bash
# combinations.sh: g++ and clang++, each with the system's oneDNN (Debian 12: 2.6), with oneDNN 3.2 from wheels of
# PyPI, and without. Builds the library in each way and runs the tests that depend on it, and builds everything with
# clang++; then configures with a oneDNN of another version, on another runtime, with another version's header and with
# a broken library, which all must lead to a build without it that says why. Needs pip; takes half an hour on two cores.
set -euo pipefail
lockstep_root=$(cd "$(dirname "$0")/.." && pwd)
cd "$lockstep_root"
# shellcheck source=../cmake/setup.sh
source cmake/setup.sh
lockstep_setup
command -v clang++ >/dev/null || command -v clang++-14 >/dev/null || {
  echo "Installing with apt-get: clang-14 libomp-14-dev"
  lockstep_install clang-14 libomp-14-dev
}
clang=$(command -v clang++ || command -v clang++-14)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m pip download -q --no-deps -d "$work/wheels" onednn-devel-cpu-gomp==2023.2.0 onednn-cpu-gomp==2023.2.0
for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/unpacked"; done
mkdir "$work/onednn-3"
cp -r "$work"/unpacked/*.data/data/* "$work/onednn-3"

failed=0
report() {  # LABEL COMMAND ...: runs it, and shows what it printed where it fails
  local label=$1 start=$SECONDS
  shift
  if "$@" >"$work/log" 2>&1; then
    printf '%-32s ok, %d s\n' "$label" $((SECONDS - start))
  else
    printf '%-32s FAILED\n' "$label"
    tail -n 30 "$work/log"
    failed=$((failed + 1))
  fi
}
configure() {  # LINE cmake options ...: whether configuring says this line
  local line=$1
  shift
  rm -rf "$work/build"
  cmake -S . -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" \
    -DLOCKSTEP_APPS=OFF -DLOCKSTEP_GLOO=OFF "$@" | tee "$work/configured" && grep -q "$line" "$work/configured"
}
build_and_test() {  # LINE cmake options ...
  configure "$@" || return
  local tests=(linear conv2d matmul) list
  [ ! -d "$work/build/tests/CMakeFiles/onednn_test.dir" ] || tests+=(onednn)
  cmake --build "$work/build" --target "${tests[@]/%/_test}" || return
  list=$(IFS='|'; echo "${tests[*]}")
  ctest --test-dir "$work/build" --output-on-failure -R "^($list)\$"
}

for cxx in g++ "$clang"; do
  name=$(basename "$cxx")
  report "$name, the system's oneDNN" build_and_test "with oneDNN" "-DCMAKE_CXX_COMPILER=$cxx"
  report "$name, oneDNN 3" build_and_test "with oneDNN 3.2" "-DCMAKE_CXX_COMPILER=$cxx" "-DCMAKE_PREFIX_PATH=$work/onednn-3"
  report "$name, no oneDNN" build_and_test "without oneDNN.* LOCKSTEP_ONEDNN is off" "-DCMAKE_CXX_COMPILER=$cxx" -DLOCKSTEP_ONEDNN=OFF
done

build_all() { configure "" "$@" -DLOCKSTEP_APPS=ON -DLOCKSTEP_GLOO=ON && cmake --build "$work/build"; }
report "$(basename "$clang"), everything" build_all "-DCMAKE_CXX_COMPILER=$clang"

# altered FILE SED-COMMAND: oneDNN 3 with another header
altered() {
  rm -rf "$work/altered"
  cp -r "$work/onednn-3" "$work/altered"
  sed -i "$2" "$work/altered/include/oneapi/dnnl/$1"
}
altered dnnl_version.h 's/VERSION_MAJOR 3/VERSION_MAJOR 4/'
report "oneDNN 4" configure "without oneDNN.* of version 4" "-DCMAKE_PREFIX_PATH=$work/altered"
for runtime in TBB SYCL DPCPP THREADPOOL; do
  altered dnnl_config.h "s/DNNL_CPU_RUNTIME DNNL_RUNTIME_OMP/DNNL_CPU_RUNTIME DNNL_RUNTIME_$runtime/"
  report "oneDNN on $runtime" configure "without oneDNN.* runs on $runtime" "-DCMAKE_PREFIX_PATH=$work/altered"
done
altered dnnl_version.h 's/VERSION_MINOR 2/VERSION_MINOR 1/'
report "another version's header" configure "without oneDNN.* do not belong together: 3.2.0 and 3.1" \
  "-DCMAKE_PREFIX_PATH=$work/altered"
: >"$work/altered/lib/libdnnl.so"
report "a broken library" configure "without oneDNN.* no program can be linked" "-DCMAKE_PREFIX_PATH=$work/altered"
echo "$failed combinations failed"
exit $((failed > 0))
