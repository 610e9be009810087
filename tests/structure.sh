#!/usr/bin/env bash
# structure.sh SOURCE INCLUDE: the rules of style that a script can check. A folder includes from those below it only; what runs on
# the CPU stands in a folder cpu/, and what does not is free of it; every public header compiles alone; no file is longer than 600
# lines.
set -euo pipefail
source=$1 include=$2
cd "$source"
folders=(tensor autograd nn optim data distributed apps)
bad=0
for i in "${!folders[@]}"; do
  for above in "${folders[@]:i+1}"; do
    grep -rn --include='*.h' --include='*.cpp' "#include <lockstep/$above/" "${folders[i]}" && { echo "  ^ ${folders[i]} may not include $above"; bad=1; }
  done
done
# Device-free: all of tensor/, autograd/, nn/ and optim/ but cpu/ and the thread pool. They reach a device through kernels alone.
device_free() {
  find tensor autograd nn optim \( -name '*.h' -o -name '*.cpp' \) ! -path '*/cpu/*' ! -name 'parallel.*' -print0 | xargs -0 grep -nE "$1"
}
device_free '#include <lockstep/[a-z]+/cpu/|#include <lockstep/tensor/parallel\.h>' && { echo "  ^ only files in cpu/ may include that"; bad=1; }
device_free '(\.|->)data<' | grep -vE '^tensor/(tensor\.(h|cpp)|safetensors[a-z_]*\.cpp):' && { echo "  ^ only kernels in cpu/ touch elements"; bad=1; }
while read -r lines file; do
  [ "$lines" -le 600 ] || { echo "$file has $lines lines"; bad=1; }
done < <(find "${folders[@]}" tests \( -name '*.h' -o -name '*.cpp' \) -exec wc -l {} + | grep -v ' total$')
export include
alone() {
  echo "#include <lockstep/$1>" | c++ -std=c++20 -fsyntax-only -Wall -Wextra -Werror -x c++ -I"$include" - ||
    { echo "$1 does not compile alone"; return 1; }
}
export -f alone
# What is not installed is seen when the sources beside it compile.
find "${folders[@]::6}" -name '*.h' ! -name '*-inl.h' ! -path '*/cpu/*' \
  \( ! -path 'distributed/*/*' -o -path 'distributed/ddp/*' \) -print0 |
  xargs -0 -P2 -I{} bash -c 'alone {}' || bad=1
exit $bad
