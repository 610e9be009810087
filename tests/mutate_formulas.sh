#!/bin/bash
# Do the tests of the element-wise ops judge? Each formula is changed in one place (a constant, a sign,
# a comparison) in a copy of the tree; the tests are rebuilt against it and one must fail. A soak
# script: about half a minute per mutant, sixty mutants.
#   tests/mutate_formulas.sh [-t seconds] [op ...]      all ops, within 1800 s, unless told otherwise
# Exit status: 0 when every mutant that was run failed, 1 when one survived, 2 when none could be run.
set -u
limit=1800
while getopts t: option; do
  case $option in t) limit=$OPTARG ;; *) exit 2 ;; esac
done
shift $((OPTIND - 1))
source_dir=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
deadline=$((SECONDS + limit))

mkdir "$work/tree"
for entry in CMakeLists.txt cmake lockstep.h tensor autograd nn optim data distributed apps tests \
  docs; do
  [ -e "$source_dir/$entry" ] && cp -r "$source_dir/$entry" "$work/tree/"
done
formulas=$work/tree/tensor/formulas-inl.h
cp "$formulas" "$work/original"
tests=(ops_test elementwise_test dropout_test)

build() { cmake --build "$work/build" --target "${tests[@]}" >"$work/log" 2>&1; }
judge() {  # 0 when all tests pass
  for test in "${tests[@]}"; do
    timeout 300 "$work/build/bin/tests/$test" >"$work/log" 2>&1 || return 1
  done
}

# One instruction set is enough: all compile the same text.
cmake -S "$work/tree" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=None \
  -DCMAKE_CXX_FLAGS="-O1 -DHWY_COMPILE_ONLY_STATIC" ${CMAKE_ARGUMENTS:-} >"$work/log" 2>&1 &&
  build || { tail -20 "$work/log"; exit 2; }
judge || { echo "the tests fail before any change"; tail -20 "$work/log"; exit 2; }

# Mutants, one per line: op, line number, the changed line. A formula's line yields one mutant: the first
# of these changes that applies to it.
awk -v wanted=" $* " '
  /^struct [A-Z]/ { op = $2 }
  /LOCKSTEP_FORMULA|return|V t =/ {
    if (op == "" || $0 ~ /^(using|template <class Op>)/) next
    if (wanted != "  " && index(wanted, " " op " ") == 0) next
    body = $0; head = ""
    if (!match(body, /\{ return|return|= /)) next
    head = substr(body, 1, RSTART + RLENGTH - 1); body = substr(body, RSTART + RLENGTH)
    changed = body
    if (changed ~ /V\(0\.[0-9]+\)/)        sub(/V\(0\.[0-9]/, "V(0.8", changed)
    if (changed == body && changed ~ /V\(1\.[0-9]+\)/) sub(/V\(1\./, "V(1.5", changed)
    if (changed == body && changed ~ /V\(1\)/) sub(/V\(1\)/, "V(1.25)", changed)
    if (changed == body && changed ~ /V\(2\)/) sub(/V\(2\)/, "V(3)", changed)
    if (changed == body && changed ~ / <= /) sub(/ <= /, " > ", changed)
    if (changed == body && changed ~ / >= /) sub(/ >= /, " < ", changed)
    if (changed == body && changed ~ / > /)  sub(/ > /, " < ", changed)
    if (changed == body && changed ~ / < /)  sub(/ < /, " > ", changed)
    if (changed == body && changed ~ / == /) sub(/ == /, " != ", changed)
    if (changed == body && changed ~ / != /) sub(/ != /, " == ", changed)
    if (changed == body && changed ~ / \+ /) sub(/ \+ /, " - ", changed)
    if (changed == body && changed ~ / - /)  sub(/ - /, " + ", changed)
    if (changed == body && changed ~ / \* /) sub(/ \* /, " + ", changed)
    if (changed == body && changed ~ / \/ /) sub(/ \/ /, " * ", changed)
    if (changed == body && changed ~ / -/)   sub(/ -/, " ", changed)
    if (changed == body && changed ~ /dy; /) sub(/dy; /, "-dy; ", changed)
    if (changed == body && changed ~ / [a-z]+\(/) sub(/ [a-z]+\(/, " -&", changed)
    if (changed != body) printf "%s\t%d\t%s\n", op, NR, head changed
  }' "$work/original" >"$work/mutants"

ran=0 survived=0
while IFS=$'\t' read -r op line text; do
  if ((SECONDS >= deadline)); then
    echo "time is up: $ran mutants were run, of $(wc -l <"$work/mutants")"
    break
  fi
  awk -v at="$line" -v text="$text" 'NR == at { print text; next } { print }' "$work/original" \
    >"$formulas"
  ran=$((ran + 1))
  if ! build; then
    echo "does not compile  $op:$line"
  elif judge; then
    echo "SURVIVED          $op:$line ${text# *}"
    survived=$((survived + 1))
  else
    echo "found             $op:$line"
  fi
done <"$work/mutants"
echo "$ran mutants, $survived survived"
((ran == 0)) && exit 2
exit $((survived > 0))
