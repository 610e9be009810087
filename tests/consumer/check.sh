#!/usr/bin/env bash
# check.sh SOURCE BUILD: installs the built library into a temporary folder, builds the user's project against
# it, runs it, and checks that the same project takes the source folder by add_subdirectory.
set -euo pipefail
source=$1 build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/prefix" >/dev/null
cmake -S "$source/tests/consumer" -B "$work/installed" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" \
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS="-Wall -Wextra -Werror" >/dev/null
cmake --build "$work/installed" >/dev/null
"$work/installed/app"

# The programs that the documentation shows compile as they stand there, and those that need no data run.
cat >"$work/program.awk" <<'AWK'
/^```cpp$/ { text = ""; inside = 1; next }
/^```$/ { if (inside && text ~ /int main\(/) printf "%s", text; inside = 0 }
inside { text = text $0 "\n" }
AWK
lib=$(dirname "$(find "$work/prefix" -name liblockstep.so)")
for page in README.md docs/checkpoints.md docs/threads.md docs/adding-an-op.md; do
  awk -f "$work/program.awk" "$source/$page" >"$work/shown.cpp"
  grep -q 'int main' "$work/shown.cpp"
  options=(-std=c++20 -Wall -Wextra -Werror -I"$work/prefix/include")
  case $page in
    README.md | docs/checkpoints.md) c++ "${options[@]}" -fsyntax-only "$work/shown.cpp" ;;
    *)
      c++ "${options[@]}" "$work/shown.cpp" -o "$work/shown" -L"$lib" -llockstep -pthread -Wl,-rpath,"$lib"
      "$work/shown" || { echo "the program of $page fails"; exit 1; }
      ;;
  esac
done

# The umbrella header may pull in the standard library and Lockstep, and nothing else.
echo '#include <lockstep/lockstep.h>' >"$work/umbrella.cpp"
strangers=$(c++ -std=c++20 -I"$work/prefix/include" -M "$work/umbrella.cpp" | tr ' \\' '\n\n' |
  grep '^/' | grep -v -e "^$work" -e '/c++/' -e '/gcc/' -e '/clang/' -e '^/usr/include/[a-z0-9_-]*\.h$' \
  -e '^/usr/include/\(bits\|asm\|asm-generic\|linux\|sys\|gnu\)/' -e '^/usr/include/[a-z0-9_]*-linux-gnu/' || true)
c++ -std=c++20 -I"$work/prefix/include" -M "$work/umbrella.cpp" | grep -q 'include/zlib\.h' && strangers+=" zlib.h"
if [ -n "$strangers" ]; then
  echo "the umbrella header pulls in strangers:" $strangers
  exit 1
fi

cmake -S "$source/tests/consumer" -B "$work/folder" -G Ninja -DLOCKSTEP_FOLDER="$source" -DCMAKE_BUILD_TYPE=Release >/dev/null
ninja -C "$work/folder" CMakeFiles/app.dir/app.cpp.o >/dev/null
echo "installed package, umbrella header and add_subdirectory work"
