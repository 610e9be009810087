# Sourced by scripts under `set -euo pipefail` that set lockstep_root: finds what this machine lacks to build Lockstep,
# installs it where apt-get can and may, or says what to install; then configures and builds.

# what has to be found | Debian | Fedora | Arch | openSUSE
lockstep_needs=(
  "command:${CXX:-c++}  | g++                 | gcc-c++          | gcc             | gcc-c++"
  "command:cmake        | cmake               | cmake            | cmake           | cmake"
  "command:ninja        | ninja-build         | ninja-build      | ninja           | ninja"
  "header:zlib.h        | zlib1g-dev          | zlib-devel       | zlib            | zlib-devel"
  "header:hwy/highway.h | libhwy-dev          | highway-devel    | highway         | highway-devel"
  "header:nlohmann/json.hpp | nlohmann-json3-dev | json-devel    | nlohmann-json   | nlohmann_json-devel"
  "header:CLI/CLI.hpp   | libcli11-dev        | cli11-devel      | cli11           | cli11-devel"
  "header:doctest/doctest.h | doctest-dev     | doctest-devel    | doctest         | doctest-devel"
  "header:eigen3/Eigen/Core | libeigen3-dev   | eigen3-devel     | eigen           | eigen3-devel"
  "header:sodium.h      | libsodium-dev       | libsodium-devel  | libsodium       | libsodium-devel"
)
# What may be missing: fast products, and the backend for ranks on several hosts.
lockstep_wants=(
  "header:oneapi/dnnl/dnnl.hpp | libdnnl-dev  | onednn-devel     | onednn          | onednn-devel"
  "header:gloo/context.h | libgloo-dev        | gloo-devel       |                 |"
)

lockstep_has() {  # command:NAME or header:NAME
  case $1 in
    command:*) command -v "${1#*:}" >/dev/null ;;
    header:*) printf '#if !__has_include(<%s>)\n#error\n#endif\n' "${1#*:}" | "${CXX:-c++}" -x c++ -E - >/dev/null 2>&1 ;;
  esac
}

# lockstep_list ROW ...: sets `missing` to the names of the packages that are missing, on each distribution.
lockstep_list() {
  local row what names
  missing=("" "" "" "")
  for row in "$@"; do
    IFS='|' read -r what names <<<"${row// /}"
    lockstep_has "$what" && continue
    IFS='|' read -ra names <<<"$names"
    for i in 0 1 2 3; do missing[i]+="${names[i]:+ ${names[i]}}"; done
  done
}

# lockstep_apt COMMAND ...: apt-get, which shows how many packages are ready, and its own words when it fails.
lockstep_apt() {
  local as_root=() ready=0 line failed=0 log
  [ "$(id -u)" -eq 0 ] || as_root=(sudo)
  log=$(mktemp)
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive LC_ALL=C apt-get -q -o=Dpkg::Use-Pty=0 "$@" 2>&1 | tee "$log" |
    while read -r line; do
      case $line in "Setting up "*) ready=$((ready + 1)) ;; *) continue ;; esac
      [ ! -t 1 ] || printf '\r  %d packages ready' $ready
    done || failed=1
  [ ! -t 1 ] || echo
  [ $failed -eq 0 ] || tail -n 5 "$log" >&2
  rm -f "$log"
  return $failed
}

lockstep_install() {  # PACKAGE ...
  local install=(install -y --no-install-recommends "$@")
  # The lists of packages may never have been fetched, or be old.
  lockstep_apt "${install[@]}" 2>/dev/null || { lockstep_apt update && lockstep_apt "${install[@]}"; }
}

# lockstep_setup [--install]: 0 when everything that is needed is there. Installs as root, under CI=true, and with
# --install; otherwise it says what is missing and who can install it.
lockstep_setup() {
  local missing needed wanted
  lockstep_list "${lockstep_wants[@]}"
  wanted=("${missing[@]}")
  lockstep_list "${lockstep_needs[@]}"
  needed=("${missing[@]}")
  if command -v apt-get >/dev/null && { [ "$(id -u)" -eq 0 ] || [ "${CI:-}" = true ] || [ "${1:-}" = --install ]; }; then
    [ -n "${needed[0]}${wanted[0]}" ] || return 0
    echo "Installing with apt-get (one to three minutes):${needed[0]}${wanted[0]}"
    # shellcheck disable=SC2086
    lockstep_install ${needed[0]} ${wanted[0]} && return 0
    echo "Trying again without what is not strictly needed ..." >&2
    # shellcheck disable=SC2086
    [ -z "${needed[0]}" ] || lockstep_install ${needed[0]}
    return
  fi
  [ -n "${needed[0]}" ] || return 0
  {
    echo "Packages are missing that Lockstep needs. To install them:"
    echo "  Debian, Ubuntu:  apt-get install --no-install-recommends${needed[0]}${wanted[0]}"
    echo "  Fedora:          dnf install${needed[1]}${wanted[1]}"
    echo "  Arch:            pacman -S${needed[2]}${wanted[2]}"
    echo "  openSUSE:        zypper install${needed[3]}${wanted[3]}"
    [ -z "${wanted[0]}" ] || echo "Optional among Debian's are${wanted[0]}: oneDNN makes products fast, Gloo serves ranks on several hosts."
    ! command -v apt-get >/dev/null || echo "Or run this again with --install as its first argument: it then calls sudo apt-get."
  } >&2
  return 1
}

# lockstep_build FOLDER [cmake options ...] [-- targets ...]
lockstep_build() {
  local folder=$1 options=() log
  shift
  while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
  [ $# -gt 0 ] && shift
  mkdir -p "$folder"
  log=$folder/configure.log
  echo "Configuring in $folder ..."
  cmake -S "$lockstep_root" -B "$folder" -G Ninja "${options[@]}" >"$log" 2>&1 || { cat "$log" >&2; return 1; }
  sed -n 's/^-- \(Lockstep with.*\)/  \1/p' "$log"
  cmake --build "$folder" ${1:+--target "$@"} || return 1
}
