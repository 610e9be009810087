# Sourced by scripts under `set -euo pipefail` that set lockstep_root: finds what this machine lacks to build Lockstep,
# installs it where apt-get can and may, or says what to install; then configures and builds.

# lockstep_has command:NAME or header:NAME. Headers are looked for in the folders of CMAKE_PREFIX_PATH too, as CMake does.
lockstep_has() {
  local path=${CPATH:-}${CMAKE_PREFIX_PATH:+:${CMAKE_PREFIX_PATH//://include:}/include}
  case $1 in
    command:c++) command -v "${CXX:-c++}" >/dev/null ;;
    command:*) command -v "${1#*:}" >/dev/null ;;
    header:*) printf '#if !__has_include(<%s>)\n#error\n#endif\n' "${1#*:}" |
      CPATH=${path#:} "${CXX:-c++}" -x c++ -E - >/dev/null 2>&1 ;;
  esac
}

# lockstep_list KIND: sets `missing` to the names of the packages of packages.txt of that kind (need or optional) that
# are missing: Debian's, Fedora's, Arch's, openSUSE's.
lockstep_list() {
  local kind what names i
  missing=("" "" "" "")
  while IFS='|' read -r kind what names; do
    if [ "$kind" != "$1" ] || lockstep_has "$what"; then continue; fi
    IFS='|' read -ra names <<<"$names"
    for i in 0 1 2 3; do missing[i]+="${names[i]:+ ${names[i]}}"; done
  done < <(tr -d ' ' <"$lockstep_root/cmake/packages.txt")
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
  lockstep_list optional
  wanted=("${missing[@]}")
  lockstep_list need
  needed=("${missing[@]}")
  if command -v apt-get >/dev/null && { [ "$(id -u)" -eq 0 ] || [ "${CI:-}" = true ] || [ "${1:-}" = --install ]; }; then
    [ -n "${needed[0]}${wanted[0]}" ] || { echo "  nothing is missing"; return 0; }
    echo "  Installing with apt-get (one to three minutes):${needed[0]}${wanted[0]}"
    # shellcheck disable=SC2086
    lockstep_install ${needed[0]} ${wanted[0]} && return 0
    echo "Trying again without what is not strictly needed ..." >&2
    # shellcheck disable=SC2086
    [ -z "${needed[0]}" ] || lockstep_install ${needed[0]}
    return
  fi
  if [ -z "${needed[0]}" ]; then
    [ -z "${wanted[0]}" ] && echo "  nothing is missing" || echo "  nothing is missing that is needed; optional (names on Debian):${wanted[0]}"
    return 0
  fi
  {
    echo "Packages are missing that Lockstep needs. To install them:"
    echo "  Debian, Ubuntu:  apt-get install --no-install-recommends${needed[0]}${wanted[0]}"
    echo "  Fedora:          dnf install${needed[1]}${wanted[1]}"
    echo "  Arch:            pacman -S${needed[2]}${wanted[2]}"
    echo "  openSUSE:        zypper install${needed[3]}${wanted[3]}"
    [ -z "${wanted[0]}" ] || echo "Of these oneDNN (for speed) and Gloo (for ranks on several hosts) are optional."
    echo "Where they are in folders of their own:  export CMAKE_PREFIX_PATH=FOLDER:FOLDER"
    ! command -v apt-get >/dev/null || echo "Or run this again with --install as its first argument: it then calls sudo apt-get."
  } >&2
  return 1
}

# lockstep_minutes N: how long N minutes of one processor take here, as text.
lockstep_minutes() {
  local processors minutes
  processors=$(nproc)
  minutes=$((($1 + processors - 1) / processors))
  echo "about $minutes minute$([ $minutes -eq 1 ] || echo s) on $processors processor$([ "$processors" -eq 1 ] || echo s)"
}

# lockstep_build FOLDER [cmake options ...] [-- targets ...]
lockstep_build() {
  local folder=$1 options=() log
  shift
  while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
  [ $# -gt 0 ] && shift
  mkdir -p "$folder"
  log=$folder/configure.log
  echo "  Configuring in $folder ..."
  cmake -S "$lockstep_root" -B "$folder" -G Ninja "${options[@]}" >"$log" 2>&1 || { cat "$log" >&2; return 1; }
  sed -n 's/^-- \(Lockstep with.*\)/  \1/p' "$log"
  cmake --build "$folder" ${1:+--target "$@"} || return 1
}
