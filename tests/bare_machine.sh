#!/usr/bin/env bash
# bare_machine.sh: whether the README's commands work on a root that holds a Debian 12 base system and the files of the
# last commit, and nothing else. It needs root, mmdebstrap and a Debian mirror, and takes some four minutes on
# two cores. Where it cannot run it says why and exits with 77; as root under CI=true that is a failure.
set -euo pipefail
lockstep_root=$(cd "$(dirname "$0")/.." && pwd)

cannot() {
  echo "bare machine: not run: $1"
  [ "${CI:-}" = true ] && [ "$(id -u)" -eq 0 ] && exit 1
  exit 77
}
git -c safe.directory='*' -C "$lockstep_root" rev-parse -q --verify HEAD >/dev/null 2>&1 || cannot "this is no clone of a git repository"
[ "$(id -u)" -eq 0 ] || cannot "it makes a root file system, which takes root's rights"
command -v apt-get >/dev/null || cannot "this is no Debian, whose mirrors it could use"
unshare --mount --pid --fork true 2>/dev/null || cannot "this container may not make namespaces"
if ! command -v mmdebstrap >/dev/null; then
  [ "${CI:-}" = true ] || cannot "mmdebstrap is not installed"
  # shellcheck source=../cmake/setup.sh
  source "$lockstep_root/cmake/setup.sh"
  lockstep_install mmdebstrap
fi

folder=$(mktemp -d)
child=
trap 'rm -rf --one-file-system "$folder"' EXIT
trap '[ -z "$child" ] || kill -KILL "$child"; exit 1' HUP INT TERM
root=$folder/root
contained() {  # in namespaces, whose mounts and processes end with it
  unshare --mount --mount-proc --pid --fork --kill-child "$@" &
  child=$!
  wait "$child"
}

# The mirror and the proxies that this machine's apt-get uses.
mirror=$(apt-get indextargets --format '$(ORIGIN) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
  sed -n 's/^Debian main //p' | head -n 1)
options=()
for name in Acquire::http::Proxy Acquire::https::Proxy; do
  eval "$(apt-config shell value $name)"
  [ -z "${value:-}" ] || options+=("--aptopt=$name \"$value\"")
  unset value
done
start=$SECONDS
contained mmdebstrap --quiet --variant=apt "${options[@]}" bookworm "$root" ${mirror:+"$mirror"} ||
  cannot "mmdebstrap failed; see its message above"
echo "bare machine: a base system in $((SECONDS - start)) s"
mkdir "$root/lockstep"
git -c safe.directory='*' -C "$lockstep_root" archive HEAD | tar -x -C "$root/lockstep"

cat >"$root/inside" <<'INSIDE'
set -euo pipefail
cd /lockstep
nobody=(setpriv --reuid 65534 --regid 65534 --clear-groups)
chown -R 65534:65534 .
# Without rights it installs nothing, and says what to do.
if "${nobody[@]}" ./tests/run.sh 2>message; then echo "run.sh went on without a compiler"; exit 1; fi
grep -q 'apt-get install .*g++' message && grep -q -- --install message || { cat message; exit 1; }
# As root it installs; the rest needs no rights.
lockstep_root=$PWD
source cmake/setup.sh
lockstep_setup
"${nobody[@]}" ./apps/demo.sh --epochs 1 --train-samples 640
grep -q 'Lockstep with oneDNN' build/configure.log || { cat build/configure.log; exit 1; }
lockstep_build build -- conv2d_test
ctest --test-dir build --output-on-failure -R '^conv2d$'
INSIDE
start=$SECONDS
contained bash -euc '
  mount -t proc proc "$0/proc"
  mount --rbind /dev "$0/dev"
  exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$0" bash /inside' "$root"
echo "bare machine: set up, built and trained in $((SECONDS - start)) s"
