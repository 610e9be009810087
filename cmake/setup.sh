# Sourced by apps/demo.sh and tests/run.sh: finds out what this machine lacks to build Lockstep, installs that
# where it may (Debian, Ubuntu and their kin), or says what to install; then configures and builds.

# what has to be found | Debian | Fedora | Arch | openSUSE
lockstep_needs=(
  "command:c++          | g++                 | gcc-c++          | gcc             | gcc-c++"
  "command:cmake        | cmake               | cmake            | cmake           | cmake"
  "command:ninja        | ninja-build         | ninja-build      | ninja           | ninja"
  "header:zlib.h        | zlib1g-dev          | zlib-devel       | zlib            | zlib-devel"
  "header:hwy/highway.h | libhwy-dev          | highway-devel    | highway         | highway-devel"
  "header:nlohmann/json.hpp | nlohmann-json3-dev | json-devel    | nlohmann-json   | nlohmann_json-devel"
  "header:CLI/CLI.hpp   | libcli11-dev        | cli11-devel      | cli11           | cli11-devel"
  "header:doctest/doctest.h | doctest-dev     | doctest-devel    | doctest         | doctest-devel"
  "header:eigen3/Eigen/Core | libeigen3-dev   | eigen3-devel     | eigen           | eigen3-devel"
  "header:oneapi/dnnl/dnnl.hpp | libdnnl-dev  | onednn-devel     | onednn          | onednn-devel"
  "header:sodium.h      | libsodium-dev       | libsodium-devel  | libsodium       | libsodium-devel"
)
# What is nice to have: Debian's package, installed where that works.
lockstep_wants=("header:gloo/context.h | libgloo-dev")  # the backend for several hosts

lockstep_has() {  # command:NAME or header:NAME
  case $1 in
    command:*) command -v "${1#*:}" >/dev/null ;;
    header:*)
      local dir more=${CPATH:-}
      for dir in /usr/include /usr/local/include ${more//:/ }; do
        [ -e "$dir/${1#*:}" ] && return 0
      done
      [ "$(uname -m)" = aarch64 ] || return 1
      [ -e "/usr/include/aarch64-linux-gnu/${1#*:}" ] ;;
  esac
}

lockstep_may_install() {  # sets as_root
  as_root=()
  [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
  command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null
}

lockstep_install() {  # PACKAGE ...
  local quiet=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o=Dpkg::Use-Pty=0)
  "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null 2>&1 ||
    { "${quiet[@]}" update >/dev/null && "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null; }
}

lockstep_setup() {
  local row what debian fedora arch suse as_root names=("" "" "" "") count=0
  for row in "${lockstep_wants[@]}"; do
    IFS='|' read -r what debian <<<"${row// /}"
    lockstep_has "$what" || ! lockstep_may_install || { echo "Installing $debian with apt-get, if there is one ..."; lockstep_install "$debian" 2>/dev/null || true; }
  done
  for row in "${lockstep_needs[@]}"; do
    IFS='|' read -r what debian fedora arch suse <<<"${row// /}"
    lockstep_has "$what" && continue
    count=$((count + 1))
    names[0]+=" $debian" names[1]+=" $fedora" names[2]+=" $arch" names[3]+=" $suse"
  done
  [ $count -eq 0 ] && return 0
  echo "Lockstep needs $count more packages:${names[0]}"
  if lockstep_may_install; then
    echo "Installing them with apt-get ..."
    # shellcheck disable=SC2086
    lockstep_install ${names[0]} && return 0
    echo "apt-get could not install them; see its message above." >&2
    return 1
  fi
  {
    echo "They cannot be installed from here (no apt-get, or not root). Please install:"
    echo "  Debian, Ubuntu:  apt-get install${names[0]}"
    echo "  Fedora:          dnf install${names[1]}"
    echo "  Arch:            pacman -S${names[2]}"
    echo "  openSUSE:        zypper install${names[3]}"
    echo "oneDNN may stay out: Eigen then serves, more slowly (cmake -DLOCKSTEP_ONEDNN=OFF)."
    echo "Gloo (Debian: libgloo-dev) may be added: it serves ranks on several hosts."
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
  echo "Configuring and building in $folder ..."
  cmake -S "$lockstep_root" -B "$folder" -G Ninja "${options[@]}" >"$log" 2>&1 || { cat "$log" >&2; return 1; }
  cmake --build "$folder" ${1:+--target "$@"} || return 1
}
