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
)

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

lockstep_setup() {
  local row what debian fedora arch suse missing=() names=("" "" "" "")
  for row in "${lockstep_needs[@]}"; do
    IFS='|' read -r what debian fedora arch suse <<<"${row// /}"
    lockstep_has "$what" && continue
    missing+=("$what")
    names[0]+=" $debian" names[1]+=" $fedora" names[2]+=" $arch" names[3]+=" $suse"
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  echo "Lockstep needs ${#missing[@]} more packages:${names[0]}"
  local as_root=()
  [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
  if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
    local quiet=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o=Dpkg::Use-Pty=0)
    echo "Installing them with apt-get ..."
    # shellcheck disable=SC2086
    "${as_root[@]}" "${quiet[@]}" install -y --no-install-recommends ${names[0]} >/dev/null 2>&1 ||
      { "${as_root[@]}" "${quiet[@]}" update >/dev/null &&
        "${as_root[@]}" "${quiet[@]}" install -y --no-install-recommends ${names[0]} >/dev/null; } && return 0
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
